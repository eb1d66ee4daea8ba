"""One managed parameter: what is gathered of it, and what is reduced of its gradient.

``ShardedWeight`` lives on every rank as a shard and is gathered for each use. ``WholeParam`` (``whole.py``) is small
and stays whole; only its gradient is reduced. Both know the modules that own the parameter (several, if it is tied) and
follow the parameter object that is registered there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement

from .. import _torch_compat as compat
from .._comm.collectives import Groups
from . import refusals
from .refusals import Expected, Extent

# Cached, because it is asked for each gradient, and torch makes an op of the question.
wider = functools.cache(torch.promote_types)


class Site(NamedTuple):
    """A place where a parameter is registered."""

    module: nn.Module
    name: str


@dataclass
class SyncFlags:
    """Runtime switches of one parameter, as ``FSDPModule`` has them."""

    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    gradient_divide_factor: float | None = None


class ManagedParam:
    """What both kinds share: the registered parameter, its sites, and how a reduced gradient becomes ``.grad``.

    Args:
        fqn: Fully qualified name, the first one if the parameter is tied.
        sites: Every module and attribute name under which the parameter is registered.
        param: The sharded ``nn.Parameter`` (a DTensor).
        mesh: The 1-D (gtp) or 2-D (replicate, gtp) mesh.
        mp_policy: Mixed precision of this parameter.
    """

    def __init__(
        self, fqn: str, sites: list[Site], param: nn.Parameter, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy
    ) -> None:
        self.fqn = fqn
        self.sites = sites
        self.mesh = mesh
        self.num_ranks = mesh.size()  # over which the gradient is averaged
        self.flags = SyncFlags()
        self.groups: Groups  # set before the first forward, when the communicators exist
        self.param = param
        self.replaced: weakref.ref[nn.Parameter] | None = None
        self.on_replaced: Callable[[], None] | None = None  # by another parameter object
        self.shard = compat.local_tensor(_as_dtensor(param))
        self._extent = Extent.of(param, self.shard)
        # What stands for the parameter in autograd's graph.
        self.leaf: Tensor
        self.is_pinned = False  # by ``unshard``: modules see the full parameter outside of forwards, too
        # An outer fully_shard manages the parameter: what is registered is ours only while it is gathered.
        self.is_cut_again = False
        self._mp_policy = mp_policy
        self._set_dtypes()
        # The reduced gradient of the backward that runs, rows of this rank.
        self.reduced: Tensor | None = None
        # Sum over microbatches where .grad has a narrower dtype than the sum; else .grad itself is the sum.
        self._wide_grad: Tensor | None = None

    def _set_dtypes(self) -> None:
        policy = self._mp_policy if self.param.is_floating_point() else MixedPrecisionPolicy()
        self.compute_dtype: torch.dtype = policy.param_dtype or self.param.dtype
        # As in fully_shard: without a reduce_dtype, gradients are reduced in the dtype in which they are computed.
        self.reduce_dtype: torch.dtype = policy.reduce_dtype or self.compute_dtype

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements of the parameter. Torch may report an equal one of its own (2.15: ``Shard``) for ours."""
        return self.spec.placements

    def follow(self, site: Site) -> None:
        """Take over the parameter object that is registered at ``site``, if it is still the same kind of shard.

        ``to_empty``, ``to(dtype)``, ``load_state_dict(assign=True)`` and an outer ``fully_shard`` replace the object.

        Raises:
            RuntimeError: The object there is not a parameter with a shard as ``gtp_shard`` made it.
        """
        current = site.module._parameters.get(site.name)
        if current is self.param and self.shard is compat.local_tensor(current):  # type: ignore[arg-type]
            if self.leaf.requires_grad is not self.param.requires_grad:
                self._follow_frozen()
            return
        if isinstance(current, DTensor) and self._is_cut_by_fully_shard(current):
            if not self.is_cut_again:
                raise NotImplementedError(
                    f"Parameter '{self.fqn}' was cut again by the fully_shard of torch {torch.__version__}, which is "
                    "unknown to this package. Use a torch release that it was tested with, or shard the parameter over "
                    "one mesh: pass a (replicate, gtp) mesh to gtp_shard."
                )
            return
        # A tensor that is no parameter, as functional_call puts there, would never see its gradient.
        if not isinstance(current, nn.Parameter) or not isinstance(current, DTensor) or not self._same_layout(current):
            raise refusals.replaced(self._expected, current)
        if current.dtype != self.param.dtype:
            self._wide_grad = None
        self.param = current
        self.shard = compat.local_tensor(current)
        self._extent = Extent.of(current, self.shard)
        if self.on_replaced is not None:
            self.on_replaced()
        if not self.is_cut_again:
            for other in self.sites:
                other.module._parameters[other.name] = current
        self._set_dtypes()
        with torch.inference_mode(False):  # what is made here is for later training, too
            self._rebound()

    def follow_assigned(self, site: Site, before: nn.Parameter | None) -> None:
        """Take over what ``load_state_dict(assign=True)`` has put in the place of ``before``, or put that back.

        Raises:
            RuntimeError: It is not placed as ``before`` is.
        """
        current = site.module._parameters.get(site.name)
        try:
            if isinstance(before, DTensor) and isinstance(current, DTensor):
                spec, expected = compat.dtensor_spec(current), compat.dtensor_spec(before)
                if (spec.mesh, spec.placements) != (expected.mesh, expected.placements):
                    raise refusals.replaced(self._expected, current)
            self.follow(site)
        except RuntimeError:
            site.module._parameters[site.name] = before
            raise

    @property
    def _expected(self) -> Expected:
        return Expected(self.fqn, self._extent.shape, self.placements, self.spec.mesh)

    @property
    def spec(self) -> compat.DTensorSpec:
        return compat.dtensor_spec(_as_dtensor(self.param))

    def _same_layout(self, other: DTensor) -> bool:
        spec, mine = compat.dtensor_spec(other), self.spec
        return (
            other.shape == self.param.shape
            and spec.mesh == mine.mesh
            and spec.placements == mine.placements
            and compat.local_tensor(other).shape == self.shard.shape
        )

    def _is_cut_by_fully_shard(self, other: DTensor) -> bool:
        """Whether ``other`` is this parameter as an outer ``fully_shard`` keeps it between its gathers."""
        spec, mine = compat.dtensor_spec(other), self.spec
        num_axes, names = mine.mesh.ndim, spec.mesh.mesh_dim_names or ()
        return (
            spec.mesh.ndim > num_axes
            and other.shape == self.param.shape
            and all(map(refusals.cuts_alike, spec.placements[-num_axes:], mine.placements))
            and names[-num_axes:] == mine.mesh.mesh_dim_names
        )

    @property
    def is_readable(self) -> bool:
        """Whether the shard is there: an outer ``fully_shard`` registers it only while it has gathered it."""
        site = self.sites[0]
        return site.module._parameters.get(site.name) is self.param

    def check_readable(self) -> None:
        """Raises:
        RuntimeError: The parameter is used while an outer ``fully_shard`` has not gathered it.
        """
        if self.is_cut_again and not self.is_readable:
            raise RuntimeError(
                f"Parameter '{self.fqn}' of shape {tuple(self.param.shape)} is used outside of the forward or backward "
                "of the fully_shard module that manages it, so its gtp shard is not gathered over the outer axes. Call "
                "fully_shard on a module whose forward contains all uses of it."
            )

    def _rebound(self) -> None:
        """Called after another parameter object has been taken over."""

    def accumulate(self, reduced: Tensor) -> None:
        """Add a reduced gradient (shape of the shard) to those of this backward, on the current stream."""
        # In the wider of the two dtypes.
        reduced = reduced.to(wider(reduced.dtype, self.param.dtype))
        if self.reduced is None:
            self.reduced = reduced
        else:
            self.reduced += reduced

    def publish_grad(self) -> None:
        """Move the reduced gradient into ``param.grad``, on the compute stream, and run the user's hooks."""
        reduced, self.reduced = self.reduced, None
        param = self.param
        if reduced is None or not param.requires_grad:  # frozen since its forward, as autograd looks at leaves
            return
        spec = compat.dtensor_spec(_as_dtensor(param))
        if hooks := compat.tensor_hooks(param):
            reduced = _run_tensor_hooks(hooks, param, reduced, spec)
        grad, dtype = param.grad, compat.grad_dtype(param)
        earlier, self._wide_grad = self._wide_grad, None
        if grad is None:
            param.grad = compat.wrap_local(reduced if reduced.dtype == dtype else reduced.to(dtype), spec)
        else:
            local = compat.local_tensor(_as_dtensor(grad))
            total = local.to(reduced.dtype)  # .grad itself if it is as wide
            if earlier is not None:
                # Go on from the sum where .grad still is the rounded sum. Elsewhere the user has changed it (clipping,
                # zeroing), which need not show in its version: what is there counts.
                total = torch.where(earlier.to(dtype) == local, earlier, total)
            total += reduced
            if total is not local:
                local.copy_(total)
            reduced = total
        if reduced.dtype != dtype:
            self._wide_grad = reduced
        for post_hook in compat.post_accumulate_grad_hooks(param):
            post_hook(param)

    def begin_forward(self, is_captured: bool) -> None:
        """What may have changed since the last pass: a sum over microbatches that the user has dropped with ``.grad``,
        whether the parameter is frozen, and (a RuntimeError) whether it is still registered and of its size.

        Args:
            is_captured: A CUDA graph records this forward.
        """
        for module, name in self.sites:
            if name not in module._parameters:
                raise refusals.removed(self._expected)
        self.check_memory()
        if self._wide_grad is not None and self.param.grad is None:
            self._wide_grad = None
        if self.leaf.requires_grad is not self.param.requires_grad:
            self._follow_frozen()

    def check_memory(self) -> None:
        """Raises:
        RuntimeError: The shard is of another size than it was, or has no memory.
        """
        # An outer fully_shard frees what it has gathered; another shard is followed when it is used.
        is_same = not self.is_cut_again and self.shard is compat.local_tensor(self.param)  # type: ignore[arg-type]
        if is_same and not self._extent.is_kept_by(self.param, self.shard):
            raise refusals.resized(self._expected, self.param, self.shard, self._extent)

    def _follow_frozen(self) -> None:
        """The user has frozen the parameter, or the opposite."""
        self.leaf.requires_grad_(self.param.requires_grad)

    def reset_grads(self) -> None:
        """Forget gradients of a backward that broke off."""
        self.reduced = None


def _as_dtensor(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


def _run_tensor_hooks(
    hooks: list[Callable[[Tensor], Tensor | None]], param: Tensor, reduced: Tensor, spec: compat.DTensorSpec
) -> Tensor:
    """``Tensor.register_hook``: each gets the gradient of this backward and may return another one.

    Args:
        reduced: This rank's part of the gradient, perhaps in a wider dtype than the hooks see.
    """
    for hook in hooks:
        replaced = hook(compat.wrap_local(reduced.to(param.dtype), spec))
        if replaced is not None:
            assert isinstance(replaced, DTensor)
            reduced = compat.local_tensor(replaced).to(reduced.dtype, copy=True)
    return reduced
