"""Layers whose stock forward gets the fused op in its place."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from .._params.managed_param import ManagedParam, Site
from .._params.pack_planes import HookWire
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from ..ops.compiled_linear import linear as compiled_linear
from ..ops.compiled_linear import parallel_linear as compiled_parallel_linear
from ..ops.compiled_lookup import embedding as compiled_embedding
from ..ops.embedding import embedding
from ..ops.linear import linear, parallel_linear
from .binding import binding_of


class GTPFused:
    """Mixin of a layer whose stock forward has given place to a fused op."""

    multiplies = True  # with the weight, in a GEMM


class GTPLinear(GTPFused):
    """Mixin of ``nn.Linear``."""

    def forward(self, input: Tensor) -> Tensor:
        module = cast(nn.Linear, self)
        binding = binding_of(module)
        assert binding is not None
        weight, bias = binding.params["weight"], binding.params.get("bias")
        runtime = binding.group.runtime
        if torch.compiler.is_compiling():
            if torch.is_autocast_enabled(input.device.type) or module._parameters["weight"] is None:
                return super().forward(input)  # type: ignore[misc, no-any-return]
            # Reads the bias as an attribute: whichever it is, the graph gets its value.
            if binding.compiled["weight"].weight.tp_spec is None:
                return compiled_linear(input, module.bias, binding.compiled["weight"])
            output = compiled_parallel_linear(input, module.bias, binding.compiled["weight"])
            return super().forward(input) if output is None else output  # type: ignore[misc]
        is_plain = isinstance(weight, ShardedWeight) and (bias is None or isinstance(bias, WholeParam))
        if not is_plain or torch.is_autocast_enabled(input.device.type) or module._parameters["weight"] is None:
            return forward_in_frame(self, GTPLinear, input)
        assert isinstance(weight, ShardedWeight)
        weight.follow(Site(module, "weight"))
        if isinstance(bias, WholeParam):
            bias.follow(Site(module, "bias"))
            value: Tensor | None = bias.value()
        else:
            value = module._parameters["bias"]
        if weight.tp_spec is None:
            return linear(input, value, runtime, weight)
        output = parallel_linear(input, value, runtime, weight)
        return forward_in_frame(self, GTPLinear, input) if output is None else output


class GTPEmbedding(GTPFused):
    """Mixin of ``nn.Embedding``."""

    multiplies = False

    def forward(self, input: Tensor) -> Tensor:
        module = cast(nn.Embedding, self)
        binding = binding_of(module)
        assert binding is not None
        weight = binding.params["weight"]
        assert isinstance(weight, ShardedWeight)
        if torch.compiler.is_compiling():
            return compiled_embedding(input, module.padding_idx, binding.compiled["weight"])
        weight.follow(Site(module, "weight"))
        return embedding(input, module.padding_idx, binding.group.runtime, weight)


def forward_in_frame(module: Any, mixin: Any, *args: Tensor | None) -> Tensor:
    """The stock forward below ``mixin``, reading the weight as an attribute in a frame of its own."""
    binding = binding_of(module)
    assert binding is not None
    frame = binding.group.runtime.enter(module, lambda num_steps: True)
    is_complete = False
    try:
        output: Tensor = super(mixin, module).forward(*args)
        is_complete = True
        return output
    finally:
        binding.group.runtime.exit(frame, is_complete)


def fused_mixin(module: nn.Module, params: dict[str, ManagedParam]) -> type[GTPFused] | None:
    """The mixin with the fused op for ``module``, if its forward is the stock one and its weight is a shard."""
    of_layer = getattr(type(module), "gtp_fused_mixin", None)
    if of_layer is not None:
        mixin: type[GTPFused] | None = of_layer(module, params)
        return mixin
    weight = params.get("weight")
    if not isinstance(weight, ShardedWeight) or "forward" in module.__dict__:
        return None
    if isinstance(weight.wire, HookWire):
        return None  # what its hooks make of it is for code that knows it
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return GTPLinear
    if weight.tp_spec is None and isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        return GTPEmbedding
    return None
