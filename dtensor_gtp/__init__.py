"""Generalized Tensor Parallelism for PyTorch: shard every weight, gather each just in time."""

from ._version import __version__
from .api import GTPModule, UnshardHandle, gtp_shard
from .placement import GTPShard
from .policy import MixedPrecisionPolicy, SchedulePolicy
from .report import ShardingReport, sharding_report

__all__ = [
    "GTPModule",
    "GTPShard",
    "MixedPrecisionPolicy",
    "SchedulePolicy",
    "ShardingReport",
    "UnshardHandle",
    "__version__",
    "gtp_shard",
    "sharding_report",
]
