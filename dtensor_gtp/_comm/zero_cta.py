"""Gathers by NCCL without its kernels: a communicator with the zero-CTA policy, whose buffers are registered.

NCCL then moves the data with copy engines, started by one call. It does so only between registered buffers, and to
register one is collective: buffers that live and die with the weights of each rank cannot be. So all gathers pass
through one stage, from which a copy brings the gathered bytes to where they are used; it costs reading and writing them
once. The stage and CUDA graphs: as in [Note: rules of the copy engine]. NCCL itself orders the ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .. import _torch_compat as compat
from . import collectives
from .symmetric_memory import Staged, offsets, refuse_on_all_ranks


class ZeroCTA(Staged[compat.RegisteredBuffer]):
    """One communicator with the zero-CTA policy, and its stage. Collective over ``group``.

    Args:
        group, device: As for ``Staged``.

    Raises:
        RuntimeError: This torch or NCCL does not know the policy, or the ranks span hosts.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        refuse_on_all_ranks(group, compat.missing_for_zero_cta(device))
        # What is registered stays until the communicator ends: a stage that has grown is at least twice the last one.
        self._registered: list[compat.RegisteredBuffer] = []
        twin = compat.twin_group(group, device, "gtp_zero_cta", compat.nccl_zero_cta_options())
        dist.barrier(group=twin)  # memory is registered with a communicator that exists
        super().__init__(twin, device)

    def _allocate(self, nbytes: int) -> compat.RegisteredBuffer:
        self._registered.append(compat.RegisteredBuffer(nbytes * self._num_ranks, self._device, self._group_name))
        return self._registered[-1]

    def _reserve(self, nbytes: int) -> compat.RegisteredBuffer:
        return super()._reserve(nbytes * self._num_ranks)

    def _grow(self, nbytes: int) -> None:
        last = self._registered[-1].nbytes
        super()._grow(max(nbytes, 2 * last) // self._num_ranks)

    def _gather(self, full: torch.Tensor, own: torch.Tensor) -> None:
        collectives.all_gather(full, own, compat.resolve_group(self._group_name), stream=True)

    def all_gather(self, outputs: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
        """Gather each rank's shards into the outputs, on the current stream.

        Args:
            outputs: Shape ``(world * rows, ...)``, contiguous.
            shards: Shape ``(rows, ...)``, contiguous, same dtypes; may be this rank's own slice of the output.
        """
        places = offsets([shard.nbytes for shard in shards])
        nbytes = places[-1]
        full = self._reserve(nbytes).tensor[: self._num_ranks * nbytes].view(self._num_ranks, nbytes)
        own = full[self._rank]
        for shard, place in zip(shards, places, strict=False):
            _part(own, place, shard).copy_(shard)
        self._gather(full.view(-1), own)
        for output, shard, place in zip(outputs, shards, places, strict=False):
            output.view(self._num_ranks, *shard.shape).copy_(_part(full, place, shard))


def _part(stage: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """Bytes of the last dim of ``stage`` as a tensor like ``like``, for each index of the other dims."""
    part = stage.narrow(-1, place, like.nbytes).view(like.dtype)
    return part.view(*stage.shape[:-1], *like.shape)
