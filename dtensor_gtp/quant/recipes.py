"""Recipes by name."""

from __future__ import annotations

from types import MappingProxyType

from .base import Recipe
from .float8_blockwise import Float8Blockwise
from .float8_rowwise import Float8Rowwise
from .float8_tensorwise import Float8Tensorwise
from .mxfp8 import MXFP8
from .nvfp4 import NVFP4

_CLASSES: tuple[type[Recipe], ...] = (Float8Tensorwise, Float8Rowwise, Float8Blockwise, MXFP8, NVFP4)

RECIPES = MappingProxyType({cls.name: cls for cls in _CLASSES})


def resolve_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of that name with its defaults, or the recipe itself.

    Raises:
        TypeError: It is neither a name nor a recipe.
        ValueError: There is none of that name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"quantize_ expects a recipe or its name, but got {type(recipe).__name__}: {recipe!r}.")
    if recipe not in RECIPES:
        raise ValueError(f"quantize_ expects one of the recipes {', '.join(RECIPES)}, but got {recipe!r}.")
    return RECIPES[recipe]()
