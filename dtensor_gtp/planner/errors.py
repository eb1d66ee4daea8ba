"""The one error of the planner."""

from __future__ import annotations

from .._howto import printable


class PlanError(ValueError):
    """The planner cannot answer: the message is one line that says what is wrong and how to mend it.

    Example:
        >>> plan("llama3-8b", "h100", gpus=6, fixed={"gtp": 4})
        Traceback (most recent call last):
        dtensor_gtp.planner.errors.PlanError: plan expects a product of axes ...
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def expect(is_fine: object, expected: str, found: str) -> None:
    """Raise, unless all is fine: what is ``expected``, but what was ``found`` and how to mend it."""
    if not is_fine:
        raise PlanError(f"{expected}, but {found}")
