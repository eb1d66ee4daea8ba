"""What to change so that a job fits, tried out one by one."""

from __future__ import annotations

from dataclasses import replace

from .evaluate import Answer, Problem, memory_of
from .job import Layout, refusal
from .machine import GIB, load_machine, preset_names


def advise(problem: Problem, closest: Answer) -> list[str]:
    """Changes that make the closest layout fit; what they leave free."""
    job, layout = problem.job, closest.layout
    changes: list[tuple[str, Problem, Layout]] = []
    if layout.checkpoint != "full":
        changes.append(("--checkpointing full", problem, replace(layout, checkpoint="full")))
    if layout.micro_batch > 1:
        changes.append(("--micro-batch 1", problem, replace(layout, micro_batch=1)))
    if job.memory != "least":
        changes.append(("--memory least", replace(problem, job=replace(job, memory="least")), layout))
    if job.optimizer == "adamw":
        changes.append(("--optimizer muon", replace(problem, job=replace(job, optimizer="muon")), layout))
    for factor in (2, 4, 8, 16, 32, 64):
        larger = replace(job, gpus=job.gpus * factor, global_batch=max(job.batch, layout.data_ranks * factor))
        changes.append(
            (f"--gpus {job.gpus * factor}", replace(problem, job=larger), replace(layout, gtp=layout.gtp * factor))
        )
    for name in preset_names():
        machine = load_machine(name)
        if machine.memory_gib > problem.machine.memory_gib:
            changes.append((f"--machine {name}", replace(problem, machine=machine), layout))
    lines = []
    is_larger_tried = False
    for text, changed, other in changes:
        if text.startswith("--gpus") and is_larger_tried:
            continue
        if changed.config is not None and refusal(other, changed.job, changed.config, changed.machine) is not None:
            continue
        free = changed.machine.memory_gib - memory_of(changed, other).total / GIB
        if free >= 0:
            lines.append(f"{text}: fits, {free:.1f} GiB are left")
            is_larger_tried = is_larger_tried or text.startswith("--gpus")
    return lines or ["no single change is enough: combine more GPUs, --checkpointing full and shorter sequences"]
