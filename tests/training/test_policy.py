"""Policies and debug switches: what they accept, what they refuse and how they say it."""

from __future__ import annotations

import dataclasses

import pytest

from dtensor_gtp import SchedulePolicy
from dtensor_gtp._comm.debug import DebugFlags
from dtensor_gtp.policy import Schedule


def test_schedule_policy_has_few_words() -> None:
    names = [field.name for field in dataclasses.fields(SchedulePolicy) if not field.name.startswith("_")]
    assert len(names) <= 10
    assert SchedulePolicy() == SchedulePolicy(memory="balanced", gather_backend="auto", min_shard_numel=1024)


def test_schedule_policy_accepts_its_bounds() -> None:
    policy = SchedulePolicy(prefetch_nbytes=0, keep_nbytes=0, exchange_tokens=1, min_shard_numel=0)
    assert (policy.prefetch_nbytes, policy.keep_nbytes, policy.exchange_tokens, policy.min_shard_numel) == (0, 0, 1, 0)


@pytest.mark.parametrize("name", ["prefetch_nbytes", "keep_nbytes", "min_shard_numel"])
def test_schedule_policy_refuses_values_out_of_range(name: str) -> None:
    with pytest.raises(ValueError, match=f"SchedulePolicy expects {name} >= 0, but got -1"):
        SchedulePolicy(**{name: -1})


@pytest.mark.parametrize("name", ["prefetch_nbytes", "keep_nbytes", "min_shard_numel"])
@pytest.mark.parametrize("value", [1.0, True, "2"])
def test_schedule_policy_refuses_what_is_not_an_int(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"SchedulePolicy expects an int.* for {name}, but got {value!r}"):
        SchedulePolicy(**{name: value})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("prefetch_depth", "pass prefetch_nbytes"),
        ("coalesce_nbytes", "memory='least'"),
        ("coalesce_grad_nbytes", "memory='least'"),
        ("max_inflight_reduce_scatters", "memory='least'"),
        ("expert_blocks_ahead", "the library chooses"),
        ("wgrad_first", "memory='least'"),
        ("keep_last", "memory='least'"),
    ],
)
def test_fields_of_earlier_versions_name_the_new_word(name: str, remedy: str) -> None:
    with pytest.raises(TypeError, match=f"no field {name} any more: .*{remedy}"):
        SchedulePolicy(**{name: 1})


def test_schedule_policy_refuses_unknown_words_for_memory() -> None:
    with pytest.raises(ValueError, match="'balanced' or 'least' or 'most_speed' as memory, but got 'little'"):
        SchedulePolicy(memory="little")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("prefetch_depth", -1), ("max_inflight_reduce_scatters", 0)])
def test_numbers_of_a_schedule_are_in_range(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"Schedule expects {name} >= {value + 1}, but got {value}"):
        Schedule(**{name: value})


@pytest.mark.parametrize("value", ["rign", None, 1])
def test_schedule_policy_refuses_unknown_kinds_of_reduce_scatter(value: object) -> None:
    expected = (
        f"SchedulePolicy expects 'ring' or 'all_to_all' or 'copy_engine' or 'auto' as reduce_scatter, but got {value!r}"
    )
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


def test_schedule_policy_is_checked_by_replace_too() -> None:
    with pytest.raises(ValueError, match="prefetch_nbytes >= 0, but got -3"):
        dataclasses.replace(SchedulePolicy(), prefetch_nbytes=-3)


def test_schedule_policy_is_frozen_and_hashable() -> None:
    policy = SchedulePolicy()
    with pytest.raises(dataclasses.FrozenInstanceError, match="prefetch_nbytes"):
        policy.prefetch_nbytes = 3  # type: ignore[misc]
    assert len({policy, SchedulePolicy(), SchedulePolicy(prefetch_nbytes=3)}) == 2


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", DebugFlags()),
        (" , ", DebugFlags()),
        ("poison", DebugFlags(poison=True)),
        ("delay", DebugFlags(delay_seed=0)),
        ("delay=17", DebugFlags(delay_seed=17)),
        ("order", DebugFlags(order=True)),
        ("finite", DebugFlags(finite=True)),
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
        ValueError, match=f"expects 'poison', 'delay', 'delay=SEED', 'order', 'finite' or 'splits', but got '{word}'"
    ):
        DebugFlags.from_env()
