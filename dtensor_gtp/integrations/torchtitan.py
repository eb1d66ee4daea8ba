"""torchtitan's Llama 3 with :func:`dtensor_gtp.gtp_shard` instead of FSDP2."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._modules.binding import binding_of
from .._modules.gtp_module import GTPModule
from .._modules.whole_weights import reshard_params, unshard_params
from .._params.managed_param import ManagedParam
from ..api import gtp_shard
from . import needs_extra

with needs_extra("torchtitan"):
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed.compile import apply_compile
    from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy


def with_gtp(config: Any) -> Any:
    """A configuration of torchtitan's trainer whose model is sharded by ``gtp_shard``. Needs ``torchtitan``.

    Call it in a function of a config registry.

    Args:
        config: A ``Trainer.Config`` of Llama 3. It is changed in place: the ``parallelize_fn`` becomes
            :func:`parallelize_llama`, the ``spmd_backend`` ``"partial_dtensor"``, and CUDA graphs are switched off.

    Returns:
        ``config``.

    Example:
        >>> from torchtitan.models.llama3.config_registry import llama3_debugmodel
        >>> def llama3_debugmodel_gtp():
        ...     return with_gtp(llama3_debugmodel())
        >>> llama3_debugmodel_gtp().model_spec.parallelize_fn is parallelize_llama
        True
    """
    config.model_spec = replace(config.model_spec, parallelize_fn=parallelize_llama)
    if type(config.loss) is ChunkedLossWrapper.Config:
        config.loss = _ChunkedLoss.Config(num_chunks=config.loss.num_chunks, loss_fn=config.loss.loss_fn)
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.disable_cuda_graphs = True
    return config


def parallelize_llama(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """What a ``ModelSpec`` of torchtitan 0.3 has as ``parallelize_fn``. Needs ``torchtitan``.

    Tensor parallelism and activation checkpointing come from torchtitan, then ``gtp_shard``, then ``torch.compile`` of
    each block. Gradients are summed over ranks, not averaged, because torchtitan divides its loss by the tokens of all
    ranks.

    Args:
        model: Torchtitan's Llama 3, on the meta device or not.
        parallel_dims, training, parallelism, compile_config, ac_config, dump_folder: As torchtitan passes them.

    Returns:
        ``model``, sharded.

    Raises:
        NotImplementedError: A configuration that this does not support.

    Example:
        >>> from dataclasses import replace
        >>> from torchtitan.models.llama3 import model_registry
        >>> spec = replace(model_registry("debugmodel"), parallelize_fn=parallelize_llama)
    """
    _refuse(parallel_dims, training, parallelism)
    if parallel_dims.tp_enabled:
        model.parallelize(parallel_dims)  # type: ignore[operator]
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    names = ["fsdp"]
    if parallel_dims.dp_replicate_enabled:
        names = ["dp_replicate", "fsdp"]
    sharded = gtp_shard(
        model,
        parallel_dims.get_mesh(names),
        reshard_after_forward=get_fsdp_reshard_after_forward_policy(parallelism.fsdp_reshard_after_forward, False),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
    )
    assert isinstance(sharded, GTPModule)
    sharded.set_gradient_divide_factor(1.0)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    return sharded


class _ChunkedLoss(ChunkedLossWrapper):
    """Torchtitan's chunked loss, which gathers the head once for all chunks, and reduces its gradient once, while the
    decoder runs backward. Torchtitan's own does so for heads of FSDP2 only."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        pass

    lm_head: Any

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        head = self.lm_head
        numbers = itertools.count(1)
        binding = binding_of(head)
        assert binding is not None, "parallelize_llama has sharded the head"
        runtime = binding.group.runtime
        params = list(binding.params.values())

        def run_chunk(hidden: Tensor) -> Tensor:
            _set_sync(params, next(numbers) == self.num_chunks)
            return head(hidden)

        self.lm_head = run_chunk
        runtime.steps.is_last_backward = False  # the reduction ends with the decoder's backward
        unshard_params(runtime, params).wait()
        try:
            return super().__call__(pred, labels, global_valid_tokens, **loss_inputs)
        finally:
            reshard_params(runtime, params)
            runtime.steps.is_last_backward = True
            _set_sync(params, True)
            self.lm_head = head


def _set_sync(params: list[ManagedParam], is_on: bool) -> None:
    for param in params:
        param.flags.requires_gradient_sync = is_on


def _refuse(parallel_dims: Any, training: Any, parallelism: Any) -> None:
    if parallelism.spmd_backend != "partial_dtensor":
        raise NotImplementedError(
            f"parallelize_llama expects parallelism.spmd_backend='partial_dtensor', but got "
            f"'{parallelism.spmd_backend}', with which all axes of the mesh are in each parameter. Build the "
            "configuration by with_gtp."
        )
    unsupported = {
        "pipeline parallelism": parallel_dims.pp_enabled,
        "context parallelism": parallel_dims.cp_enabled,
        "training.enable_cpu_offload": training.enable_cpu_offload,
        "parallelism.enable_fsdp_symm_mem": parallelism.enable_fsdp_symm_mem,
    }
    if names := [name for name, is_on in unsupported.items() if is_on]:
        raise NotImplementedError(f"parallelize_llama does not support {', '.join(names)}. Switch it off.")


__all__ = ["parallelize_llama", "with_gtp"]
