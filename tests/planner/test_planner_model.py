"""Models and recordings of the planner: sizes, what is repeated, and what users bring."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from dtensor_gtp import plan
from dtensor_gtp.planner.errors import PlanError
from dtensor_gtp.planner.evaluate import EXPERTS, Problem
from dtensor_gtp.planner.job import Job
from dtensor_gtp.planner.machine import load_machine
from dtensor_gtp.planner.model import PRESETS, Collectives, ModelConfig, Reference
from dtensor_gtp.planner.recorder import Kind, Recorder
from dtensor_gtp.planner.trace import Part, Trace, record, record_reference, repeated
from dtensor_gtp.planner.user_model import load_model

TINY = ModelConfig("tiny", 64, 5, 4, 2, 16, 128, 256)
MIXTURE = replace(TINY, experts=4, experts_per_token=2, expert_hidden_dim=32, shared_experts=1, dense_layers=2)
EXAMPLES = Path(__file__).parents[2] / "examples"


def most(trace: Trace) -> int:
    """The most bytes of activations at any moment."""
    return max(max(weight.amounts) for weight in trace.weights)


BILLIONS = {
    **{"llama3-8b": 8.03, "llama3-70b": 70.55, "llama3-405b": 405.85},
    **{"mixtral-8x7b": 46.7, "deepseek-v3": 671.03},
}


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_presets_have_the_published_numbers_of_parameters(name: str, billions: float) -> None:
    problem = Problem(Job(1, seq_len=256), PRESETS[name], load_machine("h100"))
    assert problem.whole.numel / 1e9 == pytest.approx(billions, abs=0.01)


def recorded(config: ModelConfig, num_tokens: int = 32) -> Any:
    """All blocks, none of them repeated."""

    def loss_of(model: nn.Module, recorder: Recorder) -> torch.Tensor:
        assert isinstance(model, Reference)
        tokens = torch.zeros(1, num_tokens + 1, dtype=torch.int64)
        return model.loss(tokens[:, :-1].contiguous(), tokens[:, 1:], Collectives(recorder, 1, 1, 1))

    return record(lambda: Reference(config, config.kinds, num_tokens), loss_of)


@pytest.mark.parametrize("config", [TINY, replace(MIXTURE, layers=7, dense_layers=3)], ids=["dense", "mixture"])
def test_repeated_blocks_are_what_a_recording_of_all_has(config: ModelConfig) -> None:
    whole, few = recorded(config), repeated(record_reference(config, 32), config, Part(tuple(config.kinds)))
    assert [weight.name for weight in few.weights] == [weight.name for weight in whole.weights]
    for weight, expected in zip(few.weights, whole.weights, strict=True):
        assert weight == expected, weight.name
    assert (few.loss, few.tail, most(few)) == (whole.loss, whole.tail, most(whole))


def test_the_reference_computes_what_the_example_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from llama import Llama, LlamaConfig

    sizes = LlamaConfig(256, 64, num_layers=5, num_heads=4, num_kv_heads=2, hidden_dim=128, max_seq_len=32)

    def loss_of(model: nn.Module, _: Recorder) -> torch.Tensor:
        tokens = torch.zeros(1, 33, dtype=torch.int64)
        return F.cross_entropy(model(tokens[:, :-1].contiguous()).flatten(0, 1), tokens[:, 1:].flatten())

    example, reference = record(lambda: Llama(sizes), loss_of), recorded(TINY)
    assert most(example) == most(reference)
    for weight, expected in zip(example.weights, reference.weights, strict=True):
        assert (weight.name, weight.flops, weight.live) == (expected.name, expected.flops, expected.live)
    for part in ("before", "backward"):
        first, second = (
            [op for weight in trace.weights for op in getattr(weight, part) if op.kind is not Kind.VIEW]
            for trace in (example, reference)
        )
        sizes, expected_sizes = (sorted(op.nbytes for op in ops if op.nbytes > 999) for ops in (first, second))
        assert sizes == expected_sizes


def test_operations_are_counted_as_published() -> None:
    """Six for each parameter and token, but for those of the table, and half of all scores of attention."""
    trace, tokens = recorded(TINY), 32
    matrices = sum(weight.numel for weight in trace.weights if not weight.is_table)
    scores = TINY.layers * 2 * TINY.heads * TINY.head_dim * tokens / 2
    assert trace.model_flops == pytest.approx(6 * tokens * (matrices + scores))
    products = sum((3 if weight.has_dgrad else 0) * weight.flops for weight in trace.weights)
    attention = sum(
        op.flops for weight in trace.weights for op in (*weight.before, *weight.backward) if op.kind is Kind.ATTENTION
    )
    # Backward of fused attention computes scores again: 3.5 times forward, not 3.
    assert products + attention * 3 / 3.5 == pytest.approx(trace.model_flops)


def test_tp_and_cp_divide_what_a_rank_computes() -> None:
    one, tp, cp = (record_reference(TINY, 64, *sizes) for sizes in ((1, 1), (2, 1), (1, 2)))
    flops = [sum(weight.flops for weight in trace.weights) for trace in (one, tp, cp)]
    assert flops[1] == flops[2] == flops[0] / 2
    kinds = {trace: [op.kind for weight in trace.weights for op in weight.before] for trace in (one, tp, cp)}
    assert Kind.TP in kinds[tp]
    assert kinds[cp].count(Kind.CP) == 2 * 3  # keys and values of the blocks that are recorded
    assert Kind.TP not in kinds[one]


def test_experts_are_divided_and_tokens_exchanged() -> None:
    one, two = (record_reference(MIXTURE, 64, 1, 1, ep) for ep in (1, 2))
    experts = [sum(weight.numel for weight in trace.weights if weight.is_expert) for trace in (one, two)]
    assert experts[1] == experts[0] / 2
    exchanges = [op for weight in two.weights for op in (*weight.before, *weight.backward) if op.kind is Kind.EP]
    assert len(exchanges) == 4 * 3  # there and back, in forward and backward, of three mixtures


def config_json(path: Path, **changes: Any) -> str:
    content: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 5, "vocab_size": 256}
    content |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, **changes}
    path.write_text(json.dumps(content))
    return str(path)


def test_config_json_of_transformers(tmp_path: Path) -> None:
    config = load_model(config_json(tmp_path / "config.json"), 8)
    assert config == replace(TINY, name=tmp_path.name)
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    config = load_model(config_json(tmp_path / "config.json", **mixture), 8)
    assert (config.experts, config.experts_per_token, config.expert_hidden_dim) == (4, 2, 128)


_QWEN = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512}
_KINDS = ["full_attention", "sliding_attention", "full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "num_windows"),
    [
        (_QWEN | {"max_window_layers": 0}, 5),
        (_QWEN | {"max_window_layers": 3}, 2),
        (_QWEN | {"max_window_layers": 5}, 0),
        (_QWEN, 0),  # from layer 28 on
        (_QWEN | {"max_window_layers": 0, "layer_types": _KINDS}, 2),
        (_QWEN | {"max_window_layers": 0, "use_sliding_window": False}, 0),
        ({"model_type": "mistral", "sliding_window": 512}, 5),
        ({"model_type": "mistral", "sliding_window": None}, 0),
    ],
)
def test_attention_has_a_window_in_the_layers_that_say_so(
    tmp_path: Path, changes: dict[str, Any], num_windows: int
) -> None:
    config = load_model(config_json(tmp_path / "config.json", **changes), 8)
    assert isinstance(config, ModelConfig)
    windowed = 1 / 8 - 1 / 128  # of all pairs of 4096 tokens, each looks back at 512
    assert config.looked_at(4096) == pytest.approx((num_windows * windowed + (5 - num_windows) / 2) / 5)


@pytest.mark.parametrize(("rank", "numel"), [(32, 64 * 32 + 32 * 4 * 24), (None, 64 * 4 * 24)])
def test_latent_attention_with_and_without_latent_queries(tmp_path: Path, rank: int | None, numel: int) -> None:
    sizes = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    changes = {"model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": rank, **sizes}
    path = config_json(tmp_path / "config.json", **changes)
    whole = plan(path, "h100", gpus=2, seq_len=64).problem.whole
    attention = numel + 64 * (16 + 8) + 16 * 4 * (16 + 16) + 4 * 16 * 64
    assert whole.numel - whole.small_numel == 2 * 256 * 64 + 5 * (attention + 3 * 64 * 128)


def test_a_function_that_builds_a_model(users_models: Any) -> None:
    def build() -> Any:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), torch.empty(8, 64)

    trace = users_models.load(build, 8).trace(1)
    assert load_model("users_models:build", 8).name == "users_models:build"
    assert [weight.shape for weight in trace.weights] == [(64, 64)] * 3
    assert sum(weight.flops for weight in trace.weights) == 3 * 2 * 8 * 64 * 64
    assert trace.small_numel == 3 * 64


def test_the_length_is_that_of_the_inputs(users_models: Any) -> None:
    def build() -> Any:
        return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32)), (torch.zeros(1, 2048, dtype=torch.int64),)

    users_models.define(build)
    result = plan("users_models:build", "h100", gpus=2)
    assert result.job.seq_len == 2048
    assert result.best.tokens_per_s == pytest.approx(2048 / result.best.step_ms * 1e3)
    message = "expects seq_len of the inputs of users_models:build, 2048 tokens, but got 512"
    with pytest.raises(PlanError, match=message):
        plan("users_models:build", "h100", gpus=2, seq_len=512)


def test_modules_of_any_kind_are_one_use_each(users_models: Any) -> None:
    """A convolution, a matrix of one's own, and code that looks at a number, which fake tensors have not."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.empty(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0 or x.isnan().any().item():
                return x
            return x @ self.matrix

    def build() -> Any:
        model = nn.Sequential(nn.Conv1d(4, 16, 3, padding=1), nn.Linear(32, 16), Own(), nn.Linear(16, 8))
        return model, torch.empty(1, 4, 32)

    trace = users_models.load(build, 8).trace(1)
    assert [(weight.name, weight.numel, weight.flops) for weight in trace.weights] == [
        ("0.weight", 16 * 4 * 3, 2 * 32 * 16 * 4 * 3),
        ("1.weight", 32 * 16, 2 * 16 * 32 * 16),
        ("2.weight", 16 * 16, 2 * 16 * 16 * 16),
        ("3.weight", 16 * 8, 2 * 16 * 16 * 8),
    ]
    assert plan("users_models:build", "h100", gpus=2).answers


