"""What docs/guides/composability.md says to work in each composition is proven by a test, named here."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPOSITIONS = ("`gtp` alone", "(replicate, gtp)", "tensor parallelism", "`fully_shard`")
# For each feature: file and test, in the order of the compositions.
PROOFS = {
    "training": "training::test_zoo training::test_zoo tp::test_llama fsdp::test_per_block_and_root",
    "microbatches": """
        switches::test_the_last_of_several_microbatches_reduces switches::test_the_last_of_several_microbatches_reduces
        tp::test_microbatches fsdp::test_gradient_accumulation
    """,
    "mixed precision": """
        mixed_precision::test_same_bits_as_fully_shard
        mixed_precision::test_close_to_fully_shard_on_four_ranks_and_with_replicas
        beside::test_tensor_parallel_in_mixed_precision fsdp::test_mixed_precision
    """,
    "quantized weights": """
        quantized_matrix::test_r19_gtp quantized_matrix::test_two_axes quantized_matrix::test_r19_tensor_parallel
        quantized_matrix::test_two_axes
    """,
    "float8 GEMMs": """
        quantized_matrix::test_r19_gtp quantized_matrix::test_gtp_and_fully_shard
        quantized_matrix::test_r19_tensor_parallel quantized_matrix::test_fully_shard_gtp_and_tensor_parallel
    """,
    "activation checkpointing": """
        selective::test_r24_checkpointed_weights_are_gathered_twice
        selective::test_the_whole_model_and_its_segments tp::test_activation_checkpointing
        fsdp::test_activation_checkpointing
    """,
    "compiled blocks": """
        compile::test_prefetching_and_gather_counts_of_compiled_blocks beside::test_compiled_blocks_with_replicas
        tp::test_blocks_share_one_graph beside::test_compiled_blocks_inside_of_fully_shard
    """,
    "clipping": """
        optimizers::test_r10_clip_grad_norm norms::test_r10_submodule_with_a_mesh_of_its_own
        norms::test_r10_tensor_parallel_beside_plain_layers norms::test_r10_fully_shard_beside
    """,
    "checkpoints": """
        resharding::test_r12_every_topology_loads_what_any_other_has_saved
        resharding::test_r12_every_topology_loads_what_any_other_has_saved tp::test_llama fsdp::test_checkpoints
    """,
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
        assert len(proofs.split()) == len(COMPOSITIONS), feature
        for file, name in (proof.split("::") for proof in proofs.split()):
            (path,) = (path for kind in ("", "gtp_shard_") for path in (ROOT / "tests").rglob(f"test_{kind}{file}.py"))
            assert f"def {name}(" in path.read_text(), f"no {name} in {file}"
