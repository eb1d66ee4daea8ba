"""``GroupedLinear`` in one process, against a loop over the groups in float64."""

import copy
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from checkpoint_common import local
from common import ALL, fake_mesh
from torch.distributed.tensor import DTensor

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp import gtp_shard
from dtensor_gtp.nn import GroupedLinear, convert_grouped_state_dict
from dtensor_gtp.ops.grouped import grouped_mm, grouped_wgrad

SPLITS = ([4, 3, 5, 0], [0, 0, 0, 12], [1, 0, 2, 3], [0, 0, 0, 0], [3, 3, 3, 3])


def make(dtype: torch.dtype = torch.float64, **options: Any) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(4, 8, 16, dtype=dtype, **options)


def loop(layer: GroupedLinear, x: torch.Tensor, splits: list[int], scales: torch.Tensor | None) -> torch.Tensor:
    """The definition: each group's rows through its own weight, then the tail of zeros."""
    outputs, begin = [], 0
    for group, count in enumerate(splits):
        rows = slice(begin, begin + count)
        begin += count
        single = layer.single_grouped_weight
        weight = layer.weight[group] if single else layer.get_parameter(f"weight{group}")
        output = F.linear(x[rows], weight)
        if layer.has_bias:
            bias = layer.bias[group] if single else layer.get_parameter(f"bias{group}")
            output = output + (bias if scales is None else bias * scales[rows, None])
        outputs.append(output)
    return torch.cat([*outputs, x.new_zeros(x.shape[0] - begin, layer.out_features)])


def grads_of(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    seed = torch.randn(output.shape, dtype=torch.float64).to(output.dtype)
    return list(torch.autograd.grad(output, inputs, seed, retain_graph=True, materialize_grads=True))


def same_as_the_loop(layer: GroupedLinear, splits: list[int], has_scales: bool = False) -> None:
    """Of a layer in its dtype and a loop in float64. ``grouped_mm`` leaves the rows beyond the last group
    uninitialized: they must be zero, also as gradients."""
    dtype = next(layer.parameters()).dtype
    eps = max(8 * torch.finfo(dtype).eps, 1e-12)
    wide = copy.deepcopy(layer).double()
    x = torch.randn(12, layer.in_features).to(dtype).requires_grad_()
    scales = torch.rand(12).to(dtype).requires_grad_() if has_scales else None
    wide_x, wide_scales = (None if t is None else t.detach().double().requires_grad_() for t in (x, scales))
    expected = loop(wide, wide_x, splits, wide_scales)
    want = grads_of(expected, [wide_x, *wide.parameters(), *([wide_scales] if has_scales else [])])
    for index_dtype in (torch.int32, torch.int64):
        torch.full((12, layer.out_features), math.nan)  # what uninitialized memory may hold
        actual = layer(x, torch.tensor(splits, dtype=index_dtype), scales)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=eps)
        got = grads_of(actual, [x, *layer.parameters(), *([scales] if has_scales else [])])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_a_loop_over_the_groups(dtype: torch.dtype) -> None:
    for splits, single, kind in itertools.product(SPLITS, (True, False), ("plain", "bias", "scaled")):
        scaled = kind == "scaled"
        layer = make(dtype, bias=kind != "plain", scale_bias=scaled, single_grouped_weight=single)
        same_as_the_loop(layer, splits, scaled)


def test_sizes_that_the_kernel_does_not_take() -> None:
    """It wants rows of whole 16-byte units."""
    for in_features, out_features in ((6, 16), (8, 10), (5, 3), (1, 1)):
        for dtype in (torch.float32, torch.bfloat16):
            same_as_the_loop(GroupedLinear(3, in_features, out_features, dtype=dtype), [2, 0, 5])


def test_r32_what_backward_will_not_use_is_not_saved() -> None:
    layer, splits = make(bias=False), torch.tensor([4, 3, 5, 0])
    x = torch.randn(12, 8, dtype=torch.float64, requires_grad=True)
    for freeze_weight, freeze_input in ((True, False), (False, True), (False, False)):
        layer.requires_grad_(not freeze_weight)
        saved: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):  # noqa: B023
            layer(x.detach() if freeze_input else x, splits)
        assert (x.shape in saved) == (not freeze_weight), saved
        assert (layer.weight.shape in saved) == (not freeze_input), saved


