"""What a block uses while it is recorded: weights and gradients at fixed addresses, and no communication.

[Note: fixed buffers]
A graph has addresses baked in, so the weights of a recorded block are gathered into buffers of their own, and its full
gradients are written to others. Blocks of one kind share two sets of them in turn, so that one can be gathered, or
reduced, while the other computes. All rules of [Note: streams and memory] hold: a fixed buffer counts as free when
nobody holds it, as the allocator would count it, and a gather that finds it taken gets another one, from which the
weight is copied before the replay. A full gradient is replaced when the reduction that reads it has been retired.

A recording reads weights in a frame of its own, which ends with it (see ``Runtime.apart``). In the frame around it, its
fixed buffer would be released when that one ends, as if it had been gathered, and kept for backward while the next
gather takes it: so steps on a GPU came out wrong with ``keep_nbytes``. That has been seen to be repaired without a GPU
only, therefore nothing of a recorded block is kept from forward to backward, neither at the turning point nor by
``keep_nbytes`` nor by ``reshard_after_forward=False``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from .._comm.streams import Done
from .._params.gathered import Gathered
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import FixedBuffers, Gatherable, ShardedWeight
from .._params.whole_param import WholeParam
from .._schedule.gradient_protocols import Written
from .._schedule.runtime import Runtime


class WholeUse(NamedTuple):
    """One reading of a parameter that stays whole: the leaf that stood for it, whose gradient the graph leaves."""

    param: WholeParam
    value: Tensor


class Recording:
    """Takes the place of gathers and reductions while a pass of a block is recorded."""

    def __init__(self) -> None:
        self.used: list[ShardedWeight] = []  # for each use
        self.written: list[Written] = []
        self.whole: list[WholeUse] = []
        self._bundle: int | None = None

    def acquire(self, target: Gatherable) -> Gathered:
        """The weight where the graph will find it."""
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
        """Where the gradient of a use is to be: those of several uses are reduced each by itself, as without a graph,
        and all but the first are in memory of the graph's.

        Args:
            dtype: Default: that of the reduction.
        """
        assert weight.fixed is not None
        grad, dtype = weight.fixed.grad, dtype or weight.reduce_dtype
        is_first = all(weight is not other.weight for other in self.written)
        if not is_first or dtype.itemsize > grad.dtype.itemsize:
            return torch.empty_like(grad, dtype=dtype)
        if dtype == grad.dtype:
            return grad
        return grad.view(-1).view(dtype)[: grad.numel()].view(grad.shape)

    def keep(self, weight: ShardedWeight, rows: Tensor) -> Tensor:
        """A gradient that would be sent as it is, in the same dtype, where it may stay."""
        return self.target(weight, rows.dtype).copy_(rows)

    def submit(self, weight: ShardedWeight, buffer: Tensor) -> None:
        """The gradient is there."""
        self.written.append(Written(weight, buffer, self._bundle))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Gradients that are submitted in the context are a bundle."""
        self._bundle = len(self.written)
        try:
            yield
        finally:
            self._bundle = None

    def _read(self, param: WholeParam) -> Tensor:
        value = param.leaf.detach().to(param.compute_dtype).requires_grad_(param.leaf.requires_grad)
        self.whole.append(WholeUse(param, value))
        return value

    @contextmanager
    def active(self, runtime: Runtime, params: Iterable[ManagedParam], *, is_forward: bool) -> Iterator[None]:
        """What runs inside of the context is recorded.

        Args:
            params: Those of the block.
            is_forward: Whether it is the forward of the block, or its backward.
        """
        for earlier in (self.used, self.written, self.whole):
            earlier.clear()
        leaves = [(param, param.leaf) for param in params if isinstance(param, ShardedWeight)]
        whole = [param for param in params if isinstance(param, WholeParam)]
        runtime.recording = runtime.grads.recording = self
        for weight, leaf in leaves:
            # Autograd remembers the stream on which it has seen a leaf first, which must be that of the recording.
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
        self._num_blocks: dict[tuple[object, ...], int] = {}
        self._buffers: dict[tuple[object, ...], FixedBuffers] = {}

    def assign(self, weights: Sequence[ShardedWeight]) -> None:
        """Give the weights of the next block their buffers."""
        kind = tuple((w.layout.buffer_shape, w.compute_dtype, w.reduce_dtype, w.shard.device) for w in weights)
        number = self._num_blocks.get(kind, 0)
        self._num_blocks[kind] = number + 1
        for position, weight in enumerate(weights):
            key = (kind, number % 2, position)
            if key not in self._buffers:
                self._buffers[key] = FixedBuffers(weight.new_buffer(), weight.send_buffer())
            weight.fixed = self._buffers[key]
