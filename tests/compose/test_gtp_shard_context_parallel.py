"""Torch's ``context_parallel`` around a model under ``gtp_shard``, beside one process.

Torch has its ring for the kernels of GPUs alone. So one of them is given to CPUs here; the ring itself, the order of
tokens and the merging of partial results are torch's. ``test_gtp_shard_data_axes`` has more cases of the same axes.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pages
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, assert_same_params, full
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel

from dtensor_gtp import gtp_shard, init_weight_mesh

WIDTH, HEADS, LENGTH = 16, 2, 16
aten = torch.ops.aten


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Attention(), Attention())

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.blocks(x + self.positions(positions))


# Torch leaves out trailing arguments that are the defaults.
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, p: float = 0.0, is_causal: bool = False, scale: Any = None
) -> tuple[Tensor, ...]:
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, is_causal, scale=scale)
    return out, logsumexp, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: Any = None) -> tuple[Any, ...]:
    _, out, logsumexp, _, _, p, _, is_causal = (*args, False)[:8]
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return (*op(grad, q, k, v, out, logsumexp, p, is_causal, scale=scale), None)


@contextmanager
def attention_of_gpus() -> Iterator[None]:
    """CPUs have the op through which torch's ring computes."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", _forward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", _backward, "CPU")

    # Torch puts its own in place by this name.
    def scaled_dot_product_attention(q: Any, k: Any, v: Any, is_causal: bool) -> Tensor:
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]

    with mock.patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention):
        yield
    library._destroy()


class TestContextParallel(GlooTest):
    def test_ranks_along_cp_share_weights(self) -> None:
        """As copies of a shard, by one axis over both, and where cp is all there is."""
        with attention_of_gpus():
            mesh, alone = init_weight_mesh("cpu", cp=2, gtp=2), init_weight_mesh("cpu", cp=4)
            for weights in (mesh.weights, mesh.flatten("cp", "gtp")):
                self.check(mesh["cp"], weights, mesh.batch)
            self.check(alone["cp"], alone["cp"], alone.batch)

    def test_the_page_splits_sequences_where_torch_can(self) -> None:
        """What its readers copy, on a CPU as it stands, and as GPUs run it: with the same gradients."""
        program = pages.shown_program(pages.read(pages.ROOT / "docs/howto/context_parallel.md"))
        as_on_gpus, num_replaced = re.subn(r'if device != "cpu":', "if True:", program)
        self.assertEqual(num_replaced, 1)
        whole: dict[str, Any] = {"__name__": "whole"}
        exec(program, whole)
        self.assertEqual(whole["x"].shape[1], 128)
        lengths: list[int] = []
        with attention_of_gpus():
            split: dict[str, Any] = {"__name__": "split", "lengths": lengths}
            exec(as_on_gpus.replace("    model(x)", "    lengths.append(x.shape[1])\n    model(x)"), split)
        self.assertEqual(lengths, [64])
        for mine, other in zip(whole["model"].parameters(), split["model"].parameters(), strict=True):
            torch.testing.assert_close(full(mine.grad), full(other.grad))

    def check(self, cp: Any, weights: Any, samples: Any) -> None:
        torch.manual_seed(0)
        reference = Model()
        model = gtp_shard(copy.deepcopy(reference), weights, schedule=ALL)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5) for m in (reference, model)]
        for step in range(2):
            torch.manual_seed(step + 1)
            x, target = (torch.randn(4, LENGTH, WIDTH) for _ in range(2))
            positions = torch.arange(LENGTH)
            F.mse_loss(reference(x, positions), target).backward()
            x, target = (t.chunk(samples.size())[samples.get_local_rank()].clone() for t in (x, target))
            with context_parallel(cp, buffers=[x, target, positions], buffer_seq_dims=[1, 1, 0]):
                assert x.shape[1] == LENGTH // cp.size()
                F.mse_loss(model(x, positions), target).backward()  # backward too: it sends keys round
            assert_same_params(model, reference, "grad")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_params(model, reference, "param")
