"""Low precision on GPUs: float8 GEMMs against the reference arithmetic, casts against the CPU's, gathers of planes."""

import copy
import gc
import unittest
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, environment, rows_of_rank
from cuda_common import BF16, NUM_RANKS, CudaTest, assert_same, square_loss, square_step, training_step
from schedules import explicit
from test_cuda_streams import one_of
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import SchedulePolicy, gtp_shard, quantize_, sharding_report
from dtensor_gtp.quant import MXFP8, NVFP4, RECIPES, Direction, Float8Blockwise, Float8Rowwise, Float8Tensorwise, Recipe
from dtensor_gtp.quant.compute import choose_path
from dtensor_gtp.quant.float8_gemms import Float8GEMMs

FLOAT8 = tuple(
    cls(high_precision_wgrad=wgrad)
    for cls in (Float8Tensorwise, Float8Rowwise, Float8Blockwise)
    for wgrad in (False, True)
)


def has_gemms(recipe: Recipe) -> bool:
    path = choose_path(recipe, torch.device("cuda"), torch.Size((256, 256)), torch.bfloat16, "weight")
    return path.gemms is not None and path.gemms.on_hardware


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


@unittest.skipIf(NUM_RANKS < 1, "needs a GPU")
class TestKernels(unittest.TestCase):
    def test_casts_equal_those_of_the_cpu(self) -> None:
        """Bit for bit, in both directions: ranks of both kinds would agree."""
        matrix = torch.randn(300, 200) * torch.exp2(torch.randint(-12, 3, (300, 200)))
        matrix[:128, :64] = 0.0
        for cls in RECIPES.values():
            recipe = cls()
            for direction in Direction:
                expected = recipe.quantize(matrix, direction)
                actual = recipe.quantize(matrix.cuda(), direction)
                for a, b in zip(actual.planes, expected.planes, strict=True):
                    self.assertTrue(torch.equal(bits(a), bits(b)), (recipe, direction))
        for recipe in FLOAT8:
            gemms = recipe.gemms(on_hardware=True)
            for cast in (gemms.cast_input, gemms.cast_grad):
                for a, b in zip(cast(matrix.cuda())[:2], cast(matrix)[:2], strict=True):  # elements and scales
                    self.assertTrue(torch.equal(bits(a), bits(b)), recipe)

    def _results(self, recipe: Recipe, gemms: Float8GEMMs, shape: tuple[int, int, int]) -> list[torch.Tensor]:
        tokens, rows, columns = shape
        generator = torch.Generator("cuda").manual_seed(0)
        draw = partial(torch.randn, device="cuda", generator=generator)
        x, g, w = draw(tokens, columns).bfloat16(), draw(tokens, rows).bfloat16(), draw(rows, columns)
        weight = recipe.quantize(w, Direction.ROWWISE)
        grad = gemms.cast_grad(g)
        input = gemms.cast_input(x)
        results = [gemms.output(input, weight, torch.bfloat16), gemms.grad_input(grad, weight, torch.bfloat16)]
        if not gemms.high_precision_wgrad:
            wgrad = gemms.cast_wgrad(g, x, grad, gemms.for_later(input))
            results += [gemms.grad_weight(wgrad, dtype) for dtype in (torch.bfloat16, torch.float32)]
        return results

    def test_float8_gemms_equal_the_reference_arithmetic(self) -> None:
        """The same operands, so they differ by the rounding of the result to bfloat16 (2^-8) and by how sums are
        rounded: tensor cores keep at least 13 bits below the largest term of a partial sum."""
        ran = 0
        for recipe in FLOAT8:
            if not has_gemms(recipe):
                continue
            for shape in ((256, 384, 512), (37, 160, 208), (1, 128, 128), (0, 128, 128)):
                results = self._results(recipe, recipe.gemms(on_hardware=True), shape)
                expected = self._results(recipe, recipe.gemms(on_hardware=False), shape)
                for a, b in zip(results, expected, strict=True):
                    self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
                    scale = b.float().abs().amax().item() if b.numel() else 1.0
                    torch.testing.assert_close(a.float(), b.float(), rtol=2.0**-7, atol=2.0**-9 * scale)
                ran += 1
        if not ran:
            self.skipTest(f"no float8 GEMMs on {torch.cuda.get_device_name()}")

    def _held(self, recipe: Recipe, mesh: DeviceMesh) -> int:
        """Bytes that a sharded model holds after a forward and backward."""
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model = nn.Sequential(nn.Linear(2048, 4096, bias=False, device="cuda", dtype=torch.bfloat16))
        gtp_shard(quantize_(model, recipe, storage="native").requires_grad_(False), mesh, schedule=ALL)
        x = torch.ones(1, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()
        del x
        gc.collect()
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # the allocator takes back what other streams have used
        return torch.cuda.memory_allocated() - before

    def test_native_weights_are_data_and_scales_in_memory(self) -> None:
        """Within 2%, of one of two ranks."""
        with one_of(2) as mesh:
            for recipe in (MXFP8(), NVFP4()):
                self._held(recipe, mesh)  # libraries keep workspaces
                expected = recipe.bytes_per_element() * 4096 * 2048 / 2
                self.assertLess(abs(self._held(recipe, mesh) / expected - 1), 0.02, recipe)


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestTraining(CudaTest):
    def _gradients(self, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(2):  # the second pass prefetches
            model.zero_grad()
            square_loss(model, x).backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    def test_planes_arrive_as_they_were_sent(self) -> None:
        """A coalesced gather of elements and scales, prefetched, on poisoned and delayed streams: the same bits."""
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(256, 256, bias=False, device="cuda") for _ in range(4)))
        x = rows_of_rank(torch.randn(16 * self.world_size, 256, device="cuda").bfloat16(), mesh)
        for cls in RECIPES.values():
            runs = []
            for debug in ("", "poison,delay=3"):
                with environment(DTENSOR_GTP_DEBUG=debug):
                    model = quantize_(copy.deepcopy(layers), cls(compute="dequantize"))
                    gtp_shard(model, mesh, mp_policy=BF16, schedule=ALL)
                    runs.append(self._gradients(model, x))
            assert_same(*runs, cls)
            self.assertTrue(all(grad.isfinite().all() for grad in runs[0]))

    def _trained(self, model: nn.Module, mesh: DeviceMesh, is_captured: bool, **options: Any) -> list[torch.Tensor]:
        """Losses and shards of steps of two microbatches, after each of which the shards are others."""
        schedule = explicit(min_shard_numel=0, coalesce_nbytes=0, **options)
        gtp_shard(model, mesh, mp_policy=BF16, schedule=schedule)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=True)

        def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([square_step(model, part).detach() for part in x.chunk(2)])

        train = training_step(model, optimizer, run, is_captured=is_captured)
        torch.manual_seed(self.rank)
        losses = [train(torch.randn(32, 256, device="cuda").bfloat16()) for _ in range(8)]
        return [*losses, *(p.detach().to_local().clone() for p in model.parameters())]

    def test_what_is_quantized_beside_compute(self) -> None:
        """For copy engines shards are quantized on the stream of casts: the same bits as in their place, with delays
        and poison, and in graphs."""
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(256, 256, device="cuda") for _ in range(4)))
        for recipe in (Float8Tensorwise(compute="dequantize"), Float8Rowwise(compute="dequantize"), NVFP4()):
            expected = self._trained(quantize_(copy.deepcopy(layers), recipe), mesh, False)
            for is_captured in (False, True):
                for debug in ("", "poison,delay=1"):
                    model, options = quantize_(copy.deepcopy(layers), recipe), {"gather_backend": "copy_engine"}
                    with environment(DTENSOR_GTP_DEBUG=debug):
                        actual = self._trained(model, mesh, is_captured, **options)
                    is_same = [bool((a.isfinite() & (a == b)).all()) for a, b in zip(actual, expected, strict=True)]
                    self._assert_on_all_ranks(is_same, (recipe, is_captured, debug))

    def test_groups_have_the_values_of_single_weights(self) -> None:
        """Rounded before the gather or dequantized after it: the same bits, by both backends, with delays and poison,
        captured, and where a shard has a NaN."""
        mesh = self.gtp_mesh()
        x = torch.randn(16, 256, device="cuda").bfloat16()
        for cls in (Float8Tensorwise, Float8Rowwise, Float8Blockwise):
            torch.manual_seed(0)
            blocks = (nn.Sequential(*(nn.Linear(256, 256, device="cuda") for _ in "ab")) for _ in range(4))
            model = nn.Sequential(*blocks)
            single = quantize_(copy.deepcopy(model), cls(compute="dequantize"))
            gtp_shard(single, mesh, mp_policy=BF16, schedule=explicit(min_shard_numel=0))
            for backend in ("process_group", "copy_engine"):
                for debug in ("", "poison,delay=1"):
                    with environment(DTENSOR_GTP_DEBUG=debug):
                        grouped = quantize_(copy.deepcopy(model), cls())
                        schedule = SchedulePolicy(min_shard_numel=0, gather_backend=backend)
                        gtp_shard(grouped, mesh, mp_policy=BF16, schedule=schedule)
                        self._compare_groups(grouped, single, x, (cls, backend, debug))

    def _compare_groups(self, grouped: nn.Module, single: nn.Module, x: torch.Tensor, what: Any) -> None:
        optimizer = torch.optim.AdamW(grouped.parameters(), lr=1e-2, fused=True)
        is_same = []
        for step in range(4):
            with torch.no_grad():
                if step == 3:
                    first = next(grouped.parameters()).to_local()
                    first[0, 0] = float("nan")
                for mine, theirs in zip(grouped.parameters(), single.parameters(), strict=True):
                    theirs.to_local().copy_(mine.to_local())
            outputs = [model(x) for model in (grouped, single)]
            for output in outputs:
                output.float().square().mean().backward()
            is_same.append(torch.equal(bits(outputs[0]), bits(outputs[1])))
            is_same.append(step < 3 or bool(outputs[0].isnan().all()))
            grads = [[p.grad.to_local() for p in model.parameters()] for model in (grouped, single)]
            close = partial(torch.allclose, rtol=1e-2, atol=1e-5, equal_nan=True)
            is_same += [close(a, b) for a, b in zip(*grads, strict=True)]
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 1)
            single.zero_grad()
        with torch.no_grad():
            for param in (*grouped.parameters(), *single.parameters()):
                param.to_local().nan_to_num_()
        self._assert_on_all_ranks(is_same, what)
        self.assertIn("rounded to", str(sharding_report(grouped)))

    def _assert_on_all_ranks(self, is_same: list[bool], what: Any) -> None:
        """Else one rank alone would go on, and wait for the others."""
        flags = torch.tensor(is_same, device="cuda").int()
        dist.all_reduce(flags, dist.ReduceOp.MIN)
        self.assertTrue(flags.all(), (what, flags.tolist()))

    def test_float8_layers(self) -> None:
        """Gradients are near those without quantization; eager, poisoned, and compiled; the report names the GEMMs."""
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(256, 256, bias=False, device="cuda") for _ in range(4)))
        x = rows_of_rank(torch.randn(16 * self.world_size, 256, device="cuda").bfloat16(), mesh)
        plain = gtp_shard(copy.deepcopy(layers), mesh, mp_policy=BF16, schedule=ALL)
        expected = self._gradients(plain, x)
        for recipe in FLOAT8:
            if not has_gemms(recipe):
                continue
            for mode in ("eager", "poison", "compiled"):
                with environment(DTENSOR_GTP_DEBUG="poison,delay=5" if mode == "poison" else ""):
                    model = gtp_shard(quantize_(copy.deepcopy(layers), recipe), mesh, mp_policy=BF16, schedule=ALL)
                    if mode == "compiled":
                        torch._dynamo.reset()
                        model.compile(fullgraph=True)
                    gradients = self._gradients(model, x)
                for a, b in zip(gradients, expected, strict=True):
                    self.assertLess(((a - b).norm() / b.norm()).item(), 0.25, (recipe, mode))
                if mode == "eager":
                    first = gradients
                elif mode == "poison":
                    self.assertTrue(all(map(torch.equal, gradients, first)), recipe)
            self.assertIn("float8 GEMMs", str(sharding_report(model)))

    def test_forced_without_the_hardware_raises(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = quantize_(nn.Linear(30, 30, device="cuda"), Float8Tensorwise(compute="float8"))
            with self.assertRaisesRegex((ValueError, RuntimeError), "asks for float8 GEMMs, but"):
                gtp_shard(model, self.gtp_mesh(), mp_policy=BF16, schedule=ALL)
