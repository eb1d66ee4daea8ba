"""An optimizer of native weights: float32 masters live in its state, quantized values are written back.

It wraps a stock optimizer, which steps the masters instead of the weights, and every other
parameter itself. Its state dict is that of the stock optimizer with one more entry for each native
weight, ``master``: a DTensor placed as the weight is, so that DCP takes it to any topology.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .master import placed_like
from .native import NativeWeight, native_of
from .native_data import NativeInfo, groups_of, quantize_parts
from .planes import Quantized

_KEY = "master"
_Version = tuple[int, int]  # of a parameter, and of this rank's part of it


class MasterOptimizer(torch.optim.Optimizer):
    """Trains parameters with native storage (:func:`~dtensor_gtp.quantize_`), and any others, by a
    stock optimizer.

    A step updates masters in float32 and writes their quantized values into the parameters. Scales
    of whole weights take one all-reduce for all weights on each mesh axis that cuts them. Masters
    and the optimizer's state cost what they cost in ordinary mixed precision; native storage saves
    the second copy of the weights and their gradients' width. Gradients are read in the dtype in
    which they come. A learning rate of zero changes no byte. The state dict is the stock
    optimizer's with an entry ``master`` for each native weight. After a load of the model alone the
    next step goes on from what was loaded; call ``reset()`` of a captured step, which does not
    look.

    Args:
        params: As for any optimizer: parameters, named parameters, or groups of them.
        optimizer_class: Such as ``torch.optim.AdamW``; called once with the parameters and ``kwargs``.
        masters: High-precision values to start from instead of the dequantized ones, by the
            parameters' names in the module that ``quantize_`` was called on. Whole tensors of the
            weight's shape, or DTensors placed as it is.
        kwargs: Arguments of ``optimizer_class``.

    Raises:
        TypeError: ``optimizer_class`` is no optimizer class.
        ValueError: ``masters`` names a parameter that is not here or has another shape.

    Example:
        >>> model = quantize_(nn.Linear(64, 64), "float8_blockwise", storage="native")
        >>> model = gtp_shard(model, init_weight_mesh("cpu", gtp=4).weights)
        >>> optimizer = MasterOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.load_state_dict(optimizer.state_dict())
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        masters: Mapping[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise TypeError(f"MasterOptimizer expects a class of optimizers, but got {optimizer_class!r}.")
        # Makes groups with lists of parameters of anything that an optimizer takes.
        super().__init__(params, {})
        self._initial = dict(masters or {})  # by name, for ``_add_master``
        self._masters: dict[nn.Parameter, nn.Parameter] = {}  # by native weight
        # Of weight and master when one was last made of the other.
        self._versions: dict[nn.Parameter, tuple[_Version, _Version]] = {}
        members = [param for group in self.param_groups for param in group["params"]]
        natives = [native_of(param) for param in members]
        names = {native.info.name for native in natives if native is not None}
        unknown = self._initial.keys() - names
        if unknown:
            raise ValueError(f"MasterOptimizer expects masters of its native parameters, but got {sorted(unknown)}.")
        for param in members:
            self._add_master(param)
        groups = list(map(self._stepped, self.param_groups))
        self._inner: torch.optim.Optimizer = optimizer_class(groups, **kwargs)
        self.defaults = dict(self._inner.defaults)  # ``add_param_group`` fills later groups up with these
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_options(inner))

    def _stepped(self, group: dict[str, Any]) -> dict[str, Any]:
        """``group`` as the stock optimizer gets it."""
        return group | {"params": [self._masters.get(param, param) for param in group["params"]]}

    def _add_master(self, param: nn.Parameter) -> None:
        """For a native weight that is trained: it requires a gradient, or has one."""
        native = native_of(param)
        if native is None or not (param.requires_grad or param.grad is not None):
            return
        given = self._initial.get(native.info.name)
        if given is None:
            value = native.dequantized_to(torch.float32)
        else:
            value = _local_part(param, native, given)
        if isinstance(param, DTensor):
            where = (param.device_mesh, param.placements)
            value = compat.wrap_local(value, compat.make_spec(*where, param.shape, torch.float32))
        self._masters[param] = nn.Parameter(value)
        self._note_versions(param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer."""
        super().add_param_group(param_group)
        if "_inner" in self.__dict__:
            # Else torch calls it for the groups that the constructor gets.
            added = self.param_groups[-1]
            for param in added["params"]:
                self._add_master(param)
            self._inner.add_param_group(self._stepped(added))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update masters and parameters; collective over the meshes of weights with one scale for
        the whole weight.

        Args:
            closure: Evaluates the model again and returns the loss. It is called once.

        Returns:
            What ``closure`` has returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # First: a load must win over what a step would make of old masters.
        self._follow_weights()
        self._hand_over()
        # Those to which ``_hand_over`` gave a gradient.
        trained = [param for param, master in self._masters.items() if master.grad is not None]
        self._inner.step()
        for param in trained:
            self._masters[param].grad = None  # the parameter's own is the user's
        still: set[nn.Parameter] = set()  # what this step does not change
        for group in self.param_groups:
            if _is_zero(group.get("lr")):
                still.update(group["params"])
        moved = [param for param in trained if param not in still]
        # Collective for scales of whole weights, so ranks need equal lists.
        for param, native, quantized in self._quantized(moved):
            native.write(quantized)
            torch.autograd.graph.increment_version(param)  # gathered data are stale now
        self._take_back()
        # After the stock optimizer, which may have changed them.
        for param in self._masters:
            self._note_versions(param)
        return loss

    def _note_versions(self, param: nn.Parameter) -> None:
        self._versions[param] = (_version_of(param), _version_of(self._masters[param]))

    def _follow_weights(self) -> None:
        """Go on from weights that were written to since the last step (a state dict was loaded),
        unless the state of this optimizer was, too. A master stays if the weight, swapped for a
        while, has its values. Alike on all ranks.
        """
        # One that was written says that a state dict was loaded: a rank without rows of a weight sees no write to it.
        is_written = any(self._versions[param][0] != _version_of(param) for param in self._masters)
        written = [param for param in self._masters if is_written and not self._is_loaded(param)]
        for param, native, quantized in self._quantized(written):
            pairs = zip(native.quantized.planes, quantized.planes, strict=True)
            # As bytes: a NaN is unlike itself.
            if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
                # Somebody has written other values to the weight: they win over the old master.
                compat.local_part(self._masters[param]).copy_(native.dequantized_to(torch.float32))

    def _is_loaded(self, param: nn.Parameter) -> bool:
        """Whether the state of this optimizer was loaded since the last step."""
        master = self._masters[param]
        given = self.state.get(param, {}).get(_KEY)
        # ``_take_back`` leaves the master's own memory in the state.
        # A load leaves other memory there, or writes to the master.
        is_replaced = given is not None and _address(given) != _address(master)
        return is_replaced or self._versions[param][1] != _version_of(master)

    def _hand_over(self) -> None:
        """Gradients, options and state, which others may have changed, to the stock optimizer."""
        self._inner.state.clear()  # filled anew from ``self.state``, which a load may have replaced
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_options(group))
            for index, param in enumerate(group["params"]):
                is_trained = native_of(param) is not None and param.grad is not None
                if is_trained and param not in self._masters:
                    self._add_master(param)  # it was frozen
                stepped = self._masters.get(param, param)
                inner["params"][index] = stepped
                state = self.state.get(param, {})
                if stepped is not param:
                    state = self._hand_over_master(param, stepped, state)
                if state:
                    self._inner.state[stepped] = state

    def _hand_over_master(self, param: nn.Parameter, master: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """Give ``master`` the gradient, and what was loaded. Returns the stock optimizer's state of it."""
        given = state.get(_KEY)
        if given is not None and _address(given) != _address(master):
            master.copy_(given)  # a state dict was loaded
        master.grad = None  # no step, if the weight has none
        if param.grad is not None:
            grad = compat.local_part(param.grad).to(torch.float32)
            master.grad = placed_like(master, grad)
        return {key: value for key, value in state.items() if key != _KEY}

    def _take_back(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                stepped = self._masters.get(param, param)
                state = self._inner.state.get(stepped, {})
                if stepped is not param:
                    state = {**state, _KEY: stepped.detach()}
                if state:
                    self.state[param] = state  # by the weight: the groups of this optimizer name it

    def _quantized(self, params: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, NativeWeight, Quantized]]:
        """Each with its native weight and with the data that its master quantizes to."""
        natives: list[NativeWeight] = []
        infos: list[NativeInfo] = []
        for param in params:
            native = cast("NativeWeight", native_of(param))
            natives.append(native)
            # A part that ``fully_shard`` has cut does not know its groups, but its DTensor does.
            infos.append(native.info._replace(groups=groups_of(param, native.recipe)))
        values = [compat.local_part(self._masters[param]).detach() for param in params]
        return zip(params, natives, quantize_parts(values, infos), strict=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and masters of an optimizer like this one. Parameters stay: load the model's
        state dict, too.

        Args:
            state_dict: What ``state_dict()`` of such an optimizer has given.
        """
        own = [group["params"] for group in self.param_groups]
        # Torch gives loaded state the dtype of the parameter: for a native weight it must be that
        # of its master.
        for group in self.param_groups:
            group["params"] = self._stepped(group)["params"]
        try:
            super().load_state_dict(state_dict)
        finally:
            for group, params in zip(self.param_groups, own, strict=True):
                group["params"] = params  # the weights again, also after an error
        for param, master in self._masters.items():
            # Torch has loaded the state by master, because the groups had masters.
            if master in self.state:
                state = self.state.pop(master)
                self.state[param] = state
                if _KEY in state:
                    with torch.no_grad():
                        master.copy_(state[_KEY])
                    state[_KEY] = master.detach()  # the master's own memory, no copy


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _local_part(param: nn.Parameter, native: NativeWeight, given: Tensor) -> Tensor:
    """This rank's part of what the user gives as master, in memory of its own; ValueError if it
    does not fit."""
    name = native.info.name
    expected = tuple(param.shape)
    if given.shape != param.shape:
        raise ValueError(f"MasterOptimizer expects a master of shape {expected} for '{name}', but got {given.shape}.")
    if isinstance(given, DTensor):
        if not isinstance(param, DTensor) or given.placements != param.placements:
            raise ValueError(
                f"MasterOptimizer expects a master for '{name}' of shape {expected} that is placed "
                "as the parameter or whole on every rank, but got a DTensor with placements "
                f"{given.placements}."
            )
        given = compat.local_tensor(given)
    elif isinstance(param, DTensor):
        given = compat.own_part(given, param.device_mesh, param.placements)
    part = torch.empty(native.shape, dtype=torch.float32, device=native.device)
    return part.copy_(given.detach())


def _version_of(tensor: Tensor) -> _Version:
    """Counts writes, also to the planes of a native weight, which a state dict shares."""
    native = native_of(tensor)
    if native is None:
        planes = 0
    else:
        planes = sum(plane._version for plane in native.quantized.planes)
    return tensor._version, compat.local_part(tensor)._version + planes


def _address(tensor: Tensor) -> int:
    return compat.local_part(tensor).data_ptr()


def _is_zero(lr: Any) -> bool:
    """Whether a learning rate is zero, as far as the host knows. Torch steps so to give an
    optimizer its state: native weights must keep their bits."""
    if isinstance(lr, Tensor):
        return lr.device.type == "cpu" and not bool(lr)
    return lr is not None and not lr
