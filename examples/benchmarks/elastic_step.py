"""Times training on replicas of unequal sizes beside equal ones, and the way from the one to the other, in one job.

    torchrun --nproc-per-node 8 examples/benchmarks/elastic_step.py --json elastic.json
    torchrun --nproc-per-node 4 examples/benchmarks/elastic_step.py --preset tiny     # also on a CPU, in seconds

One model in three modes, each step with the optimizer:

- ``uniform``: two replicas of half of the processes each, on a (replicate, gtp) mesh;
- ``elastic``: the same processes through ``nonuniform_mesh`` and ``synchronize_replicas``. Its time over that of
  ``uniform`` is what sums by segments cost. The two take turns;
- ``degraded``: the last process has failed, the second replica has one rank less. Every process that is left works on
  as many sequences as before.

Between the last two lies a recovery in memory: the ranks that are left regroup, build the model on the new mesh, and
take parameters and both moments of AdamW over from what they hold; those of the rank that is gone come from the other
replica. Sums of all bits of every tensor are compared before and after. The process that plays the lost rank leaves
its groups and waits for the end of the job at a store: it has no part in anything.
"""

import argparse
import dataclasses
import faulthandler
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from dtensor_gtp import elastic, gtp_shard
from harness import World, allocate_workspaces, init_world, local_tensor, median, release_memory, time_steps
from launch import UsageError, run
from llama import Llama, LlamaConfig
from modes import PRESETS, Workload, build_model
from report import describe, environment, markdown_table, write_json

MODES = ("uniform", "elastic", "degraded")
_REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LEARNING_RATE = 1e-5
# What the lost rank is waited for when the others regroup: without a watch nobody knows that it will not come.
_GRACE_S = 2.0
_DEFAULT_LAYERS = {"llama8b-width": 32, "tiny": 2}
_DEFAULT_SEQ_LEN = {"llama8b-width": 4096, "tiny": 32}
# What a run on 8 GPUs, as 4 + 4 and then 4 + 3, should reach.
_MAX_OVERHEAD, _MIN_EFFICIENCY, _MAX_RECOVERY_S = 0.03, 0.95, 10.0
_GOALS = {
    "overhead": f"<= {_MAX_OVERHEAD} of a step over uniform",
    "efficiency": f">= {_MIN_EFFICIENCY} of the throughput of equal replicas, by rank",
    "recovery_s": f"< {_MAX_RECOVERY_S:g} s",
    "is_bit_equal": "1",
}

Replicas = tuple[tuple[int, ...], ...]


class Job(NamedTuple):
    """A model on its mesh.

    Args:
        mode: one of :data:`MODES`.
        replicas: the ranks of each.
        world: the processes that take part.
        tokens: this process's sequences, of shape (sequences, tokens + 1).
        mesh: of elastic modes.
    """

    mode: str
    replicas: Replicas
    world: World
    model: Llama
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    mesh: elastic.ElasticMesh | None = None

    def step(self) -> torch.Tensor:
        """Forward, backward, optimizer; returns the loss."""
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def backward(self) -> torch.Tensor:
        inputs, targets = self.tokens[:, :-1].contiguous(), self.tokens[:, 1:]
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.detach()


def make_workload(options: argparse.Namespace) -> Workload:
    preset = dataclasses.asdict(PRESETS[options.preset])
    del preset["layers"], preset["seq_lens"]
    layers = options.layers or _DEFAULT_LAYERS[options.preset]
    config = LlamaConfig(num_layers=layers, max_seq_len=options.seq_len or _DEFAULT_SEQ_LEN[options.preset], **preset)
    return Workload(config, options.batch, options.seed, {})


def tokens_of(workload: Workload, world: World, rows: slice) -> torch.Tensor:
    """Rows of a batch that is the same in all modes; one with fewer processes ends earlier."""
    config = workload.config
    generator = torch.Generator().manual_seed(workload.seed)
    shape = (workload.batch * world.size, config.max_seq_len + 1)
    return torch.randint(config.vocab_size, shape, generator=generator)[rows].to(world.device)


