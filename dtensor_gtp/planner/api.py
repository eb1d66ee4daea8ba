"""``dtensor_gtp.plan``, and its answer: as text of at most 100 columns, as a picture, as plain data, and as code.

A test runs the code on processes of gloo and compares a step with one process. What is not written, it says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .._comm.debug import format_nbytes
from .._report.columns import in_columns, paragraph
from .._trace.picture import draw
from .._trace.read import COMMUNICATION, COMPUTE, Span, Timeline
from .costs import Stream
from .errors import PlanError, expect
from .evaluate import Answer, Problem, fully_shard_ms
from .job import Job, Layout
from .machine import GIB, VERSION, Machine, load_machine
from .program import build
from .search import Found, Report, Search, advise
from .user_model import UserModel, load_model

WIDTH = 100


def plan(
    model: str, machine: str | Machine = "h100", *, top: int = 5, report: Report | None = None, **job: Any
) -> PlanResult:
    """Predict time and memory of a training step on every layout of a job, and rank the layouts that fit.

    Nothing runs on a GPU and no process group is made. ``python -m dtensor_gtp.help planner`` says
    how right the predictions are.

    Args:
        model: ``"llama3-8b"`` or another preset, a ``config.json``, the name of a class of transformers, or
            ``"module:function"``. That function returns ``(module, inputs)``: a module on the meta device, and the
            positional arguments of its forward for one sequence.
        machine: ``"h100"`` or another preset, a file of ``python -m dtensor_gtp.plan --calibrate``, or a
            :class:`~dtensor_gtp.planner.Machine`.
        top: How many answers.
        report: Called after each simulation with the numbers of simulations, of layouts and of seconds.
        job: Fields of :class:`~dtensor_gtp.planner.Job`, of which ``gpus`` is required.

    Returns:
        A :class:`PlanResult`; print it.

    Raises:
        PlanError: A ``ValueError`` of one line that says what is wrong and how to mend it.

    Example:
        >>> result = plan("llama3-8b", "h100", gpus=8, global_batch=8, fixed={"gtp": 8})
        >>> result.best.layout.gtp
        8
        >>> result.best.memory.total < result.best.capacity
        True
    """
    try:
        asked = Job(**job)
    except TypeError as error:
        raise PlanError(f"plan got other arguments than a job has ({error}). See dtensor_gtp.planner.Job.") from None
    gpus = load_machine(machine) if isinstance(machine, str) else machine
    loaded = load_model(model, asked.seq_len)
    if isinstance(loaded, UserModel) and loaded.seq_len != asked.seq_len:
        wrong = f"got {asked.seq_len}. Leave it out, or let the function return longer inputs."
        is_fine = "seq_len" not in job or ":" not in model
        expect(is_fine, f"plan expects seq_len of the inputs of {model}, {loaded.seq_len} tokens", wrong)
        asked = replace(asked, seq_len=loaded.seq_len)
    problem = Problem(asked, loaded, gpus)
    found = Search(problem, top).run(report)
    advice = () if found.closest is None else tuple(advise(problem, found.closest))
    return PlanResult(**vars(found), model=loaded.name, problem=problem, advice=advice)


@dataclass(frozen=True)
class PlanResult(Found):
    """The answers of :func:`plan`. ``str()`` is what the command prints.

    Args:
        answers: Layouts, the fastest first; empty if none fits.
        refused: Why others were refused.
        closest: If none fits, the layout that lacks least memory.
        num_layouts: Layouts that were considered.
        num_simulated: Layouts that were simulated.
        seconds: Time of the search.
        model: Name of the model.
        problem: The job, the machine and the sizes of the model.
        advice: If none fits, what to change.

    Example:
        >>> result = plan("llama3-8b", "h100", gpus=8, global_batch=8, fixed={"gtp": 8})
        >>> result.best.step_ms > 0
        True
        >>> "gtp_shard" in result.code()
        True
        >>> sorted(result.as_record())[:3]
        ['advice', 'answers', 'closest']
    """

    model: str
    problem: Problem
    advice: tuple[str, ...]

    @property
    def job(self) -> Job:
        """What was asked for."""
        return self.problem.job

    @property
    def machine(self) -> Machine:
        """The GPUs."""
        return self.problem.machine

    @property
    def best(self) -> Answer:
        """The fastest layout.

        Raises:
            PlanError: None fits.
        """
        if not self.answers:
            raise PlanError("plan found no layout that fits: see its advice, what to change.")
        return self.answers[0]

    def code(self) -> str:
        """Python for the fastest layout, and below it the lines that start it."""
        return f"{training_code(self.problem, self.best)}\n\n{launch_lines(self.problem, self.best)}\n"

    def as_record(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {
            "version": VERSION,
            "model": self.model,
            "parameters": self.problem.whole.numel,
            "machine": self.machine.name,
            "is_calibrated": self.machine.is_calibrated,
            "not_measured": list(self.machine.not_measured),
            "job": asdict(self.job),
            "answers": [_record(answer) for answer in self.answers],
            "closest": None if self.closest is None else _record(self.closest),
            "advice": list(self.advice),
            "refused": [asdict(each) for each in self.refused],
            **{name: getattr(self, name) for name in ("num_layouts", "num_simulated", "seconds")},
        }

    def __str__(self) -> str:
        job = self.job
        numel, tokens = self.problem.whole.numel / 1e9, job.batch * job.seq_len / 1e6
        lines = [
            f"{self.model} ({numel:.1f}B) on {job.gpus} x {self.machine.describe()}",
            f"{job.batch} sequences of {job.seq_len} tokens a step ({tokens:.2f}M), {job.recipe}, {job.optimizer}, "
            f"memory {job.memory}" + ", compiled" * job.is_compiled + ", one CUDA graph" * job.is_captured,
            "",
        ]
        if (unused := self.problem.whole.unused_numel) > 0.02 * self.problem.whole.numel:
            text = f"Not counted: {unused / 1e9:.2g}B parameters, which get no gradient from the inputs of this step."
            lines += [*paragraph(f"{text} Pass module:function with inputs that use them.", WIDTH), ""]
        if self.problem.whole.begins_frozen:
            text = "Frozen: backward is planned through all blocks, also where no trained weight comes before."
            lines += [*paragraph(text, WIDTH), ""]
        if self.answers:
            lines += [*_ranking(self.answers), "", *_details(self, self.answers[0])]
        else:
            lines.append("No layout fits.")
            if (closest := self.closest) is not None:
                missing, layout = (closest.memory.total - closest.capacity) / GIB, closest.layout
                described = f"{layout.describe()}, {layout.micro_batch} sequences, checkpoint {layout.checkpoint}"
                lines += paragraph(f"Closest: {described}: does not fit by {missing:.1f} GiB.", WIDTH)
                lines += _bars(closest.memory.parts(), closest.memory.total, format_nbytes)
            lines += ["What to change:", *(part for line in self.advice for part in paragraph(line, WIDTH, "  "))]
        head = f"{self.num_layouts} layouts, the {self.num_simulated} most promising simulated in {self.seconds:.1f} s."
        lines += ["", f"{head} Refused:" if self.refused else f"{head} None refused."]
        for item in self.refused[:6]:
            lines += paragraph(f"{item.count:>5}  {item.reason} (e.g. {item.example.describe()})", WIDTH, "  ")
        return "\n".join(line.rstrip() for line in lines)


def _ranking(answers: tuple[Answer, ...]) -> list[str]:
    """A table; where names of layouts leave too little room, without columns that the details or the step give."""
    rows: list[tuple[str, ...]] = [("", "layout", "batch", "step", "range", "tok/s/GPU", "MFU", "memory", "waits")]
    for number, answer in enumerate(answers, 1):
        layout, found = answer.layout, answer.range_ms
        described = layout.describe().replace("replicate", "rep").replace("expert_gtp", "egtp") + " kept" * layout.keep
        batch = f"{layout.micro_batch}" + {"none": "", "selective": "/sel", "full": "/full"}[layout.checkpoint]
        times = ("not known", "", "", "")
        if found:
            spread = f"{format_ms(found[0])}-{format_ms(found[1])}"
            times = format_ms(answer.step_ms), spread, f"{answer.tokens_per_s:.0f}", f"{answer.mfu:.0%}"
        memory = f"{answer.memory.total / GIB:.1f}" + "~" * (not answer.is_fitting)
        cause, ms = max(answer.exposed_ms.items(), key=lambda item: item[1], default=("", 0.0))
        rows.append((str(number), described, batch, *times, memory, f"{cause} {ms / answer.step_ms:.0%}"))
    for name in ("waits", "range", "tok/s/GPU"):
        if max(map(len, in_columns(rows))) > WIDTH:
            place = rows[0].index(name)
            rows = [(*row[:place], *row[place + 1 :]) for row in rows]
    return in_columns(rows)


def format_ms(ms: float) -> str:
    """A time in three digits or so: 34.1ms, 340ms, 3.40s."""
    if ms >= 1000:
        return f"{ms / 1e3:.2f}s"
    return f"{ms:.1f}ms" if ms < 100 else f"{ms:.0f}ms"


def _details(result: PlanResult, answer: Answer) -> list[str]:
    lines = [f"1: {answer.layout.describe()}"]
    if isinstance(answer.ground, str):
        lines += paragraph(f"time: {answer.ground}", WIDTH, "  ")
    else:
        parts = {"compute": answer.compute_ms, **answer.exposed_ms}
        lines += ["  time of a step, and what compute waits for", *_bars(parts, answer.step_ms, format_ms)]
        lines.append(f"  range: from published runs ({answer.ground.kind})")
        if answer.exposed_ms.get("ep", 0.0) > answer.step_ms / 10 and result.job.dispatch == "rows":
            other = "Other dispatchers send less or hide it: --dispatch hosts or hidden"
            lines += paragraph(f"ep: a row for each expert. {other}", WIDTH, "  ")
    free = answer.capacity - answer.memory.total
    if free < 0:
        text = (
            f"~ counts {-free / GIB:.1f} GiB more than a GPU has. The leanest code known needs "
            f"{answer.memory.least / GIB:.1f} GiB: fused kernels, a compiler or 8 bits that keep a third of the "
            "activations, a loss without whole logits. Measure a step, or take --checkpointing full."
        )
        lines += paragraph(text, WIDTH, "  ")
    lines += paragraph(f"memory of the fullest rank, {answer.memory.moment}", WIDTH, "  ")
    lines += _bars(answer.memory.parts() | {"free": free}, answer.capacity, format_nbytes)
    if answer.received:
        received = [f"{axis} {format_nbytes(int(nbytes))}" for axis, nbytes in answer.received.items() if nbytes]
        lines += paragraph(f"into each GPU in a step: {', '.join(received)}", WIDTH, "  ")
    lines += paragraph("schedule: " + "; ".join(answer.reasons), WIDTH, "  ")
    if result.job.quantization is not None and result.job.precision == "bf16":
        text = "This package gathers the format and computes in bf16 with it; only gathers are smaller."
        lines += paragraph(f"{result.job.recipe}: GEMMs are in bf16. {text}", WIDTH, "  ")
    if answer.range_ms and (peer := fully_shard_ms(result.problem, answer)) is not None:
        lines.append(f"  fully_shard in the place of gtp_shard: {format_ms(peer)}")
    if not result.machine.is_calibrated:
        missing = "measure your machine by --calibrate FILE"
        if not result.machine.is_preset:
            missing = ", ".join(result.machine.not_measured)
        lines += paragraph(f"not calibrated: {missing}", WIDTH, "  ")
    return lines


def duration(answer: Answer, job: Job, tokens: float) -> str:
    """How long a job runs for so many tokens, without restarts and evaluations."""
    if (found := answer.range_ms) is None:
        return f"{tokens:.3g} tokens: no time is known, {answer.ground}"
    steps = tokens / (job.batch * job.seq_len)
    low, days, high = (ms * steps / 86_400_000 for ms in (found[0], answer.step_ms, found[1]))
    hours = days * 24 * job.gpus
    return (
        f"{tokens:.3g} tokens: {steps:,.0f} steps, {days:.1f} days ({low:.1f} to {high:.1f}), {hours:,.0f} GPU-hours, "
        "restarts not counted"
    )


def as_svg(result: PlanResult) -> str:
    """One microbatch of the slowest stage, as ``python -m dtensor_gtp.trace`` draws measured steps."""
    layout, problem, spans = result.best.layout, result.problem, []
    found = build(problem.setting(layout, problem.slowest(layout)), result.best.schedule)
    for task, (begin, end) in zip(found.tasks, found.spans, strict=True):
        if end > begin:
            kind = COMPUTE if task.stream is Stream.COMPUTE and not task.cause else COMMUNICATION
            lane = task.stream.name.lower().replace("_", " ")
            spans.append(Span(begin * 1e3, end * 1e3, lane, kind, task.label, task.label, task.launch_ms * 1e3))
    timeline = Timeline(1, (0.0, found.ms * 1e3), sorted(spans))
    return draw(timeline, f"{result.model}, {layout.describe()}, one microbatch")


def _bars(parts: dict[str, Any], whole: float, format_value: Callable[[Any], str]) -> list[str]:
    return [
        f"    {name:<12} {format_value(value):>10} {value / whole:>6.1%}  {'#' * max(round(value / whole * 40), 1)}"
        for name, value in parts.items()
        if value > 0 and value >= whole * 0.0005
    ]


def _record(answer: Answer) -> dict[str, Any]:
    found, memory = answer.range_ms, answer.memory
    return {
        "layout": asdict(answer.layout),
        "step_ms": answer.step_ms if found else None,
        "step_ms_range": list(found) if found else None,
        "ground": answer.ground if isinstance(answer.ground, str) else answer.ground.kind,
        "tokens_per_s_per_gpu": answer.tokens_per_s if found else None,
        "mfu": answer.mfu if found else None,
        "fits": "yes" if answer.is_fitting else "only with leaner code" if answer.may_fit else "no",
        "memory_bytes": memory._asdict() | {"total": memory.total, "least": memory.least},
        "capacity_bytes": answer.capacity,
        "received_bytes": dict(answer.received),
        "exposed_ms": dict(answer.exposed_ms),
        "compute_ms": answer.compute_ms,
        "schedule": vars(answer.schedule),
        "reasons": list(answer.reasons),
    }


def snippet(name: str) -> str:
    return (Path(__file__).parent / "snippets" / f"{name}.txt").read_text().rstrip()


def _blocks(problem: Problem) -> list[str]:
    """Where the blocks are in the model."""
    return list(dict.fromkeys(w.block_name.rpartition(".")[0] for w in problem.whole.weights if w.block >= 0))


def _unwritten(problem: Problem, layout: Layout) -> list[str]:
    """What of a layout there is no code for, and where to read on."""
    job, blocks = problem.job, _blocks(problem)
    is_muon = job.optimizer == "muon"
    changes_blocks = layout.checkpoint != "none" or job.is_compiled or job.recipe != "bf16" or is_muon
    is_mixture = layout.ep * layout.expert_gtp > 1 or problem.model.experts > 0
    is_selective = layout.checkpoint == "selective" and job.quantization is not None
    places = f"in {len(blocks)} places ({', '.join(blocks)})" if blocks else "nowhere by number"
    on_axes = "see python -m dtensor_gtp.help composability"
    notes = {
        f"pp {layout.pp}: how the model is cut into stages is yours, {on_axes}": layout.pp > 1,
        f"cp {layout.cp}: attention exchanges keys over mesh['cp'] in your code, {on_axes}": layout.cp > 1,
        "experts: where they are in the model is yours, see python -m dtensor_gtp.help moe": is_mixture,
        "selective checkpointing of quantized weights: this package has none, take --checkpointing full": is_selective,
        f"blocks stand {places}: what is done to each is yours, {on_axes}": changes_blocks and len(blocks) != 1,
        "muon: blocks stand beside the embedding and the head: what it trains is yours": is_muon and blocks == [""],
    }
    return [note for note, is_needed in notes.items() if is_needed]


def training_code(problem: Problem, answer: Answer) -> str:
    """Python that builds the meshes, shards the model and runs a step; comments alone for what it cannot write."""
    job, layout = problem.job, answer.layout
    if missing := _unwritten(problem, layout):
        return "\n#   ".join([f"# No code for this layout ({layout.describe()}):", *missing])
    sizes = [f", {name}={getattr(layout, name)}" for name in ("replicate", "gtp", "tp") if getattr(layout, name) > 1]
    num, sync = layout.num_microbatches(job), ""
    if layout.keep:
        sync = snippet("keep") + "\n"
    elif layout.replicate > 1 and num > 1:
        sync = "        model.set_requires_all_reduce(number + 1 == len(microbatches))\n"
    blocks = next(iter(_blocks(problem)), "")
    module = f"model.{blocks}" if blocks else "model"
    # With tp, torch 2.13 compiles no recomputation: it is around what is compiled.
    inner = "._checkpoint_wrapped_module" * (layout.tp > 1 and layout.checkpoint == "full")
    compiled = f"for block in {module}:\n    block{inner}.compile(fullgraph=True)\n"
    optimizers = ("muon", "adamw") if job.optimizer == "muon" else ("optimizer",)
    return snippet("training").format(
        imports="" if job.quantization is None else "from dtensor_gtp import quantize_\n",
        sizes="".join(sizes),
        changes="".join(f"{lines}\n" for lines in _changes(problem, layout, module)),
        reduce="bfloat16" if job.reduce_dtype == "bf16" else "float32",
        schedule="" if job.memory == "balanced" else f", schedule=SchedulePolicy(memory={job.memory!r})",
        states=", shard_optimizer=True" * (job.shards_optimizer and layout.replicate > 1),
        compiled=compiled * job.is_compiled,
        optimizer=snippet(job.optimizer).replace("layers.", f"{blocks}."),
        num=num,
        size=layout.micro_batch,
        data=f"{layout.data_ranks} data ranks" + f", the same on the {layout.tp} ranks of tp" * (layout.tp > 1),
        sync=sync,
        steps="\n".join(f"    {name}.step()\n    {name}.zero_grad()" for name in optimizers),
    )


def _changes(problem: Problem, layout: Layout, blocks: str) -> list[str]:
    """What changes the model before it is sharded."""
    found = []
    if (recipe := problem.job.quantization) is not None:
        name, _, compute = problem.job.recipe.partition(":")
        given = repr(name)
        if compute:
            kind = type(recipe).__name__
            found, given = [f"from dtensor_gtp.quant import {kind}"], f"{kind}(compute={compute!r})"
        found.append(f"quantize_({blocks}, {given})")
    model = problem.model
    if layout.tp > 1 and not isinstance(model, UserModel):
        found.append(snippet("tensor_parallel"))
    elif layout.tp > 1 and isinstance(model, UserModel):
        by_name = {re.sub(r"(^|\.)\d+\.", r"\1*.", name): style for name, style in model.plan.styles.items()}
        styles = (f"    {name!r}: {style.title()}Parallel()," for name, style in by_name.items())
        found.append(snippet("plan_of_names").format(styles="\n".join(styles)))
    options = ""
    if layout.checkpoint == "selective":
        options = ", context_fn=save_every_second_product, preserve_rng_state=False"
        found.append(snippet("selective") + "\n")
    if layout.checkpoint != "none":
        found.append(snippet("checkpointing").format(options=options, blocks=blocks))
    return found


def launch_lines(problem: Problem, answer: Answer) -> str:
    """torchrun and Slurm, as comments."""
    host = min(problem.machine.gpus_per_host, answer.layout.ranks)
    nodes = -(-answer.layout.ranks // host)
    if nodes == 1:
        return f"# torchrun --nproc-per-node {host} train.py"
    run = f"torchrun --nnodes {nodes} --nproc-per-node {host} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 train.py"
    return f"# {run}\n# sbatch --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {host} --wrap 'srun {run}'"
