"""One rank alone runs out of memory: it raises its own error, and no other rank computes on with half of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, GROUPS, GlooTest, assert_same_params, rows_of_rank
from passes_common import NUM_ROWS, WIDTH, Model, mean
from runtime_common import assert_idle
from script_jobs import run_forked

from dtensor_gtp import SchedulePolicy, gtp_shard


def fail(*args: Any) -> None:
    raise torch.OutOfMemoryError("no more memory")


# Where the other ranks come to the end of their forward or backward, because all collectives were launched before.
POINTS: dict[str, Callable[[Any], Any]] = {
    "first block": lambda model: model.blocks[0].register_forward_pre_hook(fail),
    "last layer": lambda model: model.last.register_forward_hook(fail),
    "loss": lambda model: model.register_forward_hook(fail),
    "gradient of a weight": lambda model: model.blocks[1].up.weight.register_hook(fail),
    "gradient of a whole parameter": lambda model: model.blocks[0].norm.bias.register_hook(fail),
    "optimizer in backward": lambda model: model.first.weight.register_post_accumulate_grad_hook(fail),
}


class TestAllTryAgain(GlooTest):
    world_size = 2

    def test_after_they_have_agreed_to(self) -> None:
        """As loops do that ask each other after each forward and backward whether one has failed."""
        for schedule in (ALL, GROUPS):
            for point, register in POINTS.items():
                with self.subTest(point=point):
                    self.check(schedule, register)

    def check(self, schedule: SchedulePolicy, register: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        reference, mesh = Model(), self.gtp_mesh()
        model = gtp_shard(copy.deepcopy(reference), mesh, schedule=schedule)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference)]
        for number in range(3):
            batch = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
            rows = rows_of_rank(batch, mesh)
            if number == 1:
                hook = register(model) if self.rank == 1 else None
                has_failed = self.attempt(model, rows)
                self.assertEqual(has_failed, self.rank == 1)
                if hook is not None:
                    hook.remove()
                model.zero_grad()
            self.assertFalse(self.attempt(model, rows))
            mean(reference(batch)).backward()
            assert_same_params(model, reference, "grad", rtol=1e-4, atol=1e-5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_params(model, reference, rtol=1e-4, atol=1e-5)
            assert_idle(model)

    def attempt(self, model: nn.Module, rows: torch.Tensor) -> bool:
        """A forward and a backward, unless a rank has failed in the forward. Returns whether this one has failed."""
        has_failed, output = False, None
        try:
            output = model(rows)
        except torch.OutOfMemoryError:
            has_failed = True
        if not self.any_of(has_failed):
            assert output is not None
            try:
                mean(output).backward()
            except torch.OutOfMemoryError:
                has_failed = True
        self.any_of(has_failed)
        return has_failed

    def any_of(self, has_failed: bool) -> bool:
        told = torch.tensor(float(has_failed))
        dist.all_reduce(told)
        return bool(told)


JOB = """
import os, signal, sys
import torch, torch.distributed as dist, torch.nn as nn
from dtensor_gtp import SchedulePolicy, gtp_shard, init_weight_mesh
from dtensor_gtp._params import gather
from dtensor_gtp._schedule.launch_reductions import ReductionLaunches

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends a job as soon as one process is dead
pair, rank = divmod(int(os.environ["RANK"]), 2)
point, at = sys.argv[1 + pair].split("-")

def fail(*args):
    raise torch.OutOfMemoryError("no more memory")

store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
if store.add("started", 1) == int(os.environ["WORLD_SIZE"]):
    store.set("all", "")
store.wait(["all"])  # a process that starts late would be ended before it ignores the signal
dist.init_process_group("gloo", store=dist.PrefixStore(point, store), rank=rank, world_size=2)
torch.manual_seed(0)
blocks = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(4))
model = gtp_shard(nn.Sequential(*blocks), init_weight_mesh("cpu", gtp=2).weights, schedule=SchedulePolicy(
    min_shard_numel=0, prefetch_nbytes=0))
try:
    for step in range(4):
        if rank == 1 and step == int(at):
            if point == "forward":
                model[2].register_forward_pre_hook(fail)
            elif point == "gather":
                model[2].register_forward_pre_hook(lambda *args: setattr(gather, "launch", fail))
            elif point == "backward":
                model[2].register_full_backward_hook(fail)
            else:
                ReductionLaunches.launch = fail
        model(torch.randn(4, 8)).square().mean().backward()
    print("all steps")
except BaseException as error:
    print(f"{point}: rank {rank} has {type(error).__name__}: {error}", flush=True)
    raise SystemExit(1)
"""


def test_the_others_end_with_an_error(tmp_path: Path) -> None:
    """Where they wait for the rank that has failed, when its process has ended. A pair of ranks for each point."""
    script, points = tmp_path / "job.py", ("forward-0", "gather-1", "backward-2", "reduction-2")
    script.write_text(JOB)
    result = run_forked([script, *points], 2 * len(points))
    assert result.status == 1, result.output
    for point in points:
        name = point.partition("-")[0]
        assert f"{name}: rank 1 has OutOfMemoryError: no more memory" in result.output, result.output
        assert f"{name}: rank 0 has RuntimeError" in result.output, result.output
    assert "all steps" not in result.output
