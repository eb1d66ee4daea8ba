"""torchtitan's own ``Trainer`` with Llama 3 sharded by ``gtp_shard`` and by torchtitan's FSDP2, on the host."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from common import GlooTest, full, shared_directory
from integration_common import needs
from titan_common import STEPS, configuration, named_parameters, on_the_host, train
from torch.profiler import ProfilerActivity, profile

CHUNKED_LOSS = "llama3_debugmodel"
SAVED = STEPS // 2  # the step after which a checkpoint is written


class Run(NamedTuple):
    losses: dict[int, float]  # by step
    params: dict[str, torch.Tensor]  # whole


def run(config: Any, **options: Any) -> Run:
    losses, model = train(config, **options)
    return Run(losses, {name: full(param.detach()) for name, param in named_parameters(model).items()})


@functools.cache
def run_of_fsdp2(**parallelism: int) -> Run:
    return run(configuration(**parallelism))


def sharded(*registered: str, **parallelism: Any) -> Any:
    on_the_host()
    from dtensor_gtp.integrations.torchtitan import with_gtp

    return with_gtp(configuration(*registered, **parallelism))


def compiled(checkpointed: str, **parallelism: Any) -> Any:
    """With compiled blocks, and this kind of activation checkpointing: "selective", "full" or "none"."""
    config = sharded(**parallelism)
    from torchtitan.distributed.activation_checkpoint import FullAC

    config.compile = replace(config.compile, enable=True, components=["model"], backend="aot_eager")
    if checkpointed != "selective":
        config.activation_checkpoint = FullAC.Config() if checkpointed == "full" else None
    return config


def checkpointed(config: Any, folder: Path, **options: Any) -> Any:
    config.checkpoint = replace(
        config.checkpoint, enable=True, interval=SAVED, last_save_model_only=False, folder=str(folder), **options
    )
    return config


class TrainerTest(GlooTest):
    def check(self, actual: Run, expected: Run, begin: int = 1) -> None:
        """Losses of all steps from ``begin`` on, and the parameters after the last."""
        self.assertLess(expected.losses[STEPS], expected.losses[1] - 0.3)
        steps = {step: expected.losses[step] for step in range(begin, STEPS + 1)}
        self.assertEqual(actual.losses, steps, atol=2e-4, rtol=1e-4)
        for name, param in expected.params.items():
            torch.testing.assert_close(actual.params[name], param, atol=2e-3, rtol=1e-3, msg=name)


@needs("torchtitan", extra="torchtitan")
class TestTorchtitan(TrainerTest):
    def test_losses_are_those_of_fsdp2(self) -> None:
        self.check(run(sharded()), run_of_fsdp2())

    def test_with_replicas(self) -> None:
        replicas = {"data_parallel_replicate_degree": 2}
        self.check(run(sharded(**replicas)), run_of_fsdp2(**replicas))

    def test_with_tensor_parallelism(self) -> None:
        self.check(run(sharded(tensor_parallel_degree=2)), run_of_fsdp2(tensor_parallel_degree=2))

    def test_chunked_loss(self) -> None:
        """The head is gathered once for all chunks, and its gradient reduced once."""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            actual = run(sharded(CHUNKED_LOSS))
        self.check(actual, run_of_fsdp2())
        counts = {event.key: event.count for event in profiler.key_averages()}
        for collective in ("all_gather", "reduce_scatter"):
            self.assertEqual(counts[f"GTP::{collective} (lm_head.weight)"], STEPS)
        tensor_parallel = {"tensor_parallel_degree": 2}
        self.check(run(sharded(CHUNKED_LOSS, **tensor_parallel)), run_of_fsdp2(**tensor_parallel))

    def test_checkpoints(self) -> None:
        """A new trainer goes on as the one that was not interrupted. FSDP2 reads what ``gtp_shard`` has written, and
        the reverse."""
        for write, readers in ((sharded, (sharded, configuration)), (configuration, (sharded,))):
            with shared_directory() as folder:
                self.check(run(checkpointed(write(), folder)), run_of_fsdp2())
                for read in readers:
                    config = checkpointed(read(), folder, load_step=SAVED, load_only=True)
                    self.check(run(config, same_values=False), run_of_fsdp2(), begin=SAVED + 1)

    def test_command_line_of_the_example(self) -> None:
        on_the_host()
        from torchtitan.config import ConfigManager

        from dtensor_gtp.integrations.torchtitan import parallelize_llama

        command = "--module torchtitan_llama3 --config llama3_8b_gtp --parallelism.tensor_parallel_degree 2"
        with mock.patch.object(sys, "path", [str(Path(__file__).parents[2] / "examples"), *sys.path]):
            config = ConfigManager().parse_args(command.split())
        self.assertIs(config.model_spec.parallelize_fn, parallelize_llama)
        self.assertEqual(config.parallelism.tensor_parallel_degree, 2)

    def test_what_is_not_supported(self) -> None:
        for options, message in (
            ({"pipeline_parallel_degree": 2}, "does not support pipeline parallelism"),
            ({"context_parallel_degree": 2}, "does not support context parallelism"),
        ):
            with self.assertRaisesRegex(NotImplementedError, message):
                train(sharded(**options))
        config = sharded()
        config.parallelism.spmd_backend = "spmd_types"
        with self.assertRaisesRegex(NotImplementedError, "expects parallelism.spmd_backend='partial_dtensor'"):
            train(config)


@needs("torchtitan", extra="torchtitan", tier="soak")
class TestCompiled(TrainerTest):
    def test_compiled(self) -> None:
        """With each kind of activation checkpointing."""
        for checkpointing in ("selective", "full", "none"):
            self.check(run(compiled(checkpointing)), run_of_fsdp2())

    def test_compiled_with_tensor_parallelism(self) -> None:
        """Without activation checkpointing, with which this fails in torch 2.13, under ``fully_shard`` as well."""
        tensor_parallel = {"tensor_parallel_degree": 2}
        self.check(run(compiled("none", **tensor_parallel)), run_of_fsdp2(**tensor_parallel))


@needs("torchtitan", "torchao", extra="torchtitan,torchao")
class TestFloat8(TrainerTest):
    def test_emulated_float8(self) -> None:
        """torchao's linear layers multiply as they do under FSDP2."""
        on_the_host()
        from torchtitan.components.quantization import Float8LinearConverter

        emulated = [Float8LinearConverter.Config(emulate=True, model_compile_enabled=False, filter_fqns=["lm_head"])]
        expected, actual = run(configuration(converters=emulated)), run(sharded(converters=emulated))
        self.check(actual, expected)
        self.assertNotEqual(actual.losses, run_of_fsdp2().losses)
