"""What ``--calibrate`` measures in one process: GEMMs by format and size, memory, casts, attention, and the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ..api import gtp_shard
from ..policy import fixed_policy
from ..quant.casts import casts_for
from ..quant.float8_gemms import Granularity, Operand, product
from .clock import Clock
from .costs import Costs
from .machine import load_machine
from .model import ModelConfig
from .program import build_compute
from .recorder import Recorder
from .reference import Reference
from .samples import Samples
from .setting import Setting
from .stand_ins import Collectives
from .trace import Part, record_reference, repeated

# Rows, inputs, outputs: from small layers to the layers and the head of large models.
_GPU_SIZES = (
    (512, 1024, 1024),
    (1024, 2048, 2048),
    (2048, 4096, 4096),
    (2048, 4096, 14336),
    (8192, 4096, 14336),
    (8192, 4096, 128256),
)
_CPU_SIZES = ((64, 128, 128), (128, 256, 256), (256, 256, 512))
_HOST_LAYERS, _HOST_FEATURES = 64, 64
# Layers of a block: copy engines gather them in one launch, ``fully_shard`` is called on it.
TOGETHER = 8
_BLOCK = ModelConfig("host", dim=64, layers=2, heads=2, kv_heads=1, head_dim=32, hidden_dim=128, vocab_size=128)


def measure_compute(clock: Clock, samples: Samples) -> None:
    device, is_gpu = clock.device, clock.device.type == "cuda"
    tiny = torch.zeros(16, device=device)
    samples.add("kernel", 1, clock.time(lambda: tiny.add_(1), 200 if is_gpu else 20))
    for size in _GPU_SIZES if is_gpu else _CPU_SIZES:
        _gemms(clock, samples, *size)
    _memory(clock, samples)
    _attention(clock, samples)


def _gemms(clock: Clock, samples: Samples, rows: int, inputs: int, outputs: int) -> None:
    device, flops = clock.device, 2.0 * rows * inputs * outputs
    calls = 20 if rows < 2048 else 1

    def add(kind: str, work: Callable[[], object]) -> None:
        samples.add(f"{kind} GEMM", flops, clock.time(work, calls, is_sustained=True))

    x, weight = (torch.randn(*shape, device=device).to(torch.bfloat16) for shape in ((rows, inputs), (outputs, inputs)))
    add("bf16", lambda: x @ weight.T)
    if not has_float8(device):
        return
    casts = casts_for(x)
    for granularity, cast in ((Granularity.TENSOR, casts.cast_matrix), (Granularity.ROW, casts.cast_rows)):
        left, right = (Operand(*cast(matrix), granularity) for matrix in (x, weight))
        kind = "float8 tensorwise" if granularity is Granularity.TENSOR else "float8 rowwise"
        add(kind, partial(product, left, right, torch.bfloat16, on_hardware=True, use_fast_accum=True))


def has_float8(device: torch.device) -> bool:
    """Whether its tensor cores multiply float8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _memory(clock: Clock, samples: Samples) -> None:
    """Kernels between GEMMs: a product, a norm and a cast to bf16; and casts to float8."""
    shape = (8192, 14336) if clock.device.type == "cuda" else (512, 1024)
    a, b, out = (torch.randn(shape, device=clock.device).to(torch.bfloat16) for _ in range(3))
    wide, scale = a.float(), b[0].clone()
    samples.add("memory", 3 * a.nbytes, clock.time(lambda: torch.mul(a, b, out=out), 4))
    samples.add("memory", 2 * a.nbytes, clock.time(lambda: F.rms_norm(a, a.shape[1:], scale), 4))
    samples.add("memory", a.nbytes + wide.nbytes, clock.time(lambda: out.copy_(wide), 4))
    if has_float8(clock.device):
        casts = casts_for(a)
        samples.add("cast", 5 * a.numel(), clock.time(lambda: casts.cast_matrix(a), 4))
        samples.add("cast", 5 * a.numel(), clock.time(lambda: casts.cast_rows(a), 4))


def _attention(clock: Clock, samples: Samples) -> None:
    """Causal, with its backward; the masked half does not count."""
    heads, tokens, dim = (32, 4096, 128) if clock.device.type == "cuda" else (2, 128, 32)
    shape = (1, heads, tokens, dim)
    q, k, v, grad = (torch.randn(shape, device=clock.device).to(torch.bfloat16) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def step() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

    # Two GEMMs of half the tokens squared in forward, five in backward.
    samples.add("attention", 3.5 * 2 * heads * tokens * tokens * dim, clock.time(step, is_sustained=True))


# --- the host ---------------------------------------------------------------------------------------------------------


def measure_host(clock: Clock, samples: Samples, mesh: DeviceMesh, *, has_copies: bool) -> None:
    """The host's time for an operation, and for a use of a weight on ``mesh``."""
    _operations(clock, samples)

    def add(kind: str, model: nn.Module) -> None:
        samples.add(f"host: {kind} layer", _HOST_LAYERS, clock.time_host(_step_of(model, clock.device)))

    add("plain", _stack(clock.device))
    one_by_one = {"coalesce_nbytes": 0, "coalesce_grad_nbytes": 0}
    by_group = fixed_policy(gather_backend="process_group", reduce_scatter="ring", **one_by_one)
    add("sharded", gtp_shard(_stack(clock.device), mesh, schedule=by_group))
    if has_copies:
        nbytes = TOGETHER * _HOST_FEATURES**2 * 2
        sizes = {"prefetch_nbytes": nbytes, "coalesce_nbytes": nbytes, "coalesce_grad_nbytes": nbytes}
        by_copies = fixed_policy(gather_backend="copy_engine", reduce_scatter="copy_engine", **sizes)
        add("copied", gtp_shard(_stack(clock.device), mesh, schedule=by_copies))
    layers = list(_stack(clock.device))
    blocks = [nn.Sequential(*layers[begin : begin + TOGETHER]) for begin in range(0, _HOST_LAYERS, TOGETHER)]
    stack = nn.Sequential(*blocks)
    for module in (*blocks, stack):
        fully_shard(module, mesh=mesh)
    add("fully_shard", stack)


def _operations(clock: Clock, samples: Samples) -> None:
    """Of a small decoder, as many operations as the planner counts."""
    tokens = 8
    model = Reference(_BLOCK, _BLOCK.kinds, tokens).to(clock.device, torch.bfloat16)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=clock.device)
    collectives = Collectives(Recorder([]), 1, 1, 1)

    def step() -> None:
        model.loss(ids, ids, collectives).backward()
        model.zero_grad(set_to_none=True)

    samples.add("host: op", count_operations(tokens), clock.time_host(step))


def count_operations(tokens: int) -> float:
    """For how many operations the planner lets the host work, in a step of the small decoder."""
    trace = repeated(record_reference(_BLOCK, 1, tokens), _BLOCK, Part(tuple(_BLOCK.kinds)))
    machine = load_machine("h100")
    return build_compute(Setting(trace, Costs(machine), fixed_policy())).host_ms * 1e3 / machine.host.op_us


def _stack(device: torch.device) -> nn.Sequential:
    size = _HOST_FEATURES
    layers = (nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16) for _ in range(_HOST_LAYERS))
    return nn.Sequential(*layers)


def _step_of(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Forward and backward; after a few, which let a schedule settle."""
    x = torch.randn(4, _HOST_FEATURES, device=device, requires_grad=True, dtype=torch.bfloat16)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    for _ in range(4):
        step()
    return step
