"""The benchmark of unequal replicas runs on CPU: every mode is measured, and the state comes back bit by bit."""

import math
from pathlib import Path

import pytest
from test_benchmark_script import SCRIPT, run_script

SIZES = ("--preset=tiny", "--steps=2", "--warmup=1", "--rounds=1")


@pytest.mark.long
def test_every_mode_and_the_recovery_are_measured(tmp_path: Path) -> None:
    script = SCRIPT.with_name("elastic_step.py")
    status, output, content = run_script(tmp_path, *SIZES, processes=4, script=script, forked=True)
    assert status == 0, output
    assert content["errors"] == {}
    uniform, elastic, degraded = content["results"]
    assert [r["mode"] for r in content["results"]] == ["uniform", "elastic", "degraded"]
    assert [r["replicas"] for r in content["results"]] == [[2, 2], [2, 2], [2, 1]]
    assert [r["sequences"] for r in content["results"]] == [4, 4, 3]
    for record in content["results"]:
        assert len(record["samples_ms"]) == 2
        assert math.isclose(record["tokens_per_s"], record["sequences"] * 32 / record["ms"] * 1e3)
    # The same weights on the same batch; later the weights that were recovered.
    for key in ("loss", "grad_norm"):
        assert math.isclose(uniform[key], elastic[key], rel_tol=1e-2), content["results"]
    assert math.isclose(degraded["loss"], uniform["loss"], rel_tol=5e-2)

    recovery = content["recovery"]
    assert recovery["is_bit_equal"]
    model = recovery["state_bytes"]
    # The second replica held half of the state on the rank that is left, which receives the other half.
    assert 0.45 * model < recovery["moved_bytes"] == recovery["moved_bytes_of_fullest_rank"] < 0.55 * model
    assert set(recovery["seconds"]) == {"regroup", "rebuild", "transfer", "load", "transfer_again"}
    figures = content["figures"]
    assert math.isclose(figures["efficiency"], figures["throughput"] * 4 / 3)
    assert set(content["goals"]) == {"overhead", "efficiency", "recovery_s", "is_bit_equal"}
    assert output.count("| degraded ") == 1
