"""Messages send users to how-to pages that exist, and each page is named by a message or is known to have none."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from typing import get_args

import pytest
from sources import ROOT, SOURCES, dotted, nodes, parsed

from dtensor_gtp._howto import Page, see
from dtensor_gtp.help import main

# Nothing fails where these help.
WITHOUT_MESSAGE = {
    *("log_metrics", "accumulate_gradients", "add_tp", "checkpoint_activations", "context_parallel", "feed_data"),
    *("load_pretrained", "move_from", "read_the_report"),
}


def _named() -> Iterator[str]:
    """The pages that the package names, once for each message."""
    for path in SOURCES:
        for node in nodes(parsed(path)):
            if isinstance(node, ast.Call) and dotted(node.func) == "see":
                (page,) = node.args
                assert isinstance(page, ast.Constant), f"{path} names a page that this test cannot read"
                yield page.value


def test_messages_name_pages_that_exist() -> None:
    for page in get_args(Page):
        assert (ROOT / "docs/howto" / f"{page}.md").is_file(), page
        assert main([see(page).removesuffix("`.").rpartition(" ")[2]]) == 0


def test_no_message_names_a_file_that_is_not_installed() -> None:
    """Docstrings and messages alike: the wheel has no docs folder."""
    found = [path.name for path in SOURCES if re.search(r"docs/\w+/", path.read_text())]
    assert found == []


def test_help_lists_finds_and_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    for path in (*(ROOT / "docs/howto").glob("*.md"), *(ROOT / "docs/guides").glob("*.md")):
        assert f"  {path.stem} " in listed
    assert main(["debug-nan"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# ")
    assert "<!--" not in text
    assert "<details>" not in text
    assert "](" not in text.replace("](http", "")
    assert main(["emma"]) == 2
    assert "Did you mean ema?" in capsys.readouterr().err
    assert main(["zzz"]) == 2
    assert "lists all" in capsys.readouterr().err


def test_help_into_a_pipe_that_is_closed_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["ema"]) == 0


def test_each_page_is_named_by_a_message() -> None:
    pages = {path.stem for path in (ROOT / "docs/howto").glob("*.md")}
    named = list(_named())
    assert set(get_args(Page)) == pages - WITHOUT_MESSAGE
    assert set(named) == pages - WITHOUT_MESSAGE
    assert len(named) >= 20
