"""Bugs to plant where the planner lays out a job and adds up its times and memory."""

from __future__ import annotations

from planted_bugs_changes import assign, drop, never, replace, returns
from planted_bugs_type import Bug

PLANNER_SIMULATION = "test_planner_simulation.py"
PLANNER_SEARCH = "test_planner_search.py"

# fmt: off
PLANNER = {
    "a kernel that adds receives the own addend":
        Bug("make_use", replace("kind == 'copy_engine' or is_worth_loading(wgrad)", "kind == 'copy_engine'"),
            "test_what_an_exchange_receives"),
    "a gather of the planner waits for no compute":
        Bug("Program.fork", returns("[]"), "test_a_gather_waits_for_what_compute_was_given"),
    "backward uses weights in no time of the host":
        Bug("_GTPShard.backward_pass", replace("self.spend(self.host.use_us / 2)", "self.spend(0)"),
            "test_a_weight_is_used_in_forward_and_in_backward"),
    "a copy's time for the host is taken for a launch of one weight":
        Bug("_host", replace("(copied - plain - uses) * together", "copied - plain - uses"),
            "test_a_machine_is_found_again_from_what_it_measures"),
    "column-wise layers reduce no gradient of their input":
        Bug("_communicate", replace("through(input, partial(reduce, input.nbytes))", "input"),
            "test_what_ranks_of_tp_exchange"),
    "two collectives share a link without a loss":
        Bug("_factor", replace("factor * (1 + (c.wire - 1) * sharing)", "factor"),
            "test_tasks_beside_each_other_are_slower"),
    "rings through the network have one link":
        Bug("Costs.wire", replace("network.gb_s * network.share * members", "network.gb_s * network.share"),
            "test_rings_through_the_network_have_one_link_for_each_member_of_a_host"),
    "blocks of a recording are repeated without what they save":
        Bug("repeated", drop("num_saved += ..."), "test_repeated_blocks_are_what_a_recording_of_all_has"),
    "experts of the planner change places with dense weights":
        Bug("Layout.axes", replace("Axis(self.ep, self.expert_gtp)", "Axis(self.ep, 1)"),
            "test_axes_are_laid_out_as_init_weight_mesh_does"),
    "gradients of all microbatches are forgotten":
        Bug("memory:predict", drop("gradients = (trained + small) * PARAM_NBYTES"), "test_memory_of_microbatches"),
    "the bubble is that of all microbatches":
        Bug("_with_bubble", replace("one.ms", "total.ms"), "test_a_pipeline_waits_at_both_ends"),
    "names of configurations reach the terminal":
        Bug("config_of_json", replace("printable", "str"), "test_names_of_others_do_not_reach_the_terminal"),
    "any number of layers is planned":
        Bug("config_of_json", never("content[key] > MAX_LAYERS"), "test_bad_configurations_are_one_line"),
    "a cast with one scale for a matrix reads it once":
        Bug("Setting._operand_nbytes", replace("3 * inputs", "inputs"), "test_ranges_of_published_rows"),
    "the stage with most experts is not looked at":
        Bug("Problem.full_stages", returns("{0: stage_parts(self.model, layout.pp)[0]}"),
            "test_a_stage_of_one_block_is_checkpointed"),
    "the last block of a stage keeps all of its activations":
        Bug("memory:predict", never("last.block >= 0 and trace.end > 0"), "test_a_stage_of_one_block_is_checkpointed"),
    "gathers of any width are proposed":
        Bug("is_too_wide", replace("_MOST_DOMAINS * machine.gpus_per_domain", "10**9"),
            "test_gathers_over_more_hosts_than_anyone_has_published_are_not_proposed"),
    "weights that stay for a step cost the allocator a fifth more":
        Bug("memory:predict", replace("not keep", "True"), "test_memory_of_published_runs"),
    "blocks of any model are its layers":
        Bug("api:_blocks", returns('["layers"]'), "test_blocks_in_two_places_have_no_code_that_changes_them"),
    "experts of users have the range of dense models":
        Bug("Trace.has_experts", returns("False"), "test_a_mixture_by_function"),
    "any mask is causal":
        Bug("recorder:recording", replace("is_causal or is_ours", "True"),
            "test_masks_count_all_scores_but_causal_ones"),
    "a loss over a divided vocabulary is one kernel":
        Bug("Reference.loss", replace("VocabularyLoss.apply if self.tp > 1 else F.cross_entropy", "F.cross_entropy"),
            "test_memory_of_published_runs"),
    "chunks of a pipeline hold no more microbatches":
        Bug("Problem.inflight", replace("2 * after", "after"),
            "test_chunks_of_a_pipeline_shorten_the_bubble_and_hold_more"),
    "a group is gathered as many weights":
        Bug("Setting._group", replace("rules.is_worth_a_group(mean, self.tokens, **kind)", "False"),
            "test_small_blocks_are_groups"),
    "small groups travel one by one":
        Bug("Together.may_wait", replace("2 * nbytes <= self._limit_of(is_group)", "False"),
            f"{PLANNER_SIMULATION}::test_small_groups_travel_together"),
    "a block's backward reduces its gradients while others are reduced":
        Bug("_GTPShard._launch_reduction", drop("self._retire(0)"), "test_a_group_is_gathered_freed_and_reduced_once"),
    "gradients of a group take no memory until they are packed":
        Bug("memory:_in_group", replace("sum(computed) - computed[0]", "0"),
            "test_gradients_of_a_group_wait_for_the_last_one"),
    "gradients within a host travel as they do between hosts":
        Bug("Setting.sends_narrow", assign("is_near", "False"),
            "test_gradients_within_a_host_travel_in_the_dtype_of_compute"),
    "a token goes to each expert apart":
        Bug("Costs.exchange_ms", never("self.choices"), "test_a_token_goes_once_to_each_host"),
    "compute hides more than it lasts":
        Bug("Parts.hiding", assign("hidden", "self.exposed.get(cause, 0.0)"),
            "test_compute_hides_tokens_on_their_way_as_far_as_it_lasts"),
    "a grouped GEMM is as fast as one of all its groups":
        Bug("Costs.gemm_ms", replace("op.flops / op.groups", "op.flops"), "test_a_mixture_of_transformers_as_measured"),
    "printed code cuts no optimizer states over replicas":
        Bug("training_code", replace("job.shards_optimizer and layout.replicate > 1", "False"),
            "test_states_are_those_of_a_part"),
    "replicas hold all optimizer states":
        Bug("Setting.optimizer_numel", replace("self.shards_optimizer", "False"),
            f"{PLANNER_SEARCH}::test_optimizer_states_over_replicas"),
    "each use of a matrix counts its state":
        Bug("trace:record", replace("counted[matrices_of(module)] != number", "False"),
            "test_blocks_that_run_several_times_count_their_state_once"),
    "calls of a block are one block":
        Bug("trace:record", replace("bisect(calls[block], first)", "0"),
            "test_blocks_that_run_several_times_count_their_state_once"),
    "attention of torch reads no weight below it":
        Bug("matrices_of", assign("is_attention", "False"),
            "test_attention_of_torch_is_one_use_of_all_its_matrices"),
    "frozen weights are trained":
        Bug("recorder_of", assign("frozen", "set()"), "test_frozen_weights_have_no_gradient_and_no_state"),
    "all layers have a window":
        Bug("ModelConfig.looked_at", replace("min(self.full_layers / self.layers, 1)", "0"),
            "test_attention_has_a_window_in_the_layers_that_say_so"),
    "sizes of 0 count as left out":
        Bug("_size_of", replace("content.get(key) is not None", "content.get(key)"),
            "test_bad_configurations_are_one_line"),
}
