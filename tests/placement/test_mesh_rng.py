"""``MeshRNG`` without communication: what each rank of a fake process group draws, and what its states restore."""

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import combinations, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mesh_common import fake_weight_mesh, fake_world, on_each_rank
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor_gtp import MeshRNG, WeightMesh, init_weight_mesh
from dtensor_gtp._torch_compat import region_states
from dtensor_gtp.random import DATA_AXES, DENSE_AXES, EXPERT_AXES


@pytest.fixture
def mesh() -> Iterator[WeightMesh]:
    with fake_weight_mesh(4, gtp=2, tp=2) as mesh:
        yield mesh


def draw() -> float:
    return torch.rand(()).item()


# --- who draws what ---------------------------------------------------------------------------------------------------

SIZES = {"pp": 2, "replicate": 2, "cp": 2, "gtp": 2, "tp": 2, "ep": 2, "expert_gtp": 2}
NUM_RANKS = 32


def check_alike(values: list[Any], unlike: tuple[str, ...], view: tuple[str, ...] = DENSE_AXES) -> None:
    """Equal on exactly those ranks whose coordinates on ``pp`` and the axes ``unlike`` are equal."""
    shapes = {DENSE_AXES: (2, 2, 1, 2, 2, 2), EXPERT_AXES: (2, 2, 2, 2, 2, 1)}
    places = list(product(*map(range, shapes[view])))
    keys = [tuple(c for axis, c in zip(view, place, strict=True) if axis in ("pp", *unlike)) for place in places]
    for (a, key_a), (b, key_b) in combinations(zip(values, keys, strict=True), 2):
        assert (a == b) == (key_a == key_b), f"{a} at {key_a}, {b} at {key_b}"


REGIONS: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (  # axes, unlike along, view
    (("params",), (), DENSE_AXES),
    (("pp",), (), DENSE_AXES),
    (("sequence_parallel",), DENSE_AXES, DENSE_AXES),
    (("gtp",), ("gtp",), DENSE_AXES),
    (("tp", "gtp"), ("gtp", "tp"), DENSE_AXES),
    (("replicate", "cp"), ("replicate", "cp"), DENSE_AXES),
    (DATA_AXES, DATA_AXES, DENSE_AXES),
    (("ep", "expert_gtp"), ("ep", "expert_gtp"), EXPERT_AXES),
    (("expert_dp",), ("expert_dp",), EXPERT_AXES),
    (EXPERT_AXES, EXPERT_AXES, EXPERT_AXES),
)


def test_what_ranks_draw_is_unlike_along_the_axes_of_a_region_only() -> None:
    """Stock code draws unlike along data axes, also between and after regions."""

    def draws(mesh: WeightMesh) -> list[list[Any]]:
        outside = [draw()]
        regions = []
        for region, _, _ in REGIONS:
            with mesh.fork_rng(*region):
                first = draw()
            with mesh.fork_rng(*region):
                second = draw()
            assert first != second
            outside.append(draw())
            regions.append((first, second))
        return [[*outside, F.dropout(torch.ones(64), 0.5).tolist()], *regions]

    of_outside, *of_regions = zip(*on_each_rank(NUM_RANKS, draws, **SIZES), strict=True)
    for values in zip(*of_outside, strict=True):
        check_alike(list(values), DATA_AXES)
    for (_, unlike, view), of_region in zip(REGIONS, of_regions, strict=True):
        for values in zip(*of_region, strict=True):
            check_alike(list(values), unlike, view)


def test_regions_leave_the_stream_outside_alone() -> None:
    def without(mesh: WeightMesh) -> list[float]:
        return [draw() for _ in range(3)]

    def with_regions(mesh: WeightMesh) -> list[float]:
        values = []
        for region in ("params", "tp", "gtp"):
            with mesh.fork_rng(region):
                torch.rand(1000)
            values.append(draw())
        return values

    assert on_each_rank(4, without, gtp=2, tp=2) == on_each_rank(4, with_regions, gtp=2, tp=2)


def test_parameters_are_the_same_on_every_mesh() -> None:
    def weight(mesh: WeightMesh) -> list[float]:
        with mesh.fork_rng("params"):
            return nn.Linear(3, 2).weight.flatten().tolist()  # type: ignore[no-any-return]

    expected = on_each_rank(1, weight)[0]
    assert on_each_rank(4, weight, gtp=4) == [expected] * 4
    assert on_each_rank(8, weight, dp=2, cp=2, tp=2, ep=4) == [expected] * 8
    other = on_each_rank(1, lambda mesh: (mesh.rng.manual_seed(1), weight(mesh))[1])[0]
    assert other != expected


