"""One recorded step: what its graph has baked in, the recording and its checks, and replays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import _torch_compat as compat
from .._howto import see
from .._modules.trees import map_tensors, tensors_in
from .._params.weight_group import WeightGroup
from .._schedule.runtime import Runtime
from .._schedule.steps import optimizer_steps
from .recorder import CudaRecorder, detached, versions_of, with_tensors

Place = tuple[Any, str]  # an object and the name of its attribute that is a gradient or None
PLAIN = (Tensor, nn.Parameter)


class RecordedStep:
    """The step ``fn`` as one graph, with everything that must live as long. See the notes in
    ``capture_step.py``."""

    def __init__(self, fn: Any, leaves: list[Any], spec: Any, around: Surroundings, recorder: CudaRecorder) -> None:
        self._around = around
        check_none_pinned(around.runtimes)
        check_none_in_flight(around.runtimes, "before it is recorded")
        self._inputs = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]  # where the graph reads them
        args, kwargs = compat.tree_unflatten(with_tensors(leaves, self._inputs), spec)
        self._hyperparameters = hyperparameters(around.optimizers)
        self._written: set[int] = set()  # ids of the parameters that the step writes to
        # And of those that optimizers step, whichever module has them.
        self._stepped: set[int] = set()
        self._grads_before = read_values(around.places)  # the graph adds to them
        drop_kept(around.runtimes)  # the graph would use these values in all replays
        for runtime in around.runtimes:
            runtime.comm.begin_recording()
            runtime.grads.launches.order.check(is_next_step=True)  # of the eager step before
        with around.put_back_on_error():
            self._record(lambda: fn(*args, **kwargs), recorder)
        # Of the graph's memory: each replay writes to it.
        self._grads_after = read_values(around.places)
        pending = [group.pending_grad for group in around.groups]
        self._owed_after = [(grads, set(grads.owed)) for grads in pending]  # copies: each step changes ``owed``

    def note_step(self, updated: set[int]) -> None:
        """An optimizer has stepped these parameters during the recording."""
        self._stepped |= updated

    def _record(self, step: Callable[[], Any], recorder: CudaRecorder) -> None:
        versions = versions_of(self._inputs)
        optimizer_steps().watchers.add(self)  # it calls ``note_step``
        try:
            self._replay, self._outputs = recorder.record(lambda: self._run(step))
        except Exception as error:
            raise RuntimeError(
                f"capture_step could not record the step: {type(error).__name__}: {error}. A "
                "recorded step must not wait for the GPU (item(), print of a tensor, GradScaler, "
                "copies from the host), use its own random generators, or leave gradients in "
                "flight (set_is_last_backward(False)). " + see("capture_a_step")
            ) from error
        finally:
            optimizer_steps().watchers.discard(self)
        self._check_recorded(versions)

    def _run(self, step: Callable[[], Any]) -> Any:
        """What is recorded. Returns the outputs, detached."""
        runtimes = self._around.runtimes
        before = _param_versions(runtimes)
        try:
            outputs = detached(step(), "A captured step")
            check_none_in_flight(runtimes, "when it ends")
            drop_kept(runtimes)  # here, because its events can be waited for in the recording only
        except Exception:  # the first clean-up of [Note: state of the runtime around graphs]
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
        # An optimizer that is not among ``optimizers``: nobody compares its hyperparameters.
        trained = {id(param) for param in self._around.module.parameters()}
        if self._stepped & trained - stepped_params(self._around.optimizers).keys():
            raise ValueError("capture_step expects all optimizers that the step uses. Pass them as optimizer.")
        self._check_constant("within the step")
        moved = self._around.moved()
        if moved is not None:
            raise RuntimeError(
                "capture_step expects a step that keeps tensors where they are, but this one "
                f"replaced {moved}. A replay would still use the old one. Write in place, e.g. "
                "with copy_()."
            )
        now = versions_of(self._inputs)
        for index, given in enumerate(self._inputs):
            if versions[index] != now[index]:
                raise ValueError(
                    "capture_step expects a step that only reads its inputs, but this one writes "
                    f"to one of shape {tuple(given.shape)}: a graph works on copies, so the write "
                    "would be lost. Return the value."
                )

    def _check_constant(self, when: str) -> None:
        before = self._hyperparameters
        now = hyperparameters(self._around.optimizers)
        for key in before.keys() | now.keys():
            if before.get(key) != now.get(key):
                name, number, index = key
                optimizer = self._around.optimizers[number]
                group = ""
                if len(optimizer.param_groups) > 1:
                    group = f" of group {index}"
                raise RuntimeError(
                    f"{type(optimizer).__name__}'s {name}{group} has changed from "
                    f"{before.get(key)} to {now.get(key)} {when}, but the graph always uses the "
                    "first value. Make it a tensor on the GPU and fill it in place, change it "
                    "outside of the step, or call reset() on the captured step. " + see("capture_a_step")
                )

    def replay(self, leaves: list[Any]) -> Any:
        """Run the step with these flattened arguments. Returns copies of its outputs."""
        around = self._around
        check_none_pinned(around.runtimes)
        check_none_in_flight(around.runtimes, "before it is replayed")
        self._check_constant("since the step was recorded")
        sources = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for target, source in zip(self._inputs, sources, strict=True):
            target.copy_(source, non_blocking=True)  # where the graph reads it
        self._replay()  # on the current stream, after the copies of the inputs
        # The tensors that the graph has written, at their addresses.
        write_values(around.places, self._grads_after)
        for pending, owed in self._owed_after:
            pending.owed |= owed  # sums that this microbatch leaves
        for runtime in around.runtimes:
            runtime.note_step(self._written)  # gathers and quantized data of these are stale
        return map_tensors(self._outputs, Tensor.clone)  # the next replay overwrites them


def drop_kept(runtimes: Sequence[Runtime]) -> None:
    """Drop gathered weights that are kept for later uses, but not those that ``unshard`` keeps."""
    for runtime in runtimes:
        for weight in runtime.members.weights:
            if not weight.is_pinned:
                runtime.keeper.drop_kept(weight)


def _param_versions(runtimes: Sequence[Runtime]) -> set[tuple[int, int, int]]:
    """For each managed parameter its id, its version and that of its data."""
    params = [param for runtime in runtimes for param in runtime.members.params]
    return {(id(param.param), param.param._version, param.shard._version + param.num_data_writes) for param in params}


def check_none_pinned(runtimes: Sequence[Runtime]) -> None:
    pinned = [weight.fqn for runtime in runtimes for weight in runtime.members.weights if weight.is_pinned]
    if pinned:
        raise RuntimeError(
            "capture_step expects weights that are gathered in the step, but unshard() keeps "
            f"{len(pinned)} of them ('{pinned[0]}', ...), whose old values a graph would always "
            "use. Call reshard() before."
        )


def check_none_in_flight(runtimes: Sequence[Runtime], when: str) -> None:
    for runtime in runtimes:
        runtime.drop_broken_backward()  # of a backward that raised
    if any(runtime.steps.are_in_flight for runtime in runtimes):
        raise RuntimeError(
            f"capture_step expects a step without gradients in flight {when}, but "
            "set_is_last_backward(False) has left some. Run the last backward of these "
            "microbatches eagerly, or all of them within the step."
        )


class Surroundings:
    """What a step finds beside its inputs, as it is now: modules, parameters, buffers, optimizer
    states, switches."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], runtimes: Sequence[Runtime]) -> None:
        self.module = module
        self.optimizers = optimizers
        self.runtimes = runtimes
        # By prefix of their parameters' names.
        self._modules = {}
        for name, submodule in module.named_modules():
            self._modules[f"{name}." if name else ""] = submodule
        self._outside = params_outside(module, optimizers)
        self._params = [*module.parameters(), *self._outside]
        self._binding = self._describe()
        self.places: list[Place]  # where a step finds and leaves gradients
        self.follow_moves()

    def follow_moves(self) -> None:
        """Tensors may be at other addresses, but what was bound before must still be."""
        # Addresses only, because a tensor that is moved away must not be kept alive.
        self._addresses = {
            (kind, name, where, part): address(tensor)
            for kind, where, held in self._dicts()
            for name, value in held.items()
            for part, tensor in enumerate(tensors_in(value))
        }
        self.places = [(param, "grad") for param in self._params]
        self.places += [place for runtime in self.runtimes for place in places_of_sums(runtime)]
        self._groups = self.groups

    @property
    def groups(self) -> list[WeightGroup]:
        return [group for runtime in self.runtimes for group in runtime.members.groups]

    def has_same_binding(self) -> bool:
        """Whether the same parameters are trained in the same way."""
        return self._describe() == self._binding

    def is_in_place(self) -> bool:
        """Whether all tensors that a graph reads are there, at the same addresses, and weights in
        the same groups."""
        if self.groups != self._groups:  # the first forward makes them
            return False
        now: list[Hashable] = []  # in the order of ``_addresses``, without keys: each call asks
        for *_, held in self._dicts():
            for value in held.values():
                now += map(address, tensors_in(value))
        return now == list(self._addresses.values())

    def renewed(self) -> Surroundings:
        return Surroundings(self.module, self.optimizers, self.runtimes)

    def moved(self) -> str | None:
        """For people: a tensor that has come, gone, or moved to another address; None if there is
        none."""
        before = self._addresses
        now = self.renewed()._addresses
        for key in before | now:
            if before.get(key) != now.get(key):
                kind, name, where, _ = key
                if kind.startswith("state of "):
                    return f"'{name}' in the {kind}"
                return f"{kind} '{where}{name}'"
        return None

    @contextmanager
    def put_back_on_error(self) -> Iterator[None]:
        """If the context raises, put back what was there: a failed recording has computed none of
        its new tensors."""
        dicts = [held for *_, held in self._dicts()]
        dicts += [optimizer.state for optimizer in self.optimizers]
        contents = [(held, dict(held)) for held in dicts]
        tensors: dict[int, Tensor] = {}  # by id
        for held in dicts:
            for value in held.values():
                tensors.update((id(t), t) for t in tensors_in(value) if type(t) in PLAIN)
        # Each with an alias, which keeps the memory that it has now.
        memory = [(tensor, tensor.detach()) for tensor in tensors.values()]
        grads = read_values(self.places)
        try:
            yield
        except BaseException:
            for runtime in self.runtimes:  # the second clean-up, which waits for nothing
                runtime.forget_recording()
            write_values(self.places, grads)
            for held, content in contents:
                held.clear()  # in place, because the modules hold these dicts
                held.update(content)
            for tensor, before in memory:
                # Moved in the recording, to memory that is never filled.
                if address(tensor) != address(before):
                    tensor.data = before
            raise

    def _dicts(self) -> Iterator[tuple[str, Any, dict[Any, Any]]]:
        """Where tensors are registered by name: their kind, a key of the dict within the kind, and
        the dict."""
        for prefix, module in self._modules.items():
            yield "parameter", prefix, module._parameters
            yield "buffer", prefix, module._buffers
        yield "parameter of an optimizer", "", dict(enumerate(self._outside))
        for number, optimizer in enumerate(self.optimizers):
            kind = f"state of {type(optimizer).__name__}"
            for index, state in enumerate(optimizer.state.values()):
                if not isinstance(state, dict):
                    state = {None: state}
                yield kind, (number, index), state

    def _describe(self) -> list[Any]:
        modules = self._modules.values()
        managed = [param for runtime in self.runtimes for param in runtime.members.params]
        registered = [param.registration.current for param in managed]
        return [
            [runtime.steps.is_last_backward for runtime in self.runtimes],
            [module.training for module in modules],
            [id(child) for module in modules for child in module._modules.values()],
            [id(param) for module in modules for param in module._parameters.values()],
            [param.requires_grad for param in self._params],
            list(stepped_params(self.optimizers)),  # by id
            [(id(param), param is not None and param.requires_grad) for param in registered],
            [id(param.shard) for param in managed],
            [list(vars(param.flags).values()) for param in managed],  # switches of ``GTPModule``
        ]


