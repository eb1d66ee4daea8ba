"""Calibration on two processes of a host, and on four, two on each of two hosts as far as they know."""

import torch.distributed as dist
from common import GlooTest, environment, shared_directory
from fixed_clock import FixedClock

from dtensor_gtp.planner.calibrate import calibrate
from dtensor_gtp.planner.machine import load_machine


class TestWithinAHost(GlooTest):
    world_size = 2

    def test_links_within_a_host(self) -> None:
        with shared_directory() as folder:
            found = calibrate(folder / "machine.json", device_type="cpu", clock=FixedClock())
            dist.barrier()
            self.assertEqual(load_machine(str(folder / "machine.json")), found)
        missing = set(found.not_measured)
        self.assertTrue({"copy", "network", "host.copy_us", "contention.gemm_beside_copy"} <= missing)
        measured = {"fast.share", "fast.start_us", "host.collective_us", "host.use_us", "contention.gemm_beside_nccl"}
        self.assertFalse(measured & missing)
        self.assertTrue(dist.is_initialized())  # whose group it is, ends it


class TestBetweenHosts(GlooTest):
    def test_links_between_hosts(self) -> None:
        with shared_directory() as folder, environment(LOCAL_WORLD_SIZE="2"):
            found = calibrate(folder / "machine.json", device_type="cpu", clock=FixedClock())
        self.assertFalse({"fast.share", "network.share", "network.start_us"} & set(found.not_measured))
