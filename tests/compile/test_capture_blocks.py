"""``capture_blocks`` without a GPU: graphs of blocks beside eager code, bit by bit.

A stand-in records as a CUDA graph does, seen from outside: recording computes nothing, a replay runs no Python of the
caller's and leaves its results where the recording left them. Collectives copy, as on a rank among others that hold the
same, and not before they are waited for.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, fake_mesh
from counting import noted
from runtime_common import Raw, assert_idle, local, members_of, num_gathers, runtime_of, weight_of
from schedules import explicit
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm.streams import Streams
from dtensor_gtp._schedule.attribute_reads import Frame
from dtensor_gtp._schedule.keep_and_free import Keeper
from dtensor_gtp._schedule.runtime import Runtime
from dtensor_gtp.graphs.capture_blocks import CapturedBlocks
from dtensor_gtp.nn import GroupedLinear

BF16 = torch.bfloat16
WIDTH, VOCABULARY, DEPTH = 16, 12, 3


class Wire:
    """Collectives of a rank among others that hold the same: what they write is garbage until they are waited for, and
    what they read is read then."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, list[tuple[int, ...]]]] = []

    def launch(self, name: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], copy_all: Any) -> Work:
        self.launched.append((name, [tuple(tensor.shape) for tensor in outputs]))
        # This rank's part of a gather may lie in the output.
        owned = [input.clone() for input in inputs] if name == "gather" else inputs
        for output in outputs:
            output.fill_(float("nan") if output.is_floating_point() else -1)
        return Work(lambda: copy_all(outputs, owned))

    def gather(self, outputs: Any, inputs: Any, group: Any, async_op: bool) -> Work:
        def copy_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
            for output, input in zip(outputs, inputs, strict=True):
                output.copy_(torch.cat([input] * group.size()))

        return self.launch("gather", _listed(outputs), _listed(inputs), copy_all)

    def scatter(self, outputs: Any, inputs: Any, op: Any, group: Any, async_op: bool) -> Work:
        def copy_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
            for output, input in zip(outputs, inputs, strict=True):
                output.copy_(input.chunk(group.size())[group.rank()])

        return self.launch("scatter", _listed(outputs), _listed(inputs), copy_all)

    def exchange(self, output: torch.Tensor, input: torch.Tensor, group: Any, async_op: bool) -> Work:
        return self.launch("exchange", [output], [input], lambda outputs, inputs: outputs[0].copy_(inputs[0]))

    def take_launched(self) -> list[tuple[str, list[tuple[int, ...]]]]:
        launched, self.launched = self.launched, []
        return launched


World = tuple[DeviceMesh, Wire]


class Work:
    def __init__(self, complete: Callable[[], object]) -> None:
        self.complete: Callable[[], object] | None = complete

    def wait(self) -> None:
        complete, self.complete = self.complete, None
        if complete is not None:
            complete()


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


@contextlib.contextmanager
def one_of(size: int) -> Iterator[World]:
    wire = Wire()
    ops = {
        "all_gather_base": wire.gather,
        "all_gather_coalesced": wire.gather,
        "reduce_scatter_base": wire.scatter,
        "reduce_scatter_coalesced": wire.scatter,
        "all_to_all_base": wire.exchange,
    }
    with fake_mesh(size) as mesh, mock.patch.multiple(compat, **ops):
        yield mesh, wire


class OnHost:
    """Records by running a pass on the side, and spoils its results: only a replay, which runs it again, computes.

    Nothing that the caller's frames hold is there for a replay.
    """

    def __init__(self, runtime: Runtime | None = None) -> None:
        self.events: list[str] = []
        self.runtime = runtime

    def eager(self, *, is_last: bool) -> Any:
        raise AssertionError("eager calls are none of its business")

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.events.append("record")
        with mock.patch.object(Streams, "fork", side_effect=AssertionError("a recording does not communicate")):
            result = step()
        for tensor in self.tensors(result):
            tensor.detach().copy_(torch.full_like(tensor, float("nan") if tensor.is_floating_point() else -1))

        def replay() -> None:
            self.events.append("replay")
            hidden = (
                mock.patch.object(self.runtime.reads, "frames", [Frame()]) if self.runtime else contextlib.nullcontext()
            )
            with torch.enable_grad(), hidden:
                again = step()
            for target, source in zip(self.tensors(result), self.tensors(again), strict=True):
                target.detach().copy_(source.detach())

        return replay, result

    def tensors(self, result: Any) -> list[torch.Tensor]:
        return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


