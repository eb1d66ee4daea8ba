"""Initialization in place: every rank gets the rows that the unsharded tensor would have got.

DTensor draws each shard by itself. Here each rank draws the whole of a tensor on a mesh that ``gtp_shard`` shards over,
and keeps its part. With ranks seeded alike, ``to_empty`` and ``reset_parameters`` give the parameters and the
generator's state of the unsharded module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .view_copies import is_copy, overwrite

aten = torch.ops.aten

# In-place ops that read nothing of what they write to.
RANDOM_OPS = (
    aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.exponential_.default, aten.cauchy_.default,
    aten.log_normal_.default, aten.geometric_.default, aten.random_.default, aten.random_.to,
    getattr(aten.random_, "from"),
)  # fmt: skip
FILLS = (aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor)
# Ops that draw a new tensor which lies as their first argument.
LIKE_OPS = (
    aten.bernoulli.default, aten.rand_like.default, aten.randn_like.default, aten.randint_like.default,
    aten.randint_like.low_dtype,
)  # fmt: skip


class WholeDraws:
    """DTensor's handler of the ops above."""

    def __init__(self) -> None:
        # Store hashes. A strong reference keeps process groups alive; a weak one dies when the first of several equal
        # meshes does.
        self._meshes: set[int] = set()

    def add_mesh(self, mesh: DeviceMesh) -> None:
        """Draw tensors on ``mesh`` whole from now on."""
        self._meshes.add(hash(mesh))

    def is_on_our_mesh(self, tensor: DTensor) -> bool:
        return hash(tensor.device_mesh) in self._meshes

    def read_scalar(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``tensor.item()``. A truth value is that of the whole tensor, but DTensor reads a rank's own part (torch 2.11
        to 2.13): in ``trunc_normal_`` ranks would draw until their own values are in bounds, and differ."""
        target = args[0]
        if target.dtype == torch.bool and self.is_on_our_mesh(target):
            return op(target.full_tensor(), *args[1:], **kwargs)  # all ranks read the same value
        return _stock(op, args, kwargs)

    def draw(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the in-place random ``op`` on ``args[0]``."""
        target = args[0]
        if _is_copy(target):
            return self._overwrite(op, args, kwargs)
        if not self._has_part(target):
            return _stock(op, args, kwargs)
        return _write_own_part(target, lambda full: op(full, *args[1:], **kwargs))

    def fill(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the filling ``op`` on ``args[0]``."""
        target = args[0]
        if _is_copy(target):
            return self._overwrite(op, args, kwargs)
        if op is aten.zero_.default and isinstance(target, DTensor):
            compat.local_tensor(target).zero_()  # quicker: ``zero_grad`` asks for each parameter
            return target
        return _stock(op, args, kwargs)

    def _overwrite(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._has_part(args[0]):  # a meta tensor, or simulated ranks
            return args[0]
        return overwrite(op, args, kwargs)

    def eye(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``torch.eye(..., out=target)``, by which DTensor would make each local tensor the whole matrix."""
        target = kwargs["out"]
        if not self._has_part(target):
            return _stock(op, args, kwargs)
        shape = (args[0], args[-1])
        if target.shape != shape or _is_copy(target):
            raise ValueError(
                f"torch.eye expects a parameter of shape {shape} as out, but got a sharded one of shape "
                f"{tuple(target.shape)}, or a view of one. Write nn.init.eye_(param)."
            )
        return _write_own_part(target, lambda full: op(*args, **{**kwargs, "out": full}))

    def draw_like(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``op``, which draws a new tensor that lies as ``args[0]``."""
        source = args[0]
        if not self._has_part(source):
            return _stock(op, args, kwargs)
        if op is aten.bernoulli.default:  # it reads the probabilities
            whole = source.full_tensor()
        else:
            whole = compat.empty_whole(source)
        full = op(whole, *args[1:], **kwargs)
        # A copy, which does not keep the full tensor alive.
        part = compat.own_part(full, source.device_mesh, source.placements).clone()
        meta = compat.TensorMeta(full.shape, full.stride(), full.dtype)
        return compat.wrap_local(part, compat.dtensor_spec(source).shallow_copy_with_tensor_meta(meta))

    def _has_part(self, tensor: Any) -> bool:
        """Whether this rank holds a part of it. If not torch draws: no DTensor of ours, a meta tensor, simulated ranks,
        or partial values."""
        if not isinstance(tensor, DTensor) or not self.is_on_our_mesh(tensor):
            return False
        if compat.local_tensor(tensor).is_meta or not compat.is_real_rank(tensor.device_mesh):
            return False
        return not any(placement.is_partial() for placement in tensor.placements)


def _is_copy(target: Any) -> bool:
    return isinstance(target, DTensor) and is_copy(compat.dtensor_spec(target))


def _stock(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with compat.stock_dtensor_dispatch(op):
        return op(*args, **kwargs)


def _write_own_part(target: DTensor, fill: Callable[[Tensor], object]) -> DTensor:
    # All ranks draw all values, so their generators stay alike. The full tensor is freed on return.
    full = compat.empty_whole(target)
    fill(full)
    local = compat.local_tensor(target)
    local.copy_(compat.own_part(full, target.device_mesh, target.placements))
    return target


def zero_row(weight: DTensor, row: int) -> None:
    """``weight[row].zero_()``, which on a DTensor that is sharded on dim 0 writes to a gathered copy of the row."""
    local = compat.local_tensor(weight)
    if local.is_meta:
        return
    rows = torch.zeros(weight.shape[0], dtype=torch.bool, device=local.device)
    rows[row] = True
    # A mask of the logical shape, cut as the weight is: each rank writes to its own rows.
    mask = rows.view(-1, *(1,) * (weight.ndim - 1)).expand(weight.shape)
    with torch.no_grad():
        local.masked_fill_(compat.own_part(mask, weight.device_mesh, weight.placements), 0)


@functools.cache
def whole_draws() -> WholeDraws:
    """The one handler of this process, taught to DTensor's dispatcher by the first call."""
    draws = WholeDraws()
    handlers = (
        (draws.draw, RANDOM_OPS),
        (draws.fill, FILLS),
        (draws.eye, (aten.eye.out, aten.eye.m_out)),
        (draws.draw_like, LIKE_OPS),
        (draws.read_scalar, (aten._local_scalar_dense.default,)),
    )
    for handler, ops in handlers:
        for op in ops:
            compat.set_dtensor_handler(op, handler)
    return draws
