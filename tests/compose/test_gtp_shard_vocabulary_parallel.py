"""``linear_cross_entropy`` over a sharded vocabulary trains as ``F.cross_entropy`` of whole logits in one process."""

import copy
import itertools
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, _mesh, assert_same_params, check_training, environment, full, rows_of_rank
from fsdp_common import dp_gtp
from runtime_common import assert_idle, num_gathers, runtime_of, shard_copy, weight_of
from schedules import explicit
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import GTPShard, MixedPrecisionPolicy, SchedulePolicy, gtp_shard, quantize_, sharding_report
from dtensor_gtp.nn.functional import linear_cross_entropy
from dtensor_gtp.ops import cross_entropy

EXCHANGE = explicit(min_shard_numel=0, embedding="exchange")
VOCABULARY = 31
WIDTH = 8
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


class LM(nn.Module):
    """Returns the loss of the next token; its head has a bias, or is the embedding."""

    def __init__(self, vocabulary: int = VOCABULARY, is_tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.options = options

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(self.embedding(tokens)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(self.hidden(tokens[:, :-1]), self.head, tokens[:, 1:], **self.options)


class Predictor(nn.Module):
    """A block with a head of its own, a layer or a table. Returns hidden states and the loss."""

    def __init__(self, has_table: bool) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Embedding(VOCABULARY, WIDTH) if has_table else nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(hidden))
        return hidden, linear_cross_entropy(hidden, self.head, target)


class Predictors(nn.Module):
    def __init__(self, has_table: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Predictor(has_table) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, first = self.layers[0](self.embedding(tokens[:, :-1]), tokens[:, 1:])
        return first + self.layers[1](hidden, tokens[:, 1:])[1]


def lm(**options: Any) -> LM:
    torch.manual_seed(0)
    return LM(**options)


def make_tokens(seed: int = 0, rows: int = 8, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, 4), generator=torch.Generator().manual_seed(seed))


def batch_of(model: LM) -> Any:
    rows = model.embedding.num_embeddings
    return lambda generator: torch.randint(0, rows, (8, 4), generator=generator)


def call(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens)


def mean_of_sum(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Where some targets are ignored, ranks have different numbers of the others."""
    return call(model, tokens) / tokens[:, 1:].numel()


def stock_loss(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the function is a drop-in for."""
    logits = model.head(model.hidden(tokens[:, :-1])).float().flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten(), **options)


def chunks_of(num_tokens: int) -> Any:
    """A chunk is as many tokens of each rank."""
    nbytes = 4 * 4 * 8 * num_tokens  # ranks, rows of each
    return mock.patch.object(cross_entropy, "CHUNK_NBYTES", nbytes)


class LargestTensor(TorchDispatchMode):
    """The largest floating-point tensor that any op returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        self.numel = max([self.numel, *sizes])
        return result


class TestVocabularyParallel(GlooTest):
    def test_trains_as_one_process(self) -> None:
        """A bias, tied weights, empty shards, ignored and smoothed targets; in one chunk and in several."""
        options = {"ignore_index": 3, "label_smoothing": 0.3, "reduction": "sum"}
        how: dict[str, Any] = {"num_microbatches": 2, "tolerance": TIGHT}
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            for model, loss, size in (
                (lm(), call, 100),
                (lm(is_tied=True, **options), mean_of_sum, 2),
                (lm(vocabulary=5, **options), mean_of_sum, 1),
            ):
                shard = partial(gtp_shard, mesh=mesh, schedule=ALL)
                with chunks_of(size):
                    sharded = check_training(model.double(), shard, mesh, batch_of(model), loss, **how)
                assert_idle(sharded)
                name = "embedding.weight" if model.head.weight is model.embedding.weight else "head.weight"
                self.assertEqual(num_gathers(sharded)[name], 4 if name[0] == "e" else 0)
                self.assertIn("loss: exchange of up to 6 tokens per rank", str(sharding_report(sharded, verbose=True)))

    def test_equals_stock_cross_entropy(self) -> None:
        """Each reduction, value and gradient, in one process as on ranks; called inside and outside of the model."""
        mesh = self.gtp_mesh()
        reference = lm()
        tokens = make_tokens()
        own = rows_of_rank(tokens, mesh)
        for reduction in ("none", "mean", "sum"):
            options = {"reduction": reduction, "ignore_index": int(own[0, 1]), "label_smoothing": 0.1}
            model = shard_copy(reference, mesh)
            hidden = reference.hidden(own[:, :-1]).detach()
            expected = stock_loss(copy.deepcopy(reference), own, **options)
            for module in (reference, model):
                actual = linear_cross_entropy(hidden, module.head, own[:, 1:].int(), **options)
                self.assertEqual(actual, expected.view(actual.shape))
            self.assertEqual(actual.shape, own[:, 1:].shape if reduction == "none" else ())
            options = {"reduction": reduction}
            linear_cross_entropy(model.hidden(own[:, :-1]), model.head, own[:, 1:], **options).sum().backward()
            losses = [stock_loss(reference, rows, **options).sum() for rows in tokens.chunk(4)]
            torch.stack(losses).mean().backward()
            assert_same_params(model, reference, "grad")
            reference.zero_grad()
            assert_idle(model)

    def test_heads_in_blocks_that_are_groups(self) -> None:
        """In training and without gradients, and for a loss that code around the model computes."""
        mesh, tokens = self.gtp_mesh(), make_tokens()
        shard = partial(gtp_shard, mesh=mesh, schedule=SchedulePolicy(min_shard_numel=0))
        for has_table in (False, True):
            torch.manual_seed(0)
            reference = Predictors(has_table)
            model = check_training(reference, shard, mesh, lambda _: make_tokens(), call)
            self.assertIn("groups: 2 blocks", str(sharding_report(model, verbose=True)))
            with torch.no_grad():
                self.assertEqual(model(tokens), reference(tokens))
            for module in (reference, model):
                module.zero_grad()
                hidden = torch.ones(8, 3, WIDTH)
                linear_cross_entropy(hidden, module.layers[1].head, tokens[:, 1:]).backward()  # type: ignore[index]
            assert_same_params(model, reference, "grad")

    def test_autocast(self) -> None:
        """As whole logits under autocast, of a layer and of a table, with exchanges and with gathers."""
        mesh, tokens = self.gtp_mesh(), make_tokens()
        own = rows_of_rank(tokens, mesh)
        for head, name in itertools.product(("exchange", "gather"), ("head", "embedding")):
            reference = lm(is_tied=True)
            model = shard_copy(reference, mesh, schedule=explicit(min_shard_numel=0, head=head))
            with torch.autocast("cpu", torch.bfloat16):
                loss = linear_cross_entropy(model.hidden(own[:, :-1]), getattr(model, name), own[:, 1:])
                expected = stock_loss(reference, tokens)
            loss.backward()
            expected.backward()
            assert_same_params(model, reference, "grad", rtol=0.05, atol=2e-3)

    def test_bf16(self) -> None:
        """bf16 products, float32 sums: as near to float32 as bf16 logits allow; the wgrad is never rounded to bf16."""
        mesh = self.gtp_mesh()
        reference = lm(is_tied=True).bfloat16().float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with chunks_of(2):
            model = shard_copy(reference, mesh, mp_policy=policy, schedule=EXCHANGE)
            loss = model(rows_of_rank(make_tokens(), mesh))
            loss.backward()
        self.assertEqual(loss.dtype, torch.float32)
        stock_loss(reference, make_tokens()).backward()
        assert_same_params(model, reference, "grad", rtol=0.05, atol=2e-3)
        self.assertEqual(sum(num_gathers(model).values()), 2)  # of the body, in forward and backward

        # 20 tokens, logits of zero: sums of 0.25 * (1 + 1/128) that bf16 cannot hold, in one chunk and over chunks.
        for size in (1, 100):
            head = nn.Linear(WIDTH, 4, bias=False)
            nn.init.zeros_(head.weight)
            model = shard_copy(nn.Sequential(head), mesh, mp_policy=policy)
            hidden = torch.full((5, WIDTH), 1 + 1 / 128, dtype=torch.bfloat16)
            with chunks_of(size):
                losses = linear_cross_entropy(hidden, model[0], torch.zeros(5, dtype=torch.long), reduction="none")
            losses.backward(torch.ones(5))
            expected = torch.tensor([-0.75, 0.25, 0.25, 0.25]).unsqueeze(1).expand(4, WIDTH) * (20 * (1 + 1 / 128) / 4)
            self.assertEqual(full(model[0].weight.grad), expected, rtol=0, atol=0)

    def test_neither_weight_nor_logits_are_whole(self) -> None:
        mesh = self.gtp_mesh()
        model = shard_copy(lm(vocabulary=1000), mesh)
        hidden = torch.randn(64, WIDTH, requires_grad=True)
        target = torch.arange(64)
        with LargestTensor() as largest, mock.patch.object(cross_entropy, "CHUNK_NBYTES", 4 * 4 * 250 * 2):
            linear_cross_entropy(hidden, model.head, target).backward()
        self.assertLess(largest.numel, 2500)  # chunks of 8 tokens by 250 rows; own rows of the weight: 250 by 8
        self.assertGreaterEqual(largest.numel, 2000)

    def test_frozen_parts_and_later_microbatches(self) -> None:
        mesh = self.gtp_mesh()
        for frozen in ("head", "body.embedding", ""):
            reference = lm()
            for name in filter(None, frozen.split(".")):
                getattr(reference, name).requires_grad_(False)
            model = shard_copy(reference, mesh)
            model.set_requires_gradient_sync(False)
            model(rows_of_rank(make_tokens(0), mesh)).backward()
            model.set_requires_gradient_sync(True)
            model(rows_of_rank(make_tokens(1), mesh)).backward()
            for seed in range(2):
                stock_loss(reference, make_tokens(seed)).backward()
            assert_same_params(model, reference, "grad")
            assert_idle(model)
        loss = model(rows_of_rank(make_tokens(2), mesh))
        with torch.no_grad():
            model.head.weight.mul_(2)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()

    def test_bias_that_nobody_manages(self) -> None:
        """Its gradient is that of this rank's tokens alone, whatever the policy says of the head."""
        mesh = self.gtp_mesh()
        for head in ("exchange", "gather"):
            reference = lm()
            model = copy.deepcopy(reference)
            schedule = explicit(min_shard_numel=0, head=head)
            gtp_shard(model, mesh, schedule=schedule, ignored_params={model.head.bias})
            tokens = rows_of_rank(make_tokens(), mesh)
            call(model, tokens).backward()
            stock_loss(reference, tokens).backward()
            torch.testing.assert_close(model.head.bias.grad, reference.head.bias.grad)

    def test_checkpointed_compiled_and_inside_of_fully_shard(self) -> None:
        """With an embedding that exchanges, too."""

        def recomputed(model: Any) -> None:
            forward = model.forward
            model.forward = lambda tokens: checkpoint(forward, tokens, use_reentrant=False)

        tokens = make_tokens()
        for change in (recomputed, lambda model: model.compile(backend="aot_eager")):
            reference = lm()
            model = shard_copy(reference, self.gtp_mesh(), schedule=EXCHANGE)
            change(model)
            model(rows_of_rank(tokens, self.gtp_mesh())).backward()
            stock_loss(reference, tokens).backward()
            assert_same_params(model, reference, "grad")
            assert_idle(model)

        def shard(model: Any) -> Any:
            gtp_shard(model, dp_gtp()["gtp"], schedule=EXCHANGE)
            for unit in (model.embedding, model.body, model):
                fully_shard(unit, mesh=dp_gtp()["dp"])
            return model

        check_training(lm(), shard, dp_gtp(), batch_of(lm()), call)

    def test_ranks_with_unequal_numbers_of_tokens(self) -> None:
        mesh = self.gtp_mesh()
        reference = lm(reduction="sum")
        model = shard_copy(reference, mesh)
        with environment(DTENSOR_GTP_DEBUG="order"):
            for step, counts in enumerate(((4, 2, 1, 3), (0, 4, 1, 2), (5, 6, 7, 5), (0, 7, 0, 0))):
                tokens = make_tokens(step)
                for rank, count in enumerate(counts):
                    (reference(tokens[:count]) / 4).backward()
                    if rank == self.rank:
                        with chunks_of(4):
                            model(tokens[:count]).backward()
                assert_same_params(model, reference, "grad")
                reference.zero_grad()
                model.zero_grad()
        self.assertEqual(weight_of(model, "head.weight").fused.losses.capacity, 21)
        with torch.no_grad():
            tokens = make_tokens(0, 3 + 2 * self.rank)
            self.assertEqual(model(tokens), reference(tokens))
        runtime_of(model).comm.may_replay_steps = True  # then ranks keep to the first number
        with self.assertRaisesRegex(ValueError, r"loss of parameter 'head.weight' .* got \[9, 24, 9, 9\] tokens"):
            model(make_tokens(0, 8 if self.rank == 1 else 3))
        for wrong in (VOCABULARY, -1):
            tokens = make_tokens()
            if self.rank == 2:
                tokens[0, -1] = wrong
            hidden = model.hidden(tokens[:6, :-1]).detach()
            with self.assertRaisesRegex(IndexError, "out of range"):
                linear_cross_entropy(hidden, model.head, tokens[:6, 1:])

    def test_policies_and_what_is_refused(self) -> None:
        mesh = self.gtp_mesh()
        reference = lm()
        own = rows_of_rank(make_tokens(), mesh)
        # Exchange: 16 * width * tokens of each of 4 ranks and 12 bytes of each; gather: 8 * width * 31 bytes.
        for head, length, num, said in (
            ("gather", 6, 1, "fused op"),
            ("auto", 6, 1, "loss: gathered"),
            ("auto", 2, 0, "loss: exchange of up to 2 tokens"),
        ):
            model = shard_copy(reference, mesh, schedule=explicit(min_shard_numel=0, head=head))
            hidden = reference.hidden(own[:, :-1]).detach().flatten(0, 1)[:length]
            linear_cross_entropy(hidden, model.head, own[:, 1:].flatten()[:length]).backward()
            self.assertEqual(num_gathers(model)["head.weight"], num)
            self.assertIn(said, str(sharding_report(model, verbose=True)))
        columns = {"shard_placement_fn": lambda param: GTPShard(1) if param.ndim == 2 else None}
        for prepare, options in ((lambda m: m, columns), (partial(quantize_, recipe="float8_rowwise"), {})):
            for head in ("exchange", "auto"):
                schedule = explicit(min_shard_numel=0, head=head)
                model = copy.deepcopy(reference)
                prepare(model.head)
                gtp_shard(model, mesh, schedule=schedule, **options)
                if head == "auto":
                    model(own).backward()
                    continue
                with self.assertRaisesRegex(NotImplementedError, "expects whole rows .* 'head.weight' .*head='auto'"):
                    model(own)
        hidden, target = torch.zeros(3, WIDTH), torch.zeros(3, dtype=torch.long)
        wrong: tuple[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str], ...] = (
            ((hidden, nn.Conv1d(1, 1, 1), target), {}, TypeError, "expects an nn.Linear or nn.Embedding"),
            ((hidden, reference.head, target.float()), {}, TypeError, "expects integers as target"),
            ((hidden, reference.head, target[:2]), {}, ValueError, r"expects input of shape \(\*, 8\)"),
            ((hidden, reference.head, target), {"reduction": "max"}, ValueError, "as reduction, but got 'max'"),
            ((hidden, reference.head, target), {"label_smoothing": 2.0}, ValueError, r"in \[0, 1\], but got 2.0"),
            ((full(hidden).double(), shard_copy(reference, mesh).head, target), {}, ValueError, "got torch.float64"),
        )
        for args, options, error, message in wrong:
            with self.assertRaisesRegex(error, message):
                linear_cross_entropy(*args, **options)

    def test_a_bias_in_shards_is_refused(self) -> None:
        """Where logits are not those of the layer's own forward: exchanged, or without a graph."""
        hidden, target = torch.ones(3, WIDTH, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
        told = r"a bias that stays whole, but parameter 'bias' of shape \(31,\) has placements .*Return Replicate\(\)"
        cut, whole = (
            gtp_shard(nn.Linear(WIDTH, VOCABULARY).double(), self.gtp_mesh(), schedule=ALL, shard_placement_fn=place)
            for place in (lambda param: GTPShard(0), None)
        )
        for is_grad_enabled in (True, False):
            with torch.set_grad_enabled(is_grad_enabled):
                with self.assertRaisesRegex(NotImplementedError, told):
                    linear_cross_entropy(hidden, cut, target)
                linear_cross_entropy(hidden, whole, target)

    def test_a_vocabulary_that_tensor_parallelism_has_cut(self) -> None:
        """Whole logits are fine. Of a part of them no loss is computed, and a table looks no hidden states up."""
        world = _mesh((2, 2), ("gtp", "tp"))
        # Rows of the first rank, so that a loss of its part would not fail.
        tokens = make_tokens(vocabulary=32).clamp(max=7)
        own = rows_of_rank(tokens, world["gtp"])
        hidden, target = torch.randn(own.numel(), WIDTH), own.flatten()
        cut, whole = ColwiseParallel(), ColwiseParallel(output_layouts=Replicate())
        for head, plan, message in (
            ("head", cut, r"whole vocabulary of 32 .* got \(16, 16\) .*output_layouts=Replicate"),
            ("head", whole, None),
            ("embedding", RowwiseParallel(), "'embedding.weight' of shape .* tensor parallelism"),
        ):
            reference = lm(vocabulary=32)
            model = parallelize_module(copy.deepcopy(reference), world["tp"], {head: plan})
            gtp_shard(model, world["gtp"], schedule=explicit(min_shard_numel=0, head="auto"))
            for has_grad in (True, False):
                with torch.set_grad_enabled(has_grad):
                    if message is None:
                        expected = linear_cross_entropy(hidden, reference.head, target)
                        self.assertEqual(linear_cross_entropy(hidden, model.head, target), expected)
                        continue
                    with self.assertRaisesRegex(NotImplementedError, message):
                        linear_cross_entropy(hidden, getattr(model, head), target)
