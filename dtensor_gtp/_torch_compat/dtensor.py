"""DTensor: its parts, its dispatcher, its planner."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from .modes import is_in_compiler, skip_code
from .patches import replace, replace_item

_P = ParamSpec("_P")
_R = TypeVar("_R")

try:
    from torch.distributed._local_tensor import maybe_run_for_local_tensor as maybe_run_for_local_tensor
except ImportError:  # a helper of a mode that simulates several ranks in one process; real ranks run without it

    def maybe_run_for_local_tensor(func: Callable[_P, _R]) -> Callable[_P, _R]:
        return func


def local_tensor(tensor: DTensor) -> Tensor:
    """The local shard itself, without the autograd node that ``to_local`` adds."""
    return tensor._local_tensor


def local_part(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor


def dtensor_spec(tensor: DTensor) -> DTensorSpec:
    return tensor._spec


def set_local(tensor: DTensor, local: Tensor, spec: DTensorSpec) -> None:
    """Let ``tensor`` be the DTensor around ``local``, in place."""
    tensor._local_tensor = local
    tensor._spec = spec


def wrap_data_setter(wrapper: Callable[[Callable[[DTensor, Any], None], DTensor, Any], None]) -> None:
    """Call ``wrapper(what_was_there, tensor, value)`` for ``tensor.data = value`` on DTensors, from now on."""
    stock: Any = inspect.getattr_static(DTensor, "data")  # a descriptor; perhaps that of ``wrap_data_getter``
    setter = functools.partial(wrapper, stock.__set__)
    replace("data", DTensor, "data", property(stock.__get__, lambda tensor, value: setter(tensor, value)))


def share_version(tensor: DTensor, local: Tensor) -> None:
    """Let a DTensor and the plain ``local``, which have one memory, count writes to local tensors together: an op of
    DTensor detaches its local tensor without that."""
    if type(local) is Tensor:
        set_local(tensor, local.detach(), dtensor_spec(tensor))


def wrap_data_getter(of_parameter: Callable[[DTensor], Tensor | None]) -> None:
    """Let ``param.data`` of a DTensor give ``of_parameter(param)`` from now on; what torch gives, if that is None."""
    stock: Any = inspect.getattr_static(DTensor, "data")

    def get(tensor: DTensor) -> Any:
        data = None
        if isinstance(tensor, torch.nn.Parameter) and not is_in_compiler():  # the compiler reads it for guards
            data = of_parameter(tensor)
        if data is None:
            return stock.__get__(tensor)
        return data

    replace("data", DTensor, "data", property(get, stock.__set__))


class _FullTensor(torch.autograd.Function):
    """As ``full_tensor(grad_placements=...)``, whose backward fails where the gradient is undefined (2.13)."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, stock: Callable[..., Tensor], grad_placements: list[Placement]) -> Tensor:
        ctx.set_materialize_grads(False)  # None instead of zeros where no gradient arrives
        ctx.mesh = tensor.device_mesh
        ctx.placements = tensor.placements
        ctx.grad_placements = grad_placements
        return stock(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:  # the sharded tensor gets none either
            return None, None, None
        # The redistribution sums or averages over ranks, as ``grad_placements`` say.
        whole = DTensor.from_local(grad, ctx.mesh, ctx.grad_placements, run_check=False)
        return whole.redistribute(placements=ctx.placements), None, None


def wrap_full_tensor(placements_of_grad: Callable[[DTensor], list[Placement] | None]) -> None:
    """Let ``tensor.full_tensor()`` of a DTensor take its gradient as ``placements_of_grad(tensor)``, unless it is None
    or the caller says how, from now on."""
    stock = DTensor.full_tensor

    @functools.wraps(stock)
    def full_tensor(tensor: DTensor, *, grad_placements: Any = None) -> Tensor:
        own = None
        if grad_placements is None:
            own = placements_of_grad(tensor)
        if own is None:  # the caller says how, or the tensor is none of ours
            return stock(tensor, grad_placements=grad_placements)
        whole: Tensor = _FullTensor.apply(tensor, stock, own)  # type: ignore[no-untyped-call]
        return whole

    replace("full_tensor", DTensor, "full_tensor", full_tensor)


def wrap_local(local: Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """A DTensor around ``local`` without checks, and without ``__init__``, which only leaves the compiler."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's shard and where it begins in the logical tensor."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def make_spec(mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """The spec of a contiguous logical tensor."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def own_part(full: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """This rank's part of ``full`` under ``placements``, without communication."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # this rank is part of the mesh
    # DTensor applies placements from left to right, so each one cuts what the last one left.
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | StridedShard):
            # Views, one for each coordinate: ranks without rows have empty ones.
            parts, _ = placement._split_tensor(full, mesh.size(axis), with_padding=False, contiguous=False)
            full = parts[coordinate[axis]]
    return full


def empty_whole(tensor: DTensor) -> Tensor:
    """A plain tensor of the logical shape and strides of ``tensor``, on this rank's device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor._local_tensor.device)


def replay_view(view: Tensor, base: Tensor) -> Tensor:
    """The view of ``base`` that ``view`` is of ``view._base``."""
    replayed: Tensor = view._view_func_unsafe(base)
    return replayed


def distribute_tensor_modules() -> list[Any]:
    """Modules of torch that hold ``distribute_tensor``, the one that defines it first."""
    return [import_module(f"torch.distributed.{name}") for name in ("tensor._api", "tensor", "_state_dict_utils")]


Propagate = Callable[[OpSchema], OutputSharding]


def op_dispatcher() -> Any:
    """DTensor's one dispatcher; it owns the table of sharding strategies."""
    return DTensor._op_dispatcher


def wrap_sharding_propagation(wrapper: Callable[[Propagate, OpSchema], OutputSharding]) -> None:
    """Ask ``wrapper(what_was_there, op_schema)`` how DTensor's ops are sharded, from now on in this process."""
    propagator = op_dispatcher().sharding_propagator
    if inspect.isfunction(wrapper):
        code = wrapper.__code__
    else:
        code = type(wrapper).__call__.__code__
    skip_code(code, recursive=True)  # the compiler of torch 2.11 would trace it, while it finds shapes
    before = propagator.propagate_op_sharding_non_cached
    wrapped = functools.wraps(before)(functools.partial(wrapper, before))
    # torch's cache holds the method that it was made with, so it is replaced by a new one.
    make_cache = type(propagator.propagate_op_sharding)
    replace("propagation", propagator, "propagate_op_sharding_non_cached", wrapped)
    replace("cached propagation", propagator, "propagate_op_sharding", make_cache(wrapped))


class StockRule(Enum):
    """Kinds of torch's own rules for the sharding of an op."""

    POINTWISE = "each element by itself; outputs have placements of torch's own classes"
    SINGLE_DIM = "given for one mesh axis; outputs have placements of torch's own classes"
    WHOLE_MESH = "given for all mesh axes; outputs have the very placements of the operand"


def stock_rule(op: Any) -> StockRule | None:
    """The kind of torch's rule for ``op``; None if DTensor has no rule, or one from another library."""
    propagator = op_dispatcher().sharding_propagator
    single_dim_rule = propagator.op_single_dim_strategy_funcs.get(op)
    rule = single_dim_rule or propagator.op_strategy_funcs.get(op)
    # In torch 2.13 a rule for one axis is in an object that has the function as ``func``.
    module = str(getattr(getattr(rule, "func", rule), "__module__", ""))
    if not module.startswith("torch.distributed.tensor._ops."):
        return None
    if module.endswith("._pointwise_ops"):  # in torch 2.11 not a rule for one axis
        return StockRule.POINTWISE
    if single_dim_rule is not None:
        return StockRule.SINGLE_DIM
    return StockRule.WHOLE_MESH


class _HandlersOfThread:
    """A property of DTensor's dispatcher: the handlers of ops, without those that this thread has put aside.

    DTensor looks here for each op, in all threads. So a thread that wants an op without its handler must not take it
    out of the one table of the process, where another thread is about to look.
    """

    def __init__(self) -> None:
        self._aside = threading.local()  # ops, by thread

    def __get__(self, dispatcher: Any, owner: type) -> Any:
        if dispatcher is None:
            return self  # asked of the class, not of the dispatcher
        # torch's table stays in the dict of the instance. A property with a setter hides it there.
        handlers = dispatcher.__dict__["_custom_op_handlers"]
        aside = getattr(self._aside, "ops", ())
        # A copy without them, only where this thread has put an op aside.
        if aside:
            return {op: handler for op, handler in handlers.items() if op not in aside}
        return handlers

    def __set__(self, dispatcher: Any, handlers: dict[Any, Any]) -> None:  # context parallelism assigns another table
        dispatcher.__dict__["_custom_op_handlers"] = handlers

    @contextmanager
    def without(self, op: Any) -> Iterator[None]:
        """In this thread ``op`` has no handler."""
        before = getattr(self._aside, "ops", ())
        self._aside.ops = (*before, op)
        try:
            yield
        finally:
            self._aside.ops = before  # what outer contexts have put aside


@functools.cache
def _handlers_of_thread() -> _HandlersOfThread:
    handlers = _HandlersOfThread()
    # On the class, because Python looks for properties there alone.
    replace("handlers", type(op_dispatcher()), "_custom_op_handlers", handlers)
    return handlers


def set_dtensor_handler(op: Any, handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Let ``handler(op, args, kwargs)`` run ``op`` whenever one of its arguments is a DTensor."""
    replace_item("handler", op_dispatcher()._custom_op_handlers, op, handler)


def foreach_writes() -> list[Any]:
    """The foreach ops on DTensors that write to their first argument. They change no version of it."""
    propagator = op_dispatcher().sharding_propagator
    ops = (*propagator.op_strategy_funcs, *propagator.op_single_dim_strategy_funcs)  # both kinds of rules
    return [op for op in ops if str(op).startswith("aten._foreach_") and str(op).split(".")[1].endswith("_")]


def stock_dtensor_dispatch(op: Any) -> AbstractContextManager[None]:
    """Run ``op`` as DTensor does without the handler that ``set_dtensor_handler`` gave it. Other threads keep it."""
    return _handlers_of_thread().without(op)
