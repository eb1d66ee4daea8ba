"""Writes to shards that change no version: through ``param.data``, and by foreach functions.

Between passes nothing that was gathered is kept, or the user asks for it. In a forward, weights are gathered ahead of
their use, and a forward may write in between: momentum encoders (MoCo, BYOL) do. So whoever gets hold of a shard in a
forward may write to it: what was gathered of it is dropped, and in this pass it is gathered at its use.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._schedule.runtime import Runtime
from .._schedule.steps import optimizer_steps


@functools.cache
def install() -> None:
    """Look at each ``param.data`` and at foreach functions that write; once in a process."""
    compat.wrap_data_getter(_note)
    compat.wrap_data_setter(_set_data)
    for op in compat.foreach_writes():
        compat.set_dtensor_handler(op, _write_foreach)


def _runtimes() -> list[Runtime]:
    """All of the process."""
    return [watcher for watcher in optimizer_steps().watchers if isinstance(watcher, Runtime)]


def _write_foreach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A foreach function writes to the tensors of its first argument. Its caller may have them since long before."""
    if not (torch.compiler.is_compiling() or compat.is_in_compiler()):
        for runtime in _runtimes():
            # Compute waits for gathers in flight that read these, before it writes.
            for param in args[0] if runtime.holds_weights else ():
                runtime.lost_writes.note_untraced_write(param)
            runtime.lost_writes.note_written(args[0])
    with compat.stock_dtensor_dispatch(op):
        return op(*args, **kwargs)


def _set_data(stock: Any, param: DTensor, value: Any) -> None:
    if isinstance(param, nn.Parameter):
        for runtime in _runtimes():
            runtime.lost_writes.refuse_new_data(param)
    stock(param, value)
    if isinstance(param, nn.Parameter):
        for runtime in _runtimes():
            runtime.lost_writes.note_new_data(param)


def _note(param: DTensor) -> None:
    if isinstance(param, nn.Parameter) and not (torch.compiler.is_compiling() or compat.is_in_compiler()):
        for runtime in _runtimes():
            runtime.lost_writes.note_untraced_write(param)


def as_users_see(runtime: Runtime, members: Iterator[tuple[str, Any]], may_gather: bool) -> Iterator[tuple[str, Any]]:
    """``members`` of ``named_parameters()``: the full weights in a forward, else the shards. Whoever takes several
    shards while no gradients are computed may write to them. To look at the first alone (``.dtype``, ``.device``) is
    common and harmless."""
    if may_gather and runtime.gives_full_params:
        yield from runtime.reads.full_params(members, runtime.members.by_id())
        return
    before: list[Any] = []
    for name, member in members:
        if not torch.is_grad_enabled():
            if len(before) == 1:
                runtime.lost_writes.note_handed_out(before[0])
            if before:
                runtime.lost_writes.note_handed_out(member)
            before.append(member)
        yield name, member
