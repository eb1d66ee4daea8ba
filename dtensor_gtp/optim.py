"""Helpers for optimizers: masters of native weights (``_master_optimizer``), and ``Muon`` for sharded matrices.

Muon's update ``lr * orthogonalized(momentum of the gradient)`` mixes all rows of a matrix: no shard can compute its
part alone. ``torch.optim.Muon`` on DTensors (torch 2.11 to 2.13) makes each product of the iteration a collective one:
right up to the order of bfloat16 sums, 11 to 16 collectives a matrix, and refused for a matrix with fewer rows than
ranks. Here a matrix is orthogonalized whole, by one rank: ranks trade shards for whole matrices (all-to-all), work on
one each, and trade back: two collectives for as many matrices as there are ranks, and the bits of one process. State
and state dict are those of ``torch.optim.Muon``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from . import _torch_compat as compat
from .placement import chunk_size_and_offset
from .quant.master_optimizer import MasterOptimizer

Orthogonalize = Callable[[Tensor], Tensor]


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` with the same arguments, state and results, for parameters sharded by ``gtp_shard``.

    A matrix that is sharded over one mesh axis is orthogonalized by one rank of that axis. One that is sharded over
    several (tensor parallelism) is gathered and orthogonalized by each of its ranks; one that is whole, likewise.

    Args:
        params: 2-D parameters, DTensors or plain ones, or groups of them. Muon is meant for the matrices of hidden
            layers; give embeddings, heads and 1-D parameters to another optimizer.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: As in ``torch.optim.Muon``.

    Raises:
        ValueError: A parameter is not 2-D, or an argument is out of range.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
    https://kellerjordan.github.io/posts/muon/.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; collective over their meshes.

        Args:
            closure: Evaluates the model again and returns the loss.
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
            updates.append(update.bfloat16())  # what the iteration starts with, and half the bytes to exchange

        def orthogonalize(update: Tensor) -> Tensor:
            return compat.muon_orthogonalize(update, group["ns_coefficients"], group["ns_steps"], group["eps"])

        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.squeeze()
        for param, update in zip(params, orthogonalize_all(updates, orthogonalize), strict=True):
            param.mul_(1 - lr * group["weight_decay"])
            param.add_(update, alpha=-compat.muon_adjust_lr(lr, group["adjust_lr_fn"], param.shape))


class _Job(NamedTuple):
    """A matrix that is sharded over one axis.

    Args:
        position: Its place in the list of updates.
        rows: This rank's rows of it, as a vector; the sharded dim in front.
        row_numel: Elements of a row.
        num_rows: Rows of each rank of the axis.
        dim: The sharded dim.
    """

    position: int
    rows: Tensor
    row_numel: int
    num_rows: list[int]
    dim: int


def orthogonalize_all(updates: Sequence[Tensor], orthogonalize: Orthogonalize) -> list[Tensor]:
    """Orthogonalize each matrix as a whole.

    Args:
        updates: Matrices in bfloat16, DTensors or plain; the same ones in the same order on all ranks.
        orthogonalize: From a whole matrix of shape ``(M, N)`` to one of that shape, both bfloat16.

    Returns:
        One matrix for each update, bfloat16, placed as it is.
    """
    results: list[Tensor] = list(updates)
    shared: dict[str, list[_Job]] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    for index, update in enumerate(updates):
        if not isinstance(update, DTensor):
            results[index] = orthogonalize(update)
            continue
        axes = [
            axis
            for axis, p in enumerate(update.placements)
            if not p.is_replicate() and update.device_mesh.size(axis) > 1
        ]
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
        jobs.sort(key=lambda job: sum(job.num_rows) * job.row_numel)  # ranks work on matrices of like size at a time
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
    placement, world = update.placements[axis], update.device_mesh.size(axis)
    dim: int = placement.dim  # type: ignore[attr-defined]
    block_size = getattr(placement, "block_size", 1)
    num_rows = [chunk_size_and_offset(update.shape[dim], world, rank, block_size)[0] for rank in range(world)]
    rows = compat.local_tensor(update)
    return _Job(position, (rows.t() if dim else rows).reshape(-1), update.shape[1 - dim], num_rows, dim)


def _exchange(batch: list[_Job], group: dist.ProcessGroup, orthogonalize: Orthogonalize) -> list[Tensor]:
    """Let rank ``i`` orthogonalize matrix ``i`` of ``batch``.

    Returns:
        This rank's rows of each result, as vectors.
    """
    rank, world = dist.get_rank(group), group.size()
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


__all__ = ["MasterOptimizer", "Muon"]
