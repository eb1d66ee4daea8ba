"""The command of the planner: what people see, what they paste, and what happens with bad input."""

import ast
import json
import re
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from script_jobs import run_forked

import dtensor_gtp
from dtensor_gtp.planner.api import _ranking
from dtensor_gtp.planner.command_line import main
from dtensor_gtp.planner.errors import PlanError
from dtensor_gtp.planner.job import Layout
from dtensor_gtp.planner.machine import load_machine, machine_of, preset_names
from dtensor_gtp.planner.search import Refused

CONFIG = {
    **{"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 4096},
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Status, output and errors of the command. A text of several words is several arguments."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main([word for argument in arguments for word in argument.split(" ")])
        except SystemExit as error:
            status = int(error.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def answer(run: Any) -> Callable[..., str]:
    """The output of a command that succeeds."""

    def answer(*arguments: str) -> str:
        status, out, _ = run(*arguments)
        assert status == 0
        return str(out)

    return answer


@pytest.fixture
def refuse(run: Any) -> Callable[..., None]:
    """Bad input is one line, and status 2."""

    def refuse(message: str, *arguments: str) -> None:
        status, out, err = run(*arguments)
        assert (status, out) == (2, "")
        assert err.startswith("gtp-plan: ")
        assert err.count("\n") == 1
        assert re.search(message, err), err

    return refuse


def test_the_answer_is_at_most_100_columns_wide(config: str, answer: Any) -> None:
    out = answer(config, "--gpus 16 --seq-len 1024 --global-batch 32 --checkpointing none")
    assert max(map(len, out.splitlines())) <= 100
    for word in ("not calibrated", "gtp", "MFU", "optimizer", "activations", "reserve", "Refused", "schedule:"):
        assert word in out
    assert re.search(r"^\d+ layouts, the \d+ most promising simulated in ", out, re.MULTILINE)


def test_everything_as_json(config: str, answer: Any) -> None:
    record = json.loads(answer(config, "--gpus 8 --seq-len 512 --pp 1 --json -"))
    best = record["answers"][0]
    low, high = best["step_ms_range"]
    assert low < best["step_ms"] < high
    exposed = sum(best["exposed_ms"].values())
    assert best["compute_ms"] + exposed == pytest.approx(best["step_ms"])
    assert best["memory_bytes"]["total"] <= best["capacity_bytes"]
    assert best["schedule"]["prefetch_nbytes"] > 0
    assert record["is_calibrated"] is False


def test_a_timeline_as_a_picture(config: str, run: Any, tmp_path: Path) -> None:
    status, _, err = run(config, "--gpus 8 --seq-len 512 --gtp 8 --explain", str(tmp_path / "step"))
    assert status == 0
    assert err.count("wrote") == 1
    root = ElementTree.fromstring((tmp_path / "step.svg").read_text())
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(title.startswith("gather layers.0") for title in titles)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"milliseconds", "gather", "compute"} <= set(texts)
    assert sum(bool(re.fullmatch(r"[\d.]+", text)) for text in texts) >= 5  # ticks of the time axis
    assert any(title.startswith("reduce") for title in titles)


def test_code_to_paste_is_python(config: str, answer: Any) -> None:
    """test_planner_code.py runs it, of other layouts too."""
    out = answer(config, "--gpus 8 --seq-len 512 --code --gtp 8")
    code = out[out.index("import torch") :]
    ast.parse(code)
    assert "gtp_shard(model, mesh.weights, mp_policy=policy" in code
    assert "torchrun --nproc-per-node 8 train.py" in code


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--pp 2", "pp 2: how the model is cut into stages is yours"),
        ("--cp 2 --pp 1", "cp 2: attention exchanges keys"),
        ("--recipe float8_tensorwise --checkpointing selective --pp 1 --cp 1", "selective checkpointing of"),
    ],
)
def test_what_it_cannot_write_it_says(config: str, answer: Any, options: str, reason: str) -> None:
    out = answer(config, "--gpus 8 --seq-len 512 --code", options)
    assert f"#   {reason}" in out
    assert "gtp_shard(" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "plan expects a model and --gpus N"),
        (("llama3-9b --gpus 8",), "model expects one of .*, but got 'llama3-9b'. Name one of them."),
        (("llama3-8b --gpus 8 --machine h300",), "machine expects one of a100, .*, but got 'h300'. Name one."),
        (("llama3-8b --gpus 8 --gtp 8 --global-batch 9",), "do not divide 9. Pass other sizes."),
        (("llama3-8b --gpus 8 --top 0",), "plan expects --top of at least 1"),
        (("llama3-8b --gpus eight",), "argument --gpus: invalid int value: 'eight'"),
        (("missing/config.json --gpus 8",), "model expects a config.json, but missing/config.json cannot be read"),
        (("llama3-8b --gpus 8 --machine a100 --recipe float8_tensorwise",), "has no peak for GEMMs"),
        (("x" * 5000 + ".json", "--gpus 8"), "model expects a config.json, but x.* cannot be read"),
        (("llama3-8b --gpus 8 --gpu\x1b[2J",), r"unrecognized arguments: --gpu\\x1b\[2J"),
        (("--calibrate no/such/folder.json",), "calibrate cannot write no/such/folder.json"),
        (("--calibrate /",), "calibrate cannot write /"),
        (("llama3-8b --gpus 8 --tokens nan",), "plan expects --tokens above 0, but got nan"),
        (("llama3-8b --gpus 8 --tokens -1",), "plan expects --tokens above 0, but got -1"),
        (("builtins:exit --gpus 8",), "builtins:exit raised SystemExit"),
        (("llama3-8b --gpus 8 --explain /",), "expects the name of files to write as --explain"),
        (("llama3-8b --gpus 8 --explain", ""), "expects the name of files to write as --explain"),
    ],
)
def test_bad_input_is_one_line_and_status_2(refuse: Any, arguments: tuple[str, ...], message: str) -> None:
    refuse(message, *arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "model expects hidden_size in .*, but there is none. Add it."),
        ({"model_type": None}, "model expects a config.json with a model_type"),
        ({"hidden_size": "512"}, "expects an integer of at least 1 as dim, but .* has '512'"),
        ({"hidden_size": 1e15}, "expects an integer of at least 1 as dim"),
        ({"hidden_size": 10**15}, "expects at most 2147483648 as dim"),
        ({"vocab_size": 1e300}, "expects an integer of at least 2 as vocab_size"),
        ({"num_hidden_layers": 10**10}, "expects at most 10000 as num_hidden_layers"),
        ({"num_hidden_layers": 10**5}, "expects at most 10000 as num_hidden_layers"),
        ({"model_type": "gpt2", "n_layer": 10**10}, "expects at most 10000 as n_layer"),
        ({"model_type": ["llama"]}, "expects a text as model_type"),
        ({"_name_or_path": {"a": 1}}, "expects a text as _name_or_path"),
        ({"layer_types": "full_attention"}, "expects a list as layer_types"),
        ({"model_type": {}}, "expects a text as model_type"),
        ({"num_attention_heads": [8]}, "as heads"),
        ({"num_key_value_heads": 0}, "expects an integer of at least 1 as kv_heads, but .* has 0. Mend it."),
        ({"num_key_value_heads": 3}, "model expects kv_heads to divide heads, but .* has 3 and 8."),
        ({"num_local_experts": 4}, "model expects experts_per_token from 1 to 4, but .* has 0."),
        ({"head_dim": 0}, "expects an integer of at least 1 as head_dim, but .* has 0"),
        ({"num_local_experts": {}}, "expects an integer of at least 0 as experts"),
        ({"tie_word_embeddings": "no"}, "expects true or false as tie_word_embeddings, but .* has 'no'"),
        ({"hidden_size": "\x1b[2J"}, r"as dim, but .* has '\\x1b\[2J'"),
    ],
)
def test_bad_configurations_are_one_line(config: str, refuse: Any, changes: dict[str, Any], message: str) -> None:
    content = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    Path(config).write_text(json.dumps(content))
    refuse(message, config, "--gpus 8")


