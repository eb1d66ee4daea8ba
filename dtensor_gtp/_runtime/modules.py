"""How the runtime gets into a module: one subclass made on the fly, as ``fully_shard`` does it.

The subclass does three things. A call opens a frame (see ``state``). A managed parameter becomes a class attribute
that, while a forward or a backward runs, reads as the full weight; else it is the sharded parameter itself. And
``nn.Linear``, ``nn.Embedding`` and ``GroupedLinear`` with their stock forward get the fused op in its place. State
dicts, ``parameters()`` and hooks are those of ``nn.Module``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

from .. import _torch_compat as compat
from .._dtensor_random import zero_row
from ..nn.grouped_linear import GroupedLinear, local_part
from ..ops.compiled import CompiledWeight, materialize
from ..ops.compiled import embedding as compiled_embedding
from ..ops.compiled import linear as compiled_linear
from ..ops.compiled import parallel_linear as compiled_parallel_linear
from ..ops.compiled_grouped import grouped_linear as compiled_grouped_linear
from ..ops.embedding import embedding
from ..ops.grouped import sharded_grouped_linear
from ..ops.grouped_several import several_grouped_linear
from ..ops.linear import linear, parallel_linear
from .gathered import gather_together
from .param import ManagedParam, ShardedWeight, Site
from .registrations import registrations
from .split_backward import follow_pipelining
from .whole import WholeParam
from .wire import HookWire

if TYPE_CHECKING:
    from .group import ShardGroup
    from .state import Runtime

_BINDING = "_gtp_binding"


class Binding:
    """What ``gtp_shard`` attaches to a module.

    Args:
        module: The module.
        group: The ``gtp_shard`` call that manages the module.
        params: Managed parameters that are registered on this very module, by attribute name.
    """

    def __init__(self, module: nn.Module, group: ShardGroup, params: dict[str, ManagedParam]) -> None:
        self.group = group
        self.params = params
        # The same weights as compiled code names them.
        self.compiled = {
            name: CompiledWeight(lambda: group.runtime, param, Site(module, name))
            for name, param in params.items()
            if isinstance(param, ShardedWeight)
        }
        # Whether the forward of this module reads sharded weights as attributes: known for owners whose forward is not
        # fused; learned in the first forward (None before it) for modules that read another module's weights.
        self._reads_weights: bool | None = None
        # After how many optimizer steps a forward read weights that had not done so before.
        self._learned_in: int | None = None

    def know_reads(self) -> None:
        """The forward of this module reads sharded weights of its own."""
        self._reads_weights = True

    def may_read_weights(self, num_steps: int) -> bool:
        """Whether saved tensors of a forward after ``num_steps`` optimizer steps need hooks.

        The answer changes between steps only: a recomputation (activation checkpointing) must save as many tensors in
        the same way as its forward did, also if forwards of other microbatches were in between.
        """
        if self._learned_in is not None and num_steps != self._learned_in:
            self._reads_weights, self._learned_in = True, None
        return self._reads_weights is not False

    def learn_reads(self, reads_weights: bool, num_steps: int) -> None:
        """After a complete forward, which came after ``num_steps`` optimizer steps."""
        if self._reads_weights is None:
            self._reads_weights = reads_weights
        elif reads_weights and not self._reads_weights and self._learned_in is None:
            self._learned_in = num_steps


def binding_of(module: nn.Module) -> Binding | None:
    """The binding of a managed module, None for any other."""
    return cast("Binding | None", module.__dict__.get(_BINDING))


class ParamAccess:
    """Class attribute in the place of a managed parameter."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        params = module.__dict__["_parameters"]
        if self._name not in params:
            raise AttributeError(f"'{type(module).__name__}' object has no attribute '{self._name}'")
        registered = params[self._name]
        binding = binding_of(module)
        managed = binding.params.get(self._name) if binding is not None else None
        if managed is None or registered is None:
            return registered
        assert binding is not None
        if torch.compiler.is_compiling():
            return managed.value() if isinstance(managed, WholeParam) else materialize(binding.compiled[self._name])
        runtime = binding.group.runtime
        if runtime.is_materializing:
            managed.follow(Site(module, self._name))
            # Not gathered by the outer fully_shard: it is the one who asks.
            is_absent = managed.is_cut_again and not managed.is_readable
            return registered if is_absent else runtime.read(managed)
        if not managed.is_pinned:
            return registered
        managed.follow(Site(module, self._name))
        return runtime.read_pinned(managed) if isinstance(managed, ShardedWeight) else runtime.read(managed)


