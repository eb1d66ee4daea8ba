"""What would be wrong without a word where weights of blocks are groups: gradients that come late, early or not at all.

Each is computed as in one process, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn as nn
from common import ALL, check_update
from pairs_common import CHOSEN, MIXED, POLICIES, Pair, PairTest, blocks, halve_data, replace_data
from passes_common import NUM_ROWS, WIDTH, Block, Model, mean, usual
from runtime_common import make_rows, members_of
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.utils.checkpoint import checkpoint


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


class Writes(Block):
    """Calls ``write`` with itself, and computes."""

    write: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.write is not None:
            with torch.no_grad():
                self.write(self)
        return super().forward(x)


class ModelWrites(Model):
    """Reads a weight of its second block, calls ``write`` with the block, and computes."""

    write: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.blocks[1].up.weight.norm()
        if self.write is not None:
            with torch.no_grad():
                self.write(self.blocks[1])
        return super().forward(x) / norm


class ReadsInContext(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with allow_mutation_on_saved_tensors():
            norm = self.blocks[1].up.weight.norm()
        return super().forward(x) / norm


class Linears(nn.Sequential):
    """Its derivative by an input does not depend on the input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class TestSilentGroups(PairTest):
    def test_a_context_in_which_saved_tensors_may_be_written_to_is_refused(self) -> None:
        """torch would copy weights while they are freed, before a gather fills them again."""

        def step(each: nn.Module, x: torch.Tensor) -> None:
            with allow_mutation_on_saved_tensors():
                mean(each(x)).backward()

        message = "does not support block 'blocks.[01]' in torch.autograd.graph.allow_mutation_on_saved_tensors"
        x = torch.randn(4, WIDTH)
        for kind, run in ((Model, step), (ReadsInContext, usual)):
            for model, _ in self.pairs(kind, (CHOSEN, MIXED), is_first=True):
                with self.subTest(kind=kind):
                    with torch.no_grad():
                        model(x)  # which autograd saves nothing of
                    with self.assertRaisesRegex(NotImplementedError, message):
                        run(model, x)
        for pair in self.pairs(Model, (ALL,)):  # weights that are gathered one by one
            self.check(pair, step)

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
                check_update(model, reference, optimizers, rtol=1e-4, atol=1e-5)
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
        """Where the forward around a block writes, or that of the block, between ``unshard`` and ``reshard``, and by
        other memory."""
        x = make_rows(0, 2, WIDTH)
        for policy, owner, write in product(POLICIES, ("up", "norm"), (halve_data, replace_data)):
            is_grouped = policy is not ALL
            if is_grouped:
                message = "changed weights of block 'blocks.1' through .data"
            elif owner == "up":
                message = "changed only the gathered copy"
            elif write is replace_data:
                message = "Code has replaced the data of parameter 'blocks.1.norm.weight'"
            else:
                continue  # it reaches the parameter

            def write_to(block: Any, owner: str = owner, write: Any = write) -> None:
                write(block.get_submodule(owner).weight)

            ((model, _),) = self.pairs(ModelWrites, (policy,))
            model.write = write_to
            with self.assertRaisesRegex(RuntimeError, message):
                model(x)
            model.write = None
            usual(model, x)  # nothing is left of it
            if is_grouped or owner == "norm":
                model.unshard()
                with torch.no_grad():
                    write_to(model.blocks[1])
                with self.assertRaisesRegex(RuntimeError, message):
                    model.reshard()
                usual(model, x)
        for name in ("up.weight", "norm.bias", "up.bias"):
            (pair,) = self.pairs(with_blocks(Writes), (CHOSEN,))
            pair[0].blocks[1].write = lambda block, name=name: block.get_parameter(name).data.add_(0.5)
            with self.assertRaisesRegex(RuntimeError, "changed weights of block 'blocks.1' through .data"):
                pair[0](x)
            pair[0].blocks[1].write = None
            self.check(pair)

    def test_writes_to_shards_of_a_block_that_runs_are_refused(self) -> None:
        """It computes with what was gathered of them before. Where the model has read a weight, so does a later call
        of its block."""

        def norms(block: nn.Module) -> None:
            sum(param.norm() for param in block.parameters())

        def by_data(block: nn.Module) -> None:
            for param in block.parameters():
                halve_data(param)

        def by_foreach(block: nn.Module) -> None:
            torch._foreach_mul_(list(block.parameters()), 0.5)

        def by_op(block: nn.Module) -> None:
            list(block.parameters())[2].mul_(0.5)

        for make in (with_blocks(Writes), ModelWrites):
            for pair in self.pairs(make, (CHOSEN, MIXED)):
                writers = [each if make is ModelWrites else each.blocks[0] for each in pair]
                for writer in writers:
                    writer.write = norms
                self.check(pair)
                for writers[0].write in (by_data, by_foreach, by_op):  # in forwards that do not look at all bits
                    with self.assertRaisesRegex(RuntimeError, r"block 'blocks.\d' were written while its forward runs"):
                        pair[0](make_rows(0, 2, WIDTH))
                    writers[0].write = None
                    usual(pair[0], make_rows(0, 2, WIDTH))

    def test_new_data_of_a_full_weight_raises_in_the_next_forward_at_the_latest(self) -> None:
        """Also where the forward that writes does not look at bits: modules would compute with it for ever."""
        for pair in self.pairs(with_blocks(Writes), (CHOSEN, MIXED)):  # they have run one forward
            model, reference = pair
            for seed in range(4):
                self.run_both(pair, usual, seed)
            model.blocks[0].write = lambda block: replace_data(block.up.weight)
            model(make_rows(5, 2, WIDTH))
            model.blocks[0].write = None
            with self.assertRaisesRegex(RuntimeError, "in an earlier forward has changed weights of block 'blocks.0'"):
                model(make_rows(5, 2, WIDTH))
            model.load_state_dict(reference.state_dict())
            model.zero_grad()
            reference.zero_grad()
            self.check(pair)

    def test_new_data_of_a_parameter_in_a_forward(self) -> None:
        ((model, _),) = self.pairs(ModelWrites, (CHOSEN,))
        model.write = lambda block: [replace_data(param) for param in block.parameters()]
        with self.assertRaisesRegex(RuntimeError, "A forward replaces the data of .*'blocks.1.*block 'blocks.1'"):
            model(make_rows(0, 2, WIDTH))


