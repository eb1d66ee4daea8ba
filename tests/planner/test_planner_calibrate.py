"""Calibration: numbers of a machine from measurements, and what is said of those that were not measured.

No test reads real time. A machine with known numbers "measures" itself by the planner's own arithmetic, and must be
found again. The code that measures runs on a CPU with a clock that gives fixed times.
"""

import json
import os
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fixed_clock import FixedClock

from dtensor_gtp.planner.calibrate import _meshes, calibrate, count_operations
from dtensor_gtp.planner.clock import Samples, fitted
from dtensor_gtp.planner.command_line import main
from dtensor_gtp.planner.costs import Axis, Costs
from dtensor_gtp.planner.machine import Contention, Host, Link, Machine, load_machine
from dtensor_gtp.planner.recorder import Kind, Op

RANKS = 4
ALWAYS_MISSING = {
    *("reserve_gib", "jitter", "compute.fused", "compute.attention_long", "compute.ragged"),
    *("fast.hop_us", "network", "host.replay_us"),
}
TOGETHER = 8


def machine() -> Machine:
    """Other numbers than those of the preset from which a calibration begins."""
    preset = load_machine("h200")
    changed = replace(
        preset.compute,
        gemm=((1e9, 0.21), (7e10, 0.66), (2e12, 0.71)),
        float8_gemm=((7e10, 0.41), (2e12, 0.52)),
        float8_rowwise_gemm=((7e10, 0.31), (2e12, 0.42)),
        attention=0.37,
        hbm=0.81,
        cast=0.63,
        kernel_us=2.5,
    )
    return replace(
        preset,
        compute=changed,
        fast=Link(450, 0.61, 33.0, preset.fast.hop_us),
        copy=Link(450, 0.72, 6.5, 12.5),
        host=Host(op_us=11, use_us=95, fsdp_use_us=210, collective_us=37, copy_us=120, replay_us=preset.host.replay_us),
        contention=Contention(1.21, 1.04, 1.33, 1.07, 1.6, 1.4, 1.5),
    )


def measured(known: Machine) -> Samples:
    """What a machine of these numbers would measure."""
    samples, costs, host = Samples({}, {}), Costs(known), known.host
    rowwise = replace(costs, is_rowwise=True)
    axis = Axis(RANKS, 1)
    samples.add("kernel", 1, known.compute.kernel_us / 1e6)
    for flops in (2e12, 1e9, 7e10):
        samples.add("bf16 GEMM", flops, costs.gemm_ms(Op(Kind.GEMM, flops)) / 1e3)
        if flops > 1e9:
            samples.add("float8 tensorwise GEMM", flops, costs.gemm_ms(Op(Kind.GEMM, flops), "float8") / 1e3)
            samples.add("float8 rowwise GEMM", flops, rowwise.gemm_ms(Op(Kind.GEMM, flops), "float8") / 1e3)
    samples.add("memory", 3e8, costs.memory_ms(3e8) / 1e3)
    samples.add("cast", 3e8, costs.cast_ms(3e8) / 1e3)
    rate = known.peak_tflops["bf16"] * 1e12 * known.compute.attention
    samples.add("attention", 1e12, 1e12 / rate + known.compute.kernel_us / 1e6)
    for nbytes in (1 << 20, 1 << 26, 1 << 28):
        received = nbytes * (RANKS - 1) / RANKS
        for kind in ("gather", "reduce"):
            samples.add(f"fast: {kind}", received, costs.gather_ms(nbytes, axis) / 1e3)
        samples.add("copy: gather", received, costs.together_ms(nbytes, axis, 1, is_copy=True) / 1e3)
    for num in (1, 8):
        samples.add("copy: tensors", num, costs.together_ms(0, axis, num, is_copy=True) / 1e3)
    samples.add("host: op", 50, 50 * host.op_us / 1e6)
    samples.add("host: collective", 1, host.collective_us / 1e6)
    plain, launches = 40.0, 3 * host.collective_us
    samples.add("host: plain layer", 16, 16 * plain / 1e6)
    samples.add("host: sharded layer", 16, 16 * (plain + 2 * host.use_us + launches) / 1e6)
    samples.add("host: copied layer", 16, 16 * (plain + 2 * host.use_us + 3 * host.copy_us / TOGETHER) / 1e6)
    samples.add("host: fully_shard layer", 16, 16 * (plain + 1.5 * host.fsdp_use_us + launches / TOGETHER) / 1e6)
    for name, factor in vars(known.contention).items():
        samples.add_beside(name, 2e-3, 2e-3 * factor)
    return samples