def build(mode: str, replicas: Replicas, workload: Workload, world: World, options: argparse.Namespace) -> Job:
    """The model of a mode with its initial weights; that of ``degraded`` has memory, but no values yet."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=_REDUCE_DTYPES[options.reduce_dtype])
    device = world.device.type
    rows = slice(world.rank * workload.batch, (world.rank + 1) * workload.batch)
    mesh = None
    if mode == "uniform":
        weights = init_device_mesh(device, (len(replicas), len(replicas[0])), mesh_dim_names=("replicate", "gtp"))
        model = gtp_shard(build_model(workload, world), weights, mp_policy=policy)
    else:
        mesh = elastic.nonuniform_mesh(device, replicas=replicas)
        if mode == "degraded":
            with torch.device("meta"):
                model = Llama(workload.config)
            gtp_shard(model, mesh.weights, mp_policy=policy)
            model.to_empty(device=world.device)
            model.rope.reset_buffers()
        else:
            model = gtp_shard(build_model(workload, world), mesh.weights, mp_policy=policy)
        sync = elastic.synchronize_replicas(model, mesh)
        share = mesh.rebalance_batch(workload.batch * world.size)
        sync.set_batch(share)
        rows = share.rows
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
    return Job(mode, replicas, world, model, optimizer, tokens_of(workload, world, rows), mesh)


def first_step(job: Job) -> dict[str, float]:
    """Loss over all sequences and norm of the gradient, on which modes of one batch agree."""
    loss = job.world.mean(job.backward().item())
    norm = nn.utils.get_total_norm([p.grad for p in job.model.parameters() if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    job.optimizer.step()
    job.optimizer.zero_grad()
    if not math.isfinite(loss):
        raise ArithmeticError(f"mode {job.mode} has a loss of {loss}: times of such a step mean nothing.")
    return {"loss": loss, "grad_norm": norm.item()}


def measure(jobs: list[Job], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times the jobs in turns. All have the same processes."""
    world = jobs[0].world
    first = [first_step(job) for job in jobs]
    samples: list[list[float]] = [[] for _ in jobs]
    for turn in range(options.rounds):
        for job, of_job in zip(jobs, samples, strict=True):
            for _ in range(options.warmup if turn == 0 else 1):
                job.step()
            of_job += time_steps(job.step, world, options.steps, free_running=False)
    results = []
    for job, of_job, known in zip(jobs, samples, first, strict=True):
        ms, sequences = median(of_job), options.batch * world.size
        layout = [len(ranks) for ranks in job.replicas]
        tokens = sequences * (job.tokens.size(1) - 1)
        speed = {"ms": ms, "tokens_per_s": tokens / ms * 1e3, "samples_ms": of_job}
        results.append({"mode": job.mode, "replicas": layout, "sequences": sequences, **speed, **known})
        world.say(f"{job.mode}, replicas of {layout}: {ms:.1f} ms")
    return results


# --- from one layout to the next --------------------------------------------------------------------------------------


def state_of(job: Job) -> dict[str, Any]:
    """What would be saved, the memory of the job itself."""
    model, optimizer = get_state_dict(job.model, job.optimizer)
    return {"model": model, "optimizer": optimizer}


def digest_of(job: Job, state: dict[str, Any]) -> list[int]:
    """Of every sharded tensor the sum of its bits as whole numbers, over this process's replica: integers add up to the
    same in every order, so it does not depend on how the tensor is cut."""
    assert job.mesh is not None
    sums = []
    for value in _tensors(state):
        local = local_tensor(value)
        is_counted = not value.placements[0].is_replicate() or job.mesh.place.gtp == 0
        bits = local.contiguous().view(torch.int32).sum(dtype=torch.int64)
        sums.append(bits if is_counted and local.numel() else torch.zeros_like(bits))
    digest = torch.stack(sums)
    dist.all_reduce(digest, group=job.mesh.weights.get_group())
    return digest.tolist()


def _tensors(state: dict[str, Any]) -> Iterator[DTensor]:
    for value in state.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, DTensor):
            yield value


def received_bytes(held: elastic.HeldState, wanted: elastic.HeldState) -> int:
    """Bytes of the new layout that this process does not have."""
    total = 0
    for path, (box, part) in wanted.tensors.items():
        own = box.intersect(held.tensors[path][0])
        total += (box.numel - (own.numel if own is not None else 0)) * part.element_size()
    return total


