"""The gradient of one parameter on its way into ``.grad``: what is not reduced yet, and what is."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._comm.send_ring import SendRing
from .._dtensor.remedies import WHOLE, explain
from .layout import WeightLayout

# Cached, because each gradient needs it, and torch runs an op to compute it.
wider = functools.cache(torch.promote_types)


def as_dense(grad: Tensor) -> Tensor:
    """A gradient that can be reduced: that of a lookup with ``sparse=True`` is sparse."""
    if grad.layout is torch.strided:
        return grad
    return grad.to_dense()


def take_grad(leaf: Tensor) -> Tensor | None:
    """The gradient that ``leaf`` has got, without the graph of a backward with ``create_graph=True``. The leaf has none
    from then on."""
    grad = leaf.grad
    if grad is None:
        return None
    leaf.grad = None
    if grad.requires_grad:
        return grad.detach()
    return grad


class PendingGradient:
    """What of the gradient of a weight, or of a group of weights, is not reduced yet; and buffers
    for it."""

    def __init__(self) -> None:
        self.unsharded: Tensor | None = None  # full gradient of microbatches without gradient sync
        # Rows reduced over gtp but not yet over the replicas (set_requires_all_reduce(False)).
        self.unreplicated: Tensor | None = None
        # Set where copy engines fetch the gradient, before the first forward.
        self.ring: SendRing | None = None
        self.sent_nbytes = 0  # in a reduce-scatter

    def lay_out(self, layout: WeightLayout, dtype: torch.dtype, device: torch.device) -> None:
        """The gradient has this layout, and is sent in this dtype."""
        self.sent_nbytes = math.prod(layout.buffer_shape) * dtype.itemsize
        self._sent_like = compat.template(layout.buffer_shape, dtype, device)

    @property
    def is_empty(self) -> bool:
        return self.unsharded is None and self.unreplicated is None

    def send_buffer(self) -> Tensor:
        """An uninitialized buffer for the full gradient of this rank. No rank reads its padding."""
        return torch.empty_like(self._sent_like)

    def forget(self) -> None:
        self.unsharded = self.unreplicated = None


class LastUse:
    """Which backwards have come to all their uses of a weight. With a ``fully_shard`` outside, the gradient is complete
    then, as it would be in autograd's leaf: before, hooks would get a part of it."""

    def __init__(self, leaf: Tensor) -> None:
        self._reached: set[int] = set()  # running backwards; that of a reentrant checkpoint runs within another one
        self._node = compat.accumulate_node(leaf)
        self._node.register_prehook(compat.weakly(self.reach))  # autograd runs the node after the last use

    @property
    def is_awaited(self) -> bool:
        """Whether the running backward has more uses to come to."""
        backward = compat.current_graph_task_id()  # -1: a pipeline completes gradients after its backwards
        return backward not in (-1, *self._reached) and compat.is_node_awaited(self._node)

    def reach(self, grads: object) -> None:
        backward = compat.current_graph_task_id()
        self._reached.add(backward)
        # Behind the callback of ``fully_shard``, which takes gradients: that is queued when its backward begins.
        compat.queue_backward_callback(partial(self._reached.discard, backward))


