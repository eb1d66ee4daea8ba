"""State dicts of modules with quantized weights hold the high-precision values, as ordinary tensors.

So a checkpoint does not know the recipe: it loads into a module with another one or with none, and theirs into this.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .base import Recipe
from .tensor import MasterWeight, master_of, recipe_of, with_recipe


class StateDictHooks:
    """Hooks of one parameter: the plain values go out; what ``assign=True`` puts in gets the recipe again.

    Args:
        name: Of the parameter.
        recipe: Its recipe.
    """

    def __init__(self, name: str, recipe: Recipe) -> None:
        self.name = name
        self.recipe = recipe

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """After ``state_dict``."""
        key = prefix + self.name
        value = state_dict.get(key)
        if isinstance(value, DTensor) and isinstance(compat.local_tensor(value), MasterWeight):
            state_dict[key] = compat.wrap_local(master_of(compat.local_tensor(value)), compat.dtensor_spec(value))
        elif isinstance(value, MasterWeight):
            state_dict[key] = value.master

    def load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """After ``load_state_dict``. What ``gtp_shard`` manages has its recipe elsewhere."""
        param = module._parameters.get(self.name)
        if param is not None and recipe_of(param) is None and "_gtp_binding" not in module.__dict__:
            module._parameters[self.name] = with_recipe(param, self.recipe)


def hook(module: nn.Module, name: str, recipe: Recipe) -> None:
    """Register the hooks of one parameter; a second time, give those that there are another recipe."""
    for existing in module._state_dict_hooks.values():
        if isinstance(existing, StateDictHooks) and existing.name == name:
            existing.recipe = recipe
            return
    hooks = StateDictHooks(name, recipe)
    module.register_state_dict_post_hook(hooks)
    module.register_load_state_dict_post_hook(hooks.load)
