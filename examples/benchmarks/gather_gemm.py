"""Experiment: GEMMs that take the rows of a sharded weight as they arrive, beside gathers of the whole weight.

    torchrun --nproc-per-node 4 examples/benchmarks/gather_gemm.py
    torchrun --nproc-per-node 2 examples/benchmarks/gather_gemm.py --preset tiny     # also on a CPU, in seconds

``y = x @ W.T`` with the rows of W spread over the ranks of one host, in symmetric memory, in bf16. First table, ms of

- GEMM: the whole weight is there;
- gather, GEMM: a copy engine brings all rows, then the GEMM: what the first weight of a pass costs;
- by parts: a GEMM for the rows of each rank into its columns of y, its own first, each peer's as they have arrived: no
  weight is ever whole, and the gather is not exposed but for what GEMMs do not hide;
- parts alone: the same GEMMs on rows that are there: what it costs to cut one up;
- torch: ``torch.ops.symm_mem.fused_all_gather_matmul`` with the weight as the gathered operand, which gives ``y.T``.

Second table: the same in a chain of layers in which each is gathered while the one before computes. All but torch's op
is recorded in a CUDA graph, so that no launch of the host is measured; that op is called as it is. Each layer and chain
is printed when it is measured, so that a run that is stopped has told what it knew; the tables come at the end.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtensor_gtp import _torch_compat as compat
from harness import World, init_world, median, release_memory, time_steps
from launch import run
from report import describe, environment, markdown_table, write_json

BF16 = torch.bfloat16
# What one graph holds, so that its launch and a late rank weigh little.
_STEPS_OF_GRAPH = 4
_LARGEST_ERROR = 0.02
# Ways of which all layers and chains are measured, and their columns.
_WAYS = {"gemm": "GEMM", "gather_gemm": "gather, GEMM", "by_parts": "by parts", "parts_alone": "parts alone"}


class Sizes(NamedTuple):
    """Shapes (out_features, in_features) of single layers, those of the layers of chains, and numbers of rows of x."""

    layers: tuple[tuple[int, int], ...]
    chains: tuple[tuple[tuple[int, int], ...], ...]
    tokens: tuple[int, ...]


PRESETS = {
    "llama8b": Sizes(
        ((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096)),
        (((4096, 4096),) * 8, ((14336, 4096), (4096, 14336)) * 4),
        (512, 2048, 8192),
    ),
    "tiny": Sizes(((24, 8), (8, 24)), (((24, 8), (8, 24)) * 2,), (4,)),
}


class Shards:
    """The rows of some weights of this rank, and those of its peers where it can read them.

    Without GPUs the peers' rows are copies, made once.
    """

    def __init__(self, weights: Sequence[torch.Tensor], world: World) -> None:
        self._world = world
        own = [weight.chunk(world.size)[world.rank] for weight in weights]
        if world.is_cuda:
            assert dist.group.WORLD is not None
            nbytes = sum(part.nbytes for part in own)
            memory = compat.SymmetricBuffer(nbytes, world.device, dist.group.WORLD.group_name)
            begins = [sum(part.nbytes for part in own[:index]) for index in range(len(own))]
            self.rows = [
                [memory.view(rank, begin, part.shape, BF16) for rank in range(world.size)]
                for begin, part in zip(begins, own, strict=True)
            ]
            self._memory = memory
        else:
            self.rows = [[torch.empty_like(part) for _ in range(world.size)] for part in own]
        for part, parts in zip(own, self.rows, strict=True):
            if not world.is_cuda:
                dist.all_gather(parts, part.contiguous())
            parts[world.rank].copy_(part)
        world.barrier()

    def barriers(self) -> None:
        """On the current stream: the two that a gather of the library has before its copies."""
        for turn in range(2) if self._world.is_cuda else ():
            self._memory.barrier(turn)


class Unit(NamedTuple):
    """What one GEMM takes: rows of some ranks, the columns of y that they make, and in which order they are copied."""

    parts: Sequence[torch.Tensor]
    columns: slice
    order: Sequence[int]


class Gathering:
    """Layers of a chain, gathered on a stream of its own into buffers that two layers use in turn.

    Args:
        shards: Of all layers.
        by_parts: A unit for each rank, of which this rank's own is not copied; else one for the whole weight.
    """

    def __init__(self, shards: Shards, world: World, by_parts: bool) -> None:
        self._shards, self._world, self._by_parts = shards, world, by_parts
        self._stream = torch.cuda.Stream(world.device, priority=-1) if world.is_cuda else None
        self._units = [self._units_of(parts) for parts in shards.rows]
        largest = max(parts[0].numel() for parts in shards.rows) * world.size
        self._buffers = [torch.empty(largest, dtype=BF16, device=world.device) for _ in range(2)]
        self._free: list[torch.cuda.Event | None] = [None, None]

    def _units_of(self, parts: list[torch.Tensor]) -> list[Unit]:
        rows, size = parts[0].shape[0], self._world.size
        # This rank first and its neighbour next, so that no rank is asked by all at once.
        ranks = [(self._world.rank + step) % size for step in range(size)]
        if not self._by_parts:
            return [Unit(parts, slice(0, rows * size), ranks)]
        return [Unit([parts[peer]], slice(peer * rows, (peer + 1) * rows), [0]) for peer in ranks]

    def _copying(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _fetch(self, layer: int, ready: torch.cuda.Event | None) -> list[tuple[torch.Tensor, Any]]:
        """Start the copies of a layer; for each unit its rows, and when they are there."""
        arriving = []
        with self._copying():
            for event in (ready, self._free[layer % 2]):
                if self._stream is not None and event is not None:
                    self._stream.wait_event(event)
            self._shards.barriers()
            place = 0
            for unit in self._units[layer]:
                shape = unit.columns.stop - unit.columns.start, unit.parts[0].shape[1]
                if self._by_parts and unit.parts[0] is self._shards.rows[layer][self._world.rank]:
                    arriving.append((unit.parts[0], None))
                    continue
                target = self._buffers[layer % 2][place : place + shape[0] * shape[1]].view(shape)
                place += target.numel()
                targets = target.chunk(len(unit.parts))
                for index in unit.order:
                    targets[index].copy_(unit.parts[index])
                arriving.append((target, self._stream and self._stream.record_event()))
        return arriving

    def run(self, x: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        """The whole chain, the first layer exposed, each other gathered behind the one before it."""
        cuda = self._world.is_cuda
        ready = torch.cuda.current_stream(self._world.device).record_event() if cuda else None
        self._free = [None, None]
        arriving = self._fetch(0, ready)
        for layer, output in enumerate(outputs):
            following = self._fetch(layer + 1, ready) if layer + 1 < len(outputs) else []
            for unit, (rows, arrived) in zip(self._units[layer], arriving, strict=True):
                if arrived is not None:
                    torch.cuda.current_stream(self._world.device).wait_event(arrived)
                torch.mm(x, rows.t(), out=output[:, unit.columns])
            if cuda:
                self._free[layer % 2] = torch.cuda.current_stream(self._world.device).record_event()
            x, arriving = output, following


def multiply(x: torch.Tensor, weights: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], parts: int) -> None:
    """A chain of layers whose weights are there, each cut into so many GEMMs."""
    for weight, output in zip(weights, outputs, strict=True):
        for rows, columns in zip(weight.chunk(parts), output.chunk(parts, dim=1), strict=True):
            torch.mm(x, rows.t(), out=columns)
        x = output


def time_in_graph(step: Callable[[], object], world: World, steps: int) -> float:
    """Milliseconds of one step, without the host's launches where there are GPUs."""
    step()
    if not world.is_cuda:
        return median(time_steps(step, world, steps, free_running=True))
    world.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_STEPS_OF_GRAPH):
            step()
    for _ in range(2):
        graph.replay()
    samples = time_steps(graph.replay, world, steps, free_running=True)
    graph.reset()
    return median(samples) / _STEPS_OF_GRAPH


