"""A training job whose last rank ends in the middle of a step; ``test_cuda_exit`` has ``torchrun`` start its two ranks.

Usage: ``cuda_exit_job.py FILE`` with RANK and WORLD_SIZE in the environment. FILE, which does not exist yet, is where
ranks meet. All gathers and reductions of its model are those of copy engines. A rank prints "waits" when it has given
its GPU the step that a peer leaves, who leaves when all others have, and "done" if that is ever complete.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from cuda_common import BF16, COPY_ENGINES, square_loss, take_gpu
from schedules import explicit
from test_cuda import Stack
from timing import HANG_S
from torch.distributed.device_mesh import init_device_mesh

from dtensor_gtp import gtp_shard

# Longer than the test waits: no collective is to end by it.
TIME_LIMIT = timedelta(seconds=2 * HANG_S)
NUM_STEPS = 3  # that are complete
SCHEDULE = explicit(**COPY_ENGINES, coalesce_nbytes=5 << 20, coalesce_grad_nbytes=5 << 20)


def leave(store: dist.Store, rank: int) -> None:
    store.wait([str(other) for other in range(rank)])
    os._exit(3)


def main(path: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    take_gpu(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{path}", rank=rank, world_size=world_size, timeout=TIME_LIMIT
    )
    mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("gtp",))
    waiting = dist.FileStore(f"{path}.waiting", world_size)
    stack = Stack().cuda()
    gtp_shard(stack, mesh, schedule=SCHEDULE, mp_policy=BF16)
    x = torch.ones(256, 1024, device="cuda")
    for step in range(NUM_STEPS + 1):
        if step == NUM_STEPS and rank == world_size - 1:
            stack.layers[4].register_forward_pre_hook(lambda *_: leave(waiting, rank))
        square_loss(stack, x).backward()
        stack.zero_grad()
        if step < NUM_STEPS:
            torch.cuda.synchronize()
    print("waits", flush=True)
    waiting.set(str(rank), "")
    torch.cuda.synchronize()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
