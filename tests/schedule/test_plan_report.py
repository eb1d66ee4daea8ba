"""What the plan says as data, what a profiler's trace calls the things that are done for a weight, over which
communicators they go, and on which stream shards are cast."""

from __future__ import annotations

import unittest
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from common import fake_mesh
from counting import noted
from runtime_common import assert_idle, num_gathers, runtime_of
from schedules import changed, explicit
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

from dtensor_gtp import SchedulePolicy, gtp_shard, quantize_, sharding_report
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm.context import CommContext
from dtensor_gtp._comm.copy_engine import CopyEngine
from dtensor_gtp.report import PassReport

WIDTH, NBYTES = 8, 8 * 8 * 4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ONE_AHEAD = explicit(prefetch_depth=1, prefetch_nbytes=0, coalesce_nbytes=0, coalesce_grad_nbytes=0, min_shard_numel=0)


def three_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


class TestPlanReport(unittest.TestCase):
    def setUp(self) -> None:
        self.mesh = self.enterContext(fake_mesh(4))
        self.model = self.shard()

    def shard(self, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        return gtp_shard(three_layers(), self.mesh, schedule=changed(ONE_AHEAD, **options))

    def step(self) -> None:
        self.model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()

    def test_passes(self) -> None:
        self.assertEqual(sharding_report(self.model).passes, ())
        with torch.no_grad():
            self.model(torch.randn(2, WIDTH))
        self.assertEqual(sharding_report(self.model).passes, ())
        self.assertIn("forward of Sequential without gradient: 3 weight uses", sharding_report(self.model).schedule)
        self.step()
        names = ("0.weight", "1.weight", "2.weight")
        two_in_memory = (2 * NBYTES, 2 * NBYTES, NBYTES)  # the last use has none ahead
        # Before each use what is ahead; between the passes what is kept at the turning point.
        forward = PassReport(False, names, two_in_memory, (NBYTES, NBYTES, NBYTES, NBYTES))
        backward = PassReport(True, names[::-1], two_in_memory, (NBYTES, NBYTES, NBYTES, 0))
        self.assertEqual(sharding_report(self.model).passes, (forward, backward))

    def test_symmetric_memory(self) -> None:
        """That of all communicators, in a model on a CPU, which has none."""
        self.step()
        report = sharding_report(self.model)
        self.assertEqual(report.symmetric_nbytes, 0)
        self.assertNotIn("peers copy from", str(report))
        comm = runtime_of(self.model).comm
        stage = mock.Mock(spec=CopyEngine, held_nbytes=3 << 20)
        comm._gather_backends = {"dense": stage, "experts": stage, "other": mock.Mock()}
        comm._send_rings = {"dense": mock.Mock(held_nbytes=2 << 20)}
        report = sharding_report(self.model)
        self.assertEqual(report.symmetric_nbytes, 8 << 20)
        self.assertIn("8.0 MiB of memory that peers copy from", str(report))

    def test_what_is_kept_from_forward_to_backward(self) -> None:
        """The last weight and those that fit; with ``keep_last=False`` it is gathered once more, whatever else is kept.
        The bits are the same."""
        x, grads = torch.randn(2, WIDTH), []
        one, two = NBYTES, 2 * NBYTES
        for options, kept, between in (
            ({}, [2], (one, one, one, one)),
            ({"keep_nbytes": NBYTES}, [1, 2], (one, one, two, two)),
            ({"keep_last": False}, [], (one, one, one, 0)),
            ({"keep_last": False, "keep_nbytes": NBYTES}, [1], (one, one, two, one)),
        ):
            model = self.shard(**options)
            for step in range(3):
                inputs = x.clone().requires_grad_()
                loss = model(inputs).sum()
                held = [t.weight.fqn for t in runtime_of(model).members.gatherables if t.kept is not None or t.pending]
                self.assertEqual(held, [f"{index}.weight" for index in kept] if step else [])  # once there is a plan
                loss.backward()
                assert_idle(model)
            forward, backward = sharding_report(model).passes
            self.assertEqual(forward.between_nbytes, between, options)
            if options == {"keep_nbytes": NBYTES}:
                gathered = forward.gathered_nbytes, backward.gathered_nbytes
                self.assertEqual(gathered, ((two, two, two), (two, two, one)))
                self.assertEqual(backward.between_nbytes, (two, one, one, 0))
            if not kept:
                self.assertEqual(backward.between_nbytes[0], NBYTES)  # gathered ahead, when backward begins
            expected = {f"{index}.weight": 4 if index in kept else 6 for index in range(3)}
            self.assertEqual(num_gathers(model), expected, options)
            grads.append(inputs.grad)
        for grad in grads[1:]:
            self.assertTrue(torch.equal(grad, grads[0]))

    def test_ranges(self) -> None:
        self.step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.step()
        counts = Counter(event.name for event in profiler.events() if event.name.startswith("GTP::"))
        expected = {}
        for name in ("0.weight", "1.weight", "2.weight"):
            expected[f"GTP::all_gather ({name})"] = 1 if name == "2.weight" else 2  # kept at the turning point
            expected[f"GTP::compute ({name})"] = 2  # forward, and the gradient of the input
            expected[f"GTP::wgrad ({name})"] = 1
            expected[f"GTP::reduce_scatter ({name})"] = 1
        self.assertEqual(counts, expected)

    def test_casts_of_shards_have_ranges_within_those_of_gathers(self) -> None:
        """They run on the compute stream, so a trace must not count them as communication."""
        torch.manual_seed(0)
        self.model = gtp_shard(three_layers(), self.mesh, schedule=ONE_AHEAD, mp_policy=BF16)
        self.step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.step()
        gathers, casts = (
            [event.name for event in profiler.events() if event.name.startswith(f"GTP::{kind}")]
            for kind in ("all_gather", "cast")
        )
        self.assertEqual([name.replace("all_gather", "cast") for name in gathers], casts)
        within = {e.cpu_parent.name for e in profiler.events() if e.name.startswith("GTP::cast") and e.cpu_parent}
        self.assertEqual(within, set(gathers))

    def test_gathers_and_scatters_have_communicators_of_their_own(self) -> None:
        """So that both can be under way at once in backward."""
        used: dict[str, set[str]] = {"all_gather_base": set(), "reduce_scatter_base": set()}
        for name, groups in used.items():

            def note(*args: Any, groups: set[str] = groups, **options: Any) -> None:
                groups |= {arg.group_name for arg in args if isinstance(arg, dist.ProcessGroup)}

            with noted(compat, name, note):
                self.step()
        (gather,), (scatter,) = used.values()
        self.assertNotEqual(gather, scatter)


class TestWhereShardsAreCast(unittest.TestCase):
    """On the compute stream, but for those that other streams have made. A CPU has no streams, so this looks at what a
    gather is told to copy on its own."""

    def copies(self, model: nn.Module, schedule: SchedulePolicy, **options: Any) -> set[bool]:
        """Of all gathers of two steps, whether they copied on the gather stream."""
        found: set[bool] = set()

        def note(comm: CommContext, *args: Any) -> None:
            found.add(len(args) > 4 and args[4] is not None)

        with fake_mesh(2, 2, names=("replicate", "gtp")) as mesh, noted(CommContext, "all_gather", note):
            gtp_shard(model, mesh, mp_policy=BF16, schedule=schedule, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.randn(4, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return found

    def blocks(self) -> nn.Module:
        """Their rows in blocks of 32 are cut into equal shards."""
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(4)))

    def test_shards_replicas_and_recipes(self) -> None:
        groups = SchedulePolicy(min_shard_numel=0)
        for schedule in (explicit(min_shard_numel=0), groups):
            self.assertEqual(self.copies(self.blocks(), schedule), {False})
            self.assertEqual(self.copies(self.blocks(), schedule, shard_optimizer=True), {True}, "after replicas")
        self.assertEqual(self.copies(quantize_(self.blocks(), "mxfp8"), groups), {True}, "after casts of a recipe")
