"""Methods of ``nn.Module`` that modules with managed parameters have from us, as attributes of the
instance.

Other libraries ask a module whether they may wrap it in ``DistributedDataParallel``, and whether
its ranks must stay together; these answers are here, too.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, MethodType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.tensor as distributed_tensor
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._dtensor.random_init import zero_row
from .._howto import printable, see
from .._params.group_views import FullParams
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from ..quant.native import native_of
from .binding import BoundModule
from .frames import ADVICE_FOR_JIT, as_forward

logger = logging.getLogger(__name__)

INSTEAD_OF_DDP = (
    "gtp_shard averages its gradients already. Call the module itself. With accelerate write 'from "
    "dtensor_gtp.integrations.accelerate import GTPAccelerator as Accelerator', with transformers 'from "
    "dtensor_gtp.integrations.transformers import GTPTrainer as Trainer', with Lightning 'from "
    "dtensor_gtp.integrations.lightning import GTPStrategy', 'Trainer(strategy=GTPStrategy())', and call gtp_shard "
    "in configure_model."
)


class _Changed(dict[str, Any]):
    """``_parameters`` for torch's ``_apply``: it iterates over those that ``fn`` changes.

    Torch would swap all DTensors for new ones, also in a ``to`` without effect, as loops and
    forwards have it. The backward of an earlier forward would find another parameter.
    """

    def __init__(self, params: dict[str, Any], fn: Callable[[Tensor], Tensor], note: Callable[[str], None]) -> None:
        super().__init__(dict.items(params))  # as registered
        self._fn = fn
        self._note = note  # called with the name of each that changes
        self._last: tuple[Tensor, Tensor] | None = None  # a tensor, and ``fn`` of it

    def items(self) -> Any:
        for name, param in dict.items(self):
            if param is None:
                continue
            with torch.no_grad():
                is_changed = self.apply(param) is not param  # ``to`` without effect gives the tensor itself
            if is_changed:
                self._note(name)
            if not isinstance(param, DTensor):
                yield name, param  # torch changes a plain one in place
            elif is_changed:
                # Torch cannot swap a frozen one that has an accumulation node, of hooks or of an
                # earlier backward.
                is_frozen = param.is_floating_point() and not param.requires_grad
                param.requires_grad_(param.requires_grad or is_frozen)
                try:
                    yield name, param
                finally:  # torch has swapped it and asks for the next one, or has raised
                    param.requires_grad_(param.requires_grad and not is_frozen)

    def apply(self, tensor: Tensor) -> Tensor:
        """``fn(tensor)``, which torch asks for a second time."""
        if self._last is None or self._last[0] is not tensor:
            self._last = tensor, self._fn(tensor)
        return self._last[1]


def _apply(self: BoundModule, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
    """``to``, ``to_empty`` and the like may register new parameter objects: follow them, and keep
    ties tied."""
    binding = self._gtp_binding
    attributes = self.__dict__
    shown = attributes["_parameters"]
    registered = shown
    group = None
    if isinstance(shown, FullParams):  # the module is in a group whose full weights are there
        registered = shown.sharded
        group = shown.group

    def refuse_in_group(name: str) -> None:
        if group is not None and name in binding.params:
            raise RuntimeError(
                f"Parameter '{binding.params[name].fqn}' cannot be cast or moved in a forward or between unshard() and "
                f"reshard(), because it was gathered with block '{group.fqn}' (rank {dist.get_rank()}). Do it before "
                "gtp_shard, which gathers blocks of several dtypes weight by weight."
            )

    changed = _Changed(registered, fn, refuse_in_group)
    attributes["_parameters"] = changed  # torch goes over its ``items``
    stock: Any = type(self)._apply
    try:
        result = stock(self, changed.apply, *args, **kwargs)
        registered.update(dict.items(changed))  # torch may have registered other objects there
        attributes["_parameters"] = registered  # where ``follow`` looks
        for name, managed in binding.params.items():
            managed.follow(binding.sites[name])
    finally:
        attributes["_parameters"] = shown  # it has the same objects, or a group's full weights
    return result


def _named_members(self: BoundModule, *args: Any, **kwargs: Any) -> Any:
    """Behind ``parameters()`` and the like."""
    members = type(self)._named_members(self, *args, **kwargs)
    if compat.is_in_compiler():
        return members
    # Without children it is mostly asked by hooks of tools (CommDebugMode), which must not launch a
    # gather.
    may_gather = kwargs.get("recurse", True)
    return _as_users_see(self._gtp_binding.group.runtime, members, may_gather)


def _as_users_see(runtime: Runtime, members: Iterator[tuple[str, Any]], may_gather: bool) -> Iterator[tuple[str, Any]]:
    """``members`` of ``named_parameters()``: the full weights in a forward, else the shards."""
    if may_gather and runtime.reads.gives_full_params:
        yield from runtime.reads.full_params(members, runtime.members.by_id())
        return
    yield from members


def get_parameter(self: BoundModule, target: str) -> Any:
    """In a forward the full weight, which is no ``nn.Parameter``, as torch's method demands."""
    if self._gtp_binding.group.runtime.is_materializing:
        path, _, name = target.rpartition(".")
        params = self.get_submodule(path)._parameters
        if name in params:
            return params[name]
    return type(self).get_parameter(self, target)


