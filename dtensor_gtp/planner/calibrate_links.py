"""What ``--calibrate`` measures under ``torchrun``: gathers and reduce-scatters by size, by the process group and by
copy engines, and how they and GEMMs slow each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from .. import _torch_compat as compat
from .._comm.copy_engine import CopyEngine
from .clock import Clock, Work
from .samples import Beside, Samples

_GPU_SIZES, _CPU_SIZES = (1 << 20, 1 << 26, 1 << 28), (1 << 12, 1 << 16, 1 << 20)
_BESIDE_NBYTES = 1 << 26
_TENSORS = 8


class Links:
    """Measures the links of one group of ranks. Every method is collective over it.

    Args:
        clock: Of this rank's device.
        group: The ranks.
        samples: Where measurements go.
    """

    def __init__(self, clock: Clock, group: dist.ProcessGroup, samples: Samples) -> None:
        self._clock, self._group, self._samples = clock, group, samples
        self._device, self._size = clock.device, group.size()
        self._is_gpu = clock.device.type == "cuda"
        self._sizes = _GPU_SIZES if self._is_gpu else _CPU_SIZES

    def _bytes(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=self._device)

    def _received(self, nbytes: int) -> float:
        return nbytes * (self._size - 1) / self._size

    def _gather(self, nbytes: int, group: dist.ProcessGroup | None = None) -> Work:
        shard = self._bytes(nbytes // self._size)
        output = self._bytes(nbytes // self._size * self._size)
        return partial(compat.all_gather_base, output, shard, group or self._group, False)

    def _reduce(self, nbytes: int, group: dist.ProcessGroup | None = None) -> Work:
        shard = self._bytes(nbytes // self._size)
        full = self._bytes(nbytes // self._size * self._size)
        return partial(compat.reduce_scatter_base, shard, full, dist.ReduceOp.SUM, group or self._group, False)

    def _agreed(self, seconds: float) -> float:
        """The slowest rank's; the same on all ranks."""
        value = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)
        return float(value)

    def _time(self, work: Work, calls: int = 1) -> float:
        return self._agreed(self._clock.time(work, calls))

    def sizes(self, link: str) -> None:
        """Gathers and reduce-scatters by size."""
        for nbytes in self._sizes:
            for kind, make in (("gather", self._gather), ("reduce", self._reduce)):
                self._samples.add(f"{link}: {kind}", self._received(nbytes), self._time(make(nbytes), 4))

    def host(self) -> None:
        """The host's time for a call."""
        shards = self._bytes(256), self._bytes(256 * self._size)
        works: list[dist.Work | None] = []

        def call() -> None:
            works.append(compat.all_gather_base(shards[1], shards[0], self._group, True))

        self._samples.add("host: collective", 1, self._agreed(self._clock.time_host(call)))
        for work in works:
            if work is not None:
                work.wait()

    def copies(self) -> CopyEngine | None:
        """Gathers by copy engines; None if these GPUs have none."""
        if not self._is_gpu:
            return None
        try:
            engine = CopyEngine(self._group, self._device)
        except RuntimeError:  # on all ranks alike
            return None
        engine.cast_stream = self._clock.new_stream()
        for nbytes in self._sizes[1:]:
            seconds = self._time(self._copy(engine, nbytes))
            self._samples.add("copy: gather", self._received(nbytes), seconds)
        for num in (1, _TENSORS):
            self._samples.add("copy: tensors", num, self._time(self._copy(engine, num << 12, num)))
        return engine

    def _copy(self, engine: CopyEngine, nbytes: int, num: int = 1) -> Work:
        """A gather of ``num`` tensors whose shards have been cast: empty ones are not."""
        outputs = [self._bytes(nbytes // num) for _ in range(num)]
        shards = [self._bytes(0) for _ in range(num)]

        def gather() -> None:
            engine.begin_pass()
            engine.all_gather(outputs, shards)

        return gather

    # --- who slows whom -------------------------------------------------------------------------------------------

    def contention(self, engine: CopyEngine | None) -> None:
        """GEMMs beside collectives and copies, and the other way round; two collectives; two kernels."""
        dim = 4096 if self._is_gpu else 64
        a, b, out = (torch.randn(dim, dim, device=self._device).to(torch.bfloat16) for _ in range(3))
        gemm = partial(torch.mm, a, b, out=out)
        gather = self._gather(_BESIDE_NBYTES if self._is_gpu else 1 << 16)
        self._both("gemm_beside_nccl", gemm, "nccl_beside_gemm", gather)
        if engine is not None:
            self._both("gemm_beside_copy", gemm, "copy_beside_gemm", self._copy(engine, _BESIDE_NBYTES))
        big = self._bytes(_BESIDE_NBYTES if self._is_gpu else 1 << 16)
        self._kernels(gemm, partial(big.mul_, 1))
        twin = compat.twin_group(self._group, self._device, "calibrate")
        reduce = self._reduce(_BESIDE_NBYTES if self._is_gpu else 1 << 16, twin)
        self._both("wire", gather, "", reduce)
        self._grouped()

    def _kernels(self, work: Work, other: Work) -> None:
        """Two kernels that take turns on the SMs: the later one to end decides, if alone they take equally long."""
        alone = self._time(work, 4), self._time(other, 4)
        calls = 8
        others = max(round(calls * alone[0] / alone[1]), 1)
        together = self._clock.time_together(work, calls, other, others)
        if together is not None:
            longest = max(calls * alone[0], others * alone[1])
            self._samples.beside["kernel"] = Beside(longest, self._agreed(together))

    def _both(self, first: str, work: Work, second: str, other: Work) -> None:
        """``work`` beside ``other``, and if it has a name, ``other`` beside ``work``."""
        alone = self._time(work, 4), self._time(other, 4)
        pairs: list[tuple[str, Callable[[], object], float, Callable[[], object], float]] = [
            (first, work, alone[0], other, alone[1])
        ]
        if second:
            pairs.append((second, other, alone[1], work, alone[0]))
        for name, timed, seconds, background, one in pairs:
            calls = max(math.ceil(one / seconds), 4)
            # Twice as long as what is timed takes alone, so that it runs to the end of it.
            others = min(math.ceil(2 * calls * seconds / one) + 1, 200)
            beside = self._clock.time_beside(timed, calls, background, others)
            if beside is not None:
                self._samples.beside[name] = Beside(seconds, self._agreed(beside))

    def _grouped(self) -> None:
        """Several tensors in one collective, beside one tensor of as many bytes."""
        nbytes = self._sizes[1]
        shards = [self._bytes(nbytes // _TENSORS // self._size) for _ in range(_TENSORS)]
        outputs = [self._bytes(nbytes // _TENSORS) for _ in range(_TENSORS)]
        several = partial(compat.all_gather_coalesced, outputs, shards, self._group, False)
        one = self._time(self._gather(nbytes), 4)
        self._samples.beside["grouped"] = Beside(one, self._time(several, 4))
