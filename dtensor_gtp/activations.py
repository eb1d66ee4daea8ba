"""Activations that wait for their backward in host memory: which ones, a policy of selective checkpoints says.

torch has a word for it (``CheckpointPolicy.MUST_CPU_OFFLOAD``), which torch.compile follows; eager code recomputes
instead (2.11 to 2.13). ``torch.autograd.graph.save_on_cpu`` moves all that autograd saves, and compute waits for each
copy. So the copies are here, beside compute; who saves what, and when, stays torch's.

[Note: copies of activations]
A copy to the host reads memory of the compute stream. The tensor is held until the copy is complete or, where several
are under way, until the compute stream has been told to wait for the oldest: then its memory may be reused. What has
not left the device when its backward comes is used as it is. Loads are launched one checkpoint ahead: the recomputation
of a block launches those of the block that ran before it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from . import _torch_compat as compat

_MAX_LEAVING = 4  # copies to the host under way before compute waits for the oldest
_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)

_Policy = Callable[..., CheckpointPolicy | bool]


class SelectiveOffload:
    """Offloads what chosen ops return to the host until backward, and recomputes the rest: ``context_fn`` of
    ``torch.utils.checkpoint.checkpoint``. One object serves all blocks of a model, which load for one another ahead.

    Copies run beside compute, from and to pinned memory. The last outputs of a forward, which backward needs first,
    may stay on the device. An output that is written in place while it is copied raises torch's error for that. In code
    that torch.compile traces, pass the policy to ``create_selective_checkpoint_contexts``: torch offloads there.

    Args:
        policy_fn_or_list: Ops (``OpOverload``) whose outputs are offloaded, all others are recomputed; or a policy as
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it, which may answer
            ``CheckpointPolicy.MUST_CPU_OFFLOAD`` or ``PREFER_CPU_OFFLOAD``.

    Raises:
        TypeError: ``policy_fn_or_list`` is neither callable nor a list of ``OpOverload``.
        RuntimeError: In a forward that a CUDA graph records.

    Source: torch's ``CheckpointPolicy``; pytorch 170284 asks for this.

    Example:
        >>> from functools import partial
        >>> from torch.utils.checkpoint import checkpoint
        >>> offload = SelectiveOffload([torch.ops.aten.addmm.default])
        >>> run = partial(checkpoint, use_reentrant=False, context_fn=offload)
        >>> blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)]
        >>> x = torch.randn(4, 16)
        >>> for block in blocks:
        ...     x = run(block, x)
        >>> x.sum().backward()
    """

    def __init__(self, policy_fn_or_list: _Policy | Sequence[compat.OpOverload]) -> None:
        self._policy: _Policy
        if callable(policy_fn_or_list):
            self._policy = policy_fn_or_list
        else:
            ops = list(policy_fn_or_list) if isinstance(policy_fn_or_list, Sequence) else [policy_fn_or_list]
            if wrong := [op for op in ops if not isinstance(op, compat.OpOverload)]:
                raise TypeError(
                    f"SelectiveOffload expects a policy or a list of OpOverload, such as torch.ops.aten.mm.default, "
                    f"but got {wrong[0]!r} of type {type(wrong[0]).__name__}."
                )
            self._ops = frozenset(ops)
            self._policy = self._of_ops
        self._leaving: deque[_Offloaded] = deque()
        self._last: weakref.ref[_Region] | None = None
        self._stream: torch.Stream | None = None

    def _of_ops(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op in self._ops:
            return CheckpointPolicy.MUST_CPU_OFFLOAD
        return CheckpointPolicy.PREFER_RECOMPUTE

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of the forward and of the recomputation of one checkpoint."""
        region = _Region(self, self._last)
        self._last = weakref.ref(region)
        return compat.checkpoint_contexts(region.decide, region.store)

    def _stream_for(self, device: torch.device) -> torch.Stream | None:
        """Where copies run; None on a CPU."""
        if device.type != "cpu" and self._stream is None:
            self._stream = torch.Stream(device)
        if device.type == "cpu":
            return None
        return self._stream

    def _leave(self, offloaded: _Offloaded) -> None:
        """A copy to the host was launched. Let go of what has arrived."""
        self._leaving.append(offloaded)
        while self._leaving and (len(self._leaving) > _MAX_LEAVING or self._leaving[0].has_arrived):
            self._leaving.popleft().let_go()


