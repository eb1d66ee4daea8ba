"""Runs of autograd's engine: ``backward(inputs=...)``, ``torch.autograd.grad`` and ``full_tensor()`` of sharded
parameters.

Gradients do not reach a sharded parameter through autograd: a leaf stands for it in the graph. torch would find no path
to the parameter, and compute nothing without an error. Where code outside of the model computes with the full tensor,
they do, and torch would take each rank's rows from the gradient of that rank alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .. import _torch_compat as compat
from .._dtensor.remedies import explain
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from .._schedule.runtime import Runtime
from .._schedule.steps import optimizer_steps
from ..placement import GTPShard


@functools.cache
def install() -> None:
    """Look at the inputs of each run of autograd's engine, and at ``full_tensor()``; once in a process."""
    compat.wrap_engine(_run)
    compat.wrap_full_tensor(_averaged)


def _averaged(param: DTensor) -> list[Placement] | None:
    """How ranks hold the gradient of the full tensor of a sharded weight: each that of its own data."""
    if torch.compiler.is_compiling() or not (param.is_leaf and param.requires_grad and torch.is_grad_enabled()):
        return None
    for runtime in _runtimes():
        weight = runtime.members.member_of(param)
        if isinstance(weight, WholeParam):
            return [Replicate()] * param.device_mesh.ndim
        if isinstance(weight, ShardedWeight) and not weight.registration.is_cut_again:
            num_tp = 0 if weight.tp_spec is None else weight.tp_spec.mesh.ndim
            is_tp = [axis < num_tp for axis in range(param.device_mesh.ndim)]
            return [Replicate() if each else Partial("avg") for each in is_tp]
    return None


def _runtimes() -> list[Runtime]:
    """All of the process."""
    return [watcher for watcher in optimizer_steps().watchers if isinstance(watcher, Runtime)]


def _run(stock: Callable[..., Any], outputs: Any, grads: Any, retain: Any, create: Any, inputs: Any, *args: Any) -> Any:
    """As torch's function. The last one of ``args`` says whether gradients go to ``.grad``."""
    try:
        if not inputs:
            return stock(outputs, grads, retain, create, inputs, *args)
        return _run_for(stock, outputs, grads, retain, create, inputs, *args)
    except RuntimeError as error:
        explain(error)
        raise


def _run_for(
    stock: Callable[..., Any], outputs: Any, grads: Any, retain: Any, create: Any, inputs: Any, *args: Any
) -> Any:
    """The same with respect to ``inputs``."""
    runtimes = _runtimes()
    if any(isinstance(_tensor_of(given), DTensor) for given in inputs):
        inputs = _with_leaves(runtimes, outputs, inputs, accumulates=args[-1])
    before = [runtime.asked_for for runtime in runtimes]
    asked_for = {id(given) for given in inputs}
    try:
        for runtime in runtimes:
            runtime.asked_for = asked_for
        return stock(outputs, grads, retain, create, inputs, *args)
    finally:
        for runtime, earlier in zip(runtimes, before, strict=True):
            runtime.asked_for = earlier


def _with_leaves(
    runtimes: Sequence[Runtime], outputs: Any, inputs: Sequence[Any], accumulates: bool
) -> tuple[Any, ...]:
    """For ``backward``: ``inputs`` and the leaves that stand for those that are ours."""
    by_id = {id(managed.param): managed for runtime in runtimes for managed in runtime.members.params}
    found: list[Any] = list(inputs)
    reached = None if accumulates else _leaves_below(outputs)
    for given in inputs:
        param = _tensor_of(given)
        if not isinstance(param, DTensor):
            continue
        if (managed := by_id.get(id(param))) is None:
            _refuse_cut_again(param)
            continue
        leaves = [leaf for leaf in _leaves_of(managed) if leaf.requires_grad]
        if reached is None:
            found += leaves
        elif any(id(leaf) in reached for leaf in leaves):
            raise NotImplementedError(
                f"torch.autograd.grad cannot return the gradient of parameter '{managed.fqn}' of shape "
                f"{tuple(param.shape)}, which gtp_shard reduces over mesh axes {managed.mesh.mesh_dim_names} outside "
                f"of autograd (rank {dist.get_rank()}). Call loss.backward(inputs=[...]) with the same parameters, "
                "and read their .grad."
            )
    return tuple(found)


def _tensor_of(given: Tensor | GradientEdge) -> Any:
    """The tensor, or the leaf whose gradient edge was given."""
    return getattr(given.node, "variable", None) if isinstance(given, GradientEdge) else given


def _leaves_of(managed: ManagedParam) -> list[Tensor]:
    if isinstance(managed, WholeParam) and managed.is_widened:
        raise NotImplementedError(
            f"backward(inputs=...) cannot name parameter '{managed.fqn}' of shape {tuple(managed.param.shape)}, "
            f"which is {managed.param.dtype} and computes in {managed.compute_dtype} (rank {dist.get_rank()}): "
            "gtp_shard reads its gradient before autograd rounds it. Freeze the other parameters with "
            "requires_grad_(False), and call backward() without inputs."
        )
    return managed.leaves if managed.group is None else [*managed.leaves, managed.group.leaves.by_member[managed]]


def _leaves_below(outputs: Any) -> set[int]:
    """Ids of the leaves in the graph of ``outputs``."""
    waiting: list[Node | None] = [out.node if isinstance(out, GradientEdge) else out.grad_fn for out in outputs]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [edge[0] for edge in node.next_functions]
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


def _refuse_cut_again(param: DTensor) -> None:
    """A parameter with a shard of ours that no runtime registers is one that ``fully_shard`` has cut again."""
    if isinstance(param, torch.nn.Parameter) and any(isinstance(each, GTPShard) for each in param.placements):
        raise NotImplementedError(
            f"backward(inputs=...) and torch.autograd.grad cannot name a parameter of shape {tuple(param.shape)} "
            f"with placements {param.placements}, which an outer fully_shard has sharded, too (rank "
            f"{dist.get_rank()}). Freeze the other parameters with requires_grad_(False), and call backward() "
            "without inputs."
        )
