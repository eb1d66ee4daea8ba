"""The one error of the planner."""

from __future__ import annotations


class PlanError(ValueError):
    """The planner cannot answer: the message is one line that says what is wrong and how to mend it."""
