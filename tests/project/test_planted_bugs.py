"""The list of planted bugs keeps pace with the code; ``planted_bugs.py`` runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planted_bugs import BUGS, check
from planted_bugs_type import PACKAGE, Bug

CHECKOUT = PACKAGE.parent


def test_each_bug_fits_the_code() -> None:
    check(BUGS)
    assert len(BUGS) >= 60


def test_each_bug_names_tests_that_exist() -> None:
    for bug in BUGS:
        assert bug.tests, bug.name
        for test in bug.node_ids():
            name, *inner = test.split("::")
            source = (CHECKOUT / name).read_text()
            found = set(re.findall(r"(?:def|class) (\w+)", source))
            # A parametrized method of a class has more to its name.
            assert all(part in found or any(part.startswith(f"{one}_") for one in found) for part in inner), test


def test_a_bug_that_does_not_fit_is_named(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    assert Bug("two", "code.py", "b = 1", "b = 2", ()).text(tmp_path) == "a = 1\nb = 2\n"
    for before, found in (("= 1", "2 times"), ("c = 1", "0 times")):
        with pytest.raises(ValueError, match=f"Bug 'two' expects its text to stand once in code.*{found}"):
            Bug("two", "code.py", before, "", ()).text(tmp_path)
    with pytest.raises(ValueError, match=r"Bug 'two': other\.py is not a file of the package"):
        Bug("two", "other.py", "", "", ()).text(tmp_path)
