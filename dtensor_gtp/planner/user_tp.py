"""Tensor parallelism of a model of the user's, by the plan of names in its config (``base_model_tp_plan``).

Linear layers are cut on the meta device as ``ColwiseParallel`` and ``RowwiseParallel`` cut them, and the model's own
code runs with the slices: heads and hidden columns are fewer, activations between blocks are whole on every rank. The
embedding and the head stay whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from .recorder import Kind, Op, Recorder

COLWISE, ROWWISE = "colwise", "rowwise"


class TPPlan(NamedTuple):
    """How a model's linear layers are cut."""

    styles: Mapping[str, str]  # "colwise" or "rowwise" by the name of the layer
    # Numbers that tp must divide: of heads, of those of keys and values, and of rows or columns.
    heads: tuple[int, ...] = ()
    refusal: str = ""  # why the model cannot be cut; empty if it can

    def refuses(self, tp: int) -> str | None:
        """Why ``tp`` slices cannot be."""
        if tp == 1:
            return None
        if self.refusal:
            return f"tp: {self.refusal}"
        bad = next((number for number in self.heads if number % tp), None)
        return None if bad is None else f"tp {tp} does not divide {bad} heads, rows or columns of a layer"

    def described(self) -> dict[str, str]:
        """Style by name, with ``*`` instead of the number of a block."""
        return {re.sub(r"(^|\.)\d+\.", r"\1*.", name): style for name, style in self.styles.items()}


def plan_of(model: nn.Module) -> TPPlan:
    """The plan of a model as transformers builds it."""
    config: Any = getattr(model, "config", None)
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        return TPPlan({}, refusal="the model has no config with a base_model_tp_plan")
    # Norms of heads stay whole on all ranks, whatever their style is called.
    plan = {name: style for name, style in plan.items() if not style.startswith(("replicated", "sequence"))}
    other = next((name for name, style in plan.items() if style not in (COLWISE, ROWWISE)), None)
    if other is not None:
        return TPPlan({}, refusal=f"base_model_tp_plan has {plan[other]!r} for {other}, not colwise or rowwise")
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    patterns = {re.escape(prefix + name).replace(r"\*", r"\d+"): style for name, style in plan.items()}
    styles, sizes = {}, []
    for name, module in model.named_modules():
        style = next((style for pattern, style in patterns.items() if re.fullmatch(pattern, name)), None)
        if style is None:
            continue
        if not isinstance(module, nn.Linear):
            return TPPlan(
                {}, refusal=f"base_model_tp_plan cuts {name}, which is no nn.Linear ({type(module).__name__})"
            )
        styles[name] = style
        sizes.append(module.out_features if style == COLWISE else module.in_features)
    heads = getattr(config, "num_attention_heads", 1)
    groups = getattr(config, "num_key_value_heads", None) or heads
    return TPPlan(styles, (heads, groups, *sorted(set(sizes))))


def cut(model: nn.Module, plan: TPPlan, tp: int) -> None:
    """Replace each layer of the plan by one rank's slice of it."""
    for name, style in plan.styles.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if style == COLWISE:
            layer.out_features //= tp
        else:
            layer.in_features //= tp
        layer.weight = nn.Parameter(layer.weight.new_empty(layer.out_features, layer.in_features))
        if layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.new_empty(layer.out_features))


def communicate(model: nn.Module, plan: TPPlan, recorder: Recorder) -> None:
    """Let the layers note their collectives: row-wise ones all-reduce what they return, column-wise ones the gradient
    of their input, each its own."""
    for name, style in plan.styles.items():
        layer = model.get_submodule(name)
        layer.forward = _communicating(layer.forward, recorder, in_forward=style == ROWWISE)


def _communicating(forward: Callable[..., Any], recorder: Recorder, *, in_forward: bool) -> Callable[..., Any]:
    def run(input: torch.Tensor) -> Any:
        if in_forward:
            return _AllReduce.apply(forward(input), recorder, True)  # type: ignore[no-untyped-call]
        return forward(_AllReduce.apply(input, recorder, False))  # type: ignore[no-untyped-call]

    return run


class _AllReduce(torch.autograd.Function):
    """An all-reduce over tp in forward or in backward. It takes as long as a reduce-scatter and an all-gather."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, recorder: Recorder, in_forward: bool) -> torch.Tensor:
        ctx.recorder, ctx.in_forward = recorder, in_forward
        if in_forward:
            _note(recorder, input)
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not ctx.in_forward:
            _note(ctx.recorder, grad)
        return grad, None, None


def _note(recorder: Recorder, tensor: torch.Tensor) -> None:
    for _ in range(2):
        recorder.note(Op(Kind.TP, nbytes=tensor.nbytes))
