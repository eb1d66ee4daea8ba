"""``gtp_shard`` changes the class of the module that it gets, as ``fully_shard`` does, and of no other.

Within a forward, modules find the gathered weights as their parameters.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, check_training
from test_gtp_shard_groups import CHOSEN, WIDTH, Block, rows, square
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from dtensor_gtp import gtp_shard
from dtensor_gtp.nn import GroupedLinear

SCHEDULES = {"groups": CHOSEN, "single weights": ALL}


class Penalized(nn.Module):
    """Adds a penalty on all of its parameters to each output, as AdaLoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        penalty = sum((name.count(".") * param.float().square()).sum() for name, param in self.named_parameters())
        return x + penalty


def check_schedules(
    test: GlooTest, make: Callable[[], nn.Module], shard: Callable[..., Any] = gtp_shard, seed: int = 7
) -> None:
    """Train beside one process in groups, and by single weights."""
    for name, schedule in SCHEDULES.items():
        with test.subTest(name):
            torch.manual_seed(seed)
            mesh = test.gtp_mesh()
            check_training(make(), partial(shard, mesh=mesh, schedule=schedule), mesh, rows, square)


KINDS = (nn.Linear, nn.LayerNorm, nn.GRU, nn.Conv1d, nn.ParameterList, nn.ModuleList, GroupedLinear, nn.Sequential)


class Layer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


