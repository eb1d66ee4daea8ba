"""Casts that copy engines keep: when they are good, and when they are made ahead. With a thread for each rank."""

from __future__ import annotations

import random
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from test_copy_engine import CPU, NUM_RANKS, Engine, Group, Ranks, value

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm import copy_engine
from dtensor_gtp._comm.copy_engine import Content


@pytest.mark.parametrize(("seed", "expected_nbytes"), [(0, 0), (1, 1 << 16)])
def test_kept_casts(seed: int, expected_nbytes: int) -> None:
    """Random groups of shards, among them one of unknown state. Whose shard has changed since it was sent is drawn by
    each rank for itself; the dtype in which shards are sent changes once."""
    shapes = [(3, 5), (200,), (1, 7, 2), (0, 4), (64,), (2, 2)]
    num_casts = [0] * NUM_RANKS
    num_sent = [0] * NUM_RANKS

    def job(group: Group) -> None:
        engine = Engine(group, CPU)
        engine.keep_casts(expected_nbytes)
        cast = engine._cast

        def counting(pairs: Any) -> None:
            num_casts[group.rank()] += len(pairs)
            cast(pairs)

        engine._cast = counting  # type: ignore[method-assign]
        alike = random.Random(seed)
        own = [random.Random(1000 * seed + rank) for rank in range(NUM_RANKS)]
        versions = [[0] * len(shapes) for _ in range(NUM_RANKS)]
        for turn in range(30):
            dtype = torch.float64 if turn < 20 else torch.float32
            chosen = alike.sample(range(len(shapes)), alike.randint(1, 4))
            for rank in range(NUM_RANKS):
                for index in chosen:
                    versions[rank][index] += own[rank].random() < 0.3
            shards = [value(group.rank(), shapes[i], torch.bfloat16, versions[group.rank()][i]) for i in chosen]
            states = [None if index == 5 else versions[group.rank()][index] for index in chosen]
            contents = [Content(index, state) for index, state in zip(chosen, states, strict=True)]
            outputs = [torch.full((NUM_RANKS * s.shape[0], *s.shape[1:]), 111, dtype=dtype) for s in shards]
            engine.all_gather(outputs, shards, None, contents)
            num_sent[group.rank()] += len(chosen)
            for output, index in zip(outputs, chosen, strict=True):
                parts = [value(rank, shapes[index], dtype, versions[rank][index]) for rank in range(NUM_RANKS)]
                assert torch.equal(output, torch.cat(parts)), f"rank {group.rank()}, turn {turn}, {shapes[index]}"
        assert engine._stage is not None
        assert engine._stage.nbytes == expected_nbytes or not expected_nbytes

    ranks = Ranks()
    ranks.run(job)
    for rank in range(NUM_RANKS):
        assert 0.3 * num_sent[rank] < num_casts[rank] < 0.8 * num_sent[rank]
    assert len(set(ranks.num_stages)) == 1
    assert ranks.num_stages[0] == 2 if expected_nbytes else ranks.num_stages[0] > 4


def test_when_kept_casts_are_good_and_when_they_are_made_ahead() -> None:
    graph = threading.local()  # which one this rank records

    def job(group: Group) -> None:
        engine = Engine(group, CPU)
        engine.keep_casts(1 << 10)
        engine.cast_stream = mock.MagicMock()
        graph.id = None
        engine._is_capturing = lambda: graph.id is not None  # type: ignore[method-assign]
        casts: list[str] = []
        cast = engine._cast

        def noting(pairs: Any) -> None:
            is_ahead = engine.cast_stream.__enter__.call_count > engine.cast_stream.__exit__.call_count
            casts.append("ahead" if is_ahead else "in its place")
            cast(pairs)

        engine._cast = noting  # type: ignore[method-assign]

        def gather(owner: str, state: int = 0) -> str:
            """When it was cast, if it was."""
            casts.clear()
            output, shard = torch.empty(NUM_RANKS * 8), torch.full((8,), float(group.rank()) + state)
            engine.all_gather([output], [shard], mock.Mock(), [Content(owner, state)])
            assert torch.equal(output, torch.arange(4.0).repeat_interleave(8) + state)
            assert len(casts) < 2
            return casts[0] if casts else "before"

        assert [gather("a"), gather("b"), gather("c")] == ["in its place", "ahead", "ahead"]
        engine.begin_pass()
        assert [gather("c"), gather("b"), gather("a")] == ["before"] * 3
        assert gather("a", 1) == "in its place", "peers may still read what the gather before has sent"
        assert [gather("b"), gather("a", 1), gather("b", 1)] == ["before", "before", "ahead"]
        engine.begin_recording()
        graph.id = 6
        engine.begin_pass()
        assert [gather("a", 1), gather("b", 1)] == ["in its place", "ahead"]
        graph.id = None
        engine.forget_recording()
        engine.begin_pass()
        again = [gather("a", 1), gather("b", 1), gather("c")]
        assert again == ["in its place", "ahead", "before"], "a recording that failed has cast nothing"
        graph.id = 7
        engine.begin_pass()
        assert gather("a", 1) == "in its place", "eager code may have another shard when the graph is replayed"
        engine.begin_pass()
        assert [gather("b", 1), gather("a", 1)] == ["in its place", "before"], "backward, in the same graph"
        graph.id = 8
        engine.begin_pass()
        assert gather("a", 1) == "in its place", "the other graph may not have been replayed before"
        graph.id = None
        engine.begin_pass()
        assert [gather("a", 1) for _ in range(2)] == ["in its place"] * 2, "a replay may come in between"

    with (
        mock.patch.object(copy_engine.torch.accelerator, "current_stream"),
        mock.patch.object(copy_engine.torch.cuda, "current_stream"),
        mock.patch.object(compat, "capture_id", side_effect=lambda stream: graph.id),
    ):
        Ranks().run(job)
