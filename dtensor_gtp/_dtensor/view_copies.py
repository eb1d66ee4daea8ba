"""Writes through views of sharded parameters: ``weight[3].zero_()``, ``w.chunk(3)[0].normal_()``, ``w[2:5].mul_(2)``.

A view that cuts a sharded dim is made of gathered values, so DTensor would write to a copy and say nothing. Such a view
has a ``CopySpec`` here, and an op that writes to it raises. The ops of ``random_init``, draws and fills, do not read
what they write to: ``overwrite`` lets them write to the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._torch_compat import DTensorSpec, OpSchema, OutputSharding
from .block_layout import map_specs
from .elementwise import Operand, operands_of


class CopySpec(DTensorSpec):
    """The spec of a view that holds a copy. torch's caches tell it from the spec of another tensor that lies alike."""

    def __hash__(self) -> int:
        return hash((CopySpec, super().__hash__()))

    def __eq__(self, other: object, /) -> bool:
        return isinstance(other, CopySpec) and super().__eq__(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, _fields(self)  # what is loaded is a tensor of its own


def _fields(spec: DTensorSpec) -> tuple[Any, ...]:
    is_order = spec.use_strided_shard_as_shard_order
    # With strided shards torch derives the order itself, and refuses another one.
    return spec.mesh, spec.placements, spec.tensor_meta, None if is_order else spec.shard_order, is_order


def _plain(*fields: Any) -> DTensorSpec:
    return DTensorSpec(*fields)


def is_copy(spec: DTensorSpec) -> bool:
    return isinstance(spec, CopySpec)


def without_marks(schema: OpSchema, operands: Sequence[Operand]) -> OpSchema:
    """``schema`` as torch's rules know it.

    Raises:
        NotImplementedError: The op writes to a view that holds a copy.
    """
    if not any(is_copy(o.spec) for o in operands):
        return schema
    for operand in operands:
        if is_copy(operand.spec) and operand.is_mutated:
            raise _refusal(schema.op, operand.spec)
    return map_specs(schema, lambda spec: _plain(*_fields(spec)) if is_copy(spec) else spec)


def mark_copies(operands: Sequence[Operand], sharding: OutputSharding) -> OutputSharding:
    """``sharding`` of a view op on ``operands``, with a ``CopySpec`` if the result is a view of a copy."""
    moved = None
    if sharding.needs_redistribute:
        moved = sharding.redistribute_schema
    targets = {}
    if moved is not None:
        targets = {(o.argument, o.element): o.spec for o in operands_of(moved)}
    for operand in operands:
        target = targets.get((operand.argument, operand.element), operand.spec)
        if operand.is_aliased and (is_copy(operand.spec) or _is_moved(operand.spec, target)):
            return OutputSharding(
                _marked(sharding.output_spec),
                sharding.redistribute_schema,
                needs_redistribute=sharding.needs_redistribute,
                use_val_from_redistribute_schema=sharding.use_val_from_redistribute_schema,
            )
    return sharding


def _is_moved(spec: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether ``target`` needs the values of other ranks. A mesh axis of size 1 has none."""
    pairs = zip(spec.placements, target.placements, strict=True)
    return any(p != q and spec.mesh.size(axis) > 1 for axis, (p, q) in enumerate(pairs))


def _marked(output: Any) -> Any:
    if isinstance(output, list | tuple):
        return type(output)(_marked(spec) for spec in output)
    if isinstance(output, DTensorSpec):
        return CopySpec(*_fields(output))
    return output


def overwrite(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Run ``op``, which gives ``args[0]`` new values without reading it, on a view that holds a copy."""
    view: DTensor = args[0]
    base = view._base
    if not isinstance(base, DTensor) or is_copy(compat.dtensor_spec(base)):  # e.g. weight[3].data
        raise _refusal(op, compat.dtensor_spec(view))
    local = compat.local_tensor(base)
    # Whole tensors, of which the same views are taken: all ranks get the same values, and each one keeps its rows.
    full = compat.empty_whole(base)
    is_written = torch.zeros_like(full, dtype=torch.bool)
    values = compat.replay_view(view, full)
    op(values, *(a.full_tensor() if isinstance(a, DTensor) else a for a in args[1:]), **kwargs)
    compat.replay_view(view, is_written).fill_(True)

    def own(whole: Tensor) -> Tensor:
        return compat.own_part(whole, base.device_mesh, base.placements)

    local.copy_(torch.where(own(is_written), own(full), local))
    compat.local_tensor(view).copy_(compat.own_part(values, view.device_mesh, view.placements))
    return view


def _refusal(op: Any, spec: DTensorSpec) -> NotImplementedError:
    return NotImplementedError(
        f"{op} expects a tensor that it can write to, but got a view of shape {tuple(spec.shape)} of a sharded "
        "tensor. The view cuts a sharded dim, so it holds a copy. To change a parameter, write to all of it, e.g. "
        "param.mul_(mask) under torch.no_grad(), or inside of: with whole_weights(model). To compute with a copy, "
        "clone() the view."
    )
