"""What training code does beside its steps, in draws of the fuzzer: before a backward, and after a step.

Each event gets the model of one process, too: what it changes there, it must change in the shards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
from common import full
from fuzz import Draw
from fuzz_model import Model, loss_of, make_batch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from dtensor_gtp import whole_weights

_FACTOR = 0.9  # by which an event after a step multiplies all parameters


def is_sharded(model: nn.Module) -> bool:
    return isinstance(next(model.parameters()), DTensor)


def happen_between(draw: Draw, model: Model, rows: slice, phase: int) -> None:
    """After the forward of a microbatch, before its backward."""
    if draw.between:
        _BETWEEN[draw.between](draw, model, rows, phase)


def happen_after(draw: Draw, model: Model) -> None:
    """After the step of the optimizer."""
    if draw.after:
        _AFTER[draw.after](model)


def _other_batch(draw: Draw, rows: slice, phase: int) -> torch.Tensor:
    return make_batch(draw, 5000 + phase)[rows].detach()


def _other_loss(draw: Draw, model: Model, rows: slice, phase: int) -> torch.Tensor:
    return loss_of(model(_other_batch(draw, rows, phase), phase))


# --- between a forward and its backward: nothing changes, unless it is a training of its own --------------------------


@torch.no_grad()
def _evaluate(draw: Draw, model: Model, rows: slice, phase: int) -> None:
    model.eval()
    _other_loss(draw, model, rows, phase)
    model.train()


def _drop(draw: Draw, model: Model, rows: slice, phase: int) -> None:
    """A forward whose backward never comes."""
    _other_loss(draw, model, rows, phase)


def _frozen(draw: Draw, model: Model, rows: slice, phase: int, *, trained: int, trains: bool) -> None:
    """A forward of a model of which only every ``trained``-th parameter is not frozen (0: all are), as that of a
    discriminator or of a model without its adapters; ``trains``: and its backward."""
    were = [param.requires_grad for param in model.parameters()]
    for index, param in enumerate(model.parameters()):
        param.requires_grad_(were[index] and trained > 0 and index % trained == 1)
    loss = _other_loss(draw, model, rows, phase)
    if trains and loss.requires_grad:
        loss.backward()
    for were_trained, param in zip(were, model.parameters(), strict=True):
        param.requires_grad_(were_trained)


def _apart(draw: Draw, model: Model, rows: slice, phase: int, *, trains: bool) -> None:
    """Layers are called from outside of the model's forward; ``trains``: with a backward."""
    with torch.set_grad_enabled(trains):
        loss = loss_of(Model.predict(model, _other_batch(draw, rows, phase), phase))
    if trains and loss.requires_grad:
        loss.backward()


def _look(draw: Draw, model: Model, rows: slice, phase: int) -> None:
    """States and values of parameters are read."""
    for param in model.parameters():
        full(param).detach().square().sum()
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=is_sharded(model)))
    model.state_dict()


_BETWEEN: dict[str, Callable[[Draw, Model, slice, int], None]] = {
    "evaluate": _evaluate,
    "drop": _drop,
    "freeze": lambda *args: _frozen(*args, trained=2, trains=False),
    "freeze_all": lambda *args: _frozen(*args, trained=0, trains=False),
    "train_half": lambda *args: _frozen(*args, trained=2, trains=True),
    "apart": lambda *args: _apart(*args, trains=False),
    "train_apart": lambda *args: _apart(*args, trains=True),
    "look": _look,
}


# --- after a step: all parameters are multiplied, or others are frozen ------------------------------------------------


def _load_full(model: Model) -> None:
    options = StateDictOptions(full_state_dict=is_sharded(model))
    state = get_model_state_dict(model, options=options)
    set_model_state_dict(model, {name: value * _FACTOR for name, value in state.items()}, options=options)


def _load_sharded(model: Model) -> None:
    model.load_state_dict({name: value * _FACTOR for name, value in model.state_dict().items()})


@torch.no_grad()
def _write_whole(model: Model) -> None:
    if not is_sharded(model):
        return _foreach(model)
    with whole_weights(model):
        for param in model.parameters():
            param.mul_(_FACTOR)


@torch.no_grad()
def _foreach(model: Model) -> None:
    torch._foreach_mul_(list(model.parameters()), _FACTOR)


def _replace_data(model: Model) -> None:
    for param in model.parameters():
        param.data = param.data * _FACTOR


def _write_data(model: Model) -> None:
    for param in model.parameters():
        param.data.mul_(_FACTOR)


def _toggle(model: Model) -> None:
    """Freeze every third parameter, and train it again after the next step."""
    for param in list(model.parameters())[::3]:
        param.requires_grad_(not param.requires_grad)


_AFTER: dict[str, Callable[[Model], None]] = {
    "load_full": _load_full,
    "load_sharded": _load_sharded,
    "write_whole": _write_whole,
    "foreach": _foreach,
    "replace_data": _replace_data,
    "write_data": _write_data,
    "toggle": _toggle,
}

BETWEEN = tuple(_BETWEEN)
AFTER = tuple(_AFTER)
