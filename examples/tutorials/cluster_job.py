"""Run a job on a cluster. The program of docs/tutorials/cluster_job.md.

    torchrun --nproc-per-node 1 examples/tutorials/cluster_job.py
"""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dtensor_gtp import gtp_shard, init_weight_mesh

model, folder, hosts, gpus = torch.nn.Linear(64, 64), "run", 1, 1  # yours: 4, 8
mesh = init_weight_mesh(replicate=hosts, gtp=gpus)
gtp_shard(model, mesh.weights)
optimizer = torch.optim.AdamW(model.parameters())

states = get_state_dict(model, optimizer)
dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)

states = get_state_dict(model, optimizer)  # after a restart
dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
