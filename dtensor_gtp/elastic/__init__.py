"""Non-uniform replicas: training goes on when a data-parallel replica has lost some of its ranks."""

from .attach import synchronize_replicas
from .mesh import ElasticMesh, nonuniform_mesh
from .plan import (
    Box,
    Bucket,
    MemoryModel,
    RankMemory,
    Segment,
    SyncPlan,
    WeightSpec,
    box_of_rank,
    check_memory,
    plan_sync,
    segments_of,
)
from .replicas import BatchShare, Replica, ReplicaLayout, choose_sizes, plan_replicas, replicas_of
from .sync import ReplicaSync, clip_grad_norm_

__all__ = [
    "BatchShare",
    "Box",
    "Bucket",
    "ElasticMesh",
    "MemoryModel",
    "RankMemory",
    "Replica",
    "ReplicaLayout",
    "ReplicaSync",
    "Segment",
    "SyncPlan",
    "WeightSpec",
    "box_of_rank",
    "check_memory",
    "choose_sizes",
    "clip_grad_norm_",
    "nonuniform_mesh",
    "plan_replicas",
    "plan_sync",
    "replicas_of",
    "segments_of",
    "synchronize_replicas",
]
