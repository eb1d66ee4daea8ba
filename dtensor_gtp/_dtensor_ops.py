"""What DTensor has to know about a ``GTPShard`` whose chunks are not torch's (``block_size > 1``).

[Note: block placements in DTensor]
DTensor assumes in four places that the dim of a ``Shard`` says everything about its layout. Each gets one wrapper; all
are installed when the first such placement is made and hand every case without one to torch's own code.

* ``DTensorSpec`` compares each placement with ``Shard(dim)``. The wrapper lets it look at stock siblings instead, and
  refuses combinations whose layout DTensor would misread.
* The redistribution planner takes two shardings of the same tensor dim for the same layout, and makes placements from
  a dim alone. The wrapper plans every change of a block placement through ``Replicate()`` on its mesh axis, and leaves
  the other axes to torch.
* ``distribute_tensor`` makes placements from dims, too. The wrapper cuts block placements with ``redistribute``. Code
  that imported the function before keeps torch's and gets a plain ``Shard``: other chunks, but a correct DTensor.
* Sharding propagation hands out plain ``Shard`` for the output of an op on a sharded input: right rows, wrong offsets.
  The wrapper knows three kinds of ops that keep rows apart (elementwise ops, reductions, transposes). For any other op
  the block placements are gathered first; an op that would write to a gathered copy raises.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from ._dtensor_layout import (
    gathered,
    has_block,
    has_empty_shard,
    is_sharding,
    map_specs,
    on_dim,
    sharded_dim,
    stock_sibling,
    wrap_distribute_tensor,
    wrap_planner,
    wrap_spec,
)
from ._dtensor_norms import NORMS, needs_rows_for_norm
from ._torch_compat import (
    DTensorSpec,
    OpSchema,
    OutputSharding,
    Propagate,
    StridedShard,
    TensorMeta,
    op_dispatcher,
    wrap_sharding_propagation,
)
from .placement import _BlockGTPShard

logger = logging.getLogger(__name__)
aten = torch.ops.aten


@functools.cache
def install() -> None:
    """Wrap these places of DTensor, once in a process. See [Note: block placements in DTensor].

    Raises:
        NotImplementedError: this torch's DTensor has other internals.
    """
    try:
        wrap_spec()
        wrap_planner()
        wrap_distribute_tensor()
        wrap_sharding_propagation(_propagate)
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f"GTPShard with block_size > 1 or split_factor > 1 does not know the DTensor of torch {torch.__version__} "
            f"({error}). Use block_size=1 and split_factor=1, or a torch release that this package was tested with."
        ) from error
    logger.debug("DTensor now knows block placements")


@functools.cache
def support_fused_sgd() -> None:
    """Let DTensors run ``torch.optim.SGD(fused=True)``: torch (2.11 to 2.13) knows only the fused Adams.

    Both are elementwise ops on lists of tensors, for which torch's strategy counts no arguments: it serves for both.
    """
    propagator = op_dispatcher().sharding_propagator
    for sgd, adamw in (
        (aten._fused_sgd_.default, aten._fused_adamw_.default),
        (aten._fused_sgd_.tensor_lr, aten._fused_adamw_.tensor_lr),
    ):
        for table in (
            propagator.op_strategy_funcs,
            propagator.op_single_dim_strategy_funcs,
            propagator.op_to_schema_info,
            propagator.op_to_schema_info_for_single_dim_strategy,
        ):
            if adamw in table:
                table.setdefault(sgd, table[adamw])


# --- sharding propagation ---------------------------------------------------------------------------------------------

# Ops that treat each element by itself, beside those that torch tags as pointwise and their in-place variants.
_ELEMENTWISE = frozenset(
    {
        aten._to_copy.default,
        aten.alias.default,
        aten.bernoulli.default,
        aten.bernoulli_.float,
        aten.clone.default,
        aten.copy_.default,
        aten.detach.default,
        aten.empty_like.default,
        aten.equal.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.full_like.default,
        aten.native_dropout.default,
        aten.normal_.default,
        aten.ones_like.default,
        aten.rand_like.default,
        aten.randint_like.default,
        aten.randint_like.low_dtype,
        aten.randn_like.default,
        aten.uniform_.default,
        aten.zero_.default,
        aten.zeros_like.default,
    }
)
# Reductions without a result for a shard that has no rows.
_EXTREMA = frozenset(
    {
        aten._foreach_max.default,
        aten.amax.default,
        aten.amin.default,
        aten.max.default,
        aten.min.default,
    }
)
# Reductions whose result over unequal shards is the reduction of the shards' results. mean, var and the like are not.
_REDUCTIONS = (
    NORMS
    | _EXTREMA
    | {
        aten.all.default,
        aten.all.dim,
        aten.any.default,
        aten.any.dim,
        aten.sum.default,
        aten.sum.dim_IntList,
    }
)
_TRANSPOSES = frozenset({aten.permute.default, aten.t.default, aten.transpose.int})
# They read only the metadata of their tensor.
_FACTORIES = frozenset(
    {
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.new_full.default,
        aten.new_ones.default,
        aten.new_zeros.default,
    }
)
_LIST_OPS = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")


class _Operand(NamedTuple):
    """A tensor argument of an op: argument position or name, element number if it stands in a list, and its spec."""

    argument: int | str
    element: int | None
    spec: DTensorSpec
    is_mutated: bool
    is_aliased: bool


class _NotElementwiseError(Exception):
    """The shapes of an elementwise op do not let its operands share one sharding."""


def _propagate(stock: Propagate, op_schema: OpSchema) -> OutputSharding:
    operands = list(_operands(op_schema))
    if not any(has_block(o.spec) for o in operands):
        return stock(op_schema)
    return propagate_block_op(stock, op_schema, operands)


def propagate_block_op(stock: Propagate, schema: OpSchema, operands: Sequence[_Operand]) -> OutputSharding:
    """Sharding of the inputs and outputs of an op that has a block placement among its inputs."""
    dispatcher = op_dispatcher()
    propagator = dispatcher.sharding_propagator
    op = schema.op
    # torch's own handlers ask for the sharding, but do not move data as it says
    handler = dispatcher._custom_op_handlers.get(op)
    if handler is not None and handler.__module__.startswith("torch."):
        raise _unsupported(op, operands, "it has a handler of its own in DTensor")
    is_known = op in propagator.op_strategy_funcs or op in propagator.op_single_dim_strategy_funcs
    if is_known and _is_elementwise(op):
        try:
            return _propagate_elementwise(schema, operands, propagator._propagate_tensor_meta_non_cached(schema))
        except _NotElementwiseError:
            logger.debug("%s on %s gathers its block placements", op, [o.spec for o in operands])
    elif op in _REDUCTIONS or op in _TRANSPOSES:
        sharding = None if _is_undefined_when_empty(schema, operands) else _propagate_rowwise(stock, schema, operands)
        if sharding is not None:
            return sharding
    return _propagate_gathered(stock, schema, operands)


def _operands(schema: OpSchema) -> Iterator[_Operand]:
    arguments = schema.op._schema.arguments
    by_name = {a.name: a for a in arguments}
    values: list[tuple[int | str, Any, Any]] = [
        (i, value, arguments[i]) for i, value in enumerate(schema.args_schema) if i < len(arguments)
    ]
    values += [(name, value, by_name.get(name)) for name, value in schema.kwargs_schema.items()]
    for argument, value, declared in values:
        alias = declared.alias_info if declared is not None else None
        flags = (alias is not None and alias.is_write, alias is not None and not alias.is_write)
        if isinstance(value, DTensorSpec):
            yield _Operand(argument, None, value, *flags)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if isinstance(item, DTensorSpec):
                    yield _Operand(argument, index, item, *flags)


def _with_specs(schema: OpSchema, specs: dict[tuple[int | str, int | None], DTensorSpec]) -> OpSchema:
    """``schema`` with other specs for the operands in ``specs``, keyed by argument and index."""

    def replaced(argument: int | str, value: Any) -> Any:
        if isinstance(value, DTensorSpec):
            return specs.get((argument, None), value)
        if isinstance(value, list | tuple):
            return type(value)(specs.get((argument, i), item) for i, item in enumerate(value))
        return value

    args = tuple(replaced(i, value) for i, value in enumerate(schema.args_schema))
    kwargs = {name: replaced(name, value) for name, value in schema.kwargs_schema.items()}
    return OpSchema(schema.op, args, kwargs, schema_info=schema.schema_info)


def _unsupported(op: Any, operands: Iterable[_Operand], why: str) -> NotImplementedError:
    specs = ", ".join(str(o.spec) for o in operands if has_block(o.spec))
    return NotImplementedError(
        f"{op} does not support a GTPShard with block_size > 1 ({specs}): {why}. Call full_tensor() or redistribute "
        f"the DTensor to Replicate() first, or work on to_local()."
    )


def _is_list_op(op: Any) -> bool:
    """True for ops on lists of tensors that treat the i-th elements of the lists by themselves."""
    return str(op._schema.name).startswith(_LIST_OPS)


# Elementwise ops ------------------------------------------------------------------------------------------------------


def _is_elementwise(op: Any) -> bool:
    if _is_list_op(op):
        return op not in _REDUCTIONS
    return op in _ELEMENTWISE or torch.Tag.pointwise in op.tags or torch.Tag.pointwise in _tags_out_of_place(op)


def _tags_out_of_place(op: Any) -> Iterable[Any]:
    """Tags of ``aten::foo.bar`` for ``aten::foo_.bar``: torch leaves some in-place variants untagged."""
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None) if name.endswith("_") else None
    overload = getattr(packet, op._overloadname, None)
    return () if overload is None else overload.tags


def _propagate_elementwise(schema: OpSchema, operands: Sequence[_Operand], out_meta: Any) -> OutputSharding:
    """Bring all operands of each element of the op to one sharding; the outputs have it too."""
    is_list_op = _is_list_op(schema.op)
    indices = sorted({o.element for o in operands if o.element is not None}) if is_list_op else [None]
    leaders: list[DTensorSpec] = []
    specs: dict[tuple[int | str, int | None], DTensorSpec] = {}
    for index in indices:
        group = [o for o in operands if not is_list_op or o.element in (index, None)]
        leader = _leading_spec(schema.op, group)
        leaders.append(leader)
        for operand in group:
            specs[operand.argument, operand.element] = _aligned(schema.op, operand, leader)
    changed = [o for o in operands if specs[o.argument, o.element].placements != o.spec.placements]
    if any(isinstance(o.argument, str) for o in changed):
        raise _unsupported(schema.op, operands, "DTensor cannot redistribute a keyword argument")
    output = _elementwise_outputs(leaders, out_meta, is_list_op)
    return OutputSharding(output, _with_specs(schema, specs) if changed else None, needs_redistribute=bool(changed))


def _leading_spec(op: Any, group: Sequence[_Operand]) -> DTensorSpec:
    """The spec that the others follow: of the tensor written to, else of the first with block placements, else any."""
    leader = next((o for o in group if o.is_mutated), None)
    if leader is None:
        ranked = sorted(group, key=lambda o: (not has_block(o.spec), not o.spec.is_sharded()))
        leader = ranked[0]
    spec = leader.spec
    if not any(p.is_partial() for p in spec.placements):
        return spec
    if leader.is_mutated:
        raise _unsupported(op, group, f"it would write to a tensor with partial values, {spec}")
    return _spec_like(spec, [Replicate() if p.is_partial() else p for p in spec.placements], spec.tensor_meta)


def _aligned(op: Any, operand: _Operand, leader: DTensorSpec) -> DTensorSpec:
    spec = operand.spec
    if spec.mesh != leader.mesh:
        if not spec.is_replicated():
            raise ValueError(f"Cannot run {op} on inputs with different meshes: got {leader.mesh} and {spec.mesh}.")
        return spec
    placements = _broadcast(leader.placements, leader.shape, spec.shape)
    if placements == list(spec.placements):
        return spec
    if operand.is_mutated:
        raise _unsupported(op, [operand, operand._replace(spec=leader)], "it writes to tensors with unlike placements")
    return _spec_like(spec, placements, spec.tensor_meta)


def _broadcast(placements: Iterable[Placement], shape: torch.Size, other: torch.Size) -> list[Placement]:
    """Placements for a tensor of shape ``other`` whose rows go with those of a tensor of ``shape`` in a broadcast."""
    shift = len(other) - len(shape)
    result: list[Placement] = []
    for placement in placements:
        if not is_sharding(placement):
            result.append(placement)
            continue
        dim = sharded_dim(placement) + shift
        rows = shape[sharded_dim(placement)]
        if dim < 0 or (other[dim] == 1 and rows != 1):
            result.append(Replicate())
        elif other[dim] == rows:
            result.append(on_dim(placement, dim))
        else:
            raise _NotElementwiseError
    return result


def _spec_like(spec: DTensorSpec, placements: Sequence[Placement], meta: TensorMeta | None) -> DTensorSpec:
    is_order = spec.use_strided_shard_as_shard_order if any(isinstance(p, StridedShard) for p in placements) else None
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta, use_strided_shard_as_shard_order=is_order)


def _elementwise_outputs(leaders: Sequence[DTensorSpec], out_meta: Any, is_list_op: bool) -> Any:
    def output(leader: DTensorSpec, meta: TensorMeta | None) -> DTensorSpec | None:
        if meta is None:
            return None
        return _spec_like(leader, _broadcast(leader.placements, leader.shape, meta.shape), meta)

    if out_meta is None:
        return None
    if isinstance(out_meta, TensorMeta):
        return output(leaders[0], out_meta)
    if not is_list_op:
        return tuple(output(leaders[0], meta) for meta in out_meta)
    if len(out_meta) != len(leaders):
        raise _NotElementwiseError
    return tuple(output(leader, meta) for leader, meta in zip(leaders, out_meta, strict=True))


# Reductions and transposes --------------------------------------------------------------------------------------------


def _propagate_rowwise(stock: Propagate, schema: OpSchema, operands: Sequence[_Operand]) -> OutputSharding | None:
    """torch's answer for plain shards, with the block placements put back; None if it moves data for it."""
    sharding = stock(map_specs(schema, stock_sibling))
    if sharding.needs_redistribute:
        return None
    outputs = sharding.output_spec
    specs = [outputs] if isinstance(outputs, DTensorSpec) else list(outputs)
    if len(specs) != len(operands):
        return None
    # A whole scalar among them may count as lying on the mesh of another (``_dtensor_norms``).
    pairs = zip(operands, specs, strict=True)
    restored = [_put_back(operand.spec, spec) if has_block(operand.spec) else spec for operand, spec in pairs]
    if any(spec is None for spec in restored):
        return None
    return OutputSharding(restored[0] if isinstance(outputs, DTensorSpec) else tuple(restored))


