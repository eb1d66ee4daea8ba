"""GTPShard without process groups: arithmetic of its chunks, what it equals, how it prints and pickles."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
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


@pytest.mark.parametrize("num_chunks", [1, 3, 8])
def test_block_size_one_cuts_as_torch_does(num_chunks: int) -> None:
    for num_rows in range(60):
        for index, (size, offset) in enumerate(chunks(num_rows, num_chunks)):
            assert (size, offset) == Shard.local_shard_size_and_offset(num_rows, num_chunks, index)


def local_parts(shape: tuple[int, ...], mesh_shape: tuple[int, ...], *placements: Placement) -> str:
    """What each rank of a mesh holds in each dim, as DTensor and DCP compute it."""
    ranks = []
    for rank in range(torch.Size(mesh_shape).numel()):
        coordinate = [int(c) for c in torch.unravel_index(torch.tensor(rank), mesh_shape)]
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh_shape, coordinate, placements)
        parts = [f"{o}:{o + s}" if s else "-" for s, o in zip(sizes, offsets, strict=True)]
        ranks.append(",".join(parts))
    return " | ".join(ranks)


class TestLayouts(TestCase):
    def test_uneven_rows_and_fewer_blocks_than_ranks(self) -> None:
        cuts: list[tuple[Any, int, int]] = [((10, 3), 0, block_size) for block_size in (1, 2, 8)]
        cuts += [((40,), 0, 32), ((3,), 0, 32), ((128, 2), 0, 16), ((2, 10, 3), 1, 4)]
        shown = [
            f"{shape} b={block_size}: {local_parts(shape, (4,), GTPShard(dim, block_size=block_size))}"
            for shape, dim, block_size in cuts
        ]
        self.assertExpectedInline(
            "\n".join(shown),
            """\
(10, 3) b=1: 0:3,0:3 | 3:6,0:3 | 6:9,0:3 | 9:10,0:3
(10, 3) b=2: 0:4,0:3 | 4:8,0:3 | 8:10,0:3 | -,0:3
(10, 3) b=8: 0:8,0:3 | 8:10,0:3 | -,0:3 | -,0:3
(40,) b=32: 0:32 | 32:40 | - | -
(3,) b=32: 0:3 | - | - | -
(128, 2) b=16: 0:32,0:2 | 32:64,0:2 | 64:96,0:2 | 96:128,0:2
(2, 10, 3) b=4: 0:2,0:4,0:3 | 0:2,4:8,0:3 | 0:2,8:10,0:3 | 0:2,-,0:3""",
        )

    def test_two_axes(self) -> None:
        """tp cuts the same dim first, another dim, or, where the placement says so, after gtp."""
        cuts = [
            ((25, 2), (2, 3), Shard(0), GTPShard(0)),
            ((25, 2), (2, 3), Shard(0), GTPShard(0, block_size=4)),
            ((10, 3), (2, 2), Shard(1), GTPShard(0, block_size=4)),
            ((16,), (2, 2), GTPShard(0, split_factor=2), Shard(0)),
        ]
        shown = [
            f"{shape} {left} {right}: {local_parts(shape, mesh, left, right)}" for shape, mesh, left, right in cuts
        ]
        self.assertExpectedInline(
            "\n".join(shown),
            """\
(25, 2) S(0) G(0): 0:5,0:2 | 5:10,0:2 | 10:13,0:2 | 13:17,0:2 | 17:21,0:2 | 21:25,0:2
(25, 2) S(0) G(0, b=4): 0:8,0:2 | 8:13,0:2 | -,0:2 | 13:17,0:2 | 17:21,0:2 | 21:25,0:2
(10, 3) S(1) G(0, b=4): 0:8,0:2 | 8:10,0:2 | 0:8,2:3 | 8:10,2:3
(16,) G(0, sf=2) S(0): 0:4 | 8:12 | 4:8 | 12:16""",
        )


# --- identity ---------------------------------------------------------------------------------------------------------


def test_attributes() -> None:
    for placement in ALL_KINDS:
        assert isinstance(placement, GTPShard)
        assert isinstance(placement, Placement)
    assert isinstance(GTPShard(0), Shard)
    assert isinstance(GTPShard(0, block_size=2), Shard)
    assert isinstance(GTPShard(0, split_factor=2), _StridedShard)
    assert [(p.dim, p.split_factor, p.block_size) for p in ALL_KINDS] == [(0, 1, 1), (1, 1, 32), (0, 2, 1), (2, 4, 8)]
    assert GTPShard(-1, block_size=2).dim == -1
    assert GTPShard(1).is_shard()
    assert GTPShard(1, block_size=2).is_shard(1)
    assert not GTPShard(1, block_size=2).is_shard(0)
    assert not GTPShard(1, block_size=2).is_replicate()
    assert not GTPShard(1, block_size=2).is_partial()


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


class TestPrinting(TestCase):
    def test_repr_and_str(self) -> None:
        self.assertExpectedInline(
            "\n".join(f"{p!r}  {p}" for p in ALL_KINDS),
            """\
GTPShard(dim=0)  G(0)
GTPShard(dim=1, block_size=32)  G(1, b=32)
GTPShard(dim=0, split_factor=2)  G(0, sf=2)
GTPShard(dim=2, split_factor=4, block_size=8)  G(2, sf=4, b=8)""",
        )

    def test_fx_repr_evaluates_to_the_placement(self) -> None:
        for placement in ALL_KINDS:
            source, names = placement.__fx_repr__()
            again = eval(source, dict(names))
            self.assertEqual(repr(again), repr(placement))
            self.assertEqual(again, placement)


@pytest.mark.parametrize("placement", ALL_KINDS, ids=repr)
def test_copies_keep_everything(placement: GTPShard) -> None:
    buffer = io.BytesIO()
    torch.save(placement, buffer)
    buffer.seek(0)
    copies = [
        pickle.loads(pickle.dumps(placement)),
        copy.copy(placement),
        copy.deepcopy(placement),
        torch.load(buffer),  # weights_only, as is its default
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
