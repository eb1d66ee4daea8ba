"""The benchmark script runs on CPU in every mode, and what it writes is complete."""

import importlib.util
import json
import math
import textwrap
from pathlib import Path
from typing import Any

import pytest
from script_jobs import run_forked
from test_train_llama import launch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "benchmarks" / "train_step.py"
MODES = ["gtp", "compute", "fsdp2-fp32", "fsdp2-bf16", "gtp-fp32", "gtp-bf16", "gtp-bf16-lookup", "gtp-bf16-exchange"]
PHASES = ["forward+backward", "full step"]
SEQ_LENS = [16, 32]
SMALL = ("--preset=tiny", "--seq-lens=16", "--steps=1", "--warmup=1", "--no-full-step")


def run_script(
    directory: Path, *arguments: str, processes: int | None = None, script: Path = SCRIPT, is_failing: bool = False
) -> tuple[str, dict[str, Any]]:
    """Output and JSON of the script, in forked processes."""
    job = run_forked([script, *outputs(directory), *arguments], processes, cwd=directory)
    assert (job.status != 0) == is_failing, job.output
    return job.output, written(directory, job.output)


def outputs(directory: Path) -> list[str]:
    return ["--device=cpu", f"--json={directory / 'result.json'}"]


def written(directory: Path, output: str) -> dict[str, Any]:
    result_file = directory / "result.json"
    assert result_file.exists(), output
    return json.loads(result_file.read_text())


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("benchmark")
    sizes = ("--preset=tiny", "--layers=1", "--seq-lens", *map(str, SEQ_LENS), "--steps=1", "--warmup=1")
    output, content = run_script(directory, *sizes, "--trace=traces", processes=2)
    assert len(list(directory.glob("traces/*.T16.json"))) == len(MODES)
    return output, content


def test_every_mode_length_and_phase_is_measured(everything: tuple[str, dict[str, Any]]) -> None:
    output, content = everything
    assert content["errors"] == {}
    measured = [(r["mode"], r["phase"], r["seq_len"]) for r in content["results"]]
    assert measured == [(mode, phase, seq_len) for mode in MODES for phase in PHASES for seq_len in SEQ_LENS]
    for record in content["results"]:
        assert len(record["samples_ms"]) == 1
        assert 0 < record["ms_min"] <= record["ms"] <= record["ms_max"] < math.inf
        assert record["tokens_per_s_per_gpu"] == pytest.approx(record["seq_len"] / record["ms"] * 1e3)
        assert record["peak_bytes"] is None, "CPU has no such counter"
        explained = ("gtp", "gtp-fp32", "gtp-bf16", "gtp-bf16-lookup")
        assert (record["predicted_peak"] is not None) == (record["mode"] in explained)
        assert record["activations_bytes"] > 0
    table = [line.split("|") for line in output.splitlines() if line.startswith("| f")]
    assert len(table) == len(measured)
    assert all(cell.strip() for line in table for cell in line[1:-1])


def test_ratios_are_to_the_faster_fsdp2_and_to_compute(everything: tuple[str, dict[str, Any]]) -> None:
    times = {(r["mode"], r["phase"], r["seq_len"]): r["ms"] for r in everything[1]["results"]}
    for record in everything[1]["results"]:
        setting = record["phase"], record["seq_len"]
        fsdp2 = min(times["fsdp2-fp32", *setting], times["fsdp2-bf16", *setting])
        assert record["ratio_fsdp2"] == pytest.approx(record["ms"] / fsdp2)
        assert record["ratio_compute"] == pytest.approx(record["ms"] / times["compute", *setting])


