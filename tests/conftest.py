"""Starts the workers of multi-process tests from a server that has imported torch once.

Importing torch is most of a small test's time. CUDA does not survive a fork, so with GPUs each worker is spawned.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

# Who wants no compiled files beside the sources has them elsewhere, as in .ci/run. Else each of hundreds of processes
# compiles what it imports.
if sys.dont_write_bytecode and sys.pycache_prefix is None:
    sys.pycache_prefix = str(Path(tempfile.gettempdir(), f"dtensor_gtp_compiled_{os.getuid()}"))
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

# Before torch is imported, for all processes of the suite: the operations of a test are too small for several threads,
# which would only wait for each other, and burn the cores that other ranks need.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else each process that compiles asks the C++ compiler, and Python processes of their own, what the processor can.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ["COLUMNS"] = "200"  # reports do not wrap, however wide the terminal is

import pytest
import torch

from planted_bugs_quick import FILES, is_quick

# What tests share is in support/, and in tests of other folders.
sys.path[1:1] = sorted(str(path) for path in Path(__file__).parent.glob("[a-z]*/"))


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "test classes, and functions of a file outside of classes, run in an order drawn with SEED"
    parser.addoption("--random-order", type=int, metavar="SEED", help=what)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a worker that crashes says in which line
    if torch.cuda.is_available():
        multiprocessing.set_start_method("spawn", force=True)
        return
    multiprocessing.set_start_method("forkserver", force=True)
    names = [
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.experimental",
        "torch.distributed.tensor.parallel",
        "torch._inductor.compile_fx",  # what any backend of torch.compile imports when it is first called
        "torch.testing._internal.common_distributed",
        "dtensor_gtp",
    ]
    if "library" not in config.option.markexpr:
        multiprocessing.set_forkserver_preload(names)
        return
    multiprocessing.set_forkserver_preload([*names, "library_imports"])
    # Python 3.11 does not hand sys.path on to the server, which would not find that file.
    paths = [str(Path(__file__).parent / "support"), os.environ.get("PYTHONPATH", "")]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths))):
        forkserver.ensure_running()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m quick``, files without such tests are not even imported."""
    is_left_out = config.option.markexpr == "quick" and collection_path.is_file() and collection_path.name not in FILES
    return is_left_out or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.option.random_order
    if seed is not None:
        items.sort(key=lambda item: _drawn(seed, item))
    items.sort(key=_needs_ranks)  # the others first, while these run ahead
    for item in items:
        if is_quick(item.nodeid) and not any(item.iter_markers("long")):
            item.add_marker("quick")


def pytest_collection_finish(session: pytest.Session) -> None:
    from processes import set_up_process  # of support/

    set_up_process()
    items = [item for item in session.items if _needs_ranks(item) and not _is_skipped(item)]
    if len(items) > 1 and multiprocessing.get_start_method() == "forkserver" and not session.config.option.collectonly:
        from workers import lanes  # beside the files that were collected

        lanes().start([item.cls.in_workers(item.name) for item in items], max(2, (os.cpu_count() or 1) // 4))


@pytest.fixture(scope="module", autouse=True)
def only_objects_of_this_file() -> None:
    """Hides what earlier files have left from the collector, and so from the search of gtp_shard for early optimizers,
    which looks at all objects."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    if "workers" in sys.modules:
        sys.modules["workers"].lanes().stop()


def _drawn(seed: int, item: pytest.Item) -> bytes:
    """Equal for the tests of a class. A digest: an order that failed stays the same when less is collected."""
    parent = item.nodeid.partition("[")[0].rpartition("::")[0]
    return hashlib.sha256(f"{seed} {parent}".encode()).digest()


def _needs_ranks(item: pytest.Item) -> bool:
    """Whether it is one of a ``GlooTest``."""
    return hasattr(getattr(item, "cls", None), "in_workers")


def _is_skipped(item: pytest.Item) -> bool:
    return any(getattr(one, "__unittest_skip__", False) for one in (item.cls, item.function))