class Clock:
    """Seconds of the parts of a recovery, each that of the slowest process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str, device: torch.device) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds[name] = time.perf_counter() - start

    def slowest(self, world: World) -> dict[str, float]:
        return dict(zip(self.seconds, world.slowest(self.seconds.values()), strict=True))


def recover(
    job: Job, before: list[int], store: dist.Store, workload: Workload, options: argparse.Namespace
) -> tuple[Job, dict[str, Any]]:
    """Goes on without the last process, which must not call this.

    Args:
        before: the digest of the state, to which all processes have contributed.

    Returns:
        the job on the ranks that are left, and what it took.
    """
    world, clock, device = job.world, Clock(), job.world.device
    assert job.mesh is not None
    state = state_of(job)
    held = elastic.hold_state(state, step=1)
    layout = job.mesh.layout
    del job, state
    release_memory(world)
    with clock.part("regroup", device):
        survivors = elastic.regroup(
            layout, world.rank, store, generation=0, grace=timedelta(seconds=_GRACE_S), timeout=timedelta(minutes=2)
        )
        world = World(survivors.rank, survivors.num_ranks, device, dist.new_group(backend="gloo"))
    with clock.part("rebuild", device):
        job = build("degraded", survivors.replicas, workload, world, options)
        state = state_of(job)
    world.barrier()
    with clock.part("transfer", device):
        elastic.recover_state(held, state, job.mesh)
    with clock.part("load", device):
        set_state_dict(job.model, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    state = state_of(job)
    is_equal = world.slowest([digest_of(job, state) != before])[0] == 0
    world.barrier()
    with clock.part("transfer_again", device):
        elastic.recover_state(held, state, job.mesh)
    seconds = clock.slowest(world)
    received = received_bytes(held, elastic.hold_state(state, step=1))
    total, most = world.mean(received) * world.size, world.slowest([received])[0]
    nbytes = sum(value.numel() * value.element_size() for value in _tensors(state))
    result = {
        "seconds": seconds,
        "total_s": sum(seconds[name] for name in ("regroup", "rebuild", "transfer", "load")) - _GRACE_S,
        "state_bytes": nbytes,
        "moved_bytes": total,
        "moved_bytes_of_fullest_rank": most,
        "gb_per_s": total / seconds["transfer"] / 1e9,
        "gb_per_s_of_fullest_rank": most / seconds["transfer"] / 1e9,
        "gb_per_s_again": total / seconds["transfer_again"] / 1e9,
        "is_bit_equal": is_equal,
    }
    return job, result


def sit_out(store: dist.Store) -> None:
    """What the lost rank does. Like the others it aborts its communicators: to destroy them could wait for peers."""
    dist.distributed_c10d._abort_process_group()
    store.wait(["end"], timedelta(minutes=10))
    store.set("left", "1")


def open_store(world: World) -> dist.Store:
    """A store of rank 0's process, which is not the one that is lost; that of the job's groups ends with them."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if world.rank == 0 else None
    ports = [store.port if store is not None else 0]
    dist.broadcast_object_list(ports, group=world.control)
    return store if store is not None else dist.TCPStore(host, ports[0], is_master=False)


def close_store(store: dist.Store, world: World) -> None:
    """The lost rank is told to end, and has heard it, before the store ends with its process."""
    if world.rank == 0:
        store.set("end", "1")
        store.wait(["left"], timedelta(seconds=20))
    world.barrier()


# --- the whole --------------------------------------------------------------------------------------------------------


def run_all(world: World, options: argparse.Namespace, report: Callable[[dict[str, Any]], None]) -> None:
    """Measures everything and reports after each part, so that what is there is not lost with what fails later."""
    workload = make_workload(options)
    content: dict[str, Any] = {"environment": environment(world), "workload": dataclasses.asdict(workload)}
    names = ("preset", "steps", "warmup", "rounds", "reduce_dtype")
    content |= {"settings": {n: getattr(options, n) for n in names}, "results": [], "recovery": None, "errors": {}}
    world.say(describe(content["environment"]))
    allocate_workspaces(world)
    store = open_store(world)

    def equal_replicas() -> tuple[Job, list[int], list[dict[str, Any]]]:
        jobs = []
        half = world.size // 2
        replicas = (tuple(range(half)), tuple(range(half, world.size)))
        for mode in MODES[:2]:
            jobs.append(build(mode, replicas, workload, world, options))
            release_memory(world)
        results = measure(jobs, options)
        return jobs[1], digest_of(jobs[1], state_of(jobs[1])), results

    with limited(options):
        found, error = world.guarded("equal replicas", equal_replicas)
    if found is None:
        content["errors"]["equal replicas"] = error
        report(content)
        return
    job, before, content["results"] = found
    report(content)
    del found
    release_memory(world)
    world.barrier()
    if world.rank == world.size - 1:
        del job
        release_memory(world)
        sit_out(store)
        return
    with limited(options):
        job, content["recovery"] = recover(job, before, store, workload, options)
    report(content)
    release_memory(world)
    with limited(options):
        measured, error = job.world.guarded("degraded", lambda: measure([job], options))
    content["results"] += measured or []
    if error is not None:
        content["errors"]["degraded"] = error
    content |= compare(content)
    report(content)
    world.say("\n" + summary(content))
    close_store(store, job.world)


