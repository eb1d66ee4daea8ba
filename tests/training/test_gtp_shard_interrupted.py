"""KeyboardInterrupt between any two lines of the package, on all ranks; a second thread: no step has numbers of two."""

from __future__ import annotations

import copy
import gc
import sys
from asyncio import CancelledError
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import passes_common
import pytest
import torch
import torch.nn as nn
from common import ALL, GROUPS, GlooTest, assert_same_params, full, rows_of_rank
from passes_common import WIDTH
from runtime_common import assert_idle, shard_copy
from torch.utils.checkpoint import checkpoint

import dtensor_gtp
from dtensor_gtp import GTPModule, SchedulePolicy
from dtensor_gtp._schedule.runtime import Runtime
from dtensor_gtp._schedule.steps import optimizer_steps

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
PACKAGE = str(Path(dtensor_gtp.__file__).parent)


class Model(passes_common.Model):
    """The last block is recomputed in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        return self.last(checkpoint(self.blocks[1], x, use_reentrant=False))


def interrupted_at(line: int, run: Callable[[], None]) -> tuple[int, str]:
    """Run ``run``, and raise KeyboardInterrupt before the ``line``-th line that it executes of the package. Returns how
    many lines it has executed, and where it was interrupted."""
    count, place = 0, ""

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal count, place
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            count += 1
            if count == line:
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    gc.disable()  # what it frees of earlier tests may run lines of the package, on one rank alone
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
        gc.enable()
    return count, place


def backward(model: nn.Module, rows: torch.Tensor) -> None:
    model(rows).square().mean().backward()


def error_in_thread(run: Callable[[], Any]) -> str:
    with ThreadPoolExecutor(1, "second") as pool:
        return str(pool.submit(run).exception())


class TestInterrupted(GlooTest):
    world_size = 2

    def sweep(self, schedule: SchedulePolicy, num: int, *, is_new: bool = False, num_microbatches: int = 1) -> None:
        """Interrupt steps of one model, or first steps of new models, at ``num`` lines (0: at all)."""
        plain = Model()
        batches = torch.randn(num_microbatches, 8, WIDTH)

        def build() -> tuple[Any, torch.optim.Optimizer]:
            model = shard_copy(plain, self.gtp_mesh(), schedule=schedule)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_sharded: bool = True) -> None:
            for index, batch in enumerate(batches):
                if is_sharded:
                    GTPModule.set_requires_gradient_sync(model, index == len(batches) - 1)
                backward(model, rows_of_rank(batch, self.gtp_mesh()) if is_sharded else batch)
            optimizer.step()

        gc.collect()
        optimizer_steps().watchers.clear()  # runtimes of earlier tests, of which one rank may have more
        model, optimizer = build()
        if not is_new:
            for _ in range(2):
                step(model, optimizer)
                optimizer.zero_grad()
        total, _ = interrupted_at(0, lambda: step(model, optimizer))
        optimizer.zero_grad()
        for line in range(1, total + 1, max(1, total // num) if num else 1):
            if is_new:
                model, optimizer = build()
            _, place = interrupted_at(line, lambda: step(model, optimizer))  # noqa: B023
            optimizer.zero_grad()
            if num_microbatches > 1:  # the interrupt may have come between them
                GTPModule.reset_iter_state(model)
            reference = copy.deepcopy(plain)
            with torch.no_grad():
                for param, own in zip(reference.parameters(), model.parameters(), strict=True):
                    param.copy_(full(own))
            own_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
            try:
                step(model, optimizer)
                step(reference, own_optimizer, is_sharded=False)
                assert_same_params(model, reference, "grad", **CLOSE)
                assert_same_params(model, reference, **CLOSE)
                optimizer.zero_grad()
                assert_idle(model)
            except BaseException as error:
                raise AssertionError(f"after an interrupt at line {line} of {total}, {place}: {error!r}") from error

    def test_single_weights(self) -> None:
        self.sweep(ALL, 20)

    def test_groups(self) -> None:
        self.sweep(GROUPS, 41)

    def test_at_the_end_of_a_frame(self) -> None:
        """The frame has not left the list of those that run."""
        for schedule in (ALL, GROUPS):
            reference, batch = Model(), torch.randn(8, WIDTH)
            model = shard_copy(reference, self.gtp_mesh(), schedule=schedule)
            rows = rows_of_rank(batch, self.gtp_mesh())
            backward(model, rows)
            model.zero_grad()
            with (
                mock.patch.object(Runtime, "exit", side_effect=KeyboardInterrupt),
                self.assertRaises(KeyboardInterrupt),
            ):
                model(rows)
            backward(model, rows)
            backward(reference, batch)
            assert_same_params(model, reference, "grad", **CLOSE)
            assert_idle(model)

    def test_between_microbatches_of_a_notebook(self) -> None:
        """There Python keeps what has ended the last cell."""
        before, now = KeyboardInterrupt(), KeyboardInterrupt()
        for schedule in (ALL, GROUPS):
            mesh, batch, reference = self.gtp_mesh(), torch.randn(8, WIDTH), Model()
            rows = rows_of_rank(batch, mesh)
            model = shard_copy(reference, mesh, schedule=schedule)
            for _ in range(2):
                backward(reference, batch)

            def check_two_microbatches() -> None:
                for is_last in (False, True):
                    model.set_requires_gradient_sync(is_last)  # noqa: B023
                    backward(model, rows)  # noqa: B023
                assert_same_params(model, reference, "grad", **CLOSE)  # noqa: B023

            with mock.patch.object(sys, "last_value", before, create=True):
                check_two_microbatches()
                model.zero_grad()
                model.set_requires_gradient_sync(False)
                backward(model, rows)
            with mock.patch.object(sys, "last_value", now, create=True):
                check_two_microbatches()
            with mock.patch.object(sys, "last_value", None, create=True):
                sys.last_value = KeyboardInterrupt()
                model.zero_grad()
                model.set_requires_gradient_sync(False)
                backward(model, rows)
                address, sys.last_value = id(sys.last_value), None
                later = [KeyboardInterrupt() for _ in range(10_000)]  # one has that address, if nobody holds the first
                sys.last_value = next((error for error in later if id(error) == address), later[0])
                check_two_microbatches()

    def test_a_second_thread_is_refused(self) -> None:
        """It would take weights and gradients of the pass that runs. One after the other, threads may train."""
        for schedule in (ALL, GROUPS):
            reference, mesh, batch = Model(), self.gtp_mesh(), torch.randn(8, WIDTH)
            model = shard_copy(reference, mesh, schedule=schedule)
            rows = rows_of_rank(batch, mesh)
            backward(reference, batch)
            errors: list[str] = []
            train = partial(backward, model, rows)
            evaluate = partial(torch.no_grad()(model), rows)
            earlier = model(rows).sum().backward
            for place, run in (
                ("forward", train),
                ("forward", evaluate),
                ("backward", train),
                ("backward", evaluate),
                ("backward", earlier),
            ):

                def begin(_: object, args: object, output: torch.Tensor) -> None:
                    hook.remove()  # the second thread trains alone, if nothing stops it
                    if place == "forward":  # noqa: B023
                        errors.append(error_in_thread(run))  # noqa: B023
                    else:
                        output.register_hook(lambda _: errors.append(error_in_thread(run)))  # noqa: B023

                with model.blocks[0].register_forward_hook(begin) as hook:
                    train()
                assert_same_params(model, reference, "grad", **CLOSE)
                model.zero_grad()
                self.assertEqual(len(errors), 1)
                self.assertRegex(errors.pop(), "Thread 'second_0' began a (forward|backward) .* while another thread")
            self.assertEqual(error_in_thread(train), "None")
            assert_same_params(model, reference, "grad", **CLOSE)

    def test_an_interrupted_microbatch_drops_the_others(self) -> None:
        """An error does not, nor another reason to stop a forward: the step may go on without that microbatch."""
        for schedule, error in product((ALL, GROUPS), (KeyboardInterrupt, CancelledError, ValueError)):
            reference = Model()
            model = shard_copy(reference, self.gtp_mesh(), schedule=schedule)
            batches = torch.randn(2, 8, WIDTH)
            rows = [rows_of_rank(batch, self.gtp_mesh()) for batch in batches]
            model.set_requires_gradient_sync(False)
            backward(model, rows[0])
            fail = mock.Mock(side_effect=error)
            with model.blocks[1].register_forward_pre_hook(fail), self.assertRaises(error):
                model(rows[1])
            model.set_requires_gradient_sync(True)
            backward(model, rows[1])
            for batch in batches[1 if error is KeyboardInterrupt else 0 :]:
                backward(reference, batch)
            assert_same_params(model, reference, "grad", **CLOSE)

    def test_an_interrupted_evaluation_leaves_microbatches_alone(self) -> None:
        for schedule in (ALL, GROUPS):
            reference = Model()
            model = shard_copy(reference, self.gtp_mesh(), schedule=schedule)
            x = torch.randn(8, WIDTH)
            mine = rows_of_rank(x, self.gtp_mesh())
            model.set_requires_gradient_sync(False)
            backward(model, mine)
            fail = mock.Mock(side_effect=KeyboardInterrupt)
            with model.blocks[1].register_forward_pre_hook(fail), self.assertRaises(KeyboardInterrupt):
                with torch.no_grad():
                    model(mine)
            model.set_requires_gradient_sync(True)
            backward(model, mine)
            for _ in range(2):
                backward(reference, x)
            assert_same_params(model, reference, "grad", **CLOSE)

    # All lines: with ``num=0``, in several minutes. A worker may take five for a test.

    @pytest.mark.soak  # minutes
    def test_many_lines_of_single_weights(self) -> None:
        self.sweep(ALL, 300)

    @pytest.mark.soak  # minutes
    def test_many_lines_of_groups(self) -> None:
        self.sweep(GROUPS, 41)

    @pytest.mark.soak  # minutes
    def test_many_lines_of_microbatches(self) -> None:
        for schedule in (ALL, GROUPS):
            self.sweep(schedule, 80, num_microbatches=2)

    @pytest.mark.soak  # minutes
    def test_many_lines_of_first_steps(self) -> None:
        for schedule in (ALL, GROUPS):
            self.sweep(schedule, 60, is_new=True)
