"""Layers whose stock forward gets the fused op in its place."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed.tensor import Shard

from ..nn.grouped_linear import GroupedLinear, local_part
from ..ops.compiled import embedding as compiled_embedding
from ..ops.compiled import linear as compiled_linear
from ..ops.compiled import parallel_linear as compiled_parallel_linear
from ..ops.compiled_grouped import grouped_linear as compiled_grouped_linear
from ..ops.embedding import embedding
from ..ops.grouped import sharded_grouped_linear
from ..ops.grouped_several import several_grouped_linear
from ..ops.linear import linear, parallel_linear
from .binding import binding_of
from .param import ManagedParam, ShardedWeight, Site
from .whole import WholeParam
from .wire import HookWire


class GTPLinear:
    """Mixin of ``nn.Linear``: the fused op in the place of its forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
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
            return _in_frame(self, GTPLinear, input)
        assert isinstance(weight, ShardedWeight)
        weight.follow(Site(module, "weight"))
        if isinstance(bias, WholeParam):
            bias.follow(Site(module, "bias"))
            value: torch.Tensor | None = bias.value()
        else:
            value = module._parameters["bias"]
        if weight.tp_spec is None:
            return linear(input, value, runtime, weight)
        output = parallel_linear(input, value, runtime, weight)
        return _in_frame(self, GTPLinear, input) if output is None else output


class GTPEmbedding:
    """Mixin of ``nn.Embedding``: the fused op in the place of its forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        module = cast(nn.Embedding, self)
        binding = binding_of(module)
        assert binding is not None
        weight = binding.params["weight"]
        assert isinstance(weight, ShardedWeight)
        if torch.compiler.is_compiling():
            return compiled_embedding(input, module.padding_idx, binding.compiled["weight"])
        weight.follow(Site(module, "weight"))
        return embedding(input, module.padding_idx, binding.group.runtime, weight)


class GTPGroupedLinear:
    """Mixin of ``GroupedLinear``: the fused op in the place of its forward."""

    def forward(self, x: torch.Tensor, split_sizes: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        module = cast(GroupedLinear, self)
        binding = binding_of(module)
        assert binding is not None
        if torch.compiler.is_compiling():
            if torch.is_autocast_enabled(x.device.type) or not module.single_grouped_weight:
                return super().forward(x, split_sizes, scales)  # type: ignore[misc, no-any-return]
            compiled = binding.compiled["weight"]
            module.check_input(x, split_sizes, scales, compiled.weight.layout.shape)
            # Reads the bias as an attribute: whichever it is, the graph gets its value.
            own_bias = module.bias
            value = local_part(own_bias) if isinstance(own_bias, torch.Tensor) else None
            return compiled_grouped_linear(x, value, split_sizes, scales, compiled)
        params = {name: binding.params.get(name) for kind in ("weight", "bias") for name in module.names_of(kind)}
        weights = [param for param in params.values() if isinstance(param, ShardedWeight)]
        biases = [param for param in params.values() if isinstance(param, WholeParam)]
        is_plain = (len(weights), len(biases)) == tuple(len(module.names_of(kind)) for kind in ("weight", "bias"))
        if not is_plain or torch.is_autocast_enabled(x.device.type):
            return _in_frame(self, GTPGroupedLinear, x, split_sizes, scales)
        for name, param in params.items():
            assert param is not None
            param.follow(Site(module, name))
        values, runtime = [local_part(bias.value()) for bias in biases], binding.group.runtime
        shape = weights[0].layout.shape
        if module.single_grouped_weight:
            module.check_input(x, split_sizes, scales, shape)
            value = values[0] if values else None
            return sharded_grouped_linear(x, value, split_sizes, scales, runtime, weights[0])
        module.check_input(x, split_sizes, scales, torch.Size((len(weights), *shape)))
        value = torch.stack(values) if values else None
        return several_grouped_linear(x, value, split_sizes, scales, runtime, weights)


def _in_frame(module: Any, mixin: Any, *args: torch.Tensor | None) -> torch.Tensor:
    """The stock forward below ``mixin``, reading the weight as an attribute in a frame of its own."""
    binding = binding_of(module)
    assert binding is not None
    frame = binding.group.runtime.enter(module, lambda num_steps: True)
    is_complete = False
    try:
        output: torch.Tensor = super(mixin, module).forward(*args)
        is_complete = True
        return output
    finally:
        binding.group.runtime.exit(frame, is_complete)


def is_fusible(module: nn.Module, params: dict[str, ManagedParam]) -> type | None:
    """The mixin with the fused op for ``module``, if its forward is the stock one and its weight is a shard."""
    if isinstance(module, GroupedLinear) and type(module).forward is GroupedLinear.forward:
        weights = [params.get(name) for name in module.names_of("weight")]
        # Each rank computes with the groups, and the slices of them, that expert and tensor parallelism have left it.
        is_cut = "forward" not in module.__dict__ and all(
            isinstance(weight, ShardedWeight)
            and all(isinstance(p, Shard) for p in (weight.tp_spec.placements if weight.tp_spec is not None else ()))
            for weight in weights
        )
        return GTPGroupedLinear if is_cut else None
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
