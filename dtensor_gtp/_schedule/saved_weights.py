"""What autograd saves of a gathered weight becomes a handle, which gathers it again in backward.

While a module that reads full weights runs its forward, a pair of saved-tensor hooks is active.
Tensors that are not views of such a weight go to the hooks that were active before (activation
checkpointing, ``save_on_cpu``). The hooks only save memory: without them a saved full weight stays
in memory until its backward, and the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._params.gathered import Gathered, Version
from .._params.refusals import check_unmodified
from .._params.sharded_weight import ShardedWeight
from .gathering import Gathering

_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(eq=False)
class WeightUse:
    """One weight in one frame: its handles, and the gather that serves them in backward."""

    weight: ShardedWeight
    version: Version
    num_saved: int = 0  # handles that autograd saved
    num_left: int = 0  # handles that the gather has yet to serve
    gathered: Gathered | None = None

    def release(self, gathering: Gathering) -> None:
        gathered = self.gathered
        self.gathered = None
        assert gathered is not None
        gathering.release(self.weight.for_backward, gathered)


class _Watched(NamedTuple):
    """A full weight, or one of the tensors that it consists of, and where that lies."""

    use: WeightUse
    part: str  # attribute of the weight; "" for the weight itself
    begin: int  # in its storage, in elements
    end: int
    dtype: torch.dtype


class _Handle(NamedTuple):
    """Replaces a saved view of a full weight, or of one of its tensors."""

    use: WeightUse
    part: str  # as in ``_Watched``
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the start of the part
    dtensor_spec: compat.DTensorSpec | None


class _Composed(NamedTuple):
    """Replaces a saved tensor subclass. Its parts are handles (float8 data of a weight) and saved
    tensors (scales)."""

    parts: dict[str, Any]
    compose: Callable[[dict[str, Tensor]], Tensor]
    dtensor_spec: compat.DTensorSpec | None


class _Delegated(NamedTuple):
    """Any other tensor, packed by the hooks that were active before ours."""

    hook: compat.UnpackHook
    packed: Any

    def unpack(self) -> Tensor:
        return self.hook(self.packed)


class _Saved(NamedTuple):
    """Any other tensor, if no other hooks are active."""

    tensor: Tensor  # detached, because an op that saves its output would keep itself alive
    version: int

    def unpack(self) -> Tensor:
        # Autograd does not check the version of a packed tensor.
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; expected "
                f"version {self.version} instead."
            )
        return self.tensor


class SavedWeights:
    """Saved-tensor hooks of one frame."""

    def __init__(self, gathering: Gathering, note_backward: Callable[[], None], in_use: list[WeightUse]) -> None:
        self._gathering = gathering
        self._note_backward = note_backward  # called before a backward gathers
        self._in_use = in_use  # gathered by the running backward, which releases them when it ends
        # By address of the storage. Weights that are gathered side by side share a storage.
        self._watched: dict[int, list[_Watched]] = {}
        # The hooks that were active before. Other tensors go to them.
        self.outer: tuple[compat.PackHook, compat.UnpackHook] | None = None

    def push(self) -> None:
        self.outer = compat.top_saved_tensors_hooks()
        compat.push_saved_tensors_hooks(self._pack, self._unpack)

    def pop(self) -> None:
        hooks = compat.top_saved_tensors_hooks()
        if hooks is not None and self.is_packing(hooks):  # or ``push`` was interrupted
            compat.pop_saved_tensors_hooks()
        # After the frame has released the weights, other tensors may get their addresses.
        self._watched = {}

    def is_packing(self, hooks: tuple[compat.PackHook, compat.UnpackHook]) -> bool:
        """Whether ``hooks`` are these."""
        return hooks[0] == self._pack

    def watch(self, weight: ShardedWeight, gathered: Gathered) -> None:
        """From now until ``pop``, replace what autograd saves of ``gathered``."""
        use = WeightUse(weight, gathered.version)
        for name, part in _parts_of(gathered.contiguous()).items():
            watched = self._watched.setdefault(part.untyped_storage().data_ptr(), [])
            begin = int(part.storage_offset())
            for index, other in enumerate(watched):
                # Read again: the same values, unless the forward has written the weight (an alias of
                # the shard) in between. What autograd saves from now on is what was written.
                if other.begin == begin:
                    if other.use.version != use.version:
                        watched[index] = _Watched(use, *other[1:])
                    break
            else:
                watched.append(_Watched(use, name, begin, _end_of(part), part.dtype))

    def _pack(self, tensor: Tensor) -> Any:
        if not self._watched:  # before a module is known to read no weights, all that it saves comes here
            return self._pack_as_it_is(tensor)
        spec = None
        if isinstance(tensor, DTensor):
            spec = compat.dtensor_spec(tensor)
        inner = compat.local_part(tensor)
        is_plain = type(inner) in _PLAIN
        parts = _parts_of(inner)
        part_spec = None  # ``_Composed`` has that of a subclass
        if is_plain:
            part_spec = spec
        handles = {}
        for name, part in parts.items():
            handle = self._handle(part, part_spec)
            if handle is not None:
                handles[name] = handle
        if not handles:
            return self._pack_as_it_is(tensor)
        for handle in handles.values():
            handle.use.num_saved += 1
        if is_plain:
            return handles[""]
        others = {name: _Saved(part.detach(), part._version) for name, part in parts.items() if name not in handles}
        # Not ``inner`` itself: the handles would not free its memory.
        _, context = inner.__tensor_flatten__()  # type: ignore[attr-defined]
        size = inner.size()
        stride = inner.stride()
        unflatten: Any = type(inner).__tensor_unflatten__  # type: ignore[attr-defined]

        def compose(parts: dict[str, Tensor]) -> Tensor:
            composed: Tensor = unflatten(parts, context, size, stride)
            return composed

        return _Composed({**handles, **others}, compose, spec)

    def _pack_as_it_is(self, tensor: Tensor) -> Any:
        if self.outer is not None:
            return _Delegated(self.outer[1], self.outer[0](tensor))
        return _Saved(tensor.detach(), tensor._version)

    def _handle(self, part: Tensor, spec: compat.DTensorSpec | None) -> _Handle | None:
        watched = self._watched.get(part.untyped_storage().data_ptr())
        if watched is None or part.is_conj() or part.is_neg():  # ``as_strided`` would lose such a bit
            return None
        offset = int(part.storage_offset())
        for use, name, begin, end, dtype in watched:
            if dtype != part.dtype:  # its offsets count other elements
                continue
            # A view of a weight that is alone in its storage may include the padding behind it.
            if len(watched) == 1 or (begin <= offset and _end_of(part) <= end):
                return _Handle(use, name, part.size(), part.stride(), offset - begin, spec)
        return None  # a view of several weights, or in another dtype

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, (_Delegated, _Saved)):
            return packed.unpack()
        if isinstance(packed, _Composed):
            view = packed.compose({name: self._unpack(part) for name, part in packed.parts.items()})
        elif packed.use.weight.form.wire is None and _is_ignored(packed):
            # Nobody reads the values, so nothing is gathered.
            dtype = packed.use.weight.compute_dtype
            device = packed.use.weight.device
            view = torch.empty_strided(packed.size, packed.stride, dtype=dtype, device=device)
        else:
            base = _parts_of(self._gathered_for(packed.use).contiguous())[packed.part]
            begin = int(base.storage_offset())
            view = torch.as_strided(base, packed.size, packed.stride, begin + packed.offset).detach()
            packed.use.num_left -= 1
            if packed.use.num_left == 0:
                self._in_use.remove(packed.use)
                packed.use.release(self._gathering)
        if packed.dtensor_spec is None:
            return view
        return compat.wrap_local(view, packed.dtensor_spec)

    def _gathered_for(self, use: WeightUse) -> Gathered:
        """Gather the weight for the first of its handles, and hold it until the last one is unpacked."""
        if use.gathered is None:
            check_unmodified(use.weight, use.version)
            # Not where code looks at ``grad_fn._saved_*`` outside of a backward: that unpacks, too.
            if compat.current_graph_task_id() != -1:
                self._note_backward()
            use.gathered = self._gathering.acquire(use.weight.for_backward)
            use.num_left = use.num_saved
            self._in_use.append(use)
        else:
            self._gathering.share(use.gathered)
        return use.gathered


# Autograd calls the hooks while torch.compile traces a module. It must not trace them.
for _hook in (SavedWeights._pack, SavedWeights._unpack):
    compat.skip_code(_hook.__code__, recursive=True)


def _is_ignored(handle: _Handle) -> bool:
    """Whether the op that unpacks the handle ignores its values, as a convolution's backward may
    ignore its weight."""
    packed = compat.ignored_saved_weight()
    while isinstance(packed, _Delegated):  # inner frames pass tensors on to the frame of the handle
        packed = packed.packed
    return packed is handle


def _end_of(tensor: Tensor) -> int:
    """Offset in the storage, in elements, behind the last element."""
    begin = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return begin
    dims = zip(tensor.size(), tensor.stride(), strict=True)
    return begin + sum((size - 1) * stride for size, stride in dims) + 1


def _parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that ``tensor`` consists of, by attribute (a plain tensor itself: ""), as
    far as it tells."""
    if tensor.layout is not torch.strided:  # a sparse tensor has no storage
        return {}
    if type(tensor) in _PLAIN:
        return {"": tensor}
    if not hasattr(tensor, "__tensor_flatten__"):
        return {}
    parts = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    if not all(type(part) in _PLAIN for part in parts.values()):
        return {}
    return parts
