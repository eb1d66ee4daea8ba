"""What is shipped, and the rules of the sources that a reader of a diff would miss."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from email.parser import Parser
from pathlib import Path

import pytest
from sources import PACKAGE, ROOT, SOURCES, dotted, nodes, parsed

COMPAT = PACKAGE / "_torch_compat"
VERSION = re.findall(r'__version__ = "(.+)"', (PACKAGE / "_version.py").read_text())[0]
DIST_INFO = f"dtensor_gtp-{VERSION}.dist-info"


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Output of a command that must succeed."""
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{command}: {result.stdout}\n{result.stderr}"
    return result.stdout


def found_by(scan: Callable[[ast.Module], Iterable[str]], paths: Iterable[Path] = SOURCES) -> dict[str, set[str]]:
    """What a scan finds in files, by their names."""
    found = {path.relative_to(ROOT).as_posix(): set(scan(parsed(path))) for path in paths}
    return {name: uses for name, uses in found.items() if uses}


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # --others: a new file counts before it is committed
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [ROOT / name for name in listed if name and (ROOT / name).exists()]


# --- the wheel --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip builds it from the checkout."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", target, ROOT]
    result = subprocess.run(command, cwd=target, capture_output=True, text=True, timeout=300)
    if result.returncode and re.search("No matching distribution found for hatchling", result.stderr):
        pytest.skip("pip cannot fetch the build backend, hatchling, on this machine")
    assert result.returncode == 0, result.stderr
    (path,) = target.glob("*.whl")
    return path


def test_wheel_contains_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = Parser().parsestr(archive.read(f"{DIST_INFO}/METADATA").decode())
    shipped = {name for name in names if not name.startswith(f"{DIST_INFO}/")}
    in_checkout = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    pages = {
        f"dtensor_gtp/_pages/{path.relative_to(ROOT / 'docs').as_posix()}"
        for folder in ("howto", "guides")
        for path in (ROOT / "docs" / folder).iterdir()
    }
    assert shipped == in_checkout | pages
    assert "dtensor_gtp/py.typed" in shipped
    assert f"{DIST_INFO}/licenses/LICENSE" in names
    assert metadata["Name"] == "dtensor-gtp"
    assert metadata["Version"] == VERSION
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    required = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    assert required == ["torch>=2.11"]


def test_the_only_runtime_dependency_is_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["torch>=2.11"]
    allowed = {"torch", "dtensor_gtp", *sys.stdlib_module_names}
    imported = {
        (path.name, module.partition(".")[0])
        for path in SOURCES
        for node in nodes(parsed(path))
        for module in imported_modules(node)
    }
    # Triton comes with torch for GPUs; without it torch's ops run. Each library of an integration has an extra.
    optional = {
        *((f"triton_{name}.py", "triton") for name in ("casts", "kernels", "nvfp4", "arithmetic", "addends")),
        *((f"{name}.py", name) for name in ("accelerate", "lightning", "torchtitan", "transformers")),
        *(("transformers.py", "accelerate"), ("user_model.py", "transformers"), ("_published.py", "transformers")),
    }
    assert [(name, module) for name, module in sorted(imported - optional) if module not in allowed] == []


def test_optional_modules_are_imported_where_they_can_be_missed() -> None:
    importers = {
        path.name
        for path in SOURCES
        for statement in parsed(path).body
        for node in ast.walk(statement)
        if isinstance(node, ast.ImportFrom) and not isinstance(statement, ast.FunctionDef | ast.ClassDef)
        if any("triton" in name for name in (node.module or "", *(alias.name for alias in node.names)))
    }
    assert importers == {"triton_casts.py", "triton_kernels.py", "triton_nvfp4.py"}


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module or ""]
    return []


# --- the repository ---------------------------------------------------------------------------------------------------


def test_top_level_holds_only_what_it_should() -> None:
    top = {path.relative_to(ROOT).parts[0] for path in tracked_files()}
    expected = {"pyproject.toml", "dtensor_gtp", "tests", "examples", "docs", "README.md", "LICENSE"}
    assert {name for name in top if not name.startswith(".")} == expected


def test_quick_start_has_exactly_two_commands_and_ci_runs_the_second() -> None:
    section = re.search(r"^## Quick start\n(.*?)(?=^## |\Z)", (ROOT / "README.md").read_text(), re.S | re.M)
    assert section is not None, "README.md has no section 'Quick start'"
    blocks = re.findall(r"^```\w*\n(.*?)^```", section[1], re.S | re.M)
    commands = [line for block in blocks for line in block.splitlines() if line.strip() and line[0] != "#"]
    assert len(commands) == 2
    assert commands[0].endswith("torchrun --nproc-per-node 4 examples/train_llama.py")
    assert "pytest" in commands[1]
    assert run(ROOT / ".ci" / "run", "--print").splitlines().count(commands[1]) == 1


