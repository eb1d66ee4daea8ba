"""One managed parameter: who holds it, and when it is replaced.

``ShardedWeight`` lives on every rank as a shard and is gathered for each use. ``WholeParam`` is
small and stays whole; only its gradient is reduced. Both know the modules that hold the parameter
(several, if it is tied). If the user or another library registers another parameter object there,
``follow`` takes it over or raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement

from .. import _torch_compat as compat
from .._comm.collectives import Groups
from .._howto import see
from ..placement import GTPShard
from .gradient import ReducedGradient, as_dtensor


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
    all_reduce_hook: Callable[[Tensor], None] | None = None
    reduce_scatter_unused_params: bool = False  # each rank may use it or leave it out

    @property
    def sends_at_once(self) -> bool:
        """Whether backward reduces each gradient as it comes. Otherwise full ones are summed on
        this rank."""
        return self.requires_gradient_sync and not self.reduce_scatter_unused_params


class Policies(NamedTuple):
    """What a ``gtp_shard`` call says of dtypes and of where shards live."""

    mp: MixedPrecisionPolicy
    offload: CPUOffloadPolicy | None  # set: on the host
    device: torch.device  # where weights are computed with


class Registration:
    """Where a parameter is registered, and what may take its place."""

    # With that of the shard: no optimizer and no load changes them.
    extent: tuple[torch.Size, torch.dtype, torch.Size]

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sites  # all places where the parameter is registered
        # An outer fully_shard cuts the parameter again. It registers our parameter only while it
        # has gathered it.
        self.is_cut_again = False
        self.num_outer_ranks = 1  # over which that one averages
        # What ``param.data`` has given: torch's, with a count of writes that autograd does not look at.
        self.data: DTensor | None = None
        # The parameter that gtp_shard replaced by ours.
        self.replaced: weakref.ref[nn.Parameter] | None = None
        # Called after another object was taken over.
        self.on_replaced: Callable[[], None] | None = None

    @property
    def current(self) -> Tensor | None:
        """What is registered at the first site now."""
        module, name = self.sites[0]
        return module._parameters.get(name)

    def register(self, param: nn.Parameter) -> None:
        """Register ``param`` at all sites."""
        for module, name in self.sites:
            module._parameters[name] = param


def counted(data: DTensor) -> list[Tensor]:
    """What counts writes to ``Registration.data``: ops of DTensor count in it, others in its local tensor."""
    return [data, compat.local_tensor(data)]


class ManagedParam:
    """What ``ShardedWeight`` and ``WholeParam`` share."""

    leaf: Tensor  # stands for the parameter in autograd's graph
    groups: Groups  # set before the first forward, when the communicators exist

    def __init__(self, fqn: str, sites: list[Site], param: nn.Parameter, mesh: DeviceMesh, policies: Policies) -> None:
        self.fqn = fqn  # the first one, if the parameter is tied
        self.registration = Registration(sites)
        self.mesh = mesh  # 1-D (gtp) or 2-D (replicate, gtp)
        self.flags = SyncFlags()
        self.policies = policies
        self.gradient = ReducedGradient(policies.offload)
        self._set_param(param)
        # The ``WeightGroup`` that gathers and reduces it, if one does, see [Note: groups].
        self.group: Any = None
        # After ``unshard`` modules see the full parameter outside of forwards, too.
        self.is_pinned = False

    def _set_param(self, param: nn.Parameter) -> None:
        self.param = param
        self.local = self._pinned(as_dtensor(param))
        self.shard = self.local  # unless the replicas split it, see ``ReplicaPart``
        self.gradient.follow(param)
        self.registration.data = None  # of another shard
        self.registration.extent = param.shape, param.dtype, self.local.shape
        policy = self.policies.mp
        if not param.is_floating_point():
            policy = MixedPrecisionPolicy()  # integers, booleans and complex numbers keep their dtype
        self.compute_dtype: torch.dtype = policy.param_dtype or param.dtype
        # As in fully_shard: without a reduce_dtype, gradients are reduced in the dtype in which
        # they are computed.
        self.reduce_dtype: torch.dtype = policy.reduce_dtype or self.compute_dtype

    def counted_data(self) -> Tensor | None:
        """``param.data`` in a form that counts writes to it, whenever they come. None of what
        ``param.data = ...`` has put here: a forward takes it over as something new."""
        if compat.local_part(self.param) is not self.local:
            return None
        registration = self.registration
        with torch.inference_mode(False):  # an inference tensor counts nothing
            if registration.data is None:
                registration.data = compat.wrap_local(self.local.data, self.spec)
                if self.group is not None:
                    self.group.shards.data += counted(registration.data)
            data = as_dtensor(registration.data.detach())  # shares the count
            compat.share_version(data, compat.local_tensor(registration.data))  # ``data.to_local()`` counts, too
            return data

    @property
    def num_data_writes(self) -> int:
        """Writes through ``param.data``."""
        data = self.registration.data
        if data is None:
            return 0
        return sum(tensor._version for tensor in counted(data))

    def _pinned(self, param: DTensor) -> Tensor:
        """The local tensor of ``param``, moved into pinned memory if copies to a GPU are to overlap
        with compute."""
        local = compat.local_tensor(param)
        _, offload, device = self.policies
        if device.type == "cpu" or offload is None or not offload.pin_memory:
            return local
        if local.device.type == "cpu" and not local.is_pinned():
            local = local.pin_memory()
            compat.set_local(param, local, compat.dtensor_spec(param))  # in place: modules hold the object
        return local

    @property
    def num_ranks(self) -> int:
        """The gradient is averaged over them."""
        return self.mesh.size()

    @property
    def device(self) -> torch.device:
        """Where the parameter is gathered and computed with."""
        if self.policies.offload is None:
            return self.shard.device
        return self.policies.device

    @property
    def gtp_axis(self) -> int:
        """The axis of the parameter's mesh along which it is gathered; the last one, or before that
        of the replicas."""
        axes = self.spec.mesh.mesh_dim_names
        names = self.mesh.mesh_dim_names
        if axes is None or names is None:
            return self.spec.mesh.ndim - 1
        return axes.index(names[-1])

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements of the parameter. Torch may report an equal placement of its own (2.15:
        ``Shard``)."""
        return self.spec.placements

    def follow(self, site: Site) -> None:
        """Take over the parameter object that is registered at ``site``, or raise a RuntimeError if
        its layout differs.

        ``to_empty``, ``to(dtype)``, ``load_state_dict(assign=True)`` and an outer ``fully_shard``
        replace the object.
        """
        current = site.module._parameters.get(site.name)  # ``get``: an item may be the full weight
        # ``param.data = ...`` keeps the object, but gives it another local tensor.
        if current is self.param and self.local is compat.local_tensor(current):  # type: ignore[arg-type]
            if self.leaf.requires_grad is not self.param.requires_grad:
                self.follow_frozen()
            return
        if isinstance(current, DTensor) and self._is_cut_by_fully_shard(current):
            if not self.registration.is_cut_again:
                raise NotImplementedError(
                    f"Parameter '{self.fqn}' was sharded again by the fully_shard of torch "
                    f"{torch.__version__}, which this package does not know. Use a torch release "
                    "that it was tested with, or shard the parameter over one mesh: pass a "
                    "(replicate, gtp) mesh to gtp_shard."
                )
            return  # nothing to take over until fully_shard has gathered it
        # functional_call registers a tensor that is no parameter. Such a tensor would never get its
        # gradient.
        if not isinstance(current, nn.Parameter) or not isinstance(current, DTensor):
            raise self._replaced_by(current)
        if not self._same_layout(current):
            raise self._replaced_by(current)
        # An outer fully_shard registers the same values again: graphs stay valid.
        if not self.registration.is_cut_again:
            if current is not self.param and self.has_unsynced:
                raise self._replaced_unsynced()
            self.refuse_graphs()
        self._set_param(current)
        if self.registration.on_replaced is not None:
            self.registration.on_replaced()
        if not self.registration.is_cut_again:
            self.registration.register(current)  # at all sites; fully_shard does this itself
        with torch.inference_mode(False):  # later training uses what is made here
            self._rebound()

    @property
    def leaves(self) -> list[Tensor]:
        """What stands for the parameter in graphs of its uses."""
        return [self.leaf]

    @property
    def has_unsynced(self) -> bool:
        """Whether gradients of earlier microbatches are not in ``.grad`` yet."""
        return self.gradient.reduced is not None

    def _replaced_unsynced(self) -> RuntimeError:
        return RuntimeError(
            f"Parameter '{self.fqn}' of shape {tuple(self.param.shape)} was replaced while gradients of earlier "
            f"microbatches are not in its .grad yet (rank {dist.get_rank()}): the next parameter would get them. "
            "Replace parameters after the backward of the last microbatch, or drop these gradients with "
            "reset_iter_state()."
        )

    def refuse_graphs(self) -> None:
        """Other data, or another parameter, take the place of this one. The backward of a graph
        that was made with it would gather the new one, and give it the gradient of the old one."""
        text = self.replaced_before_backward()

        def refuse(_: object) -> None:
            raise RuntimeError(text)

        # The hook lives with the node, so with the graphs that have it. ``_rebound`` makes leaves for new graphs.
        for leaf in self.leaves:
            if leaf.requires_grad:
                compat.accumulate_node(leaf).register_prehook(refuse)
            else:
                torch.autograd.graph.increment_version(leaf)  # it has no node: autograd compares its version

    def replaced_before_backward(self) -> str:
        """What an error says."""
        return (
            f"Parameter '{self.fqn}' of shape {tuple(self.param.shape)} was replaced between a "
            f"forward and its backward (rank {dist.get_rank()}), by load_state_dict(assign=True), "
            "param.data = ..., a cast of the module or functional_call with other parameters. Run "
            "each backward before you replace parameters."
        )

    def follow_assigned(self, site: Site, before: nn.Parameter | None) -> None:
        """Take over what ``load_state_dict(assign=True)`` registered. If its placements are not
        those of ``before``, register ``before`` again and raise a RuntimeError."""
        current = dict(site.module._parameters.items()).get(site.name)  # the shard, also after ``unshard``
        if current is before and (current is not self.param or compat.local_part(current) is self.local):
            return  # nothing was assigned
        try:
            if isinstance(before, DTensor) and isinstance(current, DTensor):
                spec = compat.dtensor_spec(current)
                expected = compat.dtensor_spec(before)
                if (spec.mesh, spec.placements) != (expected.mesh, expected.placements):
                    raise self._replaced_by(current)
            self.follow(site)
        except RuntimeError:
            site.module._parameters[site.name] = before  # the module stays as it was
            raise

    @property
    def _expected(self) -> str:
        """What error messages say that ``gtp_shard`` expects."""
        shape = tuple(self.registration.extent[0])
        return (
            f"gtp_shard expects a parameter of shape {shape} with placements "
            f"{tuple(self.placements)} on mesh axes {self.spec.mesh.mesh_dim_names} (rank "
            f"{dist.get_rank()})"
        )

    def _replaced_by(self, current: object) -> RuntimeError:
        found = f"a {type(current).__name__}"
        if current is None:
            found = "None"
        if isinstance(current, Tensor):
            found += f" of shape {tuple(current.shape)}"
        if isinstance(current, DTensor):
            found += f" with placements {current.placements}"
        return RuntimeError(
            f"Parameter '{self.fqn}' was replaced after gtp_shard by {found}, but "
            f"{self._expected}. Load values with load_state_dict or copy_ into the DTensor, change "
            "the module before gtp_shard, and call it without functional_call."
        )

    @property
    def spec(self) -> compat.DTensorSpec:
        return compat.dtensor_spec(as_dtensor(self.param))

    def _same_layout(self, other: DTensor) -> bool:
        if other.shape != self.param.shape or compat.local_tensor(other).shape != self.local.shape:
            return False
        spec = compat.dtensor_spec(other)
        mine = self.spec
        return spec.mesh == mine.mesh and spec.placements == mine.placements

    def _is_cut_by_fully_shard(self, other: DTensor) -> bool:
        """Whether ``other`` is this parameter as an outer ``fully_shard`` keeps it between its
        gathers."""
        spec = compat.dtensor_spec(other)
        mine = self.spec
        if spec.mesh.ndim <= mine.mesh.ndim or other.shape != self.param.shape:
            return False
        inner = slice(-mine.mesh.ndim, None)  # the axes of fully_shard come first
        has_our_axes = (spec.mesh.mesh_dim_names or ())[inner] == mine.mesh.mesh_dim_names
        return has_our_axes and all(map(_cuts_alike, spec.placements[inner], mine.placements))

    @property
    def is_readable(self) -> bool:
        """Whether the shard is in memory: an outer ``fully_shard`` registers it only while it has
        gathered it."""
        return self.registration.current is self.param

    def check_readable(self) -> None:
        """Raise a RuntimeError if an outer ``fully_shard`` has not gathered the shard."""
        if self.registration.is_cut_again and not self.is_readable:
            raise RuntimeError(
                f"Parameter '{self.fqn}' of shape {tuple(self.param.shape)} is used outside of the "
                "forward or backward of the fully_shard module that manages it, so its gtp shard "
                "is not gathered over the outer axes. Call fully_shard on a module whose forward "
                "contains all uses of it."
            )

    def _rebound(self) -> None:
        """Make what depends on the parameter object, after ``follow`` has taken over another one."""

    def mark_undifferentiable(self) -> None:
        """After a backward with ``create_graph=True``, whose graph ends where gradients are reduced."""
        grad = self.param.grad
        if grad is not None and not grad.requires_grad:
            self.param.grad = compat.undifferentiable(grad)

    def begin_forward(self, is_captured: bool) -> None:
        """Follow what the user has changed since the last pass, or raise a RuntimeError if that is
        not possible."""
        sites = self.registration.sites
        others: list[nn.Module] = []  # that have another parameter by now
        for module, name in sites:
            if name not in module._parameters:
                raise RuntimeError(
                    f"Parameter '{self.fqn}' was removed from its module, but {self._expected}: "
                    "weight_norm, a parametrization or pruning after gtp_shard put other "
                    "parameters in its place, which gtp_shard does not shard. Change the module "
                    "before gtp_shard."
                )
            if dict.get(module._parameters, name) is not self.param:  # an item may be the full weight
                others.append(module)
        # If all have, as after ``to_empty``, the one that is used first becomes that of all.
        if 0 < len(others) < len(sites) and not self.registration.is_cut_again:
            raise RuntimeError(
                f"Parameter '{self.fqn}' of shape {tuple(self.param.shape)} is tied, but one of its modules, a "
                f"{type(others[0]).__name__}, got another parameter after gtp_shard (rank {dist.get_rank()}). Untie "
                "parameters before gtp_shard, or replace all of them."
            )
        self.check_memory()
        param = self.param
        if self.gradient.wide is not None:
            self.gradient.forget_if_cleared()  # ``zero_grad`` leaves no other trace
        if self.leaf.requires_grad is not param.requires_grad:
            self.follow_frozen()

    def check_memory(self) -> None:
        """Raise a RuntimeError if the parameter or its shard has another size or dtype than before,
        or no memory."""
        param = self.param
        shard = self.local
        extent = self.registration.extent
        is_same = (param.shape, param.dtype, shard.shape) == extent
        # A tensor subclass may have no memory of its own.
        has_memory = type(shard) is not Tensor or shard.data_ptr() != 0 or shard.numel() == 0
        is_on_host = self.policies.offload is None or shard.device.type in ("cpu", "meta")
        if is_same and has_memory and is_on_host:
            return
        # An outer fully_shard frees the shard that it has gathered. Another shard is taken over at
        # its next use.
        if self.registration.is_cut_again or shard is not compat.local_tensor(param):  # type: ignore[arg-type]
            return
        if not is_on_host:
            raise RuntimeError(
                f"gtp_shard expects parameter '{self.fqn}' of shape {tuple(param.shape)} on the "
                f"host, as offload_policy says, but it is on {shard.device} (rank "
                f"{dist.get_rank()}). Move it back with module.to('cpu'). {see('offload')}"
            )
        _, dtype, local_shape = extent
        found = "its shard has no memory"
        if has_memory:
            found = f"it is of shape {tuple(param.shape)} and {param.dtype}, its shard of shape {tuple(shard.shape)}"
        raise RuntimeError(
            f"Parameter '{self.fqn}' was resized or cast in place after gtp_shard: "
            f"{found}, but {self._expected}, a shard of shape {tuple(local_shape)} and {dtype}. "
            "Load values with load_state_dict or copy_ into the DTensor, cast the module with "
            "module.to(dtype), and change shapes before gtp_shard."
        )

    def begin_backward(self) -> None:
        """A forward in between may have followed a freeze that the user has taken back."""
        if self.leaf.requires_grad is not self.param.requires_grad:
            self.follow_frozen()

    def follow_frozen(self) -> None:
        """Called after the user has frozen or unfrozen the parameter."""
        self.leaf.requires_grad_(self.param.requires_grad)

    def reset_grads(self) -> None:
        """Forget gradients of a backward that raised."""
        self.gradient.reset()


def _cuts_alike(outer: Placement, mine: Placement) -> bool:
    """Whether two placements are equal, or differ only in a block size: fully_shard drops one that
    has no effect."""
    return outer == mine or (isinstance(mine, GTPShard) and outer == GTPShard(mine.dim))
