"""``accelerate.Accelerator`` for models that :func:`dtensor_gtp.gtp_shard` has sharded.

The stock accelerator wraps the models of several processes in DDP. This one takes a sharded model as it is. It replaces
the methods that take a parameter for a whole tensor: it accumulates without communication, gathers whole state dicts,
and saves and loads shards by ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from .._modules.binding import outermost_calls
from ..checkpoint import save
from . import needs_extra
from ._checkpoint import load_optimizer_state, load_shards, model_state, names_of_params, optimizer_state, state_to_load
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
    - ``save_state`` and ``load_state`` work on any number of ranks. Of a PEFT model they store all
      adapters, and of the frozen base biases and embeddings alone.

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
    _save_model_state_pre_hook: OrderedDict[int, Any]
    _load_model_state_pre_hook: OrderedDict[int, Any]

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

        Hooks of ``register_save_state_pre_hook`` get all models. The weights of a sharded one are a state dict in
        shards, of a PEFT model without frozen weights of its base, but for biases and embeddings. What they take out of
        the list on any rank is not saved.

        Args:
            output_dir: The folder, and further arguments as in the stock method.

        Raises:
            ValueError: An optimizer of a sharded model has a parameter that is in no prepared model.
        """
        models = self._models
        hooks = self._save_model_state_pre_hook
        state: dict[str, Any] = {}

        def call_hooks(_: list[Any], stock: list[Any], folder: str) -> None:
            shards = {index: _shards(model) for index, model in enumerate(models) if outermost_calls(model)}
            others = iter(list(stock))
            weights = [shards[index] if index in shards else next(others) for index in range(len(models))]
            for hook in hooks.values():
                hook(models, weights, folder)
            kept = self._kept_by_all(list(shards.values()), weights)
            state.update({f"model_{index}": shard for index, shard in shards.items() if id(shard) in kept})
            own = set(map(id, shards.values()))
            stock[:] = [weight for weight in weights if id(weight) not in own]

        optimizers = self._sharded_optimizers()
        for index, optimizer in optimizers.items():  # first: this may refuse one
            state[f"optimizer_{index}"] = optimizer_state(optimizer, self._names_of_params(optimizer))
        with self._without_sharded(optimizers):
            self._save_model_state_pre_hook = OrderedDict({0: call_hooks})
            try:
                folder = Path(super().save_state(output_dir, *args, **kwargs))
            finally:
                self._save_model_state_pre_hook = hooks
        if state:
            save(state, folder / STATE_FOLDER)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As ``Accelerator.load_state``, on any number of ranks. Collective.

        Hooks of ``register_load_state_pre_hook`` get all models. What they take out of the list on any rank is not
        loaded.

        Ranks that the saving job did not have continue with the random numbers of those that it had, counted round.

        Args:
            input_dir: The folder, and further arguments as in the stock method.

        Raises:
            ValueError: An optimizer of a sharded model has other parameters than when it was saved.
        """
        models = self._models
        hooks = self._load_model_state_pre_hook
        folders: list[Path] = []
        sharded: dict[int, nn.Module] = {}

        def call_hooks(stock: list[Any], folder: str) -> None:
            stock[:] = models
            for hook in hooks.values():
                hook(stock, folder)
            kept = self._kept_by_all(models, stock)
            sharded.update({i: one for i, one in enumerate(models) if outermost_calls(one) and id(one) in kept})
            stock[:] = [model for model in stock if not outermost_calls(model)]
            folders.append(Path(folder))

        optimizers = self._sharded_optimizers()
        with self._without_sharded(optimizers):
            self._load_model_state_pre_hook = OrderedDict({0: call_hooks})
            try:
                super().load_state(input_dir, *args, **kwargs)
            finally:
                self._load_model_state_pre_hook = hooks
        (folder,) = folders
        if not sharded and not optimizers:
            return
        self._load_shards(sharded, optimizers, folder / STATE_FOLDER)
        num_saved = len(list(folder.glob(f"{RNG_STATE_NAME}_*.pkl")))
        if self.process_index >= num_saved:
            rank = self.process_index % num_saved
            self.step = load_accelerator_state(str(folder), [], [], [], [], rank)["step"]
            states = load_file(folder / f"{RNG_STATE_NAME}_{rank}.pkl")
            if "torch_cuda_manual_seed" in states:
                take_gpu_generator(states["torch_cuda_manual_seed"], rank)

    def _load_shards(self, models: dict[int, nn.Module], optimizers: dict[int, Any], folder: Path) -> None:
        """By index among those that were prepared."""
        state: dict[str, Any] = {}
        for index, optimizer in optimizers.items():  # first: this may step
            key = f"optimizer_{index}"
            state[key] = state_to_load(optimizer, self._names_of_params(optimizer), folder, key)
        for index, model in models.items():
            state[f"model_{index}"] = _shards(model)
        load_shards(state, folder)
        for index, model in models.items():
            options = StateDictOptions(strict=not is_peft_model(model))
            set_model_state_dict(model, state[f"model_{index}"], options=options)
        for index, optimizer in optimizers.items():
            load_optimizer_state(optimizer, self._names_of_params(optimizer), state[f"optimizer_{index}"])

    def _kept_by_all(self, before: list[Any], after: list[Any]) -> set[int]:
        """Ids of what hooks have left in a list on all ranks: a script may take something out on rank 0 alone, but
        shards are saved and loaded by all ranks or none."""
        left = set(map(id, after))
        flags = torch.tensor([id(each) in left for each in before], dtype=torch.int32, device=self.device)
        if flags.numel():
            flags = self.reduce(flags, reduction="sum")
        counts = flags.tolist()
        return {id(each) for each, count in zip(before, counts, strict=True) if count == self.num_processes}

    def _names_of_params(self, optimizer: Any) -> dict[nn.Parameter, str]:
        models = [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]
        return names_of_params(optimizer, models)

    def _sharded_optimizers(self) -> dict[int, Any]:
        """By index, without accelerate's wrapper, which skips steps of microbatches."""
        found = {}
        for index, optimizer in enumerate(self._optimizers):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if any(isinstance(param, DTensor) for param in params):
                found[index] = optimizer.optimizer
        return found

    @contextmanager
    def _without_sharded(self, sharded: dict[int, Any]) -> Iterator[None]:
        """Hides sharded models and ``_sharded_optimizers`` from the stock methods, which would store one rank's
        shards."""
        models = self._models
        optimizers = self._optimizers
        self._models = [model for model in models if not outermost_calls(model)]
        self._optimizers = [one for index, one in enumerate(optimizers) if index not in sharded]
        try:
            yield
        finally:
            self._models = models
            self._optimizers = optimizers


