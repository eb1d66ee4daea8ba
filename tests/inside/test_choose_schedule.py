"""What is chosen from which facts. Nothing is measured; all ranks choose the same."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from common import GlooTest
from mesh_common import fake_world
from runtime_common import runtime_of
from torch.distributed.device_mesh import init_device_mesh

from dtensor_gtp import MixedPrecisionPolicy, SchedulePolicy, gtp_shard, quantize_, sharding_report
from dtensor_gtp._comm.context import CommContext
from dtensor_gtp._schedule import choose_schedule, first_forward
from dtensor_gtp._schedule.choose_schedule import Facts, adds_addends, block_nbytes, choose
from dtensor_gtp.policy import Schedule

MiB, GiB = 1 << 20, 1 << 30
GPUS = Facts(None, block_nbytes=436 * MiB, free_nbytes=64 * GiB)
CPUS = Facts("a mesh of 'cpu' has no copy engines", block_nbytes=436 * MiB, free_nbytes=0)


def test_one_block_ahead() -> None:
    """In one launch with copy engines, in two with kernels. The bytes of gradients in flight are the same."""
    by_copies, by_kernels = (choose(SchedulePolicy(), facts)[0] for facts in (GPUS, CPUS))
    assert (by_copies.prefetch_nbytes, by_copies.coalesce_nbytes) == (436 * MiB, 436 * MiB)
    assert (by_kernels.prefetch_nbytes, by_kernels.coalesce_nbytes) == (436 * MiB, 218 * MiB)
    assert (by_copies.coalesce_grad_nbytes, by_copies.max_inflight_reduce_scatters) == (256 * MiB, 1)
    assert (by_kernels.coalesce_grad_nbytes, by_kernels.max_inflight_reduce_scatters) == (128 * MiB, 2)
    assert by_copies.keep_nbytes == by_kernels.keep_nbytes == 0


def test_a_fake_group_stands_for_the_gpus_of_a_host() -> None:
    fake = dataclasses.replace(GPUS, no_copy_engines="the process group is fake")
    schedule = choose(SchedulePolicy(), fake)[0]
    assert schedule.gather_backend == "process_group"
    real = dataclasses.replace(choose(SchedulePolicy(), GPUS)[0], gather_backend="process_group", reduce_scatter="ring")
    assert schedule == real


def test_symmetric_memory_takes_the_place_of_the_head() -> None:
    """Between forward and backward ``fully_shard`` holds embedding and head. Who has memory to spend holds the head."""
    assert not choose(SchedulePolicy(), GPUS)[0].keep_last
    assert choose(SchedulePolicy(), CPUS)[0].keep_last
    assert choose(SchedulePolicy(memory="most_speed"), GPUS)[0].keep_last


def test_windows_have_bounds() -> None:
    for block, ahead, together in ((1000, 32, 32), (100 * MiB, 100, 50), (2 * GiB, 512, 512)):
        schedule = choose(SchedulePolicy(), dataclasses.replace(CPUS, block_nbytes=block))[0]
        assert (schedule.prefetch_nbytes, schedule.coalesce_nbytes) == (ahead * MiB, together * MiB)


@pytest.mark.parametrize(("groups", "together"), [(50 * MiB, 32), (300 * MiB, 50), (10 * GiB, 100)])
def test_small_groups_travel_together(groups: int, together: int) -> None:
    facts = dataclasses.replace(CPUS, block_nbytes=25 * MiB, group_nbytes=groups)
    schedule, reasons = choose(SchedulePolicy(), facts)
    assert (schedule.coalesce_nbytes, schedule.coalesce_grad_nbytes) == (together * MiB, together * MiB)
    assert any("several small blocks" in reason for reason in reasons) == (together > 32)
    for other in ({"group_nbytes": 0}, {"single_nbytes": 2 * groups}):
        assert choose(SchedulePolicy(), dataclasses.replace(facts, **other))[0].coalesce_nbytes == 32 * MiB
    assert choose(SchedulePolicy(memory="least"), facts)[0].coalesce_nbytes == 32 * MiB


def test_backends_are_tried_on_gpus_alone() -> None:
    (on_gpus, _), (on_cpus, reasons) = choose(SchedulePolicy(), GPUS), choose(SchedulePolicy(), CPUS)
    assert (on_gpus.gather_backend, on_gpus.reduce_scatter) == ("auto", "auto")
    assert (on_cpus.gather_backend, on_cpus.reduce_scatter) == ("process_group", "ring")
    assert any("no copy engines" in reason for reason in reasons)


def test_what_a_policy_asks_for_is_given() -> None:
    asked = {"gather_backend": "process_group", "reduce_scatter": "all_to_all", "prefetch_nbytes": 7, "keep_nbytes": 9}
    for options, expected in (
        (asked, asked),
        ({"prefetch_nbytes": 0}, {"prefetch_depth": 0}),
        ({"memory": "most_speed"}, {"keep_nbytes": 8 * GiB}),  # a part of what is free
        ({"memory": "most_speed", "keep_nbytes": 3}, {"keep_nbytes": 3}),
    ):
        schedule = choose(SchedulePolicy(**options), GPUS)[0]
        assert {name: getattr(schedule, name) for name in expected} == expected
    least = Schedule(prefetch_nbytes=256 * MiB, coalesce_nbytes=218 * MiB, keep_last=False, wgrad_first=False)
    assert choose(SchedulePolicy(memory="least"), GPUS)[0] == least


def test_each_choice_has_a_reason() -> None:
    for policy in (SchedulePolicy(), SchedulePolicy(memory="least"), SchedulePolicy(prefetch_nbytes=1)):
        text = "; ".join(choose(policy, CPUS)[1])
        for what in ("gathered ahead", "in one launch", "kept until backward", "gathers by", "reduce-scatters by"):
            assert what in text, text


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)
        self.blocks = nn.ModuleList([Block(32), Block(64), Block(16)])


def _sharded(model: nn.Module, policy: SchedulePolicy) -> nn.Module:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
    return gtp_shard(model, mesh, schedule=policy, mp_policy=MixedPrecisionPolicy(torch.bfloat16))


def test_the_largest_block_counts() -> None:
    with fake_world(4):
        for are_calls in (False, True):  # a call of its own makes classes of its own
            model = Net()
            for block in model.blocks if are_calls else ():
                _sharded(block, SchedulePolicy(min_shard_numel=0))
            runtime = runtime_of(_sharded(model, SchedulePolicy(min_shard_numel=0)))
            assert block_nbytes([model], runtime.members.weights) == 2 * 8 * 64 * 2
        assert block_nbytes([], runtime.members.weights) == 2 * (100 * 8 + 2 * 8 * (32 + 64 + 16))


def test_blocks_count_as_their_groups_send_them() -> None:
    """In the compute dtype, whatever the recipe."""
    with fake_world(4):
        blocks = (nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)) for _ in range(4))
        model = _sharded(quantize_(nn.Sequential(*blocks), "mxfp8"), SchedulePolicy(min_shard_numel=0))
        model(torch.ones(2, 128))
        members = runtime_of(model).members
        assert len(members.groups) == 4
        assert block_nbytes([model], members.weights) == 2 * 128 * 128 * 2


def test_chosen_leaves_nothing_open() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with fake_world(4):
        with pytest.raises(ValueError, match="a Sequential that is not sharded"):
            SchedulePolicy.chosen(model)
        _sharded(model, SchedulePolicy(memory="most_speed"))
        with pytest.raises(ValueError, match="has not run yet"):
            SchedulePolicy.chosen(model)
        model(torch.ones(2, 64))
        chosen = SchedulePolicy.chosen(model)
        assert (chosen.gather_backend, chosen.reduce_scatter) == ("process_group", "ring")
        again = _sharded(nn.Sequential(nn.Linear(8, 640), nn.Linear(640, 8)), chosen)
        again(torch.ones(2, 8))
        assert SchedulePolicy.chosen(again) == chosen
        assert dict(chosen._numbers) == vars(choose(chosen, CPUS)[0])


def test_whether_gradients_will_be_added_is_known_before_ranks_meet() -> None:
    """As the schedule has it then, if the GPUs can map each other's memory."""
    least, rings = {"memory": "least"}, ({"reduce_scatter": kind} for kind in ("ring", "all_to_all"))
    for options in ({}, least, {**least, "reduce_scatter": "copy_engine"}, *rings):
        policy = SchedulePolicy(**options)
        for facts in (GPUS, CPUS):
            chosen = choose(policy, facts)[0].reduce_scatter
            assert adds_addends(policy, facts) == (chosen != "ring"), (policy, facts)
    assert not adds_addends(SchedulePolicy(gather_backend="process_group"), GPUS), "reductions follow gathers"


