"""State of unequal replicas outlives them: in checkpoints of any layout, and in memory of the ranks that are left."""

import copy
import functools
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.distributed_c10d as distributed_c10d
import torch.nn as nn
from checkpoint_common import RecordingPlanner, adamw, job_state, load_job, make, set_job_state, shard
from common import GlooTest, assert_same_params, full, shared_directory
from quant_common import Net, blocks_only, gtp, loss_of, reference_of, take_over
from quant_common import tokens_of as quantized_tokens_of
from test_elastic import HEAD_DIM, Elastic, Heads, _replicas, shard_heads, token_loss, tokens_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_gtp.elastic import (
    ElasticMesh,
    HeldState,
    ReplicaSavePlanner,
    StateLostError,
    WeightSpec,
    hold_state,
    nonuniform_mesh,
    recover_state,
    recovery,
    synchronize_replicas,
)
from dtensor_gtp.optim import gathered
from dtensor_gtp.quant import MXFP8, Float8Tensorwise, Recipe

Ranks = tuple[tuple[int, ...], ...]

UNEQUAL: Ranks = ((0, 1), (2, 3, 4, 5))
OTHER: Ranks = ((5,), (0, 2, 1), (3, 4))


class Reference:
    """One process on the whole batch: what every other job must agree with."""

    def __init__(self, steps: int = 0, device: str = "cpu") -> None:
        self.device = device
        self.model = make(0).to(device)
        self.optimizer = adamw(self.model)
        self.train(range(steps))

    def backward(self, step: int) -> None:
        token_loss(self.model, tokens_of(step, 15).to(self.device)).backward()

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            self.backward(step)
            self.optimizer.step()
            self.optimizer.zero_grad()


class Job(Reference):
    """The same model on a mesh: elastic replicas, or a 1-D or 2-D one of ``gtp_shard``."""

    def __init__(self, mesh: ElasticMesh | DeviceMesh, seed: int = 0) -> None:
        self.mesh = mesh
        weights = mesh.weights if isinstance(mesh, ElasticMesh) else mesh
        self.device = weights.device_type
        self.model = shard(make(seed).to(self.device), weights)
        # Op by op: the fused one rounds the last elements of a shard in another way than those before, on some CPUs.
        self.optimizer = adamw(self.model)
        if self.device == "cpu":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        if isinstance(mesh, ElasticMesh):
            self.sync = synchronize_replicas(self.model, mesh)

    def backward(self, step: int) -> None:
        batch = tokens_of(step, 15).to(self.device)
        if isinstance(self.mesh, ElasticMesh):
            share = self.mesh.rebalance_batch(len(batch))
            self.sync.set_batch(share)
            batch = batch[share.rows]
        token_loss(self.model, batch).backward()  # elsewhere all ranks have the same: the mean is that of the batch

    def hold(self, step: int) -> HeldState:
        return hold_state(job_state(self.model, self.optimizer), step=step)

    def recover(self, held: HeldState | None, **options: Any) -> tuple[int, Any]:
        assert isinstance(self.mesh, ElasticMesh)
        state = job_state(self.model, self.optimizer)
        step = recover_state(held, state, self.mesh, **options)
        set_job_state(self.model, self.optimizer, state)
        return step, state

    def check(self, reference: Reference) -> None:
        """Parameters and optimizer state."""
        assert_same_params(self.model, reference.model)
        expected = dict(reference.model.named_parameters())
        for name, param in self.model.named_parameters():
            state = reference.optimizer.state[expected[name]]
            for key, value in self.optimizer.state[param].items():
                torch.testing.assert_close(full(value), state[key], msg=lambda m, n=name, k=key: f"{k} of {n}: {m}")

    def check_goes_on(self, step: int) -> None:
        """It is as one process after so many steps, and after one more."""
        self.check(_reference(step))
        self.train([step])
        self.check(_reference(step + 1))
        if isinstance(self.mesh, ElasticMesh):
            self.sync.check_values()


class GatheredJob(Job):
    """One rank of each replica owns the state of a parameter."""

    def __init__(self, mesh: ElasticMesh, seed: int = 0) -> None:
        super().__init__(mesh, seed)
        self.optimizer = gathered(torch.optim.AdamW)(self.model.parameters(), lr=1e-2, foreach=False)


class RecordingReplicas(RecordingPlanner, ReplicaSavePlanner):
    """Counts who writes what of unequal replicas."""


