"""``GTPShard``: how one tensor dim is sharded along the gtp mesh axis.

Another axis, such as tp, first splits the dim into ``split_factor`` slices (``torch.chunk``). The gtp axis splits each
slice of ``n`` rows into chunks of ``ceil(ceil(n / block_size) / world) * block_size`` rows. So every block stays whole
on one rank, the last chunk that has rows may be short, and later ones are empty. The logical tensor is never padded.

``block_size=1`` is torch's own layout: ``GTPShard(d)`` equals ``Shard(d)`` and ``GTPShard(d, split_factor=s)`` equals
``_StridedShard(d, split_factor=s)``, so everything that DTensor knows about those holds for it. With ``block_size > 1``
the chunk sizes are ours; ``_dtensor`` changes DTensor accordingly when the first such placement is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ._torch_compat import StridedShard, maybe_run_for_local_tensor, mesh_coordinate

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement as _PlacementBase
else:
    # At run time the concrete classes below are Placements through Shard or StridedShard. A second base class of torch
    # in C++ would need a second C++ object.
    _PlacementBase = object


def chunk_rows(num_rows: int, num_chunks: int, block_size: int = 1) -> int:
    """Rows of the largest (the first) chunk when ``num_rows`` rows are split into ``num_chunks`` chunks.

    Args:
        num_rows: rows of the slice that is cut, >= 0.
        num_chunks: size of the mesh axis, >= 1.
        block_size: rows that stay together on one rank, >= 1.

    Returns:
        ``ceil(ceil(num_rows / block_size) / num_chunks) * block_size``, but at most ``num_rows``.

    Example:
        >>> chunk_rows(10, 4), chunk_rows(10, 4, block_size=4)
        (3, 4)
    """
    num_blocks = -(-num_rows // block_size)
    return min(-(-num_blocks // num_chunks) * block_size, num_rows)


def chunk_size_and_offset(num_rows: int, num_chunks: int, index: int, block_size: int = 1) -> tuple[int, int]:
    """Rows of chunk ``index`` and the row of the slice that it starts at.

    Args:
        num_rows: rows of the slice that is cut, >= 0.
        num_chunks: size of the mesh axis, >= 1.
        index: coordinate on the mesh axis, in ``[0, num_chunks)``.
        block_size: rows that stay together on one rank, >= 1.

    Returns:
        ``(size, offset)``; an empty chunk has size 0 and offset ``num_rows``, as in torch.

    Example:
        >>> [chunk_size_and_offset(10, 4, index) for index in range(4)]
        [(3, 0), (3, 3), (3, 6), (1, 9)]
    """
    rows = chunk_rows(num_rows, num_chunks, block_size)
    offset = min(rows * index, num_rows)
    return min(rows, num_rows - offset), offset


class Preparation(NamedTuple):
    """Functions that change DTensor before the first placement of ours is made. Only their first call has effects."""

    for_any: Callable[[], None]  # for any placement
    for_blocks: Callable[[], None]  # for one with blocks or a split factor


class GTPShard(_PlacementBase):
    """DTensor placement: tensor dim ``dim`` is sharded along a gtp mesh axis in whole blocks.

    Args:
        dim: tensor dim. A negative one counts from the end; DTensor's own ``redistribute`` makes a plain ``Shard`` of
            it, as it does of every ``Shard`` with a negative dim.
        split_factor: slices into which axes further right in the mesh have split the dim before this one does. 1 where
            the gtp axis is to the right of those axes, as ``gtp_shard`` builds its meshes.
        block_size: rows of ``dim`` that must stay together on one rank, e.g. 32 for MXFP8, head_dim for attention.

    Raises:
        TypeError: an argument is not an int.
        ValueError: ``split_factor`` or ``block_size`` is below 1.
        NotImplementedError: ``split_factor`` or ``block_size`` is above 1 and this torch's DTensor is unknown to us.

    Example:
        >>> GTPShard(0), GTPShard(0) == torch.distributed.tensor.Shard(0)
        (GTPShard(dim=0), True)
        >>> mesh = init_weight_mesh("cpu", gtp=4)
        >>> model = nn.Linear(64, 48)  # three heads of 16 rows
        >>> heads = GTPShard(0, block_size=16)
        >>> model = gtp_shard(model, mesh.weights, shard_placement_fn=lambda param: heads)
        >>> model.weight.placements
        (GTPShard(dim=0, block_size=16),)
        >>> sizes = [None] * 4
        >>> torch.distributed.all_gather_object(sizes, model.weight.to_local().shape[0])
        >>> sizes
        [16, 16, 16, 0]
    """

    dim: int
    split_factor: int
    block_size: int
    _preparation: ClassVar[Preparation]  # set by ``_dtensor``, which imports this file

    def __new__(cls, dim: int, *, split_factor: int = 1, block_size: int = 1) -> GTPShard:
        _check_int("dim", dim)
        _check_int("split_factor", split_factor, minimum=1)
        _check_int("block_size", block_size, minimum=1)
        if cls is GTPShard:
            if split_factor > 1:
                cls = _StridedGTPShard
            elif block_size > 1:
                cls = _BlockGTPShard
            else:
                cls = _RowGTPShard
        return super().__new__(cls)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_gtp_shard, (self.dim, self.split_factor, self.block_size)

    def __repr__(self) -> str:
        return f"GTPShard({self._format('dim=', 'split_factor=', 'block_size=')})"

    def __str__(self) -> str:
        return f"G({self._format('', 'sf=', 'b=')})"

    def _format(self, dim: str, split_factor: str, block_size: str) -> str:
        shown = f"{dim}{self.dim}"
        shown += f", {split_factor}{self.split_factor}" if self.split_factor > 1 else ""
        return shown + (f", {block_size}{self.block_size}" if self.block_size > 1 else "")

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        return repr(self), {"GTPShard": GTPShard}


def _check_int(name: str, value: object, minimum: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"GTPShard expects an int as {name}, but got {value!r} of type {type(value).__name__}.")
    if minimum is not None and value < minimum:
        raise ValueError(f"GTPShard expects {name} >= {minimum}, but got {value}.")


def _rebuild_gtp_shard(dim: int, split_factor: int, block_size: int) -> GTPShard:
    return GTPShard(dim, split_factor=split_factor, block_size=block_size)


class _RowGTPShard(GTPShard, Shard):
    """``split_factor == block_size == 1``: torch's ``Shard``, equal to it and hashed alike."""

    split_factor = 1
    block_size = 1

    def __init__(self, dim: int, *, split_factor: int = 1, block_size: int = 1) -> None:
        Shard.__init__(self, dim)
        self._preparation.for_any()

    def _to_replicate_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        """In torch 2.11 the full tensor of an uneven shard is a view of the padded one. ``broadcast_from_rank0`` would
        send the padding of such a view in a full state dict as values."""
        result: Tensor = super()._to_replicate_tensor(*args, **kwargs)
        if result.is_contiguous():
            return result
        return result.contiguous()


