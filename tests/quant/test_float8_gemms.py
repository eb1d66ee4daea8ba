"""The three GEMMs of a linear layer in float8: against their definitions, and which way is chosen."""

import re
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from common import ALL, environment, fake_mesh
from float8_reference import Values, dgrad_operands, forward_operands, wgrad_operands
from runtime_common import runtime_of
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import gtp_shard, quantize_, sharding_report
from dtensor_gtp.quant import MXFP8, NVFP4, Direction, Float8Blockwise, Float8Rowwise, Float8Tensorwise, Recipe
from dtensor_gtp.quant import cast as reference
from dtensor_gtp.quant.compute import choose_path, warn_dequantized
from dtensor_gtp.quant.float8_gemms import Granularity, Operand, gemms_of_name, product

NAN, INF = float("nan"), float("inf")
FLOAT8 = (Float8Tensorwise, Float8Rowwise, Float8Blockwise)


class TestGEMMs(unittest.TestCase):
    """Odd shapes, rows and columns of unequal magnitude."""

    M, N, K = 37, 150, 200

    def setUp(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.g, self.w = (
            torch.randn(shape, generator=generator)
            * torch.exp2(-(torch.arange(shape[0]) % 5.0)).unsqueeze(1)
            * torch.exp2(-(torch.arange(shape[1]) % 3.0))
            for shape in ((self.M, self.K), (self.M, self.N), (self.N, self.K))
        )

    def _operands(self, recipe: Recipe) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """What forward, dgrad and wgrad multiply, as values: each ``left @ right.T``."""
        weight = Values.of(self.w, recipe)
        return (
            forward_operands(recipe, self.x, weight),
            dgrad_operands(recipe, self.g, weight),
            wgrad_operands(replace(recipe, high_precision_wgrad=False), self.g, self.x),
        )

    def _results(
        self, recipe: Any, on_hardware: bool = False, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, ...]:
        gemms = recipe.gemms(on_hardware=on_hardware)
        weight = recipe.quantize(self.w, Direction.ROWWISE)
        input, grad = gemms.cast_input(self.x), gemms.cast_grad(self.g)
        return (
            gemms.output(input, weight, dtype),
            gemms.grad_input(grad, weight, dtype),
            gemms.grad_weight(gemms.cast_wgrad(self.g, self.x, grad, gemms.for_later(input)), dtype),
        )

    def test_wgrad_uses_what_forward_knows_of_the_input(self) -> None:
        """The same bits as from the input alone; and it does not look for magnitudes again."""
        for cls in FLOAT8:
            gemms = cls().gemms(on_hardware=False)
            known, grad = gemms.for_later(gemms.cast_input(self.x)), gemms.cast_grad(self.g)
            alone = gemms.cast_wgrad(self.g, self.x, grad)
            for a, b in zip(gemms.cast_wgrad(self.g, self.x, grad, known), alone, strict=True):
                self.assertTrue(torch.equal(a.view(torch.uint8), b.view(torch.uint8)), cls)
        gemms = Float8Tensorwise().gemms(on_hardware=False)
        known, grad = gemms.for_later(gemms.cast_input(self.x)), gemms.cast_grad(self.g)
        with mock.patch.object(reference, "largest_magnitude", side_effect=AssertionError("looked again")):
            gemms.cast_wgrad(self.g, self.x, grad, known)

    def test_equal_their_definitions(self) -> None:
        """Sums of float32: within one rounding for each term of the sum of magnitudes. Beside products that are not
        quantized, e4m3 rounds to 2^-4 at most, e5m2 to 2^-3; both operands count."""
        products = self.x @ self.w.t(), self.g @ self.w, self.g.t() @ self.x
        for cls in FLOAT8:
            for result, (left, right), whole in zip(self._results(cls()), self._operands(cls()), products, strict=True):
                exact = left.double() @ right.double().t()
                magnitude = left.double().abs() @ right.double().abs().t()
                self.assertEqual(result.shape, exact.shape)
                bound = (left.shape[1] + 2) * 2.0**-24 * magnitude
                self.assertTrue(((result.double() - exact).abs() <= bound).all(), cls)
                error = ((result - whole).norm() / whole.norm()).item()
                self.assertTrue(2.0**-8 < error < 2.0**-4 + 2.0**-3, (cls, error))

    def test_scaled_mm_of_torch(self) -> None:
        """The same operands in the layout that ``scaled_mm`` takes, by its CPU kernel where there is one."""
        self.x, self.g, self.w = self.x[:32, :64], self.g[:32, :48], self.w[:48, :64]
        for recipe in (Float8Tensorwise(), Float8Rowwise()):
            try:
                torch.nn.functional.scaled_mm(
                    *(torch.zeros(16, 16).to(torch.float8_e4m3fn).t().contiguous().t(),) * 2,
                    *(torch.ones(1), torch.nn.functional.ScalingType.TensorWise) * 2,
                )
                actual = self._results(recipe, True, torch.bfloat16)
            except (NotImplementedError, RuntimeError) as error:
                self.skipTest(f"torch {torch.__version__} on CPU: {str(error)[:80]}")
            for a, b in zip(actual, self._results(recipe), strict=True):
                torch.testing.assert_close(a.float(), b, rtol=2.0**-8, atol=2.0**-14)

    def test_layouts_for_hardware(self) -> None:
        """What ``scaled_mm`` is called with: row-major and column-major matrices, scales in the layout of cuBLAS."""
        calls = []

        def scaled_mm(a: torch.Tensor, b: torch.Tensor, *scales: object, **options: object) -> torch.Tensor:
            calls.append((a, b, scales, options))
            return a.new_zeros((a.shape[0], b.shape[1]), dtype=options["output_dtype"])

        with mock.patch("dtensor_gtp.quant.float8_gemms.scaled_mm", scaled_mm):
            for cls in FLOAT8:
                for result in self._results(cls(), True, torch.bfloat16):
                    self.assertTrue(result.is_contiguous())
        for a, b, (scale_a, kind_a, scale_b, kind_b), options in calls:
            self.assertTrue(a.is_contiguous() and b.t().is_contiguous())
            rows, contraction = a.shape
            columns = b.shape[1]
            blocks = -(-contraction // 128)
            if kind_a.name == "RowWise":
                self.assertEqual((scale_a.shape, scale_b.shape), ((rows, 1), (1, columns)))
                self.assertEqual(scale_b.stride(1), 1)
            if kind_a.name == "BlockWise1x128":
                self.assertEqual(scale_a.shape, (rows, blocks))
                self.assertEqual(scale_a.stride(), (1, rows if blocks > 1 else 1))
                self.assertEqual(rows % 16, 0)
                self.assertFalse(options["use_fast_accum"])
            if kind_b.name == "BlockWise128x128":
                padded = -(-blocks // 4) * 4
                self.assertEqual((scale_b.shape, scale_b.stride()), ((padded, -(-columns // 128)), (1, padded)))
            if kind_b.name == "BlockWise1x128":
                self.assertEqual(scale_b.shape, (columns, blocks))
                self.assertEqual(scale_b.stride(), (1, columns if blocks > 1 else 1))
        fast = [options["use_fast_accum"] for *_, options in calls]
        self.assertEqual(fast, [True, False, False] * 2 + [False] * 3)  # blocks know none
        contractions = [a.shape[1] % 16 for a, *_ in calls[2::3]]
        self.assertEqual(contractions, [0, 0, 0])  # tokens are filled up

    def test_nan_and_inf_spread_as_far_as_their_scale(self) -> None:
        for cls in FLOAT8:
            gemms, weight = cls().gemms(on_hardware=False), cls().quantize(self.w, Direction.ROWWISE)
            for bad in (NAN, INF, -INF):
                x = self.x.clone()
                x[3, 5] = bad
                y = gemms.output(gemms.cast_input(x), weight, torch.float32)
                self.assertTrue(y[3].isnan().all())
                self.assertEqual(y.isnan().any(1).sum().item(), self.M if cls is Float8Tensorwise else 1)

    def test_nothing(self) -> None:
        self.x, self.g = self.x[:0], self.g[:0]
        for cls in FLOAT8:
            output, dgrad, wgrad = self._results(cls())
            self.assertEqual((output.shape, dgrad.shape), ((0, self.N), (0, self.K)))
            self.assertTrue(torch.equal(wgrad, torch.zeros(self.N, self.K)))
        nothing, other = (
            Operand(torch.zeros(rows, 16).to(torch.float8_e4m3fn), torch.ones(1, 1), Granularity.TENSOR)
            for rows in (0, 32)
        )
        self.assertEqual(product(nothing, other, torch.bfloat16, on_hardware=True).shape, (0, 32))

    def test_names(self) -> None:
        for cls in FLOAT8:
            for high_precision_wgrad in (False, True):
                gemms = cls(high_precision_wgrad=high_precision_wgrad).gemms(on_hardware=True)
                self.assertEqual(gemms_of_name(gemms.name), gemms)


@contextmanager
def quiet_mesh(size: int) -> Iterator[DeviceMesh]:
    """A rank of several that communicate nothing; float8 GEMMs by the reference arithmetic are not worth a warning."""
    with fake_mesh(size) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield mesh


class TestPlanes(unittest.TestCase):
    def test_freed_planes_are_poisoned(self) -> None:
        """With NaN of e4m3, once nobody holds them; who still does keeps them."""
        with environment(DTENSOR_GTP_DEBUG="poison"), quiet_mesh(2) as mesh:
            model = quantize_(nn.Linear(48, 32, bias=False), Float8Tensorwise(compute="float8"))
            runtime = runtime_of(gtp_shard(model, mesh, schedule=ALL))
            (weight,) = runtime.members.weights
            gathered = runtime.gathering.acquire(weight.for_forward)
            planes = gathered.quantized().planes
            before = planes[0].view(torch.uint8).clone()
            runtime.gathering.release(weight.for_forward, gathered)
            self.assertTrue(torch.equal(planes[0].view(torch.uint8), before))
            gathered = runtime.gathering.acquire(weight.for_forward)
            buffer = gathered.buffer
            runtime.gathering.release(weight.for_forward, gathered)
            self.assertTrue((buffer == 255).all())
            self.assertTrue(buffer.view(torch.float8_e4m3fn).float().isnan().all())

    def test_what_is_multiplied_with(self) -> None:
        """The data that are a native weight, alone and sharded; a tied embedding looks up what its head has."""
        x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
        with quiet_mesh(1) as mesh:
            for cls in FLOAT8:
                recipe = cls(compute="float8")
                model = nn.Linear(48, 32, bias=False)
                left, right = forward_operands(recipe, x, Values.of(model.weight.detach(), recipe))
                quantize_(model, recipe, storage="native")
                self.assertTrue(torch.equal(model(x), left.mm(right.t())), cls)
                gtp_shard(model, mesh, schedule=ALL)
                self.assertTrue(torch.equal(model(x), left.mm(right.t())), cls)
                tied = nn.Sequential(nn.Embedding(32, 48), nn.Linear(48, 32, bias=False))
                tied[1].weight = tied[0].weight
                values = Values.of(tied[1].weight.detach().clone(), recipe)
                gtp_shard(quantize_(tied, recipe, filter_fn=lambda module, name: name == "1"), mesh, schedule=ALL)
                left, right = forward_operands(recipe, values.values, values)
                self.assertTrue(torch.equal(tied(torch.arange(32)), left.mm(right.t())), cls)
                self.assertIn("float8 GEMMs by reference", str(sharding_report(tied)))


class TestLayers(unittest.TestCase):
    """One layer on one rank: which gradients it computes, eager and compiled."""

    def _gradients(
        self, recipe: Recipe, mesh: DeviceMesh, backend: str | None, frozen: bool = False, hooked: bool = True
    ) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 160), nn.Tanh(), nn.Linear(160, 32, bias=False)).bfloat16()
        model[0].weight.requires_grad_(not frozen)
        gtp_shard(quantize_(model, recipe), mesh, schedule=ALL)
        if backend is not None:
            model.compile(backend=backend, fullgraph=True)
        x = torch.randn(5, 3, 48, dtype=torch.bfloat16, requires_grad=hooked)
        y = model(x)
        y.float().square().mean().backward()
        grads = [param.grad for param in model.parameters()]
        return [y.detach(), x.grad, *(None if grad is None else grad.to_local() for grad in grads)]

    def _check(self, recipe: Recipe, backend: str) -> None:
        with quiet_mesh(1) as mesh:
            expected = self._gradients(recipe, mesh, None)
            self.assertTrue(all(grad is not None for grad in expected))
            for one in (None, backend):
                for missing, options in ((None, {}), (2, {"frozen": True}), (1, {"hooked": False})):
                    for index, grad in enumerate(self._gradients(recipe, mesh, one, **options)):
                        if index == missing:
                            self.assertIsNone(grad)
                        else:
                            self.assertTrue(torch.equal(grad, expected[index]), (recipe, one, options))

    def test_frozen_weights_and_inputs_without_gradient(self) -> None:
        self._check(Float8Rowwise(compute="float8"), "aot_eager")

    def test_casts_fuse_with_what_precedes_them(self) -> None:
        """Norm, scales and cast are one kernel, whose result the opaque op of the GEMM takes."""
        torch._dynamo.reset()
        with quiet_mesh(1) as mesh, torch.no_grad():
            model = nn.Sequential(nn.RMSNorm(128), nn.Linear(128, 256, bias=False)).bfloat16()
            gtp_shard(quantize_(model, Float8Rowwise(compute="float8")), mesh, schedule=ALL)
            x = torch.randn(8, 128, dtype=torch.bfloat16)
            _, (code,) = run_and_get_code(torch.compile(model, fullgraph=True), x)
        (call,) = re.findall(r"^\s+(cpp_fused\w*)\(.*\)$", code, re.MULTILINE)
        self.assertRegex(call, "rsqrt")
        self.assertRegex(call, "amax")
        self.assertIn("torch.ops.dtensor_gtp.float8_linear.default(", code)

    @pytest.mark.soak
    def test_inductor(self) -> None:
        """Casts fuse with what precedes them only where that has been rounded to bfloat16 before: here it has."""
        for cls in FLOAT8:
            for high_precision_wgrad in (False, True):
                self._check(cls(compute="float8", high_precision_wgrad=high_precision_wgrad), "inductor")


class TestChoice(unittest.TestCase):
    def _choose(self, recipe: Recipe, capability: Any, shape: Any = (32, 64), dtype: Any = torch.bfloat16) -> str:
        device = torch.device("cpu" if capability is None else "cuda")
        with mock.patch("torch.cuda.get_device_capability", return_value=capability):
            return choose_path(recipe, device, torch.Size(shape), dtype, "layer.weight").describe()

    def test_what_runs_where(self) -> None:
        tensorwise = Float8Tensorwise()
        for recipe, capability, expected in (
            *((tensorwise, capability, "float8 GEMMs") for capability in ((8, 9), (9, 0), (10, 0))),
            (Float8Rowwise(), (9, 0), "float8 GEMMs, wgrad not quantized"),
            (Float8Rowwise(high_precision_wgrad=False), (9, 0), "float8 GEMMs"),
            (Float8Blockwise(), (9, 0), "float8 GEMMs"),
        ):
            self.assertEqual(self._choose(recipe, capability), expected)
        odd, float32 = {"shape": (30, 64)}, {"dtype": torch.float32}
        for recipe, capability, options, why in (
            (Float8Blockwise(), (10, 0), {}, "no float8_blockwise GEMMs on compute capability 10.0"),
            (tensorwise, (8, 0), {}, "no float8_tensorwise GEMMs on compute capability 8.0"),
            (tensorwise, None, {}, "no float8 GEMMs on cpu"),
            (Float8Tensorwise(compute="dequantize"), (9, 0), {}, "asked for"),
            (MXFP8(), (9, 0), {}, "mxfp8 has GEMMs for GroupedLinear alone"),
            (NVFP4(), (10, 0), {}, "no GEMMs of nvfp4"),
            (tensorwise, (9, 0), odd, "a shape of (30, 64) is not in multiples of 16; (32, 64) would fit"),
            (tensorwise, (9, 0), float32, "the compute dtype is float32, not bfloat16"),
            (tensorwise, (9, 0), {"shape": (2, 16, 16)}, "no grouped GEMMs of float8_tensorwise"),
        ):
            self.assertEqual(self._choose(recipe, capability, **options), f"dequantized for the GEMM ({why})")

    def test_forced_raises_where_it_is_impossible(self) -> None:
        forced, float32 = Float8Blockwise(compute="float8"), {"dtype": torch.float32}
        for call, message in (
            (lambda: self._choose(forced, (8, 0)), "'layer.weight' of shape .* on cuda.* compute capability 8.0"),
            (lambda: self._choose(forced, (9, 0), (30, 64)), r"not in multiples of 16; \(32, 64\) would fit"),
            (lambda: self._choose(forced, (9, 0), **float32), "compute dtype is float32.*Choose compute='auto'"),
            (lambda: NVFP4(compute="float8"), "NVFP4 expects compute 'auto' or 'dequantize', but got"),
            (lambda: Float8Rowwise(compute="fp8"), "expects compute 'auto', 'dequantize' or 'float8', but got 'fp8'"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                call()

    def test_forced_on_cpu_says_so_once(self) -> None:
        recipe = Float8Rowwise(compute="float8")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                described = self._choose(recipe, None, shape=(30, 7), dtype=torch.float32)
                warn_dequantized(recipe, "layer.weight", "it is read as an attribute")
                warn_dequantized(Float8Rowwise(), "layer.weight", "it is read as an attribute")
        arithmetic = "float8 GEMMs by reference arithmetic (no float8 GEMMs on cpu), wgrad not quantized"
        self.assertEqual(described, arithmetic)
        self.assertEqual(len(caught), 2, [str(w.message) for w in caught])
        self.assertRegex(str(caught[0].message), "asks for float8 GEMMs, which torch lacks on CPUs: .*in float32")
        self.assertRegex(str(caught[1].message), "'layer.weight' is dequantized: it is read as an attribute")
