"""Byte-level text from the sources of Python's standard library, in an order that every run can reproduce.

The corpus needs no download: it is every ``*.py`` file of the running interpreter's standard library, in sorted order,
without its tests and without installed packages. Every sixteenth file is held out for validation. A token is a byte, so
the vocabulary has 256 ids; files are separated by a zero byte.

Training reads windows of ``seq_len + 1`` bytes in a permuted order that depends on the seed and the epoch alone. Step
``s`` takes the same windows on any number of ranks, each rank its own rows of them, so that a run can stop at any step
and go on elsewhere without repeating or skipping data.
"""

import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

VOCAB_SIZE = 256
_EXCLUDED_DIRS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_HELD_OUT_EVERY = 16


class Corpus(NamedTuple):
    """Text as bytes.

    ``train`` and ``held_out`` are uint8 tensors of shape (num_bytes,); ``checksum`` changes with either, so that a
    resumed run can tell whether it reads the same data.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    checksum: int


def load_corpus(root: Path | None = None) -> Corpus:
    """Reads the corpus.

    Args:
        root: folder to read ``*.py`` files from; the standard library of the running interpreter by default.

    Raises:
        FileNotFoundError: if there are too few files below ``root`` for a held-out split.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    names = sorted(path.relative_to(root).as_posix() for path in _python_files(root))
    if len(names) < _HELD_OUT_EVERY:
        raise FileNotFoundError(
            f"expected at least {_HELD_OUT_EVERY} Python files below {root}, but found {len(names)}."
        )
    train, held_out = bytearray(), bytearray()
    for index, name in enumerate(names):
        part = held_out if index % _HELD_OUT_EVERY == 0 else train
        part += (root / name).read_bytes() + b"\0"
    checksum = zlib.crc32(held_out, zlib.crc32(train))
    return Corpus(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8), checksum)


def _python_files(root: Path) -> Iterator[Path]:
    """Does not look into excluded folders: installed packages are many more files than the standard library."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_DIRS]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


class Batch(NamedTuple):
    """One rank's rows: int64 tensors of shape (rows, seq_len); ``targets`` are one byte ahead of ``inputs``."""

    inputs: torch.Tensor
    targets: torch.Tensor


class TextBatches:
    """Windows of a text, addressed by step.

    Args:
        text: uint8 tensor of shape (num_bytes,).
        seq_len: tokens in a window.
        batch_size: windows in a global batch, over all ranks.
        seed: seed of the order in which the windows are read.
        rank: this process's place among ``world_size``.
        world_size: number of processes that share a global batch; divides ``batch_size`` unless ``rows`` is given.
        rows: this process's rows of a global batch, where processes have unequal numbers of them.

    Raises:
        ValueError: if the batch does not divide over the ranks, or the text is shorter than one global batch.
    """

    def __init__(
        self,
        text: torch.Tensor,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        rows: slice | None = None,
    ) -> None:
        if rows is None and batch_size % world_size:
            below = batch_size // world_size * world_size
            fitting = [size for size in (below, below + world_size) if size > 0]
            raise ValueError(
                f"the global batch of {batch_size} sequences does not divide over {world_size} processes; "
                f"take a batch size of {' or '.join(map(str, fitting))}, or a number of processes that divides it."
            )
        self._text = text
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._seed = seed
        self._rows = rows or slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        self._num_windows = (text.numel() - 1) // seq_len
        self._epoch_order = (-1, torch.empty(0, dtype=torch.int64))
        if self._num_windows < batch_size:
            raise ValueError(
                f"the text has {self._num_windows} windows of {seq_len} bytes, fewer than a global batch of "
                f"{batch_size}; take a smaller batch or shorter sequences."
            )

    def __call__(self, step: int) -> Batch:
        """Returns this rank's rows of the global batch of ``step``, counted from 0."""
        first = step * self._batch_size
        positions = range(first + self._rows.start, first + self._rows.stop)
        starts = torch.tensor([self._window(position) * self._seq_len for position in positions])
        windows = self._text[starts[:, None] + torch.arange(self._seq_len + 1)].long()
        return Batch(windows[:, :-1], windows[:, 1:])

    def _window(self, position: int) -> int:
        epoch, offset = divmod(position, self._num_windows)
        if self._epoch_order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch_order = (epoch, torch.randperm(self._num_windows, generator=generator))
        return int(self._epoch_order[1][offset])
