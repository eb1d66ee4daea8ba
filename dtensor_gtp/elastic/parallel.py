"""Tensor-parallel styles that cut at block boundaries: heads stay whole on any number of ranks.

torch's styles cut rows as evenly as rows allow: 8 heads on 3 ranks would be cut within a head. These give each rank
whole blocks, as many as the others up to what is left for the last ones, and compute on what each rank has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor as dtensor
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from ..placement import GTPShard
from .replicas import check_size


class BlockColwiseParallel(ParallelStyle):
    """``ColwiseParallel`` for ``nn.Linear`` whose output features are in blocks, e.g. heads. Its output is local.

    A rank has ``ceil(blocks / tp)`` blocks, the last ones what is left, so the module around it must not expect a fixed
    number of heads: ``x.view(batch, tokens, -1, head_dim)``. Under :func:`gtp_shard` the layer runs on local tensors;
    without it DTensor gathers the weight.

    Args:
        block_size: Features that stay together: ``head_dim``.
        input_layouts: Placement of an input that is no DTensor.

    Raises:
        TypeError: Of ``parallelize_module``: the module is no ``nn.Linear``.
        ValueError: Of ``parallelize_module``: blocks do not fill the features, or are fewer than ranks.
    """

    def __init__(self, block_size: int, *, input_layouts: Placement | None = None) -> None:
        super().__init__()
        check_size(type(self).__name__, "block_size", block_size)
        self.block_size = block_size
        self._input = input_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _checked(self, module, device_mesh, "out_features", self.block_size)
        cut = GTPShard(0, block_size=self.block_size)

        def partition(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            _distribute(linear, "weight", mesh, cut)
            _distribute(linear, "bias", mesh, cut)

        def prepare(part: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            x = inputs[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, (self._input,), run_check=False)
            return (x.redistribute(placements=(Replicate(),)), *inputs[1:])

        def finish(part: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, partition, prepare, finish)


class BlockRowwiseParallel(ParallelStyle):
    """``RowwiseParallel`` for ``nn.Linear`` whose input features are in blocks: takes what
    :class:`BlockColwiseParallel` gives.

    Args:
        block_size: As that of the layers before, in features of this layer's input.
        output_layouts: Placement of the output, ``Replicate()`` by default. The output is local.

    Raises:
        TypeError, ValueError: As for :class:`BlockColwiseParallel`.
    """

    def __init__(self, block_size: int, *, output_layouts: Placement | None = None) -> None:
        super().__init__()
        check_size(type(self).__name__, "block_size", block_size)
        self.block_size = block_size
        self._output = output_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _checked(self, module, device_mesh, "in_features", self.block_size)

        def partition(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            _distribute(linear, "weight", mesh, GTPShard(1, block_size=self.block_size))
            _distribute(linear, "bias", mesh, Replicate())

        def prepare(part: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            x = inputs[0]
            if not isinstance(x, DTensor):
                shape = torch.Size((*x.shape[:-1], linear.in_features))
                cut = GTPShard(x.ndim - 1, block_size=self.block_size)
                stride = torch.empty(shape, device="meta").stride()
                x = DTensor.from_local(x.contiguous(), mesh, (cut,), run_check=False, shape=shape, stride=stride)
            return (x, *inputs[1:])

        def finish(part: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.redistribute(placements=(self._output,)).to_local()

        return distribute_module(module, device_mesh, partition, prepare, finish)


def _checked(style: ParallelStyle, module: nn.Module, mesh: DeviceMesh, name: str, block_size: int) -> nn.Linear:
    caller = type(style).__name__
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{caller} expects an nn.Linear, but got {type(module).__name__}. Use another style for it.")
    features: int = getattr(module, name)
    if features % block_size or features // block_size < mesh.size():
        raise ValueError(
            f"{caller} expects blocks of {block_size} that fill {name}={features} and are at least as many as the "
            f"{mesh.size()} ranks of tp, but they are {features / block_size:g}: no cut fits. Use a smaller tp or "
            "another block_size."
        )
    return module


def _distribute(linear: nn.Linear, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    param = getattr(linear, name)
    if param is not None:
        # By its module: there it is one that knows blocks.
        sharded = dtensor.distribute_tensor(param, mesh, [placement])
        linear.register_parameter(name, nn.Parameter(sharded, requires_grad=param.requires_grad))
