"""``gtp_shard(shard_optimizer=True)``: replicas split the optimizer states of their shards.

Each case is compared with one process: gradients, and parameters after steps. ``test_optimizer_states`` has writes
between steps, saves, costs and what is refused.
"""

import copy
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from checkpoint_common import make as make_small
from common import ALL, GlooTest, assert_same_params, check_training, full, rows_of_rank
from fsdp_common import OPTIMIZERS, VOCABULARY, check, make, mesh_of, next_token_loss, tensor_parallel, token_batch
from runtime_common import assert_idle, members_of, square_loss
from schedules import explicit
from test_gtp_shard_groups import CHOSEN, WIDTH, Block
from test_gtp_shard_groups import Model as BlockModel
from test_gtp_shard_pipeline import ZERO_BUBBLE, Pipeline, make_parts, train
from test_gtp_shard_vocabulary_parallel import batch_of, call, lm
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import GTPModule, GTPShard, gtp_shard, quantize_
from dtensor_gtp.optim import Muon, gathered

CLOSE = {"rtol": 1e-6, "atol": 1e-8}
COARSE = {"rtol": 1e-2, "atol": 1e-3}
REPLICATE_GTP = ("replicate", "gtp")
assert VOCABULARY % 4  # uneven rows


def blocks(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return BlockModel(**options).double()


def blocks_batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)


def small_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class OfTwoByTwo(GlooTest):
    """replicate x gtp, 2 x 2."""

    @property
    def mesh(self) -> DeviceMesh:
        return mesh_of((2, 2), REPLICATE_GTP)

    def shard(self, model: Any, **options: Any) -> Any:
        return gtp_shard(model, self.mesh, shard_optimizer=True, **({"schedule": ALL} | options))

    def step(self, model: nn.Module, number: int = 0) -> None:
        next_token_loss(model, rows_of_rank(token_batch(torch.Generator().manual_seed(number)), self.mesh)).backward()


def check_over_tp(*sizes: int) -> Any:
    """Returns a weight that all axes cut."""
    mesh = mesh_of(sizes, ("replicate", "gtp", "tp"))

    def shard(model: Any) -> Any:
        tensor_parallel(model, mesh["tp"])
        return gtp_shard(model, mesh["replicate", "gtp"], schedule=ALL, shard_optimizer=True)

    return check(make(), shard, mesh["replicate", "gtp"]).layers[0].up.weight