def whole_state_dict(model: nn.Module, *, adapters_only: bool = False) -> dict[str, Tensor]:
    """A state dict in whole tensors on the host of rank 0, for files that know no shards. Collective.

    Needs ``accelerate``. Names of one tied parameter have one tensor, as they have in the model, so that it is written
    once.

    Args:
        model: With or without parameters of ``gtp_shard``.
        adapters_only: For ``model.save_pretrained(folder, state_dict=...)`` of a PEFT model: leave out what that does
            not write, the frozen weights of the base.

    Returns:
        An empty dict on ranks other than 0.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> state = whole_state_dict(model)
        >>> if torch.distributed.get_rank() == 0:
        ...     torch.save(state, "model.pt")
    """
    whole: dict[str, Any] = {}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    for name, value in model_state(model, is_peft=adapters_only).items():
        if isinstance(value, DTensor):
            on_device: Any = value.to(value.device_mesh.device_type)  # from the host, if shards are offloaded
            value = on_device.full_tensor()
        if is_first and isinstance(value, Tensor):
            value = value.cpu()
        if is_first:
            whole[name] = value
    first: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in whole:
            whole[name] = whole[first.setdefault(param, name)]
    return whole


def _shards(model: nn.Module) -> dict[str, Any]:
    return model_state(model, is_peft=is_peft_model(model))


__all__ = ["GTPAccelerator", "whole_state_dict"]
