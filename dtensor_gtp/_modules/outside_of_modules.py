"""What code does to sharded parameters outside of their modules.

**Runs of autograd's engine**: ``backward(inputs=...)``, ``torch.autograd.grad`` and
``full_tensor()``. Gradients do not reach a sharded parameter through autograd: a leaf stands for it
in the graph. torch would find no path to the parameter, and compute nothing without an error. Where
code outside of the model computes with the full tensor, they do, and torch would take each rank's
rows from the gradient of that rank alone.

**Writes that torch does not count**: through ``param.data``, and by foreach functions. Momentum
encoders (MoCo, BYOL) write so in a forward, which has gathered weights ahead of their use. So both
are counted here. Only a write makes a gather stale: all ranks write, but one rank alone may look.

**Backwards in two parts**, as stages of pipelines run them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .. import _torch_compat as compat
from .._dtensor.data_setter import set_data
from .._dtensor.remedies import explain
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._params.weight_group import WeightGroup
from .._params.whole_param import WholeParam
from .._schedule.runtime import RETURN_IT, Runtime
from .._schedule.steps import optimizer_steps
from .binding import runtimes_below

# What torch says of a leaf of a group without memory, and of one that is closed.
_FREED = "out of bounds for storage of size 0", "its data is not allocated yet"
_CLOSED = re.compile(r"Tensor \[([\d, ]*)\].* is at version (\d+); expected version (\d+) instead")


@functools.cache
def install() -> None:
    """Look at runs of the engine, at ``full_tensor()``, ``param.data`` and foreach functions; once
    in a process."""
    compat.wrap_engine(_run)
    compat.wrap_full_tensor(_averaged)
    compat.wrap_data_getter(_data_of)
    compat.wrap_data_setter(_set_data)
    for op in compat.foreach_writes():
        compat.set_dtensor_handler(op, _write_foreach)


def known_runtimes() -> list[Runtime]:
    """All of the process."""
    return [watcher for watcher in optimizer_steps().watchers if isinstance(watcher, Runtime)]


def is_managed(param: object) -> bool:
    """Whether ``gtp_shard`` has made this parameter, for whichever module."""
    return any(runtime.members.member_of(param) is not None for runtime in known_runtimes())


def _run(stock: Callable[..., Any], outputs: Any, grads: Any, retain: Any, create: Any, inputs: Any, *args: Any) -> Any:
    """As torch's function. The last one of ``args`` says whether gradients go to ``.grad``."""
    known = known_runtimes()
    runtimes = []  # without inputs, all leaves get their gradients
    if inputs:
        runtimes = known
    arrived = []
    if compat.current_graph_task_id() == -1 and not create:  # no hook or checkpoint of another run is around
        arrived = [(runtime, runtime.arrived()) for runtime in known]
    # A hook may call ``torch.autograd.grad`` within a run. The outer run gets its ids back.
    before = [runtime.asked_for for runtime in runtimes]
    try:
        if any(isinstance(_tensor_of(given), DTensor) for given in inputs or ()):
            if compat.current_graph_task_id() == -1:  # no backward runs
                for runtime in runtimes:
                    runtime.follow_frozen()
            inputs = _with_leaves(runtimes, outputs, inputs, accumulates=args[-1])
        # Ids suffice: ``inputs`` keeps these tensors alive during the run.
        asked_for = {id(given) for given in inputs or ()}
        for runtime in runtimes:
            runtime.asked_for = asked_for
        result = stock(outputs, grads, retain, create, inputs, *args)
        for runtime, had_arrived in arrived:
            runtime.refuse_lost_gradients(had_arrived)
        return result
    except RuntimeError as error:
        explain(error)
        of_models = [runtime.members.groups for runtime in known if runtime.members.groups]
        if of_models and (any(text in str(error) for text in _FREED) or _is_of_closed(error, of_models)):
            names = ", ".join(f"'{groups[0].fqn}' to '{groups[-1].fqn}'" for groups in of_models)
            raise RuntimeError(
                f"{error} Perhaps a backward came to ops of a block before it came to an output of the block, whose "
                f"weights are gathered only then (blocks {names}, rank {dist.get_rank()}). {RETURN_IT}"
            ) from error
        raise
    finally:
        for runtime, earlier in zip(runtimes, before, strict=True):
            runtime.asked_for = earlier


