"""What the tests of tensor parallelism share: cells (a model, its plan, its batch), models, plans and meshes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from checkpoint_common import job_state, load_job
from common import ALL, assert_same_params, full, rows_of_rank, shared_directory
from fsdp_common import mesh_of as root_mesh
from fsdp_common import next_token_loss
from runtime_common import Calls, gathers, local
from runtime_common import square_loss as mean_square
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dtensor_gtp import GTPShard, gtp_shard

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from llama import Llama, LlamaConfig

Plan = dict[str, ParallelStyle]
PlacementFn = Callable[[nn.Module], Callable[[nn.Parameter], Placement | None] | None]

GTP_TP = ((2, 2), ("gtp", "tp"))
TP_GTP = ((2, 2), ("tp", "gtp"))
GTP_ALONE = ((4, 1), ("gtp", "tp"))
TP_ALONE = ((1, 4), ("gtp", "tp"))
REPLICATE_TP = ((2, 1, 2), ("replicate", "gtp", "tp"))
REPLICATE_GTP = ((2, 2, 1), ("replicate", "gtp", "tp"))


@dataclass
class Cell:
    """A model, how tensor parallelism cuts it, and what it eats: floats of a shape, or indices below ``vocabulary``."""

    make: Callable[[], nn.Module]
    plan: Plan | Callable[[nn.Module, DeviceMesh], object]
    shape: tuple[int, ...] = (6,)
    vocabulary: int = 0
    loss: Callable[[nn.Module, Any], torch.Tensor] = mean_square
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    placement_fn: PlacementFn = lambda model: None

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        if self.vocabulary:
            return torch.randint(0, self.vocabulary, (8, *self.shape), generator=generator)
        return torch.randn((8, *self.shape), generator=generator, dtype=torch.float64)

    def reference(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().double()

    def sharded(self, model: nn.Module, root: DeviceMesh, **options: Any) -> nn.Module:
        if callable(self.plan):
            self.plan(model, root["tp"])
        else:
            parallelize_module(model, root["tp"], self.plan)
        return gtp_shard(model, gtp_axes(root), schedule=ALL, shard_placement_fn=self.placement_fn(model), **options)


def gtp_axes(root: DeviceMesh) -> DeviceMesh:
    return root["replicate", "gtp"] if "replicate" in (root.mesh_dim_names or ()) else root["gtp"]


class Chain(nn.Sequential):
    """As Sequential, whose own forward torch.compile leaves out, compiling child by child."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


class Norms(nn.Module):
    """A norm used twice and linear layers on (batch, sequence, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.last = nn.RMSNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.tanh(self.up(self.norm(x))))
        return self.last(self.norm(x))


def norms_cell(num_blocks: int = 1) -> Cell:
    """Everything between the inputs of the first and the outputs of the last block is cut along the sequence."""
    sequence = Shard(1)
    plan: Plan = {
        "*.norm": SequenceParallel(),
        "*.up": ColwiseParallel(input_layouts=sequence),
        "*.down": RowwiseParallel(output_layouts=sequence),
        "*.last": SequenceParallel(use_local_output=True),
        "": PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=sequence,
            output_layouts=sequence,
            desired_output_layouts=Replicate(),
        ),
    }
    return Cell(lambda: Chain(*[Norms() for _ in range(num_blocks)]), plan, (4, 6))


def uneven_cell() -> Cell:
    """Neither axis divides any weight, nor what the other axis has left of it."""
    return Cell(
        lambda: Chain(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 7)),
        {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()},
    )


def replicate_all(model: nn.Module, tp: DeviceMesh) -> None:
    for module in model:  # type: ignore[attr-defined]
        distribute_module(module, tp)


def sharded_input(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The rows of the batch are cut over tp as well, as a DTensor, where the model is one of DTensors."""
    weight = model[0].weight  # type: ignore[index]
    if isinstance(weight, DTensor):
        batch = distribute_tensor(batch, weight.device_mesh["tp"], [Shard(0)])
    loss = model(batch).square().mean()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def sharded_output(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output = model(batch)
    return (output.full_tensor() if isinstance(output, DTensor) else output).square().mean()


def outside_cell() -> Cell:
    """A feed-forward in the plan behind a layer and a norm that are not."""
    return Cell(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)),
        {"2": ColwiseParallel(), "4": RowwiseParallel()},
    )


