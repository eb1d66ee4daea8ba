"""What is wrong with a sharded module is refused at its next use, by name and with the remedy; and optimizers that were
made too early.

A fake process group lets this process be rank 1 of 4.
"""

from __future__ import annotations

import copy
import pickle
import re
import unittest
import warnings
from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import ALL, fake_mesh
from passes_common import NUM_ROWS, WIDTH, Model
from test_errors import NUM_RANKS, Net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

from dtensor_gtp import GTPModule, GTPShard, SchedulePolicy, gtp_shard, quantize_, sharding_report, whole_weights


class TestRefusalsLater(unittest.TestCase):
    """What is wrong with a sharded module shows at its next use."""

    def setUp(self) -> None:
        self.mesh = self.enterContext(fake_mesh(NUM_RANKS, rank=1))
        torch.manual_seed(0)
        self.net = self.sharded()
        self.x = torch.randn(2, 6)

    def sharded(self) -> Any:
        return gtp_shard(Net(), self.mesh, schedule=ALL)

    def refused(self, told: str) -> Any:
        return self.assertRaisesRegex(RuntimeError, told)

    def test_meta_parameters_at_the_first_forward(self) -> None:
        with torch.device("meta"):
            net = self.sharded()
        net.head.to_empty(device="cpu")
        told = (
            r"'inner.0.weight' of shape \(8, 6\), 'inner.0.bias' of shape \(8,\) on mesh axes \('gtp',\) are "
            r"still on the meta device .*\(rank 1\). Materialize .* module.to_empty\(device='cpu'\)"
        )
        for use in (lambda: net(self.x), lambda: net.head(self.x), net.unshard):
            with self.refused(told):
                use()
        net.to_empty(device="cpu")(self.x).sum().backward()

    def test_a_message_names_some_of_many_parameters(self) -> None:
        with torch.device("meta"):
            net = gtp_shard(nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(12))), self.mesh, schedule=ALL)
        with self.refused(r"'7.weight' of shape \(6, 6\) and 4 more on mesh axes"):
            net(self.x)

    def test_swapped_parameter(self) -> None:
        """Plain, of another shape, of another layout, no parameter at all; before and after the first forward."""
        head = self.net.head
        kept = head.weight
        other = gtp_shard(nn.Linear(8, 6), self.mesh, shard_placement_fn=lambda p: GTPShard(p.ndim - 1)).weight
        wrong = {
            r"a Parameter of shape \(6, 8\)": nn.Parameter(torch.randn(6, 8)),
            r"a DTensor of shape \(8, 6\) with placements": nn.Parameter(self.sharded().inner[0].weight),
            r"a DTensor of shape \(6, 8\) with placements \((GTP)?Shard\(dim=1\),\)": other,
            r"a DTensor of shape \(6, 8\) with placements": kept.detach(),
        }
        for described, param in wrong.items():
            for _ in range(2):
                head._parameters["weight"] = param
                told = rf"'head.weight' was replaced after gtp_shard by {described}.*of shape \(6, 8\) .* \('gtp',\) "
                with self.refused(told + r"\(rank 1\). Load values"):
                    self.net(self.x)
                head.weight = kept
                self.net(self.x).sum().backward()  # and the module works on

    def test_added_parameters(self) -> None:
        """Of a new module, on an old one, by a parametrization: nobody would reduce their gradients."""
        changes: dict[str, Callable[[nn.Module], Any]] = {
            "head.weight": lambda net: setattr(net, "head", nn.Linear(8, 6)),
            "inner.0.lora": lambda net: net.inner[0].register_parameter("lora", nn.Parameter(torch.ones(2, 8))),
            "head.parametrizations.weight.original0": lambda net: parametrizations.weight_norm(net.head),
            "head.weight_orig": lambda net: nn.utils.spectral_norm(net.head),
        }
        for name, change in changes.items():
            net = self.sharded()
            change(net)
            told = rf"'{name}' of shape .* was added after gtp_shard.* \('gtp',\) \(rank 1\). Change the module before"
            for _ in range(2):
                with self.refused(told):
                    net(self.x)
        gtp_shard(net := Net(), self.mesh, ignored_params=set(net.head.parameters()))
        net.register_parameter("frozen", nn.Parameter(torch.ones(3), requires_grad=False))
        net(self.x).sum().backward()

    def test_added_parameters_in_a_nested_call(self) -> None:
        net = Net()
        ignored = net.inner[0].bias
        gtp_shard(net.inner, self.mesh, schedule=ALL, ignored_params={ignored})
        net.inner.append(nn.Linear(8, 8))  # the call on the root will take it
        gtp_shard(net, self.mesh, schedule=ALL)(self.x).sum().backward()
        self.assertIs(net.inner[0].bias, ignored)
        net = Net()
        gtp_shard(net.inner, self.mesh, schedule=ALL)
        net.inner[0].register_parameter("lora", nn.Parameter(torch.ones(2, 8)))  # it will not take this one
        gtp_shard(net, self.mesh, schedule=ALL)
        with self.refused("'inner.0.lora' of shape .* was added after gtp_shard"):
            net(self.x)

    def test_removed_or_resized(self) -> None:
        net, head = self.sharded(), self.net.head
        del net.inner[0].bias
        with self.refused("'inner.0.bias' was replaced after gtp_shard by None"):
            net(self.x)
        self.net(self.x)
        with torch.no_grad():
            head.weight._local_tensor = torch.cat([head.weight.to_local()] * 2).detach()
        with self.refused("'head.weight' was replaced after gtp_shard"):
            self.net(self.x)

    def test_removed_after_a_forward(self) -> None:
        """By hand, and by code that puts other parameters there, which need no gradient."""
        changes: dict[str, Callable[[nn.Module], Any]] = {
            "head.bias": lambda net: delattr(net.head, "bias"),
            "head.weight": lambda net: prune.identity(net.head.requires_grad_(False), "weight"),
            "inner.0.weight": lambda net: parametrizations.weight_norm(net.inner[0].requires_grad_(False)),
        }
        for name, change in changes.items():
            net = self.sharded()
            net(self.x).sum().backward()
            change(net)
            with self.refused(f"'{name}' was removed from its module, but .*pruning after gtp_shard.* Change the mod"):
                net(self.x)

    def test_a_parameter_over_more_axes(self) -> None:
        """As an outer ``fully_shard`` registers it, whose code the package does not know."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "gtp"))
        net = gtp_shard(Net(), mesh["gtp"], schedule=ALL)
        kept = net.head.weight
        for axis in (Replicate(), Shard(1)):
            net.head.weight = nn.Parameter(distribute_tensor(torch.ones(6, 8), mesh, [axis, GTPShard(0)]))
            told = "'head.weight' was sharded again by the fully_shard of torch .*pass a .replicate, gtp. mesh"
            with self.assertRaisesRegex(NotImplementedError, told):
                net(self.x)
            net.head.weight = kept
            net(self.x).sum().backward()

    def test_resized_or_cast_in_place(self) -> None:
        """The same object, which reads like a parameter of another kind; before and after the first forward."""
        changes: dict[str, Callable[[nn.Module], Any]] = {
            r"'head.weight' .* its shard of shape \(4, 8\)": lambda net: net.head.weight._local_tensor.resize_(4, 8),
            r"'head.weight' .* its shard has no": lambda net: net.head.weight._local_tensor.untyped_storage().resize_(
                0
            ),
            r"'head.bias' .* its shard of shape \(3,\)": lambda net: net.head.bias._local_tensor.resize_(3),
        }
        for (told, change), is_used in product(changes.items(), (False, True)):
            net = self.sharded()
            if is_used:
                net(self.x).sum().backward()
            with torch.no_grad():
                change(net)
            expected = r".* but gtp_shard expects .* on mesh axes \('gtp',\) \(rank 1\).* Load values"
            with self.refused(told + expected):
                net(self.x)
        self.net.double()(self.x.double()).sum().backward()  # as modules are cast
        self.net.to(torch.float32)(self.x).sum().backward()

    def test_one_weight_of_a_block_in_another_dtype(self) -> None:
        model = gtp_shard(Model(), self.mesh, schedule=SchedulePolicy(min_shard_numel=0))
        rows = torch.ones(NUM_ROWS, WIDTH)
        model(rows).sum().backward()
        model.blocks[1].up.double()
        with self.assertRaisesRegex(RuntimeError, r"one dtype for all parameters of block 'blocks\.1'.*float64"):
            model(rows)
        model.double()
        self.assertEqual(model(rows.double()).dtype, torch.float64)

    def test_native_weights_have_no_whole_values(self) -> None:
        model = quantize_(nn.Sequential(nn.Linear(64, 64)), "float8_rowwise", storage="native")
        model = gtp_shard(model, self.mesh, schedule=ALL)
        with self.assertRaisesRegex(NotImplementedError, r"'0\.weight' of shape \(64, 64\) with native storage"):
            with whole_weights(model):
                self.fail("it was entered")
        model.requires_grad_(False)
        with whole_weights(model, trained_only=True):
            self.assertIsInstance(model[0].weight, DTensor)

    def test_data_of_another_shape_or_layout(self) -> None:
        weight = self.net.head.weight
        values = {
            r"a tensor of shape \(.*\), but got a Tensor of shape \(12, 8\)": torch.randn(12, 8),
            r"but got a DTensor of shape .* with placements": self.net.inner[0].weight.data,
            r"or a DTensor with these placements, but got a DTensor": weight.redistribute(
                placements=[Replicate()]
            ).data,
            r"a tensor, but got a \[1.0\]": [1.0],
        }
        before = weight.to_local().clone()
        for told, value in values.items():
            with self.assertRaisesRegex(ValueError, f"param.data = value expects .*{told}.* Write with load_state"):
                weight.data = value
        torch.testing.assert_close(weight.to_local(), before)
        quantized = gtp_shard(quantize_(nn.Linear(32, 32), "mxfp8", storage="native"), self.mesh, schedule=ALL)
        with self.assertRaisesRegex(ValueError, "expects a NativeWeight, but got a Tensor"):
            quantized.weight.data = torch.ones(32, 32)

    def test_names_reach_no_terminal(self) -> None:
        """Errors before and after ``gtp_shard``, of parameters that are sharded, are whole, and came later."""

        def hostile() -> nn.Module:
            return nn.Sequential(OrderedDict({"a\x1b[2Jb\nc": nn.Linear(6, 6)}))

        def told(run: Callable[[], Any]) -> None:
            with self.assertRaises((RuntimeError, ValueError)) as raised:
                run()
            self.assertNotIn("\x1b", str(raised.exception))
            self.assertRegex(str(raised.exception), r"'a\\x1b\[2Jb\\nc\.(weight|bias|lora)'")

        net = hostile()
        optimizer = torch.optim.SGD(net.parameters())
        told(lambda: gtp_shard(net, self.mesh, schedule=ALL))
        del optimizer
        changes: list[Callable[[nn.Module], Any]] = [
            lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(6, 6))),
            lambda layer: delattr(layer, "bias"),
            lambda layer: layer.register_parameter("lora", nn.Parameter(torch.ones(6))),
        ]
        for change in changes:
            net = gtp_shard(hostile(), self.mesh, schedule=ALL)
            change(net[0])
            told(lambda net=net: net(self.x))

    def test_copies(self) -> None:
        for module in (self.net, self.net.head, self.net.inner):
            with self.refused("cannot be copied after gtp_shard.*Copy the module before gtp_shard"):
                copy.deepcopy(module)
            with self.refused("for averages of weights use dtensor_gtp.optim.ShardedEMA"):
                AveragedModel(module)
            with self.refused(r"share_memory\(\) cannot share"):
                module.share_memory()
            for attempt in (copy.copy, pickle.dumps):
                with self.refused(r"cannot be pickled or copied after gtp_shard.* state_dict\(\)"):
                    attempt(module)

    def test_jit(self) -> None:
        advice = "after gtp_shard. Use torch.compile; or build the module again, load get_model_state_dict"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates all of it
            for callee in (self.net, lambda x: self.net(x)):
                with self.refused(f"torch.jit.trace cannot record a Net {advice}"):
                    torch.jit.trace(callee, self.x)
            with self.refused(f"torch.jit.script cannot compile a Net {advice}"):
                torch.jit.script(self.net)

    def test_methods(self) -> None:
        assert isinstance(self.net, GTPModule)
        for factor in (0, -1.0):
            with self.assertRaisesRegex(ValueError, f"expects a positive factor, but got {factor}"):
                self.net.set_gradient_divide_factor(factor)
        with self.assertRaisesRegex(ValueError, "a module after gtp_shard, but got a plain Net"):
            sharding_report(Net())


class Shared(nn.Module):
    """Tied weights, one of them at two modules that share their parameters, and a module that holds its own again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.copied = copy.copy(self.first)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.tied(self.copied(self.first(x)))))


