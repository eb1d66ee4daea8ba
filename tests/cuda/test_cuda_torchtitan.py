"""torchtitan's own ``Trainer`` on GPUs, with Llama 3 sharded by ``gtp_shard`` and by torchtitan's FSDP2."""

import unittest
from dataclasses import replace
from typing import Any

from common import shared_directory
from cuda_common import NUM_RANKS, CudaTest
from integration_common import needs
from titan_common import (
    CHUNKED_LOSS,
    SAVED,
    check,
    checkpointed,
    choose_device,
    compiled,
    configuration,
    run,
    run_of_fsdp2,
    sharded,
)


@needs("torchtitan", extra="torchtitan", tier="soak")
@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaTorchtitan(CudaTest):
    def test_losses_are_those_of_fsdp2(self) -> None:
        """With the head's loss at once and in chunks."""
        check(run(sharded()), run_of_fsdp2())
        check(run(sharded(CHUNKED_LOSS)), run_of_fsdp2())

    def test_compiled(self) -> None:
        check(run(compiled("selective", "inductor")), run_of_fsdp2())

    def test_checkpoints(self) -> None:
        """FSDP2 goes on with what ``gtp_shard`` has written, and the reverse."""
        for write, read in ((sharded, configuration), (configuration, sharded)):
            with shared_directory() as folder:
                check(run(checkpointed(write(), folder)), run_of_fsdp2())
                config = checkpointed(read(), folder, load_step=SAVED, load_only=True)
                check(run(config, same_values=False), run_of_fsdp2(), begin=SAVED + 1)


def _in_bfloat16(config: Any) -> Any:
    config.training = replace(config.training, mixed_precision_param="bfloat16")
    return config


@needs("torchtitan", "torchao", extra="torchtitan,torchao", tier="soak")
@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaTorchtitanFloat8(CudaTest):
    def test_float8(self) -> None:
        """torchao's linear layers multiply in float8, whose products have bfloat16. The first step is equal; later ones
        make much of rounding."""
        choose_device()
        from torchtitan.components.quantization import Float8LinearConverter

        float8 = [Float8LinearConverter.Config(model_compile_enabled=False, filter_fqns=["lm_head"])]
        expected = run(_in_bfloat16(configuration(converters=float8)))
        actual = run(_in_bfloat16(sharded(converters=float8)))
        self.assertEqual(actual.losses[1], expected.losses[1])
        check(actual, expected, rtol=2e-3, most_apart=0.3)
        self.assertNotEqual(actual.losses, run(_in_bfloat16(sharded())).losses)
