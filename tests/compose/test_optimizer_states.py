"""Optimizer states that replicas split: writes between steps, saves, costs and refusals.

``gtp_shard(shard_optimizer=True)`` splits them, and ``fully_shard(reshard_after_forward=False)`` over the copies of
``gtp_shard``: gradients are then reduce-scattered over both axes, and what the optimizer has updated is gathered over
the replicas once a step.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from checkpoint_common import check_reload, local, topology
from checkpoint_common import make as make_small
from checkpoint_common import tokens_of_step as small_tokens
from common import ALL, assert_same_params
from fsdp_common import (
    OPTIMIZERS,
    both,
    check,
    check_averages,
    check_checkpoints,
    check_overflow,
    make,
    mesh_of,
    next_token_loss,
    token_batch,
)
from runtime_common import Counts, counted, members_of, runtime_of
from test_gtp_shard_groups import CHOSEN
from test_shard_optimizer import CLOSE, OfTwoByTwo, blocks, blocks_batch, small_loss
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from dtensor_gtp import capture_step, gtp_shard, quantize_, sharding_report
from dtensor_gtp._comm.streams import Streams

adamw = OPTIMIZERS["AdamW fused"]


class TestWritesAndSaves(OfTwoByTwo):
    def test_clipping_scaling_and_averages(self) -> None:
        check_averages(self, adamw)

    def test_an_overflow_of_one_rank_skips_the_step_of_all(self) -> None:
        check_overflow(self, adamw)

    def test_writes_reach_all_replicas(self) -> None:
        """Between forwards without an optimizer: in place, through ``.data``, to local tensors, by foreach, loaded."""
        batch = token_batch(torch.Generator().manual_seed(0))

        def each(write: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module], Any]:
            return lambda module: [write(param) for param in module.parameters()]

        def loaded(module: nn.Module, **options: Any) -> None:
            module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()}, **options)

        def in_place(state: dict[str, torch.Tensor]) -> None:
            for value in state.values():  # as ``dcp.load`` does
                local(value).detach().view(-1).copy_(0.5 * local(value).flatten())

        early: dict[nn.Module, dict[str, torch.Tensor]] = {}
        ways = {
            "into a state dict": lambda module: in_place(early.setdefault(module, module.state_dict())),
            "into that of before": lambda module: in_place(early[module]),
            "in place": each(lambda param: param.mul_(0.5)),
            "by data": each(lambda param: param.data.mul_(0.5)),
            "new data": each(lambda param: setattr(param, "data", param.data * 0.5)),
            "local": each(lambda param: local(param).mul_(0.5)),
            "by foreach": lambda module: torch._foreach_mul_(list(module.parameters()), 0.5),
            "loaded": loaded,
            "assigned": partial(loaded, assign=True),
            "in place again": each(lambda param: param.mul_(0.5)),
        }
        for schedule in (ALL, CHOSEN):
            reference, model = make(), self.shard(make(), schedule=schedule)
            with torch.no_grad():
                for way, write in ways.items():
                    self.assertEqual(next_token_loss(model, batch), next_token_loss(reference, batch))
                    for module in (reference, model):
                        write(module)
                    self.assertEqual(next_token_loss(model, batch), next_token_loss(reference, batch), msg=way)

    def test_one_rank_looks_between_microbatches(self) -> None:
        """It meets no other replica for that."""
        reference, batch = blocks(), blocks_batch(torch.Generator().manual_seed(0))
        for schedule in (ALL, CHOSEN):
            model = self.shard(copy.deepcopy(reference), schedule=schedule)
            for _ in range(3):
                self.assertEqual(model(batch), reference(batch))
                if self.rank == 0:
                    for param in model.parameters():
                        local(param.data).norm()

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
            reference = blocks()
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
        reference, batch = make(), token_batch(torch.Generator().manual_seed(9))

        def evaluate(model: nn.Module, step: int) -> None:
            if self.mesh.get_local_rank("replicate") == step - 1:  # not after the last step: it would wait forever
                with torch.no_grad():
                    for _ in range(2):
                        self.assertEqual(next_token_loss(model, batch), next_token_loss(reference, batch))

        check(reference, self.shard, self.mesh, steps=3, make_optimizer=adamw, between=evaluate)

    @pytest.mark.long
    def test_checkpoints(self) -> None:
        check_checkpoints(self.mesh, self.shard)

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


class Costs(OfTwoByTwo):
    def check_parts_of_states(self, model: nn.Module, copies_of_whole: int) -> None:
        """All ranks together have as many elements of each state as the parameter has, or that many copies."""
        optimizer = adamw(model.parameters())
        self.step(model)
        optimizer.step()
        for name, param in model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[param][key]
                mine = torch.tensor(moment.to_local().numel())
                dist.all_reduce(mine)
                copies = copies_of_whole if param.ndim < 2 else 1
                self.assertEqual(mine.item(), moment.numel() * copies, msg=name)

    def counts(self, model: Any, num_microbatches: int = 2) -> Counts:
        """Of a second step."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with counted() as count:
                for microbatch in range(num_microbatches):
                    model.set_requires_gradient_sync(microbatch == num_microbatches - 1)
                    self.step(model, microbatch)
            optimizer.step()
            optimizer.zero_grad()
        return count()


