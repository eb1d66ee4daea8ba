"""What the tests of ``gtp_shard`` inside of and beside other data parallelism share: a model, its batch, its units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn as nn
from checkpoint_common import PLAIN, Topology, check_reload, momentum, topology
from common import ALL, assert_same_params, check_training, full, fused_on, rows_of_rank
from runtime_common import token_loss as next_token_loss
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dtensor_gtp import gtp_shard
from dtensor_gtp.optim import ShardedEMA

VOCABULARY = 31  # does not divide: the shards of the embedding and of the head are uneven
WIDTH = 8

sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True, amsgrad=True),
    "Adam for-loop": partial(torch.optim.Adam, lr=1e-2, foreach=False),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2),
    "Adamax": partial(torch.optim.Adamax, lr=1e-2),
    "Adadelta": partial(torch.optim.Adadelta, lr=1e-1),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, foreach=True),
}
Units = Callable[[Any], Sequence[nn.Module | list[nn.Module]]]


class Block(nn.Module):
    """Fused linears, a norm that stays whole, and a raw weight."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.mix = nn.Parameter(torch.randn(width, width) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) @ self.mix


class Model(nn.Module):
    def __init__(self, num_layers: int = 2, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(num_layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.run_layers(self.embedding(tokens))))


def make(cls: Callable[[], nn.Module] = Model, seed: int = 0) -> Any:
    """In float64, so that a missing or doubled gradient is not taken for rounding."""
    torch.manual_seed(seed)
    return cls().double()


def token_batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (8, 5), generator=generator)


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], device_type: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def dp_gtp() -> DeviceMesh:
    return mesh_of((2, 2), ("dp", "gtp"))


def blocks(model: Any) -> Sequence[nn.Module]:
    """The units of most models: each block, and the rest with the root."""
    return model.layers


def wrap(model: nn.Module, outer: DeviceMesh, units: Units = blocks, **options: Any) -> nn.Module:
    """``fully_shard`` on each unit, then on the root."""
    for unit in units(model):
        fully_shard(unit, mesh=outer, **options)  # type: ignore[call-overload]
    fully_shard(model, mesh=outer, **options)
    return model


def both(
    mesh: DeviceMesh,
    units: Units = blocks,
    gtp: dict[str, Any] | None = None,
    *,
    inner: Any = "gtp",
    outer: Any = "dp",
    **options: Any,
) -> Any:
    """From a model to one under ``gtp_shard(**gtp)`` inside of ``fully_shard(**options)``, over an axis or two each."""

    def shard(model: nn.Module) -> nn.Module:
        gtp_shard(model, mesh[inner], **{"schedule": ALL, **(gtp or {})})
        return wrap(model, mesh[outer], units, **options)

    return shard


def tensor_parallel(model: Any, tp: DeviceMesh) -> None:
    """``up`` column-wise, ``down`` row-wise; what lies between the blocks is the same on all ranks of ``tp``."""
    for layer in model.layers:
        parallelize_module(layer, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def three_axes(mesh: DeviceMesh, outer: Any = "dp", gtp: dict[str, Any] | None = None, **options: Any) -> Any:
    """From a model to one that is cut over tp, then gtp, then ``outer`` (two axes for HSDP)."""

    def shard(model: nn.Module) -> nn.Module:
        tensor_parallel(model, mesh["tp"])
        gtp_shard(model, mesh["gtp"], schedule=ALL, **(gtp or {}))
        return wrap(model, mesh[outer], **options)

    return shard


def check(reference: nn.Module, shard: Any, mesh: DeviceMesh, steps: int = 2, **options: Any) -> Any:
    """``check_training`` on the device of the mesh."""
    options.setdefault("make_optimizer", partial(sgd, fused=fused_on(mesh)))
    return check_training(
        reference.to(mesh.device_type),
        shard,
        mesh,
        lambda generator: token_batch(generator).to(mesh.device_type),
        options.pop("loss_fn", next_token_loss),
        steps=steps,
        **options,
    )


def make_seeded(seed: int) -> Any:
    return make(seed=seed)


def check_resumes(
    topologies: Sequence[Topology],
    make_optimizer: Callable[..., torch.optim.Optimizer] = momentum,
    make_model: Callable[[int], nn.Module] = make_seeded,
    device: str = "cpu",
) -> None:
    """What was trained on the first topology, and saved, resumes on each of them."""
    check_reload(
        lambda seed: make_model(seed).to(device),
        lambda step: token_batch(torch.Generator().manual_seed(step)).to(device),
        next_token_loss,
        topologies,
        make_optimizer,
    )


def check_checkpoints(mesh: DeviceMesh, shard: Callable[[Any], Any]) -> None:
    """What was saved resumes on these axes, from the meta device, under gtp alone and in one process."""
    data = mesh["dp", "gtp"] if mesh.ndim > 2 else mesh
    device = mesh.device_type

    def on_meta(model: nn.Module) -> Any:
        return shard(model.to("meta")).to_empty(device=device)

    alone = topology(lambda model: gtp_shard(model, data["gtp"], schedule=ALL), data["gtp"])
    adamw = partial(torch.optim.AdamW, lr=1e-2, fused=fused_on(mesh))
    check_resumes([topology(shard, data), topology(on_meta, data), alone, PLAIN], adamw, device=device)


def check_averages(case: Any, make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """Clipping, ``GradScaler`` and ``ShardedEMA`` as in one process."""
    reference, model = make(), case.shard(make())
    averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(reference)  # the first call copies
    ema = ShardedEMA(model, decay=0.9)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    optimizers = [make_optimizer(module.parameters()) for module in (reference, model)]
    for step in range(3):
        norms = []
        for module, scaler, optimizer in zip((reference, model), scalers, optimizers, strict=True):
            batch = token_batch(torch.Generator().manual_seed(step))
            batch = batch if module is reference else rows_of_rank(batch, case.mesh)
            scaler.scale(next_token_loss(module, batch)).backward()
            scaler.unscale_(optimizer)
            norms.append(full(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        case.assertEqual(norms[1], norms[0])
        assert_same_params(model, reference)
        averaged.update_parameters(reference)
        ema.update()
    batch = token_batch(torch.Generator().manual_seed(5))
    for _ in range(2):
        with ema.averaged(), torch.no_grad():
            assert_same_params(model, averaged.module)
            case.assertEqual(next_token_loss(model, batch), next_token_loss(averaged.module, batch))
        case.assertEqual(next_token_loss(model, batch), next_token_loss(reference, batch))
    with ema.averaged():  # where a backward may follow, too
        case.assertEqual(next_token_loss(model, batch), next_token_loss(averaged.module, batch))
    assert_same_params(model, reference)


def check_overflow(case: Any, make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """An overflow of one rank skips the step of all."""
    model = case.shard(make())
    before = [full(param).clone() for param in model.parameters()]
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    batch = rows_of_rank(token_batch(torch.Generator().manual_seed(0)), case.mesh)
    scaler.scale(next_token_loss(model, batch)).backward()
    if torch.distributed.get_rank() == 3:
        model.head.weight.grad.to_local().view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    case.assertEqual(scaler.get_scale(), 32.0)
    case.assertEqual([full(param) for param in model.parameters()], before, rtol=0, atol=0)
