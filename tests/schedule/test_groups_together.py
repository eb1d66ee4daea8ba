"""Groups of small blocks that travel together: several blocks in one gather and in one reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import GlooTest, assert_same_params, check_training, rows_of_rank
from counting import noted
from runtime_common import runtime_of
from test_gtp_shard_groups import CHOSEN, CLOSE, LOW, WIDTH, Block, Mixture, Model, rows, seeded, square
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import gtp_shard
from dtensor_gtp._comm import context
from dtensor_gtp._params import gather
from dtensor_gtp._schedule import choose_schedule, waiting_gradients
from dtensor_gtp._schedule.launch_reductions import ReductionLaunches
from dtensor_gtp._schedule.plans import Traits, Window, _put_together
from dtensor_gtp._schedule.waiting_gradients import Together

# Of 20 groups, in a backward, where 4 have the limit of a launch: each has at most half of those before.
SMALL_FIRST = [1, 1, 1, 1, 2, 3, 4, 4, 3]


class Even(nn.Module):
    """All numbers of rows are multiples of the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Headed(Model):
    """Its last weight is larger than what waits for others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.last = nn.Linear(WIDTH, 64 * WIDTH)


@contextmanager
def launches(part_of_model: int, *, is_one_host: bool = False) -> Iterator[dict[str, list[list[str]]]]:
    """The blocks of each launch. One takes up to ``1 / part_of_model`` of all groups."""
    found: dict[str, list[list[str]]] = {"gathers": [], "reductions": []}

    def note_gather(targets: Any, comm: Any) -> None:
        found["gathers"].append([target.weight.fqn for target in targets])

    def note_reduction(launches: Any, together: Any) -> None:
        found["reductions"].append([gradient.weight.fqn for gradient in together])

    with (
        mock.patch.object(choose_schedule, "_LEAST_AHEAD", 0),
        mock.patch.object(choose_schedule, "_GROUPS_OF_MODEL", part_of_model),
        mock.patch.object(context, "is_one_host", return_value=is_one_host),
        noted(gather, "launch", note_gather),
        noted(ReductionLaunches, "_packed", note_reduction),
    ):
        yield found


class TestTogether(GlooTest):
    def check(self, make: Callable[[], nn.Module], mesh: DeviceMesh | None = None, **options: Any) -> None:
        """Train beside one process."""
        mesh = mesh or self.gtp_mesh()
        shard = partial(gtp_shard, mesh=mesh, schedule=CHOSEN)
        check_training(seeded(make), shard, mesh, rows, square, tolerance=CLOSE, **options)

    def test_steps_equal_one_process(self) -> None:
        """In fp32 by reduce-scatter; even rows and others; with replicas; each block alone and several together."""
        for block, mesh, part, size in (
            (Even, self.gtp_mesh(), 2, 2),  # of three blocks, the marks would not fit
            (Block, self.gtp_mesh(), 2, 3),  # one of its weights is not used
            (Even, self.hsdp_mesh(), 1, 6),
            (Even, self.gtp_mesh(), 6, 1),
        ):
            with self.subTest(block=block, mesh=mesh, part=part), launches(part) as found:
                self.check(partial(Model, 6, block=block), mesh)
                blocks = [f"layers.{number}" for number in reversed(range(6))]
                together = [blocks[begin : begin + size] for begin in range(0, 6, size)]
                self.assertEqual(found["reductions"], 2 * together)
                self.assertEqual(max(map(len, found["gathers"])), 1 if size == 1 else 6 // part)

    def test_reductions_start_small_and_grow(self) -> None:
        """As the gathers of a backward do: it begins with all activations in memory. Each backward starts anew, also if
        it is not the last one of a step."""
        mesh = self.gtp_mesh()
        batch = rows_of_rank(rows(torch.Generator().manual_seed(0)), mesh)
        with launches(4) as found, mock.patch.object(waiting_gradients, "QUICK_NBYTES", 0):
            model = gtp_shard(seeded(lambda: Model(20, block=Even)), mesh, schedule=CHOSEN)
            for is_last in (False, True):
                model.set_is_last_backward(is_last)
                square(model, batch).backward()
        self.assertEqual([*map(len, found["reductions"])], 2 * SMALL_FIRST)

    def test_what_travels_in_16_bits_has_the_sums_of_a_ring(self) -> None:
        """Over microbatches, of which one is not synced and one not reduced over replicas."""
        for make, sizes in ((Model, (6, 1)), (Headed, (1, 1))):  # a large head travels alone
            with self.subTest(make=make):
                self.check_sums_in_16_bits(partial(make, 6, block=Even), sizes)

    def check_sums_in_16_bits(self, make: Callable[[], nn.Module], sizes: tuple[int, int]) -> None:
        mesh, grads = self.hsdp_mesh(), []
        for is_one_host, part, size in ((True, 1, sizes[0]), (False, 6, sizes[1])):
            with launches(part, is_one_host=is_one_host) as found:
                model = gtp_shard(seeded(make), mesh, schedule=CHOSEN, mp_policy=LOW)
                for number in range(4):
                    model.set_requires_gradient_sync(number != 1)
                    model.set_requires_all_reduce(number != 2)
                    square(model, rows_of_rank(rows(torch.Generator().manual_seed(number)), mesh)).backward()
            self.assertEqual(max(map(len, found["reductions"])), size)
            grads.append({name: param.grad.full_tensor() for name, param in model.named_parameters()})
        for name, grad in grads[0].items():
            torch.testing.assert_close(grad, grads[1][name], rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")

    def test_other_gradients_end_the_wait(self) -> None:
        """Experts are reduced between the groups: these do not overtake them, nor do they wait in vain."""
        with launches(1) as found, mock.patch.object(choose_schedule, "_MOST_IN_GROUP", 64 * WIDTH**2):
            self.check(partial(Model, block=Mixture), num_microbatches=2)
        self.assertEqual(found["reductions"][-3:], [["layers.2"], ["layers.1"], ["layers.0"]])

    def test_a_block_that_is_called_twice_and_one_without_a_gradient(self) -> None:
        def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return layer(layer(x)) if layer.is_last else x + 0 * layer(x).detach() if layer.is_first else layer(x)

        def make() -> nn.Module:
            model = Model(4, call=call, block=Even)
            for number, layer in enumerate(model.layers):
                layer.is_first, layer.is_last = number == 0, number == 3
            return model

        with launches(1) as found:
            self.check(make)
        self.assertIn(["layers.3", "layers.3", "layers.2"], found["reductions"])

    def test_after_a_backward_that_raised(self) -> None:
        """Gradients that waited are forgotten."""

        def fail(grad: torch.Tensor) -> None:
            raise ValueError("in the backward")

        mesh, reference = self.gtp_mesh(), seeded(lambda: Model(4, block=Even))
        batch = rows(torch.Generator().manual_seed(0))
        with launches(1):
            model = gtp_shard(seeded(lambda: Model(4, block=Even)), mesh, schedule=CHOSEN)
            for is_failing in (False, True, False):
                model.zero_grad()
                hidden = model.first(rows_of_rank(batch, mesh))
                for number, layer in enumerate(model.layers):
                    hidden = layer(hidden)
                    if is_failing and number == 1:
                        hidden.register_hook(fail)
                loss = model.last(hidden).square().mean()
                if is_failing:
                    self.assertRaisesRegex(ValueError, "in the backward", loss.backward)
                else:
                    loss.backward()
            self.assertEqual(runtime_of(model).grads._waiting, {})
        square(reference, batch).backward()
        assert_same_params(model, reference, "grad", **CLOSE)


def test_gathers_of_groups_start_small_and_grow() -> None:
    """The first ones overlap with nothing, and those of a backward begin with all activations in memory; none crosses
    the limit."""
    traits, uses = [Traits(nbytes=6 << 20, is_group=True)] * 20, tuple(range(20))
    for is_backward, sizes in ((False, [1, 1, 2, 4, 4, 4, 4]), (True, [1, 1, 1, 1, 1, 2, 3, 4, 4, 2])):
        window = Window(1, together_nbytes=24 << 20, is_backward=is_backward)
        due = {use: use for use in uses}
        found = _put_together(uses, traits, due, set(), window)
        assert [len(launch.positions) for launch in found] == sizes


def test_the_planner_has_the_launches_of_the_runtime() -> None:
    with mock.patch.object(waiting_gradients, "QUICK_NBYTES", 0):
        together = Together[int](4)
        found = [launch for number in range(20) for launch in together.submit(number, 1, is_group=True)]
    assert [len(launch) for launch in [*found, together.flush()]] == SMALL_FIRST
