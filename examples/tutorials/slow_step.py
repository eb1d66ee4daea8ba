"""Why is this step slow? The program of docs/tutorials/slow_step.md.

    torchrun --nproc-per-node 2 examples/tutorials/slow_step.py
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile, record_function

from dtensor_gtp import gtp_shard, init_weight_mesh, sharding_report

mesh = init_weight_mesh(gtp=2)
with mesh.fork_rng("params"):
    layers = ((nn.Linear(256, 1024), nn.SiLU(), nn.Linear(1024, 256)) for _ in range(3))
    model = nn.Sequential(*(nn.Sequential(*block) for block in layers))
gtp_shard(model, mesh.weights)
optimizer = torch.optim.AdamW(model.parameters())


def train_step():
    time.sleep(0.03 * dist.get_rank())  # the cause that the page finds
    model(torch.randn(512, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


train_step()

train_step()
if dist.get_rank() == 0:
    report = sharding_report(model, machine="h100")
    print(report, report.schedule, sep="\n")
    report.to_html("report.html")  # with timelines

with profile() as trace:
    for _ in range(3):
        with record_function("step"):
            train_step()
trace.export_chrome_trace(f"trace.{dist.get_rank()}.json")
