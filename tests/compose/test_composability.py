"""What docs/guides/composability.md says to work in each composition is proven by a test, named here."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPOSITIONS = ("`gtp` alone", "(replicate, gtp)", "tensor parallelism", "`fully_shard`")
# For each feature: file and test, in the order of the compositions.
PROOFS = {
    "training": (
        ("test_gtp_shard_training", "test_zoo"),
        ("test_gtp_shard_training", "test_zoo"),
        ("test_gtp_shard_tp", "test_llama"),
        ("test_gtp_shard_fsdp", "test_per_block_and_root"),
    ),
    "microbatches": (
        ("test_gtp_shard_switches", "test_the_last_of_several_microbatches_reduces"),
        ("test_gtp_shard_switches", "test_the_last_of_several_microbatches_reduces"),
        ("test_gtp_shard_tp", "test_microbatches"),
        ("test_gtp_shard_fsdp", "test_gradient_accumulation"),
    ),
    "mixed precision": (
        ("test_gtp_shard_mixed_precision", "test_same_bits_as_fully_shard"),
        ("test_gtp_shard_mixed_precision", "test_close_to_fully_shard_on_four_ranks_and_with_replicas"),
        ("test_gtp_shard_compose", "test_tensor_parallel_in_mixed_precision"),
        ("test_gtp_shard_fsdp", "test_mixed_precision"),
    ),
    "quantized weights": (
        ("test_quantized_matrix", "test_r19_gtp"),
        ("test_quantized_matrix", "test_two_axes"),
        ("test_quantized_matrix", "test_r19_tensor_parallel"),
        ("test_quantized_matrix", "test_two_axes"),
    ),
    "float8 GEMMs": (
        ("test_quantized_matrix", "test_r19_gtp"),
        ("test_quantized_matrix", "test_gtp_and_fully_shard"),
        ("test_quantized_matrix", "test_r19_tensor_parallel"),
        ("test_quantized_matrix", "test_fully_shard_gtp_and_tensor_parallel"),
    ),
    "activation checkpointing": (
        ("test_gtp_shard_selective", "test_r24_checkpointed_weights_are_gathered_three_times"),
        ("test_gtp_shard_selective", "test_the_whole_model_and_its_segments"),
        ("test_gtp_shard_tp", "test_activation_checkpointing"),
        ("test_gtp_shard_fsdp", "test_activation_checkpointing"),
    ),
    "compiled blocks": (
        ("test_gtp_shard_compile", "test_prefetching_and_gather_counts_of_compiled_blocks"),
        ("test_gtp_shard_compose", "test_compiled_blocks_with_replicas"),
        ("test_gtp_shard_tp_compile", "test_blocks_share_one_graph"),
        ("test_gtp_shard_compose", "test_compiled_blocks_inside_of_fully_shard"),
    ),
    "clipping": (
        ("test_gtp_shard_optimizers", "test_r10_clip_grad_norm"),
        ("test_gtp_shard_norms", "test_r10_submodule_with_a_mesh_of_its_own"),
        ("test_gtp_shard_norms", "test_r10_tensor_parallel_beside_plain_layers"),
        ("test_gtp_shard_norms", "test_r10_fully_shard_beside"),
    ),
    "checkpoints": (
        ("test_gtp_shard_resharding", "test_r12_every_topology_loads_what_any_other_has_saved"),
        ("test_gtp_shard_resharding", "test_r12_every_topology_loads_what_any_other_has_saved"),
        ("test_gtp_shard_tp", "test_llama"),
        ("test_gtp_shard_fsdp", "test_checkpoints"),
    ),
}


def test_page_names_what_is_proven() -> None:
    page = " ".join((ROOT / "docs" / "guides" / "composability.md").read_text().split())
    claim = page.partition("## Support ")[2].partition(" Further:")[0]
    features, _, compositions = claim.partition(" each work with ")
    named = re.split(r", | and ", features)
    assert [named[0].lower(), *named[1:]] == list(PROOFS)
    assert [text for text in COMPOSITIONS if text not in compositions] == []


def test_each_proof_is_there() -> None:
    for feature, proofs in PROOFS.items():
        assert len(proofs) == len(COMPOSITIONS), feature
        for file, name in proofs:
            (path,) = (ROOT / "tests").rglob(f"{file}.py")
            assert f"def {name}(" in path.read_text(), f"no {name} in {file}"
