"""torchtitan's own ``Trainer``: a small Llama 3 on the host or on GPUs, and what only the network has replaced."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from common import full, shared_directory
from integration_common import torchelastic
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

STEPS = 4
SAVED = STEPS // 2  # the step after which a checkpoint is written
CHUNKED_LOSS = "llama3_debugmodel"
SEQ_LEN = 16
WORDS = [f"w{index}" for index in range(500)]


@functools.cache
def choose_device() -> None:
    """torchtitan takes CUDA where there is no accelerator; it decides when it is imported."""
    found = torch._utils._get_available_device_type() or "cpu"  # type: ignore[no-untyped-call]
    with mock.patch("torch._utils._get_available_device_type", return_value=found):
        import torchtitan.tools.utils  # noqa: F401


def configuration(
    registered: str = "llama3_debugmodel_ce_loss", converters: list[Any] | None = None, **parallelism: Any
) -> Any:
    """A configuration of torchtitan's registry, with two layers of another attention: flex attention is compiled."""
    choose_device()
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import config_registry, model_registry

    config = getattr(config_registry, registered)()
    config.model_spec = _summed(model_registry("debugmodel", converters=converters))
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.parallelism = replace(config.parallelism, spmd_backend="partial_dtensor", **parallelism)
    config.training = replace(
        config.training,
        steps=STEPS,
        seq_len=SEQ_LEN,
        local_batch_size=1,
        global_batch_size=dist.get_world_size(),  # with tensor parallelism a step has two microbatches
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    config.comm.trace_buf_size = 0
    if registered == "llama3_debugmodel":
        config.loss.num_chunks = 4
    return config


def _summed(spec: Any) -> Any:
    """gloo's reduce-scatter has no factor, which torchtitan's FSDP2 sets to 1: let it sum."""
    stock: Callable[..., nn.Module] = spec.parallelize_fn

    def parallelize(model: nn.Module, **options: Any) -> nn.Module:
        model = stock(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return replace(spec, parallelize_fn=parallelize)


def _write_tokenizer(folder: Path) -> None:
    """One token for each of ``WORDS``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def _texts(path: str) -> Any:
    """Eight texts of different lengths, of all ranks."""
    from datasets import Dataset

    texts = [" ".join(WORDS[(row * 61 + index * 7) % 500] for index in range(20 + row)) for row in range(8)]
    return Dataset.from_dict({"text": texts})


@contextmanager
def offline() -> Iterator[None]:
    """What the trainer gets from the network and from torchrun, and on the host from a GPU; and it does not wait for
    others by time."""
    from torchtitan import trainer
    from torchtitan.components import metrics
    from torchtitan.hf_datasets.text_datasets import DATASETS

    no_memory = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
    monitor = SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: no_memory, reset_peak_stats=lambda: None, device_capacity_gib=0
    )
    seconds = itertools.count()  # a clock that goes on by a second whenever it is read
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)), sleep=lambda seconds: None)
    with ExitStack() as stack:
        stack.enter_context(torchelastic(dist.get_world_size()))
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(metrics, "build_device_memory_monitor", return_value=monitor))
        stack.enter_context(mock.patch.object(trainer, "time", clock))
        stack.enter_context(mock.patch.object(trainer.dist_utils, "set_pg_timeouts"))  # of the pool's groups
        stack.enter_context(mock.patch.dict(DATASETS, c4_test=replace(DATASETS["c4_test"], loader=_texts)))
        yield


def train(config: Any, same_values: bool = True) -> tuple[dict[int, float], nn.Module]:
    """Losses by step, and the model, after a run of ``Trainer``.

    Args:
        same_values: Begin with values that do not depend on how parameters are placed.
    """
    losses: dict[int, float] = {}
    with offline(), shared_directory() as folder:
        config.hf_assets_path = str(folder)
        if dist.get_rank() == 0:
            _write_tokenizer(folder)
        dist.barrier()
        trainer = config.build()
        log = trainer.metrics_processor.log

        def note(step: int, loss: float, *args: Any, **options: Any) -> None:
            losses[step] = loss
            log(step, loss, *args, **options)

        trainer.metrics_processor.log = note
        (model,) = trainer.model_parts
        if same_values:
            _set_values(model)
        try:
            trainer.train()
        finally:
            trainer.close()
    return losses, model


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By the names without activation checkpointing."""
    return {name.replace("_checkpoint_wrapped_module.", ""): param for name, param in model.named_parameters()}


def _initial(name: str, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator) * 0.05 + (len(shape) == 1)


@torch.no_grad()
def _set_values(model: nn.Module) -> None:
    for name, param in sorted(named_parameters(model).items()):
        value = _initial(name, param.shape)
        if isinstance(param, DTensor):
            value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
        param.copy_(value)


class Run(NamedTuple):
    losses: dict[int, float]  # by step
    params: dict[str, torch.Tensor]  # whole


def run(config: Any, **options: Any) -> Run:
    losses, model = train(config, **options)
    return Run(losses, {name: full(param.detach()) for name, param in named_parameters(model).items()})


@functools.cache
def run_of_fsdp2(**parallelism: int) -> Run:
    return run(configuration(**parallelism))


def sharded(*registered: str, **parallelism: Any) -> Any:
    choose_device()
    from dtensor_gtp.integrations.torchtitan import with_gtp

    return with_gtp(configuration(*registered, **parallelism))


def checkpointed(config: Any, folder: Path, **options: Any) -> Any:
    config.checkpoint = replace(
        config.checkpoint, enable=True, interval=SAVED, last_save_model_only=False, folder=str(folder), **options
    )
    return config


def compiled(checkpointed: str, backend: str = "aot_eager", **parallelism: Any) -> Any:
    """With compiled blocks, and this kind of activation checkpointing: "selective", "full" or "none"."""
    config = sharded(**parallelism)
    from torchtitan.distributed.activation_checkpoint import FullAC

    config.compile = replace(config.compile, enable=True, components=["model"], backend=backend)
    if checkpointed != "selective":
        config.activation_checkpoint = FullAC.Config() if checkpointed == "full" else None
    return config


def check(actual: Run, expected: Run, begin: int = 1, rtol: float = 1e-4, most_apart: float = 0.05) -> None:
    """Losses of all steps from ``begin`` on, and the parameters after the last, at most ``most_apart`` of their way.

    Beside how far training has moved a parameter, as the steps are small beside its values. AdamW makes much of
    rounding where a gradient is near zero, so one element says little.
    """
    steps = {step: expected.losses[step] for step in range(begin, STEPS + 1)}
    torch.testing.assert_close(actual.losses, steps, atol=2e-4, rtol=rtol)
    for name, param in expected.params.items():
        moved = (param - _initial(name, param.shape).to(param)).norm()
        assert moved > 0, f"{name} has not been trained"
        error = (actual.params[name] - param).norm() / moved
        assert error < most_apart, f"{name} has moved differently by {error:.3f} of its way"
