"""The code blocks of every page of the documentation run: one test a page, named by the page."""

import contextlib
import importlib.util
import io
import unittest
from collections.abc import Callable
from pathlib import Path

import pages
import pytest
import torch.distributed as dist
from common import GlooTest, shared_directory
from script_jobs import run_forked
from torchvision_ops import define_missing

PAGES = [pages.read(path) for path in pages.all_paths()]


def _is_missing(library: str) -> bool:
    return bool(library) and importlib.util.find_spec(library) is None


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.long] * page.is_long)
        for page in PAGES
        if not page.ranks and any(block.runs for block in page.blocks)
    ],
)
def test_page(page: pages.Page, tmp_path: Path) -> None:
    if _is_missing(page.extra):
        pytest.skip(f"needs {page.extra}")
    result = run_forked([pages.__file__, page.path], None, cwd=tmp_path)
    assert result.status == 0, result.output


def _on_ranks(page: pages.Page) -> Callable[[GlooTest], None]:
    def test(self: GlooTest) -> None:
        assert self.rank is not None
        define_missing()
        with shared_directory() as folder, contextlib.chdir(folder), contextlib.ExitStack() as quiet:
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
            pages.run(page, self.rank)
            dist.barrier()

    test = unittest.skipIf(_is_missing(page.extra), f"needs {page.extra}")(test)
    return pytest.mark.long(test) if page.is_long else test


def _pages_on(num_ranks: int) -> type[GlooTest]:
    """Has a method for each page that runs on so many ranks."""
    tests = {f"test_{page.name}": _on_ranks(page) for page in PAGES if page.ranks == num_ranks}
    return type(f"PagesOn{num_ranks}Ranks", (GlooTest,), {"__module__": __name__, "world_size": num_ranks, **tests})


# By name, as pytest finds them, and workers.
globals().update({cls.__name__: cls for cls in map(_pages_on, {page.ranks for page in PAGES if page.ranks})})
