"""Planted bugs of shards that live on the host, and of what the host checks and forgets."""

from __future__ import annotations

from planted_bugs_changes import assign, drop, never, replace, without
from planted_bugs_type import Bug

OFFLOAD = "test_gtp_shard_offload.py::TestOffload"

# fmt: off
HOST = {
    "shard on the host is sent itself": Bug("gather:_planes", assign("shard", "weight.shard"), "test_copies_are_made"),
    "gradient of a second use does not reach the host":
        Bug("ReducedGradient.accumulate", drop("append"), f"{OFFLOAD}::test_same_bits_as_without"),
    "whole parameter on the host is copied once":
        Bug("WholeParam.begin_forward", drop("copy_"), f"{OFFLOAD}::test_same_bits_as_without"),
    "host does not wait for its gradients": Bug("Gradients.complete", drop("finish_on_host"), "test_copies_are_made"),
    "host does not wait for copies of its shards":
        Bug("Runtime._end_forward", drop("finish_uploads"), "test_copies_are_made"),
    "last reductions fail and leave gradients":
        Bug("Steps.forgetting_on_failure", drop("forget"),
            "test_exception_at_the_end_of_backward_leaves_nothing_behind"),
    "failed reduction hides the others":
        Bug("ReductionsInFlight.abandon", replace("RuntimeError", "ZeroDivisionError"),
            "test_exception_at_the_end_of_backward_leaves_nothing_behind"),
    "finite skips gradients that travel alone":
        Bug("ReductionLaunches._reduce_scatter", drop("_look_at"), "test_gradients_of_sharded_and_whole_parameters"),
    "finite looks at padding":
        Bug("ReductionLaunches._look_at", replace("weight.layout.full_view(full)", "full"),
            "test_padding_is_not_looked_at"),
    "finite skips quantized weights":
        Bug("gather:launch", without("isinstance(shard, WeightWithRecipe)"), "test_weights_in_every_storage"),
    "activation that is written while it leaves is not noticed":
        Bug("_Offloaded.let_go", drop("get_val"), "test_outputs_written_while_they_are_copied_raise"),
    "activations come back when they are needed":
        Bug("activations:_Region.load", replace("(self, before)", "(self,)"),
            "test_gradients_are_those_of_one_pass_and_loads_are_one_checkpoint_ahead"),
    "groups of gloo have two threads, which race":
        Bug("OneThreadGloo.__call__", assign("options._threads", "2"), "test_groups_of_the_package_and_of_users"),
    "weights travel in a group of gloo with two threads":
        Bug("CommContext.groups",
            never("not self.streams.has_streams and gather.size() > 1 and compat.has_racing_threads(gather)"),
            "test_groups_of_the_package_and_of_users"),
    "a kernel adds the own addend of another rank":
        Bug("Scattering.launch", drop("self._rank = groups.scatter.rank()"),
            "test_bits_do_not_depend_on_who_adds"),
    "a backward loads Triton":
        Bug("Scattering.__init__", replace("dtype is None or is_loaded_ahead(self._sent[0], num_ranks)", "True"),
            "test_the_kernel_adds_only_where_the_first_forward_has_loaded_it"),
    "gradients of other dtypes travel together":
        Bug("Gradients._launch_others", replace("dtypes == (weight.compute_dtype, weight.reduce_dtype)",
            "dtypes[1] == weight.reduce_dtype"), "test_gradients_of_other_dtypes_travel_apart"),
    "gradients that travel without a copy arrive in places of others":
        Bug("Scattering.launch", replace("received.split(self._sizes, 1)", "received.split(self._sizes[::-1], 1)"),
            "test_gradients_of_16_bits_travel_as_they_are"),
    "experts count among the weights that layers multiply":
        Bug("_why_large", replace("weight.fused.is_any", "True"),
            "test_experts_are_in_the_group_of_their_block_if_it_fits"),
    "blocks of small weights load Triton":
        Bug("Setup._load_sums", replace("is_worth_loading(sender.gatherables[0].kept_nbytes)", "True"),
            "test_only_large_blocks_load_the_sum"),
    "kernel is tried before it is loaded":
        Bug("addends:_try", drop("join"), "test_a_kernel_is_loaded_once_and_tried_when_that_is_done"),
    "names of modules reach the terminal in errors":
        Bug("decide:decide", replace("printable", "str"),
            "test_errors_later.py::TestRefusalsLater::test_names_reach_no_terminal"),
    "names of modules reach the terminal in reports":
        Bug("sharding_report", replace("printable", "str"),
            "test_plan_report.py::TestPage::test_names_reach_no_terminal"),
    "a save behind training writes into the checkpoint":
        Bug("async_save", replace("_Writer(path, keep)", "FileSystemWriter(path)"), "test_a_rank_is_killed"),
}
