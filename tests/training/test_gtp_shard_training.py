"""Any module under ``gtp_shard`` trains as one process does on the concatenated batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, check_training, full, rows_of_rank
from runtime_common import Calls
from runtime_common import token_loss as next_token_loss
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from dtensor_gtp import GTPShard, gtp_shard


class Zoo(nn.Module):
    """One of each: fused ops, convolution, norms, raw parameters, a ParameterList, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33, 16)
        self.linear = nn.Linear(16, 21)
        self.norm = nn.LayerNorm(21)
        self.conv = nn.Conv1d(21, 18, 3, padding=1)
        self.group_norm = nn.GroupNorm(3, 18)
        self.raw = nn.Parameter(torch.randn(18, 18) * 0.2)
        self.list = nn.ParameterList([torch.randn(18, 18) * 0.2 for _ in range(2)])
        self.out = nn.Linear(18, 16, bias=False)
        self.head = nn.Linear(16, 33, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.linear(self.embedding(tokens))))
        x = self.group_norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = x @ self.raw
        for weight in self.list:
            x = torch.tanh(x @ weight)
        return self.head(self.out(x))


class Tied(nn.Module):
    """An embedding tied to a head, and a matrix that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.layers[1].weight = self.layers[0].weight
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 33, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))

    def assert_tied(self) -> None:
        assert self.head.weight is self.embedding.weight
        assert self.layers[1].weight is self.layers[0].weight
        assert len(list(self.parameters())) == 6


class Products(nn.Module):
    """Multiplies its input with a matrix of each shape and layout."""

    def __init__(self) -> None:
        super().__init__()
        values = {
            "even": torch.randn(6, 8),
            "uneven": torch.randn(6, 9),
            "few": torch.randn(6, 2),
            "transposed": torch.randn(7, 6).t(),
            "strided": torch.randn(6, 14)[:, ::2],
            "stack": torch.randn(3, 6, 5),
        }
        self.weights = nn.ParameterDict({name: nn.Parameter(value) for name, value in values.items()})
        self.gain = nn.Parameter(torch.ones(6) + 0.1 * torch.randn(6))
        self.hollow = nn.Parameter(torch.randn(0, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x * self.gain, x @ self.hollow.t() @ self.hollow], 1)[:, :6]
        parts = [x @ (weight.sum(0) if weight.ndim == 3 else weight) for weight in self.weights.values()]
        return torch.cat(parts, 1)


def square_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).abs().pow(2).mean()


def float_batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(8, 6, generator=generator)


def token_batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 33, (8, 6), generator=generator)


class TestTraining(GlooTest):
    def test_zoo(self) -> None:
        for mesh, num_microbatches in ((self.gtp_mesh(), 3), (self.hsdp_mesh(), 1)):
            shard = partial(gtp_shard, mesh=mesh, schedule=ALL)
            check_training(Zoo(), shard, mesh, token_batch, next_token_loss, steps=2, num_microbatches=num_microbatches)

    def test_untied_after_gtp_shard(self) -> None:
        """One of the tied modules gets another parameter, which the others would get without a word; or all get it."""
        model: Any = gtp_shard(Tied(), self.gtp_mesh(), schedule=ALL)
        tokens = torch.arange(6)[None]
        for _ in range(2):
            model.head.weight = nn.Parameter(model.embedding.weight.detach() * 0.5)
            for _ in range(2):
                with self.assertRaisesRegex(RuntimeError, "'embedding.weight' .* is tied, but one .* a Linear"):
                    model(tokens)
            model.embedding.weight = model.head.weight
            model(tokens).sum().backward()
            model.assert_tied()

    def test_root_call_or_calls_on_submodules(self) -> None:
        """One call, calls on children and then on the root, or on children alone: the same training, and weights
        that are tied across the calls stay tied."""

        root = partial(gtp_shard, schedule=ALL)

        def some_children(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            for child in (model.layers[0], model.embedding):
                gtp_shard(child, mesh, schedule=ALL)
            return gtp_shard(model, mesh, schedule=ALL)

        def all_children(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            for child in (*model.layers, model.head, model.norm, model.embedding):
                gtp_shard(child, mesh, schedule=ALL)
            return model

        def all_children_and_root(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            return gtp_shard(all_children(model, mesh), mesh, schedule=ALL)

        meshes = (self.gtp_mesh(), self.hsdp_mesh())
        for mesh, shard in zip(
            (*meshes, *meshes), (root, some_children, all_children, all_children_and_root), strict=True
        ):
            model = check_training(Tied(), partial(shard, mesh=mesh), mesh, token_batch, next_token_loss, steps=2)
            model.assert_tied()
            kinds = {param.placements[-1] for param in model.parameters() if param.ndim == 2}
            self.assertEqual(kinds, {GTPShard(0)})  # torch 2.15 may have it as Shard(0), which is equal
            self.assertEqual(type(model) is Tied, shard is all_children)

    def test_r28_weights_of_any_shape_train(self) -> None:
        placements: list[Callable[[nn.Parameter], Placement | None]] = [
            lambda param: None,
            lambda param: GTPShard(1) if param.ndim > 1 else GTPShard(0),
            lambda param: GTPShard(-1, block_size=2),
            lambda param: Shard(0) if param.ndim == 2 else Replicate(),
        ]
        gtp, hsdp = self.gtp_mesh(), self.hsdp_mesh()
        for mesh, place in (*((gtp, place) for place in placements), (hsdp, placements[0]), (hsdp, placements[2])):
            shard = partial(gtp_shard, mesh=mesh, schedule=ALL, shard_placement_fn=place)
            # On the host torch's fused kernels take the memory of a strided parameter, the reference's, for dense.
            adamw = partial(torch.optim.AdamW, lr=1e-2)
            check_training(Products(), shard, mesh, float_batch, square_loss, steps=2, make_optimizer=adamw)

    def test_tables_cut_by_columns(self) -> None:
        """Embeddings and linear layers on dim 1, tied; the vocabulary is not the width."""
        place = lambda p: GTPShard(1) if p.ndim == 2 else None  # noqa: E731
        shard = partial(gtp_shard, mesh=self.gtp_mesh(), schedule=ALL, shard_placement_fn=place)
        check_training(Tied(), shard, self.gtp_mesh(), token_batch, next_token_loss, steps=2)

    def test_mixed_and_complex_dtypes_train(self) -> None:
        def call(own: Any, x: torch.Tensor) -> torch.Tensor:
            x = own.wide(x.double()).float()[:, own.order]
            return own.out((x.to(torch.complex64) @ own.phases).abs())

        def make() -> nn.Module:
            phases, order = (
                torch.randn(6, 6, dtype=torch.complex64),
                nn.Parameter(torch.randperm(6), requires_grad=False),
            )
            return Calls(
                call, wide=nn.Linear(6, 6, dtype=torch.float64), phases=phases, order=order, out=nn.Linear(6, 4)
            )

        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            shard = partial(gtp_shard, mesh=mesh, schedule=ALL)
            adamw = partial(torch.optim.AdamW, lr=1e-2)  # torch has none for complex numbers that is fused
            check_training(make(), shard, mesh, float_batch, square_loss, steps=2, make_optimizer=adamw)

    def test_ignored_parameters(self) -> None:
        """They stay the objects they are, train on each rank's own gradient, and nobody touches it."""
        mesh = self.gtp_mesh()
        reference = Tied()
        model = copy.deepcopy(reference)
        ignored = {model.norm.weight, model.layers[0].weight}
        gtp_shard(model, mesh, schedule=ALL, ignored_params=ignored)
        tokens = token_batch(torch.Generator().manual_seed(0))
        next_token_loss(model, rows_of_rank(tokens, mesh)).backward()
        local_reference = copy.deepcopy(reference)
        next_token_loss(local_reference, rows_of_rank(tokens, mesh)).backward()
        next_token_loss(reference, tokens).backward()
        self.assertEqual(model.norm.weight.grad, local_reference.norm.weight.grad)
        self.assertEqual(model.layers[1].weight.grad, local_reference.layers[1].weight.grad)
        self.assertEqual(full(model.layers[1].bias.grad), reference.layers[1].bias.grad)
        self.assertEqual(full(model.head.weight.grad), reference.head.weight.grad)

    def test_two_models_that_share_a_module(self) -> None:
        shared = nn.Linear(6, 6)
        references = [nn.Sequential(shared, nn.Linear(6, 5)), nn.Sequential(nn.Linear(6, 6), shared)]
        models = copy.deepcopy(references)
        for model in models:
            gtp_shard(model, self.gtp_mesh(), schedule=ALL)
        for step in range(2):
            batch = float_batch(torch.Generator().manual_seed(step))
            for model, reference in zip(models, references, strict=True):
                square_loss(reference, batch).backward()
                square_loss(model, rows_of_rank(batch, self.gtp_mesh())).backward()
        for model, reference in zip(models, references, strict=True):
            assert_same_params(model, reference, "grad")
