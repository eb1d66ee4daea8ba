"""Activation checkpointing: each weight is gathered once more, for the recomputation, and all else stays as it is."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from common import GlooTest, environment
from runtime_common import (
    WIDTH,
    Raw,
    assert_idle,
    check_step,
    counted,
    make_rows,
    num_gathers,
    shard_copy,
    square_loss,
    square_step,
)
from schedules import explicit
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from dtensor_gtp import GTPModule


class Block(nn.Module):
    """A fused and two generic weights, and whole parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.raw = Raw()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(self.norm(x)))
        result: torch.Tensor = self.raw(x) + x
        return result


class Blocks(nn.Module):
    """Blocks between two layers that are not recomputed."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        result: torch.Tensor = self.last(x)
        return result


class RawFunctions(nn.Module):
    """Recomputes functions that are no modules and read raw parameters of their module, one of them twice."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.use_reentrant = use_reentrant

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.first) * self.scale @ self.second

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.second.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for function in (self.mix, self.turn, self.mix):
            x = checkpoint(function, x, use_reentrant=self.use_reentrant)
        return x


class TestRecompute(GlooTest):
    @contextmanager
    def gathers(self, model: nn.Module) -> Iterator[dict[str, int]]:
        """Fills the dict with the gathers of each weight in the block."""
        before, used = num_gathers(model), {}
        with counted() as counts:
            yield used
            used.update({name: value - before[name] for name, value in num_gathers(model).items()})
            assert counts().all_gathers == sum(used.values())

    def test_r24_checkpointed_weights_are_gathered_three_times(self) -> None:
        for use_reentrant, depth in ((True, 2), (False, 0)):
            mesh = self.gtp_mesh()
            torch.manual_seed(0)
            reference = Blocks(use_reentrant)
            schedule = explicit(prefetch_depth=depth, min_shard_numel=0)
            model = shard_copy(reference, mesh, schedule=schedule)
            for seed in range(3):
                with self.gathers(model) as used:
                    check_step(reference, model, mesh, make_rows(seed), square_step)
                # The outer layers: the first needs no gather in backward; the last is kept at the turn.
                expected = dict.fromkeys(used, 3) | {"first.weight": 1, "last.weight": 2 if seed == 0 else 1}
                assert used == expected, f"reentrant {use_reentrant}, depth {depth}, step {seed}: {used}"

    def test_selective_policies(self) -> None:
        """The runtime's own ops, of which a recomputation launches others, are nothing that a policy may count or save:
        a saved gather would leave the recomputation a buffer that nobody has filled."""

        class Selective(Blocks):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                for block in self.blocks:
                    context_fn = functools.partial(create_selective_checkpoint_contexts, self.policy)
                    x = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
                result: torch.Tensor = self.last(x)
                return result

        gemms = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        cases: Any = ((gemms, 0), (lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE, 2))
        for policy, depth in cases:
            torch.manual_seed(0)
            reference = Selective(None)
            reference.policy = policy
            mesh = self.gtp_mesh()
            with environment(DTENSOR_GTP_DEBUG="poison"):
                model = shard_copy(reference, mesh, schedule=explicit(prefetch_depth=depth, min_shard_numel=0))
            for seed in range(3):
                with self.gathers(model) as used:
                    check_step(reference, model, mesh, make_rows(seed), square_step)
                # Both policies save what the fused linear returns, so that nobody recomputes it.
                expected = {name: 2 if "linear" in name else 3 for name in used}
                expected |= {"first.weight": 1, "last.weight": 2 if seed == 0 else 1}
                if depth > 0 and seed == 0:
                    # The first backward guesses that nothing is recomputed: it gathers once for nothing, but for
                    # the parameters that it uses first.
                    for name in used.keys() - {"first.weight", "last.weight"}:
                        expected[name] += not name.startswith("blocks.2.raw")
                assert used == expected, f"depth {depth}, step {seed}: {used}"

    def test_checkpointing_the_whole_model(self) -> None:
        for use_reentrant, mesh in ((True, self.hsdp_mesh()), (False, self.gtp_mesh())):
            torch.manual_seed(1)
            reference = Blocks(None)
            model = shard_copy(reference, mesh)

            def step(module: nn.Module, x: torch.Tensor, use_reentrant: bool = use_reentrant) -> None:
                x = x.clone().requires_grad_()
                checkpoint(module, x, use_reentrant=use_reentrant).square().mean().backward()

            for seed in range(3):
                with self.gathers(model) as used:
                    check_step(reference, model, mesh, make_rows(seed), step)
                assert used == dict.fromkeys(used, 3), f"reentrant {use_reentrant}, step {seed}: {used}"

    def test_checkpointed_functions_that_read_raw_parameters(self) -> None:
        for use_reentrant, mesh in ((True, self.gtp_mesh()), (False, self.hsdp_mesh())):
            torch.manual_seed(2)
            reference = RawFunctions(use_reentrant)
            with environment(DTENSOR_GTP_DEBUG="poison,delay=1"):
                model = shard_copy(reference, mesh)
            for seed in range(3):
                with self.gathers(model) as used:
                    check_step(reference, model, mesh, make_rows(seed), square_step, lr=0.0)
                # Read once in the forward's frame, once in backward, where no frame says how long: kept to its end.
                # What backward reads first is kept at the turn.
                assert used == {"first": 2 if seed == 0 else 1, "second": 2}, used

    def test_checkpointed_segments_of_a_sequential(self) -> None:
        for use_reentrant in (True, False):
            torch.manual_seed(3)
            reference = nn.Sequential(*(module for _ in range(3) for module in (nn.Linear(WIDTH, WIDTH), Raw())))
            mesh = self.gtp_mesh()
            model = shard_copy(reference, mesh)

            def step(module: nn.Module, x: torch.Tensor, use_reentrant: bool = use_reentrant) -> None:
                x = x.clone().requires_grad_()
                checkpoint_sequential(module, 3, x, use_reentrant=use_reentrant).square().mean().backward()

            for seed in range(3):
                check_step(reference, model, mesh, make_rows(seed), step)

    def test_nested_checkpoints(self) -> None:
        class Nested(Blocks):
            def inner(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
                return x

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = self.last(checkpoint(self.inner, self.first(x), use_reentrant=False))
                return result

        torch.manual_seed(4)
        reference = Nested(False)
        mesh = self.gtp_mesh()
        model = shard_copy(reference, mesh)
        for seed in range(3):
            check_step(reference, model, mesh, make_rows(seed), square_step)

    def test_checkpointing_with_kept_weights_and_microbatches(self) -> None:
        for use_reentrant in (True, False):
            mesh = self.gtp_mesh()
            torch.manual_seed(5)
            reference = Blocks(use_reentrant)
            model = shard_copy(reference, mesh, reshard_after_forward=False)

            def step(module: Any, x: torch.Tensor) -> None:
                for index in range(2):
                    if isinstance(module, GTPModule):
                        module.set_requires_gradient_sync(index == 1)
                    square_step(module, x + index)

            for seed in range(3):
                check_step(reference, model, mesh, make_rows(seed), step)

    def test_exception_in_recomputation_leaves_nothing_behind(self) -> None:
        for use_reentrant in (True, False):
            mesh = self.gtp_mesh()
            torch.manual_seed(6)
            reference = Blocks(use_reentrant)
            model = shard_copy(reference, mesh)

            def fail(*args: Any) -> None:
                raise RuntimeError("on purpose")

            for seed in range(2):
                check_step(reference, model, mesh, make_rows(seed), square_step)
                for module in (model.blocks[1].raw, model.blocks[0].linear):
                    loss = square_loss(model, make_rows(seed))
                    handle = module.register_forward_pre_hook(fail)
                    with self.assertRaisesRegex(RuntimeError, "on purpose"):
                        loss.backward()
                    handle.remove()
                check_step(reference, model, mesh, make_rows(seed), square_step)

    def test_evaluation_of_a_checkpointed_model_gathers_once(self) -> None:
        mesh = self.gtp_mesh()
        for use_reentrant in (True, False):
            torch.manual_seed(7)
            reference = Blocks(use_reentrant)
            model = shard_copy(reference, mesh)
            for _ in range(2):
                with torch.no_grad():
                    expected = reference(make_rows(0))
                    with self.gathers(model) as used:
                        torch.testing.assert_close(model(make_rows(0)), expected)
                assert used == dict.fromkeys(used, 1), used
                assert_idle(model)
