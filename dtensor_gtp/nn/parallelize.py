"""``parallelize_experts``: which rank has which experts."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .. import _torch_compat as compat
from .dispatch import DispatchMethod, TokenDispatcher, experts_per_rank
from .grouped_linear import GroupedLinear
from .grouped_mlp import GroupedExperts, GroupedMLP


def parallelize_experts(
    module: nn.Module,
    ep_mesh: DeviceMesh | None = None,
    tp_mesh: DeviceMesh | None = None,
    *,
    method: str | DispatchMethod = DispatchMethod.ALL_TO_ALL,
    max_tokens: int | None = None,
) -> nn.Module:
    """Distribute all grouped layers of ``module`` over the ranks of expert parallelism, in place, before ``gtp_shard``.

    Their parameters, equal on all ranks or on the meta device, become DTensors of which each rank keeps its part; no
    communication. Each :class:`GroupedExperts` gets a dispatcher over ``ep_mesh``.

    The gradient of an expert is the sum over all tokens that came to it, from all ranks of ``ep``, while ``gtp_shard``
    divides by the ranks of its own mesh. Where a loss is the mean over ranks, tell the experts over how many:
    ``experts.set_gradient_divide_factor(mesh.data.size())`` after ``gtp_shard(experts, ...)``.

    Args:
        module: Contains :class:`GroupedLinear` layers.
        ep_mesh: 1-D; each rank gets an equal part of the experts.
        tp_mesh: 1-D; each rank gets an equal part of the inner width of every :class:`GroupedMLP`, and all see the same
            tokens. Grouped layers outside of one stay whole.
        method: How tokens travel, see :class:`TokenDispatcher`.
        max_tokens: Most tokens of a rank, see there.

    Returns:
        ``module``.

    Raises:
        ValueError: ``ep_mesh`` does not divide the experts, ``tp_mesh`` does not divide the inner width, or nothing is
            there to distribute.
        NotImplementedError: A grouped layer has a weight for each group, or ``tp_mesh`` meets a fused ``gate_up``.
    """
    from_axis = {id(layer): dim for layer, dim in _cut_by_tp(module, tp_mesh)}
    layers = [layer for layer in module.modules() if isinstance(layer, GroupedLinear)]
    for layer in layers:
        _check(layer, ep_mesh)
    for layer in layers:
        _cut(layer, ep_mesh, tp_mesh, from_axis.get(id(layer)))
    for submodule in module.modules():
        if isinstance(submodule, GroupedMLP):
            submodule.tp_mesh = tp_mesh
        elif isinstance(submodule, GroupedExperts):
            submodule.dispatcher = TokenDispatcher(submodule.num_experts, ep_mesh, method=method, max_tokens=max_tokens)
    return module


def _cut_by_tp(module: nn.Module, tp_mesh: DeviceMesh | None) -> list[tuple[GroupedLinear, int]]:
    """The layers of each MLP and the dim of their weights along the inner width."""
    if tp_mesh is None:
        return []
    cut: list[tuple[GroupedLinear, int]] = []
    for mlp in (m for m in module.modules() if isinstance(m, GroupedMLP)):
        if mlp.is_fused:
            raise NotImplementedError(
                "parallelize_experts supports tp_mesh for a GroupedMLP with is_fused=False, because a cut through "
                "gate_up would give some ranks gate alone. Build it so."
            )
        if mlp.hidden_dim % tp_mesh.size():
            raise ValueError(
                f"parallelize_experts expects a tp_mesh whose size divides the inner width {mlp.hidden_dim}, but got "
                f"{tp_mesh.size()}."
            )
        cut += [(mlp.gate, 1), (mlp.up, 1), (mlp.down, 2)]
    return cut


def _check(layer: GroupedLinear, ep_mesh: DeviceMesh | None) -> None:
    experts_per_rank(layer.num_groups, ep_mesh)
    if not layer.single_grouped_weight:
        raise NotImplementedError(
            "parallelize_experts supports a GroupedLinear with one weight for all groups, but got one with a weight "
            "for each. Build it with single_grouped_weight=True."
        )
    if any(isinstance(param, DTensor) for param in layer.parameters()):
        raise ValueError(
            "parallelize_experts expects parameters that nothing has cut yet, but got DTensors. Call it once, before "
            "gtp_shard."
        )


def _cut(layer: GroupedLinear, ep_mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None, dim: int | None) -> None:
    """Replace the parameters by DTensors: groups over ``ep_mesh``, ``dim`` of the weight over ``tp_mesh``."""
    meshes: list[DeviceMesh] = []
    for name, param in list(layer.named_parameters()):
        local: Tensor = param.detach()
        placements: list[Shard] = []
        meshes = []
        for mesh, cut in ((ep_mesh, 0), (tp_mesh, dim)):
            if mesh is not None and cut is not None:
                local = local.chunk(mesh.size(), cut)[mesh.get_local_rank()]
                meshes.append(mesh)
                placements.append(Shard(cut))
        if not meshes:
            return
        mesh = meshes[0] if len(meshes) == 1 else compat.concatenate_meshes(meshes)
        spec = compat.make_spec(mesh, tuple(placements), param.shape, param.dtype)
        new = compat.wrap_local(local.clone(memory_format=torch.contiguous_format), spec)
        layer.register_parameter(name, nn.Parameter(new, requires_grad=param.requires_grad))
