"""examples/train_llama.py as its users run it: in processes of their own.

A job of two processes trains without interruption; the same job is killed inside a checkpoint and resumed on two
processes and on one. Faults are put in by wrapper scripts that patch the example's modules; the example has no hook.
The default tier forks the processes; in the long tier torchrun starts, watches and ends them.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from script_jobs import Result, run_forked
from timing import HANG_S
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import dtensor_gtp
from dtensor_gtp import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import checkpoints
import train_llama
from launch import Place
from text_data import TextBatches, load_corpus

EXAMPLES = Path(train_llama.__file__).parent
SCRIPT = EXAMPLES / "train_llama.py"
STEPS = 6
KILLED_AT = 4
# What torchrun says when a process has sat out the grace period, which is none that a busy machine needs.
SAT_OUT, GRACE_S = "forcefully exiting", 100


def popen(arguments: list[str | Path], num_processes: int | None, device: str = "cpu") -> subprocess.Popen[str]:
    """Starts the example under torchrun, or under plain python when ``num_processes`` is None."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    # The job imports the package that this test imports, installed or not.
    env["PYTHONPATH"] = os.pathsep.join([str(Path(dtensor_gtp.__file__).parents[1]), env.get("PYTHONPATH", "")])
    env["OMP_NUM_THREADS"] = "1"
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(GRACE_S)
    launcher = [sys.executable]
    if num_processes is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return subprocess.Popen(
        [*launcher, *map(str, arguments)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = HANG_S) -> Result:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"the job did not end within {timeout_s} s: {process.communicate()[0]}")
    return Result(process.returncode, output)


def launch(
    arguments: list[str | Path], num_processes: int | None, device: str = "cpu", *, forked: bool = False
) -> Result:
    """To its end. ``forked``: on the CPU, without torchrun, and without importing torch again."""
    if forked:
        return run_forked(arguments, num_processes, CUDA_VISIBLE_DEVICES="")
    return finish(popen(arguments, num_processes, device))


def tiny(checkpoint_dir: Path, *more: str | Path) -> list[str | Path]:
    return [
        *("--preset", "tiny", "--steps", str(STEPS), "--log-every", "1", "--checkpoint-every", "2"),
        *("--checkpoint-dir", checkpoint_dir),
        *more,
    ]


RUN = "\nfarewell = launch.Farewell()\nlaunch.run(lambda: train_llama.main(farewell), farewell)\n"


