"""Training weights with native storage: gradients, masters and quantized data after each step equal the reference.

The reference is one process: float32 masters, whose rowwise quantization is computed with in both directions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from checkpoint_common import local
from common import GlooTest, _mesh, assert_same_params, full, rows_of_rank
from quant_common import Experts, Net, blocks_only, dequantized, fsdp, loss_of, reference_of, tokens_of, wire_traffic
from runtime_common import assert_idle
from schedules import explicit
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, gtp_shard, quantize_
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.quant import (
    MXFP8,
    NVFP4,
    RECIPES,
    Direction,
    Float8Blockwise,
    Float8Rowwise,
    Float8Tensorwise,
    Quantized,
    Recipe,
)
from dtensor_gtp.quant.master_optimizer import MasterOptimizer
from dtensor_gtp.quant.native import native_of

ShardFn = Callable[[nn.Module], nn.Module]
ALL = explicit(min_shard_numel=0)


class RowwiseOnly:
    """A recipe whose rowwise data serve both directions."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def quantize(self, weight: torch.Tensor, direction: Direction) -> Quantized:
        return self.recipe.quantize(weight, Direction.ROWWISE)

    def dequantize(self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: Any) -> torch.Tensor:
        return self.recipe.dequantize(quantized, shape, Direction.ROWWISE, dtype)


def native(recipe: Recipe, mesh: DeviceMesh, names: Any = blocks_only, **options: Any) -> ShardFn:
    def shard(model: nn.Module) -> nn.Module:
        quantize_(model, recipe, filter_fn=names, storage="native")
        return gtp_shard(model, mesh, **{"schedule": ALL, **options})

    return shard


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2, momentum=0.5)


def with_masters(model: nn.Module, masters: Any = None) -> MasterOptimizer:
    return MasterOptimizer(model.parameters(), torch.optim.SGD, masters=masters, lr=0.2, momentum=0.5)


@torch.no_grad()
def masters_of(model: nn.Module, optimizer: MasterOptimizer) -> dict[str, torch.Tensor]:
    """Whole values of what trains, by name."""
    return {name: full(optimizer.state[p].get("master", p)) for name, p in model.named_parameters()}


def check(
    model: nn.Module,
    recipe: Recipe,
    shard: ShardFn,
    mesh: DeviceMesh,
    *,
    names: Any = blocks_only,
    steps: int = 2,
    is_given: bool = True,
) -> tuple[nn.Module, MasterOptimizer]:
    """Two microbatches a step. ``is_given``: training starts with the values before they were quantized."""
    reference = reference_of(model, RowwiseOnly(recipe), names)  # type: ignore[arg-type]
    chosen = [name for name, module in model.named_modules() if hasattr(module, "weight") and names(module, name)]
    start = {f"{name}.weight": reference.get_submodule(name).weight.detach().clone() for name in chosen}
    if not is_given:
        for name in chosen:
            weight = reference.get_submodule(name).weight
            weight.data = dequantized(weight.data, recipe, Direction.ROWWISE)
    model = shard(copy.deepcopy(model))
    optimizers = [momentum(reference.parameters()), with_masters(model, start if is_given else None)]
    for step in range(steps):
        for microbatch in range(2):
            tokens = tokens_of(2 * step + microbatch)
            (loss_of(reference, tokens) / 2).backward()
            (loss_of(model, rows_of_rank(tokens, mesh)) / 2).backward()
        assert_same_params(model, reference, "grad")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 1)
        masters = masters_of(model, optimizers[1])
        for name, param in reference.named_parameters():
            torch.testing.assert_close(masters[name], param.detach())
            param.data.copy_(masters[name])  # a difference in the last bit must not grow to a step of the format
        values = {
            name: full(param.detach()) for name, param in model.named_parameters() if native_of(param) is not None
        }
        assert len(values) == len(start)
        for name, value in values.items():
            assert torch.equal(value, dequantized(masters[name], recipe, Direction.ROWWISE)), (recipe, name)
    return model, optimizers[1]


