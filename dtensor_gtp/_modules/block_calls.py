"""Calls of blocks whose weights are a group, and of their parts outside of passes."""

from __future__ import annotations

from collections.abc import Iterator
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
            gathered = runtime.acquire(group)
            seen = group.leaves.seen() if runtime.reads.looks_at_bits else None
            use = BlockUse(runtime, group) if torch.is_grad_enabled() else None
            if is_compiled or not was_in_pass:
                group.views.show(is_compiled=is_compiled)
            inputs = [*_tensors((args, kwargs))] if use is not None else []
            if compiler is None:
                output = call(*args, **kwargs)
            else:
                compat.set_eval_frame(compiler)
                try:
                    output = call(*args, **kwargs)
                finally:
                    compat.set_eval_frame(None)
            if seen is not None and (misuse := group.untraced_write(seen)) is not None:
                raise misuse
            is_complete = True
        finally:
            if frame is not None:
                if is_compiled or not was_in_pass:
                    group.views.show(is_in_pass=was_in_pass)
                if gathered is not None:
                    runtime.release(group, gathered)
                runtime.exit(frame, is_complete)
    finally:
        runtime.leave(depth)
    if use is not None:
        use.watch(inputs, _tensors(output))
    return output


def _needs_no_hooks(num_steps: int) -> bool:
    """Autograd saves leaves of a group as they are: their memory is refilled for its backward."""
    return False


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in compat.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
