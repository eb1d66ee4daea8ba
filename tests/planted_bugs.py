"""Whether the tests would notice a mistake: plants one bug after the other and runs the tests that should fail.

``python tests/planted_bugs.py`` takes some minutes. It exits with 0 if at least 95% of the bugs are caught, with 1 if
not, and with 2 if a bug no longer fits the code or its tests cannot be run. The bugs are in ``planted_bugs_*.py``.
With ``--tier quick`` only tests marked ``quick`` run, and half of the bugs are enough.

How a bug is run: this process imports torch once, but never the package. For each bug it forks a child, which imports
the package from a copy with the bug in it (a directory of links and one real file) and calls pytest. Workers of
multi-process tests are forked from that child in turn, so they have the bug as well, and nobody imports torch again.
One bug after the other has its copy in the same place: what they compile of the package and of the tests, the next ones
read.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from planted_bugs_host import HOST
from planted_bugs_layout import LAYOUT
from planted_bugs_numbers import NUMBERS
from planted_bugs_planner import PLANNER
from planted_bugs_replicas import REPLICAS
from planted_bugs_runtime import RUNTIME
from planted_bugs_silent import SILENT
from planted_bugs_type import PACKAGE, Bug, Planted

LISTS = (LAYOUT, RUNTIME, HOST, NUMBERS, PLANNER, REPLICAS, SILENT)
BUGS: dict[str, Bug] = {name: bug for bugs in LISTS for name, bug in bugs.items()}
ENOUGH = {"quick": 0.5, "default": 0.95, "long": 0.95}  # of the bugs, by tier
LIMIT = 90.0  # seconds for the tests of one bug: ranks that wait for each other for so long count as caught
PATIENCE = timedelta(seconds=30)  # of one collective: torch's tests wait until every rank has ended

_HUNG = "did not end"

# What the tests and their workers import beside the package.
_PRELOADED = (
    "expecttest",
    "numpy",
    "pytest",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.distributed.fake_pg",
)


class Result(NamedTuple):
    """What became of one bug."""

    name: str
    planted: Planted  # where it was
    outcome: str  # "caught", "missed" or "error"
    detail: str  # by which test, or why
    seconds: float  # of wall time
    cpu_seconds: float  # of the child and of those of its workers that it has waited for


class _Run(NamedTuple):
    """A bug that runs."""

    name: str
    tests: list[str]  # for pytest
    planted: Planted  # where it is
    directory: Path  # of what it leaves behind
    place: Path  # the directory of its copy of the package, of one bug at a time
    begin: float


class _End(NamedTuple):
    """How a child has ended: what pytest has exited with, None if the time limit was over; and for how long it ran."""

    status: int | None
    seconds: float
    cpu_seconds: float


class _Report:
    """A pytest plugin: workers are forked, and the first failure ends this process at once.

    Else the teardown would wait for workers that wait for the one that has failed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    def pytest_sessionstart(self) -> None:
        multiprocessing.set_start_method("fork", force=True)  # after conftest has chosen another one

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self._found[report.outcome].append(report.nodeid)
            self._path.write_text(json.dumps(self._found))
        if report.failed:
            print(report.longreprtext, flush=True)
            os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these bugs alone; parts of names will do")
    parser.add_argument("--list", action="store_true", help="print the bugs and run none")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time (default: 2)")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds for one bug (default: {LIMIT:.0f})")
    parser.add_argument("--tier", choices=tuple(ENOUGH), default="default", help="which tests may run")
    parser.add_argument("--without-bugs", action="store_true", help="run the same tests on the package as it is")
    parser.add_argument("--output", type=Path, help="keep what pytest prints in this directory")
    args = parser.parse_args()
    bugs = {name: bug for name, bug in BUGS.items() if args.only is None or any(part in name for part in args.only)}
    try:
        if not bugs:
            raise ValueError(f"No bug has a name with {' or '.join(args.only)} in it. See --list.")
        check(bugs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        for name, bug in bugs.items():
            print(f"{name:<52} {bug.plant().file}")
        return 0
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # ends what was started
    with _directory(args.output) as directory:
        results = []
        for result in _run_all(bugs, directory, args.jobs, args.limit, args.tier, not args.without_bugs):
            results.append(result)
            print(_line(result), flush=True)
    counts = {what: sum(result.outcome == what for result in results) for what in ("caught", "missed", "error")}
    print(f"{len(results)} bugs in {time.monotonic() - begin:.0f} s: {counts}")
    if hung := [result.name for result in results if result.detail == _HUNG]:
        print(f"did not end, as on a busy machine any test may (see --limit): {', '.join(hung)}")
    if counts["error"]:
        return 2
    if args.without_bugs:
        return 1 if counts["caught"] else 0
    for result in results:
        if result.outcome == "missed":
            print(f"missed: {result.name}\n{_difference(result.planted)}")
    return 0 if counts["caught"] >= ENOUGH[args.tier] * len(results) else 1


def check(bugs: Mapping[str, Bug]) -> None:
    """Raises:
    ValueError: A bug does not fit the code.
    """
    for name, bug in bugs.items():
        try:
            bug.node_ids()
            planted = bug.plant()
            compile(planted.tree, planted.file, "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"Bug '{name}': {error}. Change it in its list, or take it out.") from None


def _difference(planted: Planted) -> str:
    lines = difflib.unified_diff(
        planted.before.splitlines(), planted.text.splitlines(), planted.file, planted.file, lineterm="", n=2
    )
    return "\n".join(lines)


def _line(result: Result) -> str:
    times = f"{result.seconds:5.1f} s ({result.cpu_seconds:4.1f} of CPU)"
    return f"{result.outcome:<7} {result.name:<52} {result.planted.file:<28} {times}  {result.detail}"


@contextmanager
def _directory(path: Path | None) -> Iterator[Path]:
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _run_all(
    bugs: Mapping[str, Bug], directory: Path, jobs: int, limit: float, tier: str, is_planted: bool
) -> Iterator[Result]:
    """Run some bugs at a time, in forked children; results come as they end."""
    _preload()
    # Before anything is compiled for a bug: what an earlier run has left may be of another one.
    shutil.rmtree(directory / "compiled", ignore_errors=True)
    waiting, running = list(reversed(bugs.items())), dict[int, _Run]()
    places = [directory / f"place_{number}" for number in range(jobs)]
    try:
        while waiting or running:
            while waiting and places:
                run = _begin(*waiting.pop(), directory, places.pop(), is_planted)
                pid = os.fork()
                if pid == 0:
                    _run_child(run, tier)
                with suppress(OSError):  # as the child does: whoever comes first
                    os.setpgid(pid, pid)
                running[pid] = run
            time.sleep(0.02)
            for pid, run in list(running.items()):
                end = _end_of(pid, run, limit)
                if end is not None:
                    del running[pid]
                    yield _result(run, end, tier)
                    shutil.rmtree(run.place, ignore_errors=True)
                    places.append(run.place)
    finally:  # the rest of them, where this process is told to end
        for pid in running:
            _kill_group(pid)


def _begin(name: str, bug: Bug, directory: Path, place: Path, is_planted: bool) -> _Run:
    own = directory / name.replace(" ", "_")
    run = _Run(name, bug.node_ids(), bug.plant(), own, place, time.monotonic())
    _copy_package(run, is_planted)
    sys.stdout.flush()  # what is left in the buffer would be printed by the child as well
    return run


def _end_of(pid: int, run: _Run, limit: float) -> _End | None:
    """How a child has ended; None if it runs and may go on."""
    seconds = time.monotonic() - run.begin
    ended, status, usage = os.wait4(pid, os.WNOHANG)
    if not ended and seconds < limit:
        return None
    _kill_group(pid)  # its workers, too, which may wait for each other
    if not ended:
        _, _, usage = os.wait4(pid, 0)
    return _End(os.waitstatus_to_exitcode(status) if ended else None, seconds, usage.ru_utime + usage.ru_stime)


def _preload() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork
    for name in _PRELOADED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    importlib.import_module("torch.testing._internal.common_distributed").MultiProcContinuousTest.timeout = PATIENCE
    assert "dtensor_gtp" not in sys.modules
    gc.collect()
    gc.freeze()


def _copy_package(run: _Run, is_planted: bool) -> None:
    """The package as links, but for the file with the bug, which is real."""
    copy = run.place / "package" / PACKAGE.name
    for path in (run.directory, run.place):
        shutil.rmtree(path, ignore_errors=True)
    run.directory.mkdir()
    copy.mkdir(parents=True)
    (run.place / "temporary").mkdir()
    *parents, name = Path(run.planted.file).parts
    source = PACKAGE
    for parent in [*parents, None]:
        for entry in source.iterdir():
            if entry.name not in (parent, name) or (parent is not None and entry.name != parent):
                (copy / entry.name).symlink_to(entry)
        if parent is not None:
            source, copy = source / parent, copy / parent
            copy.mkdir()
    changed = copy / name
    changed.write_text(run.planted.text if is_planted else run.planted.before)
    time_of_its_own = list(BUGS).index(run.name)  # no compiled file is of this one
    os.utime(changed, (time_of_its_own, time_of_its_own))


def _run_child(run: _Run, tier: str) -> None:
    """Run pytest in this process, which was forked for it, and end it."""
    status = 3
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with open(run.directory / "output.txt", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        place = run.place.resolve()
        package = str(place / "package")
        sys.path.insert(0, package)
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(place.parent / "compiled")
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # to look for them in what is installed takes a while
        os.environ["PYTHONPATH"] = package  # of processes that tests start anew
        tempfile.tempdir = os.environ["TMPDIR"] = str(place / "temporary")
        os.chdir(PACKAGE.parent)
        import pytest

        marks = {"quick": ["-m", "quick"], "long": ["-m", "not soak"]}.get(tier, [])
        options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", *marks]
        status = pytest.main([*options, *run.tests], plugins=[_Report(run.directory / "report.json")])
        imported = sys.modules.get("dtensor_gtp")
        if imported is not None and not str(imported.__file__).startswith(package):
            print(f"The tests have imported {imported.__file__}, not the copy with the bug.")
            status = 3
        sys.stdout.flush()
    finally:
        os._exit(status)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _result(run: _Run, end: _End, tier: str) -> Result:
    path = run.directory / "report.json"
    report = json.loads(path.read_text()) if path.exists() else {"failed": [], "passed": [], "skipped": []}
    if report["failed"]:
        outcome, detail = "caught", report["failed"][0].split("/")[-1]
    elif end.status is None:
        outcome, detail = "caught", _HUNG
    elif end.status == 0 and report["passed"]:
        outcome, detail = "missed", f"{len(report['passed'])} tests passed"
    elif end.status == 5 and tier == "quick":
        outcome, detail = "missed", "none of its tests is quick"
    else:
        why = f"{len(report['skipped'])} tests skipped" if end.status == 0 else f"pytest has exited with {end.status}"
        lines = (run.directory / "output.txt").read_text().splitlines()[-15:]
        outcome, detail = "error", "\n".join([why, *lines])
    return Result(run.name, run.planted, outcome, detail, end.seconds, end.cpu_seconds)


if __name__ == "__main__":
    sys.exit(main())
