"""Shards a module with all that replaces something of torch, and gives torch back what was there.

Run by test_patches.py in a process of its own: what is replaced serves a whole process.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_gtp import GTPShard, SchedulePolicy, gtp_shard
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp.optim import gathered


def everything_replaceable() -> dict[str, Any]:
    """By name; tables as copies."""
    dispatcher = compat.op_dispatcher()
    propagator, group = dispatcher.sharding_propagator, compat.fully_shard_group_class()
    owners: list[Any] = [
        *(compat.DTensorSpec, compat.redistribute_module, propagator, type(dispatcher), DTensor, torch.autograd, group),
        *(DistributedDataParallel, FullyShardedDataParallel, DataParallel, torch.cuda, torch.cuda.graphs, sys),
        *(
            compat.localizing_module(),
            compat.pipeline_stage_class(),
            compat.state_dict_module(),
            *compat.distribute_tensor_modules(),
        ),
    ]
    found = {f"{index} {name}": value for index, each in enumerate(owners) for name, value in vars(each).items()}
    tables = {
        "handlers": dispatcher._custom_op_handlers,
        **{name: value for name, value in vars(propagator).items() if isinstance(value, dict)},
    }
    return {name: value for name, value in found.items() if not isinstance(value, dict)} | {
        f"{table} {op}": value for table, items in tables.items() for op, value in items.items()
    }


def train() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "gtp"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    gtp_shard(model, mesh["gtp"], schedule=SchedulePolicy(min_shard_numel=0))
    model(torch.ones(2, 8)).sum().backward()
    gathered(torch.optim.SGD)(model.parameters())
    blocks = DTensor.from_local(torch.ones(2, 8), mesh["gtp"], [GTPShard(0, block_size=2)], run_check=False)
    blocks.redistribute(placements=[Replicate()])
    compat.concatenate_meshes([mesh["tp"], mesh["gtp"]])
    with compat.stock_dtensor_dispatch(torch.ops.aten._local_scalar_dense.default):
        pass


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    before = everything_replaceable()
    assert not compat.replaced(), "an import replaces nothing"
    train()
    assert everything_replaceable() != before
    print(
        *sorted({key for key, patch in compat.PATCHES.items() for r in compat.replaced() if r.patch is patch}), sep="\n"
    )
    compat.undo_patches()
    after = everything_replaceable()
    changed = {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}
    assert not changed, changed
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    plain = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)], run_check=False)
    assert (plain * 2).redistribute(placements=[Replicate()]).shape == (8, 8)


if __name__ == "__main__":
    main()
