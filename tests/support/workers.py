"""A pool of worker processes that runs multi-process tests for the whole run of the suite.

To start a process, import torch and connect a process group takes longer than most tests. So there is one pool for each
number of ranks: its workers start with the first test that needs them, keep their process groups and meshes, and end
with the run. A test that fails, or whose worker dies or hangs, takes its pool with it: the next test gets a new one.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import groupby
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from processes import set_up_process, start
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal import common_utils

from dtensor_gtp import GTPShard
from dtensor_gtp._torch_compat.groups import gloo_with_one_thread

# It only ends what hangs: no test comes near it, on a busy machine either.
HANG_LIMIT_S = 300.0
# That of the run: pytest's process may have another one, of a test of its own, when a pool starts beside it.
_DEBUGGING = os.environ.get("DTENSOR_GTP_DEBUG")
# In which the peers of a rank that has failed may say what they found.
GRACE_S = 2.0


class Result(NamedTuple):
    """What one rank says of a test."""

    kind: str  # "passed", "skipped" or "failed"
    text: str
    cpu_s: float = 0.0


class WorkerPool:
    """Processes that form one gloo process group and run functions of modules, all at the same time.

    Args:
        num_ranks: Processes of the pool.
        timeout: The time limit of collectives.
    """

    def __init__(self, num_ranks: int, timeout: timedelta = timedelta(seconds=HANG_LIMIT_S)) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        self.cpu_s = 0.0  # of all tests so far
        for rank in range(num_ranks):
            ours, theirs = multiprocessing.Pipe()
            args = (rank, num_ranks, timeout, self.folder.name, theirs, _DEBUGGING)
            process = multiprocessing.Process(target=_work, args=args, name=f"rank {rank}", daemon=True)
            start(process)
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, module: str, cls: str, method: str, limit_s: float = HANG_LIMIT_S) -> None:
        """Run a method of a test class on all ranks.

        Raises:
            unittest.SkipTest: A rank skipped it.
            AssertionError: It failed on some ranks. The message has the traceback of each. The pool is closed.
        """
        for connection in self.connections:
            with suppress(OSError):  # the worker is dead, which _results finds
                connection.send((sys.path, module, cls, method))
        results = self._results(limit_s)
        self.cpu_s += sum(result.cpu_s for result in results.values())
        failed = [f"rank {rank}: {result.text}" for rank, result in results.items() if result.kind == "failed"]
        if failed:
            self.close()
            raise AssertionError(f"{cls}.{method} failed\n" + "\n".join(failed))
        for result in results.values():
            if result.kind == "skipped":
                raise unittest.SkipTest(result.text)

    def _results(self, limit_s: float) -> dict[int, Result]:
        """One for each rank. A rank that died, or did not end in time, failed where its Python stack says."""
        results: dict[int, Result] = {}
        end = time.monotonic() + limit_s
        while waiting := [c for rank, c in enumerate(self.connections) if rank not in results]:
            ready = wait(waiting, max(end - time.monotonic(), 0.0))
            if not ready:
                return results | self._stacks_of([self.connections.index(c) for c in waiting], limit_s)
            for connection in ready:
                rank = self.connections.index(connection)  # type: ignore[arg-type]
                try:
                    results[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self.processes[rank].join()
                    status = self.processes[rank].exitcode
                    results[rank] = Result("failed", f"the worker died, exit status {status}\n{self._stack(rank)}")
                if results[rank].kind == "failed":
                    end = min(end, time.monotonic() + GRACE_S)
        return results

    def _stacks_of(self, ranks: list[int], limit_s: float) -> dict[int, Result]:
        """Ranks that still run tell what each of their threads does."""
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        for rank in ranks:  # faulthandler ends what it writes with the thread that was interrupted
            end = time.monotonic() + GRACE_S
            while "most recent call first" not in self._stack(rank) and time.monotonic() < end:
                time.sleep(0.05)
        text = f"it did not end, with a peer that had failed or within {limit_s:.0f} s"
        return {rank: Result("failed", f"{text}\n{self._stack(rank)}") for rank in ranks}

    def _stack(self, rank: int) -> str:
        return _stack_file(self.folder.name, rank).read_text(errors="replace")

    @property
    def is_open(self) -> bool:
        return bool(self.processes)

    def close(self) -> None:
        """End the workers, whatever they do."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.connections, self.processes = [], []
        self.folder.cleanup()


