"""A strategy of Lightning for modules that call :func:`dtensor_gtp.gtp_shard` in ``configure_model``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._howto import see
from . import needs_extra
from ._checkpoint import load_optimizer_state, load_shards, names_of_params, state_to_load
from ._sharded import is_offloaded, move_unsharded, without_gradient_sync

with needs_extra("lightning"):
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from lightning.pytorch.strategies import ModelParallelStrategy


class GTPStrategy(ModelParallelStrategy):
    """A Lightning strategy for modules that call ``gtp_shard`` in ``configure_model``. Needs ``lightning``.

    It is a ``ModelParallelStrategy`` whose mesh has all processes on the axis ``data_parallel`` and that accumulates
    gradients without communication. Checkpoints are folders that any number of processes loads; with
    ``save_distributed_checkpoint=False``, files of whole tensors.

    Lightning's own ``ModelParallelStrategy`` has the same results and communicates gradients in each microbatch. Its
    default sizes give all processes of a host to tensor parallelism: pass ``data_parallel_size``.

    Args:
        tensor_parallel_size: Processes on the axis ``tensor_parallel`` of the mesh. The others share the data.
        **options: Those of ``ModelParallelStrategy``, but for ``data_parallel_size``.

    Raises:
        ValueError: (at the start of a run) ``tensor_parallel_size`` does not divide the number of processes; or a
            checkpoint is of an optimizer with other parameters or param groups.
        NotImplementedError: (at the start of a run) A callback is a ``StochasticWeightAveraging``.

    Example:
        >>> import lightning
        >>> class Model(lightning.LightningModule):
        ...     net = None
        ...     def configure_model(self):
        ...         if self.net is None:  # Lightning calls this several times
        ...             mesh = self.device_mesh["data_parallel"]
        ...             self.net = gtp_shard(nn.Linear(64, 64), mesh)
        ...     def training_step(self, batch):
        ...         return self.net(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.parameters())
        >>> trainer = lightning.Trainer(strategy=GTPStrategy(), accelerator="cpu", devices=4)
        >>> trainer.strategy
        <dtensor_gtp.integrations.lightning.GTPStrategy object at ...>
    """

    def __init__(self, tensor_parallel_size: int = 1, **options: Any) -> None:
        super().__init__(data_parallel_size="auto", tensor_parallel_size=tensor_parallel_size, **options)

    def setup_environment(self) -> None:
        """Choose the size of the axis ``data_parallel``, as soon as the number of processes is known."""
        num_processes: int = self.num_nodes * self.num_processes
        if num_processes % self._tensor_parallel_size:
            raise ValueError(
                f"GTPStrategy expects a tensor_parallel_size that divides the {num_processes} processes, but got "
                f"{self._tensor_parallel_size}. Pass a divisor."
            )
        self._data_parallel_size = num_processes // self._tensor_parallel_size
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Refuse Lightning's average of weights, which copies the module before ``configure_model`` shards it."""
        if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
            raise NotImplementedError(
                "GTPStrategy expects callbacks that work on sharded parameters, but got StochasticWeightAveraging. "
                f"For averages of weights use dtensor_gtp.optim.ShardedEMA. {see('ema')}"
            )
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move the module to this process's device, but not shards that an ``offload_policy`` keeps on the host."""
        if is_offloaded(self.model):
            move_unsharded(self.model, self.root_device)
        else:
            super().model_to_device()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint. From a folder, param groups keep the options that it lacks, e.g. those of a scheduler."""
        path = Path(self.broadcast(checkpoint_path))
        if not path.is_dir():
            return super().load_checkpoint(path, weights_only)
        optimizers = self.optimizers
        # Lightning expects each option in the checkpoint, so it loads all but the optimizers.
        self._optimizers = []
        try:
            rest: dict[str, Any] = super().load_checkpoint(path, weights_only)
        finally:
            self._optimizers = optimizers
        for index, optimizer in enumerate(optimizers):
            key = f"optimizer_{index}"
            names = names_of_params(optimizer, [self.model])
            state = {key: state_to_load(optimizer, names, path, key)}
            load_shards(state, path)
            load_optimizer_state(optimizer, names, state[key])
        return rest

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """What Lightning calls around all microbatches but the last."""
        with without_gradient_sync(self.model):
            yield


__all__ = ["GTPStrategy"]
