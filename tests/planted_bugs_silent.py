"""Planted bugs of what would be wrong without a word: parameters and writes that escape, derivatives, orders."""

from __future__ import annotations

from planted_bugs_changes import argument, assign, drop, negate, never, replace, returns, without
from planted_bugs_type import Bug

SILENT_GROUPS = "test_silent_groups.py::TestSilentGroups"
CLOSED_GROUPS = "test_closed_groups.py::TestClosedGroups"
COPIES = "test_a_write_to_a_copy_of_a_whole_parameter_is_refused"

# fmt: off
SILENT = {
    "autograd gets copies of weights that are freed":
        Bug("refuse_mutable_saves", never("compat.are_saved_tensors_mutable()"),
            f"{SILENT_GROUPS}::test_a_context_in_which_saved_tensors_may_be_written_to_is_refused"),
    "a hook that mixes tensors is taken for code that reads a weight":
        Bug("_run_tensor_hooks", drop("explain"), "test_what_a_hook_gets_is_said_where_it_fails"),
    "a parameter gets gradients of the one before it":
        Bug("ManagedParam.follow", never("current is not self.param and self.has_unsynced"),
            "test_silent_params.py::TestReplacedParameters::test_between_microbatches"),
    "a whole parameter gets gradients of the one before it":
        Bug("WholeParam.has_unsynced", returns("False"),
            "test_silent_params.py::TestReplacedParameters::test_between_microbatches"),
    "an interrupted evaluation drops gradients":
        Bug("Runtime._drop_broken_forward", replace("self.reads.is_differentiated", "True"),
            "test_an_interrupted_evaluation_leaves_microbatches_alone"),
    "whatever stops a forward drops gradients":
        Bug("Steps.forget_interrupted", replace("KeyboardInterrupt", "BaseException"),
            "test_an_interrupted_microbatch_drops_the_others"),
    "the compiler traces what a backward calls":
        Bug("skip_package", drop("skip_code"),
            "test_compiled_steps.py::TestCompiledSteps::test_a_compiled_function_calls_backward"),
    "what code writes to a copy of a whole parameter is lost":
        Bug("WholeParam.gives_copies", replace("self.leaf.dtype != self.compute_dtype", "False"), COPIES),
    "what code writes to a whole parameter on the device stays there":
        Bug("WholeParam.gives_copies", replace("self.policies.offload is not None", "False"), COPIES),
    "what code writes to a copy of a whole parameter between unshard and reshard is lost":
        Bug("reshard_params", drop("errors.append(runtime.reads.misuse_outside())"), COPIES),
    "a write to one element rounds all of a parameter":
        Bug("WeightGroup.carry_writes", replace("torch.where(...)", "part"),
            "test_a_write_to_one_element_of_a_group_leaves_the_others"),
    "a write to one element rounds all of a weight with a recipe":
        Bug("WeightGroup._as_gathered", never("weight is member"),
            "test_a_write_to_one_element_of_a_group_leaves_the_others"),
    "compiled code loses what it writes":
        Bug("compiled_weight:_refuse_written", never("traced._version != version"),
            "test_writes_in_compiled_code_are_refused"),
    "an error at the end of a trace leaves what the compiler has entered":
        Bug("at_end_of_trace", replace("hooks.insert(0, run)", "hooks.append(run)"),
            "test_writes_in_compiled_code_are_refused"),
    "autograd reads weights of a block that are being gathered":
        Bug("GroupLeaves.free", drop("_close"),
            f"{CLOSED_GROUPS}::test_a_loss_on_what_a_block_computes_behind_its_output_is_refused"),
    "a forward that something other than an error has stopped frees what it has kept":
        Bug("frames:_call_block.run", replace("BaseException", "Exception"),
            f"{CLOSED_GROUPS}::test_a_backward_through_what_a_stopped_forward_has_kept"),
    "a backward in a forward frees what that has read":
        Bug("Gathering.release_read_outside", replace("not read.is_in_backward", "False"),
            f"{CLOSED_GROUPS}::test_a_backward_in_a_forward_leaves_it_what_it_has_read"),
    "a backward that raised is compared with the next one":
        Bug("LostWrites.forget_backward", drop("del self._seen_outside[group]"),
            f"{CLOSED_GROUPS}::test_a_backward_that_raised_runs_again"),
    "what unshard gathers is closed to who reads it at once":
        Bug("Gathering.hold_until_end", drop("open"),
            f"{CLOSED_GROUPS}::test_what_unshard_gathers_may_be_read_at_once"),
    "an error of autograd is taken for one of a block":
        Bug("_is_of_closed", replace("(leaf._version, leaf._version - 1) == counts", "True"),
            f"{CLOSED_GROUPS}::test_errors_of_others_are_not_explained"),
    "a parameter that a forward registers is used, and not trained":
        Bug("Runtime.exit", without("next(iter(replaced), None)"),
            f"{CLOSED_GROUPS}::test_parameters_that_a_forward_replaces_are_refused"),
    "what a forward freezes is unfrozen by the next one":
        Bug("WeightGroup._carry_switches", drop("member.param.requires_grad_(after)"),
            f"{CLOSED_GROUPS}::test_what_a_forward_freezes_and_unfreezes"),
    "weights of a block whose forward is stopped are freed":
        Bug("BlockUse.keep", drop("note_saved"), "test_what_a_hook_has_kept"),
    "writes into a state dict count no version":
        Bug("_save_to_state_dict", drop("_share_version"), "test_writes_reach_all_replicas"),
    "masters do not see what is loaded into planes":
        Bug("master_optimizer:_version_of", replace("native is None", "True"), "test_weights_that_were_loaded_count"),
    "parallelize_experts unties weights":
        Bug("_cut", replace("param.__dict__.get(_CUT)", "None"),
            "test_layers_that_share_a_weight_share_it_afterwards"),
    "new data of a parameter whose placement torch has swapped are lost":
        Bug("set_data", assign("has_shard", "any((isinstance(p, GTPShard) for p in spec.placements))"),
            "test_data_of_parameters"),
    "hooks get the gradient of each use within fully_shard":
        Bug("_wrap_fully_shard.post_backward", replace("not param.gradient.has_more_uses", "True"),
            "test_seed_200024_hooks_of_a_layer_that_runs_twice_within_fully_shard"),
    "a captured step does not see tensors in objects of objects":
        Bug("_hiding_place", never("is_object and (deeper := _hiding_place(inner, depth=depth - 1)) is not None"),
            "test_tensors_that_an_argument_hides_are_refused"),
    "what stays for a use that does not come outlives the forward":
        Bug("Runtime._end_forward", drop("end_stays"), "test_what_stays_for_a_use_that_does_not_come"),
    "gradients of named inputs are lost after a freeze":
        Bug("outside_of_modules:_run", drop("follow_frozen"), "test_frozen_in_between_and_named_as_inputs"),
    "copies of gathered weights stay":
        Bug("Gatherable.may_stay", replace("form.wire is None", "True"), "test_what_uses_make_copies_of_does_not_stay"),
    "a step counts for whole parameters in the next pass alone":
        Bug("Runtime.note_step", drop("follow_writes"), "test_compiled_function_around_the_model"),
    "rows of replicas of two dtypes are gathered as one":
        Bug("all_gather_by_dtype", replace("input.dtype", "None"), "test_weights_of_two_dtypes"),
    "a recomputed part of a block frees its group":
        Bug("GroupViews.hide", drop("_call_plainly"), "test_parts_of_blocks_that_the_root_checkpoints"),
    "a part of a block called first has no frame":
        Bug("Runtime.use_groups", drop("_hide_groups"), "test_the_first_calls_are_those_of_layers"),
    "a freeze that was taken back loses gradients":
        Bug("WeightGroup.begin_backward", never("self._carry_switches()"), "test_frozen_for_a_forward_in_between"),
    "and of single and whole parameters":
        Bug("ManagedParam.begin_backward",
            never("self.leaf.requires_grad is not self.param.requires_grad"),
            "test_frozen_for_a_forward_in_between"),
    "a full state dict changes with the next step":
        Bug("_copy_full_states.gather_and_copy.copied", replace("tensor.clone()", "tensor"),
            "test_full_state_dicts_are_copies"),
    "rank without rows has no values to convert":
        Bug("_Region.values", never("not prod(self.sizes)"), "test_into_masters_of_ranks_without_rows"),
    "what is frozen within whole_weights trains on":
        Bug("_put_shard", never("sharded.requires_grad is not whole.requires_grad"),
            "test_parameters_are_frozen_and_unfrozen_in_it"),
    "a layer is exported with the number of its weight":
        Bug("CompiledWeight.handle", never("compat.is_exporting()"), "test_silent_programs.py::TestRecordings"),
    "a symbolic trace keeps the values of now":
        Bug("AttributeReads.read", drop("refuse_symbolic_tracing"), "test_silent_programs.py::TestRecordings"),
    "a program of make_fx has whole parameters of now":
        Bug("frames:_call", never("compat.is_recording() and (params := module._gtp_binding.group.params)"),
            "test_silent_programs.py::TestRecordings"),
    "quantized elements are loaded without their scales":
        Bug("_check_is_value", never("found != dtype and not is_cast and not is_plane"),
            "test_pretrained.py::TestLoadPretrained::test_refusals"),
    "files of an earlier save stay beside those of a new one":
        Bug("_replace_earlier", drop("unlink"), "test_a_save_replaces_an_earlier_one_in_the_folder"),
    "second derivatives of a constant gradient are dropped":
        Bug("once_differentiable.run", argument("tuple", 0, "computed"),
            "test_silent_programs.py::TestSecondDerivatives"),
    "inputs of backward are not found": Bug("_with_leaves", drop("found += ..."), "test_inputs_get_their_gradients"),
    "ranks do not compare their orders of uses":
        Bug("Runtime._end_forward", drop("_compare_order"), "test_silent_programs.py::TestOrderOfUses"),
    "experts that parallelize_experts does not know stay whole":
        Bug("parallelize_experts", drop("_check_is_grouped"), "test_experts_that_would_stay_whole_are_refused"),
    "ranks do not compare what they launch in later steps":
        Bug("Gathering._gather", drop("note"), "test_another_order_in_a_later_step_is_refused"),
    "blocks that share a part are groups":
        Bug("group_blocks:_why_single", replace("module in shared", "False"),
            "test_compiled_blocks_that_share_a_part"),
    "parts of blocks are compiled no more":
        Bug("dress", drop("setdefault"), "test_parts_of_blocks_compiled_before_sharding_stay_so"),
    "blocks that are wrapped later are no groups":
        Bug("_without_wrappers", replace("len(managed) != 1", "managed"),
            "test_blocks_wrapped_after_sharding_are_freed_after_their_use"),
    "parameters that are added without a registration escape":
        Bug("_check_added", replace("runtime.steps.num_trained", "0"), "test_modules_that_come_later"),
    "the replaced parameter takes gradients":
        Bug("_make_param", never("old.requires_grad"), "test_held_in_another_way"),
    "backward does not see that parameters were replaced":
        Bug("ManagedParam.follow", drop("refuse_graphs"), "test_silent_params.py::TestReplacedParameters"),
    "hooks from before sharding are lost":
        Bug("_make_param", drop("move_hooks"), "test_hooks_from_before_sharding_run"),
    "a hook on what a fused layer does not read never runs":
        Bug("AttributeReads.misuse_in", never("is_fused"), "test_hook_on_what_a_fused_layer_does_not_read"),
    "frozen in the last microbatch, earlier gradients are lost":
        Bug("ReducedGradient.publish", replace("reduced is None", "reduced is None or not self.param.requires_grad"),
            "test_gradients_of_a_weight_that_is_frozen_later"),
    "a gradient at the parameter itself stays local":
        Bug("WholeParam._take_direct", drop("add_local_grad"), "test_silent_params.py::TestDirectReads"),
    "parameters that a rank did not use are left out of the sum":
        Bug("Runtime.note_backward", assign("param.gradient.awaits_reduction", "False"),
            "test_whole_parameters_need_no_switch"),
    "weights that a rank did not use are left out of the reduction":
        Bug("Gradients.complete", never("weight.flags.reduce_scatter_unused_params"),
            "test_gradients_are_those_of_fully_shard"),
    "weights that ranks use in different ways are gathered at their use":
        Bug("Runtime._begin_forward", drop("gather_for_any_use"), "test_one_gather_of_each_weight"),
    "a write in a forward is lost":
        Bug("AttributeReads.misuse_in", replace("return written_to_no_effect(...)", "continue"),
            "test_a_write_to_what_is_read_is_refused"),
    "what was gathered ahead outlives a write":
        Bug("ManagedParam.num_data_writes", replace("tensor._version", "0"), "test_momentum_encoders"),
    "a write between unshard and reshard is lost":
        Bug("reshard_params", never("error is not None"), "test_between_unshard_and_reshard"),
    "a weight that stays gathered keeps its old values":
        Bug("_write_foreach", drop("note_written"), "test_shards_of_weights_that_stay_gathered"),
    "copies of whole parameters part between ranks":
        Bug("GatheredOptimizer.step", drop("_broadcast"), "test_copies_of_whole_parameters_stay_equal"),
    "an optimizer gets the loss of one rank":
        Bug("GatheredOptimizer._mean_over_ranks", drop("all_reduce"), "test_a_closure_gives_the_loss_of_all_ranks"),
    "an optimizer that evaluates the model in the middle of its step goes on with old gradients":
        Bug("GatheredOptimizer._step_by", replace("versions != [param._version for param in owned]", "False"),
            "test_one_that_evaluates_the_model_in_the_middle_is_refused"),
    "blocks get inputs in another dtype than that of their weights":
        Bug("_cast_into_blocks", drop("binding.input_casts = casts"), "test_they_are_cast_as_in_fully_shard"),
    "a sum that a model keeps in float32 is rounded in each block":
        Bug("InputCasts.of", replace("self._is_needed is None", "True"),
            "test_a_wide_sum_from_block_to_block_stays_wide"),
    "blocks of a compiled model get inputs in another dtype":
        Bug("InputCasts.of", assign("self._is_needed_in_graph", "False"), "test_they_are_cast_as_in_fully_shard"),
    "what is written to the local tensor of .data does not count":
        Bug("ManagedParam.counted_data", drop("share_version"),
            "test_the_first_write_is_to_the_local_tensor"),
    "a look in inference mode breaks the next forward":
        Bug("ManagedParam.counted_data", replace("torch.inference_mode(False)", "torch.no_grad()"),
            "test_one_rank_looks"),
    "foreach functions write through .data, and nothing counts":
        Bug("_write_foreach", drop("increment_version"), "test_ways_to_write"),
    "autograd refuses what it accepts in one process, after writes through .data":
        Bug("is_same_to_autograd", replace("version[:3] == other[:3]", "version == other"), "test_ways_to_write"),
    "what .data gave before the groups were made does not count in them":
        Bug("GroupShards.follow", assign("self.data", "[]"), "test_data_that_was_taken_before"),
    "names of what ranks send are looked up in torch":
        Bug("agreement:_dtype", never("not isinstance(dtype, torch.dtype)"),
            "test_what_is_sent_by_a_stranger_runs_nothing"),
    "a forward's parameters are shards":
        Bug("_as_users_see", never("may_gather and runtime.reads.gives_full_params"),
            "test_a_penalty_on_all_parameters"),
    "writes to parameters where gradients are disabled are lost":
        Bug("AttributeReads.gives_full_params", replace("not self.is_differentiated", "True"),
            "test_momentum_encoders"),
    "a group that was gathered ahead outlives a write":
        Bug("ManagedParam.counted_data", drop("self.group.shards.data += ..."), "test_momentum_encoders"),
    "sums of bits are compared in sight of checkpointing":
        Bug("is_changed", replace("compat.unseen_by_checkpoint_policies()", "__import__('contextlib').nullcontext()"),
            "test_seed_61005_selective_checkpointing_beside_a_forward_that_is_looked_at"),
    "a forward that was interrupted leaves its frames":
        Bug("_in_frame", drop("runtime.leave(depth)"), "test_at_the_end_of_a_frame"),
    "an interrupt leaves the modules of a block with their full weights":
        Bug("WeightGroup.begin_forward", drop("put_back"), "test_unshard"),
    "a recorded microbatch loses the sums of groups":
        Bug("places_of_sums", drop("owners += [group.pending_grad for group in runtime.members.groups]"),
            "test_unsynced_gradients_of_blocks_survive_replays"),
    "a replayed microbatch does not say whose gradients it leaves":
        Bug("RecordedStep.replay", drop("pending.owed |= owed"), "test_unsynced_gradients_of_blocks_survive_replays"),
    "an input that a block returns begins its backward again":
        Bug("BlockUse.watch", replace("made - before or made", "made"),
            "test_an_input_that_a_block_returns_is_no_use_of_it"),
    "a cell that was interrupted between microbatches leaves gradients":
        Bug("Runtime._begin_forward", drop("forget_what_was_given_up"), "test_between_microbatches_of_a_notebook"),
    "a second thread joins the pass of another one":
        Bug("OneThread.enter", never("self._in_frame"), "test_a_second_thread_is_refused"),
    "a weight of a group that is frozen in the last microbatch loses earlier gradients":
        Bug("GroupGradients.expected", replace("weight in self.owed", "False"),
            "test_gradients_of_a_weight_that_is_frozen_later"),
    "a weight that was frozen after its forward adds to the sum of earlier microbatches":
        Bug("Gradients.target", without("not _is_frozen(weight)"),
            "test_frozen_between_forward_and_backward_of_the_last_microbatch"),
    "one of two tied modules that gets another parameter unties nothing":
        Bug("ManagedParam.begin_forward", never("0 < len(others) < len(sites) and not self.registration.is_cut_again"),
            "test_untied_after_gtp_shard"),
    "a forward unfreezes a copy of a weight to no effect":
        Bug("AttributeReads.misuse_in", never("seen.is_switched(weight)"),
            "test_switched_in_a_forward"),
    "a forward unfreezes copies of all weights of a layer to no effect":
        Bug("AttributeReads.full_params", never("seen.is_switched(param)"),
            "test_switched_in_a_forward"),
    "whole parameters of a group that are frozen lose earlier gradients":
        Bug("WeightGroup._follow_frozen", drop("follow_frozen"), "test_gradients_of_a_weight_that_is_frozen_later"),
    "a second backward that comes to no output of a block is not noticed":
        Bug("BlockUse.begin", drop("note_gradients"), "test_second_backward_without_the_first_one"),
    "second derivatives by an input are zeros":
        Bug("once_differentiable.run", replace("undifferentiable(x, *grads)", "undifferentiable(x)"),
            "test_what_is_not_computed_raises"),
    "second derivatives through a linear layer miss its weight":
        Bug("_dgrad_in_graph", replace("runtime.reads.value_in_passing(weight)",
            "(runtime.reads.value_in_passing(weight)[0].detach(), None)"), "test_gradient_penalties"),
    "a write through .data between unshard and reshard is lost in a group":
        Bug("Gathering.hold_until_end", drop("note_read_outside"),
            f"{SILENT_GROUPS}::test_writes_without_a_version_are_refused"),
    "a write through .data around a block is lost":
        Bug("LostWrites.found", replace("self._seen_outside.items()", "()"),
            f"{SILENT_GROUPS}::test_writes_without_a_version_are_refused"),
    "other memory behind a whole parameter is not noticed":
        Bug("WholeParam.take_back", replace("leaf.data_ptr() == self.shard.data_ptr()", "True"),
            f"{SILENT_GROUPS}::test_writes_without_a_version_are_refused"),
    "new data of a parameter of a group comes a forward late":
        Bug("LostWrites.refuse_new_data", never("member.group is not None"),
            "test_new_data_of_a_parameter_in_a_forward"),
    "a write through .data to a weight of a group is lost":
        Bug("_call_block", replace("group.untraced_write(seen)", "None"),
            f"{SILENT_GROUPS}::test_writes_without_a_version_are_refused"),
    "items of a module's parameters are shards in a forward":
        Bug("ReadParams.__getitem__", replace("self._binding.read(name, registered)", "registered"),
            "test_every_way_to_ask_for_a_parameter"),
    "a forward that the user has put in place is lost":
        Bug("dress", negate("attributes.get(name) is value"), "test_a_forward_that_the_user_puts_in_place_runs"),
    "a replacement in torch cannot be taken back":
        Bug("patches:replace", drop("append"), "test_each_is_in_use_and_torch_is_as_before_when_they_are_undone"),
    "launches of ranks with other models are taken for other ones":
        Bug("Setup.prepare_gatherables", assign("target.number", "target.index"),
            "test_first_forward_where_ranks_have_different_meshes"),
    "a wrapped forward computes with a single weight of a group":
        Bug("linear_forward", never("binding.block is not None"), "test_forwards_that_a_library_has_wrapped"),
    "state lies where others may enter":
        Bug("_own_directory", without("found.st_mode & _OTHERS"), "test_a_directory_that_others_may_enter_is_not_used"),
    "a failed handover leaves its file": Bug("leave_state", drop("unlink"), "test_a_failed_write_leaves_nothing"),
    "each model leaves a process group":
        Bug("_group_beside", never("known is not None"), "test_models_leave_nothing_behind"),
    "one process that measures listens on all interfaces":
        Bug("start_alone", replace("compat.HashStore()", "dist.TCPStore('localhost', 0, is_master=True)"),
            "test_one_process_listens_to_nobody"),
    "a checkpoint is removed before the next one has its name":
        Bug("_Writer.finish", replace("self._final.rename(self._replaced)", "shutil.rmtree(self._final)"),
            "test_a_rank_is_killed"),
    "a save removes what is no checkpoint":
        Bug("_check_replaceable", never("others"), "test_what_is_no_checkpoint_is_not_removed"),
    "states of gathered optimizers are lost with their owners":
        Bug("_lost_value", never("is_tensor and keys not in held and any(...)"), "test_gathered_states_get_new_owners"),
    "weights of a group that no rank has used get zeros":
        Bug("ReducedGradient._drop_zeros", never("not self.is_used_elsewhere"), "test_weights_that_no_rank_has_used"),
    "a rank says that it has used all weights of a group":
        Bug("GroupGradients.take", drop("zero_"), "test_weights_that_no_rank_has_used"),
    "new data of a gathered weight is lost":
        Bug("Seen.is_written", never("self.address and _address(self.value) not in (0, self.address)"),
            "test_new_data_of_what_is_read_is_refused_in_each_forward"),
    "each read between unshard and reshard is another tensor":
        Bug("AttributeReads.read_pinned", replace("seen is not None", "False"), "test_between_unshard_and_reshard"),
    "a hook at the node of a parameter never runs":
        Bug("_check_param", never("compat.has_hooks_at_node(param)"),
            "test_hooks_at_the_node_of_a_parameter_are_refused"),
    "a block that gtp_shard was called on gets inputs as they are":
        Bug("_call_block.run", replace("_inputs_of_call(block, args, kwargs)", "(args, kwargs)"),
            "test_each_call_casts"),
    "a part of a block has a call that nobody makes":
        Bug("_why_single", never("not called.isdisjoint(modules[1:])"), "test_a_call_on_a_part_of_a_block"),
    "blocks of an earlier call stay groups that nobody knows":
        Bug("_adopt_earlier", drop("split_groups"), "test_blocks_that_were_groups_train_on"),
    "gradients of microbatches are lost with the runtime that has them":
        Bug("refuse_in_flight", replace("runtime.steps.has_unsynced or runtime.steps.are_in_flight", "False"),
            "test_gradients_of_microbatches_are_not_lost"),
    "graphs of groups that are no more lose gradients":
        Bug("Runtime.split_groups", drop("refuse_graphs"), "test_a_forward_of_before_gets_no_backward"),
    "a block that gtp_shard was called on trains what was added to it alone":
        Bug("_call_block", drop("_check_added"), "test_modules_added_to_a_block_that_gtp_shard_was_called_on"),
    "containers that a forward makes have new parameters":
        Bug("AttributeReads.has_given", returns("False"), "test_containers_that_a_forward_makes"),
    "a block returns a weight whose memory is freed":
        Bug("GroupLeaves.has_memory_of", returns("False"), "test_reads_outside_of_a_block_and_outputs_in_objects"),
    "a metaclass records our classes":
        Bug("own_class", replace("maker.__new__(type(cls), cls.__name__, bases, body)",
            "type(cls.__name__, bases, body)"), "test_classes_and_metaclasses_are_not_asked"),
    "a layer of a block cannot be called alone":
        Bug("GroupViews.hide", drop("module.__dict__['_call_impl'] = call"), "test_layers_that_are_called_alone"),
    "the first use of all loses the gradient of its bias":
        Bug("WholeParam._take_grad_of_leaf",
            replace("_sum(take_grad(self._leaf_in_use), grad)", "take_grad(self._leaf_in_use)"),
            "test_the_first_use_of_all"),
    "a block is exported":
        Bug("frames:_call", without("compat.is_exporting()"), "test_recordings_of_blocks_are_refused"),
    "a backward reads weights of a group that were replaced":
        Bug("WeightGroup._follow_replaced", drop("refuse_graphs"), "test_groups_note_it"),
    "modules compute with other memory than that of their group":
        Bug("WeightGroup.begin_forward", never("self.leaves.are_elsewhere and self.leaves.put_back()"),
            "test_new_data_of_a_full_weight_raises_in_the_next_forward_at_the_latest"),
    "hooks of several parameters never run":
        Bug("gradient:_run_tensor_hooks", replace("compat.is_multi_grad_hook(hook)", "False"),
            "test_hooks_of_several_parameters_are_refused"),
    "poison reaches the shards":
        Bug("Keeper.free", drop("carry_writes"), "test_debugging_aids.py::TestPoisonOfWhatIsFreed"),
    "a write in a backward is lost":
        Bug("Runtime._finish_backward", replace("self.reads.misuse_in(...)", "None"),
            "test_in_a_backward"),
    "a write through .data in the backward of a block is lost":
        Bug("BlockUse.begin", drop("note_read"), "test_in_a_backward"),
    "a write through .data after the backward of a block is lost":
        Bug("LostWrites.note_read", replace("self._reads.frames or self._passes.is_in_backward", "self._reads.frames"),
            "test_in_a_backward"),
    "a block computes with shards that its forward has written":
        Bug("LostWrites.written_in_use", replace("group.version == group.leaves.version", "True"),
            "test_writes_to_shards_of_a_block_that_runs_are_refused"),
    "a block that stays gathered carries its writes over newer values":
        Bug("Gathering.release", never("target.group.carry_writes() and was_fresh"),
            "test_writes_to_a_block_that_stays_gathered"),
    "versions of replaced parameters repeat":
        Bug("WeightGroup.version", replace("shards.num_followed", "0"),
            "test_replaced_parameters_whose_versions_are_lower"),
    "gradients that no backward of a block has reduced stay for the next step":
        Bug("Runtime.refuse_lost_gradients", replace("group.leaves.num_gradients > number", "False"),
            "test_tensors_that_a_block_keeps_for_the_loss"),
    "counts for experts are tokens":
        Bug("_num_tokens", replace("max(num_flat, num_rows)", "num_flat"),
            "test_tokens_are_counted_in_the_inputs_of_the_first_forward"),
    "labels of images are tokens":
        Bug("_num_tokens", never("has_signals"),
            "test_tokens_are_counted_in_the_inputs_of_the_first_forward"),
    "a block that is called first of all is no group yet":
        Bug("_call_in_frame", never("binding.block is not None and method == 'forward'"),
            "test_the_first_call_of_all_is_that_of_a_block"),
    "autograd saves an alias as it was before a write":
        Bug("SavedWeights.watch", never("other.use.version != use.version"),
            "test_a_forward_that_writes_the_shard_itself"),
    "a tie is followed at its first place alone":
        Bug("GroupShards._are_same", replace("module._parameters.get(name) is not param",
            "module._parameters.get(name) is not param and name == member.registration.sites[0].name"),
            "test_a_tied_weight_that_is_replaced_at_one_place"),
    "a block may return a tensor that autograd does not follow into it":
        Bug("BlockUse._hold_for_hidden",
            never("any(output.requires_grad for output in outputs)"),
            "test_a_block_that_returns_a_detached_tensor_is_refused"),
    "each rank takes its rows of a gradient of the full tensor from its own data":
        Bug("outside_of_modules:install", drop("wrap_full_tensor"), "test_sharded_parameter_read_outside_of_forward"),
    "a full tensor without a gradient gets zeros, which are reduced":
        Bug("_FullTensor.forward", drop("set_materialize_grads"),
            "test_full_tensors_for_which_a_kernel_has_no_gradient"),
    "a hook at the node of a sharded parameter never runs":
        Bug("Runtime._begin_forward", drop("refuse_hooks_at_nodes"),
            "test_hooks_at_the_node_of_a_sharded_parameter_are_refused"),
    "a backward computes with data that were replaced":
        Bug("outside_of_modules:_set_data", drop("note_new_data"), "test_new_data"),
    "a backward gathers another frozen weight than its forward":
        Bug("ShardedWeight.refuse_graphs", drop("self.versions.num_updates += ..."),
            "test_other_parameters_and_another_forward"),
    "a backward computes with a whole parameter that was written":
        Bug("WholeParam.begin_backward", drop("follow_writes"), "test_in_place"),
    "a backward computes with what a foreach function has written":
        Bug("_write_foreach", drop("note_written"), "test_in_place"),
    "a backward computes with what was gathered before a write":
        Bug("Runtime.note_backward", drop("gather_written"), "test_weights_that_are_read_outside_of_their_block"),
    "a forward forgets what was written after unshard":
        Bug("LostWrites.begin_forward", replace("self.written_outside(self._members.weights)", "[]"),
            "test_between_unshard_and_reshard"),
    "an optimizer step forgets what was written after unshard":
        Bug("Runtime.note_step", never("errors"), "test_between_unshard_and_reshard"),
    "new data of a whole parameter lose its gradient":
        Bug("WholeParam._rebound", drop("set_grad_aside"), "test_new_data_between_microbatches"),
    "new data of a weight lose gradients of its group":
        Bug("WeightGroup._follow_replaced", drop("set_grad_aside"), "test_new_data_between_microbatches"),
    "an error calls a weight written that was replaced":
        Bug("check_unmodified", never("version[2] < weight.versions.replaced_at"),
            "test_silent_params.py::TestReplacedParameters"),
    "parameters in one memory become independent": Bug("validate_module", drop("_check_memory"), "test_in_one_memory"),
    "objects that hold an old parameter are not named":
        Bug("ties:_holders_of", never("not isinstance(holder, types.FrameType | types.GeneratorType)"),
            "test_held_in_another_way"),
    "a write to what a checkpoint policy has saved goes unseen":
        Bug("linear:_forward", replace("not is_policy_asked", "True"),
            "test_a_write_to_what_a_policy_has_saved_is_refused"),
    "a cast in the forward of a block does not reach its gathered weights":
        Bug("overrides:_apply.refuse_in_group", never("group is not None and name in binding.params"),
            "test_with_effect_in_a_forward"),
    "a cast without effect replaces parameters":
        Bug("_Changed.items", replace("self.apply(param) is not param", "True"),
            "test_without_effect_in_forwards_and_before_backwards"),
    "a new gathered optimizer that accelerate has reset is not filled":
        Bug("GatheredOptimizer.load_state_dict", replace("slot.param in self.state", "True"),
            "test_groups_schedules_and_checkpoints_on_another_mesh"),
}
