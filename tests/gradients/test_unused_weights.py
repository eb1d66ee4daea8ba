"""Sharded weights that each rank uses as it likes: ``set_reduce_scatter_unused_params``."""

from __future__ import annotations

import copy
import unittest
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, check_update
from runtime_common import WIDTH, Raw, assert_idle, counted, gathers, make_rows, members_of, runtime_of
from schedules import explicit
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import GTPModule, SchedulePolicy, gtp_shard

SIZES = 8, 5, 9  # outputs of the heads
ALL_HEADS = 0, 1, 2
CHOSEN = SchedulePolicy(min_shard_numel=0)


class Head(nn.Module):
    """Fused and read weights, and whole parameters."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.raw, self.norm, self.out = Raw(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.raw(x)))


class Tasks(nn.Module):
    """A body for all ranks, and heads, of which a forward uses those that it is told."""

    def __init__(self, is_recomputed: bool = False) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.heads = nn.ModuleList([Head(size) for size in SIZES])
        self.is_recomputed = is_recomputed

    def forward(self, x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
        for layer in self.body:
            x = torch.tanh(layer(x))
        losses = [x.square().mean()]
        for head in heads:
            called = self.heads[head]
            y = checkpoint(called, x, use_reentrant=False) if self.is_recomputed else called(x)
            losses.append(y.square().mean())
        return torch.stack(losses).sum()


class Choice(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return self[index](x)


# In each step the heads that each rank uses: others, one twice, none. No rank uses the last one in the second step.
STEPS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,), (1, 2)), ((1, 0, 1), ()), ((2, 1), (1, 2)), ((), (0,))]


def shard_with_free_heads(model: Tasks, mesh: DeviceMesh, policy: SchedulePolicy) -> None:
    for head in model.heads:
        gtp_shard(head, mesh, schedule=policy)
    gtp_shard(model, mesh, schedule=policy)
    for head in model.heads:
        assert isinstance(head, GTPModule)
        head.set_reduce_scatter_unused_params(True)


def zeros_for_unused(reference: nn.Module) -> None:
    """What ``fully_shard`` gives to weights that no rank has used."""
    for param in reference.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)


class TestUnusedWeights(GlooTest):
    world_size = 2

    def train(self, model: Any, reference: nn.Module, rank: int, *, has_zeros: bool = True) -> None:
        """What no rank has used gets zeros, or nothing."""
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, reference)]
        for step, heads in enumerate(STEPS):
            rows = [make_rows(2 * step + number) for number in range(2)]
            for is_last in (False, True):  # a microbatch without sync, too
                model.set_requires_gradient_sync(is_last)
                model(rows[rank], heads[rank]).backward()
                for number in range(2):
                    (reference(rows[number], heads[number]) / 2).backward()
            if has_zeros:
                zeros_for_unused(reference)
            check_update(model, reference, optimizers)
            with torch.no_grad():  # an evaluation, of other heads
                self.assertEqual(model(rows[0], heads[1 - rank]), reference(rows[0], heads[1 - rank]))

    def train_from_start(self, is_recomputed: bool, policy: SchedulePolicy, shard: Any) -> tuple[Any, nn.Module]:
        reference = Tasks(is_recomputed)
        model = copy.deepcopy(reference)
        shard(model, self.gtp_mesh(), policy)
        self.train(model, reference, self.gtp_mesh().get_local_rank())
        return model, reference

    def test_ranks_use_different_weights(self) -> None:
        for is_recomputed, policy in ((False, ALL), (True, explicit(0, min_shard_numel=0)), (True, CHOSEN)):
            model, _ = self.train_from_start(is_recomputed, policy, shard_with_free_heads)
            runtime_of(model).keeper.end_keeps()  # of the last evaluation
            assert_idle(model)

    def test_of_the_whole_model_and_after_groups_were_made(self) -> None:
        def shard(model: Any, mesh: DeviceMesh, policy: SchedulePolicy) -> None:
            gtp_shard(model, mesh, schedule=policy)
            model(make_rows(0), ALL_HEADS).backward()
            model.zero_grad()
            assert members_of(model).groups
            model.set_reduce_scatter_unused_params(True)

        model, reference = self.train_from_start(False, CHOSEN, shard)
        model.set_reduce_scatter_unused_params(False)
        for each in (model, reference):
            each.zero_grad()
            each(make_rows(0), ALL_HEADS).backward()
        assert_same_params(model, reference, "grad")

    def test_whole_parameters_need_no_switch(self) -> None:
        mesh = self.gtp_mesh()
        reference = Tasks()
        model = copy.deepcopy(reference)
        for head in model.heads:
            gtp_shard(head, mesh, schedule=explicit(min_shard_numel=1000))
        gtp_shard(model, mesh, schedule=ALL)
        self.train(model, reference, mesh.get_local_rank(), has_zeros=False)

    def test_one_gather_of_each_weight(self) -> None:
        """However often this rank uses it, if it does."""
        torch.manual_seed(0)
        model: Any = gtp_shard(Tasks(), self.gtp_mesh(), schedule=ALL)
        model.set_reduce_scatter_unused_params(True)
        for heads in ((0, 0, 1), (), (2,)):
            with gathers(model) as used, counted() as counts:
                model(make_rows(0), heads).backward()
            gathered, _, reduced_whole = counts()
            self.assertEqual((gathered, reduced_whole), (len(used), 1))
            self.assertEqual(used, dict.fromkeys(used, 1))

    @unittest.skipUnless(
        hasattr(FSDPModule, "set_reduce_scatter_unused_params"), "fully_shard of torch 2.11 has it not"
    )
    def test_gradients_are_those_of_fully_shard(self) -> None:
        mesh = self.gtp_mesh()
        rank = mesh.get_local_rank()
        torch.manual_seed(0)
        start = Tasks()
        for sets_inputs_only in (False, True):
            ours, theirs = copy.deepcopy(start), copy.deepcopy(start)
            gtp_shard(ours, mesh, schedule=ALL)
            fully_shard(theirs, mesh=mesh)
            for model in (ours, theirs):
                model.body[0].weight.requires_grad_(not sets_inputs_only)
                model.set_reduce_scatter_unused_params(True)
                model(make_rows(rank), ((0,), (1,))[rank]).backward()
            grads = [
                {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
                for model in (ours, theirs)
            ]
            self.assertEqual(*grads)
            assert (grads[0]["body.0.weight"] is None) == sets_inputs_only
            assert grads[0]["heads.2.out.weight"].count_nonzero() == 0

    def test_frozen_before_the_microbatch_that_syncs(self) -> None:
        """One rank has used the weight in an earlier microbatch, the other one has not."""
        rank = self.gtp_mesh().get_local_rank()
        reference = Tasks()
        model: Any = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        model.set_reduce_scatter_unused_params(True)
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            heads = [((0,), (1,)), ((), ())][is_last]
            for each in (model, reference):
                each.heads.requires_grad_(not is_last)
            model(make_rows(rank), heads[rank]).backward()
            for number in range(2):
                (reference(make_rows(number), heads[number]) / 2).backward()
        reference.heads.requires_grad_(True)
        zeros_for_unused(reference)
        assert_same_params(model, reference, "grad")


class TestWhatStaysAnError(GlooTest):
    world_size = 2

    def test_without_the_switch(self) -> None:
        """For any weights, or for those outside of the modules that have it."""
        mesh = self.gtp_mesh()
        rank = mesh.get_local_rank()
        message = "same weights in the same order.*'{0}.*'{1}.*set_reduce_scatter_unused_params"
        model: Any = gtp_shard(Choice(), mesh, schedule=ALL)
        with self.assertRaisesRegex(RuntimeError, message.format("0.weight", "1.weight")):
            model(make_rows(0), rank)
        tasks = Tasks()
        shard_with_free_heads(tasks, mesh, ALL)
        tasks.body = nn.ModuleList(reversed(tasks.body)) if rank else tasks.body
        with self.assertRaisesRegex(RuntimeError, message.format("body.0", "body.1")):
            tasks(make_rows(0), (rank,))

    def test_an_outer_fully_shard(self) -> None:
        mesh = self.hsdp_mesh(1)
        model = gtp_shard(Tasks(), mesh["gtp"], schedule=ALL)
        model.set_reduce_scatter_unused_params(True)
        fully_shard(model, mesh=mesh["replicate"])
        GTPModule.set_reduce_scatter_unused_params(model, True)
        with self.assertRaisesRegex(
            NotImplementedError, "does not support parameter 'body.0.weight'.*outer fully_shard"
        ):
            model(make_rows(0), (0,))

    def test_groups_with_gradients_to_come(self) -> None:
        model: Any = gtp_shard(Tasks(), self.gtp_mesh(), schedule=CHOSEN)
        model.set_requires_gradient_sync(False)
        model(make_rows(0), ALL_HEADS).backward()
        with self.assertRaisesRegex(RuntimeError, "expects no gradients of microbatches without sync"):
            model.set_reduce_scatter_unused_params(True)


class Branches(nn.Module):
    """A block of which each call uses the branches that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        h = self.norm(x)
        return x + sum((getattr(self, name)(h).tanh() for name in used), 0 * h)


