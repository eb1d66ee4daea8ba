"""The search of the planner: what is refused, what is found, and memory."""

from dataclasses import replace
from typing import Any

import pytest

from dtensor_gtp import plan
from dtensor_gtp.planner.costs import Axis, Costs
from dtensor_gtp.planner.errors import PlanError
from dtensor_gtp.planner.evaluate import Problem, evaluate, memory_of, stage_parts
from dtensor_gtp.planner.job import Job, Layout
from dtensor_gtp.planner.machine import Machine, load_machine
from dtensor_gtp.planner.model import PRESETS, ModelConfig
from dtensor_gtp.planner.search import Bounds, Search, layouts_of

SMALL = ModelConfig("small", 512, 6, 8, 4, 64, 1024, 4096)
LARGE = ModelConfig("large", 2048, 20, 16, 8, 128, 8192, 32000)
MIXTURE = replace(SMALL, experts=8, experts_per_token=2, expert_hidden_dim=256)
GIB = 2**30


def problem(config: ModelConfig = SMALL, machine: Machine | None = None, **job: Any) -> Problem:
    job = {"gpus": 8, "seq_len": 1024, "global_batch": 16} | job
    return Problem(Job(**job), config, machine or load_machine("h100"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus": 0}, "plan expects gpus from 1 to"),
        ({"seq_len": True}, "plan expects seq_len from 1 to"),
        ({"recipe": "float7"}, "plan expects one of bf16, .* as recipe, but got 'float7'. Pass one of them."),
        ({"checkpointing": "some"}, "plan expects one of auto, none, selective, full as checkpointing"),
        ({"dispatch": "all"}, "plan expects one of rows, hosts, hidden as dispatch, but got 'all'"),
        ({"optimizer": "adam"}, "plan expects one of adamw, .* as optimizer"),
        ({"memory": "little"}, "plan expects one of balanced, least, most_speed as memory"),
        ({"fixed": {"tp": 3}}, "plan expects a product of axes that divides 8 GPUs, but tp 3 = 3 does not"),
        ({"fixed": {"tp": 4, "gtp": 4}}, "plan expects a product of axes that divides 8 GPUs, but gtp 4 x tp 4 = 16"),
        ({"fixed": {"dp": 2}}, "plan expects one of pp, replicate, .* as axis, but got 'dp'"),
        ({"fixed": {"tp": 0}}, "plan expects a positive size of tp, but got 0"),
    ],
)
def test_bad_jobs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        problem(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "config", "reason"),
    [
        (Layout(gtp=4), SMALL, "4 ranks on 8 GPUs"),
        (Layout(tp=8), SMALL, "tp 8 does not divide 8 heads and 4 of keys and values"),
        (Layout(pp=8), SMALL, "pp 8 has more stages than the model has layers (6)"),
        (Layout(gtp=8, micro_batch=4), SMALL, "8 data ranks with 4 sequences each do not divide 16"),
        (Layout(gtp=8, ep=2), SMALL, "ep without experts"),
        (Layout(gtp=8), SMALL, None),
        (Layout(gtp=8, ep=3), MIXTURE, "ep 3 does not divide 8 experts"),
        (Layout(gtp=8, ep=4, expert_gtp=4), MIXTURE, "ep 4 and expert_gtp 4 do not divide the 8 ranks of a stage"),
    ],
)
def test_layouts_are_refused_with_reasons(layout: Layout, config: ModelConfig, reason: str | None) -> None:
    assert problem(config).refusal(layout) == reason


def test_each_layout_is_listed_once_with_its_ranks() -> None:
    for one in (problem(), problem(MIXTURE), problem(fixed={"tp": 2, "micro_batch": 1})):
        layouts = list(layouts_of(one))
        assert len(set(layouts)) == len(layouts)
        assert {layout.ranks for layout in layouts} == {8}
    assert {(layout.tp, layout.micro_batch) for layout in layouts} == {(2, 1)}