def test_r32_nor_is_it_where_the_weight_is_sharded() -> None:
    """Of a sharded weight nothing is saved at all."""
    splits, x = torch.tensor([4, 3, 5, 0]), torch.randn(12, 8, requires_grad=True)
    for single, freeze_weight, freeze_input in itertools.product((True, False), repeat=3):
        with fake_mesh(1) as mesh:
            layer = gtp_shard(make(torch.float32, bias=False, single_grouped_weight=single), mesh, schedule=ALL)
            layer.requires_grad_(not freeze_weight)
            saved: list[torch.Size] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):  # noqa: B023
                output = layer(x.detach() if freeze_input else x, splits)
            of_groups = [] if freeze_weight and freeze_input else [splits.shape]
            assert saved == [x.shape] * (not freeze_weight) + of_groups
            assert output.requires_grad == bool(of_groups)


def test_r32_a_gradient_that_is_not_contiguous() -> None:
    layer, splits = make(torch.float32), torch.tensor([4, 3, 4, 0])
    x = torch.randn(12, 8, requires_grad=True)
    inputs = [x, *layer.parameters()]
    seed = torch.randn(16, 12).t()
    outputs = layer(x, splits), loop(layer, x, splits.tolist(), None)
    torch.testing.assert_close(*(torch.autograd.grad(output, inputs, seed) for output in outputs))


