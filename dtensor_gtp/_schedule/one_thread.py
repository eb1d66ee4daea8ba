"""Refuses a second thread: two passes at a time would take each other's weights and gradients."""

from __future__ import annotations

import threading
from typing import NoReturn

import torch.distributed as dist

from .. import _torch_compat as compat


class OneThread:
    """The threads that run the passes of one runtime."""

    def __init__(self) -> None:
        self._in_frame = 0  # that is in a frame now
        self._of_forward = self._of_backward = 0  # of the last one

    def enter(self) -> None:
        """Before a frame."""
        thread = threading.get_ident()
        # In a backward, the threads of autograd recompute forwards for the one that waits for them.
        if self._in_frame != thread and compat.current_graph_task_id() == -1:
            if self._in_frame:
                _refuse("forward")
            self._in_frame = thread

    def leave(self) -> None:
        """After the outermost frame."""
        self._in_frame = 0

    def begin_forward(self, is_backward_running: bool) -> None:
        thread = threading.get_ident()
        if is_backward_running and self._of_forward != thread:
            _refuse("forward")
        self._of_forward = thread

    def begin_backward(self, is_running: bool) -> None:
        """A backward begins; it may be running already. On a CPU autograd runs in the thread that calls it."""
        thread = threading.get_ident()
        if self._in_frame not in (0, thread) or (is_running and self._of_backward != thread):
            _refuse("backward")
        self._of_backward = thread


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"Thread '{threading.current_thread().name}' began a {what} of a module that gtp_shard has sharded while "
        f"another thread is in a forward or backward of it (rank {dist.get_rank()}). Run one pass at a time: let "
        "one thread train the module, or give each a module of its own."
    )
