"""Training steps of one runtime, and steps of optimizers, of which all runtimes of a process hear.

A training step may have several backwards: when are its gradients complete, and when are they
dropped? Fused and foreach optimizers do not change the versions of tensors, so their steps are
counted. One hook serves all runtimes: if each had a hook, and the garbage collector removed one
while torch iterates over them, the step would fail.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._comm.context import CommContext
from .._params.managed_param import ManagedParam
from .members import Members
from .reduce_gradients import Gradients

logger = logging.getLogger(__name__)

_NUM_BEGINS = 9  # of steps, of whose intervals reports give the median


class Steps:
    """The steps of one runtime: how many there were, and the gradients of the running one."""

    def __init__(self, members: Members, comm: CommContext, grads: Gradients) -> None:
        self._members = members
        self._comm = comm
        self._grads = grads
        self.num_steps = 0  # of optimizers, on parameters of this runtime
        self.num_trained = 0  # backwards that gave gradients, and optimizer steps
        self._num_forwards = 0
        # When forwards after an optimizer step began, in seconds on the host's clock: for reports.
        self.begins: deque[float] = deque(maxlen=_NUM_BEGINS)
        self._num_begun = -1  # ``num_steps`` when the last of them began
        # Whether the running or next backward is the last one of its step.
        self.is_last_backward = True
        # Whether the last complete backward has left gradients for the next one to add to.
        self.has_unsynced = False
        # What had ended the last cell of an interactive session by then, while gradients are
        # unsynced: held, because the id of a freed exception may be that of the next one, and no
        # weak reference leads to one.
        self._unhandled_then: BaseException | None = None

    def count_step(self, *, is_ours: bool) -> None:
        """Of an optimizer."""
        self.num_steps += is_ours
        self.num_trained += 1

    def count_forward(self) -> bool:
        """Whether it has the number 1, 2, 4, 8 and so on: what is done in these costs nothing in
        the long run."""
        self._num_forwards += 1
        return self._num_forwards & (self._num_forwards - 1) == 0

    def note_begin(self) -> None:
        """Of a forward."""
        if torch.is_grad_enabled() and self._num_begun != self.num_steps:  # once a step
            self._num_begun = self.num_steps
            self.begins.append(time.perf_counter())

    def complete(self) -> None:
        """Reduce all remaining gradients. After the last backward, all are in ``.grad`` when this
        returns."""
        with self.forgetting_on_failure():
            self._grads.end_backward()
            if self.is_last_backward:
                self.num_trained += 1
                self._grads.complete(self._members.params, self._members.groups)
        flags = (param.flags for param in self._members.params)
        are_synced = all(each.requires_gradient_sync and each.requires_all_reduce for each in flags)
        self.has_unsynced = not self.is_last_backward or not are_synced
        self._unhandled_then = None
        if self.has_unsynced:
            self._unhandled_then = getattr(sys, "last_value", None)

    def publish(self, params: Sequence[ManagedParam]) -> None:
        """In the last backward, complete the gradients of ``params`` now, e.g. for an outer
        ``fully_shard``."""
        if self.is_last_backward:
            with self.forgetting_on_failure():
                self._grads.complete(params)

    @contextmanager
    def forgetting_on_failure(self) -> Iterator[None]:
        """If this context raises, a later backward does not add to gradients of this one."""
        try:
            yield
        except BaseException:  # also of a user's hook
            self.forget()
            raise

    def forget(self) -> None:
        """After an exception: wait for launched reductions, and drop all gradients that are not in
        ``.grad`` yet."""
        self._grads.abandon()  # first: streams may still write to what is dropped below
        self.has_unsynced = False
        self._unhandled_then = None
        for param in self._members.params:
            param.reset_grads()
        for group in self._members.groups:
            group.pending_grad.forget()

    def forget_interrupted(self) -> None:
        """After a forward that raised. Gradients of earlier microbatches stay, unless the user has
        interrupted the step, and will hardly go on with it."""
        error = sys.exc_info()[1]  # set in the ``finally`` blocks that lead here
        if self.has_unsynced and isinstance(error, KeyboardInterrupt):
            self._give_up("a forward was interrupted")

    def forget_what_was_given_up(self) -> None:
        """In a notebook, an interrupt between two microbatches ends the loop, and the process goes
        on: the next forward is one of a new step. A program that handles the interrupt calls
        ``reset_iter_state``."""
        unhandled = getattr(sys, "last_value", None)  # interactive sessions set it
        is_new = unhandled is not self._unhandled_then
        if self.has_unsynced and is_new and isinstance(unhandled, KeyboardInterrupt):
            self._give_up("a step was interrupted between microbatches")

    def _give_up(self, what: str) -> None:
        logger.warning("%s; unsynced gradients are dropped (rank %d)", what, dist.get_rank())
        self.forget()

    @property
    def are_in_flight(self) -> bool:
        """Whether earlier backwards, none of them the last one, have left gradients for the next
        one to add to."""
        if self._comm.reductions.is_reducing:
            return True
        if any(param.gradient.reduced is not None for param in self._members.params):
            return True
        return any(param.has_local_grad for param in self._members.whole)


class Watcher(Protocol):
    """A runtime, or another object that follows optimizer steps."""

    # After each step, with the ids of the optimizer's parameters.
    def note_step(self, updated: set[int]) -> None: ...


class OptimizerSteps:
    """The hook, and the ``watchers`` that it tells about steps."""

    def __init__(self) -> None:
        self.watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        # By id: parameters that no module registers any more, and their names.
        self._replaced: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        # Never removed: this object lives as long as the process.
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
        errors: list[Exception] = []
        for watcher in self.watchers:
            try:
                watcher.note_step(updated)
            except Exception as error:  # the others must hear of the step all the same
                errors.append(error)
        if errors:
            raise errors[0]

    def note_replaced(self, param: nn.Parameter, fqn: str) -> None:
        """``fully_shard`` has put another parameter instead of this one: refuse steps of this one."""
        key = id(param)
        replaced = self._replaced
        # The callback removes the entry before another object can get the id.
        replaced[key] = weakref.ref(param, lambda _: replaced.pop(key, None)), fqn


@functools.cache
def optimizer_steps() -> OptimizerSteps:
    """The only one of this process, as torch has one list of such hooks."""
    return OptimizerSteps()
