"""``dtensor_gtp.plan``: what the command line does, from Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .errors import PlanError, expect
from .evaluate import Problem
from .job import Job
from .machine import Machine, load_machine
from .search import Report, advise, search
from .text import PlanResult
from .user_model import load_model


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
        job: Fields of :class:`~dtensor_gtp.planner.Job`: ``gpus`` (required), ``seq_len`` in tokens,
            ``global_batch`` in sequences, ``recipe``, ``checkpointing``, ``optimizer``, ``memory``, ``reduce_dtype``,
            ``is_compiled``, ``is_captured``, ``loss``, ``virtual_stages``, ``shards_optimizer``, and ``fixed``, a dict
            of axes that are not searched.

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
    name, config, user = load_model(model, asked.seq_len)
    if user is not None and user.seq_len != asked.seq_len:
        wrong = f"got {asked.seq_len}. Leave it out, or let the function return longer inputs."
        is_fine = "seq_len" not in job or ":" not in model
        expect(is_fine, f"plan expects seq_len of the inputs of {model}, {user.seq_len} tokens", wrong)
        asked = replace(asked, seq_len=user.seq_len)
    problem = Problem(asked, config, gpus, user)
    found = search(problem, top=top, report=report)
    advice = () if found.closest is None else tuple(advise(problem, found.closest))
    return PlanResult(**vars(found), model=name, problem=problem, advice=advice)
