"""``python -m dtensor_gtp.plan`` and ``gtp-plan``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from .._howto import printable
from .._progress import Progress
from .api import as_svg, duration, plan, snippet
from .errors import PlanError, expect
from .job import AXES, Job
from .machine import load_machine, preset_names, write_text
from .model import PRESETS

_LOG = logging.getLogger(__name__)


class _Parser(argparse.ArgumentParser):
    """Errors are one line, as all others of the planner."""

    def error(self, message: str) -> NoReturn:
        print(f"gtp-plan: {printable(message)}", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gtp-plan",
        description="Will it fit, how fast, on how many GPUs, and with which axes: predicted without a GPU.",
        epilog=snippet("examples"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", help=f"{', '.join(PRESETS)}, a config.json, a class of transformers, or module:function")
    add("--machine", default="h100", help=f"{', '.join(preset_names())}, or a file of --calibrate; default: h100")
    add("--watts", type=float, metavar="W", help="limit of a GPU's power: as much less of its peaks")
    add("--network-gb-s", type=float, metavar="N", help="10^9 bytes a second from a GPU to other hosts")
    add("--tokens", type=float, metavar="N", help="also print days and GPU-hours for N tokens, as 15e12")
    for item in (item for item in fields(Job) if item.metadata):
        known = item.metadata["known"]
        text = item.metadata["help"]
        flag = f"--{item.metadata['flag'] or item.name.replace('_', '-')}"
        if item.default is False:
            add(flag, dest=item.name, action="store_true", help=text)
        elif isinstance(known, range):
            add(flag, dest=item.name, type=int, metavar="N", help=text)
        else:
            add(flag, dest=item.name, metavar="NAME", help=f"{', '.join(known)}: {text}; default: {item.default}")
    axes = parser.add_argument_group("axes that are not searched")
    for name in (*AXES, "micro_batch"):
        axes.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", dest=name)
    add("--top", type=int, default=5, help="how many layouts are shown; default: 5")
    add("--code", action="store_true", help="print code to paste for the first one")
    add("--explain", type=Path, metavar="NAME", help="draw a timeline of its step: NAME.svg")
    add("--json", type=Path, metavar="FILE", help="write everything; - for the terminal")
    add("--calibrate", type=Path, metavar="FILE", help="measure this machine and write FILE; run it by torchrun")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; gives its exit status: 0, 1 if no layout fits, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        if options.calibrate is not None:
            from .calibrate import calibrate

            machine = calibrate(options.calibrate)
            if int(os.environ.get("RANK", "0")) > 0:
                return 0  # the first rank writes and plans
            if options.model is None:
                print(f"wrote {options.calibrate}: {machine.name}. Not measured: {', '.join(machine.not_measured)}")
                return 0
            options.machine = str(options.calibrate)
        return _plan(options)
    except PlanError as error:
        print(f"gtp-plan: {error}", file=sys.stderr)
        return 2


def _plan(options: argparse.Namespace) -> int:
    is_asked = None not in (options.model, options.gpus)
    expect(is_asked, "plan expects a model and --gpus N", "got none. See gtp-plan --help.")
    expect(options.top >= 1, "plan expects --top of at least 1", f"got {options.top}. Pass another.")
    is_number = options.tokens is None or 0 < options.tokens < float("inf")
    expect(is_number, "plan expects --tokens above 0", f"got {options.tokens}. Pass another.")
    has_name = options.explain is None or options.explain.name
    expect(has_name, "plan expects the name of files to write as --explain", f"got '{options.explain}'. Add one.")
    # Options have the names of a job's fields.
    given = {name: value for name, value in vars(options).items() if value is not None}
    asked: dict[str, Any] = {item.name: given[item.name] for item in fields(Job) if item.name in given}
    asked["fixed"] = {name: given[name] for name in (*AXES, "micro_batch") if name in given}
    with Progress(_LOG, "layouts simulated") as progress:
        asked["report"] = lambda num, total, seconds: progress.advance(f"of at most {total}")
        machine = load_machine(options.machine).with_limits(watts=options.watts, network_gb_s=options.network_gb_s)
        result = plan(options.model, machine, top=options.top, **asked)
    is_json = str(options.json) == "-"
    if options.json is not None:
        text = json.dumps(result.as_record(), indent=1)
        print(text) if is_json else _write(options.json, f"{text}\n")
    if not is_json:
        print(result)
        if options.tokens is not None and result.answers:
            print(f"\n{duration(result.best, result.job, options.tokens)}")
    if not result.answers:
        return 1
    if options.code:
        print(f"\n{result.code()}", end="")
    if options.explain is not None:
        _write(options.explain.with_name(options.explain.name + ".svg"), as_svg(result))
    return 0


def _write(path: Path, text: str) -> None:
    write_text(path, text, "plan")
    print(printable(f"wrote {path}"), file=sys.stderr)
