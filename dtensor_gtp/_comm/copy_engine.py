"""Gathers by the GPUs' copy engines, through symmetric memory: they take no SM from a GEMM.

[Note: rules of the copy engine]
Each rank has one *stage*: memory that its peers on the same host can read, in two halves that
rounds use in turn. A gather is one round, or several if it is larger than half of the stage. A
round is, in the order of the stream:

1. a barrier: all ranks have read what earlier rounds left in the stages;
2. a cast of the rank's own rows into its half, one kernel for each dtype;
3. a barrier: all stages are filled;
4. a copy of every peer's half into the output, and on another stream a copy of this rank's own half.

The cast is a kernel: behind a GEMM it waits for SMs, and the copies wait with it. So it runs ahead,
on a stream of casts. That stream waits for the compute that made the shard, and for the first
barrier of the round *before*: after that barrier nobody reads this half. In three cases that order
cannot be proved, and the cast runs between the two barriers: in the first round of a pass, when a
CUDA graph begins or ends, and in eager code after a graph has used the stage (the host does not see
replays). The half depends only on the number of the round in its pass. Quantized data and their
statistics are made on the stream of casts, too; a cast between the barriers waits for it.

What follows:

- *A slow peer*: the streams wait for it in both barriers. Nobody reads a stage before it is filled,
  or fills one that is still read.
- *Shards* may be written by an optimizer, freed, replaced or loaded while peers read. They read the
  stage, which the owner filled after everything that its compute stream was given before.
  [Note: streams and memory] holds for the memory of the shard itself.
- *CUDA graphs*: a round contains both barriers, and the first round of a pass relies on no earlier
  one. So a pass can be recorded, replayed any number of times and mixed with eager ones. All ranks
  must replay alike.
- *The stage grows* for a larger round, but not in a CUDA graph: all ranks wait for their streams,
  then meet, before the old stage is freed. A stage that a graph uses is kept as long as the
  backend.
- *A process that ends or hangs* leaves its peers' streams waiting. The launcher must end them: the
  watchdog of a later NCCL collective did not within a minute. Memory that a peer has mapped of an
  ended process stays valid.

Barriers are memory operations of the streams, because a kernel would need a place beside the GEMMs
(see ``_torch_compat.driver``). A copy within one GPU takes time from the GEMMs, so a gather makes
as few as possible. NVLink multicast is not used. ``send_ring`` exchanges gradients.

torch's ``_low_contention_all_gather`` (``torch.distributed._symmetric_memory``) copies by the same
engines, but one tensor a call, into an output of its own, between two barriers that are kernels. The 7
weights of a block of Llama would take 14 of these kernels, each of which waits for SMs beside a GEMM; as
one tensor they would be copied out of it afterwards. It casts nothing: a caller that does not cast into
symmetric memory itself moves 10 bytes for each element that is sent in bf16, a cast into the stage 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from .agreement import by_rank, host_name

ALIGNMENT = 16
_Pair = tuple[Tensor, Tensor]  # a target, and a source of the same shape


class PeerCopies:
    """A stage that peers copy from, see [Note: rules of the copy engine].

    Args:
        group: The ranks of one host with a GPU each.
        device: The GPU of this rank.
        nbytes: The first size of the stage, which is made now, collectively: if ranks cannot map
            each other's memory, all of them raise RuntimeError. 0: they are known to be able to, so
            the first use makes the stage.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int = ALIGNMENT) -> None:
        if nbytes:
            refuse_without_symmetric_memory(group, device)
        self._group_name = group.group_name
        self._device = device
        self.rank = group.rank()
        self._num_ranks = group.size()
        self._stage: compat.SymmetricBuffer | None = None
        if nbytes:
            self._stage = self._allocate(nbytes)
        # Stages that CUDA graphs use: replays read them at their addresses, so they stay.
        self._captured: list[compat.SymmetricBuffer] = []
        self._num_captured_before = 0  # before the recording that may fail

    def begin_recording(self) -> None:
        """Call before a recording into a CUDA graph that may fail."""
        self._num_captured_before = len(self._captured)

    def forget_recording(self) -> None:
        """The recording has failed: drop the stages that no other graph uses."""
        del self._captured[self._num_captured_before :]

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and compat.is_stream_capturing()

    def _wait_on_host(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def _reserve(self, nbytes: int) -> compat.SymmetricBuffer:
        """The stage, with at least ``nbytes`` bytes on all ranks."""
        # All ranks ask for the same number, so all of them grow the stage or none does.
        if self._stage is None or self._stage.nbytes < nbytes:
            self.grow(nbytes)
        return self._used_stage()

    def _used_stage(self) -> compat.SymmetricBuffer:
        assert self._stage is not None
        # A graph replays with this address: keep the stage even after it is replaced.
        if self._is_capturing() and self._stage not in self._captured:
            self._captured.append(self._stage)
        return self._stage

    def grow(self, nbytes: int) -> None:
        """Replace the stage by a larger one. Collective; waits for the current stream."""
        if self._is_capturing():
            raise RuntimeError(
                f"Copy engines need a staging buffer of {nbytes} bytes, but cannot allocate it "
                "during the capture of a CUDA graph. Run the step eagerly before the capture; "
                "capture_step does."
            )
        with waiting_allowed(self._device):
            self._wait_on_host()  # this rank has read the stages of its peers
            # All peers have read the old stage.
            dist.barrier(group=compat.resolve_group(self._group_name))
            self._stage = None  # freed before the new one is allocated
            self._stage = self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> compat.SymmetricBuffer:
        return compat.SymmetricBuffer(nbytes, self._device, self._group_name)

    @property
    def held_nbytes(self) -> int:
        """Symmetric memory of this rank: the stage, and earlier ones that graphs use."""
        stages = {id(stage): stage for stage in (self._stage, *self._captured) if stage is not None}
        return sum(stage.nbytes for stage in stages.values())

    def _peers(self) -> list[int]:
        """The other ranks, beginning with the next one, so that not all ranks read from one rank at
        once."""
        return [(self.rank + step) % self._num_ranks for step in range(1, self._num_ranks)]


class _Part(NamedTuple):
    """Rows of one tensor that are gathered in one round."""

    shard: Tensor  # this rank's rows, perhaps fewer than those of others
    dtype: torch.dtype  # of the output
    target: int  # address in the output, of the rows of rank 0
    stride: int  # bytes in the output from one rank to the next
    nbytes: int  # of the rows of one rank


class CopyEngine(PeerCopies):
    """Gathers of one communicator, see [Note: rules of the copy engine]. It takes shards as they
    are: it casts what it sends, and fills this rank's part of outputs.

    Args:
        group: Its ranks.
        device: The GPU of this rank.
        round_nbytes: What a rank sends at once, but a row at least: half of the stage. A larger
            gather takes several rounds, so that one weight (a head) does not decide the size of the
            stage. None: as much as a gather has.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, round_nbytes: int | None = None) -> None:
        super().__init__(group, device, 2 * (round_nbytes or ALIGNMENT))  # a stage has two halves
        self.cast_stream: torch.Stream | None = None  # set by ``CommContext``, to cast ahead
        self._round_nbytes = round_nbytes
        self._num_rounds = 0  # of this pass
        # Of the last round: the event after its first barrier and its casts, and the CUDA graph
        # that recorded it.
        self._last_passed: torch.Event | None = None
        self._last_recording: int | None = None

    def begin_pass(self) -> None:
        """Called on all ranks. Another CUDA graph, or none, may record the gathers that follow."""
        self._num_rounds = 0
        self._last_passed = None  # the first round casts between its barriers

    def all_gather(self, outputs: list[Tensor], shards: list[Tensor], ready: torch.Event | None = None) -> None:
        """Copy each rank's shards into the outputs, on the current stream.

        Args:
            outputs: Shape ``(world * rows, ...)``, contiguous.
            shards: Shape ``(rows, ...)``, of any dtype and layout; may have fewer rows, or be this
                rank's own part of the output. ``cast_stream``, which is waited for, may have made
                them.
            ready: When the outputs and the sources of the shards may be used; None: when the
                current stream is there.
        """
        # By addresses: each view of a tensor takes the host microseconds, for each weight.
        parts = []
        for output, shard in zip(outputs, shards, strict=True):
            nbytes = output.nbytes // self._num_ranks
            parts.append(_Part(shard, output.dtype, output.data_ptr(), nbytes, nbytes))  # no gap between ranks
        most = self._round_nbytes
        # Each part takes at most ALIGNMENT bytes more, for its padding.
        if most is None or sum(part.nbytes for part in parts) + ALIGNMENT * len(parts) <= most:
            self._gather(parts, ready)
            return
        num_rows = [output.shape[0] // self._num_ranks for output in outputs]
        for some in _rounds(parts, num_rows, most):
            self._gather(some, ready)

    def _gather(self, parts: list[_Part], ready: torch.Event | None) -> None:
        """One round."""
        places = offsets([part.nbytes for part in parts])
        stage = self._reserve(2 * max(places[-1], self._round_nbytes or 0))  # two halves; one row may exceed a round
        # Rounds take turns with the halves: one is read while the other is filled.
        half = self._num_rounds % 2 * (stage.nbytes // (2 * ALIGNMENT) * ALIGNMENT)
        begins = [half + at for at in places[:-1]]
        self._num_rounds += 1
        casts = [
            (stage.view(self.rank, begin, part.shard.shape, part.dtype), part.shard)
            for begin, part in zip(begins, parts, strict=True)
            if part.shard.shape[0]  # a rank may have no rows
        ]
        stream: torch.Stream | None = None
        if self.cast_stream is not None:
            stream = torch.accelerator.current_stream(self._device.index)
        packed, are_cast = self._cast_ahead(ready, casts)
        stage.barrier(0)  # all ranks have read what earlier rounds left in this half
        if stream is not None and packed is not None:
            stream.wait_event(packed)  # what the stream of casts makes: these casts, quantized data
        if not are_cast:
            self._cast(casts)
        if stream is not None:
            # From here on nobody reads the other half, so the next round may be cast ahead into it.
            # This half is filled, so this rank's own part may be copied out of it.
            self._last_passed = stream.record_event()
            self._last_recording = self._recording()
        stage.barrier(1)  # all ranks have filled their halves
        fetches = []
        own = []  # of this rank's part, unless it lies in the output already
        for begin, part in zip(begins, parts, strict=True):
            fetch = compat.Fetch(begin, part.target, part.stride, part.nbytes)
            fetches.append(fetch)
            if part.target + self.rank * part.stride != part.shard.data_ptr():
                own.append(fetch)
        # On the stream of casts, beside the copies from peers.
        own_copied = self._copy_own_beside(stage, own)
        try:
            stage.fetch([(rank, rank) for rank in self._peers()], fetches)  # whose stage, which row of the output
        finally:  # also after an error: the copy on the other stream is under way
            if stream is not None and own_copied is not None:
                stream.wait_event(own_copied)  # it writes to the outputs and reads this half
        if own_copied is None and own:
            stage.fetch([(self.rank, self.rank)], own)

    def _recording(self) -> int | None:
        """The number of the CUDA graph that is being recorded."""
        if not self._is_capturing():
            return None
        return compat.capture_id(torch.cuda.current_stream(self._device))

    def grow(self, nbytes: int) -> None:
        super().grow(nbytes)
        self._last_passed = None  # it was of the stage that is gone

    def _cast_ahead(self, ready: torch.Event | None, casts: list[_Pair]) -> tuple[torch.Event | None, bool]:
        """Cast on the stream of casts if nobody reads the half any more when that stream gets there.

        Returns:
            The event on that stream to wait for between the barriers, and whether it follows the casts.
        """
        if ready is None or self.cast_stream is None or not casts:
            return None, False
        self.cast_stream.wait_event(ready)  # this also brings the stream into a recording
        last_passed = self._last_passed
        recording = self._recording()
        # Another recording cannot wait for the event, and the host does not see replays.
        if recording != self._last_recording or (recording is None and self._captured):
            last_passed = None
        if last_passed is not None:
            # Recorded behind the first barrier of the round before: since then nobody reads this half.
            self.cast_stream.wait_event(last_passed)
            with self.cast_stream:
                self._cast(casts)
        # If nothing was cast here, the event covers quantized data.
        return self.cast_stream.record_event(), last_passed is not None

    def _copy_own_beside(self, stage: compat.SymmetricBuffer, own: list[compat.Fetch]) -> torch.Event | None:
        """Copy this rank's own part out of its stage on the stream of casts; the event after that."""
        if self.cast_stream is None or self._last_passed is None or not own:
            return None
        # Recorded behind the casts into the stage.
        self.cast_stream.wait_event(self._last_passed)
        with self.cast_stream:
            stage.fetch([(self.rank, self.rank)], own)
        return self.cast_stream.record_event()

    def _cast(self, pairs: list[_Pair]) -> None:
        by_bytes: list[_Pair] = []
        by_torch: list[_Pair] = []
        for target, source in pairs:
            is_cast = target.dtype != source.dtype or not target.is_cuda  # ``copy_bytes`` is for GPUs
            if is_cast or not target.is_contiguous() or not source.is_contiguous():
                by_torch.append((target, source))
            else:
                by_bytes.append((target, source))
        for group, copy in ((by_bytes, compat.copy_bytes), (by_torch, compat.copy_all)):
            if group:
                copy([target for target, _ in group], [source for _, source in group])


def _rounds(parts: list[_Part], num_rows: list[int], most_nbytes: int) -> Iterator[list[_Part]]:
    """Cut what is gathered at rows, on all ranks alike, into rounds of at most ``most_nbytes`` or
    one row."""
    some: list[_Part] = []
    left = most_nbytes
    for part, rows in zip(parts, num_rows, strict=True):
        begin = 0
        while begin < rows:
            row_nbytes = part.nbytes // rows
            number = rows - begin
            if row_nbytes:  # otherwise rows have no elements, and all of them fit
                number = min(number, max(left, 0) // row_nbytes)
            if not number and some:  # no further row fits: begin another round
                yield some
                some = []
                left = most_nbytes
                continue
            number = max(number, 1)  # a row that is larger than a round
            nbytes = number * row_nbytes
            target = part.target + begin * row_nbytes
            shard = part.shard[begin : begin + number]  # fewer rows or none at the end of a short shard
            some.append(_Part(shard, part.dtype, target, part.stride, nbytes))
            left -= offsets([nbytes])[-1]
            begin += number
    if some:
        yield some


@contextmanager
def waiting_allowed(device: torch.device) -> Iterator[None]:
    """Wait for the GPU in this context, even if the user has torch warn of synchronizations."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def offsets(sizes: list[int], alignment: int = ALIGNMENT) -> list[int]:
    """Where aligned parts of these sizes in bytes begin, one behind the other; the last number is
    the end."""
    places = [0]
    for nbytes in sizes:
        places.append(places[-1] + -(-nbytes // alignment) * alignment)
    return places


def refuse_without_symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises:
    RuntimeError: Some rank has no copy engines, or the ranks are on several hosts. Raised on all
    ranks of the group.
    """
    missing = ""
    if device.type != "cuda":
        missing = f"a {device.type} device has no copy engines"
    elif (kind := compat.symmetric_memory_backend(device)) != "CUDA":
        missing = f"symmetric memory is of the kind {kind!r} here, but copies need 'CUDA'"
    found = by_rank((missing, host_name()), [group]).values()
    reasons = sorted({reason for reason, _ in found if reason})
    if reasons:
        raise RuntimeError("; ".join(reasons))
    hosts = sorted({host for _, host in found})
    if len(hosts) > 1:
        raise RuntimeError(f"the ranks span hosts {hosts}, and copy engines reach GPUs of one host only")
