"""Users' models whose blocks stand in several lists, run several times, are torch's own, or are partly frozen."""

from typing import Any

import pytest
import torch
import torch.nn as nn

from dtensor_gtp import plan
from dtensor_gtp.planner.recorder import Kind


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_attention_of_torch_is_one_use_of_all_its_matrices(users_models: Any, kind: type[nn.Module]) -> None:
    """Its code reads the weight of ``out_proj`` without a call of that layer."""

    class Stock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(kind(32, 4, 128, batch_first=True) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) if kind is nn.TransformerEncoderLayer else layer(x, x)
            return x

    users_models.define(lambda: (Stock(), torch.zeros(1, 16, 32)))
    whole = plan("users_models:build", "h100", gpus=2).problem.whole
    params = list(users_models.build()[0].parameters())
    assert (whole.numel, whole.unused_numel) == (sum(param.numel() for param in params), 0)
    assert whole.small_numel == sum(param.numel() for param in params if param.ndim < 2)
    uses = [weight for weight in whole.weights if "attn" in weight.name]
    assert len(uses) == 2 * (1 if kind is nn.TransformerEncoderLayer else 2)
    for weight in uses:
        assert (weight.shape, weight.flops) == ((4 * 32, 32), 2 * 16 * 4 * 32 * 32)
        assert sum(op.flops for op in weight.use if op.kind is Kind.ATTENTION) == 2 * 2 * 32 * 16 * 16
        assert sum(op.flops for op in weight.grads if op.kind is Kind.ATTENTION) == 5 * 2 * 32 * 16 * 16


class Stack(nn.Module):
    """Lists of blocks, run one after the other, and that several times."""

    def __init__(self, names: str, num_blocks: int, passes: int = 1) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.names, self.passes = names.split(), passes
        for name in self.names:
            blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(num_blocks))
            self.add_module(name, nn.ModuleList(blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for _ in range(self.passes):
            for name in self.names:
                for block in self.get_submodule(name):
                    x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_blocks_of_two_lists_are_planned_as_those_of_one(users_models: Any, checkpointing: str) -> None:
    found = []
    for model in (("layers", 8), ("encoder decoder", 4)):
        users_models.define(lambda model=model: (Stack(*model), torch.zeros(1, 512, dtype=torch.int64)))
        fixed = {"gtp": 2, "micro_batch": 1}
        found.append(plan("users_models:build", "h100", gpus=2, checkpointing=checkpointing, fixed=fixed).best)
    one, two = found
    assert one.memory.parts() == two.memory.parts()
    assert (one.step_ms, one.reasons) == (two.step_ms, two.reasons)


@pytest.mark.parametrize("gtp", [1, 2])
def test_blocks_that_run_several_times_count_their_state_once(users_models: Any, gtp: int) -> None:
    """Each run is a block: it gathers, saves activations and reduces gradients."""
    found = []
    for passes in (1, 7):
        users_models.define(lambda passes=passes: (Stack("layers", 2, passes), torch.zeros(1, 512).long()))
        fixed = {"gtp": gtp, "micro_batch": 1}
        found.append(plan("users_models:build", "h100", gpus=2, checkpointing="none", global_batch=4, fixed=fixed))
    once, often = found
    state = [result.best.memory[:3] for result in found]  # of two microbatches, so with all gradients
    assert state[0] == state[1]
    numel = sum(param.numel() for param in users_models.build()[0].parameters())
    assert once.problem.whole.numel == often.problem.whole.numel == numel
    assert (len(once.problem.whole.blocks), len(often.problem.whole.blocks)) == (2, 14)
    assert often.best.memory.activations > once.best.memory.activations


class Adapted(nn.Module):
    """A layer, and two of a low rank beside it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.base = nn.Linear(in_features, out_features)
        self.down, self.up = nn.Linear(in_features, 8, bias=False), nn.Linear(8, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def _with_adapters(num_blocks: int, *, is_frozen: bool) -> Any:
    model = Stack("layers", num_blocks)
    for block in model.get_submodule("layers"):
        block[0], block[2] = Adapted(32, 128), Adapted(128, 32)
        for layer in (block[0].base, block[2].base):
            layer.requires_grad_(not is_frozen)
    return model, torch.zeros(1, 512, dtype=torch.int64)


@pytest.mark.parametrize("num_blocks", [1, 3], ids=["single weights", "groups"])
def test_frozen_weights_have_no_gradient_and_no_state(users_models: Any, num_blocks: int) -> None:
    found = []
    for is_frozen in (False, True):
        users_models.define(lambda f=is_frozen: _with_adapters(num_blocks, is_frozen=f))
        fixed = {"gtp": 2, "micro_batch": 1}
        options: dict[str, Any] = {"checkpointing": "none", "global_batch": 4, "fixed": fixed}
        found.append(plan("users_models:build", "h100", gpus=2, **options))
    all_trained, result = found
    params = list(users_models.build()[0].parameters())
    frozen = [param.numel() for param in params if not param.requires_grad]
    whole, other = result.problem.whole, all_trained.problem.whole
    assert whole.numel == other.numel == sum(param.numel() for param in params)
    matrices = sum(param.numel() for param in params if not param.requires_grad and param.ndim > 1)
    assert whole.small_numel - whole.frozen_small_numel == sum(
        param.numel() for param in params if param.requires_grad and param.ndim < 2
    )
    assert other.model_flops - whole.model_flops == 2 * 512 * matrices
    memory, before = result.best.memory, all_trained.best.memory
    assert memory.parameters == before.parameters
    on_rank = matrices // 2 + sum(frozen) - matrices  # vectors stay whole
    assert before.gradients - memory.gradients == 4 * on_rank
    assert before.optimizer - memory.optimizer == 8 * on_rank
    received = [each.best.received["gtp"] for each in found]
    assert received[0] - received[1] == 2 * matrices / 2  # in bf16, of the other rank, once a step
    assert result.best.compute_ms < all_trained.best.compute_ms
    assert "Frozen" not in str(result)


def test_a_backward_that_may_end_before_the_first_block_is_said(users_models: Any) -> None:
    def build() -> Any:
        model = Stack("layers", 4)
        model.requires_grad_(False).head.requires_grad_(True)
        return model, torch.zeros(1, 64, dtype=torch.int64)

    users_models.define(build)
    text = str(plan("users_models:build", "h100", gpus=2))
    assert "Frozen: backward is planned through all blocks" in text
