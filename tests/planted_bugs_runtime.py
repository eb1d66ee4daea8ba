"""Planted bugs of what runs: gathers and passes, gradients, captured graphs."""

from __future__ import annotations

from planted_bugs_changes import argument, assign, drop, flip, negate, never, replace, returns, without
from planted_bugs_type import Bug

TOGETHER = "test_groups_together.py::TestTogether"
CAPTURE_BLOCKS = "test_capture_blocks.py::TestCaptureBlocks"

# fmt: off
RUNTIME = {
    "a compute stream that comes back reads what others are still making":
        Bug("Streams.wait_for_others", drop("wait_event"),
            "test_a_stream_that_comes_back_waits_where_it_reads_what_others_made"),
    "a stream reads a copy of a weight that another one is still making":
        Bug("Gathered._note_copy", assign("self.done", "self.done"),
            "test_a_copy_of_a_weight_that_a_stream_has_made_is_waited_for"),
    "a stream reads what another one has read first before it is gathered":
        Bug("Gathering.share", drop("_wait_for"), "test_a_copy_of_a_weight_that_a_stream_has_made_is_waited_for"),
    "a recorded block waits for reductions that other ranks launch after it":
        Bug("ReductionLaunches._reduce_scatter", never("self._block is not None and self._has_launched"),
            "test_a_block_that_runs_eagerly_waits_for_none_of_its_own_reductions"),
    "a recording that failed writes what it has not computed":
        Bug("Keeper.forget_recording", replace("group.leaves.drop_writes()", "group.carry_writes()"),
            "test_writes_that_no_kernel_has_made_reach_no_shard"),
    "weights of two blocks are in memory between their backwards":
        Bug("tensors:register_prehook", replace("hooks.pop(key)", "hooks[key]"),
            "test_a_block_is_freed_before_the_next_one_is_read"),
    "a block that returns its input ends before it begins":
        Bug("BlockUse.watch", replace("last not in begins", "True"),
            "test_blocks_that_return_their_inputs_are_freed"),
    "a head stays in memory behind the first blocks":
        Bug("Gradients.begin_group", replace("self._comm.reductions.num_launched", "0"),
            "test_a_head_is_not_in_memory_when_blocks_are_reduced"),
    "a stage of blocks is gathered ahead":
        Bug("block_nbytes", replace("len(inside) <= 1", "True"), "test_a_stage_of_groups_is_no_block"),
    "a head without groups is rounded":
        Bug("linear:wgrad", replace("runtime.members.groups", "True"),
            "test_a_head_without_groups_keeps_what_the_gemm_adds"),
    "no wait for a gather": Bug("Streams.wait", drop("_wait_for_work"), "test_prefetch_depth_changes_no_bit"),
    "stale gather is used":
        Bug("ShardedWeight.is_fresh", without("gathered.version != ..."), "test_step_in_the_middle_of_a_forward"),
    "optimizer steps are not counted":
        Bug("OptimizerSteps._note_step", drop("note_step"),
            "test_weights_kept_after_backward_serve_the_next_microbatch"),
    "kept weight outlives its pass":
        Bug("Keeper.end_keeps", without("not (weight.is_pinned or not weight.flags.reshard_after_backward)"),
            "test_values_written_between_forwards_are_used_at_once"),
    "kept weight survives a state dict":
        Bug("_save_to_state_dict", drop("drop_kept"), "test_r13_a_load_counts_in_the_next_forward"),
    "prefetch crosses the end of backward":
        Bug("Runtime._finish_backward", drop("drop_prefetched"), "test_unusual_passes.py::TestUnusualPasses"),
    "a backward takes weights of a later step for those it was computed with":
        Bug("GroupLeaves._count_write", drop("increment_version"),
            "test_a_backward_through_weights_of_an_earlier_step_is_refused"),
    "a group does not see an optimizer step":
        Bug("lost_writes:count_writes", drop("group.shards.num_updates += 1"),
            "test_a_backward_through_weights_of_an_earlier_step_is_refused"),
    "what autograd has saved of a group is freed at the end of a pass":
        Bug("GroupLeaves.free", replace("not self.are_saved", "True"),
            "test_held_groups.py::TestHeldGroups::test_reads_outside_of_a_block_and_outputs_in_objects"),
    "a graph of old values reads what an optimizer has changed":
        Bug("GroupLeaves.outdate", drop("_count_write"), "test_what_is_held_follows_the_values"),
    "gradients that a backward was not asked for refuse a second one":
        Bug("Runtime._finish_backward", replace("self._is_asked_for", "None"),
            "test_gradients_that_were_not_asked_for_stay_as_they_are"),
    "writes of a forward to weights of a group are lost":
        Bug("WeightGroup.carry_writes", drop("copy_"), "test_debugging_aids.py::TestPoisonOfWhatIsFreed"),
    "shards are cast before replicas have sent what they wrote":
        Bug("_copied_ahead", never("weight.part is not None"), "test_plan_report.py::TestWhereShardsAreCast"),
    "whole parameters are cast before a recipe has cast the weights beside them":
        Bug("_copied_ahead", never("weight.form.wire is not None"), "test_plan_report.py::TestWhereShardsAreCast"),
    "groups that travel together get the gradients of each other":
        Bug("ReductionLaunches._scattered",
            replace("zip(together, slots, strict=True)", "zip(together[::-1], slots, strict=True)"),
            f"{TOGETHER}::test_steps_equal_one_process"),
    "rows that no number of ranks divides are packed as if it did":
        Bug("chunk_cat", without("tensor.shape[0] % num_chunks == 0"), f"{TOGETHER}::test_steps_equal_one_process"),
    "a single weight joins groups that wait":
        Bug("Together.takes", without("is_group == self._are_groups"),
            "test_other_gradients_end_the_wait"),
    "gradients that arrive after the backward of their block are lost":
        Bug("Runtime._finish_blocks", never("group.pending_grad.have_arrived"), "test_weights_that_other_code_reads"),
    "a rank does not say that it has no gradient of a weight of a block":
        Bug("GroupGradients.take", drop("zero_"), "test_ranks_change_what_they_use"),
    "a block is laid out anew while gradients of the old layout are in flight":
        Bug("Gradients.reduce_group", drop("settle"),
            "test_weights_are_frozen_unfrozen_and_used_for_the_first_time_in_one_accumulation"),
    "a weight that is unfrozen in an accumulation counts as used":
        Bug("GroupGradients._laid_out_anew", assign("marks[:, self._all.index(weight)]", "1"),
            "test_weights_are_frozen_unfrozen_and_used_for_the_first_time_in_one_accumulation"),
    "sums of a block are not laid out for weights that are trained later":
        Bug("GroupGradients.reduce_only", assign("self.unsharded", "self.unsharded"),
            "test_weights_are_frozen_unfrozen_and_used_for_the_first_time_in_one_accumulation"),
    "a pass without uses is guessed again":
        Bug("Chain.end", drop("self.may_guess = False"), "test_only_a_first_pass_is_guessed"),
    "a wrong guess is followed to its end":
        Bug("Chain.advance", never("self._guessed and use in uses"),
            "test_a_use_behind_its_block_ends_the_guess"),
    "the first pass guesses experts":
        Bug("Guesses.__init__", without("target.lane != 0"), "test_first_passes_that_leave_out_experts"),
    "the first pass guesses what is larger than the window":
        Bug("Guesses.__init__", without("target.nbytes > most_nbytes"),
            "test_what_may_never_be_gathered_is_not_guessed"),
    "gathers for nothing outlive the block of their weight":
        Bug("Gathering._drop_unexpected", drop("forget_pending"),
            "test_an_unused_weight_leaves_when_its_block_is_passed"),
    "prefetch of freed shards":
        Bug("_wrap_fully_shard.to_sharded", drop("drop_prefetched_of"),
            "test_gathers_read_only_what_fully_shard_has_gathered"),
    "gradient late for fully_shard": Bug("_wrap_fully_shard.post_backward", drop("publish"), "test_per_block_and_root"),
    "freed buffer is not poisoned":
        Bug("Keeper.free", drop("poison(gathered.buffer)"),
            "test_poison_fills_a_freed_buffer_but_no_escaped_reference"),
    "plan is never observed again":
        Bug("Chain.end", replace("observed != self.plan.uses", "not self.plan.uses"),
            "test_what_is_in_flight_after_each_use"),
    "window is one use short":
        Bug("_steps_by_size", replace("position - window.depth + 1", "position - window.depth + 2"),
            "test_what_is_in_flight_after_each_use"),
    "plan does not move on after a deviation":
        Bug("Chain.advance", replace("position + 1", "cursor"), "test_what_is_in_flight_after_each_use"),
    "what stays between uses has no bound":
        Bug("_plan_stays", replace("total <= nbytes", "True"), "test_schedule.py::TestStays"),
    "what is recomputed is gathered again":
        Bug("Gathering._stays_for_next_use", never("position in chain.plan.served"),
            "test_what_is_recomputed_stays_for_its_gradients"),
    "what stays serves every use":
        Bug("Gathering._is_missing", replace("not chain.stays(target.index, target.lane)", "True"),
            "test_a_weight_that_stays_serves_one_use"),
    "first launches are large":
        Bug("_put_together", replace("min(window.together_nbytes, ...)", "window.together_nbytes"),
            "test_schedule.py::TestLaunches"),
    "a backward begins with many groups ahead":
        Bug("_steps_by_size", never("window.is_backward and traits.is_group"),
            "test_a_backward_begins_with_little_ahead"),
    "a backward begins with large launches of groups":
        Bug("_put_together", never("window.is_backward and traits[use].is_group"),
            "test_a_backward_begins_with_little_ahead"),
    "a backward begins with large reductions":
        Bug("Together._limit_of", replace("min(self._limit, ...)", "self._limit"),
            f"{TOGETHER}::test_reductions_start_small_and_grow"),
    "a backward begins where the last one ended":
        Bug("Gradients.end_backward", drop("self._waiting.clear()"),
            f"{TOGETHER}::test_reductions_start_small_and_grow"),
    "budget of kept weights is not spent": Bug("choose_kept.choose", drop("left -= ..."), "test_schedule.py::TestKept"),
    "sum in the place of the mean":
        Bug("reduce_scale", replace("dist.ReduceOp.AVG", "dist.ReduceOp.SUM"),
            "test_r1_all_ones_gradient_on_every_mesh"),
    "float16 is divided twice":
        Bug("reduce_scale",
            replace("ReduceScale(..., predivide, ...)", "ReduceScale(dist.ReduceOp.SUM, predivide, factor)"),
            "test_r1_all_ones_gradient_on_every_mesh"),
    "divisor without the replicas":
        Bug("ManagedParam.num_ranks", returns("self.mesh.size(self.mesh.ndim - 1)"),
            "test_r1_all_ones_gradient_on_every_mesh"),
    "no all-reduce over replicas":
        Bug("ReductionLaunches._complete",
            replace("self._in_order(compat.all_reduce, slot, scale.op, replicate)", "None"),
            "test_r20_rank_distinct_gradients_are_averaged_through_every_gather"),
    "whole gradients skip the replicas":
        Bug("ReductionLaunches._reduce_bucket.complete", replace("active[1:]", "active[2:]"),
            "test_r20_rank_distinct_gradients_are_averaged_through_every_gather"),
    "second use replaces the first gradient":
        Bug("ReducedGradient.accumulate", replace("self.reduced += reduced", "self.reduced = reduced"),
            "test_r4_reused_module_gathers_equal_uses_and_gradients_add_up"),
    "microbatch replaces the gradient":
        Bug("ReducedGradient.publish", replace("total += reduced", "total = reduced"),
            "test_what_the_user_does_to_grad_between_microbatches_counts"),
    "wide sum of microbatches is dropped":
        Bug("ReducedGradient.publish", drop("self.wide = reduced"), "test_bf16_parameters_sum_microbatches_in_fp32"),
    "unsynced microbatch is overwritten":
        Bug("Gradients.target",
            replace("(total, True)", "(total, False)"),
            "test_the_last_of_several_microbatches_reduces"),
    "a GEMM forgets the unsynced microbatch":
        Bug("Gradients.target", never("total is not None"),
            "test_r27_first_and_last_use_in_different_microbatches"),
    "weight unused in the last microbatch":
        Bug("Gradients.complete", drop("self._send(weight, weight.pending_grad.unsharded)"),
            "test_r27_first_and_last_use_in_different_microbatches"),
    "rows before the last all-reduce are lost":
        Bug("ReductionLaunches._complete", drop("slot += ..."), "test_the_last_of_several_microbatches_reduces"),
    "whole unsynced gradient is lost":
        Bug("WholeParam._with_unsynced", replace("unsynced.add_(grad)", "grad.to(self.reduce_dtype)"),
            "test_the_last_of_several_microbatches_reduces"),
    "whole gradient counts twice":
        Bug("gradient:take_grad", drop("leaf.grad = None"),
            "test_r20_rank_distinct_gradients_are_averaged_through_every_gather"),
    "reduce_dtype is ignored":
        Bug("ManagedParam._set_param", without("policy.reduce_dtype"), "test_fp32_reduction_of_bf16_compute_is_exact"),
    "sum in the dtype of the wire":
        Bug("sum_dtype", replace("torch.promote_types(...)", "wire_dtype"),
            "test_error_does_not_see_what_rounding_in_the_ring_loses"),
    "exchange sums where it should average":
        Bug("Scattering.finish", replace("scale.op == dist.ReduceOp.AVG", "False"),
            "test_bf16_parameters_sum_microbatches_in_fp32"),
    "rows of the wrong rank are sent":
        Bug("SendRing.exchange", replace("place.begin + self.rank * nbytes", "place.begin"),
            "test_gradients_in_the_ring"),
    "a later round of a large gather writes over the first":
        Bug("_rounds", replace("part.target + begin * row_nbytes", "part.target"), "test_gathers_of_several_tensors"),
    "rounds of a large gather do not take turns in the stage":
        Bug("CopyEngine._gather", replace("self._num_rounds % 2", "self._num_rounds // 2 % 2"),
            "test_gathers_of_ranks_that_get_on_in_any_order"),
    "more reductions in flight than allowed":
        Bug("ReductionsInFlight.reducing", flip("... >= self._max_inflight", ">"),
            "test_reductions_in_flight_are_bounded"),
    "rows of a short shard lie at its end":
        Bug("WeightLayout.filled", argument("narrow", 1, "self.chunk_rows - self.local_rows"),
            "test_penalty_on_sharded_parameters_adds_to_their_gradient"),
    "freezing is not followed":
        Bug("ManagedParam.follow_frozen", argument("requires_grad_", 0, "True"), "test_silent_params.py::TestFreezing"),
    "hook after the accumulation is not run":
        Bug("ReducedGradient.publish", drop("post_hook"), "test_parameter_hooks_fire_once_with_the_reduced_gradient"),
    "what a gradient hook returns is dropped":
        Bug("ReducedGradient.publish",
            replace("reduced = _run_tensor_hooks(...)", "_run_tensor_hooks(hooks, param, reduced, spec)"),
            "test_parameter_hooks_may_replace_the_gradient"),
    "saved view begins at the wrong element":
        Bug("SavedWeights._unpack", replace("begin + packed.offset", "begin"),
            "test_views_slices_and_convolved_tables"),
    "write before backward is not seen":
        Bug("check_unmodified", never("not is_same_to_autograd(weight.version, version)"),
            "test_weight_modified_between_forward_and_backward_raises"),
    "digest does not see the order":
        Bug("_mixed", replace("piece + places * _STRIDE", "piece"), "test_the_order_of_elements_counts"),
    "replicas are not compared":
        Bug("agree_to_begin", negate("has_replicas(param.mesh)"),
            "test_ranks_that_begin_with_other_values_are_refused"),
    "gather backend that one rank lacks":
        Bug("_make_on_all_ranks", assign("reasons", "[reason] if reason else []"),
            "test_automatic_choice_is_the_same_on_all_ranks_and_told"),
    "last weight gradients of a split backward":
        Bug("_replace_backward.run_part", drop("complete"), "test_gtp_shard_pipeline.py::TestPipeline::test_schedules"),
    "graph reads the inputs of its recording": Bug("RecordedStep.replay", drop("copy_"), "test_each_call_is_one_step"),
    "replay is no step to the runtime":
        Bug("RecordedStep.replay", drop("note_step"), "test_eager_steps_between_replays_see_new_weights"),
    "changed shape is not seen":
        Bug("signature", replace("(..., leaf.shape, leaf.stride(), leaf.dtype, leaf.device)",
            "(type(leaf), leaf.stride(), leaf.dtype, leaf.device)"),
            "test_other_shapes_and_values_get_graphs_of_their_own"),
    "changed hyperparameter is not seen":
        Bug("RecordedStep._check_constant", replace("before.get(key) != now.get(key)", "key not in before"),
            "test_baked_in_hyperparameters_must_stay"),
    "switch of training is not seen":
        Bug("Surroundings._describe", replace("[module.training for module in modules]", "[]"),
            "test_changes_that_graphs_do_not_know_start_anew"),
    "second use in a recorded block": Bug("Recording.target", assign("is_taken", "False"),
            "test_replays_are_eager_steps"),
    "graph is replayed before its backward":
        Bug("_CapturedBlock.__call__", never("graph.awaits_backward"), f"{CAPTURE_BLOCKS}::test_microbatches"),
    "all-reduce hook changes a copy":
        Bug("ReducedGradient.publish", argument("hook", 0, "reduced.clone()"), "test_replicas_of_ones_own"),
    "padding of a hook's tensor becomes rows":
        Bug("_without_padding", replace("layout.filled(tensor)", "tensor"), "test_sixteen_bits_cross_the_wire"),
}