@pytest.mark.parametrize(
    ("config", "job"),
    [
        (SMALL, {"checkpointing": "none", "fixed": {"micro_batch": 1}}),
        (SMALL, {"gpus": 16}),
        pytest.param(MIXTURE, {"global_batch": 32}, marks=pytest.mark.long),
        pytest.param(MIXTURE, {"gpus": 16, "checkpointing": "none"}, marks=pytest.mark.long),
        pytest.param(LARGE, {"gpus": 16, "global_batch": 32}, marks=pytest.mark.long),
    ],
)
def test_the_search_finds_what_trying_all_layouts_finds(config: ModelConfig, job: dict[str, Any]) -> None:
    one = problem(config, **job)
    found = Search(one, 3).run()
    possible = [lay for lay in layouts_of(one) if one.refusal(lay) is None]
    best = min(evaluate(one, layout).step_ms for layout in possible)
    assert found.answers[0].step_ms <= 1.05 * best
    times = [answer.step_ms for answer in found.answers]
    assert times == sorted(times)
    assert found.num_simulated <= len(possible)
    assert all(answer.is_fitting for answer in found.answers)


@pytest.mark.parametrize(
    ("config", "dispatch"),
    [(SMALL, "rows"), (MIXTURE, "rows"), (replace(MIXTURE, dense_layers=1), "hosts"), (MIXTURE, "hidden")],
)
def test_bounds_are_below_what_is_simulated(config: ModelConfig, dispatch: str) -> None:
    one = problem(config, gpus=16, dispatch=dispatch)
    bounds = Bounds(one)
    possible = [lay for lay in layouts_of(one) if one.refusal(lay) is None]
    for layout in possible[:: len(possible) // 12]:
        assert bounds.ms(layout) <= 1.05 * evaluate(one, layout).step_ms, layout
        assert bounds.state_nbytes(layout) <= memory_of(one, layout).total, layout
        assert bounds.nbytes(layout) <= 1.15 * memory_of(one, layout).total, layout


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name == "llama3-8b" else pytest.mark.soak) for name in PRESETS],
)
def test_16384_gpus_are_searched_with_few_simulations(name: str) -> None:
    found = Search(Problem(Job(16384), PRESETS[name], load_machine("h100"))).run()
    # This bounds its time.
    assert found.num_simulated <= 64 < found.num_layouts
    for fixed in ({"pp": 32, "tp": 1}, {"pp": 4, "tp": 1}, {"pp": 16, "tp": 8}):
        part = Search(Problem(Job(16384, fixed=fixed), PRESETS[name], load_machine("h100")), 1).run()
        assert found.answers[0].step_ms <= 1.05 * part.answers[0].step_ms, fixed


def test_gathers_over_more_hosts_than_anyone_has_published_are_not_proposed() -> None:
    wide = Problem(Job(2048, fixed={"gtp": 2048}), PRESETS["llama3-8b"], load_machine("h100"))
    assert Search(wide, 1).run().answers[0].range_ms is None  # asked for: no time, but what to measure
    free = Search(replace(wide, job=Job(2048)), 1).run()
    assert free.answers[0].layout.gtp <= 1024
    assert any("more than 128 hosts" in item.reason for item in free.refused)


def test_a_stage_of_one_block_is_checkpointed() -> None:
    one = problem(gpus=6, global_batch=6)
    kept = [memory_of(one, Layout(pp=6, checkpoint=kind)).activations for kind in ("none", "selective", "full")]
    assert kept[0] > kept[1] > kept[2]
    mixed = problem(replace(MIXTURE, dense_layers=3), gpus=2, global_batch=2)
    one = replace(mixed, model=replace(MIXTURE, dense_layers=0))
    assert memory_of(mixed, Layout(pp=2)).parameters > 0.9 * memory_of(one, Layout(pp=2)).parameters


def test_what_does_not_fit_is_refused_and_the_closest_is_named() -> None:
    machine = load_machine("h100")
    small = replace(machine, memory_gib=0.005)
    found = Search(problem(machine=small, checkpointing="none", fixed={"micro_batch": 1})).run()
    assert found.answers == ()
    assert not found.closest.is_fitting
    assert {"does not fit", "parameters and optimizer alone do not fit"} >= {item.reason for item in found.refused[:1]}