class ReducedGradient:
    """A gradient of the shape of the shard. It alone knows what is not in ``.grad`` yet."""

    param: nn.Parameter
    dtype: torch.dtype  # of the parameter when it was taken over

    def __init__(self, offload: CPUOffloadPolicy | None) -> None:
        self._offload = offload
        self.awaits_reduction = False  # trained in a backward since the last reduction
        self.last_use: LastUse | None = None  # of a weight that an outer ``fully_shard`` has cut again
        self.reduced: Tensor | None = None  # of the running backward
        self._more_reduced: list[Tensor] = []  # those of further uses, with shards on the host
        # In the last backward in which this rank did not use the parameter.
        self.is_used_elsewhere = False
        # Positive if other ranks have used it in this backward.
        self.use_elsewhere: Tensor | None = None
        # Sum over microbatches, if .grad has a narrower dtype than the sum.
        self.wide: Tensor | None = None

    def follow(self, param: nn.Parameter) -> None:
        """Gradients are those of ``param`` from now on. It may be the same object as before, with
        other data."""
        if self.wide is not None and param.dtype != self.dtype:
            self.wide = None
        self.param = param
        self.dtype = param.dtype

    @property
    def has_more_uses(self) -> bool:
        """Whether the running backward has yet to come to uses of the weight, of a module that runs several times."""
        return self.last_use is not None and self.last_use.is_awaited

    def forget_if_cleared(self) -> None:
        """Forget the sum over microbatches if the user has cleared ``.grad``."""
        if self.param.grad is None:
            self.wide = None

    def accumulate(self, reduced: Tensor) -> None:
        """Add a reduced gradient (shape of the shard) to those of this backward, on the current
        stream."""
        if reduced.dtype != self.dtype:
            # Sum in the wider of the two dtypes.
            reduced = reduced.to(wider(reduced.dtype, self.dtype))
        if self._offload is not None:
            reduced = self._to_host(reduced, self._offload)
        if self.reduced is not None and self._offload is not None:
            self._more_reduced.append(reduced)  # it may not have arrived yet
        elif self.reduced is None:
            self.reduced = reduced  # no copy: it may be a view of what the collective has written
        else:
            self.reduced += reduced

    def _to_host(self, reduced: Tensor, offload: CPUOffloadPolicy) -> Tensor:
        """A copy on the host. It is complete when the stream that is current now has come to it."""
        is_pinned = offload.pin_memory and reduced.is_cuda
        host = torch.empty(reduced.shape, dtype=reduced.dtype, device="cpu", pin_memory=is_pinned)
        return host.copy_(reduced, non_blocking=True)  # the host goes on, if the memory is pinned

    def note_use_elsewhere(self, is_used: Tensor | None) -> None:
        """This rank has no gradient of its own, and ``is_used`` is positive if another one has;
        None: it has one."""
        if is_used is not None and self.use_elsewhere is not None:
            is_used = is_used + self.use_elsewhere
        self.use_elsewhere = is_used

    def _drop_zeros(self) -> None:
        """What no rank has used gets no gradient, not zeros, with which an optimizer would decay
        and move it."""
        self.use_elsewhere = None
        if not self.is_used_elsewhere:
            self.reduced = None
            self._more_reduced.clear()

    def publish(self, fqn: str, hook: Callable[[Tensor], None] | None) -> None:
        """Move the reduced gradient into ``param.grad``, on the compute stream, and run the user's
        hooks; ``hook`` is that of all-reduces. If the gradient was copied to the host, the caller
        has waited for that, and for :func:`read_marks`."""
        if self.use_elsewhere is not None:
            self._drop_zeros()
        reduced = self.reduced
        if reduced is None:
            return  # no reduction has given it a gradient since the last call
        self.reduced = None
        param = self.param
        for more in self._more_reduced:
            reduced += more
        self._more_reduced.clear()
        if hook is not None:
            # Here, not behind backward: replicas may launch their reductions in different orders.
            hook(reduced)
        hooks = compat.tensor_hooks(param)
        if hooks:  # as in autograd, before the gradient is added to ``.grad``
            reduced = _run_tensor_hooks(hooks, fqn, param, reduced)
        with compat.without_torch_function():  # only attributes are read in here
            post_hooks = compat.post_accumulate_grad_hooks(param)
            dtype = compat.grad_dtype(param)
            grad = param.grad
        earlier = self.wide
        self.wide = None
        if grad is None:  # also where the user has cleared it, which voids ``earlier``
            rounded = reduced
            if reduced.dtype != dtype:  # torch needs 1 us to find that it has nothing to do
                rounded = reduced.to(dtype)
            param.grad = compat.wrap_local(rounded, compat.dtensor_spec(param))  # type: ignore[arg-type]
        else:
            local = compat.local_tensor(as_dtensor(grad))
            total = local.to(reduced.dtype)  # .grad itself if the dtypes are equal
            if earlier is not None:
                # Add to the wide sum where .grad still equals the rounded sum. Elsewhere the user
                # has changed .grad (clipping, zeroing), perhaps without a change of its version:
                # add to .grad.
                total = torch.where(earlier.to(dtype) == local, earlier, total)
            total += reduced
            if total is not local:
                local.copy_(total)
            reduced = total
        if reduced.dtype != dtype:
            self.wide = reduced  # the bits that ``.grad`` has rounded away
        for post_hook in post_hooks:  # as in autograd, they find ``.grad`` set
            post_hook(param)

    def reset(self) -> None:
        """Forget gradients of a backward that raised."""
        # ``wide`` stays: it belongs to ``.grad``, which stays, too.
        self.reduced = self.use_elsewhere = None
        self.awaits_reduction = False
        self._more_reduced.clear()


def read_marks(gradients: Iterable[ReducedGradient]) -> None:
    """Ask the device, once for all, whether other ranks have used what this rank has not."""
    marked = [(gradient, gradient.use_elsewhere != 0) for gradient in gradients if gradient.use_elsewhere is not None]
    if not marked:
        return
    answers = torch.stack([is_used for _, is_used in marked]).tolist()
    for (gradient, _), is_used in zip(marked, answers, strict=True):
        gradient.is_used_elsewhere = is_used


def as_dtensor(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


def _run_tensor_hooks(
    hooks: list[Callable[[Tensor], Tensor | None]], fqn: str, param: Tensor, reduced: Tensor
) -> Tensor:
    """Hooks of ``Tensor.register_hook`` get the gradient in the dtype of ``param``, and may return
    another one."""
    for hook in hooks:
        if compat.is_multi_grad_hook(hook):
            raise RuntimeError(
                f"Parameter '{fqn}' of shape {tuple(param.shape)} has a hook of "
                "register_multi_grad_hook(mode='all'), which would never run, because its gradient "
                f"does not come from autograd (rank {dist.get_rank()}). Register hooks by "
                "param.register_post_accumulate_grad_hook(hook)."
            )
        try:
            replaced = hook(compat.wrap_local(reduced.to(param.dtype), compat.dtensor_spec(as_dtensor(param))))
        except RuntimeError as error:
            explain(error, f"A hook of parameter '{fqn}' gets the gradient as a DTensor. {WHOLE}.")
            raise
        if replaced is not None:
            assert isinstance(replaced, DTensor)
            reduced = compat.local_tensor(replaced).to(reduced.dtype, copy=True)  # the hook may keep its tensor
    return reduced
