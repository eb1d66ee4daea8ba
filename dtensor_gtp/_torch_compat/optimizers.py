"""``torch.optim.Muon``'s arithmetic."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

import torch


def muon_orthogonalize(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """``torch.optim.Muon``'s Newton-Schulz iteration on a whole matrix; the result is bfloat16."""
    module: Any = import_module("torch.optim._muon")  # here, not at the top: a release may move it
    result: torch.Tensor = module._zeropower_via_newtonschulz(matrix, coefficients, num_steps, eps)
    return result


def muon_adjust_lr(lr: Any, adjust_lr_fn: str | None, shape: torch.Size) -> Any:
    """``torch.optim.Muon``'s learning rate for a matrix of ``shape``."""
    return cast("Any", import_module("torch.optim._muon"))._adjust_lr(lr, adjust_lr_fn, shape)