def wrapper(path: Path, patch: str) -> Path:
    """Writes a script that runs the example with ``patch`` applied to its modules first."""
    head = f"import os, signal, sys, threading\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
    body = "import checkpoints, launch, train_llama\nrank = int(os.environ['RANK'])\n"
    path.write_text(head + body + textwrap.dedent(patch) + RUN)
    return path


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, unsharded, by its path in the nested state."""
    values, _ = flatten_state_dict(_load_state_dict_from_keys(checkpoint_id=checkpoint))
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def final_tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return saved_tensors(folder / name / f"step-{STEPS}")


def metrics(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train_llama")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Result:
    result = launch([SCRIPT, *tiny(folder / "whole", "--json", folder / "whole.json")], 2, forked=True)
    assert result.status == 0, result.output
    return result


@pytest.fixture(scope="module")
def killed(folder: Path) -> Result:
    """A run whose rank 0 is killed when the checkpoint of step 4 is written but not yet published."""
    patch = f"""
        publish = checkpoints.CheckpointDir._publish
        def publish_or_die(self, partial, name):
            if name == "step-{KILLED_AT}":
                os.kill(os.getpid(), signal.SIGKILL)
            publish(self, partial, name)
        checkpoints.CheckpointDir._publish = publish_or_die
    """
    return launch([wrapper(folder / "killed.py", patch), *tiny(folder / "killed")], 2, forked=True)


class TestTraining:
    def test_loss_falls_and_progress_is_shown(self, uninterrupted: Result, folder: Path) -> None:
        final = metrics(folder / "whole.json")
        assert final["step"] == STEPS
        assert final["world_size"] == 2
        (first_step, first), (last_step, last) = final["validation_losses"][0], final["validation_losses"][-1]
        assert (first_step, last_step) == (0, STEPS)
        assert first == pytest.approx(5.545, abs=0.1)  # ln(256): the untrained model knows nothing
        assert last < first - 0.5
        assert f"validation loss {first:.4f}" in uninterrupted.output
        assert f"validation loss {last:.4f}" in uninterrupted.output
        progress = [line for line in uninterrupted.output.splitlines() if "tokens/s" in line]
        assert len(progress) == STEPS, uninterrupted.output
        for word in (f"/{STEPS} [", "loss", "GiB", "ms exposed", "norm"):
            assert all(word in line for line in progress)

    def test_report_and_schedule_are_shown_once(self, uninterrupted: Result) -> None:
        output = uninterrupted.output
        report, after_report = output.split("step    0/6  validation loss", maxsplit=1)
        row = next(line for line in report.splitlines() if line.startswith("  layers.1.ffn.w2.weight"))
        assert "32x80" in row
        assert "5.0 KiB" in row  # half of 32 * 80 * 4 bytes
        assert "not observed yet" in report
        schedule, rest = after_report.split("1/6 [", maxsplit=1)
        assert "backward of " in schedule
        assert "2 blocks, each gathered as a whole (layers.0 to layers.1)" in schedule
        assert "  order: embedding.weight, layers.0, layers.1, output.weight\n" in schedule
        assert "order: " not in rest

    def test_keeps_the_last_two_checkpoints(self, uninterrupted: Result, folder: Path) -> None:
        assert sorted(path.name for path in (folder / "whole").iterdir()) == ["latest", "step-4", "step-6"]
        assert (folder / "whole" / "latest").read_text() == "step-6\n"


class TestResume:
    def test_killed_run_leaves_the_last_complete_checkpoint(self, killed: Result, folder: Path) -> None:
        assert killed.status == -signal.SIGKILL, killed.output
        assert sorted(path.name for path in (folder / "killed").iterdir()) == ["latest", "step-2", "step-4.tmp"]
        assert (folder / "killed" / "latest").read_text() == "step-2\n"

    def test_same_mesh_is_bit_equal(self, uninterrupted: Result, killed: Result, folder: Path) -> None:
        shutil.copytree(folder / "killed", folder / "two")
        result = launch([SCRIPT, *tiny(folder / "two", "--resume", "--json", folder / "two.json")], 2, forked=True)
        assert result.status == 0, result.output
        whole, resumed = metrics(folder / "whole.json"), metrics(folder / "two.json")
        assert resumed["losses"] == whole["losses"][2:]
        assert resumed["validation_losses"] == whole["validation_losses"][1:]
        assert not list((folder / "two").glob("*.tmp"))
        expected, actual = final_tensors(folder, "whole"), final_tensors(folder, "two")
        assert actual.keys() == expected.keys()
        assert any(".exp_avg_sq" in key for key in actual)
        assert any(key.endswith("model.output.weight") for key in actual)
        for key, tensor in expected.items():
            assert torch.equal(actual[key], tensor), key

    @pytest.mark.parametrize("num_processes", [None, 3], ids=["plain_python", "3_processes"])
    def test_other_number_of_processes_continues_the_run(
        self, uninterrupted: Result, killed: Result, folder: Path, num_processes: int | None
    ) -> None:
        """Also where embedding and loss exchange activations, which a checkpoint does not know."""
        name = f"on_{num_processes}"
        shutil.copytree(folder / "killed", folder / name)
        options = ("--resume", *(("--exchange",) if num_processes else ()), "--json", folder / f"{name}.json")
        result = launch([SCRIPT, *tiny(folder / name, *options)], num_processes, forked=True)
        assert result.status == 0, result.output
        assert "saved by 2 processes" in result.output
        whole, resumed = metrics(folder / "whole.json"), metrics(folder / f"{name}.json")
        assert resumed["world_size"] == (num_processes or 1)
        assert ("loss of output.weight: exchange of up to 128 tokens" in result.output) == bool(num_processes)
        assert [step for step, _ in resumed["losses"]] == [3, 4, 5, 6]
        for (_, loss), (_, expected) in zip(resumed["losses"], whole["losses"][2:], strict=True):
            assert loss == pytest.approx(expected, abs=1e-5)
        final = final_tensors(folder, "whole")
        for key, tensor in final_tensors(folder, name).items():
            if key.startswith("model."):
                torch.testing.assert_close(
                    tensor, final[key], rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
                )

    def test_other_configuration_is_refused(self, uninterrupted: Result, folder: Path) -> None:
        before = sorted((folder / "whole").iterdir())
        result = launch(
            [SCRIPT, *tiny(folder / "whole", "--resume", "--seq-len", "16", "--seed", "1")], None, forked=True
        )
        assert result.status == 1
        assert "model.max_seq_len is 16, but 32 in the checkpoint" in result.output
        assert "data.seed is 1, but 0 in the checkpoint" in result.output
        assert "Traceback" not in result.output
        assert sorted((folder / "whole").iterdir()) == before


class TestFailure:
    @pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.long)])
    def test_failing_rank_ends_all_with_its_reason(self, folder: Path, forked: bool) -> None:
        patch = """
            train_step = train_llama.Trainer.train_step
            def fail(self):
                if rank == 1 and self.step == 2:
                    raise RuntimeError("the disk of rank 1 is on fire")
                return train_step(self)
            train_llama.Trainer.train_step = fail
        """
        script = wrapper(folder / "failing.py", patch)
        result = launch([script, *tiny(folder / "failing", "--checkpoint-every", "0")], 2, forked=forked)
        assert result.status == 1
        assert "[rank 1] Traceback" in result.output
        assert "RuntimeError: the disk of rank 1 is on fire" in result.output
        if not forked:
            root_cause = result.output.split("Root Cause", maxsplit=1)[1]
            assert "the disk of rank 1 is on fire" in root_cause
            assert SAT_OUT not in result.output

    @pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.long)])
    def test_interrupt_ends_a_rank_that_waits_for_a_stuck_peer(self, folder: Path, forked: bool) -> None:
        """It is blocked in a collective by then, or will be. Of a job of torchrun, Ctrl-C reaches torchrun alone, which
        then may believe that a process lives on that has ended: its handler raises wherever it is, and where that is
        between the lock of a ``Popen`` and its ``try``, the lock is never released. So each process has to say it."""
        patch = f"""
            import torch, torch.distributed as dist
            train_step = train_llama.Trainer.train_step
            def stick(self):
                if self.step == 1:
                    process = torch.tensor(os.getpid())
                    dist.broadcast(process, src=0)
                    if rank == 1:
                        os.kill(process.item() if {forked} else os.getppid(), signal.SIGINT)
                        threading.Event().wait()
                    dist.barrier()
                return train_step(self)
            train_llama.Trainer.train_step = stick
        """
        script = wrapper(folder / "interrupted.py", patch)
        result = launch([script, *tiny(folder / "interrupted", "--checkpoint-every", "0")], 2, forked=forked)
        for rank in (0,) if forked else (0, 1):
            assert result.output.count(f"[rank {rank}] stopped by SIGINT") == 1, result.output
        assert result.status == 128 + signal.SIGINT if forked else result.status != 0


@pytest.fixture
def one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def place(world_size: int = 1) -> Place:
    return Place(rank=0, world_size=world_size, device=torch.device("cpu"))


class TestDataOrder:
    @staticmethod
    def batches(rank: int, world_size: int, batch_size: int = 12, seed: int = 0) -> TextBatches:
        text = (torch.arange(4 * 31 + 1) % 256).to(torch.uint8)
        return TextBatches(text, seq_len=4, batch_size=batch_size, seed=seed, rank=rank, world_size=world_size)

    def test_ranks_together_read_what_one_process_reads(self) -> None:
        whole = self.batches(0, 1)
        for world_size in (2, 3, 4):
            ranks = [self.batches(rank, world_size) for rank in range(world_size)]
            for step in range(7):  # past the end of the second epoch
                inputs = torch.cat([batches(step).inputs for batches in ranks])
                assert torch.equal(inputs, whole(step).inputs)

    def test_an_epoch_reads_every_window_once(self) -> None:
        batches = self.batches(0, 1, batch_size=31)
        first, second = batches(0), batches(1)
        assert sorted(first.inputs[:, 0].tolist()) == list(range(0, 124, 4))
        assert sorted(second.inputs[:, 0].tolist()) == list(range(0, 124, 4))
        assert not torch.equal(first.inputs, second.inputs)
        assert torch.equal(first.targets, first.inputs + 1)

        assert not torch.equal(self.batches(0, 1)(0).inputs, self.batches(0, 1, seed=1)(0).inputs), "another seed"

    @pytest.mark.parametrize(
        ("world_size", "batch_size", "message"),
        [
            (4, 10, "10 sequences does not divide over 4 .* batch size of 8 or 12,"),
            (4, 3, "3 sequences does not divide over 4 .* batch size of 4,"),
            (1, 32, "31 windows of 4 bytes, fewer than a global batch of 32"),
        ],
    )
    def test_a_batch_that_does_not_fit_is_refused(self, world_size: int, batch_size: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            self.batches(0, world_size, batch_size=batch_size)

    def test_corpus_splits_by_file(self, tmp_path: Path) -> None:
        for index in range(17):
            (tmp_path / f"m{index:02}.py").write_text(f"x = {index}\n")
        (tmp_path / "test").mkdir()
        (tmp_path / "test" / "a.py").write_text("excluded")
        corpus = load_corpus(tmp_path)
        assert bytes(corpus.held_out.tolist()) == b"x = 0\n\0x = 16\n\0"
        assert bytes(corpus.train.tolist()) == b"".join(b"x = %d\n\0" % index for index in range(1, 16))
        (tmp_path / "m05.py").write_text("x = 6\n")
        assert load_corpus(tmp_path).checksum != corpus.checksum

        (tmp_path / "empty").mkdir()
        with pytest.raises(FileNotFoundError, match=r"at least 16 Python files .* but found 0"):
            load_corpus(tmp_path / "empty")


class Number:
    """The smallest thing that DCP can save."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.value = state_dict["value"]