def test_r32_a_gradient_buffer_that_is_not_contiguous() -> None:
    """A ``.grad`` of the user's own strides is added to, sharded as it is unsharded: nobody needs it contiguous."""
    reference, x, splits = make(torch.float32), torch.randn(12, 8), torch.tensor([4, 3, 4, 0])
    loop(reference, x, splits.tolist(), None).square().sum().backward()
    with fake_mesh(1) as mesh:
        for layer in (make(torch.float32), gtp_shard(make(torch.float32), mesh, schedule=ALL)):
            strided = torch.ones(8, 4, 16).permute(1, 2, 0)
            assert not strided.is_contiguous()
            if isinstance(layer.weight, DTensor):
                strided = DTensor.from_local(strided, mesh, layer.weight.placements, run_check=False)
            layer.weight.grad = strided
            layer(x, splits).square().sum().backward()
            torch.testing.assert_close(local(layer.weight.grad) - 1, reference.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("single", [True, False])
def test_compiles_into_one_graph(single: bool) -> None:
    # The compiler's shape function of grouped_mm knows bfloat16 alone (torch 2.13).
    layer = make(torch.bfloat16, scale_bias=True, single_grouped_weight=single)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    x, scales = torch.randn(12, 8).bfloat16().requires_grad_(), torch.rand(12).bfloat16()
    for splits in SPLITS[:3]:
        outputs = [m(x, torch.tensor(splits), scales) for m in (layer, compiled)]
        assert torch.equal(*outputs)
        grads = [
            torch.autograd.grad(output.square().sum(), [x, *module.parameters()])
            for output, module in zip(outputs, (layer, compiled), strict=True)
        ]
        for eager, traced in zip(*grads, strict=True):
            assert torch.equal(eager, traced)


@pytest.mark.parametrize("single", [True, False])
def test_autocast_casts_as_for_linear_layers(single: bool) -> None:
    """Input, weight and bias, with gradients in their own dtypes; sharded and compiled, too. float64 stays."""
    counts = torch.tensor(SPLITS[0])
    with fake_mesh(1) as mesh:
        layer = make(torch.float32, single_grouped_weight=single)
        sharded = gtp_shard(copy.deepcopy(layer), mesh, schedule=ALL)
        compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
        for dtype, (module, name) in itertools.product(
            (torch.float32, torch.bfloat16), ((layer, "plain"), (sharded, "sharded"), (compiled, "compiled"))
        ):
            x = torch.randn(12, 8, dtype=dtype, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                expected = loop(layer, x, SPLITS[0], None)
                actual = module(x, counts)
            assert actual.dtype == torch.bfloat16, name
            torch.testing.assert_close(actual.float(), expected.float(), rtol=0.02, atol=0.02)
            want = torch.autograd.grad(expected.float().sum(), [x, *layer.parameters()])
            module.zero_grad()
            actual.float().sum().backward()
            got = [x.grad, *(local(param.grad) for param in module.parameters())]
            torch.testing.assert_close(got, list(want), rtol=0.02, atol=0.02)
        with torch.autocast("cpu", torch.bfloat16):
            assert make()(torch.ones(2, 8, dtype=torch.float64), torch.tensor([1, 0, 1, 0])).dtype == torch.float64


def test_initial_values_are_those_of_linear_layers() -> None:
    single = GroupedLinear(3, 64, 32)
    bound = 1 / 8
    for param in single.parameters():
        assert param.abs().max() <= bound
        assert param.detach().std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
    assert {name: tuple(p.shape) for name, p in single.named_parameters()} == {"weight": (3, 32, 64), "bias": (3, 32)}
    several = GroupedLinear(2, 4, 8, bias=False, single_grouped_weight=False)
    assert {name: tuple(p.shape) for name, p in several.named_parameters()} == {"weight0": (8, 4), "weight1": (8, 4)}
    assert GroupedLinear(1, 2, 3, bias=False).bias is None


@pytest.mark.parametrize("bias", [True, False])
def test_state_dicts_of_both_forms_hold_the_same_bytes(bias: bool) -> None:
    single, several = make(bias=bias), make(bias=bias, single_grouped_weight=False)
    model = nn.ModuleDict({"experts": single, "other": nn.Linear(2, 2)})
    split = convert_grouped_state_dict(model.state_dict(), "experts.", single_grouped_weight=False)
    nn.ModuleDict({"experts": several, "other": nn.Linear(2, 2)}).load_state_dict(split)
    back = convert_grouped_state_dict(several.state_dict(), single_grouped_weight=True)
    assert list(back) == list(single.state_dict())
    for name, value in single.state_dict().items():
        assert torch.equal(back[name], value)
    with pytest.raises(ValueError, match=r"expects weight0, weight1, \.\.\. under prefix 'experts.', but found none"):
        convert_grouped_state_dict(single.state_dict(), "experts.", single_grouped_weight=True)
    with pytest.raises(ValueError, match=r"expects weight under prefix 'other\.', but found none"):
        convert_grouped_state_dict(model.state_dict(), "other.", single_grouped_weight=False)  # of an nn.Linear
    lost = several.state_dict()
    del lost["weight1"]
    with pytest.raises(ValueError, match="all groups up to 'weight3', but 'weight1' is missing"):
        convert_grouped_state_dict(lost, single_grouped_weight=True)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, r"x of shape \(num_rows, 8\), but got \(12, 9\)", {"x": torch.zeros(12, 9)}),
        (ValueError, r"x of shape \(num_rows, 8\), but got \(2, 6, 8\)", {"x": torch.zeros(2, 6, 8)}),
        (TypeError, "int32 or int64 tensor, but got list", {"split_sizes": [1, 2, 3, 4]}),
        (TypeError, "int32 or int64 tensor, but got torch.float32", {"split_sizes": torch.ones(4)}),
        (ValueError, r"of shape \(4,\), a count for each group.*but got \(3,\)", {"split_sizes": torch.ones(3).int()}),
        (ValueError, "split_sizes on cpu, as x is, but got meta", {"split_sizes": torch.ones(4, device="meta").int()}),
        (ValueError, "at most the 12 rows", {"split_sizes": torch.tensor([4, 4, 4, 1])}),
        (ValueError, "none below 0", {"split_sizes": torch.tensor([4, -1, 4, 1])}),
        (ValueError, "scales with scale_bias=True and only then, but got none", {"scales": None}),
        (ValueError, r"scales of shape \(12,\), but got \(11,\)", {"scales": torch.ones(11)}),
    ],
)
def test_bad_input_is_refused(error: type[Exception], match: str, arguments: dict[str, Any]) -> None:
    layer = make(torch.float32, scale_bias=True)
    good = {"x": torch.zeros(12, 8), "split_sizes": torch.tensor([4, 3, 5, 0]), "scales": torch.ones(12)}
    layer(**good)
    with pytest.raises(error, match=match):
        layer(**{**good, **arguments})


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_groups >= 1, but got 0"):
        GroupedLinear(0, 2, 2)
    with pytest.raises(ValueError, match="bias=True with scale_bias=True"):
        GroupedLinear(2, 2, 2, bias=False, scale_bias=True)
    with pytest.raises(ValueError, match="only then, but got some"):
        make(torch.float32)(torch.zeros(12, 8), torch.tensor([4, 3, 5, 0]), torch.ones(12))


class OnGPU(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


def test_only_bfloat16_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """For others torch's product waits on the host, which no capture allows: forward and backward say what to do."""
    monkeypatch.setattr(compat, "is_stream_capturing", lambda: True)
    ends = torch.tensor([1, 3, 6, 6], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, weight, grad = (torch.ones(*size, dtype=dtype) for size in ((6, 8), (4, 8, 16), (6, 16)))
        multiplies = (
            partial(grouped_mm, x.as_subclass(OnGPU), weight),
            partial(grouped_wgrad, grad, x.as_subclass(OnGPU)),
        )
        for multiply in multiplies:
            if dtype == torch.bfloat16:
                assert multiply(ends).dtype == dtype
                continue
            with pytest.raises(RuntimeError, match=f"expects bfloat16 in a CUDA graph, but got {dtype}.*param_dtype"):
                multiply(ends)
