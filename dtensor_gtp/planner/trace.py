"""One step of a model on one rank as plain data: its uses of weights, and what lies between them.

Of blocks that are alike three are recorded: the first, one in between and the last. The one in between stands for any
number, but for the activations that earlier blocks have saved, which grow by the same bytes with each.
"""

from __future__ import annotations

import functools
import math
import re
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn as nn

from .model import Collectives, ModelConfig, Reference
from .recorder import Experts, Kind, Op, Recorder, matrices_of, recorder_of, recording, shape_of

_BLOCK = re.compile(r"(?:^|\.)\d+\.")


def _block_of(name: str) -> str:
    """The block that a module or a weight is in; empty if it is in none."""
    found = _BLOCK.search(f"{name}.")
    if found:
        return name[: found.end() - 1]
    return ""


class Amounts(NamedTuple):
    """What there is of one kind of memory around one use of a weight, at most, in bytes."""

    forward: int  # while forward uses the weight
    after_forward: int  # from there until forward uses the next one, or ends with the loss
    before_backward: int  # from the end of the use that backward comes from, or from the loss
    wgrad: int  # while backward computes the weight's gradient
    dgrad: int  # while it computes that of the input


class Weight(NamedTuple):
    """One use of a weight in the forward, and what surrounds it there and in backward."""

    name: str  # of the weight
    shape: tuple[int, ...]  # on one rank, before gtp cuts it
    is_table: bool  # whether it is looked up
    is_expert: bool  # whether it is of experts, which have their own mesh
    has_dgrad: bool  # whether backward computes the gradient of the input
    block: int  # number of the call of its block, in the order of the forward; -1 if it is in none
    before: tuple[Op, ...]  # operations of forward since the use before it
    use: tuple[Op, ...]  # those of the use itself
    backward: tuple[Op, ...]  # operations of backward between the use that backward comes from and this one
    amounts: Amounts  # bytes of activations around it
    live: int  # bytes of activations at the start of its use in forward
    grads: tuple[Op, ...] = ()  # kernels of its own backward beside GEMMs, of which each of ``use`` has two
    is_tied: bool = False  # whether a later use is of the same matrix and counts its state
    is_frozen: bool = False  # whether it is not trained: backward computes no gradient of the weight

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_of_experts(self) -> bool:
        """Whether it is of experts, or used as theirs are: in many GEMMs at once."""
        return self.is_expert or any(op.groups > 1 for op in self.use)

    @property
    def block_name(self) -> str:
        return _block_of(self.name)

    def with_ops(self, change: Callable[[Op], Op]) -> Weight:
        parts = (self.before, self.use, self.backward, self.grads)
        before, use, backward, grads = (tuple(map(change, ops)) for ops in parts)
        return self._replace(before=before, use=use, backward=backward, grads=grads)

    def shifted(self, nbytes: int) -> Weight:
        """The use after so many more bytes of activations."""
        amounts = Amounts(*(max(amount + nbytes, 0) for amount in self.amounts))
        return self._replace(amounts=amounts, live=max(self.live + nbytes, 0))

    @property
    def flops(self) -> float:
        """Of its GEMM in forward, of that of the weight's gradient, and of that of the input's."""
        return sum(op.flops for op in self.use if op.kind is Kind.GEMM)


