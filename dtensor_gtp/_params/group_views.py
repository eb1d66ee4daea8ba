"""What the modules of a group have as ``_parameters``, see [Note: groups] in ``weight_group``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from .. import _torch_compat as compat
from .managed_param import Site

WeightGroup = Any  # of ``weight_group``, which imports this file


class FullParams(dict[str, Any]):
    """``_parameters`` of a module during a pass: full weights, which a read gathers."""

    def __init__(self, params: dict[str, Any], group: WeightGroup, grouped: set[str], sharded: dict[str, Any]) -> None:
        super().__init__(params)
        self.group = group
        self._grouped = grouped  # names of parameters that the group gathers
        self.sharded = sharded  # what the module has as ``_parameters`` outside of passes

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        group = self.group
        if group.for_forward.live is None and name in self._grouped:  # a live group has memory
            group.reader.hold_until_end(group)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]  # ``dict.get`` would not gather

    def __setitem__(self, name: str, value: Any) -> None:
        views = self.group.views
        if views.is_pinned and not views.is_in_pass and value is not self.get(name):
            raise RuntimeError(
                f"Parameter '{name}' of block '{self.group.fqn}' was replaced between unshard() "
                f"and reshard() (rank {dist.get_rank()}). Call reshard() before you replace "
                "parameters."
            )
        views.is_changed = True
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self.group.views.is_changed = True
        super().__delitem__(name)

    def items(self) -> Any:
        # After ``unshard``, optimizers and state dicts get the sharded parameters.
        if not (self.group.views.is_in_pass and self.group.reader.reads.gives_full_params):
            return self.sharded.items()
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        return (value for _, value in self.items())


# Code after a graph break may read a weight. The compiler must not trace the gather.
for _reader in (FullParams.__getitem__, FullParams.get, FullParams.items, FullParams.values):
    compat.skip_code(_reader.__code__, recursive=True)


class GroupViews:
    """What the modules of a group have as ``_parameters``, in and out of passes."""

    def __init__(self, group: WeightGroup) -> None:
        self._group = group
        self.calls: dict[nn.Module, Any] = {}  # what calls of parts of the block run outside of passes
        self.is_pinned = False  # after ``unshard``, until ``reshard``
        self.is_in_pass = False
        self.is_changed = False  # whether code has registered other parameters, perhaps for a while
        self._hooks: list[Any] = []  # of ``note_gradients``
        self.make()

    def make(self) -> None:
        """Look up the parameters of the modules anew."""
        leaf_of: dict[Site, nn.Parameter] = {}
        for member, leaf in self._group.leaves.by_member.items():
            leaf_of |= dict.fromkeys(member.registration.sites, leaf)
        self._of_modules = []
        for module in dict.fromkeys(site.module for site in leaf_of):
            sharded = module._parameters  # callers have put them back, if ``show`` was called
            full = {name: leaf_of.get(Site(module, name), param) for name, param in sharded.items()}
            grouped = {name for name in full if Site(module, name) in leaf_of}
            gathering = FullParams(full, self._group, grouped, sharded)
            # Compiled code cannot trace ``gathering``: it gets the plain dict.
            self._of_modules.append((module, sharded, full, gathering))

    def replaced_in_forward(self) -> RuntimeError | None:
        """At the end of a pass: an error if code has registered or removed a parameter, which no later pass would know.
        They are as before then. ``functional_call`` has put back what it replaced."""
        if not self.is_changed:
            return None
        self.is_changed = False
        changed: list[str] = []
        for *_, plain, full in self._of_modules:
            now = dict(dict.items(full))
            changed += [name for name in {**plain, **now} if now.get(name) is not plain.get(name)]
            full.clear()
            full.update(plain)
        if not changed:
            return None
        return RuntimeError(
            f"A forward of block '{self._group.fqn}' registers or removes parameter '{changed[0]}', but gtp_shard has "
            f"sharded the parameters that were there (rank {dist.get_rank()}). Do so before gtp_shard, or write to the "
            "parameter under torch.no_grad()."
        )

    def show(self, *, is_compiled: bool = False, is_in_pass: bool = True) -> None:
        """Let modules read the full weights. In a pass (a forward) they are parameters, too."""
        self.is_in_pass = is_in_pass
        for module, _, plain, full in self._of_modules:
            module.__dict__["_parameters"] = plain if is_compiled else full
        self._call_plainly()

    def _call_plainly(self) -> None:
        """Calls of parts of the block are those of their classes."""
        for module in self.calls:
            module.__dict__.pop("_call_impl", None)

    def hide(self) -> None:
        """Let the modules have the sharded parameters again. After ``pin``, and in a backward,
        where activation checkpointing calls modules, they still read the full ones."""
        self.is_in_pass = False
        if self.is_pinned or self._group.reader.passes.is_in_backward:
            for module, _, _, full in self._of_modules:
                module.__dict__["_parameters"] = full
            if self._group.reader.passes.is_in_backward:
                # No use says when autograd reads what such a call recomputes. So reads hold it until the end.
                self._call_plainly()
            return
        self.put_back()
        for module, call in self.calls.items():
            module.__dict__["_call_impl"] = call

    def put_back(self) -> None:
        """Give the modules their sharded parameters: they have the full ones after ``unshard``, or
        if the last ``show`` or ``hide`` was interrupted."""
        for module, sharded, *_ in self._of_modules:
            module.__dict__["_parameters"] = sharded

    def pin(self, note_backward: Callable[[], None]) -> None:
        """Let modules read full weights outside of passes, too; see ``note_gradients``."""
        if not self.is_pinned:
            self.is_pinned = True
            self.note_gradients(note_backward)
            self.hide()

    def unpin(self) -> None:
        """The counterpart of ``pin``."""
        self.is_pinned = False
        self.forget_hooks()
        self.hide()

    def note_gradients(self, note_backward: Callable[[], None]) -> None:
        """Call ``note_backward`` with each gradient that comes outside of the backward of a block,
        until the next forward."""
        if self._hooks:
            return  # all callers pass the same function
        note = compat.weakly(note_backward)
        for leaf in self._group.leaves.by_member.values():
            if leaf.requires_grad:
                hook = leaf.register_post_accumulate_grad_hook(lambda _: note())
                self._hooks.append(hook)

    def forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
