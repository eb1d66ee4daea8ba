"""The sources of the package as syntax trees, read and parsed once, for the tests that hold rules of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dtensor_gtp"
SOURCES = sorted(PACKAGE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a tree. To walk it takes longer than to parse it."""
    return list(ast.walk(tree))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name and its attributes; empty for all else."""
    if isinstance(node, ast.Attribute):
        return (base := dotted(node.value)) and f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
