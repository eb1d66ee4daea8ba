"""Who hears of optimizer steps."""

import unittest

import pytest
import torch

from dtensor_gtp._schedule.steps import optimizer_steps


class Broken:
    """A runtime that finds a lost write."""

    def __init__(self) -> None:
        self.num_steps = 0

    def note_step(self, updated: set[int]) -> None:
        self.num_steps += 1
        raise RuntimeError("a write was lost")


class TestSteps(unittest.TestCase):
    def test_an_error_of_one_does_not_hide_the_step_from_others(self) -> None:
        """They would take what they have gathered before for the present values."""
        param = torch.nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        watchers = [Broken() for _ in range(3)]
        for watcher in watchers:
            optimizer_steps().watchers.add(watcher)
        with pytest.raises(RuntimeError, match="a write was lost"):
            torch.optim.SGD([param], lr=0.1).step()
        self.assertEqual([watcher.num_steps for watcher in watchers], [1, 1, 1])