class FlatWeights:
    """``nn.RNNBase._flat_weights``: the list of parameters that recurrent layers pass on, read afresh each time."""

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        return [getattr(module, name) if hasattr(module, name) else None for name in module._flat_weights_names]  # type: ignore[union-attr]

    def __set__(self, module: nn.Module, value: list[Any]) -> None:
        """RNNBase assigns the list when a parameter changes; it is derived here."""


def zero_padding_row(module: nn.Embedding | nn.EmbeddingBag) -> None:
    """In the place of torch's method, by which ``reset_parameters`` zeros the row of ``padding_idx``."""
    weight = module._parameters["weight"]
    if module.padding_idx is not None and isinstance(weight, DTensor):
        zero_row(weight, module.padding_idx)


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


class GTPFrame(GTPManaged):
    """Mixin of modules whose call is a frame: all but those with a fused op."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _call_in_graph(cast(nn.Module, self), super().__call__, args, kwargs)  # type: ignore[misc]
        # torch.compile(module) compiles what is called from here, but neither this frame (see below) nor the runtime.
        compiler = compat.set_eval_frame(None)
        try:
            return _call_in_frame(cast(nn.Module, self), super().__call__, args, kwargs, compiler)  # type: ignore[misc]
        finally:
            compat.set_eval_frame(compiler)


compat.skip_code(GTPFrame.__call__.__code__)


def _call_in_graph(module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call while the compiler traces it: frames are opened outside of compiled code, if at all."""
    binding = binding_of(module)
    if binding is None or binding.group.module is not module:
        return call(*args, **kwargs)
    args, kwargs = binding.group.cast_inputs(args, kwargs)
    return binding.group.cast_outputs(call(*args, **kwargs))


def _call_in_frame(module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Any) -> Any:
    binding = binding_of(module)
    if binding is None:
        return _call_compiled(call, args, kwargs, compiler)
    group, runtime = binding.group, binding.group.runtime
    if group.num_registrations != (number := registrations().number):
        _refuse_added_params(group)
        group.num_registrations = number
    frame = runtime.enter(module, binding.may_read_weights)
    is_complete = False
    try:
        if group.module is module:
            args, kwargs = group.cast_inputs(args, kwargs)
        if compiler is not None or module._compiled_call_impl is not None:
            args, kwargs = compat.complete_collectives((args, kwargs))
        output = _call_compiled(call, args, kwargs, compiler)
        if group.module is module:
            output = group.cast_outputs(output)
        is_complete = True
        binding.learn_reads(frame.reads_weights, runtime.num_steps)
    finally:
        runtime.exit(frame, is_complete)
    if not runtime.is_materializing and torch.is_grad_enabled():
        follow_pipelining(_runtimes_below)
        _watch_backward(output, partial(runtime.note_backward, module))
    return output


def _call_compiled(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Any) -> Any:
    """The call itself, again under the compiler that was active around the frame, if there was one."""
    if compiler is None:
        return call(*args, **kwargs)
    compat.set_eval_frame(compiler)
    try:
        return call(*args, **kwargs)
    finally:
        compat.set_eval_frame(None)


