"""Non-uniform replicas: training goes on when a data-parallel replica has lost some of its ranks."""

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

__all__ = [
    "BatchShare",
    "Box",
    "Bucket",
    "MemoryModel",
    "RankMemory",
    "Replica",
    "ReplicaLayout",
    "Segment",
    "SyncPlan",
    "WeightSpec",
    "box_of_rank",
    "check_memory",
    "choose_sizes",
    "plan_replicas",
    "plan_sync",
    "replicas_of",
    "segments_of",
]
