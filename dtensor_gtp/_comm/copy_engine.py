"""Gathers by the GPUs' copy engines, through symmetric memory: they take no SM from a GEMM.

[Note: rules of the copy engine]
Each rank has one *stage*, memory that its peers on the same host can read, in two halves that gathers use in turn. A
gather is, in the order of the stream:

1. a barrier: all ranks have read what earlier gathers left in the stages;
2. a cast of the rank's own rows into its half, one kernel for each dtype;
3. a barrier: all stages are filled;
4. a copy of every peer's half into the output; on another stream beside it, a copy of this rank's own.

The cast is a kernel. Behind a GEMM it waits for SMs, and the wire waits with it. So it runs ahead, on a stream of
casts: it waits for what made the shard, and for the first barrier of the gather *before*, after which nobody reads this
half.
In three cases it is not known that this barrier precedes the cast, which then runs in its place between the barriers:
in the first gather of a pass, across the border of a CUDA graph, and in eager code once a graph has used the stage (the
host does not see replays). Which half is used depends on the number of the gather in its pass alone.

Quantized data and their statistics are made on the stream of casts, too. A cast between the barriers waits for it.

What follows:

- *A slow peer* is waited for in both barriers, by the streams. Nobody reads a stage that is not filled, nor fills one
  that is still read.
- *An optimizer* may write to shards while peers read. They read the stage, which the owner filled after all that its
  compute stream was given before, the step of the optimizer included.
- *A shard may be freed, replaced or loaded* while peers read, for the same reason. The memory of the shard itself obeys
  [Note: streams and memory].
- *CUDA graphs*: both barriers are within the gather, and the first gather of a pass relies on no other. So a pass can
  be recorded, replayed any number of times and mixed with eager ones. All ranks must replay alike.
- *The stage grows* for a larger gather, outside of CUDA graphs only: all ranks wait for their streams, then meet,
  before the old stage is freed. A stage that a graph uses is kept as long as the backend.
- *A process that ends or hangs* leaves its peers' streams waiting. The launcher has to end them: the watchdog of a
  later NCCL collective did not within a minute. Memory that a peer has mapped of an ended process stays valid.

Barriers are memory operations of the streams, because a kernel would have to find a place beside the GEMMs (see
``_torch_compat.driver``). A copy within one GPU takes time from the GEMMs, so a gather has as few as possible. NVLink
multicast is not used. ``send_ring`` exchanges gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from .symmetric_memory import ALIGNMENT, PeerCopies, offsets

# A target, and a source of the same shape.
_Pair = tuple[Tensor, Tensor]


class CastingBackend(ABC):
    """A gather backend that takes shards as they are: it casts what it sends, and fills this rank's part of outputs."""

    cast_stream: torch.Stream | None = None  # set by ``CommContext``, to cast ahead

    @abstractmethod
    def begin_pass(self) -> None:
        """On all ranks: the gathers that follow may be recorded into another graph than those before, or into none."""

    @abstractmethod
    def all_gather(self, outputs: list[Tensor], shards: list[Tensor], ready: torch.Event | None = None) -> None:
        """Copy each rank's shards into the outputs, on the current stream.

        Args:
            outputs: Shape ``(world * rows, ...)``, contiguous.
            shards: Shape ``(rows, ...)``, of any dtype and layout; may have fewer rows, or be this rank's own part of
                the output. If they were made on ``cast_stream``, the backend waits for it.
            ready: When the outputs, and what shards are made of, may be used; None: when the current stream is there.
        """


