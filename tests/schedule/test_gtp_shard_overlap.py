"""Prefetching and overlap: when a weight is gathered changes time and memory, never a bit of the result.

The rules that are pinned here: gathers equal uses, no buffer is written or freed under a use, no gather reads a shard
that is still to be updated, and the plan of prefetches follows what the model does.
"""

from __future__ import annotations

import copy
import unittest
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from common import ALL, NOTHING_STAYS, GlooTest, environment, fake_mesh, rows_of_rank
from runtime_common import (
    WIDTH,
    Net,
    Raw,
    assert_bit_equal,
    assert_idle,
    check_step,
    counted,
    gathers,
    local,
    make_rows,
    make_tokens,
    runtime_of,
    shard_copy,
    square_step,
    token_step,
    train_record,
    weight_of,
)
from schedules import explicit
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import SchedulePolicy, gtp_shard
from dtensor_gtp._schedule.passes import ChainKey, Entry


def policy(depth: int, max_inflight: int = 2, **options: int) -> SchedulePolicy:
    """Gathers ``depth`` weights ahead, one by one, unless told otherwise."""
    one_by_one = {"prefetch_nbytes": 0, "coalesce_nbytes": 0, "coalesce_grad_nbytes": 0, "min_shard_numel": 0}
    return explicit(depth, max_inflight_reduce_scatters=max_inflight, **{**one_by_one, **options})


def repeated(seed: int) -> tuple[SchedulePolicy, str]:
    """A schedule and debug flags."""
    return policy(1 + seed % 4, coalesce_nbytes=seed % 3 * 600), f"delay={seed}"