def test_a_published_layout_is_not_refused() -> None:
    """Llama 3 405B on 8,192 GPUs ran without recomputation (arXiv 2407.21783, 3.3): our count of memory is no proof."""
    layout = {"pp": 16, "tp": 8, "gtp": 64, "cp": 1, "micro_batch": 1}
    job = Job(8192, global_batch=2048, checkpointing="none", fixed=layout)
    found = Search(Problem(job, PRESETS["llama3-405b"], load_machine("h100"))).run()
    best = found.answers[0]
    assert best.memory.least < best.capacity < best.memory.total
    assert best.may_fit
    assert not best.is_fitting
    assert best.mfu == pytest.approx(0.43, rel=0.1)


def test_the_loss_decides_what_there_is_of_logits() -> None:
    one = problem(gpus=1, global_batch=1, seq_len=16384)
    logits = {
        loss: memory_of(replace(one, job=replace(one.job, loss=loss)), Layout(checkpoint="full")).total
        for loss in ("fp32", "bf16", "chunked", "fused")
    }
    assert logits["fp32"] > logits["bf16"] >= logits["chunked"] >= logits["fused"]
    whole = 16384 * SMALL.vocab_size
    assert logits["fp32"] - logits["bf16"] >= 4 * whole  # logits again in fp32, and their gradient


def test_a_tied_matrix_is_counted_once() -> None:
    one, tied = (problem(replace(SMALL, is_tied=is_tied), gpus=1, global_batch=1) for is_tied in (False, True))
    table = SMALL.dim * SMALL.vocab_size
    assert one.whole.numel - tied.whole.numel == table
    assert memory_of(one, Layout()).parameters - memory_of(tied, Layout()).parameters == 4 * table


def test_a_window_of_attention_takes_less_time() -> None:
    whole, window = (
        evaluate(problem(replace(SMALL, window=size), seq_len=16384, global_batch=8), Layout(gtp=8))
        for size in (0, 1024)
    )
    assert window.compute_ms < whole.compute_ms
    assert SMALL.looked_at(16384) == 0.5
    assert replace(SMALL, window=1024).looked_at(16384) == pytest.approx(1 / 16, rel=0.04)


def test_state_that_fits_on_no_layout_is_shown_with_what_to_change() -> None:
    result = plan("llama3-8b", "h100", gpus=1, global_batch=8)
    assert [item.reason for item in result.refused] == ["parameters and optimizer alone do not fit"]
    assert (result.closest.layout.micro_batch, result.closest.layout.checkpoint) == (1, "full")
    assert "  --gpus 4: fits" in str(result)


def test_no_layout_at_all_is_an_error() -> None:
    with pytest.raises(PlanError, match="plan finds no layout of 8 GPUs with tp 8: tp 8 does not divide 8 heads"):
        Search(problem(fixed={"tp": 8})).run()


def test_axes_are_laid_out_as_init_weight_mesh_does() -> None:
    """Ranks of each group by strides, beside those of the meshes."""
    from mesh_common import fake_weight_mesh

    layout = Layout(replicate=2, cp=2, gtp=2, tp=2, ep=2, expert_gtp=4)
    with fake_weight_mesh(16, rank=13, replicate=2, cp=2, gtp=2, tp=2, ep=2, expert_gtp=4) as mesh:
        for axis in ("tp", "gtp", "cp", "ep", "expert_gtp"):
            size, stride = layout.axes()[axis]
            ranks = mesh[axis].mesh.tolist()
            assert len(ranks) == size
            assert ranks[1] - ranks[0] == stride, axis
        assert mesh.weights.size(0) == layout.axes()["replicate"].size