@contextmanager
def limited(options: argparse.Namespace) -> Iterator[None]:
    """Ends the process with a trace of all threads if the block takes too long."""
    faulthandler.dump_traceback_later(options.limit, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def compare(content: dict[str, Any]) -> dict[str, Any]:
    """The figures that the goals are about, and whether they are reached."""
    by_mode = {result["mode"]: result for result in content["results"]}
    if len(by_mode) < len(MODES):
        return {}
    uniform, same, degraded = (by_mode[mode] for mode in MODES)
    throughput = degraded["tokens_per_s"] / uniform["tokens_per_s"]
    share = sum(degraded["replicas"]) / sum(uniform["replicas"])
    figures = {
        "overhead": same["ms"] / uniform["ms"] - 1,
        "throughput": throughput,
        "efficiency": throughput / share,
        "recovery_s": content["recovery"]["total_s"],
    }
    goals = {
        "overhead": figures["overhead"] <= _MAX_OVERHEAD,
        "efficiency": figures["efficiency"] >= _MIN_EFFICIENCY,
        "recovery_s": figures["recovery_s"] < _MAX_RECOVERY_S,
        "is_bit_equal": content["recovery"]["is_bit_equal"],
    }
    return {"figures": figures, "goals": goals}


def summary(content: dict[str, Any]) -> str:
    results, recovery = content["results"], content["recovery"]
    uniform = results[0]
    lines = [
        [
            r["mode"],
            " + ".join(map(str, r["replicas"])),
            str(r["sequences"]),
            f"{r['ms']:.1f}",
            f"{r['tokens_per_s']:.0f}",
            f"{r['ms'] / uniform['ms']:.3f}",
            f"{r['tokens_per_s'] / uniform['tokens_per_s']:.3f}",
        ]
        for r in results
    ]
    header = ["mode", "replicas", "sequences", "ms/step", "tokens/s", "x ms", "x tokens/s"]
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in recovery["seconds"].items())
    text = [
        markdown_table(header, lines),
        f"\nrecovery of {recovery['state_bytes'] / 1e9:.1f} GB of state, {recovery['moved_bytes'] / 1e9:.1f} GB of it "
        f"sent: {recovery['total_s']:.2f} s, without the {_GRACE_S:g} s that regroup waits for the lost rank",
        f"({seconds})",
        f"transfer {recovery['gb_per_s']:.1f} GB/s, into the fullest rank {recovery['gb_per_s_of_fullest_rank']:.1f}, "
        f"done again {recovery['gb_per_s_again']:.1f}; bits {'equal' if recovery['is_bit_equal'] else 'DIFFER'}",
    ]
    for name, is_reached in content.get("goals", {}).items():
        value = content["figures"].get(name, recovery["is_bit_equal"])
        text.append(f"{name} {value:.3f} (goal {_GOALS[name]}: {'reached' if is_reached else 'MISSED'})")
    text += [f"{name} FAILED: {error}" for name, error in content["errors"].items()]
    return "\n".join(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", choices=_DEFAULT_LAYERS, default="llama8b-width")
    add("--layers", type=int, help="default: 32, which is an 8B model; 2 of tiny")
    add("--seq-len", type=int, metavar="T", help="tokens per sequence; default: 4096; 32 of tiny")
    add("--batch", type=int, default=1, help="sequences per process")
    add("--steps", type=int, default=8, help="timed steps of each round; their median is reported")
    add("--warmup", type=int, default=3, help="steps before them")
    add("--rounds", type=int, default=2, help="how often the modes take turns")
    add("--reduce-dtype", choices=_REDUCE_DTYPES, default="bf16", help="of the gradient reduction")
    add("--limit", type=float, default=120.0, help="seconds after which a part that hangs is ended")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write everything measured")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    world = init_world(options.device)
    if world.size < 4 or world.size % 2:
        raise UsageError(f"elastic_step.py expects an even number of at least 4 processes, but got {world.size}.")
    last: dict[str, Any] = {"errors": {}}

    def report(content: dict[str, Any]) -> None:
        last.update(content)
        if options.json is not None and world.rank == 0:
            write_json(options.json, content)

    run_all(world, options, report)
    if last["errors"]:
        raise RuntimeError(f"failed: {last['errors']}")


if __name__ == "__main__":
    run(main)
