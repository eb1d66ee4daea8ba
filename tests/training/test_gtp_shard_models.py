"""Every kind of module trains under ``gtp_shard`` as it does in one process.

Gradients and parameters after each optimizer step are compared with the unsharded model on the concatenated batch, in
float64: a key's bias has no gradient but rounding noise, which AdamW would blow up in float32.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, assert_same_params, check_training, rows_of_rank
from runtime_common import Calls
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

from dtensor_gtp import gtp_shard


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def loss_of_output(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return mean_square(model(batch))


@dataclass
class Case:
    """A model and what it eats: floats of a shape, or indices below ``num_indices``. It ``has_eval`` if eval mode
    without gradients takes other code paths (one fused kernel)."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (6,)
    num_indices: int = 0
    loss: Callable[[nn.Module, Any], torch.Tensor] = loss_of_output
    has_eval: bool = False

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        shape = (8, *self.shape)
        if self.num_indices:
            return torch.randint(0, self.num_indices, shape, generator=generator)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


# --- models -----------------------------------------------------------------------------------------------------------


class UsesOthersWeights(nn.Module):
    """Its forward reads the weights of its children, which also run themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.never_called = nn.Linear(6, 6)
        self.bilinear = nn.Bilinear(6, 6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.b.weight.t(), self.a.bias) + self.a(x)
        y = F.linear(y, self.never_called.weight, self.never_called.bias)
        return self.bilinear(y, torch.tanh(self.b(x)))


class Containers(nn.Module):
    """Parameters of every rank, used without any module, and in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.dict = nn.ParameterDict({"query": torch.randn(6, 6), "key": torch.randn(6, 5), "shift": torch.randn(5)})
        self.list = nn.ParameterList([torch.randn(6, 6) for _ in range(2)])
        self.cube, self.scale = nn.Parameter(torch.randn(3, 6, 6)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.list:
            x = torch.tanh(x @ weight)
        return x @ self.cube.sum(0) @ self.dict["query"] @ self.dict["key"] * self.scale + self.dict["shift"]


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, value = x[..., : self.attention.kdim], x[..., : self.attention.vdim]
        return self.attention(x, key, value)[0]


def first_output(inner: nn.Module) -> nn.Module:
    """Of a recurrent layer: the sequence alone."""
    return Calls(lambda own, x: own.inner(x)[0], inner=inner)


def projection() -> nn.Module:
    return Calls(lambda own, x: torch.tanh(x) @ own.matrix, matrix=torch.randn(8, 6))


class Experts(nn.Module):
    """Each rank has tokens for some experts only; the others run on nothing, and still take part in collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(6, 8), projection()) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = (x[:, 0] * 100).long() % len(self.experts)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(choice == index)
            output = output.index_add(0, rows, expert(x[rows]))
        return output


class CallableExperts(nn.ModuleDict):
    """A container with a forward, as those of Switch Transformers."""

    def __init__(self) -> None:
        super().__init__({str(index): nn.Linear(6, 4) for index in range(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([expert(x) for expert in self.values()]).relu().sum(0)


@dataclass
class Result:
    logits: torch.Tensor
    extra: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class StructuredOutput(nn.Module):
    """Keyword arguments in, a dataclass with a nested dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.raw = nn.Parameter(torch.randn(6, 6))

    def forward(self, *, x: torch.Tensor, factor: float) -> Result:
        logits = self.linear(x) * factor
        return Result(logits, {"hidden": [logits @ self.raw]})


def structured_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result = model(x=x, factor=0.5)
    return mean_square(result.logits) + mean_square(result.extra["hidden"][0])


def children_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Calls the children one by one, never the root."""
    for child in model:
        x = child(x)
    return mean_square(x)


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)


def recurrent() -> nn.Module:
    return nn.Sequential(*(first_output(cls(6, 6, batch_first=True)) for cls in (nn.RNN, nn.GRU, nn.LSTM)))


def conv_norms() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1))
    return nn.Sequential(*layers, nn.InstanceNorm2d(4, affine=True), nn.LayerNorm((4, 4, 4)), nn.PReLU(4))


CASES = {
    "attention": Case(Attention, (5, 8), has_eval=True),
    "attention_bias_kv": Case(lambda: Attention(add_bias_kv=True, add_zero_attn=True), (5, 8)),
    "attention_eval_mode": Case(lambda: Attention().eval(), (5, 8)),
    "attention_kdim_vdim": Case(lambda: Attention(kdim=6, vdim=4), (5, 8), has_eval=True),
    "bilinear_and_foreign_weights": Case(UsesOthersWeights),
    "callable_container": Case(CallableExperts),
    "children_outside_root": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Conv1d(4, 4, 1), nn.Linear(8, 4)), (4, 6), loss=children_loss
    ),
    "conv1d": Case(lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.ConvTranspose1d(8, 5, 3)), (3, 10)),
    "conv2d": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3, groups=2), nn.ConvTranspose2d(6, 5, 3)), (3, 6, 6)
    ),
    "conv2d_channels_last": Case(lambda: nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last), (3, 6, 6)),
    "conv3d": Case(lambda: nn.Sequential(nn.Conv3d(2, 5, 2), nn.ConvTranspose3d(5, 3, 2)), (2, 4, 4, 4)),
    "conv_norms": Case(lambda: conv_norms().eval(), (3, 6, 6), has_eval=True),
    "embedding_bag_max": Case(lambda: nn.EmbeddingBag(13, 6, mode="max"), (4,), 13),
    "embedding_bag_mean": Case(lambda: nn.EmbeddingBag(13, 6, mode="mean"), (4,), 13),
    "embedding_bag_sum": Case(lambda: nn.EmbeddingBag(13, 6, mode="sum", padding_idx=3), (4,), 13),
    "embedding_padding": Case(lambda: nn.Sequential(nn.Embedding(13, 6, padding_idx=2), nn.Linear(6, 3)), (4,), 13),
    "encoder": Case(lambda: nn.TransformerEncoder(encoder_layer(), 2), (5, 8), has_eval=True),
    "encoder_layer_eval_mode": Case(lambda: encoder_layer().eval(), (5, 8)),
    "encoder_layer_norm_first": Case(lambda: encoder_layer(norm_first=True, activation="gelu"), (5, 8), has_eval=True),
    "experts": Case(Experts),
    "lstm_cell": Case(lambda: first_output(nn.LSTMCell(6, 5))),
    "lstm_stacked": Case(
        lambda: first_output(nn.LSTM(6, 5, batch_first=True, num_layers=2, bidirectional=True, proj_size=3)),
        (4, 6),
        has_eval=True,
    ),
    "parameter_containers": Case(Containers),
    "recurrent": Case(recurrent, (4, 6), has_eval=True),
    "structured_output": Case(StructuredOutput, loss=structured_loss),
    "transformer": Case(
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
        (5, 8),
        loss=lambda model, x: mean_square(model(x, x.flip(1))),
    ),
}


def wide(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestModels(GlooTest):
    world_size = 2

    @parametrize("name", sorted(CASES))
    def test_trains(self, name: str) -> None:
        case = CASES[name]
        shard = partial(gtp_shard, mesh=self.gtp_mesh(), schedule=ALL)
        check_training(case.make().double(), shard, self.gtp_mesh(), case.batch, case.loss, steps=2)

    @parametrize("name", [name for name in sorted(CASES) if CASES[name].has_eval])
    def test_eval_without_gradient(self, name: str) -> None:
        case = CASES[name]
        reference = case.make().double().eval()
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        batch = case.batch(torch.Generator().manual_seed(self.rank))
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                output = model(batch)
                self.assertEqual(output, reference(batch))
            self.assertFalse(output.requires_grad)

    def test_recurrent_layers_do_not_move_gathered_weights(self) -> None:
        """On a GPU, ``flatten_parameters`` gives the weights other memory."""
        model = gtp_shard(recurrent(), self.gtp_mesh(), schedule=ALL)
        with mock.patch.object(nn.RNNBase, "flatten_parameters", side_effect=AssertionError("moved")):
            for _ in range(2):
                model(torch.ones(2, 3, 6)).sum().backward()

    def test_encoder_with_padding_takes_nested_tensors(self) -> None:
        reference = CASES["encoder"].make().double().eval()
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        mask = torch.zeros(4, 5, dtype=torch.bool)
        mask[self.rank, 3:] = True
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*nested tensors")
            batch = wide(4, 5, 8, seed=self.rank)
            self.assertEqual(model(batch, src_key_padding_mask=mask), reference(batch, src_key_padding_mask=mask))

    def test_batch_norm_training_statistics_are_local(self) -> None:
        """In train mode BatchNorm sees the rows of its rank, as in any data parallelism; its buffers stay local."""
        reference = conv_norms().double()
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        batch = wide(8, 3, 6, 6)
        mean_square(model(rows_of_rank(batch, self.gtp_mesh()))).backward()
        for param in reference.parameters():
            param.grad = torch.zeros_like(param)
        for index, rows in enumerate(batch.chunk(self.world_size)):
            local = copy.deepcopy(reference)
            local.zero_grad()
            mean_square(local(rows)).backward()
            for mean, term in zip(reference.parameters(), local.parameters(), strict=True):
                mean.grad += term.grad / self.world_size
            if index == self.rank:
                self.assertEqual(dict(model.named_buffers()), dict(local.named_buffers()))
        assert_same_params(model, reference, "grad")

    def test_dropout_draws_what_one_process_draws(self) -> None:
        """Sharding takes no random numbers of its own: with one seed and one batch the masks are the same."""
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True).double()
        model = gtp_shard(copy.deepcopy(layer), self.gtp_mesh(), schedule=ALL)
        batch = wide(3, 5, 8)
        for seed in range(2):
            for module in (layer, model):
                torch.manual_seed(seed)
                mean_square(module(batch)).backward()
            assert_same_params(model, layer, "grad")

    def test_functional_call(self) -> None:
        """With the module's own parameters it is a call; other tensors would not see their gradients: refused."""
        reference = nn.Sequential(nn.Linear(6, 6), nn.Conv1d(4, 4, 1)).double()
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        batch = wide(8, 4, 6)
        rows = rows_of_rank(batch, self.gtp_mesh())
        mean_square(reference(batch)).backward()
        own = dict(model.named_parameters())
        mean_square(torch.func.functional_call(model, own, (rows,))).backward()
        assert_same_params(model, reference, "grad")
        others = (
            {name: param.detach().clone().requires_grad_() for name, param in own.items()},
            {name: param * 2 for name, param in own.items()},
            dict(reference.named_parameters()),
        )
        for tensors in others:
            message = r"Parameter '0\.weight' was replaced after gtp_shard by a .* without functional_call"
            with self.assertRaisesRegex(RuntimeError, message):
                torch.func.functional_call(model, tensors, (rows,))
        values = {name: param.detach() for name, param in own.items()}
        with self.assertRaisesRegex(RuntimeError, "was replaced after gtp_shard by .* without functional_call"):
            torch.func.grad(lambda values: torch.func.functional_call(model, values, (rows,)).sum())(values)
        model.zero_grad()
        mean_square(model(rows)).backward()
        assert_same_params(model, reference, "grad")


instantiate_parametrized_tests(TestModels)
