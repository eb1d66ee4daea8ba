"""The script of the support matrix: what it runs is there, and what pytest says is read right."""

import re

import pytest

import support_matrix
from support_matrix import ROOT, outcome_of


def test_what_it_runs_is_there() -> None:
    assert [path for path in support_matrix.TESTS if not (ROOT / path).is_file()] == []
    assert len(support_matrix.TESTS) == 9  # as docs/versions.md says
    minor = re.search(r'dependencies = \["torch>=([\d.]+)"\]', (ROOT / "pyproject.toml").read_text())
    assert support_matrix.RELEASES[0] == minor[1]


@pytest.mark.parametrize(
    ("output", "outcome"),
    [
        ("....  [100%]\n390 passed, 3 deselected in 142.89s (0:02:22)\n", "390 passed"),
        (
            "FAILED tests/a.py::T::test_b - AssertionError\nERROR tests/c.py\n1 failed, 2 passed, 1 error in 3.00s\n",
            "1 failed, 2 passed, 1 error: tests/a.py::T::test_b, tests/c.py",
        ),
        ("ImportError while loading conftest\n", "no tests ran"),
    ],
)
def test_outcome(output: str, outcome: str) -> None:
    assert outcome_of(output) == outcome
