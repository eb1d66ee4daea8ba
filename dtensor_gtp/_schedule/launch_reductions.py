"""How gradients are reduced: one collective for one or several of them, and what follows on its
stream. Those of parameters that stay whole are all-reduced at the end of backward.

Which gradients travel together, and when, is in ``reduce_gradients``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from .._comm import collectives
from .._comm.addends import is_loaded_ahead
from .._comm.context import CommContext
from .._comm.debug import profiler_range
from .._comm.reductions import Scattering, sum_dtype
from .._comm.send_ring import Place, SendRing
from .._params.group_gradients import packed, slot_numels
from .._params.sharded_weight import ShardedWeight
from .._params.weight_group import Reducible
from .._params.whole_param import WholeParam
from .parted_ranks import OrderOfLaunches
from .waiting_gradients import travels_as_it_is

WholeBucket = list[tuple[WholeParam, Tensor | None]]  # None: this rank has not used the parameter


@dataclass(eq=False, slots=True)
class Gradient:
    """A gradient, with the settings of its submission: the user may change them for the next one."""

    weight: Reducible
    # The full gradient of this rank. None after the launch, and if an op has summed it over gtp.
    buffer: Tensor | None
    scale: collectives.ReduceScale
    requires_all_reduce: bool  # whether it is summed over replicas now
    share: float = 1.0  # its factor in the sum over unequal replicas
    place: Place | None = None  # from where copy engines fetch it, if the ring has room
    bundle: object | None = None  # gradients of one bundle are sent together
    taken: list[Tensor] | None = None  # instead of ``buffer``: of a group, packed by the launch


class Written(NamedTuple):
    """A gradient that a recorded block leaves in a buffer."""

    weight: ShardedWeight
    buffer: Tensor
    bundle: int | None  # gradients with the same number are sent together


class ReductionLaunches:
    """The launches of one runtime."""

    def __init__(self, comm: CommContext) -> None:
        self._comm = comm
        self.order = OrderOfLaunches()
        # An ``elastic.sync.ReplicaSync`` if the mesh is one of several replicas of unequal sizes.
        self.replicas: Any = None
        self._block: object = None  # the recorded block whose backward submits gradients
        self._has_launched = False  # anything since that block's first gradient came

    def enter_block(self, weight: Reducible) -> None:
        """Call before each gradient. A recorded block that runs eagerly waits for no reduction that
        it has launched itself: ranks that replay it launch theirs after the graph, which waits for
        gathers that this rank launches later."""
        block = None
        if isinstance(weight, ShardedWeight) and weight.form.fixed is not None:
            block = weight.form.fixed.block
        if block is not self._block:
            self._block = block
            self._has_launched = False

    def take_turn(self, settle: Callable[[], None]) -> None:
        """Call before each gradient, see ``ReplicaSync``."""
        if self.replicas is not None:
            self.replicas.take_turn(settle)

    def share(self, factor: float | None) -> float:
        """The factor of a gradient of this rank in the sum over unequal replicas."""
        if self.replicas is None:
            return 1.0
        share: float = self.replicas.share(factor)
        return share

    def launch(self, together: list[Gradient]) -> None:
        self.order.note("reduce_scatter", [gradient.weight.for_forward for gradient in together])
        with profiler_range("GTP::reduce_scatter", *[each.weight.fqn for each in together]):
            self._reduce_scatter(together)

    def _packed(self, together: list[Gradient]) -> list[Tensor]:
        """The gradients of groups, to be sent as one: small ones packed, large ones as autograd has left
        them, in their order."""
        weight = together[0].weight
        world = weight.layout.world
        taken = [part for gradient in together for part in gradient.taken or ()]
        # Blocks may have left these on other streams than the one that packs them now.
        self._comm.streams.note_reading_earlier(taken)
        dtype = weight.reduce_dtype
        is_narrow = self.sends_narrow(weight, taken[0].dtype)  # so nothing is cast here
        if is_narrow:
            dtype = taken[0].dtype
        # All ranks must part alike, so neither a kernel that does not work here nor a layout decides.
        may_stay = is_narrow and is_loaded_ahead(taken[0], world)
        fulls: list[Tensor] = []
        for stays, parts in groupby(taken, lambda part: may_stay and _is_sendable(part, world)):
            if stays:
                fulls += [part.contiguous() for part in parts]
            else:
                # The compute stream owns this memory. ``Scattering.keep`` holds it until the
                # reduction is retired.
                fulls.append(packed(list(parts), world, dtype))
        for gradient in together:
            gradient.taken = None  # with the last reference to what was packed, its memory
        return fulls

    def can_pack(self, weight: Reducible, scale: collectives.ReduceScale) -> bool:
        """Whether ``launch`` packs and sends what a group gave."""
        return scale.predivide is None and weight.groups.reduce_scatter == "ring"

    def _launched(
        self,
        together: list[Gradient],
        work: Any,
        complete: Callable[[], None],
        keep: list[Tensor],
        places: Sequence[Place] = (),
    ) -> None:
        """The collective for these gradients is launched. Until it is complete, the communication
        stream uses ``keep``, and peers use ``places``."""
        for gradient in together:
            earlier = gradient.weight.pending_grad.unreplicated
            if earlier is not None:
                keep.append(earlier)  # the communication stream adds it to the result
        self._comm.reductions.launched(work, complete, keep, places)

    def sends_narrow(self, weight: Reducible, dtype: torch.dtype) -> bool:
        """Whether a gradient travels in this dtype, and its receivers add in ``reduce_dtype``."""
        is_exact = collectives.is_exact_in(dtype, weight.reduce_dtype)
        return weight.groups.sends_narrow and is_exact and self.replicas is None

    def _reduce_scatter(self, together: list[Gradient]) -> None:
        """Launch one reduce-scatter of these gradients on the scatter stream."""
        comm = self._comm
        weight = together[0].weight  # all have its groups, dtype and scale
        scale = together[0].scale
        fulls: list[Tensor] = []
        is_packed = together[0].taken is not None
        if is_packed:
            fulls = self._packed(together)
        else:
            for gradient in together:
                assert gradient.buffer is not None
                fulls.append(gradient.buffer)
                gradient.buffer = None  # ``scattering`` says below how long it has to live
        ring = weight.pending_grad.ring
        places: Sequence[Place] = ()
        held: Sequence[Place] = ()  # alive, and so in use, until the launch is retired
        if ring is not None:
            places, held = self._places(ring, together, fulls)
        world = weight.layout.world
        dtype = weight.reduce_dtype
        # Outside of ``reducing``: the compute stream owns what a scattering allocates.
        # Narrow gradients are exchanged. Each rank adds what it receives, in ``dtype``.
        if (len(fulls) == 1 or is_packed) and self.sends_narrow(weight, fulls[0].dtype):
            scattering = Scattering("all_to_all", fulls, world, fulls[0].dtype, dtype=dtype)
        else:
            kind = weight.groups.reduce_scatter
            scattering = Scattering(kind, fulls, world, dtype, ring, places)
        waiting: AbstractContextManager[Any] = nullcontext()
        if self._block is not None and self._has_launched:
            waiting = comm.reductions.unbounded()
        self._has_launched = True
        with waiting, comm.reductions.reducing():  # on the scatter stream, after all compute streams
            if comm.is_debugged:
                self._look_at(together, fulls, is_packed)
            is_async = not comm.streams.has_streams
            work = scattering.launch(scale, weight.groups, comm.reductions, async_op=is_async)
            keep = scattering.keep()  # also the full gradients, while the collective reads them
            # Without streams it runs after the work.
            complete = partial(self._scattered, together, scattering, is_packed)
            self._launched(together, work, complete, keep, held)

    def _look_at(self, together: Sequence[Gradient], fulls: Sequence[Tensor], is_packed: bool) -> None:
        """Debugging aids, before gradients travel together."""
        weights = [gradient.weight for gradient in together]
        groups = weights[0].groups
        if is_packed:
            rows = torch.cat([full.view(weights[0].layout.world, -1) for full in fulls], 1)
            fulls = [part.flatten() for part in rows.split(_slot_numels(together), 1)]
        names = ", ".join(weight.fqn for weight in weights)
        self._comm.before_collective("reduce_scatter", names, groups)
        values = [  # without the padding, to which nobody writes
            (weight.fqn, weight.layout.full_view(full)) for weight, full in zip(weights, fulls, strict=True)
        ]
        self._comm.check_finite("the reduce_scatter of gradients", values, groups)

    def _places(self, ring: SendRing, together: list[Gradient], fulls: list[Tensor]) -> tuple[list[Place], list[Place]]:
        """From where copy engines fetch the gradients, and all places that must live until they
        have done so."""
        held = [gradient.place for gradient in together if gradient.place is not None]
        if len(held) == len(together):
            return held, held  # the GEMMs have written into the ring
        with self._comm.reductions.scattering():
            self._comm.reductions.wait_finished()  # the finish stream may still read it
            places = ring.lay_out(fulls, together[0].weight.reduce_dtype)
        return places, [*held, *places]  # the copies to the new places read the old ones

    def complete_later(self, gradient: Gradient, slot: Tensor) -> None:
        """Do what follows a reduce-scatter whose result is ``slot``."""
        with self._comm.reductions.reducing():
            # The compute stream owns ``slot``: it may reuse the memory only after this reduction.
            self._launched([gradient], None, partial(self._complete, gradient, slot), [slot])

    def _scattered(self, together: list[Gradient], scattering: Scattering, is_packed: bool) -> None:
        scattering.finish(together[0].scale)
        slots: Sequence[Tensor] = scattering.slots
        if is_packed:
            slots = scattering.flat.split(_slot_numels(together))
        for gradient, slot in zip(together, slots, strict=True):
            self._complete(gradient, slot)

    def _complete(self, gradient: Gradient, slot: Tensor) -> None:
        """After the reduce-scatter, on its stream: sum over replicas, divide and accumulate."""
        weight = gradient.weight
        scale = gradient.scale
        if weight.pending_grad.unreplicated is not None:  # of earlier microbatches
            slot += weight.pending_grad.unreplicated
            weight.pending_grad.unreplicated = None
        if not gradient.requires_all_reduce:
            weight.pending_grad.unreplicated = slot  # until a microbatch that is summed over replicas
            return
        if self.replicas is None and (replicate := weight.groups.replicate) is not None:
            if weight.has_parts:  # each replica gets one row of the sum
                rows = weight.for_replicas(slot)
                slot = rows.new_empty(rows.shape[1])
                self._in_order(compat.reduce_scatter_base, slot, rows.reshape(-1), scale.op, replicate)
            else:
                self._in_order(compat.all_reduce, slot, scale.op, replicate)
        if scale.postdivide is not None:
            slot /= scale.postdivide
        if self.replicas is not None:  # the slot is the mean over this replica only
            self.replicas.add(single(weight), slot, gradient.share)
        elif weight.has_parts:
            weight.accumulate_part(slot)
        else:
            weight.accumulate(slot)

    def _in_order(self, collective: Callable[..., dist.Work | None], *args: Any) -> None:
        """Run a collective on the current stream. Without streams, wait for the result."""
        is_async = not self._comm.streams.has_streams
        work = collective(*args, is_async)
        if work is not None and is_async:  # with streams, the current one orders what follows
            work.wait()

    def reduce_whole(self, params: Iterable[WholeParam]) -> None:
        """All-reduce local gradients of whole parameters, in one call for each mesh, dtype and
        divide factor.

        All trained parameters take part, with zeros where this rank has not used them: other ranks
        may have used others, and nothing else would tell the ranks apart. A parameter that no rank
        has used gets no gradient, or zeros if the user asks for that
        (``set_reduce_scatter_unused_params``).
        """
        buckets: dict[tuple[Any, ...], WholeBucket] = {}
        for param in params:
            grad = param.take_local_grad()
            flags = param.flags
            if not (flags.requires_gradient_sync and flags.requires_all_reduce):
                if grad is not None:
                    grad = grad.to(param.reduce_dtype)
                param.unsynced_grad = grad  # for a later microbatch; None: no gradient so far
            elif grad is not None or param.gradient.awaits_reduction:
                key = param.groups, param.reduce_dtype, flags.gradient_divide_factor
                buckets.setdefault(key, []).append((param, grad))
        for (groups, dtype, factor), bucket in buckets.items():
            if self.replicas is None:
                self._reduce_bucket(bucket, sum_dtype(groups.reduce_scatter, dtype))
            else:
                self.replicas.reduce_whole(dtype, factor, bucket)
        for bucket in buckets.values():
            for param, _ in bucket:
                param.gradient.awaits_reduction = False

    def _reduce_bucket(self, bucket: WholeBucket, dtype: torch.dtype) -> None:
        comm = self._comm
        first = bucket[0][0]
        groups = first.groups
        active = [group for group in (groups.scatter, groups.replicate) if group is not None and group.size() > 1]
        if not active:  # no peer can have used what this rank has not
            bucket = [(param, grad) for param, grad in bucket if grad is not None]
            if not bucket:
                return
        scale = collectives.reduce_scale(dtype, first.num_ranks, first.flags.gradient_divide_factor)
        grads, used = with_zeros(bucket)
        sent = [*grads, used]
        marks = None
        if groups.scatter.size() > 1:
            marks = self.order.marks(groups, used, dtype)
            if marks is not None:
                sent.append(marks.values)
        flat = _flatten(sent, dtype)
        wire = flat
        if flat.is_complex():
            wire = torch.view_as_real(flat)  # a view: the sum arrives in ``flat``

        def complete() -> None:
            # Before the sum over replicas, which need not launch alike.
            if marks is not None and not comm.streams.is_capturing:
                self.order.compare(marks, flat[-len(marks.values) :], first.mesh, groups)
            for group in active[1:]:
                self._in_order(compat.all_reduce, wire, scale.op, group)
            if scale.postdivide is not None:
                wire.div_(scale.postdivide)
            *parts, used_by_any = compat.unflatten(flat, [*grads, used])
            accumulate_whole(bucket, parts, used_by_any)

        title = f"{len(bucket)} whole parameters"
        with profiler_range("GTP::all_reduce", title), comm.reductions.reducing():
            if comm.is_debugged:
                names = ", ".join(param.fqn for param, _ in bucket)
                comm.before_collective("all_reduce", names, groups)
                values = [(param.fqn, grad) for (param, _), grad in zip(bucket, grads, strict=True)]
                comm.check_finite("the all_reduce of gradients", values, groups)
            if scale.predivide is not None:
                wire.div_(scale.predivide)
            work = None  # without peers nothing is sent
            if active:
                work = compat.all_reduce(wire, scale.op, active[0], not comm.streams.has_streams)
            comm.reductions.launched(work, complete, (flat,))  # memory of the compute stream


def with_zeros(bucket: WholeBucket) -> tuple[list[Tensor], Tensor]:
    """The gradients that this rank sends, and marks that travel with them: the sum of a mark is positive where any
    rank has used the parameter."""
    grads = [param.new_zero_grad() if grad is None else grad for param, grad in bucket]
    used = grads[0].new_ones(len(bucket))  # filled on the device, as a graph may record it
    for index, (_, grad) in enumerate(bucket):
        if grad is None:
            used[index].zero_()
    return grads, used


def accumulate_whole(bucket: WholeBucket, sums: Sequence[Tensor], used_by_any: Tensor) -> None:
    """Take the sums of what ``with_zeros`` has returned."""
    for index, ((param, grad), total) in enumerate(zip(bucket, sums, strict=True)):
        if grad is None and not param.flags.reduce_scatter_unused_params:
            param.gradient.note_use_elsewhere(used_by_any[index])  # if no rank used it, it gets none
        param.gradient.accumulate(total)


def _flatten(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """All gradients one after the other, in the order that all ranks have. Neighbours of one dtype
    are cast together."""
    flats = []
    for _, alike in groupby(grads, lambda grad: grad.dtype):
        rows = [grad if grad.ndim == 1 else grad.reshape(-1) for grad in alike]
        flats.append(torch.cat(rows).to(dtype))
    if len(flats) == 1:
        return flats[0]
    return torch.cat(flats)


def _is_sendable(part: Tensor, num_ranks: int) -> bool:
    """Whether a gradient is large, and has as many rows for each rank."""
    return part.shape[0] % num_ranks == 0 and travels_as_it_is(part.nbytes)


def _slot_numels(together: Sequence[Gradient]) -> list[int]:
    return slot_numels(gradient.weight.layout for gradient in together)


def single(weight: Reducible) -> ShardedWeight:
    """A weight of a recorded block or of unequal replicas: these have no groups."""
    assert isinstance(weight, ShardedWeight)
    return weight
