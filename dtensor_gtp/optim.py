"""``Muon`` for sharded matrices, ``gathered`` for other optimizers that need whole ones, ``MasterOptimizer`` for native
weights, and ``ShardedEMA``, averages of weights.

Muon's update ``lr * orthogonalized(momentum of the gradient)`` mixes all rows of a matrix, so no shard can compute its
part alone. ``torch.optim.Muon`` on DTensors (torch 2.11 to 2.13) needs 11 to 16 collectives for each matrix, sums in
another order, and refuses a matrix with fewer rows than ranks. Here one rank orthogonalizes a whole matrix: an
all-to-all sends each rank the shards of one matrix, a second one sends them back. So two collectives serve as many
matrices as there are ranks, and the results equal those of one process bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from . import _torch_compat as compat
from ._gathered_optimizer import gathered
from ._howto import see
from ._modules.binding import plain_name
from .placement import chunk_size_and_offset
from .quant.master import master_of
from .quant.master_optimizer import MasterOptimizer
from .quant.native import native_of

Orthogonalize = Callable[[Tensor], Tensor]


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` with the same arguments, state and results, for parameters sharded by ``gtp_shard``.

    If a matrix is sharded over one mesh axis, one rank of that axis orthogonalizes it. A matrix that is sharded over
    several axes (tensor parallelism) is gathered, and each of its ranks orthogonalizes it, as with a whole one. The
    result has the bits of one process. Two collectives serve one matrix of each rank. ``torch.optim.Muon`` takes 11 to
    16 collectives per matrix and needs as many rows as ranks, and its bfloat16 sums depend on the mesh. State dicts of
    the two are interchangeable.

    Args:
        params: 2-D parameters, DTensors or plain ones, or groups of them. Muon is meant for the matrices of hidden
            layers; give embeddings, heads and 1-D parameters to another optimizer.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: As in ``torch.optim.Muon``.

    Raises:
        ValueError: A parameter is not 2-D, or an argument is out of range.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
    https://kellerjordan.github.io/posts/muon/.

    Example:
        >>> mesh = init_weight_mesh("cpu", gtp=4)
        >>> model = gtp_shard(nn.Linear(64, 64, bias=False), mesh.weights)
        >>> optimizer = Muon(model.parameters(), lr=0.02)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; collective over their meshes.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What ``closure`` has returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        buffers: list[Tensor] = []
        self._init_group(group, params, grads, buffers)
        updates = []
        for grad, buffer in zip(grads, buffers, strict=True):
            buffer.lerp_(grad, 1 - group["momentum"])
            update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
            updates.append(update.bfloat16())  # the iteration runs in bfloat16, so exchange half the bytes

        def orthogonalize(update: Tensor) -> Tensor:
            return compat.muon_orthogonalize(update, group["ns_coefficients"], group["ns_steps"], group["eps"])

        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.squeeze()
        for param, update in zip(params, orthogonalize_all(updates, orthogonalize), strict=True):
            param.mul_(1 - lr * group["weight_decay"])
            param.add_(update, alpha=-compat.muon_adjust_lr(lr, group["adjust_lr_fn"], param.shape))


class _Job(NamedTuple):
    """A matrix that is sharded over one axis. Its "rows" run along the sharded dim."""

    position: int  # in the list of updates
    rows: Tensor  # those of this rank, as a vector
    row_numel: int
    num_rows: list[int]  # of each rank of the axis
    dim: int  # the sharded dim


def orthogonalize_all(updates: Sequence[Tensor], orthogonalize: Orthogonalize) -> list[Tensor]:
    """Orthogonalize each matrix as a whole.

    Args:
        updates: Matrices in bfloat16, DTensors or plain; the same ones in the same order on all ranks.
        orthogonalize: From a whole matrix of shape ``(M, N)`` to one of that shape, both bfloat16.

    Returns:
        One matrix for each update, bfloat16, with the placements of the update.
    """
    results: list[Tensor] = list(updates)
    shared: dict[str, list[_Job]] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    for index, update in enumerate(updates):
        if not isinstance(update, DTensor):
            results[index] = orthogonalize(update)
            continue
        sizes = zip(update.placements, update.device_mesh.shape, strict=True)
        axes = [axis for axis, (placement, size) in enumerate(sizes) if size > 1 and not placement.is_replicate()]
        if not axes:
            results[index] = _placed_as(update, orthogonalize(compat.local_tensor(update)))
        elif len(axes) == 1 and _is_contiguous_shard(update.placements[axes[0]]):
            group = update.device_mesh.get_group(axes[0])
            groups[group.group_name] = group
            shared.setdefault(group.group_name, []).append(_job(index, update, axes[0]))
        else:
            whole = orthogonalize(update.full_tensor())
            replicated = DTensor.from_local(whole, update.device_mesh, [Replicate()] * update.device_mesh.ndim)
            results[index] = replicated.redistribute(placements=update.placements)
    for name, jobs in shared.items():
        jobs.sort(key=lambda job: sum(job.num_rows) * job.row_numel)  # matrices of one batch have similar sizes
        for begin in range(0, len(jobs), groups[name].size()):
            batch = jobs[begin : begin + groups[name].size()]
            for job, rows in zip(batch, _exchange(batch, groups[name], orthogonalize), strict=True):
                local = rows.view(-1, job.row_numel)
                results[job.position] = _placed_as(updates[job.position], local.t() if job.dim else local)
    return results


def _is_contiguous_shard(placement: Placement) -> bool:
    """Whether each rank of the axis has one block of consecutive rows, in rank order."""
    return isinstance(placement, Shard) and getattr(placement, "split_factor", 1) == 1


def _job(position: int, update: DTensor, axis: int) -> _Job:
    placement = update.placements[axis]
    world = update.device_mesh.size(axis)
    dim: int = placement.dim  # type: ignore[attr-defined]
    block_size = getattr(placement, "block_size", 1)
    num_rows = [chunk_size_and_offset(update.shape[dim], world, rank, block_size)[0] for rank in range(world)]
    rows = compat.local_tensor(update)
    return _Job(position, (rows.t() if dim else rows).reshape(-1), update.shape[1 - dim], num_rows, dim)


def _exchange(batch: list[_Job], group: dist.ProcessGroup, orthogonalize: Orthogonalize) -> list[Tensor]:
    """Let rank ``i`` orthogonalize matrix ``i`` of ``batch``. Returns this rank's rows of each result, as vectors."""
    rank = dist.get_rank(group)
    world = group.size()
    mine = batch[rank] if rank < len(batch) else None
    sizes = [job.rows.numel() for job in batch]
    splits = sizes + [0] * (world - len(batch))
    whole_splits = [num * mine.row_numel for num in mine.num_rows] if mine is not None else [0] * world
    shards = torch.cat([job.rows for job in batch])
    whole = shards.new_empty(sum(whole_splits))
    dist.all_to_all_single(whole, shards, whole_splits, splits, group=group)
    if mine is not None:
        rows = whole.view(-1, mine.row_numel)
        result = orthogonalize(rows.t().contiguous() if mine.dim else rows)
        whole = (result.t() if mine.dim else result).reshape(-1)
    dist.all_to_all_single(shards, whole.contiguous(), splits, whole_splits, group=group)
    return list(shards.split(sizes))


