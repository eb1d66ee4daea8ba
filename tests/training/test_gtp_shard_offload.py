"""``CPUOffloadPolicy``: shards and gradients on the host.

On a CPU "the device" is the host, too, but the copies are made alike: nothing computes with the memory of a shard, and
no gradient is the memory of a reduction. ``test_cuda_offload.py`` is the same on a GPU.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, check_training, fake_mesh, fused_on, rows_of_rank
from runtime_common import WIDTH, Calls, make_rows, members_of, runtime_of
from schedules import explicit
from test_gtp_shard_training import Tied, next_token_loss, token_batch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.testing._internal.common_utils import TestCase
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import capture_step, gtp_shard, quantize_, sharding_report
from dtensor_gtp._comm.streams import HostCopies
from dtensor_gtp._params.gradient import ReducedGradient

OFFLOAD = {"offload_policy": CPUOffloadPolicy()}


def twice(own: Any, x: torch.Tensor) -> torch.Tensor:
    x = own.first(x) + own.norm(own.first(x)) @ own.scale
    return checkpoint(lambda z: own.last(z), x, use_reentrant=False)


def make() -> Any:
    """Layers of which one is used twice, once again in backward; a norm; an attribute read."""
    layers = {"first": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH), "last": nn.Linear(WIDTH, WIDTH)}
    return Calls(twice, **layers, scale=torch.randn(WIDTH, WIDTH))


def storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class TestOffload(GlooTest):
    def test_same_bits_as_without(self) -> None:
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for mesh, options in (
            (self.gtp_mesh(), {}),
            (self.hsdp_mesh(), {"mp_policy": bf16}),
            (self.gtp_mesh(), {"reshard_after_forward": False, "schedule": explicit(0, min_shard_numel=0)}),
        ):
            model = make()
            options = {"schedule": ALL, **options}
            plain, offloaded = (gtp_shard(copy.deepcopy(model), mesh, **options, **more) for more in ({}, OFFLOAD))
            for step in range(2):
                optimizers = []
                for m in (plain, offloaded):
                    for microbatch in range(3):
                        m.set_requires_gradient_sync(microbatch != 0)
                        m(rows_of_rank(make_rows(3 * step + microbatch), mesh)).float().square().mean().backward()
                    nn.utils.clip_grad_norm_(m.parameters(), 0.5)
                    optimizers.append(torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused_on(mesh)))
                for value in (lambda param: param.grad, lambda param: param):
                    for pair in zip(offloaded.parameters(), plain.parameters(), strict=True):
                        torch.testing.assert_close(*(value(param).to_local() for param in pair), rtol=0, atol=0)
                    for optimizer in optimizers:
                        optimizer.step()
                plain.zero_grad()
                offloaded.zero_grad()

    def test_trains_as_one_process(self) -> None:
        """An embedding tied to a head, with lookups that might exchange tokens."""
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            model = check_training(
                Tied(), lambda m, on=mesh: gtp_shard(m, on, **OFFLOAD), mesh, token_batch, next_token_loss, steps=2
            )
            self.assertIn("on the host", str(sharding_report(model)))

    def test_copies_are_made(self) -> None:
        """A gather sends a copy of the shard, modules see a copy of a whole parameter, and a reduction is copied back;
        after a forward or backward the host has waited for all of it."""
        model = gtp_shard(make(), self.gtp_mesh(), schedule=ALL, **OFFLOAD)
        shards = storages(param.to_local() for param in model.parameters())
        sent, reduced, waits = [], [], []
        launch, to_host = runtime_of(model).comm.all_gather, ReducedGradient._to_host

        def all_gather(groups: Any, detail: str, outputs: Any, rows: Any, copies: Any = None, after: Any = None) -> Any:
            sent.extend([*outputs, *rows, *(copies[1] if copies else ())])
            return launch(groups, detail, outputs, rows, copies, after)

        def noting(gradient: ReducedGradient, value: torch.Tensor, offload: Any) -> torch.Tensor:
            reduced.append(value)
            return to_host(gradient, value, offload)

        with (
            mock.patch.object(runtime_of(model).comm, "all_gather", all_gather),
            mock.patch.object(ReducedGradient, "_to_host", noting),
            mock.patch.object(HostCopies, "finish_uploads", side_effect=lambda: waits.append("uploads")),
            mock.patch.object(HostCopies, "finish_on_host", side_effect=lambda: waits.append("gradients")),
        ):
            loss = model(make_rows(0)).sum()
            self.assertEqual(waits, ["uploads"])
            loss.backward()
            self.assertEqual(waits, ["uploads", "uploads", "gradients"])
        self.assertGreaterEqual(len(sent), 6)
        self.assertEqual(storages(sent) & shards, set())
        self.assertEqual(storages(param.leaf for param in members_of(model).whole) & shards, set())
        self.assertEqual(storages(reduced) & storages(param.grad.to_local() for param in model.parameters()), set())

    def test_writes_to_shards_count(self) -> None:
        """Of an optimizer, in place, and by ``data``; initialized on the meta device."""
        mesh, x = self.gtp_mesh(), make_rows(0)
        reference = make()
        with torch.device("meta"):
            model = make()
        gtp_shard(model, mesh, schedule=ALL, **OFFLOAD)
        with self.assertRaisesRegex(RuntimeError, r"to_empty\(device='cpu'\)"):
            model(x)
        model.to_empty(device="cpu")
        model.load_state_dict(reference.state_dict())
        for change in (
            lambda param: param.mul_(1.5),
            lambda param: setattr(param, "data", torch.full(param.shape, 0.25)),
            lambda param: param.data.mul_(0.5),
        ):
            for m in (reference, model):
                with torch.no_grad():
                    for param in m.parameters():
                        change(param)
            assert_same_params(model, reference)
            torch.testing.assert_close(model(x), reference(x))


class TestRefused(TestCase):
    def test_combinations(self) -> None:
        with fake_mesh(2, 2, names=("dp", "gtp")) as mesh:
            model = gtp_shard(nn.Sequential(nn.Linear(8, 8)), mesh["gtp"], schedule=ALL, **OFFLOAD)
            quantized, copies = quantize_(nn.Linear(32, 32), "mxfp8"), explicit(gather_backend="copy_engine")
            for message, call in (
                ("quantized shards stay on the device", lambda: self.shard(quantized, mesh)),
                ("an OffloadPolicy as offload_policy, but got bool", lambda: self.shard(nn.Linear(8, 8), mesh, True)),
                (r"which keeps parameter '0.weight' .* on the host", lambda: fully_shard(model, mesh=mesh["dp"])),
                ("capture_step does not support offload_policy", lambda: capture_step(lambda: None, model)),
            ):
                with self.assertRaisesRegex((TypeError, NotImplementedError), message):
                    call()
            self.assertIsNone(self.shard(nn.Linear(32, 32), mesh, OffloadPolicy())._params()[0].policies.offload)
            with mock.patch("dtensor_gtp.api.refuse_unavailable"):  # there is no GPU to ask
                other = gtp_shard(nn.Linear(32, 32), mesh["gtp"], schedule=copies, **OFFLOAD)
            with self.assertRaisesRegex(ValueError, "gather_backend='copy_engine'. with offload_policy"):
                other(torch.ones(1, 32))

    @staticmethod
    def shard(module: nn.Module, mesh: Any, policy: Any = OFFLOAD["offload_policy"]) -> Any:
        return gtp_shard(module, mesh["gtp"], offload_policy=policy)
