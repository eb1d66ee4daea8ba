"""The API reference lists every public name of every public module, and nothing else."""

import re
from pathlib import Path

import pytest
from reference import public_names

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


MODULES = public_names()


def page(module: str) -> str:
    return (REFERENCE / f"{module.removeprefix('dtensor_gtp.')}.rst").read_text()


def described(module: str) -> set[str]:
    """Names whose docstrings the page of a module shows, or a page of its own in the folder of the module."""
    folder = REFERENCE / module.removeprefix("dtensor_gtp.")
    pages = "".join((page(module), *(path.read_text() for path in folder.glob("*.rst"))))
    return set(re.findall(r"^\.\. auto(?:class|data|exception|function):: (\w+)$", pages, re.M))


def described_by_hand(module: str) -> set[str]:
    """Constants of another file, whose docstrings autodoc does not find. Tables would show no text for them."""
    return set(re.findall(r"^\.\. data:: (\w+)$", page(module), re.M))


def pointed_at(module: str) -> set[str]:
    """Names of the package's root that the page points at."""
    return set(re.findall(r"^ +~dtensor_gtp\.(\w+)$", page(module), re.M))


def tabled(module: str) -> set[str]:
    """Names in the tables of the page."""
    tables = re.findall(r"^\.\. autosummary::\n((?: .*\n|\n)+)", page(module), re.M)
    return {name for table in tables for name in re.findall(r"^ +(?:~dtensor_gtp\.)?(\w+)$", table, re.M)}


@pytest.mark.parametrize("module", MODULES)
def test_each_public_name_is_described(module: str) -> None:
    names = set(MODULES[module])
    if module == "dtensor_gtp":
        assert described(module) | described_by_hand(module) == names - {"elastic"}  # which has a page
    else:
        shared = names & set(MODULES["dtensor_gtp"])
        assert described(module) | described_by_hand(module) == names - shared
        assert pointed_at(module) == shared


@pytest.mark.parametrize("module", MODULES)
def test_tables_have_each_name(module: str) -> None:
    if tabled(module):
        assert tabled(module) == set(MODULES[module]) - {"__version__"} - described_by_hand(module)
    else:
        assert len(MODULES[module]) == 1


def test_each_class_of_a_large_module_has_a_page_of_its_own() -> None:
    """A page of all classes is longer than anybody scrolls."""
    for path in REFERENCE.glob("*.rst"):
        names = re.findall(r"^\.\. autoclass:: (\w+)$", path.read_text(), re.M)
        assert len(names) < 4, path.name
    for path in REFERENCE.glob("*/*.rst"):
        listed = (path.parent.parent / f"{path.parent.name}.rst").read_text()
        assert f"   {path.parent.name}/{path.stem}\n" in listed
        assert re.findall(r"^\.\. auto\w+:: (\w+)$", path.read_text(), re.M) == [path.stem]


def test_each_page_is_of_a_module_and_in_the_index() -> None:
    pages = {path.stem for path in REFERENCE.glob("*.rst")} - {"index"}
    assert pages == {module.removeprefix("dtensor_gtp.") for module in MODULES}
    listed = re.findall(r"^   ([\w.]+)(?: <\1>)?$", (REFERENCE / "index.rst").read_text(), re.M)
    assert sorted(listed) == sorted(pages)