def _placed_as(update: Tensor, local: Tensor) -> Tensor:
    assert isinstance(update, DTensor)
    return DTensor.from_local(
        local, update.device_mesh, update.placements, run_check=False, shape=update.shape, stride=update.stride()
    )


class ShardedEMA:
    """Exponential moving averages of a model's parameters, sharded as the parameters are.

    ``average = average + (1 - decay) * (parameter - average)``, bit for bit as ``torch.optim.swa_utils`` with
    ``get_ema_multi_avg_fn(decay)`` in one process. Each rank averages its shards, without communication.

    It is ``Stateful``: save and load ``{"model": model.state_dict(), "ema": ema}``, on any topology. Buffers are not
    averaged.

    Args:
        model: A module after ``gtp_shard`` or ``fully_shard``, or a plain one.
        decay: In [0, 1]. The attribute of this name may be changed at any time, e.g. to begin with a smaller one.
        dtype: Of the averages. None takes that of each parameter; ``torch.float32`` is right for bfloat16 parameters,
            whose averages would not move. Parameters that are not floating-point are left out.

    Raises:
        ValueError: ``decay`` is out of its range.
        NotImplementedError: A weight that is trained has native storage (:func:`~dtensor_gtp.quantize_`).
        RuntimeError: A parameter is on the meta device. Later: the model has other parameters than at first.

    Source: B. Polyak and A. Juditsky, "Acceleration of stochastic approximation by averaging", 1992;
    ``torch.optim.swa_utils.AveragedModel``.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> ema = ShardedEMA(model, decay=0.999)
        >>> for _ in range(3):
        ...     model(torch.randn(8, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     ema.update()
        >>> with ema.averaged(), torch.no_grad():  # the model has the averages in here
        ...     loss = model(torch.randn(8, 64)).square().mean()
        >>> ema.load_state_dict(ema.state_dict())
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, dtype: torch.dtype | None = None) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"ShardedEMA expects a decay in [0, 1], but got {decay}.")
        self.decay = decay
        self._model = model
        self._averages: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] | None = None  # the parameters' own values, while these are the averages
        for name, param in self._params().items():
            local = _values_of(param)
            if local.is_meta:
                raise RuntimeError(
                    f"ShardedEMA expects parameters with values, but '{name}' of shape {tuple(param.shape)} is on the "
                    "meta device. Load or initialize the model before. " + see("ema")
                )
            average = local.to(dtype or local.dtype, copy=True)
            if isinstance(param, DTensor):
                spec = compat.dtensor_spec(param)
                spec = compat.make_spec(spec.mesh, spec.placements, param.shape, average.dtype)
                average = compat.wrap_local(average, spec)
            self._averages[name] = average

    def _params(self) -> dict[str, nn.Parameter]:
        """Parameters that are averaged, as the model has them now: loading a state dict may have replaced them."""
        self._reshard()
        params = {}
        for name, param in self._model.named_parameters():
            if not param.is_floating_point():
                continue
            if native_of(param) is None:
                params[name.replace("_orig_mod.", "")] = param  # the prefix is of compiled modules
            elif param.requires_grad:  # the average of a frozen one is itself
                raise NotImplementedError(
                    f"ShardedEMA averages values in high precision, but parameter '{name}' of shape "
                    f"{tuple(param.shape)} has native storage. Use storage='master', or freeze the parameter. "
                    + see("ema")
                )
        return params

    def _checked_params(self) -> dict[str, nn.Parameter]:
        """The same, if each of them has an average."""
        present = {plain_name(name): param for name, param in self._params().items()}
        names = {plain_name(name): name for name in self._averages}  # a layer may have been wrapped since
        if present.keys() != names.keys():
            raise RuntimeError(
                "ShardedEMA expects the parameters that the model had at first, but only one of the two has "
                f"{sorted(present.keys() ^ names.keys())}. Make a new ShardedEMA after changes of the model."
            )
        params = {names[name]: param for name, param in present.items()}
        for name, param in params.items():
            shapes = [tuple(compat.local_part(each).shape) for each in (param, self._averages[name])]
            if shapes[0] != shapes[1]:
                raise RuntimeError(
                    f"ShardedEMA expects parameter '{name}' sharded as at first, with {shapes[1]} on this rank, but "
                    f"got {shapes[0]}. Make a new ShardedEMA after changes of the model."
                )
        return params

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the current parameters. Call it after each step of the optimizer.

        Raises:
            RuntimeError: The model has the averages at the moment.
        """
        if self._weights is not None:
            raise RuntimeError("ShardedEMA.update expects a model with its own weights. Call restore() before.")
        averages = []
        values = []
        for name, param in self._checked_params().items():
            averages.append(compat.local_part(self._averages[name]))
            values.append(_values_of(param).to(averages[-1].dtype))
        compat.lerp_all(averages, values, 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Give the model the averages, and keep its own weights until :meth:`restore`; one more shard in memory.

        Raises:
            RuntimeError: The model has the averages already.

        Example:
            >>> model = nn.Linear(2, 2)
            >>> ema = ShardedEMA(model, decay=0.5)
            >>> ema.swap()
            >>> state = model.state_dict()  # of the averages
            >>> ema.restore()
        """
        if self._weights is not None:
            raise RuntimeError("ShardedEMA.swap was called twice. Call restore() in between.")
        params = self._checked_params()
        self._weights = {name: _values_of(param).clone() for name, param in params.items()}
        _write(params, self._averages)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the model its own weights back, bit for bit.

        Raises:
            RuntimeError: The model has its own weights.
        """
        if self._weights is None:
            raise RuntimeError("ShardedEMA.restore expects a model that has the averages. Call swap() before.")
        _write(self._checked_params(), self._weights)
        self._weights = None  # last: the values must not be lost if a change of the model is refused

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the averages within this context."""
        self.swap()
        try:
            yield
        finally:
            self.restore()

    def _reshard(self) -> None:
        """Let ``fully_shard`` free what it has kept after a forward: it would not gather the new values, and the model
        would have whole parameters."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def state_dict(self) -> dict[str, Any]:
        """The averages and the decay. The tensors are the averages themselves, not copies.

        Returns:
            ``{"averages": {name of a parameter: its average}, "decay": float}``.
        """
        return {"averages": dict(self._averages), "decay": self.decay}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take averages and ``decay`` from a state dict.

        Args:
            state_dict: What :meth:`state_dict` has given, or the same with whole tensors.

        Raises:
            ValueError: Names of parameters, or shapes, differ.
        """
        given = state_dict["averages"]
        if given.keys() != self._averages.keys():
            differing = sorted(given.keys() ^ self._averages.keys())
            raise ValueError(
                f"ShardedEMA expects averages of the same parameters, but only one of the two has {differing}."
            )
        for name, average in self._averages.items():
            value = given[name]
            if value.shape != average.shape:
                shapes = f"shape {tuple(average.shape)}, but got {tuple(value.shape)}"
                raise ValueError(f"ShardedEMA expects an average of '{name}' of {shapes}.")
            if isinstance(average, DTensor) and not isinstance(value, DTensor):
                value = compat.own_part(value, average.device_mesh, average.placements)
            if value is not average:
                compat.local_part(average).copy_(compat.local_part(value))
        self.decay = state_dict["decay"]


def _write(params: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, param in params.items():
        _values_of(param).copy_(compat.local_part(values[name]))
        torch.autograd.graph.increment_version(param)


def _values_of(param: Tensor) -> Tensor:
    """What this rank holds of a parameter; of a weight with a recipe, its master."""
    return master_of(compat.local_part(param).detach())


__all__ = ["MasterOptimizer", "Muon", "ShardedEMA", "gathered"]
