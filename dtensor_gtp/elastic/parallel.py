"""Tensor-parallel styles that split at block boundaries: heads stay whole on any number of ranks.

torch's styles would split 8 heads on 3 ranks within a head. These give each rank ``ceil(blocks / tp)`` whole blocks,
and the last ranks the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor as dtensor
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from ..placement import GTPShard
from .replicas import check_size


class _BlockParallel(ParallelStyle):
    """``nn.Linear`` whose weight is cut along ``dim``."""

    # For torch's ``distribute_module``: (layer, inputs or output, mesh) to inputs or output.
    _prepare_input: Callable[[Any, Any, DeviceMesh], Any]
    _prepare_output: Callable[[Any, Any, DeviceMesh], Any]

    def __init__(self, block_size: int, dim: int, layouts: Placement | None) -> None:
        super().__init__()
        check_size(type(self).__name__, "block_size", block_size)
        self.block_size = block_size
        self._dim = dim
        self._layouts = layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = type(self).__name__
        if not isinstance(module, nn.Linear):
            raise TypeError(f"{style} expects an nn.Linear, but got {type(module).__name__}. Use another style for it.")
        name = ("out_features", "in_features")[self._dim]
        features: int = getattr(module, name)
        if features % self.block_size or features // self.block_size < device_mesh.size():
            raise ValueError(
                f"{style} expects blocks of {self.block_size} that fill {name}={features} and are at least as many "
                f"as the {device_mesh.size()} ranks of tp, but there are {features / self.block_size:g}. Use a "
                "smaller tp or another block_size."
            )

        cut = GTPShard(self._dim, block_size=self.block_size)

        def partition(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            # A bias has output features alone: torch's ``distribute_module`` replicates it where inputs are cut.
            for key in ("weight",) if self._dim else ("weight", "bias"):
                param = getattr(module, key)
                if param is not None:
                    # By its module: the first GTPShard replaces the function there by one that knows blocks.
                    sharded = dtensor.distribute_tensor(param, mesh, [cut])
                    module.register_parameter(key, nn.Parameter(sharded, requires_grad=param.requires_grad))

        return distribute_module(module, device_mesh, partition, self._prepare_input, self._prepare_output)


class BlockColwiseParallel(_BlockParallel):
    """``ColwiseParallel`` for ``nn.Linear`` whose output features are in blocks, e.g. heads. Its output is local.

    Ranks may have unequal numbers of blocks, so the module around it must not expect a fixed number of heads:
    ``x.view(batch, tokens, -1, head_dim)``. Under :func:`~dtensor_gtp.gtp_shard` the layer runs on local
    tensors; else DTensor gathers the weight.

    Args:
        block_size: Features that stay together: ``head_dim``.
        input_layouts: Placement of an input that is no DTensor, ``Replicate()`` by default.

    Raises:
        TypeError, ValueError: ``block_size`` is no positive int; by ``parallelize_module``: the module is no
            ``nn.Linear``, blocks do not fill the features, or are fewer than ranks.

    Example:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
        >>> mesh = init_weight_mesh("cpu", gtp=2, tp=2)
        >>> plan = {"0": BlockColwiseParallel(32), "2": BlockRowwiseParallel(32)}  # 3 heads
        >>> model = parallelize_module(model, mesh["tp"], plan)
        >>> model = gtp_shard(model, mesh["gtp"])
        >>> model(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """

    def __init__(self, block_size: int, *, input_layouts: Placement | None = None) -> None:
        super().__init__(block_size, 0, input_layouts)

    def _prepare_input(self, linear: Any, inputs: Any, mesh: DeviceMesh) -> Any:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, (self._layouts,), run_check=False)  # a check would communicate
        return (x.redistribute(placements=(Replicate(),)), *inputs[1:])  # gathers if ``input_layouts`` says Shard

    def _prepare_output(self, linear: Any, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()


class BlockRowwiseParallel(_BlockParallel):
    """``RowwiseParallel`` for ``nn.Linear`` after :class:`BlockColwiseParallel`: its input features are in blocks.

    Args:
        block_size: As that of the layers before, in features of this layer's input.
        output_layouts: Placement of the output, ``Replicate()`` by default. The output is local.

    Raises:
        TypeError, ValueError: As for :class:`BlockColwiseParallel`.

    Example:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> mesh = init_weight_mesh("cpu", dp=2, tp=2)
        >>> out = parallelize_module(nn.Linear(96, 64), mesh["tp"], BlockRowwiseParallel(32))
        >>> heads = torch.randn(2, out.weight.to_local().shape[1])  # one head, or two
        >>> out(heads).shape
        torch.Size([2, 64])
    """

    def __init__(self, block_size: int, *, output_layouts: Placement | None = None) -> None:
        super().__init__(block_size, 1, output_layouts)

    def _prepare_input(self, linear: Any, inputs: Any, mesh: DeviceMesh) -> Any:
        x = inputs[0]
        if not isinstance(x, DTensor):
            # ``from_local`` would compute the shape as if all ranks had equal parts, so it gets shape and stride.
            shape = torch.Size((*x.shape[:-1], linear.in_features))
            cut = GTPShard(x.ndim - 1, block_size=self.block_size)
            stride = torch.empty(shape, device="meta").stride()
            x = DTensor.from_local(x.contiguous(), mesh, (cut,), run_check=False, shape=shape, stride=stride)
        return (x, *inputs[1:])

    def _prepare_output(self, linear: Any, output: Any, mesh: DeviceMesh) -> Any:
        # The output is a partial sum over this rank's features: the redistribution adds those of all ranks.
        return output.redistribute(placements=(self._layouts,)).to_local()
