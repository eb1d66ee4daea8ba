"""Predictions beside measured steps and published runs: docs/data/planner_accuracy.csv, and tables of the guide.

    python tests/planner/planner_accuracy.py    # writes the file, and the tables into docs/guides/planner.md

Each job ran on another machine. A row that is marked ``used`` fits a constant: compute at T=8192 the speed of the job's
GPUs, compute at T=512 the speed of its host. The other rows that fit constants of the H200 preset:

    time of a kernel, share of memory bandwidth    compute at T=2048, 1 x H200
    barriers of copies                             captured steps at T=512, 8 and 4 GPUs
    several tensors in one call of NCCL            gtp-bf16 over NCCL at T=2048, 8 GPUs
    elementwise kernels of compiled blocks         fsdp2-bf16-compiled at T=8192, 8 GPUs
    float8 GEMMs                                   captured float8 at T=8192, 4 GPUs
    the host's time for a launch of copies         eager copy engines at T=512, 2 GPUs

Constants from other measurements: shares of GEMMs from single layers, that of attention and the speed of copies from
traces, GEMMs beside NCCL from traces of T=2048, the host's time for a use of a weight from ``--host-time`` on 2 x H200.
"""

import functools
import json
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from dtensor_gtp.planner.costs import Axis
from dtensor_gtp.planner.evaluate import Problem, evaluate
from dtensor_gtp.planner.job import Job, Layout
from dtensor_gtp.planner.machine import Host, Machine, load_machine
from dtensor_gtp.planner.memory import predict
from dtensor_gtp.planner.model import PRESETS, ModelConfig
from dtensor_gtp.planner.program import build_compute
from dtensor_gtp.planner.setting import Setting, Sharded
from dtensor_gtp.policy import Schedule

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))
from predict_step import fully_shard_peak, setting_of, step_ms

DATA = Path(__file__).parent / "planner_data" / "measured_steps.json"
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "planner.md"
CSV = PAGE.parents[1] / "data" / "planner_accuracy.csv"
RUNS = DATA.with_name("published_runs.json")
_GIB = 2**30


class Row(NamedTuple):
    """One measured row and its prediction."""

    job: str
    mode: str
    seq_len: int
    measured_ms: float
    predicted_ms: float
    measured_gib: float | None
    predicted_gib: float | None
    is_used: bool
    is_kept: bool

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def memory_error(self) -> float | None:
        if self.measured_gib is None or self.predicted_gib is None:
            return None
        return self.predicted_gib / self.measured_gib - 1


class Speed(NamedTuple):
    """What a job's rows of compute say of its machine: times of GPUs and of the host, as factors of the preset's."""

    gpu: float = 1.0
    host: float = 1.0


@functools.cache
def content() -> Any:
    return json.loads(DATA.read_text())


def config() -> ModelConfig:
    return ModelConfig("benchmark", **content()["model"])


class _Earlier(Setting):
    def _group(self, block: Sequence[int]) -> tuple[int, ...]:
        return super()._group(block) if self.tokens <= 512 else ()

    def sends_narrow(self, schedule: Schedule, item: Sharded) -> bool:
        return False


def _as_measured(setting: Setting) -> Setting:
    """All rows are of revisions that exchanged lookups in eager steps, too, as ``exchange_tokens`` asks for, sent
    gradients in the dtype of the reduction, and made no groups of this model's blocks at 2048 tokens."""
    values = {item.name: getattr(setting, item.name) for item in fields(setting)}
    return _Earlier(**values | {"policy": replace(setting.policy, exchange_tokens=setting.tokens)})


def predicted_ms(setting: Setting, mode: str, ranks: int = 1) -> float:
    ms = step_ms(setting, mode, ranks)
    assert ms is not None
    return ms


