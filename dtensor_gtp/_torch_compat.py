"""The only file that imports private torch symbols.

Everything else in the package takes them from here, so that a torch release that moves one of them is handled in one
place. Tested on torch 2.11 and 2.13. A symbol that a release lacks has its replacement beside the import, with the
release it is for.
"""

from __future__ import annotations

import functools
import inspect
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from types import CodeType
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.autograd import Variable
from torch.distributed import _composable_state as composable_state
from torch.distributed import _functional_collectives as funcol
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
    _resolve_process_group,
)
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor import _random as dtensor_random
from torch.distributed.tensor import _redistribute as redistribute_module
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch as python_dispatch
from torch.utils import checkpoint as checkpoint_module
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T", bound=torch.Tensor)

try:
    from torch.distributed._local_tensor import maybe_run_for_local_tensor
except ImportError:  # a helper of a mode that simulates several ranks in one process; real ranks run without it

    def maybe_run_for_local_tensor(func: Callable[_P, _R]) -> Callable[_P, _R]:
        return func


_HOST_BACKENDS = frozenset({"gloo", "fake"})

# torch 2.11 has these collectives under other names, which later releases warn of.
_all_gather_autograd: Callable[..., torch.Tensor] = (
    getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
)
_reduce_scatter_autograd: Callable[..., torch.Tensor] = (
    getattr(funcol, "reduce_scatter_single_autograd", None) or funcol.reduce_scatter_tensor_autograd
)

PackHook = Callable[[torch.Tensor], Any]
UnpackHook = Callable[[Any], torch.Tensor]


# --- autograd ---------------------------------------------------------------------------------------------------------


def ignores_saved_weight() -> bool:
    """Whether the node of autograd's graph that runs now is a convolution's whose input needs no gradient: it unpacks
    the weight that it has saved, and does not look at the values."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name().startswith("ConvolutionBackward") and node.next_functions[0][0] is None


def current_graph_task_id() -> int:
    """Id of the autograd graph task that runs on this thread, -1 outside of backward."""
    return torch._C._current_graph_task_id()


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now has ended, on the caller's current streams."""
    Variable._execution_engine.queue_callback(callback)


def grad_dtype(param: torch.Tensor) -> torch.dtype:
    """That of ``param.grad``: as a rule the parameter's, but ``fully_shard`` of torch 2.15 wants its reduction's."""
    dtype: torch.dtype | None = getattr(param, "grad_dtype", None)
    return param.dtype if dtype is None else dtype


def is_awaited(ctx: Any, index: int) -> bool:
    """Whether the backward that runs now wants the gradient of a leaf: ``ctx.needs_input_grad`` does not know that
    ``torch.autograd.grad`` or ``backward(inputs=...)`` asked for others only.

    Args:
        ctx: Context of a ``torch.autograd.Function`` in its backward.
        index: Index of the leaf among the tensor arguments of its forward; the leaf needs a gradient.
    """
    return bool(torch._C._will_engine_execute_node(ctx.next_functions[index][0]))


def accumulate_node(leaf: torch.Tensor) -> torch.autograd.graph.Node:
    """The node of autograd's graph that takes the gradient of ``leaf``, which needs one."""
    with torch.inference_mode(False), torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(leaf).node


def is_node_awaited(node: torch.autograd.graph.Node) -> bool:
    """Whether the backward that runs now comes to ``node``; as :func:`is_awaited`, without a context."""
    return bool(torch._C._will_engine_execute_node(node))


def push_saved_tensors_hooks(pack: PackHook, unpack: UnpackHook) -> None:
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensors_hooks() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()


def top_saved_tensors_hooks() -> tuple[PackHook, UnpackHook] | None:
    """The innermost active pair of saved-tensor hooks, or None."""
    return cast("tuple[PackHook, UnpackHook] | None", torch._C._autograd._top_saved_tensors_default_hooks(False))