@pytest.mark.usefixtures("one_process_group")
class TestCheckpointDir:
    @staticmethod
    def open(path: Path) -> checkpoints.CheckpointDir:
        return checkpoints.CheckpointDir(path, place())

    @staticmethod
    def train_state(width: int = 2, *options: bool) -> checkpoints.TrainState:
        model = torch.nn.Linear(2, width)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return checkpoints.TrainState(model, optimizer, scheduler, place(), *options)

    def load_latest(self, path: Path) -> tuple[int, float]:
        saved, state = self.open(path), Number(0.0)
        saved.load(saved.latest(), state)
        return saved.read_run(saved.latest())["step"], state.value.item()

    @pytest.mark.parametrize("failing", ["save", "write", "sync", "replace"])
    def test_a_save_that_stops_anywhere_leaves_the_earlier_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
    ) -> None:
        self.open(tmp_path).save(2, Number(2.0), {})
        owner, name = {
            "save": (checkpoints.dcp, "save"),
            "write": (checkpoints, "_write_durably"),
            "sync": (checkpoints, "_sync_dir"),
            "replace": (os, "replace"),
        }[failing]

        def stop(*args: object, **kwargs: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stop)
            with pytest.raises(KeyboardInterrupt):
                self.open(tmp_path).save(4, Number(4.0), {})
        assert self.load_latest(tmp_path) == (2, 2.0)

        self.open(tmp_path).save(4, Number(40.0), {})
        assert self.load_latest(tmp_path) == (4, 40.0)
        assert len(list(tmp_path.glob("step-*"))) == 2

    def test_a_run_that_starts_over_replaces_the_earlier_one(self, tmp_path: Path) -> None:
        for value in (1.0, 2.0, 3.0):
            self.open(tmp_path).save(2, Number(value), {})
            assert self.load_latest(tmp_path) == (2, value)
        assert len(list(tmp_path.glob("step-*"))) == 2

    @pytest.mark.parametrize("with_rng", [True, False])
    def test_rng_continues_where_it_was_saved(self, tmp_path: Path, with_rng: bool) -> None:
        folder, state = self.open(tmp_path), self.train_state(2, with_rng)
        folder.save(1, self.train_state(), {})
        expected = torch.rand(3)
        folder.load(folder.latest(), state)
        assert torch.equal(torch.rand(3), expected) == with_rng

    def test_it_has_the_shape_of_all_pages_and_names_what_does_not_fit(self, tmp_path: Path) -> None:
        folder, saved = self.open(tmp_path), self.train_state()
        folder.save(1, saved, {})
        found = {"model": torch.nn.Linear(2, 2).state_dict()}
        checkpoint.load(found, checkpoint_id=folder.latest(), no_dist=True)
        assert torch.equal(found["model"]["weight"], saved.state_dict()["model"]["weight"])
        with pytest.raises(ValueError, match=r"'model.weight' is \(3, 2\) here and \(2, 2\) there"):
            folder.load(folder.latest(), self.train_state(3))
        assert self.open(tmp_path / "missing").latest() is None