def check(actual: torch.Tensor, expected: torch.Tensor, name: str) -> float:
    """The relative error in the 2-norm.

    Raises:
        ArithmeticError: if it is more than rounding to bf16 in another order of sums makes of a few layers.
    """
    error = ((actual.float() - expected).norm() / expected.float().norm()).item()
    if not error < _LARGEST_ERROR:
        raise ArithmeticError(f"{name} has a relative error of {error}: times of wrong results mean nothing.")
    return error


def fused_op() -> Any:
    """Torch's own op, None if torch lacks it. A module registers it that nothing else may have imported."""
    with suppress(ImportError):
        import_module("torch.distributed._symmetric_memory")
    return getattr(torch.ops.symm_mem, "fused_all_gather_matmul", None)


def time_fused(
    x: torch.Tensor, shard: torch.Tensor, expected: torch.Tensor, world: World, steps: int
) -> tuple[float | None, str | None]:
    """Milliseconds of torch's own op, or why there are none."""
    fused = fused_op()
    if fused is None:
        return None, f"torch {torch.__version__} lacks fused_all_gather_matmul"
    if not world.is_cuda:
        return None, "needs GPUs"
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name

    def step() -> torch.Tensor:
        _, (output,) = fused(shard, [x.t()], 0, name)
        return output

    def work() -> float:
        check(step().t(), expected, "fused_all_gather_matmul")
        for _ in range(2):
            step()
        return median(time_steps(step, world, steps, free_running=True))

    return world.guarded("fused_all_gather_matmul", work)


