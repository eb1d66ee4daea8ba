"""One number for the bits of a tensor, by which ranks compare values."""

from __future__ import annotations

import torch
from torch import Tensor

from .collectives import as_integers

_WORD = torch.int64
# Words that are mixed at once. Mixing takes about ten times their bytes of memory.
_PIECE = 1 << 20
# The finalizer of SplitMix64 (Steele et al. 2014), in two's complement: each bit of the result depends on all bits.
_STEPS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_LAST_SHIFT = 31
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)


def digest(tensor: Tensor) -> Tensor:
    """A number that differs if one element differs and, almost surely, if several or their order do.

    Args:
        tensor: A plain tensor of any dtype and layout in memory.

    Returns:
        An int64 of shape ``()`` on the device of ``tensor``; 0 for no elements.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.contiguous().flatten()
    if flat.nbytes % _WORD.itemsize:
        words = as_integers(flat)
    else:
        is_aligned = flat.storage_offset() * flat.itemsize % _WORD.itemsize == 0
        words = (flat if is_aligned else flat.clone()).view(_WORD)
    total = torch.zeros((), dtype=_WORD, device=tensor.device)
    for begin in range(0, words.numel(), _PIECE):
        piece = words[begin : begin + _PIECE].to(_WORD)
        # As in the generator: the state of each place is a multiple of an odd number.
        places = torch.arange(begin + 1, begin + 1 + piece.numel(), device=tensor.device)
        total += _mixed(piece + places * _STRIDE).sum()
    return total


def _mixed(words: Tensor) -> Tensor:
    for shift, factor in _STEPS:
        words = (words ^ _shifted(words, shift)) * factor
    return words ^ _shifted(words, _LAST_SHIFT)


def _shifted(words: Tensor, shift: int) -> Tensor:
    return (words >> shift) & ((1 << (64 - shift)) - 1)
