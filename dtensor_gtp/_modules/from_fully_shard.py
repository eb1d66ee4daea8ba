"""What ``fully_shard`` and its modules (torch 2.13) have and this library has not: refused, with what to use instead.

Most of it tunes what is chosen here. ``python -m dtensor_gtp.help composability`` lists all arguments and methods,
these among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NoReturn, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_PLANNED = (
    "gtp_shard plans gathers by the order of uses. Leave it out; SchedulePolicy(prefetch_nbytes=...) sets how far ahead"
)
_SYMMETRIC = "SchedulePolicy(gather_backend='copy_engine') gathers through symmetric memory"

ARGUMENTS = MappingProxyType(
    {
        "dp_mesh_dims": (
            "Pass the sub-mesh itself: mesh['gtp'] or mesh['replicate', 'gtp'], several axes flattened to one; and let "
            "parallelize_module put parameters on the other axes alone"
        )
    }
)

METHODS = MappingProxyType(
    {
        "set_modules_to_forward_prefetch": _PLANNED,
        "set_modules_to_backward_prefetch": _PLANNED,
        "set_custom_all_gather": "Pass a class to SchedulePolicy(gather_backend=...)",
        "set_custom_reduce_scatter": "Choose a kind by SchedulePolicy(reduce_scatter=...)",
        "set_post_optim_event": (
            "A gather allocates memory on the compute stream, so it waits for that stream. Launch other work before "
            "the optimizer's step, or on another stream"
        ),
        "set_force_sum_reduction_for_comms": (
            "SchedulePolicy(reduce_scatter='all_to_all') or 'copy_engine' sends without a reduction; "
            "set_gradient_divide_factor(1) sums"
        ),
        "set_reduce_scatter_max_input_buffers": (
            "gtp_shard chooses how many are in flight. Leave it out; SchedulePolicy(memory='least') takes less memory"
        ),
        "set_separate_reduce_scatter_group": "Reductions always have a separate communicator. Leave it out",
        "set_unshard_in_backward": (
            "Backward gathers only the weights that it reads (no embedding, no layer whose input needs no "
            "gradient). Leave it out"
        ),
        "set_allocate_memory_from_process_group_for_comm": _SYMMETRIC,
        "set_symm_mem_for_comm": _SYMMETRIC,
    }
)


def refuse_arguments(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """A decorator: arguments of ``fully_shard`` that ``call`` does not have raise, and name what to use instead. So
    does a call without a mesh, for which ``fully_shard`` makes one."""

    @functools.wraps(call)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs.keys() & ARGUMENTS.keys():
            raise TypeError(f"gtp_shard has no argument {name} of fully_shard. {ARGUMENTS[name]}.")
        if len(args) == 1 and "mesh" not in kwargs:
            raise TypeError(
                "gtp_shard expects a mesh, but got none; fully_shard makes one of all ranks. Pass "
                "init_device_mesh('cuda', (torch.distributed.get_world_size(),), mesh_dim_names=('gtp',))."
            )
        return call(*args, **kwargs)

    return checked


class RefusedMethods:
    """The methods of ``FSDPModule`` that raise."""


def _refused(name: str, advice: str) -> Callable[..., NoReturn]:
    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} of fully_shard has no counterpart in gtp_shard. {advice}.")

    method.__name__ = name
    method.__doc__ = f"Refused. {advice}."
    return method


for _name, _advice in METHODS.items():
    setattr(RefusedMethods, _name, _refused(_name, _advice))
