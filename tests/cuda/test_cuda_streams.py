"""The runtime's streams, memory and kernels on one GPU, as one rank of a process group that communicates nothing.

Collectives are copies here, on the stream that they are launched on: a gather puts this rank's rows in the place of
every rank, a reduce-scatter takes this rank's rows of its own gradient. What a wrong order of streams would change in
real ones changes in them, and results are the same in every run. What ranks tell each other is the matter of
``test_cuda``.
"""

import contextlib
import gc
import math
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from common import environment, fake_world
from cuda_common import BF16, assert_same, assert_same_grads, no_waits
from cuda_common import captured as captured_graph
from runtime_common import local
from schedules import explicit
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint
from trace_common import trace_of

from dtensor_gtp import GTPShard, capture_step, gtp_shard, quantize_
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._torch_compat.driver import SignalBarrier, num_flag_bytes
from dtensor_gtp._trace.read import read_timeline
from dtensor_gtp.nn import GroupedLinear, GroupedMLP

WORLD_SIZE = 4
WIDTH = 512
VOCABULARY = 1000
SCHEDULES: dict[str, dict[str, Any]] = {
    "on demand": {"prefetch_depth": 0, "prefetch_nbytes": 0, "coalesce_nbytes": 0},
    "default": {},
    "one by one": {"prefetch_depth": 3, "prefetch_nbytes": 0, "coalesce_nbytes": 0, "coalesce_grad_nbytes": 0},
    "together": {"coalesce_nbytes": 8 << 20, "coalesce_grad_nbytes": 8 << 20},
    "kept": {"keep_nbytes": 2 << 20},
}


