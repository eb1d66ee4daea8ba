"""Imports what tests of libraries import, for the server that their processes are forked from: to import it takes each
of them longer than most tests."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from torchvision_ops import define_missing

NAMES = (
    "transformers.models.llama.modeling_llama",
    "transformers.trainer_seq2seq",
    "accelerate",
    "peft",
    "timm",
    "diffusers.training_utils",
    "lightning.pytorch",
)

define_missing()
for name in NAMES:
    with suppress(ImportError):
        import_module(name)
