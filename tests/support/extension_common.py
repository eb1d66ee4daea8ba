"""A stand-in for tensor classes with ``fully_shard``'s hooks, such as torchao's float8 weights.

1 byte an element crosses the wire, the gathered tensor is a subclass that its own layer knows how to multiply with, and
the hook takes the mesh alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from dtensor_gtp._torch_compat import wrapper_tensor

aten = torch.ops.aten
KEPT = {
    aten.as_strided.default,
    aten.clone.default,
    aten.copy_.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten._to_copy.default,
}


class Scaled(torch.Tensor):
    """High-precision values that are gathered as int8, with one scale for the whole weight."""

    def __new__(cls, values: torch.Tensor) -> Scaled:
        return wrapper_tensor(cls, values, values.shape, values.dtype)

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return Scaled(args[0]._values)
        args, kwargs = tree_map_only(Scaled, lambda t: t._values, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, Scaled, out) if func in KEPT else out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_values"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["_values"])

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        amax = self._values.abs().amax()
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = amax / 127
        return ((self._values / scale).round().to(torch.int8),), (scale,)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (data,), (scale,) = outputs, metadata
        if out is not None:
            out._scale = scale
            return None
        return Codes(data, scale, dtype), (data,)


class Codes(torch.Tensor):
    """A gathered weight: int8 codes and a scale."""

    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Codes:
        return wrapper_tensor(cls, data, data.shape, dtype)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self._data, self._scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_data", "_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: Any, size: Any, stride: Any) -> Codes:
        return Codes(inner["_data"], inner["_scale"], dtype)

    def value(self) -> torch.Tensor:
        return self._data.to(self.dtype) * self._scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.as_strided.default, aten.t.default):
            data = args[0]._data.t() if func is aten.t.default else args[0]._data
            return Codes(data, args[0]._scale, args[0].dtype)
        raise NotImplementedError(f"{func} of codes")


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_t: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight_t)
        return x @ weight_t.value()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight_t = ctx.saved_tensors
        return grad @ weight_t.value().t(), x.t() @ grad


class ScaledLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if isinstance(weight, Scaled):  # one process
            scale = weight._values.detach().abs().amax() / 127
            codes = (weight._values.detach() / scale).round().to(torch.int8)
            weight = weight + 0.0  # into autograd's graph
            y = _Reference.apply(x, weight, codes * scale)
        else:
            y = Product.apply(x, weight.t())
        return y + self.bias


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, value)
        return x @ value.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, value = ctx.saved_tensors
        return grad @ value, grad.t() @ x, None


def make_scaled(rows: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(ScaledLinear(16, rows), nn.Tanh(), ScaledLinear(rows, 8))
    for index in (0, 2):
        model[index].weight = nn.Parameter(Scaled(model[index].weight.detach()))
    return model
