"""Trains the model of a draw beside one process and says what differs; runs many draws; shrinks one that fails.

A draw of fewer ranks than there are workers takes a *lane* of them: with four workers, two draws of two ranks run side
by side. Nothing is raised while a draw runs: after each round the ranks tell each other what they found, on a process
group of their own, so that all of them go on or stop together. If a rank raised where others wait in a collective, that
collective's time limit ends their waiting.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from common import full
from fuzz import AXES, Draw
from fuzz_events import happen_after, happen_between, is_sharded
from fuzz_model import Broken, Model, loss_of, make_batch, quantize
from quant_common import take_over
from schedules import explicit
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import (
    GTPShard,
    MixedPrecisionPolicy,
    SchedulePolicy,
    _torch_compat,
    gtp_shard,
    register_gtp_forward_method,
)
from dtensor_gtp._modules import bad_arguments as _validate

# Fields of a draw that are those of a schedule.
POLICIES = (
    *("prefetch_depth", "min_shard_numel", "prefetch_nbytes", "coalesce_nbytes", "expert_blocks_ahead", "keep_nbytes"),
    *("embedding", "reduce_scatter", "wgrad_first", "keep_last"),
)

# --- meshes -----------------------------------------------------------------------------------------------------------


class Meshes:
    """Every mesh once for a worker: to connect its process groups takes longer than a small draw."""

    def __init__(self) -> None:
        self.num_workers = dist.get_world_size()
        self._device_type = torch.get_default_device().type
        self._known: dict[Any, DeviceMesh] = {}
        self._twins: dict[str, dist.ProcessGroup] = {}
        self.status = dist.new_group(timeout=timedelta(minutes=10), backend="gloo")  # longer than those of the lanes

    def prepare(self, draw: Draw) -> None:
        """Collective over all workers, also those that will not run the draw."""
        self.root(draw)
        self.nested(draw)

    @property
    def has_gpus(self) -> bool:
        return self._device_type == "cuda"

    def root(self, draw: Draw) -> DeviceMesh:
        return self._mesh(draw.axes, draw.order_of_axes, draw.is_transposed, draw.flipped)

    def nested(self, draw: Draw) -> DeviceMesh:
        root = self._mesh((1, *draw.nested_axes, draw.world // (draw.nested_axes[0] * draw.nested_axes[1])))
        return root["replicate", "gtp"]

    def _mesh(
        self,
        sizes: tuple[int, ...],
        order: tuple[int, ...] = (0, 1, 2, 3),
        is_transposed: bool = False,
        flipped: tuple[str, ...] = (),
    ) -> DeviceMesh:
        # What makes no difference makes no other mesh: the order of axes of one rank.
        is_transposed = is_transposed and sizes[1] > 1 and sizes[2] > 1
        order = order if sum(sizes[i] > 1 for i in order) > 1 else (0, 1, 2, 3)
        flipped = tuple(axis for axis in flipped if sizes[AXES.index(axis)] > 1)
        key = (sizes, order, is_transposed, flipped)
        if key not in self._known:
            strides = [2 if i == 1 else 1 if i == 2 else i for i in order] if is_transposed else list(order)
            ranks = torch.arange(self.num_workers, device="cpu").view(-1, *(sizes[i] for i in strides))
            ranks = ranks.permute(0, *(1 + strides.index(i) for i in order))
            ranks = ranks.flip([1 + order.index(AXES.index(axis)) for axis in flipped])
            self._known[key] = DeviceMesh(self._device_type, ranks, mesh_dim_names=("lane", *(AXES[i] for i in order)))
        return self._known[key]

    def twin_group(self, group: dist.ProcessGroup, *args: Any) -> dist.ProcessGroup:
        """The runtime's second communicator, which each ``gtp_shard`` makes anew."""
        if group.group_name not in self._twins:
            self._twins[group.group_name] = _twin_group(group, *args)
        return self._twins[group.group_name]


_twin_group = _torch_compat.twin_group


# --- one draw ---------------------------------------------------------------------------------------------------------


