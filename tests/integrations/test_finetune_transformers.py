"""examples/finetune_transformers.py as its users run it, and what it leaves: a checkpoint and an exported model."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from test_train_llama import EXAMPLES, launch, load_corpus, saved_tensors

pytestmark = [
    pytest.mark.library,
    pytest.mark.skipif(
        find_spec("transformers") is None, reason="needs transformers: pip install 'dtensor-gtp[transformers]'"
    ),
]
SCRIPT = EXAMPLES / "finetune_transformers.py"
STEPS = 12


def validation_losses(output: str) -> list[tuple[int, float]]:
    found = re.findall(r"^validation loss (\S+) after (\d+) steps$", output, flags=re.MULTILINE)
    return [(int(step), float(loss)) for loss, step in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finetune_transformers")


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    result = launch([SCRIPT, "--steps", str(STEPS), "--folder", folder], 2, forked=True)
    assert result.status == 0, result.output
    return result.output


def test_validation_loss_falls(output: str) -> None:
    (first, before), (last, after) = validation_losses(output)
    assert (first, last) == (0, STEPS)
    assert 5.0 < before < 6.0  # nothing is known of 259 tokens: ln 259 = 5.56
    assert after < before - 1.0


def test_writes_after_a_prompt(output: str) -> None:
    sample = output.split(f"after {STEPS} steps\n")[1]
    assert sample[:20].encode() in bytes(load_corpus().held_out.tolist())
    assert len(sample.encode()) >= 48 + 48 - 10  # a few of the new bytes may be no text


def test_checkpoint_holds_what_is_exported(output: str, folder: Path) -> None:
    from safetensors.torch import load_file

    exported = load_file(folder / "model" / "model.safetensors")
    saved = saved_tensors(folder / "checkpoint")
    assert {f"model.{name}" for name in exported} == {name for name in saved if name.startswith("model.")}
    for name, tensor in exported.items():
        assert torch.equal(saved[f"model.{name}"], tensor)
        assert saved[f"optimizer.state.{name}.exp_avg"].shape == tensor.shape


def test_goes_on_from_an_exported_model(output: str, folder: Path) -> None:
    """On one process, by ``--model``: with the loss that two processes had, and with lower ones."""
    options = ["--model", folder / "model", "--steps", "4", "--folder", folder / "again"]
    result = launch([SCRIPT, *options], None, forked=True)
    assert result.status == 0, result.output
    (_, before), (_, after) = validation_losses(result.output)
    assert before == pytest.approx(validation_losses(output)[-1][1], abs=2e-4)
    assert after < before
