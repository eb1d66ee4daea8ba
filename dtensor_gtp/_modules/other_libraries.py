"""What other libraries ask of a module: whether they may wrap it in ``DistributedDataParallel``, and whether its ranks
must stay together."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from .._howto import printable

logger = logging.getLogger(__name__)

INSTEAD_OF_DDP = (
    "gtp_shard averages its gradients already. Call the module itself. With accelerate write 'from "
    "dtensor_gtp.integrations.accelerate import GTPAccelerator as Accelerator', with transformers 'from "
    "dtensor_gtp.integrations.transformers import GTPTrainer as Trainer', with Lightning 'from "
    "dtensor_gtp.integrations.lightning import GTPStrategy', 'Trainer(strategy=GTPStrategy())', and call gtp_shard "
    "in configure_model."
)


class PreparedByAccelerate:
    """Class attribute ``_is_accelerate_prepared``, which accelerate reads before it wraps a module.

    Without a value of the module's own, which ``GTPAccelerator`` sets, the module would end in DDP: refuse. The error
    comes before accelerate's own on GPUs, which takes the DTensors for tensor parallelism. For others who read all
    attributes, as debuggers do, there is none.
    """

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> PreparedByAccelerate:
        if module is None:
            return self
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if reader.partition(".")[0] != "accelerate":
            raise AttributeError(f"'{type(module).__name__}' object has no attribute '_is_accelerate_prepared'")
        raise RuntimeError(f"accelerate cannot prepare a {type(module).__name__} after gtp_shard: {INSTEAD_OF_DDP}")


class SeenByTransformers:
    """Value of ``_is_fsdp_managed_module`` of a module whose ranks must run the same layers: true for transformers.

    There ``generate`` then goes on until all ranks have stopped (``synced_gpus``), and LayerDrop skips no layer.
    torch.compile reads the attribute, too, and would take the module for one of ``fully_shard``: false for it. In code
    that it traces, transformers is the reader.
    """

    def __bool__(self) -> bool:
        if torch.compiler.is_dynamo_compiling():  # false in Python, true where it is traced
            return True
        reader = sys._getframe(1).f_globals.get("__name__", "")
        return not reader.startswith("torch.")


SEEN_BY_TRANSFORMERS = SeenByTransformers()


def run_all_layers(module: nn.Module) -> None:
    """Switch LayerDrop off in those models of transformers that do not look at ``_is_fsdp_managed_module`` (BART and
    its relatives): each rank would skip layers of its own. The config, which is saved, keeps the number."""
    names = []
    for name, submodule in module.named_modules():
        if type(submodule).__module__.startswith("transformers.") and submodule.__dict__.get("layerdrop"):
            submodule.layerdrop = 0.0
            names.append(printable(name))
    if names:
        text = "layerdrop of %s is 0 after gtp_shard: all ranks must run the same layers. Those of transformers that "
        logger.warning(text + "support fully_shard do so, too", ", ".join(names))


def resize_or_refuse(stock: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``resize_token_embeddings`` of a model of transformers after ``gtp_shard``: of another size it is refused, as it
    would copy sharded rows into a plain tensor."""

    @functools.wraps(stock)
    def resize(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **options: Any
    ) -> Any:
        num_rows: int = self.get_input_embeddings()._parameters.get("weight").shape[0]
        wanted = num_rows if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        if wanted != num_rows:
            raise RuntimeError(
                f"resize_token_embeddings cannot change {num_rows} rows to {wanted} after gtp_shard, which has split "
                "them into shards. Call it before gtp_shard, and create the optimizer afterwards."
            )
        return stock(self, new_num_tokens, pad_to_multiple_of, **options)

    return resize


def generate_together(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``generate`` of a model of transformers whose ``synced_gpus`` is False by default (Whisper), where others look at
    ``_is_fsdp_managed_module``: true if the caller does not say otherwise."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def generate(self: Any, *args: Any, **options: Any) -> Any:
        if "synced_gpus" not in signature.bind_partial(self, *args, **options).arguments:
            options["synced_gpus"] = True
        return stock(self, *args, **options)

    return generate


def is_alone_by_default(stock: Callable[..., Any]) -> bool:
    """Whether a method ``generate`` has ``synced_gpus=False``."""
    parameter = inspect.signature(stock).parameters.get("synced_gpus")
    return parameter is not None and parameter.default is False
