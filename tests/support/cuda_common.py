"""What the CUDA tests share: NCCL over all GPUs of one host, with one process for each or as many as RANKS_PER_GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from runtime_common import local
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.common_distributed import MultiProcContinuousTest

from dtensor_gtp import capture_step

# For tests that need more ranks than there are GPUs. Slow: the processes of a GPU take turns on it.
RANKS_PER_GPU = int(os.environ.get("RANKS_PER_GPU", "1"))
NUM_RANKS = min(torch.cuda.device_count() * RANKS_PER_GPU, 8) if torch.cuda.is_available() else 0
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
COPY_ENGINES: dict[str, Any] = {"gather_backend": "copy_engine", "reduce_scatter": "copy_engine"}


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

    def two_by_half(self, *names: str) -> DeviceMesh:
        return init_device_mesh("cuda", (2, self.world_size // 2), mesh_dim_names=names)


class Block(nn.Module):
    """A norm, whose parameters are whole, and two sharded weights."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """The same numbers for the same seed, whatever was drawn before."""
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def square_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().pow(2).mean()


def square_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = square_loss(model, x)
    loss.backward()
    return loss


def assert_same(
    actual: Iterable[torch.Tensor | None], expected: Iterable[torch.Tensor | None], what: object = ""
) -> None:
    """Bit for bit what this rank has of each tensor."""
    for index, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert got is not None, f"{what}: tensor {index} is missing"
        assert want is not None, f"{what}: tensor {index} is expected to be missing"
        assert torch.equal(local(got), local(want)), f"{what}: tensor {index} differs"


def assert_same_grads(model: nn.Module, other: nn.Module, what: object = "") -> None:
    assert_same((param.grad for param in model.parameters()), (param.grad for param in other.parameters()), what)


@contextmanager
def no_waits() -> Iterator[None]:
    """In the block the host may not wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernels_of(call: Callable[[], object]) -> list[str]:
    """All that it gives the GPU to do."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    return [event.name for event in recorded.events() if event.device_type == DeviceType.CUDA]


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    *,
    is_captured: bool = False,
    **options: Any,
) -> Any:
    """A step of its input that returns what ``run`` (forward and backward) does; ``capture_step`` may record it."""

    def step(x: torch.Tensor) -> torch.Tensor:
        result = run(model, x)
        optimizer.step()
        optimizer.zero_grad()
        return result.detach()

    return capture_step(step, model, optimizer, **options) if is_captured else step


def captured(model: nn.Module, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
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
