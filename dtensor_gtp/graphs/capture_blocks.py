"""``capture_blocks``: each block of a model as a CUDA graph.

The compute of a block's forward and of its backward is recorded, a graph each, without
communication. Around a replay, eager code gathers the weights into buffers at fixed addresses and
reduces the gradients that the graph has left in others (see [Note: fixed buffers] in
``record_block.py``). So gathers and reductions overlap with graphs as with ops, and the collectives
are those of eager code: some ranks may replay what others run eagerly.

[Note: memory of a recorded block]
What forward saves for backward stays allocated: graphs of other blocks, which share the pool, must
not overwrite it. A forward before the backward of the last one would overwrite it, so it runs
eagerly.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .. import _torch_compat as compat
from .._modules.bad_arguments import refuse_in_flight
from .._modules.binding import bindings_of, params_of, unmanaged_params
from .._params.gathered import FixedBuffers
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from .record_block import Block, BlockGraph, Reached
from .recorder import (
    CudaRecorder,
    KnownCalls,
    check_at_least,
    check_buffers,
    check_on_gpu,
    check_places,
    returned_tensors,
    runtimes_of,
    signature,
)

logger = logging.getLogger("dtensor_gtp")


def capture_blocks(
    module: nn.Module, blocks: Iterable[nn.Module], *, warmup_calls: int = 3, max_graphs: int = 4
) -> CapturedBlocks:
    """Run blocks of a model as CUDA graphs where the whole step cannot be one.

    Each block's forward and backward become a graph. The code around the blocks (a data-dependent
    branch, the optimizer) and all collectives stay eager; collectives overlap with the graphs of
    other blocks.

    The ``forward`` of each block is replaced in place; hooks on the block run around it. The first
    ``warmup_calls`` calls with gradients run eagerly, the next one with inputs that have been seen
    is recorded. A block runs eagerly without gradients, under autocast, in a recomputation, with
    weights that ``unshard`` keeps, and where a forward comes before the backward of the last one
    (microbatches of a pipeline). Its weights are gathered again for backward in any case.

    It costs memory: two sets of full weights and full gradients for each kind of block, and what
    forward saves stays allocated between steps. ``prefetch_nbytes`` should be at least the bytes of
    a block's weights, because a graph waits for all of them. Prefer ``capture_step`` where the
    whole step can be recorded. Needs a GPU.

    It copies inputs, outputs and their gradients, and gradients that wait for others of a
    microbatch or a launch. Where a step does not wait for the host, these copies cost more than
    launches. ``torch.autograd.grad`` and ``backward(inputs=...)`` leave no other gradients, and
    ``torch.cuda.make_graphed_callables`` raises on modules with sharded parameters.

    Args:
        module: What ``gtp_shard`` was called on, or a module that contains such modules.
        blocks: Modules below it that do not contain each other. Arguments: any tree of tensors,
            which are copied, and other values, which are compared. Outputs, also in dataclasses,
            are copies; backward must reach the same ones as in the eager calls. Tensors that are
            attributes (a cache) must keep their address: this is not checked.
        warmup_calls: Eager calls of each block before its first recording, at least 2.
        max_graphs: Combinations of inputs that are recorded for one block; further ones run eagerly.

    Returns:
        A :class:`CapturedBlocks`, which can forget the graphs or give the blocks their own
        ``forward`` back.

    Raises:
        TypeError, ValueError: An argument is of the wrong kind or out of range.
        RuntimeError: The weights are not on a CUDA device.
        NotImplementedError: An outer ``fully_shard``, unequal replicas, recipes, tensor
            parallelism, exchanges of activations, compiled blocks, or parameters that ``gtp_shard``
            does not manage.

    The counterpart of ``torch.cuda.make_graphed_callables`` for sharded blocks.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(64, 64, device="cuda") for _ in range(4)))
        >>> mesh = init_weight_mesh("cuda")  # gtp=8 on eight GPUs
        >>> policy = SchedulePolicy(prefetch_nbytes=64 * 64 * 4)  # bytes of a block's weights
        >>> model = gtp_shard(model, mesh.weights, schedule=policy)
        >>> captured = capture_blocks(model, model)
        >>> for _ in range(6):
        ...     model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        ...     model.zero_grad()
        >>> captured.num_graphs
        4
    """
    blocks = list(blocks)
    device = runtimes_of(module, "capture_blocks")[0].device
    check_on_gpu("capture_blocks", module, device)
    return CapturedBlocks(module, blocks, CudaRecorder(device), warmup_calls, max_graphs)


def _give_buffers(blocks: Iterable[Block]) -> None:
    """Give the weights of each block fixed buffers: two sets for each kind of block, in turn."""
    num_blocks: Counter[Hashable] = Counter()
    buffers: dict[Hashable, tuple[Tensor, Tensor]] = {}
    for block in blocks:
        shapes = [
            (weight.layout.buffer_shape, weight.compute_dtype, weight.reduce_dtype, weight.shard.device)
            for weight in block.weights
        ]
        # A runtime knows who holds a fixed buffer among its own gathers and reductions only.
        kind = (block.runtime, *shapes)
        turn = num_blocks[kind] % 2  # one set is gathered or reduced while the other is in use
        num_blocks[kind] += 1
        for position, weight in enumerate(block.weights):
            key = (kind, turn, position)
            if key not in buffers:  # later blocks of the kind share them
                buffers[key] = weight.form.new_buffer(), weight.pending_grad.send_buffer()
            weight.form.fixed = FixedBuffers(*buffers[key], block)


class CapturedBlocks:
    """What :func:`capture_blocks` returns. Needs a GPU.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(64, 64, device="cuda") for _ in range(4)))
        >>> model = gtp_shard(model, init_weight_mesh("cuda").weights)
        >>> captured = capture_blocks(model, model)
        >>> for _ in range(6):
        ...     model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        ...     model.zero_grad()
        >>> captured.reset()
        >>> captured.num_graphs
        0
        >>> captured.remove()  # all blocks are eager again
    """

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module], recorder: CudaRecorder, warmup_calls: int, max_graphs: int
    ) -> None:
        check_at_least("capture_blocks", warmup_calls=(warmup_calls, 2), max_graphs=(max_graphs, 1))
        names = {submodule: name for name, submodule in module.named_modules()}
        # A module of two blocks is held twice, and so is a block inside of another one.
        held = Counter(inner for block in blocks for inner in block.modules())
        if not blocks or any(block not in names or held[block] > 1 for block in blocks):
            raise ValueError(
                f"capture_blocks expects modules below the {type(module).__name__} that do not "
                "contain each other as blocks, but got "
                f"{[names.get(block, type(block).__name__) for block in blocks]}."
            )
        runtimes = runtimes_of(module, "capture_blocks")
        refuse_in_flight(module, runtimes, "capture_blocks")  # groups have sums of microbatches
        for runtime in runtimes:
            runtime.split_groups()  # only single weights have fixed buffers
            if runtime.setup.is_done:
                runtime.setup.prepare_gatherables()
        owners: dict[ManagedParam, str] = {}
        owns = [_checked(names[block], block, recorder, owners) for block in blocks]  # before any forward is replaced
        _warn_of_late_gathers(owns)
        _give_buffers(owns)
        self._module = module
        self._blocks = [
            _CapturedBlock(block, own, KnownCalls(warmup_calls, max_graphs))
            for block, own in zip(blocks, owns, strict=True)
        ]

    @property
    def num_graphs(self) -> int:
        """Recorded forwards, each with its backward, that are still of use."""
        return sum(len(block.calls.graphs) for block in self._blocks)

    def reset(self) -> None:
        """Forget all graphs: the next calls are as the first ones. Call it after a change that
        cannot be seen, such as another value of a Python variable that a block reads."""
        for block in self._blocks:
            block.calls.forget()

    def remove(self) -> None:
        """Give the blocks their own ``forward`` back, and free graphs and buffers. Call it on all
        ranks. Small weights that were gathered in groups before ``capture_blocks`` stay single.

        Raises:
            RuntimeError: The backward of a call may still come.
        """
        for block in self._blocks:
            # Its backward replays a graph that reads the fixed buffers.
            if any(graph.awaits_backward for graph in block.calls.graphs.values()):
                raise RuntimeError(
                    "remove() expects that the backward of each forward has run, but that of block "
                    f"'{block.own.name}' may still come. Run it, or drop the loss and all outputs."
                )
        for block in self._blocks:  # only when all can be removed
            block.remove()
        for runtime in runtimes_of(self._module, "capture_blocks"):
            for chain in runtime.passes.chains.values():
                chain.plan_again()  # without fixed buffers, weights may stay between two uses


class _CapturedBlock:
    """Takes the place of a block's ``forward``: runs it eagerly, or replays one of its graphs."""

    def __init__(self, block: nn.Module, own: Block, calls: KnownCalls[BlockGraph]) -> None:
        self.own = own
        self.calls = calls
        self._block = block
        self._weights = own.weights
        # With "auto", an embedding in a block is gathered. "exchange" raises in the first call.
        self._could_exchange = [weight.fused.may_exchange for weight in self._weights]
        for weight in self._weights:
            weight.fused.may_exchange = own.runtime.policy.embedding == "exchange"
        self._binding: Hashable = None  # what all graphs find beside their inputs
        # Whether it was set on the instance, so that ``remove`` sets it again.
        self._had_forward = "forward" in block.__dict__
        block.forward = self  # an attribute of the instance hides the method of the class

    def remove(self) -> None:
        self.calls.forget()
        for weight, could_exchange in zip(self._weights, self._could_exchange, strict=True):
            weight.form.fixed = None  # gathers allocate again, see ``GatherForm.gather_buffer``
            weight.fused.may_exchange = could_exchange
        if self._had_forward:
            self._block.forward = self.own.forward
        else:
            del self._block.forward  # the method of the class again

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.own
        calls = self.calls
        if not self._can_replay():  # such a call is no warm-up
            return own.forward(*args, **kwargs)
        leaves, spec = compat.tree_flatten((args, kwargs))
        binding = self._describe()
        if binding != self._binding:
            calls.forget()  # the graphs read what is no longer there
            self._check_buffers()
            self._binding = binding
        is_trained = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        kind = (str(spec), *map(signature, leaves), *is_trained)
        graph = calls.graphs.get(kind)
        if graph is None:
            # Once for each kind of call: a replay copies tensors, and repeats all else.
            check_places(leaves, own.runtime.device, str(own))
            if not calls.may_record(kind) or calls.seen[kind].indices is None:  # None: no backward yet
                outputs = own.forward(*args, **kwargs)
                returned_tensors(outputs, str(own))  # refuses those that no replay would give to the caller
                reached = calls.note_eager(kind, Reached())  # that of the first call of this kind
                return reached.observed(outputs)
            graph = BlockGraph(own, leaves, spec, calls.seen[kind])  # records both passes
            calls.graphs[kind] = graph
        if graph.awaits_backward:  # a replay would overwrite what it has saved
            return own.forward(*args, **kwargs)
        return graph(leaves)  # also right after the recording, which has computed nothing

    def _can_replay(self) -> bool:
        runtime = self.own.runtime
        return (
            torch.is_grad_enabled()
            and compat.current_graph_task_id() == -1  # no recomputation in a backward
            and compat.saved_tensors_hooks_enabled()
            and not torch.is_autocast_enabled(runtime.device.type)  # no graph is recorded with its casts
            and not runtime.comm.streams.is_capturing  # ``capture_step`` records the ops of eager blocks
            and not runtime.reads.has_foreign_saved_hooks()  # they would see nothing that a graph saves
            # These weights stay gathered, but blocks of one kind take turns with the fixed buffers.
            and not any(w.is_pinned or w.flags.reduce_scatter_unused_params for w in self._weights)
        )

    def _describe(self) -> Hashable:
        for weight in self._weights:
            if weight.fused.lookups is not None or weight.fused.losses is not None:
                raise NotImplementedError(
                    f"capture_blocks does not support block '{self.own.name}': it exchanges "
                    f"activations for '{weight.fqn}'. Use capture_step, or "
                    'SchedulePolicy(embedding="gather", head="gather").'
                )
        params = []
        for param in self.own.params:
            registered = param.registration.current
            is_trained = registered is not None and registered.requires_grad
            params.append((id(registered), id(param.shard), is_trained))
        # A graph reads buffers at the addresses of its recording.
        buffers = tuple(buffer.data_ptr() for buffer in self._block.buffers())
        modules = list(self._block.modules())
        # Not by id: that of a module that is gone may be that of another one.
        children = tuple(child for module in modules for child in module._modules.values())
        return tuple(params), tuple(module.training for module in modules), children, buffers

    def _check_buffers(self) -> None:
        for weight in self._weights:
            fixed = weight.form.fixed
            dtypes = (weight.compute_dtype, weight.reduce_dtype)
            if fixed is None or (fixed.gathered.dtype, fixed.grad.dtype) != dtypes:
                raise RuntimeError(
                    f"The dtype of '{weight.fqn}' has changed since capture_blocks: call remove() "
                    "on its result, then capture_blocks again."
                )


