"""Converts a model's experts to grouped layers, and state dicts in both directions.

Models store experts *fused*, in one module with ``gate_up_proj`` ``(num_experts, 2 * hidden, dim)`` and ``down_proj``
``(num_experts, dim, hidden)``, as ``transformers`` 5 and :class:`GroupedExperts`; or as *modules*, a ``ModuleList`` of
MLPs with the linear layers ``gate_proj``, ``up_proj``, ``down_proj``, as DeepSeek's code and checkpoints on the hub; or
like *mixtral*, the same with the names ``w1``, ``w3``, ``w2``.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .experts import GroupedExperts, GroupedMLP

# Names of gate and up, in one tensor or in two, and of down. ``{}`` is the number of an expert with its own weights.
_FORMS = {
    "grouped": ("mlp.gate_up.weight", "mlp.down.weight"),
    "grouped_split": ("mlp.gate.weight", "mlp.up.weight", "mlp.down.weight"),
    "fused": ("gate_up_proj", "down_proj"),
    "modules": ("{}.gate_proj.weight", "{}.up_proj.weight", "{}.down_proj.weight"),
    "mixtral": ("{}.w1.weight", "{}.w3.weight", "{}.w2.weight"),
}
_LINEAR_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def group_experts(experts: nn.Module, *, is_fused: bool = True) -> GroupedExperts:
    """Grouped layers with copies of the weights of ``experts``, which do not change.

    Args:
        experts: Fused, or a ``ModuleList`` of MLPs; see above. Each computes ``down(act_fn(gate(x)) * up(x))``; without
            an attribute ``act_fn`` the activation is ``silu``.
        is_fused: As for :class:`GroupedMLP`.

    Returns:
        New layers with copies of the weights.

    Raises:
        TypeError: ``experts`` is stored in none of these ways, or its MLPs differ in size or activation.
        NotImplementedError: Its weights are transposed or interleaved, have biases or no gate; or it has a gate of its
            own (``_apply_gate``) or other modules, e.g. a norm. Its experts share weights, or only some are trained.

    Example:
        >>> def mlp():
        ...     module = nn.Module()
        ...     module.gate_proj = nn.Linear(4, 8, bias=False)
        ...     module.up_proj = nn.Linear(4, 8, bias=False)
        ...     module.down_proj = nn.Linear(8, 4, bias=False)
        ...     return module
        >>> experts = group_experts(nn.ModuleList([mlp(), mlp()]))
        >>> experts.mlp.gate_up.weight.shape
        torch.Size([2, 16, 4])
    """
    _refuse_ties(experts, [experts])
    return _grouped(experts, is_fused)


def _grouped(experts: nn.Module, is_fused: bool) -> GroupedExperts:
    """:func:`group_experts` of weights that nothing else shares."""
    kinds = _weights_of(experts)
    activation = _activation_of(experts)
    is_trained = _are_trained(kinds, is_fused)
    with torch.no_grad():
        if len(kinds) == 3:
            gate, up, down = map(torch.stack, kinds)
            gate_up = torch.cat([gate, up], 1)
        else:
            (gate_up,), (down,) = kinds
    mlp = GroupedMLP(*down.shape, activation=activation, is_fused=is_fused, device=down.device, dtype=down.dtype)
    if is_fused:
        layers = [mlp.gate_up, mlp.down]
        weights = [gate_up, down]
    else:
        layers = [mlp.gate, mlp.up, mlp.down]
        weights = [*gate_up.chunk(2, 1), down]  # the rows of gate come first
    for layer, weight, requires_grad in zip(layers, weights, is_trained, strict=True):
        with torch.no_grad():
            layer.weight.copy_(weight)
        layer.weight.requires_grad_(requires_grad)
    return GroupedExperts(mlp.train(experts.training))


def group_experts_(
    module: nn.Module, forwards: Mapping[type[nn.Module], Callable[..., Any]] | None = None, *, is_fused: bool = True
) -> nn.Module:
    """Replace all experts below ``module`` by :class:`GroupedExperts`, in place. Returns ``module``.

    Fused experts that are called with ``(hidden_states, top_k_index, top_k_weights)``, as those of ``transformers``,
    are found. Blocks whose own forward runs over a list of experts need another forward. Experts that several modules
    share are converted once, and all of them share the result.

    Args:
        module: Changed in place, before ``gtp_shard`` and before the optimizer is created.
        forwards: For each class of such blocks a new forward; there the list has become a :class:`GroupedExperts`.
        is_fused: As for :class:`GroupedMLP`.

    Returns:
        ``module``.

    Raises:
        ValueError: There are no experts to replace.
        TypeError, NotImplementedError: As :func:`group_experts`.
        NotImplementedError: A weight of experts is used elsewhere in ``module``, too.

    Example:
        >>> class FusedExperts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate_up_proj = nn.Parameter(torch.randn(2, 16, 4))
        ...         self.down_proj = nn.Parameter(torch.randn(2, 4, 8))
        ...     def forward(self, hidden_states, top_k_index, top_k_weights):
        ...         raise NotImplementedError("a loop over the experts")
        >>> model = group_experts_(nn.Sequential(FusedExperts()))
        >>> type(model[0]).__name__
        'GroupedExperts'
    """
    # First find and convert all, then replace: an error leaves the module as it was.
    found, classes = _find(module, forwards or {})
    if not found:
        raise ValueError(
            f"group_experts_ found no experts in {type(module).__name__}. It knows fused experts with gate_up_proj "
            "and down_proj that take (hidden_states, top_k_index, top_k_weights). For blocks with a list of experts "
            "pass forwards."
        )
    _refuse_ties(module, found)
    grouped = {experts: _grouped(experts, is_fused) for experts in found}
    for parent in list(module.modules()):
        # Not named_children: it leaves out further names of one module.
        for name, submodule in parent._modules.items():
            if submodule in grouped:
                setattr(parent, name, grouped[submodule])
    for parent, changed in classes.items():
        parent.__class__ = changed
    return module


def _find(
    module: nn.Module, forwards: Mapping[type[nn.Module], Callable[..., Any]]
) -> tuple[dict[nn.Module, None], dict[nn.Module, type[nn.Module]]]:
    """All experts, shared ones once, and new classes of the blocks that call a list of them."""
    found: dict[nn.Module, None] = {}
    classes: dict[nn.Module, type[nn.Module]] = {}
    for parent in module.modules():
        forward = forwards.get(type(parent))
        for child in parent.children():
            is_list = forward is not None and isinstance(child, nn.ModuleList)
            if is_list or _is_called_as_ours(child):
                found[child] = None
            if is_list:
                # A class for this block alone. Its name stays, and the old class is its base.
                cls = type(parent)
                body = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
                classes[parent] = type(cls.__name__, (cls,), body)
    return found, classes


def convert_experts_state_dict(state_dict: Mapping[str, Tensor], form: str) -> dict[str, Tensor]:
    """Convert a model's state dict to another form of its experts, bit for bit.

    Args:
        state_dict: Plain tensors. Keys that belong to no experts are passed on, also those of dense layers
            ``mlp.gate_up`` and ``mlp.down``, whose weights have 2 dims.
        form: ``"grouped"`` or ``"grouped_split"`` (:class:`GroupedExperts`, with ``is_fused`` or without),
            ``"fused"``, ``"modules"`` or ``"mixtral"``.

    Returns:
        A new dict. Tensors that needed no change are shared with ``state_dict``.

    Raises:
        ValueError: There is no such form, no experts in ``state_dict``, or some of an expert's weights are missing.

    Example:
        >>> experts = GroupedExperts(GroupedMLP(num_groups=2, dim=4, hidden_dim=8))
        >>> modules = convert_experts_state_dict(experts.state_dict(), "modules")
        >>> sorted(modules)[:3]
        ['0.down_proj.weight', '0.gate_proj.weight', '0.up_proj.weight']
        >>> back = convert_experts_state_dict(modules, "grouped")
        >>> experts.load_state_dict(back)
        <All keys matched successfully>
    """
    if form not in _FORMS:
        raise ValueError(f"convert_experts_state_dict expects one of {', '.join(map(repr, _FORMS))}, but got {form!r}.")
    converted = dict(state_dict)
    prefixes: dict[str, tuple[str, ...]] = {}
    for names in _FORMS.values():
        # The names of gate (or both) and down of expert 0 tell the form, and where the experts are.
        first = names[0].format(0)
        last = names[-1].format(0)
        # One tensor of all experts has 3 dims. Those of dense layers with such names have 2.
        ndim = 3
        if "{}" in names[0]:
            ndim = 2
        for key in state_dict:
            # A prefix is empty or ends with a dot, because other names may end alike.
            prefix = key.removesuffix(last)
            is_prefix = prefix != key and (not prefix or prefix.endswith("."))
            if is_prefix and prefix + first in state_dict and state_dict[key].ndim == ndim:
                prefixes[prefix] = names
    if not prefixes:
        raise ValueError("convert_experts_state_dict found no experts in the state dict, in none of the known forms.")
    for prefix, names in prefixes.items():
        gate_up, down = _take(converted, prefix, names)
        if len(_FORMS[form]) == 2:
            values = [gate_up, down]
        else:
            values = [*gate_up.chunk(2, 1), down]
        for name, value in zip(_FORMS[form], values, strict=True):
            if "{}" in name:
                # Copies: views would share the memory of all experts.
                converted.update({prefix + name.format(i): part.clone() for i, part in enumerate(value)})
            else:
                converted[prefix + name] = value.contiguous()  # a half of gate_up is not contiguous
    return converted


def _take(state: dict[str, Tensor], prefix: str, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Remove the weights of experts from ``state``: gate and up together, and down."""
    numbered = re.compile("|".join(re.escape(name).replace(r"\{\}", r"(\d+)") for name in names))
    matches = [numbered.fullmatch(key.removeprefix(prefix)) for key in state if key.startswith(prefix)]
    # Experts are numbered from 0. Count up to the last one, so that a gap raises. Others have one tensor.
    numbers = [int(match[match.lastindex]) for match in matches if match is not None and match.lastindex]
    num_experts = max(numbers, default=0) + 1
    try:
        values = [[state.pop(prefix + n.format(i)) for i in range(num_experts)] for n in names]
    except KeyError as error:
        what = f"all weights of the experts under '{prefix}', but {error} is missing"
        raise ValueError(f"convert_experts_state_dict expects {what}.") from None
    *gates, down = [torch.stack(parts) if "{}" in name else parts[0] for name, parts in zip(names, values, strict=True)]
    return gates[0] if len(gates) == 1 else torch.cat(gates, 1), down


