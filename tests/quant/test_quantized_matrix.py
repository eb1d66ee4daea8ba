"""Every recipe on every mesh: a cut of it in CI, the whole with the soak tests.

What is compared: the loss of each rank, gradients and parameters after the step, with one process whose weights are
dequantized (or whose GEMMs are in float8, by values). Losses are the same bits where no sum of tensor parallelism is in
between: every rank runs the same ops on the same values. Gradients are sums over ranks in another order than over rows,
so they agree to the default tolerance of ``assert_close`` for float32 (1.3e-6 relative, 1e-5 absolute), some roundings
of 2^-24 for each of the terms.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from common import GlooTest, _mesh
from float8_reference import float8_reference
from quant_common import Net, blocks_only, check, fsdp, gtp, reference_of, uneven
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.common_utils import run_tests

from dtensor_gtp import quantize_
from dtensor_gtp.quant import MXFP8, NVFP4, Float8Blockwise, Float8Rowwise, Float8Tensorwise, Recipe

warnings.filterwarnings("ignore", "The recipe .* asks for float8 GEMMs, which torch lacks on CPUs")

FLOAT8 = (
    Float8Tensorwise(compute="float8"),
    Float8Tensorwise(compute="float8", high_precision_wgrad=True),
    Float8Rowwise(compute="float8"),
    Float8Rowwise(compute="float8", high_precision_wgrad=False),
    Float8Blockwise(compute="float8"),
    Float8Blockwise(compute="float8", high_precision_wgrad=True),
)
DEQUANTIZED = (Float8Tensorwise(), Float8Rowwise(), Float8Blockwise(), MXFP8(), MXFP8(scale_rounding="floor"), NVFP4())
PLANS = {
    "column": {"up": ColwiseParallel(output_layouts=Replicate())},
    "row": {"down": RowwiseParallel(input_layouts=Replicate())},
    "both": {"up": ColwiseParallel(), "down": RowwiseParallel()},
}


def is_layer(suffix: str, module: nn.Module, name: str) -> bool:
    return blocks_only(module, name) and name.endswith(suffix)


def is_linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear)


def compare(
    recipe: Recipe,
    model: nn.Module,
    shard: Callable[[nn.Module], nn.Module],
    data: DeviceMesh,
    names: Callable[[nn.Module, str], bool] = blocks_only,
    cut: dict[str, Any] | None = None,
) -> None:
    """One step of one combination.

    Args:
        data: Mesh whose ranks see different rows.
        cut: Plan of tensor parallelism over two ranks.
    """
    is_float8 = recipe.compute == "float8"
    make_reference = partial(float8_reference, num_slices=2, cut=tuple(cut or ())) if is_float8 else reference_of
    check(
        model,
        recipe,
        shard,
        data,
        names=names,
        steps=1,
        is_exact=cut is None,
        make_reference=make_reference,
        by_rank=is_float8,
    )


def other_biases(model: nn.Module) -> nn.Module:
    """A bias where there was none, and none where there was one."""
    for layer in model.layers:  # type: ignore[union-attr]
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


class Combinations:
    """Of one recipe; each has its own start."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def gtp(self, mesh: DeviceMesh) -> Iterator[None]:
        torch.manual_seed(0)
        yield compare(self.recipe, Net(), gtp(self.recipe, mesh), mesh)  # odd shapes; a bias and none
        torch.manual_seed(1)
        yield compare(self.recipe, other_biases(Net(dim=64, hidden=96)), gtp(self.recipe, mesh), mesh)
        if self.recipe.compute != "float8":
            torch.manual_seed(2)
            yield compare(self.recipe, Net(is_tied=True), gtp(self.recipe, mesh, is_linear), mesh, is_linear)

    def fsdp(self, mesh: DeviceMesh, rows: int) -> Iterator[None]:
        torch.manual_seed(3)
        names = partial(is_layer, "up")
        shard = lambda model: fsdp(quantize_(model, self.recipe, filter_fn=names), mesh)  # noqa: E731
        yield compare(self.recipe, Net(hidden=rows), shard, mesh, names)
        yield compare(self.recipe, other_biases(Net(hidden=rows)), shard, mesh, names)
        if self.recipe.compute != "float8":
            shard = lambda model: fsdp(quantize_(model, self.recipe, filter_fn=is_head), mesh)  # noqa: E731
            yield compare(self.recipe, tied(rows), shard, mesh, is_head)

    def tensor_parallel(self, mesh: DeviceMesh, plan: str, hidden: int = 256) -> Iterator[None]:
        torch.manual_seed(4)
        shard = lambda model: gtp(self.recipe, mesh["gtp"])(self._parallel(model, mesh, plan))  # noqa: E731
        for model in (Net(hidden=hidden), other_biases(Net(hidden=hidden))):
            yield compare(self.recipe, model, shard, mesh["gtp"], cut=PLANS[plan])

    def tied_head(self, mesh: DeviceMesh, rows: int) -> Iterator[None]:
        """Cut by tensor parallelism along its rows, then by gtp, then, if there is such an axis, by ``fully_shard``."""
        torch.manual_seed(6)
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }

        def shard(model: nn.Module) -> nn.Module:
            parallelize_module(model, mesh["tp"], plan)
            model.head.weight = model.embedding.weight
            model = gtp(self.recipe, mesh["gtp"], is_head)(model)
            return fsdp(model, mesh["dp"]) if "dp" in mesh.mesh_dim_names else model

        data = mesh["dp", "gtp"] if "dp" in mesh.mesh_dim_names else mesh["gtp"]
        yield compare(self.recipe, tied(rows), shard, data, is_head, cut=plan)

    def all_three(self, mesh: DeviceMesh, hidden: int = 512) -> Iterator[None]:
        """Rows of a slice that gtp cuts into equal numbers of whole blocks, which ``fully_shard`` can cut again."""
        torch.manual_seed(5)
        shard = lambda model: fsdp(  # noqa: E731
            gtp(self.recipe, mesh["gtp"])(self._parallel(model, mesh, "both")), mesh["dp"]
        )
        model = Net(dim=256, hidden=hidden)
        yield compare(self.recipe, model, shard, mesh["dp", "gtp"], cut=PLANS["both"])

    @staticmethod
    def _parallel(model: nn.Module, mesh: DeviceMesh, plan: str) -> nn.Module:
        for layer in model.layers:  # type: ignore[union-attr]
            parallelize_module(layer, mesh["tp"], PLANS[plan])
        return model


