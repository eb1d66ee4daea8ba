"""Other kinds of parallelism around the weights: ``fully_shard``, DDP, pipelines."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import _composable_state as composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .dtensor import local_tensor

# Has ``DistributedDataParallel`` around a module leave the parameters with these names alone.
ignore_in_ddp: Callable[..., None] = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model


def fully_shard_group_class() -> Any:
    """The class of the parameter groups of ``fully_shard`` and ``replicate``, None if a release has another."""
    try:
        group_class = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group").FSDPParamGroup
    except (ImportError, AttributeError):
        return None  # ``ManagedParam.follow`` raises at the first use
    known = ("post_backward", "_to_sharded", "_to_unsharded", "is_sharded")  # what our patches replace or read
    if all(hasattr(group_class, name) for name in known):
        return group_class
    return None


class FullyShardCut(NamedTuple):
    """How a parameter group of ``fully_shard`` cuts its parameters."""

    mesh: DeviceMesh
    num_shards: int  # 1 for ``replicate``
    placement_fn: Callable[[torch.nn.Parameter], Any] | None

    @classmethod
    def from_arguments(cls, init: Callable[..., None], *args: Any, **kwargs: Any) -> FullyShardCut:
        """From the arguments of a group's ``__init__``."""
        named = inspect.signature(init).bind(*args, **kwargs).arguments
        mesh_info = named["mesh_info"]
        return cls(mesh_info.mesh, getattr(mesh_info, "shard_mesh_size", 1), named["shard_placement_fn"])

    def dim_of(self, param: torch.nn.Parameter) -> int:
        """The dim of ``param`` that is cut."""
        asked = None
        if self.placement_fn is not None:
            asked = self.placement_fn(param)
        placement = getattr(asked, "placement", asked)  # it may come with a mesh of its own
        if placement is None:
            return 0  # torch's default
        return int(placement.dim) % param.ndim


def fully_shard_sites(group: Any) -> list[tuple[torch.nn.Module, str]]:
    """Module and attribute name of each parameter of a group."""
    return [(param._module_info.module, param._module_info.param_name) for param in group.fsdp_params]


@contextmanager
def empty_grads_set_aside(group: Any) -> Iterator[None]:
    """Around the post-backward of a parameter group, which cannot reduce gradients without elements. The parameter gets
    an empty gradient, so that all ranks of the other axes have gradients of the same parameters."""
    empty = []
    for param in group.fsdp_params:
        unsharded: Any = getattr(param, "_unsharded_param", None)  # missing until the first gather
        if unsharded is None:
            grad = None
        else:
            grad = unsharded.grad
        if isinstance(grad, DTensor) and not local_tensor(grad).numel():
            unsharded.grad = None  # the post-backward skips parameters without a gradient
            empty.append(param)
    yield  # the post-backward runs
    for param in empty:
        param.sharded_param.grad = param.to_sharded_dtensor(torch.zeros_like(local_tensor(param.sharded_param)))


def fully_shard_params() -> list[Tensor]:
    """What all ``fully_shard`` and ``replicate`` calls of this process have registered as sharded parameters."""
    groups: list[Any] = []
    for ref in list(composable_state._module_state_mapping.values()):
        # The mapping is weak: ``ref()`` may be None. States of other APIs have no parameter groups.
        of_state = getattr(ref(), "_fsdp_param_groups", None)  # torch 2.13
        groups += [getattr(ref(), "_fsdp_param_group", None)] if of_state is None else of_state
    return [param.sharded_param for group in groups if group is not None for param in group.fsdp_params]


def localizing_module() -> Any:
    """The module of torch with ``_localize_dtensor``, by which DDP and ``replicate`` get at the shards of DTensors."""
    return import_module("torch.distributed.tensor.parallel.ddp")


def state_dict_module() -> Any:
    """The module of torch with ``get_state_dict``, and with the private functions below it."""
    return import_module("torch.distributed.checkpoint.state_dict")


def is_replicated_by_ddp(module: torch.nn.Module) -> bool:
    """Whether the ``replicate`` that is built on DDP was called on ``module``."""
    return isinstance(module, import_module("torch.distributed._composable.replicate").DDP)


def pipeline_stage_class() -> Any | None:
    """Base class of the stages of ``torch.distributed.pipelining``; None as long as nobody has imported that."""
    # Without an import: a program without pipelines shall not pay for it.
    return getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
