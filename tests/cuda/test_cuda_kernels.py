"""What one use of a weight gives a GPU to do: every kernel and every copy, as the profiler has seen them.

``test_gtp_shard_copies`` counts operators, of which a backend may make any number of kernels. Here the third step of
three layers is profiled, each weight by itself, and every kernel must be one that the use cannot do without.
"""

import unittest
from typing import Any

import torch
import torch.nn as nn
from cuda_common import COPY_ENGINES, NUM_RANKS, CudaTest
from schedules import changed
from test_cuda_streams import WORLD_SIZE, one_of
from test_gtp_shard_copies import BF16, MIXED, SCHEDULE
from torch.distributed.device_mesh import DeviceMesh
from trace_common import trace_of, uses_of

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard

# Large enough for GEMMs to be some, and a multiple of every number of ranks up to 8: no shard is padded.
WIDTH = 840
NUM_GATHERS = (2, 2, 1)  # in forward and backward, but for the last weight, which is kept from one to the other


def step_of(mesh: DeviceMesh, dtype: torch.dtype, policy: MixedPrecisionPolicy, **options: Any) -> dict[str, int]:
    """The uses in a third step."""
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype, device="cuda") for _ in NUM_GATHERS)
    model = gtp_shard(nn.Sequential(*layers), mesh, schedule=changed(SCHEDULE, **options), mp_policy=policy)
    x = torch.randn(256, WIDTH, dtype=BF16, device="cuda", requires_grad=True)
    grad = torch.randn(256, WIDTH, dtype=BF16, device="cuda")

    def step() -> None:
        model(x).backward(grad)

    for _ in range(2):
        step()
        model.zero_grad()
        x.grad = None
    return uses_of(trace_of(step))


def expected(gather: str, reduction: str, is_cast: bool) -> dict[str, int]:
    """A GEMM for the output, one for the input's gradient and one for the weight's, which writes it to where it is sent
    from. ``is_cast``: before each gather the compute stream casts the shard. And nothing outside of the uses."""
    uses = {}
    for index, num_gathers in enumerate(NUM_GATHERS):
        uses[f"all_gather {index}.weight: {gather}"] = num_gathers
        if is_cast:
            uses[f"cast {index}.weight: 1 cast"] = num_gathers
        uses[f"compute {index}.weight: 1 GEMM"] = 2
        uses[f"wgrad {index}.weight: 1 GEMM"] = 1
        uses[f"reduce_scatter {index}.weight: {reduction}"] = 1
    return uses


class KernelTest(unittest.TestCase):
    maxDiff = None

    def check(
        self,
        mesh: DeviceMesh,
        gather: str,
        reduction: str,
        dtype: torch.dtype = torch.float32,
        policy: MixedPrecisionPolicy = MIXED,
        is_cast: bool = False,
        **options: Any,
    ) -> None:
        self.assertEqual(step_of(mesh, dtype, policy, **options), expected(gather, reduction, is_cast))


@unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
class TestKernelsOnOneGPU(KernelTest):
    """One of four ranks whose collectives copy: what is left is the runtime's own."""

    def test_loopback(self) -> None:
        """What stands for a gather copies this rank's rows to the place of each rank; those that were cast into its own
        place lie there already. What stands for a reduce-scatter copies the rows of this rank."""
        with one_of(WORLD_SIZE) as mesh:
            with self.subTest("cast to bf16, gradients in fp32"):
                self.check(mesh, f"{WORLD_SIZE - 1} copy", "1 copy", is_cast=True)
            with self.subTest("bf16 as it is"):
                self.check(mesh, f"{WORLD_SIZE} copy", "1 copy", BF16, MixedPrecisionPolicy())


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestKernels(CudaTest, KernelTest):
    def test_process_group(self) -> None:
        """A kernel of NCCL for each collective. Shards go out as they are, or are cast by one kernel."""
        self.check(self.gtp_mesh(), "1 NCCL", "1 NCCL", is_cast=True)
        self.check(self.gtp_mesh(), "1 NCCL", "1 NCCL", BF16, MixedPrecisionPolicy())

    def test_copy_engines(self) -> None:
        """A gather: the cast into the stage, and a copy from there and from each peer's. A reduction: a copy from each
        peer, and the sum over ranks, which reads this rank's own addend itself. Barriers are no kernels."""
        gather, reduction = f"1 cast, {self.world_size} copy", f"{self.world_size - 1} copy, 1 sum"
        self.check(self.gtp_mesh(), gather, reduction, **COPY_ENGINES)
        self.check(self.gtp_mesh(), gather, "1 NCCL", gather_backend="copy_engine")
        self.check(self.gtp_mesh(), "1 NCCL", reduction, is_cast=True, reduce_scatter="copy_engine")
