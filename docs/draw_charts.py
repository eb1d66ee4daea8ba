"""Draws docs/images/speed_2xh100.svg and ms_2xh100.svg from docs/data: ``python docs/draw_charts.py`` writes them anew.

Lines for the length of sequences, bars for modes. Both have the colors of a light or a dark page.
"""

from __future__ import annotations

import math
from pathlib import Path

from draw_tables import FSDP2, Line, figure

_IMAGES = Path(__file__).resolve().parent / "images"
_JOB, _LENGTHS = "2xh100", (512, 2048, 8192)
_MODES = (
    Line("fully_shard", _JOB, FSDP2),
    Line("gtp_shard", _JOB, "gtp"),
    Line("gtp_shard, capture_step", _JOB, "gtp-graph"),
    Line("compute alone", _JOB, "compute"),
)
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 720, 320, 60, 46, 50, 190
_STYLE = (
    "text { fill: #1f2328 } .axis { stroke: #8c959f } .grid { stroke: #d1d9e0 } .back { fill: #fff } "
    ".c0 { fill: #8c959f; stroke: #8c959f } .c1 { fill: #2f6fc4; stroke: #2f6fc4 } "
    ".c2 { fill: #1b7f4b; stroke: #1b7f4b } .c3 { fill: #c98a1b; stroke: #c98a1b } "
    "@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .back { fill: #0d1117 } .grid { stroke: #3d444d } "
    ".c1 { fill: #6aa9f7; stroke: #6aa9f7 } .c2 { fill: #5fcf95; stroke: #5fcf95 } "
    ".c3 { fill: #e8b65a; stroke: #e8b65a } }"
)


def _ms(line: Line, seq_len: int) -> float:
    ms = figure(line.job, "ms", mode=line.mode, seq_len=seq_len)
    assert ms is not None, (line, seq_len)
    return ms


def lines() -> str:
    """Times as fast as ``fully_shard``, over the length."""
    base, most = _MODES[0], 3.0
    parts = []
    for tick in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        parts += _grid(_y(tick, most), f"{tick:.1f} x")
    for seq_len in _LENGTHS:
        parts.append(_text(_x(seq_len), _HEIGHT - _BOTTOM + 18, f"T={seq_len}"))
    for number, line in enumerate(_MODES):
        points = [(_x(T), _y(_ms(base, T) / _ms(line, T), most)) for T in _LENGTHS]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="c{number}" points="{path}" style="fill: none" stroke-width="2.5"/>')
        parts += [f'<circle class="c{number}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points]
        parts += _key(number, line.label)
    return _picture("Speed over fully_shard on 2 x H100, by tokens of a sequence", parts)


def bars() -> str:
    """Milliseconds of a step: a group for each length, each drawn to the scale of its ``fully_shard``."""
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts += _grid(_y(share, 1.1), f"{share:.0%}")
    width = (_WIDTH - _LEFT - _RIGHT) / len(_LENGTHS)
    for group, seq_len in enumerate(_LENGTHS):
        left = _LEFT + group * width + 12
        step = (width - 24) / len(_MODES)
        for number, line in enumerate(_MODES):
            ms = _ms(line, seq_len)
            top, base = _y(ms / _ms(_MODES[0], seq_len), 1.1), _y(0.0, 1.1)
            x = left + number * step
            parts.append(
                f'<rect class="c{number}" x="{x:.1f}" y="{top:.1f}" width="{step - 4:.1f}" height="{base - top:.1f}"/>'
            )
            parts.append(_text(x + step / 2 - 2, top - 4, f"{ms:.0f}", size=10))
        parts.append(_text(left + (width - 24) / 2, _HEIGHT - _BOTTOM + 18, f"T={seq_len}"))
    for number, line in enumerate(_MODES):
        parts += _key(number, line.label)
    return _picture("Forward and backward on 2 x H100, ms; heights: share of fully_shard", parts)


def _x(seq_len: int) -> float:
    first, last = math.log2(_LENGTHS[0]), math.log2(_LENGTHS[-1])
    return _LEFT + 30 + (math.log2(seq_len) - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT - 60)


def _y(value: float, most: float) -> float:
    return _HEIGHT - _BOTTOM - value / most * (_HEIGHT - _TOP - _BOTTOM)


def _grid(y: float, label: str) -> list[str]:
    line = f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return [line, _text(_LEFT - 8, y + 4, label, anchor="end")]


def _key(number: int, label: str) -> list[str]:
    x, y = _WIDTH - _RIGHT + 16, _TOP + 12 + number * 24
    return [
        f'<rect class="c{number}" x="{x}" y="{y - 9}" width="14" height="10"/>',
        _text(x + 20, y, label, anchor="start"),
    ]


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{text}</text>'


def _picture(title: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" role="img">'
        f'\n<style>{_STYLE}</style>\n<rect class="back" width="100%" height="100%"/>'
    )
    return "\n".join([head, _text(_LEFT, 22, title, anchor="start", size=14), *parts, "</svg>", ""])


def pictures() -> dict[str, str]:
    """Each picture by the name of its file."""
    return {"speed_2xh100.svg": lines(), "ms_2xh100.svg": bars()}


if __name__ == "__main__":
    for name, picture in pictures().items():
        (_IMAGES / name).write_text(picture)
