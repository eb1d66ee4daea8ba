"""What ``gtp_shard`` attaches to a module, and how to find it below a module."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Placement

from .._howto import printable
from .._params.managed_param import ManagedParam, Site
from .._params.sharded_weight import ShardedWeight
from .._params.weight_group import WeightGroup
from .._params.whole_param import WholeParam
from .._schedule.runtime import Runtime
from ..ops.compiled_weight import CompiledWeight, materialize, note_read
from ..policy import SchedulePolicy
from .input_casts import InputCasts

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # parts of names, see ``plain_name``
BINDING = "_gtp_binding"


class Reads:
    """Whether a forward, or a method that counts as one, reads sharded weights as attributes. True
    from the start for a module that owns weights and has no fused forward; otherwise learned in the
    first call."""

    def __init__(self) -> None:
        self.is_reading: bool | None = None  # None: not known yet
        # Number of optimizer steps before the call that read weights for the first time, though
        # earlier calls did not.
        self._learned_in: int | None = None

    def may_read(self, num_steps: int) -> bool:
        """Whether tensors that a call after ``num_steps`` optimizer steps saves need hooks. The
        answer changes between steps only: a recomputation (activation checkpointing) must save
        tensors as its forward did."""
        if self._learned_in is not None and num_steps != self._learned_in:
            self.is_reading = True
            self._learned_in = None
        # None, not known yet: use hooks. Autograd would keep full weights without them.
        return self.is_reading is not False

    def learn(self, is_reading: bool, num_steps: int) -> None:
        """Note what a complete call after ``num_steps`` optimizer steps did."""
        if self.is_reading is None:
            self.is_reading = is_reading
        elif is_reading and not self.is_reading and self._learned_in is None:
            self._learned_in = num_steps  # ``may_read`` answers yes from the next step on


# A placement on the mesh of the call; a pair of a placement and another mesh; or torch's
# ``ShardPlacementResult``.
ShardPlacementFn = Callable[[nn.Parameter], Placement | tuple[Placement | None, DeviceMesh] | Any | None]


class Arguments(NamedTuple):
    """The arguments of ``gtp_shard`` except the module."""

    mesh: DeviceMesh  # 1-D (gtp) or 2-D (replicate, gtp)
    reshard_after_forward: bool
    shard_placement_fn: ShardPlacementFn | None
    mp_policy: MixedPrecisionPolicy
    schedule: SchedulePolicy
    ignored_params: Set[nn.Parameter]
    offload_policy: OffloadPolicy = OffloadPolicy()
    shard_optimizer: bool = False

    @property
    def offload(self) -> CPUOffloadPolicy | None:
        if isinstance(self.offload_policy, CPUOffloadPolicy):
            return self.offload_policy
        return None


@dataclass(eq=False)
class ShardGroup:
    """One ``gtp_shard`` call on ``module``."""

    module: nn.Module
    arguments: Arguments
    runtime: Runtime  # shared with the outermost call around it, once there is one
    unmanaged: set[Site]  # where ignored parameters below the module are registered
    params: list[ManagedParam] = field(default_factory=list)
    # At the last search for parameters that were added later, see ``frames``.
    checked: tuple[int, int] = (-1, -1)


class Fused(NamedTuple):
    """What runs in place of the stock forward of a layer."""

    forward: Callable[..., Any]  # of the module and its inputs
    multiplies: bool  # with the weight, in a GEMM


class Binding:
    """What ``gtp_shard`` attaches to ``module``. ``params`` are registered on this very module."""

    def __init__(self, module: nn.Module, group: ShardGroup, params: dict[str, ManagedParam]) -> None:
        self.group = group
        self.params = params
        self.reads = Reads()
        # Parameters that a parametrization hides for a while, see ``put_aside``.
        self.set_aside: dict[str, nn.Parameter | None] = {}
        self.sites = {name: Site(module, name) for name in params}
        self.compiled = {  # the sharded weights as compiled code names them
            name: CompiledWeight(lambda: group.runtime, param, self.sites[name])
            for name, param in params.items()
            if isinstance(param, ShardedWeight)
        }
        self.fused_alone: Fused | None = None  # where each weight is gathered by itself
        self.block: nn.Module | None = None  # the one around ``module`` that is gathered as a whole
        # Of that block. All its modules have it.
        self.weight_group: WeightGroup
        self.call_impl: Callable[..., Any]  # what a call runs within its frame
        # The same, of a module that was compiled before.
        self.compiled_call = module._compiled_call_impl
        self.dressed: dict[str, Any] = {}  # attributes that the module has from us now
        self.input_casts: InputCasts | None = None  # of a block
        self.is_registering = False  # whether torch looks for the attribute that it is about to register

    @property
    def fused(self) -> Fused | None:
        """What runs in place of the module's forward; None for the stock one, as in a group."""
        if self.block is not None:
            return None
        return self.fused_alone

    def read(self, name: str, registered: Any) -> Any:
        """What code reads as attribute ``name`` of the module, where ``registered`` is registered
        as that parameter."""
        if self.is_registering:
            return registered
        managed = self.params[name]
        if torch.compiler.is_compiling():  # the read becomes an op of the compiled graph
            if isinstance(managed, WholeParam):
                value = managed.value()
                return note_read(value) if managed.gives_copies else value
            return materialize(self.compiled[name])
        runtime = self.group.runtime
        if runtime.is_materializing:
            managed.follow(self.sites[name])
            if managed.registration.is_cut_again and not managed.is_readable:
                return registered  # an outer fully_shard, which has not gathered it yet, reads it
            return runtime.reads.read(managed)
        if not managed.is_pinned:  # outside of passes, and not after ``unshard``
            return registered
        managed.follow(self.sites[name])
        if isinstance(managed, ShardedWeight):
            return runtime.reads.read_pinned(managed)
        return runtime.reads.read(managed)

    def put_aside(self, params: dict[str, Any], name: str) -> None:
        """A parametrization that comes and goes within a forward, as PEFT's of experts, takes the
        full weight and, when it goes, registers that. So the parameter of ``params`` is set aside
        here, and ``put_back`` then."""
        if name in self.params and name in params and self.group.runtime.is_materializing:
            self.set_aside[name] = params.get(name)
            self.group.runtime.reads.note_parametrized(self.params[name])

    def put_back(self, params: dict[str, Any], name: str) -> bool:
        """Register again what was set aside, if something was."""
        if name not in self.set_aside:
            return False
        params[name] = self.set_aside.pop(name)
        return True


