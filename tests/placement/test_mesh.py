"""``init_weight_mesh`` and ``MeshRNG`` without communication: one process is each rank of a fake group in turn."""

import ast
import math
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from mesh_common import fake_weight_mesh, fake_world, on_each_rank
from schedules import explicit
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from dtensor_gtp import GTPShard, WeightMesh, gtp_shard, init_weight_mesh
from dtensor_gtp.random import DENSE_AXES, EXPERT_AXES

DOCS = Path(__file__).resolve().parents[2] / "docs" / "guides" / "meshes.md"
ALL = explicit(min_shard_numel=0)


def factorizations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return (factors for factors in product(divisors, repeat=num_factors) if math.prod(factors) == number)


Group = tuple[int, ...]


def group_of(mesh: DeviceMesh) -> Group:
    """This rank's group of a 1-D mesh; the process group must have the mesh's ranks in its order."""
    ranks = mesh.mesh.tolist()
    assert dist.get_rank() in ranks
    assert dist.get_process_group_ranks(mesh.get_group()) == ranks
    return tuple(ranks)


def groups(of_ranks: list[Group]) -> list[Group]:
    return sorted(set(of_ranks))


# --- the documentation ------------------------------------------------------------------------------------------------


# One column is a call, one row a mesh; "-" is an axis of size 1. docs/guides/meshes.md shows a part of it.
GROUPS = """
| | `gtp=2, tp=4` | `replicate=2, tp=4` | `dp=2, tp=4` | `gtp=2, tp=4, ep=2, expert_gtp=2` |
|---|---|---|---|---|
| `mesh["tp"]` | [0-3] [4-7] | [0-3] [4-7] | [0-3] [4-7] | [0-3] [4-7] |
| `mesh["gtp"]` | [0,4] [1,5] [2,6] [3,7] | - | - | [0,4] [1,5] [2,6] [3,7] |
| `mesh["dp"]` | - | - | [0,4] [1,5] [2,6] [3,7] | - |
| `mesh["replicate"]` | - | [0,4] [1,5] [2,6] [3,7] | - | - |
| `mesh.data` | [0,4] [1,5] [2,6] [3,7] | [0,4] [1,5] [2,6] [3,7] | [0,4] [1,5] [2,6] [3,7] | [0,4] [1,5] [2,6] [3,7] |
| `mesh["ep"]` | - | - | - | [0,2] [1,3] [4,6] [5,7] |
| `mesh["expert_gtp"]` | - | - | - | [0,1] [2,3] [4,5] [6,7] |
| `mesh["expert_dp"]` | [0-7] | [0-3] [4-7] | [0-7] | [0,4] [1,5] [2,6] [3,7] |

| | `dp=2, gtp=2, tp=2` | `replicate=2, cp=2, gtp=2` | `replicate=2, gtp=4, ep=2, expert_gtp=2` |
|---|---|---|---|
| `mesh["tp"]` | [0,1] [2,3] [4,5] [6,7] | - | - |
| `mesh["gtp"]` | [0,2] [1,3] [4,6] [5,7] | [0,1] [2,3] [4,5] [6,7] | [0-3] [4-7] |
| `mesh["cp"]` | - | [0,2] [1,3] [4,6] [5,7] | - |
| `mesh["dp"]` | [0,4] [1,5] [2,6] [3,7] | - | - |
| `mesh.data` | [0,2,4,6] [1,3,5,7] | [0-7] | [0-7] |
| `mesh.batch` | [0,2,4,6] [1,3,5,7] | [0,1,4,5] [2,3,6,7] | [0-7] |
| `mesh["ep"]` | - | - | [0,2] [1,3] [4,6] [5,7] |
| `mesh["expert_gtp"]` | - | - | [0,1] [2,3] [4,5] [6,7] |
"""


def groups_in(tables: str) -> list[tuple[str, str, list[Group]]]:
    """(arguments, mesh, groups) for each cell of tables of groups."""
    cells = []
    for table in re.findall(r"(?:^\|.*\n)+", tables, re.M):
        lines = [line.removeprefix("|").removesuffix("|") for line in table.splitlines()]
        header, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
        for name, *texts in rows:
            for arguments, text in zip(header[1:], texts, strict=True):
                cells.append((arguments.strip("`"), name.strip("`"), parse_groups(text)))
    return cells


