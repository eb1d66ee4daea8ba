"""Calls of modules, of methods that count as their forward, and of blocks that are groups, as
frames of the runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.modules import module as nn_module

from .. import _torch_compat as compat
from .._dtensor.remedies import explain
from .._howto import see
from .._params.refusals import refuse_mutable_saves, refuse_recording
from .._schedule.attribute_reads import Frame
from .._schedule.block_uses import BlockUse, nodes_of, with_node
from .._schedule.passes import Entry
from .binding import BoundModule, Reads, ShardGroup, trains_unmanaged, unmanaged_params
from .input_casts import cast_floats
from .outside_of_modules import follow_pipelining
from .trees import map_tensors, tensors_in

ADVICE_FOR_JIT = (
    "Use torch.compile; or build the module again, load get_model_state_dict with "
    "full_state_dict=True, and give that one to torch.jit."
)

ADVICE_FOR_COMPILE = (
    "torch.compile(fullgraph=True) expects no call of a block whose weights gtp_shard gathers together. "
    "Compile each block instead, before you wrap it: block.compile(fullgraph=True). Or leave out fullgraph=True."
)

_WIDEST = 1 << 15  # features of a row; more numbers in a row are samples of sound


def call_in_frame(self: BoundModule, *args: Any, **kwargs: Any) -> Any:
    """``nn.Module._call_impl`` of modules whose call is a frame: all but those with a fused op."""
    binding = self._gtp_binding
    return _call(self, partial(binding.call_impl, self), args, kwargs)


def call_compiled_in_frame(self: BoundModule, *args: Any, **kwargs: Any) -> Any:
    """The same for ``_compiled_call_impl`` of those that were compiled before ``gtp_shard``."""
    return _call(self, self._gtp_binding.compiled_call, args, kwargs)


def _call(module: BoundModule, call: Any, args: Any, kwargs: Any, *method: Any) -> Any:
    """``method`` is its name and its ``Reads``, if it is not the forward."""
    # A part of a block gets here only outside of passes, or if it was compiled after ``gtp_shard``.
    is_of_group = module._gtp_binding.block is not None and not method
    # The compiler may inline this call. Ops of its graph gather single weights, but a group needs the
    # frame.
    if torch.compiler.is_compiling():
        if not is_of_group or compat.is_exporting():
            return _call_in_graph(module, call, args, kwargs)
        compat.break_graph(ADVICE_FOR_COMPILE)
    if compat.is_jit_tracing():
        what = type(module).__name__
        raise RuntimeError(f"torch.jit.trace cannot record a {what} after gtp_shard. {ADVICE_FOR_JIT}")
    # torch.compile(module) compiles what is called from here, but neither this frame (see below)
    # nor the runtime.
    compiler = compat.set_eval_frame(None)
    try:
        if compat.is_recording() and (params := module._gtp_binding.group.params):  # ``make_fx``
            refuse_recording("torch.fx", params[0].fqn)
        if module._gtp_binding.input_casts is not None:
            args, kwargs = module._gtp_binding.input_casts.of(module, args, kwargs)
        if is_of_group:
            return _call_block(module, call, args, kwargs, compiler)
        return _call_in_frame(module, call, args, kwargs, compiler, *method)
    finally:
        compat.set_eval_frame(compiler)


# Where these frames are not inlined, the compiler lets them run and compiles what they call.
for _code in (call_in_frame.__code__, call_compiled_in_frame.__code__, _call.__code__):
    compat.skip_code(_code)


def as_forward(stock: Callable[..., Any], method: str) -> Callable[..., Any]:
    """A function of a module whose calls of the bound method ``stock``, by name ``method``, are frames."""
    reads = Reads()  # of this method alone, not of forward

    def call(self: BoundModule, *args: Any, **kwargs: Any) -> Any:
        return _call(self, stock, args, kwargs, method, reads)

    compat.skip_code(call.__code__)
    # The function behind the bound method, so that the signature keeps all arguments when this one
    # is bound.
    function = getattr(stock, "__func__", stock)
    return functools.wraps(function)(call)


def _call_in_graph(module: BoundModule, call: Any, args: Any, kwargs: Any) -> Any:
    """The call while the compiler traces it: frames are opened outside of compiled code, if at
    all."""
    binding = module._gtp_binding
    group = binding.group
    if compat.is_exporting() and group.params:
        refuse_recording("torch.export", group.params[0].fqn)
    if group.module is not module:
        if binding.input_casts is not None:
            args, kwargs = binding.input_casts.of(module, args, kwargs)
        return call(*args, **kwargs)
    args, kwargs = _cast_inputs(group, args, kwargs)
    return cast_floats(call(*args, **kwargs), group.arguments.mp_policy.output_dtype)


def _call_in_frame(
    module: BoundModule, call: Any, args: Any, kwargs: Any, compiler: Any, method: str = "forward", reads: Any = None
) -> Any:
    binding = module._gtp_binding
    runtime = binding.group.runtime
    _check_added(binding.group)
    if not runtime.setup.is_done:  # for the choice of groups
        runtime.setup.expect_tokens(_num_tokens((args, kwargs)))
        if not runtime.is_materializing:
            _set_up(runtime)
            if binding.block is not None and method == "forward":  # a block by now
                return _call_block(module, call, args, kwargs, compiler)
    if reads is None:
        reads = binding.reads  # a registered method has its own
    run = partial(_run, module, reads, call, args, kwargs, compiler)
    output = _in_frame(module, reads.may_read, run, method)
    # The outermost frame has ended, and no backward runs whose recomputation this would be.
    if not runtime.is_materializing and torch.is_grad_enabled():
        follow_pipelining()  # which the user may import at any time
        # Tell the runtime when a backward through the output begins, so that its first gathers
        # start at once.
        note = partial(runtime.note_backward, Entry(module, method))
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: note())
    return output


def _call_block(block: BoundModule, call: Any, args: Any, kwargs: Any, compiler: Any) -> Any:
    """A use of the group of ``block``, which is a block or a part of one."""
    group = block._gtp_binding.weight_group
    runtime = block._gtp_binding.group.runtime
    is_compiled = compiler is not None or block._compiled_call_impl is not None

    def run(frame: Frame) -> tuple[Any, BlockUse | None, set[Node]]:
        nonlocal args, kwargs
        was_in_pass = group.views.is_in_pass
        gathered = use = None
        try:
            gathered = runtime.gathering.acquire(group.for_forward)
            args, kwargs = _inputs_of_call(block, args, kwargs)
            seen = None  # versions and bits, to find writes through ``.data``
            if runtime.reads.looks_at_bits:
                seen = group.leaves.seen()
            inputs: set[Node] = set()
            if torch.is_grad_enabled():
                refuse_mutable_saves(group.fqn)
                use = BlockUse(runtime, group)
                # Now, because the block may write its inputs and change the containers.
                tensors = list(tensors_in((args, kwargs)))
                if any(tensor.requires_grad and tensor.grad_fn is None for tensor in tensors):
                    args, kwargs = map_tensors((args, kwargs), with_node)
                    tensors = list(tensors_in((args, kwargs)))
                inputs = nodes_of(tensors)
            if is_compiled or not was_in_pass:
                # Outside of a pass modules have shards; compiled code takes plain dicts alone.
                group.views.show(is_compiled=is_compiled)
            output = _output_of_call(block, _outside(group, _call_under(compiler, call, args, kwargs)))
            misuse = None
            if seen is not None:
                misuse = group.untraced_write(seen)
            misuse = misuse or runtime.lost_writes.written_in_use(group)
            if misuse is not None:
                raise misuse
            return output, use, inputs
        except BaseException:
            # Code that stops a forward so may have kept what the block has computed. In a backward, checkpoints
            # stop their recomputations so.
            if use is not None and compat.current_graph_task_id() == -1:
                use.keep()
            raise
        finally:
            # Back to ``FullParams``: plain dicts would give other code weights whose memory is freed.
            if is_compiled or not was_in_pass:
                group.views.show(is_in_pass=was_in_pass)
            if gathered is not None:
                # Frees the weights, unless they are kept.
                runtime.gathering.release(group.for_forward, gathered)

    _check_added(block._gtp_binding.group)
    # Autograd saves leaves of a group as they are, without hooks: their memory is refilled for its
    # backward.
    output, use, inputs = _in_frame(block, lambda num_steps: False, run)
    if use is not None:
        use.watch(inputs, tensors_in(output))  # begins and ends the backward of this use
    return output


def _outside(group: Any, output: Any) -> Any:
    """What a block returns, with copies of its weights, whose memory is freed next."""
    if any(map(group.leaves.has_memory_of, tensors_in(output))):
        return map_tensors(output, group.leaves.outside)
    return output


def _check_added(group: ShardGroup) -> None:
    """Refuse parameters that were added since the last outermost call."""
    runtime = group.runtime
    if torch.is_grad_enabled() and not runtime.reads.frames:
        # Once a step, as containers change without a registration (``ModuleList.insert``), and
        # modules are unfrozen.
        now = _registrations()[0], runtime.steps.num_trained
        if group.checked != now:
            if trains_unmanaged(group):
                _refuse_added_params(group)
            group.checked = now


def _set_up(runtime: Any) -> None:
    """Choose groups before the first call is taken for one of a block or not."""
    try:
        runtime.setup.ensure()
    except torch.OutOfMemoryError as error:
        error.add_note(see("memory_too_high"))
        raise


def forward_in_frame(module: BoundModule, stock: Callable[..., Any], *args: Tensor | None) -> Tensor:
    """The stock forward, which reads the weight as an attribute, in a frame of its own; in a group as a part of the
    block's forward, or outside of passes as a use of the block."""
    binding = module._gtp_binding
    if binding.block is not None:
        if binding.weight_group.views.is_in_pass:
            return cast("Tensor", stock(module, *args))
        return cast("Tensor", _call_block(module, partial(stock, module), args, {}, None))
    output: Tensor = _in_frame(module, lambda num_steps: True, lambda frame: stock(module, *args))
    return output