class Block(nn.Module):
    """Fused, generic, dim-1 (grouped) and whole parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.experts = GroupedLinear(4, WIDTH, WIDTH, bias=False)
        self.raw = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("split_sizes", torch.tensor([30, 0, 38, 50], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        x = x + self.experts(x, self.split_sizes)
        return x + torch.tanh(x @ self.raw)


class Net(nn.Module):
    def __init__(self, depth: int = 3, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.is_checkpointed = is_checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return F.cross_entropy(self.head(x).float(), tokens)


class MoEBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = GroupedMLP(4, WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split_sizes = torch.full((4,), x.shape[0] // 4, device=x.device)
        return x + self.experts(self.dense(x), split_sizes)


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (256,), device="cuda", generator=torch.Generator("cuda").manual_seed(step))


def local_values(model: nn.Module) -> list[torch.Tensor]:
    return [local(param).detach().clone() for param in model.parameters()]


def _all_gather(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
    for chunk in output.chunk(group.size()):
        chunk.copy_(input)


def _reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
) -> None:
    output.copy_(input.chunk(group.size())[group.rank()])


def _of_each(collective: Callable[..., None]) -> Callable[..., None]:
    def coalesced(outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options: Any) -> None:
        for output, input in zip(outputs, inputs, strict=True):
            collective(output, input, *options)

    return coalesced


def _all_to_all(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
    # All ranks have computed the same, so each sends this one what it would get.
    output.copy_(input.chunk(group.size())[group.rank()].repeat(group.size(), *[1] * (input.ndim - 1)))


def _all_to_all_of_peers(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
    output.copy_(input[group.rank()].expand_as(output))


LOOPBACK = {
    "all_gather_base": _all_gather,
    "all_gather_coalesced": _of_each(_all_gather),
    "reduce_scatter_base": _reduce_scatter,
    "reduce_scatter_coalesced": _of_each(_reduce_scatter),
    "all_to_all_base": _all_to_all,
    "all_to_all_of_peers": _all_to_all_of_peers,
}


@contextlib.contextmanager
def one_of(*shape: int) -> Iterator[DeviceMesh]:
    """The mesh of a world in which this process is the first rank."""
    with fake_world(math.prod(shape)), mock.patch.multiple(compat, **LOOPBACK):
        names = ("replicate", "gtp")[-len(shape) :]
        yield init_device_mesh("cuda", shape, mesh_dim_names=names)


def train(
    mesh: DeviceMesh,
    steps: int = 4,
    prepare: Callable[[nn.Module], object] | None = None,
    is_checkpointed: bool = False,
    **options: Any,
) -> list[torch.Tensor]:
    """Shards after some steps of two microbatches."""
    model = Net(is_checkpointed=is_checkpointed).cuda()
    if prepare is not None:
        prepare(model)
    gtp_shard(model, mesh, schedule=explicit(**options), mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        for microbatch in range(2):
            model(tokens_of(2 * step + microbatch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return local_values(model)


def spans_of(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """What the streams do in the third forward, as ``dtensor_gtp.trace`` reads it. The host is done with it before its
    stream begins: when it has launched what makes no difference."""

    def forward() -> None:
        torch.cuda._sleep(1_600_000_000)  # cycles, about a second
        model(x)

    with torch.no_grad():
        for _ in range(2):
            model(x)
        trace = trace_of(forward)
    spans: list[Any] = list(read_timeline(trace).spans)
    return spans


Step = Callable[[torch.Tensor], torch.Tensor]


def make_parts(mesh: DeviceMesh, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """A model, its optimizer and its training step, which returns losses and gradient norm."""
    model = gtp_shard(Net().cuda(), mesh, schedule=explicit(**options), mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="cuda"), fused=True, capturable=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in tokens.view(2, -1):
            losses.append(model(part) / 2)
            losses[-1].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([*(loss.detach() for loss in losses), norm.to_local()])

    return model, optimizer, step


def make_job(mesh: DeviceMesh, is_captured: bool, **options: Any) -> tuple[nn.Module, Step]:
    """A model and its training step."""
    model, optimizer, step = make_parts(mesh, **options)
    return model, capture_step(step, model, optimizer) if is_captured else step


@unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
class TestStreams(unittest.TestCase):
    def _check_bits(self, mesh: DeviceMesh, what: str, seeds: int = 2, **options: Any) -> None:
        expected = train(mesh, **options, **SCHEDULES["on demand"])
        for name, schedule in SCHEDULES.items():
            assert_same(train(mesh, **options, **schedule), expected, f"{what}, {name}")
            for seed in range(seeds):
                with environment(DTENSOR_GTP_DEBUG=f"poison,delay={seed}"):
                    assert_same(train(mesh, **options, **schedule), expected, f"{what}, {name}, delay {seed}")

    def test_schedules_delays_and_poison_change_no_bit(self) -> None:
        """Blocks of one shape share the memory of freed buffers: any overtaking shows as NaN or as other bits."""
        with one_of(WORLD_SIZE) as mesh:
            self._check_bits(mesh, "plain", seeds=3)
            self._check_bits(mesh, "checkpointed", is_checkpointed=True)

    def test_with_replicas(self) -> None:
        with one_of(2, 2) as mesh:
            self._check_bits(mesh, "replicas")

    def test_all_to_all(self) -> None:
        with one_of(WORLD_SIZE) as mesh:
            self._check_bits(mesh, "all to all", reduce_scatter="all_to_all")

    def test_quantized(self) -> None:
        with one_of(WORLD_SIZE) as mesh:
            for recipe in ("float8_tensorwise", "float8_rowwise", "float8_blockwise", "mxfp8", "nvfp4"):
                with self.subTest(recipe):
                    self._check_bits(mesh, recipe, seeds=1, prepare=lambda model, r=recipe: quantize_(model, r))

    def test_compiled_blocks(self) -> None:
        """Each schedule has the same bits, and the values are those of eager up to bf16."""

        def compile_blocks(model: nn.Module) -> None:
            for block in model.blocks:
                block.compile(fullgraph=True)

        with one_of(WORLD_SIZE) as mesh:
            eager, compiled = train(mesh, 1), train(mesh, 1, prepare=compile_blocks)
            for got, want in zip(compiled, eager, strict=True):
                # after one AdamW step every element has moved by lr: what differs is the sign of tiny gradients
                self.assertLess((got - want).abs().gt(1e-4).float().mean().item(), 0.02)
            expected = train(mesh, prepare=compile_blocks, **SCHEDULES["on demand"])
            for name, schedule in SCHEDULES.items():
                with environment(DTENSOR_GTP_DEBUG="poison,delay=1"):
                    actual = train(mesh, prepare=compile_blocks, **schedule)
                assert_same(actual, expected, name)

    def test_a_trace_shows_experts_a_block_ahead(self) -> None:
        """What stands for their gathers lies on one stream of its own, in order of use, and begins before what precedes
        the experts has ended."""
        schedule = explicit(1, min_shard_numel=0, coalesce_nbytes=0, prefetch_nbytes=0)
        with fake_world(4), mock.patch.multiple(compat, **LOOPBACK):
            mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("gtp", "expert_gtp"))
            model = nn.Sequential(*(MoEBlock() for _ in range(3))).cuda()
            for block in model:
                gtp_shard(block.experts, mesh["expert_gtp"], schedule=schedule, mp_policy=BF16)
            gtp_shard(model, mesh["gtp"], schedule=schedule, mp_policy=BF16)
            spans = spans_of(model, torch.randn(4096, WIDTH, device="cuda"))
        gathers, computes = (
            [span for span in spans if span.what.startswith(kind)] for kind in ("all_gather", "compute")
        )
        of_experts = [span for span in gathers if "experts" in span.what]
        (lane,) = {span.lane for span in of_experts}
        self.assertNotIn(lane, {span.lane for span in [*computes, *gathers] if span not in of_experts})
        names = [f"{block}.experts.{name}.weight" for block in range(3) for name in ("gate_up", "down")]
        self.assertEqual(list(dict.fromkeys(span.what for span in of_experts)), [f"all_gather {n}" for n in names])
        for name in names[2:]:  # a gather at the use would wait for the dense layer
            begin = min(span.begin for span in of_experts if span.what == f"all_gather {name}")
            end = max(span.end for span in computes if span.what == f"compute {name[0]}.dense.weight")
            self.assertLess(begin, end, name)

    def test_grouped_gradients_equal_a_loop(self) -> None:
        """grouped_mm on a weight that was gathered on dim 1, against a loop over the groups in fp32."""
        with one_of(2) as mesh:
            torch.manual_seed(0)
            layer = GroupedLinear(4, WIDTH, WIDTH, bias=False).cuda().bfloat16()
            gtp_shard(layer, mesh, shard_placement_fn=lambda param: GTPShard(1))
            weight = layer.weight.full_tensor().detach().float().requires_grad_()
            x = torch.randn(300, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            sizes = torch.tensor([60, 0, 68, 100], dtype=torch.int32, device="cuda")
            out = layer(x, sizes)
            grad = torch.randn_like(out)
            out.backward(grad)
            x_ref = x.detach().float().requires_grad_()
            parts = [rows @ w.t() for rows, w in zip(x_ref[:228].split([60, 0, 68, 100]), weight, strict=True)]
            want = F.pad(torch.cat(parts), (0, 0, 0, 72))
            want.backward(grad.float())
            for got, ref in ((out, want), (x.grad, x_ref.grad)):
                torch.testing.assert_close(got.float(), ref, rtol=2e-2, atol=2e-2 * ref.abs().max().item())
            # this rank's rows of each group, as they are
            rows = weight.grad[:, : WIDTH // 2]
            error = (layer.weight.grad.to_local().float() - rows).abs().max() / rows.abs().max()
            self.assertLess(error.item(), 2e-2)

    def test_steady_state_never_waits_on_the_host(self) -> None:
        with one_of(WORLD_SIZE) as mesh:
            for name, schedule in SCHEDULES.items():
                _, step = make_job(mesh, is_captured=False, **schedule)
                tokens = tokens_of(0)
                for _ in range(2):
                    step(tokens)
                with self.subTest(name), no_waits():
                    step(tokens)

    def test_memory_does_not_grow(self) -> None:
        with one_of(WORLD_SIZE) as mesh:
            for name, schedule in SCHEDULES.items():
                model = gtp_shard(Net().cuda(), mesh, schedule=explicit(**schedule), mp_policy=BF16)
                for step in range(4):
                    model(tokens_of(step)).backward()
                    model.zero_grad()
                gc.collect()  # of earlier tests, say
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
                for step in range(20):
                    model(tokens_of(step)).backward()
                    model.zero_grad()
                gc.collect()
                torch.cuda.synchronize()
                with self.subTest(name):
                    self.assertEqual((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()), before)
                del model

    def _captured(self, mesh: DeviceMesh, **options: Any) -> None:
        """A captured step replays to the bits of eager, with changing data and weights."""
        make = {"schedule": explicit(**options), "mp_policy": BF16}
        model, eager = (gtp_shard(Net().cuda(), mesh, **make) for _ in range(2))
        tokens = tokens_of(0)
        graph, _ = captured_graph(model, lambda: model(tokens).backward())
        for replay in range(20):
            tokens.copy_(tokens_of(replay))
            graph.replay()
            eager(tokens).backward()
            assert_same_grads(model, eager, f"replay {replay}, {options}")
            with torch.no_grad():
                for param in (*model.parameters(), *eager.parameters()):
                    param -= 0.1 * param.grad
            eager.zero_grad()

    def test_step_in_a_cuda_graph(self) -> None:
        with one_of(WORLD_SIZE) as mesh:
            for name, schedule in SCHEDULES.items():
                with self.subTest(name):
                    self._captured(mesh, **schedule)
            with self.subTest("all to all"):
                self._captured(mesh, reduce_scatter="all_to_all")

    def test_captured_training_steps(self) -> None:
        """Fifty replays of whole steps by ``capture_step``, with clipping and AdamW: losses and shards are those of
        eager steps, also where delays and poison are recorded."""
        with one_of(WORLD_SIZE) as mesh:
            for name, schedule in SCHEDULES.items():
                eager, eager_step = make_job(mesh, is_captured=False, **schedule)
                expected = [eager_step(tokens_of(index)) for index in range(54)]
                for debug in ("", "poison,delay=0", "poison,delay=1"):
                    with self.subTest(f"{name}, {debug}"):
                        with environment(DTENSOR_GTP_DEBUG=debug):
                            model, step = make_job(mesh, is_captured=True, **schedule)
                        for index, want in enumerate(expected):
                            self.assertTrue(torch.equal(step(tokens_of(index)), want), f"step {index}")
                        assert_same(local_values(model), local_values(eager), name)


@unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
class TestSignals(unittest.TestCase):
    """Two streams of one GPU in the place of those of two; their priorities give them channels of their own."""

    def setUp(self) -> None:
        nbytes = num_flag_bytes(2)
        self.flags = torch.zeros(2, nbytes, dtype=torch.uint8, device="cuda")
        addresses = [self.flags.data_ptr() + rank * nbytes for rank in range(2)]
        self.barriers = [SignalBarrier(addresses, rank) for rank in range(2)]
        self.streams = [torch.cuda.Stream(priority=-rank) for rank in range(2)]
        self.values = torch.zeros(2, dtype=torch.int64, device="cuda")
        self.sent = torch.arange(40, device="cuda").view(20, 2)
        # Nothing may be loaded or allocated while a stream waits: that would wait for the stream.
        torch.cuda._sleep(1)
        self.values[0].copy_(self.sent[0, 0])
        torch.cuda.synchronize()

    def exchange(self, rank: int, sent: torch.Tensor, results: torch.Tensor) -> None:
        """Tell a value, and read the other's."""
        with torch.cuda.stream(self.streams[rank]):
            self.barriers[rank].wait(0, self.streams[rank].cuda_stream)
            if rank == 0:
                torch.cuda._sleep(2_000_000)
            self.values[rank].copy_(sent[rank])
            self.barriers[rank].wait(1, self.streams[rank].cuda_stream)
            results[rank].copy_(self.values[1 - rank])

    def test_eager(self) -> None:
        results = torch.zeros(20, 2, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for sent, result in zip(self.sent, results, strict=True):
            for rank in range(2):
                self.exchange(rank, sent, result)
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(results, self.sent.flip(1)))
        self.assertFalse(self.flags.any())

    def test_in_graphs_of_their_own(self) -> None:
        """As ranks record them: one graph each, replayed any number of times."""
        sent, result = torch.zeros(2, 2, dtype=torch.int64, device="cuda")
        graphs = []
        for rank in range(2):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=self.streams[rank]):
                self.exchange(rank, sent, result)
            graphs.append(graph)
        for index in range(20):
            sent.copy_(self.sent[index])
            torch.cuda.synchronize()
            for graph, stream in zip(graphs, self.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(result, self.sent[index].flip(0)))

    def test_no_kernel(self) -> None:
        """A barrier finds no place on an SM and needs none: it passes while a GEMM runs."""
        x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        ends = [torch.cuda.Event(), torch.cuda.Event()]
        for barrier, stream in zip(self.barriers, self.streams, strict=True):  # the first call loads what it needs
            barrier.wait(0, stream.cuda_stream)
        for barrier, stream in zip(self.barriers, self.streams, strict=True):
            barrier.wait(1, stream.cuda_stream)
        torch.cuda.synchronize()
        for num_gemms in (20, 200, 2000, 20000):  # more, where the host was late and GEMMs were done before it looked
            for _ in range(num_gemms):
                x @ x
            after = torch.cuda.current_stream().record_event()
            for turn in range(2):
                for barrier, stream in zip(self.barriers, self.streams, strict=True):
                    barrier.wait(turn, stream.cuda_stream)
            for end, stream in zip(ends, self.streams, strict=True):
                end.record(stream)
                end.synchronize()
            has_passed = not after.query()
            torch.cuda.synchronize()
            if has_passed:
                return
        self.fail("no barrier passed before the GEMMs were done")
