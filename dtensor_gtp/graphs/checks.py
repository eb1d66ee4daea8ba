"""What ``capture_step`` and ``capture_blocks`` refuse."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .._modules.binding import binding_of, unmanaged_params
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from ..placement import GTPShard
from .record_again import params_outside, tensors_in

logger = logging.getLogger("dtensor_gtp")


def params_of(block: nn.Module) -> list[ManagedParam]:
    bindings = [binding for module in block.modules() if (binding := binding_of(module)) is not None]
    return list(dict.fromkeys(param for binding in bindings for param in binding.params.values()))


def check_block(name: str, block: nn.Module) -> None:
    params = params_of(block)
    weights = [param for param in params if isinstance(param, ShardedWeight)]
    where = f"capture_blocks does not support block '{name}', a {type(block).__name__}"
    if not weights:
        raise ValueError(f"capture_blocks expects blocks with sharded weights, but '{name}' has none.")
    runtimes = runtimes_of(block, "capture_blocks")
    if len(runtimes) > 1:
        raise NotImplementedError(f"{where}: its weights belong to several gtp_shard calls without one around them.")
    if any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in block.modules()):
        raise NotImplementedError(f"{where}: it is compiled. Compile it, or record it, or record the whole step.")
    for fqn, owner, local in unmanaged_params(block):
        param = owner._parameters[local]
        if param is not None and param.requires_grad:
            raise NotImplementedError(f"{where}: nobody manages its parameter '{fqn}', whose gradient would be lost.")
    check_buffers(f"capture_blocks, of block '{name}',", block, runtimes[0].device)
    for managed in params:
        what = _obstacle(managed)
        if what is not None:
            raise NotImplementedError(f"{where}: its parameter '{managed.fqn}' {what}. Use capture_step.")


def check_apart(blocks: Sequence[nn.Module], names: dict[nn.Module, str]) -> None:
    """Blocks may have modules in common, as a table of rotary embeddings, but no parameters."""
    owners: dict[ManagedParam, nn.Module] = {}
    for block in blocks:
        for param in params_of(block):
            if (other := owners.setdefault(param, block)) is not block:
                raise NotImplementedError(
                    f"capture_blocks does not support block '{names[block]}', a {type(block).__name__}: its parameter "
                    f"'{param.fqn}' is one of '{names[other]}', too. Use capture_step."
                )


def check_window(blocks: Sequence[nn.Module]) -> None:
    schedule = runtimes_of(blocks[0], "capture_blocks")[0].schedule
    sharded = ([param for param in params_of(block) if isinstance(param, ShardedWeight)] for block in blocks)
    nbytes = max(sum(weight.kept_nbytes for weight in weights) for weights in sharded)
    if schedule.prefetch_depth and schedule.prefetch_nbytes < nbytes:
        logger.warning(
            "capture_blocks: SchedulePolicy(prefetch_nbytes=%d) begins to gather the rest of the %d bytes of a block "
            "when the one before is complete; let it be as many",
            schedule.prefetch_nbytes,
            nbytes,
        )


def _obstacle(param: ManagedParam) -> str | None:
    if getattr(param, "tp_spec", None) is not None:
        return "is tensor-parallel"
    if not isinstance(param, ShardedWeight):
        return None
    if param.wire is not None:
        return "is quantized for its gather"
    if param.fixed is not None:
        return "belongs to another recorded block"
    return "is on the meta device" if param.shard.is_meta else None


def check_arguments(fn: Any, module: Any, optimizers: list[Any], warmup_steps: Any, max_graphs: Any) -> None:
    if not callable(fn):
        raise TypeError(f"capture_step expects a function as fn, but got {type(fn).__name__}.")
    if not isinstance(module, nn.Module):
        raise TypeError(f"capture_step expects an nn.Module as module, but got {type(module).__name__}.")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"capture_step expects optimizers as optimizer, but got {type(optimizer).__name__}.")
    check_at_least("capture_step", 2, warmup_steps=warmup_steps)
    check_at_least("capture_step", 1, max_graphs=max_graphs)


def check_at_least(caller: str, least: int, **numbers: Any) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{caller} expects an int as {name}, but got {value!r}.")
        if value < least:
            raise ValueError(f"{caller} expects {name} >= {least}, but got {value}.")


def check_capturable(optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        if group.get("capturable") is False:
            raise ValueError(
                f"capture_step expects optimizers that can be captured, but group {index} of "
                f"{type(optimizer).__name__} has capturable=False. Create it with capturable=True."
            )


def check_params(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Who gathers a sharded parameter must know of the graph."""
    for param in params_outside(module, [optimizer]):
        if any(isinstance(placement, GTPShard) for placement in getattr(param, "placements", ())):
            raise ValueError(
                f"capture_step expects a module that contains all sharded parameters of {type(optimizer).__name__}, "
                f"but one of shape {tuple(param.shape)} is outside. Pass a module around both, such as nn.ModuleList."
            )


