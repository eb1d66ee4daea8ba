"""The sole owner of streams, events, extra process groups and work in flight.

[Note: streams and memory]
Every buffer (gathered weight, gradient to send, reduced shard) is allocated on the compute stream, the one that is
current when the weight is used. A communication stream that fills or reads a buffer first waits for the compute stream,
and the compute stream waits for it before it reads the result or drops the last reference. So a buffer's memory returns
to the allocator only when, in the order of the compute stream, nobody uses it any more. That is why there is no
``record_stream``, why addresses repeat from step to step, and why no buffer can be overwritten under a running GEMM.

On devices without streams (CPU with gloo) the background ``Work`` takes the place of the event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from .debug import DebugFlags, Delays


class Done(NamedTuple):
    """When a collective is complete: an event where there are streams, a background work where there are none."""

    event: torch.Event | None = None
    work: dist.Work | None = None


@dataclass(frozen=True)
class Groups:
    """Communicators of one weight mesh. Gather and scatter have one each, so that they overlap in backward.

    Names, not objects: an object held here would outlive ``destroy_process_group`` and be torn down at interpreter
    exit, while its threads still run.
    """

    gather_name: str
    scatter_name: str
    replicate_name: str | None

    @property
    def gather(self) -> dist.ProcessGroup:
        return compat.resolve_group(self.gather_name)

    @property
    def scatter(self) -> dist.ProcessGroup:
        return compat.resolve_group(self.scatter_name)

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        """The group of the replicate axis, None if there is none or nobody else is in it."""
        return None if self.replicate_name is None else compat.resolve_group(self.replicate_name)


class Reduction(NamedTuple):
    """A reduction in flight.

    ``complete`` is what is left to do on the host once a background work has ended (None where streams order it).
    ``keep`` holds the buffers that the communication stream still uses.
    """

    done: Done
    complete: Callable[[], None] | None
    keep: tuple[torch.Tensor, ...]


class CommContext:
    """Streams and in-flight reductions of one device.

    Args:
        device: Device of the weights.
        max_inflight: Reductions that may be in flight before compute waits for the oldest.
        debug: Poison and delay switches.
    """

    def __init__(self, device: torch.device, max_inflight: int, debug: DebugFlags) -> None:
        self.device = device
        self.debug = debug
        self._max_inflight = max_inflight
        self._reductions: deque[Reduction] = deque()
        self._groups: dict[tuple[str, ...], Groups] = {}
        self.has_streams = device.type != "cpu"
        self._device_module: Any = torch.get_device_module(device) if self.has_streams else None
        # High priority: a collective that waits behind a queue of GEMM blocks delays every rank.
        self._gather_stream: Any = self._new_stream()
        self._scatter_stream: Any = self._new_stream()
        self._delays = None
        if debug.delay_seed is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self._delays = Delays(debug.delay_seed * 1009 + rank, device)

    def _new_stream(self) -> Any:
        return self._device_module.Stream(device=self.device, priority=-1) if self.has_streams else None

    # --- groups -------------------------------------------------------------------------------------------------------

    def groups(self, mesh: DeviceMesh) -> Groups:
        """Communicators for a 1-D (gtp) or 2-D (replicate, gtp) mesh; the first call for a mesh is collective."""
        names = tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))
        if names not in self._groups:
            gather = mesh.get_group(mesh.ndim - 1)
            scatter = gather
            if gather.size() > 1:
                scatter = dist.new_group(
                    dist.get_process_group_ranks(gather), use_local_synchronization=True, group_desc="gtp_scatter"
                )
            has_replicas = mesh.ndim == 2 and mesh.size(0) > 1
            self._groups[names] = Groups(names[-1], scatter.group_name, names[0] if has_replicas else None)
        return self._groups[names]

    # --- ordering -----------------------------------------------------------------------------------------------------

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        """Run on ``stream``, after all that the compute stream was given so far."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(self._device_module.current_stream(self.device))
        context: AbstractContextManager[Any] = self._device_module.stream(stream)
        return context

    def delay(self) -> None:
        if self._delays is not None:
            self._delays.sleep()

    def launch_gather(self, launch: Callable[[bool], dist.Work | None]) -> Done:
        """Run ``launch(stream)`` on the gather stream; returns when its result may be read."""
        with self._on(self._gather_stream):
            self.delay()
            work = launch(self.has_streams)
            return Done(self._gather_stream.record_event()) if self.has_streams else Done(work=work)

    def wait(self, done: Done) -> None:
        """Make the compute stream (without streams: the host) wait. Waiting twice is harmless."""
        if done.event is not None:
            self._device_module.current_stream(self.device).wait_event(done.event)
        elif done.work is not None:
            done.work.wait()

    def submit_reduction(
        self, launch: Callable[[bool], dist.Work | None], complete: Callable[[], None], keep: tuple[torch.Tensor, ...]
    ) -> None:
        """Run a reduction behind compute.

        ``launch(stream)`` starts the collective; ``complete()`` then works on its result (division, accumulation), on
        the scatter stream or, without streams, when the reduction is retired. ``keep`` stays alive until then.
        """
        while len(self._reductions) >= self._max_inflight:
            self._retire_oldest()
        with self._on(self._scatter_stream):
            self.delay()
            work = launch(self.has_streams)
            if self.has_streams:
                complete()
                self._reductions.append(Reduction(Done(self._scatter_stream.record_event()), None, keep))
            else:
                self._reductions.append(Reduction(Done(work=work), complete, keep))

    def _retire_oldest(self) -> None:
        reduction = self._reductions.popleft()
        # Compute waits for the scatter stream here, so that the memory of `keep` can be reused in compute order.
        self.wait(reduction.done)
        if reduction.complete is not None:
            reduction.complete()

    def retire_all(self) -> None:
        """Make compute wait for every reduction in flight and drop their buffers."""
        while self._reductions:
            self._retire_oldest()

    def abandon(self) -> None:
        """After an exception: wait for what was launched, forget its results."""
        while self._reductions:
            self.wait(self._reductions.popleft().done)
