"""Planes of a checkpoint that are missing, or are of another dtype or shape, are named before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from dtensor_gtp import quantize_
from dtensor_gtp.checkpoint import dequantize_state_dict, load

KEY = "weight_mxfp8"
CHANGES = {
    "int64 elements": (
        f"{KEY}.elements",
        lambda plane: plane.view(torch.uint8).long(),
        "'weight_mxfp8.elements'.*int64",
    ),
    "float scales": (f"{KEY}.scales", lambda plane: plane.view(torch.uint8).float(), "'weight_mxfp8.scales'.*float32"),
    "no scales": (f"{KEY}.scales", lambda plane: None, "a tensor 'weight_mxfp8.scales' of shape .*found none"),
    "fewer scales": (f"{KEY}.scales", lambda plane: plane[:1], "'weight_mxfp8.scales' of shape .*one of shape"),
}


def planes(change: str) -> tuple[dict[str, torch.Tensor], str]:
    torch.manual_seed(0)
    state = dict(quantize_(nn.Linear(64, 64, bias=False), "mxfp8", storage="native").state_dict())
    key, alter, message = CHANGES[change]
    changed = alter(state.pop(key))
    return (state if changed is None else state | {key: changed}), message


@pytest.mark.parametrize("change", CHANGES)
def test_of_a_state_dict(change: str) -> None:
    state, message = planes(change)
    with pytest.raises(ValueError, match=f"dequantize_state_dict expects .*{message}"):
        dequantize_state_dict(state, nn.Linear(64, 64, bias=False))


@pytest.mark.parametrize("change", CHANGES)
def test_of_a_checkpoint(change: str, tmp_path: Path) -> None:
    state, message = planes(change)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    model = nn.Linear(64, 64, bias=False)
    before = model.weight.clone()
    with pytest.raises(ValueError, match=f"load expects .*{message}"):
        load(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(model.weight, before)
