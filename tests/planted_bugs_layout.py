"""Planted bugs of where things lie: placements, meshes, random numbers, checkpoints, unequal replicas."""

from __future__ import annotations

from planted_bugs_changes import argument, assign, drop, flip, negate, never, replace, returns, without
from planted_bugs_type import Bug

# fmt: off
LAYOUT = {
    "mesh of a single parameter is forgotten":
        Bug("_own_mesh", replace("in_rank_order(mesh)", "default"), "test_meshes_of_single_parameters"),
    "param.data leaves the shard": Bug("set_data", drop("set_local"), "test_data_of_parameters"),
    "param.data shares memory with the tensor given":
        Bug("set_data", replace("part.to(...)", "part"), "test_data_of_parameters"),
    "rows that no chunk has":
        Bug("chunk_rows", replace("-(-num_blocks // num_chunks)", "num_blocks // num_chunks"),
            "test_chunks_are_whole_blocks_in_order"),
    "last uneven chunk is full":
        Bug("chunk_size_and_offset", returns("(rows, offset)"), "test_chunks_are_whole_blocks_in_order"),
    "layouts of other blocks are equal":
        Bug("_BlockGTPShard.__eq__",
            replace("(self.dim, self.block_size) == (other.dim, other.block_size)", "self.dim == other.dim"),
            "test_block_layouts_equal_only_themselves"),
    "padding is not told":
        Bug("_BlockGTPShard._split_tensor", replace("largest - size", "0"), "test_split_tensor_gives_the_chunks"),
    "block size is lost by a transpose":
        Bug("propagation:_put_back", assign("placements[axis]", "q"), "test_transposes_carry_the_blocks_along"),
    "maximum of a shard without rows":
        Bug("needs_rows", never("schema.op in _NEED_ROWS"), "test_other_ops_give_right_values"),
    "shape before another axis":
        Bug("_shape_before", argument("mesh_coordinate", 1, "axis"), "test_redistribute_to_every_layout_and_back"),
    "rows that move are not cut anew":
        Bug("_is_recut", argument("any", 0, "(_shards(p, dim) for p, _ in changed)"),
            "test_redistribute_to_every_layout_and_back"),
    "each rank draws the first rows":
        Bug("_write_own_part", replace("compat.own_part(...)", "full.flatten()[: local.numel()].view(local.shape)"),
            "test_reset_parameters"),
    "a draw ignores the strides of the tensor":
        Bug("empty_whole", argument("empty_strided", 1, "torch.empty(tensor.shape).stride()"),
            "test_draws_follow_the_strides_of_the_tensor"),
    "noise of the first rows on each rank":
        Bug("WholeDraws.draw_like", replace("compat.own_part(...)", "full[: len(compat.local_tensor(source))]"),
            "test_new_random_tensors_have_the_rows_of_one_process"),
    "a view of a view of a copy counts as the shard":
        Bug("mark_copies", without("is_copy(operand.spec)"), "test_other_writes_to_a_view_of_a_copy_raise"),
    "truth value of a rank's own part":
        Bug("WholeDraws.read_scalar", negate("self.is_on_our_mesh(target)"), "test_init_functions"),
    "sum of one shard counts for all":
        Bug("is_whole_scalar", without("spec.is_replicated()"), "test_only_whole_scalars_mix"),
    "whole parameters are summed in the norm":
        Bug("_propagate",
            replace("OutputSharding(output, map_specs(...), needs_redistribute=True)", "OutputSharding(output)"),
            "test_r10_submodule_with_a_mesh_of_its_own"),
    "overflow of one rank": Bug("unscale", drop("all_reduce"), "test_grad_scaler_skips_a_step_on_all_ranks_or_on_none"),
    "tie is lost":
        Bug("decide", replace("decisions[id(param)].sites.append(site)", "decisions[id(param)].sites[:] = [site]"),
            "test_penalty_on_sharded_parameters_adds_to_their_gradient"),
    "tie to an earlier call is lost":
        Bug("decide", without("manager_of_replaced(param)"), "test_tie_to_a_module_of_several_calls"),
    "block size of a placement is lost":
        Bug("_asked_placement", argument("GTPShard", "block_size", None), "test_shard_placement_fn"),
    "trained again after gtp_shard":
        Bug("_make_param", argument("Parameter", "requires_grad", "old.is_floating_point()"),
            "test_frozen_weights_are_not_reduced"),
    "ranks compare policies alone":
        Bug("agree_on_all_ranks", argument("_code_of", 0, r"'\n'.join(described[:4])"), "test_models_that_differ"),
    "replicas in another order":
        Bug("in_rank_order", argument("range", 0, "1"), "test_r11_a_mesh_with_permuted_columns_is_put_in_order"),
    "optimizer of before is not seen":
        Bug("_refuse_holders", replace("_early_optimizer(_living(torch.optim.Optimizer), names)", "None"),
            "test_optimizer_built_before"),
    "inverse of the order of ranks":
        Bug("start_process_group", replace("rank_order.index(rank)", "rank_order[rank]"),
            "test_rank_order_says_where_each_process_stands"),
    "batch axis without gtp":
        Bug("mesh:_build", replace("dense['replicate', 'dp', 'gtp']", "dense['replicate', 'dp']"),
            "test_meshes_hold_what_they_should_on_every_rank"),
    "copies of experts leave out expert_dp":
        Bug("mesh:_build", replace("expert['replicate', 'expert_dp']", "expert['replicate',]"),
            "test_copies_of_experts_are_along_replicate_and_expert_dp"),
    "tp draws unlike":
        Bug("MeshRNG.manual_seed", replace("DATA_AXES", "DENSE_AXES"),
            "test_what_ranks_draw_is_unlike_along_the_axes_of_a_region_only"),
    "stages draw the same numbers in a region":
        Bug("MeshRNG._resolve", replace("axis in axes or axis == 'pp'", "axis in axes"),
            "test_what_ranks_draw_is_unlike_along_the_axes_of_a_region_only"),
    "region seeded without its coordinates":
        Bug("MeshRNG._seed_of", replace("((axis, self._coordinates[axis]) for axis in names)", "names"),
            "test_what_ranks_draw_is_unlike_along_the_axes_of_a_region_only"),
    "region draws from the default stream":
        Bug("MeshRNG._draw", replace("self._common", "None"),
            "test_what_ranks_draw_is_unlike_along_the_axes_of_a_region_only"),
    "matrix is orthogonalized as its transpose":
        Bug("optim:_exchange", replace("result.t() if mine.dim else result", "result"),
            "test_r7_muon_has_the_bits_of_one_process"),
    "momentum of Muon is swapped":
        Bug("Muon._step_group", argument("lerp_", 1, "group['momentum']"), "test_r7_muon_has_the_bits_of_one_process"),
    "part of a plane begins elsewhere":
        Bug("_plane_begin", replace("spec.size(dim - ndim, begin)", "begin"), "test_one_recipe_into_another"),
    "blocks around a region are not cut off":
        Bug("_Region.values", argument("narrow", 1, "0"), "test_bfloat16_into_native_and_back"),
    "box of a slice forgets its offset":
        Bug("box_of_rank", replace("offset[weight.dim] += start", "offset[weight.dim] = start"),
            "test_boxes_are_those_of_the_placement"),
    "segment has another owner":
        Bug("segments_of", replace("holders[cell][replica].append(rank)",
            "holders[cell][replica].append(layout.replicas[replica].ranks[0])"),
            "test_sum_with_tensor_parallelism_of_equal_and_unequal_sizes"),
    "segment between unequal replicas is lost":
        Bug("segments_of",
            replace("boxes.values()", "(box for rank, box in boxes.items() if rank in layout.replicas[0].ranks)"),
            "test_printed_plan"),
    "small batch leaves a rank without samples":
        Bug("ReplicaLayout.batch_counts", replace("min(surplus) < 0", "min(surplus) < -1"),
            "test_elastic_plan.py::TestBatch"),
    "weights of unequal shares":
        Bug("ReplicaSync._weigh", replace("own[self._place.gtp] * len(own)", "own[self._place.gtp]"),
            "test_split_that_is_not_the_planned_one"),
    "copy of a segment counts as often as there are copies":
        Bug("ReplicaSync._make_channels", argument("Channel", 1, "1"), "test_tensor_parallel_replicas"),
    "tensor-parallel bias counts once too often":
        Bug("ReplicaSync._spread", assign("whole[slices]", "grad"), "test_tensor_parallel_replicas"),
    "marks of a rank without samples do not count":
        Bug("ReplicaSync.reduce_whole", replace("wire[:-len(used)]", "wire"),
            "test_whole_parameters_that_some_ranks_use"),
    "each replica clips by its own norm":
        Bug("clip_grad_norm_", replace("dist.broadcast(...)", "del mesh"),
            "test_clipping_keeps_replicas_equal_to_the_last_bit"),
    "rest of a box is lost":
        Bug("Box.subtract", replace("begin < end", "begin + 1 < end"),
            "test_subtract_leaves_boxes_that_do_not_overlap"),
    "nearest rank is not asked":
        Bug("plan_moves.nearest", replace("(replica_of[rank] - replica) % num_replicas", "replica_of[rank]"),
            "test_the_nearest_rank_sends"),
    "new rank joins the largest replica":
        Bug("members_of", replace("min", "max"), "test_ranks_that_join_go_to_the_smallest_replica"),
    "oldest step is recovered":
        Bug("_latest_complete_step", argument("sorted", "reverse", None),
            "test_the_latest_step_that_is_complete_is_taken"),
    "two replicas write a checkpoint":
        Bug("ReplicaSavePlanner.__init__", flip("mesh.place.replica == ...", "<="),
            "test_from_unequal_replicas_to_any_layout_and_back"),
    "a report draws parts without their blocks":
        Bug("pictures:parts_of", argument("chunk_size_and_offset", 3, None), "test_parts_are_what_ranks_hold"),
    "a report folds blocks that differ":
        Bug("_form", replace("(names, element.rest)", "names"), "test_blocks_that_differ_stay"),
    "a timeline draws a gather where its last use begins":
        Bug("pictures:_bars", replace("max(columns.end(position) for position in launch.positions)",
            "max(columns.begin(position) for position in launch.positions)"), "test_bars_end_with_their_last_use"),
    "plans of another rank's coordinate are kept":
        Bug("wrap_planner.clear_caches", drop("plan_cached.cache_clear()"), "test_plans_of_another_rank_are_forgotten"),
    "handler is put aside for all threads":
        Bug("_HandlersOfThread.__init__", assign("self._aside", "type('Shared', (), {})()"),
            "test_handler_is_put_aside_for_one_thread"),
    "handed over state runs code":
        Bug("handover:_read", argument("load", "weights_only", "False"), "test_code_is_not_run"),
    "handover reads files of other users":
        Bug("_stranger", never("found.st_uid != os.geteuid()"), "test_files_of_strangers_are_named_and_stay"),
    "handover writes through a link":
        Bug("leave_state", replace("... | os.O_EXCL | os.O_NOFOLLOW", "os.O_WRONLY | os.O_CREAT"),
            "test_nothing_is_written_through_a_link"),
    "handover takes the state of another job":
        Bug("handover:_read", never("name != path.name"), "test_files_of_strangers_are_named_and_stay"),
    "secret of the job is not asked": Bug("job_store", never("secret"), "test_elastic_regroup.py::TestSecret"),
    "checkpoint is written over the one before":
        Bug("_Writer.__init__", argument("__init__", 0, "self._final"),
            "test_a_save_that_fails_leaves_the_checkpoint_before"),
    "oldest checkpoints are kept":
        Bug("_complete", argument("sorted", "reverse", None), "test_newest_are_kept_and_found"),
    "files of a save that did not end stay":
        Bug("_Writer.prepare_global_plan", drop("unlink"), "test_a_save_that_fails_leaves_the_checkpoint_before"),
    "dtypes of planes are not compared":
        Bug("_check_dtype", never("... or found.itemsize != dtype.itemsize"), "test_planes_of_a_checkpoint"),
}
