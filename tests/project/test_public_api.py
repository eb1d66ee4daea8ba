"""The public surface: names and signatures are frozen, documented, and those of ``fully_shard`` where it has them."""

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch.distributed.fsdp as fsdp
from expecttest import TestCase

import dtensor_gtp
from dtensor_gtp._modules import gtp_module


def public_symbols() -> Iterator[tuple[str, Any]]:
    for name in dtensor_gtp.__all__:
        if not name.startswith("__"):
            yield name, getattr(dtensor_gtp, name)


def own_methods(cls: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(cls).items():
        if not name.startswith("_") and inspect.isfunction(value):
            yield name, value


def parameters(function: Any) -> list[inspect.Parameter]:
    """Names, kinds and defaults; annotations are mypy's business."""
    found = [
        p for p in inspect.signature(function).parameters.values() if p.name != "self" and not p.name.startswith("_")
    ]
    return [p.replace(annotation=inspect.Parameter.empty, default=shown(p.default)) for p in found]


def shown(default: Any) -> Any:
    """A policy's fields, of which torch may get more, are left out."""
    is_policy = is_dataclass(default) and not isinstance(default, type) and default == type(default)()
    return Name(f"{type(default).__name__}()") if is_policy else default


class Name(str):
    def __repr__(self) -> str:
        return str(self)


def described(name: str, function: Any) -> str:
    return textwrap.fill(f"{name}{inspect.Signature(parameters(function))}", 110, subsequent_indent="    ")


class TestPublicApi(TestCase):
    def test_all_is_frozen(self) -> None:
        self.assertExpectedInline(
            "\n".join(dtensor_gtp.__all__),
            """\
CapturedBlocks
CapturedStep
GTPModule
GTPShard
MeshRNG
MixedPrecisionPolicy
PlanResult
SchedulePolicy
SelectiveOffload
ShardingReport
UnshardHandle
WeightMesh
__version__
capture_blocks
capture_step
elastic
gtp_shard
init_weight_mesh
plan
quantize_
register_gtp_forward_method
shard_added
sharding_report
whole_weights""",
        )
        self.assertEqual(dtensor_gtp.__all__, sorted(dtensor_gtp.__all__))

    def test_nothing_else_is_public(self) -> None:
        """Beside ``__all__`` the package shows its modules only."""
        names = {name for name in dir(dtensor_gtp) if not name.startswith("_")}
        self.assertEqual(
            {name for name in names if not inspect.ismodule(getattr(dtensor_gtp, name))},
            {name for name, value in public_symbols() if not inspect.ismodule(value)},
        )

    def test_signatures(self) -> None:
        lines = [described(name, symbol) for name, symbol in public_symbols() if inspect.isfunction(symbol)]
        lines += [described(cls.__name__, cls) for cls in (dtensor_gtp.GTPShard, dtensor_gtp.SchedulePolicy)]
        for cls in (dtensor_gtp.GTPModule, dtensor_gtp.UnshardHandle, dtensor_gtp.CapturedStep):
            lines += [described(f"{cls.__name__}.{name}", method) for name, method in own_methods(cls)]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
capture_blocks(module, blocks, *, warmup_calls=3, max_graphs=4)
capture_step(fn, module, optimizer=(), *, warmup_steps=3, max_graphs=8)
gtp_shard(module, mesh, *, reshard_after_forward=True, shard_placement_fn=None,
    mp_policy=MixedPrecisionPolicy(), schedule=SchedulePolicy(), ignored_params=None,
    offload_policy=OffloadPolicy(), shard_optimizer=False)
init_weight_mesh(device_type=None, *, replicate=1, dp=1, gtp=1, tp=1, cp=1, ep=1, expert_gtp=1, expert_tp=1,
    pp=1, rank_order=None, seed=0, backend=None, timeout=None)
plan(model, machine='h100', *, top=5, report=None, **job)
quantize_(module, recipe, *, filter_fn=None, storage='master')
register_gtp_forward_method(module, method_name)
shard_added(module)
sharding_report(module, *, machine=None, verbose=False)
whole_weights(module, *, trained_only=False)
GTPShard(dim, *, split_factor=1, block_size=1)
SchedulePolicy(memory='balanced', gather_backend='auto', reduce_scatter='auto', prefetch_nbytes=None,
    keep_nbytes=None, embedding='auto', head='exchange', exchange_tokens=None, min_shard_numel=1024)
GTPModule.unshard(async_op=False)
GTPModule.reshard()
GTPModule.set_requires_gradient_sync(requires_gradient_sync, *, recurse=True)
GTPModule.set_requires_all_reduce(requires_all_reduce, *, recurse=True)
GTPModule.set_reshard_after_forward(reshard_after_forward, recurse=True)
GTPModule.set_reshard_after_backward(reshard_after_backward, *, recurse=True)
GTPModule.set_gradient_divide_factor(factor)
GTPModule.set_all_reduce_hook(hook, *, stream=None)
GTPModule.set_reduce_scatter_unused_params(reduce_scatter_unused_params, *, recurse=True)
GTPModule.set_reduce_scatter_divide_factor(factor)
GTPModule.reset_iter_state()
GTPModule.set_is_last_backward(is_last_backward)
UnshardHandle.wait()
CapturedStep.reset()""",
        )

    def test_methods_take_what_those_of_fsdp_module_take(self) -> None:
        """One that is passed on by position or by name means the same in both."""
        shared = [name for name, _ in own_methods(dtensor_gtp.GTPModule) if hasattr(fsdp.FSDPModule, name)]
        self.assertGreaterEqual(len(shared), 8)
        for name in shared:
            ours, theirs = (parameters(getattr(cls, name)) for cls in (dtensor_gtp.GTPModule, fsdp.FSDPModule))
            self.assertEqual(ours, theirs[: len(ours)], name)

    def test_all_of_fully_shard_is_known(self) -> None:
        """Its arguments and the methods of its modules: the same here, or refused with what to use instead."""
        refused = set(gtp_module.ARGUMENTS)
        arguments = {p.name for p in parameters(fsdp.fully_shard)}
        self.assertEqual(arguments - {p.name for p in parameters(dtensor_gtp.gtp_shard)} - refused, set())
        methods = {name for name, _ in own_methods(fsdp.FSDPModule)}
        ours = {name for name, _ in own_methods(dtensor_gtp.GTPModule)}
        self.assertEqual(methods - ours - gtp_module.METHODS.keys(), set())
        self.assertEqual(ours & gtp_module.METHODS.keys(), set())
        page = (Path(__file__).parents[2] / "docs" / "guides" / "composability.md").read_text()
        named = arguments | methods | refused | gtp_module.METHODS.keys()
        self.assertEqual({name for name in named if f"`{name}`" not in page}, set())

    def test_the_docstring_of_gtp_shard(self) -> None:
        """That each name has one, and says something of each argument: ``test_reference_examples.py``."""
        for section in ("Args:", "Returns:", "Raises:", "fully_shard"):
            self.assertIn(section, dtensor_gtp.gtp_shard.__doc__ or "")

    def test_version(self) -> None:
        self.assertTrue(re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?", dtensor_gtp.__version__))
