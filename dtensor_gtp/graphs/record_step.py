"""One recorded step: records it, checks the recording, replays it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from .. import _torch_compat as compat
from .._howto import see
from .._schedule.optimizer_steps import optimizer_steps
from .._schedule.runtime import Runtime
from .checks import check_none_in_flight, check_none_pinned
from .record_again import Surroundings, hyperparameters, read_values, stepped_params, write_values
from .recorder import CudaRecorder


class RecordedStep:
    """The step ``fn`` as one graph, with everything that must live as long. See the notes in ``capture_step.py``."""

    def __init__(self, fn: Any, leaves: list[Any], spec: Any, around: Surroundings, recorder: CudaRecorder) -> None:
        self._around = around
        check_none_pinned(around.runtimes)
        check_none_in_flight(around.runtimes, "before it is recorded")
        self._inputs = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
        args, kwargs = compat.tree_unflatten(with_tensors(leaves, self._inputs), spec)
        self._hyperparameters = hyperparameters(around.optimizers)
        self._written: set[int] = set()  # ids of the parameters that the step writes to
        self._stepped: set[int] = set()  # and of those that optimizers step, whichever module has them
        self._grads_before = read_values(around.places)  # the graph adds to them
        drop_kept(around.runtimes)
        for runtime in around.runtimes:
            runtime.comm.begin_recording()
            runtime.grads.launches.order.check(is_next_step=True)  # of the eager step before
        with around.put_back_on_error():
            self._record(lambda: fn(*args, **kwargs), recorder)
        self._grads_after = read_values(around.places)
        pending = [group.pending_grad for runtime in around.runtimes for group in runtime.groups]
        self._owed_after = [(each, set(each.owed)) for each in pending]

    def note_step(self, updated: set[int]) -> None:
        """An optimizer has stepped these parameters during the recording."""
        self._stepped |= updated

    def _record(self, step: Callable[[], Any], recorder: CudaRecorder) -> None:
        versions = versions_of(self._inputs)
        optimizer_steps().watchers.add(self)
        try:
            self._replay, self._outputs = recorder.record(lambda: self._run(step))
        except Exception as error:
            raise RuntimeError(
                f"capture_step could not record the step: {type(error).__name__}: {error}. A recorded step must not "
                "wait for the GPU (item(), print of a tensor, GradScaler, copies from the host), use its own random "
                "generators, or leave gradients in flight (set_is_last_backward(False)). " + see("capture_a_step")
            ) from error
        finally:
            optimizer_steps().watchers.discard(self)
        self._check_recorded(versions)

    def _run(self, step: Callable[[], Any]) -> Any:
        """What is recorded. Returns the outputs, detached."""
        runtimes = self._around.runtimes
        before = _param_versions(runtimes)
        try:
            outputs = compat.tree_map_only(Tensor, Tensor.detach, step())
            check_none_in_flight(runtimes, "when it ends")
            drop_kept(runtimes)  # here, because its events can be waited for in the recording only
        except Exception:
            with suppress(RuntimeError):  # CUDA may have ended the recording as void
                for runtime in runtimes:
                    runtime.abandon()
                drop_kept(runtimes)
            raise
        # An optimizer may leave no trace in versions.
        written = {number for number, *_ in _param_versions(runtimes) - before}
        self._written = written | stepped_params(self._around.optimizers).keys()
        return outputs

    def _check_recorded(self, versions: list[int]) -> None:
        """Refuse a step that a replay would not repeat; its inputs had these versions before."""
        trained = {id(param) for param in self._around.module.parameters()}
        if self._stepped & trained - stepped_params(self._around.optimizers).keys():
            raise ValueError("capture_step expects all optimizers that the step uses. Pass them as optimizer.")
        self._check_constant("within the step")
        if (moved := self._around.moved()) is not None:
            raise RuntimeError(
                f"capture_step expects a step that keeps tensors where they are, but this one replaced {moved}. A "
                "replay would still use the old one. Write in place, e.g. with copy_()."
            )
        for before, now, given in zip(versions, versions_of(self._inputs), self._inputs, strict=True):
            if before != now:
                what = f"a step that only reads its inputs, but this one writes to one of shape {tuple(given.shape)}"
                raise ValueError(
                    f"capture_step expects {what}: a graph works on copies, so the write would be lost. "
                    "Return the value."
                )

    def _check_constant(self, when: str) -> None:
        before, now = self._hyperparameters, hyperparameters(self._around.optimizers)
        for key in before.keys() | now.keys():
            if before.get(key) != now.get(key):
                name, number, index = key
                optimizer = self._around.optimizers[number]
                group = f" of group {index}" if len(optimizer.param_groups) > 1 else ""
                raise RuntimeError(
                    f"{type(optimizer).__name__}'s {name}{group} has changed from {before.get(key)} to "
                    f"{now.get(key)} {when}, but the graph always uses the first value. Make it a tensor on the GPU "
                    "and fill it in place, change it outside of the step, or call reset() on the captured step. "
                    + see("capture_a_step")
                )

    def replay(self, leaves: list[Any]) -> Any:
        """Run the step with these flattened arguments. Returns copies of its outputs."""
        around = self._around
        check_none_pinned(around.runtimes)
        check_none_in_flight(around.runtimes, "before it is replayed")
        self._check_constant("since the step was recorded")
        for target, source in zip(self._inputs, [leaf for leaf in leaves if isinstance(leaf, Tensor)], strict=True):
            target.copy_(source, non_blocking=True)
        self._replay()
        write_values(around.places, self._grads_after)
        for pending, owed in self._owed_after:
            pending.owed |= owed  # sums that this microbatch leaves
        for runtime in around.runtimes:
            runtime.note_step(self._written)
        return compat.tree_map_only(Tensor, Tensor.clone, self._outputs)


def drop_kept(runtimes: Sequence[Runtime]) -> None:
    """Drop gathered weights that are kept for later uses, but not those that ``unshard`` keeps."""
    for runtime in runtimes:
        for weight in runtime.weights:
            if not weight.is_pinned:
                runtime.keeper.drop_kept(weight)


def _param_versions(runtimes: Sequence[Runtime]) -> set[tuple[int, int, int]]:
    """For each managed parameter its id, its version and that of its shard."""
    params = [param for runtime in runtimes for param in runtime.params]
    return {(id(param.param), param.param._version, param.shard._version) for param in params}


def with_tensors(leaves: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """``leaves`` with others instead of its tensors."""
    remaining = iter(tensors)
    return [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def versions_of(tensors: list[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
