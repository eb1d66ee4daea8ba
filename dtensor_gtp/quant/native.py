"""A weight that *is* its quantized data: rowwise planes, and no copy in high precision.

``NativeWeight`` has the shape and dtype of the weight that it stands for. All ops read the
dequantized values, in both directions of a layer: dgrad is the exact gradient of the forward that
was run, without columnwise data. Gradients are in high precision. Only ``copy_`` writes: from
another native weight bit for bit, else by quantizing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from .native_data import PLANE_NAMES, STORED_NAMES, NativeInfo, native_planes, quantize_parts, quantized_of
from .planes import Direction, Quantized
from .weight import StoredWeight

aten = torch.ops.aten
_Context = tuple[NativeInfo, torch.dtype]


class NativeWeight(StoredWeight):
    """A quantized weight, or a part of one, instead of a parameter in high precision. Made by
    :func:`~dtensor_gtp.quantize_`.

    It consists of rowwise planes, and the statistic if the recipe needs it to dequantize. Its
    ``dtype`` is that of its dequantized values and of its gradient.

    Example:
        >>> weight = quantize_(nn.Linear(128, 64), "mxfp8", storage="native").weight
        >>> weight.shape, weight.dtype, weight.stored_nbytes
        (torch.Size([64, 128]), torch.float32, 8448)
        >>> list(weight.stored)
        ['elements', 'scales']
        >>> type(weight.dense()), weight.dequantized_to(torch.bfloat16).dtype
        (<class 'torch.Tensor'>, torch.bfloat16)
    """

    is_native = True
    # stored_* are what __tensor_flatten__ names.
    __slots__ = ("info", "is_blank", "quantized", *(f"stored_{name}" for name in STORED_NAMES))
    quantized: Quantized  # shares memory
    info: NativeInfo
    is_blank: bool  # zeros that fully_shard fills: a part of them may end within a block

    @staticmethod
    def __new__(cls, quantized: Quantized, shape: torch.Size, dtype: torch.dtype, info: NativeInfo) -> NativeWeight:
        options = {"dtype": dtype, "device": quantized.planes[0].device}
        strides = torch.empty(shape, device="meta").stride()  # of a contiguous weight, whatever its planes have
        result = compat.make_wrapper_subclass(cls, shape, strides=strides, **options)
        result.quantized = quantized
        result.info = info
        result.recipe = info.recipe
        result.is_blank = False
        for name, tensor in result.stored.items():
            setattr(result, f"stored_{name}", tensor)  # for ``__tensor_flatten__``
        return result  # type: ignore[no-any-return]

    def like(
        self, quantized: Quantized | None = None, shape: torch.Size | None = None, dtype: Any = None, **changes: Any
    ) -> NativeWeight:
        """The same weight, but for what is given; ``changes`` are fields of its info."""
        info = self.info
        if changes:
            info = info._replace(**changes)
        quantized = quantized or self.quantized
        return NativeWeight(quantized, shape or self.shape, dtype or self.dtype, info)

    @property
    def stored(self) -> dict[str, Tensor]:
        """All tensors that it consists of, by name, sharing memory."""
        found = dict(zip(PLANE_NAMES, self.quantized.planes, strict=False))  # some have elements alone
        if self.quantized.amax is not None:
            found["amax"] = self.quantized.amax
        return found

    @property
    def stored_nbytes(self) -> int:
        """Bytes of memory."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.stored.values())

    def dense(self) -> Tensor:
        """The values in the dtype of the weight, as an ordinary tensor."""
        return self.dequantized_to(self.dtype)

    def dequantized_to(self, dtype: torch.dtype) -> Tensor:
        """The values, computed in float32 and rounded once.

        Args:
            dtype: Of the result.
        """
        values = self.recipe.dequantize(self.quantized, self.info.matrix, Direction.ROWWISE, dtype)
        # torch 2.11 gathers contiguous tensors only, and the cast may have cut off padding.
        return values.contiguous().view(self.shape)

    def dequantize_for(self, direction: Direction) -> Tensor:
        return self.dense()  # rowwise data serves both directions

    def quantized_for(self, direction: Direction, amax: Tensor | None = None) -> Quantized:
        return self.quantized  # made with the statistic of the whole weight

    def amax_over(self, group: dist.ProcessGroup) -> Tensor | None:
        return self.quantized.amax  # of the whole weight

    def write(self, source: Quantized) -> None:
        """Overwrite the data with those of a weight of the same shape, bit for bit."""
        for mine, other in zip(self.quantized.planes, source.planes, strict=True):
            mine.copy_(other)
        if self.quantized.amax is not None:
            assert source.amax is not None
            self.quantized.amax.copy_(source.amax)  # it gives the scale

    def narrowed(self, dim: int, start: int, length: int) -> NativeWeight | None:
        """A part that shares memory; None if it does not consist of whole blocks."""
        dim %= self.ndim
        if self.shape != self.info.matrix:  # a view: its dims are not those of the planes
            return None
        if not length:
            start = 0  # an empty part may begin anywhere
        end = start + length
        from_end = dim - self.ndim  # the dim as recipes count
        specs = native_planes(self.recipe)
        stored = {}
        for name, tensor in self.stored.items():
            step = specs[name].period(from_end)
            if step is None:  # one number for all: each part has it
                stored[name] = tensor
                continue
            # The last block of a matrix may be short, and zeros may end anywhere.
            ends_within = end % step and end != self.shape[dim] and not self.is_blank
            if start % step or ends_within:  # within a block
                return None
            begin = specs[name].size(from_end, start)
            stored[name] = tensor.narrow(dim, begin, specs[name].size(from_end, length))
        sizes = list(self.shape)
        sizes[dim] = length
        shape = torch.Size(sizes)
        return self.like(quantized_of(stored), shape, matrix=shape, groups=self._groups_of_part(shape))

    def _groups_of_part(self, shape: torch.Size) -> tuple[str, ...] | None:
        """None if the recipe's statistic is of more than a part of this shape."""
        cut = {dim - self.ndim for dim, size in enumerate(self.shape) if shape[dim] != size}
        if cut.intersection(self.recipe.amax_dims):
            return None
        return self.info.groups

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], NativeWeight):
            return handler(func, args, kwargs)
        _refuse_writes(func, args, kwargs)
        # Any other op reads the values.
        args, kwargs = compat.tree_map_only(NativeWeight, NativeWeight.dense, (args, kwargs))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], _Context]:
        return [f"stored_{name}" for name in self.stored], (self.info, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: _Context, size: Any, stride: Any) -> NativeWeight:
        info, dtype = context
        stored = {name.removeprefix("stored_"): tensor for name, tensor in inner.items()}
        return NativeWeight(quantized_of(stored), size, dtype, info)

    @classmethod
    def __metadata_guard__(cls, traced: _Context, other: _Context) -> bool:
        """Whether compiled code of one weight serves another: names and groups do not count, so
        layers share graphs."""
        info, dtype = traced
        other_info, other_dtype = other
        anonymous = info._replace(name="", groups=())
        return anonymous == other_info._replace(name="", groups=()) and dtype == other_dtype

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NativeWeight(shape={tuple(self.shape)}, dtype={self.dtype}, recipe={self.recipe})"


