"""Conversion of the experts that models come with, and of their checkpoints."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import fake_mesh
from model_cases import CASES, VOCABULARY
from torch.distributed.tensor import DTensor
from torchvision_ops import define_missing

from dtensor_gtp.nn import (
    GroupedExperts,
    GroupedLinear,
    GroupedMLP,
    convert_experts_state_dict,
    group_experts,
    group_experts_,
    parallelize_experts,
)

DIM, HIDDEN, EXPERTS, TOP_K = 8, 12, 4, 2


class Expert(nn.Module):
    """As in the code that DeepSeek publishes."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN, names: str = "gate_proj up_proj down_proj") -> None:
        super().__init__()
        self.names = names.split()
        for name, (rows, columns) in zip(self.names, [(hidden, dim)] * 2 + [(dim, hidden)], strict=True):
            setattr(self, name, nn.Linear(columns, rows, bias=False))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class DeepSeekBlock(nn.Module):
    """Sigmoid scores, of which the chosen ones are normalized; a list of experts, one after the other; a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared_experts = Expert(hidden=2 * HIDDEN)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = self.gate(x).sigmoid().topk(TOP_K)
        return chosen, weights / weights.sum(-1, keepdim=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        chosen, weights = self.route(rows)
        y = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            y = y.index_add(0, token, expert(rows[token]) * weights[token, place, None])
        return y.view_as(x) + self.shared_experts(x)


def grouped_forward(block: Any, x: torch.Tensor) -> torch.Tensor:
    """What takes the place of ``DeepSeekBlock.forward``."""
    rows = x.flatten(0, -2)
    return block.experts(rows, *block.route(rows)).view_as(x) + block.shared_experts(x)


def make(cls: Any, *args: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(*args, **options).double()


def same_gradients(
    model: nn.Module, converted: nn.Module, form: str, loss: Callable[[nn.Module], torch.Tensor]
) -> None:
    """Losses and gradients of all weights; and the state dict in the form it had."""
    losses = [loss(m) for m in (model, converted)]
    torch.testing.assert_close(losses[1], losses[0])
    for each in losses:
        each.backward()
    grads = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, converted)]
    expected = convert_experts_state_dict(grads[0], "grouped")
    assert expected.keys() == grads[1].keys()
    for name, want in expected.items():
        torch.testing.assert_close(grads[1][name], want, msg=lambda m, n=name: f"{n}: {m}")
    back = convert_experts_state_dict(converted.state_dict(), form)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


def test_deepseek_block() -> None:
    model = nn.Sequential(make(DeepSeekBlock), make(DeepSeekBlock))
    converted = group_experts_(copy.deepcopy(model), {DeepSeekBlock: grouped_forward})
    assert isinstance(converted[0], DeepSeekBlock)
    assert type(converted[0].experts) is GroupedExperts
    assert sum(isinstance(m, GroupedLinear) for m in converted.modules()) == 4
    x = torch.randn(3, 5, DIM, dtype=torch.float64, requires_grad=True)
    outputs = [m(x) for m in (model, converted)]
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(*(torch.autograd.grad(output.square().sum(), x) for output in outputs))
    same_gradients(model, converted, "modules", lambda module: module(x).square().sum())


@pytest.mark.library
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_blocks_of_transformers(model_type: str) -> None:
    """Version 5 stores experts fused; the whole model runs, its routers and shared experts as they are."""
    define_missing()
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[transformers]'")
    torch.manual_seed(0)
    options = {"n_group": 2} if model_type == "deepseek_v3" else {}
    # The grouped kernel of transformers knows no float64.
    model = CASES[model_type].make(experts_implementation="eager", **options).double()
    if not any("gate_up_proj" in name for name, _ in model.named_parameters()):
        pytest.skip(f"transformers {transformers.__version__} stores experts one by one")
    tokens = torch.randint(VOCABULARY, (2, 9))
    converted = group_experts_(copy.deepcopy(model))
    torch.testing.assert_close(converted(tokens).logits, model(tokens).logits)
    same_gradients(model, converted, "fused", lambda module: module(tokens, labels=tokens).loss)


@pytest.mark.parametrize("form", ["grouped", "grouped_split", "fused", "modules", "mixtral"])
def test_state_dicts_go_there_and_back(form: str) -> None:
    """Through every form, the same bits under the names of the form. Dense layers of the same names stay."""
    model = make(DeepSeekBlock)
    state = {f"layers.3.mlp.{name}": value for name, value in model.state_dict().items()}
    state |= {f"layers.0.mlp.{name}.weight": torch.randn(8, 8) for name in ("gate_up", "gate", "up", "down")}
    state |= {f"layers.0.mlp.{name}": torch.randn(8, 8) for name in ("gate_up_proj", "down_proj")}
    through = convert_experts_state_dict(state, form)
    names = {name.removeprefix("layers.3.mlp.experts.") for name in through if ".experts." in name}
    assert {
        "grouped": "mlp.down.weight",
        "grouped_split": "mlp.up.weight",
        "fused": "gate_up_proj",
        "modules": "3.up_proj.weight",
        "mixtral": "3.w3.weight",
    }[form] in names
    back = convert_experts_state_dict(through, "modules")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], value) for name, value in state.items())


def test_experts_load_what_was_converted() -> None:
    experts = nn.ModuleList(make(Expert, names="w1 w3 w2") for _ in range(3))
    for expert in experts:
        nn.init.normal_(expert.w2.weight)
    for is_fused, form in ((True, "grouped"), (False, "grouped_split")):
        grouped = group_experts(experts, is_fused=is_fused)
        empty = GroupedExperts(GroupedMLP(3, DIM, HIDDEN, is_fused=is_fused)).double()
        state = convert_experts_state_dict({f"{n}": v for n, v in experts.state_dict().items()}, form)
        empty.load_state_dict(state)
        x, chosen = torch.randn(6, DIM, dtype=torch.float64), torch.tensor([[0, 2]]).expand(6, 2)
        weights = torch.rand(6, 2, dtype=torch.float64)
        expected = sum(experts[e](x) * weights[:, i, None] for i, e in enumerate((0, 2)))
        for layer in (grouped, empty):
            torch.testing.assert_close(layer(x, chosen, weights), expected)
    frozen = group_experts(experts.requires_grad_(False))
    assert not any(param.requires_grad for param in frozen.parameters())


class FusedExperts(nn.Module):
    """As in ``transformers``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, DIM))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        raise NotImplementedError


