"""Replicas of unequal sizes train as one process on the whole batch does: gradients, and parameters after each step."""

import copy
import functools
from collections.abc import Callable
from graphlib import TopologicalSorter
from itertools import chain, pairwise
from typing import Any
from unittest import mock

import test_gtp_shard_data_axes as data_axes
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from checkpoint_common import make, shard
from common import ALL, GlooTest, assert_same_params
from runtime_common import local
from schedules import explicit
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, MixedPrecisionPolicy, api, capture_step, gtp_shard
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp.elastic import (
    BatchShare,
    BlockColwiseParallel,
    BlockRowwiseParallel,
    ElasticMesh,
    MemoryModel,
    ReplicaSync,
    WeightSpec,
    clip_grad_norm_,
    nonuniform_mesh,
    synchronize_replicas,
)
from dtensor_gtp.elastic.sync import Channel
from dtensor_gtp.nn import GroupedExperts, GroupedMLP, parallelize_experts

# Small enough that a bucket is sent within backward, large enough that it holds several segments.
BUCKET_NBYTES = 300
HEAD_DIM = 4


def tokens_of(step: int, rows: int) -> torch.Tensor:
    return torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(step))


def token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Heads(nn.Module):
    """Attention and a SwiGLU of eleven pairs of features: no size of tp above 1 divides these, nor five heads."""

    def __init__(self, num_heads: int = 5) -> None:
        super().__init__()
        width = num_heads * HEAD_DIM
        self.embedding = nn.Embedding(11, 6)
        self.wq, self.wk, self.wv = (nn.Linear(6, width, bias=name == "wq") for name in ("wq", "wk", "wv"))
        self.wo = nn.Linear(width, 6)
        self.w1, self.w3 = (nn.Linear(6, 22, bias=False) for _ in range(2))
        self.w2 = nn.Linear(22, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        x = x + self.w2(F.silu(self.w1(x)) * self.w3(x))
        return self.head(self.norm(x))


def shard_all(model: nn.Module, mesh: ElasticMesh) -> None:
    gtp_shard(model, mesh.weights, schedule=ALL)


def shard_heads(model: nn.Module, mesh: ElasticMesh) -> None:
    plan = {name: BlockColwiseParallel(HEAD_DIM) for name in ("wq", "wk", "wv")} | {
        "wo": BlockRowwiseParallel(HEAD_DIM)
    }
    plan |= {"w1": BlockColwiseParallel(2), "w3": BlockColwiseParallel(2), "w2": BlockRowwiseParallel(2)}
    parallelize_module(model, mesh["tp"], plan)
    shard_all(model, mesh)


def shard_equal_heads(model: nn.Module, mesh: ElasticMesh) -> None:
    """As torch cuts them, where tp divides all."""
    plan = {name: ColwiseParallel() for name in ("wq", "wk", "wv", "w1", "w3")}
    parallelize_module(model, mesh["tp"], plan | {"wo": RowwiseParallel(), "w2": RowwiseParallel()})
    shard_all(model, mesh)


def shard_small(model: Any, mesh: ElasticMesh, **options: Any) -> None:
    shard(model, mesh.weights, **options)


class Elastic:
    """A model on unequal replicas beside the same model in one process."""

    def __init__(
        self,
        mesh: ElasticMesh,
        reference: nn.Module | None = None,
        apply: Callable[..., Any] = shard_small,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        bucket_nbytes: int = BUCKET_NBYTES,
        loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = token_loss,
        **options: Any,
    ) -> None:
        self.mesh, self.loss = mesh, loss
        self.reference = make(0) if reference is None else reference
        self.model: Any = copy.deepcopy(self.reference)
        apply(self.model, mesh, **options)
        self.sync: ReplicaSync = synchronize_replicas(self.model, mesh, bucket_nbytes=bucket_nbytes)
        self.optimizers = [make_optimizer(self.reference), make_optimizer(self.model)]

    def backward(self, batch: torch.Tensor, scale: float = 1.0) -> None:
        share = self.mesh.rebalance_batch(len(batch))
        self.sync.set_batch(share)
        (self.loss(self.reference, batch) * scale).backward()
        (self.loss(self.model, batch[share.rows]) * scale).backward()

    def step(self, **tolerance: float) -> None:
        assert_same_params(self.model, self.reference, "grad", **tolerance)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_params(self.model, self.reference, "param", **tolerance)

    def train(self, steps: int = 2, rows: int = 17, **tolerance: float) -> None:
        for step in range(steps):
            self.backward(tokens_of(step, rows + step))
            self.step(**tolerance)
        self.sync.check_values()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = GroupedExperts(GroupedMLP(6, 8, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, :6].topk(2).indices
        return self.experts(x, chosen, torch.full(chosen.shape, 0.5))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class TestSixRanks(GlooTest):
    world_size = 6

    def unequal(self) -> ElasticMesh:
        return _replicas(((0, 1, 2), (3, 4), (5,)))

    def test_patterns_of_failures(self) -> None:
        for ranks in (([0], [1, 2, 3, 4], [5]), ([0], [1, 2], [3, 4, 5]), ([5, 0, 3], [], [4, 2], [1])):
            Elastic(nonuniform_mesh("cpu", replicas=ranks)).train()

    def test_failed_coordinates(self) -> None:
        mesh = nonuniform_mesh("cpu", replicate=3, gtp=4, failed={(0, r, 0) for r in range(4)} | {(2, 1, 0), (2, 3, 0)})
        self.assertEqual([replica.gtp for replica in mesh.layout.replicas], [4, 2])
        Elastic(mesh).train()
        self.assertRegex(repr(mesh), r"ElasticMesh: 2 replicas of 6 ranks\n.*gtp 4 .*\n.*gtp 4 -> 2\n\(this is rank \d")

    def test_tensor_parallel_replicas(self) -> None:
        """Equal sizes of tp, and replicas that have given it up: copies of what tp does not cut count once. Five heads
        over 3, 2 and 1 ranks, and over 4 and 2, are whole ones everywhere."""
        five = [WeightSpec("wq", (5 * HEAD_DIM, 6), tp_dim=0, tp_block_size=HEAD_DIM)]
        for replicas, tp, weights, num_heads in (
            ([[0, 1, 2, 3], [4, 5]], 2, (), None),
            ([[0, 1], [2, 3, 4], [5]], 2, (), None),
            ([[0, 1, 2], [3, 4], [5]], 3, five, (2, 2, 1, 3, 2, 5)),
            ([[0, 1, 2, 3], [4, 5]], 4, five, (2, 2, 1, 0, 3, 2)),
        ):
            mesh = nonuniform_mesh("cpu", replicas=replicas, tp=tp, weights=weights)
            torch.manual_seed(3)
            elastic = Elastic(mesh, Heads(5 if weights else 4), shard_heads if weights else shard_equal_heads)
            if num_heads is not None:
                self.assertEqual(local(elastic.model.wq.weight).shape, (num_heads[dist.get_rank()] * HEAD_DIM, 6))
            elastic.train()

    def test_gradient_accumulation(self) -> None:
        """Shares of microbatches may differ where each backward reduces; where the last one does, they must not."""
        elastic = Elastic(self.unequal())
        for rows in (13, 8):
            elastic.backward(tokens_of(rows, rows), 0.5)
        elastic.step()
        for switch in ("set_requires_gradient_sync", "set_requires_all_reduce"):
            for step, is_last in enumerate((False, False, True)):
                getattr(elastic.model, switch)(is_last)
                elastic.backward(tokens_of(step, 15), 1 / 3)
                if step == 0:
                    with self.assertRaisesRegex(RuntimeError, "the same shares for all microbatches"):
                        elastic.sync.set_batch(1 + dist.get_rank())
            elastic.step()

    def test_split_that_is_not_the_planned_one(self) -> None:
        """Numbers of samples as they come, a rank without any, whose loss is no number."""
        elastic = Elastic(self.unequal(), make_optimizer=sgd)
        counts = [1, 4, 0, 2, 2, 3]
        rank = dist.get_rank()
        for step in range(2):
            batch = tokens_of(step, sum(counts))
            own = batch[sum(counts[:rank]) :][: counts[rank]] if counts[rank] else batch[:1]
            elastic.sync.set_batch(counts[rank])
            token_loss(elastic.reference, batch).backward()
            (token_loss(elastic.model, own) * (1.0 if counts[rank] else float("nan"))).backward()
            elastic.step()

    def test_divide_factor_sums_as_it_is_told(self) -> None:
        """Losses that are divided by the number of samples of all need no weights, whatever the shares."""
        elastic = Elastic(self.unequal())
        elastic.model.set_gradient_divide_factor(1)
        batch = tokens_of(0, 13)
        own = batch[elastic.mesh.rebalance_batch(13).rows]
        token_loss(elastic.reference, batch).backward()
        (token_loss(elastic.model, own) * len(own) / 13).backward()
        elastic.step()

    def test_context_parallel_along_gtp(self) -> None:
        """The ranks of a replica share its sequences: in each replica they have parts of another length."""
        mesh, num_samples, length = self.unequal(), 12, 6
        elastic = Elastic(mesh, data_axes.make_model(), shard_all, sgd)
        cp = mesh["gtp"]
        data_axes.along(elastic.model, cp)
        before, own = sum(sum(counts) for counts in mesh.rebalance_batch(num_samples).counts[: mesh.place.replica]), 0
        for step in range(2):
            share = mesh.rebalance_batch(num_samples)
            elastic.sync.set_batch(share)  # as many tokens as this many samples have
            own = sum(share.counts[mesh.place.replica])
            tokens, targets = (part[:, :length] for part in data_axes.make_batch(step, num_samples))
            positions = torch.arange(length)
            data_axes.sum_loss(elastic.reference, tokens, targets, positions).div(targets.numel()).backward()
            mine = positions.chunk(cp.size())[cp.get_local_rank()]
            tokens, targets = (part[before : before + own, mine] for part in (tokens, targets))
            data_axes.sum_loss(elastic.model, tokens, targets, mine).div(targets.numel()).backward()
            elastic.step()

    def test_experts_without_an_axis_of_their_own(self) -> None:
        """Each rank runs all experts; their weights are cut over gtp as others. Expert parallelism is refused."""
        mesh = self.unequal()
        elastic = Elastic(mesh, Experts(), shard_all, sgd, loss=lambda model, x: model(x).square().mean())
        for step in range(2):
            elastic.backward(torch.randn(13, 8, generator=torch.Generator().manual_seed(step)))
            elastic.step()
        folded = parallelize_experts(Experts(), mesh["gtp"])
        gtp_shard(folded, mesh["tp"], schedule=ALL)
        why = "for experts too: replicas of unequal sizes|Keep experts whole on each rank .* split them at other rows"
        with self.assertRaisesRegex(ValueError if mesh["gtp"].size() > 1 else NotImplementedError, why):
            synchronize_replicas(folded, mesh)

    def test_pipelines_are_refused(self) -> None:
        mesh = self.unequal()
        elastic = Elastic(mesh, Experts(), shard_all)
        stage = PipelineStage(elastic.model, 0, 1, torch.device("cpu"), group=mesh["tp"].get_group())
        schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=F.mse_loss)
        with self.assertRaisesRegex(NotImplementedError, "Pipelines do not support elastic.*span all ranks of the job"):
            schedule.step(torch.randn(4, 8), target=torch.randn(4, 8))

    def test_mixed_precision(self) -> None:
        for policy in (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            MixedPrecisionPolicy(reduce_dtype=torch.float16),
        ):
            elastic = Elastic(self.unequal(), make_optimizer=sgd, mp_policy=policy)
            dtypes: set[torch.dtype] = set()
            all_reduce = compat.all_reduce

            def recording(tensor: torch.Tensor, *args: Any) -> Any:
                dtypes.add(tensor.dtype)  # noqa: B023
                return all_reduce(tensor, *args)  # noqa: B023

            with mock.patch.object(compat, "all_reduce", recording):
                elastic.train(rtol=5e-2, atol=2e-2)
            self.assertEqual(dtypes, {policy.reduce_dtype})

    def test_clipping_keeps_replicas_equal_to_the_last_bit(self) -> None:
        elastic = Elastic(self.unequal())
        total_norm = nn.utils.get_total_norm
        # As if every replica had summed up in an order of its own.
        ulps = 1 + 1e-6 * elastic.mesh.place.replica

        def rounded_otherwise(*args: Any, **kwargs: Any) -> torch.Tensor:
            return total_norm(*args, **kwargs) * ulps

        for step in range(2):
            elastic.backward(tokens_of(step, 12))
            with mock.patch.object(nn.utils, "get_total_norm", rounded_otherwise):
                norm = clip_grad_norm_(elastic.model.parameters(), 0.1, elastic.mesh)
            expected = nn.utils.clip_grad_norm_(elastic.reference.parameters(), 0.1)
            torch.testing.assert_close(norm, expected)
            self.assertGreater(float(norm), 0.1)
            elastic.step()
        elastic.sync.check_values()

    def test_overflow_in_one_replica_skips_the_step_in_all(self) -> None:
        elastic = Elastic(self.unequal(), make_optimizer=sgd)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = [local(p.detach()).clone() for p in elastic.model.parameters()]
        batch = tokens_of(0, 12)
        own = batch[elastic.mesh.rebalance_batch(12).rows]
        for is_overflowing in (True, False):
            factor = float("inf") if is_overflowing and dist.get_rank() == 5 else 1.0
            scaler.scale(token_loss(elastic.model, own) * factor).backward()
            scaler.step(elastic.optimizers[1])
            scaler.update()
            elastic.optimizers[1].zero_grad()
            self.assertEqual(scaler.get_scale(), 2.0)
            shards = [local(p.detach()) for p in elastic.model.parameters()]
            is_kept = [torch.equal(shard, b) for shard, b in zip(shards, before, strict=True) if shard.numel()]
            self.assertEqual(set(is_kept), {is_overflowing})
        token_loss(elastic.reference, batch).backward()
        elastic.optimizers[0].step()
        assert_same_params(elastic.model, elastic.reference)

    def test_a_backward_that_raised_leaves_nothing_behind(self) -> None:
        elastic = Elastic(self.unequal())
        tokens = tokens_of(0, 12)[elastic.mesh.rebalance_batch(12).rows]

        def fail(grad: torch.Tensor) -> None:
            raise RuntimeError("in backward")

        handle = elastic.model.embedding.register_forward_hook(
            lambda m, args, output: output.register_hook(fail) and None
        )
        with self.assertRaisesRegex(RuntimeError, "in backward"):
            token_loss(elastic.model, tokens).backward()
        handle.remove()
        elastic.optimizers[1].zero_grad()
        elastic.train()

    def test_few_collectives_in_one_order_behind_backward(self) -> None:
        """Every owner sends the same buckets in the same order, and no two ranks wait for each other in a circle."""
        num_behind, sent, elastic = self.sent(BUCKET_NBYTES)
        self.assertGreater(num_behind, 0)
        num_behind, sent_at_end, elastic = self.sent(1 << 20)
        owners = elastic.sync.plan.of_rank(dist.get_rank())
        self.assertEqual((num_behind, len(sent_at_end)), (0, len(owners)))
        self.assertEqual(elastic.sync.num_all_reduces, len(owners) + 1)
        for order in (sent, sent_at_end):
            gathered: list[Any] = [None] * 6
            dist.all_gather_object(gathered, order)
            after: dict[Any, set[Any]] = {}
            for earlier, later in chain.from_iterable(map(pairwise, gathered)):
                after.setdefault(later, set()).add(earlier)
            TopologicalSorter(after).prepare()  # raises on a circle

    def sent(self, bucket_nbytes: int) -> tuple[int, list[tuple[str, int]], Elastic]:
        """How many buckets are sent within a backward, all that are sent, and who did."""
        elastic = Elastic(self.unequal(), bucket_nbytes=bucket_nbytes)
        sent: list[tuple[str, int]] = []
        num_behind: list[int] = []
        sends, finishes = ReplicaSync._send, ReplicaSync.finish

        def send(sync: ReplicaSync, channel: Channel, dtype: torch.dtype) -> None:
            name = channel.group_name
            sent.append((name, sum(other == name for other, _ in sent)))
            sends(sync, channel, dtype)

        def finish(sync: ReplicaSync) -> None:
            num_behind.append(len(sent))
            finishes(sync)

        with mock.patch.multiple(ReplicaSync, _send=send, finish=finish):
            elastic.backward(tokens_of(0, 12))
        elastic.step()
        return num_behind[0], sent, elastic

    # --- errors -------------------------------------------------------------------------------------------------------

    def test_replicas_must_have_the_same_model_and_policies(self) -> None:
        mesh = self.unequal()
        other = mesh.place.replica == 1
        for options in (
            {"schedule": explicit(min_shard_numel=0, prefetch_depth=3 if other else 2)},
            {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64 if other else None)},
        ):
            model = make(0)
            gtp_shard(model, mesh.weights, **options)  # type: ignore[arg-type]
            with self.assertRaisesRegex(RuntimeError, "the same model and policies on all ranks .* where rank 3 has"):
                synchronize_replicas(model, mesh)
        linear = gtp_shard(nn.Linear(4, 9 if other else 8), mesh.weights, schedule=ALL)
        with self.assertRaisesRegex(RuntimeError, r"where rank 3 has .*shape=\(9, 4\)"):
            synchronize_replicas(linear, mesh)

    def test_replicas_must_have_the_same_values(self) -> None:
        for name in ("columns", "norm.weight"):
            elastic = Elastic(self.unequal())
            elastic.sync.check_values()
            if elastic.mesh.place.replica == 1:
                with torch.no_grad():
                    param = elastic.model.get_parameter(name)
                    param.to_local().flatten()[-1:].mul_(1 + 1e-6)
            with self.assertRaisesRegex(RuntimeError, f"equal parameters in all replicas, but '{name}' differs"):
                elastic.sync.check_values()

    def test_synchronize_replicas_refuses(self) -> None:
        mesh, model = self.unequal(), gtp_shard(make(0), self.unequal().weights, schedule=ALL)
        everywhere = gtp_shard(make(0), mesh.world, schedule=ALL)
        split = gtp_shard(make(0), mesh.weights, schedule=ALL, shard_optimizer=True)
        with mock.patch.object(api, "refuse_unavailable"):  # a CPU has no copy engines
            copying = gtp_shard(nn.Linear(8, 8), mesh.weights, schedule=explicit(gather_backend="copy_engine"))
        used = gtp_shard(nn.Linear(8, 8), mesh.weights, schedule=ALL)
        used(torch.ones(1, 8))
        first = "expects a Linear that has run no forward .* Call it right after gtp_shard"
        streams = "gather_backend='copy_engine'.: streams would wait forever .* Leave out gather_backend"
        for error, message, refused, where in (
            (ValueError, "was passed to gtp_shard, but got another", make(0), mesh),
            (TypeError, "an ElasticMesh as mesh", make(0), mesh.world),
            (NotImplementedError, "does not support gtp_shard.shard_optimizer=True", split, mesh),
            (ValueError, r"sharded over mesh.weights \(ranks \[.*every gtp_shard call", everywhere, mesh),
            (NotImplementedError, streams, copying, mesh),
            (RuntimeError, first, used, mesh),
        ):
            with self.assertRaisesRegex(error, message):
                synchronize_replicas(refused, where)  # type: ignore[arg-type]
        with self.assertRaisesRegex(ValueError, "bucket_nbytes to be at least 1"):
            synchronize_replicas(model, mesh, bucket_nbytes=0)
        synchronize_replicas(model, mesh)
        with self.assertRaisesRegex(ValueError, "was called on this .* already"):
            synchronize_replicas(model, mesh)
        with self.assertRaisesRegex(NotImplementedError, "capture_step .* would repeat the shares .* init_weight_mesh"):
            capture_step(print, model, sgd(model))
        with self.assertRaisesRegex(ValueError, "synchronize_replicas was already called on a part of it"):
            gtp_shard(nn.Sequential(model), mesh.weights)

    def test_splits_by_others_are_refused(self) -> None:
        """Of an outer ``fully_shard``, one that no plan of sums has, and one that is another in each replica."""
        mesh = _replicas(((0, 1, 2, 3), (4, 5)), tp=2)

        def cut(placement: Placement) -> nn.Module:
            model = nn.Sequential(nn.Linear(8, 8, bias=False))
            model[0].weight = nn.Parameter(distribute_tensor(model[0].weight, mesh["tp"], [placement]))
            return gtp_shard(model, mesh.weights, schedule=ALL)

        wrapped = gtp_shard(nn.Sequential(nn.Linear(8, 8)), mesh.weights, schedule=ALL)
        fully_shard(wrapped[0], mesh=mesh["tp"])
        same = r"same tensor-parallel split .* '0.weight' of shape .* \['\(0, 1\)', '\(1, 1\)'\]. Use one parallelize"
        strided, kinds = cut(GTPShard(0, split_factor=2)), "supports Shard, GTPShard and Replicate on axis tp"
        for error, message, refused in (
            (NotImplementedError, "does not support fully_shard around gtp_shard, but '0' is wrapped", wrapped),
            (NotImplementedError, f"{kinds}, but '0.weight' has", strided),
            (ValueError, same, cut(Shard(mesh.place.replica))),
        ):
            with self.assertRaisesRegex(error, message):
                synchronize_replicas(refused, mesh)
        synchronize_replicas(cut(Shard(1)), mesh)

    def test_set_batch_refuses(self) -> None:
        rank, sync = dist.get_rank(), Elastic(self.unequal()).sync
        tp = nonuniform_mesh("cpu", replicas=[[0, 1, 2, 3], [4, 5]], tp=2)
        for of, batch, message in (
            (sync, 2 if rank else -1, "numbers of samples >= 0"),
            (sync, 0, "not all 0"),
            (sync, BatchShare(0, 1, ((1, 1), (1,))), "a share of this mesh"),
            (Elastic(tp, Heads(4), shard_equal_heads).sync, rank + 1, "the same number on all ranks of a tp group"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                of.set_batch(batch)

    def test_nonuniform_mesh_refuses_on_all_ranks(self) -> None:
        halves = [[0, 1, 2], [3, 4, 5]]
        unlike = [[0, 1, 2, 3], [4, 5]] if dist.get_rank() else halves
        weights = [WeightSpec("w", (1 << 10, 1 << 10))]
        large = {"replicas": [range(5), [5]], "weights": weights, "memory": MemoryModel(budget=20 << 20)}
        seven = {"replicate": 2, "gtp": 4, "failed": {(1, 0, 0)}}
        neither = r"\(replicate and gtp, failed\), but got replicas=None, replicate=2, gtp=None"
        both = r"either replicas or the sizes before .*, but got replicas=\[.*\], replicate=2, gtp=None"
        for error, message, options in (
            (ValueError, r"6 ranks \(WORLD_SIZE\), but got \[4, 3\]", seven),
            (ValueError, both, {"replicate": 2, "replicas": halves}),
            (ValueError, neither, {"replicate": 2}),
            (ValueError, "do not overlap, but rank 3", {"replicas": [[0, 1, 2, 3], [3, 4, 5]]}),
            (RuntimeError, "nonuniform_mesh expects the same arguments", {"replicas": unlike}),
            (ValueError, r"replica 1 of 1 ranks .* is too small: rank 5 needs 2\d\.0 MiB", large),
        ):
            with self.assertRaisesRegex(error, message):
                nonuniform_mesh("cpu", **options)  # type: ignore[arg-type]


@functools.cache
def _replicas(ranks: tuple[tuple[int, ...], ...], tp: int = 1) -> ElasticMesh:
    """Each mesh once: to connect its process groups takes longer than a test."""
    return nonuniform_mesh("cpu", replicas=ranks, tp=tp)
