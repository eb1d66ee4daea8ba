"""Runs a small part of the tests on several releases of torch, each in an environment of its own.

    python tests/support_matrix.py                     # all releases of docs/versions.md
    python tests/support_matrix.py 2.12 2.14.1         # these
    python tests/support_matrix.py --keep envs 2.14    # the environments stay in a folder, for another run

It prints the table of docs/versions.md and exits with 1 if a release failed. "2.14" is the newest 2.14 that pip finds.
pip takes torch from where it is told to (``PIP_INDEX_URL=https://download.pytorch.org/whl/cpu`` has wheels for CPUs,
which are small). Without a GPU the tests run on CPU, also with torch for GPUs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")
# What the parts of the package do that touch most of torch: placements, training, tp, checkpoints, low precision,
# compile. A few minutes on two cores.
TESTS = (
    "tests/project/test_public_api.py",
    "tests/placement/test_placement.py",
    "tests/placement/test_gtp_placement.py",
    "tests/training/test_gtp_shard_training.py",
    "tests/checkpoints/test_gtp_shard_state_dict.py",
    "tests/training/test_gtp_shard_mixed_precision.py",
    "tests/compose/test_gtp_shard_tp.py",
    "tests/quant/test_quantize.py",
    "tests/compile/test_gtp_shard_compile.py",
)


class Result(NamedTuple):
    release: str  # as it was asked for
    torch: str  # the version that pip has installed, or why it has not
    outcome: str
    is_good: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the environments there, and use them again")
    options = parser.parse_args()
    results = []
    for release in options.releases:
        if options.keep is not None:
            results.append(_run(release, (options.keep / release).resolve()))
        else:
            with tempfile.TemporaryDirectory(prefix="support-matrix-") as folder:
                results.append(_run(release, Path(folder)))
        print(f"torch {release}: {results[-1].outcome}", flush=True)
    print("\n| torch | installed | tests on CPU |\n|---|---|---|")
    for result in results:
        print(f"| {result.release} | {result.torch} | {result.outcome} |")
    return 0 if all(result.is_good for result in results) else 1


def _run(release: str, folder: Path) -> Result:
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    wanted = release if release.count(".") > 1 else f"{release}.*"
    print(f"torch {release}: installing", flush=True)
    # pip of the new environment; what this one's user has set in PYTHONPATH must not be found in it
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    packages = (f"torch=={wanted}", "pytest>=8", "expecttest>=0.2", "numpy")
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", *packages], env=env, capture_output=True, text=True
    )
    if installed.returncode:
        reason = [line for line in installed.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        return Result(release, f"no: {reason[0].removeprefix('ERROR: ')}", "not run", False)
    version = subprocess.check_output([python, "-c", "import torch; print(torch.__version__)"], env=env, text=True)
    print(f"torch {version.strip()}: testing", flush=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    tested = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    return Result(release, version.strip(), outcome_of(tested.stdout), tested.returncode == 0)


def outcome_of(output: str) -> str:
    """What pytest said in the end: "390 passed"; and the tests that failed."""
    summary = re.findall(r"^(?:\d+ [a-z]+(?:, )?)+ in ", output, re.M)
    if not summary:
        return "no tests ran"
    counts = [part for part in summary[-1].removesuffix(" in ").split(", ") if "deselected" not in part]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return ", ".join(counts) + (f": {', '.join(failed)}" if failed else "")


if __name__ == "__main__":
    sys.exit(main())
