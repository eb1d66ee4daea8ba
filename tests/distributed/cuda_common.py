"""What the CUDA tests share: NCCL over all GPUs of one host, one process for each."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.common_distributed import MultiProcContinuousTest

NUM_GPUS = min(torch.cuda.device_count(), 8) if torch.cuda.is_available() else 0
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class CudaTest(MultiProcContinuousTest):
    """Workers are started once per class. Its subclasses are to be skipped where there are fewer than two GPUs."""

    world_size = NUM_GPUS

    @classmethod
    def backend_str(cls) -> str:
        return "nccl"

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
        super()._init_pg(rank, world_size, rdvz_file)

    def gtp_mesh(self) -> DeviceMesh:
        return init_device_mesh("cuda", (self.world_size,), mesh_dim_names=("gtp",))
