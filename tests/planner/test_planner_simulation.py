"""The simulation of streams: by hand for a few tasks, and held against the plan of the runtime."""

from dataclasses import replace
from typing import Any

import pytest

from dtensor_gtp._schedule import waiting_gradients
from dtensor_gtp.planner.costs import Axis, Costs, Load, Stream, Task, simulate
from dtensor_gtp.planner.machine import Contention, load_machine
from dtensor_gtp.planner.memory import _uses, moments
from dtensor_gtp.planner.model import ModelConfig
from dtensor_gtp.planner.program import build, build_compute
from dtensor_gtp.planner.setting import Setting, plan_step
from dtensor_gtp.planner.timing import build_fully_shard, measure
from dtensor_gtp.planner.trace import Part, record_reference, repeated
from dtensor_gtp.policy import SchedulePolicy, fixed_policy
from dtensor_gtp.quant import MXFP8, Float8Tensorwise

CONTENTION = Contention(1.5, 1.0, 3.0, 1.0, 2.0, 2.0, 1.0)
TINY = ModelConfig("tiny", 256, 4, 4, 2, 64, 512, 1024)


def tiny(num_blocks: int = 4, world: int = 8, **options: object) -> Setting:
    config = replace(TINY, layers=num_blocks)
    trace = repeated(record_reference(config, 256), config, Part(tuple(config.kinds)))
    costs = Costs(load_machine("h200"), {"gtp": Axis(world, 1)})
    return Setting(trace, costs, options.pop("policy", fixed_policy()), tokens=256, **options)  # type: ignore[arg-type]


def on_machine(setting: Setting, host: dict[str, float] | None = None, **changes: Any) -> Setting:
    """Of which the host's numbers, or others, are changed."""
    machine = setting.costs.machine
    machine = replace(machine, host=replace(machine.host, **(host or {})), **changes)
    return replace(setting, costs=replace(setting.costs, machine=machine))


def labels(program: Any, kind: str) -> list[str]:
    return [task.label for task in program.tasks if task.label.startswith(kind)]


def ends(*tasks: Task) -> list[float]:
    return [round(span.end, 6) for span in simulate(tasks, CONTENTION)]


def test_a_stream_runs_its_tasks_in_order_after_those_they_wait_for() -> None:
    gather = Task(Stream.GATHER, Load.COPY, 4.0)
    first = Task(Stream.COMPUTE, Load.COMPUTE, 1.0)
    second = Task(Stream.COMPUTE, Load.COMPUTE, 2.0, (0,))
    assert ends(gather, first, second) == [4.0, 1.0, 6.0]
    late = second._replace(launch_ms=10.0)
    assert ends(gather, first, late) == [4.0, 1.0, 12.0]


def test_tasks_beside_each_other_are_slower() -> None:
    """A GEMM takes 1.5 times as long beside a collective, which takes 3 times as long; then it is alone."""
    gemm, nccl = Task(Stream.COMPUTE, Load.COMPUTE, 2.0), Task(Stream.GATHER, Load.NCCL, 3.0)
    assert ends(gemm, nccl) == [3.0, 3.0 + 2.0]  # of the collective one third of 3 ms is done by then
    copies = Task(Stream.GATHER, Load.COPY, 1.0), Task(Stream.SCATTER, Load.COPY, 1.0)
    assert ends(*copies) == [2.0, 2.0]  # they share the wire
    other = Task(Stream.SCATTER, Load.NETWORK, 1.0)
    assert ends(copies[0], other) == [1.0, 1.0]  # these do not


def test_a_task_cannot_wait_for_a_later_one() -> None:
    with pytest.raises(ValueError, match="simulate expects tasks that wait for earlier ones, but task 0"):
        simulate([Task(Stream.COMPUTE, Load.COMPUTE, 1.0, (0,))], CONTENTION)


