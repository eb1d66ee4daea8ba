"""Draws docs/images/segments.svg from a real plan: ``python docs/draw_segments.py`` writes it anew.

Two replicas of four ranks, one of which has lost a rank; a weight that may be cut anywhere and one that is cut at
heads. For each weight: the rows of every rank of replica 0 above, those of replica 1 below, and between them the
segments with their owners.
"""

from __future__ import annotations

from pathlib import Path

from dtensor_gtp.elastic import ReplicaLayout, WeightSpec, plan_replicas
from dtensor_gtp.elastic.plan import box_of_rank, segments_of

LEFT, WIDTH, LANE, GAP = 130, 720, 34, 26
FILLS = ("#dbe7f5", "#f6e3cf", "#dcefdc", "#ecdff0")
SHADES = ("#8fb4dd", "#eab676", "#94cc94", "#c79ad1")


def draw() -> str:
    """The picture."""
    layout = plan_replicas(replicate=2, gtp=4, failed={(1, 2, 0)})
    weights = (WeightSpec("w1.weight", (112, 32)), WeightSpec("wq.weight", (112, 32), block_size=16))
    parts = []
    top = 46
    for weight in weights:
        parts += _weight(weight, layout, top)
        top += 3 * LANE + 2 * GAP + 46
    title = "Replica 1 has lost one of its four ranks: cut points of both replicas make segments, each with two owners"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{top - 20}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(LEFT, 20, title, anchor="start", size=13),
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _weight(weight: WeightSpec, layout: ReplicaLayout, top: int) -> list[str]:
    scale = WIDTH / weight.shape[0]
    blocks = f", cut at multiples of {weight.block_size}" if weight.block_size > 1 else ""
    parts = [_text(LEFT, top + 6, f"{weight.name}: {weight.shape[0]} rows{blocks}", anchor="start")]
    lanes = [top + 14, top + 14 + 2 * (LANE + GAP)]
    for replica, y in zip(layout.replicas, lanes, strict=True):
        parts.append(_text(LEFT - 10, y + LANE / 2 + 4, f"replica {layout.replicas.index(replica)}", anchor="end"))
        for position, rank in enumerate(replica.ranks):
            box = box_of_rank(weight, layout, rank)
            parts.append(_box(box.offset[0] * scale, y, box.size[0] * scale, FILLS[position], f"rank {rank}"))
    middle = top + 14 + LANE + GAP
    parts.append(_text(LEFT - 10, middle + LANE / 2 + 4, "segments", anchor="end"))
    for box, holders in segments_of(weight, layout):
        start, width = box.offset[0] * scale, box.size[0] * scale
        upper = layout.replicas[0].ranks.index(holders[0][0])
        owners = "+".join(str(rank) for copies in holders for rank in copies)
        parts.append(_box(start, middle, width, SHADES[upper], owners))
        for x in (LEFT + start, LEFT + start + width):
            parts.append(
                f'<path d="M{x:.1f} {lanes[0] + LANE} V{lanes[1]}" stroke="#999" stroke-width="0.6" '
                'stroke-dasharray="3 3"/>'
            )
    return parts


def _box(x: float, y: float, width: float, fill: str, label: str) -> str:
    rect = f'<rect x="{LEFT + x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" fill="{fill}" stroke="#555"/>'
    return rect + _text(LEFT + x + width / 2, y + LANE / 2 + 4, label)


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#222">{text}</text>'


if __name__ == "__main__":
    Path(__file__).with_name("images").joinpath("segments.svg").write_text(draw())
