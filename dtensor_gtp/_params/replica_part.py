"""The part of a shard whose optimizer states this replica has.

[Note: parts of replicas]
With ``gtp_shard(shard_optimizer=True)`` the replicas of a shard split its dim 0. Each replica
registers its part as the parameter, a DTensor that is cut over gtp first and over the replicas
then. So optimizers, clipping, averages and checkpoints see a cut parameter as any other. The part
is memory of the shard: what the optimizer writes is in the shard at once, and the replicas gather
the rest of it in place, once after each write (``_schedule/replica_gathers.py``). Gathers over gtp
and all that is made from a shard do not know of it. Gradients are reduce-scattered over the
replicas where they would be all-reduced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import WeightLayout


class ReplicaPart:
    """Where the part lies. ``layout`` is that of the shard over the replicas, cut on dim 0."""

    def __init__(self, layout: WeightLayout) -> None:
        assert layout.dim == 0
        self.layout = layout
        self.buffer: Tensor  # the shard, with padding that makes all parts equally long
        # The version of the parameter whose rows the replicas have gathered.
        self.gathered: int | None = None

    def take(self, local: Tensor) -> Tensor:
        """Make memory for the shard, and give the part in it, with the values of ``local``."""
        self.buffer = local.new_zeros(self.layout.buffer_shape)
        self.gathered = None  # the rows of the other replicas are missing
        own = self.layout.filled(self.slot)
        if own.numel() and not own.is_meta:
            # A storage that begins with the part: compilers refuse an offset, and ``torch.save``
            # would save the shard.
            own = torch.from_dlpack(own)  # type: ignore[attr-defined]
        own.copy_(local.detach())
        return own

    @property
    def slot(self) -> Tensor:
        """The part and its padding."""
        return self.layout.slot(self.buffer)

    @property
    def shard(self) -> Tensor:
        return self.layout.full_view(self.buffer)

    def pack(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Where the parts of all replicas are gathered, and this one, in ``dtype`` if that has
        fewer bytes."""
        # ``.data``: a gather is no write, so it counts no version.
        if dtype.itemsize >= self.buffer.dtype.itemsize:
            return self.buffer.data, self.slot.data
        # The gather over gtp rounds all rows to ``dtype`` anyway, so fewer bytes lose nothing.
        output = torch.empty(self.buffer.shape, dtype=dtype, device=self.buffer.device)
        own = self.layout.slot(output)
        own.copy_(self.slot)
        return output, own

    def unpack(self, output: Tensor) -> None:
        """Take the parts of the others. This one keeps all its bits."""
        if output.dtype == self.buffer.dtype:
            return  # the gather has written into ``buffer``
        shard = self.buffer.data  # no new version, as in ``pack``
        begin = self.layout.rank * self.layout.chunk_rows
        end = begin + self.layout.chunk_rows
        shard[:begin].copy_(output[:begin])
        shard[end:].copy_(output[end:])

    def spread(self, grad: Tensor) -> Tensor:
        """A gradient of the shard, contiguous, with one row for each replica."""
        layout = self.layout
        if not layout.is_as_buffer:
            padded = grad.new_zeros(layout.buffer_shape)  # ``of_received`` drops the padding
            padded.narrow(0, 0, layout.num_rows).copy_(grad)
            grad = padded
        return grad.view(layout.world, -1)

    def of_received(self, row: Tensor) -> Tensor:
        """The gradient of the part, from this replica's row."""
        return self.layout.filled(row.view(self.layout.slot_shape))