class TestEarlyOptimizers(unittest.TestCase):
    """An optimizer that holds a parameter which ``gtp_shard`` is to replace is found; else none is searched for.

    That takes a look at all objects of the process. It is spared if nobody holds a parameter, by its reference count,
    or nobody in a list.
    """

    def setUp(self) -> None:
        self.mesh = self.enterContext(fake_mesh(4))

    def refuses(self, net: nn.Module, name: str) -> None:
        optimizer = torch.optim.SGD([net.get_parameter(name)])
        with self.assertRaisesRegex(ValueError, rf"an optimizer \(SGD\) already holds parameter '{re.escape(name)}'"):
            gtp_shard(net, self.mesh, schedule=ALL)
        del optimizer

    def test_of_any_one_parameter(self) -> None:
        net = Shared()
        names = [name for name, _ in net.named_parameters()]
        self.assertEqual(len(names), 6)
        for name in names:
            self.refuses(net, name)
        net(torch.randn(2, 8)).sum().backward()
        self.refuses(net, names[0])
        gtp_shard(net, self.mesh, schedule=ALL)
        many = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
        held = dict.fromkeys(many.parameters())
        self.refuses(many, "39.bias")
        gtp_shard(many, self.mesh, schedule=ALL)
        self.assertEqual(len(held), 80)

    def test_nobody_searches_where_nobody_holds_a_parameter(self) -> None:
        looked = AssertionError("all objects of the process were looked at")
        for net in (Shared(), copy.deepcopy(Shared()), Shared().bfloat16(), Shared().to_empty(device="meta")):
            with mock.patch("gc.get_objects", side_effect=looked), mock.patch("gc.get_referrers", side_effect=looked):
                gtp_shard(net, self.mesh, schedule=ALL)
        held = Shared()
        placements = {held.tied.weight: GTPShard(1)}  # a dict is no optimizer
        with mock.patch("gc.get_objects", side_effect=looked):
            gtp_shard(held, self.mesh, schedule=ALL, shard_placement_fn=placements.get)
