"""``GroupedLinear``: one linear layer per group of rows, as the experts of a mixture of experts need it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import _torch_compat as compat
from .._comm.debug import DebugFlags
from .._modules.binding import BoundModule, Fused
from .._modules.frames import forward_in_frame
from .._params.managed_param import ManagedParam, Site
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from ..ops.compiled_layers import grouped_linear as compiled_grouped_linear
from ..ops.grouped import grouped_linear, sharded_grouped_linear
from ..placement import GTPShard


class GroupedLinear(nn.Module):
    """A linear layer with a weight and bias for each group of rows.

    The rows of the input are sorted by group; how many belong to each is a tensor on the device. Where torch has a
    grouped kernel (bfloat16 on Hopper and newer), the host does not wait for it, and a CUDA graph can be replayed with
    other groups; elsewhere torch's own loop over the groups reads the counts. Initialized as ``nn.Linear``.
    ``gtp_shard`` gives each rank whole groups of the grouped weight if the ranks divide them, else (or with a recipe)
    rows of every group; biases stay whole.

    Args:
        num_groups: Groups (experts).
        in_features: Size of each input row.
        out_features: Size of each output row.
        bias: Whether each group has a bias.
        scale_bias: Whether ``forward`` takes a factor of the bias for each row (a token's routing probability).
        single_grouped_weight: One parameter ``weight`` of shape ``(num_groups, out_features, in_features)`` and one
            ``bias`` of shape ``(num_groups, out_features)``; else ``weight0``, ``weight1``, ... and ``bias0``, ...
            of the shapes that ``nn.Linear`` has, gathered together.
        device, dtype: Of the parameters.

    Raises:
        ValueError: A size is below 1, or ``scale_bias`` without ``bias``.

    The arithmetic is ``torch.nn.functional.grouped_mm``; in float64, which that lacks, a loop over the groups. Operands
    whose rows are no multiple of 16 bytes are copied to be padded. A CPU checks that the counts fit the rows; elsewhere
    layers that are built with ``DTENSOR_GTP_DEBUG=splits`` assert it on the device. Weights of a parameter for each
    group are copied together at each use without ``gtp_shard``, on a mesh of one rank, with a recipe, in compiled code
    and under autocast.

    ``gtp_shard`` sends gradients rank by rank, so those of rows of every group are copied first.

    Example:
        >>> layer = GroupedLinear(num_groups=3, in_features=16, out_features=8)
        >>> layer.weight.shape
        torch.Size([3, 8, 16])
        >>> layer(torch.randn(10, 16), torch.tensor([4, 0, 6])).shape
        torch.Size([10, 8])
        >>> layer.reset_parameters()
    """

    # gtp_shard and quantize_ read these, and call the methods with gtp in their names.
    gtp_gathers_together = True  # weights of one layer travel in one launch
    has_grouped_weight = True

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        scale_bias: bool = False,
        single_grouped_weight: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("num_groups", num_groups), ("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise ValueError(f"GroupedLinear expects {name} >= 1, but got {size}.")
        if scale_bias and not bias:
            raise ValueError("GroupedLinear expects bias=True with scale_bias=True, but got bias=False.")
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.scale_bias = scale_bias
        self.single_grouped_weight = single_grouped_weight
        lead = (num_groups,) if single_grouped_weight else ()
        # One parameter of each kind, or one for each group.
        for suffix in [""] if single_grouped_weight else range(num_groups):
            value = torch.empty(*lead, out_features, in_features, device=device, dtype=dtype)
            self.register_parameter(f"weight{suffix}", nn.Parameter(value))
            if bias:
                value = torch.empty(*lead, out_features, device=device, dtype=dtype)
                self.register_parameter(f"bias{suffix}", nn.Parameter(value))
        if single_grouped_weight and not bias:
            self.register_parameter("bias", None)  # as in nn.Linear: the attribute exists
        self._asserts_splits = DebugFlags.from_env().splits
        self.reset_parameters()

    def names_of(self, kind: str) -> list[str]:
        """Names of the parameters of a kind, ``"weight"`` or ``"bias"``, in the order of groups."""
        if kind == "bias" and not self.has_bias:
            return []
        if self.single_grouped_weight:
            return [kind]
        return [f"{kind}{group}" for group in range(self.num_groups)]

    def reset_parameters(self) -> None:
        """Draw each group as ``nn.Linear`` draws: uniform, within one over the root of ``in_features``."""
        bound = 1 / math.sqrt(self.in_features)
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    def default_gtp_placement(self, name: str) -> Placement:
        """How ``gtp_shard`` places the parameter ``name``, unless it is told otherwise, or can give each rank whole
        groups of a weight without a recipe."""
        if name.startswith("bias"):
            return Replicate()
        return GTPShard(1 if self.single_grouped_weight else 0)  # the rows of each group

    def gtp_fused(self, params: Mapping[str, ManagedParam]) -> Fused | None:
        """The fused op, if the forward is the stock one and each rank computes with groups or slices of groups."""
        is_stock = type(self).forward is GroupedLinear.forward and "forward" not in self.__dict__
        weights = [params.get(name) for name in self.names_of("weight")]
        specs = [weight.tp_spec for weight in weights if isinstance(weight, ShardedWeight)]
        is_cut = all(isinstance(p, Shard) for spec in specs if spec is not None for p in spec.placements)
        # None: the forward reads weights as attributes.
        if is_stock and is_cut and len(specs) == len(weights):
            return Fused(_fused_forward, multiplies=True)
        return None

    def check_gtp_placement(self, fqn: str, param: Tensor, placement: GTPShard) -> None:
        """Refuse what expert or tensor parallelism has cut over an axis that does not divide the groups or blocks."""
        if not isinstance(param, DTensor):
            return
        shape = list(param.shape)
        mesh = param.device_mesh
        for axis, cut in enumerate(param.placements):
            dim = getattr(cut, "dim", None)
            size = mesh.size(axis)
            if dim is None:
                continue
            if mesh.mesh_dim_names:
                name = mesh.mesh_dim_names[axis]
            else:
                name = str(axis)
            what = f"parameter '{fqn}' of shape {tuple(param.shape)}, which mesh axis '{name}' of size {size} cuts"
            if dim == 0 and self.single_grouped_weight and shape[0] % size:
                what = f"{what}. Choose an axis whose size divides the {self.num_groups} groups."
                raise ValueError(
                    f"gtp_shard expects the same number of groups on each rank of a GroupedLinear, but got {what}"
                )
            rows = -(-shape[dim] // size)  # of the largest slice
            if dim == placement.dim and size > 1 and rows % placement.block_size:
                what = f"{what} into slices of {rows}. Choose a block size that divides {rows}"
                blocks = f"whole blocks of {placement.block_size} along dim {dim}"
                raise ValueError(f"gtp_shard expects slices of {blocks}, but got {what}.")
            shape[dim] = rows  # what the next axis cuts

    def forward(self, x: Tensor, split_sizes: Tensor, scales: Tensor | None = None) -> Tensor:
        """Multiply each group's rows by the weight of the group.

        Args:
            x: Shape ``(num_rows, in_features)``, sorted by group.
            split_sizes: Rows of each group, shape ``(num_groups,)``, int32 or int64, on the device of ``x``. Groups may
                be empty. Rows beyond their sum are ignored and come out zero.
            scales: With ``scale_bias``: factor of each row's bias, shape ``(num_rows,)``.

        Returns:
            Shape ``(num_rows, out_features)``, in the dtype of ``x``, or of autocast.

        Raises:
            ValueError, TypeError: An argument has the wrong shape, dtype or device.
            NotImplementedError: Tensor parallelism has cut ``in_features`` of a layer with a bias.
        """
        weight = self._grouped("weight")
        bias = None
        if self.has_bias:
            bias = self._grouped("bias")
        self.check_input(x, split_sizes, scales, weight.shape)
        return grouped_linear(x, weight, bias, split_sizes, scales)

    def _grouped(self, kind: str) -> Tensor:
        """What this rank has of the weights or biases of all groups, in one tensor."""
        parts = [_local(getattr(self, name)) for name in self.names_of(kind)]
        if self.single_grouped_weight:
            return parts[0]
        return torch.stack(parts)

    def check_input(self, x: Tensor, split_sizes: Tensor, scales: Tensor | None, weight_shape: torch.Size) -> None:
        """Raise what :meth:`forward` raises, before its first collective. ``weight_shape`` is this rank's part."""
        num_groups, _, in_features = weight_shape
        if x.ndim != 2 or x.shape[1] != in_features:
            raise ValueError(f"GroupedLinear expects x of shape (num_rows, {in_features}), but got {tuple(x.shape)}.")
        if self.has_bias and in_features != self.in_features:
            raise NotImplementedError(
                f"GroupedLinear does not support a bias where tensor parallelism splits its {self.in_features} "
                f"in_features into {in_features}, because each rank would add the bias to its part of the sum. Build "
                "it with bias=False."
            )
        if not isinstance(split_sizes, Tensor) or split_sizes.dtype not in (torch.int32, torch.int64):
            if isinstance(split_sizes, Tensor):
                got = split_sizes.dtype
            else:
                got = type(split_sizes).__name__
            raise TypeError(f"GroupedLinear expects split_sizes as an int32 or int64 tensor, but got {got}.")
        if split_sizes.device != x.device:
            raise ValueError(
                f"GroupedLinear expects split_sizes on {x.device}, as x is, but got {split_sizes.device}: moving it "
                "would make the host wait. Compute the counts on that device."
            )
        if split_sizes.shape != (num_groups,):
            what = f"shape ({num_groups},), a count for each group of this rank, but got {tuple(split_sizes.shape)}"
            raise ValueError(f"GroupedLinear expects split_sizes of {what}.")
        if (scales is not None) != self.scale_bias:
            what = f"{'none' if scales is None else 'some'} with scale_bias={self.scale_bias}"
            raise ValueError(f"GroupedLinear expects scales with scale_bias=True and only then, but got {what}.")
        if scales is not None and scales.shape != x.shape[:1]:
            raise ValueError(f"GroupedLinear expects scales of shape ({x.shape[0]},), but got {tuple(scales.shape)}.")
        # A CPU can look at the counts. A GPU would make the host wait, and a compiler cannot branch on them.
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            counts = split_sizes.tolist()
            if min(counts) < 0 or sum(counts) > x.shape[0]:
                limits = f"sum up to at most the {x.shape[0]} rows of x, none below 0"
                raise ValueError(f"GroupedLinear expects split_sizes that {limits}, but got {counts}.")
        elif self._asserts_splits:
            assert_counts(split_sizes, x.shape[0])

    def extra_repr(self) -> str:
        sizes = f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.has_bias}"


