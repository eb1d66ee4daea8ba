"""The policies that users pass. ``SchedulePolicy`` checks its fields; ``MixedPrecisionPolicy`` is torch's own class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

ExchangeKind = Literal["gather", "exchange", "auto"]
ReduceScatterKind = Literal["ring", "all_to_all", "copy_engine"]
GatherBackendName = Literal["process_group", "copy_engine", "auto"]


class GatherBackend(Protocol):
    """The interface of a class that is passed as ``SchedulePolicy.gather_backend``.

    One object is made for each communicator, at the first forward, on all of its ranks. If the constructor raises on
    one rank, all ranks of the mesh raise. All ranks call its gathers in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None: ...

    def all_gather(self, outputs: list[Tensor], shards: list[Tensor]) -> Waitable | None:
        """Gather each shard of all ranks into the output at the same index, on the current stream.

        Args:
            outputs: Shape ``(world * rows, ...)``, contiguous, in rank order.
            shards: Shape ``(rows, ...)``, contiguous, same dtype; may be this rank's own slice of the output.

        Returns:
            On devices without streams: an object to wait for the gather. None if the gather is complete, or if the
            stream orders it.
        """


class Waitable(Protocol):
    """Work in the background."""

    def wait(self) -> object:
        """Wait for it. Waiting twice is harmless."""


