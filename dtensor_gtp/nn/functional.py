"""Functions that torch does not have for sharded weights."""

from __future__ import annotations

from typing import Literal, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._modules.binding import Binding, BoundModule, binding_of
from .._modules.frames import forward_in_frame
from .._params.managed_param import Site
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from ..ops.cross_entropy import IGNORED, loss_exchange, vocabulary_parallel_loss
from ..ops.linear import linear as sharded_linear

_EVALUATED_TOKENS = 1024  # whose logits are in memory at a time without gradients


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the compiled code ends before it and goes on after it
def linear_cross_entropy(
    input: Tensor,
    linear: nn.Linear | nn.Embedding,
    target: Tensor,
    *,
    reduction: Literal["none", "mean", "sum"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy(linear(input).float(), target)``, over a vocabulary that stays sharded.

    Each rank computes the logits of its own rows of ``linear.weight`` for the tokens of all ranks of the gtp axis, in
    chunks. So neither the weight nor its gradient nor the logits are ever whole, and hidden states are communicated
    instead; the logits are computed in forward and again in backward. Sums are of float32. It is a collective: all
    ranks of the axis call it, each with its own tokens and for its own loss.

    The limits of ``SchedulePolicy(embedding="exchange")`` on numbers of tokens hold here, too.
    ``SchedulePolicy(head=...)`` can choose to gather the weight instead. Without gradients it is gathered in any case,
    and ranks may have any numbers of tokens. A ``linear`` that is not sharded is computed on each rank alone.

    Args:
        input: Hidden states, shape ``(*, in_features)``, in the dtype in which ``linear`` computes.
        linear: The output projection; or the embedding that it is tied to, whose table is the weight. Its own forward
            is not called, so neither are its hooks.
        target: Rows of the weight, integers of shape ``(*)``.
        reduction: ``"none"`` returns a loss for each token, in the shape of ``target``, ``"sum"`` their sum, ``"mean"``
            their mean over this rank's tokens whose target is not ignored; in float32 or wider.
        ignore_index: Target of tokens that have no loss.
        label_smoothing: As in ``F.cross_entropy``, in [0, 1].

    Returns:
        The loss, float32 or wider. It is a scalar, or with ``reduction="none"`` has the shape of ``target``.

    Raises:
        TypeError, ValueError: An argument is of the wrong kind or shape, or a rank has more tokens than an exchange
            carries.
        NotImplementedError: Ranks do not hold whole rows of the vocabulary.

    Sources: Shoeybi et al., "Megatron-LM", arXiv:1909.08053 (vocabulary-parallel cross entropy); Milakov and
    Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

    Example:
        >>> model = nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 512, bias=False))
        >>> model = gtp_shard(model, init_weight_mesh("cpu", gtp=4).weights)
        >>> tokens, targets = torch.randint(512, (2, 8)), torch.randint(512, (2, 8))
        >>> loss = linear_cross_entropy(model[0](tokens), model[1], targets)
        >>> loss.backward()
        >>> loss.shape, model[1].weight.grad.to_local().shape
        (torch.Size([]), torch.Size([128, 64]))
    """
    _check(input, linear, target, reduction, label_smoothing)
    flat = input.reshape(-1, input.shape[-1])
    targets = target.reshape(-1).long()
    is_ignored = targets == ignore_index
    # ``ignore_index`` may be a row of the vocabulary, IGNORED is none.
    losses = _losses(flat, linear, targets.masked_fill(is_ignored, IGNORED), label_smoothing)
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (~is_ignored).sum()  # NaN if all are ignored, as in torch


def _losses(hidden: Tensor, linear: nn.Linear | nn.Embedding, targets: Tensor, label_smoothing: float) -> Tensor:
    """The loss of each token; zero where the target is ``IGNORED``."""
    binding = binding_of(linear)
    weight = None
    if binding is not None:
        weight = binding.params.get("weight")
    # Not sharded, whole on each rank, or in a group, whose modules have plain full weights.
    if binding is None or binding.block is not None or not isinstance(weight, ShardedWeight):
        return _cross_entropy(_logits(linear, hidden), targets, label_smoothing)
    if isinstance(linear, nn.Embedding) and weight.tp_spec is not None:
        raise NotImplementedError(
            "linear_cross_entropy expects a table that is whole on each rank of tensor parallelism, but got parameter "
            f"'{weight.fqn}' of shape {tuple(weight.param.shape)} with placements {weight.placements}. Leave it out of "
            "tensor parallelism."
        )
    runtime = binding.group.runtime
    weight.follow(Site(linear, "weight"))  # another parameter object may be registered by now
    # Without gradients: gather the plain weight once, and keep the logits of some tokens at a time.
    if not torch.is_grad_enabled() and weight.tp_spec is None and weight.form.wire is None:
        bias = _bias(linear, binding)
        pairs = zip(hidden.split(_EVALUATED_TOKENS), targets.split(_EVALUATED_TOKENS), strict=True)
        with runtime.gathering.using(weight.for_forward) as gathered:
            full = gathered.full
            return torch.cat([_cross_entropy(F.linear(h, full, bias), t, label_smoothing) for h, t in pairs])
    # A bias that nobody manages needs this rank's tokens over the whole vocabulary, which an exchange does not have.
    if "bias" in binding.params:
        own_bias = None
    else:
        own_bias = linear._parameters.get("bias")
    trains_own_bias = own_bias is not None and own_bias.requires_grad
    can_exchange = torch.is_grad_enabled() and weight.layout.world > 1 and not trains_own_bias
    exchange = None
    if can_exchange:
        exchange = loss_exchange(runtime, weight)
    if exchange is not None:
        hidden = hidden.to(_compute_dtype(hidden, weight))
        bias = _bias(linear, binding)
        losses = vocabulary_parallel_loss(hidden, targets, bias, runtime, weight, exchange, label_smoothing)
        if losses is not None:  # None: ranks have agreed to gather the weight
            return losses
    if isinstance(linear, nn.Embedding) and not torch.is_autocast_enabled(hidden.device.type):
        logits = sharded_linear(hidden, None, runtime, weight)
    else:
        logits = _logits(linear, hidden)
    return _cross_entropy(logits, targets, label_smoothing)


def _logits(linear: nn.Linear | nn.Embedding, hidden: Tensor) -> Tensor:
    """Of the layer's own forward. Tensor parallelism may have made it return a part of the vocabulary."""
    if isinstance(linear, nn.Embedding):  # its forward would look rows up
        binding = binding_of(linear)
        if binding is None or "weight" not in binding.params:
            return F.linear(hidden, linear.weight)
        return forward_in_frame(cast(BoundModule, linear), _multiply_with_table, hidden)
    logits: Tensor = linear(hidden)
    if logits.shape[-1] != linear.out_features:
        raise NotImplementedError(
            f"linear_cross_entropy expects a layer that returns logits of the whole vocabulary of "
            f"{linear.out_features} rows, but got {tuple(logits.shape)} from {type(linear).__name__}. Pass "
            "output_layouts=Replicate() to its ColwiseParallel."
        )
    return logits


