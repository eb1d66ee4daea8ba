"""``dtensor_gtp.optim.gathered`` with optimizers that look at more than one parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import GlooTest, assert_same_params, full, rows_of_rank
from runtime_common import WIDTH, make_rows

from dtensor_gtp import SchedulePolicy, gtp_shard
from dtensor_gtp.optim import gathered


class Net(nn.Module):
    """A matrix, vectors that stay whole, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.norm(self.up(x))) * self.scale
        return y


class Draws(torch.optim.Optimizer):
    """Adds noise, and divides by the norm of all gradients it has."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = sum(float(param.grad.norm()) for param in params)
        for param in params:
            param.add_(param.grad / norm + 0.01 * torch.randn_like(param), alpha=-0.1)


class ByLoss(torch.optim.Optimizer):
    """Its steps are as large as the loss."""

    def __init__(self, params: Any, lr: float = 0.1, ascends: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.ascends = ascends

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        if self.ascends:  # as SAM does
            for param in params:
                param.add_(param.grad)
        with torch.enable_grad():
            loss = closure()
        for param in params:
            param.sub_(param.grad * float(loss) * 0.1)
        return loss


class TestGatheredOptimizer(GlooTest):
    def pair(self) -> tuple[Any, Net]:
        torch.manual_seed(0)
        reference = Net()
        schedule = SchedulePolicy(min_shard_numel=2 * WIDTH + 1)
        return gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=schedule), reference

    def test_copies_of_whole_parameters_stay_equal(self) -> None:
        model, _ = self.pair()
        optimizer = gathered(Draws)(model.parameters())
        torch.manual_seed(self.rank)
        for step in range(3):
            optimizer.zero_grad()
            model(rows_of_rank(make_rows(step), self.gtp_mesh())).square().mean().backward()
            optimizer.step()
        for name, param in model.named_parameters():
            of_first = full(param).detach().clone()
            dist.broadcast(of_first, 0)
            self.assertEqual(full(param), of_first, msg=name)

    def closure(self, model: nn.Module, optimizer: Any, x: torch.Tensor, losses: list[Any]) -> Callable[[], Any]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            return loss

        return closure

    def test_a_closure_gives_the_loss_of_all_ranks(self) -> None:
        model, reference = self.pair()
        for each, cls, make in (
            (model, gathered(ByLoss), lambda step: rows_of_rank(make_rows(step), self.gtp_mesh())),
            (reference, ByLoss, make_rows),
        ):
            optimizer = cls(each.parameters())
            for step in range(3):
                losses: list[Any] = []
                returned = optimizer.step(self.closure(each, optimizer, make(step), losses))
                self.assertEqual([returned], losses)
        assert_same_params(model, reference, rtol=1e-4, atol=1e-6)

    def test_one_that_evaluates_the_model_in_the_middle_is_refused(self) -> None:
        """On all ranks, also on one that owns no parameter."""
        model = gtp_shard(nn.Linear(WIDTH, WIDTH, bias=False), self.gtp_mesh())
        optimizer = gathered(ByLoss)(model.parameters(), ascends=True)
        with self.assertRaisesRegex(NotImplementedError, "gathered does not support ByLoss, which evaluates the model"):
            optimizer.step(self.closure(model, optimizer, make_rows(0), []))