class CopyEngine(PeerCopies, CastingBackend):
    """Gathers of one communicator, see [Note: rules of the copy engine]."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._num_gathers = 0
        # When the first barrier of the last gather was passed and its places were filled, and in which recording of a
        # graph, if in one.
        self._last_passed: torch.Event | None = None
        self._last_recording: int | None = None

    def begin_pass(self) -> None:
        self._num_gathers = 0
        self._last_passed = None

    def all_gather(self, outputs: list[Tensor], shards: list[Tensor], ready: torch.Event | None = None) -> None:
        # By addresses: each view of a tensor takes the host microseconds, for each weight.
        sizes = [output.nbytes // self._num_ranks for output in outputs]
        places = offsets(sizes)
        stage = self._reserve(2 * places[-1])
        half = self._num_gathers % 2 * (stage.nbytes // (2 * ALIGNMENT) * ALIGNMENT)
        begins = [half + at for at in places[:-1]]
        self._num_gathers += 1
        casts = [
            (stage.view(self._rank, begin, shard.shape, output.dtype), shard)
            for begin, shard, output in zip(begins, shards, outputs, strict=True)
            if shard.shape[0]
        ]
        filled = self._fill_ahead(ready, casts) if casts else None
        stage.barrier(0)
        self._fill(casts, filled, ready)
        stage.barrier(1)
        parts = [
            compat.Fetch(begin, output.data_ptr(), nbytes, nbytes)
            for begin, output, nbytes in zip(begins, outputs, sizes, strict=True)
        ]
        own = [
            part
            for part, shard in zip(parts, shards, strict=True)
            if part.target + self._rank * part.stride != shard.data_ptr()
        ]
        taken = self._take_beside(stage, own)
        try:
            stage.fetch([(rank, rank) for rank in self._peers()], parts)
        finally:
            if taken is not None:
                torch.accelerator.current_stream(self._device.index).wait_event(taken)
        if taken is None and own:
            stage.fetch([(self._rank, self._rank)], own)

    def _recording(self) -> int | None:
        """The number of the graph that is recorded now."""
        return compat.capture_id(torch.cuda.current_stream(self._device)) if self._is_capturing() else None

    def _grow(self, nbytes: int) -> None:
        super()._grow(nbytes)
        self._last_passed = None

    def _fill_ahead(self, ready: torch.Event | None, casts: list[_Pair]) -> torch.Event | None:
        """Cast on the stream of casts if nobody reads the half any more when it gets there; when that is done."""
        if ready is None or self.cast_stream is None or self._last_passed is None:
            return None
        recording = self._recording()
        if recording != self._last_recording or (recording is None and self._captured):
            return None
        self.cast_stream.wait_event(ready)
        self.cast_stream.wait_event(self._last_passed)
        with self.cast_stream:
            self._cast(casts)
        return self.cast_stream.record_event()

    def _fill(self, casts: list[_Pair], filled: torch.Event | None, ready: torch.Event | None) -> None:
        """Between the barriers: fill the stage, or wait until it is filled."""
        if filled is None and casts:
            self._wait_for_packing(ready)
            self._cast(casts)
        if self.cast_stream is not None:
            stream = torch.accelerator.current_stream(self._device.index)
            if filled is not None:
                stream.wait_event(filled)
            self._last_passed, self._last_recording = stream.record_event(), self._recording()

    def _wait_for_packing(self, ready: torch.Event | None) -> None:
        if ready is None or self.cast_stream is None:
            return
        self.cast_stream.wait_event(ready)  # a graph may not know that stream yet
        torch.accelerator.current_stream(self._device.index).wait_event(self.cast_stream.record_event())

    def _take_beside(self, stage: compat.SymmetricBuffer, own: list[compat.Fetch]) -> torch.Event | None:
        """Copy this rank's own part out of its stage on the stream of casts; when that stream is done."""
        if self.cast_stream is None or self._last_passed is None or not own:
            return None
        self.cast_stream.wait_event(self._last_passed)
        with self.cast_stream:
            stage.fetch([(self._rank, self._rank)], own)
        return self.cast_stream.record_event()

    def _cast(self, pairs: list[_Pair]) -> None:
        plain = [pair for pair in pairs if _is_copied_as_bytes(*pair)]
        cast = [pair for pair in pairs if not _is_copied_as_bytes(*pair)] if len(plain) < len(pairs) else []
        for some, copy in ((plain, compat.copy_bytes), (cast, compat.copy_all)):
            if some:
                copy([target for target, _ in some], [source for _, source in some])


def _is_copied_as_bytes(target: Tensor, source: Tensor) -> bool:
    return target.is_cuda and target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
