"""Uses of weights.

[Note: uses and holds]
A *use* acquires a gathered weight and releases it. In between the weight is *live*. The last release frees the buffer,
or the weight stays in memory without a use: it is *kept*. Gathers that were launched for uses to come are *pending*.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._comm.debug import profiler_range
from .._params.gathered import Gathered
from .._params.sharded_weight import Gatherable, ShardedWeight
from .prefetch import Prefetch


class Use:
    """A use of a weight, as a context. It is a class because a generator is several times slower on the host."""

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
    """The uses of the weights of one runtime."""

    def acquire(self, target: Gatherable) -> Gathered:
        """Begin a use: the full weight, ready on the current stream. Launch the next gathers of the plan."""
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
        """A use that ends with the context. The context's value is the full weight."""
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
