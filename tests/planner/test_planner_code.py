"""The code that the planner prints, run on some processes: a step of it changes parameters as one process does.

The text runs as it is, but for the device, and for bf16, whose rounding would hide errors. The reference is the same
model on the whole batch. With SGD the change of a parameter is its gradient. Compiled blocks run on ``aot_eager``.
"""

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from common import GlooTest, full
from test_planner_user_tp import PLAN, Model

from dtensor_gtp import plan, quantize_
from dtensor_gtp.planner.api import PlanResult
from dtensor_gtp.planner.model import ModelConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import Llama, LlamaConfig

SIZES = LlamaConfig(64, 64, num_layers=2, num_heads=4, num_kv_heads=4, hidden_dim=128, max_seq_len=16)
CONFIG = str(Path(__file__).parent / "planner_data" / "tiny_llama.json")
BATCH = 8
RATES = {"sgd": 1e-2, "adamw": 1e-3}


class Users(Model):
    """A model of a user, whose blocks are not ``model.layers``."""

    def init_weights(self) -> None:
        for param in self.parameters():
            nn.init.normal_(param, std=0.1)


def build() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Users(PLAN), torch.zeros(1, 16, dtype=torch.int64)


def planned(
    config: str, optimizer: str = "sgd", checkpointing: str = "none", *, zero1: bool = False, recipe: str = "bf16",
    memory: str = "balanced", is_compiled: bool = False, **fixed: int,
) -> PlanResult:  # fmt: skip
    axes = {"pp": 1, "cp": 1} if config.endswith(".json") else {}
    return plan(
        config, "h100", gpus=dist.get_world_size(), seq_len=16, global_batch=BATCH, optimizer=optimizer,
        checkpointing=checkpointing, reduce_dtype="fp32", shards_optimizer=zero1, recipe=recipe, memory=memory,
        is_compiled=is_compiled, fixed=axes | fixed,
    )  # fmt: skip


def keeping(result: PlanResult, is_kept: bool) -> PlanResult:
    """The same layout, with or without weights that are kept for all microbatches."""
    return replace(result, answers=(replace(result.best, layout=replace(result.best.layout, keep=is_kept)),))


