"""One process of a job: its place, its device, and how it ends.

``start`` joins the process group that ``torchrun`` describes in the environment, or makes a group of one when the
script was started by plain ``python``. ``run`` wraps the script's main function so that a job ends promptly and says
why: an exception on one rank, or a signal, ends that process at once, even while its main thread waits inside a
collective for peers that will never come; ``torchrun`` then ends the others.
"""

import os
import re
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous

# How long a collective may wait for a peer that neither answers nor dies. A peer that dies is noticed at once.
_PEER_TIMEOUT = timedelta(minutes=2)
# Between two looks at what other processes have put into the store.
_POLL_S = 0.05

# The words of gloo and NCCL for a peer that died. torchrun orders failures by whole seconds: a process that fails only
# because a peer did stays long enough for torchrun to find that peer first and to end this one.
_PEER_LOST = re.compile("(closed|reset) by peer|broken pipe|remote process (has )?exited", re.IGNORECASE)
_PEER_REPORT_S = 3.0


class UsageError(ValueError):
    """Bad input from the command line; reported in one line, without a traceback."""


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job."""

    rank: int
    world_size: int
    device: torch.device

    def print_once(self, *values: object) -> None:
        """Prints on rank 0 only."""
        if self.rank == 0:
            print(*values, flush=True)

    def mean_over_ranks(self, value: torch.Tensor) -> float:
        """The mean of a scalar of which each rank has one, and which it gives up.

        Where all ranks have as many rows, the mean of their means is the mean over the global batch.
        """
        dist.all_reduce(value)
        return value.item() / self.world_size


class Farewell:
    """What a process still does when a peer is gone or when it is told to end by SIGTERM; at most once."""

    def __init__(self) -> None:
        self._say: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def arm(self, say: Callable[[], None]) -> None:
        self._say = say

    def say(self) -> None:
        """From any thread; returns when it is said."""
        with self._lock:
            say, self._say = self._say, None
            if say is not None:
                try:
                    say()
                except Exception:
                    traceback.print_exc()


def start() -> Place:
    """Chooses the device and joins the default process group (NCCL with GPUs, gloo without).

    GPUs are used when every process of this host gets one of its own; otherwise the job runs on CPU.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_world_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    num_gpus = torch.cuda.device_count()
    # Outside torchrun the store lives in the process: a group of one needs no address.
    store = _store_of_attempt() if "WORLD_SIZE" in os.environ else dist.HashStore()
    if num_gpus >= local_world_size:
        backend, device = "nccl", torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        backend, device = "gloo", torch.device("cpu")
        if world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # the processes share the cores
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=_PEER_TIMEOUT,
        device_id=device if backend == "nccl" else None,  # binds the communicators to the device at once
    )
    place = Place(rank, world_size, device)
    if 0 < num_gpus < local_world_size:
        place.print_once(f"{num_gpus} GPUs for {local_world_size} processes on this host: running on CPU")
    return place


def _store_of_attempt() -> dist.Store:
    """The store of this attempt: torchrun serves all attempts of a job from one, where gloo would find the addresses of
    processes that are gone."""
    store, rank, world_size = next(rendezvous("env://", timeout=_PEER_TIMEOUT))
    return dist.PrefixStore(_name_of_attempt(store, rank, world_size), store)


def _name_of_attempt(store: dist.Store, rank: int, world_size: int) -> str:
    """A name that all processes of this attempt have, and no other attempt.

    TORCHELASTIC_RESTART_COUNT is none: a host whose own processes have not failed, but which is called to a new
    rendezvous by others, does not count that. So rank 0 makes a name and tells it to whoever asks under a name of its
    own, until all have heard it; nobody answers what processes that are gone have asked.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"asks/{rank}", own)
        name: str = store.get(f"answer/{own}").decode()
        store.set(f"{name}/heard/{rank}", "")
        return name
    end = time.monotonic() + _PEER_TIMEOUT.total_seconds()
    waiting = set(range(1, world_size))
    while waiting:
        if time.monotonic() > end:
            raise TimeoutError(f"ranks {sorted(waiting)} have not come within {_PEER_TIMEOUT.total_seconds():g} s")
        for other in sorted(waiting):
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", own)
        waiting = {other for other in waiting if not store.check([f"{own}/heard/{other}"])}
        time.sleep(_POLL_S)
    return own


def run(main: Callable[[], None], farewell: Farewell | None = None) -> None:
    """Calls ``main`` and ends the process: status 0, 1 after an exception, 128 + n after signal n.

    An exception is printed with its rank and handed to torchrun, whose summary names the first rank that failed.
    """
    farewell = farewell or Farewell()
    _exit_on_signals(farewell)

    def let_the_cause_be_first() -> None:
        try:
            main()
        except RuntimeError as error:
            if _PEER_LOST.search(str(error)):
                farewell.say()
                time.sleep(_PEER_REPORT_S)
            raise

    try:
        record(let_the_cause_be_first)()
    except Exception as error:
        reason = f"error: {error}" if isinstance(error, UsageError) else traceback.format_exc().rstrip()
        _leave(1, reason)
    if dist.is_initialized():
        dist.destroy_process_group()
    _leave(0)


def _leave(status: int, reason: str = "") -> NoReturn:
    """Ends the process without the interpreter's shutdown.

    After a failure the shutdown would wait for communicators whose peers are busy elsewhere. After success it can
    abort: a gloo thread that frees the tensors of its last collective needs the interpreter, which is gone by then.
    """
    sys.stdout.flush()
    if reason:
        sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] {reason}\n")
    sys.stderr.flush()
    os._exit(status)


def _exit_on_signals(farewell: Farewell) -> None:
    """Makes SIGINT and SIGTERM end the process from a thread of its own.

    Python runs signal handlers in the main thread between bytecodes, and therefore not while a collective blocks. The
    wakeup descriptor is written by the C-level handler at once, and a thread that reads it can act.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        number = os.read(reader, 1)[0]
        if number == signal.SIGTERM:
            farewell.say()
        _leave(128 + number, f"stopped by {signal.Signals(number).name}")

    threading.Thread(target=wait, name="signals", daemon=True).start()
