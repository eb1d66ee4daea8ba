"""The benchmark of experts runs on CPU in every mode; all modes compute the same, and what it derives is right."""

import math
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from test_benchmark_script import SCRIPT, run_script

MOE_SCRIPT = SCRIPT.with_name("moe_block.py")
TOKENS = [16, 24]
MODES = ["compute", "compute-buffer", "gtp", "gtp-rows-graph", "fsdp2", "fsdp2-rows-kept"]


@pytest.mark.long
def test_every_mode_and_size_is_measured(tmp_path: Path) -> None:
    sizes = ("--preset=tiny", "--steps=2", "--warmup=2", "--tokens", *map(str, TOKENS), "--expert-gtp=2")
    arguments = (*sizes, "--trace=traces", "--modes", *MODES)
    output, content = run_script(tmp_path, *arguments, processes=2, script=MOE_SCRIPT)
    assert (tmp_path / "traces" / "tiny.gtp2.gtp.T16.json").exists()
    assert len(list(tmp_path.glob("traces/*.json"))) == len(MODES) * len(TOKENS)
    assert content["errors"] == {}
    assert content["skipped"] == []
    results = content["results"]
    assert [(r["mode"], r["tokens"]) for r in results] == [(mode, tokens) for mode in MODES for tokens in TOKENS]
    for tokens in TOKENS:
        losses = [r["loss"] for r in results if r["tokens"] == tokens]
        assert all(math.isclose(loss, losses[0], rel_tol=1e-2) for loss in losses), losses
    for record in results:
        assert [len(samples) for samples in record["samples_ms"].values()] == [2, 2]
        assert record["ms"] > 0
        assert record["tflops"] > 0
    assert "examples/benchmarks/moe_block.py --device=cpu" in content["environment"]["command"]
    assert output.count("| gtp ") == len(TOKENS)

    blocks = content["blocks"]
    assert [(r["ep"], r["expert_gtp"], r["tokens"]) for r in blocks] == [(1, 2, 16), (1, 2, 24), (2, 1, 16)]
    assert all(r["is_bit_equal"] and r["is_rerouted"] for r in blocks), blocks
    assert not any(r["is_captured"] for r in blocks), "a CPU has no graphs"


def test_what_has_no_time_left_is_named(tmp_path: Path) -> None:
    arguments = ("--preset=tiny", "--modes", "compute", "--tokens=8", "--no-block", "--budget=-1")
    output, content = run_script(tmp_path, *arguments, script=MOE_SCRIPT)
    assert content["skipped"] == ["tiny, expert_gtp=1, compute"]
    assert "no time for: tiny, expert_gtp=1, compute" in output


def test_schedule_is_that_of_the_gtp_modes_and_recorded(tmp_path: Path) -> None:
    schedule = ("--schedule", "prefetch_nbytes=0", "keep_nbytes=0", "reduce_scatter=all_to_all")
    sizes = ("--preset=tiny", "--tokens=16", "--expert-gtp=2", "--steps=1", "--warmup=1")
    arguments = (*sizes, *schedule, "--modes", "compute", "gtp", "gtp-rows-kept")
    output, content = run_script(tmp_path, *arguments, processes=2, script=MOE_SCRIPT)
    fields = {"prefetch_nbytes": 0, "keep_nbytes": 0, "reduce_scatter": "all_to_all"}
    assert content["settings"]["schedule"] == fields
    assert shlex.join(schedule) in content["environment"]["command"]
    header = output[: output.index(": done after")]
    assert "schedule of the gtp modes: prefetch_nbytes=0, keep_nbytes=0, reduce_scatter='all_to_all'" in header
    losses = [r["loss"] for r in content["results"]]
    assert losses == [pytest.approx(losses[0], rel=1e-2)] * 3
    assert all(r["is_bit_equal"] for r in content["blocks"]), content["blocks"]


@pytest.mark.parametrize("field", ["prefetch=1", "gather_backend=copy_engine"], ids=["unknown", "refused"])
def test_a_bad_schedule_fails_in_each_gtp_mode_as_in_train_step(tmp_path: Path, field: str) -> None:
    arguments = ("--preset=tiny", "--steps=1", "--warmup=1", "--schedule", field)
    _, peer = run_script(
        tmp_path, *arguments, "--modes", "gtp-fp32", "--seq-lens=16", "--no-full-step", is_failing=True
    )
    error = peer["errors"]["gtp-fp32"]
    assert field.partition("=")[0] in error
    modes = ("compute", "gtp", "gtp-rows-graph", "gtp-kept", "fsdp2")
    _, content = run_script(tmp_path, *arguments, "--tokens=16", "--modes", *modes, script=MOE_SCRIPT, is_failing=True)
    assert [r["mode"] for r in content["results"]] == ["compute", "fsdp2"]
    labels = [*(f"tiny, expert_gtp=1, {mode}" for mode in modes[1:-1]), "tiny, block, ep=1, 16 tokens"]
    assert content["errors"] == dict.fromkeys(labels, error)


def test_ratios_are_to_compute_and_to_the_faster_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MOE_SCRIPT.parent))
    script = import_module("moe_block")

    def record(mode: str, ms: float, further: float, tokens: int = 8) -> dict[str, object]:
        where = {"preset": "tiny", "tokens": tokens, "ep": 1, "expert_gtp": 2}
        return {**where, "mode": mode, "ms": ms, "ms_per_further_block": further}

    records = [
        record("compute", 9.0, 2.0),
        record("gtp", 10.0, 2.5),
        record("gtp-rows", 12.0, -1.0),
        record("fsdp2", 20.0, 5.0),
        record("fsdp2-rows", 15.0, 6.0),
        record("gtp", 1.0, 1.0, tokens=16),
    ]
    gtp, whole, alone = (script.with_ratios(records)[number] for number in (1, 2, 5))
    keys = ("of_compute", "x_fsdp2", "of_compute_further", "x_fsdp2_further")
    assert [gtp[key] for key in keys] == [0.9, 1.5, 0.8, 2.0]
    assert [whole[key] for key in keys] == [0.75, 1.25, None, None], "a negative difference says nothing"
    assert [alone[key] for key in keys] == [None] * 4
    (line,) = script.goals(script.with_ratios(records[:5]))
    assert "of_compute 0.90 (gtp, stack; goal 0.9 reached)" in line
    assert "of_compute 0.80 (gtp, further block; goal 0.9 MISSED)" in line
    assert "x_fsdp2 2.00 (gtp, further block; goal 1.2 reached)" in line
