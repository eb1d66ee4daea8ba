"""How right times are on published runs, by kind, and how often ranges hold for sources that had no part in them.

    python tests/planner/planner_ranges.py    # writes the table into docs/guides/planner.md

Ranges of ``planner.evaluate`` are set from all rows. To see how far they carry, each source is left out in turn. The
range of a kind is then from the least to the most error of that kind in the other sources, with a margin of 10%, or of
40% where these have fewer than ten rows. Where no other source has the kind, it is that of all kinds together.
"""

import functools
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from planner_accuracy import marked, write_parts

from dtensor_gtp.planner.evaluate import (
    DENSE,
    EIGHT_BIT,
    EXPERTS,
    EXPERTS_APART,
    LONG,
    MIXED,
    Answer,
    Problem,
    evaluate,
    memory_of,
)
from dtensor_gtp.planner.job import Job, Layout
from dtensor_gtp.planner.machine import GIB, Machine, load_machine
from dtensor_gtp.planner.model import PRESETS, ModelConfig

DATA = Path(__file__).parent / "planner_data" / "published_rows.json"
KINDS = (DENSE, MIXED, EIGHT_BIT, LONG, EXPERTS, EXPERTS_APART)
_MARGIN, _MARGIN_OF_FEW, _FEW = 1.1, 1.4, 10


class Row(NamedTuple):
    """A published run: ``factor`` is the time of its step as a share of the predicted one."""

    name: str
    source: str
    kind: str
    factor: float
    holds: bool


@functools.cache
def content() -> Any:
    return json.loads(DATA.read_text())


def _machine(name: str) -> Machine:
    h100 = load_machine("h100")
    if name == "tt":
        return replace(h100.with_limits(watts=500), memory_gib=94.0, hbm_gb_s=2400)
    if name == "h800":
        return replace(h100, fast=replace(h100.fast, gb_s=200), copy=replace(h100.copy, gb_s=200))
    return load_machine(name)


@functools.cache
def answers() -> dict[str, Answer]:
    """What is predicted for the configuration of each row, by its name."""
    models = PRESETS | {name: ModelConfig(name, **sizes) for name, sizes in content()["models"].items()}
    found = {}
    for row in content()["rows"]:
        layout = Layout(**row["layout"])
        problem = Problem(Job(layout.ranks, **row["job"]), models[row["model"]], _machine(row["machine"]))
        found[row["name"]] = evaluate(problem, layout)
    return found


def memory_errors() -> dict[int, list[float]]:
    """By table of torchtitan's report, what is predicted of each published peak, less one."""
    found: dict[int, list[float]] = {}
    for row in json.loads(DATA.with_name("published_memory.json").read_text())["rows"]:
        layout = Layout(**row["layout"])
        job = Job(layout.ranks, reduce_dtype="fp32", **row["job"])
        memory = memory_of(Problem(job, PRESETS[row["model"]], load_machine("h100")), layout)
        # fully_shard cuts weights over cp too.
        state = memory.parameters + memory.gradients + memory.optimizer
        whole = memory.total - state * (1 - 1 / layout.cp)
        found.setdefault(row["table"], []).append(whole / GIB / row["gib"] - 1)
    return found


def rows() -> Iterator[Row]:
    for row in content()["rows"]:
        answer = answers()[row["name"]]
        factor = answer.tokens_per_s / row["tokens_per_s"]
        assert not isinstance(answer.ground, str)
        holds = answer.ground.least <= factor <= answer.ground.most
        yield Row(row["name"], row["source"], answer.ground.kind, factor, holds)


def left_out(found: list[Row]) -> list[bool]:
    """Of each row, whether the range from all other sources holds for it."""
    held = []
    for row in found:
        others = [other for other in found if other.source != row.source]
        alike = [other.factor for other in others if other.kind == row.kind] or [other.factor for other in others]
        margin = _MARGIN if len(alike) >= _FEW else _MARGIN_OF_FEW
        held.append(min(alike) / margin <= row.factor <= max(alike) * margin)
    return held


def section(found: list[Row]) -> str:
    lines = ["|kind|rows|sources|median error|range|holds|holds, source left out|", "|---|---|---|---|---|---|---|"]
    carried = left_out(found)
    for ground in KINDS:
        members = [(row, held) for row, held in zip(found, carried, strict=True) if row.kind == ground.kind]
        error = statistics.median(abs(row.factor - 1) for row, _ in members)
        cells = [
            ground.kind,
            str(len(members)),
            str(len({row.source for row, _ in members})),
            f"{error:.0%}",
            f"{ground.least:.2f}-{ground.most:.2f}",
            str(sum(row.holds for row, _ in members)),
            str(sum(held for _, held in members)),
        ]
        lines.append("|" + "|".join(cells) + "|")
    whole = f"|all|{len(found)}|{len({row.source for row in found})}|"
    lines.append(
        f"{whole}{statistics.median(abs(row.factor - 1) for row in found):.0%}||{sum(row.holds for row in found)}|"
        f"{sum(carried)}|"
    )
    return marked("ranges", "\n".join(lines))


if __name__ == "__main__":
    found = list(rows())
    write_parts(section(found))
    print(section(found))
    for row in found:
        print(f"{row.factor:.2f} {'ok' if row.holds else 'NO'} {row.kind}: {row.name}")
