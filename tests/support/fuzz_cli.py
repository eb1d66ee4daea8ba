"""Command line of the fuzzer, ``python tests/support/fuzz.py``, and the processes that it runs draws in."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta

import fuzz
import torch
import torch.distributed as dist
from fuzz import Draw, problem_of, show
from fuzz_draw import draw_of
from fuzz_run import Meshes, Outcome, rounds, run_round
from fuzz_shrink import kind_of, shrink

NUM_WORKERS = 4  # and most ranks of a draw
# A collective that nobody joins ends after this time; a round that is not done after the other one never will be.
_COLLECTIVE_TIMEOUT = timedelta(minutes=2)
_NCCL_TIMEOUT = timedelta(seconds=90)  # its watchdog ends the process then
_ROUND_TIMEOUT_S = 900


_meshes: list[Meshes] = []  # of this worker


def _connect(rank: int, num_workers: int, file: str, uses_gpus: bool) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    backend = "gloo"
    timeout = _COLLECTIVE_TIMEOUT
    if uses_gpus:
        backend = "cpu:gloo,cuda:nccl"
        timeout = _NCCL_TIMEOUT
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # torch's test modules refuse to change its flags
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")  # of models and batches
    store = dist.FileStore(file, num_workers)
    dist.init_process_group(backend, rank=rank, world_size=num_workers, store=store, timeout=timeout)
    _meshes.append(Meshes())


def _run_round(draws: Sequence[Draw]) -> list[Outcome]:
    return run_round(draws, _meshes[0])


class Workers:
    """``num_workers`` processes that run rounds of draws, made anew after one in which a rank raised."""

    def __init__(self, num_workers: int, *, uses_gpus: bool) -> None:
        self.num_workers = num_workers
        self._uses_gpus = uses_gpus
        self._context = multiprocessing.get_context("forkserver")
        # What takes longest to import. Not the fuzzer's own modules: the server does not know their directory.
        self._context.set_forkserver_preload(
            ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "dtensor_gtp"]
        )
        self._ranks: list[ProcessPoolExecutor] = []  # of one process each

    def run(self, draws: Sequence[Draw]) -> list[Outcome]:
        """One round."""
        if not self._ranks:
            with tempfile.NamedTemporaryFile(delete=False) as file:
                pass
            of_all = (self.num_workers, file.name, self._uses_gpus)
            self._ranks = [
                ProcessPoolExecutor(1, self._context, _connect, (rank, *of_all)) for rank in range(self.num_workers)
            ]
        try:
            running = [rank.submit(_run_round, list(draws)) for rank in self._ranks]
            outcomes, *_ = [future.result(_ROUND_TIMEOUT_S) for future in running]
        except Exception as error:  # of a worker that died, or that waits for one
            outcomes = [Outcome(draw, {0: f"no end: {error!r}"}, True) for draw in draws]
        if any(outcome.is_raised for outcome in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        for rank in self._ranks:
            for process in list(rank._processes.values()):
                process.kill()
            rank.shutdown()
        self._ranks = []


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train random models under random compositions beside one process.")
    parser.add_argument("--seed", type=int, action="append", help="run the draw of this seed (may be repeated)")
    parser.add_argument("--draw", action="append", help="run this draw: a Draw(...) expression as the report prints it")
    parser.add_argument("--start", type=int, default=0, help="first seed of a long run")
    parser.add_argument("--count", type=int, default=200, help="number of seeds of a long run")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first draw that fails")
    parser.add_argument("--gpus", type=int, default=0, help="run on so many GPUs (1, 2 or 4), with delays and poison")
    parser.add_argument("--no-shrink", action="store_true", help="only print draws that fail")
    return parser.parse_args(arguments)


def _draws(options: argparse.Namespace) -> Iterator[Draw]:
    for text in options.draw or ():
        draw: Draw = eval(text, dict(vars(fuzz)))  # an expression that the user gives to a tool for developers
        problem = problem_of(draw)
        if problem:
            raise SystemExit(f"this draw cannot be run: {problem}")
        yield draw
    seeds = options.seed or ()
    if not (options.draw or options.seed):
        seeds = range(options.start, options.start + options.count)
    for seed in seeds:
        draw = draw_of(seed)
        if options.gpus:
            draw = on_gpus(draw)
        if not options.gpus or draw.world <= options.gpus:
            yield draw


def on_gpus(draw: Draw) -> Draw:
    """``draw`` where each stream sleeps at random, so that a missing wait shows. Copy engines gather in a third. Orders
    of ranks and sums of recipes do not depend on streams, and NCCL takes long to connect another mesh."""
    return replace(
        draw,
        debug=f"poison,delay={draw.seed}",
        copies=draw.seed % 3 == 0 and not draw.offload,
        recipe="",
        order_of_axes=(0, 1, 2, 3),
        is_transposed=False,
        flipped=(),
    )


def describe(outcome: Outcome) -> str:
    """A failure as the report prints it: what several ranks have alike is there once."""
    ranks: dict[str, list[str]] = {}
    for rank, text in outcome.failures.items():
        ranks.setdefault(text, []).append(str(rank))
    parts = [f"rank {', '.join(those)}:\n{text}" for text, those in ranks.items()]
    return "\n".join((f"seed {outcome.draw.seed} failed: {show(outcome.draw)}", *parts))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run draws and shrink those that fail, until an interrupt; returns the exit status."""
    options = _arguments(arguments)
    num_draws = num_failed = 0
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        pools: dict[int, Workers] = {}

        def run(draw: Draw) -> Outcome:
            if draw.world not in pools:
                pools[draw.world] = stack.enter_context(closing(Workers(draw.world, uses_gpus=options.gpus > 0)))
            return pools[draw.world].run([draw])[0]

        num_workers = options.gpus or NUM_WORKERS
        workers = stack.enter_context(closing(Workers(num_workers, uses_gpus=options.gpus > 0)))
        for draws in rounds(_draws(options), num_workers):
            num_draws += len(draws)
            for outcome in filter(lambda outcome: outcome.failures, workers.run(draws)):
                num_failed += 1
                print(describe(outcome), flush=True)
                if options.no_shrink:
                    continue
                if kind := kind_of(run(outcome.draw)):
                    smallest = shrink(outcome.draw, lambda smaller, kind=kind: kind_of(run(smaller)) == kind)
                    print("shrunk:", describe(run(smallest)), flush=True)
                else:
                    print("run alone it does not fail: a race, or what an earlier draw left behind", flush=True)
            if num_failed and not options.keep_going:
                break
    print(f"{num_draws} draws, {num_failed} failed")
    return int(num_failed > 0)
