"""Tensor parallelism of a user's model by the plan of its config: what is cut, what communicates, what is refused."""

import ast
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import dtensor_gtp
from dtensor_gtp.planner.errors import PlanError
from dtensor_gtp.planner.recorder import Kind
from dtensor_gtp.planner.trace import Trace
from dtensor_gtp.planner.user_model import UserModel

TOKENS, DIM, HIDDEN, HEADS, VOCAB, LAYERS = 64, 32, 128, 4, 96, 3
PLAN = {
    "layers.*.query": "colwise",
    "layers.*.value": "colwise",
    "layers.*.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        q, v = (w(x_BTC).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.query, self.value))
        y = F.scaled_dot_product_attention(q, q, v, is_causal=True)
        x_BTC = x_BTC + self.out(y.transpose(1, 2).flatten(-2))
        return x_BTC + self.down(F.silu(self.up(x_BTC)))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    base_model_prefix = "base"

    def __init__(self, plan: dict[str, str] | None, heads: int = HEADS) -> None:
        super().__init__()
        self.config = SimpleNamespace(base_model_tp_plan=plan, num_attention_heads=heads)
        self.base, self.head = Base(), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(ids))


def load(users_models: Any, plan: dict[str, str] | None = PLAN, heads: int = HEADS) -> UserModel:
    return users_models.load(lambda: (Model(plan, heads), torch.zeros(1, TOKENS).long()), TOKENS)


def operations(trace: Trace) -> list[Any]:
    """All of a forward and backward, but GEMMs of weights."""
    around = [op for weight in trace.weights for op in (*weight.before, *weight.backward)]
    return [*around, *trace.loss, *trace.tail]


