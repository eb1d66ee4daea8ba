"""Refuses ``torch.cuda.make_graphed_callables`` for modules with parameters of ours.

It asks ``torch.autograd.grad`` for the gradients of ``module.parameters()``, but those of sharded weights do not pass
through the parameters. It would raise that these were not used, and with ``allow_unused_input=True`` train nothing,
without a word. It asks nobody before it begins, so the function is replaced, by one that does as before for all other
callables. Who has imported it by name before that gets an error from the recording itself, see
``saved.refuse_partial_recording``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn

from .binding import binding_of


@functools.cache
def install() -> None:
    """Replace the function, once in a process."""
    make = torch.cuda.make_graphed_callables

    @functools.wraps(make)
    def checked(callables: Any, *args: Any, **kwargs: Any) -> Any:
        for module in callables if isinstance(callables, tuple) else (callables,):
            if isinstance(module, nn.Module):
                _refuse_managed(module)
        return make(callables, *args, **kwargs)

    torch.cuda.make_graphed_callables = torch.cuda.graphs.make_graphed_callables = checked


def _refuse_managed(module: nn.Module) -> None:
    for prefix, submodule in module.named_modules():
        binding = binding_of(submodule)
        for name in binding.params if binding is not None else ():
            raise RuntimeError(
                f"torch.cuda.make_graphed_callables does not support a {type(module).__name__} after gtp_shard: the "
                f"gradient of '{f'{prefix}.{name}' if prefix else name}' is reduced over ranks and does not pass "
                "through autograd, so the graph would leave it out. Use dtensor_gtp.capture_step for whole steps, "
                "dtensor_gtp.capture_blocks for single modules."
            )
