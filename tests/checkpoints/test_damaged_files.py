"""Headers and indexes of safetensors files that are damaged or planted are errors that name the file."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from dtensor_gtp._safetensors import stored_in

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
def test_entries(change: dict[str, Any], tmp_path: Path) -> None:
    entry = {name: value for name, value in (FINE | change).items() if value is not None}
    write(tmp_path / "a.safetensors", json.dumps({"x": entry}))
    with pytest.raises(ValueError, match=r"a.safetensors is damaged.*'x'"):
        stored_in(tmp_path)
    write(tmp_path / "a.safetensors", json.dumps({"x": FINE}))
    assert stored_in(tmp_path)["x"].shape == (8, 8)


@pytest.mark.parametrize("header", ["[]", "5", "{", "[" * 100_000, "\udcff", '{"x": 5}'])
def test_headers(header: str, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", header)
    with pytest.raises(ValueError, match=r"a.safetensors (cannot be read as JSON|is no safetensors file|is damaged)"):
        stored_in(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"weight_map": [1]}', '{"weight_map": {"x": 5}}', "[" * 100_000])
def test_indexes(text: str, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", json.dumps({"x": FINE}))
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index.json (cannot be read as JSON|is no index)"):
        stored_in(tmp_path)


def test_names_reach_no_terminal(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", json.dumps({"a\x1b[2Jb\nc": FINE | {"dtype": "F1"}}))
    with pytest.raises(ValueError, match=r"has 'a\\x1b\[2Jb\\nc' in a dtype") as raised:
        stored_in(tmp_path)
    assert "\x1b" not in str(raised.value)


def write(path: Path, header: str) -> None:
    text = header.encode(errors="surrogateescape")
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(256))
