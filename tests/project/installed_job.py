"""A program that needs nothing but the installed package: it shards a model, trains a step and prints the version.

    python -P tests/project/installed_job.py FOLDER

checks that the package comes from FOLDER. It is what is run where the wheel is all that is installed.
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dtensor_gtp
from dtensor_gtp import gtp_shard, sharding_report


def main() -> None:
    assert Path(dtensor_gtp.__file__).is_relative_to(sys.argv[1]), dtensor_gtp.__file__
    assert dtensor_gtp.__version__ == version("dtensor-gtp")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("gtp",))
    model = gtp_shard(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), mesh)
    assert "0.weight" in str(sharding_report(model))
    assert "0.weight" in sharding_report(model)._repr_html_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    dist.destroy_process_group()
    command = [sys.executable, "-m", "dtensor_gtp.help", "ema"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "ShardedEMA" in printed.stdout
    print(dtensor_gtp.__version__)


if __name__ == "__main__":
    main()