def places_of_sums(runtime: Runtime) -> list[Place]:
    """Where sums over microbatches are, beside ``.grad``."""
    owners: list[Any] = [*runtime.members.whole, *(param.gradient for param in runtime.members.params)]
    owners += [weight.pending_grad for weight in runtime.members.weights]
    owners += [group.pending_grad for group in runtime.members.groups]
    names = ("wide", "unsynced_grad", "unsharded", "unreplicated")
    return [(owner, name) for owner in owners for name in names if hasattr(owner, name)]  # each has some of them


def read_values(places: list[Place]) -> list[Tensor | None]:
    values = []
    for owner, name in places:
        value = getattr(owner, name)
        # A wide sum belongs to a gradient: without the gradient it is void.
        if name == "wide" and owner.param.grad is None:
            value = None
        values.append(value)
    return values


def write_values(places: list[Place], values: list[Tensor | None]) -> None:
    for (owner, name), value in zip(places, values, strict=True):
        setattr(owner, name, value)


def stepped_params(optimizers: Iterable[Optimizer]) -> dict[int, Tensor]:
    """All parameters that these optimizers step, by id."""
    stepped: dict[int, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            stepped.update((id(param), param) for param in group["params"])
    return stepped


def params_outside(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Parameters that optimizers step and ``module`` does not have, such as those of a criterion."""
    own = {id(param) for param in module.parameters()}
    return [param for identity, param in stepped_params(optimizers).items() if identity not in own]


def address(tensor: Tensor) -> Hashable:
    """Where the memory of a tensor, or of those that it wraps, begins."""
    if isinstance(tensor, DTensor):
        tensor = compat.local_tensor(tensor)
    if type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        return tuple(address(part) for part in parts if isinstance(part, Tensor))
    if tensor.layout is torch.strided:
        return tensor.data_ptr()
    return id(tensor)  # a sparse tensor has no address


def hyperparameters(optimizers: Iterable[Optimizer]) -> dict[tuple[str, int, int], Any]:
    """By name, index of the optimizer and index of its group."""
    return {
        (name, number, index): _value(value)
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }


def _value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_value, value))  # such as ``betas``
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu":
        return value.item()  # from the host: the graph has baked it in
    return OnDevice(value)  # the graph reads its present value


class OnDevice:
    """A tensor that a graph reads at its address: equal to the same tensor at the same address, and
    kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._address = address(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OnDevice):
            return False
        return self._tensor is other._tensor and self._address == other._address

    def __str__(self) -> str:
        return f"a tensor on '{self._tensor.device}'"
