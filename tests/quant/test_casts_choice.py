"""Which casts are taken on a GPU where Triton is missing, broken, or not exact: the reference, and it is said once."""

import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import imports_as

from dtensor_gtp.quant import Quantized, casts
from dtensor_gtp.quant.cast import Casts

# The probe runs here, as if it were a GPU.
DEVICE = torch.device("cpu", 0)


class Exact(Casts):
    def __init__(self, has_float8: bool) -> None:
        self.has_float8 = has_float8


class Broken(Exact):
    def cast_rows(self, matrix: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("Failed to find C compiler")


def wrong(name: str) -> type[Casts]:
    """With one element or scale of one cast in another last bit."""
    method_name, _, kind = name.partition(" of ")

    def method(self: Casts, *args: Any, **options: Any) -> Any:
        result = getattr(Casts, method_name)(self, *args, **options)
        if kind and kind_of(args[0]) != kind:
            return result
        last = result if isinstance(result, torch.Tensor) else result[-1]
        last.contiguous().view(torch.uint8).flatten()[-1] ^= 1
        return result

    return type("Wrong", (Exact,), {method_name: method})


def kind_of(quantized: Quantized) -> str:
    """Which of the ways to dequantize it takes."""
    if len(quantized.planes) == 1:
        return "matrix"
    if quantized.amax is not None:
        return "nvfp4"
    return "mx" if quantized.planes[1].dtype == torch.float8_e8m0fnu else "blocks"


# What has a kernel of its own, or a mode of one that no other cast has.
PROBED = (
    *("amax", "e4m3_scale", "cast_matrix", "cast_matrix_turned", "cast_rows", "cast_blocks", "cast_mx", "cast_nvfp4"),
    *(f"dequantize of {kind}" for kind in ("matrix", "blocks", "mx", "nvfp4")),
)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda.graphs, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("DTENSOR_GTP_CASTS", raising=False)
    attempt = casts._try
    monkeypatch.setattr(casts, "_try", lambda device: attempt(DEVICE))
    casts._verdicts.cache_clear()
    yield
    casts._verdicts.cache_clear()


def triton(kind: type[Casts] | None) -> Any:
    module = None if kind is None else SimpleNamespace(TritonCasts=kind)
    return imports_as("dtensor_gtp.quant.triton_casts", module)


def test_the_reference_is_taken_and_the_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    cases: list[tuple[type[Casts] | None, str]] = [
        (None, r"Triton does not work \((ModuleNotFound|Import)Error: "),
        (Broken, r"Triton does not work \(RuntimeError: Failed to find C compiler\)"),
        *((wrong(name), f"{name} by Triton differs from the reference") for name in PROBED),
    ]
    for kind, reason in cases:
        casts._verdicts.cache_clear()
        caplog.clear()
        with triton(kind), caplog.at_level(logging.WARNING, casts.logger.name):
            for _ in range(2):
                found, why = casts._on_device(DEVICE)
                assert type(found) is Casts, reason
                assert re.match(reason, why)
        assert len(caplog.records) == 1
        assert why in caplog.text


def test_what_works_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with triton(Exact):
        found, why = casts._on_device(DEVICE)
    assert isinstance(found, Exact)
    assert found.has_float8
    assert why == ""
    assert not caplog.records


def test_nothing_is_decided_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels cannot be loaded then; the next cast outside of it tries."""
    with triton(Exact):
        monkeypatch.setattr(torch.cuda.graphs, "is_current_stream_capturing", lambda: True)
        assert casts._on_device(DEVICE)[1] == "first used in a CUDA graph"
        monkeypatch.setattr(torch.cuda.graphs, "is_current_stream_capturing", lambda: False)
        assert isinstance(casts._on_device(DEVICE)[0], Exact)