class Mixture(nn.Module):
    """Of modules whose calls and reads reach the runtime in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.full((WIDTH, WIDTH), 0.1)])
        self.experts = GroupedLinear(2, WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.recurrent(x.unsqueeze(1))[0].squeeze(1)
        x = self.conv(x.unsqueeze(-1)).squeeze(-1) * self.scales[0] + x @ self.scales[1]
        return self.experts(x, torch.tensor([x.shape[0], 0]))


def check_types(model: nn.Module) -> None:
    below = [module for module in model.modules() if module is not model]
    assert {type(module) for module in below} <= {*KINDS, Layer}, [type(module) for module in below]
    assert type(model) is not Mixture
    assert isinstance(model, Mixture)


def by_schedule(test: GlooTest) -> Iterator[Mixture]:
    for name, schedule in SCHEDULES.items():
        with test.subTest(name):
            torch.manual_seed(3)
            model = Mixture()
            yield gtp_shard(model, test.gtp_mesh(), schedule=schedule)


class TestExactTypes(GlooTest):
    world_size = 2

    def test_always(self) -> None:
        """Before and after the first forward, within one, in a backward, and with weights that stay gathered."""
        for model in by_schedule(self):
            check_types(model)
            for module in model.modules():
                module.register_forward_hook(lambda *_, model=model: check_types(model))
            for _ in range(2):
                output = model(torch.randn(4, WIDTH))
                output.register_hook(lambda _, model=model: check_types(model))
                output.square().mean().backward()
                check_types(model)
            model.unshard()
            check_types(model)
            model.reshard()

    def test_they_train_as_in_one_process(self) -> None:
        check_schedules(self, Mixture, seed=3)

    def test_a_penalty_on_all_parameters(self) -> None:
        check_schedules(self, Penalized)

    def test_initialization_and_groups_of_parameters_by_type(self) -> None:
        def init(module: nn.Module) -> None:
            if type(module) is nn.Linear:
                nn.init.constant_(module.weight, 0.5)
            elif type(module) is nn.LayerNorm:
                nn.init.constant_(module.weight, 2.0)

        for model in by_schedule(self):
            model.apply(init)
            layer = model.layers[0]
            assert torch.equal(layer[0].weight.full_tensor(), torch.full((WIDTH, WIDTH), 0.5))
            assert torch.equal(layer[1].weight.full_tensor(), torch.full((WIDTH,), 2.0))
            decayed = {m.weight for m in model.modules() if type(m) is nn.Linear}
            assert decayed == {model.layers[i][j].weight for i in range(2) for j in (0, 2)}

    def test_every_way_to_ask_for_a_parameter(self) -> None:
        """In a forward it is the gathered one in the compute dtype; outside it is the sharded one."""

        class Asks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(Layer() for _ in range(2))
                self.conv = nn.Conv1d(WIDTH, WIDTH, 1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in (*self.layers, self.conv):
                    owner = layer[0] if isinstance(layer, Layer) else layer
                    found = [owner.weight, owner._parameters["weight"], owner.get_parameter("weight")]
                    found += [next(owner.parameters()), dict(owner.named_parameters())["weight"]]
                    for weight in found:
                        assert weight.shape[:2] == (WIDTH, WIDTH)
                for param in self.parameters():
                    assert not isinstance(param, DTensor)
                    assert param.dtype == torch.bfloat16
                return F.linear(self.layers[0](x), self.conv._parameters["weight"].squeeze(-1))

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for name, schedule in SCHEDULES.items():
            with self.subTest(name):
                model = gtp_shard(Asks(), self.gtp_mesh(), mp_policy=policy, schedule=schedule)
                for _ in range(2):
                    model(torch.randn(4, WIDTH)).sum().backward()
                    torch.no_grad()(model)(torch.randn(4, WIDTH))
                    for owner in (model.layers[0][0], model.conv):
                        assert isinstance(owner._parameters["weight"], DTensor)
                        assert isinstance(owner.weight, DTensor)

    def test_classes_and_metaclasses_are_not_asked(self) -> None:
        """They may refuse subclasses, or record them."""
        known: list[str] = []

        class Records(type):
            def __new__(meta, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
                known.append(name)
                return super().__new__(meta, name, bases, body)

            def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None:
                known.append(name)
                super().__init__(name, bases, body)

        class Final(ABCMeta):
            def __new__(meta, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
                if any(isinstance(base, Final) for base in bases):
                    raise TypeError(f"{name} is final")
                return super().__new__(meta, name, bases, body)

        class Recorded(nn.Linear, metaclass=Records):
            pass

        class Listed(nn.Linear):
            def __init_subclass__(cls, kind: str) -> None:  # an argument that a class made on the fly has not
                known.append(kind)

        class Used(Listed, kind="used"):
            pass

        class Last(nn.Linear, metaclass=Final):
            pass

        del known[:]
        for cls in (Recorded, Last, Used):
            model = gtp_shard(cls(WIDTH, WIDTH), self.gtp_mesh())
            assert isinstance(model, cls)
            assert type(type(model)) is type(cls)
            assert type(gtp_shard(cls(WIDTH, WIDTH), self.gtp_mesh())) is type(model), "one class for all"
            assert not isinstance(cls(WIDTH, WIDTH), type(model))
            model(torch.randn(2, WIDTH)).sum().backward()
        for schedule in SCHEDULES.values():
            layers = nn.ModuleList(nn.Sequential(Used(WIDTH, WIDTH), Used(WIDTH, WIDTH)) for _ in range(2))
            model = gtp_shard(nn.Sequential(*layers, Recorded(WIDTH, WIDTH)), self.gtp_mesh(), schedule=schedule)
            model(torch.randn(4, WIDTH))
        assert known == []

    def test_a_class_that_cannot_be_changed_leaves_the_module_as_it_was(self) -> None:
        class Fixed(nn.Linear):
            def __setattr__(self, name: str, value: Any) -> None:
                if name == "__class__":
                    raise TypeError("its class is fixed")
                super().__setattr__(name, value)

        module = Fixed(WIDTH, WIDTH)
        before = dict(module.__dict__), dict(module._parameters)
        with self.assertRaisesRegex(TypeError, "its class is fixed"):
            gtp_shard(module, self.gtp_mesh())
        assert (module.__dict__, module._parameters) == before
        assert type(module) is Fixed

    def test_forwards_that_a_library_has_wrapped(self) -> None:
        """As hooks of accelerate and diffusers do, before the first forward makes groups."""

        def wrap(module: nn.Module) -> None:
            old = module.forward
            module.forward = lambda *args: old(*args)

        def shard(model: Mixture, **options: Any) -> nn.Module:
            gtp_shard(model, **options)
            for module in (*model.layers[0], *model.layers[1], model.conv, model.experts):
                wrap(module)
            return model

        check_schedules(self, Mixture, shard, seed=3)

    def test_a_forward_that_the_user_puts_in_place_runs(self) -> None:
        for model in by_schedule(self):
            layer = model.layers[1]
            layer[2].forward = lambda x, linear=layer[2]: 2 * F.linear(x, linear.weight, linear.bias)
            x = torch.randn(4, WIDTH)
            for _ in range(2):
                seen: list[torch.Tensor] = []
                handle = layer[2].register_forward_hook(lambda m, args, out, seen=seen: seen.extend((args[0], out)))
                model(x)
                handle.remove()
                with torch.no_grad():
                    weight, bias = layer[2].weight.full_tensor(), layer[2].bias.full_tensor()
                torch.testing.assert_close(seen[1], 2 * F.linear(seen[0], weight, bias))
