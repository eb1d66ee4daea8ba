"""The sum over ranks as one kernel has the bits of torch's, on one GPU.

Without a GPU, but with Triton, its interpreter adds:
``TRITON_INTERPRET=1 python -m pytest tests/cuda/test_cuda_addends.py`` (Triton 3.6 needs numpy < 2.4 for it).
"""

import itertools
import os
import unittest
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from cuda_common import kernels_of, no_waits
from torch.distributed import ReduceOp

from dtensor_gtp._comm import addends, reductions
from dtensor_gtp._comm.collectives import ReduceScale
from dtensor_gtp._comm.reductions import Scattering
from dtensor_gtp.ops import linear

HAS_GPU = torch.cuda.is_available() and torch.version.hip is None
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if HAS_GPU else (torch.float16,)
# Of gradients that travel together: less than a block, whole ones, no multiple of anything, none, more than a launch.
SIZES = ([2], [16], [4096, 1024], [1000, 24], [3001], [17, 0, 1500, 1, 3000, 5], [2048, 16, 4096, 32, 1040])


def in_order(rows: torch.Tensor, factor: float) -> torch.Tensor:
    """The arithmetic that ``triton_addends`` states."""
    parts = [torch.zeros_like(rows[0], dtype=torch.float32) for _ in range(4)]
    for rank, row in enumerate(rows):
        parts[rank % 4] = parts[rank % 4] + row.float()
    return (((parts[0] + parts[1]) + parts[2]) + parts[3]) * torch.tensor(factor, device=rows.device)


def by_torch(rows: torch.Tensor, factor: float) -> torch.Tensor:
    return (torch.sum if factor == 1.0 else torch.mean)(rows, 0, dtype=torch.float32)


