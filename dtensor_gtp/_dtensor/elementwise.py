"""Elementwise ops on DTensors: which ops these are, and how their operands and outputs are sharded.

[Note: operands that lie alike]
torch searches all combinations of placements, which on four axes takes up to a second for each new op and shape. But an
elementwise op whose operands have one shape, mesh and placements moves nothing, and its output lies as they do.
``propagate_alike`` answers so at once, just as torch would. It leaves to torch:

* another shape or other placements, except scalars that each rank holds whole;
* partial values, placements of other libraries, shards in another order than the default one;
* an op whose rule is not torch's own, and a rank outside of the mesh;
* what the compiler traces, because comparisons would specialize symbolic shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from .. import _torch_compat as compat
from .._torch_compat import DTensorSpec, OpSchema, OutputSharding, StockRule, StridedShard, TensorMeta, stock_rule
from ..placement import GTPShard, _BlockGTPShard
from .block_layout import has_block, is_sharding, is_whole_scalar, map_specs, on_dim, sharded_dim, with_placements

# Ops that treat each element by itself, beside those that torch tags as pointwise and their in-place variants.
_ELEMENTWISE = frozenset(
    {
        "_to_copy.default", "alias.default", "bernoulli.default", "bernoulli_.float", "clone.default", "copy_.default",
        "detach.default", "empty_like.default", "equal.default", "fill_.Scalar", "fill_.Tensor", "full_like.default",
        "native_dropout.default", "normal_.default", "ones_like.default", "rand_like.default", "randint_like.default",
        "randint_like.low_dtype", "randn_like.default", "uniform_.default", "zero_.default", "zeros_like.default",
    }
)  # fmt: skip

# Ops whose output has the dtype of their operands if these are floats of one dtype, or of the float they write to.
_KEEPS_FLOAT = frozenset(
    {
        "_to_copy", "abs", "add", "addcdiv", "addcmul", "alias", "clamp", "clamp_max", "clamp_min", "clone", "copy",
        "detach", "div", "empty_like", "exp", "fill", "full_like", "lerp", "log", "maximum", "minimum", "mul", "neg",
        "normal", "ones_like", "pow", "rand_like", "randn_like", "reciprocal", "relu", "rsqrt", "rsub", "sigmoid",
        "sign", "sqrt", "sub", "tanh", "uniform", "zero", "zeros_like",
    }
)  # fmt: skip

_LIST_OPS = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")
_FUSED_STEPS = 5  # the argument of the fused Adams that may lie on its own mesh: the numbers of steps


class Operand(NamedTuple):
    """A tensor argument of an op: position or name of the argument, index if it stands in a list, and its spec."""

    argument: int | str
    element: int | None
    spec: DTensorSpec
    is_mutated: bool
    is_aliased: bool


class NotElementwiseError(Exception):
    """The shapes of an elementwise op do not let its operands share one sharding."""


def operands_of(schema: OpSchema) -> Iterator[Operand]:
    """In the order of ``map_specs``."""
    arguments = schema.op._schema.arguments
    by_name = {argument.name: argument for argument in arguments}
    # Positional arguments that have their defaults are missing at the end of ``args_schema``.
    values: list[tuple[int | str, Any, Any]] = [*zip(count(), schema.args_schema, arguments, strict=False)]
    values += [(name, value, by_name.get(name)) for name, value in schema.kwargs_schema.items()]
    for argument, value, declared in values:
        alias = getattr(declared, "alias_info", None)
        # ``Tensor(a!)`` is written to; of ``Tensor(a)`` the output is a view.
        is_mutated = alias is not None and alias.is_write
        is_aliased = alias is not None and not alias.is_write
        for element, item in enumerate(value) if isinstance(value, list | tuple) else ((None, value),):
            if isinstance(item, DTensorSpec):
                yield Operand(argument, element, item, is_mutated, is_aliased)


def unsupported(op: Any, operands: Iterable[Operand], why: str) -> NotImplementedError:
    specs = ", ".join(str(o.spec) for o in operands if has_block(o.spec))
    return NotImplementedError(
        f"{op} does not support a GTPShard with block_size > 1 ({specs}): {why}. Call full_tensor() or redistribute "
        f"the DTensor to Replicate() first, or work on to_local()."
    )


def _is_list_op(op: Any) -> bool:
    """Whether ``op`` treats the i-th elements of lists of tensors by themselves."""
    return str(op._schema.name).startswith(_LIST_OPS)


def _groups(op: Any, operands: Sequence[Operand]) -> list[list[Operand]]:
    """The operands that the op combines: for a list op, those of each element of its lists with those of all."""
    if not _is_list_op(op):
        return [list(operands)]
    shared = [o for o in operands if o.element is None]  # for all elements, e.g. the coefficient of clipping
    groups: dict[int, list[Operand]] = {}
    for operand in operands:
        if operand.element is not None:
            groups.setdefault(operand.element, []).append(operand)
    return [groups[element] + shared for element in sorted(groups)]


def is_elementwise(op: Any) -> bool:
    if _is_list_op(op):
        return stock_rule(op) is StockRule.POINTWISE  # others reduce or multiply the tensors of the lists
    if torch.Tag.pointwise in op.tags or str(op).removeprefix("aten.") in _ELEMENTWISE:
        return True
    # torch leaves some in-place variants untagged: ask for aten::foo.bar what aten::foo_.bar does.
    namespace, _, name = op._schema.name.partition("::")
    packet = None
    if name.endswith("_"):
        packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    overload = getattr(packet, op._overloadname, None)
    return overload is not None and torch.Tag.pointwise in overload.tags


def propagate_elementwise(schema: OpSchema, operands: Sequence[Operand], out_meta: Any) -> OutputSharding:
    """Bring all operands of each element of the op to one sharding; the outputs have it too."""
    leaders: list[DTensorSpec] = []
    specs: dict[tuple[int | str, int | None], DTensorSpec] = {}
    for group in _groups(schema.op, operands):
        leader = _leading_spec(schema.op, group)
        leaders.append(leader)
        for operand in group:
            specs[operand.argument, operand.element] = _aligned(schema.op, operand, leader)
    aligned = [specs[o.argument, o.element] for o in operands]
    changed = [o for o, spec in zip(operands, aligned, strict=True) if spec.placements != o.spec.placements]
    # ``redistribute_local_args`` leaves keyword arguments as they are.
    if any(isinstance(o.argument, str) for o in changed):
        raise unsupported(schema.op, operands, "DTensor cannot redistribute a keyword argument")
    remaining = iter(aligned)  # ``map_specs`` asks for them in the same order
    suggested = None
    if changed:
        suggested = map_specs(schema, lambda _: next(remaining))
    output = _outputs(leaders, out_meta, _is_list_op(schema.op))
    return OutputSharding(output, suggested, needs_redistribute=bool(changed))


def _leading_spec(op: Any, group: Sequence[Operand]) -> DTensorSpec:
    """The spec that the others follow: of the tensor written to, else of the first with block placements, else any."""
    leader = next((o for o in group if o.is_mutated), None)
    if leader is None:
        leader = min(group, key=lambda o: (not has_block(o.spec), not o.spec.is_sharded()))  # False sorts first
    spec = leader.spec
    if not any(p.is_partial() for p in spec.placements):
        return spec
    if leader.is_mutated:
        raise unsupported(op, group, f"it would write to a tensor with partial values, {spec}")
    # An op of terms is not the op of their sum, so the sum comes first.
    return _with_placements(spec, [Replicate() if p.is_partial() else p for p in spec.placements], spec.tensor_meta)


def _aligned(op: Any, operand: Operand, leader: DTensorSpec) -> DTensorSpec:
    spec = operand.spec
    if spec.mesh != leader.mesh:
        if not spec.is_replicated():
            raise ValueError(f"Cannot run {op} on inputs with different meshes: got {leader.mesh} and {spec.mesh}.")
        return spec  # whole on each rank, so it goes with any mesh
    placements = _broadcast(leader.placements, leader.shape, spec.shape)
    if placements == list(spec.placements):
        return spec  # nothing to move
    if operand.is_mutated:
        raise unsupported(
            op, [operand, operand._replace(spec=leader)], ("it writes to tensors with different placements")
        )
    return _with_placements(spec, placements, spec.tensor_meta)


def _broadcast(placements: Iterable[Placement], shape: torch.Size, other: torch.Size) -> list[Placement]:
    """Placements for a tensor of shape ``other`` whose rows go with those of a tensor of ``shape`` in a broadcast."""
    shift = len(other) - len(shape)  # a broadcast aligns the last dims
    result: list[Placement] = []
    for placement in placements:
        if not is_sharding(placement):
            result.append(placement)
            continue
        dim = sharded_dim(placement) + shift
        rows = shape[sharded_dim(placement)]
        if dim < 0 or (other[dim] == 1 and rows != 1):
            result.append(Replicate())  # one row goes with all rows: each rank needs it
        elif other[dim] == rows:
            result.append(on_dim(placement, dim))
        else:
            raise NotElementwiseError
    return result


def _with_placements(spec: DTensorSpec, placements: Sequence[Placement], meta: TensorMeta | None) -> DTensorSpec:
    # With strided shards the operand says how they are read; None lets ``DTensorSpec`` decide.
    is_order = None
    if any(isinstance(p, StridedShard) for p in placements):
        is_order = spec.use_strided_shard_as_shard_order
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta, use_strided_shard_as_shard_order=is_order)


def _outputs(leaders: Sequence[DTensorSpec], out_meta: Any, is_list_op: bool) -> Any:
    def output(leader: DTensorSpec, meta: TensorMeta | None) -> DTensorSpec | None:
        if meta is None:
            return None  # an output that the op leaves out
        return _with_placements(leader, _broadcast(leader.placements, leader.shape, meta.shape), meta)

    if out_meta is None:
        return None  # the op returns nothing, e.g. an in-place foreach op
    if isinstance(out_meta, TensorMeta):
        return output(leaders[0], out_meta)
    if is_list_op and len(out_meta) != len(leaders):
        raise NotElementwiseError
    if is_list_op:
        of_each = leaders
    else:
        of_each = [leaders[0]] * len(out_meta)
    return tuple(output(leader, meta) for leader, meta in zip(of_each, out_meta, strict=True))


def propagate_alike(schema: OpSchema, operands: Sequence[Operand]) -> OutputSharding | None:
    """What torch's search would find for an op of [Note: operands that lie alike]; None for any other op."""
    op = schema.op
    rule = None
    if is_elementwise(op) and not compat.is_tracing_dtensors():
        rule = stock_rule(op)
    if rule is None or not _has_equal_lists(schema):
        return None
    leaders = []
    for group in _groups(op, operands):
        # Scalars that each rank holds whole follow the others.
        leader = next((o.spec for o in group if not is_whole_scalar(o.spec)), group[0].spec)
        if not _has_known_layout(leader) or not all(_goes_with(op, operand, leader) for operand in group):
            return None
        leaders.append(leader)
    returns = [str(value.type) for value in op._schema.returns]
    if not returns:
        return OutputSharding(None)  # it writes in place only
    # A bool, as of ``aten.equal``, and mixed results are left to torch.
    if (returns != ["List[Tensor]"]) if _is_list_op(op) else (set(returns) != {"Tensor"}):
        return None
    out_meta = _out_meta(schema, operands, leaders)
    # Only rules for the whole mesh keep the classes of placements. All others answer in torch's own.
    if rule is not StockRule.WHOLE_MESH:
        leaders = [_with_placements(s, [_of_stock_class(p) for p in s.placements], s.tensor_meta) for s in leaders]
    try:
        return OutputSharding(_outputs(leaders, out_meta, _is_list_op(op)))
    except NotElementwiseError:
        return None


