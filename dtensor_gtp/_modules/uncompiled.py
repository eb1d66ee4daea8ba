"""What torch.compile leaves alone: the runtime.

A compiled function may call ``backward``. Autograd then calls hooks and functions of ours. The
compiler would trace each of these frames: slowly, and the methods of process groups end a trace
with an error. Frames that the compiler inlines are not meant: it traces layers of ours as before.
"""

from __future__ import annotations

import functools

from .. import _torch_compat as compat

# These call no code that the user has compiled.
_ALONE = ("_comm", "_dtensor", "_params", "_schedule", "elastic")
# These may: a checkpoint computes again what a backward asks for.
_AROUND = (
    "_modules.frames",
    "_modules.outside_of_modules",
    "_modules.torch_patches",
    "_torch_compat",
    "ops",
    "quant.weight",
)


@functools.cache
def install() -> None:
    """Once in a process, when all of this is loaded."""
    root = __name__.partition(".")[0]
    for part in (*_ALONE, *_AROUND):
        compat.skip_package(f"{root}.{part}", recursive=part in _ALONE)
