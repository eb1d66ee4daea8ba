"""``accelerate.Accelerator`` for models that :func:`dtensor_gtp.gtp_shard` has sharded.

The stock accelerator wraps the models of several processes in DDP. This one takes a sharded model as it is. It replaces
the methods that take a parameter for a whole tensor: it accumulates without communication, gathers whole state dicts,
and saves and loads shards by ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from .._modules.binding import outermost_calls
from ..checkpoint import save
from . import needs_extra
from ._sharded import take_gpu_generator, without_gradient_sync

with needs_extra("accelerate"):
    from accelerate import Accelerator
    from accelerate.checkpointing import load_accelerator_state
    from accelerate.utils import RNG_STATE_NAME, is_peft_model
    from accelerate.utils import load as load_file

STATE_FOLDER = "sharded_state"  # below a checkpoint, what torch.distributed.checkpoint wrote


class GTPAccelerator(Accelerator):
    """An ``Accelerator`` whose ``prepare`` does not wrap models after ``gtp_shard``. Needs ``accelerate``.

    Use it instead of the stock one; models that are not sharded are treated as there. Shard the model first, over all
    processes, and make the optimizer afterwards.

    - ``accumulate`` and ``no_sync`` communicate no gradients until the last microbatch.
    - With a ``param_dtype`` in the ``mp_policy`` of ``gtp_shard``, ``mixed_precision`` adds no autocast.
    - ``get_state_dict`` returns whole tensors on the host of rank 0, and an empty dict on other ranks. ``save_model``
      writes them. Call both on all ranks.
    - ``save_state`` and ``load_state`` work on any number of ranks. Of a PEFT model they store what is trained.

    Example:
        >>> accelerator = GTPAccelerator(cpu=True, gradient_accumulation_steps=2)
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> for _ in range(2):
        ...     with accelerator.accumulate(model):  # no_sync(model) for the first
        ...         accelerator.backward(model(torch.randn(2, 64)).square().mean())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> state = accelerator.get_state_dict(model)  # whole on rank 0
        >>> folder = accelerator.save_state("checkpoint")
        >>> accelerator.load_state("checkpoint")
    """

    _models: list[Any]
    _optimizers: list[Any]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As ``Accelerator.prepare_model``, without DDP around a sharded model. Called by ``prepare``.

        Args:
            model: With or without weights that ``gtp_shard`` has sharded.
            device_placement, evaluation_mode: Of models that are not sharded, as in the stock method.

        Raises:
            NotImplementedError: The model is sharded over other ranks than all processes.
        """
        groups = outermost_calls(model)
        if not groups:
            return super().prepare_model(model, device_placement, evaluation_mode)
        for group in groups:
            mesh = group.arguments.mesh
            if mesh.size() != self.num_processes:
                raise NotImplementedError(
                    f"GTPAccelerator expects models sharded over all {self.num_processes} processes, because each "
                    f"gets different data, but got a {type(group.module).__name__} on mesh axes "
                    f"{mesh.mesh_dim_names} of {mesh.size()} ranks. Pass a 1-D (gtp) or 2-D (replicate, "
                    "gtp) mesh of all processes to gtp_shard."
                )
            if group.arguments.mp_policy.param_dtype is not None:
                self.native_amp = False  # the policy casts
        # In evaluation mode, the stock method casts and compiles only.
        vars(model).setdefault("_is_accelerate_prepared", False)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backward communicates no gradients of ``model``: they are summed locally until a backward outside of this.
        ``zero_grad()`` does not drop these sums, unlike those of DistributedDataParallel, which are in ``.grad``;
        ``model.reset_iter_state()`` does.

        Args:
            model: What ``prepare`` has returned.
        """
        with super().no_sync(model), without_gradient_sync(model):
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """As ``Accelerator.unscale_gradients``, also where an ``mp_policy`` casts. Clipping calls it.

        Args:
            optimizer: One or a list of those that ``prepare`` has returned, by default all.
        """
        native_amp = self.native_amp
        self.native_amp = native_amp or self.scaler is not None  # without it, the stock method does nothing
        try:
            super().unscale_gradients(optimizer)
        finally:
            self.native_amp = native_amp

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dict in whole tensors on the host of rank 0; an empty one on other ranks. Collective.

        Args:
            model: What ``prepare`` has returned.
            unwrap: Leave out what the accelerator has wrapped around the model.
        """
        if not outermost_calls(model):
            return super().get_state_dict(model, unwrap)
        return whole_state_dict(self.unwrap_model(model, keep_torch_compile=False) if unwrap else model)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Path:
        """As ``Accelerator.save_state``; shards go to ``sharded_state`` below the folder. Collective.

        Args:
            output_dir: The folder, and further arguments as in the stock method.
        """
        with self._without_sharded() as (models, optimizers):
            folder = Path(super().save_state(output_dir, *args, **kwargs))
        if models:
            save(_shards(models, optimizers), folder / STATE_FOLDER)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As ``Accelerator.load_state``, on any number of ranks. Collective.

        Ranks that the saving job did not have continue with the random numbers of those that it had, counted round.

        Args:
            input_dir: The folder, and further arguments as in the stock method.
        """
        folders: list[Path] = []
        with self._without_sharded() as (models, optimizers):
            hook = self.register_load_state_pre_hook(lambda _, folder: folders.append(Path(folder)))
            try:
                super().load_state(input_dir, *args, **kwargs)
            finally:
                hook.remove()
        (folder,) = folders
        if not models:
            return
        state = _shards(models, optimizers)
        load(state, checkpoint_id=folder / STATE_FOLDER)
        _set_shards(models, optimizers, state)
        num_saved = len(list(folder.glob(f"{RNG_STATE_NAME}_*.pkl")))
        if self.process_index >= num_saved:
            rank = self.process_index % num_saved
            self.step = load_accelerator_state(str(folder), [], [], [], [], rank)["step"]
            states = load_file(folder / f"{RNG_STATE_NAME}_{rank}.pkl")
            if "torch_cuda_manual_seed" in states:
                take_gpu_generator(states["torch_cuda_manual_seed"], rank)

    @contextmanager
    def _without_sharded(self) -> Iterator[tuple[list[nn.Module], list[Any]]]:
        """Hides sharded models and their optimizers from the stock methods, which would store one rank's shards."""
        models, optimizers = self._models, self._optimizers
        sharded = [model for model in models if outermost_calls(model)]
        of_sharded = [one for one in optimizers if _owner(one, sharded) is not None]
        self._models = [model for model in models if not any(model is one for one in sharded)]
        self._optimizers = [one for one in optimizers if not any(one is other for other in of_sharded)]
        try:
            yield sharded, of_sharded
        finally:
            self._models, self._optimizers = models, optimizers


