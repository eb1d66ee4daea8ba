"""What runs the code blocks of pages runs all of them, and names page and line of what fails."""

import contextlib
import traceback
from pathlib import Path

import pages
import pytest

PAGE = """\
# A page

<!-- check
ran = ["check"]
-->

Some text.

```python
ran.append("first")
device = "cuda", 'cuda:1', "cudaMalloc"
```

1. An item:

   ```python
   ran.append("second")
   ```

<!-- not run: it needs a moon. -->
```python
ran.append("never")
```

```text
ran.append("output")
```

```bash
# a comment
ls examples/train_llama.py && \\
  echo one > file
echo two >> file
```

```python
ran += open("file").read().split()
open("ran", "w").write(repr((ran, device)))
```
"""


@pytest.fixture
def run(tmp_path: Path) -> object:
    def run(text: str) -> str:
        (tmp_path / "page.md").write_text(text)
        with contextlib.chdir(tmp_path):
            pages.run(pages.read(tmp_path / "page.md"))
            return Path("ran").read_text()

    return run


def test_runs_each_block_once_in_order(run) -> None:
    ran = ["check", "first", "second", "one", "two"]
    assert run(PAGE) == repr((ran, ("cpu", "cpu:1", "cudaMalloc")))


def test_a_failing_python_block_is_named(run) -> None:
    text = PAGE.replace('ran.append("second")', 'ran.append("second")\n   raise ValueError("no")')
    with pytest.raises(ValueError, match="no") as failed:
        run(text)
    last = traceback.extract_tb(failed.value.__traceback__)[-1]
    assert Path(last.filename).name == "page.md"
    assert last.lineno == text.splitlines().index('   raise ValueError("no")') + 1
    assert last.line == 'raise ValueError("no")'


def test_an_error_of_syntax_is_named(run) -> None:
    with pytest.raises(SyntaxError) as failed:
        run(PAGE.replace('ran.append("second")', "ran.append("))
    assert (Path(failed.value.filename or "").name, failed.value.lineno) == ("page.md", 17)


@pytest.mark.parametrize("command", ["false", "false | cat", "cat no_such_file", "echo $no_such_variable"])
def test_a_failing_command_is_named(run, command: str) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:30: exit status"):
        run(PAGE.replace("echo two >> file", f"{command}\necho two >> file"))


def test_a_call_of_the_planner_runs_and_a_failing_one_is_named(run) -> None:
    call = "```bash\ngtp-plan llama3-8b --machine h100 --gpus 8 --gtp 8 --pp 1 --tp 1 --json ran\n```"
    assert '"gtp": 8' in run(call)
    for wrong in ("--gpus 0", "--no-such-option"):
        with pytest.raises(AssertionError, match=r"page\.md:2: exit status 2"):
            run(call.replace("--gpus 8", wrong))


def test_a_class_of_a_page_can_be_pickled(run) -> None:
    text = "import pickle\nclass A: pass\nassert type(pickle.loads(pickle.dumps(A()))) is A\nopen('ran', 'w')"
    run(f"```python\n{text}\n```")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<!-- not run -->\n```python\n1 / 0\n```", r":1: 'not run' needs a word more"),
        ("<!-- not run: -->\n```python\n1 / 0\n```", r":1: 'not run' needs a word more"),
        ("<!-- not run: because -->\n\n```python\n1 / 0\n```", r":2: 'not run' stands on the line above a block"),
        ("<!-- not_run: because -->\n```python\n1 / 0\n```", r":1: no such mark"),
        ("<!-- rank: 4 -->", r":1: no such mark"),
        ("<!-- ranks -->", r":1: 'ranks' needs a word more"),
        ("text\n\n```py\n1 / 0\n```", r":3: no block is of language 'py'"),
        ("text\n```python\n1 / 0\n", r":2: the block does not end"),
        ("<!-- check\n1 / 0\n", r":1: the check does not end"),
        ("<!-- setup\nx = 1\n-->", r":1: no such mark"),
    ],
)
def test_refuses_what_would_hide_a_block(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match=r"page\.md" + why):
        pages.read(tmp_path / "page.md")


def test_marks_of_a_page(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("<!-- ranks: 4 -->\n<!-- extra: transformers -->\n# A page\n")
    page = pages.read(tmp_path / "page.md")
    assert (page.ranks, page.extra, page.is_long) == (4, "transformers", True)
    (tmp_path / "page.md").write_text("<!-- long -->\n# A page\n")
    page = pages.read(tmp_path / "page.md")
    assert (page.ranks, page.extra, page.is_long) == (0, "", True)


def test_covers_all_pages() -> None:
    names = {path.relative_to(pages.ROOT).as_posix() for path in pages.all_paths()}
    assert {"README.md", "docs/contributing.md", "docs/guides/meshes.md"} <= names
