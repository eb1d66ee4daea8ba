"""Which sum over ranks is taken on a GPU: the kernel if it works and has torch's bits, and why not is said once."""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from addends_common import add, joined
from common import fake_world, imports_as
from passes_common import NUM_ROWS, WIDTH, Model
from runtime_common import runtime_of
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh

from dtensor_gtp import MixedPrecisionPolicy, SchedulePolicy, gtp_shard
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm import addends, reductions
from dtensor_gtp._comm.addends import _Key
from dtensor_gtp._comm.collectives import ReduceScale
from dtensor_gtp._comm.reductions import Scattering
from dtensor_gtp._schedule import first_forward

BF16 = torch.bfloat16


def wrong(is_wrong: Callable[..., bool]) -> Callable[..., None]:
    """With another last bit where ``is_wrong(numel, factor)``."""

    def method(
        out: torch.Tensor, rows: torch.Tensor, own: Sequence[torch.Tensor], rank: int, num_ranks: int, factor: float
    ) -> None:
        add(out, rows, own, rank, num_ranks, factor)
        if is_wrong(out.numel(), factor):
            out.view(torch.int32)[-1] ^= 1

    return method


def broken(*args: Any, **options: Any) -> None:
    raise RuntimeError("Failed to find C compiler")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The probe runs here, as if it were a GPU."""
    monkeypatch.setattr(torch.cuda.graphs, "is_current_stream_capturing", lambda: False)
    attempt = addends._try
    monkeypatch.setattr(addends, "_try", lambda device, key: attempt(torch.device("cpu"), key))
    addends._verdicts.cache_clear()
    addends._loading.cache_clear()
    yield
    addends._verdicts.cache_clear()
    addends._loading.cache_clear()


def triton(kernel: Callable[..., None] | None) -> Any:
    module = None if kernel is None else SimpleNamespace(add=kernel)
    return imports_as("dtensor_gtp._comm.triton_addends", module)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (None, r"Triton does not work \((ModuleNotFound|Import)Error: "),
        (broken, r"Triton does not work \(RuntimeError: Failed to find C compiler\)"),
        *(
            (wrong(is_wrong), "Triton's sum differs from torch's")
            for is_wrong in (
                lambda numel, factor: numel % 16 == 0,
                lambda numel, factor: numel % 16 > 0,
                lambda numel, factor: factor == 1,
                lambda numel, factor: factor < 1,
            )
        ),
    ],
)
def test_torch_adds_and_the_reason_is_logged_once(
    kernel: Callable[..., None] | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with triton(kernel), caplog.at_level(logging.WARNING, addends.logger.name):
        for _ in range(2):
            found, why = addends._decided(_Key(0, BF16, 4))
            assert found is None
            assert re.match(reason, why)
    assert len(caplog.records) == 1
    assert why in caplog.text


def test_what_works_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    for num_ranks, dtype in itertools.product((2, 3, 8, 63), addends._DTYPES):
        with triton(add):
            assert addends._decided(_Key(0, dtype, num_ranks)) == (add, "")
    assert not caplog.records


def test_each_number_of_ranks_and_dtype_is_tried() -> None:
    """The kernel is compiled for them; what was not tried would be compiled in a CUDA graph."""
    tried = []
    with triton(add), mock.patch.object(addends, "_try", lambda device, key: (tried.append(key), (add, ""))[1]):
        for key in (_Key(0, BF16, 2), _Key(0, BF16, 4), _Key(0, torch.float16, 2), _Key(1, BF16, 2), _Key(0, BF16, 2)):
            addends._decided(key)
    assert len(tried) == 4


def test_the_probe_sees_the_order_of_additions() -> None:
    """One after the other, as if there were no partial sums, gives other bits for more than four ranks."""

    def one_by_one(
        out: torch.Tensor, rows: torch.Tensor, own: Sequence[torch.Tensor], rank: int, num_ranks: int, factor: float
    ) -> None:
        out.zero_()
        for row in torch.cat([rows[:rank], joined(own), rows[rank:]]):
            out += row
        out *= factor

    def in_four(rows: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        parts = [sum(part.to(dtype) for part in rows[first::4]) for first in range(4)]
        return ((parts[0] + parts[1]) + parts[2]) + parts[3]  # type: ignore[operator,return-value]

    device = torch.device("cpu")
    with mock.patch.object(torch, "sum", in_four):
        pairs = list(addends._probe(one_by_one, device, _Key(0, BF16, 6)))[:2]
    assert all(not torch.equal(actual, expected) for actual, expected in pairs)


def test_nothing_is_decided_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels cannot be loaded then; the next sum outside of it tries."""
    key = _Key(0, BF16, 4)
    with triton(add):
        monkeypatch.setattr(torch.cuda.graphs, "is_current_stream_capturing", lambda: True)
        assert addends._decided(key) == (None, "first used in a CUDA graph")
        monkeypatch.setattr(torch.cuda.graphs, "is_current_stream_capturing", lambda: False)
        assert addends._decided(key) == (add, "")


