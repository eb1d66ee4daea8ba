"""Specs, redistribution and distribution of block placements: wrappers of [Note: block placements in DTensor]."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import _torch_compat as compat
from .._torch_compat import DTensorSpec, OpSchema, StridedShard, mesh_coordinate, redistribute_module
from ..placement import GTPShard, _BlockGTPShard, _StridedGTPShard, chunk_rows, chunk_size_and_offset

Steps = list[Any]  # torch's _TransformInfo: what happens on one mesh axis, in order


def has_block(spec: DTensorSpec) -> bool:
    return any(isinstance(p, _BlockGTPShard) for p in spec.placements)


def is_sharding(placement: Placement) -> bool:
    return isinstance(placement, Shard | StridedShard)


def is_whole_scalar(spec: DTensorSpec) -> bool:
    return spec.tensor_meta is not None and spec.ndim == 0 and spec.is_replicated()  # ndim raises without tensor_meta


def with_placements(spec: DTensorSpec, placements: Iterable[Placement]) -> DTensorSpec:
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def _gathered(placements: Iterable[Placement]) -> list[Placement]:
    """Replicate() instead of each block placement."""
    return [Replicate() if isinstance(p, _BlockGTPShard) else p for p in placements]


def _stock_siblings(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """A plain Shard instead of each block placement: the same dims, not the same layout."""
    return tuple(Shard(p.dim) if isinstance(p, _BlockGTPShard) else p for p in placements)


def gathered(spec: DTensorSpec) -> DTensorSpec:
    if has_block(spec):
        return with_placements(spec, _gathered(spec.placements))
    return spec


def stock_sibling(spec: DTensorSpec) -> DTensorSpec:
    if has_block(spec):
        return with_placements(spec, _stock_siblings(spec.placements))
    return spec


def map_specs(schema: OpSchema, function: Callable[[DTensorSpec], DTensorSpec]) -> OpSchema:
    """``schema`` with ``function`` of each spec, also of those in lists."""

    def mapped(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(mapped(item) for item in value)
        if isinstance(value, DTensorSpec):
            return function(value)
        return value

    args = tuple(mapped(value) for value in schema.args_schema)
    kwargs = {name: mapped(value) for name, value in schema.kwargs_schema.items()}
    return OpSchema(schema.op, args, kwargs, schema_info=schema.schema_info)


def has_empty_shard(spec: DTensorSpec) -> bool:
    """True if some rank of the mesh has no rows; the same answer on every rank."""
    sizes = [{size} for size in spec.shape]  # of each dim: the sizes of all ranks' parts
    for axis, placement in enumerate(spec.placements):
        if is_sharding(placement):
            dim = sharded_dim(placement)
            num_chunks = spec.mesh.size(axis)
            sizes[dim] = {_chunk_size(placement, n, num_chunks, i) for n in sizes[dim] for i in range(num_chunks)}
    return any(0 in of_dim for of_dim in sizes)


def _chunk_size(placement: Any, rows: int, num_chunks: int, index: Any) -> int:
    return placement._local_shard_size_and_offset(rows, num_chunks, index)[0]  # type: ignore[no-any-return]


def wrap_spec() -> None:
    stock_post_init = DTensorSpec.__post_init__
    stock_verify = DTensorSpec._verify_shard_order

    @functools.wraps(stock_post_init)
    def post_init(self: DTensorSpec) -> None:
        if not any(isinstance(p, _BlockGTPShard | _StridedGTPShard) for p in self.placements):
            stock_post_init(self)
            return
        self.placements = placements = as_torch_chunks(self)
        check_placements(self)
        # torch derives the shard order from plain shards. Then our placements come back.
        self.placements = _stock_siblings(placements)
        stock_post_init(self)
        self.placements = placements

    @functools.wraps(stock_verify)
    def verify(self: DTensorSpec, shard_order: Any) -> None:
        # It reads nothing but the placements.
        spec: Any = SimpleNamespace(placements=_stock_siblings(self.placements)) if has_block(self) else self
        stock_verify(spec, shard_order)

    compat.replace("spec", DTensorSpec, "__post_init__", post_init)
    compat.replace("shard order", DTensorSpec, "_verify_shard_order", verify)


def as_torch_chunks(spec: DTensorSpec) -> tuple[Placement, ...]:
    """The placements of ``spec``, in torch's own terms where those of ``fully_shard`` cut a dim of blocks once more."""
    placements = list(spec.placements)
    for axis, placement in enumerate(placements):
        if not isinstance(placement, _BlockGTPShard):
            continue
        for other_axis, other in enumerate(placements):
            if isinstance(other, StridedShard) and _shards(other, placement.dim) and spec.mesh.size(other_axis) == 1:
                placements[other_axis] = Replicate()  # one rank: it cuts nothing
        others = [other for i, other in enumerate(placements) if i != axis and _shards(other, placement.dim)]
        # Where the chunks are torch's own, the plain placement says the same. Elsewhere this one stays, and
        # ``check_placements`` refuses the spec.
        if any(isinstance(other, StridedShard) for other in others) and has_torch_chunks(spec, axis):
            placements[axis] = GTPShard(placement.dim)
    return tuple(placements)