class TestElasticCheckpoint(GlooTest):
    world_size = 6

    def test_from_unequal_replicas_to_any_layout_and_back(self) -> None:
        mesh = _replicas(UNEQUAL)
        with shared_directory() as path:
            job, planner = Job(mesh), RecordingReplicas(mesh)
            job.train(range(2))
            dcp.save(job_state(job.model, job.optimizer), checkpoint_id=path / "2", planner=planner)
            if dist.get_rank() == 0:
                self.assertTrue(all(count == 1 for count in planner.writes.values()), planner.writes)
                # The replica of four ranks writes: the blocked weight has a chunk on three of them, others on four.
                self.assertEqual(sum(fqn == "model.embedding.weight" for fqn, _ in planner.writes), 4)
            for other in (_replicas(OTHER), self.gtp_mesh(), self.hsdp_mesh()):
                resumed = Job(other, seed=1)
                load_job(resumed.model, resumed.optimizer, path / "2")
                resumed.check_goes_on(2)
                if isinstance(other, DeviceMesh):
                    back, place = Job(mesh, seed=1), path / f"{other.ndim} axes"
                    dcp.save(job_state(resumed.model, resumed.optimizer), checkpoint_id=place)
                    load_job(back.model, back.optimizer, place)
                    back.check_goes_on(3)
            plain = Reference(1)  # one process: not sharded at all
            state = job_state(plain.model, plain.optimizer)
            dcp.load(state, checkpoint_id=path / "2", no_dist=True)
            set_job_state(plain.model, plain.optimizer, state)
            plain.train([2])
            resumed.check(plain)

    def test_replicas_of_unequal_tp(self) -> None:
        """Five heads over 3, 2 and 1 ranks of tp. A checkpoint, and what is left in memory without rank 2, go back
        there, and to replicas of 2 x 2 and 1 x 2."""
        weights = [WeightSpec("wq", (5 * HEAD_DIM, 6), tp_dim=0, tp_block_size=HEAD_DIM)]
        layouts = (([0, 1, 2], [3, 4], [5]), 3), (([0, 1, 2, 3], [4, 5]), 2)
        meshes = [nonuniform_mesh("cpu", replicas=ranks, tp=tp, weights=weights) for ranks, tp in layouts]
        sizes = [[(replica.gtp, replica.tp) for replica in mesh.layout.replicas] for mesh in meshes]
        self.assertEqual(sizes, [[(1, 3), (1, 2), (1, 1)], [(2, 2), (1, 2)]])
        torch.manual_seed(3)
        job = Elastic(meshes[0], Heads(), shard_heads)
        job.train()
        state, planner = job_state(job.model, job.optimizers[1]), RecordingReplicas(meshes[0])
        held = hold_state(state, step=2) if dist.get_rank() != 2 else None
        with shared_directory() as path:
            dcp.save(state, checkpoint_id=path, planner=planner)
            if dist.get_rank() == 0:
                self.assertTrue(all(count == 1 for count in planner.writes.values()), planner.writes)
                self.assertEqual(sum(fqn == "model.wq.weight" for fqn, _ in planner.writes), 3)
            for mesh, source in zip(meshes, ("checkpoint", "memory"), strict=True):
                torch.manual_seed(4)
                resumed = Elastic(mesh, Heads(), shard_heads)
                state = job_state(resumed.model, resumed.optimizers[1])
                if source == "memory":
                    self.assertEqual(recover_state(held, state, mesh), 2)
                else:
                    dcp.load(state, checkpoint_id=path)
                set_job_state(resumed.model, resumed.optimizers[1], state)
                resumed.reference, resumed.optimizers[0] = copy.deepcopy((job.reference, job.optimizers[0]))
                assert_same_params(resumed.model, resumed.reference)
                resumed.backward(tokens_of(2, 19))
                resumed.step()
                resumed.sync.check_values()

    def test_without_the_planner_nothing_is_written(self) -> None:
        """Chunks of unequal replicas overlap."""
        with shared_directory() as path:
            job = Job(_replicas(UNEQUAL))
            with self.assertRaisesRegex(dcp.api.CheckpointException, "Failed to validate global plan"):
                dcp.save(job.model.state_dict(), checkpoint_id=path)
            self.assertFalse((path / ".metadata").exists())

    # --- in memory ----------------------------------------------------------------------------------------------------

    def test_ranks_that_come_back_with_nothing_get_their_part_from_others(self) -> None:
        """In the same layout they alone receive, each element once. Replicas may have other sizes and ranks than
        before; chunks may be small."""
        job, rank = Job(_replicas(UNEQUAL)), dist.get_rank()
        job.train(range(2))
        held, all_to_all = job.hold(2), dist.all_to_all_single
        received: list[int] = []

        def counting(inbox: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            received.append(inbox.numel())
            return all_to_all(inbox, *args, **kwargs)

        for ranks, new, chunk_nbytes in ((UNEQUAL, (3,), 1 << 20), (OTHER, (0, 4), 100), (UNEQUAL[::-1], (0, 4), 100)):
            received.clear()
            resumed = Job(_replicas(ranks), seed=1)
            with mock.patch.object(dist, "all_to_all_single", counting):
                step, state = resumed.recover(None if rank in new else held, chunk_nbytes=chunk_nbytes)
            self.assertEqual(step, 2)
            if ranks == UNEQUAL:
                tensors = [value for _, _, value in recovery._leaves(state) if isinstance(value, DTensor)]
                lost = sum(value.to_local().numel() for value in tensors)
                self.assertEqual(sum(received), lost if rank in new else 0)
            resumed.check_goes_on(2)

    def test_the_latest_step_that_is_complete_is_taken(self) -> None:
        """A failure caught replica 0 after the third step, the other before it."""
        job = Job(_replicas(UNEQUAL))
        job.train(range(2))
        step = 2 if job.mesh.place.replica == 1 else 3
        if step == 2:
            held = copy.deepcopy(job.hold(2))
        job.train([2])
        if step == 3:
            held = copy.deepcopy(job.hold(3))
        for dead, expected in ((None, 3), (5, 3), (1, 2)):
            resumed = Job(_replicas(OTHER), seed=1)
            step, _ = resumed.recover(held if dist.get_rank() != dead else None)
            self.assertEqual(step, expected)
            resumed.check(_reference(expected))

    def test_values_that_are_no_tensors_of_the_mesh(self) -> None:
        """Own ones are kept, new ranks take those of the lowest rank."""
        rank, mesh = dist.get_rank(), _replicas(UNEQUAL)

        def state(seed: int, values: dict[str, Any]) -> dict[str, Any]:
            weight = Job(mesh, seed).model.norm.weight.detach()
            return {"weight": weight, **values}

        generator = torch.Generator().manual_seed(rank)
        held = hold_state(
            state(0, {"rng": generator.get_state(), "data": {"sample": 7}, "losses": [rank, 2.0]}), step=1
        )
        new = state(1, {"rng": torch.Generator().get_state(), "data": {"sample": 0}, "losses": [0, 0.0]})
        with self.assertLogs("dtensor_gtp.elastic.recovery", "INFO") as logged:
            with mock.patch.object(distributed_c10d, "_tensor_to_object", side_effect=AssertionError("unpickles")):
                recover_state(held if rank != 2 else None, new, mesh)
        begin, end = (record.getMessage() for record in logged.records)
        self.assertEqual(begin, "recovery of the state after step 1: begins, 1 in all")
        self.assertRegex(end, r"^recovery of the state after step 1: done after .* \(1 of 1\)$")
        self.assertEqual(new["data"], {"sample": 7})
        self.assertEqual(new["losses"], [rank if rank != 2 else 0, 2.0])
        drawn = torch.rand(3, generator=torch.Generator().set_state(new["rng"]))
        self.assertEqual(drawn, torch.rand(3, generator=torch.Generator().manual_seed(rank if rank != 2 else 0)))
        self.assertEqual(full(new["weight"]), make(0).norm.weight)

    def test_lists_of_other_lengths_are_replaced(self) -> None:
        mesh = _replicas(UNEQUAL)
        held = hold_state({"losses": [1.0, 2.0], "few": [1, [2]], "tensors": [torch.ones(2)], "none": {}}, step=1)
        state = {"losses": [], "few": [9] * 5, "tensors": [torch.zeros(2)], "none": {}, "new": [3]}
        recover_state(held if dist.get_rank() != 2 else None, state, mesh)
        expected = {"losses": [1.0, 2.0], "few": [1, [2]], "tensors": [torch.ones(2)], "none": {}, "new": [3]}
        self.assertEqual(state, expected)

    def test_gathered_states_get_new_owners(self) -> None:
        """Also from an owner in another replica. Without the owner, they are lost."""
        mesh = _replicas(UNEQUAL)
        job = GatheredJob(mesh)
        job.train(range(2))
        held = job.hold(2)
        resumed = GatheredJob(_replicas(OTHER), seed=1)
        self.assertEqual(resumed.recover(held if dist.get_rank() > 1 else None, chunk_nbytes=100)[0], 2)
        resumed.check_goes_on(2)
        lost = r"expects each part .* but 'optimizer\..*' after step 2 is on none of the ranks \[0, 2, 3\]"
        state = job_state(resumed.model, resumed.optimizer)
        del state["model"]  # of which the other ranks hold parts as well
        with self.assertRaisesRegex(StateLostError, lost):
            recover_state(held if dist.get_rank() in (0, 2, 3) else None, state, resumed.mesh)

    def test_quantized_masters(self) -> None:
        """Segments hold whole blocks; a rank that comes back gets its master, from which it quantizes."""
        mesh, rank = _replicas(UNEQUAL), dist.get_rank()
        for recipe in (Float8Tensorwise(), MXFP8()):
            torch.manual_seed(0)
            reference = reference_of(plain := Net(), recipe, blocks_only)
            optimizer = torch.optim.SGD(reference.parameters(), lr=0.2, momentum=0.5)

            def build(plain: nn.Module = plain, recipe: Recipe = recipe) -> tuple[Any, Any, Any]:
                model = gtp(recipe, mesh.weights)(copy.deepcopy(plain))
                sync = synchronize_replicas(model, mesh)
                return model, sync, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)

            model, sync, own_optimizer = build()
            for step in range(2):
                if step == 1:
                    held = hold_state(job_state(model, own_optimizer), step=step) if rank != 3 else None
                    model, sync, own_optimizer = build()
                    state = job_state(model, own_optimizer)
                    self.assertEqual(recover_state(held, state, mesh), step)
                    set_job_state(model, own_optimizer, state)
                batch = quantized_tokens_of(step)
                share = mesh.rebalance_batch(len(batch))
                sync.set_batch(share)
                loss_of(reference, batch).backward()
                loss_of(model, batch[share.rows]).backward()
                assert_same_params(model, reference, "grad")
                for each in (optimizer, own_optimizer):
                    each.step()
                    each.zero_grad()
                assert_same_params(model, reference)
                sync.check_values()
                take_over(reference, model)

    def test_a_checkpoint_of_another_model_is_refused(self) -> None:
        with shared_directory() as path:
            job = Job(_replicas(UNEQUAL))
            planner = ReplicaSavePlanner(_replicas(UNEQUAL))
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*SavePlanner.set_up_planner")  # of an old signature
                dcp.save({"model": job.model.state_dict()}, checkpoint_id=path, planner=planner)
            model = Job(_replicas(OTHER)).model
            missing = {"model": {"norm2.weight": model.norm.weight.detach()}}
            wider = {"model": {"embedding.weight": model.linear.weight.detach()}}
            for state, message in (
                (missing, "Missing key in checkpoint state_dict: model.norm2.weight"),
                (wider, r"(?i)size mismatch.*model.embedding.weight"),
            ):
                with self.assertRaisesRegex(dcp.api.CheckpointException, message):
                    dcp.load(state, checkpoint_id=path)

    def test_recover_state_refuses(self) -> None:
        rank, mesh = dist.get_rank(), _replicas(UNEQUAL)
        job = Job(mesh)
        held = hold_state({"model": job.model.state_dict()}, step=0)
        state = {"model": Job(mesh, seed=1).model.state_dict()}
        # Ranks 1 and 4, 5 hold the last rows of every weight.
        for alive, message in (
            ((0, 2, 3), r"part .* of 'model\..*' after step 0 is on none of the ranks \[0, 2, 3\]. Load a checkpoint"),
            ((), "ranks that hold state, but there are none"),
        ):
            with self.assertRaisesRegex(RuntimeError, message):
                recover_state(held if rank in alive else None, state, mesh)
        late = hold_state({"model": job.model.state_dict()}, step=int(rank == 0))  # the others are at step 0
        with self.assertRaisesRegex(RuntimeError, "after step 1 is on none of the ranks"):
            recover_state(late if rank in (0, 2, 3) else None, state, mesh)
        held.plain["hook",] = print
        hooked = {"hook": None, **state}
        recover_state(held, hooked, mesh)
        self.assertIs(hooked["hook"], print)
        with self.assertRaisesRegex(TypeError, r"the value\[\('hook',\)\] is a builtin"):
            recover_state(held if rank != 2 else None, hooked, mesh)
        for name, other in (
            ("extra", {"model": {"extra": job.model.norm.weight.detach()}}),
            ("norm.bias", {"model": {"norm.bias": job.model.norm.bias.detach().double()}}),
        ):
            with self.assertRaisesRegex(ValueError, f"the state of the same model, but .* has 'model.{name}'"):
                recover_state(held, other, mesh)


@functools.cache
def _reference(steps: int) -> Reference:
    """Not to be trained on."""
    return Reference(steps)
