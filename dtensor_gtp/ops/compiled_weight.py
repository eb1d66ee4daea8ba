"""How ``torch.compile`` sees a sharded weight."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from .. import _torch_compat as compat
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime


class Handles:
    """Weights by the number that their handle tensor holds. Does not keep them alive."""

    def __init__(self) -> None:
        self._uses: WeakValueDictionary[int, CompiledWeight] = WeakValueDictionary()
        self._numbers: Iterator[int] = itertools.count()
        self._calls: Iterator[int] = itertools.count()

    def add(self, weight: CompiledWeight) -> Tensor:
        number = next(self._numbers)
        self._uses[number] = weight
        return torch.tensor(number, device="cpu")

    def __getitem__(self, handle: Tensor) -> CompiledWeight:
        return self._uses[int(handle)]

    def next_call(self) -> int:
        """A number that makes one call of a backward op unlike any other, see [Note: effects of opaque ops]."""
        return next(self._calls)


@functools.cache
def handles() -> Handles:
    """The one table of this process: custom ops have no other way to find what is not a tensor."""
    return Handles()


class CompiledWeight:
    """What compiled code holds of a weight at one module.

    Args:
        runtime_of: Gives the runtime, which a later ``gtp_shard`` call on an outer module replaces.
        site: Where the parameter is registered.
    """

    def __init__(self, runtime_of: Any, weight: ShardedWeight, site: Any) -> None:
        self._runtime_of = runtime_of
        self.weight = weight
        self.site = site
        self.handle = handles().add(self)

    def resolve(self) -> tuple[Runtime, ShardedWeight]:
        self.weight.follow(self.site)
        return self._runtime_of(), self.weight

    def resolve_in_forward(self) -> tuple[Runtime, ShardedWeight]:
        """For a use of forward, or of its recomputation in backward."""
        weight = self.weight
        is_in_time = weight.stand_in.leaf.requires_grad == weight.param.requires_grad
        runtime, weight = self.resolve()
        if not is_in_time:
            # Frames see to it, but a compiled function that calls the module has none around it.
            raise RuntimeError(
                f"Parameter '{weight.fqn}' was frozen or unfrozen after the function that calls its module was "
                "compiled. Compile the module instead, with module.compile() or torch.compile(module)."
            )
        if compat.current_graph_task_id() != -1:
            runtime.note_backward()
        weight.compiled_version = weight.version
        return runtime, weight

    def resolve_in_backward(self) -> tuple[Runtime, ShardedWeight]:
        runtime, weight = self.resolve()
        runtime.note_backward()
        return runtime, weight


def gradient_of(leaf: Tensor) -> Tensor:
    """What backward ops return for ``leaf``, see [Note: effects of opaque ops]."""
    return torch.zeros_like(leaf)


def ask_policy(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """While a checkpoint with a policy is compiled: save what a linear layer returns if the policy wants it of the GEMM
    that ``nn.Linear`` is known by."""
    if not compat.is_tracing():
        # Compiled code that runs inside of a checkpoint: it may write to what an op returns, so nothing may be saved.
        return op(*args, **(kwargs or {}))
    ask = getattr(mode, "policy_fn", None)
    if ask is None or op is not torch.ops.dtensor_gtp.linear.default:
        return mode.__torch_dispatch__(op, types, args, kwargs)
    input, _, bias, _, out_features = args

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        answer = ask(context, op, *args, **kwargs)
        if answer in (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            return answer
        weight_t = _shape_only(input.shape[-1], out_features)
        if bias is None:
            return ask(context, torch.ops.aten.mm.default, input, weight_t)
        return ask(context, torch.ops.aten.addmm.default, bias, input, weight_t)

    mode.policy_fn = policy
    try:
        return mode.__torch_dispatch__(op, types, args, kwargs)
    finally:
        mode.policy_fn = ask


def _shape_only(*shape: int) -> Tensor:
    with compat.without_dispatch_modes():
        return torch.empty(tuple(int(size) for size in shape), device="meta")