def test_a_kernel_is_loaded_once_and_tried_when_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the first forward. The trial waits, because a CUDA graph may be recorded after it."""
    join, at_end, order = threading.Thread.join, threading.Semaphore(0), []
    monkeypatch.setattr(addends, "_load", lambda key: (at_end.acquire(), order.append(key)))
    monkeypatch.setattr(threading.Thread, "join", lambda thread: (at_end.release(), join(thread)))

    def tried(*args: Any) -> None:
        order.append("tried")
        add(*args)

    key = _Key(0, BF16, 4)
    gpu = torch.device("cuda", 0)
    for _ in range(2):
        addends.load_ahead(gpu, BF16, 4)
    assert addends._loading().keys() == {key}
    with triton(tried):
        assert addends._decided(key) == (tried, "")
    at_end.release()  # for a thread that nobody has joined
    assert order[:2] == [key, "tried"]
    assert order.count(key) == 1
    cpu, f64 = torch.device("cpu"), torch.float64
    for device, dtype, num_ranks in ((gpu, BF16, 4), (gpu, f64, 2), (gpu, BF16, 64), (cpu, BF16, 2)):
        addends.load_ahead(device, dtype, num_ranks)
    assert not addends._loading(), "decided, or no kernel adds it"


def test_what_fails_while_it_loads_is_told_by_the_trial() -> None:
    with triton(broken):
        addends._load(_Key(0, BF16, 4))
        assert "Failed to find C compiler" in addends._decided(_Key(0, BF16, 4))[1]


def test_torch_adds_elsewhere() -> None:
    with triton(add):
        assert addends.fused_sum(torch.ones(2, dtype=BF16), 2) is None
        like = mock.Mock(spec=torch.Tensor, is_cuda=True, dtype=BF16, device=torch.device("cuda", 0))
        assert addends.fused_sum(like, 2) is None, "only looks like a tensor"


def test_the_kernel_adds_only_where_the_first_forward_has_loaded_it() -> None:
    """Where torch can add, no backward loads Triton, however many gradients travel together."""
    many = torch.ones(addends._MANY_NBYTES // 2, dtype=BF16)

    def slot_of(op: Any) -> torch.Tensor:
        scattering = Scattering("all_to_all", [many], 2, BF16, dtype=torch.float32)
        scattering.keep()[-1].fill_(1)  # what is received
        scattering.finish(ReduceScale(op, None, None))
        return scattering.slots[0]

    key = _Key(None, BF16, 2)  # a GPU would have a number
    with mock.patch.object(reductions, "fused_sum") as fused:
        assert slot_of(ReduceOp.SUM).eq(2).all()
        assert not fused.called
        for known in (addends._loading(), addends._verdicts()):
            known[key] = mock.Mock()
            for op in (ReduceOp.AVG, ReduceOp.SUM):
                slot_of(op)
            del known[key]
    kernel = fused.return_value
    assert fused.call_count == 4
    assert [call.args[3:] for call in kernel.call_args_list] == [(0, 2, 0.5), (0, 2, 1.0)] * 2
    out, rows, (own,), *_ = kernel.call_args.args
    assert out.shape == own.shape == rows[0].shape == (many.numel() // 2,)
    assert len(rows) == 1
    assert own.data_ptr() == many.data_ptr(), "the own addend is read where it is"


def test_nothing_is_sent_to_the_own_rank() -> None:
    group = mock.Mock()
    group.rank.return_value = 2
    output, input = torch.empty(3, 5), torch.randn(4, 5)
    compat.all_to_all_of_peers(output, input, group, False)
    received, sent, _ = group.alltoall.call_args.args
    assert received[2].numel() == sent[2].numel() == 0
    del received[2], sent[2]
    assert [row.data_ptr() for row in received] == [row.data_ptr() for row in output]
    assert [row.data_ptr() for row in sent] == [input[rank].data_ptr() for rank in (0, 1, 3)]


def test_only_large_blocks_load_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward decides by what one block sends, not by how many blocks send together."""
    asked = mock.Mock()
    monkeypatch.setattr(first_forward, "load_ahead", asked)
    least, calls = 1 << 20, []
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("gtp",))
        for _ in range(2):
            monkeypatch.setattr(addends, "_MANY_NBYTES", least)
            model = gtp_shard(
                Model(), mesh, mp_policy=MixedPrecisionPolicy(BF16), schedule=SchedulePolicy(min_shard_numel=0)
            )
            model(torch.ones(NUM_ROWS, WIDTH))
            calls.append(asked.call_count)
            least = runtime_of(model).members.groups[0].leaves.nbytes
    assert calls == [0, 1]
