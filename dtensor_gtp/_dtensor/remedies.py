"""What to write instead where torch refuses a sharded tensor: one line, in the error or below its traceback.

DTensor refuses ops that mix it with plain tensors. Its C++ code raises that error, so the line is a note of the
exception: added in the frames of this package that it passes (forwards, backwards, the sharding of ops), else where
Python prints an exception that nobody has caught.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat

WHOLE = "param.full_tensor() on all ranks gives the whole tensor, param.to_local() this rank's rows"

_PENALTY = "Before you add a penalty on parameters to the loss, call penalty.full_tensor() on all ranks."

# The first of these that the name of the op begins with.
_REMEDIES = (
    (
        ("_foreach_", "_fused_", "_amp_"),
        "This call mixes plain parameters, e.g. ignored_params, with sharded ones. Put the plain ones into a "
        "separate param group, and clip them by a separate clip_grad_norm_.",
    ),
    (
        ("index_put_", "t_"),
        "Indexed writes, nn.init.sparse_ and nn.init.orthogonal_ need whole parameters: with whole_weights(model).",
    ),
    (
        ("index", "embedding", "gather", "mm", "addmm", "bmm", "matmul", "linear", "convolution"),
        "Outside of the forward of its module a weight is sharded. Call the module, e.g. model.embedding(ids); "
        f"or register your method: register_gtp_forward_method(model, 'name'); or convert: {WHOLE}.",
    ),
    (
        ("copy_", "fill_", "lerp_"),
        "To write a whole tensor into a parameter: param.copy_(distribute_tensor(value, param.device_mesh, "
        f"param.placements)) under torch.no_grad(), or load_state_dict. To read one: {WHOLE}.",
    ),
    (("",), f"This op mixes a sharded tensor with a plain one. {WHOLE}. {_PENALTY}"),
)
# Texts of errors of ``torch.distributed.tensor``: ``_dispatch`` and C++, ``_sharding_prop``, ``_ops.utils``.
_REFUSED = re.compile(r"aten\.(\w+)\.\w+:? (?:got mixed torch\.Tensor and DTensor|does not have a sharding strategy)")
_NOT_PROPAGATED = re.compile(r"Sharding propagation failed for aten\.")  # also of ops with sizes that do not fit
_NO_SHARDING = f"DTensor found no sharding of this op. {WHOLE}."
# Of ops of ATen on the empty shard that a rank has of a short parameter.
_OF_EMPTY_SHARD = re.compile(r"numel\(\) == 0|0 elements|\bempty\b")
_SAFETENSORS = re.compile(r"access the data pointer on an invalid python storage")  # of a DTensor
_SAVE = "safetensors writes plain tensors. Call dtensor_gtp.pretrained.save_pretrained(model, directory) on all ranks."
# Of layers, on CPUs and GPUs.
_OTHER_DTYPE = re.compile(
    r"mixed dtype|expected scalar type|must have the same dtype|\(c10::\w+\) should be the same|"
    r"expected m1 and m2 to have the same"
)
_OF_INTEGERS = re.compile(r"\b(?:long|int|Long|Int|bool|Bool)\b")
_CAST = (
    "Weights are in param_dtype of mp_policy here. gtp_shard casts the inputs of the model, and those of blocks in a "
    "list if the first call needs it. Where another module gets another dtype, call gtp_shard on that module, then on "
    "the model."
)
_IN_PLACE = re.compile(r"aten\.\w+\.\w+: in-place operations that require placement changes are not supported")
_NEEDS_WHOLE = (
    "This op needs whole tensors. In an optimizer: dtensor_gtp.optim.gathered(optimizer_class) steps on whole "
    f"parameters. Elsewhere: {WHOLE}, and to write one: with whole_weights(model)."
)
_PACKAGE = f"{__name__.partition('.')[0]}."
_DTENSOR = "torch.distributed.tensor."
_MARK = "dtensor_gtp: "


@functools.cache
def install() -> None:
    """Say what to write; once in a process."""
    compat.replace("excepthook", sys, "excepthook", functools.partial(_show, sys.excepthook))
    compat.replace("format", DTensor, "__format__", _format)
    for name in ("numpy", "tolist"):
        compat.replace(name, DTensor, name, functools.partialmethod(_refuse, name))


def explain(error: BaseException, known: str | None = None, *, is_cast: bool = False) -> None:
    """Add what to write instead as a note, unless the error has one: ``known``, if that is known better here.
    ``is_cast``: weights are cast to a ``param_dtype``."""
    notes = getattr(error, "__notes__", ())
    if any(note.startswith(_MARK) for note in notes):
        return
    text = remedy_for(error)
    if text is not None:
        text = known or text
    elif is_cast and _OTHER_DTYPE.search(str(error)) and not _OF_INTEGERS.search(str(error)):
        text = _CAST
    if text is not None:
        error.add_note(_MARK + text)


def remedy_for(error: BaseException) -> str | None:
    """What to write instead of code that DTensor refuses; None for other errors."""
    if isinstance(error, AssertionError) and not str(error):  # DTensor's own, e.g. of sizes that do not fit
        frames = list(_frames(error.__traceback__))
        # The innermost frame raised. A cause that nobody raised has no frames.
        is_dtensors = bool(frames) and frames[-1].f_globals.get("__name__", "").startswith(_DTENSOR)
        if is_dtensors and _is_in_step(frames):
            return _NEEDS_WHOLE
        return None
    if not isinstance(error, RuntimeError):
        return None
    if _IN_PLACE.search(str(error)):
        return _NEEDS_WHOLE
    if _SAFETENSORS.search(str(error)):
        return _SAVE
    frames = list(_frames(error.__traceback__))
    found = _REFUSED.search(str(error))
    if found is not None:
        # The last entry fits each name.
        text = next(text for starts, text in _REMEDIES if found[1].startswith(starts))
        if text == _REMEDIES[-1][1] and "sharding strategy" in found[0]:
            text = _NO_SHARDING
    elif _NOT_PROPAGATED.search(str(error)):
        text = _NO_SHARDING
    else:
        is_of_empty = _OF_EMPTY_SHARD.search(str(error)) and _is_in_step(frames)
        if is_of_empty:
            return _NEEDS_WHOLE
        return None
    if _is_in_formula(frames):
        return f"This backward starts from a sharded tensor, because a term of the loss is one. {_PENALTY}"
    # In an optimizer a foreach op mixes parameters; any other refused op needs whole tensors.
    if text != _REMEDIES[0][1] and _is_in_step(frames):
        return _NEEDS_WHOLE
    method = _unregistered_method(frames)
    if method is None:
        return text
    return f"{method} is not the forward of a module, so its weights are sharded. {text}"


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    """From the caller to the innermost one."""
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _is_in_formula(frames: Sequence[FrameType]) -> bool:
    """Whether a formula of autograd raised, of torch or of this package, and not code that a backward runs again."""
    names = [frame.f_code.co_name for frame in frames]
    if "_engine_run_backward" not in names:
        return False
    # What a checkpoint runs again is a forward, though backward has called it.
    inner = [frame.f_globals.get("__name__", "") for frame in frames[names.index("_engine_run_backward") :]]
    return all(name.startswith((_PACKAGE, "torch.")) and name != "torch.utils.checkpoint" for name in inner)


def _is_in_step(frames: Iterable[FrameType]) -> bool:
    """Whether a method of an optimizer raised, and not a module in the closure that it called."""
    owners = [frame.f_locals.get("self") for frame in frames]
    owners = [owner for owner in owners if isinstance(owner, (torch.optim.Optimizer, nn.Module))]
    return bool(owners) and isinstance(owners[-1], torch.optim.Optimizer)


def _unregistered_method(frames: Iterable[FrameType]) -> str | None:
    """The innermost method of a module with sharded parameters and the call that registers it; None for a forward."""
    found = None
    for frame in frames:
        name = frame.f_code.co_name
        first = None
        if frame.f_code.co_argcount:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
        is_torchs = frame.f_globals.get("__name__", "").startswith("torch.")
        if is_torchs or not isinstance(first, nn.Module) or not callable(getattr(type(first), name, None)):
            continue
        if _has_shards(first):
            if name == "forward":
                found = None
            else:
                found = f"{name}() (register_gtp_forward_method(module, '{name}'))"
    return found


def _has_shards(module: nn.Module) -> bool:
    return any(isinstance(param, DTensor) for param in module.parameters())


def _show(stock: Any, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    shown: BaseException | None = error
    seen: set[int] = set()
    # The errors that it was raised from are printed, too. ``raise error from error`` is a circle.
    while shown is not None and id(shown) not in seen:
        seen.add(id(shown))
        explain(shown)
        shown = shown.__cause__ or shown.__context__
    stock(kind, error, traceback)


def _format(tensor: DTensor, spec: str) -> str:
    if not spec:
        return str(tensor)
    raise TypeError(
        f"A DTensor, e.g. a norm over all shards, cannot be written as '{{:{spec}}}': ranks have to add their parts. "
        f"Write f'{{norm.full_tensor():{spec}}}', on all ranks."
    )


def _refuse(tensor: DTensor, method: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"A DTensor has no .{method}(), because this rank holds a part of it. Write param.full_tensor().{method}() on "
        f"all ranks, or param.to_local().{method}() for the part; detach() before numpy(). For TensorBoard: "
        "writer.add_histogram(name, param.full_tensor())."
    )
