"""Each public name has a docstring with an example, and the example runs; one that makes a mesh runs on four ranks."""

import contextlib
import functools
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import GlooTest, shared_directory
from reference import FOREIGN, LIBRARIES, NEEDS, NUM_RANKS, Entry, entries, public_names, run_example
from sources import ROOT, SOURCES

import dtensor_gtp
from dtensor_gtp._comm.debug import DebugFlags

ENTRIES = entries()
WITH_EXAMPLES = [entry for entry in ENTRIES if entry.example]
# Classes that users do not make: a function returns them.
MADE_BY_US = {
    "dtensor_gtp.CapturedBlocks": "capture_blocks",
    "dtensor_gtp.CapturedStep": "capture_step",
    "dtensor_gtp.UnshardHandle": "unshard",
    "dtensor_gtp.elastic.ReplicaSync": "synchronize_replicas",
    "dtensor_gtp.planner.Machine": "load_machine",
    "dtensor_gtp.quant.NativeWeight": "quantize_",
}
OLD_NAMES = {"dtensor_gtp.GTPModule.set_reduce_scatter_divide_factor"}
# Public for other modules of the package or for hooks of torch: users do not call them.
_OF_CLASSES = {
    "checkpoint.ConvertingLoadPlanner": "create_local_plan lookup_tensor set_up_planner",
    "elastic.RankWatch": "move_to",
    "elastic.ReplicaSavePlanner": "set_up_planner",
    "elastic.ReplicaSync": "add finish reduce_whole reset share take_turn weigh_full",
    "integrations.accelerate.GTPAccelerator": "prepare_model unscale_gradients",
    "integrations.lightning.GTPStrategy": "block_backward_sync load_checkpoint model_to_device setup setup_environment",
    "integrations.transformers.GTPTrainer": "create_accelerator_and_postprocess get_optimizer_cls_and_kwargs",
    "nn.GroupedLinear": "check_gtp_placement check_input default_gtp_placement gtp_fused names_of",
    "optim.MasterOptimizer": "add_param_group",
    "planner.Job": "precision quantization",
    "planner.Layout": "axes",
    "planner.Machine": "is_preset memory_nbytes straggling",
    "planner.Memory": "parts",
    "quant.NativeWeight": "like narrowed write",
    "quant.Recipe": "direction gemms grouped_gemms",
}
CALLED_BY_OTHERS = {f"dtensor_gtp.{cls}.{name}" for cls, names in _OF_CLASSES.items() for name in names.split()}
NOT_SHOWN = CALLED_BY_OTHERS | OLD_NAMES


def test_public_modules_are_found() -> None:
    libraries = {f"dtensor_gtp.integrations.{library}" for library in LIBRARIES}
    expected = {"dtensor_gtp", "dtensor_gtp.nn", "dtensor_gtp.policy", "dtensor_gtp.elastic"} | libraries
    assert expected <= set(public_names())
    assert len(public_names()) >= 15


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.path)
def test_a_docstring_says_what_the_name_is(entry: Entry) -> None:
    assert re.match(r"[A-Z`*:]", entry.text), "no docstring"
    assert not re.match(rf"{entry.name}\(", entry.text), "a docstring that dataclass has generated"
    if entry.kind in ("class", "function", "data"):
        assert entry.example, "no example"
    assert max(map(len, entry.example.splitlines()), default=0) <= 92, "an example that is wider than its page"
    # Sphinx takes what is before a colon for a type.
    if entry.kind in ("data", "property"):
        assert ": " not in entry.text.partition("\n")[0]
    returned = re.search(r"^Returns:\n    (.*)", entry.text, re.MULTILINE)
    assert returned is None or ": " not in re.sub(r"(:\w+:)?(`+).*?\2", "", returned[1])
    if entry.path not in MADE_BY_US and entry.path not in NOT_SHOWN:
        assert set(entry.arguments) - entry.described_arguments == set(), "arguments that are not described"


def test_each_method_stands_in_an_example() -> None:
    shown = "\n".join(entry.example for entry in ENTRIES)
    methods = {entry.path for entry in ENTRIES if entry.kind in ("method", "property")}
    assert methods >= NOT_SHOWN
    names = {path: path.rpartition(".")[2] for path in methods - NOT_SHOWN}
    assert {path for path, name in names.items() if name != "forward" and not re.search(rf"\b{name}\b", shown)} == set()


