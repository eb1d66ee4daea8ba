"""Whole parameters outside of forwards: gathered by ``unshard``, or plain ones in the place of shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from .._schedule.runtime import Runtime
from ..quant.master import master_of
from ..quant.native import native_of
from .binding import managed_params, runtimes_below


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
        param.is_pinned = True  # attributes read as full weights, and no use frees them
    for weight in weights:
        runtime.gather_kept(weight)  # a group is gathered once: its other members find it kept
    return UnshardHandle(runtime, weights)


def reshard_params(runtime: Runtime, params: list[ManagedParam]) -> None:
    """Free what ``unshard_params`` has gathered."""
    weights = _weights_among(params)
    # First, because this reads what is freed below.
    errors: list[RuntimeError | None] = [*runtime.lost_writes.written_outside(weights)]
    errors.append(runtime.reads.misuse_outside())
    errors += [param.take_back() for param in params if isinstance(param, WholeParam)]
    for param in params:
        param.is_pinned = False
    for weight in weights:
        if weight.group is not None:
            weight.group.views.unpin()
        runtime.keeper.drop_kept(weight)
    for error in errors:  # last, so that everything is freed in any case
        if error is not None:
            raise error


def _weights_among(params: list[ManagedParam]) -> list[ShardedWeight]:
    return [param for param in params if isinstance(param, ShardedWeight)]


@contextmanager
def whole_weights(module: nn.Module, *, trained_only: bool = False) -> Iterator[None]:
    """Each rank has the parameters of ``module`` as plain, whole tensors in this context, and may change their values.

    For code that computes with parameters outside of a forward and knows no DTensor: merging
    adapters, pruning, spectral norms, histograms. All ranks must change them alike. At the end each
    rank keeps its part of the values. Gradients are whole, too; changes of them are dropped.
    Collective; each rank needs memory for all of these parameters, so give a large model in parts.

    Args:
        module: A module after :func:`gtp_shard`, or one below or above it. Do not call it within.
        trained_only: Leave out parameters that need no gradient.

    Raises:
        RuntimeError: A forward or backward is running, a block that is gathered as a whole is between ``unshard()``
            and ``reshard()``, or the shape of a parameter was changed.
        NotImplementedError: A weight has native storage (:func:`quantize_`), or a ``fully_shard`` is outside.

    The counterpart of ``FullyShardedDataParallel.summon_full_params``.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> with whole_weights(model), torch.no_grad():
        ...     model.weight /= torch.linalg.matrix_norm(model.weight, 2)
        >>> model.weight.to_local().shape
        torch.Size([16, 64])
    """
    if any(runtime.is_materializing for runtime in runtimes_below(module)):
        raise RuntimeError(
            "whole_weights cannot be called during a forward or backward. There, module.weight is whole already."
        )
    names = {param: name for name, param in managed_params(module)}  # a tied one once
    # What a ``whole_weights`` around this one has made whole is whole, and is put back there.
    names = {param: name for param, name in names.items() if not _is_whole(param)}
    if trained_only:
        names = {param: name for param, name in names.items() if param.param.requires_grad}
    _refuse_some(names)
    with ExitStack() as undo:  # also after an error in the middle, of a gather or of what is put back
        written = {id(param.param) for param in names}
        for runtime in runtimes_below(module):
            undo.callback(runtime.note_step, written)  # what is kept gathered is old
        for param in names:
            undo.callback(setattr, param, "is_pinned", param.is_pinned)
            param.is_pinned = False  # attributes would read what ``unshard`` has gathered
        for param in names:
            undo.callback(_put_shard, param, _put_whole(param))
        yield


def _refuse_some(names: Mapping[ManagedParam, str]) -> None:
    """Raise for parameters that ``whole_weights`` cannot gather or write, before it changes any."""
    for param, name in names.items():
        if native_of(param.param) is not None:
            raise NotImplementedError(
                f"whole_weights cannot write high-precision values to parameter {name!r} of shape "
                f"{tuple(param.param.shape)} with native storage. Use storage='master', or "
                "trained_only=True."
            )
        if param.registration.is_cut_again:
            raise NotImplementedError(
                f"whole_weights does not support a fully_shard outside of gtp_shard, which has cut parameter {name!r} "
                f"of shape {tuple(param.param.shape)} again. Read whole values by get_model_state_dict with "
                "full_state_dict=True, and write to the parameters, which are DTensors."
            )
        if param.group is not None and param.group.is_pinned:
            raise RuntimeError(
                f"whole_weights cannot be called between unshard() and reshard() of block '{param.group.fqn}'. Call "
                "reshard() before."
            )


def _is_whole(param: ManagedParam) -> bool:
    module, name = param.registration.sites[0]
    registered = module._parameters.get(name)
    return isinstance(registered, nn.Parameter) and not isinstance(registered, DTensor) and not param.is_pinned


def _put_whole(param: ManagedParam) -> nn.Parameter:
    value: torch.Tensor = master_of(param.param.detach().full_tensor())  # type: ignore[attr-defined]
    if value.data_ptr() == compat.local_part(param.param).data_ptr():
        value = value.clone()  # of one rank, or whole on each: the memory of the shard itself
    whole = nn.Parameter(value, requires_grad=param.param.requires_grad)
    if param.param.grad is not None:
        whole.grad = param.param.grad.full_tensor()  # type: ignore[attr-defined]
    param.registration.register(whole)
    return whole


@torch.no_grad()
def _put_shard(param: ManagedParam, whole: nn.Parameter) -> None:
    sharded = param.param
    for module, name in param.registration.sites:
        if module._parameters.get(name) is whole:  # unless the code has put another one there
            module._parameters[name] = sharded
    if whole.shape != sharded.shape:  # ``copy_`` would broadcast it
        raise RuntimeError(
            f"whole_weights expects parameter '{param.fqn}' to keep its shape {tuple(sharded.shape)}, but got "
            f"{tuple(whole.shape)} (rank {dist.get_rank()}). Change shapes before gtp_shard."
        )
    spec = compat.dtensor_spec(sharded)  # type: ignore[arg-type]
    own = compat.own_part(whole.detach(), spec.mesh, spec.placements)
    master_of(compat.local_part(sharded)).copy_(own)  # into the memory that the optimizer knows
    if sharded.requires_grad is not whole.requires_grad:  # frozen or unfrozen meanwhile
        sharded.requires_grad_(whole.requires_grad)
    torch.autograd.graph.increment_version(sharded)  # ``copy_`` has counted on the local tensor alone
