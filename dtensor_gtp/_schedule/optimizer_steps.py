"""Tells runtimes which parameters an optimizer may have written to.

Fused and foreach optimizers do not change the versions of tensors, so steps are counted. One hook serves all runtimes:
if each had a hook, and the garbage collector removed one while torch iterates over them, the step would fail.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watcher(Protocol):
    """A runtime, or another object that follows optimizer steps."""

    def note_step(self, updated: set[int]) -> None: ...  # after each step, with the ids of the optimizer's parameters


class OptimizerSteps:
    """The hook, and the ``watchers`` that it tells about steps."""

    def __init__(self) -> None:
        self.watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        # By id: parameters that no module registers any more, and their names.
        self._replaced: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        register_optimizer_step_post_hook(torch.compiler.disable(self._note_step))

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for key in updated & self._replaced.keys():
            param, fqn = self._replaced[key]
            if (shape := getattr(param(), "shape", None)) is not None:
                raise RuntimeError(
                    f"The step of a {type(optimizer).__name__} optimizer on parameter '{fqn}' of shape "
                    f"{tuple(shape)} had no effect, because fully_shard has replaced this parameter. Create the "
                    "optimizer after fully_shard."
                )
        for watcher in self.watchers:
            watcher.note_step(updated)

    def note_replaced(self, param: nn.Parameter, fqn: str) -> None:
        """``fully_shard`` has put another parameter instead of this one, so refuse steps of this one."""
        key, replaced = id(param), self._replaced
        replaced[key] = weakref.ref(param, lambda _: replaced.pop(key, None)), fqn


@functools.cache
def optimizer_steps() -> OptimizerSteps:
    """The only one of this process, as torch has one list of such hooks."""
    return OptimizerSteps()
