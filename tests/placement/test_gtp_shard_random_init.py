"""Initialization on the shards: each rank holds the rows that the unsharded module would have drawn."""

from collections.abc import Callable

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params

from dtensor_gtp import GTPShard, gtp_shard


def build() -> nn.Module:
    """Only built, never called; ``padding_idx`` names a row that ``reset_parameters`` zeros."""
    return nn.Sequential(
        nn.Embedding(33, 16, padding_idx=20),
        nn.Linear(16, 21),
        nn.LayerNorm(21),
        nn.Conv1d(21, 9, 3),
        nn.LSTM(9, 7),
        nn.EmbeddingBag(5, 7, padding_idx=-1),
    )


def reset(model: nn.Module) -> None:
    torch.manual_seed(5)
    for module in model:  # type: ignore[attr-defined]
        module.reset_parameters()


def init_functions(model: nn.Module) -> None:
    torch.manual_seed(6)
    for function in (
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.trunc_normal_,
        nn.init.xavier_normal_,
        nn.init.kaiming_normal_,
        nn.init.orthogonal_,
    ):
        function(model[1].weight)  # type: ignore[index]
        nn.init.trunc_normal_(model[0].weight, std=2.0)  # type: ignore[index]
        nn.init.normal_(model[1].bias)  # type: ignore[index]


class TestRandomInit(GlooTest):
    def _check(self, init: Callable[[nn.Module], None], placement: GTPShard | None = None) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        reference = build()
        init(reference)
        state = torch.get_rng_state()
        with torch.device("meta"):
            model = build()
        gtp_shard(model, mesh, schedule=ALL, shard_placement_fn=lambda p: placement if p.ndim == 2 else None)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for param, want in zip(model.parameters(), reference.parameters(), strict=True):
                # what init leaves alone must not decide
                param.copy_(torch.distributed.tensor.distribute_tensor(want, param.device_mesh, param.placements))
                param.mul_(3)
        init(model)
        self.assertTrue(torch.equal(torch.get_rng_state(), state), "the generators part")
        if init is init_functions:
            model, reference = nn.Sequential(model[0], model[1]), nn.Sequential(reference[0], reference[1])
        assert_same_params(model, reference, rtol=0, atol=0)

    def test_reset_parameters(self) -> None:
        for placement in (None, GTPShard(1), GTPShard(0, block_size=4)):
            self._check(reset, placement)

    def test_init_functions(self) -> None:
        self._check(init_functions)

    def test_shards_are_distinct_without_a_common_seed(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(self.rank)
        model = gtp_shard(nn.Linear(24, 24, bias=False), mesh, schedule=ALL)
        model.reset_parameters()
        self.assertEqual(model.weight.full_tensor().unique(dim=0).shape[0], 24)

    def test_other_meshes_are_drawn_as_before(self) -> None:
        gtp_shard(nn.Linear(24, 24), self.gtp_mesh(), schedule=ALL)
        other = torch.distributed.device_mesh.init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("other",))
        tensor = torch.distributed.tensor.zeros(8, device_mesh=other, placements=[torch.distributed.tensor.Shard(0)])
        torch.manual_seed(self.rank)
        expected = torch.empty(2).normal_()
        torch.manual_seed(self.rank)
        tensor.normal_()
        self.assertTrue(torch.equal(tensor.to_local(), expected))
