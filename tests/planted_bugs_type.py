"""What a planted bug is: plain data, and how it changes the text of a file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "dtensor_gtp"
TESTS = Path(__file__).parent


class Bug(NamedTuple):
    """A plausible mistake in one line of the package.

    Args:
        name: What goes wrong, for people and for ``--only``.
        file: Path below ``dtensor_gtp/``.
        before: Text that stands exactly once in the file: a line, or the part of it that tells it from all others.
        after: What the bug makes of it.
        tests: The tests that should fail, the fewest and quickest of the module concerned, as ``file.py::name``: a file
            may move to another folder.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def node_ids(self) -> list[str]:
        """For pytest.

        Raises:
            ValueError: There is no such file of tests, or there are several.
        """
        found = []
        for test in self.tests:
            file, *inner = test.split("::")
            paths = _files_of_tests(file)
            if len(paths) != 1:
                raise ValueError(f"Bug '{self.name}': {len(paths)} files below tests/ have the name of {file}.")
            found.append("::".join([paths[0].relative_to(TESTS.parent).as_posix(), *inner]))
        return found

    def text(self, package: Path = PACKAGE) -> str:
        """The file with the bug in it.

        Raises:
            ValueError: There is no such file, or the text before the bug does not stand in it exactly once.
        """
        path = package / self.file
        if not path.is_file():
            raise ValueError(
                f"Bug '{self.name}': {self.file} is not a file of the package. Change its path in the list."
            )
        source = path.read_text()
        count = source.count(self.before)
        if count != 1:
            raise ValueError(
                f"Bug '{self.name}' expects its text to stand once in {self.file}, but it stands there {count} times: "
                f"{self.before!r}. Change the text in the list, or take out the bug if no line can have it any more."
            )
        return source.replace(self.before, self.after)


@cache
def _files_of_tests(name: str) -> list[Path]:
    return list(TESTS.rglob(name))
