"""What ``StepMetrics`` says of steps, with a clock that the test turns; and the line for a terminal."""

import unittest
from unittest import mock

import torch
import torch.nn as nn
from mesh_common import fake_world
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dtensor_gtp import gtp_shard, init_weight_mesh
from dtensor_gtp.metrics import StepMetrics, _peak_flops, progress_line
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.planner.machine import load_machine

WIDTH = 64


class TestStepMetrics(unittest.TestCase):
    def setUp(self) -> None:
        self.enterContext(fake_world(world_size=4))
        self.clock = self.enterContext(mock.patch("dtensor_gtp.metrics.time"))
        self.clock.perf_counter.return_value = 100.0

    def count(self, metrics: StepMetrics, num_tokens: int, seconds: float = 1.0) -> None:
        self.clock.perf_counter.return_value += seconds
        metrics.count(num_tokens)

    def layer(self) -> nn.Module:
        return gtp_shard(nn.Linear(WIDTH, WIDTH), init_weight_mesh("cpu", gtp=4).weights)

    def test_tokens_time_and_share_of_the_peak(self) -> None:
        """Two steps of 500 tokens on each of 4 ranks in 2 s. A weight that is looked up does not multiply."""
        model = nn.Sequential(nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[2].requires_grad_(False)
        metrics = StepMetrics(gtp_shard(model, init_weight_mesh("cpu", gtp=4).weights), machine="h100")
        for _ in range(2):
            self.count(metrics, 500)
        values = metrics.read()
        self.assertEqual((values["tokens_per_s"], values["tokens_per_s_per_device"]), (2000, 500))
        self.assertEqual(values["step_ms"], 1000)
        self.assertAlmostEqual(values["mfu"], 500 * (6 + 4) * WIDTH**2 / 989e12)
        self.assertNotIn("step_ms", metrics.read())  # no step since

    def test_ranks_of_one_batch_count_once(self) -> None:
        """On (gtp, tp) = (2, 2): 4 devices, 2 ranks with data of their own, and each computes half of a layer."""
        mesh = init_weight_mesh("cpu", gtp=2, tp=2)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}, src_data_rank=None)
        metrics = StepMetrics(gtp_shard(model, mesh["gtp"]), machine=load_machine("h100"))
        self.count(metrics, 100)
        values = metrics.read()
        self.assertEqual((values["tokens_per_s"], values["tokens_per_s_per_device"]), (200, 50))
        self.assertAlmostEqual(values["mfu"], 100 * 6 * WIDTH * WIDTH / 2 / 989e12)

    def test_ranks_of_an_outer_fully_shard_count(self) -> None:
        """On (dp, gtp) = (2, 2), also if it comes after the metrics."""
        mesh = init_weight_mesh("cpu", dp=2, gtp=2)
        model = gtp_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)), mesh["gtp"])
        metrics = StepMetrics(model)
        fully_shard(model, mesh=mesh["dp"])
        self.count(metrics, 100)
        values = metrics.read()
        self.assertEqual((values["tokens_per_s"], values["tokens_per_s_per_device"]), (400, 100))

    def test_layers_that_a_token_sees_again_have_no_share_of_the_peak_unless_told(self) -> None:
        tied = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        tied[1].weight = tied[0].weight
        layer = nn.Linear(WIDTH, WIDTH)
        for model in (tied, nn.Sequential(layer, nn.ReLU(), layer)):
            gtp_shard(model, init_weight_mesh("cpu", gtp=4).weights)
            for flops in (None, 7e9):
                metrics = StepMetrics(model, flops_per_token=flops, machine="h100")
                model(torch.randn(2, WIDTH)).sum().backward()
                self.count(metrics, 100)
                self.assertEqual("mfu" in metrics.read(), flops is not None)

    def test_a_table_that_is_the_head_as_well_multiplies_once(self) -> None:
        model = nn.Sequential(nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
        model[1].weight = model[0].weight
        metrics = StepMetrics(gtp_shard(model, init_weight_mesh("cpu", gtp=4).weights), machine="h100")
        model(torch.arange(8)).sum().backward()
        self.count(metrics, 100)
        self.assertAlmostEqual(metrics.read()["mfu"], 100 * 6 * WIDTH**2 / 989e12)

    def test_gpus_are_known_by_all_words_of_their_names(self) -> None:
        for gpu, machine in (
            ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
            ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
            ("NVIDIA GB200", "gb200-nvl72"),
            ("NVIDIA B200", "b200"),
            ("NVIDIA GeForce RTX 4090", None),
            ("NVIDIA RTX A6000", None),
            ("NVIDIA RTX 6000 Ada Generation", None),
        ):
            expected = None
            if machine is not None:
                expected = load_machine(machine).peak_tflops["bf16"] * 1e12
            with mock.patch("torch.cuda.get_device_name", return_value=gpu):
                self.assertEqual(_peak_flops(None, torch.device("cuda")), expected, gpu)

    def test_experts_have_no_share_of_the_peak_unless_told(self) -> None:
        model = gtp_shard(GroupedLinear(4, WIDTH, WIDTH), init_weight_mesh("cpu", gtp=4).weights)
        for flops, expected in ((None, None), (7e9, 7e9 * 100 / 989e12)):
            metrics = StepMetrics(model, flops_per_token=flops, machine="h100")
            self.count(metrics, 100)
            self.assertEqual(metrics.read().get("mfu"), expected)

    def test_other_numbers_and_a_pause_that_does_not_count(self) -> None:
        metrics = StepMetrics(self.layer())
        values = metrics.read(loss=torch.tensor(2.5), lr=1)
        self.assertEqual((values["loss"], values["lr"]), (2.5, 1.0))
        self.assertTrue(all(type(value) is float for value in values.values()))
        self.assertNotIn("mfu", values)  # nobody knows the peak of a CPU
        self.assertGreater(values["peak_memory_gib"], 0.01)
        metrics.count(5)
        self.clock.perf_counter.return_value += 50
        metrics.skip()
        self.count(metrics, 7)
        self.assertEqual(metrics.read()["tokens_per_s"], 28)

    def test_refusals(self) -> None:
        with self.assertRaisesRegex(ValueError, "expects a module after gtp_shard, but got a plain Linear"):
            StepMetrics(nn.Linear(4, 4))
        with self.assertRaisesRegex(ValueError, "machine expects one of"):
            StepMetrics(self.layer(), machine="h101")


class TestProgressLine(unittest.TestCase):
    def test_lines(self) -> None:
        for line, expected in (
            (progress_line(0, 100, {}, 0), "  0%   0/100 [00:00<?] "),
            (progress_line(1, 1, {"loss": 1.0}, 3700), "100% 1/1 [1:01:40<00:00] loss 1.0000"),
            (progress_line(90, 100, {}, 20, first_step=80), " 90%  90/100 [00:20<00:20] "),
            (progress_line(7, 100, {"exposed_ms": 3.21, "lr": 0.1}), "  7%   7/100 3.2 ms exposed"),
        ):
            self.assertEqual(line, expected)
