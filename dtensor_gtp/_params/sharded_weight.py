"""A weight that lives on every rank as a shard and is gathered for each use, and what is gathered
of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from .. import _torch_compat as compat
from .._comm.tokens import TokenExchange
from ..placement import GTPShard
from .gathered import Gathered, GatherForm, ShardVersions, Version, Wire
from .gradient import LastUse, PendingGradient
from .layout import WeightLayout
from .managed_param import ManagedParam, Policies, Site
from .replica_part import ReplicaPart


class StandIn:
    """Stands for a weight in the autograd graph of compiled code (``ops/compiled_weight.py``): a
    leaf of one number."""

    def __init__(self, requires_grad: bool) -> None:
        with torch.inference_mode(False):
            self.leaf = torch.zeros(1, device="cpu", requires_grad=requires_grad)
        # A node of the graph lives while somebody holds it.
        self._node = compat.accumulate_node(self.leaf) if requires_grad else None

    @property
    def is_awaited(self) -> bool:
        """Whether the running backward computes the gradient of the weight."""
        return self._node is not None and compat.is_node_awaited(self._node)


class Gatherable:
    """What is gathered of a weight: all of it, or the columnwise data that backward needs in some
    low-precision formats. Has the gathers that are in memory or in flight."""

    def __init__(self, weight: ShardedWeight) -> None:
        self.weight = weight
        self.index = -1  # in plans
        self.call = -1  # number of the gtp_shard call
        self.lane = 0  # number of the mesh, see [Note: what is gathered when]
        # Among those of the mesh: ranks of other meshes may have other weights in between.
        self.number = -1
        # All that is always gathered together, itself included, in order of use; empty if it is
        # gathered alone.
        self.companions: tuple[Gatherable, ...] = ()
        self.num_gathers = 0
        self.live: Gathered | None = None  # in use
        self.kept: Gathered | None = None  # not in use
        self.pending: deque[Gathered] = deque()  # gathers for later uses

    def add(self, gathered: Gathered) -> None:
        """Take a gather that was just launched."""
        self.num_gathers += 1
        self.pending.append(gathered)

    @property
    def nbytes(self) -> int:
        """Number of gathered bytes."""
        wire = self.weight.form.wire
        if wire is not None:
            packed_nbytes = wire.num_bytes()
            if packed_nbytes:  # None: only ``pack`` knows them
                return packed_nbytes
        return self.kept_nbytes

    @property
    def kept_nbytes(self) -> int:
        """Number of bytes of the full weight in memory."""
        return self.weight.layout.shape.numel() * self.weight.compute_dtype.itemsize

    @property
    def may_stay(self) -> bool:
        """Whether it may stay in memory between two uses. Not if a use makes a copy of what was
        gathered, see [Note: several compute streams]; nor in a fixed buffer, see
        [Note: fixed buffers]."""
        form = self.weight.form
        return form.fixed is None and form.wire is None and self.weight.layout.dim == 0

    @property
    def may_be_left_out(self) -> bool:
        """Whether ranks may use the weight in different ways, see
        [Note: weights that a rank may leave out]."""
        return self.weight.flags.reduce_scatter_unused_params

    @property
    def is_absent(self) -> bool:
        """Whether no gather of it is in memory or in flight."""
        return self.live is None and self.kept is None and not self.pending


def gather_together(weights: Sequence[ShardedWeight]) -> None:
    """From now on gather these weights of one ``gtp_shard`` call in one launch, as soon as one is
    needed."""
    if len(weights) < 2:
        return
    for number in range(min(len(weight.gatherables) for weight in weights)):  # 2 if all have columnwise data
        companions = tuple(weight.gatherables[number] for weight in weights)
        for target in companions:
            target.companions = companions


class FusedUses:
    """Uses that do not read a weight as an attribute, and the exchanges of activations among them."""

    def __init__(self, *, may_exchange: bool) -> None:
        self.is_any = False  # whether a layer multiplies with the weight, or looks it up
        self.may_exchange = may_exchange  # an embedding needs its rows on the device
        self.lookups: TokenExchange | None = None  # of an embedding
        self.losses: TokenExchange | None = None  # of a head with a vocabulary-parallel loss


class ShardedWeight(ManagedParam):
    """A weight that is cut over the gtp axis."""

    def __init__(
        self,
        fqn: str,
        sites: list[Site],
        param: nn.Parameter,
        mesh: DeviceMesh,
        policies: Policies,
        layout: WeightLayout,
        tp_spec: compat.DTensorSpec | None,
        part: ReplicaPart | None = None,
    ) -> None:
        super().__init__(fqn, sites, param, mesh, policies)
        self.layout = layout
        self.part = part  # of the shard, if the replicas split its optimizer states
        # Of the tp-local slice that modules see; None without tensor parallelism.
        self.tp_spec = tp_spec
        self.form = GatherForm()
        self.for_forward = Gatherable(self)
        # Gathered in backward to compute the gradient of the input.
        self.for_backward = self.for_forward
        self.pending_grad = PendingGradient()
        self.fused = FusedUses(may_exchange=self.policies.offload is None)
        self.versions = ShardVersions()
        self._rebound()

    def set_wire(self, wire: Wire | None) -> None:
        """Gather the weight as ``wire`` says; None gathers the weight itself."""
        self.form.set_wire(wire)
        self.for_backward = self.for_forward
        if wire is not None and wire.has_columnwise:
            self.for_backward = Gatherable(self)

    def _rebound(self) -> None:
        self.forget_made()
        if self.part is not None:
            # The new local tensor begins its own count of writes.
            self.versions.num_updates += 1
            self.local = self.part.take(self.local)
            self.shard = self.part.shard
            compat.set_local(self.param, self.local, self.spec)  # type: ignore[arg-type]
        # The gradient does not go through autograd. An empty leaf stands for the parameter in the
        # graph: autograd would call post-accumulate-grad hooks of the parameter itself long before
        # its gradient is reduced.
        self.leaf = torch.empty(0, dtype=self.param.dtype, device=self.device)
        if self.param.is_floating_point():
            self.leaf.requires_grad_(self.param.requires_grad)
        self.stand_in = StandIn(self.leaf.requires_grad)
        self.gradient.last_use = None
        if self.registration.is_cut_again and self.leaf.requires_grad:
            self.gradient.last_use = LastUse(self.leaf)
        self._other_stand_in: StandIn | None = None  # of graphs from before the weight was frozen or unfrozen
        self.form.follow(self.layout, self.compute_dtype, self.device)
        self.pending_grad.lay_out(self.layout, self.reduce_dtype, self.device)
        if self.tp_spec is not None:
            spec = self.tp_spec  # the full weight is gathered in the compute dtype
            self.tp_spec = compat.make_spec(spec.mesh, spec.placements, spec.shape, self.compute_dtype)

    def begin_forward(self, is_captured: bool) -> None:
        super().begin_forward(is_captured)
        if self.form.wire is not None:
            self.forget_stale(self.pending_grad, is_captured)

    def forget_stale(self, pending_grad: PendingGradient, is_captured: bool) -> None:
        """At the start of a forward: quantized data that were made of the shard may be stale."""
        # [Note: data made from a shard] Quantized data are slow to make. So those that a forward
        # has made of a shard serve its backward and all microbatches until the optimizer steps,
        # unless the version of the shard changes. The first microbatch makes new ones, because
        # kernels of others may write to a shard, which no version counts. A CUDA graph that records
        # a forward makes them, too, because its replays read other shards.
        has_no_sum = pending_grad.is_empty and self.gradient.reduced is None
        is_first_microbatch = has_no_sum and self.param.grad is None
        if is_captured or self.registration.is_cut_again or is_first_microbatch:
            self.forget_made()

    def forget_made(self) -> None:
        """Drop the data that were made of the shard."""
        if self.form.wire is not None:
            self.form.wire.forget()

    @property
    def has_unsynced(self) -> bool:
        has_sum = not self.pending_grad.is_empty
        if self.group is not None:
            grads = self.group.pending_grad
            has_sum = self in grads.owed and not grads.is_empty
        return super().has_unsynced or has_sum

    def refuse_graphs(self) -> None:
        super().refuse_graphs()
        # A frozen weight has no leaf in the graph, but its values count.
        self.versions.num_updates += 1
        self.versions.replaced_at = self.versions.num_updates

    def follow_frozen(self) -> None:
        super().follow_frozen()
        # Graphs of earlier forwards have the old one, which counts again if the user takes the change back.
        old = self.stand_in
        self.stand_in = self._other_stand_in or StandIn(self.leaf.requires_grad)
        self._other_stand_in = old

    @property
    def leaves(self) -> list[Tensor]:
        return [self.leaf, self.stand_in.leaf]

    @property
    def has_gradient(self) -> bool:
        """Whether a backward may reduce its gradient."""
        return self.param.requires_grad

    @property
    def placements(self) -> tuple[Placement, ...]:
        placements = list(super().placements)
        placements[self.gtp_axis] = GTPShard(self.layout.dim, block_size=self.layout.block_size)
        return tuple(placements)

    @property
    def shard_spec(self) -> compat.DTensorSpec:
        """That of the shard, which the replicas have alike."""
        spec = self.spec
        placements = list(self.placements)
        if self.part is not None:
            placements[-1] = Replicate()
        return compat.make_spec(spec.mesh, tuple(placements), self.param.shape, self.param.dtype)

    @property
    def version(self) -> Version:
        return self.param._version, self.local._version, self.versions.num_updates, self.num_data_writes

    def is_fresh(self, gathered: Gathered) -> bool:
        """Whether ``gathered`` has the present values of the shard, and autograd accepts it."""
        if gathered.source is not self.shard or gathered.version != self.version:
            return False
        return not gathered.buffer.is_inference() or torch.is_inference_mode_enabled()

    @property
    def gatherables(self) -> list[Gatherable]:
        """Once each, if it is gathered in backward as in forward."""
        return [*dict.fromkeys((self.for_forward, self.for_backward))]

    def for_modules(self, gathered: Gathered) -> Tensor:
        """The full weight for module code: contiguous, and a DTensor where the module is
        tensor-parallel."""
        if self.form.wire is not None:
            self.form.wire.note_read()
        # Detached: a graph of the code that reads it must not reach our buffer.
        full = gathered.contiguous().detach()
        if self.tp_spec is not None:
            return compat.wrap_local(full, self.tp_spec)
        return full

    def accumulate(self, slot: Tensor) -> None:
        """Add this rank's rows of a reduced gradient."""
        self.gradient.accumulate(self.layout.shard_of_rows(slot))

    # Gradients that the replicas reduce-scatter: as rows for all of them, and as the row of this one.

    @property
    def has_parts(self) -> bool:
        return self.part is not None

    def for_replicas(self, slot: Tensor) -> Tensor:
        """Reduced rows of the gtp axis, with one row for each replica."""
        grad = self.layout.shard_of_rows(slot)
        if self.part is not None:
            return self.part.spread(grad)
        return grad.reshape(1, -1).expand(self.mesh.size(0), -1)  # each replica gets all of it

    @property
    def part_numel(self) -> int:
        """Length of such a row."""
        if self.part is not None:
            return math.prod(self.part.layout.slot_shape)
        return self.shard.numel()

    def accumulate_part(self, row: Tensor) -> None:
        if self.part is not None:
            self.gradient.accumulate(self.part.of_received(row))
        else:
            self.gradient.accumulate(row.view(self.shard.shape))

    def reset_grads(self) -> None:
        super().reset_grads()
        self.pending_grad.forget()
