"""``gtp_shard`` checks everything on all ranks, then shards in place; ``GTPModule`` is what it adds to the class."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from ._comm.agreement import agree_on_all_ranks, device_of
from ._comm.debug import DebugFlags
from ._comm.gather_backends import refuse_unavailable
from ._modules.bad_arguments import (
    Arguments,
    ShardPlacementFn,
    in_rank_order,
    validate_kinds,
    validate_mesh,
    validate_module,
)
from ._modules.binding import BoundModule, binding_of
from ._modules.decide import Decision, decide
from ._modules.frames import as_forward
from ._modules.from_fully_shard import RefusedMethods, refuse_arguments
from ._modules.shard_module import shard_module
from ._params.managed_param import ManagedParam, Site
from ._params.sharded_weight import ShardedWeight
from ._schedule.runtime import Runtime
from .policy import SchedulePolicy

logger = logging.getLogger(__name__)


@refuse_arguments
def gtp_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    schedule: SchedulePolicy = SchedulePolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (not changed)
) -> nn.Module:
    """Shard every weight of ``module`` over ``mesh``, in place, and gather each weight just in time for its use.

    One call on the root is enough. Each weight with two or more dims becomes a DTensor parameter with a
    :class:`GTPShard` placement on dim 0. It is all-gathered ahead of each use in forward and backward, while earlier
    layers compute, and freed after the use. Its gradient is averaged and reduce-scattered while backward goes on.
    Parameters with one dim and tiny ones stay whole (``Replicate()``); their gradients are averaged in one coalesced
    call per backward. Ranks of the mesh see different data. A submodule that was passed to ``gtp_shard`` before keeps
    its own mesh and policies.

    While a forward or backward of the module runs, ``submodule.weight`` reads as the full weight. Otherwise it is the
    sharded DTensor, with which optimizers, ``clip_grad_norm_`` and ``torch.distributed.checkpoint`` work. Create the
    optimizer after this call.

    Each use of a weight is a collective: all ranks of the mesh must run the same modules in the same order. A rank that
    has no data for a module, such as an expert that gets no token, runs it on an empty input.

    Args:
        module: Any module, on CPU, on the mesh's device or on the meta device. Parameters may be plain tensors, equal
            on all ranks, or DTensors of a mesh with the same root as ``mesh`` (tensor parallelism); such a weight is
            cut again, and modules see its tp-local DTensor.
        mesh: 1-D (gtp), or 2-D (replicate, gtp): sharded over the last axis, replicated over the first.
        reshard_after_forward: Free a weight after its forward and gather it again in backward. False keeps it from
            forward to backward, which saves a gather and costs its full size in memory.
        shard_placement_fn: Called once for each parameter. It returns a :class:`GTPShard` (or torch's ``Shard``) to
            shard the parameter so, a ``Replicate`` to keep it whole, or None for the default. A pair of one of these
            and a mesh puts the parameter on that mesh, and its gradient is averaged over that one's ranks; so does
            torch's ``ShardPlacementResult``. A module class chooses its own default by a method
            ``default_gtp_placement(name) -> Placement``.
        mp_policy: torch's own policy with the meaning it has in ``fully_shard``: ``param_dtype`` is the dtype of the
            gather and of compute, ``reduce_dtype`` that of gradient reduction; inputs and outputs of ``module`` are
            cast. Without a ``reduce_dtype`` gradients are reduced in ``param_dtype`` (``fully_shard`` of torch 2.15:
            in the parameter's own).
        schedule: What may be gathered, kept and reduced when. The default chooses all of it in the first forward. The
            policy of the outermost call counts.
        ignored_params: Parameters that are left as they are; their gradients are not reduced.
        offload_policy: torch's own. ``CPUOffloadPolicy(pin_memory=True)`` keeps shards, whole parameters and gradients
            on the host, and with them what the optimizer keeps, which steps there. Shards are copied to the device
            ahead of each gather, on a stream of their own; reduced gradients are copied back as they are complete.
            After each forward and backward the host waits for the copies. Gathers go through the process group, and
            embeddings are gathered. Start the process group with ``backend="cpu:gloo,cuda:nccl"``, because
            ``clip_grad_norm_``, ``GradScaler`` and ``full_tensor`` communicate on the host. From the meta device call
            ``to_empty(device="cpu")``. ``pin_memory=False`` costs the overlap. Refused with quantized weights, CUDA
            graphs, an outer ``fully_shard`` and unequal replicas.

    Returns:
        ``module``, whose class is now a subclass of its own and of :class:`GTPModule`.

    Raises:
        TypeError, ValueError: An argument is of the wrong kind or out of range.
        NotImplementedError: A combination that is not supported.
        RuntimeError: Another rank failed, or the ranks have different models. All errors are raised on all ranks of
            the mesh, after one exchange of a few bytes, and leave ``module`` as it was. (A rank whose ``mesh`` does not
            contain it cannot tell the others.)

    The design follows ``torch.distributed.fsdp.fully_shard``.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))
        >>> mesh = init_weight_mesh("cpu", gtp=4)
        >>> gtp_shard(model, mesh.weights)[0].weight.to_local().shape
        torch.Size([32, 64])
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> inputs = torch.randn(16, 64)  # each rank has its own
        >>> model(inputs).square().mean().backward()
        >>> norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
    """
    validate_mesh(mesh)
    ignored = set() if ignored_params is None else ignored_params
    ranks = in_rank_order(mesh)
    arguments = Arguments(
        ranks, reshard_after_forward, shard_placement_fn, mp_policy, schedule, ignored, offload_policy
    )

    def check() -> tuple[list[Decision], set[Site], DebugFlags]:
        validate_kinds(module, arguments)
        validate_module(module, arguments.mesh, ignored)
        refuse_unavailable(schedule, mesh.device_type)
        return *decide(module, arguments), DebugFlags.from_env()

    def describe(checked: tuple[list[Decision], set[Site], DebugFlags]) -> list[str]:
        policies = [
            f"{mp_policy}",
            f"{schedule}",
            f"reshard_after_forward={reshard_after_forward}",
            f"{offload_policy}",
        ]
        # If one rank alone compared something, it would wait for the others forever.
        policies.append(f"DTENSOR_GTP_DEBUG with order={checked[2].order}, finite={checked[2].finite}")
        return policies + [decision.describe() for decision in checked[0]]

    decisions, unmanaged, debug = agree_on_all_ranks(arguments.mesh, check, describe)
    with torch.inference_mode(False):  # in inference mode, the shards could never be trained
        runtime = Runtime(device_of(mesh), schedule, debug)
        shard_module(module, arguments, decisions, unmanaged, runtime, GTPModule)
    placed = "\n".join(f"{param.fqn}: {tuple(map(str, param.placements))}" for param in runtime.params)
    logger.info("gtp_shard: %s over mesh axes %s\n%s", type(module).__name__, mesh.mesh_dim_names, placed)
    return module


def register_gtp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of ``module`` count as its forward, such as an ``encode`` or ``generate`` that users call.

    A call of it is then one pass with a plan of its own, and ``self.weight`` reads as the full weight in it. Its inputs
    and outputs are cast as ``mp_policy`` says if ``module`` was passed to :func:`gtp_shard`. Without this, each
    submodule that the method calls is a pass by itself: the results are the same, but fewer gathers are hidden, and
    parameters of ``module`` itself read as sharded DTensors. Hooks of the module's forward are not run.

    A module without sharded parameters is left as it is, so code may call this in any case. All ranks register the same
    methods.

    Args:
        module: A module that :func:`gtp_shard` was called on, or one below it.
        method_name: Name of a bound method; an attribute of this one module takes its place.

    Raises:
        ValueError: ``module`` has no such method.

    The counterpart of ``torch.distributed.fsdp.register_fsdp_forward_method``.

    Example:
        >>> class Encoder(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.proj = nn.Linear(64, 64)
        ...     def encode(self, x):
        ...         return self.proj(x).relu()
        >>> model = gtp_shard(Encoder(), init_weight_mesh("cpu", gtp=4).weights)
        >>> register_gtp_forward_method(model, "encode")
        >>> model.encode(torch.randn(2, 64)).shape
        torch.Size([2, 64])
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
    """Handle of an asynchronous :meth:`GTPModule.unshard`.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> handle = model.unshard(async_op=True)
        >>> ...  # work that does not read the weights
        Ellipsis
        >>> handle.wait()
        >>> model.weight.shape
        torch.Size([64, 64])
        >>> model.reshard()
    """

    def __init__(self, runtime: Runtime, weights: list[ShardedWeight]) -> None:
        self._runtime = runtime
        self._weights = weights

    def wait(self) -> None:
        """Make the current stream wait for the gathers. Waiting twice is harmless."""
        for weight in self._weights:
            self._runtime.wait_kept(weight)


class GTPModule(RefusedMethods, BoundModule):
    """What ``gtp_shard`` adds to the class of the module that it was given.

    The methods are those of torch's ``FSDPModule`` of the same names, with the same meaning. Those that are missing
    raise NotImplementedError, and name what to use instead.

    ``state_dict()`` holds the shards, not copies. A ``dcp.load`` into them counts in the next forward, also where
    weights are kept gathered. ``load_state_dict`` takes such DTensors, or whole tensors, of which each rank takes its
    part without communication. With ``assign=True`` the tensors given become the parameters, and ties stay ties; a
    tensor that is placed in another way is refused. Create the optimizer after that, for it holds the old parameters.

    ``param.data = tensor`` takes a whole tensor, of which each rank copies its part, or an earlier ``param.data``.
    Inside of ``fully_shard`` it raises: write with ``copy_`` under ``torch.no_grad()``.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> isinstance(model, GTPModule) and isinstance(model, nn.Linear)
        True
        >>> for is_last in (False, True):  # two microbatches, one reduction
        ...     model.set_requires_gradient_sync(is_last)
        ...     model(torch.randn(2, 64)).sum().backward()
        >>> model.weight.grad.placements
        (GTPShard(dim=0),)
    """

    def _params(self, recurse: bool = True) -> list[ManagedParam]:
        group, bindings = self._gtp_binding.group, map(binding_of, self.modules())
        chosen = [binding for binding in bindings if binding is not None and (recurse or binding.group is group)]
        return list(dict.fromkeys(param for binding in chosen for param in binding.params.values()))

    def _weights(self) -> list[ShardedWeight]:
        return [param for param in self._params() if isinstance(param, ShardedWeight)]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather all weights below this module and keep them gathered until :meth:`reshard`.

        Until then ``submodule.weight`` reads as the full weight outside of a forward, too, and a parameter that is not
        sharded (``submodule.bias``) as a plain tensor. ``parameters()`` still yields the sharded DTensors.

        Args:
            async_op: Return at once. The caller waits by the handle before it reads a weight.

        Returns:
            An :class:`UnshardHandle` with ``async_op``, else None.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> model.unshard()
            >>> weight = model.weight.detach().clone()  # a plain tensor with all rows
            >>> weight.shape
            torch.Size([64, 64])
            >>> model.reshard()
            >>> model.weight.to_local().shape
            torch.Size([16, 64])
        """
        for param in self._params():
            param.is_pinned = True
        runtime, weights = self._gtp_binding.group.runtime, self._weights()
        for weight in weights:
            runtime.gather_kept(weight)
        handle = UnshardHandle(runtime, weights)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered weights below this module. The counterpart of :meth:`unshard`, which has the example."""
        for param in self._params():
            param.is_pinned = False
        for weight in self._weights():
            self._gtp_binding.group.runtime.drop_kept(weight)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backward reduces gradients: no for all microbatches of a step but the last.

        Args:
            requires_gradient_sync: False sums full gradients on each rank, in ``reduce_dtype``, until a backward with
                True. That saves communication and costs the memory of a full gradient for each weight.
            recurse: Also for submodules that were passed to :func:`gtp_shard` themselves.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> for is_last in (False, True):
            ...     model.set_requires_gradient_sync(is_last)
            ...     model(torch.ones(2, 64)).sum().backward()
            >>> model.bias.grad.to_local()[0]  # two samples in each of two microbatches
            tensor(4.)
        """
        for param in self._params(recurse):
            param.flags.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backward all-reduces over the replicate axis of a 2-D mesh.

        Args:
            requires_all_reduce: False sums gradients that are reduce-scattered over gtp, until a backward with True.
                It takes less memory than :meth:`set_requires_gradient_sync`, which sums gradients in full size.
            recurse: Also for submodules that were passed to :func:`gtp_shard` themselves.

        Example:
            >>> model = nn.Linear(64, 64)
            >>> model = gtp_shard(model, init_weight_mesh("cpu", replicate=2, gtp=2).weights)
            >>> for is_last in (False, True):
            ...     model.set_requires_all_reduce(is_last)
            ...     model(torch.ones(2, 64)).sum().backward()
            >>> model.weight.grad.to_local().shape
            torch.Size([32, 64])
        """
        for param in self._params(recurse):
            param.flags.requires_all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether weights are freed after their forward, as the argument of :func:`gtp_shard` does.

        Args:
            reshard_after_forward: False keeps each weight gathered until its backward.
            recurse: Also for submodules that were passed to :func:`gtp_shard` themselves.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> model.set_reshard_after_forward(False)
        """
        for param in self._params(recurse):
            param.flags.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether weights are freed after their backward.

        Args:
            reshard_after_backward: False keeps each weight gathered for the next microbatch, which saves a gather.
            recurse: Also for submodules that were passed to :func:`gtp_shard` themselves.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> for is_last in (False, True):
            ...     model.set_reshard_after_backward(is_last)
            ...     model(torch.randn(2, 64)).sum().backward()
        """
        for param in self._params(recurse):
            param.flags.reshard_after_backward = reshard_after_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks of the mesh.

        Args:
            factor: Positive. 1 gives the sum over all ranks, for a loss that is divided by the number of all tokens.

        Raises:
            ValueError: ``factor`` is not positive.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> model.set_gradient_divide_factor(1.0)
            >>> model(torch.ones(2, 64)).sum().backward()
            >>> model.bias.grad.to_local()[0]  # 2 samples on each of 4 ranks
            tensor(8.)
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor expects a positive factor, but got {factor}.")
        for param in self._params():
            param.flags.gradient_divide_factor = float(factor)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call ``hook`` with each reduced gradient before it is added to ``.grad``, e.g. to sum it over more ranks.

        It is called at the end of backward, once for each parameter below this module, in the same order on all ranks.
        All-reduces in it are not hidden behind backward; those of a (replicate, gtp) mesh are.

        Args:
            hook: Changes this rank's part of a gradient in place. The part is on the host with shards on the host.
            stream: Must be None: the hook runs on the stream that called backward.

        Raises:
            NotImplementedError: ``stream`` is given.

        Example:
            >>> model = nn.Linear(64, 64)
            >>> mesh = init_weight_mesh("cpu", replicate=2, gtp=2)
            >>> model = gtp_shard(model, mesh["gtp"])
            >>> group = mesh["replicate"].get_group()
            >>> all_reduce = torch.distributed.all_reduce
            >>> model.set_all_reduce_hook(lambda grad: all_reduce(grad, group=group))
            >>> model(torch.ones(2, 64)).sum().backward()
            >>> model.bias.grad.to_local()[0]  # an average over gtp, summed over replicas
            tensor(4.)
        """
        if stream is not None:
            raise NotImplementedError(
                "set_all_reduce_hook expects no stream, because the hook runs on the stream that called backward. "
                "Leave it out; in the hook, switch to a stream of your own and wait for it."
            )
        for param in self._params():
            param.flags.all_reduce_hook = hook

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of :meth:`set_gradient_divide_factor`, which torch deprecates.

        Args:
            factor: Positive.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        self.set_gradient_divide_factor(factor)

    def reset_iter_state(self) -> None:
        """Drop a forward or backward that raised, and all gradients that are not in ``.grad`` yet.

        Gradients of microbatches without sync are among them. The next pass after an exception does so by itself.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> loss = model(torch.randn(2, 64)).sum()
            >>> model.reset_iter_state()  # this loss gets no backward
        """
        self._gtp_binding.group.runtime.abandon()

    def _chosen_policy(self) -> SchedulePolicy | None:
        return self._gtp_binding.group.runtime.chosen_policy()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the next backward is the last one before ``.grad`` is read.

        Args:
            is_last_backward: False leaves gradients in flight when backward returns. Beside them ``capture_step``
                refuses to record or replay.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> for is_last in (False, True):
            ...     model.set_is_last_backward(is_last)
            ...     model(torch.randn(2, 64)).sum().backward()
            >>> model.weight.grad.shape
            torch.Size([64, 64])
        """
        self._gtp_binding.group.runtime.is_last_backward = is_last_backward
