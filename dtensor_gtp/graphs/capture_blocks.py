"""Blocks of a model as CUDA graphs of their own: ``capture_blocks``.

[Note: what is recorded of a block]
Its compute, forward and backward, each a graph; no communication. Around a replay, eager code gathers the block's
weights into buffers at fixed addresses, by the plan as ever, and reduces the gradients that the graph has left in
others (see [Note: fixed buffers] in ``block_recording.py``). So gathers and reductions cross the borders of graphs
as they cross those of ops, on their streams; any gather backend and any kind of reduce-scatter will do; and the
sequence of collectives is that of eager code, so that some ranks may replay what others run.

[Note: memory of a recorded block]
Forward and backward are recorded one after the other, and what forward saves is kept for good, since graphs of other
blocks share the pool. Only what lives within one graph shares memory with that of others. A forward that comes before
the backward of the last one would overwrite what it has saved: it runs eagerly.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .. import _torch_compat as compat
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from .block_graph import BlockGraph, Reached
from .block_recording import Rings
from .checks import check_apart, check_at_least, check_block, check_places, check_window, params_of, runtimes_of
from .record_again import MOST_SEEN, signature
from .recorder import CudaRecorder, Recorder

logger = logging.getLogger("dtensor_gtp")


def capture_blocks(
    module: nn.Module, blocks: Iterable[nn.Module], *, warmup_calls: int = 3, max_graphs: int = 4
) -> CapturedBlocks:
    """Run blocks of a model as CUDA graphs where the whole step cannot be one.

    What is around the blocks stays eager: an embedding, a loss that asks the host, a ``GradScaler``, a data-dependent
    branch, the optimizer. Each block's forward and backward become a graph, without their collectives, which stay
    eager and overlap with the graphs of other blocks::

        gtp_shard(model, mesh, schedule=SchedulePolicy(prefetch_nbytes=bytes_of_a_block))
        capture_blocks(model, model.layers)
        ...  # train as ever

    In place: the ``forward`` of each block is replaced, hooks on the block run around it. The first ``warmup_calls``
    calls with gradients run eagerly, the next one with inputs that have been seen is recorded. Without gradients, under
    autocast, in a recomputation, with weights that ``unshard`` keeps, and where a forward comes before the backward of
    the last one (microbatches of a pipeline), a block runs eagerly. Its weights are gathered again for backward,
    whatever ``keep_nbytes`` and ``reshard_after_forward`` say.

    It costs memory: two sets of full weights and two of full gradients for each kind of block, and what forward saves
    stays allocated between steps. ``prefetch_nbytes`` should be at least the bytes of a block's weights: a graph is
    launched when all of them are there. Where the whole step can be recorded, ``capture_step`` is the better choice.

    Args:
        module: What ``gtp_shard`` was called on, or a module that contains such modules.
        blocks: Modules below it that do not contain each other. Their inputs are any trees of tensors, which are
            copied and only read, and of other values, which are compared; their outputs are copied, too, and backward
            comes to the same of them as in the eager calls. Tensors that they find
            elsewhere are to stay where they are: parameters and buffers are watched, attributes (a cache) are not.
        warmup_calls: Eager calls of each block before its first recording, at least 2.
        max_graphs: Beyond so many combinations of inputs for one block, further ones run eagerly.

    Raises:
        TypeError, ValueError: An argument is of the wrong kind or out of range.
        RuntimeError: The weights are not on a CUDA device.
        NotImplementedError: Something about the module or a block is not supported: an outer ``fully_shard``, unequal
            replicas, recipes, tensor parallelism, exchanges of activations, compiled blocks, parameters that nobody
            manages.
    """
    blocks = list(blocks)
    runtimes = runtimes_of(module, "capture_blocks")
    device = runtimes[0].device
    if device.type != "cuda":
        raise RuntimeError(
            f"capture_blocks records CUDA graphs, but the weights of the {type(module).__name__} are on "
            f"'{device.type}'. Call the module as it is there."
        )
    return CapturedBlocks(module, blocks, CudaRecorder(device), warmup_calls, max_graphs)


class CapturedBlocks:
    """What :func:`capture_blocks` returns."""

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module], recorder: Recorder, warmup_calls: int, max_graphs: int
    ) -> None:
        check_at_least("capture_blocks", 2, warmup_calls=warmup_calls)
        check_at_least("capture_blocks", 1, max_graphs=max_graphs)
        names = {submodule: name for name, submodule in module.named_modules()}
        held = Counter(inner for block in blocks for inner in block.modules())
        if not blocks or any(block not in names or held[block] > 1 for block in blocks):
            raise ValueError(
                f"capture_blocks expects modules below the {type(module).__name__} that do not contain each other as "
                f"blocks, but got {[names.get(block, type(block).__name__) for block in blocks]}."
            )
        for block in blocks:
            check_block(names[block], block)
        check_apart(blocks, names)
        check_window(blocks)
        # A runtime knows who holds a fixed buffer among its own gathers and reductions, not among those of another.
        rings = {runtime: Rings() for runtime in runtimes_of(module, "capture_blocks")}
        self._blocks = [_CapturedBlock(names[b], b, rings, recorder, warmup_calls, max_graphs) for b in blocks]

    @property
    def num_graphs(self) -> int:
        """Recorded forwards, each with its backward, that are still of use."""
        return sum(len(block.graphs) for block in self._blocks)

    def reset(self) -> None:
        """Forget all graphs: the next calls are as the first ones. Call it after a change that cannot be seen, such as
        another value of a Python variable that a block reads."""
        for block in self._blocks:
            block.reset()

    def remove(self) -> None:
        """Give the blocks their own ``forward`` back, and free graphs and buffers.

        Raises:
            RuntimeError: The backward of a call may still come.
        """
        awaiting = [block.name for block in self._blocks if any(g.awaits_backward for g in block.graphs.values())]
        if awaiting:
            raise RuntimeError(
                f"remove() expects no forward whose backward is still to come, but that of block '{awaiting[0]}' may. "
                "Run it, or drop the loss and all outputs."
            )
        for block in self._blocks:
            block.remove()


class _CapturedBlock:
    """A block with its graphs, by what they have baked in."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        rings: Mapping[Runtime, Rings],
        recorder: Recorder,
        warmup_calls: int,
        max_graphs: int,
    ) -> None:
        self.name = name
        self.block = block
        self.params = params_of(block)
        self.weights = [param for param in self.params if isinstance(param, ShardedWeight)]
        self.runtime = runtimes_of(block, "capture_blocks")[0]
        self.recorder = recorder
        self.graphs: dict[Hashable, BlockGraph] = {}
        self._warmup_calls = warmup_calls
        self._max_graphs = max_graphs
        self._num_eager = 0
        self._binding: Hashable = None
        self._seen: dict[Hashable, Reached] = {}  # in order
        rings[self.runtime].assign(self.weights)
        self.forward = block.forward
        self._had_forward = "forward" in block.__dict__
        block.forward = self

    def remove(self) -> None:
        self.graphs.clear()
        for weight in self.weights:
            weight.fixed = None
        if self._had_forward:
            self.block.forward = self.forward
        else:
            del self.block.forward

    def reset(self) -> None:
        self.graphs.clear()
        self._seen.clear()
        self._num_eager = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._can_replay():
            return self.forward(*args, **kwargs)
        leaves, spec = compat.tree_flatten((args, kwargs))
        binding = self._describe()
        if binding != self._binding:
            self.reset()
            self._check_buffers()
            self._binding = binding
        key = (str(spec), tuple(map(_key_of, leaves)))
        graph = self.graphs.get(key)
        if graph is None:
            check_places(leaves, self.runtime.device, f"A recorded block ('{self.name}')")
            reached = self._seen.get(key)
            is_ready = self._num_eager >= self._warmup_calls and reached is not None and reached.is_known
            if reached is None or not is_ready or len(self.graphs) >= self._max_graphs:
                return self._run_eagerly(key, args, kwargs)
            graph = self.graphs[key] = BlockGraph(self, leaves, spec, reached)
        if graph.awaits_backward:
            return self.forward(*args, **kwargs)
        return graph(leaves)

    def _run_eagerly(self, key: Hashable, args: Any, kwargs: Any) -> Any:
        """And see which outputs backward comes to."""
        leaves, spec = compat.tree_flatten(self.forward(*args, **kwargs))
        self._num_eager += 1
        result = compat.tree_unflatten(self._seen.setdefault(key, Reached()).observed(leaves), spec)
        if len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return result

    def _can_replay(self) -> bool:
        return (
            torch.is_grad_enabled()
            and compat.current_graph_task_id() == -1
            and compat.saved_tensors_hooks_enabled()
            and not torch.is_autocast_enabled(self.runtime.device.type)
            and not self.runtime.comm.is_capturing
            and not self.runtime.reads.has_foreign_saved_hooks()
            and not any(weight.is_pinned for weight in self.weights)
        )

    def _describe(self) -> Hashable:
        modules = list(self.block.modules())
        buffers = tuple(buffer.data_ptr() for buffer in self.block.buffers())
        exchanges = [w.fqn for w in self.weights if w.lookups is not None or w.losses is not None]
        if exchanges:
            raise NotImplementedError(
                f"capture_blocks does not support block '{self.name}': it exchanges activations for '{exchanges[0]}'. "
                'Use capture_step, or SchedulePolicy(embedding="gather", head="gather").'
            )
        params = []
        for param in self.params:
            registered = param.sites[0].module._parameters.get(param.sites[0].name)
            params.append((id(registered), id(param.shard), registered is not None and registered.requires_grad))
        return tuple(params), tuple(module.training for module in modules), buffers

    def _check_buffers(self) -> None:
        for weight in self.weights:
            fixed = weight.fixed
            if fixed is None or (fixed.gathered.dtype, fixed.grad.dtype) != (weight.compute_dtype, weight.reduce_dtype):
                raise RuntimeError(
                    f"The dtype of '{weight.fqn}' has changed since capture_blocks: call remove() on what it has "
                    "returned, then capture_blocks again."
                )


def _key_of(leaf: Any) -> Hashable:
    return signature(leaf), isinstance(leaf, Tensor) and leaf.requires_grad
