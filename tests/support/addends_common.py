"""What stands for the kernel that adds the addends of all ranks, and for NCCL's exchange of them, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm.addends import add_parts


def joined(own: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's addend as a row."""
    return torch.cat([part.reshape(-1) for part in own])[None]


def add(
    out: torch.Tensor, rows: torch.Tensor, own: Sequence[torch.Tensor], rank: int, num_ranks: int, factor: float
) -> None:
    """What the kernel does, by torch."""
    assert rows.shape == (num_ranks - 1, out.numel())
    add_parts(out, rows, own, rank, num_ranks, factor)


def all_to_all_of_peers(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """``compat.all_to_all_of_peers``, which gloo lacks."""
    received = torch.empty_like(input)
    work = compat.all_to_all_base(received, input, group, async_op)
    if work is not None:
        work.wait()
    peers = [rank for rank in range(group.size()) if rank != group.rank()]
    output.copy_(received[peers])
    return work