def whole_state_dict(model: nn.Module, *, trained_only: bool = False) -> dict[str, Tensor]:
    """A state dict in whole tensors on the host of rank 0, for files that know no shards. Collective.

    Needs ``accelerate``. Names of one tied parameter have one tensor, as they have in the model, so that it is written
    once.

    Args:
        model: With or without parameters of ``gtp_shard``.
        trained_only: Leave out parameters that need no gradient.

    Returns:
        An empty dict on ranks other than 0.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> state = whole_state_dict(model)
        >>> if torch.distributed.get_rank() == 0:
        ...     torch.save(state, "model.pt")
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_only)
    whole: dict[str, Any] = get_model_state_dict(model, options=options)
    first: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in whole:
            whole[name] = whole[first.setdefault(param, name)]
    return whole


def _owner(optimizer: torch.optim.Optimizer, models: list[nn.Module]) -> nn.Module | None:
    """The model whose DTensors the optimizer updates."""
    ids = {id(param) for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)}
    return next((model for model in models if any(id(param) in ids for param in model.parameters())), None)


def options_of(model: nn.Module) -> StateDictOptions:
    """What of a model is stored: of a PEFT model what is trained, else all."""
    is_peft: bool = is_peft_model(model)
    return StateDictOptions(ignore_frozen_params=is_peft, strict=not is_peft)


def _shards(models: list[nn.Module], optimizers: list[Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for index, model in enumerate(models):
        state[f"model_{index}"] = get_model_state_dict(model, options=options_of(model))
    for index, optimizer in enumerate(optimizers):
        owner = _owner(optimizer, models)
        assert owner is not None
        # accelerate's own wrapper skips steps of microbatches, among them the one by which torch makes the state.
        state[f"optimizer_{index}"] = get_optimizer_state_dict(owner, optimizer.optimizer, options=options_of(owner))
    return state


def _set_shards(models: list[nn.Module], optimizers: list[Any], state: dict[str, Any]) -> None:
    for index, model in enumerate(models):
        set_model_state_dict(model, state[f"model_{index}"], options=options_of(model))
    for index, optimizer in enumerate(optimizers):
        owner = _owner(optimizer, models)
        assert owner is not None
        with empty_groups_kept(optimizer.optimizer):
            set_optimizer_state_dict(owner, optimizer.optimizer, state[f"optimizer_{index}"], options=options_of(owner))


@contextmanager
def empty_groups_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Loading a state dict in this context leaves param groups without parameters their options, which torch files
    under the names of parameters: ``Trainer`` makes a group of what decays, be it nothing."""
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    yield
    for group, options in zip(optimizer.param_groups, before, strict=True):
        if not group["params"]:
            group |= options


__all__ = ["GTPAccelerator", "whole_state_dict"]
