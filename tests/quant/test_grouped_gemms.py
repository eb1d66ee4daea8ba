"""Grouped float8 GEMMs: one by one they are the rowwise GEMMs of a linear layer, and the kernel gets what it wants."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn

from dtensor_gtp import quantize_
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.quant import MXFP8, NVFP4, Float8Blockwise, Float8Rowwise, Float8Tensorwise
from dtensor_gtp.quant.compute import choose_path
from dtensor_gtp.quant.float8_gemms import GroupedRowwiseGEMMs
from dtensor_gtp.quant.planes import Direction, Quantized

GROUPS, N, K = 3, 32, 48


def operands(splits: list[int]) -> tuple[torch.Tensor, torch.Tensor, Quantized, torch.Tensor]:
    """Rows, gradients, the weight, ends of groups; rows of the weight have magnitudes of their own."""
    torch.manual_seed(0)
    weight = torch.randn(GROUPS, N, K) * torch.exp2(-(torch.arange(N) % 4.0))[:, None]
    quantized = Float8Rowwise().quantize(weight, Direction.ROWWISE)
    ends = torch.tensor(splits).cumsum(0, dtype=torch.int32)
    return torch.randn(16, K).bfloat16(), torch.randn(16, N).bfloat16(), quantized, ends


@pytest.mark.parametrize("splits", [[5, 0, 11], [0, 0, 0], [1, 2, 3]], ids=str)
def test_each_group_is_multiplied_as_a_linear_layer(splits: list[int]) -> None:
    x, grad, weight, ends = operands(splits)
    grouped, single = GroupedRowwiseGEMMs(True, False), Float8Rowwise().gemms(on_hardware=False)
    output = grouped.grouped_output(x, weight, ends, torch.bfloat16)
    dgrad = grouped.grouped_grad_input(grad, weight, ends, torch.bfloat16)
    begin = 0
    for group, count in enumerate(splits):
        rows = slice(begin, begin + count)
        begin += count
        of_group = Quantized(tuple(plane[group] for plane in weight.planes), None)
        assert torch.equal(output[rows], single.output(single.cast_input(x[rows]), of_group, torch.bfloat16))
        assert torch.equal(dgrad[rows], single.grad_input(single.cast_grad(grad[rows]), of_group, torch.bfloat16))


def test_a_quantized_layer_is_its_groups_one_by_one() -> None:
    """Without sharding: outputs and gradients of linear layers with the same recipe, each on the rows of its group."""
    torch.manual_seed(0)
    recipe, splits = Float8Rowwise(compute="float8"), [5, 0, 9]
    layer = GroupedLinear(GROUPS, K, N, bias=False)
    linears = nn.ModuleList(nn.Linear(K, N, bias=False) for _ in range(GROUPS))
    for linear, weight in zip(linears, layer.weight.detach(), strict=True):
        linear.load_state_dict({"weight": weight})
    quantize_(layer, recipe)
    quantize_(linears, recipe)
    x, alone = (torch.randn(16, K, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    output = layer(x, torch.tensor(splits))
    parts = [linear(rows) for linear, rows in zip(linears, alone.split([*splits, 2])[:-1], strict=True)]
    expected = torch.cat([*parts, torch.zeros(2, N)])
    assert torch.equal(output, expected)
    for result in (output, expected):
        result.square().sum().backward()
    assert torch.equal(x.grad, alone.grad)
    for group, linear in enumerate(linears):
        want = torch.zeros(N, K) if linear.weight.grad is None else linear.weight.grad
        torch.testing.assert_close(layer.weight.grad[group], want)


def test_the_kernel_gets_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """``scaled_grouped_mm`` takes a row-major and column-major matrices and a scale for each row of either."""
    x, grad, weight, ends = operands([5, 0, 11])
    calls: list[str] = []

    def kernel(a: Any, b: Any, scale_a: Any, kind_a: Any, scale_b: Any, kind_b: Any, **options: Any) -> torch.Tensor:
        rows, contraction = a.shape
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert a.stride() == (contraction, 1)
        assert b.stride()[1:] == (1, contraction)
        assert b.shape[:2] == (GROUPS, contraction)
        assert (scale_a.shape, scale_b.shape) == ((rows,), (GROUPS, b.shape[2]))
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert (kind_a.name, kind_b.name) == ("RowWise", "RowWise")
        calls.append(f"fast accumulation: {options['use_fast_accum']}")
        output, begin = torch.zeros(rows, b.shape[2]), 0
        for group, end in enumerate(options["offs"].tolist()):
            left = a[begin:end].float() * scale_a[begin:end, None]
            output[begin:end] = left @ (b[group].float() * scale_b[group])
            begin = end
        return output.to(options["output_dtype"])

    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", kernel)
    hardware, reference = (GroupedRowwiseGEMMs(True, on_hardware) for on_hardware in (True, False))
    for method, rows in (("grouped_output", x), ("grouped_grad_input", grad)):
        got, want = (getattr(g, method)(rows, weight, ends, torch.bfloat16) for g in (hardware, reference))
        torch.testing.assert_close(got, want)
    assert calls == ["fast accumulation: True", "fast accumulation: False"]


def test_which_way_is_chosen_and_said() -> None:
    shape, cpu = torch.Size((GROUPS, N, K)), torch.device("cpu")
    paths = {
        compute: choose_path(Float8Rowwise(compute=compute), cpu, shape, torch.bfloat16, "experts.weight").describe()
        for compute in ("auto", "dequantize", "float8")
    }
    assert paths == {
        "auto": "dequantized for the GEMM (no float8 GEMMs on cpu)",
        "dequantize": "dequantized for the GEMM (asked for)",
        "float8": "float8 GEMMs by reference arithmetic (no float8 GEMMs on cpu), wgrad not quantized",
    }
    for device in (cpu, torch.device("cuda")):
        reasons = [
            choose_path(recipe, device, shape, torch.bfloat16, "experts.weight").describe()
            for recipe in (MXFP8(), NVFP4(), Float8Blockwise(), Float8Tensorwise())
        ]
        assert reasons == [
            "dequantized for the GEMM (no GEMMs of mxfp8)",
            "dequantized for the GEMM (no GEMMs of nvfp4)",
            "dequantized for the GEMM (no grouped GEMMs of float8_blockwise)",
            "dequantized for the GEMM (no grouped GEMMs of float8_tensorwise)",
        ]


def test_what_is_asked_for_and_not_there_is_said_once() -> None:
    """Without a grouped GEMM of the recipe, or for shapes that it does not take."""
    hopper, cpu = torch.device("cuda"), torch.device("cpu")
    cases = (
        (Float8Tensorwise(compute="float8"), cpu, (GROUPS, N, K), "no grouped GEMMs of float8_tensorwise"),
        (Float8Rowwise(compute="float8"), hopper, (GROUPS, N, 30), r"a shape of \(32, 30\) is not in multiples of 16"),
    )
    for recipe, device, shape, reason in cases:
        with (
            mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("default")
            for _ in range(2):
                path = choose_path(recipe, device, torch.Size(shape), torch.bfloat16, "experts.weight")
                choose_path(replace(recipe, compute="auto"), device, torch.Size(shape), torch.bfloat16, "other.weight")
        assert path.gemms is None
        assert len(caught) == 1
        assert re.search(
            f"asks for float8 GEMMs, but 'experts.weight' is dequantized: {reason}", str(caught[0].message)
        )
