"""The streams and events of one device: who waits for whom. The only file that makes streams or calls
``record_stream``.

[Note: streams and memory]
Every buffer (gathered weight, gradient to send, reduced shard) is allocated on the compute stream, the stream that is
current when the weight is used. A communication stream waits for the compute stream before it fills or reads a buffer.
The compute stream waits for the communication stream before it reads the result or drops the last reference. So the
allocator gets memory back only when, in the order of the compute stream, nobody uses it any more. No
``record_stream`` is needed, addresses repeat from step to step, and no buffer is overwritten under a running GEMM. What
a communication stream allocates for itself (a cast gradient, a quantized shard) is reused on that stream only after it
has waited for the compute stream again.

On devices without streams (CPU with gloo) the background ``Work`` takes the place of the event.

[Note: several compute streams]
A model may use weights on several streams of one pass (a shared expert beside the others), and autograd runs the
backward of an op on the stream of its forward. "The compute stream" above then means all streams that were current when
the runtime was called in this pass:

- A gather follows the stream that launches it.
- A reduction waits for all of them, because any of them may have written a gradient that travels with it. When it is
  retired, all of them wait for it, so that none overwrites what it reads.
- A stream that joins the pass waits for the stream before it.
- A gathered weight returns to the allocator of the stream that launched the gather while another stream may still read
  it: ``record_stream`` tells the allocator. (In a CUDA graph such memory is not reused within the graph.)
- What an op makes of a gathered weight (dequantized, contiguous) is made on the stream of that use. A weight that stays
  gathered for a use on another stream of the same pass must be gathered as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..policy import Waitable

HOST = nullcontext()


class Done(NamedTuple):
    """When a collective is complete: an event where there are streams, else a background work.

    ``origin`` is the compute stream that launched it, from whose memory its output is.
    """

    event: torch.Event | None = None
    work: Waitable | None = None
    origin: torch.Stream | None = None


class Streams:
    """The compute streams of the running pass, and how other streams wait for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_streams = device.type != "cpu"
        # One event serves all forks: a wait takes the record before it, so the event can be recorded again at once.
        self._fork_event = torch.Event(device) if self.has_streams else None
        # Of this pass, the current one last; and whether a CUDA graph records them.
        self._computing: list[torch.Stream] = []
        self._is_recorded = False

    def _new_stream(self) -> torch.Stream | None:
        # High priority: a collective that waits behind a queue of GEMM blocks delays every rank.
        return torch.Stream(self.device, priority=-1) if self.has_streams else None

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph records what runs now."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def note_compute(self) -> None:
        """The current stream computes. To call before it writes a gradient."""
        if self.has_streams:
            self._compute_stream()

    def _compute_stream(self) -> torch.Stream:
        stream = torch.accelerator.current_stream(self.device.index)
        if not self._computing or stream != self._computing[-1]:
            self._compute_on(stream)
        return stream

    def _compute_on(self, stream: torch.Stream) -> None:
        is_recorded = self.is_capturing
        if is_recorded != self._is_recorded:
            self._computing.clear()  # a recorded stream cannot wait for one that is not recorded, nor the other way
            self._is_recorded = is_recorded
        if stream in self._computing:
            self._computing.remove(stream)
        elif self._computing:
            stream.wait_event(self._computing[-1].record_event())
        self._computing.append(stream)

    def _beside(self) -> list[torch.Stream]:
        """The other compute streams of this pass."""
        if len(self._computing) > 1 and self._is_recorded != self.is_capturing:
            del self._computing[:-1]
        return self._computing[:-1]

    def _may_wait_for(self, stream: torch.Stream) -> bool:
        """Whether the compute stream and ``stream`` may wait for each other: not if a graph records only one."""
        return stream in self._computing or not self.is_capturing

    def _fork(self, stream: torch.Stream | None) -> AbstractContextManager[Any]:
        """Run on ``stream``, after all that the compute stream was given so far."""
        if stream is None:
            return HOST
        assert self._fork_event is not None
        self._compute_stream().record_event(self._fork_event)
        stream.wait_event(self._fork_event)
        return stream

    def wait(self, done: Done) -> None:
        """Make the compute stream (without streams: the host) wait. Waiting twice is harmless."""
        event, work, origin = done
        if event is not None:
            self._compute_stream().wait_event(event)
        elif work is not None:
            work.wait()
        elif origin is not None and (stream := self._compute_stream()) != origin and self._may_wait_for(origin):
            stream.wait_event(origin.record_event())

    def note_reading(self, done: Done, buffers: Iterable[Tensor]) -> None:
        """The compute stream, which has waited for a gather, reads its output: the memory stays in use until then."""
        if done.origin is not None and done.origin != (stream := self._computing[-1]):
            for buffer in buffers:
                buffer.record_stream(stream)

    def wait_to_drop(self, done: Done, buffer: Tensor) -> None:
        """Wait for a gather whose output nobody reads and which is dropped now."""
        self.wait(done)
        if done.event is not None and done.origin is not None and done.origin != self._computing[-1]:
            if self._may_wait_for(done.origin):
                done.origin.wait_event(done.event)
            buffer.record_stream(self._computing[-1])  # which may poison it

    def at_once(self) -> Done:
        """Of a weight that is made on the compute stream instead of gathered, as on an axis of one rank."""
        return Done(None, None, self._compute_stream()) if self.has_streams else Done()