class _StridedGTPShard(GTPShard, StridedShard):
    """``split_factor > 1``: torch's ``_StridedShard``, equal to it and hashed alike.

    DTensor reads such a placement from left to right in some places and as an order of axes in others. If the two
    differ, or if ``block_size`` needs other chunks than torch's, ``_dtensor.block_layout.check_placements`` refuses a
    spec that holds it.
    """

    def __init__(self, dim: int, *, split_factor: int = 1, block_size: int = 1) -> None:
        StridedShard.__init__(self, dim, split_factor=split_factor)
        self.block_size = block_size
        self._preparation.for_any()
        self._preparation.for_blocks()


class _BlockGTPShard(_RowGTPShard):
    """``split_factor == 1``, ``block_size > 1``: chunks of whole blocks.

    ``Shard.__eq__`` compares dims only. Python calls ``__eq__`` of the more derived operand first, so this class
    derives from every class whose objects it could be compared with.

    It overrides the methods of ``Shard`` that compute sizes. Collectives need chunks of one size, so they run on
    tensors padded to ``num_chunks * chunk_rows`` rows, which torch's own code then cuts evenly.
    """

    def __init__(self, dim: int, *, split_factor: int = 1, block_size: int = 1) -> None:
        super().__init__(dim)
        self.block_size = block_size
        self._preparation.for_blocks()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BlockGTPShard) and (self.dim, self.block_size) == (other.dim, other.block_size)

    def __hash__(self) -> int:
        return hash((self.dim, self.block_size))

    # torch's is a staticmethod that needs no block size; it is called on the placement wherever a subclass matters
    @maybe_run_for_local_tensor
    def local_shard_size_and_offset(  # type: ignore[override]
        self, curr_local_size: Any, num_chunks: int, rank: Any
    ) -> tuple[int, int]:
        return chunk_size_and_offset(curr_local_size, num_chunks, rank, self.block_size)

    def _local_shard_size_and_offset(self, curr_local_size: Any, num_chunks: int, rank: Any) -> tuple[int, int]:
        return self.local_shard_size_and_offset(curr_local_size, num_chunks, rank)

    def _split_tensor(
        self, tensor: Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[Tensor], list[int]]:
        rows = tensor.size(self.dim)
        largest = chunk_rows(rows, num_chunks, self.block_size)
        shards: list[Tensor] = []
        pad_sizes: list[int] = []
        for index in range(num_chunks):
            size, offset = chunk_size_and_offset(rows, num_chunks, index, self.block_size)
            shard = tensor.narrow(self.dim, offset, size)
            if with_padding:
                shard = _pad_rows(shard, self.dim, largest)
                pad_sizes.append(largest - size)
            shards.append(shard.contiguous() if contiguous else shard)
        return shards, pad_sizes

    @maybe_run_for_local_tensor
    def _select_split_tensor(
        self,
        tensor: Tensor,
        num_chunks: int,
        index: Any,
        *,
        with_padding: bool = True,
        contiguous: bool = True,
        clone: bool = True,
    ) -> Tensor:
        rows = tensor.size(self.dim)
        size, offset = chunk_size_and_offset(rows, num_chunks, index, self.block_size)
        shard = tensor.narrow(self.dim, offset, size)
        if with_padding:
            shard = _pad_rows(shard, self.dim, chunk_rows(rows, num_chunks, self.block_size))
        if clone:
            return shard.clone(memory_format=torch.contiguous_format)
        if contiguous:
            return shard.contiguous()
        return shard

    def _reduce_shard_tensor(self, tensor: Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int) -> Tensor:
        if mesh.get_coordinate() is None:
            return tensor
        num_chunks = mesh.size(mesh_dim)
        padded = self._pad_whole(tensor, num_chunks)
        shard = super()._reduce_shard_tensor(padded, mesh, reduce_op, mesh_dim)
        return self._unpad_shard(shard, tensor.size(self.dim), num_chunks, mesh_coordinate(mesh, mesh_dim))

    def _to_replicate_tensor(
        self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[Any]
    ) -> Tensor:
        num_chunks = mesh.size(mesh_dim)
        rows = current_logical_shape[self.dim]
        padded = self._pad_shard(local_tensor, rows, num_chunks, mesh_coordinate(mesh, mesh_dim))
        padded_shape = list(current_logical_shape)
        padded_shape[self.dim] = self._padded_rows(rows, num_chunks)
        whole = super()._to_replicate_tensor(padded, mesh, mesh_dim, padded_shape)
        return self._unpad_whole(whole, rows)

    def _to_new_shard_dim(self, *args: object, **kwargs: object) -> Tensor:
        raise AssertionError(
            f"{self!r} reaches another sharding through Replicate(), but DTensor planned an all-to-all."
        )

    # LocalTensorMode runs several ranks in one process, and their sizes may differ. So each step that computes with
    # sizes is a function that this mode can run once for each rank; none of them communicates.

    @maybe_run_for_local_tensor
    def _padded_rows(self, rows: int, num_chunks: int) -> int:
        return chunk_rows(rows, num_chunks, self.block_size) * num_chunks

    @maybe_run_for_local_tensor
    def _pad_whole(self, tensor: Tensor, num_chunks: int) -> Tensor:
        largest = chunk_rows(tensor.size(self.dim), num_chunks, self.block_size)
        return _pad_rows(tensor, self.dim, largest * num_chunks).contiguous()

    @maybe_run_for_local_tensor
    def _unpad_whole(self, tensor: Tensor, rows: int) -> Tensor:
        return tensor.narrow(self.dim, 0, rows).contiguous()

    @maybe_run_for_local_tensor
    def _pad_shard(self, shard: Tensor, rows: int, num_chunks: int, index: int) -> Tensor:
        size, _ = chunk_size_and_offset(rows, num_chunks, index, self.block_size)
        if shard.size(self.dim) != size:
            raise ValueError(
                f"{self!r} over {num_chunks} chunks of {rows} rows expects {size} rows as chunk {index}, but the "
                f"local tensor has shape {tuple(shard.shape)}. Split the tensor with chunk_size_and_offset()."
            )
        return _pad_rows(shard, self.dim, chunk_rows(rows, num_chunks, self.block_size)).contiguous()

    @maybe_run_for_local_tensor
    def _unpad_shard(self, shard: Tensor, rows: int, num_chunks: int, index: int) -> Tensor:
        size, _ = chunk_size_and_offset(rows, num_chunks, index, self.block_size)
        return shard.narrow(self.dim, 0, size).contiguous()


def _pad_rows(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """``tensor`` with ``dim`` filled up with zeros to ``rows``; works for dtypes that ``functional.pad`` refuses."""
    size = tensor.size(dim)
    if size == rows:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = rows
    padded = tensor.new_zeros(shape)
    padded.narrow(dim, 0, size).copy_(tensor)
    return padded


# torch.load(weights_only=True), its default, rebuilds only what is listed
torch.serialization.add_safe_globals([_rebuild_gtp_shard])


__all__ = ["GTPShard", "chunk_rows", "chunk_size_and_offset"]
