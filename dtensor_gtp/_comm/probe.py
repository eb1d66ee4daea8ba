"""What the automatic choice of a gather backend measures: gathers beside the GEMMs that they run beside in training.

A gather that is timed alone says nothing about the SMs that it takes from GEMMs. So a few gathers of a weight and as
many GEMMs with a weight of that size are launched on two streams, as in a step with prefetching. What counts is the
time until both are done: that of the gathers where the wire decides, that of the slowed GEMMs where compute does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from ..policy import GatherBackend
from .copy_engine import CastingBackend

# Often enough to get past the first launches.
_ROUNDS = 8


_PAIRS = 4


class ProbeSize(NamedTuple):
    """The GEMM ``x_MK @ w_NK.T`` in bf16, and the gather of such a weight."""

    M: int = 2048
    N: int = 4096
    K: int = 8192

    @property
    def nbytes(self) -> int:
        return self.N * self.K * torch.bfloat16.itemsize


SIZE = ProbeSize()


class Probe:
    """Buffers and streams of the measurement on one rank.

    Args:
        num_ranks: Of the communicator.
        device: Of its tensors.
        gather_stream: On which gathers are launched; None where there are no streams.
    """

    def __init__(self, num_ranks: int, device: torch.device, gather_stream: torch.Stream | None) -> None:
        self._device, self._stream = device, gather_stream
        draw = torch.Generator(device).manual_seed(0)  # training draws what it would draw without this

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(generator=draw)

        self._x_MK, self._w_NK = matrix(SIZE.M, SIZE.K), matrix(SIZE.N, SIZE.K)
        self._y_MN = matrix(SIZE.M, SIZE.N)
        rows = -(-SIZE.N // num_ranks)
        self._shard = matrix(rows, SIZE.K)
        self._output = matrix(num_ranks * rows, SIZE.K)

    def gemm_ms(self) -> float:
        """Median time of a GEMM alone, in milliseconds."""
        return self._time(self._multiply)

    def gather_ms(self, backend: GatherBackend) -> float:
        """Median time of a gather and a GEMM beside each other. Collective."""
        if self._stream is None:
            return self._time(lambda: self._gather_on_host(backend))
        return self._time(lambda: self._gather_on_stream(backend, self._stream))

    def _time(self, run: Callable[[], None]) -> float:
        samples = []
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            run()
            if self._stream is not None:
                torch.accelerator.current_stream(self._device.index).synchronize()
            samples.append((time.perf_counter() - begin) * 1e3 / _PAIRS)
        return median(samples[_ROUNDS // 2 :])

    def _multiply(self, times: int = _PAIRS) -> None:
        for _ in range(times):
            torch.mm(self._x_MK, self._w_NK.t(), out=self._y_MN)

    def _gather_on_host(self, backend: GatherBackend) -> None:
        for _ in range(_PAIRS):
            work = backend.all_gather([self._output], [self._shard])
            self._multiply(1)
            if work is not None:
                work.wait()

    def _gather_on_stream(self, backend: GatherBackend, stream: torch.Stream | None) -> None:
        assert stream is not None
        compute = torch.accelerator.current_stream(self._device.index)
        ready = compute.record_event()
        stream.wait_event(ready)
        if isinstance(backend, CastingBackend):
            backend.begin_pass()
        for _ in range(_PAIRS):
            with stream:
                if isinstance(backend, CastingBackend):
                    backend.all_gather([self._output], [self._shard], ready)
                else:
                    backend.all_gather([self._output], [self._shard])
            self._multiply(1)
        compute.wait_event(stream.record_event())
