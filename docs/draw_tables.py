"""Draws the tables of figures of the pages from what was measured, docs/data/*.json.

    python docs/draw_tables.py            # writes the tables into the pages
    python docs/draw_tables.py --check    # exits with 1 if a table of a page is another one

A table stands below ``<!-- table: NAME -->``, up to the next empty line; tables of steps, one for each job, up to
``<!-- /table: NAME -->``; the one that several pages show stands between
``<!-- headline -->`` and ``<!-- /headline -->``. A test runs the check, so that no page shows a figure that nobody
measured. Ratios are computed here, and only between rows of one job: another job had another machine.

A file of docs/data is one job: machine, date, revision, versions, command, rows. It is what a benchmark wrote with
``--json`` (then it has ``results``), or what was noted of it (``rows``). Rows that the planner's test predicts are not
repeated: ``rows_of`` names their job in tests/planner/planner_data/measured_steps.json. Two files are no jobs:
``aims``, whose values are ratios of rows of jobs, and ``history``, what was tried.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parent
DATA = DOCS / "data"
MEASURED = DOCS.parent / "tests" / "planner" / "planner_data" / "measured_steps.json"
MARKED = re.compile(
    r"<!-- table: (?P<name>[\w-]+) -->\n(?:(?:.*\n)*?<!-- /table: (?P=name) -->\n|(?:.+\n)*)"
    r"|<!-- headline -->\n(?:.*\n)*?<!-- /headline -->\n"
)
HEADLINE = "headline"
_GIB = 2**30
FSDP2 = "fsdp2-bf16"
GRAPH, LOOKUP, FLOAT8 = "gtp-bf16-lookup-graph", "gtp-bf16-lookup", "gtp-bf16-lookup@float8_tensorwise:dequantize-graph"
COMPILED, FLOAT8_COMPILED = "gtp-bf16-lookup-compiled-graph", "gtp-bf16-lookup@float8_tensorwise-compiled-graph"

Row = dict[str, Any]


# --- what was measured ------------------------------------------------------------------------------------------------


@cache
def content(name: str) -> dict[str, Any]:
    """The file of a job."""
    loaded: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return loaded


def date_of(job: str) -> str:
    file = content(job)
    return str(file["date"] if "date" in file else file["environment"]["date"].partition("T")[0])


@cache
def rows(job: str) -> list[Row]:
    """The rows of a job, of whatever kind its file is. Memory in GiB."""
    file = content(job)
    found: list[Row] = list(file.get("rows", ()))
    if "rows_of" in file:
        jobs = json.loads(MEASURED.read_text())["jobs"]
        (shared,) = (measured for measured in jobs if measured["name"] == file["rows_of"])
        found += shared["rows"]
    return found + [_from_benchmark(result) for result in file.get("results", ())]


def _from_benchmark(result: Row) -> Row:
    """A row as train_step.py writes it."""
    row = {key: result[key] for key in ("mode", "seq_len", "ms", "first_ms")}
    memory = {"peak_gib": "peak_bytes", "above_gib": "peak_above_activations_bytes", "reserved_gib": "reserved_bytes"}
    row |= {key: None if result[source] is None else result[source] / _GIB for key, source in memory.items()}
    return row


def figure(job: str, field: str, is_kept: bool = False, **match: Any) -> float | None:
    """One figure of a job, None if it was not measured.

    Args:
        job: the file.
        field: of the row.
        is_kept: of the row that keeps 8 GiB of weights from forward to backward.
        match: what the row has in other fields, such as ``mode`` and ``seq_len``.
    """
    for row in rows(job):
        kept = "keep_nbytes" in row.get("schedule", {})
        if kept == is_kept and row.get(field) is not None and all(row.get(k) == v for k, v in match.items()):
            return float(row[field])
    return None


# --- tables of steps --------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line of a table: what the reader sees, and where its figures are.

    Args:
        peer: the mode of the same job that ``x`` is relative to; empty: no ``x``.
    """

    label: str
    job: str
    mode: str
    peer: str = FSDP2
    is_kept: bool = False


_MEMORY_LENGTHS = (2048, 8192)


