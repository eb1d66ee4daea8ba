"""Casts by Triton equal the reference bit for bit, on one GPU.

Without a GPU, but with Triton, its interpreter runs the arithmetic of GPUs that do not convert to float8 themselves:
``TRITON_INTERPRET=1 python -m pytest tests/cuda/test_cuda_casts.py`` (Triton 3.6 needs numpy < 2.4 for it).
"""

import os
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from common import environment
from cuda_common import BF16, kernels_of, square_step, training_step
from test_cuda_streams import one_of
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor_gtp import gtp_shard, quantize_, sharding_report
from dtensor_gtp.quant import (
    RECIPES,
    Direction,
    Float8Blockwise,
    Float8Rowwise,
    Float8Tensorwise,
    Quantized,
    nvfp4_operand,
)
from dtensor_gtp.quant import casts as casts_module
from dtensor_gtp.quant.cast import Casts
from dtensor_gtp.quant.casts import casts_for, describe_casts

HAS_GPU = torch.cuda.is_available() and torch.version.hip is None
DEVICE = "cuda" if HAS_GPU else "cpu"
NAN, INF = float("nan"), float("inf")
SIGNS = 0x5CA3  # of the random Hadamard transform; any
REFERENCE = Casts()


def triton_casts(has_float8: bool) -> Any:
    """None where there is nothing that runs Triton's kernels."""
    if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    from dtensor_gtp.quant.triton_casts import TritonCasts  # needs Triton

    return TritonCasts(has_float8)


