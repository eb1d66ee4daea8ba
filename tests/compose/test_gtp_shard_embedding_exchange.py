"""Embeddings by exchange of activations: the bits of a gathered lookup, the gradients of one process.

The table is never gathered in training: ranks look up their own rows for the tokens of all ranks.
"""

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, check_training, environment, full, rows_of_rank
from runtime_common import (
    VOCABULARY,
    WIDTH,
    Net,
    assert_idle,
    check_step,
    make_tokens,
    num_gathers,
    runtime_of,
    shard_copy,
    square_loss,
    square_step,
    token_loss,
    weight_of,
)
from schedules import explicit
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard, sharding_report
from dtensor_gtp._comm.context import CommContext
from dtensor_gtp._schedule import choose_schedule
from dtensor_gtp.graphs.capture_blocks import CapturedBlocks

EXCHANGE = explicit(min_shard_numel=0, embedding="exchange")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Lookup(nn.Module):
    """Two embeddings, one used twice, and a linear layer; ``rows`` of vocabulary, one of them padding."""

    def __init__(self, rows: int = VOCABULARY, width: int = WIDTH, padding_idx: int | None = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, padding_idx=padding_idx)
        self.other = nn.Embedding(5, width)
        self.linear = nn.Linear(width, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens) + self.table(tokens.flip(-1)).sin() * self.other(tokens % 5)
        return self.linear(x)


def lookup(**options: Any) -> Lookup:
    torch.manual_seed(0)
    return Lookup(**options)


def recomputed(model: nn.Module) -> nn.Module:
    forward = model.forward

    def checkpointed(tokens: torch.Tensor) -> torch.Tensor:
        anchor = torch.ones((), requires_grad=True)  # without an input that has a gradient nothing is recomputed
        return checkpoint(lambda one: forward(tokens) * one, anchor, use_reentrant=True)

    model.forward = checkpointed  # type: ignore[method-assign]
    return model


def batch_of(rows: int = VOCABULARY, samples: int = 8, length: int = 3) -> Any:
    return lambda generator: torch.randint(0, rows, (samples, length), generator=generator)


def num_table_gathers(model: nn.Module) -> int:
    return sum(number for name, number in num_gathers(model).items() if "table" in name or "embedding" in name)


def check_two(reference: nn.Module, model: nn.Module, mesh: DeviceMesh) -> None:
    """A step of two microbatches, whose flags the caller has set up."""

    def step(model: nn.Module, batches: Any) -> None:
        for tokens in batches:
            square_step(model, tokens)

    check_step(reference, model, mesh, [make_tokens(0), make_tokens(1)], step)  # type: ignore[arg-type]


