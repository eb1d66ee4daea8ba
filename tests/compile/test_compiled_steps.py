"""A compiled function that calls ``backward``: the compiler leaves the runtime alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from common import ALL
from pairs_common import CHOSEN, MIXED, PairTest
from passes_common import Model, mean
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

from dtensor_gtp import SchedulePolicy


def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = mean(model(x))
    loss.backward()
    return loss.detach()


class Tied(Model):
    """A weight is used twice, a whole parameter without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.gain)


class Checkpointed(Model):
    def __init__(self) -> None:
        super().__init__()
        for index, block in enumerate(self.blocks):
            self.blocks[index] = checkpoint_wrapper.checkpoint_wrapper(block)


class TestCompiledSteps(PairTest):
    def compiled(self, function: Any) -> Any:
        torch._dynamo.reset()
        counters.clear()
        return torch.compile(function, backend="aot_eager")

    def test_a_compiled_function_calls_backward(self) -> None:
        for kind in (Model, Tied, Checkpointed):
            for policy in (ALL, CHOSEN, MIXED, SchedulePolicy(min_shard_numel=0, embedding="exchange")):
                with self.subTest(kind=kind, policy=policy):
                    pair = self.pair(kind, policy)
                    run = self.compiled(step)
                    for seed in range(3):
                        self.check(pair, run, seed)

    def test_a_compiled_step_with_its_optimizer(self) -> None:
        for policy in (ALL, CHOSEN):
            pair = self.pair(Model, policy)
            for each in pair:
                each.optimizer = torch.optim.SGD(each.parameters(), lr=0.1)

            def train(model: Any, x: torch.Tensor) -> None:
                step(model, x)
                model.optimizer.step()
                model.optimizer.zero_grad()

            with self.subTest(policy=policy):
                run = self.compiled(train)
                for seed in range(3):
                    self.run_both(pair, run, seed)
                self.check(pair)  # gradients at the parameters after these steps

    def test_the_compiler_begins_with_no_frame_of_the_runtime(self) -> None:
        """As many frames as without sharding, and those between the uses of blocks."""
        model, reference = self.pair(Model, CHOSEN)
        x = torch.randn(4, self.width)
        frames = []
        for each in (reference, model):
            run = self.compiled(step)
            for _ in range(2):
                run(each, x)
            frames.append(counters["frames"]["total"])
        self.assertLessEqual(frames[1], frames[0] + 4 * (len(model.blocks) + 1))


if __name__ == "__main__":
    from torch.testing._internal.common_utils import run_tests

    run_tests()
