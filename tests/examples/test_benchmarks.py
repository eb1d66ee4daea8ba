"""The benchmarks of mesh axes, gathered GEMMs, unequal replicas and casts run on CPU, and write what is true."""

import math
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from script_jobs import run_forked
from test_benchmark_script import SCRIPT, run_script

MESH_AXES = SCRIPT.with_name("mesh_axes.py")
ALL_DATA = ["fsdp2", "gtp", "hsdp", "replicate", "shard_optimizer"]
TENSOR_PARALLEL = ["fsdp2-tp", "tp"]  # half as many sequences
EXPERTS = ["fsdp2-moe", "gtp-moe", "ep"]  # another model
WAYS = ("gemm", "gather_gemm", "by_parts", "parts_alone")


def test_mesh_axes_in_every_mode(tmp_path: Path) -> None:
    arguments = ("--preset=tiny", "--seq-len=16", "--steps=1", "--warmup=0")
    _, content = run_script(tmp_path, *arguments, processes=4, script=MESH_AXES)
    results = {result["mode"]: result for result in content["results"]}
    assert list(results) == [*ALL_DATA, *TENSOR_PARALLEL, *EXPERTS]
    for modes in (ALL_DATA, TENSOR_PARALLEL, EXPERTS):
        losses = [results[mode]["loss"] for mode in modes]
        assert all(math.isclose(loss, losses[0], rel_tol=1e-3) for loss in losses), losses
    assert all(result["ms"] > 0 and result["step_ms"] > 0 for result in results.values())
    assert "examples/benchmarks/mesh_axes.py --device=cpu" in content["environment"]["command"]


def test_mesh_axes_refuse_an_odd_number_of_processes(tmp_path: Path) -> None:
    job = run_forked([MESH_AXES, "--device=cpu", "--preset=tiny"], None, cwd=tmp_path)
    assert job.status == 1
    assert "mesh_axes expects an even number of processes, but got 1." in job.output


def test_gemms_that_take_rows_as_they_arrive(tmp_path: Path) -> None:
    options = ("--preset=tiny", "--steps=2", "--tokens", "4", "6")
    output, content = run_script(tmp_path, *options, processes=2, script=SCRIPT.with_name("gather_gemm.py"))
    layers, chains = content["layers"], content["chains"]
    assert [(r["shapes"], r["tokens"]) for r in layers] == [([s], t) for s in ([24, 8], [8, 24]) for t in (4, 6)]
    assert [(len(r["shapes"]), r["tokens"]) for r in chains] == [(4, 4), (4, 6)]
    for record in (*layers, *chains):
        assert all(record[f"{way}_ms"] > 0 and record[f"{way}_error"] < 0.02 for way in WAYS)
        assert record["gather_gemm_has_same_bits"], "the same GEMM, of what was gathered"
    assert {(r["fused_ms"], r["fused_missing"]) for r in layers} == {(None, "needs GPUs")}
    assert output.count("| n/a ") == len(layers)
    assert "| 2 x (24x8, 8x24) |" in output
    measured, _, _ = output.partition("\n| ")  # before the tables: what was measured, one by one
    assert measured.count("layers: 8x24; T: 6; GEMM: ") == 1
    assert measured.count("; by parts: ") == len(layers) + len(chains)


def test_the_module_of_the_fused_op_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether something else imports it depends on the version of torch."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script, ops = import_module("gather_gemm"), SimpleNamespace()
    assert script.fused_op() is not None
    monkeypatch.setattr(torch.ops, "symm_mem", ops)
    assert script.fused_op() is None

    def imported(name: str) -> None:
        assert name == "torch.distributed._symmetric_memory"
        ops.fused_all_gather_matmul = "registered"
        raise ImportError  # a torch without a backend

    monkeypatch.setattr(script, "import_module", imported)
    assert script.fused_op() == "registered"


@pytest.mark.long
def test_elastic_replicas_and_their_recovery(tmp_path: Path) -> None:
    """The state comes back bit by bit."""
    sizes = ("--preset=tiny", "--steps=2", "--warmup=1", "--rounds=1")
    output, content = run_script(tmp_path, *sizes, processes=4, script=SCRIPT.with_name("elastic_step.py"))
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


def test_cast_speed_has_a_row_for_each_cast_and_layer(tmp_path: Path) -> None:
    options = ("--tiny", "--repeats=1", "--compiled=none", "--recipes", "float8_tensorwise", "mxfp8")
    output, content = run_script(tmp_path, *options, script=SCRIPT.with_name("cast_speed.py"))
    names = {(record["recipe"], record["cast"]) for record in content["casts"]}
    assert names >= {("float8_tensorwise", "both for wgrad"), ("mxfp8", "shard: quantize, columnwise")}
    assert all(isinstance(record["reference"]["ms"], float) for record in content["casts"])
    assert {record["recipe"] for record in content["layers"]} == {"bf16", "float8_tensorwise"}
    assert "float8_tensorwise" in output
