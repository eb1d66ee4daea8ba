"""``gathered``: optimizers that need whole matrices, on sharded parameters.

Each parameter has an owner among the ranks that hold its shards. Before a step the owner receives the rows of all
ranks, of the parameter and of its gradient. It steps the whole parameter with the wrapped optimizer, and sends the rows
back. So each rank computes, and keeps the state of, its share of the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from . import _torch_compat as compat
from .placement import chunk_size_and_offset
from .quant.master import master_of


class _Slot:
    """A parameter, and the plain one that the wrapped optimizer steps in its place."""

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self.axis: int | None = None  # the mesh axis whose ranks share the work: their group has an owner
        self.owner = 0  # in that group
        self.dim = 0
        # Of each rank of the group, if it holds rows. Otherwise each rank has the whole, or gathers it.
        self.num_rows: list[int] = []
        self.whole = param
        if not isinstance(param, DTensor):
            return
        self.whole = nn.Parameter(_placeholder(param, _local(param)))
        ranks = [axis for axis, size in enumerate(param.device_mesh.shape) if size > 1]
        axes = [axis for axis in ranks if not param.placements[axis].is_replicate()]
        if ranks:
            self.axis = ranks[-1]
        if len(axes) == 1 and _is_contiguous(param.placements[axes[0]]):
            self.axis = axes[0]
            placement = param.placements[self.axis]
            world = param.device_mesh.size(self.axis)
            self.dim = placement.dim  # type: ignore[attr-defined]
            block_size = getattr(placement, "block_size", 1)
            of_rank = (chunk_size_and_offset(param.shape[self.dim], world, rank, block_size) for rank in range(world))
            self.num_rows = [size for size, _ in of_rank]

    @property
    def group(self) -> dist.ProcessGroup:
        assert isinstance(self.param, DTensor)
        return self.param.device_mesh.get_group(self.axis)

    @property
    def is_owned(self) -> bool:
        return self.axis is None or dist.get_rank(self.group) == self.owner

    @property
    def row_numel(self) -> int:
        return self.param.numel() // max(self.param.shape[self.dim], 1)

    def rows(self, local: Tensor) -> Tensor:
        """Rows of a local part or of the whole, as a vector that the ranks' parts make one after the other."""
        return local.movedim(self.dim, 0).reshape(-1)

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        shape = list(self.param.shape)
        shape.insert(0, shape.pop(self.dim))
        return torch.cat(list(parts)).view(shape).movedim(0, self.dim).contiguous()


def _placeholder(param: Tensor, like: Tensor) -> Tensor:
    """Of the shape of the whole, by which optimizers choose what they do, in the memory of one element."""
    return like.new_zeros(()).expand(param.shape)


def _is_contiguous(placement: Any) -> bool:
    return isinstance(placement, Shard) and getattr(placement, "split_factor", 1) == 1


