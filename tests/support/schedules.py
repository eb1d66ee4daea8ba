"""Policies with fixed numbers, for tests that pin what is gathered when."""

from __future__ import annotations

from typing import Any

from dtensor_gtp import SchedulePolicy
from dtensor_gtp.policy import Schedule
from dtensor_gtp.policy import fixed_policy as explicit

__all__ = ["changed", "explicit"]


def changed(policy: SchedulePolicy, **options: Any) -> SchedulePolicy:
    """An explicit ``policy`` with other ``options``."""
    own = {name: value for name, value in vars(policy).items() if name not in {*vars(Schedule()), "_numbers"}}
    return explicit(**{**own, **dict(policy._numbers), **options})