def _is_of_closed(error: RuntimeError, of_models: Sequence[Sequence[WeightGroup]]) -> bool:
    """Whether autograd refuses what it has saved of a group that nobody uses now."""
    found = _CLOSED.search(str(error))
    if found is None:
        return False
    shape = sorted(int(size) for size in found[1].split(",") if size.strip())  # perhaps of a transposed view
    counts = int(found[2]), int(found[3])
    closed = [group.leaves for groups in of_models for group in groups if group.leaves.is_closed]
    leaves = [leaf for each in closed for leaf in each.by_member.values()]
    return any(sorted(leaf.shape) == shape and (leaf._version, leaf._version - 1) == counts for leaf in leaves)


def _with_leaves(
    runtimes: Sequence[Runtime], outputs: Any, inputs: Sequence[Any], accumulates: bool
) -> tuple[Any, ...]:
    """For ``backward``: ``inputs`` and the leaves that stand for those that are ours."""
    by_id = {id(managed.param): managed for runtime in runtimes for managed in runtime.members.params}
    found: list[Any] = list(inputs)  # torch still refuses frozen ones among them
    reached = None
    if not accumulates:  # ``torch.autograd.grad``: refuse only parameters that it would find
        reached = _leaves_below(outputs)
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
                f"torch.autograd.grad cannot return the gradient of parameter '{managed.fqn}' of "
                f"shape {tuple(param.shape)}, which gtp_shard reduces over mesh axes "
                f"{managed.mesh.mesh_dim_names} outside of autograd (rank {dist.get_rank()}). Call "
                "loss.backward(inputs=[...]) with the same parameters, and read their .grad."
            )
    return tuple(found)


def _tensor_of(given: Tensor | GradientEdge) -> Any:
    """The tensor, or the leaf whose gradient edge was given."""
    if isinstance(given, GradientEdge):
        return getattr(given.node, "variable", None)  # only ``AccumulateGrad`` has one
    return given


def _leaves_of(managed: ManagedParam) -> list[Tensor]:
    if isinstance(managed, WholeParam) and managed.is_widened:
        raise NotImplementedError(
            f"backward(inputs=...) cannot name parameter '{managed.fqn}' of shape "
            f"{tuple(managed.param.shape)}, which is {managed.param.dtype} and computes in "
            f"{managed.compute_dtype} (rank {dist.get_rank()}): gtp_shard reads its gradient "
            "before autograd rounds it. Freeze the other parameters with requires_grad_(False), "
            "and call backward() without inputs."
        )
    leaves = list(managed.leaves)
    if managed.group is not None:
        leaves.append(managed.group.leaves.by_member[managed])  # graphs of the block have this one
    return leaves


def _leaves_below(outputs: Any) -> set[int]:
    """Ids of the leaves in the graph of ``outputs``."""
    # Not recursive: a graph may be deeper than Python's stack.
    waiting: list[Node | None] = []
    for output in outputs:
        waiting.append(output.node if isinstance(output, GradientEdge) else output.grad_fn)
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [edge[0] for edge in node.next_functions]
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


def _refuse_cut_again(param: DTensor) -> None:
    """Raise for a parameter that ``fully_shard`` has put in the place of one of ours, to cut it again."""
    members = (member for runtime in known_runtimes() for member in runtime.members.params)
    if any(member.registration.is_cut_again and member.registration.current is param for member in members):
        raise NotImplementedError(
            "backward(inputs=...) and torch.autograd.grad cannot name a parameter of shape "
            f"{tuple(param.shape)} with placements {param.placements}, which an outer fully_shard "
            f"has sharded, too (rank {dist.get_rank()}). Freeze the other parameters with "
            "requires_grad_(False), and call backward() without inputs."
        )


