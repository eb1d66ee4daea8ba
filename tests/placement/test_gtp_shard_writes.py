"""In-place code on sharded parameters gives the values of one process, or raises."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest
from torch import Tensor

from dtensor_gtp import gtp_shard, whole_weights


def noise(weight: Tensor, draw: Callable[[Tensor], Tensor]) -> None:
    weight.copy_(draw(weight))


class TestWrites(GlooTest):
    def model(self, rows: int = 10, columns: int = 6) -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(columns, rows, bias=False)

    def shard(self, model: nn.Linear) -> nn.Linear:
        return gtp_shard(model, self.gtp_mesh(), schedule=ALL)

    def check(self, write: Callable[[Tensor], Any], rows: int = 10, columns: int = 6) -> None:
        """``write`` does the same to a shard as to a whole parameter, and to the generator."""
        reference, model = self.model(rows, columns), self.shard(self.model(rows, columns))
        states = []
        for weight in (reference.weight, model.weight):
            torch.manual_seed(1)
            with torch.no_grad():
                write(weight)
            states.append(torch.get_rng_state())
        self.assertTrue(torch.equal(model.weight.full_tensor(), reference.weight))
        self.assertTrue(torch.equal(*states), "the generators part")

    def test_eye_gives_the_rows_of_the_identity(self) -> None:
        for shape in ((10, 6), (6, 10), (3, 3)):
            self.check(nn.init.eye_, *shape)
        self.check(lambda weight: torch.eye(8, out=weight), 8, 8)

    def test_eye_of_another_shape_raises(self) -> None:
        weight = self.shard(self.model()).weight
        with torch.no_grad(), self.assertRaisesRegex(ValueError, r"expects a parameter of shape \(6, 6\) as out"):
            torch.eye(6, 6, out=weight)

    def test_new_random_tensors_have_the_rows_of_one_process(self) -> None:
        draws = (
            torch.randn_like,
            torch.rand_like,
            lambda weight: torch.rand_like(weight, dtype=torch.float64),
            lambda weight: torch.randint_like(weight, 100),
            lambda weight: torch.randint_like(weight, -5, 100),
            lambda weight: torch.bernoulli(weight.abs()),
            lambda weight: torch.randn_like(weight.t()).t(),
        )
        for draw in draws:
            self.check(lambda weight, draw=draw: noise(weight, draw))

    def test_draws_follow_the_strides_of_the_tensor(self) -> None:
        self.check(lambda weight: nn.init.normal_(weight.t()))
        self.check(lambda weight: nn.init.uniform_(weight.t()[2:4]))

    def test_draws_and_fills_reach_the_shard_through_views(self) -> None:
        writes = (
            lambda weight: weight[3].zero_(),
            lambda weight: weight.data[-1].zero_(),
            lambda weight: weight.detach()[2:9].fill_(2.0),
            lambda weight: weight[4].fill_(torch.tensor(3.0)),
            lambda weight: weight.diagonal().fill_(math.pi),
            lambda weight: weight.t()[:, 5].fill_(3.0),
            lambda weight: [nn.init.xavier_uniform_(part) for part in weight.chunk(3)],
            lambda weight: [nn.init.constant_(part, i) for i, part in enumerate(weight.split([1, 7, 2]))],
        )
        for write in writes:
            self.check(write)
        self.check(lambda weight: weight.view(-1)[5].zero_(), rows=8)

    def test_views_can_be_read(self) -> None:
        self.check(lambda weight: weight.mul_(weight[2:5].sum()))
        self.check(lambda weight: weight.add_(weight[3].clone().mul_(2)))
        self.check(lambda weight: weight[:, 2:4].mul_(2))  # of the shard itself

    def test_other_writes_to_a_view_of_a_copy_raise(self) -> None:
        model = self.shard(self.model())
        weight, before = model.weight, model.weight.detach().full_tensor()
        writes = (
            lambda: weight[2:5].mul_(2),
            lambda: weight.narrow(0, 0, 3).t().add_(1),
            lambda: weight.__setitem__((5, 5), 9.0),
            lambda: weight.data.__setitem__(0, weight[1]),
            lambda: torch._foreach_mul_(list(weight.chunk(3)), 2.0),
            lambda: torch.add(weight[3], 1.0, out=weight[4]),
            lambda: weight[3].data.zero_(),
        )
        for write in writes:
            with torch.no_grad(), self.assertRaisesRegex(NotImplementedError, r"holds a copy.*whole_weights\(model\)"):
                write()
        self.assertTrue(torch.equal(weight.full_tensor(), before))
        with whole_weights(model), torch.no_grad():
            model.weight[2:5].mul_(2)
        before[2:5].mul_(2)
        self.assertTrue(torch.equal(model.weight.full_tensor(), before))

    def test_views_of_meta_tensors_can_be_written(self) -> None:
        with torch.device("meta"):
            model = self.shard(self.model())
        with torch.no_grad():
            model.weight[3].zero_()
            model.weight[2:5].normal_()

    def test_a_rank_alone_writes_to_its_shard(self) -> None:
        mesh = self.hsdp_mesh(self.world_size)["gtp"]
        model = gtp_shard(self.model(), mesh, schedule=ALL)
        with torch.no_grad():
            model.weight[3].mul_(0)
        self.assertEqual(model.weight.full_tensor()[3].count_nonzero(), 0)

    def test_dirac_raises(self) -> None:
        model = gtp_shard(nn.Conv1d(8, 8, 3), self.gtp_mesh(), schedule=ALL)
        with self.assertRaisesRegex(NotImplementedError, r"whole_weights\(model\)"):
            nn.init.dirac_(model.weight)
