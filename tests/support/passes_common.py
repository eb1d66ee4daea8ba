"""Passes of a small model, one by one, beside one process: what the tests of unusual passes share.

``step(model, rows)`` makes a pass with its backward, on the model with this rank's rows, on the reference with all.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from common import ALL, rows_of_rank
from runtime_common import Raw, check_step
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.common_utils import TestCase

from dtensor_gtp import SchedulePolicy, gtp_shard

WIDTH, NUM_ROWS = 8, 8
Step = Callable[[Any, torch.Tensor], Any]


class Block(nn.Module):
    """Fused and generic weights and whole parameters."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.raw = Raw(width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.raw(self.down(self.up(self.norm(x)).relu()))


class Model(nn.Module):
    """``call`` calls a block."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        result: torch.Tensor = self.last(x)
        return result


def mean(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def usual(model: Any, x: torch.Tensor) -> None:
    mean(model(x)).backward()


@contextlib.contextmanager
def calling(model: Any, call: Callable[[nn.Module, torch.Tensor], Any]) -> Iterator[None]:
    before, model.call = model.call, call
    try:
        yield
    finally:
        model.call = before


def by_call(call: Callable[[nn.Module, torch.Tensor], Any]) -> Step:
    """A usual step whose forward calls blocks in another way."""

    def step(model: Any, x: torch.Tensor) -> None:
        with calling(model, call):
            usual(model, x)

    return step


def hooked(register: Callable[[Any], Any]) -> Step:
    """A usual step with a hook."""

    def step(model: Any, x: torch.Tensor) -> None:
        handle = register(model)
        try:
            usual(model, x)
        finally:
            handle.remove()

    return step


def is_whole(x: torch.Tensor) -> bool:
    """The rows of all ranks: this is the reference."""
    return len(x) == NUM_ROWS


class Cases(dict[str, Step]):
    """Steps by name."""

    def add(self, step: Step) -> Step:
        self[step.__name__.replace("_", " ")] = step
        return step


def check_cases(cases: Cases, mesh: DeviceMesh, refused: Mapping[str, str]) -> None:
    """Each of ``cases`` between two usual steps equals one process, with single weights and with blocks as groups.
    Those in ``refused`` raise an error that matches where weights are single, and leave nothing behind."""
    rows = [torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    failed = []
    for schedule in (ALL, SchedulePolicy(min_shard_numel=0)):
        for name, step in cases.items():
            torch.manual_seed(0)
            reference = Model()
            model = gtp_shard(copy.deepcopy(reference), mesh, schedule=schedule)
            try:
                for number, each in enumerate((usual, step, usual)):
                    if each is step and name in refused and schedule is ALL:
                        with TestCase().assertRaisesRegex(RuntimeError, refused[name]):
                            step(model, rows_of_rank(rows[number], mesh))
                        model.zero_grad()
                        continue
                    check_step(reference, model, mesh, rows[number], each, is_idle=False, rtol=1e-4, atol=1e-5)
            except Exception as error:
                failed.append(f"{name}, {'single weights' if schedule is ALL else 'groups'}: {error!r}")
    assert not failed, "\n".join(failed)
