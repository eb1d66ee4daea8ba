"""The list of planted bugs keeps pace with the code; ``planted_bugs.py`` runs them."""

import re
from pathlib import Path

import pytest

from planted_bugs import BUGS, LISTS, check
from planted_bugs_changes import Change, argument, assign, drop, flip, negate, never, replace, returns, without
from planted_bugs_quick import quick_tests
from planted_bugs_type import PACKAGE, Bug

CHECKOUT = PACKAGE.parent

CODE = """
LIMIT = 1

def other(a):
    return a

class Cls:
    @property
    def size(self):
        return self._size

    @size.setter
    def size(self, value):
        self._size = value

    def method(self, a, b):
        if a < b and self.ok:
            self.log.write(a)
        def inner():
            return a + b
        total = (a *
                 b)  # a comment
        total += max(a, b, key=abs)
        return other(total)
"""


def test_each_bug_fits_the_code() -> None:
    check(BUGS)
    assert len(BUGS) == sum(map(len, LISTS)) >= 200  # each has a name of its own


def test_each_bug_names_tests_that_exist() -> None:
    for name, bug in BUGS.items():
        assert bug.node_ids(), name
        for test in bug.node_ids():
            name, *inner = test.split("::")
            source = (CHECKOUT / name).read_text()
            found = set(re.findall(r"(?:def|class) (\w+)", source))
            # A parametrized method of a class has more to its name.
            assert all(part in found or any(part.startswith(f"{one}_") for one in found) for part in inner), test


def test_the_quick_tier_has_the_tests_of_most_bugs() -> None:
    is_caught = [quick_tests().issuperset(bug.node_ids()) for bug in BUGS.values()]
    assert sum(is_caught) >= 0.5 * len(BUGS)


@pytest.mark.parametrize(
    ("function", "change", "line", "planted"),
    [
        ("Cls.method", drop("write"), "self.log.write(a)", "pass"),
        ("Cls.method", drop("self.log.write(...)"), "self.log.write(a)", "pass"),
        ("Cls.method", drop("total = ..."), "total = a * b", "pass"),
        ("Cls.method", replace("a*b", "a"), "total = a * b", "total = a"),
        ("Cls.method", replace("... * b", "b"), "total = a * b", "total = b"),
        ("Cls.method", replace("total += ...", "total = 0"), "total += max(a, b, key=abs)", "total = 0"),
        ("Cls.method", never("self.ok"), "if a < b and self.ok:", "if a < b and False:"),
        ("Cls.method", never("a < b and self.ok"), "if a < b and self.ok:", "if False:"),
        ("Cls.method", negate("self.ok"), "if a < b and self.ok:", "if a < b and (not self.ok):"),
        ("Cls.method", without("self.ok"), "if a < b and self.ok:", "if a < b:"),
        ("Cls.method", flip("a < b", "<="), "if a < b and self.ok:", "if a <= b and self.ok:"),
        ("Cls.method", argument("max", 1, None), "total += max(a, b, key=abs)", "total += max(a, key=abs)"),
        ("Cls.method", argument("max", "key", "len"), "total += max(a, b, key=abs)", "total += max(a, b, key=len)"),
        ("Cls.method", argument("max", "key", None), "total += max(a, b, key=abs)", "total += max(a, b)"),
        ("Cls.method", argument("other", 0, "a"), "return other(total)", "return other(a)"),
        ("Cls.method.inner", returns("a - b"), "return a + b", "return a - b"),
        ("Cls.size", returns("0"), "return self._size", "return 0"),
        ("Cls.size", assign("self._size", "0"), "self._size = value", "self._size = 0"),
        ("code:LIMIT", assign("LIMIT", "2"), "LIMIT = 1", "LIMIT = 2"),
    ],
)
def test_a_change_is_one_of_the_tree(tmp_path: Path, function: str, change: Change, line: str, planted: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "code.py").write_text(CODE)
    bug = Bug(function, change, "").plant(tmp_path)
    lines = zip(bug.before.splitlines(), bug.text.splitlines(), strict=True)
    assert bug.file == "folder/code.py"
    assert [(old.strip(), new.strip()) for old, new in lines if old != new] == [(line, planted)]


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        ("Cls.gone", drop("write"), "0 files of the package have Cls.gone"),
        ("there:other", returns("0"), "0 files of the package have there:other"),
        ("other", returns("0"), r"2 files of the package have other \(code, more\): name one, as 'module:other'"),
        (
            "Cls.method",
            drop("read"),
            r"expects a statement that calls read\(\) once, but finds it 0 times in Cls.method",
        ),
        ("Cls.method", returns("0"), "expects a return once, but finds it 2 times in Cls.method of code.py"),
        ("Cls.method", replace("a", "b"), "expects 'a' once, but finds it 5 times"),
        (
            "Cls.method",
            argument("max", 2, "0"),
            r"expects a call of max\(\) with argument 2 once, but finds it 0 times",
        ),
        ("Cls.method", negate("a <= b"), "expects 'a <= b' once, but finds it 0 times"),
    ],
)
def test_a_bug_that_does_not_fit_is_named(tmp_path: Path, function: str, change: Change, message: str) -> None:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "more.py").write_text("def other(): return 1\n")
    with pytest.raises(ValueError, match=message):
        Bug(function, change, "").plant(tmp_path)
    with pytest.raises(ValueError, match=r"Bug 'one': 0 files of the package have \w+\. Change it in its list"):
        check({"one": Bug("nowhere", change, "")})
