"""How the runtime gets into a module, whose class stays as it is: by attributes of the instance.

``nn.Module`` finds them before those of the class, and so does the compiler. A call runs
``_call_impl``, which opens a frame (see ``frames``), or ``forward``, a fused op. Code that reads a
parameter gets an item of ``_parameters``: the full parameter while a forward or backward runs,
otherwise the sharded one. Modules that were passed to ``gtp_shard`` get a subclass made on the fly,
as under ``fully_shard``.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from .._params.managed_param import ManagedParam
from .._params.pack_planes import HookWire
from .._params.sharded_weight import ShardedWeight, gather_together
from .._params.whole_param import WholeParam
from ..ops.compiled_layers import embedding as compiled_embedding
from ..ops.compiled_layers import linear as compiled_linear
from ..ops.compiled_layers import parallel_linear as compiled_parallel_linear
from ..ops.embedding import embedding
from ..ops.linear import linear, parallel_linear
from .binding import BINDING, Binding, BoundModule, Fused
from .frames import call_compiled_in_frame, call_in_frame, forward_in_frame
from .overrides import SEEN_BY_TRANSFORMERS, PreparedByAccelerate, override


class ReadParams(dict[str, Any]):
    """``nn.Module._parameters`` of a module: an item is what code shall read now. All else is as it
    is registered."""

    def __init__(self, params: dict[str, Any], binding: Binding) -> None:
        super().__init__(params)
        self._binding = binding

    # ``nn.Module.__getattr__`` comes here. ``get``, ``items`` and ``values`` of a dict do not, so
    # ``parameters()`` and state dicts have shards.
    def __getitem__(self, name: str) -> Any:
        registered = super().__getitem__(name)
        if registered is None or name not in self._binding.params:
            return registered
        return self._binding.read(name, registered)

    def __delitem__(self, name: str) -> None:
        self._binding.put_aside(self, name)  # before the item is gone
        super().__delitem__(name)


class OwnClass(BoundModule):
    """Base of the classes of modules that were passed to ``gtp_shard``."""

    _gtp_original: type[nn.Module]
    _is_accelerate_prepared = PreparedByAccelerate()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Containers build slices with their own class (``sequential[:2]``): give them the original
        one."""
        return cls._gtp_original(*args, **kwargs)

    def __repr__(self) -> str:
        """Marks the module. ``_get_name`` keeps the original's answer, as the class keeps its name:
        libraries go by them, e.g. transformers' ``Trainer`` where it smooths labels."""
        text = super().__repr__()
        name = f"{type(self).__name__}("
        if not text.startswith(name):
            return text  # the module has a form of its own
        prefix = type(self).__name__.removesuffix(self._gtp_original.__name__)
        return f"{prefix}GTP{self._gtp_original.__name__}({text.removeprefix(name)}"


def bind(module: nn.Module, binding: Binding, own: type | None) -> None:
    """Attach ``binding``. ``own`` is the new class of the module that was passed to ``gtp_shard``."""
    binding.fused_alone = find_fused(module, binding.params)
    weights = [param for param in binding.params.values() if isinstance(param, ShardedWeight)]
    if binding.fused is None and weights:
        binding.reads.is_reading = True  # so that the first call has hooks
    for weight in weights:
        weight.fused.is_any |= binding.fused is not None  # a tied weight may have both kinds of modules
    has_one_mesh = len({weight.mesh for weight in weights}) == 1  # one launch has one communicator
    if has_one_mesh and getattr(type(module), "gtp_gathers_together", False):
        # A tied weight is gathered with those of its first module.
        first_here = [weight for weight in weights if weight.registration.sites[0].module is module]
        gather_together(first_here)
    attributes = module.__dict__
    attributes[BINDING] = binding
    if own is not None:
        module.__class__ = own
    if binding.group.arguments.mesh.size() > 1:  # a rank alone waits for no other
        attributes["_is_fsdp_managed_module"] = SEEN_BY_TRANSFORMERS
    override(module)
    dress(module)


def dress(module: nn.Module) -> None:
    """Give a module what its calls and reads take, by what its binding says of it."""
    binding: Binding = module.__dict__[BINDING]
    attributes = module.__dict__
    for name, value in binding.dressed.items():
        if attributes.get(name) is value:  # or the user has put another one there
            del attributes[name]
    if binding.compiled_call is not None:
        attributes.setdefault("_compiled_call_impl", binding.compiled_call)  # as the user has compiled it
    binding.call_impl = type(module)._call_impl
    binding.dressed = {}
    # A fused op needs no frame, but the module that was passed to ``gtp_shard`` has one: it casts
    # inputs.
    is_frame = binding.fused_alone is None or binding.group.module is module
    # In a group the block alone has a frame during a pass. Outside of passes its parts have one, see
    # ``GroupViews``.
    if binding.block is module or (binding.block is None and is_frame):
        call = MethodType(call_in_frame, module)
        binding.dressed = {"_call_impl": call, "__call__": call}  # ``torch.compile`` takes the latter
        if binding.compiled_call is not None:
            binding.dressed["_compiled_call_impl"] = MethodType(call_compiled_in_frame, module)
    if (fused := binding.fused) is not None:
        binding.dressed["forward"] = MethodType(fused.forward, module)
    elif isinstance(module, nn.RNNBase) and binding.params:
        binding.call_impl = _call_recurrent
        _forget_flat_weights(module)  # e.g. the parameters of before ``gtp_shard``
    attributes.update(binding.dressed)
    params = attributes["_parameters"]
    # Unwrap first: a group keeps the plain dict and puts its ``FullParams`` in this place.
    if isinstance(params, ReadParams):
        params = dict(dict.items(params))  # as registered
        attributes["_parameters"] = params
    if binding.params and binding.block is None:
        attributes["_parameters"] = ReadParams(params, binding)