@dataclass(frozen=True, eq=False)  # compared by identity, as keys of caches
class Trace:
    weights: tuple[Weight, ...]  # in the order of the forward
    loss: tuple[Op, ...]  # operations of forward after the last use
    tail: tuple[Op, ...]  # operations of backward after the last use
    input_nbytes: int  # bytes of what is passed from block to block
    small_numel: int  # parameters with less than two dims, which stay whole
    end: int = 0  # bytes of activations behind the last block; 0 if it is not known
    unused_numel: int = 0  # parameters of matrices without a gradient in this step, which nothing here counts
    frozen_small_numel: int = 0  # of ``small_numel``, those that are not trained

    @property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights if not weight.is_tied) + self.small_numel

    @property
    def model_flops(self) -> float:
        """What forward and backward multiply, without what is computed again: each GEMM three times, if it has both
        gradients."""
        flops = sum(weight.flops * (1 + weight.has_dgrad + (not weight.is_frozen)) for weight in self.weights)
        for weight in self.weights:
            flops += sum(op.flops for op in (*weight.before, *weight.backward) if op.kind is Kind.GEMM)
            flops += 3 * sum(op.flops for op in (*weight.before, *weight.use) if op.kind is Kind.ATTENTION)
        return flops

    @functools.cached_property
    def has_experts(self) -> bool:
        return any(weight.is_of_experts for weight in self.weights)

    @property
    def begins_frozen(self) -> bool:
        """Whether backward runs here through blocks before the first trained one; the model's may end before them."""
        first = next((number for number, weight in enumerate(self.weights) if not weight.is_frozen), 0)
        return any(w.has_dgrad and w.block != self.weights[first].block for w in self.weights[:first])

    @functools.cached_property
    def numbers(self) -> Mapping[int, list[int]]:
        """Numbers of uses by the number of their block; -1 has those outside of blocks."""
        found: dict[int, list[int]] = {}
        for number, weight in enumerate(self.weights):
            found.setdefault(weight.block, []).append(number)
        return found

    @functools.cached_property
    def blocks(self) -> Mapping[int, list[Weight]]:
        """Uses by the number of their block, without those outside of blocks."""
        return {block: [self.weights[n] for n in each] for block, each in self.numbers.items() if block >= 0}

    def ends_block(self, number: int) -> bool:
        """Whether forward uses another block next, so that backward begins with this use of its block."""
        return number + 1 == len(self.weights) or self.weights[number + 1].block != self.weights[number].block

    def largest_block(self, sizes: Sequence[int]) -> int:
        """The sum of the largest block, where uses have these sizes; of all uses if there are no blocks."""
        sums = [sum(sizes[number] for number in self.numbers[block]) for block in self.blocks]
        if len(sums) > 1:
            return max(sums)
        return sum(sizes)

    def with_weights(self, change: Callable[[Weight], Weight]) -> Trace:
        return replace(self, weights=tuple(map(change, self.weights)))

    @functools.lru_cache(maxsize=64)  # noqa: B019  # traces are few
    def times(self, batch: int) -> Trace:
        """The same for several sequences: operations and activations grow with them."""

        def more(op: Op) -> Op:
            return op._replace(flops=op.flops * batch, nbytes=op.nbytes * batch)

        def changed(weight: Weight) -> Weight:
            amounts = Amounts(*(amount * batch for amount in weight.amounts))
            return weight.with_ops(more)._replace(amounts=amounts, live=weight.live * batch)

        loss = tuple(map(more, self.loss))
        tail = tuple(map(more, self.tail))
        nbytes = self.input_nbytes * batch
        end = self.end * batch
        return replace(self.with_weights(changed), loss=loss, tail=tail, input_nbytes=nbytes, end=end)


