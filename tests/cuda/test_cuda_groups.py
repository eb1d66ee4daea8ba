"""Blocks whose weights travel together, on GPUs with NCCL: their streams, their memory, captured and compiled steps."""

import copy
import gc
import unittest
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from common import assert_same_params, check_training, environment, full
from cuda_common import BF16, NUM_RANKS, Block, CudaTest, assert_same, drawn, square_loss, square_step, training_step
from runtime_common import members_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import SchedulePolicy, gtp_shard
from dtensor_gtp._comm import addends
from dtensor_gtp._torch_compat import groups
from dtensor_gtp._torch_compat.groups import described_group

WIDTH = 512
DEPTH = 4
FP32 = MixedPrecisionPolicy()


class Model(nn.Module):
    """Blocks of one shape: a gather that comes too early or too late has the weights of another block."""

    def __init__(self, is_checkpointed: bool = False, width: int = WIDTH, num_streams: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, width, bias=False)
        self.layers = nn.ModuleList(Block(width, 2 * width + 1) for _ in range(DEPTH))
        self.last = nn.Linear(width, WIDTH, bias=False)
        self.is_checkpointed = is_checkpointed
        self.streams = [torch.cuda.Stream() for _ in range(num_streams)]  # blocks run on them in turn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, outside = self.first(x), torch.cuda.current_stream()
        for number, layer in enumerate(self.layers):
            stream = self.streams[number % len(self.streams)] if self.streams else outside
            stream.wait_stream(outside)
            with torch.cuda.stream(stream):
                x.record_stream(stream)
                x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
            outside.wait_stream(stream)
        x.record_stream(outside)
        return self.last(x)


