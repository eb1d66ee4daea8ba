"""Configurations of torchtitan 0.3 whose Llama 3 is sharded by ``gtp_shard``.

torchtitan's trainer finds them by module and function, and needs GPUs. Tensor parallelism is an option of its own,
such as ``--parallelism.tensor_parallel_degree 2``:

PYTHONPATH=examples torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_llama3 --config llama3_8b_gtp
"""

from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel
from torchtitan.trainer import Trainer

from dtensor_gtp.integrations.torchtitan import with_gtp


def llama3_debugmodel_gtp() -> Trainer.Config:
    return with_gtp(llama3_debugmodel())


def llama3_8b_gtp() -> Trainer.Config:
    return with_gtp(llama3_8b())