def test_gathers_are_those_of_the_plan() -> None:
    """Each launch of the runtime's plan is one gather, in its order, and the uses between are those of the plan."""
    setting = tiny(policy=fixed_policy(prefetch_nbytes=1 << 20, coalesce_nbytes=1 << 20))
    schedule, weights = setting.choice(0)[0], setting.sharded
    step = plan_step(setting, schedule)
    expected = []
    for plan in (step.forward, step.backward):
        for launch in (launch for launches in plan.launches for launch in launches):
            uses = [plan.uses[position] for position in launch.positions]
            names = [weights[use].name for use in uses if plan is step.forward or use not in step.kept]
            if names:
                expected.append("gather " + " + ".join(name.removesuffix(".weight") for name in names))
    program = build(setting, schedule)
    assert labels(program, "gather") == expected
    assert any("+" in label for label in expected)


@pytest.mark.parametrize("backend", ["process_group", "copy_engine"])
def test_a_gather_waits_for_what_compute_was_given(backend: str) -> None:
    """Its buffer comes from the allocator of the compute stream, see [Note: streams and memory]."""
    setting = tiny(policy=fixed_policy(prefetch_nbytes=1 << 18, coalesce_nbytes=1 << 18, gather_backend=backend))
    tasks = build(setting, setting.choice(0)[0]).tasks
    gathers = [number for number, task in enumerate(tasks) if task.label.startswith("gather")]
    assert len(gathers) > 4
    for number in gathers:
        (cast,) = tasks[number].after
        # Copy engines cast on a stream of their own, which waits for compute.
        assert (tasks[cast].stream is Stream.COMPUTE) == (backend == "process_group")
        computed = [other for other in range(number) if tasks[other].stream is Stream.COMPUTE]
        assert not computed or computed[-1] in (cast, *tasks[cast].after)


def test_each_weight_is_gathered_twice_and_reduced_once() -> None:
    setting = tiny()
    program, weights = build(setting, setting.choice(0)[0]), setting.sharded
    gathered = sum(item.gathered for item in weights)
    head, table = weights[-1].gathered, weights[0].gathered
    # The head is kept from forward to backward, and backward does not gather a table.
    moved = 2 * gathered - head - table + sum(item.sent for item in weights)
    assert program.received["gtp"] == pytest.approx(moved * 7 / 8)


def test_without_a_wire_a_step_is_compute_alone() -> None:
    setting = on_machine(replace(tiny(world=1), is_captured=True), host={"replay_us": 0})
    tasks = build(setting, setting.choice(0)[0]).tasks
    tasks = [task for task in tasks if not task.label.startswith(("cast", "sum", "all-reduce"))]
    alone = build_compute(setting).tasks
    assert sum(task.ms for task in tasks) == pytest.approx(sum(task.ms for task in alone))


def test_more_memory_kept_means_fewer_bytes() -> None:
    few, many = (
        build(setting, setting.choice(0)[0]).received["gtp"]
        for setting in (tiny(), tiny(policy=fixed_policy(keep_nbytes=1 << 30)))
    )
    assert many < few


def test_a_slow_wire_is_exposed_and_named() -> None:
    slow = replace(load_machine("h200").fast, gb_s=1.0)
    setting = on_machine(tiny(), host={"op_us": 0, "use_us": 0, "collective_us": 0}, fast=slow)
    program = build(setting, setting.choice(0)[0])
    parts = program.exposed()
    assert parts["gathers"] + parts["reductions"] > 0.9 * program.ms
    assert sum(parts.values()) < program.ms


def test_many_blocks_are_continued_from_a_few() -> None:
    """A step of 16 blocks, simulated whole and by the difference of three."""
    setting = replace(tiny(16), is_captured=True)
    schedule, _ = setting.choice(0)
    whole = build(setting, schedule)
    few = measure(setting, schedule, is_last=True)
    assert few.ms == pytest.approx(whole.ms, rel=0.01)
    assert few.received["gtp"] == pytest.approx(whole.received["gtp"])


@pytest.mark.parametrize("keeps", [False, True])
def test_fully_shard_gathers_by_blocks(keeps: bool) -> None:
    program = build_fully_shard(tiny(), keeps=keeps)
    forward = ["gather root", *(f"gather block {n}" for n in range(4))]
    assert labels(program, "gather") == forward + ([] if keeps else [f"gather block {n}" for n in (3, 2, 1, 0)])
    assert labels(program, "reduce") == [*(f"reduce block {n}" for n in (3, 2, 1, 0)), "reduce root"]


