"""Stock ``clip_grad_norm_`` on parameters of several meshes.

It takes the norm of each gradient, stacks the norms, and scales the gradients by one coefficient. DTensor (torch 2.11
to 2.13) refuses the stack of scalars that live on different meshes, and the product with a coefficient of another mesh.
Two rules of sharding propagation let them through: such scalars are first reduced, each on its own mesh; and a scalar
that every rank of its mesh holds whole can be read by an op on any other mesh. Every other op goes its stock way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import Replicate

from ._torch_compat import DTensorSpec, OpSchema, OutputSharding, TensorMeta, op_dispatcher

aten = torch.ops.aten


@functools.cache
def install() -> None:
    """Wrap DTensor's sharding propagation, once in a process."""
    propagator = op_dispatcher().sharding_propagator
    stock = propagator.propagate_op_sharding_non_cached

    @functools.wraps(stock)
    def propagate(op_schema: OpSchema) -> OutputSharding:
        specs = list(_specs((*op_schema.args_schema, *op_schema.kwargs_schema.values())))
        if all(spec.mesh == specs[0].mesh for spec in specs):
            return cast(OutputSharding, stock(op_schema))
        if op_schema.op is aten.stack.default and all(spec.ndim == 0 for spec in specs):
            return _stack(op_schema, specs)
        if op_schema.op is aten._foreach_mul_.Tensor and _is_whole_scalar(specs[-1]) and not _has_partial(specs):
            return OutputSharding(None)  # each gradient is scaled where it lies
        return cast(OutputSharding, stock(_with_scalars_on(op_schema, specs)))

    make_cache = type(propagator.propagate_op_sharding)
    propagator.propagate_op_sharding_non_cached = propagate
    propagator.propagate_op_sharding = make_cache(propagate)


def _specs(values: Sequence[object]) -> Iterator[DTensorSpec]:
    for value in values:
        if isinstance(value, DTensorSpec):
            yield value
        elif isinstance(value, list | tuple):
            yield from _specs(value)


def _is_whole_scalar(spec: DTensorSpec) -> bool:
    return spec.ndim == 0 and spec.is_replicated()


def _has_partial(specs: Sequence[DTensorSpec]) -> bool:
    return any(placement.is_partial() for spec in specs for placement in spec.placements)


def _replicated(spec: DTensorSpec, like: DTensorSpec, meta: TensorMeta | None) -> DTensorSpec:
    return DTensorSpec(like.mesh, (Replicate(),) * like.mesh.ndim, tensor_meta=meta)


def _stack(schema: OpSchema, specs: Sequence[DTensorSpec]) -> OutputSharding:
    """Scalars, each reduced on its own mesh; the stack counts as lying on the mesh of the first."""
    scalars = [_replicated(spec, spec, spec.tensor_meta) for spec in specs]
    dtype = specs[0].tensor_meta.dtype if specs[0].tensor_meta is not None else torch.get_default_dtype()
    output = _replicated(specs[0], specs[0], TensorMeta(torch.Size((len(specs),)), (1,), dtype))
    reduced = OpSchema(
        schema.op, (scalars, *schema.args_schema[1:]), schema.kwargs_schema, schema_info=schema.schema_info
    )
    return OutputSharding(output, reduced, needs_redistribute=True)


def _with_scalars_on(schema: OpSchema, specs: Sequence[DTensorSpec]) -> OpSchema:
    """``schema`` with whole scalars of other meshes counted as lying on the mesh of the first that is none."""
    leader = next((spec for spec in specs if spec.ndim), None)
    if leader is None:
        return schema

    def moved(value: Any) -> Any:
        if isinstance(value, DTensorSpec) and _is_whole_scalar(value):
            return _replicated(value, leader, value.tensor_meta)
        return value

    args = tuple(moved(value) for value in schema.args_schema)
    kwargs = {name: moved(value) for name, value in schema.kwargs_schema.items()}
    return OpSchema(schema.op, args, kwargs, schema_info=schema.schema_info)


__all__ = ["install"]
