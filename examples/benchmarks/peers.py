"""What the benchmarks compare with: ``fully_shard``, torchao's float8 and megatron-fsdp."""

import importlib.util
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from harness import World  # first: it makes the modules of examples/ importable
from llama import Llama

_BLOCKS_AHEAD = 2


def in_blocks(module: nn.Module, name: str) -> bool:
    """The linear layers that recipes quantize: all but the head."""
    return isinstance(module, nn.Linear) and name.startswith("layers.")


def to_fsdp2(model: Llama, policy: MixedPrecisionPolicy, world: World, option: str = "") -> FSDPModule:
    """``fully_shard`` on each block and on the root.

    Args:
        model: whole, on this process's device.
        policy: its dtypes.
        world: the processes.
        option: "": none. "kept": weights stay gathered from forward to backward. "tuned": two blocks are gathered ahead
            in forward and backward, and where this torch can, gradients are reduced in a communicator of their own, two
            blocks at a time. "symm": gathers by NCCL in symmetric memory, on copy engines (``set_symm_mem_for_comm``
            and the zero-CTA policy, as torch documents).

    Raises:
        ValueError: if there is no such option.
    """
    if option not in ("", "kept", "tuned", "symm"):
        raise ValueError(f"to_fsdp2 expects the option '', 'kept', 'tuned' or 'symm', but got {option!r}.")
    mesh = _zero_cta_mesh(world) if option == "symm" else init_device_mesh(world.device.type, (world.size,))
    # None: the root stays gathered, what is in it does not
    reshard = False if option == "kept" else None
    sharded = shard_blocks(model, mesh, policy, reshard)
    if option == "tuned":
        _tune(model)
    elif option == "symm":
        for module in (*model.layers, model):
            module.set_symm_mem_for_comm()
    return sharded


def shard_blocks(
    model: Llama, mesh: DeviceMesh, policy: MixedPrecisionPolicy, reshard_after_forward: bool | None = None
) -> FSDPModule:
    """``fully_shard`` on each block and on the root, over ``mesh``."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)


def _zero_cta_mesh(world: World) -> DeviceMesh:
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    group = dist.new_group(pg_options=options)
    return DeviceMesh.from_group(group, world.device.type)


def _tune(model: Llama) -> None:
    layers = list(model.layers)
    for index, layer in enumerate(layers):
        if ahead := layers[index + 1 : index + 1 + _BLOCKS_AHEAD]:
            layer.set_modules_to_forward_prefetch(ahead)
        if behind := layers[max(index - _BLOCKS_AHEAD, 0) : index][::-1]:
            layer.set_modules_to_backward_prefetch(behind)
    if hasattr(model, "set_separate_reduce_scatter_group"):
        model.set_separate_reduce_scatter_group()
        model.set_reduce_scatter_max_input_buffers(2)


def to_torchao(model: nn.Module, world: World) -> None:
    """Converts the linear layers of the blocks to torchao's float8 with float8 all-gather, before ``fully_shard``."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # A CPU has no kernels for torchao's float8: it is emulated there.
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=world.device.type == "cpu")
    convert_to_float8_training(model, config=config, module_filter_fn=in_blocks)


def scales_of_torchao(model: nn.Module) -> Callable[[], None]:
    """What torchao's documentation says to call after each optimizer step: one all-reduce for all scales."""
    if not any(type(module).__name__ == "Float8Linear" for module in model.modules()):
        return lambda: None
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    return lambda: precompute_float8_dynamic_scale_for_fsdp(model)


def has_megatron() -> bool:
    return importlib.util.find_spec("megatron_fsdp") is not None


def to_megatron(model: Llama, reduce_dtype: torch.dtype) -> nn.Module:
    """Parameters, gradients and optimizer state sharded; of the model's bf16 weights there are fp32 main weights.

    Raises:
        RuntimeError: if megatron-fsdp is not installed.
    """
    if not has_megatron():
        raise RuntimeError("the megatron modes want megatron-fsdp: pip install megatron-fsdp einops")
    from megatron_fsdp import MixedPrecisionPolicy as Policy
    from megatron_fsdp import fully_shard_model

    sharded: nn.Module = fully_shard_model(
        model,
        fsdp_unit_modules=[type(model.layers[0])],
        zero_dp_strategy="optim_grads_params",
        mixed_precision_policy=Policy(
            main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=reduce_dtype
        ),
        preproc_state_dict_for_dcp_ckpt=False,
    )
    return sharded


def megatron_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    from megatron_fsdp import fully_shard_optimizer

    return fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)
