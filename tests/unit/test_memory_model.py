"""The fullest moment of a step, worked out by hand for three layers."""

import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


@pytest.fixture(scope="module")
def model() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import memory_model
    finally:
        sys.path.pop(0)
    return memory_model


def test_peak_where_backward_begins(model: Any) -> None:
    """All activations are there then."""
    uses = [model.Use(name, 20, 25, 10, 2, 100) for name in "abc"]
    peak = model.predict_peak(uses, state=1000, max_inflight=2)
    assert peak == ("backward of c", 1000, 0, 25, 10, 300)
    assert peak.total == 1335


def test_gradients_and_sends_pile_up_towards_the_end(model: Any) -> None:
    uses = [model.Use(name, 20, 20, 10, 5, saved) for name, saved in (("a", 50), ("b", 1), ("c", 1))]
    expected = {0: 10, 1: 20, 2: 30, 3: 30}  # sends of c, then of b and c, beside the gradient of a
    for max_inflight in (1, 2, 3):
        peak = model.predict_peak(uses, 0, max_inflight)
        assert peak.moment == "backward of a"
        assert (peak.gradients, peak.wgrad, peak.activations) == (10, expected[max_inflight], 50)
    assert model.predict_peak(uses, 0, 2, copies_in_flight=2).wgrad == 50


def test_peak_in_forward(model: Any) -> None:
    uses = [model.Use("a", 500, 10, 1, 1, 1), model.Use("b", 10, 10, 1, 1, 1)]
    assert model.predict_peak(uses, 7, 2) == ("forward of a", 7, 0, 500, 0, 1)


def test_without_uses(model: Any) -> None:
    with pytest.raises(ValueError, match="predict_peak expects at least one use"):
        model.predict_peak([], 0, 2)


def test_description_beside_a_measurement(model: Any) -> None:
    peak = model.Peak("backward of a", 2**30, 0, 2**29, 2**28, 2**28)
    assert peak.describe(2**31 + 2**30).endswith("measured 3072.0 MiB (+50.0%)")
    text = peak.describe()
    parts = "state 1024.0, gradients 0.0, gathered 512.0, wgrad 256.0, activations 256.0"
    assert text.startswith(f"peak in backward of a: 2048.0 MiB = {parts}")
    assert text.endswith("(predicted; there is no counter here)")
    assert peak.as_record()["total"] == 2**31
