"""examples/train_llama.py on replicas of unequal sizes under torchrun, which starts it again when a rank is killed."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch
from common import environment
from test_train_llama import EXAMPLES, SCRIPT, STEPS, finish, launch, metrics, popen, saved_tensors, tiny, wrapper
from torch.testing import assert_close

KILLED_AT = 3
LAST_CHECKPOINT = 2
# No number of rows that three processes could share evenly.
BATCH = ("--batch-size", "13")


def popen_with_restarts(arguments: list[str | Path], num_processes: int) -> subprocess.Popen[str]:
    """torchrun reads its own options from the environment, too."""
    with environment(PET_MAX_RESTARTS="1"):
        return popen(arguments, num_processes)


@pytest.mark.parametrize("path", ["memory", pytest.param("checkpoint", marks=pytest.mark.soak)])
def test_killed_job_goes_on_by_itself_on_unequal_replicas(tmp_path: Path, path: str) -> None:
    """Three processes are replicas of two and one. One is killed in the fourth backward; torchrun ends the others,
    which leave their state in memory, and starts all of them again. The job ends as one process would have ended it."""
    in_memory = path == "memory"
    whole = launch([SCRIPT, *tiny(tmp_path / "whole", *BATCH, "--json", tmp_path / "whole.json")], None)
    assert whole.status == 0, whole.output
    patch = f"""
        step = train_llama.Trainer.train_step
        def step_or_die(self):
            if self.step == {KILLED_AT} and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                self.model.embedding.register_forward_hook(
                    lambda m, a, out: out.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL)) and None)
            return step(self)
        train_llama.Trainer.train_step = step_or_die
        if not {in_memory}:
            train_llama.Trainer.leave = lambda self: None
    """
    script = wrapper(tmp_path / "killed.py", patch)
    started = time.monotonic()
    options = tiny(tmp_path / "elastic", *BATCH, "--elastic", "2", "--json", tmp_path / "elastic.json")
    result = finish(popen_with_restarts([script, *options], 3), started, 120)
    assert result.status == 0, result.output
    assert "2 replicas of 3 ranks" in result.output
    checkpoint = tmp_path / "elastic" / f"step-{LAST_CHECKPOINT}"
    assert (f"recovered step {KILLED_AT} from memory" in result.output) == in_memory, result.output
    assert (f"resumed from {checkpoint}, saved by 3 processes" in result.output) != in_memory
    done = KILLED_AT if in_memory else LAST_CHECKPOINT
    expected, resumed = metrics(tmp_path / "whole.json"), metrics(tmp_path / "elastic.json")
    assert [step for step, _ in resumed["losses"]] == list(range(done + 1, STEPS + 1))
    for (_, loss), (_, reference) in zip(resumed["losses"], expected["losses"][done:], strict=True):
        assert loss == pytest.approx(reference, abs=1e-5)
    final = saved_tensors(tmp_path / "whole" / f"step-{STEPS}", tmp_path / "whole.pt")
    for key, tensor in saved_tensors(tmp_path / "elastic" / f"step-{STEPS}", tmp_path / "elastic.pt").items():
        if ".model." in key:
            assert_close(tensor, final[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "replicate", "message"), [(0, 1, "--elastic of at least 1"), (1, 2, "no --replicate")]
)
def test_options_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, size: int, replicate: int, message: str) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from launch import Place, UsageError
    from train_llama import build_replicas

    with pytest.raises(UsageError, match=message):
        build_replicas(Place(0, 4, torch.device("cpu")), size, replicate)
