"""GTPShard without process groups: arithmetic of its chunks, what it equals, how it prints and pickles."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_gtp._dtensor import block_layout, propagation
from dtensor_gtp.placement import GTPShard, Preparation, chunk_rows, chunk_size_and_offset

ALL_KINDS = [
    GTPShard(0),
    GTPShard(1, block_size=32),
    GTPShard(0, split_factor=2),
    GTPShard(2, split_factor=4, block_size=8),
]


def chunks(num_rows: int, num_chunks: int, block_size: int = 1) -> list[tuple[int, int]]:
    return [chunk_size_and_offset(num_rows, num_chunks, index, block_size) for index in range(num_chunks)]


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 128])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 7, 8])
def test_chunks_are_whole_blocks_in_order(num_chunks: int, block_size: int) -> None:
    for num_rows in range(140):
        cut = chunks(num_rows, num_chunks, block_size)
        end = 0
        for size, offset in cut:
            assert offset == end
            end += size
        assert end == num_rows
        sizes = [size for size, _ in cut if size > 0]
        assert all(size % block_size == 0 for size in sizes[:-1])
        assert len(set(sizes[:-1])) <= 1
        num_blocks = -(-num_rows // block_size)
        assert chunk_rows(num_rows, num_chunks, block_size) == min(-(-num_blocks // num_chunks) * block_size, num_rows)
        assert cut[0] == (chunk_rows(num_rows, num_chunks, block_size), 0)
        if block_size == 1:
            indices = range(num_chunks)
            assert cut == [Shard.local_shard_size_and_offset(num_rows, num_chunks, index) for index in indices]


# --- identity ---------------------------------------------------------------------------------------------------------


def test_attributes() -> None:
    assert all(isinstance(placement, GTPShard) and isinstance(placement, Placement) for placement in ALL_KINDS)
    of_torch = [Shard, Shard, _StridedShard, _StridedShard]
    assert all(isinstance(placement, kind) for placement, kind in zip(ALL_KINDS, of_torch, strict=True))
    assert [(p.dim, p.split_factor, p.block_size) for p in ALL_KINDS] == [(0, 1, 1), (1, 1, 32), (0, 2, 1), (2, 4, 8)]
    assert GTPShard(-1, block_size=2).dim == -1
    block = GTPShard(1, block_size=2)
    assert (block.is_shard(1), block.is_shard(0), block.is_replicate(), block.is_partial()) == (
        True,
        False,
        False,
        False,
    )
    assert GTPShard(1).is_shard()


def test_torch_layouts_equal_torch_placements() -> None:
    for ours, theirs in [
        (GTPShard(0), Shard(0)),
        (GTPShard(1), Shard(1)),
        (GTPShard(1, split_factor=4), _StridedShard(1, split_factor=4)),
        (GTPShard(1, split_factor=4, block_size=2), _StridedShard(1, split_factor=4)),
    ]:
        assert ours == theirs
        assert theirs == ours
        assert hash(ours) == hash(theirs)


def test_block_layouts_equal_only_themselves() -> None:
    block = GTPShard(0, block_size=32)
    assert block == GTPShard(0, block_size=32)
    assert hash(block) == hash(GTPShard(0, block_size=32))
    others = [Shard(0), GTPShard(0), GTPShard(1, block_size=32), GTPShard(0, block_size=16)]
    for other in (*others, GTPShard(0, split_factor=32), _StridedShard(0, split_factor=1), None):
        assert block != other
        assert other != block
    assert len({block, Shard(0), GTPShard(0), GTPShard(0, block_size=16), GTPShard(0, block_size=32)}) == 3


def test_repr_and_str() -> None:
    assert [f"{placement!r}  {placement}" for placement in ALL_KINDS] == [
        "GTPShard(dim=0)  G(0)",
        "GTPShard(dim=1, block_size=32)  G(1, b=32)",
        "GTPShard(dim=0, split_factor=2)  G(0, sf=2)",
        "GTPShard(dim=2, split_factor=4, block_size=8)  G(2, sf=4, b=8)",
    ]


@pytest.mark.parametrize("placement", ALL_KINDS, ids=repr)
def test_copies_keep_everything(placement: GTPShard) -> None:
    buffer = io.BytesIO()
    torch.save(placement, buffer)
    buffer.seek(0)
    source, names = placement.__fx_repr__()
    copies = [
        pickle.loads(pickle.dumps(placement)),
        copy.copy(placement),
        copy.deepcopy(placement),
        torch.load(buffer),  # weights_only, as is its default
        eval(source, dict(names)),
    ]
    for again in copies:
        assert type(again) is type(placement)
        assert repr(again) == repr(placement)
        assert again == placement
        assert hash(again) == hash(placement)


# --- cutting a tensor -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("block_size", [2, 4, 32])
def test_split_tensor_gives_the_chunks(dim: int, block_size: int) -> None:
    shape = [3, 3, 3]
    shape[dim] = 10
    tensor = torch.arange(90.0).view(shape)
    placement = GTPShard(dim, block_size=block_size)
    expected = [tensor.narrow(dim, o, s) for s, o in chunks(10, 4, block_size)]
    largest = chunk_rows(10, 4, block_size)

    shards, pad_sizes = placement._split_tensor(tensor, 4, with_padding=False)
    assert pad_sizes == []
    padded, pad_sizes = placement._split_tensor(tensor, 4)
    for index, chunk in enumerate(expected):
        assert torch.equal(shards[index], chunk)
        assert shards[index].is_contiguous()
        size = chunk.size(dim)
        assert pad_sizes[index] == largest - size
        assert padded[index].size(dim) == largest
        assert torch.equal(padded[index].narrow(dim, 0, size), chunk)
        assert torch.all(padded[index].narrow(dim, size, largest - size) == 0)
        selected = placement._select_split_tensor(tensor, 4, index, with_padding=False)
        assert torch.equal(selected, chunk)
        assert selected.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert torch.equal(placement._select_split_tensor(tensor, 4, index), padded[index])


def test_float8_shards_can_be_padded() -> None:
    tensor = torch.arange(10, dtype=torch.float32).to(torch.float8_e4m3fn)
    shards, pad_sizes = GTPShard(0, block_size=4)._split_tensor(tensor, 4)
    assert pad_sizes == [0, 0, 2, 4]
    assert [shard.float().tolist() for shard in shards] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0], [0, 0, 0, 0]]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        *((TypeError, r"expects an int as dim, but got .* of type ", {"dim": dim}) for dim in ("0", None, 1.0, True)),
        *((ValueError, f"expects block_size >= 1, but got {value}", {"block_size": value}) for value in (0, -32)),
        *((ValueError, f"expects split_factor >= 1, but got {value}", {"split_factor": value}) for value in (0, -1)),
        *((TypeError, "expects an int as block_size, but got", {"block_size": value}) for value in ("32", 2.0, True)),
        *((TypeError, "expects an int as split_factor, but got", {"split_factor": value}) for value in (None, True)),
    ],
)
def test_bad_arguments(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"GTPShard {message}"):
        GTPShard(**({"dim": 0} | arguments))
    with pytest.raises(TypeError, match="positional argument"):
        GTPShard(0, 32)  # type: ignore[misc]


def test_unknown_dtensor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved() -> None:
        raise AttributeError("module has no attribute '_gen_transform_infos'")

    monkeypatch.setattr(block_layout, "wrap_spec", moved)
    monkeypatch.setattr(GTPShard, "_preparation", Preparation(propagation.prepare, propagation.install.__wrapped__))
    for kwargs in ({"block_size": 2}, {"split_factor": 2}):
        message = r"does not know the DTensor of torch .*_gen_transform_infos.*Use"
        with pytest.raises(NotImplementedError, match=message):
            GTPShard(0, **kwargs)
    assert GTPShard(0) == Shard(0)
