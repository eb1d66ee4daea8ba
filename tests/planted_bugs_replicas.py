"""Planted bugs of optimizer states that replicas split: stale rows of others, gradients of others, lost bits."""

from __future__ import annotations

from planted_bugs_changes import drop, never, replace, returns
from planted_bugs_type import Bug

COSTS = "test_optimizer_states.py::TestCosts"
TRAINING = "test_shard_optimizer.py::TestTraining"

# fmt: off
REPLICAS = {
    "rows of other replicas are those before the step":
        Bug("count_writes", drop("param.versions.num_updates += 1"), "test_an_optimizer_with_kernels_of_its_own"),
    "what .data has written stays on its replica":
        Bug("replica_gathers:_version", replace("weight.version", "weight.version[:3]"),
            "test_writes_reach_all_replicas"),
    "foreach functions outside of forwards are not noticed":
        Bug("_write_foreach", drop("note_written"), "test_writes_reach_all_replicas"),
    "a write in a forward stays on its replica":
        Bug("replica_gathers:_is_whole",
            replace("weight.part.gathered == _version(weight)", "weight.part.gathered is not None"),
            "test_optimizer_states.py::TestWritesInForward"),
    "a version of the local tensor is not seen":
        Bug("_version", returns("weight.param._version + weight.versions.num_updates"),
            "test_writes_reach_all_replicas"),
    "a loss over the vocabulary reads rows from before the step":
        Bug("vocabulary_parallel_loss", drop("complete"), "test_exchanges_of_activations"),
    "an exchange reads rows from before the step":
        Bug("exchanged_ids", drop("complete"), "test_exchanges_of_activations"),
    "statistics are of rows from before the step":
        Bug("ReplicaGathers.begin", drop("complete"), f"{TRAINING}::test_quantized_weights"),
    "quantized weights are rounded twice":
        Bug("ReplicaGathers._launch", never("weight.form.wire is not None"), f"{TRAINING}::test_quantized_weights"),
    "what others receive rounds the part itself":
        Bug("ReplicaPart.unpack", replace("shard[:begin].copy_(output[:begin])", "shard.copy_(output)"),
            f"{TRAINING}::test_mixed_precision"),
    "gradients over replicas are divided twice":
        Bug("ReductionLaunches._complete",
            replace("self._in_order(compat.reduce_scatter_base, slot, rows.reshape(-1), scale.op, replicate)",
                "self._in_order(compat.reduce_scatter_base, slot, rows.reshape(-1), dist.ReduceOp.AVG, replicate)"),
            "test_divide_factors"),
    "a replica does not learn that the other has used a weight":
        Bug("GroupGradients.for_replicas",
            replace("marks.expand(...)", "marks.new_zeros(self._all[0].mesh.size(0), marks.numel())"),
            "test_one_replica_alone_uses_a_weight"),
    "sums of microbatches are dropped before replicas reduce them":
        Bug("ReductionLaunches._complete", drop("slot += weight.pending_grad.unreplicated"),
            f"{TRAINING}::test_microbatches"),
    "replicas gather in each microbatch":
        Bug("ReplicaGathers.begin", never("versions == self._seen"), f"{COSTS}::test_collectives_of_a_step"),
    "each replica has all states":
        Bug("_splits_states", returns("False"), f"{COSTS}::test_a_rank_holds_its_part_of_the_states"),
}
