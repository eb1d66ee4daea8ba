"""``capture_step`` on GPUs: replays are bit for bit the eager steps, and leave the runtime as eager steps do.

Needs 2 to 8 GPUs of one host; what is said of replicas needs 4 or 8.
"""

import gc
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from common import environment
from cuda_common import (
    BF16,
    COPY_ENGINES,
    NUM_RANKS,
    Block,
    CudaTest,
    assert_same,
    assert_same_grads,
    drawn,
    square_loss,
)
from runtime_common import assert_idle
from schedules import explicit
from test_cuda import Stack
from test_cuda_exchange import LM, make_tokens
from test_gtp_shard_training import Zoo, next_token_loss
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import SchedulePolicy, capture_step, gtp_shard, init_weight_mesh, sharding_report

WIDTH = 1024
COPY_ENGINE = explicit(**COPY_ENGINES)
# Weights of 2 MiB and gradients of 4 MiB: several collectives in a pass.
SEVERAL = {"coalesce_nbytes": 5 << 20, "coalesce_grad_nbytes": 5 << 20}
SCHEDULES: dict[str, dict[str, Any]] = {
    "default": {},
    "one by one": {"prefetch_depth": 1, "prefetch_nbytes": 0, "coalesce_nbytes": 0, "coalesce_grad_nbytes": 0},
    "kept": {"keep_nbytes": 5 << 20},
    "least memory": {"wgrad_first": False, "keep_last": False, **SEVERAL},
    "all to all": {"reduce_scatter": "all_to_all"},
    "copy engines": COPY_ENGINES,
    "copy engines, several": {**COPY_ENGINES, **SEVERAL, "max_inflight_reduce_scatters": 1},
    "auto": {"gather_backend": "auto"},
}
# What may not change a bit of a captured step: ``DTENSOR_GTP_DEBUG``, and whether ranks are late.
DISTURBANCES = (("poison,delay=0", False), ("poison,delay=1", True))
# Cycles of the SM clock: about 10 ms, several steps.
LATE = 16_000_000
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


