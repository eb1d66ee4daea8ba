"""What ``capture_step`` and ``capture_blocks`` refuse."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .._howto import see
from .._modules.binding import binding_of, unmanaged_params
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from ..placement import may_be_ours
from .record_step import params_outside, tensors_in

logger = logging.getLogger("dtensor_gtp")


def params_of(block: nn.Module) -> list[ManagedParam]:
    bindings = filter(None, map(binding_of, block.modules()))
    return list(dict.fromkeys(param for binding in bindings for param in binding.params.values()))


def _weights_of(block: nn.Module) -> list[ShardedWeight]:
    return [param for param in params_of(block) if isinstance(param, ShardedWeight)]


def runtimes_of(module: nn.Module, caller: str = "capture_step") -> list[Runtime]:
    bindings = filter(None, map(binding_of, module.modules()))
    runtimes = list(dict.fromkeys(binding.group.runtime for binding in bindings))
    if not runtimes:
        what = f"a module that gtp_shard was called on, or one around it, but got a plain {type(module).__name__}"
        raise ValueError(f"{caller} expects {what}. Call gtp_shard first.")
    for runtime in runtimes:
        obstacles = {
            "an outer fully_shard. Use a (replicate, gtp) mesh.": any(
                param.registration.is_cut_again for param in runtime.params
            ),
            f"offload_policy: a graph cannot wait for the host. {see('offload')}": any(
                param.policies.offload is not None for param in runtime.params
            ),
            "gtp_shard(shard_optimizer=True): whether replicas gather what their optimizers have written is decided in "
            "each forward. Leave out shard_optimizer.": bool(runtime.gathering.parts.weights),
            "elastic.synchronize_replicas: a graph would repeat the shares of the batch of its recording, and wait for "
            "a lost rank forever. Take equal replicas: init_weight_mesh(replicate=).": (
                runtime.grads.launches.replicas is not None
            ),
        }
        for obstacle, is_there in obstacles.items():
            if is_there:
                raise NotImplementedError(f"{caller} does not support {obstacle}")
    return runtimes


def check_blocks(blocks: Sequence[nn.Module], names: dict[nn.Module, str]) -> None:
    owners: dict[ManagedParam, str] = {}
    for block in blocks:
        _check_block(names[block], block, owners)
    asked = runtimes_of(blocks[0], "capture_blocks")[0].policy.prefetch_nbytes
    nbytes = max(sum(weight.for_forward.kept_nbytes for weight in _weights_of(block)) for block in blocks)
    if asked and asked < nbytes:
        logger.warning(
            "capture_blocks: SchedulePolicy(prefetch_nbytes=%d) gathers the rest of the %d bytes of a block only "
            "after the block before has ended; raise it to this number",
            asked,
            nbytes,
        )


def _check_block(name: str, block: nn.Module, owners: dict[ManagedParam, str]) -> None:
    if not _weights_of(block):
        raise ValueError(f"capture_blocks expects blocks with sharded weights, but '{name}' has none.")
    where = f"capture_blocks does not support block '{name}', a {type(block).__name__}"
    runtimes = runtimes_of(block, "capture_blocks")
    if len(runtimes) > 1:
        raise NotImplementedError(f"{where}: its weights belong to several gtp_shard calls without one around them.")
    if any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in block.modules()):
        raise NotImplementedError(f"{where}: it is compiled. Compile it, or record it, or record the whole step.")
    for fqn, _, param in unmanaged_params(block):
        if param.requires_grad:
            raise NotImplementedError(
                f"{where}: gtp_shard does not manage its parameter '{fqn}', so the gradient would be lost."
            )
    check_buffers(f"capture_blocks, of block '{name}',", block, runtimes[0].device)
    for managed in params_of(block):
        weight = managed if isinstance(managed, ShardedWeight) else None
        # Blocks may have modules in common, such as a table of rotary embeddings, but no parameters.
        first = owners.setdefault(managed, name)
        obstacles = {
            "is tensor-parallel": getattr(managed, "tp_spec", None) is not None,
            "is quantized for its gather": weight is not None and weight.form.wire is not None,
            "belongs to another recorded block": weight is not None and weight.form.fixed is not None,
            "is on the meta device": weight is not None and weight.shard.is_meta,
            f"is one of '{first}', too": first != name,
        }
        for obstacle, is_there in obstacles.items():
            if is_there:
                raise NotImplementedError(f"{where}: its parameter '{managed.fqn}' {obstacle}. Use capture_step.")


def check_on_gpu(caller: str, module: nn.Module, device: torch.device) -> None:
    if device.type != "cuda":
        what = f"the weights of the {type(module).__name__} are on '{device.type}'"
        raise RuntimeError(f"{caller} records CUDA graphs, but {what}. Train without it there.")


def check_at_least(caller: str, **numbers: tuple[Any, int]) -> None:
    """Each number comes with the least that it may be."""
    for name, (value, least) in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{caller} expects an int as {name}, but got {value!r}.")
        if value < least:
            raise ValueError(f"{caller} expects {name} >= {least}, but got {value}.")


def check_step(fn: Any, module: Any, optimizers: list[Any], warmup_steps: Any, max_graphs: Any) -> list[Runtime]:
    """Refuse arguments of ``capture_step``. Returns the runtimes of ``module``."""
    if not callable(fn):
        raise TypeError(f"capture_step expects a function as fn, but got {type(fn).__name__}.")
    if not isinstance(module, nn.Module):
        raise TypeError(f"capture_step expects an nn.Module as module, but got {type(module).__name__}.")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"capture_step expects optimizers as optimizer, but got {type(optimizer).__name__}.")
    check_at_least("capture_step", warmup_steps=(warmup_steps, 2), max_graphs=(max_graphs, 1))
    runtimes = runtimes_of(module)
    for aid in ("order", "finite"):
        if any(getattr(runtime.comm.debug, aid) for runtime in runtimes):
            raise RuntimeError(
                f"capture_step cannot record a step with DTENSOR_GTP_DEBUG={aid}, because the host waits at each "
                f"collective. Train without capture_step while you debug. {see('capture_a_step')}"
            )
    check_on_gpu("capture_step", module, runtimes[0].device)
    check_buffers("capture_step", module, runtimes[0].device)
    for optimizer in optimizers:
        check_optimizer(optimizer, module)
    return runtimes


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer that is not capturable, or steps sharded parameters of runtimes outside of ``module``."""
    name = type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        if group.get("capturable") is False:
            what = f"optimizers that can be captured, but group {index} of {name} has capturable=False"
            raise ValueError(f"capture_step expects {what}. Create it with capturable=True. {see('capture_a_step')}")
    for param in params_outside(module, [optimizer]):
        if any(map(may_be_ours, getattr(param, "placements", ()))):
            raise ValueError(
                f"capture_step expects a module that contains all sharded parameters of {name}, but one of shape "
                f"{tuple(param.shape)} is outside. Pass a module around both, such as nn.ModuleList."
            )


