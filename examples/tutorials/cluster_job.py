"""Run a job on a cluster. The program of docs/tutorials/cluster_job.md.

    torchrun --nproc-per-node 1 examples/tutorials/cluster_job.py
"""

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dtensor_gtp import checkpoint, gtp_shard, init_weight_mesh

model, folder, hosts, gpus = torch.nn.Linear(64, 64), "run", 1, 1  # yours: 4, 8
mesh = init_weight_mesh(replicate=hosts, gtp=gpus)
gtp_shard(model, mesh.weights)
optimizer = torch.optim.AdamW(model.parameters())

states = get_state_dict(model, optimizer)
checkpoint.save({"model": states[0], "optimizer": states[1]}, f"{folder}/step-10")

states = get_state_dict(model, optimizer)  # after a restart
checkpoint.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=checkpoint.latest(folder))
set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