class OnOneStream(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.last(x)


def make(kind: type[Model] = Model, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return kind(**options)


def batch_of(step: int) -> torch.Tensor:
    return drawn(step, 8 * max(NUM_RANKS, 1), WIDTH)


@unittest.skipIf(NUM_RANKS < 2, "needs two ranks")
class TestCudaGroups(CudaTest):
    def sharded(self, policy: MixedPrecisionPolicy = FP32, **options: Any) -> nn.Module:
        return gtp_shard(make(**options), self.gtp_mesh(), mp_policy=policy)

    def test_gtp_shard_connects_what_the_first_step_needs(self) -> None:
        mesh = DeviceMesh.from_group(dist.new_group(), "cuda", mesh_dim_names=("gtp",))
        model = gtp_shard(make(), mesh, mp_policy=BF16)
        scatter = described_group(f"gtp_scatter beside {mesh.get_group().group_name}")
        with mock.patch.object(groups, "named_group") as make_group:
            self.train(model, 1)
        make_group.assert_not_called()
        self.assertEqual(members_of(model).weights[0].groups.scatter, scatter)

    def mine(self, step: int) -> torch.Tensor:
        return batch_of(step).chunk(self.world_size)[self.rank]

    def train(self, model: nn.Module, num_steps: int, lr: float = 0.05) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        for step in range(num_steps):
            square_loss(model, self.mine(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.assertEqual(len(members_of(model).groups), DEPTH)
        return [param.to_local().clone() for param in model.parameters()]

    def test_steps_equal_one_process(self) -> None:
        for is_checkpointed in (False, True):
            model, reference = self.sharded(is_checkpointed=is_checkpointed), make()
            # No Adam: its steps have the sign of gradients that are rounding alone.
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (model, reference)]
            for step in range(5):
                square_loss(model, self.mine(step)).backward()
                square_loss(reference, batch_of(step)).backward()
                assert_same_params(model, reference, "grad", rtol=1e-3, atol=1e-6)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                assert_same_params(model, reference, "param", rtol=1e-3, atol=1e-4)

    def test_late_streams_and_poisoned_memory_change_no_bit(self) -> None:
        for policy in (FP32, BF16):
            expected = self.train(self.sharded(policy), 6)
            for seed in range(4):
                with environment(DTENSOR_GTP_DEBUG=f"poison,delay={seed}"):
                    assert_same(self.train(self.sharded(policy), 6), expected, f"{policy}, seed {seed}")

    def test_the_kernel_that_large_blocks_load_changes_no_bit(self) -> None:
        """It reads the own addend where it was packed, and nothing sends it."""
        trained = []
        for least in (1 << 40, 0):
            addends._verdicts.cache_clear()
            addends._loading.cache_clear()
            with mock.patch.object(addends, "_MANY_NBYTES", least):
                for debug in ("", "poison,delay=0", "poison,delay=1"):
                    with environment(DTENSOR_GTP_DEBUG=debug):
                        trained.append(self.train(self.sharded(BF16), 6))
            self.assertEqual([add is not None for add, _ in addends._verdicts().values()], [True] * (least == 0))
        for each in trained:
            assert_same(each, trained[0])

    def test_blocks_on_several_streams(self) -> None:
        """Gradients that wait for others to travel with were made on another stream than the one that packs them."""
        for policy in (FP32, BF16):
            expected = self.train(self.sharded(policy), 6)
            for seed in range(3):
                with environment(DTENSOR_GTP_DEBUG=f"poison,delay={seed}"):
                    assert_same(self.train(self.sharded(policy, num_streams=2), 6), expected, f"{policy}, seed {seed}")

    def test_a_huge_step_counts_in_the_next_forward(self) -> None:
        model, reference = self.sharded(), make()
        for each, x in ((model, self.mine(0)), (reference, batch_of(0))):
            optimizer = torch.optim.SGD(each.parameters(), lr=50.0)
            square_loss(each, x).backward()
            torch.cuda._sleep(20_000_000)
            optimizer.step()
        torch.testing.assert_close(model(batch_of(1)), reference(batch_of(1)), rtol=1e-2, atol=1e-2)

    def test_a_captured_step_has_the_bits_of_an_eager_one(self) -> None:
        eager, captured = self.sharded(BF16), self.sharded(BF16)
        steps = []
        for model in (eager, captured):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
            steps.append(training_step(model, optimizer, square_step, is_captured=model is captured))
        for number in range(12):
            losses = [step(self.mine(number)) for step in steps]
            self.assertTrue(torch.equal(losses[0], losses[1]), f"step {number}")
        assert_same(captured.parameters(), eager.parameters())

    def test_compiled_blocks(self) -> None:
        model, reference = self.sharded(), make()
        for layer in model.layers:
            layer.compile(fullgraph=True)
        for step in range(3):
            square_loss(model, self.mine(step)).backward()
            square_loss(reference, batch_of(step)).backward()
        assert_same_params(model, reference, "grad", rtol=1e-3, atol=1e-6)

    def test_a_compiled_function_calls_backward(self) -> None:
        """Ends of a backward run on the thread that has called it, where the compiler sees them."""

        def step(each: nn.Module, x: torch.Tensor) -> None:
            square_loss(each, x).backward()

        for is_checkpointed in (False, True):
            options = {"kind": OnOneStream, "is_checkpointed": is_checkpointed}
            model, reference = self.sharded(**options), make(**options)
            torch._dynamo.reset()
            run = torch.compile(step, backend="aot_eager")
            for number in range(3):
                run(model, self.mine(number))
                step(reference, batch_of(number))
            assert_same_params(model, reference, "grad", rtol=1e-3, atol=1e-6)

    def test_no_more_memory_than_fully_shard(self) -> None:
        """Of blocks that are larger than what is gathered in one launch in any case (32 MiB)."""
        peaks = {}
        before = 0
        for name in ("gtp", "fsdp2"):
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()
            before = torch.cuda.memory_allocated()
            model = make(width=2560)
            mesh = self.gtp_mesh()
            if name == "gtp":
                gtp_shard(model, mesh, mp_policy=BF16)
            else:
                for layer in model.layers:
                    fully_shard(layer, mesh=mesh, mp_policy=BF16)
                fully_shard(model, mesh=mesh, mp_policy=BF16)
            optimizer = torch.optim.AdamW(model.parameters())
            for step in range(4):
                if step == 3:
                    torch.cuda.reset_peak_memory_stats()
                square_loss(model, self.mine(step)).backward()
                peaks[name] = torch.cuda.max_memory_allocated() - before
                optimizer.step()
                optimizer.zero_grad()
            del model, optimizer
        self.assertLessEqual(peaks["gtp"], 1.02 * peaks["fsdp2"])

    def test_microbatches_without_sync(self) -> None:
        model, reference = self.sharded(), make()
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            square_loss(model, self.mine(number)).backward()
            square_loss(reference, batch_of(number)).backward()
        assert_same_params(model, reference, "grad", rtol=1e-3, atol=1e-6)

    def test_recurrent_layers(self) -> None:
        """cuDNN wants the weights of a layer side by side; ``nn.RNNBase`` moves them there if it can."""

        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.LSTM(64, 64, num_layers=2, batch_first=True) for _ in range(2))
                self.head = nn.Linear(64, 64)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    x, _ = layer(x)
                return self.head(x)

        torch.manual_seed(0)
        check_training(
            Recurrent().double().cuda(),
            lambda model: gtp_shard(model, self.gtp_mesh(), schedule=SchedulePolicy(min_shard_numel=0)),
            self.gtp_mesh(),
            lambda generator: torch.randn(2 * self.world_size, 5, 64, generator=generator).double().cuda(),
            lambda model, batch: model(batch).square().mean(),
            tolerance={"rtol": 1e-6, "atol": 1e-8},
        )

    def test_weights_are_the_same_after_a_forward_without_gradients(self) -> None:
        model, reference = self.sharded(), copy.deepcopy(make())
        with torch.no_grad():
            torch.testing.assert_close(model(batch_of(0)), reference(batch_of(0)), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(full(model.layers[1].up.weight), reference.layers[1].up.weight)
