"""Planted bugs of optimizer states that replicas split: stale rows of others, gradients of others, lost bits."""

from __future__ import annotations

from planted_bugs_changes import argument, drop, never, replace, returns
from planted_bugs_type import Bug

COSTS = "test_optimizer_states.py::TestCosts"
TRAINING = "test_shard_optimizer.py::TestTraining"
WRITES = "test_optimizer_states.py::TestWritesAndSaves"

REPLICAS = {
    "rows of other replicas are those before the step": Bug(
        "Runtime.note_step",
        drop("self.gathering.parts.num_writes += ..."),
        f"{TRAINING}::test_an_optimizer_with_kernels_of_its_own",
    ),
    "rows of other replicas are those of the first step": Bug(
        "ReplicaGathers.begin", drop("weight.part.gathered = None"), f"{TRAINING}::test_optimizers"
    ),
    "what .data has written stays on its replica": Bug(
        "LostWrites.note_untraced_write",
        drop("self._gathering.parts.num_writes += ..."),
        f"{WRITES}::test_writes_reach_all_replicas",
    ),
    "foreach functions outside of forwards are not noticed": Bug(
        "_write_foreach", drop("note_written"), f"{WRITES}::test_writes_reach_all_replicas"
    ),
    "a write in a forward stays on its replica": Bug(
        "ReplicaGathers.bring", never("is_outdated"), "test_optimizer_states.py::TestWritesInForward"
    ),
    "a version of the local tensor is not seen": Bug(
        "_version", replace("weight.local._version", "0"), f"{WRITES}::test_writes_reach_all_replicas"
    ),
    "unshard gathers rows from before the write": Bug(
        "Runtime.gather_kept", drop("begin"), f"{WRITES}::test_unshard_has_the_present_values"
    ),
    "a loss over the vocabulary reads rows from before the step": Bug(
        "vocabulary_parallel_loss", drop("complete"), f"{TRAINING}::test_exchanges_of_activations"
    ),
    "an exchange reads rows from before the step": Bug(
        "exchanged_ids", drop("complete"), f"{TRAINING}::test_exchanges_of_activations"
    ),
    "statistics are of rows from before the step": Bug(
        "ReplicaGathers.begin", drop("complete"), f"{TRAINING}::test_quantized_weights"
    ),
    "quantized weights are rounded twice": Bug(
        "ReplicaGathers._launch", replace("weight.form.wire is None", "True"), f"{TRAINING}::test_quantized_weights"
    ),
    "what others receive rounds the part itself": Bug(
        "ReplicaPart.unpack",
        replace("shard[:begin].copy_(output[:begin])", "shard.copy_(output)"),
        f"{TRAINING}::test_mixed_precision",
    ),
    "gradients over replicas are divided twice": Bug(
        "ReductionLaunches._reduce_scatter_in_order",
        argument("reduce_scatter_base", 2, "dist.ReduceOp.AVG"),
        f"{TRAINING}::test_divide_factors",
    ),
    "a replica does not learn that the other has used a weight": Bug(
        "GroupGradients.for_replicas",
        replace("marks.expand(...)", "marks.new_zeros(self._all[0].mesh.size(0), marks.numel())"),
        f"{TRAINING}::test_one_replica_alone_uses_a_weight",
    ),
    "sums of microbatches are dropped before replicas reduce them": Bug(
        "ReductionLaunches._complete",
        drop("slot += weight.pending_grad.unreplicated"),
        f"{TRAINING}::test_microbatches",
    ),
    "replicas gather in each microbatch": Bug(
        "ReplicaGathers.begin", never("written == self._seen"), f"{COSTS}::test_collectives_of_a_step"
    ),
    "each replica has all states": Bug(
        "_splits_states", returns("False"), f"{COSTS}::test_a_rank_holds_its_part_of_the_states"
    ),
}
