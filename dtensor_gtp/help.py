"""``python -m dtensor_gtp.help TOPIC`` prints a page of the documentation. Without a topic it lists them.

Pages are installed with the package: messages name a topic, and need no network.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

_FOLDERS = ("howto", "guides")
_INSTALLED = Path(__file__).parent / "_pages"
_CHECKOUT = Path(__file__).parents[1] / "docs"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    pages = _pages()
    if not given or given[0] in ("-h", "--help"):
        print("python -m dtensor_gtp.help TOPIC prints one of these pages:\n")
        width = max(map(len, pages), default=0)
        for topic, path in pages.items():
            print(f"  {topic:<{width}}  {_title(path)}")
        return 0
    topic = given[0].lower().replace("-", "_").removesuffix(".md")
    if topic not in pages:
        near = difflib.get_close_matches(topic, pages, n=3) or [name for name in pages if topic in name]
        meant = " Without a topic the command lists all."
        if near:
            meant = f" Did you mean {' or '.join(near)}?"
        print(f"dtensor_gtp.help has no topic {given[0]!r}.{meant}", file=sys.stderr)
        return 2
    try:
        print(_readable(pages[topic].read_text(encoding="utf-8")), flush=True)
    except BrokenPipeError:  # `| head` has read enough; Python would flush once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _pages() -> dict[str, Path]:
    """Each page by its topic, in order of the alphabet within its folder."""
    root = _CHECKOUT
    if _INSTALLED.is_dir():
        root = _INSTALLED
    return {path.stem: path for folder in _FOLDERS for path in sorted((root / folder).glob("*.md"))}


def _title(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")


def _readable(text: str) -> str:
    """A page without what only its tests and the site read; links as the topics that they lead to."""
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.S)
    text = re.sub(r"<details><summary>(.*?)</summary>", r"\1:", text).replace("</details>\n", "")
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text)
    text = re.sub(r"\[([^\]]+)\]\((?:[^)]*/)?(\w[\w.]*)\.(?:md|rst)(?:#[^)]*)?\)", _link, text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _link(match: re.Match[str]) -> str:
    words = match[1]
    topic = match[2]
    if topic in _pages():
        return f"{words} ({topic})"
    return words


if __name__ == "__main__":
    sys.exit(main())
