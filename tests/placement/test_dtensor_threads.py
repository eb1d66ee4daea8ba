"""What the package changes in the tables of DTensor misleads neither other threads nor later process groups."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_gtp import GTPShard
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._dtensor import install
from dtensor_gtp._dtensor.random_init import whole_draws

ITEM = torch.ops.aten._local_scalar_dense.default


class TestThreads(TestCase):
    def setUp(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (1,))
        self.scalar = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
        whole_draws()

    def test_handler_is_put_aside_for_one_thread(self) -> None:
        table = compat.op_dispatcher()._custom_op_handlers
        inside, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with compat.stock_dtensor_dispatch(ITEM):
                inside.set()
                leave.wait()

        thread = threading.Thread(target=hold)
        self.addCleanup(leave.set)  # before the thread is waited for, also when an assertion fails
        with compat.stock_dtensor_dispatch(ITEM):
            thread.start()
            inside.wait()
            self.assertNotIn(ITEM, compat.op_dispatcher()._custom_op_handlers)
        self.assertIs(compat.op_dispatcher()._custom_op_handlers, table)  # though the other thread is still within
        self.assertIn(ITEM, table)
        leave.set()
        thread.join()
        self.assertIs(compat.op_dispatcher()._custom_op_handlers, table)

    def test_threads_read_numbers_at_the_same_time(self) -> None:
        self.addCleanup(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda _: {self.scalar.item() for _ in range(2000)}, range(4))
            self.assertEqual(list(found), [{3.0}] * 4)


class TestRegroup(TestCase):
    def test_plans_of_another_rank_are_forgotten(self) -> None:
        """The process comes back as another rank of an equal mesh, where it has another number of rows."""
        install()
        shape, rows = torch.Size((7, 1)), []
        for rank in (0, 3):
            dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
            mesh = init_device_mesh("cpu", (2, 2))
            sharded = compat.make_spec(mesh, (GTPShard(0), GTPShard(0, block_size=2)), shape, torch.float)
            gathered = compat.make_spec(mesh, (GTPShard(0), Replicate()), shape, torch.float)
            (step,) = compat.redistribute_module._gen_transform_infos(sharded, gathered)
            rows.append(step.logical_shape[0])
            compat.leave_process_groups()
        self.assertEqual(rows, [4, 3])
