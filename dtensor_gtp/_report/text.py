"""A report as text: the table of the parameters, and the plans."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from .._comm.debug import format_nbytes
from .columns import in_columns, paragraph
from .facts import PlanReport, ReportRow
from .fold import Element, Line, Repeat, fold

_MOST_NAMES = 3  # of one tied parameter
_LAUNCHES = 46  # the column where the launches of a plan begin


class FoldedRow(NamedTuple):
    """Rows of equal blocks as one: the name has ranges ("layers.0-31.wq.weight"), and ``row`` is that of one block."""

    name: str
    times: int
    row: ReportRow


def folded_rows(rows: Sequence[ReportRow], is_verbose: bool) -> list[FoldedRow]:
    """The rows as they are shown: all of them, or equal blocks as one."""
    lines = [Line(tuple(row.name.split(" = ")), row._replace(name="")) for row in rows]
    return list(_flat(lines if is_verbose else fold(lines), 1, is_verbose))


def _flat(elements: Sequence[Element], times: int, is_verbose: bool) -> Iterator[FoldedRow]:
    for element in elements:
        if isinstance(element, Repeat):
            yield from _flat(element.body, times * element.times, is_verbose)
        else:
            names, row = element.names, element.rest
            assert isinstance(row, ReportRow)
            if len(names) > _MOST_NAMES and not is_verbose:
                names = (*names[:2], f"... ({len(names)} names)")
            yield FoldedRow(" = ".join(names), times, row)


def table(rows: Sequence[ReportRow], is_verbose: bool, width: int | None = None) -> list[str]:
    """Lines of the table, and what the parameters take on this rank."""
    cells = [("parameter", "shape", "dtype", "placements", "per rank", "gathered", "use")]
    for name, times, row in folded_rows(rows, is_verbose):
        shape, dtype = "x".join(map(str, row.shape)) or "scalar", str(row.dtype).removeprefix("torch.")
        dtype += f" ({row.storage})" if row.storage else ""
        local = f"{times} x " * (times > 1) + format_nbytes(row.local_nbytes)
        gathered = format_nbytes(row.gathered_nbytes) if row.gathered_nbytes else "-"
        cells.append((name, shape, dtype, row.placements, local, gathered, row.use))
    total = format_nbytes(sum(row.local_nbytes for row in rows))
    largest = format_nbytes(max((row.gathered_nbytes for row in rows), default=0))
    return [*in_columns(cells, width), f"{total} of parameters per rank; largest gathered weight {largest}"]


def plan_text(plan: PlanReport, is_verbose: bool = True, width: int = 120) -> str:
    """One line for each use, with the gathers that are launched when it has begun; ``+`` joins the weights of one
    launch. Unless it is verbose, equal blocks are one, uses that launch nothing share a line, and names of a block are
    short: ``layers.0.attention.{wq,wk}.weight``."""
    lines = tuple(plan_lines(plan))
    shown = paragraph(f"{plan.title}: {len(plan.uses)} weight uses; {plan.window}", width)
    shown += _shown(lines if is_verbose else _joined(fold(lines)), "  ", is_verbose, width)
    return "\n".join((*shown, f"  {plan.kept}") if plan.kept else shown)


class _Step(NamedTuple):
    """What a line of a plan has beside its names: those of its uses come first, then those of each launch."""

    num_uses: int  # 0 before the first use
    launches: tuple[tuple[int, str], ...] = ()  # how many weights, and their bytes


def plan_lines(plan: PlanReport) -> Iterator[Line]:
    """The lines of a plan, before they are folded: one for what is launched first, if anything is, and one a use."""
    for step, launches in enumerate(plan.launches):
        use = plan.uses[step - 1 : step] if step else ()
        if plan.is_on_demand:
            if use:
                yield Line((*use, *use), _Step(1, ((1, ""),)))
        elif step or launches:
            names = [plan.uses[position] for launch in launches for position in launch.positions]
            sizes = tuple((len(launch.positions), f" ({format_nbytes(launch.nbytes)})") for launch in launches)
            yield Line((*use, *names), _Step(len(use), sizes))


def _joined(elements: Sequence[Element]) -> tuple[Element, ...]:
    """Consecutive uses that launch nothing as one line."""
    joined: list[Element] = []
    for element in elements:
        if isinstance(element, Repeat):
            joined.append(Repeat(element.times, _joined(element.body)))
            continue
        last = joined[-1] if joined else None
        if isinstance(last, Line) and _is_quiet(last) and _is_quiet(element):
            names = last.names + element.names
            joined[-1] = Line(names, _Step(len(names)))
        else:
            joined.append(element)
    return tuple(joined)


def _is_quiet(line: Line) -> bool:
    step = line.rest
    return isinstance(step, _Step) and not step.launches


def _shown(elements: Sequence[Element], indent: str, is_verbose: bool, width: int) -> Iterator[str]:
    place = min(_LAUNCHES, width // 2 - 8)
    for element in elements:
        if isinstance(element, Repeat):
            yield f"{indent}{element.times} times:"
            yield from _shown(element.body, indent + "| ", is_verbose, width)
            continue
        step = element.rest
        assert isinstance(step, _Step)
        rest = iter(element.names)
        uses, launches = list(islice(rest, step.num_uses)), [(list(islice(rest, n)), size) for n, size in step.launches]
        if not is_verbose:
            uses, launches = ranges(uses), [(ranges(names), size) for names, size in launches]
        texts = [f"{' + '.join(names)}{size}" for names, size in launches]
        use = f"use {', '.join(uses)}" if uses else "begin"
        text = f"{indent + use:<{place}} {'gather ' * bool(texts)}{', '.join(texts)}"
        # several lines, if many weights are in one launch
        after = f"{indent:<{place + 8}}" if texts else f"{indent}    "
        yield from textwrap.wrap(text, width=width, subsequent_indent=after, break_long_words=False)


def ranges(names: Sequence[str]) -> list[str]:
    """:func:`short_names`, and those of equal blocks as one: ``layers.0-31.attention.{wq,wk}.weight``."""
    return [row.names[0] for row in _lines_of(fold([Line((name,), "") for name in short_names(names)]))]


def _lines_of(elements: Sequence[Element]) -> Iterator[Line]:
    for element in elements:
        if isinstance(element, Repeat):
            yield from _lines_of(element.body)
        else:
            yield element


def short_names(names: Sequence[str]) -> list[str]:
    """Consecutive names of one module of a block as one: ``layers.0.attention.{wq,wk}.weight``."""
    short = []
    for owner, group in groupby(names, _owner_in_block):
        members = list(group)
        leaves = [name.removeprefix(f"{owner}.").rpartition(".") for name in members]
        suffixes = {suffix for _, _, suffix in leaves}
        if not owner or len(members) == 1 or len(suffixes) > 1:
            short += members
        else:
            short.append(f"{owner}.{{{','.join(leaf for leaf, _, _ in leaves)}}}.{suffixes.pop()}")
    return short


def _owner_in_block(name: str) -> str:
    """The name of the module that holds the layer; empty if it is not in a numbered block."""
    parts = name.split(".")[:-2]
    return ".".join(parts) if any(part[:1].isdecimal() for part in parts) else ""