class _Region:
    """One checkpoint: what its forward has offloaded."""

    def __init__(self, owner: SelectiveOffload, before: weakref.ref[_Region] | None) -> None:
        self._owner = owner
        self._before = before
        self._offloaded: list[weakref.ref[_Offloaded]] = []  # not loaded yet; what torch saves keeps them
        self._is_offloaded = False  # the output that torch stores next

    def decide(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> Any:
        """What torch is to do with the output of ``op``."""
        answer = self._owner._policy(context, op, *args, **kwargs)
        self._is_offloaded = answer in _OFFLOADS
        if self._is_offloaded:
            return CheckpointPolicy.MUST_SAVE
        return answer

    def store(self, saved: Any) -> Any:
        """What stands for a tensor that torch saves; ``saved`` has it as ``val``."""
        if not (self._is_offloaded and isinstance(saved.val, Tensor)):
            return saved
        local = compat.local_part(saved.val)
        if type(local) is not Tensor:  # a subclass that may have several tensors: it stays
            return saved
        offloaded = _Offloaded(self, saved, local, self._owner._stream_for(local.device))
        self._offloaded.append(weakref.ref(offloaded))
        self._owner._leave(offloaded)
        return offloaded

    def load(self) -> None:
        """The recomputation begins: bring back what it needs, and ahead of its turn what the checkpoint before does."""
        if self._before is None:
            before = None
        else:
            before = self._before()
        for region in (self, before):
            waiting = [] if region is None else region._offloaded
            while waiting:
                if (offloaded := waiting.pop(0)()) is not None:
                    offloaded.load()


class _Offloaded:
    """An output on its way to the host, there, or on its way back. torch asks it for the value."""

    def __init__(self, region: _Region, saved: Any, local: Tensor, stream: torch.Stream | None) -> None:
        self._value: Tensor | None = None
        self._loaded: torch.Event | None = None
        if stream is not None and compat.is_stream_capturing():
            raise RuntimeError(
                "SelectiveOffload cannot be recorded in a CUDA graph: the host looks which copies are complete. Use "
                "torch.utils.checkpoint.create_selective_checkpoint_contexts, which saves or recomputes."
            )
        self._region = region
        self._stream = stream
        self._owner = _current(stream)  # of the memory on the device
        self._saved: Any = saved  # until the copy is complete
        self._device = local.device
        self._as_saved = _as(saved.val)
        with compat.unseen_by_checkpoint_policies(), torch.no_grad():
            self._host = torch.empty_like(local, device="cpu", pin_memory=stream is not None)
            self._copied = _copy(self._host, local, stream)

    @property
    def has_arrived(self) -> bool:
        """Whether the copy to the host is complete, or nobody needs it any more."""
        return self._saved is None or self._copied is None or self._copied.query()

    def let_go(self) -> None:
        """Free the memory on the device. Raises torch's error if the output was written since it was saved."""
        saved = self._saved
        self._saved = None
        if saved is not None:
            if self._copied is not None and self._owner is not None:
                # The owner reuses the memory that the copy still reads.
                self._owner.wait_event(self._copied)
            saved.get_val(False)

    def load(self) -> None:
        """Begin to copy back."""
        if self._saved is None and self._value is None:
            self._owner = _current(self._stream)
            with compat.unseen_by_checkpoint_policies(), torch.no_grad():
                self._value = torch.empty_like(self._host, device=self._device)
                self._loaded = _copy(self._value, self._host, self._stream)

    def get_val(self, allow_cache_entry_mutation: bool) -> Any:
        """The value, on the current stream. torch calls it once."""
        self._region.load()
        if self._saved is not None:  # it has not left
            saved = self._saved
            self._saved = None
            return saved.get_val(allow_cache_entry_mutation)
        self.load()
        value = self._take()
        assert value is not None
        return self._as_saved(self._on_current_stream(value))

    def _take(self) -> Tensor | None:
        """The loaded tensor; the stream that owns its memory waits for it."""
        value = self._value
        self._value = None
        if value is not None and self._loaded is not None and self._owner is not None:
            self._owner.wait_event(self._loaded)
        return value

    def _on_current_stream(self, value: Tensor) -> Tensor:
        """A copy in memory of the current stream, if another one owns ``value``."""
        reader = _current(self._stream)
        if reader is None or self._owner is None or reader == self._owner:
            return value
        reader.wait_event(self._owner.record_event())  # the owner has waited for the copy back
        with compat.unseen_by_checkpoint_policies(), torch.no_grad():
            value = value.clone()
        self._owner.wait_event(reader.record_event())  # which may reuse the memory then
        return value

    def __del__(self) -> None:
        self._take()  # it was loaded ahead, but the graph is dropped: its memory is not to be reused before it arrives


def _current(stream: torch.Stream | None) -> torch.Stream | None:
    """The current stream of the device of ``stream``; None without streams."""
    if stream is None:
        return None
    return torch.accelerator.current_stream(stream.device_index)


def _as(saved: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes a local tensor what ``saved`` was."""
    if saved is compat.local_part(saved):
        return lambda local: local
    spec = compat.dtensor_spec(saved)  # type: ignore[arg-type]
    return lambda local: compat.wrap_local(local, spec)


def _copy(target: Tensor, source: Tensor, stream: torch.Stream | None) -> torch.Event | None:
    """Copy behind all that the current stream was given; returns when it is complete, None: now."""
    if stream is None:
        target.copy_(source)
        return None
    # The current stream has made ``source``, or last used the memory of ``target``.
    stream.wait_event(torch.accelerator.current_stream(stream.device_index).record_event())
    with stream:
        target.copy_(source, non_blocking=True)
        return stream.record_event()
