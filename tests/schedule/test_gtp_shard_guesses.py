"""The first pass gathers by a guess, from the order of registration. A wrong one costs gathers, never a result."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn as nn
from common import GlooTest, check_training, fake_mesh
from counting import noted
from runtime_common import assert_idle, num_gathers, runtime_of, square_loss, weight_of
from schedules import explicit
from torch.testing._internal.common_utils import TestCase
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import gtp_shard, register_gtp_forward_method
from dtensor_gtp._schedule.guesses import Blocks, blocks_in, guess_backward, reordered
from dtensor_gtp._schedule.passes import Chain
from dtensor_gtp._schedule.plans import Traits, Window

WIDTH = 16
NUM_BLOCKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.unused, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.is_swapped = self.uses_all = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.down, self.up) if self.is_swapped else (self.up, self.down)
        y = torch.tanh(first(x))
        if self.uses_all:
            y = torch.tanh(self.unused(y))
        return x + second(y)


class Model(nn.Module):
    """Blocks between a table and a head, in ``order``. A ``head`` registered before the blocks is used last."""

    def __init__(self, order: tuple[int, ...] = tuple(range(NUM_BLOCKS))) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.table = nn.Embedding(8, WIDTH)
        self.order = order
        self.use_reentrant: bool | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for number in self.order:
            block = self.blocks[number]
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def make_tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(8, (8, 3), generator=generator)


class TestWrongGuesses(GlooTest):
    """Two steps beside one process, whatever the guess of the first one was."""

    world_size = 2

    def check(self, reference: nn.Module, is_nested: bool = False, **options: Any) -> None:
        mesh = self.gtp_mesh()
        for numbers in ({}, {"coalesce_nbytes": 0, "prefetch_nbytes": 2 * 4 * WIDTH**2}):
            schedule = explicit(min_shard_numel=0, **numbers, **options)

            def shard(model: nn.Module) -> nn.Module:
                for block in reversed(model.blocks) if is_nested else ():
                    gtp_shard(block, mesh, schedule=schedule)  # noqa: B023
                return gtp_shard(model, mesh, schedule=schedule)  # noqa: B023

            model = check_training(copy.deepcopy(reference), shard, mesh, make_tokens, square_loss, steps=2)
            assert_idle(model)

    def model(self, *order: int) -> Model:
        torch.manual_seed(0)
        return Model(order) if order else Model()

    def test_a_weight_of_each_block_is_not_used(self) -> None:
        """Also where nothing is kept of a guess, or less."""
        self.check(self.model())
        self.check(self.model(), is_nested=True)
        self.check(self.model(), keep_nbytes=8 * WIDTH**2)
        self.check(self.model(), keep_last=False, wgrad_first=False)

    def test_another_order(self) -> None:
        """Of blocks, some of which run several times or are recomputed, and of the weights of a block."""
        for order in ((3, 2, 1, 0), (2, 3), (0, 3, 1, 2)):
            self.check(self.model(*order))
        self.check(self.model(0, 0, 1, 2, 1, 3, 3), is_nested=True)
        for use_reentrant, order in ((False, (0, 2, 1, 3)), (True, ())):
            model = self.model(*order)
            model.use_reentrant = use_reentrant
            self.check(model)
        model = self.model()
        for block in model.blocks:
            block.is_swapped = block.uses_all = True
        self.check(model)

    def test_tied_weights(self) -> None:
        model = self.model()
        model.blocks[2].up.weight = model.blocks[0].up.weight
        model.head.weight = model.table.weight
        self.check(model)


class TestGuesses(TestCase):
    """One process of a group that communicates nothing counts gathers."""

    def setUp(self) -> None:
        super().setUp()
        self.mesh = self.enterContext(fake_mesh(4))

    def shard(self, model: Any, **options: Any) -> Any:
        return gtp_shard(model, self.mesh, schedule=explicit(min_shard_numel=0, **options))

    def launches(self, model: Model) -> list[int]:
        """Launches of a forward and its backward."""
        launched: list[Any] = []
        with noted(runtime_of(model).gathering, "_gather", launched.append):
            loss = model(torch.zeros(2, 3, dtype=torch.int64)).sum()
            num_in_forward = len(launched)
            loss.backward()
        assert_idle(model)
        return [num_in_forward, len(launched) - num_in_forward]

    def used_blocks(self, **options: Any) -> Model:
        model = Model()
        for block in model.blocks:
            block.uses_all = True
        return self.shard(model, **options)

    def test_blocks_of_the_first_pass_travel_together(self) -> None:
        """The table and the head travel alone, and so do the two weights that backward uses first in blocks."""
        model = self.used_blocks()
        self.assertEqual(self.launches(model), [3, 4])
        self.assertEqual(self.launches(model), [1, 1])
        self.assertEqual(self.launches(self.used_blocks(prefetch_depth=0)), [14, 13])
        recomputed = self.used_blocks()
        recomputed.use_reentrant = False
        first, second = self.launches(recomputed), self.launches(recomputed)
        self.assertEqual(first, [3, second[1] + 4])
        self.assertEqual(second, [1, 1])  # what is recomputed stays for its gradients

    def test_an_unused_weight_leaves_when_its_block_is_passed(self) -> None:
        model = self.shard(Model(), coalesce_nbytes=0)
        pending: list[int] = []
        unused = [weight_of(model, f"blocks.{number}.unused.weight") for number in range(NUM_BLOCKS)]
        for block in model.blocks:
            block.up.register_forward_hook(
                lambda *_: pending.append(sum(len(weight.for_forward.pending) for weight in unused))
            )
        for coming in ([NUM_BLOCKS - number for number in range(NUM_BLOCKS)], [0] * NUM_BLOCKS):
            model(torch.zeros(2, 3, dtype=torch.int64))
            self.assertEqual(pending, coming)
            pending.clear()
        self.launches(model)
        self.assertEqual({weight.for_forward.num_gathers for weight in unused}, {1})

    def test_what_may_never_be_gathered_is_not_guessed(self) -> None:
        """Tables, heads outside of blocks, and what is larger than the window."""

        class Tables(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tables = nn.ModuleList([nn.Embedding(8, WIDTH) for _ in range(2)])
                self.heads = nn.ModuleList([nn.Linear(WIDTH, 64 * WIDTH, bias=False) for _ in range(2)])
                self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.blocks[0](x)

        model = self.shard(Tables(), prefetch_nbytes=8 * WIDTH**2)
        model(torch.ones(2, WIDTH)).sum().backward()
        used = {name.removesuffix(".weight"): count for name, count in num_gathers(model).items() if count}
        self.assertEqual(used, {"blocks.0": 1, "blocks.1": 1})

    def test_other_methods_are_not_guessed(self) -> None:
        class WithMethod(Model):
            def embed(self, tokens: torch.Tensor) -> torch.Tensor:
                return self.table(tokens)

        model = self.shard(WithMethod())
        register_gtp_forward_method(model, "embed")
        model.embed(torch.zeros(2, 3, dtype=torch.int64))
        used = [name for name, count in num_gathers(model).items() if count]
        self.assertEqual(used, ["table.weight"])


# --- the guess itself -------------------------------------------------------------------------------------------------

# Two blocks of two weights, between a table and a head. Backward gathers other data of weight 4.
USES = (0, 1, 2, 3, 4, 5)
BLOCK_OF = {1: 0, 2: 0, 3: 1, 4: 1}
IN_BACKWARD = {1: 1, 2: 2, 3: 3, 4: 6}


def first_pass(*blocks: list[int]) -> Chain:
    chain = Chain(Window(2), lambda: [Traits(1) for _ in range(80)])
    chain.begin()
    chain.guess(list(blocks) or [[1, 2], [3, 4]])
    return chain


def windows(chain: Chain, uses: tuple[int, ...]) -> list[list[int]]:
    """What is in flight after each use."""
    found = []
    for use in uses:
        chain.advance(use)
        found.append([chain.plan.uses[position] for positions in chain.expected() for position in positions])
    return found


def backward_after(*seen: int, uses: tuple[int, ...] = USES) -> Blocks | None:
    return guess_backward(uses, BLOCK_OF, IN_BACKWARD, seen)


def test_a_backward_is_guessed_from_its_first_uses_in_blocks() -> None:
    assert backward_after(5, 6, 3) == [[6, 3], [2, 1]]
    assert backward_after(3, 4) == [[3, 4, 6, 3], [1, 2, 2, 1]], "each block is recomputed"
    assert guess_backward((0, 1), {0: 0, 1: 1}, {0: 0, 1: 1}, (1, 1)) == [[1, 1], [0, 0]], "blocks of one weight"
    assert guess_backward((0, 1), {0: 0, 1: 1}, {0: 0, 1: 1}, (1, 0)) == [[1], [0]]
    for seen in ((), (5,), (5, 6), (3, 5)):
        assert backward_after(*seen) is None, "more uses decide"
    for seen in ((6, 2), (3, 6), (4, 3), (1, 2)):
        assert backward_after(*seen) == [], "it begins otherwise"
    assert backward_after(6, 3, uses=(0, 5)) == []


def test_a_first_pass_follows_its_guess() -> None:
    """What is in flight after each use."""
    for blocks, uses, found, num_deviations in (
        # beside uses that are not in it
        ([[1, 2], [3, 4]], (0, 1, 2, 3, 4, 5), [[1, 2], [2, 3], [3, 4], [4], [], []], 2),
        # a block is passed over, and a weight with its block
        ([[1, 2], [3, 4], [5, 6]], (1, 2, 5, 6), [[2, 3], [3, 4], [6], []], 1),
        ([[1, 2, 3], [4, 5, 6]], (1, 3, 4, 6), [[2, 3], [2, 4], [6, 5], [5]], 2),
        # later blocks follow the order of the first one
        (
            *([[1, 2, 3], [4, 5, 6], [7, 8]], (1, 3, 2, 4, 6, 5, 7, 8)),
            *([[2, 3], [2, 4], [4, 6], [6, 5], [5, 7], [7, 8], [8], []], 1),
        ),
    ):
        chain = first_pass(*blocks)
        assert windows(chain, uses) == found
        assert chain.num_deviations == num_deviations, blocks
        chain.end()
        assert chain.plan.uses == uses


def test_a_use_is_moved_in_blocks_of_one_length_from_there_on() -> None:
    blocks = [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9], [10, 11, 12]]
    assert reordered(blocks, cursor=6, position=7) == [[0, 1, 2], [3, 4], [5, 7, 6], [8, 9], [10, 12, 11]]
    assert reordered(blocks, cursor=0, position=2) == [[2, 0, 1], [3, 4], [7, 5, 6], [8, 9], [12, 10, 11]]
    assert reordered(blocks, cursor=2, position=3) is None
    assert blocks[0] == [0, 1, 2]


def test_a_use_behind_its_block_ends_the_guess() -> None:
    chain = first_pass()
    assert windows(chain, (3, 1, 2, 4)) == [[4], [], [], []]
    chain.end()
    assert chain.plan.uses == (3, 1, 2, 4)
    assert windows(chain, (3, 4, 1, 2)) == [[1, 2], [], [], []], "a recorded plan is kept"
    chain.end()
    assert chain.plan.uses == (3, 4, 1, 2)


def test_a_guess_that_changes_again_and_again_ends() -> None:
    blocks = [[2 * number, 2 * number + 1] for number in range(40)]
    chain = first_pass(*blocks)
    found = windows(chain, tuple(use for n, block in enumerate(blocks) for use in block[:: -1 if n % 2 else 1]))
    assert 20 < sum(map(bool, found)) < 40


def test_a_guess_may_come_after_the_first_uses() -> None:
    chain = Chain(Window(2), lambda: [Traits(1) for _ in range(8)])
    chain.begin()
    assert windows(chain, (5, 4)) == [[], []]
    chain.guess([[4, 3], [2, 1]], num_past=1)
    assert windows(chain, (3, 2, 1)) == [[2, 1], [1], []]
    chain.end()
    assert chain.plan.uses == (5, 4, 3, 2, 1)


def test_only_a_first_pass_is_guessed() -> None:
    chain = Chain(Window(2), lambda: [Traits(1)])
    assert chain.may_guess
    chain.begin()
    chain.end()  # it has used nothing
    assert not chain.may_guess
    assert not first_pass().may_guess


def test_blocks_are_modules_of_one_class_in_a_container() -> None:
    first, second, other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Conv1d(2, 2, 1)
    layers = nn.ModuleList([first, other, second])
    assert blocks_in(layers) == [first, second]
    assert blocks_in(nn.ModuleDict({"a": first, "b": second}), [first]) == []
    assert blocks_in(nn.Bilinear(2, 2, 2)) == []
