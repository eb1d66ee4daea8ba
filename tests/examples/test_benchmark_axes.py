"""The benchmark of mesh axes runs on CPU in every mode, and all modes that see the same data compute the same."""

import math
from pathlib import Path

from script_jobs import run_forked
from test_benchmark_script import SCRIPT, run_script

AXES_SCRIPT = SCRIPT.with_name("mesh_axes.py")
ALL_DATA = ["fsdp2", "gtp", "hsdp", "replicate", "shard_optimizer"]
TENSOR_PARALLEL = ["fsdp2-tp", "tp"]  # half as many sequences
EXPERTS = ["fsdp2-moe", "gtp-moe", "ep"]  # another model


def test_every_mode_is_measured(tmp_path: Path) -> None:
    arguments = ("--preset=tiny", "--seq-len=32", "--steps=1", "--warmup=1")
    status, output, content = run_script(tmp_path, *arguments, processes=4, script=AXES_SCRIPT, forked=True)
    assert status == 0, output
    results = {result["mode"]: result for result in content["results"]}
    assert list(results) == [*ALL_DATA, *TENSOR_PARALLEL, *EXPERTS]
    for modes in (ALL_DATA, TENSOR_PARALLEL, EXPERTS):
        losses = [results[mode]["loss"] for mode in modes]
        assert all(math.isclose(loss, losses[0], rel_tol=1e-3) for loss in losses), losses
    assert all(result["ms"] > 0 and result["step_ms"] > 0 for result in results.values())
    assert "examples/benchmarks/mesh_axes.py --device=cpu" in content["environment"]["command"]


def test_an_odd_number_of_processes_is_refused(tmp_path: Path) -> None:
    job = run_forked([AXES_SCRIPT, "--device=cpu", "--preset=tiny"], None, cwd=tmp_path)
    assert job.status == 1
    assert "mesh_axes expects an even number of processes, but got 1." in job.output
