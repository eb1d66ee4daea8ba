"""Memory of this rank that peers on the same host map and copy from."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from .. import _torch_compat as compat
from .agreement import by_rank

ALIGNMENT = 16


class PeerCopies:
    """A stage that peers copy from, see [Note: rules of the copy engine]. Making one is collective over ``group``.

    Args:
        group: Ranks of one host, one GPU each. Only its name is kept, see ``Groups``.
        device: This rank's GPU.

    Raises:
        RuntimeError: These ranks cannot have symmetric memory. Raised on all of them.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        refuse_without_symmetric_memory(group, device)
        self._group_name = group.group_name
        self._device = device
        self.rank, self._num_ranks = group.rank(), group.size()
        # If ranks cannot map each other's memory, this fails now and not in the first forward.
        self._stage: compat.SymmetricBuffer | None = self._allocate(ALIGNMENT)
        self._captured: list[compat.SymmetricBuffer] = []  # stages that CUDA graphs use
        self._num_captured_before = 0

    def begin_recording(self) -> None:
        """Call before a recording into a CUDA graph that may fail."""
        self._num_captured_before = len(self._captured)

    def forget_recording(self) -> None:
        """The recording has failed: drop the stages that no other graph uses."""
        del self._captured[self._num_captured_before :]

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _wait_on_host(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def _reserve(self, nbytes: int) -> compat.SymmetricBuffer:
        """The stage, with at least ``nbytes`` bytes on all ranks."""
        if self._stage is None or self._stage.nbytes < nbytes:
            self.grow(nbytes)
        return self._used_stage()

    def _used_stage(self) -> compat.SymmetricBuffer:
        assert self._stage is not None
        if self._is_capturing() and self._stage not in self._captured:
            self._captured.append(self._stage)
        return self._stage

    def grow(self, nbytes: int) -> None:
        """Replace the stage by a larger one. Collective; waits for the current stream."""
        if self._is_capturing():
            raise RuntimeError(
                f"Copy engines need a stage of {nbytes} bytes, which cannot be allocated while a CUDA graph is "
                "captured. Run the step eagerly before it is captured; capture_step does."
            )
        with waiting_allowed(self._device):
            self._wait_on_host()
            dist.barrier(group=compat.resolve_group(self._group_name))
            self._stage = None
            self._stage = self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> compat.SymmetricBuffer:
        return compat.SymmetricBuffer(nbytes, self._device, self._group_name)

    @property
    def held_nbytes(self) -> int:
        """Symmetric memory of this rank: the stage, and earlier ones that graphs use."""
        stages = {id(stage): stage.nbytes for stage in (self._stage, *self._captured) if stage is not None}
        return sum(stages.values())

    def _peers(self) -> list[int]:
        """The other ranks, beginning with the next one, so that not all ranks read from one rank at once."""
        return [(self.rank + step) % self._num_ranks for step in range(1, self._num_ranks)]


@contextmanager
def waiting_allowed(device: torch.device) -> Iterator[None]:
    """Wait for the GPU in this context, even if the user has torch warn of synchronizations."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def offsets(sizes: list[int], alignment: int = ALIGNMENT) -> list[int]:
    """Where aligned parts of these sizes in bytes begin, one behind the other; the last number is the end."""
    places = [0]
    for nbytes in sizes:
        places.append(places[-1] + -(-nbytes // alignment) * alignment)
    return places


def refuse_without_symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises:
    RuntimeError: A check beforehand shows that the ranks cannot map each other's memory: some rank has no copy engines,
        or they are on several hosts. Raised on all ranks of the group.
    """
    missing = ""
    if device.type != "cuda":
        missing = f"a {device.type} device has no copy engines"
    elif (kind := compat.symmetric_memory_backend(device)) != "CUDA":
        missing = f"symmetric memory is of the kind {kind!r} here, but copies need 'CUDA'"
    found = by_rank((missing, host_name()), [group]).values()
    if reasons := sorted({reason for reason, _ in found if reason}):
        raise RuntimeError("; ".join(reasons))
    hosts = sorted({host for _, host in found})
    if len(hosts) > 1:
        raise RuntimeError(f"the ranks span hosts {hosts}, and copy engines reach GPUs of one host only")


def host_name() -> str:
    """A name of this host that no other host has, even in containers with equal host names."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot_id.read_text().strip() if boot_id.exists() else ''}".strip()