def _in_frame(
    module: BoundModule, needs_hooks: Callable[[int], bool], run: Callable[[Frame], Any], method: str = "forward"
) -> Any:
    """What ``run`` returns for a new frame."""
    runtime = module._gtp_binding.group.runtime
    depth = runtime.depth_of_call()
    frame = None  # until ``enter`` has returned
    is_complete = False
    try:
        try:
            frame = runtime.enter(module, needs_hooks, method)
            output = run(frame)
            is_complete = True
            return output
        except torch.OutOfMemoryError as error:
            if len(runtime.reads.frames) == 1:  # the outermost frame, so that it is said once
                error.add_note(see("memory_too_high"))
            raise
        except RuntimeError as error:
            policy = module._gtp_binding.group.arguments.mp_policy
            explain(error, is_cast=policy.param_dtype is not None)
            raise
        finally:
            if frame is not None:
                runtime.exit(frame, is_complete)
    finally:
        # Also if a KeyboardInterrupt has ended one of the lines above in the middle.
        runtime.leave(depth)


def _run(module: BoundModule, reads: Reads, call: Any, args: Any, kwargs: Any, compiler: Any, frame: Frame) -> Any:
    """The call within its frame, with inputs and outputs as the policies ask."""
    runtime = module._gtp_binding.group.runtime
    args, kwargs = _inputs_of_call(module, args, kwargs)
    if compiler is not None or module._compiled_call_impl is not None:
        # Compiled code drops gradients of tensors that a collective has yet to fill.
        args, kwargs = compat.complete_collectives((args, kwargs))
    output = _output_of_call(module, _call_under(compiler, call, args, kwargs))
    # Only here, because a call that raised may not have come to its reads.
    reads.learn(bool(frame.held), runtime.steps.num_steps)
    return output


