"""Training weights with native storage: gradients, masters and quantized data after each step equal the reference.

The reference is one process: float32 masters, whose rowwise quantization is computed with in both directions.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from checkpoint_common import local
from common import GlooTest, _mesh, assert_same_params, full, rows_of_rank
from quant_common import (
    Experts,
    Net,
    RowwiseOnly,
    blocks_only,
    cut_layers,
    dequantized,
    fsdp,
    fully_sharded,
    gtp,
    is_grouped,
    is_linear,
    loss_of,
    reference_of,
    tokens_of,
    up_only,
    wire_traffic,
)
from runtime_common import assert_idle
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dtensor_gtp import GTPShard
from dtensor_gtp.quant import MXFP8, NVFP4, RECIPES, Direction, Float8Blockwise, Float8Rowwise, Float8Tensorwise, Recipe
from dtensor_gtp.quant.master_optimizer import MasterOptimizer
from dtensor_gtp.quant.native import native_of

native = partial(gtp, storage="native")


def with_masters(model: nn.Module, masters: Any = None) -> MasterOptimizer:
    return MasterOptimizer(model.parameters(), torch.optim.SGD, masters=masters, lr=0.2, momentum=0.5)


def check(
    make: Callable[[], nn.Module],
    recipe: Recipe,
    shard: Callable[[nn.Module], nn.Module],
    mesh: DeviceMesh,
    *,
    names: Any = blocks_only,
    steps: int = 1,
    is_given: bool = True,
) -> Any:
    """Two microbatches a step. ``is_given``: training starts with the values before they were quantized."""
    torch.manual_seed(0)
    model = make()
    reference = reference_of(model, RowwiseOnly(recipe), names)  # type: ignore[arg-type]
    chosen = [name for name, module in model.named_modules() if hasattr(module, "weight") and names(module, name)]
    start = {f"{name}.weight": reference.get_submodule(name).weight.detach().clone() for name in chosen}
    if not is_given:
        for name in chosen:
            weight = reference.get_submodule(name).weight
            weight.data = dequantized(weight.data, recipe, Direction.ROWWISE)
    model = shard(copy.deepcopy(model))
    optimizer = with_masters(model, start if is_given else None)
    optimizers = [torch.optim.SGD(reference.parameters(), lr=0.2, momentum=0.5), optimizer]
    for step in range(steps):
        for microbatch in range(2):
            tokens = tokens_of(2 * step + microbatch)
            (loss_of(reference, tokens) / 2).backward()
            (loss_of(model, rows_of_rank(tokens, mesh)) / 2).backward()
        assert_same_params(model, reference, "grad")
        for each in optimizers:
            each.step()
            each.zero_grad(set_to_none=step % 2 == 1)
        expected, num_native = dict(reference.named_parameters()), 0
        for name, param in model.named_parameters():
            master = full(optimizer.state[param].get("master", param)).detach()
            torch.testing.assert_close(master, expected[name].detach())
            expected[name].data.copy_(master)  # a difference in the last bit must not grow to a step of the format
            if native_of(param) is not None:
                num_native += 1
                values = dequantized(master, recipe, Direction.ROWWISE)
                assert torch.equal(full(param.detach()), values), (recipe, name)
        assert num_native == len(start)
    return model


class TestNativeTraining(GlooTest):
    world_size = 2

    def test_gtp(self) -> None:
        mesh = self.gtp_mesh()
        for recipe in (cls() for cls in RECIPES.values()):
            assert_idle(check(Net, recipe, native(recipe, mesh), mesh, steps=2))
        for recipe in (Float8Rowwise(), NVFP4()):
            columns = native(recipe, mesh, shard_placement_fn=lambda p: GTPShard(1) if p.ndim == 2 else None)
            check(Net, recipe, columns, mesh, is_given=False)

    def test_grouped_and_tied(self) -> None:
        mesh = self.gtp_mesh()
        for options in ({}, {"shard_placement_fn": lambda p: GTPShard(0) if p.ndim == 3 else None}):
            check(Experts, NVFP4(), native(NVFP4(), mesh, is_grouped, **options), mesh, names=is_grouped)
        model = check(
            partial(Net, is_tied=True), MXFP8(), native(MXFP8(), mesh, is_linear), mesh, names=is_linear, steps=2
        )
        self.assertIs(model.head.weight, model.embedding.weight)

    def test_fully_shard(self) -> None:
        """With rows of whole blocks."""
        for recipe in (cls() for cls in RECIPES.values()):
            make = partial(Net, hidden=256 if recipe.name == "float8_blockwise" else 72)
            shard = fully_sharded(recipe, self.gtp_mesh(), storage="native")
            check(make, recipe, shard, self.gtp_mesh(), names=up_only)

    def test_mixed_precision(self) -> None:
        """A weight of bfloat16: computed with in bfloat16, reduced in float32, stepped in float32."""
        torch.manual_seed(0)
        layer = nn.Linear(40, 33, bias=False, dtype=torch.bfloat16)
        values = layer.weight.detach().float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        native(NVFP4(), self.gtp_mesh(), is_linear, mp_policy=policy)(layer)
        optimizer = MasterOptimizer(layer.parameters(), torch.optim.SGD, lr=2.0**-12, masters={"weight": values})
        expected = values.clone()
        for _ in range(3):
            layer(torch.ones(4, 40, dtype=torch.bfloat16)).sum().backward()
            self.assertEqual(layer.weight.grad.dtype, torch.bfloat16)
            optimizer.step()
            optimizer.zero_grad()
            expected.add_(torch.full_like(values, 4.0), alpha=-(2.0**-12))
        master = optimizer.state[layer.weight]["master"]
        self.assertEqual((master.dtype, master.placements), (torch.float32, layer.weight.placements))
        self.assertTrue(torch.equal(full(master), expected))

    def test_a_step_of_no_length_changes_no_byte(self) -> None:
        """Torch makes one to give an optimizer its state; dequantized values, quantized again, may be other bytes."""
        mesh = self.gtp_mesh()
        model = native(MXFP8(), mesh)(Net())
        before = {name: local(value).clone() for name, value in model.state_dict().items()}
        optimizer = MasterOptimizer(model.parameters(), torch.optim.AdamW, lr=0.0)
        loss_of(model, rows_of_rank(tokens_of(0), mesh)).backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            self.assertTrue(torch.equal(local(value), before[name]), name)

    def test_writes_are_seen(self) -> None:
        """R3 and R13: the next forward computes with what was written, by a step, a copy or a load."""
        model: Any = native(Float8Tensorwise(), self.gtp_mesh(), is_linear)(nn.Linear(64, 64, bias=False))
        x = torch.eye(64)
        state = {name: local(value).clone() for name, value in model.state_dict().items()}
        values = model(x).clone()
        for index, write in enumerate(
            (
                lambda: model.weight.copy_(torch.full_like(model.weight, 2.0)),
                lambda: model.load_state_dict({"weight": torch.ones_like(model.weight) * 4}),
                lambda: model.weight.to_local().copy_(torch.full((32, 64), 8.0)),
            )
        ):
            with torch.no_grad():
                write()
            self.assertTrue(torch.equal(model(x), torch.full((64, 64), 2.0 ** (index + 1))), index)
        for name, value in model.state_dict().items():
            local(value).copy_(state[name])
        self.assertTrue(torch.equal(model(x), values))


class TestTwoAxes(GlooTest):
    def test_training(self) -> None:
        """Replicas, ``fully_shard`` and tensor parallelism."""
        for recipe in (NVFP4(), Float8Tensorwise()):
            check(Net, recipe, native(recipe, self.hsdp_mesh()), self.hsdp_mesh(), is_given=False)
        mesh = _mesh((2, 2), ("dp", "gtp"))
        for recipe in (MXFP8(), Float8Tensorwise()):
            shard = native(recipe, mesh["gtp"])
            check(partial(Net, hidden=72), recipe, lambda model, s=shard: fsdp(s(model), mesh["dp"]), mesh)
        mesh = _mesh((2, 2), ("gtp", "tp"))
        for recipe in (Float8Tensorwise(), NVFP4(), Float8Blockwise()):
            shard = native(recipe, mesh["gtp"])
            both = lambda model, s=shard: s(cut_layers(model, mesh["tp"]))  # noqa: E731
            check(partial(Net, hidden=256), recipe, both, mesh["gtp"])

    def test_one_all_reduce_a_step(self) -> None:
        """Of the largest magnitudes of all weights, over the axes that cut them and no other."""
        mesh = self.hsdp_mesh()
        torch.manual_seed(0)
        model: Any = native(Float8Tensorwise(), mesh)(Net())
        optimizer = with_masters(model)
        loss_of(model, rows_of_rank(tokens_of(0), mesh)).backward()
        with wire_traffic() as sent:
            optimizer.step()
        self.assertEqual(sent.calls, [("allreduce_", torch.int32, 4 * 4)])
        # A replica whose masters have drifted keeps a scale of its own.
        weight = model.layers[0].up.weight
        replica = mesh.get_local_rank("replicate")
        with torch.no_grad():
            local(optimizer.state[weight]["master"]).fill_(1.0 + replica)
        weight.grad.zero_()
        optimizer.param_groups[0]["momentum"] = 0.0
        optimizer.step()
        self.assertEqual(native_of(weight).quantized.amax.item(), 1.0 + replica)
