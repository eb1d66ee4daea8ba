"""torchtitan's own ``Trainer`` with Llama 3 sharded by ``gtp_shard`` and by torchtitan's FSDP2, on the host."""

import sys
from pathlib import Path
from unittest import mock

from common import GlooTest, shared_directory
from integration_common import needs
from titan_common import (
    CHUNKED_LOSS,
    SAVED,
    STEPS,
    check,
    checkpointed,
    choose_device,
    compiled,
    configuration,
    run,
    run_of_fsdp2,
    sharded,
    train,
)
from torch.profiler import ProfilerActivity, profile


@needs("torchtitan", extra="torchtitan")
class TestTorchtitan(GlooTest):
    def test_losses_are_those_of_fsdp2(self) -> None:
        """Also with replicas and with tensor parallelism."""
        for parallelism in ({}, {"data_parallel_replicate_degree": 2}, {"tensor_parallel_degree": 2}):
            check(run(sharded(**parallelism)), run_of_fsdp2(**parallelism))

    def test_chunked_loss(self) -> None:
        """The head is gathered once for all chunks, and its gradient reduced once."""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            actual = run(sharded(CHUNKED_LOSS))
        check(actual, run_of_fsdp2())
        counts = {event.key: event.count for event in profiler.key_averages()}
        for collective in ("all_gather", "reduce_scatter"):
            self.assertEqual(counts[f"GTP::{collective} (lm_head.weight)"], STEPS)
        tensor_parallel = {"tensor_parallel_degree": 2}
        check(run(sharded(CHUNKED_LOSS, **tensor_parallel)), run_of_fsdp2(**tensor_parallel))

    def test_checkpoints(self) -> None:
        """A new trainer goes on as the one that was not interrupted. FSDP2 reads what ``gtp_shard`` has written, and
        the reverse."""
        for write, readers in ((sharded, (sharded, configuration)), (configuration, (sharded,))):
            with shared_directory() as folder:
                check(run(checkpointed(write(), folder)), run_of_fsdp2())
                for read in readers:
                    config = checkpointed(read(), folder, load_step=SAVED, load_only=True)
                    check(run(config, same_values=False), run_of_fsdp2(), begin=SAVED + 1)

    def test_command_line_of_the_example(self) -> None:
        choose_device()
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
class TestCompiled(GlooTest):
    def test_compiled(self) -> None:
        """With each kind of activation checkpointing."""
        for checkpointing in ("selective", "full", "none"):
            check(run(compiled(checkpointing)), run_of_fsdp2())

    def test_compiled_with_tensor_parallelism(self) -> None:
        """Without activation checkpointing, with which this fails in torch 2.13, under ``fully_shard`` as well."""
        tensor_parallel = {"tensor_parallel_degree": 2}
        check(run(compiled("none", **tensor_parallel)), run_of_fsdp2(**tensor_parallel))


@needs("torchtitan", "torchao", extra="torchtitan,torchao")
class TestFloat8(GlooTest):
    def test_emulated_float8(self) -> None:
        """torchao's linear layers multiply as they do under FSDP2."""
        choose_device()
        from torchtitan.components.quantization import Float8LinearConverter

        emulated = [Float8LinearConverter.Config(emulate=True, model_compile_enabled=False, filter_fqns=["lm_head"])]
        expected, actual = run(configuration(converters=emulated)), run(sharded(converters=emulated))
        check(actual, expected)
        self.assertNotEqual(actual.losses, run_of_fsdp2().losses)
