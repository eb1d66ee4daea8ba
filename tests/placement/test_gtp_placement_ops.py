"""Ops on DTensors with GTPShard placements: what keeps the layout, what gathers, what is refused.

Four ranks are simulated in one process (LocalTensorMode over the fake process group).
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from placement_common import (
    CASES,
    Case,
    Meshes,
    assert_holds,
    coded,
    each_op_case,
    local_tensors,
    shard,
    simulated_meshes,
    whole,
)
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

from dtensor_gtp.placement import GTPShard


@pytest.fixture(scope="module")
def meshes() -> Iterator[Meshes]:
    with simulated_meshes() as made:
        yield made


# --- ops --------------------------------------------------------------------------------------------------------------

F = nn.functional
BLOCK_SIZE = 8  # of 37 rows, the last of four ranks has none


def ops(text: str) -> list[str]:
    """Expressions of operands ``a`` and ``b``."""
    return [expression.strip() for expression in text.strip().replace("\n", ";").split(";")]


KEEP_LAYOUT = ops("""
    a + b; a + 1; torch.sub(a, b, alpha=2); 1 - a; a * b; a * torch.tensor(2.0); a.pow(2).sqrt(); F.gelu(a)
    a.clamp(-1, 1); torch.maximum(a, b); torch.where(a > b, a, b); a.lerp(b, 0.3); a.addcmul(a, b, value=0.5)
    a.addcdiv(a, b, value=0.5); torch.isfinite(a); a.nan_to_num(); a.masked_fill(b > 0, 7.0); a.to(torch.float64)
    a.to(torch.bfloat16); a.cpu(); a.clone(); a.detach(); a.contiguous(); torch.zeros_like(a); torch.ones_like(a)
    torch.full_like(a, 3.0, dtype=torch.float64); torch.empty_like(a).fill_(4)
    torch._foreach_add([b, a], [a, b])[1]; torch._foreach_mul([b, a], 2.0)[1]
    torch._foreach_mul([b, a], torch.tensor(2.0))[1]; torch._foreach_div([a], [b])[0]
    torch._foreach_sqrt([a.abs()])[0]
""")
IN_PLACE = ops("""
    a.add_(b, alpha=2); a.mul_(2); a.div_(b); a.copy_(b); a.zero_(); a.fill_(3); a.clamp_(0, 1); a.abs_()
    a.lerp_(b, 0.1); a.addcmul_(b, b); a.addcdiv_(b, b, value=0.5); a.masked_fill_(b > 0, 0.0)
    torch.add(a, b, out=a); torch._foreach_add_([a], [b], alpha=2); torch._foreach_mul_([a], torch.tensor(3.0))
    torch._foreach_zero_([a]); torch._foreach_lerp_([a], [b], 0.5); torch._foreach_addcdiv_([a], [b], [b], [0.5])
    a.transpose(0, -1).mul_(2); a.detach().add_(b)
""")
REDUCE = ops("""
    a.sum(); a.sum(0); a.sum(-1); a.sum(0, keepdim=True); a.norm(); torch.linalg.vector_norm(a, 1)
    torch.linalg.vector_norm(a, math.inf); torch.linalg.vector_norm(a, dim=-1); torch._foreach_norm([b, a])
    torch._foreach_norm([b, a], math.inf); a.max(); a.min(); a.amax(0); a.amin(-1); (a > 2).any()
    torch.isfinite(a).all(); a.mean(); a.mean(0); a.var(); a.clamp(0.9, 1.1).prod(); a.logsumexp(0)
    a.count_nonzero()
""")
GATHER = ops("""
    torch.cat([a, b]); torch.stack([a, b]); a.cumsum(0); a.softmax(-1); a.sort(0)[0]; a.topk(1, 0)[0]
    a.index_select(0, torch.tensor([0, 1])); a.new_zeros(3); a.new_ones(a.shape); a.tril()
    torch.ones(5, a.shape[0]) @ a if a.ndim == 2 else a
    F.linear(torch.ones(2, a.shape[-1]), a) if a.ndim == 2 else a
