"""The benchmark of experts runs on CPU in every mode; all modes compute the same."""

import math
from pathlib import Path

from test_benchmark_script import SCRIPT, run_script

TOKENS = [16, 24]


def test_every_mode_and_size_is_measured(tmp_path: Path) -> None:
    script = SCRIPT.with_name("moe_block.py")
    sizes = ("--preset=tiny", "--steps=2", "--warmup=2", "--tokens", *map(str, TOKENS))
    status, output, content = run_script(tmp_path, *sizes, processes=2, script=script)
    assert status == 0, output
    assert content["errors"] == {}
    results = content["results"]
    modes = ["compute", "gtp", "fsdp2"]
    assert [(r["mode"], r["tokens"]) for r in results] == [(mode, tokens) for mode in modes for tokens in TOKENS]
    for tokens in TOKENS:
        losses = [r["loss"] for r in results if r["tokens"] == tokens]
        assert all(math.isclose(loss, losses[0], rel_tol=1e-2) for loss in losses), losses
    for record in results:
        assert len(record["samples_ms"]) == 2
        assert record["ms"] > 0
        assert record["tflops"] > 0
    assert "examples/benchmarks/moe_block.py --device=cpu" in content["environment"]["command"]
    assert output.count("| gtp ") == len(TOKENS)
