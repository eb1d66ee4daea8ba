"""Folds equal blocks of a model: lines that differ by a counted number in their names alone become one line.

Lines of ``layers.0``, ``layers.1`` and ``layers.2`` become those of ``layers.0-2``. A line may have several names, all
counted together: "use layers.0-29, gather layers.1-30". Blocks within blocks (experts) are folded first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

# Two alike are soon read, and a range hides that there are only two.
_FEWEST = 3
# How many later lines that look alike are tried as the start of the next block.
_TRIED = 8


class Line(NamedTuple):
    """One line. ``names`` are dotted names, in which numbers count; ``rest`` is all else that is equal in a block."""

    names: tuple[str, ...]
    rest: Hashable


class Repeat(NamedTuple):
    """Lines that stand ``times`` times, with ranges instead of the numbers that are counted."""

    times: int
    body: tuple[Line | Repeat, ...]


Element = Line | Repeat


def fold(elements: Sequence[Element]) -> tuple[Element, ...]:
    """``elements`` with each run of three or more equal blocks as one."""
    while True:
        folded = tuple(_Folding(elements).folded())
        if len(folded) == len(elements):
            return folded
        elements = folded


def lines_of(elements: Sequence[Element], times: int = 1) -> Iterator[tuple[Line, int]]:
    """The lines, also within blocks, and how often each stands."""
    for element in elements:
        if isinstance(element, Repeat):
            yield from lines_of(element.body, times * element.times)
        else:
            yield element, times


class _Run(NamedTuple):
    """Blocks of ``period`` elements from ``begin`` on."""

    begin: int
    period: int
    times: int

    @property
    def end(self) -> int:
        return self.begin + self.period * self.times


class _Folding:
    """One pass over the elements. It folds the shortest blocks; the next pass folds what these are part of."""

    def __init__(self, elements: Sequence[Element]) -> None:
        self._elements = elements
        self._forms = [_form(element) for element in elements]
        self._numbers = [tuple(_numbers(element)) for element in elements]
        self._places: dict[Hashable, list[int]] = {}
        for place, form in enumerate(self._forms):
            self._places.setdefault(form, []).append(place)

    def folded(self) -> Iterator[Element]:
        place = 0
        while place < len(self._elements):
            run = self._run_at(place)
            if run is None:
                yield self._elements[place]
                place += 1
                continue
            yield from self._elements[place : run.begin]
            last = run.end - run.period
            body = (
                _with_ranges(self._elements[run.begin + k], iter(self._numbers[last + k])) for k in range(run.period)
            )
            yield Repeat(run.times, tuple(body))
            place = run.end

    def _run_at(self, place: int) -> _Run | None:
        """The run of the shortest blocks at ``place``, or one that begins a little later, where a block begins."""
        alike = self._places[self._forms[place]]
        after = bisect_right(alike, place)
        runs = (_Run(place, other - place, self._times(place, other - place)) for other in alike[after:][:_TRIED])
        best = next((run for run in runs if run.times >= _FEWEST), None)
        if best is None:
            return None
        for begin in range(place, place + best.period):
            run = _Run(begin, best.period, self._times(begin, best.period))
            if run.times >= max(_FEWEST, best.times - 1) and self._is_one_block(run):
                return run
        return best

    def _times(self, begin: int, period: int) -> int:
        """How many blocks of ``period`` elements from ``begin`` on are alike; their numbers count up or down by 1."""
        if begin + 2 * period > len(self._elements):
            return 1
        steps = [self._step(begin + k, begin + k + period) for k in range(period)]
        if any(step is None for step in steps) or {number for step in steps for number in step or ()} not in _COUNTS:
            return 1
        times = 2
        while all(
            self._step(begin + k + (times - 1) * period, begin + k + times * period) == step
            for k, step in enumerate(steps)
        ):
            times += 1
        return times

    def _step(self, place: int, other: int) -> tuple[int, ...] | None:
        """How the numbers change from one element to the next; None if the two differ in more than numbers."""
        if other >= len(self._elements) or self._forms[place] != self._forms[other]:
            return None
        return tuple(b - a for a, b in zip(self._numbers[place], self._numbers[other], strict=True))

    def _is_one_block(self, run: _Run) -> bool:
        """Whether the first number that counts is the same in all elements of a block."""
        leads = set()
        for place in range(run.begin, run.begin + run.period):
            step = self._step(place, place + run.period) or ()
            leads |= set([n for n, by in zip(self._numbers[place], step, strict=True) if by][:1])
        return len(leads) == 1


_COUNTS = ({1}, {0, 1}, {-1}, {0, -1})


def _form(element: Element) -> Hashable:
    """What elements that differ in numbers only have in common."""
    if isinstance(element, Repeat):
        return element.times, tuple(map(_form, element.body))
    names = tuple(tuple("" if part.isdecimal() else part for part in name.split(".")) for name in element.names)
    return names, element.rest


def _numbers(element: Element) -> Iterator[int]:
    for line, _ in lines_of([element]):
        yield from (int(part) for name in line.names for part in name.split(".") if part.isdecimal())


def _with_ranges(element: Element, last: Iterator[int]) -> Element:
    """``element`` with ranges from its own numbers to the ``last`` ones, where they differ."""
    if isinstance(element, Repeat):
        return Repeat(element.times, tuple(_with_ranges(inner, last) for inner in element.body))
    names = (
        ".".join(_range(part, next(last)) if part.isdecimal() else part for part in name.split("."))
        for name in element.names
    )
    return Line(tuple(names), element.rest)


def _range(first: str, last: int) -> str:
    if int(first) == last:
        return first
    return f"{first}-{last}"
