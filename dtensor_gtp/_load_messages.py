"""What ``checkpoint.load`` says of a checkpoint that does not fit: which keys, what was meant, what to write."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ._howto import did_you_mean

NO_PATH = (
    "load expects checkpoint_id or storage_reader, but got None for both. checkpoint.latest returns None where no save "
    "has ended: start without a checkpoint then."
)
_MOST_NAMED = 5
_STATE = re.compile(r"(.*\.)?state\.(?P<param>.+)\.\w+")  # of an optimizer, as get_state_dict names it
_NUMBERED = re.compile(r"(?P<outer>.*\.)?state\.\d+\.\w+")  # as optimizer.state_dict() names its states


def missing(keys: Sequence[str], stored: Mapping[str, Any]) -> str:
    """Of keys that the checkpoint does not have."""
    named = _listed([f"{key!r}{did_you_mean(key, stored)}" for key in keys])
    text = f"load expects {len(keys)} key{'s' * (len(keys) > 1)} that the checkpoint lacks: {named}."
    outer = {name.partition(".")[0] for name in stored if name.partition(".")[2] == keys[0]}
    if outer:
        return f'{text} It was saved as {{"{outer.pop()}": ...}}: load a dict with that key.'
    if keys[0].partition(".")[2] in stored:
        return f"{text} It was saved without '{keys[0].partition('.')[0]}' around it: load the inner dict."
    numbered = next(filter(None, map(_NUMBERED.fullmatch, keys)), None)
    if numbered and any(name.startswith(f"{numbered['outer'] or ''}state.") for name in stored):
        return (
            f"{text} optimizer.state_dict() numbers its states, but the checkpoint names them: pass what "
            "get_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict returns."
        )
    if state := _STATE.fullmatch(keys[0]):
        return (
            f"{text} '{state['param']}' had no gradient before the save, or was not there. If it was, pass "
            "allow_partial_load=True and remove from optimizer.state what torch has made for it, as after one step."
        )
    return f"{text} Build the model that was saved, or pass allow_partial_load=True to keep the values of now."


def differing(state_dict: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    """Of tensors that have other sizes in the checkpoint; empty if none has."""
    found = []
    for key, value in state_dict.items():
        entry = stored.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if not isinstance(value, Tensor):
            found.append(f"{key!r} is of type {type(value).__name__} here and a tensor there")
        elif value.shape != entry.size:
            found.append(f"{key!r} is {tuple(value.shape)} here and {tuple(entry.size)} there")
    if not found:
        return ""
    return (
        f"load expects the sizes of the checkpoint, but {len(found)} entries differ: {_listed(found)}. Build the model "
        "with the sizes that were saved, or take these keys out of what you load."
    )


def is_absent(checkpoint_id: Any) -> bool:
    """Whether it is a path of this host where nothing is."""
    is_path = isinstance(checkpoint_id, str | os.PathLike) and "://" not in os.fspath(checkpoint_id)
    return is_path and not os.path.exists(os.path.join(checkpoint_id, ".metadata"))


def absent(checkpoint_id: Any) -> str:
    """Of a path without a checkpoint."""
    return (
        f"load expects a checkpoint in '{os.fspath(checkpoint_id)}', but there is none. Pass the folder of one save, "
        'such as "run/step-10"; checkpoint.latest("run") returns the newest.'
    )


def _listed(texts: Sequence[str]) -> str:
    more = ""
    if len(texts) > _MOST_NAMED:
        more = f"; and {len(texts) - _MOST_NAMED} more"
    return "; ".join(texts[:_MOST_NAMED]) + more
