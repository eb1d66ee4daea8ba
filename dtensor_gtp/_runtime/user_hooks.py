"""Hooks that users register on parameters. Autograd does not run them: reduced gradients do not pass through it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat


def run_tensor_hooks(param: torch.Tensor, reduced: torch.Tensor, spec: compat.DTensorSpec) -> torch.Tensor:
    """``Tensor.register_hook``: each gets the gradient of this backward and may return another one.

    Args:
        param: The parameter.
        reduced: This rank's part of its gradient, perhaps in a wider dtype.
        spec: Of the parameter, and of the gradient that the hooks see.
    """
    for hook in compat.tensor_hooks(param):
        replaced = hook(compat.wrap_local(reduced.to(param.dtype), spec))
        if replaced is not None:
            assert isinstance(replaced, DTensor)
            reduced = compat.local_tensor(replaced).to(reduced.dtype, copy=True)
    return reduced


def run_post_accumulate_hooks(param: torch.Tensor) -> None:
    """``Tensor.register_post_accumulate_grad_hook``: each gets the parameter, with its gradient in ``.grad``."""
    for hook in compat.post_accumulate_grad_hooks(param):
        hook(param)
