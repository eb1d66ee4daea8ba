"""Whole experts in one process: MLPs and routing."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import fake_world

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp.nn import GroupedExperts, GroupedLinear, GroupedMLP, TokenDispatcher, parallelize_experts
from dtensor_gtp.nn.grouped_linear import assert_counts

DIM, HIDDEN, EXPERTS, TOP_K = 8, 12, 4, 2


def make(cls: Any, *args: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(*args, **options).double()


@pytest.mark.parametrize("is_fused", [True, False])
def test_mlp_equals_its_experts_one_by_one(is_fused: bool) -> None:
    mlp = make(GroupedMLP, EXPERTS, DIM, HIDDEN, activation=F.gelu, is_fused=is_fused)
    x = torch.randn(10, DIM, dtype=torch.float64, requires_grad=True)
    splits = [3, 0, 4, 2]
    actual = mlp(x, torch.tensor(splits))
    gate, up = mlp.gate_up.weight.chunk(2, 1) if is_fused else (mlp.gate.weight, mlp.up.weight)
    rows = x.split([*splits, 1])
    each = [
        F.linear(F.gelu(F.linear(r, g)) * F.linear(r, u), d)
        for r, g, u, d in zip(rows[:-1], gate, up, mlp.down.weight, strict=True)
    ]
    expected = torch.cat([*each, torch.zeros(1, DIM, dtype=torch.float64)])
    torch.testing.assert_close(actual, expected)
    inputs = [x, *mlp.parameters()]
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), inputs) for o in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("nobody", [3, 7, -1])
def test_tokens_of_one_rank(nobody: int) -> None:
    """Without a mesh: sorted by expert in the order of tokens, the number of no expert counts for nobody."""
    dispatcher = TokenDispatcher(3)
    tokens = torch.arange(4.0)[:, None].requires_grad_()
    chosen = torch.tensor([[2, 0], [0, nobody], [2, 1], [1, 2]])
    dispatched = dispatcher.dispatch(tokens, chosen)
    assert dispatched.split_sizes.tolist() == [2, 2, 3]
    assert dispatched.rows[:7, 0].tolist() == [0, 1, 2, 3, 0, 2, 3]
    weights = torch.ones(4, 2, dtype=torch.float64)
    rows = torch.where(torch.arange(8)[:, None] < 7, dispatched.rows, 0)
    combined = dispatcher.combine(rows, dispatched, weights)
    assert combined.dtype == tokens.dtype
    assert combined[:, 0].tolist() == [0, 1, 4, 6]
    combined.sum().backward()
    assert tokens.grad[:, 0].tolist() == [2, 1, 2, 2]


def test_autocast() -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(GroupedMLP(EXPERTS, DIM, HIDDEN))
    x, chosen, weights = torch.randn(5, DIM), torch.tensor([[0, 2]] * 5), torch.rand(5, TOP_K)
    expected = experts(x, chosen, weights)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            actual = experts(x.to(dtype), chosen, weights)
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.float(), expected, rtol=0.05, atol=0.02)


def test_no_token_at_all() -> None:
    experts = make(GroupedExperts, make(GroupedMLP, EXPERTS, DIM, HIDDEN))
    x = torch.zeros(0, DIM, dtype=torch.float64, requires_grad=True)
    experts(x, torch.zeros(0, TOP_K, dtype=torch.int64), torch.zeros(0, TOP_K)).sum().backward()
    assert all(param.grad is not None and not param.grad.any() for param in experts.parameters())


def test_gradients_that_are_not_contiguous_are_exchanged() -> None:
    """That of a sum is expanded, which the collectives of torch 2.11 refuse."""
    with fake_world(world_size=2):
        group = dist.group.WORLD
        assert group is not None
        for exchange in (
            lambda rows: compat.reduce_scatter_rows(rows, group),
            lambda rows: compat.all_gather_rows(rows, group),
            lambda rows: compat.all_to_all_rows(rows, [1, 3], [2, 2], group),
        ):
            x = torch.randn(4, 3, requires_grad=True)
            exchange(x).sum().backward()
            assert x.grad is not None


def test_bad_arguments_are_refused() -> None:
    several, dispatch = GroupedLinear(2, 4, 4, single_grouped_weight=False), TokenDispatcher(4).dispatch
    x, ints = torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int32)
    one_weight = "one weight for all groups, but got one with a weight for each"
    for error, call, message in (
        (ValueError, lambda: TokenDispatcher(4, method="ring"), "'all_to_all', 'all_gather' as method, but got 'ring'"),
        (ValueError, lambda: TokenDispatcher(0), r"number of experts .* but got 0"),
        (ValueError, lambda: TokenDispatcher(4, max_tokens=0), "max_tokens >= 1, but got 0"),
        (ValueError, lambda: dispatch(x, ints[:, 0].long()), r"\(num_tokens, k\), but got \(3, 2\) and \(3,\)"),
        (TypeError, lambda: dispatch(x, ints), r"experts as int64, but got torch\.int32"),
        (NotImplementedError, lambda: parallelize_experts(several), one_weight),
    ):
        with pytest.raises(error, match=message):
            call()


# --- sizes of groups on the device ------------------------------------------------------------------------------------


def test_what_the_device_says_is_cut_to_what_kernels_take() -> None:
    """The CUDA kernel refuses messages of 255 characters and more."""
    with mock.patch.object(torch, "_assert_async") as kernel:
        compat.assert_on_device(torch.tensor(True), "expects " + "x" * 400)
    ((_, message), _) = kernel.call_args
    assert message == "expects " + "x" * 246


def test_debug_mode_checks_counts_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code and GPUs never look at the counts; the assertion runs where they are."""
    monkeypatch.setenv("DTENSOR_GTP_DEBUG", "splits")
    layer = GroupedLinear(4, 8, 8, dtype=torch.bfloat16)
    monkeypatch.delenv("DTENSOR_GTP_DEBUG")
    plain = GroupedLinear(4, 8, 8, dtype=torch.bfloat16)
    x, good, *bad = torch.zeros(12, 8).bfloat16(), *map(torch.tensor, ([4, 4, 4, 0], [4, 4, 4, 1], [4, -1, 4, 1]))
    found = "found by DTENSOR_GTP_DEBUG=splits"
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    compiled(x, good)
    assert "_assert_async" in graphs[0]
    for splits in bad:
        with pytest.raises(RuntimeError, match=f"at most the rows of x, none below 0 .{found}"):
            assert_counts(splits, 12)
        with pytest.raises(RuntimeError, match=found):
            compiled(x, splits)
    torch.compile(plain, fullgraph=True, backend=backend)(x, good)
    assert "_assert_async" not in graphs[-1]