@dataclass(frozen=True)
class SchedulePolicy:
    """When weights are gathered and gradients reduced, and by which kinds of communication.

    The fields change time and memory. Results change only by rounding: ``reduce_scatter``, ``embedding``, ``head`` and
    ``coalesce_grad_nbytes`` may sum in another order or dtype.

    Args:
        prefetch_depth: At least this many weights are gathered ahead of the one in use. 0 gathers each weight when it
            is used.
        max_inflight_reduce_scatters: Number of gradient send buffers that may wait for their reduce-scatter before
            compute waits for the oldest. At least 1. Each costs one full gradient of memory.
        min_shard_numel: A weight with fewer elements stays whole on every rank (``Replicate()``), because a collective
            for it costs more than it saves. 0 shards every weight with two or more dims.
        reduce_scatter: How gradients are summed over the ranks of the axis. ``"ring"`` is the backend's reduce-scatter,
            which sends and adds in ``reduce_dtype``. ``"all_to_all"`` sends in ``reduce_dtype``, adds on the receiving
            rank in float32 and accumulates in float32: with a 16-bit ``reduce_dtype`` the error does not grow with the
            axis. It costs one more full gradient of memory for each reduction in flight. Parameters that stay whole
            are then all-reduced in float32. ``"copy_engine"`` computes the same sum, but the copy engines of GPUs of
            one host fetch the addends of peers.
        embedding: How ``nn.Embedding`` looks up tokens if gradients are computed. ``"gather"`` gathers the table, like
            any weight. ``"exchange"`` does not: each rank looks up its own rows for the tokens of all ranks, and ranks
            exchange the activations, and their gradients in backward. The activations are the same bits. ``"auto"``
            takes what moves fewer bytes; the first lookup decides, by the largest number of tokens of a rank. An
            exchange carries this number of tokens of each rank: fewer are padded, and more raise an error, unless all
            ranks have more. Without gradients, and if ranks do not hold whole rows (tensor parallelism, quantized
            tables), the table is gathered.
        head: How ``nn.functional.linear_cross_entropy`` computes losses if gradients are computed. ``"exchange"``: each
            rank computes the logits of its own rows of the vocabulary for the tokens of all ranks; no rank holds the
            whole weight or all logits. ``"gather"``: the weight is gathered, like any. ``"auto"`` as above.
        exchange_tokens: Largest number of tokens of a rank in one call, for exchanges of activations. None takes that
            of the first call, in which ranks compare theirs.
        prefetch_nbytes: At least this many bytes of weights are gathered ahead of the one in use. The gather of a
            larger weight begins as many bytes ahead as the weight has. 0 leaves it to ``prefetch_depth``. The larger of
            the two windows counts: at most these bytes and one weight, or ``prefetch_depth`` weights, are gathered
            ahead. A link of 300 GB/s moves the default in about a millisecond.
        coalesce_nbytes: Successive weights of at most this size together are gathered in one operation; 0 gathers each
            by itself. Every operation costs the host a launch, and on all ranks it waits until GEMMs leave it room.
            With the default, about half a block of a model with 8 billion parameters is gathered together.
        coalesce_grad_nbytes: Successive gradients of at most this size together are reduce-scattered in one operation;
            0 reduces each by itself. They wait for each other. No compute hides the last ones at the end of backward:
            less than half a millisecond on a link of 300 GB/s with the default. The rounding of a sum may depend on
            what is reduced in the same operation.
        expert_blocks_ahead: Weights of ``gtp_shard`` calls on other meshes than the outermost one, such as experts, are
            gathered this many calls ahead, each while its counterpart of the earlier call is used. Each call ahead
            costs the memory of its gathered weights. 0 treats them like all others.
        keep_nbytes: Bytes of gathered weights that may be kept from forward to backward, which saves a gather of each.
            Those are kept that backward uses first, where the least compute hides a gather; the report names them.
            Weights that ``keep_last`` and ``reshard_after_forward=False`` keep come in addition.
        gather_backend: Who gathers. ``"process_group"``: the process group of the mesh. ``"copy_engine"``: the copy
            engines of GPUs of one host, through symmetric memory, which leaves all SMs to the GEMMs but costs the host
            a launch for each peer. ``"auto"``: copy engines if all ranks of the mesh can have them, else the process
            group; the report says which and why. A class: one object of it is made for each communicator, see
            :class:`GatherBackend`.
        wgrad_first: Whether backward of a linear or grouped layer computes the gradient of its weight before that of
            its input. Then the first GEMM hides the end of the weight's gather, and the second the reduce-scatter.
            False computes it after the gathered weight has been freed. If one layer (a head) causes the peak of memory,
            the peak is lower by the smaller of weight and gradient.
        keep_last: Whether the last weight of the forward, if it is the first of backward (a head), stays gathered in
            between. False gathers it once more when the gradient of the loss is there. Nothing hides this gather, but
            the loss, where logits are largest, can use the weight's memory.

    Raises:
        TypeError: A number is not an ``int``, or a flag not a ``bool``.
        ValueError: A field is out of its range, or is not one of its choices.
    """

    prefetch_depth: int = 2
    max_inflight_reduce_scatters: int = 2
    min_shard_numel: int = 1024
    reduce_scatter: ReduceScatterKind = "ring"
    embedding: ExchangeKind = "gather"
    head: ExchangeKind = "exchange"
    exchange_tokens: int | None = None
    prefetch_nbytes: int = 256 << 20
    coalesce_nbytes: int = 256 << 20
    coalesce_grad_nbytes: int = 128 << 20
    expert_blocks_ahead: int = 1
    keep_nbytes: int = 0
    gather_backend: GatherBackendName | type[GatherBackend] = "process_group"
    wgrad_first: bool = True
    keep_last: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"SchedulePolicy expects an int for {name}, but got {value!r}.")
            if value < least:
                raise ValueError(f"SchedulePolicy expects {name} >= {least}, but got {value}.")
        for name in ("wgrad_first", "keep_last"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"SchedulePolicy expects a bool for {name}, but got {value!r}.")
        _check_choice("reduce_scatter", self.reduce_scatter, get_args(ReduceScatterKind))
        _check_choice("embedding", self.embedding, get_args(ExchangeKind))
        _check_choice("head", self.head, get_args(ExchangeKind))
        tokens = self.exchange_tokens
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool)):
            raise TypeError(f"SchedulePolicy expects an int or None for exchange_tokens, but got {tokens!r}.")
        if tokens is not None and tokens < 1:
            raise ValueError(f"SchedulePolicy expects exchange_tokens >= 1, but got {tokens}.")
        if not isinstance(self.gather_backend, type):
            _check_choice("gather_backend", self.gather_backend, get_args(GatherBackendName))


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        known = " or ".join(f"'{choice}'" for choice in choices)
        raise ValueError(f"SchedulePolicy expects {known} as {name}, but got {value!r}.")


_LEAST = {
    "prefetch_depth": 0,
    "max_inflight_reduce_scatters": 1,
    "min_shard_numel": 0,
    "prefetch_nbytes": 0,
    "coalesce_nbytes": 0,
    "coalesce_grad_nbytes": 0,
    "expert_blocks_ahead": 0,
    "keep_nbytes": 0,
}
__all__ = [
    "ExchangeKind",
    "GatherBackend",
    "GatherBackendName",
    "MixedPrecisionPolicy",
    "ReduceScatterKind",
    "SchedulePolicy",
    "Waitable",
]
