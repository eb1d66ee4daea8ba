"""What ``capture_blocks`` refuses of a model and its blocks, and what it tells."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.nn as nn

from ._capture_checks import check_buffers
from ._runtime.binding import binding_of, unmanaged_params
from ._runtime.param import ManagedParam, ShardedWeight
from .capture import _runtimes_of

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
    runtimes = _runtimes_of(block, "capture_blocks")
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
    schedule = _runtimes_of(blocks[0], "capture_blocks")[0].schedule
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


__all__ = ["check_apart", "check_block", "check_window", "params_of"]