def test_regions_nest_and_end_with_an_exception() -> None:
    def nested(mesh: WeightMesh) -> tuple[float, float, float]:
        with mesh.fork_rng("params"):
            outer = draw()
            with mesh.fork_rng("sequence_parallel"):
                inner = draw()
            after = draw()
        return outer, inner, after

    values = on_each_rank(4, nested, gtp=2, tp=2)
    assert len({outer for outer, _, _ in values}) == 1
    assert len({inner for _, inner, _ in values}) == 4
    assert len({after for _, _, after in values}) == 1
    with fake_weight_mesh(4, gtp=4) as mesh:
        before = torch.get_rng_state()
        with pytest.raises(ZeroDivisionError), mesh.fork_rng("params"):
            draw_and_fail()
        assert torch.equal(torch.get_rng_state(), before)
        mesh.rng.state_dict()  # no region is open


def draw_and_fail() -> None:
    torch.rand(3)
    raise ZeroDivisionError


def test_unknown_regions(mesh: WeightMesh) -> None:
    for axes in ((), ("gpt",), ("gtp", "ep"), ("params", "gtp")):
        with pytest.raises(ValueError, match=r"fork_rng expects axes of one view, .* or one of \('params', 'sequence"):
            mesh.fork_rng(*axes).__enter__()


# --- activation checkpointing -----------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Draws in a region; records what it drew, once in forward and once in each recomputation."""

    def __init__(self, mesh: WeightMesh, *axes: str) -> None:
        super().__init__()
        self.mesh, self.axes = mesh, axes
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x.sin(), 0.5)
        with self.mesh.fork_rng(*self.axes):
            x = F.dropout(x.cos(), 0.5)
        x = F.dropout(x, 0.5)
        self.masks.append(x.detach() != 0)
        return x.sin()


