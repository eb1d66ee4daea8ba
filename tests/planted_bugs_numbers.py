"""Planted bugs of arithmetic: digests, low precision, layers, losses, experts."""

from __future__ import annotations

from planted_bugs_changes import argument, assign, drop, flip, never, replace, returns, without
from planted_bugs_type import Bug

GROUPS = "test_gtp_shard_groups.py::TestGroups"
QUANTIZED_GROUPS = "test_quantized_gather.py::TestQuantizedGroups"
WRITES, KEEPS = "test_writes_to_shards_are_quantized_anew", "test_what_keeps_float8_gemms_and_few_bytes"
RECIPES = "test_quant_cast.py::TestRecipes"
ONE_AXIS = "test_quantized_matrix.py::TestOneAxis"
GEMMS = "test_float8_gemms.py::TestGEMMs"
GATHERED = "test_quantized_gather.py::TestGathered"
TENSOR_PARALLEL = "test_gtp_shard_tp.py::TestTensorParallel"
EMBEDDING_EXCHANGE = "test_gtp_shard_embedding_exchange.py::TestEmbeddingExchange"

# fmt: off
NUMBERS = {
    "averages move the wrong way":
        Bug("ShardedEMA.update", argument("lerp_all", 2, "self.decay"), "test_same_bits_as_one_process"),
    "averages are written behind what fully_shard has gathered":
        Bug("ShardedEMA._params", drop("_reshard"), "test_same_bits_as_one_process"),
    "receivers add 16-bit gradients in 16 bits":
        Bug("add_rows", replace("torch.mean(rows, 0, dtype=out.dtype, out=out)", "out.copy_(torch.mean(rows, 0))"),
            "test_gradients_of_16_bits_travel_as_they_are"),
    "weights with native storage become whole values that nobody writes back":
        Bug("_refuse_some", never("native_of(param.param) is not None"), "test_native_weights_have_no_whole_values"),
    "whole values of another shape are broadcast":
        Bug("whole_weights:_put_shard", never("whole.shape != sharded.shape"),
            "test_another_shape_is_refused_and_the_others_are_put_back"),
    "parts of native weights under fully_shard are quantized by magnitudes of their own":
        Bug("NativeWeight._groups_of_part", never("cut.intersection(self.recipe.amax_dims)"),
            "test_equal_parts_with_one_scale_for_the_whole_weight"),
    "a model that is partly on the meta device is filled":
        Bug("pretrained:_leave_meta", never("len(on_meta) < len(params)"),
            "test_pretrained.py::TestLoadPretrained::test_refusals"),
    "the fused kernel adds where a mean is asked for":
        Bug("add_rows", replace("1 / num_ranks", "1.0"),
            "test_the_kernel_adds_only_where_the_first_forward_has_loaded_it"),
    "a graph's regions draw from the device's own state":
        Bug("RegionStates.entered", replace("self._states[kind]", "before"),
            "test_a_graph_has_a_state_for_each_region"),
    "a graph recomputes regions":
        Bug("MeshRNG._recorded", replace("_is_in_recomputation()", "False"),
            "test_a_graph_has_a_state_for_each_region"),
    "a microbatch of a group is not added to those before it":
        Bug("Gradients.reduce_group", drop("buffer += packed"),
            f"{GROUPS}::test_sums_over_unsynced_microbatches_keep_float32"),
    "groups keep quantized values of before":
        Bug("WeightGroup.begin_forward", drop("weight.forget_stale(...)"), "test_writes_to_shards_are_quantized_anew"),
    "groups overlook fused optimizers":
        Bug("count_writes", drop("param.versions.num_updates += 1"), "test_writes_to_shards_are_quantized_anew"),
    "quantized data of another version":
        Bug("QuantizedWire.is_current", replace("self._made_of == self.weight.version", "self._made_of is not None"),
            "test_writes_to_shards_are_quantized_anew"),
    "shards are rounded by magnitudes of their own":
        Bug("agree_on_amax", replace("wire.set_amax(part.view(amax.shape))", "wire.set_amax(amax)"),
            f"{QUANTIZED_GROUPS}::test_steps_equal_one_process"),
    "groups have rows in unequal chunks":
        Bug("_why_unlike", replace("not is_even", "False"), "test_what_keeps_float8_gemms_and_few_bytes"),
    "a recipe that asks for float8 GEMMs gets none":
        Bug("_why_not_rounded", replace('wire.recipe.compute == "float8"', "False"),
            "test_what_keeps_float8_gemms_and_few_bytes"),
    "each mesh of experts takes the whole budget":
        Bug("choose_kept", replace("left // len(others)", "left"), "test_schedule.py::TestKept"),
    "rowwise and columnwise blocks are swapped":
        Bug("Recipe.scale_block", argument("planes", 0, "Direction.COLUMNWISE"),
            f"{RECIPES}::test_equal_their_definitions"),
    "columnwise data are those of forward": Bug("_direction", replace("Direction.COLUMNWISE", "Direction.ROWWISE"),
            f"{ONE_AXIS}::test_r19_gtp"),
    "backward reads the rowwise data":
        Bug("ShardedWeight.set_wire", replace("Gatherable(self)", "self.for_forward"), f"{ONE_AXIS}::test_r19_gtp"),
    "largest e4m3 is that of another format":
        Bug("cast:E4M3_MAX", replace("448.0", "240.0"), f"{RECIPES}::test_equal_their_definitions"),
    "mxfp8 scale is rounded up too early":
        Bug("e8m0_scale", replace("0x600000", "0x500000"), f"{RECIPES}::test_equal_their_definitions"),
    "nvfp4 scale forgets the elements":
        Bug("nvfp4_tensor_scale", replace("E4M3_MAX * E2M1_MAX", "E4M3_MAX"),
            f"{RECIPES}::test_equal_their_definitions"),
    "ties of e2m1 go up": Bug("to_e2m1", flip("magnitude > bound", ">="), "test_e2m1_at_every_boundary"),
    "nibbles of a byte are swapped":
        Bug("pack_nibbles", returns("pairs.select(dim + 1, 1) | (pairs.select(dim + 1, 0) << 4)"), "test_nibbles"),
    "scale of a block of zeros is zero":
        Bug("cast:_scale", replace("....clamp(min=smallest)", "_divided(largest, element_max)"),
            "test_extreme_magnitudes"),
    "gradients are cast as weights are":
        Bug("TensorwiseGEMMs.cast_grad", argument("cast_matrix", 1, None), f"{GEMMS}::test_equal_their_definitions"),
    "weight's scales are left out of dgrad":
        Bug("RowwiseGEMMs.grad_input", argument("cast_rows", "factor", None), f"{GEMMS}::test_equal_their_definitions"),
    "amax over the replicas":
        Bug("recipe_groups", without("dim - ndim in recipe.amax_dims"), "test_r23_amax_is_that_of_the_weight_mesh"),
    "amax of one slice of tp":
        Bug("agree_on_amax", replace("not wire.groups", "not wire.is_within_mesh"),
            f"{GATHERED}::test_tensor_parallel"),
    "quantized data of before":
        Bug("ShardedWeight.forget_stale", drop("forget_made"), "test_writes_without_a_trace_are_seen"),
    "block of a shard cuts those of a recipe":
        Bug("Recipe.block_of", returns("block_size"), "test_r18_report_says_where_weights_are_cut_and_what_computes"),
    "second plane begins where the first does":
        Bug("GatheredWeight.quantized_for", replace("by_rank[:, start : start + nbytes]", "by_rank[:, :nbytes]"),
            f"{ONE_AXIS}::test_fully_shard"),
    "shards under fully_shard have their own scale":
        Bug("MasterWeight.amax_over", drop("all_reduce"), f"{ONE_AXIS}::test_fully_shard"),
    "plane of a checkpoint is cut as its weight":
        Bug("_placement", replace("plane.size(dim, block_size)", "block_size"), "test_dcp_loads_on_any_topology"),
    "scale of a written weight stays":
        Bug("NativeWeight.write", drop("self.quantized.amax.copy_(...)"), "test_same_bytes"),
    "masters are not loaded": Bug("MasterOptimizer.load_state_dict", drop("copy_"), "test_state_dict"),
    "masters are not written back":
        Bug("MasterOptimizer.step", drop("write"), "test_steps_are_those_of_the_stock_optimizer_on_masters"),
    "weights that were loaded do not count":
        Bug("MasterOptimizer._follow_weights", assign("is_written", "False"), "test_weights_that_were_loaded_count"),
    "unsynced gradient of a layer is overwritten":
        Bug("_multiply_into", replace("target += left.mm(right)", "target.copy_(left.mm(right))"),
            "test_the_last_of_several_microbatches_reduces"),
    "products of later microbatches are rounded":
        Bug("_multiply_into", replace("torch.addmm(target, left, right, torch.float32, out=target)",
            "target.add_(left.mm(right))"),
            "test_microbatches_are_summed_without_rounding_any"),
    "a float16 gradient that travels alone is not divided before the sum":
        Bug("Scattering.launch", replace("sent.div_(scale.predivide)", "sent.div_(1)"),
            "test_r1_all_ones_gradient_on_every_mesh"),
    "bias of a partial sum is added by every rank":
        Bug("linear:parallel_linear", argument("apply", 2, "bias"), f"{TENSOR_PARALLEL}::test_colwise_and_rowwise"),
    "dgrad is not summed over tp":
        Bug("parallel_plan", replace("TPPlan(last, Partial(), shape)", "TPPlan(last, Replicate(), shape)"),
            "test_modules_outside_of_the_plan"),
    "padding row is trained":
        Bug("_Embedding.backward", replace("ctx.padding_idx", "-1"),
            f"{EMBEDDING_EXCHANGE}::test_trains_as_one_process"),
    "count of tokens is taken for one":
        Bug("TokenExchange.gather", replace("received[:, 1:]", "received[:, :-1]"),
            "test_forward_has_the_bits_of_a_gathered_lookup"),
    "fewer tokens are told than there are":
        Bug("TokenExchange.gather", argument("fill_", 0, "min(values.numel(), self.capacity)"),
            "test_too_many_tokens_raise_on_all_ranks"),
    "exchange carries the fewest tokens":
        Bug("TokenExchange._most_tokens", argument("all_reduce", 1, "dist.ReduceOp.MIN"),
            f"{EMBEDDING_EXCHANGE}::test_ranks_with_unequal_numbers_of_tokens"),
    "each rank chooses from its own free memory":
        Bug("agree_to_begin", replace("~int(taken)", "_free_nbytes(device)"),
            "test_the_least_free_memory_counts_on_all_ranks"),
    "lookup begins at the wrong row":
        Bug("local_ids", assign("local", "ids - layout.rank * layout.local_rows"),
            f"{EMBEDDING_EXCHANGE}::test_trains_as_one_process"),
    "tokens of others train the first row":
        Bug("exchanged_grad", argument("masked_fill", 1, "0"), f"{EMBEDDING_EXCHANGE}::test_trains_as_one_process"),
    "target's row of the vocabulary":
        Bug("_Job.local_targets", argument("local_ids", 0,
            "self.targets[:, chunk].reshape(-1) + layout.local_offset - layout.rank * layout.local_rows"),
            "test_equals_stock_cross_entropy"),
    "exponentials relative to a rank's own peak":
        Bug("cross_entropy:_forward", replace("exponentials *= (own - largest).exp_()", "del own"),
            "test_equals_stock_cross_entropy"),
    "ignored tokens count in the mean":
        Bug("linear_cross_entropy", replace("losses.sum() / ...", "losses.mean()"), "test_equals_stock_cross_entropy"),
    "experts of the wrong rank":
        Bug("TokenDispatcher._gather", assign("local", "all_experts - rank"),
            "test_tokens_go_to_their_experts_and_back"),
    "gradient of one expert of a token":
        Bug("_Spread.backward", replace("copies.view(...).sum(1)", "copies.view(ctx.num_rows, ctx.k, shape[1])[:, 0]"),
            "test_tokens_of_one_rank"),
    "first row of a group gets the bias before":
        Bug("group_of_rows", argument("searchsorted", "right", None), "test_equals_a_loop_over_the_groups"),
    "grouped mxfp8 multiplies masters":
        Bug("GroupedMXGEMMs._grouped", assign("left", "rows_TC.float()"), "test_mxfp8_multiplies_what_its_casts_make"),
    "backward of grouped mxfp8 with native data":
        Bug("compute:_unknown", never("is_native"), "test_which_way_is_chosen_and_said"),
    "scales of a group in the tile of another":
        Bug("_multiply_tiles", replace("tiles_G.cumsum(...)", "ends_G"), "test_the_kernel_gets_groups_of_whole_tiles"),
    "scales in a tile row by row":
        Bug("in_tiles", replace("tiles.transpose(...)", "tiles"), "test_scales_lie_as_torch_has_them"),
    "experts are cut in the place of their rows":
        Bug("GroupedLinear.default_gtp_placement", replace("1 if self.single_grouped_weight else 0", "0"),
            "test_how_groups_are_cut"),
    "groups are cut whole where ranks do not divide them":
        Bug("_has_whole_groups", replace("... % mesh.size(...) == 0", "True"), "test_how_groups_are_cut"),
    "gate and up are swapped": Bug("_take", argument("cat", 0, "gates[::-1]"), "test_state_dicts_go_there_and_back"),
    "equal gradients are merged by the compiler":
        Bug("Handles.next_call", returns("0"), "test_one_weight_used_twice_with_equal_gradients"),
    "compiled code is given a shared buffer":
        Bug("_materialize", replace("full.clone()", "full"), "test_weights_kept_in_memory_are_not_written_to"),
    "stochastic rounding favours the value above":
        Bug("to_e2m1_stochastic", flip("bits.to(torch.float32) < ...", "<="), "test_neighbours"),
    "neighbours share their random bits":
        Bug("random_bits", replace("words >> 16", "words & 65535"), "test_errors_are_independent"),
    "a Hadamard transform without one of its stages": Bug("rotate", argument("range", 0, "3"), "test_matrix"),
    "planes of a user's recipe are not loaded":
        Bug("_take_planes", replace("dict.fromkeys(...)", "RECIPES"), "test_a_recipe_of_the_user"),
    "a load resets the arguments of a recipe":
        Bug("_take_planes", replace("(own, planes)", "(RECIPES.get(name, type(own))(), planes)"),
            "test_a_recipe_of_the_user"),
}