def _inputs_of_call(module: BoundModule, args: Any, kwargs: Any) -> Any:
    """In its frame, the inputs of a module that ``gtp_shard`` was called on, as its policy asks."""
    group = module._gtp_binding.group
    if group.module is not module:
        return args, kwargs
    runtime = group.runtime
    if runtime.device.type != "cpu" and len(runtime.reads.frames) == 1:
        args, kwargs = to_device((args, kwargs), runtime.device)
    return _cast_inputs(group, args, kwargs)


def _output_of_call(module: BoundModule, output: Any) -> Any:
    group = module._gtp_binding.group
    if group.module is not module:
        return output
    return cast_floats(output, group.arguments.mp_policy.output_dtype)


def _call_under(compiler: Any, call: Any, args: Any, kwargs: Any) -> Any:
    """The call itself runs again under the compiler that was active around the frame."""
    if compiler is None:
        return call(*args, **kwargs)
    compat.set_eval_frame(compiler)
    try:
        return call(*args, **kwargs)
    finally:
        compat.set_eval_frame(None)  # for the rest of the frame


def _num_tokens(inputs: Any) -> int:
    """How many rows a first forward multiplies with a weight: ids of tokens, else rows of features. 0 if
    that is not known, as for images and sound: numbers beside them are labels or steps in time."""
    num_ids = num_flat = num_rows = 0
    has_signals = False
    for tensor in tensors_in(inputs):
        if tensor.dtype is torch.bool or tensor.is_complex():
            continue  # a mask may have a number for each pair of tokens
        is_real = tensor.is_floating_point()
        if tensor.ndim > 3 or (is_real and tensor.ndim > 1 and tensor.shape[-1] > _WIDEST):
            has_signals = True
        elif is_real and tensor.ndim > 1:
            num_rows = max(num_rows, tensor.numel() // max(tensor.shape[-1], 1))
        elif tensor.ndim > 1:
            num_ids = max(num_ids, tensor.numel())
        elif not is_real:
            num_flat = max(num_flat, tensor.numel())  # ids of packed sequences, labels, or counts
    if num_ids:
        return num_ids
    if has_signals:
        return 0
    return max(num_flat, num_rows)


def _refuse_added_params(group: ShardGroup) -> None:
    """Refuse a parameter that nobody manages or ignores: it would train on this rank's data alone,
    silently."""
    axes = group.arguments.mesh.mesh_dim_names
    for fqn, site, param in unmanaged_params(group.module):
        if param.requires_grad and site not in group.unmanaged:
            raise RuntimeError(
                f"Parameter '{fqn}' of shape {tuple(param.shape)} was added after gtp_shard, so "
                f"its gradient is not reduced over mesh axes {axes} (rank {dist.get_rank()}). "
                "Change the module before gtp_shard, or call shard_added(model) before you create "
                "the optimizer. If the parameter must stay local, pass it in ignored_params. "
                f"{see('lora')}"
            )


@functools.cache
def _registrations() -> list[int]:
    """A list whose one element counts the modules and parameters that any module of this process is given."""
    count = [0]

    def increment(module: nn.Module, name: str, registered: object) -> None:
        count[0] += 1  # returns None, so torch registers what it was given

    # Never removed: one pair of hooks serves all runtimes of the process.
    nn_module.register_module_module_registration_hook(increment)
    nn_module.register_module_parameter_registration_hook(increment)
    return count


def _cast_inputs(group: ShardGroup, args: Any, kwargs: Any) -> Any:
    policy = group.arguments.mp_policy
    if not policy.cast_forward_inputs:
        return args, kwargs
    return cast_floats((args, kwargs), policy.param_dtype)


def to_device(tree: Any, device: torch.device) -> Any:
    """All tensors in inputs of the outermost module on ``device``, as ``fully_shard`` moves them."""
    return map_tensors(tree, lambda tensor: tensor.to(device))
