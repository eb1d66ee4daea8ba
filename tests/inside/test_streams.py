"""Who waits for whom where a model computes on several streams: clocks stand for streams and events."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm.debug import DebugFlags
from dtensor_gtp._comm.streams import Done, Streams
from dtensor_gtp._params.gathered import Gathered
from dtensor_gtp._schedule.gathering import Gathering

Moment = tuple["Clock", int]


class Event:
    def __init__(self, *args: object) -> None:
        self.seen: dict[Clock, int] = {}


class Clock:
    """A stream that counts what it was given, and knows what of others comes before that."""

    current: Clock

    def __init__(self) -> None:
        self.seen: dict[Clock, int] = {self: 0}

    def run(self) -> Moment:
        self.seen[self] += 1
        return self, self.seen[self]

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.seen = dict(self.seen)
        return event

    def wait_event(self, event: Event) -> None:
        for other, count in event.seen.items():
            self.seen[other] = max(self.seen.get(other, 0), count)

    def is_behind(self, moment: Moment) -> bool:
        return self.seen.get(moment[0], 0) >= moment[1]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda index: Clock.current)
    monkeypatch.setattr(compat, "stream_handle", lambda index: id(Clock.current))
    monkeypatch.setattr(compat, "is_stream_capturing", lambda: False)
    made = Streams(torch.device("cuda", 0), DebugFlags())
    made.begin_pass(is_everywhere=True)
    return made


def on(clock: Clock, streams: Streams) -> Clock:
    """The clock becomes the current stream, and a compute stream of the pass."""
    Clock.current = clock
    streams.note_compute()
    return clock


def test_a_stream_that_joins_a_pass_waits_for_the_one_before(streams: Streams) -> None:
    first = on(Clock(), streams)
    before = first.run()
    assert on(Clock(), streams).is_behind(before)


def test_a_stream_that_comes_back_waits_where_it_reads_what_others_made(streams: Streams) -> None:
    """Sums of microbatches and gradients of a group may be those of any compute stream."""
    main, side = on(Clock(), streams), on(Clock(), streams)
    late = side.run()
    on(main, streams)
    assert not main.is_behind(late), "branches run beside each other"
    tensor = mock.Mock()
    streams.note_reading_earlier([tensor])
    assert main.is_behind(late)
    tensor.record_stream.assert_called_once_with(main)


@pytest.mark.parametrize("is_unpacked", [False, True])
def test_a_copy_of_a_weight_that_a_stream_has_made_is_waited_for(streams: Streams, is_unpacked: bool) -> None:
    """Dequantized or made contiguous on the stream of the first use; another one reads it, too."""
    main, gathers = on(Clock(), streams), Clock()
    moments: list[Moment] = []

    def copy() -> torch.Tensor:
        moments.append(Clock.current.run())
        return torch.ones(2, 3)

    weight = torch.ones(2, 3)
    done: Any = Done(gathers.record_event(), None, main)  # type: ignore[arg-type]
    gathered = Gathered(weight, weight, done, weight, (0, 0, 0, 0))
    gathering = Gathering.__new__(Gathering)
    gathering._comm = mock.Mock(streams=streams)
    streams.note_reading = noted = mock.Mock()  # type: ignore[method-assign]
    side = on(Clock(), streams)
    gathering._wait_for(gathered)
    if is_unpacked:
        gathered.unpack = copy
    else:
        gathered.value = torch.ones(3, 2).t()
        moments.append(side.run())
    assert gathered.contiguous().is_contiguous()
    on(main, streams)
    assert not main.is_behind(moments[0])
    gathering.share(gathered)
    assert main.is_behind(moments[0])
    assert any(tensor is gathered.contiguous() for tensor in noted.call_args.args[1])
