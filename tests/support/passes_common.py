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
from common import ALL, GROUPS, rows_of_rank
from runtime_common import Raw, check_step, make_rows
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.common_utils import TestCase

from dtensor_gtp import gtp_shard

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
        return self.last(x)


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
        with register(model):
            usual(model, x)

    return step


def is_whole(x: torch.Tensor) -> bool:
    """The rows of all ranks: this is the reference."""
    return len(x) == NUM_ROWS


def steps_in(cls: type) -> dict[str, Step]:
    """The functions of a class, by their names."""
    return {name.replace("_", " "): step for name, step in vars(cls).items() if not name.startswith("__")}


SETTINGS: dict[str, dict[str, Any]] = {"single weights": {"schedule": ALL}, "groups": {"schedule": GROUPS}}
CASES_OF_A_MODEL = 8  # after more steps its gradients are small


def check_cases(
    cases: Mapping[str, Step],
    mesh: DeviceMesh,
    refused: Mapping[str, str] | None = None,
    settings: Mapping[str, dict[str, Any]] = SETTINGS,
) -> None:
    """Each of ``cases``, and a usual step after it, equal one process; then nothing is left of it. Those in ``refused``
    raise an error that matches where weights are single."""
    rows = [make_rows(seed, NUM_ROWS, WIDTH, torch.float64) for seed in range(3)]
    close = {"rtol": 1e-5, "atol": 1e-7}
    for setting, options in settings.items():
        for number, (name, step) in enumerate(cases.items()):
            if number % CASES_OF_A_MODEL == 0:
                reference = Model().double()  # rounding would add up over the steps
                model = gtp_shard(copy.deepcopy(reference), mesh, **options)
                check_step(reference, model, mesh, rows[0], usual, is_idle=False, **close)
            try:
                if setting == "single weights" and name in (refused or {}):
                    with TestCase().assertRaisesRegex(RuntimeError, refused[name]):
                        step(model, rows_of_rank(rows[1], mesh))
                    model.zero_grad()
                else:
                    check_step(reference, model, mesh, rows[1], step, is_idle=False, **close)
                check_step(reference, model, mesh, rows[2], usual, **close)
            except Exception as error:
                raise AssertionError(f"{name}, {setting}: {error!r}") from error