def test_experts_that_would_stay_whole_are_refused() -> None:
    with fake_mesh(2, names=("ep",)) as mesh:
        model = nn.ModuleDict({"experts": FusedExperts()})
        message = (
            r"'experts' is a FusedExperts, whose 'gate_up_proj' of shape \(4, 24, 8\) .*nn.group_experts_\(module\)"
        )
        with pytest.raises(NotImplementedError, match=message):
            parallelize_experts(model, mesh)
        with pytest.raises(ValueError, match=r"with GroupedLinear layers, but got a Linear without\. .*group_experts_"):
            parallelize_experts(nn.Linear(2, 2), mesh)
        parallelize_experts(group_experts_(model), mesh)
        assert [param.to_local().shape[0] for param in model.parameters() if isinstance(param, DTensor)] == [2, 2]


def test_layers_that_share_experts_still_share_them() -> None:
    model = nn.Sequential(make(DeepSeekBlock), make(DeepSeekBlock))
    model[1].experts = model[1].also = model[0].experts
    converted = group_experts_(copy.deepcopy(model), {DeepSeekBlock: grouped_forward})
    assert converted[0].experts is converted[1].experts is converted[1].also
    x = torch.randn(3, 5, DIM, dtype=torch.float64)
    same_gradients(model, converted, "modules", lambda module: module(x).square().sum())


def test_experts_that_share_weights_are_refused() -> None:
    """Each place would get a copy, which is trained by itself."""
    expert, twin = Expert(), Expert()
    twin.up_proj = expert.gate_proj
    fused = [FusedExperts(), FusedExperts()]
    fused[1].down_proj = fused[0].down_proj
    experts = FusedExperts()
    outside = nn.ModuleList([nn.ModuleList([experts]), nn.ParameterList([experts.gate_up_proj])])
    block = DeepSeekBlock()
    block.first = block.experts[0]
    forwards = {DeepSeekBlock: grouped_forward}
    for call, message in (
        (
            lambda: of_list(expert, Expert(), expert),
            r"a parameter of their own, but '0\.gate_proj\.weight' and '2\.gate",
        ),
        (lambda: of_list(Expert(), twin, expert), r"but '1\.up_proj\.weight' and '2\.gate_proj\.weight' are one"),
        (lambda: group_experts_(nn.Sequential(*fused)), r"but '0\.down_proj' and '1\.down_proj' are one"),
        (
            lambda: group_experts_(outside),
            r"but '0\.0\.gate_up_proj' and '1\.0' are one parameter of shape \(4, 24, 8\)",
        ),
        (
            lambda: group_experts_(nn.Sequential(block), forwards),
            r"but '0\.experts\.0\.gate_proj\.weight' and '0\.first",
        ),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call()
    assert type(outside[0][0]) is FusedExperts, "an error leaves the module as it was"


def test_frozen_weights_stay_frozen_and_others_are_trained() -> None:
    fused, experts = FusedExperts(), nn.ModuleList([Expert(), Expert()])
    for name, param in (*fused.named_parameters(), *experts.named_parameters()):
        param.requires_grad_("down_proj" not in name)
    for is_fused in (True, False):
        for module in (fused, experts):
            converted = group_experts(module, is_fused=is_fused)
            for name, param in converted.named_parameters():
                assert param.requires_grad == ("down" not in name), name
    for expert in experts:
        expert.gate_proj.requires_grad_(False)
    trained = [name for name, p in group_experts(experts, is_fused=False).named_parameters() if p.requires_grad]
    assert trained == ["mlp.up.weight"]
    with pytest.raises(NotImplementedError, match=r"all trained or all frozen, but 2 of 4 are trained"):
        group_experts(experts)
    experts[0].requires_grad_(False)
    with pytest.raises(NotImplementedError, match=r"all trained or all frozen, but 1 of 2 are trained"):
        group_experts(experts, is_fused=False)


def test_experts_have_one_activation() -> None:
    def with_activation(act_fn: Any) -> Expert:
        expert = Expert().double()
        del expert.act_fn  # a function cannot take the place of a module
        expert.act_fn = act_fn
        return expert

    for first, second, found in (
        (nn.SiLU(), nn.ReLU(), r"SiLU\(\) and ReLU\(\)"),
        (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2), r"LeakyReLU\(negative_slope=0.1\) and LeakyReLU"),
        (nn.PReLU(), nn.PReLU(), "PReLU"),
        (F.relu, F.gelu, "function relu .* and .*gelu"),
    ):
        with pytest.raises(TypeError, match=f"one activation, but got .*{found}"):
            of_list(with_activation(first), with_activation(second))
    x, weights = torch.randn(6, DIM, dtype=torch.float64), torch.ones(6, 2)
    prelu = nn.PReLU().double()
    for first, second in ((nn.LeakyReLU(0.3), nn.LeakyReLU(0.3)), (prelu, prelu), (F.relu, F.relu)):
        experts = [with_activation(act_fn) for act_fn in (first, second)]
        result = of_list(*experts)(x, torch.tensor([[0, 1]] * 6), weights)
        torch.testing.assert_close(result, experts[0](x) + experts[1](x))