def _is_called_as_ours(module: nn.Module) -> bool:
    if not {"gate_up_proj", "down_proj"} <= module._parameters.keys():
        return False
    return list(inspect.signature(module.forward).parameters)[:3] == ["hidden_states", "top_k_index", "top_k_weights"]


def _refuse_ties(module: nn.Module, found: Collection[nn.Module]) -> None:
    """Refuse weights that would be copied to several places, or are also used outside of ``found``."""
    num_places = Counter(weight for experts in found for kind in _weights_of(experts) for weight in kind)
    num_places.update(set(_parameters_outside(module, found)))
    for weight, count in num_places.items():
        if count > 1:
            names = [repr(name) for name, param in module.named_parameters(remove_duplicate=False) if param is weight]
            raise NotImplementedError(
                "group_experts supports experts whose weights are each a parameter of their own, but "
                f"{' and '.join(names)} are one parameter of shape {tuple(weight.shape)}. Copies would be trained "
                "apart. Share whole experts modules, or leave these experts as they are."
            )


def _parameters_outside(module: nn.Module, found: Collection[nn.Module]) -> Iterator[Tensor]:
    """Parameters that ``module`` has by a way that does not lead through ``found``."""
    if module in found:
        return
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _parameters_outside(child, found)


def _are_trained(kinds: list[list[Tensor]], is_fused: bool) -> list[bool]:
    """Of each weight of a :class:`GroupedMLP`, which is made of these."""
    *gates, down = kinds
    if is_fused:
        gates = [[weight for kind in gates for weight in kind]]  # one tensor holds gate and up
    elif len(gates) == 1:
        gates = gates * 2  # halves of one tensor
    is_trained = []
    for weights in (*gates, down):
        num_trained = sum(weight.requires_grad for weight in weights)
        if 0 < num_trained < len(weights):
            raise NotImplementedError(
                "group_experts puts weights of all experts into one tensor and expects them all trained or all "
                f"frozen, but {num_trained} of {len(weights)} are trained. Set requires_grad alike, or pass "
                "is_fused=False where gate and up differ."
            )
        is_trained.append(num_trained > 0)
    return is_trained