class Block(nn.Module):
    """Fused, generic and grouped weights, one on dim 1, one used twice, whole parameters, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = GroupedLinear(2, WIDTH, WIDTH, bias=False)
        self.raw = Raw(WIDTH)
        self.register_buffer("split_sizes", torch.tensor([3, 4], dtype=torch.int32))

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> Any:
        x = x + self.down(F.gelu(self.up(self.norm(x)))) * scale
        x = x + self.experts(x, self.split_sizes)
        x = self.raw(self.norm(x))
        x = x + self.twice(torch.tanh(self.twice(x)))
        return (x if mask is None else x * mask), {"count": torch.tensor(x.shape[0]), "name": "block"}


class Placed(Block):
    """With a table of positions, whose gradient is the last of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> Any:
        return super().forward(x + self.positions(torch.arange(x.shape[0])), scale, mask)


class Net(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.gain = nn.Parameter(torch.eye(WIDTH))
        self.is_checkpointed = is_checkpointed
        self.scale = 1.0

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens) @ self.gain  # read by the root: its frame has hooks on saved tensors
        for block in self.blocks:
            if self.is_checkpointed:
                x, _ = checkpoint(block, x, self.scale, mask, use_reentrant=False)
            else:
                x, rest = block(x, self.scale, mask=mask)
                assert rest["name"] == "block"
                assert rest["count"] == tokens.numel()
        return F.cross_entropy(self.head(x).float(), tokens)


def tokens_of(seed: int, num: int = 7) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (num,), generator=torch.Generator().manual_seed(seed))


class Pair:
    """The same model twice, the blocks of one of them recorded."""

    def __init__(
        self, world: World, model: nn.Module | None = None, compares_launches: bool = True, **options: Any
    ) -> None:
        mesh, self.wire = world
        self.compares_launches = compares_launches
        model = Net() if model is None else model
        options = {"schedule": ALL, **options}
        self.models = [gtp_shard(copy.deepcopy(model), mesh, **options) for _ in range(2)]
        if compares_launches:  # what has a fixed buffer does not stay between two uses, so nothing does in eager blocks
            for model in self.models:
                passes = runtime_of(model).passes
                stock = passes._traits
                passes._traits = lambda stock=stock: [traits._replace(may_stay=False) for traits in stock()]
        self.recorder = OnHost(runtime_of(self.models[1]))
        self.captured = CapturedBlocks(self.models[1], list(self.models[1].blocks), self.recorder, 2, 4)
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in self.models]

    def run(self, step: Callable[[nn.Module], object]) -> list[str]:
        """One step of both, which must launch the same and leave the same bits. Returns what the recorder has done."""
        grads, launched = [], []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            self.wire.take_launched()
            step(model)
            launched.append(self.wire.take_launched())
            grads.append({n: None if p.grad is None else local(p.grad) for n, p in model.named_parameters()})
            assert_idle(model)
            optimizer.step()
            optimizer.zero_grad()
        for name, grad in grads[0].items():
            other = grads[1][name]
            assert (other is None) == (grad is None), name
            assert grad is None or torch.equal(other, grad), f"gradient of {name}"
        for (name, a), b in zip(self.models[1].named_parameters(), self.models[0].parameters(), strict=True):
            assert torch.equal(local(a), local(b)), name
            assert local(a).isfinite().all(), name
        for kind in ("gather", "scatter", "exchange") if self.compares_launches else ():
            sequences = [[shapes for name, shapes in launches if name == kind] for launches in launched]
            assert sequences[0] == sequences[1], f"sequence of {kind}s"
        events, self.recorder.events = self.recorder.events, []
        return events

    def steps(self, *seeds: int) -> list[list[str]]:
        return [self.run(train(seed)) for seed in seeds]

    def prepare(self) -> None:
        """Until all blocks are recorded."""
        assert self.steps(0, 1, 2) == [[], [], RECORDED]

    def check_replays(self, *seeds: int) -> None:
        """A step of microbatches, after all blocks have been recorded."""
        self.prepare()
        assert self.run(train(*seeds)) == REPLAYED * len(seeds)