def predicted_gib(setting: Setting, mode: str, ranks: int) -> float:
    if mode.startswith("fsdp2"):
        matrices = sum(weight.numel for weight in setting.trace.weights)
        return (matrices * 4 / ranks + fully_shard_peak(setting)) / _GIB
    memory = predict(setting, setting.choice(0)[0], 0)
    return (memory.total - memory.reserve - memory.symmetric) / _GIB


def speed_of(job: dict[str, Any], jobs: list[dict[str, Any]]) -> Speed:
    """From the job's rows of compute that are used, else from those of the job on such a machine."""
    like = speed_of(jobs[job["like"]], jobs) if "like" in job else Speed()
    machine, gpu, host = load_machine(job["machine"]), like.gpu, like.host
    used = {row["seq_len"]: row["ms"] for row in job["rows"] if row["mode"] == "compute" and row.get("used")}
    if 8192 in used:
        gpu = used[8192] / predicted_ms(setting_of(machine, config(), 1, "compute", 8192, {}), "compute")
    if 512 in used:
        program = build_compute(setting_of(machine, config(), 1, "compute", 512, {}))
        # Only if the host decides; else this row says nothing of it.
        host = used[512] / program.host_ms if used[512] > program.ms * gpu * 0.95 else like.host
    return Speed(gpu, host)


def machine_of(job: dict[str, Any], jobs: list[dict[str, Any]]) -> Machine:
    speed, machine = speed_of(job, jobs), load_machine(job["machine"])
    peaks = {kind: peak / speed.gpu for kind, peak in machine.peak_tflops.items()}
    host = Host(**{name: us * speed.host for name, us in vars(machine.host).items()})
    return replace(machine, peak_tflops=peaks, hbm_gb_s=machine.hbm_gb_s / speed.gpu, host=host)


def predictions(names: Container[str] | None = None) -> Iterator[Row]:
    """All rows, or those of these jobs."""
    jobs = content()["jobs"]
    for job in jobs if names is None else [job for job in jobs if job["name"] in names]:
        machine, ranks = machine_of(job, jobs), job["ranks"]
        for row in job["rows"]:
            mode, seq_len, options = row["mode"], row["seq_len"], row.get("schedule", {})
            setting = setting_of(machine, config(), ranks, mode, seq_len, options, is_fake=job.get("is_fake", False))
            setting = _as_measured(setting)
            gib = row.get("peak_gib")
            predicted = None if gib is None else predicted_gib(setting, mode, ranks)
            ms, is_kept = predicted_ms(setting, mode, ranks), "keep_nbytes" in options
            yield Row(job["name"], mode, seq_len, row["ms"], ms, gib, predicted, row.get("used", False), is_kept)


def calibrated() -> Iterator[Row]:
    """The two newest jobs on a machine that --calibrate has measured beside the last one: no row of them is used."""
    machine = load_machine(str(DATA.with_name("calibrated_2xh100.json")))
    for job in content()["jobs"][-2:]:
        for row in job["rows"]:
            options = row.get("schedule", {})
            setting = _as_measured(setting_of(machine, config(), job["ranks"], row["mode"], row["seq_len"], options))
            ms = predicted_ms(setting, row["mode"], job["ranks"])
            yield Row(
                f"{job['name']}, calibrated", row["mode"], row["seq_len"], row["ms"], ms, None, None, False, False
            )


def as_csv(rows: list[Row]) -> str:
    """All rows, one a line. A row that was used to fit a constant has "used" in the place of its error."""
    lines = ["job,mode,T,measured ms,predicted ms,error,measured GiB,predicted GiB,error of memory"]
    for row in rows:
        mode = row.mode + " with 8 GiB kept" * row.is_kept
        memory = ["", "", ""]
        if row.measured_gib is not None and row.predicted_gib is not None and row.memory_error is not None:
            memory = [f"{row.measured_gib:.2f}", f"{row.predicted_gib:.2f}", f"{row.memory_error:+.1%}"]
        error = "used" if row.is_used else f"{row.error:+.1%}"
        job = row.job.replace("`", "").replace(",", ";")
        cells = [job, mode, str(row.seq_len), f"{row.measured_ms:.1f}", f"{row.predicted_ms:.1f}", error, *memory]
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def group_of(row: Row) -> str:
    if row.mode.startswith("compute"):
        return "compute alone"
    if row.mode.startswith("fsdp2"):
        return "`fully_shard`"
    return "`gtp_shard`, captured" if row.mode.endswith("-graph") else "`gtp_shard`, eager"


