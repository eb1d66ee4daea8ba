"""The code that the planner prints, run on four processes: a step of it changes parameters as one process does.

The text runs as it is, but for the device, and for bf16, whose rounding would hide errors. The reference is the same
model on the whole batch. With SGD the change of a parameter is its gradient.
"""

from __future__ import annotations

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

from dtensor_gtp import plan
from dtensor_gtp.planner.api import PlanResult

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import Llama, LlamaConfig

SIZES = LlamaConfig(64, 64, num_layers=2, num_heads=4, num_kv_heads=4, hidden_dim=128, max_seq_len=16)
BATCH = 8


def planned(
    config: str, optimizer: str = "sgd", checkpointing: str = "none", *, zero1: bool = False, **fixed: int
) -> PlanResult:
    return plan(
        config, "h100", gpus=4, seq_len=16, global_batch=BATCH, optimizer=optimizer, checkpointing=checkpointing,
        reduce_dtype="fp32", shards_optimizer=zero1, fixed={"pp": 1, "cp": 1} | fixed,
    )  # fmt: skip


def compute_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1].contiguous())
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class TestPlannerCode(GlooTest):
    """Each test is one process's share of a job."""

    def config_file(self) -> str:
        path = Path(__file__).parent / "planner_data" / "tiny_llama.json"
        return str(path)

    def test_states_are_those_of_a_part(self) -> None:
        result = planned(self.config_file(), "sgd-momentum", zero1=True, replicate=2, gtp=2, micro_batch=2)
        self.step_of(result)
        optimizer: torch.optim.Optimizer = self.space["optimizer"]
        for param, state in optimizer.state.items():
            held = torch.tensor(state["momentum_buffer"].to_local().numel())
            dist.all_reduce(held)
            self.assertEqual(held.item(), param.numel() * (1 if param.ndim > 1 else 4))

    def step_of(self, result: PlanResult) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Parameters before and after the step of the printed code."""
        layout = result.best.layout
        text = result.code().replace("'cuda'", "'cpu'").replace("torch.bfloat16", "torch.float32")
        space: dict[str, Any] = {"build_model": lambda: Llama(SIZES), "compute_loss": compute_loss}
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

    def expected(self, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        reference = Llama(SIZES)
        reference.init_weights()
        reference.load_state_dict(before, strict=False)
        tokens = torch.randint(0, 64, (BATCH, 17), generator=torch.Generator().manual_seed(3))
        compute_loss(reference, tokens).backward()
        torch.optim.SGD(reference.parameters(), lr=1e-2).step()
        return {name: param.detach() for name, param in reference.named_parameters()}

    def check(self, result: PlanResult) -> None:
        before, after = self.step_of(result)
        for name, want in self.expected(copy.deepcopy(before)).items():
            gradient, ours = (before[name] - want) / 1e-2, (before[name] - after[name]) / 1e-2
            torch.testing.assert_close(ours, gradient, atol=2e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")

    def test_layouts(self) -> None:
        """gtp, replicas, tp, and what is kept between microbatches, with and without recomputation."""
        cases: dict[str, dict[str, Any]] = {
            "gtp": {"gtp": 4},
            "replicas": {"gtp": 2, "replicate": 2, "micro_batch": 1},
            "one copy each": {"replicate": 4, "gtp": 1},
            "tp": {"tp": 2, "gtp": 2},
            "tp alone": {"tp": 4},
            "full": {"gtp": 4, "checkpointing": "full"},
            "selective": {"gtp": 2, "tp": 2, "checkpointing": "selective"},
            "microbatches": {"gtp": 4, "micro_batch": 1},
        }
        for name, fixed in cases.items():
            try:
                self.check(planned(self.config_file(), **fixed))
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error

    def test_microbatches(self) -> None:
        """Weights kept for all of them, and gradients that replicas sum up once a step."""
        cases = (
            (True, {"gtp": 4}, "model.set_requires_gradient_sync(is_last)"),
            (False, {"gtp": 2, "replicate": 2}, "model.set_requires_all_reduce(number + 1 == len(microbatches))"),
        )
        for keep, axes, line in cases:
            result = planned(self.config_file(), micro_batch=1, **axes)
            best = replace(result.best, layout=replace(result.best.layout, keep=keep))
            result = replace(result, answers=(best,))
            assert line in result.code()
            self.check(result)

    def test_optimizer_states_over_replicas(self) -> None:
        """What an optimizer holds is cut over the copies too, also with one copy each, slices and recomputation."""
        cases: dict[str, dict[str, Any]] = {
            "copies": {"replicate": 2, "gtp": 2, "micro_batch": 2},
            "one copy each": {"replicate": 4, "gtp": 1, "micro_batch": 2},
            "slices": {"replicate": 2, "tp": 2, "gtp": 1, "checkpointing": "selective"},
            "microbatches": {"replicate": 2, "gtp": 2, "micro_batch": 1},
        }
        for name, fixed in cases.items():
            result = planned(self.config_file(), zero1=True, **fixed)
            for keep in (False, True):
                best = replace(result.best, layout=replace(result.best.layout, keep=keep))
                try:
                    self.check(replace(result, answers=(best,)))
                except Exception as error:
                    raise AssertionError(f"{name}, keep={keep}: {error}") from error

    def test_muon_has_an_optimizer_for_each_parameter(self) -> None:
        for zero1, axes in ((False, {"gtp": 4}), (True, {"replicate": 2, "gtp": 2, "micro_batch": 2})):
            before, after = self.step_of(planned(self.config_file(), "muon", zero1=zero1, **axes))
            assert all(not torch.equal(before[name], after[name]) for name in before if "norm" not in name)
