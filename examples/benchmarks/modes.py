"""The ways of training the same model that are compared, and the model."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dtensor_gtp import SchedulePolicy, capture_blocks, capture_step, gtp_shard, quantize_
from dtensor_gtp.policy import fixed_policy
from dtensor_gtp.quant import Recipe, resolve_recipe
from harness import World  # first: it makes the modules of examples/ importable
from llama import Llama, LlamaConfig
from peers import in_blocks, megatron_optimizer, scales_of_torchao, to_fsdp2, to_megatron, to_torchao

MODES = ("gtp", "compute", "fsdp2-fp32", "fsdp2-bf16", "gtp-fp32", "gtp-bf16", "gtp-bf16-lookup", "gtp-bf16-exchange")
LOOKUP, EXCHANGE = "-lookup", "-exchange"
COMPILED = "-compiled"  # a mode's name with this suffix is the same with each block compiled
GRAPH = "-graph"  # with this one the step of a gtp mode is replayed as one CUDA graph
BLOCK_GRAPHS = "-blockgraphs"  # and with this one each block of a gtp mode, its collectives between the graphs
PEERS = ("torchao-fp32", "torchao-bf16")  # of recipes; not measured unless asked for
MEGATRON = ("megatron-fp32", "megatron-bf16")  # where megatron-fsdp is installed
# fully_shard with options of its own and of its FSDPModule, gtp_shard with other memory; not measured unless asked for
OPTIONS = ("fsdp2-bf16-kept", "fsdp2-bf16-tuned", "fsdp2-bf16-symm", "gtp-least", "gtp-most_speed")
# what they pass as SchedulePolicy(memory=...); the library chooses all else
MEMORY = {"gtp": "balanced", "gtp-least": "least", "gtp-most_speed": "most_speed"}
BASES = (*MODES, *PEERS, *MEGATRON, *OPTIONS)
RECIPE = "@"  # between the name of a gtp mode and that of a recipe
_REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Preset:
    """Sizes of the model and the lengths it is measured at by default."""

    dim: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    layers: int
    seq_lens: tuple[int, ...]
    rope_theta: float


PRESETS = {
    "llama8b-width": Preset(
        dim=4096,
        hidden_dim=14336,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=128256,
        layers=16,
        seq_lens=(2048, 8192),
        rope_theta=500000.0,
    ),
    "tiny": Preset(
        dim=64,
        hidden_dim=160,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=512,
        layers=2,
        seq_lens=(32, 64),
        rope_theta=10000.0,
    ),
    # Narrow with a wide feed-forward, so that activations take longer than GEMMs on a CPU: what a compiler can fuse.
    "elementwise": Preset(
        dim=32,
        hidden_dim=4096,
        num_heads=2,
        num_kv_heads=1,
        vocab_size=256,
        layers=2,
        seq_lens=(512,),
        rope_theta=10000.0,
    ),
}


@dataclass(frozen=True)
class Workload:
    """What every mode runs.

    Args:
        config: the model's sizes.
        batch: sequences per process.
        seed: of the weights, equal on all processes and in all modes, and of the tokens, which differ by process.
        schedule: fields of ``SchedulePolicy`` for the gtp modes; what is not in it is as the library has it.
    """

    config: LlamaConfig
    batch: int
    seed: int
    schedule: dict[str, Any]


def recipe_modes(modes: list[str], recipes: list[str]) -> list[str]:
    """The modes, each gtp mode followed by itself with each recipe, and torchao's float8 where it is installed.

    Args:
        modes: of :data:`MODES`.
        recipes: names of ``dtensor_gtp.quant.RECIPES``, or NAME:COMPUTE for another ``compute`` than "auto".

    Raises:
        ValueError: if there is no such recipe, or no gtp mode to use it.
    """
    for name in recipes:
        make_recipe(name)
    gtp = [mode for mode in modes if mode.startswith("gtp")]
    if recipes and not gtp:
        raise ValueError(f"recipe_modes expects a gtp mode for the recipes {', '.join(recipes)}, but got {modes}.")
    has_peer = importlib.util.find_spec("torchao") and any(name.startswith("float8") for name in recipes)
    peers = (
        [f"torchao-{mode.partition('-')[2]}" for mode in gtp if not mode.endswith((LOOKUP, EXCHANGE))]
        if has_peer
        else []
    )
    with_recipes = [[mode, *(mode + RECIPE + name for name in recipes if mode in gtp)] for mode in modes]
    return [*peers, *(name for names in with_recipes for name in names)]


def make_recipe(name: str) -> Recipe:
    """The recipe of NAME or NAME:COMPUTE."""
    plain, _, compute = name.partition(":")
    recipe = resolve_recipe(plain)
    return replace(recipe, compute=compute) if compute else recipe


def build_model(workload: Workload, world: World) -> Llama:
    """The whole fp32 model with its initial weights on this process's device."""
    with torch.device("meta"):
        model = Llama(workload.config)
    model.to_empty(device=world.device)
    torch.manual_seed(workload.seed)
    model.init_weights()
    return model


