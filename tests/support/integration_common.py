"""What the tests of training libraries share: one process or several as such a library sees them, and a small model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, GlooTest
from torchvision_ops import define_missing

from dtensor_gtp import gtp_shard

NUM_SAMPLES = 48
VOCABULARY = 35


def needs(*packages: str, extra: str, tier: str = "long") -> Any:
    """Skips a class of tests where a package is missing, and marks it ``library`` and ``long``, in the tier "default"
    ``library`` alone, or ``soak``."""
    missing = [name for name in packages if find_spec(name) is None]
    if not missing:
        define_missing()

    def mark(cls: type) -> type:
        skip = pytest.mark.skipif(bool(missing), reason=f"needs {missing}: pip install 'dtensor-gtp[{extra}]'")
        if tier == "soak":
            return pytest.mark.soak(skip(cls))
        marked = pytest.mark.library(skip(cls))
        return pytest.mark.long(marked) if tier == "long" else marked

    return mark


@contextmanager
def torchelastic(num_processes: int) -> Iterator[None]:
    """The environment of one of so many processes of torchrun: all ranks of the worker's pool, or this one alone."""
    rank, world_size = str(dist.get_rank() if num_processes > 1 else 0), str(num_processes)
    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    job |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    with mock.patch.dict(os.environ, {**os.environ, **job, "OMP_NUM_THREADS": "1"}, clear=True):
        yield


@contextmanager
def process(num_processes: int) -> Iterator[None]:
    """The same for accelerate, which takes a single process with that environment for a distributed one.

    accelerate keeps what it finds in class attributes, which are cleared afterwards.
    """
    from accelerate.state import AcceleratorState, GradientState

    with torchelastic(num_processes):
        if num_processes == 1:
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                del os.environ[name]
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


class LibraryTest(GlooTest):
    world_size = 2

    def shard(self, model: nn.Module) -> Any:
        return gtp_shard(model, self.gtp_mesh(), schedule=ALL)


def make_llama(**options: Any) -> nn.Module:
    """Two layers without dropout, of float32. The same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, **shape, **options))


def samples() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]
