"""How many tokens of each rank an exchange of activations carries.

[Note: ranks with unequal numbers of tokens]
A collective needs one size on all ranks, but each rank knows only its own number of tokens. So
there is a *capacity*: each rank sends that many tokens and pads if it has fewer. Ranks learn it in
one of two ways:

* Eager code exchanges the numbers on the host in each call. The capacity is the largest. So any
  lengths are right, and all ranks decide alike whether to exchange or to gather.
* If the user declares it (``SchedulePolicy.exchange_tokens``), or ``capture_step`` may replay steps
  without the host, the capacity is fixed: declared, or the largest number of the first use. The
  first number that a rank sends is how many tokens it has. If all ranks have more than the
  capacity, each knows it and reads the numbers of the others, and they agree on a larger capacity.
  If only some have more, these raise. The others raise at once if the host can read the numbers; if
  it would have to wait, an assertion on the device fails. No rank goes on without another's tokens.
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
    """The capacity that ranks of the last axis of ``mesh`` have agreed on for one kind of use of
    one weight.

    Args:
        fqn, shape, purpose: For messages: the weight's name and unsharded shape, and what the
            exchange does.
        declared: The capacity that the policy declares; None to agree on it.
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
        self._fqn = fqn
        self._shape = shape
        self._mesh = mesh
        self.purpose = purpose
        self._is_worth = is_worth
        self._is_declared = declared is not None
        self.capacity = 0  # 0 until it is known
        self.is_chosen = False  # whether ranks exchange activations at this capacity
        if declared is not None:
            self._settle(declared)

    def gather(self, values: Tensor, fill: int, comm: CommContext, groups: Groups) -> Tensor | None:
        """Values of all ranks' tokens: int64, shape ``(world, capacity)``; None if the ranks agreed
        not to exchange.

        ``values`` has one integer for each token of this rank, 1-D; ``fill`` pads. If only some
        ranks have more tokens than the exchange carries, it raises ValueError, see the note above.
        """
        # Then no rank asks the others before it sends.
        is_fixed = self._is_declared or comm.may_replay_steps or comm.streams.is_capturing
        if not (is_fixed and self.capacity):
            self._settle(self._most_tokens(values.numel(), comm, groups))
        if not self.is_chosen:
            return None
        # Here, because a recording cannot agree on a larger capacity.
        if comm.streams.is_capturing and values.numel() > self.capacity:
            raise ValueError(self._complaint(f"{values.numel()} tokens in a recording"))
        message = torch.full((1 + self.capacity,), fill, dtype=torch.int64, device=values.device)
        message[:1].fill_(values.numel())  # an assignment would wait for the GPU
        num_sent = min(values.numel(), self.capacity)
        message[1 : 1 + num_sent] = values[:num_sent]  # a rank with more still sends how many it has
        received = message.new_empty((self._mesh.size(self._mesh.ndim - 1), message.numel()))
        what = f"{self.capacity} tokens for {self.purpose} of {self._fqn}"
        comm.streams.wait(comm.launch(compat.all_gather_base, what, groups, received.view(-1), message))
        counts = received[:, 0]
        # The host reads the numbers where this rank must know who else has more, or need not wait.
        if is_fixed and (values.numel() > self.capacity or not comm.streams.has_streams):
            numbers = counts.tolist()
            if max(numbers) > self.capacity:
                # Not all ranks know of it, so they cannot agree on more.
                if min(numbers) <= self.capacity or self._is_declared:
                    raise ValueError(self._complaint(f"{numbers} tokens"))
                self._settle(max(numbers))
                return self.gather(values, fill, comm, groups)
        elif is_fixed:
            # The host would have to wait for the numbers: a kernel checks them.
            compat.assert_on_device((counts <= self.capacity).all(), self._complaint("more tokens"))
        return received[:, 1:]

    def _most_tokens(self, num_tokens: int, comm: CommContext, groups: Groups) -> int:
        """The most tokens of a rank. Ranks exchange it on the host: they would have to wait for a
        device."""
        if comm.streams.is_capturing:
            complaint = self._complaint("an unknown number of tokens")
            raise RuntimeError(f"{complaint} Run one step before the capture.")
        if comm.is_debugged:
            what = f"the number of tokens for {self.purpose} of {self._fqn}"
            comm.before_collective("all_reduce", what, groups)
        most = torch.tensor([num_tokens])
        host = compat.host_group(groups.gather, comm.streams.device, "gtp_host")
        dist.all_reduce(most, dist.ReduceOp.MAX, group=host)
        return int(most)

    def _settle(self, capacity: int) -> None:
        """Take a capacity that all ranks know."""
        is_first = not self.capacity
        was_chosen = self.is_chosen
        self.capacity = capacity
        self.is_chosen = capacity > 0 and self._is_worth(capacity)  # 0: no rank has a token
        if capacity and (is_first or self.is_chosen != was_chosen):
            logger.info("%s of %s: %s", self.purpose, self._fqn, self.describe())

    def _complaint(self, got: str) -> str:
        source = "the most of the first use, because the host does not take part in a replay of capture_step"
        if self._is_declared:
            source = "as SchedulePolicy(exchange_tokens=...) says"
        return (
            f"The {self.purpose} of parameter '{self._fqn}' of shape {tuple(self._shape)} expects "
            f"at most {self.capacity} tokens on each rank, {source}, of mesh axes "
            f"{self._mesh.mesh_dim_names}, but got {got} (rank {dist.get_rank()}). Set "
            "SchedulePolicy(exchange_tokens=...) to the most tokens that a rank may have, or "
            "gather the weight."
        )

    def describe(self) -> str:
        """For the report."""
        if not self.capacity:
            return "not agreed on yet"
        if not self.is_chosen:
            return "gathered"
        return f"exchange of up to {self.capacity} tokens per rank"
