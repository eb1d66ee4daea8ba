"""``GTPModule``: the methods that ``gtp_shard`` adds to the class of a module.

What ``fully_shard`` and its modules have and this library has not is refused, with what to use
instead. Most of it tunes what is chosen here. ``python -m dtensor_gtp.help composability`` lists
all arguments and methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from .._params.managed_param import ManagedParam
from ..policy import SchedulePolicy
from .binding import BoundModule, bindings_of, params_of
from .whole_weights import UnshardHandle, reshard_params, unshard_params

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Advice has no full stop: the errors that contain it add one.
_PLANNED = (
    "gtp_shard plans gathers by the order of uses. Leave it out; SchedulePolicy(prefetch_nbytes=...) sets how far ahead"
)
_SYMMETRIC = "SchedulePolicy(gather_backend='copy_engine') gathers through symmetric memory"

ARGUMENTS = MappingProxyType(
    {
        "dp_mesh_dims": (
            "Pass the sub-mesh itself: mesh['gtp'] or mesh['replicate', 'gtp'], several axes flattened to one; and let "
            "parallelize_module put parameters on the other axes alone"
        )
    }
)

METHODS = MappingProxyType(
    {
        "set_modules_to_forward_prefetch": _PLANNED,
        "set_modules_to_backward_prefetch": _PLANNED,
        "set_custom_all_gather": "Pass a class to SchedulePolicy(gather_backend=...)",
        "set_custom_reduce_scatter": "Choose a kind by SchedulePolicy(reduce_scatter=...)",
        "set_post_optim_event": (
            "A gather allocates memory on the compute stream, so it waits for that stream. Launch other work before "
            "the optimizer's step, or on another stream"
        ),
        "set_force_sum_reduction_for_comms": (
            "SchedulePolicy(reduce_scatter='all_to_all') or 'copy_engine' sends without a reduction; "
            "set_gradient_divide_factor(1) sums"
        ),
        "set_reduce_scatter_max_input_buffers": (
            "gtp_shard chooses how many are in flight. Leave it out; SchedulePolicy(memory='least') takes less memory"
        ),
        "set_separate_reduce_scatter_group": "Reductions always have a separate communicator. Leave it out",
        "set_unshard_in_backward": (
            "Backward gathers only the weights that it reads (no embedding, no layer whose input needs no "
            "gradient). Leave it out"
        ),
        "set_allocate_memory_from_process_group_for_comm": _SYMMETRIC,
        "set_symm_mem_for_comm": _SYMMETRIC,
    }
)


def refuse_arguments(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """A decorator: arguments of ``fully_shard`` that ``call`` does not have raise, and name what to
    use instead. So does a call without a mesh, for which ``fully_shard`` makes one."""

    @functools.wraps(call)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs.keys() & ARGUMENTS.keys():
            raise TypeError(f"gtp_shard has no argument {name} of fully_shard. {ARGUMENTS[name]}.")
        if len(args) == 1 and "mesh" not in kwargs:  # the module alone
            raise TypeError(
                "gtp_shard expects a mesh, but got none; fully_shard makes one of all ranks. Pass "
                "init_device_mesh('cuda', (torch.distributed.get_world_size(),), mesh_dim_names=('gtp',))."
            )
        return call(*args, **kwargs)

    return checked


class RefusedMethods:
    """The methods of ``FSDPModule`` (torch 2.13) that raise."""


def _refused(name: str, advice: str) -> Callable[..., NoReturn]:
    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} of fully_shard has no counterpart in gtp_shard. {advice}.")

    method.__name__ = name
    method.__doc__ = f"Refused. {advice}."
    return method


# Methods of the class, so that ``dir`` and ``help`` show them.
for _name, _advice in METHODS.items():
    setattr(RefusedMethods, _name, _refused(_name, _advice))


class GTPModule(RefusedMethods, BoundModule):
    """What ``gtp_shard`` adds to the class of the module that it was given.

    The methods are those of torch's ``FSDPModule`` of the same names, with the same meaning. Those
    that are missing raise NotImplementedError, and name what to use instead.

    ``state_dict()`` holds the shards, not copies. A ``dcp.load`` into them counts in the next
    forward, also where weights are kept gathered. ``load_state_dict`` takes such DTensors, or whole
    tensors, of which each rank takes its part without communication. With ``assign=True`` the
    tensors given become the parameters, and ties stay ties; a tensor that is placed in another way
    is refused. Create the optimizer after that, for it holds the old parameters.

    ``param.data = tensor`` takes a whole tensor, of which each rank copies its part, or an earlier
    ``param.data``. Inside of ``fully_shard`` it raises: write with ``copy_`` under
    ``torch.no_grad()``.

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
        bindings = bindings_of(self.modules())
        if recurse:
            return params_of(bindings)  # also of calls on submodules
        # Only those of the ``gtp_shard`` call on this very module.
        group = self._gtp_binding.group
        return params_of(binding for binding in bindings if binding.group is group)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather all weights below this module and keep them gathered until :meth:`reshard`.

        Until then ``submodule.weight`` reads as the full weight outside of a forward, too, and a
        parameter that is not sharded (``submodule.bias``) as a plain tensor. ``parameters()`` still
        yields the sharded DTensors.

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
            requires_gradient_sync: False sums full gradients on each rank, in ``reduce_dtype``,
                until a backward with True. That saves communication and costs the memory of a full
                gradient for each weight. These sums are not in ``.grad`` yet: ``zero_grad()`` does
                not drop them, as under ``fully_shard``; :meth:`reset_iter_state` does.
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
            param.flags.requires_gradient_sync = requires_gradient_sync  # a group shares one ``flags``

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backward all-reduces over the replicate axis of a 2-D mesh.

        Args:
            requires_all_reduce: False sums gradients that are reduce-scattered over gtp, until a
                backward with True. It takes less memory than :meth:`set_requires_gradient_sync`,
                which sums gradients in full size. ``zero_grad()`` does not drop these sums either.
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
        """Choose whether weights are freed after their forward, as the argument of
        :func:`gtp_shard` does.

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
        if not factor > 0:  # refuses NaN, too
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

        With True, on all ranks, each pass first gathers all these weights, and at its end reduces
        all their gradients, with zeros where a rank did not use a weight. ``.grad`` is zero for
        what no rank has used. That takes the memory of the full weights and gradients, and nothing
        hides it behind compute: call it on the smallest module that needs it, which was passed to
        :func:`gtp_shard` itself, and before the first forward. Weights of other modules must still
        be used by all ranks in the same order, and all ranks run the same number of forwards and
        backwards.

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
        params = self._params(recurse)
        groups = {param.group for param in params if param.group is not None}
        if reduce_scatter_unused_params and groups:
            # These sums are packed for the group. Its single weights would lose them.
            if not all(group.pending_grad.is_empty for group in groups):
                raise RuntimeError(
                    "set_reduce_scatter_unused_params(True) expects no gradients of microbatches without sync. Call it "
                    "before the first forward, or after a backward that syncs them."
                )
            # A group is gathered and reduced as a whole, so no rank can leave out one of its weights.
            self._gtp_binding.group.runtime.split_groups()
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

        Gradients of microbatches without sync are among them. After a backward that raised, a
        training forward that was interrupted (KeyboardInterrupt), and a cell of a notebook that was, this
        happens by itself. Call it where your program gives up a step between microbatches.

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
            is_last_backward: False leaves gradients in flight when backward returns.
                ``zero_grad()`` does not drop these; :meth:`reset_iter_state` does. Beside them
                ``capture_step`` refuses to record or replay.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> for is_last in (False, True):
            ...     model.set_is_last_backward(is_last)
            ...     model(torch.randn(2, 64)).sum().backward()
            >>> model.weight.grad.shape
            torch.Size([64, 64])
        """
        self._gtp_binding.group.runtime.steps.is_last_backward = is_last_backward  # calls on submodules share it
