"""What DTensor has to know about ``GTPShard``: sharding propagation, and layouts that are not torch's.

Sharding propagation asks here first, from the first ``GTPShard`` on. Elementwise ops on DTensors of ours that lie alike
are answered at once ([Note: operands that lie alike] in ``_dtensor_elementwise``), ops on block placements
(``block_size > 1``) by the rules below, all others by torch.

[Note: block placements in DTensor]
DTensor assumes in four places that the dim of a ``Shard`` says everything about its layout. Each gets one wrapper that
is installed when the first such placement is made, sharding propagation's with the first ``GTPShard``. They hand every
case without such a placement to torch's own code.

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
from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .._torch_compat import DTensorSpec, OpSchema, OutputSharding, Propagate, op_dispatcher, wrap_sharding_propagation
from ..placement import GTPShard, _BlockGTPShard
from .block_layout import (
    gathered,
    has_block,
    has_empty_shard,
    map_specs,
    on_dim,
    stock_sibling,
    wrap_distribute_tensor,
    wrap_planner,
    wrap_spec,
)
from .elementwise import (
    NotElementwiseError,
    Operand,
    is_elementwise,
    operands_of,
    propagate_alike,
    propagate_elementwise,
    unsupported,
)
from .norms import NORMS, needs_rows_for_norm

logger = logging.getLogger(__name__)


aten = torch.ops.aten


@functools.cache
def prepare() -> None:
    """Ask here first how ops are sharded, and let DTensors run fused SGD; once in a process."""
    wrap_sharding_propagation(_Propagation())
    _support_fused_sgd()


@functools.cache
def install() -> None:
    """Wrap what else has to know block placements, once in a process. See [Note: block placements in DTensor].

    Raises:
        NotImplementedError: this torch's DTensor has other internals.
    """
    try:
        wrap_spec()
        wrap_planner()
        wrap_distribute_tensor()
        prepare()
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f"GTPShard with block_size > 1 or split_factor > 1 does not know the DTensor of torch {torch.__version__} "
            f"({error}). Use block_size=1 and split_factor=1, or a torch release that this package was tested with."
        ) from error
    logger.debug("DTensor now knows block placements")


def _support_fused_sgd() -> None:
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


# Reductions without a result for a shard that has no rows.
_EXTREMA = frozenset(
    {aten._foreach_max.default, aten.amax.default, aten.amin.default, aten.max.default, aten.min.default}
)


# Reductions whose result over unequal shards is the reduction of the shards' results. mean, var and the like are not.
_REDUCTIONS = (
    NORMS
    | _EXTREMA
    | {aten.all.default, aten.all.dim, aten.any.default, aten.any.dim, aten.sum.default, aten.sum.dim_IntList}
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


class _Propagation:
    """Sharding propagation of ops on DTensors of ours; it hands those on other people's to torch.

    A DTensor of ours holds a ``GTPShard``, or lies on a mesh on which another one did: what most ops compute from a
    ``GTPShard(0)`` counts as a plain ``Shard(0)``.
    """

    def __init__(self) -> None:
        self._meshes: WeakSet[DeviceMesh] = WeakSet()

    def __call__(self, stock: Propagate, schema: OpSchema) -> OutputSharding:
        operands = list(operands_of(schema))
        self._note_meshes(operands)
        if any(has_block(o.spec) for o in operands):
            return propagate_block_op(stock, schema, operands)
        is_ours = any(o.spec.mesh in self._meshes for o in operands)
        return (propagate_alike(schema, operands) if is_ours else None) or stock(schema)

    def _note_meshes(self, operands: Iterable[Operand]) -> None:
        for operand in operands:
            if any(isinstance(placement, GTPShard) for placement in operand.spec.placements):
                self._meshes.add(operand.spec.mesh)


def propagate_block_op(stock: Propagate, schema: OpSchema, operands: Sequence[Operand]) -> OutputSharding:
    """Sharding of the inputs and outputs of an op that has a block placement among its inputs."""
    dispatcher = op_dispatcher()
    propagator = dispatcher.sharding_propagator
    op = schema.op
    # torch's own handlers ask for the sharding, but do not move data as it says
    handler = dispatcher._custom_op_handlers.get(op)
    if handler is not None and handler.__module__.startswith("torch."):
        raise unsupported(op, operands, "it has a handler of its own in DTensor")
    is_known = op in propagator.op_strategy_funcs or op in propagator.op_single_dim_strategy_funcs
    if is_known and is_elementwise(op):
        sharding = propagate_alike(schema, operands)
        if sharding is not None:
            return sharding
        try:
            return propagate_elementwise(schema, operands, propagator._propagate_tensor_meta_non_cached(schema))
        except NotElementwiseError:
            logger.debug("%s on %s gathers its block placements", op, [o.spec for o in operands])
    elif op in _REDUCTIONS or op in _TRANSPOSES:
        sharding = None if _is_undefined_when_empty(schema, operands) else _propagate_rowwise(stock, schema, operands)
        if sharding is not None:
            return sharding
    return _propagate_gathered(stock, schema, operands)


# Reductions and transposes --------------------------------------------------------------------------------------------


def _propagate_rowwise(stock: Propagate, schema: OpSchema, operands: Sequence[Operand]) -> OutputSharding | None:
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


def _is_undefined_when_empty(schema: OpSchema, operands: Iterable[Operand]) -> bool:
    needs_rows = schema.op in _EXTREMA or needs_rows_for_norm(schema)
    return needs_rows and any(has_block(o.spec) and has_empty_shard(o.spec) for o in operands)


# Everything else ------------------------------------------------------------------------------------------------------


def _propagate_gathered(stock: Propagate, schema: OpSchema, operands: Sequence[Operand]) -> OutputSharding:
    """Gather the block placements and let torch decide about the rest."""
    for operand in operands:
        if not has_block(operand.spec):
            continue
        if operand.is_mutated:
            raise unsupported(schema.op, operands, "it would write to a gathered copy")
        if operand.is_aliased:
            raise unsupported(schema.op, operands, "its result would be a view of a gathered copy")
        if isinstance(operand.argument, str):
            raise unsupported(schema.op, operands, "DTensor cannot redistribute a keyword argument")
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