def parse_groups(text: str) -> list[Group]:
    if text == "-":
        return [(rank,) for rank in range(8)]
    parsed: list[Group] = []
    for group in re.findall(r"\[([\d,-]+)\]", text):
        first, dash, last = group.partition("-")
        parsed.append(tuple(range(int(first), int(last) + 1)) if dash else ast.literal_eval(f"({group})"))
    return parsed


def test_documented_groups_are_the_groups() -> None:
    section = DOCS.read_text().partition("## Groups of eight ranks")[2].partition("\n## ")[0]
    documented_cells = groups_in(section)
    assert len(documented_cells) == 8
    cells = groups_in(GROUPS)
    assert [cell for cell in documented_cells if cell not in cells] == []
    calls = {arguments for arguments, _, _ in cells}
    assert len(calls) == 7
    for call in calls:
        names = [name for arguments, name, _ in cells if arguments == call]
        of_ranks = on_each_rank(
            8, lambda mesh, n=names: [group_of(eval(name, {"mesh": mesh})) for name in n], **eval(f"dict({call})")
        )
        expected = [cell for arguments, _, cell in cells if arguments == call]
        for name, seen, documented in zip(names, zip(*of_ranks, strict=True), expected, strict=True):
            assert groups(list(seen)) == documented, f"{name} for {call}"


def test_documented_code_names_what_exists() -> None:
    text = DOCS.read_text()
    attributes = set(re.findall(r"`mesh\.(\w+)", text))
    assert {"data", "batch", "weights", "expert_weights", "flatten", "fork_rng", "rng"} <= attributes
    assert all(hasattr(WeightMesh, name) or name in WeightMesh.__dataclass_fields__ for name in attributes)
    axes = {axis for call in re.findall(r'mesh\[("[^]]+")\]', text) for axis in re.findall(r'"(\w+)"', call)}
    assert axes <= {*DENSE_AXES, *EXPERT_AXES}


