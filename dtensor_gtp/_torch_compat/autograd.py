"""Autograd's graph, its tasks, its hooks, and transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _will_engine_execute_node as is_node_awaited
from torch.autograd import Variable

PackHook = Callable[[Tensor], Any]
UnpackHook = Callable[[Any], Tensor]


def ignored_saved_weight() -> object:
    """What a saved-tensor hook has made of the weight of a convolution whose input needs no gradient, if its node of
    autograd's graph runs now, which unpacks the weight but does not read its values. None elsewhere."""
    node = torch._C._current_autograd_node()
    if node is None or not node.name().startswith("ConvolutionBackward") or node.next_functions[0][0] is not None:
        return None
    return getattr(node._raw_saved_weight, "data", None)  # type: ignore[attr-defined]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now has ended, on the caller's current streams."""
    Variable._execution_engine.queue_callback(callback)


def grad_dtype(param: Tensor) -> torch.dtype:
    """Of ``param.grad``: the parameter's dtype, but ``fully_shard`` of torch 2.15 wants that of its reduction."""
    dtype: torch.dtype | None = getattr(param, "grad_dtype", None)
    return param.dtype if dtype is None else dtype


def is_awaited(ctx: Any, index: int) -> bool:
    """Whether the backward that runs now wants the gradient of a leaf: ``ctx.needs_input_grad`` does not know that
    ``torch.autograd.grad`` or ``backward(inputs=...)`` asked for others only.

    Args:
        ctx: Context of a ``torch.autograd.Function`` in its backward.
        index: Index of the leaf among the tensor arguments of its forward; the leaf needs a gradient.
    """
    return is_node_awaited(ctx.next_functions[index][0])


def accumulate_node(leaf: Tensor) -> torch.autograd.graph.Node:
    """The node of autograd's graph that takes the gradient of ``leaf``, which needs one."""
    with torch.inference_mode(False), torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(leaf).node


def top_saved_tensors_hooks() -> tuple[PackHook, UnpackHook] | None:
    """The innermost active pair of saved-tensor hooks, or None."""
    return cast("tuple[PackHook, UnpackHook] | None", torch._C._autograd._top_saved_tensors_default_hooks(False))


def post_accumulate_grad_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """In the order of their registration, as those of ``tensor_hooks``."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def tensor_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    return list((getattr(tensor, "_backward_hooks", None) or {}).values())


def in_func_transform() -> bool:
    """Whether a transform of ``torch.func`` (grad, vmap, jacrev, jvp) runs the code that asks."""
    return torch._C._functorch.peek_interpreter_stack() is not None
