"""Runs the code blocks of a page of the documentation.

All python blocks of a page are one program, run in order in one namespace, in an empty temporary folder. Bash blocks
run in between, where they stand; one that is a command of the package alone runs in this process. Device strings "cuda"
become "cpu"; else the text runs as it is. A text block behind a block that runs shows lines of what rank 0 has printed;
``...`` stands for more, and milliseconds differ. A block of no language shows what differs elsewhere. HTML comments
direct it:

- ``<!-- ranks: 4 -->``: so many processes run the program; their process group exists. Rank 0 alone runs bash blocks.
- ``<!-- check``, lines of python, ``-->``: checks that readers do not see, run in place. What readers see needs none of
  their names. A setup that readers need stands in a block that folds (``<details>``).
- ``<!-- not run: REASON -->`` on the line above a block: the block does not run.
- ``<!-- extra: LIBRARY -->``: the page is skipped where the library is missing, and is in the long tier.
- ``<!-- long -->``: the page is in the long tier.

``<!-- table: NAME -->`` and ``<!-- headline -->`` are marks of docs/draw_tables.py, and direct nothing here.

``python tests/support/pages.py PAGE`` runs a page that has no ranks.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import types
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from dtensor_gtp import trace
from dtensor_gtp.planner import command_line

ROOT = Path(__file__).parents[2]
_PROGRAMS = ("python", "bash")
_OUTPUT = ("", "text", "json")
_COMMANDS = {"gtp-plan": command_line.main, "python -m dtensor_gtp.trace": trace.main}
_BASH_LIMIT_S = 300  # it only ends what hangs


@dataclass(frozen=True)
class Block:
    """A fenced block, or the hidden code of a check."""

    line: int  # of its first line of code, from 1
    language: str  # what follows the fence: "python" or "bash" if it is to run, else "" or another word
    text: str
    not_run: str = ""  # why it does not run, if it is marked so
    is_shown: bool = True  # readers see it

    @property
    def runs(self) -> bool:
        return self.language in _PROGRAMS and not self.not_run


@dataclass(frozen=True)
class Page:
    """A page and its marks. ``ranks`` is 0 where one process runs it without a process group."""

    path: Path
    blocks: tuple[Block, ...]
    ranks: int = 0
    extra: str = ""
    is_long: bool = False

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix() if self.path.is_relative_to(ROOT) else self.path.name


def all_paths() -> list[Path]:
    """README.md and all pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def script(name: str) -> types.ModuleType:
    """A program of docs, such as ``draw_tables``, as a module."""
    with mock.patch.object(sys, "path", [str(ROOT / "docs"), *sys.path]):
        return importlib.import_module(name)


def read(path: Path) -> Page:
    """Parse a page.

    Raises:
        ValueError: A mark is unknown, has no reason or no block below it; or a block's language is unknown or its end
            missing. The message names page and line.
    """
    lines = path.read_text().splitlines()
    blocks, marks = [], {"ranks": "0", "extra": "", "long": ""}
    not_run, at = "", 0

    def refuse(why: str) -> ValueError:
        return ValueError(f"{path}:{at + 1}: {why}")

    while at < len(lines):
        line = lines[at]
        if fence := re.match(r" *(`{3,})(.*)$", line):
            language, end = fence[2].strip(), _find(lines, at + 1, fence[1])
            if end is None:
                raise refuse("the block does not end")
            if language not in (*_PROGRAMS, *_OUTPUT) and not language.startswith("{"):
                raise refuse(f"no block is of language {language!r}: write python, bash, text or json")
            blocks.append(_block(lines, at + 1, end, language, not_run))
            not_run, at = "", end
        elif not_run:
            raise refuse("'not run' stands on the line above a block, but there is none")
        elif line == "<!-- check":
            end = _find(lines, at + 1, "-->")
            if end is None:
                raise refuse("the check does not end")
            blocks.append(replace(_block(lines, at + 1, end, "python"), is_shown=False))
            at = end
        elif mark := re.match(r" *<!-- *(ranks|extra|long|not run)\b:? *(.*?) *-->$", line):
            if not mark[2] and mark[1] != "long":
                raise refuse(f"{mark[1]!r} needs a word more: <!-- {mark[1]}: ... -->")
            if mark[1] == "not run":
                not_run = mark[2]
            else:
                marks[mark[1]] = mark[2] or "yes"
        elif "<!--" in line and not re.search(r"(: (begin|end)|<!-- /?table: [\w-]+|<!-- /?headline) -->$", line):
            raise refuse(f"no such mark: {line.strip()}")
        at += 1
    is_long = bool(marks["long"] or marks["extra"])
    return Page(path, tuple(blocks), int(marks["ranks"]), marks["extra"], is_long)