def _averaged(param: DTensor) -> list[Placement] | None:
    """How ranks hold the gradient of the full tensor of a sharded weight: each that of its own
    data."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None  # torch's own rule
    if not (param.is_leaf and param.requires_grad):
        return None
    for runtime in known_runtimes():
        weight = runtime.members.member_of(param)
        if isinstance(weight, WholeParam):
            # ``WholeParam`` takes the gradient of this rank and reduces it.
            return [Replicate()] * param.device_mesh.ndim
        if isinstance(weight, ShardedWeight) and not weight.registration.is_cut_again:
            num_tp = 0
            if weight.tp_spec is not None:  # its axes come first; ranks along them see the same data
                num_tp = weight.tp_spec.mesh.ndim
            # Ranks saw different data. The backward of ``full_tensor`` averages over them.
            placements: list[Placement] = [Partial("avg")] * param.device_mesh.ndim
            placements[:num_tp] = [Replicate()] * num_tp
            return placements
    return None


def _write_foreach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A foreach function writes to the tensors of its first argument, and DTensor counts no write."""
    if not compat.is_in_compiler():
        for runtime in known_runtimes():
            # Autograd then refuses backwards through the old values.
            runtime.lost_writes.note_written(args[0])
        # What ``param.data`` gave counts for itself, and others harm nobody.
        torch.autograd.graph.increment_version(
            [tensor for tensor in args[0] if not isinstance(tensor, nn.Parameter) and not tensor.is_inference()]
        )
    with compat.stock_dtensor_dispatch(op):  # without this handler, which would call itself
        return op(*args, **kwargs)


def _set_data(stock: Any, param: DTensor, value: Any) -> None:
    if isinstance(param, nn.Parameter):  # other DTensors are none of ours
        for runtime in known_runtimes():
            runtime.lost_writes.refuse_new_data(param)
    set_data(stock, param, value, is_managed=is_managed(param))
    if isinstance(param, nn.Parameter):
        for runtime in known_runtimes():
            runtime.lost_writes.note_new_data(param)


def _data_of(param: DTensor) -> Tensor | None:
    for runtime in known_runtimes():
        if (member := runtime.members.member_of(param)) is not None:
            return member.counted_data()
    return None


def follow_pipelining() -> None:
    """Let pipeline stages run a backward in two parts (zero bubble), once
    ``torch.distributed.pipelining`` is imported.

    torch splits the autograd graph at ``stage.submod.parameters()``, through which our gradients do
    not pass. Instead, the first part is a whole backward in which the fused ops postpone their
    weight gradients; the second part computes and reduces those. Weights that are read as
    attributes, whole parameters, and compiled layers, whose graph frees or reuses the operands, are
    done in the first part.
    """
    if (stage_class := compat.pipeline_stage_class()) is not None:
        _replace_backward(stage_class)


@functools.cache
def _replace_backward(stage_class: Any) -> None:
    run = stage_class.backward_maybe_with_nosync

    @functools.wraps(run)
    def run_part(stage: Any, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        is_part = backward_type in ("input", "weight")  # of a backward in two parts
        runtimes = []
        if last_backward or is_part:
            runtimes = runtimes_below(stage.submod)
        if any(runtime.grads.launches.replicas is not None for runtime in runtimes):
            raise NotImplementedError(
                "Pipelines do not support elastic.synchronize_replicas: its replicas span all "
                "ranks of the job, a stage only some. Use a mesh of init_weight_mesh with pp."
            )
        if backward_type == "full" or not runtimes:  # one part, or none of our modules
            return run(stage, backward_type, bwd_kwargs, last_backward)
        if backward_type == "input":
            outputs = bwd_kwargs["stage_output"]
            if bwd_kwargs["output_grads"] is None:
                (outputs,) = outputs  # a loss, which a whole backward expects outside of a tuple
            postponed = []
            with ExitStack() as stack:
                for runtime in runtimes:
                    jobs = stack.enter_context(runtime.grads.postponing())
                    # The jobs hold inputs and gradients until the second part.
                    postponed.append((runtime, jobs))
                whole = {**bwd_kwargs, "stage_output": outputs}
                grads, _ = run(stage, "full", whole, last_backward)
            return grads, postponed  # the stage passes the list to the second part as param_groups
        # A backward of nothing, in which torch sets the flags of an outer fully_shard. As "weight"
        # it would make a view of each parameter, which is slow, and which placements with a block
        # size do not have.
        nothing = torch.zeros((), requires_grad=True)
        of_nothing = {"stage_output": nothing, "output_grads": None, "input_values": ()}
        result = run(stage, "full", of_nothing, last_backward)
        # No backward runs: autograd would record the jobs, and ``complete`` does what the end of a backward
        # does.
        with torch.no_grad():
            for runtime, jobs in bwd_kwargs["param_groups"]:
                for job in jobs:
                    job()
                runtime.steps.complete()
        return result

    compat.replace("pipeline", stage_class, "backward_maybe_with_nosync", run_part)