class TestNativeTraining(GlooTest):
    def test_gtp(self) -> None:
        for recipe in (cls() for cls in RECIPES.values()):
            torch.manual_seed(0)
            assert_idle(check(Net(), recipe, native(recipe, self.gtp_mesh()), self.gtp_mesh())[0])
        for recipe in (NVFP4(), Float8Tensorwise()):
            torch.manual_seed(1)
            check(Net(), recipe, native(recipe, self.hsdp_mesh()), self.hsdp_mesh(), is_given=False)
        columns = {"shard_placement_fn": lambda p: GTPShard(1) if p.ndim == 2 else None}
        for recipe in (Float8Rowwise(), NVFP4()):
            check(Net(), recipe, native(recipe, self.gtp_mesh(), **columns), self.gtp_mesh(), steps=1)

    def test_grouped_and_tied(self) -> None:
        mesh = self.gtp_mesh()
        experts = lambda module, name: isinstance(module, GroupedLinear)  # noqa: E731
        for options in ({}, {"shard_placement_fn": lambda p: GTPShard(0) if p.ndim == 3 else None}):
            torch.manual_seed(0)
            check(Experts(), NVFP4(), native(NVFP4(), mesh, experts, **options), mesh, names=experts, steps=1)
        torch.manual_seed(0)
        linear = lambda module, name: isinstance(module, nn.Linear)  # noqa: E731
        model, _ = check(Net(is_tied=True), MXFP8(), native(MXFP8(), mesh, linear), mesh, names=linear)
        self.assertIs(model.head.weight, model.embedding.weight)

    def test_tensor_parallel(self) -> None:
        mesh = _mesh((2, 2), ("gtp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for recipe in (Float8Tensorwise(), NVFP4(), Float8Blockwise()):
            torch.manual_seed(0)

            def shard(model: nn.Module, recipe: Recipe = recipe) -> nn.Module:
                for layer in model.layers:  # type: ignore[union-attr]
                    parallelize_module(layer, mesh["tp"], plan)
                return native(recipe, mesh["gtp"])(model)

            check(Net(hidden=256), recipe, shard, mesh["gtp"])

    def test_fully_shard(self) -> None:
        """Alone, with rows of whole blocks; and around ``gtp_shard``."""
        mesh = self.gtp_mesh()
        names = lambda module, name: blocks_only(module, name) and name.endswith("up")  # noqa: E731
        for recipe in (cls() for cls in RECIPES.values()):
            torch.manual_seed(0)
            hidden = 512 if recipe.name == "float8_blockwise" else 72
            shard = lambda m, r=recipe: fsdp(quantize_(m, r, filter_fn=names, storage="native"), mesh)  # noqa: E731
            check(Net(hidden=hidden), recipe, shard, mesh, names=names, steps=1)
        mesh = _mesh((2, 2), ("dp", "gtp"))
        for recipe in (MXFP8(), Float8Tensorwise()):
            torch.manual_seed(0)
            shard = lambda m, r=recipe: fsdp(native(r, mesh["gtp"])(m), mesh["dp"])  # noqa: E731
            check(Net(hidden=72), recipe, shard, mesh)

    def test_mixed_precision(self) -> None:
        """A weight of bfloat16: computed with in bfloat16, reduced in float32, stepped in float32."""
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        layer = nn.Linear(40, 33, bias=False, dtype=torch.bfloat16)
        values = layer.weight.detach().float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        native(NVFP4(), mesh, lambda m, n: True, mp_policy=policy)(layer)
        optimizer = MasterOptimizer(layer.parameters(), torch.optim.SGD, lr=2.0**-12, masters={"weight": values})
        for _ in range(3):
            layer(torch.ones(4, 40, dtype=torch.bfloat16)).sum().backward()
            self.assertEqual(layer.weight.grad.dtype, torch.bfloat16)
            optimizer.step()
            optimizer.zero_grad()
        master = optimizer.state[layer.weight]["master"]
        self.assertEqual((master.dtype, master.placements), (torch.float32, layer.weight.placements))
        expected = values.clone()
        for _ in range(3):
            expected.add_(torch.full_like(values, 4.0), alpha=-(2.0**-12))
        self.assertTrue(torch.equal(full(master), expected))

    def test_one_all_reduce_a_step(self) -> None:
        """Of the largest magnitudes of all weights, over the axes that cut them and no other."""
        mesh = self.hsdp_mesh()
        torch.manual_seed(0)
        model = native(Float8Tensorwise(), mesh)(Net())
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
        mesh = self.gtp_mesh()
        model = native(Float8Tensorwise(), mesh, lambda m, n: True)(nn.Linear(64, 64, bias=False))
        x = torch.eye(64)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        values = model(x).clone()

        def load() -> None:
            for name, value in model.state_dict().items():
                local(value).copy_(local(state[name]))

        for index, write in enumerate(
            (
                lambda: model.weight.copy_(torch.full_like(model.weight, 2.0)),
                lambda: model.load_state_dict({"weight": torch.ones_like(model.weight) * 4}),
                lambda: model.weight.to_local().copy_(torch.full((16, 64), 8.0)),
            )
        ):
            with torch.no_grad():
                write()
            self.assertTrue(torch.equal(model(x), torch.full((64, 64), 2.0 ** (index + 1))), index)
        load()
        self.assertTrue(torch.equal(model(x), values))
