"""The streams and events of one device: who waits for whom. Only this file calls ``record_stream``.

[Note: streams and memory]
Every buffer (gathered weight, gradient to send, reduced shard) is allocated on the compute stream:
the stream that is current when the weight is used. A communication stream waits for the compute
stream before it uses a buffer. The compute stream waits for the communication stream before it
reads the result or drops the last reference. So the allocator reuses memory only when no stream
uses it any more, without ``record_stream``, and addresses repeat from step to step. What a
communication stream allocates for itself (a cast gradient, a quantized shard) is reused on that
stream only after it has waited for the compute stream again. Without streams (CPU with gloo) a
background ``Work`` takes the place of the event.

[Note: several compute streams]
A model may use weights on several streams in one pass, and autograd runs the backward of an op on
the stream of its forward. "The compute stream" then means all streams that were current when the
runtime was called in this pass:

- A gather waits for the stream that launches it.
- A reduction waits for all of them: each may have written a gradient that travels with it. When it
  is retired, all of them wait for it, so that none overwrites a buffer that it reads.
- A stream that joins the pass waits for the stream before it.
- The stream that launches a gather owns the memory of the weight. If another stream reads the
  weight, ``record_stream`` tells the allocator. (A CUDA graph does not reuse such memory within the
  graph.)
- A copy of a gathered weight (dequantized, contiguous) is made on the stream of its first use, for
  which another stream waits then.
- A stream that adds to a sum of microbatches, packs gradients of a group or replays a graph waits
  for all of them. So does one that gathers into a fixed buffer.
- What a block that is a group does on a stream of its own, nobody here sees: the block waits for
  that stream before it ends, in forward and in backward.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from ..policy import Waitable
from .debug import DebugFlags, sleep

_HOST = nullcontext()
_MAX_DELAY_US = 300


class Done(NamedTuple):
    """When a collective is complete: an event where there are streams, else a background work.
    ``origin`` is the compute stream that launched it and owns the memory of its output."""

    event: torch.Event | None = None
    work: Waitable | None = None
    origin: torch.Stream | None = None


class Waits:
    """How long compute waits for collectives: what of communication is exposed.

    On a GPU two events stand around each wait of the compute stream. The time between them is what
    the stream stood still, because it did nothing else in between. On a CPU the host waits, and its
    clock is read. Nothing is measured unless ``is_on``: the events of a wait take the host
    microseconds.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self._device = device
        self._seconds = 0.0  # that the host has waited
        self._events: list[tuple[torch.Event, torch.Event]] = []  # around each wait of a stream

    def begin(self, stream: torch.Stream | None) -> torch.Event | float:
        """Just before the wait of ``stream``, or of the host."""
        if stream is None:
            return time.perf_counter()
        return self._recorded(stream)

    def end(self, stream: torch.Stream | None, began: torch.Event | float) -> None:
        """Just after it."""
        if isinstance(began, float):
            self._seconds += time.perf_counter() - began
        elif stream is not None:
            self._events.append((began, self._recorded(stream)))

    def read(self) -> float:
        """Milliseconds since the last call. The host waits for the last of these waits."""
        if self._events:
            self._events[-1][1].synchronize()  # all earlier ones are complete then
        milliseconds = self._seconds * 1e3
        milliseconds += sum(begin.elapsed_time(end) for begin, end in self._events)
        self._seconds = 0.0
        self._events.clear()
        return milliseconds

    def _recorded(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        stream.record_event(event)
        return event


class Streams:
    """The compute streams of the running pass, and how streams wait for each other."""

    def __init__(self, device: torch.device, debug: DebugFlags) -> None:
        self.device = device
        self.device_type = device.type
        self.has_streams = device.type != "cpu"
        # One event serves all forks: a wait takes the record before it, so the event can be
        # recorded again at once.
        self.fork_event = torch.Event(device) if self.has_streams else None
        # The compute streams of this pass, the current one last.
        self.computing: list[torch.Stream] = []
        # Of the current one, if it is known; comparing numbers is quicker.
        self._handle: int | None = None
        self._is_recorded = False  # whether a CUDA graph records them
        # Makes a better error of one of gloo, if it can.
        self.explain: Callable[[RuntimeError], RuntimeError] = lambda error: error
        self.waits = Waits(device)
        self._delays = None
        if debug.delay_seed is not None:
            rank = 0
            if dist.is_initialized():
                rank = dist.get_rank()
            self._delays = random.Random(debug.delay_seed * 1009 + rank)  # each rank sleeps at other times

    def new_stream(self) -> torch.Stream | None:
        if not self.has_streams:
            return None
        # High priority: a collective that waits behind a queue of GEMM blocks delays every rank.
        return torch.Stream(self.device, priority=-1)

    def begin_pass(self, *, is_everywhere: bool) -> None:
        """A pass begins; if not ``is_everywhere``, the ranks of one mesh begin a gather outside of
        a pass."""
        # The first stream of this pass waits for none of the last one.
        if is_everywhere or self._is_recorded != self.is_capturing:
            self.computing.clear()
            self._handle = None

    def delay(self) -> None:
        """Debugging aid: sleep a random time, on the current stream."""
        if self._delays is not None:
            sleep(self._delays.randrange(_MAX_DELAY_US), self.device)

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph records what runs now."""
        return self.device_type == "cuda" and compat.is_stream_capturing()

    @property
    def may_wait_on_host(self) -> bool:
        """Whether the host may read a value of the device now: in no recording, and where no check
        forbids it."""
        if self.device_type != "cuda":
            return True
        return not self.is_capturing and torch.cuda.get_sync_debug_mode() == 0

    def note_compute(self) -> None:
        """Make the current stream a compute stream of this pass. Call it before that stream writes
        a gradient."""
        if self.has_streams:
            self.compute_stream()

    def compute_stream(self) -> torch.Stream:
        # The quick way, which nearly all calls take.
        if self._handle is not None and self._handle == compat.stream_handle(self.device.index):
            return self.computing[-1]
        stream = torch.accelerator.current_stream(self.device.index)
        if not self.computing or stream != self.computing[-1]:
            self._compute_on(stream)
        self._handle = None  # unknown, as on devices other than CUDA
        if self.device_type == "cuda":
            self._handle = compat.stream_handle(self.device.index)
        return self.computing[-1]

    def _compute_on(self, stream: torch.Stream) -> None:
        is_recorded = self.is_capturing
        if is_recorded != self._is_recorded:
            # A recorded stream cannot wait for an eager one, nor the other way round.
            self.computing.clear()
            self._is_recorded = is_recorded
        if stream in self.computing:
            self.computing.remove(stream)
        elif self.computing:
            # New in this pass: it may read what the others have gathered or computed.
            stream.wait_event(self.computing[-1].record_event())
        self.computing.append(stream)  # the current one is the last

    @contextmanager
    def computing_on(self, stream: torch.Stream) -> Iterator[None]:
        """A collective in this context follows ``stream`` alone, and that stream waits for it."""
        outside = self.computing
        try:
            self.computing = [stream]
            yield
        finally:
            self.computing = outside

    def other_compute_streams(self) -> list[torch.Stream]:
        # A recorded stream cannot wait for an eager one, nor the other way round.
        if len(self.computing) > 1 and self._is_recorded != self.is_capturing:
            del self.computing[:-1]
        return self.computing[:-1]

    def _may_wait_for(self, stream: torch.Stream) -> bool:
        """Whether the compute stream and ``stream`` may wait for each other: not if a graph records
        only one."""
        # Those of ``computing`` are all recorded, or all eager.
        return stream in self.computing or not self.is_capturing

    def fork(self, stream: torch.Stream | None) -> AbstractContextManager[Any]:
        """Run on ``stream``, after everything that the compute stream was given so far."""
        if stream is None:
            return _HOST
        assert self.fork_event is not None
        # Buffers are allocated on the compute stream: ``stream`` must not use one before earlier
        # work there has finished with the memory, see [Note: streams and memory].
        self.compute_stream().record_event(self.fork_event)
        stream.wait_event(self.fork_event)
        return stream  # the caller enters it

    def done(self, stream: torch.Stream | None, work: Waitable | None) -> Done:
        """When what was just launched in ``fork(stream)`` is complete: with the stream, else with
        the ``work``."""
        if stream is None:
            return Done(work=work)
        # The compute stream owns the memory that the collective fills.
        return Done(stream.record_event(), None, self.computing[-1])

    def wait(self, done: Done) -> torch.Stream | None:
        """Make the compute stream, which is returned (without streams: the host), wait. Waiting
        twice is harmless."""
        event, work, origin = done
        stream: torch.Stream | None = None
        began: torch.Event | float | None = None
        # Events in a recording cannot be timed.
        is_timed = self.waits.is_on and not self.is_capturing
        if event is not None:
            stream = self.compute_stream()
            if is_timed:
                began = self.waits.begin(stream)
            stream.wait_event(event)  # recorded behind a collective, a sum or a copy to the device
        elif work is not None:
            if is_timed:
                began = self.waits.begin(None)
            self._wait_for_work(work)  # without streams the host waits
        elif origin is not None:
            # Made by another compute stream without a collective, see ``at_once``.
            stream = self.compute_stream()
            if stream != origin and self._may_wait_for(origin):
                stream.wait_event(origin.record_event())
        if began is not None:
            self.waits.end(stream, began)
        return stream

    def _wait_for_work(self, work: Waitable) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from error

    def note_reading(self, done: Done, buffers: Iterable[Tensor]) -> None:
        """Keep the memory of a gather's output in use until the compute stream, which has waited,
        has read it."""
        if done.origin is None or done.origin == self.computing[-1]:
            return  # the reader owns the memory, or there are no streams
        for buffer in buffers:
            # ``origin`` owns the memory, so the allocator knows nothing of this reader.
            buffer.record_stream(self.computing[-1])

    def note_reading_earlier(self, tensors: Iterable[Tensor]) -> None:
        """The current stream reads what any compute stream of this pass may have made."""
        self.wait_for_others()
        if len(self.computing) > 1:
            # Other streams may own the memory, so the allocator knows nothing of this reader.
            for tensor in tensors:
                tensor.record_stream(self.computing[-1])

    def wait_for_others(self) -> None:
        """Make the current stream wait for all other compute streams of this pass. One that came back
        has not waited for what they were given since."""
        self.note_compute()
        for other in self.other_compute_streams():
            self.computing[-1].wait_event(other.record_event())

    def wait_to_drop(self, done: Done, buffer: Tensor) -> None:
        """Wait for a gather whose output is dropped without being read."""
        # Its memory must not be reused while the collective writes to it.
        self.wait(done)
        if done.event is not None and done.origin is not None and done.origin != self.computing[-1]:
            # The owner of the memory waits, too: it reuses it next.
            if self._may_wait_for(done.origin):
                done.origin.wait_event(done.event)
            buffer.record_stream(self.computing[-1])  # which may poison it

    def at_once(self) -> Done:
        """For a weight that the compute stream makes without a gather, as on an axis of one rank."""
        if not self.has_streams:
            return Done()
        return Done(None, None, self.compute_stream())  # ``wait`` records an event where another stream reads


class HostCopies:
    """Copies of shards that live on the host, to the device ahead of their gathers, on the upload
    stream of one device.

    The way back needs no stream of its own: a reduced gradient is copied on the stream on which it
    was completed.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._upload_stream: torch.Stream | None = None  # made by the first upload
        self._last_upload: torch.Event | None = None  # after it nothing reads shards on the host

    @torch.no_grad()
    def upload(self, shards: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event | None]:
        """Copies of ``shards`` on the device, and when they may be read (None: now). Their memory
        is that of the compute stream, see [Note: streams and memory]: hold them until it has waited
        for whoever reads them."""
        device = self._streams.device
        # Here, outside of ``fork``, so that the compute stream owns the memory.
        copies = [torch.empty(shard.shape, dtype=shard.dtype, device=device) for shard in shards]
        if self._streams.has_streams and self._upload_stream is None:
            self._upload_stream = self._streams.new_stream()
        with self._streams.fork(self._upload_stream):
            self._streams.delay()
            for copy, shard in zip(copies, shards, strict=True):
                copy.copy_(shard.detach(), non_blocking=True)  # if it is pinned
            if self._upload_stream is not None:
                # After compute, too, because of the fork: so it covers what ``note_uploads`` noted before.
                self._last_upload = self._upload_stream.record_event()
        return copies, self._last_upload

    def note_uploads(self) -> None:
        """The compute stream was given copies of parameters on the host."""
        if self._streams.has_streams:
            self._last_upload = self._streams.compute_stream().record_event()

    def finish_uploads(self) -> None:
        """Let the host wait until nothing reads its shards any more: it may write to them now,
        without a trace here."""
        if self._last_upload is not None:
            self._last_upload.synchronize()
            self._last_upload = None

    def finish_on_host(self) -> None:
        """Let the host wait for the compute stream, e.g. to read gradients that were copied there."""
        if self._streams.has_streams:
            self._streams.compute_stream().synchronize()
