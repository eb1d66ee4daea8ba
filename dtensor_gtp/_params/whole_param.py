"""A parameter that stays whole on every rank: what modules see of it, and its local gradient before
the reduction."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .gradient import as_dense, take_grad, wider
from .managed_param import ManagedParam, Policies, Site


class WholeParam(ManagedParam):
    """A parameter that every rank of the axis holds whole.

    Modules see ``leaf``, an ordinary parameter in the same memory (with shards on the host, a copy
    on the device that each forward makes anew). Autograd accumulates its gradient locally. After
    backward, one coalesced call reduces the gradients of all such parameters.
    """

    def __init__(
        self,
        fqn: str,
        sites: list[Site],
        param: nn.Parameter,
        mesh: DeviceMesh,
        policies: Policies,
        tp_spec: compat.DTensorSpec | None,
        reason: str,
    ) -> None:
        super().__init__(fqn, sites, param, mesh, policies)
        self.tp_spec = tp_spec  # of ``leaf``; None without tensor parallelism
        self.reason = reason  # why the parameter is not sharded, for the report
        # Of microbatches without gradient sync, in reduce_dtype.
        self.unsynced_grad: Tensor | None = None
        # Of uses in a compute dtype that is wider than that of ``leaf``.
        self._wide_local_grad: Tensor | None = None
        # Called when a local gradient has arrived; set by the runtime.
        self.on_local_grad: Callable[[], None] | None = None
        # Set while a block is recorded.
        self.record_use: Callable[[WholeParam], Tensor] | None = None
        self._make_leaf()

    def _rebound(self) -> None:
        self.set_grad_aside()
        self._make_leaf()

    def _make_leaf(self) -> None:
        value = self.shard.detach()
        if self.policies.offload is not None and not value.is_meta:
            value = value.to(self.device, copy=True)
        if self.tp_spec is not None:
            spec = self.tp_spec
            self.tp_spec = compat.make_spec(spec.mesh, spec.placements, spec.shape, value.dtype)
            value = compat.wrap_local(value, self.tp_spec)
        self.leaf = nn.Parameter(value, requires_grad=self.param.requires_grad)
        self._version = self.param._version  # of the values that modules have seen
        if self.leaf.is_floating_point() or self.leaf.is_complex():
            self.leaf.requires_grad_(True)  # torch demands it of a tensor that gets a hook
            self.leaf.register_post_accumulate_grad_hook(compat.weakly(self._notify))
            self.leaf.requires_grad_(self.param.requires_grad)
        self._take_direct_grads()

    def begin_backward(self) -> None:
        super().begin_backward()
        self.follow_writes()

    def follow_frozen(self) -> None:
        self.set_grad_aside()  # the parameter was trained when these gradients were computed
        super().follow_frozen()
        self._take_direct_grads()

    def set_grad_aside(self) -> None:
        """The leaf is about to change: keep its gradient of earlier microbatches."""
        self.unsynced_grad = self._with_unsynced(self._take_grad_of_leaf())

    def _take_direct_grads(self) -> None:
        """Reduce what arrives at the parameter itself, a DTensor, which code outside of forwards
        reads (``param.full_tensor()`` in a loss): autograd would add this rank's part to
        ``.grad``."""
        self._node = None
        if not self.param.requires_grad:
            return
        # The graph's node, and not the parameter, whose hooks are the user's. A node lives while
        # somebody holds it.
        self._node = compat.accumulate_node(self.param)
        self._node.register_prehook(compat.weakly(self._take_direct))

    def follow_writes(self) -> None:
        """The leaf has the parameter's memory, but counts writes by itself. Autograd shall refuse a
        backward through the values before."""
        if self._version != self.param._version:
            self._version = self.param._version
            torch.autograd.graph.increment_version(self.leaf)

    def take_back(self) -> RuntimeError | None:
        """Let modules see the parameter's own memory. Returns an error if ``set_`` or
        ``.data = ...`` had given them other memory, which no optimizer and no checkpoint knows."""
        leaf = compat.local_part(self.leaf)  # no op: torch.func would wrap the result
        is_plain = self.group is None and self.policies.offload is None and type(self.shard) is Tensor
        if not is_plain or leaf.is_meta or leaf.data_ptr() == self.shard.data_ptr():
            return None
        if self.tp_spec is None:
            self.leaf.data = self.shard.detach()
        else:
            compat.set_local(self.leaf, self.shard.detach(), self.tp_spec)  # type: ignore[arg-type]
        return RuntimeError(
            f"Code has replaced the data of parameter '{self.fqn}' of shape "
            f"{tuple(self.param.shape)} where modules see it, in a forward or before reshard(), by "
            f".data = ... or set_ (rank {dist.get_rank()}). Write to it under torch.no_grad(): "
            "module.weight.copy_(value)."
        )

    def begin_forward(self, is_captured: bool) -> None:
        super().begin_forward(is_captured)
        self.follow_writes()
        misuse = self.take_back()
        if misuse is not None:
            raise misuse
        if self.policies.offload is not None and not self.shard.is_meta:
            # Without a new version: a graph of an earlier forward may have saved the leaf, whose
            # values are the same unless the optimizer has stepped, which changes the version.
            compat.local_part(self.leaf.detach()).data.copy_(self.shard, non_blocking=True)

    def value(self) -> Tensor:
        """The parameter as modules see it, in the compute dtype."""
        if self.record_use is not None:
            return self.record_use(self)
        if self.leaf.dtype == self.compute_dtype:
            return self.leaf
        value = self.leaf.to(self.compute_dtype)
        if value.requires_grad and self.is_widened:
            # Take the gradient here: on its way to the leaf autograd would round it.
            value = value.detach().requires_grad_()
            value.register_post_accumulate_grad_hook(compat.weakly(self._take_wide))
        return value

    @property
    def gives_copies(self) -> bool:
        """Whether ``value()`` has memory of its own, so that writes to it do not reach the parameter."""
        return self.leaf.dtype != self.compute_dtype or self.policies.offload is not None

    @property
    def is_widened(self) -> bool:
        """Whether it computes in a dtype that its own one would round."""
        return wider(self.compute_dtype, self.leaf.dtype) != self.leaf.dtype

    def add_local_grad(self, grad: Tensor) -> None:
        """Accumulate the gradient of one ``value()`` as autograd would. ``grad`` is only read."""
        leaf = self._leaf_in_use
        if wider(grad.dtype, leaf.dtype) != leaf.dtype:
            if self._wide_local_grad is None:
                grad = grad.clone()  # it is kept, and belongs to others
            self._add_wide(grad)
        elif leaf.grad is None:
            leaf.grad = grad.to(leaf.dtype, copy=True)  # ``grad`` belongs to others; later ones are added to this
        else:
            leaf.grad += grad.to(leaf.dtype)
        self._notify()

    @property
    def _leaf_in_use(self) -> Tensor:
        """What modules compute with: a group has a leaf of its own."""
        leaf: Tensor = self.leaf
        if self.group is not None:
            leaf = self.group.leaves.by_member[self]
        return leaf

    def _notify(self, leaf: object = None) -> None:
        if self.on_local_grad is not None:
            self.on_local_grad()

    def _take_direct(self, grads: tuple[Tensor | None, ...]) -> tuple[None, ...] | None:
        (grad,) = grads
        if grad is None or self.registration.is_cut_again:
            return None  # autograd goes on with the gradient
        if isinstance(grad, DTensor):
            if grad.placements != self.param.placements:  # type: ignore[attr-defined]
                grad = grad.redistribute(placements=self.param.placements)  # type: ignore[attr-defined]
            grad = compat.local_tensor(grad).detach()
        if self.tp_spec is not None:
            grad = compat.wrap_local(grad, self.tp_spec)
        self.add_local_grad(grad)
        return (None,)  # nothing is left to add to ``.grad``

    def _take_wide(self, used: Tensor) -> None:
        grad = take_grad(used)  # the graph holds ``used``, and would hold its gradient
        if grad is not None:
            self._add_wide(grad)
            self._notify()

    def _add_wide(self, grad: Tensor) -> None:
        self._wide_local_grad = _sum(self._wide_local_grad, grad.detach())

    @property
    def has_local_grad(self) -> bool:
        """Whether a gradient has arrived that ``take_local_grad`` has not taken."""
        grads = (self._leaf_in_use.grad, self.leaf.grad, self._wide_local_grad)
        return any(grad is not None for grad in grads)

    @property
    def has_unsynced(self) -> bool:
        return super().has_unsynced or self.unsynced_grad is not None or self.has_local_grad

    def take_local_grad(self) -> Tensor | None:
        """Return the local gradient since the last reduction, and forget it."""
        grad = self._take_grad_of_leaf()
        if not self.param.requires_grad:
            grad = None  # autograd, too, skips a leaf that was frozen after its forward
        return self._with_unsynced(grad)

    def new_zero_grad(self) -> Tensor:
        """What this rank adds to the sum if it has not used the parameter."""
        return torch.zeros(self.shard.shape, dtype=self.reduce_dtype, device=self.device)

    def _take_grad_of_leaf(self) -> Tensor | None:
        grad = take_grad(self.leaf)
        if self.group is not None:  # then ``leaf`` has that of a use before: of a layer called alone
            grad = _sum(take_grad(self._leaf_in_use), grad)
        grad = _sum(self._wide_local_grad, grad)
        self._wide_local_grad = None
        if grad is None:
            return None
        if isinstance(grad, DTensor):
            assert self.tp_spec is not None
            grad = compat.local_tensor(grad.redistribute(placements=self.tp_spec.placements))
        return as_dense(grad)

    def _with_unsynced(self, grad: Tensor | None) -> Tensor | None:
        unsynced = self.unsynced_grad
        self.unsynced_grad = None
        if unsynced is None:
            return grad
        if grad is None:
            return unsynced
        return unsynced.add_(grad)  # rounded once, after the addition

    def reset_grads(self) -> None:
        super().reset_grads()
        self.leaf.grad = self.unsynced_grad = self._wide_local_grad = None


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """None where there is nothing to add."""
    if first is None:
        return second
    if second is None:
        return first
    return first + second
