"""Command line of the fuzzer, ``python tests/support/fuzz.py``, and the processes that it runs draws in."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
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
_ROUND_TIMEOUT_S = 900


_meshes: list[Meshes] = []  # of this worker


def _connect(rank: int, num_workers: int, file: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    store = dist.FileStore(file, num_workers)
    dist.init_process_group("gloo", rank=rank, world_size=num_workers, store=store, timeout=_COLLECTIVE_TIMEOUT)
    _meshes.append(Meshes())


def _run_round(draws: Sequence[Draw]) -> list[Outcome]:
    return run_round(draws, _meshes[0])


class Workers:
    """``num_workers`` processes that run rounds of draws, made anew after one in which a rank raised."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
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
            of_all = (self.num_workers, file.name)
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
    yield from map(draw_of, seeds)


def describe(outcome: Outcome) -> str:
    """A failure as the report prints it: what several ranks have alike is there once."""
    ranks: dict[str, list[str]] = {}
    for rank, text in outcome.failures.items():
        ranks.setdefault(text, []).append(str(rank))
    parts = [f"rank {', '.join(those)}:\n{text}" for text, those in ranks.items()]
    return "\n".join((f"seed {outcome.draw.seed} failed: {show(outcome.draw)}", *parts))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run draws and shrink those that fail; returns the exit status."""
    options = _arguments(arguments)
    num_draws = num_failed = 0
    with ExitStack() as stack:
        pools: dict[int, Workers] = {}

        def run(draw: Draw) -> Outcome:
            if draw.world not in pools:
                pools[draw.world] = stack.enter_context(closing(Workers(draw.world)))
            return pools[draw.world].run([draw])[0]

        workers = stack.enter_context(closing(Workers(NUM_WORKERS)))
        for draws in rounds(_draws(options), NUM_WORKERS):
            num_draws += len(draws)
            for outcome in filter(lambda outcome: outcome.failures, workers.run(draws)):
                num_failed += 1
                print(describe(outcome), flush=True)
                if kind := kind_of(run(outcome.draw)):
                    smallest = shrink(outcome.draw, lambda smaller, kind=kind: kind_of(run(smaller)) == kind)
                    print("shrunk:", describe(run(smallest)), flush=True)
                else:
                    print("run alone it does not fail: a race, or what an earlier draw left behind", flush=True)
            if num_failed and not options.keep_going:
                break
    print(f"{num_draws} draws, {num_failed} failed")
    return int(num_failed > 0)