def test_layers_of_the_plan_are_cut_and_others_are_whole(users_models: Any) -> None:
    user = load(users_models)
    whole, half = user.trace(1), user.trace(2)
    for one, other in zip(whole.weights, half.weights, strict=True):
        assert one.name == other.name
        is_cut = other.block >= 0
        assert other.flops == one.flops / (2 if is_cut else 1)
        assert other.numel == one.numel // (2 if is_cut else 1)
    assert half.weights[3].shape == (DIM, DIM // 2)  # the columns of "out"
    attention = [sum(op.flops for op in operations(t) if op.kind is Kind.ATTENTION) for t in (whole, half)]
    assert attention[1] == attention[0] / 2


def test_what_ranks_of_tp_exchange(users_models: Any) -> None:
    """In each block two results are all-reduced in forward, in backward the gradients of the inputs of three layers.
    An all-reduce is a reduce-scatter and an all-gather. The first block's input has a gradient: the table's."""
    user = load(users_models)
    assert [op for op in operations(user.trace(1)) if op.kind is Kind.TP] == []
    found = [op.nbytes for op in operations(user.trace(2)) if op.kind is Kind.TP]
    assert found == [TOKENS * DIM * 2] * (LAYERS * (2 + 3) * 2)


def test_activations_inside_of_blocks_are_halved(users_models: Any) -> None:
    user = load(users_models)
    whole, half = ([weight.live for weight in user.trace(tp).weights] for tp in (1, 2))
    saved = [lives[6] - lives[1] for lives in (whole, half)]  # from block to block
    assert saved[0] / 2 < saved[1] < saved[0]


@pytest.mark.parametrize(
    ("plan", "heads", "axis", "message"),
    [
        (None, HEADS, "tp", "tp: the model has no config with a base_model_tp_plan"),
        ({"layers.*.up": "packed_colwise"}, HEADS, "tp", "tp: base_model_tp_plan has 'packed_colwise' for layers"),
        ({"table": "colwise"}, HEADS, "tp", "base_model_tp_plan cuts base.table, which is no nn.Linear .Embedding"),
        (PLAN, 3, "tp", "tp 2 does not divide 3 heads, rows or columns of a layer"),
        (PLAN, HEADS, "pp", "pp: plan does not know where to cut the forward of your model"),
        (PLAN, HEADS, "cp", "cp: the attention of your model does not exchange keys and values"),
    ],
)
def test_what_cannot_be_is_refused_by_name(users_models: Any, plan: Any, heads: int, axis: str, message: str) -> None:
    load(users_models, plan, heads)
    with pytest.raises(PlanError, match=message):
        dtensor_gtp.plan("users_models:build", gpus=8, seq_len=TOKENS, fixed={axis: 2})


def test_code_that_does_not_run_with_slices_is_planned_without_tp(users_models: Any) -> None:
    """Its attention names the number of heads, of which a slice has fewer."""
    user = load(users_models)
    assert user.refuses(2) is None

    def forward(self: Block, x_BTC: torch.Tensor) -> torch.Tensor:
        return x_BTC + self.out(self.query(x_BTC).view(1, TOKENS, HEADS, DIM // HEADS).flatten(-2))

    plan = {name: style for name, style in PLAN.items() if name.partition("*.")[2] in ("query", "out")}
    with mock.patch.object(Block, "forward", forward):
        load(users_models, plan)
        result = dtensor_gtp.plan("users_models:build", gpus=4, seq_len=TOKENS)
        assert {answer.layout.tp for answer in result.answers} == {1}
        reasons = [item.reason for item in result.refused]
        assert any(reason.startswith("tp: the model's code does not run with slices") for reason in reasons)


def test_a_search_finds_tp_and_its_code(users_models: Any) -> None:
    load(users_models)
    result = dtensor_gtp.plan("users_models:build", gpus=4, seq_len=TOKENS)
    assert {answer.layout.tp for answer in result.answers} == {1, 2, 4}
    result = dtensor_gtp.plan("users_models:build", gpus=4, seq_len=TOKENS, fixed={"tp": 2})
    assert result.best.exposed_ms["tp"] > 0
    code = result.code()
    ast.parse(code[: code.index("torchrun")])
    assert "    'base.layers.*.query': ColwiseParallel()," in code
    assert "    'base.layers.*.down': RowwiseParallel()," in code


def test_blocks_in_two_places_have_no_code_that_changes_them(users_models: Any) -> None:
    def build() -> Any:
        parts = {name: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for name in ("left", "right")}
        return nn.Sequential(OrderedDict(parts)), torch.zeros(4, 8)

    users_models.define(build)
    plain, compiled = (
        dtensor_gtp.plan("users_models:build", gpus=2, checkpointing="none", is_compiled=is_compiled).code()
        for is_compiled in (False, True)
    )
    assert "gtp_shard(model" in plain
    assert "blocks stand in 2 places (left, right)" in compiled
    assert "gtp_shard(" not in compiled
    load(users_models)
    code = dtensor_gtp.plan("users_models:build", gpus=2, seq_len=TOKENS, is_compiled=True).code()
    assert "for block in model.base.layers:" in code


def test_slices_of_frozen_layers_are_frozen(users_models: Any) -> None:
    def build() -> Any:
        model = Model(PLAN)
        for block in model.base.layers:
            block.up.requires_grad_(False)
        return model, torch.zeros(1, TOKENS).long()

    half = users_models.load(build, TOKENS).trace(2)
    assert {weight.name for weight in half.weights if weight.is_frozen} == {
        f"base.layers.{number}.up.weight" for number in range(LAYERS)
    }
    assert half.frozen_small_numel == LAYERS * HIDDEN // 2


def test_muon_of_blocks_beside_an_embedding_has_no_code(users_models: Any) -> None:
    """All children of a sequence have numbers: no name tells its blocks from its embedding."""

    def build() -> Any:
        return nn.Sequential(nn.Embedding(8, DIM), Block(), Block(), nn.Linear(DIM, 8)), torch.zeros(1, 4).long()

    users_models.define(build)
    muon, adamw = (
        dtensor_gtp.plan("users_models:build", gpus=2, checkpointing="none", optimizer=optimizer).code()
        for optimizer in ("muon", "adamw")
    )
    assert "muon: blocks stand beside the embedding and the head: what it trains is yours" in muon
    assert "Muon(" not in muon
    assert "gtp_shard(model" in adamw