def train(*seeds: int, **options: Any) -> Callable[[nn.Module], None]:
    def step(model: nn.Module) -> None:
        for seed in seeds:
            model(tokens_of(seed), **options).backward()

    return step


REPLAYED = ["replay"] * 2 * DEPTH
TWICE = "blocks.1.twice.weight"  # used twice by its block
RECORDED = ["record", "record", "replay"] * DEPTH + ["replay"] * DEPTH


@pytest.fixture
def world() -> Iterator[World]:
    with one_of(4) as world:
        yield world


@pytest.fixture
def pair(world: World) -> Pair:
    pair = Pair(world)
    pair.prepare()
    return pair


class TestCaptureBlocks:
    @pytest.mark.parametrize(
        ("schedule", "policy"),
        [
            ({}, ()),
            ({"prefetch_depth": 0}, (BF16, torch.float32)),
            ({"prefetch_nbytes": 64, "coalesce_nbytes": 0, "coalesce_grad_nbytes": 0}, (BF16, BF16)),
            ({"coalesce_grad_nbytes": 1024, "max_inflight_reduce_scatters": 1}, (None, BF16)),
            ({"reduce_scatter": "all_to_all"}, (BF16,)),
            # between the sizes of a gradient in bf16, in which some are computed, and in float32
            ({"coalesce_grad_nbytes": 768}, (BF16, torch.float32)),
        ],
    )
    def test_replays_are_eager_steps(self, world: World, schedule: Any, policy: Any) -> None:
        schedule = explicit(min_shard_numel=0, **schedule)
        pair = Pair(world, schedule=schedule, mp_policy=MixedPrecisionPolicy(*policy))
        pair.check_replays(3)
        assert pair.captured.num_graphs == DEPTH
        with torch.no_grad():
            losses = [model(tokens_of(9)) for model in pair.models]
        assert torch.equal(*losses)
        assert pair.run(train(5, 6)) == REPLAYED * 2

    @pytest.mark.parametrize("keep_nbytes", [1100, 9000])
    def test_nothing_of_recorded_blocks_is_kept(self, world: Any, keep_nbytes: int) -> None:
        """Eager blocks gather once what the policy keeps for backward; recorded ones twice, with the same results."""
        schedule = explicit(min_shard_numel=0, keep_nbytes=keep_nbytes, coalesce_nbytes=0)
        pair = Pair(world, schedule=schedule, compares_launches=False)
        pair.check_replays(3)
        eager, recorded = (
            sum(weight.for_forward.num_gathers for weight in members_of(model).weights) for model in pair.models
        )
        assert recorded > eager

    def test_nothing_of_recorded_blocks_stays_between_two_uses(self, world: Any) -> None:
        """Eager blocks gather a weight once in a pass. So do recorded ones when they are eager again."""
        pair = Pair(world, compares_launches=False)

        def gathers_of(seed: int) -> list[int]:
            before = [num_gathers(model)[TWICE] for model in pair.models]
            pair.run(train(seed))
            after = [num_gathers(model)[TWICE] for model in pair.models]
            return [now - then for now, then in zip(after, before, strict=True)]

        pair.prepare()
        assert gathers_of(3) == [2, 4]
        pair.captured.remove()
        assert gathers_of(4) == [2, 2]
        blocks = list(pair.models[1].blocks)
        pair.captured = CapturedBlocks(pair.models[1], blocks, pair.recorder, 2, 4)  # after a plan in which they stay
        gathers_of(5)  # learns the order of uses
        assert gathers_of(6) == [2, 4]

    def test_weights_are_gathered_where_graphs_read_them(self, world: Any) -> None:
        pair = Pair(world, schedule=explicit(min_shard_numel=0, prefetch_nbytes=3072, coalesce_nbytes=0))
        pair.prepare()
        copied, place = [], Keeper.place

        def watched(keeper: Any, weight: Any, gathered: Any) -> None:
            if not gathered.is_in(weight.form.fixed.gathered):
                copied.append(weight.fqn)
            place(keeper, weight, gathered)

        with mock.patch.object(Keeper, "place", watched):
            assert pair.run(train(3)) == REPLAYED
        # The second use of a weight is gathered while the first one holds the buffer.
        assert copied == [f"blocks.{index}.twice.weight" for index in (0, 1, 2, 2, 1, 0)]

    def test_an_embedding_in_a_block(self, world: Any) -> None:
        """Ranks that run it eagerly launch what ranks that replay it do."""
        model = Net()
        model.blocks = nn.ModuleList(Placed() for _ in model.blocks)
        for schedule in ({}, {"reduce_scatter": "all_to_all"}, {"coalesce_grad_nbytes": 1024}):
            Pair(world, model, schedule=explicit(min_shard_numel=0, **schedule)).check_replays(3)

    def test_one_rank(self) -> None:
        with one_of(1) as world:
            Pair(world).check_replays(3)

    def test_other_inputs_get_graphs_of_their_own(self, pair: Pair) -> None:
        mask = torch.randn(7, WIDTH)
        assert pair.run(train(3, mask=mask)) == []
        assert pair.run(train(4, mask=mask + 1)) == RECORDED
        assert pair.run(train(5, mask=mask)) == REPLAYED
        assert pair.run(train(6)) == REPLAYED
        assert pair.captured.num_graphs == 2 * DEPTH
        for model in pair.models:
            model.scale = 0.5
        assert pair.steps(7, 8) == [[], RECORDED]
        pair.captured.reset()
        pair.prepare()

    def test_what_is_baked_in(self, pair: Pair) -> None:
        for model in pair.models:
            model.blocks[1].up.weight.requires_grad_(False)
            model.blocks[2].eval()
        events = pair.steps(3, 4, 5, 6)
        assert events[0] == ["replay"] * 2  # the first block is as before
        assert (events[2].count("record"), events[3]) == (4, REPLAYED)
        for model in pair.models:
            model.blocks.requires_grad_(False)
        pair.prepare()

    def test_submodules_that_are_replaced_are_recorded_anew(self, world: Any) -> None:
        """Those without parameters, too."""
        model = Net()
        for block in model.blocks:
            block.norm = nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh())
        pair = Pair(world, model)
        pair.check_replays(3)
        for model in pair.models:
            model.blocks[1].norm[1] = nn.ReLU()
        assert pair.run(train(4)) == ["replay"] * 4

    def test_inputs_without_gradient(self, world: Any) -> None:
        """And a module without parameters in all blocks, as a table of rotary embeddings is."""
        model, shared = Net(), nn.Identity()
        for block in model.blocks:
            block.shared = shared
        model.embedding.requires_grad_(False)
        model.gain.requires_grad_(False)
        Pair(world, model).check_replays(3)

    def test_microbatches(self, pair: Pair) -> None:
        def step(model: nn.Module, *, is_pipelined: bool = False) -> None:
            model.set_requires_gradient_sync(False)
            first = model(tokens_of(4))
            if not is_pipelined:
                first.backward()
            model.set_requires_gradient_sync(True)
            second = model(tokens_of(5))
            if is_pipelined:
                first.backward()
            second.backward()

        assert pair.run(step) == REPLAYED * 2
        # A forward before the backward of the last one is eager.
        assert pair.run(lambda model: step(model, is_pipelined=True)) == REPLAYED
        pair.models[1](tokens_of(6))  # nobody needs its backward
        assert pair.recorder.events == ["replay"] * DEPTH
        assert pair.run(train(7)) == ["replay"] * DEPTH + REPLAYED

    def test_outputs_of_a_call_stay(self, pair: Pair) -> None:
        outputs = []
        for seed in range(3):
            x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            output, _ = pair.models[1].blocks[0](x, 1.0, mask=None)
            output.sum().backward()
            outputs.append((output, output.detach().clone(), x.grad, x.grad.clone()))
        pair.models[1].zero_grad()
        assert pair.recorder.events == ["replay"] * 6
        for output, kept, grad, kept_grad in outputs:
            assert torch.equal(output, kept)
            assert torch.equal(grad, kept_grad)

    def test_recomputation_is_eager(self, world: Any) -> None:
        assert Pair(world, Net(is_checkpointed=True)).steps(0, 1, 2, 3) == [[]] * 4

    def test_autocast_is_eager(self, pair: Pair) -> None:
        x = torch.randn(7, WIDTH, requires_grad=True)
        block = pair.models[1].blocks[0]
        with torch.autocast("cpu", BF16), contextlib.suppress(RuntimeError):  # GroupedLinear wants one dtype
            block(x, 1.0, mask=None)
        assert pair.recorder.events == []
        block(x, 1.0, mask=None)
        assert pair.recorder.events == ["replay"]

    def test_backward_after_a_later_forward_raises(self, pair: Pair) -> None:
        block = pair.models[1].blocks[0]
        x = torch.randn(7, WIDTH, requires_grad=True)
        output, _ = block(x, 1.0, mask=None)
        output.sum().backward(retain_graph=True)
        output.sum().backward(retain_graph=True)
        block(x, 1.0, mask=None)
        with pytest.raises(RuntimeError, match=r"backward of block 'blocks.0' runs after a later forward"):
            output.sum().backward()

    @pytest.mark.parametrize("coalesce_grad_nbytes", [0, 2048])
    def test_a_block_that_runs_eagerly_waits_for_none_of_its_own_reductions(
        self, world: World, coalesce_grad_nbytes: int
    ) -> None:
        """Other ranks may replay it: they reduce after the graph, which waits for all gathers of this rank."""
        options = {"max_inflight_reduce_scatters": 1, "coalesce_grad_nbytes": coalesce_grad_nbytes}
        pair = Pair(world, schedule=explicit(min_shard_numel=0, **options))
        pair.prepare()
        runtime = runtime_of(pair.models[1])
        running = [""]  # the block that submits gradients
        blocks: list[str] = []  # of each reduction that was launched
        waits: list[int] = []  # how many were launched when the first, second, ... of them was waited for
        reductions = runtime.comm.reductions
        with (
            noted(runtime.grads.launches, "enter_block", lambda weight: running.append(weight.fqn[: len("blocks.0")])),
            noted(reductions, "launched", lambda *args: blocks.append(running[-1])),
            noted(reductions, "_retire_oldest", lambda: waits.append(len(blocks))),
        ):
            pair.models[1].scale = 2.0  # which no graph knows
            pair.models[1](tokens_of(3)).backward()
        assert pair.recorder.events == []
        last = {block: index for index, block in enumerate(blocks, start=1)}
        assert {f"blocks.{index}" for index in range(DEPTH)} < last.keys(), blocks
        for block, num_launched in zip(blocks, waits, strict=True):
            assert num_launched >= last[block] or not block.startswith("blocks"), (block, blocks, waits)

    def test_weights_that_are_written_before_backward_raise(self, pair: Pair) -> None:
        loss = pair.models[1](tokens_of(3))
        with torch.no_grad():
            pair.models[1].blocks[2].down.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"'blocks.2.down.weight' is needed for gradient computation, but"):
            loss.backward()

    def test_a_buffer_that_is_taken(self, pair: Pair) -> None:
        """Gathers find other buffers, and a gather for later moves out of the way."""
        model = pair.models[1]
        runtime = runtime_of(model)
        weights = [weight_of(model, f"blocks.{index}.up.weight") for index in (0, 2)]
        assert weights[0].form.fixed is not None
        assert weights[1].form.fixed is not None
        assert weights[0].form.fixed.gathered is weights[1].form.fixed.gathered
        holder = weights[0].form.fixed.gathered.view(-1)
        assert pair.run(train(3)) == REPLAYED
        del holder
        runtime.gather_kept(weights[1])  # as a prefetch, to be used when block 0 has been
        assert weights[1].for_forward.kept is not None
        assert weights[1].for_forward.kept.is_in(weights[1].form.fixed.gathered)
        gathered = runtime.gathering.acquire(weights[0].for_forward)
        assert not gathered.is_in(weights[0].form.fixed.gathered)
        runtime.keeper.place(weights[0], gathered)
        assert not weights[1].for_forward.kept.is_in(weights[1].form.fixed.gathered)
        values = (weights[0].form.fixed.gathered, weights[1].for_forward.kept.value)
        for weight, value in zip(weights, values, strict=True):
            assert torch.equal(value, torch.cat([weight.shard] * 4))
        runtime.gathering.release(weights[0].for_forward, gathered)
        runtime.keeper.drop_kept(weights[1])

    def test_another_dtype_and_removal(self, pair: Pair) -> None:
        for model in pair.models:
            model.double()
        with pytest.raises(RuntimeError, match=r"dtype of 'blocks.0.up.weight' has changed since capture_blocks"):
            pair.models[1](tokens_of(3))
        for model in pair.models:
            model.float()
        pair.captured.remove()
        assert pair.captured.num_graphs == 0
        assert all("forward" not in block.__dict__ for block in pair.models[1].blocks)
        assert pair.run(train(3)) == []