def compiled_blocks() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), *(Block(WIDTH, 2 * WIDTH) for _ in range(3)))
    for block in model[1:]:
        block.compile(fullgraph=True)
    return model


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

    def captured_step(self, **options: Any) -> Any:
        return capture_step(self.step, self.model, self.optimizer, **options)

    def state(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *(value for s in self.optimizer.state.values() for value in s.values())]

    def be_late(self) -> None:
        """A rank each is late before the forward, the backward and the optimizer; what sleeps is recorded too."""
        loss_fn = self.loss_fn

        def sleep(place: int) -> None:
            if place % dist.get_world_size() == dist.get_rank():
                torch.cuda._sleep(LATE)

        def late_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            sleep(0)
            loss = loss_fn(model, x)
            sleep(1)
            return loss

        self.loss_fn = late_loss
        self.optimizer.register_step_pre_hook(lambda *_: sleep(2))


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaGraphs(CudaTest):
    def rows(self, seed: int, num: int = 256) -> torch.Tensor:
        return drawn(seed * 100 + self.rank, num, WIDTH)

    def job(
        self,
        make: Callable[[], nn.Module] = Stack,
        loss_fn: Loss = square_loss,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> Job:
        torch.manual_seed(0)
        mesh = self.gtp_mesh() if mesh is None else mesh
        return Job(mesh, make().cuda(), loss_fn, **{"mp_policy": BF16} | options)

    def jobs(self, *args: Any, **options: Any) -> list[Job]:
        return [self.job(*args, **options) for _ in range(2)]

    def assert_same(self, captured: Job, eager: Job, what: str) -> None:
        assert_same(captured.state(), eager.state(), what)

    def check_disturbed(self, what: str, batches: Sequence[torch.Tensor], *args: Any, **options: Any) -> None:
        """Captured steps with poison, delays and late ranks against eager ones without: ranks are late within
        the step, and another one each time before it."""
        eager = self.job(*args, **options)
        expected = [eager.step(batch) for batch in batches]
        for debug, is_late in DISTURBANCES:
            with environment(DTENSOR_GTP_DEBUG=debug):
                captured = self.job(*args, **options)
            if is_late:
                captured.be_late()
            step = captured.captured_step()
            for index, (batch, want) in enumerate(zip(batches, expected, strict=True)):
                if is_late and index % self.world_size == self.rank:
                    torch.cuda._sleep(LATE)
                self.assertTrue(torch.equal(step(batch), want), f"{what}, {debug}: loss or norm of step {index}")
            self.assert_same(captured, eager, f"{what}, {debug}")
            self.assertEqual(step.num_graphs, 1)
            assert_idle(captured.model)

    def test_poison_delays_and_late_ranks_change_no_bit(self) -> None:
        """Every backend and kind of reduction; weights of one shape share the memory of freed buffers."""
        batches = [self.rows(index) for index in range(10)]
        for name, schedule in SCHEDULES.items():
            self.check_disturbed(name, batches, schedule=explicit(**schedule))

    def test_ranks_record_at_different_steps(self) -> None:
        """What a graph sends has the size of what an eager peer sends: marks of what is launched, too."""
        captured, eager = self.jobs()
        step = captured.captured_step(warmup_steps=2 + 2 * self.rank)
        for index in range(8):
            batch = self.rows(index)
            self.assertTrue(torch.equal(step(batch), eager.step(batch)), f"step {index}")
        self.assert_same(captured, eager, "ranks record at different steps")
        self.assertEqual(step.num_graphs, 1)

    def test_poison_delays_and_late_ranks_in_exchanges_of_activations(self) -> None:
        """Of the embedding and of the head; the other weight is gathered."""
        batches = [make_tokens(100 * index + self.rank, 4) for index in range(8)]
        for options in ({}, {**COPY_ENGINES, **SEVERAL}):
            schedule = explicit(embedding="exchange", **options)
            self.check_disturbed(f"{options}", batches, LM, lambda model, x: model(x), schedule=schedule)

    def test_poison_delays_and_late_ranks_in_compiled_blocks(self) -> None:
        """The bits of eager steps of the same compiled blocks."""
        batches = [self.rows(index) for index in range(8)]
        # Compiled in this process: all ranks would start a pool of workers each.
        with torch._inductor.config.patch(compile_threads=1):
            for options in ({}, {**COPY_ENGINES, **SEVERAL}):
                torch._dynamo.reset()  # each model is compiled anew, and so many versions of one function are allowed
                self.check_disturbed(f"{options}", batches, compiled_blocks, schedule=explicit(**options))

    @unittest.skipIf(NUM_RANKS % 2 or NUM_RANKS < 4, "needs an even number of at least 4 GPUs")
    def test_poison_delays_and_late_ranks_with_replicas(self) -> None:
        mesh = self.two_by_half("replicate", "gtp")
        batches = [self.rows(index) for index in range(8)]
        for options in ({}, {**COPY_ENGINES, **SEVERAL}):
            self.check_disturbed(f"{options}", batches, mesh=mesh, schedule=explicit(**options))

    def test_fifty_replays_equal_eager_steps(self) -> None:
        """Changing data, learning rate and weights; the main schedules (all others: in fewer steps above)."""
        for options in (
            {},
            {"num_microbatches": 4},
            {"schedule": explicit(prefetch_depth=0)},
            {"schedule": explicit(reduce_scatter="all_to_all")},
            {"schedule": COPY_ENGINE},
        ):
            captured, eager = self.jobs(**options)
            step = captured.captured_step()
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
        """Two microbatches, without and with disturbances."""
        batches = []
        for index in range(12):
            generator = torch.Generator().manual_seed(100 * index + self.rank)
            batches.append(torch.randint(0, 33, (4, 6), generator=generator).cuda())
        for changes in ({}, COPY_ENGINES):
            schedule = explicit(min_shard_numel=0, **changes)
            captured, eager = self.jobs(Zoo, next_token_loss, schedule=schedule, num_microbatches=2)
            step = captured.captured_step()
            for index, tokens in enumerate(batches):
                self.assertTrue(torch.equal(step(tokens), eager.step(tokens)), f"step {index}")
            self.assert_same(captured, eager, "after twelve steps")
            options: dict[str, Any] = {"schedule": schedule, "num_microbatches": 2}
            self.check_disturbed("zoo", batches, Zoo, next_token_loss, **options)

    def test_eager_steps_and_other_shapes_in_between(self) -> None:
        for schedule, warmup_steps in ((explicit(), 3), (COPY_ENGINE, 2)):
            captured, eager = self.jobs(schedule=schedule)
            step = captured.captured_step(warmup_steps=warmup_steps)
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
            assert_same_grads(captured.model, eager.model, f"step {outer}")
            for job in (captured, eager):
                job.optimizer.step()
                job.optimizer.zero_grad()
        self.assert_same(captured, eager, "after six steps")

    def test_dropout_draws_what_eager_steps_draw(self) -> None:
        def make() -> nn.Module:
            return nn.Sequential(Stack(depth=2), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))

        captured, eager = self.jobs(make)
        step = captured.captured_step()
        states = [torch.cuda.get_rng_state()] * 2
        for index in range(8):
            results = []
            for which, run in enumerate((step, eager.step)):
                torch.cuda.set_rng_state(states[which])
                results.append(run(self.rows(index)))
                states[which] = torch.cuda.get_rng_state()
            self.assertTrue(torch.equal(*results), f"step {index}")

    def test_regions_of_random_numbers(self) -> None:
        """Replays draw other numbers each time: in one region each rank its own, in the other all ranks the same."""
        mesh = init_weight_mesh("cuda", gtp=self.world_size)

        class Noisy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                with mesh.fork_rng("tp"):
                    common = torch.rand_like(x)
                with mesh.fork_rng("sequence_parallel"):
                    dropped = F.dropout(self.linear(x * common), 0.5)
                return common, dropped

        with mesh.fork_rng("params"):
            noisy = Noisy().cuda()
        model = gtp_shard(noisy, mesh.weights, schedule=SchedulePolicy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            common, dropped = model(x)
            dropped.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return common.sum(), (dropped == 0).float()

        captured = capture_step(step, model, optimizer)
        seen: list[torch.Tensor] = []
        for _ in range(6):
            common, zeros = captured(torch.ones(4, WIDTH, device="cuda"))
            everywhere = torch.stack([torch.empty_like(zeros)] * self.world_size).flatten(0, 1)
            dist.all_gather_into_tensor(everywhere, zeros)
            of_ranks = everywhere.view(self.world_size, *zeros.shape)
            self.assertFalse(torch.equal(of_ranks[0], of_ranks[1]))
            self.assertFalse(any(torch.equal(zeros, other) for other in seen))
            seen.append(zeros)
            sums = torch.empty(self.world_size, device="cuda")
            dist.all_gather_into_tensor(sums, common[None])
            self.assertEqual(len(set(sums.tolist())), 1)
        self.assertAlmostEqual(torch.stack(seen).mean().item(), 0.5, delta=0.05)

    def memory_of_steps(self, schedule: SchedulePolicy, is_captured: bool) -> tuple[int, int]:
        """What the allocator holds in steps of two shapes, beside workspaces, and symmetric memory; nothing of it is
        left afterwards."""
        free_workspaces()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        job = Job(self.gtp_mesh(), Stack(2048, 16).cuda(), square_loss, mp_policy=BF16, schedule=schedule)
        step = job.captured_step() if is_captured else job.step
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
        for schedule in (explicit(), COPY_ENGINE):
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
            job.captured_step()(torch.ones(2, WIDTH))
        adagrad = torch.optim.Adagrad(job.model.parameters())
        with self.assertRaisesRegex(ValueError, "'step' of Adagrad is on 'cpu'"):
            capture_step(lambda x: None, job.model, adagrad)(self.rows(0))