def has_torch_chunks(spec: DTensorSpec, axis: int) -> bool:
    """Whether the ``GTPShard`` on mesh axis ``axis`` cuts its dim where ``torch.chunk`` would."""
    placement = spec.placements[axis]
    assert isinstance(placement, GTPShard)
    if placement.block_size == 1:
        return True
    if spec.tensor_meta is None:
        return False  # the sizes are not known yet
    slices = {spec.tensor_meta.shape[placement.dim]}  # plain shardings to the left cut before, strided ones afterwards
    for i, other in enumerate(spec.placements[:axis]):
        if _shards(other, placement.dim) and not isinstance(other, StridedShard):
            num = spec.mesh.size(i)
            slices = {chunk_size_and_offset(rows, num, index)[0] for rows in slices for index in range(num)}
    num_chunks = spec.mesh.size(axis)
    return all(chunk_rows(n, num_chunks, placement.block_size) == chunk_rows(n, num_chunks) for n in slices)


def check_placements(spec: DTensorSpec) -> None:
    """Refuse placements whose layout DTensor would read in two ways."""
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, _BlockGTPShard):
            others = [(i, p) for i, p in enumerate(spec.placements) if i != axis and _shards(p, placement.dim)]
            # Allowed: plain shards to the left, which cut the dim before this axis does.
            if any(i > axis or isinstance(p, StridedShard | _BlockGTPShard) for i, p in others):
                raise NotImplementedError(
                    "GTPShard with block_size > 1 must be the last placement that shards its tensor dim, but got "
                    f"placements {spec.placements}. Put its mesh axis to the right of the other axes that shard dim "
                    f"{placement.dim}, or use block_size=1."
                )
        elif isinstance(placement, _StridedGTPShard) and spec.tensor_meta is not None:
            _check_strided(placement, axis, spec, spec.tensor_meta.shape)


def _check_strided(placement: _StridedGTPShard, axis: int, spec: DTensorSpec, shape: torch.Size) -> None:
    dim = placement.dim
    before = [spec.mesh.size(i) for i, p in enumerate(spec.placements[:axis]) if _shards(p, dim)]
    slice_rows, rest = divmod(shape[dim], placement.split_factor * math.prod(before))  # a rest: unequal slices
    num_chunks = spec.mesh.size(axis)
    is_cut_again = any(_shards(p, dim) for p in spec.placements[axis + 1 :])
    has_own_chunks = chunk_rows(slice_rows, num_chunks, placement.block_size) != chunk_rows(slice_rows, num_chunks)
    if has_own_chunks or (rest != 0 and (is_cut_again or placement.block_size > 1)):
        raise ValueError(
            f"{placement!r} on mesh axis {axis} of size {num_chunks} cannot shard dim {dim} of shape {tuple(shape)}: "
            f"DTensor reads it as {placement.split_factor} equal slices, each split as by torch.chunk. Put the axis "
            f"that splits first to the left: (Shard({dim}), GTPShard({dim}, block_size={placement.block_size}))."
        )


def on_dim(placement: Placement, dim: int) -> Placement:
    """``placement`` for another tensor dim."""
    if dim == sharded_dim(placement):
        return placement
    if isinstance(placement, GTPShard):
        return GTPShard(dim, split_factor=placement.split_factor, block_size=placement.block_size)
    if isinstance(placement, StridedShard):
        return StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def _shards(placement: Placement, dim: int) -> bool:
    return is_sharding(placement) and sharded_dim(placement) == dim


def sharded_dim(placement: Placement) -> int:
    return int(placement.dim)  # type: ignore[attr-defined]