class TestEmbeddingExchange(GlooTest):
    def test_gradients_that_wait_go_ahead_of_the_table(self) -> None:
        """The table's is the last of a backward: what waits for others to travel with is hidden behind making it."""
        model = gtp_shard(lookup(), self.gtp_mesh(), schedule=EXCHANGE)
        launched: list[str] = []

        def note(comm: CommContext, name: str, detail: str, groups: Any) -> None:
            launched.append(f"{name} of {detail}")

        for step in range(2):
            loss = square_loss(model, make_tokens(step))
            launched.clear()
            is_told = mock.patch.object(runtime_of(model).comm, "is_debugged", True)
            with is_told, mock.patch.object(CommContext, "before_collective", note):
                loss.backward()
        self.assertEqual(launched[0], "reduce_scatter of linear.weight", launched)
        self.assertTrue(any("table" in name for name in launched[1:]), launched)

    def test_trains_as_one_process(self) -> None:
        """Uneven rows and empty shards, tied heads, HSDP, microbatches, in fp32 and fp64."""
        torch.manual_seed(0)
        gtp, hsdp = self.gtp_mesh(), self.hsdp_mesh()
        cases: list[tuple[DeviceMesh, nn.Module, Any, int]] = [
            *((mesh, Lookup(), square_loss, 2) for mesh in (gtp, hsdp)),
            (gtp, Lookup(rows=5, width=7, padding_idx=None).double(), square_loss, 1),
            *((mesh, Net(1), token_loss, 1) for mesh in (gtp, hsdp)),
        ]
        for mesh, model, loss, num in cases:
            make_batch = batch_of(next(model.children()).num_embeddings)
            shard = partial(gtp_shard, mesh=mesh, schedule=EXCHANGE)
            sharded = check_training(model, shard, mesh, make_batch, loss, num_microbatches=num)
            assert_idle(sharded)
            if isinstance(model, Lookup):
                self.assertEqual(num_table_gathers(sharded), 0)
            self.assertIn("lookup: exchange of up to", str(sharding_report(sharded, verbose=True)))

    def test_forward_has_the_bits_of_a_gathered_lookup(self) -> None:
        """Also minus zero, infinities and NaN, in any width and dtype; the gradient is at least as exact."""
        mesh = self.gtp_mesh()
        bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
        for width in (3, 4):
            for policy in (MixedPrecisionPolicy(), BF16):
                torch.manual_seed(0)
                table = nn.Embedding(VOCABULARY, width)
                with torch.no_grad():
                    table.weight[:8:2] = torch.tensor([-0.0, float("inf"), float("nan"), 1e-40]).repeat(width, 1).t()
                outputs = []
                for schedule in (ALL, EXCHANGE):
                    model = shard_copy(nn.Sequential(table), mesh, schedule=schedule, mp_policy=policy)
                    outputs.append(model(rows_of_rank(make_tokens(0, 16), mesh) % 9))
                gathered, exchanged = outputs
                self.assertEqual(gathered.shape, exchanged.shape)
                self.assertTrue(torch.equal(*(out.view(bits[out.dtype]) for out in (gathered, exchanged))))

    def test_bf16_compute_sums_in_fp32(self) -> None:
        """The addends are bf16 activations' gradients; their sum is never rounded to bf16."""
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Embedding(9, 4))
        model = shard_copy(reference, mesh, schedule=EXCHANGE, mp_policy=BF16)
        tokens = torch.zeros(64, dtype=torch.long)
        model(tokens[:16]).backward(torch.full((16, 4), 1.0 + self.rank / 128, dtype=torch.bfloat16))
        expected = 16 * sum(1 + rank / 128 for rank in range(4)) / 4
        self.assertEqual(full(model[0].weight.grad)[0], torch.full((4,), expected), rtol=0, atol=0)

    def test_flags_of_accumulation_and_frozen_tables(self) -> None:
        """No sync, or no all-reduce, until the last microbatch; another divide factor; a retained graph."""
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            reference = lookup()
            model = shard_copy(reference, mesh, schedule=EXCHANGE)
            for setter in ("set_requires_gradient_sync", "set_requires_all_reduce"):
                getattr(model, setter)(False)
                square_step(reference, make_tokens(7))
                square_step(model, rows_of_rank(make_tokens(7), mesh))
                self.assertIsNone(model.table.weight.grad)
                getattr(model, setter)(True)
                check_two(reference, model, mesh)
            model.set_gradient_divide_factor(2.0)
            square_loss(reference, make_tokens(0)).mul(4 / 2).backward()
            loss = square_loss(model, rows_of_rank(make_tokens(0), mesh)) / 2
            loss.backward(retain_graph=True)
            loss.backward()
            assert_same_params(model, reference, "grad")
            model.zero_grad()
            model.table.requires_grad_(False)
            square_step(model, rows_of_rank(make_tokens(0), mesh))
            self.assertIsNone(model.table.weight.grad)
            self.assertEqual(num_table_gathers(model), 0)

    def test_checkpointing_and_compiled_modules(self) -> None:
        mesh = self.gtp_mesh()
        check_two(lookup(), recomputed(shard_copy(lookup(), mesh, schedule=EXCHANGE)), mesh)
        reference = lookup()
        model = shard_copy(reference, mesh, schedule=EXCHANGE)
        model.compile(backend="aot_eager", fullgraph=True)
        check_two(reference, model, mesh)
        self.assertEqual(num_table_gathers(model), 0)
        with torch.no_grad():
            self.assertEqual(model(make_tokens(0)), reference(make_tokens(0)))

    def test_ranks_with_unequal_numbers_of_tokens(self) -> None:
        """Any lengths, down to none, on any rank: fewer and more tokens than before."""
        mesh = self.gtp_mesh()
        reference = lookup()
        model = shard_copy(reference, mesh, schedule=EXCHANGE)
        counts = [(4, 2, 4, 3), (0, 4, 1, 2), (4, 4, 4, 4), (5, 0, 7, 5), (1, 8, 0, 3)]
        with environment(DTENSOR_GTP_DEBUG="order"):
            for step, numbers in enumerate(counts):
                tokens = make_tokens(step, 8)
                for rank, number in enumerate(numbers):
                    (reference(tokens[:number]).square().sum() / 4).backward()
                    if rank == self.rank:
                        model(tokens[:number]).square().sum().backward()
                assert_same_params(model, reference, "grad")
                reference.zero_grad()
                model.zero_grad()
                self.assertEqual(weight_of(model, "table.weight").fused.lookups.capacity, max(numbers) * 5)

    def test_too_many_tokens_raise_on_all_ranks(self) -> None:
        mesh = self.gtp_mesh()
        declared = explicit(min_shard_numel=0, embedding="exchange", exchange_tokens=20)
        for schedule, rows, message in (
            # As if steps were captured: then ranks keep to the first number.
            (EXCHANGE, 4 + (self.rank == 2), r"most of the first use.* got \[20, 20, 25, 20\] tokens"),
            (declared, 5, r"as SchedulePolicy\(exchange_tokens=\.\.\.\) says.* got \[25, 25, 25, 25\] tokens"),
        ):
            model = shard_copy(lookup(), mesh, schedule=schedule)
            runtime_of(model).comm.may_replay_steps = schedule is EXCHANGE
            for _ in range(2):
                square_loss(model, make_tokens(0, 4)).backward()
                with self.assertRaisesRegex(ValueError, message):
                    model(make_tokens(0, rows))
            self.assertEqual(weight_of(model, "table.weight").fused.lookups.capacity, 20)
        tokens = make_tokens(0, 4)
        tokens[0, 0] = VOCABULARY if self.rank == 1 else 0
        with self.assertRaisesRegex(IndexError, "out of range"):
            model(tokens)
        square_loss(model, make_tokens(0, 4)).backward()

    def test_without_gradients_the_table_is_gathered(self) -> None:
        """Then ranks may have any number of tokens, in evaluation and generation."""
        mesh = self.gtp_mesh()
        reference = lookup()
        model = shard_copy(reference, mesh, schedule=EXCHANGE)
        square_loss(model, make_tokens(0, 2)).backward()
        with torch.no_grad():
            tokens = make_tokens(1, 3 + self.rank)
            self.assertEqual(model(tokens), reference(tokens))
        self.assertEqual(num_table_gathers(model), 2)
        model.unshard()
        square_loss(model, make_tokens(0, 3 + self.rank)).backward()
        model.reshard()

    def test_auto_takes_what_moves_fewer_bytes(self) -> None:
        """A table of 31 rows: 2 tokens of each of 4 ranks are fewer, 8 are not. Where the hosts would have to tell each
        other how many there are, only a large table exchanges."""
        mesh = self.gtp_mesh()
        for tokens, exchange_tokens, said in (
            (2, 2, "lookup: exchange of up to 2 tokens per rank"),
            (8, 8, "lookup: gathered"),
            (2, 20, "lookup: gathered"),
            (2, None, ""),
            (2, None, "lookup: exchange of up to 2 tokens per rank"),  # the table counts as large
        ):
            is_large = exchange_tokens is None and bool(said)
            self.enterContext(mock.patch.object(choose_schedule, "_LARGE_TABLE", 0 if is_large else 1 << 30))
            schedule = explicit(min_shard_numel=0, embedding="auto", exchange_tokens=exchange_tokens)
            torch.manual_seed(0)
            reference = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Tanh())
            model = shard_copy(reference, mesh, schedule=schedule)
            batch = make_tokens(0).flatten()[: 4 * tokens]
            check_step(reference, model, mesh, batch, square_step)
            self.assertEqual(num_gathers(model)["0.weight"], 0 if "exchange" in said else 1)
            report = str(sharding_report(model, verbose=True))
            self.assertIn(said, report)
            self.assertEqual("lookup" in report, bool(said))

    def test_auto_exchanges_again_after_recorded_blocks_are_removed(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Tanh())
        schedule = explicit(min_shard_numel=0, embedding="auto", exchange_tokens=2)
        model = shard_copy(reference, mesh, schedule=schedule)
        captured = CapturedBlocks(model, [model[0]], mock.Mock(), 2, 4)
        batch = make_tokens(0).flatten()[:8]
        check_step(reference, model, mesh, batch, square_step)
        self.assertEqual(num_gathers(model)["0.weight"], 1)
        captured.remove()
        for _ in range(3):
            check_step(reference, model, mesh, batch, square_step)
        self.assertEqual(num_gathers(model)["0.weight"], 2)  # once more ahead, as the last forward needed it
