"""What is launched when: experts a block ahead on chains of their own, groups of one layer in one gather, keeps.

One process of a group that communicates nothing records the order of launches and uses.
"""

from __future__ import annotations

import copy
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from common import assert_same_params, environment, fake_mesh
from counting import noted
from runtime_common import assert_idle, counted, gathers, members_of, num_gathers, runtime_of, weight_of
from schedules import explicit
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import GTPShard, gtp_shard, quantize_, sharding_report
from dtensor_gtp._params.sharded_weight import Gatherable
from dtensor_gtp.nn import GroupedLinear

WIDTH = 8


class Experts(nn.Module):
    def __init__(self, single: bool) -> None:
        super().__init__()
        options = {"bias": False, "single_grouped_weight": single}
        self.up = GroupedLinear(2, WIDTH, 2 * WIDTH, **options)
        self.down = GroupedLinear(2, 2 * WIDTH, WIDTH, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = torch.tensor([1, x.shape[0] - 1])
        return self.down(torch.tanh(self.up(x, sizes)), sizes)


class Block(nn.Module):
    def __init__(self, single: bool) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.experts = Experts(single)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.o(torch.tanh(self.q(x))))


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[str]]:
    """Uses and launches, these in brackets, in order; without the names of what all have."""
    gathering, events = runtime_of(model).gathering, []

    def name(target: Gatherable) -> str:
        return target.weight.fqn.removesuffix(".weight").replace("experts.", "")

    launches = noted(gathering, "_gather", lambda targets: events.append(f"[{' + '.join(map(name, targets))}]"))
    with launches, noted(gathering, "acquire", lambda target: events.append(name(target))):
        yield events


