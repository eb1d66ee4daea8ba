"""``gtp_shard`` checks everything on all ranks, then shards in place; ``GTPModule`` is what it adds to the class."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Placement

from ._comm.agreement import agree_on_all_ranks, device_of
from ._comm.debug import DebugFlags
from ._comm.gather_backends import refuse_unavailable
from ._modules.bad_arguments import in_rank_order, validate_call, validate_mesh, validate_module
from ._modules.binding import binding_of
from ._modules.decide import Decisions, decide
from ._modules.frames import as_forward
from ._modules.shard_module import shard_module
from ._params.managed_param import ManagedParam
from ._params.sharded_weight import ShardedWeight
from ._schedule.runtime import Runtime
from .policy import SchedulePolicy

logger = logging.getLogger(__name__)


def gtp_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    shard_placement_fn: Callable[[nn.Parameter], Placement | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    schedule: SchedulePolicy = SchedulePolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module:
    """Shard every weight of ``module`` over ``mesh``, in place; each is gathered just in time for its use.

    One call on the root is enough. Each weight with two or more dims becomes a DTensor parameter with a
    :class:`GTPShard` placement on dim 0 and is all-gathered for each use in forward and backward, ahead of time and
    behind compute, then freed; its gradient is averaged and reduce-scattered behind compute. Parameters with one dim
    and tiny ones stay whole (``Replicate()``); their gradients are averaged in one coalesced call per backward. Ranks
    of the mesh see different data. A submodule that was passed to ``gtp_shard`` before keeps its own mesh and policies.

    While a forward or backward of the module runs, ``submodule.weight`` reads as the full weight; else it is the
    sharded DTensor, with which optimizers, ``clip_grad_norm_`` and ``torch.distributed.checkpoint`` work.
    Create the optimizer after this call.

    Each use of a weight is a collective: all ranks of the mesh must run the same modules in the same order. A module
    that a rank has no data for, such as an expert that no token was sent to, runs on an empty input there.

    Args:
        module: Any module, on CPU, on the mesh's device or on the meta device. Parameters may be plain tensors, equal
            on all ranks, or DTensors of a mesh with the same root as ``mesh`` (tensor parallelism); such a weight is
            cut again, and modules see its tp-local DTensor.
        mesh: 1-D (gtp), or 2-D (replicate, gtp): sharded over the last axis, replicated over the first.
        reshard_after_forward: Free a weight after its forward and gather it again in backward. False keeps it from
            forward to backward, which saves a gather and costs its full size in memory.
        shard_placement_fn: Called once for each parameter; returns a :class:`GTPShard` (or torch's ``Shard``) to shard
            it so, a ``Replicate`` to keep it whole, or None for the default.
        mp_policy: torch's own policy with the meaning it has in ``fully_shard``: ``param_dtype`` is the dtype of the
            gather and of compute, ``reduce_dtype`` that of gradient reduction; inputs and outputs of ``module`` are
            cast. Without a ``reduce_dtype`` gradients are reduced in ``param_dtype`` (``fully_shard`` of torch 2.15:
            in the parameter's own).
        schedule: Prefetching. The policy of the outermost call counts.
        ignored_params: Parameters left as they are; nobody reduces their gradients.

    Returns:
        ``module``, whose class is now a subclass of its own and of :class:`GTPModule`.

    Raises:
        TypeError, ValueError: An argument is of the wrong kind or out of range.
        NotImplementedError: A combination that is not supported.
        RuntimeError: Another rank failed, or the ranks do not agree about the model. Any of these is raised on all
            ranks of the mesh, after one exchange of a few bytes, and leaves ``module`` as it was. (Only a rank whose
            ``mesh`` is no mesh of its own has nobody to tell.)

    The design follows ``torch.distributed.fsdp.fully_shard``.
    """
    validate_mesh(mesh)
    mesh = in_rank_order(mesh)

    def check() -> tuple[Decisions, DebugFlags]:
        validate_call(module, reshard_after_forward, shard_placement_fn, mp_policy, schedule, ignored_params)
        ignored = ignored_params or set()
        validate_module(module, mesh, ignored)
        refuse_unavailable(schedule, mesh.device_type)
        return decide(module, mesh, shard_placement_fn, schedule, mp_policy, ignored), DebugFlags.from_env()

    def describe(checked: tuple[Decisions, DebugFlags]) -> list[str]:
        policies = [f"{mp_policy}", f"{schedule}", f"reshard_after_forward={reshard_after_forward}"]
        # A rank that compares the order of collectives alone would wait for the others.
        policies.append(f"DTENSOR_GTP_DEBUG with order={checked[1].order}")
        return policies + [decision.describe() for decision in checked[0].params]

    decisions, debug = agree_on_all_ranks(mesh, check, describe)
    with torch.inference_mode(False):  # else the shards could never be trained
        runtime = Runtime(device_of(mesh), schedule, debug)
        shard_module(module, mesh, decisions, mp_policy, runtime, reshard_after_forward, GTPModule)
    num_sharded, num_whole = len(runtime.weights), len(runtime.whole)
    text = "gtp_shard: %s over mesh axes %s: %d parameters sharded, %d whole; sharding_report lists them"
    logger.info(text, type(module).__name__, mesh.mesh_dim_names, num_sharded, num_whole)
    return module


def register_gtp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of ``module`` count as its forward, as a generation's or an encoder's that users call.

    A call of it is then one pass with a plan of its own, its inputs and outputs are cast as ``mp_policy`` says if
    ``module`` was passed to :func:`gtp_shard`, and in it ``self.weight`` reads as the full weight. Without this, each
    submodule that the method calls is a pass by itself, which computes the same with less of it hidden, and parameters
    of ``module`` itself are the sharded DTensors there. Hooks of the module's forward are not run.

    A module without sharded parameters is left as it is, so that code may call this in any case. All ranks register the
    same methods.

    Args:
        module: One that :func:`gtp_shard` was called on, or any below.
        method_name: Of a bound method; an attribute of this one module takes its place.

    Raises:
        ValueError: ``module`` has no such method.

    The counterpart of ``torch.distributed.fsdp.register_fsdp_forward_method``.
    """
    if binding_of(module) is None:
        return
    stock = getattr(module, method_name, None)
    if not callable(stock) or isinstance(stock, nn.Module):
        raise ValueError(
            f"register_gtp_forward_method expects the name of a method of {type(module).__name__}, but got "
            f"'{method_name}'."
        )
    setattr(module, method_name, as_forward(stock, method_name).__get__(module, type(module)))


class UnshardHandle:
    """Handle of an asynchronous :meth:`GTPModule.unshard`."""

    def __init__(self, runtime: Runtime, weights: list[ShardedWeight]) -> None:
        self._runtime = runtime
        self._weights = weights

    def wait(self) -> None:
        """Make the current stream wait for the gathers. Waiting twice is harmless."""
        for weight in self._weights:
            self._runtime.wait_kept(weight)


class GTPModule:
    """What ``gtp_shard`` adds to the class of the module that it was given.

    The methods are those of torch's ``FSDPModule`` of the same names, with the same meaning.
    """

    def _params(self, recurse: bool = True) -> Iterable[ManagedParam]:
        module = cast(nn.Module, self)
        seen: dict[int, ManagedParam] = {}
        root = binding_of(module)
        for submodule in module.modules():
            binding = binding_of(submodule)
            if binding is not None and (recurse or (root is not None and binding.group is root.group)):
                seen.update((id(param), param) for param in binding.params.values())
        return seen.values()

    def _weights(self) -> list[ShardedWeight]:
        return [param for param in self._params() if isinstance(param, ShardedWeight)]

    def _runtime(self) -> Runtime:
        binding = binding_of(cast(nn.Module, self))
        assert binding is not None
        return binding.group.runtime

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather all weights below this module and keep them gathered until :meth:`reshard`.

        Until then ``submodule.weight`` reads as the full weight outside of a forward, too, and a parameter that is not
        sharded (``submodule.bias``) as a plain tensor.

        Args:
            async_op: Do not wait; returns a handle to wait on.
        """
        runtime, weights = self._runtime(), self._weights()
        for param in self._params():
            param.is_pinned = True
        for weight in weights:
            runtime.gather_kept(weight)
        handle = UnshardHandle(runtime, weights)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered weights below this module."""
        for param in self._params():
            param.is_pinned = False
        for weight in self._weights():
            self._runtime().drop_kept(weight)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. False accumulates full gradients locally, in ``reduce_dtype``, until a
        backward with True; it saves communication and costs a full gradient of memory for each weight."""
        for param in self._params(recurse):
            param.flags.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces over the replicate axis of a 2-D mesh. False accumulates what was
        reduce-scattered over gtp until a backward with True."""
        for param in self._params(recurse):
            param.flags.requires_all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether weights are freed after their forward, as the argument of :func:`gtp_shard`."""
        for param in self._params(recurse):
            param.flags.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether weights are freed after their backward. False keeps them for the next microbatch."""
        for param in self._params(recurse):
            param.flags.reshard_after_backward = reshard_after_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks of the mesh.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor expects a positive factor, but got {factor}.")
        for param in self._params():
            param.flags.gradient_divide_factor = float(factor)

    def reset_exchanges(self) -> None:
        """Forget how many tokens exchanges of activations carry (see ``SchedulePolicy.embedding``): ranks compare
        theirs again in the next use. All ranks of the mesh call it, where all will have fewer tokens from now on."""
        for weight in self._weights():
            weight.lookups = weight.losses = None

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last one before ``.grad`` is read. False leaves gradients in flight, which
        ``capture_step`` refuses to record or replay beside."""
        self._runtime().is_last_backward = is_last_backward
