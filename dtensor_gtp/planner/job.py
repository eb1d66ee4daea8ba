"""What a user asks for, and one way of dividing it over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args

from ..policy import Memory
from ..quant.recipe import Recipe
from ..quant.recipes import RECIPES
from .costs import Axis
from .errors import expect

AXES = ("pp", "replicate", "cp", "gtp", "tp", "ep", "expert_gtp")
# Logits and the loss in fp32, as most code has them; in bf16; in chunks of tokens; in a kernel that makes no logits.
LOSSES = ("fp32", "bf16", "chunked", "fused")
# How tokens go to experts: a row for each choice, as this package sends them; once to each host that has experts of a
# token, as DeepEP does; and that behind compute of another microbatch, as DualPipe does.
DISPATCHES = ("rows", "hosts", "hidden")
CHECKPOINTS = ("none", "selective", "full")
# Bytes of optimizer state for a parameter in float32.
OPTIMIZERS: Mapping[str, int] = {"adamw": 8, "sgd": 0, "sgd-momentum": 4, "muon": 4}


def _option(default: Any, known: Sequence[Any], help: str, flag: str = "") -> Any:
    """A field of a job: what it may be, what the command says of it, and its name there."""
    return field(default=default, metadata={"known": known, "help": help, "flag": flag})


@dataclass(frozen=True)
class Job:
    """A training job.

    Args:
        gpus: How many.
        seq_len: Tokens of a sequence.
        global_batch: Sequences of one optimizer step.
        recipe: "bf16", or a recipe of ``quantize_`` with or without ":dequantize", for the linear layers of the blocks.
        checkpointing: "none", "selective", "full", or "auto" for the fastest that fits.
        optimizer: "adamw", "sgd", "sgd-momentum" or "muon".
        memory: As in ``SchedulePolicy``.
        reduce_dtype: "bf16" or "fp32".
        virtual_stages: Chunks of blocks that a rank of a pipeline has in turns; 1 for 1F1B, 0 for a block
            each with the memory of 1F1B.
        shards_optimizer: Whether optimizer states are divided over replicas too (ZeRO-1).
        loss: "fp32", "bf16", "chunked" or "fused": what there is of the logits.
        dispatch: "rows", "hosts" or "hidden": how tokens go to experts.
        is_compiled: Whether blocks are compiled.
        is_captured: Whether the step is replayed as a CUDA graph.
        fixed: Sizes of axes that are not searched, by name; "micro_batch" too.

    Raises:
        PlanError: A field is out of its range, or is no known name.

    Example:
        >>> job = Job(gpus=16, seq_len=4096, recipe="mxfp8", fixed={"tp": 2})
        >>> job.batch  # one sequence for each GPU
        16
    """

    gpus: int = _option(MISSING, range(1, 2**20 + 1), "number of GPUs")
    seq_len: int = _option(8192, range(1, 2**24 + 1), "tokens of a sequence; default: 8192, or as inputs have")
    global_batch: int = _option(0, range(2**24 + 1), "sequences of a step; default: one for each GPU")
    recipe: str = _option("bf16", ("bf16", *RECIPES), "of the blocks' layers; with :dequantize for bf16 GEMMs")
    checkpointing: str = _option("auto", ("auto", *CHECKPOINTS), "what is computed again; auto: the fastest that fits")
    optimizer: str = _option("adamw", tuple(OPTIMIZERS), "whose state counts")
    memory: str = _option("balanced", get_args(Memory), "as in SchedulePolicy")
    reduce_dtype: str = _option("bf16", ("bf16", "fp32"), "of gradients on the wire")
    loss: str = _option("fp32", LOSSES, "how logits and loss are computed")
    dispatch: str = _option("rows", DISPATCHES, "how tokens go to experts")
    is_compiled: bool = _option(False, (False, True), "blocks are compiled", "compile")
    is_captured: bool = _option(False, (False, True), "the step is one CUDA graph", "capture")
    virtual_stages: int = _option(0, range(2**14 + 1), "chunks of a rank of a pipeline; default: a block each")
    shards_optimizer: bool = _option(False, (False, True), "optimizer states are divided over replicas too", "zero1")
    fixed: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            known = item.metadata.get("known")
            if isinstance(known, range):
                is_fine = type(value) is int and value in known
                wrong = f"got {value!r}. Pass another."
                expect(is_fine, f"plan expects {item.name} from {known[0]} to {known[-1]}", wrong)
            elif known is not None:
                _check(item.name, value.removesuffix(":dequantize") if item.name == "recipe" else value, known)
        for name, size in self.fixed.items():
            _check("axis", name, (*AXES, "micro_batch"))
            is_fine = type(size) is int and size >= 1
            expect(is_fine, f"plan expects a positive size of {name}", f"got {size!r}. Pass another.")
        given = {name: self.fixed[name] for name in AXES[:5] if name in self.fixed}
        product = math.prod(given.values())
        asked = " x ".join(f"{name} {size}" for name, size in given.items())
        wrong = f"{asked} = {product} does not. Pass other sizes, or leave one to the search."
        expect(not self.gpus % product, f"plan expects a product of axes that divides {self.gpus} GPUs", wrong)

    @property
    def batch(self) -> int:
        """Sequences of a step; by default one for each GPU."""
        return self.global_batch or self.gpus

    @property
    def quantization(self) -> Recipe | None:
        """The recipe of the blocks' linear layers; None for bf16."""
        name, _, compute = self.recipe.partition(":")
        if name == "bf16":
            return None
        return RECIPES[name](compute=compute or "auto")

    @property
    def precision(self) -> str:
        """What GEMMs of the blocks compute in, as the package does. Formats without GEMMs are dequantized."""
        recipe = self.quantization
        if recipe is not None and recipe.has_gemms and recipe.compute != "dequantize":
            return "float8"
        return "bf16"