def register_buffer(self: BoundModule, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
    """As in ``nn.Module``, or ``remove_parametrizations`` registers the full weight again."""
    if not self._gtp_binding.put_back(self._parameters, name):
        type(self).register_buffer(self, name, tensor, persistent)


def register_parameter(self: BoundModule, name: str, param: nn.Parameter | None) -> None:
    """As in ``nn.Module``, or ``remove_parametrizations`` registers a full parameter again."""
    binding = self._gtp_binding
    if binding.put_back(self._parameters, name):
        return
    try:
        # Torch asks whether there is such an attribute. An outer ``fully_shard``, which registers
        # its parameters so in recurrent layers, may have freed the shard: nobody may gather it.
        binding.is_registering = True
        type(self).register_parameter(self, name, param)
    finally:
        binding.is_registering = False


def _save_to_state_dict(self: BoundModule, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Free gathered weights: whoever gets the shard may write to it, as ``dcp.load`` does, perhaps later. Such writes
    count in the version of the shard."""
    type(self)._save_to_state_dict(self, destination, prefix, keep_vars)
    for name, managed in self._gtp_binding.params.items():
        if isinstance(managed, ShardedWeight):
            self._gtp_binding.group.runtime.keeper.drop_kept(managed)  # in a group: of all its weights
            if not keep_vars:
                _share_version(destination.get(prefix + name), managed.local)


def _share_version(value: Any, local: Tensor) -> None:
    """Let a value of a state dict and the shard ``local``, if they have one memory, count writes together."""
    if isinstance(value, DTensor) and type(local) is Tensor:
        detached = compat.local_tensor(value)
        if detached.data_ptr() == local.data_ptr() and detached.shape == local.shape:
            compat.share_version(value, local)


def _load_from_state_dict(self: BoundModule, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Each rank takes its part of whole tensors. ``assign=True`` registers other objects: follow
    them, and report an error for what is no shard."""
    before = dict(self._parameters.items())  # the shards, also after ``unshard``
    is_assigned = args[0].get("assign_to_params_buffers", False)  # torch's metadata of the module
    for name, param in before.items():
        part = _part_of(state_dict.get(prefix + name), param, is_assigned)
        if part is not None:
            # In place, as hooks of torch rename keys: the caller looks for missing ones in this
            # very dict.
            state_dict[prefix + name] = part
    type(self)._load_from_state_dict(self, state_dict, prefix, *args)
    binding = self._gtp_binding
    for name, managed in binding.params.items():
        try:
            managed.follow_assigned(binding.sites[name], before[name])
        except RuntimeError as error:
            args[-1].append(str(error))  # the list of error messages


def _part_of(value: Any, param: nn.Parameter | None, is_assigned: bool) -> Tensor | None:
    """This rank's part of a whole tensor for a sharded ``param``; None for all that is loaded as it
    is."""
    if not isinstance(param, DTensor) or not isinstance(value, Tensor):
        return None
    if isinstance(value, DTensor) or value.shape != param.shape:
        return None  # a DTensor is loaded as it is; torch reports another shape
    is_subclass = type(compat.local_tensor(param)) not in (Tensor, nn.Parameter)
    if is_assigned and is_subclass and native_of(param) is None:
        return None  # a plain part would replace e.g. a weight of torchao: refused as any other object
    # Without communication: each rank has the whole tensor. Hooks of native weights quantize the part.
    return distributed_tensor.distribute_tensor(value.detach(), param.device_mesh, param.placements, src_data_rank=None)


def _refuse_copy(self: nn.Module, memo: dict[int, Any]) -> NoReturn:
    raise RuntimeError(
        f"{type(self).__name__} cannot be copied after gtp_shard, because the copy would share its runtime. Copy the "
        "module before gtp_shard, or build it again and load the state dict; for averages of weights use "
        f"dtensor_gtp.optim.ShardedEMA. {see('ema')}"
    )


def _refuse_pickle(self: nn.Module) -> NoReturn:
    raise RuntimeError(
        f"{type(self).__name__} cannot be pickled or copied after gtp_shard, because it holds process groups. Save its "
        f"state_dict() and load it into a new module. {see('export')}"
    )


def _refuse_script(self: nn.Module) -> NoReturn:
    raise RuntimeError(f"torch.jit.script cannot compile a {type(self).__name__} after gtp_shard. {ADVICE_FOR_JIT}")


def _refuse_share(self: nn.Module) -> NoReturn:
    raise RuntimeError(
        f"share_memory() cannot share a {type(self).__name__} after gtp_shard: each rank has shards of its own. Share "
        "tensors of a full state dict instead."
    )


def extra_repr(self: BoundModule) -> str:
    own = type(self).extra_repr(self)
    params = self._gtp_binding.params
    if not params:
        return own
    placements = [f"{name}: {param.placements[param.gtp_axis]}" for name, param in params.items()]
    shown = f"gtp=[{', '.join(placements)}]"
    if not own:
        return shown
    if "\n" in own:  # lists of parameters have one line for each
        return f"{own}\n  {shown}"
    return f"{own}, {shown}"


def _zero_padding_row(self: Any) -> None:
    """Replaces torch's method with which ``reset_parameters`` zeros the row of ``padding_idx``."""
    weight = self._parameters.get("weight")
    if not isinstance(weight, DTensor):  # e.g. a plain one in ``whole_weights``
        type(self)._fill_padding_idx_with_zero(self)
    elif self.padding_idx is not None:
        zero_row(weight, self.padding_idx)


class PreparedByAccelerate:
    """Class attribute ``_is_accelerate_prepared``, which accelerate reads before it wraps a module.

    Without a value of the module's own, which ``GTPAccelerator`` sets, the module would end in DDP:
    refuse. The error comes before accelerate's own on GPUs, which takes the DTensors for tensor
    parallelism. For others who read all attributes, as debuggers do, there is none.
    """

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> PreparedByAccelerate:
        if module is None:
            return self
        reader = sys._getframe(1).f_globals.get("__name__", "")  # the module whose code reads the attribute
        if reader.partition(".")[0] != "accelerate":
            what = f"'{type(module).__name__}' object"
            raise AttributeError(f"{what} has no attribute '_is_accelerate_prepared'")
        what = type(module).__name__
        raise RuntimeError(f"accelerate cannot prepare a {what} after gtp_shard: {INSTEAD_OF_DDP}")


class SeenByTransformers:
    """Value of ``_is_fsdp_managed_module`` of a module whose ranks must run the same layers: true
    for transformers.

    There ``generate`` then goes on until all ranks have stopped (``synced_gpus``), and LayerDrop
    skips no layer. torch.compile reads the attribute, too, and would take the module for one of
    ``fully_shard``: false for it. In code that it traces, transformers is the reader.
    """

    def __bool__(self) -> bool:
        if torch.compiler.is_dynamo_compiling():  # false in Python, true where it is traced
            return True
        reader = sys._getframe(1).f_globals.get("__name__", "")  # the module whose code asks
        return not reader.startswith("torch.")  # ``torch._dynamo`` asks about modules that it traces


SEEN_BY_TRANSFORMERS = SeenByTransformers()


def run_all_layers(module: nn.Module) -> None:
    """Switch LayerDrop off in those models of transformers that do not look at
    ``_is_fsdp_managed_module`` (BART and its relatives): each rank would skip layers of its own.
    The config, which is saved, keeps the number."""
    names = []
    for name, submodule in module.named_modules():
        is_of_transformers = type(submodule).__module__.startswith("transformers.")
        if is_of_transformers and submodule.__dict__.get("layerdrop"):
            submodule.layerdrop = 0.0
            names.append(printable(name))
    if names:
        text = (
            "layerdrop of %s is 0 after gtp_shard: all ranks must run the same layers. Those of "
            "transformers that support fully_shard do so, too"
        )
        logger.warning(text, ", ".join(names))


def resize_or_refuse(stock: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``resize_token_embeddings`` of a model of transformers after ``gtp_shard``: of another size
    it is refused, as it would copy sharded rows into a plain tensor."""

    @functools.wraps(stock)
    def resize(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **options: Any
    ) -> Any:
        num_rows: int = self.get_input_embeddings()._parameters.get("weight").shape[0]  # of the whole weight
        wanted = new_num_tokens if new_num_tokens is not None else num_rows
        if pad_to_multiple_of is not None:
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of  # rounded up
        if wanted != num_rows:
            raise RuntimeError(
                f"resize_token_embeddings cannot change {num_rows} rows to {wanted} after gtp_shard, which has split "
                "them into shards. Call it before gtp_shard, and create the optimizer afterwards."
            )
        return stock(self, new_num_tokens, pad_to_multiple_of, **options)

    return resize


def generate_together(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``generate`` of a model of transformers whose ``synced_gpus`` is False by default (Whisper),
    where others look at ``_is_fsdp_managed_module``: true if the caller does not say otherwise."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def generate(self: Any, *args: Any, **options: Any) -> Any:
        if "synced_gpus" not in signature.bind_partial(self, *args, **options).arguments:
            options["synced_gpus"] = True
        return stock(self, *args, **options)

    return generate


def is_alone_by_default(stock: Callable[..., Any]) -> bool:
    """Whether a method ``generate`` has ``synced_gpus=False``."""
    parameter = inspect.signature(stock).parameters.get("synced_gpus")
    return parameter is not None and parameter.default is False


def _generate(module: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The method ``generate`` of ``module`` after ``gtp_shard``; ``stock`` is that of its class."""
    generate = stock
    are_together = "_is_fsdp_managed_module" in module.__dict__  # ``bind`` has set it: there are other ranks
    if are_together and is_alone_by_default(stock):
        generate = generate_together(stock)
    # One that a model has of its own may read parameters outside of a forward, as that of BLIP-2 does.
    if stock.__module__.startswith("transformers.models.") and module._gtp_binding.params:
        generate = torch.no_grad()(as_forward(MethodType(generate, module), "generate"))  # as all of them are
    return generate


class Refusal(str):
    """An error message; code that asks whether it is true raises it."""

    def __bool__(self) -> bool:
        raise RuntimeError(self)


_OF_ALL: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "_apply": _apply,
        "_named_members": _named_members,
        "get_parameter": get_parameter,
        "register_buffer": register_buffer,
        "register_parameter": register_parameter,
        "_save_to_state_dict": _save_to_state_dict,
        "_load_from_state_dict": _load_from_state_dict,
        "extra_repr": extra_repr,
        "__deepcopy__": _refuse_copy,
        "__getstate__": _refuse_pickle,  # also asked by copy.copy
        "__prepare_scriptable__": _refuse_script,  # by ``torch.jit.script``
        "share_memory": _refuse_share,
    }
)


def override(module: nn.Module) -> None:
    """Give ``module``, which has a binding, these methods."""
    cls = type(module)
    attributes = module.__dict__
    for name, function in _OF_ALL.items():
        attributes[name] = MethodType(function, module)  # on the instance: its class stays as it is
    if callable(resize := getattr(cls, "resize_token_embeddings", None)):
        attributes["resize_token_embeddings"] = MethodType(resize_or_refuse(resize), module)
    stock = getattr(cls, "generate", None)
    if inspect.isfunction(stock) and "generate" not in attributes:  # or the user has put another one there
        generate = _generate(module, stock)
        if generate is not stock:
            attributes["generate"] = MethodType(generate, module)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        attributes["_fill_padding_idx_with_zero"] = MethodType(_zero_padding_row, module)
    # ``torch.distributed.tensor.distribute_module``, which ``parallelize_module`` calls, asks for
    # this first.
    attributes["_distribute_module_applied"] = Refusal(
        f"parallelize_module expects modules that gtp_shard has not sharded yet, but got a {cls.__name__}: tensor "
        "parallelism would split the shards of gtp_shard. Call parallelize_module first, then gtp_shard, then "
        "fully_shard."
    )
