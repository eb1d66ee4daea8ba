"""Gathers over the replicas what their optimizers have written, see [Note: parts of replicas].

Each write is gathered once, ahead of the first gather over gtp that needs it, on the same stream:
so it overlaps with compute as that does. Replicas may plan the gathers over gtp in different ways.
What they gather from each other has the order of registration, and all of it is launched when the
forward ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torch import Tensor

from .._comm.collectives import Groups
from .._comm.context import CommContext
from .._comm.debug import profiler_range
from .._comm.streams import Done
from .._params.sharded_weight import ShardedWeight


class ReplicaGathers:
    """Those of one runtime."""

    def __init__(self, comm: CommContext) -> None:
        self._comm = comm
        # Of which each replica has a part, in order of registration.
        self.weights: list[ShardedWeight] = []
        self._seen: int | None = None  # the sum of all versions when the last gathers were planned
        self._waiting: dict[Groups, deque[list[ShardedWeight]]] = {}  # launches to come
        self._last: dict[Groups, Done] = {}  # the last launch

    def begin(self, nbytes: int) -> None:
        """Plan to gather all weights if any was written since; up to ``nbytes`` in one launch."""
        if not self.weights:
            return
        if self._comm.streams.is_capturing:
            raise NotImplementedError(
                "A CUDA graph cannot record forwards with gtp_shard(shard_optimizer=True): each one decides whether "
                "replicas gather what their optimizers have written. Leave out shard_optimizer."
            )
        versions = sum(map(_version, self.weights))
        if versions == self._seen:
            return
        self._seen = versions
        self._waiting.clear()
        room: dict[Groups, int] = {}
        for weight in self.weights:
            assert weight.part is not None
            weight.part.gathered = None  # what it has of other replicas is old
            launches = self._waiting.setdefault(weight.groups, deque())
            size = weight.part.buffer.nbytes
            if not launches or size > room[weight.groups]:
                launches.append([])
                room[weight.groups] = nbytes
            launches[-1].append(weight)
            room[weight.groups] -= size
        # Statistics of quantized shards are computed before their gathers.
        self.complete([weight for weight in self.weights if weight.form.wire is not None])

    def bring(self, weights: Iterable[ShardedWeight]) -> None:
        """Launch what completes these shards, for gathers over gtp that follow."""
        for weight in weights:
            if _is_whole(weight):
                continue
            waiting = self._waiting.get(weight.groups)
            while waiting and not _is_whole(weight):
                self._launch(waiting.popleft())  # all replicas have this order
            if not _is_whole(weight):  # this forward has written to it, or replaced it
                self._launch([weight])

    def complete(self, weights: Iterable[ShardedWeight]) -> None:
        """As ``bring``, for code that reads the shards themselves."""
        weights = [weight for weight in weights if weight.part is not None]
        self.bring(weights)
        # One stream gathers for each mesh, so its last launch is behind all others.
        for groups in dict.fromkeys(weight.groups for weight in weights):
            if (done := self._last.pop(groups, None)) is not None:
                self._comm.streams.wait(done)

    def finish(self) -> None:
        """Launch all that is left, of weights that this forward has not used."""
        left = [weight for weight in self.weights if not _is_whole(weight)]
        if left:
            self.complete(left)

    def _launch(self, together: list[ShardedWeight]) -> None:
        groups = together[0].groups
        sent = []
        for weight in together:
            assert weight.part is not None
            weight.part.gathered = _version(weight)  # readers follow on this stream, or wait
            if weight.part.buffer.numel():  # else all replicas have an empty shard
                dtype = weight.compute_dtype
                if weight.form.wire is not None:
                    dtype = weight.shard.dtype  # what is quantized, is so from all bits
                sent.append((weight.part, dtype))
        if not sent:
            return

        def pack() -> tuple[list[Tensor], list[Tensor]]:
            pairs = [part.pack(dtype) for part, dtype in sent]
            return [output for output, _ in pairs], [own for _, own in pairs]

        def unpack(outputs: list[Tensor]) -> None:
            for (part, _), output in zip(sent, outputs, strict=True):
                part.unpack(output)

        names = [weight.fqn for weight in together]
        with profiler_range("GTP::all_gather of replicas", *names):
            done = self._comm.gather_from_replicas(groups, ", ".join(names), pack, unpack)
        self._last[groups] = done
        if together[0].layout.world == 1:
            self._comm.streams.wait(done)  # what follows runs on the compute stream


def _version(weight: ShardedWeight) -> int:
    """Counts writes to the part."""
    return sum(weight.version)


def _is_whole(weight: ShardedWeight) -> bool:
    """Whether the shard has the present rows of all replicas."""
    return weight.part is None or weight.part.gathered == _version(weight)