class Own(torch.optim.Optimizer):
    """With kernels of its own: its writes to local tensors leave no version."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                pair = (param, param.grad)
                local, grad = (each.to_local() if isinstance(each, DTensor) else each for each in pair)
                local.data.sub_(grad, alpha=0.1)


class TestTraining(OfTwoByTwo):
    def check(self, **options: Any) -> Any:
        model = check(make(), options.pop("shard", self.shard), self.mesh, **options)
        assert_idle(model)
        return model

    def check_blocks(self, model: nn.Module | None = None, shard: Any = None, **options: Any) -> Any:
        """Blocks of rows that no axis divides, with weights that nobody uses, in groups."""
        shard = partial(shard or self.shard, schedule=CHOSEN)
        model = check_training(model or blocks(), shard, self.mesh, blocks_batch, square_loss, **options)
        assert_idle(model)
        return model

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def test_optimizers(self) -> None:
        for name in ("SGD", "AdamW fused", "AdamW foreach"):
            self.check(make_optimizer=OPTIMIZERS[name], tolerance=CLOSE)

    @pytest.mark.long
    def test_all_optimizers_of_torch(self) -> None:
        for make_optimizer in OPTIMIZERS.values():
            self.check(make_optimizer=make_optimizer, tolerance=CLOSE)

    def test_an_optimizer_with_kernels_of_its_own(self) -> None:
        model: Any = blocks()
        model.first = model.last = nn.Identity()  # all weights are in groups
        model = self.check_blocks(model, make_optimizer=Own)
        self.assertEqual({weight.group for weight in members_of(model).weights}, {*members_of(model).groups})

    def test_optimizers_that_need_whole_matrices(self) -> None:
        def muon(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            return Muon([p for p in params if p.ndim == 2], lr=1e-2)

        for make_optimizer in (muon, partial(gathered(torch.optim.Adafactor), lr=1e-2)):
            self.check(make_optimizer=make_optimizer, tolerance=CLOSE)

    # --- gradients ----------------------------------------------------------------------------------------------------

    def test_groups_of_blocks(self) -> None:
        self.assertEqual(len(members_of(self.check_blocks()).groups), 3)

    def test_a_group_with_members_of_whole_states(self) -> None:
        """Frozen before ``gtp_shard``, and trained later: states of such weights are not split."""

        def shard(model: Any, **options: Any) -> Any:
            weights = [layer.up.weight for layer in model.layers]
            for weight in weights:
                weight.requires_grad_(False)
            self.shard(model, **options)
            for layer in model.layers:
                layer.up.weight.requires_grad_(True)
            return model

        model = self.check_blocks(shard=shard)
        self.assertTrue(model.layers[0].up.weight.placements[-1].is_replicate())

    def test_microbatches(self) -> None:
        """All ways to put off what is reduced."""
        ways = (None, "set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward")
        cases = (ALL, make, next_token_loss, token_batch, ways), (CHOSEN, blocks, square_loss, blocks_batch, ways[1:3])
        for schedule, build, loss, make_batch, methods in cases:
            for method in methods:
                number = itertools.count()

                def put_off(
                    model: Any, batch: torch.Tensor, method: Any = method, number: Any = number, loss: Any = loss
                ) -> torch.Tensor:
                    if method is not None and isinstance(model, GTPModule):
                        getattr(model, method)(next(number) % 2 == 1)
                    return loss(model, batch)

                shard = partial(self.shard, schedule=schedule)
                check_training(build(), shard, self.mesh, make_batch, put_off, num_microbatches=2)

    def test_divide_factors(self) -> None:
        """Divided by other numbers, once; with float16, before and after the sum."""
        for dtype, factor, schedule in (
            (torch.float64, 8.0, ALL),
            (torch.float64, 1.0, CHOSEN),
            (torch.float16, None, CHOSEN),
            (torch.float16, 8.0, ALL),
        ):
            policy = MixedPrecisionPolicy(reduce_dtype=dtype)
            reference = blocks()
            model = self.shard(copy.deepcopy(reference), schedule=schedule, mp_policy=policy)
            if factor is not None:
                model.set_gradient_divide_factor(factor)
            batch = blocks_batch(torch.Generator().manual_seed(0))
            (square_loss(reference, batch) * 4 / (factor or 4)).backward()
            square_loss(model, rows_of_rank(batch, self.mesh)).backward()
            assert_same_params(model, reference, "grad", **(CLOSE if dtype == torch.float64 else COARSE))

    def test_one_replica_alone_uses_a_weight(self) -> None:
        """The other one gets its gradient, too."""

        class WithUse(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                is_whole = len(x) == 8
                y = super().forward(x)
                if is_whole:
                    first, second = y.chunk(2)
                    return torch.cat([first, second + self.unused(second)])
                return y + self.unused(y) if is_second else y

        is_second = self.mesh.get_local_rank("replicate") == 1
        model = self.check_blocks(blocks(block=WithUse))
        self.assertEqual(len(members_of(model).groups), 3)

    # --- layouts and precision ----------------------------------------------------------------------------------------

    def test_layouts(self) -> None:
        """Dim 1, blocks that divide and that do not, 1-D, ties."""
        for place in (
            {"linear.weight": GTPShard(0, block_size=4), "columns": GTPShard(1)},  # 10 rows: uneven blocks
            {"linear.weight": GTPShard(0, block_size=5), "out.weight": GTPShard(1)},
            {"norm.weight": GTPShard(0), "out.bias": GTPShard(0)},
        ):

            def shard(model: Any, place: Any = place) -> Any:
                params = {model.get_parameter(name): placement for name, placement in place.items()}
                return self.shard(model, shard_placement_fn=params.get)

            batch = lambda generator: torch.randint(0, 11, (8, 5), generator=generator)  # noqa: E731
            model = check_training(make_small(0).double(), shard, self.mesh, batch, small_loss)
            assert_idle(model)
            if "columns" in place:  # whose blocks DTensor could not name if replicas cut them
                self.assertTrue(model.linear.weight.placements[-1].is_replicate())
                self.assertEqual(model.columns.to_local().shape, (5, 5 if self.mesh.get_local_rank("gtp") == 0 else 4))

    def test_other_meshes(self) -> None:
        """Of gtp of one rank, and without replicas, where it changes nothing."""
        for mesh in (mesh_of((4, 1), REPLICATE_GTP), mesh_of((1, 4), REPLICATE_GTP), self.gtp_mesh()):
            model = check(make(), partial(gtp_shard, mesh=mesh, schedule=ALL, shard_optimizer=True), mesh)
            self.assertEqual(model.layers[0].up.weight.to_local().shape[0], 4)
            self.assertEqual(model.head.weight.device_mesh.ndim, mesh.ndim)

    def test_tensor_parallel(self) -> None:
        up = check_over_tp(2, 1, 2)
        self.assertEqual(up.device_mesh.mesh_dim_names, ("tp", "gtp", "replicate"))
        self.assertEqual(up.to_local().numel() * 4, up.numel())

    def split_and_whole(
        self, make_model: Callable[[bool], nn.Module], backward: Callable[[nn.Module, int], None]
    ) -> list[list[torch.Tensor]]:
        """Parameters after steps with split and with whole states."""
        trained = []
        for is_split in (True, False):
            model = make_model(is_split)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            for step in range(3):
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
            trained.append([full(param) for param in model.parameters()])
        return trained

    def test_weights_of_two_dtypes(self) -> None:
        """Rows of replicas come in one operation of each dtype, whichever is first."""

        class TwoDtypes(nn.Module):
            def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=first), nn.Linear(WIDTH, WIDTH, dtype=first))
                self.head = nn.Linear(WIDTH, WIDTH, dtype=second)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.layers(x.to(self.layers[0].weight.dtype)).to(self.head.weight.dtype)).double()

        for dtypes in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
            for schedule in (ALL, CHOSEN):
                shard = partial(self.shard, schedule=schedule)
                tolerance = {"rtol": 1e-4, "atol": 1e-6}
                model = check_training(
                    TwoDtypes(*dtypes), shard, self.mesh, blocks_batch, square_loss, tolerance=tolerance
                )
                assert_idle(model)

    def test_mixed_precision(self) -> None:
        """The bits of whole states, in float32 and computed in 16 bits: other replicas send rows in these."""
        cases = ((2, 2), torch.bfloat16, ALL), ((2, 2), torch.float16, CHOSEN), ((4, 1), torch.bfloat16, ALL)
        for shape, dtype, schedule in cases:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            shard = partial(gtp_shard, mesh=mesh_of(shape, REPLICATE_GTP), schedule=schedule, mp_policy=policy)
            split, whole = self.split_and_whole(
                lambda is_split, on=shard: on(make().float(), shard_optimizer=is_split), self.step
            )
            self.assertEqual(split, whole, rtol=1e-6, atol=1e-7)

    def test_quantized_weights(self) -> None:
        """The same bits as with whole states."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

        def make_model(is_split: bool, recipe: str) -> nn.Module:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
            quantize_(model, recipe)
            gtp_shard(model, self.mesh, schedule=ALL, mp_policy=policy, shard_optimizer=is_split)
            parts = [param.to_local().numel() for param in model.parameters()]
            self.assertEqual(parts, [64 * 128 // (4 if is_split else 2)] * 2)
            return model

        def backward(model: nn.Module, step: int) -> None:
            rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            square_loss(model, rows_of_rank(rows, self.mesh)).backward()

        for recipe in ("mxfp8", "float8_tensorwise", "float8_rowwise"):
            split, whole = self.split_and_whole(partial(make_model, recipe=recipe), backward)
            self.assertEqual(split, whole, rtol=0, atol=0)

    # --- with other features ------------------------------------------------------------------------------------------

    def test_exchanges_of_activations(self) -> None:
        """They read shards without a gather. The embedding comes last, so no gather before it brings its rows."""
        alone = partial(explicit, min_shard_numel=0, coalesce_nbytes=0)

        def exchanged(model: Any) -> Any:
            model._modules["embedding"] = model._modules.pop("embedding")
            return self.shard(model, schedule=alone(embedding="exchange"))

        self.check(shard=exchanged)
        by_head = partial(self.shard, schedule=alone(head="exchange"))
        model = check_training(lm().double(), by_head, self.mesh, batch_of(lm()), call)
        self.assertEqual(sum(weight.fused.losses is not None for weight in members_of(model).weights), 1)

    def test_beside_recompute_and_compile(self) -> None:
        def recomputed(layer: Any) -> None:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

        def compiled(layer: Any) -> None:
            layer.compile(fullgraph=True, backend="aot_eager")

        for change in (recomputed, compiled):

            def shard(model: Any, change: Callable[[Any], None] = change) -> Any:
                self.shard(model)
                for layer in model.layers:
                    change(layer)
                return model

            self.check(shard=shard, num_microbatches=2)

    def test_stages_of_a_pipeline(self) -> None:
        """pp x replicate, 2 x 2: the replicas are the axis that other tests of pipelines call dp."""

        def shard(parts: list[nn.Module], mesh: DeviceMesh) -> None:
            for part in parts:
                gtp_shard(part, mesh["dp", "gtp"], schedule=ALL, shard_optimizer=True)
                self.assertEqual(part.linear.weight.to_local().shape[0], WIDTH // 4)

        train(Pipeline(ZERO_BUBBLE._replace(sizes=(2, 2, 1)), shard=shard), make_parts(4))


@pytest.mark.long
class TestThreeAxes(GlooTest):
    world_size = 8

    def test_three_axes(self) -> None:
        up = check_over_tp(2, 2, 2)
        self.assertEqual(up.to_local().numel() * 8, up.numel())
