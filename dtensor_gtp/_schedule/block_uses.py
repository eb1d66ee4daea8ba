"""Forwards of blocks whose weights are a group, and the backwards of these forwards.

[Note: when the backward of a block begins and ends]
It begins when autograd comes to the op that made an output of the block. It ends when autograd
comes to the op that made an input. Autograd runs ready ops in reverse order of their making, so by
then all ops of the block have run whose gradients have arrived. Where an input is no result of an
op, one is put before the block (``with_node``); where no input needs a gradient, the end of the whole
backward does. Gradients that arrive later are reduced then, too. ``fully_shard`` puts an identity op before
each block instead (``RegisterPostBackwardFunction``), through which inputs cannot be written.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from .. import _torch_compat as compat
from .._params.weight_group import WeightGroup
from .runtime import Runtime


def nodes_of(inputs: Iterable[Tensor]) -> set[Node]:
    """What has made the inputs of a block that need a gradient. To be asked before its forward,
    which may write them."""
    return {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}


def with_node(tensor: Tensor) -> Tensor:
    """An input of a block, by an op if it is a leaf that needs a gradient. Autograd completes the
    gradient of a leaf before ops of the block that read weights, but that of an op in the order of
    their making."""
    if tensor.requires_grad and tensor.grad_fn is None and tensor.layout is torch.strided:
        return tensor.view_as(tensor)
    return tensor


class BlockUse:
    """One forward of a block, while its backward may come."""

    __slots__ = ("__weakref__", "_group", "_leaves", "_runtime")

    def __init__(self, runtime: Runtime, group: WeightGroup) -> None:
        self._runtime = runtime
        self._group = group
        self._leaves = group.leaves  # those of this forward: the group may get others

    def watch(self, before: set[Node], outputs: Iterable[Tensor]) -> None:
        """Call ``begin`` and ``end`` with the backward of the block, see the note above. ``before``:
        ``nodes_of`` the inputs."""
        outputs = list(outputs)
        made = {output.grad_fn for output in outputs if output.grad_fn is not None}
        # An input that the block returns as it is, such as T5's position bias, has its gradient
        # after all blocks. If that is all it returns, its backward may begin there all the same.
        begins = made - before or made
        for node in begins:
            node.register_prehook(self.begin)  # the node keeps this object alive, and calls it before it runs
        # No output shows when the backward begins. If it can come at all, hold the weights for it.
        if not made:
            members = self._leaves.by_member.values()
            if before or any(leaf.requires_grad for leaf in members):
                self._hold_for_hidden(outputs)
        # Autograd runs the node with the highest number first: of these, the one that was made last.
        last = max(before, key=lambda node: node._sequence_nr(), default=None)
        if last is not None and made:
            # An input may outlive this forward and its outputs: it must not keep them.
            # Where the block before made that node, this block ends before that one begins: else the weights of both
            # are in memory. A block that returns its input begins there itself.
            compat.register_prehook(last, compat.weakly(self.end), is_first=last not in begins)
        elif last is not None:
            compat.register_prehook(last, self.end, is_first=True)

    def _hold_for_hidden(self, outputs: Iterable[Tensor]) -> None:
        """No output that we see shows when the backward begins: they are in an object, or in a
        transform."""
        if any(output.requires_grad for output in outputs):
            raise NotImplementedError(
                f"A hook or the forward of block '{self._group.fqn}' returns a detached tensor that requires a "
                f"gradient (rank {dist.get_rank()}), so nothing says when the backward of the block begins. Detach it "
                "outside of the block."
            )
        # No node tells when the backward begins, so the first gradient of a leaf does. The group is held until it ends.
        self._group.views.note_gradients(self._runtime.note_backward)
        self._runtime.hold_until_end(self._group)

    def keep(self) -> None:
        """The forward ends with an exception. Memory stays for a backward that may come through what it has computed,
        until a pass begins for which nobody has kept any."""
        self._group.views.note_gradients(self._runtime.note_backward)
        self._leaves.note_saved(is_captured=self._runtime.comm.streams.is_capturing)

    def begin(self, grads: object = None) -> None:
        """The backward of this forward begins: hold the weights for it."""
        if self._leaves.refusal is not None:  # parameters were replaced since the forward
            raise RuntimeError(self._leaves.refusal)
        running = self._group.in_backward
        self._runtime.note_backward()
        running.uses.add(self)
        if torch.is_grad_enabled():  # in a backward: ``create_graph=True``
            # The second backward may come to no op that ``watch`` knows.
            self._group.views.note_gradients(self._runtime.note_backward)
            self._leaves.note_saved(is_captured=self._runtime.comm.streams.is_capturing)
        if running.held is None:
            self._runtime.grads.begin_group(self._group)
            running.held = self._runtime.gathering.acquire(self._group.for_forward)
            self._runtime.lost_writes.note_read(self._group)

    def end(self, grads: object = None) -> None:
        """All gradients of this forward have arrived: free the weights and reduce the gradients."""
        running = self._group.in_backward
        self._runtime.note_backward()
        running.uses.discard(self)  # ``begin`` has not run if no output got a gradient
        if not running.uses:  # else another backward reads the weights
            self._runtime.lost_writes.check(self._group)
            self._runtime.gathering.release_block(self._group)
        self._runtime.grads.reduce_group(self._group)