def test_deep_json_is_one_line(refuse: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    refuse("model expects a .*cannot be read", f"{path} --gpus 8")
    refuse("machine expects a .*cannot be read", f"llama3-8b --machine {path} --gpus 8")


@pytest.mark.parametrize("text", [":f", ".x:f", "broken_at_import:f", "model\x1b[2J"])
def test_models_that_cannot_be_imported_are_one_line(
    refuse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "broken_at_import.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    refuse("cannot be imported|expects one of", text, "--gpus 8")


@pytest.mark.parametrize("option", ["--explain", "--json"])
def test_names_that_no_file_can_have(config: str, run: Any, option: str) -> None:
    status, _, err = run(config, "--gpus 8 --gtp 8 --seq-len 512", option, "a\0b")
    assert status == 2
    assert err.startswith("gtp-plan: plan cannot write a\\x00b")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hbm_gb_s": 10**400}, "machine expects a number from 0.1 to 100000 as hbm_gb_s"),
        ({"peak_tflops": {"bf16": float("nan")}}, "machine expects a number .* as peak_tflops.bf16"),
        ({"gemm": [[10**400, 0.5]]}, "machine"),
        ({"like": "\x1b[2J"}, r"as like, but .* has '\\x1b\[2J'"),
        ({"like": "h300"}, "machine expects one of a100, .* as like, but .* has 'h300'. Name one."),
        ({"version": 0}, "machine expects a file of version 2, but .* is of version 0. Write it anew by --calibrate."),
        ({"hbm_gb_s": -1}, "machine expects a number from 0.1 to 100000 as hbm_gb_s, but .* has -1. Mend the file."),
        ({"hbm_gb_s": True}, "machine expects a number .* as hbm_gb_s, but .* has True"),
        ({"speed": 1}, "machine has no field speed, but .* does"),
        ({"fast": {"gb_s": 1}}, "machine expects a field fast..*, but .* has none. Add it."),
        ({"gpus_per_host": 9}, "machine expects gpus_per_host of at most gpus_per_domain, but .* has 9 and 8"),
        ({"peak_tflops": {"float8": 10}}, "machine expects peak_tflops.bf16, but .* has no such field"),
        ({"peak_tflops": {"bf17": 10}}, "machine has no field .*peak_tflops.bf17"),
    ],
)
def test_bad_files_of_machines_are_one_line(refuse: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(json.loads(load_machine("h100").as_json()) | changes))
    refuse(message, f"llama3-8b --gpus 8 --machine {path}")


