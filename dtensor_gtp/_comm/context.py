"""Communicators and backends of all weight meshes of one model, on the streams of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from .._howto import see
from ..policy import GatherBackend, GatherBackendName, ReduceScatterKind, Schedule, Waitable
from .agreement import is_one_host
from .collectives import (
    Groups,
    choose_gather_backend,
    choose_reduce_scatter,
    has_replicas,
    is_exact_in,
    may_send_narrow,
)
from .copy_engine import CopyEngine, PeerCopies
from .debug import DebugFlags, check_finite, check_order
from .reductions import ReductionsInFlight
from .send_ring import SendRing
from .streams import Done, HostCopies, Streams

Copies = tuple[list[Tensor], list[Tensor]]  # targets and sources


class CommContext:
    """The one owner of streams, events, extra process groups and work in flight."""

    def __init__(self, device: torch.device, debug: DebugFlags) -> None:
        self.debug = debug
        # Asked before each launch, so that nothing else costs time without aids.
        self.is_debugged = debug.order or debug.finite or debug.delay_seed is not None
        self.streams = Streams(device, debug)
        self.host_copies = HostCopies(self.streams)
        self.reductions = ReductionsInFlight(self.streams)
        self._groups: dict[tuple[str, ...], Groups] = {}  # by the names of the mesh's groups
        # By the name of the communicator.
        self._gather_backends: dict[str, GatherBackend] = {}
        self._send_rings: dict[str, SendRing] = {}
        # One for each mesh: the early and large gathers of experts must not delay gathers of other
        # weights.
        self._gather_streams: dict[str, torch.Stream] = {}  # empty without streams
        # Whether ``capture_step`` may replay steps, which exchange nothing on the host.
        self.may_replay_steps = False
        # Who gathers and reduces on each mesh: as fields of ``Schedule``; and for the report what
        # was chosen here, with the reason. ``choose`` gives the reason for what it has chosen
        # before.
        self._chosen: list[tuple[GatherBackendName | type[GatherBackend], ReduceScatterKind]] = []
        self.choices: list[str] = []

    def groups(self, mesh: DeviceMesh, schedule: Schedule) -> Groups:
        """Communicators for a 1-D (gtp) or 2-D (replicate, gtp) mesh; the first call for a mesh is
        collective."""
        # Names, not groups: see ``Groups``.
        names = tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))
        if names in self._groups:
            return self._groups[names]
        self.reductions.bound(schedule.max_inflight_reduce_scatters)
        device = self.streams.device
        replicate = []
        if has_replicas(mesh):
            replicate = [mesh.get_group(0)]  # must choose alike
        gather = mesh.get_group(mesh.ndim - 1)
        # Two threads of one gloo group race (see ``OneThreadGloo``); a twin has one thread.
        if not self.streams.has_streams and gather.size() > 1 and compat.has_racing_threads(gather):
            gather = compat.twin_group(gather, device, "gtp_gather")
        scatter = gather  # unless gathers would wait for reductions, see below
        kind: ReduceScatterKind = "ring"
        if schedule.reduce_scatter != "auto":
            kind = schedule.reduce_scatter
        if gather.size() > 1:
            # A mesh with and one without a replicate axis may have the same gather group: they share
            # what belongs to it.
            known = self._gather_backends.get(gather.group_name)
            made, name, why = choose_gather_backend(schedule, [gather, *replicate], device, known)
            backend = self._gather_backends.setdefault(gather.group_name, made)
            # Gathers would wait for reductions in one communicator. Copy engines gather without it,
            # and to make another one takes NCCL a tenth of a second.
            if not isinstance(backend, CopyEngine):
                scatter = compat.twin_group(gather, device, "gtp_scatter")
            elif backend is not known:
                backend.cast_stream = self.streams.new_stream()
            where = f"the mesh={gather.size()}"
            if mesh.mesh_dim_names:
                where = f"{mesh.mesh_dim_names[-1]}={gather.size()}"
            gathers = name if isinstance(name, str) else name.__name__
            if why and schedule.gather_backend == "auto":
                self.choices.append(f"gather backend on {where}: {gathers} ({why})")
            ring, kind, why = choose_reduce_scatter(schedule, [scatter, *replicate], device, gathers)
            if why and schedule.reduce_scatter == "auto":
                self.choices.append(f"reduce-scatter on {where}: {kind} ({why})")
            self._chosen.append((name, kind))
            if ring is not None:
                self._send_rings.setdefault(scatter.group_name, ring)
                # The sum of an exchange is a kernel, which must not delay the next exchange.
                self.reductions.finish_apart()
        stream = self.streams.new_stream()
        if stream is not None:
            self._gather_streams.setdefault(gather.group_name, stream)
        groups = self._groups[names] = Groups(
            gather.group_name,
            scatter.group_name,
            replicate_name=names[0] if replicate else None,
            casts_shards=isinstance(self._gather_backends.get(gather.group_name), CopyEngine),
            reduce_scatter=kind,
            # All ranks ask or none does: the first answer is the same on all.
            sends_narrow=may_send_narrow(kind, gather.size()) and is_one_host(gather, device),
        )
        return groups

    def connect_ahead(self, gather: dist.ProcessGroup, sent: torch.dtype, reduced: torch.dtype) -> None:
        """Make the communicator of reductions that ``groups`` will ask for. A first gather, exchange, reduce-scatter
        and all-reduce connect its ranks and load NCCL's kernels. Gradients have the dtype ``sent``, their sum
        ``reduced``. Collective."""
        device = self.streams.device
        if compat.has_twin(gather, "gtp_scatter"):
            return  # an earlier call has made it, on all ranks
        scatter = compat.twin_group(gather, device, "gtp_scatter")
        rows = torch.zeros(gather.size(), dtype=sent, device=device)  # one number for each rank
        compat.all_gather_base(torch.empty_like(rows), rows[:1], gather, False)
        if is_exact_in(sent, reduced) and is_one_host(gather, device):  # see :func:`may_send_narrow`
            compat.all_to_all_base(torch.empty_like(rows), rows, scatter, False)
        rows = rows.to(reduced)  # of lookups, and of whole parameters
        compat.reduce_scatter_base(rows.new_empty(1), rows, dist.ReduceOp.AVG, scatter, False)
        compat.all_reduce(rows, dist.ReduceOp.AVG, scatter, False)

    def chosen_backends(self) -> dict[str, Any]:
        """Fields of ``Schedule``: what was chosen for all meshes alike."""
        chosen: dict[str, Any] = {}
        for index, field in enumerate(("gather_backend", "reduce_scatter")):
            found = {of_mesh[index] for of_mesh in self._chosen}
            if len(found) == 1:
                chosen[field] = found.pop()
        return chosen

    def begin_pass(self, groups: Groups | None = None) -> None:
        """All ranks begin a forward or a backward; or the ranks of ``groups`` begin a gather
        outside of a pass."""
        self.streams.begin_pass(is_everywhere=groups is None)
        for name, backend in self._gather_backends.items():
            if isinstance(backend, CopyEngine) and (groups is None or name == groups.gather_name):
                backend.begin_pass()

    def before_collective(self, name: str, detail: str, groups: Groups) -> None:
        """Debugging aids: sleep a while, and compare this launch with those of the other ranks of
        the mesh."""
        self.streams.delay()
        if self.debug.order:
            check_order(f"{name} of {detail}", _active(groups))

    def check_finite(self, what: str, values: Sequence[tuple[str, Tensor]], groups: Groups) -> None:
        """Debugging aid ``finite``: look at what this rank is about to send, by names of weights."""
        if not self.debug.finite:
            return
        if self.streams.is_capturing:
            raise RuntimeError(
                "DTENSOR_GTP_DEBUG=finite reads values on the host, which a CUDA graph cannot "
                "record. Look for the NaN without capture_step or torch.cuda.graph, or unset the "
                "variable. " + see("debug_nan")
            )
        check_finite(what, values, _active(groups), self.streams.device)

    def gathering(self, groups: Groups) -> AbstractContextManager[Any]:
        """Run on the gather stream of the mesh."""
        return self.streams.fork(self._gather_streams.get(groups.gather_name))

    def gather_done(self, work: Waitable | None, groups: Groups) -> Done:
        """When the collective that was just launched in ``gathering`` is complete."""
        return self.streams.done(self._gather_streams.get(groups.gather_name), work)

    def all_gather(
        self,
        groups: Groups,
        detail: str,
        outputs: list[Tensor],
        shards: list[Tensor],
        copies: Copies | None = None,
        after: torch.Event | None = None,
    ) -> Done:
        """Gather each shard of all ranks into the output at the same index, in one launch on the
        gather stream. The result says when the outputs may be read. ``detail`` names the weights
        for debugging aids. The stream waits for ``after``, then ``copies`` run, then the gather."""
        backend = self._gather_backends[groups.gather_name]
        stream = self._gather_streams.get(groups.gather_name)
        work: Waitable | None = None
        with self.streams.fork(stream):
            if after is not None and stream is not None:
                # Never with copy engines (see ``Setup``): their stream of casts would not wait for this.
                stream.wait_event(after)  # shards on the host have been uploaded
            if self.is_debugged:
                self.before_collective("all_gather", detail, groups)
            if copies is not None:
                compat.copy_all(*copies)
            if isinstance(backend, CopyEngine):
                # Its stream of casts waits for the fork alone, not for gathers on this stream.
                backend.all_gather(outputs, shards, self.streams.fork_event)
            else:
                work = backend.all_gather(outputs, shards)
            return self.streams.done(stream, work)

    def gather_from_replicas(
        self, groups: Groups, detail: str, pack: Callable[[], Copies], unpack: Callable[[list[Tensor]], None]
    ) -> Done:
        """Gather parts of shards from the replicas, in one launch on the stream that reads shards
        for gathers. ``pack`` gives outputs and parts, and ``unpack`` takes the outputs; without
        streams the host waits in between."""
        replicate = groups.replicate
        assert replicate is not None
        stream = self._reading_stream(groups)
        with self.streams.fork(stream):
            if self.is_debugged:
                self.before_collective("all_gather of replicas", detail, groups)
            outputs, parts = pack()
            if stream is None:  # nothing else orders ``unpack`` after the gather
                for work in compat.all_gather_by_dtype(outputs, parts, replicate):
                    self.streams.wait(Done(work=work))
            else:
                compat.all_gather_coalesced(outputs, parts, replicate, False)
            unpack(outputs)
            return self.streams.done(stream, None)  # without streams all is done by now

    def launch(self, collective: Callable[..., Any], what: str, groups: Groups, *args: Any) -> Done:
        """Launch a collective of activations in the scatter group, which is idle in forward. In the
        gather group it would wait for weights that are prefetched."""
        with self.reductions.scattering():
            self.before_collective(collective.__name__.removesuffix("_base"), what, groups)
            work = collective(*args, groups.scatter, not self.streams.has_streams)  # async without streams
            return self.streams.done(self.reductions.scatter_stream, work)

    @contextmanager
    def packing(self, groups: Groups) -> Iterator[None]:
        """Quantize or pack shards in this context, where the gather reads them, so beside compute."""
        stream = self._reading_stream(groups)
        if stream is None:
            yield
            return
        # The recipe's collectives follow this stream, not compute.
        with self.streams.fork(stream), self.streams.computing_on(stream):
            self.streams.delay()
            yield

    def _reading_stream(self, groups: Groups) -> torch.Stream | None:
        """That reads shards for gathers: that of casts if copy engines gather."""
        backend = self._gather_backends.get(groups.gather_name)
        if isinstance(backend, CopyEngine):
            return backend.cast_stream
        return self._gather_streams.get(groups.gather_name)

    def send_ring(self, groups: Groups) -> SendRing:
        """The ring of the scatter group, for ``reduce_scatter="copy_engine"``."""
        return self._send_rings[groups.scatter_name]

    @property
    def symmetric_nbytes(self) -> int:
        """Memory of this rank that peers copy from: stages of gathers and rings of gradients."""
        return sum(copies.held_nbytes for copies in self._peer_copies())

    def _peer_copies(self) -> list[PeerCopies]:
        backends = self._gather_backends.values()
        engines = [backend for backend in backends if isinstance(backend, PeerCopies)]
        return [*engines, *self._send_rings.values()]

    def begin_recording(self) -> None:
        """Call before a recording into a CUDA graph that may fail."""
        for copies in self._peer_copies():
            copies.begin_recording()

    def forget_recording(self) -> None:
        """The recording has failed, so its launches never run: forget them without waiting."""
        self.reductions.forget()
        self._rewind_rings()
        for copies in self._peer_copies():
            copies.forget_recording()

    def end_backward(self) -> None:
        """All ranks have launched all reductions. Compute waits for them and drops their buffers."""
        # First: a ring is rewound or grows only when nothing reads it.
        self.reductions.retire_all()
        for ring in self._send_rings.values():
            missing = ring.missing_nbytes  # ``rewind`` resets it
            ring.rewind()
            if missing and not self.streams.is_capturing:  # a recording cannot allocate a ring
                # ``grow`` waits for the current stream: the old ring may still be read on this one.
                with self.reductions.scattering():
                    ring.grow(missing)

    def abandon(self) -> None:
        """After an exception: wait for the launched reductions and forget their results."""
        self.reductions.abandon()  # compute waits, so the rings are free afterwards
        self._rewind_rings()

    def _rewind_rings(self) -> None:
        for ring in self._send_rings.values():
            ring.rewind()


def _active(groups: Groups) -> list[dist.ProcessGroup]:
    """The groups of a mesh in which ranks have peers."""
    both = (groups.gather, groups.replicate)
    return [group for group in both if group is not None and group.size() > 1]
