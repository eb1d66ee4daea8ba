"""The feed-forward networks of a mixture of experts, in grouped layers, and which rank has which experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .. import _torch_compat as compat
from .dispatch import Dispatcher, DispatchMethod, TokenDispatcher, experts_per_rank
from .grouped_linear import GroupedLinear

Activation = Callable[[Tensor], Tensor]
_CUT = "_dtensor_gtp_cut"  # attribute of a parameter that was cut: the one in its place


class GroupedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` of each group's rows with the group's weights.

    ``gate`` and ``up`` are one layer ``gate_up`` of twice the width, the rows of ``gate`` first, hence one grouped GEMM
    for both. Under ``gtp_shard`` the gather of ``down`` is launched before that GEMM and hides behind it.

    Args:
        num_groups: Groups (experts).
        dim: Size of input and output rows.
        hidden_dim: Inner width of each expert.
        activation: Elementwise, applied to ``gate``.
        is_fused: False makes two layers ``gate`` and ``up``, as tensor parallelism inside of experts needs them.
        device, dtype: Of the parameters.

    Raises:
        ValueError: A size is below 1.

    Example:
        >>> mlp = GroupedMLP(num_groups=4, dim=16, hidden_dim=32)
        >>> mlp(torch.randn(10, 16), torch.tensor([3, 0, 5, 2])).shape
        torch.Size([10, 16])
    """

    def __init__(
        self,
        num_groups: int,
        dim: int,
        hidden_dim: int,
        *,
        activation: Activation = F.silu,
        is_fused: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layer = partial(GroupedLinear, num_groups, bias=False, device=device, dtype=dtype)
        self.num_groups = num_groups
        self.dim = dim
        self.hidden_dim = hidden_dim
        self.is_fused = is_fused
        self.activation = activation
        if is_fused:
            self.gate_up = layer(dim, 2 * hidden_dim)
        else:
            self.gate = layer(dim, hidden_dim)
            self.up = layer(dim, hidden_dim)
        self.down = layer(hidden_dim, dim)
        # The axis that cuts the inner width, set by parallelize_experts.
        self.tp_mesh: DeviceMesh | None = None

    def forward(self, x: Tensor, split_sizes: Tensor) -> Tensor:
        """Run each group's rows through the MLP of the group.

        Args:
            x: Shape ``(num_rows, dim)``, sorted by group.
            split_sizes: Rows of each group, as for :meth:`GroupedLinear.forward`.

        Returns:
            Shape ``(num_rows, dim)``. Rows that belong to no group become zero.
        """
        if self.tp_mesh is not None:
            # Each rank has a part of the width, so the gradients of x are terms of a sum.
            replicated = DTensor.from_local(x, self.tp_mesh, [Replicate()], run_check=False)
            x = replicated.to_local(grad_placements=[Partial()])  # in backward an all-reduce over tp
        if self.is_fused:
            gate, up = self.gate_up(x, split_sizes).chunk(2, -1)
        else:
            gate = self.gate(x, split_sizes)
            up = self.up(x, split_sizes)
        y: Tensor = self.down(self.activation(gate) * up, split_sizes)
        if self.tp_mesh is not None:
            # Each rank has a part of the width, so the outputs are terms of a sum.
            y = DTensor.from_local(y, self.tp_mesh, [Partial()], run_check=False).full_tensor()
        return y

    def extra_repr(self) -> str:
        return f"activation={getattr(self.activation, '__name__', self.activation)}"


class GroupedExperts(nn.Module):
    """Routed experts: tokens go to their experts, wherever these are, and come back as a weighted sum.

    Call ``gtp_shard`` on ``mlp`` rather than on this module under a ``param_dtype``: inputs of the sharded module are
    cast, and the weights of the sum should not be.

    Args:
        mlp: The experts.
        dispatcher: Brings tokens to them; by default for experts that are all on this rank.

    Example:
        >>> experts = GroupedExperts(GroupedMLP(num_groups=4, dim=16, hidden_dim=32))
        >>> tokens, router = torch.randn(6, 16), nn.Linear(16, experts.num_experts)
        >>> weights, chosen = router(tokens).softmax(-1).topk(2)
        >>> experts(tokens, chosen, weights).shape
        torch.Size([6, 16])
    """

    def __init__(self, mlp: GroupedMLP, dispatcher: Dispatcher | None = None) -> None:
        super().__init__()
        self.mlp = mlp
        self.dispatcher: Dispatcher = TokenDispatcher(mlp.num_groups) if dispatcher is None else dispatcher

    @property
    def num_experts(self) -> int:
        """Experts, over all ranks."""
        return self.mlp.num_groups

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What the experts make of each token.

        Args:
            hidden_states: Tokens, shape ``(num_tokens, dim)``.
            top_k_index: Experts of each token, shape ``(num_tokens, k)``, int64; none twice for a token. Numbers below
                0 or from ``num_experts`` on stand for no expert.
            top_k_weights: Their weights, same shape, floating point.

        Returns:
            The weighted sums of the experts' results, shape ``(num_tokens, dim)``.
        """
        return self.dispatcher(self.mlp, hidden_states, top_k_index, top_k_weights)


def parallelize_experts(
    module: nn.Module,
    ep_mesh: DeviceMesh | None = None,
    tp_mesh: DeviceMesh | None = None,
    *,
    method: str | DispatchMethod = DispatchMethod.ALL_TO_ALL,
    max_tokens: int | None = None,
) -> nn.Module:
    """Distribute all grouped layers of ``module`` over the ranks of expert parallelism, in place, before ``gtp_shard``.
    Returns ``module``.

    Their parameters, equal on all ranks or on the meta device, become DTensors of which each rank keeps its part,
    without communication. Each :class:`GroupedExperts` gets a dispatcher over ``ep_mesh``.

    The gradient of an expert is the sum over all tokens that came to it, from all ranks of ``ep``, while ``gtp_shard``
    divides by the ranks of its own mesh. Where a loss is the mean over ranks, call
    ``experts.set_gradient_divide_factor(mesh.data.size())`` after ``gtp_shard(experts, ...)``.

    Args:
        module: Contains :class:`GroupedLinear` layers.
        ep_mesh: 1-D; each rank gets an equal part of the experts.
        tp_mesh: 1-D; each rank gets an equal part of the inner width of every :class:`GroupedMLP`, and all see the same
            tokens. Grouped layers outside of one stay whole.
        method, max_tokens: How tokens travel, see :class:`TokenDispatcher`.

    Returns:
        ``module``.

    Raises:
        ValueError: A mesh does not divide the experts or the inner width, parameters are DTensors already, layers that
            share one would be cut in different ways, or there is no grouped layer.
        NotImplementedError: A grouped layer has a weight for each group, ``tp_mesh`` meets a fused ``gate_up``, or
            ``module`` has experts of ``transformers``: call ``dtensor_gtp.nn.group_experts_(module)`` before.

    Example:
        >>> experts = GroupedExperts(GroupedMLP(num_groups=8, dim=16, hidden_dim=64))
        >>> mesh = init_weight_mesh("cpu", dp=2, gtp=2, ep=2, expert_gtp=2)
        >>> experts = parallelize_experts(experts, mesh["ep"])
        >>> experts = gtp_shard(experts, mesh.expert_weights)
        >>> experts.set_gradient_divide_factor(mesh.data.size())
        >>> experts.mlp.down.weight.to_local().shape  # 2 of the 4 experts that it computes with
        torch.Size([2, 16, 64])
    """
    # All checks precede the first change.
    if not (ep_mesh is None and tp_mesh is None):
        _check_is_grouped(module)
    if tp_mesh is None:
        tp_dims = {}
    else:
        tp_dims = _tp_dims(module, tp_mesh)
    layers = [layer for layer in module.modules() if isinstance(layer, GroupedLinear)]
    for layer in layers:
        experts_per_rank(layer.num_groups, ep_mesh)  # raises if the axis does not divide them
        if not layer.single_grouped_weight:
            what = "a GroupedLinear with one weight for all groups, but got one with a weight for each"
            raise NotImplementedError(f"parallelize_experts supports {what}. Set single_grouped_weight=True.")
        if any(isinstance(param, DTensor) for param in layer.parameters()):
            what = "parameters that nothing has cut yet, but got DTensors"
            raise ValueError(f"parallelize_experts expects {what}. Call it once, before gtp_shard.")
    for layer in layers:
        # A layer outside of any MLP has no dim for tp and stays whole there.
        cuts = [(ep_mesh, 0), (tp_mesh, tp_dims.get(id(layer)))]
        _cut(layer, [(mesh, dim) for mesh, dim in cuts if mesh is not None and dim is not None])
    for submodule in module.modules():
        if isinstance(submodule, GroupedMLP):
            submodule.tp_mesh = tp_mesh
        elif isinstance(submodule, GroupedExperts):
            submodule.dispatcher = TokenDispatcher(submodule.num_experts, ep_mesh, method=method, max_tokens=max_tokens)
    return module


def _check_is_grouped(module: nn.Module) -> None:
    """Refuse experts that would stay whole, without a word."""
    for name, submodule in module.named_modules():
        fused = submodule._parameters.get("gate_up_proj")
        if fused is not None and fused.ndim == 3:
            raise NotImplementedError(
                f"parallelize_experts supports GroupedLinear layers, but '{name}' is a {type(submodule).__name__}, "
                f"whose 'gate_up_proj' of shape {tuple(fused.shape)} has all experts. Call "
                "dtensor_gtp.nn.group_experts_(module) before; if that refuses these experts, use gtp_shard alone, "
                "which shards them over gtp."
            )
    if not any(isinstance(submodule, GroupedLinear) for submodule in module.modules()):
        raise ValueError(
            f"parallelize_experts expects a module with GroupedLinear layers, but got a {type(module).__name__} "
            "without. Build its experts of them, or convert them with dtensor_gtp.nn.group_experts_(module)."
        )


def _tp_dims(module: nn.Module, tp_mesh: DeviceMesh) -> dict[int, int]:
    """The dim of the weights along the inner width, by the id of each layer of an MLP."""
    dims: dict[int, int] = {}
    for mlp in (m for m in module.modules() if isinstance(m, GroupedMLP)):
        if mlp.is_fused:
            why = "because a cut through gate_up would give some ranks gate alone"
            what = "tp_mesh for a GroupedMLP with is_fused=False"
            raise NotImplementedError(f"parallelize_experts supports {what}, {why}. Build it so.")
        if mlp.hidden_dim % tp_mesh.size():
            what = f"a tp_mesh whose size divides the inner width {mlp.hidden_dim}, but got {tp_mesh.size()}"
            raise ValueError(f"parallelize_experts expects {what}.")
        dims.update({id(mlp.gate): 1, id(mlp.up): 1, id(mlp.down): 2})  # rows of gate and up, columns of down
    return dims


def _cut(layer: GroupedLinear, cuts: list[tuple[DeviceMesh, int]]) -> None:
    """Replace the parameters by DTensors that are cut along a dim over each mesh."""
    if not cuts:
        return
    if len(cuts) == 1:
        mesh = cuts[0][0]
    else:
        mesh = compat.concatenate_meshes([mesh for mesh, _ in cuts])
    placements = tuple(Shard(dim) for _, dim in cuts)
    for name, param in list(layer.named_parameters()):
        # Cut before, perhaps in another call, for a layer that shares the parameter.
        new = param.__dict__.get(_CUT)
        if new is None:
            # A copy, because a view would keep the whole parameter alive. Ranks hold equal values: nothing is sent.
            local = compat.own_part(param.detach(), mesh, placements).clone(memory_format=torch.contiguous_format)
            spec = compat.make_spec(mesh, placements, param.shape, param.dtype)
            new = nn.Parameter(compat.wrap_local(local, spec), requires_grad=param.requires_grad)
            setattr(param, _CUT, new)
        elif new.device_mesh != mesh or new.placements != placements:
            raise ValueError(
                f"parallelize_experts expects layers that share a parameter to be cut alike, but '{name}' of shape "
                f"{tuple(param.shape)} is cut as {placements} on mesh axes {mesh.mesh_dim_names} here, and as "
                f"{new.placements} on {new.device_mesh.mesh_dim_names} elsewhere. Give each layer its own parameter."
            )
        layer.register_parameter(name, new)