def _check(name: str, value: object, known: Sequence[object]) -> None:
    wrong = f"got {value!r}. Pass one of them."
    expect(value in known, f"plan expects one of {', '.join(map(str, known))} as {name}", wrong)


@dataclass(frozen=True, order=True)
class Layout:
    """Sizes of all axes, and how a batch is cut.

    Args:
        pp: Stages of the pipeline.
        replicate: Copies of everything.
        cp: Ranks that share a sequence.
        gtp: Ranks that share each weight.
        tp: Ranks that share each layer.
        ep: Ranks that share the experts.
        expert_gtp: Ranks that share the weights of each expert.
        micro_batch: Sequences of one forward.
        checkpoint: What is computed again.
        keep: Whether weights are gathered once a step and gradients reduced once, so that microbatches between
            communicate nothing.

    Example:
        >>> layout = Layout(replicate=2, gtp=8, micro_batch=2)
        >>> layout.ranks, layout.data_ranks, layout.describe()
        (16, 16, 'replicate 2, gtp 8')
        >>> layout.num_microbatches(Job(gpus=16, global_batch=64))
        2
    """

    pp: int = 1
    replicate: int = 1
    cp: int = 1
    gtp: int = 1
    tp: int = 1
    ep: int = 1
    expert_gtp: int = 1
    micro_batch: int = 1
    checkpoint: str = "none"
    keep: bool = False

    @property
    def ranks(self) -> int:
        """GPUs."""
        return self.pp * self.replicate * self.cp * self.gtp * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that see different sequences."""
        return self.replicate * self.gtp

    def num_microbatches(self, job: Job) -> int:
        """Forwards of a rank in one optimizer step.

        Args:
            job: The job that the layout is of.
        """
        return job.batch // (self.data_ranks * self.micro_batch)

    def axes(self) -> dict[str, Axis]:
        """The groups: ranks along tp are neighbours, then gtp, cp, replicate and pp. Experts have their own axes
        over the ranks of one stage, of which expert_gtp is the innermost. All that hold one shard are its replicas."""
        dense = self.gtp * self.tp
        stage = self.ranks // self.pp
        experts = self.ep * self.expert_gtp
        return {
            "tp": Axis(self.tp, 1),
            "gtp": Axis(self.gtp, self.tp),
            "cp": Axis(self.cp, dense),
            "replicate": Axis(self.replicate * self.cp, dense),
            "pp": Axis(self.pp, stage),
            "expert_gtp": Axis(self.expert_gtp, 1),
            "ep": Axis(self.ep, self.expert_gtp),
            "expert_replicate": Axis(stage // experts, experts),
        }

    def describe(self) -> str:
        """The axes that are larger than one, as text."""
        return ", ".join(f"{name} {getattr(self, name)}" for name in AXES if getattr(self, name) > 1) or "one GPU"
