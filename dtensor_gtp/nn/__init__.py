"""Modules that torch does not have."""

from .convert_experts import convert_experts_state_dict, group_experts, group_experts_
from .dispatch import Dispatched, Dispatcher, DispatchMethod, TokenDispatcher
from .experts import GroupedExperts, GroupedMLP, parallelize_experts
from .grouped_linear import GroupedLinear, convert_grouped_state_dict

__all__ = [
    "DispatchMethod",
    "Dispatched",
    "Dispatcher",
    "GroupedExperts",
    "GroupedLinear",
    "GroupedMLP",
    "TokenDispatcher",
    "convert_experts_state_dict",
    "convert_grouped_state_dict",
    "group_experts",
    "group_experts_",
    "parallelize_experts",
]