class GatheredOptimizer(torch.optim.Optimizer):
    """What :func:`gathered` makes subclasses of."""

    optimizer_class: ClassVar[type[torch.optim.Optimizer]]

    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        _handle_full_state_dicts()
        super().__init__(params, {})
        self._slots: list[list[_Slot]] = []
        self._loads: dict[str, list[int]] = {}  # elements that each rank owns, by group of ranks
        groups = [self._stepped(group) for group in self.param_groups]
        self.inner = self.optimizer_class(groups, *args, **kwargs)
        self.defaults = self.inner.defaults
        self._copy_options(self.inner, self)

    def _stepped(self, group: dict[str, Any]) -> dict[str, Any]:
        """A new ``group`` as the wrapped optimizer gets it: with what this rank owns."""
        slots = [_Slot(param) for param in group["params"]]
        self._choose_owners(slots)
        self._slots.append(slots)
        return {**group, "params": [slot.whole for slot in slots if slot.is_owned]}

    def _choose_owners(self, slots: Sequence[_Slot]) -> None:
        """The largest parameter goes to the rank with the least so far, in each group of ranks. One param group after
        the other: a state dict fits whether they came together or later."""
        shared = [slot for slot in slots if slot.axis is not None]
        for slot in sorted(shared, key=lambda slot: -slot.param.numel()):
            load = self._loads.setdefault(slot.group.group_name, [0] * slot.group.size())
            slot.owner = load.index(min(load))
            load[slot.owner] += slot.param.numel()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer; on all ranks alike.

        Args:
            param_group: Parameters under ``"params"``, and options that differ from the defaults.
        """
        is_later = "inner" in self.__dict__  # else torch's constructor calls it, for each of its groups
        if is_later:
            self._copy_options(self, self.inner)  # what schedulers have set since the last step
        super().add_param_group(param_group)
        if is_later:
            self.inner.add_param_group(self._stepped(self.param_groups[-1]))
            self._copy_options(self.inner, self)

    @staticmethod
    def _copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
        """Options of param groups: schedulers change those of this optimizer, some optimizers their own."""
        for theirs, ours in zip(source.param_groups, target.param_groups, strict=True):
            ours |= {key: value for key, value in theirs.items() if key != "params"}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; collective over their meshes.

        Args:
            closure: Evaluates the model again and returns the loss. The wrapped optimizer gets the mean of
                all ranks' losses, if it is a number.

        Returns:
            What ``closure`` has returned, or None.

        Raises:
            NotImplementedError: The wrapped optimizer evaluates the model after it has changed parameters (SAM).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._copy_options(self, self.inner)
        active = [slot for slots in self._slots for slot in slots if slot.param.grad is not None]
        by_group: dict[tuple[str, torch.dtype, torch.dtype], list[_Slot]] = {}
        for slot in active:
            if not slot.num_rows:
                _take_whole(slot)
            else:
                dtypes = _local(slot.param).dtype, _local(slot.param.grad).dtype
                by_group.setdefault((slot.group.group_name, *dtypes), []).append(slot)
        for slots in by_group.values():
            values = _to_owners(slots, [_local(slot.param) for slot in slots])
            grads = _to_owners(slots, [_local(slot.param.grad) for slot in slots])
            for slot, value, grad in zip((s for s in slots if s.is_owned), values, grads, strict=True):
                slot.whole.data = value
                slot.whole.grad = grad
        if closure is None:
            self.inner.step()
        else:
            self._step_by(loss)
        for slots in by_group.values():
            _from_owners(slots)
        # Else the copies of these ranks would part: an optimizer may draw numbers, or add up over what it has.
        _broadcast([slot for slot in active if not slot.num_rows and slot.axis is not None])
        for slot in active:
            _put_back(slot)
        self._copy_options(self.inner, self)
        self._share_state()
        return loss

    def _step_by(self, loss: Any) -> None:
        """Give the wrapped optimizer a closure that returns ``loss``, the average of the ranks'."""
        mean = loss
        if isinstance(loss, Tensor) and loss.is_floating_point():
            mean = self._mean_over_ranks(loss)
        elif isinstance(loss, float):
            mean = self._mean_over_ranks(torch.tensor(loss)).item()
        owned = [slot.whole for slots in self._slots for slot in slots if slot.is_owned]
        versions = [param._version for param in owned]
        is_late = False

        def closure() -> Any:
            nonlocal is_late
            is_late |= versions != [param._version for param in owned]
            return mean

        self.inner.step(closure)
        # All ranks must raise: one that owns nothing has seen no change.
        if self._mean_over_ranks(torch.tensor(float(is_late))) > 0:
            raise NotImplementedError(
                f"gathered does not support {self.optimizer_class.__name__}, which evaluates the model again after "
                "it has changed parameters: ranks have the whole ones in turns. Use it as it is."
            )

    def _mean_over_ranks(self, number: Tensor) -> Tensor:
        params = [slot.param for slots in self._slots for slot in slots if isinstance(slot.param, DTensor)]
        if not params:
            return number.detach()
        mesh = params[0].device_mesh
        mean = number.detach().to(_local(params[0]).device, copy=True)
        for axis in range(mesh.ndim):
            dist.all_reduce(mean, group=mesh.get_group(axis))
        return mean / mesh.size()

    def _share_state(self) -> None:
        """State dicts show what the wrapped optimizer keeps, each rank that of the parameters it owns."""
        for slot in (slot for slots in self._slots for slot in slots):
            self.state[slot.param] = self.inner.state[slot.whole] if slot.is_owned else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``Optimizer.load_state_dict``: what :meth:`state_dict` has given on this rank.

        Args:
            state_dict: Of this class, on as many ranks; ``torch.distributed.checkpoint`` loads on any number of ranks.
        """
        super().load_state_dict(state_dict)
        for slot in (slot for slots in self._slots for slot in slots):
            if slot.param in self.state:
                if slot.is_owned:
                    self.inner.state[slot.whole] = self.state[slot.param]
                else:  # a full state dict has the states of all ranks
                    self.state[slot.param] = {}
            else:  # accelerate loads the state of a new optimizer
                self.inner.state.pop(slot.whole, None)
        self._copy_options(self, self.inner)


@functools.cache
def _handle_full_state_dicts() -> None:
    """Have ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` know that ranks keep different states."""
    module = compat.state_dict_module()
    get = module._get_optim_state_dict
    load = module._load_optim_state_dict

    @functools.wraps(get)
    def get_or_refuse(model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], info: Any) -> Any:
        for optimizer in optimizers:
            if info.full_state_dict and isinstance(optimizer, GatheredOptimizer):
                raise NotImplementedError(
                    "get_optimizer_state_dict expects full_state_dict=False for an optimizer of gathered, but got True "
                    f"for a {type(optimizer).__name__}: each rank has the states of its share of the parameters alone. "
                    "Leave out full_state_dict, and save the result with dtensor_gtp.checkpoint.save: any number of "
                    "processes can load it, also a single one."
                )
        return get(model, optimizers, info)

    @functools.wraps(load)
    def load_each(model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], state_dict: Any, info: Any) -> None:
        for optimizer in optimizers:
            # Each rank has the whole states: ``load_state_dict`` takes those that the rank owns.
            is_direct = isinstance(optimizer, GatheredOptimizer) and not info.broadcast_from_rank0
            is_full = info.full_state_dict
            info.full_state_dict = is_full and not is_direct
            try:
                load(model, (optimizer,), state_dict, info)
            finally:
                info.full_state_dict = is_full

    compat.replace("full optimizer state", module, "_get_optim_state_dict", get_or_refuse)
    compat.replace("loading full optimizer state", module, "_load_optim_state_dict", load_each)


def gathered(optimizer_class: type[torch.optim.Optimizer]) -> type[GatheredOptimizer]:
    """A class of optimizers that steps whole parameters, for sharded ones. Use it instead of ``optimizer_class``.

    For an optimizer that computes with a whole matrix (Shampoo, SOAP, Adafactor, norms of layers) or knows no DTensor.
    One rank steps a parameter and keeps its state; the ranks share the parameters by size. Rows and gradients travel to
    it, updated rows back: three collectives a step for all parameters of a mesh. Results are those of one process.
    Optimizers that treat elements alone (AdamW, Lion, SGD) need none of this, and those that add up numbers over all
    parameters (Prodigy; LAMB, where it clips by a norm of all) would see those of one rank alone. Replicas must seed
    alike for one that draws numbers.

    Args:
        optimizer_class: A class of ``torch.optim`` or of another library. Each rank makes it with the parameters that
            it owns, perhaps none, as plain tensors in groups with the options of all groups.

    Returns:
        A class with the same arguments. :class:`Muon` needs less communication than ``gathered(torch.optim.Muon)``.

    Raises:
        NotImplementedError: For ``torch.optim.LBFGS``, which takes all parameters as one vector.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> optimizer = gathered(torch.optim.Adafactor)(model.parameters(), lr=1e-2)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
    """
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise NotImplementedError(
            f"gathered does not support {optimizer_class.__name__}: it takes all parameters as one vector, and a rank "
            "has its share of them alone. Use it as it is if dim 0 of each parameter divides by the ranks, or keep "
            "parameters whole: SchedulePolicy(min_shard_numel=...)."
        )
    name = f"Gathered{optimizer_class.__name__}"
    return type(name, (GatheredOptimizer,), {"optimizer_class": optimizer_class, "__module__": __name__})


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return master_of(compat.local_part(tensor).detach())


def _take_whole(slot: _Slot) -> None:
    """Of a parameter that each rank has, or gathers over several axes."""
    param = slot.param
    grad = slot.param.grad
    if not isinstance(param, DTensor):
        return
    assert isinstance(grad, DTensor)
    whole: Tensor = param.detach().full_tensor()  # type: ignore[attr-defined]
    slot.whole.data = master_of(whole)
    slot.whole.grad = grad.full_tensor()


def _broadcast(slots: Sequence[_Slot]) -> None:
    """Give all ranks what the owners have computed of parameters that each rank has as a whole."""
    by_owner: dict[tuple[str, int, torch.dtype], list[_Slot]] = {}
    for slot in slots:
        by_owner.setdefault((slot.group.group_name, slot.owner, slot.whole.dtype), []).append(slot)
    for of_owner in by_owner.values():
        wholes = [slot.whole.detach() for slot in of_owner]
        flat = torch.cat([whole.reshape(-1) for whole in wholes])
        dist.broadcast(flat, group=of_owner[0].group, group_src=of_owner[0].owner)
        for whole, part in zip(wholes, flat.split([whole.numel() for whole in wholes]), strict=True):
            whole.copy_(part.view(whole.shape))


def _to_owners(slots: Sequence[_Slot], locals_: Sequence[Tensor]) -> list[Tensor]:
    """Whole tensors of the slots that this rank owns."""
    group = slots[0].group
    rank = dist.get_rank(group)
    world = group.size()
    sent: list[list[Tensor]] = [[] for _ in range(world)]
    for slot, local in zip(slots, locals_, strict=True):
        sent[slot.owner].append(slot.rows(local))
    mine = [slot for slot in slots if slot.owner == rank]
    flat = torch.cat([part for parts in sent for part in parts])
    sizes = [[slot.num_rows[source] * slot.row_numel for slot in mine] for source in range(world)]
    received = flat.new_empty(sum(map(sum, sizes)))
    splits = [sum(part.numel() for part in parts) for parts in sent]
    dist.all_to_all_single(received, flat, list(map(sum, sizes)), splits, group=group)
    parts = iter(received.split([size for of_source in sizes for size in of_source]))
    by_source = [[next(parts) for _ in mine] for _ in range(world)]
    return [slot.assemble([by_source[source][index] for source in range(world)]) for index, slot in enumerate(mine)]


def _from_owners(slots: Sequence[_Slot]) -> None:
    """Each rank writes its rows of what the owners have computed."""
    group = slots[0].group
    rank = dist.get_rank(group)
    world = group.size()
    mine = [slot for slot in slots if slot.owner == rank]
    rows = [slot.rows(slot.whole.detach()).split([n * slot.row_numel for n in slot.num_rows]) for slot in mine]
    like = _local(slots[0].param)
    sent = [part for target in range(world) for part in (of_slot[target] for of_slot in rows)]
    flat = torch.cat([like.new_empty(0), *sent])
    splits = [sum(of_slot[target].numel() for of_slot in rows) for target in range(world)]
    by_owner = [[slot for slot in slots if slot.owner == owner] for owner in range(world)]
    ordered = [slot for of_owner in by_owner for slot in of_owner]
    sizes = [slot.num_rows[rank] * slot.row_numel for slot in ordered]
    received = flat.new_empty(sum(sizes))
    incoming = [sum(slot.num_rows[rank] * slot.row_numel for slot in of_owner) for of_owner in by_owner]
    dist.all_to_all_single(received, flat, incoming, splits, group=group)
    for slot, part in zip(ordered, received.split(sizes), strict=True):
        local = _local(slot.param)
        shape = list(local.shape)
        shape.insert(0, shape.pop(slot.dim))
        local.copy_(part.view(shape).movedim(0, slot.dim))


def _put_back(slot: _Slot) -> None:
    """Free the whole tensors, and tell autograd that the parameter has other values."""
    param = slot.param
    whole = slot.whole
    if not isinstance(param, DTensor):
        return
    if not slot.num_rows:
        whole_value = whole.detach()
        spec = compat.dtensor_spec(param)
        is_replicated = all(isinstance(placement, Replicate) for placement in param.placements)
        if is_replicated:
            part = whole_value
        else:
            part = compat.own_part(whole_value, spec.mesh, spec.placements)
        _local(param).copy_(part)
    torch.autograd.graph.increment_version(param)
    whole.data = _placeholder(param, whole.data)
    whole.grad = None
