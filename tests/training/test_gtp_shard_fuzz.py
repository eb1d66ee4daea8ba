"""Random models under random compositions train as one process does; what a long run found is kept here by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import fuzz
import pytest
from common import GlooTest
from fuzz import Draw, Layer, Span, problem_of, show
from fuzz_cli import describe
from fuzz_draw import draw_of
from fuzz_run import Meshes, Outcome, rounds, run_round
from fuzz_shrink import kind_of, shrink

# What the default tier draws, what the long tier draws after it, and a soak run after that.
SEEDS = range(12)
LONG_SEEDS = range(12, 80)
SOAK_SEEDS = range(80, 5000)


meshes_of_worker = cache(Meshes)


class TestFuzz(GlooTest):
    def _check(self, draws: Iterable[Draw]) -> None:
        """Run all of them, unless one leaves the ranks in disorder, and report those that failed, on all ranks."""
        failed: list[Outcome] = []
        for some in rounds(draws, self.world_size):
            failed += [outcome for outcome in run_round(some, meshes_of_worker()) if outcome.failures]
            if any(outcome.is_raised for outcome in failed):
                break
        if failed:
            how = "python tests/support/fuzz.py --seed SEED shrinks a draw, see docs/contributing.md"
            self.fail("\n\n".join((how, *map(describe, failed[:5]))))

    def test_draws(self) -> None:
        self._check(map(draw_of, SEEDS))

    @pytest.mark.long
    def test_more_draws(self) -> None:
        self._check(map(draw_of, LONG_SEEDS))

    @pytest.mark.soak
    def test_many_draws(self) -> None:
        self._check(map(draw_of, SOAK_SEEDS))

    # --- what it found, shrunk ----------------------------------------------------------------------------------------

    def test_seed_33_weights_of_a_child_under_checkpointing_in_the_first_step(self) -> None:
        """Which modules read the weights of others was learned in the first forward, so that its recomputation saved
        fewer tensors than it."""
        self._check([Draw(layers=(Layer("list"),), spans=(Span(0, 1, "nonreentrant"),), width=5, steps=1)])

    def test_seed_310188_recurrent_layers_that_fully_shard_registers_again(self) -> None:
        """Their ``__setattr__`` lets torch look for the attribute, which gathered shards that were freed."""
        options = {"axes": (1, 1, 2, 1), "nested_axes": (1, 2), "uses_dp": True, "outer_units": True}
        self._check([Draw(layers=(Layer("gru", bias=False),), order=(0, 0), width=6, steps=2, **options)])

    def test_weights_read_late_under_checkpointing_of_interleaved_microbatches(self) -> None:
        """What was learned by the forward of one microbatch must not change the recomputation of another."""
        draw = Draw(
            layers=(Layer(out=5), Layer("late")), order=(0, 1), spans=(Span(0, 2, "nonreentrant"),), microbatches=3
        )
        self._check([draw, replace(draw, interleaves=True), replace(draw, axes=(1, 1, 2, 1), nested_axes=(1, 2))])

    def test_seed_1066_fully_shard_on_a_linear_layer(self) -> None:
        """Such a layer opens no frame, and nobody completed its gradient before ``fully_shard`` read it."""
        draw = Draw(needs_input_grad=True, uses_dp=True, outer_units=True)
        self._check([draw, replace(draw, axes=(2, 1, 1, 1)), replace(draw, axes=(2, 1, 2, 1), nested_axes=(1, 2))])

    def test_seed_839_gradients_without_rows_inside_of_fully_shard(self) -> None:
        """The ranks without rows raised in the reduction of ``fully_shard``; the others waited for them."""
        one_channel = Draw(
            layers=(Layer("conv2d", placement="dim1"),), axes=(1, 1, 2, 1), uses_dp=True, nested_axes=(1, 2)
        )
        few_rows = Draw(layers=(Layer(out=3),), axes=(1, 1, 4, 1), uses_dp=True, nested_axes=(1, 4), microbatches=2)
        one_row = Draw(layers=(Layer(out=1),), axes=(2, 1, 2, 1), uses_dp=True, nested_axes=(1, 2), clips=True)
        self._check([one_channel, few_rows, one_row])

    def test_seed_61005_selective_checkpointing_beside_a_forward_that_is_looked_at(self) -> None:
        """The recomputation of an earlier microbatch compared what was read with what is there, which torch took for an
        op that the forward had not run."""
        draw = Draw(
            layers=(Layer("conv2d"),), spans=(Span(0, 1, "selective"),), steps=2, microbatches=2, interleaves=True
        )
        self._check([replace(draw, axes=(1, 1, 2, 1), nested_axes=(2, 1))])

    def test_seed_200024_hooks_of_a_layer_that_runs_twice_within_fully_shard(self) -> None:
        """``fully_shard`` took the gradient of each use by itself, so the hook ran twice, first with a part of it."""
        draw = Draw(layers=(Layer(),), order=(0, 0), width=6, uses_dp=True, outer_units=True, hooks=True)
        self._check([draw, replace(draw, axes=(2, 1, 1, 1)), replace(draw, axes=(2, 1, 2, 1), nested_axes=(1, 2))])
        # The use in the checkpoint belongs to a backward within the other one.
        span = Span(1, 2, "reentrant")
        twice = Draw(layers=(Layer(), Layer()), order=(0, 1, 1), spans=(span,), width=6, uses_dp=True)
        self._check([twice, replace(twice, axes=(2, 1, 1, 1))])


# --- the fuzzer itself ------------------------------------------------------------------------------------------------


def test_a_draw_prints_as_what_makes_it() -> None:
    for seed in range(200):
        draw = draw_of(seed)
        assert eval(show(draw), dict(vars(fuzz))) == draw
        assert draw == draw_of(seed)
        assert not problem_of(draw)


def test_a_failing_draw_is_shrunk_to_what_makes_it_fail() -> None:
    def fails(draw: Draw) -> bool:
        return any(layer.residual for layer in draw.layers) and draw.prefetch_depth > 2

    seed = next(seed for seed in range(1000) if fails(draw_of(seed)) and len(draw_of(seed).layers) > 2)
    draw = shrink(draw_of(seed), fails)
    assert draw.prefetch_depth == draw_of(seed).prefetch_depth
    assert draw == Draw(
        seed=seed,
        layers=(Layer(draw.layers[0].kind, residual=True),),
        width=draw.width,
        prefetch_depth=draw.prefetch_depth,
        steps=1,
    )


def test_what_stays_the_same_while_a_draw_shrinks() -> None:
    raised = "Traceback (most recent call last):\n  File ...\nValueError: gtp_shard expects\n"
    waited = "Traceback (most recent call last):\n  File ...\nRuntimeError: Timed out waiting 20000ms\n"
    assert kind_of(Outcome(Draw(), {}, False)) == ""
    assert kind_of(Outcome(Draw(), {1: "grad of w: off by 1 of 1"}, False)) == "difference"
    assert kind_of(Outcome(Draw(), {0: waited, 1: raised}, True)) == "ValueError: gtp_shard expects"
