"""Tells runtimes which parameters an optimizer may have written to.

Fused and foreach optimizers leave no trace in the tensors that they write to, so their steps are counted. One hook
serves all runtimes of the process: torch goes through its hooks while they run, and one that the garbage collector
removed at that moment, with the runtime that it belongs to, would break the optimizer's step.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watcher(Protocol):
    """A runtime."""

    def note_step(self, updated: set[int]) -> None:
        """Called with the ids of an optimizer's parameters after each of its steps."""


class OptimizerSteps:
    """The hook, and who wants to know. Does not keep them alive."""

    def __init__(self) -> None:
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        register_optimizer_step_post_hook(torch.compiler.disable(self._note_step))

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for watcher in self._watchers:
            watcher.note_step(updated)

    def tell(self, watcher: Watcher) -> None:
        """Tell ``watcher`` from now on."""
        self._watchers.add(watcher)


@functools.cache
def optimizer_steps() -> OptimizerSteps:
    """The one of this process: torch has one list of such hooks."""
    return OptimizerSteps()
