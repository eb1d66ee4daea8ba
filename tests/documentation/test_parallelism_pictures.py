"""The pictures of two pages are what the placements and the plan say today, and can be read."""

import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pages
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return pages.script("draw_parallelism")


@pytest.fixture(scope="module")
def others() -> ModuleType:
    return pages.script("draw_others")


@pytest.fixture(scope="module")
def weights(script: ModuleType) -> dict[str, Any]:
    return {picture.name: script.weight_of(picture) for picture in script.PICTURES}


@pytest.fixture(scope="module")
def drawn(script: ModuleType, others: ModuleType, weights: dict[str, Any]) -> dict[str, str]:
    placements = {f"{picture.name}.svg": script.draw(picture, weights[picture.name]) for picture in script.PICTURES}
    return placements | others.pictures()


def test_files_are_what_the_scripts_draw(drawn: dict[str, str]) -> None:
    files = {path.name: path.read_text() for path in (DOCS / "images").glob("*.svg")}
    for name, svg in drawn.items():
        assert files[name] == svg, f"docs/images/{name} is stale: run docs/draw_parallelism.py and docs/draw_others.py"


def test_pages_show_every_picture(drawn: dict[str, str]) -> None:
    text = "".join(path.read_text() for path in pages.all_paths())
    assert [path.name for path in (DOCS / "images").iterdir() if f"images/{path.name})" not in text] == []
    text = "".join((DOCS / page).read_text() for page in ("guides/meshes.md", "explanation/gtp_and_others.md"))
    assert [name for name in drawn if f"(../images/{name})" not in text] == []


def test_what_the_page_on_others_says(others: ModuleType) -> None:
    """A module is gathered whole by fully_shard, weight after weight by GTP, nothing by TP, and a slice by both."""
    played = {library.name: others.play(library, 0) for library in others.LIBRARIES}
    at_use = {name: rank.moments[others.USE].gathered[: others.LAYERS] for name, rank in played.items()}
    module, nothing, weight_after_weight = (True,) * 4, (False,) * 4, (False, False, True, True)
    assert at_use == {
        **{"FSDP2 (ZeRO-3)": module, "HSDP 2 x 2": module, "TP": nothing},
        **{"GTP": weight_after_weight, "GTP 2 x TP 2": weight_after_weight},
    }
    rows = {name: len(rank.moments[others.USE].used.rows) for name, rank in played.items()}
    assert rows == {"FSDP2 (ZeRO-3)": 64, "HSDP 2 x 2": 64, "TP": 16, "GTP": 64, "GTP 2 x TP 2": 32}


def test_every_element_is_held_by_all_copies(script: ModuleType, weights: dict[str, Any]) -> None:
    for picture in script.PICTURES:
        for element in itertools.product(*map(range, picture.shape)):
            holders = [
                held for held in weights[picture.name].ranks if element[0] in held.rows and element[1] in held.columns
            ]
            assert len(holders) == picture.mesh.get("replicate", 1), f"{picture.name} {element}"


class Box(NamedTuple):
    """Where a text stands; a bit more than a sans-serif font takes."""

    text: str
    left: float
    top: float
    right: float
    bottom: float


def box_of(element: ElementTree.Element) -> Box:
    text, size = element.text or "", int(element.attrib["font-size"])
    width = len(text) * size * (0.64 if element.attrib["font-weight"] == "bold" else 0.6)
    left = int(element.attrib["x"]) - {"start": 0.0, "middle": 0.5, "end": 1.0}[element.attrib["text-anchor"]] * width
    base = int(element.attrib["y"])
    return Box(text, left, base - 0.8 * size, left + width, base + 0.2 * size)


def test_texts_stay_inside_and_apart(drawn: dict[str, str]) -> None:
    for name, svg in drawn.items():
        root = ElementTree.fromstring(svg)
        boxes = [box_of(element) for element in root.iter(f"{SVG}text")]
        assert len(boxes) > 10
        width, height = (int(root.attrib[side]) for side in ("width", "height"))
        assert all(b.left >= 0 and b.right <= width and b.top >= 0 and b.bottom <= height for b in boxes), name
        for a, b in itertools.combinations(boxes, 2):
            is_beside = a.right <= b.left or b.right <= a.left or a.bottom <= b.top or b.bottom <= a.top
            assert is_beside, f"{name}: {a} overlaps {b}"


def test_pictures_can_be_read_on_light_and_dark_pages(drawn: dict[str, str]) -> None:
    """Each has its own background under everything, dark text, and words for those who do not see it."""
    for name, svg in drawn.items():
        root = ElementTree.fromstring(svg)
        background = root.find(f"{SVG}rect")
        assert background.attrib["fill"] == "#ffffff", name
        assert all(background.attrib[side] == root.attrib[side] for side in ("width", "height")), name
        assert root.attrib["fill"] == "#1f2328", name
        assert re.search(r"rank \d holds", root.findtext(f"{SVG}desc") or ""), name
