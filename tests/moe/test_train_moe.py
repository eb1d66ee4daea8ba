"""examples/train_moe.py: one run on experts over (ep=2, expert_gtp=2), continued on ep=4 and on one process."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
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
    tensors = saved_tensors(folder / f"step-{STEPS}")
    params = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
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
