"""Process groups of gloo with one thread each.

Torch gives each two. Both assign one ``std::string`` without a lock when a collective ends (``lastCompletedWorkName``
in ``ProcessGroupGloo::runLoop``, seen in torch 2.13). Names of more than 15 characters, such as that of gathers of
several tensors (``ALLGATHER_COALESCED``), are on the heap, where two threads may free one: the process dies of it
later, by chance. It takes two collectives in flight in one group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d


class OneThreadGloo:
    """Stands for torch's class where torch makes a group. Groups share ``devices``: each device has a
    thread that polls a hundred times a second."""

    def __init__(self, devices: list[Any] | None = None) -> None:
        self._cls: Any = dist.ProcessGroupGloo
        self._devices = devices

    def _own_devices(self) -> list[Any]:
        """As torch chooses them."""
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
        named = [self._cls.create_device(interface=name) for name in interfaces.split(",") if name]
        return named or [self._cls.create_default_device()]

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._cls)

    def __call__(self, store: Store, rank: int, size: int, timeout: timedelta, **further: bool) -> Any:
        """``further``: 2.14 passes ``enable_reconfigure``, which nobody turns on."""
        assert not any(further.values()), further
        if self._devices is None:
            self._devices = self._own_devices()
        options = self._cls._Options()
        options._devices, options._timeout, options._threads = self._devices, timeout, 1
        return self._cls(store, rank, size, options)


@contextmanager
def gloo_with_one_thread(parent: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Groups of gloo that are made here have one thread, and the devices of ``parent`` if that is one of gloo."""
    stock = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if not isinstance(stock, type):  # torch without gloo, or this is on already
        yield
        return
    options = None if parent is None else _options(parent)
    made = OneThreadGloo(None if options is None else options._devices)
    with mock.patch.object(distributed_c10d, "ProcessGroupGloo", made):
        yield


def has_racing_threads(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` is one of gloo with several threads."""
    options = _options(group)
    return options is not None and options._threads > 1


def _options(group: dist.ProcessGroup) -> Any:
    if torch.device("cpu") not in group._device_types:
        return None
    backend = group._get_backend(torch.device("cpu"))
    return backend.options if backend.name() == "gloo" and hasattr(backend.options, "_threads") else None