def own_class(module: nn.Module, mixin: type) -> type:
    """A subclass of the class of ``module``, which the module can have: one for all modules of it. The
    user's metaclass is not asked: it may refuse subclasses, or keep a list of all classes."""
    cls = type(module)
    bases = (mixin, OwnClass, cls)
    for known in type.__subclasses__(cls):
        if known.__bases__ == bases and "_gtp_original" in vars(known):
            return known
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_gtp_original": cls,
    }
    maker: type = type
    if issubclass(type(cls), ABCMeta):
        maker = ABCMeta  # it keeps what it knows beside each class
    # Neither ``__new__`` of the user's metaclass nor the user's ``__init_subclass__`` runs: that of
    # ``BoundModule`` stands before it.
    own: type = maker.__new__(type(cls), cls.__name__, bases, body)
    # Try it now, before ``gtp_shard`` changes anything: Python raises if the layouts differ.
    module.__class__ = own
    module.__class__ = cls
    return own


def _forget_flat_weights(module: nn.Module) -> None:
    """The list would keep full weights."""
    module.__dict__["_flat_weights"] = [None] * len(module._flat_weights_names)  # type: ignore[arg-type]


def _call_recurrent(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A recurrent layer passes on a list of parameters, made anew for each call: the list keeps
    what it holds."""
    names: list[str] = module._flat_weights_names  # type: ignore[assignment]
    module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]
    # The forward compares its weights with these. Where they differ, it moves the weights side by side
    # for cuDNN (``flatten_parameters``): the gathered ones, which would look like a write.
    module.__dict__["_flat_weight_refs"] = [None] * len(names)
    try:
        return type(module)._call_impl(module, *args, **kwargs)
    finally:
        _forget_flat_weights(module)


def linear_forward(module: BoundModule, input: Tensor) -> Tensor:
    """Of ``nn.Linear``."""
    layer = cast("nn.Linear", module)
    binding = module._gtp_binding
    if torch.compiler.is_compiling():
        if torch.is_autocast_enabled(input.device.type) or is_parametrized(module):
            return nn.Linear.forward(layer, input)
        compiled = binding.compiled["weight"]
        op: Callable[..., Tensor | None] = compiled_linear
        if compiled.weight.tp_spec is not None:
            op = compiled_parallel_linear
        # Read as an attribute, so that the graph gets the value of the bias.
        output = op(input, layer.bias, compiled)
        if output is None:
            return nn.Linear.forward(layer, input)
        return output
    if binding.block is not None:  # a wrapper of a library has kept this function
        return nn.Linear.forward(layer, input)
    params = binding.params
    runtime = binding.group.runtime
    is_plain = input.layout is torch.strided and not input.is_nested
    if not is_plain or torch.is_autocast_enabled(runtime.device.type) or is_parametrized(module):
        return forward_in_frame(module, nn.Linear.forward, input)
    value: Tensor | None = module._parameters.get("bias")
    weight: ShardedWeight = params["weight"]  # type: ignore[assignment]
    weight.follow(binding.sites["weight"])
    if "bias" in params:  # of ours, else ignored or None
        bias = params["bias"]
        if not isinstance(bias, WholeParam):  # sharded: the stock forward gathers it
            return forward_in_frame(module, nn.Linear.forward, input)
        bias.follow(binding.sites["bias"])
        value = bias.value()
    if weight.tp_spec is None:
        return linear(input, value, runtime, weight)
    output = parallel_linear(input, value, runtime, weight)
    if output is None:  # DTensor has more to do than a local GEMM
        return forward_in_frame(module, nn.Linear.forward, input)
    return output


def embedding_forward(module: BoundModule, input: Tensor) -> Tensor:
    """Of ``nn.Embedding``."""
    layer = cast("nn.Embedding", module)
    binding = module._gtp_binding
    weight = binding.params["weight"]
    assert isinstance(weight, ShardedWeight)
    if torch.compiler.is_compiling():
        return compiled_embedding(input, layer.padding_idx, binding.compiled["weight"])
    if binding.block is not None:  # as in ``linear_forward``
        return nn.Embedding.forward(layer, input)
    if is_parametrized(module):
        return forward_in_frame(module, nn.Embedding.forward, input)
    weight.follow(binding.sites["weight"])
    return embedding(input, layer.padding_idx, binding.group.runtime, weight)


def is_parametrized(module: nn.Module) -> bool:
    """Whether a parametrization has taken a parameter in this forward, as PEFT's of parameters, or
    it was set to None."""
    params = module._parameters
    if params.get("weight") is None:
        return True
    return "bias" not in params and hasattr(module, "bias")


def find_fused(module: nn.Module, params: dict[str, ManagedParam]) -> Fused | None:
    """The fused op for ``module``, if its forward is the stock one and its weight is a shard."""
    if (of_layer := getattr(type(module), "gtp_fused", None)) is not None:
        return cast("Fused | None", of_layer(module, params))
    weight = params.get("weight")
    if not isinstance(weight, ShardedWeight) or "forward" in module.__dict__:
        return None
    # What hooks make of a weight, only code that knows the hooks can use.
    if isinstance(weight.form.wire, HookWire):
        return None
    stock = type(module).forward
    if isinstance(module, nn.Linear) and stock is nn.Linear.forward:
        return Fused(linear_forward, multiplies=True)
    is_embedding = isinstance(module, nn.Embedding) and stock is nn.Embedding.forward
    if is_embedding and weight.tp_spec is None:
        return Fused(embedding_forward, multiplies=False)
    return None
