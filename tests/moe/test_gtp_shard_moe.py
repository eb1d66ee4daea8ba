"""A mixture of experts under ``gtp_shard``: dispatch over ``ep``, parallel folding, both loss normalizations.

The reference is one process with the same model on all ranks' tokens.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, assert_same_params
from deep_ep_common import deep_ep
from runtime_common import counted
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

from dtensor_gtp import GTPShard, WeightMesh, gtp_shard, init_weight_mesh, quantize_
from dtensor_gtp.nn import Dispatcher, GroupedExperts, GroupedLinear, GroupedMLP, TokenDispatcher, parallelize_experts
from dtensor_gtp.quant import MXFP8, NVFP4, Float8Blockwise, Float8Rowwise, Float8Tensorwise, Recipe

EXPERTS, WIDTH, HIDDEN, TOP_K, TOKENS = 4, 6, 8, 2, 5  # tokens of each rank


class Block(nn.Module):
    """A dense layer, a router and its experts, a residual connection around them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = GroupedExperts(GroupedMLP(EXPERTS, WIDTH, HIDDEN, **options))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.dense(x))
        weights, chosen = self.router(x).softmax(-1).topk(TOP_K)
        return x + self.experts(x, chosen, weights)


def make_block(**options: Any) -> Block:
    block = Block(**options)
    init(block)
    return block


def init(block: nn.Module) -> None:
    """The same values whether it is sharded or not."""
    torch.manual_seed(0)
    for param in block.parameters():
        nn.init.normal_(param, std=0.5)


