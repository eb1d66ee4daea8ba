"""What users pass: frozen dataclasses, checked when they are made. ``MixedPrecisionPolicy`` is torch's own class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch.distributed.fsdp import MixedPrecisionPolicy

ExchangeKind = Literal["gather", "exchange", "auto"]
ReduceScatterKind = Literal["ring", "all_to_all"]


@dataclass(frozen=True)
class SchedulePolicy:
    """How gathers and reduce-scatters are placed around compute.

    They change time and memory, and no result but the rounding of what ``reduce_scatter``, ``embedding`` and ``head``
    sum in another order or dtype.

    Args:
        prefetch_depth: Number of weights that are gathered ahead of the one in use. 0 gathers each weight when it is
            used. Each level costs one gathered weight of memory.
        max_inflight_reduce_scatters: Number of gradient send buffers that may wait for their reduce-scatter before
            compute waits for the oldest. At least 1. Each costs one full gradient of memory.
        min_shard_numel: A weight with fewer elements stays whole on every rank (``Replicate()``), because a collective
            for it costs more than it saves. 0 shards every weight with two or more dims.
        reduce_scatter: How gradients are summed over the ranks of the axis. ``"ring"`` is the backend's reduce-scatter,
            which sends and adds in ``reduce_dtype``. ``"all_to_all"`` sends in ``reduce_dtype``, adds on the receiving
            rank in float32 and accumulates in float32: with a 16-bit ``reduce_dtype`` the error does not grow with the
            axis. It costs one more full gradient of memory for each reduction in flight. Parameters that stay whole
            are then all-reduced in float32.
        embedding: How ``nn.Embedding`` is looked up where gradients are computed. ``"gather"`` gathers the table, as
            any weight. ``"exchange"`` leaves it where it is: each rank looks up its own rows for the tokens of all
            ranks, and the activations are exchanged, as are their gradients in backward. The activations are the same
            bits. ``"auto"`` takes what moves fewer bytes, decided in the first lookup by the most tokens of a rank
            there. An exchange carries so many tokens of each rank: fewer are padded, and more raise an error, unless
            all ranks have more. Without gradients, and where ranks do not hold whole rows (tensor parallelism,
            quantized tables), the table is gathered.
        head: How ``nn.functional.linear_cross_entropy`` computes losses where gradients are computed. ``"exchange"``:
            each rank computes the logits of its own rows of the vocabulary for the tokens of all ranks, and neither
            weight nor logits are ever whole. ``"gather"``: the weight is gathered, as any. ``"auto"`` as above.
        exchange_tokens: Most tokens of a rank in one call, for exchanges of activations. None takes those of the first
            call, in which ranks compare theirs.

    Raises:
        TypeError: A number is not an ``int``.
        ValueError: A field is out of its range, or names nothing that there is.
    """

    prefetch_depth: int = 2
    max_inflight_reduce_scatters: int = 2
    min_shard_numel: int = 1024
    reduce_scatter: ReduceScatterKind = "ring"
    embedding: ExchangeKind = "gather"
    head: ExchangeKind = "exchange"
    exchange_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("prefetch_depth", 0), ("max_inflight_reduce_scatters", 1), ("min_shard_numel", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"SchedulePolicy expects an int for {name}, but got {value!r}.")
            if value < least:
                raise ValueError(f"SchedulePolicy expects {name} >= {least}, but got {value}.")
        _check_choice("reduce_scatter", self.reduce_scatter, get_args(ReduceScatterKind))
        _check_choice("embedding", self.embedding, get_args(ExchangeKind))
        _check_choice("head", self.head, get_args(ExchangeKind))
        tokens = self.exchange_tokens
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool)):
            raise TypeError(f"SchedulePolicy expects an int or None for exchange_tokens, but got {tokens!r}.")
        if tokens is not None and tokens < 1:
            raise ValueError(f"SchedulePolicy expects exchange_tokens >= 1, but got {tokens}.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        known = " or ".join(f"'{choice}'" for choice in choices)
        raise ValueError(f"SchedulePolicy expects {known} as {name}, but got {value!r}.")


__all__ = ["ExchangeKind", "MixedPrecisionPolicy", "ReduceScatterKind", "SchedulePolicy"]