class Steps(NamedTuple):
    """A table of steps: a column for each length, with ``ms (x)``, and one for memory.

    Args:
        memory: the field of memory at T=2048 and 8192; empty: no such column.
    """

    lines: tuple[Line, ...]
    seq_lens: tuple[int, ...]
    memory: str = "peak_gib"


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Without spaces around the bars: what is drawn need not be pretty as text."""
    cells = [header, ["---"] * len(header), *lines]
    return "".join(f"|{'|'.join(line)}|\n" for line in cells)


def draw_steps(table: Steps) -> str:
    """One job: the rows that ``x`` is relative to are among the lines."""
    lengths = [str(T) for T in _MEMORY_LENGTHS if any(_memory(line, table, T) is not None for line in table.lines)]
    memory = [f"{table.memory.replace('_gib', ' GiB')}, T={', '.join(lengths)}"] if table.memory else []
    header = ["ms (x)", *(f"T={seq_len}" for seq_len in table.seq_lens), *memory]
    return markdown(header, (_step_cells(line, table) for line in table.lines))


def jobs_of(table: Steps) -> list[Steps]:
    """A table for each job of ``table``, with the lengths that it has, and with the row that others are relative to."""
    found = []
    for job in dict.fromkeys(line.job for line in table.lines):
        lines = [line for line in table.lines if line.job == job]
        for peer in dict.fromkeys(line.peer for line in lines):
            if all(line.mode != peer for line in lines):
                lines.append(Line(_LABELS[peer], job, peer, peer))
        lengths = [T for T in table.seq_lens if any(figure(job, "ms", mode=line.mode, seq_len=T) for line in lines)]
        has_memory = any(figure(job, table.memory, mode=line.mode) for line in lines) if table.memory else False
        found.append(Steps(tuple(lines), tuple(lengths), table.memory if has_memory else ""))
    return found


def _step_cells(line: Line, table: Steps) -> list[str]:
    cells = [line.label]
    for seq_len in table.seq_lens:
        ms = figure(line.job, "ms", line.is_kept, mode=line.mode, seq_len=seq_len)
        peer = figure(line.job, "ms", mode=line.peer, seq_len=seq_len)
        cells.append("" if ms is None else f"{ms:.1f}" + (f" ({peer / ms:.2f})" if peer is not None else ""))
    if not table.memory:
        return cells
    memory = [_memory(line, table, T) for T in _MEMORY_LENGTHS]
    return [*cells, ", ".join(f"{gib:.2f}" for gib in memory if gib is not None)]


def _memory(line: Line, table: Steps, seq_len: int) -> float | None:
    return figure(line.job, table.memory, line.is_kept, mode=line.mode, seq_len=seq_len)


def caption(jobs: Iterable[str]) -> str:
    """Date, revision and files of the jobs; the files have the versions and the commands."""
    files: dict[str, list[str]] = {}
    for job in dict.fromkeys(jobs):
        files.setdefault(f"{date_of(job)}, `{content(job)['revision']}`", []).append(_link(job))
    return "; ".join(f"{when}: {', '.join(names)}" for when, names in files.items()) + "\n"


def _link(job: str) -> str:
    return f"[{job}](data/{job}.json)"


_LABELS = {FSDP2: "`fully_shard`", "fsdp2-bf16-compiled": "`fully_shard`, compiled"}
_HEADLINE = (
    Line("`gtp_shard(model, mesh)`", "2xh100", "gtp"),
    Line("with `capture_step`", "2xh100", "gtp-graph"),
    Line("`fully_shard`", "2xh100", FSDP2),
    Line("compute", "2xh100", "compute"),
)
_C = "fsdp2-bf16-compiled"
STEPS = {
    HEADLINE: Steps(_HEADLINE, (2048, 8192)),
    "2xh100": Steps(
        (
            *_HEADLINE,
            Line("`gtp_shard(model, mesh)`", "2xh100_peers", "gtp"),
            Line("megatron-fsdp", "2xh100_peers", "megatron-bf16"),
            Line("compiled, captured", "2xh100_compiled", "gtp-compiled-graph", _C),
            Line("compiled, captured, float8", "2xh100_compiled", "gtp@float8_tensorwise-compiled-graph", _C),
            Line("torchao float8", "2xh100_compiled", "torchao-bf16-compiled", _C),
        ),
        (512, 2048, 8192),
    ),
    "8xh200": Steps(
        (
            Line("captured", "8xh200", GRAPH),
            Line("float8 gathers", "8xh200", FLOAT8),
            Line("`fully_shard`", "8xh200", FSDP2),
            Line("compute", "8xh200", "compute"),
            Line("compiled, captured", "8xh200_compiled", COMPILED, _C),
            Line("compiled, captured, float8", "8xh200_compiled", FLOAT8_COMPILED, _C),
        ),
        (512, 2048, 8192),
        "",
    ),
    "4xh200": Steps(
        (
            Line("compiled, captured", "4xh200_compiled", COMPILED, _C),
            Line("compiled, captured, float8", "4xh200_compiled", FLOAT8_COMPILED, _C),
            Line("torchao float8", "4xh200_compiled", "torchao-bf16-compiled", _C),
        ),
        (2048, 8192),
        "",
    ),
    "2xh200": Steps(
        (
            Line("`gtp_shard(model, mesh)`", "2xh200_default", "gtp"),
            Line("`fully_shard`", "2xh200_default", FSDP2),
            Line("compute", "2xh200_default", "compute"),
            Line("with `capture_step`", "2xh200", "gtp-graph"),
            Line("with `capture_blocks`", "2xh200", "gtp-blockgraphs"),
            Line("`fully_shard`", "2xh200", FSDP2),
        ),
        (512, 2048, 8192),
    ),
}


# --- other tables -----------------------------------------------------------------------------------------------------


def draw_moe(job: str) -> str:
    """A line for each block and number of tokens."""
    cells = []
    for row in rows(job):
        times = [f"{row['gtp']:.1f} ({row['fsdp2'] / row['gtp']:.2f})", f"{row['fsdp2']:.1f}", f"{row['compute']:.1f}"]
        cells.append([f"{row['block']}, {row['tokens']}", *times])
    return markdown(["ms (x)", "`gtp_shard`", "`fully_shard`", "compute"], cells)


_REAL_MODELS = {
    "bert": "BERT-large",
    "llama": "Llama, 8 layers of 8B",
    "t5": "T5-large",
    "qwen3moe": "Qwen3-MoE, 6 layers",
    "vit": "ViT-g",
    "whisper": "Whisper-large",
    "gpt2": "GPT-2 large",
}


def draw_real_models(job: str) -> str:
    """A line for each model and number of tokens, whose blocks are compiled in all modes or in none."""
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows(job)):
        of_mode = {row["mode"].removesuffix("-c"): row for row in rows(job) if row["case"] == case}
        plain, peer, ours = (of_mode[mode] for mode in ("plain", "fsdp2", "gtp"))
        name, tokens = case.split(":")
        times = [f"{row['fb_ms']:.1f} ({peer['fb_ms'] / row['fb_ms']:.2f})" for row in (ours, peer, plain)]
        host = f"{ours['host_ms'] / plain['host_ms']:.1f}, {peer['host_ms'] / plain['host_ms']:.1f}"
        memory = f"{ours['peak_gib']:.2f}, {peer['peak_gib']:.2f}"
        lines.append([f"{_REAL_MODELS[name]}, {tokens}", *times, host, memory])
    header = ["model, tokens", "`gtp_shard`", "`fully_shard`", "plain", "host beside plain's", "peak GiB"]
    return markdown(header, lines)


_MORE_MODELS = {
    "albert": "ALBERT",
    "bart": "BART-large",
    "bloom": "BLOOM 1.3B",
    "caformer_b36": "CAFormer-B36",
    "convnext_large": "ConvNeXt-L",
    "deberta": "DeBERTa-v2 XL",
    "deepseek": "DeepSeek-V2-Lite (5)",
    "distilbert": "DistilBERT",
    "eva02_large_patch14_224": "EVA02-L",
    "falcon": "Falcon 7B (8)",
    "gemma2": "Gemma 2 2B (12)",
    "gemma3": "Gemma 3 1B",
    "gptoss": "GPT-OSS (4)",
    "hiera_large_224": "Hiera-L",
    "mixer_l16_224": "Mixer-L/16",
    "mixtral": "Mixtral, small (6)",
    "modernbert": "ModernBERT-large",
    "neox": "GPT-NeoX 1.3B",
    "opt": "OPT 1.3B",
    "phi3": "Phi-3 mini (12)",
    "qwen3": "Qwen3 1.7B",
    "wav2vec2": "wav2vec2-large",
}


def draw_more_models(job: str, *again: str) -> str:
    """Four models in a line: the time of ``gtp_shard``, and how many times as fast as ``fully_shard`` it is. Those that
    gain most come first. Models of the jobs ``again`` are from the last of these, followed by how many times as fast
    plain is."""
    ms = {(row["case"], row["mode"]): row["fb_ms"] for each in (job, *again) for row in rows(each)}
    gains = {case: ms[case, "fsdp2"] / ms[case, "gtp"] for case in dict.fromkeys(row["case"] for row in rows(job))}
    cells = []
    for case, gain in sorted(gains.items(), key=lambda item: -item[1]):
        bound = f", {ms[case, 'fsdp2'] / ms[case, 'plain']:.2f}" if (case, "plain") in ms else ""
        cells += [_MORE_MODELS[case.partition(":")[0]], f"{ms[case, 'gtp']:.1f} ({gain:.2f}{bound})"]
    columns = 8
    cells += [""] * (-len(cells) % columns)
    lines = [cells[at : at + columns] for at in range(0, len(cells), columns)]
    return markdown(["model", "ms (x)"] * (columns // 2), lines)


def draw_modes(job: str) -> str:
    """A line for each mode, a column for each model and number of tokens; beside the peer of the first line."""
    modes, cases = ([*dict.fromkeys(row[key] for row in rows(job))] for key in ("mode", "case"))
    ms = {(row["mode"], row["case"]): row["fb_ms"] for row in rows(job)}
    peer = next(mode for mode in modes if mode.startswith("fsdp2"))
    names = [f"{_REAL_MODELS[name]}, {tokens}" for name, tokens in (case.split(":") for case in cases)]
    lines = [
        [_spoken(mode), *(f"{ms[mode, case]:.1f} ({ms[peer, case] / ms[mode, case]:.2f})" for case in cases)]
        for mode in modes
    ]
    return markdown(["ms (x)", *names], lines)


def _spoken(mode: str) -> str:
    base, _, recipe = mode.removesuffix("-c").partition("@")
    name = {"fsdp2": "`fully_shard`", "gtp": "`gtp_shard`"}.get(base, base)
    return name + f", {recipe}" * bool(recipe) + ", compiled" * mode.endswith("-c")


_AXES = {  # of a job: what a line says, its mode, and that of its peer
    "4xh200_axes": {
        "gtp 4": ("gtp", "fsdp2"),
        "2 replicas, gtp 2": ("replicate", "hsdp"),
        "the same, `shard_optimizer`": ("shard_optimizer", "hsdp"),
        "gtp 2, tp 2": ("tp", "fsdp2-tp"),
    },
    "2xh200_axes": {"gtp 2": ("gtp-moe", "fsdp2-moe"), "gtp 2, ep 2": ("ep", "fsdp2-moe")},
}


def draw_axes(job: str) -> str:
    """A line for each mesh, with ``fully_shard`` of the same model; it knows no ep."""
    found = {row["mode"]: row for row in rows(job)}
    lines = []
    for name, modes in _AXES[job].items():
        ours, peer = (found[mode] for mode in modes)
        times = [f"{ours[key]:.1f} ({peer[key] / ours[key]:.2f})" for key in ("ms", "step_ms")]
        lines.append([name, *times, f"{ours['peak_gib']:.2f}, {peer['peak_gib']:.2f}"])
    return markdown(["ms (x)", "forward and backward", "step", "peak GiB"], lines)


def draw_elastic() -> str:
    """A column for each state of the replicas."""
    steps = [row for row in rows("4xh200_elastic") if "replicas" in row]
    texts = [f"{row['ms']:.1f} ({row['tokens_per_s'] / steps[0]['tokens_per_s']:.3f})" for row in steps]
    return markdown(
        ["ms (x tokens/s)", *(f"{row['mode']}, {row['replicas'].replace(' ', '')}" for row in steps)],
        [["step", *texts]],
    )


def draw_aims() -> str:
    """Aim, goal, what was reached in which job, and why no more. Each value is computed from its job's rows."""
    cells = []
    for aim in content("aims")["aims"]:
        reached = ", ".join(f"{value_of(ratio)} ({ratio['where']})" for ratio in aim["reached"])
        jobs = ", ".join(_link(job) for job in dict.fromkeys(ratio["job"] for ratio in aim["reached"]))
        cells.append([aim["aim"], aim["goal"], reached, jobs, aim["missing"]])
    return markdown(["aim", "goal", "reached", "in job", "why"], cells)


