"""Checkpoints of replicas of unequal sizes: one of them writes, all load.

Replicas of one size write the same chunks, of which ``torch.distributed.checkpoint`` (DCP) keeps one each. Replicas of
unequal sizes cut a weight at different rows: their chunks overlap, and DCP refuses such a checkpoint. So the sharded
tensors of the largest replica alone are written. A load needs nothing: each rank reads the rows that it holds.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from .mesh import ElasticMesh


class ReplicaSavePlanner(DefaultSavePlanner):
    """``dcp.save(state, planner=ReplicaSavePlanner(mesh))``, also for ``dcp.async_save``: on all ranks.

    The sharded tensors come from the ranks of the largest replica, where each has least to write; everything else is
    written once for each key, as always.

    Args:
        mesh: The replicas that the state is sharded over.
        options: As for torch's ``DefaultSavePlanner``.
    """

    def __init__(self, mesh: ElasticMesh, **options: Any) -> None:
        super().__init__(**options)
        replicas = mesh.layout.replicas
        writer = max(range(len(replicas)), key=lambda index: (len(replicas[index].ranks), -index))
        self._is_writer = mesh.place.replica == writer

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any | None = None, is_coordinator: bool = False
    ) -> None:
        """Leave out what another replica writes."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if not self._is_writer:
            state = self.state_dict
            self.state_dict = {key: value for key, value in state.items() if not isinstance(value, DTensor)}
