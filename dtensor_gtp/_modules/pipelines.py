"""Backward in two parts, as the zero-bubble schedules of ``torch.distributed.pipelining`` run it.

Such a schedule computes the gradients of a stage's inputs first and those of its weights later, to fill bubbles. torch
splits the autograd graph between inputs and ``stage.submod.parameters()``. Our gradients do not pass through these
leaves, so torch would find no weight in the graph, and no gradient would ever be computed. Instead, the first part is
a whole backward in which the fused ops put off their weight gradients, and the second part computes and reduces those.
Weights that are read as attributes, and whole parameters, have their gradients after the first part already.

A stage asks nobody before it splits a backward. So its method is replaced, by one that does as before for modules
without weights of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn as nn

from .. import _torch_compat as compat
from .._schedule.runtime import Runtime


class PostponedGradients(list[dict[str, Any]]):
    """What the first part leaves for the second; a stage keeps it in the place of torch's own list.

    Args:
        runtimes: The runtimes of the stage's weights.
    """

    def __init__(self, runtimes: list[Runtime]) -> None:
        super().__init__()
        self._runtimes = runtimes
        self._jobs: list[list[Callable[[], None]]] = []

    def collect(self, backward: Callable[[], Any]) -> Any:
        """Run the first part: ``backward()``."""
        with ExitStack() as stack:
            self._jobs = [stack.enter_context(runtime.grads.postponing()) for runtime in self._runtimes]
            return backward()

    def compute(self) -> None:
        """Run the second part."""
        jobs, self._jobs = self._jobs, []
        with torch.no_grad():
            for runtime, postponed in zip(self._runtimes, jobs, strict=True):
                for job in postponed:
                    job()
                runtime.complete_gradients()


def follow_pipelining(runtimes_below: Callable[[nn.Module], list[Runtime]]) -> None:
    """Let pipeline stages split backwards, once ``torch.distributed.pipelining`` has been imported.

    Args:
        runtimes_below: The runtimes of all weights below a module, in an order that is the same on all ranks.
    """
    stage_class = compat.pipeline_stage_class()
    if stage_class is not None:
        _replace_backward(stage_class, runtimes_below)


@functools.cache
def _replace_backward(stage_class: Any, runtimes_below: Callable[[nn.Module], list[Runtime]]) -> None:
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
            postponed = PostponedGradients(runtimes)
            whole = {**bwd_kwargs, "stage_output": outputs}
            grads, _ = postponed.collect(lambda: run(stage, "full", whole, last_backward))
            return grads, postponed
        # What else the stage does around a second part (an outer fully_shard's flags), with nothing left to torch.
        result = run(stage, backward_type, {**bwd_kwargs, "param_groups": []}, last_backward)
        bwd_kwargs["param_groups"].compute()
        return result

    stage_class.backward_maybe_with_nosync = run_part