def value_of(ratio: dict[str, Any]) -> str:
    """A figure of a job, over another one if there is ``over``."""
    value = figure(ratio["job"], ratio["field"], **ratio["of"])
    assert value is not None, ratio
    if "over" in ratio:
        over = figure(ratio["job"], ratio.get("over_field", ratio["field"]), **ratio["over"])
        assert over is not None, ratio
        value *= ratio.get("times", 1) / over
    return f"{value:.{ratio.get('digits', 2)}f}"


def draw_history() -> str:
    """What was tried, and figures before and after."""
    cells = []
    for row in content("history")["tried"]:
        figures = f"{row['before']} to {row['after']}" if "before" in row else row["after"]
        cells.append([row["what"], row["paid"], figures + row["unit"], row["where"]])
    return markdown(["what", "paid?", "before and after", "GPUs"], cells)


TABLES: dict[str, tuple[Callable[[], str], tuple[str, ...]]] = {
    "2xh200_moe": (partial(draw_moe, "2xh200_moe"), ("2xh200_moe",)),
    "4xh200_axes": (partial(draw_axes, "4xh200_axes"), ("4xh200_axes",)),
    "2xh200_axes": (partial(draw_axes, "2xh200_axes"), ("2xh200_axes",)),
    "2xh200_recipes": (partial(draw_modes, "2xh200_recipes"), ("2xh200_recipes",)),
    "elastic": (draw_elastic, ("4xh200_elastic",)),
    "2xh200_real_models": (partial(draw_real_models, "2xh200_real_models"), ("2xh200_real_models",)),
    "2xh200_qwen3moe": (partial(draw_real_models, "2xh200_qwen3moe"), ("2xh200_qwen3moe",)),
    "2xh200_other_models": (partial(draw_real_models, "2xh200_other_models"), ("2xh200_other_models",)),
    "2xh200_more_models": (
        partial(draw_more_models, "2xh200_more_models", "2xh200_bounds", "2xh200_rounds"),
        ("2xh200_more_models", "2xh200_bounds", "2xh200_rounds"),
    ),
    "2xh200_compiled_models": (partial(draw_real_models, "2xh200_compiled_models"), ("2xh200_compiled_models",)),
    "aims": (draw_aims, ("2xh100_first", "2xh200_first")),
    "history": (draw_history, ()),
}


