"""Train a mixture of experts. The program of docs/tutorials/moe.md.

    torchrun --nproc-per-node 4 examples/tutorials/moe.py
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

from dtensor_gtp import gtp_shard, init_weight_mesh, sharding_report
from dtensor_gtp.nn import GroupedExperts, GroupedMLP, parallelize_experts


class MoE(nn.Module):
    def __init__(self, dim=32, num_experts=8, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = GroupedExperts(GroupedMLP(num_experts, dim, hidden_dim=64))

    def forward(self, x):
        rows = x.flatten(0, -2)
        weights, chosen = self.router(rows).softmax(-1).topk(self.top_k)
        return x + self.experts(rows, chosen, weights).view_as(x)

mesh = init_weight_mesh(gtp=4, ep=2, expert_gtp=2)
device = mesh.weights.device_type
with mesh.fork_rng("params"):  # all ranks draw the same weights
    model = nn.Sequential(nn.Embedding(64, 32), MoE(), MoE(), nn.Linear(32, 64)).to(device)
whole = copy.deepcopy(model)  # only to compare

for moe in model[1:3]:
    parallelize_experts(moe.experts, mesh["ep"])
    gtp_shard(moe.experts.mlp, mesh.expert_weights)
    moe.experts.mlp.set_gradient_divide_factor(mesh.data.size())
gtp_shard(model, mesh.weights)  # everything else
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

tokens = (torch.arange(68).view(4, 17) * (dist.get_rank() + 3)).to(device) % 64  # of this rank


def loss_of(model):
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


for step in range(10):
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    if step == 0:
        first_loss, gradient = loss, model[1].experts.mlp.down.weight.grad.full_tensor()
    optimizer.step()
assert loss < first_loss

loss_of(whole).backward()
expected = whole[1].experts.mlp.down.weight.grad
dist.all_reduce(expected)
torch.testing.assert_close(gradient, expected / 4)

report = sharding_report(model)
if dist.get_rank() == 0:
    print(report, report.schedule, sep="\n")
