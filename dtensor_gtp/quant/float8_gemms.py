"""The three GEMMs of a linear layer in float8, one class for each granularity, and the product they
are made of.

Forward is ``x @ w.T``, dgrad ``g @ w``, wgrad ``g.T @ x``. The weight comes as it was gathered.
Activations and gradients are quantized here by their own magnitudes (*dynamic* scaling). Compiled
code traces a cast and hands its list of tensors to the opaque op that gathers the weight and
multiplies. As in torchao and Transformer Engine, only forward sums in the tensor cores' own
precision (``use_fast_accum``): in sums of gradients more terms cancel.

Sources: ``torch.nn.functional.scaled_mm`` (2.11 to 2.15); cuBLAS 12.9 documentation, "1D and 2D
block scaling for FP8 data types", for the layout of block scales.
"""

from __future__ import annotations

import enum
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from . import cast
from .casts import casts_for
from .planes import Quantized

ALIGNMENT = 16  # of rows and columns of an operand on hardware
BLOCK = 128


class Granularity(enum.Enum):
    """Which elements of an operand share a scale, by the name in torch's ``ScalingType``."""

    TENSOR = "TensorWise"  # all: scale of shape (1, 1)
    ROW = "RowWise"  # a row: (rows, 1)
    ROW_BLOCK = "BlockWise1x128"  # 128 elements of a row: (rows, blocks)
    SQUARE_BLOCK = "BlockWise128x128"  # (blocks of rows, blocks)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block; 1 where the shape of the scale broadcasts."""
        if self is Granularity.ROW_BLOCK:
            return (1, BLOCK)
        if self is Granularity.SQUARE_BLOCK:
            return (BLOCK, BLOCK)
        return (1, 1)


class Operand(NamedTuple):
    """A quantized matrix; a value is ``data * scale``."""

    data: Tensor  # shape (rows, contraction), float8_e4m3fn or float8_e5m2
    scale: Tensor  # float32
    granularity: Granularity

    def dequantize(self) -> Tensor:
        """The values in float32."""
        scale = cast.spread(self.scale, self.granularity.block, self.data.shape)
        return self.data.to(torch.float32) * scale


def product(
    left: Operand, right: Operand, dtype: torch.dtype, *, on_hardware: bool, use_fast_accum: bool = False
) -> Tensor:
    """``left @ right.T`` of shapes ``(M, K)`` and ``(N, K)``: sums in float32, rounded to
    ``dtype``. The hardware multiplies float8, with N and K multiples of 16; else dequantized values
    are multiplied in float32.
    ``use_fast_accum``: on Hopper, sum in the tensor cores' own precision; ignored with scales of
    blocks."""
    rows = left.data.shape[0]
    if not on_hardware:
        return left.dequantize().mm(right.dequantize().t()).to(dtype)
    if rows == 0 or left.data.shape[1] == 0:
        return left.data.new_zeros((rows, right.data.shape[0]), dtype=dtype)
    is_blockwise = left.granularity is Granularity.ROW_BLOCK
    missing = 0
    left_scale = left.scale
    if is_blockwise:
        # The kernel wants the columns of block scales aligned.
        missing = -rows % ALIGNMENT
        if missing:
            scale = _pad_rows(left.scale, missing)
            left = left._replace(data=_pad_rows(left.data, missing), scale=scale)
        left_scale = left.scale.t().contiguous().t()
    result = scaled_mm(
        casts_for(left.data).row_major(left.data), casts_for(right.data).row_major(right.data).t(),
        left_scale, ScalingType.__members__[left.granularity.value],
        _right_scale(right), ScalingType.__members__[right.granularity.value],
        output_dtype=dtype, use_fast_accum=use_fast_accum and not is_blockwise,
    )  # fmt: skip
    if missing:
        result = result[:rows]
    return result


def _pad_rows(matrix: Tensor, missing: int) -> Tensor:
    """Zeros below: in bytes, because padding is not defined for every float8."""
    dtype = matrix.dtype
    if dtype.itemsize == 1:
        matrix = matrix.view(torch.uint8)
    return F.pad(matrix, (0, 0, 0, missing)).view(dtype)


