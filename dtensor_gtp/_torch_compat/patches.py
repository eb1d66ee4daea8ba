"""Every place of torch that this package replaces: which, in what releases, why, and what undoes it.

Nothing is replaced on import. The first ``gtp_shard``, block placement, quantized checkpoint or pipeline of a process
does so, through ``replace``. Each replacement leaves all cases that do not concern this package to what was there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """One entry of the list.

    Args:
        target: What is replaced, by its dotted name.
        releases: Of torch, in which it is needed, as far as they were tried.
        reason: What torch does there.
        issue: Number of torch's issue, if there is one.
    """

    target: str
    releases: str
    reason: str
    issue: int | None = None


_TENSOR = "torch.distributed.tensor"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
_ALL = "2.11 to 2.13"
_BLOCKS = "it takes the dim of a placement for its whole layout: placements in blocks would be misread"
_WRAPPER = "it takes shards for replicas of plain tensors: they would be broadcast, or never reduced"

PATCHES = {
    "spec": Patch(f"{_TENSOR}._dtensor_spec.DTensorSpec.__post_init__", _ALL, _BLOCKS),
    "shard order": Patch(f"{_TENSOR}._dtensor_spec.DTensorSpec._verify_shard_order", _ALL, _BLOCKS),
    "plan": Patch(f"{_TENSOR}._redistribute._gen_transform_infos_non_cached", _ALL, _BLOCKS),
    "cached plan": Patch(f"{_TENSOR}._redistribute._gen_transform_infos", _ALL, _BLOCKS),
    "distribute_tensor": Patch(f"{_TENSOR}.distribute_tensor, and where torch has imported it", _ALL, _BLOCKS),
    "flattened mesh": Patch(
        f"{_TENSOR}._redistribute._get_flattened_mesh_by_layout",
        _ALL,
        "it raises a KeyError for axes in another order than in their root mesh",
    ),
    "propagation": Patch(
        f"{_TENSOR}.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached",
        _ALL,
        "it refuses norms of several meshes, which clipping takes, and block placements",
    ),
    "cached propagation": Patch(
        f"{_TENSOR}.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding", _ALL, "it caches the former"
    ),
    "full_tensor": Patch(
        f"{_TENSOR}.DTensor.full_tensor",
        _ALL,
        "in backward each rank takes its rows from its own gradient, not from the average over ranks",
    ),
    "handlers": Patch(
        f"{_TENSOR}.DTensor._op_dispatcher._custom_op_handlers",
        _ALL,
        "all threads share this table, in which one thread may set a handler aside",
    ),
    "handler": Patch(
        f"{_TENSOR}.DTensor._op_dispatcher._custom_op_handlers[op]",
        _ALL,
        "initialization, item() and GradScaler would use the rows of one mesh axis alone",
    ),
    "fused optimizers": Patch(
        f"{_TENSOR}.DTensor._op_dispatcher.sharding_propagator, its four tables of strategies",
        _ALL,
        "they have fused AdamW, and not SGD and Adagrad",
    ),
    "data": Patch(
        f"{_TENSOR}.DTensor.data", _ALL, "setting it has no effect, and no version counts the writes to what it returns"
    ),
    "format": Patch(f"{_TENSOR}.DTensor.__format__", _ALL, "its error does not say what to write"),
    "numpy": Patch(f"{_TENSOR}.DTensor.numpy", _ALL, "its error does not say what to write"),
    "tolist": Patch(f"{_TENSOR}.DTensor.tolist", _ALL, "its error does not say what to write"),
    "items of lists": Patch(
        "torch.nn.ParameterList.__setitem__", _ALL, "it makes a new parameter, without gradient, of a gathered weight"
    ),
    "items of dicts": Patch("torch.nn.ParameterDict.__setitem__", _ALL, "as that of lists"),
    "excepthook": Patch("sys.excepthook", _ALL, "errors of torch's C++ code do not say what to write"),
    "engine": Patch(
        "torch.autograd._engine_run_backward", _ALL, "inputs=[...] would find no way to a parameter of ours"
    ),
    "fully_shard init": Patch(f"{_GROUP}.__init__", _ALL, "it cuts our parameters once more"),
    "fully_shard post_backward": Patch(f"{_GROUP}.post_backward", _ALL, "it reads .grad before ours is there"),
    "fully_shard to_sharded": Patch(f"{_GROUP}._to_sharded", _ALL, "it frees a shard that a gather may read"),
    "fully_shard to_unsharded": Patch(f"{_GROUP}._to_unsharded", _ALL, "compiled code does not see what it registers"),
    "DistributedDataParallel": Patch("torch.nn.parallel.DistributedDataParallel.__init__", _ALL, _WRAPPER),
    "FullyShardedDataParallel": Patch("torch.distributed.fsdp.FullyShardedDataParallel.__init__", _ALL, _WRAPPER),
    "DataParallel": Patch("torch.nn.parallel.DataParallel.__init__", _ALL, _WRAPPER),
    "replicate": Patch(f"{_TENSOR}.parallel.ddp._localize_dtensor", _ALL, _WRAPPER),
    "graphed callables": Patch(
        "torch.cuda.make_graphed_callables, and where torch has imported it",
        _ALL,
        "its graphs would have no gradients of ours",
    ),
    "full state dicts": Patch(
        "torch.distributed.checkpoint.state_dict._maybe_full_or_cpu_state_dict",
        _ALL,
        "full values of parameters that stay whole share memory with them: a snapshot would change with the next step",
    ),
    "full optimizer state": Patch(
        "torch.distributed.checkpoint.state_dict._get_optim_state_dict",
        _ALL,
        "of a gathered optimizer, it would return the states of one rank's parameters as those of all",
    ),
    "loading full optimizer state": Patch(
        "torch.distributed.checkpoint.state_dict._load_optim_state_dict",
        _ALL,
        "it raises a KeyError for states that another rank keeps",
    ),
    "pipeline": Patch(
        "torch.distributed.pipelining.stage._PipelineStageBase.backward_maybe_with_nosync",
        _ALL,
        "it splits a backward at parameters, through which our gradients do not pass",
    ),
}


class Replaced(NamedTuple):
    """A replacement in this process; ``undo`` takes it back."""

    patch: Patch
    undo: Callable[[], None]


@functools.cache
def replaced() -> list[Replaced]:
    """What has been replaced in this process, in order."""
    return []  # ``replace`` appends to it


def replace(key: str, owner: Any, name: str, new: Any) -> None:
    """Set attribute ``name`` of ``owner``, which is the target of an entry of ``PATCHES``.

    Raises:
        KeyError: The list has no such entry.
    """
    patch = PATCHES[key]  # first: an entry that is missing changes nothing
    # Of the owner alone: what a base has must not stay on the owner after undo.
    if name in vars(owner):
        undo = functools.partial(setattr, owner, name, vars(owner)[name])
    else:
        undo = functools.partial(delattr, owner, name)  # it was that of a base
    setattr(owner, name, new)
    replaced().append(Replaced(patch, undo))


def replace_item(key: str, table: dict[Any, Any], op: Any, new: Any) -> None:
    """The same for an item of a table by ops."""
    patch = PATCHES[key]
    if op in table:
        undo = functools.partial(table.__setitem__, op, table[op])
    else:
        undo = functools.partial(table.__delitem__, op)  # the table had no such op
    table[op] = new
    replaced().append(Replaced(patch, undo))


def undo_patches() -> None:
    """Give torch back all that was replaced. Afterwards this process must not use the package any more."""
    # The last one first: a place that was replaced twice (``DTensor.data``) gets torch's value back.
    while replaced():
        replaced().pop().undo()
