"""How gradients are reduced: one collective for one or several of them, and what follows on its stream.

Which gradients travel together, and when, is in ``reduce_gradients``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._comm import collectives
from .._comm.context import CommContext
from .._comm.debug import profiler_range
from .._comm.reductions import Scattering
from .._comm.send_ring import Place, SendRing
from .._params.group_memory import pack, slot_numels
from .._params.sharded_weight import ShardedWeight
from .._params.weight_group import Reducible
from .order_of_launches import OrderOfLaunches
from .whole_gradients import UnequalReplicas, all_reduce_in_order, reduce_scatter_in_order


@dataclass(eq=False, slots=True)
class Gradient:
    """A gradient, with the settings of its submission: the user may change them for the next one."""

    weight: Reducible
    buffer: Tensor | None  # the full gradient of this rank; None after the launch, or if an op has summed it over gtp
    scale: collectives.ReduceScale
    requires_all_reduce: bool  # whether it is summed over replicas now
    share: float = 1.0  # its factor in the sum over unequal replicas
    place: Place | None = None  # from where copy engines fetch it, if the ring has room
    bundle: object | None = None  # gradients of one bundle are sent together
    waiting_nbytes: int = 0  # of it and those that wait before it
    taken: list[Tensor] | None = None  # instead of ``buffer``: what a group gave, which the launch packs


class ReductionLaunches:
    """The launches of one runtime."""

    def __init__(self, comm: CommContext) -> None:
        self._comm = comm
        self.order = OrderOfLaunches()
        self.replicas: UnequalReplicas | None = None  # set if the mesh is one of several replicas of unequal sizes

    def launch(self, together: list[Gradient]) -> None:
        self.order.note("reduce_scatter", [gradient.weight.for_forward for gradient in together])
        with profiler_range("GTP::reduce_scatter", *[each.weight.fqn for each in together]):
            self._reduce_scatter(together)

    def _packed(self, together: list[Gradient]) -> Tensor:
        """The gradients of groups, to be sent as one."""
        weight, world = together[0].weight, together[0].weight.layout.world
        taken = [part for gradient in together for part in gradient.taken or ()]
        self._comm.streams.note_reading_earlier(taken)
        dtype = weight.reduce_dtype
        if self.sends_narrow(weight, taken[0].dtype):
            dtype = taken[0].dtype
        buffer = taken[0].new_empty(world * sum(_slot_numels(together)), dtype=dtype)
        pack(taken, world, buffer)
        for gradient in together:
            gradient.taken = None
        return buffer

    def can_pack(self, weight: Reducible, scale: collectives.ReduceScale) -> bool:
        """Whether ``launch`` packs and sends what a group gave."""
        is_plain = weight.pending_grad.ring is None and scale.predivide is None
        return is_plain and weight.groups.reduce_scatter == "ring" and self.replicas is None

    def _launched(
        self,
        together: list[Gradient],
        work: Any,
        complete: Callable[[], None],
        keep: list[Tensor],
        places: Sequence[Place] = (),
    ) -> None:
        """The collective for these gradients is launched. The communication stream uses ``keep``, peers ``places``."""
        for gradient in together:
            earlier = gradient.weight.pending_grad.unreplicated
            if earlier is not None:
                keep.append(earlier)  # the communication stream adds it to the result
        self._comm.reductions.launched(work, complete, keep, places)

    def sends_narrow(self, weight: Reducible, dtype: torch.dtype) -> bool:
        """Whether a gradient of this dtype travels as it is, and its receivers add in ``reduce_dtype``."""
        is_exact = collectives.is_exact_in(dtype, weight.reduce_dtype)
        return weight.groups.sends_narrow and is_exact and self.replicas is None

    def _reduce_scatter(self, together: list[Gradient]) -> None:
        """Launch one reduce-scatter of these gradients on the scatter stream."""
        comm, weight, scale = self._comm, together[0].weight, together[0].scale
        fulls = []
        if together[0].taken is not None:
            fulls.append(self._packed(together))
        else:
            for gradient in together:
                assert gradient.buffer is not None
                fulls.append(gradient.buffer)
                gradient.buffer = None
        ring = weight.pending_grad.ring
        places, held = ((), ()) if ring is None else self._places(ring, together, fulls)
        world = weight.layout.world
        if len(fulls) == 1 and self.sends_narrow(weight, fulls[0].dtype):
            scattering = Scattering("all_to_all", fulls, world, fulls[0].dtype, dtype=weight.reduce_dtype)
        else:
            kind = weight.groups.reduce_scatter
            scattering = Scattering(kind, fulls, world, weight.reduce_dtype, ring, places)
        with comm.reductions.reducing():
            if comm.is_debugged:
                self._look_at(together, fulls)
            is_async = not comm.streams.has_streams
            work = scattering.launch(scale, weight.groups, comm.reductions, async_op=is_async)
            keep = scattering.keep()  # among them the full gradients, while the collective reads them
            self._launched(together, work, partial(self._scattered, together, scattering), keep, held)

    def _look_at(self, together: Sequence[Gradient], fulls: Sequence[Tensor]) -> None:
        """Debugging aids, before gradients travel together. Nobody writes to the padding of fulls."""
        weights, groups = [gradient.weight for gradient in together], together[0].weight.groups
        if len(fulls) < len(together):  # packed
            columns = fulls[0].view(weights[0].layout.world, -1).split(_slot_numels(together), 1)
            fulls = [part.flatten() for part in columns]
        self._comm.before_collective("reduce_scatter", ", ".join(weight.fqn for weight in weights), groups)
        values = [(weight.fqn, weight.layout.full_view(full)) for weight, full in zip(weights, fulls, strict=True)]
        self._comm.check_finite("the reduce_scatter of gradients", values, groups)

    def _places(self, ring: SendRing, together: list[Gradient], fulls: list[Tensor]) -> tuple[list[Place], list[Place]]:
        """From where copy engines fetch the gradients, and all places that must live until they have done so."""
        held = [gradient.place for gradient in together if gradient.place is not None]
        if len(held) == len(together):
            return held, held
        with self._comm.reductions.scattering():
            self._comm.reductions.wait_finished()
            places = ring.lay_out(fulls, together[0].weight.reduce_dtype)
        return places, [*held, *places]  # the copies to the new places read the old ones

    def complete_later(self, gradient: Gradient, slot: Tensor) -> None:
        """Do what follows a reduce-scatter whose result is ``slot``."""
        with self._comm.reductions.reducing():
            self._launched([gradient], None, partial(self._complete, gradient, slot), [slot])

    def _scattered(self, together: list[Gradient], scattering: Scattering) -> None:
        scattering.finish(together[0].scale)
        slots: Sequence[Tensor] = scattering.slots
        if len(slots) < len(together):  # packed
            slots = slots[0].split(_slot_numels(together))
        for gradient, slot in zip(together, slots, strict=True):
            self._complete(gradient, slot)

    def _complete(self, gradient: Gradient, slot: Tensor) -> None:
        """After the reduce-scatter, on its stream: sum over replicas, divide and accumulate."""
        weight, scale = gradient.weight, gradient.scale
        if weight.pending_grad.unreplicated is not None:
            slot += weight.pending_grad.unreplicated
            weight.pending_grad.unreplicated = None
        if not gradient.requires_all_reduce:
            weight.pending_grad.unreplicated = slot
            return
        if self.replicas is None and (replicate := weight.groups.replicate) is not None:
            if weight.has_parts:
                slot = reduce_scatter_in_order(weight.for_replicas(slot), scale, replicate, self._comm)
            else:
                all_reduce_in_order(slot, scale, replicate, self._comm)
        if scale.postdivide is not None:
            slot /= scale.postdivide
        if self.replicas is not None:  # the slot is the mean over this replica only
            self.replicas.add(single(weight), slot, gradient.share)
        elif weight.has_parts:
            weight.accumulate_part(slot)
        else:
            weight.accumulate(slot)


def _slot_numels(together: Sequence[Gradient]) -> list[int]:
    return slot_numels(gradient.weight.layout for gradient in together)


def single(weight: Reducible) -> ShardedWeight:
    """A weight of a recorded block or of unequal replicas: these have no groups."""
    assert isinstance(weight, ShardedWeight)
    return weight
