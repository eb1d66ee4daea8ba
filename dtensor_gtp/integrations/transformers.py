"""``transformers.Trainer`` for models that :func:`dtensor_gtp.gtp_shard` has sharded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from .._modules.binding import outermost_calls
from ..checkpoint import save
from ..optim import gathered
from . import needs_extra
from ._checkpoint import load_optimizer_state, load_shards, model_state, names_of_params, optimizer_state, state_to_load
from ._sharded import is_offloaded, move_unsharded, take_gpu_generator

with needs_extra("transformers"):
    from accelerate.utils import is_peft_model
    from transformers import Adafactor, Trainer
    from transformers.trainer_pt_utils import safe_globals

    from .accelerate import STATE_FOLDER, GTPAccelerator, whole_state_dict


class GTPTrainer(Trainer):
    """A ``transformers.Trainer`` that trains a model after ``gtp_shard`` without DDP. Needs ``transformers``.

    Use it instead of the stock one, with the sharded model; the trainer makes the optimizer. Trainers that derive
    from ``Trainer`` come second: ``class GTPSFTTrainer(GTPTrainer, SFTTrainer)``.

    - ``save_model`` writes whole safetensors, of a PEFT model its adapters. Call it on all ranks.
    - A checkpoint holds them, too, and model, optimizer and scheduler by ``torch.distributed.checkpoint``. Any number
      of ranks resumes from it, at the same position in the data if a step has as many samples as before.
    - Else as :class:`dtensor_gtp.integrations.accelerate.GTPAccelerator`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from transformers import PrinterCallback, TrainingArguments
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=1, n_head=2))
        >>> args = TrainingArguments("out", use_cpu=True, max_steps=1, disable_tqdm=True)
        >>> model = gtp_shard(model, init_weight_mesh("cpu", gtp=4).weights)
        >>> rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 32
        >>> trainer = GTPTrainer(model=model, args=args, train_dataset=rows)
        >>> trainer.remove_callback(PrinterCallback)
        >>> trainer.train().global_step
        1
        >>> trainer.save_model("model")  # for GPT2LMHeadModel.from_pretrained
    """

    _whole: Mapping[str, Any] | None = None  # while ``save_model`` runs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        models = [kwargs.get("model", args[0] if args else None), kwargs.get("ref_model")]
        with _whole_in_state_dicts([model for model in models if isinstance(model, nn.Module)]):
            super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make ``self.accelerator`` a ``GTPAccelerator``."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = GTPAccelerator  # it has methods of its own, and no state

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """As in ``Trainer``; Adafactor, which needs whole parameters, is :func:`dtensor_gtp.optim.gathered`."""
        cls, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return gathered(cls) if cls is Adafactor else cls, options

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave shards on the host where the model's ``offload_policy`` keeps them there."""
        if is_offloaded(model):
            move_unsharded(model, device)
        else:
            super()._move_model_to_device(model, device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As ``Trainer.save_model``: whole tensors, which all ranks gather and rank 0 writes. Collective.

        Args:
            output_dir: The folder; by default that of the arguments.
            _internal_call: As in the stock method, which checkpoints call with True.
        """
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        self._whole = whole_state_dict(model, adapters_only=is_peft_model(model))
        try:
            with _prompts_at_hand(model) if is_peft_model(model) else nullcontext():
                super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        """Write what was gathered. Older versions of ``Trainer.save_model`` call this on rank 0 alone."""
        super()._save(output_dir, state_dict=self._whole if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer.optimizer
        of_optimizer = optimizer_state(optimizer, names_of_params(optimizer, [self.model]))
        save(self._job_state(of_optimizer), Path(output_dir) / STATE_FOLDER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint of another trainer; its own are loaded with the optimizer's state."""
        if not (Path(resume_from_checkpoint) / STATE_FOLDER).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load all that a checkpoint has in shards.

        Raises:
            ValueError: A step has another number of samples than before, so the position in the data would differ; or
                the checkpoint is of another trainer and has its optimizer in whole.
        """
        if checkpoint is None:
            return
        folder = Path(checkpoint) / STATE_FOLDER
        if not folder.is_dir():
            if (Path(checkpoint) / "optimizer.pt").exists():
                raise ValueError(
                    f"GTPTrainer expects to resume from a checkpoint of a GTPTrainer, but {checkpoint} has an "
                    "optimizer.pt of another trainer. To start from its weights with a new optimizer, load the "
                    "model by from_pretrained and do not resume."
                )
            return
        model = self.model
        optimizer = self.optimizer.optimizer
        names = names_of_params(optimizer, [model])
        of_optimizer = state_to_load(optimizer, names, folder, "optimizer")
        state = self._job_state(of_optimizer)
        load_shards(state, folder)
        if state["samples_per_step"] != self._samples_per_step() and not self.args.ignore_data_skip:
            raise ValueError(
                f"GTPTrainer expects steps of {state['samples_per_step']} samples, as in {checkpoint}, but they have "
                f"{self._samples_per_step()} on {self.args.world_size} processes, so training would continue at "
                "another position in the data. Change per_device_train_batch_size or gradient_accumulation_steps, "
                "or pass ignore_data_skip=True to begin with the first sample."
            )
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=not is_peft_model(model)))
        load_optimizer_state(optimizer, names, state["optimizer"])
        self.lr_scheduler.load_state_dict(state["scheduler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Ranks that the saving job did not have take the state of those that it had, counted round."""
        if checkpoint is None:
            return
        saved = sorted(Path(checkpoint).glob("rng_state*.pth"), key=lambda path: (len(path.name), path.name))
        if not saved:
            return
        rank = self.args.process_index
        world_size = self.args.world_size
        with TemporaryDirectory() as folder:  # the stock method looks for a file of this name
            name = "rng_state.pth"
            if world_size > 1:
                name = f"rng_state_{rank}.pth"
            os.symlink(saved[rank % len(saved)].absolute(), Path(folder) / name)
            super()._load_rng_state(folder)
        if rank >= len(saved):
            with safe_globals():
                states = torch.load(saved[rank % len(saved)], weights_only=True)
            if "cuda" in states:
                take_gpu_generator(states["cuda"], rank % len(saved))

    def _job_state(self, of_optimizer: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint has in shards; on resuming, where they are loaded to."""
        model = model_state(self.model, is_peft=is_peft_model(self.model))
        state = {"model": model, "optimizer": of_optimizer, "scheduler": self.lr_scheduler.state_dict()}
        return {**state, "samples_per_step": self._samples_per_step()}

    def _samples_per_step(self) -> int:
        per_process: int = self._train_batch_size * self.args.gradient_accumulation_steps
        return per_process * self.args.world_size


class _Whole:
    """A tensor of a state dict, gathered when it is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def cpu(self) -> torch.Tensor:
        tensor = self._tensor
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


@contextmanager
def _whole_in_state_dicts(models: list[nn.Module]) -> Iterator[None]:
    """TRL's trainers, when they are made, hash ``state_dict()`` of models whose log-probabilities they will store."""
    sharded = [model for model in models if outermost_calls(model)]
    for model in sharded:
        stock = model.state_dict
        model.__dict__["state_dict"] = lambda stock=stock: {name: _Whole(value) for name, value in stock().items()}
    try:
        yield
    finally:
        for model in sharded:
            del model.__dict__["state_dict"]


@contextmanager
def _prompts_at_hand(model: Any) -> Iterator[None]:
    """Where PEFT learns prompts it saves what their encoder computes, but on rank 0 alone: compute it on all ranks, and
    let PEFT find it in this context."""
    learned = [name for name, config in model.peft_config.items() if config.is_prompt_learning]
    prompts = {name: model.get_prompt_embedding_to_save(name) for name in learned}
    model.__dict__["get_prompt_embedding_to_save"] = prompts.__getitem__
    try:
        yield
    finally:
        del model.__dict__["get_prompt_embedding_to_save"]


__all__ = ["GTPTrainer"]
