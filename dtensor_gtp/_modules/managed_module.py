"""How the runtime gets into a module: ``bind`` swaps its class for a subclass made on the fly, as ``fully_shard`` does.

A call of the module opens a frame (see ``frames``). A managed parameter becomes a class attribute: the full weight
while a forward or backward runs, otherwise the sharded parameter. Some stock forwards are replaced by fused ops. State
dicts, ``parameters()`` and hooks are those of ``nn.Module``.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed.tensor as distributed_tensor
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._dtensor.random_init import zero_row
from .._howto import see
from .._params.managed_param import Site
from .._params.sharded_weight import ShardedWeight, gather_together
from .._params.whole_param import WholeParam
from ..ops.compiled_lookup import materialize
from .binding import BINDING, Binding, BoundModule
from .frames import ADVICE_FOR_JIT, GTPFrame
from .fused_forward import fused_mixin
from .group_blocks import GTPBlock
from .other_libraries import SEEN_BY_TRANSFORMERS, PreparedByAccelerate, resize_or_refuse
from .untraced_writes import as_users_see


class GTPManaged(BoundModule):
    """Mixin of every module that holds or contains managed parameters."""

    _gtp_original: type[nn.Module]
    _gtp_prefix: str
    _is_accelerate_prepared = PreparedByAccelerate()

    @property
    def _distribute_module_applied(self) -> _Refusal:
        """``torch.distributed.tensor.distribute_module``, which ``parallelize_module`` calls, asks for this first."""
        return _Refusal(
            "parallelize_module expects modules that gtp_shard has not sharded yet, but got a "
            f"{self._gtp_original.__name__}: tensor parallelism would split the shards of gtp_shard. Call "
            "parallelize_module first, then gtp_shard, then fully_shard."
        )

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Containers build slices with their own class (``sequential[:2]``): give them the original one."""
        return cls._gtp_original(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``to_empty`` and the like may register new parameter objects: follow them, and keep ties tied."""
        result = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        for name, managed in self._gtp_binding.params.items():
            managed.follow(Site(self, name))
        return result

    def _named_members(self, *args: Any, **kwargs: Any) -> Any:
        """Behind ``parameters()`` and the like."""
        members = super()._named_members(*args, **kwargs)
        if torch.compiler.is_compiling():
            return members
        # Without children it is mostly asked by hooks of tools (CommDebugMode), which must not launch a gather.
        may_gather = kwargs.get("recurse", True)
        return as_users_see(self._gtp_binding.group.runtime, members, may_gather)

    def __delattr__(self, name: str) -> None:
        """A parametrization that comes and goes within a forward, as PEFT's of experts, takes the full weight and, when
        it goes, registers that. So the parameter is set aside here, and put back by ``_put_back``."""
        binding = self._gtp_binding
        if name in binding.params and name in self._parameters and binding.group.runtime.is_materializing:
            binding.set_aside[name] = self._parameters[name]
            binding.group.runtime.reads.note_parametrized(binding.params[name])
        super().__delattr__(name)

    def _put_back(self, name: str) -> bool:
        if name not in self._gtp_binding.set_aside:
            return False
        self._parameters[name] = self._gtp_binding.set_aside.pop(name)
        return True

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """As in ``nn.Module``, or ``remove_parametrizations`` registers the full weight again."""
        if not self._put_back(name):
            super().register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in ``nn.Module``, or ``remove_parametrizations`` registers a full parameter again."""
        if not self._put_back(name):
            super().register_parameter(name, param)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Free gathered weights: whoever gets the shard may write to it without a trace, as ``dcp.load`` does."""
        super()._save_to_state_dict(*args, **kwargs)
        for managed in self._gtp_binding.params.values():
            if isinstance(managed, ShardedWeight):
                self._gtp_binding.group.runtime.drop_kept(managed)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Each rank takes its part of whole tensors. ``assign=True`` registers other objects: follow them, and report
        an error for what is no shard."""
        before = dict(self._parameters)
        parts = {prefix + name: _part_of(state_dict.get(prefix + name), param) for name, param in before.items()}
        # In place, as hooks of torch rename keys: the caller looks for missing ones in this very dict.
        state_dict.update((key, part) for key, part in parts.items() if part is not None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, managed in self._gtp_binding.params.items():
            try:
                managed.follow_assigned(Site(self, name), before[name])
            except RuntimeError as error:
                args[-1].append(str(error))  # the list of error messages

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        why = "because the copy would share its runtime"
        advice = (
            "Copy the module before gtp_shard, or build it again and load the state dict; for averages of weights use "
            "dtensor_gtp.optim.ShardedEMA"
        )
        raise RuntimeError(f"{type(self).__name__} cannot be copied after gtp_shard, {why}. {advice}. {see('ema')}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        why = "after gtp_shard, because it holds process groups. Save its state_dict() and load it into a new module"
        raise RuntimeError(f"{type(self).__name__} cannot be pickled or copied {why}. {see('export')}")

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by ``torch.jit.script``."""
        raise RuntimeError(f"torch.jit.script cannot compile a {type(self).__name__} after gtp_shard. {ADVICE_FOR_JIT}")

    def __repr__(self) -> str:
        """Marks what is sharded. ``_get_name`` keeps the original's answer, as the class keeps its name: libraries go
        by them, e.g. transformers' ``Trainer`` where it smooths labels."""
        text, name = super().__repr__(), f"{type(self).__name__}("
        if not text.startswith(name):
            return text  # the module has a form of its own
        original = self._gtp_original.__name__
        return f"{type(self).__name__.removesuffix(original)}{self._gtp_prefix}{original}({text.removeprefix(name)}"

    def extra_repr(self) -> str:
        own = super().extra_repr()
        shown = ", ".join(f"{name}: {param.placements[-1]}" for name, param in self._gtp_binding.params.items())
        separator = "\n  " if "\n" in own else ", "  # lists of parameters have one line for each
        return separator.join(filter(None, (own, f"gtp=[{shown}]" if shown else "")))


def _part_of(value: Any, param: nn.Parameter | None) -> Tensor | None:
    """This rank's part of a whole tensor for a sharded ``param``; None for all that is loaded as it is."""
    if not isinstance(param, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return None
    if value.shape != param.shape or type(compat.local_tensor(param)) not in (Tensor, nn.Parameter):
        return None
    return distributed_tensor.distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


class _Refusal(str):
    """An error message; code that asks whether it is true raises it."""

    def __bool__(self) -> bool:
        raise RuntimeError(self)


class ParamAccess:
    """Class attribute instead of a managed parameter."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        params = module.__dict__["_parameters"]
        if self._name not in params:
            raise AttributeError(f"'{type(module).__name__}' object has no attribute '{self._name}'")
        registered = params[self._name]
        if registered is None:
            return None
        binding: Binding = module.__dict__[BINDING]
        managed = binding.params[self._name]
        if torch.compiler.is_compiling():
            return managed.value() if isinstance(managed, WholeParam) else materialize(binding.compiled[self._name])
        runtime = binding.group.runtime
        if runtime.is_materializing:
            managed.follow(Site(module, self._name))
            if managed.is_cut_again and not managed.is_readable:
                return registered  # an outer fully_shard, which has not gathered it yet, reads it
            return runtime.reads.read(managed)
        if not managed.is_pinned:
            return registered
        managed.follow(Site(module, self._name))
        return runtime.reads.read_pinned(managed) if isinstance(managed, ShardedWeight) else runtime.reads.read(managed)


def _zero_padding_row(module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Replaces torch's method with which ``reset_parameters`` zeros the row of ``padding_idx``."""
    weight = module._parameters["weight"]
    if module.padding_idx is not None and isinstance(weight, DTensor):
        zero_row(weight, module.padding_idx)


def bind(module: nn.Module, binding: Binding, mixin: type | None, classes: dict[tuple[Any, ...], type]) -> None:
    """Attach ``binding`` and swap the module's class for a subclass. ``mixin`` is a further base of the module that was
    passed to ``gtp_shard``; ``classes`` are the subclasses made so far in this call."""
    fused = fused_mixin(module, binding.params)
    weights = [param for param in binding.params.values() if isinstance(param, ShardedWeight)]
    if fused is None and weights:
        binding.reads.is_reading = True
    for weight in weights:
        weight.is_fused |= fused is not None
    if getattr(type(module), "gtp_gathers_together", False) and len({weight.mesh for weight in weights}) == 1:
        gather_together([weight for weight in weights if weight.sites[0].module is module])
    cls = type(module)
    frame = GTPFrame if fused is None or mixin is not None else None
    bases = (*(base for base in (mixin, fused, frame) if base is not None), GTPManaged, cls)
    key = (*bases, *binding.params)
    if key not in classes:
        body: dict[str, Any] = {name: ParamAccess(name) for name in binding.params}
        if isinstance(module, nn.RNNBase) and binding.params:
            # The list of parameters that recurrent layers pass on, made anew at each read. RNNBase assigns it.
            module.__dict__.pop("_flat_weights", None)  # it would keep the old parameters in memory
            body["_flat_weights"] = property(
                lambda m: [getattr(m, n, None) for n in m._flat_weights_names], lambda *_: None
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and "weight" in binding.params:
            body["_fill_padding_idx_with_zero"] = _zero_padding_row
        if callable(resize := getattr(cls, "resize_token_embeddings", None)):
            body["resize_token_embeddings"] = resize_or_refuse(resize)
        # ``repr`` marks modules whose own parameters are sharded, and the root, but not containers.
        body["_gtp_prefix"] = "GTP" if binding.params or mixin is not None else ""
        body |= {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        body["_gtp_original"] = cls
        classes[key] = type(cls.__name__, bases, body)
    module.__dict__[BINDING] = binding
    if binding.group.mesh.size() > 1:
        module.__dict__["_is_fsdp_managed_module"] = SEEN_BY_TRANSFORMERS
    module.__class__ = classes[key]


def bind_grouped(module: nn.Module, is_block: bool, classes: dict[tuple[Any, ...], type]) -> None:
    """Swap the class of a module whose parameters belong to a group: its calls and reads are those of ``nn.Module``. A
    call of the block itself is a use of the group."""
    bound = type(module)
    cls: type | None = getattr(bound, "_gtp_original", None)
    if cls is None:
        return  # it has no parameters
    key = (is_block, cls)
    if key not in classes:
        bases = (GTPBlock, GTPManaged, cls) if is_block else (GTPManaged, cls)
        names = ("_gtp_prefix", "_gtp_original", "__module__", "__qualname__", "__doc__", "_fill_padding_idx_with_zero")
        body = {name: bound.__dict__[name] for name in names if name in bound.__dict__}
        classes[key] = type(cls.__name__, bases, body)
    module.__class__ = classes[key]