def summary(rows: list[Row]) -> str:
    """What a reader wants to know first: by group, of rows that were not used."""
    lines = ["|steps|rows|within 10%|median|worst|", "|---|---|---|---|---|"]
    unused = [row for row in rows if not row.is_used]
    groups: dict[str, list[Row]] = {}
    for row in unused:
        groups.setdefault(group_of(row), []).append(row)
    for name, members in [*groups.items(), ("all", unused)]:
        errors = sorted(abs(row.error) for row in members)
        near = sum(error <= 0.1 for error in errors)
        lines.append(f"|{name}|{len(errors)}|{near}|{errors[len(errors) // 2]:.1%}|{errors[-1]:.1%}|")
    memory = sorted(abs(row.memory_error) for row in rows if row.memory_error is not None)
    close = sum(error <= 0.03 for error in memory)
    lines.append(
        f"\nOf {len(memory)} peaks of memory {close} are within 3%; the worst is off by {memory[-1]:.1%}. "
        f"{len(rows) - len(unused)} further rows were used to fit constants."
    )
    return "\n".join(lines)


class Run(NamedTuple):
    """One published run and its prediction, as a share of it."""

    name: str
    published: str
    predicted: str
    error: float
    source: str


def published() -> Iterator[Run]:
    """Runs of others, from their configuration. Less power is taken for a lower peak."""
    for run in json.loads(RUNS.read_text())["runs"]:
        layout = Layout(**run["layout"])
        problem = Problem(Job(layout.ranks, **run["job"]), PRESETS[run["model"]], _machine_of(run))
        answer = evaluate(problem, layout)
        if "mfu" in run:
            shown = f"{run['mfu']:.0%}", f"{answer.mfu:.1%}"
            error = answer.mfu / run["mfu"] - 1
        else:
            shown = str(run["tokens_per_s"]), f"{answer.tokens_per_s:.0f}"
            error = answer.tokens_per_s / run["tokens_per_s"] - 1
        yield Run(run["name"], *shown, error, run["source"])


def _machine_of(run: dict[str, Any]) -> Machine:
    """The preset with what the source says of the GPUs. Less power: as much less of the peak, an assumption."""
    machine, changes = load_machine(run["machine"]), run.get("changes")
    if changes is None:
        return machine
    peaks = {kind: peak * changes["watts"] / 700 for kind, peak in machine.peak_tflops.items()}
    return replace(machine, memory_gib=changes["memory_gib"], hbm_gb_s=changes["hbm_gb_s"], peak_tflops=peaks)


def groups_of_llama() -> Row:
    """Eight layers of Llama-3-8B on two GPUs with 512 tokens, where blocks are groups. The plain model says how fast
    the host is."""
    config, seq_len = ModelConfig("llama", 4096, 8, 32, 8, 128, 14336, 32000), 512
    rows = json.loads((CSV.with_name("2xh200_real_models.json")).read_text())["rows"]
    plain, _, row = (row for row in rows if row["case"] == f"llama:{seq_len}")
    machine = load_machine("h100")
    factor = plain["host_ms"] / build_compute(setting_of(machine, config, 1, "compute", seq_len, {})).host_ms
    machine = replace(machine, host=Host(**{name: us * factor for name, us in vars(machine.host).items()}))
    setting = replace(setting_of(machine, config, 2, "gtp", seq_len, {}), reduce_nbytes=4)
    memory = predict(setting, setting.choice(0)[0], 8)
    gib = (memory.total - memory.reserve - memory.symmetric) / _GIB
    ms = predicted_ms(setting, "gtp", 2)
    return Row("groups", "gtp", seq_len, row["fb_ms"], ms, row["peak_gib"], gib, False, False)