def embeddings_cell() -> Cell:
    """One cut by vocabulary, unevenly, so that each rank masks what it does not hold; one by columns."""

    def both(own: Any, tokens: torch.Tensor) -> torch.Tensor:
        return own.head(own.rows(tokens) + torch.tanh(own.columns(tokens)))

    def make() -> nn.Module:
        return Calls(both, rows=nn.Embedding(17, 6), columns=nn.Embedding(17, 6), head=nn.Linear(6, 17))

    rows, columns = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
    return Cell(make, {"rows": rows, "columns": columns}, (5,), 17, loss=next_token_loss)


def tied_cell() -> Cell:
    """One weight, rowwise as an embedding and colwise as a head: parallelized one by one, then tied."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(18, 6), nn.LayerNorm(6), nn.Linear(6, 18, bias=False))
        model[2].weight = model[0].weight
        return model

    def plan(model: Any, tp: DeviceMesh) -> None:
        rows, columns = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, tp, {"0": rows, "2": columns})
        model[2].weight = model[0].weight

    return Cell(make, plan, (5,), 18, loss=next_token_loss)


class Inner(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.inner(x) * factor


class Prepared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Inner(nn.LayerNorm(6))
        self.second = Inner(nn.RMSNorm(6))
        self.third = Inner(nn.Linear(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x), 0.5))


class Stacked(nn.Module):
    """Weights of two experts and a gain, without any module of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 6, 9) / 3)
        self.down = nn.Parameter(torch.randn(2, 9, 6) / 3)
        self.gain = nn.Parameter(torch.randn(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down, gain = (local(weight) for weight in (self.up, self.down, self.gain))
        hidden = torch.tanh(copy_to_tp(x, self.up) @ up) * gain
        return sum_over_tp(hidden @ down, self.down).sum(0)


def copy_to_tp(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A tensor that each tp rank uses for a part of the result: its gradient is a partial sum."""
    if not isinstance(weight, DTensor):
        return x
    return DTensor.from_local(x, weight.device_mesh, [Replicate()]).to_local(grad_placements=[Partial()])


def sum_over_tp(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not isinstance(weight, DTensor):
        return x
    return DTensor.from_local(x, weight.device_mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


def cut_stacked(model: nn.Module, tp: DeviceMesh) -> None:
    for name, dim in (("up", 2), ("down", 1), ("gain", 0)):
        weight = distribute_tensor(model.get_parameter(name).detach(), tp, [Shard(dim)])
        model.register_parameter(name, nn.Parameter(weight))


def llama_plan(wrapped: str = "") -> Plan:
    """The plan of torchtitan's Llama for the names of the example's; ``wrapped`` comes between a block and its name."""
    sequence, whole = Shard(1), Replicate()
    block: Plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=whole),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=sequence),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=whole),
        "ffn.w1": ColwiseParallel(),
        "ffn.w3": ColwiseParallel(),
        "ffn.w2": RowwiseParallel(output_layouts=sequence),
    }
    return {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        **{f"layers.*{wrapped}.{name}": style for name, style in block.items()},
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=sequence, use_local_output=False),
    }


LLAMA = LlamaConfig(vocab_size=18, dim=24, num_layers=2, num_heads=6, num_kv_heads=2, hidden_dim=20, max_seq_len=8)


def whole_heads(model: nn.Module) -> Callable[[nn.Parameter], Placement | None]:
    projections = [module for name, module in model.named_modules() if name.endswith((".wq", ".wk", ".wv"))]
    return {module.weight: GTPShard(0, block_size=LLAMA.head_dim) for module in projections}.get


class RecomputedLlama(Llama):
    """Recomputes each block in backward; ``how`` is "selective" to recompute all but its GEMMs."""

    def __init__(self, how: str) -> None:
        super().__init__(LLAMA)
        self.options: dict[str, Any] = {"use_reentrant": how == "reentrant"}
        if how == "selective":
            gemms = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
            self.options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, gemms)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options)
        return self.output(self.norm(x))


def make_llama(how: str) -> nn.Module:
    if how == "plain":
        return Llama(LLAMA)
    if how != "wrapper":
        return RecomputedLlama(how)
    model = Llama(LLAMA)
    for name, layer in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(layer))
    return model


def llama_cell(how: str = "plain") -> Cell:
    """``how`` the blocks are recomputed, if they are."""
    return Cell(
        functools.partial(make_llama, how),
        llama_plan("._checkpoint_wrapped_module" if how == "wrapper" else ""),
        (5,),
        LLAMA.vocab_size,
        loss=next_token_loss,
        around=loss_parallel,
        placement_fn=whole_heads,
    )


def gathers_of_a_step(model: nn.Module, cell: Cell, root: DeviceMesh) -> dict[str, set[int]]:
    """How often a later step gathers the weights of each child."""
    for _ in range(2):
        batch = rows_of_rank(cell.batch(torch.Generator()).to(root.device_type), gtp_axes(root))
        with gathers(model) as used, cell.around():
            cell.loss(model, batch).backward()
    counts: dict[str, set[int]] = {}
    for name, count in used.items():
        counts.setdefault(name.split(".")[0], set()).add(count)
    return counts


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def check_cell(
    cell: Cell,
    *layouts: Any,
    num_microbatches: int = 1,
    sync_last_only: bool = False,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
    max_norm: float | None = None,
) -> Any:
    """Train on each mesh in turn, from the checkpoint that was written on the one before; the last one of several
    resumes in one process.

    Args:
        layouts: Arguments of ``root_mesh``, all of one device type.

    Returns:
        The model on the last mesh.
    """
    device = root_mesh(*layouts[0]).device_type
    reference = cell.reference().to(device)
    reference_optimizer = make_optimizer(reference)
    with shared_directory() as directory:
        for index, layout in enumerate(layouts):
            root = root_mesh(*layout)
            model = cell.sharded(cell.reference(seed=index).to(device), root)
            optimizer = make_optimizer(model)
            if index:
                load_job(model, optimizer, directory / str(index - 1))
                assert_same_params(model, reference)
            for step in range(1 if index else 2):
                generator = torch.Generator().manual_seed(2 * index + step)
                for microbatch in range(num_microbatches):
                    if sync_last_only:
                        model.set_requires_gradient_sync(microbatch == num_microbatches - 1)  # type: ignore[operator]
                    batch = cell.batch(generator).to(device)
                    for module, rows in ((reference, batch), (model, rows_of_rank(batch, gtp_axes(root)))):
                        with cell.around():
                            (cell.loss(module, rows) / num_microbatches).backward()
                assert_same_params(model, reference, "grad")
                if max_norm is not None:
                    norms = [full(nn.utils.clip_grad_norm_(m.parameters(), max_norm)) for m in (model, reference)]
                    torch.testing.assert_close(*norms)
                    assert norms[1].item() > max_norm
                    assert_same_params(model, reference, "grad")
                for opt in (reference_optimizer, optimizer):
                    opt.step()
                    opt.zero_grad()
                assert_same_params(model, reference)
            if len(layouts) > 1:
                dcp.save(job_state(model, optimizer), checkpoint_id=directory / str(index))
        if len(layouts) == 1:
            return model
        plain = cell.reference(seed=99).to(device)
        plain_optimizer = make_optimizer(plain)
        load_job(plain, plain_optimizer, directory / str(len(layouts) - 1))
    assert_same_params(plain, reference)
    for a, b in zip(plain.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(plain_optimizer.state[a], reference_optimizer.state[b])
    return model
