"""Random initialization in place: every rank gets the rows that the unsharded tensor would have drawn.

DTensor draws each shard by itself. Here each rank draws the whole of a tensor on a mesh that ``gtp_shard`` shards over,
and keeps its part. With ranks seeded alike, ``to_empty`` and ``reset_parameters`` give the parameters and the
generator's state of the unsharded module.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat

aten = torch.ops.aten

RANDOM_OPS = (
    aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.exponential_.default, aten.cauchy_.default,
    aten.log_normal_.default, aten.geometric_.default, aten.random_.default, aten.random_.to,
    getattr(aten.random_, "from"),
)  # fmt: skip


class WholeDraws:
    """DTensor's handler of the random ops."""

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
        with compat.stock_dtensor_dispatch(op):
            return op(*args, **kwargs)

    def draw(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the in-place random ``op`` on ``args[0]``."""
        target = args[0]
        is_ours = isinstance(target, DTensor) and self.is_on_our_mesh(target)
        has_part = is_ours and not compat.local_tensor(target).is_meta and compat.is_real_rank(target.device_mesh)
        # torch draws: no DTensor of ours, a meta tensor, simulated ranks, or partial values.
        if not has_part or any(placement.is_partial() for placement in target.placements):
            with compat.stock_dtensor_dispatch(op):
                return op(*args, **kwargs)
        local = compat.local_tensor(target)
        # All ranks draw all values, so their generators stay alike. The full tensor is freed on return.
        full = torch.empty(target.shape, dtype=target.dtype, device=local.device)
        op(full, *args[1:], **kwargs)
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
    for op in RANDOM_OPS:
        compat.set_dtensor_handler(op, draws.draw)
    compat.set_dtensor_handler(aten._local_scalar_dense.default, draws.read_scalar)
    return draws
