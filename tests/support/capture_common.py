"""What tests of ``capture_step`` without a GPU share.

A stand-in records as a CUDA graph does, seen from outside: recording computes nothing, a replay runs no Python of the
caller's, leaves no trace of what it writes, and leaves its results where the recording left them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import ALL, full
from runtime_common import Raw, local, members_of, runtime_of
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard
from dtensor_gtp._schedule.runtime import Runtime
from dtensor_gtp.graphs.capture_step import CapturedStep
from dtensor_gtp.graphs.record_step import Surroundings, places_of_sums, read_values, write_values


class OnHost:
    """Records by running the step on the side: what it has changed is put back, and a replay runs it again."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, optimizers
        self.sharded = model
        self.events: list[str] = []

    @contextmanager
    def eager(self, *, is_last: bool) -> Iterator[None]:
        self.events.append("last" if is_last else "eager")
        yield

    def tensors(self) -> list[torch.Tensor]:
        """What a step writes to and does not make: it stays at its address."""
        params = [local(param).detach() for param in self.model.parameters()]
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return [
            *params,
            *self.model.buffers(),
            *(value for state in states for value in state.values() if isinstance(value, torch.Tensor)),
        ]

    def places(self) -> list[Any]:
        return [*((param, "grad") for param in self.model.parameters()), *places_of_sums(runtime_of(self.sharded))]

    @contextmanager
    def runtime_unchanged(self) -> Iterator[None]:
        weights = members_of(self.sharded).weights
        kept = [(target, target.kept) for weight in weights for target in weight.gatherables]
        owed = [(group.pending_grad, set(group.pending_grad.owed)) for group in members_of(self.sharded).groups]
        for target, _ in kept:
            target.kept = None
        yield
        for target, gathered in kept:
            target.kept = gathered
        for pending, before in owed:
            pending.owed = before

    def check_nothing_is_kept(self) -> None:
        assert all(weight.for_forward.kept is None for weight in members_of(self.sharded).weights)

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.events.append("record")
        self.check_nothing_is_kept()
        places = self.places()
        found = read_values(places)
        written = [*self.tensors(), *(local(grad) for grad in found if grad is not None)]
        values = [tensor.clone() for tensor in written]
        outputs = step()
        self.check_nothing_is_kept()
        left = read_values(places)
        for tensor, value in zip(written, values, strict=True):
            tensor.copy_(value)

        def replay() -> None:
            self.events.append("replay")
            write_values(places, found)
            # No hook of an optimizer runs in a replay, no version tells of it, and the runtime's state is not touched.
            versions = torch.autograd._unsafe_preserve_version_counter((*self.model.parameters(), *written))
            with mock.patch.object(Runtime, "note_step"), versions, self.runtime_unchanged():
                again = step()
            targets, sources = [*results(outputs), *left], [*results(again), *read_values(places)]
            for target, source in zip(targets, sources, strict=True):
                if target is not None and target is not source:
                    local(target).copy_(local(source))

        return replay, outputs


def results(outputs: Any) -> list[Any]:
    """What a step has returned, also in dataclasses: a graph writes to tensors wherever they are."""
    leaves = tree_leaves(outputs)
    return tree_leaves([vars(leaf) if is_dataclass(leaf) else leaf for leaf in leaves])


def captured_step(
    fn: Any, module: nn.Module, optimizers: Any, runtimes: Any, recorder: Any, warmup_steps: int, max_graphs: int
) -> CapturedStep[..., Any]:
    return CapturedStep(fn, Surroundings(module, optimizers, runtimes), recorder, warmup_steps, max_graphs)


class Setting:
    """A model, its optimizer and the same in plain torch.

    Args:
        plain: The model in plain torch; a few layers unless given.
        sharded: Name of the module of it that ``gtp_shard`` is called on.
        is_stepping: Whether a step calls the optimizer.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
        is_stepping: bool = True,
        plain: Callable[[], Any] = lambda: nn.Sequential(nn.Linear(12, 12), Raw(), nn.LayerNorm(12)),
        sharded: str = "",
    ) -> None:
        torch.manual_seed(0)
        self.plain: Any = plain().to(dtype)
        self.model: Any = copy.deepcopy(self.plain)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("gtp",))
        self.sharded = gtp_shard(self.model.get_submodule(sharded), mesh, schedule=ALL, mp_policy=policy)
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1), foreach=False, capturable=True)
            for m in (self.plain, self.model)
        ]
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["capturable"] = None  # only GPUs have it; the stand-in can do without
            optimizer.param_groups[0]["lr"] = 0.1
        self.recorder = OnHost(self.model, [self.optimizers[1]])
        self.recorder.sharded = self.sharded
        self.is_stepping = is_stepping
        self.num_runs = 0

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, scale: float) -> dict[str, Any]:
        self.num_runs += 1
        output = model(x) * scale
        loss = output.float().square().mean()
        loss.backward()
        if self.is_stepping:
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss, "rows": [output]}

    def captured(self, steps: int = 0, **options: Any) -> CapturedStep[..., Any]:
        """``run`` of the model, after so many steps."""

        def step(x: torch.Tensor, scale: float = 1.0) -> Any:
            return self.run(self.model, self.optimizers[1], x, scale)

        optimizers = [self.optimizers[1]] if self.is_stepping else []
        captured = self.captured_as(step, optimizers, **{"warmup_steps": 3, **options})
        self.check_steps(captured, steps)
        return captured

    def captured_as(
        self, step: Callable[..., Any], optimizers: Any = None, warmup_steps: int = 2, max_graphs: int = 8
    ) -> CapturedStep[..., Any]:
        """Any step, by default with the optimizer of the model."""
        optimizers = [self.optimizers[1]] if optimizers is None else optimizers
        runtimes = [runtime_of(self.sharded)]
        return captured_step(step, self.model, optimizers, runtimes, self.recorder, warmup_steps, max_graphs)

    def check_steps(self, step: CapturedStep[..., Any], num: int, num_rows: int = 4) -> None:
        for seed in range(num):
            self.check(step, rows(seed, num_rows))

    def check(self, step: CapturedStep[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        want = self.run(self.plain, self.optimizers[0], x, *(args or [1.0]), **kwargs)
        got = step(x, *args, **kwargs)
        torch.testing.assert_close(got["loss"], want["loss"].detach())
        torch.testing.assert_close(got["rows"][0], want["rows"][0].detach())
        assert not got["loss"].requires_grad
        self.compare()
        return got

    def compare(self, **tolerance: float) -> None:
        for (name, a), b in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(full(a), b, msg=lambda m, n=name: f"{n}: {m}")
            assert (a.grad is None) == (b.grad is None), name
            if b.grad is not None:
                torch.testing.assert_close(full(a.grad), b.grad, msg=lambda m, n=name: f"grad of {n}: {m}", **tolerance)


def rows(seed: int, num: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num, 12, generator=torch.Generator().manual_seed(seed)).to(dtype)
