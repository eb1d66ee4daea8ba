"""What autograd saves of a gathered weight is replaced by a handle that gathers it again in backward.

A pair of saved-tensor hooks is active during the forward of a module that reads full weights. Tensors that are not
views of such a weight go to the hooks that were active before (activation checkpointing, ``save_on_cpu``), as if ours
were not there. The hooks are an economy only: a full weight that is saved without them stays in memory until its
backward and is right.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .gathered import Gathered, Version
from .sharded_weight import Gatherable, ShardedWeight


class GathersAgain(Protocol):
    """Gathers weights in backward: the runtime."""

    def acquire(self, target: Gatherable) -> Gathered: ...

    def release(self, target: Gatherable, gathered: Gathered) -> None: ...

    def note_backward(self) -> None: ...

    def watch_saved(self, saved: SavedWeights) -> None: ...


class _WeightUse:
    """One weight in one frame: the handles saved of it, and the gather that serves them in backward."""

    def __init__(self, weight: ShardedWeight, version: Version) -> None:
        self.weight = weight
        self.version = version
        self.num_saved = 0
        self.num_left = 0
        self.gathered: Gathered | None = None


class _Watched(NamedTuple):
    """A full weight, or one of the tensors that it consists of, in its storage: where it begins and ends there."""

    use: _WeightUse
    part: int
    begin: int
    end: int
    dtype: torch.dtype


class _Handle(NamedTuple):
    """A saved view of a full weight, or of one of the tensors that it consists of; ``offset`` from its begin."""

    use: _WeightUse
    part: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtensor_spec: compat.DTensorSpec | None


class _Composed(NamedTuple):
    """A saved tensor of a subclass that consists of a full weight's tensors (float8 data) and others (scales)."""

    like: type[Tensor]
    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    dtensor_spec: compat.DTensorSpec | None


class _Delegated(NamedTuple):
    """Any other saved tensor, as the hooks around ours packed it."""

    unpack: compat.UnpackHook
    packed: Any


class _Saved(NamedTuple):
    """Any other saved tensor, where there are no hooks around ours.

    Detached, because an op that saves its own output would hold itself alive. Autograd checks no versions of what hooks
    have packed: it is done here.
    """

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; expected "
                f"version {self.version} instead."
            )
        return self.tensor


class SavedWeights:
    """Saved-tensor hooks of one frame.

    Args:
        runtime: Gathers and releases in backward.
    """

    def __init__(self, runtime: GathersAgain) -> None:
        self._runtime = runtime
        # By address of the storage of the full weight, or of each tensor that it consists of: which of them it is, and
        # where it begins. Weights that are gathered side by side share a storage.
        self._uses: dict[int, list[_Watched]] = {}
        self._outer: tuple[compat.PackHook, compat.UnpackHook] | None = None
        self._in_use: list[_WeightUse] = []

    def push(self) -> None:
        self._outer = compat.top_saved_tensors_hooks()
        compat.push_saved_tensors_hooks(self._pack, self._unpack)

    def pop(self) -> None:
        compat.pop_saved_tensors_hooks()
        # Addresses are unique only while the frame holds the weights.
        self._uses = {}

    @property
    def outer(self) -> tuple[compat.PackHook, compat.UnpackHook] | None:
        """The hooks that were active before."""
        return self._outer

    def is_packing(self, hooks: tuple[compat.PackHook, compat.UnpackHook]) -> bool:
        """Whether ``hooks`` are these."""
        return hooks[0] == self._pack

    def watch(self, weight: ShardedWeight, gathered: Gathered) -> None:
        """Replace what is saved of ``gathered`` from now on until ``pop``."""
        use = _WeightUse(weight, gathered.version)
        for index, part in enumerate(_parts_of(gathered.contiguous()).values()):
            watched = self._uses.setdefault(part.untyped_storage().data_ptr(), [])
            if all(other.begin != part.storage_offset() for other in watched):
                watched.append(_Watched(use, index, int(part.storage_offset()), _end_of(part), part.dtype))

    def _pack(self, tensor: Tensor) -> Any:
        spec = compat.dtensor_spec(tensor) if isinstance(tensor, DTensor) else None
        inner = compat.local_part(tensor)
        parts = _parts_of(inner)
        part_spec = spec if type(inner) in _PLAIN else None
        handles = {name: h for name, part in parts.items() if (h := self._handle(part, part_spec)) is not None}
        if not handles:
            if self._outer is not None:
                return _Delegated(self._outer[1], self._outer[0](tensor))
            return _Saved(tensor.detach(), tensor._version)
        for handle in handles.values():
            handle.use.num_saved += 1
        if type(inner) in _PLAIN:
            return handles[""]
        others = {name: _Saved(part.detach(), part._version) for name, part in parts.items() if name not in handles}
        context = inner.__tensor_flatten__()[1]  # type: ignore[attr-defined]
        return _Composed(type(inner), {**handles, **others}, context, inner.size(), inner.stride(), spec)

    def _handle(self, part: Tensor, spec: compat.DTensorSpec | None) -> _Handle | None:
        watched = self._uses.get(part.untyped_storage().data_ptr())
        if watched is None or part.is_conj() or part.is_neg():
            return None
        offset = int(part.storage_offset())
        for use, index, begin, end, dtype in watched:
            # Offsets of a view in another dtype count other elements.
            if dtype != part.dtype:
                continue
            # Alone in its storage, a weight also has the padding behind it.
            if len(watched) == 1 or (begin <= offset and _end_of(part) <= end):
                return _Handle(use, index, part.size(), part.stride(), offset - begin, spec)
        return None  # of several weights at once, or in another dtype: kept as it is

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Delegated):
            return packed.unpack(packed.packed)
        if isinstance(packed, _Saved):
            return packed.unpack()
        if isinstance(packed, _Composed):
            parts = {name: self._unpack(part) for name, part in packed.parts.items()}
            compose: Any = packed.like.__tensor_unflatten__  # type: ignore[attr-defined]
            view = compose(parts, packed.context, packed.size, packed.stride)
        elif packed.use.weight.wire is None and _is_ignored(packed):
            weight = packed.use.weight
            view = torch.empty_strided(
                packed.size, packed.stride, dtype=weight.compute_dtype, device=weight.shard.device
            )
        else:
            base = list(_parts_of(self._gathered_for(packed.use).contiguous()).values())[packed.part]
            begin = int(base.storage_offset())
            view = torch.as_strided(base, packed.size, packed.stride, begin + packed.offset).detach()
            packed.use.num_left -= 1
            if packed.use.num_left == 0:
                self._release(packed.use)
        return view if packed.dtensor_spec is None else compat.wrap_local(view, packed.dtensor_spec)

    def _gathered_for(self, use: _WeightUse) -> Gathered:
        """The weight in backward: gathered at the first of its handles, held until the last one is unpacked."""
        if use.gathered is None:
            check_unmodified(use.weight, use.version)
            if compat.current_graph_task_id() != -1:
                self._runtime.note_backward()
                if not self._in_use:
                    self._runtime.watch_saved(self)
            use.gathered = self._runtime.acquire(use.weight.for_backward)
            use.num_left = use.num_saved
            self._in_use.append(use)
        return use.gathered

    def _release(self, use: _WeightUse) -> None:
        gathered, use.gathered = use.gathered, None
        self._in_use.remove(use)
        if gathered is not None:
            self._runtime.release(use.weight.for_backward, gathered)

    def release_all(self) -> None:
        """The backward has ended: handles that it did not need (a branch without gradient) hold nothing any more."""
        for use in list(self._in_use):
            self._release(use)