def _right_scale(operand: Operand) -> Tensor:
    scale = operand.scale
    if operand.granularity is Granularity.ROW:
        return scale.reshape(1, -1)
    if operand.granularity is Granularity.ROW_BLOCK:
        return scale.t().contiguous().t()
    if operand.granularity is Granularity.SQUARE_BLOCK:
        # Rows of four scales, along the contraction.
        return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t()
    return scale


# A quantized matrix as a flat list: elements, scale. Or a matrix as it is, which is quantized later.
Tensors = list[Tensor]


@dataclass(frozen=True)
class Float8GEMMs(ABC):
    """How a linear layer multiplies."""

    high_precision_wgrad: bool  # from activations and gradients that are not quantized
    on_hardware: bool  # by float8 GEMMs; else by the reference arithmetic, in float32

    granularity: ClassVar[Granularity]  # of activations and gradients
    weight_granularity: ClassVar[Granularity]
    # That hardware gives.
    wgrad_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float32)

    @property
    def name(self) -> str:
        """The argument of :func:`gemms_of_name` for these GEMMs."""
        return f"{type(self).__name__}({self.high_precision_wgrad}, {self.on_hardware})"

    @abstractmethod
    def cast_input(self, input_MK: Tensor) -> Tensors:
        """What forward needs of its input, and then what saves wgrad work (``for_later``)."""

    def output(self, input: Tensors, weight: Quantized, dtype: torch.dtype) -> Tensor:
        """``x @ w.T``, shape ``(M, N)``."""
        left = Operand(input[0], input[1], self.granularity)
        right = Operand(weight.planes[0], weight.planes[1], self.weight_granularity)
        return product(left, right, dtype, on_hardware=self.on_hardware, use_fast_accum=True)

    def cast_grad(self, grad_MN: Tensor) -> Tensors:
        """What dgrad needs of the output's gradient."""
        return self.cast_input(grad_MN)

    @abstractmethod
    def grad_input(self, grad: Tensors, weight: Quantized, dtype: torch.dtype) -> Tensor:
        """``g @ w``, shape ``(M, K)``."""

    def for_later(self, input: Tensors) -> Tensors:
        """Of what :meth:`cast_input` has made, the ``known`` of :meth:`cast_wgrad`; save it beside the
        input."""
        if self.high_precision_wgrad:
            return []
        return input[2:]

    @abstractmethod
    def cast_wgrad(self, grad_MN: Tensor, input_MK: Tensor, grad: Tensors, known: Sequence[Tensor] = ()) -> Tensors:
        """What wgrad needs of both, without ``high_precision_wgrad``: transposes, whose columns
        (tokens) are the contraction and filled up with zeros. ``grad`` is what :meth:`cast_grad`
        has made, ``known`` is nothing or :meth:`for_later`."""

    def grad_weight(self, operands: Tensors, dtype: torch.dtype) -> Tensor:
        """``g.T @ x`` of what :meth:`cast_wgrad` has made, shape ``(N, K)``."""
        grad, grad_scale, input, input_scale = operands
        left = Operand(grad, grad_scale, self.granularity)
        right = Operand(input, input_scale, self.granularity)
        out_dtype = dtype
        if self.on_hardware and dtype not in self.wgrad_dtypes:
            out_dtype = torch.bfloat16  # and then cast, once
        return product(left, right, out_dtype, on_hardware=self.on_hardware).to(dtype)


class TensorwiseGEMMs(Float8GEMMs):
    """One scale for each matrix. Gradients are e5m2 (Micikevicius et al., "FP8 Formats for Deep
    Learning", arXiv 2209.05433), everything else e4m3. Transposes are transposes of the same
    bytes."""

    granularity = weight_granularity = Granularity.TENSOR

    def cast_input(self, input_MK: Tensor) -> Tensors:
        casts = casts_for(input_MK)
        magnitudes = casts.magnitudes(input_MK)
        return [*casts.cast_matrix(input_MK, amax=magnitudes), magnitudes]

    def output(self, input: Tensors, weight: Quantized, dtype: torch.dtype) -> Tensor:
        left = Operand(input[0], input[1], Granularity.TENSOR)
        right = self._operand(weight, weight.planes[0])
        return product(left, right, dtype, on_hardware=self.on_hardware, use_fast_accum=True)

    def cast_grad(self, grad_MN: Tensor) -> Tensors:
        return [*casts_for(grad_MN).cast_matrix(grad_MN, torch.float8_e5m2)]

    def grad_input(self, grad: Tensors, weight: Quantized, dtype: torch.dtype) -> Tensor:
        left = Operand(grad[0], grad[1], Granularity.TENSOR)
        right = self._operand(weight, weight.planes[0].t())
        return product(left, right, dtype, on_hardware=self.on_hardware)

    def cast_wgrad(self, grad_MN: Tensor, input_MK: Tensor, grad: Tensors, known: Sequence[Tensor] = ()) -> Tensors:
        turned = casts_for(grad[0]).turned(grad[0], ALIGNMENT)
        # The input's magnitudes are those of forward.
        return [turned, grad[1], *casts_for(input_MK).cast_matrix_turned(input_MK, ALIGNMENT, *known)]

    @staticmethod
    def _operand(weight: Quantized, data: Tensor) -> Operand:
        assert weight.amax is not None
        return Operand(data, casts_for(weight.amax).e4m3_scale(weight.amax), Granularity.TENSOR)


