"""Who moves the bytes: the interface, agreement of the ranks, errors, and the copy engine's own order.

Without GPUs the copy engine runs on a file that all ranks map: its copies and barriers are the real ones, its streams
are the host.
"""

from __future__ import annotations

import copy
import ctypes
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, environment, full, rows_of_rank
from quant_common import Net as QuantNet
from quant_common import check, gtp
from runtime_common import (
    Net,
    assert_bit_equal,
    assert_idle,
    check_step,
    make_rows,
    make_tokens,
    members_of,
    num_gathers,
    shard_copy,
    small_model,
    square_loss,
    token_loss,
    token_step,
    train_record,
)
from schedules import explicit
from timing import come_late
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import GTPShard, MixedPrecisionPolicy, api, gtp_shard, quantize_, sharding_report
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm import collectives as backends
from dtensor_gtp._comm import copy_engine
from dtensor_gtp._comm.collectives import ProcessGroupBackend
from dtensor_gtp._comm.copy_engine import CopyEngine, PeerCopies
from dtensor_gtp._comm.send_ring import SendRing
from dtensor_gtp.policy import Schedule
from dtensor_gtp.quant import NVFP4, Float8Tensorwise


class ByBroadcast:
    """Gathers by one broadcast of each rank, as a class that a user passes."""

    num_gathers = 0

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group_name = group.group_name

    def all_gather(self, outputs: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
        type(self).num_gathers += 1
        group = dist.distributed_c10d._resolve_process_group(self.group_name)
        for output, shard in zip(outputs, shards, strict=True):
            parts = output.chunk(group.size())
            parts[group.rank()].copy_(shard)
            for rank, part in enumerate(parts):
                dist.broadcast(part, group=group, group_src=rank)


class Casts(ByBroadcast, CopyEngine):
    """Takes shards as they are."""

    num_passes = num_cast = 0

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        ByBroadcast.__init__(self, group, device)
        PeerCopies.__init__(self, group, device, nbytes=0)  # never has a stage

    def begin_pass(self) -> None:
        type(self).num_passes += 1

    def all_gather(
        self, outputs: list[torch.Tensor], shards: list[torch.Tensor], ready: torch.Event | None = None
    ) -> None:
        group = dist.distributed_c10d._resolve_process_group(self.group_name)
        own = [output.chunk(group.size())[group.rank()] for output in outputs]
        for target, shard in zip(own, shards, strict=True):
            type(self).num_cast += target.dtype != shard.dtype
            target[: shard.shape[0]].copy_(shard)
        super().all_gather(outputs, own)


class Once(Casts):
    """Leaves no memory for a second one."""

    num_made = 0

    def __init__(self, group: dist.ProcessGroup, device: torch.device, round_nbytes: int | None = None) -> None:
        super().__init__(group, device)
        type(self).num_made += 1
        if self.num_made > 1:
            raise RuntimeError("out of memory")


class FailsOnLastRank(ByBroadcast):
    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        if dist.get_rank() == dist.get_world_size() - 1:
            raise OSError("no such link")


class MappedFile:
    """Stands for ``SymmetricBuffer``: a file with the buffers of all ranks."""

    def __init__(self, nbytes: int, device: torch.device, group_name: str) -> None:
        self.nbytes = nbytes
        self.group = dist.distributed_c10d._resolve_process_group(group_name)
        path = [str(Path(tempfile.mkdtemp()) / "stages") if self.group.rank() == 0 else ""]
        dist.broadcast_object_list(path, group=self.group, group_src=0)
        size = nbytes * self.group.size()
        if self.group.rank() == 0:
            torch.from_file(path[0], shared=True, size=size, dtype=torch.uint8)
        dist.barrier(group=self.group)
        self.memory = torch.from_file(path[0], shared=True, size=size, dtype=torch.uint8)
        self.memory[self.group.rank() * nbytes :][:nbytes].fill_(0x7F)
        dist.barrier(group=self.group)
        if self.group.rank() == 0:
            Path(path[0]).unlink()

    def view(self, rank: int, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        begin = rank * self.nbytes + offset
        return self.memory[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def address(self, rank: int) -> int:
        return self.memory.data_ptr() + rank * self.nbytes

    def fetch(self, rows: Sequence[tuple[int, int]], fetches: Sequence[compat.Fetch]) -> None:
        for rank, row in rows:
            for offset, target, stride, nbytes in fetches:
                ctypes.memmove(target + row * stride, self.address(rank) + offset, nbytes)

    def barrier(self, turn: int) -> None:
        dist.barrier(group=self.group)


class OnFile(CopyEngine):
    """The copy engine with a late rank."""

    num_stages = 0

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        with mock.patch.object(copy_engine, "refuse_without_symmetric_memory"):
            super().__init__(group, device)

    def _allocate(self, nbytes: int) -> Any:
        type(self).num_stages += 1
        return MappedFile(nbytes, self._device, self._group_name)

    def _wait_on_host(self) -> None:
        pass

    def _peers(self) -> list[int]:
        if self.rank == 1:
            come_late(0.003)  # reads late: a stage that is filled too early shows
        return super()._peers()


class RingOnFile(SendRing):
    """A send ring with a late rank."""

    num_in_place = 0

    def __init__(self, group: dist.ProcessGroup, device: torch.device, enough_nbytes: int) -> None:
        with mock.patch.object(copy_engine, "refuse_without_symmetric_memory"):
            super().__init__(group, device, enough_nbytes)

    def _allocate(self, nbytes: int) -> Any:
        if getattr(self, "_last", None) is not None:
            self._last.memory.fill_(0x7F)  # is gone
        self._last = MappedFile(nbytes, self._device, self._group_name)
        return self._last

    def _wait_on_host(self) -> None:
        pass

    def offer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        offered = super().offer(shape, dtype)
        type(self).num_in_place += offered is not None
        return offered

    def _peers(self) -> list[int]:
        if self.rank == 1:
            come_late(0.001)
        return super()._peers()


class TestGatherBackends(GlooTest):
    def test_a_class_of_the_users(self) -> None:
        """Plain, uneven, replicated and quantized weights; the very bits of the process group."""
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            torch.manual_seed(0)
            reference = Net(num_pairs=1)
            before = ByBroadcast.num_gathers
            schedule = explicit(min_shard_numel=0, coalesce_nbytes=0, gather_backend=ByBroadcast)
            model = shard_copy(reference, mesh, schedule=schedule)
            for seed in range(2):
                check_step(reference, model, mesh, make_tokens(seed), token_step)
            self.assertEqual(ByBroadcast.num_gathers - before, sum(num_gathers(model).values()))
        torch.manual_seed(0)
        assert_idle(check(QuantNet(), NVFP4(), gtp(NVFP4(), mesh, schedule=schedule), mesh, steps=1))

    def test_a_backend_says_itself_that_it_casts(self) -> None:
        """It is given float32 shards for bf16 weights, and told of each pass."""
        mesh = self.gtp_mesh()
        records = []
        Casts.num_passes = Casts.num_cast = 0
        for backend in ("process_group", Casts):
            torch.manual_seed(0)
            schedule = explicit(min_shard_numel=0, gather_backend=backend)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            records.append(train_record(shard_copy(Net(num_pairs=1), mesh, schedule=schedule, mp_policy=policy), mesh))
        assert_bit_equal(records[1], records[0], "casts")
        self.assertGreater(Casts.num_cast, 10)
        self.assertGreater(Casts.num_passes, 3)

    def test_meshes_of_one_gather_group_share_a_backend(self) -> None:
        """As experts of each replica and layers that replicas have in common."""
        mesh = self.hsdp_mesh()
        torch.manual_seed(0)
        reference = small_model()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        records = []
        for first, second in ((mesh, mesh["gtp"]), (mesh["gtp"], mesh)):
            for asked in ("process_group", "auto", Once):
                Once.num_made = 0
                schedule = explicit(min_shard_numel=0, gather_backend=asked, reduce_scatter="ring")
                model = copy.deepcopy(reference)
                gtp_shard(model[0], first, schedule=schedule, mp_policy=policy)
                gtp_shard(model, second, schedule=schedule, mp_policy=policy)
                with mock.patch.object(backends, "CopyEngine", Once):
                    square_loss(model, make_rows(0)).backward()
                self.assertEqual(Once.num_made, int(asked != "process_group"))
                records.append([full(param.grad) for param in model.parameters()])
        for record in records[1:]:
            assert_bit_equal(record, records[0], "shared")

    def test_copy_engine_changes_no_bit(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        reference = Net(num_pairs=2)
        expected = train_record(shard_copy(reference, mesh), mesh)
        OnFile.num_stages = 0
        with environment(DTENSOR_GTP_DEBUG="poison,delay=5"):
            schedule = explicit(min_shard_numel=0, gather_backend=OnFile)
            actual = train_record(shard_copy(reference, mesh, schedule=schedule), mesh)
        assert_bit_equal(actual, expected, "copy engine")
        self.assertIn(OnFile.num_stages, (2, 3))  # the first, and what grew
        torch.manual_seed(0)
        model = check(QuantNet(), NVFP4(), gtp(NVFP4(), mesh, schedule=schedule), mesh, steps=1)
        assert_idle(model)

    def test_planes_of_native_weights_follow_what_is_written(self) -> None:
        """Without a trace, while gradients wait: they are sent as they are, with nothing made of them."""
        mesh, x = self.gtp_mesh(), torch.randn(8, 32)
        torch.manual_seed(0)
        schedule = explicit(min_shard_numel=0, gather_backend=OnFile)
        model = quantize_(nn.Sequential(nn.Linear(32, 32, bias=False)), Float8Tensorwise(), storage="native")
        gtp_shard(model, mesh, schedule=schedule)
        for _ in range(2):
            model(x).sum().backward()
        self.assertTrue(model(x).any())
        for plane in model[0].weight.to_local().quantized.planes:
            plane.view(torch.uint8).data.zero_()
        self.assertFalse(model(x).any())

    def test_gradients_in_the_send_ring_have_the_bits_of_an_all_to_all(self) -> None:
        """In groups and alone, in rings that grow and turn round, with microbatches; uneven shards and dim 1 among
        them. One rank reads late: a place that is written too early shows."""
        reference = Net(num_pairs=2)

        def two_microbatches(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
            token_step(model, tokens.flip(0))
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
            return token_loss(model, tokens)

        def record(step: Any, kind: str, **options: Any) -> list[torch.Tensor]:
            with (
                environment(DTENSOR_GTP_DEBUG="poison"),
                mock.patch.object(api, "refuse_unavailable"),
                mock.patch.object(backends, "SendRing", RingOnFile),
            ):
                model = shard_copy(
                    reference,
                    self.gtp_mesh(),
                    schedule=explicit(min_shard_numel=0, reduce_scatter=kind, **options),
                    mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
                    shard_placement_fn=lambda p: GTPShard(1) if p.ndim == 2 and p.shape[0] % 3 == 0 else None,
                )
                return train_record(model, self.gtp_mesh(), step)

        alone = {"coalesce_grad_nbytes": 0, "max_inflight_reduce_scatters": 1}
        in_groups = {"coalesce_grad_nbytes": 2048, "max_inflight_reduce_scatters": 4, "wgrad_first": False}
        for step, choices in ((token_loss, (alone, in_groups, {})), (two_microbatches, (alone, in_groups))):
            expected = record(step, "all_to_all")
            for options in choices:
                RingOnFile.num_in_place = 0
                assert_bit_equal(record(step, "copy_engine", **options), expected, f"{step.__name__} {options}")
                if step is token_loss:  # the other one adds to gradients that were made before
                    self.assertGreater(RingOnFile.num_in_place, 5)

    def test_r26_a_rank_that_cannot_have_it_fails_all(self) -> None:
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            schedule = explicit(min_shard_numel=0, gather_backend=FailsOnLastRank)
            model = gtp_shard(small_model(), mesh, schedule=schedule)
            for _ in range(2):
                with self.assertRaisesRegex(
                    RuntimeError, r"FailsOnLastRank is not available .*rank 3: OSError: no such link"
                ):
                    model(torch.ones(2, 12))

    def test_what_gloo_cannot_have_is_refused_by_name(self) -> None:
        for field in ("gather_backend", "reduce_scatter"):
            with self.assertRaisesRegex(ValueError, rf"\({field}='copy_engine'\), but got one of 'cpu'"):
                gtp_shard(small_model(), self.gtp_mesh(), schedule=explicit(**{field: "copy_engine"}))
        ring = "^the send ring of reduce_scatter='copy_engine' is not available .*rank 0: .* no copy engines"
        with self.assertRaisesRegex(RuntimeError, ring):
            schedule = Schedule(reduce_scatter="copy_engine")
            backends.choose_reduce_scatter(schedule, [self.gtp_mesh().get_group()], torch.device("cpu"), "auto")

    def test_automatic_choice_is_the_same_on_all_ranks_and_told(self) -> None:
        """Copy engines where all ranks of the mesh have them, else the process group."""
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            groups = [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]
            for engine, name in ((OnFile, "copy_engine"), (FailsOnLastRank, "process_group")):
                with mock.patch.object(
                    backends, "CopyEngine", lambda *args, engine=engine, round_nbytes: engine(*args)
                ):
                    backend, name_chosen, why = backends.choose_gather_backend(
                        Schedule(gather_backend="auto"), groups, torch.device("cpu")
                    )
                self.assertEqual(name_chosen, name)
                self.assertIsInstance(backend, engine if name == "copy_engine" else ProcessGroupBackend)
                self.assertEqual("rank 3: OSError: no such link" in why, name == "process_group")
        model = shard_copy(small_model(), self.gtp_mesh(), schedule=explicit(gather_backend="auto"))
        with self.assertLogs("dtensor_gtp", "INFO") as logs:
            model(torch.ones(2, 12))
        told, *_ = sharding_report(model).gather_backends
        self.assertRegex(told, r"gather backend on gtp=4: process_group \(.*a cpu device has no copy engines")
        self.assertIn(told, "\n".join(logs.output))
        self.assertIn(told, " ".join(str(sharding_report(model)).split()))

    def test_groups_of_gloo_have_one_thread(self) -> None:
        """Two threads of torch's groups race. A mesh on a group that the user has made gets another one beside it."""
        with mock.patch.object(distributed_c10d, "ProcessGroupGloo", dist.ProcessGroupGloo):
            stock = dist.new_group(list(range(self.world_size)), group_desc="two threads")
        assert isinstance(stock, dist.ProcessGroup)
        self.assertTrue(compat.has_racing_threads(stock))
        mesh = DeviceMesh.from_group(stock, "cpu", mesh_dim_names=("gtp",))
        reference, x = small_model(), make_rows(0)
        models = [shard_copy(reference, mesh) for _ in range(2)]
        square_loss(reference, x).backward()
        for model in models:
            square_loss(model, rows_of_rank(x, mesh)).backward()
            assert_same_params(model, reference, "grad")
        names = {(name.gather_name, name.scatter_name) for name in (members_of(m).weights[0].groups for m in models)}
        self.assertEqual(len(names), 1)
        for name in next(iter(names)):
            self.assertFalse(compat.has_racing_threads(compat.resolve_group(name)))

    def test_ranks_on_several_hosts_are_refused(self) -> None:
        group = self.gtp_mesh().get_group()
        with self.assertRaisesRegex(RuntimeError, "a cpu device has no copy engines"):
            copy_engine.refuse_without_symmetric_memory(group, torch.device("cpu"))
        host = "b" if self.rank == 3 else "a"
        with (
            mock.patch.object(compat, "symmetric_memory_backend", return_value="CUDA"),
            mock.patch.object(copy_engine, "host_name", return_value=host),
            self.assertRaisesRegex(RuntimeError, r"the ranks span hosts \['a', 'b'\]"),
        ):
            copy_engine.refuse_without_symmetric_memory(group, torch.device("cuda"))

    def test_inner_backend_of_a_nested_call_does_not_count(self) -> None:
        """As all of the schedule: that of the outermost call."""
        model = small_model()
        gtp_shard(model[0], self.gtp_mesh(), schedule=explicit(min_shard_numel=0, gather_backend=FailsOnLastRank))
        gtp_shard(model, self.gtp_mesh(), schedule=ALL)
        self.assertTrue(full(model(torch.ones(2, 12))).isfinite().all())