def measure(shapes: Sequence[tuple[int, int]], tokens: int, world: World, steps: int) -> dict[str, Any]:
    """All ways of one layer or chain; the results of each are held against those of whole GEMMs."""
    generator = torch.Generator(world.device).manual_seed(0)  # the same weights on all ranks

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=world.device, generator=generator, dtype=BF16)

    weights = [draw(rows, columns).mul_(columns**-0.5) for rows, columns in shapes]
    x = draw(tokens, shapes[0][1])
    outputs = [torch.empty(tokens, rows, dtype=BF16, device=world.device) for rows, _ in shapes]
    multiply(x, weights, outputs, 1)
    expected = outputs[-1].clone()
    shards = Shards(weights, world)
    whole, by_parts = Gathering(shards, world, False), Gathering(shards, world, True)
    ways: dict[str, Callable[[], object]] = {
        "gemm": partial(multiply, x, weights, outputs, 1),
        "gather_gemm": partial(whole.run, x, outputs),
        "by_parts": partial(by_parts.run, x, outputs),
        "parts_alone": partial(multiply, x, weights, outputs, world.size),
    }
    record: dict[str, Any] = {"shapes": list(shapes), "tokens": tokens}
    for name, step in ways.items():
        outputs[-1].fill_(float("nan"))
        record[f"{name}_ms"] = time_in_graph(step, world, steps)
        record[f"{name}_error"] = check(outputs[-1], expected, name)
        record[f"{name}_has_same_bits"] = torch.equal(outputs[-1], expected)
    if len(shapes) == 1:
        fused, why = time_fused(x, shards.rows[0][world.rank].clone(), expected, world, steps)
        record |= {"fused_ms": fused, "fused_missing": why}
    return record


def cells(record: dict[str, Any]) -> dict[str, str]:
    """What a table shows of one layer or chain, by column; times are ms."""
    shapes = record["shapes"]
    once = list(dict.fromkeys(shapes))
    name = ", ".join(f"{rows}x{columns}" for rows, columns in once)
    found = {
        "layers": name if len(shapes) == 1 else f"{len(shapes) // len(once)} x ({name})",
        "T": str(record["tokens"]),
    }
    found |= {column: f"{record[f'{way}_ms']:.3f}" for way, column in _WAYS.items()}
    if "fused_ms" in record:
        found["torch"] = "n/a" if record["fused_ms"] is None else f"{record['fused_ms']:.3f}"
    return found | {"same bits": "yes" if record["by_parts_has_same_bits"] else "no"}


def measure_all(
    chains: Sequence[Sequence[tuple[int, int]]], tokens: Sequence[int], world: World, steps: int
) -> list[dict[str, Any]]:
    """Each layer or chain with each number of rows; a line is printed as soon as it is known."""
    records = []
    for shapes in chains:
        for num in tokens:
            records.append(measure(shapes, num, world, steps))
            release_memory(world)  # its weights, buffers and graphs
            world.say("; ".join(f"{column}: {cell}" for column, cell in cells(records[-1]).items()))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="llama8b")
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of rows of x instead of those of the preset")
    parser.add_argument("--steps", type=int, default=5, help="timed calls; their median is reported")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    options = parser.parse_args()
    world, sizes = init_world(options.device), PRESETS[options.preset]
    dist.barrier()  # memory of peers is mapped through a group that has communicated
    about = environment(world)
    world.say(describe(about) + "\n")
    tokens = options.tokens or sizes.tokens
    content: dict[str, Any] = {
        "environment": about,
        "layers": measure_all([(shape,) for shape in sizes.layers], tokens, world, options.steps),
        "chains": measure_all(sizes.chains, tokens, world, options.steps),
    }
    for records in (content["layers"], content["chains"]):
        lines = [list(cells(record).values()) for record in records]
        world.say("\n" + markdown_table(list(cells(records[0])), lines))
    for why in dict.fromkeys(record["fused_missing"] for record in content["layers"] if record["fused_missing"]):
        world.say(f"\ntorch: n/a: {why}")
    if options.json is not None and world.rank == 0:
        write_json(options.json, content)
    world.barrier()


if __name__ == "__main__":
    run(main)
