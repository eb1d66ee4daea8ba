"""Stock ``clip_grad_norm_`` and ``GradScaler`` on sharded parameters, also of several meshes.

DTensor (torch 2.11 to 2.13) refuses a stack of scalars of different meshes, and a product with a coefficient of another
mesh: here each scalar is first reduced on its own mesh, and goes with ops on any other mesh. The infinity norm, and the
largest and smallest value, raise only on ranks whose shard has no rows, while the others wait for them: a tensor with
fewer rows than ranks is gathered.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from .. import _torch_compat as compat
from .._torch_compat import DTensorSpec, OpSchema, OutputSharding, Propagate, TensorMeta
from .block_layout import has_empty_shard, is_whole_scalar, map_specs, with_placements
from .elementwise import operands_of

aten = torch.ops.aten

EXTREMA = (aten._foreach_max.default, aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
# A tensor without elements has none. Torch's handler of argmax and argmin asks for no sharding.
_NEED_ROWS = frozenset((*EXTREMA, aten.max.dim, aten.min.dim))
NORMS = (aten._foreach_norm.Scalar, aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim)


@functools.cache
def install() -> None:
    """Wrap DTensor's sharding propagation, and replace its handler of what ``GradScaler`` runs; once in a process."""
    compat.wrap_sharding_propagation(_propagate)
    compat.set_dtensor_handler(aten._amp_foreach_non_finite_check_and_unscale_.default, unscale)


def _propagate(stock: Propagate, op_schema: OpSchema) -> OutputSharding:
    specs = [operand.spec for operand in operands_of(op_schema)]
    # Such an op raises on a shard without elements. All ranks see the same sizes, so all gather the same gradients.
    if needs_rows(op_schema) and any(has_empty_shard(spec) for spec in specs):
        whole = map_specs(op_schema, lambda spec: _replicated(spec) if has_empty_shard(spec) else spec)
        sharding = stock(whole)
        # The stock rule may reduce a Partial gradient beside them.
        return OutputSharding(sharding.output_spec, sharding.redistribute_schema or whole, needs_redistribute=True)
    if all(spec.mesh == specs[0].mesh for spec in specs):
        return stock(op_schema)
    if op_schema.op is aten.stack.default and all(spec.ndim == 0 for spec in specs):
        # Each scalar is reduced on its own mesh. The stack counts as lying on the mesh of the first.
        if specs[0].tensor_meta is not None:
            dtype = specs[0].tensor_meta.dtype
        else:
            dtype = torch.get_default_dtype()
        meta = TensorMeta(torch.Size((len(specs),)), (1,), dtype)
        output = DTensorSpec(specs[0].mesh, _replicated(specs[0]).placements, tensor_meta=meta)
        return OutputSharding(output, map_specs(op_schema, _replicated), needs_redistribute=True)
    has_partial = any(placement.is_partial() for spec in specs for placement in spec.placements)
    if op_schema.op is aten._foreach_mul_.Tensor and is_whole_scalar(specs[-1]) and not has_partial:
        return OutputSharding(None)  # each gradient is scaled where it lies
    leader = next((spec for spec in specs if spec.ndim), None)
    if leader is None:
        return stock(op_schema)  # scalars of several meshes only

    def moved(spec: DTensorSpec) -> DTensorSpec:
        """A whole scalar counts as lying on the mesh of the first tensor that is no scalar."""
        is_scalar = is_whole_scalar(spec)
        if is_scalar:
            return DTensorSpec(leader.mesh, _replicated(leader).placements, spec.tensor_meta)
        return spec

    return stock(map_specs(op_schema, moved))


def _replicated(spec: DTensorSpec) -> DTensorSpec:
    return with_placements(spec, (Replicate(),) * spec.mesh.ndim)


def needs_rows(schema: OpSchema) -> bool:
    """Whether the op is undefined for a tensor without elements, as some norms are (the others are 0)."""
    if schema.op in _NEED_ROWS:
        return True
    if schema.op not in NORMS or len(schema.args_schema) < 2:
        return False
    order = schema.args_schema[1]
    return isinstance(order, int | float) and (math.isinf(order) or order < 0)


def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale local shards in place; ``found_inf`` is the maximum over every axis on which any gradient is sharded."""
    grads, found_inf, inv_scale = args
    # ``found_inf`` is a plain tensor, so each rank notes what its own shards have.
    op([compat.local_part(grad) for grad in grads], found_inf, inv_scale)
    groups: dict[str, dist.ProcessGroup] = {}  # by name: one all_reduce for each group, however many gradients have it
    for grad in grads:
        for axis, placement in enumerate(grad.placements if isinstance(grad, DTensor) else ()):
            if not isinstance(placement, Replicate) and grad.device_mesh.size(axis) > 1:
                group = grad.device_mesh.get_group(axis)
                groups[group.group_name] = group
    for group in groups.values():  # in the order of the gradients, the same on all ranks
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
