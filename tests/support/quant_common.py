"""What the tests of quantized weights share: a reference that spells out what a recipe means, and training beside it.

The reference is one process whose dequantized weights follow from the recipe alone. Quantization is a step function:
after each step the reference takes over the trained values, so that a difference in the last bit, once compared, cannot
grow to a step of the format.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, assert_same_params, full, rows_of_rank
from float8_reference import float8_reference
from runtime_common import token_loss as loss_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import gtp_shard, quantize_
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.quant import MXFP8, RECIPES, Direction, Recipe

VOCABULARY = 47
COLUMNS: dict[str, Any] = {
    "shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None
}  # for ``fully_shard``, too


class DequantizedLinear(torch.autograd.Function):
    """What a recipe means, spelled out: quantize the whole weight, dequantize it, multiply."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return x @ dequantized(weight, recipe, Direction.ROWWISE).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = grad @ dequantized(weight, ctx.recipe, Direction.COLUMNWISE)
        return grad_x, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


def dequantized(weight: torch.Tensor, recipe: Recipe, direction: Direction) -> torch.Tensor:
    quantized = recipe.quantize(weight, direction)
    return recipe.dequantize(quantized, weight.shape, direction, weight.dtype)


class RowwiseOnly:
    """A recipe whose rowwise data serve both directions."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def quantize(self, weight: torch.Tensor, direction: Direction) -> Any:
        return self.recipe.quantize(weight, Direction.ROWWISE)

    def dequantize(self, quantized: Any, shape: torch.Size, direction: Direction, dtype: Any) -> torch.Tensor:
        return self.recipe.dequantize(quantized, shape, Direction.ROWWISE, dtype)


class Embedding(nn.Embedding):
    """The reference of an embedding that is tied to a quantized head."""

    recipe: Recipe

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        value = dequantized(self.weight.detach(), self.recipe, Direction.ROWWISE)
        return F.embedding(indices, self.weight + (value - self.weight).detach())


class Grouped(GroupedLinear):
    """The reference of a quantized grouped layer."""

    recipe: Recipe

    def forward(self, x: torch.Tensor, split_sizes: torch.Tensor, scales: Any = None) -> torch.Tensor:
        parts = []
        for part, weight, bias in zip(x.split(split_sizes.tolist()), self.weight, self.bias, strict=True):
            y: torch.Tensor = DequantizedLinear.apply(part, weight, self.recipe)
            parts.append(y + bias)
        return torch.cat(parts)


class Linear(nn.Linear):
    """The reference of a quantized linear layer."""

    recipe: Recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = DequantizedLinear.apply(x, self.weight, self.recipe)
        return y if self.bias is None else y + self.bias


class StraightThrough(torch.autograd.Function):
    """``value``, whose gradient is that of ``weight``."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class StockLinear(Linear):
    """The reference in a group: the stock layer, with the values of rowwise data in both directions. Its op adds the
    bias by itself, which has other bits on some processors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = dequantized(self.weight.detach(), self.recipe, Direction.ROWWISE)
        return F.linear(x, StraightThrough.apply(self.weight, value), self.bias)


@torch.no_grad()
def uneven(weight: torch.Tensor) -> None:
    """Give rows and columns magnitudes of their own, so that blocks along one and along the other have other scales."""
    rows, columns = weight.shape[-2:]
    weight *= torch.exp2(-(torch.arange(rows) % 4.0)).unsqueeze(-1) * torch.exp2(-(torch.arange(columns) // 5 % 3.0))


class Block(nn.Module):
    """With a width that tensor parallelism can cut into whole blocks of every recipe."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        for layer in (self.up, self.down):
            uneven(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Experts(nn.Module):
    """Three experts: for even tokens, for none, and for odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 40)
        self.up = GroupedLinear(3, 40, 70)
        uneven(self.up.weight)
        self.head = nn.Linear(70, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        odd = tokens.flatten() % 2
        order = odd.argsort(stable=True)
        counts = torch.stack([(odd == 0).sum(), odd.new_zeros(()), odd.sum()])
        rows = torch.tanh(self.up(self.embedding(tokens).flatten(0, -2)[order], counts))[order.argsort()]
        return self.head(rows.view(*tokens.shape, 70))


class Net(nn.Module):
    """Odd shapes, with and without bias; two blocks of one shape; a head that may be tied."""

    def __init__(self, dim: int = 40, hidden: int = 70, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList([Block(dim, hidden) for _ in range(2)])
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def blocks_only(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name.startswith("layers")


def up_only(module: nn.Module, name: str) -> bool:
    return blocks_only(module, name) and name.endswith("up")


def is_linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear)


def is_grouped(module: nn.Module, name: str) -> bool:
    return isinstance(module, GroupedLinear)


def reference_of(model: nn.Module, recipe: Recipe, names: Callable[[nn.Module, str], bool]) -> nn.Module:
    reference = copy.deepcopy(model)
    spell_out(reference, recipe, names)
    return reference


def spell_out(model: nn.Module, recipe: Recipe, names: Callable[[nn.Module, str], bool]) -> None:
    """Let the layers that ``names`` accepts, and tables that share their weights, compute what the recipe means."""
    kinds: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Linear, GroupedLinear: Grouped}
    quantized = [
        (module, cls)
        for name, module in model.named_modules()
        for kind, cls in kinds.items()
        if isinstance(module, kind) and names(module, name)
    ]
    weights = {module.weight for module, _ in quantized}
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.weight in weights]
    for module, cls in (*quantized, *((table, Embedding) for table in tables)):
        module.__class__, module.recipe = cls, recipe  # type: ignore[assignment]


def tokens_of(seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (8, 7), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def take_over(reference: nn.Module, model: nn.Module) -> None:
    values = {name: full(param) for name, param in model.named_parameters()}
    for name, param in reference.named_parameters():
        param.copy_(values[name])


def check(
    model: nn.Module,
    recipe: Recipe,
    shard: Callable[[nn.Module], nn.Module],
    mesh: DeviceMesh,
    *,
    names: Callable[[nn.Module, str], bool] = blocks_only,
    steps: int = 2,
    is_exact: bool | None = None,
    make_reference: Callable[..., nn.Module] | None = None,
    cut: Sequence[str] = (),
    **tolerance: float,
) -> nn.Module:
    """Two microbatches a step; outputs, gradients and parameters after each step equal the reference.

    Args:
        is_exact: Losses are the same bits, as they are by default unless layers are ``cut``.
        make_reference: Called with model, recipe and names.
        cut: Layers that tensor parallelism cuts in two.
    """
    by_rank = recipe.compute == "float8"  # activations of each rank are scaled by their own magnitude
    if make_reference is None:
        make_reference = partial(float8_reference, num_slices=2, cut=tuple(cut)) if by_rank else reference_of
    reference = make_reference(model, recipe, names)
    model = shard(copy.deepcopy(model))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.5) for m in (reference, model)]
    for step in range(steps):
        for microbatch in range(2):
            tokens = tokens_of(2 * step + microbatch)
            mine = rows_of_rank(tokens, mesh)
            for part in tokens.chunk(mesh.size() if by_rank else 1):
                (loss_of(reference, part) / (2 * mesh.size() if by_rank else 2)).backward()
            loss = loss_of(model, mine) / 2
            with torch.no_grad():
                expected = loss_of(reference, mine) / 2
            if not cut if is_exact is None else is_exact:
                assert torch.equal(loss, expected), (recipe, loss, expected)
            else:
                torch.testing.assert_close(loss.detach(), expected)
            loss.backward()
        assert_same_params(model, reference, "grad", **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 1)
        assert_same_params(model, reference, "param", **tolerance)
        take_over(reference, model)
    return model


class wire_traffic(TorchDispatchMode):
    """What this rank sends inside of the block: name, dtype and bytes of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # DTensor comes back with the collectives that it consists of
        if func.namespace == "c10d":
            sent = [
                t for t in tree_leaves(args[0 if func._opname == "allreduce_" else 1]) if isinstance(t, torch.Tensor)
            ]
            self.calls.extend((func._opname, t.dtype, t.numel() * t.itemsize) for t in sent)
        return func(*args, **(kwargs or {}))


def traffic_of_a_step(model: nn.Module, x: torch.Tensor) -> tuple[wire_traffic, wire_traffic]:
    """Of forward and of backward."""
    model(x).sum().backward()  # the first pass learns the order
    with wire_traffic() as forward:
        result = model(x)
    with wire_traffic() as backward:
        result.sum().backward()
    return forward, backward


def all_recipes() -> list[Recipe]:
    return [*(cls() for cls in RECIPES.values()), MXFP8(scale_rounding="floor")]


def gtp(
    recipe: Recipe, mesh: DeviceMesh, names: Any = blocks_only, storage: str = "master", **options: Any
) -> Callable[[nn.Module], nn.Module]:
    def shard(model: nn.Module) -> nn.Module:
        quantize_(model, recipe, filter_fn=names, storage=storage)
        return gtp_shard(model, mesh, **{"schedule": ALL, **options})

    return shard


def fully_sharded(
    recipe: Recipe, mesh: DeviceMesh, names: Any = up_only, storage: str = "master", **options: Any
) -> Callable[[nn.Module], nn.Module]:
    """As ``gtp``, by ``fully_shard`` alone."""
    return lambda model: fsdp(quantize_(model, recipe, filter_fn=names, storage=storage), mesh, **options)


def cut_layers(model: nn.Module, tp: DeviceMesh, plan: Any = None) -> nn.Module:
    """Tensor parallelism, by default of ``up`` along dim 0 and of ``down`` along dim 1."""
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, tp, plan or {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def compile_layers(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend="aot_eager", fullgraph=True)
    return model


def fsdp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def recompute(model: nn.Module) -> nn.Module:
    """Activation checkpointing of each block: forward runs again in backward."""
    for layer in model.layers:  # type: ignore[union-attr]
        forward = layer.forward
        layer.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)
    return model
