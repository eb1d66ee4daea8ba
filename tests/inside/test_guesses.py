"""The plan of a first pass, guessed from the order in which weights were registered. No process group in here."""

from __future__ import annotations

import torch.nn as nn

from dtensor_gtp._schedule.guesses import Blocks, blocks_in, guess_backward, reordered
from dtensor_gtp._schedule.passes import Chain
from dtensor_gtp._schedule.plans import Traits, Window

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