class TestLaunches(unittest.TestCase):
    def setUp(self) -> None:
        self.mesh = self.enterContext(fake_mesh(2, 2, names=("gtp", "expert_gtp")))

    def make(self, single: bool = True, num_blocks: int = 3, **options: Any) -> nn.Module:
        schedule = explicit(1, **{"min_shard_numel": 0, "coalesce_nbytes": 0, "prefetch_nbytes": 0, **options})
        model = nn.Sequential(*(Block(single) for _ in range(num_blocks)))
        for block in model:
            gtp_shard(block.experts, self.mesh["expert_gtp"], schedule=schedule)
        return gtp_shard(model, self.mesh["gtp"], schedule=schedule)

    def step(self, model: nn.Module) -> None:
        model(torch.ones(3, WIDTH, requires_grad=True)).sum().backward()

    def assert_order(self, events: list[str], *expected: str) -> None:
        self.assertEqual(events, " ".join(expected).split())

    def test_reductions_of_a_mesh_do_not_depend_on_those_of_another(self) -> None:
        """Ranks of the dense mesh use their experts or not, as all ranks of their expert mesh do."""
        model = self.make(coalesce_grad_nbytes=3 * WIDTH * WIDTH * 4)
        launched: list[list[str]] = []

        def note(together: Any) -> None:
            launched[-1].append(" + ".join(one.weight.fqn.removesuffix(".weight") for one in together))

        used = [block.experts for block in model]
        for experts in ((), (1,), (0, 1, 2)):
            launched.append([])
            for index, block in enumerate(model):
                block.experts = used[index] if index in experts else nn.Identity()
            with noted(runtime_of(model).grads.launches, "launch", note):
                self.step(model)
        dense = [[names for names in each if "experts" not in names] for each in launched]
        self.assertEqual(dense, [["2.o + 2.q + 1.o", "1.q + 0.o + 0.q"]] * 3)
        self.assertEqual([len(each) for each in launched], [2, 4, 8])

    def test_experts_are_gathered_a_block_ahead(self) -> None:
        """``up`` and ``down`` in order, each while its counterpart of the block before is used, in both directions; the
        window of the dense weights goes on beside them."""
        model = self.make()
        self.step(model)
        with recorded(model) as events:
            self.step(model)
        self.assert_order(
            events,
            "[0.q] [0.up] [0.down] 0.q [0.o] 0.o [1.q] 0.up [1.up] 0.down [1.down]",
            "1.q [1.o] 1.o [2.q] 1.up [2.up] 1.down [2.down]",
            "2.q [2.o] 2.o 2.up 2.down",
            "[2.up] 2.down [1.down] 2.up [1.up] 2.o [2.q] 2.q [1.o]",
            "1.down [0.down] 1.up [0.up] 1.o [1.q] 1.q [0.o]",
            "0.down 0.up 0.o [0.q] 0.q",
        )
        assert_idle(model)
        used = num_gathers(model)
        self.assertEqual(set(used.values()) - {4}, {3}, "one each way; the last of the forward is kept, of each mesh")
        # One gather stream for each communicator: that of all experts is in order, and another than that of the rest.
        of_experts, of_others = (
            {weight.groups.gather_name for weight in members_of(model).weights if ("experts" in weight.fqn) == is_one}
            for is_one in (True, False)
        )
        self.assertEqual((len(of_experts), len(of_others), len(of_experts | of_others)), (1, 1, 2))

    def check_recomputed(self, expected: str, prefetch_nbytes: int) -> None:
        """Backward of two checkpointed blocks of two layers."""

        class Model(nn.Sequential):
            use_reentrant = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self:
                    x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
                return x

        for use_reentrant in (False, True):
            model = Model(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
            model.use_reentrant = use_reentrant
            gtp_shard(
                model,
                self.mesh["gtp"],
                schedule=explicit(
                    1, min_shard_numel=WIDTH + 1, coalesce_nbytes=0, prefetch_nbytes=prefetch_nbytes, keep_last=False
                ),
            )
            for _ in range(2):
                self.step(model)
            output = model(torch.ones(3, WIDTH, requires_grad=True)).tanh().sum()
            with recorded(model) as events:
                output.backward()
            self.assert_order(events, expected)
            assert_idle(model)

    def test_recomputations_are_gathered_ahead(self) -> None:
        """In one chain with the rest of backward, in the order in which they really alternate: each gather is launched
        before its use, on demand it would be after it."""
        self.check_recomputed("[1.0] 1.0 [1.1] 1.1 [1.1] 1.1 [1.0] 1.0 [0.0] 0.0 [0.1] 0.1 [0.1] 0.1 [0.0] 0.0", 0)

    def test_what_is_recomputed_stays_for_its_gradients(self) -> None:
        """If the window has a block: so it is gathered twice in all, as without checkpoints."""
        weight = 4 * WIDTH * WIDTH
        self.check_recomputed("[1.0] [1.1] 1.0 1.1 1.1 [0.0] 1.0 [0.1] 0.0 0.1 0.1 0.0", 2 * weight)
        self.check_recomputed("[1.0] 1.0 [1.1] 1.1 1.1 [1.0] 1.0 [0.0] 0.0 [0.1] 0.1 0.1 [0.0] 0.0", weight)

    def test_a_weight_that_stays_serves_one_use(self) -> None:
        """The use after that gets a gather of its own, ahead."""

        class Model(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for index in (0, 1, 0, 2, 3, 0):
                    x = self[index](x)
                return x

        weight = 4 * WIDTH * WIDTH
        model = Model(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        schedule = explicit(4, min_shard_numel=WIDTH + 1, coalesce_nbytes=0, prefetch_nbytes=2 * weight)
        gtp_shard(model, self.mesh["gtp"], schedule=schedule)
        with torch.no_grad():
            model(torch.ones(3, WIDTH))
            with recorded(model) as events:
                model(torch.ones(3, WIDTH))
        self.assert_order(events, "[0] [1] [2] 0 [3] 1 [0] 0 2 3 0")
        assert_idle(model)

    def test_what_stays_for_a_use_that_does_not_come(self) -> None:
        """Is dropped with the forward: later writes to its shard may leave no trace."""

        class Model(nn.Sequential):
            order = (0, 1, 0, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for index in self.order:
                    x = self[index](x)
                return x

        model: Any = Model(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        gtp_shard(model, self.mesh["gtp"], schedule=explicit(min_shard_numel=WIDTH + 1))
        with torch.no_grad():
            for order in ((0, 1, 0, 2), (0, 1, 0, 2), (0, 1, 2)):
                model.order = order
                model(torch.ones(3, WIDTH))
                self.assertFalse(any(target.kept for target in members_of(model).gatherables), order)
                assert_idle(model)

    def test_what_uses_make_copies_of_does_not_stay(self) -> None:
        """Quantized weights, and those that are cut along another dim: a copy belongs to the stream of its use."""
        x = torch.ones(3, 32)
        for is_plain, cut in ((True, 0), (True, 1), (False, 0)):
            model: Any = nn.Linear(32, 64, bias=False)
            if not is_plain:
                quantize_(model, "mxfp8")
            schedule = explicit(min_shard_numel=0)
            gtp_shard(
                model, self.mesh["gtp"], schedule=schedule, shard_placement_fn=lambda param, cut=cut: GTPShard(cut)
            )
            (target,) = (each for each in members_of(model).gatherables if each is each.weight.for_forward)
            model(x)
            self.assertEqual(target.may_stay, is_plain and cut == 0)

    def test_experts_of_the_dense_window(self) -> None:
        model = self.make(num_blocks=2, expert_blocks_ahead=0)
        self.step(model)
        with torch.no_grad():
            model(torch.ones(3, WIDTH))
            with recorded(model) as events:
                model(torch.ones(3, WIDTH))
        self.assert_order(
            events, "[0.q] [0.up] 0.q [0.o] 0.o [1.q] 0.up [0.down] 0.down [1.up]", "1.q [1.o] 1.o 1.up [1.down] 1.down"
        )

    def test_weights_of_each_group_are_gathered_in_one_operation(self) -> None:
        """From the first use on, before there is a plan, and whatever else travels together."""
        model = self.make(single=False, num_blocks=1)
        x = torch.ones(3, WIDTH)
        for _ in range(2):
            with recorded(model) as events, torch.no_grad():
                model(x)
            names = [f"[0.{name}.weight0 + 0.{name}.weight1]" for name in ("up", "down")]
            self.assertEqual([event for event in events if event.startswith("[") and "weight" in event], names)
        # Alone, outside of any plan: the other one is dropped.
        with gathers(model) as used:
            with recorded(model) as events:
                runtime, weight = runtime_of(model), weight_of(model, "0.experts.up.weight1")
                runtime.gathering.release(weight.for_forward, runtime.gathering.acquire(weight.for_forward))
            self.assertEqual(len(events), 2)
            with torch.no_grad():
                model(x)
        self.assertEqual(used["0.experts.up.weight0"], 1)
        assert_idle(model)

    def dense(self, **options: Any) -> nn.Module:
        schedule = explicit(2, min_shard_numel=0, **options)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
        return gtp_shard(model, self.mesh["gtp"], schedule=schedule)

    def gathers_of_a_step(self, model: nn.Module, num_warm: int = 2) -> str:
        for _ in range(num_warm):
            self.step(model)
        with gathers(model) as used:
            self.step(model)
        assert_idle(model)
        return " ".join(map(str, used.values()))

    def test_budget_keeps_the_last_weights_of_the_forward(self) -> None:
        """Exactly as many as fit; the one at the turning point is kept in any case. Together with the user's choice."""
        nbytes = 4 * WIDTH * WIDTH
        for budget, expected in (
            (0, "2 2 2 2 2 1"),
            (nbytes - 1, "2 2 2 2 2 1"),
            (nbytes, "2 2 2 2 1 1"),
            (3 * nbytes, "2 2 1 1 1 1"),
            (99 * nbytes, "1 1 1 1 1 1"),
        ):
            for options in ({}, {"coalesce_nbytes": 0}, {"coalesce_nbytes": 2 * nbytes, "prefetch_nbytes": 0}):
                model = self.dense(keep_nbytes=budget, **options)
                self.assertEqual(self.gathers_of_a_step(model), expected, (budget, options))
        model = self.dense(keep_nbytes=2 * nbytes)
        weight_of(model, "4.weight").flags.reshard_after_forward = False
        self.assertEqual(self.gathers_of_a_step(model), "2 2 1 1 1 1")
        model.set_reshard_after_forward(False)
        self.assertEqual(self.gathers_of_a_step(model), "1 1 1 1 1 1")
        model.set_reshard_after_forward(True)
        self.assertEqual(self.gathers_of_a_step(model), "2 2 2 1 1 1")
        kept = "\n  kept until backward (512 B of 512 B): 4.weight, 3.weight\n"
        self.assertIn(kept, sharding_report(model).schedule)

    def test_budget_bounds_what_is_kept(self) -> None:
        """Between forward and backward, also where weights are used several times, and without gradients."""
        nbytes = 4 * WIDTH * WIDTH
        model = self.dense(keep_nbytes=2 * nbytes)

        def kept() -> list[str]:
            return [weight.fqn for weight in members_of(model).weights if weight.for_forward.kept is not None]

        x = torch.ones(3, WIDTH, requires_grad=True)
        for step in range(3):
            loss = model(model(x)).sum()  # nobody comes for what the first one keeps
            self.assertEqual(kept(), ["3.weight", "4.weight", "5.weight"] if step else [])
            loss.backward()
            self.assertEqual(kept(), [])
            with torch.no_grad():
                model(x)
            self.assertEqual(kept(), [])

    def test_no_gathers_for_nothing(self) -> None:
        """In backward: none of a table, of a first layer, below frozen layers, of what is kept, of other branches."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(8, WIDTH)
                self.dense = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
                self.side = nn.Linear(WIDTH, WIDTH, bias=False)

            def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    aside = self.side(x)
                return self.dense(self.table(tokens) + aside)

        tokens, x = torch.zeros(3, dtype=torch.int64), torch.ones(3, WIDTH)
        for is_frozen in (False, True):
            for options in ({}, {"prefetch_depth": 0}, {"coalesce_nbytes": 0, "prefetch_nbytes": 0}):
                model = Model()
                model.table.requires_grad_(not is_frozen)
                gtp_shard(model, self.mesh["gtp"], schedule=explicit(min_shard_numel=0, **options))
                for step in range(3):
                    with gathers(model) as used:
                        model(tokens, x).sum().backward()
                    # With a frozen table the first layer's input needs no gradient, which the first guess cannot know.
                    is_guessed = step == 0 and not options
                    first, last = 1 if is_frozen and not is_guessed else 2, 1 if step else 2
                    expected = {"table": 1, "dense.0": first, "dense.1": 2, "dense.2": last, "side": 1}
                    self.assertEqual(used, {f"{name}.weight": count for name, count in expected.items()}, step)
                    assert_idle(model)

    def test_first_convolution_gathers_nothing_in_backward(self) -> None:
        """It saves its weight whatever it needs, and does not look at it where its input needs no gradient."""
        model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3))
        gtp_shard(model, self.mesh["gtp"], schedule=explicit(min_shard_numel=0))
        for needs_grad, first in ((False, 1), (True, 2)):
            x = torch.ones(2, 4, 8, requires_grad=needs_grad)
            for step in range(3):
                with gathers(model) as used:
                    model(x).sum().backward()
                self.assertEqual(list(used.values()), [first, 1 if step or needs_grad else 2])
                assert_idle(model)

    def test_small_gradients_are_reduced_in_one_launch(self) -> None:
        """Each once, in the backward that has computed it: those of one mesh and dtype, up to the limit."""
        nbytes = 4 * WIDTH * WIDTH
        for limit, launches in ((0, 6), (nbytes, 6), (2 * nbytes + 1, 3), (99 * nbytes, 1)):
            model = self.dense(coalesce_grad_nbytes=limit)
            for _ in range(2):
                with counted() as counts:
                    self.step(model)
                    self.assertEqual(counts().reduce_scatters, 6)
                    self.assertEqual(counts.num_launches["_reduce_scatter_base_"], launches, limit)
                assert_idle(model)
            model.set_is_last_backward(False)
            with counted() as counts:
                self.step(model)
                self.assertEqual(counts.num_launches["_reduce_scatter_base_"], launches, "not left for later")
            model.set_is_last_backward(True)
            self.step(model)
            assert_idle(model)
        model = self.make(num_blocks=2)
        with counted() as counts:
            self.step(model)
            self.assertEqual(counts().reduce_scatters, 8)
            self.assertEqual(counts.num_launches["_reduce_scatter_base_"], 2, "dense, experts")

    def test_what_a_deviation_makes_useless_is_dropped_at_once(self) -> None:
        class Choice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))
                self.order = list(range(6))
                self.in_flight: list[str] = []

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for index in self.order:
                    x = self.layers[index](x)
                    pending = [weight.fqn[7] for weight in members_of(self).weights if weight.for_forward.pending]
                    self.in_flight.append("".join(pending))
                return x

        for options, expected in (
            ({"prefetch_nbytes": 0, "coalesce_nbytes": 0}, ["12", "5", "5", ""]),
            ({}, ["12345", "5", "5", ""]),
        ):
            model = gtp_shard(Choice(), self.mesh["gtp"], schedule=explicit(2, min_shard_numel=0, **options))
            x = torch.ones(3, WIDTH)
            with torch.no_grad():
                model(x)
                model.order, model.in_flight = [0, 4, 1, 5], []
                model(x)
            self.assertEqual(model.in_flight, expected)
            assert_idle(model)


class TestValues(unittest.TestCase):
    def test_convolution_whose_input_needs_no_gradient(self) -> None:
        torch.manual_seed(0)
        for layer, shape in ((nn.Conv1d(4, 6, 3), (2, 4, 8)), (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 8, 8))):
            reference = nn.Sequential(layer, nn.Tanh())
            with fake_mesh(1) as mesh:
                with environment(DTENSOR_GTP_DEBUG="poison"):
                    model = gtp_shard(copy.deepcopy(reference), mesh, schedule=explicit(min_shard_numel=0))
                x = torch.randn(*shape)
                for module in (reference, model):
                    module(x).square().sum().backward()
                assert_same_params(model, reference, "grad")
