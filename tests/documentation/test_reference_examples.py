"""Each public name has a docstring with an example, and the example runs. Those of several ranks run in
``tests/documentation/test_reference_on_ranks.py``."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from reference import FOREIGN, LIBRARIES, NEEDS, PACKAGE, Entry, entries, public_names, run_example

import dtensor_gtp
from dtensor_gtp._comm.debug import DebugFlags

ENTRIES = entries()
IN_ONE_PROCESS = [
    pytest.param(entry, id=entry.path, marks=[pytest.mark.long] * entry.is_long)
    for entry in ENTRIES
    if entry.example and not entry.is_on_ranks
]
# Classes that users do not make: a function returns them.
MADE_BY_US = {
    "dtensor_gtp.CapturedBlocks": "capture_blocks",
    "dtensor_gtp.CapturedStep": "capture_step",
    "dtensor_gtp.UnshardHandle": "unshard",
    "dtensor_gtp.elastic.ReplicaSync": "synchronize_replicas",
    "dtensor_gtp.planner.Machine": "load_machine",
    "dtensor_gtp.quant.NativeWeight": "quantize_",
}
OLD_NAME = "an old name"
# Public for other modules of the package or for hooks of torch: users do not call them.
CALLED_BY_OTHERS = {
    "dtensor_gtp.GTPModule.set_reduce_scatter_divide_factor": OLD_NAME,
    "dtensor_gtp.checkpoint.ConvertingLoadPlanner.create_local_plan": "dcp.load",
    "dtensor_gtp.checkpoint.ConvertingLoadPlanner.lookup_tensor": "dcp.load",
    "dtensor_gtp.checkpoint.ConvertingLoadPlanner.set_up_planner": "dcp.load",
    "dtensor_gtp.elastic.RankWatch.move_to": "regroup",
    "dtensor_gtp.elastic.ReplicaSavePlanner.set_up_planner": "dcp.save",
    "dtensor_gtp.elastic.ReplicaSync.add": "backward",
    "dtensor_gtp.elastic.ReplicaSync.finish": "backward",
    "dtensor_gtp.elastic.ReplicaSync.reduce_whole": "backward",
    "dtensor_gtp.elastic.ReplicaSync.reset": "backward",
    "dtensor_gtp.elastic.ReplicaSync.share": "backward",
    "dtensor_gtp.elastic.ReplicaSync.weigh_full": "backward",
    "dtensor_gtp.integrations.accelerate.GTPAccelerator.prepare_model": "prepare",
    "dtensor_gtp.integrations.accelerate.GTPAccelerator.unscale_gradients": "clip_grad_norm_",
    "dtensor_gtp.integrations.lightning.GTPStrategy.block_backward_sync": "Trainer",
    "dtensor_gtp.integrations.lightning.GTPStrategy.model_to_device": "Trainer",
    "dtensor_gtp.integrations.lightning.GTPStrategy.setup_environment": "Trainer",
    "dtensor_gtp.integrations.transformers.GTPTrainer.create_accelerator_and_postprocess": "Trainer",
    "dtensor_gtp.integrations.transformers.GTPTrainer.get_optimizer_cls_and_kwargs": "Trainer",
    "dtensor_gtp.nn.GroupedLinear.check_gtp_placement": "gtp_shard",
    "dtensor_gtp.nn.GroupedLinear.check_input": "forward",
    "dtensor_gtp.nn.GroupedLinear.default_gtp_placement": "gtp_shard",
    "dtensor_gtp.nn.GroupedLinear.gtp_fused": "gtp_shard",
    "dtensor_gtp.nn.GroupedLinear.names_of": "gtp_shard",
    "dtensor_gtp.optim.MasterOptimizer.add_param_group": "torch.optim.Optimizer",
    "dtensor_gtp.planner.Job.precision": "plan",
    "dtensor_gtp.planner.Job.quantization": "plan",
    "dtensor_gtp.planner.Layout.axes": "plan",
    "dtensor_gtp.planner.Machine.is_preset": "describe",
    "dtensor_gtp.planner.Machine.memory_nbytes": "plan",
    "dtensor_gtp.planner.Machine.straggling": "plan",
    "dtensor_gtp.planner.Memory.parts": "describe",
    "dtensor_gtp.quant.NativeWeight.like": "ops of the weight",
    "dtensor_gtp.quant.NativeWeight.narrowed": "ops of the weight",
    "dtensor_gtp.quant.NativeWeight.write": "ops of the weight",
    "dtensor_gtp.quant.Recipe.direction": "gathers",
    "dtensor_gtp.quant.Recipe.gemms": "linear layers",
    "dtensor_gtp.quant.Recipe.grouped_gemms": "GroupedLinear",
}


def test_the_modules_are_those_that_have_a_page() -> None:
    assert {"dtensor_gtp", "dtensor_gtp.nn", "dtensor_gtp.policy", "dtensor_gtp.elastic"} <= set(public_names())
    assert {f"dtensor_gtp.integrations.{library}" for library in LIBRARIES} <= set(public_names())


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
    if entry.path not in MADE_BY_US and entry.path not in CALLED_BY_OTHERS:
        assert set(entry.arguments) - entry.described_arguments == set(), "arguments that are not described"


def test_each_method_stands_in_an_example() -> None:
    shown = "\n".join(entry.example for entry in ENTRIES)
    methods = {entry.path for entry in ENTRIES if entry.kind in ("method", "property")}
    assert CALLED_BY_OTHERS.keys() <= methods
    names = {path: path.rpartition(".")[2] for path in methods - CALLED_BY_OTHERS.keys()}
    assert {path for path, name in names.items() if name != "forward" and not re.search(rf"\b{name}\b", shown)} == set()


def test_pages_show_the_methods_that_users_call() -> None:
    for entry in ENTRIES:
        if entry.kind != "class":
            continue
        name = entry.module.removeprefix("dtensor_gtp.")
        folder = Path(__file__).parents[2] / "docs" / "reference"
        own = folder / name / f"{entry.name}.rst"  # of a large module each class has a page
        page = (own if own.is_file() else folder / f"{name}.rst").read_text()
        found = re.search(rf"^\.\. auto(?:class|exception):: {entry.name}\n(?:   :members:(.*)\n)?", page, re.MULTILINE)
        assert found, f"{entry.path} is on no page"
        methods = {other.path for other in ENTRIES if other.path.startswith(f"{entry.path}.")}
        wanted = {path.rpartition(".")[2] for path in methods if CALLED_BY_OTHERS.get(path, OLD_NAME) == OLD_NAME}
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
    read = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r"DTENSOR_GTP_[A-Z]+", path.read_text())}
    assert read, "the sources name no variable"
    text = dtensor_gtp.__doc__ or ""
    assert read == set(re.findall(r"DTENSOR_GTP_[A-Z]+", text))
    for flag in fields(DebugFlags):
        assert f"- ``{flag.name.removesuffix('_seed')}``" in text


@pytest.mark.parametrize("entry", IN_ONE_PROCESS)
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


def test_a_wrong_example_fails() -> None:
    text = "Adds.\n\nExample:\n    >>> nn.Linear(2, 3).weight.shape\n    torch.Size([2, 3])\n    >>> 1 / 0\n"
    with pytest.raises(AssertionError, match=r"(?s)Expected.*torch.Size\(\[2, 3\]\).*ZeroDivisionError"):
        run_example(Entry("dtensor_gtp", "wrong", text, "function"))
    with pytest.raises(AssertionError, match="no line of its example"):
        run_example(Entry("dtensor_gtp", "empty", "Adds.\n\nExample:\n    nothing\n", "function"))
