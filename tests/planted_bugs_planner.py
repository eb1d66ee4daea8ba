"""Bugs to plant where the planner lays out a job and adds up its times and memory."""

from __future__ import annotations

from planted_bugs_type import Bug

PLANNER = [
    Bug(
        "a gather of the planner waits for no compute",
        "planner/program.py",
        "        return [*self._waits, *([] if last is None else [last])]",
        "        return []",
        ("test_planner_simulation.py::test_a_gather_waits_for_what_compute_was_given",),
    ),
    Bug(
        "backward uses weights in no time of the host",
        "planner/program.py",
        'use_us / 2)\n                tasks.compute(product(tasks, item, "wgrad")',
        'use_us * 0)\n                tasks.compute(product(tasks, item, "wgrad")',
        ("test_planner_simulation.py::test_a_weight_is_used_in_forward_and_in_backward",),
    ),
    Bug(
        "a copy's time for the host is taken for a launch of one weight",
        "planner/samples.py",
        "(copied - plain - uses) * together / 3",
        "(copied - plain - uses) / 3",
        ("test_planner_calibrate.py::test_a_machine_is_found_again_from_what_it_measures",),
    ),
    Bug(
        "column-wise layers reduce no gradient of their input",
        "planner/user_tp.py",
        "        if not ctx.in_forward:\n            _note(ctx.recorder, grad)\n",
        "",
        ("test_planner_user_tp.py::test_what_ranks_of_tp_exchange",),
    ),
    Bug(
        "two collectives share a link without a loss",
        "planner/simulate.py",
        "        return factor * (1 + (c.wire - 1) * sharing)",
        "        return factor",
        ("test_planner_simulation.py::test_tasks_beside_each_other_are_slower",),
    ),
    Bug(
        "rings through the network have one link",
        "planner/costs.py",
        "min(network.gb_s * network.share * members,",
        "min(network.gb_s * network.share,",
        ("test_planner_search.py::test_rings_through_the_network_have_one_link_for_each_member_of_a_host",),
    ),
    Bug(
        "blocks of a recording are repeated without what they save",
        "planner/trace.py",
        "        num_saved += saved[kind]",
        "        num_saved += 0",
        ("test_planner_model.py::test_repeated_blocks_are_what_a_recording_of_all_has",),
    ),
    Bug(
        "experts of the planner change places with dense weights",
        "planner/job.py",
        '            "ep": Axis(self.ep, self.expert_gtp),',
        '            "ep": Axis(self.ep, 1),',
        ("test_planner_search.py::test_axes_are_laid_out_as_init_weight_mesh_does",),
    ),
    Bug(
        "gradients of all microbatches are forgotten",
        "planner/memory.py",
        "        gradients = numel * PARAM_NBYTES\n",
        "        gradients = 0\n",
        ("test_planner_search.py::test_memory_of_microbatches",),
    ),
    Bug(
        "the bubble is that of all microbatches",
        "planner/evaluate.py",
        "    bubble = (layout.pp - 1) / chunks * one.ms",
        "    bubble = (layout.pp - 1) / chunks * total.ms",
        ("test_planner_search.py::test_a_pipeline_waits_at_both_ends",),
    ),
    Bug(
        "names of configurations reach the terminal",
        "planner/model.py",
        '"name": printable(content.get("_name_or_path") or path.parent.name or path.stem)',
        '"name": content.get("_name_or_path") or path.parent.name or path.stem',
        ("test_planner_command.py::test_names_of_others_do_not_reach_the_terminal",),
    ),
    Bug(
        "any number of layers is planned",
        "planner/model.py",
        "content[key] > MAX_LAYERS:",
        "False:",
        ("test_planner_command.py::test_bad_configurations_are_one_line",),
    ),
    Bug(
        "a cast with one scale for a matrix reads it once",
        "planner/program.py",
        "(1, 5) if costs.is_rowwise else (3, 2)",
        "(1, 5) if costs.is_rowwise else (1, 1)",
        ("test_planner_ranges.py::test_ranges_of_published_rows",),
    ),
    Bug(
        "the last block of a stage keeps all of its activations",
        "planner/memory.py",
        "ends = [*lives[1:], trace.end or",
        "ends = [*lives[1:], lives[-1] or",
        ("test_planner_search.py::test_a_stage_of_one_block_is_checkpointed",),
    ),
    Bug(
        "the stage with most experts is not looked at",
        "planner/evaluate.py",
        "return {0, len(parts) - 1, mixtures.index(max(mixtures))}",
        "return {0}",
        ("test_planner_search.py::test_a_stage_of_one_block_is_checkpointed",),
    ),
    Bug(
        "gathers of any width are proposed",
        "planner/search.py",
        "    if is_free and (wide",
        "    if not is_free and (wide",
        ("test_planner_search.py::test_gathers_over_more_hosts_than_anyone_has_published_are_not_proposed",),
    ),
]
