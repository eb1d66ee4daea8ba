"""Stacks of experts, the ways of training them that are compared, and the rows that they compute on."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from dtensor_gtp import GTPShard, SchedulePolicy, capture_step, gtp_shard
from dtensor_gtp.nn import GroupedMLP
from harness import World

COMPUTE = ("compute", "compute-buffer")  # whole weights, no communication
GTP = ("gtp", "gtp-rows", "gtp-graph", "gtp-rows-graph")
FSDP2 = ("fsdp2", "fsdp2-rows")
KEPT = "-kept"  # a sharded mode's name with this suffix keeps weights from forward to backward
MODES = (*COMPUTE, *GTP, *FSDP2, *(mode + KEPT for mode in (*GTP, *FSDP2)))
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of one block and what it is measured at by default.

    Args:
        dim: width of tokens.
        hidden_dim: inner width of each expert.
        num_experts: experts of a block.
        top_k: experts of a token.
        blocks: lengths of the two stacks, in blocks.
        tokens: tokens of each process.
    """

    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    blocks: tuple[int, int]
    tokens: tuple[int, ...]

    @property
    def weights_per_token(self) -> int:
        """Elements of the weights that a token meets in a block."""
        return 3 * self.dim * self.hidden_dim * self.top_k


PRESETS = {
    "deepseek-v2-lite": Preset(2048, 1408, num_experts=64, top_k=6, blocks=(2, 6), tokens=(8192, 32768)),
    "mixtral": Preset(4096, 14336, num_experts=8, top_k=2, blocks=(2, 4), tokens=(8192, 32768)),
    "tiny": Preset(32, 48, num_experts=4, top_k=2, blocks=(1, 3), tokens=(16, 64)),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How experts lie on the processes: ``ep`` groups of experts, the weights of each over ``expert_gtp`` processes."""

    ep: int
    expert_gtp: int

    @classmethod
    def of(cls, world: World, expert_gtp: int, preset: Preset) -> "Layout":
        """Raises:
        ValueError: the processes or the experts do not divide so.
        """
        ep = world.size // expert_gtp
        if ep * expert_gtp != world.size or preset.num_experts % ep:
            raise ValueError(
                f"Layout expects an expert_gtp that divides the {world.size} processes, into a number that divides "
                f"{preset.num_experts} experts, but got {expert_gtp}."
            )
        return cls(ep, expert_gtp)

    def mesh(self, world: World) -> DeviceMesh:
        """The axis over which the weights of experts are cut."""
        shape = (self.ep, self.expert_gtp)
        return init_device_mesh(world.device.type, shape, mesh_dim_names=("ep", "expert_gtp"))["expert_gtp"]


class Blocks(nn.Module):
    """Blocks of experts with norms and residual connections, all on the same counts.

    Without a norm each gated block squares what is largest: six of them overflowed.
    """

    def __init__(self, preset: Preset, num_experts: int) -> None:
        super().__init__()
        sizes = (num_experts, preset.dim, preset.hidden_dim)
        self.blocks = nn.ModuleList(GroupedMLP(*sizes) for _ in range(max(preset.blocks)))

    def forward(self, rows: torch.Tensor, split_sizes: torch.Tensor, num_blocks: int) -> torch.Tensor:
        for block in self.blocks[:num_blocks]:
            rows = rows + block(nn.functional.rms_norm(rows, rows.shape[-1:]), split_sizes)
        return rows


def build(
    mode: str, preset: Preset, layout: Layout, mesh: DeviceMesh, world: World, seed: int, schedule: Mapping[str, Any]
) -> nn.Module:
    """The longer stack with the same fp32 weights in each mode, prepared for ``mode``; it computes in bf16.

    Args:
        mode: one of :data:`MODES`. "compute": whole bf16 weights; "compute-buffer": the same, lying in memory as a
            gather buffer of "gtp-rows" does, rows of all experts side by side; "gtp": ``gtp_shard`` as it is;
            "gtp-rows": each process has rows of every expert; with "-graph" the step is one CUDA graph; "fsdp2":
            ``fully_shard`` on each block, whole experts; "fsdp2-rows": rows of every expert.
        preset: sizes.
        layout: this process computes with the experts of one group.
        mesh: of the layout.
        world: the processes.
        seed: of the weights.
        schedule: fields of ``SchedulePolicy`` for the gtp modes.
    """
    with torch.device("meta"):
        model = Blocks(preset, preset.num_experts // layout.ep)
    model.to_empty(device=world.device)
    torch.manual_seed(seed)
    for param in model.parameters():
        nn.init.normal_(param, std=param.shape[-1] ** -0.5)
    if mode in COMPUTE:
        return _whole(model, mode)
    name, is_kept = mode.removesuffix(KEPT), mode.endswith(KEPT)
    if name in FSDP2:
        dim = 1 if name == "fsdp2-rows" else 0
        for block in model.blocks:
            fully_shard(
                block,
                mesh=mesh,
                mp_policy=POLICY,
                reshard_after_forward=not is_kept,
                shard_placement_fn=lambda param: Shard(dim),
            )
        return fully_shard(model, mesh=mesh, mp_policy=POLICY)
    placement = GTPShard(1) if name.startswith("gtp-rows") else None
    return gtp_shard(
        model,
        mesh,
        mp_policy=POLICY,
        reshard_after_forward=not is_kept,
        shard_placement_fn=lambda param: placement,
        schedule=SchedulePolicy(**schedule),
    )


def _whole(model: Blocks, mode: str) -> nn.Module:
    model.bfloat16()
    for param in model.parameters() if mode == "compute-buffer" else ():
        param.data = param.data.movedim(1, 0).contiguous().movedim(0, 1)
    return model


def make_step(
    model: nn.Module, mode: str, preset: Preset, layout: Layout, tokens: int, num_blocks: int, world: World, seed: int
) -> Callable[[], torch.Tensor]:
    """Forward and backward on fixed rows, for a stack of ``num_blocks``; returns the mean square of the output.

    Each process has as many rows as its tokens have experts, with counts of its own, drawn from a skewed distribution.
    """
    generator = torch.Generator(world.device).manual_seed(seed * 1000 + world.rank)
    num_experts, num_rows = preset.num_experts // layout.ep, tokens * preset.top_k
    popularity = torch.rand(num_experts, generator=generator, device=world.device).square() + 0.05
    chosen = torch.multinomial(popularity, num_rows, replacement=True, generator=generator)
    splits = torch.bincount(chosen, minlength=num_experts)
    shape = (num_rows, preset.dim)
    fixed = torch.randn(shape, generator=generator, device=world.device, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        rows = fixed.detach().requires_grad_()  # a leaf of each step, so that a graph has one of its own
        loss = model(rows, splits, num_blocks).float().square().mean()
        loss.backward()
        for param in model.parameters():
            param.grad = None
        return loss.detach()

    # A CPU has no graphs.
    return capture_step(step, model) if "-graph" in mode and world.is_cuda else step
