"""``python -m dtensor_gtp.trace trace.json --svg step.svg``: how long a step waits for communication, and a picture.

A trace is what ``torch.profiler`` exports by ``export_chrome_trace``. On a GPU its rows are streams, on a CPU threads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dtensor_gtp._trace.exposure import describe, exposure
from dtensor_gtp._trace.picture import draw
from dtensor_gtp._trace.read import STEP_RANGE, read_timeline


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dtensor_gtp.trace", description=_DESCRIPTION)
    parser.add_argument("trace", type=Path, help="a file that torch.profiler has written by export_chrome_trace")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument("--title", help="of the picture; default: the name of the trace")
    given = parser.parse_args(arguments)
    try:
        timeline = read_timeline(json.loads(given.trace.read_text()))
    except (OSError, ValueError, KeyError) as error:
        print(f"dtensor_gtp.trace cannot read {given.trace}: {error}", file=sys.stderr)
        return 2
    numbers = exposure(timeline)
    print(describe(numbers))
    if given.svg is not None:
        given.svg.write_text(draw(timeline, given.title or given.trace.stem))
    if given.json is not None:
        given.json.write_text(json.dumps(numbers._asdict(), indent=1) + "\n")
    return 0


_DESCRIPTION = (
    "Sums up a trace of torch.profiler: how long a step computes, communicates, and communicates while nothing "
    f'computes (exposed). Steps are ranges named "{STEP_RANGE}", or "ProfilerStep#..." of a profiler with a schedule; '
    "without them the whole trace is one step."
)


if __name__ == "__main__":
    sys.exit(main())
