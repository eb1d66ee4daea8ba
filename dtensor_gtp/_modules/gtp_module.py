"""``GTPModule``: the methods that ``gtp_shard`` adds to the class of a module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from .._schedule.runtime import Runtime
from ..policy import SchedulePolicy
from .binding import BoundModule, bindings_of, params_of
from .from_fully_shard import RefusedMethods


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
            self._runtime.keeper.wait_kept(weight)


def unshard_params(runtime: Runtime, params: list[ManagedParam]) -> UnshardHandle:
    """Gather the weights among ``params`` until ``reshard_params``."""
    weights = _weights_among(params)
    runtime.setup.ensure()  # decides what is gathered together
    for param in params:
        param.is_pinned = True
    for weight in weights:
        runtime.gather_kept(weight)
    return UnshardHandle(runtime, weights)


def reshard_params(runtime: Runtime, params: list[ManagedParam]) -> None:
    """Free what ``unshard_params`` has gathered."""
    weights = _weights_among(params)
    errors: list[RuntimeError | None] = [*runtime.lost_writes.written_outside(weights)]
    errors += [param.take_back() for param in params if isinstance(param, WholeParam)]
    for param in params:
        param.is_pinned = False
    for weight in weights:
        if weight.group is not None:
            weight.group.views.unpin()
        runtime.keeper.drop_kept(weight)
    for error in errors:
        if error is not None:
            raise error


def _weights_among(params: list[ManagedParam]) -> list[ShardedWeight]:
    return [param for param in params if isinstance(param, ShardedWeight)]


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
        group = self._gtp_binding.group
        return params_of(each for each in bindings_of(self.modules()) if recurse or each.group is group)

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
        handle = unshard_params(self._gtp_binding.group.runtime, self._params())
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered weights below this module. The counterpart of :meth:`unshard`, which has the example."""
        reshard_params(self._gtp_binding.group.runtime, self._params())

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backward reduces gradients: no for all microbatches of a step but the last.

        Args:
            requires_gradient_sync: False sums full gradients on each rank, in ``reduce_dtype``, until a backward with
                True. That saves communication and costs the memory of a full gradient for each weight. These sums are
                not in ``.grad`` yet: ``zero_grad()`` does not drop them, as under ``fully_shard``;
                :meth:`reset_iter_state` does.
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
                ``zero_grad()`` does not drop these sums either.
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
                "Leave it out; in the hook, switch to your own stream and wait for it."
            )
        for param in self._params():
            param.flags.all_reduce_hook = hook

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Choose whether ranks may use different weights of this module, e.g. each the head of its task.

        With True, on all ranks, each pass first gathers all these weights, and at its end reduces all their gradients,
        with zeros where a rank did not use a weight. ``.grad`` is zero for what no rank has used. That takes
        the memory of the full weights and gradients, and nothing hides it behind compute: call it on the smallest
        module that needs it, which was passed to :func:`gtp_shard` itself, and before the first forward. Weights of
        other modules must still be used by all ranks in the same order, and all ranks run the same number of forwards
        and backwards.

        Args:
            reduce_scatter_unused_params: False lets all ranks use the same weights, as after :func:`gtp_shard`.
            recurse: Also for submodules that were passed to :func:`gtp_shard` themselves.

        Raises:
            RuntimeError: Weights that are reduced as a group have gradients that are not in ``.grad`` yet.

        Example:
            >>> heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            >>> model = nn.Sequential(nn.Linear(64, 64), heads)
            >>> mesh = init_weight_mesh("cpu", gtp=4).weights
            >>> for head in heads:  # one of them for the task of each rank
            ...     _ = gtp_shard(head, mesh)
            >>> model = gtp_shard(model, mesh)
            >>> for head in heads:
            ...     head.set_reduce_scatter_unused_params(True)
            >>> own = heads[mesh.get_local_rank()]
            >>> own(model[0](torch.ones(2, 64))).sum().backward()
            >>> heads[0].bias.grad.to_local()[0]  # of 2 samples on one of 4 ranks
            tensor(0.5000)
        """
        params, runtime = self._params(recurse), self._gtp_binding.group.runtime
        if reduce_scatter_unused_params and (groups := {param.group for param in params} - {None}):
            if not all(group.pending_grad.is_empty for group in groups):
                raise RuntimeError(
                    "set_reduce_scatter_unused_params(True) expects no gradients of microbatches without sync. Call it "
                    "before the first forward, or after a backward that syncs them."
                )
            runtime.split_groups()
        for param in params:
            param.flags.reduce_scatter_unused_params = reduce_scatter_unused_params

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

        Gradients of microbatches without sync are among them. After a backward that raised, a forward that was
        interrupted (KeyboardInterrupt), and a cell of a notebook that was, this happens by itself. Call it where your
        program gives up a step between microbatches.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> loss = model(torch.randn(2, 64)).sum()
            >>> model.reset_iter_state()  # this loss gets no backward
        """
        self._gtp_binding.group.runtime.abandon()

    def _chosen_policy(self) -> SchedulePolicy | None:
        return self._gtp_binding.group.runtime.setup.chosen_policy()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the next backward is the last one before ``.grad`` is read.

        Args:
            is_last_backward: False leaves gradients in flight when backward returns. ``zero_grad()`` does not drop
                these; :meth:`reset_iter_state` does. Beside them ``capture_step`` refuses to record or replay.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> for is_last in (False, True):
            ...     model.set_is_last_backward(is_last)
            ...     model(torch.randn(2, 64)).sum().backward()
            >>> model.weight.grad.shape
            torch.Size([64, 64])
        """
        self._gtp_binding.group.runtime.steps.is_last_backward = is_last_backward
