"""What a block uses while it is recorded: weights and gradients at fixed addresses, and no communication.

[Note: fixed buffers]
A graph has addresses baked in, so the weights of a recorded block are gathered into buffers of their own, and its full
gradients are written to others. Blocks of one kind take turns with two sets: one set can be gathered or reduced while
the other is in use. All rules of [Note: streams and memory] hold. A fixed buffer is free when nobody holds it. A gather
that finds it taken uses another buffer, and the weight is copied before the replay. A full gradient is overwritten when
the reduction that reads it has been retired.

A recording reads weights in a frame of its own (``AttributeReads.apart``). The frame around it would release a fixed
buffer as if it had been gathered, and keep it for backward while the next gather overwrites it. That gave wrong steps
on a GPU with ``keep_nbytes``; the repair was tested on a CPU only. So nothing of a recorded block is kept from forward
to backward: not at the turning point, not by ``keep_nbytes``, not by ``reshard_after_forward=False``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .._comm.streams import Done
from .._params.gathered import Gathered
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import FixedBuffers, Gatherable, ShardedWeight
from .._params.whole_param import WholeParam
from .._schedule.gradient_protocols import Written
from .._schedule.runtime import Runtime


class Recording:
    """Takes the place of gathers and reductions while a pass of a block is recorded, see ``BlockRecording``."""

    def __init__(self) -> None:
        self.used: list[ShardedWeight] = []  # for each use
        self.written: list[Written] = []
        # For each reading of a whole parameter the leaf that stood for it, whose gradient the graph leaves.
        self.whole: list[tuple[WholeParam, Tensor]] = []
        self._bundle: int | None = None

    def acquire(self, target: Gatherable) -> Gathered:
        weight = target.weight
        if weight.fixed is None:
            raise NotImplementedError(
                f"capture_blocks expects blocks that use weights of their own alone, but one uses '{weight.fqn}'."
            )
        self.used.append(weight)
        buffer = weight.fixed.gathered.view(weight.fixed.gathered.shape)  # counts as a holder
        full = weight.layout.full_view(buffer)
        return Gathered(buffer, full, Done(), weight.shard, weight.version, is_alias=True, holds=1)

    def target(self, weight: ShardedWeight, dtype: torch.dtype | None = None) -> Tensor:
        """Where to put the gradient of a use, in ``dtype`` or else that of the reduction. Several uses are reduced each
        by itself, as without a graph: all but the first get memory of the graph."""
        assert weight.fixed is not None
        grad, dtype = weight.fixed.grad, dtype or weight.reduce_dtype
        is_first = all(weight is not other.weight for other in self.written)
        if not is_first or dtype.itemsize > grad.dtype.itemsize:
            return torch.empty_like(grad, dtype=dtype)
        if dtype == grad.dtype:
            return grad
        return grad.view(-1).view(dtype)[: grad.numel()].view(grad.shape)

    def keep(self, weight: ShardedWeight, rows: Tensor) -> Tensor:
        return self.target(weight, rows.dtype).copy_(rows)

    def submit(self, weight: ShardedWeight, buffer: Tensor) -> None:
        self.written.append(Written(weight, buffer, self._bundle))

    @contextmanager
    def together(self) -> Iterator[None]:
        self._bundle = len(self.written)
        try:
            yield
        finally:
            self._bundle = None

    def _read(self, param: WholeParam) -> Tensor:
        value = param.leaf.detach().to(param.compute_dtype).requires_grad_(param.leaf.requires_grad)
        self.whole.append((param, value))
        return value

    @contextmanager
    def active(self, runtime: Runtime, params: Iterable[ManagedParam], *, is_forward: bool) -> Iterator[None]:
        """Record what runs in the context: the forward or the backward of the block with these parameters."""
        for earlier in (self.used, self.written, self.whole):
            earlier.clear()
        leaves = [(param, param.leaf) for param in params if isinstance(param, ShardedWeight)]
        whole = [param for param in params if isinstance(param, WholeParam)]
        runtime.recording = runtime.grads.recording = self
        for weight, leaf in leaves:
            # Autograd remembers the first stream on which it sees a leaf, which must be that of the recording.
            weight.leaf = torch.empty_like(leaf, requires_grad=leaf.requires_grad)
        for param in whole:
            param.record_use = self._read
        try:
            with runtime.reads.apart(is_forward=is_forward):
                yield
        finally:
            runtime.recording = runtime.grads.recording = None
            for weight, leaf in leaves:
                weight.leaf = leaf
            for param in whole:
                param.record_use = None


class Rings:
    """Fixed buffers of the blocks of one model: two sets for each kind of block, in turn."""

    def __init__(self) -> None:
        self._num_blocks: Counter[tuple[object, ...]] = Counter()
        self._buffers: dict[tuple[object, ...], FixedBuffers] = {}

    def assign(self, weights: Sequence[ShardedWeight]) -> None:
        """Give the weights of the next block their buffers."""
        kind = tuple((w.layout.buffer_shape, w.compute_dtype, w.reduce_dtype, w.shard.device) for w in weights)
        turn = self._num_blocks[kind] % 2
        self._num_blocks[kind] += 1
        for position, weight in enumerate(weights):
            key = (kind, turn, position)
            if key not in self._buffers:
                self._buffers[key] = FixedBuffers(weight.new_buffer(), weight.send_buffer())
            weight.fixed = self._buffers[key]