class TestCosts(Costs):
    def test_a_rank_holds_its_part_of_the_states(self) -> None:
        self.check_parts_of_states(self.shard(make()), 4)  # what is whole along gtp stays whole

    def test_collectives_of_a_step(self) -> None:
        """Over the replicas each weight is reduce-scattered once, and gathered once for all microbatches. What gtp
        gathers is the same, in number and size."""
        models = [gtp_shard(make(), self.mesh, schedule=ALL, shard_optimizer=split) for split in (False, True)]
        num_weights = len(members_of(models[0]).weights)
        whole, split = map(self.counts, models)
        self.assertEqual(split.reduce_scatters - whole.reduce_scatters, num_weights)
        self.assertEqual(whole.all_reduces - split.all_reduces, num_weights)
        self.assertEqual(split.all_gathers - whole.all_gathers, num_weights)
        gathered_bytes = [[target.nbytes for target in runtime_of(model).members.gatherables] for model in models]
        self.assertEqual(*gathered_bytes)

    def test_report(self) -> None:
        report = str(sharding_report(self.shard(make()), verbose=True))
        self.assertIn("optimizer states over replicate", report)
        self.assertIn("(G(0), S(0))", report)


class TestByFullyShard(Costs):
    def shard(self, model: Any, **options: Any) -> Any:
        return both(self.mesh, outer="replicate", reshard_after_forward=False)(model)

    def test_a_rank_holds_its_part_of_the_states(self) -> None:
        self.check_parts_of_states(self.shard(make()), 2)  # what is whole along gtp is cut over the replicas alone

    def test_collectives_of_a_step(self) -> None:
        """Each unit is gathered and reduce-scattered once over the replicas: what one all-reduce moves."""
        model, plain = self.shard(make()), gtp_shard(make(), self.mesh["gtp"], schedule=ALL)
        split, whole = (self.counts(each, num_microbatches=1) for each in (model, plain))
        self.assertEqual(split.all_gathers - whole.all_gathers, len(model.layers) + 1)
        self.assertEqual(split.reduce_scatters - whole.reduce_scatters, len(model.layers) + 1)

    def test_an_overflow_of_one_rank_skips_the_step_of_all(self) -> None:
        check_overflow(self, adamw)

    @pytest.mark.long  # by default: those of shard_optimizer
    def test_optimizers_averages_and_checkpoints(self) -> None:
        """Checkpoints resume on the same axes, on meta, under gtp alone and in one process, and go on there as here."""
        for make_optimizer in OPTIMIZERS.values():
            check(make(), self.shard, self.mesh, make_optimizer=make_optimizer, tolerance=CLOSE)
        check_averages(self, adamw)
        check_checkpoints(self.mesh, self.shard)


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
        self.refuse("cannot wrap gtp_shard.shard_optimizer=True", lambda: fully_shard(model, mesh=mesh["dp"]))