def test_recomputation_uses_weights_again() -> None:
    setting = tiny(checkpoint="full")
    weights, step = setting.sharded, plan_step(setting, setting.choice(0)[0])
    names = [weights[use].name.removeprefix("layers.3.").removesuffix(".weight") for use in step.backward.uses[:13]]
    again = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "ffn.w1", "ffn.w3"]
    assert names == ["output", *again, "ffn.w2", *again[:3:-1], "attention.wo", "attention.wv", "attention.wk"][:13]


def test_a_weight_is_used_in_forward_and_in_backward() -> None:
    """The host's time for a use, as ``--host-time`` measures it, is charged for both."""
    setting = tiny(policy=fixed_policy())
    given = [on_machine(setting, host={"use_us": use_us}) for use_us in (0.0, 100.0)]
    times = [build(each, each.choice(0)[0]).host_ms for each in given]
    with_both = [item for item in setting.sharded if item.weight.has_dgrad]
    tables = len(setting.sharded) - len(with_both)
    assert tables == 1  # the embedding has no gradient of its input
    assert times[1] - times[0] == pytest.approx(0.1 * (2 * len(with_both) + 1.5 * tables))


def test_small_blocks_are_groups() -> None:
    """Where the runtime would make groups of them; a policy with numbers of its own has none."""
    policies = SchedulePolicy(), fixed_policy(), SchedulePolicy()
    settings = [tiny(policy=policies[0]), tiny(policy=policies[1]), replace(tiny(policy=policies[2]), tokens=1 << 22)]
    said = [any("groups: 4 blocks" in reason for reason in setting.choice(0)[1]) for setting in settings]
    assert said == [True, False, False]
    assert settings[0].choice(0)[0].prefetch_depth == 1
    assert {unit.is_group for unit in tiny(policy=SchedulePolicy(), world=1).units} == {False}


def test_quantized_groups() -> None:
    """Within a host they are gathered and multiplied in bf16, also where single weights would pay without a recipe;
    not in a captured step with float8 GEMMs."""
    base = tiny(policy=SchedulePolicy())
    numels = [item.weight.numel for item in base.sharded if item.weight.block >= 0]
    many = replace(base, tokens=int(1.5e11 * len(numels) / sum(numels)))
    float8 = replace(base, recipe=Float8Tensorwise(), costs=replace(base.costs, precision="float8"))
    for setting, expected in (
        (float8, True),
        (replace(float8, tokens=many.tokens), True),
        (many, False),
        (replace(float8, is_captured=True), False),
        (replace(base, recipe=MXFP8(), is_captured=True), True),
        (on_machine(float8, gpus_per_host=1), False),
    ):
        groups = [unit for unit in setting.units if unit.is_group]
        assert bool(groups) is expected
        assert not any(unit.is_quantized for unit in groups)


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_a_group_is_gathered_freed_and_reduced_once(checkpoint: str) -> None:
    """In each pass, also where backward computes the block again; with less time of the host, and as many bytes."""
    grouped = tiny(policy=SchedulePolicy(embedding="gather"), checkpoint=checkpoint)
    alone = {"prefetch_nbytes": 1, "coalesce_nbytes": 0, "coalesce_grad_nbytes": 0}
    schedule = replace(grouped.choice(0)[0], **alone)
    program = build(grouped, schedule)
    blocks = range(4)
    assert labels(program, "gather layers") == [f"gather layers.{number}" for number in (*blocks, *blocks[::-1])]
    for kind in ("pack", "reduce", "sum"):
        assert labels(program, f"{kind} layers") == [f"{kind} layers.{number}" for number in blocks[::-1]]
    order = labels(program, "")
    first = program.tasks[order.index("use layers.0.attention.wq.weight")]
    assert order.index("gather layers.0") in first.after
    packed = program.tasks[order.index("pack layers.0")]
    assert order.index("sum layers.1") in packed.after  # the buffers of one group at a time
    by_one = fixed_policy(**vars(schedule) | {"embedding": "gather"})
    single = build(tiny(policy=by_one, checkpoint=checkpoint), schedule)
    assert program.host_ms < single.host_ms
    assert program.received["gtp"] <= single.received["gtp"]