def wrap_planner() -> None:
    stock: Callable[..., Steps] = redistribute_module._gen_transform_infos_non_cached
    stock_cached: Any = redistribute_module._gen_transform_infos

    def plan(src: DTensorSpec, dst: DTensorSpec, *args: Any, **kwargs: Any) -> Steps:
        if has_block(src) or has_block(dst):
            return plan_block_redistribution(lambda *specs: stock(*specs, *args, **kwargs), src, dst)
        return stock(src, dst, *args, **kwargs)

    plan_cached = functools.cache(plan)

    def plan_or_stock(src: DTensorSpec, dst: DTensorSpec, *args: Any, **kwargs: Any) -> Steps:
        chosen: Callable[..., Steps] = plan_cached if has_block(src) or has_block(dst) else stock_cached
        return chosen(src, dst, *args, **kwargs)

    # ``leave_process_groups`` calls it: plans hold shapes at this rank's coordinate, which may change.
    def clear_caches() -> None:
        stock_cached.cache_clear()
        plan_cached.cache_clear()

    plan_or_stock.cache_clear = clear_caches  # type: ignore[attr-defined]
    compat.replace("plan", redistribute_module, "_gen_transform_infos_non_cached", plan)
    compat.replace("cached plan", redistribute_module, "_gen_transform_infos", plan_or_stock)


def plan_block_redistribution(plan_stock: Callable[..., Steps], src: DTensorSpec, dst: DTensorSpec) -> Steps:
    """Gather block placements of ``src``, let torch plan the other axes, then cut those of ``dst``: a block placement
    is the last that cuts its dim (``check_placements``)."""
    # The middle is for torch. Replicate() stands for block placements, or the partial value that is scattered last.
    make_step = redistribute_module._TransformInfo
    gathers = []
    cuts = []
    middle_src = list(src.placements)
    middle_dst = list(dst.placements)
    for axis, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True)):
        if isinstance(p, _BlockGTPShard) and p == q and not _is_recut(p.dim, axis, src, dst):
            middle_src[axis] = middle_dst[axis] = Replicate()  # not touched: torch sees nothing to do on this axis
            continue
        if isinstance(p, _BlockGTPShard):
            gathers.append(make_step(axis, (p, Replicate()), _shape_before(axis, src)))
            middle_src[axis] = Replicate()
        if isinstance(q, _BlockGTPShard):
            if p.is_partial():
                before = p  # a partial value is reduced and scattered in one step
            else:
                before = Replicate()
            cuts.append(make_step(axis, (before, q), list(src.shape)))
            middle_dst[axis] = before
    return [*gathers, *plan_stock(with_placements(src, middle_src), with_placements(src, middle_dst)), *cuts]


def _is_recut(dim: int, axis: int, src: DTensorSpec, dst: DTensorSpec) -> bool:
    """True if an axis to the left changes how it cuts ``dim``, so that ``axis`` gets other rows."""
    changed = [pair for pair in zip(src.placements[:axis], dst.placements[:axis], strict=True) if pair[0] != pair[1]]
    return any(_shards(p, dim) for pair in changed for p in pair)


def _shape_before(axis: int, spec: DTensorSpec) -> list[int]:
    """Shape of this rank's part of the tensor before mesh axis ``axis`` cuts it."""
    shape = list(spec.shape)
    for i, placement in enumerate(spec.placements[:axis]):
        if is_sharding(placement):
            dim = sharded_dim(placement)
            shape[dim] = _chunk_size(placement, shape[dim], spec.mesh.size(i), mesh_coordinate(spec.mesh, i))
    return shape


def wrap_distribute_tensor() -> None:
    modules = compat.distribute_tensor_modules()
    stock: Callable[..., DTensor] = modules[0].distribute_tensor

    @functools.wraps(stock)
    def distribute_tensor(
        tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        src_data_rank: int | None = 0,
    ) -> DTensor:
        is_block = placements is not None and any(isinstance(p, _BlockGTPShard) for p in placements)
        # If it is a DTensor, torch checks that it has these placements and returns it.
        if placements is None or not is_block or isinstance(tensor, DTensor):
            return stock(tensor, device_mesh, placements, src_data_rank=src_data_rank)
        targets = [on_dim(p, sharded_dim(p) % tensor.ndim) if is_sharding(p) else p for p in placements]
        # torch takes the axes of blocks for replicas. Then each rank cuts what it has. Detached, because
        # ``redistribute`` is recorded by autograd, and the result must be a leaf as torch's own.
        result: Any = stock(tensor, device_mesh, _gathered(targets), src_data_rank=src_data_rank).detach()
        return cast(DTensor, result.redistribute(placements=targets).requires_grad_(tensor.requires_grad))

    for module in modules:
        compat.replace("distribute_tensor", module, "distribute_tensor", distribute_tensor)
