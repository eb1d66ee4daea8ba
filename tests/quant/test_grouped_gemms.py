"""Grouped float8 GEMMs: one by one they are the rowwise GEMMs of a linear layer, and the kernel gets what it wants."""

import re
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.testing._internal.common_quantized import to_blocked

from dtensor_gtp import quantize_
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.quant import MXFP8, NVFP4, Float8Blockwise, Float8Rowwise, Float8Tensorwise
from dtensor_gtp.quant.compute import choose_path
from dtensor_gtp.quant.grouped_gemms import GroupedMXGEMMs, GroupedRowwiseGEMMs, in_tiles
from dtensor_gtp.quant.planes import Direction, Quantized

GROUPS, N, K = 3, 32, 48


def operands(splits: list[int]) -> tuple[torch.Tensor, torch.Tensor, Quantized, torch.Tensor]:
    """Rows, gradients, the weight, ends of groups; rows of the weight have magnitudes of their own."""
    torch.manual_seed(0)
    weight = torch.randn(GROUPS, N, K) * torch.exp2(-(torch.arange(N) % 4.0))[:, None]
    quantized = Float8Rowwise().quantize(weight, Direction.ROWWISE)
    ends = torch.tensor(splits).cumsum(0, dtype=torch.int32)
    return torch.randn(16, K).bfloat16(), torch.randn(16, N).bfloat16(), quantized, ends


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


MX_N, MX_K = 160, 96  # scales fill no tile


def mx_operands(splits: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[Quantized], torch.Tensor]:
    """Rows, gradients, the data of the weight for forward and dgrad, ends of groups."""
    torch.manual_seed(0)
    weight = torch.randn(GROUPS, MX_N, MX_K) * torch.exp2(-(torch.arange(MX_N) % 5.0))[:, None]
    both = [MXFP8().quantize(weight, direction) for direction in Direction]
    rows = sum(splits) + 2
    return torch.randn(rows, MX_K), torch.randn(rows, MX_N), both, torch.tensor(splits).cumsum(0, dtype=torch.int32)


def mx_values(rows: torch.Tensor, rounding: str) -> torch.Tensor:
    """What a matrix is after a cast with a scale for 32 elements of a row."""
    recipe = MXFP8(scale_rounding=rounding)
    quantized = recipe.quantize(rows, Direction.ROWWISE)
    return recipe.dequantize(quantized, rows.shape, Direction.ROWWISE, torch.float32)


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_mxfp8_multiplies_what_its_casts_make(rounding: str) -> None:
    """Scales lie along the contraction of either product, so dgrad has other data of the weight than forward; wgrad is
    that of the values that were not quantized."""
    torch.manual_seed(0)
    recipe, splits = MXFP8(scale_rounding=rounding, compute="float8"), [5, 0, 9]
    layer = GroupedLinear(GROUPS, MX_K, MX_N, bias=False)
    with torch.no_grad():
        layer.weight.mul_(torch.exp2(-(torch.arange(MX_N) % 5.0))[:, None])
    quantize_(layer, recipe)
    x, grad, masters = torch.randn(16, MX_K, requires_grad=True), torch.randn(16, MX_N), layer.weight.detach().dense()
    output = layer(x, torch.tensor(splits))
    output.backward(grad)
    forward, backward = (
        recipe.dequantize(recipe.quantize(masters, direction), masters.shape, direction, torch.float32)
        for direction in Direction
    )
    assert not torch.equal(forward, backward)
    assert not output[14:].any()
    assert not x.grad[14:].any()
    begin = 0
    for group, count in enumerate(splits):
        rows = slice(begin, begin + count)
        begin += count
        torch.testing.assert_close(output[rows], mx_values(x.detach(), rounding)[rows] @ forward[group].t())
        torch.testing.assert_close(x.grad[rows], mx_values(grad, rounding)[rows] @ backward[group])
        torch.testing.assert_close(layer.weight.grad[group], grad[rows].t() @ x.detach()[rows])


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (200, 9), (256, 12)], ids=str)
def test_scales_lie_as_torch_has_them(shape: tuple[int, int]) -> None:
    codes = torch.randint(0, 255, (2, *shape), dtype=torch.uint8)
    tiles = in_tiles(codes.view(torch.float8_e8m0fnu)).view(torch.uint8)
    for ours, matrix in zip(tiles, codes, strict=True):
        assert torch.equal(ours, to_blocked(matrix).flatten())


