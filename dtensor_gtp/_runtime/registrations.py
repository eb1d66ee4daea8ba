"""Whether parameters may have come anew anywhere: looked up in each forward, so one number tells."""

from __future__ import annotations

import functools

import torch.nn as nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Registrations:
    """Counts modules and parameters that are given to any module of this process."""

    def __init__(self) -> None:
        self.number = 0
        register_module_module_registration_hook(self._count)
        register_module_parameter_registration_hook(self._count)

    def _count(self, module: nn.Module, name: str, registered: object) -> None:
        self.number += 1


@functools.cache
def registrations() -> Registrations:
    """The one of this process: torch has one list of such hooks."""
    return Registrations()
