"""``init_weight_mesh`` where there is no process group yet: environment, rendezvous and devices."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtensor_gtp import init_weight_mesh
from dtensor_gtp._comm.process_groups import default_device_type

START = "Start the processes with torchrun"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment as torchrun would leave it for the only process of a job."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    return monkeypatch


@pytest.mark.parametrize("missing", [["RANK"], ["WORLD_SIZE", "MASTER_PORT"]])
def test_environment_that_does_not_say_how_to_start(job: pytest.MonkeyPatch, missing: list[str]) -> None:
    for name in missing:
        job.delenv(name)
    verb = "is" if len(missing) == 1 else "are"
    with pytest.raises(RuntimeError, match=f"but {', '.join(missing)} {verb} not set. {START}"):
        init_weight_mesh("cpu")
    assert not dist.is_initialized()


def test_sizes_are_checked_before_the_rendezvous(job: pytest.MonkeyPatch) -> None:
    job.setenv("WORLD_SIZE", "6")  # a rendezvous would wait for five others
    with pytest.raises(ValueError, match=r"6 \(WORLD_SIZE\).*gtp=4 does not divide 6. .*: gtp=6"):
        init_weight_mesh("cpu", gtp=4)
    assert not dist.is_initialized()


def test_process_group_is_initialized_from_the_environment(job: pytest.MonkeyPatch) -> None:
    try:
        mesh = init_weight_mesh("cpu", timeout=timedelta(minutes=5))
        assert dist.get_backend() == "gloo"
        assert dist.get_world_size() == 1
        assert mesh.dense.mesh.shape == (1, 1, 1, 1, 1, 1)
        assert tuple(mesh.weights.shape) == (1,)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("accelerator", "backends", "device_type"),
    [
        (None, None, "cpu"),
        ("cuda", None, "cuda"),
        ("cuda", "cpu:gloo,cuda:nccl", "cuda"),
        ("cuda", "cpu:gloo,cuda:gloo", "cpu"),
        ("xpu", "cpu:gloo", "cpu"),
    ],
)
def test_the_device_type_is_the_accelerator_if_ranks_can_communicate_on_it(
    monkeypatch: pytest.MonkeyPatch, accelerator: str | None, backends: str | None, device_type: str
) -> None:
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: found)
    monkeypatch.setattr(dist, "is_initialized", lambda: backends is not None)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    assert default_device_type() == device_type


@pytest.mark.parametrize("place", range(4))
def test_rank_order_says_where_each_process_stands(job: pytest.MonkeyPatch, place: int) -> None:
    """The order is not its own inverse."""
    order = (2, 0, 3, 1)
    job.setenv("WORLD_SIZE", "4")
    job.setattr(
        "dtensor_gtp._comm.process_groups.rendezvous",
        lambda *args, **kwargs: iter([(dist.HashStore(), order[place], 4)]),
    )
    ranks = []
    job.setattr(dist, "init_process_group", lambda *args, rank, **kwargs: pytest.exit(str(ranks.append(rank))))
    with pytest.raises(pytest.exit.Exception):
        init_weight_mesh("cpu", gtp=4, rank_order=order)
    assert ranks == [place]


def fake_devices(num_devices: int) -> mock.Mock:
    """Stands in for torch's module of a kind of device."""
    return mock.Mock(**{"is_available.return_value": num_devices > 0, "device_count.return_value": num_devices})


@pytest.mark.parametrize(
    ("num_devices", "local_rank", "exception", "message"),
    [
        (0, "0", ValueError, "there is no 'cuda' here. Pass 'cpu'"),
        (2, None, RuntimeError, f"variable LOCAL_RANK in the environment, .* not set. {START}"),
        (2, "2", ValueError, "LOCAL_RANK is 2 and there are 2 'cuda' devices. Start at most 2 processes on a host"),
    ],
)
def test_devices_that_are_not_there(
    job: pytest.MonkeyPatch, num_devices: int, local_rank: str | None, exception: type[Exception], message: str
) -> None:
    job.setattr(torch, "get_device_module", lambda device_type: fake_devices(num_devices))
    job.setenv("LOCAL_RANK", local_rank) if local_rank is not None else job.delenv("LOCAL_RANK")
    with pytest.raises(exception, match=message):
        init_weight_mesh("cuda")
    assert not dist.is_initialized()


def test_local_rank_chooses_the_device(job: pytest.MonkeyPatch) -> None:
    devices = fake_devices(4)
    job.setattr(torch, "get_device_module", lambda device_type: devices)
    job.setenv("LOCAL_RANK", "3")
    job.setattr(dist, "init_process_group", lambda *args, **kwargs: pytest.exit("reached"))
    job.setattr("dtensor_gtp._comm.process_groups.rendezvous", lambda *args, **kwargs: iter([(dist.HashStore(), 0, 1)]))
    with pytest.raises(pytest.exit.Exception):
        init_weight_mesh("cuda")
    devices.set_device.assert_called_with(3)


def test_process_group_for_another_device(job: pytest.MonkeyPatch) -> None:
    dist.init_process_group("cpu:gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        message = r"communicates 'cuda' tensors, but .* has the backends 'cpu:gloo'. Do not call"
        with pytest.raises(ValueError, match=message):
            init_weight_mesh("cuda")
    finally:
        dist.destroy_process_group()