def test_masks_count_all_scores_but_causal_ones(users_models: Any) -> None:
    """Half of the scores of a causal mask, all of any other one, as kernels compute them."""

    class Attention(nn.Module):
        def __init__(self, options: dict[str, Any]) -> None:
            super().__init__()
            self.options, self.project = options, nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.project(x).unflatten(-1, (2, 8)).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads, **self.options)

    mask = torch.zeros(32, 32, dtype=torch.bool, device="meta")
    for options, share in (({"is_causal": True}, 0.5), ({"attn_mask": mask}, 1), ({}, 1)):
        trace = users_models.load(lambda o=options: (Attention(o), torch.zeros(1, 32, 16)), 32).trace(1)
        forward = sum(op.flops for op in trace.loss if op.kind is Kind.ATTENTION)
        assert forward == share * 2 * 2 * 16 * 32 * 32


def test_a_mixture_by_function(users_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of our examples: its experts are counted by what tokens choose, and its range is that of experts."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from moe import MoEConfig, MoELlama

    def build() -> Any:
        return MoELlama(MoEConfig(256, 64, 2, 4, 2, 128, 64, num_experts=4)), torch.zeros(1, 64, dtype=torch.int64)

    users_models.define(build)
    result = plan("users_models:build", gpus=2, fixed={"gtp": 2})
    whole = result.problem.whole
    assert whole.numel == sum(param.numel() for param in users_models.build()[0].parameters())
    assert sum(weight.flops for weight in whole.weights if ".experts." in weight.name) == 2 * 2 * 64 * 2 * 3 * 64 * 64
    assert result.best.ground == EXPERTS


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: 1 / 0, "users_models:build raised ZeroDivisionError: division by zero. Mend it."),
        (lambda: (nn.Linear(2, 2), torch.empty(1, 2)), "to return a module on the meta device, but it did not"),
        (
            lambda: (nn.Linear(2, 2, device="meta"), torch.empty(1, 3, device="meta")),
            "expects a forward and backward that run on the meta device, but users_models:build raised RuntimeError",
        ),
    ],
)
def test_functions_that_do_not(users_models: Any, build: Any, message: str) -> None:
    users_models.build = build
    with pytest.raises(PlanError, match=message) as caught:
        load_model("users_models:build", 8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["llama4", "no_such_module:build", "NoSuchModelForCausalLM", "DeepseekV2ForCausalLM"])
def test_unknown_models(text: str) -> None:
    with pytest.raises(PlanError, match=r"^model (expects|needs) .*(Name|Mend|pip install)") as caught:
        load_model(text, 8)
    assert "\n" not in str(caught.value)
