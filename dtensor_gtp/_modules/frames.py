"""Calls of modules, and of methods that count as their forward, as frames (see ``state``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from .. import _torch_compat as compat
from .._params.managed_param import Site
from .._schedule.order_of_uses import Entry
from .._schedule.runtime import Runtime
from .binding import Reads, ShardGroup, binding_of, unmanaged_params
from .pipelines import follow_pipelining


class GTPFrame:
    """Mixin of modules whose call is a frame: all but those with a fused op."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _call_in_graph(cast(nn.Module, self), super().__call__, args, kwargs)  # type: ignore[misc]
        # torch.compile(module) compiles what is called from here, but neither this frame (see below) nor the runtime.
        compiler = compat.set_eval_frame(None)
        try:
            return _call_in_frame(cast(nn.Module, self), super().__call__, args, kwargs, compiler)  # type: ignore[misc]
        finally:
            compat.set_eval_frame(compiler)


compat.skip_code(GTPFrame.__call__.__code__)


def as_forward(stock: Callable[..., Any], method: str) -> Callable[..., Any]:
    """A function of a module whose calls of the bound method ``stock``, by name ``method``, are frames."""
    reads = Reads()  # not what forward does

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _call_in_graph(self, stock, args, kwargs)
        compiler = compat.set_eval_frame(None)
        try:
            return _call_in_frame(self, stock, args, kwargs, compiler, method, reads)
        finally:
            compat.set_eval_frame(compiler)

    compat.skip_code(call.__code__)
    # The function behind the bound method, so that the signature keeps all arguments when this one is bound.
    return functools.wraps(getattr(stock, "__func__", stock))(call)


def _call_in_graph(module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call while the compiler traces it: frames are opened outside of compiled code, if at all."""
    binding = binding_of(module)
    if binding is None or binding.group.module is not module:
        return call(*args, **kwargs)
    args, kwargs = _cast_inputs(binding.group, args, kwargs)
    return _cast_outputs(binding.group, call(*args, **kwargs))


def _call_in_frame(
    module: nn.Module,
    call: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    compiler: Any,
    method: str = "forward",
    reads: Reads | None = None,
) -> Any:
    binding = binding_of(module)
    if binding is None:
        return _call_compiled(call, args, kwargs, compiler)
    group, runtime = binding.group, binding.group.runtime
    if group.num_registrations != (number := registrations().number):
        _refuse_added_params(group)
        group.num_registrations = number
    reads = binding.reads if reads is None else reads
    frame = runtime.enter(module, reads.may_read, method)
    is_complete = False
    try:
        if group.module is module:
            args, kwargs = _cast_inputs(group, args, kwargs)
        if compiler is not None or module._compiled_call_impl is not None:
            args, kwargs = compat.complete_collectives((args, kwargs))
        output = _call_compiled(call, args, kwargs, compiler)
        if group.module is module:
            output = _cast_outputs(group, output)
        is_complete = True
        reads.learn(frame.reads_weights, runtime.num_steps)
    finally:
        runtime.exit(frame, is_complete)
    if not runtime.is_materializing and torch.is_grad_enabled():
        follow_pipelining(_runtimes_below)
        _watch_backward(output, partial(runtime.note_backward, Entry(module, method)))
    return output


def _call_compiled(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Any) -> Any:
    """The call itself, again under the compiler that was active around the frame, if there was one."""
    if compiler is None:
        return call(*args, **kwargs)
    compat.set_eval_frame(compiler)
    try:
        return call(*args, **kwargs)
    finally:
        compat.set_eval_frame(None)


def _watch_backward(output: Any, note: Any) -> None:
    """Tell the runtime that a backward through ``output`` begins, so that its first gathers start at once."""
    for tensor in compat.tree_flatten(output)[0]:
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(lambda grad: note())


def _refuse_added_params(group: ShardGroup) -> None:
    """First forward, and later where any module has been given something since: a parameter that nobody manages nor
    ignores would train on this rank's data alone, silently."""
    for fqn, owner, name in unmanaged_params(group.module):
        param = owner._parameters[name]
        if param is not None and param.requires_grad and Site(owner, name) not in group.unmanaged:
            raise RuntimeError(
                f"Parameter '{fqn}' of shape {tuple(param.shape)} was added after gtp_shard, so nobody reduces its "
                f"gradient over mesh axes {group.mesh.mesh_dim_names} (rank {dist.get_rank()}). Change the module "
                "before gtp_shard, and pass the parameter in ignored_params if it is to stay local."
            )


def _runtimes_below(module: nn.Module) -> list[Runtime]:
    bindings = (binding_of(submodule) for submodule in module.modules())
    return list({id(b.group.runtime): b.group.runtime for b in bindings if b is not None}.values())


class Registrations:
    """Counts modules and parameters that are given to any module of this process."""

    def __init__(self) -> None:
        self.number = 0
        register_module_module_registration_hook(self._count)
        register_module_parameter_registration_hook(self._count)

    def _count(self, module: nn.Module, name: str, registered: object) -> None:
        self.number += 1


@functools.cache
def registrations() -> Registrations:
    """The one of this process: torch has one list of such hooks."""
    return Registrations()


def _cast_inputs(
    group: ShardGroup, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dtype = group.mp_policy.param_dtype
    if dtype is None or not group.mp_policy.cast_forward_inputs:
        return args, kwargs
    cast_args: tuple[Any, ...] = _cast(args, dtype)
    cast_kwargs: dict[str, Any] = _cast(kwargs, dtype)
    return cast_args, cast_kwargs


def _cast_outputs(group: ShardGroup, output: Any) -> Any:
    return output if group.mp_policy.output_dtype is None else _cast(output, group.mp_policy.output_dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return compat.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
