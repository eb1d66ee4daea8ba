"""In the first forward, ranks check that all of them can begin, and with the same values. Then they
decide, all alike: the schedule, communicators, groups, first plans."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from .._comm.addends import is_worth_loading, load_ahead
from .._comm.agreement import device_of, digests, is_alike
from .._comm.collectives import Groups, has_replicas
from .._comm.context import CommContext
from .._comm.send_ring import SendRing
from .._howto import see
from .._params.managed_param import ManagedParam
from .._params.pack_planes import has_hooks
from .._params.refusals import check_first_forward
from .._params.sharded_weight import ShardedWeight
from .._params.ties import warn_of_holders
from .._params.weight_group import Reducible
from .._params.whole_param import WholeParam
from .._progress import Progress
from ..policy import Schedule, SchedulePolicy
from .choose_schedule import (
    Facts,
    adds_addends,
    block_nbytes,
    choose,
    gathers_by_process_group,
    is_worth_a_group,
    no_copy_engines,
)
from .guesses import Guesses
from .members import Members
from .parted_ranks import parted
from .passes import Passes
from .reduce_gradients import Gradients

logger = logging.getLogger(__name__)

_MOST_ON_HOST = 1 << 20  # elements: 30 ms on a CPU
_MAX_NAMED = 8  # parameters that one message names: a model may have thousands


class Setup:
    """What is decided for one runtime."""

    guesses: Guesses  # since the first forward

    def __init__(
        self, policy: SchedulePolicy, members: Members, passes: Passes, comm: CommContext, grads: Gradients
    ) -> None:
        self._policy = policy
        self._members = members
        self._passes = passes
        self._comm = comm
        self._grads = grads
        self.is_done = False
        self.schedule = Schedule()  # until one is chosen
        self.reasons: tuple[str, ...] = ()  # for what was chosen
        # Called once, with the most tokens of any rank.
        self._make_groups: Callable[[int], tuple[str, ...]] | None = None
        self._num_tokens = 0  # of this rank, in the first forward

    def connect_ahead(self, mesh: DeviceMesh) -> None:
        """At the end of ``gtp_shard``, on all ranks of ``mesh``: connect and load what the first step
        would wait for, as far as it is known before. NCCL takes 0.4 s, and Triton as long beside it. If
        GEMMs turn out large, copy engines gather, and a communicator is made in vain."""
        device = self._comm.streams.device
        group = mesh.get_group(mesh.ndim - 1)
        weights = [weight for weight in self._members.weights if weight.param.requires_grad]
        no_copies = no_copy_engines(device, [group], has_unequal_replicas=False)
        if no_copies is not None or not weights or group.size() == 1:
            return
        nbytes = sum(weight.gatherables[0].nbytes for weight in weights)
        facts = Facts(None, 0, 0, single_nbytes=nbytes)
        # Most weights are in blocks, and tokens are not known yet.
        if is_worth_a_group(median(weight.param.numel() for weight in weights), num_tokens=0):
            facts = Facts(None, 0, 0, group_nbytes=nbytes)
        self._load_sums(facts)
        if gathers_by_process_group(self._policy, facts):
            self._comm.connect_ahead(group, weights[0].compute_dtype, weights[0].reduce_dtype)

    def make_groups_by(self, make_groups: Callable[[int], tuple[str, ...]] | None) -> None:
        self._make_groups = make_groups

    def expect_tokens(self, num_tokens: int) -> None:
        """The first forward gets so many, see ``frames``."""
        self._num_tokens = num_tokens

    def ensure(self) -> None:
        """In the first forward, on all ranks alike: check that they can run, choose a schedule,
        make communicators."""
        if self.is_done:
            return
        check_first_forward()
        params = self._members.params
        with Progress(logger, "first forward: ranks agree, communicators are made", len(params)) as progress:
            self._run(progress)
        logger.info("chosen: %s", "; ".join((*self._comm.choices, *self.reasons)))

    def _run(self, progress: Progress) -> None:
        members = self._members
        params = members.params
        device = self._comm.streams.device
        gathering = [mesh.get_group(mesh.ndim - 1) for mesh in {param.mesh for param in params}]
        no_copies = no_copy_engines(device, gathering, self._grads.launches.replicas is not None)
        if members.is_offloaded:
            no_copies = "offload_policy keeps shards on the host"
            if self._policy.gather_backend == "copy_engine":
                raise ValueError(
                    "gtp_shard does not support SchedulePolicy(gather_backend='copy_engine') with "
                    "offload_policy: copy engines send only from the device. Leave gather_backend "
                    "at its default."
                )
        # The user may call the module in a selective checkpoint, which must not see these ops.
        with compat.unseen_by_checkpoint_policies():
            free_nbytes, num_tokens = agree_to_begin(params, device, self._num_tokens)
        warn_of_holders(params)
        why_groups: tuple[str, ...] = ()
        if self._make_groups is not None:
            why_groups = self._make_groups(num_tokens)  # alike on all ranks, as the largest ``num_tokens`` counts
        # After groups are made, which are among the facts.
        facts = Facts(
            no_copies,
            block_nbytes((call.module for call in members.calls), members.weights),
            free_nbytes,
            group_nbytes=sum(group.leaves.nbytes for group in members.groups),
            single_nbytes=sum(weight.gatherables[0].nbytes for weight in members.single_weights),
        )
        if torch.is_grad_enabled():
            self._load_sums(facts)  # on a thread, while communicators are made
        schedule, reasons = choose(self._policy, facts)
        self.reasons = (*why_groups, *reasons)
        self.schedule = self._grads.schedule = schedule
        self._passes.look_ahead(schedule)
        # Making communicators is collective: all ranks go over ``params`` in one order.
        for param in progress.over(params):
            param.groups = self._comm.groups(param.mesh, schedule)
        self.prepare_gatherables()
        self.is_done = True  # last: after an error, the next forward tries again

    def _load_sums(self, facts: Facts) -> None:
        """Begin to load what will add gradients, if ranks exchange them."""
        if adds_addends(self._policy, facts):
            kinds = {(weight.reduce_dtype, weight.layout.world) for weight in self._members.weights}
        else:  # groups, and weights that travel alone, send theirs as they are
            senders: list[Reducible] = [*self._members.groups, *self._members.single_weights]
            large = [sender for sender in senders if is_worth_loading(sender.gatherables[0].kept_nbytes)]
            kinds = {(sender.compute_dtype, sender.layout.world) for sender in large}
        for dtype, num_ranks in kinds:
            load_ahead(self._comm.streams.device, dtype, num_ranks)

    def prepare_gatherables(self) -> None:
        """Give the weights and groups their rings and lanes, and guess the first passes."""
        self._set_rings()
        gatherables = self._members.gatherables
        lanes: dict[Groups, int] = {}
        # The weights of the outermost call come last: they get lane 0.
        for target in reversed(gatherables):
            target.lane = lanes.setdefault(target.weight.groups, len(lanes))
        numbers: Counter[Groups] = Counter()
        for target in gatherables:
            target.number = numbers[target.weight.groups]
            numbers[target.weight.groups] += 1
        roots = (call.module for call in reversed(self._members.calls))
        self.guesses = Guesses(roots, gatherables, self.schedule.prefetch_nbytes)

    def _set_rings(self) -> None:
        sizes: dict[SendRing, list[int]] = {}
        reduced: list[Reducible] = [*self._members.single_weights, *self._members.groups]
        for weight in reduced:
            if weight.groups.reduce_scatter == "copy_engine" and weight.layout.world > 1:
                ring = self._comm.send_ring(weight.groups)
                weight.pending_grad.ring = ring
                nbytes = weight.pending_grad.sent_nbytes * weight.has_gradient
                sizes.setdefault(ring, []).append(nbytes)
        for ring, expected in sizes.items():
            ring.expect(expected)

    def chosen_policy(self) -> SchedulePolicy | None:
        """What was asked for and chosen, as a policy. It leaves open who gathers or reduces where
        meshes have chosen differently. None before the first forward."""
        if not self.is_done:
            return None
        schedule = replace(self.schedule, **self._comm.chosen_backends())
        numbers = vars(schedule)
        of_policy = ("gather_backend", "reduce_scatter", "prefetch_nbytes", "keep_nbytes")
        fixed = {name: numbers[name] for name in of_policy}
        return replace(self._policy, **fixed, _numbers=tuple(numbers.items()))


def agree_to_begin(params: Sequence[ManagedParam], device: torch.device, num_tokens: int = 0) -> tuple[int, int]:
    """Compare ranks in one small all-reduce for each axis of the meshes, and wait for the result.
    Ranks need not have all meshes in common. Smaller meshes come first, so that their results reach
    the ranks of larger ones. ``params`` have the same order on all ranks. Returns the free memory
    of the device, the least of these ranks, and the most tokens of any. Raises
    RuntimeError on all ranks of the largest mesh that connects them, if a rank cannot begin or the
    values of a parameter differ."""
    compared: dict[DeviceMesh, list[ManagedParam]] = {}
    for param in params:
        # A mesh with nothing to compare takes part, too: its ranks must hear of one that failed.
        of_mesh = compared.setdefault(param.mesh, [])
        if isinstance(param, WholeParam) or has_replicas(param.mesh):
            of_mesh.append(param)
    # Meshes of one size stay in the order of ``params``, which all ranks share.
    compared = dict(sorted(compared.items(), key=lambda item: item[0].size()))
    everything = [param for of_mesh in compared.values() for param in of_mesh]
    error: RuntimeError | None = None
    host = torch.device("cpu")
    # A rank that fails sends these. Then ``_compare`` finds no difference.
    found = torch.zeros(len(everything), dtype=torch.int64, device=host)
    try:
        _check_materialized(params, device)
        found = digests(_on_host([_comparable(param) for param in everything], device), host)
    except RuntimeError as caught:  # raised below, because the other ranks wait in the collectives
        error = caught
    failed_rank = -1
    if error is not None:
        failed_rank = dist.get_rank()
    # The largest of all ranks counts, so the complement of the least free memory.
    most = torch.tensor([failed_rank, ~_free_nbytes(device), num_tokens], device=host)
    result = _compare(compared, most, found, device)
    if error is not None:
        raise error
    if type(result) is not Tensor:
        return 0, num_tokens  # in FakeTensorMode no rank answers
    failed_rank, taken, num_tokens, *differences = result.tolist()
    unequal = [param for param, differs in zip(everything, differences, strict=True) if differs]
    if unequal:
        raise _refusal(unequal)
    if failed_rank >= 0:
        axes = " and ".join(str(mesh.mesh_dim_names) for mesh in compared)
        raise RuntimeError(
            f"The first forward failed on rank {failed_rank}, whose error says why, so it fails on "
            f"all ranks of mesh axes {axes} (rank {dist.get_rank()})."
        )
    return ~int(taken), int(num_tokens)


def agree_on_order(uses: Sequence[ShardedWeight], weights: Sequence[ShardedWeight], what: str) -> None:
    """After the first pass of a kind, compare the ``uses`` of this rank with those of its peers, in
    one all-reduce for each mesh of ``weights``. Raises RuntimeError on all ranks of a mesh if they
    differ: gathers of one size would have mixed up the weights without an error."""
    for mesh in dict.fromkeys(weight.mesh for weight in weights if weight.layout.world > 1):
        # A weight that stays gathered may be read by one rank alone.
        used = [weight for weight in uses if weight.mesh is mesh and not weight.is_pinned]
        names = [f"'{weight.fqn}'" for weight in used]
        group = mesh.get_group(mesh.ndim - 1)
        with compat.unseen_by_checkpoint_policies():
            alike = is_alike("\n".join(names), group, device_of(mesh))
        if alike is False:  # None: tensors are fake
            raise parted(mesh, what, names, group)


def _compare(
    compared: dict[DeviceMesh, list[ManagedParam]], most: Tensor, digests: Tensor, device: torch.device
) -> Tensor:
    """Over one mesh after the other, compare whole parameters between all ranks, and shards between
    replicas. Gives the largest ``most`` of all ranks: the rank that failed or found a difference
    (else -1), and other numbers; then whether each parameter differs (False if one failed).

    Only the collectives run on ``device``. A GPU would load half a dozen kernels for the rest.
    """
    results = []
    by_mesh = digests.split([len(params) for params in compared.values()])
    for (mesh, params), part in zip(compared.items(), by_mesh, strict=True):
        are_whole = [isinstance(param, WholeParam) for param in params]
        is_whole = torch.tensor(are_whole, dtype=torch.bool, device=most.device)
        # The largest digest of all ranks and, as its complement, the smallest.
        extremes = torch.stack([part, ~part])  # shape (2, number of parameters)
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                sent = torch.cat([most, extremes.flatten()]).to(device)
                dist.all_reduce(sent, dist.ReduceOp.MAX, group=mesh.get_group(axis))
                sent = sent.to(most.device)
                extremes = sent[len(most) :].view_as(extremes)
                most = sent[: len(most)]
            if axis == 0 and has_replicas(mesh):
                # Other ranks of the gtp axis have other shards: tell them only whether replicas
                # differ. 0 everywhere, and ~0 as its complement, are alike.
                differs = (extremes[0] != ~extremes[1]).long()
                of_shards = torch.stack([differs, torch.full_like(differs, ~0)])
                extremes = torch.where(is_whole, extremes, of_shards)
        differs = (extremes[0] != ~extremes[1]) & (most[0] < 0)
        most[0] = torch.where(differs.any(), dist.get_rank(), most[0])  # for the meshes that follow
        results.append(differs)
    return torch.cat([most, *results])


def _free_nbytes(device: torch.device) -> int:
    """Memory that this rank can still allocate; 0 if that is not known."""
    if device.type != "cuda":
        return 0
    # Torch's allocator has this memory of the device, but no tensor uses it.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _on_host(values: list[Tensor], device: torch.device) -> list[Tensor]:
    """The bytes of ``values`` on the host if they are few, else ``values``: a GPU would load a
    dozen kernels for the digests (0.06 s)."""
    if not 0 < sum(value.numel() for value in values) <= _MOST_ON_HOST:
        return values
    parts = [value.to(device).contiguous().flatten().view(torch.uint8) for value in values]
    return list(torch.cat(parts).cpu().split([part.numel() for part in parts]))


def _comparable(param: ManagedParam) -> Tensor:
    """The values of a parameter; none of what cannot be compared: cut again by an outer
    ``fully_shard`` or over replicas, or several tensors (a quantized weight)."""
    values = param.shard.detach()
    has_parts = isinstance(param, ShardedWeight) and param.has_parts
    if has_parts or param.registration.is_cut_again:
        return torch.empty(0)  # its digest is 0 on all ranks
    if type(values) is not Tensor or values.is_quantized:
        return torch.empty(0)
    return values


def _refusal(unequal: Sequence[ManagedParam]) -> RuntimeError:
    param, *others = unequal
    what = f"'{param.fqn}' of shape {tuple(param.param.shape)}"
    if others:
        what += f" and {len(others)} more"
    return RuntimeError(
        f"Parameter {what} has different values on ranks of mesh axes {param.mesh.mesh_dim_names}, "
        f"with placements {param.placements} (rank {dist.get_rank()}), so each rank would train "
        "another model. Call torch.manual_seed with the same seed on all ranks before you build or "
        "initialize the model, initialize all parameters after to_empty(), or load the same state "
        "dict on all ranks. If a parameter must differ, pass it in ignored_params. "
        f"{see('ranks_diverge')}"
    )


def _check_materialized(params: Sequence[ManagedParam], device: torch.device) -> None:
    """Refuse parameters that are on the meta device, have no memory, or are not those that
    ``gtp_shard`` registered."""
    meta = []
    for param in params:
        param.follow(param.registration.sites[0])  # ``to_empty`` may have replaced the object
        registered = param.registration.current
        if registered is not None and compat.local_tensor(registered).is_meta:  # type: ignore[arg-type]
            meta.append(param)
    if not meta:
        for param in params:
            param.check_memory()
            if isinstance(param, ShardedWeight) and param.form.wire is None and has_hooks(param.shard):
                raise RuntimeError(
                    "gtp_shard expects fsdp_pre_all_gather on a parameter before the call, but "
                    f"parameter '{param.fqn}' of shape {tuple(param.param.shape)} got it later "
                    f"(rank {dist.get_rank()}). Define the hooks in a tensor subclass, and create "
                    "the parameter from it before gtp_shard."
                )
        return
    named = [f"'{param.fqn}' of shape {tuple(param.param.shape)}" for param in meta[:_MAX_NAMED]]
    names = ", ".join(named)
    if len(meta) > _MAX_NAMED:
        names += f" and {len(meta) - _MAX_NAMED} more"
    where = device.type
    if meta[0].policies.offload is not None:
        where = "cpu"
    raise RuntimeError(
        f"Parameters {names} on mesh axes {meta[0].mesh.mesh_dim_names} are still on the meta "
        f"device at the first forward (rank {dist.get_rank()}). Materialize them with "
        f"module.to_empty(device='{where}') and initialize them, or load a state dict."
    )