def test_modes_compute_the_same_thing(everything: tuple[str, dict[str, Any]]) -> None:
    results = [r for r in everything[1]["results"] if r["phase"] == "forward+backward"]
    for seq_len in SEQ_LENS:
        records = {r["mode"]: r for r in results if r["seq_len"] == seq_len}
        losses = {mode: r["loss"] for mode, r in records.items()}
        # Its loss is float32, that of the others bf16, as their logits are.
        assert losses.pop("gtp-bf16-exchange") == pytest.approx(losses["compute"], rel=1e-2)
        assert losses == dict.fromkeys(MODES[:-1], pytest.approx(losses["compute"], rel=1e-5))
        assert records["compute"]["grad_norm"] is None
        norms = {mode: records[mode]["grad_norm"] for mode in MODES if mode != "compute"}
        assert norms == dict.fromkeys(norms, pytest.approx(norms["fsdp2-fp32"], rel=1e-3))


def test_the_run_can_be_repeated_from_what_is_written(everything: tuple[str, dict[str, Any]]) -> None:
    content = everything[1]
    environment = content["environment"]
    assert environment["world_size"] == 2
    assert environment["backend"] == "gloo"
    assert environment["command"].startswith("torchrun --nproc-per-node 2 examples/benchmarks/train_step.py ")
    assert "--preset=tiny" in environment["command"]
    assert all(environment[name] for name in ("date", "torch", "dtensor_gtp", "python", "device"))
    assert content["workload"]["config"]["num_layers"] == 1
    assert content["settings"]["steps"] == 1


@pytest.mark.long
def test_compiled_modes_compute_what_their_eager_modes_do(tmp_path: Path) -> None:
    """By Dynamo and AOTAutograd: the loops of Inductor, which the compiler of C++ takes long for, are not ours."""
    patch = f"""
        import functools, runpy, sys, torch
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
        sys.path.insert(0, {str(SCRIPT.parent)!r})
        runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
    """
    script = tmp_path / "train_step.py"
    script.write_text(textwrap.dedent(patch))
    modes = ("--modes", "compute", "gtp-fp32", "--compile")
    output, content = run_script(tmp_path, *modes, *SMALL, "--layers=1", script=script)
    records = {r["mode"]: r for r in content["results"]}
    assert list(records) == ["compute", "compute-compiled", "gtp-fp32", "gtp-fp32-compiled"]
    assert "x eager" in output
    for name, record in records.items():
        eager = records[name.removesuffix("-compiled")]
        assert record["loss"] == pytest.approx(eager["loss"], rel=1e-3)
        if eager["grad_norm"] is not None:
            assert record["grad_norm"] == pytest.approx(eager["grad_norm"], rel=1e-2)
        expected = None if record is eager else pytest.approx(record["ms"] / eager["ms"])
        assert record["ratio_eager"] == expected


def test_recipes_are_measured_beside_their_peers(tmp_path: Path) -> None:
    recipes = ("--recipe", "float8_tensorwise", "float8_rowwise:float8", "nvfp4")
    _, content = run_script(tmp_path, "--modes", "gtp-fp32", *recipes, *SMALL, "--layers=1")
    records = {r["mode"]: r for r in content["results"]}
    peers = ["torchao-fp32"] if importlib.util.find_spec("torchao") else []
    names = [f"gtp-fp32@{name}" for name in recipes[1:]]
    assert list(records) == [*peers, "gtp-fp32", *names]
    plain = records.pop("gtp-fp32")
    for name, record in records.items():
        # The same tokens and weights, rounded: close to, but not the loss without a recipe.
        assert record["loss"] == pytest.approx(plain["loss"], rel=0.05)
        assert name in peers or record["loss"] != plain["loss"]
        assert (record["ratio_torchao"] is not None) == (bool(peers) and name in names)


