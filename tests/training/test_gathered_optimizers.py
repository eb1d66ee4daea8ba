"""``gathered``: optimizers that need whole parameters step sharded ones as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, check_training, shared_directory
from runtime_common import Net, make_tokens, token_loss
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import GTPShard, gtp_shard
from dtensor_gtp.optim import gathered


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
    def shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def place(param: nn.Parameter) -> GTPShard | None:
            return GTPShard(1) if param.shape == (12, 12) and param is model.layers[0].weight else None

        return gtp_shard(model, mesh, schedule=ALL, shard_placement_fn=place)

    def test_steps_are_those_of_one_process(self) -> None:
        for name, (cls, options, choose) in CLASSES.items():
            for mesh in (self.gtp_mesh(), self.hsdp_mesh()) if name == "Adafactor" else (self.hsdp_mesh(),):

                def make(params: Any, cls: Any = cls, options: Any = options, choose: Any = choose) -> Any:
                    is_sharded = any(isinstance(param, torch.distributed.tensor.DTensor) for param in params)
                    return (gathered(cls) if is_sharded else cls)(choose(params), **options)

                with self.subTest(name=name, mesh=mesh.mesh_dim_names):
                    model = check_training(
                        Net(num_pairs=1), lambda m, mesh=mesh: self.shard(m, mesh), mesh, _batch, token_loss, steps=2,
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


def _batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 31, (8, 5), generator=generator)
