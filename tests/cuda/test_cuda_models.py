"""Modules of torch and stock models on GPUs, where forwards run other code than on a CPU: cuDNN, fused kernels."""

import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from common import ALL, check_training
from cuda_common import NUM_RANKS, CudaTest
from integration_common import needs
from model_cases import CASES as STOCK
from test_gtp_shard_models import CASES as MODULES
from test_real_models import GROUPS, made, sgd
from torch.utils._pytree import tree_map_only

from dtensor_gtp import SchedulePolicy, gtp_shard


def on_gpu(values: Any, dtype: torch.dtype) -> Any:
    def move(value: torch.Tensor) -> torch.Tensor:
        return value.to("cuda", dtype if value.is_floating_point() else value.dtype)

    return tree_map_only(torch.Tensor, move, values)


class ModelTest(CudaTest):
    def train_all(self, cases: dict[str, Any], make: Callable[[Any], nn.Module], schedule: SchedulePolicy) -> None:
        """All of them, so that one run names each that fails. An error is one of all ranks."""
        failed = []
        for name, case in cases.items():
            try:
                check_training(
                    make(case).cuda(),
                    lambda model: gtp_shard(model, self.gtp_mesh(), schedule=schedule),
                    self.gtp_mesh(),
                    lambda generator, case=case: on_gpu(case.batch(generator), getattr(case, "dtype", torch.float64)),
                    case.loss,
                    steps=2,
                    make_optimizer=sgd,
                    tolerance={"rtol": 1e-3, "atol": 1e-5},
                )
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}"[:600])
        self.assertEqual(failed, [])


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaModules(ModelTest):
    def test_modules_of_torch_train_on_gpus(self) -> None:
        self.train_all(MODULES, lambda case: case.make().double(), ALL)


@needs("transformers", "timm", extra="models", tier="default")
@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaStockModels(ModelTest):
    def test_stock_models_train_on_gpus(self) -> None:
        self.train_all({name: case for name, case in STOCK.items() if case.library != "diffusers"}, made, GROUPS)
