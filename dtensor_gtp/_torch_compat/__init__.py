"""The only place that imports private torch symbols.

Everything else in the package takes them from here, so that a torch release that moves one of them is handled in one
place. Tested on torch 2.11 and 2.13. A symbol that a release lacks has its replacement beside the import, with the
release it is for. Code and tests call ``compat.name``, so that a test can put something else in its place.
"""

from __future__ import annotations

from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _will_engine_execute_node as is_node_awaited
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks
from torch._C._autograd import _profiler_enabled as is_profiling
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_hooks
from torch._C._autograd import _saved_tensors_hooks_is_enabled as saved_tensors_hooks_enabled  # type: ignore[attr-defined]
from torch._C._distributed_c10d import PrefixStore, Store
from torch.cuda import _sleep as sleep_stream
from torch.distributed._functional_collectives import _are_we_tracing as is_tracing_dtensors
from torch.distributed.tensor import _redistribute as redistribute_module
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.optim._muon import _adjust_lr as muon_adjust_lr
from torch.optim._muon import _zeropower_via_newtonschulz as muon_orthogonalize
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from .autograd import (
    PackHook,
    UnpackHook,
    accumulate_node,
    grad_dtype,
    ignored_saved_weight,
    in_func_transform,
    is_awaited,
    post_accumulate_grad_hooks,
    queue_backward_callback,
    tensor_hooks,
    top_saved_tensors_hooks,
)
from .collectives import (
    all_gather_base,
    all_gather_coalesced,
    all_gather_rows,
    all_reduce,
    all_to_all_base,
    all_to_all_rows,
    complete_collectives,
    completed_local,
    reduce_scatter_base,
    reduce_scatter_coalesced,
    reduce_scatter_rows,
)
from .driver import capture_id
from .dtensor import (
    Propagate,
    StockRule,
    distribute_tensor_modules,
    dtensor_spec,
    local_part,
    local_shape_and_offset,
    local_tensor,
    make_spec,
    maybe_run_for_local_tensor,
    op_dispatcher,
    own_part,
    read_items,
    seed_dtensor_rng,
    set_dtensor_handler,
    stock_dtensor_dispatch,
    stock_rule,
    wrap_local,
    wrap_sharding_propagation,
)
from .groups import (
    abort_device_groups,
    agreed_name,
    clone_store,
    leave_process_groups,
    named_group,
    resolve_group,
    restart_group_names,
    timeout_of,
    twin_group,
)
from .memory import Fetch, SymmetricBuffer, copy_bytes, end_void_recording, symmetric_memory_backend
from .meshes import concatenate_meshes, flatten_mesh, is_real_rank, mesh_coordinate, root_mesh, unflatten_mesh
from .modes import (
    POLICY_MODES,
    asks_checkpoint_policy,
    is_tracing,
    num_dispatch_modes,
    set_eval_frame,
    skip_code,
    unseen_by_checkpoint_policies,
    without_dispatch_modes,
)
from .parallelism import (
    FullyShardCut,
    empty_grads_set_aside,
    fully_shard_group_class,
    fully_shard_params,
    fully_shard_sites,
    ignore_in_ddp,
    is_replicated_by_ddp,
    localizing_module,
    pipeline_stage_class,
)
from .tensors import (
    assert_on_device,
    copy_all,
    make_wrapper_subclass,
    storage_use_count,
    without_torch_function,
    wrapper_tensor,
)
