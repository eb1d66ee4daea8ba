"""The experiment with GEMMs that take rows as they arrive runs on CPU, and each way computes what whole GEMMs do."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_benchmark_script import SCRIPT, run_script

WAYS = ("gemm", "gather_gemm", "by_parts", "parts_alone")


def test_every_way_is_measured(tmp_path: Path) -> None:
    script = SCRIPT.with_name("gather_gemm.py")
    options = ("--preset=tiny", "--steps=2", "--tokens", "4", "6")
    status, output, content = run_script(tmp_path, *options, processes=2, script=script, forked=True)
    assert status == 0, output
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
