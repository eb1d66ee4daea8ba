"""Copies by the driver: each byte, in eager code, on any stream, and in graphs."""

import unittest
from unittest import mock

import torch

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._torch_compat import driver

SIZES = (0, 1, 3, 4, 515, 4096, 70_001, 1 << 20)


@unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
class TestCopies(unittest.TestCase):
    def setUp(self) -> None:
        torch.manual_seed(0)
        self.source, self.target = (torch.empty(2 * sum(SIZES) + 64, dtype=torch.uint8, device="cuda") for _ in "ab")

    def _parts(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """One behind the other with gaps, most of them not aligned."""
        begins = [2 * sum(SIZES[:index]) + index for index in range(len(SIZES))]
        return [memory[begin : begin + size] for begin, size in zip(begins, SIZES, strict=True)]

    def _draw(self) -> torch.Tensor:
        """What the target is to be after a copy: zeros in the gaps."""
        self.source.random_(0, 256)
        self.target.zero_()
        wanted = torch.zeros_like(self.target)
        for part, source in zip(self._parts(wanted), self._parts(self.source), strict=True):
            part.copy_(source)
        return wanted

    def _copy(self) -> None:
        compat.copy_bytes(self._parts(self.target), self._parts(self.source))

    def test_on_streams(self) -> None:
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            for has_batches in (driver._has_batches(), False):
                wanted = self._draw()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream), mock.patch.object(driver, "_has_batches", return_value=has_batches):
                    self._copy()
                torch.cuda.current_stream().wait_stream(stream)
                self.assertTrue(torch.equal(self.target, wanted))

    def test_in_order_of_the_stream(self) -> None:
        """Between kernels that write what is copied, and overwrite it afterwards."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for value in range(1, 20):
                self.source.fill_(value)
                self._copy()
                self.source.zero_()
                for part in self._parts(self.target):
                    self.assertTrue(part.eq(value).all().item())

    def test_in_a_graph(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._copy()
        with torch.cuda.graph(graph):
            self._copy()
        for _ in range(3):
            wanted = self._draw()
            graph.replay()
            self.assertTrue(torch.equal(self.target, wanted))
