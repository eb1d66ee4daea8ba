"""``dtensor_gtp.optim``: averages of sharded weights, and optimizers that need whole parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, check_training, fake_mesh, full, rows_of_rank, shared_directory
from quant_common import take_over
from runtime_common import WIDTH, Net, make_rows, make_tokens, token_loss
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.common_utils import TestCase

from dtensor_gtp import GTPShard, gtp_shard, quantize_
from dtensor_gtp.optim import ShardedEMA, gathered


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 33), nn.LayerNorm(33), nn.Linear(33, WIDTH)).to(dtype)


class TestShardedEMA(GlooTest):
    """Beside torch's own averages in one process, swapped in, saved and loaded."""

    def train(self, model: nn.Module, mesh: Any, ema: ShardedEMA, reference: AveragedModel | None = None) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(2):
            model(rows_of_rank(make_rows(step), mesh)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
            if reference is not None:
                present = make()
                take_over(present, model)
                reference.update_parameters(present)

    def test_same_bits_as_one_process(self) -> None:
        for mesh, shard in (
            (self.gtp_mesh(), lambda m, mesh: gtp_shard(m, mesh, schedule=ALL)),
            (self.hsdp_mesh(), lambda m, mesh: gtp_shard(m, mesh, schedule=ALL, reshard_after_forward=False)),
            (self.gtp_mesh(), lambda m, mesh: fully_shard(m, mesh=mesh)),
        ):
            model = shard(make(), mesh)
            reference = AveragedModel(make(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
            reference.update_parameters(reference.module)  # the first call copies
            ema = ShardedEMA(model, decay=0.9)
            self.train(model, mesh, ema, reference)
            x, own = make_rows(5), [full(param).clone() for param in model.parameters()]
            before = model(x)
            with ema.averaged():
                self.assertEqual(model(x), reference(x), rtol=0, atol=0)
                for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
                    self.assertEqual(full(mine), other, rtol=0, atol=0)
            self.assertEqual(model(x), before, rtol=0, atol=0)
            self.assertEqual([full(param) for param in model.parameters()], own, rtol=0, atol=0)

    def test_averages_of_bfloat16_in_float32(self) -> None:
        """Small changes are not lost; what the model gets is rounded once; its weights come back."""
        model = gtp_shard(make(torch.bfloat16), self.gtp_mesh(), schedule=ALL)
        ema = ShardedEMA(model, decay=0.999, dtype=torch.float32)
        weight = model[0].weight
        first = full(weight).float()
        with torch.no_grad():
            weight.mul_(2)
        own = full(weight)
        ema.update()
        expected = first.lerp(2 * first, 1 - 0.999)
        self.assertEqual(full(ema.state_dict()["averages"]["0.weight"]), expected, rtol=0, atol=0)
        ema.swap()
        self.assertEqual(full(weight), expected.bfloat16(), rtol=0, atol=0)
        ema.restore()
        self.assertEqual(full(weight), own, rtol=0, atol=0)

    def test_checkpoint_on_another_topology(self) -> None:
        model = gtp_shard(make(), self.gtp_mesh(), schedule=ALL)
        ema = ShardedEMA(model, decay=0.9)
        self.train(model, self.gtp_mesh(), ema)
        other = ShardedEMA(gtp_shard(make(), self.hsdp_mesh(), schedule=ALL))
        alone = ShardedEMA(make())
        with shared_directory() as directory:
            dcp.save({"ema": ema}, checkpoint_id=directory)
            for loaded in (other, alone):
                dcp.load({"ema": loaded}, checkpoint_id=directory)
        averages = ema.state_dict()["averages"]
        for loaded in (other, alone):
            self.assertEqual(loaded.decay, 0.9)
            for name, average in loaded.state_dict()["averages"].items():
                self.assertEqual(full(average), full(averages[name]), rtol=0, atol=0)
        whole = {name: full(average) + 1 for name, average in averages.items()}
        ema.load_state_dict({"averages": whole, "decay": 0.5})
        for name, average in ema.state_dict()["averages"].items():
            self.assertEqual(full(average), whole[name], rtol=0, atol=0)


class TestShardedEMAAlone(TestCase):
    def test_names_of_compiled_modules(self) -> None:
        """``torch.compile(module)`` is a module around it; one like it here, as the compiler takes long to import."""
        model = make()
        names = ShardedEMA(model).state_dict()["averages"].keys()
        compiled = nn.ModuleDict({"_orig_mod": model})
        model[0] = nn.ModuleDict({"_orig_mod": model[0]})
        self.assertEqual(ShardedEMA(compiled).state_dict()["averages"].keys(), names)

    def test_refusals(self) -> None:
        model = make()
        ema = ShardedEMA(model)
        with self.assertRaisesRegex(RuntimeError, "Call swap"):
            ema.restore()
        ema.swap()
        for call in (ema.swap, ema.update):
            with self.assertRaisesRegex(RuntimeError, r"Call restore\(\)"):
                call()
        with self.assertRaisesRegex(ValueError, r"a decay in \[0, 1\], but got 1.5"):
            ShardedEMA(model, decay=1.5)
        state = copy.deepcopy(ema.state_dict())
        state["averages"]["0.bias"] = torch.ones(2)
        with self.assertRaisesRegex(ValueError, r"average of '0.bias' of shape \(33,\), but got \(2,\)"):
            ema.load_state_dict(state)
        del state["averages"]["0.bias"]
        with self.assertRaisesRegex(ValueError, r"but only one of the two has \['0.bias'\]"):
            ema.load_state_dict(state)

    def test_a_layer_that_is_wrapped_later(self) -> None:
        model = make()
        ema = ShardedEMA(model, decay=0.5)
        with ema.averaged():
            model[0] = checkpoint_wrapper(model[0])
        ema.update()

    def test_weights_stay_if_a_change_of_the_model_is_refused(self) -> None:
        model = make()
        ema = ShardedEMA(model, decay=0.5)
        before = copy.deepcopy(model.state_dict())
        nn.init.zeros_(model[0].weight)
        ema.swap()
        model.add_module("more", nn.Linear(2, 2))
        with self.assertRaisesRegex(RuntimeError, "only one of the two has .*more"):
            ema.restore()
        del model.more
        ema.restore()
        self.assertEqual(model[0].weight, torch.zeros_like(before["0.weight"]))

    def test_parameters_that_a_load_has_replaced(self) -> None:
        model, other = make(), nn.Sequential(nn.Linear(WIDTH, 33), nn.LayerNorm(33), nn.Linear(33, WIDTH))
        before = copy.deepcopy(model.state_dict())
        ema = ShardedEMA(model, decay=0.5)
        model.load_state_dict(other.state_dict(), assign=True)
        ema.update()
        for name, average in ema.state_dict()["averages"].items():
            self.assertEqual(average, before[name].lerp(other.state_dict()[name], 0.5), rtol=0, atol=0)
        with ema.averaged():
            self.assertEqual(model.state_dict(), ema.state_dict()["averages"])
        self.assertEqual(model.state_dict(), other.state_dict())
        model[0] = nn.Linear(WIDTH, 34)
        with self.assertRaisesRegex(RuntimeError, r"'0.weight' sharded as at first, with \(33, .*\) .* got \(34, "):
            ema.swap()
        model[0] = nn.Identity()
        with self.assertRaisesRegex(RuntimeError, r"only one of the two has \['0.bias', '0.weight'\]"):
            ema.update()
        with self.assertRaisesRegex(RuntimeError, r"'weight' of shape \(2, 2\) is on the meta device"):
            ShardedEMA(nn.Linear(2, 2, device="meta"))

    def test_quantized_weights(self) -> None:
        """Masters are averaged; native weights have none."""
        with fake_mesh(2) as mesh:
            plain = nn.Sequential(nn.Linear(64, 64))
            for shard in (lambda m: gtp_shard(m, mesh, schedule=ALL), lambda m: fully_shard(m, mesh=mesh)):
                model = shard(quantize_(copy.deepcopy(plain), "mxfp8"))
                average = ShardedEMA(model).state_dict()["averages"]["0.weight"]
                self.assertIs(type(average.to_local()), torch.Tensor)
                native = shard(quantize_(copy.deepcopy(plain), "mxfp8", storage="native"))
                with self.assertRaisesRegex(NotImplementedError, r"'0.weight' of shape \(64, 64\) has native storage"):
                    ShardedEMA(native)
                native.requires_grad_(False)
                self.assertEqual(ShardedEMA(native).state_dict()["averages"].keys(), {"0.bias"})


class Whitened(torch.optim.Optimizer):
    """A small Shampoo: the gradient of a matrix is divided by the root of its second moment between rows."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad, state = param.grad.reshape(len(param), -1), self.state[param]
                moment = state.setdefault("moment", torch.eye(len(param)))
                moment.lerp_(grad @ grad.T, 0.1)
                values, vectors = torch.linalg.eigh(moment + 1e-3 * torch.eye(len(param)))
                root = vectors @ torch.diag(values.rsqrt()) @ vectors.T
                param.sub_((root @ grad).view_as(param), alpha=group["lr"])


def matrices(params: Any) -> list[nn.Parameter]:
    return [param for param in params if param.ndim == 2]


CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], Callable[[Any], Any]]] = {
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}, list),
    "Muon": (torch.optim.Muon, {"lr": 0.05}, matrices),
    "Whitened": (Whitened, {}, list),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "foreach": True}, list),
}


class TestGathered(GlooTest):
    """Optimizers that need whole parameters step sharded ones as in one process."""

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def place(param: nn.Parameter) -> GTPShard | None:
            return GTPShard(1) if param.shape == (12, 12) and param is model.layers[0].weight else None

        return gtp_shard(model, mesh, schedule=ALL, shard_placement_fn=place)

    def test_steps_are_those_of_one_process(self) -> None:
        for name, (cls, options, choose) in CLASSES.items():
            for mesh in (self.gtp_mesh(), self.hsdp_mesh()) if name == "Adafactor" else (self.hsdp_mesh(),):

                def make(params: Any, cls: Any = cls, options: Any = options, choose: Any = choose) -> Any:
                    is_sharded = any(isinstance(param, DTensor) for param in params)
                    return (gathered(cls) if is_sharded else cls)(choose(params), **options)

                with self.subTest(name=name, mesh=mesh.mesh_dim_names):
                    model = check_training(
                        Net(num_pairs=1), lambda m, mesh=mesh: self.shard(m, mesh), mesh,
                        lambda generator: torch.randint(0, 31, (8, 5), generator=generator), token_loss, steps=2,
                        make_optimizer=make, tolerance={"rtol": 2e-3, "atol": 2e-4},
                    )  # fmt: skip
                    self.assertEqual(len({id(p) for p in model.parameters()}), len(list(Net(num_pairs=1).parameters())))

    def test_each_rank_keeps_the_state_of_its_share(self) -> None:
        model = self.shard(Net(), self.gtp_mesh())
        optimizer = gathered(torch.optim.AdamW)(model.parameters())
        token_loss(model, make_tokens(0)).backward()
        optimizer.step()
        held = sum(state["exp_avg"].numel() for state in optimizer.state.values() if state)
        whole = sum(param.numel() for param in model.parameters() if param.ndim == 1)
        every = sum(param.numel() for param in model.parameters())
        self.assertLess(held, whole + (every - whole) * 0.6)  # the largest matrix has a third of all elements
        resting = [slot.whole for slots in optimizer._slots for slot in slots]
        self.assertTrue(all(param.untyped_storage().nbytes() == param.element_size() for param in resting))

    def test_groups_schedules_and_checkpoints_on_another_mesh(self) -> None:
        def make(model: nn.Module, cls: type[torch.optim.Optimizer]) -> tuple[Any, Any]:
            small = [param for param in model.parameters() if param.ndim == 1]
            optimizer = cls([{"params": matrices(model.parameters())}, {"params": small, "lr": 0.01}], lr=0.05)
            return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def train(model: nn.Module, optimizer: Any, schedule: Any, steps: range) -> None:
            for step in steps:
                optimizer.zero_grad()
                token_loss(model, make_tokens(step)).backward()
                optimizer.step()
                schedule.step()

        reference = Net()
        models = [self.shard(copy.deepcopy(reference), mesh) for mesh in (self.gtp_mesh(), self.hsdp_mesh())]
        of_reference = make(reference, torch.optim.Adafactor)
        train(reference, *of_reference, range(4))
        first, second = models
        optimizer, schedule = make(first, gathered(torch.optim.Adafactor))
        train(first, optimizer, schedule, range(2))
        with shared_directory() as folder:
            state = {"model": first.state_dict(), "optimizer": get_optimizer_state_dict(first, optimizer)}
            dcp.save(state, checkpoint_id=folder)
            other, other_schedule = make(second, gathered(torch.optim.Adafactor))
            other.load_state_dict(other.state_dict())  # as accelerate does: there is none yet
            state = {"model": second.state_dict(), "optimizer": get_optimizer_state_dict(second, other)}
            dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(second, other, state["optimizer"])
        other_schedule.load_state_dict(schedule.state_dict())
        train(second, other, other_schedule, range(2, 4))
        assert_same_params(second, reference, rtol=2e-3, atol=2e-4)
        again, again_schedule = make(first, gathered(torch.optim.Adafactor))
        again.load_state_dict(optimizer.state_dict())
        again_schedule.load_state_dict(schedule.state_dict())
        train(first, again, again_schedule, range(2, 4))
        assert_same_params(first, reference, rtol=2e-3, atol=2e-4)

    def test_full_state_dicts(self) -> None:
        """Each rank loads its share of one, with and without a broadcast. None is made: ranks keep their shares."""
        reference = Net()
        model = self.shard(copy.deepcopy(reference), self.gtp_mesh())
        expected = torch.optim.AdamW(reference.parameters())
        token_loss(reference, make_tokens(0)).backward()
        expected.step()
        state = get_optimizer_state_dict(reference, expected)
        for is_sent in (False, True):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_sent)
            optimizer = gathered(torch.optim.AdamW)(model.parameters())
            given = state if self.rank == 0 or not is_sent else {}
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(given), options=options)
            loaded = {name: optimizer.state[param] for name, param in model.named_parameters()}
            held = {name for name, values in loaded.items() if values}
            self.assertEqual({name: loaded[name] for name in held}, {name: state["state"][name] for name in held})
            self.assertLess(len(held), len(loaded))
            every: list[Any] = [None] * self.world_size
            dist.all_gather_object(every, held)
            self.assertEqual(set().union(*every), loaded.keys())
        with self.assertRaisesRegex(NotImplementedError, "expects full_state_dict=False .* GatheredAdamW: each rank"):
            get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))

    def test_one_that_takes_all_parameters_as_a_vector_is_refused(self) -> None:
        with self.assertRaisesRegex(NotImplementedError, "gathered does not support LBFGS: .* one vector"):
            gathered(torch.optim.LBFGS)

    def test_groups_that_are_added_later(self) -> None:
        """Parameters and states are those of one process; an optimizer made with all groups takes the state."""

        def train(model: nn.Module, optimizer: Any, steps: range) -> None:
            for step in steps:
                optimizer.zero_grad()
                token_loss(model, make_tokens(step)).backward()
                optimizer.step()

        reference = Net()
        model = self.shard(copy.deepcopy(reference), self.gtp_mesh())
        optimizers = []
        for each, cls in ((reference, torch.optim.AdamW), (model, gathered(torch.optim.AdamW))):
            params = list(each.parameters())
            optimizer = cls(params[2:], lr=0.05)
            train(each, optimizer, range(2))
            optimizer.param_groups[0]["lr"] = 0.02  # as a scheduler does
            optimizer.add_param_group({"params": iter(params[:2]), "lr": 0.01})
            train(each, optimizer, range(2, 4))
            optimizers.append(optimizer)
        assert_same_params(model, reference, rtol=2e-3, atol=2e-4)
        expected, actual = (optimizer.state_dict() for optimizer in optimizers)
        self.assertEqual(actual["param_groups"], expected["param_groups"])
        held: list[Any] = [None] * self.world_size
        dist.all_gather_object(held, actual["state"])
        for index, state in expected["state"].items():
            owned = [states[index] for states in held if states[index]]
            self.assertGreaterEqual(len(owned), 1)
            torch.testing.assert_close(owned[0], state, rtol=2e-3, atol=2e-4)
        params = list(model.parameters())
        again = gathered(torch.optim.AdamW)([{"params": params[2:]}, {"params": params[:2]}])
        again.load_state_dict(actual)
        train(model, again, range(4, 6))
        train(reference, optimizers[0], range(4, 6))
        assert_same_params(model, reference, rtol=2e-3, atol=2e-4)
