"""``parallelize_module``, then ``gtp_shard``: each cell of tensor parallelism x GTP trains as one process does.

A job trains beside the reference on one mesh, is saved with DCP, loaded on the next mesh into a model with other
values, and trains on there: gradients, parameters after each step and reloaded checkpoints all equal one process. The
meshes have both orders of the axes and every axis at size 1, and the last checkpoint is loaded into the plain model.
float64 throughout, so that what is left of a difference is no rounding.

In compiled code a weight that tp has cut is an opaque op's result, wrapped as a DTensor on tp inside of the graph.
"""

import unittest
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from common import ALL, GlooTest, check_training, full
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from tp_common import (
    GTP_ALONE,
    GTP_TP,
    REPLICATE_GTP,
    REPLICATE_TP,
    TP_ALONE,
    TP_GTP,
    Cell,
    Prepared,
    Stacked,
    check_cell,
    cut_stacked,
    embeddings_cell,
    gathers_of_a_step,
    gtp_axes,
    llama_cell,
    next_token_loss,
    norms_cell,
    outside_cell,
    replicate_all,
    root_mesh,
    sharded_input,
    sharded_output,
    tied_cell,
    uneven_cell,
)

from dtensor_gtp import GTPShard, gtp_shard


def without_hooks(model: nn.Module, tp: DeviceMesh) -> None:
    """The hook of the last layer would bring the gradient of its output into place."""
    parallelize_module(model, tp, {"0": RowwiseParallel(input_layouts=Replicate()), "2": ColwiseParallel()})
    model[2]._forward_hooks.clear()


INPUT_OUTPUT = {"output_layouts": Shard(0), "desired_output_layouts": Replicate()}
CELLS = (
    # gathered and scattered outputs, DTensors between layers, and a weight that both axes cut on dim 1
    Cell(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)),
        {
            "0": ColwiseParallel(output_layouts=Replicate()),
            "1": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False),
            "2": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        },
        placement_fn=lambda model: {model[1].weight: GTPShard(1)}.get,
    ),
    embeddings_cell(),
    # The logits stay cut by vocabulary through cross entropy, as a DTensor.
    Cell(
        lambda: nn.Sequential(nn.Embedding(18, 6), nn.Linear(6, 18)),
        {"1": ColwiseParallel(use_local_output=False)},
        (5,),
        18,
        loss=next_token_loss,
        around=loss_parallel,
    ),
    Cell(
        Prepared,
        {
            "first": PrepareModuleInputOutput(
                input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=False, **INPUT_OUTPUT
            ),
            "first.inner": SequenceParallel(sequence_dim=0, use_local_output=True),
            "second.inner": SequenceParallel(sequence_dim=0),
            "second": PrepareModuleInputOutput(
                input_layouts=(Replicate(), None), desired_input_layouts=(Shard(0), None), **INPUT_OUTPUT
            ),
            "third": PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate()),
            "third.inner": ColwiseParallel(),
        },
    ),
    # experts' stacked weights, cut on their last dims, that the forward itself turns into local tensors
    Cell(Stacked, cut_stacked),
)


