"""Uses of weights: each acquires a gathered weight and releases it.

[Note: uses and holds]
A *use* acquires a gathered weight and releases it; the last release frees the buffer. Between the two the weight is
*live*. Gathers that were launched for uses to come are *pending*. A gathered weight without a use may be *kept*.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._comm.debug import profiler_range
from .._params.gathered import Gathered
from .._params.sharded_weight import Gatherable, ShardedWeight
from .prefetch import Prefetch


class Use:
    """A use of a weight, as a context. A class, because a generator takes the host several times as long."""

    __slots__ = ("_gathered", "_gathering", "_range", "_target")

    def __init__(self, gathering: Gathering, target: Gatherable) -> None:
        self._gathering, self._target = gathering, target

    def __enter__(self) -> Tensor:
        gathered = self._gathered = self._gathering.acquire(self._target)
        self._range = profiler_range("GTP::compute", self._target.weight.fqn)
        self._range.__enter__()
        try:
            return gathered.full
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, *exception: Any) -> None:
        self._range.__exit__(*exception)
        self._gathering.release(self._target, self._gathered)


class Gathering(Prefetch):
    """The gathers of one runtime."""

    is_initialized = False

    def ensure_initialized(self) -> None:
        """In the first forward: check that there is something to run on, and make the communicators."""
        raise NotImplementedError

    def acquire(self, target: Gatherable) -> Gathered:
        """Begin a use: the full weight, ready on the current stream. Launches the gathers that the plan has next."""
        if self.recording is not None:
            return self.recording.acquire(target)
        gathered, comm = target.live, self.comm
        if gathered is None or not target.weight.is_fresh(gathered):
            if not self.is_initialized:
                self.ensure_initialized()
            if target.weight.is_cut_again:
                target.weight.check_readable()
            gathered = self._take_kept(target) if target.kept is not None else None
            gathered = target.live = gathered or self._take_prefetched(target) or self._gather_now(target)
            self._advance(target)
        gathered.holds += 1
        if comm.is_debugged:
            comm.delay()
        done = gathered.done
        comm.wait(done)
        if done.origin is not None:
            comm.note_reading(done, (gathered.buffer,))
        return gathered

    def using(self, target: Gatherable) -> Use:
        """A use that ends with the context, whose value is the full weight."""
        return Use(self, target)

    def release(self, target: Gatherable, gathered: Gathered) -> None:
        """End a use."""
        if self.recording is not None:
            return
        gathered.holds -= 1
        if gathered.holds:
            return
        if target.live is gathered:
            target.live = None
        if self._is_kept_after_use(target) and target.weight.is_fresh(gathered):
            target.kept = gathered
        elif self.debug.poison:
            self._free(gathered)

    def gather_kept(self, weight: ShardedWeight) -> None:
        """Gather a weight ahead of any use, for ``unshard``."""
        self.ensure_initialized()
        if weight.live is None and (weight.kept is None or not weight.is_fresh(weight.kept)):
            self.drop_kept(weight)
            weight.follow(weight.sites[0])
            weight.check_readable()
            self.comm.begin_pass(weight.groups)
            weight.kept = self._take_prefetched(weight) or self._gather([weight])[0]
