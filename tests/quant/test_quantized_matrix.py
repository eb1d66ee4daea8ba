"""Every recipe on every mesh: a cut of it in CI, the whole with the soak tests.

What is compared: the loss of each rank, gradients and parameters after the step, with one process whose weights are
dequantized (or whose GEMMs are in float8, by values). Losses are the same bits where no sum of tensor parallelism is in
between: every rank runs the same ops on the same values. Gradients are sums over ranks in another order than over rows,
so they agree to the default tolerance of ``assert_close`` for float32 (1.3e-6 relative, 1e-5 absolute), some roundings
of 2^-24 for each of the terms.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from common import GlooTest, _mesh
from quant_common import (
    COLUMNS,
    Net,
    blocks_only,
    check,
    compile_layers,
    cut_layers,
    fsdp,
    fully_sharded,
    gtp,
    is_linear,
    uneven,
    up_only,
)
from runtime_common import assert_idle
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp.quant import MXFP8, NVFP4, Float8Blockwise, Float8Rowwise, Float8Tensorwise, Recipe

warnings.filterwarnings("ignore", "The recipe .* asks for float8 GEMMs, which torch lacks on CPUs")

FLOAT8 = tuple(
    cls(compute="float8", high_precision_wgrad=is_high)
    for cls in (Float8Tensorwise, Float8Rowwise, Float8Blockwise)
    for is_high in (False, True)
)
DEQUANTIZED = (Float8Tensorwise(), Float8Rowwise(), Float8Blockwise(), MXFP8(), MXFP8(scale_rounding="floor"), NVFP4())
# With one maximum for the whole tensor, which ranks could get wrong by taking that of their own part.
WITH_AMAX = (Float8Tensorwise(), NVFP4())
BOTH = {"up": ColwiseParallel(), "down": RowwiseParallel()}
PLANS = (
    {"up": ColwiseParallel(output_layouts=Replicate())},
    {"down": RowwiseParallel(input_layouts=Replicate())},
    BOTH,
)
TIED = {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
Make = Callable[[], nn.Module]


def other_biases(*sizes: int) -> nn.Module:
    """A bias where there was none, and none where there was one."""
    model = Net(*sizes)
    for layer in model.layers:
        layer.up.register_parameter("bias", None)
        layer.down.bias = nn.Parameter(torch.randn(layer.down.out_features))
    return model


def tied(rows: int) -> nn.Module:
    """With a head that is the embedding, of a size that can be cut into whole blocks."""
    model = Net()
    model.embedding, model.head = nn.Embedding(rows, 40), nn.Linear(40, rows, bias=False)
    uneven(model.embedding.weight)
    model.head.weight = model.embedding.weight
    return model


def is_head(module: nn.Module, name: str) -> bool:
    return name == "head"


def on_gtp(recipe: Recipe, mesh: DeviceMesh, make: Make = Net, names: Any = blocks_only, steps: int = 1) -> None:
    """By default odd shapes; with a bias and without one."""
    torch.manual_seed(0)
    assert_idle(check(make(), recipe, gtp(recipe, mesh, names), mesh, names=names, steps=steps))


def under_fsdp(recipe: Recipe, mesh: DeviceMesh, make: Make, names: Any = up_only, **options: Any) -> None:
    torch.manual_seed(3)
    check(make(), recipe, fully_sharded(recipe, mesh, names, **options), mesh, names=names, steps=1)


def under_tp(recipe: Recipe, mesh: DeviceMesh, make: Make, plan: Any = None, is_compiled: bool = False) -> None:
    """Cut by tensor parallelism, then by gtp, then, if there is such an axis, by ``fully_shard``."""
    torch.manual_seed(4)
    plan = plan or BOTH
    names = is_head if plan is TIED else blocks_only
    has_dp = "dp" in mesh.mesh_dim_names

    def shard(model: nn.Module) -> nn.Module:
        if plan is TIED:
            parallelize_module(model, mesh["tp"], plan)
            model.head.weight = model.embedding.weight
        else:
            cut_layers(model, mesh["tp"], plan)
        model = gtp(recipe, mesh["gtp"], names)(model)
        if is_compiled:
            compile_layers(model)
        return fsdp(model, mesh["dp"]) if has_dp else model

    data = mesh["dp", "gtp"] if has_dp else mesh["gtp"]
    check(make(), recipe, shard, data, names=names, steps=1, cut=tuple(plan))


class TestOneAxis(GlooTest):
    world_size = 2

    def test_r19_gtp(self) -> None:
        for recipe in (*DEQUANTIZED, *FLOAT8[:-1]):
            on_gtp(recipe, self.gtp_mesh(), steps=2)

    def test_fully_shard(self) -> None:
        """Shards hold whole blocks, or cut them: rows that ranks do not divide into blocks, or at all, and columns."""
        for recipe in (*DEQUANTIZED, *FLOAT8[:-1]):
            rows = 256 if isinstance(recipe, Float8Blockwise) else 64
            under_fsdp(recipe, self.gtp_mesh(), partial(Net, hidden=rows))
        for recipe, rows, options in (
            (MXFP8(), 64, {"reshard_after_forward": False}),
            (Float8Tensorwise(), 64, {"reshard_after_forward": False}),
            (MXFP8(), 80, {}),
            (NVFP4(), 80, {"reshard_after_forward": False}),
            (Float8Blockwise(), 80, {}),
            (Float8Tensorwise(), 37, {}),
            (MXFP8(), 64, COLUMNS),
        ):
            under_fsdp(recipe, self.gtp_mesh(), partial(Net, hidden=rows), **options)


class TestSeveralAxes(GlooTest):
    def test_r19_tensor_parallel(self) -> None:
        for recipe in (*DEQUANTIZED, FLOAT8[0]):
            under_tp(recipe, _mesh((2, 2), ("gtp", "tp")), partial(Net, hidden=256))

    @pytest.mark.long
    def test_tensor_parallel_in_float8(self) -> None:
        for recipe, is_compiled in (*((recipe, False) for recipe in FLOAT8[1:]), (FLOAT8[4], True)):
            under_tp(recipe, _mesh((2, 2), ("gtp", "tp")), partial(Net, hidden=256), is_compiled=is_compiled)

    def test_two_axes(self) -> None:
        """Replicas of gtp; ``fully_shard`` with replicas; and around gtp, where the outer axis must cut columns of
        recipes with blocks of rows, or gtp must."""
        replicas = _mesh((2, 2), ("replicate", "dp"))
        for recipe in WITH_AMAX:
            on_gtp(recipe, self.hsdp_mesh())
            under_fsdp(recipe, replicas, partial(Net, hidden=128))
        mesh = _mesh((2, 2), ("dp", "gtp"))
        for recipe, inner, outer in (
            (Float8Tensorwise(), {}, {}),
            (Float8Rowwise(), COLUMNS, {}),
            (MXFP8(), {}, COLUMNS),
            (NVFP4(), COLUMNS, {}),
        ):
            self.check_around(recipe, mesh["gtp"], mesh["dp"], mesh, inner, outer)

    def check_around(
        self, recipe: Recipe, gtp_mesh: Any, outer: Any, data: Any, inner: dict[str, Any], options: dict[str, Any]
    ) -> None:
        torch.manual_seed(0)
        shard = gtp(recipe, gtp_mesh, **inner)
        check(Net(), recipe, lambda model: fsdp(shard(model), outer, **options), data, steps=1)

    def test_three_axes(self) -> None:
        """Two of them with two ranks; the other pairs are in the tests above."""
        mesh = _mesh((2, 1, 2), ("replicate", "dp", "gtp"))
        for recipe, inner in zip(WITH_AMAX, ({}, COLUMNS), strict=True):
            self.check_around(recipe, mesh["gtp"], mesh["replicate", "dp"], mesh, inner, {})
        mesh = _mesh((2, 1, 2), ("dp", "gtp", "tp"))
        for recipe in (*WITH_AMAX, Float8Rowwise(compute="float8")):
            under_tp(recipe, mesh, partial(Net, 256, 128))
        under_tp(MXFP8(), mesh, partial(tied, 128), TIED)


@pytest.mark.soak
class TestMatrix(GlooTest):
    world_size = 8

    def recipes(self) -> Iterator[tuple[Recipe, bool]]:
        """And whether embeddings can be tied to their weights."""
        yield from ((recipe, True) for recipe in DEQUANTIZED)
        yield from ((recipe, False) for recipe in FLOAT8)

    def test_gtp_and_fully_shard(self) -> None:
        for recipe, has_tables in self.recipes():
            for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
                on_gtp(recipe, mesh)
                on_gtp(recipe, mesh, partial(other_biases, 64, 96))
                if has_tables:
                    on_gtp(recipe, mesh, partial(Net, is_tied=True), is_linear)
            under_fsdp(recipe, self.gtp_mesh(), partial(Net, hidden=1024))
            under_fsdp(recipe, self.gtp_mesh(), partial(other_biases, 40, 1024))
            if has_tables:
                under_fsdp(recipe, self.gtp_mesh(), partial(tied, 1024), is_head)

    def check_tensor_parallel(self, mesh: DeviceMesh, makes: Sequence[Make], plans: Sequence[Any], rows: int) -> None:
        for recipe, has_tables in self.recipes():
            for plan in plans:
                for make in makes:
                    under_tp(recipe, mesh, make, plan)
            if has_tables:
                under_tp(recipe, mesh, partial(tied, rows), TIED)

    def test_tensor_parallel(self) -> None:
        makes = partial(Net, hidden=256), partial(other_biases, 40, 256)
        self.check_tensor_parallel(_mesh((4, 2), ("gtp", "tp")), makes, PLANS, 256)

    def test_fully_shard_gtp_and_tensor_parallel(self) -> None:
        """Rows of a slice that gtp cuts into equal numbers of whole blocks, which ``fully_shard`` can cut again."""
        self.check_tensor_parallel(_mesh((2, 2, 2), ("dp", "gtp", "tp")), (partial(Net, 256, 512),), (BOTH,), 512)
