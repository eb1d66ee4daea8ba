"""A weight that *is* its quantized data: rowwise planes, and no copy in high precision.

``NativeWeight`` has the shape and dtype of the weight that it stands for. What reads it computes with the dequantized
values, in both directions of a layer: dgrad is the exact gradient of the forward that was run, and columnwise data are
neither stored nor sent. Gradients are ordinary high-precision tensors. Writing takes a cast, so only ``copy_`` writes:
from another native weight bit for bit, from anything else by quantizing it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from .fsdp import StoredWeight
from .native_parts import PLANE_NAMES, NativeInfo, native_block_of, native_planes, quantize_parts
from .planes import Direction, Quantized
from .recipes import Recipe

aten = torch.ops.aten


class NativeWeight(StoredWeight):
    """A quantized weight.

    Args:
        quantized: Rowwise planes, and the statistic if the recipe needs it to dequantize.
        shape: Of the weight or the part of it.
        dtype: Of what it stands for: that of its dequantized values and of its gradient.
    """

    __slots__ = ("_info", "_is_blank", "_matrix", "_quantized")
    _quantized: Quantized
    _info: NativeInfo
    _matrix: torch.Size  # what the planes describe; the tensor itself may be a view of another shape
    _is_blank: bool  # made of zeros to be filled: a part that ends within a block shares it with nothing

    @staticmethod
    def __new__(cls, quantized: Quantized, shape: torch.Size, dtype: torch.dtype, info: NativeInfo) -> NativeWeight:
        like = quantized.planes[0]
        result = compat.make_wrapper_subclass(
            cls, shape, strides=_contiguous_strides(shape), dtype=dtype, device=like.device
        )
        result._quantized, result._info, result._matrix, result._is_blank = quantized, info, torch.Size(shape), False
        return result  # type: ignore[no-any-return]

    @property
    def recipe(self) -> Recipe:
        return self._info.recipe

    @property
    def info(self) -> NativeInfo:
        return self._info

    @property
    def quantized(self) -> Quantized:
        """The planes, sharing memory."""
        return self._quantized

    @property
    def stored(self) -> dict[str, Tensor]:
        """All tensors that it consists of, by name, sharing memory."""
        found = dict(zip(PLANE_NAMES, self._quantized.planes, strict=False))
        return found if self._quantized.amax is None else found | {"amax": self._quantized.amax}

    @property
    def stored_nbytes(self) -> int:
        """Bytes of memory."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.stored.values())

    def dense(self) -> Tensor:
        return self.dequantized_to(self.dtype)

    @property
    def row_block(self) -> int:
        return native_block_of(self.recipe, -2)

    def sent_direction(self, direction: Direction) -> Direction:
        return Direction.ROWWISE

    def amax_over(self, group: dist.ProcessGroup) -> Tensor | None:
        return self._quantized.amax

    def sent_planes(self, direction: Direction, amax: Tensor | None) -> tuple[Tensor, ...]:
        return self._quantized.planes

    def dequantized_to(self, dtype: torch.dtype) -> Tensor:
        """The values, computed in float32 and rounded once to ``dtype``."""
        values = self.recipe.dequantize(self._quantized, self._matrix, Direction.ROWWISE, dtype)
        # As this tensor says that it is: torch 2.11 gathers what is contiguous only, and padding has just been cut off.
        return values.contiguous().view(self.shape)

    def quantized_for(self, direction: Direction) -> Quantized:
        return self._quantized

    def dequantize_for(self, direction: Direction) -> Tensor:
        return self.dense()

    def with_stored(self, stored: dict[str, Tensor], shape: torch.Size | None = None) -> NativeWeight:
        """The same kind of weight with other tensors.

        Args:
            stored: By name, as :attr:`stored`.
            shape: Of the matrix they describe, this one's by default.
        """
        planes = tuple(stored[name] for name in PLANE_NAMES if name in stored)
        shape = self._matrix if shape is None else shape
        return NativeWeight(Quantized(planes, stored.get("amax")), shape, self.dtype, self._info)

    def with_info(self, **changes: Any) -> NativeWeight:
        """The same data under another name, dtype excepted."""
        result = self.with_stored(self.stored)
        result._info = self._info._replace(**changes)
        return result

    def write(self, source: Quantized) -> None:
        """Overwrite the data with those of a weight of the same shape, bit for bit."""
        for mine, other in zip(self._quantized.planes, source.planes, strict=True):
            mine.copy_(other)
        if self._quantized.amax is not None:
            assert source.amax is not None
            self._quantized.amax.copy_(source.amax)

    def narrowed(self, dim: int, start: int, length: int) -> NativeWeight | None:
        """A part that shares memory; None if it does not consist of whole blocks."""
        dim %= self.ndim
        if self.shape != self._matrix:
            return None
        start = start if length else 0
        specs, stored = native_planes(self.recipe), {}
        for name, tensor in self.stored.items():
            step = specs[name].step(dim - self.ndim)
            if step is None:
                stored[name] = tensor
                continue
            ends_within = (start + length) % step and start + length != self.shape[dim] and not self._is_blank
            if start % step or ends_within:
                return None
            begin = specs[name].size(dim - self.ndim, start)
            stored[name] = tensor.narrow(dim, begin, specs[name].size(dim - self.ndim, length))
        shape = torch.Size(length if d == dim else size for d, size in enumerate(self.shape))
        part = self.with_stored(stored, shape)
        if length != self.shape[dim] and dim - self.ndim in self.recipe.amax_dims:
            part._info = self._info._replace(groups=None)
        return part

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], NativeWeight):
            return handler(func, args, kwargs)
        _refuse_writes(func, args, kwargs)
        inner = compat.tree_map_only(NativeWeight, lambda weight: weight.dense(), (args, kwargs))
        return func(*inner[0], **inner[1])

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [name for name in (*PLANE_NAMES, "amax") if name in self.stored]
        return [f"stored_{name}" for name in names], (self._info, self._matrix, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> NativeWeight:
        info, matrix, dtype = context
        planes = tuple(inner[f"stored_{name}"] for name in PLANE_NAMES if f"stored_{name}" in inner)
        return NativeWeight(Quantized(planes, inner.get("stored_amax")), matrix, dtype, info)

    @classmethod
    def __metadata_guard__(cls, traced: Any, other: Any) -> bool:
        """Whether compiled code of one weight serves another: names and groups are nothing to it, so layers of one
        shape share one graph."""
        (info, *rest), (other_info, *other_rest) = traced, other
        return (info.recipe, info.whole, rest) == (other_info.recipe, other_info.whole, other_rest)

    @property
    def stored_elements(self) -> Tensor:
        return self._quantized.planes[0]

    @property
    def stored_scales(self) -> Tensor:
        return self._quantized.planes[1]

    @property
    def stored_amax(self) -> Tensor | None:
        return self._quantized.amax

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NativeWeight(shape={tuple(self.shape)}, dtype={self.dtype}, recipe={self.recipe})"


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _same(func: Any, args: Any, kwargs: Any) -> Any:
    weight = args[0]
    result = weight.with_stored(weight.stored)
    return result if weight.shape == weight._matrix else _viewed(result, weight.shape)


def _viewed(weight: NativeWeight, shape: torch.Size) -> NativeWeight:
    view = NativeWeight(weight._quantized, shape, weight.dtype, weight._info)
    view._matrix = weight._matrix
    return view


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    weight, shape = args[0], torch.empty(args[0].shape, device="meta").view(args[1]).shape
    return _viewed(weight, shape)


def _as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    weight, size, stride = args[:3]
    if torch.Size(size) == weight.shape and tuple(stride) == weight.stride() and not (args[3:] and args[3]):
        return _same(func, args, kwargs)
    return func(weight.dense(), *args[1:], **kwargs)


def _copied(func: Any, args: Any, kwargs: Any) -> Any:
    """``clone``, ``to``, ``empty_like``: the same of each plane; a dtype is that of what the weight stands for."""
    weight = args[0]
    options = {key: kwargs[key] for key in ("device", "pin_memory", "non_blocking") if kwargs.get(key) is not None}
    if func is aten.clone.default:
        options = {"memory_format": torch.contiguous_format}
    stored = {name: func(tensor, **options) for name, tensor in weight.stored.items()}
    result = weight.with_stored(stored)
    dtype = kwargs.get("dtype") or weight.dtype
    if dtype != weight.dtype:
        result = NativeWeight(result._quantized, weight._matrix, dtype, weight._info)
    return result if weight.shape == weight._matrix else _viewed(result, weight.shape)


def _slice(func: Any, args: Any, kwargs: Any) -> Any:
    weight: NativeWeight = args[0]
    rest: list[Any] = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
    dim, start, end, step = rest
    size = weight.shape[dim]
    begin, stop, _ = slice(start, end).indices(size)
    part = weight.narrowed(dim, begin, max(stop - begin, 0)) if step == 1 else None
    return func(weight.dense(), *args[1:], **kwargs) if part is None else part


def _split(func: Any, args: Any, kwargs: Any) -> Any:
    weight, size_or_sizes = args[:2]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % weight.ndim
    rows, sizes = weight.shape[dim], size_or_sizes
    if isinstance(size_or_sizes, int):
        sizes = [min(size_or_sizes, rows - begin) for begin in range(0, rows, size_or_sizes)] or [0]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    parts = [weight.narrowed(dim, start, size) for start, size in zip(starts, sizes, strict=True)]
    if any(part is None for part in parts):
        # fully_shard would keep a shard in high precision, without a word.
        raise NotImplementedError(
            f"Native parameter '{weight.info.name}' of shape {tuple(weight.shape)} is to be split along dim {dim} into "
            f"{sizes}, which cuts {weight.recipe.name} blocks of {native_block_of(weight.recipe, dim - weight.ndim)}. "
            "Under fully_shard choose a size whose parts are whole blocks, or use gtp_shard, which cuts between "
            "blocks; elsewhere split weight.dense()."
        )
    return parts


def _new_zeros(func: Any, args: Any, kwargs: Any) -> Any:
    """``fully_shard`` pads a shard with it: a weight of as many dims stays native."""
    weight, shape = args[0], torch.Size(args[1])
    if len(shape) != weight.ndim or kwargs.get("dtype") not in (None, weight.dtype):
        return func(_blank(weight), *args[1:], **kwargs)
    stored = {name: torch.zeros_like(tensor) for name, tensor in weight.stored.items() if name == "amax"}
    for name, spec in native_planes(weight.recipe).items():
        if name not in stored:
            stored[name] = weight.stored[name].new_zeros(spec.shape(shape), device=kwargs.get("device"))
    result = weight.with_stored(stored, shape)
    result._is_blank = True
    return result


def _blank(weight: NativeWeight) -> Tensor:
    """Of its shape and dtype, without values or memory."""
    return torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def _like(func: Any, args: Any, kwargs: Any) -> Any:
    """Ops that need no values: what they make is in high precision."""
    return func(_blank(args[0]), *args[1:], **kwargs)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[:2]
    if isinstance(source, NativeWeight) and source.recipe.name == target.recipe.name and _fits(target, source):
        target.write(source.quantized)
        return target
    values = source.dequantized_to(torch.float32) if isinstance(source, NativeWeight) else source
    if target.shape != target._matrix or target.is_meta:
        raise NotImplementedError(
            f"Native parameter '{target.info.name}' of shape {tuple(target._matrix)} cannot be written through a view "
            f"of shape {tuple(target.shape)} on {target.device}. Copy into the parameter itself."
        )
    values = values.to(target.device).expand(target.shape)
    target.write(quantize_parts([values], [target.info])[0])
    return target


def _fits(target: NativeWeight, source: NativeWeight) -> bool:
    return target._matrix == source._matrix and target.shape == source.shape


def _refuse_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Raises:
    NotImplementedError: ``func`` writes into a native weight.
    """
    schema = func._schema
    if not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, Sequence) else (value,):
            if isinstance(tensor, NativeWeight):
                raise NotImplementedError(
                    f"Parameter '{tensor.info.name}' of shape {tuple(tensor.shape)} has native storage "
                    f"({tensor.recipe.name}), which {func} cannot write. For training use "
                    "dtensor_gtp.optim.MasterOptimizer, which keeps masters in float32 and writes quantized values, "
                    "or storage='master'; else freeze the parameter with requires_grad_(False). To write values, use "
                    "copy_, which quantizes them."
                )


_HANDLERS: MappingProxyType[Any, Callable[[Any, Any, Any], Any]] = MappingProxyType(
    {
        aten._pin_memory.default: _copied,
        aten._to_copy.default: _copied,
        aten.alias.default: _same,
        aten.as_strided.default: _as_strided,
        aten.clone.default: _copied,
        aten.copy_.default: _copy,
        aten.detach.default: _same,
        aten.empty_like.default: _copied,
        aten.full_like.default: _like,
        aten.new_empty.default: _like,
        aten.new_full.default: _like,
        aten.new_ones.default: _like,
        aten.new_zeros.default: _new_zeros,
        aten.ones_like.default: _like,
        aten.rand_like.default: _like,
        aten.randn_like.default: _like,
        aten.slice.Tensor: _slice,
        aten.split.Tensor: _split,
        aten.split_with_sizes.default: _split,
        aten.view.default: _view,
        aten.zeros_like.default: _like,
    }
)


def native_of(param: Tensor) -> NativeWeight | None:
    """The native weight that a parameter is or that is its local part; None if its storage is another."""
    local = compat.local_part(param)
    return local if isinstance(local, NativeWeight) else None
