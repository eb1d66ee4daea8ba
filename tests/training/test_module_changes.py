"""What changes a module after ``gtp_shard``: casts, modules that are added, code that works on whole weights."""

from __future__ import annotations

import copy
import itertools
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import ALL, GROUPS, GlooTest, assert_same_params, rows_of_rank
from runtime_common import (
    WIDTH,
    Net,
    Raw,
    check_step,
    make_rows,
    make_tokens,
    members_of,
    shard_copy,
    small_model,
    square_loss,
    square_step,
    token_loss,
)
from test_gtp_shard_leaks import Residual
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dtensor_gtp import GTPShard, gtp_shard, shard_added, whole_weights
from dtensor_gtp.graphs.capture_blocks import CapturedBlocks


class Casting(nn.Module):
    """Casts a layer in its forward, as routers of Switch Transformers do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down, self.dtype = nn.Linear(8, 12), nn.Linear(12, 8), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.down = self.down.to(self.dtype)
        return x + self.down(torch.relu(self.up(x)).to(self.dtype)).to(x.dtype)


def casting(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Casting(dtype) for _ in range(3)))


class TestCasts(GlooTest):
    """``module.to`` and the like: without effect in loops and forwards, and of frozen modules."""

    world_size = 2

    def test_without_effect_in_forwards_and_before_backwards(self) -> None:
        def step(module: nn.Module, rows: torch.Tensor) -> None:
            losses = [square_loss(module.to("cpu"), part) for part in (rows, rows + 1)]
            module.float()
            sum(losses).backward()

        for policy in (ALL, GROUPS):
            reference = casting()
            model = shard_copy(reference, self.gtp_mesh(), schedule=policy)
            before = list(model.parameters())
            for seed in range(2):
                check_step(reference, model, self.gtp_mesh(), make_rows(seed, 4, 8), step)
            for param, same in zip(model.parameters(), before, strict=True):
                self.assertIs(param, same)

    def test_with_effect_in_a_forward(self) -> None:
        rows = make_rows(1, 4, 8, torch.float64)
        reference = casting(torch.float64)
        model = shard_copy(reference, self.gtp_mesh())
        for trained, batch in ((reference, rows), (model, rows_of_rank(rows, self.gtp_mesh()))):
            square_loss(trained, batch.float()).backward()
        self.assertEqual(model[0].down.weight.dtype, torch.float64)
        assert_same_params(model, reference, "grad")
        grouped = gtp_shard(casting(torch.float64), self.gtp_mesh(), schedule=GROUPS)
        with self.assertRaisesRegex(RuntimeError, r"'0\.down\.weight' cannot be cast .*with block '0'.*before"):
            grouped(rows.float())

    def test_of_frozen_modules(self) -> None:
        rows = make_rows(1, 4, 8)
        for policy in (ALL, GROUPS):
            reference = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)))
            model = shard_copy(reference, self.gtp_mesh(), schedule=policy)
            for trained, batch in ((reference, rows), (model, rows_of_rank(rows, self.gtp_mesh()))):
                trained.requires_grad_(False)
                trained.to(torch.float64)
                self.assertFalse(any(param.requires_grad for param in trained.parameters()))
                trained(batch.double())
                trained.requires_grad_(True)
                for _ in range(2):
                    square_loss(trained, batch.double()).backward()
            assert_same_params(model, reference, "grad")


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class TestShardAdded(GlooTest):
    """Modules that come after ``gtp_shard`` train as in one process."""

    def test_before_and_after_steps(self) -> None:
        reference = small_model()
        wrapped = nn.Sequential(shard_copy(reference, self.gtp_mesh()))  # as PEFT wraps
        model = wrapped[0]

        def train(num_steps: int) -> None:
            for seed in range(num_steps):
                check_step(reference, model, self.gtp_mesh(), make_rows(seed), square_step)

        for is_trained in (False, True):
            if is_trained:
                train(2)
            added = nn.Sequential(nn.Linear(WIDTH, WIDTH), Raw())
            added[0].bias.requires_grad_(False)
            reference.append(copy.deepcopy(added))
            model.append(added)
            self.assertIs(shard_added(wrapped), wrapped)
            train(2)
        self.assertIs(shard_added(model), model)  # nothing was added
        train(1)

    def test_blocks_that_were_groups_train_on(self) -> None:
        """A call on what is around them, or on a new module, makes groups of its own, or none with a schedule of fixed
        numbers. Nothing needs a gradient before the first block."""
        for around, is_assigned in itertools.product((None, GROUPS, ALL), (False, True)):
            torch.manual_seed(0)
            reference: nn.Module = nn.Sequential(*(Wide() for _ in range(3)))
            model: nn.Module = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=GROUPS)
            check_step(reference, model, self.gtp_mesh(), make_rows(0), square_step)
            self.assertEqual(len(members_of(model).groups), 3)
            added = nn.Linear(WIDTH, WIDTH)
            copied = copy.deepcopy(added)
            if around is not None:
                model = gtp_shard(nn.Sequential(model, added), self.gtp_mesh(), schedule=around)
                reference = nn.Sequential(reference, copied)
            else:
                reference.append(copied)  # type: ignore[operator]
                model.append(added)  # type: ignore[operator]
                shard_added(model)
            if is_assigned:
                state = {name: 2 * value for name, value in reference.state_dict().items()}
                reference.load_state_dict(state)
                model.load_state_dict(state, assign=True)
            for seed in range(1, 4):
                check_step(reference, model, self.gtp_mesh(), make_rows(seed), square_step)
            self.assertEqual(len(members_of(model).groups), 0 if around is ALL else 3)

    def test_gradients_of_microbatches_are_not_lost(self) -> None:
        model: Any = gtp_shard(small_model(), self.gtp_mesh(), schedule=GROUPS)
        model.set_requires_gradient_sync(False)
        square_loss(model, make_rows(0)).backward()
        model.append(nn.Linear(WIDTH, WIDTH))
        match = "expects a module whose gradients are all in .grad, but a Sequential has some of microbatches"
        with self.assertRaisesRegex(RuntimeError, f"shard_added {match}"):
            shard_added(model)
        with self.assertRaisesRegex(RuntimeError, f"gtp_shard {match}"):
            gtp_shard(nn.Sequential(model), self.gtp_mesh())
        with self.assertRaisesRegex(RuntimeError, f"capture_blocks {match}"):
            CapturedBlocks(model, [model[0]], mock.Mock(), 2, 4)
        model.reset_iter_state()
        shard_added(model)

    def test_a_forward_of_before_gets_no_backward(self) -> None:
        for is_outer in (True, False):
            model: nn.Module = gtp_shard(nn.Sequential(Wide(), Wide(), Wide()), self.gtp_mesh(), schedule=GROUPS)
            square_loss(model, make_rows(0)).backward()
            loss = square_loss(model, make_rows(0))
            if is_outer:
                model = gtp_shard(nn.Sequential(model), self.gtp_mesh(), schedule=GROUPS)
            else:
                model.append(nn.Linear(WIDTH, WIDTH))  # type: ignore[operator]
                shard_added(model)
            with self.assertRaisesRegex(RuntimeError, "shard_added or capture_blocks was called before its backward"):
                loss.backward()
            square_loss(model, make_rows(0)).backward()
            self.assertEqual(len(members_of(model).groups), 3)

    def test_sums_of_a_model_that_shares_a_weight(self) -> None:
        plain = nn.Sequential(Wide(), Wide())
        shared = plain[0].up.weight
        model: Any = gtp_shard(plain, self.gtp_mesh(), schedule=GROUPS)
        square_loss(model, make_rows(0)).backward()
        model.set_requires_gradient_sync(False)
        square_loss(model, make_rows(0)).backward()
        other = nn.Linear(WIDTH, 2 * WIDTH)
        other.weight = shared  # as it was before
        with self.assertRaisesRegex(RuntimeError, "gtp_shard expects a module whose gradients are all in .grad"):
            gtp_shard(nn.Sequential(other), self.gtp_mesh())

    def test_modules_added_to_a_block_that_gtp_shard_was_called_on(self) -> None:
        reference = nn.Sequential(Wide(), Wide(), Wide())
        model = copy.deepcopy(reference)
        for block in model:
            gtp_shard(block, self.gtp_mesh(), schedule=GROUPS)
        gtp_shard(model, self.gtp_mesh(), schedule=GROUPS)
        check_step(reference, model, self.gtp_mesh(), make_rows(0), square_step)
        for each in (model, reference):
            torch.manual_seed(1)
            each[0].up = nn.Sequential(each[0].up, nn.Linear(2 * WIDTH, 2 * WIDTH))
        with self.assertRaisesRegex(RuntimeError, "was added after gtp_shard"):
            model[0](make_rows(0))
        shard_added(model[0])
        for seed in range(2):
            check_step(reference, model, self.gtp_mesh(), make_rows(seed), square_step)
        # The first one is a large part of this model, and has a list of layers now.
        self.assertEqual([group.fqn for group in members_of(model).groups], ["1", "2"])

    def test_what_it_refuses(self) -> None:
        with self.assertRaisesRegex(ValueError, "shard_added expects a module after gtp_shard, but got a Linear"):
            shard_added(nn.Linear(2, 2))
        model = gtp_shard(small_model(), self.gtp_mesh(), schedule=ALL)
        model[0].extra = nn.Parameter(torch.ones(2, 2))
        with self.assertRaisesRegex(NotImplementedError, "'0.extra' was added to a Linear that gtp_shard has sharded"):
            shard_added(model)


@torch.no_grad()
def normalize(model: nn.Module) -> list[float]:
    """Each row of each matrix is divided by its norm, in place or by another tensor; returns norms of gradients."""
    for name, param in model.named_parameters():
        if param.ndim == 2 and "layers" in name:
            param.data = param / param.norm(dim=1, keepdim=True)
        else:
            param.mul_(0.5)
    return [float(param.grad.norm()) for param in model.parameters()]


class TestWholeWeights(GlooTest):
    """``whole_weights``: code that knows no DTensor reads and changes parameters as in one process."""

    def test_changes_are_those_of_one_process(self) -> None:
        reference, tokens = Net(), make_tokens(0)
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            expected = copy.deepcopy(reference)
            model = shard_copy(reference, mesh, reshard_after_forward=False)
            norms = []
            for trained in (expected, model):
                token_loss(trained, tokens).backward()
                if trained is model:
                    model.unshard()  # kept weights are old afterwards
                    with whole_weights(model):
                        self.assertFalse(any(isinstance(param, DTensor) for param in model.parameters()))
                        self.assertIs(model.head.weight, model.embedding.weight)
                        norms.append(normalize(model))
                    model.reshard()
                else:
                    norms.append(normalize(expected))
                torch.optim.SGD(trained.parameters(), lr=0.1).step()
                trained.zero_grad()
                token_loss(trained, tokens).backward()
            self.assertEqual(norms[1], norms[0], rtol=1e-4, atol=1e-6)
            assert_same_params(model, expected)
            assert_same_params(model, expected, "grad")

    def test_modules_may_be_replaced_in_it_and_frozen_parts_left_alone(self) -> None:
        model = gtp_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), self.gtp_mesh(), schedule=ALL)
        model[0].requires_grad_(False)
        with whole_weights(model, trained_only=True):
            self.assertIsInstance(model[0].weight, DTensor)
            self.assertNotIsInstance(model[1].weight, DTensor)
            merged = nn.Linear(8, 8)
            merged.weight = model[1].weight
            model[1].weight = nn.Parameter(torch.zeros(8, 8))
        self.assertEqual(merged.weight.shape, (8, 8))

    def test_parameters_are_frozen_and_unfrozen_in_it(self) -> None:
        for policy in (ALL, GROUPS):
            reference = small_model()
            model = shard_copy(reference, self.gtp_mesh(), schedule=policy)
            for is_trained in (False, True):
                with whole_weights(model):
                    model[1].requires_grad_(is_trained)
                reference[1].requires_grad_(is_trained)
                self.assertEqual({param.requires_grad for param in model[1].parameters()}, {is_trained})
                check_step(reference, model, self.gtp_mesh(), make_rows(0), square_step)

    def test_reset_parameters_zeros_the_row_of_padding(self) -> None:
        for make in (nn.Embedding, nn.EmbeddingBag):
            reference = make(8, 4, padding_idx=5)
            model = shard_copy(reference, self.gtp_mesh(), schedule=ALL)
            torch.manual_seed(3)
            reference.reset_parameters()
            torch.manual_seed(3)
            with whole_weights(model):
                model.reset_parameters()
                self.assertEqual(model.weight, reference.weight)
            self.assertEqual(model.weight.full_tensor(), reference.weight)

    def test_an_error_while_weights_are_gathered_leaves_all_as_it_was(self) -> None:
        model = gtp_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), self.gtp_mesh(), schedule=ALL)
        model.unshard()
        gather, calls = DTensor.full_tensor, itertools.count()

        def run_out_of_memory(tensor: DTensor) -> torch.Tensor:
            if next(calls) == 2:
                raise torch.OutOfMemoryError("of the test")
            return gather(tensor)

        with mock.patch.object(DTensor, "full_tensor", run_out_of_memory), self.assertRaises(torch.OutOfMemoryError):
            with whole_weights(model):
                self.fail("no rank comes here")
        self.assertEqual(model[0].weight.shape, (8, 8))
        self.assertNotIsInstance(model[0].weight, DTensor)  # as after ``unshard``
        model.reshard()
        self.assertTrue(all(isinstance(param, DTensor) for param in model.parameters()))

    def test_another_shape_is_refused_and_the_others_are_put_back(self) -> None:
        model = gtp_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), self.gtp_mesh(), schedule=ALL)
        with self.assertRaisesRegex(RuntimeError, r"'0.bias' to keep its shape \(8,\), but got \(1,\)"):
            with whole_weights(model):
                model[0].bias.data = torch.ones(1)
                model[1].bias.data = torch.ones(8)
        self.assertTrue(all(isinstance(param, DTensor) for param in model.parameters()))
        self.assertEqual(model[1].bias.full_tensor(), torch.ones(8))

    def test_it_is_refused_in_a_forward(self) -> None:
        class Reads(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with whole_weights(self):
                    return super().forward(x)

        model = gtp_shard(nn.Sequential(Reads(8, 8)), self.gtp_mesh(), schedule=ALL)
        with self.assertRaisesRegex(RuntimeError, "whole_weights cannot be called during a forward or backward"):
            model(torch.ones(2, 8))

    def test_one_within_another_and_a_state_dict_that_is_loaded_there(self) -> None:
        model = gtp_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), self.gtp_mesh(), schedule=ALL)
        with whole_weights(model), torch.no_grad():
            with whole_weights(model[0]):
                model[0].weight.fill_(3.0)
            model[1].load_state_dict({"weight": torch.full((8, 8), 2.0), "bias": torch.zeros(8)})
        for layer, value in zip(model, (3.0, 2.0), strict=True):
            self.assertEqual(layer.weight.full_tensor(), torch.full((8, 8), value))

    def test_groups_between_unshard_and_reshard(self) -> None:
        """There ``load_state_dict`` writes to the shards, and whole weights are refused before anything changes."""
        model = gtp_shard(nn.Sequential(Residual(), Residual()), self.gtp_mesh(), schedule=GROUPS)
        model(torch.ones(2, 8)).sum().backward()
        self.assertEqual(len(members_of(model).groups), 2)
        model.unshard()
        with self.assertRaisesRegex(RuntimeError, r"between unshard\(\) and reshard\(\) of block '0'.* before"):
            with whole_weights(model):
                self.fail("no rank comes here")
        values = {name: torch.full_like(value.full_tensor(), 0.5) for name, value in model.state_dict().items()}
        model.load_state_dict(values)
        model.reshard()
        reference = nn.Sequential(Residual(), Residual())
        reference.load_state_dict(values)
        self.assertEqual(model(torch.ones(2, 8)), reference(torch.ones(2, 8)))

    def test_a_fully_shard_outside_is_refused(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "gtp"))
        model = gtp_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh["gtp"], schedule=ALL)
        fully_shard(model, mesh=mesh["dp"])
        model(torch.ones(2, 8)).sum().backward()
        with self.assertRaisesRegex(NotImplementedError, "a fully_shard outside .* has cut parameter '0.weight'"):
            with whole_weights(model):
                self.fail("no rank comes here")

    def test_an_uneven_shard_of_another_dim_and_blocks(self) -> None:
        for placement in (GTPShard(1), GTPShard(0, block_size=4)):
            weight = torch.arange(130.0).view(10, 13)
            model = nn.Linear(13, 10, bias=False)
            model.weight = nn.Parameter(weight.clone())
            gtp_shard(model, self.gtp_mesh(), shard_placement_fn=lambda param, placement=placement: placement)
            with whole_weights(model), torch.no_grad():
                self.assertEqual(model.weight, weight)
                model.weight += 1
            self.assertEqual(model.weight.full_tensor(), weight + 1)
