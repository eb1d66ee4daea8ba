"""Gather backends and kinds of reduce-scatter on GPUs: bits, races, and what the copy engine promises.

Needs 2 to 8 GPUs of one host. See [Note: rules of the copy engine] in ``copy_engine.py``; what a process that ends
leaves behind is the matter of ``test_cuda_exit``.
"""

import itertools
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from common import check_training, environment, full
from cuda_common import (
    BF16,
    COPY_ENGINES,
    NUM_RANKS,
    CudaTest,
    assert_same,
    assert_same_grads,
    drawn,
    square_loss,
    square_step,
    training_step,
)
from schedules import explicit
from test_cuda import Stack, trained
from test_gtp_shard_copies import MIXED, SCHEDULE, launches, linears, rows
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import MixedPrecisionPolicy, capture_blocks, gtp_shard, sharding_report
from dtensor_gtp._comm.copy_engine import CopyEngine

# Cycles of the SM clock: about 50 ms.
LATE = 80_000_000
# All weights in one gather; at most two, and so several gathers in a pass: casts for all but the first come ahead.
SEVERAL: dict[str, Any] = {"coalesce_nbytes": 5 << 20}
# Of copy engines.
TOGETHER: tuple[dict[str, Any], ...] = ({}, SEVERAL)


@contextmanager
def casts_ahead() -> Iterator[list[bool]]:
    """Of each gather by copy engines: whether its shards were cast ahead, on a stream of their own."""
    seen: list[bool] = []
    inner = CopyEngine._cast_ahead

    def cast_ahead(self: CopyEngine, ready: Any, casts: list[Any]) -> Any:
        packed, are_cast = inner(self, ready, casts)
        if casts:
            seen.append(are_cast)
        return packed, are_cast

    with mock.patch.object(CopyEngine, "_cast_ahead", cast_ahead):
        yield seen


