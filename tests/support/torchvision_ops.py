"""Lets torchvision be imported beside another build of torch than its wheel was made for.

timm and transformers import it where it is installed, and the tests use none of its operators. Without those its import
fails, as it gives shapes to two of them.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch


@cache
def define_missing() -> None:
    """Declare the two operators if torchvision has none that this torch can load."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for path in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(path)
        except OSError:
            continue
        return
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
