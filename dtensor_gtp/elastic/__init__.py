"""Non-uniform replicas: training continues when a data-parallel replica has lost some of its ranks.

torchft, which does so for whole replicas, drops a replica with its first rank that fails. Of two replicas with two GPUs
each, one would go on, with at most half of the throughput. Here three GPUs go on, with 0.70 of it (4 x H200, see
docs/benchmarks.md).
"""

from .attach import synchronize_replicas
from .handover import handover_path, leave_state, take_state
from .mesh import ElasticMesh, MemoryModel, RankMemory, ReplicaSavePlanner, check_memory, nonuniform_mesh
from .parallel import BlockColwiseParallel, BlockRowwiseParallel
from .plan import SyncPlan, plan_sync
from .recovery import HeldState, StateLostError, hold_state, recover_state
from .regroup import Survivors, num_waiting, regroup
from .replicas import BatchShare, Place, Replica, ReplicaLayout, WeightSpec, plan_replicas, replicas_of
from .sync import ReplicaSync, clip_grad_norm_
from .watch import RanksLostError, RankWatch, join

__all__ = [
    "BatchShare",
    "BlockColwiseParallel",
    "BlockRowwiseParallel",
    "ElasticMesh",
    "HeldState",
    "MemoryModel",
    "Place",
    "RankMemory",
    "RankWatch",
    "RanksLostError",
    "Replica",
    "ReplicaLayout",
    "ReplicaSavePlanner",
    "ReplicaSync",
    "StateLostError",
    "Survivors",
    "SyncPlan",
    "WeightSpec",
    "check_memory",
    "clip_grad_norm_",
    "handover_path",
    "hold_state",
    "join",
    "leave_state",
    "nonuniform_mesh",
    "num_waiting",
    "plan_replicas",
    "plan_sync",
    "recover_state",
    "regroup",
    "replicas_of",
    "synchronize_replicas",
    "take_state",
]