""")
REFUSED = ops("""
    a.view(-1, 1); a.reshape(1, -1); a[1:2]; a[0]; a.unsqueeze(0); a.chunk(2); a.__setitem__(0, 1.0)
    a.index_fill_(0, torch.tensor([0, 1]), 1.0); torch._foreach_copy_([a], [b]); a.exponential_(); a.argmax()
    a.cumsum_(0)
""")


def operands(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    # no random ops: LocalTensorMode would draw other values for each rank
    return (1.7 * coded(case.shape)).sin(), (0.9 * coded(case.shape)).cos()


@functools.cache
def sharded_operands(case: Case, meshes: Meshes) -> tuple[DTensor, DTensor]:
    mesh, placements = case.on(meshes, BLOCK_SIZE)
    a, b = (shard(operand, mesh, placements) for operand in operands(case))
    return a, b


def run_op(op: str, case: Case, meshes: Meshes) -> tuple[Any, Any, DTensor, torch.Tensor]:
    """Results on DTensors and on plain tensors, and the first operands afterwards."""
    a, b = operands(case)
    da, db = (operand.clone() for operand in sharded_operands(case, meshes))
    with implicit_replication():
        result = eval(op, globals(), {"a": da, "b": db})
    return result, eval(op, globals(), {"a": a, "b": b}), da, a


@pytest.mark.parametrize("op", KEEP_LAYOUT)
@each_op_case
def test_elementwise_ops_keep_the_layout(meshes: Meshes, case: Case, op: str) -> None:
    result, expected, _, _ = run_op(op, case, meshes)
    assert result.dtype == expected.dtype
    assert_holds(result, expected, case.on(meshes, BLOCK_SIZE)[1])


@pytest.mark.parametrize("op", IN_PLACE)
@each_op_case
def test_in_place_ops_keep_the_layout(meshes: Meshes, case: Case, op: str) -> None:
    _, _, changed, expected = run_op(op, case, meshes)
    assert_holds(changed, expected, case.on(meshes, BLOCK_SIZE)[1])


@pytest.mark.parametrize("op", [*REDUCE, *GATHER])
@each_op_case
def test_other_ops_give_right_values(meshes: Meshes, case: Case, op: str) -> None:
    result, expected, _, _ = run_op(op, case, meshes)
    result, expected = whole(result), whole(expected)
    torch.testing.assert_close(result, list(expected) if isinstance(result, list) else expected)


@pytest.mark.parametrize("op", REFUSED)
def test_ops_that_cannot_be_right_raise(meshes: Meshes, op: str) -> None:
    with pytest.raises(NotImplementedError, match=r"does not support a GTPShard with block_size > 1.*full_tensor"):
        run_op(op, CASES["uneven"], meshes)


def test_convolution_weights_in_blocks_raise(meshes: Meshes) -> None:
    # DTensor's handler of convolutions would use the shard as if it were the weight
    weight = shard(coded((10, 3, 2)), meshes.gtp, [GTPShard(0, block_size=4)])
    message = r"aten.convolution.default does not support .*DTensor has a special handler"
    with pytest.raises(NotImplementedError, match=message):
        F.conv1d(shard(coded((1, 3, 8)), meshes.gtp, [Replicate()]), weight)


def test_inference_mode(meshes: Meshes) -> None:
    # composite ops arrive undecomposed
    mesh, placements = CASES["tp_same_dim"].on(meshes, 4)
    tensor = coded((25, 2))
    with torch.inference_mode():
        source = shard(tensor, mesh, placements)
        assert_holds((source * 2).contiguous().to(torch.float64), (tensor * 2).double(), placements)
        torch.testing.assert_close(whole(source.norm()), tensor.norm())
        columns = shard(torch.ones(2, 3), mesh, [Replicate(), Replicate()])
        assert torch.equal(whole(torch.matmul(source, columns)), tensor @ torch.ones(2, 3))
        with pytest.raises(NotImplementedError, match=r"aten.view.default does not support"):
            source.reshape(-1)


@pytest.mark.parametrize(
    "op", [lambda t: t.transpose(0, 1), lambda t: t.mT, lambda t: t.t(), lambda t: t.permute(1, 0)]
)
def test_transposes_carry_the_blocks_along(meshes: Meshes, op: Callable[[Any], Any]) -> None:
    tensor = coded((10, 3))
    flipped = op(shard(tensor, meshes.gtp, [GTPShard(0, block_size=4)]))
    assert flipped.placements == (GTPShard(1, block_size=4),)
    assert torch.equal(whole(flipped), op(tensor))
    assert_holds(op(flipped).contiguous(), tensor, [GTPShard(0, block_size=4)])


def test_norms_and_sums_do_not_gather(meshes: Meshes) -> None:
    tensor = shard(coded((10, 3)), meshes.gtp, [GTPShard(0, block_size=2)])
    with CommDebugMode() as comms:
        torch._foreach_norm([tensor])
        torch.linalg.vector_norm(tensor)
        (tensor * 2 + tensor).sum()
        torch.zeros_like(tensor).add_(tensor)
        tensor.new_zeros(3)
        assert tensor.sum(0).placements == (Partial(),)
    assert_holds(tensor.sum(1), coded((10, 3)).sum(1), tensor.placements)
    assert comms.get_total_counts() == 0


# --- operands with unlike layouts -------------------------------------------------------------------------------------

OTHERS: list[tuple[Placement, ...]] = [
    (Replicate(),),
    (Shard(0),),
    (Shard(1),),
    (GTPShard(0),),
    (GTPShard(0, block_size=3),),
    (GTPShard(1, block_size=2),),
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_operands_follow_the_first_block_placement_or_what_is_written(
    meshes: Meshes, other: tuple[Placement, ...]
) -> None:
    mesh, placements = meshes.gtp, (GTPShard(0, block_size=4),)
    a, b = operands(CASES["uneven"])
    da, db = shard(a, mesh, placements), shard(b, mesh, other)
    assert_holds(da + db, a + b, placements)
    assert_holds(torch._foreach_mul([da], [db])[0], a * b, placements)
    is_block = getattr(other[0], "block_size", 1) > 1
    assert_holds(db * da, a * b, other if is_block else placements)
    assert_holds(da.clone().copy_(db), b, placements)
    assert_holds(db.clone().copy_(da), a, other)
    assert_holds(db.clone().add_(da), a + b, other)
    written = db.clone()
    torch._foreach_add_([written], [da])
    assert_holds(written, a + b, other)


def test_lists_may_mix_placements(meshes: Meshes) -> None:
    mesh = meshes.gtp
    kinds = [(Replicate(),), (GTPShard(0, block_size=4),), (Shard(0),), (GTPShard(0, block_size=3),)]
    a, b = operands(CASES["uneven"])
    left, right = [shard(a, mesh, k) for k in kinds], [shard(b, mesh, k) for k in kinds]
    for result, kind in zip(torch._foreach_add(left, right), kinds, strict=True):
        assert_holds(result, a + b, kind)
    torch._foreach_mul_(left, right)
    for result, kind in zip(left, kinds, strict=True):
        assert_holds(result, a * b, kind)
    for norm in torch._foreach_norm(right):
        torch.testing.assert_close(whole(norm), b.norm())


def test_partial_operands_are_reduced(meshes: Meshes) -> None:
    mesh, placements = meshes.gtp, (GTPShard(0, block_size=4),)
    a, b = operands(CASES["uneven"])
    partial = DTensor.from_local(shard(b, mesh, [Replicate()]).to_local(), mesh, [Partial()])
    da = shard(a, mesh, placements)
    torch.testing.assert_close(whole(da + partial), a + 4 * b)
    torch.testing.assert_close(whole(partial * da), a * 4 * b)
    with pytest.raises(NotImplementedError, match="write to a tensor with partial values"):
        partial.add_(da)


def test_outputs_with_unlike_placements_raise(meshes: Meshes) -> None:
    placements = (GTPShard(0, block_size=4),)
    a, _ = operands(CASES["uneven"])
    source = shard(a, meshes.gtp, placements)
    mantissa, exponent = torch.empty_like(source), shard(torch.zeros(a.shape).int(), meshes.gtp, [Replicate()])
    with pytest.raises(NotImplementedError, match=r"aten.frexp.* (with different placements|to a gathered copy)"):
        torch.frexp(source, out=(mantissa, exponent))
    if torch.__version__ < "2.13":
        return  # without a rule for outputs that lie alike
    torch.frexp(source, out=(mantissa, exponent := exponent.redistribute(placements=placements)))
    for actual, expected in zip((mantissa, exponent), torch.frexp(a), strict=True):
        assert_holds(actual, expected, placements)


@pytest.mark.parametrize(
    ("left", "right", "expected_dim"),
    [
        (((10, 3), 0), ((3,), None), 0),
        (((10, 3), 0), ((10, 1), 0), 0),
        (((10, 3), 0), ((), None), 0),
        (((37,), 0), ((2, 1), None), 1),
        (((2, 37), 1), ((37,), 0), 1),
        (((10, 3), 0), ((10, 1), None), 0),
        (((37,), 0), ((2, 37), None), 1),
        (((1, 3), 0), ((10, 3), None), None),
    ],
    ids=str,
)
def test_broadcasting(meshes: Meshes, left: tuple[Any, Any], right: tuple[Any, Any], expected_dim: int | None) -> None:
    def made(shape: tuple[int, ...], dim: int | None) -> tuple[torch.Tensor, DTensor]:
        tensor = coded(shape).sin()
        return tensor, shard(tensor, meshes.gtp, [Replicate() if dim is None else GTPShard(dim, block_size=4)])

    (a, da), (b, db) = made(*left), made(*right)
    expected = [Replicate() if expected_dim is None else GTPShard(expected_dim, block_size=4)]
    with CommDebugMode() as comms:
        product, difference = da * db, db - da
    assert_holds(product, a * b, expected)
    assert_holds(difference, b - a, expected)
    # a replicated operand is cut without communication; a dim of size 1 that grows has to be gathered
    assert comms.get_total_counts() == (2 if expected_dim is None else 0)


def test_caches_tell_block_sizes_apart(meshes: Meshes) -> None:
    # one shape and one op: only the block size, which torch's placements do not have, makes the difference
    tensor = coded((40, 3))
    for placement in [Shard(0), GTPShard(0, block_size=8), GTPShard(0, block_size=16), GTPShard(0), Shard(0)]:
        source = shard(tensor, meshes.gtp, [placement])
        assert_holds(source, tensor, [placement])
        assert_holds(source + source, 2 * tensor, [placement])
        assert_holds(torch.zeros_like(source).add_(source), tensor, [placement])
        assert_holds(torch._foreach_neg([source])[0], -tensor, [placement])


def test_random_ops_fill_every_rank_by_its_own_size(meshes: Meshes) -> None:
    placements = (GTPShard(0, block_size=4),)
    source = shard(torch.full((10, 3), math.nan), meshes.gtp, placements)
    for filled in [
        torch.rand_like(source),
        torch.randn_like(source),
        source.clone().normal_(),
        source.clone().uniform_(),
        source.clone().bernoulli_(0.5),
    ]:
        assert filled.placements == placements
        assert [t.shape[0] for t in local_tensors(filled).values()] == [4, 4, 2, 0]
        assert torch.isfinite(whole(filled)).all()
