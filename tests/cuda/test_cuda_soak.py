"""Memory over a thousand steps of changing lengths: after the first two hundred nothing grows, and nothing falls apart,
but for one of the allocator's smallest segments, which tensors that the host collects late may ask for.

With evaluations between the steps, eagerly and as CUDA graphs; over NCCL on 2 to 8 GPUs, or with collectives that copy
on one. A run takes less than a minute.
"""

import gc
import random
import unittest
from typing import Any

import pytest
import torch
from cuda_common import COPY_ENGINES, NUM_RANKS, CudaTest
from test_cuda_streams import VOCABULARY, WORLD_SIZE, make_job, one_of
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

# Tokens of a step, of two microbatches: activations of a block have 1 to 8 MiB, and each length a size of its own.
LENGTHS = (2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384)
NUM_STEPS, NUM_SETTLED = 1000, 200
SMALLEST_SEGMENT = 2 << 20
# How much what the allocator says may grow by.
LIMITS = {
    "allocated_bytes.all.current": 0,
    "reserved_bytes.all.current": SMALLEST_SEGMENT,
    "inactive_split_bytes.all.current": SMALLEST_SEGMENT,
}


def random_tokens(length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (length,), device="cuda")


def length_of(step: int, draw: random.Random) -> int:
    """Each one twice at first, so that all graphs are recorded; the longest one before memory is looked at."""
    if step in (NUM_SETTLED - 1, NUM_STEPS - 1):
        return LENGTHS[-1]
    return LENGTHS[step % len(LENGTHS)] if step < 3 * len(LENGTHS) else draw.choice(LENGTHS)


def check_memory(test: unittest.TestCase, mesh: DeviceMesh, is_captured: bool, **options: Any) -> None:
    """Compare what the allocator says after a thousand steps with what it says after two hundred."""
    gc.collect()  # of what was before, nothing may be left that this could grow into
    torch.cuda.empty_cache()
    num_retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    model, step = make_job(mesh, is_captured, **options)
    draw = random.Random(0)
    seen: list[dict[str, int]] = []
    for index in range(NUM_STEPS):
        step(random_tokens(length_of(index, draw)))
        if index % 25 == 10:
            model.eval()
            with torch.no_grad():
                model(random_tokens(LENGTHS[index // 25 % len(LENGTHS)] // 2))  # all of them in what settles
            model.train()
        if index + 1 in (NUM_SETTLED, NUM_STEPS):
            torch.cuda.synchronize()
            gc.collect()
            seen.append(torch.cuda.memory_stats())
    settled, last = seen
    for name, limit in LIMITS.items():
        test.assertLessEqual(last[name], settled[name] + limit, f"{name} of {options}")
    test.assertGreater(settled["reserved_bytes.all.current"], settled["allocated_bytes.all.current"])
    test.assertEqual(last.get("num_alloc_retries", 0), num_retries)
    if is_captured:
        test.assertEqual(step.num_graphs, len(LENGTHS))  # type: ignore[attr-defined]


@pytest.mark.soak
@unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
class TestSoak(unittest.TestCase):
    """On one GPU, as one of four ranks whose collectives copy."""

    def test_steps(self) -> None:
        for is_captured in (False, True):
            with one_of(WORLD_SIZE) as mesh, self.subTest(is_captured=is_captured):
                check_memory(self, mesh, is_captured=is_captured)


@pytest.mark.soak
@instantiate_parametrized_tests
@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestSoakNCCL(CudaTest):
    @parametrize("is_captured", (False, True))
    @parametrize("has_copy_engines", (False, True))
    def test_steps(self, is_captured: bool, has_copy_engines: bool) -> None:
        check_memory(self, self.gtp_mesh(), is_captured=is_captured, **(COPY_ENGINES if has_copy_engines else {}))
