"""``DistributedDataParallel`` and other wrappers around modules that ``gtp_shard`` has sharded.

They take each parameter for a plain tensor that all ranks hold alike: they would broadcast one rank's shard to the
others, and reduce gradients that never come, because ours do not pass through autograd. All that silently. What is
right is let through: ``DistributedDataParallel`` over the very ranks of the gtp mesh reduces the parameters that
``gtp_shard`` was told to ignore, and leaves ours alone. Everything else is refused before it has changed anything; all
ranks construct the wrapper, so all ranks raise.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .. import _torch_compat as compat
from .._params.managed_param import ManagedParam
from .binding import binding_of

_REMEDY = (
    "Pass a 2-D (replicate, gtp) mesh to gtp_shard instead, or call fully_shard over the outer mesh axis after it."
)


@functools.cache
def install() -> None:
    """Let the wrappers look at the module that they are given, once in a process."""
    _before_init(DistributedDataParallel, _check_ddp)
    _before_init(FullyShardedDataParallel, _check_fsdp1)
    _before_init(DataParallel, _check_dp)
    torch_module = compat.localizing_module()
    localize = torch_module._localize_dtensor

    @functools.wraps(localize)
    def localize_or_refuse(module: nn.Module, *args: Any, ignored_params: set[nn.Parameter] | None = None) -> None:
        _refuse("replicate, or DistributedDataParallel with a device_mesh,", _managed(module, ignored_params or ()))
        localize(module, *args, ignored_params=ignored_params)

    torch_module._localize_dtensor = localize_or_refuse


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
    return {name: param for name, param in _named(module) if id(param.param) not in ignored_ids}


def _named(module: nn.Module) -> Iterator[tuple[str, ManagedParam]]:
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        binding = binding_of(submodule)
        for name, param in binding.params.items() if binding is not None else ():
            yield f"{prefix}.{name}" if prefix else name, param


def _refuse(what: str, managed: dict[str, ManagedParam], remedy: str = _REMEDY) -> None:
    """Raises:
    ValueError: There is a parameter of ours in ``managed``.
    """
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
    _refuse(
        f"DistributedDataParallel over ranks {ranks}",
        others,
        f"{_REMEDY} To reduce the ignored_params of gtp_shard alone, pass process_group=mesh.get_group() of its mesh.",
    )
    # DDP looks for the parameters of the outermost module under a name with a dot in front as well.
    names = {name if "." in name else f".{name}" for name in managed} | managed.keys()
    compat.ignore_in_ddp(module, sorted(ignored | names))


def _check_fsdp1(module: nn.Module, arguments: dict[str, Any]) -> None:
    ignored: set[nn.Parameter] = set()
    for name in ("ignored_modules", "ignored_states", "ignored_parameters"):
        for item in arguments.get(name) or ():
            ignored.update(item.parameters() if isinstance(item, nn.Module) else [item])
    _refuse("FullyShardedDataParallel", _managed(module, ignored))


def _check_dp(module: nn.Module, arguments: dict[str, Any]) -> None:
    _refuse("DataParallel", _managed(module))
