"""What readers of a tutorial see is a whole program, which is shipped as a file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pages
import pytest

ROOT = pages.ROOT
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def draw(page: Path) -> str:
    spec = importlib.util.spec_from_file_location("draw_tutorials", ROOT / "docs" / "draw_tutorials.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text: str = module.program(page)
    return text


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_shipped_file_is_what_readers_see(page: Path) -> None:
    shipped = ROOT / "examples" / "tutorials" / f"{page.stem}.py"
    text = draw(page)
    assert shipped.read_text() == text, "run python docs/draw_tutorials.py"
    for block in pages.read(page).blocks:
        if block.language == "python":
            assert (block.text in text) == (block.is_shown and block.runs), block.line
    assert f"examples/tutorials/{page.stem}.py" in page.read_text(), "the page names its file"


def test_no_other_file_is_there() -> None:
    assert {path.stem for path in (ROOT / "examples" / "tutorials").glob("*.py")} == {page.stem for page in TUTORIALS}
