"""What the first passes will use, guessed before a pass was observed.

[Note: guesses]
A first forward is expected to use the weights of its blocks in the order in which they were
registered. A first backward has the uses of its forward in reverse, or each block once more before
its reverse (activation checkpointing): its first uses in blocks say which, or that neither is
right. If a block uses its weights in another order, so will those behind it. If a weight is used
behind its block, the guess is wrong, and the pass goes on without a plan: that costs a window of
gathers.

No guess takes more memory than the plan of later passes. So it omits weights that may never be
gathered or are larger than the window: embeddings, heads, weights outside of blocks. It has no
weights of other meshes than lane 0: ranks of lane 0 would disagree on which of them were used
behind their blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, count, groupby, pairwise

import torch.nn as nn

from .._params.sharded_weight import Gatherable

NUM_SEEN = 2  # uses in blocks, by which a backward is guessed

Blocks = list[list[int]]  # the uses of a pass, as indices of weights


def blocks_in(container: nn.Module, children: Iterable[nn.Module] | None = None) -> list[nn.Module]:
    """The modules, of ``children`` or all, whose class stands at least twice in a container."""
    if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return []
    if children is None:
        children = container.children()
    children = list(children)
    # What they were before each ``gtp_shard`` call made a class of its own.
    classes = [getattr(child, "_gtp_original", type(child)) for child in children]
    counts = Counter(classes)
    return [child for child, cls in zip(children, classes, strict=True) if counts[cls] > 1]


def guess_backward(
    uses: Sequence[int], block_of: Mapping[int, int], in_backward: Mapping[int, int], seen: Sequence[int]
) -> Blocks | None:
    """The uses of a backward.

    Args:
        uses: Of its forward; those outside of blocks are left out.
        block_of: By weight, the number of its block.
        in_backward: By weight, the index of what backward gathers of it.
        seen: What backward has used so far, in blocks and elsewhere.

    Returns:
        The uses, of which ``NUM_SEEN`` have happened; none if they are others; None if fewer have
        happened.
    """
    guessable = {*block_of, *in_backward.values()}
    begin = [use for use in seen if use in guessable][:NUM_SEEN]
    if len(begin) < NUM_SEEN:
        return None
    in_blocks = [use for use in uses if use in block_of]
    blocks = [list(block) for _, block in groupby(in_blocks, block_of.get)]
    blocks.reverse()  # backward begins with the last one
    reverse = [[in_backward[use] for use in reversed(block)] for block in blocks]
    recomputed = [[*block, *back] for block, back in zip(blocks, reverse, strict=True)]
    for guess in (reverse, recomputed):
        if [use for block in guess for use in block][:NUM_SEEN] == begin:
            return guess
    return []


def reordered(blocks: Blocks, cursor: int, position: int) -> Blocks | None:
    """The weight expected at ``position`` was used at ``cursor``. Assume the same order in this and
    later blocks of equal length. None if ``position`` is in a later block."""
    ends = list(accumulate(map(len, blocks), initial=0))  # where blocks begin, and the end of the last one
    begin, end = next(pair for pair in pairwise(ends) if cursor < pair[1])  # the block of the cursor
    if position >= end:
        return None
    found = []
    for first, block in zip(ends, blocks, strict=False):
        block = list(block)
        if first >= begin and len(block) == end - begin:  # earlier blocks have been used already
            block.insert(cursor - begin, block.pop(position - begin))
        found.append(block)
    return found


class Guesses:
    """Guesses of one runtime, see [Note: guesses]. The same on all ranks of lane 0.

    Args:
        roots: The modules of its calls, the outermost one first.
        gatherables: All of the runtime. Their lanes are known.
        most_nbytes: The largest weight to guess.
    """

    def __init__(self, roots: Iterable[nn.Module], gatherables: Sequence[Gatherable], most_nbytes: int) -> None:
        by_module: dict[nn.Module, list[Gatherable]] = {}
        for target in gatherables:
            is_forward = target is target.weight.for_forward and not target.may_be_left_out
            if not is_forward or target.lane != 0 or target.nbytes > most_nbytes:
                continue
            for site in target.weight.registration.sites:
                if not isinstance(site.module, nn.Embedding | nn.EmbeddingBag):
                    by_module.setdefault(site.module, []).append(target)
        # By module in a block: what its forward uses, as indices.
        self._uses_of: dict[nn.Module, list[int]] = {}
        self._block_of: dict[int, int] = {}  # by index: the number of its block
        self._in_backward: dict[int, int] = {}  # by index: of what backward gathers instead
        owners = set(by_module)
        numbers = count()
        for container in (module for root in roots for module in root.modules()):
            # A block stands at least twice among the children that have weights to guess.
            children = (c for c in container.children() if not owners.isdisjoint(c.modules()))
            for block, number in zip(blocks_in(container, children), numbers, strict=False):
                for module in block.modules():
                    for target in by_module.pop(module, ()):  # the outermost block takes it
                        self._uses_of.setdefault(module, []).append(target.index)
                        self._block_of.setdefault(target.index, number)  # a tied weight is in its first one
                        self._in_backward[target.index] = target.weight.for_backward.index

    def forward(self, module: nn.Module) -> Blocks:
        """The uses of a forward of ``module``."""
        uses = (use for submodule in module.modules() for use in self._uses_of.get(submodule, ()))
        return [list(block) for _, block in groupby(uses, self._block_of.get)]

    def backward(self, uses: Sequence[int], seen: Sequence[int]) -> Blocks | None:
        """As :func:`guess_backward`."""
        return guess_backward(uses, self._block_of, self._in_backward, seen)