def _place(draw: Draw, model: Model) -> dict[nn.Parameter, Placement]:
    asked: dict[nn.Parameter, Placement] = {}
    for layer, module in zip(draw.layers, model.layers, strict=True):
        for param in module.parameters() if layer.placement else ():
            if param.ndim < 2:
                continue
            if layer.placement == "replicate":
                asked[param] = Replicate()
            else:
                asked[param] = GTPShard(1) if layer.placement == "dim1" else GTPShard(0, block_size=2)
    return asked


def _mixed_precision(draw: Draw) -> MixedPrecisionPolicy:
    dtypes: dict[str, tuple[torch.dtype | None, ...]] = {
        "": (),
        "low": (torch.bfloat16, torch.float32, torch.float32),
        "wide": (torch.float64,),
        "narrow": (torch.float32, torch.float64),
        "reduce": (None, torch.float64),
    }
    return MixedPrecisionPolicy(*dtypes[draw.mixed])


def _schedule(draw: Draw) -> SchedulePolicy:
    copies: dict[str, Any] = {"gather_backend": "copy_engine", "reduce_scatter": "copy_engine"} if draw.copies else {}
    if draw.groups:
        return SchedulePolicy(
            **copies or {"reduce_scatter": "all_to_all" if draw.reduce_scatter == "all_to_all" else "auto"},
            prefetch_nbytes=draw.prefetch_nbytes,
            keep_nbytes=draw.keep_nbytes,
            embedding=draw.embedding,
            min_shard_numel=draw.min_shard_numel,
        )
    numbers = {name: getattr(draw, name) for name in POLICIES}
    return explicit(max_inflight_reduce_scatters=draw.max_inflight, **{**numbers, **copies})


