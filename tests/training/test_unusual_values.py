"""Unusual inputs, outputs and parameters of forwards; what is saved for backward, recomputed, frozen and copied."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from common import GlooTest
from passes_common import NUM_ROWS, WIDTH, Step, by_call, calling, check_cases, hooked, is_whole, mean, steps_in, usual
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

recompute = partial(checkpoint, use_reentrant=False)


# --- recomputation and what is saved ----------------------------------------------------------------------------------


class Recomputes(torch.autograd.Function):
    """Runs a block without gradients, and again in its backward."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, *grads)
        return None, x.grad


@dataclass
class Output:
    y: torch.Tensor
    nothing: None = None


class Pair(NamedTuple):
    y: torch.Tensor
    other: Any


def out_of(wrap: Callable[[torch.Tensor], Any], unwrap: Callable[[Any], torch.Tensor]) -> Step:
    """Blocks return ``y`` wrapped."""

    def step(model: Any, x: torch.Tensor) -> None:
        with contextlib.ExitStack() as stack:
            for block in model.blocks:
                stack.enter_context(block.register_forward_hook(lambda module, args, y: wrap(y)))
            by_call(lambda block, x: unwrap(block(x)))(model, x)

    return step


class Steps:
    """Each of its functions is a case."""

    def nested_checkpoints(model: Any, x: torch.Tensor) -> None:
        with calling(model, recompute):
            model(x)  # without a backward
            mean(recompute(model, x)).backward()

    def saved_tensors_on_the_host_and_copied(model: Any, x: torch.Tensor) -> None:
        for hooks in (save_on_cpu(), saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)):
            with hooks:
                loss = mean(model(x))
            loss.backward()

    # --- inputs and outputs -------------------------------------------------------------------------------------------

    @by_call
    def hooks_on_inputs_and_outputs(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: 2 * grad)
        y = block(x)
        y.register_hook(lambda grad: grad + 0.1 / y.numel())
        return y

    def inputs_that_need_gradients(model: Any, x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        usual(model, x)
        assert x.grad is not None

    def inputs_by_keyword(model: Any, x: torch.Tensor) -> None:
        with calling(model, lambda block, x: block(x=x)):
            mean(model(x=x)).backward()

    def inputs_of_three_dims_and_of_one(model: Any, x: torch.Tensor) -> None:
        mean(model(torch.stack([x, x + 1], 1))).backward()
        torch.stack([mean(model(row)) for row in x]).mean().backward()

    def no_rows_on_one_rank(model: Any, x: torch.Tensor) -> None:
        """The first rank has all of them."""
        half = NUM_ROWS // 2
        rows = x[:half]
        if not is_whole(x) and next(model.parameters()).device_mesh.get_local_rank():
            rows = x[:0]
        (model(rows).square().sum() / (2 * half if is_whole(x) else half)).backward()

    def vmap_without_gradients(model: Any, x: torch.Tensor) -> None:
        with torch.no_grad():
            target = torch.vmap(model)(x)
        mean(model(x + 1) - target).backward()

    def garbage_collected_between(model: Any, x: torch.Tensor) -> None:
        y = model(x)
        loss = mean(y)
        del y
        gc.collect()
        loss.backward()

    # --- parameters ---------------------------------------------------------------------------------------------------

    def copies_of_parameters(model: Any, x: torch.Tensor) -> None:
        def add(block: Any, args: Any, y: torch.Tensor) -> torch.Tensor:
            return y + block.raw.first.clone().square().mean() + block.up.weight.clone().sum() / 100

        hooked(lambda model: model.blocks[0].register_forward_hook(add))(model, x)

    def all_are_frozen(model: Any, x: torch.Tensor) -> None:
        model.requires_grad_(False)
        x = x.clone().requires_grad_()
        usual(model, x)
        assert x.grad is not None
        model.requires_grad_(True)

    def frozen_in_the_middle_of_a_forward(model: Any, x: torch.Tensor) -> None:
        def call(block: Any, x: torch.Tensor) -> torch.Tensor:
            block.up.requires_grad_(block is not model.blocks[1])
            block.norm.requires_grad_(block is not model.blocks[0])
            y: torch.Tensor = block(x)
            block.requires_grad_(True)
            return y

        try:
            by_call(call)(model, x)
        finally:
            model.requires_grad_(True)

    def unfrozen_between_forward_and_backward(model: Any, x: torch.Tensor) -> None:
        model.blocks[0].requires_grad_(False)
        model.last.weight.requires_grad_(False)
        loss = mean(model(x))
        model.requires_grad_(True)
        loss.backward()

    def hooks_that_raise(model: Any, x: torch.Tensor) -> None:
        def fail(*args: Any) -> None:
            raise ZeroDivisionError

        layer = model.blocks[0].down
        for register in (
            layer.register_forward_pre_hook,
            layer.register_forward_hook,
            layer.register_full_backward_hook,
            layer.weight.register_hook,
            layer.bias.register_hook,
            layer.weight.register_post_accumulate_grad_hook,
        ):
            with contextlib.suppress(ZeroDivisionError):
                hooked(lambda model, register=register: register(fail))(model, 100 * x)
            model.zero_grad()
            usual(model, x)


CASES: dict[str, Step] = {
    "checkpointed blocks": by_call(recompute),
    "reentrant checkpoints": by_call(partial(checkpoint, use_reentrant=True)),
    "checkpointed segments": lambda model, x: mean(
        checkpoint_sequential(list(model.blocks), 2, model.first(x), use_reentrant=False)
    ).backward(),
    "an autograd function that runs a block again": by_call(Recomputes.apply),
    "outputs in a dict": out_of(lambda y: {"y": y, "none": None}, lambda output: output["y"]),
    "outputs in a dataclass": out_of(Output, lambda output: output.y),
    "outputs in a named tuple": out_of(lambda y: Pair(y, [None, y * 2]), lambda pair: pair.y + pair.other[1]),
    "outputs in nested lists": out_of(lambda y: [[y], (y, None)], lambda lists: lists[0][0]),
    "no outputs but None": lambda model, x: (model.blocks[0](x), None) and usual(model, x),
    "outputs as views": out_of(lambda y: y.view(-1), lambda flat: flat.view(-1, WIDTH)),
    "outputs that are expanded": out_of(lambda y: y.expand(2, *y.shape), lambda y: y[0] + y[1]),
    "outputs written in place": out_of(lambda y: y, lambda y: y.mul_(0.5).relu_()),
    "outputs detached": out_of(lambda y: y, lambda y: y.detach().requires_grad_()),
    "gradients that a module hook replaces": hooked(
        lambda model: model.blocks[1].register_full_backward_hook(lambda m, grads, _: (grads[0] * 2,))
    ),
    "inputs that a pre-hook replaces": hooked(
        lambda model: model.blocks[1].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    ),
    "inputs that are not contiguous": lambda model, x: usual(model, torch.stack([x, x + 1], -1)[..., 1]),
    "activations that are copied": by_call(lambda block, x: block(x.clone()).to(torch.float32).to(torch.float64)),
    "no rows": lambda model, x: model(x[:0]).sum().backward(),
    "functional_call with its own parameters": lambda model, x: mean(
        functional_call(model, dict(model.named_parameters()), (x,))
    ).backward(),
    "outputs beside their detached selves": out_of(lambda y: (y, y.detach()), lambda pair: pair[0] * pair[1]),
    **steps_in(Steps),
}


class TestUnusualValues(GlooTest):
    world_size = 2

    def test_each_equals_one_process(self) -> None:
        # In a forward, parameters of single weights are full weights.
        refused = {"frozen in the middle of a forward": "froze or unfroze what modules see"}
        check_cases(CASES, self.gtp_mesh(), refused)
