"""What is in memory while blocks run backward: weights of one block and of what comes next, and the gradients of one
launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from counting import noted
from runtime_common import members_of
from test_capture_blocks import one_of
from test_groups_together import Even, Headed
from test_gtp_shard_groups import CHOSEN, LOW, WIDTH, Model

from dtensor_gtp import gtp_shard
from dtensor_gtp._comm import context
from dtensor_gtp._params.group_memory import GroupLeaves
from dtensor_gtp._schedule import choose_schedule
from dtensor_gtp._schedule.choose_schedule import block_nbytes
from dtensor_gtp._schedule.launch_reductions import ReductionLaunches
from dtensor_gtp._schedule.runtime import Runtime


@contextmanager
def each_block_alone(make: Any = Headed, *, is_one_host: bool = True, **options: Any) -> Iterator[nn.Module]:
    """A model whose blocks are launched one by one."""
    with (
        one_of(2) as (mesh, _),
        mock.patch.object(choose_schedule, "_LEAST_AHEAD", 0),
        mock.patch.object(context, "is_one_host", return_value=is_one_host),
    ):
        yield gtp_shard(make(6, block=Even), mesh, schedule=CHOSEN, **options)


def step(model: nn.Module) -> None:
    model(torch.randn(8, WIDTH)).sum().backward()


def test_a_block_is_freed_before_the_next_one_is_read() -> None:
    with each_block_alone() as model:
        step(model)
        most: list[int] = []

        def note(leaves: GroupLeaves, version: Any) -> None:
            most.append(sum(group.leaves.storage.nbytes() > 0 for group in members_of(model).groups))

        loss = model(torch.randn(8, WIDTH)).sum()
        with noted(GroupLeaves, "allocate", note):
            loss.backward()
    assert max(most) == 1, most  # the one before, when the next one is gathered


def test_a_head_is_not_in_memory_when_blocks_are_reduced() -> None:
    """The first step finds out what is used."""
    seen: dict[str, list[str]] = {}

    def note(launches: Any, together: Any) -> None:
        sent = [reduction.complete.args[0] for reduction in launches._comm.reductions._reductions]
        names = [each.weight.fqn for gradients in sent for each in gradients]
        seen["+".join(gradient.weight.fqn for gradient in together)] = names

    with each_block_alone() as model:
        step(model)
        with noted(ReductionLaunches, "launch", note):
            step(model)
    assert seen["layers.5"] == []


class Skipped(Even):
    """A layer that is dropped: it returns its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_blocks_that_return_their_inputs_are_freed() -> None:
    """Their backward begins and ends at the same op."""
    with each_block_alone(lambda num, block: Model(num, block=Skipped)) as model:
        step(model)
        held: list[int] = []
        loss = model(torch.randn(8, WIDTH)).sum()
        with noted(Runtime, "_finish_blocks", lambda runtime: held.extend(map(is_held, members_of(model).groups))):
            loss.backward()
    assert held == [False] * 6


def is_held(group: Any) -> bool:
    return group.in_backward.held is not None or bool(group.in_backward.uses)


class Stages(nn.Module):
    def __init__(self, num_blocks: int, block: type[nn.Module]) -> None:
        super().__init__()
        stages = (nn.Sequential(*(block() for _ in range(num_blocks))) for _ in range(2))
        self.stages = nn.Sequential(*stages)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stages(x)


def test_a_stage_of_groups_is_no_block() -> None:
    """As much is gathered ahead as a block needs, not a stage of ConvNeXt."""
    with each_block_alone(Stages) as model:
        step(model)
        members = members_of(model)
        assert len(members.groups) == 12
        assert block_nbytes([model], members.weights) == 4 * 2 * 2 * WIDTH**2


@contextmanager
def dtypes_of_head() -> Iterator[list[torch.dtype]]:
    """Those in which its gradient is launched."""
    seen: list[torch.dtype] = []

    def note(launches: Any, together: Any) -> None:
        seen.extend(gradient.buffer.dtype for gradient in together if gradient.weight.fqn == "last.weight")

    with noted(ReductionLaunches, "launch", note):
        yield seen


@pytest.mark.parametrize(("is_one_host", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_head_beside_groups_travels_as_its_gemm_has_written_it(is_one_host: bool, expected: torch.dtype) -> None:
    """Within a host, alone, and not as a sum of microbatches."""
    with each_block_alone(is_one_host=is_one_host, mp_policy=LOW) as model, dtypes_of_head() as seen:
        for is_synced in (True, False, True):
            model.set_requires_gradient_sync(is_synced)
            step(model)
    assert seen == [expected, torch.float32]


def test_a_head_without_groups_keeps_what_the_gemm_adds() -> None:
    """Recorded blocks, which are no groups, send what the GEMM adds: eager steps shall have their bits."""

    def make(num_blocks: int, block: type[nn.Module]) -> Model:
        return Headed(0, block=block)

    with each_block_alone(make, mp_policy=LOW) as model, dtypes_of_head() as seen:
        step(model)
    assert seen == [torch.float32]
