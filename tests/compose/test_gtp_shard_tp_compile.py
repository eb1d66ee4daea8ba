"""``torch.compile`` of tensor-parallel modules under ``gtp_shard``: no graph break, one graph for layers of one shape.

In compiled code a weight that tp has cut is an opaque op's result, wrapped as a DTensor on tp inside of the graph.
"""

import unittest
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from common import ALL, GlooTest, check_training
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from tp_common import GTP_TP, TP_GTP, Cell, embeddings_cell, gtp_axes, llama_cell, norms_cell, root_mesh, uneven_cell

from dtensor_gtp import gtp_shard


class TestTensorParallelCompile(GlooTest):
    def check(self, cell: Cell, layout: Any, modules: Callable[[nn.Module], list[nn.Module]]) -> nn.Module:
        root = root_mesh(*layout)
        torch._dynamo.reset()
        counters.clear()

        def shard(model: nn.Module) -> nn.Module:
            cell.sharded(model, root)
            for module in modules(model):
                module.compile(backend="aot_eager", fullgraph=True)
            return model

        with cell.around():
            sgd = partial(torch.optim.SGD, lr=0.1)
            data = gtp_axes(root)
            model = check_training(cell.reference(), shard, data, cell.batch, cell.loss, make_optimizer=sgd)
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        self.assertFalse(counters["graph_break"])
        return model

    def test_blocks_share_one_graph(self) -> None:
        """All but the first, whose input needs no gradient, which would take a graph of its own."""
        cell = norms_cell(3)
        model = self.check(cell, TP_GTP, lambda model: list(model)[1:])
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
            cell.loss(model, cell.batch(torch.Generator())[:4])
        self.assertTrue(shapes)
        # What tp leaves of the two linear weights: gathered again in backward, not saved.
        self.assertFalse({(4, 6), (6, 4)} & set(shapes))

    def test_recomputed_llama_blocks_share_one_graph(self) -> None:
        """Activation checkpointing around each compiled block; the first one's input is an unfinished collective."""
        self.check(llama_cell("non-reentrant"), GTP_TP, lambda model: list(model.layers))

    def test_a_whole_model(self) -> None:
        self.check(embeddings_cell(), GTP_TP, lambda model: [model])

    @pytest.mark.long
    def test_uneven_cuts(self) -> None:
        self.check(uneven_cell(), GTP_TP, lambda model: [model])

    @unittest.skipIf(torch.__version__ < "2.13", "torch 2.11 has no such product without gtp_shard either")
    def test_async_tensor_parallelism_finds_no_product(self) -> None:
        """Torch's ``_micro_pipeline_tp`` joins an all-gather with the ``aten.mm`` behind it. Ours is an op that gathers
        the weight, too: compiled code keeps the all-gather and stays right."""
        root = root_mesh(*GTP_TP)
        ops: list[str] = []

        def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            ops.extend(str(node.target) for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        plan = {"0": ColwiseParallel(input_layouts=Shard(0), use_local_output=False)}
        for is_sharded, num_products in ((False, 1), (True, 0)):
            torch._dynamo.reset()
            ops.clear()
            model = parallelize_module(nn.Sequential(nn.Linear(8, 8, bias=False)), root["tp"], plan)
            if is_sharded:
                gtp_shard(model, root["gtp"], schedule=ALL)
            model.compile(backend=aot_autograd(fw_compiler=note), fullgraph=True)
            model(torch.randn(4, 8))
            self.assertEqual(ops.count("aten.mm.default"), num_products, ops)
            self.assertTrue(any("all_gather" in op for op in ops), ops)
