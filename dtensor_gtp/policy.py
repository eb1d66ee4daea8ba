"""The policies that users pass. ``SchedulePolicy`` checks its fields; ``MixedPrecisionPolicy`` is torch's own class."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

ExchangeKind = Literal["gather", "exchange", "auto"]
"""What moves for an embedding or a head.

``"gather"``: the weight. ``"exchange"``: activations. ``"auto"``: whichever has fewer bytes.

Example:
    >>> SchedulePolicy(embedding="exchange").embedding
    'exchange'
"""
Memory = Literal["balanced", "least", "most_speed"]
"""How much memory a schedule may take, see ``SchedulePolicy.memory``.

Example:
    >>> SchedulePolicy(memory="most_speed").memory
    'most_speed'
"""
ReduceScatterKind = Literal["ring", "all_to_all", "copy_engine"]
"""How gradients are summed once that is chosen, see ``SchedulePolicy.reduce_scatter``.

Example:
    >>> SchedulePolicy(reduce_scatter="all_to_all").reduce_scatter
    'all_to_all'
"""
ReduceScatterName = Literal["ring", "all_to_all", "copy_engine", "auto"]
"""What ``SchedulePolicy.reduce_scatter`` takes, which is a :data:`ReduceScatterKind`, or ``"auto"`` to leave it open.

Example:
    >>> SchedulePolicy().reduce_scatter
    'auto'
"""
GatherBackendName = Literal["process_group", "copy_engine", "auto"]
"""What ``SchedulePolicy.gather_backend`` takes beside a class that is a :class:`GatherBackend`.

Example:
    >>> SchedulePolicy(gather_backend="process_group").gather_backend
    'process_group'
