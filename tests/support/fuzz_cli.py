"""Command line of the fuzzer: ``python tests/support/fuzz.py``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import fuzz
from fuzz import Draw, draw_of, problem_of, show
from fuzz_run import Outcome, rounds
from fuzz_shrink import Workers, kind_of, shrink


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train random models under random compositions beside one process.")
    parser.add_argument("--seed", type=int, action="append", help="run the draw of this seed (may be repeated)")
    parser.add_argument("--draw", action="append", help="run this draw: a Draw(...) expression as the report prints it")
    parser.add_argument("--start", type=int, default=0, help="first seed of a long run")
    parser.add_argument("--count", type=int, default=200, help="number of seeds of a long run")
    parser.add_argument("--workers", type=int, default=4, choices=(1, 2, 4), help="processes, and most ranks of a draw")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first draw that fails")
    parser.add_argument("--no-shrink", action="store_true", help="report a failing draw as it is")
    parser.add_argument("--verbose", action="store_true", help="print every draw and its time")
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
    yield from (draw for draw in map(draw_of, seeds) if draw.world <= options.workers)


def describe(outcome: Outcome) -> str:
    """A failure as the report prints it: what several ranks have alike is there once."""
    ranks: dict[str, list[str]] = {}
    for rank, text in outcome.failures.items():
        ranks.setdefault(text, []).append(str(rank))
    parts = [f"rank {', '.join(those)}:\n{text}" for text, those in ranks.items()]
    return "\n".join((f"seed {outcome.draw.seed} failed: {show(outcome.draw)}", *parts))


class _Shrinker:
    """Workers for draws of each size."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._workers: dict[int, Workers] = {}

    def run(self, draw: Draw) -> Outcome:
        if draw.world not in self._workers:
            self._workers[draw.world] = self._stack.enter_context(Workers(draw.world))
        return self._workers[draw.world].run([draw])[0]

    def shrink(self, draw: Draw) -> None:
        kind = kind_of(self.run(draw))
        if not kind:
            print("run alone it does not fail: a race, or what an earlier draw left behind", flush=True)
            return
        smallest = shrink(draw, lambda smaller: kind_of(self.run(smaller)) == kind, lambda _: None)
        print("shrunk:", describe(self.run(smallest)), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run draws; returns the exit status."""
    options = _arguments(arguments)
    num_draws = num_failed = 0
    begin = time.perf_counter()
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(options.workers))
        shrinker = _Shrinker(stack)
        for draws in rounds(_draws(options), options.workers):
            before = time.perf_counter()
            outcomes = workers.run(draws)
            num_draws += len(draws)
            if options.verbose:
                print(f"{time.perf_counter() - before:.2f} s: {', '.join(map(show, draws))}", flush=True)
            for outcome in outcomes:
                if outcome.failures:
                    num_failed += 1
                    print(describe(outcome), flush=True)
                    if not options.no_shrink:
                        shrinker.shrink(outcome.draw)
            if num_failed and not options.keep_going:
                break
    print(f"{num_draws} draws, {num_failed} failed, {time.perf_counter() - begin:.0f} s")
    return int(num_failed > 0)
