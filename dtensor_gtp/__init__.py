"""Generalized Tensor Parallelism for PyTorch: shard every weight, gather each just in time.

The examples of this reference assume ``import torch``, ``from torch import nn`` and ``from dtensor_gtp import *``, and
for a name of another module the same import of that module. An example that makes a mesh of four ranks needs them: save
it without the prompts and start it by ``torchrun --nproc-per-node 4 file.py``. All others run in one process.

Environment variables, the same on all ranks:

``DTENSOR_GTP_DEBUG``: debugging aids, separated by commas. None of them changes a correct result.

- ``poison`` fills a gather buffer with NaN when it is freed, and a new buffer for a gradient, so that a wrong read
  shows in the result.
- ``delay`` or ``delay=SEED`` lets each stream (on CPU: the host) sleep a random time at each gather, use and
  reduce-scatter, so that a missing wait shows in the result.
- ``order`` compares what the ranks of a mesh launch before each collective, and raises if it differs. The host waits.
- ``finite`` raises on all ranks of a mesh, and names rank and weight, before NaN or infinity is sent: in a gather of
  weights or a reduction of gradients. The host waits, and ``capture_step`` cannot record it.
- ``splits`` checks the sizes of the groups of ``GroupedLinear`` on the device, in layers built while it is set.

``DTENSOR_GTP_CASTS``: ``auto`` (default) quantizes by Triton kernels on GPUs, ``reference`` op by op. The bits are the
same.

``DTENSOR_GTP_SECRET``: any text. Processes without it cannot join the job through its store.

``TORCH_LOGS="+dtensor_gtp"``: log messages of the package, of level DEBUG too.

``init_weight_mesh`` and ``nonuniform_mesh`` read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and
``MASTER_PORT``, which ``torchrun`` sets.
"""

import typing as _typing

from torch.distributed.fsdp import MixedPrecisionPolicy

from . import _dtensor, elastic  # noqa: F401 (_dtensor prepares DTensor for GTPShard)
from ._modules.gtp_module import GTPModule
from ._modules.whole_weights import UnshardHandle, whole_weights
from ._version import __version__
from .activations import SelectiveOffload
from .api import gtp_shard, register_gtp_forward_method, shard_added
from .graphs.capture_blocks import CapturedBlocks, capture_blocks
from .graphs.capture_step import CapturedStep, capture_step
from .mesh import WeightMesh, init_weight_mesh
from .placement import GTPShard
from .policy import SchedulePolicy
from .quant.api import quantize_
from .random import MeshRNG
from .report import ShardingReport, sharding_report

if _typing.TYPE_CHECKING:
    from .planner.api import PlanResult, plan

__all__ = [
    "CapturedBlocks",
    "CapturedStep",
    "GTPModule",
    "GTPShard",
    "MeshRNG",
    "MixedPrecisionPolicy",
    "PlanResult",
    "SchedulePolicy",
    "SelectiveOffload",
    "ShardingReport",
    "UnshardHandle",
    "WeightMesh",
    "__version__",
    "capture_blocks",
    "capture_step",
    "elastic",
    "gtp_shard",
    "init_weight_mesh",
    "plan",
    "quantize_",
    "register_gtp_forward_method",
    "shard_added",
    "sharding_report",
    "whole_weights",
]


def __getattr__(name: str) -> _typing.Any:
    """Load the planner when it is asked for: training does not need it."""
    if name in ("plan", "PlanResult"):
        from .planner import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
