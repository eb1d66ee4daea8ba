"""Low precision: recipes, and the casts that define them. docs/low_precision.md is the overview."""

from __future__ import annotations

from .api import quantize_
from .base import Direction, PlaneSpec, Quantized, Recipe
from .float8_blockwise import Float8Blockwise
from .float8_rowwise import Float8Rowwise
from .float8_tensorwise import Float8Tensorwise
from .mxfp8 import MXFP8
from .native import NativeWeight
from .nvfp4 import NVFP4
from .recipes import RECIPES, resolve_recipe

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
    "quantize_",
    "resolve_recipe",
]
