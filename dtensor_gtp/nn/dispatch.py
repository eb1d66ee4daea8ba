"""Sends tokens to their experts and back: sorts by expert on one rank, exchanges where experts are distributed over
``ep``.

All exchanges are differentiable, and gradients are deterministic.

[Note: what the host must know]
``all_to_all`` sends each row to the rank of its expert. NCCL and gloo take the sizes as numbers on the host, so each
dispatch waits for the counts. ``all_gather`` sends every token to all ranks of ``ep``, where the rows of the rank's own
experts are sorted to the front of a buffer for the worst case. The host does not wait, and a CUDA graph can be replayed
with other routing. It moves about ``ep / k`` times as many bytes.

[Note: unequal numbers of tokens]
By ``all_gather`` all ranks send the same number of tokens: the capacity, which is declared or agreed on in the first
dispatch. A rank with fewer adds tokens that choose no expert. If all have more than the capacity, they agree on a
larger one. If only some do, all raise: at once on a CPU, elsewhere by an assertion on the device. So all ranks always
launch the same collectives.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from ..ops.embedding import padded


class DispatchMethod(enum.Enum):
    """How rows are sent to the ranks of their experts: ``method`` of :class:`TokenDispatcher`.

    ``ALL_TO_ALL`` sends each row to one rank; the counts go through the host. ``ALL_GATHER`` sends each token to all
    ranks of ``ep``; nothing goes through the host, so a CUDA graph can be replayed with other routing.

    Example:
        >>> DispatchMethod("all_to_all")
        <DispatchMethod.ALL_TO_ALL: 'all_to_all'>
    """

    ALL_TO_ALL = "all_to_all"  # each row to one rank; the counts go through the host
    ALL_GATHER = "all_gather"  # each token to all ranks of ep; nothing goes through the host


class Dispatcher(Protocol):
    """What brings tokens to experts and results back: assign your own to ``GroupedExperts.dispatcher``, after
    :func:`parallelize_experts`. :class:`TokenDispatcher` is one.

    It is one call around the experts, so it may multiply by the weights before or after rows travel (DeepEP and
    HybridEP sum up on the way), and keep sizes on the device (torch's ``symm_mem.all_to_all_vdev``). All ranks must
    run the experts as often as each other: each use of a weight is a collective.

    Example:
        >>> class Everyone:  # each expert sees each token
        ...     def __call__(self, run_experts, tokens, experts, weights):
        ...         split_sizes = torch.tensor([len(tokens)] * 2)
        ...         results = run_experts(tokens.repeat(2, 1), split_sizes).chunk(2)
        ...         shares = [((experts == i) * weights).sum(1, keepdim=True) for i in range(2)]
        ...         return sum(y * share for y, share in zip(results, shares))
        >>> experts = GroupedExperts(GroupedMLP(num_groups=2, dim=16, hidden_dim=32))
        >>> experts.dispatcher = Everyone()
        >>> tokens, weights = torch.randn(6, 16), torch.ones(6, 1)
        >>> experts(tokens, torch.zeros(6, 1, dtype=torch.int64), weights).shape
        torch.Size([6, 16])
    """

    def __call__(
        self, run_experts: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, experts: Tensor, weights: Tensor
    ) -> Tensor:
        """The weighted sums of the experts' results, shape ``(num_tokens, dim)``.

        Args:
            run_experts: Takes rows, sorted by expert of this rank, and the number of rows of each, int32 or int64 on
                the device of the rows. Rows beyond their sum are padding. Returns what the experts make of each row.
            tokens: Of this rank, shape ``(num_tokens, dim)``.
            experts: Chosen by each token, shape ``(num_tokens, k)``, int64, counted over all ranks.
            weights: Their weights, same shape.
        """
        ...


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Rows for the experts of this rank, and the way back.

    Args:
        rows: Sorted by expert, shape ``(num_rows, dim)``. Rows beyond the sum of ``split_sizes`` belong to no expert.
        split_sizes: Rows of each expert of this rank, int64 on the device of ``rows``.
        tokens_per_expert: How many of this rank's own tokens chose each expert, all experts counted, int64.

    Example:
        >>> dispatcher = TokenDispatcher(num_experts=3)
        >>> dispatched = dispatcher.dispatch(torch.eye(4), torch.tensor([[2], [0], [2], [0]]))
        >>> dispatched.rows.argmax(1), dispatched.split_sizes  # tokens 1 and 3, then 0 and 2
        (tensor([1, 3, 0, 2]), tensor([2, 0, 2]))
    """

    rows: Tensor
    split_sizes: Tensor
    tokens_per_expert: Tensor
    _order: Tensor
    # Of an all-to-all: rows sent to and received from each rank, and the order of rows by expert among those received.
    _exchange: tuple[list[int], list[int], Tensor] | None = None
    _capacity: int = 0  # tokens that each rank has sent by all_gather: a later dispatch may have agreed on more


class TokenDispatcher:
    """Brings tokens to their experts and the experts' results back.

    Args:
        num_experts: Experts, over all ranks of ``mesh``. Rank ``r`` has the ``r``-th of ``mesh.size()`` equal parts.
        mesh: 1-D, the axis over which experts are distributed; None if every rank has all of them.
        method: With a mesh: ``"all_to_all"`` or ``"all_gather"``, see :class:`DispatchMethod`.
        max_tokens: For ``"all_gather"``: most tokens of a rank in one dispatch, the same on all ranks. None takes the
            most of the first dispatch. Ranks with fewer send padding.

    Raises:
        ValueError: The mesh is not 1-D, does not divide the experts, there is no such method, or ``max_tokens`` is
            below 1.

    Example:
        >>> mesh = init_weight_mesh("cpu", dp=4, ep=4)
        >>> dispatcher = TokenDispatcher(num_experts=8, mesh=mesh["ep"])
        >>> tokens, experts = torch.randn(8, 16), torch.arange(16).view(8, 2) % 8
        >>> dispatched = dispatcher.dispatch(tokens, experts)
        >>> int(dispatched.split_sizes.sum())  # rows of all ranks for two experts
        16
        >>> weights = torch.full((8, 2), 0.5)
        >>> dispatcher.combine(dispatched.rows, dispatched, weights).allclose(tokens)
        True
    """

    def __init__(
        self,
        num_experts: int,
        mesh: DeviceMesh | None = None,
        *,
        method: str | DispatchMethod = "all_to_all",
        max_tokens: int | None = None,
    ) -> None:
        if mesh is not None and mesh.ndim != 1:
            got = f"mesh axes {mesh.mesh_dim_names} of shape {tuple(mesh.shape)}"
            raise ValueError(f"TokenDispatcher expects a 1-D mesh, but got {got}. Pass one axis, e.g. mesh['ep'].")
        if method not in {m.value for m in DispatchMethod} | set(DispatchMethod):
            known = ", ".join(repr(m.value) for m in DispatchMethod)
            raise ValueError(f"TokenDispatcher expects one of {known} as method, but got {method!r}.")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"TokenDispatcher expects max_tokens >= 1, but got {max_tokens}.")
        self.mesh = mesh
        self.method = DispatchMethod(method)
        self.num_experts = num_experts
        self._is_declared = max_tokens is not None
        self._capacity = max_tokens or 0  # 0 until it is known, see [Note: unequal numbers of tokens]
        self.num_local = experts_per_rank(num_experts, mesh)

    def __call__(
        self, run_experts: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, experts: Tensor, weights: Tensor
    ) -> Tensor:
        """:meth:`dispatch`, the experts, :meth:`combine`: what a :class:`Dispatcher` does."""
        dispatched = self.dispatch(tokens, experts)
        return self.combine(run_experts(dispatched.rows, dispatched.split_sizes), dispatched, weights)

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self.mesh is not None
        return self.mesh.get_group()

    def dispatch(self, tokens: Tensor, experts: Tensor) -> Dispatched:
        """Rows for the experts of this rank, from all ranks of the mesh. All of them must call it.

        Args:
            tokens: Shape ``(num_tokens, dim)``.
            experts: The experts of each token, shape ``(num_tokens, k)``, int64; no expert twice for a token. Numbers
                below 0 or from ``num_experts`` on stand for no expert.

        Returns:
            The rows, sorted by expert, and what :meth:`combine` needs to bring them back.

        Raises:
            ValueError, TypeError: The shapes do not fit or ``experts`` is not int64; with ``"all_gather"``, a rank has
                more tokens than a dispatch carries.
            RuntimeError: The first dispatch by ``"all_gather"`` is recorded into a CUDA graph.
        """
        if tokens.ndim != 2 or experts.ndim != 2 or experts.shape[0] != tokens.shape[0]:
            what = "tokens of shape (num_tokens, dim) and experts of shape (num_tokens, k)"
            raise ValueError(
                f"TokenDispatcher expects {what}, but got {tuple(tokens.shape)} and {tuple(experts.shape)}."
            )
        if experts.dtype != torch.int64:
            raise TypeError(f"TokenDispatcher expects experts as int64, but got {experts.dtype}.")
        is_alone = self.mesh is None or self.mesh.size() == 1
        if not is_alone and self.method is DispatchMethod.ALL_GATHER:
            return self._gather(tokens, experts)
        # Copy ``i`` of token ``t`` has the number ``t * k + i``.
        order, counts = sort_by_group(experts.flatten(), self.num_experts)
        if not is_alone:
            return self._exchange(tokens, experts.shape[1], counts, order)
        rows = _Spread.apply(tokens, order, experts.shape[1])  # type: ignore[no-untyped-call]
        return Dispatched(rows, counts, counts, order)  # all experts are on this rank

    def combine(self, rows: Tensor, dispatched: Dispatched, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, on the rank of the token.

        Args:
            rows: What the experts made of ``dispatched.rows``, in the same order.
            dispatched: What :meth:`dispatch` has returned.
            weights: Of the experts of each token, shape ``(num_tokens, k)``, floating point.

        Returns:
            Shape ``(num_tokens, dim)``, in the dtype of ``rows``.
        """
        assert dispatched.rows.shape[0] == rows.shape[0], "combine expects the rows that dispatch has returned"
        if dispatched._capacity:  # sent by all_gather
            all_weights = compat.all_gather_rows(padded(weights, dispatched._capacity), self._group)
            # Rows of other ranks' experts are zeros here. The sum over ranks completes each token.
            spread = _unpermute(rows, dispatched._order, all_weights.numel())
            own = compat.reduce_scatter_rows(_weighted_sum(spread, all_weights), self._group)
            if own.shape[0] == weights.shape[0]:
                return own
            return own[: weights.shape[0]]  # without the padding
        if dispatched._exchange is not None:
            sent, received, order = dispatched._exchange
            # The way back: each rank receives as many rows as it has sent.
            rows = compat.all_to_all_rows(_unpermute(rows, order, rows.shape[0]), sent, received, self._group)
        return _weighted_sum(_unpermute(rows, dispatched._order, weights.numel()), weights)

    def _exchange(self, tokens: Tensor, k: int, counts: Tensor, order: Tensor) -> Dispatched:
        """All-to-all."""
        group = self._group
        # By rank and expert of this rank: rows to receive. By rank and expert of that rank: rows to send.
        incoming_RE = compat.all_to_all_rows(counts, None, None, group).view(group.size(), self.num_local)
        outgoing_RE = counts.view(group.size(), self.num_local)
        # The host waits for these sizes, see [Note: what the host must know].
        sent, received = torch.stack([outgoing_RE.sum(1), incoming_RE.sum(1)]).tolist()
        order = order[: sum(sent)]  # rows of no expert are the last ones and stay here
        rows = _Spread.apply(tokens, order, k)  # type: ignore[no-untyped-call]
        rows = compat.all_to_all_rows(rows, received, sent, group)
        # Rows come in by source rank, and by expert within one. The stable sort puts those of an expert together.
        # ``output_size`` is known, so ``repeat_interleave`` does not wait for it.
        experts = torch.arange(self.num_local, device=rows.device).repeat(group.size())
        by_source = torch.repeat_interleave(experts, incoming_RE.flatten(), output_size=sum(received))
        regroup = by_source.argsort(stable=True)
        rows = _Spread.apply(rows, regroup, 1)  # type: ignore[no-untyped-call]
        return Dispatched(rows, incoming_RE.sum(0), counts, order, (sent, received, regroup))

    def _gather(self, tokens: Tensor, experts: Tensor) -> Dispatched:
        k = experts.shape[1]
        rank = self._group.rank()
        all_experts = self._gather_experts(experts)
        all_tokens = compat.all_gather_rows(padded(tokens, self._capacity), self._group)
        local = all_experts - rank * self.num_local  # padding has a number that is no expert of any rank
        is_mine = (local >= 0) & (local < self.num_local)
        # Rows for other ranks go to the end, into a group that no layer has.
        order, counts = sort_by_group(torch.where(is_mine, local, self.num_local).flatten(), self.num_local)
        # A token chooses an expert once, which limits the rows for this rank.
        order = order[: all_tokens.shape[0] * min(k, self.num_local)]
        rows = _Spread.apply(all_tokens, order, k)  # type: ignore[no-untyped-call]
        _, own_counts = sort_by_group(experts.flatten(), self.num_experts)  # of this rank's tokens alone
        return Dispatched(rows, counts, own_counts, order, _capacity=self._capacity)

    def _gather_experts(self, experts: Tensor) -> Tensor:
        """What the tokens of all ranks chose, shape ``(ranks * capacity, k)``; ``num_experts`` for padding."""
        group = self._group
        (num_tokens, k) = experts.shape
        device = experts.device
        is_capturing = device.type == "cuda" and compat.is_stream_capturing()
        if not self._capacity:
            if is_capturing:
                raise RuntimeError(f"{self._complaint('an unknown number')} Run one step before the capture.")
            # The host waits here, once for each dispatcher.
            counts = compat.all_gather_rows(torch.tensor([num_tokens], device=device), group)
            self._capacity = max(1, *counts.tolist())  # 0 means unknown
        elif is_capturing and num_tokens > self._capacity:  # to agree on more, the host would have to wait
            raise ValueError(self._complaint(f"{num_tokens}, while a CUDA graph is recorded,"))
        # The first row holds the number of tokens.
        message = torch.full((self._capacity + 1, k), self.num_experts, dtype=torch.int64, device=device)
        message[0].fill_(num_tokens)  # an assignment would wait for the GPU
        # A rank with too many sends the first ones: its number tells the others.
        num_sent = min(num_tokens, self._capacity)
        message[1 : num_sent + 1] = experts[:num_sent]
        received = compat.all_gather_rows(message, group).view(group.size(), self._capacity + 1, k)
        counts = received[:, 0, 0]
        if num_tokens <= self._capacity and (device.type != "cpu" or torch.compiler.is_compiling()):
            compat.assert_on_device((counts <= self._capacity).all(), self._complaint("more"))
        elif max(found := counts.tolist()) > self._capacity:  # read by a rank with too many, and on CPUs
            if min(found) <= self._capacity or self._is_declared:
                raise ValueError(self._complaint(str(found)))
            self._capacity = max(found)
            return self._gather_experts(experts)  # all ranks do so, because all have seen the same numbers
        return received[:, 1:].reshape(-1, k)

    def _complaint(self, got: str) -> str:
        assert self.mesh is not None
        limit = "the most of the first dispatch, unless all ranks have more"
        if self._is_declared:
            limit = "max_tokens"
        return (
            f"TokenDispatcher by 'all_gather' expects at most {self._capacity} tokens on each rank ({limit}), but got "
            f"{got} on ranks {dist.get_process_group_ranks(self._group)} of mesh axes {self.mesh.mesh_dim_names}. Set "
            "max_tokens to the most that a rank may have, or use 'all_to_all'."
        )


def experts_per_rank(num_experts: int, mesh: DeviceMesh | None) -> int:
    if mesh is None:
        num_ranks = 1
    else:
        num_ranks = mesh.size()
    if num_experts < 1 or num_experts % num_ranks:
        name = "ep"
        if mesh is not None and mesh.mesh_dim_names:
            name = mesh.mesh_dim_names[0]
        what = f"a number of experts that the {num_ranks} ranks of mesh axis '{name}' divide, but got {num_experts}"
        raise ValueError(f"Expert parallelism expects {what}. Choose an axis whose size divides it.")
    return num_experts // num_ranks


def sort_by_group(groups: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """A stable order of rows by their group, and how many rows each of ``num_groups`` has, without a wait of the host.
    Rows with other numbers, below 0 or from ``num_groups`` on, are sorted to the end and not counted."""
    groups = groups.masked_fill(groups < 0, num_groups)  # -1 is no expert in DeepEP and Megatron
    ordered, order = groups.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(num_groups, device=groups.device), right=True)
    return order, ends.diff(prepend=ends.new_zeros(1))


def _unpermute(rows: Tensor, order: Tensor, num_rows: int) -> Tensor:
    """Undo ``x[order]`` of ``num_rows`` rows; those that ``order`` leaves out are zeros. Its gradient is
    ``grad[order]``."""
    shape = (num_rows, rows.shape[1])
    if order.shape[0] == num_rows:
        return rows.new_empty(shape).index_copy(0, order, rows)
    return rows.new_zeros(shape).index_copy(0, order, rows)


def _weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum of each token's ``k`` rows, in the wider of the dtypes, rounded once."""
    each = rows.view(*weights.shape, rows.shape[1])
    return (each * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


class _Spread(torch.autograd.Function):
    """The rows ``order`` of ``k`` copies of each row. Unlike indexing, it sums up gradients in a fixed order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, order if k == 1 else order // k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        copies = _unpermute(grad, order, ctx.num_rows * ctx.k)  # the gradient of those that were left out is zero
        return copies if ctx.k == 1 else copies.view(ctx.num_rows, ctx.k, grad.shape[1]).sum(1), None, None