def tokens_of(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def send(dispatcher: TokenDispatcher, num_tokens: int) -> tuple[torch.Tensor, Any]:
    """Tokens with the values 1 to ``num_tokens``, to the experts in turn."""
    x = torch.arange(1.0, 1 + num_tokens)[:, None].requires_grad_()
    return x, dispatcher.dispatch(x, torch.arange(num_tokens)[:, None] % EXPERTS)


def filled(dispatched: Any) -> torch.Tensor:
    """Its rows, as grouped layers leave them: zeros behind the last token."""
    is_filled = torch.arange(dispatched.rows.shape[0])[:, None] < dispatched.split_sizes.sum()
    return torch.where(is_filled, dispatched.rows, 0)


class TestMixtureOfExperts(GlooTest):
    def test_tokens_go_to_their_experts_and_back(self) -> None:
        """Also when all choose experts of the last rank, and the others get nothing."""
        for ep in (2, 4):
            meshes = meshes_of(ep=ep, expert_gtp=4 // ep)
            for method in ("all_to_all", "all_gather"):
                reference = make_block()
                with torch.no_grad():
                    reference.dense.bias.add_(3)  # inputs of the router are positive
                    reference.router.weight.copy_(torch.tensor([-1.0, -1.0, 0.5, 1.0])[:, None])
                model = shard(copy.deepcopy(reference), meshes, method)
                self.check_steps(f"{method} over {ep} ranks", reference, model, meshes)
                chosen = torch.arange(EXPERTS)[:, None] % 3
                dispatched = model.experts.dispatcher.dispatch(torch.ones(EXPERTS, WIDTH), chosen)
                self.assertEqual(dispatched.tokens_per_expert.tolist(), [2, 1, 1, 0])

    def test_a_token_may_choose_no_expert(self) -> None:
        """Numbers that no expert has count for nobody, also where a rank has no others."""
        mesh = weight_mesh(ep=4, expert_gtp=1)["ep"]
        for method, nobody in itertools.product(("all_to_all", "all_gather"), (-1, EXPERTS, EXPERTS + 3)):
            chosen = torch.tensor([[nobody, 0], [3, 1], [nobody, nobody], [2, nobody], [self.rank, nobody]])
            if self.rank == 1:
                chosen.fill_(nobody)
            is_expert = ((chosen >= 0) & (chosen < EXPERTS)).float()
            x, weights = tokens_of(self.rank).requires_grad_(), torch.rand(TOKENS, TOP_K).requires_grad_()
            dispatcher = TokenDispatcher(EXPERTS, mesh, method=method)
            dispatched = dispatcher.dispatch(x, chosen)
            counts = [int((chosen == expert).sum()) for expert in range(EXPERTS)]
            self.assertEqual(dispatched.tokens_per_expert.tolist(), counts)
            y = dispatcher.combine(filled(dispatched), dispatched, weights)
            expected = x * (is_expert * weights).sum(1, keepdim=True)
            self.assertEqual(y, expected, f"{method}, {nobody}")
            inputs = (x, weights)
            grads = [torch.autograd.grad(each.square().sum(), inputs) for each in (y, expected)]
            self.assertEqual(*grads, f"{method}, {nobody}")
        for method in ("DeepEP's example", "HybridEP's example"):
            chosen = torch.tensor([[-1, 0], [3, 1], [-1, -1], [2, -1], [self.rank, -1]])
            x, weights = tokens_of(self.rank).requires_grad_(), torch.rand(TOKENS, TOP_K).requires_grad_()
            y = OWN[method](mesh)(lambda rows, sizes: rows.sin(), x, chosen, weights)
            expected = x.sin() * ((chosen >= 0).float() * weights).sum(1, keepdim=True)
            self.assertEqual(y, expected, method)
            grads = [torch.autograd.grad(each.square().sum(), (x, weights)) for each in (y, expected)]
            self.assertEqual(*grads, method)

    def pairs(self) -> Iterator[tuple[str, Meshes]]:
        """Dense layers over 1, 2 and 4 ranks, experts over 1, 2 and 4."""
        by_size = {1: self.hsdp_mesh(4), 2: self.hsdp_mesh(2), 4: self.gtp_mesh()}
        for (gtp, dense), (expert_gtp, experts) in itertools.product(by_size.items(), repeat=2):
            yield f"gtp={gtp}, expert_gtp={expert_gtp}", Meshes(dense, experts, self.rank, 4)

    def test_r1_gradients_are_right_for_pairs_of_meshes(self) -> None:
        """Dense weights cut more often than experts, as often, and less often."""
        pairs = dict(self.pairs())
        for what in ("gtp=4, expert_gtp=2", "gtp=2, expert_gtp=2", "gtp=1, expert_gtp=4"):
            self.check_folding(what, pairs[what])

    @pytest.mark.long
    def test_r1_gradients_are_right_for_every_pair_of_meshes(self) -> None:
        for what, meshes in self.pairs():
            self.check_folding(what, meshes)

    def test_r1_gradients_are_right_with_expert_parallelism(self) -> None:
        for sizes in ({"ep": 2, "expert_gtp": 2}, {"ep": 4, "expert_gtp": 1}):
            self.check_folding(f"{sizes}", meshes_of(**sizes))
        for method in ("all_gather", *OWN):
            self.check_folding(method, meshes_of(ep=2, expert_gtp=2), method)
        by_rows = meshes_of(ep=2, expert_gtp=2)._replace(cut=lambda p: GTPShard(1) if p.ndim == 3 else None)
        self.check_folding("rows of each expert", by_rows)

    def test_r1_gradients_are_right_with_tensor_parallel_experts(self) -> None:
        sizes = {"gtp": 2, "tp": 2, "ep": 2, "expert_tp": 2}
        self.check_folding(f"{sizes}", meshes_of(**sizes), is_fused=False)

    def test_recomputation_with_expert_parallelism(self) -> None:
        """Tokens are sent once more in backward; both ways of sending them, both kinds of checkpoints."""
        meshes = meshes_of(ep=2, expert_gtp=2)
        reference = make_block()
        batches = [tokens_of(stream).requires_grad_() for stream in range(meshes.num_streams)]
        (sum(reference(batch).square().mean() for batch in batches) / len(batches)).backward()
        for method, use_reentrant in itertools.product(("all_to_all", "all_gather"), (True, False)):
            model = shard(make_block(), meshes, method)
            x = batches[meshes.stream].detach().requires_grad_()
            checkpoint(model, x, use_reentrant=use_reentrant).square().mean().backward()
            self.same(f"{method} {use_reentrant}", model, reference, "grad")
            self.assertEqual(x.grad, batches[meshes.stream].grad * len(batches))

    def test_recipes_with_expert_parallelism_and_folding(self) -> None:
        """Each expert's matrices are quantized by themselves, so where they lie does not matter."""
        for recipe in (MXFP8(), MXFP8(compute="float8"), Float8Rowwise(compute="float8")):
            self.check_recipe(recipe, meshes_of(ep=2, expert_gtp=2))

    @pytest.mark.soak
    def test_more_recipes(self) -> None:
        for recipe in (Float8Tensorwise(), Float8Blockwise(), NVFP4(), Float8Rowwise()):
            self.check_recipe(recipe, meshes_of(ep=2, expert_gtp=2))
            self.check_recipe(recipe, Meshes(self.hsdp_mesh(2), self.gtp_mesh(), self.rank, 4))

    def check_recipe(self, recipe: Recipe, meshes: Meshes) -> None:
        """Beside one process with the same recipe."""
        reference = Block()
        reference.experts = GroupedExperts(GroupedMLP(EXPERTS, WIDTH, 80))  # rows of several blocks, the last one short
        init(reference)
        is_grouped = lambda module, name: isinstance(module, GroupedLinear)  # noqa: E731
        model = shard(quantize_(copy.deepcopy(reference), recipe, filter_fn=is_grouped), meshes)
        quantize_(reference, recipe, filter_fn=is_grouped)
        batches = [tokens_of(stream) for stream in range(meshes.num_streams)]
        (sum(reference(batch).square().mean() for batch in batches) / len(batches)).backward()
        model(batches[meshes.stream]).square().mean().backward()
        self.same(f"{recipe}", model, reference, "grad")
        for module in (reference, model):
            torch.optim.SGD(module.parameters(), lr=0.1).step()
        self.same(f"{recipe}", model, reference, "param")

    @pytest.mark.soak
    def test_more_meshes(self) -> None:
        for sizes in ({"ep": 2, "dp": 2, "gtp": 2}, {"ep": 2, "gtp": 2, "replicate": 2}, {"expert_gtp": 2, "dp": 4}):
            self.check_folding(f"{sizes}", meshes_of(**{"gtp": 1, **sizes}))
        sizes = {"gtp": 2, "tp": 2, "expert_gtp": 2, "expert_tp": 2}
        self.check_folding(f"{sizes}", meshes_of(**sizes), is_fused=False)
        for ep in (2, 4):
            self.check_folding("all_gather", meshes_of(ep=ep, expert_gtp=1), "all_gather")

    def test_what_does_not_fit_is_refused_on_all_ranks(self) -> None:
        by_ep, by_tp = weight_mesh(ep=4, expert_gtp=1), weight_mesh(gtp=2, tp=2, ep=2, expert_tp=2)
        ep, tp = by_ep["ep"], by_tp["expert_tp"]
        is_cut = parallelize_experts(GroupedMLP(4, WIDTH, HIDDEN), ep)
        odd = GroupedMLP(4, WIDTH, 7, is_fused=False)
        for call, message in (
            (lambda: parallelize_experts(GroupedMLP(6, WIDTH, HIDDEN), ep), "4 ranks .*'ep' divide, but got 6"),
            (lambda: TokenDispatcher(6, ep), "'ep' divide, but got 6"),
            (lambda: TokenDispatcher(4, by_ep["expert_dp", "ep"]), r"1-D mesh, but .* axes \('expert_dp', 'ep'\)"),
            (lambda: parallelize_experts(odd, None, tp), "divides the inner width 7"),
            (lambda: parallelize_experts(is_cut, ep), "nothing has cut yet, but got DTensors"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                call()
        with self.assertRaisesRegex(NotImplementedError, "tp_mesh for a GroupedMLP with is_fused=False"):
            parallelize_experts(GroupedMLP(4, WIDTH, HIDDEN), None, tp)

    def test_layers_that_share_a_weight_share_it_afterwards(self) -> None:
        """Each of them got a parameter of its own, with its own part of the gradient."""
        mesh = weight_mesh(ep=4, expert_gtp=1)

        def tied() -> nn.ModuleList:
            torch.manual_seed(0)
            layers = nn.ModuleList(GroupedLinear(4, WIDTH, WIDTH) for _ in range(2))
            layers[1].weight = layers[0].weight
            return layers

        together, one_by_one = tied(), tied()
        parallelize_experts(together, mesh["ep"])
        for layer in one_by_one:
            parallelize_experts(layer, mesh["ep"])
        for first, second in (together, one_by_one):
            assert first.weight is second.weight
            assert first.weight.to_local().shape == (1, WIDTH, WIDTH)
            assert first.bias is not second.bias
        inner = nn.ModuleDict(
            {"mlp": GroupedMLP(4, WIDTH, HIDDEN, is_fused=False), "alone": GroupedLinear(4, WIDTH, HIDDEN)}
        )
        inner["alone"].weight = inner["mlp"].up.weight  # tensor parallelism cuts it in the MLP only
        tp = weight_mesh(gtp=2, tp=2, ep=2, expert_tp=2)
        with self.assertRaisesRegex(ValueError, "layers that share a parameter to be cut alike, but 'weight' of shape"):
            parallelize_experts(inner, tp["ep"], tp["expert_tp"])

    def test_a_gather_carries_as_many_tokens_as_agreed_on(self) -> None:
        """All ranks agree on the most of the first dispatch, or on more where all have more; else all raise."""
        mesh = weight_mesh(ep=4, expert_gtp=1)["ep"]
        by_gather = functools.partial(TokenDispatcher, EXPERTS, mesh, method="all_gather")

        def returned(dispatcher: TokenDispatcher, counts: list[int]) -> int:
            """How many rows arrive, filled or not, which are right when they come back."""
            x, dispatched = send(dispatcher, counts[self.rank])
            expected = sum(len(range(self.rank, count, EXPERTS)) for count in counts)
            self.assertEqual(dispatched.split_sizes.tolist(), [expected])
            self.check_return(dispatcher, x, dispatched)
            return dispatched.rows.shape[0]

        agreed, declared = by_gather(), by_gather(max_tokens=2)
        for counts, capacity in (([3, 1, 0, 2], 3), ([1, 1, 1, 1], 3), ([4, 5, 4, 6], 6), ([6, 0, 0, 0], 6)):
            self.assertEqual(returned(agreed, counts), 4 * capacity, f"{counts}")
        self.assertEqual(returned(by_gather(), [0, 0, 0, 0]), 4)
        match = (
            r"at most 6 tokens on each rank \(the most of the first dispatch.*\), but got \[6, 7, 1, 0\] on ranks "
            r"\[0, 1, 2, 3\] of mesh axes \('ep',\)\. Set max_tokens"
        )
        with self.assertRaisesRegex(ValueError, match):
            returned(agreed, [6, 7, 1, 0])
        self.assertEqual(returned(agreed, [2, 2, 2, 2]), 24, "an error leaves what was agreed on")
        self.assertEqual(returned(declared, [1, 2, 0, 1]), 8)
        match = r"at most 2 tokens on each rank \(max_tokens\), but got \[3, 3, 3, 3\]"
        with self.assertRaisesRegex(ValueError, match):
            returned(declared, [3, 3, 3, 3])
        # More are agreed on while tokens are under way, as where microbatches take turns in the layers of one model.
        dispatcher = by_gather()
        sent = [send(dispatcher, num_tokens) for num_tokens in (2, 3)]
        for x, dispatched in sent:
            self.check_return(dispatcher, x, dispatched)

    def check_return(self, dispatcher: TokenDispatcher, x: torch.Tensor, dispatched: Any) -> None:
        y = dispatcher.combine(filled(dispatched), dispatched, torch.full((len(x), 1), 2.0))
        self.assertEqual(y, 2 * x)
        y.sum().backward()
        self.assertEqual(x.grad, torch.full_like(x, 2))

    def test_recomputation_after_more_were_agreed_on_raises(self) -> None:
        """Its shapes are others than those of the forward; with max_tokens they are not."""
        mesh = weight_mesh(ep=4, expert_gtp=1)["ep"]
        for max_tokens in (None, 3):
            dispatcher = TokenDispatcher(EXPERTS, mesh, method="all_gather", max_tokens=max_tokens)

            def routed(x: torch.Tensor, dispatcher: TokenDispatcher = dispatcher) -> torch.Tensor:
                dispatched = dispatcher.dispatch(x, torch.arange(len(x))[:, None] % EXPERTS)
                return dispatcher.combine(filled(dispatched).square(), dispatched, torch.ones(len(x), 1))

            inputs = [torch.arange(1.0, 1 + n)[:, None].requires_grad_() for n in (2, 3)]
            first, second = (checkpoint(routed, x, use_reentrant=False) for x in inputs)
            second.sum().backward()
            self.assertEqual(inputs[1].grad, 2 * inputs[1])
            if max_tokens is None:
                with self.assertRaisesRegex(CheckpointError, "have different metadata"):
                    first.sum().backward()
            else:
                first.sum().backward()
                self.assertEqual(inputs[0].grad, 2 * inputs[0])

    def test_cuts_that_break_groups_or_blocks_are_refused_on_all_ranks(self) -> None:
        by_ep, by_tp = weight_mesh(ep=4, expert_gtp=1), weight_mesh(gtp=2, tp=2, ep=2, expert_tp=2)
        layer = cut(GroupedLinear(6, WIDTH, HIDDEN, bias=False), by_ep["ep"], 0)
        match = r"the same number of groups on each rank .* 'weight' of shape \(6, 8, 6\), .* 'ep' of size 4"
        with self.assertRaisesRegex(ValueError, match):
            gtp_shard(layer, by_ep["expert_gtp"], schedule=ALL)
        layer = cut(GroupedLinear(4, WIDTH, HIDDEN, bias=False), by_tp["expert_tp"], 1)
        blocks = lambda param: GTPShard(1, block_size=3)  # noqa: E731
        match = "whole blocks of 3 along dim 1, .* 'expert_tp' of size 2 cuts into slices of 4"
        with self.assertRaisesRegex(ValueError, match):
            gtp_shard(layer, by_tp["expert_gtp"], schedule=ALL, shard_placement_fn=blocks)
        biased = cut(GroupedLinear(4, WIDTH, HIDDEN), by_tp["expert_tp"], 2)
        gtp_shard(biased, by_tp["expert_gtp"], schedule=ALL)
        match = "a bias where tensor parallelism splits its 6 in_features into 3"
        with self.assertRaisesRegex(NotImplementedError, match), counted() as counts:
            biased(torch.zeros(4, WIDTH // 2), torch.ones(4, dtype=torch.int64))
        self.assertEqual(sum(counts()), 0)

    def check_folding(self, what: str, meshes: Meshes, method: str = "all_to_all", **options: Any) -> None:
        """One model, because new communicators take longer than training: all-ones gradients, then steps."""
        reference = make_block(**options)
        model = shard(copy.deepcopy(reference), meshes, method)
        self.check_all_ones(what, model)
        for module in (reference, model):
            init(module)
        self.check_steps(what, reference, model, meshes)

    def check_steps(self, what: str, reference: nn.Module, model: Any, meshes: Meshes) -> None:
        """Beside one process, with a mean over ranks and with a sum over all tokens of ranks that have unequal numbers
        of them."""
        for is_mean in (True, False):
            model.set_gradient_divide_factor(meshes.num_streams if is_mean else 1)
            missing = 0 if is_mean else 1
            batches = [tokens_of(s)[: TOKENS - s * missing] for s in range(meshes.num_streams)]
            total = sum(len(batch) for batch in batches)
            (sum(reference(batch).square().sum() for batch in batches) / total).backward()
            own = model(batches[meshes.stream]).square().sum() / (TOKENS if is_mean else total)
            own.backward()
            self.same(what, model, reference, "grad")
            for module in (reference, model):
                optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
                optimizer.step()
                optimizer.zero_grad()
            self.same(what, model, reference, "param")

    def check_all_ones(self, what: str, model: Any) -> None:
        """Gradients of ones have the norm sqrt(numel), over four microbatches."""
        experts = model.experts
        for param in model.parameters():
            nn.init.ones_(param)
        activation, experts.mlp.activation = experts.mlp.activation, torch.ones_like
        for _ in range(4):
            # Each rank sends a token to each expert; its rows sum up to one, so hidden rows are ones.
            x = torch.full((EXPERTS, WIDTH), 1 / WIDTH)
            chosen, weights = torch.arange(EXPERTS)[:, None], torch.ones(EXPERTS, 1)
            (experts(x, chosen, weights).sum() / 4).backward()
            (model.dense(torch.ones(1, WIDTH)).sum() / 4).backward()
        for param in (model.dense.weight, experts.mlp.down.weight):
            norm = torch.nn.utils.get_total_norm([param.grad]).full_tensor()
            self.assertEqual(norm, torch.tensor(param.numel() ** 0.5), what)
        model.zero_grad()
        experts.mlp.activation = activation

    @staticmethod
    def same(what: str, model: nn.Module, reference: nn.Module, kind: str) -> None:
        try:
            assert_same_params(model, reference, kind)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None


class SumOnTheWay:
    """A dispatcher of a user, in DeepEP's order: weights go with the tokens, results are summed up on the way back."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.num_local = mesh.get_group(), EXPERTS // mesh.size()

    def __call__(self, run_experts: Any, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        sent = self.send(tokens, experts, weights, TOKENS)
        return self.finish(run_experts, *sent)[: len(tokens)]

    def send(self, tokens: Tensor, experts: Tensor, weights: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        """Begin to gather from all ranks: functional collectives wait at the first use of their result."""
        pad = (0, 0, 0, capacity - len(tokens))
        x, w = (all_gather_tensor_autograd(F.pad(t, pad), 0, self.group) for t in (tokens, weights))
        return x, all_gather_tensor(F.pad(experts, pad), 0, self.group), w

    def finish(self, run_experts: Any, x: Tensor, chosen: Tensor, w: Tensor) -> Tensor:
        first = self.group.rank() * self.num_local
        found = [(chosen == expert).nonzero() for expert in range(first, first + self.num_local)]
        token, slot = torch.cat(found).unbind(1)
        y = run_experts(x[token], torch.tensor([len(rows) for rows in found])) * w[token, slot, None]
        sums = x.new_zeros(x.shape).index_add(0, token, y)
        return reduce_scatter_tensor_autograd(sums, "sum", 0, self.group)


class Halves(SumOnTheWay):
    """Half of the tokens travel while experts compute the other half. Each expert is used twice."""

    def __call__(self, run_experts: Any, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        size = -(-TOKENS // 2)
        parts = [[t[rows] for t in (tokens, experts, weights)] for rows in (slice(size), slice(size, None))]
        sent = [self.send(*part, size) for part in parts]
        results = [self.finish(run_experts, *each)[: len(part[0])] for each, part in zip(sent, parts, strict=True)]
        return torch.cat(results)


def deepep(mesh: DeviceMesh) -> Dispatcher:
    with deep_ep():
        from deepep_dispatcher import DeepEPDispatcher

        return DeepEPDispatcher(mesh, EXPERTS)


def hybridep(mesh: DeviceMesh) -> Dispatcher:
    with deep_ep():
        from hybridep_dispatcher import HybridEPDispatcher

        return HybridEPDispatcher(mesh, EXPERTS, dim=WIDTH, max_tokens=TOKENS)


OWN = {"own": SumOnTheWay, "own, in halves": Halves, "DeepEP's example": deepep, "HybridEP's example": hybridep}


class Meshes(NamedTuple):
    """Where dense layers and experts are sharded, which of the streams of tokens is this rank's, and the axes along
    which experts are cut before."""

    dense: DeviceMesh
    experts: DeviceMesh
    stream: int
    num_streams: int
    ep: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    cut: Any = None  # ``shard_placement_fn`` of the experts


@functools.cache
def weight_mesh(**sizes: int) -> WeightMesh:
    return init_weight_mesh("cpu", **{"gtp": 4, **sizes})


def meshes_of(**sizes: int) -> Meshes:
    mesh = weight_mesh(**sizes)
    ep, tp = (mesh[name] if mesh[name].size() > 1 else None for name in ("ep", "expert_tp"))
    return Meshes(mesh.weights, mesh.expert_weights, mesh.data.get_local_rank(), mesh.data.size(), ep, tp)


def shard(model: Block, meshes: Meshes, method: str = "all_to_all") -> Any:
    """Experts on their own mesh first, then the rest; gradients of both are the mean over ranks with different data."""
    experts: Any = model.experts
    if method in OWN:
        parallelize_experts(experts, meshes.ep)
        experts.dispatcher = OWN[method](meshes.ep)
    else:
        parallelize_experts(experts, meshes.ep, meshes.tp, method=method)
    gtp_shard(experts, meshes.experts, schedule=ALL, shard_placement_fn=meshes.cut)
    experts.set_gradient_divide_factor(meshes.num_streams)
    return gtp_shard(model, meshes.dense, schedule=ALL)


def cut(layer: GroupedLinear, mesh: DeviceMesh, dim: int) -> GroupedLinear:
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(dim)]))
    return layer