# --- meshes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 4, 6])
def test_every_factorization_is_row_major(world_size: int) -> None:
    with fake_world(world_size):
        for shape in factorizations(world_size, 6):
            mesh = init_weight_mesh("cpu", **dict(zip(DENSE_AXES, shape, strict=True)))
            assert mesh.dense.mesh_dim_names == DENSE_AXES
            assert mesh.dense.mesh.tolist() == torch.arange(world_size).view(shape).tolist()
            pp, replicate, dp, cp, gtp, _ = shape
            assert tuple(mesh.expert.shape) == (pp, replicate, world_size // (pp * replicate), 1, 1, 1)
            assert mesh.data.size() == replicate * dp * cp * gtp
            assert mesh.batch.size() == replicate * dp * gtp
            copies = replicate * dp * cp
            assert tuple(mesh.weights.shape) == ((gtp,) if copies == 1 else (copies, gtp))
            for axis in DENSE_AXES:
                assert mesh[axis].mesh_dim_names == (axis,)
                assert mesh[axis].size() == mesh.dense.size(DENSE_AXES.index(axis))


def test_every_expert_factorization_is_row_major() -> None:
    with fake_world(8):
        for pp, replicate in ((1, 2), (2, 1)):
            for expert_dp, ep, expert_gtp, expert_tp in factorizations(8 // pp // replicate, 4):
                sizes = {"ep": ep, "expert_gtp": expert_gtp, "expert_tp": expert_tp}
                mesh = init_weight_mesh("cpu", pp=pp, replicate=replicate, tp=8 // pp // replicate, **sizes)
                assert mesh.expert.mesh_dim_names == EXPERT_AXES
                shape = (pp, replicate, expert_dp, ep, expert_gtp, expert_tp)
                assert mesh.expert.mesh.tolist() == torch.arange(8).view(shape).tolist()
                copies = replicate * expert_dp
                assert tuple(mesh.expert_weights.shape) == ((expert_gtp,) if copies == 1 else (copies, expert_gtp))
                assert mesh["expert_tp"].size() == expert_tp


def test_meshes_hold_what_they_should_on_every_rank() -> None:
    def look(mesh: WeightMesh) -> tuple[Any, ...]:
        weights = (mesh.weights.mesh.tolist(), mesh.weights.mesh_dim_names)
        coordinates = (mesh.batch.get_coordinate(), mesh.data.get_coordinate())
        return (*weights, *coordinates, group_of(mesh.flatten("replicate", "cp")))

    weights, names, batch, data, flat = zip(*on_each_rank(8, look, replicate=2, cp=2, gtp=2, ep=2), strict=True)
    assert list(weights) == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 8
    assert list(names) == [("copies", "gtp")] * 8
    assert [index for (index,) in batch] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [index for (index,) in data] == list(range(8))
    assert groups(list(flat)) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    with fake_weight_mesh(8, rank=5, dp=2, gtp=2, tp=2) as mesh:
        assert mesh.weights.mesh.tolist() == [[1, 3], [5, 7]]
        assert mesh.weights.mesh_dim_names == ("dp", "gtp")
        stages = init_weight_mesh("cpu", pp=2, gtp=2, tp=2, ep=2)
        assert stages.weights.mesh.tolist() == [5, 7]
        assert stages["pp"].mesh.tolist() == [1, 5]
        assert stages.expert_weights.mesh.tolist() == [[5], [7]]
        assert stages.expert_weights == stages["expert_dp", "expert_gtp"]


def test_flattening_makes_no_group_that_exists() -> None:
    with fake_weight_mesh(8, gtp=2, tp=4) as mesh:
        assert mesh.data == mesh.batch == mesh.weights == mesh["gtp"]
        assert mesh.flatten("dp", "cp") == mesh["cp"]
        mesh = init_weight_mesh("cpu", dp=2, cp=2, gtp=2)
        assert mesh.flatten("dp", "cp").get_group() is mesh.flatten("dp", "cp").get_group()
        assert mesh.flatten("dp", "cp").mesh_dim_names == ("dp_cp",)


def test_unknown_axes() -> None:
    with fake_weight_mesh(8, dp=2, gtp=2, tp=2) as mesh:
        assert mesh["dp", "gtp"].mesh.tolist() == [[0, 2], [4, 6]]
        assert mesh["ep"].mesh_dim_names == ("ep",)
        message = r"axes of one view in its order, \('pp', 'replicate', 'dp', 'cp', 'gtp', 'tp'"
        for axes in ("gpt", ("dp", "ep"), ("gtp", "dp"), ("gtp", "gtp"), ()):
            with pytest.raises(KeyError, match=message):
                mesh[axes]
        with pytest.raises(KeyError, match=message):
            mesh.flatten("dp", "ep")


def test_repr_shows_the_groups() -> None:
    with fake_weight_mesh(64, gtp=32, tp=2) as large:
        shown = str(large)
    with fake_weight_mesh(8, rank=3, gtp=2, tp=4, ep=2) as mesh:
        assert repr(mesh) == str(mesh)
        assert str(mesh).splitlines() == [
            "WeightMesh of 8 cpu ranks (this is rank 3)",
            "  dense",
            "    pp            1",
            "    replicate     1",
            "    dp            1",
            "    cp            1",
            "    gtp           2  [0,4] [1,5] [2,6] [3,7]",
            "    tp            4  [0-3] [4-7]",
            "  expert",
            "    pp            1",
            "    replicate     1",
            "    expert_dp     4  [0,2,4,6] [1,3,5,7]",
            "    ep            2  [0,1] [2,3] [4,5] [6,7]",
            "    expert_gtp    1",
            "    expert_tp     1",
        ]
    assert "    tp            2  [0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15] and 24 more" in shown


def test_the_result_is_frozen_and_the_identity_is_an_order() -> None:
    with fake_weight_mesh(4, gtp=4, rank_order=range(4)) as mesh:
        assert mesh.dense.mesh.flatten().tolist() == [0, 1, 2, 3]
        with pytest.raises(AttributeError, match="cannot assign to field"):
            mesh.dense = mesh.expert  # type: ignore[misc]


# --- one root ---------------------------------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def test_tp_gtp_and_fsdp_combine_on_eight_ranks() -> None:
    with fake_weight_mesh(8, rank=5, dp=2, gtp=2, tp=2) as mesh:
        model = parallelize_module(mlp(), mesh["tp"], PLAN)
        gtp_shard(model, mesh["gtp"], schedule=ALL)
        weight = model[0].weight
        assert weight.device_mesh.mesh_dim_names == ("tp", "gtp")
        assert weight.device_mesh.mesh.tolist() == [[4, 6], [5, 7]]
        assert weight.placements == (Shard(0), GTPShard(0))
        fully_shard(model, mesh=mesh["dp"])
        weight = model[0].weight
        assert weight.device_mesh.mesh_dim_names == ("dp", "tp", "gtp")
        assert tuple(weight.to_local().shape) == (2, 8)
        mesh = init_weight_mesh("cpu", replicate=2, cp=2, tp=2)
        model = gtp_shard(parallelize_module(mlp(), mesh["tp"], PLAN), mesh.weights, schedule=ALL)
        weight = model.get_parameter("2.weight")
        assert weight.device_mesh.mesh_dim_names == ("tp", "copies", "gtp")
        assert weight.device_mesh.shape == (2, 4, 1)
        assert weight.placements == (Shard(1), Replicate(), GTPShard(0))


def test_experts_fold_over_the_same_ranks() -> None:
    with fake_weight_mesh(8, rank=5, gtp=2, tp=4, ep=2, expert_gtp=2) as mesh:
        experts = nn.Linear(8, 6, bias=False)
        experts.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 8, 6), mesh["ep"], [Shard(0)]))
        model = nn.Sequential(nn.Linear(8, 16), experts)
        gtp_shard(experts, mesh.expert_weights, schedule=ALL, shard_placement_fn=lambda p: GTPShard(1))
        gtp_shard(model, mesh["gtp"], schedule=ALL)
        assert experts.weight.device_mesh.mesh_dim_names == ("ep", "expert_dp", "expert_gtp")
        assert experts.weight.placements == (Shard(0), Replicate(), GTPShard(1))
        assert tuple(experts.weight.to_local().shape) == (2, 4, 6)
        assert model[0].weight.device_mesh.mesh_dim_names == ("gtp",)


