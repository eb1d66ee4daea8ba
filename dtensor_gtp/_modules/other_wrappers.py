"""Other wrappers around modules that ``gtp_shard`` has sharded: refused, unless they leave our parameters alone.

``DistributedDataParallel`` and others take each parameter for a plain tensor that all ranks hold alike. They would
broadcast one rank's shard to the others, and wait for gradients that never come, because ours do not pass through
autograd. ``torch.cuda.make_graphed_callables`` would train nothing for the same reason. None of this raises by itself.
One case is right: ``DistributedDataParallel`` over exactly the ranks of the gtp mesh reduces the ``ignored_params`` of
``gtp_shard``. The rest is refused before it has changed anything; all ranks call the wrapper, so all ranks raise.

torch has no hooks for this, so its functions are replaced. Code that imported ``make_graphed_callables`` by name before
gets an error from the recording itself, see ``refuse_partial_recording``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .. import _torch_compat as compat
from .._params.managed_param import ManagedParam
from .binding import managed_params

_REMEDY = (
    "Pass a 2-D (replicate, gtp) mesh to gtp_shard instead, or call fully_shard over the outer mesh axis after it."
)


@functools.cache
def install() -> None:
    """Let the wrappers check the module that they are given, once in a process."""
    _before_init(DistributedDataParallel, _check_ddp)
    _before_init(FullyShardedDataParallel, _check_fsdp1)
    _before_init(DataParallel, lambda module, arguments: _refuse("DataParallel", _managed(module)))
    torch_module, make_graphed = compat.localizing_module(), torch.cuda.make_graphed_callables
    localize = torch_module._localize_dtensor

    @functools.wraps(localize)
    def localize_or_refuse(module: nn.Module, *args: Any, ignored_params: set[nn.Parameter] | None = None) -> None:
        _refuse("replicate, or DistributedDataParallel with a device_mesh,", _managed(module, ignored_params or ()))
        localize(module, *args, ignored_params=ignored_params)

    @functools.wraps(make_graphed)
    def make_graphed_or_refuse(callables: Any, *args: Any, **kwargs: Any) -> Any:
        for module in callables if isinstance(callables, tuple) else (callables,):
            for name in _managed(module) if isinstance(module, nn.Module) else ():
                raise RuntimeError(
                    f"torch.cuda.make_graphed_callables does not support a {type(module).__name__} after gtp_shard: "
                    f"the gradient of '{name}' is reduced over ranks and does not pass through autograd, so the graph "
                    "would leave it out. Use dtensor_gtp.capture_step for whole steps, dtensor_gtp.capture_blocks for "
                    "single modules."
                )
        return make_graphed(callables, *args, **kwargs)

    torch_module._localize_dtensor = localize_or_refuse
    torch.cuda.make_graphed_callables = torch.cuda.graphs.make_graphed_callables = make_graphed_or_refuse


def _before_init(cls: type, check: Callable[[nn.Module, dict[str, Any]], None]) -> None:
    """Call ``check(module, arguments)`` ahead of ``cls(module, ...)``."""
    stock: Any = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind_partial(self, *args, **kwargs).arguments
        if isinstance(arguments.get("module"), nn.Module):
            check(arguments["module"], arguments)
        stock(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[misc]


def _managed(module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> dict[str, ManagedParam]:
    """Our parameters below ``module`` that are not ``ignored``, by each of their names."""
    ignored_ids = {id(param) for param in ignored}
    named = managed_params(module, remove_duplicate=False)
    return {name: param for name, param in named if id(param.param) not in ignored_ids}


def _refuse(what: str, managed: dict[str, ManagedParam], remedy: str = _REMEDY) -> None:
    for name, param in managed.items():
        raise ValueError(
            f"{what} cannot go around a module after gtp_shard: parameter '{name}' of shape {tuple(param.param.shape)} "
            f"is sharded, and its gradient averaged, over mesh axes {param.mesh.mesh_dim_names} alone (rank "
            f"{dist.get_rank()}). {remedy}"
        )


def _check_ddp(module: nn.Module, arguments: dict[str, Any]) -> None:
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    managed = {name: param for name, param in _managed(module).items() if name not in ignored}
    if not managed:
        return
    mesh = arguments.get("device_mesh")
    group = mesh.get_group() if mesh is not None else arguments.get("process_group")
    ranks = sorted(dist.get_process_group_ranks(group))  # None: DDP takes the default group
    others = {
        name: p for name, p in managed.items() if mesh is not None or ranks != sorted(p.mesh.mesh.flatten().tolist())
    }
    remedy = "To reduce the ignored_params of gtp_shard alone, pass process_group=mesh.get_group() of its mesh."
    _refuse(f"DistributedDataParallel over ranks {ranks}", others, f"{_REMEDY} {remedy}")
    # DDP looks for the parameters of the outermost module under a name with a dot in front as well.
    names = {name if "." in name else f".{name}" for name in managed} | managed.keys()
    compat.ignore_in_ddp(module, sorted(ignored | names))


def _check_fsdp1(module: nn.Module, arguments: dict[str, Any]) -> None:
    ignored: set[nn.Parameter] = set()
    for name in ("ignored_modules", "ignored_states", "ignored_parameters"):
        for item in arguments.get(name) or ():
            ignored.update(item.parameters() if isinstance(item, nn.Module) else [item])
    _refuse("FullyShardedDataParallel", _managed(module, ignored))
