"""Backward in two parts, as the zero-bubble schedules of ``torch.distributed.pipelining`` run it.

Such a schedule computes the gradients of a stage's inputs first, and those of its weights later to fill bubbles. torch
splits the autograd graph between inputs and ``stage.submod.parameters()``. Our gradients do not pass through these
parameters, so torch would find no weight in the graph and would never compute a gradient. Instead, the first part runs
a whole backward in which the fused ops postpone their weight gradients, and the second part computes and reduces those.
Weights that are read as attributes, and whole parameters, get their gradients in the first part.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch

from .. import _torch_compat as compat
from .binding import runtimes_below


def follow_pipelining() -> None:
    """Let pipeline stages split backwards, once ``torch.distributed.pipelining`` has been imported."""
    stage_class = compat.pipeline_stage_class()
    if stage_class is not None:
        _replace_backward(stage_class)


@functools.cache
def _replace_backward(stage_class: Any) -> None:
    """A stage has no hook for this, so replace its method; modules without weights of ours go the stock way."""
    run = stage_class.backward_maybe_with_nosync

    @functools.wraps(run)
    def run_part(stage: Any, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        runtimes = runtimes_below(stage.submod) if backward_type in ("input", "weight") else []
        if not runtimes:
            return run(stage, backward_type, bwd_kwargs, last_backward)
        if backward_type == "input":
            outputs = bwd_kwargs["stage_output"]
            if bwd_kwargs["output_grads"] is None:  # a loss, which a whole backward expects outside of a tuple
                (outputs,) = outputs
            with ExitStack() as stack:
                postponed = [(runtime, stack.enter_context(runtime.grads.postponing())) for runtime in runtimes]
                grads, _ = run(stage, "full", {**bwd_kwargs, "stage_output": outputs}, last_backward)
            return grads, postponed  # the stage passes the list to the second part as param_groups
        # Let torch do what else belongs to a second part (the flags of an outer fully_shard), without any gradient.
        result = run(stage, backward_type, {**bwd_kwargs, "param_groups": []}, last_backward)
        with torch.no_grad():
            for runtime, jobs in bwd_kwargs["param_groups"]:
                for job in jobs:
                    job()
                runtime.complete_gradients()
        return result

    stage_class.backward_maybe_with_nosync = run_part
