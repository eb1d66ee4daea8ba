"""A report as text: on one screen, or each parameter and each launch by itself."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from .._comm.debug import format_nbytes
from .columns import in_columns, paragraph
from .facts import Facts, PlanReport, ReportRow
from .fold import Element, Line, Repeat, fold, lines_of

_MOST_ROWS = 18
_MOST_NAMES = 4  # in a sentence
_MOST_TIED = 3  # names of one parameter
_LAUNCHES = 46  # the column where the launches of a plan begin


def summary(facts: Facts, width: int) -> str:
    """The screen: at most ``width`` columns, and as few lines as the model allows."""
    lines = [f"gtp_shard on {facts.mesh}", *_parameters(facts, width)]
    lines += _section("memory of this rank", _memory(facts), width)
    lines += _section("chosen", _choices(facts), width)
    lines += _section("schedule", _schedule(facts.plans), width)
    lines += _section("next", facts.advice, width)
    return "\n".join(lines)


def full_text(facts: Facts, width: int) -> str:
    """Each parameter and each launch by itself."""
    lines = [f"gtp_shard on {facts.mesh}", *table(facts.rows, True, width)]
    lines += _section("memory of this rank", _memory(facts), width)
    lines += _section("chosen", [*facts.choices, *facts.prediction], width)
    plans = [plan_text(plan, True, width) for plan in facts.plans]
    return "\n".join((*lines, *(plans or ["schedule: not observed yet"]), *_section("next", facts.advice, width)))


def _section(title: str, texts: Sequence[str], width: int) -> Iterator[str]:
    if texts:
        yield title
    for text in texts:
        yield from paragraph(text, width, "  ")


def _parameters(facts: Facts, width: int) -> Iterator[str]:
    """The sharded weights as a table, without the columns that are the same in all lines; the others in a sentence."""
    rows = list(_grouped(folded_rows([row for row in facts.rows if row.gathered_nbytes], False)))
    cells: list[tuple[str, ...]] = [("weight", "shape", "dtype", "placements", "this rank", "use")]
    cells += ((*folded.cells, folded.row.use.partition(", ")[0]) for folded in rows[:_MOST_ROWS])
    same = []
    if len(cells) > 2:
        same = [k for k in (2, 3, 5) if len({line[k] for line in cells[1:]}) == 1]
    shown = [[cell for k, cell in enumerate(line) if k not in same] for line in cells]
    if rows:
        yield from (f"  {line}" for line in in_columns(shown, width - 2))
    if left := rows[_MOST_ROWS:]:
        nbytes = format_nbytes(sum(times * row.local_nbytes for _, times, row in left))
        yield f"  ... and {sum(times for _, times, _ in left)} more weights ({nbytes} on this rank)"
    if same:
        yield f"  all: {', '.join(cells[1][k] for k in same)}"
    for reason, whole in groupby(sorted(facts.rows, key=_why_whole), _why_whole):
        if reason:
            members = list(whole)
            names = ranges([row.name for row in members])
            more = ""
            if len(names) > _MOST_NAMES:
                more = f" and {len(names) - _MOST_NAMES} more kinds"
            nbytes = format_nbytes(sum(row.local_nbytes for row in members))
            said = f"{reason}: {len(members)} ({nbytes}): {', '.join(names[:_MOST_NAMES])}{more}"
            yield from paragraph(said, width, "  ")


def _why_whole(row: ReportRow) -> str:
    """Why a parameter is not sharded; empty if it is."""
    if row.gathered_nbytes:
        return ""
    return row.use


def _grouped(rows: Sequence[FoldedRow]) -> Iterator[FoldedRow]:
    """Neighbours of one module that differ in their names alone as one: ``layers.0-31.attention.{wk,wv}.weight``."""
    for (times, row), members in groupby(rows, lambda folded: (folded.times, folded.row)):
        for name in short_names([member.name for member in members]):
            num = 1
            if "{" in name:
                num = name.count(",") + 1
            yield FoldedRow(name, times * num, row)


def _choices(facts: Facts) -> list[str]:
    """The choices, and what is special about the use of a weight, once for all weights that have it."""
    special: dict[str, list[str]] = {}
    for row in facts.rows:
        _, _, told = row.use.partition(", ")
        what, is_reasoned, _ = told.partition(": ")
        is_told = is_reasoned and any(line.startswith(f"{what} of ") for line in facts.choices)
        if told and row.gathered_nbytes and not is_told:
            special.setdefault(told, []).append(row.name)
    lines = []
    for told, members in special.items():
        names = ranges(members)
        if len(names) <= _MOST_NAMES:
            of = ", ".join(names)
        else:
            of = f"{len(members)} weights"
        lines.append(f"{of}: {told}")
    return [*facts.choices, *lines, *facts.prediction]


def _memory(facts: Facts) -> list[str]:
    lines = [f"parameters: {format_nbytes(facts.local_nbytes)}, in shards and whole"]
    most = [(name, facts.most_gathered(is_backward)) for is_backward, name in ((False, "forward"), (True, "backward"))]
    if seen := [f"{format_nbytes(nbytes)} in {name}" for name, nbytes in most if nbytes is not None]:
        lines.append(f"gathered weights at one time: at most {', '.join(seen)}")
    if not seen and facts.largest_nbytes:
        lines.append(f"largest gathered weight: {format_nbytes(facts.largest_nbytes)}")
    if facts.symmetric_nbytes:
        lines.append(f"{format_nbytes(facts.symmetric_nbytes)} of memory that peers copy from (no allocator counts it)")
    if facts.peak_nbytes:
        lines.append(f"most allocated so far: {format_nbytes(facts.peak_nbytes)} (torch.cuda.max_memory_allocated)")
    return lines


def _schedule(plans: Sequence[PlanReport]) -> list[str]:
    if not plans:
        return ["not observed yet"]
    lines = []
    for plan in plans:
        lines.append(f"{plan.title}: {len(plan.uses)} weight uses; {_launches(plan)}")
        if plan.kept:
            lines.append(plan.kept)
    lines += dict.fromkeys(plan.window for plan in plans)
    order = ranges(plans[0].uses)
    if len(order) <= _MOST_ROWS:
        return [*lines, f"order: {', '.join(order)}"]
    return lines


def _launches(plan: PlanReport) -> str:
    sizes = [launch.nbytes for step in plan.launches for launch in step]
    if plan.is_on_demand:
        return "each weight is gathered when it is used"
    if not sizes:
        return "nothing is gathered"
    return f"gathers in {len(sizes)} launch{'es' * (len(sizes) > 1)}, up to {format_nbytes(max(sizes))}"


class FoldedRow(NamedTuple):
    """Rows of equal blocks as one: the name has ranges ("layers.0-31.wq.weight"), and ``row`` is that of one block."""

    name: str
    times: int
    row: ReportRow

    @property
    def dtype(self) -> str:
        """And how it is stored: "float32 (native mxfp8)"."""
        return str(self.row.dtype).removeprefix("torch.") + (f" ({self.row.storage})" if self.row.storage else "")

    @property
    def local(self) -> str:
        """What this rank holds, of 32 blocks: "32 x 1.0 MiB"."""
        nbytes = format_nbytes(self.row.local_nbytes)
        if self.times > 1:
            return f"{self.times} x {nbytes}"
        return nbytes

    @property
    def cells(self) -> tuple[str, ...]:
        """The first cells of its line in a table."""
        shape = "x".join(map(str, self.row.shape)) or "scalar"
        return self.name, shape, self.dtype, self.row.placements, self.local


def folded_rows(rows: Sequence[ReportRow], is_verbose: bool) -> list[FoldedRow]:
    """The rows as they are shown: all of them, or equal blocks as one."""
    lines: Sequence[Element] = [Line(tuple(row.name.split(" = ")), row._replace(name="")) for row in rows]
    folded = []
    for line, times in lines_of(lines if is_verbose else fold(lines)):
        names = line.names
        row = line.rest
        assert isinstance(row, ReportRow)
        if len(names) > _MOST_TIED and not is_verbose:
            names = (*names[:2], f"... ({len(names)} names)")
        folded.append(FoldedRow(" = ".join(names), times, row))
    return folded


def table(rows: Sequence[ReportRow], is_verbose: bool, width: int | None = None) -> list[str]:
    """Lines of the table, and what the parameters take on this rank."""
    cells: list[tuple[str, ...]] = [("parameter", "shape", "dtype", "placements", "per rank", "gathered", "use")]
    for folded in folded_rows(rows, is_verbose):
        gathered = "-"
        if folded.row.gathered_nbytes:
            gathered = format_nbytes(folded.row.gathered_nbytes)
        cells.append((*folded.cells, gathered, folded.row.use))
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
        last = None
        if joined:
            last = joined[-1]
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
        uses = list(islice(rest, step.num_uses))
        launches = [(list(islice(rest, n)), size) for n, size in step.launches]
        if not is_verbose:
            uses = ranges(uses)
            launches = [(ranges(names), size) for names, size in launches]
        texts = [f"{' + '.join(names)}{size}" for names, size in launches]
        use = f"use {', '.join(uses)}" if uses else "begin"
        text = f"{indent + use:<{place}} {'gather ' * bool(texts)}{', '.join(texts)}"
        # several lines, if many weights are in one launch
        if texts:
            after = f"{indent:<{place + 8}}"
        else:
            after = f"{indent}    "
        yield from textwrap.wrap(text, width=width, subsequent_indent=after, break_long_words=False)


def ranges(names: Sequence[str]) -> list[str]:
    """:func:`short_names`, and those of equal blocks as one: ``layers.0-31.attention.{wq,wk}.weight``."""
    return [line.names[0] for line, _ in lines_of(fold([Line((name,), "") for name in short_names(names)]))]


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
    if any(part[:1].isdecimal() for part in parts):
        return ".".join(parts)
    return ""