def unmanaged_params(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Parameters below ``module`` that no call manages: fully qualified name, owner and attribute name."""
    for prefix, owner in module.named_modules():
        binding = binding_of(owner)
        for name, param in owner._parameters.items():
            if param is not None and (binding is None or name not in binding.params):
                yield f"{prefix}.{name}" if prefix else name, owner, name


def _refuse_added_params(group: ShardGroup) -> None:
    """First forward, and later where any module has been given something since: a parameter that nobody manages nor
    ignores would train on this rank's data alone, silently."""
    for fqn, owner, name in unmanaged_params(group.module):
        param = owner._parameters[name]
        if param is not None and param.requires_grad and Site(owner, name) not in group.unmanaged:
            raise RuntimeError(
                f"Parameter '{fqn}' of shape {tuple(param.shape)} was added after gtp_shard, so nobody reduces its "
                f"gradient over mesh axes {group.mesh.mesh_dim_names} (rank {dist.get_rank()}). Change the module "
                "before gtp_shard, and pass the parameter in ignored_params if it is to stay local."
            )


def _runtimes_below(module: nn.Module) -> list[Runtime]:
    bindings = (binding_of(submodule) for submodule in module.modules())
    return list({id(b.group.runtime): b.group.runtime for b in bindings if b is not None}.values())


class GTPLinear:
    """Mixin of ``nn.Linear``: the fused op in the place of its forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        module = cast(nn.Linear, self)
        binding = binding_of(module)
        assert binding is not None
        weight, bias = binding.params["weight"], binding.params.get("bias")
        runtime = binding.group.runtime
        if torch.compiler.is_compiling():
            if torch.is_autocast_enabled(input.device.type) or module._parameters["weight"] is None:
                return super().forward(input)  # type: ignore[misc, no-any-return]
            # Reads the bias as an attribute: whichever it is, the graph gets its value.
            if binding.compiled["weight"].weight.tp_spec is None:
                return compiled_linear(input, module.bias, binding.compiled["weight"])
            output = compiled_parallel_linear(input, module.bias, binding.compiled["weight"])
            return super().forward(input) if output is None else output  # type: ignore[misc]
        is_plain = isinstance(weight, ShardedWeight) and (bias is None or isinstance(bias, WholeParam))
        if not is_plain or torch.is_autocast_enabled(input.device.type) or module._parameters["weight"] is None:
            return _in_frame(self, GTPLinear, input)
        assert isinstance(weight, ShardedWeight)
        weight.follow(Site(module, "weight"))
        if isinstance(bias, WholeParam):
            bias.follow(Site(module, "bias"))
            value: torch.Tensor | None = bias.value()
        else:
            value = module._parameters["bias"]
        if weight.tp_spec is None:
            return linear(input, value, runtime, weight)
        output = parallel_linear(input, value, runtime, weight)
        return _in_frame(self, GTPLinear, input) if output is None else output


class GTPEmbedding:
    """Mixin of ``nn.Embedding``: the fused op in the place of its forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        module = cast(nn.Embedding, self)
        binding = binding_of(module)
        assert binding is not None
        weight = binding.params["weight"]
        assert isinstance(weight, ShardedWeight)
        if torch.compiler.is_compiling():
            return compiled_embedding(input, module.padding_idx, binding.compiled["weight"])
        weight.follow(Site(module, "weight"))
        return embedding(input, module.padding_idx, binding.group.runtime, weight)


class GTPGroupedLinear:
    """Mixin of ``GroupedLinear``: the fused op in the place of its forward."""

    def forward(self, x: torch.Tensor, split_sizes: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        module = cast(GroupedLinear, self)
        binding = binding_of(module)
        assert binding is not None
        if torch.compiler.is_compiling():
            if torch.is_autocast_enabled(x.device.type) or not module.single_grouped_weight:
                return super().forward(x, split_sizes, scales)  # type: ignore[misc, no-any-return]
            compiled = binding.compiled["weight"]
            module.check_input(x, split_sizes, scales, compiled.weight.layout.shape)
            # Reads the bias as an attribute: whichever it is, the graph gets its value.
            own_bias = module.bias
            value = local_part(own_bias) if isinstance(own_bias, torch.Tensor) else None
            return compiled_grouped_linear(x, value, split_sizes, scales, compiled)
        params = {name: binding.params.get(name) for kind in ("weight", "bias") for name in module.names_of(kind)}
        weights = [param for param in params.values() if isinstance(param, ShardedWeight)]
        biases = [param for param in params.values() if isinstance(param, WholeParam)]
        is_plain = (len(weights), len(biases)) == tuple(len(module.names_of(kind)) for kind in ("weight", "bias"))
        if not is_plain or torch.is_autocast_enabled(x.device.type):
            return _in_frame(self, GTPGroupedLinear, x, split_sizes, scales)
        for name, param in params.items():
            assert param is not None
            param.follow(Site(module, name))
        values, runtime = [local_part(bias.value()) for bias in biases], binding.group.runtime
        shape = weights[0].layout.shape
        if module.single_grouped_weight:
            module.check_input(x, split_sizes, scales, shape)
            value = values[0] if values else None
            return sharded_grouped_linear(x, value, split_sizes, scales, runtime, weights[0])
        module.check_input(x, split_sizes, scales, torch.Size((len(weights), *shape)))
        value = torch.stack(values) if values else None
        return several_grouped_linear(x, value, split_sizes, scales, runtime, weights)


def _in_frame(module: Any, mixin: Any, *args: torch.Tensor | None) -> torch.Tensor:
    """The stock forward below ``mixin``, reading the weight as an attribute in a frame of its own."""
    binding = binding_of(module)
    assert binding is not None
    frame = binding.group.runtime.enter(module, lambda num_steps: True)
    is_complete = False
    try:
        output: torch.Tensor = super(mixin, module).forward(*args)
        is_complete = True
        return output
    finally:
        binding.group.runtime.exit(frame, is_complete)


def _watch_backward(output: Any, note: Any) -> None:
    """Tell the runtime that a backward through ``output`` begins, so that its first gathers start at once."""
    for tensor in compat.tree_flatten(output)[0]:
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(lambda grad: note())


def _placement(param: ManagedParam) -> str:
    return str(param.placements[-1])


def is_fusible(module: nn.Module, params: dict[str, ManagedParam]) -> type | None:
    """The mixin with the fused op for ``module``, if its forward is the stock one and its weight is a shard."""
    if isinstance(module, GroupedLinear) and type(module).forward is GroupedLinear.forward:
        weights = [params.get(name) for name in module.names_of("weight")]
        # Each rank computes with the groups, and the slices of them, that expert and tensor parallelism have left it.
        is_cut = "forward" not in module.__dict__ and all(
            isinstance(weight, ShardedWeight)
            and all(isinstance(p, Shard) for p in (weight.tp_spec.placements if weight.tp_spec is not None else ()))
            for weight in weights
        )
        return GTPGroupedLinear if is_cut else None
    weight = params.get("weight")
    if not isinstance(weight, ShardedWeight) or "forward" in module.__dict__:
        return None
    if isinstance(weight.wire, HookWire):
        return None  # what its hooks make of it is for code that knows it
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return GTPLinear
    if weight.tp_spec is None and isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        return GTPEmbedding
    return None


def bind(module: nn.Module, binding: Binding, mixins: tuple[type, ...], classes: dict[tuple[Any, ...], type]) -> None:
    """Attach ``binding`` and swap the module's class for a subclass.

    Args:
        mixins: What comes before everything else: ``(GTPModule,)`` for the module that was passed, which always opens
            a frame; else nothing.
        classes: Subclasses made so far in this call; modules of one class share one.
    """
    fused = is_fusible(module, binding.params)
    weights = [param for param in binding.params.values() if isinstance(param, ShardedWeight)]
    if fused is None and weights:
        binding.know_reads()
    if isinstance(module, GroupedLinear):
        gather_together([weight for weight in weights if weight.sites[0].module is module])
    cls = type(module)
    bases = (*mixins, *((fused,) if fused else ()), GTPManaged if fused and not mixins else GTPFrame, cls)
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
    module.__dict__[_BINDING] = binding
    module.__class__ = classes[key]
