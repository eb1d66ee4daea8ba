"""The mixture of experts of ``examples/``: what a layer computes, what keeps experts busy, which weights are active."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_moe

    return train_moe


def make(examples: Any) -> Any:
    torch.manual_seed(0)
    config = examples.PRESETS["tiny"].model
    model = examples.MoELlama(config)
    model.init_weights()
    return model


def test_a_layer_is_its_experts_one_by_one(examples: Any) -> None:
    """Each token by the experts with the largest probabilities, none dropped if all choose one, and the shared one."""
    moe = make(examples).moes[0].double()
    torch.nn.init.normal_(moe.router.weight)
    moe.router.weight.data[0] = 5.0  # of positive tokens all choose expert 0
    mlp = moe.experts.mlp
    x = torch.rand(2, 7, moe.router.in_features, dtype=torch.float64, requires_grad=True)
    actual = moe(x)
    expected, num_of_first = [], 0
    for token in x.flatten(0, 1):
        probs = (moe.router.weight @ token).float().softmax(-1)
        chosen = probs.argsort(descending=True)[: moe.top_k]
        num_of_first += int(0 in chosen)
        each = []
        for expert in chosen.tolist():
            gate, up = (mlp.gate_up.weight[expert] @ token).chunk(2)
            each.append(probs[expert] / probs[chosen].sum() * (mlp.down.weight[expert] @ (F.silu(gate) * up)))
        expected.append(sum(each) + moe.shared(token))
    assert num_of_first == 14
    outputs = actual, torch.stack(expected).view_as(x)
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-7)
    grads = (torch.autograd.grad(output.square().sum(), [x, *moe.parameters()]) for output in outputs)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_balance_loss(examples: Any) -> None:
    """1 where load and probabilities are uniform, more where they agree on a few; routers learn from it, and no expert
    whose output it does not see."""
    moe = make(examples).moes[0]
    num_experts = moe.router.out_features
    uniform = torch.full((num_experts, num_experts), 1 / num_experts)
    each_once = torch.arange(num_experts)[:, None]
    assert moe._balance(uniform, each_once) == pytest.approx(1)
    certain = torch.eye(num_experts)[[1] * num_experts]
    assert moe._balance(certain, torch.ones_like(each_once)) == pytest.approx(num_experts)

    model = make(examples)
    model(torch.randint(0, 255, (2, 8)))
    model.balance_loss().backward()
    assert all(moe.router.weight.grad.any() for moe in model.moes)
    assert all(param.grad is None or not param.grad.any() for param in model.moes[-1].experts.parameters())
    model.eval()
    model(torch.randint(0, 255, (2, 8)))
    assert model.balance_loss() == 0


@pytest.mark.parametrize("preset", ["tiny", "cpu"])
def test_dense_model_has_as_many_active_parameters(examples: Any, preset: str) -> None:
    config = examples.PRESETS[preset].model
    with torch.device("meta"):
        sparse, dense = examples.MoELlama(config), examples.Llama(config)
    routers = sum(moe.router.weight.numel() for moe in sparse.moes)
    idle = sum(
        param.numel() * (config.num_experts - config.top_k) // config.num_experts
        for moe in sparse.moes
        for param in moe.experts.parameters()
    )
    of_sparse, of_dense = (sum(param.numel() for param in model.parameters()) for model in (sparse, dense))
    assert of_sparse - idle - routers == of_dense


def test_sizes_that_do_not_fit_are_refused(examples: Any) -> None:
    config = examples.PRESETS["tiny"].model
    message = "expects top_k=3 of num_experts=4 that divides hidden_dim - shared_dim = 80 - 16"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, top_k=3)
