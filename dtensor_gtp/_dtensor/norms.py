"""Stock ``clip_grad_norm_`` on sharded parameters, also of several meshes.

It takes the norm of each gradient, stacks the norms, and scales the gradients by one coefficient. Two things stand in
its way in DTensor (torch 2.11 to 2.13); both get a rule of sharding propagation, every other op goes its stock way:

* The stack of scalars that live on different meshes is refused, and so is the product with a coefficient of another
  mesh. Such scalars are first reduced, each on its own mesh; and a scalar that every rank of its mesh holds whole can
  be read by an op on any other mesh.
* The largest magnitude of no elements is undefined: the infinity norm raises on the ranks alone whose shard has no
  rows. A gradient with fewer rows than ranks is gathered first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import Replicate

from .._torch_compat import DTensorSpec, OpSchema, OutputSharding, Propagate, TensorMeta, wrap_sharding_propagation
from .block_layout import has_empty_shard, map_specs

aten = torch.ops.aten


NORMS = frozenset(
    {aten._foreach_norm.Scalar, aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim}
)


@functools.cache
def install() -> None:
    """Wrap DTensor's sharding propagation, once in a process."""
    wrap_sharding_propagation(_propagate)


def _propagate(stock: Propagate, op_schema: OpSchema) -> OutputSharding:
    specs = list(_specs((*op_schema.args_schema, *op_schema.kwargs_schema.values())))
    if needs_rows_for_norm(op_schema) and any(has_empty_shard(spec) for spec in specs):
        whole = map_specs(op_schema, lambda spec: _replicated(spec) if has_empty_shard(spec) else spec)
        return OutputSharding(stock(whole).output_spec, whole, needs_redistribute=True)
    if all(spec.mesh == specs[0].mesh for spec in specs):
        return stock(op_schema)
    if op_schema.op is aten.stack.default and all(spec.ndim == 0 for spec in specs):
        return _stack(op_schema, specs)
    if op_schema.op is aten._foreach_mul_.Tensor and _is_whole_scalar(specs[-1]) and not _has_partial(specs):
        return OutputSharding(None)  # each gradient is scaled where it lies
    return stock(_with_scalars_on(op_schema, specs))


def needs_rows_for_norm(schema: OpSchema) -> bool:
    """Whether the op is a norm that is undefined for a tensor without elements (the others are 0)."""
    if schema.op not in NORMS or len(schema.args_schema) < 2:
        return False
    order = schema.args_schema[1]
    return isinstance(order, int | float) and (math.isinf(order) or order < 0)


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


def _replicated(spec: DTensorSpec) -> DTensorSpec:
    return DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)


def _stack(schema: OpSchema, specs: Sequence[DTensorSpec]) -> OutputSharding:
    """Scalars, each reduced on its own mesh; the stack counts as lying on the mesh of the first."""
    first = _replicated(specs[0])
    dtype = specs[0].tensor_meta.dtype if specs[0].tensor_meta is not None else torch.get_default_dtype()
    output = DTensorSpec(first.mesh, first.placements, tensor_meta=TensorMeta(torch.Size((len(specs),)), (1,), dtype))
    return OutputSharding(output, map_specs(schema, _replicated), needs_redistribute=True)


def _with_scalars_on(schema: OpSchema, specs: Sequence[DTensorSpec]) -> OpSchema:
    """``schema`` with whole scalars of other meshes counted as lying on the mesh of the first that is none."""
    leader = next((spec.mesh for spec in specs if spec.ndim), None)
    if leader is None:
        return schema

    def moved(spec: DTensorSpec) -> DTensorSpec:
        if not _is_whole_scalar(spec):
            return spec
        return DTensorSpec(leader, (Replicate(),) * leader.ndim, tensor_meta=spec.tensor_meta)

    return map_specs(schema, moved)
