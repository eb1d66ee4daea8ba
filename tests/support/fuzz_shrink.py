"""Workers that run draws for one process, and the search for a smaller draw that fails in the same way."""

from __future__ import annotations

import logging
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from fuzz import Draw, Layer, Span, problem_of
from fuzz_run import Meshes, Outcome, run_round

# A collective that nobody joins ends after this time; a round that is not done after the other one never will be.
_COLLECTIVE_TIMEOUT = timedelta(minutes=2)
_ROUND_TIMEOUT_S = 900


# --- workers ----------------------------------------------------------------------------------------------------------


def _work(rank: int, num_workers: int, file: str, connection: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    store = dist.FileStore(file, num_workers)
    dist.init_process_group("gloo", rank=rank, world_size=num_workers, store=store, timeout=_COLLECTIVE_TIMEOUT)
    meshes = Meshes()
    while (draws := connection.recv()) is not None:
        connection.send(run_round(draws, meshes))
    dist.barrier()
    dist.destroy_process_group()


class Workers:
    """``num_workers`` processes that run rounds of draws, made anew after one in which a rank raised."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._context = multiprocessing.get_context("forkserver")
        # What takes longest to import. Not the fuzzer's own modules: the server does not know their directory.
        self._context.set_forkserver_preload(
            ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "dtensor_gtp"]
        )
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Workers:
        self._start()
        return self

    def _start(self) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            pass
        for rank in range(self.num_workers):
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(rank, self.num_workers, file.name, theirs), daemon=True)
            process.start()
            theirs.close()  # else the end of a worker that dies would not show
            self._processes.append(process)
            self._connections.append(mine)

    def run(self, draws: Sequence[Draw]) -> list[Outcome]:
        """One round."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send(list(draws))
        if not self._connections[0].poll(_ROUND_TIMEOUT_S):
            self._kill()
            return [Outcome(draw, {0: f"no end after {_ROUND_TIMEOUT_S} s"}, True) for draw in draws]
        try:
            results = [connection.recv() for connection in self._connections]
            outcomes: list[Outcome] = results[0]
        except EOFError:
            outcomes = [Outcome(draw, {0: "a worker died"}, True) for draw in draws]
        if any(outcome.is_raised for outcome in outcomes):
            self._kill()
        return outcomes

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []

    def __exit__(self, *args: Any) -> None:
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(_ROUND_TIMEOUT_S)
        self._kill()


# --- shrinking --------------------------------------------------------------------------------------------------------


def kind_of(outcome: Outcome) -> str:
    """What must stay the same while a draw shrinks: the exception, or that results differ."""
    if not outcome.failures:
        return ""
    if not outcome.is_raised:
        return "difference"
    # The exception's own line: the first that is not indented, after the traceback's heading. Ranks that only waited
    # for the one that raised come last.
    texts = [text for text in outcome.failures.values() if text.startswith("Traceback")]
    lines = [line for text in texts for line in text.splitlines()[1:] if line and not line.startswith(" ")]
    own = [line for line in lines if "Timed out" not in line and "Connection closed" not in line] or lines
    return own[0][:60] if own else "died"


def shrink(draw: Draw, fails: Callable[[Draw], bool], report: Callable[[Draw], None]) -> Draw:
    """A draw that ``fails`` as ``draw`` does, and none of the steps that ``simpler`` knows makes it smaller."""
    while True:
        for candidate in simpler(draw):
            if not problem_of(candidate) and fails(candidate):
                draw = candidate
                report(draw)
                break
        else:
            return draw


def simpler(draw: Draw) -> Iterator[Draw]:
    """Draws that are one step simpler: those that save most come first."""
    yield from (_without_position(draw, position) for position in range(len(draw.order)))
    yield from _fewer_ranks(draw)
    yield from (replace(draw, spans=draw.spans[:i] + draw.spans[i + 1 :]) for i in range(len(draw.spans)))
    for name, value in (("steps", 1), ("steps", draw.steps - 1), ("microbatches", draw.microbatches - 1)):
        if 1 <= value < getattr(draw, name):
            changes: dict[str, Any] = {name: value}
            yield replace(draw, **changes, **({"unsynced": ""} if changes.get("microbatches") == 1 else {}))
    kept = ("seed", "layers", "order", "spans", "axes", "steps", "microbatches", "vocabulary", "width", "nested_axes")
    yield from _defaults(draw, kept)
    for i, layer in enumerate(draw.layers):
        for simple in _defaults(layer, ("kind", "out")):
            yield _with_layer(draw, i, simple)
        if layer.frozen:
            yield _with_layer(draw, i, replace(layer, frozen="", unfrozen_at=0))
        if layer.kind not in ("linear", "embedding"):
            yield _with_layer(draw, i, replace(layer, kind="linear", tp=False))
        if layer.out:
            yield _with_layer(draw, i, replace(layer, out=0))
    for i, span in enumerate(draw.spans):
        if span.kind != "nonreentrant":
            yield replace(draw, spans=(*draw.spans[:i], replace(span, kind="nonreentrant"), *draw.spans[i + 1 :]))


def _defaults(value: Any, kept: tuple[str, ...]) -> Iterator[Any]:
    """``value`` with one field at its default."""
    for field in fields(value):
        if field.name not in kept and getattr(value, field.name) != field.default:
            yield replace(value, **{field.name: field.default})


def _with_layer(draw: Draw, index: int, layer: Layer) -> Draw:
    return replace(draw, layers=(*draw.layers[:index], layer, *draw.layers[index + 1 :]))


def _without_position(draw: Draw, position: int) -> Draw:
    """The program without one position, and without a layer that nothing runs any more."""
    order = draw.order[:position] + draw.order[position + 1 :]
    spans = [
        Span(s.start - (s.start > position), s.stop - (s.stop > position), s.kind)
        for s in draw.spans
        if not (s.start == position and s.stop == position + 1)
    ]
    layers = list(draw.layers)
    gone = draw.order[position]
    vocabulary = draw.vocabulary
    if gone not in order:
        vocabulary = 0 if layers[gone].kind == "embedding" else vocabulary
        ties = [-1 if layer.tied == gone else layer.tied - (layer.tied > gone) for layer in layers]
        layers = [replace(layer, tied=tied) for layer, tied in zip(layers, ties, strict=True)]
        del layers[gone]
        order = tuple(index - (index > gone) for index in order)
    return replace(draw, layers=tuple(layers), order=order, spans=tuple(spans), vocabulary=vocabulary)


def _fewer_ranks(draw: Draw) -> Iterator[Draw]:
    for axis, size in enumerate(draw.axes):
        if size > 1:
            axes = list(draw.axes)
            axes[axis] = size // 2
            num_gtp = axes[1] * axes[2]
            nested = (1, num_gtp) if num_gtp != draw.nested_axes[0] * draw.nested_axes[1] else draw.nested_axes
            yield replace(draw, axes=tuple(axes), nested_axes=nested)
