"""Planted bugs of what runs: gathers and passes, gradients, captured graphs."""

from __future__ import annotations

from planted_bugs_type import Bug

RUNTIME = [
    Bug(
        "no wait for a gather",
        "_comm/streams.py",
        "        elif work is not None:\n            work.wait()",
        "        elif work is not None:\n            pass",
        ("tests/distributed/test_gtp_shard_overlap.py::TestOverlap::test_prefetch_depth_changes_no_bit",),
    ),
    Bug(
        "stale gather is used",
        "_params/sharded_weight.py",
        "gathered.source is not shard or gathered.version != (self.param._version, shard._version, self.num_updates)",
        "gathered.source is not shard",
        ("tests/distributed/test_gtp_shard_reads.py::TestReads::test_step_in_the_middle_of_a_forward",),
    ),
    Bug(
        "optimizer steps are not counted",
        "_schedule/optimizer_steps.py",
        "            watcher.note_step(updated)",
        "            pass",
        (
            "tests/distributed/test_gtp_shard_switches.py::TestSwitches::test_weights_kept_after_backward_serve_the_next_microbatch",
        ),
    ),
    Bug(
        "kept weight outlives its pass",
        "_schedule/keep_and_free.py",
        "if weight.is_cut_again or not (weight.is_pinned or not weight.flags.reshard_after_backward):",
        "if weight.is_cut_again:",
        (
            "tests/distributed/test_gtp_shard_overlap.py::TestOverlap::test_values_written_between_forwards_are_used_at_once",
        ),
    ),
    Bug(
        "kept weight survives a state dict",
        "_modules/managed_module.py",
        "                self._gtp_binding.group.runtime.drop_kept(managed)",
        "                pass",
        ("tests/distributed/test_gtp_shard_state_dict.py::TestStateDict::test_r13_a_load_counts_in_the_next_forward",),
    ),
    Bug(
        "prefetch crosses the end of backward",
        "_schedule/runtime.py",
        "        self.reads.release_read_in_backward()\n        self._drop_prefetched()\n        self._end_keeps()",
        "        self.reads.release_read_in_backward()\n        self._end_keeps()",
        ("tests/distributed/test_gtp_shard_overlap.py::TestOverlap::test_changing_choice_of_layers_stays_right",),
    ),
    Bug(
        "prefetch of freed shards",
        "_modules/torch_patches.py",
        "                runtime.drop_prefetched_of(managed)",
        "                pass",
        ("tests/distributed/test_gtp_shard_fsdp.py::TestOrder::test_gathers_read_only_what_fully_shard_has_gathered",),
    ),
    Bug(
        "gradient late for fully_shard",
        "_modules/torch_patches.py",
        "            runtime.publish(managed)",
        "            pass",
        ("tests/distributed/test_gtp_shard_fsdp.py::TestFullyShardOutside::test_per_block_and_root",),
    ),
    Bug(
        "freed buffer is not poisoned",
        "_schedule/keep_and_free.py",
        "                    poison(gathered.buffer)",
        "                    pass",
        (
            "tests/distributed/test_gtp_shard_overlap.py::TestOverlap::test_poison_fills_a_freed_buffer_but_no_escaped_reference",
        ),
    ),
    Bug(
        "plan is never observed again",
        "_schedule/order_of_uses.py",
        "        if observed != uses:",
        "        if not uses:",
        ("tests/unit/test_schedule.py::TestChain::test_pass_that_ends_early_shortens_the_plan",),
    ),
    Bug(
        "window is one use short",
        "_schedule/order_of_gathers.py",
        "max(position - window.depth + 1, 0)",
        "max(position - window.depth + 2, 0)",
        ("tests/unit/test_schedule.py::TestChain::test_window_slides_by_one_use",),
    ),
    Bug(
        "plan does not move on after a deviation",
        "_schedule/order_of_uses.py",
        "            cursors[lane] = uses.index(use, cursor) + 1",
        "            cursors[lane] = cursor",
        ("tests/unit/test_schedule.py::TestChain::test_skipped_uses_move_the_window_ahead",),
    ),
    Bug(
        "launch is never full",
        "_schedule/order_of_gathers.py",
        "total <= min(limit, max(before, _QUICK_NBYTES))",
        "total <= limit",
        ("tests/unit/test_schedule.py::TestTogether",),
    ),
    Bug(
        "budget of kept weights is not spent",
        "_schedule/order_of_gathers.py",
        "                left -= sizes[use]",
        "                pass",
        ("tests/unit/test_schedule.py::TestKept",),
    ),
    Bug(
        "sum in the place of the mean",
        "_comm/collectives.py",
        "            return ReduceScale(dist.ReduceOp.AVG, None, None)",
        "            return ReduceScale(dist.ReduceOp.SUM, None, None)",
        ("tests/distributed/test_gtp_shard_gradients.py::TestGradients::test_all_ones_gradient_on_one_axis_meshes",),
    ),
    Bug(
        "float16 is divided twice",
        "_comm/collectives.py",
        "return ReduceScale(dist.ReduceOp.SUM, predivide, factor / predivide)",
        "return ReduceScale(dist.ReduceOp.SUM, predivide, factor)",
        (
            "tests/distributed/test_gtp_shard_gradients.py::TestGradients::test_all_ones_gradient_with_a_reduction_in_float16",
        ),
    ),
    Bug(
        "divisor without the replicas",
        "_params/managed_param.py",
        "self.num_ranks = mesh.size()",
        "self.num_ranks = mesh.size(mesh.ndim - 1)",
        (
            "tests/distributed/test_gtp_shard_gradients.py::TestGradients::test_all_ones_gradient_with_a_reduction_in_float16",
        ),
    ),
    Bug(
        "no all-reduce over replicas",
        "_schedule/reduce_gradients.py",
        "            all_reduce_in_order(slot, scale, replicate, self._comm)",
        "            pass",
        (
            "tests/distributed/test_gtp_shard_gradients.py::TestGradients::test_r20_rank_distinct_gradients_are_averaged_through_every_gather",
        ),
    ),
    Bug(
        "whole gradients skip the replicas",
        "_schedule/whole_gradients.py",
        "        for group in active[1:]:",
        "        for group in active[2:]:",
        (
            "tests/distributed/test_gtp_shard_gradients.py::TestGradients::test_r20_rank_distinct_gradients_are_averaged_through_every_gather",
        ),
    ),
    Bug(
        "second use replaces the first gradient",
        "_params/managed_param.py",
        "            self.reduced += reduced",
        "            self.reduced = reduced",
        (
            "tests/distributed/test_gtp_shard_overlap.py::TestOverlap::test_r4_reused_module_gathers_equal_uses_and_gradients_add_up",
        ),
    ),
    Bug(
        "microbatch replaces the gradient",
        "_params/managed_param.py",
        "            total += reduced",
        "            total = reduced",
        (
            "tests/distributed/test_gtp_shard_mixed_precision.py::TestMixedPrecision::test_what_the_user_does_to_grad_between_microbatches_counts",
        ),
    ),
    Bug(
        "wide sum of microbatches is dropped",
        "_params/managed_param.py",
        "            self._wide_grad = reduced",
        "            pass",
        (
            "tests/distributed/test_gtp_shard_gradients.py::TestGradients::test_bf16_parameters_sum_microbatches_in_fp32",
        ),
    ),
    Bug(
        "unsynced microbatch is overwritten",
        "_schedule/reduce_gradients.py",
        "            return weight.unsharded_grad, True",
        "            return weight.unsharded_grad, False",
        (
            "tests/distributed/test_gtp_shard_switches.py::TestSwitches::test_microbatches_without_sync_communicate_nothing",
        ),
    ),
    Bug(
        "weight unused in the last microbatch",
        "_schedule/reduce_gradients.py",
        "                self.submit(weight, weight.unsharded_grad)",
        "                pass",
        (
            "tests/distributed/test_gtp_shard_gradients.py::TestGradients::test_r27_first_and_last_use_in_different_microbatches",
        ),
    ),
    Bug(
        "rows before the last all-reduce are lost",
        "_schedule/reduce_gradients.py",
        "            slot += weight.unreplicated_grad",
        "            pass",
        (
            "tests/distributed/test_gtp_shard_switches.py::TestSwitches::test_replicas_are_reduced_in_the_last_microbatch_alone",
        ),
    ),
    Bug(
        "whole unsynced gradient is lost",
        "_params/whole_param.py",
        "        return unsynced.add_(grad)  # rounded once, after the addition",
        "        return grad.to(self.reduce_dtype)",
        (
            "tests/distributed/test_gtp_shard_switches.py::TestSwitches::test_microbatches_without_sync_communicate_nothing",
        ),
    ),
    Bug(
        "whole gradient counts twice",
        "_params/whole_param.py",
        "        grad, self.leaf.grad = self.leaf.grad, None",
        "        grad = self.leaf.grad",
        (
            "tests/distributed/test_gtp_shard_gradients.py::TestGradients::test_r20_rank_distinct_gradients_are_averaged_through_every_gather",
        ),
    ),
    Bug(
        "reduce_dtype is ignored",
        "_params/managed_param.py",
        "= policy.reduce_dtype or self.compute_dtype",
        "= self.compute_dtype",
        ("tests/distributed/test_gtp_shard_gradients.py::TestGradients::test_fp32_reduction_of_bf16_compute_is_exact",),
    ),
    Bug(
        "sum in the dtype of the wire",
        "_comm/reduce_scatter.py",
        "else torch.promote_types(wire_dtype, torch.float32)",
        "else wire_dtype",
        (
            "tests/distributed/test_gtp_shard_reductions.py::TestReductions::test_error_does_not_see_what_rounding_in_the_ring_loses",
        ),
    ),
    Bug(
        "exchange sums where it should average",
        "_comm/reduce_scatter.py",
        "        is_mean, own, rank = scale.op == dist.ReduceOp.AVG, [], 0",
        "        is_mean, own, rank = False, [], 0",
        ("tests/distributed/test_gtp_shard_reductions.py::TestReductions::test_bf16_parameters_accumulate_in_fp32",),
    ),
    Bug(
        "rows of the wrong rank are sent",
        "_comm/send_ring.py",
        "place.begin + self.rank * nbytes",
        "place.begin",
        ("tests/unit/test_copy_engine.py::test_gradients_in_the_ring",),
    ),
    Bug(
        "a later round of a large gather writes over the first",
        "_comm/copy_engine.py",
        "part.target + begin * row_nbytes",
        "part.target",
        ("tests/unit/test_copy_engine.py::test_large_gathers_take_rounds",),
    ),
    Bug(
        "rounds of a large gather do not take turns in the stage",
        "_comm/copy_engine.py",
        "half = self._num_rounds % 2",
        "half = self._num_rounds // 2 % 2",
        ("tests/unit/test_copy_engine_streams.py::test_gathers_of_ranks_that_get_on_in_any_order",),
    ),
    Bug(
        "more reductions in flight than allowed",
        "_comm/reductions_in_flight.py",
        "len(self._reductions) >= self._max_inflight",
        "len(self._reductions) > self._max_inflight",
        ("tests/distributed/test_gtp_shard_memory.py::TestMemory::test_reductions_in_flight_are_bounded",),
    ),
    Bug(
        "rows of a short shard lie at its end",
        "_params/layout.py",
        "slot.narrow(0, 0, self.local_rows)",
        "slot.narrow(0, self.chunk_rows - self.local_rows, self.local_rows)",
        (
            "tests/distributed/test_gtp_shard_gradients.py::TestGradients::test_tied_uneven_vocabulary_updates_every_row",
        ),
    ),
    Bug(
        "freezing is not followed",
        "_params/managed_param.py",
        "self.leaf.requires_grad_(self.param.requires_grad)",
        "self.leaf.requires_grad_(True)",
        (
            "tests/distributed/test_gtp_shard_gradients.py::TestGradients::test_a_weight_that_is_frozen_between_steps_is_reduced_no_more",
        ),
    ),
    Bug(
        "hook after the accumulation is not run",
        "_params/managed_param.py",
        "            post_hook(param)",
        "            pass",
        ("tests/distributed/test_gtp_shard_switches.py::TestSwitches::test_hooks_fire_once_with_the_right_values",),
    ),
    Bug(
        "what a gradient hook returns is dropped",
        "_params/managed_param.py",
        "            reduced = _run_tensor_hooks(",
        "            _run_tensor_hooks(",
        ("tests/distributed/test_gtp_shard_hooks.py::TestHooks::test_parameter_hooks_may_replace_the_gradient",),
    ),
    Bug(
        "saved view begins at the wrong element",
        "_params/saved_for_backward.py",
        "begin + packed.offset",
        "begin",
        ("tests/distributed/test_gtp_shard_reads.py::TestReads::test_slices_of_a_weight",),
    ),
    Bug(
        "write before backward is not seen",
        "_params/saved_for_backward.py",
        "    if weight.version != version:",
        "    if weight.version < version:",
        (
            "tests/distributed/test_gtp_shard_runtime.py::TestPasses::test_weight_modified_between_forward_and_backward_raises",
        ),
    ),
    Bug(
        "digest does not see the order",
        "_comm/agreement.py",
        "mixed = piece + places * _STRIDE",
        "mixed = piece",
        ("tests/unit/test_digest.py::test_the_order_of_elements_counts",),
    ),
    Bug(
        "replicas are not compared",
        "_schedule/first_forward.py",
        "isinstance(param, WholeParam) or has_replicas(param.mesh)",
        "isinstance(param, WholeParam) or not has_replicas(param.mesh)",
        ("tests/distributed/test_gtp_shard_reads.py::TestReads::test_ranks_that_begin_with_other_values_are_refused",),
    ),
    Bug(
        "gather backend that one rank lacks",
        "_comm/gather_backends.py",
        "    if reasons:\n        ranks",
        "    if reason:\n        ranks",
        (
            "tests/distributed/test_gather_backends.py::TestGatherBackends"
            "::test_automatic_choice_is_the_same_on_all_ranks_and_told",
        ),
    ),
    Bug(
        "last weight gradients of a split backward",
        "_modules/torch_patches.py",
        "                runtime.complete_gradients()",
        "                pass",
        ("tests/distributed/test_gtp_shard_pipeline.py::TestPipeline::test_zero_bubble",),
    ),
    Bug(
        "graph reads the inputs of its recording",
        "graphs/record_step.py",
        "            target.copy_(source, non_blocking=True)",
        "            pass",
        ("tests/distributed/test_capture_step.py::TestCaptureStep::test_each_call_is_one_step",),
    ),
    Bug(
        "replay is no step to the runtime",
        "graphs/record_step.py",
        "            runtime.note_step(self._written)",
        "            pass",
        ("tests/distributed/test_capture_step.py::TestCaptureStep::test_eager_steps_between_replays_see_new_weights",),
    ),
    Bug(
        "changed shape is not seen",
        "graphs/record_again.py",
        "return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device",
        "return type(leaf), leaf.stride(), leaf.dtype, leaf.device",
        (
            "tests/distributed/test_capture_step.py::TestCaptureStep::test_other_shapes_and_values_get_graphs_of_their_own",
        ),
    ),
    Bug(
        "changed hyperparameter is not seen",
        "graphs/record_step.py",
        "            if before.get(key) != now.get(key):",
        "            if key not in before:",
        ("tests/distributed/test_capture_step.py::TestCaptureStep::test_baked_in_hyperparameters_must_stay",),
    ),
    Bug(
        "switch of training is not seen",
        "graphs/record_again.py",
        "            [module.training for module in modules],",
        "            [],",
        ("tests/distributed/test_capture_step.py::TestCaptureStep::test_changes_that_graphs_do_not_know_start_anew",),
    ),
    Bug(
        "second use in a recorded block",
        "graphs/record_block.py",
        " or any(weight is other.weight for other in self.written):",
        ":",
        ("tests/distributed/test_capture_blocks.py::TestCaptureBlocks::test_replays_are_eager_steps",),
    ),
    Bug(
        "graph is replayed before its backward",
        "graphs/capture_blocks.py",
        "        if graph.awaits_backward:",
        "        if False:",
        ("tests/distributed/test_capture_blocks.py::TestCaptureBlocks::test_microbatches",),
    ),
]