def native_of(param: Tensor | None) -> NativeWeight | None:
    """The native weight that a parameter is or that is its local part; None if its storage is another."""
    if param is None:
        return None
    local = compat.local_part(param)
    if isinstance(local, NativeWeight):
        return local
    return None


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    # The planes stay: ``info.matrix`` is what they describe. ``fully_shard`` keeps a flat view of its shard.
    return args[0].like(shape=torch.empty(args[0].shape, device="meta").view(args[1]).shape)


def _as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    weight, size, stride, *offset = args
    # A view of all of it stays native. Any other is one of the dense values.
    is_same = torch.Size(size) == weight.shape and tuple(stride) == weight.stride()
    if is_same and not any(offset):
        return weight.like()
    return func(weight.dense(), *args[1:], **kwargs)


def _copied(func: Any, args: Any, kwargs: Any) -> Any:
    """``clone``, ``to``, ``empty_like``: the same of each plane; a dtype is that of what the weight
    stands for."""
    options = {}
    for key in ("device", "pin_memory", "non_blocking"):
        if kwargs.get(key) is not None:
            options[key] = kwargs[key]
    if func is aten.clone.default:
        options = {"memory_format": torch.contiguous_format}  # planes are contiguous, whatever was asked for
    stored = {name: func(tensor, **options) for name, tensor in args[0].stored.items()}
    return args[0].like(quantized_of(stored), dtype=kwargs.get("dtype"))


def _slice(func: Any, args: Any, kwargs: Any) -> Any:
    weight: NativeWeight = args[0]
    rest: list[Any] = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]  # aten's defaults
    dim, start, end, step = rest
    begin, stop, _ = slice(start, end).indices(weight.shape[dim])
    part = None
    if step == 1:
        part = weight.narrowed(dim, begin, max(stop - begin, 0))
    if part is None:
        return func(weight.dense(), *args[1:], **kwargs)
    return part


