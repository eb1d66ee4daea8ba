"""LoRA and QLoRA: a frozen base, also in low precision, with small trainable adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, check_training, full, shared_directory
from runtime_common import Calls, assert_idle, counted, gathers, token_loss
from schedules import explicit
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Replicate
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import GTPShard, SchedulePolicy, gtp_shard
from dtensor_gtp.report import sharding_report

DIM = 16
RANK = 2
# Bases are sharded, adapters of RANK rows are not.
TINY_ADAPTERS = explicit(min_shard_numel=DIM * RANK + 1)


class LoRALinear(nn.Module):
    """``base(x) + up(down(x))`` with a frozen base."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(DIM, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


class QuantizedLinear(nn.Module):
    """An int8 weight with a scale for each row, a parameter as bitsandbytes has it, or a buffer."""

    def __init__(self, is_parameter: bool) -> None:
        super().__init__()
        weight = torch.randn(DIM, DIM) / DIM**0.5
        scale = weight.abs().amax(1, keepdim=True) / 127
        quantized = (weight / scale).round().to(torch.int8)
        if is_parameter:
            self.quantized = nn.Parameter(quantized, requires_grad=False)
        else:
            self.register_buffer("quantized", quantized)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.quantized.to(x.dtype) * self.scale)


def raw() -> nn.Module:
    """A weight that is read as an attribute."""
    return Calls(lambda own, x: x @ own.weight, weight=torch.randn(DIM, DIM) / DIM**0.5)


class Block(nn.Module):
    def __init__(self, make_base: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM).requires_grad_(False)
        self.first = LoRALinear(make_base())
        self.second = LoRALinear(make_base())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


class Model(nn.Module):
    """Blocks of LoRA layers on a frozen embedding; ``use_reentrant`` recomputes them."""

    use_reentrant: bool | None = None

    def __init__(self, make_base: Callable[[], nn.Module] = lambda: nn.Linear(DIM, DIM)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, DIM).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(make_base) for _ in range(2)])
        self.head = nn.Linear(DIM, 13, bias=False).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.use_reentrant:
            x.requires_grad_()
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def lora(make_base: Callable[[], nn.Module] = lambda: nn.Linear(DIM, DIM)) -> Model:
    torch.manual_seed(0)
    return Model(make_base)


def adapters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def on_trainable(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=1e-2)


def tokens_of(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 13, (8, 6), generator=generator)