def test_a_mode_named_in_full_is_measured_alone(tmp_path: Path) -> None:
    modes = ["fsdp2-fp32", "fsdp2-bf16-tuned", "fsdp2-bf16-kept", "gtp-fp32@float8_tensorwise:dequantize"]
    sweep = ("--sweep", "prefetch_nbytes=0", "wgrad_first=False")
    output, content = run_script(tmp_path, "--modes", *modes, *SMALL, "--layers=3", *sweep)
    assert [one["field"] for one in content["sweep"]] == list(sweep[1:])
    for one in content["sweep"]:
        (again,) = one["results"]
        assert (again["mode"], again["loss"]) == (modes[3], content["results"][3]["loss"])
        ratio = again["ms"] / content["results"][3]["ms"]
        cells = [cell.strip() for line in output.splitlines() if one["field"] in line for cell in line.split("|")]
        assert f"{ratio:.3f}" in cells
    assert [one["mode"] for one in content["results"]] == modes
    plain, *others, named = content["results"]
    for other in others:
        assert other["loss"] == pytest.approx(plain["loss"], rel=1e-3)
        assert other["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-2)
    assert named["ratio_fsdp2"] == pytest.approx(named["ms"] / min(one["ms"] for one in (plain, *others)))


def test_a_failing_mode_leaves_the_others_alone(tmp_path: Path) -> None:
    modes = ("--modes", "gtp-fp32", "compute", "--prefetch-depth=-1")
    output, content = run_script(tmp_path, *modes, *SMALL, is_failing=True)
    assert [r["mode"] for r in content["results"]] == ["compute"]
    assert list(content["errors"]) == ["gtp-fp32"]
    assert "Schedule expects prefetch_depth >= 0, but got -1" in content["errors"]["gtp-fp32"]
    assert "gtp-fp32 FAILED" in output


def test_host_time_counts_the_gathers_of_each_layer(tmp_path: Path) -> None:
    _, content = run_script(tmp_path, "--host-time", "--steps=5")
    assert content["environment"]["backend"] == "fake"
    layers = content["settings"]["layers"]
    assert {r["library"] for r in content["results"]} == {"gtp", "fsdp2"}
    for record in content["results"]:
        counts = record["collectives_per_step"]
        # gtp keeps the last weight of the forward: it is the first of backward
        gathers = 2 * layers - (record["library"] == "gtp")
        assert (counts["all_gather"], counts["reduce_scatter"]) == (gathers, layers), record
        assert 0 < record["c10d_us"] < record["step_us"]
        expected = (record["step_us"] - record["plain_step_us"] - record["c10d_us"]) / (2 * layers)
        assert record["us_per_weight_use"] == pytest.approx(expected)


def test_what_is_left_without_a_wire(tmp_path: Path) -> None:
    arguments = ("--preset=tiny", "--seq-lens=16", "--steps=2", "--warmup=2", "--fake-ranks=4")
    _, content = run_script(tmp_path, "--modes", "compute", "gtp-bf16", *arguments)
    assert content["environment"]["backend"] == "fake"
    assert content["environment"]["world_size"] == 4
    measured = [(r["mode"], r["phase"], r["grad_norm"]) for r in content["results"]]
    assert measured == [(mode, "forward+backward", None) for mode in ("compute", "gtp-bf16")]


@pytest.mark.soak  # their functions run in forked processes, and another test starts a script by torchrun
@pytest.mark.parametrize(
    ("name", "processes", "arguments"),
    [
        ("train_step.py", 2, "--warmup=1 --seq-lens=16 --modes compute gtp-bf16 --no-full-step"),
        ("moe_block.py", 2, "--warmup=1 --tokens=16 --modes compute gtp --no-block"),
        ("gather_gemm.py", 2, "--tokens 4"),
        ("elastic_step.py", 4, "--warmup=1 --rounds=1"),
    ],
)
def test_torchrun_starts_each_script(name: str, processes: int, arguments: str, tmp_path: Path) -> None:
    options = ["--preset=tiny", "--steps=1", *arguments.split()]
    job = launch([SCRIPT.with_name(name), *outputs(tmp_path), *options], processes)
    assert job.status == 0, job.output
    assert written(tmp_path, job.output)["environment"]["world_size"] == processes


def test_an_unknown_mode_is_named() -> None:
    result = run_forked([SCRIPT, "--modes", "gpt"], None)
    assert result.status == 2
    assert "but got 'gpt'" in result.output