def _has_equal_lists(schema: OpSchema) -> bool:
    """Whether a list op has lists of one length that hold tensors only, and any other op has none."""
    lists = [value for value in schema.args_schema if isinstance(value, list | tuple)]
    lists = [items for items in lists if any(isinstance(item, DTensorSpec) for item in items)]
    is_full = all(isinstance(item, DTensorSpec) for items in lists for item in items)
    return bool(lists) == _is_list_op(schema.op) and is_full and len({len(items) for items in lists}) <= 1


def _goes_with(op: Any, operand: Operand, leader: DTensorSpec) -> bool:
    """Whether ``operand`` lies as ``leader``, or is a whole scalar, so that torch would leave it where it is."""
    spec = operand.spec
    is_scalar = is_whole_scalar(spec)
    if spec.mesh != leader.mesh:
        return is_scalar and operand.argument == _FUSED_STEPS and op._schema.name.startswith("aten::_fused_")
    if is_scalar:
        return leader.ndim == 0 or not operand.is_mutated  # read by all, but written to only beside other scalars
    if isinstance(operand.argument, str):
        is_shared = not operand.is_mutated  # out= is one more element, lr= a number for all
    else:
        is_shared = _is_list_op(op) and operand.element is None
    return spec.tensor_meta is not None and not is_shared and _layout(spec) == _layout(leader)


