"""What would be wrong without a word where weights of blocks are groups: gradients that come late, early or not at all.

Each is computed as in one process, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from common import ALL, assert_same_params
from pairs_common import CHOSEN, MIXED, POLICIES, Pair, PairTest, halve_data, replace_data
from passes_common import NUM_ROWS, WIDTH, Block, Model, mean, usual
from runtime_common import make_rows


class Blocks(Model):
    """Without its first and last layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def with_blocks(block: type[nn.Module], kind: type[Model] = Model, num: int = 2) -> Callable[[], Model]:
    def make() -> Model:
        model = kind()
        model.blocks = nn.ModuleList(block() for _ in range(num))
        return model

    return make


class Linears(nn.Sequential):
    """Its derivative by an input does not depend on the input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class TestSilentGroups(PairTest):
    def test_second_backward_without_the_first_one(self) -> None:
        """A penalty on the gradient of an input alone: the second backward comes to no output of a block."""

        def penalty(each: nn.Module, x: torch.Tensor) -> None:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(each(x).sum() / len(x), x, create_graph=True)
            slope.sum(0).square().sum().backward()

        for pair in self.pairs(with_blocks(Linears, Blocks, 3), (CHOSEN, MIXED)):
            for seed in range(2):
                self.check(pair, penalty, seed)
                self.check(pair, usual, seed)

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

        def run(each: nn.Module, batch: torch.Tensor, used: tuple[int, ...], divisor: int) -> None:
            Chooses.used = used
            mean(each(batch)).div(divisor).backward()

        rank = self.gtp_mesh().get_local_rank()
        both, one, none = ((0, 1), (0, 1)), ((0,), (1,)), ((1,), (1,))
        for model, reference in self.pairs(with_blocks(Chooses), (CHOSEN, MIXED)):
            optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, reference)]
            for number, step in enumerate(((both,), (none,), (none, none), (both, none), (one, none), (none, one))):
                for index, used in enumerate(step):
                    model.set_requires_gradient_sync(index == len(step) - 1)
                    batches = make_rows(number, NUM_ROWS, WIDTH).chunk(2)
                    run(model, batches[rank], used[rank], 1)
                    for batch, of_rank in zip(batches, used, strict=True):
                        run(reference, batch, of_rank, 2)
                assert_same_params(model, reference, "grad", rtol=1e-4, atol=1e-5)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                assert_same_params(model, reference, rtol=1e-4, atol=1e-5)
            Chooses.used = 0, 1

    def test_blocks_that_use_weights_of_each_other(self) -> None:
        """All weights of a block may get their gradients after the backward of the block."""

        class Borrows(Block):
            other: tuple[Any, ...] = ()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = super().forward(x)
                return y + self.other[0].down(self.other[0].up(x)) if self.other else y

        def make() -> nn.Module:
            model = with_blocks(Borrows)()
            first, second = model.blocks
            first.other, second.other = (second,), (first,)
            return model

        for pair in self.pairs(make, (CHOSEN, MIXED), is_first=True):
            for seed in range(3):
                self.check(pair, usual, seed)

    def test_writes_without_a_version_are_refused(self) -> None:
        """Where the forward around a block writes, between ``unshard`` and ``reshard``, and by other memory."""

        class Writes(Model):
            write: Any = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if Writes.write is not None:
                    with torch.no_grad():
                        Writes.write(self.blocks[1])
                return super().forward(x)

        x = make_rows(0, 2, WIDTH)
        Writes.write = None
        for policy in POLICIES:
            is_grouped = policy is not ALL
            for owner, write in (
                ("up", halve_data),
                ("up", replace_data),
                ("norm", replace_data),
                ("norm", halve_data),
            ):
                if is_grouped:
                    message = "changed weights of block 'blocks.1' through .data"
                elif owner == "up":
                    message = "changed only the gathered copy"
                elif write is replace_data:
                    message = "Code has replaced the data of parameter 'blocks.1.norm.weight'"
                else:
                    continue  # it reaches the parameter
                ((model, _),) = self.pairs(Writes, (policy,))
                Writes.write = lambda block, write=write, owner=owner: write(block.get_submodule(owner).weight)
                with self.assertRaisesRegex(RuntimeError, message):
                    model(x)
                Writes.write = None
                usual(model, x)  # nothing is left of it
                if is_grouped or owner == "norm":
                    model.unshard()
                    with torch.no_grad():
                        write(model.blocks[1].get_submodule(owner).weight)
                    with self.assertRaisesRegex(RuntimeError, message):
                        model.reshard()
                    usual(model, x)

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
                norm = self.blocks[1].up.weight.norm()
                if Moves.write is not None:
                    with torch.no_grad():
                        Moves.write(list(self.blocks[1].parameters()))
                return super().forward(x) / norm

        def by_data(params: list[Any]) -> None:
            for param in params:
                halve_data(param)

        def check(mover: Any, pair: Pair) -> None:
            mover.write = lambda params: sum(param.norm() for param in params)
            self.check(pair)
            for write in (by_data, lambda params: torch._foreach_mul_(params, 0.5), lambda params: params[2].mul_(0.5)):
                mover.write = write  # in forwards that do not look at all bits
                with self.assertRaisesRegex(RuntimeError, r"block 'blocks.\d' were written while its forward runs"):
                    pair[0](make_rows(0, 2, WIDTH))
                mover.write = None
                usual(pair[0], make_rows(0, 2, WIDTH))

        for mover, make in ((MovesItself, with_blocks(MovesItself)), (Moves, Moves)):
            for pair in self.pairs(make, (CHOSEN, MIXED)):
                check(mover, pair)

    def test_new_data_of_a_full_weight_raises_in_the_next_forward_at_the_latest(self) -> None:
        """Also where the forward that writes does not look at bits: modules would compute with it for ever."""

        class Writes(Block):
            is_on = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.is_on:
                    replace_data(self.up.weight)
                return super().forward(x)

        for pair in self.pairs(with_blocks(Writes), (CHOSEN, MIXED)):  # they have run one forward
            model, reference = pair
            for seed in range(4):
                self.run_both(pair, usual, seed)
            model.blocks[0].is_on = True
            model(make_rows(5, 2, WIDTH))
            model.blocks[0].is_on = False
            with self.assertRaisesRegex(RuntimeError, "in an earlier forward has changed weights of block 'blocks.0'"):
                model(make_rows(5, 2, WIDTH))
            model.load_state_dict(reference.state_dict())
            model.zero_grad()
            reference.zero_grad()
            self.check(pair)

    def test_new_data_of_a_parameter_in_a_forward(self) -> None:
        class Replaces(Model):
            is_on = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.is_on:
                    with torch.no_grad():
                        for param in self.blocks[1].parameters():
                            replace_data(param)
                return super().forward(x)

        ((model, _),) = self.pairs(Replaces, (CHOSEN,))
        model.is_on = True
        with self.assertRaisesRegex(RuntimeError, "A forward replaces the data of .*'blocks.1.*block 'blocks.1'"):
            model(make_rows(0, 2, WIDTH))