def check_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """An optimizer without the switch is capturable if its state is on the GPU: a number would be baked in."""
    for state in optimizer.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_elsewhere = isinstance(value, Tensor) and value.device.type != device.type
            if is_number or is_elsewhere:
                where = "a Python number" if is_number else f"on '{value.device.type}'"
                raise ValueError(
                    f"capture_step expects optimizers whose state is on '{device.type}', but '{name}' of "
                    f"{type(optimizer).__name__} is {where}: a graph would repeat one step's value. Use an optimizer "
                    "with capturable=True, or step it outside of the captured function."
                )


def check_inputs(leaves: list[Any], device: torch.device) -> None:
    what = "A captured step"
    check_places(leaves, device, what)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise ValueError(
                f"{what} expects inputs that need no gradient, but one of shape {tuple(leaf.shape)} does. Pass it "
                "detached."
            )


def check_places(leaves: list[Any], device: torch.device, what: str) -> None:
    """What of inputs a replay would not see: values on the host, and tensors within other objects.

    Args:
        leaves: Of the arguments.
        device: That of the graph.
        what: Whose inputs they are, for errors.
    """
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            _check_other(leaf, what)
        elif leaf.device.type != device.type:
            raise ValueError(
                f"{what} expects tensors on '{device.type}', but got one of shape {tuple(leaf.shape)} on "
                f"'{leaf.device.type}'. Move it before the call."
            )


def check_buffers(caller: str, module: nn.Module, device: torch.device) -> None:
    for name, buffer in module.named_buffers():
        if buffer.device.type != device.type:
            raise ValueError(
                f"{caller} expects buffers on '{device.type}', but '{name}' is on '{buffer.device.type}': a graph "
                "repeats the value that it finds when it is recorded. Move it, or let it be a Python number."
            )


def _check_other(leaf: Any, what: str) -> None:
    attributes = {} if isinstance(leaf, nn.Module) else dict(getattr(leaf, "__dict__", {}))
    slots = (name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ()))
    attributes.update((name, getattr(leaf, name, None)) for name in slots)
    for name, value in attributes.items():
        if next(iter(tensors_in(value)), None) is not None:
            raise ValueError(
                f"{what} expects tensors in lists, tuples, dicts, or what else torch.utils._pytree goes through, but "
                f"got a {type(leaf).__name__} with one as '{name}', where nobody would see that it is another. Pass "
                "its tensors."
            )


def runtimes_of(module: nn.Module, caller: str = "capture_step") -> list[Runtime]:
    runtimes = {id(b.group.runtime): b.group.runtime for m in module.modules() if (b := binding_of(m)) is not None}
    if not runtimes:
        raise ValueError(
            f"{caller} expects a module that gtp_shard was called on, or one around it, but got a "
            f"{type(module).__name__} without. Call gtp_shard first."
        )
    for runtime in runtimes.values():
        if any(param.is_cut_again for param in runtime.params):
            raise NotImplementedError(
                f"{caller} does not support an outer fully_shard. Use a (replicate, gtp) mesh in its place."
            )
        if runtime.grads.replicas is not None:
            raise NotImplementedError(f"{caller} does not support elastic.synchronize_replicas.")
    return list(runtimes.values())
