"""From fully_shard to gtp_shard. The program of docs/tutorials/from_fully_shard.md.

    torchrun --nproc-per-node 4 examples/tutorials/from_fully_shard.py
"""

from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (4,), mesh_dim_names=("gtp",))


def make_model():
    torch.manual_seed(0)
    blocks = ((nn.RMSNorm(64), nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)) for _ in range(4))
    layers = nn.Sequential(*(nn.Sequential(*block) for block in blocks))
    parts = OrderedDict(embedding=nn.Embedding(512, 64), layers=layers, head=nn.Linear(64, 512))
    return nn.Sequential(parts)


model, fsdp_model = make_model().to(device), make_model().to(device)
torch.manual_seed(dist.get_rank())  # each rank has batches of its own
batches = torch.randint(0, 512, (3, 2, 17)).to(device)

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in fsdp_model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(fsdp_model, mesh=mesh, mp_policy=policy)

from dtensor_gtp import gtp_shard, sharding_report

gtp_shard(model, mesh, mp_policy=policy)

def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in batches:
        logits = model(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss


torch.testing.assert_close(train(model), train(fsdp_model), rtol=1e-3, atol=1e-3)

if dist.get_rank() == 0:
    print(sharding_report(model))

from dtensor_gtp import checkpoint

checkpoint.save({"model": model.state_dict()}, "checkpoint")
checkpoint.load({"model": fsdp_model.state_dict()}, checkpoint_id="checkpoint")
