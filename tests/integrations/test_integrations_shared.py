"""What the integrations share, without the libraries: extras that they name, where a model is moved to, and random
numbers of GPUs."""

import importlib
import sys
from unittest import mock

import torch
import torch.nn as nn
from common import ALL, fake_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.testing._internal.common_utils import TestCase

from dtensor_gtp import gtp_shard, integrations
from dtensor_gtp.integrations._sharded import is_offloaded, move_unsharded, take_gpu_generator


class TestShared(TestCase):
    def test_a_missing_library_is_named_with_its_extra(self) -> None:
        for name in ("accelerate", "lightning", "torchtitan", "transformers"):
            module = f"{integrations.__name__}.{name}"
            with mock.patch.dict(sys.modules, {name: None}):
                sys.modules.pop(module, None)
                words = rf"expects an installed {name}, .*pip install 'dtensor-gtp\[{name}\]'"
                with self.assertRaisesRegex(ImportError, words):
                    importlib.import_module(module)

    def test_shards_on_the_host_are_not_moved(self) -> None:
        """What is beside them is, buffers included; here to the meta device."""
        with fake_mesh(2) as mesh:
            sharded = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            gtp_shard(sharded, mesh, schedule=ALL, offload_policy=CPUOffloadPolicy(pin_memory=False))
            first = nn.Linear(8, 8)
            model = nn.ModuleDict({"first": first, "sharded": sharded, "last": nn.Sequential(nn.Linear(8, 8))})
            model.register_buffer("table", torch.zeros(3))
            self.assertTrue(is_offloaded(model))
            self.assertFalse(is_offloaded(first))
            move_unsharded(model, torch.device("meta"))
            moved = {name: tensor.device.type for name, tensor in (*model.named_parameters(), *model.named_buffers())}
            self.assertEqual(
                {name for name, device in moved.items() if device == "cpu"}, {n for n in moved if "sh" in n}
            )

    def test_random_numbers_of_another_gpu(self) -> None:
        """Rank 5 of a job with 4 GPUs a host has used the second one; a single process saves one state."""
        states = [torch.tensor([index], dtype=torch.uint8) for index in range(4)]
        for is_available in (False, True):
            with (
                mock.patch("torch.cuda.is_available", return_value=is_available),
                mock.patch("torch.cuda.set_rng_state") as restore,
            ):
                take_gpu_generator(states, 5)
                take_gpu_generator(states[3], 0)
            self.assertEqual([int(call.args[0]) for call in restore.call_args_list], [1, 3] if is_available else [])
