"""State dicts and checkpoints: what is in them, every way to load them, and that a load counts at once."""

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from checkpoint_common import (
    RANK0,
    PeakBytes,
    RecordingPlanner,
    Small,
    adamw,
    held_back_writes,
    job_state,
    load_job,
    local,
    local_state,
    make,
    make_sharded,
    set_job_state,
    shard,
    tokens_of_step,
    train,
)
from common import GlooTest, assert_same_params, full, shared_directory
from runtime_common import counted
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from dtensor_gtp import GTPModule, GTPShard, gtp_shard


class TestStateDict(GlooTest):
    def test_state_dict_holds_the_shards_themselves(self) -> None:
        mesh = self.hsdp_mesh()
        model = make_sharded(0, mesh)
        seen: list[Any] = []
        model.out.register_forward_hook(lambda *_: seen.append(model.state_dict()))
        model(tokens_of_step(0))
        params = dict(model.named_parameters(remove_duplicate=False))
        for state in (*seen, model.state_dict()):  # within a forward, and after it
            self.assertEqual(list(state), list(make(0).state_dict()))
            for name, param in params.items():
                self.assertIsInstance(state[name], DTensor, msg=name)
                self.assertEqual(state[name].placements, param.placements)
                self.assertEqual(state[name].device_mesh, param.device_mesh)
                self.assertEqual(state[name].to_local().data_ptr(), param.to_local().data_ptr())
            self.assertNotIsInstance(state["scale"], DTensor)
        self.assertEqual(params["linear.weight"].placements, (Replicate(), GTPShard(0, block_size=4)))
        self.assertEqual(params["columns"].placements, (Replicate(), GTPShard(1)))
        self.assertEqual(params["norm.weight"].placements, (Replicate(), Replicate()))

    def test_full_state_dicts_equal_the_unsharded_ones(self) -> None:
        mesh = self.gtp_mesh()
        reference, model = make(0), make_sharded(0, mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (reference, model)]
        train(reference, optimizers[0], [0], None)
        train(model, optimizers[1], [0], mesh)
        expected = get_state_dict(reference, optimizers[0])
        for cpu_offload in (False, True):
            options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
            actual = get_state_dict(model, optimizers[1], options=options)
            if cpu_offload and self.rank != 0:
                self.assertEqual(actual, ({}, {}))
                continue
            self.assertFalse(any(isinstance(leaf, DTensor) for leaf in tree_leaves(actual)))
            self.assertEqual(actual, expected)
        for name, value in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items():
            torch.testing.assert_close(value, full(model.state_dict()[name]), rtol=0, atol=0)

    def test_full_state_dicts_are_copies(self) -> None:
        """Also of what stays whole: the best state so far is kept in memory, and comes back after further steps."""
        mesh = self.gtp_mesh()
        model = make_sharded(0, mesh)
        optimizer = adamw(model)
        train(model, optimizer, [0], mesh)
        options = StateDictOptions(full_state_dict=True)
        best = get_state_dict(model, optimizer, options=options)
        expected = copy.deepcopy(best)
        train(model, optimizer, [1, 2], mesh)
        self.assertEqual(best, expected, rtol=0, atol=0)
        set_model_state_dict(model, best[0], options=options)
        self.assertEqual(get_model_state_dict(model, options=options), expected[0], rtol=0, atol=0)

    def test_full_state_dicts_keep_ties_and_leave_plain_models_alone(self) -> None:
        options = StateDictOptions(full_state_dict=True)
        model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 8))
        model[1].weight = model[0].weight
        plain = copy.deepcopy(model)
        gtp_shard(model, self.gtp_mesh())
        found = get_model_state_dict(model, options=options)
        self.assertEqual(found["0.weight"].data_ptr(), found["1.weight"].data_ptr())
        self.assertNotEqual(found["0.weight"].data_ptr(), model[0].weight.to_local().data_ptr())
        stock = get_model_state_dict(plain, options=options)
        self.assertEqual(stock["2.weight"].data_ptr(), plain[2].weight.data_ptr())

    def test_values_with_a_history_are_loaded(self) -> None:
        """As a plain module loads them."""
        reference, model = make(0), make_sharded(1, self.gtp_mesh())
        model.load_state_dict({name: value * 0.5 for name, value in reference.state_dict(keep_vars=True).items()})
        for name, param in model.named_parameters():
            torch.testing.assert_close(full(param), reference.get_parameter(name) * 0.5, rtol=0, atol=0)

    def test_r30_each_element_is_written_once_by_one_rank(self) -> None:
        for mesh in (self.hsdp_mesh(), self.gtp_mesh()):
            model = make_sharded(0, mesh)
            optimizer = adamw(model)
            planner = RecordingPlanner()
            state = job_state(model, optimizer)
            with shared_directory() as directory:
                dcp.save(state, checkpoint_id=directory, planner=planner)
                metadata = dcp.FileSystemReader(directory).read_metadata()
            writes = [planner.writes]
            dist.broadcast_object_list(writes)
            self.assertGreater(len(writes[0]), 30)
            self.assertEqual({key: n for key, n in writes[0].items() if n != 1}, {})
            for key, entry in metadata.state_dict_metadata.items():
                if isinstance(entry, dcp.metadata.TensorStorageMetadata):
                    covered = torch.zeros(entry.size)
                    for chunk in entry.chunks:
                        ends = [o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True)]
                        covered[tuple(slice(*ends) for ends in zip(chunk.offsets, ends, strict=True))] += 1
                    self.assertTrue((covered == 1).all(), msg=f"{key}: {entry.chunks}")
            # The ranks share the work: no rank writes everything.
            self.assertEqual(len(metadata.state_dict_metadata["model.norm.weight"].chunks), 1)
            self.assertEqual(len(metadata.state_dict_metadata["model.out.weight"].chunks), mesh.size(mesh.ndim - 1))

    # --- loading ------------------------------------------------------------------------------------------------------

    def loaders(self, source: Small, directory: Path, mesh: DeviceMesh) -> dict[str, Callable[[Small], Any]]:
        """Every way to bring the values of ``source`` (unsharded) into a sharded model."""
        whole = source.state_dict()
        sharded = make_sharded(7, mesh)
        set_model_state_dict(sharded, dict(whole), options=StateDictOptions(full_state_dict=True))
        shards = sharded.state_dict()
        if self.rank == 0:
            dcp.save({"model": whole}, checkpoint_id=directory, no_dist=True)
        dist.barrier()

        def dcp_load(model: Small) -> None:
            dcp.load({"model": model.state_dict()}, checkpoint_id=directory)

        return {
            "load_state_dict": lambda model: model.load_state_dict(shards),
            "assign": lambda model: model.load_state_dict({k: v.clone() for k, v in shards.items()}, assign=True),
            "dcp.load in place": dcp_load,
            "dcp.load of the module": lambda model: dcp.load({"model": model}, checkpoint_id=directory),
            "full": lambda model: set_model_state_dict(
                model, dict(whole), options=StateDictOptions(full_state_dict=True)
            ),
            "full from rank 0": lambda model: set_model_state_dict(
                model, dict(whole) if self.rank == 0 else {}, options=RANK0
            ),
            "sharded": lambda model: set_model_state_dict(model, dict(shards)),
        }

    def test_r13_a_load_counts_in_the_next_forward(self) -> None:
        mesh = self.gtp_mesh()
        source = make(1)
        tokens = tokens_of_step(0)

        def evaluate(model: nn.Module) -> torch.Tensor:
            with torch.no_grad():
                output: torch.Tensor = model(tokens)
            return output

        # What a model may hold gathered when the load comes.
        holders: dict[str, Callable[[GTPModule], Any]] = {
            "nothing": lambda model: None,
            "after eval": evaluate,
            "after a forward without backward": lambda model: model(tokens),
            "unsharded": lambda model: (model.unshard(), evaluate(model)),
            "being unsharded": lambda model: model.unshard(async_op=True),
        }
        expected = evaluate(source)
        with shared_directory() as directory:
            loaders = self.loaders(source, directory, mesh)
            for reshard in (True, False):
                model = make_sharded(0, mesh, reshard_after_forward=reshard)
                stale = {name: local(value).clone() for name, value in model.state_dict().items()}
                if reshard:
                    cases = product(["after eval"], loaders)
                else:
                    cases = product(holders, ["assign", "dcp.load in place", "full from rank 0"])
                for held, way in cases:
                    case = f"{way}, {held}, reshard_after_forward={reshard}"
                    model.reshard()
                    for name, value in model.state_dict().items():
                        local(value).copy_(stale[name])
                    self.assertFalse(torch.allclose(evaluate(model), expected), msg=case)
                    holders[held](model)
                    loaders[way](model)
                    torch.testing.assert_close(evaluate(model), expected, msg=lambda m, c=case: f"{c}: {m}")
                    torch.testing.assert_close(model(tokens), expected, msg=lambda m, c=case: f"{c}: {m}")

    def test_every_loader_fills_a_meta_model_that_then_trains(self) -> None:
        mesh = self.hsdp_mesh()
        with shared_directory() as directory:
            loaders = self.loaders(make(1), directory, mesh)
            for way in ("assign", "full from rank 0", "full", "dcp.load in place"):
                with torch.device("meta"):
                    model = Small()
                shard(model, mesh)
                self.assertTrue(all(param.is_meta for param in model.parameters()))
                if way == "dcp.load in place":
                    model.to_empty(device="cpu")
                model.scale = torch.empty(9)
                before = model.embedding._parameters["weight"]
                loaders[way](model)
                self.assertEqual(before is model.embedding._parameters["weight"], way == "dcp.load in place")
                reference = make(1)
                model.scale.copy_(reference.scale)
                assert_same_params(model, reference, rtol=0, atol=0)
                # At once: an optimizer that is built now must see one tied parameter, the one that trains.
                self.assertIs(model.head.__dict__["_parameters"]["weight"], model.embedding._parameters["weight"])
                self.assertEqual(len(list(model.parameters())), len(list(reference.parameters())))
                train(reference, adamw(reference), [0], None)
                train(model, adamw(model), [0], mesh)
                assert_same_params(model, reference)

    def test_assign_of_what_is_no_shard_is_refused_and_changes_nothing(self) -> None:
        mesh = self.gtp_mesh()
        model = make_sharded(0, mesh)
        params = dict(model.named_parameters())
        other = make_sharded(1, self.hsdp_mesh()).state_dict()
        with self.assertRaisesRegex(RuntimeError, r"'columns' was replaced after gtp_shard by a DTensor"):
            model.load_state_dict(other, assign=True)
        self.assertEqual(dict(model.named_parameters()).keys(), params.keys())
        for name, param in model.named_parameters():
            self.assertIs(param, params[name])
        assert_same_params(model, make(0), rtol=0, atol=0)

    def test_whole_tensors_are_loaded_without_communication(self) -> None:
        """Each rank takes its part of a plain checkpoint, copied or assigned, also into replicas and uneven shards."""
        for mesh, is_assigned in ((self.gtp_mesh(), False), (self.hsdp_mesh(), True)):
            model = make_sharded(0, mesh)
            with counted() as collectives:
                model.load_state_dict(make(1).state_dict(), assign=is_assigned)
            self.assertEqual(dict(collectives.counts), {})
            assert_same_params(model, make(1), rtol=0, atol=0)

    def test_strict_errors(self) -> None:
        mesh = self.gtp_mesh()
        model = make_sharded(0, mesh)
        state = model.state_dict()
        missing = {name: value for name, value in state.items() if name != "columns"}
        with self.assertRaisesRegex(RuntimeError, 'Missing key.*"columns"'):
            model.load_state_dict(missing)
        with self.assertRaisesRegex(RuntimeError, 'Unexpected key.*"extra"'):
            model.load_state_dict(state | {"extra": state["columns"]})
        self.assertEqual(model.load_state_dict(missing, strict=False).missing_keys, ["columns"])
        with self.assertRaisesRegex(RuntimeError, "size mismatch for columns"):
            model.load_state_dict(state | {"columns": state["linear.weight"]})
        whole = {name: value for name, value in make(1).state_dict().items() if name != "columns"}
        with self.assertRaisesRegex(RuntimeError, 'Missing key.*"columns"'):
            set_model_state_dict(model, whole if self.rank == 0 else {}, options=RANK0)
        with shared_directory() as directory:
            dcp.save({"model": missing}, checkpoint_id=directory)
            with self.assertRaisesRegex(dcp.CheckpointException, "Missing key in checkpoint state_dict: model.columns"):
                dcp.load({"model": model.state_dict()}, checkpoint_id=directory)

    # --- resuming -----------------------------------------------------------------------------------------------------

    def test_resumed_training_is_bit_equal_to_uninterrupted_training(self) -> None:
        cases: list[tuple[DeviceMesh, dict[str, Any]]] = [
            (self.gtp_mesh(), {"reshard_after_forward": False}),
            (self.hsdp_mesh(), {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
        ]
        for mesh, kwargs in cases:
            model, optimizer, scheduler = self.start(0, mesh, kwargs)
            with shared_directory() as directory:
                for step in range(3):
                    train(model, optimizer, [step], mesh)
                    scheduler.step()
                    if step == 1:
                        dcp.save(job_state(model, optimizer, scheduler), checkpoint_id=directory)
                resumed, resumed_optimizer, resumed_scheduler = self.start(5, mesh, kwargs)
                state = job_state(resumed, resumed_optimizer, resumed_scheduler)
                dcp.load(state, checkpoint_id=directory)
                set_job_state(resumed, resumed_optimizer, state)
                resumed_scheduler.load_state_dict(state["scheduler"])
            train(resumed, resumed_optimizer, [2], mesh)
            resumed_scheduler.step()
            expected = local_state(model, optimizer)
            self.assertEqual(local_state(resumed, resumed_optimizer), expected, rtol=0, atol=0)
            self.assertEqual(resumed_scheduler.get_last_lr(), scheduler.get_last_lr())
            self.assertGreater(len(expected), 30)

    def start(self, seed: int, mesh: DeviceMesh, kwargs: dict[str, Any]) -> tuple[Small, Any, Any]:
        model = make_sharded(seed, mesh, **kwargs)
        optimizer = adamw(model)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)

    def trained(self, mesh: DeviceMesh) -> tuple[Small, torch.optim.Optimizer, Any]:
        """After a step, and what it has left on this rank."""
        model = make_sharded(0, mesh)
        optimizer = adamw(model)
        train(model, optimizer, [0], mesh)
        return model, optimizer, local_state(model, optimizer)

    def test_optimizer_state_dicts_go_both_ways(self) -> None:
        """Full ones, from every rank and from rank 0, and flattened ones."""
        mesh = self.gtp_mesh()
        model, optimizer, expected = self.trained(mesh)
        whole, flat = StateDictOptions(full_state_dict=True), StateDictOptions(flatten_optimizer_state_dict=True)
        to_rank0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
        for save, load in ((whole, whole), (to_rank0, RANK0), (flat, flat)):
            model_state, optimizer_state = get_state_dict(model, optimizer, options=save)
            if save is flat:
                self.assertIsInstance(optimizer_state["state.columns.exp_avg"], DTensor)
            if load is RANK0 and self.rank != 0:
                model_state, optimizer_state = {}, {}
            other = make_sharded(5, mesh)
            other_optimizer = adamw(other, lr=0.5)
            # Not set_state_dict: with an empty model state dict, as on ranks other than 0, torch's loads no model.
            set_model_state_dict(other, model_state, options=load)
            set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=load)
            self.assertEqual(local_state(other, other_optimizer), expected, rtol=0, atol=0, msg=f"{load}")
            self.assertEqual(other_optimizer.param_groups[0]["lr"], 1e-2)

    def test_r15_async_save_stores_the_values_of_its_call(self) -> None:
        mesh = self.gtp_mesh()
        group = dist.new_group(backend="gloo")  # the saving thread talks while training does
        model, optimizer, expected = self.trained(mesh)
        with shared_directory() as directory, held_back_writes() as go:
            saved = dcp.async_save(job_state(model, optimizer), checkpoint_id=directory, process_group=group)
            train(model, optimizer, [1], mesh)
            with torch.no_grad():
                for param in model.parameters():
                    local(param).fill_(77)
            go.set()
            saved.result()
            load_job(model, optimizer, directory)
        self.assertEqual(local_state(model, optimizer), expected, rtol=0, atol=0)
        dist.destroy_process_group(group)

    # --- memory -------------------------------------------------------------------------------------------------------

    def test_r29_a_full_state_dict_load_needs_one_parameter_of_memory(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 256), *(nn.Linear(256, 96) for _ in range(5)))
        largest = 256 * 96 * 4  # bytes; six such weights
        whole = model.state_dict()
        gtp_shard(model, mesh)
        optimizer = adamw(model)
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        sharded = sum(local(param).nbytes for param in model.parameters())
        of_rank0: Any = (dict(whole), optimizer_state) if self.rank == 0 else ({}, {})
        with PeakBytes(1.1 * largest) as peak:
            set_model_state_dict(model, of_rank0[0], options=RANK0)
        self.assertGreaterEqual(peak.nbytes, 0 if self.rank == 0 else largest)  # the measurement sees the broadcast
        with PeakBytes(1.1 * largest):
            set_optimizer_state_dict(model, optimizer, of_rank0[1], options=RANK0)
        with shared_directory() as directory:
            if self.rank == 0:
                dcp.save({"model": whole}, checkpoint_id=directory, no_dist=True)
            dist.barrier()
            with PeakBytes(1.1 * largest):
                dcp.load({"model": model.state_dict()}, checkpoint_id=directory)
        # Without the broadcast torch makes the shards of all parameters before it loads the first.
        with PeakBytes(sharded + 0.1 * largest):
            set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True))
        # An optimizer that has no state yet takes a step on zero gradients first: state, gradients, one parameter.
        with PeakBytes(3 * sharded + 1.1 * largest):
            set_optimizer_state_dict(model, adamw(model), of_rank0[1], options=RANK0)
        # Ranks other than 0 hold one gathered parameter at a time, and a copy of it for a moment.
        kept = sum(value.nbytes for value in whole.values()) if self.rank == 0 else 0
        with PeakBytes(2.1 * largest + kept):
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
