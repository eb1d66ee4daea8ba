"""``capture_blocks`` on GPUs: graphs of blocks between eager collectives leave the bits of eager steps."""

import gc
import itertools
import unittest
from typing import Any
from unittest import mock

import torch
from common import environment
from cuda_common import COPY_ENGINES, NUM_RANKS, CudaTest, assert_same, no_waits
from runtime_common import runtime_of
from test_cuda_streams import SCHEDULES, WORLD_SIZE, local_values, make_parts, one_of, tokens_of
from torch.distributed.device_mesh import DeviceMesh
from trace_common import graph_kernels, trace_of

from dtensor_gtp import capture_blocks
from dtensor_gtp._comm.context import CommContext
from dtensor_gtp._trace.intervals import intersect, length, union
from dtensor_gtp._trace.read import read_timeline

# Cycles of the SM clock: about 200 ms, far longer than also a busy host takes to launch a block under the profiler.
LATE = 320_000_000


class Job:
    """A model that trains, its blocks in graphs or not."""

    def __init__(self, mesh: DeviceMesh, is_captured: bool, **options: Any) -> None:
        self.model, _, self._step = make_parts(mesh, **options)
        self.captured = capture_blocks(self.model, self.model.blocks) if is_captured else None

    def step(self, seed: int, num_tokens: int = 256) -> torch.Tensor:
        return self._step(torch.cat([tokens_of(2 * seed + microbatch)[:num_tokens] for microbatch in range(2)]))


def check(test: unittest.TestCase, mesh: DeviceMesh, steps: int = 10, is_captured: bool = True, **options: Any) -> Job:
    """Losses, norms and shards of steps with changing data, and of steps of another length between them."""
    job, eager = (Job(mesh, is_captured, **options) for is_captured in (is_captured, False))
    for seed in range(steps):
        num_tokens = 128 if seed % 4 == 3 else 256
        test.assertTrue(torch.equal(job.step(seed, num_tokens), eager.step(seed, num_tokens)), f"step {seed}")
    test.assertEqual(job.captured is not None, is_captured)
    if job.captured is not None:
        test.assertEqual(job.captured.num_graphs, 2 * len(job.model.blocks))
    assert_same(job.model.parameters(), eager.model.parameters())
    test.assertTrue(all(value.isfinite().all() for value in local_values(job.model)))
    return job


def trace_of_late_reductions(mesh: DeviceMesh, is_late: bool) -> dict[str, Any]:
    """Forward and backward with blocks in graphs, where each reduce-scatter of a block begins with a sleep of its
    stream, or waits for the ranks of which it does."""
    job = Job(mesh, is_captured=True, coalesce_grad_nbytes=0)
    for seed in range(3):
        job.step(seed)
    assert job.captured is not None
    assert job.captured.num_graphs == len(job.model.blocks)

    def late(comm: CommContext, name: str, detail: str, groups: object) -> None:
        if is_late and name == "reduce_scatter" and detail.startswith("blocks."):
            torch.cuda._sleep(LATE)

    is_told = mock.patch.object(runtime_of(job.model).comm, "is_debugged", True)
    with is_told, mock.patch.object(CommContext, "before_collective", late):
        return trace_of(lambda: job.model(tokens_of(9)).backward())


def graphs_beside_reductions(test: unittest.TestCase, trace: dict[str, Any], num_blocks: int = 3) -> list[bool]:
    """Of each block but the last, from the one before it on: whether most of its backward runs beside reductions of the
    next block, whose backward came before."""
    spans = read_timeline(trace).spans
    graphs = graph_kernels(trace)
    test.assertEqual(len(graphs), 2 * num_blocks)  # forward of the first one to the last, backward of the last one ...
    is_beside = []
    for block, graph in reversed(list(enumerate(reversed(graphs[num_blocks + 1 :])))):
        backward = union(graph)
        of_next = [span[:2] for span in spans if span.what.startswith(f"reduce_scatter blocks.{block + 1}.")]
        shared = length(intersect(backward, union(of_next)))
        test.assertGreater(len(of_next), 0)
        is_beside.append(shared > length(backward) / 2)
    return is_beside


@unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
class TestCaptureBlocks(unittest.TestCase):
    """On one GPU, as one of four ranks whose collectives copy."""

    def test_blocks_in_graphs_leave_the_bits_of_eager(self) -> None:
        with one_of(WORLD_SIZE) as mesh:
            for name, schedule in SCHEDULES.items():
                for seed in range(2):
                    with self.subTest(f"{name}, delay {seed}"), environment(DTENSOR_GTP_DEBUG=f"poison,delay={seed}"):
                        check(self, mesh, **schedule)
            with self.subTest("all to all"):
                check(self, mesh, reduce_scatter="all_to_all")

    def test_one_rank_and_replicas(self) -> None:
        for shape, debug in itertools.product(((1,), (2, 1), (2, 2)), ("", "poison,delay=0")):
            with self.subTest(f"{shape} {debug}"), environment(DTENSOR_GTP_DEBUG=debug), one_of(*shape) as mesh:
                check(self, mesh)

    def test_replays_never_wait_on_the_host_and_memory_does_not_grow(self) -> None:
        with one_of(WORLD_SIZE) as mesh:
            job = check(self, mesh)
            job.step(0)
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            with no_waits():
                for seed in range(10):
                    job.step(seed)
            torch.cuda.synchronize()
            self.assertEqual((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()), before)

    def test_reductions_run_beside_the_graph_of_the_next_block(self) -> None:
        with one_of(WORLD_SIZE) as mesh:
            self.assertEqual(graphs_beside_reductions(self, trace_of_late_reductions(mesh, is_late=True)), [True, True])

    def test_what_cannot_be_recorded_says_so(self) -> None:
        with one_of(WORLD_SIZE) as mesh:
            job = Job(mesh, is_captured=True)
            job.model.blocks[1].register_buffer("limit", torch.tensor(1.0, device="cuda"))
            inner = job.model.blocks[1].down.forward
            job.model.blocks[1].down.forward = lambda x: inner(x) * job.model.blocks[1].limit.item()
            with self.assertRaisesRegex(RuntimeError, "capture_blocks could not record block 'blocks.1'"):
                for seed in range(3):
                    job.step(seed)


@unittest.skipIf(NUM_RANKS < 2, "needs two GPUs")
class TestCaptureBlocksNCCL(CudaTest):
    def test_blocks_in_graphs_leave_the_bits_of_eager(self) -> None:
        for (name, schedule), debug in itertools.product(SCHEDULES.items(), ("", "poison,delay=0")):
            with self.subTest(f"{name}, {debug}"), environment(DTENSOR_GTP_DEBUG=debug):
                check(self, self.gtp_mesh(), **schedule)  # type: ignore[arg-type]

    def test_fifty_replays_equal_eager_steps(self) -> None:
        """Each graph of two microbatches' blocks, over NCCL and with copy engines."""
        for options in ({}, COPY_ENGINES):
            with self.subTest(f"{options}"):
                check(self, self.gtp_mesh(), steps=54, **options)  # type: ignore[arg-type]

    def test_reductions_run_beside_the_graph_of_the_next_block(self) -> None:
        """On ranks that are not late it is NCCL's kernel that does, which waits for the others. (The first reductions
        come after that of the head, which waits for whoever is behind by then.)"""
        trace = trace_of_late_reductions(self.gtp_mesh(), is_late=self.rank % 2 == 1)
        self.assertIn(True, graphs_beside_reductions(self, trace))  # type: ignore[arg-type]

    def test_some_ranks_replay_what_others_run_with_copy_engines(self) -> None:
        """Places in the send ring and halves of the stage are the same, though gradients of graphs are copied there."""
        for nbytes in (0, 1 << 20):
            options = {**COPY_ENGINES, "coalesce_grad_nbytes": nbytes}
            with environment(DTENSOR_GTP_DEBUG="poison,delay=0"):
                check(self, self.gtp_mesh(), is_captured=self.rank % 2 == 0, **options)
