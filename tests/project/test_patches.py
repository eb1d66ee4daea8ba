"""What is replaced in torch stands in one list, and can be taken back."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from script_jobs import run_forked
from sources import SOURCES, nodes, parsed

from dtensor_gtp import _torch_compat as compat

# One is replaced in a context alone. The other is a counter, not code.
OTHERS = {"torch.cuda.is_current_stream_capturing", "distributed_c10d._world.group_count"}


def test_each_is_in_use_and_torch_is_as_before_when_they_are_undone() -> None:
    result = run_forked([Path(__file__).parent / "patched_job.py"], None)
    assert result.status == 0, result.output
    # A pipeline's stage is replaced with the first forward after its import.
    assert set(compat.PATCHES) <= set(result.output.split("\n"))


def test_an_entry_that_is_not_in_the_list_is_refused() -> None:
    with pytest.raises(KeyError):
        compat.replace("another", compat, "name", None)
    assert not hasattr(compat, "name")


def test_nothing_else_is_replaced() -> None:
    found = {name for path in SOURCES for name in _assigned(parsed(path))}
    assert found == OTHERS


def _assigned(tree: ast.Module) -> Iterator[str]:
    """Attributes of what is imported from torch, to which a file assigns."""
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if "torch" in (getattr(node, "module", None) or alias.name).split(".")[0]
    }
    for node in nodes(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            root = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in imported:
                yield ast.unparse(target)