def assert_counts(split_sizes: Tensor, num_rows: int) -> None:
    """Check the counts on the device: a CPU raises a RuntimeError, on a GPU a kernel fails and ends the process."""
    expected = "split_sizes that sum up to at most the rows of x, none below 0 (found by DTENSOR_GTP_DEBUG=splits)"
    is_right = (split_sizes >= 0).all() & (split_sizes.sum() <= num_rows)
    compat.assert_on_device(is_right, f"GroupedLinear expects {expected}.")


def convert_grouped_state_dict(
    state_dict: Mapping[str, Tensor], prefix: str = "", *, single_grouped_weight: bool
) -> dict[str, Tensor]:
    """The state dict of a :class:`GroupedLinear` for one with the other ``single_grouped_weight``, bit by bit.

    Args:
        state_dict: Plain tensors, of the layer or of a model that contains it.
        prefix: Name of the layer with the dot after it (``"layers.0.experts.up."``); other keys are passed on.
        single_grouped_weight: The form to convert to.

    Returns:
        A new dict.

    Raises:
        ValueError: ``state_dict`` has no weights of a :class:`GroupedLinear` in the other form under ``prefix``, or
            those of a group are missing.

    Example:
        >>> layer = GroupedLinear(2, 4, 4)
        >>> state = convert_grouped_state_dict(layer.state_dict(), single_grouped_weight=False)
        >>> sorted(state)
        ['bias0', 'bias1', 'weight0', 'weight1']
    """
    converted = dict(state_dict)
    weight = state_dict.get(f"{prefix}weight")
    is_grouped = weight is not None and weight.ndim == 3  # that of an nn.Linear has 2 dims
    for name in (f"{prefix}weight", f"{prefix}bias"):
        if single_grouped_weight:
            parts = _parts(converted, name)
            if parts:
                converted[name] = torch.stack(parts)
        elif is_grouped and name in state_dict:
            for group, value in enumerate(converted.pop(name).unbind(0)):
                converted[f"{name}{group}"] = value.clone()  # a copy, not a view of all groups
    if converted.keys() == state_dict.keys():
        wanted = "weight"
        if single_grouped_weight:
            wanted = "weight0, weight1, ..."
        raise ValueError(f"convert_grouped_state_dict expects {wanted} under prefix '{prefix}', but found none.")
    return converted


