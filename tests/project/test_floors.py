"""Imports of the package go down: from users' files to torch's private symbols, floor by floor, and in no circle.

Imports for type checking and within functions count. The file that imports a higher floor, and what it imports, are
both named.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sources import PACKAGE, ROOT, nodes, parsed

# The highest first. A floor is a room (a folder) or a few files.
FLOORS = (
    ("integrations",),
    ("__init__", "plan", "trace", "help"),
    ("report", "metrics"),
    ("planner",),
    (
        *("api", "mesh", "pretrained", "checkpoint", "optim", "random", "activations"),
        *("_safetensors", "_published", "_saves", "_load_messages", "_gathered_optimizer"),
    ),
    ("graphs", "elastic", "nn", "_report"),
    ("_modules",),
    ("ops",),
    ("_schedule",),
    ("_params",),
    ("_comm",),
    ("quant",),
    ("_dtensor",),
    ("placement", "policy"),
    ("_torch_compat", "_version", "_progress", "_howto", "_trace"),
)


def _files(package: Path) -> dict[str, Path]:
    """Each file by its module, without the name of the package: ``quant.cast``, ``quant`` for ``quant/__init__.py``."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def _imports(module: str, path: Path, files: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, or takes a name of."""
    is_room = path.name == "__init__.py" and module != "__init__"
    room = module.split(".") if is_room else module.split(".")[:-1]
    for node in nodes(parsed(path)):
        if not isinstance(node, ast.ImportFrom) or not (node.level or (node.module or "").startswith("dtensor_gtp")):
            continue
        inner = (node.module or "").removeprefix("dtensor_gtp").strip(".")
        base = [*room[: len(room) - node.level + 1], inner] if node.level else [inner]
        origin = ".".join(filter(None, base))
        for alias in node.names:
            full = f"{origin}.{alias.name}".strip(".")
            yield full if full in files else origin or "__init__"


@cache
def _graph(package: Path) -> dict[str, set[str]]:
    files = _files(package)
    return {module: set(_imports(module, path, files)) - {module} for module, path in files.items()}


def _height(module: str) -> int:
    floor = next((number for number, rooms in enumerate(FLOORS) if module.split(".")[0] in rooms), None)
    assert floor is not None, f"{module} is on no floor: name it in FLOORS"
    return len(FLOORS) - floor


def _climbs(package: Path) -> list[str]:
    return [
        f"{module} imports {other}, which is on a higher floor"
        for module, others in sorted(_graph(package).items())
        for other in sorted(others)
        if _height(other) > _height(module)
    ]


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none if there is no circle."""
    left = dict(graph)
    while left:
        ready = [module for module, others in left.items() if not others & left.keys()]
        if not ready:
            path = [next(iter(left))]
            while path.count(path[-1]) == 1:
                path.append(next(iter(left[path[-1]] & left.keys())))
            return path[path.index(path[-1]) :]
        for module in ready:
            del left[module]
    return []


def test_imports_go_down() -> None:
    assert _climbs(PACKAGE) == []


def test_imports_make_no_circle() -> None:
    assert _circle(_graph(PACKAGE)) == []


def test_an_import_that_goes_up_is_found_with_both_files(tmp_path: Path) -> None:
    for name, text in {
        "api.py": "from ._comm.groups import Groups",
        "_comm/groups.py": "def groups():\n    from .. import api",
        "_comm/streams.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..ops.linear import linear",
        "ops/linear.py": "from dtensor_gtp._comm import groups",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _climbs(tmp_path) == [
        "_comm.groups imports api, which is on a higher floor",
        "_comm.streams imports ops.linear, which is on a higher floor",
    ]
    assert set(_circle(_graph(tmp_path))) == {"api", "_comm.groups"}


def test_the_design_page_has_the_floors_in_this_order() -> None:
    page = (ROOT / "docs" / "explanation" / "design.md").read_text()
    words = re.findall(r"\w+", page.partition("```text")[2].partition("```")[0])
    hidden = {"__init__", "_report", "_version", "_progress", "_howto", "_trace", "_safetensors", "_saves"}
    hidden |= {"_load_messages", "_published"}
    places = [words.index(name) for floor in FLOORS for name in sorted(set(floor) - hidden, key=words.index)]
    assert places == sorted(places)


def test_the_engine_reads_once() -> None:
    """In a thousand lines at most as many conditional expressions and assignments of tuples as torch's
    ``fully_shard`` has."""
    paths = [
        path
        for room in ("_schedule", "_params", "_comm", "_modules", "ops", "graphs")
        for path in (PACKAGE / room).rglob("*.py")
    ]
    found = [node for path in paths for node in nodes(parsed(path))]
    thousands = sum(len(path.read_text().splitlines()) for path in paths) / 1000
    conditional = [node for node in found if isinstance(node, ast.IfExp)]
    values = [node.value for node in found if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)]
    tuples = [value for value in values if isinstance(value, ast.Tuple)]
    assert len(conditional) <= 5 * thousands
    assert len(tuples) <= 1.4 * thousands
