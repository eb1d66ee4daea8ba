"""How ``torch.compile`` sees a sharded weight: opaque custom ops use it, so that a block compiles
with ``fullgraph``.

A 0-dim tensor on the host, the *handle*, names the weight: an input of the compiled graph, so that
all layers of one shape share one graph. ``leaf``, one number on the host, stands for the weight in
autograd's graph.

[Note: effects of opaque ops]
The compiler does not know that a backward op reduces a gradient. Two things keep it from dropping
or merging the op: it returns a gradient of ``leaf`` with one element (Inductor drops ops that
return empty tensors), and its argument ``call`` differs in each call (in ``linear(x) + linear(x)``,
two ops have equal inputs, and both gradients count).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy

from .. import _torch_compat as compat
from .._params.refusals import HOW_TO_WRITE, refuse_recording
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime


class Handles:
    """Weights by the number in their handle. Does not keep them alive."""

    def __init__(self) -> None:
        self._uses: WeakValueDictionary[int, CompiledWeight] = WeakValueDictionary()
        self._numbers = itertools.count()  # of weights
        self._calls = itertools.count()  # of backward ops

    def add(self, weight: CompiledWeight) -> Tensor:
        number = next(self._numbers)
        self._uses[number] = weight
        return torch.tensor(number, device="cpu")

    def __getitem__(self, handle: Tensor) -> CompiledWeight:
        return self._uses[int(handle)]

    def next_call(self) -> int:
        """A number for one call of a backward op, see [Note: effects of opaque ops]."""
        return next(self._calls)


@functools.cache
def handles() -> Handles:
    """The one table of this process, because custom ops take only tensors and numbers."""
    return Handles()


class CompiledWeight:
    """A weight at one module, as compiled code uses it."""

    def __init__(self, runtime_of: Any, weight: ShardedWeight, site: Any) -> None:
        # A function: a later ``gtp_shard`` call on an outer module replaces the runtime.
        self._runtime_of = runtime_of
        self.weight = weight
        self.site = site  # where the parameter is registered
        self._handle = handles().add(self)

    @property
    def handle(self) -> Tensor:
        """An input of the graph that is compiled. It has a meaning in this process alone."""
        if compat.is_exporting():
            refuse_recording("torch.export", self.weight.fqn)
        return self._handle

    def resolve_in_forward(self) -> tuple[Runtime, ShardedWeight]:
        """For a use in forward, or in its recomputation in backward."""
        weight = self.weight
        # What was compiled has the gradient of the leaf, or lacks it.
        is_traced_alike = weight.stand_in.leaf.requires_grad == weight.param.requires_grad
        weight.follow(self.site)
        runtime: Runtime = self._runtime_of()
        if not runtime.setup.is_done:
            # No frame is around the compiled code, which uses single weights, also in its backward.
            runtime.setup.make_groups_by(_no_groups)
        if not is_traced_alike:
            # The frame of a compiled module follows such a change, but a compiled function has no
            # frame around it.
            raise RuntimeError(
                f"Parameter '{weight.fqn}' was frozen or unfrozen after the compilation of a "
                "function that calls its module. Compile the module instead, with module.compile() "
                "or torch.compile(module)."
            )
        # A recomputation runs in a backward.
        if compat.current_graph_task_id() != -1:
            runtime.note_backward()
        weight.versions.compiled = weight.version  # backward compares it
        return runtime, weight

    def resolve_in_backward(self) -> tuple[Runtime, ShardedWeight]:
        self.weight.follow(self.site)
        runtime: Runtime = self._runtime_of()
        runtime.note_backward()
        return runtime, self.weight


def _no_groups(num_tokens: int) -> tuple[str, ...]:
    """What ``make_groups`` returns if compiled code is the first that uses a weight."""
    return ("no group: the first call was compiled, with the code around the model",)


def gradient_of(leaf: Tensor) -> Tensor:
    """What backward ops return for ``leaf``, see [Note: effects of opaque ops]."""
    return torch.zeros_like(leaf)


def show_to_policies(*ops: Any) -> None:
    """Let the policies of selective checkpoints decide about these custom ops."""
    for mode in compat.POLICY_MODES:
        for op in ops:
            op.register_torch_dispatch(mode, _ask_policy)


def _ask_policy(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """While a checkpoint is compiled, save the output of a linear layer if the policy would save
    that of its GEMM."""
    if not compat.is_tracing():
        # Compiled code runs within a checkpoint. It may write to what an op returns, so nothing may
        # be saved.
        return op(*args, **(kwargs or {}))
    ask = getattr(mode, "policy_fn", None)
    if ask is None or op is not torch.ops.dtensor_gtp.linear.default:
        return mode.__torch_dispatch__(op, types, args, kwargs)
    input, _, bias, _, out_features = args

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        answer = ask(context, op, *args, **kwargs)
        if answer in (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):  # a policy may return a bool
            return answer
        with compat.without_dispatch_modes():  # or the compiler records this tensor, too
            weight_t = torch.empty((int(input.shape[-1]), int(out_features)), device="meta")
        if bias is None:
            return ask(context, torch.ops.aten.mm.default, input, weight_t)
        return ask(context, torch.ops.aten.addmm.default, bias, input, weight_t)

    mode.policy_fn = policy
    try:
        return mode.__torch_dispatch__(op, types, args, kwargs)
    finally:
        mode.policy_fn = ask


def note_read(value: Tensor) -> Tensor:
    """``value``: a full weight, or a copy of a whole parameter, that code reads while the compiler traces it. What
    that code writes to it would be lost."""
    compat.at_compile_time(_refuse_writes)
    return value


def _refuse_writes(context: Any) -> None:
    traced = context.get_local("value", stacklevel=1).as_fake()  # of ``note_read``; writes show in its version
    compat.at_end_of_trace(context, functools.partial(_refuse_written, traced, traced._version))


def _refuse_written(traced: Tensor, version: int) -> None:
    if traced._version != version:
        raise RuntimeError(
            f"Compiled code writes to a copy of a parameter of shape {tuple(traced.shape)}, which reaches none of its "
            f"shards. {HOW_TO_WRITE}"
        )


def materialize(compiled: CompiledWeight) -> Tensor:
    """The full weight as one op of the compiled graph; a DTensor around it where the module is
    tensor-parallel."""
    weight = compiled.weight
    about = (list(weight.layout.shape), weight.compute_dtype, weight.device)
    full: Tensor = note_read(_materialize(weight.stand_in.leaf, compiled.handle, *about))
    spec = weight.tp_spec
    if spec is None:
        return full
    # The slices of the ranks may differ in size, so from_local needs the logical shape.
    return DTensor.from_local(full, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


@torch.library.custom_op("dtensor_gtp::materialize", mutates_args=())
def _materialize(leaf: Tensor, handle: Tensor, shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    if weight.form.wire is not None:
        weight.form.wire.note_read()
    gathered = runtime.gathering.acquire(weight.for_forward)
    # Owns the memory: without an owner, DTENSOR_GTP_DEBUG=poison overwrites it.
    full = gathered.contiguous().detach()
    runtime.gathering.release(weight.for_forward, gathered)
    if gathered.is_alias or gathered.holds > 0 or weight.for_forward.kept is gathered:
        # Others read it, too, and the compiler may write to what an op returns after its last use.
        full = full.clone()
    return full


@_materialize.register_fake
def _(leaf: Tensor, handle: Tensor, shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return leaf.new_empty(shape, dtype=dtype, device=device)


@torch.library.custom_op("dtensor_gtp::reduce_grad", mutates_args=())
def _reduce_grad(grad: Tensor, leaf: Tensor, handle: Tensor, call: int) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_backward()
    if weight.stand_in.is_awaited:
        runtime.grads.add_full(weight, grad, is_owned=False)  # ``grad`` is the graph's
    return gradient_of(leaf)


def _full_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _reduce_grad(grad, *ctx.saved_tensors, handles().next_call()), None, None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    leaf, handle, *_ = inputs
    ctx.save_for_backward(leaf, handle)


_reduce_grad.register_fake(lambda grad, leaf, *others: gradient_of(leaf))
_materialize.register_autograd(_full_grad, setup_context=_save)
show_to_policies(_materialize)
