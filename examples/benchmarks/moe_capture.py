"""A whole block of a mixture of experts as a CUDA graph: replayed with other routing, compared bit by bit."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from dtensor_gtp import SchedulePolicy, capture_step, gtp_shard, init_weight_mesh
from dtensor_gtp.nn import GroupedExperts, GroupedMLP, parallelize_experts
from harness import World, local_tensor, median, time_steps
from moe_modes import POLICY, Layout, Preset

ROUTINGS = 3  # batches that are routed differently
_WARMUP = 3  # of capture_step: eager steps before it records


class Block(nn.Module):
    """Norm, router, dispatch, experts, combine, residual connection."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.top_k = preset.top_k
        self.norm = nn.RMSNorm(preset.dim)
        self.router = nn.Linear(preset.dim, preset.num_experts, bias=False)
        self.experts = GroupedExperts(GroupedMLP(preset.num_experts, preset.dim, preset.hidden_dim))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output and the experts of each token."""
        hidden = self.norm(x)
        probs, chosen = self.router(hidden).float().softmax(-1).topk(self.top_k)
        weights = probs / probs.sum(-1, keepdim=True)
        return x + self.experts(hidden, chosen, weights), chosen


def build_block(preset: Preset, layout: Layout, world: World, seed: int, schedule: Mapping[str, Any]) -> Block:
    """The block with its experts over (ep, expert_gtp), all else over all processes; dispatch asks no host."""
    mesh = init_weight_mesh(world.device.type, gtp=world.size, ep=layout.ep, expert_gtp=layout.expert_gtp)
    with torch.device("meta"):
        model = Block(preset)
    model.to_empty(device=world.device)
    torch.manual_seed(seed)
    for param in model.parameters():
        nn.init.normal_(param, std=param.shape[-1] ** -0.5)
    nn.init.ones_(model.norm.weight)
    parallelize_experts(model.experts, mesh["ep"], method="all_gather")
    policy = SchedulePolicy(**schedule)
    gtp_shard(model.experts.mlp, mesh.expert_weights, mp_policy=POLICY, schedule=policy)
    model.experts.mlp.set_gradient_divide_factor(mesh.data.size())
    return gtp_shard(model, mesh.weights, mp_policy=POLICY, schedule=policy)


def measure_block(
    preset: Preset, layout: Layout, tokens: int, world: World, seed: int, steps: int, schedule: Mapping[str, Any]
) -> dict[str, Any]:
    """Forward and backward of one block, eager and captured.

    Returns:
        a record; ``differences`` names what of the captured steps has other bits than eager ones, on any process.
        Without GPUs both are eager.
    """
    model = build_block(preset, layout, world, seed, schedule)
    batches = [_batch(preset, tokens, world, seed + number) for number in range(ROUTINGS)]

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output, chosen = model(x)
        loss = output.float().square().mean()
        loss.backward()
        return loss.detach(), output.detach(), chosen

    def train(run: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss, output, chosen = run(x)
        found = {"loss": loss, "output": output, "routing": chosen}
        grads = ((name, param.grad) for name, param in model.named_parameters())
        found |= {f"gradient of {name}": local_tensor(grad).clone() for name, grad in grads if grad is not None}
        model.zero_grad()
        return found

    for _ in range(2):  # in which the order of gathers is observed
        train(step, batches[0])
    expected = [train(step, x) for x in batches]
    is_rerouted = [not torch.equal(expected[0]["routing"], other["routing"]) for other in expected[1:]]
    captured = capture_step(step, model, warmup_steps=_WARMUP) if world.is_cuda else step
    for number in range(_WARMUP):
        train(captured, batches[number % ROUTINGS])
    differences = set()
    for number, x in enumerate([*batches, *batches[::-1]]):
        found, wanted = train(captured, x), expected[min(number, 2 * ROUTINGS - 1 - number)]
        differences |= {name for name in wanted if not torch.equal(found[name], wanted[name])}
    del expected
    num_different = world.slowest([len(differences)])[0]
    return {
        "is_captured": world.is_cuda,
        "num_graphs": captured.num_graphs if world.is_cuda else 0,
        "is_rerouted": world.slowest([not all(is_rerouted)])[0] == 0,
        "is_bit_equal": num_different == 0,
        "differences": sorted(differences),
        "eager_ms": _time(step, model, batches[0], world, steps),
        "graph_ms": _time(captured, model, batches[0], world, steps),
    }


def _time(run: Callable[[torch.Tensor], object], model: Block, x: torch.Tensor, world: World, steps: int) -> float:
    """Milliseconds of a step, the median."""

    def one() -> None:
        model.zero_grad()
        run(x)

    one()
    samples = time_steps(one, world, steps, free_running=False)
    model.zero_grad()
    return median(samples)


def _batch(preset: Preset, tokens: int, world: World, seed: int) -> torch.Tensor:
    """Tokens that lean to a direction of their batch, so that routers prefer other experts in each."""
    generator = torch.Generator(world.device).manual_seed(seed * 1000 + world.rank)
    noise = torch.randn(tokens, preset.dim, generator=generator, device=world.device)
    direction = torch.randn(preset.dim, generator=generator, device=world.device)
    return F.layer_norm(noise + direction, (preset.dim,)).bfloat16()
