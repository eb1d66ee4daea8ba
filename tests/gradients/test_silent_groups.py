"""What would be wrong without a word where weights of blocks are groups: gradients that come late, early or not at all.

Each is computed as in one process, or refused by name. Single weights have their tests in ``test_silent_params.py`` and
its neighbours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from common import GlooTest, assert_same_params, full, rows_of_rank
from runtime_common import runtime_of
from test_gtp_shard_groups import CHOSEN, WIDTH, Block, Model, rows, seeded, square
from test_gtp_shard_parameters import SCHEDULES
from torch.autograd.functional import hvp

from dtensor_gtp import SchedulePolicy, gtp_shard

MIXED = SchedulePolicy(min_shard_numel=2 * WIDTH)  # groups with parameters that stay whole


class Linears(nn.Sequential):
    """Its derivative by an input does not depend on the input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class TestSilentGroups(GlooTest):
    world_size = 2

    def pairs(
        self, make: Callable[[], nn.Module] = Model, policies: tuple[SchedulePolicy, ...] = (CHOSEN, MIXED)
    ) -> Iterator[tuple[Any, Any]]:
        """Sharded models that have made their groups, and the same in one process."""
        for policy in policies:
            reference: Any = seeded(make)
            model: Any = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=policy)
            self.run_both(model, reference, lambda each, x: square(each, x).backward(), 9)
            model.zero_grad()
            reference.zero_grad()
            assert runtime_of(model).groups
            yield model, reference

    def run_both(
        self, model: nn.Module, reference: nn.Module, step: Callable[[Any, torch.Tensor], Any], seed: int
    ) -> tuple[Any, Any]:
        batch = rows(torch.Generator().manual_seed(seed))
        return step(model, rows_of_rank(batch, self.gtp_mesh())), step(reference, batch)

    def check_grads(self, model: nn.Module, reference: nn.Module) -> None:
        assert_same_params(model, reference, "grad", rtol=1e-4, atol=1e-5)

    def test_gradients_of_weights_that_are_frozen_later(self) -> None:
        """In the microbatch that syncs: some of a block, a whole block, all blocks. Afterwards they train again."""
        for names in (("layers.1.up",), ("layers.0.norm", "layers.1.up.bias"), ("layers.1.",), ("layers.",)):
            for switch in ("set_requires_gradient_sync", "set_is_last_backward", "set_requires_all_reduce"):
                for model, reference in self.pairs():
                    for seed, is_last in enumerate((False, True)):
                        getattr(model, switch)(is_last)
                        for each in (model, reference):
                            for name, param in each.named_parameters():
                                param.requires_grad_(not (is_last and name.startswith(names)))
                        self.run_both(model, reference, lambda each, x: square(each, x).backward(), seed)
                    self.check_grads(model, reference)
                    for each in (model, reference):
                        each.zero_grad()
                        each.requires_grad_(True)
                    self.run_both(model, reference, lambda each, x: square(each, x).backward(), 5)
                    self.check_grads(model, reference)

    def test_weights_that_are_frozen_at_first(self) -> None:
        for model, reference in self.pairs():
            for seed, is_last in enumerate((False, True)):
                model.set_requires_gradient_sync(is_last)
                for each in (model, reference):
                    each.layers[1].requires_grad_(is_last)
                    each.layers[2].up.requires_grad_(is_last)
                self.run_both(model, reference, lambda each, x: square(each, x).backward(), seed)
            self.check_grads(model, reference)

    def test_frozen_between_forward_and_backward(self) -> None:
        for model, reference in self.pairs():
            losses = self.run_both(model, reference, square, 0)
            for each in (model, reference):
                each.layers[0].requires_grad_(False)
                each.layers[1].up.requires_grad_(False)
            for loss in losses:
                loss.backward()
            self.check_grads(model, reference)

    def test_gradients_that_nobody_asked_for(self) -> None:
        """Are None, not zeros, with which an optimizer would decay and move weights."""

        def of_input(each: nn.Module, x: torch.Tensor) -> None:
            x = x.clone().requires_grad_()
            torch.autograd.grad(square(each, x), x)

        def of_some(*names: str) -> Callable[[nn.Module, torch.Tensor], None]:
            return lambda each, x: square(each, x).backward(inputs=[each.get_parameter(name) for name in names])

        for model, reference in self.pairs():
            some = of_some("layers.1.up.weight", "layers.2.norm.bias")
            for asks in (of_input, some, of_some("layers.0.down.bias"), of_some("first.weight")):
                self.run_both(model, reference, asks, 0)
                self.check_grads(model, reference)
                model.zero_grad()
                reference.zero_grad()
            for seed, is_last in enumerate((False, True)):  # the sum of two microbatches that ask for different ones
                model.set_requires_gradient_sync(is_last)
                self.run_both(model, reference, some if is_last else of_some("layers.0.up.weight"), seed)
            self.check_grads(model, reference)
            self.run_both(model, reference, lambda each, x: square(each, x).backward(), 3)
            self.check_grads(model, reference)

    def test_second_backward_without_the_first_one(self) -> None:
        """A penalty on the gradient of an input alone: the second backward comes to no output of a block."""

        def penalty(each: nn.Module, x: torch.Tensor) -> None:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(each(x).sum() / len(x), x, create_graph=True)
            slope.sum(0).square().sum().backward()

        class Blocks(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    x = layer(x)
                return x

        for model, reference in self.pairs(lambda: Blocks(block=Linears)):
            for seed in range(2):
                self.run_both(model, reference, penalty, seed)
                self.check_grads(model, reference)
                self.run_both(model, reference, lambda each, x: square(each, x).backward(), seed)
                self.check_grads(model, reference)

    def test_second_derivatives_by_an_input(self) -> None:
        """Torch would find no way from a gradient to the input, and give zeros."""
        for policy in (*SCHEDULES.values(), MIXED):
            model = gtp_shard(seeded(Model), self.gtp_mesh(), schedule=policy)
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
            with self.assertRaisesRegex(RuntimeError, "does not compute second derivatives"):
                hvp(lambda x, model=model: square(model, x), x, torch.ones_like(x))

    def test_whole_parameters_read_outside_of_forward(self) -> None:
        def read(each: nn.Module, x: torch.Tensor) -> None:
            norm = each.layers[0].norm
            y = (each(x) if x[0, 0] != 0 else x) * full(norm.weight) + full(norm.bias).exp()
            (y * full(each.layers[2].up.bias)[:WIDTH]).square().mean().backward()

        for model, reference in self.pairs():
            for seed, is_last in enumerate((True, False, True)):
                model.set_requires_gradient_sync(is_last)
                self.run_both(model, reference, read, seed)
                if is_last:
                    self.check_grads(model, reference)

    def test_a_whole_parameter_that_no_rank_has_used(self) -> None:
        class Biases(Block):
            index: int | None = 0

            def __init__(self) -> None:
                super().__init__()
                self.biases = nn.ParameterList(torch.zeros(WIDTH) for _ in range(2))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) + self.biases[Biases.index or 0]

        for model, reference in self.pairs(lambda: Model(block=Biases)):
            for step in range(3):
                Biases.index = step % 2
                self.run_both(model, reference, lambda each, x: square(each, x).backward(), step)
                self.check_grads(model, reference)
                model.zero_grad()
                reference.zero_grad()

    def test_weights_that_no_rank_has_used(self) -> None:
        """Have no gradient, in later steps, too: an optimizer neither decays nor moves them. What one rank has used,
        and what was used in an earlier microbatch, has one."""

        class Chooses(Block):
            used: tuple[int, ...] = (0, 1)

            def __init__(self) -> None:
                super().__init__()
                self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                branches = self.left, self.right
                return super().forward(x) + sum(branches[index](x) for index in Chooses.used)

        def run(each: nn.Module, batch: torch.Tensor, used: tuple[int, ...]) -> None:
            Chooses.used = used
            square(each, batch).div(2 if each is reference else 1).backward()

        mesh = self.gtp_mesh()
        rank = mesh.get_local_rank()
        both, one, none = ((0, 1), (0, 1)), ((0,), (1,)), ((1,), (1,))
        for model, reference in self.pairs(lambda: Model(block=Chooses)):
            optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, reference)]
            for number, step in enumerate(((both,), (none,), (none, none), (both, none), (one, none), (none, one))):
                for index, used in enumerate(step):
                    model.set_requires_gradient_sync(index == len(step) - 1)
                    batches = rows(torch.Generator().manual_seed(number)).chunk(2)
                    run(model, batches[rank], used[rank])
                    for batch, of_rank in zip(batches, used, strict=True):
                        run(reference, batch, of_rank)
                self.check_grads(model, reference)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                assert_same_params(model, reference, rtol=1e-4, atol=1e-5)
            Chooses.used = 0, 1

    def test_blocks_that_use_weights_of_each_other(self) -> None:
        """All weights of a block may get their gradients after the backward of the block."""

        class Borrows(Block):
            other: list[Any]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = super().forward(x)
                return y + self.other[0].down(self.other[0].up(x)) if self.other else y

        def make() -> nn.Module:
            model: Any = Model(block=Borrows)
            for layer, other in zip(model.layers, (2, None, 0), strict=True):
                layer.other = [] if other is None else [model.layers[other]]
            return model

        reference = seeded(make)
        for policy in (CHOSEN, MIXED):
            model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=policy)
            for seed in range(3):
                model.zero_grad()
                reference.zero_grad()
                self.run_both(model, reference, lambda each, x: square(each, x).backward(), seed)
                self.check_grads(model, reference)

    def test_writes_without_a_version_are_refused(self) -> None:
        """Where the forward around a block writes, between ``unshard`` and ``reshard``, and by other memory."""

        class Writes(Model):
            write: Any = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if Writes.write is not None:
                    with torch.no_grad():
                        Writes.write(self.layers[1])
                return super().forward(x)

        def replace_data(weight: Any) -> None:
            weight.data = weight.data * 0.5

        x = torch.randn(2, WIDTH)
        whole = "Code has replaced the data of parameter 'layers.1.norm.weight'"
        in_block = "changed weights of block 'layers.1' through .data"
        for policy in (CHOSEN, MIXED, SCHEDULES["single weights"]):
            is_grouped = policy is not SCHEDULES["single weights"]
            for write in (lambda weight: weight.data.mul_(0.5), replace_data):
                for name in ("up.weight", "norm.weight"):
                    if name == "norm.weight" and not is_grouped and write is not replace_data:
                        continue  # it reaches the parameter
                    Writes.write = None
                    model: Any = gtp_shard(seeded(Writes), self.gtp_mesh(), schedule=policy)
                    square(model, x).backward()
                    message = in_block
                    if not is_grouped:
                        message = whole if name == "norm.weight" else "changed only the gathered copy"
                    Writes.write = lambda layer, write=write, name=name: write(layer.get_parameter(name))
                    with self.assertRaisesRegex(RuntimeError, message):
                        model(x)
                    Writes.write = None
                    square(model, x).backward()  # nothing is left of it
                    if is_grouped or name == "norm.weight":
                        model.unshard()
                        with torch.no_grad():
                            owner, _, attribute = name.rpartition(".")
                            write(getattr(model.layers[1].get_submodule(owner), attribute))
                        with self.assertRaisesRegex(RuntimeError, message):
                            model.reshard()
                        square(model, x).backward()

    def test_writes_to_shards_of_a_block_that_runs_are_refused(self) -> None:
        """It computes with what was gathered of them before. Where the model has read a weight, so does a later call
        of its block."""

        class MovesItself(Block):
            write: Any = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if MovesItself.write is not None:
                    with torch.no_grad():
                        MovesItself.write(list(self.parameters()))
                return super().forward(x)

        class Moves(Model):
            write: Any = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                norm = self.layers[1].up.weight.norm()
                if Moves.write is not None:
                    with torch.no_grad():
                        Moves.write(list(self.layers[1].parameters()))
                return super().forward(x) / norm

        def by_data(params: list[Any]) -> None:
            for param in params:
                param.data.mul_(0.5)

        def by_version(params: list[Any]) -> None:
            params[1].mul_(0.5)

        def check(mover: Any, model: nn.Module, reference: nn.Module) -> None:
            mover.write = lambda params: sum(param.norm() for param in params)
            self.run_both(model, reference, lambda each, x: square(each, x).backward(), 0)
            self.check_grads(model, reference)
            x = torch.randn(2, WIDTH)
            for write in (by_data, lambda params: torch._foreach_mul_(params, 0.5), by_version):
                mover.write = write  # in forwards that do not look at all bits
                with self.assertRaisesRegex(RuntimeError, r"block 'layers.\d' were written while its forward runs"):
                    model(x)
                mover.write = None
                square(model, x).backward()

        for mover, make in ((MovesItself, lambda: Model(block=MovesItself)), (Moves, Moves)):
            for model, reference in self.pairs(make):
                check(mover, model, reference)

    def test_new_data_of_a_full_weight_raises_in_the_next_forward_at_the_latest(self) -> None:
        """Also where the forward that writes does not look at bits: modules would compute with it for ever."""

        class Writes(Block):
            is_on = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.is_on:
                    self.up.weight.data = self.up.weight.data * 0.5
                return super().forward(x)

        for model, reference in self.pairs(lambda: Model(block=Writes)):  # they have run one forward
            for seed in range(4):
                self.run_both(model, reference, lambda each, x: square(each, x).backward(), seed)
            model.layers[0].is_on = True
            self.run_both(model, reference, square, 5)
            model.layers[0].is_on = False
            with self.assertRaisesRegex(RuntimeError, "in an earlier forward has changed weights of block 'layers.0'"):
                model(torch.randn(2, WIDTH))
            model.load_state_dict(reference.state_dict())
            for each in (model, reference):
                each.zero_grad()
            self.run_both(model, reference, lambda each, x: square(each, x).backward(), 6)
            self.check_grads(model, reference)

    def test_new_data_of_a_parameter_in_a_forward(self) -> None:
        class Replaces(Model):
            is_on = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if Replaces.is_on:
                    with torch.no_grad():
                        for param in self.layers[1].parameters():
                            param.data = param.data * 0.5
                return super().forward(x)

        Replaces.is_on = False
        model = gtp_shard(seeded(Replaces), self.gtp_mesh(), schedule=CHOSEN)
        x = torch.randn(2, WIDTH)
        square(model, x).backward()
        Replaces.is_on = True
        with self.assertRaisesRegex(RuntimeError, "A forward replaces the data of .*'layers.1.*block 'layers.1'"):
            model(x)