def adamw(model: nn.Module, **options: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


class TestTensorParallel(GlooTest):
    def test_styles(self) -> None:
        """Those with weights that gtp cuts on another dim than the first go through a checkpoint, too."""
        for cell in CELLS:
            check_cell(cell, GTP_TP, *([TP_GTP] if cell in (CELLS[0], CELLS[-1]) else []))

    # --- linear layers ------------------------------------------------------------------------------------------------

    def test_colwise_and_rowwise(self) -> None:
        """tp and gtp cut the same dim of the first weight, different dims of the second, and one bias of the two."""
        cell = Cell(
            lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)),
            {"0": ColwiseParallel(), "2": RowwiseParallel()},
        )
        model = check_cell(cell, GTP_TP, GTP_ALONE, TP_ALONE, REPLICATE_GTP, REPLICATE_TP, TP_GTP)
        whole = Replicate()
        placements = [(Shard(0), GTPShard(0)), (Shard(0), whole), (Shard(1), GTPShard(0)), (whole, whole)]
        self.assertEqual([param.placements for param in model.parameters()], placements)
        self.assertEqual({param.device_mesh.mesh_dim_names for param in model.parameters()}, {("tp", "gtp")})
        self.assertEqual([tuple(p.to_local().shape) for p in model.parameters()], [(4, 6), (8,), (4, 8), (8,)])

    def test_uneven_cuts(self) -> None:
        model = check_cell(uneven_cell(), TP_ALONE, TP_GTP)
        tp, gtp = (model[0].weight.device_mesh.get_local_rank(axis) for axis in ("tp", "gtp"))
        rows = ((3, 3), (3, 2))[tp][gtp]
        self.assertEqual(tuple(model[0].weight.to_local().shape), (rows, 6))
        self.assertEqual(tuple(model[2].weight.to_local().shape), ((4, 3)[gtp], (6, 5)[tp]))

    def test_fewer_rows_than_ranks(self) -> None:
        """Some ranks hold nothing of a weight: tp leaves two slices of two and one rows."""
        cell = Cell(
            lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1)),
            {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()},
        )
        model = check_cell(cell, GTP_TP, TP_GTP)
        tp, gtp = (model[0].weight.device_mesh.get_local_rank(axis) for axis in ("tp", "gtp"))
        is_empty = [module.weight.to_local().numel() == 0 for module in (model[0], model[2])]
        self.assertEqual(is_empty, [tp == gtp == 1, gtp == 1])

    def test_gradient_that_lies_otherwise_than_the_output(self) -> None:
        """That of a mean is the same everywhere, so DTensor hands it on whole where the output is cut."""
        layers = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))  # noqa: E731
        check_cell(Cell(layers, without_hooks, loss=lambda model, batch: full(model(batch).mean())), GTP_TP)

    def test_which_linear_layers_run_on_local_tensors(self) -> None:
        """Where that is all there is to do. Anything else is left to DTensor."""
        root = root_mesh(*GTP_TP)
        whole, columns = Replicate(), Shard(1)
        for style, bias, layout, is_local in (
            (ColwiseParallel(), True, whole, True),
            (RowwiseParallel(), False, columns, True),
            (RowwiseParallel(), True, columns, True),
            (None, True, whole, False),  # replicated weights
            (None, False, Shard(0), False),
        ):
            layer = nn.Linear(6, 4, bias=bias)
            if style is None:
                distribute_module(layer, root["tp"])
            else:
                # Without the style's hooks, which would bring the input into place.
                parallelize_module(layer, root["tp"], style)
                layer._forward_pre_hooks.clear()
                layer._forward_hooks.clear()
            gtp_shard(layer, root["gtp"], schedule=ALL)
            x = distribute_tensor(torch.randn(2, 6), root["tp"], [layout])
            node = layer(x).grad_fn
            if isinstance(style, RowwiseParallel) and bias:
                node = node.next_functions[0][0]  # the bias is added on its own, once to the sum over tp
            self.assertEqual(type(node).__name__ == "_ParallelLinearBackward", is_local)

    def test_microbatches(self) -> None:
        """Accumulated with and without gradient sync."""
        cell = Cell(
            lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8)),
            {
                "0": ColwiseParallel(),
                "2": RowwiseParallel(output_layouts=Shard(0)),
                "3": SequenceParallel(sequence_dim=0),
            },
            loss=sharded_output,
        )
        check_cell(cell, GTP_TP, num_microbatches=2)
        check_cell(cell, GTP_TP, REPLICATE_TP, num_microbatches=2, sync_last_only=True)

    # --- weights that tensor parallelism leaves whole -----------------------------------------------------------------

    def test_sequence_parallel_norms(self) -> None:
        """Each tp rank normalizes its part of the sequence: the norms' gradients are partial sums over tp."""
        model = check_cell(norms_cell(), REPLICATE_TP, TP_GTP)
        self.assertEqual(model[0].norm.weight.placements, (Replicate(), Replicate()))

    def test_modules_outside_of_the_plan(self) -> None:
        """Their parameters are plain tensors, on gtp alone, and equal on the ranks of tp. Optimizers and clipping have
        both kinds in one group."""
        for layout, options in ((TP_GTP, {"foreach": False}), (GTP_TP, {"foreach": True}), (GTP_TP, {"fused": True})):
            model = check_cell(outside_cell(), layout, make_optimizer=partial(adamw, **options), max_norm=0.1)
            names = [param.device_mesh.mesh_dim_names for param in model.parameters()]
            self.assertEqual(names, [("gtp",)] * 4 + [("tp", "gtp")] * 4)

    def test_replicated_weights(self) -> None:
        """``distribute_module`` without a plan replicates; the module then eats DTensors, sharded over tp."""
        layers = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))  # noqa: E731
        model = check_cell(Cell(layers, replicate_all, loss=sharded_input), GTP_TP, TP_GTP)
        self.assertEqual(model[0].weight.placements, (Replicate(), GTPShard(0)))

    # --- models -------------------------------------------------------------------------------------------------------

    def test_tied_embedding_and_head(self) -> None:
        model = check_cell(tied_cell(), REPLICATE_TP, TP_GTP)
        self.assertIs(model[2].weight, model[0].weight)

    def test_llama(self) -> None:
        """The usual plan for a Llama: sequence parallel norms, colwise and rowwise projections, parallel loss."""
        model = check_cell(llama_cell(), GTP_TP, TP_GTP)
        # Three query heads on each tp rank, cut between heads over two ranks; one key-value head, which one rank holds.
        attention = model.layers[0].attention
        rows = [module.weight.to_local().shape[0] for module in (attention.wq, attention.wk)]
        gtp = attention.wq.weight.device_mesh.get_local_rank("gtp")
        self.assertEqual(rows, [(8, 4), (4, 0)][gtp])

    def test_activation_checkpointing(self) -> None:
        """Each block is recomputed, collectives of tp included; its weights stay from there to their gradients. torch's
        wrapper module is there before the plan is applied."""
        self.check_recomputed(("wrapper", TP_GTP), ("selective", GTP_TP))

    @pytest.mark.long
    def test_reentrant_checkpointing(self) -> None:
        self.check_recomputed(("reentrant", GTP_TP))

    def check_recomputed(self, *cases: tuple[str, Any]) -> None:
        for how, layout in cases:
            cell = llama_cell(how)
            model = check_cell(cell, layout)
            gathers = gathers_of_a_step(model, cell, root_mesh(*layout))
            self.assertEqual(gathers, {"embedding": {1}, "layers": {2}, "output": {1}})

    # --- refusals -----------------------------------------------------------------------------------------------------


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