def test_pages_show_the_methods_that_users_call() -> None:
    for entry in ENTRIES:
        if entry.kind != "class":
            continue
        name = entry.module.removeprefix("dtensor_gtp.")
        folder = ROOT / "docs" / "reference"
        own = folder / name / f"{entry.name}.rst"  # of a large module each class has a page
        page = (own if own.is_file() else folder / f"{name}.rst").read_text()
        found = re.search(rf"^\.\. auto(?:class|exception):: {entry.name}\n(?:   :members:(.*)\n)?", page, re.MULTILINE)
        assert found, f"{entry.path} is on no page"
        methods = {other.path for other in ENTRIES if other.path.startswith(f"{entry.path}.")}
        wanted = {path.rpartition(".")[2] for path in methods - CALLED_BY_OTHERS}
        shows_all = found[1] == "" and len(wanted) == len(methods)
        assert shows_all or set(re.findall(r"\w+", found[1] or "")) == wanted, entry.path


def test_what_an_example_needs_is_said_where_a_reader_sees_it() -> None:
    for entry in ENTRIES:
        if entry.example and entry.needs:
            assert entry.needs in entry.text
        elif entry.example:
            assert "Needs a" not in entry.text, f"{entry.path} is not in NEEDS"
    known = {entry.path for entry in ENTRIES} | set(public_names())
    assert NEEDS.keys() <= known
    assert {path.rpartition(".")[2] for path in FOREIGN} <= set(dtensor_gtp.__all__)


def test_environment_variables_are_in_the_docstring_of_the_package() -> None:
    read = {name for path in SOURCES for name in re.findall(r"DTENSOR_GTP_[A-Z]+", path.read_text())}
    assert read, "the sources name no variable"
    text = dtensor_gtp.__doc__ or ""
    assert read == set(re.findall(r"DTENSOR_GTP_[A-Z]+", text))
    for flag in fields(DebugFlags):
        assert f"- ``{flag.name.removesuffix('_seed')}``" in text


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.path, marks=[pytest.mark.long] * entry.is_long)
        for entry in WITH_EXAMPLES
        if not entry.is_on_ranks
    ],
)
def test_example_runs(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    if entry.lacks:
        pytest.skip(entry.lacks)
    if "a GPU" in entry.needs:  # on one rank of NCCL
        for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 0)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "localhost")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            run_example(entry)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class TestReferenceExamples(GlooTest):
    """Has one test for each example that makes a mesh."""

    world_size = NUM_RANKS


def _on_ranks(entry: Entry) -> Callable[[GlooTest], None]:
    def test(self: GlooTest) -> None:
        if entry.lacks:
            self.skipTest(entry.lacks)
        with (
            shared_directory() as folder,
            contextlib.chdir(folder),  # examples write files
            mock.patch.object(dtensor_gtp, "init_weight_mesh", known_mesh),
            torch.random.fork_rng(devices=[]),
        ):
            torch.manual_seed(0)
            run_example(entry)

    return pytest.mark.long(test) if entry.is_long else test


def known_mesh(*args: Any, **sizes: Any) -> dtensor_gtp.WeightMesh:
    """Each mesh once: to connect its process groups takes longer than an example."""
    mesh = _mesh(*args, **sizes)
    mesh.rng.manual_seed(sizes.get("seed", 0))
    return mesh


_mesh = functools.cache(dtensor_gtp.init_weight_mesh)

for _entry in WITH_EXAMPLES:
    if _entry.is_on_ranks:
        setattr(TestReferenceExamples, "test_" + re.sub(r"\W", "_", _entry.path), _on_ranks(_entry))


def test_examples_that_shard_are_among_those_on_ranks() -> None:
    names = ("gtp_shard", "sharding_report", "elastic_nonuniform_mesh")
    assert {f"test_dtensor_gtp_{name}" for name in names} <= set(dir(TestReferenceExamples))


def test_a_wrong_example_fails() -> None:
    text = "Adds.\n\nExample:\n    >>> nn.Linear(2, 3).weight.shape\n    torch.Size([2, 3])\n    >>> 1 / 0\n"
    with pytest.raises(AssertionError, match=r"(?s)Expected.*torch.Size\(\[2, 3\]\).*ZeroDivisionError"):
        run_example(Entry("dtensor_gtp", "wrong", text, "function"))
    with pytest.raises(AssertionError, match="no line of its example"):
        run_example(Entry("dtensor_gtp", "empty", "Adds.\n\nExample:\n    nothing\n", "function"))
