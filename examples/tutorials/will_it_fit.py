"""Will it fit? The program of docs/tutorials/will_it_fit.md.

    python examples/tutorials/will_it_fit.py
"""

import dtensor_gtp

result = dtensor_gtp.plan("llama3-70b", "h100", gpus=8, global_batch=16)
print(result)

import torch
from torch import nn


def build():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(32000, 4096))
        for _ in range(24):
            model.append(nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)))
        return model, (torch.zeros(1, 2048, dtype=torch.int64),)

result = dtensor_gtp.plan(f"{__name__}:build", "h100", gpus=2, seq_len=2048)
print(result.best.layout.describe(), f"{result.best.memory.total / 2**30:.0f} GiB")