def run(*combinations: Iterator[None]) -> None:
    for combination in combinations:
        list(combination)


class TestCut(GlooTest):
    """What the other tests of quantized training leave out, on as few ranks as there can be."""

    def test_fully_shard_gtp_and_tensor_parallel(self) -> None:
        mesh = _mesh((2, 1, 2), ("dp", "gtp", "tp"))
        for recipe in (MXFP8(), Float8Rowwise(compute="float8")):
            run(Combinations(recipe).all_three(mesh, hidden=128))
        run(Combinations(MXFP8()).tied_head(mesh, 128))


@pytest.mark.soak
class TestMatrix(GlooTest):
    world_size = 8

    def test_gtp_and_fully_shard(self) -> None:
        for recipe in (*DEQUANTIZED, *FLOAT8):
            every = Combinations(recipe)
            run(every.gtp(self.gtp_mesh()), every.gtp(self.hsdp_mesh()), every.fsdp(self.gtp_mesh(), 1024))

    def test_tensor_parallel(self) -> None:
        mesh = _mesh((4, 2), ("gtp", "tp"))
        for recipe in (*DEQUANTIZED, *FLOAT8):
            run(*(Combinations(recipe).tensor_parallel(mesh, plan) for plan in PLANS))
        for recipe in DEQUANTIZED:
            run(Combinations(recipe).tied_head(mesh, 256))

    def test_fully_shard_gtp_and_tensor_parallel(self) -> None:
        mesh = _mesh((2, 2, 2), ("dp", "gtp", "tp"))
        for recipe in (*DEQUANTIZED, *FLOAT8):
            run(Combinations(recipe).all_three(mesh))
        for recipe in DEQUANTIZED:
            run(Combinations(recipe).tied_head(mesh, 512))


if __name__ == "__main__":
    run_tests()
