"""What a planted bug is: a function, and a change of its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from planted_bugs_changes import Change

PACKAGE = Path(__file__).parents[1] / "dtensor_gtp"
TESTS = Path(__file__).parent


class Planted(NamedTuple):
    """A file of the package with a bug in it."""

    file: str  # path below the package
    source: str  # its code without the bug
    tree: ast.Module  # its code with the bug

    @property
    def before(self) -> str:
        """Without the bug. Like ``text``, it is written from the tree: it has no comments."""
        return ast.unparse(ast.parse(self.source))

    @property
    def text(self) -> str:
        """With the bug."""
        return ast.unparse(self.tree)


class Bug(NamedTuple):
    """A plausible mistake in one function of the package."""

    # its qualified name, in whichever file: ``Class.method``, ``function.inner``. Or the name of a class or of a value
    # of a module. ``module:name`` if several modules have the name
    function: str
    change: Change  # what the bug makes of it
    # the tests that should fail, the fewest and quickest of the module concerned: the name of a test, or
    # ``file.py::name`` where several tests have the name, in whichever folder. Several are separated by spaces
    tests: str

    def node_ids(self) -> list[str]:
        """For pytest.

        Raises:
            ValueError: There is no such test or file of tests, or there are several.
        """
        found = []
        for test in self.tests.split():
            if test.startswith("test_") and ".py" not in test:
                ids = _tests_by_name().get(test, [])
                if len(ids) != 1:
                    raise ValueError(f"{len(ids)} tests below tests/ have the name {test}")
                found += ids
                continue
            file, *inner = test.split("::")
            paths = _files_of_tests(file)
            if len(paths) != 1:
                raise ValueError(f"{len(paths)} files below tests/ have the name of {file}")
            found.append("::".join([paths[0].relative_to(TESTS.parent).as_posix(), *inner]))
        return found

    def plant(self, package: Path = PACKAGE) -> Planted:
        """Raises:
        ValueError: Not exactly one file has such a function, or the function does not have what the bug changes
            exactly once.
        """
        module, _, name = self.function.rpartition(":")
        files = [file for file in _files_with(package).get(name, ()) if module in ("", file.stem)]
        if len(files) != 1:
            where = f" ({', '.join(file.stem for file in files)}): name one, as 'module:{name}'" if files else ""
            raise ValueError(f"{len(files)} files of the package have {self.function}{where}")
        source = files[0].read_text()
        tree = ast.parse(source)
        functions = [node for found, node in _definitions(tree) if found == name]
        try:
            self.change.apply(tree, functions)
        except ValueError as error:
            raise ValueError(f"{error} in {self.function} of {files[0].name}") from None
        return Planted(files[0].relative_to(package).as_posix(), source, tree)


@cache
def _files_with(package: Path) -> dict[str, list[Path]]:
    """By the qualified name of what is defined in them."""
    found: dict[str, list[Path]] = {}
    for file in sorted(package.rglob("*.py")):
        for name in {name for name, _ in _definitions(ast.parse(file.read_text()))}:
            found.setdefault(name, []).append(file)
    return found


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """With their qualified names. A property and its setter have the same one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign) and isinstance(node, ast.Module):
            yield from ((target.id, child) for target in child.targets if isinstance(target, ast.Name))
        elif isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):  # no expression defines any
            yield from _definitions(child, prefix)


@cache
def _tests_by_name() -> dict[str, list[str]]:
    """Node ids of all tests."""
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        path = owner = file.relative_to(TESTS.parent).as_posix()
        for kind, name in re.findall(r"^(class|def|    def) (\w+)", file.read_text(), re.MULTILINE):
            if kind == "class":
                owner = f"{path}::{name}"
            elif name.startswith("test_"):
                found.setdefault(name, []).append(f"{path if kind == 'def' else owner}::{name}")
    return found


@cache
def _files_of_tests(name: str) -> list[Path]:
    return list(TESTS.rglob(name))