class Checkpointed(Net):
    """``Net`` whose layers are recomputed in backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return self.head(self.norm(x))


class Branches(nn.Module):
    """Which layers run, and in which order, is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Raw() if index % 2 else nn.Linear(WIDTH, WIDTH) for index in range(6)])
        self.order = list(range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x


class TestPoison(unittest.TestCase):
    """In one process, where no thread of gloo may still hold a buffer."""

    def test_poison_fills_a_freed_buffer_but_no_escaped_reference(self) -> None:
        with fake_mesh(4) as mesh:
            with environment(DTENSOR_GTP_DEBUG="poison"):
                model = gtp_shard(Raw(), mesh, schedule=ALL)
            model(make_rows(0))
            runtime, weight = runtime_of(model), weight_of(model, "first")
            freed = runtime.gathering.acquire(weight.for_forward)
            freed.buffer.zero_()
            runtime.gathering.release(weight.for_forward, freed)
            assert freed.buffer.isnan().all()
            escaping = runtime.gathering.acquire(weight.for_forward)
            escaped = escaping.full.view(-1)
            escaped.data.zero_()
            runtime.gathering.release(weight.for_forward, escaping)
            assert escaped.eq(0).all()


class TestOverlap(GlooTest):
    world_size = 2

    def check_bits(self, model_cls: type[nn.Module], *cases: tuple[SchedulePolicy, str]) -> None:
        """Two steps with each schedule and debug flags have the bits of those without prefetching."""

        def record(schedule: SchedulePolicy, debug: str) -> list[torch.Tensor]:
            torch.manual_seed(1)
            with environment(DTENSOR_GTP_DEBUG=debug):
                model = gtp_shard(model_cls(), self.gtp_mesh(), schedule=schedule)
            return train_record(model, self.gtp_mesh(), steps=2)

        expected = record(policy(0, max_inflight=1), "")
        for case in cases:
            assert_bit_equal(record(*case), expected, f"{case}")

    # --- nothing changes a bit ----------------------------------------------------------------------------------------

    def test_prefetch_depth_changes_no_bit(self) -> None:
        """Nor do windows in bytes and gathers in one launch, under poison and random delays: some weights have short
        last shards, which are copied into their slots; the others, of one shape, are sent as they are."""
        in_bytes = ({}, {"prefetch_nbytes": 1500}, {"prefetch_nbytes": 3000, "coalesce_nbytes": 1200})
        delayed = ((policy(1), "poison,delay=1"), (policy(3, coalesce_nbytes=1200), "poison,delay=3"))
        self.check_bits(
            Net,
            *((policy(depth, depth + 1), "") for depth in (1, 2, 5)),
            *((explicit(1, min_shard_numel=0, **options), "poison,delay=1") for options in in_bytes),
            *delayed,
            *map(repeated, range(2, 4)),
        )
        self.check_bits(Checkpointed, *delayed)

    @pytest.mark.soak
    def test_r25_fifty_repeats_under_random_delays_are_bit_equal(self) -> None:
        self.check_bits(Net, *map(repeated, range(50)))

    # --- gathers read the present shard -------------------------------------------------------------------------------

    def test_r3_next_forward_uses_the_updated_weight(self) -> None:
        """After each huge step, it equals that of an unsharded model on the new values, though fused and foreach
        optimizers leave no trace in the versions of the tensors they write to."""
        self.check_updates_are_seen(lambda params: torch.optim.SGD(params, lr=30.0, foreach=False))
        self.check_updates_are_seen(lambda params: torch.optim.AdamW(params, lr=1.0, foreach=True))
        self.check_updates_are_seen(lambda params: torch.optim.AdamW(params, lr=1.0, fused=True))

    def check_updates_are_seen(self, make_optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer]) -> None:
        mesh = self.gtp_mesh()
        reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), Raw(), nn.Linear(WIDTH, WIDTH)).double()
        batch = make_rows(0, dtype=torch.float64)
        for reshard, is_pinned in ((True, False), (False, False), (True, True)):
            twin = copy.deepcopy(reference)
            with environment(DTENSOR_GTP_DEBUG="delay=5"):
                model = shard_copy(reference, mesh, reshard_after_forward=reshard)
            if is_pinned:
                model.unshard()
            optimizers = [make_optimizer(twin.parameters()), make_optimizer(model.parameters())]
            for step in range(2):
                square_step(twin, batch)
                square_step(model, rows_of_rank(batch, mesh))
                before = twin(batch).detach()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                for grad_mode in (torch.no_grad(), torch.enable_grad()):
                    with grad_mode:
                        expected = twin(batch).detach()
                        actual = model(rows_of_rank(batch, mesh)).detach()
                    assert (expected - before).abs().max() > 0.1, "the step must be huge"
                    what = f"step {step}, reshard {reshard}, pinned {is_pinned}"
                    torch.testing.assert_close(actual, rows_of_rank(expected, mesh), msg=lambda m, w=what: f"{w}: {m}")

    def test_values_written_between_forwards_are_used_at_once(self) -> None:
        """Also by weights that are kept gathered, and also where no backward or optimizer step ever happens."""
        reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), Raw())

        def load(model: nn.Module) -> None:
            model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})

        def write(model: nn.Module, how: Callable[[Any], object]) -> None:
            with torch.no_grad():
                for param in model.parameters():
                    how(param)

        def write_held_data(model: nn.Module) -> None:
            for data in held[model]:
                data.add_(0.25)

        x = make_rows(1)
        traced = (
            load,
            partial(write, how=lambda param: param.copy_(param * 0.5)),
            partial(write, how=lambda param: local(param).mul_(1.25)),
            partial(write, how=lambda param: param.data.add_(0.125)),
            write_held_data,
        )
        untraced = partial(write, how=lambda param: local(param).data.add_(0.125))
        for reshard, is_pinned in ((True, False), (False, False), (True, True)):
            twin = copy.deepcopy(reference)
            model = shard_copy(reference, self.gtp_mesh(), reshard_after_forward=reshard)
            held = {each: [param.data for param in each.parameters()] for each in (model, twin)}
            if is_pinned:
                model.unshard()
            # After unshard(), only reshard() makes seen what leaves no trace.
            for change in traced if is_pinned else (*traced, untraced):
                for grad_mode in (torch.no_grad(), torch.enable_grad()):
                    with grad_mode:
                        torch.testing.assert_close(model(x), twin(x))
                change(model)
                change(twin)
                torch.testing.assert_close(model(x), twin(x), msg=lambda m, c=change: f"{c}: {m}")

    # --- gathers equal uses -------------------------------------------------------------------------------------------

    def test_r4_reused_module_gathers_equal_uses_and_gradients_add_up(self) -> None:
        """With a small window. With a large one weights stay between their uses, so each pass gathers them once."""
        for schedule, gathers_in_pass in ((NOTHING_STAYS, None), (ALL, 1)):
            self.check_reuse(schedule, gathers_in_pass)

    def check_reuse(self, schedule: SchedulePolicy, gathers_in_pass: int | None) -> None:
        """``gathers_in_pass``: of each weight; None: as many as uses."""
        mesh = self.gtp_mesh()

        class Reuse(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(WIDTH, WIDTH)
                self.raw = Raw()
                self.num_repeats = 1

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = x.requires_grad_()
                for _ in range(self.num_repeats):
                    x = self.raw(torch.tanh(self.linear(x)))
                return x

        reference = Reuse()
        model = shard_copy(reference, mesh, schedule=schedule)
        for step, repeats in enumerate((1, 3, 3, 5, 2)):
            reference.num_repeats = model.num_repeats = repeats
            with gathers(model) as used, counted() as counts:
                square_step(model, rows_of_rank(make_rows(step), mesh))
                done = counts()
            model.zero_grad()
            # In the first pass of a new kind, what was prefetched in vain comes on top.
            if step == 2:
                expected = 2 * (gathers_in_pass or repeats)
                # The last weight of the forward is the first of backward and stays gathered between the two.
                assert used == dict.fromkeys(used, expected) | {"raw.second": expected - 1}, used
            assert done.all_gathers == sum(used.values())
            assert done.reduce_scatters == 3 * repeats, done
            check_step(reference, model, mesh, make_rows(10 + step), square_step)

    def test_collectives_of_a_step_are_counted(self) -> None:
        """Each weight: one gather in forward, one in backward if its input needs a gradient, one reduce-scatter."""
        for depth in (0, 9):
            mesh = self.gtp_mesh()
            model = gtp_shard(Net(), mesh, schedule=policy(depth))
            tokens = rows_of_rank(make_tokens(0), mesh)
            for step in range(2):
                with gathers(model) as used, CommDebugMode() as mode, counted() as counts:
                    token_step(model, tokens)
                    done = counts()
                # Around the first forward three all-reduces, and one more if the mesh has had no model before.
                num_setup = mode.get_total_counts() - sum(done)
                expected_setup = {0} if step else {3, 4} if depth == 0 else {3}
                assert num_setup in expected_setup, mode.get_comm_counts()
                assert mode.get_comm_counts()[torch.ops.c10d._allgather_base_] == done.all_gathers
                # The tied weight: lookup, head, head's backward; the lookup's backward needs no weight. Once the plan
                # is known, the head's weight stays gathered at the turn from forward to backward.
                expected = dict.fromkeys(used, 2) | {"embedding.weight": 3 if step == 0 else 2}
                assert used == expected, f"step {step}, depth {depth}: {used}"
                # Two reduce-scatters of the tied weight; one all-reduce for all parameters that stay whole.
                assert done == (sum(expected.values()), len(used) + 1, 1), f"step {step}, depth {depth}: {done}"
                assert_idle(model)

    def test_evaluation_gathers_each_weight_once_for_each_use(self) -> None:
        model = gtp_shard(Net(), self.gtp_mesh(), schedule=policy(3))
        model.eval()
        for grad_mode in (torch.no_grad, torch.inference_mode):
            for _ in range(2):
                with gathers(model) as used, counted() as counts, grad_mode():
                    model(make_tokens(0))
                    done = counts()
                assert used == dict.fromkeys(used, 1) | {"embedding.weight": 2}, used
                assert done == (sum(used.values()), 0, 0), done
                assert_idle(model)

    # --- the plan -----------------------------------------------------------------------------------------------------

    def test_small_weights_are_gathered_in_one_launch(self) -> None:
        """Each use is still one gather; a weight that is used alone, against the plan, is gathered alone."""
        model = gtp_shard(Branches(), self.gtp_mesh(), schedule=policy(1, coalesce_nbytes=3 * 576))
        x = make_rows(0).requires_grad_()
        launches, num_gathered = [], []
        for order in ([0, 1, 2], [0, 1, 2], [1], [1]):
            model.order = order
            with counted() as counts:
                square_step(model, x)
                num_gathered.append(counts().all_gathers)
                launches.append(counts.num_launches["_allgather_base_"])
        # Layer 1 has two weights. The last weight of the forward is kept once the plan is known. What comes for layers
        # 0 and 2 in the third step is dropped.
        self.assertEqual(num_gathered, [8, 7, 8, 3])
        self.assertEqual(launches, [8, 4, 4, 2])
        assert_idle(model)

    def test_plan_follows_the_model_and_stops_deviating(self) -> None:
        model = gtp_shard(Branches(), self.gtp_mesh(), schedule=policy(2))
        x = make_rows(0).requires_grad_()

        def deviations() -> int:
            return sum(chain.num_deviations for chain in runtime_of(model).passes.chains.values())

        for order in ([0, 1, 2, 3], [2, 0, 5]):
            model.order = order
            square_step(model, x)
            after_change = deviations()
            with gathers(model) as counts:
                for _ in range(2):
                    square_step(model, x)
            self.assertEqual(deviations(), after_change)
            used = {name: count for name, count in counts.items() if count}
            names = {f"layers.{i}." for i in order}
            assert {name[: name.rindex(".") + 1] for name in used} == names, used
            # Two steps, forward and backward; what the forward uses last is kept for the backward.
            turning = f"layers.{order[-1]}." + ("second" if order[-1] % 2 else "weight")
            assert used == dict.fromkeys(used, 4) | {turning: 2}, used
            forward = runtime_of(model).passes.chains[ChainKey(Entry(model), True)]
            assert len(forward.plan.uses) == len(used)
            assert_idle(model)
