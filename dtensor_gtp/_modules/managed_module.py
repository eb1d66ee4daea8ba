"""How the runtime gets into a module: one subclass made on the fly, as ``fully_shard`` does it.

The subclass does three things. A call opens a frame (see ``state``). A managed parameter becomes a class attribute
that, while a forward or a backward runs, reads as the full weight; else it is the sharded parameter itself. And
``nn.Linear``, ``nn.Embedding`` and ``GroupedLinear`` with their stock forward get the fused op in its place. State
dicts, ``parameters()`` and hooks are those of ``nn.Module``.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch.nn as nn

from .._params.managed_param import ManagedParam, Site
from .._params.sharded_weight import ShardedWeight, gather_together
from .binding import BINDING, Binding, binding_of
from .frames import GTPFrame
from .fused_forward import fused_mixin
from .param_access import FlatWeights, ParamAccess, zero_padding_row


class TensorParallelRefusal:
    """Answers torch's question whether a module is tensor parallel already.

    Args:
        module: Class name, for the message.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __bool__(self) -> bool:
        raise RuntimeError(
            f"parallelize_module expects modules that gtp_shard has not sharded yet, but got a {self._module}: tensor "
            "parallelism would cut again what gtp_shard has cut. Call parallelize_module first, then gtp_shard, then "
            "fully_shard."
        )


class GTPManaged:
    """Mixin of every module that holds or contains managed parameters."""

    _gtp_original: type[nn.Module]
    _gtp_prefix: str

    @property
    def _distribute_module_applied(self) -> TensorParallelRefusal:
        """What ``torch.distributed.tensor.distribute_module``, which ``parallelize_module`` calls, asks first."""
        return TensorParallelRefusal(self._gtp_original.__name__)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Containers build slices with their own class (``sequential[:2]``): give them the original one."""
        return cls._gtp_original(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``to_empty`` and the like may register new parameter objects: follow them, and keep ties tied."""
        module = cast(nn.Module, self)
        binding = binding_of(module)
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        if binding is not None:
            for name, managed in binding.params.items():
                managed.follow(Site(module, name))
        return result

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Whoever is given a shard may write to it without a trace, as ``dcp.load`` does: keep nothing made of it."""
        super()._save_to_state_dict(*args, **kwargs)  # type: ignore[misc]
        binding = binding_of(cast(nn.Module, self))
        for managed in binding.params.values() if binding is not None else ():
            if binding is not None and isinstance(managed, ShardedWeight):
                binding.group.runtime.drop_kept(managed)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """With ``assign=True`` other parameter objects get registered: follow them, and refuse what is not a shard."""
        module = cast(nn.Module, self)
        binding = binding_of(module)
        before = dict(module._parameters)
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name, managed in binding.params.items() if binding is not None else ():
            try:
                managed.follow_assigned(Site(module, name), before[name])
            except RuntimeError as error:
                error_msgs.append(str(error))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__} cannot be copied after gtp_shard, because the copy would share its runtime. Copy "
            "the module before gtp_shard, or build it again and load the state dict."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__} cannot be pickled or copied after gtp_shard, because it holds process groups. Save "
            "its state_dict() and load it into a module that is built again."
        )

    def _get_name(self) -> str:
        """What ``repr`` shows. The class itself keeps its name, as there is code that goes by it: transformers writes
        it into the config of an export, and knows norms and rotary embeddings by it."""
        original = self._gtp_original.__name__
        return f"{type(self).__name__.removesuffix(original)}{self._gtp_prefix}{original}"

    def extra_repr(self) -> str:
        own: str = super().extra_repr()  # type: ignore[misc]
        binding = binding_of(cast(nn.Module, self))
        shown = [f"{name}: {_placement(param)}" for name, param in binding.params.items()] if binding else []
        separator = "\n  " if "\n" in own else ", "  # lists of parameters take a line for each
        return separator.join(filter(None, (own, f"gtp=[{', '.join(shown)}]" if shown else "")))


def _placement(param: ManagedParam) -> str:
    return str(param.placements[-1])


def bind(module: nn.Module, binding: Binding, mixins: tuple[type, ...], classes: dict[tuple[Any, ...], type]) -> None:
    """Attach ``binding`` and swap the module's class for a subclass.

    Args:
        mixins: What comes before everything else: ``(GTPModule,)`` for the module that was passed, which always opens
            a frame; else nothing.
        classes: Subclasses made so far in this call; modules of one class share one.
    """
    fused = fused_mixin(module, binding.params)
    weights = [param for param in binding.params.values() if isinstance(param, ShardedWeight)]
    if fused is None and weights:
        binding.reads.know()
    if getattr(type(module), "gtp_gathers_together", False):
        gather_together([weight for weight in weights if weight.sites[0].module is module])
    cls = type(module)
    opens_frame = fused is None or bool(mixins)
    bases = (*mixins, *((fused,) if fused else ()), *((GTPFrame,) if opens_frame else ()), GTPManaged, cls)
    key = (*bases, *binding.params)
    if key not in classes:
        body: dict[str, Any] = {name: ParamAccess(name) for name in binding.params}
        if isinstance(module, nn.RNNBase) and binding.params:
            body["_flat_weights"] = FlatWeights()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and "weight" in binding.params:
            body["_fill_padding_idx_with_zero"] = zero_padding_row
        # Shown by modules whose own parameters are sharded, and by the root, but not by containers.
        body["_gtp_prefix"] = "GTP" if binding.params or mixins else ""
        body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_gtp_original": cls}
        classes[key] = type(cls.__name__, bases, body)
    module.__dict__[BINDING] = binding
    module.__class__ = classes[key]
