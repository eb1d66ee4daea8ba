"""Compositions on GPUs over NCCL, each beside one process: gradients, parameters after steps, reloaded checkpoints.

The models and the comparisons are those of the CPU tests, in float64 unless said otherwise, so that what is left of a
difference is no rounding. New here are streams that FSDP2, DTensor and ``gtp_shard`` do not share, and kernels that the
CPU does not have (fused norms, inductor's). Needs 4 or 8 GPUs of one host.
"""

import unittest
from typing import Any

import torch
import torch._inductor.config
import torch.nn as nn
from common import ALL, assert_same_params, check_training, environment, rows_of_rank
from cuda_common import BF16, CudaTest
from cuda_common import NUM_RANKS as ALL_RANKS
from fsdp_common import VOCABULARY, Model, both, check, check_checkpoints, make, mesh_of, three_axes, wrap
from fsdp_common import next_token_loss as token_loss
from fsdp_common import token_batch as tokens_of
from runtime_common import assert_idle
from test_gtp_shard_fsdp import CallsAgain, Recomputes
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from tp_common import (
    Cell,
    check_cell,
    embeddings_cell,
    gathers_of_a_step,
    gtp_axes,
    llama_cell,
    norms_cell,
    outside_cell,
    root_mesh,
    tied_cell,
)

from dtensor_gtp import GTPShard, gtp_shard

DEVICE = "cuda"
NUM_RANKS = ALL_RANKS // 4 * 4
HALF, QUARTER = NUM_RANKS // 2, NUM_RANKS // 4

# Heads and their groups divide by a tp of two; on eight GPUs gtp has four ranks, or replicas.
GTP_TP = ((HALF, 2), ("gtp", "tp"), DEVICE)
TP_GTP = ((2, HALF), ("tp", "gtp"), DEVICE)
REPLICATE_TP = ((2, QUARTER, 2), ("replicate", "gtp", "tp"), DEVICE)
GTP_ALONE = ((NUM_RANKS, 1), ("gtp", "tp"), DEVICE)
REPLICATE_GTP = ((2, HALF, 1), ("replicate", "gtp", "tp"), DEVICE)

# float32, compiled: kernels that add up in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Unlike AdamW it does not blow up the last bit of a gradient near zero."""
    return torch.optim.SGD(params, lr=0.1)


def dp_gtp() -> DeviceMesh:
    return mesh_of((2, HALF), ("dp", "gtp"), DEVICE)


def dp_gtp_tp() -> DeviceMesh:
    return mesh_of((2, QUARTER, 2), ("dp", "gtp", "tp"), DEVICE)


def plain_cell() -> Cell:
    """A model that tensor parallelism leaves alone."""
    return Cell(Model, lambda model, tp: None, (5,), VOCABULARY, loss=token_loss)