class Pools:
    """One pool for each number of ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, WorkerPool] = {}
        atexit.register(self.close)

    def of(self, num_ranks: int) -> WorkerPool:
        pool = self._pools.get(num_ranks)
        if pool is None or not pool.is_open:
            pool = self._pools[num_ranks] = WorkerPool(num_ranks)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


class Test(NamedTuple):
    """A test of several ranks."""

    num_ranks: int
    module: str
    cls: str
    method: str


class Lanes:
    """Runs the multi-process tests of a run ahead of pytest: several classes at a time, while pytest runs other tests.

    Ranks mostly wait for each other, so one class alone leaves the cores idle half of the time.
    """

    def __init__(self) -> None:
        self._pools = Pools()  # of tests that do not run ahead
        self._ahead: dict[Test, Future[None]] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._of_lane = threading.local()
        self._pools_of_lanes: list[Pools] = []
        self._is_stopped = False

    def start(self, tests: Iterable[Test], num_lanes: int) -> None:
        """Begin to run ``tests``, of which those of a class follow each other."""
        # Not by a thread of a lane: an exec fails if another thread changes the environment meanwhile, as pytest does
        # for each test. Nobody would be told, and the next process would find no server.
        forkserver.ensure_running()
        self._executor = ThreadPoolExecutor(num_lanes)
        for _, members in groupby(tests, key=lambda test: test[:3]):
            futures = {test: Future[None]() for test in members}
            self._ahead.update(futures)
            self._executor.submit(self._run_class, futures)

    def _run_class(self, futures: dict[Test, Future[None]]) -> None:
        if not hasattr(self._of_lane, "pools"):
            self._of_lane.pools = Pools()
            self._pools_of_lanes.append(self._of_lane.pools)
        pools: Pools = self._of_lane.pools
        for test, future in futures.items():
            if self._is_stopped:
                return
            try:
                future.set_result(pools.of(test.num_ranks).run(*test[1:]))
            except Exception as error:  # for pytest to raise
                future.set_exception(error)

    def run(self, test: Test) -> None:
        """Run a test, or wait for its end if it runs ahead. Raises as ``WorkerPool.run`` does."""
        future = self._ahead.get(test)
        if future is None:
            self._pools.of(test.num_ranks).run(*test[1:])
        else:
            future.result()

    def stop(self) -> None:
        """End what runs ahead: pytest does not want the rest."""
        self._is_stopped = True
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        for pools in self._pools_of_lanes:
            pools.close()


@cache
def lanes() -> Lanes:
    return Lanes()


# --- in a worker ------------------------------------------------------------------------------------------------------


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stack_of_rank_{rank}")


def _work(
    rank: int, num_ranks: int, timeout: timedelta, folder: str, connection: Connection, debugging: str | None
) -> None:
    torch.set_num_threads(1)
    os.environ.pop("DTENSOR_GTP_DEBUG", None)
    if debugging is not None:
        os.environ["DTENSOR_GTP_DEBUG"] = debugging
    stack = _stack_file(folder, rank).open("w")
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(str(Path(folder, "store")), num_ranks)
    last = None
    with gloo_with_one_thread(), _KnownGroups().installed():  # all groups share one device
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks, store=store, timeout=timeout)
        set_up_process()
        # With the first block placement DTensor changes its functions. A test file has those that were there when it
        # was imported: on all ranks the same, also where earlier tests made such placements on some ranks alone.
        GTPShard(0, block_size=2)
        while True:
            try:
                path, module, cls, method = connection.recv()
            except EOFError:
                return
            sys.path[:] = path
            if (module, cls) != last:
                _forget()
                last = (module, cls)
            begin = time.process_time()
            result = _run(module, cls, method, rank)
            connection.send(result._replace(cpu_s=time.process_time() - begin))


def _run(module: str, cls: str, method: str, rank: int) -> Result:
    try:
        test = getattr(importlib.import_module(module), cls)(method)
        test.rank = rank
        common_utils.set_rng_seed()
        try:
            test.run_on_rank()
        finally:
            test.doCleanups()
        return Result("passed", "")
    except unittest.SkipTest as skip:
        return Result("skipped", str(skip))
    except BaseException:
        return Result("failed", traceback.format_exc())


def _forget() -> None:
    """Between classes: what the one before has compiled, and its garbage. The collector skips what is left."""
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


class _KnownGroups:
    """Each process group once for a worker: to connect one takes longer than a small test, and costs threads and files.
    Every mesh makes some, and every call of ``gtp_shard``.

    A group has a name that follows from what it is. torch's own is the number of groups that a process has made, which
    differs where one worker knows a group already and another makes it: those would wait for each other under names
    that never meet, in whatever test makes the next group.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._make = distributed_c10d.new_group
        self._num_made: Counter[Any] = Counter()  # a group that all of its ranks have left is made anew

    def __call__(self, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        key = (None if ranks is None else tuple(ranks), timeout, backend, kwargs.get("group_desc"))
        group = self._known.get(key)
        if group is None or (isinstance(group, dist.ProcessGroup) and group not in distributed_c10d._world.pg_map):
            self._num_made[key] += 1
            name = re.sub(r"\W+", "_", f"{key} {self._num_made[key]}")  # compiled code has it between quotes
            with mock.patch.object(distributed_c10d, "_process_group_name", return_value=name):
                group = self._known[key] = self._make(ranks, timeout, backend, *args, **kwargs)
        return group

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in (dist, distributed_c10d, device_mesh):
                stack.enter_context(mock.patch.object(module, "new_group", self))
            yield
