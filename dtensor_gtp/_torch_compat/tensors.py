"""Tensors: subclasses, storages, single launches, and autograd's graph with its tasks, hooks and transforms."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C import _will_engine_execute_node as is_node_awaited
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from .patches import replace

_T = TypeVar("_T", bound=Tensor)
PackHook = Callable[[Tensor], Any]
UnpackHook = Callable[[Any], Tensor]

read_number = torch.ops.aten._local_scalar_dense.default  # the op of ``Tensor.item``
make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass


def ignored_saved_weight() -> object:
    """In the backward of a convolution whose input needs no gradient, which unpacks the weight but does not read it:
    what a saved-tensor hook has made of the weight. None elsewhere."""
    node = torch._C._current_autograd_node()
    # The first edge leads to the input of the convolution: None if that needs no gradient.
    if node is None or not node.name().startswith("ConvolutionBackward") or node.next_functions[0][0] is not None:
        return None
    return getattr(node._raw_saved_weight, "data", None)  # type: ignore[attr-defined]


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a bound method as long as its object lives. For hooks that autograd owns, where the garbage collector does
    not see them: they must not keep the object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        if (found := reference()) is not None:
            return found(*args)
        return None

    return call


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now has ended, on the caller's current streams."""
    Variable._execution_engine.queue_callback(callback)


def wrap_engine(wrapper: Callable[..., Any]) -> None:
    """Call ``wrapper(what_was_there, outputs, grads, retain_graph, create_graph, inputs, allow_unused, accumulates)``
    for each run of ``torch.autograd.backward`` and ``torch.autograd.grad``, from now on in this process."""
    stock = cast("Any", torch.autograd)._engine_run_backward

    def run(
        outputs: Any, grads: Any, retain: Any, create: Any, inputs: Any, allow_unreachable: Any, accumulate_grad: bool
    ) -> Any:
        return wrapper(stock, outputs, grads, retain, create, inputs, allow_unreachable, accumulate_grad)

    replace("engine", torch.autograd, "_engine_run_backward", run)


def register_prehook(node: Any, hook: Callable[..., None], *, is_first: bool) -> None:
    """``node.register_prehook``, ahead of the prehooks that the node has or behind them."""
    handle = node.register_prehook(hook)
    hooks = handle.hooks_dict_ref()
    for key in [key for key in hooks if is_first and key != handle.id]:
        hooks[key] = hooks.pop(key)  # autograd calls them in the order of the dict


def set_versions(tensors: Iterable[Tensor], versions: Iterable[int]) -> None:
    """Set the counts of writes by which autograd knows what it has saved, as in torch's
    ``_unsafe_preserve_version_counter``."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def grad_dtype(param: Tensor) -> torch.dtype:
    """Of ``param.grad``: the parameter's dtype, but ``fully_shard`` of torch 2.15 wants that of its reduction."""
    dtype: torch.dtype | None = getattr(param, "grad_dtype", None)
    if dtype is None:
        return param.dtype
    return dtype


def is_awaited(ctx: Any, index: int) -> bool:
    """Whether the backward of ``ctx`` wants the gradient of a leaf, which needs one, at ``index`` among the tensors
    given to forward. ``ctx.needs_input_grad`` does not know that ``backward(inputs=...)`` asked for others only."""
    return is_node_awaited(ctx.next_functions[index][0])


def accumulate_node(leaf: Tensor) -> torch.autograd.graph.Node:
    """The node of autograd's graph that takes the gradient of ``leaf``, which needs one."""
    # Callers may be in any mode. The view below gets a node only with gradients on.
    with torch.inference_mode(False), torch.enable_grad():
        if isinstance(leaf, DTensor):  # torch asks a view of it, which a block placement does not have
            local = leaf.to_local()  # the node lives as long as this (torch 2.11)
            assert local.grad_fn is not None
            return cast("torch.autograd.graph.Node", local.grad_fn.next_functions[0][0])
        return torch.autograd.graph.get_gradient_edge(leaf).node


def top_saved_tensors_hooks() -> tuple[PackHook, UnpackHook] | None:
    """The innermost active pair of saved-tensor hooks, or None."""
    return cast("tuple[PackHook, UnpackHook] | None", torch._C._autograd._top_saved_tensors_default_hooks(False))


def post_accumulate_grad_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """In the order of their registration, as those of ``tensor_hooks``."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    if hooks:
        return list(hooks.values())
    return []


def tensor_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    hooks = getattr(tensor, "_backward_hooks", None)
    if hooks:
        return list(hooks.values())
    return []


def is_multi_grad_hook(hook: Callable[..., object]) -> bool:
    """Whether it is one of ``register_multi_grad_hook(mode="all")``, which counts nodes of autograd's graph."""
    # torch does not mark these hooks: the qualified name of its inner function tells.
    return getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.<locals>.get_inner_hook")