class Scaling(NamedTuple):
    gpus: int
    published: float
    predicted: float


class ExpertsInRack(Layout):
    """As Megatron's page lays out experts: ranks along ep are neighbours, so that tokens stay within a rack, and the
    shards of one expert lie in different racks."""

    def axes(self) -> dict[str, Axis]:
        inner = {"ep": Axis(self.ep, 1), "expert_gtp": Axis(self.expert_gtp, self.ep)}
        return super().axes() | inner


def weak_scaling() -> list[Scaling]:
    """Efficiency of Megatron's GTP. The model is a stand-in of as many parameters: its sizes are not published."""
    run = json.loads(RUNS.read_text())["weak_scaling"]
    config, machine = ModelConfig("stand-in", **run["stand_in"]), load_machine(run["machine"])
    times = []
    for gpus in run["gpus"]:
        layout = ExpertsInRack(replicate=gpus // run["layout"]["gtp"], **run["layout"])
        times.append(evaluate(Problem(Job(gpus, global_batch=gpus, **run["job"]), config, machine), layout).step_ms)
    efficiency = [times[0] / ms for ms in times]
    return [Scaling(*values) for values in zip(run["gpus"], run["efficiency"], efficiency, strict=True)]


def own_scale() -> list[tuple[int, float, float]]:
    """What is predicted for this package: GPUs, tokens/s/GPU and MFU of Llama 3 70B with gtp 64 in each copy."""
    machine, rows = load_machine("h100"), []
    for gpus in (64, 512, 3072, 16384):
        layout = Layout(replicate=gpus // 64, gtp=64, micro_batch=2, checkpoint="full")
        answer = evaluate(Problem(Job(gpus, global_batch=2 * gpus), PRESETS["llama3-70b"], machine), layout)
        rows.append((gpus, answer.tokens_per_s, answer.mfu))
    return rows


def published_section() -> str:
    lines = ["|MFU, or tokens/s/GPU|published|predicted|error|", "|---|---|---|---|"]
    for run in published():
        lines.append(f"|{run.name}|{run.published}|{run.predicted}|{run.error:+.1%}|")
    scaling = weak_scaling()
    rows = {
        "GB200": [str(row.gpus) for row in scaling],
        "published efficiency": [f"{row.published:.0%}" for row in scaling],
        "predicted": [f"{row.predicted:.0%}" for row in scaling],
    }
    head, *others = ["|" + "|".join([name, *cells]) + "|" for name, cells in rows.items()]
    lines += ["", head, "|---" * (len(scaling) + 1) + "|", *others]
    return marked("published runs", "\n".join(lines))


def own_section() -> str:
    lines = ["|H100|tokens/s/GPU|MFU|", "|---|---|---|"]
    lines += [f"|{gpus:,}|{tokens:.0f}|{mfu:.1%}|" for gpus, tokens, mfu in own_scale()]
    return marked("own scale", "\n".join(lines))


def section(rows: list[Row]) -> str:
    return marked("measured steps", summary(rows))


def marked(name: str, text: str) -> str:
    """A part of the page."""
    return f"<!-- {name}: begin -->\n{text}\n<!-- {name}: end -->"


def write_parts(*parts: str) -> None:
    """Put them into the page, in the place of those between the same marks."""
    text = PAGE.read_text()
    for part in parts:
        lines = part.splitlines()
        before, _, rest = text.partition(lines[0])
        text = before + part + rest.partition(lines[-1])[2]
    PAGE.write_text(text)


if __name__ == "__main__":
    rows = list(predictions())
    CSV.write_text(as_csv([*rows, *calibrated()]))
    write_parts(section(rows), published_section(), own_section())
    print(summary(rows))
