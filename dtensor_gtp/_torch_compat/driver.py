"""Operations of streams (CUDA driver API): signals between GPUs, and copies; and memory that several ranks can read.

A kernel that waits for a peer would first wait for a free SM beside a GEMM that fills the GPU. Signals take no SM: the
front end of the GPU executes them in the order of the stream. CUDA graphs can record them. torch has the write
(``stream_write_value32`` of ``_SymmetricMemory``), but waits by a kernel (``wait_signal``, ``barrier``).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from .groups import resolve_group
from .modes import is_stream_capturing

# CUstreamBatchMemOpType, of 32 bits
_WAIT_VALUE = 1
_WRITE_VALUE = 2
_WAIT_EQUAL = 1  # CUstreamWaitValue_flags
_FLAG_NBYTES = 4
_FLAG_ALIGNMENT = 256
_MAX_VIEWS = 1 << 14  # of a symmetric buffer
_IN_ORDER_OF_STREAM = 1  # CUmemcpySrcAccessOrder
_NOT_SUPPORTED = 801  # CUresult
_DEFAULT_KIND = ctypes.c_int(4)  # cudaMemcpyKind: by the addresses

# Target on this GPU, source on any GPU of the host, number of bytes. (A named tuple takes the host longer to make.)
Copy = tuple[int, int, int]


class _Operation(ctypes.Structure):
    """``CUstreamBatchMemOpParams`` for writing and waiting."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("_padding", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("_more_padding", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("_reserved", ctypes.c_uint64),
    )


class _CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``; hints of locations are for managed memory."""

    _fields_ = (("source_access_order", ctypes.c_uint32), ("_hints", ctypes.c_uint32 * 4), ("flags", ctypes.c_uint32))


@functools.cache
def _driver() -> ctypes.CDLL:
    """Raises OSError without a CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that torch has loaded; None if it is part of torch's own libraries."""
    try:
        return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError:
        return None  # then ``enqueue_copies`` always calls the driver


@functools.cache
def _has_batches() -> bool:
    return hasattr(_driver(), "cuMemcpyBatchAsync_v2")


# The handle of the current stream of the GPU with this index, without an object for it, which takes microseconds.
stream_handle: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


def raw_stream(device: torch.device) -> int:
    """``stream_handle`` of a GPU that is in use."""
    return stream_handle(torch.cuda.current_device() if device.index is None else device.index)


@functools.lru_cache(maxsize=1 << 13)
def _batch(copies: tuple[Copy, ...]) -> tuple[Any, ...]:
    """What ``cuMemcpyBatchAsync`` takes before the stream. Most buffers have the same addresses in each step, and the
    host would take longer to make the arrays than for the call."""
    number = len(copies)
    address = ctypes.c_uint64 * number
    size = ctypes.c_size_t * number
    targets, sources, sizes = zip(*copies, strict=True)
    # One set of attributes, from copy 0 on, serves all copies.
    attributes = _CopyAttributes(source_access_order=_IN_ORDER_OF_STREAM)
    first = ctypes.c_size_t(0)
    arrays = address(*targets), address(*sources), size(*sizes), ctypes.c_size_t(number)
    return *arrays, ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)  # ``byref`` keeps them alive


def enqueue_copies(copies: Sequence[Copy], stream: int) -> None:
    """Give the stream of this handle, which is the current one, these copies, of different memory each.

    One call of the driver where possible (``cuMemcpyBatchAsync``, CUDA 13; a graph cannot record it). While a profiler
    records, each copy is a call of the runtime, because a trace does not show who launched copies of the driver.
    """
    driver = _driver()
    handle = ctypes.c_void_p(stream)
    copies = [copy for copy in copies if copy[2]]
    if _profiler_enabled() and (runtime := _runtime()) is not None:
        for target, source, nbytes in copies:
            addresses = ctypes.c_void_p(target), ctypes.c_void_p(source)
            # CUDA returns 0 for success.
            if code := runtime.cudaMemcpyAsync(*addresses, ctypes.c_size_t(nbytes), _DEFAULT_KIND, handle):
                raise RuntimeError(f"cudaMemcpyAsync failed with error {code}")
        return
    # The driver refuses batches on the legacy default stream, whose handle is 0.
    if len(copies) > 1 and stream and _has_batches() and not is_stream_capturing():
        code = driver.cuMemcpyBatchAsync_v2(*_batch(tuple(copies)), handle)
        if not code:
            return
        # Not supported: copy one by one below.
        if code != _NOT_SUPPORTED:
            raise RuntimeError(f"cuMemcpyBatchAsync failed with CUresult {code}")
    for target, source, nbytes in copies:
        code = driver.cuMemcpyAsync(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), handle)
        if code:
            raise RuntimeError(f"cuMemcpyAsync failed with CUresult {code}")


