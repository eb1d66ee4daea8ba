"""From the experts that models come with to grouped layers, and their state dicts there and back.

Three ways in which experts are stored are known:

- *fused*: one module with the parameters ``gate_up_proj`` ``(num_experts, 2 * hidden, dim)`` and ``down_proj``
  ``(num_experts, dim, hidden)``, as the experts of ``transformers`` 5 (Mixtral, Qwen-MoE, DeepSeek and others);
- *modules*: a ``ModuleList`` of MLPs with the linear layers ``gate_proj``, ``up_proj``, ``down_proj``, as in the code
  that DeepSeek publishes and in checkpoints on the hub;
- *mixtral*: the same with the names ``w1``, ``w3``, ``w2``, as Mixtral's checkpoints.

:class:`GroupedExperts` keeps ``gate`` and ``up`` as the fused form does, so nothing is reordered.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .grouped_mlp import Activation, GroupedExperts, GroupedMLP


class _Form(NamedTuple):
    """Names below the experts' prefix: ``{}`` stands for the number of an expert where each has weights of its own, and
    ``gate_up`` is None where gate and up are apart."""

    gate_up: str | None
    gate: str
    up: str
    down: str

    @property
    def is_numbered(self) -> bool:
        return "{}" in self.down


_FORMS = {
    "grouped": _Form("mlp.gate_up.weight", "", "", "mlp.down.weight"),
    "grouped_split": _Form(None, "mlp.gate.weight", "mlp.up.weight", "mlp.down.weight"),
    "fused": _Form("gate_up_proj", "", "", "down_proj"),
    "modules": _Form(None, "{}.gate_proj.weight", "{}.up_proj.weight", "{}.down_proj.weight"),
    "mixtral": _Form(None, "{}.w1.weight", "{}.w3.weight", "{}.w2.weight"),
}


_LINEAR_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def group_experts(experts: nn.Module, *, is_fused: bool = True) -> GroupedExperts:
    """Grouped layers with the weights of ``experts``, which stay as they are.

    Args:
        experts: Fused, or a ``ModuleList`` of MLPs; see above. Their activation is taken over.
        is_fused: As for :class:`GroupedMLP`.

    Raises:
        TypeError: ``experts`` is stored in none of these ways, or its MLPs differ.
        NotImplementedError: Its weights are transposed or interleaved, have biases or no gate.
    """
    found = _weights_of(experts)
    num_experts, dim, hidden_dim = found.down.shape
    mlp = GroupedMLP(
        num_experts,
        dim,
        hidden_dim,
        activation=found.activation,
        is_fused=is_fused,
        device=found.down.device,
        dtype=found.down.dtype,
    )
    layers = (
        [(mlp.gate_up, found.gate_up)]
        if is_fused
        else list(zip((mlp.gate, mlp.up), found.gate_up.chunk(2, 1), strict=True))
    )
    with torch.no_grad():
        for layer, weight in (*layers, (mlp.down, found.down)):
            layer.weight.copy_(weight)
            layer.weight.requires_grad_(found.requires_grad)
    return GroupedExperts(mlp.train(experts.training))


def group_experts_(
    module: nn.Module, forwards: Mapping[type[nn.Module], Callable[..., Any]] | None = None, *, is_fused: bool = True
) -> nn.Module:
    """Replace all experts below ``module`` by :class:`GroupedExperts`, in place.

    Fused experts that are called with ``(hidden_states, top_k_index, top_k_weights)``, as those of ``transformers``,
    are found by themselves. Blocks whose own forward runs over a list of experts need another forward.

    Args:
        module: Changed in place, before ``gtp_shard`` and before the optimizer is created.
        forwards: For each class of such blocks the forward that takes the place of its own; there the list has become
            a :class:`GroupedExperts`.
        is_fused: As for :class:`GroupedMLP`.

    Returns:
        ``module``.

    Raises:
        ValueError: There are no experts to replace.
        TypeError, NotImplementedError: As :func:`group_experts`.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    classes: dict[nn.Module, type[nn.Module]] = {}
    for parent in module.modules():
        forward = (forwards or {}).get(type(parent))
        for name, child in parent.named_children():
            if _is_called_as_ours(child) or (forward is not None and isinstance(child, nn.ModuleList)):
                replaced.append((parent, name, group_experts(child, is_fused=is_fused)))
                if forward is not None and isinstance(child, nn.ModuleList):
                    cls = type(parent)
                    body = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
                    classes[parent] = type(cls.__name__, (cls,), body)
    if not replaced:
        raise ValueError(
            f"group_experts_ found no experts in {type(module).__name__}. Fused ones have gate_up_proj and down_proj "
            "and are called with (hidden_states, top_k_index, top_k_weights); for blocks with a list of experts pass "
            "forwards."
        )
    for parent, name, experts in replaced:
        setattr(parent, name, experts)
    for parent, changed in classes.items():
        parent.__class__ = changed
    return module