@pytest.mark.parametrize("num_ranks", [3072, 16384])
def test_thousands_of_ranks_have_the_shards_that_gtp_shard_gives_them(num_ranks: int) -> None:
    """The first and the last rank of a large job: the largest shard, and a short one."""
    import torch
    import torch.nn as nn
    from common import fake_mesh

    from dtensor_gtp import gtp_shard

    for rank in (0, num_ranks - 1):
        with fake_mesh(num_ranks, rank=rank) as mesh:
            with torch.device("meta"):
                model = gtp_shard(nn.Linear(64, 14336, bias=False), mesh)
            local = model.weight.to_local().numel()
        assert local == (-(-14336 // num_ranks) * 64 if rank == 0 else 0)


def test_stages_share_the_blocks() -> None:
    parts = stage_parts(PRESETS["llama3-405b"], 16)
    assert [len(part.kinds) for part in parts] == [7, *[8] * 14, 7]  # as in the Llama 3 paper, section 3.3.2
    for pp in (2, 3, 4, 5, 6):
        parts = stage_parts(SMALL, pp)
        assert sum(len(part.kinds) for part in parts) == 6
        assert min(len(part.kinds) for part in parts) >= 1
        assert [(part.is_first, part.is_last) for part in parts[:: pp - 1]] == [(True, False), (False, True)]


def test_memory_by_kind() -> None:
    """A stack of 1 rank against the sums of its parts, then what changes it."""
    one = problem(gpus=1, global_batch=1)
    memory = memory_of(one, Layout())
    assert memory.parameters == pytest.approx(one.whole.numel * 4, rel=0.001)
    assert memory.optimizer == 2 * memory.parameters
    assert memory.total == sum(memory[:-1])
    assert memory_of(problem(), Layout(gtp=8)).parameters == pytest.approx(memory.parameters / 8, rel=0.01)
    more = memory_of(problem(gpus=1, global_batch=2), Layout(micro_batch=2))
    # The fullest moment may be another one then.
    assert more.activations + more.logits >= 2 * (memory.activations + memory.logits)
    long = problem(gpus=1, global_batch=1, seq_len=8192)  # so that activations decide
    activations = [memory_of(long, Layout(checkpoint=kind)).activations for kind in ("full", "selective", "none")]
    assert activations[0] < activations[1] < activations[2]


def test_memory_of_microbatches() -> None:
    """From the first one on, the gradients of all shards are there; weights that are kept are there as a whole."""
    one = problem(gpus=2, global_batch=8)
    memory = memory_of(one, Layout(gtp=2))
    assert memory.gradients == memory.parameters
    kept = memory_of(one, Layout(gtp=2, keep=True))
    assert kept.gathered == kept.reductions == pytest.approx(one.whole.numel * 2, rel=0.001)


def test_memory_of_many_blocks_is_continued_from_a_few() -> None:
    from dtensor_gtp.planner.memory import predict

    one = problem(LARGE)
    setting = one.setting(Layout(gtp=8), one.slowest(Layout(gtp=8)))
    whole = predict(setting, setting.choice(0)[0], 8, num=2)
    few = memory_of(one, Layout(gtp=8))
    assert few[:-1] == pytest.approx(whole[:-1], rel=0.001)


def test_a_pipeline_waits_at_both_ends() -> None:
    few, many = (
        evaluate(problem(gpus=4, global_batch=batch), Layout(pp=2, gtp=2)).exposed_ms["bubble"] for batch in (4, 32)
    )
    assert few == pytest.approx(many)  # the same bubble, whatever the number of microbatches
    step = evaluate(problem(gpus=4, global_batch=4), Layout(pp=2, gtp=2))
    assert 0 < few < step.step_ms


def test_gathering_once_a_step_moves_fewer_bytes() -> None:
    gtp, kept = (
        evaluate(problem(gpus=4, global_batch=16), Layout(gtp=4, keep=keep)).received["gtp"] for keep in (False, True)
    )
    assert kept == pytest.approx(gtp / 4, rel=0.01)


def test_rings_through_the_network_have_one_link_for_each_member_of_a_host() -> None:
    costs = Costs(load_machine("h100"))
    assert costs.wire(Axis(8, 1)).is_fast
    assert not costs.wire(Axis(16, 1)).is_fast
    alone, together = costs.wire(Axis(16, 8)).gb_s, costs.wire(Axis(16, 1)).gb_s
    assert alone == pytest.approx(50 * 0.85)
    assert together == pytest.approx(min(8 * alone, 450 * 0.78))


def test_chunks_of_a_pipeline_shorten_the_bubble_and_hold_more() -> None:
    """Of two chunks on the first of two stages 2.5 microbatches wait for their backward, of 1F1B 2."""
    layout = Layout(pp=2, gtp=2)
    jobs = [problem(gpus=4, global_batch=16, seq_len=4096, virtual_stages=chunks) for chunks in (1, 2)]
    plain, chunked = (evaluate(one, layout) for one in jobs)
    assert chunked.exposed_ms["bubble"] < plain.exposed_ms["bubble"]
    assert [one.inflight(layout, 0, 8) for one in jobs] == [2, 2.5]
    assert [one.inflight(layout, 1, 8) for one in jobs] == [1, 1.5]
    assert chunked.memory.activations > plain.memory.activations


def test_optimizer_states_over_replicas() -> None:
    """A quarter of the states on each of four replicas. They take half of an all-reduce, and send parameters."""
    layout = Layout(replicate=4, gtp=2)
    whole, divided = (evaluate(problem(shards_optimizer=shards), layout) for shards in (False, True))
    assert divided.memory.optimizer == pytest.approx(whole.memory.optimizer / 4, rel=0.01)
    assert divided.memory.parameters == whole.memory.parameters
    assert divided.received["replicate"] == pytest.approx(whole.received["replicate"])
    assert divided.exposed_ms["optimizer"] < whole.exposed_ms["optimizer"]
    bounds = Bounds(problem(shards_optimizer=True))
    state = divided.memory.optimizer + divided.memory.parameters
    assert 0.8 * state < bounds.state_nbytes(layout) <= state


def test_a_token_goes_once_to_each_host() -> None:
    """Of eight choices at random, fewer hosts than rows: 7 x (1 - (7/8)^8) of the 8 x 7/8 that leave a host."""
    machine, far, near = load_machine("h100"), Axis(64, 1), Axis(8, 1)
    rows, hosts, one = (Costs(machine, choices=choices) for choices in (0, 8, 1))
    start = rows.exchange_ms(0, far)
    share = (hosts.exchange_ms(1e9, far) - start) / (rows.exchange_ms(1e9, far) - start)
    assert share == pytest.approx(1 - (7 / 8) ** 8)
    assert one.exchange_ms(1e9, far) == pytest.approx(rows.exchange_ms(1e9, far))
    assert hosts.exchange_ms(1e9, near) == rows.exchange_ms(1e9, near)


def test_compute_hides_tokens_on_their_way_as_far_as_it_lasts() -> None:
    layout, slow = Layout(gtp=16, ep=8, expert_gtp=2), load_machine("h100").with_limits(network_gb_s=0.5)
    rows, hosts, hidden = (
        evaluate(problem(MIXTURE, slow, gpus=16, global_batch=32, dispatch=dispatch), layout)
        for dispatch in ("rows", "hosts", "hidden")
    )
    assert rows.step_ms > hosts.step_ms > hidden.step_ms
    # More of it than there is compute: what is left is waited for.
    assert rows.exposed_ms["ep"] > hosts.exposed_ms["ep"] > hidden.exposed_ms["ep"] > 0
    assert hosts.exposed_ms["ep"] - hidden.exposed_ms["ep"] == pytest.approx(hosts.compute_ms, rel=0.01)
    fast, alone = (problem(MIXTURE, gpus=16, global_batch=batch, dispatch="hidden") for batch in (32, 16))
    assert evaluate(fast, layout).exposed_ms["ep"] == 0
    assert evaluate(alone, layout).exposed_ms["ep"] > 0  # of one microbatch there is no other
