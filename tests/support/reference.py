"""The API reference as the tests see it: each public name with its docstring, and the program that its example is.

An example is a doctest below ``Example:``. It may use ``torch``, ``nn``, the names of ``dtensor_gtp`` and those of its
own module without an import. One that makes a mesh runs on four ranks, all others in one process.
"""

from __future__ import annotations

import ast
import doctest
import enum
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from sources import PACKAGE, parsed

import dtensor_gtp

# Modules of integrations, and what they import.
LIBRARIES = {
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "torchtitan": ("torchtitan", "triton"),
    "transformers": ("transformers", "accelerate"),
}
# Names from elsewhere: nothing to document here.
FOREIGN = {"dtensor_gtp.MixedPrecisionPolicy": "torch's own class", "dtensor_gtp.__version__": "a string"}
# Examples that do not run on CPU with torch alone. The text stands in the docstring, too.
NEEDS = {
    "dtensor_gtp.CapturedBlocks": "Needs a GPU",
    "dtensor_gtp.CapturedStep": "Needs a GPU",
    "dtensor_gtp.capture_blocks": "Needs a GPU",
    "dtensor_gtp.capture_step": "Needs a GPU",
} | {f"dtensor_gtp.integrations.{library}": f"Needs ``{library}``" for library in LIBRARIES}
_RANKS = re.compile(r"\b(init_weight_mesh|nonuniform_mesh|init_device_mesh)\(")
NUM_RANKS = 4


class Entry(NamedTuple):
    """What the reference has of a name."""

    module: str
    name: str  # in the module, with the class for a method
    text: str  # its docstring
    kind: str  # "class", "function", "method", "property" or "data"
    arguments: tuple[str, ...] = ()  # but for ``*args`` and ``**kwargs``

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def described_arguments(self) -> set[str]:
        """Names in the heads of the entries below ``Args:``."""
        section = re.search(r"^Args:\n((?: .*\n|\n)*)", f"{self.text}\n", re.MULTILINE)
        heads = re.findall(r"^    (\S[^:]*): ", section[1], re.MULTILINE) if section else []
        return {name.strip("* ") for head in heads for name in head.split(",")}

    @property
    def example(self) -> str:
        """The lines of the docstring from ``Example:`` on; empty if there is none."""
        _, mark, rest = self.text.partition("Example:\n")
        return rest if mark else ""

    @property
    def needs(self) -> str:
        """What its example needs beside torch on CPU."""
        return NEEDS.get(self.path.partition("(")[0], NEEDS.get(self.module, ""))

    @property
    def lacks(self) -> str:
        """Why its example cannot run here; empty if it can."""
        if "a GPU" in self.needs:
            return "" if torch.cuda.is_available() else f"{self.needs}: there is none"
        packages = LIBRARIES.get(self.module.rpartition(".")[2], ())
        missing = [package for package in packages if find_spec(package) is None]
        return f"{self.needs}: {', '.join(missing)} not installed" if missing else ""

    @property
    def is_long(self) -> bool:
        """Whether it imports large libraries."""
        return self.module.rpartition(".")[2] in LIBRARIES

    @property
    def is_on_ranks(self) -> bool:
        return bool(_RANKS.search(self.example)) and "a GPU" not in self.needs


@functools.cache
def public_names() -> dict[str, list[str]]:
    """Module to its ``__all__``. The text is read: some modules import only where their library is installed."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        for node in parsed(path).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                name = ".".join(("dtensor_gtp", *(part for part in parts if part != "__init__")))
                found[name] = ast.literal_eval(node.value)
    return found


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All public names and the public methods of public classes; a name of several modules once."""
    found: dict[Any, Entry] = {}
    for module in public_names():
        for key, entry in _entries_of(module):
            found.setdefault(key, entry)
    return tuple(entry for entry in found.values() if entry.path not in FOREIGN)


def _entries_of(name: str) -> Iterator[tuple[Any, Entry]]:
    if name.rpartition(".")[2] in LIBRARIES:  # may not be installed
        for entry in _entries_of_source(name):
            yield entry.path, entry
        return
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        if isinstance(value, ModuleType):
            continue
        if not inspect.isclass(value) and not inspect.isfunction(value):
            yield f"{public} {value!r}", Entry(name, public, _text_below(name, public), "data")
            continue
        kind = "class" if inspect.isclass(value) else "function"
        yield value, Entry(name, public, inspect.getdoc(value) or "", kind, _arguments(value))
        yield from _methods_of(name, public, value) if kind == "class" else ()


def _methods_of(module: str, name: str, cls: type) -> Iterator[tuple[Any, Entry]]:
    for method, value in vars(cls).items():
        if isinstance(value, functools.cached_property):
            value = property(value.func)
        kind = "property" if isinstance(value, property) else "method"
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if method.startswith("_") or not inspect.isfunction(function):
            continue
        if function.__doc__ or not any(hasattr(base, method) for base in cls.__mro__[1:]):
            text = inspect.getdoc(function) or ""
            yield function, Entry(module, f"{name}.{method}", text, kind, _arguments(function))


def _arguments(function: Any) -> tuple[str, ...]:
    if inspect.isclass(function) and issubclass(function, enum.Enum | Exception):
        return ()
    found = inspect.signature(function).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [param.name for param in found if param.kind not in several]
    return tuple(name for name in named if name not in ("self", "cls") and not name.startswith("_"))


def _entries_of_source(name: str) -> Iterator[Entry]:
    """Without an import of the module."""
    for node in parsed(_path_of(name)).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name not in public_names()[name]:
            continue
        if isinstance(node, ast.FunctionDef):
            yield Entry(name, node.name, ast.get_docstring(node) or "", "function", _arguments_of_source(node))
            continue
        yield Entry(name, node.name, ast.get_docstring(node) or "", "class")
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                text, arguments = ast.get_docstring(method) or "", _arguments_of_source(method)
                yield Entry(name, f"{node.name}.{method.name}", text, "method", arguments)


def _arguments_of_source(node: ast.FunctionDef) -> tuple[str, ...]:
    return tuple(arg.arg for arg in (*node.args.args, *node.args.kwonlyargs) if arg.arg != "self")


def _text_below(module: str, name: str) -> str:
    """The string below an assignment, where Sphinx looks for what data are. The assignment may be in another file of
    the same folder."""
    path = _path_of(module)
    for file in (path, *sorted(path.parent.glob("*.py"))):
        for statement, below in itertools.pairwise(parsed(file).body):
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(below, ast.Expr):
                continue
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            is_text = isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
            if is_text and name in map(ast.unparse, targets):
                return inspect.cleandoc(below.value.value)
    return ""


def _path_of(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def run_example(entry: Entry) -> None:
    """Run the example of a name as a doctest.

    Raises:
        AssertionError: A line raised, or printed something else. The message has all that differed.
    """
    module = importlib.import_module(entry.module)
    names = {name: getattr(dtensor_gtp, name) for name in dtensor_gtp.__all__} | {"torch": torch, "nn": nn}
    names |= {name: getattr(module, name) for name in module.__all__}
    lines = doctest.DocTestParser().get_examples(entry.example, entry.path)
    assert lines, f"{entry.path}: no line of its example begins with >>>"
    said: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(verbose=False, optionflags=flags)
    test = doctest.DocTest(lines, names, entry.path, None, None, entry.example)
    runner.run(test, out=said.append)
    assert not said, "".join(said)