class BoundModule(nn.Module):
    """Base of the mixins of modules that have a binding."""

    _gtp_binding: Binding

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Classes that ``bind`` makes are no classes of the user: a base that keeps a list of its
        subclasses, or wants arguments for them, is not asked."""


def binding_of(module: nn.Module) -> Binding | None:
    return cast("Binding | None", module.__dict__.get(BINDING))


def bindings_of(modules: Iterable[nn.Module]) -> Iterator[Binding]:
    """Of those that have one."""
    for module in modules:
        if (binding := binding_of(module)) is not None:
            yield binding


def params_of(bindings: Iterable[Binding]) -> list[ManagedParam]:
    """Each once, in an order that is the same on all ranks."""
    return list(dict.fromkeys(param for binding in bindings for param in binding.params.values()))


def outermost_calls(module: nn.Module) -> list[ShardGroup]:
    """The calls of ``gtp_shard`` on ``module`` or below that no other call is around."""
    binding = binding_of(module)
    if binding is not None and binding.group.module is module:
        return [binding.group]
    return [group for child in module.children() for group in outermost_calls(child)]


def groups_below(module: nn.Module) -> list[ShardGroup]:
    """The calls whose parameters are below ``module``. Each once, in an order that is the same on all ranks."""
    return list(dict.fromkeys(binding.group for binding in bindings_of(module.modules())))


def runtimes_below(module: nn.Module) -> list[Runtime]:
    """Each once, in an order that is the same on all ranks."""
    return list(dict.fromkeys(group.runtime for group in groups_below(module)))


def managed_params(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, ManagedParam]]:
    """Names and managed parameters below ``module``, a tied one once for each name."""
    for prefix, submodule in module.named_modules(remove_duplicate=remove_duplicate):
        binding = binding_of(submodule)
        if binding is not None:
            for name, param in binding.params.items():
                yield join_name(prefix, name), param


def unmanaged_params(module: nn.Module) -> Iterator[tuple[str, Site, nn.Parameter]]:
    """Names for messages, places and parameters below ``module`` that no call manages."""
    for prefix, submodule in module.named_modules():
        binding = binding_of(submodule)
        for name, param in dict.items(submodule._parameters):  # gathers nothing, see ``FullParams``
            if param is not None and (binding is None or name not in binding.params):
                yield printable(join_name(prefix, name)), Site(submodule, name), param


def trains_unmanaged(group: ShardGroup) -> bool:
    """Whether a parameter below the module of ``group`` is trained that no call manages or ignores.
    Each step asks (0.5 ms for the 1,071 modules of T5-large)."""
    waiting: list[nn.Module | None] = [group.module]  # a child may be None
    seen: set[nn.Module] = set()
    while waiting:
        module = waiting.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        if params := module._parameters:
            managed: Container[str] = ()
            if (binding := binding_of(module)) is not None:
                managed = binding.params
            for name, param in params.items():
                is_trained = param is not None and name not in managed and param.requires_grad
                if is_trained and Site(module, name) not in group.unmanaged:
                    return True
        if children := module._modules:
            waiting += children.values()
    return False


def plain_name(name: str) -> str:
    """Without the parts that wrappers of torch.compile and of activation checkpointing add, as torch's state dicts."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def join_name(prefix: str, name: str) -> str:
    if not prefix:
        return name
    return f"{prefix}.{name}"
