"""A weight that lives on every rank as a shard and is gathered for each use."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Placement

from .. import _torch_compat as compat
from .._comm.tokens import TokenExchange
from ..placement import GTPShard
from ..quant.float8_gemms import Float8GEMMs
from .gathered import Gathered, ShardState, Version
from .layout import WeightLayout
from .managed_param import ManagedParam, Site
from .wire import Wire


class StandIn:
    """Stands for a weight in the autograd graph of compiled code: a leaf of one number on the host (see
    ``ops/compiled_weight.py``)."""

    def __init__(self, requires_grad: bool) -> None:
        with torch.inference_mode(False):
            self.leaf = torch.zeros(1, device="cpu", requires_grad=requires_grad)
        self._node = compat.accumulate_node(self.leaf) if requires_grad else None

    @property
    def is_awaited(self) -> bool:
        """Whether the running backward computes the gradient of the weight."""
        return self._node is not None and compat.is_node_awaited(self._node)


class Gatherable:
    """Something that is gathered of ``weight``, and what of it is in memory: the weight itself, or the columnwise data
    that the backward of some low-precision formats needs beside it (``ShardedWeight.for_backward``)."""

    def __init__(self, weight: ShardedWeight) -> None:
        self.weight = weight
        self.index = -1  # in plans
        self.call = -1  # number of the gtp_shard call
        self.lane = 0  # number of the mesh, see [Note: what is gathered when]
        # What is always gathered together, itself included, in order of use; empty if it is alone.
        self.companions: tuple[Gatherable, ...] = ()
        self.num_gathers = 0
        self.live: Gathered | None = None  # in use
        self.kept: Gathered | None = None  # not in use
        self.pending: deque[Gathered] = deque()  # gathers for uses to come

    @property
    def nbytes(self) -> int:
        """Bytes that are gathered."""
        wire = self.weight.wire
        return (None if wire is None else wire.num_bytes()) or self.kept_nbytes

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the full weight in memory."""
        return self.weight.layout.shape.numel() * self.weight.compute_dtype.itemsize

    @property
    def is_absent(self) -> bool:
        """Whether nothing of it is in memory or in flight."""
        return self.live is None and self.kept is None and not self.pending


def gather_together(weights: Sequence[ShardedWeight]) -> None:
    """Gather these weights of one ``gtp_shard`` call in one launch from now on, whichever is asked for."""
    if len(weights) < 2:
        return
    for number in range(min(len(weight.gatherables) for weight in weights)):
        companions = tuple(weight.gatherables[number] for weight in weights)
        for target in companions:
            target.companions = companions


class WeightState(enum.Enum):
    """What of a sharded weight is in memory."""

    SHARDED = enum.auto()  # the shard alone
    GATHERING = enum.auto()  # a gather is in flight or waits for its use
    GATHERED = enum.auto()  # the full weight is in use or kept


class FixedBuffers(NamedTuple):
    """Where a recorded block reads a full weight and leaves its gradient, see [Note: fixed buffers]."""

    gathered: Tensor
    grad: Tensor