def _split(func: Any, args: Any, kwargs: Any) -> Any:
    weight, sizes, *given = args
    if given:
        dim = given[0]
    else:
        dim = kwargs.get("dim", 0)
    dim %= weight.ndim
    if isinstance(sizes, int):
        rows = weight.shape[dim]
        sizes = [min(sizes, rows - begin) for begin in range(0, rows, sizes)] or [0]  # without rows one empty part
    parts = [weight.narrowed(dim, sum(sizes[:index]), size) for index, size in enumerate(sizes)]
    if any(part is None for part in parts):
        # fully_shard would keep a shard in high precision, without a word.
        raise NotImplementedError(
            f"Native parameter '{weight.info.name}' of shape {tuple(weight.shape)} cannot be split "
            f"along dim {dim} into {sizes}, because that splits {weight.recipe.name} blocks of "
            f"{weight.recipe.block_of(dim - weight.ndim, is_native=True)}. Under fully_shard "
            "choose a size whose parts are whole blocks, or use gtp_shard, which splits between "
            "blocks; elsewhere split weight.dense()."
        )
    return parts


def _new_zeros(func: Any, args: Any, kwargs: Any) -> Any:
    """``fully_shard`` pads a shard with it: a weight of as many dims stays native."""
    weight = args[0]
    shape = torch.Size(args[1])
    if len(shape) != weight.ndim or kwargs.get("dtype") not in (None, weight.dtype):
        return _high_precision(func, args, kwargs)  # a buffer, no weight
    device = kwargs.get("device")
    stored = {}
    for name, spec in native_planes(weight.recipe).items():
        stored[name] = weight.stored[name].new_zeros(spec.shape(shape), device=device)
    result = weight.like(quantized_of(stored), shape, matrix=shape, groups=weight._groups_of_part(shape))
    result.is_blank = True  # parts may end within blocks, until they are filled
    return result


def _high_precision(func: Any, args: Any, kwargs: Any) -> Any:
    """Ops that need no values, such as ``zeros_like``: what they make is in high precision."""
    without_memory = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
    return func(without_memory, *args[1:], **kwargs)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[:2]
    values = source
    if isinstance(source, NativeWeight):
        is_same_matrix = (source.info.matrix, source.shape) == (target.info.matrix, target.shape)
        if is_same_matrix and source.recipe.name == target.recipe.name:
            target.write(source.quantized)
            return target
        values = source.dequantized_to(torch.float32)
    if target.shape != target.info.matrix or target.is_meta:
        raise NotImplementedError(
            f"Native parameter '{target.info.name}' of shape {tuple(target.info.matrix)} cannot be "
            f"written through a view of shape {tuple(target.shape)} on {target.device}. Copy into "
            "the parameter itself."
        )
    # Collective, if the recipe has a scale of the whole weight.
    target.write(quantize_parts([values.to(target.device).expand(target.shape)], [target.info])[0])
    return target


def _refuse_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Raise NotImplementedError if ``func`` writes into a native weight."""
    if not func._schema.is_mutable:
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = value if isinstance(value, Sequence) else (value,)
        for tensor in tensors:
            if isinstance(tensor, NativeWeight):
                raise NotImplementedError(
                    f"Parameter '{tensor.info.name}' of shape {tuple(tensor.shape)} has native "
                    f"storage ({tensor.recipe.name}), which {func} cannot write. For training use "
                    "dtensor_gtp.optim.MasterOptimizer, which keeps masters in float32, or "
                    "storage='master'; else freeze the parameter with requires_grad_(False). To "
                    "write values, use copy_, which quantizes them."
                )


_COPIES = (aten._pin_memory.default, aten._to_copy.default, aten.clone.default, aten.empty_like.default)
_FILLED = (aten.full_like.default, aten.ones_like.default, aten.zeros_like.default, aten.new_full.default)
_OTHERS = (aten.new_empty.default, aten.new_ones.default, aten.rand_like.default, aten.randn_like.default)
_HANDLERS: MappingProxyType[Any, Callable[[Any, Any, Any], Any]] = MappingProxyType(
    {
        **dict.fromkeys((aten.alias.default, aten.detach.default), lambda func, args, kwargs: args[0].like()),
        **dict.fromkeys(_COPIES, _copied),
        **dict.fromkeys((*_FILLED, *_OTHERS), _high_precision),
        **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), _split),
        aten.as_strided.default: _as_strided,
        aten.copy_.default: _copy,
        aten.new_zeros.default: _new_zeros,
        aten.slice.Tensor: _slice,
        aten.view.default: _view,
    }
)