def _activation_of(experts: nn.Module) -> Callable[[Tensor], Tensor]:
    if not isinstance(experts, nn.ModuleList):
        return getattr(experts, "act_fn", F.silu)
    first, *others = [getattr(expert, "act_fn", F.silu) for expert in experts]
    for other in others:
        if not _is_same_activation(first, other):
            raise TypeError(
                f"group_experts expects experts with one activation, but got act_fn {first} and {other}. Assign the "
                "same act_fn object to all if they compute the same."
            )
    return first


def _is_same_activation(first: Any, other: Any) -> bool:
    if first is other:
        return True
    if type(first) is not type(other) or not isinstance(first, nn.Module):
        return False
    # Each layer makes its own nn.SiLU(). Attributes such as a negative slope must agree; parameters never do.
    has_state = any(True for module in (first, other) for _ in (*module.parameters(), *module.buffers()))
    return not has_state and bool(vars(first) == vars(other))


def _weights_of(experts: nn.Module) -> list[list[Tensor]]:
    """Gate and up together, and down; or of each expert in a list: the gates, the ups, the downs."""
    if isinstance(experts, nn.ModuleList):
        return _weights_of_list(experts)
    gate_up, down = (experts._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if gate_up is None or down is None:
        expected = "a module with gate_up_proj and down_proj or a ModuleList of MLPs"
        raise TypeError(f"group_experts expects {expected}, but got {type(experts).__name__}.")
    # ``use_experts_implementation`` of transformers notes these on a module. Without a note it counts as usual.
    usual = {
        "is_transposed": False,
        "is_concatenated": True,
        "has_bias": False,
        "has_gate": True,
        "has_post_expert_norm": False,
    }
    unusual = [name for name, value in usual.items() if getattr(experts, name, value) != value]
    unusual += [name for name in experts._parameters if name not in ("gate_up_proj", "down_proj")]
    unusual += _own_arithmetic(experts, ())
    num_experts, dim, hidden_dim = down.shape if down.ndim == 3 else (0, 0, 0)
    if unusual or gate_up.shape != (num_experts, 2 * hidden_dim, dim):
        raise NotImplementedError(
            "group_experts supports gate_up_proj (num_experts, 2 * hidden, dim) and down_proj (num_experts, dim, "
            f"hidden) without biases, but {type(experts).__name__} has {tuple(gate_up.shape)} and "
            f"{tuple(down.shape)}" + (f" and differs in {', '.join(unusual)}." if unusual else ".") + " Leave these "
            "experts as they are: gtp_shard shards them over gtp, too."
        )
    return [[gate_up], [down]]


def _own_arithmetic(expert: nn.Module, linears: tuple[str, ...]) -> list[str]:
    """Names of what may compute something else than ``down(act_fn(gate(x)) * up(x))``."""
    found = [name for name, _ in expert.named_children() if name not in (*linears, "act_fn")]
    # ``use_experts_implementation`` of transformers adds the usual gate to classes that have none of their own.
    gate = getattr(expert, "_apply_gate", None)
    if gate is not None and gate.__name__ != "_default_apply_gate":
        found.append("_apply_gate")
    return found


def _weights_of_list(experts: nn.ModuleList) -> list[list[Tensor]]:
    for names in _LINEAR_NAMES:
        # Of each expert in turn: gate, up, down.
        layers = [getattr(expert, name, None) for expert in experts for name in names]
        linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
        if layers and len(linears) == len(layers):
            break
    else:
        known = " or ".join(map(str, _LINEAR_NAMES))
        got = sorted({type(expert).__name__ for expert in experts})
        raise TypeError(f"group_experts expects MLPs with the linear layers {known}, but got {got}.")
    for expert in experts:
        if unusual := _own_arithmetic(expert, names):
            raise NotImplementedError(
                "group_experts supports MLPs that compute down(act_fn(gate(x)) * up(x)), but "
                f"{type(expert).__name__} has its own {', '.join(unusual)}. Leave these experts as they are."
            )
    if any(layer.bias is not None for layer in linears):
        raise NotImplementedError("group_experts supports experts without biases, but these have some.")
    kinds: list[list[Tensor]] = [[layer.weight for layer in linears[kind::3]] for kind in range(3)]
    if any(len({weight.shape for weight in weights}) > 1 for weights in kinds):
        raise TypeError("group_experts expects experts of one size, but got several.")
    return kinds
