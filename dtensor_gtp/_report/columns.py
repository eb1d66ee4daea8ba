"""Lines that fit a terminal: tables whose long cells wrap, and paragraphs."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence

_NO_TERMINAL = 100  # columns where the output is a file, a log or a notebook
_LEAST_CELL = 12
_LEAST_WIDTH = 40


def terminal_width() -> int:
    """Columns of the terminal: those that the environment variable COLUMNS names, else those that it has."""
    return max(shutil.get_terminal_size((_NO_TERMINAL, 24)).columns, _LEAST_WIDTH)


def in_columns(cells: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Lines of a table; each column is as wide as its widest cell.

    Args:
        cells: Lines of as many cells each.
        width: Most columns of a line. The widest cells wrap where the table has more. None: any width.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is not None:
        _shrink(widths, width)
    lines = []
    for row in cells:
        wrapped = [list(_pieces(cell, size)) for cell, size in zip(row, widths, strict=True)]
        for number in range(max(map(len, wrapped))):
            parts = [piece[number] if number < len(piece) else "" for piece in wrapped]
            lines.append("  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True)).rstrip())
    return lines


def _shrink(widths: list[int], width: int) -> None:
    """Take from the widest column until all fit."""
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _LEAST_CELL:
        widths[widths.index(max(widths))] -= 1


def _pieces(cell: str, width: int) -> Iterator[str]:
    """The lines of a cell. Names break after dots and commas; continued lines are indented."""
    line = ""
    for part in re.findall(r"[^ .,]*[ .,]?", cell)[:-1]:
        if line.strip() and len(line + part.rstrip()) > width:
            yield line.rstrip()
            line = "  "
        line += part
    yield line.rstrip()


def paragraph(text: str, width: int, indent: str = "") -> list[str]:
    """``text`` in lines of at most ``width`` columns; all but the first are indented twice."""
    after = f"{indent}  "
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=after, break_long_words=False)
