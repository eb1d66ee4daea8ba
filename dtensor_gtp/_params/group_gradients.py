"""The gradients of a group of weights, packed rank by rank and reduced as one, see ``weight_group``."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .. import _torch_compat as compat
from .gradient import PendingGradient, as_dense, take_grad
from .group_memory import ALIGNMENT, GroupLeaves
from .layout import WeightLayout
from .sharded_weight import ShardedWeight


class GroupGradients(PendingGradient):
    """The gradients of weights of a group, packed rank by rank, so that they are reduce-scattered
    as one."""

    def __init__(self, leaves: GroupLeaves, dtype: torch.dtype) -> None:
        super().__init__()
        self.leaves = leaves
        self.dtype = dtype  # in which they are sent
        # That are trained, or were trained in an earlier microbatch.
        self.weights: list[ShardedWeight] = []
        # That were trained since gradients moved into ``.grad``.
        self.owed: set[ShardedWeight] = set()
        # Of these, those of which this rank has had a gradient.
        self._used: set[ShardedWeight] = set()
        # Ids of the leaves to which the running backward is confined; None: all.
        self.asked_for: set[int] | None = None
        self._may_differ = False  # whether ``weights`` may not be what is expected
        self.layout: WeightLayout  # of the packed gradients
        self._all = [member for member in leaves.by_member if isinstance(member, ShardedWeight)]
        step = ALIGNMENT // dtype.itemsize
        self._num_marks = -(-len(self._all) // step) * step
        # What is sent in most steps: a graph keeps its address, so it stays.
        self._all_used = torch.empty(0)

    def reduce_only(self, weights: Iterable[ShardedWeight]) -> None:
        """Reduce gradients of these weights from now on. Sums of earlier microbatches keep their
        values."""
        before = self.weights
        old = slot_numels(weight.layout for weight in before)
        self.weights = list(weights)
        first = self._all[0]
        world = first.layout.world
        # Behind the rows for a rank, a mark for each weight says whether the sender has a gradient of it.
        shapes = [*(weight.layout.slot_shape for weight in self.weights), (self._num_marks,)]
        self._slots_like = [compat.template(shape, self.dtype, first.device) for shape in shapes]
        numel = world * sum(map(math.prod, shapes))
        self.layout = WeightLayout(torch.Size((numel,)), 0, world, first.layout.rank)
        self.lay_out(self.layout, self.dtype, first.device)
        if self._all_used.dtype != self.leaves.dtype or not self._all_used.numel():
            with torch.inference_mode(False):
                self._all_used = torch.ones(world, self._num_marks, dtype=self.leaves.dtype, device=first.device)
        self.unsharded = self._laid_out_anew(self.unsharded, before, old, world)
        self.unreplicated = self._laid_out_anew(self.unreplicated, before, old, 1)

    def _laid_out_anew(
        self, total: Tensor | None, weights: list[ShardedWeight], numels: list[int], num_rows: int
    ) -> Tensor | None:
        if total is None:
            return None
        *columns, marks = total.view(num_rows, -1).split([*numels, self._num_marks], 1)
        parts = dict(zip(weights, columns, strict=True))
        new = zip(self.weights, slot_numels(weight.layout for weight in self.weights), strict=True)
        rows = []
        for weight, numel in new:
            if weight not in parts:
                parts[weight] = total.new_zeros(num_rows, numel)
                marks[:, self._all.index(weight)] = 0  # no rank has used it so far
            rows.append(parts[weight])
        return torch.cat([*rows, marks], 1).flatten()

    @property
    def have_arrived(self) -> bool:
        """Whether gradients of weights have arrived that are not reduced yet."""
        return any(self.leaves.by_member[weight].grad is not None for weight in self._all)

    @property
    def is_left_out(self) -> bool:
        """Whether the running backward is confined to other parameters, on all ranks."""
        asked = self.asked_for
        if asked is None:
            return False
        return not any(id(leaf) in asked for leaf in self.leaves.by_member.values())

    def note_switched(self) -> None:
        """Members were frozen or unfrozen. The next reduction lays out what is trained then."""
        self._may_differ = True

    @property
    def expected(self) -> list[ShardedWeight]:
        """What ``weights`` are to be now, on all ranks alike. Sums may have gradients of frozen ones."""
        return [weight for weight in self._all if weight.param.requires_grad or weight in self.owed]

    @property
    def is_laid_out(self) -> bool:
        """Whether ``weights`` are what is expected."""
        return not self._may_differ or self.weights == self.expected

    def lay_out_anew(self) -> None:
        """Nothing in flight may have the layout of before."""
        self.reduce_only(self.expected)
        self._may_differ = bool(self.owed)  # then ``weights`` may have more than those that are trained

    def take(self) -> list[Tensor]:
        """Take the gradients from the leaves, zeros where there is none, and the marks.
        :func:`pack` sends them."""
        grads = []
        unused = []  # without a gradient on this rank
        asked = self.asked_for
        with compat.without_torch_function():
            # Autograd, too, skips a leaf that was frozen after its forward.
            are_trained = [weight.param.requires_grad for weight in self.weights]
        for weight, is_trained in zip(self.weights, are_trained, strict=True):
            leaf = self.leaves.by_member[weight]
            grad = take_grad(leaf)
            is_expected = is_trained and (asked is None or id(leaf) in asked)
            if is_expected:
                self.owed.add(weight)
            if is_expected and grad is not None:
                self._used.add(weight)
                grads.append(as_dense(grad))
            else:
                unused.append(weight)
                grads.append(leaf.new_zeros(leaf.shape))
        marks = self._all_used
        if unused:
            marks = marks.clone()
        for weight in unused:  # on the device, as a graph may record it
            marks[:, self._all.index(weight)].zero_()
        return [*grads, marks]

    def accumulate(self, slot: Tensor) -> None:
        """Hand this rank's rows of all reduced gradients to the weights."""
        *parts, marks = compat.unflatten(slot, self._slots_like)
        for weight, rows in zip(self.weights, parts, strict=True):
            if self._takes(weight, marks):
                weight.accumulate(rows)

    def _takes(self, weight: ShardedWeight, marks: Tensor) -> bool:
        """Whether a weight gets its reduced gradient; notes whether other ranks alone have used it."""
        if weight not in self.owed:
            return False
        use_elsewhere = None
        if weight not in self._used:
            use_elsewhere = marks[self._all.index(weight)]
        weight.gradient.note_use_elsewhere(use_elsewhere)
        return True

    def for_replicas(self, slot: Tensor) -> Tensor:
        """Reduced rows of the gtp axis, with one row for each replica, each with all marks."""
        *parts, marks = compat.unflatten(slot, self._slots_like)
        rows = [weight.for_replicas(part) for weight, part in zip(self.weights, parts, strict=True)]
        return torch.cat([*rows, marks.expand(self._all[0].mesh.size(0), -1)], 1)

    def accumulate_part(self, row: Tensor) -> None:
        """Hand this replica's row of all reduced gradients to the weights."""
        *parts, marks = row.split([*(weight.part_numel for weight in self.weights), self._num_marks])
        for weight, part in zip(self.weights, parts, strict=True):
            if self._takes(weight, marks):
                weight.accumulate_part(part)

    def settle(self) -> None:
        """All gradients have moved into ``.grad``."""
        if self.is_empty:
            self.owed.clear()
            self._used.clear()

    def forget(self) -> None:
        super().forget()
        self.owed.clear()
        self._used.clear()
        for leaf in self.leaves.by_member.values():
            leaf.grad = None


def pack(taken: list[Tensor], world: int, buffer: Tensor) -> None:
    """Copy what groups gave (``GroupGradients.take``) into a contiguous buffer, cast, rank by rank."""
    compat.chunk_cat(taken, world, buffer.view(world, -1))


def packed(taken: list[Tensor], world: int, dtype: torch.dtype) -> Tensor:
    """``pack`` into a new buffer of this dtype."""
    numel = sum(-(-part.shape[0] // world) * math.prod(part.shape[1:]) for part in taken)  # for a rank
    buffer = taken[0].new_empty(world * numel, dtype=dtype)
    pack(taken, world, buffer)
    return buffer


def slot_numels(layouts: Iterable[WeightLayout]) -> list[int]:
    """How many elements a rank gets of each of these gradients."""
    return [math.prod(layout.slot_shape) for layout in layouts]
