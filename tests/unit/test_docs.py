"""Links of the pages point at what is there: files, headings of other pages, and tests by the name in the tooltip."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_TARGET = r'(?P<target>[^)\s"]+)(?:\s+"(?P<title>[^"]*)")?'
_LINKS = re.compile(
    rf"\]\({_TARGET}\)|^\[[^\]]+\]:\s+{_TARGET.replace('target', 'ref').replace('title', 'ref_title')}", re.M
)


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Target and tooltip of each link that stays within the repository."""
    for match in _LINKS.finditer(page.read_text()):
        target = match["target"] or match["ref"]
        if not re.match(r"[a-z]+:", target):
            yield target, match["title"] or match["ref_title"] or ""


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_point_at_what_is_there(page: Path) -> None:
    for target, title in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: no {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: no heading {target}"
        if title.startswith("test_"):
            assert re.search(rf"def {title}\(", file.read_text()), f"{page.name}: no {title} in {name}"


def test_each_reference_is_defined_and_used() -> None:
    for page in PAGES:
        text = page.read_text()
        defined = set(re.findall(r"^\[([^\]]+)\]:", text, re.M))
        used = set(re.findall(r"\]\[([^\]]+)\]", text))
        assert defined == used, f"{page.name}: {sorted(defined ^ used)}"
