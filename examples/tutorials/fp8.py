"""Train in FP8, and check that it pays. The program of docs/tutorials/fp8.md.

    torchrun --nproc-per-node 2 examples/tutorials/fp8.py
"""

import torch
from torch import nn

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard, init_weight_mesh, quantize_, sharding_report

mesh = init_weight_mesh(gtp=2)
device = mesh.weights.device_type


def make_model():
    up = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 256))
    down = nn.Sequential(nn.SiLU(), nn.Linear(256, 64))
    return nn.Sequential(nn.Embedding(64, 64), up, down, nn.Linear(64, 64))


tokens = torch.arange(256).view(8, 32).to(device) % 64

def build(recipe=None):
    torch.manual_seed(0)
    model = make_model()  # yours
    if recipe:
        quantize_(model[1:-1], recipe)  # the linear layers of the blocks; embedding and head stay
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return gtp_shard(model, mesh.weights, mp_policy=policy)

def train(model, steps=20):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        logits = model(tokens).float().flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, (5 * tokens + 7).remainder(64).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


models = {name: build(name) for name in (None, "float8_tensorwise", "float8_rowwise")}
losses = {name: train(model) for name, model in models.items()}
print(losses)

print(sharding_report(models["float8_rowwise"], verbose=True))