def test_names_of_others_do_not_reach_the_terminal(config: str, run: Any) -> None:
    Path(config).write_text(json.dumps(CONFIG | {"_name_or_path": "a\x1b[2Jb\nc"}))
    _, out, err = run(config, "--gpus 8 --gtp 8 --seq-len 1024")
    assert "\x1b" not in out + err
    assert "a\\x1b[2Jb\\nc" in out


def test_what_to_change_if_nothing_fits(config: str, run: Any, tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(json.loads(load_machine("h100").as_json()) | {"memory_gib": 0.7, "reserve_gib": 0.0}))
    Path(config).write_text(json.dumps(CONFIG | {"num_hidden_layers": 24}))
    status, out, _ = run(config, f"--gpus 2 --seq-len 4096 --machine {path} --checkpointing none")
    assert status == 1
    assert "does not fit by" in out
    assert "--checkpointing full: fits" in out or "--gpus" in out


# --- machines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_presets_name_their_sources_and_survive_a_round_trip(name: str) -> None:
    machine = load_machine(name)
    assert not machine.is_calibrated
    assert any("http" in source for source in machine.sources.values())
    assert machine_of(json.loads(machine.as_json()), "it") == machine


def test_a_machine_like_a_preset_names_what_is_different() -> None:
    h100 = load_machine("h100")
    found = machine_of({"version": 2, "like": "h100", "name": "mine", "network": {"gb_s": 25}}, "it")
    assert found.network.gb_s == 25
    assert found.network.share == h100.network.share
    assert (found.name, found.compute, found.is_calibrated) == ("mine", h100.compute, False)


# --- the name ---------------------------------------------------------------------------------------------------------


def test_power_network_and_days(config: str, answer: Any) -> None:
    out = answer(config, "--gpus 16 --seq-len 512 --gtp 16 --tokens 1e9")
    found = re.search(r"1e\+09 tokens: ([\d,]+) steps, ([\d.]+) days \(.*\), ([\d,]+) GPU-hours", out)
    assert int(found[1].replace(",", "")) == round(1e9 / (16 * 512))
    assert "fully_shard in the place of gtp_shard" in out
    machine = load_machine("h100")
    less = machine.with_limits(watts=350, network_gb_s=25)
    assert less.peak_tflops["bf16"] == machine.peak_tflops["bf16"] / 2
    assert less.network.gb_s == 25
    with pytest.raises(PlanError, match="machine expects up to 700 watts"):
        machine.with_limits(watts=900)


def test_no_ground_is_no_number(config: str, answer: Any) -> None:
    out = answer(config, "--gpus 8 --seq-len 512 --machine rtx-pro-6000 --gtp 8")
    assert "not known" in out
    assert "measure it by --calibrate" in out
    assert "ms" not in out.split("1: gtp 8")[1].split("memory of")[0]