def test_ci_runs_the_commands_of_the_contributor_guide() -> None:
    guide = (ROOT / "docs" / "contributing.md").read_text()
    *lint, tests, install, long_tests, planted_bugs, docs, site = run(ROOT / ".ci" / "run", "--print").splitlines()
    assert "mypy --strict dtensor_gtp" in lint
    assert tests.endswith("pytest tests")
    assert (long_tests, planted_bugs) == ("pytest tests -m 'long or library'", "python tests/planted_bugs.py")
    assert install.startswith("pip install '.[test,")
    assert docs == "pip install '.[docs]'"
    assert "/tmp/site" in site  # which .ci/run replaces by a folder of its own
    assert all(f"\n{command}\n" in guide for command in (*lint, install, long_tests, planted_bugs, docs, site))


@pytest.mark.parametrize(
    "commands", ["one && pytest tests", "one\npytest tests\nthree", "pytest tests\nsomething else"]
)
def test_ci_refuses_another_quick_start(commands: str, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "README.md").write_text(f"# Title\n## Quick start\n```bash\n{commands}\n```\n## Next\n```\nmore\n```\n")
    result = subprocess.run([script, "--print"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert "exactly two commands" in result.stderr or "must run the tests" in result.stderr


def test_no_marks_of_unfinished_work() -> None:
    words = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked_files()
        if path.suffix in {".py", ".md", ".toml", ".txt", ""}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert found == []


# --- private torch symbols --------------------------------------------------------------------------------------------


def private_torch_uses(tree: ast.Module) -> Iterator[str]:
    """Dotted paths below ``torch``, imported or reached by attribute, with a component that starts with one underscore.

    Attributes of objects are not looked at, since their types are not known here.
    """
    names: dict[str, str] = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_torch(alias.name):
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    if is_private(alias.name):
                        yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and is_torch(node.module or ""):
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = path
                if is_private(path):
                    yield path
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base, _, rest = dotted(node).partition(".")
            if base in names:
                yield f"{names[base]}.{rest}"


def is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def test_only_the_compat_package_uses_private_torch_symbols() -> None:
    assert found_by(private_torch_uses, (path for path in SOURCES if COMPAT not in path.parents)) == {}


# --- streams ----------------------------------------------------------------------------------------------------------

# Streams and events of the runtime, of activations that leave, of a recorded graph, and those
# of the clock of a calibration.
OWN_STREAMS = {
    *("dtensor_gtp/_comm/streams.py", "dtensor_gtp/activations.py"),
    *("dtensor_gtp/graphs/recorder.py", "dtensor_gtp/planner/clock.py"),
}


def stream_makers(tree: ast.Module) -> set[str]:
    """Streams and events of devices that are made, and ``record_stream``, which hides who keeps memory alive."""
    calls = {dotted(node.func) for node in nodes(tree) if isinstance(node, ast.Call)}
    names = {node.attr for node in nodes(tree) if isinstance(node, ast.Attribute)}
    return {call for call in calls if re.fullmatch(r"torch\.(\w+\.)?(Stream|Event)", call)} | names & {"record_stream"}


def test_streams_and_events_are_made_in_one_place_which_alone_records_streams() -> None:
    found = found_by(stream_makers)
    assert found.keys() == OWN_STREAMS
    recorders = {name for name, makers in found.items() if "record_stream" in makers}
    assert recorders == {"dtensor_gtp/_comm/streams.py"}  # see [Note: several compute streams]


# --- state ------------------------------------------------------------------------------------------------------------

MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = re.compile(r"(?:\w+\.)*(list|dict|set|bytearray|defaultdict|deque|OrderedDict|Counter|Weak\w+)")
MUTATORS = re.compile(r"add|append|clear|discard|extend|insert|pop|popitem|remove|setdefault|sort|update")


def mutable_globals(tree: ast.Module) -> Iterator[str]:
    """Module-level containers that are no constants, containers named as constants that change, ``global`` statements.

    Constants are ``__dunder__`` and UPPER_CASE names.
    """
    constants = set()
    for statement in tree.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or not is_mutable(statement.value):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for name in map(ast.unparse, targets):
            if re.fullmatch(r"__\w+__|_?[A-Z][A-Z0-9_]*", name):
                constants.add(name)
            else:
                yield name
    for node in nodes(tree):
        changed: ast.AST = node
        if isinstance(node, ast.Global):
            yield f"global {', '.join(node.names)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and MUTATORS.fullmatch(node.func.attr):
            changed = node.func.value
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        if changed is not node and dotted(changed) in constants:
            yield f"{dotted(changed)} changes"


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return MUTABLE_CALLS.fullmatch(ast.unparse(value.func).partition("[")[0]) is not None
    return isinstance(value, MUTABLE_DISPLAYS)


def test_no_mutable_module_globals() -> None:
    assert found_by(mutable_globals) == {}


# --- time -------------------------------------------------------------------------------------------------------------

# Who may read the machine's clock, and why. All other tests wait for what happens, or replace the clock.
READ_THE_CLOCK = {
    "tests/support/timing.py": "limits that only end what hangs, and waits that no result depends on",
    "tests/support/workers.py": "a limit that only ends what hangs; CPU time of a test",
    "tests/planted_bugs.py": "prints how long each bug has taken, and ends what hangs",
    "tests/project/test_workers.py": "a limit that a worker that hangs is to exceed",
}
CLOCK = re.compile(
    r"\btime\.(?:sleep|time|monotonic|perf_counter|process_time|thread_time)(?:_ns)?\b|^\s*from time import .*$", re.M
)
# What could be a limit, for files that have none need no parse.
LIMIT = re.compile(r"timeout(_s)?=|limit_s=|\.(join|wait|poll)\((\d|\w*timedelta)")
# Shorter limits pass on a busy machine before what they wait for has had its turn. In seconds.
LEAST_LIMIT = 120


def uses_of_the_clock(source: str) -> Iterator[str]:
    """Reads of the machine's clock, sleeps, and limits of waits that are short; in scripts within strings, too."""
    yield from (found[0].strip() for found in CLOCK.finditer(source))
    if not LIMIT.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        limits = [keyword.value for keyword in node.keywords if re.fullmatch("timeout(_s)?|limit_s", keyword.arg or "")]
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("join", "wait", "poll") and len(node.args) == 1:
            limits += node.args
        for limit in limits:
            seconds = seconds_of(limit)
            if seconds is not None and seconds < LEAST_LIMIT:
                yield ast.unparse(node)


def seconds_of(limit: ast.expr) -> float | None:
    """Of a number, or a ``timedelta`` of numbers; None for all else."""
    if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float):
        return limit.value
    if isinstance(limit, ast.Call) and ast.unparse(limit.func).endswith("timedelta"):
        units = {str(k.arg): k.value.value for k in limit.keywords if isinstance(k.value, ast.Constant)}
        if len(units) == len(limit.keywords):
            return timedelta(**units).total_seconds()
    return None


def test_no_test_depends_on_how_fast_the_machine_is() -> None:
    found = {
        name: uses
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__) and (uses := list(uses_of_the_clock(path.read_text())))
        if (name := path.relative_to(ROOT).as_posix()) not in READ_THE_CLOCK
    }
    assert found == {}