def capture_id(stream: torch.cuda.Stream) -> int:
    """A number, unique in the process, of the recording into a CUDA graph that ``stream`` takes part in."""
    status = ctypes.c_int()
    number = ctypes.c_uint64()
    arguments = (ctypes.byref(status), ctypes.byref(number), None, None, None)
    if code := _driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream.cuda_stream), *arguments):
        raise RuntimeError(f"cuStreamGetCaptureInfo failed with CUresult {code}")
    return number.value


class SignalBarrier:
    """Barriers of some ranks' streams.

    [Note: two sets of flags]
    A barrier writes 1 to this rank's flag at every peer, waits until all of its own flags are 1, and sets them to 0. A
    peer may come to the next barrier before this rank has cleared its flags, so two sets take turns. It cannot come to
    the one after that before this rank. A graph may record an even number of barriers. ``flags`` are the addresses of
    each rank's flags: ``num_flag_bytes(len(flags))`` bytes of zeros.
    """

    def __init__(self, flags: Sequence[int], rank: int) -> None:
        self._turns = [_barrier(flags, rank, turn) for turn in range(2)]  # made once: addresses stay

    def wait(self, turn: int, stream: int) -> None:
        """Let the stream of this handle wait until those of all ranks have come here; ``turn`` alternates (0, 1)."""
        operations = self._turns[turn]
        if code := _driver().cuStreamBatchMemOp_v2(ctypes.c_void_p(stream), len(operations), operations, 0):
            raise RuntimeError(f"cuStreamBatchMemOp failed with CUresult {code}")


def num_flag_bytes(num_ranks: int) -> int:
    return 2 * num_ranks * _FLAG_NBYTES


def _barrier(flags: Sequence[int], rank: int, turn: int) -> ctypes.Array[_Operation]:
    num_ranks = len(flags)
    peers = [(rank + step) % num_ranks for step in range(1, num_ranks)]

    # The flag in the memory of rank ``of`` that ``peer`` sets.
    def flag(of: int, peer: int) -> int:
        return flags[of] + (turn * num_ranks + peer) * _FLAG_NBYTES

    # The stream executes them in this order. Clear follows hear, so no signal of this turn is lost.
    tell = [_Operation(operation=_WRITE_VALUE, address=flag(peer, rank), value=1) for peer in peers]
    hear = [_Operation(operation=_WAIT_VALUE, address=flag(rank, peer), value=1, flags=_WAIT_EQUAL) for peer in peers]
    clear = [_Operation(operation=_WRITE_VALUE, address=flag(rank, peer), value=0) for peer in peers]
    return (_Operation * (3 * len(peers)))(*tell, *hear, *clear)


def symmetric_memory_backend(device: torch.device) -> str | None:
    """What allocates symmetric memory on ``device`` ("CUDA", "NVSHMEM", "NCCL"), None if there is none."""
    try:
        # As torch.distributed._symmetric_memory does. To import that takes a tenth of a second, for ops of its own.
        return torch._C._distributed_c10d._SymmetricMemory.get_backend(device)
    except (AttributeError, RuntimeError):  # a torch without symmetric memory, or no backend for this device
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
        begin = -(-nbytes // _FLAG_ALIGNMENT) * _FLAG_ALIGNMENT  # the flags follow the bytes that callers use
        self.nbytes = nbytes
        self._device = device
        own = memory.empty_strided_p2p((begin + num_flag_bytes(group.size()),), (1,), torch.uint8, device, group_name)
        self._handle = memory.rendezvous(own, group_name)  # collective: the ranks map each other's memory
        self._views: dict[tuple[int, int, torch.Size, torch.dtype], Tensor] = {}
        if self._handle is None:
            raise RuntimeError(f"no symmetric memory for the ranks of process group '{group_name}'")
        own[begin:].zero_()  # flags: a barrier expects zeros
        self._begins = list(self._handle.buffer_ptrs)  # by rank, as this GPU sees them
        self._barrier = SignalBarrier([pointer + begin for pointer in self._begins], group.rank())
        self._handle.barrier(0, 0)  # no peer may signal before the flags are zero
        for turn in range(2):  # so that a driver that refuses does so now
            self.barrier(turn)
        torch.cuda.current_stream(device).synchronize()  # an error of these barriers shows up here
        self._own = own  # this tensor owns the memory of this rank

    def view(self, rank: int, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor in the buffer of ``rank``, ``offset`` bytes from its begin, a multiple of the dtype's size."""
        key = (rank, offset, shape, dtype)
        if key not in self._views:
            if len(self._views) >= _MAX_VIEWS:  # shapes that keep changing would fill it without end
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
    if device.index is None:
        index = torch.cuda.current_device()
    else:
        index = device.index
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:
        return  # torch has told the allocator
    torch._C._cuda_releasePool(index, pool)
    counter = torch.zeros(1, device=device)  # made outside of the recording, so its memory is not in a graph's pool
    # Another recording, which ends in order, tells the generator.
    graph = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
    with torch.cuda.stream(torch.cuda.current_stream(device)), graph:
        counter.add_(1)