def record(make_model: Callable[[], nn.Module], loss_of: Callable[[nn.Module, Recorder], torch.Tensor]) -> Trace:
    """One step of a model in bf16, on the meta device. ``loss_of`` makes its inputs."""
    with torch.device("meta"):
        model = make_model()
        params = set(model.parameters())
        recorder, loose = recorder_of(model)
        modules = dict(model.named_modules())
        calls = _note_calls(modules, recorder)
        with recording(recorder):
            loss = loss_of(model, recorder)
            recorder.mark()
            loss.backward()
            recorder.mark()
    small = loose | {param for param in params if param.ndim < 2}
    if not recorder.uses or not any(param.requires_grad for param in params):
        raise ValueError("record expects a backward that uses matrices, but no matrix has a gradient.")
    uses = sorted(recorder.uses)
    stretches = recorder.stretches
    weights = []
    # The last use of a matrix counts its state: backward comes by there first.
    counted = {matrices_of(modules[name]): number for number, (_, _, name) in enumerate(uses)}
    blocks: dict[tuple[str, int], int] = {}
    for number, (first, last, name) in enumerate(uses):
        module = modules[name]
        block = _block_of(name)
        in_block = -1
        if block:
            in_block = blocks.setdefault((block, bisect(calls[block], first)), len(blocks))
        (before, use, after), (backward, wgrad, dgrad) = (stretches[at - 1 : at + 2] for at in (first, last))
        matrix = f"{name}.weight", shape_of(module), isinstance(module, nn.Embedding), isinstance(module, Experts)
        has_dgrad = bool(dgrad.ops)
        amounts = Amounts(use.most, after.most, backward.most, wgrad.most, dgrad.most)
        grads = tuple(op for op in dgrad.ops if op.kind in (Kind.MEMORY, Kind.ATTENTION))
        ops = before.ops, use.ops, backward.ops
        flags = counted[matrices_of(module)] != number, name in recorder.frozen
        weights.append(Weight(*matrix, has_dgrad, in_block, *ops, amounts, use.live, grads, *flags))
    # What comes after the last use of forward is in its stretch; that of the loss' own backward is before the head's.
    operations = stretches[uses[-1][0] + 1].ops
    tail = next((stretch.ops for stretch in stretches[uses[0][1] + 2 :]), ())
    in_blocks = [weight for weight in weights if weight.block >= 0]
    input_nbytes = 0
    if in_blocks:
        input_nbytes = int(in_blocks[0].flops / (2 * in_blocks[0].numel) * in_blocks[0].shape[-1] * 2)
    frozen = _numel(param for param in small if not param.requires_grad)
    trace = Trace(tuple(weights), operations, tail, input_nbytes, _numel(small), frozen_small_numel=frozen)
    return replace(trace, unused_numel=max(_numel(params) - trace.numel, 0))


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def _note_calls(modules: Mapping[str, nn.Module], recorder: Recorder) -> Mapping[str, list[int]]:
    """By block, the stretches in which its calls begin, from now on."""
    calls: dict[str, list[int]] = {block: [] for block in map(_block_of, modules) if block}

    def note(begins: list[int], *_: object) -> None:
        begins.append(len(recorder.stretches))

    for block, begins in calls.items():
        modules[block].register_forward_pre_hook(partial(note, begins))
    return calls


_RECORDED = 3  # blocks of each kind: the first, one between two that are alike, and the last