def shard(draw: Draw, model: Model, meshes: Meshes) -> None:
    """Apply the composition of ``draw``."""
    root = meshes.root(draw)
    mesh = root["replicate", "gtp"] if draw.hsdp else root["gtp"]
    for layer, module in zip(draw.layers, model.layers, strict=True):
        if layer.tp:
            parallelize_module(module, root["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    asked = _place(draw, model)
    options: dict[str, Any] = {
        "reshard_after_forward": draw.reshard_after_forward,
        "shard_placement_fn": asked.get if asked else None,
        "mp_policy": _mixed_precision(draw),
        "schedule": _schedule(draw),
        "shard_optimizer": draw.shard_optimizer,
        "offload_policy": CPUOffloadPolicy(pin_memory=meshes.has_gpus) if draw.offload else OffloadPolicy(),
    }
    with mock.patch.dict(os.environ, DTENSOR_GTP_DEBUG=draw.debug):
        for layer, module in zip(draw.layers, model.layers, strict=True):
            if layer.nested:
                inner = {**options, "mp_policy": replace(options["mp_policy"], output_dtype=None)}
                gtp_shard(module, meshes.nested(draw) if layer.nested == "mesh" else mesh, **inner)
        gtp_shard(model, mesh, **options)
    if draw.uses_dp:
        if draw.outer_units:
            for module in _units(draw, model):
                fully_shard(module, mesh=root["dp"], reshard_after_forward=draw.outer_reshard)
        fully_shard(model, mesh=root["dp"], reshard_after_forward=draw.outer_reshard)
    if not draw.reshard_after_backward:
        model.set_reshard_after_backward(False)  # type: ignore[operator]
    if draw.divides_by:
        model.set_gradient_divide_factor(draw.divides_by)  # type: ignore[operator]
    if draw.any_use:
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    if draw.calls != "forward":
        register_gtp_forward_method(model, "predict")
        register_fsdp_forward_method(model, "predict")  # nothing without fully_shard
    for layer, module in zip(draw.layers, model.layers, strict=True):
        if layer.compiled:
            module.compile(backend="aot_eager")


def _units(draw: Draw, model: Model) -> list[nn.Module]:
    """Layers with a ``fully_shard`` of their own: those that share no parameter."""
    tied = {i for pair in ((i, layer.tied) for i, layer in enumerate(draw.layers) if layer.tied >= 0) for i in pair}
    return [module for i, module in enumerate(model.layers) if i not in tied]


class LocalSGD(torch.optim.Optimizer):
    """Writes to local tensors: an optimizer that DTensor plans nothing for, which is most of a small draw's time."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                value, grad = (t.to_local() if isinstance(t, DTensor) else t for t in (param, param.grad))
                value.sub_(self.param_groups[0]["lr"] * grad)


def make_optimizer(draw: Draw, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    lr = 0.05 if draw.is_low_precision else 0.3
    if draw.optimizer == "local":
        return LocalSGD(params, lr)
    if draw.optimizer.startswith("adamw"):
        is_fused, is_foreach = draw.optimizer == "adamw_fused", draw.optimizer == "adamw"
        # A large eps: without it the update of a gradient near zero is the sign of its rounding error.
        return torch.optim.AdamW(params, lr=3e-2, eps=1e-3, fused=is_fused, foreach=is_foreach)
    momentum = 0.9 if draw.optimizer == "momentum" else 0.0
    return torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=0.01)


def run_draw(draw: Draw, meshes: Meshes) -> list[str]:
    """Train; what differs from one process, a line each. Collective over the lane of the draw."""
    if any(layer.compiled for layer in draw.layers):
        torch._dynamo.reset()
    reference, model = Model(draw), Model(draw)
    quantize(reference, model)
    # The search for optimizers and wrappers that were made too early goes through all objects of the process.
    no_search = mock.patch.object(_validate, "_living", return_value=[])
    with no_search, mock.patch.object(_torch_compat, "twin_group", meshes.twin_group):
        shard(draw, model, meshes)
        return list(_train(draw, reference, model, _data_index(draw, meshes.root(draw))))


def _data_index(draw: Draw, root: DeviceMesh) -> int:
    index = 0
    for axis in ("dp", "replicate", "gtp"):
        index = index * root[axis].size() + root.get_local_rank(axis)
    return index


def _train(draw: Draw, reference: Model, model: Model, index: int) -> Iterator[str]:
    optimizers = [make_optimizer(draw, list(m.parameters())) for m in (reference, model)]
    for m in (reference, model) if draw.hooks else ():
        for param in m.parameters():
            param.register_post_accumulate_grad_hook(_halve)
    for step in range(draw.steps):
        for m in (reference, model):
            m.set_frozen(step)
        if draw.unshards:
            model.unshard()  # type: ignore[operator]
        rows = slice(index * draw.rows, (index + 1) * draw.rows)
        if draw.breaks:
            _break_off(draw, model, step, rows)
        inputs = [_run_step(draw, m, step, part) for m, part in ((reference, slice(None)), (model, rows))]
        if draw.needs_input_grad:
            for micro, pair in enumerate(zip(*inputs, strict=True)):
                what = f"input of microbatch {micro} of step {step}"
                yield from _difference(draw, what, *_input_grads(draw, pair, rows))
        if draw.unshards:
            model.reshard()  # type: ignore[operator]
        yield from _compare(draw, model, reference, f"grad after step {step}")
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (reference, model) if draw.clips]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not draw.keeps_zeros)
        for m in (reference, model):
            happen_after(draw, m)
        if norms:
            yield from _difference(draw, f"norm of step {step}", full(norms[1]), full(norms[0]))
        yield from _compare(draw, model, reference, f"param after step {step}")
        if draw.recipe:
            take_over(reference, model)
        if draw.evaluates:
            yield from _evaluate(draw, reference, model, step, rows)


def _halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def _run_step(draw: Draw, model: Model, step: int, rows: slice) -> list[torch.Tensor]:
    """Forward and backward of all microbatches of a step; their inputs."""
    inputs, losses = [], []
    for micro in range(draw.microbatches):
        phase = step * draw.microbatches + micro
        inputs.append(make_batch(draw, phase))
        losses.append(_loss(draw, model, inputs[-1][rows], phase))
        happen_between(draw, model, rows, phase)
        if not draw.interleaves:
            _backward(draw, model, losses.pop(), micro)
            if draw.scales:
                _scale(draw, model)
    for micro, loss in enumerate(losses):
        _backward(draw, model, loss, micro)
    return inputs


@torch.no_grad()
def _scale(draw: Draw, model: Model) -> None:
    """Write to parameters without an optimizer, as averaging or pruning does."""
    for param in model.parameters():
        (param.to_local() if draw.scales == "local" and isinstance(param, DTensor) else param).mul_(0.75)


def _call(draw: Draw, model: Model, batch: torch.Tensor, phase: int) -> torch.Tensor:
    by_method = draw.calls == "method" or (draw.calls == "turns" and phase % 2 == 1)
    return model.predict(batch, phase) if by_method else model(batch, phase)


def _loss(draw: Draw, model: Model, batch: torch.Tensor, phase: int) -> torch.Tensor:
    output = _call(draw, model, batch, phase)
    loss = loss_of(output) / draw.microbatches
    if draw.penalizes and output.requires_grad:
        (slope,) = torch.autograd.grad(output.sin().sum(), batch, create_graph=True)
        loss = loss + 0.1 * slope.square().mean()
    return loss * (draw.num_data / draw.divides_by) if draw.divides_by and not is_sharded(model) else loss


def _backward(draw: Draw, model: Model, loss: torch.Tensor, micro: int) -> None:
    if draw.unsynced and is_sharded(model):
        switches = {"gradient": "set_requires_gradient_sync", "all_reduce": "set_requires_all_reduce"}
        getattr(model, switches[draw.unsynced])(micro == draw.microbatches - 1)
    if loss.requires_grad:
        if draw.retains_graph:
            loss.backward(retain_graph=True)
        loss.backward()
    else:  # no backward takes from the model what an outer fully_shard has gathered and keeps
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _break_off(draw: Draw, model: Model, step: int, rows: slice) -> None:
    """A forward or backward that ends with an exception, as that of a batch that does not fit into memory. It leaves
    no trace in gradients."""
    model.breaks = draw.breaks
    with contextlib.suppress(Broken):
        phase = step * draw.microbatches
        loss = _loss(draw, model, make_batch(draw, phase)[rows], phase)
        if loss.requires_grad:
            loss.backward()
    model.breaks = ""


def _input_grads(draw: Draw, inputs: Sequence[torch.Tensor], rows: slice) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A rank's loss is the mean over its own rows, the reference's that over all of them."""
    expected, actual = (batch.grad for batch in inputs)
    assert expected is not None
    assert actual is not None
    factor = draw.divides_by or draw.num_data
    return actual[rows], expected[rows] * factor, float(expected.abs().max()) * factor


def _evaluate(draw: Draw, reference: Model, model: Model, step: int, rows: slice) -> Iterator[str]:
    with torch.no_grad():
        batch = make_batch(draw, 1000 + step).detach()[rows]
        outputs = [_call(draw, m, batch, 0) for m in (model, reference)]
    yield from _difference(draw, f"output after step {step}", *outputs)


# --- comparison -------------------------------------------------------------------------------------------------------


def local_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """What this rank holds of ``whole``, by arithmetic that shares nothing with the package: axes cut one after the
    other, that of an outer ``fully_shard`` last."""
    mesh = like.device_mesh
    names = mesh.mesh_dim_names or ()
    for axis in sorted(range(mesh.ndim), key=lambda axis: names[axis] == "dp"):
        placement = like.placements[axis]
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        block = getattr(placement, "block_size", 1)
        size, parts, part = whole.shape[dim], mesh.size(axis), mesh.get_group(axis).rank()
        rows = -(-size // (parts * block)) * block
        begin = min(part * rows, size)
        whole = whole.narrow(dim, begin, min(rows, size - begin))
    return whole


def _compare(draw: Draw, model: Model, reference: Model, what: str) -> Iterator[str]:
    """Compare this rank's parts of all parameters, or of their gradients."""
    expected = dict(reference.named_parameters())
    is_grad = what.startswith("grad")
    values = {name: p.grad if is_grad else p.detach() for name, p in expected.items()}
    scale = max((float(v.abs().max()) for v in values.values() if v is not None), default=0.0)
    actual = dict(model.named_parameters())
    if actual.keys() != expected.keys():
        yield f"{what}: parameters {sorted(actual)} instead of {sorted(expected)}"
        return
    for name, param in actual.items():
        mine, want = param.grad if is_grad else param.detach(), values[name]
        if mine is None or want is None:
            if mine is not want:
                yield f"{what} of {name}: {'none' if mine is None else 'one'} where the reference is the opposite"
            continue
        assert isinstance(mine, DTensor)
        if draw.shard_optimizer:
            yield from _difference(draw, f"{what} of {name}", mine.full_tensor(), want, scale)
            continue
        if mine.placements != param.placements:  # type: ignore[attr-defined]
            yield f"{what} of {name}: placements {mine.placements} instead of {param.placements}"  # type: ignore[attr-defined]
        yield from _difference(draw, f"{what} of {name}", mine.to_local(), local_part(want, mine), scale)


def _tolerance(draw: Draw) -> float:
    if draw.is_low_precision:
        return 0.3
    dtypes = {draw.dtype, *(layer.dtype for layer in draw.layers)}
    is_double = "float32" not in dtypes and draw.mixed != "narrow"
    return 1e-9 if is_double else 2e-4


def _difference(
    draw: Draw, what: str, actual: torch.Tensor, expected: torch.Tensor, scale: float | None = None
) -> Iterator[str]:
    if not actual.numel() and not expected.numel():
        return  # fully_shard gives (0, 0) to its part of a shard of shape (3, 0)
    if actual.shape != expected.shape:
        yield f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    else:
        wide = expected.detach().double()
        # What is offloaded is on the host.
        off = float((actual.detach().to(wide.device).double() - wide).abs().max())
        own = float(wide.abs().max())
        # Where a gradient vanishes, what is left is the rounding of the larger terms that it is made of.
        if not off <= _tolerance(draw) * (own + 0.1 * (own if scale is None else scale)) + 1e-12:
            yield f"{what}: off by {off:.3g} of {own:.3g}"


# --- many draws -------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What came of a draw: the differences or the traceback of each rank that has any."""

    draw: Draw
    failures: dict[int, str]
    # A rank raised: collectives of the others may be left half done, so these workers are of no further use.
    is_raised: bool


def rounds(draws: Iterable[Draw], num_workers: int) -> Iterator[list[Draw]]:
    """Draws of one number of ranks, as many as there are lanes."""
    waiting: dict[int, list[Draw]] = {}
    for draw in draws:
        queue = waiting.setdefault(draw.world, [])
        queue.append(draw)
        if len(queue) * draw.world == num_workers:
            yield waiting.pop(draw.world)
    yield from waiting.values()


def run_round(draws: Sequence[Draw], meshes: Meshes) -> list[Outcome]:
    """Run draws side by side, one a lane. Collective over all workers; all of them get all outcomes."""
    for draw in draws:
        meshes.prepare(draw)
    lane = dist.get_rank() // draws[0].world
    mine: tuple[str, bool] = ("", False)
    if lane < len(draws):
        try:
            mine = ("\n".join(run_draw(draws[lane], meshes)), False)
        except Exception:
            mine = (traceback.format_exc(), True)
    status = torch.tensor(bool(mine[0]), dtype=torch.int64, device="cpu")
    dist.all_reduce(status, group=meshes.status)
    if not status.item():
        return [Outcome(draw, {}, False) for draw in draws]
    found: list[Any] = [None] * meshes.num_workers
    dist.all_gather_object(found, mine, group=meshes.status)
    outcomes = []
    for lane, draw in enumerate(draws):
        ranks = range(lane * draw.world, (lane + 1) * draw.world)
        failures = {rank: found[rank][0] for rank in ranks if found[rank][0]}
        outcomes.append(Outcome(draw, failures, any(found[rank][1] for rank in ranks)))
    return outcomes
