"""A module that uses its weights as those of Transformer Engine 2.20 do (``pytorch/module/linear.py`` and ``base.py``
there). ``test_cuda_transformer_engine.py`` has the modules themselves, which need its wheel and GPUs.

They read ``self.weight`` once in forward, hand it to a function of autograd that saves it, and return its gradient.
Before, they compare the input's dtype with that of each parameter. With ``fuse_wgrad_accumulation`` backward adds to
``weight.main_grad`` instead.
"""

import weakref
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, check_training, rows_of_rank
from runtime_common import assert_idle, members_of, square_loss
from torch.distributed.fsdp import MixedPrecisionPolicy

from dtensor_gtp import gtp_shard

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor, dtype: torch.dtype, is_fused: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight_ref = weakref.ref(weight) if is_fused else None
        ctx.main_grad = lambda: weight.main_grad
        return x.to(dtype) @ weight.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wgrad = grad.flatten(0, -2).t() @ x.to(grad.dtype).flatten(0, -2)
        if ctx.weight_ref is not None:
            ctx.main_grad().add_(wgrad)
            return None, grad @ weight.to(grad.dtype), None, None
        return wgrad.to(weight.dtype), (grad @ weight.to(grad.dtype)).to(x.dtype), None, None


class Linear(nn.Module):
    def __init__(self, width: int, out: int, *, fuse_wgrad_accumulation: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) / width**0.5)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        if not torch.is_autocast_enabled("cpu"):
            for name, param in self.named_parameters():
                if param.dtype != dtype:
                    raise TypeError(f"Data types for parameters must match, found {name!r} dtype: {param.dtype}")
        return Product.apply(self.weight, x, dtype, self.fuse_wgrad_accumulation)


def make(**options: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Linear(16, 24, **options), nn.GELU(), Linear(24, 16, **options))


class TestLikeTransformerEngine(GlooTest):
    def test_gradients_and_updates(self) -> None:
        """In float32 and in a model of bfloat16, also where a weight is used in two microbatches."""
        mesh = self.gtp_mesh()
        for dtype, tolerance in ((torch.float32, {}), (torch.bfloat16, {"rtol": 0.05, "atol": 0.02})):
            model = check_training(
                make().to(dtype),
                partial(gtp_shard, mesh=mesh, schedule=ALL),
                mesh,
                lambda generator, dtype=dtype: torch.randn(8, 3, 16, generator=generator).to(dtype),
                square_loss,
                make_optimizer=partial(torch.optim.SGD, lr=1.0),
                num_microbatches=2,
                tolerance=tolerance,
            )
            assert_idle(model)

    def test_saved_weights_are_handles(self) -> None:
        """Between forward and backward none is held, though the function has saved both; later the plan keeps the last
        one, which backward uses first."""
        model = gtp_shard(make(), self.gtp_mesh(), schedule=ALL)
        for kept in ([], ["2.weight"]):
            loss = model(torch.randn(2, 16)).sum()
            held = [weight.fqn for weight in members_of(model).weights if not weight.for_forward.is_absent]
            self.assertEqual(held, kept)
            loss.backward()
            assert_idle(model)

    def test_masters_in_float32(self) -> None:
        """The check of dtypes sees the gathered weights; so does code under autocast, which leaves it out."""
        torch.manual_seed(1)
        x = torch.randn(8, 16)
        reference = make()
        reference(x).square().mean().backward()
        torch.optim.SGD(reference.parameters(), lr=0.5).step()
        for is_autocast in (False, True):
            model = gtp_shard(make(), self.gtp_mesh(), schedule=ALL, mp_policy=BF16)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
                output = model(rows_of_rank(x, self.gtp_mesh()))
            self.assertEqual(output.dtype, torch.bfloat16)
            output.float().square().mean().backward()
            assert_same_params(model, reference, "grad", rtol=0.05, atol=0.01)
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            assert_same_params(model, reference, rtol=0.05, atol=0.01)

    def test_fused_accumulation_raises(self) -> None:
        """A full weight has no ``main_grad``, also if the user gave the parameter one."""
        model = gtp_shard(make(fuse_wgrad_accumulation=True), self.gtp_mesh(), schedule=ALL)
        for param in model.parameters():
            param.main_grad = torch.zeros(param.shape)
        loss = model(torch.randn(2, 16)).sum()
        with self.assertRaisesRegex(AttributeError, "main_grad"):
            loss.backward()