# --- the order of the calls -------------------------------------------------------------------------------------------


def test_tensor_parallelism_after_gtp_shard() -> None:
    with fake_weight_mesh(8, dp=2, gtp=2, tp=2) as mesh:
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        gtp_shard(model, mesh["gtp"], schedule=ALL)
        before = dict(model.named_parameters())
        plans: tuple[dict[str, ParallelStyle], ...] = (
            {"0": ColwiseParallel()},
            {"0": RowwiseParallel()},
            {"1": SequenceParallel()},
        )
        for plan in plans:
            kind = "LayerNorm" if "1" in plan else "Linear"
            with pytest.raises(RuntimeError, match=f"not sharded yet, but got a {kind}: .* Call parallelize_module fi"):
                parallelize_module(model, mesh["tp"], plan)
        after = dict(model.named_parameters())
        assert all(after[name] is before[name] for name in before)
        assert model(torch.ones(2, 8)).shape == (2, 8)
        # of what gtp_shard has sharded before, not of what it is called on
        plain = parallelize_module(nn.Linear(8, 8), mesh["tp"], ColwiseParallel())
        assert isinstance(plain.weight, DTensor)
        with pytest.raises(ValueError, match=r"overlap with \('tp',.* mesh\['gtp'\] beside mesh\['tp'\]"):
            gtp_shard(plain, mesh["tp"])


def tied_stages() -> tuple[nn.Module, nn.Module]:
    """The first and the last of the pipeline stages of one rank."""
    first, last = nn.Sequential(nn.Embedding(16, 8)), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
    last[1].weight = first[0].weight
    return first, last