def _multiply_with_table(table: nn.Embedding, hidden: Tensor) -> Tensor:
    return F.linear(hidden, table.weight)


def _compute_dtype(hidden: Tensor, weight: ShardedWeight) -> torch.dtype:
    dtype = compat.autocast_dtype(hidden.dtype, hidden.device)
    if dtype != compat.autocast_dtype(weight.compute_dtype, hidden.device):
        raise ValueError(
            f"linear_cross_entropy expects input of {weight.compute_dtype}, as parameter '{weight.fqn}', but got "
            f"{hidden.dtype}. Convert it, or call it inside of the module of gtp_shard, whose policy casts."
        )
    return dtype


def _bias(linear: nn.Linear | nn.Embedding, binding: Binding) -> Tensor | None:
    """The bias as module code sees it."""
    managed = binding.params.get("bias")
    if managed is None:
        return linear._parameters.get("bias")
    managed.follow(Site(linear, "bias"))
    if not isinstance(managed, WholeParam):
        raise NotImplementedError(
            f"linear_cross_entropy expects a bias that stays whole, but parameter '{managed.fqn}' of shape "
            f"{tuple(managed.param.shape)} has placements {managed.placements}. Return Replicate() for it from "
            "shard_placement_fn."
        )
    return managed.value()


def _cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # float64 stays
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing)


def _check(input: Tensor, linear: nn.Module, target: Tensor, reduction: str, label_smoothing: float) -> None:
    name = "linear_cross_entropy"
    if not isinstance(linear, nn.Linear | nn.Embedding):
        raise TypeError(f"{name} expects an nn.Linear or nn.Embedding as linear, but got {type(linear).__name__}.")
    if isinstance(input, DTensor) or isinstance(target, DTensor):
        raise TypeError(f"{name} expects plain tensors of this rank as input and target, but got a DTensor.")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"{name} expects integers as target, but got {target.dtype}: probabilities are not supported.")
    if isinstance(linear, nn.Embedding):
        width = linear.embedding_dim
    else:
        width = linear.in_features
    if input.shape[-1:] != (width,) or input.shape[:-1] != target.shape:
        got = f"{tuple(input.shape)} and {tuple(target.shape)}"
        raise ValueError(f"{name} expects input of shape (*, {width}) and target of shape (*), but got {got}.")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{name} expects 'none', 'mean' or 'sum' as reduction, but got {reduction!r}.")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name} expects label_smoothing in [0, 1], but got {label_smoothing}.")


__all__ = ["linear_cross_entropy"]