class Holder:
    """A container that nobody knows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Wraps(Block):
    def forward(self, x: Any) -> Any:
        return Holder(super().forward(x.x if isinstance(x, Holder) else x))


class Unwraps(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Wraps(), Wraps())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).x


class TestPartsOfBlocks(PairTest):
    """Blocks, and layers of them, where others call them than the model."""

    def check_without_grad_too(self, pair: Pair, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        with torch.no_grad():
            torch.testing.assert_close(*(forward(each, torch.ones(4, 8)) for each in pair))
        self.check(pair, lambda each, x: mean(forward(each, x)).backward())

    def test_layers_that_are_called_alone(self) -> None:
        """Before and between forwards of the model, beside one, in a checkpoint, compiled, and after ``unshard``."""

        def alone(each: Any, x: torch.Tensor) -> torch.Tensor:
            return each[1].up(each[1].norm(x))

        def beside(each: Any, x: torch.Tensor) -> torch.Tensor:
            early = each[1].up(x)
            return torch.cat([early, each(x), each[0].down(early)], 1)

        def recomputed(each: Any, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(each[1].up, x, use_reentrant=False)

        def compiled(each: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.compile(each[1].up, backend="aot_eager")(x)

        for policy, is_first in ((CHOSEN, True), (MIXED, False)):
            for pair in self.pairs(blocks, (policy,), is_first=is_first):
                for forward in (alone, beside, recomputed, compiled):
                    self.check_without_grad_too(pair, forward)
                pair[0].unshard()
                self.check_without_grad_too(pair, alone)
                pair[0].reshard()
                self.check_without_grad_too(pair, alone)

    def test_outputs_in_objects(self) -> None:
        """Nothing that pytree finds shows when the backward of a block begins."""
        for pair in self.pairs(Unwraps, (CHOSEN, MIXED)):
            self.check(pair)
        for pair in self.pairs(blocks, (CHOSEN, MIXED)):
            self.check(pair, lambda each, x: mean(torch.vmap(each)(x)).backward())

    def test_a_block_that_returns_a_detached_tensor_is_refused(self) -> None:
        for pair in self.pairs(blocks, (CHOSEN, MIXED)):
            hook = pair[0][1].register_forward_hook(lambda _, args, y: y.detach().requires_grad_())
            with self.assertRaisesRegex(NotImplementedError, "'1' returns a detached tensor"):
                pair[0](torch.randn(2, 8))
            hook.remove()
            self.check(pair)

    def test_the_first_use_of_all(self) -> None:
        """Makes the groups while a layer runs."""
        for pair in self.pairs(blocks, (CHOSEN, MIXED), is_first=True):
            self.run_both(pair, lambda each, x: usual(each[0].up, x))
            assert members_of(pair[0]).groups
            self.check_grads(pair)
