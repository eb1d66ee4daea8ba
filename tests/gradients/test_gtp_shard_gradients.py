"""Gradients: their scale on every mesh, their dtype, who gets one, and what it is."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, GlooTest, full
from runtime_common import (
    WIDTH,
    Net,
    Raw,
    assert_idle,
    check_step,
    counted,
    make_rows,
    make_tokens,
    members_of,
    shard_copy,
    square_step,
    token_loss,
    token_step,
)
from schedules import changed, explicit
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard

ALL_TO_ALL = explicit(min_shard_numel=0, reduce_scatter="all_to_all")
WHOLE_WORLD = ((1, 4), (2, 2), (4, 1))


class Ones(nn.Module):
    """The derivative of the output is the number of tokens, 8 times ``repeats``, for every element of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.linear = nn.Linear(6, 5)
        self.raw = nn.Parameter(torch.randn(7, 3))
        self.vector = nn.Parameter(torch.randn(9))

    def forward(self, repeats: int) -> torch.Tensor:
        tokens = torch.arange(8).repeat(repeats)
        total = 8 * self.embedding(tokens).sum() + self.linear(torch.ones(len(tokens), 6)).sum()
        return total + len(tokens) * (self.raw.sum() + self.vector.sum())


class Scaled(nn.Module):
    """Multiplies its weights by a number: their gradient is that number everywhere."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, dtype=dtype)
        self.linear = nn.Linear(3, 6, dtype=dtype)
        self.raw = nn.Parameter(torch.randn(5, 2, dtype=dtype))
        self.vector = nn.Parameter(torch.randn(3, dtype=dtype))

    def forward(self, scale: float) -> torch.Tensor:
        x = torch.full((1, 3), scale, dtype=self.vector.dtype)
        raw: torch.Tensor = (self.raw * scale).sum() + (self.vector * scale).sum()
        # The bias has a gradient of one: scale the sum, not the input, for it.
        return raw + (self.embedding(torch.arange(7)) * scale).sum() + self.linear(x / scale).sum() * scale


class DenseAndExpert(Ones):
    def __init__(self) -> None:
        super().__init__()
        self.expert = Ones()

    def forward(self, repeats: int) -> torch.Tensor:
        return super().forward(repeats) + self.expert(repeats)


@functools.cache
def sub_mesh(replicate: int, gtp: int) -> DeviceMesh:
    """A (replicate, gtp) mesh over part of the world; the other ranks form meshes of their own."""
    rest = dist.get_world_size() // (replicate * gtp)
    root = init_device_mesh("cpu", (rest, replicate, gtp), mesh_dim_names=("rest", "replicate", "gtp"))
    return root["replicate", "gtp"]


def assert_grads_are(model: nn.Module, value: float, what: str = "") -> None:
    for name, param in model.named_parameters():
        assert param.grad is not None, f"{what}: {name} has no gradient"
        grad = full(param.grad)
        assert grad.eq(value).all(), f"{what}: the gradient of {name} is {grad.unique().tolist()}, not {value}"


class TestGradients(GlooTest):
    def check_ones(self, model: Any, num_ranks: int, what: str) -> None:
        """All-ones gradients for a mean loss and for one that is a sum over tokens, in two microbatches each."""
        num_tokens = 8 * 2 * 2
        for factor, divisor in ((None, num_tokens), (float(num_tokens * num_ranks), 1)):
            if factor is not None:
                model.set_gradient_divide_factor(factor)
            for _ in range(2):
                (model(2) / divisor).backward()
            assert_grads_are(model, 1.0, f"{what}, divide factor {factor}")
            model.zero_grad()
        assert_idle(model)

    def test_r1_all_ones_gradient_on_every_mesh(self) -> None:
        """Reductions in float16 divide before and after the sum, because the sum of many ranks overflows."""
        meshes = [sub_mesh(*shape) for shape in ((1, 1), (2, 1), *WHOLE_WORLD)]
        float16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)
        for mesh in (*meshes, sub_mesh(1, 2)["gtp"], sub_mesh(1, 4)["gtp"]):
            for policy in (MixedPrecisionPolicy(), float16):
                model = gtp_shard(Ones(), mesh, schedule=ALL, mp_policy=policy)
                (model(2) / 16).backward()
                norm = full(nn.utils.clip_grad_norm_(model.parameters(), math.inf))
                numel = sum(param.numel() for param in model.parameters())
                torch.testing.assert_close(norm.item(), numel**0.5, rtol=1e-6, atol=0)
                model.zero_grad()
                self.check_ones(model, mesh.size(), f"{mesh}, {policy}")
            if mesh.size() == 4:
                for schedule in (ALL, changed(ALL, coalesce_grad_nbytes=0)):
                    model = gtp_shard(Scaled(), mesh, schedule=schedule, mp_policy=float16)
                    model(2.0**14).backward()  # the sum over four ranks is 2**16, beyond float16
                    assert_grads_are(model, 2.0**14, f"{mesh}, {schedule}")

    def test_r1_all_ones_gradient_with_a_mesh_of_its_own_for_the_expert(self) -> None:
        for dense, expert in zip(WHOLE_WORLD, reversed(WHOLE_WORLD), strict=True):
            model = DenseAndExpert()
            gtp_shard(model.expert, sub_mesh(*expert), schedule=ALL)
            gtp_shard(model, sub_mesh(*dense), schedule=ALL)
            assert model.expert.raw.device_mesh.shape == expert
            assert model.raw.device_mesh.shape == dense
            self.check_ones(model, 4, f"dense {dense}, expert {expert}")

    def test_r20_rank_distinct_gradients_are_averaged_through_every_gather(self) -> None:
        """Fused ops, attributes, whole parameters and weights that are read while unsharded: none only slices."""
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            model = gtp_shard(Scaled(), mesh, schedule=ALL)
            model(2.0**self.rank).backward()
            assert_grads_are(model, (1 + 2 + 4 + 8) / 4)
            model.zero_grad()
            model(1.0)  # makes the communicators
            model.unshard()
            sharded = [model.embedding.weight, model.linear.weight, model.raw]
            assert not any(isinstance(weight, DTensor) for weight in sharded)
            (sum(weight.sum() for weight in sharded) * 2.0**self.rank).backward()
            params = dict(model.named_parameters())
            for name in ("embedding.weight", "linear.weight", "raw"):
                assert full(params[name].grad).eq(15 / 4).all(), name
            model.reshard()
            assert_idle(model)

    def test_one_gradient_tensor_for_several_weights(self) -> None:
        """A sum hands the very same gradient to all its inputs: reducing one must not change what the others get."""

        class Sum(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weights = nn.ParameterList([torch.randn(8, 4) for _ in range(3)])
                self.vector = nn.Parameter(torch.randn(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                a, b, c = self.weights
                return x * (a + b + c + self.vector)

        for mesh in (self.gtp_mesh(), self.hsdp_mesh(), sub_mesh(1, 1)):
            reference = Sum()
            model = shard_copy(reference, mesh)
            num = mesh.size()
            x = make_rows(0, 8 * num, 4).view(num, 8, 4)
            check_step(reference, model, mesh, x, lambda m, x: [square_step(m, x) for _ in range(2)])
            # float16 is divided before the sum, in place.
            model = gtp_shard(Sum().half(), mesh, schedule=ALL)
            for num_backwards in (1, 2):
                model(torch.ones(8, 4, dtype=torch.float16)).sum().backward()
                for name in ("weights.0", "weights.1", "weights.2"):
                    grad = full(dict(model.named_parameters())[name].grad)
                    assert grad.eq(num_backwards).all(), f"{name}: {grad.unique().tolist()}"

    def test_fp32_reduction_of_bf16_compute_is_exact(self) -> None:
        """What one rank adds is below the bf16 resolution of what another adds."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        scale = 1.0 if self.rank == 0 else 2.0**-12
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            for is_synced in (True, False):
                model = gtp_shard(Scaled(), mesh, schedule=ALL, mp_policy=policy)
                with counted() as counts:
                    model.set_requires_gradient_sync(is_synced)
                    model(scale).backward()
                    model.set_requires_gradient_sync(True)
                    model(2.0**-13).backward()
                    assert counts().reduce_scatters == (6 if is_synced else 3)
                assert all(param.grad.dtype == torch.float32 for param in model.parameters())
                assert_grads_are(model, (1 + 3 * 2.0**-12) / 4 + 2.0**-13, f"synced {is_synced}")

    def test_bf16_parameters_sum_microbatches_in_fp32(self) -> None:
        """Four times 2**-9 are lost one by one on top of a bf16 one, but not together; where ranks add what travels in
        bf16, too, and where nothing is sent. zero_grad may keep tensors."""
        wide, alone = MixedPrecisionPolicy(reduce_dtype=torch.float32), sub_mesh(1, 1)
        for mesh, schedule, policy, is_synced in (
            (self.gtp_mesh(), ALL, wide, True),
            (self.gtp_mesh(), ALL, wide, False),
            (self.gtp_mesh(), ALL_TO_ALL, MixedPrecisionPolicy(), True),
            (alone["gtp"], ALL_TO_ALL, MixedPrecisionPolicy(), True),
        ):
            model = gtp_shard(Scaled(torch.bfloat16), mesh, schedule=schedule, mp_policy=policy)
            for _ in range(2):
                for index, scale in enumerate((1.0, 2.0**-9, 2.0**-9, 2.0**-9, 2.0**-9)):
                    model.set_requires_gradient_sync(is_synced or index == 4)
                    model(scale).backward()
                assert all(param.grad.dtype == torch.bfloat16 for param in model.parameters())
                assert_grads_are(model, 1 + 2.0**-7, f"synced {is_synced}, {mesh}")
                model.zero_grad(set_to_none=not is_synced)

    def test_r27_reduction_keeps_its_dtype(self) -> None:
        """On the wire: the dtype of the policy, else that of compute; also for frozen neighbours of another dtype."""
        bf16, fp32 = torch.bfloat16, torch.float32
        for own, param_dtype, reduce_dtype, wire in (
            (fp32, None, None, fp32),
            (bf16, None, None, bf16),
            (bf16, None, fp32, fp32),
            (fp32, bf16, None, bf16),
            (fp32, bf16, fp32, fp32),
        ):
            model = Scaled(own)
            model.frozen = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64), requires_grad=False)
            policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
            gtp_shard(model, self.gtp_mesh(), schedule=ALL, mp_policy=policy)
            with counted() as counts:
                model(1.0).backward()
            assert counts.dtypes["_reduce_scatter_base_"] == counts.dtypes["allreduce_"] == {wire}
            grads = {name: param.grad for name, param in model.named_parameters()}
            assert grads.pop("frozen") is None
            assert {grad.dtype for grad in grads.values()} == {own}

    def test_tied_uneven_vocabulary_updates_every_row(self) -> None:
        for num_rows in (3, 7):  # k * world - 1; with 3, the last rank has no row at all
            mesh = self.gtp_mesh()
            torch.manual_seed(2)
            reference = nn.Sequential(nn.Embedding(num_rows, 6), nn.Tanh(), nn.Linear(6, num_rows, bias=False))
            reference[2].weight = reference[0].weight
            before = reference[2].weight.detach().clone()
            model = shard_copy(reference, mesh)
            assert model[2].weight is model[0].weight
            assert len(list(model.parameters())) == len(members_of(model).weights) == 1
            tokens = torch.randint(0, num_rows, (8, 5))
            tokens.view(-1)[:num_rows] = torch.arange(num_rows)
            check_step(reference, model, mesh, tokens, token_step)
            assert (full(model[2].weight) != before).any(1).all()

    def test_r27_frozen_and_trainable_parameters_of_two_dtypes(self) -> None:
        """LoRA: frozen bf16 weights with a bias and a norm, trainable fp32 factors, one of them not used at all."""

        class Lora(nn.Module):
            def __init__(self, is_used: bool) -> None:
                super().__init__()
                self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
                self.down = nn.Linear(WIDTH, 3, bias=False)
                self.up = nn.Parameter(torch.randn(WIDTH, 3))
                self.is_used = is_used

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.base(x.bfloat16()).float()
                return y + self.down(x) @ self.up.t() if self.is_used else y

        reference = nn.Sequential(Lora(True), nn.LayerNorm(WIDTH).requires_grad_(False), Lora(False), Lora(True))
        model = shard_copy(reference, self.gtp_mesh())
        for step in range(2):
            check_step(reference, model, self.gtp_mesh(), make_rows(step), square_step, rtol=1e-4, atol=1e-5)
        square_step(model, make_rows(9))
        with_grad = {name for name, param in model.named_parameters() if param.grad is not None}
        assert with_grad == {f"{index}.{name}" for index in (0, 3) for name in ("down.weight", "up")}

    def test_r27_first_and_last_use_in_different_microbatches(self) -> None:
        """With gradient sync in the last microbatch alone, also for what only the first or only the last one uses."""

        class Parts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), Raw()) for _ in range(4)])
                self.used: tuple[int, ...] = ()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for index in self.used:
                    x = torch.tanh(self.parts[index](x))
                return x

        uses = ((0, 1), (1, 0), (1, 2))  # 0: never in the last; 2: in the last only; 3: never
        reference = Parts()
        model = shard_copy(reference, self.hsdp_mesh())

        def step(module: Any, batch: torch.Tensor) -> None:
            for index, used in enumerate(uses):
                module.used = used
                if module is model:
                    module.set_requires_gradient_sync(index == len(uses) - 1)
                square_step(module, batch + index)

        for seed in range(2):
            check_step(reference, model, self.hsdp_mesh(), make_rows(seed), step)
        assert all(param.grad is None for param in model.parts[3].parameters())

    def test_penalty_on_sharded_parameters_adds_to_their_gradient(self) -> None:
        """Autograd adds to ``.grad`` of the DTensor itself, in the same backward."""
        reference = Net()
        model = shard_copy(reference, self.gtp_mesh())

        def step(module: nn.Module, tokens: torch.Tensor) -> None:
            for _ in range(2):
                penalty = sum(full(param.square().sum()) for param in module.parameters())
                (token_loss(module, tokens) + 0.01 * penalty).backward()

        check_step(reference, model, self.gtp_mesh(), make_tokens(0), step)
