"""The sole owner of streams, events, extra process groups and work in flight.

[Note: streams and memory]
Every buffer (gathered weight, gradient to send, reduced shard) is allocated on the compute stream, the one that is
current when the weight is used. A communication stream that fills or reads a buffer first waits for the compute stream,
and the compute stream waits for it before it reads the result or drops the last reference. So a buffer's memory returns
to the allocator only when, in the order of the compute stream, nobody uses it any more. (What is allocated on a
communication stream itself, a cast gradient or a quantized shard, is reused there only after that stream has waited for
the compute stream again.) That is why there is no ``record_stream``, why addresses repeat from step to step, and why no
buffer can be overwritten under a running GEMM.

On devices without streams (CPU with gloo) the background ``Work`` takes the place of the event.

[Note: several compute streams]
A model may use weights on streams of its own within a pass (a shared expert beside the others, say), and autograd runs
the backward of an op on the stream of its forward. "The compute stream" of the rules above is then all streams that
were current in the pass when the runtime was called. A gather follows the one that launches it. A reduction waits for
all, whoever wrote the gradients that travel together; and when it is retired, all wait for it, so that none of them
writes too early where it has read. One that comes anew begins behind the one before it, and so behind what that has
waited for. Only a gathered weight goes back to the allocator of the stream that launched the gather while another may
still read it: there ``record_stream`` says so, and in a CUDA graph such memory is not used again within the graph. What
is made of a gathered weight for a use (dequantized, contiguous) is made on the stream of that use: a weight that stays
gathered for another use, on another stream of the same pass, must be one that is gathered as it is.

[Note: kernels after an exchange]
Copy engines exchange gradients without a kernel, but the sum that follows is one, which waits behind a GEMM for SMs.
On the scatter stream the next exchange would wait with it, and the wire would be idle. So all that follows a reduction
runs on a stream of its own, which waits for the scatter stream: sums, divisions, replicas, accumulation. That stream
reads what the exchange has left, and this rank's own addend in the send ring. Whoever writes there on the scatter
stream, or lets the ring grow, calls ``wait_finished`` before. With any other kind of reduction both are one stream.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from ..policy import GatherBackend, SchedulePolicy, Waitable
from .copy_engine import CastingBackend
from .debug import DebugFlags, Delays, check_order
from .gather_backends import choose_gather_backend, make_send_ring
from .groups import Groups, has_replicas
from .reductions_in_flight import Reduction
from .send_ring import Place, SendRing
from .streams import HOST, Done
from .symmetric_memory import PeerCopies

# A large gradient that travels alone: of 4096 x 14336 elements in 16 bits.
_GRADIENT_NBYTES = 128 << 20


logger = logging.getLogger(__name__)


class CommContext:
    """Streams and in-flight reductions of one device.

    Args:
        device: Device of the weights.
        schedule: How many reductions may be in flight before compute waits for the oldest, and who communicates.
        debug: Poison and delay switches.
    """

    def __init__(self, device: torch.device, schedule: SchedulePolicy, debug: DebugFlags) -> None:
        self.device = device
        self.debug = debug
        self._schedule = schedule
        self._reductions: deque[Reduction] = deque()
        self._is_bounded = True
        self._groups: dict[tuple[str, ...], Groups] = {}
        # By name of the communicator.
        self._gather_backends: dict[str, GatherBackend] = {}
        self._casting_backends: dict[str, CastingBackend] = {}  # those of them that are
        self._send_rings: dict[str, SendRing] = {}
        # Who gathers on each mesh and why, for people.
        self.choices: list[str] = []
        self.has_streams = device.type != "cpu"
        self._fork_event = torch.Event(device) if self.has_streams else None
        # Of this pass, the current one last, see [Note: several compute streams]; and whether that is recorded.
        self._computing: list[torch.Stream] = []
        self._is_recorded = False
        # High priority: a collective that waits behind a queue of GEMM blocks delays every rank.
        self._scatter_stream = self._new_stream()
        # What follows an exchange of copy engines, see [Note: kernels after an exchange].
        self._finish_stream = self._new_stream() if schedule.reduce_scatter == "copy_engine" else self._scatter_stream
        # One for each mesh, by the name of its group: what is gathered of experts, far ahead and large, must not delay
        # what is gathered of others for soon.
        self._gather_streams: dict[str, torch.Stream] = {}
        self._delays = None
        if debug.delay_seed is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self._delays = Delays(debug.delay_seed * 1009 + rank, device)

    def _new_stream(self) -> torch.Stream | None:
        return torch.Stream(self.device, priority=-1) if self.has_streams else None

    def groups(self, mesh: DeviceMesh) -> Groups:
        """Communicators for a 1-D (gtp) or 2-D (replicate, gtp) mesh; the first call for a mesh is collective."""
        names = tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))
        if names not in self._groups:
            self._groups[names] = self._make_groups(mesh, names)
        return self._groups[names]

    def _make_groups(self, mesh: DeviceMesh, names: tuple[str, ...]) -> Groups:
        replicate = [mesh.get_group(0)] if has_replicas(mesh) else []
        gather = scatter = mesh.get_group(mesh.ndim - 1)
        if gather.size() > 1:
            schedule, device = self._schedule, self.device
            scatter = compat.twin_group(gather, device, "gtp_scatter")
            choice = choose_gather_backend(schedule, [gather, *replicate], device)
            self._gather_backends[gather.group_name] = choice.backend
            if isinstance(choice.backend, CastingBackend):
                choice.backend.cast_stream = self._new_stream()
                self._casting_backends[gather.group_name] = choice.backend
            names_of_axes = mesh.mesh_dim_names or ("the mesh",) * mesh.ndim
            where = f"{names_of_axes[-1]}={gather.size()}"
            self.choices.append(f"gather backend on {where}: {choice.name} ({choice.reason})")
            logger.info(self.choices[-1])
            if schedule.reduce_scatter == "copy_engine":
                together = max(schedule.coalesce_grad_nbytes, _GRADIENT_NBYTES)
                enough = (schedule.max_inflight_reduce_scatters + 1) * together
                self._send_rings[scatter.group_name] = make_send_ring([scatter, *replicate], device, enough)
        stream = self._new_stream()
        if stream is not None:
            self._gather_streams.setdefault(gather.group_name, stream)
        return Groups(gather.group_name, scatter.group_name, names[0] if replicate else None)

    def _fork(self, stream: torch.Stream | None) -> AbstractContextManager[Any]:
        """Run on ``stream``, after all that the compute stream was given so far."""
        if stream is None:
            return HOST
        # One event serves all forks: a wait takes the record that precedes it, so it can be recorded again at once.
        assert self._fork_event is not None
        self._compute_stream().record_event(self._fork_event)
        stream.wait_event(self._fork_event)
        return stream

    def _compute_stream(self) -> torch.Stream:
        stream = torch.accelerator.current_stream(self.device.index)
        if not self._computing or stream != self._computing[-1]:
            self._compute_on(stream)
        return stream

    def _compute_on(self, stream: torch.Stream) -> None:
        """Compute goes on on this stream, see [Note: several compute streams]."""
        is_recorded = self.is_capturing
        if is_recorded != self._is_recorded:
            self._computing.clear()  # what is recorded cannot wait for what is not, nor the other way round
            self._is_recorded = is_recorded
        if stream in self._computing:
            self._computing.remove(stream)
        elif self._computing:
            stream.wait_event(self._computing[-1].record_event())
        self._computing.append(stream)

    def note_compute(self) -> None:
        """On the stream that writes gradients, before they are submitted."""
        if self.has_streams:
            self._compute_stream()

    def _is_along(self, stream: torch.Stream) -> bool:
        """Whether the compute stream and this one may wait for each other: not if only one of them is recorded."""
        return stream in self._computing or not self.is_capturing

    def _beside(self) -> list[torch.Stream]:
        """The other compute streams of this pass."""
        if len(self._computing) > 1 and self._is_recorded != self.is_capturing:
            del self._computing[:-1]
        return self._computing[:-1]

    def note_reading(self, done: Done, buffers: Iterable[Tensor]) -> None:
        """The compute stream reads what a gather has filled, and has waited for it: the memory is in use until then."""
        if done.origin is not None and done.origin != (stream := self._computing[-1]):
            for buffer in buffers:
                buffer.record_stream(stream)

    @property
    def is_capturing(self) -> bool:
        """Whether what runs now is recorded into a CUDA graph, to run again without this code."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def delay(self) -> None:
        if self._delays is not None:
            self._delays.sleep()

    def before_collective(self, name: str, detail: str, groups: Groups) -> None:
        """Debugging aids: sleep a while, and compare with the other ranks of the mesh what is about to be launched."""
        self.delay()
        if self.debug.order:
            active = [g for g in (groups.gather, groups.replicate) if g is not None and g.size() > 1]
            check_order(f"{name} of {detail}", active, self.device)

    def gathering(self, groups: Groups) -> AbstractContextManager[Any]:
        """Context in which a gather is launched, on the gather stream of the mesh."""
        return self._fork(self._gather_streams.get(groups.gather_name))

    @contextmanager
    def packing(self, groups: Groups) -> Iterator[None]:
        """Context in which shards are made into what a gather of the mesh sends: on the stream of casts, if it has one,
        for which that gather waits."""
        casting = self._casting_backends.get(groups.gather_name)
        if casting is None:
            yield
            return
        with self._fork(stream := casting.cast_stream):
            # What communicates within follows this stream, and waits on it.
            outside, self._computing = self._computing, [] if stream is None else [stream]
            try:
                self.delay()
                yield
            finally:
                self._computing = outside

    def all_gather(self, groups: Groups, outputs: list[Tensor], shards: list[Tensor]) -> Done:
        """Within ``gathering``: gather each shard of all ranks into the output at the same index, in one launch.

        Returns:
            When the outputs may be read.
        """
        name = groups.gather_name
        if (casting := self._casting_backends.get(name)) is not None:
            casting.all_gather(outputs, shards, self._fork_event)
            return self.gather_done(None, groups)
        return self.gather_done(self._gather_backends[name].all_gather(outputs, shards), groups)

    def begin_pass(self, groups: Groups | None = None) -> None:
        """A forward or a backward begins on all ranks; or, on those of ``groups`` alone, a gather outside of them."""
        if groups is None or self._is_recorded != self.is_capturing:
            self._computing.clear()
        for name, backend in self._casting_backends.items():
            if groups is None or name == groups.gather_name:
                backend.begin_pass()

    def gather_done(self, work: Waitable | None, groups: Groups) -> Done:
        """When the gather that was just launched may be read."""
        stream = self._gather_streams.get(groups.gather_name)
        return Done(work=work) if stream is None else Done(stream.record_event(), None, self._computing[-1])

    def at_once(self) -> Done:
        """Of a weight that is not gathered but made on the compute stream, as it is on an axis of one rank."""
        return Done(None, None, self._compute_stream()) if self.has_streams else Done()

    def scattering(self) -> AbstractContextManager[Any]:
        """Context in which what concerns gradients, and any other collective of the scatter group, runs: on the scatter
        stream, after all compute streams."""
        fork = self._fork(self._scatter_stream)
        if self._scatter_stream is not None:
            for other in self._beside():
                self._scatter_stream.wait_event(other.record_event())
        return fork

    def scatter_done(self, work: Waitable | None) -> Done:
        """When what was just launched on the scatter stream may be read."""
        return Done(work=work) if self._scatter_stream is None else Done(self._scatter_stream.record_event())

    def wait(self, done: Done) -> None:
        """Make the compute stream (without streams: the host) wait. Waiting twice is harmless."""
        if done.event is not None:
            self._compute_stream().wait_event(done.event)
        elif done.work is not None:
            done.work.wait()
        elif (
            done.origin is not None
            and (stream := self._compute_stream()) != done.origin
            and self._is_along(done.origin)
        ):
            stream.wait_event(done.origin.record_event())

    def wait_to_drop(self, done: Done, buffer: Tensor) -> None:
        """Wait for a gather that nobody came for, whose buffer goes."""
        self.wait(done)
        if done.event is not None and done.origin is not None and done.origin != self._computing[-1]:
            if self._is_along(done.origin):
                done.origin.wait_event(done.event)
            buffer.record_stream(self._computing[-1])  # which poisons it, perhaps

    def wait_finished(self) -> None:
        """Let the scatter stream (without streams: the host) wait for what follows the reductions so far, see [Note:
        kernels after an exchange]."""
        if self._scatter_stream is None:
            self.retire_all()
        elif self._scatter_stream is not self._finish_stream and self._reductions:
            # Compute has waited for all others, and the scatter stream for compute.
            last = self._reductions[-1].done.event
            assert last is not None
            self._scatter_stream.wait_event(last)

    def send_ring(self, groups: Groups) -> SendRing:
        """From where gradients of the scatter group are fetched, for ``reduce_scatter="copy_engine"``."""
        return self._send_rings[groups.scatter_name]

    @property
    def symmetric_nbytes(self) -> int:
        """Memory of this rank that peers copy from: stages of gathers and rings of gradients."""
        return sum(copies.held_nbytes for copies in self._peer_copies())

    def _peer_copies(self) -> list[PeerCopies]:
        engines = [engine for engine in self._gather_backends.values() if isinstance(engine, PeerCopies)]
        return [*engines, *self._send_rings.values()]

    def begin_recording(self) -> None:
        """Before a recording into a CUDA graph that may fail."""
        for copies in self._peer_copies():
            copies.begin_recording()

    def forget_recording(self) -> None:
        """It has failed, so nothing of it ever runs: forget what it launched without waiting for it."""
        self.forget()
        for copies in self._peer_copies():
            copies.forget_recording()

    def end_backward(self) -> None:
        """Of all ranks: all reductions are launched. Compute waits for them and drops their buffers."""
        self.retire_all()
        for ring in self._send_rings.values():
            missing = ring.missing_nbytes
            ring.rewind()
            if missing and not self.is_capturing:
                with self.scattering():
                    ring.grow(missing)

    def casts_shards(self, groups: Groups) -> bool:
        """Whether the gather of the mesh casts what it sends, and copies it into this rank's part of the output."""
        return groups.gather_name in self._casting_backends

    def reducing(self) -> AbstractContextManager[Any]:
        """Context in which a reduction is launched, on the scatter stream. Bounds how many are in flight."""
        while self._is_bounded and len(self._reductions) >= self._schedule.max_inflight_reduce_scatters:
            self._retire_oldest()
        return self.scattering()

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Reductions that are launched within are as many as there are: those of a block, all at once."""
        self._is_bounded = False
        try:
            yield
        finally:
            self._is_bounded = True

    def retire_users(self, buffers: Sequence[Tensor]) -> None:
        """Retire reductions, oldest first, until none in flight uses these buffers."""
        used = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        while any(kept.untyped_storage().data_ptr() in used for one in self._reductions for kept in one.keep):
            self._retire_oldest()

    def reduction_launched(
        self,
        work: dist.Work | None,
        complete: Callable[[], None],
        keep: tuple[Tensor, ...],
        places: Sequence[Place] = (),
    ) -> None:
        """Within ``reducing``: the collective is launched.

        ``complete()`` works on its result (sum, replicas, division, accumulation): at once, on a stream, or where
        there are no streams when the reduction is retired. ``keep`` and ``places`` stay alive until then.
        """
        if self._scatter_stream is None:
            self._reductions.append(Reduction(Done(work=work), complete, keep, places))
            return
        assert self._finish_stream is not None
        with self._finishing():
            complete()
        done = Done(self._finish_stream.record_event())
        self._reductions.append(Reduction(done, None, keep, places, tuple(self._computing)))

    @contextmanager
    def _finishing(self) -> Iterator[None]:
        """Within ``reducing``: run on the stream of what follows, after the reduction."""
        if self._finish_stream is None or self._finish_stream is self._scatter_stream:
            yield
            return
        assert self._scatter_stream is not None
        self._finish_stream.wait_event(self._scatter_stream.record_event())
        with self._finish_stream:
            self.delay()
            yield

    def _retire_oldest(self) -> None:
        reduction = self._reductions.popleft()
        self._wait_for(reduction)
        if reduction.complete is not None:
            reduction.complete()

    def _wait_for(self, reduction: Reduction) -> None:
        # Compute waits for the scatter stream here, so that the memory of `keep` can be reused in compute order.
        self.wait(reduction.done)
        if reduction.done.event is not None:
            for other in {*reduction.origins, *self._beside()} - {self._computing[-1]}:
                other.wait_event(reduction.done.event)

    def retire_all(self) -> None:
        """Make compute wait for every reduction in flight and drop their buffers."""
        while self._reductions:
            self._retire_oldest()

    @property
    def is_reducing(self) -> bool:
        """Whether there are reductions that compute has not waited for."""
        return bool(self._reductions)

    def abandon(self) -> None:
        """After an exception: wait for what was launched, forget its results."""
        while self._reductions:
            self._wait_for(self._reductions.popleft())
        self.forget()

    def forget(self) -> None:
        """Forget what was launched without waiting for it."""
        self._reductions.clear()
        for ring in self._send_rings.values():
            ring.rewind()
