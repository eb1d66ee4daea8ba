"""Layers of ``quantize_`` under ``torch.autocast``, in one process and without ``gtp_shard``."""

import copy
import unittest
import warnings
from itertools import product

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import fake_mesh
from quant_common import all_recipes, dequantized
from torch.distributed.fsdp import fully_shard

from dtensor_gtp import quantize_
from dtensor_gtp.quant import Direction, Float8Blockwise, Float8Rowwise, Float8Tensorwise

# Kinds, and whose data backward multiplies with.
STORAGES = (("master", Direction.COLUMNWISE), ("native", Direction.ROWWISE))
FLOAT8 = [cls(compute="float8") for cls in (Float8Tensorwise, Float8Rowwise, Float8Blockwise)]


class TestAutocast(unittest.TestCase):
    def test_products_of_values(self) -> None:
        """Values are quantized in the dtype of the weight and multiplied in that of autocast, as an ``nn.Linear`` does.
        Gradients have the dtypes of input and weight, also if one of them is frozen."""
        dtypes, frozen = (torch.float32, torch.bfloat16), ("", "weight", "input")
        for recipe, dtype, what, (storage, backward) in product(all_recipes(), dtypes, frozen, STORAGES):
            torch.manual_seed(0)
            plain = nn.Linear(40, 33).requires_grad_(what != "weight")
            quantized = quantize_(copy.deepcopy(plain), recipe, storage=storage)
            x = torch.randn(2, 3, 40, dtype=dtype, requires_grad=what != "input")
            forward, turned = (dequantized(plain.weight.detach(), recipe, d) for d in (Direction.ROWWISE, backward))
            with torch.autocast("cpu", torch.bfloat16):
                y = quantized(x)
                self.assertTrue(torch.equal(y, F.linear(x, forward, plain.bias)))
                unquantized = plain(x)
            grad = torch.randn_like(y)
            y.backward(grad)
            if what != "input":
                self.assertTrue(torch.equal(x.grad, grad.matmul(turned.bfloat16()).to(dtype)))
            if what != "weight":
                unquantized.backward(grad)
                torch.testing.assert_close(quantized.weight.grad, plain.weight.grad)
                torch.testing.assert_close(quantized.bias.grad, plain.bias.grad)

    def test_products_in_float8(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are slow on CPUs
            for recipe, dtype in product(FLOAT8, (torch.float32, torch.bfloat16)):
                torch.manual_seed(0)
                layer = quantize_(nn.Linear(32, 16), recipe)
                x = torch.randn(4, 32, dtype=dtype, requires_grad=True)
                with torch.autocast("cpu", torch.bfloat16):
                    y = layer(x)
                self.assertEqual(y.dtype, torch.bfloat16)
                expected = copy.deepcopy(layer).bfloat16()(x.bfloat16())
                torch.testing.assert_close(y, expected, rtol=0.1, atol=0.1)
                y.sum().backward()
                self.assertEqual((x.grad.dtype, layer.weight.grad.dtype), (dtype, torch.float32))

    def test_under_fully_shard(self) -> None:
        with fake_mesh(1) as mesh:
            for storage, _ in STORAGES:
                model = fully_shard(quantize_(nn.Linear(64, 64), "mxfp8", storage=storage), mesh=mesh)
                x = torch.randn(4, 64, requires_grad=True)
                with torch.autocast("cpu", torch.bfloat16):
                    y = model(x)
                y.sum().backward()
                dtypes = y.dtype, x.grad.dtype, model.weight.grad.dtype
                self.assertEqual(dtypes, (torch.bfloat16, torch.float32, torch.float32))
