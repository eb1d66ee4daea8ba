"""Calls of modules, and of methods that count as their forward, as frames (see ``state``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn

from .. import _torch_compat as compat
from .binding import Reads, binding_of, unmanaged_params
from .gathering import Entry
from .param import Site
from .registrations import registrations
from .split_backward import follow_pipelining

if TYPE_CHECKING:
    from .group import ShardGroup
    from .state import Runtime


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
    args, kwargs = binding.group.cast_inputs(args, kwargs)
    return binding.group.cast_outputs(call(*args, **kwargs))


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
            args, kwargs = group.cast_inputs(args, kwargs)
        if compiler is not None or module._compiled_call_impl is not None:
            args, kwargs = compat.complete_collectives((args, kwargs))
        output = _call_compiled(call, args, kwargs, compiler)
        if group.module is module:
            output = group.cast_outputs(output)
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
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
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
