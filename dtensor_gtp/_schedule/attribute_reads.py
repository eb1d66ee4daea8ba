"""Weights that code reads as attributes of modules.

[Note: frames]
Fused ops use a weight for one GEMM (see [Note: uses and holds] in ``gathering``). Other code reads
the full weight as a module attribute. The innermost running ``forward`` of a module with sharded
weights, its *frame*, holds it to the end. Autograd saves a handle that gathers again in backward. A
reference that lives longer keeps memory and right values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._params.gathered import Gathered, Version
from .._params.gradient import as_dense
from .._params.managed_param import ManagedParam
from .._params.refusals import check_differentiable, refuse_symbolic_tracing, switched, written_to_no_effect
from .._params.sharded_weight import Gatherable, ShardedWeight
from .._params.whole_param import WholeParam
from .gathering import Gathering
from .keep_and_free import Keeper
from .reduce_gradients import Gradients
from .saved_weights import SavedWeights, WeightUse


class _Known(NamedTuple):
    """What a frame has read."""

    version: Version
    value: Tensor
    gathered: Gathered


class Seen(NamedTuple):
    """A full weight that was handed out. It is a copy: writes to it do not reach the shard."""

    value: Tensor
    version: int
    bits: Tensor | None  # a sum of its bits, which writes through ``.data`` change, too
    address: int  # of its memory, which ``.data = ...`` changes
    is_trained: bool  # whether it requires a gradient

    @classmethod
    def of(cls, value: Tensor, looks_at_bits: bool) -> Seen:
        version = 0
        if not value.is_inference():  # such a tensor has no version
            version = value._version
        bits = None
        if looks_at_bits:
            bits = sum_of_bits(value)
        return cls(value, version, bits, _address(value), value.requires_grad)

    def is_switched(self, param: ManagedParam) -> bool:
        """Whether it was frozen or unfrozen, other than the parameter is."""
        now = self.value.requires_grad
        return now is not self.is_trained and now is not param.param.requires_grad

    @property
    def is_written(self) -> bool:
        if not self.value.is_inference() and self.value._version != self.version:
            return True
        if self.address and _address(self.value) not in (0, self.address):
            return True
        return self.bits is not None and is_changed(self.bits, sum_of_bits(self.value))


def _address(value: Tensor) -> int:
    """Where the values are; 0 where that says nothing: of subclasses, and of what a transform has
    wrapped."""
    local = compat.local_part(value)
    is_plain = type(local) in (Tensor, torch.nn.Parameter)
    if not is_plain or compat.in_func_transform() or local.is_meta:
        return 0
    return local.data_ptr()


def sum_of_bits(value: Tensor) -> Tensor | None:
    local = compat.local_part(value.detach())
    if type(local) is not Tensor or local.is_complex():
        return None
    # This is no op of the user: a selective checkpoint must not count, save or skip it.
    with compat.unseen_by_checkpoint_policies():
        return compat.as_integers(local).sum(dtype=torch.int64)  # an overflow wraps; one changed element always shows


def is_changed(before: Tensor | None, now: Tensor | None) -> bool:
    """Whether two sums of bits differ; False where one of them says nothing. The host waits."""
    if before is None or now is None:
        return False
    with compat.unseen_by_checkpoint_policies():
        return not torch.equal(before, now)


class Frame:
    """One running forward of a module, and the weights it holds."""

    def __init__(self, saved: SavedWeights | None = None) -> None:
        self.saved = saved  # None if autograd may keep full weights
        # What was read, by parameter and by whether it was read as differentiable.
        self.values: dict[tuple[ManagedParam, bool], _Known] = {}
        self.seen: list[tuple[ManagedParam, Seen]] = []  # copies that were read, as they were then
        self.held: list[tuple[Gatherable, Gathered]] = []  # uses that end with the frame


class AttributeReads:
    """The frames of one runtime, and what they have read."""

    def __init__(
        self, gathering: Gathering, keeper: Keeper, grads: Gradients, note_backward: Callable[[], None]
    ) -> None:
        self._gathering = gathering
        self._keeper = keeper
        self._grads = grads
        self._note_backward = note_backward
        self.frames: list[Frame] = []  # the innermost one is last
        self.in_backward = Frame()  # of reads in a backward outside of a recomputed forward
        self.saved_in_backward: list[WeightUse] = []  # that the running backward has gathered for handles
        self.is_differentiated = False  # whether the outermost forward began with gradients enabled
        # Whether reads of this forward sum up bits, to find writes that leave no version. It costs
        # time.
        self.looks_at_bits = False

    def push(self, saves_handles: bool) -> Frame:
        """Begin a frame. With ``saves_handles``, autograd saves handles of the weights that are
        read in it."""
        saved = None
        if saves_handles:
            saved = SavedWeights(self._gathering, self._note_backward, self.saved_in_backward)
        frame = Frame(saved)
        # First: if ``push`` is interrupted, whoever ends the frames finds this one.
        self.frames.append(frame)
        if saved is not None:
            saved.push()
        return frame

    def end(self, frame: Frame) -> None:
        """Release what the last frame holds; it stays in ``frames``. A second call does nothing."""
        assert self.frames[-1] is frame, "frames must end in the order in which they began, last first"
        if frame.saved is not None:
            frame.saved.pop()
        self._close(frame)

    @contextmanager
    def apart(self, *, is_forward: bool) -> Iterator[None]:
        """A frame for a pass of a block that is recorded. It shares no reads with code outside,
        because a recording reads fixed buffers instead of gathers. Only the forward saves handles,
        which the recorded backward asks for."""
        depth = len(self.frames)
        outside = self.saved_in_backward[:]
        self.saved_in_backward.clear()  # in place: handles of the forward know the list
        try:
            self.push(is_forward)
            yield
        finally:
            while len(self.frames) > depth:
                self.end(self.frames[-1])
                self.frames.pop()
            self._release_saved()
            self.saved_in_backward += outside

    def has_foreign_saved_hooks(self) -> bool:
        """Whether saved-tensor hooks are active that do not belong to frames."""
        # Take our pairs off, the innermost one first. Whatever is left belongs to others.
        hooks = compat.top_saved_tensors_hooks()
        for frame in reversed(self.frames):
            if hooks is not None and frame.saved is not None and frame.saved.is_packing(hooks):
                hooks = frame.saved.outer
        return hooks is not None

    def read(self, param: ManagedParam) -> Tensor:
        """The value of a module attribute in a forward or backward."""
        refuse_symbolic_tracing(param.fqn)
        frame = self.in_backward
        if self.frames:
            frame = self.frames[-1]
        if isinstance(param, WholeParam):
            value = param.value()
            # An optimizer in a backward counts writes to the leaf itself.
            if param.gives_copies and param.record_use is None and (self.frames or value is not param.leaf):
                frame.seen.append((param, Seen.of(value, self.looks_at_bits)))
            return value
        assert isinstance(param, ShardedWeight)
        is_differentiable = torch.is_grad_enabled() and param.param.requires_grad
        known = frame.values.get((param, is_differentiable))
        # An optimizer may step in the middle of a forward. Then the value is old, and gathered again.
        if known is not None and known.version == param.version:
            self._gathering.share(known.gathered)
            return known.value
        # -1: no backward runs. This read may be the first that tells of a backward.
        if not self.frames and compat.current_graph_task_id() != -1:
            self._note_backward()
        if is_differentiable:
            check_differentiable(param)
        gathered = self._acquire(param)
        frame.held.append((param.for_forward, gathered))  # first: if the rest raises, the end of the frame releases it
        if frame.saved is not None:
            frame.saved.watch(param, gathered)
        value = self._value(param, gathered, is_differentiable)
        frame.values[(param, is_differentiable)] = _Known(param.version, value, gathered)
        if not gathered.is_alias:  # without peers the shard itself is read, and written
            frame.seen.append((param, Seen.of(value, self.looks_at_bits)))
        return value

    def has_given(self, value: object) -> bool:
        """Whether ``value`` is a full weight that a running forward has read."""
        return any(value is known.value for frame in self.frames for known in frame.values.values())

    @property
    def gives_full_params(self) -> bool:
        """Whether ``parameters()`` yields gathered weights: in a forward. Where a forward with
        gradients has disabled them, it yields shards. Code that writes to parameters does so there
        (momentum encoders)."""
        return bool(self.frames) and (torch.is_grad_enabled() or not self.is_differentiated)

    def note_parametrized(self, weight: ManagedParam) -> None:
        """A parametrization has taken the full weight. Torch has called ``value.set_(value)``,
        unless there was a ``right_inverse``: that counts as a write and is none."""
        for frame in (*self.frames, self.in_backward):
            gathers = [gathered for held, gathered in frame.held if held.weight is weight]
            values = [gathered.contiguous() for gathered in gathers]
            for i, (other, seen) in enumerate(frame.seen):
                is_itself = other is weight and any(map(seen.value.is_set_to, values))
                if is_itself and seen.value._version == seen.version + 1:
                    frame.seen[i] = other, seen._replace(version=seen.version + 1)

    def misuse_in(self, frame: Frame, where: str = "in a forward") -> RuntimeError | None:
        """What code did to copies of parameters that it has read, to no effect. ``frame`` is ``in_backward`` outside
        of forwards."""
        for weight, seen in frame.seen:
            if seen.is_written:
                return written_to_no_effect(weight, where)
            if seen.is_switched(weight):
                return switched(weight, where)
            is_fused = isinstance(weight, ShardedWeight) and weight.fused.is_any
            if is_fused and seen.value.requires_grad and compat.tensor_hooks(seen.value):
                return RuntimeError(
                    f"A forward registered a hook on the gathered parameter '{weight.fqn}' of "
                    f"shape {tuple(weight.param.shape)}, but the layer does not read its weight, "
                    f"so the hook would never run (rank {dist.get_rank()}). Register it once, "
                    "outside of forward, on the parameter that named_parameters() yields: it gets "
                    "the averaged gradient."
                )
        return None

    def read_pinned(self, weight: ShardedWeight) -> Tensor:
        """The value of a weight that the user has unsharded, outside of any forward."""
        gathered = self._acquire(weight)
        is_differentiable = torch.is_grad_enabled() and weight.param.requires_grad
        try:
            if gathered.seen is None:
                gathered.seen = {}
            seen: Seen | None = gathered.seen.get(is_differentiable)
            if seen is not None:
                return seen.value  # one object for all who read it: ``.data = ...`` changes that alone
            if is_differentiable:
                check_differentiable(weight)
            value = self._value(weight, gathered, is_differentiable)
            if not gathered.is_alias:
                gathered.seen[is_differentiable] = Seen.of(value, looks_at_bits=True)
            return value
        finally:
            # The weight is pinned, so this keeps the gather, see ``Keeper.stays``.
            self._gathering.release(weight.for_forward, gathered)

    def full_params(self, members: Iterator[tuple[str, Any]], managed: Mapping[int, ManagedParam]) -> Iterator[Any]:
        """``members`` of ``named_parameters()`` with the full weights of those in ``managed``, by
        id. They are held as long as the caller holds them: one who goes over a model needs memory
        for one at a time."""
        for name, member in members:
            param = managed.get(id(member))
            if param is None or not isinstance(member, DTensor) or param.registration.is_cut_again:
                yield name, member
                continue
            refuse_symbolic_tracing(param.fqn)
            if isinstance(param, WholeParam):
                value, is_alias = param.value(), not param.gives_copies
            else:
                assert isinstance(param, ShardedWeight)
                value, is_alias = self.value_in_passing(param)
            seen = Seen.of(value, looks_at_bits=False)
            yield name, value
            # The caller asks for the next one, so it is done with this one.
            if seen.is_switched(param):
                raise switched(param, "in a forward")
            if seen.is_written and not is_alias:
                raise written_to_no_effect(param, "in a forward")

    def value_in_passing(self, weight: ShardedWeight) -> tuple[Tensor, bool]:
        """The full weight, which no frame holds, and whether it is the shard itself."""
        is_differentiable = torch.is_grad_enabled() and weight.param.requires_grad
        if is_differentiable:
            check_differentiable(weight)
        gathered = self._acquire(weight)
        try:
            return self._value(weight, gathered, is_differentiable), gathered.is_alias
        finally:
            # The value holds its memory: a buffer is freed by reference count.
            self._gathering.release(weight.for_forward, gathered)

    def _acquire(self, weight: ShardedWeight) -> Gathered:
        """Gather a weight for code that may keep it as long as it likes."""
        gathered = self._gathering.acquire(weight.for_forward)
        self._keeper.leave_fixed(weight, gathered)
        return gathered

    def is_written_outside(self, weight: ShardedWeight) -> bool:
        """Whether somebody has written to what ``read_pinned`` gave."""
        kept = weight.for_forward.kept
        if kept is None or kept.seen is None:
            return False
        return any(seen.is_written for seen in kept.seen.values())

    def _value(self, weight: ShardedWeight, gathered: Gathered, is_differentiable: bool) -> Tensor:
        if not is_differentiable:
            return weight.for_modules(gathered)
        value: Tensor = _Materialize.apply(  # type: ignore[no-untyped-call]
            weight.leaf, weight, gathered, self._grads, self._note_backward
        )
        return value

    def misuse_outside(self) -> RuntimeError | None:
        """As ``misuse_in``, of code outside of passes, which reads copies of whole parameters after ``unshard``."""
        if compat.current_graph_task_id() != -1:
            return None  # the end of this backward looks
        misuse = self.misuse_in(self.in_backward, "between unshard() and reshard()")
        self.in_backward.seen.clear()
        return misuse

    def release_read_in_backward(self) -> None:
        """Release the weights that this backward has read and still holds."""
        self._close(self.in_backward)
        self._release_saved()

    def _release_saved(self) -> None:
        while self.saved_in_backward:  # handles that the backward did not need
            self.saved_in_backward.pop().release(self._gathering)

    def _close(self, frame: Frame) -> None:
        # These refer to the buffers. A release poisons a buffer only if nobody else refers to it.
        frame.values.clear()
        frame.seen.clear()
        while frame.held:
            self._gathering.release(*frame.held.pop())


class _Materialize(torch.autograd.Function):
    """The full weight as a differentiable function of its shard. Its backward reduce-scatters the
    gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: Tensor,  # has no elements: it stands for the parameter in autograd's graph
        weight: ShardedWeight,
        gathered: Gathered,
        grads: Gradients,
        note_backward: Callable[[], None],
    ) -> Tensor:
        # Not ``gathered``: the graph would keep the buffer until backward.
        ctx.weight = weight
        ctx.grads = grads
        ctx.note_backward = note_backward
        return weight.for_modules(gathered)

    @staticmethod
    @compat.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        weight: ShardedWeight = ctx.weight
        ctx.note_backward()
        grad = as_dense(grad)
        if weight.tp_spec is not None:
            placements = weight.tp_spec.placements  # autograd may bring others, e.g. ``Partial``
            grad = compat.local_tensor(grad.redistribute(placements=placements))  # type: ignore[attr-defined]
        # Autograd may give one gradient to several inputs, so send it without a copy only if nobody writes to it. One
        # rank makes it ``.grad``, float16 is divided in place, and microbatches without gradient sync are added to it.
        is_owned = weight.layout.world > 1 and weight.reduce_dtype != torch.float16
        ctx.grads.add_full(weight, grad, is_owned and weight.flags.sends_at_once)
        return None, None, None, None, None