class TestLoRA(GlooTest):
    world_size = 2

    def train(self, reference: nn.Module, schedule: SchedulePolicy = TINY_ADAPTERS, **options: Any) -> Any:
        shard = partial(gtp_shard, mesh=self.gtp_mesh(), schedule=schedule)
        options = {"make_optimizer": on_trainable, "steps": 2, **options}
        frozen = {name: param.clone() for name, param in reference.named_parameters() if not param.requires_grad}
        model = check_training(reference, shard, self.gtp_mesh(), tokens_of, token_loss, **options)
        for name, before in frozen.items():
            param = dict(model.named_parameters())[name]
            assert torch.equal(full(param), before), f"{name} is frozen"
            assert param.grad is None, name
        return model

    def test_placements(self) -> None:
        """Tiny adapters stay whole, large ones are sharded."""
        for schedule, whole in ((TINY_ADAPTERS, ("lora", "norm", "bias")), (ALL, ("norm", "bias"))):
            model = self.train(lora(), schedule, num_microbatches=2)
            for name, param in model.named_parameters():
                expected = Replicate() if any(word in name for word in whole) else GTPShard(0)
                assert param.placements == (expected,), f"{name}: {param.placements}"

    def test_recomputed_blocks(self) -> None:
        for use_reentrant, schedule in ((True, ALL), (False, TINY_ADAPTERS)):
            reference = lora()
            reference.use_reentrant = use_reentrant
            self.train(reference, schedule)

    def test_frozen_weights_are_not_reduced(self) -> None:
        """Only adapters communicate gradients: one reduce-scatter each, or one all-reduce for all that are whole."""
        for schedule, expected in ((TINY_ADAPTERS, (0, 1)), (ALL, (8, 0))):
            model = gtp_shard(lora(), self.gtp_mesh(), schedule=schedule)
            tokens = tokens_of(torch.Generator().manual_seed(0))
            for step in range(2):
                with gathers(model) as used, counted() as counts:
                    token_loss(model, tokens).backward()
                self.assertEqual(counts()[1:], expected)
                for name, count in used.items():
                    # No gradient flows below the first block: its first base has no dgrad, but the first backward
                    # guesses that it has. The head turns.
                    is_guessed = step == 0 and name == "blocks.0.first.base.weight"
                    is_forward_only = name in ("embedding.weight", "blocks.0.first.base.weight") and not is_guessed
                    is_kept = name == "head.weight" and step > 0
                    if "lora" not in name:
                        self.assertEqual(count, 1 if is_forward_only or is_kept else 2, f"step {step}: {name}")
            assert_idle(model)

    def test_frozen_weights_save_no_input(self) -> None:
        """What autograd keeps of a frozen layer is nothing, of a trained one its input; weights are never kept."""

        def saved_numel(module: nn.Module, x: torch.Tensor) -> list[int]:
            saved: list[int] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
                module(x)
            return saved

        x = torch.randn(24, DIM, requires_grad=True)
        for make in (lambda: nn.Linear(DIM, DIM), lambda: nn.Linear(DIM, DIM, bias=False), raw):
            model = gtp_shard(nn.Sequential(make(), make()), self.gtp_mesh(), schedule=ALL)
            model.requires_grad_(False)
            self.assertEqual(saved_numel(model, x), [])
            model[1].requires_grad_(True)
            self.assertEqual(saved_numel(model, x), [x.numel()])
        model = gtp_shard(nn.Sequential(nn.Embedding(13, DIM)), self.gtp_mesh(), schedule=ALL)
        model.requires_grad_(False)
        self.assertEqual(saved_numel(model, torch.zeros(24, dtype=torch.long)), [])

    def test_int8_base(self) -> None:
        """Integers are not sharded: they stay whole, and the report says why."""
        for is_parameter in (True, False):
            model = self.train(lora(lambda: QuantizedLinear(is_parameter)))  # noqa: B023
            report = str(sharding_report(model, verbose=True))
            lines = [line for line in report.splitlines() if "quantized" in line]
            self.assertEqual(len(lines), 4 if is_parameter else 0, report)
            for line in lines:
                self.assertRegex(line, "not floating point")
            self.assertEqual(model.blocks[0].first.base.quantized.dtype, torch.int8)

    def test_checkpoint_of_adapters_alone(self) -> None:
        """Adapters and their optimizer state, saved without the base, continue on a base that is built again."""
        options = StateDictOptions(ignore_frozen_params=True)
        for schedule in (TINY_ADAPTERS, ALL):
            model = self.train(lora(), schedule)
            optimizer = on_trainable(list(model.parameters()))
            token_loss(model, tokens_of(torch.Generator().manual_seed(5))).backward()
            optimizer.step()
            optimizer.zero_grad()
            other = gtp_shard(lora(), self.gtp_mesh(), schedule=schedule)
            other_optimizer = on_trainable(list(other.parameters()))
            with shared_directory() as directory:
                state = {
                    "model": get_model_state_dict(model, options=options),
                    "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
                }
                self.assertEqual(state["model"].keys(), adapters(model).keys())
                dcp.save(state, checkpoint_id=directory)
                state = {
                    "model": get_model_state_dict(other, options=options),
                    "optimizer": get_optimizer_state_dict(other, other_optimizer, options=options),
                }
                dcp.load(state, checkpoint_id=directory)
                loose = StateDictOptions(strict=False, ignore_frozen_params=True)
                set_model_state_dict(other, state["model"], options=loose)
                set_optimizer_state_dict(other, other_optimizer, state["optimizer"], options=loose)
            for step in range(2):
                tokens = tokens_of(torch.Generator().manual_seed(10 + step))
                losses = [token_loss(module, tokens) for module in (model, other)]
                assert torch.equal(*losses), "the next forward uses what was loaded"
                for loss, each in zip(losses, (optimizer, other_optimizer), strict=True):
                    loss.backward()
                    each.step()
                    each.zero_grad()
            for name, param in adapters(model).items():
                assert torch.equal(full(param), full(adapters(other)[name])), name