def _put_back(spec: DTensorSpec, output: DTensorSpec) -> DTensorSpec | None:
    placements = list(output.placements)
    for axis, (p, q) in enumerate(zip(spec.placements, output.placements, strict=True)):
        if not isinstance(p, _BlockGTPShard) or q.is_partial():
            continue
        if not isinstance(q, Shard) or output.shape[q.dim] != spec.shape[p.dim]:
            return None
        placements[axis] = on_dim(p, q.dim)
    return DTensorSpec(output.mesh, tuple(placements), tensor_meta=output.tensor_meta)


def _is_undefined_when_empty(schema: OpSchema, operands: Iterable[_Operand]) -> bool:
    needs_rows = schema.op in _EXTREMA or needs_rows_for_norm(schema)
    return needs_rows and any(has_block(o.spec) and has_empty_shard(o.spec) for o in operands)


# Everything else ------------------------------------------------------------------------------------------------------


def _propagate_gathered(stock: Propagate, schema: OpSchema, operands: Sequence[_Operand]) -> OutputSharding:
    """Gather the block placements and let torch decide about the rest."""
    for operand in operands:
        if not has_block(operand.spec):
            continue
        if operand.is_mutated:
            raise _unsupported(schema.op, operands, "it would write to a gathered copy")
        if operand.is_aliased:
            raise _unsupported(schema.op, operands, "its result would be a view of a gathered copy")
        if isinstance(operand.argument, str):
            raise _unsupported(schema.op, operands, "DTensor cannot redistribute a keyword argument")
    schema_gathered = map_specs(schema, gathered)
    sharding = stock(schema_gathered)
    if schema.op in _FACTORIES:
        return sharding
    return OutputSharding(
        sharding.output_spec,
        sharding.redistribute_schema or schema_gathered,
        needs_redistribute=True,
        use_val_from_redistribute_schema=sharding.use_val_from_redistribute_schema,
    )


__all__ = ["install", "propagate_block_op", "support_fused_sgd"]
