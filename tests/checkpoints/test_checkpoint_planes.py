"""Planes of a checkpoint that are missing, or are of another dtype or shape, are named before anything is computed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from dtensor_gtp import quantize_
from dtensor_gtp.checkpoint import dequantize_state_dict, load

ELEMENTS, SCALES = "weight_mxfp8.elements", "weight_mxfp8.scales"
CHANGES = (
    (ELEMENTS, lambda plane: plane.view(torch.uint8).long(), "'weight_mxfp8.elements'.*int64"),
    (SCALES, lambda plane: plane.view(torch.uint8).float(), "'weight_mxfp8.scales'.*float32"),
    (SCALES, lambda plane: None, "a tensor 'weight_mxfp8.scales' of shape .*found none"),
    (SCALES, lambda plane: plane[:1], "'weight_mxfp8.scales' of shape .*one of shape"),
)


@pytest.mark.parametrize(("key", "alter", "message"), CHANGES, ids=["int64", "float", "none", "fewer"])
def test_of_a_checkpoint(key: str, alter: Any, message: str, tmp_path: Path) -> None:
    state = dict(quantize_(nn.Linear(64, 64, bias=False), "mxfp8", storage="native").state_dict())
    changed = alter(state.pop(key))
    if changed is not None:
        state[key] = changed
    model = nn.Linear(64, 64, bias=False)
    with pytest.raises(ValueError, match=f"dequantize_state_dict expects .*{message}"):
        dequantize_state_dict(state, model)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    before = model.weight.clone()
    with pytest.raises(ValueError, match=f"load expects .*{message}"):
        load(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(model.weight, before)