def hard_matrix() -> torch.Tensor:
    """Ties, what saturates, zeros of both signs and whole blocks of them, denormals of float32 and of the formats."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(150, 200, generator=generator) * torch.exp2(
        torch.randint(-12, 3, (150, 200), generator=generator)
    )
    matrix[0, :128] = torch.arange(128) / 16 * 448 / 8
    matrix[32:64, 32:64] = 0.0
    matrix[40, 40] = -0.0
    matrix[64:96, :32] *= 2.0**-120
    matrix[100] *= 2.0**-149
    matrix[101, :64], matrix[101, 5], matrix[101, 40] = 0.0, 448.0, 448.0 * (1 + 2.0**-23)
    return matrix


def hard_matrices() -> Iterator[torch.Tensor]:
    """Blocks that end early, NaN and infinities, several matrices, columns that lie one after the other, long rows."""
    matrix = hard_matrix()
    broken = matrix.clone()
    broken[5, 7], broken[70, 140], broken[149, 199] = NAN, INF, -INF
    for values in (matrix, broken, matrix * 2.0**120, torch.zeros(40, 70)):
        yield values
        yield values.half()
        if HAS_GPU:
            yield values.bfloat16()
    yield broken[:33, :57].t()
    yield torch.stack([broken[:40, :70], matrix[-40:, -70:]])
    yield matrix.reshape(1, -1)
    if HAS_GPU:
        yield torch.randn(1000, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()
        yield torch.randn(384, 14336, generator=torch.Generator().manual_seed(2))[:, 16:].bfloat16()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, with one NaN for all: which of its bits are set is up to the processor."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    is_wide = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    is_nan = tensor.isnan() if is_wide else torch.zeros_like(tensor, dtype=torch.bool)
    return torch.where(is_nan, -1 if is_wide else 0, tensor.contiguous().view(integers)).cpu()


Calls = dict[str, tuple[Callable[[Casts], Any], int]]


def rounded(casts: Casts, parts: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
    maxima, dtype, *rounding = args
    results = [torch.empty(part.shape, dtype=dtype, device=part.device) for part in parts]
    casts.round_together(parts, maxima, results, *rounding)
    return results


def casts_of(matrix: torch.Tensor) -> Calls:
    """By name: a cast of ``matrix``, and how many kernels it is."""
    amax, rows = REFERENCE.amax(matrix, (-2, -1)), REFERENCE.amax(matrix, (-1,))
    factor = torch.linspace(-2, 3, matrix.shape[-1], device=matrix.device)
    group = torch.arange(matrix.shape[-2], device=matrix.device) // 7 % 3
    factors = torch.stack([factor, factor.flip(0), 1 / (factor - 0.123)])
    e5m2 = REFERENCE.cast_matrix(matrix, torch.float8_e5m2)[0]
    calls: Calls = {
        "amax": (lambda c: c.amax(matrix, (-2, -1)), 2),
        "amax of rows": (lambda c: c.amax(matrix, (-1,)), 1),
        "scale": (lambda c: c.e4m3_scale(amax), 1),
        "matrix": (lambda c: c.cast_matrix(matrix), 2),
        "matrix in e5m2": (lambda c: c.cast_matrix(matrix, torch.float8_e5m2), 2),
        "matrix of known amax": (lambda c: c.cast_matrix(matrix, amax=amax), 1),
        "turned matrix": (lambda c: c.cast_matrix_turned(matrix, 16), 2),
        "turned matrix of known amax": (lambda c: c.cast_matrix_turned(matrix, 16, amax), 1),
        "turned matrix of its magnitudes": (lambda c: c.cast_matrix_turned(matrix, 16, c.magnitudes(matrix)), 2),
        "rows": (lambda c: c.cast_rows(matrix), 1),
        "rows of known amax": (lambda c: c.cast_rows(matrix, amax=rows), 1),
        "rows with factors": (lambda c: c.cast_rows(matrix, factor=factor), 1),
        "rows with factors of groups": (lambda c: c.cast_rows(matrix, factor=factors, group=group), 1),
        "blocks": (lambda c: c.cast_blocks(matrix, (1, 128)), 1),
        "squares": (lambda c: c.cast_blocks(matrix, (128, 128)), 1),
        "turned blocks": (lambda c: c.cast_blocks_turned(matrix, (1, 128), 16), 1),
        "turned": (lambda c: c.turned(matrix, 16), 1),
        "turned bytes": (lambda c: c.turned(e5m2, 16), 1),
        "row-major": (lambda c: c.row_major(matrix.mT), 1),
    }
    parts = [matrix, *(matrix[..., :rows, :].contiguous() for rows in (1, 33)), matrix.contiguous(), matrix]
    maxima = [REFERENCE.amax(part, (-2, -1)) for part in parts]
    of_rows = [REFERENCE.amax(part, (-1,)) for part in parts]
    whole_blocks = [part[..., : part.shape[-1] // 32 * 32].contiguous() for part in parts[:3]]
    dtype = torch.bfloat16 if HAS_GPU else torch.float16  # the interpreter rounds to bfloat16 towards zero
    calls["five rounded"] = (lambda c: rounded(c, parts, maxima, dtype)), 2
    calls["rows rounded"] = (lambda c: rounded(c, parts, of_rows, dtype)), 2
    for rounding in ("floor", "rceil"):
        calls[f"mx rounded {rounding}"] = (lambda c, r=rounding: rounded(c, whole_blocks, [], dtype, r)), 1
    for block in ((1, 32), (32, 1)):
        for rounding in ("floor", "rceil"):
            calls[f"mx {block} {rounding}"] = (lambda c, b=block, r=rounding: c.cast_mx(matrix, b, r)), 1
    seed = torch.tensor(-0x123456789ABCDEF, dtype=torch.int64, device=matrix.device)  # both halves of the key
    for block in ((1, 16), (16, 1)):
        calls[f"nvfp4 {block}"] = (lambda c, b=block: c.cast_nvfp4(matrix, b, amax)), 1
        calls[f"stochastic nvfp4 {block}"] = (lambda c, b=block: c.cast_nvfp4(matrix, b, amax, seed=seed)), 1
        rotated = REFERENCE.nvfp4_amax(matrix, block, SIGNS)
        calls[f"amax of rotated {block}"] = (lambda c, b=block: c.nvfp4_amax(matrix, b, SIGNS)), 2
        for name, options in (("rotated", {}), ("rotated stochastic", {"seed": seed})):
            calls[f"{name} nvfp4 {block}"] = (
                (lambda c, b=block, a=rotated, o=options: c.cast_nvfp4(matrix, b, a, signs=SIGNS, **o)),
                1,
            )
    return calls


def dequantizations_of(matrix: torch.Tensor, dtype: torch.dtype) -> Calls:
    amax = REFERENCE.amax(matrix, (-2, -1))
    data, _ = REFERENCE.cast_matrix(matrix)
    all_quantized = [
        (Quantized((data,), amax), (1, 1)),
        (Quantized(REFERENCE.cast_rows(matrix), None), (1, 0)),
        (Quantized(REFERENCE.cast_blocks(matrix, (128, 128)), None), (128, 128)),
        *((Quantized(REFERENCE.cast_mx(matrix, block, "floor"), None), block) for block in ((1, 32), (32, 1))),
        *((Quantized(REFERENCE.cast_nvfp4(matrix, block, amax), amax), block) for block in ((1, 16), (16, 1))),
    ]
    calls: Calls = {}
    for quantized, block in all_quantized:
        calls[f"from {block}"] = (lambda c, q=quantized, b=block: c.dequantize(q, b, matrix.shape, dtype)), 1
    return calls


def assert_same_bits(test: unittest.TestCase, actual: Any, expected: Any, what: object) -> None:
    pairs = zip(*((x,) if isinstance(x, torch.Tensor) else tuple(x) for x in (actual, expected)), strict=True)
    for index, (a, b) in enumerate(pairs):
        test.assertEqual((a.dtype, a.shape), (b.dtype, b.shape), (what, index))
        test.assertTrue(torch.equal(bits(a), bits(b)), (what, index))


class TestTritonCasts(unittest.TestCase):
    assert_same_bits = assert_same_bits

    def test_bits(self) -> None:
        """All casts and back, of all dtypes, in all layouts; by conversions of the GPU and by integers."""
        has_float8 = HAS_GPU and torch.cuda.get_device_capability() >= (8, 9)
        for hardware in (False, True) if has_float8 else (False,):
            casts = triton_casts(hardware)
            if casts is None:
                self.skipTest("needs a GPU, or Triton and TRITON_INTERPRET=1")
            for matrix in hard_matrices():
                if has_float8 and not hardware and matrix.dtype != torch.float32:
                    continue  # to compile as many kernels again takes a minute
                matrix = matrix.to(DEVICE)
                # The interpreter rounds to bfloat16 towards zero.
                dtypes = (torch.float32, torch.float16, torch.bfloat16)[: 3 if HAS_GPU else 2]
                calls = casts_of(matrix)
                for dtype in dtypes:
                    calls |= {f"{name} to {dtype}": c for name, c in dequantizations_of(matrix, dtype).items()}
                for name, (call, _) in calls.items():
                    if matrix.ndim == 3 and "factors" in name:
                        continue
                    self.assert_same_bits(call(casts), call(REFERENCE), (name, matrix.dtype, matrix.shape, hardware))

    def test_reference_elsewhere(self) -> None:
        """On CPU, of subclasses, while a compiler traces, of what has no elements, and where it is asked for."""
        self.assertIs(type(casts_for(torch.ones(2, 2))), Casts)
        self.assertEqual(describe_casts(torch.device("cpu")), "")
        with environment(DTENSOR_GTP_CASTS="triton"):
            if HAS_GPU:
                with self.assertRaisesRegex(ValueError, "DTENSOR_GTP_CASTS expects 'auto' or 'reference'"):
                    casts_for(torch.ones(2, 2, device="cuda"))
        if HAS_GPU:
            matrix = torch.ones(2, 2, device="cuda")
            self.assertIsNot(type(casts_for(matrix)), Casts)
            self.assertIs(type(casts_for(matrix[:0])), Casts)
            self.assertIs(type(casts_for(matrix.double())), Casts)
            with environment(DTENSOR_GTP_CASTS="reference"):
                self.assertIs(type(casts_for(matrix)), Casts)
                self.assertEqual(describe_casts(matrix.device), "casts op by op: DTENSOR_GTP_CASTS=reference")
        with torch._subclasses.FakeTensorMode():
            self.assertIs(type(casts_for(torch.ones(2, 2, device=DEVICE))), Casts)
        is_reference = torch.compile(lambda x: x + (type(casts_for(x)) is Casts), fullgraph=True, backend="eager")
        self.assertEqual(is_reference(torch.zeros(1, 1, device=DEVICE)).item(), 1)


@unittest.skipUnless(HAS_GPU, "needs a GPU")
class TestOnOneGPU(unittest.TestCase):
    assert_same_bits = assert_same_bits

    def test_number_of_kernels(self) -> None:
        matrix = torch.randn(1024, 2048, device="cuda").bfloat16()
        casts = casts_for(matrix)
        for name, (call, num_kernels) in (casts_of(matrix) | dequantizations_of(matrix, torch.bfloat16)).items():
            call(casts)
            events = kernels_of(partial(call, casts))
            self.assertEqual(len(events), num_kernels, (name, events))

    def test_second_gpu_and_streams(self) -> None:
        """Kernels run where the tensor is, on the current stream."""
        device = torch.device("cuda", torch.cuda.device_count() - 1)
        matrix = hard_matrix().to(device)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            late = matrix + 1
            actual = casts_for(late).cast_rows(late)
        stream.synchronize()
        self.assert_same_bits(actual, REFERENCE.cast_rows(matrix + 1), device)
        self.assert_same_bits(casts_for(matrix).cast_rows(matrix), REFERENCE.cast_rows(matrix), "current device")

    def test_stochastic_rounding_of_many_blocks(self) -> None:
        """Of many tiles, along both dims: the bits of the reference, also by a replay with another seed."""
        matrix = torch.randn(1030, 2072, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
        seed = torch.tensor(1, device="cuda")
        for dim in (-1, -2):
            graph, signs = torch.cuda.CUDAGraph(), 0x1B2D
            nvfp4_operand(matrix, dim, seed=seed, signs=signs)
            with torch.cuda.graph(graph):
                captured = nvfp4_operand(matrix, dim, seed=seed, signs=signs)
            for value in (5, 1 << 40):
                seed.fill_(value)
                graph.replay()
                with environment(DTENSOR_GTP_CASTS="reference"):
                    expected = nvfp4_operand(matrix, dim, seed=seed, signs=signs)
                self.assert_same_bits(
                    (*captured.planes, captured.amax), (*expected.planes, expected.amax), (dim, value)
                )

    def test_cuda_graph(self) -> None:
        matrix = hard_matrix().cuda()
        recipes = [(cls(), direction) for cls in RECIPES.values() for direction in Direction]

        def step() -> list[torch.Tensor]:
            results = []
            for recipe, direction in recipes:
                quantized = recipe.quantize(matrix, direction)
                results += [*quantized.planes, recipe.dequantize(quantized, matrix.shape, direction, torch.bfloat16)]
            return results

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        matrix.mul_(1.7)
        graph.replay()
        with environment(DTENSOR_GTP_CASTS="reference"):
            self.assert_same_bits(captured, step(), "graph")

    def _linear(self, recipe: Any) -> list[torch.Tensor]:
        """Forward and backward of two layers, also in a checkpoint with a policy, and in inference mode."""
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(256, 384, device="cuda"), nn.Linear(384, 256, device="cuda")).bfloat16()
        quantize_(layers, recipe)
        x = torch.randn(37, 256, device="cuda").bfloat16().requires_grad_()

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE

        def squared(x: torch.Tensor) -> torch.Tensor:
            y = layers(x)
            return y.abs() * y.abs()  # an op that casts consist of, too

        z = checkpoint(squared, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
        y = layers[1](layers[0](x))
        (y.float().square().sum() + z.float().sum()).backward()
        with torch.inference_mode():
            w = layers(x.detach())
        return [y.detach(), z.detach(), w.clone(), x.grad, *(p.grad for p in layers.parameters())]

    def test_first_cast_in_a_checkpoint(self) -> None:
        """What is tried before the first cast is no op of the checkpoint, whose recomputation does not try again."""
        with environment(DTENSOR_GTP_CASTS="reference"):
            expected = self._linear(Float8Rowwise())
        casts_module._verdicts.cache_clear()
        self.assert_same_bits(self._linear(Float8Rowwise()), expected, "first cast")

    def test_layers(self) -> None:
        recipes = [cls() for cls in RECIPES.values()]
        for cls in (Float8Tensorwise, Float8Rowwise, Float8Blockwise):
            recipes.append(cls(high_precision_wgrad=not cls().high_precision_wgrad))
        for recipe in recipes:
            fused = self._linear(recipe)
            with environment(DTENSOR_GTP_CASTS="reference"):
                self.assert_same_bits(fused, self._linear(recipe), recipe)

    def _train(self, mesh: DeviceMesh, recipe: Any, is_captured: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False, device="cuda") for _ in range(3)))
        gtp_shard(quantize_(model, recipe), mesh, mp_policy=BF16)
        options = {"is_captured": True, "warmup_steps": 2} if is_captured else {}
        run = training_step(model, torch.optim.SGD(model.parameters(), lr=1e-3), square_step, **options)
        generator = torch.Generator("cuda").manual_seed(0)
        losses = [run(torch.randn(48, 256, device="cuda", generator=generator).bfloat16()).clone() for _ in range(5)]
        casts = "casts op by op" if os.environ.get("DTENSOR_GTP_CASTS") == "reference" else "fused casts"
        self.assertIn(casts, str(sharding_report(model, verbose=True)))
        return [*losses, *(p.to_local() for p in model.parameters())]

    def test_training_steps(self) -> None:
        """Eager and as CUDA graphs, of one of two ranks whose collectives are copies."""
        with one_of(2) as mesh:
            for cls in RECIPES.values():
                with environment(DTENSOR_GTP_CASTS="reference"):
                    expected = self._train(mesh, cls(), False)
                for is_captured in (False, True):
                    self.assert_same_bits(self._train(mesh, cls(), is_captured), expected, (cls, is_captured))