class Branches(nn.Module):
    """Blocks with a layer beside the main one; on a stream of its own, that is late, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = (nn.ModuleList([nn.Linear(1024, 1024) for _ in range(6)]) for _ in range(2))
        self.stream: torch.cuda.Stream | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stream, current = self.stream, torch.cuda.current_stream()
        for main, side in zip(self.main, self.side, strict=True):
            if stream is None:
                beside, other = side(x), main(x)
            else:
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(LATE // 4)
                    beside = side(x)
                    beside.register_hook(lambda _: torch.cuda._sleep(LATE // 4))  # on this stream, too
                x.record_stream(stream)
                other = main(x)
                current.wait_stream(stream)
                beside.record_stream(current)
            x = F.gelu(x + other + beside)
        return x


class Siamese(nn.Module):
    """Blocks that run twice beside each other, on a late stream first if there is one: of fused layers, and of weights
    that their code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(4)])
        self.raw = nn.ParameterList([torch.randn(1024, 1024) / 32 for _ in range(4)])
        self.stream: torch.cuda.Stream | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stream, current = self.stream, torch.cuda.current_stream()
        for index in range(len(self.layers)):
            if stream is None:
                beside, other = self._branch(index, x), self._branch(index, x.sin())
            else:
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(LATE // 8)
                    beside = self._branch(index, x)
                    beside.register_hook(lambda _: torch.cuda._sleep(LATE // 8))  # on this stream, too
                x.record_stream(stream)
                other = self._branch(index, x.sin())
                current.wait_stream(stream)
                beside.record_stream(current)
            x = F.gelu(x + other + beside)
        return x

    def _branch(self, index: int, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[index](x) @ self.raw[index]
        return out


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaComm(CudaTest):
    def rows(self, seed: int) -> torch.Tensor:
        return drawn(seed * 100 + self.rank, 256, 1024)

    def late(self, model: nn.Module, step: int) -> None:
        """Another rank each step, between backward and the optimizer."""
        if step % self.world_size == self.rank:
            torch.cuda._sleep(LATE)

    def train(
        self, between: Callable[[nn.Module, int], None] | None = None, mesh: DeviceMesh | None = None, **options: Any
    ) -> list[torch.Tensor]:
        return trained(self.rank, self.gtp_mesh() if mesh is None else mesh, between, **options)

    def engine(self) -> CopyEngine:
        return CopyEngine(self.gtp_mesh().get_group(), torch.device("cuda", torch.cuda.current_device()))

    def test_every_gather_backend_has_the_same_bits(self) -> None:
        expected = self.train()
        backends: list[dict[str, Any]] = [{"gather_backend": name} for name in ("copy_engine", "auto")]
        for options in (*backends, {"gather_backend": "copy_engine"} | SEVERAL):
            assert_same(self.train(**options), expected, f"{options}")
            for seed in range(2):
                with environment(DTENSOR_GTP_DEBUG=f"poison,delay={seed}"):
                    assert_same(self.train(**options), expected, f"{options}, seed {seed}")

    def test_automatic_choice(self) -> None:
        """All ranks take copy engines, and say so."""
        schedule = explicit(gather_backend="auto")
        model = gtp_shard(Stack().cuda(), self.gtp_mesh(), schedule=schedule, mp_policy=BF16)
        square_loss(model, self.rows(0)).backward()
        told, *_ = sharding_report(model).gather_backends
        everyone: list[str] = [""] * self.world_size
        dist.all_gather_object(everyone, told)
        self.assertEqual(everyone, [told] * self.world_size)
        self.assertRegex(told, r"gather backend on gtp=\d+: copy_engine")

    def test_both_carriers_of_an_all_to_all_have_the_same_bits(self) -> None:
        expected = self.train(reduce_scatter="all_to_all")
        assert_same(self.train(reduce_scatter="all_to_all", wgrad_first=False), expected, "dgrad first")
        assert_same(self.train(reduce_scatter="copy_engine"), expected, "copy engine")
        with environment(DTENSOR_GTP_DEBUG="poison,delay=1"):
            assert_same(self.train(reduce_scatter="copy_engine"), expected, "copy engine with delays")

    def test_gradients_in_the_send_ring(self) -> None:
        """The bits of an all-to-all, for rings that are turned round often and gradients alone and in groups, with
        delays on all streams and a rank that is late, another one each step."""
        for options in (
            {"coalesce_grad_nbytes": 0, "max_inflight_reduce_scatters": 1},
            {"coalesce_grad_nbytes": 5 << 20, "max_inflight_reduce_scatters": 1},
            {"coalesce_grad_nbytes": 9 << 20, "max_inflight_reduce_scatters": 3},
        ):
            expected = self.train(reduce_scatter="all_to_all", **options)
            for debug in ("", "poison,delay=0", "poison,delay=1"):
                with environment(DTENSOR_GTP_DEBUG=debug):
                    assert_same(self.train(self.late, reduce_scatter="copy_engine", **options), expected, debug)

    def test_slow_peer(self) -> None:
        """A rank whose streams are late, another one each step: nobody reads or fills a stage too early."""
        expected = self.train()
        for together in TOGETHER:
            with casts_ahead() as ahead:
                actual = self.train(self.late, gather_backend="copy_engine", **together)
            assert_same(actual, expected, f"slow peer, {together}")
            self.assertTrue(ahead[-1] or not together)

    @unittest.skipIf(NUM_RANKS % 2 or NUM_RANKS < 4, "needs an even number of at least 4 GPUs")
    def test_copy_engines_with_replicas(self) -> None:
        """On a (replicate, gtp) mesh: the bits of gathers and all-to-alls over NCCL, with delays and late ranks."""
        mesh = self.two_by_half("replicate", "gtp")
        expected = self.train(mesh=mesh, reduce_scatter="all_to_all")
        for options in ({}, {**SEVERAL, "coalesce_grad_nbytes": 5 << 20}, TOGETHER[-1]):
            for debug in ("", "poison,delay=0", "poison,delay=1"):
                with environment(DTENSOR_GTP_DEBUG=debug):
                    actual = self.train(self.late, mesh, **COPY_ENGINES, **options)
                assert_same(actual, expected, f"{options}, {debug}")

    def test_layers_on_a_stream_of_their_own(self) -> None:
        """Their weights are not overwritten while they are read, nor their gradients reduced before they are there."""

        def train(stream: torch.cuda.Stream | None, is_captured: bool = False, **options: Any) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = Branches().cuda()
            model.stream = stream
            gtp_shard(model, self.gtp_mesh(), schedule=explicit(**options), mp_policy=BF16)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
            run = training_step(model, optimizer, square_step, is_captured=is_captured)
            losses = [run(self.rows(index)) for index in range(6)]
            return [*losses, *(param.full_tensor() for param in model.parameters())]

        together = {"coalesce_nbytes": 8 << 20, "coalesce_grad_nbytes": 8 << 20}
        for options in (
            {"coalesce_nbytes": 0, "coalesce_grad_nbytes": 0, "max_inflight_reduce_scatters": 1},
            together,
            {"wgrad_first": False},
            {**COPY_ENGINES, **together},
        ):
            expected = train(None, **options)
            for is_captured in (False, True):
                actual = train(torch.cuda.Stream(), is_captured, **options)
                assert_same(actual, expected, f"{options}, captured: {is_captured}")

    def test_weights_that_two_streams_use(self) -> None:
        """Both wait for the gather, and add their gradients to one sum of microbatches."""

        def train(stream: torch.cuda.Stream | None, **options: Any) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model: Any = Siamese().cuda()
            model.stream = stream
            gtp_shard(model, self.gtp_mesh(), schedule=explicit(**options), mp_policy=BF16)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            for index in range(6):
                model.set_requires_gradient_sync(index % 3 == 2)
                square_loss(model, self.rows(index)).backward()
                if index % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
            return [param.full_tensor() for param in model.parameters()]

        on_demand = {"prefetch_depth": 0, "prefetch_nbytes": 0, "coalesce_nbytes": 0}
        for options in ({}, on_demand, {"wgrad_first": False}, COPY_ENGINES):
            expected = train(None, **options)
            for debug in ("", "poison,delay=1"):
                with environment(DTENSOR_GTP_DEBUG=debug):
                    assert_same(train(torch.cuda.Stream(), **options), expected, f"{options}, {debug}")

    def test_recorded_layers_on_a_stream_of_their_own(self) -> None:
        """Their graphs share memory, and layers of one shape share buffers."""

        def train(stream: torch.cuda.Stream | None) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = Branches().cuda()
            gtp_shard(model, self.gtp_mesh(), schedule=explicit(), mp_policy=BF16)
            captured = None
            if stream is not None:
                captured = capture_blocks(model, [*model.main, *model.side])
                model.stream = stream
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            for index in range(8):
                square_loss(model, self.rows(index)).backward()
                optimizer.step()
                optimizer.zero_grad()
            if captured is not None:
                self.assertEqual(captured.num_graphs, 12)
            return [param.full_tensor() for param in model.parameters()]

        assert_same(train(torch.cuda.Stream()), train(None))

    def test_slow_peer_in_bare_gathers(self) -> None:
        """Gathers of changing values in a row; each rank in turn is late before, between and after."""
        engine = self.engine()
        shard = torch.empty(1 << 20, device="cuda")
        outputs = []
        for turn in range(12):
            if turn % self.world_size == self.rank:
                torch.cuda._sleep(LATE // 4)
            shard.fill_(100 * turn + self.rank)  # peers may still read what the last gather has sent
            outputs.append(torch.empty(self.world_size << 20, device="cuda"))
            engine.all_gather([outputs[-1]], [shard])
        for turn, output in enumerate(outputs):
            want = torch.arange(self.world_size, device="cuda").float().repeat_interleave(1 << 20) + 100 * turn
            self.assertTrue(torch.equal(output, want), f"turn {turn}")

    def test_evaluation_before_training(self) -> None:
        """Tensors over symmetric memory that were made in inference mode can be written to in training."""
        torch.manual_seed(0)
        models = [gtp_shard(Stack().cuda(), self.gtp_mesh(), schedule=explicit(**COPY_ENGINES)) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        with torch.inference_mode():
            models[0](self.rows(0))
        for model in models:
            for step in range(2):
                square_loss(model, self.rows(step)).backward()
        assert_same_grads(*models)

    def test_optimizer_step_in_flight(self) -> None:
        """Each rank's optimizer in turn is late: its peers gather its new weights, nobody a mixture. In bf16 too, with
        several gathers in a pass: then shards are cast ahead."""
        x = torch.randn(64, 1024, device="cuda")
        for policy, together in itertools.product((MixedPrecisionPolicy(), BF16), TOGETHER):
            torch.manual_seed(0)
            schedule = explicit(gather_backend="copy_engine", **together)
            model = gtp_shard(Stack().cuda(), self.gtp_mesh(), schedule=schedule, mp_policy=policy)
            weights = [param.detach().clone() for param in model.parameters()]
            with torch.no_grad():
                settings = [(model(x), weights)]
            # Without weights nothing is added to the input.
            settings.append((x.to(policy.param_dtype or x.dtype), [torch.zeros_like(weight) for weight in weights]))
            with casts_ahead() as ahead:
                for turn in range(2 * self.world_size + 1):
                    out = model(x)
                    self.assertTrue(torch.equal(out, settings[turn % 2][0]), f"{policy}, {together}, turn {turn}")
                    out.float().pow(2).mean().backward()
                    model.zero_grad()
                    self.late(model, turn // 2)
                    with torch.no_grad():
                        for param, weight in zip(model.parameters(), settings[(turn + 1) % 2][1], strict=True):
                            param.copy_(weight)
            self.assertTrue(ahead[-1] or not together)

    def test_shard_freed_and_loaded_while_peers_read(self) -> None:
        """The owner replaces its shards right after a forward that a peer is still busy with; they are cast ahead."""
        expected = gtp_shard(Stack().cuda(), self.gtp_mesh())
        x = self.rows(0)
        with torch.no_grad():
            want = expected(x)
        schedule = explicit(gather_backend="copy_engine", coalesce_nbytes=9 << 20)
        model = gtp_shard(Stack().cuda(), self.gtp_mesh(), schedule=schedule)
        model.load_state_dict(expected.state_dict())
        for turn in range(4):
            self.late(model, turn)
            with torch.no_grad():
                got = model(x)
            state = {name: value.clone() for name, value in model.state_dict().items()}
            for param in model.parameters():
                param.detach().to_local().fill_(float("nan"))
            model.load_state_dict(state, assign=turn % 2 == 0)
            del state
            torch.empty(1 << 24, device="cuda").fill_(float("nan"))  # over what was freed
            self.assertTrue(torch.equal(got, want), f"turn {turn}")

    def test_stage_grows_and_is_gone_with_the_model(self) -> None:
        engine = self.engine()
        for numel in (16, 1 << 16, 1 << 10, 1 << 18):
            shards = [torch.full((numel, 3), self.rank, dtype=d, device="cuda") for d in (torch.uint8, torch.float32)]
            outputs = [torch.empty(self.world_size * numel, 3, dtype=s.dtype, device="cuda") for s in shards]
            engine.all_gather(outputs, shards)
            for output in outputs:
                want = torch.arange(self.world_size, device="cuda").repeat_interleave(numel)[:, None].expand(-1, 3)
                self.assertTrue(torch.equal(output, want.to(output.dtype)))

    def test_copy_engine_in_a_cuda_graph(self) -> None:
        """Replays, eager gathers and a stage that grows in between do not disturb each other."""
        engine = self.engine()
        shard = torch.zeros(1 << 16, device="cuda")
        output = torch.empty(self.world_size << 16, device="cuda")
        engine.all_gather([output], [shard])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(3):
                engine.all_gather([output], [shard])
                shard += 1
        for replay in range(6):
            if replay % self.world_size == self.rank:
                torch.cuda._sleep(LATE // 4)
            shard.fill_(10 * replay + 100 * self.rank)
            graph.replay()
            want = torch.arange(self.world_size, device="cuda").repeat_interleave(1 << 16) * 100 + 10 * replay + 2
            self.assertTrue(torch.equal(output, want.float()), f"replay {replay}")
            large = torch.full((1 << (17 + replay),), float(self.rank), device="cuda")
            gathered = torch.empty(self.world_size * large.numel(), device="cuda")
            engine.all_gather([gathered], [large])
            self.assertEqual(gathered.sum().item(), large.numel() * sum(range(self.world_size)))

    def test_launches_of_a_weight_use(self) -> None:
        """The GEMM's output is wgrad in fp32, and is sent as it is; copies are those of this rank's shard alone."""
        model = gtp_shard(linears().cuda(), self.gtp_mesh(), schedule=SCHEDULE, mp_policy=MIXED)
        forward, backward = launches(model, rows(torch.bfloat16).detach().cuda().requires_grad_())
        self.assertEqual(forward, "copy_, GATHER, copy_, GATHER, mm, mm")
        self.assertEqual(backward, f"copy_, GATHER, {', '.join(['mm.dtype_out, SCATTER, mm'] * 2)}")

    def test_error_of_a_sum_on_the_receiving_rank(self) -> None:
        """What the other ranks add is below the bf16 resolution of what the first adds."""
        for kind in ("all_to_all", "copy_engine"):
            torch.manual_seed(0)
            schedule = explicit(min_shard_numel=0, reduce_scatter=kind)
            model = gtp_shard(nn.Linear(64, 64, bias=False).cuda().bfloat16(), self.gtp_mesh(), schedule=schedule)
            x = torch.ones(1, 64, device="cuda", dtype=torch.bfloat16)
            (model(x).sum() * (1.0 if self.rank == 0 else 2.0**-9)).backward()
            exact = torch.tensor((1 + (self.world_size - 1) * 2.0**-9) / self.world_size).bfloat16()
            self.assertTrue(full(model.weight.grad).eq(exact.cuda()).all(), kind)


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestRegisteredBuffers(CudaTest):
    """torch registers the memory of its allocator with NCCL, which then reads and writes it without copies between."""

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        with environment(TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK="1"):
            super()._init_pg(rank, world_size, rdvz_file)
            dist.barrier()  # makes the communicator

    def test_training_equals_one_process(self) -> None:
        def batch(generator: torch.Generator) -> torch.Tensor:
            return torch.randn(self.world_size * 64, 1024, generator=generator).cuda()

        torch.manual_seed(0)
        mesh, schedule = self.gtp_mesh(), explicit(gather_backend="process_group")
        check_training(
            Stack().cuda(),
            lambda model: gtp_shard(model, mesh, schedule=schedule),
            mesh,
            batch,
            square_loss,
            make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            tolerance={"rtol": 1e-4, "atol": 1e-6},
        )
