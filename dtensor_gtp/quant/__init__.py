"""Low precision: recipes, and the casts that define them. Overview:
``python -m dtensor_gtp.help low_precision``."""

from __future__ import annotations

from .api import quantize_, resolve_recipe
from .native import NativeWeight
from .nvfp4_operands import nvfp4_operand, nvfp4_values
from .planes import Direction, PlaneSpec, Quantized
from .recipe import Recipe
from .recipes import MXFP8, NVFP4, RECIPES, Float8Blockwise, Float8Rowwise, Float8Tensorwise

__all__ = [
    "MXFP8",
    "NVFP4",
    "RECIPES",
    "Direction",
    "Float8Blockwise",
    "Float8Rowwise",
    "Float8Tensorwise",
    "NativeWeight",
    "PlaneSpec",
    "Quantized",
    "Recipe",
    "nvfp4_operand",
    "nvfp4_values",
    "quantize_",
    "resolve_recipe",
]