def addends_of(num_ranks: int, numel: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
    """Of all ranks, ``offset`` elements behind an aligned address: magnitudes far apart, negative zeros, denormals, an
    infinity."""
    generator = torch.Generator().manual_seed(100 * num_ranks + numel)
    exponents = torch.randint(-8, 6, (num_ranks, numel), generator=generator)
    values = torch.randn(num_ranks, numel, generator=generator) * torch.exp2(exponents)
    values[:, 0] = -0.0
    values[:, 1] *= 2.0**-22 if dtype == torch.float16 else 2.0**-128
    values[-1, numel // 2] = float("inf")
    memory = torch.empty(num_ranks * numel + offset, dtype=dtype, device=DEVICE)
    rows = memory[offset:].view(num_ranks, numel)
    rows.copy_(values)
    return rows


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def cases() -> Iterator[tuple[int, list[int], torch.dtype, int]]:
    if HAS_GPU:
        return itertools.product(range(2, 9), SIZES, DTYPES, (0, 1))
    return itertools.product((2, 3, 6), SIZES, DTYPES, (0,))


@unittest.skipUnless(HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1", "nothing runs Triton's kernels")
class TestBits(unittest.TestCase):
    def test_sum_and_mean(self) -> None:
        """This rank is the first, one in between, the last."""
        from dtensor_gtp._comm.triton_addends import add  # needs Triton

        for case in cases():
            num_ranks, sizes, dtype, offset = case
            rows = addends_of(num_ranks, sum(sizes), dtype, offset)
            for factor in (1.0, 1 / num_ranks):
                expected = in_order(rows, factor)
                if HAS_GPU:
                    self.assertTrue(torch.equal(bits(expected), bits(by_torch(rows, factor))), ("torch", factor, *case))
                for rank in (0, num_ranks // 2, num_ranks - 1):
                    peers = torch.cat([rows[:rank], rows[rank + 1 :]])
                    # Each of them aligned, or just as the rows are.
                    own = [part.clone() if offset == 0 else part for part in rows[rank].split(sizes)]
                    out = torch.full((sum(sizes) + 1,), float("nan"), device=DEVICE)
                    add(out[:-1], peers, own, rank, num_ranks, factor)
                    self.assertTrue(torch.equal(bits(out[:-1]), bits(expected)), (factor, rank, *case))
                    self.assertTrue(out[-1].isnan(), ("beyond the end", factor, rank, *case))


@unittest.skipUnless(HAS_GPU, "needs a GPU")
class TestOnOneGPU(unittest.TestCase):
    def _kernel(self, num_ranks: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Any:
        kernel = addends.fused_sum(torch.empty(1, dtype=dtype, device=device), num_ranks)
        self.assertIsNotNone(kernel, addends._verdicts())
        return kernel

    def test_the_gemm_adds_products_in_float32(self) -> None:
        """Into any layout, without memory for the product: microbatches are summed so."""
        for dtype in (torch.bfloat16, torch.float16):
            left = torch.randn(1024, 512, dtype=dtype, device="cuda")
            right = torch.randn(512, 2048, dtype=dtype, device="cuda")
            start = torch.randn(1024, 2048, device="cuda")
            expected = start.double() + left.double() @ right.double()
            for total in (start.clone(), start.t().contiguous().t(), torch.cat([start, start], 1)[:, :2048]):
                linear._multiply_into(total.clone(), left, right, is_accumulating=True)  # cuBLAS takes its workspace
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                linear._multiply_into(total, left, right, is_accumulating=True)
                self.assertLess(torch.cuda.max_memory_allocated() - before, start.nbytes)
                torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-3)

    def test_is_taken(self) -> None:
        for num_ranks in range(2, 9):
            for dtype in DTYPES:
                self._kernel(num_ranks, dtype)
        self._kernel(63)
        like = torch.empty(1, device="cuda")
        self.assertIsNone(addends.fused_sum(like, 64))
        self.assertIsNone(addends.fused_sum(like.double(), 2))

    def test_scattering_has_the_bits_of_torch(self) -> None:
        """What an exchange by NCCL has left, with the kernel and without, gradients of several shapes."""
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            for shape in ((12, 5), (12, 1, 7), (4 * 128, 1024)):
                full = torch.randn(shape, device="cuda").bfloat16()
                slot = self._check_slots(self._kernel(4), full, 4, op)
                self.assertEqual(slot.shape, (shape[0] // 4, *shape[1:]))

    def _check_slots(self, kernel: Any, full: torch.Tensor, num_ranks: int, op: Any, **options: Any) -> torch.Tensor:
        slots = []
        for taken in (kernel, None):
            with mock.patch.object(reductions, "fused_sum", lambda like, num_ranks, taken=taken: taken):
                scattering = Scattering("all_to_all", [full], num_ranks, torch.bfloat16, **options)
            received = scattering.keep()[-1]
            received.copy_(full.view(num_ranks, -1)[-len(received) :])  # with a kernel, without the own row
            scattering.finish(ReduceScale(op, None, None))
            slots += scattering.slots
        self.assertTrue(torch.equal(bits(slots[0]), bits(slots[1])), (op, full.shape))
        return slots[0]

    def test_a_kernel_that_was_loaded_adds_what_torch_can(self) -> None:
        """A gradient that travels as it is, beside torch's sum of the same."""
        numel = addends._MANY_NBYTES // 2 // 2 + 1
        rows = torch.randn(2, numel, device="cuda").bfloat16()
        kernel = mock.Mock(side_effect=self._kernel(2))
        for number, op in enumerate((ReduceOp.SUM, ReduceOp.AVG), start=1):
            self._check_slots(kernel, rows.flatten(), 2, op, dtype=torch.float32)
            self.assertEqual(kernel.call_count, number)

    def test_cuda_graph_and_number_of_kernels(self) -> None:
        """One kernel for gradients that travel together, in a graph too, which may be the first to see their sizes."""
        kernel = self._kernel(4)
        for sizes in ([4096, 1024, 64], [1001, 7, 30]):
            rows = addends_of(4, sum(sizes), torch.bfloat16, 0)
            own = [part.clone() for part in rows[1].split(sizes)]
            peers = torch.cat([rows[:1], rows[2:]])
            out = torch.zeros(sum(sizes), device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kernel(out, peers, own, 1, 4, 0.25)
            peers *= 2
            for part in own:
                part *= 2
            graph.replay()
            self.assertTrue(torch.equal(bits(out), bits(by_torch(rows * 2, 0.25))), sizes)
            events = kernels_of(partial(kernel, out, peers, own, 1, 4, 0.25))
            self.assertEqual(len(events), 1, events)

    def test_first_use_in_a_graph(self) -> None:
        """Torch adds there, and nothing is tried. The next one outside tries, and may wait where that is watched."""
        like = torch.empty(1, dtype=torch.bfloat16, device="cuda")
        addends._verdicts.cache_clear()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            like.add_(1)
            self.assertIsNone(addends.fused_sum(like, 5))
        with no_waits():
            self._kernel(5)

    def test_last_gpu_and_streams(self) -> None:
        """The kernel runs where the tensors are, on the current stream."""
        device = f"cuda:{torch.cuda.device_count() - 1}"
        kernel = self._kernel(2, device=device)
        rows = addends_of(2, 4096, torch.bfloat16, 0).to(device)
        out = torch.zeros(4096, device=device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            late = rows + 1
            kernel(out, late[1:], [late[0]], 0, 2, 0.5)
        stream.synchronize()
        self.assertTrue(torch.equal(bits(out), bits(by_torch(rows + 1, 0.5))))
