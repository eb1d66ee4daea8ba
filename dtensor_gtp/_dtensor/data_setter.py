"""``param.data = tensor`` on a sharded parameter, as on a plain one.

Torch (2.11 to 2.13) puts the new tensor behind the DTensor, where no op looks for it, and says nothing. Here the tensor
is given as a whole, and each rank takes its part; or it is a DTensor that lies alike, as an earlier ``param.data``.
As with a plain parameter the old values stay as they are for whoever holds them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from ..placement import GTPShard
from .random_init import whole_draws


def set_data(stock: Any, param: DTensor, value: Any, *, is_managed: bool) -> None:
    """``param.data = value``; ``stock`` is torch's setter. ``is_managed``: ``gtp_shard`` has made the parameter. Its
    placements do not say so: DTensor keeps one spec for equal ones, perhaps with torch's ``Shard`` of another model."""
    spec = compat.dtensor_spec(param)
    has_shard = is_managed or any(isinstance(placement, GTPShard) for placement in spec.placements)
    # Another library may have cut parameters over the same mesh, and may hold their local tensors.
    # Parameters of ours that stay whole have Replicate() on the gtp axis, which is the last one.
    if not whole_draws().is_on_our_mesh(param) or not (has_shard or spec.placements[-1].is_replicate()):
        if has_shard:  # ours, but an outer fully_shard has put it on a larger mesh
            raise _refusal(param, "a parameter that no outer fully_shard has sharded", value)
        stock(param, value)
        return
    if not isinstance(value, Tensor):
        raise _refusal(param, "a tensor", value)
    if value.shape != param.shape:
        raise _refusal(param, f"a tensor of shape {tuple(param.shape)}", value)
    old = compat.local_tensor(param)
    if isinstance(value, DTensor):
        if value.device_mesh != param.device_mesh or value.placements != param.placements:
            raise _refusal(param, "a whole tensor, or a DTensor with these placements", value)
        local = compat.local_tensor(value)
    else:
        part = compat.own_part(value.detach(), param.device_mesh, param.placements)
        # A copy: a view would keep the whole tensor alive. A meta parameter gets memory on the mesh's device.
        local = part.to(param.device_mesh.device_type if old.is_meta else old.device, copy=True).contiguous()
    if type(local) is not type(old):  # e.g. plain values for native storage
        raise _refusal(param, f"a {type(old).__name__}", value)
    new_spec = compat.make_spec(spec.mesh, spec.placements, param.shape, local.dtype)
    stock(param, compat.wrap_local(local.detach(), new_spec))
    compat.set_local(param, local.detach(), new_spec)  # ops read these two, which torch's setter leaves as they were


def _refusal(param: DTensor, expected: str, value: Any) -> ValueError:
    if isinstance(value, Tensor):
        got = f"{type(value).__name__} of shape {tuple(value.shape)}"
    else:
        got = repr(value)
    got += f" with placements {value.placements}" if isinstance(value, DTensor) else ""
    return ValueError(
        f"param.data = value expects {expected}, but got a {got} for a parameter of shape {tuple(param.shape)} with "
        f"placements {param.placements} on mesh axes {param.device_mesh.mesh_dim_names}. Write with load_state_dict, "
        "or with param.copy_(value) under torch.no_grad()."
    )