@pytest.mark.parametrize(
    ("use_reentrant", "axes"), [(False, ("sequence_parallel",)), (True, ("sequence_parallel",)), (False, DATA_AXES)]
)
def test_recomputation_draws_the_same_numbers(use_reentrant: bool, axes: tuple[str, ...], mesh: WeightMesh) -> None:
    layers = [Dropping(mesh, *axes) for _ in range(2)]
    x = torch.rand(64, requires_grad=True)
    y = x
    for layer in layers:
        y = checkpoint(layer, y, use_reentrant=use_reentrant)
    torch.rand(7)
    state = torch.get_rng_state()
    y.sum().backward()
    for layer in layers:
        assert len(layer.masks) == 2
        assert torch.equal(layer.masks[0], layer.masks[1])
    assert not torch.equal(layers[0].masks[0], layers[1].masks[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kept", ["sin", "cos"])
def test_selective_recomputation_draws_the_same_numbers(kept: str) -> None:
    seen = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = op.name().partition(".")[0] == f"aten::{kept}"
        seen.append(is_kept)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def gradient(mesh: WeightMesh, selective: bool) -> torch.Tensor:
        mesh.rng.manual_seed(0)
        x = torch.linspace(0, 1, 64, requires_grad=True)
        layer = Dropping(mesh, "sequence_parallel")
        options: Any = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if selective else {}
        y = checkpoint(layer, x, use_reentrant=False, **options) if selective else layer(x)
        torch.rand(7)
        y.sum().backward()
        assert len(layer.masks) == (2 if selective else 1)
        assert x.grad is not None
        return x.grad

    with fake_weight_mesh(4, gtp=2, tp=2) as mesh:
        assert torch.equal(gradient(mesh, selective=True), gradient(mesh, selective=False))
        assert any(seen)


@pytest.mark.parametrize(("use_reentrant", "axes"), [(False, "tp"), (True, "params")])
def test_regions_that_would_draw_anew_are_refused_in_recomputation(
    use_reentrant: bool, axes: str, mesh: WeightMesh
) -> None:
    y = checkpoint(Dropping(mesh, axes), torch.rand(64, requires_grad=True), use_reentrant=use_reentrant)
    message = r"a function that activation checkpointing recomputes, .* but got .*Draw bef"
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


class Rounding(torch.autograd.Function):
    """Draws in a backward of its own, which is no recomputation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: WeightMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with ctx.mesh.fork_rng("gtp"):
            return grad + torch.rand_like(grad), None


def test_a_backward_may_draw(mesh: WeightMesh) -> None:
    x = torch.zeros(3, requires_grad=True)
    Rounding.apply(x, mesh).sum().backward()
    assert x.grad is not None
    assert ((x.grad > 1) & (x.grad < 2)).all()


# --- states -----------------------------------------------------------------------------------------------------------


def use_all(mesh: WeightMesh) -> list[float]:
    values = [draw(), torch.randn(()).item()]
    for region in ("params", "sequence_parallel", "gtp"):
        with mesh.fork_rng(region):
            values += [draw(), torch.randn(()).item()]
    return values


def test_states_and_seeds_restore_exactly() -> None:
    def run(mesh: WeightMesh) -> None:
        use_all(mesh)
        states = mesh.rng.state_dict()
        expected = [use_all(mesh) for _ in range(3)]
        assert [use_all(mesh) for _ in range(3)] != expected
        mesh.rng.load_state_dict(states)
        assert [use_all(mesh) for _ in range(3)] == expected
        # a program that starts again, with another seed
        again = init_weight_mesh("cpu", gtp=2, tp=2, seed=17)
        of_seed = [use_all(again) for _ in range(2)]
        assert of_seed[0] != expected[0]
        again.rng.load_state_dict(states)
        assert [use_all(again) for _ in range(3)] == expected
        again.rng.manual_seed(17)
        assert [use_all(again) for _ in range(2)] == of_seed
        again.rng.manual_seed(18)
        assert [use_all(again) for _ in range(2)] != of_seed

    on_each_rank(4, run, gtp=2, tp=2)


def test_states_are_copies_under_a_key_of_their_place() -> None:
    with fake_weight_mesh(4, rank=2, gtp=2, tp=2) as mesh:
        assert isinstance(mesh.rng, Stateful)
        assert isinstance(mesh.rng, MeshRNG)
        states = mesh.rng.state_dict()
        assert list(states) == ["pp=1,replicate=1,dp=1,cp=1,gtp=2,tp=2"]
        assert list(states["pp=1,replicate=1,dp=1,cp=1,gtp=2,tp=2"]) == ["0-0-0-0-1-0"]
        cpu = states["pp=1,replicate=1,dp=1,cp=1,gtp=2,tp=2"]["0-0-0-0-1-0"]["cpu"]
        before = cpu.clone()
        torch.rand(700)
        assert torch.equal(cpu, before)


def test_states_of_another_place_or_mesh_are_refused() -> None:
    states = on_each_rank(4, lambda mesh: mesh.rng.state_dict(), gtp=2, tp=2)
    with fake_weight_mesh(4, rank=1, gtp=2, tp=2) as mesh:
        with pytest.raises(ValueError, match=r"place 0-0-0-0-0-1 on a mesh with .*gtp=2,tp=2, but got .*0-0-0-0-1-1"):
            mesh.rng.load_state_dict(states[3])
        other = init_weight_mesh("cpu", gtp=4)
        message = "On a mesh of other sizes leave the streams out of what is loaded and call"
        with pytest.raises(ValueError, match=message):
            other.rng.load_state_dict(states[1])
        of_cuda = {mesh: {place: {**s, "cuda": s["cpu"]} for place, s in p.items()} for mesh, p in states[1].items()}
        with pytest.raises(
            ValueError, match=r"states for \['cpu'\], but got \['cpu', 'cuda'\]. .* Leave the streams out"
        ):
            mesh.rng.load_state_dict(of_cuda)
        mesh.rng.load_state_dict(states[1])


def test_states_inside_a_region_are_refused(mesh: WeightMesh) -> None:
    states = mesh.rng.state_dict()
    with mesh.fork_rng("params"):
        for name, arguments in (("state_dict", ()), ("load_state_dict", (states,)), ("manual_seed", (1,))):
            with pytest.raises(RuntimeError, match=f"MeshRNG.{name} was called inside fork_rng"):
                getattr(mesh.rng, name)(*arguments)


# --- a device ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """Stands in for the default generator of device 1; touching another device's fails."""
    generator = torch.Generator()

    def of(index: int) -> torch.Generator:
        assert index == 1
        return generator

    replacements: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "manual_seed": generator.manual_seed,
        "device": lambda index: nullcontext(of(index)),
        "get_rng_state": lambda index: of(index).get_state(),
        "set_rng_state": lambda state, index: of(index).set_state(state),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr("dtensor_gtp._torch_compat.is_stream_capturing", lambda: False)
    monkeypatch.setattr(region_states.RegionStates, "_device", lambda self: torch.device("cpu"))
    return generator


def rng_on_device(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> MeshRNG:
    """Streams of rank 1 of (gtp=2, tp=2). With them the tracker of DTensor is made: here it is not, since it needs the
    device."""
    trackers: list[Any] = []
    monkeypatch.setattr("dtensor_gtp._torch_compat.seed_dtensor_rng", lambda *args: trackers.append(args))
    dense = init_device_mesh("cuda", (1, 1, 1, 1, 2, 2), mesh_dim_names=DENSE_AXES)
    expert = init_device_mesh("cuda", (1, 1, 4, 1, 1, 1), mesh_dim_names=EXPERT_AXES)
    rng = MeshRNG(dense, expert, seed)
    assert trackers == [(seed, dense)]
    return rng


def test_regions_hold_for_the_device_too(device: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw_both() -> tuple[float, float]:
        return draw(), torch.rand((), generator=device).item()

    drawn = {}
    for rank in range(4):
        with fake_world(4, rank):
            rng = rng_on_device(monkeypatch)
            outside = draw_both()
            states = rng.state_dict()
            ((of_place,),) = [list(places.values()) for places in states.values()]
            assert sorted(of_place) == ["common", "cpu", "cuda"]
            assert torch.equal(of_place["cuda"], device.get_state())
            with rng.fork("tp"):
                inside = draw_both()
            again = draw_both()
            drawn[rank] = (outside, inside)
            other = rng_on_device(monkeypatch, seed=1)
            other.load_state_dict(states)
            with other.fork("tp"):
                assert draw_both() == inside
            assert draw_both() == again
    assert drawn[0][0] == drawn[1][0] != drawn[2][0] == drawn[3][0]
    assert drawn[0][1] == drawn[2][1] != drawn[1][1] == drawn[3][1]


class Device:
    """Stands in for a default generator that lends its place to others."""

    def __init__(self) -> None:
        self.current: Any = self

    def graphsafe_get_state(self) -> Any:
        return self.current

    def graphsafe_set_state(self, state: Any) -> None:
        self.current = state


def enter(rng: MeshRNG, x: torch.Tensor) -> torch.Tensor:
    with rng.fork("sequence_parallel"):
        return x * x


def test_a_graph_has_a_state_for_each_region(device: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seed is the same on ranks that must agree; an error gives the device its own state back. A
    recomputation is refused."""
    seeds: dict[int, list[int]] = {}
    for rank in range(4):
        default, graph = Device(), mock.Mock()
        monkeypatch.setattr(torch.cuda, "default_generators", {1: default}, raising=False)
        with fake_world(4, rank), monkeypatch.context() as capturing:
            rng = rng_on_device(monkeypatch)
            with rng.fork("sequence_parallel"), rng.fork("gtp"):
                draw()
            capturing.setattr("dtensor_gtp._torch_compat.is_stream_capturing", lambda: True)
            with region_states.regions_recorded(graph):
                registered = [call.args[0] for call in graph.register_generator_state.call_args_list]
                for axes in ("sequence_parallel", "gtp"):
                    with suppress(ZeroDivisionError), rng.fork(axes):
                        assert default.current in registered
                        seeds.setdefault(rank, []).append(default.current.initial_seed())
                        raise ZeroDivisionError
                    assert default.current is default
                again = torch.ones(2, requires_grad=True)
                recomputed = checkpoint(lambda x, rng=rng: enter(rng, x), again, use_reentrant=False)
                with pytest.raises(RuntimeError, match="which would draw other numbers than the first time"):
                    recomputed.sum().backward()
                with pytest.raises(RuntimeError, match="an eager step has entered the same axes before"):
                    rng.fork("tp").__enter__()
            with pytest.raises(RuntimeError, match="fork_rng cannot be entered while a CUDA graph is captured"):
                rng.fork("gtp").__enter__()
            rng.manual_seed(7)
            assert [state.initial_seed() for state in registered] != seeds[rank]
    everywhere, along_gtp = zip(*(seeds[rank] for rank in range(4)), strict=True)
    assert len(set(everywhere)) == 4
    assert along_gtp[0] == along_gtp[1] != along_gtp[2] == along_gtp[3]


# --- compilation ------------------------------------------------------------------------------------------------------


def test_compiled_code_breaks_at_a_region_and_draws_the_same(mesh: WeightMesh) -> None:

    def dropped(x: torch.Tensor) -> torch.Tensor:
        with mesh.fork_rng("sequence_parallel"):
            x = F.dropout(x.sin(), 0.5)
        return F.dropout(x.cos(), 0.5)

    expected = dropped(torch.ones(64)), dropped(torch.ones(64))
    mesh.rng.manual_seed(0)
    compiled = torch.compile(dropped, backend="eager")
    assert torch.equal(compiled(torch.ones(64)), expected[0])
    assert torch.equal(compiled(torch.ones(64)), expected[1])


def test_a_region_is_refused_in_a_whole_graph(mesh: WeightMesh) -> None:

    @torch.compile(backend="eager", fullgraph=True)
    def dropped(x: torch.Tensor) -> torch.Tensor:
        with mesh.fork_rng("sequence_parallel"):
            return F.dropout(x, 0.5)

    with pytest.raises(RuntimeError, match="fork_rng reads a random number on the host"):
        dropped(torch.ones(64))