@pytest.mark.parametrize("splits", [[5, 0, 131], [128, 128, 128], [0, 0, 0]], ids=str)
def test_the_kernel_gets_groups_of_whole_tiles(monkeypatch: pytest.MonkeyPatch, splits: list[int]) -> None:
    """A stand-in takes what torch's checks of shapes and its tests say of the kernel, and looks up scales by cuBLAS's
    formula. All groups together are the reference arithmetic, forward and dgrad."""
    x, grad, (forward, backward), ends = mx_operands(splits)

    def scales(flat: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
        r, c = torch.arange(rows)[:, None], torch.arange(blocks)[None]
        tile = r // 128 * -(-blocks // 4) + c // 4
        codes = flat.view(torch.uint8)[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]
        return torch.exp2(codes.float() - 127).repeat_interleave(32, 1)

    def kernel(a: Any, b: Any, scale_a: Any, kind_a: Any, scale_b: Any, kind_b: Any, **options: Any) -> torch.Tensor:
        (rows, contraction), columns, blocks = a.shape, b.shape[2], a.shape[1] // 32
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu
        assert (a.stride(), b.stride()[1:]) == ((contraction, 1), (1, contraction))
        assert scale_a.shape == (rows, -(-blocks // 4) * 4)
        assert scale_b.shape == (GROUPS, -(-blocks // 4) * 4 * (-(-columns // 128) * 128))
        assert (kind_a.name, kind_b.name) == ("BlockWise1x32", "BlockWise1x32")
        assert {options["swizzle_a"].name, options["swizzle_b"].name} == {"SWIZZLE_32_4_4"}
        assert options["offs"].dtype == torch.int32
        flat, output, begin = scale_a.flatten(), torch.full((rows, columns), float("nan")), 0
        for group, end in enumerate(options["offs"].tolist()):
            assert begin % 128 == 0  # where the kernel looks for the group's scales
            part = flat[begin * scale_a.shape[1] :]
            left = a[begin:end].float() * scales(part, end - begin, blocks)
            right = b[group].t().float() * scales(scale_b[group], columns, blocks)
            output[begin:end] = left @ right.t()
            begin = end
        return output.to(options["output_dtype"])

    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", kernel)
    hardware, reference = (GroupedMXGEMMs(True, on_hardware) for on_hardware in (True, False))
    for method, rows, data in (("grouped_output", x, forward), ("grouped_grad_input", grad, backward)):
        got, want = (getattr(g, method)(rows, data, ends, torch.bfloat16)[: sum(splits)] for g in (hardware, reference))
        torch.testing.assert_close(got, want)


CPU, HOPPER, BLACKWELL = (0, 0), (9, 0), (10, 0)


def choose(
    recipe: Any, capability: tuple[int, int], shape: tuple[int, ...] = (GROUPS, 64, 96), is_native: bool = False
) -> Any:
    device = torch.device("cpu" if capability is CPU else "cuda")
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        return choose_path(recipe, device, torch.Size(shape), torch.bfloat16, "experts.weight", is_native=is_native)


def test_which_way_is_chosen_and_said() -> None:
    """mxfp8 only for who asks for it, on the GPUs that have it, in whole blocks, and not of native storage."""
    rowwise, asked, native = Float8Rowwise(compute="float8"), MXFP8(compute="float8"), {"is_native": True}
    no_data = "native storage has no data for the backward of mxfp8"
    for recipe, capability, options, expected in (
        (rowwise, CPU, {}, "float8 GEMMs by reference arithmetic (no float8 GEMMs on cpu), wgrad"),
        (asked, CPU, {}, "float8 GEMMs by reference arithmetic"),
        (asked, BLACKWELL, {}, "float8 GEMMs, wgrad not quantized"),
        (Float8Rowwise(), CPU, {}, "no float8 GEMMs on cpu"),
        (Float8Rowwise(compute="dequantize"), CPU, {}, "asked for"),
        (MXFP8(), CPU, {}, "no float8 GEMMs on cpu"),
        (MXFP8(), HOPPER, {}, "grouped GEMMs of mxfp8 need Blackwell"),
        (MXFP8(), BLACKWELL, {}, "never ran on a GPU; compute='float8' takes them"),
        (asked, HOPPER, {}, "grouped GEMMs of mxfp8 need Blackwell"),
        (asked, BLACKWELL, {"shape": (GROUPS, 48, 96)}, "not in multiples of 32; (64, 96) would fit"),
        *((asked, capability, native, no_data) for capability in (CPU, BLACKWELL)),
        *((NVFP4(), capability, {}, "no GEMMs of nvfp4") for capability in (CPU, HOPPER)),
        *((Float8Blockwise(), capability, {}, "no grouped GEMMs of float8_blockwise") for capability in (CPU, HOPPER)),
        (Float8Tensorwise(), HOPPER, {}, "no grouped GEMMs of float8_tensorwise"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = choose(recipe, capability, **options).describe()
        if expected.startswith("float8"):
            assert said.startswith(expected)
        else:
            assert said.startswith("dequantized for the GEMM (")
            assert said.endswith(f"{expected})")
    with pytest.raises(ValueError, match=r"asks for float8 GEMMs, but: mxfp8 has GEMMs for GroupedLinear alone"):
        choose(asked, CPU, (64, 96))


def test_what_is_asked_for_and_not_there_is_said_once() -> None:
    """Without a grouped GEMM of the recipe, or for shapes that it does not take."""
    for recipe, capability, shape, reason in (
        (Float8Tensorwise(compute="float8"), CPU, (GROUPS, N, K), "no grouped GEMMs of float8_tensorwise"),
        (Float8Rowwise(compute="float8"), HOPPER, (GROUPS, N, 30), r"a shape of \(32, 30\) is not in multiples of 16"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                assert choose(recipe, capability, shape).gemms is None
                choose(replace(recipe, compute="auto"), capability, shape)
        (said,) = caught
        assert re.search(f"asks for float8 GEMMs, but 'experts.weight' is dequantized: {reason}", str(said.message))


def test_native_storage_is_dequantized() -> None:
    """Outputs and gradients of a layer that does not ask for products in 8 bits."""
    x = torch.randn(16, MX_K)
    results = []
    for compute in ("float8", "dequantize"):
        torch.manual_seed(0)
        layer = quantize_(GroupedLinear(GROUPS, MX_K, MX_N, bias=False), MXFP8(compute=compute), storage="native")
        rows = x.clone().requires_grad_()
        output = layer(rows, torch.tensor([5, 0, 9]))
        output.square().sum().backward()
        results.append((output, rows.grad))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
