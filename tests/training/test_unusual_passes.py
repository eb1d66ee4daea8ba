"""Forwards and backwards in unusual numbers, orders and grad modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest
from passes_common import Step, by_call, calling, check_cases, mean, steps_in, usual


def within(context: Callable[[], Any]) -> Step:
    """A usual step within a context."""

    def step(model: Any, x: torch.Tensor) -> None:
        with context():
            usual(model, x)

    return step


class Steps:
    """Each of its functions is a case."""

    # --- several forwards and backwards -------------------------------------------------------------------------------

    def many_forwards_without_a_backward(model: Any, x: torch.Tensor) -> None:
        outputs = [model(x + shift) for shift in range(4)]
        del outputs
        usual(model, x)
        model(x)

    def backwards_in_both_orders(model: Any, x: torch.Tensor) -> None:
        for order in ((0, 1, 2), (2, 1, 0)):
            losses = [mean(model(x + shift)) for shift in range(3)]
            for index in order:
                losses[index].backward()

    def retained_graph(model: Any, x: torch.Tensor) -> None:
        loss = mean(model(x))
        loss.backward(retain_graph=True)
        usual(model, x - 1)
        loss.backward()

    def gradients_that_are_zeroed_in_place_and_between_forward_and_backward(model: Any, x: torch.Tensor) -> None:
        usual(model, x - 1)
        model.zero_grad(set_to_none=False)
        usual(model, x)
        loss = mean(model(x + 1))
        model.zero_grad()
        loss.backward()

    def gradients_that_are_halved_between_backwards(model: Any, x: torch.Tensor) -> None:
        usual(model, x)
        for param in model.parameters():
            param.grad.mul_(0.5)
        usual(model, x + 1)

    def backward_of_one_forward_in_the_next(model: Any, x: torch.Tensor) -> None:
        loss = mean(model(x))

        def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if block is model.blocks[1]:
                loss.backward()
            return block(x)

        with calling(model, call):
            later = mean(model(x + 1))
        later.backward()

    def a_step_in_the_backward_of_another(model: Any, x: torch.Tensor) -> None:
        y = model(x)
        values = x + 1

        def train_more(grad: torch.Tensor) -> None:
            with torch.enable_grad():
                usual(model, values)

        y.register_hook(train_more)
        mean(y).backward()

    def a_forward_in_a_backward(model: Any, x: torch.Tensor) -> None:
        def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = block(x)
            if y.requires_grad and block is model.blocks[1]:
                y.register_hook(lambda grad: grad + torch.no_grad()(model)(x.detach()) / x.numel())
            return y

        by_call(call)(model, x)

    # --- grad modes ---------------------------------------------------------------------------------------------------

    @by_call
    def forward_without_gradients_within_a_forward(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = block(x)
        return block(x) - 0.5 * target

    def blocks_without_gradients(model: Any, x: torch.Tensor) -> None:
        def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(block is not model.blocks[0]):
                result: torch.Tensor = block(x)
            return result

        by_call(call)(model, x)

    def gradients_within_a_forward_without(model: Any, x: torch.Tensor) -> None:
        def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                y: torch.Tensor = block(x)
                mean(y).backward()
            return y.detach()

        with torch.no_grad(), calling(model, call):
            model(x)

    def evaluation_between_forward_and_backward(model: Any, x: torch.Tensor) -> None:
        for grad_mode in (torch.no_grad, torch.inference_mode):
            loss = mean(model(x))
            model.eval()
            with grad_mode():
                model(x + 1)
            model.train()
            loss.backward()
            with grad_mode():
                model(x)

    def backward_without_grad_mode(model: Any, x: torch.Tensor) -> None:
        loss = mean(model(x))
        with torch.no_grad():
            loss.backward()

    # --- what backward is asked for -----------------------------------------------------------------------------------

    @by_call
    def outputs_that_nobody_uses(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        block(x + 1)
        return block(x)

    def gradient_of_the_input_alone_and_then_all(model: Any, x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        loss = mean(model(x))
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        mean(model(x.detach() + grad.sign())).backward()

    def gradient_of_a_hidden_state(model: Any, x: torch.Tensor) -> None:
        seen: list[torch.Tensor] = []

        def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            seen.append(block(x))
            return seen[-1]

        with calling(model, call):
            loss = mean(model(x))
        torch.autograd.grad(loss, seen[0], retain_graph=True)
        seen[1].retain_grad()
        loss.backward()
        assert seen[1].grad is not None

    def gradients_of_chosen_parameters(model: Any, x: torch.Tensor) -> None:
        names = ("first.weight", "blocks.1.norm.bias", "blocks.0.raw.second", "blocks.1.up.weight")
        mean(model(x)).backward(inputs=[model.get_parameter(name) for name in names])

    def a_loss_that_ends_before_the_model_does(model: Any, x: torch.Tensor) -> None:
        seen: list[torch.Tensor] = []
        with model.blocks[0].register_forward_hook(lambda module, args, y: seen.append(y)):
            model(x)
        mean(seen[0]).backward()

    # --- modules in another order or number ---------------------------------------------------------------------------

    def a_block_that_calls_itself(model: Any, x: torch.Tensor) -> None:
        def call(block: nn.Module, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
            return block(x) if depth == 1 else block(x) + call(block, x * 0.5, depth - 1)

        by_call(call)(model, x)

    def blocks_in_another_order(model: Any, x: torch.Tensor) -> None:
        y = model.first(x)
        for block in reversed(model.blocks):
            y = block(y)
        mean(model.last(y)).backward()

    def a_block_alone_beside_the_model(model: Any, x: torch.Tensor) -> None:
        early = model.blocks[1](x)
        (mean(model(x)) + mean(early) + mean(model.blocks[0](early))).backward()

    def a_generator_that_runs_blocks(model: Any, x: torch.Tensor) -> None:
        def states(x: torch.Tensor) -> Iterator[torch.Tensor]:
            x = model.first(x)
            for block in model.blocks:
                x = block(x)
                yield x

        running = states(x)
        first = mean(next(running))
        usual(model, x)
        (first + mean(next(running))).backward()

    def a_model_called_by_a_hook(model: Any, x: torch.Tensor) -> None:
        other = nn.Identity()
        other.register_forward_hook(lambda module, args, y: model(y))
        mean(other(x)).backward()


CASES: dict[str, Step] = {
    "several roots of one backward": lambda model, x: torch.autograd.backward(
        [mean(y := model(x)), y.mean(), mean(model(x + 1))]
    ),
    "a backward with a gradient": lambda model, x: model(x).backward(gradient=x.cos() / len(x)),
    "gradients that add up over steps": lambda model, x: [usual(model, x + shift) for shift in range(3)],
    "model fed to itself": lambda model, x: mean(model(model(model(x)))).backward(),
    "backward in the thread of its caller": within(lambda: torch.autograd.set_multithreading_enabled(False)),
    "anomaly mode": within(lambda: torch.autograd.set_detect_anomaly(True)),
    "a part of the outputs": lambda model, x: mean(model(x)[:, :3]).backward(),
    "a block called twice": by_call(lambda block, x: block(block(x))),
    "a block that is skipped": lambda model, x: mean(model.last(model.blocks[1](model.first(x)))).backward(),
    "a layer alone": lambda model, x: mean(model.blocks[0].up(x)).backward(),
    "forward methods called directly": lambda model, x: mean(
        model.forward(model.last(model.blocks[1](model.first.forward(x))))
    ).backward(),
    **steps_in(Steps),
}


class TestUnusualPasses(GlooTest):
    world_size = 2

    def test_each_equals_one_process(self) -> None:
        check_cases(CASES, self.gtp_mesh())


class TestUnusualPassesOfReplicas(GlooTest):
    def test_with_weights_that_stay_gathered(self) -> None:
        names = (
            "many forwards without a backward",
            "backwards in both orders",
            "retained graph",
            "several roots of one backward",
            "model fed to itself",
            "evaluation between forward and backward",
        )
        kept = {"kept": {"schedule": ALL, "reshard_after_forward": False}}
        check_cases({name: CASES[name] for name in names}, self.hsdp_mesh(), settings=kept)
