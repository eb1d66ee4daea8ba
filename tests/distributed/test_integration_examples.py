"""The examples of training libraries as their users run them: they learn, and go on elsewhere as if never stopped."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from script_jobs import run_forked
from test_train_llama import EXAMPLES

STEPS = 8
SCRIPTS = {"train_accelerate": ("accelerate", "safetensors"), "train_transformers": ("transformers", "accelerate")}


def run(name: str, num_processes: int, folder: Path, *options: str) -> float:
    """The last validation loss that a script prints."""
    arguments = [EXAMPLES / f"{name}.py", "--steps", str(STEPS), "--folder", folder, *options]
    result = run_forked(arguments, num_processes, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    assert result.status == 0, result.output
    return float(re.findall(r"validation loss ([0-9.]+)", result.output)[-1])


@pytest.mark.parametrize("name", SCRIPTS)
def test_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 80


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_learns_and_resumes_on_one_process(name: str, tmp_path: Path) -> None:
    if missing := [package for package in SCRIPTS[name] if find_spec(package) is None]:
        pytest.skip(f"needs {missing}: pip install 'dtensor-gtp[transformers]'")
    whole = run(name, 2, tmp_path / "whole")
    assert whole < 5.0  # nothing is known of a byte: ln 256 = 5.55
    if name == "train_transformers":
        begun = tmp_path / "whole"
        shutil.rmtree(begun / f"checkpoint-{STEPS}")
    else:
        begun = tmp_path / "begun"
        run(name, 2, begun, "--steps", str(STEPS // 2))
    assert run(name, 1, begun, "--resume") == pytest.approx(whole, abs=2e-4)
    from safetensors.torch import load_file

    saved = load_file(begun / "model" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