class ShardedWeight(ManagedParam, Gatherable):
    """A weight that is cut over the gtp axis.

    Args:
        tp_spec: If tensor parallelism has cut the weight before: the DTensor spec of the slice that modules see.
        make_wire: Says what is gathered instead of the weight itself; None for the weight.
    """

    def __init__(
        self,
        fqn: str,
        sites: list[Site],
        param: nn.Parameter,
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy,
        layout: WeightLayout,
        tp_spec: compat.DTensorSpec | None,
        make_wire: Callable[[ShardedWeight], Wire | None] = lambda weight: None,
    ) -> None:
        ManagedParam.__init__(self, fqn, sites, param, mesh, mp_policy)
        Gatherable.__init__(self, self)
        self.layout = layout
        self.tp_spec = tp_spec
        self.wire = wire = make_wire(self)
        # To compute the gradient of the input with.
        self.for_backward: Gatherable = Gatherable(self) if wire is not None and wire.has_columnwise else self
        # Full gradient (buffer layout) of microbatches without gradient sync.
        self.unsharded_grad: Tensor | None = None
        # Rows reduced over gtp but not yet over the replicas (set_requires_all_reduce(False)).
        self.unreplicated_grad: Tensor | None = None
        # GEMMs of linear layers with the quantized weight; None for ordinary GEMMs of the full weight.
        self.gemms: Float8GEMMs | None = None
        self.fixed: FixedBuffers | None = None  # of a weight of a recorded block
        # Exchanges of activations, for an embedding and for a head with a vocabulary-parallel loss.
        self.lookups: TokenExchange | None = None
        self.losses: TokenExchange | None = None
        # Optimizer steps that may have written to the shard.
        self.num_updates = 0
        # See [Note: what is made of a shard].
        self.edition = 0
        # Read by the last use in compiled code, which cannot keep it for its backward.
        self.compiled_version: Version
        self._rebound()

    def _rebound(self) -> None:
        self.edition += 1
        # The gradient does not go through autograd. An empty leaf stands for the parameter in the graph, because
        # autograd would call post-accumulate-grad hooks of the parameter itself long before there is a gradient.
        self.leaf = torch.empty(0, dtype=self.param.dtype, device=self.shard.device)
        if self.param.is_floating_point():
            self.leaf.requires_grad_(self.param.requires_grad)
        self.stand_in = StandIn(self.leaf.requires_grad)
        self.rows = self.layout.rows_of(self.shard)
        self.is_sendable = self.layout.is_sendable(self.rows, self.compute_dtype)
        self.gemms = None if self.wire is None else self.wire.gemms()
        if self.tp_spec is not None:
            spec = self.tp_spec  # of the full weight, which is gathered in the compute dtype
            self.tp_spec = compat.make_spec(spec.mesh, spec.placements, spec.shape, self.compute_dtype)

    def begin_forward(self, is_captured: bool) -> None:
        super().begin_forward(is_captured)
        # [Note: what is made of a shard]
        # Data made of a shard for a gather also serve the backward, as long as the version of the shard stays. Writes
        # to ``.data`` do not change the version, so each forward makes the data anew. Quantized data take longer to
        # make, so they are made once for each optimizer step: they serve while gradients of earlier microbatches wait
        # for a step. A CUDA graph that records the forward always makes them, because its replays see other shards.
        # A new ``edition`` says that data are to be made anew, whatever the version says.
        is_made_once = self.wire is not None and self.wire.is_made_once
        if not is_made_once or is_captured or self.is_cut_again or not self.has_waiting_grad:
            self.edition += 1

    def _follow_frozen(self) -> None:
        super()._follow_frozen()
        self.stand_in = StandIn(self.leaf.requires_grad)

    @property
    def placements(self) -> tuple[Placement, ...]:
        return (*super().placements[:-1], GTPShard(self.layout.dim, block_size=self.layout.block_size))

    @property
    def version(self) -> Version:
        return self.param._version, self.shard._version, self.num_updates

    def is_fresh(self, gathered: Gathered) -> bool:
        """Whether ``gathered`` has the values of the shard, and autograd would take it."""
        shard = self.shard
        if gathered.source is not shard or gathered.version != (self.param._version, shard._version, self.num_updates):
            return False
        return not gathered.buffer.is_inference() or torch.is_inference_mode_enabled()

    @property
    def state_of_shard(self) -> ShardState:
        return ShardState(self.version, self.edition)

    @property
    def gatherables(self) -> list[Gatherable]:
        return [self] if self.for_backward is self else [self, self.for_backward]

    @property
    def has_waiting_grad(self) -> bool:
        """Whether gradients of earlier microbatches wait for an optimizer step."""
        has_sum = self.reduced is not None or self.unsharded_grad is not None or self.unreplicated_grad is not None
        return has_sum or self.param.grad is not None

    @property
    def state(self) -> WeightState:
        if self.live is not None or self.kept is not None:
            return WeightState.GATHERED
        return WeightState.GATHERING if self.pending else WeightState.SHARDED

    def for_modules(self, gathered: Gathered) -> Tensor:
        """The full weight for module code: contiguous, and a DTensor where the module is tensor-parallel."""
        if self.wire is not None:
            self.wire.note_read()
        full = gathered.contiguous().detach()
        return full if self.tp_spec is None else compat.wrap_local(full, self.tp_spec)

    def exchange(self, purpose: str, declared: int | None, is_worth: Callable[[int], bool]) -> TokenExchange:
        """A new exchange of activations for uses of this weight, see ``TokenExchange``."""
        return TokenExchange(self.fqn, self.layout.shape, self.mesh, purpose, declared, is_worth)

    def new_buffer(self) -> Tensor:
        """An uninitialized buffer for the full weight."""
        return torch.empty(self.layout.buffer_shape, dtype=self.compute_dtype, device=self.shard.device)

    def gather_buffer(self) -> Tensor:
        """A buffer to gather into: the fixed one, if the weight has one that nobody holds."""
        if self.fixed is not None and self.fixed.gathered.dtype == self.compute_dtype:
            buffer = self.fixed.gathered
            # Two owners are ours: this tensor, and the Python object of its storage.
            if compat.storage_use_count(buffer.untyped_storage()) <= 2:
                return buffer.view(buffer.shape)
        return self.new_buffer()

    def send_buffer(self) -> Tensor:
        """An uninitialized buffer for the full gradient. No rank reads rows beyond the logical end."""
        return torch.empty(self.layout.buffer_shape, dtype=self.reduce_dtype, device=self.shard.device)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of its full gradient as it is reduce-scattered."""
        return self.layout.buffer_numel * self.reduce_dtype.itemsize

    def reset_grads(self) -> None:
        super().reset_grads()
        self.unsharded_grad = None
        self.unreplicated_grad = None