def compute_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1].contiguous())
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Job(GlooTest):
    """Each test is one process's share of a job."""

    def step_of(self, result: PlanResult) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Parameters before and after the step of the printed code."""
        layout = result.best.layout
        text = result.code().replace("'cuda'", "'cpu'").replace("torch.bfloat16", "torch.float32")
        text = text.replace("fullgraph=True", "fullgraph=True, backend='aot_eager'")
        space: dict[str, Any] = {"build_model": lambda: self.build_model(result), "compute_loss": compute_loss}
        torch.manual_seed(7)
        exec(compile(text, "code of the planner", "exec"), space)
        self.space = space
        model: nn.Module = space["model"]
        before = self.whole(model)
        tokens = torch.randint(0, 64, (BATCH, 17), generator=torch.Generator().manual_seed(3))
        rank = dist.get_rank() // layout.tp
        own = tokens.chunk(layout.data_ranks)[rank]
        space["train_step"](list(own.split(layout.micro_batch)))
        return before, self.whole(model)

    def whole(self, model: nn.Module) -> dict[str, torch.Tensor]:
        names = ((name.replace("_checkpoint_wrapped_module.", ""), param) for name, param in model.named_parameters())
        return {name: full(param.detach()).clone() for name, param in names}

    def build_model(self, result: PlanResult) -> Any:
        return Llama(SIZES) if isinstance(result.problem.model, ModelConfig) else Users(PLAN)

    def expected(self, result: PlanResult, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        reference = self.build_model(result)
        reference.init_weights()
        reference.load_state_dict(before, strict=False)
        if result.job.quantization is not None:
            blocks = reference.layers if isinstance(reference, Llama) else reference.base.layers
            quantize_(blocks, result.job.quantization)
        tokens = torch.randint(0, 64, (BATCH, 17), generator=torch.Generator().manual_seed(3))
        compute_loss(reference, tokens).backward()
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[result.job.optimizer]
        kind(reference.parameters(), lr=RATES[result.job.optimizer]).step()
        return {name: full(param.detach()) for name, param in reference.named_parameters()}

    def check(self, result: PlanResult) -> None:
        before, after = self.step_of(result)
        rate = RATES[result.job.optimizer]
        atol = 2e-5 if result.job.optimizer == "sgd" else 2e-2  # AdamW divides gradients by their size
        for name, want in self.expected(result, copy.deepcopy(before)).items():
            change, ours = (before[name] - want) / rate, (before[name] - after[name]) / rate
            torch.testing.assert_close(ours, change, atol=atol, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")

    def check_all(self, cases: dict[str, dict[str, Any]], config: str) -> None:
        for name, fixed in cases.items():
            try:
                self.check(planned(config, **fixed))
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error


class TestOptions(Job):
    world_size = 2

    def test_options(self) -> None:
        """What a job may ask for beside its axes."""
        cases: dict[str, dict[str, Any]] = {
            "recipe": {"gtp": 2, "recipe": "float8_tensorwise:dequantize", "checkpointing": "full"},
            "compiled": {"gtp": 2, "recipe": "mxfp8", "is_compiled": True},
            "recomputed": {"gtp": 2, "is_compiled": True, "checkpointing": "full"},
            "least": {"gtp": 2, "memory": "least", "micro_batch": 1, "optimizer": "adamw"},
            "most speed": {"gtp": 2, "memory": "most_speed"},
        }
        self.check_all(cases, CONFIG)

    def test_models_of_users(self) -> None:
        """What is done to blocks, whatever their name."""
        cases: dict[str, dict[str, Any]] = {
            "recipe": {"gtp": 2, "recipe": "mxfp8", "checkpointing": "full"},
            "compiled": {"tp": 2, "is_compiled": True, "checkpointing": "selective"},
        }
        self.check_all(cases, f"{__name__}:build")


class TestPlannerCode(Job):
    def test_states_are_those_of_a_part(self) -> None:
        result = planned(CONFIG, "sgd-momentum", zero1=True, replicate=2, gtp=2, micro_batch=2)
        self.step_of(result)
        optimizer: torch.optim.Optimizer = self.space["optimizer"]
        for param, state in optimizer.state.items():
            held = torch.tensor(state["momentum_buffer"].to_local().numel())
            dist.all_reduce(held)
            self.assertEqual(held.item(), param.numel() * (1 if param.ndim > 1 else 4))

    def test_layouts(self) -> None:
        """One copy each, gtp and tp, with and without recomputation."""
        cases: dict[str, dict[str, Any]] = {
            "one copy each": {"replicate": 4, "gtp": 1},
            "tp": {"tp": 2, "gtp": 2},
            "tp alone": {"tp": 4},
            "full": {"gtp": 4, "checkpointing": "full"},
            "selective": {"gtp": 2, "tp": 2, "checkpointing": "selective"},
        }
        self.check_all(cases, CONFIG)
        # Slices by the plan of names.
        self.check(planned(f"{__name__}:build", tp=2, gtp=2))

    def test_microbatches(self) -> None:
        """Weights kept for all of them, and gradients that replicas sum up once a step."""
        cases = (
            (True, {"gtp": 4}, "model.set_requires_gradient_sync(is_last)"),
            (False, {"gtp": 2, "replicate": 2}, "model.set_requires_all_reduce(number + 1 == len(microbatches))"),
        )
        for keep, axes, line in cases:
            result = keeping(planned(CONFIG, micro_batch=1, **axes), keep)
            assert line in result.code()
            self.check(result)

    def test_optimizer_states_over_replicas(self) -> None:
        """What an optimizer holds is cut over the copies too, also with one copy each, slices and recomputation."""
        for is_kept, fixed in (
            (False, {"replicate": 2, "gtp": 2, "micro_batch": 2}),
            (False, {"replicate": 4, "gtp": 1, "micro_batch": 2}),
            (True, {"replicate": 2, "tp": 2, "gtp": 1, "checkpointing": "selective"}),
            (False, {"replicate": 2, "gtp": 2, "micro_batch": 1}),
            (True, {"replicate": 2, "gtp": 2, "micro_batch": 1}),
        ):
            with self.subTest(is_kept=is_kept, **fixed):
                self.check(keeping(planned(CONFIG, zero1=True, **fixed), is_kept))

    def test_muon_has_an_optimizer_for_each_parameter(self) -> None:
        cases: tuple[tuple[str, bool, dict[str, int]], ...] = (
            (f"{__name__}:build", False, {"gtp": 4}),
            (CONFIG, True, {"replicate": 2, "gtp": 2, "micro_batch": 2}),
        )
        for config, zero1, axes in cases:
            before, after = self.step_of(planned(config, "muon", zero1=zero1, **axes))
            held = self.space["muon"].param_groups[0]["params"]
            assert len(held) == sum("layers." in name and param.ndim > 1 for name, param in before.items())
            assert all(not torch.equal(before[name], after[name]) for name in before if "norm" not in name)
