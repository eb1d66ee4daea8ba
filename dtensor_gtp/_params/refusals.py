"""What uses of a weight refuse: transforms, recordings, hooks and writes that would lose values or
gradients."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.streams import Streams
from .._howto import see
from .gathered import Version, is_same_to_autograd
from .managed_param import ManagedParam
from .sharded_weight import ShardedWeight
from .whole_param import WholeParam

HOW_TO_WRITE = (
    "Write to the parameter itself, outside of forwards: 'for param in module.parameters(): param.clamp_(...)' under "
    "torch.no_grad(); or compute the new weight from the old one in each forward."
)


def check_unmodified(weight: ShardedWeight, version: Version) -> None:
    """Raise a RuntimeError, as autograd does, if the weight was written after the forward that used
    it."""
    # First, because a replacement changes the version, too. ``version[2]`` is ``num_updates`` at the forward.
    if version[2] < weight.versions.replaced_at:
        raise RuntimeError(weight.replaced_before_backward())
    if not is_same_to_autograd(weight.version, version):
        raise RuntimeError(
            f"Parameter '{weight.fqn}' is needed for gradient computation, but it has been "
            f"modified by an inplace operation since its forward: it is at {weight.version}; "
            f"expected {version}. Run backward before the optimizer step, or the forward again "
            "after it."
        )


def check_differentiable(weight: ShardedWeight) -> None:
    """Raise a NotImplementedError if a transform of ``torch.func`` asks for derivatives of a use of
    the weight."""
    # Callers come here with gradients enabled only, so vmap under no_grad goes on.
    if compat.in_func_transform():
        raise _refused_transform(f"on uses of parameter '{weight.fqn}' of shape {tuple(weight.layout.shape)}")


def check_first_forward() -> None:
    """Raise a NotImplementedError if the first forward, which makes groups, is one of such a transform."""
    if torch.is_grad_enabled() and compat.in_func_transform():
        raise _refused_transform(f"as the first call of a model (rank {dist.get_rank()})")


def _refused_transform(what: str) -> NotImplementedError:
    return NotImplementedError(
        "Transforms of torch.func (grad, vmap, jacrev, jvp) do not see gathers and reductions, so gtp_shard does not "
        f"support them {what}. Take derivatives for inputs with torch.autograd.grad or torch.autograd.functional, "
        "those for parameters with backward(). Run vmap under torch.no_grad()."
    )


def refuse_recording(recorder: str, fqn: str) -> NoReturn:
    """Called while a program is recorded that is to run without our modules: it would keep a
    weight's present values, or a number that names another weight elsewhere."""
    raise RuntimeError(
        f"{recorder} cannot record a use of parameter '{fqn}' after gtp_shard: the program would "
        "not have its weights. Use torch.compile; or build the module again, load "
        f"get_model_state_dict with full_state_dict=True, and export that one. {see('export')}"
    )


def refuse_symbolic_tracing(fqn: str) -> None:
    """Called where code reads a full weight, which the program of a symbolic trace would keep as it
    is now."""
    if compat.is_symbolic_tracing():
        refuse_recording("torch.fx.symbolic_trace", fqn)


def refuse_mutable_saves(block: str) -> None:
    """Called where autograd is about to save weights of a group."""
    if compat.are_saved_tensors_mutable():
        # torch copies what it has saved before an op writes to that address. The gather for backward writes there, to
        # memory that was freed.
        raise NotImplementedError(
            f"gtp_shard does not support block '{block}' in torch.autograd.graph.allow_mutation_on_saved_tensors, "
            f"which copies saved weights while their memory is freed (rank {dist.get_rank()}). Leave that context, and "
            "clone what you write to."
        )


def wants_wgrad(ctx: Any, index: int, weight: ShardedWeight, streams: Streams) -> bool:
    """Whether the running backward asks for the gradient of a trained weight, whose leaf is at ``index`` among
    the tensors given to forward. A recording of one that does not would skip it for ever: refused."""
    is_awaited = compat.is_awaited(ctx, index)
    if not is_awaited and streams.is_capturing:
        raise RuntimeError(
            f"A CUDA graph records a backward without the gradient of '{weight.fqn}', which is "
            "trained: torch.cuda.make_graphed_callables calls torch.autograd.grad, which does not "
            "return gradients of sharded weights. Use dtensor_gtp.capture_step for whole steps and "
            "dtensor_gtp.capture_blocks for single modules. If you do not need the gradient, "
            "freeze the parameter with requires_grad_(False)."
        )
    return is_awaited


def hook_at_node(fqn: str, param: Tensor) -> str:
    """What is wrong with a hook of autograd's node of a parameter."""
    return (
        "gtp_shard expects no hook on the autograd node of a parameter, which will get no "
        f"gradients any more, but code registered one for parameter '{fqn}' of shape "
        f"{tuple(param.shape)} (rank {dist.get_rank()}), as optimizers in backward do. Register it "
        "on the parameter: param.register_post_accumulate_grad_hook(hook)."
    )


def switched(param: ManagedParam, where: str) -> RuntimeError:
    return RuntimeError(
        f"Code {where} froze or unfroze what modules see of parameter '{param.fqn}' of shape "
        f"{tuple(param.param.shape)}, which the next forward would undo (rank {dist.get_rank()}). Call "
        "requires_grad_() before the forward."
    )


def written_to_no_effect(param: ManagedParam, where: str) -> RuntimeError:
    copy = "the gathered copy"
    if isinstance(param, WholeParam):
        copy = "a copy (in another dtype or on another device)"
    return RuntimeError(
        f"A write {where} changed only {copy} of parameter '{param.fqn}' of shape "
        f"{tuple(param.param.shape)}, not its shards (rank {dist.get_rank()}). {HOW_TO_WRITE}"
    )