def _warn_of_late_gathers(blocks: Sequence[Block]) -> None:
    largest: dict[Runtime, int] = {}
    for block in blocks:
        nbytes = sum(weight.for_forward.kept_nbytes for weight in block.weights)
        largest[block.runtime] = max(nbytes, largest.get(block.runtime, 0))
    for runtime, nbytes in largest.items():
        asked = runtime.policy.prefetch_nbytes
        if asked and asked < nbytes:  # None: the library chooses; 0: the user wants no gathers ahead
            logger.warning(
                "capture_blocks: SchedulePolicy(prefetch_nbytes=%d) gathers the rest of the %d bytes "
                "of a block only after the block before has ended; raise it to this number",
                asked,
                nbytes,
            )


def _checked(name: str, block: nn.Module, recorder: CudaRecorder, owners: dict[ManagedParam, str]) -> Block:
    """What is recorded of ``block``, if it can be. ``owners`` names the block that each parameter
    belongs to."""
    params = params_of(bindings_of(block.modules()))
    if not any(isinstance(param, ShardedWeight) for param in params):
        raise ValueError(f"capture_blocks expects blocks with sharded weights, but '{name}' has none.")
    where = f"capture_blocks does not support block '{name}', a {type(block).__name__}"
    runtimes = runtimes_of(block, "capture_blocks")
    if len(runtimes) > 1:
        raise NotImplementedError(f"{where}: its weights belong to several gtp_shard calls without one around them.")
    # ``module.compile()`` and ``torch.compile(module)``.
    if any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in block.modules()):
        raise NotImplementedError(f"{where}: it is compiled. Compile it, or record it, or record the whole step.")
    for fqn, _, param in unmanaged_params(block):
        if param.requires_grad:
            raise NotImplementedError(
                f"{where}: gtp_shard does not manage its parameter '{fqn}', so the gradient would be lost."
            )
    check_buffers(f"capture_blocks, of block '{name}',", block, runtimes[0].device)
    for managed in params:
        weight = None
        if isinstance(managed, ShardedWeight):
            weight = managed
        # Blocks may have modules in common, such as a table of rotary embeddings, but no parameters.
        first = owners.setdefault(managed, name)
        obstacles = {
            "is tensor-parallel": getattr(managed, "tp_spec", None) is not None,
            "is quantized for its gather": weight is not None and weight.form.wire is not None,
            "belongs to another recorded block": weight is not None and weight.form.fixed is not None,
            "is on the meta device": weight is not None and weight.shard.is_meta,
            f"is one of '{first}', too": first != name,
        }
        for obstacle, is_there in obstacles.items():
            if is_there:
                raise NotImplementedError(f"{where}: its parameter '{managed.fqn}' {obstacle}. Use capture_step.")
    return Block(name, block.forward, params, runtimes[0], recorder)  # the block's own forward: not replaced yet
