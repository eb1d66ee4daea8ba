"""How many tokens of each rank an exchange of activations carries.

[Note: ranks with unequal numbers of tokens]
A collective needs one size on all ranks, but each rank knows only its own number of tokens. So there is a *capacity*:
the most tokens of a rank that one exchange carries. The user declares it, or the ranks agree on it in the first use.
Every rank always sends that many and pads if it has fewer, so all launch collectives of one size.

The first number that a rank sends is how many tokens it has. If all ranks have more than the capacity, each knows it
and reads the numbers of the others, and they agree on a larger capacity. If only some have more, these raise. The
others raise at once if the host can read the numbers; if it would have to wait, an assertion on the device fails. No
rank ever goes on with another rank's tokens missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from .collectives import Groups
from .context import CommContext

logger = logging.getLogger(__name__)


class TokenExchange:
    """The capacity that ranks of the last axis of ``mesh`` have agreed on for one kind of use of one weight.

    Args:
        fqn, shape, purpose: For messages: the weight's name and unsharded shape, and what the exchange does.
        declared: The capacity that the policy declares; None to agree on it in the first use.
        is_worth: Whether to exchange activations at a capacity; all ranks must get the same answer.
    """

    def __init__(
        self,
        fqn: str,
        shape: torch.Size,
        mesh: DeviceMesh,
        purpose: str,
        declared: int | None,
        is_worth: Callable[[int], bool],
    ) -> None:
        self._fqn, self._shape, self._mesh = fqn, shape, mesh
        self.purpose = purpose
        self._is_worth = is_worth
        self._is_declared = declared is not None
        self.capacity = 0  # 0 until it is known
        self.is_chosen = False
        if declared is not None:
            self._settle(declared)

    def gather(self, values: Tensor, fill: int, comm: CommContext, groups: Groups) -> Tensor | None:
        """Values of all ranks' tokens: int64, shape ``(world, capacity)``; None if the ranks agreed not to exchange.

        ``values`` has one integer for each token of this rank, 1-D; ``fill`` pads. If only some ranks have more tokens
        than the exchange carries, it raises ValueError, see the note above.
        """
        if not self.capacity:
            count = torch.tensor([values.numel()], device=values.device)
            self._settle(max(self._all_gather(count, "the number of tokens", comm, groups).flatten().tolist()))
        if not self.is_chosen:
            return None
        if comm.is_capturing and values.numel() > self.capacity:
            raise ValueError(self._complaint(f"{values.numel()} tokens in a recording"))
        message = torch.full((1 + self.capacity,), fill, dtype=torch.int64, device=values.device)
        message[:1].fill_(values.numel())  # an assignment would wait for the GPU
        num_sent = min(values.numel(), self.capacity)
        message[1 : 1 + num_sent] = values[:num_sent]
        received = self._all_gather(message, f"{self.capacity} tokens", comm, groups)
        counts = received[:, 0]
        if values.numel() > self.capacity or not comm.has_streams:
            numbers = counts.tolist()
            if max(numbers) > self.capacity:
                if min(numbers) <= self.capacity or self._is_declared:
                    raise ValueError(self._complaint(f"{numbers} tokens"))
                self._settle(max(numbers))
                return self.gather(values, fill, comm, groups)
        else:
            compat.assert_on_device((counts <= self.capacity).all(), self._complaint("more tokens"))
        return received[:, 1:]

    def _all_gather(self, values: Tensor, what: str, comm: CommContext, groups: Groups) -> Tensor:
        if comm.is_capturing and not self.capacity:
            raise RuntimeError(f"{self._complaint('an unknown number of tokens')} Run one step before the capture.")
        received = values.new_empty((self._mesh.size(self._mesh.ndim - 1), values.numel()))
        with comm.scattering():  # idle in forward; the gather stream would first finish the gathers ahead
            comm.before_collective("all_gather", f"{what} for {self.purpose} of {self._fqn}", groups)
            work = compat.all_gather_base(received.view(-1), values, groups.scatter, not comm.has_streams)
            done = comm.scatter_done(work)
        comm.wait(done)
        return received

    def _settle(self, capacity: int) -> None:
        """Take a capacity that all ranks know."""
        self.capacity = capacity
        self.is_chosen = capacity > 0 and self._is_worth(capacity)
        if capacity:
            logger.info("%s of %s: %s", self.purpose, self._fqn, self.describe())

    def _complaint(self, got: str) -> str:
        source = "the most of the first use, unless all ranks have more"
        if self._is_declared:
            source = "as SchedulePolicy(exchange_tokens=...) says"
        return (
            f"The {self.purpose} of parameter '{self._fqn}' of shape {tuple(self._shape)} expects at most "
            f"{self.capacity} tokens on each rank, {source}, of mesh axes {self._mesh.mesh_dim_names}, but got {got} "
            f"(rank {dist.get_rank()}). Set SchedulePolicy(exchange_tokens=...) to the most tokens that a rank may "
            "have, or gather the weight."
        )

    def describe(self) -> str:
        """For the report."""
        if not self.capacity:
            return "not agreed on yet"
        return f"exchange of up to {self.capacity} tokens per rank" if self.is_chosen else "gathered"
