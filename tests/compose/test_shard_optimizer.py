"""``gtp_shard(shard_optimizer=True)``: replicas split the optimizer states of their shards.

Each case is compared with one process: gradients, and parameters after steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from checkpoint_common import PLAIN, check_reload, topology
from checkpoint_common import make as make_small
from checkpoint_common import tokens_of_step as small_tokens
from common import ALL, GlooTest, assert_same_params, check_training, full, rows_of_rank
from fsdp_common import (
    VOCABULARY,
    check,
    check_averages,
    check_overflow,
    make,
    mesh_of,
    next_token_loss,
    tensor_parallel,
    token_batch,
)
from runtime_common import assert_idle, counted, runtime_of
from schedules import explicit
from test_gtp_shard_groups import CHOSEN, WIDTH, Block
from test_gtp_shard_groups import Model as BlockModel
from test_gtp_shard_pipeline import ONE_F_ONE_B, ZERO_BUBBLE, Pipeline, make_parts, train
from test_gtp_shard_vocabulary_parallel import LM
from test_optimizer_states import OPTIMIZERS
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import GTPShard, capture_step, gtp_shard, quantize_, sharding_report
from dtensor_gtp._comm.streams import Streams
from dtensor_gtp.optim import Muon, gathered

CLOSE = {"rtol": 1e-6, "atol": 1e-8}
COARSE = {"rtol": 1e-2, "atol": 1e-3}
adamw = partial(torch.optim.AdamW, lr=1e-2, fused=True)


def blocks_batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)


def blocks_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(rows).square().mean()
    return loss


def small_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class OfTwoByTwo(GlooTest):
    """replicate x gtp, 2 x 2."""

    @property
    def mesh(self) -> DeviceMesh:
        return mesh_of((2, 2), ("replicate", "gtp"))

    def shard(self, model: Any, **options: Any) -> Any:
        return gtp_shard(model, self.mesh, shard_optimizer=True, **({"schedule": ALL} | options))

    def check(self, **options: Any) -> Any:
        return check(make(), options.pop("shard", self.shard), self.mesh, **options)

    def step(self, model: Any, number: int = 0) -> None:
        next_token_loss(model, rows_of_rank(token_batch(torch.Generator().manual_seed(number)), self.mesh)).backward()


class TestTraining(OfTwoByTwo):
    def test_optimizers(self) -> None:
        for name in ("SGD", "AdamW fused", "AdamW foreach"):
            assert_idle(self.check(make_optimizer=OPTIMIZERS[name], tolerance=CLOSE, steps=3))

    def test_an_optimizer_with_kernels_of_its_own(self) -> None:
        """Its writes to local tensors leave no version."""

        class Own(torch.optim.Optimizer):
            def __init__(self, params: Iterable[nn.Parameter]) -> None:
                super().__init__(params, {})

            @torch.no_grad()
            def step(self) -> None:
                for param in self.param_groups[0]["params"]:
                    if param.grad is None:
                        continue
                    pair = (param, param.grad)
                    local, grad = (each.to_local() if isinstance(each, DTensor) else each for each in pair)
                    local.data.sub_(grad, alpha=0.1)

        torch.manual_seed(0)
        model = BlockModel().double()
        model.first = model.last = nn.Identity()  # all weights are in groups
        shard = partial(self.shard, schedule=CHOSEN)
        model = check_training(model, shard, self.mesh, blocks_batch, blocks_loss, make_optimizer=Own)
        self.assertEqual({weight.group for weight in runtime_of(model).weights}, {*runtime_of(model).groups})

    @pytest.mark.long
    def test_all_optimizers_of_torch(self) -> None:
        for make_optimizer in OPTIMIZERS.values():
            self.check(make_optimizer=make_optimizer, tolerance=CLOSE)

    def test_optimizers_that_need_whole_matrices(self) -> None:
        def muon(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            return Muon([p for p in params if p.ndim == 2], lr=1e-2)

        def whole(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            cls = gathered(torch.optim.Adafactor)
            return cls(params, lr=1e-2)

        for make_optimizer in (muon, whole):
            self.check(make_optimizer=make_optimizer, tolerance=CLOSE)

    def test_groups_of_blocks(self) -> None:
        """Blocks of rows that no axis divides, with weights that nobody uses."""
        torch.manual_seed(0)
        shard = partial(self.shard, schedule=CHOSEN)
        for num in (1, 2):
            model = check_training(
                BlockModel().double(), shard, self.mesh, blocks_batch, blocks_loss, num_microbatches=num
            )
            self.assertEqual(len(runtime_of(model).groups), 3)
            assert_idle(model)

    def test_a_group_with_members_of_whole_states(self) -> None:
        """Frozen before ``gtp_shard``, and trained later: states of such weights are not split."""

        def shard(model: Any) -> Any:
            for layer in model.layers:
                layer.up.weight.requires_grad_(False)
            return self.shard(model, schedule=CHOSEN)

        def thaw(model: Any) -> None:
            for layer in model.layers:
                layer.up.weight.requires_grad_(True)

        torch.manual_seed(0)
        reference = BlockModel().double()
        model = shard(copy.deepcopy(reference))
        thaw(model)
        optimizers = [adamw(module.parameters()) for module in (reference, model)]
        for step in range(3):
            batch = blocks_batch(torch.Generator().manual_seed(step))
            blocks_loss(reference, batch).backward()
            blocks_loss(model, rows_of_rank(batch, self.mesh)).backward()
            assert_same_params(model, reference, "grad")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_params(model, reference)
        self.assertTrue(model.layers[0].up.weight.placements[-1].is_replicate())

    def test_microbatches(self) -> None:
        """All ways to put off what is reduced."""

        def without(method: str) -> Callable[[Any, Any, int], None]:
            return lambda model, batches, number: getattr(model, method)(number + 1 == len(batches))

        def stock(model: Any, batches: Any, number: int) -> None:
            pass

        ways = (stock, *map(without, ("set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward")))
        for schedule, build, loss, batch_of, some in (
            (ALL, make, next_token_loss, token_batch, ways),
            (CHOSEN, lambda: BlockModel().double(), blocks_loss, blocks_batch, ways[1:3]),
        ):
            for way in some:
                torch.manual_seed(0)
                reference = build()
                model = self.shard(copy.deepcopy(reference), schedule=schedule)
                optimizers = [adamw(module.parameters()) for module in (reference, model)]
                for step in range(2):
                    batches = [batch_of(torch.Generator().manual_seed(10 * step + i)) for i in range(2)]
                    for number, batch in enumerate(batches):
                        way(model, batches, number)
                        loss(reference, batch).backward()
                        loss(model, rows_of_rank(batch, self.mesh)).backward()
                    assert_same_params(model, reference, "grad")
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    assert_same_params(model, reference)

    def test_divide_factors(self) -> None:
        """Divided by other numbers, once; with float16, before and after the sum."""
        for dtype, factor, schedule in (
            (torch.float64, 8.0, ALL),
            (torch.float64, 1.0, CHOSEN),
            (torch.float16, None, CHOSEN),
            (torch.float16, 8.0, ALL),
        ):
            policy = MixedPrecisionPolicy(reduce_dtype=dtype)
            torch.manual_seed(0)
            reference = BlockModel().double()
            model = self.shard(copy.deepcopy(reference), schedule=schedule, mp_policy=policy)
            if factor is not None:
                model.set_gradient_divide_factor(factor)
            batch = blocks_batch(torch.Generator().manual_seed(0))
            (blocks_loss(reference, batch) * 4 / (factor or 4)).backward()
            blocks_loss(model, rows_of_rank(batch, self.mesh)).backward()
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
        torch.manual_seed(0)
        shard = partial(self.shard, schedule=CHOSEN)
        model = check_training(BlockModel(block=WithUse).double(), shard, self.mesh, blocks_batch, blocks_loss)
        self.assertEqual(len(runtime_of(model).groups), 3)

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

            model = check_training(
                make_small(0).double(),
                shard,
                self.mesh,
                lambda generator: torch.randint(0, 11, (8, 5), generator=generator),
                small_loss,
            )
            assert_idle(model)
            if "columns" in place:  # whose blocks DTensor could not name if replicas cut them
                self.assertTrue(model.linear.weight.placements[-1].is_replicate())
                self.assertEqual(model.columns.to_local().shape, (5, 5 if self.mesh.get_local_rank("gtp") == 0 else 4))

    def test_gtp_of_one_rank(self) -> None:
        mesh = mesh_of((4, 1), ("replicate", "gtp"))
        model = check(make(), lambda model: gtp_shard(model, mesh, schedule=ALL, shard_optimizer=True), mesh)
        self.assertEqual(model.layers[0].up.weight.to_local().shape[0], 4)

    def test_mixed_precision(self) -> None:
        """The bits of whole states, in float32 and computed in 16 bits: other replicas send rows in these."""
        for shape, dtype, schedule in (
            ((2, 2), torch.bfloat16, ALL),
            ((2, 2), torch.float16, CHOSEN),
            ((4, 1), torch.bfloat16, ALL),
        ):
            mesh = mesh_of(shape, ("replicate", "gtp"))
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            trained = []
            for split in (False, True):
                model = make().float()
                gtp_shard(model, mesh, schedule=schedule, mp_policy=policy, shard_optimizer=split)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
                for step in range(3):
                    self.step(model, step)
                    optimizer.step()
                    optimizer.zero_grad()
                trained.append([full(param) for param in model.parameters()])
            self.assertEqual(trained[0], trained[1], rtol=1e-6, atol=1e-7)

    def test_without_replicas_it_changes_nothing(self) -> None:
        for mesh in (self.gtp_mesh(), mesh_of((1, 4), ("replicate", "gtp"))):
            model = check(make(), lambda m, mesh=mesh: gtp_shard(m, mesh, schedule=ALL, shard_optimizer=True), mesh)
            self.assertEqual(model.head.weight.device_mesh.ndim, mesh.ndim)

    def test_beside_recompute_and_compile(self) -> None:
        def recomputed(model: Any) -> Any:
            model = self.shard(model)
            for layer in model.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
            return model

        def compiled(model: Any) -> Any:
            model = self.shard(model)
            for layer in model.layers:
                layer.compile(fullgraph=True, backend="aot_eager")
            return model

        for shard in (recomputed, compiled):
            assert_idle(self.check(shard=shard, num_microbatches=2, steps=3))

    def test_exchanges_of_activations(self) -> None:
        """They read shards without a gather. The embedding comes last, so no gather before it brings its rows."""

        alone = partial(explicit, min_shard_numel=0, coalesce_nbytes=0)

        def exchanged(model: Any) -> Any:
            model._modules["embedding"] = model._modules.pop("embedding")
            return self.shard(model, schedule=alone(embedding="exchange"))

        assert_idle(self.check(shard=exchanged, steps=3))
        torch.manual_seed(0)
        model = check_training(
            LM().double(),
            partial(self.shard, schedule=alone(head="exchange")),
            self.mesh,
            lambda generator: torch.randint(0, VOCABULARY, (8, 4), generator=generator),
            lambda model, tokens: model(tokens),
        )
        self.assertEqual(sum(weight.fused.losses is not None for weight in runtime_of(model).weights), 1)

    def test_tensor_parallel(self) -> None:
        mesh = mesh_of((2, 1, 2), ("replicate", "gtp", "tp"))

        def shard(model: Any) -> Any:
            tensor_parallel(model, mesh["tp"])
            return gtp_shard(model, mesh["replicate", "gtp"], schedule=ALL, shard_optimizer=True)

        model = check(make(), shard, mesh["replicate"])
        up = model.layers[0].up.weight
        self.assertEqual(up.device_mesh.mesh_dim_names, ("tp", "gtp", "replicate"))
        self.assertEqual(up.to_local().numel() * 4, up.numel())

    def test_quantized_weights(self) -> None:
        """The same bits as with whole states."""
        for recipe in ("mxfp8", "float8_tensorwise", "float8_rowwise"):
            trained = []
            for shard_optimizer in (False, True):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
                quantize_(model, recipe)
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                gtp_shard(model, self.mesh, schedule=ALL, mp_policy=policy, shard_optimizer=shard_optimizer)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
                for step in range(3):
                    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
                    blocks_loss(model, rows_of_rank(rows, self.mesh)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                trained.append([full(param) for param in model.parameters()])
                parts = [param.to_local().numel() for param in model.parameters()]
                self.assertEqual(parts, [64 * 128 // (4 if shard_optimizer else 2)] * 2)
            self.assertEqual(trained[0], trained[1], rtol=0, atol=0)


class TestWritesAndSaves(OfTwoByTwo):
    def test_clipping_scaling_and_averages(self) -> None:
        check_averages(self, adamw)

    def test_an_overflow_of_one_rank_skips_the_step_of_all(self) -> None:
        check_overflow(self, adamw)

    def test_writes_reach_all_replicas(self) -> None:
        """Between forwards without an optimizer: in place, through ``.data``, to local tensors, by foreach, loaded."""
        batch = token_batch(torch.Generator().manual_seed(0))

        def in_place(module: Any, *_: Any) -> None:
            with torch.no_grad():
                for param in module.parameters():
                    param.mul_(0.5)

        def by_data(module: Any, *_: Any) -> None:
            for param in module.parameters():
                param.data.mul_(0.5)

        def new_data(module: Any, *_: Any) -> None:
            for param in module.parameters():
                param.data = param.data * 0.5

        def local(module: Any, *_: Any) -> None:
            with torch.no_grad():
                for param in module.parameters():
                    (param.to_local() if isinstance(param, DTensor) else param).mul_(0.5)

        def by_foreach(module: Any, held: Any) -> None:
            torch._foreach_mul_(held, 0.5)

        def loaded(module: Any, held: Any) -> None:
            module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})

        def assigned(module: Any, held: Any) -> None:
            state = {name: value * 0.5 for name, value in module.state_dict().items()}
            module.load_state_dict(state, assign=True)

        for schedule in (ALL, CHOSEN):
            reference, model = make(), self.shard(make(), schedule=schedule)
            with torch.no_grad():
                for write in (in_place, by_data, new_data, local, by_foreach, loaded, assigned, in_place):
                    self.assertEqual(next_token_loss(model, batch), next_token_loss(reference, batch))
                    for module in (reference, model):
                        held = [param.detach() for param in module.parameters()]
                        held = list(module.parameters()) if write is by_foreach else held
                        write(module, held)
                    self.assertEqual(next_token_loss(model, batch), next_token_loss(reference, batch), msg=str(write))

    def test_from_meta_and_casts(self) -> None:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7))
        self.shard(model).to_empty(device="cpu")
        reference = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7))
        for module in (model, reference):
            torch.manual_seed(1)
            for layer in module:
                layer.reset_parameters()
        x = torch.randn(4, 6)
        self.assertEqual(model(x), reference(x))
        for module in (model, reference):
            module.double()
        self.assertEqual(model(x.double()), reference(x.double()))

    def test_unshard_has_the_present_values(self) -> None:
        for schedule in (ALL, CHOSEN):
            torch.manual_seed(0)
            reference = BlockModel().double()
            model = self.shard(copy.deepcopy(reference), schedule=schedule)
            batch = blocks_batch(torch.Generator().manual_seed(0))
            self.assertEqual(model(batch), reference(batch))
            for _ in range(2):
                for module in (model, reference):
                    for param in module.parameters():
                        param.data.add_(1)
                model.unshard()
                weights = [module.layers[0].up.weight.detach().clone() for module in (model, reference)]
                self.assertEqual(*weights)
                model.reshard()

    def test_a_replica_may_run_forwards_alone(self) -> None:
        """After a step, one replica evaluates: the other one meets it in its next forward."""
        model = self.shard(make())
        reference = make()
        optimizers = [adamw(module.parameters()) for module in (reference, model)]
        for step in range(3):
            batch = token_batch(torch.Generator().manual_seed(step))
            next_token_loss(reference, batch).backward()
            next_token_loss(model, rows_of_rank(batch, self.mesh)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if self.mesh.get_local_rank("replicate") == step:  # not after the last step: it would wait forever
                with torch.no_grad():
                    for _ in range(2):
                        self.assertEqual(next_token_loss(model, batch), next_token_loss(reference, batch))
            assert_same_params(model, reference)

    @pytest.mark.long
    def test_checkpoints(self) -> None:
        """Resumes on the same axes, on meta, with whole states, under gtp alone and in one process, and goes on."""

        def on_meta(model: nn.Module) -> Any:
            return self.shard(model.to("meta")).to_empty(device="cpu")

        topologies = [
            topology(self.shard, self.mesh),
            topology(on_meta, self.mesh),
            topology(lambda model: gtp_shard(model, self.mesh, schedule=ALL), self.mesh),
            topology(lambda model: gtp_shard(model, self.gtp_mesh(), schedule=ALL), self.gtp_mesh()),
            PLAIN,
        ]

        def batch(step: int) -> torch.Tensor:
            return token_batch(torch.Generator().manual_seed(step))

        check_reload(lambda seed: make(seed=seed), batch, next_token_loss, topologies, adamw)

    def test_resumes_with_whole_states_and_back(self) -> None:
        whole = topology(lambda model: gtp_shard(model, self.mesh, schedule=ALL), self.mesh)
        for topologies in ([topology(self.shard, self.mesh), whole], [whole, topology(self.shard, self.mesh)]):
            check_reload(lambda seed: make_small(seed).double(), small_tokens, small_loss, topologies, adamw)


class Momentum(nn.Module):
    """Writes in its forward to weights, between uses of them."""

    def __init__(self, write: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10, bias=False), nn.Linear(6, 10, bias=False)
        self.write, self.held = write, ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(x) + self.first(x)
        with torch.no_grad():
            self.write(*self.held)
        return y * self.first(x) + self.second(x)


class TestWritesInForward(OfTwoByTwo):
    def test_they_reach_all_replicas(self) -> None:
        def lerp(target: Any, source: Any) -> None:
            target.lerp_(source, 0.25)

        def by_data(target: Any, source: Any) -> None:
            target.data.lerp_(source.data, 0.25)

        for write in (lerp, by_data):
            torch.manual_seed(0)
            reference = Momentum(write).double()
            model = self.shard(copy.deepcopy(reference))
            for module in (reference, model):
                module.held = (module.second.weight, module.first.weight)
            for step in range(2):
                rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                with torch.no_grad():
                    for _ in range(2):
                        self.assertEqual(model(rows), reference(rows))
                assert_same_params(model, reference)


class TestPipeline(GlooTest):
    def test_stages_train_as_one_process(self) -> None:
        """pp x replicate, 2 x 2: the replicas are the axis that other tests of pipelines call dp."""

        def shard(parts: list[nn.Module], mesh: DeviceMesh) -> None:
            for part in parts:
                gtp_shard(part, mesh["dp", "gtp"], schedule=ALL, shard_optimizer=True)
                self.assertEqual(part.linear.weight.to_local().shape[0], WIDTH // 4)

        for layout in (ONE_F_ONE_B, ZERO_BUBBLE):
            layout = layout._replace(sizes=(2, 2, 1))
            train(Pipeline(layout, shard=shard), make_parts(layout.num_parts))


class TestCosts(OfTwoByTwo):
    def test_a_rank_holds_its_part_of_the_states(self) -> None:
        model = self.shard(make())
        optimizer = adamw(model.parameters())
        self.step(model)
        optimizer.step()
        for name, param in model.named_parameters():
            for moment in (optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")):
                mine = torch.tensor(moment.to_local().numel())
                dist.all_reduce(mine)
                copies = 4 if param.ndim < 2 else 1  # what is whole along gtp stays whole
                self.assertEqual(mine.item(), moment.numel() * copies, msg=name)

    def test_collectives_of_a_step(self) -> None:
        """Over the replicas each weight is reduce-scattered once, and gathered once for all microbatches. What gtp
        gathers is the same, in number and size."""
        models = [gtp_shard(make(), self.mesh, schedule=ALL, shard_optimizer=split) for split in (False, True)]
        num_weights = len(runtime_of(models[0]).weights)
        for _ in range(2):
            counts = []
            for model in models:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                with counted() as count:
                    for microbatch in range(2):
                        model.set_requires_gradient_sync(microbatch == 1)
                        self.step(model, microbatch)
                optimizer.step()
                optimizer.zero_grad()
                counts.append(count())
            whole, split = counts
            self.assertEqual(split.reduce_scatters - whole.reduce_scatters, num_weights)
            self.assertEqual(whole.all_reduces - split.all_reduces, num_weights)
            self.assertEqual(split.all_gathers - whole.all_gathers, num_weights)
        gathered_bytes = [[target.nbytes for target in runtime_of(model).members.gatherables] for model in models]
        self.assertEqual(*gathered_bytes)

    def test_report(self) -> None:
        model = self.shard(make())
        report = str(sharding_report(model, verbose=True))
        self.assertIn("optimizer states over replicate", report)
        self.assertIn("(G(0), S(0))", report)


class TestRefusals(OfTwoByTwo):
    def refuse(self, what: str, call: Callable[[], Any], kind: type[Exception] = NotImplementedError) -> None:
        with self.assertRaisesRegex(kind, what):
            call()

    def test_combinations(self) -> None:
        model = self.shard(make())
        self.refuse("capture_step does not support gtp_shard.shard_optimizer", lambda: capture_step(model, model))
        is_capturing = mock.patch.object(Streams, "is_capturing", property(lambda comm: True))
        with is_capturing:
            self.refuse("A CUDA graph cannot record forwards", lambda: model(token_batch(torch.Generator())))
        outer = mesh_of((2, 1, 2), ("dp", "replicate", "gtp"))
        inner = gtp_shard(make(), outer["replicate", "gtp"], schedule=ALL, shard_optimizer=True)
        fully_shard(inner, mesh=outer["dp"])  # no replicas, nothing to split
        for options in ({"offload_policy": CPUOffloadPolicy()}, {"shard_optimizer": 1}):
            kind = TypeError if "shard_optimizer" in options else NotImplementedError
            self.refuse("shard_optimizer", lambda o=options: self.shard(make(), **o), kind)
        native = quantize_(nn.Linear(64, 64, bias=False), "mxfp8", storage="native")
        self.refuse("shard_optimizer=True for parameter 'weight'.*NativeWeight", lambda: self.shard(native))
        self.shard(native.requires_grad_(False))
        unnamed = DeviceMesh("cpu", torch.arange(4).view(2, 2))
        call = lambda: gtp_shard(make(), unnamed, schedule=ALL, shard_optimizer=True)  # noqa: E731
        self.refuse("expects a mesh with named axes for shard_optimizer", call, ValueError)

    def test_unlike_arguments(self) -> None:
        split = dist.get_rank() < 2
        call = lambda: gtp_shard(make(), self.mesh, schedule=ALL, shard_optimizer=split)  # noqa: E731
        self.refuse("shard_optimizer", call, RuntimeError)

    def test_outer_fully_shard(self) -> None:
        mesh = mesh_of((1, 2, 2), ("dp", "replicate", "gtp"))
        model = gtp_shard(make(), mesh["replicate", "gtp"], schedule=ALL, shard_optimizer=True)
        with self.assertRaisesRegex(NotImplementedError, "cannot wrap gtp_shard.shard_optimizer=True"):
            fully_shard(model, mesh=mesh["dp"])


@pytest.mark.long
class TestThreeAxes(GlooTest):
    world_size = 8

    def test_three_axes(self) -> None:
        mesh = mesh_of((2, 2, 2), ("replicate", "gtp", "tp"))

        def shard(model: Any) -> Any:
            tensor_parallel(model, mesh["tp"])
            return gtp_shard(model, mesh["replicate", "gtp"], schedule=ALL, shard_optimizer=True)

        model = check(make(), shard, mesh["replicate", "gtp"])
        self.assertEqual(model.layers[0].up.weight.to_local().numel() * 8, model.layers[0].up.weight.numel())


assert VOCABULARY % 4  # uneven rows
