"""Starts the workers of multi-process tests from a server that has imported torch once.

Importing torch is most of a small test's time. CUDA does not survive a fork, so with GPUs each worker is spawned.
"""

from __future__ import annotations

import gc
import multiprocessing
import os

# Before torch is imported, for all processes of the suite: the operations of a test are too small for several threads,
# which would only wait for each other, and burn the cores that other ranks need.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch


def pytest_configure() -> None:
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a worker that crashes says in which line
    if torch.cuda.is_available():
        multiprocessing.set_start_method("spawn", force=True)
    else:
        multiprocessing.set_start_method("forkserver", force=True)
        multiprocessing.set_forkserver_preload(
            [
                "torch.distributed.checkpoint.state_dict",
                "torch.distributed.fsdp",
                "torch.distributed.tensor.experimental",
                "torch.distributed.tensor.parallel",
                "torch._inductor.compile_fx",  # what any backend of torch.compile imports when it is first called
                "torch.testing._internal.common_distributed",
                "dtensor_gtp",
            ]
        )


def pytest_collection_finish() -> None:
    # What has been imported is no garbage: the collector need not look at these hundreds of thousands of objects again.
    gc.freeze()
