"""How DTensor shards ops on tensors with a ``GTPShard``, and the installation of all that it must know.

From the first ``GTPShard`` on, ``elementwise.propagate_alike`` answers for elementwise ops on DTensors of ours that lie
alike, the rules below for ops on block placements (``block_size > 1``), torch for all others.

[Note: block placements in DTensor]
DTensor assumes in four places that the dim of a ``Shard`` says everything about its layout. Each gets a wrapper when
the first block placement is made. The wrappers leave every case without a block placement to torch.

* ``DTensorSpec`` compares each placement with ``Shard(dim)``. The wrapper shows it plain shards, and refuses
  combinations whose layout DTensor would misread.
* The redistribution planner makes placements from a dim alone. The wrapper plans each change of a block placement
  through ``Replicate()`` on its mesh axis.
* ``distribute_tensor`` does so, too. The wrapper cuts block placements with ``redistribute``. Code that imported the
  function before gets a plain ``Shard``: other chunks, but a correct DTensor.
* Sharding propagation gives plain ``Shard`` to the output of an op: right rows, wrong offsets. The wrapper knows ops
  that keep rows apart: elementwise ops, reductions, transposes. Any other op gets gathered operands; an op that would
  write to a gathered copy raises.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .._torch_compat import (
    DTensorSpec,
    OpSchema,
    OutputSharding,
    Propagate,
    is_tracing_dtensors,
    op_dispatcher,
    replace_item,
    wrap_sharding_propagation,
)
from ..placement import GTPShard, _BlockGTPShard
from . import block_layout, elementwise
from .block_layout import gathered, has_block, has_empty_shard, map_specs, on_dim, stock_sibling, with_placements
from .elementwise import Operand, operands_of, propagate_alike, unsupported
from .gradients import EXTREMA, NORMS, needs_rows
from .remedies import explain
from .view_copies import mark_copies, without_marks

logger = logging.getLogger(__name__)

aten = torch.ops.aten


@functools.cache
def prepare() -> None:
    """Ask here first how ops are sharded, and let DTensors run fused SGD and Adagrad; once in a process."""
    wrap_sharding_propagation(_Propagation())
    _support_fused()


@functools.cache
def install() -> None:
    """Install the wrappers of [Note: block placements in DTensor], once in a process."""
    try:
        block_layout.wrap_spec()
        block_layout.wrap_planner()
        block_layout.wrap_distribute_tensor()
        prepare()
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f"GTPShard with block_size > 1 or split_factor > 1 does not know the DTensor of torch {torch.__version__} "
            f"({error}). Use block_size=1 and split_factor=1, or a torch release that this package was tested with."
        ) from error
    logger.debug("DTensor now knows block placements")


def _support_fused() -> None:
    """Let DTensors run ``fused=True`` of SGD and Adagrad by the strategy of the fused AdamW (torch 2.11 to 2.13)."""
    propagator = op_dispatcher().sharding_propagator
    strategies = (propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs)
    for table in (*strategies, propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy):
        for overload in ("default", "tensor_lr"):
            adamw = getattr(aten._fused_adamw_, overload)
            for op in (aten._fused_sgd_, aten._fused_adagrad_):
                if adamw in table and hasattr(op, overload) and getattr(op, overload) not in table:
                    replace_item("fused optimizers", table, getattr(op, overload), table[adamw])


# Reductions whose result over unequal shards is the reduction of the shards' results. mean, var and the like are not.
_REDUCTIONS = frozenset(NORMS).union(
    EXTREMA, (aten.all.default, aten.all.dim, aten.any.default, aten.any.dim, aten.sum.default, aten.sum.dim_IntList)
)
_TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int)
# They read only the metadata of their tensor.
_FACTORIES = tuple(getattr(aten, f"new_{kind}").default for kind in ("empty", "empty_strided", "full", "ones", "zeros"))


class _Propagation:
    """Sharding propagation of ops on DTensors of ours: on a mesh where one had a ``GTPShard``, which most ops lose."""

    def __init__(self) -> None:
        # Weak, because a mesh keeps its process groups alive. A mesh that is equal to a dead one may be lost until its
        # next ``GTPShard``. Until then torch answers, which is slower.
        self._meshes: WeakSet[DeviceMesh] = WeakSet()

    def __call__(self, stock: Propagate, schema: OpSchema) -> OutputSharding:
        operands = list(operands_of(schema))
        sharding = self._propagate(stock, without_marks(schema, operands))
        # Compiled code that writes to a view is made of ops that do not.
        if any(o.is_aliased and o.spec.mesh in self._meshes for o in operands) and not is_tracing_dtensors():
            return mark_copies(operands, sharding)
        return sharding

    def _propagate(self, stock: Propagate, schema: OpSchema) -> OutputSharding:
        operands = list(operands_of(schema))
        for operand in operands:
            if any(isinstance(placement, GTPShard) for placement in operand.spec.placements):
                self._meshes.add(operand.spec.mesh)
        if any(has_block(o.spec) for o in operands):
            return propagate_block_op(stock, schema, operands)
        is_ours = any(o.spec.mesh in self._meshes for o in operands)
        if not is_ours:
            return stock(schema)
        try:
            return propagate_alike(schema, operands) or stock(schema)
        except RuntimeError as error:  # also NotImplementedError, of ops without a strategy
            explain(error)
            raise


def propagate_block_op(stock: Propagate, schema: OpSchema, operands: Sequence[Operand]) -> OutputSharding:
    """Sharding of the inputs and outputs of an op that has a block placement among its inputs."""
    dispatcher = op_dispatcher()
    op = schema.op
    propagator = dispatcher.sharding_propagator
    # torch's own handlers ask for the sharding, but do not move data as it says.
    handler = dispatcher._custom_op_handlers.get(op)
    if handler is not None and handler.__module__.startswith("torch."):
        raise unsupported(op, operands, "DTensor has a special handler for it")
    is_known = op in propagator.op_strategy_funcs or op in propagator.op_single_dim_strategy_funcs
    if is_known and elementwise.is_elementwise(op):
        if (sharding := propagate_alike(schema, operands)) is not None:
            return sharding
        try:
            out_meta = propagator._propagate_tensor_meta_non_cached(schema)
            return elementwise.propagate_elementwise(schema, operands, out_meta)
        except elementwise.NotElementwiseError:
            logger.debug("%s on %s gathers its block placements", op, [o.spec for o in operands])
    elif op in _REDUCTIONS or op in _TRANSPOSES:
        is_undefined = needs_rows(schema) and any(has_block(o.spec) and has_empty_shard(o.spec) for o in operands)
        if is_undefined:
            sharding = None
        else:
            sharding = _propagate_rowwise(stock, schema, operands)
        if sharding is not None:
            return sharding
    return _propagate_gathered(stock, schema, operands)


def _propagate_rowwise(stock: Propagate, schema: OpSchema, operands: Sequence[Operand]) -> OutputSharding | None:
    """torch's answer for plain shards, with the block placements put back; None if it moves data for it."""
    sharding = stock(map_specs(schema, stock_sibling))
    if sharding.needs_redistribute:
        return None  # rows would be moved as if they were torch.chunk's
    outputs = sharding.output_spec
    if isinstance(outputs, DTensorSpec):
        specs = [outputs]
    else:
        specs = list(outputs)
    if len(specs) != len(operands):
        return None  # outputs and inputs do not pair up
    # A whole scalar among them may count as lying on the mesh of another (``gradients.py``).
    pairs = zip(operands, specs, strict=True)
    restored = [_put_back(operand.spec, spec) if has_block(operand.spec) else spec for operand, spec in pairs]
    if any(spec is None for spec in restored):
        return None
    return OutputSharding(restored[0] if isinstance(outputs, DTensorSpec) else tuple(restored))


def _put_back(spec: DTensorSpec, output: DTensorSpec) -> DTensorSpec | None:
    placements = list(output.placements)
    for axis, (p, q) in enumerate(zip(spec.placements, output.placements, strict=True)):
        # Nothing to put back: no block placement on this axis, or its rows are reduced to a partial value.
        if not isinstance(p, _BlockGTPShard) or q.is_partial():
            continue
        if not isinstance(q, Shard) or output.shape[q.dim] != spec.shape[p.dim]:
            return None  # not the same rows
        placements[axis] = on_dim(p, q.dim)
    return with_placements(output, placements)


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
        return sharding  # no values are read: nothing to gather
    return OutputSharding(
        sharding.output_spec,
        sharding.redistribute_schema or schema_gathered,
        needs_redistribute=True,
        use_val_from_redistribute_schema=sharding.use_val_from_redistribute_schema,
    )