# Autograd calls them in the middle of code that is being compiled, of which they are no part.
for _hook in (SavedWeights._pack, SavedWeights._unpack):
    compat.skip_code(_hook.__code__, recursive=True)


_PLAIN = (Tensor, torch.nn.Parameter)


def _is_ignored(handle: _Handle) -> bool:
    """Whether who asks for it does not look at the values: as a convolution's weight, not as its input, which may be of
    the same weight."""
    packed = compat.ignored_saved_weight()
    while isinstance(packed, _Delegated):  # by the frames within that of the handle
        packed = packed.packed
    return packed is handle


def _end_of(tensor: Tensor) -> int:
    """One beyond its last element, in elements of its storage."""
    spans = ((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + (sum(spans) + 1 if tensor.numel() else 0)


def _parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that ``tensor`` consists of, by attribute: itself under "" if it is plain. Subclasses that do
    not say what they consist of have none."""
    if type(tensor) in _PLAIN:
        return {"": tensor}
    if not hasattr(tensor, "__tensor_flatten__"):
        return {}
    parts = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return parts if all(type(part) in _PLAIN for part in parts.values()) else {}


def check_unmodified(weight: ShardedWeight, version: Version) -> None:
    """Raises:
    RuntimeError: The weight was written between the forward that used it and this backward, as autograd raises for
        any saved tensor.
    """
    if weight.version != version:
        raise RuntimeError(
            f"Parameter '{weight.fqn}' is needed for gradient computation, but it has been modified by an inplace "
            f"operation since its forward: it is at {weight.version}; expected {version}. Run backward before the "
            "optimizer step, or the forward again after it."
        )


def check_differentiable(weight: ShardedWeight) -> None:
    """Raises:
    NotImplementedError: A transform of ``torch.func`` asks for derivatives of a use of the weight.
    """
    if compat.in_func_transform():
        raise NotImplementedError(
            f"Transforms of torch.func (grad, vmap, jacrev, jvp) do not see gathers and reductions, so gtp_shard does "
            f"not support them on uses of parameter '{weight.fqn}' of shape {tuple(weight.layout.shape)}. Take "
            "derivatives with torch.autograd.grad or torch.autograd.functional, and run vmap under torch.no_grad()."
        )


def refuse_partial_recording(weight: ShardedWeight, is_capturing: bool) -> None:
    """Called in a backward that leaves out the gradient of a weight that is trained.

    Raises:
        RuntimeError: The backward is recorded, and would leave it out for ever.
    """
    if is_capturing:
        raise RuntimeError(
            f"A CUDA graph is recorded of a backward without the gradient of '{weight.fqn}', which is trained: "
            "torch.autograd.grad, as torch.cuda.make_graphed_callables calls it, does not know gradients of sharded "
            "weights. Use dtensor_gtp.capture_step for whole steps, dtensor_gtp.capture_blocks for single modules; "
            "where the gradient is not wanted, freeze the parameter with requires_grad_(False)."
        )