class Blocks(nn.Module):
    def __init__(self, has_first: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if has_first else nn.Identity()  # else no block gets inputs with gradients
        self.layers = nn.ModuleList(Branches() for _ in range(3))

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, used)
        return x.square().mean()


class TestBranchesOfBlocks(GlooTest):
    """Weights of one block, of which each rank uses its own, without any call that says so."""

    world_size = 2

    def pair(self, has_first: bool) -> tuple[Any, nn.Module]:
        torch.manual_seed(0)
        reference = Blocks(has_first)
        return gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=CHOSEN), reference

    def train(self, pair: tuple[Any, nn.Module], used: tuple[str, str], seed: int) -> None:
        """A microbatch: in one process the mean over what the ranks do."""
        batch = make_rows(seed).chunk(2)
        pair[0](batch[self.rank], used[self.rank]).backward()
        (sum(pair[1](rows, names) for rows, names in zip(batch, used, strict=True)) / 2).backward()

    def check(self, pair: tuple[Any, nn.Module]) -> None:
        assert_same_params(*pair, "grad", rtol=1e-4, atol=1e-6)
        for each in pair:
            each.zero_grad()

    def test_ranks_change_what_they_use(self) -> None:
        """One rank alone begins to use a weight; nobody uses another one."""
        for has_first in (True, False):
            pair = self.pair(has_first)
            for seed, used in enumerate((("a", "a"), ("ab", "a"), ("", "b"), ("a", ""), ("ab", "ab"))):
                self.train(pair, used, seed)
                self.check(pair)
            for seed, used in enumerate((("a", "a"), ("a", "b"), ("", "a"))):
                pair[0].set_requires_gradient_sync(seed == 2)
                self.train(pair, used, seed)
            self.check(pair)

    def test_weights_are_frozen_unfrozen_and_used_for_the_first_time_in_one_accumulation(self) -> None:
        for switch in ("set_requires_gradient_sync", "set_is_last_backward"):
            pair = self.pair(has_first=True)
            for each in pair:
                for layer in each.layers:
                    layer.b.weight.requires_grad_(False)
            getattr(pair[0], switch)(False)
            self.train(pair, ("b", "b"), 0)  # whole parameters alone get gradients
            for each in pair:
                each.layers[1].norm.weight.requires_grad_(False)
                each.layers[2].b.weight.requires_grad_(True)
            self.train(pair, ("b", "b"), 1)
            for each in pair:
                each.layers[0].b.weight.requires_grad_(True)  # and is not used
            getattr(pair[0], switch)(True)
            self.train(pair, ("a", "a"), 2)
            self.check(pair)
