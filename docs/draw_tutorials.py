"""Writes the program of each tutorial to examples/tutorials: the blocks of python that its readers see, in order.

    python docs/draw_tutorials.py

A test compares them, so that what a reader copies is what is shipped.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PAGES = ROOT / "docs" / "tutorials"
_PROGRAMS = ROOT / "examples" / "tutorials"


def program(page: Path) -> str:
    """The program of a page; its docstring names the page and the command."""
    text = re.sub(r"<!-- check\n.*?-->", "", page.read_text(), flags=re.S)
    ranks = re.search(r"<!-- ranks: (\d+) -->", text)
    blocks = re.findall(r"((?:<!-- not run: [^>]*-->\n)?)^( *)```python\n(.*?)^ *```$", text, re.M | re.S)
    code = "\n".join(textwrap.dedent(block) for mark, _, block in blocks if not mark)
    title = re.search(r"^# (.*)$", text, re.M)
    assert title is not None
    start = f"torchrun --nproc-per-node {ranks[1]}" if ranks else "python"
    ending = "" if title[1][-1] in "?!." else "."
    command = f"    {start} examples/tutorials/{page.stem}.py"
    return f'"""{title[1]}{ending} The program of docs/tutorials/{page.name}.\n\n{command}\n"""\n\n{code}'


def main() -> None:
    _PROGRAMS.mkdir(exist_ok=True)
    for page in sorted(_PAGES.glob("*.md")):
        (_PROGRAMS / f"{page.stem}.py").write_text(program(page))


if __name__ == "__main__":
    main()