def test_tied_pipeline_stages_on_different_meshes() -> None:
    with fake_weight_mesh(8, rank=5, dp=2, gtp=2, tp=2) as mesh:
        first, last = tied_stages()
        gtp_shard(first, mesh["gtp"], schedule=ALL)
        message = (
            r"parameter '1.weight' of shape \(16, 8\) is '0.weight' of an earlier call on ranks \[5, 7\] of mesh axes "
            r"\('gtp',\), and this call's mesh axes \('dp', 'gtp'\) have ranks \[1, 3, 5, 7\] \(rank 5\). .*pipeline st"
        )
        with pytest.raises(ValueError, match=message):
            gtp_shard(last, mesh.weights, schedule=ALL)
        assert not isinstance(last[0].weight, DTensor)
        gtp_shard(last, mesh["gtp"], schedule=ALL)
        assert last[1].weight is first[0].weight


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"gtp": 3, "tp": 4},
            r"pp \* replicate \* dp \* cp \* gtp \* tp to be the number of ranks, 8 \(WORLD_SIZE\), but got "
            r"1 \* 1 \* 1 \* 1 \* 3 \* 4 = 12. gtp=3 does not divide 8. Change one size: gtp=2. Or start 12 "
            r"processes \(torchrun --nproc-per-node\)",
        ),
        ({"tp": 4}, r"= 4. Change one size: pp=2, replicate=2, dp=2, cp=2, gtp=2, tp=8. Or start 4 processes"),
        ({"dp": 2, "gtp": 2, "tp": 4}, r"= 16. Change one size: dp=1, gtp=1, tp=2. Or start 16"),
        ({"gtp": 3, "tp": 3}, "gtp=3 and tp=3 do not divide 8. No change of a single size would fit. Or start 9"),
        ({"gtp": 16}, "gtp=16 does not divide 8. Change one size: gtp=8."),
        (
            {"gtp": 8, "ep": 3},
            r"ep \* expert_gtp \* expert_tp to divide dp \* cp \* gtp \* tp = 8, but got 3 \* 1 \* 1 = 3. Change one "
            r"size: ep in \{1, 2, 4, 8\}",
        ),
        (
            {"replicate": 2, "gtp": 4, "ep": 4, "expert_gtp": 2},
            r"= 4, but got 4 \* 2 \* 1 = 8. Change one size: ep in \{1, 2\} or expert_gtp in \{1\}",
        ),
        ({"gtp": 8, "ep": 3, "expert_gtp": 3}, "= 9. No change of a single size would fit"),
        ({"gtp": 8, "dp": 0}, "expects dp to be at least 1, but got 0"),
        ({"gtp": 8, "expert_gtp": -1}, "expects expert_gtp to be at least 1, but got -1"),
        ({"gtp": 8, "rank_order": [0, 1]}, r"a permutation of the ranks 0 to 7, but got \[0, 1\]"),
        ({"gtp": 8, "rank_order": [0, 1, 2, 3, 4, 5, 6, 6]}, "a permutation of the ranks 0 to 7"),
        (
            {"gtp": 8, "rank_order": [1, 0, 2, 3, 4, 5, 6, 7]},
            r"cannot reorder the ranks of an existing process group to \[1, 0, .*Do not call init_process_group",
        ),
        ({"gtp": 8, "device_type": "cuda:1"}, "a device type without an index, e.g. 'cuda', but got 'cuda:1'. LOCAL_R"),
    ],
)
def test_values_that_do_not_fit(sizes: dict[str, Any], message: str) -> None:
    with fake_world(8), pytest.raises(ValueError, match=message):
        init_weight_mesh(**({"device_type": "cpu"} | sizes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gtp": 8.0}, "an int as gtp, but got float: 8.0"),
        ({"gtp": 8, "ep": True}, "an int as ep, but got bool: True"),
        ({"gtp": 8, "seed": None}, "an int as seed, but got NoneType: None"),
        ({"gtp": 8, "timeout": 60}, "a timedelta as timeout, but got int"),
    ],
)
def test_arguments_of_wrong_kind(arguments: dict[str, Any], message: str) -> None:
    with fake_world(8), pytest.raises(TypeError, match=message):
        init_weight_mesh("cpu", **arguments)


def test_copies_of_experts_are_along_replicate_and_expert_dp() -> None:
    def look(mesh: WeightMesh) -> tuple[Any, ...]:
        return (
            mesh.expert_weights.mesh.tolist(),
            mesh.expert_weights.mesh_dim_names,
            mesh.expert_weights.get_coordinate(),
        )

    meshes, names, places = zip(*on_each_rank(16, look, replicate=2, gtp=8, ep=2, expert_gtp=2), strict=True)
    # Ranks of one expert_gtp group are neighbours; those with the same shard differ in the other axes, but not in ep.
    of_first, of_second = ([[first + i, first + i + 1] for i in (0, 4, 8, 12)] for first in (0, 2))
    assert list(meshes) == [of_first, of_first, of_second, of_second] * 4
    assert list(names) == [("expert_copies", "expert_gtp")] * 16
    assert list(places) == [(rank // 4, rank % 2) for rank in range(16)]