class RowwiseGEMMs(Float8GEMMs):
    """One scale for each row of each operand. In dgrad the weight's scales lie along the
    contraction, where no scale can be. So the gradient is multiplied by them and quantized after
    the gather: ``g @ (s * q) = (g * s) @ q``."""

    granularity = weight_granularity = Granularity.ROW
    wgrad_dtypes = (torch.bfloat16,)  # some devices' kernels give no other

    def cast_input(self, input_MK: Tensor) -> Tensors:
        return [*casts_for(input_MK).cast_rows(input_MK)]

    def cast_grad(self, grad_MN: Tensor) -> Tensors:
        return [grad_MN]

    def grad_input(self, grad: Tensors, weight: Quantized, dtype: torch.dtype) -> Tensor:
        data, scale = weight.planes
        quantized, grad_scale = casts_for(grad[0]).cast_rows(grad[0], factor=scale.reshape(-1))
        left = Operand(quantized, grad_scale, Granularity.ROW)
        # The weight's own scales are in the gradient now.
        ones = torch.ones((data.shape[1], 1), dtype=torch.float32, device=data.device)
        right = Operand(data.t(), ones, Granularity.ROW)
        return product(left, right, dtype, on_hardware=self.on_hardware)

    def cast_wgrad(self, grad_MN: Tensor, input_MK: Tensor, grad: Tensors, known: Sequence[Tensor] = ()) -> Tensors:
        # Other scales than those of forward and dgrad: along the tokens.
        tensors: Tensors = []
        for matrix in (grad_MN, input_MK):
            tensors += self.cast_input(casts_for(matrix).turned(matrix, ALIGNMENT))
        return tensors


class BlockwiseGEMMs(Float8GEMMs):
    """Weights in blocks of 128 x 128, activations and gradients in blocks of 128 along the
    contraction, all e4m3 (DeepSeek-V3, arXiv 2412.19437, section 3.3)."""

    granularity = Granularity.ROW_BLOCK  # of activations and gradients
    weight_granularity = Granularity.SQUARE_BLOCK

    def cast_input(self, input_MK: Tensor) -> Tensors:
        return [*casts_for(input_MK).cast_blocks(input_MK, Granularity.ROW_BLOCK.block)]

    def grad_input(self, grad: Tensors, weight: Quantized, dtype: torch.dtype) -> Tensor:
        data, scale = weight.planes
        left = Operand(grad[0], grad[1], Granularity.ROW_BLOCK)
        right = Operand(data.t(), scale.t(), Granularity.SQUARE_BLOCK)
        return product(left, right, dtype, on_hardware=self.on_hardware)

    def cast_wgrad(self, grad_MN: Tensor, input_MK: Tensor, grad: Tensors, known: Sequence[Tensor] = ()) -> Tensors:
        block = Granularity.ROW_BLOCK.block
        tensors: Tensors = []
        for matrix in (grad_MN, input_MK):
            tensors += casts_for(matrix).cast_blocks_turned(matrix, block, ALIGNMENT)
        return tensors


_CLASSES = (TensorwiseGEMMs, RowwiseGEMMs, BlockwiseGEMMs)
_ALL = tuple(cls(*flags) for cls in _CLASSES for flags in itertools.product((False, True), repeat=2))


def gemms_of_name(name: str) -> Float8GEMMs:
    """The GEMMs of that name: an op of compiled code takes no objects."""
    return next(gemms for gemms in _ALL if gemms.name == name)
