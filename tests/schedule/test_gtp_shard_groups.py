"""Blocks whose weights are gathered, held, freed and reduced together, beside the same model in one process."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from addends_common import add, all_to_all_of_peers
from common import GlooTest, assert_same_params, check_training, full, rows_of_rank
from counting import noted
from runtime_common import assert_bit_equal, members_of, runtime_of
from schedules import explicit
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor_gtp import GTPShard, SchedulePolicy, gtp_shard, sharding_report
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm import context, reductions
from dtensor_gtp._schedule import choose_schedule, launch_reductions, waiting_gradients
from dtensor_gtp._schedule.block_uses import BlockUse

WIDTH = 16
CHOSEN = SchedulePolicy(min_shard_numel=0)  # as the default, but tiny weights are sharded, too
LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """Weights with a number of rows that no number of ranks divides, a norm and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class HandsOn(Block):
    """Returns an input beside its output."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> Any:
        return super().forward(x + bias), bias


class Model(nn.Module):
    """Blocks between a first and a last layer. ``call`` calls a block."""

    def __init__(self, num_blocks: int = 3, call: Call | None = None, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.call = call or (lambda layer, x: layer(x))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(num_blocks))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.last(x)


class Experts(nn.Module):
    """Weights of all experts in one, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, WIDTH, 3 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(4, 3 * WIDTH, WIDTH) / 7)

    def forward(self, x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("rw,ewh->reh", x, self.up).relu()
        return torch.einsum("reh,ehw,re->rw", hidden, self.down, shares)


class Mixture(Block):
    """A block whose experts are large beside its other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + self.experts(x, self.router(x).softmax(-1))


class WithBias(Model):
    def __init__(self) -> None:
        super().__init__(block=HandsOn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        bias = x * 2
        for layer in self.layers:
            x, bias = layer(x, bias)
        return self.last(x)


class DataSGD(torch.optim.SGD):
    """Writes through ``.data``, as optimizers of others do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"])


def checkpointed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = checkpoint(layer, x, use_reentrant=False)
    return y


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def rows(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=generator)


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(7)
    return make()


class TestGroups(GlooTest):
    world_size = 2

    def shard(self, model: nn.Module, **options: Any) -> Any:
        return gtp_shard(model, self.gtp_mesh(), schedule=CHOSEN, **options)

    def check(self, reference: nn.Module, mesh: Any = None, loss: Any = square, steps: int = 2, **options: Any) -> Any:
        """Train beside one process, by groups. Nothing of them is in memory afterwards."""
        mesh = mesh or self.gtp_mesh()
        sharding = {"reshard_after_forward": options.pop("reshard_after_forward", True)}
        shard = options.pop("shard", lambda model: gtp_shard(model, mesh, schedule=CHOSEN, **sharding))
        model = check_training(reference, shard, mesh, rows, loss, steps=steps, tolerance=CLOSE, **options)
        groups = members_of(model).groups
        self.assertEqual([group.leaves.storage.nbytes() for group in groups], [0] * len(groups))
        self.assertGreater(len(groups), 0)
        return model

    def num_gathers(self, model: nn.Module) -> list[int]:
        return [group.for_forward.num_gathers for group in members_of(model).groups]

    def test_steps_equal_one_process(self) -> None:
        """One gather of a block in each direction. The last block of the forward is the first of backward: it stays."""
        model = self.check(seeded(Model))
        self.assertEqual(self.num_gathers(model), [4, 4, 4])
        self.assertEqual([group.fqn for group in members_of(model).groups], [f"layers.{n}" for n in range(3)])
        report = sharding_report(model, verbose=True)
        self.assertIn("3 blocks, each gathered as a whole", str(report))
        uses = {row.name: row.use for row in report.rows}
        self.assertEqual((uses["first.weight"], uses["layers.0.up.weight"]), ("fused op", "with its block"))
        kept = self.check(seeded(Model), reshard_after_forward=False)
        self.assertEqual(self.num_gathers(kept), [2, 2, 2])

    def test_an_input_that_a_block_returns_is_no_use_of_it(self) -> None:
        """Blocks of T5 hand on the position bias of the first one, whose gradient is complete after all blocks."""
        self.assertEqual(self.num_gathers(self.check(seeded(WithBias))), [4, 4, 4])

    def test_experts_are_in_the_group_of_their_block_if_it_fits(self) -> None:
        """Or the rest of their block is a group; also recomputed, compiled, and over microbatches."""
        alone = {f"layers.{n}.experts.{part}" for n in range(3) for part in ("up", "down")}
        recomputed = partial(Model, block=Mixture, call=lambda layer, x: checkpoint(layer, x, use_reentrant=False))
        for most, expected in ((2**30, set()), (64 * WIDTH**2, alone)):
            compiled = seeded(partial(Model, block=Mixture))
            for layer in compiled.layers:
                layer.compile(backend="aot_eager")
            # For the two rows of a rank. Experts do not count: code of the user multiplies them.
            small = mock.patch.object(choose_schedule, "_SMALL_GEMM", 2 * 4 * WIDTH**2)
            with small, mock.patch.object(choose_schedule, "_MOST_IN_GROUP", most):
                model = self.check(seeded(partial(Model, block=Mixture)), num_microbatches=2)
                self.assertEqual(self.singles(model), expected)
                self.check(seeded(recomputed))
                self.check(compiled)

    def test_experts_that_are_cut_in_another_way_are_gathered_by_themselves(self) -> None:
        def place(param: nn.Parameter) -> GTPShard | None:
            return GTPShard(1) if param.ndim == 3 else None

        shard = partial(gtp_shard, mesh=self.gtp_mesh(), schedule=CHOSEN, shard_placement_fn=place)
        model = self.check(seeded(partial(Model, block=Mixture)), shard=shard)
        self.assertEqual(len(self.singles(model)), 6)
        self.assertIn("experts of layers.0 and 2 more", str(sharding_report(model, verbose=True)))

    def singles(self, model: nn.Module) -> set[str]:
        """Weights of the three blocks that are not gathered with them."""
        self.assertEqual(len(members_of(model).groups), 3)
        return {weight.fqn for weight in members_of(model).single_weights if weight.fqn.startswith("layers")}

    def test_tokens_are_counted_in_the_inputs_of_the_first_forward(self) -> None:
        """Ids, or rows of features, which counts for experts and labels of images are not."""

        class Told(Model):
            def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
                return super().forward(torch.ones(2, WIDTH))

        ids, image, labels = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 3, 4, 4), torch.ones(2, dtype=torch.long)
        for inputs, expected in (
            ((ids,), 10),
            ((ids.flatten(),), 10),
            ((torch.ones(1, 1 << 16, dtype=torch.long),), 1 << 16),
            ((ids, torch.ones(2, 1, 5, 5, dtype=torch.bool)), 10),
            ((ids, torch.ones(2, 1, 5, 5, dtype=torch.long)), 10),
            ((ids, torch.ones(16, 5, 5)), 10),
            ((ids, image), 10),
            ((image.byte(), labels), 0),
            ((torch.ones(2, 1 << 16), labels), 0),
            ((torch.ones(3, 5, 7), labels), 15),
            ((torch.ones(64, 7), labels), 64),
            ((image, labels), 0),
        ):
            with (
                mock.patch.object(choose_schedule, "_SMALL_GEMM", 0),
                mock.patch.object(choose_schedule, "_SMALL_NUMEL", 0),
            ):
                model = self.shard(Told())
                model(*inputs)
            self.assertIn(f"elements, {expected} tokens", str(sharding_report(model)).replace("\n    ", " "), inputs)

    def test_sums_over_unsynced_microbatches_keep_float32(self) -> None:
        """Each microbatch adds less than bfloat16 resolves beside the first one."""
        model = self.shard(seeded(Model), mp_policy=LOW)
        x = torch.ones(2, WIDTH)
        grads = []
        for num_small in (0, 8):  # the same pass, then the same pass with small ones behind it
            model.zero_grad()
            for number in range(1 + num_small):
                model.set_requires_gradient_sync(number == num_small)
                (model(x).float().sum() * (1.0 if number == 0 else 2.0**-10)).backward()
            grads.append(full(model.layers[0].up.weight.grad))
        torch.testing.assert_close(grads[1], grads[0] * (1 + 8 * 2.0**-10), rtol=1e-5, atol=1e-7)

    def test_recomputed_blocks(self) -> None:
        """By their own forward, as in transformers, where the recomputation calls no block; timm's ``checkpoint_seq``
        calls the layers of all blocks, and no block: backward calls them alone."""

        class Recomputed(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return checkpoint(super().forward, x, use_reentrant=False)

        class Flat(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in chain.from_iterable(self.layers):
                    x = checkpoint(layer, x, use_reentrant=False)
                return x

        for make in (
            partial(Model, block=Recomputed),
            partial(Flat, block=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))),
        ):
            self.check(seeded(make))

    def test_selectively_checkpointed_blocks(self) -> None:
        """In backward the wrapper of a block calls it alone. Policies that save ops see none of ours."""

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_gemm = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return CheckpointPolicy.PREFER_RECOMPUTE if is_gemm else CheckpointPolicy.MUST_SAVE

        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Block()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                contexts = partial(create_selective_checkpoint_contexts, policy)
                return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)

        self.check(seeded(partial(Model, block=Wrapped)), steps=4)
        save = partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)
        call = partial(checkpoint, use_reentrant=False, context_fn=save)
        self.check(seeded(partial(Model, call=call)), steps=4)

    def test_compiled_blocks(self) -> None:
        torch._dynamo.reset()

        def shard(model: nn.Module) -> nn.Module:
            self.shard(model)
            for layer in model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
            return model

        self.check(seeded(Model), shard=shard)

    def test_inputs_that_are_written(self) -> None:
        class InPlace(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x += 1
                return super().forward(x)

        self.check(seeded(partial(Model, call=lambda layer, x: layer(x * 1.5), block=InPlace)))

    def test_blocks_that_add_to_their_input(self) -> None:
        class Residual(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x += super().forward(x * 0.5)  # autograd has saved the product, so ``x`` may change
                return x

        self.check(seeded(partial(Model, block=Residual)))

    def test_inputs_that_no_op_has_made(self) -> None:
        """Autograd completes their gradients before ops that read weights alone, as in reentrant checkpoints."""

        class Standardized(Block):
            def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
                weight = self.up.weight - self.up.weight.mean(0)
                x = x if memory is None else x + self.unused(memory)
                return x + self.down(F.linear(self.norm(x), weight, self.up.bias).relu())

        def reentrant(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(layer, x * 1, x, use_reentrant=True)

        def leaves(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return layer(x.detach().requires_grad_()) + x

        for call in (reentrant, leaves):
            self.check(seeded(partial(Model, call=call, block=Standardized)))

    def test_an_input_that_outlives_steps_keeps_nothing(self) -> None:
        model = self.shard(seeded(partial(Model, call=lambda layer, x: layer(x))))
        prompt = torch.ones(2, WIDTH, requires_grad=True)
        square(model, torch.ones(2, WIDTH)).backward()
        for _ in range(3):
            model.layers[0](prompt).sum().backward()
        self.assertFalse(prompt._backward_hooks)
        kept = prompt * 1
        uses = [weakref.ref(model.layers[0](kept)) for _ in range(3)]
        gc.collect()
        self.assertFalse(any(isinstance(thing, BlockUse) for thing in gc.get_objects()), uses)

    def test_the_first_call_of_all_is_that_of_a_block(self) -> None:
        class Loop(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            for layer in model.layers:
                batch = layer(batch)
            return model.last(model.first(batch)).square().mean()

        self.check(seeded(Loop), loss=loss)
        model, reference = self.shard(seeded(Model)), seeded(Model)
        for one in (model, reference):
            y = one.layers[0](torch.ones(2, WIDTH)).sum()
            if one is model:  # its backward gathers them again
                self.assertFalse(members_of(model).groups[0].leaves.may_be_saved)
            y.backward(retain_graph=True)
            y.backward()
        assert_same_params(model.layers[0], reference.layers[0], "grad", **CLOSE)

    def test_writes_to_a_block_that_stays_gathered(self) -> None:
        """They reach the shards before an optimizer or a load does, not after it."""

        class Clipped(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    self.up.weight.clamp_(-0.1, 0.1)
                return super().forward(x)

        def stay(model: nn.Module) -> nn.Module:
            model = self.shard(model, reshard_after_forward=False)
            model.set_reshard_after_backward(False)
            return model

        for optimizer in (partial(torch.optim.SGD, lr=0.1), partial(torch.optim.AdamW, fused=True)):
            reference = seeded(partial(Model, block=Clipped))
            model = check_training(
                reference, stay, self.gtp_mesh(), rows, square, steps=3, tolerance=CLOSE, make_optimizer=optimizer
            )
        square(model, torch.ones(2, WIDTH))  # no backward
        values = {name: torch.full_like(full(value), 0.01) for name, value in model.state_dict().items()}
        for one in (model, reference):
            one.load_state_dict(values)
        self.assertEqual(square(model, torch.ones(2, WIDTH)), square(reference, torch.ones(2, WIDTH)))

    def test_tensors_that_a_block_keeps_for_the_loss(self) -> None:
        class Keeps(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.aux = self.unused(x.detach()).square().mean()
                return super().forward(x)

        model = self.shard(seeded(partial(Model, block=Keeps)))
        square(model, torch.ones(2, WIDTH)).backward()
        with self.assertRaisesRegex(
            RuntimeError, "block 'layers.0' did not come through an output .* Return each tensor"
        ):
            sum(layer.aux for layer in model.layers).backward()
        model.zero_grad()
        reference = seeded(Model)
        for one in (model, reference):  # nothing of it is left
            square(one, torch.ones(2, WIDTH)).backward()
        assert_same_params(model, reference, "grad", **CLOSE)

        class Late(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                output = super().forward(x)
                self.aux = self.unused(output).square().mean()
                return output

        model = self.shard(seeded(partial(Model, block=Late)))
        loss = square(model, torch.ones(2, WIDTH))
        with self.assertRaisesRegex(
            RuntimeError, "before it came to an output .*'layers.0' to 'layers.2'.* Return each"
        ):
            (loss + sum(layer.aux for layer in model.layers)).backward()

    def test_second_derivatives(self) -> None:
        class Slopes(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                h = x = x.clone().requires_grad_()
                for layer in self.layers:
                    h = layer(h)
                (slope,) = torch.autograd.grad(h.tanh().square().sum(), x, create_graph=True)
                return slope + 0 * self.last(self.first(x))

        self.check(seeded(Slopes))

    def test_weights_that_other_code_reads(self) -> None:
        class Penalized(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                norms = sum(p.square().mean() for p in self.layers[2].parameters())
                return super().forward(x) * self.layers[0].up.weight.square().mean() + norms

        self.check(seeded(Penalized))

    def test_parameters_look_as_before_within_a_forward(self) -> None:
        found = {}

        def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            found["types"] = {type(p) for p in layer.parameters()}
            found["dtypes"] = {p.dtype for p in layer.parameters()}
            found["shapes"] = [p.shape for p in layer.parameters()]
            return layer(x)

        reference = seeded(partial(Model, call=call))
        shapes = [p.shape for p in reference.layers[0].parameters()]
        model = self.shard(reference, mp_policy=LOW)
        square(model, torch.randn(2, WIDTH)).backward()
        self.assertEqual(found, {"types": {nn.Parameter}, "dtypes": {torch.bfloat16}, "shapes": shapes})
        self.assertTrue(all(hasattr(p, "placements") for p in model.parameters()))

    def test_changes_between_steps(self) -> None:
        """Weights that are frozen for a step, and values that are loaded."""
        reference = seeded(Model)

        def between(model: nn.Module, step: int) -> None:
            for each in (reference, model):
                for layer in each.layers:
                    layer.up.requires_grad_(step != 1)
                    layer.norm.requires_grad_(step != 2)
            if step == 1:
                values = {name: full(value) + 0.1 for name, value in model.state_dict().items()}
                for each in (reference, model):
                    each.load_state_dict(values)

        self.check(reference, between=between, steps=4)

    def test_ranks_that_use_different_weights_of_a_block(self) -> None:
        """Rank r trains head r: a head that a rank does not use adds zeros."""
        rank = self.rank or 0

        class Heads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if len(x) == 8:  # one process: a head for the rows of each rank
                    return x + torch.cat([head(part) for head, part in zip(self.heads, x.chunk(2), strict=True)])
                return x + self.heads[rank](x)

        self.check(seeded(partial(Model, block=Heads)))

    def test_a_backward_through_weights_of_an_earlier_step_is_refused(self) -> None:
        """Also after a step that leaves no version behind."""
        for optimizer_type in (torch.optim.SGD, DataSGD):
            model = seeded(Model)
            model.first = model.last = nn.Identity()  # single weights would be refused first
            model = self.shard(model)
            optimizer = optimizer_type(model.parameters(), lr=0.1)
            x = torch.randn(2, WIDTH)
            loss = square(model, x)
            loss.backward(retain_graph=True)
            optimizer.step()
            square(model, x)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                loss.backward()

    def test_unshard(self) -> None:
        reference = seeded(Model)
        model = self.shard(copy.deepcopy(reference))
        model.unshard()
        torch.testing.assert_close(model.layers[1].up.weight.detach(), reference.layers[1].up.weight.detach())
        self.assertTrue(all(hasattr(p, "placements") for p in model.parameters()))
        for one in (model, reference):  # read outside of any forward
            sum(layer.up.weight.square().sum() for layer in one.layers).backward()
        batch = rows(torch.Generator().manual_seed(0))
        for one, mine in ((model, rows_of_rank(batch, self.gtp_mesh())), (reference, batch)):
            for _ in range(2):  # forwards in between
                square(one, mine).backward()
        with self.assertRaisesRegex(RuntimeError, r"'weight' of block .* replaced between unshard\(\) and reshard\(\)"):
            model.layers[1].up.register_parameter("weight", nn.Parameter(torch.zeros(1)))
        model.reshard()
        assert_same_params(model, reference, "grad", **CLOSE)
        self.assertEqual(members_of(model).groups[1].leaves.storage.nbytes(), 0)

    def test_unshard_after_parameters_were_replaced(self) -> None:
        model = self.shard(seeded(Model))
        square(model, torch.ones(2, WIDTH)).backward()
        expected = 2 * full(model.layers[0].up.weight)
        doubled = {name: 2 * value for name, value in model.state_dict().items()}
        for replace in (lambda: model.load_state_dict(doubled, assign=True), lambda: model.to(torch.float64)):
            replace()
            model.unshard()
            self.assertEqual(model.layers[0].up.weight.detach(), expected, exact_dtype=False)
            model.reshard()

    def test_replaced_parameters_whose_versions_are_lower(self) -> None:
        """What stays gathered of the old ones is stale, however many writes those have seen."""
        for num_writes in range(4):
            model = self.shard(seeded(Model), reshard_after_forward=False)
            model.set_reshard_after_backward(False)
            with torch.no_grad():
                for _ in range(num_writes):
                    model.layers[0].up.weight.mul_(1.0)
            square(model, torch.ones(2, WIDTH)).backward()
            group = members_of(model).groups[0]
            before = group.version
            doubled = {name: 2 * value for name, value in model.state_dict().items()}
            model.load_state_dict(doubled, assign=True)
            expected = seeded(Model)
            expected.load_state_dict({name: 2 * value for name, value in expected.state_dict().items()})
            self.assertEqual(square(model, torch.ones(2, WIDTH)), square(expected, torch.ones(2, WIDTH)))
            self.assertNotEqual(group.version, before)

    def test_a_tied_weight_that_is_replaced_at_one_place(self) -> None:
        class Tied(Block):
            def __init__(self) -> None:
                super().__init__()
                self.unused.weight = self.same = nn.Parameter(torch.ones(WIDTH, WIDTH))

        model = self.shard(seeded(partial(Model, block=Tied)))
        square(model, torch.ones(2, WIDTH)).backward()
        self.assertEqual(len(members_of(model).groups), 3)
        for name in ("same", "unused.weight"):
            old = model.get_parameter(f"layers.0.{name}")
            module = model.layers[0].get_submodule(name.rpartition(".")[0])
            setattr(module, name.rpartition(".")[2], nn.Parameter(torch.zeros(WIDTH, WIDTH)))
            with self.assertRaisesRegex(RuntimeError, "'layers.0.same' .* is tied, but one of its modules"):
                model(torch.ones(2, WIDTH))
            setattr(module, name.rpartition(".")[2], old)
            square(model, torch.ones(2, WIDTH)).backward()

    def test_gradients_of_biases_alone_are_in_flight(self) -> None:
        """A captured step would add to them in each replay."""
        model = self.shard(seeded(Model))
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith("layers") and param.ndim == 1)
        model.set_is_last_backward(False)
        square(model, torch.ones(2, WIDTH)).backward()
        self.assertTrue(runtime_of(model).steps.are_in_flight)
        model.set_is_last_backward(True)
        square(model, torch.ones(2, WIDTH)).backward()
        self.assertFalse(runtime_of(model).steps.are_in_flight)

    def test_blocks_that_are_no_groups(self) -> None:
        reference = seeded(Model)
        reference.layers[1].up.weight = reference.layers[0].up.weight
        model = self.check(reference)
        self.assertEqual([group.fqn for group in members_of(model).groups], ["layers.2"])
        self.assertIn("is shared with other modules", str(sharding_report(model, verbose=True)))


class TestCallsOnBlocks(GlooTest):
    """``gtp_shard`` on each block and on the root, as ``fully_shard`` is called."""

    world_size = 2

    def shard(self, model: Any, parts: Callable[[Any], Any] = lambda layer: layer, **options: Any) -> Any:
        options = {"schedule": CHOSEN, **options}
        for layer in model.layers:
            gtp_shard(parts(layer), self.gtp_mesh(), **options)
        return gtp_shard(model, self.gtp_mesh(), **options)

    def check(self, make: Callable[[], nn.Module] = Model, **options: Any) -> Any:
        shard = partial(self.shard, **options)
        return check_training(seeded(make), shard, self.gtp_mesh(), rows, square, steps=3, tolerance=CLOSE)

    def test_they_are_groups(self) -> None:
        for reshards, num_gathers in ((True, [6, 6, 6]), (False, [3, 3, 3])):
            model = self.check(reshard_after_forward=reshards)
            groups = members_of(model).groups
            self.assertEqual([group.fqn for group in groups], [f"layers.{n}" for n in range(3)])
            self.assertEqual([group.for_forward.num_gathers for group in groups], num_gathers)
        self.assertEqual(len(members_of(self.check(partial(Model, call=checkpointed))).groups), 3)

    def test_blocks_of_stages(self) -> None:
        """A stage has too few weights to be looked into, but for the calls inside."""

        class Stages(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(4))
                self.layers = [block for stage in self.stages for block in stage]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for stage in self.stages:
                    x = stage(x)
                return x

        self.assertEqual(len(members_of(self.check(Stages)).groups), 8)

    def test_a_call_on_a_part_of_a_block(self) -> None:
        model = self.check(parts=lambda layer: layer.up)
        self.assertEqual(members_of(model).groups, [])
        self.assertIn("gtp_shard was called on a part of it", str(sharding_report(model, verbose=True)))

    def test_each_call_casts(self) -> None:
        """Inputs of a block to its dtype, and its outputs back: between blocks everything is in float32."""
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
        seen: list[tuple[torch.dtype, torch.dtype]] = []

        def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = layer(x.float())
            seen.append((layer.norm.weight.dtype, y.dtype))
            return y.to(x.dtype)

        grads = []
        for schedule in (CHOSEN, explicit(min_shard_numel=0)):
            model = self.shard(seeded(partial(Model, call=call)), mp_policy=policy, schedule=schedule)
            for number in range(4):
                model.set_requires_gradient_sync(number % 2 == 1)
                square(model, rows_of_rank(rows(torch.Generator().manual_seed(number)), self.gtp_mesh())).backward()
            layer = model.layers[1]
            x = torch.ones(2, WIDTH, requires_grad=True)
            self.assertEqual(layer(x).dtype, torch.float32)  # outside of the model
            layer(x).sum().backward()
            self.assertEqual(len(members_of(model).groups), 3 if schedule is CHOSEN else 0)
            grads.append({name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None})
        self.assertEqual({dtypes[1] for dtypes in seen}, {torch.float32})
        self.assertEqual(grads[0].keys(), grads[1].keys())
        for name, grad in grads[0].items():
            torch.testing.assert_close(grad, grads[1][name], rtol=2e-2, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")

    def test_methods_of_one_block(self) -> None:
        reference = seeded(Model)
        model = self.shard(copy.deepcopy(reference))
        batch = rows(torch.Generator().manual_seed(0))
        mine = rows_of_rank(batch, self.gtp_mesh())
        for step in range(3):
            if step == 1:
                model.layers[1].unshard()
                weight = model.layers[1].up.weight.detach()
                torch.testing.assert_close(weight, reference.layers[1].up.weight.detach(), **CLOSE)
                model.layers[0].set_reshard_after_forward(False)
                model.layers[2].compile(backend="aot_eager")
            for one, part in ((model, mine), (reference, batch)):
                square(one, part).backward()
            if step == 1:
                model.layers[1].reshard()
            assert_same_params(model, reference, "grad", **CLOSE)
            for one in (model, reference):
                torch.optim.SGD(one.parameters(), lr=0.1).step()
                one.zero_grad()
        assert_same_params(model, reference, "param", **CLOSE)
        self.assertEqual(len(members_of(model).groups), 3)


class TestGroupsOnReplicas(GlooTest):
    def test_gradients_of_16_bits_travel_as_they_are(self) -> None:
        """Within a host, of groups and of weights that are read. Receivers add in float32: the sums of a ring, which
        sends float32. Also over microbatches, replicas, with a factor, where a rank has no gradient, and if large
        gradients are not packed."""
        alone = explicit(min_shard_numel=0, coalesce_grad_nbytes=0)
        for mesh, policy in ((self.hsdp_mesh(), CHOSEN), (self.gtp_mesh(), alone)):
            num_exchanges: list[int] = []
            narrow, dtypes = self._reduced(mesh, policy, True)
            wide, no_dtypes = self._reduced(mesh, policy, False)
            for not_packed in (2**30, 512):  # bytes
                with (
                    mock.patch.object(reductions, "is_loaded_ahead", return_value=True),
                    mock.patch.object(reductions, "fused_sum", return_value=add),
                    mock.patch.object(launch_reductions, "is_loaded_ahead", return_value=True),
                    mock.patch.object(waiting_gradients, "_NOT_PACKED", not_packed),
                    mock.patch.object(compat, "all_to_all_of_peers", side_effect=all_to_all_of_peers) as exchange,
                ):
                    by_kernel, _ = self._reduced(mesh, policy, True)
                assert_bit_equal(list(by_kernel.values()), list(narrow.values()), "who adds")
                self.assertTrue(exchange.called)
                num_exchanges.append(exchange.call_count)
            self.assertEqual((dtypes, no_dtypes), ({torch.bfloat16}, set()))
            packed, as_they_are = num_exchanges
            self.assertTrue(packed < as_they_are or policy is alone)
            self.assertEqual(narrow.keys(), wide.keys())
            for name, grad in narrow.items():
                torch.testing.assert_close(grad, wide[name], rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")

    def test_gradients_of_other_dtypes_travel_apart(self) -> None:
        """Every other block computes in bfloat16, and all reduce in float32."""

        class Mixed(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    x = layer(x.float()).float()
                return x

        mesh = self.gtp_mesh()
        reference = seeded(partial(Mixed, 4))
        models: list[Any] = [copy.deepcopy(reference) for _ in range(2)]
        for model, limit in zip(models, (0, choose_schedule._LEAST_AHEAD), strict=True):
            for index, layer in enumerate(model.layers):
                low = LOW if index % 2 else MixedPrecisionPolicy(torch.float32, torch.float32)
                gtp_shard(layer, mesh, schedule=CHOSEN, mp_policy=low)
            with mock.patch.object(choose_schedule, "_LEAST_AHEAD", limit):
                gtp_shard(model, mesh, schedule=CHOSEN)
                square(model, rows_of_rank(rows(torch.Generator().manual_seed(0)), mesh)).backward()
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            if ours.grad is not None:
                torch.testing.assert_close(full(ours.grad), full(theirs.grad))

    def _reduced(
        self, mesh: Any, schedule: SchedulePolicy, is_one_host: bool
    ) -> tuple[dict[str, torch.Tensor], set[torch.dtype]]:
        """Gradients of three microbatches, and the dtypes of what ranks have exchanged."""
        sent: set[torch.dtype] = set()
        with (
            mock.patch.object(choose_schedule, "_LEAST_AHEAD", 0),
            mock.patch.object(context, "is_one_host", return_value=is_one_host),
            noted(compat, "all_to_all_base", lambda output, input, *args: sent.add(input.dtype)),
        ):
            model: Any = gtp_shard(seeded(partial(Model, 2, block=Mixture)), mesh, schedule=schedule, mp_policy=LOW)
            for number, is_synced in enumerate((True, False, True)):
                model.set_requires_gradient_sync(is_synced)
                if number == 2:
                    model.set_gradient_divide_factor(3.0)
                square(model, rows_of_rank(rows(torch.Generator().manual_seed(number)), mesh)).backward()
        return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}, sent