_NAME_JOBS_THEMSELVES = ("aims",)


def draw(name: str) -> str:
    """The table NAME below its jobs, or the headline's without them.

    Raises:
        ValueError: if there is no such table.
    """
    if name == HEADLINE:
        (headline,) = jobs_of(STEPS[HEADLINE])
        return draw_steps(headline)
    if name in STEPS:
        tables = (_with_caption(table) for table in jobs_of(STEPS[name]))
        return "\n".join(tables) + f"<!-- /table: {name} -->\n"
    if name not in TABLES:
        raise ValueError(f"draw expects one of {', '.join((*STEPS, *TABLES))}, but got {name!r}.")
    drawn, jobs = TABLES[name]
    return (caption(jobs) if jobs and name not in _NAME_JOBS_THEMSELVES else "") + drawn()


def _with_caption(table: Steps) -> str:
    return caption([table.lines[0].job]) + draw_steps(table)


# --- pages ------------------------------------------------------------------------------------------------------------


def pages() -> list[Path]:
    return [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]


def redrawn(text: str) -> str:
    """The text of a page with each of its tables drawn anew."""

    def table(match: re.Match[str]) -> str:
        if match["name"] is None:
            return f"<!-- headline -->\n\n{draw(HEADLINE)}\n<!-- /headline -->\n"
        return f"<!-- table: {match['name']} -->\n{draw(match['name'])}"

    return MARKED.sub(table, text)


def main(arguments: list[str]) -> int:
    stale = []
    for page in pages():
        text = page.read_text()
        if redrawn(text) != text:
            stale.append(page)
            if "--check" not in arguments:
                page.write_text(redrawn(text))
    for page in stale:
        print(f"{page.relative_to(DOCS.parent)}: tables {'differ' if '--check' in arguments else 'drawn anew'}")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
