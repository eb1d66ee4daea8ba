"""``parallelize_module``, then ``gtp_shard``: each cell of tensor parallelism x GTP trains as one process does.

A job trains beside the reference on one mesh, is saved with DCP, loaded on the next mesh into a model with other
values, and trains on there: gradients, parameters after each step and reloaded checkpoints all equal one process. The
meshes have both orders of the axes and every axis at size 1, and the last checkpoint is loaded into the plain model.
float64 throughout, so that what is left of a difference is no rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, full, rows_of_rank
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
    Plan,
    Prepared,
    Stacked,
    check_cell,
    cut_stacked,
    embedding_cell,
    gathers_of_a_step,
    llama_cell,
    next_token_loss,
    norms_cell,
    outside_cell,
    replicate_all,
    root_mesh,
    sharded_input,
    sharded_output,
    tied_model,
    uneven_cell,
)

from dtensor_gtp import GTPShard, gtp_shard


def adamw(**options: bool) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


class TestTensorParallel(GlooTest):
    def check(self, cell: Cell, *layouts: Any, **options: Any) -> Any:
        return check_cell(cell, *layouts, **options)

    # --- linear layers ------------------------------------------------------------------------------------------------

    def test_colwise_and_rowwise(self) -> None:
        """tp and gtp cut the same dim of the first weight, different dims of the second, and one bias of the two."""
        cell = Cell(
            lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)),
            {"0": ColwiseParallel(), "2": RowwiseParallel()},
        )
        model = self.check(cell, GTP_TP, GTP_ALONE, TP_ALONE, REPLICATE_GTP, REPLICATE_TP, TP_GTP)
        placements = {name: param.placements for name, param in model.named_parameters()}
        self.assertEqual(
            placements,
            {
                "0.weight": (Shard(0), GTPShard(0)),
                "0.bias": (Shard(0), Replicate()),
                "2.weight": (Shard(1), GTPShard(0)),
                "2.bias": (Replicate(), Replicate()),
            },
        )
        self.assertEqual({param.device_mesh.mesh_dim_names for param in model.parameters()}, {("tp", "gtp")})
        self.assertEqual([tuple(p.to_local().shape) for p in model.parameters()], [(4, 6), (8,), (4, 8), (8,)])

    def test_uneven_cuts(self) -> None:
        model = self.check(uneven_cell(), GTP_TP, TP_ALONE, TP_GTP)
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
        model = self.check(cell, GTP_TP, TP_GTP)
        tp, gtp = (model[0].weight.device_mesh.get_local_rank(axis) for axis in ("tp", "gtp"))
        is_empty = [module.weight.to_local().numel() == 0 for module in (model[0], model[2])]
        self.assertEqual(is_empty, [tp == gtp == 1, gtp == 1])

    def test_output_layouts(self) -> None:
        """Gathered and scattered outputs, DTensors between layers, and a weight that is cut on dim 1 by both axes."""
        cell = Cell(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)),
            {
                "0": ColwiseParallel(output_layouts=Replicate()),
                "1": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False),
                "2": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
            },
            placement_fn=lambda model: {model[1].weight: GTPShard(1)}.get,
        )
        self.check(cell, GTP_TP, TP_GTP)

    def test_gradient_that_lies_otherwise_than_the_output(self) -> None:
        """That of a mean is the same everywhere, so DTensor hands it on whole where the output is cut."""

        def plan(model: nn.Module, tp: DeviceMesh) -> None:
            whole = Replicate()
            parallelize_module(model, tp, {"0": RowwiseParallel(input_layouts=whole), "2": ColwiseParallel()})
            model[2]._forward_hooks.clear()  # it would bring the gradient into place

        cell = Cell(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)),
            plan,
            loss=lambda model, batch: full(model(batch).mean()),
        )
        self.check(cell, GTP_TP)

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
        for sync_last_only in (False, True):
            self.check(cell, GTP_TP, REPLICATE_TP, num_microbatches=3, sync_last_only=sync_last_only)

    # --- weights that tensor parallelism leaves whole -----------------------------------------------------------------

    def test_sequence_parallel_norms(self) -> None:
        """Each tp rank normalizes its part of the sequence: the norms' gradients are partial sums over tp."""
        model = self.check(norms_cell(), GTP_TP, REPLICATE_TP, TP_GTP)
        self.assertEqual(model[0].norm.weight.placements, (Replicate(), Replicate()))

    def test_modules_outside_of_the_plan(self) -> None:
        """Their parameters are plain tensors, on gtp alone, and equal on the ranks of tp."""
        model = self.check(outside_cell(), GTP_TP, TP_GTP)
        names = [param.device_mesh.mesh_dim_names for param in model.parameters()]
        self.assertEqual(names, [("gtp",)] * 4 + [("tp", "gtp")] * 4)

    def test_replicated_weights(self) -> None:
        """``distribute_module`` without a plan replicates; the module then eats DTensors, sharded over tp."""
        cell = Cell(
            lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)), replicate_all, loss=sharded_input
        )
        model = self.check(cell, GTP_TP, TP_GTP)
        self.assertEqual(model[0].weight.placements, (Replicate(), GTPShard(0)))

    # --- embeddings and losses ----------------------------------------------------------------------------------------

    def test_embedding_rowwise(self) -> None:
        """Cut by vocabulary, unevenly, each rank masking what it does not hold."""
        self.check(embedding_cell(RowwiseParallel(input_layouts=Replicate())), GTP_TP, TP_GTP)

    def test_embedding_colwise(self) -> None:
        self.check(embedding_cell(ColwiseParallel(output_layouts=Replicate())), GTP_TP, TP_GTP)

    def test_tied_embedding_and_head(self) -> None:
        """Parallelized one by one, then tied: one weight, rowwise as an embedding and colwise as a head."""

        def plan(model: nn.Module, tp: DeviceMesh) -> None:
            embedding = RowwiseParallel(input_layouts=Replicate())
            parallelize_module(model, tp, {"0": embedding, "2": ColwiseParallel(output_layouts=Replicate())})
            model[2].weight = model[0].weight

        cell = Cell(tied_model, plan, (5,), 18, loss=next_token_loss)
        model = self.check(cell, GTP_TP, REPLICATE_TP, TP_GTP)
        self.assertIs(model[2].weight, model[0].weight)

    def test_loss_parallel(self) -> None:
        """The logits stay cut by vocabulary through cross entropy, as a DTensor."""
        cell = Cell(
            lambda: nn.Sequential(nn.Embedding(18, 6), nn.Linear(6, 18)),
            {"1": ColwiseParallel(use_local_output=False)},
            (5,),
            18,
            loss=next_token_loss,
            around=loss_parallel,
        )
        self.check(cell, GTP_TP, TP_GTP)

    # --- modules ------------------------------------------------------------------------------------------------------

    def test_prepared_inputs_and_outputs(self) -> None:
        plan: Plan = {
            "first": PrepareModuleInputOutput(
                input_layouts=Replicate(),
                desired_input_layouts=Shard(0),
                output_layouts=Shard(0),
                desired_output_layouts=Replicate(),
                use_local_output=False,
            ),
            "first.inner": SequenceParallel(sequence_dim=0, use_local_output=True),
            "second.inner": SequenceParallel(sequence_dim=0),
            "second": PrepareModuleInputOutput(
                input_layouts=(Replicate(), None),
                desired_input_layouts=(Shard(0), None),
                output_layouts=Shard(0),
                desired_output_layouts=Replicate(),
            ),
            "third": PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate()),
            "third.inner": ColwiseParallel(),
        }
        self.check(Cell(Prepared, plan), GTP_TP, TP_GTP)

    def test_raw_weights_used_as_local_tensors(self) -> None:
        """Experts' stacked weights, cut on their last dims, that the forward itself turns into local tensors."""
        self.check(Cell(Stacked, cut_stacked), GTP_TP, TP_GTP)

    def test_llama(self) -> None:
        """The usual plan for a Llama: sequence parallel norms, colwise and rowwise projections, parallel loss."""
        cell = llama_cell()
        model = self.check(cell, GTP_TP, TP_GTP)
        # Three query heads on each tp rank, cut between heads over two ranks; one key-value head, which one rank holds.
        attention = model.layers[0].attention
        rows = [module.weight.to_local().shape[0] for module in (attention.wq, attention.wk)]
        gtp = attention.wq.weight.device_mesh.get_local_rank("gtp")
        self.assertEqual(rows, [(8, 4), (4, 0)][gtp])

    # --- activation checkpointing -------------------------------------------------------------------------------------

    def test_activation_checkpointing(self) -> None:
        """Each block is recomputed, collectives of tp included; its weights are gathered once more, unless the policy
        saves what the GEMMs return."""
        for how in ("non-reentrant", "reentrant", "selective"):
            cell = llama_cell(how)
            model = self.check(cell, GTP_TP)
            gathers = gathers_of_a_step(model, cell, root_mesh(*GTP_TP))
            expected = {2} if how == "selective" else {3}
            self.assertEqual(gathers, {"embedding": {1}, "layers": expected, "output": {1}})

    def test_activation_checkpoint_wrapper(self) -> None:
        """torch's wrapper module around each block, put there before the plan is applied."""
        self.check(llama_cell("wrapper"), TP_GTP)

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def test_optimizers_and_clipping(self) -> None:
        for layout, options in ((GTP_TP, {"foreach": True}), (TP_GTP, {"fused": True})):
            self.check(llama_cell(), layout, make_optimizer=adamw(**options), max_norm=0.1)

    def test_optimizers_over_modules_outside_of_the_plan(self) -> None:
        """Parameters on (tp, gtp) and on (gtp) in one group."""
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            self.check(outside_cell(), GTP_TP, make_optimizer=adamw(**options), max_norm=0.1)

    # --- refusals -----------------------------------------------------------------------------------------------------

    def test_refusals_on_all_ranks(self) -> None:
        """Every rank raises the same error before the first collective, and the model is as it was."""
        root, other = root_mesh(*GTP_TP), DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("gtp", "tp"))
        cell = uneven_cell()
        model = parallelize_module(cell.reference(), root["tp"], cell.plan)
        before = dict(model.named_parameters())
        refused = {
            "same root as its own.* Build one mesh with init_device_mesh and pass its sub-meshes": other["gtp"],
            r"whose axes no parameter uses yet.*overlap with \('tp',\).* mesh\['gtp'\] beside mesh\['tp'\]": root["tp"],
        }
        for message, mesh in refused.items():
            with self.assertRaisesRegex(ValueError, message):
                gtp_shard(model, mesh, schedule=ALL)
        self.assertTrue(all(param is before[name] for name, param in model.named_parameters()))
        gtp_shard(model, root["gtp"], schedule=ALL)
        with self.assertRaisesRegex(RuntimeError, "Call parallelize_module first, then gtp_shard, then fully_shard"):
            parallelize_module(model, root["tp"], cell.plan)
        batch = cell.batch(torch.Generator().manual_seed(0))
        cell.loss(model, rows_of_rank(batch, root["gtp"])).backward()
        reference = cell.reference()
        cell.loss(reference, batch).backward()
        assert_same_params(model, reference, "grad")
