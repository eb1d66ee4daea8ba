"""torchtitan's own ``Trainer`` on the host: a small Llama 3, and what only a GPU or the network has replaced."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from integration_common import torchelastic
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

STEPS = 6
ROWS, SEQ_LEN = 4, 16  # of all ranks
WORDS = [f"w{index}" for index in range(500)]


@functools.cache
def on_the_host() -> None:
    """torchtitan takes CUDA where there is no accelerator; it decides when it is imported."""
    with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
        import torchtitan.tools.utils  # noqa: F401


def configuration(folder: Path, registered: str = "llama3_debugmodel_ce_loss", **parallelism: Any) -> Any:
    """A configuration of torchtitan's registry whose model has two layers, and reads a tokenizer from ``folder``.

    Flex attention is compiled for a GPU, so attention is another one.
    """
    on_the_host()
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import config_registry

    config = getattr(config_registry, registered)()
    config.model_spec = _summed(config.model_spec)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path = config.dump_folder = str(folder)
    config.parallelism = replace(config.parallelism, spmd_backend="partial_dtensor", **parallelism)
    config.training = replace(
        config.training,
        steps=STEPS,
        seq_len=SEQ_LEN,
        local_batch_size=1,
        global_batch_size=ROWS,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    config.comm.trace_buf_size = 0
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


def write_tokenizer(folder: Path) -> None:
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
def trainer(config: Any, world_size: int) -> Iterator[tuple[Any, dict[int, float]]]:
    """A ``Trainer`` and the losses that it will log, by step."""
    from torchtitan import trainer as titan
    from torchtitan.components import metrics
    from torchtitan.hf_datasets.text_datasets import DATASETS

    no_memory = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
    monitor = SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: no_memory, reset_peak_stats=lambda: None, device_capacity_gib=0
    )
    clock = SimpleNamespace(perf_counter=titan.time.perf_counter, sleep=lambda seconds: None)
    with ExitStack() as stack:
        stack.enter_context(torchelastic(world_size))
        stack.enter_context(mock.patch.object(metrics, "build_device_memory_monitor", lambda: monitor))
        stack.enter_context(mock.patch.object(titan, "time", clock))  # it waits for other ranks at the end
        stack.enter_context(mock.patch.object(titan.dist_utils, "set_pg_timeouts"))  # of the pool's groups
        stack.enter_context(mock.patch.dict(DATASETS, c4_test=replace(DATASETS["c4_test"], loader=_texts)))
        built = config.build()
        losses: dict[int, float] = {}
        log = built.metrics_processor.log

        def note(step: int, loss: float, *args: Any, **options: Any) -> None:
            losses[step] = loss
            log(step, loss, *args, **options)

        built.metrics_processor.log = note
        try:
            yield built, losses
        finally:
            built.close()


def train(config: Any, world_size: int, same_values: bool = True) -> tuple[dict[int, float], nn.Module]:
    """Losses by step, and the model, after a run of a ``Trainer``.

    Args:
        same_values: Begin with values that do not depend on how parameters are placed.
    """
    with trainer(config, world_size) as (built, losses):
        (model,) = built.model_parts
        if same_values:
            _set_values(model)
        built.train()
    return losses, model


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By the names without activation checkpointing."""
    return {name.replace("_checkpoint_wrapped_module.", ""): param for name, param in model.named_parameters()}


@torch.no_grad()
def _set_values(model: nn.Module) -> None:
    for name, param in sorted(named_parameters(model).items()):
        generator = torch.Generator().manual_seed(sum(name.encode()))
        value = torch.randn(param.shape, generator=generator) * 0.05 + (param.ndim == 1)
        if isinstance(param, DTensor):
            value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
        param.copy_(value)
