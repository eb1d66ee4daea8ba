"""Tells what long work does: a line in the log when it begins and ends, and in a terminal how far it is.

The log has the lines at level INFO, so ``TORCH_LOGS="+dtensor_gtp"`` shows them. The terminal has a line on rank 0, and
only of work that takes longer than a second.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TextIO, TypeVar

import torch.distributed as dist

T = TypeVar("T")
# Work that is done sooner shows nothing in a terminal; later the line changes as often as one can read it.
_QUIET_SECONDS = 1.0
_BETWEEN_SECONDS = 0.25


class Progress:
    """A context around long work.

    Args:
        logger: That of the module which does the work.
        what: What is done, as the log says it: "first forward".
        total: How often :meth:`advance` will be called; 0 if it is not known.
        stream: Where the counts go if it is a terminal; standard error by default.
        now: The time in seconds.
    """

    def __init__(
        self,
        logger: logging.Logger,
        what: str,
        total: int = 0,
        *,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._what = what
        self._total = total
        self._now = now
        if stream is None:
            self._stream = sys.stderr
        else:
            self._stream = stream
        self._num = 0
        self._width = 0
        self._begin = self._drawn = now()

    def __enter__(self) -> Progress:
        of = ""
        if self._total:
            of = f", {self._total} in all"
        self._logger.info("%s: begins%s", self._what, of)
        return self

    def advance(self, name: str = "") -> None:
        """One more is done; ``name`` says which."""
        self._num += 1
        now = self._now()
        if now - self._begin < _QUIET_SECONDS or now - self._drawn < _BETWEEN_SECONDS or not self._is_shown():
            return
        self._drawn = now
        self._write(f"{self._what}: {self._counted()}, {now - self._begin:.0f} s{f' ({name})' if name else ''}")

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """``items``, each of which is done when the next one is asked for."""
        for item in items:
            yield item
            self.advance()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._width:
            self._write("")
        seconds = self._now() - self._begin
        counted = ""
        if self._num:
            counted = f" ({self._counted()})"
        if kind is None:
            how = "done"
        else:
            how = f"failed with {kind.__name__}"
        self._logger.info("%s: %s after %.1f s%s", self._what, how, seconds, counted)

    def _counted(self) -> str:
        if self._total:
            return f"{self._num} of {self._total}"
        return str(self._num)

    def _is_shown(self) -> bool:
        is_first = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        return is_first and self._stream.isatty()

    def _write(self, line: str) -> None:
        """In the place of the line before."""
        end = ""
        if not line:
            end = "\r"
        self._stream.write(f"\r{line.ljust(self._width)}{end}")
        self._stream.flush()
        self._width = len(line)