"""


class GatherBackend(Protocol):
    """The interface of a class that is passed as ``SchedulePolicy.gather_backend``.

    One object is made for each communicator, at the first forward, on all of its ranks. If the constructor raises on
    one rank, all ranks of the mesh raise. All ranks call its gathers in the same order.

    Args:
        group: The process group of the communicator.
        device: Where shards and outputs are.

    Example:
        >>> import torch.distributed as dist
        >>> class OwnGather:
        ...     def __init__(self, group, device):
        ...         self.group = group
        ...     def all_gather(self, outputs, shards):
        ...         for output, shard in zip(outputs, shards):
        ...             dist.all_gather_into_tensor(output, shard, group=self.group)
        >>> model = nn.Linear(64, 64)
        >>> mesh = init_weight_mesh("cpu", gtp=4)
        >>> policy = SchedulePolicy(gather_backend=OwnGather)
        >>> model = gtp_shard(model, mesh.weights, schedule=policy)
        >>> model(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None: ...

    def all_gather(self, outputs: list[Tensor], shards: list[Tensor]) -> Waitable | None:
        """Gather each shard of all ranks into the output at the same index, on the current stream.

        Args:
            outputs: Shape ``(world * rows, ...)``, contiguous, in rank order.
            shards: Shape ``(rows, ...)``, contiguous, same dtype; may be this rank's own slice of the output.

        Returns:
            On devices without streams an object to wait for the gather; None if the gather is complete, or if the
            stream orders it.
        """


class Waitable(Protocol):
    """Work in the background: what :meth:`GatherBackend.all_gather` may return. torch's ``dist.Work`` is one.

    Example:
        >>> class Done:
        ...     def wait(self):
        ...         return None
        >>> work: Waitable = Done()
        >>> work.wait()
    """

    def wait(self) -> object:
        """Wait for it. Waiting twice is harmless."""


@dataclass(frozen=True)
class Schedule:
    """The numbers that ``SchedulePolicy`` leaves open and the first forward chooses.

    The same on all ranks. :meth:`SchedulePolicy.chosen() <dtensor_gtp.SchedulePolicy.chosen>` carries one.

    Args:
        prefetch_depth: Number of weights, at least, that are gathered ahead of the one in use. 0 gathers each weight
            when it is used.
        prefetch_nbytes: Bytes of gathered weights, at least, that are gathered ahead. For a larger weight its own size
            counts. The larger of the two windows is used.
        coalesce_nbytes: Weights used one after the other are gathered in one launch up to this size. 0: each alone.
        coalesce_grad_nbytes: The same for the gradients of one launch.
        max_inflight_reduce_scatters: Launches of gradients before compute waits for the oldest.
        expert_blocks_ahead: Weights on other meshes than the outermost call's are gathered this many calls ahead. 0
            treats them as all others.
        keep_nbytes: Bytes of gathered weights that are kept from forward to backward, those first that backward uses
            first.
        keep_last: Keep the last weight of the forward, if it is the first of backward.
        wgrad_first: A layer computes the gradient of its weight before that of its input, to hide the weight's gather.
            False: after it, when the weight is freed.
        gather_backend: As in ``SchedulePolicy``.
        reduce_scatter: As in ``SchedulePolicy``.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> schedule = Schedule(prefetch_depth=1, keep_last=False)
        >>> schedule.max_inflight_reduce_scatters
        2
    """

    prefetch_depth: int = 2
    prefetch_nbytes: int = 256 << 20
    coalesce_nbytes: int = 256 << 20
    coalesce_grad_nbytes: int = 128 << 20
    max_inflight_reduce_scatters: int = 2
    expert_blocks_ahead: int = 1
    keep_nbytes: int = 0
    keep_last: bool = True
    wgrad_first: bool = True
    gather_backend: GatherBackendName | type[GatherBackend] = "process_group"
    reduce_scatter: ReduceScatterName = "ring"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = int(field.name == "max_inflight_reduce_scatters")
            if isinstance(value, int) and value < least:
                raise ValueError(f"Schedule expects {field.name} >= {least}, but got {value}.")


_GONE = {
    "prefetch_depth": "pass prefetch_nbytes, or let the library choose",
    "coalesce_nbytes": "what travels together is chosen; pass memory='least' for less memory",
    "coalesce_grad_nbytes": "what travels together is chosen; pass memory='least' for less memory",
    "max_inflight_reduce_scatters": (
        "the library chooses how many reductions are in flight; pass memory='least' for less memory"
    ),
    "expert_blocks_ahead": "the library chooses when to gather experts",
    "wgrad_first": "pass memory='least' for wgrad_first=False",
    "keep_last": "pass memory='least' for keep_last=False",
}


def _refuse_old_fields(cls: type[SchedulePolicy]) -> type[SchedulePolicy]:
    """A class decorator: fields of earlier versions and unknown ones raise, and name the right word."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: SchedulePolicy, *args: Any, **fields: Any) -> None:
        for name in fields.keys() & _GONE.keys():
            raise TypeError(f"SchedulePolicy has no field {name} any more: {_GONE[name]}.")
        names = [name for name in cls.__dataclass_fields__ if not name.startswith("_")]
        for name in sorted(fields.keys() - cls.__dataclass_fields__.keys()):
            close = get_close_matches(name, names, n=1, cutoff=0.5)
            if close:
                meant = f"Did you mean {close[0]}?"
            else:
                meant = f"The fields are {', '.join(names)}."
            raise TypeError(f"SchedulePolicy has no field {name}. {meant}")
        init(self, *args, **fields)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


@_refuse_old_fields
@dataclass(frozen=True)
class SchedulePolicy:
    """When weights are gathered and gradients reduced. ``SchedulePolicy()`` chooses everything.

    The first forward chooses all fields that are None or ``"auto"``, once and equally on all ranks, from the device,
    the links, the sizes of the model and the free memory. ``sharding_report`` lists each choice with its reason. A
    choice changes results only by rounding.

    Args:
        memory: ``"balanced"``: as fast as possible without more memory than ``fully_shard`` on each block takes.
            ``"least"``: little memory: smaller windows, no symmetric memory, and the head is gathered once more.
            ``"most_speed"``: weights may also stay gathered from forward to backward, ``keep_nbytes`` of them.
        gather_backend: Who gathers. ``"auto"``: copy engines where all ranks of the mesh are GPUs of one host that can
            map each other's memory, else the process group. ``"process_group"``: NCCL's kernels, or gloo's threads.
            ``"copy_engine"``: the copy engines, or an error. A class: one of these is made for each communicator, see
            :class:`~dtensor_gtp.policy.GatherBackend`.
        reduce_scatter: How gradients are summed over the ranks of the axis. ``"auto"``: ``"copy_engine"`` where gathers
            use copy engines, unless memory is to be least, else ``"ring"``. ``"ring"``: the process group sends and
            adds in ``reduce_dtype``; within a host, gradients of a narrower dtype travel as they are, and receivers add
            in ``reduce_dtype``. ``"all_to_all"``: sends in ``reduce_dtype``, adds and accumulates in float32, so
            the error of a 16-bit ``reduce_dtype`` does not grow with the axis; takes one more full gradient for each
            reduction in flight. ``"copy_engine"``: the same sum, fetched by the copy engines of GPUs of one host.
        prefetch_nbytes: Bytes of weights that are gathered ahead of the one in use, and up to which weights stay for
            another use in the same pass. 0 gathers each weight when it is used. None: chosen.
        keep_nbytes: Bytes of gathered weights that stay from forward to backward, which saves a gather. None: 0, with
            ``memory="most_speed"`` an eighth of the free memory.
        embedding: How ``nn.Embedding`` is looked up where gradients are computed. ``"gather"`` gathers the table.
            ``"exchange"``: each rank looks up its own rows for the tokens of all ranks, and ranks exchange activations.
            ``"auto"``: whichever moves fewer bytes, if ranks know each other's numbers of tokens (``exchange_tokens``,
            ``capture_step``) or the table is large (1 GiB with its gradient): hosts wait for each other to tell them
            in each lookup. Otherwise the table is gathered; so it is without gradients, and where ranks do not hold
            whole rows (tensor parallelism, quantized tables).
        head: How ``nn.functional.linear_cross_entropy`` computes losses where gradients are computed. ``"exchange"``:
            each rank computes the logits of its own rows of the vocabulary for the tokens of all ranks, and neither
            weight nor logits are ever whole. ``"gather"`` gathers the weight. ``"auto"``: whichever moves fewer bytes.
        exchange_tokens: Most tokens of a rank in one call, for exchanges of activations. None: the hosts of all ranks
            exchange their numbers of tokens in each call. With a number they do not, and more tokens raise an error.
        min_shard_numel: A weight with fewer elements stays whole on every rank (``Replicate()``), because a collective
            for it costs more than it saves. 0 shards every weight with two or more dims.

    Raises:
        TypeError: A field is of the wrong type, or is one of earlier versions: the message names the new one.
        ValueError: A field is out of its range, or is no known name.

    Example:
        >>> policy = SchedulePolicy(memory="least", head="gather")
        >>> mesh = init_weight_mesh("cpu", gtp=4)
        >>> model = gtp_shard(nn.Linear(64, 64), mesh.weights, schedule=policy)
        >>> SchedulePolicy(memory="low")
        Traceback (most recent call last):
        ValueError: SchedulePolicy expects 'balanced' or 'least' or 'most_speed' as memory, ...
    """

    memory: Memory = "balanced"
    gather_backend: GatherBackendName | type[GatherBackend] = "auto"
    reduce_scatter: ReduceScatterName = "auto"
    prefetch_nbytes: int | None = None
    keep_nbytes: int | None = None
    embedding: ExchangeKind = "auto"
    head: ExchangeKind = "exchange"
    exchange_tokens: int | None = None
    min_shard_numel: int = 1024
    # ``Schedule`` fields that the caller has pinned. ``chosen`` pins all of them.
    _numbers: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in ("prefetch_nbytes", "keep_nbytes", "exchange_tokens", "min_shard_numel"):
            _check_number(name, getattr(self, name), is_optional=name != "min_shard_numel")
        _check_choice("memory", self.memory, get_args(Memory))
        _check_choice("reduce_scatter", self.reduce_scatter, get_args(ReduceScatterName))
        _check_choice("embedding", self.embedding, get_args(ExchangeKind))
        _check_choice("head", self.head, get_args(ExchangeKind))
        if not isinstance(self.gather_backend, type):
            _check_choice("gather_backend", self.gather_backend, get_args(GatherBackendName))

    @staticmethod
    def chosen(module: nn.Module) -> SchedulePolicy:
        """The policy of a sharded module with all choices of its first forward.

        Passed to ``gtp_shard`` it does the same. It can be pickled with a checkpoint.

        Args:
            module: A module that ``gtp_shard`` was called on, after a forward.

        Returns:
            A policy in which everything is chosen. Where meshes have chosen differently, ``gather_backend`` or
            ``reduce_scatter`` is as it was asked for.

        Raises:
            ValueError: ``module`` is not sharded, or has not run yet.

        Example:
            >>> model, again = nn.Linear(64, 64), nn.Linear(64, 64)
            >>> mesh = init_weight_mesh("cpu", gtp=4).weights
            >>> model = gtp_shard(model, mesh)
            >>> loss = model(torch.randn(2, 64)).sum()
            >>> policy = SchedulePolicy.chosen(model)
            >>> policy.gather_backend
            'process_group'
            >>> again = gtp_shard(again, mesh, schedule=policy)
        """
        find = getattr(module, "_chosen_policy", None)
        policy: SchedulePolicy | None = None if find is None else find()
        if policy is None:
            raise ValueError(
                f"SchedulePolicy.chosen expects a module after gtp_shard and its first forward, but got a "
                f"{type(module).__name__} that {'has not run yet' if find else 'is not sharded'}."
            )
        return policy


def fixed_policy(prefetch_depth: int = Schedule.prefetch_depth, **options: Any) -> SchedulePolicy:
    """A policy that leaves nothing to choose, for tests and benchmarks: ``options`` are fields of ``Schedule`` and of
    ``SchedulePolicy``. Others are as in ``Schedule()``, and embeddings are gathered."""
    names = {field.name for field in fields(Schedule)}
    schedule = Schedule(prefetch_depth, **{name: options[name] for name in options.keys() & names})
    own = {"embedding": "gather"} | {name: value for name, value in options.items() if name not in names}
    return SchedulePolicy(
        gather_backend=schedule.gather_backend,
        reduce_scatter=schedule.reduce_scatter,
        **own,
        _numbers=tuple(vars(schedule).items()),
    )


def _check_number(name: str, value: object, *, is_optional: bool) -> None:
    if value is None and is_optional:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        expected = "an int"
        if is_optional:
            expected = "an int or None"
        raise TypeError(f"SchedulePolicy expects {expected} for {name}, but got {value!r}.")
    least = int(name == "exchange_tokens")
    if value < least:
        raise ValueError(f"SchedulePolicy expects {name} >= {least}, but got {value}.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        known = " or ".join(f"'{choice}'" for choice in choices)
        raise ValueError(f"SchedulePolicy expects {known} as {name}, but got {value!r}.")


__all__ = [
    "ExchangeKind",
    "GatherBackend",
    "GatherBackendName",
    "Memory",
    "MixedPrecisionPolicy",
    "ReduceScatterKind",
    "ReduceScatterName",
    "Schedule",
    "SchedulePolicy",
    "Waitable",
]
