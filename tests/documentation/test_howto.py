"""Messages send users to how-to pages that exist, and each page is named by a message or is known to have none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from dtensor_gtp._howto import Page, see

ROOT = Path(__file__).parents[2]
# Nothing fails where these help.
WITHOUT_MESSAGE: set[str] = set()


def _named() -> Iterator[str]:
    """The pages that the package names, once for each message."""
    for path in (ROOT / "dtensor_gtp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "see":
                (page,) = node.args
                assert isinstance(page, ast.Constant), f"{path} names a page that this test cannot read"
                yield page.value


def test_messages_name_pages_that_exist() -> None:
    for page in get_args(Page):
        address = see(page).removeprefix("See ").removesuffix(".")
        assert (ROOT / address).is_file(), address


def test_each_page_is_named_by_a_message() -> None:
    pages = {path.stem for path in (ROOT / "docs/howto").glob("*.md")}
    named = list(_named())
    assert set(get_args(Page)) == pages - WITHOUT_MESSAGE
    assert set(named) == pages - WITHOUT_MESSAGE
    assert len(named) >= 20
