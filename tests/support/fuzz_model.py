"""The model of a draw: a program of small modules that keep the shape ``(rows, length, width)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from fuzz import Draw, Layer, Span, widths
from quant_common import spell_out
from runtime_common import Calls
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dtensor_gtp import quantize_
from dtensor_gtp.quant import RECIPES


class Raw(nn.Module):
    """A matrix of its own, used without any module."""

    def __init__(self, width: int, out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) / width**0.5)
        self.shift = nn.Parameter(torch.randn(out)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        return y if self.shift is None else y + self.shift


class Stack(nn.Module):
    """A 3-D parameter, and one without dims (which ``fully_shard`` refuses)."""

    def __init__(self, width: int, out: int, has_scalar: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, out) / width**0.5)
        self.scale = nn.Parameter(torch.tensor(0.7) if has_scalar else torch.tensor([0.7]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight[0]) + torch.sin(x @ self.weight[1:].sum(0)) * self.scale


class Matrices(nn.Module):
    """A ``ParameterList``, of which the first is read twice."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        shapes = ((width, out), (out, out))
        self.weights = nn.ParameterList([torch.randn(shape) / shape[0] ** 0.5 for shape in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weights[0]
        for weight in list(self.weights)[1:]:
            y = torch.tanh(y @ weight)
        return y + x @ self.weights[0].abs()


class Late(Matrices):
    """Reads no weights in the first microbatch."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.phase = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.phase else x.sin()


class Mlp(nn.Module):
    """What tensor parallelism cuts column- and rowwise; its width divides by any tp size."""

    def __init__(self, width: int, out: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=0.1)  # well-conditioned, also over few values
        self.up = nn.Linear(width, 12, bias=bias)
        self.down = nn.Linear(12, out, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def _channels_first(own: Any, x: torch.Tensor) -> torch.Tensor:
    return own.inner(x.transpose(1, 2)).transpose(1, 2)


def _as_image(own: Any, x: torch.Tensor) -> torch.Tensor:
    return own.inner(x.unsqueeze(1)).mean(1)


def make_layer(draw: Draw, layer: Layer, width: int, out: int) -> nn.Module:
    groups = next(size for size in (3, 2, 1) if width % size == 0)
    bias = layer.bias
    makers: dict[str, Callable[[], nn.Module]] = {
        "embedding": lambda: nn.Embedding(draw.vocabulary, out),
        "linear": lambda: nn.Linear(width, out, bias=bias),
        "conv1d": lambda: Calls(_channels_first, inner=nn.Conv1d(width, out, 3, padding=1, bias=bias)),
        "conv2d": lambda: Calls(_as_image, inner=nn.Conv2d(1, 3, 3, padding=1, bias=bias)),
        "layer_norm": lambda: nn.LayerNorm(width, eps=0.1),
        "rms_norm": lambda: nn.RMSNorm(width, eps=0.1),
        "group_norm": lambda: Calls(_channels_first, inner=nn.GroupNorm(groups, width, eps=0.1)),
        "attention": lambda: Calls(
            lambda own, x: own.inner(x, x, x, need_weights=False)[0],
            inner=nn.MultiheadAttention(width, 1 + (width % 2 == 0), bias=bias, batch_first=True),
        ),
        "raw": lambda: Raw(width, out, bias),
        "stack": lambda: Stack(width, out, has_scalar=not draw.uses_dp),
        "list": lambda: Matrices(width, out),
        "late": lambda: Late(width),
        "mlp": lambda: Mlp(width, out, bias),
        "gru": lambda: Calls(lambda own, x: own.inner(x)[0], inner=nn.GRU(width, out, bias=bias, batch_first=True)),
    }
    return makers[layer.kind]()


def _save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Broken(Exception):
    """Ends a forward or a backward on purpose, on all ranks at the same place."""


def _break(*unused: Any) -> None:
    raise Broken


class Model(nn.Module):
    """Runs the program of a draw.

    While ``breaks`` is set, the forward or the backward of the layer in the middle of the program raises ``Broken``.
    """

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        ends = widths(draw)
        assert ends is not None
        torch.manual_seed(draw.seed)
        self.draw = draw
        self.breaks = ""
        modules = [make_layer(draw, layer, *ends[i]) for i, layer in enumerate(draw.layers)]
        self.layers = nn.ModuleList(modules)
        for i, layer in enumerate(draw.layers):
            modules[i].to(getattr(torch, layer.dtype or draw.dtype))
            if layer.tied >= 0:
                modules[i].weight = modules[layer.tied].weight
        self.set_frozen(0)

    def set_frozen(self, step: int) -> None:
        """Freeze what is frozen at ``step``; a tied weight is frozen by its first layer."""
        for layer, module in zip(self.draw.layers, self.layers, strict=True):
            is_frozen = bool(layer.frozen) and not (layer.unfrozen_at and step >= layer.unfrozen_at)
            owned = list(module.named_parameters())
            if layer.tied >= 0:
                owned = [(name, param) for name, param in owned if name != "weight"]
            for position, (_, param) in enumerate(owned):
                param.requires_grad_(not (is_frozen and (layer.frozen == "all" or position == 0)))

    def forward(self, x: torch.Tensor, phase: int) -> torch.Tensor:
        return self.predict(x, phase)

    def predict(self, x: torch.Tensor, phase: int) -> torch.Tensor:
        """The program, where nothing is registered: a call from within a frame, too."""
        return self._run(x, 0, len(self.draw.order), list(self.draw.spans), phase)

    def _run(self, x: torch.Tensor, start: int, stop: int, spans: Sequence[Span], phase: int) -> torch.Tensor:
        position = start
        while position < stop:
            inside = [s for s in spans if s.start == position and s.stop <= stop]
            if not inside:
                x = self._apply_layer(self.draw.order[position], x, phase)
                position += 1
                continue
            span = max(inside, key=lambda s: s.stop)
            others = [s for s in spans if s is not span]
            x = self._run_span(span, partial(self._run, stop=span.stop, spans=others, phase=phase), x)
            position = span.stop
        return x

    @staticmethod
    def _run_span(span: Span, run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if span.kind == "cpu":
            with torch.autograd.graph.save_on_cpu():
                return run(x, span.start)
        if span.kind == "reentrant" and not x.requires_grad:
            return run(x, span.start)  # parameters alone would get no gradient, as torch warns
        options: dict[str, Any] = {"use_reentrant": span.kind == "reentrant"}
        if span.kind == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _save_products)
        return checkpoint(run, x, span.start, **options)

    def _apply_layer(self, index: int, x: torch.Tensor, phase: int) -> torch.Tensor:
        layer, module = self.draw.layers[index], self.layers[index]
        if layer.period and phase % layer.period == 1:
            return x
        if isinstance(module, Late):
            module.phase = phase
        before = x
        if layer.dtype:
            x = x.to(getattr(torch, layer.dtype))
        y: torch.Tensor = module(x)
        if self.breaks and index == self.draw.order[len(self.draw.order) // 2]:
            if self.breaks == "forward":
                raise Broken
            if y.requires_grad:
                y.register_hook(_break)
        if layer.dtype:
            y = y.to(getattr(torch, self.draw.dtype))
        if "norm" not in layer.kind:
            y = torch.tanh(y)
        return before + y if layer.residual else y


def _is_quantized(module: nn.Module, name: str) -> bool:
    return type(module) is nn.Linear  # not the subclass that attention calls by its weight


def quantize(reference: Model, model: Model) -> None:
    """Quantize a model, and let one process compute what its recipe means."""
    if name := model.draw.recipe:
        spell_out(reference, RECIPES[name](), _is_quantized)
        quantize_(model, name, filter_fn=_is_quantized)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A mean over rows that has a gradient everywhere."""
    return (output.sin() + 0.3 * output.square()).square().mean() + 0.1 * output.mean()


def make_batch(draw: Draw, phase: int) -> torch.Tensor:
    """The batch of all ranks in one backward, on the default device."""
    generator = torch.Generator("cpu").manual_seed(draw.seed * 1009 + phase)
    target = torch.get_default_device()
    shape = (draw.rows * draw.num_data, draw.length)
    if draw.vocabulary:
        return torch.randint(0, draw.vocabulary, shape, generator=generator, device="cpu").to(target)
    dtype = getattr(torch, draw.dtype)
    batch = torch.randn((*shape, draw.width), generator=generator, dtype=dtype, device="cpu").to(target)
    return batch.requires_grad_(draw.needs_input_grad)
