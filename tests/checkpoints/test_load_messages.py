"""What cannot be loaded is refused in one message, which names the keys and what to write.

Checkpoints that do not fit; planes of quantized weights that are missing, or are of another dtype or shape; headers and
indexes of safetensors files that are damaged or planted.
"""

import json
import struct
import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from checkpoint_common import job_state
from common import GlooTest, full, shared_directory

from dtensor_gtp import checkpoint, gtp_shard, quantize_
from dtensor_gtp._safetensors import stored_in


class TestMissingKeys(unittest.TestCase):
    """In one process: the message is short, and says what was meant."""

    def test_messages(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        state = model.state_dict()
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"model": state, "step": 3}, checkpoint_id=f"{folder}/nested", no_dist=True)
            dcp.save(state, checkpoint_id=f"{folder}/bare", no_dist=True)
            deeper = {f"net.{name}": value for name, value in state.items()}
            for saved, asked, told in (
                ("nested", state, r"'0.weight', did you mean 'model.0.weight'\?.*saved as {\"model\": ...}"),
                ("bare", {"model": state}, r"'model.0.weight', did you mean '0.weight'\?.*load the inner dict"),
                ("nested", {"model": deeper}, r"'model.net.0.weight', did you mean 'model.0.weight'\?"),
                (
                    "nested",
                    {"optim": {"state": {"0.weight": {"step": 1}}}},
                    "'0.weight' had no gradient .* optimizer.state",
                ),
                ("nested", {"model": state, "stepp": 0}, "'stepp', did you mean 'step'.*allow_partial_load=True"),
            ):
                with self.assertRaisesRegex(RuntimeError, told) as raised:
                    checkpoint.load(asked, checkpoint_id=f"{folder}/{saved}", no_dist=True)
                self.assertLess(len(str(raised.exception)), 400)
                self.assertNotIn("Traceback", str(raised.exception))
            asked = {"model": state, "stepp": 0}
            checkpoint.load(asked, checkpoint_id=f"{folder}/nested", no_dist=True, allow_partial_load=True)

    def test_names_of_others_reach_no_terminal(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"bias\x1b[2J": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
            for asked in ({"bias": torch.ones(2)}, {"bias\x1b[2J": torch.ones(3)}):
                with self.assertRaisesRegex((RuntimeError, ValueError), r"'bias\\x1b\[2J'") as raised:
                    checkpoint.load(asked, checkpoint_id=folder, no_dist=True)
                self.assertNotIn("\x1b", str(raised.exception))

    def test_no_checkpoint(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(FileNotFoundError, rf"a checkpoint in '{folder}/none', but there is none"):
                checkpoint.load({"step": 0}, checkpoint_id=f"{folder}/none", no_dist=True)
            with self.assertRaisesRegex(ValueError, "expects checkpoint_id or storage_reader, but got None.*latest"):
                checkpoint.load({"step": 0}, checkpoint_id=checkpoint.latest(folder), no_dist=True)


class TestOtherSizes(GlooTest):
    """On ranks, too, a message and no traceback of each rank."""

    world_size = 2

    def test_messages(self) -> None:
        mesh = self.gtp_mesh()

        def job(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = gtp_shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, width)), mesh)
            return model, torch.optim.AdamW(model.parameters())

        def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
            return job_state(model, optimizer) | {"step": 3}

        saved, other = job(64), job(32)
        before = full(other[0][0].weight).clone()
        with shared_directory() as folder:
            checkpoint.save(states(*saved), f"{folder}/step-3")
            for asked, kind, told in (
                (states(*other), ValueError, r"'model.1.weight' is \(32, 64\) here and \(64, 64\) there.*; and 1 more"),
                (
                    {"model": saved[0].state_dict(), "optimizer": saved[1].state_dict()},
                    RuntimeError,
                    r"numbers its states.*get_state_dict\(model, optimizer\)",
                ),
                ({"model": {"0.weight": 3}}, ValueError, "'model.0.weight' is of type int here and a tensor there"),
            ):
                with self.assertRaisesRegex(kind, told) as raised:
                    checkpoint.load(asked, checkpoint_id=f"{folder}/step-3")
                self.assertLess(len(str(raised.exception)), 600)
                self.assertNotIn("Traceback", str(raised.exception))
            self.assertEqual(full(other[0][0].weight), before)
            with self.assertRaisesRegex(FileNotFoundError, "but there is none"):
                checkpoint.load(states(*saved), checkpoint_id=f"{folder}/step-4")


