"""What checkpoints of libraries hold in shards: a model's tensors, an optimizer's by parameter name.

torch's ``get_optimizer_state_dict`` knows one model only, and ``set_optimizer_state_dict`` drops the state of frozen
parameters, among them those of PEFT's inactive adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from .._gathered_optimizer import GatheredOptimizer
from .._modules.binding import plain_name
from ..quant.native import native_of
from ..quant.native_data import STORED_NAMES


def model_state(model: nn.Module, *, is_peft: bool) -> dict[str, Any]:
    """A state dict in shards. Of a PEFT model it leaves out what ``save_pretrained`` never writes: frozen weights of
    the base, but for biases and embeddings."""
    state: dict[str, Any] = get_model_state_dict(model)
    if is_peft:
        for name in _frozen_in_base(model):
            state.pop(name, None)
    return state


def _frozen_in_base(model: nn.Module) -> set[str]:
    adapters = set(model.peft_config)  # type: ignore[arg-type]
    vocabulary = _embeddings(model)
    keys: set[str] = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        is_of_adapter = not adapters.isdisjoint(name.split("."))
        if param.requires_grad or is_of_adapter or "bias" in name or param in vocabulary:
            continue
        key = plain_name(name)
        native = native_of(param)
        keys.add(key)
        if native is not None:
            keys |= {f"{key}_{native.recipe.name}.{plane}" for plane in STORED_NAMES}
    return keys


def _embeddings(model: Any) -> set[nn.Parameter]:
    """Of words, which PEFT writes if it adapts them or if their number has changed."""
    params: set[nn.Parameter] = set()
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        with suppress(AttributeError, NotImplementedError):  # models without words
            params.update(getattr(model, getter)().parameters())
    return params


def names_of_params(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """Names of states in a checkpoint: those of ``get_optimizer_state_dict`` if one model has all parameters of the
    optimizer, else prefixed with the position among the models that it trains."""
    trained = {param for group in optimizer.param_groups for param in group["params"]}
    owners = [model for model in models if not trained.isdisjoint(model.parameters())]
    names: dict[nn.Parameter, str] = {}
    for index, model in enumerate(owners):
        prefix = ""
        if len(owners) > 1:
            prefix = f"{index}."
        for name, param in model.named_parameters():
            names.setdefault(param, prefix + plain_name(name))
    return names


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """``optimizer.state_dict()`` with names in place of numbers.

    Raises:
        ValueError: The optimizer has a parameter without a name.
    """
    groups = _groups_by_name(optimizer, names)
    stock = optimizer.state_dict()
    order = [name for group in groups for name in group]
    options = [{**group, "params": members} for group, members in zip(stock["param_groups"], groups, strict=True)]
    return {"state": {order[number]: state for number, state in stock["state"].items()}, "param_groups": options}


def _groups_by_name(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in names:
                raise ValueError(
                    "GTPAccelerator, GTPTrainer and GTPStrategy expect optimizers with parameters of trained models "
                    f"only, but got parameter {position} of param group {index}, of shape {tuple(param.shape)}, which "
                    "is in none. Pass its module to prepare, too, or make it part of the LightningModule."
                )
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def state_to_load(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], folder: Path, key: str
) -> dict[str, Any]:
    """What :func:`load_shards` fills with the optimizer's state under ``key``: of the parameters that have one there,
    be they frozen now.

    Raises:
        ValueError: The checkpoint has other param groups, or the state of a parameter that the optimizer has not.
    """
    stored = FileSystemReader(folder).read_metadata().planner_data or {}
    saved = {path[2] for path in stored.values() if path[:2] == (key, "state")}
    num_groups = len({path[2] for path in stored.values() if path[:2] == (key, "param_groups")})
    if num_groups != len(optimizer.param_groups):
        raise ValueError(
            f"GTPAccelerator, GTPTrainer and GTPStrategy expect optimizers with the {num_groups} param groups that "
            f"{folder} has, but got {len(optimizer.param_groups)}. Make the optimizer with the same groups as "
            "when saving."
        )
    params = {names[param]: param for group in optimizer.param_groups for param in group["params"] if param in names}
    if foreign := sorted(saved - params.keys()):
        raise ValueError(
            "GTPAccelerator, GTPTrainer and GTPStrategy expect an optimizer of the parameters that "
            f"{folder} has states of, but got one without '{foreign[0]}' and {len(foreign) - 1} more. "
            "Make it of the same parameters as when saving."
        )
    missing = [param for name, param in params.items() if name in saved]
    # One of ``gathered`` has an empty state of what another rank owns, or of what had no gradient so far. All ranks
    # must step the same parameters, so it makes all states anew: the load fills them.
    if not isinstance(optimizer, GatheredOptimizer):
        missing = [param for param in missing if param not in optimizer.state]
    _make_states(optimizer, missing)
    state = optimizer_state(optimizer, names)
    state["state"] = {name: of_param for name, of_param in state["state"].items() if name in saved}
    return state


@torch.no_grad()
def _make_states(optimizer: torch.optim.Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Let a step without gradients and learning rate make them, as torch's ``set_optimizer_state_dict`` does."""
    params = list(params)
    if not params:
        return
    grads = {param: param.grad for group in optimizer.param_groups for param in group["params"]}
    rates = [group.get("lr") for group in optimizer.param_groups]
    for param in grads:
        param.grad = None
    for param in params:
        param.grad = torch.zeros_like(param)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate * 0.0
    optimizer.step()
    for param, grad in grads.items():
        param.grad = grad
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], state: Mapping[str, Any]
) -> None:
    """Take what :func:`state_to_load` has made and :func:`load_shards` has filled.

    Raises:
        ValueError: A param group had other parameters.
    """
    own = _groups_by_name(optimizer, names)
    numbers = {name: number for number, name in enumerate(name for group in own for name in group)}
    groups = []
    for index, (saved, members) in enumerate(zip(state["param_groups"], own, strict=True)):
        if differing := sorted(set(members).symmetric_difference(saved["params"])):
            raise ValueError(
                f"GTPAccelerator, GTPTrainer and GTPStrategy expect param group {index} with the "
                f"{len(saved['params'])} parameters that were saved, but got {len(members)}; '{differing[0]}' is in "
                "one of them only. Make the optimizer with the same groups as when saving."
            )
        groups.append({**saved, "params": [numbers[name] for name in members]})
    states = {numbers[name]: of_param for name, of_param in state["state"].items()}
    optimizer.load_state_dict({"state": states, "param_groups": groups})


class _Planner(DefaultLoadPlanner):
    """Leaves options of param groups as they are that the checkpoint lacks: a scheduler made later adds some."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        for key, path in self.mappings.items():
            is_option = path[1:2] == ("param_groups",) and path[-1] != "params"
            if is_option and key not in metadata.state_dict_metadata:
                del self.state_dict[key]


def load_shards(state: dict[str, Any], folder: Path) -> None:
    """Fill ``state``, in place, on any number of ranks."""
    load(state, checkpoint_id=folder, planner=_Planner())