def test_large_gradients_of_a_group_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they travel in the dtype of compute."""
    near = replace(tiny(policy=SchedulePolicy(embedding="gather")), reduce_nbytes=4)
    far = on_machine(near, gpus_per_host=1)

    def pack_ms(setting: Setting) -> float:
        program = build(setting, setting.choice(0)[0])
        return sum(task.ms for task in program.tasks if task.label.startswith("pack"))

    before = pack_ms(near), pack_ms(far)
    assert min(before) > 0
    monkeypatch.setattr(waiting_gradients, "_NOT_PACKED", 1)
    assert (pack_ms(near), pack_ms(far)) == (0, before[1])


def test_small_groups_travel_together() -> None:
    """Two blocks in a launch: with less time of the host, as many bytes, and more memory for gradients."""
    setting = tiny(policy=SchedulePolicy(embedding="gather"))
    block = next(unit.gathered for unit in setting.units if unit.is_group)
    schedules = [
        replace(setting.choice(0)[0], prefetch_nbytes=1, coalesce_nbytes=limit, coalesce_grad_nbytes=limit)
        for limit in (0, 2 * block)
    ]
    apart, together = (build(setting, schedule) for schedule in schedules)
    for kind in ("pack", "reduce", "sum"):
        assert labels(together, f"{kind} layers") == [f"{kind} layers.3 + layers.2", f"{kind} layers.1 + layers.0"]
    assert together.host_ms < apart.host_ms
    assert together.received["gtp"] == apart.received["gtp"]
    waiting = [
        moments(_uses(setting, plan_step(setting, each), each), 0, replace(each, max_inflight_reduce_scatters=1))
        for each in schedules
    ]
    before = [
        max(moment.wgrad for moment in found if moment.moment == "before backward of layers.2.attention.wq.weight")
        for found in waiting
    ]
    assert before[0] < before[1]  # gradients of the block behind it are not packed yet


def test_gradients_of_a_group_wait_for_the_last_one() -> None:
    """At the end of a block's backward there are its weights, its gradients and what they are packed into."""
    grouped = tiny(policy=SchedulePolicy())
    schedule = grouped.choice(0)[0]
    block = next(unit.gathered for unit in grouped.units if unit.is_group)
    alone = replace(schedule, coalesce_grad_nbytes=0, max_inflight_reduce_scatters=1)
    found = moments(_uses(grouped, plan_step(grouped, schedule), schedule), 0, alone)
    last = next(moment for moment in found if moment.moment == "in backward of layers.0.attention.wq.weight")
    assert last.gathered == block
    whole = max(moment.wgrad for moment in found if moment.moment == last.moment)
    assert 2 * block <= whole < 2.5 * block


def test_gradients_within_a_host_travel_in_the_dtype_of_compute() -> None:
    """By the runtime's own rule: reduced in fp32, what goes alone through the process group is exchanged in bf16."""
    by_group = fixed_policy(gather_backend="process_group", reduce_scatter="ring", coalesce_grad_nbytes=1 << 19)
    settings = [tiny(policy=by_group, world=world, reduce_nbytes=4) for world in (8, 16)]
    schedule = settings[0].choice(0)[0]
    head, small = settings[0].sharded[-1], settings[0].sharded[2]
    assert head.sent > schedule.coalesce_grad_nbytes > small.sent
    assert [settings[0].sends_narrow(schedule, item) for item in (head, small)] == [True, False]
    assert not any(settings[1].sends_narrow(schedule, item) for item in settings[1].sharded)  # on two hosts
    assert not tiny(policy=by_group).sends_narrow(schedule, head)  # reduced in bf16
    near, far = (build(setting, schedule) for setting in settings)
    times = [next(task.ms for task in each.tasks if task.label == "reduce output") for each in (near, far)]
    assert times[0] == pytest.approx(settings[0].costs.scatter_ms(head.weight.numel * 2, head.axis))
    assert times[1] == pytest.approx(settings[1].costs.scatter_ms(head.weight.numel * 4, settings[1].sharded[-1].axis))
    uses = _uses(settings[0], plan_step(settings[0], schedule), schedule)
    assert (uses[-1].wgrad, uses[-1].sent) == (head.weight.numel * 2, head.weight.numel * 2)
