"""Runs docs/report.ipynb and writes what its cells show into it: ``python docs/draw_notebook.py``.

It needs no notebook server: cells are Python, and the last value of a cell is shown as notebooks show it. The site has
the notebook's report as docs/_static/report.html.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
NOTEBOOK, REPORT = DOCS / "report.ipynb", DOCS / "_static" / "report.html"

_CELLS = (
    "# The report in a notebook\n\nA sharding report displays itself. This process stands for rank 0 of 8, whose "
    "collectives communicate nothing, so no GPU is needed.",
    "import torch\n"
    "import torch.distributed as dist\n"
    "from torch import nn\n"
    "from torch.distributed.device_mesh import init_device_mesh\n"
    "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
    "\n"
    "from dtensor_gtp import gtp_shard, sharding_report\n"
    "\n"
    'dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())\n'
    'mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("gtp",))\n'
    "torch.manual_seed(0)\n"
    "layers = [(nn.RMSNorm(512), nn.Linear(512, 2048), nn.SiLU(), nn.Linear(2048, 512)) for _ in range(6)]\n"
    "blocks = (nn.Sequential(*block) for block in layers)\n"
    "model = gtp_shard(nn.Sequential(nn.Embedding(8192, 512), *blocks, nn.Linear(512, 8192)), mesh)\n"
    "model(torch.arange(64).view(2, 32)).sum().backward()",
    "sharding_report(model)",
    "print(sharding_report(model))",
)


def cells() -> list[dict[str, Any]]:
    """The cells as the format has them, run in one namespace."""
    names: dict[str, Any] = {}
    found = []
    for number, source in enumerate(_CELLS):
        cell: dict[str, Any] = {"cell_type": "code" if number else "markdown", "id": f"cell-{number}", "metadata": {}}
        cell["source"] = source.splitlines(keepends=True)
        if number:
            cell |= {"execution_count": number, "outputs": _run(source, names)}
        found.append(cell)
    return found


def _run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree, outputs = ast.parse(source), []
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    if printed.getvalue():
        outputs.append(
            {"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)}
        )
    if hasattr(value, "_repr_html_"):
        data = {"text/html": value._repr_html_().splitlines(keepends=True)}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def main() -> None:
    os.environ["COLUMNS"] = "100"
    made = cells()
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook = {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1) + "\n")
    (html,) = (output["data"]["text/html"] for cell in made for output in cell.get("outputs", ()) if "data" in output)
    REPORT.write_text("".join(html) + "\n")


if __name__ == "__main__":
    main()