# --- the scans themselves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._foo()", ["torch._C", "torch._C._foo"]),
        ("import torch.distributed._x as x", ["torch.distributed._x"]),
        ("from torch.distributed.tensor._ops import f", ["torch.distributed.tensor._ops.f"]),
        ("from torch import _dynamo", ["torch._dynamo"]),
        ("def f():\n    from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("import torch.distributed as dist\ndist._get_default_group()", ["torch.distributed._get_default_group"]),
        ("from torch.distributed.tensor import DTensor as D\nD._x", ["torch.distributed.tensor.DTensor._x"]),
        ("import torch\ntorch.__version__", []),
        ("from torchvision import _meta", []),
        ("from dtensor_gtp._torch_compat import all_gather_base\nself._torch = 1", []),
        # streams
        ("s = torch.cuda.Stream()", ["torch.cuda.Stream"]),
        ("def f(e: torch.Event) -> torch.Stream:\n    return torch.Stream(e.device)", ["torch.Stream"]),
        ("e = torch.Event(device)", ["torch.Event"]),
        ("t.record_stream(s)", ["record_stream"]),
        ("lost = threading.Event()\ns = torch.cuda.current_stream()\ne = s.record_event()", []),
        # state
        ("cache = {}", ["cache"]),
        ("cache: dict[int, int] = dict()", ["cache"]),
        ("registry = weakref.WeakKeyDictionary()", ["registry"]),
        ("items = [x for x in y]", ["items"]),
        ("CACHE = {}\ndef f(x):\n    CACHE[x] = 1", ["CACHE changes"]),
        ("SEEN = set()\ndef f(x):\n    SEEN.add(x)", ["SEEN changes"]),
        ("count = 0\ndef f():\n    global count\n    count += 1", ["global count"]),
        ("__all__ = ['f']\nNAMES = {'a': 1}\n_SIZES = [1]\nlogger = getLogger(__name__)\nx = NAMES['a']", []),
        # time
        ("import time\ntime.sleep(1)", ["time.sleep"]),
        ("begin = time.perf_counter_ns()", ["time.perf_counter_ns"]),
        ("from time import monotonic", ["from time import monotonic"]),
        ("script = 'import time; time.sleep(9)'", ["time.sleep"]),
        ("run(command, timeout=60)", ["run(command, timeout=60)"]),
        ("init(timeout=timedelta(seconds=20))", ["init(timeout=timedelta(seconds=20))"]),
        ("process.join(10)", ["process.join(10)"]),
        ("process.join()\nprocess.join(HANG_S)\nrun(timeout=300)\nf(timeout=timedelta(minutes=5))", []),
        ("','.join(names)\nos.path.join(a, b)\nhandle.wait()\nbarrier.wait(turn, stream)", []),
        ("mock.patch.object(debug.time, 'sleep')\nrun.time\ntimes.sleep", []),
    ],
)
def test_scans_see(source: str, found: list[str]) -> None:
    tree = ast.parse(source)
    scans = (private_torch_uses(tree), stream_makers(tree), mutable_globals(tree), uses_of_the_clock(source))
    assert sorted(use for scan in scans for use in scan) == found
