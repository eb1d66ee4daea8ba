"""Numbers of training that any logger takes: tokens/s, MFU, exposed communication, memory, gradient norm.

    metrics = StepMetrics(model)
    ...
    metrics.count(batch.numel())  # after each optimizer step
    wandb.log(metrics.read(loss=loss, grad_norm=norm), step)  # as often as you log, on all ranks

``python -m dtensor_gtp.help log_metrics`` has the line for TensorBoard, ``Trainer``, Lightning and torchtitan.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._comm.streams import Waits
from ._modules.binding import binding_of, managed_params
from ._params.sharded_weight import ShardedWeight
from ._schedule.runtime import Runtime
from .planner.machine import Machine, load_machine, preset_of

_PER_ELEMENT = {True: 6.0, False: 4.0}  # operations per element of a weight and token; a frozen weight has no wgrad


class StepMetrics:
    """Counts tokens of steps, and computes rates since the last reading.

    Args:
        model: A module after ``gtp_shard``, the outermost one.
        flops_per_token: Floating-point operations of forward and backward for one token. None: 6 for each element of a
            weight that multiplies, 4 if it is frozen. Attention's products of activations are not included: pass the
            number for long sequences. For experts, convolutions and layers that a forward uses several times the
            default is not known: without this number there is no MFU.
        machine: As for :func:`dtensor_gtp.plan`: its dense bf16 peak is what MFU is a share of. None: the preset of
            this GPU, if there is one.

    Raises:
        ValueError: ``model`` is not sharded, or there is no such machine.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> metrics = StepMetrics(model, machine="h100")
        >>> for step in range(2):
        ...     model(torch.randn(8, 64)).sum().backward()
        ...     metrics.count(8)
        >>> values = metrics.read()
        >>> values["tokens_per_s"] > 0, values["mfu"] > 0, values["exposed_ms"] > 0
        (True, True, True)
    """

    def __init__(
        self, model: nn.Module, *, flops_per_token: float | None = None, machine: str | Machine | None = None
    ) -> None:
        binding = binding_of(model)
        if binding is None:
            raise ValueError(f"StepMetrics expects a module after gtp_shard, but got a plain {type(model).__name__}.")
        if flops_per_token is None:
            self.flops_per_token = flops_of(model)  # None: not known
        else:
            self.flops_per_token = flops_per_token
        self.flops_per_s = _peak_flops(machine, binding.group.runtime.device)
        self._mesh = binding.group.arguments.mesh
        self._is_told_flops = flops_per_token is not None
        self._runtime = binding.group.runtime
        self._exposed_ms: float | None = None
        self._begin()

    def count(self, num_tokens: int) -> None:
        """A step is done.

        Args:
            num_tokens: Of this rank, all microbatches together.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> StepMetrics(model).count(512)
        """
        self._num_tokens += num_tokens
        self._num_steps += 1
        if self._waits.is_on:
            self._exposed_ms = self._waits.read()
            self._waits.is_on = False

    def read(self, **others: float | Tensor) -> dict[str, float]:
        """Rates since the last call, as plain numbers. On a GPU the host waits until the steps are done.

        Args:
            **others: Numbers and tensors of one element to go with them, such as ``loss`` and ``grad_norm``. A
                ``DTensor``, which ``clip_grad_norm_`` returns, is gathered: call it on all ranks.

        Returns:
            ``tokens_per_s`` of all ranks that ``gtp_shard`` and an outer ``fully_shard`` average over, and
            ``tokens_per_s_per_device``; ``step_ms``; ``mfu``, if the peak of the device and the operations are known;
            ``exposed_ms`` that compute waited for gathers and reductions in the first of these steps, unless it was
            replayed from a CUDA graph; ``peak_memory_gib`` of this rank so far: of the allocator, or on a CPU of the
            process; and ``others``.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> metrics = StepMetrics(model)
            >>> metrics.count(512)
            >>> metrics.read(loss=torch.tensor(2.5))["loss"]
            2.5
        """
        device = self._runtime.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - self._began
        values = {}
        if self._num_steps and seconds > 0:
            of_rank = self._num_tokens / seconds
            values["step_ms"] = seconds / self._num_steps * 1e3
            values["tokens_per_s"] = of_rank * self._num_ranks
            values["tokens_per_s_per_device"] = values["tokens_per_s"] / compat.root_mesh(self._mesh).size()
            is_known = self._is_told_flops or not _uses_again(self._runtime)
            if self.flops_per_s is not None and self.flops_per_token is not None and is_known:
                values["mfu"] = of_rank * self.flops_per_token / self.flops_per_s
        if self._exposed_ms is not None:
            values["exposed_ms"] = self._exposed_ms
        values["peak_memory_gib"] = _peak_nbytes(device) / (1 << 30)
        values |= {name: _number(value) for name, value in others.items()}
        self._begin()
        return values

    def skip(self) -> None:
        """Forget the time and the steps since the last reading, e.g. after a validation or a checkpoint.

        Example:
            >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
            >>> metrics = StepMetrics(model)
            >>> metrics.count(512)
            >>> metrics.skip()
            >>> "tokens_per_s" in metrics.read()
            False
        """
        self._begin()

    @property
    def _num_ranks(self) -> int:
        """With data of their own."""
        params = self._runtime.members.params
        return max((p.num_ranks * p.registration.num_outer_ranks for p in params), default=self._mesh.size())

    @property
    def _waits(self) -> Waits:
        return self._runtime.comm.streams.waits

    def _begin(self) -> None:
        self._num_tokens = self._num_steps = 0
        self._exposed_ms = None
        self._waits.read()
        self._waits.is_on = True
        self._began = time.perf_counter()


def progress_line(
    step: int, num_steps: int, values: Mapping[str, float], seconds: float | None = None, first_step: int = 0
) -> str:
    """One line about a step, for a terminal or a log, in the words of tqdm.

    Args:
        step: Steps that are done.
        num_steps: Of the whole training.
        values: What :meth:`StepMetrics.read` has returned.
        seconds: Since training began or was resumed, for the time that is left; None leaves it out.
        first_step: Steps that were done then.

    Returns:
        The line.

    Example:
        >>> values = {"loss": 2.3456, "tokens_per_s": 7713.2, "mfu": 0.41, "grad_norm": 0.637}
        >>> progress_line(500, 2000, values, seconds=60)
        ' 25%  500/2000 [01:00<03:00] loss 2.3456, 7,713 tokens/s, 41.0% MFU, norm 0.637'
    """
    share = 1.0
    if num_steps:
        share = step / num_steps
    line = f"{share:4.0%} {step:>{len(str(num_steps))}}/{num_steps}"
    if seconds is not None:
        done = step - first_step
        left = "?"
        if done > 0:
            left = _clock(seconds / done * (num_steps - step))
        line += f" [{_clock(seconds)}<{left}]"
    return f"{line} {', '.join(_told(values))}"


def _told(values: Mapping[str, float]) -> Iterator[str]:
    if "loss" in values:
        yield f"loss {values['loss']:.4f}"
    if "tokens_per_s" in values:
        yield f"{values['tokens_per_s']:,.0f} tokens/s"
    if "mfu" in values:
        yield f"{values['mfu']:.1%} MFU"
    if "exposed_ms" in values:
        yield f"{values['exposed_ms']:.1f} ms exposed"
    if "peak_memory_gib" in values:
        yield f"{values['peak_memory_gib']:.2f} GiB"
    if "grad_norm" in values:
        yield f"norm {values['grad_norm']:.3f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes:02}:{rest:02}"


def flops_of(model: nn.Module) -> float | None:
    """Floating-point operations of forward and backward for a token on this rank. Tables of rows multiply nothing. None
    if there are weights of which a token may see a part, or which it sees several times."""
    flops = 0.0
    for managed in dict.fromkeys(param for _, param in managed_params(model)):
        if not isinstance(managed, ShardedWeight):
            continue
        if managed.param.ndim != 2:
            return None
        num_layers = len(_layers_of(managed))
        if num_layers > 1:
            return None
        flops += num_layers * managed.layout.shape.numel() * _PER_ELEMENT[managed.param.requires_grad]
    return flops


def _layers_of(weight: ShardedWeight) -> set[nn.Module]:
    """The modules, or for a group the block, that multiply with it."""
    return {site.module for site in weight.registration.sites if not isinstance(site.module, nn.Embedding)}


def _uses_again(runtime: Runtime) -> bool:
    """Whether a forward has used a block, or a weight that multiplies, more often than modules have it."""
    for key, chain in list(runtime.passes.chains.items()):
        if key.is_backward or not key.is_grad_enabled:
            continue
        for index, num_uses in Counter(chain.plan.uses).items():
            weight = runtime.members.gatherables[index].weight
            if num_uses > len(set(weight.registration.sites)) and _layers_of(weight):
                return True
    return False


def _peak_flops(machine: str | Machine | None, device: torch.device) -> float | None:
    if machine is None:
        if device.type != "cuda":
            return None
        machine = preset_of(torch.cuda.get_device_name(device))
        if machine is None:
            return None
    gpus = load_machine(machine) if isinstance(machine, str) else machine
    return gpus.peak_tflops["bf16"] * 1e12


def _peak_nbytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _number(value: float | Tensor) -> float:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return float(value)


__all__ = ["StepMetrics", "progress_line"]