@functools.lru_cache(maxsize=256)
def record_reference(
    config: ModelConfig, seq_len: int, tp: int = 1, cp: int = 1, ep: int = 1, loss: str = "bf16"
) -> Trace:
    """The recording of one sequence in a few blocks of each kind, for :func:`repeated`."""
    num_tokens = seq_len // cp

    def loss_of(model: nn.Module, recorder: Recorder) -> torch.Tensor:
        assert isinstance(model, Reference)
        tokens = torch.zeros(1, num_tokens + 1, dtype=torch.int64)
        inputs = tokens[:, :-1].contiguous()
        targets = tokens[:, 1:]
        return model.loss(inputs, targets, Collectives(recorder, tp, cp, ep), loss)

    blocks = [kind for kind in sorted(set(config.kinds)) for _ in range(_RECORDED)]
    trace = with_loss(record(lambda: Reference(config, blocks, num_tokens, tp, ep), loss_of), loss)
    share = config.looked_at(seq_len) / 0.5  # the recording has a causal mask

    def attending(op: Op) -> Op:
        if op.kind is Kind.ATTENTION:
            return op._replace(flops=op.flops * share)
        return op

    if config.is_tied:
        trace = trace.with_weights(lambda weight: weight._replace(is_tied=weight.is_table))
    trace = trace.with_weights(lambda weight: weight.with_ops(attending))
    return replace(trace, input_nbytes=num_tokens // tp * config.dim * 2)


# Of the memory of whole logits: a loss in eight chunks of tokens, and a kernel that makes no logits.
_LOGITS = {"chunked": 1 / 8, "fused": 0.0}


def with_loss(trace: Trace, loss: str) -> Trace:
    """The trace where the loss keeps fewer logits. ``loss`` is one of ``job.LOSSES``."""
    head = trace.weights[-1]
    if loss not in _LOGITS or head.block >= 0:
        return trace
    amounts = Amounts(*(head.live + int((amount - head.live) * _LOGITS[loss]) for amount in head.amounts))
    return replace(trace, weights=(*trace.weights[:-1], head._replace(amounts=amounts)))


def recomputed_uses(trace: Trace, checkpoint: str) -> dict[int, tuple[int, ...]]:
    """By block, numbers of the weights whose GEMMs backward computes again. The last GEMM of a block is not: nothing of
    it is saved. "selective" keeps the results of every second GEMM and of attention, as torchtitan's option."""
    if checkpoint == "none":
        return {}
    step = 1
    if checkpoint == "selective":
        step = 2
    return {block: tuple(trace.numbers[block][:-1][::step]) for block in trace.blocks}


@functools.lru_cache(maxsize=128)
def checkpointed(trace: Trace, checkpoint: str) -> Trace:
    """The trace with what blocks keep: their input, and with "selective" results of GEMMs that are not run again."""
    if checkpoint == "none" or not trace.blocks:
        return trace
    again = {number for numbers in recomputed_uses(trace, checkpoint).values() for number in numbers}
    kept = dict.fromkeys(trace.blocks, trace.input_nbytes)
    for number, weight in enumerate(trace.weights):
        if checkpoint == "selective" and weight.block >= 0 and number not in again:
            kept[weight.block] += int(weight.flops / (2 * weight.shape[-1]) * 2)  # what its GEMM computes
    lives = [weights[0].live for weights in trace.blocks.values()]
    last_end = trace.end or lives[-1]
    if not trace.end and len(lives) > 1:
        last_end += lives[-1] - lives[-2]  # as much as the block before
    ends = [*lives[1:], last_end]
    freed = [max(end - begin - nbytes, 0) for nbytes, begin, end in zip(kept.values(), lives, ends, strict=True)]
    freed_before = dict(zip(kept, accumulate(freed, initial=0), strict=False))

    def moved(weight: Weight) -> Weight:
        if weight.is_table:
            return weight
        return weight.shifted(-freed_before.get(weight.block, sum(freed)))

    return replace(trace.with_weights(moved), end=max(trace.end - sum(freed), 0))


class Part(NamedTuple):
    kinds: tuple[bool, ...]  # of each block, whether it is a mixture
    is_first: bool = True  # whether the embedding is here
    is_last: bool = True  # whether the head and the loss are here


@functools.lru_cache(maxsize=512)
def repeated(trace: Trace, config: ModelConfig, part: Part) -> Trace:
    """The step of ``part`` of the model, from a recording of :func:`record_reference`."""
    recorded = sorted(set(config.kinds))
    begins = {kind: _RECORDED * number for number, kind in enumerate(recorded)}
    by_block = trace.blocks
    saved = {kind: by_block[begin + 1][0].live - by_block[begin][0].live for kind, begin in begins.items()}
    # Before each block of the recording, and at its end.
    saved_before = list(accumulate((saved[kind] for kind in recorded for _ in range(_RECORDED)), initial=0))
    outside = [weight for weight in trace.weights if weight.block < 0]
    weights = []
    if part.is_first:
        weights = [weight for weight in outside if weight.is_table]
    if not part.is_last:  # stages that are not one have a matrix each
        weights = [weight._replace(is_tied=False) for weight in weights]
    num_saved = 0
    for number, kind in enumerate(part.kinds):
        is_begin = part.kinds[:number].count(kind) == 0
        is_end = part.kinds[number + 1 :].count(kind) == 0
        place = 1  # of the recorded block of this kind that stands for it
        follower = begins[kind] + 1
        if is_end:
            place = _RECORDED - 1
            follower = begins[kind] + place
        if is_begin:
            place = 0
        shift = num_saved - saved_before[begins[kind] + place]
        block = [_moved(weight, number, shift) for weight in by_block[begins[kind] + place]]
        # Before the last use of a block comes, in backward, the block that follows it.
        last = _moved(by_block[follower][-1], number, num_saved - saved_before[follower])
        amounts = block[-1].amounts._replace(before_backward=last.amounts.before_backward)
        block[-1] = block[-1]._replace(amounts=amounts, backward=last.backward)
        weights += block
        num_saved += saved[kind]
    if part.is_last:
        weights += [_moved(weight, -1, num_saved - saved_before[-1]) for weight in outside if not weight.is_table]
    small = trace.small_numel // (_RECORDED * len(recorded)) * len(part.kinds)
    end = by_block[0][0].live + num_saved
    found = replace(trace, weights=tuple(weights), small_numel=small, end=end)
    if not part.is_last:
        found = replace(found, loss=())
    if not part.is_first:
        found = replace(found, tail=())
    return found


def _moved(weight: Weight, block: int, shift: int) -> Weight:
    if block < 0:
        name = weight.name
    else:
        name = re.sub(r"layers\.\d+", f"layers.{block}", weight.name)
    return weight.shifted(shift)._replace(name=name, block=block)
