"""examples/train_moe.py: what a layer of its model computes, what keeps experts busy, which weights are active; one
run on experts over (ep=2, expert_gtp=2), continued on ep=4 and on one process."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import fake_world
from test_train_llama import EXAMPLES, launch, saved_tensors

sys.path.append(str(EXAMPLES))
import train_moe
from launch import Place, UsageError

STEPS, SAVED_AT = 2, 1
OPTIONS = ("--preset", "tiny", "--steps", str(STEPS), "--checkpoint-every", str(SAVED_AT), "--lr", "0.003")
Run = dict[str, Any]


def run(folder: Path, num_processes: int | None, *more: str) -> Run:
    """What a job in ``folder`` has measured and printed, and its parameters at the end."""
    options = [*OPTIONS, "--checkpoint-dir", folder, "--json", folder / "run.json", *more]
    result = launch([EXAMPLES / "train_moe.py", *options], num_processes, forked=True)
    assert result.status == 0, result.output
    tensors = saved_tensors(folder / f"step-{STEPS}", folder / "whole.pt")
    params = {name: tensor for name, tensor in tensors.items() if name.startswith(".model.")}
    return {**json.loads((folder / "run.json").read_text()), "output": result.output, "params": params}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("train_moe") / "whole"
    return {"folder": folder, **run(folder, 4, "--ep", "2", "--expert-gtp", "2")}


def test_loss_falls(whole: Run) -> None:
    (_, before), (_, after) = whole["validation_losses"][0], whole["validation_losses"][-1]
    assert after < before - 0.05


def meshes(num_processes: int | None, ep: int = 1, expert_gtp: int = 1, *more: str, is_long: bool = True) -> Any:
    sizes = ("--ep", str(ep), "--expert-gtp", str(expert_gtp)) if num_processes else ()
    return pytest.param(num_processes, (*sizes, *more), marks=[pytest.mark.soak] * is_long)


@pytest.mark.parametrize(
    ("num_processes", "options"),
    [
        meshes(4, 4, 1, is_long=False),
        meshes(None, is_long=False),
        meshes(4, 2, 2),
        meshes(4, 1, 4),
        meshes(4, 1, 1),
        meshes(4, 4, 1, "--dispatch", "all_gather"),
    ],
)
def test_resumes_on_other_meshes(
    whole: Run, tmp_path: Path, num_processes: int | None, options: tuple[str, ...]
) -> None:
    shutil.copytree(whole["folder"] / f"step-{SAVED_AT}", tmp_path / f"step-{SAVED_AT}")
    (tmp_path / "latest").write_text(f"step-{SAVED_AT}\n")
    resumed = run(tmp_path, num_processes, "--resume", *options)
    assert "saved by 4 processes" in resumed["output"]
    assert [step for step, _ in resumed["losses"]] == list(range(SAVED_AT + 1, STEPS + 1))
    assert_close(resumed["losses"], whole["losses"][SAVED_AT:])
    assert_close(resumed["validation_losses"][-1:], whole["validation_losses"][-1:])
    torch.testing.assert_close(resumed["params"], whole["params"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("ep", "match"), [("3", "--ep 3 does not divide the 4 experts"), ("2", "--ep 2 --expert-gtp 4: .* divide")]
)
def test_meshes_that_do_not_fit_are_refused(ep: str, match: str) -> None:
    options = train_moe.parse_options([*OPTIONS, "--checkpoint-dir", "unused", "--ep", ep, "--expert-gtp", "4"])
    with fake_world(), pytest.raises(UsageError, match=match):
        train_moe.build_mesh(Place(0, 4, torch.device("cpu")), options, num_experts=4)


def assert_close(ours: list[Any], expected: list[Any]) -> None:
    """Pairs of step and loss."""
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-4, atol=1e-4)


# --- the model -------------------------------------------------------------------------------------------------------


def make() -> Any:
    torch.manual_seed(0)
    config = train_moe.PRESETS["tiny"].model
    model = train_moe.MoELlama(config)
    model.init_weights()
    return model


def test_a_layer_is_its_experts_one_by_one() -> None:
    """Each token by the experts with the largest probabilities, none dropped if all choose one, and the shared one."""
    moe = make().moes[0].double()
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


def test_balance_loss() -> None:
    """1 where load and probabilities are uniform, more where they agree on a few; routers learn from it, and no expert
    whose output it does not see."""
    moe = make().moes[0]
    num_experts = moe.router.out_features
    uniform = torch.full((num_experts, num_experts), 1 / num_experts)
    each_once = torch.arange(num_experts)[:, None]
    assert moe._balance(uniform, each_once) == pytest.approx(1)
    certain = torch.eye(num_experts)[[1] * num_experts]
    assert moe._balance(certain, torch.ones_like(each_once)) == pytest.approx(num_experts)

    model = make()
    model(torch.randint(0, 255, (2, 8)))
    model.balance_loss().backward()
    assert all(moe.router.weight.grad.any() for moe in model.moes)
    assert all(param.grad is None or not param.grad.any() for param in model.moes[-1].experts.parameters())
    model.eval()
    model(torch.randint(0, 255, (2, 8)))
    assert model.balance_loss() == 0


@pytest.mark.parametrize("preset", ["tiny", "cpu"])
def test_dense_model_has_as_many_active_parameters(preset: str) -> None:
    config = train_moe.PRESETS[preset].model
    with torch.device("meta"):
        sparse, dense = train_moe.MoELlama(config), train_moe.Llama(config)
    routers = sum(moe.router.weight.numel() for moe in sparse.moes)
    idle = sum(
        param.numel() * (config.num_experts - config.top_k) // config.num_experts
        for moe in sparse.moes
        for param in moe.experts.parameters()
    )
    of_sparse, of_dense = (sum(param.numel() for param in model.parameters()) for model in (sparse, dense))
    assert of_sparse - idle - routers == of_dense


def test_sizes_that_do_not_fit_are_refused() -> None:
    config = train_moe.PRESETS["tiny"].model
    message = "expects top_k=3 of num_experts=4 that divides hidden_dim - shared_dim = 80 - 16"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, top_k=3)
