"""What stands for a sharded weight in the autograd graph of compiled code."""

from __future__ import annotations

import torch

from .. import _torch_compat as compat


class StandIn:
    """A leaf of one number on the host: ``ops/compiled.py`` says why it is a number, and why there.

    Args:
        requires_grad: Whether the weight needs a gradient, now; a weight that is frozen later gets another one.
    """

    def __init__(self, requires_grad: bool) -> None:
        with torch.inference_mode(False):
            self.leaf = torch.zeros(1, device="cpu", requires_grad=requires_grad)
        self._node = compat.accumulate_node(self.leaf) if requires_grad else None

    @property
    def is_awaited(self) -> bool:
        """Whether the backward that runs now wants the weight's gradient."""
        return self._node is not None and compat.is_node_awaited(self._node)