def _layout(spec: DTensorSpec) -> tuple[Any, ...]:
    return spec.placements, spec.shape, spec.shard_order, spec.use_strided_shard_as_shard_order


def _has_known_layout(spec: DTensorSpec) -> bool:
    """Whether ``spec`` has only placements of torch and ours, in their default order, and this rank has a part."""
    if spec.tensor_meta is None or spec.mesh.get_coordinate() is None:
        return False
    if not all(isinstance(p, GTPShard) or type(p) in (Shard, StridedShard, Replicate) for p in spec.placements):
        return False
    return _layout(spec) == _layout(with_placements(spec, spec.placements))  # rebuilt, a spec has the default order


def _of_stock_class(placement: Placement) -> Placement:
    """``placement`` as torch's rules name it; they have no name for a block placement, which stays itself."""
    if isinstance(placement, _BlockGTPShard):
        return placement
    if isinstance(placement, StridedShard):
        return StridedShard(placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return Shard(placement.dim)
    return placement


def _out_meta(schema: OpSchema, operands: Sequence[Operand], leaders: Sequence[DTensorSpec]) -> Any:
    """Shapes, strides and dtypes of the outputs; from fake tensors where they may not be those of the operands."""
    op = schema.op
    if op._schema.name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_") in _KEEPS_FLOAT:
        given: list[Any] = [o.spec.tensor_meta for o in operands]
        written: list[Any] = [o.spec.tensor_meta for o in operands if o.is_mutated]
        metas = written or [leader.tensor_meta for leader in leaders]
        # A new tensor is contiguous if all operands are.
        is_alike = written or (len({meta.dtype for meta in given}) == 1 and all(map(_is_contiguous, given)))
        if is_alike and _can_only_be(metas[0].dtype, schema, given):
            if _is_list_op(op):
                return metas
            return metas[0]
    return compat.op_dispatcher().sharding_propagator._propagate_tensor_meta_non_cached(schema)  # a run on fake tensors


def _can_only_be(dtype: torch.dtype, schema: OpSchema, given: Iterable[TensorMeta]) -> bool:
    """Whether ``dtype`` is a float, and no argument asks for a complex or other dtype, or for strides of its own."""
    if not dtype.is_floating_point or any(meta.dtype.is_complex for meta in given):
        return False
    harmless = (None, dtype, torch.strided, torch.preserve_format, torch.contiguous_format)
    given_values = (*schema.args_schema, *schema.kwargs_schema.values())
    values = [item for value in given_values for item in (value if isinstance(value, list | tuple) else [value])]
    kinds = DTensorSpec | int | float | str | torch.device | torch.Generator
    return all(isinstance(value, kinds) or value in harmless for value in values)


def _is_contiguous(meta: TensorMeta) -> bool:
    expected = 1
    # Stricter than ``is_contiguous``: strides of dims of size 1 count, too.
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True
