"""Programs of pages run as readers copy them, by the commands that the pages give. What readers of a tutorial see is a
whole program, which is shipped as a file."""

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
TUTORIALS = sorted((pages.ROOT / "docs" / "tutorials").glob("*.md"))
# One that CI starts, with several ranks and soon over. The default tier runs all of them as pages.
STARTED = "slow_step"

COPIED = [page for page in map(pages.read, pages.all_paths()) if page.ranks and "tutorials" not in page.name]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_shipped_file_is_what_readers_see(page: Path) -> None:
    shipped = pages.ROOT / "examples" / "tutorials" / f"{page.stem}.py"
    text = pages.script("draw_tutorials").program(page)
    assert shipped.read_text() == text, "run python docs/draw_tutorials.py"
    for block in pages.read(page).blocks:
        if block.language == "python":
            assert (block.text in text) == (block.is_shown and block.runs), block.line
    assert f"examples/tutorials/{page.stem}.py" in page.read_text(), "the page names its file"


def test_no_other_file_is_there() -> None:
    assert {path.stem for path in FILES} == {page.stem for page in TUTORIALS}


def _run(words: list[str], launcher: list[str], folder: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(pages.ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launcher, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.long if path.stem == STARTED else pytest.mark.soak) for path in FILES],
    ids=lambda path: path.stem,
)
def test_runs_as_it_stands(path: Path, tmp_path: Path) -> None:
    if "transformers" in path.stem and find_spec("transformers") is None:
        pytest.skip("needs transformers")
    (command,) = re.findall(r"^ +((?:torchrun|python) .*)$", path.read_text().split('"""')[1], re.M)
    program, *words = command.replace("examples/tutorials", str(path.parent)).split()
    _run(words, ["-m", "torch.distributed.run", "--standalone"] if program == "torchrun" else [], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("page", COPIED, ids=lambda page: page.name)
def test_copied_blocks_run(page: pages.Page, tmp_path: Path) -> None:
    if page.extra and find_spec(page.extra) is None:
        pytest.skip(f"needs {page.extra}")
    (tmp_path / "page.py").write_text(pages.shown_program(page))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={page.ranks}"]
    _run(["page.py"], launcher, tmp_path)