def test_copy_engines_gather_where_groups_hold_the_smaller_part() -> None:
    """Their reductions are NCCL's all the same: autograd makes the gradients of a group outside of any ring."""
    experts = dataclasses.replace(GPUS, group_nbytes=300 * MiB, single_nbytes=3600 * MiB)
    small = dataclasses.replace(GPUS, group_nbytes=3600 * MiB, single_nbytes=300 * MiB)
    on_cpus = dataclasses.replace(CPUS, group_nbytes=1)
    for facts, gathers in ((experts, "auto"), (small, "process_group"), (on_cpus, "process_group")):
        schedule, reasons = choose(SchedulePolicy(), facts)
        assert (schedule.gather_backend, schedule.reduce_scatter) == (gathers, "ring"), facts
        assert any("groups" in reason for reason in reasons) or gathers != "process_group" or facts.no_copy_engines
    assert choose(SchedulePolicy(), CPUS)[0].wgrad_first
    assert not choose(SchedulePolicy(), small)[0].wgrad_first, "a head is freed before its gradient is made"
    asked = choose(SchedulePolicy(gather_backend="copy_engine"), small)[0]
    assert asked.gather_backend == "copy_engine"


def test_gtp_shard_connects_where_reductions_will_have_a_communicator_of_their_own() -> None:
    def connected(width: int, **options: Any) -> mock.Mock:
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 8)).requires_grad_(
            options.pop("is_trained", True)
        )
        with (
            mock.patch.object(first_forward, "no_copy_engines", return_value=None),
            mock.patch.object(choose_schedule, "_SMALL_NUMEL", 32 * 32),
            mock.patch.object(CommContext, "connect_ahead") as connect,
        ):
            gtp_shard(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), **options)
        return connect

    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("gtp",))
        connected(32).assert_called_once_with(mesh.get_group(), torch.bfloat16, torch.float32)
        connected(128, schedule=SchedulePolicy(memory="least")).assert_called_once()
        connected(128).assert_not_called()  # copy engines may gather
        connected(32, is_trained=False).assert_not_called()


class TestChoices(GlooTest):
    """All ranks run with one schedule, whatever each of them sees."""

    def test_the_least_free_memory_counts_on_all_ranks(self) -> None:
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            model = gtp_shard(nn.Linear(64, 64), mesh, schedule=SchedulePolicy(memory="most_speed"))
            free = (self.rank + 2) * GiB
            with mock.patch.object(first_forward, "_free_nbytes", return_value=free):
                model(torch.ones(2, 64))
            self.assertEqual(SchedulePolicy.chosen(model).keep_nbytes, 2 * GiB // 8)

    def test_the_report_gives_each_reason(self) -> None:
        model = gtp_shard(nn.Linear(64, 64), self.gtp_mesh(), schedule=SchedulePolicy())
        self.assertEqual(sharding_report(model).choices, ())
        model(torch.ones(2, 64)).sum().backward()
        report = sharding_report(model)
        for text in ("gathered ahead 32.0 MiB: the largest block has", "a mesh of 'cpu' has no copy engines"):
            self.assertIn(text, str(report))
        self.assertEqual(runtime_of(model).setup.schedule.gather_backend, "process_group")
