"""The only place that imports private torch symbols; tested on torch 2.11 and 2.13, on CPUs also on 2.14.

A replacement for a symbol that a release lacks stands beside the import. The files below hand on all their public
names. Code and tests call ``compat.name``, so that tests can replace it.
"""

from __future__ import annotations

# Whether a transform of ``torch.func`` (grad, vmap, jacrev, jvp) runs the code that asks.
from torch._C import _are_functorch_transforms_active as in_func_transform
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _is_tracing as is_jit_tracing
from torch._C import _will_engine_execute_node as is_node_awaited
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks
from torch._C._autograd import _profiler_enabled as is_profiling
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_hooks
from torch._C._autograd import _saved_tensors_hooks_is_enabled as saved_tensors_hooks_enabled  # type: ignore[attr-defined]
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch._C._functorch import unwrap_if_dead
from torch.cuda import _sleep as sleep_stream
from torch.distributed._functional_collectives import _are_we_tracing as is_tracing_dtensors
from torch.distributed.tensor import _redistribute as redistribute_module
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

# Makes DTensor's RNG tracker, which the first random op would make with the state of rank 0, and seeds torch.
from torch.distributed.tensor._random import manual_seed as seed_dtensor_rng
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.optim._muon import _adjust_lr as muon_adjust_lr
from torch.optim._muon import _zeropower_via_newtonschulz as muon_orthogonalize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from .collectives import *
from .driver import *
from .dtensor import *
from .groups import *
from .modes import *
from .parallelism import *
from .patches import *
from .region_states import *
from .tensors import *