def convert_experts_state_dict(state_dict: Mapping[str, Tensor], form: str) -> dict[str, Tensor]:
    """The state dict of a model with all its experts stored in another way; the values are the same bits.

    Args:
        state_dict: Plain tensors. Keys that belong to no experts are passed on.
        form: ``"grouped"`` or ``"grouped_split"`` (:class:`GroupedExperts`, with ``is_fused`` or without),
            ``"fused"``, ``"modules"`` or ``"mixtral"``.

    Raises:
        ValueError: There is no such form, no experts in ``state_dict``, or some of an expert's weights are missing.
    """
    if form not in _FORMS:
        raise ValueError(f"convert_experts_state_dict expects one of {', '.join(map(repr, _FORMS))}, but got {form!r}.")
    converted = dict(state_dict)
    prefixes: dict[str, _Form] = {}
    for known in _FORMS.values():
        pattern = re.compile(rf"(.*?(?:^|\.)){re.escape(known.down).replace(re.escape('{}'), '0')}")
        marker = known.gate_up or known.gate.format(0)
        for key in state_dict:
            if (match := pattern.fullmatch(key)) and match[1] + marker in state_dict:
                prefixes[match[1]] = known
    if not prefixes:
        raise ValueError("convert_experts_state_dict found no experts in the state dict, in none of the known forms.")
    for prefix, known in prefixes.items():
        gate_up, down = _take(converted, prefix, known)
        converted.update(_named(prefix, _FORMS[form], gate_up, down))
    return converted


class _Weights(NamedTuple):
    gate_up: Tensor
    down: Tensor
    activation: Activation
    requires_grad: bool


def _is_called_as_ours(module: nn.Module) -> bool:
    if not {"gate_up_proj", "down_proj"} <= module._parameters.keys():
        return False
    names = list(inspect.signature(module.forward).parameters)
    return names[:3] == ["hidden_states", "top_k_index", "top_k_weights"]


def _weights_of(experts: nn.Module) -> _Weights:
    if isinstance(experts, nn.ModuleList):
        return _weights_of_list(experts)
    gate_up, down = (experts._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if gate_up is None or down is None:
        raise TypeError(
            "group_experts expects a module with gate_up_proj and down_proj or a ModuleList of MLPs, but got "
            f"{type(experts).__name__}."
        )
    usual = {"is_transposed": False, "is_concatenated": True, "has_bias": False, "has_gate": True}
    unusual = [name for name, value in usual.items() if getattr(experts, name, value) != value]
    unusual += [name for name in experts._parameters if name not in ("gate_up_proj", "down_proj")]
    num_experts, dim, hidden_dim = down.shape if down.ndim == 3 else (0, 0, 0)
    if unusual or gate_up.shape != (num_experts, 2 * hidden_dim, dim):
        raise NotImplementedError(
            "group_experts supports gate_up_proj (num_experts, 2 * hidden, dim) and down_proj (num_experts, dim, "
            f"hidden) without biases, but {type(experts).__name__} has {tuple(gate_up.shape)} and "
            f"{tuple(down.shape)}" + (f" and differs in {', '.join(unusual)}." if unusual else ".")
        )
    requires_grad = gate_up.requires_grad and down.requires_grad
    return _Weights(gate_up.detach(), down.detach(), _activation(experts), requires_grad)


def _weights_of_list(experts: nn.ModuleList) -> _Weights:
    layers: list[list[nn.Linear]] = []
    for names in _LINEAR_NAMES:
        found = [[getattr(expert, name, None) for name in names] for expert in experts]
        if found and all(isinstance(layer, nn.Linear) for of_expert in found for layer in of_expert):
            layers = found  # type: ignore[assignment]
    if not layers:
        kinds = sorted({type(expert).__name__ for expert in experts})
        raise TypeError(
            f"group_experts expects MLPs with the linear layers {' or '.join(map(str, _LINEAR_NAMES))}, but got "
            f"{kinds}."
        )
    if any(layer.bias is not None for of_expert in layers for layer in of_expert):
        raise NotImplementedError("group_experts supports experts without biases, but these have some.")
    if len({tuple(layer.weight.shape for layer in of_expert) for of_expert in layers}) > 1:
        raise TypeError("group_experts expects experts of one size, but got several.")
    with torch.no_grad():
        gate, up, down = (torch.stack([of_expert[i].weight for of_expert in layers]) for i in range(3))
    requires_grad = all(layer.weight.requires_grad for of_expert in layers for layer in of_expert)
    return _Weights(torch.cat([gate, up], 1), down, _activation(experts[0]), requires_grad)


def _activation(module: nn.Module) -> Activation:
    found: Activation = getattr(module, "act_fn", F.silu)
    return found


def _take(state: dict[str, Tensor], prefix: str, form: _Form) -> tuple[Tensor, Tensor]:
    """Remove the weights of experts from ``state``: gate and up together, and down."""
    num_experts = 0
    while prefix + form.down.format(num_experts) in state and form.is_numbered:
        num_experts += 1

    def take(name: str) -> Tensor:
        try:
            if not form.is_numbered:
                return state.pop(prefix + name)
            return torch.stack([state.pop(prefix + name.format(i)) for i in range(num_experts)])
        except KeyError as error:
            raise ValueError(
                f"convert_experts_state_dict expects all weights of the experts under '{prefix}', but {error} is "
                "missing."
            ) from None

    gate_up = take(form.gate_up) if form.gate_up is not None else torch.cat([take(form.gate), take(form.up)], 1)
    return gate_up, take(form.down)


def _named(prefix: str, form: _Form, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    if form.gate_up is not None:
        return {prefix + form.gate_up: gate_up, prefix + form.down: down}
    gate, up = gate_up.chunk(2, 1)
    named: dict[str, Tensor] = {}
    for name, value in ((form.gate, gate), (form.up, up), (form.down, down)):
        if form.is_numbered:
            named.update({prefix + name.format(i): part.clone() for i, part in enumerate(value.unbind(0))})
        else:
            named[prefix + name] = value.contiguous()
    return named
