"""The parameters that one runtime manages, and the groups in which some of them are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._params.managed_param import ManagedParam
from .._params.sharded_weight import Gatherable, ShardedWeight
from .._params.weight_group import WeightGroup
from .._params.whole_param import WholeParam


class Members:
    """All of them, in the order of the calls that registered them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []  # each a ``binding.ShardGroup``: what the runtime serves
        self.weights: list[ShardedWeight] = []
        self.whole: list[WholeParam] = []
        self.groups: list[WeightGroup] = []
        # Of single weights, and groups. Plans name them by index.
        self.gatherables: list[Gatherable] = []
        self.is_offloaded = False  # whether shards are on the host
        # Of parameters that are cut again, optimizers hold the objects that an outer ``fully_shard``
        # has made.
        self.is_cut_again = False
        self._num_calls = 0
        # By the ids of their objects, for optimizer steps; ``by_id`` rebuilds it if it is empty.
        self._by_id: dict[int, ManagedParam] = {}

    @property
    def params(self) -> list[ManagedParam]:
        return [*self.weights, *self.whole]

    @property
    def single_weights(self) -> list[ShardedWeight]:
        """The weights that no group gathers."""
        return [weight for weight in self.weights if weight.group is None]

    def add(self, params: Sequence[ManagedParam]) -> None:
        """Take over the parameters of one call. The outermost call must come last."""
        self.forget_objects()
        self._num_calls += 1
        for param in params:
            param.registration.on_replaced = self.forget_objects
            self.is_offloaded |= param.policies.offload is not None
            if isinstance(param, WholeParam):
                self.whole.append(param)
            elif isinstance(param, ShardedWeight):
                self.weights.append(param)
                for target in param.gatherables:
                    target.index = len(self.gatherables)
                    target.call = self._num_calls
                    self.gatherables.append(target)

    def use_groups(self, groups: Sequence[WeightGroup]) -> None:
        """The members of these groups are gathered together from now on, all others alone."""
        self.groups = list(groups)
        singles = (target for weight in self.single_weights for target in weight.gatherables)
        self.gatherables = [*singles, *(group.for_forward for group in groups)]
        # Weights in groups keep their old numbers, which no plan uses any more.
        for index, target in enumerate(self.gatherables):
            target.index = index

    def forget_objects(self) -> None:
        """Some parameter objects were replaced, or an outer ``fully_shard`` now manages them."""
        self._by_id = {}

    def by_id(self) -> dict[int, ManagedParam]:
        """Parameters by the ids of their objects."""
        if not self._by_id:
            self._by_id = {id(param.param): param for param in self.params}
            self.is_cut_again = any(param.registration.is_cut_again for param in self.params)
        return self._by_id

    def member_of(self, param: object) -> ManagedParam | None:
        """The managed parameter with this object; None if it is another one that has got its id."""
        member = self.by_id().get(id(param))
        if member is None or member.param is not param:
            return None
        return member

    def among(self, ids: set[int]) -> list[ManagedParam]:
        """The managed parameters among objects with these ids."""
        return [self._by_id[key] for key in ids & self.by_id().keys()]  # ``by_id()`` runs first
