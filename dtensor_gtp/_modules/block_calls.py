"""Calls of blocks whose weights are a group, and of their parts outside of passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .. import _torch_compat as compat
from .._params.weight_group import WeightGroup
from .._schedule.block_uses import BlockUse
from .binding import BoundModule


def call_block(block: BoundModule, call: Any, args: Any, kwargs: Any, compiler: Any) -> Any:
    """A use of the group of ``block``, which is a block or a part of one."""
    group, runtime = cast("WeightGroup", block._gtp_group), block._gtp_binding.group.runtime
    depth = runtime.depth_of_call()
    frame = gathered = None
    is_compiled = compiler is not None or block._compiled_call_impl is not None
    was_in_pass = is_complete = False
    try:
        try:
            frame = runtime.enter(block, _needs_no_hooks)
            was_in_pass = group.views.is_in_pass
            gathered = runtime.gathering.acquire(group.for_forward)
            seen = group.leaves.seen() if runtime.reads.looks_at_bits else None
            use = BlockUse(runtime, group) if torch.is_grad_enabled() else None
            if is_compiled or not was_in_pass:
                group.views.show(is_compiled=is_compiled)
            inputs = [*tensors_in((args, kwargs))] if use is not None else []
            output = call_under(compiler, call, args, kwargs)
            misuse = None if seen is None else group.untraced_write(seen)
            misuse = misuse or runtime.lost_writes.written_in_use(group)
            if misuse is not None:
                raise misuse
            is_complete = True
        finally:
            if frame is not None:
                if is_compiled or not was_in_pass:
                    group.views.show(is_in_pass=was_in_pass)
                if gathered is not None:
                    runtime.gathering.release(group.for_forward, gathered)
                runtime.exit(frame, is_complete)
    finally:
        runtime.leave(depth)
    if use is not None:
        use.watch(inputs, tensors_in(output))
    return output


def call_under(compiler: Any, call: Any, args: Any, kwargs: Any) -> Any:
    """The call itself runs again under the compiler that was active around the frame."""
    if compiler is None:
        return call(*args, **kwargs)
    compat.set_eval_frame(compiler)
    try:
        return call(*args, **kwargs)
    finally:
        compat.set_eval_frame(None)


def _needs_no_hooks(num_steps: int) -> bool:
    """Autograd saves leaves of a group as they are: their memory is refilled for its backward."""
    return False


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Those in containers that pytree knows and in dataclasses."""
    for leaf in compat.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