class Mode(NamedTuple):
    """What the name of a mode says.

    Args:
        base: one of :data:`BASES`.
        recipe: of its linear layers, or empty.
    """

    base: str
    recipe: str
    is_compiled: bool
    is_captured: bool
    has_block_graphs: bool = False

    @classmethod
    def parse(cls, mode: str) -> "Mode":
        """Raises:
        ValueError: if there is no such mode.
        """
        plain = mode.removesuffix(BLOCK_GRAPHS).removesuffix(GRAPH).removesuffix(COMPILED)
        base, _, recipe = plain.partition(RECIPE)
        if base not in BASES:
            raise ValueError(f"Mode expects one of {', '.join(BASES)}, but got {mode!r}.")
        is_compiled = mode.removesuffix(GRAPH).endswith(COMPILED)
        return cls(base, recipe, is_compiled, mode.endswith(GRAPH), mode.endswith(BLOCK_GRAPHS))

    @property
    def family(self) -> str:
        return self.base.partition("-")[0]

    @property
    def reduce_dtype(self) -> torch.dtype:
        return _REDUCE_DTYPES["bf16" if self.base in MEMORY else self.base.split("-")[1]]

    @property
    def is_exchanging(self) -> bool:
        """Whether activations cross the wire instead of the embedding's weight."""
        return self.base.endswith((LOOKUP, EXCHANGE))

    @property
    def is_vocabulary_parallel(self) -> bool:
        """Whether they do instead of the output projection's weight, too."""
        return self.base.endswith(EXCHANGE)


def build_mode(mode: str, workload: Workload, world: World) -> nn.Module:
    """Builds the model and prepares it for one of :data:`MODES`.

    Args:
        mode: "compute": whole bf16 weights and no communication, the bound; "fsdp2-R": ``fully_shard`` on each block
            and on the root; "gtp-R": ``gtp_shard`` on the root. R, the dtype of the gradient reduction, is "fp32" or
            "bf16"; weights are stored in fp32 and computed with in bf16. "gtp": as "gtp-bf16", but no schedule is
            passed; "gtp-least" and "gtp-most_speed" pass ``memory``. The others have fixed numbers, those of the
            workload. "gtp-bf16-lookup": activations cross the wire instead of the embedding's weight;
            "gtp-bf16-exchange": instead of the output projection's, too.
            "fsdp2-bf16-kept", "fsdp2-bf16-tuned" and "fsdp2-bf16-symm": with the options of ``peers.to_fsdp2``.
            "gtp-R@RECIPE": the linear layers of the blocks with that recipe; "torchao-R": the same layers as torchao's
            float8 with float8 all-gather, under ``fully_shard``; "megatron-R": ``fully_shard_model`` of megatron-fsdp
            with each block a unit. With the suffix "-compiled" each block is compiled, with ``fullgraph=True``; with
            "-graph" after it, which only :func:`make_step` heeds, steps of gtp modes are CUDA graphs; with
            "-blockgraphs" each block of a gtp mode is recorded by ``capture_blocks``.
        workload: the model.
        world: the processes.

    Raises:
        ValueError: if there is no such mode.
    """
    parsed = Mode.parse(mode)
    model = build_model(workload, world)
    if parsed.recipe:
        quantize_(model, make_recipe(parsed.recipe), filter_fn=in_blocks)
    if parsed.base in PEERS:
        to_torchao(model, world)
    if parsed.is_compiled:
        torch._dynamo.reset()  # what an earlier mode has compiled must neither help this one nor be in its way
        for index, layer in enumerate(model.layers):
            # before fully_shard, whose hooks do not compile; gtp_shard takes modules compiled before or after
            model.layers[index] = torch.compile(layer, fullgraph=True)
    return shard(model, parsed, workload, world)