def _parts(state: dict[str, Tensor], name: str) -> list[Tensor]:
    """Remove the parameters of all groups from ``state``."""
    ends = [key.removeprefix(name) for key in state if key.startswith(name)]
    last = max((int(end) for end in ends if end.isdecimal()), default=-1)
    try:
        return [state.pop(f"{name}{group}") for group in range(last + 1)]
    except KeyError as error:
        what = f"all groups up to '{name}{last}', but {error} is missing"
        raise ValueError(f"convert_grouped_state_dict expects {what}.") from None


def _local(value: Tensor) -> Tensor:
    """This rank's part of a parameter that expert or tensor parallelism has cut."""
    if isinstance(value, DTensor):
        return value.to_local()
    return value


def _fused_forward(bound: BoundModule, x: Tensor, split_sizes: Tensor, scales: Tensor | None = None) -> Tensor:
    module = cast(GroupedLinear, bound)
    binding = bound._gtp_binding
    if torch.compiler.is_compiling():
        if torch.is_autocast_enabled(x.device.type) or not module.single_grouped_weight:
            return GroupedLinear.forward(module, x, split_sizes, scales)  # reads weights as attributes
        compiled = binding.compiled["weight"]
        module.check_input(x, split_sizes, scales, compiled.weight.layout.shape)
        if module.bias is None:
            value = None
        else:
            value = _local(module.bias)  # read as an attribute: the graph gets it
        return compiled_grouped_linear(x, value, split_sizes, scales, compiled)
    if binding.block is not None:  # in a group modules have plain full weights
        return GroupedLinear.forward(module, x, split_sizes, scales)
    get = binding.params.get
    names_of = module.names_of
    weights = {name: param for name in names_of("weight") if isinstance(param := get(name), ShardedWeight)}
    biases = {name: param for name in names_of("bias") if isinstance(param := get(name), WholeParam)}
    if module.single_grouped_weight:
        num_params = 1
    else:
        num_params = module.num_groups
    # The fused op takes weights that are all shards and biases that are all whole. Other cases read attributes.
    is_plain = len(weights) == num_params and len(biases) == num_params * module.has_bias
    if not is_plain or torch.is_autocast_enabled(x.device.type):
        return forward_in_frame(bound, GroupedLinear.forward, x, split_sizes, scales)
    for name, param in (*weights.items(), *biases.items()):
        param.follow(Site(module, name))  # another parameter object may be registered by now
    values = [_local(bias.value()) for bias in biases.values()]
    runtime = binding.group.runtime
    sharded = tuple(weights.values())
    shape = sharded[0].layout.shape
    value = None
    if values:
        value = values[0]
    if not module.single_grouped_weight:  # as those of one weight would be
        shape = torch.Size((num_params, *shape))
        value = None
        if values:
            value = torch.stack(values)
    module.check_input(x, split_sizes, scales, shape)
    return sharded_grouped_linear(x, value, split_sizes, scales, runtime, sharded)