def saved_tensors_hooks_enabled() -> bool:
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def post_accumulate_grad_hooks(param: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Hooks registered with ``Tensor.register_post_accumulate_grad_hook``, in order."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    return list(hooks.values()) if hooks else []


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """Hooks registered with ``Tensor.register_hook``, in order."""
    hooks = getattr(tensor, "_backward_hooks", None)
    return list(hooks.values()) if hooks else []


def in_func_transform() -> bool:
    """Whether a transform of ``torch.func`` (grad, vmap, jacrev, jvp) runs the code that asks."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def without_torch_function(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` as if no argument had a ``__torch_function__``; what it returns is not converted to a subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def wrapper_tensor(cls: type[_T], like: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> _T:
    """A contiguous tensor of class ``cls``, a subclass of Tensor, without memory of its own, on the device of ``like``.

    Args:
        like: If it has that shape, its strides count as well.
    """
    stride = like.stride() if like.shape == shape else torch.empty(shape, device="meta").stride()
    return cast("_T", make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=like.device))


def is_profiling() -> bool:
    """True while a profiler records; ``record_function`` costs microseconds also when nobody listens."""
    return bool(torch._C._autograd._profiler_enabled())


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Number of owners of the memory behind ``storage`` (tensors, autograd nodes, Python storage objects)."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def unseen_by_checkpoint_policies() -> AbstractContextManager[Any]:
    """A context whose ops selective activation checkpointing neither counts nor caches nor skips.

    It expects a recomputation to run the very ops of the forward, which is not so for ops that serve later uses.
    """
    if not asks_checkpoint_policy():
        return nullcontext()
    return _without_checkpoint_modes(python_dispatch._get_current_dispatch_mode_stack())


# What is active in the forward, and in the recomputation, of a checkpoint with a policy.
POLICY_MODES: tuple[type[Any], ...] = (
    checkpoint_module._CachingTorchDispatchMode,
    checkpoint_module._CachedTorchDispatchMode,
)


def asks_checkpoint_policy() -> bool:
    """Whether a selective checkpoint asks its policy about the ops that run now."""
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 0 and any(isinstance(torch._C._get_dispatch_stack_at(i), POLICY_MODES) for i in range(depth))


def is_tracing() -> bool:
    """Whether the ops that run now are recorded in a graph by the compiler."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """A context in which no mode, that of a tracing compiler among them, sees the ops."""
    return cast("AbstractContextManager[Any]", python_dispatch._disable_current_modes())


@contextmanager
def _without_checkpoint_modes(modes: list[Any]) -> Iterator[None]:
    others = [mode for mode in modes if not isinstance(mode, POLICY_MODES)]
    _replace_dispatch_modes(len(modes), others)
    try:
        yield
    finally:
        _replace_dispatch_modes(len(others), modes)


def _replace_dispatch_modes(num_modes: int, modes: list[Any]) -> None:
    for _ in range(num_modes):
        python_dispatch._pop_mode()
    for mode in modes:
        python_dispatch._push_mode(mode)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target, all in one launch where their shapes and strides allow it."""
    torch._foreach_copy_(targets, sources)


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Fail if ``condition`` is false: at once on a CPU, when the device comes to it elsewhere.

    Kernels take messages of less than 255 characters: what is beyond is left out.
    """
    torch._assert_async(condition, message[:254])


def sleep_stream(cycles: int) -> None:
    """Make the current CUDA stream spin for ``cycles`` of the SM clock."""
    torch.cuda._sleep(cycles)


def make_wrapper_subclass(cls: type[torch.Tensor], shape: tuple[int, ...], **options: Any) -> Any:
    """A tensor of class ``cls`` that has no memory of its own; the options are strides, dtype and device."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, **options)


# --- torch.compile ----------------------------------------------------------------------------------------------------

# Makes its argument the compiler of this thread's frames (None: they run as they are) and returns the last one.
set_eval_frame: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


def skip_code(code: CodeType, *, recursive: bool = False) -> None:
    """Let the compiler leave frames of ``code`` alone, and what they call too if ``recursive``; they may be inlined."""
    eval_frame = import_module("torch._dynamo.eval_frame")
    action = eval_frame.FrameAction
    strategy = eval_frame.FrameExecStrategy(action.SKIP, action.SKIP if recursive else action.DEFAULT)
    eval_frame.set_code_exec_strategy(code, strategy)


# --- DTensor and meshes -----------------------------------------------------------------------------------------------


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The local shard itself, without the autograd node that ``to_local`` adds."""
    return tensor._local_tensor


def dtensor_spec(tensor: DTensor) -> DTensorSpec:
    return tensor._spec


def read_items(key: str, metadata: Any, offsets: tuple[int, ...], sizes: torch.Size) -> list[Any]:
    """What ``torch.distributed.checkpoint`` has to read for one part of a stored tensor."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), sizes)
    return list(create_read_items_for_chunk_list(key, metadata, [chunk]))


def wrap_local(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """A DTensor around ``local``; unlike ``DTensor.from_local`` it does not check, so it costs microseconds."""
    # Its __init__ does nothing but leave torch.compile, which costs more than all the rest.
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's shard and where it begins in the logical tensor."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def make_spec(mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """Spec of a contiguous logical tensor of ``shape``."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def mesh_coordinate(mesh: DeviceMesh, axis: int) -> Any:
    """This rank's coordinate on one axis of ``mesh``; symbolic where torch traces or simulates several ranks."""
    return mesh._sym_get_coordinate(axis)


def distribute_tensor_modules() -> list[Any]:
    """Modules of torch that hold ``distribute_tensor``, the one that defines it first."""
    names = ("tensor._api", "tensor", "_state_dict_utils")
    return [import_module(f"torch.distributed.{name}") for name in names]


Propagate = Callable[[OpSchema], OutputSharding]


def wrap_sharding_propagation(wrapper: Callable[[Propagate, OpSchema], OutputSharding]) -> None:
    """Ask ``wrapper(what_was_there, op_schema)`` how DTensor's ops are sharded, from now on in this process."""
    propagator = op_dispatcher().sharding_propagator
    before = propagator.propagate_op_sharding_non_cached
    propagator.propagate_op_sharding_non_cached = functools.wraps(before)(functools.partial(wrapper, before))
    make_cache = type(propagator.propagate_op_sharding)
    propagator.propagate_op_sharding = make_cache(propagator.propagate_op_sharding_non_cached)


def op_dispatcher() -> Any:
    """DTensor's one dispatcher; it owns the table of sharding strategies."""
    return DTensor._op_dispatcher


# What torch.amp.GradScaler runs on all gradients at once: (grads, found_inf, inv_scale), in place.
unscale_grads_op: Any = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def set_dtensor_handler(op: Any, handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Let ``handler(op, args, kwargs)`` run ``op`` whenever one of its arguments is a DTensor."""
    op_dispatcher()._custom_op_handlers[op] = handler


@contextmanager
def stock_dtensor_dispatch(op: Any) -> Iterator[None]:
    """Run ``op`` as DTensor does without the handler that ``set_dtensor_handler`` gave it."""
    handlers = op_dispatcher()._custom_op_handlers
    handler = handlers.pop(op)
    try:
        yield
    finally:
        handlers[op] = handler


def is_real_rank(mesh: DeviceMesh) -> bool:
    """Whether this process is one rank of ``mesh``; not so in a mode that simulates several ranks in one process."""
    return all(type(index) is int for index in mesh.get_coordinate() or ())


def own_part(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """This rank's part of ``full`` under ``placements``, without communication."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | StridedShard):
            parts, _ = placement._split_tensor(full, mesh.size(axis), with_padding=False, contiguous=False)
            full = parts[coordinate[axis]]
    return full


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh whose axes are those of ``meshes`` in order; they must be sub-meshes of one root mesh."""
    _accept_unsorted_axes()
    return DeviceMesh._concatenate(meshes)


@functools.cache
def _accept_unsorted_axes() -> None:
    """Let DTensor redistribute over a mesh whose axes stand in another order than in its root mesh.

    Before it merges collectives over several axes, torch (2.11, 2.13) looks for a flattened mesh of these axes. In such
    a mesh the lookup raises a KeyError, where all that it has to say is that there is none.
    """
    lookup = getattr(redistribute_module, "_get_flattened_mesh_by_layout", None)
    if lookup is None:
        return

    @functools.wraps(lookup)
    def lookup_or_none(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> DeviceMesh | None:
        try:
            return cast("DeviceMesh | None", lookup(mesh, mesh_dims))
        except KeyError:
            return None

    redistribute_module._get_flattened_mesh_by_layout = lookup_or_none


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """``mesh``, which is 1-D, with its one axis split into several; a sub-mesh of the same root."""
    return mesh._unflatten(0, sizes, names)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """1-D mesh of the ranks of ``mesh``, in row-major order; a sub-mesh of the same root."""
    return mesh._flatten(name)


def seed_dtensor_rng(seed: int, mesh: DeviceMesh) -> None:
    """Give DTensor its RNG tracker for the device of ``mesh`` now, and seed torch with ``seed``.

    DTensor's first random op would make the tracker otherwise, and overwrite every rank's state with that of rank 0.
    """
    dtensor_random.manual_seed(seed, mesh)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh._get_root_mesh()


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the communication backend of ``group`` for ``device``, e.g. "nccl", "gloo", "fake"."""
    return str(group._get_backend(device).name()).lower()


def complete_collectives(tree: Any) -> Any:
    """``tree`` (nested containers) with all tensors waited for that a functional collective has yet to fill.

    For the inputs of compiled code. torch 2.13 drops the gradient of such an input, because it takes the tensor out of
    its wrapper and with it out of the graph (pytorch 191113), and does not look for one inside of a DTensor (180614).
    """
    return tree_map_only(torch.Tensor, lambda t: _Completed.apply(t) if _is_pending(t) else t, tree)  # type: ignore[no-untyped-call]


def all_to_all_rows(
    rows: torch.Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    """Differentiable exchange of rows (dim 0).

    Args:
        received, sent: Rows from and to each rank of the group; None for equal parts.
    """
    return _with_contiguous_grad(funcol.all_to_all_single_autograd(rows, received, sent, group))


def all_gather_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Differentiable gather of as many rows (dim 0) of each rank; its gradient is the sum over the ranks."""
    return _with_contiguous_grad(_all_gather_autograd(rows, 0, group))


def reduce_scatter_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Differentiable sum over the ranks, of which each keeps its equal part of the rows (dim 0)."""
    return _with_contiguous_grad(_reduce_scatter_autograd(rows, "sum", 0, group))


def completed_local(tensor: DTensor) -> torch.Tensor:
    """The local tensor of ``tensor``, without a wrapper around it that would wait when it is used first."""
    local = local_tensor(tensor)
    return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local


def _is_pending(tensor: torch.Tensor) -> bool:
    return isinstance(local_tensor(tensor) if isinstance(tensor, DTensor) else tensor, AsyncCollectiveTensor)


def _with_contiguous_grad(result: torch.Tensor) -> torch.Tensor:
    """What a differentiable collective returns, waited for. Its backward communicates the gradient, which torch 2.11
    does not make contiguous (that of a sum is expanded)."""
    completed: torch.Tensor = _ContiguousGrad.apply(complete_collectives(result))  # type: ignore[no-untyped-call]
    return completed


class _ContiguousGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.contiguous()


class _Completed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return wrap_local(completed_local(tensor), dtensor_spec(tensor))
        completed: torch.Tensor = tensor.trigger_wait()
        return completed.view_as(completed)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


# --- other data parallelism -------------------------------------------------------------------------------------------


def fully_shard_group_class() -> Any:
    """The class of the parameter groups of ``fully_shard`` (also of ``replicate``), None if a release has another."""
    try:
        group_class = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group").FSDPParamGroup
    except (ImportError, AttributeError):
        return None
    known = ("post_backward", "_to_sharded", "_to_unsharded", "is_sharded")
    return group_class if all(hasattr(group_class, name) for name in known) else None


class FullyShardCut(NamedTuple):
    """How a parameter group of ``fully_shard`` cuts its parameters; ``num_shards`` is 1 for ``replicate``."""

    mesh: DeviceMesh
    num_shards: int
    placement_fn: Callable[[torch.nn.Parameter], Any] | None

    @classmethod
    def from_arguments(cls, init: Callable[..., None], *args: Any, **kwargs: Any) -> FullyShardCut:
        """Of the arguments of a group's ``__init__``."""
        named = inspect.signature(init).bind(*args, **kwargs).arguments
        mesh_info = named["mesh_info"]
        return cls(mesh_info.mesh, getattr(mesh_info, "shard_mesh_size", 1), named["shard_placement_fn"])

    def dim_of(self, param: torch.nn.Parameter) -> int:
        """The dim of ``param`` that is cut."""
        asked = self.placement_fn(param) if self.placement_fn is not None else None
        placement = getattr(asked, "placement", asked)  # it may come with a mesh of its own
        return 0 if placement is None else int(placement.dim) % param.ndim


def fully_shard_sites(group: Any) -> list[tuple[torch.nn.Module, str]]:
    """Module and attribute name of each parameter of a group."""
    infos = [param._module_info for param in group.fsdp_params]
    return [(info.module, info.param_name) for info in infos]


@contextmanager
def empty_grads_set_aside(group: Any) -> Iterator[None]:
    """Around the post-backward of a parameter group: it cannot reduce gradients without elements.

    They are not reduced; all ranks of its mesh, whose shards are alike, leave out the same ones. The sharded parameter
    gets one all the same, so that all ranks of the other axes have a gradient of the same parameters.
    """
    empty = []
    for param in group.fsdp_params:
        unsharded: Any = getattr(param, "_unsharded_param", None)
        grad = None if unsharded is None else unsharded.grad
        if isinstance(grad, DTensor) and not local_tensor(grad).numel():
            unsharded.grad = None
            empty.append(param)
    yield
    for param in empty:
        param.sharded_param.grad = param.to_sharded_dtensor(torch.zeros_like(local_tensor(param.sharded_param)))


def fully_shard_params() -> list[torch.Tensor]:
    """What all ``fully_shard`` and ``replicate`` calls of this process have registered as sharded parameters."""
    states = [ref() for ref in list(composable_state._module_state_mapping.values())]
    groups = [group for state in states for group in _groups_of_state(state)]
    return [param.sharded_param for group in groups for param in group.fsdp_params]


def _groups_of_state(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def ignore_in_ddp(module: torch.nn.Module, names: list[str]) -> None:
    """Have ``DistributedDataParallel`` around ``module`` leave parameters alone."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def localizing_module() -> Any:
    """The module of torch with ``_localize_dtensor``, by which DDP and ``replicate`` get at the shards of DTensors."""
    return import_module("torch.distributed.tensor.parallel.ddp")


def is_replicated_by_ddp(module: torch.nn.Module) -> bool:
    """Whether the ``replicate`` that is built on DDP was called on ``module``."""
    return isinstance(module, import_module("torch.distributed._composable.replicate").DDP)


# --- optimizers -------------------------------------------------------------------------------------------------------


def muon_orthogonalize(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """``torch.optim.Muon``'s Newton-Schulz iteration on a whole matrix; the result is bfloat16."""
    module: Any = import_module("torch.optim._muon")  # here, not at the top: a release may move it
    result: torch.Tensor = module._zeropower_via_newtonschulz(matrix, coefficients, num_steps, eps)
    return result


def muon_adjust_lr(lr: Any, adjust_lr_fn: str | None, shape: torch.Size) -> Any:
    """``torch.optim.Muon``'s learning rate for a matrix of ``shape``."""
    return cast("Any", import_module("torch.optim._muon"))._adjust_lr(lr, adjust_lr_fn, shape)


# --- pipelines --------------------------------------------------------------------------------------------------------


def pipeline_stage_class() -> Any | None:
    """Base class of the stages of ``torch.distributed.pipelining``; None as long as nobody has imported that."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    return getattr(module, "_PipelineStageBase", None)


# --- communication ----------------------------------------------------------------------------------------------------


def twin_group(group: dist.ProcessGroup, device: torch.device, desc: str, options: Any = None) -> dist.ProcessGroup:
    """A second communicator of the ranks of ``group``. Collective over them, and over nobody else.

    ``options`` are those of an NCCL process group.

    ``dist.new_group(use_local_synchronization=True)`` names a group by its ranks and by how many groups the process
    knows. Ranks that have made different numbers of groups, for sub-meshes of their own, would never meet; and a name
    could come twice after a group has been destroyed. So the ranks agree on a name first.
    """
    return named_group(dist.get_process_group_ranks(group), agreed_name(group, device, desc), desc, options)


def agreed_name(group: dist.ProcessGroup, device: torch.device, prefix: str) -> str:
    """A name that no process group has yet. Collective over ``group``."""
    name = torch.tensor(secrets.randbits(62), device=device)
    dist.broadcast(name, group=group, group_src=0)
    return f"{prefix}_{int(name):x}"


def named_group(ranks: list[int], name: str, desc: str, options: Any = None) -> dist.ProcessGroup:
    """A new process group of ``ranks`` under a name that they have agreed on. Collective over them, and over nobody
    else.

    Where the default group is bound to a device, torch would split its communicator, which waits for all of its ranks:
    so it is told that there is nothing to split.
    """
    backend = None if options is None else "nccl"
    with (
        mock.patch.object(distributed_c10d, "_process_group_name", return_value=name),
        mock.patch.object(distributed_c10d, "_get_split_source", return_value=None),
    ):
        group = dist.new_group(
            ranks, backend=backend, pg_options=options, use_local_synchronization=True, group_desc=desc
        )
        return cast("dist.ProcessGroup", group)


def clone_store(store: Store) -> Store:
    """Another client of the same store, for another thread: a client serves one request at a time."""
    return cast("Any", store).clone()  # type: ignore[no-any-return]


def abort_device_groups() -> None:
    """Abort the collectives of all process groups on devices, from any thread: who waits for one returns or raises.

    Gloo has none to abort: its collectives end when a connection breaks or their time limit passes.
    """
    for group in list(distributed_c10d._world.pg_map):
        backends = {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")}
        if not backends <= _HOST_BACKENDS:
            group.abort()


def restart_group_names() -> None:
    """Without a default group, count names of groups from the beginning.

    The name of the default group is part of the addresses in the store. An attempt to make it that failed has used one
    up: ranks that failed unequally often would look for each other under different names.
    """
    if not dist.is_initialized():
        distributed_c10d._world.group_count = 0


def leave_process_groups() -> None:
    """Abort all process groups of this process, some of whose ranks may be gone: nothing waits for them.

    DTensor keeps results of its planner by mesh, and meshes of equal ranks are equal: an operation on a mesh that is
    made later would be given one whose groups are no more. So they are forgotten.
    """
    distributed_c10d._abort_process_group()
    op_dispatcher().sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    redistribute_module._gen_transform_infos.cache_clear()
    redistribute_module.clear_redistribute_planner_cache()


def nccl_options(min_ctas: int, max_ctas: int) -> Any:
    """Options of an NCCL process group whose kernels take between ``min_ctas`` and ``max_ctas`` blocks of a GPU."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = min_ctas
    options.config.max_ctas = max_ctas
    options._timeout = distributed_c10d._get_default_timeout(dist.Backend("nccl"))
    return options


def missing_for_zero_cta(device: torch.device) -> str | None:
    """Why NCCL cannot gather without kernels here, None if it can."""
    if device.type != "cuda":
        return f"a {device.type} device has no NCCL"
    if not hasattr(dist.ProcessGroupNCCL.Options().config, "cta_policy"):
        return f"torch {torch.__version__} does not know NCCL's CTA policy"
    version = torch.cuda.nccl.version()
    if version < (2, 28):
        return f"NCCL {'.'.join(map(str, version))} does not gather by copy engines, 2.28 does"
    return None


def nccl_zero_cta_options() -> Any:
    """Options of an NCCL process group whose collectives take no block of a GPU where copy engines can do the work."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    options._timeout = distributed_c10d._get_default_timeout(dist.Backend("nccl"))
    return options


class RegisteredBuffer:
    """Bytes that are registered with an NCCL communicator as symmetric. Made by all of its ranks together.

    Args:
        nbytes: The same on all ranks.
        device: This rank's GPU.
        group_name: Of the process group, which has communicated before.
    """

    def __init__(self, nbytes: int, device: torch.device, group_name: str) -> None:
        self.nbytes = nbytes
        backend: Any = resolve_group(group_name)._get_backend(device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool, device):
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        backend.register_mem_pool(self._pool, symm=True)


def symmetric_memory_backend(device: torch.device) -> str | None:
    """What allocates symmetric memory on ``device`` ("CUDA", "NVSHMEM", "NCCL"), None if there is none."""
    try:
        return import_module("torch.distributed._symmetric_memory").get_backend(device)  # type: ignore[no-any-return]
    except (ImportError, RuntimeError):
        return None


class SymmetricBuffer:
    """Bytes on each rank of a group that all of them can read. Made collectively.

    Args:
        nbytes: The same on all ranks.
        device: This rank's GPU.
        group_name: Of the process group.
    """

    def __init__(self, nbytes: int, device: torch.device, group_name: str) -> None:
        memory = torch._C._distributed_c10d._SymmetricMemory
        self.nbytes = nbytes
        self._own = memory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, group_name)
        self._handle = memory.rendezvous(self._own, group_name)
        self._views: dict[tuple[int, int, torch.Size, torch.dtype], torch.Tensor] = {}
        if self._handle is None:
            raise RuntimeError(f"no symmetric memory for the ranks of process group '{group_name}'")

    def view(self, rank: int, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the buffer of ``rank``, ``offset`` bytes from its begin, a multiple of the dtype's size."""
        key = (rank, offset, shape, dtype)
        if key not in self._views:  # the same few, again and again
            self._views[key] = self._handle.get_buffer(rank, shape, dtype, offset // dtype.itemsize)
        return self._views[key]

    def barrier(self, timeout_ms: int) -> None:
        """Wait on the current stream until the streams of all ranks have come here. Nobody but them waits."""
        self._handle.barrier(0, timeout_ms)


def resolve_group(name: str) -> dist.ProcessGroup:
    """The live process group of that name."""
    return _resolve_process_group(cast("Any", name))


def all_gather_base(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool
) -> dist.Work | None:
    """``dist.all_gather_into_tensor`` without its argument checks, which cost as much as the launch."""
    options = AllgatherOptions()
    options.asyncOp = async_op
    return group._allgather_base(output, input, options)


def all_gather_coalesced(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup, *, async_op: bool
) -> dist.Work | None:
    """Several ``all_gather_base`` in one call; dtypes and shapes may differ."""
    options = AllgatherOptions()
    options.asyncOp = async_op
    return group.allgather_into_tensor_coalesced(outputs, inputs, options)


def reduce_scatter_base(
    output: torch.Tensor, input: torch.Tensor, op: Any, group: dist.ProcessGroup, *, async_op: bool
) -> dist.Work | None:
    """``dist.reduce_scatter_tensor`` without its argument checks."""
    options = ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = async_op
    return group._reduce_scatter_base(output, input, options)


def all_to_all_base(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool
) -> dist.Work | None:
    """``dist.all_to_all_single`` of equal slices, without its argument checks."""
    options = AllToAllOptions()
    options.asyncOp = async_op
    return group.alltoall_base(output, input, [], [], options)


def reduce_scatter_coalesced(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: Any, group: dist.ProcessGroup, *, async_op: bool
) -> dist.Work | None:
    """Several ``reduce_scatter_base`` in one call."""
    options = ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = async_op
    return group.reduce_scatter_tensor_coalesced(outputs, inputs, options)


def all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
    options = AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = async_op
    return group.allreduce([tensor], options)


__all__ = [
    "POLICY_MODES",
    "DTensorSpec",
    "FullyShardCut",
    "OpSchema",
    "OutputSharding",
    "PrefixStore",
    "Propagate",
    "RegisteredBuffer",
    "Store",
    "StridedShard",
    "SymmetricBuffer",
    "TensorMeta",
    "abort_device_groups",
    "accumulate_node",
    "agreed_name",
    "all_gather_base",
    "all_gather_coalesced",
    "all_gather_rows",
    "all_reduce",
    "all_to_all_base",
    "all_to_all_rows",
    "asks_checkpoint_policy",
    "assert_on_device",
    "backend_name",
    "clone_store",
    "complete_collectives",
    "completed_local",
    "concatenate_meshes",
    "copy_all",
    "current_graph_task_id",
    "distribute_tensor_modules",
    "dtensor_spec",
    "empty_grads_set_aside",
    "flatten_mesh",
    "fully_shard_group_class",
    "fully_shard_params",
    "fully_shard_sites",
    "grad_dtype",
    "ignore_in_ddp",
    "ignores_saved_weight",
    "in_func_transform",
    "is_awaited",
    "is_node_awaited",
    "is_profiling",
    "is_real_rank",
    "is_replicated_by_ddp",
    "is_tracing",
    "leave_process_groups",
    "local_shape_and_offset",
    "local_tensor",
    "localizing_module",
    "make_spec",
    "make_wrapper_subclass",
    "maybe_run_for_local_tensor",
    "mesh_coordinate",
    "missing_for_zero_cta",
    "muon_adjust_lr",
    "muon_orthogonalize",
    "named_group",
    "nccl_options",
    "nccl_zero_cta_options",
    "op_dispatcher",
    "own_part",
    "pipeline_stage_class",
    "pop_saved_tensors_hooks",
    "post_accumulate_grad_hooks",
    "push_saved_tensors_hooks",
    "queue_backward_callback",
    "redistribute_module",
    "reduce_scatter_base",
    "reduce_scatter_coalesced",
    "reduce_scatter_rows",
    "resolve_group",
    "restart_group_names",
    "root_mesh",
    "saved_tensors_hooks_enabled",
    "seed_dtensor_rng",
    "set_dtensor_handler",
    "set_eval_frame",
    "skip_code",
    "sleep_stream",
    "stock_dtensor_dispatch",
    "storage_use_count",
    "symmetric_memory_backend",
    "tensor_hooks",
    "top_saved_tensors_hooks",
    "tree_flatten",
    "tree_map_only",
    "tree_unflatten",
    "twin_group",
    "unflatten_mesh",
    "unscale_grads_op",
    "unseen_by_checkpoint_policies",
    "without_dispatch_modes",
    "without_torch_function",
    "wrap_local",
    "wrap_sharding_propagation",
    "wrapper_tensor",
]
