"""DTensors with GTPShard placements: layouts, redistribution, modules.

Four ranks are simulated in one process (LocalTensorMode over the fake process group).
"""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.tensor as dtensor
from placement_common import (
    CASES,
    Case,
    Meshes,
    assert_holds,
    coded,
    each_block_size,
    each_case,
    local_tensors,
    shard,
    simulated_meshes,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as local_shape_and_offset

from dtensor_gtp.placement import GTPShard


@pytest.fixture(scope="module")
def meshes() -> Iterator[Meshes]:
    with simulated_meshes() as made:
        yield made


@each_block_size
@each_case
def test_each_rank_holds_its_blocks(meshes: Meshes, case: Case, block_size: int) -> None:
    """Made from a whole tensor, from the parts of all ranks, and from summands."""
    mesh, placements = case.on(meshes, block_size)
    tensor = coded(case.shape)
    source = shard(tensor, mesh, placements)
    assert_holds(source, tensor, placements)
    assert torch.equal(whole(source), tensor)
    for rank, local in local_tensors(source).items():
        sizes, offsets = local_shape_and_offset(
            case.shape, mesh.shape, list(divmod(rank, 2)) if case.left else [rank], placements
        )
        region = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        assert torch.equal(local, tensor[region].reshape(sizes))
        assert local.is_contiguous()
    sizes = {"shape": tensor.shape, "stride": tensor.stride()}
    assert_holds(DTensor.from_local(source.to_local(), mesh, placements, **sizes), tensor, placements)
    summands = shard(tensor, mesh, [*case.left, Replicate()]).to_local()
    partial = DTensor.from_local(summands, mesh, [*case.left, Partial()], **sizes)
    assert_holds(partial.redistribute(mesh, placements), tensor * mesh.size(mesh.ndim - 1), placements)


@pytest.mark.parametrize("block_size", [4, 16])
@each_case
def test_redistribute_to_every_layout_and_back(meshes: Meshes, case: Case, block_size: int) -> None:
    mesh, placements = case.on(meshes, block_size)
    tensor = coded(case.shape)
    source = shard(tensor, mesh, placements)
    last_dim = len(case.shape) - 1
    targets: list[tuple[Placement, ...]] = [
        (Replicate(),) * mesh.ndim,
        (*case.left, Replicate()),
        (*case.left, Shard(0)),
        (*case.left, Shard(last_dim)),
        (*case.left, GTPShard(case.dim, block_size=3)),
        (*case.left, GTPShard(last_dim, block_size=2)),
        (*[Replicate()] * (mesh.ndim - 1), placements[-1]),
        (*[Shard(last_dim)] * (mesh.ndim - 1), placements[-1]),
        (Shard(last_dim),) * mesh.ndim,
    ]
    for target in dict.fromkeys(targets):
        moved = source.redistribute(mesh, target)
        assert_holds(moved, tensor, target)
        assert_holds(moved.redistribute(mesh, placements), tensor, placements)


@each_case
def test_r20_full_tensor_backward_gives_each_rank_its_rows(meshes: Meshes, case: Case) -> None:
    for block_size in (1, 4):
        mesh, placements = case.on(meshes, block_size)
        tensor = coded(case.shape)
        source = shard(tensor, mesh, placements).requires_grad_()
        (source.redistribute(mesh, [Replicate()] * mesh.ndim).to_local() * tensor).sum().backward()
        assert source.grad is not None
        assert_holds(source.grad, tensor, placements)


@pytest.mark.parametrize("shape", [(16, 3), (10, 2), (2, 3), (0, 2)], ids=str)
def test_split_factor_is_the_layout_of_swapped_axes(meshes: Meshes, shape: tuple[int, ...]) -> None:
    tensor = coded(shape)
    mesh = meshes.gtp_tp
    placements = (GTPShard(0, split_factor=2), Shard(0))
    source = shard(tensor, mesh, placements)
    assert_holds(source, tensor, placements)
    swapped = local_tensors(shard(tensor, meshes.tp_gtp, (Shard(0), GTPShard(0))))
    assert torch.equal(whole(source), tensor)
    for rank, local in local_tensors(source).items():
        gtp, tp = divmod(rank, 2)
        assert torch.equal(local, swapped[tp * 2 + gtp])
        sizes, offsets = local_shape_and_offset(shape, mesh.shape, [gtp, tp], placements)
        assert torch.equal(local, tensor[offsets[0] : offsets[0] + sizes[0]])
    assert_holds(source.redistribute(mesh, [Replicate(), Shard(0)]), tensor, [Replicate(), Shard(0)])
    assert_holds(source + source, tensor * 2, placements)
    if shape == (16, 3):  # a block size that torch cuts, too
        placements = (GTPShard(0, split_factor=2, block_size=4), Shard(0))
        assert_holds(shard(tensor, mesh, placements), tensor, placements)


MISREAD = "cannot shard dim . of shape .* Put the axis that splits first to the left"
NOT_LAST = "must be the last placement that shards its tensor dim"


@pytest.mark.parametrize(
    ("shape", "placements", "error", "message"),
    [
        ((20, 3), (GTPShard(0, split_factor=2, block_size=4), Shard(0)), ValueError, MISREAD),
        ((20, 3), (GTPShard(0, split_factor=2, block_size=4), Replicate()), ValueError, MISREAD),
        ((9, 3), (GTPShard(0, split_factor=2), Shard(0)), ValueError, MISREAD),
        ((3, 9), (GTPShard(1, split_factor=2), Shard(1)), ValueError, MISREAD),
        ((16, 3), (GTPShard(0, block_size=4), Shard(0)), NotImplementedError, NOT_LAST),
        ((16, 3), (GTPShard(0, block_size=4), GTPShard(0, block_size=4)), NotImplementedError, NOT_LAST),
        ((16, 3), (GTPShard(0, split_factor=2), GTPShard(0, block_size=12)), NotImplementedError, NOT_LAST),
    ],
    ids=str,
)
def test_placements_that_dtensor_misreads_are_refused(
    meshes: Meshes, shape: tuple[int, ...], placements: tuple[Placement, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shard(coded(shape), meshes.gtp_tp, placements)


def test_blocks_that_torch_cuts_alike_are_no_blocks_after_a_strided_cut(meshes: Meshes) -> None:
    """What ``fully_shard`` asks for around a block placement; torch's own name for it is the one that works."""
    tensor = coded((16, 3))
    source = shard(tensor, meshes.gtp_tp, (GTPShard(0, split_factor=2), GTPShard(0, block_size=4)))
    placements = (GTPShard(0, split_factor=2), GTPShard(0))
    assert source.placements == placements
    assert_holds(source, tensor, placements)


def test_fully_shard_over_a_dim_in_blocks_is_refused(meshes: Meshes) -> None:
    # FSDP2 would cut the blocks once more and describe the result by dims
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "gtp"))
    module = nn.Linear(3, 10, bias=False)
    module.weight = nn.Parameter(shard(coded((10, 3)), mesh["gtp"], [GTPShard(0, block_size=4)]))
    with pytest.raises(NotImplementedError, match=f"{NOT_LAST}, but got placements"):
        fully_shard(module, mesh=mesh["dp"])


def test_a_local_tensor_of_another_size_is_refused(meshes: Meshes) -> None:
    placements = [GTPShard(0, block_size=4)]
    wrong = shard(coded((10, 3)), meshes.gtp, [Shard(0)]).to_local()
    tensor = DTensor.from_local(wrong, meshes.gtp, placements, shape=torch.Size((10, 3)), stride=(3, 1))
    with pytest.raises(ValueError, match=r"over 4 chunks of 10 rows expects 4 rows as chunk 0, but .* shape \(3, 3\)"):
        tensor.full_tensor()


@pytest.mark.parametrize("name", ["uneven", "dim1", "tp_same_dim", "replicated"])
def test_distribute_tensor(meshes: Meshes, name: str) -> None:
    mesh, placements = CASES[name].on(meshes, 4)
    tensor = coded(CASES[name].shape)
    for src_data_rank in (0, None):
        made = dtensor.distribute_tensor(nn.Parameter(tensor), mesh, placements, src_data_rank=src_data_rank)
        assert_holds(made, tensor, placements)
        assert made.requires_grad
        assert made.is_leaf
        assert dtensor.distribute_tensor(made, mesh, placements) is made
    if name == "uneven":  # negative dims count from the end
        made = dtensor.distribute_tensor(tensor, mesh, [GTPShard(-2, block_size=4)])
        assert_holds(made, tensor, placements)
        assert "placements=(GTPShard(dim=0, block_size=4),)" in repr(made)


def test_distribute_tensor_imported_before_is_torchs_own(meshes: Meshes) -> None:
    # torch rebuilds each sharding from its dim; the result is a correct DTensor, but without blocks
    stock = dtensor.distribute_tensor.__wrapped__  # type: ignore[attr-defined]
    made = stock(coded((10, 3)), meshes.gtp, [GTPShard(0, block_size=4)])
    assert_holds(made, coded((10, 3)), [Shard(0)])


# --- modules, pickles -------------------------------------------------------------------------------------------------


def test_parameters_gradients_and_state_dicts(meshes: Meshes) -> None:
    mesh, placements = meshes.tp_gtp, (Shard(0), GTPShard(0, block_size=4))
    tensor = coded((25, 2))
    module = nn.Module()
    module.weight = nn.Parameter(shard(tensor, mesh, placements))
    assert module.weight.requires_grad
    assert_holds(module.weight.data, tensor, placements)
    module.weight.grad = torch.ones_like(module.weight)
    (module.weight * 3).sum().backward()
    assert_holds(module.weight.grad, torch.full_like(tensor, 4), placements)
    module.zero_grad(set_to_none=False)
    assert_holds(module.weight.grad, torch.zeros_like(tensor), placements)

    saved = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        module.weight.zero_()
    module.load_state_dict(saved)
    assert_holds(module.weight.data, tensor, placements)
    module.load_state_dict({"weight": saved["weight"] * 2}, assign=True)
    assert_holds(module.weight.data, tensor * 2, placements)

    again = copy.deepcopy(module)
    assert_holds(again.weight.data, tensor * 2, placements)
    assert again.weight.to_local() is not module.weight.to_local()
    module.to(torch.float64)
    assert_holds(module.weight.data, (tensor * 2).double(), placements)
