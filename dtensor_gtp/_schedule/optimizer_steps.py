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
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watcher(Protocol):
    """A runtime."""

    def note_step(self, updated: set[int]) -> None:
        """Called with the ids of an optimizer's parameters after each of its steps."""


class OptimizerSteps:
    """The hook, and who wants to know. Does not keep them alive."""

    def __init__(self) -> None:
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        # Parameters that are registered nowhere any more, by their ids, with their names.
        self._replaced: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        register_optimizer_step_post_hook(torch.compiler.disable(self._note_step))

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for one in updated & self._replaced.keys():
            self._refuse(optimizer, one)
        for watcher in self._watchers:
            watcher.note_step(updated)

    def note_replaced(self, param: nn.Parameter, fqn: str) -> None:
        """``fully_shard`` has put another parameter in the place of this one: to step it has no effect."""
        number, replaced = id(param), self._replaced
        replaced[number] = weakref.ref(param, lambda _: replaced.pop(number, None)), fqn

    def _refuse(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        param, fqn = self._replaced[number]
        if (shape := getattr(param(), "shape", None)) is not None:
            raise RuntimeError(
                f"A {type(optimizer).__name__} optimizer has stepped parameter '{fqn}' of shape {tuple(shape)} to no "
                "effect, because fully_shard has put another one in its place. Create the optimizer after fully_shard."
            )

    def tell(self, watcher: Watcher) -> None:
        """Tell ``watcher`` from now on."""
        self._watchers.add(watcher)

    def forget(self, watcher: Watcher) -> None:
        """Tell ``watcher`` no more."""
        self._watchers.discard(watcher)


@functools.cache
def optimizer_steps() -> OptimizerSteps:
    """The one of this process: torch has one list of such hooks."""
    return OptimizerSteps()
