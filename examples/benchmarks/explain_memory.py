"""What ``memory_model.predict_peak`` needs to know of a model under ``gtp_shard``: its plan and what its forward saves.

What is saved is counted in a forward of the same model on fake tensors, which have shapes and no memory.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from dtensor_gtp import SchedulePolicy, sharding_report
from harness import World, state_bytes
from llama import Llama
from memory_model import Peak, Use, predict_peak
from modes import Mode, Workload


def saved_bytes(workload: Workload, seq_len: int, device: torch.device) -> dict[str, int]:
    """Bytes that a forward in bf16 saves for backward beside weights, on one process.

    Returns:
        for each module that has weights, what is saved from its call to that of the next one. The rest of the forward,
        the loss with it, counts to the last one.
    """
    saved: dict[str, int] = {}
    calling = ""

    def enter(name: str) -> None:
        nonlocal calling
        calling = name

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            saved[calling] = saved.get(calling, 0) + storage.nbytes()
        return tensor

    with FakeTensorMode(), torch.device(device):
        model = Llama(workload.config)
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(param.detach().bfloat16()))
        tokens = torch.zeros(workload.batch, seq_len, dtype=torch.int64)
        weights = [*model.parameters(), *model.buffers(), tokens]
        seen = {weight.untyped_storage()._cdata for weight in weights}
        for name, module in model.named_modules():
            if any(param.ndim > 1 for param in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda module, args, name=name: enter(name))
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        del loss
    return saved


def explain_peak(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    mode: str,
    workload: Workload,
    seq_len: int,
    world: World,
) -> Peak | None:
    """The predicted peak of a mode; None for modes that are not of this package, or whose plan is not known yet."""
    parsed = Mode.parse(mode)
    if parsed.family != "gtp":
        return None
    report = sharding_report(model)
    forward = next((plan for plan in report.passes if not plan.is_backward), None)
    backward = next((plan for plan in report.passes if plan.is_backward), None)
    if forward is None or backward is None:
        return None
    in_backward = dict(zip(backward.uses, backward.gathered_nbytes, strict=True))
    rows = {name: row for row in report.rows for name in row.name.split(" = ")}  # tied weights have several
    saved = saved_bytes(workload, seq_len, world.device)
    uses = []
    for name, gathered in zip(forward.uses, forward.gathered_nbytes, strict=True):
        row = rows[name]
        uses.append(
            Use(
                name=name,
                gathered=gathered,
                gathered_in_backward=in_backward.get(name, 0),
                wgrad=torch.Size(row.shape).numel() * parsed.reduce_dtype.itemsize,
                grad=row.local_nbytes,
                saved=saved.get(name.rpartition(".")[0], 0),
            )
        )
    return predict_peak(uses, state_bytes(model, optimizer), SchedulePolicy().max_inflight_reduce_scatters)
