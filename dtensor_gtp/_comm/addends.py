"""The sum over ranks of the addends that an exchange has received, see ``reductions``: a Triton
kernel, or torch.

Where the kernel cannot run, ``torch.sum`` or ``torch.mean`` add rows that include this rank's own.
The bits are the same, except for the mean over a number of ranks that is no power of two (torch's
factor depends on the size of the gradient) and for gradients that torch adds in parts: of one
element, or of more than 2 GiB in all.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._progress import Progress
from .._torch_compat.kernel_trial import decided, failure, has_same_bits
from .copy_engine import waiting_allowed

logger = logging.getLogger(__name__)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# torch splits more addends of one element among threads.
_MOST_RANKS = 63
# Of gradients that are sent together. Aligned addends have a separate kernel.
_TRIED = ([1040, 16], [1001, 8])
# For fewer bytes of addends it does not pay to load Triton: torch's sum took 0.5 ms for 416 MiB on
# an H200. The bytes of one block count, not those that happen to travel together.
_MANY_NBYTES = 64 << 20
# ``triton_addends.add``
Sum = Callable[[Tensor, Tensor, Sequence[Tensor], int, int, float], None]


class _Key(NamedTuple):
    """What a kernel is compiled for."""

    device: int
    dtype: torch.dtype
    num_ranks: int


@cache
def _verdicts() -> dict[_Key, tuple[Sum | None, str]]:
    """The kernel for each key, or why there is none."""
    return {}


@cache
def _loading() -> dict[_Key, threading.Thread]:
    """The threads of ``load_ahead``, until the kernel is tried."""
    return {}


def load_ahead(device: torch.device, dtype: torch.dtype, num_ranks: int) -> None:
    """Begin to load the kernel that ``fused_sum`` will try, on a thread: Triton reads all of itself
    (0.3 s) and compiles what it has not cached, so let the first forward run beside that."""
    if device.index is None or not _may_add(device, dtype, num_ranks):
        return
    key = _Key(device.index, dtype, num_ranks)
    if key not in _verdicts() and key not in _loading():
        thread = _loading()[key] = threading.Thread(target=_load, args=(key,), name="gtp_load_triton")
        thread.start()


def _load(key: _Key) -> None:
    device = torch.device("cuda", key.device)
    with suppress(Exception), torch.no_grad():  # the trial says what does not work
        from .triton_addends import add

        with torch.cuda.device(device):
            for _ in _probe(add, device, key):  # compiles
                continue


def _may_add(device: torch.device, dtype: torch.dtype, num_ranks: int) -> bool:
    return device.type == "cuda" and dtype in _DTYPES and num_ranks <= _MOST_RANKS


def is_worth_loading(nbytes: int) -> bool:
    """Whether to load the kernel for gradients of so many bytes where nothing else needs it."""
    return nbytes >= _MANY_NBYTES


def is_loaded_ahead(like: Tensor, num_ranks: int) -> bool:
    """Whether ``load_ahead`` was called for it. A backward must not load what is only a gain: the
    second one of BERT-large took 583 instead of 44 ms on 2 x H200 when it did."""
    key = _Key(like.device.index, like.dtype, num_ranks)
    return key in _loading() or key in _verdicts()


def add_rows(
    add: Sum | None, out: Tensor, rows: Tensor, own: Sequence[Tensor], rank: int, num_ranks: int, *, is_mean: bool
) -> None:
    """Make ``out`` (1-D) the sum or mean of ``rows`` of all ranks, by torch; or by a kernel, for
    which this ``rank`` has its ``own`` row elsewhere, in parts."""
    if add is not None:
        factor = 1.0
        if is_mean:
            factor = 1 / num_ranks
        add(out, rows, own, rank, num_ranks, factor)
    elif is_mean:
        torch.mean(rows, 0, dtype=out.dtype, out=out)
    else:
        torch.sum(rows, 0, dtype=out.dtype, out=out)


def add_parts(out: Tensor, rows: Tensor, own: Sequence[Tensor], rank: int, num_ranks: int, factor: float) -> None:
    """What the kernel does (``triton_addends.add``), by torch, with a copy of all addends."""
    mine = torch.cat([part.reshape(-1) for part in own])[None]
    add_rows(None, out, torch.cat([rows[:rank], mine, rows[rank:]]), (), rank, num_ranks, is_mean=factor != 1)


def fused_sum(like: Tensor, num_ranks: int) -> Sum | None:
    """The kernel that adds the addends of ``num_ranks`` ranks, of the dtype and device of ``like``;
    None: torch."""
    if type(like) is not Tensor or not _may_add(like.device, like.dtype, num_ranks):
        return None
    return _decided(_Key(like.device.index, like.dtype, num_ranks))[0]


def _decided(key: _Key) -> tuple[Sum | None, str]:
    def warn(reason: str) -> None:
        what = f"{key.dtype} of {key.num_ranks} ranks on cuda:{key.device}"
        logger.warning("torch adds the gradients of all ranks, not the fused kernel (%s): %s", what, reason)

    device = torch.device("cuda", key.device)
    return decided(_verdicts(), key, None, lambda: _try(device, key), warn)


def _try(device: torch.device, key: _Key) -> tuple[Sum | None, str]:
    """The kernel, if it works and has torch's bits. Waits for the GPU."""
    thread = _loading().pop(key, None)
    if thread is not None:
        thread.join()  # it compiles the same kernel
    if torch.version.hip is not None:
        return None, "not tested on rocm"
    try:
        from .triton_addends import add  # needs Triton, which comes with torch for GPUs

        with waiting_allowed(device), Progress(logger, f"compiling the sum of gradients for {device}"):
            if not all(has_same_bits(*pair) for pair in _probe(add, device, key)):
                return None, "Triton's sum differs from torch's"
    except Exception as error:
        return None, failure(error)
    return add, ""


def _probe(add: Sum, device: torch.device, key: _Key) -> Iterator[tuple[Tensor, Tensor]]:
    """Sum and mean by the kernel and by torch."""
    num_ranks = key.num_ranks
    rank = num_ranks // 2
    for sizes in _TRIED:
        # Made and compared on the host: a GPU would load a kernel for each of these ops, in the
        # first step. Of many magnitudes and both signs, so that another order of additions shows.
        steps = torch.arange(num_ranks * sum(sizes), dtype=torch.float32)
        made = ((steps * 37 % 1009 - 499.3) * torch.exp2(steps % 21 - 14)).to(key.dtype).view(num_ranks, -1)
        peers = torch.cat([made[:rank], made[rank + 1 :]]).to(device)
        rows = made.to(device)
        for factor, reduce in ((1.0, torch.sum), (1 / num_ranks, torch.mean)):
            expected = reduce(rows, 0, dtype=torch.float32)
            out = torch.empty_like(expected)
            add(out, peers, rows[rank].split(sizes), rank, num_ranks, factor)
            yield out, expected
