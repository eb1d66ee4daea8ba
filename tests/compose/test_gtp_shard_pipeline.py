"""Stages of ``torch.distributed.pipelining``, each sharded over its own gtp mesh, train as one process does."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, _mesh, assert_same_params, full, rows_of_rank, shared_directory
from runtime_common import Raw, assert_idle, counted, members_of, num_gathers, runtime_of
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import WeightMesh, gtp_shard

VOCABULARY = 31
WIDTH = 8
NUM_MICROBATCHES = 4


class Part(nn.Module):
    """One stage: a fused and a generic layer and a norm; the first one embeds, the last one has the head."""

    def __init__(self, index: int, num_parts: int) -> None:
        super().__init__()
        if index == 0:
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.raw = Raw(WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        if index == num_parts - 1:
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.is_checkpointed = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.raw(torch.tanh(self.linear(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embedding"):
            x = self.embedding(x)
        x = checkpoint(self.body, x, use_reentrant=False) if self.is_checkpointed else self.body(x)
        return self.head(x) if hasattr(self, "head") else x


def make_parts(num_parts: int, seed: int = 0, is_tied: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    parts = nn.Sequential(*(Part(index, num_parts) for index in range(num_parts)))
    if is_tied:
        parts[-1].head.weight = parts[0].embedding.weight
    return parts


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (16, 5), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:]


class Layout(NamedTuple):
    """Which parts the ranks of a pp coordinate hold, the schedule that runs them, and the sizes of (pp, dp, gtp)."""

    num_parts: int
    parts_of: Callable[[int], tuple[int, ...]]
    schedule: Any
    sizes: tuple[int, int, int] = (2, 1, 2)


GPIPE = Layout(2, lambda rank: (rank,), ScheduleGPipe)
ONE_F_ONE_B = Layout(2, lambda rank: (rank,), Schedule1F1B)
INTERLEAVED = Layout(4, lambda rank: (rank, rank + 2), pipelining.ScheduleInterleaved1F1B)
ZERO_BUBBLE = Layout(4, lambda rank: (rank, rank + 2), pipelining.ScheduleInterleavedZeroBubble)
ZERO_BUBBLE_V = Layout(4, lambda rank: (rank, 3 - rank), pipelining.ScheduleZBVZeroBubble)


class Stage(pipelining.PipelineStage):
    """Before the first step torch 2.11 connects each stage to its neighbours, also to those on the same rank. There
    gloo, which has no connection to itself, raises, and the other ranks wait for it. Later releases do not ask this.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def shard_each(parts: list[nn.Module], mesh: Any) -> None:
    for part in parts:
        gtp_shard(part, mesh["gtp"], schedule=ALL)


class Pipeline:
    """The parts of this rank, which ``shard`` has sharded over ``mesh`` (of axes pp, dp and gtp unless given), under a
    schedule with ``options``. ``batch_of`` has inputs and targets by the number of the step."""

    def __init__(
        self,
        layout: Layout,
        parts: nn.Sequential | None = None,
        *,
        mesh: Any = None,
        batch_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = make_batch,
        stage_class: Any = Stage,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = token_loss,
        shard: Callable[[list[nn.Module], Any], object] = shard_each,
        **options: Any,
    ) -> None:
        self.layout, self.batch_of = layout, batch_of
        mesh = _mesh(layout.sizes, ("pp", "dp", "gtp")) if mesh is None else mesh
        self.samples = mesh.batch if isinstance(mesh, WeightMesh) else mesh["dp", "gtp"]
        indices = layout.parts_of(mesh["pp"].get_local_rank())
        self.has_first, self.has_last = 0 in indices, layout.num_parts - 1 in indices
        parts = make_parts(layout.num_parts) if parts is None else parts
        self.parts = {index: parts[index] for index in indices}
        shard(list(self.parts.values()), mesh)
        self.stages = [
            stage_class(part, index, layout.num_parts, torch.device("cpu"), group=mesh["pp"].get_group())
            for index, part in self.parts.items()
        ]
        is_single = layout.schedule in (ScheduleGPipe, Schedule1F1B)
        self.schedule = layout.schedule(
            self.stages[0] if is_single else self.stages, n_microbatches=NUM_MICROBATCHES, loss_fn=loss_fn, **options
        )

    def parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(param for part in self.parts.values() for param in part.parameters()))

    def state_dict(self) -> dict[str, Any]:
        return {f"{index}.{k}": v for index, part in self.parts.items() for k, v in part.state_dict().items()}

    def run(self, step: int, run: Any = None) -> torch.Tensor | None:
        inputs, targets = rows_of_rank(self.batch_of(step), self.samples)
        args = (inputs,) if self.has_first else ()
        target = {"target": targets} if self.has_last else {}
        return (run or self.schedule.step)(*args, **target)

    def assert_same(self, reference: nn.Sequential, what: str) -> None:
        for index, part in self.parts.items():
            assert_same_params(part, reference[index], what)

    def assert_same_outputs(self, reference: nn.Sequential, step: int) -> None:
        if any(i + 1 in self.layout.parts_of(rank) for rank in (0, 1) for i in self.layout.parts_of(rank)):
            return  # torch (2.13) cannot evaluate stages of which one rank holds two in a row
        with torch.no_grad():
            outputs = self.run(step, self.schedule.eval)
            if outputs is not None:
                torch.testing.assert_close(outputs, reference(rows_of_rank(self.batch_of(step), self.samples)[0]))

    def gathers(self) -> dict[str, int]:
        return {f"{i}.{name}": n for i, part in self.parts.items() for name, n in num_gathers(part).items()}

    def num_deviations(self) -> int:
        runtimes = {id(runtime_of(part)): runtime_of(part) for part in self.parts.values()}.values()
        return sum(chain.num_deviations for runtime in runtimes for chain in runtime.passes.chains.values())


