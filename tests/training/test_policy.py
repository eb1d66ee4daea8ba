"""Policies and debug switches: what they accept, what they refuse and how they say it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from dtensor_gtp import SchedulePolicy
from dtensor_gtp._comm.debug import DebugFlags
from dtensor_gtp.policy import Schedule


def test_schedule_policy() -> None:
    names = [field.name for field in dataclasses.fields(SchedulePolicy) if not field.name.startswith("_")]
    assert len(names) <= 10
    policy = SchedulePolicy()
    assert policy == SchedulePolicy(memory="balanced", gather_backend="auto", min_shard_numel=1024)
    assert len({policy, SchedulePolicy(), SchedulePolicy(prefetch_nbytes=3)}) == 2
    lowest = {"prefetch_nbytes": 0, "keep_nbytes": 0, "exchange_tokens": 1, "min_shard_numel": 0}
    assert vars(SchedulePolicy(**lowest)).items() >= lowest.items()
    with pytest.raises(dataclasses.FrozenInstanceError, match="prefetch_nbytes"):
        policy.prefetch_nbytes = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="prefetch_nbytes >= 0, but got -3"):
        dataclasses.replace(policy, prefetch_nbytes=-3)


def refuses(error: type[Exception], message: str, **options: Any) -> None:
    with pytest.raises(error, match=message):
        SchedulePolicy(**options)


def test_schedule_policy_refuses() -> None:
    for name in ("prefetch_nbytes", "keep_nbytes", "min_shard_numel"):
        refuses(ValueError, f"SchedulePolicy expects {name} >= 0, but got -1", **{name: -1})
        for value in (1.0, True, "2"):
            refuses(TypeError, f"SchedulePolicy expects an int.* for {name}, but got {value!r}", **{name: value})
    for tokens, error in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        refuses(error, f"SchedulePolicy expects .*exchange_tokens.*got {tokens!r}", exchange_tokens=tokens)
    choices: dict[str, tuple[str, tuple[object, ...]]] = {
        "memory": ("'balanced' or 'least' or 'most_speed'", ("little",)),
        "embedding": ("'gather' or 'exchange' or 'auto'", ("table",)),
        "reduce_scatter": ("'ring' or 'all_to_all' or 'copy_engine' or 'auto'", ("rign", None, 1)),
        "gather_backend": ("'process_group' or 'copy_engine' or 'auto'", ("nccl", "zero_cta", None, object())),
    }
    for name, (known, values) in choices.items():
        for value in values:
            refuses(ValueError, f"{known} as {name}, but got {value!r}", **{name: value})
    # fields of earlier versions
    refuses(TypeError, "no field prefetch_depth any more: .*pass prefetch_nbytes", prefetch_depth=1)
    refuses(TypeError, "no field expert_blocks_ahead any more: .*the library chooses", expert_blocks_ahead=1)
    for name in ("coalesce_nbytes", "coalesce_grad_nbytes", "max_inflight_reduce_scatters", "wgrad_first", "keep_last"):
        refuses(TypeError, f"no field {name} any more: .*memory='least'", **{name: 1})
    for name, value in (("prefetch_depth", -1), ("max_inflight_reduce_scatters", 0)):
        with pytest.raises(ValueError, match=f"Schedule expects {name} >= {value + 1}, but got {value}"):
            Schedule(**{name: value})


def test_debug_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DTENSOR_GTP_DEBUG", raising=False)
    assert DebugFlags.from_env() == DebugFlags(poison=False, delay_seed=None)
    for text, flags in {
        "": DebugFlags(),
        " , ": DebugFlags(),
        "poison": DebugFlags(poison=True),
        "delay": DebugFlags(delay_seed=0),
        "delay=17": DebugFlags(delay_seed=17),
        "order": DebugFlags(order=True),
        "finite": DebugFlags(finite=True),
        " delay=7 , poison ": DebugFlags(poison=True, delay_seed=7),
    }.items():
        monkeypatch.setenv("DTENSOR_GTP_DEBUG", text)
        assert DebugFlags.from_env() == flags, text
    for word in ("posion", "poison=1", "order=1", "delay=x", "delay=-1", "delay=1.5", "delay=\u00b2", "1"):
        monkeypatch.setenv("DTENSOR_GTP_DEBUG", f"poison,{word}")
        expected = "'poison', 'delay', 'delay=SEED', 'order', 'finite' or 'splits', but got "
        with pytest.raises(ValueError, match=re.escape(f"expects {expected}'{word}'")):
            DebugFlags.from_env()
