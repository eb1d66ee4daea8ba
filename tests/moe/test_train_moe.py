"""examples/train_moe.py: one run on experts over (ep=2, expert_gtp=2), continued on ep=4 and on one process."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import GlooTest, shared_directory
from test_train_llama import EXAMPLES, launch

sys.path.append(str(EXAMPLES))
import train_moe
import training
from launch import Place, UsageError
from text_data import load_corpus

STEPS, SAVED_AT = 2, 1
OPTIONS = ("--preset", "tiny", "--steps", str(STEPS), "--checkpoint-every", str(SAVED_AT), "--lr", "0.003")


class TestTrainMoE(GlooTest):
    def parse(self, folder: Path, *more: str) -> tuple[argparse.Namespace, Place]:
        options = train_moe.parse_options([*OPTIONS, "--checkpoint-dir", str(folder), *more])
        return options, Place(self.rank, self.world_size, torch.device("cpu"))

    def trainer(self, folder: Path, *more: str) -> Any:
        options, place = self.parse(folder, *more)
        preset = training.resolve_preset(train_moe.PRESETS, options, place)
        return train_moe.Trainer(options, preset, place, load_corpus())

    def start_copy(self, folder: Path, name: str) -> Path:
        """A folder with the checkpoint of step ``SAVED_AT`` as the latest one."""
        if self.rank == 0:
            shutil.copytree(folder / "whole", folder / name)
            (folder / name / "latest").write_text(f"step-{SAVED_AT}\n")
        dist.barrier()
        return folder / name

    def check_resume(self, folder: Path, whole: Any, *more: str) -> None:
        name = "-".join(more).replace("--", "")
        resumed = self.trainer(self.start_copy(folder, name), "--resume", *more)
        resumed.run(None)
        self.assertEqual([step for step, _ in resumed.losses], list(range(SAVED_AT + 1, STEPS + 1)))
        assert_close(resumed.losses, whole.losses[SAVED_AT:])
        assert_close(resumed.validation_losses[-1:], whole.validation_losses[-1:])
        for (name, ours), (_, expected) in zip(whole_params(resumed.model), whole.params, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{more}: {n}: {m}")

    def test_resumes_on_other_meshes(self) -> None:
        with shared_directory() as folder:
            whole = self.trainer(folder / "whole", "--ep", "2", "--expert-gtp", "2")
            whole.run(None)
            self.assertLess(whole.validation_losses[-1][1], whole.validation_losses[0][1] - 0.05)
            mesh = whole.model.moes[0].experts.mlp.down._parameters["weight"].device_mesh
            self.assertEqual((mesh.mesh_dim_names, mesh.shape), (("ep", "expert_gtp"), (2, 2)))
            whole.params = whole_params(whole.model)
            self.check_resume(folder, whole, "--ep", "4", "--expert-gtp", "1")
            one = self.start_copy(folder, "one")
            if self.rank == 0:
                script = EXAMPLES / "train_moe.py"
                options = [*OPTIONS, "--checkpoint-dir", one, "--resume", "--json", folder / "one.json"]
                result = launch([script, *options], None)
                assert result.status == 0, result.output
                assert "saved by 4 processes" in result.output
                final = json.loads((folder / "one.json").read_text())
                assert_close(final["losses"], whole.losses[SAVED_AT:])
                assert_close(final["validation_losses"][-1:], whole.validation_losses[-1:])

    @pytest.mark.soak
    def test_more_meshes(self) -> None:
        with shared_directory() as folder:
            whole = self.trainer(folder / "whole", "--ep", "2", "--expert-gtp", "2")
            whole.run(None)
            whole.params = whole_params(whole.model)
            self.check_resume(folder, whole, "--ep", "2", "--expert-gtp", "2")
            self.check_resume(folder, whole, "--ep", "1", "--expert-gtp", "4")
            self.check_resume(folder, whole, "--ep", "1", "--expert-gtp", "1")
            self.check_resume(folder, whole, "--ep", "4", "--expert-gtp", "1", "--dispatch", "all_gather")

    def test_meshes_that_do_not_fit_are_refused(self) -> None:
        for ep, match in (("3", "--ep 3 does not divide the 4 experts"), ("2", "--ep 2 --expert-gtp 4: .* divide")):
            with self.assertRaisesRegex(UsageError, match):
                options, place = self.parse(Path("unused"), "--ep", ep, "--expert-gtp", "4")
                train_moe.build_mesh(place, options, num_experts=4)


def assert_close(ours: list[Any], expected: list[Any]) -> None:
    """Pairs of step and loss."""
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def whole_params(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, param.detach().full_tensor()) for name, param in model.named_parameters()]