def move_hooks(old: Tensor, new: Tensor) -> None:
    """Let the user's hooks of ``old`` be those of ``new``, in the same dicts, from which handles remove them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(old, name, None):
            setattr(old, name, None)  # ``old`` must not call them, too
            setattr(new, name, hooks)


def has_hooks_at_node(param: Tensor) -> bool:
    """Whether the node that accumulates the gradient of ``param`` has hooks, which are called by autograd alone:
    those of ``param.expand_as(param).grad_fn.next_functions[0][0].register_hook``."""
    local = param
    if isinstance(param, DTensor):
        local = param._local_tensor
    if not param.requires_grad or type(local.detach()) is not Tensor:  # ``detach`` makes a Parameter a plain tensor
        return False
    node = accumulate_node(param)
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *grads: None)  # all handles of a node know the dict that has all its hooks
        hooks = handle.hooks_dict_ref()
        handle.remove()  # before the dict is looked at: this hook does not count
        if hooks:
            return True
    return False


def quick_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without the Python that torch puts around forward and backward, which takes the host as long
    as a small op. Call it outside of transforms of ``torch.func`` only, and ``unwrap_if_dead`` its tensors first."""
    # As an attribute of a class the function is a method: the engine passes the context as ``self``.
    cast("Any", function)._backward_cls.apply = function.backward
    # ``super`` skips ``Function.apply``, which is Python, and finds that of ``torch._C._FunctionBase``.
    return cast("Callable[..., Any]", cast("Any", super(torch.autograd.Function, function)).apply)


def no_view(tensor: Tensor) -> Tensor:
    """A new tensor, for an autograd function to return: torch refuses writes to a view that such a function made
    (``nn.ReLU(inplace=True)`` after a linear layer with a bias, whose output is a view if it has more than 2 dims)."""
    if tensor._is_view():
        return tensor.data
    return tensor


def without_torch_function() -> AbstractContextManager[Any]:
    """In this context torch calls as if no class of tensors had a ``__torch_function__``, and converts no result to a
    subclass. An attribute of a DTensor, which has none, costs 0.1 instead of 0.3 us."""
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunctionSubclass())


def attribute_of_item(container: Any, index: Any) -> str:
    """The attribute of a ``ParameterList`` or ``ParameterDict`` that has an item of it."""
    if isinstance(container, torch.nn.ParameterList):
        return str(container._get_abs_string_index(index))
    return str(container._key_to_attr(index))


def wrapper_tensor(cls: type[_T], like: Tensor, shape: torch.Size, dtype: torch.dtype) -> _T:
    """A tensor of class ``cls`` without memory; contiguous, but with the strides of ``like`` if that has its shape."""
    # On the meta device torch computes strides without memory.
    if like.shape == shape:
        stride = like.stride()
    else:
        stride = torch.empty(shape, device="meta").stride()
    return cast("_T", make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=like.device))


def template(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor for ``torch.empty_like``, which takes the host half as long as ``torch.empty`` with a shape, a dtype and
    a device. It has memory for one element."""
    with torch.inference_mode(False):  # it may be made in an evaluation, and used in training
        return torch.empty((), dtype=dtype, device=device).expand(shape)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Number of owners of the memory behind ``storage`` (tensors, autograd nodes, Python storage objects)."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def num_owners(storage: torch.UntypedStorage, leaves: Iterable[Tensor]) -> int | None:
    """Number of owners of ``storage`` and of these leaves in it: tensors, and what autograd has saved. Nodes that take
    gradients do not count. None if that is not known: in a transform of ``torch.func``, or if this torch cannot say."""
    if torch._C._are_functorch_transforms_active() or not hasattr(Tensor, "_use_count"):
        return None
    count = storage_use_count(storage)
    for leaf in leaves:
        node = None
        if leaf.requires_grad:
            node = accumulate_node(leaf)  # it owns the leaf, and may be there already
        count += leaf._use_count() - (node is not None)  # type: ignore[attr-defined]
    return count


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target: a launch for each pair of dtypes, because of pytorch/pytorch#173531."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
        return
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        alike = pairs.setdefault((target.dtype, source.dtype), ([], []))
        alike[0].append(target)
        alike[1].append(source)
    for alike in pairs.values():
        torch._foreach_copy_(*alike)


def largest_magnitudes(tensors: list[Tensor]) -> list[Tensor]:
    """Of each tensor, none of which is empty, in float32 and of shape (1, 1), by one launch; NaN if there is a NaN."""
    if not tensors:
        return []
    return [found.view(1, 1) for found in torch._foreach_norm(tensors, math.inf, dtype=torch.float32)]


def chunk_cat(tensors: list[Tensor], num_chunks: int, out: Tensor) -> None:
    """Row r of ``out`` becomes the r-th chunks of all tensors on dim 0, padded and flattened."""
    if all(tensor.dtype == out.dtype and tensor.shape[0] % num_chunks == 0 for tensor in tensors):
        # For a block of Llama 8B in two chunks the host needs 0.06 instead of 0.43 ms, an H200 0.22 instead of 0.44.
        torch.cat([tensor.reshape(num_chunks, -1) for tensor in tensors], 1, out=out)
    else:
        torch._chunk_cat(tensors, 0, num_chunks, out=out)  # as ``fully_shard`` does; it pads and casts


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Consecutive parts of ``flat`` as views with the shapes of ``like``, in one call."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, like))


def lerp_all(targets: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Move each target towards its end, in place, as ``torch.optim.swa_utils`` does."""
    torch._foreach_lerp_(targets, ends, weight)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail if ``condition`` is false: at once on a CPU, elsewhere when the device comes to it."""
    torch._assert_async(condition, message[:254])  # kernels take no longer messages