def shard(model: Llama, mode: Mode, workload: Workload, world: World) -> nn.Module:
    """Prepares the whole model for ``mode``."""
    if mode.family in ("compute", "megatron"):
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        return model if mode.family == "compute" else to_megatron(model, mode.reduce_dtype)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=mode.reduce_dtype)
    if mode.family in ("fsdp2", "torchao"):
        return to_fsdp2(model, policy, world, mode.base.partition("-")[2].partition("-")[2])

    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("gtp",))
    if mode.base == "gtp":
        gtp_shard(model, mesh, mp_policy=policy)
    else:
        gtp_shard(model, mesh, mp_policy=policy, schedule=policy_of(mode, workload))
    if mode.has_block_graphs:
        capture_blocks(model, model.layers)
    return model


def policy_of(mode: Mode, workload: Workload) -> SchedulePolicy:
    """What the library chooses; for modes of fixed numbers these, and those of the workload."""
    if mode.base in MEMORY:
        return SchedulePolicy(memory=MEMORY[mode.base])
    return fixed_policy(**{"embedding": "exchange" if mode.is_exchanging else "gather"} | workload.schedule)


def build_optimizer(model: nn.Module, mode: str, world: World) -> torch.optim.Optimizer:
    """Fused AdamW over what a process owns of the weights.

    The compute mode, the bound of the others, updates stand-ins: fp32 tensors of this process's share of every weight,
    with fixed gradients. Updating the whole weights on each process would be more work than any sharded mode does.
    """
    parsed = Mode.parse(mode)
    if parsed.family == "megatron":
        return megatron_optimizer(torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True))
    if parsed.family != "compute":
        return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True, capturable=parsed.is_captured)
    stand_ins = []
    for parameter in model.parameters():
        share = torch.empty(-(-parameter.numel() // world.size), device=world.device)
        stand_in = nn.Parameter(share.normal_(std=0.02))
        stand_in.grad = torch.empty_like(share).normal_(std=1e-3)
        stand_ins.append(stand_in)
    return torch.optim.AdamW(stand_ins, lr=_LEARNING_RATE, fused=True)


def make_step(
    model: nn.Module, mode: str, workload: Workload, world: World, seq_len: int, optimizer: torch.optim.Optimizer | None
) -> Callable[..., torch.Tensor]:
    """One training step on fixed random tokens, next-token loss.

    Args:
        model: as :func:`build_mode` returns it.
        mode: what it was built for.
        workload: gives batch size and seed.
        world: the processes.
        seq_len: tokens per sequence.
        optimizer: steps if given.

    Returns:
        ``step(inspect=None)``, which runs forward, backward and the optimizer, calls ``inspect()`` if given, sets the
        gradients to None and returns the loss.
    """
    generator = torch.Generator(world.device).manual_seed(workload.seed * 1000 + world.rank)
    shape = (workload.batch, seq_len + 1)
    precompute_scales = scales_of_torchao(model)
    tokens = torch.randint(workload.config.vocab_size, shape, device=world.device, generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    parsed = Mode.parse(mode)
    if parsed.is_vocabulary_parallel:
        from dtensor_gtp.nn.functional import linear_cross_entropy

        def loss_of(inputs: torch.Tensor) -> torch.Tensor:
            return model(inputs, lambda hidden, output: linear_cross_entropy(hidden, output, targets))

    def step(inspect: Callable[[], None] | None = None) -> torch.Tensor:
        loss = loss_of(inputs)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            precompute_scales()
        if inspect is not None:
            inspect()
        for parameter in model.parameters():
            parameter.grad = None
        if parsed.family == "megatron":
            model.zero_grad_buffer()
        return loss.detach()

    if not parsed.is_captured:
        return step
    captured = capture_step(step, model, [optimizer] if optimizer is not None else [])
    # what is inspected is a tensor of an eager step
    return lambda inspect=None: captured() if inspect is None else step(inspect)