def shown_program(page: Page) -> str:
    """The program of readers, who copy each block that they see."""
    shown = (block for block in page.blocks if block.language == "python" and block.runs and block.is_shown)
    return "\n".join(block.text for block in shown)


def _find(lines: list[str], begin: int, end: str) -> int | None:
    return next((at for at in range(begin, len(lines)) if lines[at].strip() == end), None)


def _block(lines: list[str], begin: int, end: int, language: str, not_run: str = "") -> Block:
    return Block(begin + 1, language, textwrap.dedent("\n".join(lines[begin:end])) + "\n", not_run)


def run(page: Page, rank: int = 0) -> None:
    """Run what runs of a page, in the current folder. A traceback names the page and the line in it.

    Raises:
        AssertionError: A bash block failed.
        Exception: What a python block raises.
    """
    program = types.ModuleType("page")
    sys.modules["page"] = program  # for dataclasses and pickle, which look up where a class is from
    printed: str | None = None  # by the block before, if it runs
    for block in page.blocks:
        if block.language == "text" and printed is not None and rank == 0:
            _check_shown(page, block, printed)
        if not block.runs:
            printed = None
        elif block.language == "python":
            text = re.sub(r"""(["'])cuda(?=\1|:)""", r"\1cpu", block.text)
            with redirect_stdout(io.StringIO()) as output:
                exec(compile("\n" * (block.line - 1) + text, str(page.path), "exec"), vars(program))
            printed = output.getvalue() if block.is_shown else printed
        else:
            if rank == 0:
                printed = _run_bash(page, block)
            if page.ranks:
                dist.barrier()


def _check_shown(page: Page, block: Block, printed: str) -> None:
    """Each line that a page shows is one that was printed."""
    known = [_comparable(line) for line in printed.splitlines()]
    for line in map(_comparable, block.text.splitlines()):
        parts = ".*".join(re.escape(part.strip()) for part in line.split("..."))
        assert any(re.fullmatch(parts, other) for other in known), (
            f"{page.path}:{block.line}: the page shows {line!r}, which is not among what was printed:\n{printed}"
        )


def _comparable(line: str) -> str:
    return re.sub(r"\d+(\.\d+)? ?ms", "? ms", " ".join(line.split()))


def _run_command(page: Page, block: Block, name: str, arguments: list[str]) -> str:
    """What a command of the package prints, without a process that imports torch again."""
    with redirect_stdout(io.StringIO()) as output:
        try:
            status = _COMMANDS[name](arguments)
        except SystemExit as end:  # it does not know an argument
            status = end.code
    assert status == 0, f"{page.path}:{block.line}: exit status {status}\n{block.text}"
    return output.getvalue()


def _run_bash(page: Page, block: Block) -> str:
    """What the commands print. They see the package, and ``examples`` of the checkout in their folder. The first that
    fails ends it."""
    if call := re.fullmatch(rf"({'|'.join(_COMMANDS)}) ([^\\\n]+)\n", block.text):
        return _run_command(page, block, call[1], shlex.split(call[2]))
    if not Path("examples").exists():
        Path("examples").symlink_to(ROOT / "examples")
    job = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in job}
    with tempfile.TemporaryDirectory() as scripts:
        for name, module in (("gtp-plan", "dtensor_gtp.plan"), ("torchrun", "torch.distributed.run")):
            command = Path(scripts, name)  # as an installed package has it
            command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
            command.chmod(0o755)
        environment["PATH"] = os.pathsep.join([scripts, str(Path(sys.executable).parent), environment["PATH"]])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_BASH_LIMIT_S,
        )
    where = f"{page.path}:{block.line}: exit status {result.returncode}"
    assert result.returncode == 0, f"{where}\n{block.text}\n{result.stdout}"
    return result.stdout


if __name__ == "__main__":
    run(read(Path(sys.argv[1])))
