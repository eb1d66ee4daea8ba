"""``capture_step`` on GPUs: replays are bit for bit the eager steps, and leave the runtime as eager steps do.

Needs 2 to 8 GPUs of one host.
"""

from __future__ import annotations

import dataclasses
import gc
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from cuda_common import BF16, NUM_GPUS, CudaTest
from runtime_common import assert_idle
from test_cuda import Stack, square_loss
from test_gtp_shard_training import Zoo, next_token_loss
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.common_utils import run_tests

from dtensor_gtp import SchedulePolicy, capture_step, gtp_shard, sharding_report

WIDTH = 1024
COPY_ENGINE = SchedulePolicy(gather_backend="copy_engine", reduce_scatter="copy_engine")
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def free_workspaces() -> int:
    """Have cuBLAS give up its workspaces, one for each stream that it was ever used on; no graph may use them.

    Returns:
        their bytes.
    """
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    freed = before - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    return freed


class Job:
    """A model with its optimizer and its step; two of them are alike."""

    def __init__(
        self, mesh: DeviceMesh, model: nn.Module, loss_fn: Loss, *, num_microbatches: int = 1, **options: Any
    ) -> None:
        self.model = gtp_shard(model, mesh, **options)
        self.lr = torch.tensor(1e-3, device="cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr, fused=True, capturable=True)
        self.loss_fn, self.num_microbatches = loss_fn, num_microbatches

    def step(self, x: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in x.chunk(self.num_microbatches):
            losses.append(self.loss_fn(self.model, part) / self.num_microbatches)
            losses[-1].backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack([*(loss.detach() for loss in losses), norm.full_tensor()])

    def local(self) -> list[torch.Tensor]:
        state = [value for s in self.optimizer.state.values() for value in s.values()]
        return [t.to_local() if hasattr(t, "to_local") else t for t in [*self.model.parameters(), *state]]


@unittest.skipIf(NUM_GPUS < 2, "needs at least 2 GPUs")
class TestCudaGraphs(CudaTest):
    def rows(self, seed: int, num: int = 256) -> torch.Tensor:
        generator = torch.Generator(device="cuda").manual_seed(seed * 100 + self.rank)
        return torch.randn(num, WIDTH, device="cuda", generator=generator)

    def jobs(self, make: Callable[[], nn.Module] = Stack, loss_fn: Loss = square_loss, **options: Any) -> list[Job]:
        jobs = []
        for _ in range(2):
            torch.manual_seed(0)
            jobs.append(Job(self.gtp_mesh(), make().cuda(), loss_fn, **{"mp_policy": BF16} | options))
        return jobs

    def assert_same(self, captured: Job, eager: Job, what: str) -> None:
        for a, b in zip(captured.local(), eager.local(), strict=True):
            self.assertTrue(torch.equal(a, b), what)

    def test_fifty_replays_equal_eager_steps(self) -> None:
        """Changing data, learning rate and weights; every backend and kind of reduction."""
        for options in (
            {},
            {"num_microbatches": 4},
            {"schedule": SchedulePolicy(prefetch_depth=0)},
            {"schedule": SchedulePolicy(reduce_scatter="all_to_all")},
            {"schedule": COPY_ENGINE},
        ):
            captured, eager = self.jobs(**options)
            step = capture_step(captured.step, captured.model, captured.optimizer)
            for index in range(54):
                for job in (captured, eager):
                    job.lr.fill_(1e-3 * (1 + index % 7))
                x = self.rows(index)
                self.assertTrue(torch.equal(step(x), eager.step(x)), f"{options}: loss or norm of step {index}")
                if index % 10 == 3 or index == 53:
                    self.assert_same(captured, eager, f"{options}: step {index}")
            self.assertEqual(step.num_graphs, 1)
            assert_idle(captured.model)

    def test_every_kind_of_weight(self) -> None:
        for schedule in (SchedulePolicy(min_shard_numel=0), dataclasses.replace(COPY_ENGINE, min_shard_numel=0)):
            captured, eager = self.jobs(Zoo, next_token_loss, schedule=schedule, num_microbatches=2)
            step = capture_step(captured.step, captured.model, captured.optimizer)
            for index in range(12):
                generator = torch.Generator().manual_seed(100 * index + self.rank)
                tokens = torch.randint(0, 33, (4, 6), generator=generator).cuda()
                self.assertTrue(torch.equal(step(tokens), eager.step(tokens)), f"step {index}")
            self.assert_same(captured, eager, "after twelve steps")

    def test_eager_steps_and_other_shapes_in_between(self) -> None:
        for schedule, warmup_steps in ((SchedulePolicy(), 3), (COPY_ENGINE, 2)):
            captured, eager = self.jobs(schedule=schedule)
            step = capture_step(captured.step, captured.model, captured.optimizer, warmup_steps=warmup_steps)
            for index in range(24):
                x = self.rows(index, (256, 256, 128)[index % 3])
                self.assertTrue(torch.equal(step(x), eager.step(x)), f"step {index}")
                with torch.no_grad():
                    self.assertTrue(torch.equal(captured.model(x), eager.model(x)), f"evaluation after step {index}")
                if index % 5 == 4:
                    self.assertTrue(torch.equal(captured.step(x), eager.step(x)), f"eager step after {index}")
            self.assertEqual(step.num_graphs, 2)
            state = {name: value.clone() for name, value in eager.model.state_dict().items()}
            for job in (captured, eager):
                job.model.load_state_dict(state)
                job.optimizer.load_state_dict(job.optimizer.state_dict())
            self.assertEqual(step.num_graphs, 0)
            for index in range(5):
                x = self.rows(index)
                self.assertTrue(torch.equal(step(x), eager.step(x)), f"step {index} after a load")

    def test_microbatches_as_calls_of_their_own(self) -> None:
        """Gradients that a graph leaves accumulate in later calls, until zero_grad outside."""
        captured, eager = self.jobs()
        step = capture_step(lambda x: square_loss(captured.model, x).backward(), captured.model)
        for outer in range(6):
            for index in range(3):
                x = self.rows(10 * outer + index)
                step(x)
                square_loss(eager.model, x).backward()
            for a, b in zip(captured.model.parameters(), eager.model.parameters(), strict=True):
                assert a.grad is not None
                assert b.grad is not None
                self.assertTrue(torch.equal(a.grad.to_local(), b.grad.to_local()), f"step {outer}")
            for job in (captured, eager):
                job.optimizer.step()
                job.optimizer.zero_grad()
        self.assert_same(captured, eager, "after six steps")

    def test_dropout_draws_what_eager_steps_draw(self) -> None:
        def make() -> nn.Module:
            return nn.Sequential(Stack(depth=2), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))

        captured, eager = self.jobs(make)
        step = capture_step(captured.step, captured.model, captured.optimizer)
        states = [torch.cuda.get_rng_state()] * 2
        for index in range(8):
            results = []
            for which, run in enumerate((step, eager.step)):
                torch.cuda.set_rng_state(states[which])
                results.append(run(self.rows(index)))
                states[which] = torch.cuda.get_rng_state()
            self.assertTrue(torch.equal(*results), f"step {index}")

    def memory_of_steps(self, schedule: SchedulePolicy, is_captured: bool) -> tuple[int, int]:
        """What the allocator holds in steps of two shapes, beside workspaces, and symmetric memory; nothing of it is
        left afterwards."""
        free_workspaces()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        job = Job(self.gtp_mesh(), Stack(2048, 16).cuda(), square_loss, mp_policy=BF16, schedule=schedule)
        step = capture_step(job.step, job.model, job.optimizer) if is_captured else job.step
        generator = torch.Generator(device="cuda").manual_seed(0)
        batches = [torch.randn(num, 2048, device="cuda", generator=generator) for num in (2048, 1024)]
        for round_ in range(4):
            if round_ == 3:  # graphs have been recorded
                gc.collect()
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            for x in batches:
                for _ in range(2):
                    step(x)
        torch.cuda.synchronize()
        reserved = torch.cuda.max_memory_reserved()
        symmetric = sharding_report(job.model).symmetric_nbytes
        del job, step, batches, x
        reserved -= free_workspaces()
        # A generator that graphs draw from keeps a few bytes.
        self.assertLess(torch.cuda.memory_allocated() - before, 1 << 20, f"captured: {is_captured}, {schedule}")
        return reserved, symmetric

    def test_memory_of_a_captured_step(self) -> None:
        """Within ten percent of the eager one's; graphs of several shapes share it."""
        for schedule in (SchedulePolicy(), COPY_ENGINE):
            eager, symmetric = self.memory_of_steps(schedule, False)
            captured, symmetric_of_graphs = self.memory_of_steps(schedule, True)
            self.assertLess(captured, 1.1 * eager, schedule)
            self.assertEqual(symmetric_of_graphs, symmetric, schedule)
            self.assertEqual(symmetric > 0, schedule is COPY_ENGINE)

    def test_errors(self) -> None:
        """Each is raised on all ranks, before anything is recorded."""
        (job, _) = self.jobs()

        def waits(x: torch.Tensor) -> float:
            return job.step(x).sum().item()

        step = capture_step(waits, job.model, job.optimizer)
        for _ in range(2):
            step(self.rows(0))
        with self.assertRaisesRegex(RuntimeError, "expects a step that does not wait for the GPU, but it does where"):
            step(self.rows(0))
        with self.assertRaisesRegex(ValueError, "group 0 of AdamW has capturable=False"):
            capture_step(job.step, job.model, torch.optim.AdamW(job.model.parameters()))
        with self.assertRaisesRegex(ValueError, "expects tensors on 'cuda', but got one of shape .* on 'cpu'"):
            capture_step(job.step, job.model, job.optimizer)(torch.ones(2, WIDTH))
        adagrad = torch.optim.Adagrad(job.model.parameters())
        with self.assertRaisesRegex(ValueError, "'step' of Adagrad is on 'cpu'"):
            capture_step(lambda x: None, job.model, adagrad)(self.rows(0))


if __name__ == "__main__":
    run_tests()
