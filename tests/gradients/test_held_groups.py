"""Weights of blocks that autograd reads where no backward of the block begins: second derivatives, code outside of the
block, outputs in objects. Other passes in between must not free them, which would end the process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from pairs_common import CHOSEN, MIXED, PairTest
from passes_common import NUM_ROWS, WIDTH, Block, Model, mean, usual
from runtime_common import make_rows, members_of
from torch.func import grad, hessian, vmap
from torch.utils.checkpoint import checkpoint

Step = Callable[[Any, torch.Tensor], Any]


def only_blocks(block: type[nn.Module] = Block) -> Callable[[], nn.Module]:
    """A model in which all weights are in groups."""
    return lambda: nn.Sequential(block(), block(), block())


def slope_of(each: nn.Module, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the gradient of an input, with a graph."""
    x = (x * scale).requires_grad_()
    y = each(x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y, slope


def evaluate(each: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        each(x)


class SecondDerivatives:
    """Steps. Each forward and backward of a step is another pass than the one that made the graph."""

    def other_forwards(each: Any, x: torch.Tensor) -> None:
        _, slope = slope_of(each, x, 0.5)
        (each(x).mean() - mean(each(x * 0.3)) + mean(slope)).backward()

    def an_evaluation(each: Any, x: torch.Tensor) -> None:
        y, slope = slope_of(each, x)
        evaluate(each, x)
        (mean(slope) + mean(y)).backward()

    def two_graphs(each: Any, x: torch.Tensor) -> None:
        slopes = [slope_of(each, x, scale)[1] for scale in (0.5, 1.0)]
        (mean(slopes[0]) + mean(slopes[1])).backward()

    def two_backwards(each: Any, x: torch.Tensor) -> None:
        _, slope = slope_of(each, x)
        mean(slope).backward(retain_graph=True)
        slope.mean().backward()

    def products_with_a_hessian(each: Any, x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        products = [torch.autograd.grad(slope, x, vector, retain_graph=True)[0] for vector in (x.detach(), x.square())]
        usual(each, x.detach())
        return sum(products)

    def third_derivatives(each: Any, x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        mean(second).backward()

    def a_graph_that_nobody_uses(each: Any, x: torch.Tensor) -> None:
        y, _ = slope_of(each, x)
        mean(y).backward()


class Reads(Model):
    """Reads weights of its second block, as a penalty does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[1]
        scale = block.up.weight.square().mean() + block.norm.weight.tanh().sum()
        return super().forward(x) * scale + (x @ block.up.weight.t()).mean(1, keepdim=True)


class Given(nn.Module):
    """Its blocks return weights beside what they compute: one as it is, a view of one, and a whole parameter."""

    class Block(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), {"up": self.up.weight, "row": self.down.weight[0]}, [self.norm.bias]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Given.Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = torch.zeros(())
        for block in self.blocks:
            x, weights, others = block(x)
            penalty = penalty + sum(weight.square().mean() for weight in (*weights.values(), *others))
        return x.square() + penalty


class Linears(nn.Module):
    """Its derivative by an input does not depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Box:
    """Hides a tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Boxed(Block):
    def forward(self, x: Any) -> Any:
        if isinstance(x, Box):
            x = x.value
        return Box(super().forward(x))


class BoxedBlocks(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Boxed() for _ in range(3)))

    def forward(self, x: Any) -> Any:
        return super().forward(x).value


def evaluation_before_backward(each: Any, x: torch.Tensor) -> None:
    loss = mean(each(x))
    evaluate(each, x * 2)
    loss.backward()


def two_forwards_then_two_backwards(each: Any, x: torch.Tensor) -> None:
    losses = [mean(each(x)), mean(each(x * 2))]
    for loss in losses:
        loss.backward()


class TestHeldGroups(PairTest):
    def test_second_derivatives_with_passes_in_between(self) -> None:
        steps = [step for name, step in vars(SecondDerivatives).items() if not name.startswith("__")]
        for pair in self.pairs(only_blocks(), (CHOSEN, MIXED)):
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in pair]
            for seed, step in enumerate(steps):
                ours, expected = self.run_both(pair, step, seed)
                if expected is not None:
                    rank = self.gtp_mesh().get_local_rank()
                    torch.testing.assert_close(ours, expected.chunk(2)[rank], rtol=1e-4, atol=1e-5)
                for optimizer in optimizers:
                    optimizer.step()
                self.check_grads(pair)
                # The optimizer has ended what was held.
                groups = members_of(pair[0]).groups
                self.assertEqual([group.leaves.storage.nbytes() for group in groups], [0, 0, 0], step.__name__)

    def test_reads_outside_of_a_block_and_outputs_in_objects(self) -> None:
        for make in (Reads, BoxedBlocks, Given):
            for pair in self.pairs(make, (CHOSEN, MIXED)):
                for seed, step in enumerate((evaluation_before_backward, two_forwards_then_two_backwards, usual)):
                    self.check(pair, step, seed)

    def test_parts_of_blocks_that_the_root_checkpoints(self) -> None:
        """Of a block that has no call: another forward comes before their recomputation."""

        class Parts(nn.Sequential):
            def __init__(self, *, checkpoints_both: bool) -> None:
                super().__init__(Linears(), Linears(), Linears())
                self.checkpoints_both = checkpoints_both

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self:
                    up = checkpoint(lambda y, block=block: block.up(y.tanh()), x, use_reentrant=False)
                    if self.checkpoints_both:
                        x = x + checkpoint(lambda y, block=block: block.down(y.tanh()), up, use_reentrant=False)
                    else:
                        x = x + block.down(up)
                return x

        for checkpoints_both in (False, True):
            for pair in self.pairs(partial(Parts, checkpoints_both=checkpoints_both), (CHOSEN, MIXED)):
                for seed, step in enumerate((evaluation_before_backward, two_forwards_then_two_backwards, usual)):
                    self.check(pair, step, seed)

    def test_the_first_calls_are_those_of_layers(self) -> None:
        """Of one that is no part of a block, which is no pass, and of parts."""
        for pair in self.pairs(policies=(CHOSEN, MIXED), is_first=True):
            for call in (
                lambda each, x: each.first(x),
                lambda each, x: each.blocks[1].up(x),
                lambda each, x: each.blocks[1].raw(x),
            ):
                ours, expected = self.run_both(pair, call)
                rank = self.gtp_mesh().get_local_rank()
                torch.testing.assert_close(ours, expected.chunk(self.gtp_mesh().size())[rank])
            self.check(pair)

    def test_what_is_held_follows_the_values(self) -> None:
        """After an optimizer step the graph of the old values is refused, also if it comes to no output of a block."""
        for model, _ in self.pairs(only_blocks(Linears), (CHOSEN,)):
            x = make_rows(0, 4, WIDTH)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            usual(model, x)
            x.requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            optimizer.step()
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                mean(slope).backward()
            x = x.detach()
            before = model(x).detach()
            slope_of(model, x)
            for param in model.parameters():
                param.data.mul_(0.5)
            self.assertFalse(torch.allclose(model(x), before))

    def test_one_rank_looks_at_parameters_and_others_are_replaced(self) -> None:
        """While a graph is there. What is gathered depends on neither."""
        for pair in self.pairs(Reads, (CHOSEN,)):
            self.run_both(pair)
            if self.rank == 0:
                sum(float(param.data.to_local().norm()) for param in pair[0].parameters())
            self.run_both(pair)
            self.check_grads(pair)
            for each in pair:
                losses = mean(each(make_rows(1, 4, WIDTH)))  # it keeps the memory of the old parameters
                each.to(torch.float64)
            batch = make_rows(2, NUM_ROWS, WIDTH).double()
            for each, mine in zip(pair, (batch.chunk(2)[self.rank], batch), strict=True):
                usual(each, mine)
            self.check_grads(pair)
            del losses

    def test_gradients_that_were_not_asked_for_stay_as_they_are(self) -> None:
        for model, _ in self.pairs(only_blocks(), (CHOSEN,)):
            x = make_rows(0, 4, WIDTH)
            usual(model, x)
            slope_of(model, x)
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            self.assertGreater(len(grads), 0)
            self.assertFalse(any(each.requires_grad for each in grads))

    def test_transforms_of_inputs(self) -> None:
        """After a forward; as the first call of a model they are refused."""
        x = make_rows(0, NUM_ROWS, WIDTH)
        for model, reference in self.pairs(only_blocks(), (CHOSEN,)):
            for each in (model, reference):
                usual(each, x)  # so that there are gradients
            for transform in (grad, lambda f: vmap(grad(f)), hessian):
                ours, expected = (
                    transform(lambda rows, each=each: each(rows).square().sum())(x[:2]) for each in (model, reference)
                )
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        for model, _ in self.pairs(only_blocks(), (CHOSEN,), is_first=True):
            with self.assertRaisesRegex(NotImplementedError, "as the first call of a model"):
                grad(lambda rows: model(rows).sum())(x)  # noqa: B023
            usual(model, x)

    def test_a_loss_on_a_norm_inside_of_a_block_names_blocks(self) -> None:
        for model, _ in self.pairs(only_blocks(), (CHOSEN,)):
            seen = []
            model[1].norm.register_forward_hook(lambda module, args, output: seen.append(output))  # noqa: B023
            model(make_rows(0, 4, WIDTH))
            with self.assertRaisesRegex(RuntimeError, "'0' to '2'"):
                seen[0].square().mean().backward()


class Stop(Exception):
    """Ends a forward when a hook has what it wants."""


def stopped(where: str) -> Step:
    """A step with an activation that a hook has kept, as feature extractors do. The forward ends there."""

    def step(each: Any, x: torch.Tensor) -> None:
        kept = []

        def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            kept.append(output)
            raise Stop

        with each.get_submodule(where).register_forward_hook(keep), contextlib.suppress(Stop):
            each(x)
        mean(kept[0]).backward()

    return step


class TestForwardsThatAreStopped(PairTest):
    def test_what_a_hook_has_kept(self) -> None:
        for pair in self.pairs(Model, (CHOSEN, MIXED)):
            for where in ("blocks.0", "blocks.1.up", "blocks.1"):
                self.check(pair, stopped(where))
                self.check(pair)

    def test_nothing_stays_for_good(self) -> None:
        (pair,) = self.pairs(Model, (CHOSEN,))
        with self.assertRaises(AssertionError), pair[0].blocks[0].register_forward_hook(failing):
            pair[0](make_rows(0, NUM_ROWS, WIDTH))
        usual(pair[0], make_rows(0, NUM_ROWS, WIDTH))
        evaluate(pair[0], make_rows(0, NUM_ROWS, WIDTH))
        assert [group.leaves.storage.nbytes() for group in members_of(pair[0]).groups] == [0, 0]


def failing(*unused: Any) -> None:
    raise AssertionError
