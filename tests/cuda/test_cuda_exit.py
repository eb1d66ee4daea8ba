"""Processes that end while peers use their memory or wait for them. Needs two GPUs of one host.

See [Note: rules of the copy engine] in ``copy_engine.py``. All tests start processes of their own: the harness of the
others does not survive a rank that leaves.
"""

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import torch
import torch.distributed as dist
from cuda_common import NUM_RANKS, take_gpu
from processes import start
from timing import HANG_S, come_late

from dtensor_gtp._comm.copy_engine import CopyEngine
from dtensor_gtp._comm.send_ring import SendRing

# Cycles of the SM clock: about five seconds. Where a busy host lets a peer leave later than that, a test shows less.
VERY_LATE = 8_000_000_000
NUMEL = 1 << 22
# How long a process is given to say what it need not say, and to end before it is killed.
SILENT_S = 20
JOB = Path(__file__).with_name("cuda_exit_job.py")


class ReadsLate(CopyEngine):
    def _peers(self) -> list[int]:
        if self.rank == 0:
            torch.cuda._sleep(VERY_LATE)
        return super()._peers()


class FetchesLate(SendRing):
    def _peers(self) -> Iterator[int]:  # type: ignore[override]
        if self.rank == 0:
            torch.cuda._sleep(VERY_LATE)
        yield from super()._peers()
        # Before the copies, which are short, and the signal that they are done.
        self.fetched = torch.cuda.current_stream().record_event()


def _leave_a_gather(rank: int, results: Any) -> None:
    """Rank 1 ends as soon as its own streams are done, while rank 0 still reads; then rank 0 gathers again, alone."""
    engine = ReadsLate(dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()))
    shard = torch.full((NUMEL,), float(rank + 1), device="cuda")
    output = torch.empty(2 * NUMEL, device="cuda")
    engine.all_gather([output], [shard])
    if rank == 1:
        torch.cuda.synchronize()
        os._exit(0)
    results.put(("read", output.unique().tolist()))
    engine.all_gather([output], [shard])


def _leave_an_exchange(rank: int, results: Any) -> None:
    """Rank 1 ends when it has fetched and said so, while rank 0 still fetches; then rank 0 exchanges again, alone."""
    ring = FetchesLate(dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()), 4 * NUMEL * 4)
    ring.grow(4 * NUMEL * 4)
    output = torch.empty(2, NUMEL, device="cuda")

    def exchange() -> None:
        gradient = ring.offer((2, NUMEL), torch.float32)
        assert gradient is not None
        for peer in range(2):
            gradient[peer] = 10 * (rank + 1) + peer
        place = ring.take(gradient, torch.float32)
        assert place is not None
        ring.exchange(output, [NUMEL], [place])

    exchange()
    if rank == 1:
        ring.fetched.synchronize()
        come_late(0.5)  # of the GPU's time, whose host has nothing more to do: its copies and its signal are done
        os._exit(0)
    results.put(("read", output[1].unique().tolist()))  # this rank's own row is left out
    exchange()


def _run(rank: int, store: str, leave: Callable[[int, Any], None], results: Any) -> None:
    take_gpu(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    leave(rank, results)
    done = torch.cuda.current_stream().record_event()
    come_late(3)
    results.put(("completed alone", done.query()))
    results.close()
    results.join_thread()
    os._exit(0)


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaExit(unittest.TestCase):
    def check(self, leave: Callable[[int, Any], None], values: list[float]) -> None:
        """What rank 0 reads of a peer that is gone is right, and what it begins without one never ends."""
        context = torch.multiprocessing.get_context("spawn")
        results = context.Queue()
        with tempfile.TemporaryDirectory() as directory:
            arguments = [(rank, f"{directory}/store", leave, results) for rank in range(2)]
            processes = [context.Process(target=_run, args=args, daemon=True) for args in arguments]
            for process in processes:
                start(process)
            try:
                self.assertEqual(results.get(timeout=HANG_S), ("read", values))
                # The host may wait with its streams: then it says nothing.
                with contextlib.suppress(queue.Empty):
                    self.assertEqual(results.get(timeout=SILENT_S), ("completed alone", False))
            finally:
                for process in processes:
                    process.join(SILENT_S)
                    process.kill()

    def test_process_that_exits_in_the_middle_of_a_gather(self) -> None:
        self.check(_leave_a_gather, [1.0, 2.0])

    def test_process_that_exits_in_the_middle_of_an_exchange(self) -> None:
        self.check(_leave_an_exchange, [20.0])

    def test_the_launcher_ends_a_job_whose_peer_has_left(self) -> None:
        """Nothing but copy engines communicates, and no time limit of a collective passes."""
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # it may not be installed
        with tempfile.TemporaryDirectory() as directory:
            run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            command = [*run, str(JOB), f"{directory}/store"]
            launcher = subprocess.Popen(command, env=variables, stdout=PIPE, stderr=STDOUT, text=True)
            try:
                output, _ = launcher.communicate(timeout=HANG_S)
            finally:
                launcher.terminate()  # which ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(HANG_S)
                launcher.kill()
        self.assertIn("waits", output)
        self.assertNotIn("done", output)
        self.assertIn("exitcode  : 3", output)
        self.assertNotEqual(launcher.returncode, 0, output)
