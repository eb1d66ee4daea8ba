"""Our kernels under compute-sanitizer, which comes with the CUDA toolkit: nothing is read or written beyond the
end of a tensor, before it is written, or by two threads at once in shared memory.

The tool instruments every kernel, and not every machine lets it: a minute or two for each tool, so only on demand.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("sanitize_kernels.py")
TOOL = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/local/cuda/bin")
FOUND = 77  # exit code: the script has succeeded, but the tool has found something

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(TOOL is None, reason="needs compute-sanitizer of the CUDA toolkit"),
]


def sanitized(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script, watched by ``tool``.

    Calls of the driver that fail are not its business: torch tries some to see what there is, and raises for others.
    """
    assert TOOL is not None
    options = [f"--tool={tool}", f"--error-exitcode={FOUND}", "--target-processes=application-only"]
    path = os.pathsep.join([str(SCRIPT.parents[2]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [TOOL, *options, "--report-api-errors=no", "--print-limit=20", sys.executable, str(SCRIPT), *arguments]
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500
    )
    if "Device not supported" in result.stdout:
        pytest.skip(f"compute-sanitizer refuses the device: {result.stdout[:200]}")
    return result


@pytest.mark.parametrize(
    ("tool", "mistake", "told"),
    [
        ("memcheck", "overrun", "Invalid __global__ read of size 4 bytes"),
        ("initcheck", "uninitialized", "Uninitialized __global__ memory read"),
        ("racecheck", "race", "Race reported"),
    ],
)
def test_a_planted_mistake_is_found(tool: str, mistake: str, told: str) -> None:
    result = sanitized(tool, f"--plant={mistake}")
    assert told in result.stdout, result.stdout[-5000:]
    assert result.returncode != 0


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_kernels(tool: str) -> None:
    result = sanitized(tool)
    assert result.returncode == 0, result.stdout[-5000:]
    assert "sums have the bits of the reference" in result.stdout
    assert re.search(r"SUMMARY: 0 (errors|hazards)", result.stdout), result.stdout[-2000:]