# --- planes of quantized weights --------------------------------------------------------------------------------------

ELEMENTS, SCALES = "weight_mxfp8.elements", "weight_mxfp8.scales"
CHANGES = (
    (ELEMENTS, lambda plane: plane.view(torch.uint8).long(), "'weight_mxfp8.elements'.*int64"),
    (SCALES, lambda plane: plane.view(torch.uint8).float(), "'weight_mxfp8.scales'.*float32"),
    (SCALES, lambda plane: None, "a tensor 'weight_mxfp8.scales' of shape .*found none"),
    (SCALES, lambda plane: plane[:1], "'weight_mxfp8.scales' of shape .*one of shape"),
)


@pytest.mark.parametrize(("key", "alter", "message"), CHANGES, ids=["int64", "float", "none", "fewer"])
def test_planes_of_a_checkpoint(key: str, alter: Any, message: str, tmp_path: Path) -> None:
    state = dict(quantize_(nn.Linear(64, 64, bias=False), "mxfp8", storage="native").state_dict())
    changed = alter(state.pop(key))
    if changed is not None:
        state[key] = changed
    model = nn.Linear(64, 64, bias=False)
    with pytest.raises(ValueError, match=f"dequantize_state_dict expects .*{message}"):
        checkpoint.dequantize_state_dict(state, model)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    before = model.weight.clone()
    with pytest.raises(ValueError, match=f"load expects .*{message}"):
        checkpoint.load(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(model.weight, before)


def test_planes_without_a_parameter() -> None:
    state = quantize_(nn.Linear(64, 64, bias=False), "mxfp8", storage="native").state_dict()
    other = nn.Sequential(nn.Linear(64, 64, bias=False))
    with pytest.raises(ValueError, match="parameters for all planes in Sequential, but it has no 'weight'"):
        checkpoint.dequantize_state_dict(state, other)
    assert set(checkpoint.dequantize_state_dict(state, other[0])) == {"weight"}


# --- files of safetensors ---------------------------------------------------------------------------------------------

FINE = {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": None},
        {"dtype": ["F32"]},
        {"shape": None},
        {"shape": "88"},
        {"shape": [8.0, 8]},
        {"shape": [-8, -8]},
        {"shape": [10**20, 8]},
        {"data_offsets": None},
        {"data_offsets": "ab"},
        {"data_offsets": [0, 256, 3]},
        {"data_offsets": [-256, 0]},
        {"data_offsets": [256, 512]},
    ],
)
def test_entries_of_a_file(change: dict[str, Any], tmp_path: Path) -> None:
    entry = {name: value for name, value in (FINE | change).items() if value is not None}
    write(tmp_path / "a.safetensors", json.dumps({"x": entry}))
    with pytest.raises(ValueError, match=r"a.safetensors is damaged.*'x'"):
        stored_in(tmp_path)
    write(tmp_path / "a.safetensors", json.dumps({"x": FINE}))
    assert stored_in(tmp_path)["x"].shape == (8, 8)


@pytest.mark.parametrize("header", ["[]", "5", "{", "[" * 100_000, "\udcff", '{"x": 5}'])
def test_headers_of_a_file(header: str, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", header)
    with pytest.raises(ValueError, match=r"a.safetensors (cannot be read as JSON|is no safetensors file|is damaged)"):
        stored_in(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"weight_map": [1]}', '{"weight_map": {"x": 5}}', "[" * 100_000])
def test_indexes_of_files(text: str, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", json.dumps({"x": FINE}))
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index.json (cannot be read as JSON|is no index)"):
        stored_in(tmp_path)


def test_names_of_a_file_reach_no_terminal(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", json.dumps({"a\x1b[2Jb\nc": FINE | {"dtype": "F1"}}))
    with pytest.raises(ValueError, match=r"has 'a\\x1b\[2Jb\\nc' in a dtype") as raised:
        stored_in(tmp_path)
    assert "\x1b" not in str(raised.value)


def write(path: Path, header: str) -> None:
    text = header.encode(errors="surrogateescape")
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(256))
