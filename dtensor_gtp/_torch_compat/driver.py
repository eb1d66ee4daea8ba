"""Operations of streams (CUDA driver API): signals between GPUs, and copies.

A kernel that waits for a peer would first wait for a free SM beside a GEMM that fills the GPU. Signals take no SM: the
front end of the GPU executes them in the order of the stream. CUDA graphs can record them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled

from .modes import is_stream_capturing

_WAIT_VALUE, _WRITE_VALUE = 1, 2  # CUstreamBatchMemOpType, of 32 bits
_WAIT_EQUAL = 1  # CUstreamWaitValue_flags
_FLAG_NBYTES = 4
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
        return None


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
    address, size = ctypes.c_uint64 * number, ctypes.c_size_t * number
    targets, sources, sizes = zip(*copies, strict=True)
    attributes, first = _CopyAttributes(source_access_order=_IN_ORDER_OF_STREAM), ctypes.c_size_t(0)
    arrays = address(*targets), address(*sources), size(*sizes), ctypes.c_size_t(number)
    return *arrays, ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)


def enqueue_copies(copies: Sequence[Copy], stream: int) -> None:
    """Give the stream of this handle, which is the current one, these copies, of different memory each.

    One call of the driver where possible (``cuMemcpyBatchAsync``, CUDA 13; a graph cannot record it). While a profiler
    records, each copy is a call of the runtime, because a trace does not show who launched copies of the driver.
    """
    driver, handle = _driver(), ctypes.c_void_p(stream)
    copies = [copy for copy in copies if copy[2]]
    if _profiler_enabled() and (runtime := _runtime()) is not None:
        for target, source, nbytes in copies:
            addresses = ctypes.c_void_p(target), ctypes.c_void_p(source)
            if code := runtime.cudaMemcpyAsync(*addresses, ctypes.c_size_t(nbytes), _DEFAULT_KIND, handle):
                raise RuntimeError(f"cudaMemcpyAsync failed with error {code}")
        return
    if len(copies) > 1 and stream and _has_batches() and not is_stream_capturing():
        code = driver.cuMemcpyBatchAsync_v2(*_batch(tuple(copies)), handle)
        if not code:
            return
        if code != _NOT_SUPPORTED:
            raise RuntimeError(f"cuMemcpyBatchAsync failed with CUresult {code}")
    for target, source, nbytes in copies:
        code = driver.cuMemcpyAsync(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), handle)
        if code:
            raise RuntimeError(f"cuMemcpyAsync failed with CUresult {code}")


def capture_id(stream: torch.cuda.Stream) -> int:
    """A number, unique in the process, of the recording into a CUDA graph that ``stream`` takes part in."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
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
        self._turns = [_barrier(flags, rank, turn) for turn in range(2)]

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

    def flag(of: int, peer: int) -> int:
        return flags[of] + (turn * num_ranks + peer) * _FLAG_NBYTES

    tell = [_Operation(operation=_WRITE_VALUE, address=flag(peer, rank), value=1) for peer in peers]
    hear = [_Operation(operation=_WAIT_VALUE, address=flag(rank, peer), value=1, flags=_WAIT_EQUAL) for peer in peers]
    clear = [_Operation(operation=_WRITE_VALUE, address=flag(rank, peer), value=0) for peer in peers]
    return (_Operation * (3 * len(peers)))(*tell, *hear, *clear)
