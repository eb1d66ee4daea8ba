"""Measures a machine and writes the file that ``--machine`` takes.

One process measures compute and the host. Under ``torchrun`` it measures links too: gathers and
reduce-scatters by size, by the process group and by copy engines, and how they and GEMMs slow each other. What cannot
be measured stays as in the preset of the GPU, and the file names it. ``clock`` makes the numbers of a machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from .. import _torch_compat as compat
from .._comm.copy_engine import CopyEngine
from .._comm.process_groups import start_alone, world_mesh, world_size
from ..api import gtp_shard
from ..mesh import init_weight_mesh
from ..policy import fixed_policy
from ..quant.casts import casts_for
from ..quant.float8_gemms import Granularity, Operand, product
from .clock import Clock, EventClock, Samples, Work, fitted, new_stream
from .costs import Costs
from .errors import PlanError
from .machine import GIB, Machine, load_machine, preset_names, preset_of, write_text
from .model import Collectives, ModelConfig, Reference
from .program import build_compute
from .recorder import Recorder
from .setting import Setting
from .trace import Part, record_reference, repeated

_GPU_SIZES = (1 << 20, 1 << 26, 1 << 28)
_CPU_SIZES = (1 << 12, 1 << 16, 1 << 20)
_TENSORS = 8


def calibrate(path: Path, *, device_type: str | None = None, clock: Clock | None = None) -> Machine:
    """Measure this machine and write the file ``path``, on the first rank."""
    if os.environ.get("RANK", "0") == "0" and (path.is_dir() or not path.parent.is_dir()):  # before it measures
        raise PlanError(f"calibrate cannot write {path}: there is no such folder, or it is one. Name another place.")
    kind = device_type or "cpu"
    if device_type is None and torch.cuda.is_available():
        kind = "cuda"
    with _meshes(kind) as (mesh, others):
        if kind == "cuda":
            device = torch.device(kind, torch.cuda.current_device())
            clock = clock or EventClock(device)
        else:
            device = torch.device("cpu")
            clock = clock or Clock(device)
        samples = Samples({}, {})
        base = _base(device)
        measure_compute(clock, samples)
        if kind == "cpu":  # it has no data sheet here: the fastest GEMM and the fastest kernel are its peaks
            peak, memory = (max(sample.rate for sample in samples.by_kind[name]) for name in ("bf16 GEMM", "memory"))
            base = replace(base, peak_tflops={"bf16": peak / 1e12}, hbm_gb_s=memory / 1e9)
        engine = None
        on_network = 1
        if mesh.size() > 1:
            base = replace(base, spread=0.1)
            links = Links(clock, mesh.get_group(), samples)
            links.sizes("fast")
            links.host()
            engine = links.copies()
            links.contention(engine)
        if others is not None:
            on_network = others.size()
            Links(clock, others.get_group(), samples).sizes("network")
        measure_host(clock, samples, mesh, has_copies=engine is not None)
        machine = fitted(base, samples, fast=mesh.size(), network=on_network, together=_TOGETHER)
        machine = replace(machine, name=f"{base.name}, measured")
        if dist.get_rank() == 0:
            write_text(path, machine.as_json(), "calibrate")
    return machine


@contextmanager
def _meshes(kind: str) -> Iterator[tuple[DeviceMesh, DeviceMesh | None]]:
    """The ranks of this host, and this rank's peers on others. A process without ``torchrun`` is a group of its own."""
    is_mine = not dist.is_initialized()
    try:
        if is_mine and "MASTER_ADDR" not in os.environ:
            start_alone(kind)
            yield world_mesh(kind), None
            return
        world = world_size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        mesh = init_weight_mesh(kind, replicate=world // local, gtp=local)
        yield mesh["gtp"], mesh["replicate"] if world > local else None
        devices = None
        if kind == "cuda":
            devices = [torch.cuda.current_device()]
        dist.barrier(group=mesh["gtp"].get_group(), device_ids=devices)  # nobody frees memory that a peer still reads
    finally:
        if is_mine and dist.is_initialized():
            dist.destroy_process_group()


def _base(device: torch.device) -> Machine:
    """The preset of the GPU by its name; that of the H100 for CPUs, whose peaks are measured next."""
    if device.type == "cpu":
        base = load_machine("h100")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        return replace(base, name=f"CPU, {os.cpu_count()} cores", memory_gib=memory, reserve_gib=0.0, sources={})
    found = torch.cuda.get_device_name(device)
    if (preset := preset_of(found)) is not None:
        memory = torch.cuda.get_device_properties(device).total_memory / GIB
        sources = {"peaks and what was not measured": f"the preset {preset}", "others": "measured by --calibrate"}
        return replace(load_machine(preset), name=found, memory_gib=memory, sources=sources)
    raise PlanError(
        f"calibrate knows the peaks of {', '.join(preset_names())}, but this GPU is {found!r}. Copy a preset of "
        "dtensor_gtp/planner/machines, fill in its peaks, and pass it as --machine."
    )


class Links:
    """Measures the links of one group of ranks into ``samples``. Every method is collective over it."""

    def __init__(self, clock: Clock, group: dist.ProcessGroup, samples: Samples) -> None:
        self._clock = clock
        self._group = group
        self._samples = samples
        self._device = clock.device
        self._size = group.size()
        self._is_gpu = clock.device.type == "cuda"
        if self._is_gpu:
            self._sizes = _GPU_SIZES
            self._beside = 1 << 26
        else:
            self._sizes = _CPU_SIZES
            self._beside = 1 << 16

    def _bytes(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=self._device)

    def _received(self, nbytes: int) -> float:
        return nbytes * (self._size - 1) / self._size

    def _gather(self, nbytes: int) -> Work:
        shard = self._bytes(nbytes // self._size)
        output = self._bytes(nbytes // self._size * self._size)
        return partial(compat.all_gather_base, output, shard, self._group, False)

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
        for nbytes in self._sizes:
            for kind, make in (("gather", self._gather), ("reduce", self._reduce)):
                self._samples.add(f"{link}: {kind}", self._received(nbytes), self._time(make(nbytes), 4))

    def host(self) -> None:
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
        engine.cast_stream = new_stream(self._device)
        for nbytes in self._sizes[1:]:
            self._samples.add("copy: gather", self._received(nbytes), self._time(self._copy(engine, nbytes)))
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

    def contention(self, engine: CopyEngine | None) -> None:
        """GEMMs beside collectives and copies, and the other way round; two collectives; two kernels."""
        dim = 64
        if self._is_gpu:
            dim = 4096
        a, b, out = (torch.randn(dim, dim, device=self._device).to(torch.bfloat16) for _ in range(3))
        gemm = partial(torch.mm, a, b, out=out)
        gather = self._gather(self._beside)
        self._both("gemm_beside_nccl", gemm, "nccl_beside_gemm", gather)
        if engine is not None:
            self._both("gemm_beside_copy", gemm, "copy_beside_gemm", self._copy(engine, self._beside))
        # Two kernels that take turns on the SMs: the later one to end decides, if alone they take equally long.
        kernel = partial(self._bytes(self._beside).mul_, 1)
        alone = self._time(gemm, 4), self._time(kernel, 4)
        calls = 8
        others = max(round(8 * alone[0] / alone[1]), 1)
        if (together := self._clock.time_with(gemm, calls, kernel, others, joins=True)) is not None:
            longest = max(calls * alone[0], others * alone[1])
            self._samples.add_beside("kernel", longest, self._agreed(together))
        twin = compat.twin_group(self._group, self._device, "calibrate")
        self._both("wire", gather, "", self._reduce(self._beside, twin))
        # Several tensors in one collective, beside one tensor of as many bytes.
        nbytes = self._sizes[1]
        shards = [self._bytes(nbytes // _TENSORS // self._size) for _ in range(_TENSORS)]
        outputs = [self._bytes(nbytes // _TENSORS) for _ in range(_TENSORS)]
        several = partial(compat.all_gather_coalesced, outputs, shards, self._group, False)
        self._samples.add_beside("grouped", self._time(self._gather(nbytes), 4), self._time(several, 4))

    def _both(self, first: str, work: Work, second: str, other: Work) -> None:
        """``work`` beside ``other``, and if it has a name, ``other`` beside ``work``."""
        alone = (work, self._time(work, 4)), (other, self._time(other, 4))
        for name, ((timed, seconds), (background, one)) in ((first, alone), (second, alone[::-1])):
            calls = max(math.ceil(one / seconds), 4)
            # Twice as long as what is timed takes alone, so that it runs to the end of it.
            others = min(math.ceil(2 * calls * seconds / one) + 1, 200)
            if name and (beside := self._clock.time_with(timed, calls, background, others, joins=False)) is not None:
                self._samples.add_beside(name, seconds, self._agreed(beside / calls))


# Rows, inputs, outputs: from small layers to the layers and the head of large models.
_GPU_GEMMS = (
    (512, 1024, 1024),
    (1024, 2048, 2048),
    (2048, 4096, 4096),
    (2048, 4096, 14336),
    (8192, 4096, 14336),
    (8192, 4096, 128256),
)
_CPU_GEMMS = ((64, 128, 128), (128, 256, 256), (256, 256, 512))
_HOST_LAYERS = 64
_HOST_FEATURES = 64
_TOGETHER = 8  # layers of a block: copy engines gather them in one launch, ``fully_shard`` is called on it
_BLOCK = ModelConfig("host", dim=64, layers=2, heads=2, kv_heads=1, head_dim=32, hidden_dim=128, vocab_size=128)


def measure_compute(clock: Clock, samples: Samples) -> None:
    device = clock.device
    is_gpu = clock.device.type == "cuda"
    tiny = torch.zeros(16, device=device)
    num_kernels = 20
    gemms: Sequence[tuple[int, int, int]] = _CPU_GEMMS
    shape = (512, 1024)  # of what kernels between GEMMs read
    heads, tokens, dim = 2, 128, 32  # of attention
    if is_gpu:
        num_kernels = 200
        gemms = _GPU_GEMMS
        shape = (8192, 14336)
        heads, tokens, dim = 32, 4096, 128
    samples.add("kernel", 1, clock.time(lambda: tiny.add_(1), num_kernels))
    for size in gemms:
        _gemms(clock, samples, *size)
    # Kernels between GEMMs: a product, a norm and a cast to bf16; and casts to float8.
    a, b, out = (torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(3))
    wide = a.float()
    scale = b[0].clone()
    samples.add("memory", 3 * a.nbytes, clock.time(lambda: torch.mul(a, b, out=out), 4))
    samples.add("memory", 2 * a.nbytes, clock.time(lambda: F.rms_norm(a, a.shape[1:], scale), 4))
    samples.add("memory", a.nbytes + wide.nbytes, clock.time(lambda: out.copy_(wide), 4))
    if has_float8(device):
        for cast in (casts_for(a).cast_matrix, casts_for(a).cast_rows):
            samples.add("cast", 5 * a.numel(), clock.time(partial(cast, a), 4))
    # Causal attention with its backward; the masked half does not count.
    q, k, v, grad = (torch.randn(1, heads, tokens, dim, device=device).to(torch.bfloat16) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def step() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

    # Two GEMMs of half the tokens squared in forward, five in backward.
    samples.add("attention", 3.5 * 2 * heads * tokens * tokens * dim, clock.time(step, is_sustained=True))


def _gemms(clock: Clock, samples: Samples, rows: int, inputs: int, outputs: int) -> None:
    device = clock.device
    flops = 2.0 * rows * inputs * outputs
    calls = 1
    if rows < 2048:
        calls = 20

    def add(kind: str, work: Callable[[], object]) -> None:
        samples.add(f"{kind} GEMM", flops, clock.time(work, calls, is_sustained=True))

    x, weight = (torch.randn(*shape, device=device).to(torch.bfloat16) for shape in ((rows, inputs), (outputs, inputs)))
    add("bf16", lambda: x @ weight.T)
    if not has_float8(device):
        return
    casts = casts_for(x)
    for granularity, cast in ((Granularity.TENSOR, casts.cast_matrix), (Granularity.ROW, casts.cast_rows)):
        left, right = (Operand(*cast(matrix), granularity) for matrix in (x, weight))
        kind = "float8 rowwise"
        if granularity is Granularity.TENSOR:
            kind = "float8 tensorwise"
        add(kind, partial(product, left, right, torch.bfloat16, on_hardware=True, use_fast_accum=True))


def has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def measure_host(clock: Clock, samples: Samples, mesh: DeviceMesh, *, has_copies: bool) -> None:
    """The host's time for an operation, and for a use of a weight on ``mesh``."""
    tokens = 8  # of a small decoder, which has as many operations as the planner counts
    decoder = Reference(_BLOCK, _BLOCK.kinds, tokens).to(clock.device, torch.bfloat16)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=clock.device)
    collectives = Collectives(Recorder([]), 1, 1, 1)

    def decode() -> None:
        decoder.loss(ids, ids, collectives).backward()
        decoder.zero_grad(set_to_none=True)

    samples.add("host: op", count_operations(tokens), clock.time_host(decode))

    def add(kind: str, model: nn.Module) -> None:
        x = torch.randn(4, _HOST_FEATURES, device=clock.device, requires_grad=True, dtype=torch.bfloat16)

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad(set_to_none=True)

        for _ in range(4):  # which let a schedule settle
            step()
        samples.add(f"host: {kind} layer", _HOST_LAYERS, clock.time_host(step))

    add("plain", _stack(clock.device))
    one_by_one = {"coalesce_nbytes": 0, "coalesce_grad_nbytes": 0}
    by_group = fixed_policy(gather_backend="process_group", reduce_scatter="ring", **one_by_one)
    add("sharded", gtp_shard(_stack(clock.device), mesh, schedule=by_group))
    if has_copies:
        nbytes = _TOGETHER * _HOST_FEATURES**2 * 2
        sizes = {"prefetch_nbytes": nbytes, "coalesce_nbytes": nbytes, "coalesce_grad_nbytes": nbytes}
        by_copies = fixed_policy(gather_backend="copy_engine", reduce_scatter="copy_engine", **sizes)
        add("copied", gtp_shard(_stack(clock.device), mesh, schedule=by_copies))
    layers = list(_stack(clock.device))
    blocks = [nn.Sequential(*layers[begin : begin + _TOGETHER]) for begin in range(0, _HOST_LAYERS, _TOGETHER)]
    stack = nn.Sequential(*blocks)
    for module in (*blocks, stack):
        fully_shard(module, mesh=mesh)
    add("fully_shard", stack)


def count_operations(tokens: int) -> float:
    """For how many operations the planner lets the host work, in a step of the small decoder."""
    trace = repeated(record_reference(_BLOCK, tokens), _BLOCK, Part(tuple(_BLOCK.kinds)))
    machine = load_machine("h100")
    return build_compute(Setting(trace, Costs(machine), fixed_policy())).host_ms * 1e3 / machine.host.op_us


def _stack(device: torch.device) -> nn.Sequential:
    size = _HOST_FEATURES
    layers = (nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16) for _ in range(_HOST_LAYERS))
    return nn.Sequential(*layers)
