"""The examples of training libraries as their users run them: they learn, and go on elsewhere as if never stopped."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from script_jobs import run_forked
from test_train_llama import EXAMPLES

STEPS = 4
TRAINERS = {  # what each needs, and how long it trains
    "train_accelerate": (("accelerate",), ("--steps", STEPS)),
    "train_lightning": (("lightning",), ("--epochs", 2)),
    "train_transformers": (("transformers", "accelerate"), ("--steps", STEPS)),
}


def run(name: str, num_processes: int, folder: Path, *options: str) -> float:
    """The last validation loss that a script prints."""
    arguments = [EXAMPLES / f"{name}.py", "--folder", folder, *options]
    job = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    result = run_forked(arguments, num_processes, **job)
    assert result.status == 0, result.output
    return float(re.findall(r"validation loss ([0-9.]+)", result.output)[-1])


@pytest.mark.parametrize(("name", "most"), [*((name, 80) for name in TRAINERS), ("finetune_transformers", 59)])
def test_is_short(name: str, most: int) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINERS)
def test_learns_and_resumes_on_one_process(name: str, tmp_path: Path) -> None:
    packages, (option, length) = TRAINERS[name]
    if missing := [package for package in packages if find_spec(package) is None]:
        pytest.skip(f"needs {missing}: pip install 'dtensor-gtp[{packages[0]}]'")
    whole = run(name, 2, tmp_path / "whole", option, str(length))
    assert whole < 5.3  # nothing is known of a byte: ln 256 = 5.55
    begun = tmp_path / "begun"
    if name == "train_transformers":  # its schedule depends on the length
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{length // 2}", begun / f"checkpoint-{length // 2}")
    else:
        run(name, 2, begun, option, str(length // 2))
    assert run(name, 1, begun, option, str(length), "--resume") == pytest.approx(whole, abs=2e-4)
