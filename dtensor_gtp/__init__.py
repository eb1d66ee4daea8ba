"""Generalized Tensor Parallelism for PyTorch: shard every weight, gather each just in time."""

from torch.distributed.fsdp import MixedPrecisionPolicy

from . import _dtensor, elastic  # noqa: F401 (_dtensor prepares DTensor for GTPShard)
from ._version import __version__
from .api import GTPModule, UnshardHandle, gtp_shard, register_gtp_forward_method
from .graphs.capture_blocks import CapturedBlocks, capture_blocks
from .graphs.capture_step import CapturedStep, capture_step
from .mesh import WeightMesh, init_weight_mesh
from .placement import GTPShard
from .planner.api import plan
from .planner.text import PlanResult
from .policy import SchedulePolicy
from .quant.api import quantize_
from .random import MeshRNG
from .report import ShardingReport, sharding_report

__all__ = [
    "CapturedBlocks",
    "CapturedStep",
    "GTPModule",
    "GTPShard",
    "MeshRNG",
    "MixedPrecisionPolicy",
    "PlanResult",
    "SchedulePolicy",
    "ShardingReport",
    "UnshardHandle",
    "WeightMesh",
    "__version__",
    "capture_blocks",
    "capture_step",
    "elastic",
    "gtp_shard",
    "init_weight_mesh",
    "plan",
    "quantize_",
    "register_gtp_forward_method",
    "sharding_report",
]
