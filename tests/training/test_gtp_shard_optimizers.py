"""Stock optimizers, gradient clipping, loss scaling and schedules on sharded parameters.

The reference is one process on the concatenated batch. Rows are not divisible by the ranks anywhere: padding that got
into an optimizer would show in the norms and the updates (R7).
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from checkpoint_common import local, make, make_sharded, shard, tokens_of_step, train
from common import ALL, GlooTest, assert_same_params, check_training, fake_mesh, full, rows_of_rank
from runtime_common import counted
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from dtensor_gtp import GTPShard, gtp_shard
from dtensor_gtp.optim import Muon

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD momentum, foreach": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "AdamW for-loop": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True, amsgrad=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "Adagrad fused": lambda params: torch.optim.Adagrad(params, lr=1e-2, fused=True),
    "RMSprop foreach": lambda params: torch.optim.RMSprop(params, lr=1e-2, foreach=True),
}


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def batch_of(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 11, (8, 5), generator=generator)


def backward(model: nn.Module, mesh: DeviceMesh | None, step: int = 0, scale: float = 1.0) -> None:
    tokens = tokens_of_step(step) if mesh is None else rows_of_rank(tokens_of_step(step), mesh)
    (loss_of(model, tokens) * scale).backward()


def with_gradients(mesh: DeviceMesh) -> tuple[Any, Any]:
    model, reference = make_sharded(0, mesh), make(0)
    backward(model, mesh)
    backward(reference, None)
    return model, reference


def fp64_norm(grads: Iterable[torch.Tensor], order: float = 2.0) -> float:
    return torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]), order).item()


class TestOptimizers(GlooTest):
    def test_r7_r9_updates_equal_those_of_one_process(self) -> None:
        """R8: every row of the vocabulary is updated. State is placed as its parameter."""
        # Adam's first steps are lr * sign(gradient): where a gradient is rounding noise, so is the update.
        for name, make_optimizer in OPTIMIZERS.items():
            for mesh in (self.gtp_mesh(), self.hsdp_mesh()) if name == "AdamW fused" else (self.gtp_mesh(),):
                made: list[torch.optim.Optimizer] = []

                def make_and_keep(params: Any, make: Any = make_optimizer, made: Any = made) -> torch.optim.Optimizer:
                    made.append(make(params))
                    return made[-1]

                model = check_training(
                    make(0), lambda m, mesh=mesh: shard(m, mesh), mesh, batch_of, loss_of, steps=2,
                    make_optimizer=make_and_keep, tolerance={"rtol": 1e-4, "atol": 1e-5},
                )  # fmt: skip
                self.assertFalse(any(param.grad is not None for param in model.parameters()), msg=name)
                for param, state in made[1].state.items():
                    for key, value in state.items():
                        if key != "step" and value is not None:
                            self.assertIsInstance(value, DTensor, msg=f"{name} {key}")
                            self.assertEqual(value.placements, param.placements, msg=f"{name} {key}")
                            self.assertEqual(value.to_local().shape, param.to_local().shape, msg=f"{name} {key}")
                            self.assertEqual(value.dtype, param.dtype)
                # 11 = 4 * 3 - 1 rows, tied with the head
                changed = (model.embedding._parameters["weight"].full_tensor() != make(0).embedding.weight).any(dim=1)
                self.assertTrue(changed.all(), msg=f"{name}: {changed}")

    def test_lr_schedule_and_weight_average(self) -> None:
        """Parameters are averaged as the tensors they are."""
        mesh = self.gtp_mesh()
        model, reference = make_sharded(0, mesh), make(0)
        averages: list[list[torch.Tensor]] = []
        for trained, on in ((model, mesh), (reference, None)):
            optimizer = torch.optim.AdamW(trained.parameters(), lr=torch.tensor(1e-2), fused=True)
            warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
            scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])
            average = [param.detach().clone() for param in trained.parameters()]
            for step in range(3):
                train(trained, optimizer, [step], on)
                scheduler.step()
                torch._foreach_lerp_(average, [param.detach() for param in trained.parameters()], 0.25)
            averages.append(average)
        assert_same_params(model, reference)
        for actual, expected in zip(*averages, strict=True):
            torch.testing.assert_close(full(actual), expected)

    def test_r10_clip_grad_norm(self) -> None:
        # One of four ranks has a shard without rows, which have no maximum.
        one, two = self.gtp_mesh(), self.hsdp_mesh()
        for foreach, mesh, order in (
            (True, one, 2.0),
            (True, two, 2.0),
            (True, one, math.inf),
            (True, two, 1.0),
            (None, one, 2.0),
            (False, two, math.inf),
        ):
            model, reference = with_gradients(mesh)
            expected = fp64_norm([param.grad for param in reference.parameters()], order)
            for clipped in (reference, model):
                norm = nn.utils.clip_grad_norm_(clipped.parameters(), expected / 3, order, foreach=foreach)
                self.assertEqual(full(norm).item(), expected, rtol=1e-5, atol=0)
            assert_same_params(model, reference, "grad")
            total = fp64_norm([full(param.grad) for param in model.parameters()], order)
            self.assertEqual(total, expected / 3, rtol=1e-4, atol=0)
            for clipped in (reference, model):
                torch.optim.SGD(clipped.parameters(), lr=0.5).step()
            assert_same_params(model, reference)

    def test_clip_grad_norm_of_nonfinite_gradients_raises_on_all_ranks(self) -> None:
        for value in (float("inf"), float("nan")):
            model, _ = with_gradients(self.gtp_mesh())
            if self.rank == 2:
                local(model.get_parameter("columns").grad)[0, 0] = value
            with self.assertRaisesRegex(RuntimeError, "non-finite"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    def test_clip_grad_value(self) -> None:
        for foreach in (True, False):
            model, reference = with_gradients(self.gtp_mesh())
            for clipped in (reference, model):
                nn.utils.clip_grad_value_(clipped.parameters(), 0.01, foreach=foreach)
            assert_same_params(model, reference, "grad")
            self.assertEqual(max(full(p.grad).abs().max().item() for p in model.parameters()), 0.01, rtol=1e-6, atol=0)

    def test_grad_scaler_skips_a_step_on_all_ranks_or_on_none(self) -> None:
        for fused, mesh, name in (
            (True, self.hsdp_mesh(), "norm.weight"),
            (True, self.hsdp_mesh(), "columns"),
            (False, self.gtp_mesh(), "linear.weight"),
        ):
            model, reference = make_sharded(0, mesh), make(0)
            # A whole parameter first: its placement says nothing of the others'.
            optimizer = torch.optim.AdamW(reversed(list(model.parameters())), lr=1e-2, fused=fused)
            self.assertEqual(optimizer.param_groups[0]["params"][0].placements[-1], Replicate())
            expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
            for step in range(4):
                scaler.scale(torch.ones(()))
                backward(model, mesh, step, scaler.get_scale())
                if step == 1:
                    grad = local(model.get_parameter(name).grad)
                    # In one shard and its replicas, or for a whole parameter on all ranks.
                    if mesh.get_local_rank("gtp") == 1 or name == "norm.weight":
                        grad.view(-1)[-1] = float("inf")
                else:
                    backward(reference, None, step)
                    expected.step()
                    expected.zero_grad()
                before = [local(param).clone() for param in model.parameters()]
                if step == 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                has_moved = [not torch.equal(local(p), b) for p, b in zip(model.parameters(), before, strict=True)]
                self.assertEqual(any(has_moved), step != 1, msg=f"{name} {fused}")
                self.assertEqual(scaler.get_scale(), [64.0, 32.0, 32.0, 64.0][step])
            assert_same_params(model, reference, rtol=1e-4, atol=1e-5)

    def matrices(self) -> dict[str, tuple[torch.Size, GTPShard | Replicate]]:
        return {
            "tall": (torch.Size((37, 24)), GTPShard(0)),
            "wide": (torch.Size((13, 30)), GTPShard(0)),
            "columns": (torch.Size((18, 21)), GTPShard(1)),
            "blocks": (torch.Size((26, 22)), GTPShard(0, block_size=4)),
            "blocks of columns": (torch.Size((12, 26)), GTPShard(1, block_size=3)),
            "three rows": (torch.Size((3, 16)), GTPShard(0)),
            "whole": (torch.Size((11, 9)), Replicate()),
        }

    def run_muon(
        self, cls: type[torch.optim.Muon], mesh: DeviceMesh | None, names: list[str] | None = None, **kwargs: Any
    ) -> Any:
        """Two steps on given gradients; returns the parameters and the optimizer."""
        torch.manual_seed(0)
        params = []
        for shape, placement in (self.matrices()[name] for name in names or self.matrices()):
            placements = [] if mesh is None else [Replicate()] * (mesh.ndim - 1) + [placement]
            value = torch.randn(shape)
            params.append(nn.Parameter(value if mesh is None else distribute_tensor(value, mesh, placements)))
        optimizer = cls(params, lr=0.05, **kwargs)
        for _ in range(2):
            for param in params:
                grad = torch.randn(param.shape)
                param.grad = distribute_tensor(grad, mesh, param.placements) if isinstance(param, DTensor) else grad
            optimizer.step()
        return params, optimizer

    def test_r7_muon_has_the_bits_of_one_process(self) -> None:
        for kwargs in ({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "ns_steps": 3}):
            expected, _ = self.run_muon(torch.optim.Muon, None, **kwargs)
            one_rank = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "gtp"))
            for mesh in (None, self.gtp_mesh(), self.hsdp_mesh(), one_rank) if not kwargs else (self.hsdp_mesh(),):
                actual, optimizer = self.run_muon(Muon, mesh, **kwargs)
                for name, param, want in zip(self.matrices(), actual, expected, strict=True):
                    self.assertEqual(full(param), want, rtol=0, atol=0, msg=f"{name} {mesh}")
                    if isinstance(param, DTensor):
                        self.assertEqual(optimizer.state[param]["momentum_buffer"].placements, param.placements)

    @pytest.mark.long
    def test_r7_torch_muon_is_right_up_to_the_order_of_bf16_sums(self) -> None:
        """DTensor runs the same iteration with every product sharded, if there are as many rows as ranks."""
        names = [name for name in self.matrices() if name != "three rows"]
        expected, _ = self.run_muon(torch.optim.Muon, None, names)
        actual, _ = self.run_muon(torch.optim.Muon, self.gtp_mesh(), names)
        for name, param, want in zip(names, actual, expected, strict=True):
            error = (full(param) - want).norm() / want.norm()
            self.assertLess(error.item(), 2e-3, msg=name)

    def test_muon_exchanges_shards_twice_for_as_many_matrices_as_ranks(self) -> None:
        params = [nn.Parameter(distribute_tensor(torch.randn(7, 6), self.gtp_mesh(), [GTPShard(0)])) for _ in range(6)]
        optimizer = Muon(params)
        for param in params:
            param.grad = torch.ones_like(param)
        with counted() as collectives:
            optimizer.step()
        self.assertEqual(dict(collectives.counts), {"alltoall_base_": 4})  # six matrices on four ranks: two rounds
        self.assertEqual(collectives.dtypes["alltoall_base_"], {torch.bfloat16})

    def test_muon_on_matrices_that_several_axes_shard(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "gtp"))
        torch.manual_seed(0)
        value, grad = torch.randn(11, 10), torch.randn(11, 10)
        for placements in ((Shard(0), GTPShard(0)), (Shard(1), GTPShard(0, block_size=2)), (Replicate(), Shard(1))):
            want, param = nn.Parameter(value.clone()), nn.Parameter(distribute_tensor(value, mesh, placements))
            want.grad, param.grad = grad, distribute_tensor(grad, mesh, placements)
            torch.optim.Muon([want], lr=0.1).step()
            Muon([param], lr=0.1).step()
            self.assertEqual(param.full_tensor(), want.detach(), rtol=0, atol=0, msg=f"{placements}")

    def test_muon_trains_and_its_state_is_that_of_torch_muon(self) -> None:
        reference = nn.Sequential(nn.Linear(9, 14, bias=False), nn.Linear(14, 6, bias=False))
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        optimizer, expected = Muon(model.parameters(), lr=0.05), torch.optim.Muon(reference.parameters(), lr=0.05)
        for step in range(3):
            x = torch.randn(64, 9, generator=torch.Generator().manual_seed(step))
            reference(x).square().mean().backward()
            model(rows_of_rank(x, self.gtp_mesh())).square().mean().backward()
            assert_same_params(model, reference, "grad", rtol=1e-3, atol=1e-4)
            for each in (optimizer, expected):
                each.step()
                each.zero_grad()
        assert_same_params(model, reference, rtol=0, atol=5e-3)  # bfloat16 rounds 1e-8 of a gradient to 1e-2 at times
        options = StateDictOptions(full_state_dict=True)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        plain = nn.Sequential(nn.Linear(9, 14, bias=False), nn.Linear(14, 6, bias=False))
        plain_optimizer = torch.optim.Muon(plain.parameters(), lr=1.0)
        set_state_dict(plain, plain_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        self.assertEqual(plain_optimizer.param_groups[0]["lr"], 0.05)
        for param, sharded in zip(plain.parameters(), model.parameters(), strict=True):
            buffer = plain_optimizer.state[param]["momentum_buffer"]
            self.assertEqual(buffer, full(optimizer.state[sharded]["momentum_buffer"]), rtol=0, atol=0)

    def test_muon_refuses_what_is_no_matrix(self) -> None:
        model = make_sharded(0, self.gtp_mesh())
        with self.assertRaisesRegex(ValueError, "Muon only supports 2D parameters"):
            Muon(model.parameters())


def test_a_model_that_is_collected_during_a_step_does_not_break_it() -> None:
    """torch goes through its hooks one by one: none of ours may leave the list because its model has died."""
    with fake_mesh(4) as mesh:
        kept = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([kept], lr=1.0)
        kept.grad = torch.ones(1)
        handle = register_optimizer_step_post_hook(lambda *unused: gc.collect())
        gc.disable()
        try:
            for _ in range(3):
                gtp_shard(nn.Linear(8, 8), mesh, schedule=ALL)
            optimizer.step()
        finally:
            gc.enable()
            handle.remove()
        assert kept.item() == 0
