"""The experiment with GEMMs that take rows as they arrive runs on CPU, and each way computes what whole GEMMs do."""

from pathlib import Path

from test_benchmark_script import SCRIPT, run_script

WAYS = ("gemm", "gather_gemm", "by_parts", "parts_alone")


def test_every_way_is_measured(tmp_path: Path) -> None:
    script = SCRIPT.with_name("gather_gemm.py")
    status, output, content = run_script(tmp_path, "--preset=tiny", "--steps=2", processes=2, script=script)
    assert status == 0, output
    layers, chains = content["layers"], content["chains"]
    assert [r["shapes"] for r in layers] == [[[24, 8]], [[8, 24]]]
    assert [len(r["shapes"]) for r in chains] == [4]
    for record in (*layers, *chains):
        assert all(record[f"{way}_ms"] > 0 and record[f"{way}_error"] < 0.02 for way in WAYS)
        assert record["gather_gemm_has_same_bits"], "the same GEMM, of what was gathered"
    assert {(r["fused_ms"], r["fused_missing"]) for r in layers} == {(None, "needs GPUs")}
    assert output.count("| n/a ") == len(layers)
    assert "| 2 x (24x8, 8x24) |" in output
