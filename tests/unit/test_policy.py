"""Policies and debug switches: what they accept, what they refuse and how they say it."""

from __future__ import annotations

import dataclasses

import pytest

from dtensor_gtp import SchedulePolicy
from dtensor_gtp._comm.debug import DebugFlags


def test_schedule_policy_defaults() -> None:
    assert SchedulePolicy() == SchedulePolicy(
        prefetch_depth=2,
        max_inflight_reduce_scatters=2,
        min_shard_numel=1024,
        prefetch_nbytes=256 * 1024**2,
        coalesce_nbytes=256 * 1024**2,
        coalesce_grad_nbytes=128 * 1024**2,
        expert_blocks_ahead=1,
        keep_nbytes=0,
        reduce_scatter="ring",
    )


def test_schedule_policy_accepts_its_bounds() -> None:
    policy = SchedulePolicy(prefetch_depth=0, max_inflight_reduce_scatters=1, min_shard_numel=0)
    assert dataclasses.astuple(policy)[:3] == (0, 1, 0)


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("prefetch_depth", -1, 0),
        ("max_inflight_reduce_scatters", 0, 1),
        ("min_shard_numel", -5, 0),
        ("prefetch_nbytes", -1, 0),
        ("coalesce_nbytes", -1, 0),
        ("coalesce_grad_nbytes", -1, 0),
        ("expert_blocks_ahead", -1, 0),
        ("keep_nbytes", -1, 0),
    ],
)
def test_schedule_policy_refuses_values_out_of_range(name: str, value: int, least: int) -> None:
    with pytest.raises(ValueError, match=f"SchedulePolicy expects {name} >= {least}, but got {value}"):
        SchedulePolicy(**{name: value})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SchedulePolicy) if field.type == "int"])
@pytest.mark.parametrize("value", [1.0, True, "2", None])
def test_schedule_policy_refuses_what_is_not_an_int(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"SchedulePolicy expects an int for {name}, but got {value!r}"):
        SchedulePolicy(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["rign", None, 1])
def test_schedule_policy_refuses_unknown_kinds_of_reduce_scatter(value: object) -> None:
    expected = f"SchedulePolicy expects 'ring' or 'all_to_all' or 'copy_engine' as reduce_scatter, but got {value!r}"
    with pytest.raises(ValueError, match=expected):
        SchedulePolicy(reduce_scatter=value)  # type: ignore[arg-type]


def test_schedule_policy_refuses_unknown_ways_to_look_up_embeddings() -> None:
    with pytest.raises(ValueError, match="expects 'gather' or 'exchange' or 'auto' as embedding, but got 'table'"):
        SchedulePolicy(embedding="table")  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_schedule_policy_refuses_numbers_of_tokens_that_are_none(tokens: object, error: type[Exception]) -> None:
    assert SchedulePolicy(exchange_tokens=1).exchange_tokens == 1
    with pytest.raises(error, match=f"SchedulePolicy expects .*exchange_tokens.*got {tokens!r}"):
        SchedulePolicy(exchange_tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["nccl", "zero_cta", None, object()])
def test_schedule_policy_refuses_unknown_gather_backends(value: object) -> None:
    expected = "SchedulePolicy expects 'process_group' or 'copy_engine' or 'auto' as gather_backend, but got "
    with pytest.raises(ValueError, match=expected):
        SchedulePolicy(gather_backend=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["wgrad_first", "keep_last"])
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_schedule_policy_refuses_a_flag_that_is_not_a_bool(name: str, value: object) -> None:
    assert getattr(SchedulePolicy(**{name: False}), name) is False
    with pytest.raises(TypeError, match=f"SchedulePolicy expects a bool for {name}, but got {value!r}"):
        SchedulePolicy(**{name: value})  # type: ignore[arg-type]


def test_schedule_policy_is_checked_by_replace_too() -> None:
    with pytest.raises(ValueError, match="prefetch_depth >= 0, but got -3"):
        dataclasses.replace(SchedulePolicy(), prefetch_depth=-3)


def test_schedule_policy_is_frozen_and_hashable() -> None:
    policy = SchedulePolicy()
    with pytest.raises(dataclasses.FrozenInstanceError, match="prefetch_depth"):
        policy.prefetch_depth = 3  # type: ignore[misc]
    assert len({policy, SchedulePolicy(), SchedulePolicy(prefetch_depth=3)}) == 2


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", DebugFlags()),
        (" , ", DebugFlags()),
        ("poison", DebugFlags(poison=True)),
        ("delay", DebugFlags(delay_seed=0)),
        ("delay=17", DebugFlags(delay_seed=17)),
        ("order", DebugFlags(order=True)),
        ("poison,delay=7", DebugFlags(poison=True, delay_seed=7)),
        (" delay=7 , poison ", DebugFlags(poison=True, delay_seed=7)),
    ],
)
def test_debug_flags_parse(monkeypatch: pytest.MonkeyPatch, text: str, flags: DebugFlags) -> None:
    monkeypatch.setenv("DTENSOR_GTP_DEBUG", text)
    assert DebugFlags.from_env() == flags


def test_debug_flags_are_off_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DTENSOR_GTP_DEBUG", raising=False)
    assert DebugFlags.from_env() == DebugFlags(poison=False, delay_seed=None)


@pytest.mark.parametrize(
    "word", ["posion", "poison=1", "order=1", "delay=x", "delay=-1", "delay=1.5", "delay=\u00b2", "1"]
)
def test_debug_flags_refuse_unknown_words(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("DTENSOR_GTP_DEBUG", f"poison,{word}")
    with pytest.raises(
        ValueError, match=f"expects 'poison', 'delay', 'delay=SEED', 'order' or 'splits', but got '{word}'"
    ):
        DebugFlags.from_env()
