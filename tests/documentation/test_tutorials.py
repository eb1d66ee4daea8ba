"""The files of the tutorials run by the commands that their pages give."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pages
import pytest
from timing import HANG_S

FILES = sorted((pages.ROOT / "examples" / "tutorials").glob("*.py"))


@pytest.mark.long
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_runs_as_it_stands(path: Path, tmp_path: Path) -> None:
    if "transformers" in path.stem and find_spec("transformers") is None:
        pytest.skip("needs transformers")
    (command,) = re.findall(r"^ +((?:torchrun|python) .*)$", path.read_text().split('"""')[1], re.M)
    program, *words = command.replace("examples/tutorials", str(path.parent)).split()
    launcher = ["-m", "torch.distributed.run", "--standalone"] if program == "torchrun" else []
    env = os.environ | {"PYTHONPATH": str(pages.ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launcher, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
