"""The quick tier, ``pytest tests -m quick``: tests that planted bugs name, in files that catch many of them quickly."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from planted_bugs import BUGS

_OF_ONE_PROCESS = """
    addends agreement capture_step copy_engine dtensor_threads elastic_handover elastic_plan elastic_regroup
    elastic_transfer float8_gemms gtp_placement_ops load_messages memory_of_backward mesh mesh_start native_storage
    placement plan_report planner_calibrate planner_search planner_simulation planner_user_tp quant_cast quantize
    random_casts report_text schedule
"""
_OF_RANKS = """
    closed_groups counted_writes debugging_aids errors gtp_shard_fsdp gtp_shard_gradients gtp_shard_groups
    gtp_shard_guesses gtp_shard_launches gtp_shard_norms gtp_shard_overlap gtp_shard_reads gtp_shard_switches
    held_groups silent_params silent_writes
"""
FILES = frozenset(f"test_{name}.py" for name in (_OF_ONE_PROCESS + _OF_RANKS).split())
_SLOW = "test_extreme_magnitudes", "test_sum_with_tensor_parallelism_of_equal_and_unequal_sizes"


@cache
def quick_tests() -> frozenset[str]:
    """As node ids."""
    tests = (test for bug in BUGS.values() for test in bug.node_ids())
    return frozenset(test for test in tests if Path(test.split("::")[0]).name in FILES and not test.endswith(_SLOW))


def is_quick(node_id: str) -> bool:
    """Whether this test, or its class or file, is quick."""
    name = node_id.partition("[")[0]
    return not quick_tests().isdisjoint((name, name.rpartition("::")[0]))