@unittest.skipIf(NUM_RANKS < 4, "needs at least 4 GPUs")
class TestCudaCompose(CudaTest):
    world_size = NUM_RANKS

    # --- tensor parallelism -------------------------------------------------------------------------------------------

    def test_colwise_and_rowwise(self) -> None:
        """Same-dim and perpendicular cuts; checkpoints go from mesh to mesh, and to one process at the end."""
        cell = Cell(
            lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)),
            {"0": ColwiseParallel(), "2": RowwiseParallel()},
        )
        model = check_cell(cell, GTP_TP, GTP_ALONE, TP_GTP)
        self.assertEqual(model[0].weight.placements, (Shard(0), GTPShard(0)))
        self.assertEqual(model[2].weight.placements, (Shard(1), GTPShard(0)))
        check_cell(outside_cell(), GTP_TP)

    def test_sequence_parallel_norms(self) -> None:
        """The fused kernels of norms, whose gradients are partial sums over tp."""
        model = check_cell(norms_cell(), GTP_TP, REPLICATE_TP)
        self.assertEqual(model[0].norm.weight.placements[0], Replicate())

    def test_embeddings(self) -> None:
        check_cell(embeddings_cell(), GTP_TP)
        check_cell(tied_cell(), TP_GTP)

    def test_llama(self) -> None:
        """Sequence parallel norms, heads that gtp does not divide, parallel loss, checkpoints; then microbatches."""
        check_cell(llama_cell(), GTP_TP, REPLICATE_TP, TP_GTP)
        for sync_last_only in (False, True):
            check_cell(llama_cell(), REPLICATE_TP, num_microbatches=3, sync_last_only=sync_last_only)

    def test_recomputed_llama(self) -> None:
        for how in ("non-reentrant", "reentrant", "selective"):
            cell = llama_cell(how)
            model = check_cell(cell, GTP_TP)
            # What is recomputed stays for its gradients.
            gathers = gathers_of_a_step(model, cell, root_mesh(*GTP_TP))
            self.assertEqual(gathers, {"embedding": {1}, "layers": {2}, "output": {1}})

    # --- replicas -----------------------------------------------------------------------------------------------------

    def test_replicas_and_gradient_accumulation(self) -> None:
        for sync_last_only in (False, True):
            check_cell(plain_cell(), REPLICATE_GTP, num_microbatches=3, sync_last_only=sync_last_only)

    # --- fully_shard outside ------------------------------------------------------------------------------------------

    def test_fully_shard_outside(self) -> None:
        for reshard in (True, False):
            shard = both(dp_gtp(), reshard_after_forward=reshard)
            assert_idle(check(make(), shard, dp_gtp(), num_microbatches=2))
        assert_idle(check(make(Recomputes), both(dp_gtp(), reshard_after_forward=True), dp_gtp()))
        check(make(), both(dp_gtp(), lambda model: [], reshard_after_forward=True), dp_gtp())
        check_checkpoints(dp_gtp(), both(dp_gtp()))

    def test_fully_shard_outside_of_tensor_parallelism(self) -> None:
        """dp x gtp x tp: on four GPUs with a gtp axis of one rank."""
        mesh = dp_gtp_tp()
        data = mesh["dp", "gtp"]
        check(make(), three_axes(mesh, reshard_after_forward=True), data, num_microbatches=2)
        check(make(Recomputes), three_axes(mesh, reshard_after_forward=False), data)
        check_checkpoints(mesh, three_axes(mesh))

    def test_hsdp_outside(self) -> None:
        mesh = mesh_of((2, QUARTER, 2), ("dp_replicate", "dp_shard", "gtp"), DEVICE)

        def shard(model: nn.Module) -> nn.Module:
            gtp_shard(model, mesh["gtp"], schedule=ALL)
            return wrap(model, mesh["dp_replicate", "dp_shard"], reshard_after_forward=True)

        check(make(), shard, mesh)
        mesh = mesh_of((2, QUARTER, 1, 2), ("dp_replicate", "dp_shard", "gtp", "tp"), DEVICE)
        axes = ("dp_replicate", "dp_shard")
        check(make(), three_axes(mesh, axes), mesh[(*axes, "gtp")], num_microbatches=2)

    def test_fully_shard_reads_complete_gradients_and_gtp_complete_shards(self) -> None:
        """Slow and poisoned collectives on their own streams: what is read too early is NaN or the last step's."""
        mesh = dp_gtp()
        for seed in range(3):
            with environment(DTENSOR_GTP_DEBUG=f"poison,delay={seed}"):
                for cls, reshard in ((CallsAgain, True), (Model, False), (Recomputes, True)):
                    check(make(cls), both(mesh, reshard_after_forward=reshard), mesh)

    def test_mixed_precision(self) -> None:
        """bf16 on the wire and in the GEMMs, reduced in float32, with either policy."""
        mesh = dp_gtp()
        for gtp, fsdp in ((BF16, None), (None, BF16), (BF16, BF16)):
            reference = make().float().to(DEVICE)
            options = {} if fsdp is None else {"mp_policy": fsdp}
            model = both(mesh, gtp={} if gtp is None else {"mp_policy": gtp}, **options)(make().float().to(DEVICE))
            tokens = tokens_of(torch.Generator().manual_seed(0)).to(DEVICE)
            token_loss(reference, tokens).backward()
            token_loss(model, rows_of_rank(tokens, mesh)).backward()
            self.assertEqual({param.grad.dtype for param in model.parameters()}, {torch.float32})
            assert_same_params(model, reference, "grad", rtol=0.1, atol=2e-3)
        mesh = dp_gtp_tp()
        check(
            make().float(),
            three_axes(mesh, gtp={"mp_policy": BF16}),
            mesh["dp", "gtp"],
            loss_fn=lambda model, tokens: token_loss(model, tokens).float(),
            tolerance={"rtol": 0.1, "atol": 5e-3},
        )

    # --- torch.compile ------------------------------------------------------------------------------------------------

    def _check_compiled(self, reference: nn.Module, shard: Any, mesh: DeviceMesh, make_batch: Any, loss: Any) -> None:
        """One graph for all blocks. Compiled in this process: eight of them would start a pool of workers each."""
        torch._dynamo.reset()
        counters.clear()

        def compiled(model: Any) -> Any:
            shard(model)
            for layer in model.layers:
                layer.compile(fullgraph=True)
            return model

        def batch(generator: torch.Generator) -> torch.Tensor:
            return make_batch(generator).to(DEVICE)

        with torch._inductor.config.patch(compile_threads=1):
            check_training(
                reference.float().to(DEVICE),
                compiled,
                mesh,
                batch,
                loss,
                make_optimizer=sgd,
                steps=2,
                num_microbatches=2,
                tolerance=CLOSE,
            )
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        self.assertFalse(counters["graph_break"])

    def test_compiled_blocks_inside_of_fully_shard(self) -> None:
        shard = both(dp_gtp(), reshard_after_forward=True)
        self._check_compiled(make(), shard, dp_gtp(), tokens_of, token_loss)

    def test_compiled_and_recomputed_blocks_of_a_tensor_parallel_llama(self) -> None:
        cell, root = llama_cell("non-reentrant"), root_mesh(*GTP_TP)
        with cell.around():
            self._check_compiled(
                cell.reference(), lambda model: cell.sharded(model, root), gtp_axes(root), cell.batch, cell.loss
            )