def test_what_cannot_be_grouped_is_refused() -> None:
    biased = Expert()
    biased.up_proj = nn.Linear(DIM, HIDDEN)
    fused, odd = nn.Module(), nn.Module()
    for module in (fused, odd):
        module.gate_up_proj = nn.Parameter(torch.zeros(2, DIM, 24))
        module.down_proj = nn.Parameter(torch.zeros(2, HIDDEN, DIM))
    odd.has_bias = True
    state = make(DeepSeekBlock).state_dict()
    del state["experts.2.up_proj.weight"]
    missing = r"under 'experts\.', but 'experts\.2\.up_proj\.weight' is missing"
    for error, call, message in (
        (TypeError, lambda: group_experts(nn.Linear(2, 2)), r"gate_up_proj and down_proj or a ModuleList .*got Linear"),
        (TypeError, lambda: of_list(nn.Linear(2, 2)), r"linear layers \('gate_proj'.*but got \['Linear'\]"),
        (TypeError, lambda: of_list(Expert(), Expert(hidden=4)), "experts of one size"),
        (NotImplementedError, lambda: of_list(biased), "experts without biases"),
        (NotImplementedError, lambda: group_experts(fused), r"without biases, .* has \(2, 8, 24\) and \(2, 12, 8\)"),
        (NotImplementedError, lambda: group_experts(odd), "differs in has_bias"),
        (ValueError, lambda: group_experts_(nn.Linear(2, 2)), "found no experts in Linear"),
        (ValueError, lambda: convert_experts_state_dict({}, "split"), r"one of 'grouped', .* but got 'split'"),
        (ValueError, lambda: convert_experts_state_dict({"weight": biased}, "fused"), "no experts in the state dict"),
        (ValueError, lambda: convert_experts_state_dict(state, "fused"), missing),
    ):
        with pytest.raises(error, match=message):
            call()


def test_experts_with_arithmetic_of_their_own_are_refused() -> None:
    class ClampedExperts(FusedExperts):
        """As ``DeepseekV4Experts`` of transformers 5.24."""

        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate.clamp(max=1)) * up.clamp(min=-1, max=1)

    class NormedExperts(FusedExperts):
        has_post_expert_norm = True

    def with_norm(expert: Any) -> Any:
        expert.norm = nn.LayerNorm(DIM)
        return expert

    for call, message in (
        (lambda: group_experts(ClampedExperts()), "ClampedExperts has .* and differs in _apply_gate"),
        (lambda: group_experts_(nn.Sequential(ClampedExperts())), "differs in _apply_gate"),
        (lambda: group_experts(NormedExperts()), "NormedExperts has .* and differs in has_post_expert_norm"),
        (lambda: group_experts(with_norm(FusedExperts())), "differs in norm"),
        (lambda: of_list(Expert(), with_norm(Expert())), "but Expert has its own norm"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call()


@pytest.mark.parametrize("lost", ["experts.2.down_proj", "experts.3.down_proj", "experts.2."])
def test_weights_of_an_expert_that_are_missing_are_named(lost: str) -> None:
    """Of the last expert, and of one before others: these would be left out, without a word."""
    state = make(DeepSeekBlock).state_dict()
    rest = {name: value for name, value in state.items() if not name.startswith(lost)}
    with pytest.raises(ValueError, match=rf"under 'experts\.', but '{lost}.*' is missing"):
        convert_experts_state_dict(rest, "grouped")


def of_list(*experts: nn.Module) -> GroupedExperts:
    return group_experts(nn.ModuleList(experts))