def train(
    pipeline: Pipeline,
    reference: nn.Sequential,
    steps: int = 2,
    *,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = token_loss,
    add_grads: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Train both; gradients, to which ``add_grads`` may add, parameters and evaluation must agree."""
    mine, theirs = (torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9) for model in (pipeline, reference))
    for step in range(steps):
        inputs, targets = pipeline.batch_of(step)
        loss_fn(reference(inputs), targets).backward()
        pipeline.run(step)
        after_step()
        add_grads()
        pipeline.assert_same(reference, "grad")
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        pipeline.assert_same(reference, "param")
    pipeline.assert_same_outputs(reference, steps)


def check_reload(pipeline: Pipeline, reference: nn.Sequential, **options: Any) -> None:
    """What is saved from the stages loads into others, with ``options``, which train on, and into a whole model over
    another mesh."""
    layout = pipeline.layout
    again = Pipeline(layout, make_parts(layout.num_parts, seed=1), **options)
    whole = gtp_shard(make_parts(layout.num_parts, seed=2), _mesh((4,), ("gtp",)), schedule=ALL)
    with shared_directory() as folder:
        dcp.save({"model": pipeline.state_dict()}, checkpoint_id=folder)
        for model in (again, whole):
            dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    again.assert_same(reference, "param")
    assert_same_params(whole, reference)
    train(again, reference, steps=1)  # and evaluate: not before, as torch 2.11 would not send gradients after that


class Recording(Stage):
    """Notes the order of forwards and backwards, and the collectives of each kind of backward."""

    order = ""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.order += "F"
        return super().forward_one_chunk(*args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        self.order += "W" if backward_type == "weight" else "B"
        with counted() as calls:
            result = super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        vars(self).setdefault("counts", {})[backward_type] = calls()
        return result


class OncePerStep(Stage):
    """Reduces gradients in the last microbatch alone, and frees weights that were kept when the step ends."""

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        self.submod.set_requires_gradient_sync(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        self.submod.reshard()


class TestPipeline(GlooTest):
    def check_schedules(self, *layouts: Layout) -> None:
        for layout in layouts:
            pipeline, reference = Pipeline(layout), make_parts(layout.num_parts)
            train(pipeline, reference)
            for part in pipeline.parts.values():
                assert_idle(part)
            if layout in (ONE_F_ONE_B, INTERLEAVED):
                check_reload(pipeline, reference)

    def test_schedules(self) -> None:
        self.check_schedules(INTERLEAVED, ZERO_BUBBLE)

    @pytest.mark.long
    def test_other_schedules(self) -> None:
        """Those before are made of their actions."""
        self.check_schedules(GPIPE, ONE_F_ONE_B, ZERO_BUBBLE_V)

    def test_each_microbatch_gathers_for_each_use(self) -> None:
        for layout in (ONE_F_ONE_B, ZERO_BUBBLE):
            pipeline = Pipeline(layout, stage_class=Recording)
            for step in range(2):  # torch also runs each stage once to learn shapes
                pipeline.run(step)
            deviations, before = pipeline.num_deviations(), pipeline.gathers()
            for stage in pipeline.stages:
                stage.order = ""
            pipeline.run(2)
            used = {name: n - before[name] for name, n in pipeline.gathers().items()}
            expected = {}
            for (index, part), stage in zip(pipeline.parts.items(), pipeline.stages, strict=True):
                order = stage.order
                assert order.count("F") == order.count("B") == NUM_MICROBATCHES, order
                assert order.count("W") in (0, NUM_MICROBATCHES), order
                uses = {f"{index}.{name}": 2 * NUM_MICROBATCHES for name in num_gathers(part)}
                # Once more to look up; what the forward used last is kept if its backward is next.
                last = f"{index}.head.weight" if hasattr(part, "head") else f"{index}.raw.second"
                uses[last] -= order.replace("W", "").count("FB")
                if index == 0:
                    uses["0.embedding.weight"] = NUM_MICROBATCHES
                expected |= uses
            self.assertEqual(used, expected)
            self.assertEqual(pipeline.num_deviations(), deviations)
        # The second part of a backward gathers nothing, and reduces what the first part has left: the fused weights.
        for index, stage in zip(pipeline.parts, pipeline.stages, strict=True):
            if index == 0:  # torch does not split it: nobody waits for the gradients of its inputs
                self.assertEqual(stage.counts["full"].reduce_scatters, 4)
                continue
            self.assertEqual(stage.counts["input"].reduce_scatters, 2)
            self.assertEqual(stage.counts["weight"][:2], (0, 2 if index == 3 else 1))

    def test_kept_across_microbatches(self) -> None:
        """Each step gathers each weight once. It is freed by ``reshard``, or when the optimizer has made it stale."""
        for stage_class in (Stage, OncePerStep):
            reference, pipeline = make_parts(4), Pipeline(INTERLEAVED, stage_class=stage_class)
            for part in pipeline.parts.values():
                part.set_reshard_after_forward(False)
                part.set_reshard_after_backward(False)
            before = pipeline.gathers()

            def is_gathered_once(pipeline: Pipeline = pipeline, before: dict[str, int] = before) -> None:
                self.assertEqual(pipeline.gathers(), {name: number + 1 for name, number in before.items()})
                before.update(pipeline.gathers())

            train(pipeline, reference, after_step=is_gathered_once)
            optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
            pipeline.run(7)
            if stage_class is Stage:
                weights = [weight for part in pipeline.parts.values() for weight in members_of(part).weights]
                assert all(weight.for_forward.live or weight.for_forward.kept for weight in weights)
                optimizer.step()
            for part in pipeline.parts.values():
                assert_idle(part)

    def test_gradients_reduced_once(self) -> None:
        pipeline = Pipeline(ZERO_BUBBLE, stage_class=OncePerStep)
        train(pipeline, make_parts(4))
        pipeline.run(4)  # after an evaluation the ranks of torch 2.15 agree by an all-reduce of their own
        with counted() as calls:
            pipeline.run(5)
        num_weights = sum(len(num_gathers(part)) for part in pipeline.parts.values())
        self.assertEqual(calls.counts["_reduce_scatter_base_"], num_weights)
        self.assertEqual(calls.counts["allreduce_"], len(pipeline.parts))

    def test_activation_checkpointing(self) -> None:
        for layout in (ONE_F_ONE_B, ZERO_BUBBLE):
            parts = make_parts(layout.num_parts)
            for part in parts:
                part.is_checkpointed = True
            train(Pipeline(layout, parts), make_parts(layout.num_parts), steps=1)

    def check_compiled_blocks(self, layout: Layout) -> None:
        torch._dynamo.reset()  # torch 2.11 counts what it compiles of nn.Linear over all modules of the process
        parts = make_parts(layout.num_parts)
        for part in parts:
            for block in (part.linear, part.raw):
                block.compile(backend="aot_eager", fullgraph=True)
        train(Pipeline(layout, parts), make_parts(layout.num_parts), steps=1)

    def test_compiled_blocks(self) -> None:
        """torch runs each stage once to learn shapes, and asks for gradients of inputs alone: that adds no others."""
        self.check_compiled_blocks(ZERO_BUBBLE)

    @pytest.mark.long
    def test_compiled_blocks_of_a_whole_backward(self) -> None:
        self.check_compiled_blocks(ONE_F_ONE_B)

    def test_stages_of_one_call(self) -> None:
        """The stages of a rank share a runtime; their forwards and backwards alternate, each has its plan."""

        def shard_together(parts: list[nn.Module], mesh: Any) -> None:
            gtp_shard(nn.Sequential(*parts), mesh["gtp"], schedule=ALL)

        pipeline, reference = Pipeline(ZERO_BUBBLE_V, shard=shard_together), make_parts(4)
        train(pipeline, reference)
        deviations = pipeline.num_deviations()
        pipeline.run(2)
        self.assertEqual(pipeline.num_deviations(), deviations)

    def test_traced_stages(self) -> None:
        """What torch's tracing frontend makes of a model, in the place of modules that the user has cut."""
        mesh = _mesh((2, 1, 2), ("pp", "dp", "gtp"))
        index, rank = mesh.get_local_rank("pp"), mesh.get_local_rank("gtp")
        microbatch = make_batch(0)[0][: 16 // 2 // NUM_MICROBATCHES]
        split = {"1": pipelining.SplitPoint.BEGINNING}
        pipe = pipelining.pipeline(make_parts(2), mb_args=(microbatch,), split_spec=split)
        part = gtp_shard(pipe.get_stage_module(index), mesh["gtp"], schedule=ALL)
        stage = pipe.build_stage(index, torch.device("cpu"), mesh["pp"].get_group())
        schedule = Schedule1F1B(stage, n_microbatches=NUM_MICROBATCHES, loss_fn=token_loss)
        reference = make_parts(2)
        inputs, targets = make_batch(0)
        token_loss(reference(inputs), targets).backward()
        if index == 0:
            schedule.step(inputs.chunk(2)[rank])
        else:
            schedule.step(target=targets.chunk(2)[rank])
        for model in (part, reference):
            torch.optim.SGD(model.parameters(), lr=0.2).step()
        for name, param in part.named_parameters():
            expected = reference.get_parameter(name)
            torch.testing.assert_close(full(param.grad), expected.grad)
            torch.testing.assert_close(full(param), expected)

    def test_fully_shard_outside(self) -> None:
        def shard(parts: list[nn.Module], mesh: Any) -> None:
            shard_each(parts, mesh)
            for part in parts:
                fully_shard(part, mesh=mesh["dp"])

        for schedule in (INTERLEAVED.schedule, ZERO_BUBBLE.schedule):
            layout = Layout(2, lambda rank: (0, 1), schedule, sizes=(1, 2, 2))
            pipeline, reference = Pipeline(layout, shard=shard), make_parts(2)
            train(pipeline, reference)
        check_reload(pipeline, reference, shard=shard)

    def test_tied_stages_of_one_rank(self) -> None:
        """Embedding and head meet on the first ranks: one shard, summed gradients. A schedule that scales gradients
        would scale those of each stage, hence the shared one twice: the loss is scaled instead."""

        def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return token_loss(logits, targets) / NUM_MICROBATCHES

        pipeline = Pipeline(ZERO_BUBBLE_V, make_parts(4, is_tied=True), loss_fn=loss_fn, scale_grads=False)
        reference = make_parts(4, is_tied=True)
        train(pipeline, reference)
        if pipeline.has_first:
            assert pipeline.parts[0].embedding.weight is pipeline.parts[3].head.weight

    def test_tied_stages_of_different_ranks(self) -> None:
        """Each stage has a copy; the user adds up their gradients, shard by shard."""
        pipeline, reference = Pipeline(ONE_F_ONE_B), make_parts(2, is_tied=True)
        (part,) = pipeline.parts.values()
        copy = part.embedding.weight if pipeline.has_first else part.head.weight
        group = _mesh((2, 1, 2), ("pp", "dp", "gtp")).get_group("pp")
        with torch.no_grad():
            dist.broadcast(copy.to_local(), group_src=0, group=group)
        train(pipeline, reference, add_grads=lambda: dist.all_reduce(copy.grad.to_local(), group=group))
