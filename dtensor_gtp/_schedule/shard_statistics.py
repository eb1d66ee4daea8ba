"""When ranks agree on statistics of quantized shards: at the start of a forward, or in its first gathers."""

from __future__ import annotations

from collections.abc import Sequence

from .._comm.collectives import Groups
from .._comm.context import CommContext
from .._params import gather
from .._params.pack_planes import QuantizedWire, agree_on_amax
from .._params.sharded_weight import Gatherable, ShardedWeight


class Statistics:
    """Lets ranks agree on statistics of quantized shards."""

    def __init__(self, comm: CommContext) -> None:
        self._comm = comm
        # Weights whose ranks have yet to agree in this forward, by mesh; meshes that agreed on some.
        self.waiting: dict[Groups, list[ShardedWeight]] = {}
        self._agreeing: set[Groups] = set()

    def begin_forward(self, weights: Sequence[ShardedWeight]) -> None:
        """At the start of a forward, let the ranks agree on statistics of quantized shards that
        changed. Each mesh does so in its first gathers, if that runs on streams beside compute.
        Otherwise all do so at once: later, compute or the host would wait for ranks of other
        meshes, which gather other weights by then."""
        self.waiting.clear()  # what the last forward has not gathered
        self._agreeing.clear()
        changed = []
        for weight in weights:
            wire = weight.form.wire
            # ``begin_forward`` is False if no statistic is needed now, or if the present one is right.
            if wire is not None and isinstance(wire, QuantizedWire) and wire.begin_forward():
                is_beside_compute = weight.groups.casts_shards or self._comm.streams.has_streams
                if wire.is_within_mesh and is_beside_compute:
                    self.waiting.setdefault(weight.groups, []).append(weight)
                else:
                    changed.append(weight)  # agreed on below, before any gather
        agree_on_amax(changed, self._comm)

    def agree(self, targets: Sequence[Gatherable]) -> None:
        """Before a gather, let the ranks of the mesh agree on statistics, where shards are packed.
        The first gather agrees on the weights that it sends only, so that it does not wait for
        others; the second one on all others."""
        groups = targets[0].weight.groups
        waiting = self.waiting.get(groups, [])
        sent = {weight for target in targets for weight in gather.weights_of(target)}
        if sent.isdisjoint(waiting):  # nothing that is sent waits for others
            return
        # Each gather asks whether anything is waiting, so a mesh that waits no more has no entry.
        del self.waiting[groups]
        if groups not in self._agreeing:  # the first gather of this forward
            later = [weight for weight in waiting if weight not in sent]
            waiting = [weight for weight in waiting if weight in sent]
            if later:
                self.waiting[groups] = later
        self._agreeing.add(groups)
        with self._comm.packing(groups):  # on the stream that packs shards: compute does not wait
            agree_on_amax(waiting, self._comm)