def test_a_machine_is_found_again_from_what_it_measures() -> None:
    known = machine()
    found = fitted(load_machine("h200"), measured(known), fast=RANKS, together=TOGETHER)
    for part in ("host", "contention", "fast", "copy"):
        assert vars(getattr(found, part)) == pytest.approx(vars(getattr(known, part)), rel=1e-6), part
    for name, value in vars(known.compute).items():
        if isinstance(value, tuple):
            pairs = [number for pair in value for number in pair]
            assert [number for pair in getattr(found.compute, name) for number in pair] == pytest.approx(pairs), name
        else:
            assert getattr(found.compute, name) == pytest.approx(value), name
    assert set(found.not_measured) == ALWAYS_MISSING


def test_what_is_not_measured_stays_as_it_was_and_is_named() -> None:
    samples = measured(machine())
    del samples.by_kind["copy: tensors"], samples.by_kind["cast"], samples.beside["kernel"]
    preset = load_machine("h200")
    found = fitted(preset, samples, fast=RANKS, together=TOGETHER)
    assert found.copy == preset.copy
    assert found.compute.cast == preset.compute.cast
    assert found.contention.kernel == preset.contention.kernel
    assert set(found.not_measured) == ALWAYS_MISSING | {"copy", "compute.cast", "contention.kernel"}
    assert not found.is_calibrated
    assert found.describe() == "H200 141GB SXM (partly calibrated)"


def test_noise_gives_numbers_that_a_file_may_hold() -> None:
    """Work that is faster beside other work, layers that are faster sharded, large messages as fast as small ones."""
    samples = measured(machine())
    samples.add_beside("kernel", 2e-3, 1e-3)
    samples.add_beside("wire", 1e-5, 1.0)
    samples.by_kind["host: sharded layer"] = samples.by_kind["host: plain layer"]
    for rows in (samples.by_kind["fast: gather"], samples.by_kind["fast: reduce"]):
        rows[:] = [row._replace(seconds=1e-3) for row in rows]
    found = fitted(load_machine("h200"), samples, fast=RANKS, together=TOGETHER)
    assert (found.contention.kernel, found.contention.wire, found.host.use_us) == (1, 10, 0)
    assert 0 < found.fast.share < 2


def test_one_process_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that measures runs; the file is what was measured, and its answer names what was not."""
    path = tmp_path / "cpu.json"
    found = calibrate(path, device_type="cpu", clock=FixedClock())
    assert load_machine(str(path)) == found
    assert found.peak_tflops["bf16"] > 0
    for name in ("fast", "copy", "network", "contention", "compute.float8_gemm", "compute.cast"):
        assert name in found.not_measured
    for name in ("compute.gemm", "compute.hbm", "compute.attention", "compute.kernel_us", "host.op_us", "host.use_us"):
        assert name not in found.not_measured
    options = ["--gpus", "8", "--seq-len", "512", "--gtp", "8", "--checkpointing", "none", "--micro-batch", "1"]
    assert main(["llama3-8b", "--machine", str(path), *options]) in (0, 1)
    out = capsys.readouterr().out
    assert "(partly calibrated)" in out
    assert json.loads(path.read_text())["not_measured"] == list(found.not_measured)


def open_to_all() -> int:
    """How many sockets of this process listen on all interfaces."""
    own = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{number}"))
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    listening = [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return sum(int(address, 16) == 0 for address in listening)


@pytest.mark.skipif(not Path("/proc/self/net/tcp6").exists(), reason="needs Linux")
def test_one_process_listens_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    before = open_to_all()
    with socket.create_server(("", 0)):
        assert open_to_all() == before + 1
    with _meshes("cpu") as (mesh, others):
        assert (mesh.size(), others) == (1, None)
        assert open_to_all() == before


def test_operations_of_the_host_are_counted_as_the_planner_counts_them() -> None:
    """Twice the operations of a block, and what is around: the number that the time of a step is divided by."""
    count = count_operations(8)
    assert count == pytest.approx(round(count))
    assert 100 < count < 400
