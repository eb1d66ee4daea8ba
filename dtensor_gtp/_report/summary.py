"""A report on one screen: what is sharded, what was chosen and why, memory, the schedule, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from .._comm.debug import format_nbytes
from .columns import in_columns, paragraph
from .facts import Facts, PlanReport, ReportRow
from .text import FoldedRow, folded_rows, plan_text, ranges, short_names, table

_MOST_ROWS = 18
_MOST_NAMES = 4  # in a sentence


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
    cells = [("weight", "shape", "dtype", "placements", "this rank", "use")]
    for name, times, row in rows[:_MOST_ROWS]:
        shape, local = "x".join(map(str, row.shape)) or "scalar", format_nbytes(row.local_nbytes)
        local = f"{times} x {local}" if times > 1 else local
        cells.append((name, shape, _dtype(row), row.placements, local, _use(row)))
    same = [k for k in (2, 3, 5) if len({line[k] for line in cells[1:]}) == 1] if len(cells) > 2 else []
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
            more = f" and {len(names) - _MOST_NAMES} more kinds" if len(names) > _MOST_NAMES else ""
            nbytes = format_nbytes(sum(row.local_nbytes for row in members))
            said = f"{reason}: {len(members)} ({nbytes}): {', '.join(names[:_MOST_NAMES])}{more}"
            yield from paragraph(said, width, "  ")


def _why_whole(row: ReportRow) -> str:
    """Why a parameter is not sharded; empty if it is."""
    return "" if row.gathered_nbytes else row.use


def _dtype(row: ReportRow) -> str:
    return str(row.dtype).removeprefix("torch.") + (f" ({row.storage})" if row.storage else "")


def _use(row: ReportRow) -> str:
    return row.use.partition(", ")[0]


def _grouped(rows: Sequence[FoldedRow]) -> Iterator[FoldedRow]:
    """Neighbours of one module that differ in their names alone as one: ``layers.0-31.attention.{wk,wv}.weight``."""
    for (times, row), members in groupby(rows, lambda folded: (folded.times, folded.row)):
        for name in short_names([member.name for member in members]):
            num = name.count(",") + 1 if "{" in name else 1
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
        of = ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(members)} weights"
        lines.append(f"{of}: {told}")
    return [*facts.choices, *lines, *facts.prediction]


def _memory(facts: Facts) -> list[str]:
    lines = [f"parameters: {format_nbytes(facts.local_nbytes)}, in shards and whole"]
    most = [(name, facts.most_gathered(is_backward)) for is_backward, name in ((False, "forward"), (True, "backward"))]
    if seen := [f"{format_nbytes(nbytes)} in {name}" for name, nbytes in most if nbytes is not None]:
        lines.append(f"gathered weights at one time: at most {', '.join(seen)}")
    largest = max((row.gathered_nbytes for row in facts.rows), default=0)
    if not seen and largest:
        lines.append(f"largest gathered weight: {format_nbytes(largest)}")
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
    return [*lines, f"order: {', '.join(order)}"] if len(order) <= _MOST_ROWS else lines


def _launches(plan: PlanReport) -> str:
    sizes = [launch.nbytes for step in plan.launches for launch in step]
    if plan.is_on_demand:
        return "each weight is gathered when it is used"
    if not sizes:
        return "nothing is gathered"
    return f"gathers in {len(sizes)} launch{'es' * (len(sizes) > 1)}, up to {format_nbytes(max(sizes))}"