def check_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """An optimizer without the switch is capturable if its state is on the GPU: a number would be baked in."""
    for state in optimizer.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number or (isinstance(value, Tensor) and value.device.type != device.type):
                where = "a Python number" if is_number else f"on '{value.device.type}'"
                raise ValueError(
                    f"capture_step expects optimizers whose state is on '{device.type}', but '{name}' of "
                    f"{type(optimizer).__name__} is {where}: a graph would repeat one value. Use an optimizer with "
                    f"capturable=True, or step it outside of the captured function. {see('capture_a_step')}"
                )


def check_inputs(leaves: list[Any], device: torch.device) -> None:
    check_places(leaves, device, "A captured step")
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            what = f"one of shape {tuple(leaf.shape)} does"
            raise ValueError(f"A captured step expects inputs that need no gradient, but {what}. Pass it detached.")


def check_places(leaves: list[Any], device: torch.device, what: str) -> None:
    """Refuse arguments of ``what`` that a replay would not see: values on the host, and tensors in other objects."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            _check_hides_none(leaf, what)
        elif leaf.device.type != device.type:
            got = f"one of shape {tuple(leaf.shape)} on '{leaf.device.type}'"
            raise ValueError(f"{what} expects tensors on '{device.type}', but got {got}. Move it before the call.")


def _check_hides_none(leaf: Any, what: str) -> None:
    attributes = {} if isinstance(leaf, nn.Module) else dict(getattr(leaf, "__dict__", {}))
    slots = (name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ()))
    attributes.update((name, getattr(leaf, name, None)) for name in slots)
    for name, value in attributes.items():
        if any(True for _ in tensors_in(value)):
            raise ValueError(
                f"{what} expects tensors in lists, tuples, dicts, or what torch.utils._pytree knows, but got a "
                f"{type(leaf).__name__} with one as '{name}', where capture_step cannot see changes. Pass its "
                "tensors."
            )


def check_buffers(caller: str, module: nn.Module, device: torch.device) -> None:
    for name, buffer in module.named_buffers():
        if buffer.device.type != device.type:
            raise ValueError(
                f"{caller} expects buffers on '{device.type}', but '{name}' is on '{buffer.device.type}', whose "
                "value a graph would never read again. Move it, or make it a Python number."
            )
