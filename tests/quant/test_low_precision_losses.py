"""Training with each recipe ends within the stated margins of training without one."""

import sys
import unittest
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from dtensor_gtp.quant import RECIPES, cast

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
    import low_precision_losses as losses


class TestLosses(unittest.TestCase):
    def curves(self, steps: int, names: tuple[str | None, ...]) -> list[losses.Curve]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # float8 GEMMs by the reference arithmetic
            return [losses.run(name, steps, steps, 3e-3) for name in names]

    def test_first_steps(self) -> None:
        """The same margins as after 200 steps; and scales an eighth of what they should be, so that large elements
        saturate, are noticed."""

        float8_scale = cast.float8_scale

        def too_small(largest: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
            return float8_scale(largest, dtype) if dtype == torch.float8_e5m2 else largest / cast.E4M3_MAX / 8

        with mock.patch.object(losses, "CONFIG", replace(losses.CONFIG, num_layers=1, max_seq_len=32)):
            curves = self.curves(10, (None, "float8_tensorwise:float8", "nvfp4"))
            self.assertEqual(losses.beyond_margins(curves), [], losses.table(curves))
            self.assertLess(curves[0].points[-1][1], curves[0].points[0][1] - 1)
            with mock.patch.object(cast, "float8_scale", too_small):
                broken = self.curves(10, ("float8_rowwise",))
        self.assertEqual(losses.beyond_margins([curves[0], *broken]), ["float8_rowwise"], losses.table(broken))

    def test_margins(self) -> None:
        """On both sides, of the run without a recipe, and of bf16 where it has been run."""
        last = {None: 2.0, "bf16": 1.996, "mxfp8": 2.0059, "nvfp4": 2.0061, "a:float8": 2.0059, "b:float8": 1.991}
        curves = [losses.Curve(name or "not quantized", [(0, 5.0), (9, loss)]) for name, loss in last.items()]
        self.assertEqual(losses.beyond_margins(curves), ["nvfp4"])
        curves[1] = losses.Curve("bf16", [(9, 1.9945)])
        self.assertEqual(losses.beyond_margins(curves), ["mxfp8", "nvfp4", "a:float8"])

    @pytest.mark.soak
    def test_all_recipes(self) -> None:
        """The margins that docs/guides/low_precision.md states."""
        self.assertGreaterEqual({name.partition(":")[0] for name in losses.ALL}, set(RECIPES))
        curves = self.curves(200, (None, *losses.ALL))
        self.assertEqual(losses.beyond_margins(curves), [], losses.table(curves))