def test_tokens_that_compute_waits_for_name_the_option(answer: Any) -> None:
    arguments = "mixtral-8x7b --gpus 16 --seq-len 1024 --gtp 16 --ep 8 --expert-gtp 2 --top 1 --machine h200"
    rows = answer(arguments)
    assert "--dispatch hosts or hidden" in rows
    assert max(map(len, rows.splitlines())) <= 100
    hidden = answer(arguments, "--dispatch hidden --global-batch 64")
    assert "1: gtp 16, ep 8, expert_gtp 2" in hidden
    assert "--dispatch" not in hidden


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_recipe_without_gemms_says_so(config: str, answer: Any, recipe: str) -> None:
    out = answer(config, f"--gpus 8 --gtp 8 --seq-len 512 --machine b200 --recipe {recipe}")
    assert f"{recipe}: GEMMs are in bf16" in out


@pytest.mark.parametrize(
    "model", ["llama3-70b --cp 4 --pp 2 --gtp 8 --tp 4", "mixtral-8x7b --cp 4 --tp 4 --pp 2 --ep 8 --expert-gtp 4"]
)
def test_long_contexts_and_experts_are_wrapped_and_not_cut(answer: Any, model: str) -> None:
    arguments = "--gpus 256 --seq-len 131072 --global-batch 64 --top 3 --micro-batch 1 --checkpointing full"
    out = answer(model, arguments)
    assert max(map(len, out.splitlines())) <= 100
    text = " ".join(out.split())
    assert re.search(r"into each GPU in a step: (\w+ [\d.]+ [KMGT]iB(, )?)+ schedule: ", text)


def test_long_names_are_wrapped_and_not_cut() -> None:
    """Reasons with the longest layouts, and a table of these."""
    result = dtensor_gtp.plan("llama3-8b", gpus=8, fixed={"gtp": 8, "micro_batch": 1}, checkpointing="full")
    sizes = {"pp": 16, "replicate": 128, "cp": 16, "gtp": 128, "tp": 16, "ep": 128, "expert_gtp": 16}
    layout = Layout(**sizes, micro_batch=16, checkpoint="full", keep=True)
    lines = str(replace(result, refused=(Refused("why", 10**6, layout),))).splitlines()
    table = _ranking((replace(result.best, layout=layout, ground="measure it"), result.best))
    assert max(map(len, [*lines, *table])) <= 100
    assert f"1000000 why (e.g. {layout.describe()})" in " ".join(" ".join(lines).split())


def test_the_name_is_a_function_and_a_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dtensor_gtp.plan

    assert dtensor_gtp.plan is sys.modules["dtensor_gtp.plan"]  # importing the module leaves the function in its place
    assert dtensor_gtp.plan.__name__ == "plan"
    monkeypatch.setattr(sys, "argv", ["gtp-plan"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(Path(dtensor_gtp.__file__).with_name("plan.py")), run_name="__main__")
    assert capsys.readouterr().err.count("\n") == 1


def test_importing_the_package_loads_no_planner(tmp_path: Path) -> None:
    script = tmp_path / "imports.py"  # in a process that has imported the package, and nothing of the planner
    code = (
        "import sys, dtensor_gtp\n"
        "loaded = [name for name in sys.modules if name.startswith('dtensor_gtp.plan')]\n"
        "assert not loaded, loaded\n"
        "from dtensor_gtp import PlanResult, plan\n"
        "assert callable(plan) and PlanResult.__name__ == 'PlanResult'\n"
        "import dtensor_gtp.plan\n"
        "assert dtensor_gtp.plan is plan\n"
    )
    script.write_text(code)
    result = run_forked([script], None)
    assert result.status == 0, result.output


def test_plan_from_python(config: str) -> None:
    seen = []
    result = dtensor_gtp.plan(
        config, "h200", gpus=4, seq_len=512, checkpointing="none", report=lambda *numbers: seen.append(numbers)
    )
    assert result.best is result.answers[0]
    assert len(seen) == result.num_simulated
    assert str(result).startswith("test_plan_from_python0 (") or "on 4 x H200" in str(result)
    assert "gtp_shard(" in dtensor_gtp.plan(config, gpus=4, seq_len=512, fixed={"gtp": 4}).code()
    with pytest.raises(PlanError, match="plan got other arguments than a job has"):
        dtensor_gtp.plan(config, gpus=4, gpu=4)
