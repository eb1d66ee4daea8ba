"""The communicators of one weight mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat


def has_replicas(mesh: DeviceMesh) -> bool:
    """Whether other ranks hold the same shards, as in a (replicate, gtp) mesh."""
    return mesh.ndim == 2 and mesh.size(0) > 1


@dataclass(frozen=True)
class Groups:
    """Communicators of one weight mesh. Gathers and reduce-scatters have one each, so that they overlap in backward.

    It keeps names: a group object would outlive ``destroy_process_group`` and be torn down at interpreter exit, while
    its threads still run.
    """

    gather_name: str
    scatter_name: str
    replicate_name: str | None
    # Whether the gather casts what it sends, and copies it into this rank's part of the output.
    casts_shards: bool = False

    @property
    def gather(self) -> dist.ProcessGroup:
        return compat.resolve_group(self.gather_name)

    @property
    def scatter(self) -> dist.ProcessGroup:
        return compat.resolve_group(self.scatter_name)

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        """The group of the replicate axis, None if it has one rank or there is none."""
        return None if self.replicate_name is None else compat.resolve_group(self.replicate_name)
