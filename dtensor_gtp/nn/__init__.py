"""Modules that torch does not have."""

from .dispatch import Dispatched, DispatchMethod, TokenDispatcher
from .grouped_linear import GroupedLinear, convert_grouped_state_dict
from .grouped_mlp import GroupedExperts, GroupedMLP
from .parallelize import parallelize_experts

__all__ = [
    "DispatchMethod",
    "Dispatched",
    "GroupedExperts",
    "GroupedLinear",
    "GroupedMLP",
    "TokenDispatcher",
    "convert_grouped_state_dict",
    "parallelize_experts",
]
