"""The GEMMs of a grouped layer in float8 with a scale for each row: several weights, rows sorted by weight.

As :class:`RowwiseGEMMs` for one weight, product by product with the same operands: forward is ``x[g] @ w[g].T``, dgrad
``(grad[g] * scale[g]) @ q[g]``. wgrad is not quantized: its contraction runs over the tokens of a group, whose number
only the device knows, so a transpose could not be filled up to what the kernel wants. On hardware by
``torch.nn.functional.scaled_grouped_mm``, which torch has for rows of e4m3 on Hopper; elsewhere by the reference
arithmetic in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from .base import Quantized
from .casts import casts_for
from .float8_gemms import RowwiseGEMMs
from .gemm import Granularity, Operand


class GroupedRowwiseGEMMs(RowwiseGEMMs):
    """Rowwise GEMMs of each group's rows with the group's weight."""

    def grouped_output(
        self, x_TK: torch.Tensor, weight: Quantized, ends_G: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Shape ``(num_rows, N)``; rows beyond the last group are not defined.

        Args:
            weight: Planes of shape ``(num_groups, N, K)`` and ``(num_groups, N, 1)``.
            ends_G: Where each group ends, int32.
        """
        data, scale = weight.planes
        left = casts_for(x_TK).cast_rows(x_TK)
        return self._grouped(left, data, scale.squeeze(-1), ends_G, dtype, use_fast_accum=True)

    def grouped_grad_input(
        self, grad_TN: torch.Tensor, weight: Quantized, ends_G: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Shape ``(num_rows, K)``; rows beyond the last group are not defined."""
        data, scale = weight.planes
        rows = torch.arange(grad_TN.shape[0], device=grad_TN.device, dtype=ends_G.dtype)
        group_T = torch.searchsorted(ends_G, rows, right=True).clamp_(max=data.shape[0] - 1)
        left = casts_for(grad_TN).cast_rows(grad_TN, factor=scale.squeeze(-1), group=group_T)
        ones_GK = torch.ones((data.shape[0], data.shape[2]), dtype=torch.float32, device=data.device)
        return self._grouped(left, data.mT, ones_GK, ends_G, dtype)

    def _grouped(
        self,
        operand: tuple[torch.Tensor, torch.Tensor],
        data_GRC: torch.Tensor,
        scale_GR: torch.Tensor,
        ends_G: torch.Tensor,
        dtype: torch.dtype,
        use_fast_accum: bool = False,
    ) -> torch.Tensor:
        """Rows of the quantized operand times the transpose of each group's matrix."""
        left, left_scale = operand
        if self.on_hardware:
            result: torch.Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
                left,
                casts_for(data_GRC).row_major(data_GRC).mT,
                left_scale.view(-1),
                ScalingType.RowWise,
                scale_GR.contiguous(),
                ScalingType.RowWise,
                offs=ends_G,
                output_dtype=dtype,
                use_fast_accum=use_fast_accum,
            )
            return result
        output = left_scale.new_zeros(left.shape[0], data_GRC.shape[1], dtype=dtype)
        begin = 0
        for group, end in enumerate(ends_G.tolist()):
            right = Operand(data_GRC[group], scale_GR[group].unsqueeze(-1), Granularity.ROW)
            rows = Operand(left[begin:end], left_scale[begin:end], Granularity.ROW)
            output[begin:end] = rows.dequantize().mm(right.dequantize().t()).to(dtype)
            begin = end
        return output


__all__ = ["GroupedRowwiseGEMMs"]
