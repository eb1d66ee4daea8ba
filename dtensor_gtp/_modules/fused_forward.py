"""Layers whose stock forward is replaced by a fused op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from .._params.managed_param import ManagedParam
from .._params.pack_planes import HookWire
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from ..ops.compiled_layers import embedding as compiled_embedding
from ..ops.compiled_layers import linear as compiled_linear
from ..ops.compiled_layers import parallel_linear as compiled_parallel_linear
from ..ops.embedding import embedding
from ..ops.linear import linear, parallel_linear
from .binding import BoundModule, Fused


def linear_forward(module: BoundModule, input: Tensor) -> Tensor:
    """Of ``nn.Linear``."""
    layer, binding = cast("nn.Linear", module), module._gtp_binding
    if torch.compiler.is_compiling():
        if torch.is_autocast_enabled(input.device.type) or is_parametrized(module):
            return nn.Linear.forward(layer, input)
        compiled = binding.compiled["weight"]
        op = compiled_linear if compiled.weight.tp_spec is None else compiled_parallel_linear
        output = op(input, layer.bias, compiled)  # reads the bias as an attribute: the graph gets its value
        return nn.Linear.forward(layer, input) if output is None else output
    if binding.block is not None:  # a wrapper of a library has kept this function
        return nn.Linear.forward(layer, input)
    params, runtime = binding.params, binding.group.runtime
    if torch.is_autocast_enabled(runtime.device.type) or is_parametrized(module):
        return forward_in_frame(module, nn.Linear.forward, input)
    value: Tensor | None = module._parameters.get("bias")
    weight: ShardedWeight = params["weight"]  # type: ignore[assignment]
    weight.follow(binding.sites["weight"])
    if "bias" in params:
        bias = params["bias"]
        if not isinstance(bias, WholeParam):
            return forward_in_frame(module, nn.Linear.forward, input)
        bias.follow(binding.sites["bias"])
        value = bias.value()
    if weight.tp_spec is None:
        return linear(input, value, runtime, weight)
    output = parallel_linear(input, value, runtime, weight)
    return forward_in_frame(module, nn.Linear.forward, input) if output is None else output


def embedding_forward(module: BoundModule, input: Tensor) -> Tensor:
    """Of ``nn.Embedding``."""
    layer, binding = cast("nn.Embedding", module), module._gtp_binding
    weight = binding.params["weight"]
    assert isinstance(weight, ShardedWeight)
    if torch.compiler.is_compiling():
        return compiled_embedding(input, layer.padding_idx, binding.compiled["weight"])
    if binding.block is not None:
        return nn.Embedding.forward(layer, input)
    if is_parametrized(module):
        return forward_in_frame(module, nn.Embedding.forward, input)
    weight.follow(binding.sites["weight"])
    return embedding(input, layer.padding_idx, binding.group.runtime, weight)


def is_parametrized(module: nn.Module) -> bool:
    """Whether a parametrization has taken a parameter in this forward, as PEFT's of parameters, or it was set to
    None."""
    return module._parameters.get("weight") is None or ("bias" not in module._parameters and hasattr(module, "bias"))


def forward_in_frame(module: BoundModule, stock: Callable[..., Any], *args: Tensor | None) -> Tensor:
    """The stock forward, which reads the weight as an attribute, in a frame of its own."""
    runtime = module._gtp_binding.group.runtime
    depth = runtime.depth_of_call()
    frame, is_complete = None, False
    try:
        try:
            frame = runtime.enter(module, lambda num_steps: True)
            output: Tensor = stock(module, *args)
            is_complete = True
            return output
        finally:
            if frame is not None:
                runtime.exit(frame, is_complete)
    finally:
        runtime.leave(depth)


def find_fused(module: nn.Module, params: dict[str, ManagedParam]) -> Fused | None:
    """The fused op for ``module``, if its forward is the stock one and its weight is a shard."""
    if (of_layer := getattr(type(module), "gtp_fused", None)) is not None:
        return cast("Fused | None", of_layer(module, params))
    weight = params.get("weight")
    # What hooks make of a weight (HookWire), only code that knows the hooks can use.
    if not isinstance(weight, ShardedWeight) or isinstance(weight.form.wire, HookWire) or "forward" in module.__dict__:
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return Fused(linear_forward, multiplies=True)
    if weight.tp_spec is None and isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        return Fused(embedding_forward, multiplies=False)
    return None
