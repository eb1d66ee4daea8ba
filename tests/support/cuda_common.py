"""What the CUDA tests share: NCCL over all GPUs of one host, with one process for each or as many as RANKS_PER_GPU."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.common_distributed import MultiProcContinuousTest

# For tests that need more ranks than there are GPUs. Slow: the processes of a GPU take turns on it.
RANKS_PER_GPU = int(os.environ.get("RANKS_PER_GPU", "1"))
NUM_RANKS = min(torch.cuda.device_count() * RANKS_PER_GPU, 8) if torch.cuda.is_available() else 0
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def take_gpu(place: int) -> None:
    """Make the GPU of the process with this place on its host the current one.

    Two ranks of a communicator of NCCL cannot share a GPU on one host. So they pretend to be on several, between which
    NCCL uses sockets; the copy engines reach all of them as ever.
    """
    num_gpus = torch.cuda.device_count()
    if RANKS_PER_GPU > 1:
        os.environ["NCCL_HOSTID"] = f"host {place // num_gpus}"
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["LOCAL_RANK"] = str(place % num_gpus)
    torch.cuda.set_device(place % num_gpus)


class CudaTest(MultiProcContinuousTest):
    """Workers are started once per class. Its subclasses are to be skipped where there are fewer than two ranks."""

    world_size = NUM_RANKS

    @classmethod
    def backend_str(cls) -> str:
        return "nccl"

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        take_gpu(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
        super()._init_pg(rank, world_size, rdvz_file)
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())  # it has set the rank
        cls.device_type = "cuda"  # type: ignore[assignment]  # torch's TestCase compares no messages of unknown devices

    def gtp_mesh(self) -> DeviceMesh:
        return init_device_mesh("cuda", (self.world_size,), mesh_dim_names=("gtp",))


def captured(model: nn.Module, run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of ``run`` after three warm-up calls, and what it returns. Gradients are those of the last replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph, output