class TestOptions:
    @staticmethod
    def resolve(*arguments: str) -> Any:
        return train_llama.resolve_preset(train_llama.parse_options(list(arguments)), place(4))

    def test_options_replace_the_defaults_of_the_preset(self) -> None:
        assert self.resolve() == train_llama.PRESETS["cpu"]
        preset = self.resolve("--preset", "tiny", "--steps", "7", "--seq-len", "9", "--lr", "0.5")
        assert (preset.steps, preset.model.max_seq_len, preset.lr) == (7, 9, 0.5)
        assert preset.batch_size == train_llama.PRESETS["tiny"].batch_size

    def test_values_out_of_range_are_refused(self) -> None:
        for name in ("steps", "batch-size", "seq-len", "log-every"):
            with pytest.raises(ValueError, match=f"expected --{name} of at least 1, but got 0"):
                self.resolve(f"--{name}", "0")
        for replicate in (0, 3):
            with pytest.raises(ValueError, match=f"--replicate {replicate} does not divide the 4 processes"):
                train_llama.build_mesh(place(4), replicate)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
class TestCuda:
    def test_resume_on_gpus_is_bit_equal(self, tmp_path: Path) -> None:
        options = ("--deterministic", "--json")
        whole = launch([SCRIPT, *tiny(tmp_path, *options, tmp_path / "whole.json")], 2, "cuda")
        assert whole.status == 0, whole.output
        (tmp_path / "latest").write_text("step-4\n")
        resumed = launch([SCRIPT, *tiny(tmp_path, "--resume", *options, tmp_path / "resumed.json")], 2, "cuda")
        assert resumed.status == 0, resumed.output
        assert metrics(tmp_path / "whole.json")["device"] == "cuda"
        assert metrics(tmp_path / "resumed.json")["losses"] == metrics(tmp_path / "whole.json")["losses"][4:]
