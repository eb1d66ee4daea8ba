"""Checkpoints of models with quantized weights (master storage): any recipe and topology to any other, bit for bit."""

from collections.abc import Callable

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from checkpoint_common import assert_same_state, job_state, load_job, local, whole_state
from common import GlooTest, _mesh, full, rows_of_rank, shared_directory
from quant_common import COLUMNS, Net, cut_layers, dequantized, fsdp, fully_sharded, gtp, loss_of, tokens_of
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp.quant import MXFP8, NVFP4, RECIPES, Direction, Float8Blockwise, Float8Tensorwise, Recipe

HIDDEN = 512
ShardFn = Callable[[nn.Module], nn.Module]


class Job:
    """A model on a topology, and its optimizer, after a step with data of its own."""

    def __init__(self, shard: ShardFn, data_mesh: DeviceMesh, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = shard(Net(hidden=HIDDEN))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        loss_of(self.model, rows_of_rank(tokens_of(seed), data_mesh)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class TestQuantizedCheckpoint(GlooTest):
    def _topologies(self) -> dict[str, tuple[ShardFn, DeviceMesh, Recipe | None]]:
        mesh, hsdp = self.gtp_mesh(), self.hsdp_mesh()
        tp, dp = _mesh((2, 2), ("gtp", "tp")), _mesh((2, 2), ("dp", "gtp"))
        shard_of_one = self.hsdp_mesh(4)

        def on_tp(model: nn.Module) -> nn.Module:
            return gtp(MXFP8(), tp["gtp"])(cut_layers(model, tp["tp"]))

        return {
            "fsdp bf16": (lambda model: fsdp(model, mesh), mesh, None),
            "fsdp blockwise": (fully_sharded(Float8Blockwise(), mesh), mesh, Float8Blockwise()),
            "fsdp nvfp4": (fully_sharded(NVFP4(), mesh), mesh, NVFP4()),
            "gtp tensorwise": (gtp(Float8Tensorwise(), mesh), mesh, Float8Tensorwise()),
            "gtp blockwise": (gtp(Float8Blockwise(), mesh), mesh, Float8Blockwise()),
            "gtp nvfp4": (gtp(NVFP4(), mesh), mesh, NVFP4()),
            "hsdp mxfp8": (gtp(MXFP8(), hsdp), hsdp, MXFP8()),
            "hsdp shard of one, mxfp8": (gtp(MXFP8(), shard_of_one), shard_of_one, MXFP8()),
            "gtp x tp mxfp8": (on_tp, tp["gtp"], MXFP8()),
            "fsdp x gtp mxfp8": (lambda m: fsdp(gtp(MXFP8(), dp["gtp"])(m), dp["dp"], **COLUMNS), dp, MXFP8()),
        }

    def _check_forward(self, job: Job, recipe: Recipe | None) -> None:
        """R13: what was loaded is what the next forward uses, with no step in between."""
        if recipe is None:
            return
        up = full(job.model.layers[0].up.weight.detach())
        reference = nn.Linear(40, HIDDEN)
        with torch.no_grad():
            reference.weight.copy_(dequantized(up, recipe, Direction.ROWWISE))
            reference.bias.copy_(full(job.model.layers[0].up.bias))
            seen: list[torch.Tensor] = []
            handle = job.model.layers[0].up.register_forward_hook(lambda m, args, y: seen.extend((args[0], y)))
            job.model(tokens_of(0))
            handle.remove()
            x, y = (full(t) for t in seen)
            expected = reference(x)
            if y.shape != expected.shape:  # the columns of this tp rank
                rank = job.model.layers[0].up.weight.device_mesh["tp"].get_local_rank()
                expected = expected.chunk(HIDDEN // y.shape[-1], -1)[rank]
            torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)

    def _check(self, source: str, targets: list[str]) -> None:
        topologies = self._topologies()
        shard, mesh, _ = topologies[source]
        saved = Job(shard, mesh, seed=1)
        expected = whole_state(saved.model, saved.optimizer)
        with shared_directory() as path:
            dcp.save(job_state(saved.model, saved.optimizer), checkpoint_id=path)
            for target in targets:
                shard, mesh, recipe = topologies[target]
                job = Job(shard, mesh, seed=2)
                load_job(job.model, job.optimizer, path)
                actual = whole_state(job.model, job.optimizer)
                self._check_forward(job, recipe)
                assert_same_state(actual, expected, (source, target))

    def test_any_to_any(self) -> None:
        """Plain ``fully_shard`` in bfloat16 to every recipe and back, and recipes to others."""
        for source, targets in (
            ("fsdp bf16", ["gtp nvfp4", "gtp x tp mxfp8", "fsdp blockwise", "gtp tensorwise"]),
            ("gtp x tp mxfp8", ["fsdp bf16", "gtp blockwise"]),
            ("fsdp x gtp mxfp8", ["fsdp nvfp4", "fsdp x gtp mxfp8"]),
            ("hsdp shard of one, mxfp8", ["hsdp shard of one, mxfp8", "hsdp mxfp8"]),
        ):
            self._check(source, targets)

    def test_r14_same_bytes(self) -> None:
        """R14: save and load give the same bytes: of masters, and of what every format makes of them."""
        mesh = self.gtp_mesh()
        saved, loaded = (Job(gtp(NVFP4(), mesh), mesh, seed) for seed in (3, 4))
        with shared_directory() as path:
            dcp.save(job_state(saved.model, saved.optimizer), checkpoint_id=path)
            load_job(loaded.model, loaded.optimizer, path)
        for ours, theirs in zip(saved.model.parameters(), loaded.model.parameters(), strict=True):
            self.assertTrue(torch.equal(local(ours), local(theirs)))
        weights = [full(job.model.layers[1].down.weight.detach()) for job in (saved, loaded)]
        for recipe in (cls() for cls in RECIPES.values()):
            for direction in Direction:
                planes = [recipe.quantize(weight, direction).planes for weight in weights]
                for a, b in zip(*planes, strict=True):
                    self.assertTrue(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
