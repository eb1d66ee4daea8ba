"""Blocks whose weights are gathered, held, freed and reduced together, beside the same model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import GlooTest, assert_same_params, check_training, full, rows_of_rank
from runtime_common import runtime_of
from schedules import explicit
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor_gtp import SchedulePolicy, gtp_shard, sharding_report
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm import context
from dtensor_gtp._schedule import choose_schedule

WIDTH = 16
CHOSEN = SchedulePolicy(min_shard_numel=0)  # as the default, but tiny weights are sharded, too
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


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def rows(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=generator)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make()


class TestGroups(GlooTest):
    def check(self, reference: nn.Module, mesh: Any = None, loss: Any = square, **options: Any) -> nn.Module:
        """Train beside one process, by groups. Nothing of them is in memory afterwards."""
        mesh = mesh or self.gtp_mesh()
        sharding = {name: options.pop(name) for name in ("mp_policy", "reshard_after_forward") if name in options}
        tolerance = options.pop("tolerance", {"rtol": 1e-4, "atol": 1e-5})
        model = check_training(
            reference,
            lambda m: gtp_shard(m, mesh, schedule=CHOSEN, **sharding),
            mesh,
            rows,
            loss,
            tolerance=tolerance,
            **options,
        )
        groups = runtime_of(model).groups
        self.assertEqual([group.fqn for group in groups], [f"layers.{n}" for n in range(len(groups))])
        self.assertGreater(len(groups), 0)
        self.assertEqual([group.leaves.storage.nbytes() for group in groups], [0] * len(groups))
        return model

    def test_steps_equal_one_process(self) -> None:
        model = self.check(seeded(Model))
        report = str(sharding_report(model, verbose=True))
        self.assertIn("3 blocks, each gathered as a whole", report)
        uses = {row.name: row.use for row in sharding_report(model).rows if row.name.endswith("weight")}
        self.assertEqual((uses["first.weight"], uses["layers.0.up.weight"]), ("fused op", "with its block"))

    def test_replicas(self) -> None:
        self.check(seeded(Model), self.hsdp_mesh())

    def test_a_block_is_one_gather_in_each_direction(self) -> None:
        model = self.check(seeded(Model), steps=2)
        # The last block of the forward is the first of backward: it stays.
        self.assertEqual([group.for_forward.num_gathers for group in runtime_of(model).groups], [4, 4, 4])

    def test_an_input_that_a_block_returns_is_no_use_of_it(self) -> None:
        """Blocks of T5 hand on the position bias of the first one, whose gradient is complete after all blocks."""
        model = self.check(seeded(WithBias), steps=2)
        self.assertEqual([group.for_forward.num_gathers for group in runtime_of(model).groups], [4, 4, 4])

    def test_large_experts_are_gathered_by_themselves(self) -> None:
        """The rest of their block is a group; also recomputed, compiled, and over microbatches."""
        expected = {f"layers.{n}.experts.{part}" for n in range(3) for part in ("up", "down")}
        with mock.patch.object(choose_schedule, "_SMALL_NUMEL", 4 * WIDTH**2):
            model = self.check(seeded(lambda: Model(block=Mixture)), num_microbatches=2)
            self.assertEqual(len(runtime_of(model).groups), 3)
            single = {weight.fqn for weight in runtime_of(model).weights if weight.group is None}
            self.assertEqual(single, expected | {"first.weight", "last.weight"})
            self.check(
                seeded(lambda: Model(block=Mixture, call=lambda layer, x: checkpoint(layer, x, use_reentrant=False)))
            )
            compiled = seeded(lambda: Model(block=Mixture))
            for layer in compiled.layers:
                layer.compile(backend="aot_eager")
            self.check(compiled)

    def test_microbatches_without_sync(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            if hasattr(model, "set_requires_gradient_sync"):
                self.num_calls += 1
                model.set_requires_gradient_sync(self.num_calls % 3 == 0)
            return square(model, batch)

        self.num_calls = 0
        self.check(seeded(Model), loss=loss, num_microbatches=3)

    def test_sums_over_unsynced_microbatches_keep_float32(self) -> None:
        """Each microbatch adds less than bfloat16 resolves beside the first one."""
        model = gtp_shard(
            seeded(Model),
            self.gtp_mesh(),
            schedule=CHOSEN,
            mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        )
        x = torch.ones(2, WIDTH)
        grads = []
        for num_small in (0, 1):  # the same pass, then the same pass with small ones behind it
            model.zero_grad()
            for number in range(1 + 8 * num_small):
                model.set_requires_gradient_sync(number == 8 * num_small)
                (model(x).float().sum() * (1.0 if number == 0 else 2.0**-10)).backward()
            grads.append(full(model.layers[0].up.weight.grad))
        torch.testing.assert_close(grads[1], grads[0] * (1 + 8 * 2.0**-10), rtol=1e-5, atol=1e-7)

    def test_gradients_of_16_bits_travel_as_they_are(self) -> None:
        """Within a host, of groups and of weights that are read. Receivers add in float32: the sums of a ring, which
        sends float32. Also over microbatches, replicas, with a factor, and where a rank has no gradient."""
        alone = explicit(min_shard_numel=0, coalesce_grad_nbytes=0)
        for mesh, policy in ((self.hsdp_mesh(), CHOSEN), (self.gtp_mesh(), alone)):
            by_host = {is_host: self._reduced(mesh, policy, is_host) for is_host in (True, False)}
            (narrow, dtypes), (wide, no_dtypes) = by_host[True], by_host[False]
            self.assertEqual(dtypes, {torch.bfloat16})
            self.assertEqual(no_dtypes, set())
            self.assertEqual(narrow.keys(), wide.keys())
            for name, grad in narrow.items():
                torch.testing.assert_close(grad, wide[name], rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")

    def _reduced(
        self, mesh: Any, schedule: SchedulePolicy, is_one_host: bool
    ) -> tuple[dict[str, torch.Tensor], set[torch.dtype]]:
        """Gradients of four microbatches, and the dtypes of what ranks have exchanged."""
        sent: set[torch.dtype] = set()
        exchange = compat.all_to_all_base

        def noted(output: torch.Tensor, input: torch.Tensor, *args: Any) -> Any:
            sent.add(input.dtype)
            return exchange(output, input, *args)

        with (
            mock.patch.object(choose_schedule, "_LEAST_AHEAD", 0),
            mock.patch.object(context, "is_one_host", return_value=is_one_host),
            mock.patch.object(compat, "all_to_all_base", noted),
        ):
            reference = seeded(lambda: Model(block=Mixture))
            model = gtp_shard(
                reference, mesh, schedule=schedule, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            )
            for number, is_synced in enumerate((True, False, True, True)):
                model.set_requires_gradient_sync(is_synced)
                batch = rows_of_rank(rows(torch.Generator().manual_seed(number)), mesh)
                if number == 3:
                    model.set_gradient_divide_factor(3.0)
                square(model, batch).backward()
        return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}, sent

    def test_checkpointed_blocks(self) -> None:
        for reentrant in (False, True):
            call: Call = lambda layer, x, r=reentrant: checkpoint(layer, x, use_reentrant=r)  # type: ignore[misc]  # noqa: E731
            self.check(seeded(lambda call=call: Model(call=call)), steps=2)

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
                y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)
                return y

        self.check(seeded(partial(Model, block=Wrapped)), steps=4)

    def test_blocks_that_checkpoint_their_own_forward(self) -> None:
        """As transformers does: the recomputation calls no block."""

        class Recomputed(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
                return y

        self.check(seeded(lambda: Model(block=Recomputed)), steps=2)

    def test_checkpointed_children_of_blocks(self) -> None:
        """timm's ``checkpoint_seq`` calls the layers of all blocks, and no block: backward calls them alone."""

        class Flat(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in chain.from_iterable(self.layers):
                    x = checkpoint(layer, x, use_reentrant=False)
                return x

        def block() -> nn.Module:
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

        self.check(seeded(partial(Flat, block=block)))

    def test_compiled_blocks(self) -> None:
        reference = seeded(Model)
        for fullgraph in (False, True):
            mesh = self.gtp_mesh()
            torch._dynamo.reset()

            def shard(model: nn.Module, fullgraph: bool = fullgraph, mesh: Any = mesh) -> nn.Module:
                gtp_shard(model, mesh, schedule=CHOSEN)
                for layer in model.layers:
                    layer.compile(backend="aot_eager", fullgraph=fullgraph)
                return model

            check_training(
                copy.deepcopy(reference), shard, mesh, rows, square, steps=2, tolerance={"rtol": 1e-4, "atol": 1e-5}
            )

    def test_weights_kept_until_backward(self) -> None:
        model = self.check(seeded(Model), reshard_after_forward=False, steps=2)
        self.assertEqual([group.for_forward.num_gathers for group in runtime_of(model).groups], [2, 2, 2])

    def test_a_block_that_is_called_several_times(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return square(model, batch) + square(model, -batch)

        self.check(seeded(lambda: Model(call=lambda layer, x: layer(layer(x)))), loss=loss)

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

        reference = seeded(lambda: Model(call=call))
        shapes = [p.shape for p in reference.layers[0].parameters()]
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = gtp_shard(reference, self.gtp_mesh(), schedule=CHOSEN, mp_policy=policy)
        square(model, torch.randn(2, WIDTH)).backward()
        self.assertEqual(found, {"types": {nn.Parameter}, "dtypes": {torch.bfloat16}, "shapes": shapes})
        self.assertTrue(all(hasattr(p, "placements") for p in model.parameters()))

    def test_inputs_that_a_block_writes(self) -> None:
        class InPlace(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x += 1
                return super().forward(x)

        def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            y = layer(x * 1.5)
            y *= 0.5
            return y

        self.check(seeded(lambda: Model(call=call, block=InPlace)))

    def test_frozen_and_unfrozen_weights(self) -> None:
        reference = seeded(Model)
        models = [reference]

        def between(model: nn.Module, step: int) -> None:
            for each in (*models, model):
                for layer in each.layers:
                    layer.up.requires_grad_(step != 1)
                    layer.norm.requires_grad_(step != 2)

        self.check(reference, between=between, steps=4)

    def test_ranks_that_use_different_weights_of_a_block(self) -> None:
        """Rank r trains head r: a head that a rank does not use adds zeros."""
        rank = self.rank or 0

        class Heads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if len(x) == 8:  # one process: a head for the rows of each rank
                    return x + torch.cat([head(part) for head, part in zip(self.heads, x.chunk(4), strict=True)])
                return x + self.heads[rank](x)

        self.check(seeded(lambda: Model(block=Heads)))

    def test_second_derivatives(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            x = batch.clone().requires_grad_()
            h = x
            for layer in model.layers:
                h = layer(h)
            (slope,) = torch.autograd.grad(h.tanh().square().mean(), x, create_graph=True)
            return slope.square().sum() * len(batch) / 8 * (4 if len(batch) < 8 else 1)

        class Blocks(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                h = x = x.clone().requires_grad_()
                for layer in self.layers:
                    h = layer(h)
                (slope,) = torch.autograd.grad(h.tanh().square().sum(), x, create_graph=True)
                return slope + 0 * self.last(self.first(x))

        del loss
        self.check(seeded(Blocks))

    def test_the_next_forward_has_the_weights_of_the_step(self) -> None:
        model = gtp_shard(seeded(Model), self.gtp_mesh(), schedule=CHOSEN)
        reference = seeded(Model)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
        for one in (model, reference):
            optimizer = torch.optim.SGD(one.parameters(), lr=100.0)
            square(one, x).backward()
            optimizer.step()
        torch.testing.assert_close(model(x), reference(x), rtol=1e-3, atol=1e-3)

    def test_writes_in_a_forward_reach_the_shards(self) -> None:
        class Clipped(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    self.up.weight.clamp_(-0.1, 0.1)
                    self.norm.weight.mul_(0.5)
                return super().forward(x)

        self.check(seeded(lambda: Model(block=Clipped)))

    def test_writes_without_a_version_are_refused(self) -> None:
        """In forwards 1, 2, 4 and so on, as for single weights."""

        class Decayed(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.written is not None:
                    self.get_parameter(self.written).data.mul_(0.5)
                return super().forward(x)

        for name in ("up.weight", "norm.bias", "up.bias"):
            Decayed.written = None
            reference = seeded(lambda: Model(block=Decayed))
            model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=CHOSEN)
            with torch.no_grad():
                for module in (model, reference):
                    for param in module.parameters():
                        param.fill_(0.25)
            x = torch.randn(2, WIDTH)
            square(model, x).backward()
            self.assertTrue(runtime_of(model).groups)
            Decayed.written = name
            with self.assertRaisesRegex(RuntimeError, "has changed weights of block 'layers.0' through .data"):
                model(x)
            Decayed.written = None
            torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-4)

    def test_a_backward_through_weights_of_an_earlier_step_is_refused(self) -> None:
        """Also after a step that leaves no version behind."""
        for optimizer_type in (torch.optim.SGD, DataSGD):
            model = seeded(Model)
            model.first = model.last = nn.Identity()  # single weights would be refused first
            model = gtp_shard(model, self.gtp_mesh(), schedule=CHOSEN)
            optimizer = optimizer_type(model.parameters(), lr=0.1)
            x = torch.randn(2, WIDTH)
            loss = square(model, x)
            loss.backward(retain_graph=True)
            optimizer.step()
            square(model, x)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                loss.backward()

    def test_after_an_exception_in_a_block(self) -> None:
        reference = seeded(Model)
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=CHOSEN)
        batch = rows(torch.Generator().manual_seed(0))
        mine = rows_of_rank(batch, self.gtp_mesh())

        def fail(*args: Any) -> None:
            raise ValueError("on purpose")

        for place in ("forward", "backward"):
            layer = model.layers[1].down
            if place == "forward":
                hook = layer.register_forward_pre_hook(fail)
                with self.assertRaisesRegex(ValueError, "on purpose"):
                    model(mine)
            else:
                hook = layer.register_full_backward_hook(fail)
                with self.assertRaisesRegex(ValueError, "on purpose"):
                    square(model, mine).backward()
            hook.remove()
            self.assertTrue(all(hasattr(p, "placements") for p in model.parameters()))
        square(model, mine).backward()
        square(reference, batch).backward()
        assert_same_params(model, reference, "grad", rtol=1e-4, atol=1e-5)

    def test_unshard(self) -> None:
        reference = seeded(Model)
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=CHOSEN)
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
        assert_same_params(model, reference, "grad", rtol=1e-4, atol=1e-5)
        self.assertEqual(runtime_of(model).groups[1].leaves.storage.nbytes(), 0)

    def test_unshard_after_parameters_were_replaced(self) -> None:
        model = gtp_shard(seeded(Model), self.gtp_mesh(), schedule=CHOSEN)
        square(model, torch.ones(2, WIDTH)).backward()
        expected = 2 * full(model.layers[0].up.weight)
        doubled = {name: 2 * value for name, value in model.state_dict().items()}
        for replaced in (lambda: model.load_state_dict(doubled, assign=True), lambda: model.to(torch.float64)):
            replaced()
            model.unshard()
            self.assertEqual(model.layers[0].up.weight.detach(), expected, exact_dtype=False)
            model.reshard()

    def test_state_dicts_and_casts_between_steps(self) -> None:
        reference = seeded(Model)

        def between(model: nn.Module, step: int) -> None:
            if step == 1:
                whole = {name: full(value).clone() for name, value in model.state_dict().items()}
                model.load_state_dict({name: value + 0.1 for name, value in whole.items()})
                reference.load_state_dict({name: value + 0.1 for name, value in reference.state_dict().items()})

        self.check(reference, between=between)

    def test_blocks_that_are_no_groups(self) -> None:
        def tied() -> nn.Module:
            model = Model()
            model.layers[1].up.weight = model.layers[0].up.weight
            return model

        mesh = self.gtp_mesh()
        model = check_training(
            seeded(tied),
            lambda m: gtp_shard(m, mesh, schedule=CHOSEN),
            mesh,
            rows,
            square,
            tolerance={"rtol": 1e-4, "atol": 1e-5},
        )
        self.assertEqual([group.fqn for group in runtime_of(model).groups], ["layers.2"])
        self.assertIn("is shared with other modules", str(sharding_report(model, verbose=True)))
