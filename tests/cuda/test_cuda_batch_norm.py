"""``SyncBatchNorm`` on GPUs: gradients, parameters and running statistics of one process with the whole batch."""

import unittest
from collections.abc import Callable

import torch
import torch.nn as nn
from common import ALL, check_training
from cuda_common import NUM_RANKS, CudaTest
from integration_common import needs
from model_cases import CASES, Batch

from dtensor_gtp import gtp_shard

ROWS_PER_RANK = 4


class BatchNormTest(CudaTest):
    def check(
        self,
        reference: nn.Module,
        convert: Callable[..., nn.Module],
        loss_fn: Callable[[nn.Module, Batch], torch.Tensor],
        memory_format: torch.memory_format = torch.contiguous_format,
        **tolerance: float,
    ) -> None:
        mesh = self.gtp_mesh()
        dtype = next(reference.parameters()).dtype
        reference = reference.to("cuda", memory_format=memory_format).train()

        def shard(model: nn.Module) -> nn.Module:
            model = convert(model, mesh.get_group())
            assert any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
            return gtp_shard(model, mesh, schedule=ALL)

        def batch(generator: torch.Generator) -> Batch:
            num_rows = self.world_size * ROWS_PER_RANK
            images = torch.randn(num_rows, 3, 64, 64, generator=generator, dtype=dtype)
            labels = torch.randint(4, (num_rows,), generator=generator)
            return {"x": images.to("cuda", memory_format=memory_format), "labels": labels.cuda()}

        def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.SGD(params, lr=0.02, momentum=0.9)

        with torch.backends.cudnn.flags(allow_tf32=False):
            model = check_training(reference, shard, mesh, batch, loss_fn, make_optimizer=sgd, tolerance=tolerance)
        for name, value in reference.named_buffers():
            torch.testing.assert_close(model.get_buffer(name), value, msg=name, **tolerance)


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaBatchNorm(BatchNormTest):
    def test_of_torch(self) -> None:
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(2))
        convert = nn.SyncBatchNorm.convert_sync_batchnorm
        self.check(
            nn.Sequential(*layers).double(),
            convert,
            lambda model, batch: model(batch["x"]).square().mean(),
            **{"rtol": 1e-4, "atol": 1e-6},
        )


@needs("timm", extra="models", tier="default")
@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaBatchNormOfTimm(BatchNormTest):
    """EfficientNet. timm converts it itself, as its BatchNorm has the activation within."""

    def efficientnet(self) -> nn.Module:
        torch.manual_seed(0)
        return CASES["timm_efficientnet"].make()

    def test_efficientnet(self) -> None:
        from timm.layers import convert_sync_batchnorm

        loss = CASES["timm_efficientnet"].loss
        self.check(self.efficientnet().double(), convert_sync_batchnorm, loss, rtol=1e-4, atol=1e-6)

    def test_efficientnet_with_channels_last(self) -> None:
        """In float32: cuDNN has no float64 in this layout."""
        from timm.layers import convert_sync_batchnorm

        loss, layout = CASES["timm_efficientnet"].loss, torch.channels_last
        self.check(self.efficientnet(), convert_sync_batchnorm, loss, layout, rtol=1e-3, atol=2e-4)
