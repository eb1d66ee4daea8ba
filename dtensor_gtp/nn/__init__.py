"""Modules that torch does not have."""

from .grouped_linear import GroupedLinear, convert_grouped_state_dict

__all__ = ["GroupedLinear", "convert_grouped_state_dict"]
