"""Memory that several ranks can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .driver import SignalBarrier, enqueue_copies, num_flag_bytes, raw_stream
from .groups import resolve_group

_FLAG_ALIGNMENT = 256
_MAX_VIEWS = 1 << 14


def symmetric_memory_backend(device: torch.device) -> str | None:
    """What allocates symmetric memory on ``device`` ("CUDA", "NVSHMEM", "NCCL"), None if there is none."""
    try:
        # As torch.distributed._symmetric_memory does. To import that takes a tenth of a second, for ops of its own.
        return torch._C._distributed_c10d._SymmetricMemory.get_backend(device)
    except (AttributeError, RuntimeError):
        return None


class Fetch(NamedTuple):
    """What is copied of the buffer of each of several ranks, to rows of this GPU's memory."""

    offset: int  # bytes from the start of the buffer
    target: int  # address of row 0
    stride: int  # bytes from one row to the next
    nbytes: int


class SymmetricBuffer:
    """So many bytes on each rank of a group, on its GPU, that all of them can read. Made collectively."""

    def __init__(self, nbytes: int, device: torch.device, group_name: str) -> None:
        memory = torch._C._distributed_c10d._SymmetricMemory
        group = resolve_group(group_name)
        begin = -(-nbytes // _FLAG_ALIGNMENT) * _FLAG_ALIGNMENT
        self.nbytes = nbytes
        self._device = device
        own = memory.empty_strided_p2p((begin + num_flag_bytes(group.size()),), (1,), torch.uint8, device, group_name)
        self._handle = memory.rendezvous(own, group_name)
        self._views: dict[tuple[int, int, torch.Size, torch.dtype], Tensor] = {}
        if self._handle is None:
            raise RuntimeError(f"no symmetric memory for the ranks of process group '{group_name}'")
        own[begin:].zero_()
        self._begins = list(self._handle.buffer_ptrs)
        self._barrier = SignalBarrier([pointer + begin for pointer in self._begins], group.rank())
        self._handle.barrier(0, 0)  # no peer may signal before the flags are zero
        for turn in range(2):  # so that a driver that refuses does so now
            self.barrier(turn)
        torch.cuda.current_stream(device).synchronize()
        self._own = own

    def view(self, rank: int, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor in the buffer of ``rank``, ``offset`` bytes from its begin, a multiple of the dtype's size."""
        key = (rank, offset, shape, dtype)
        if key not in self._views:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # else training could not write where an evaluation was first
                self._views[key] = self._handle.get_buffer(rank, shape, dtype, offset // dtype.itemsize)
        return self._views[key]

    def barrier(self, turn: int) -> None:
        """Let the current stream wait for those of all ranks, see ``SignalBarrier``."""
        self._barrier.wait(turn, raw_stream(self._device))

    def address(self, rank: int) -> int:
        """Where the buffer of ``rank`` begins, for this GPU."""
        return self._begins[rank]

    def fetch(self, rows: Sequence[tuple[int, int]], fetches: Sequence[Fetch]) -> None:
        """Copy each rank's part to its row, on the current stream, in any order. The caller keeps targets alive."""
        copies = [
            (target + row * stride, self._begins[rank] + offset, nbytes)
            for rank, row in rows
            for offset, target, stride, nbytes in fetches
        ]
        enqueue_copies(copies, raw_stream(self._device))


def copy_bytes(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each contiguous tensor on a GPU into one of its size and dtype on the same GPU, on the current stream. GEMMs
    beside it lose less time than with torch's foreach kernel (28 MiB on an H200: 7 to 20 us instead of 18 to 28)."""
    pairs = zip(targets, sources, strict=True)
    copies = [(target.data_ptr(), source.data_ptr(), target.nbytes) for target, source in pairs]
    if copies:
        enqueue_copies(copies, raw_stream(targets[0].device))


def end_void_recording(device: torch.device, pool: tuple[int, int]) -> None:
    """After a recording into this pool that failed: if CUDA has ended it as void, end it for torch, too. There
    ``CUDAGraph.capture_end`` raises before it tells the allocator and the random generator (torch 2.11)."""
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:
        return  # torch has told the allocator
    torch._C._cuda_releasePool(index, pool)
    counter = torch.zeros(1, device=device)
    # Another recording, which ends in order, tells the generator.
    graph = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
    with torch.cuda.stream(torch.cuda.current_stream(device)), graph:
        counter.add_(1)
