"""Elementwise ops on DTensors that lie alike: answered without torch's search, and as torch's search answers.

One process is one rank of a fake process group, which communicates nothing.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from common import fake_world
from counting import noted
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._dtensor.elementwise import is_elementwise, operands_of, propagate_alike
from dtensor_gtp.placement import GTPShard

aten = torch.ops.aten
R = Replicate()


@pytest.fixture(scope="module")
def meshes() -> Iterator[dict[int, DeviceMesh]]:
    """Meshes by their number of axes; 0 is one whose first axis has one rank."""
    shapes = {0: (1, 8), 1: (8,), 2: (2, 4), 3: (2, 2, 2)}
    with fake_world(world_size=8):
        yield {
            n: init_device_mesh("cpu", shape, mesh_dim_names=("c", "b", "a")[-len(shape) :])
            for n, shape in shapes.items()
        }


def propagator() -> ShardingPropagator:
    return compat.op_dispatcher().sharding_propagator  # type: ignore[no-any-return]


def search(schema: OpSchema) -> OutputSharding:
    """torch's own answer."""
    return ShardingPropagator.propagate_op_sharding_non_cached(propagator(), schema)


def shortcut(schema: OpSchema) -> OutputSharding | None:
    return propagate_alike(schema, list(operands_of(schema)))


def schema_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> OpSchema:
    tables = (propagator().op_to_schema_info, propagator().op_to_schema_info_for_single_dim_strategy)
    info = next((table[op] for table in tables if op in table), None)
    return OpSchema(op, tuple(args), kwargs, schema_info=info)


def spec_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> DTensorSpec:
    return compat.make_spec(mesh, placements, torch.Size(shape), dtype)


# What stands for an operand below: a tensor, tensors of other dtypes, a whole scalar, a list of tensors and of scalars.
T, HALF, INT, BOOL, S, LIST, STEPS = "T", "HALF", "INT", "BOOL", "S", "LIST", "STEPS"

ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}


def calls(text: str) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Ops of aten, with their arguments."""
    names = {**globals(), "arguments": lambda *args, **kwargs: (args, kwargs)}
    found = []
    for call in text.strip().replace("\n", ";").split(";"):
        packet, overload, arguments = re.fullmatch(r"(\w+)\.(\w+)(.*)", call.strip()).groups()
        found.append((getattr(getattr(aten, packet), overload), *eval(f"arguments{arguments}", names)))
    return found


CALLS = calls("""
    add_.Tensor(T, T, alpha=-0.1); mul_.Tensor(T, 0.9); mul_.Tensor(T, S); mul_.Tensor(INT, 2)
    lerp_.Scalar(T, T, 0.1); addcmul_.default(T, HALF, HALF, value=0.1); addcdiv_.default(T, T, T, value=-0.1)
    copy_.default(T, HALF); copy_.default(HALF, INT); zero_.default(T); fill_.Scalar(T, 1.0); normal_.default(T)
    uniform_.default(T, -0.1, 0.1); sqrt_.default(T); relu_.default(T); masked_fill_.Scalar(T, BOOL, 0.0)
    add.Tensor(T, 1e-8); mul.Tensor(T, T); mul.Tensor(HALF, T); mul.Tensor(INT, 0.5); div.Tensor(T, S)
    div.Tensor(S, T); add.Tensor(S, S); sqrt.default(T); sqrt.default(INT); pow.Tensor_Scalar(T, 2); gt.Scalar(T, 0)
    maximum.default(T, T); maximum.out(T, T, out=T); where.self(BOOL, T, S)
    clone.default(T, memory_format=torch.preserve_format); detach.default(T)
    _to_copy.default(T, dtype=torch.bfloat16); _to_copy.default(T, dtype=torch.complex64)
    zeros_like.default(T, memory_format=torch.preserve_format); zeros_like.default(T, dtype=torch.int64)
    full_like.default(T, 3); randn_like.default(HALF); native_dropout.default(T, 0.5, True)
    _foreach_add.List(LIST, LIST); _foreach_add_.Scalar(LIST, 1); _foreach_mul.ScalarList(LIST, [1.0, 2.0])
    _foreach_mul_.Tensor(LIST, S); _foreach_lerp_.Scalar(LIST, LIST, 0.1)
    _foreach_addcdiv_.ScalarList(LIST, LIST, LIST, [0.1, 0.2]); _foreach_sqrt.default(LIST)
    _foreach_pow.List(LIST, LIST); _fused_adamw_.default(LIST, LIST, LIST, LIST, [], STEPS, **ADAM)
""")

ONE_OF_A_KIND = {
    aten._fused_adamw_.default,
    aten.addcdiv_.default,
    aten.div.Tensor,
    aten.zeros_like.default,
    aten.native_dropout.default,
    aten._foreach_sqrt.default,
    aten._foreach_lerp_.Scalar,
}

# Of the meshes below, by their number of axes.
LAYOUTS: list[tuple[int, tuple[Placement, ...]]] = [
    (1, (GTPShard(1),)),
    (2, (R, GTPShard(0))),
    (2, (Shard(0), GTPShard(0))),
    (2, (R, R)),
    (2, (_StridedShard(0, split_factor=4), GTPShard(0))),
    (2, (GTPShard(0, split_factor=4), Shard(0))),
    (0, (GTPShard(1), GTPShard(0))),
]


def made(value: Any, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> Any:
    """The argument that ``value`` stands for."""
    whole = (R,) * mesh.ndim
    dtypes = {T: torch.float32, HALF: torch.bfloat16, INT: torch.int64, BOOL: torch.bool}
    if isinstance(value, str) and value in dtypes:
        return spec_of(mesh, placements, shape, dtypes[value])
    if value == S:
        return spec_of(mesh, whole, ())
    if value == LIST:
        return [spec_of(mesh, placements, shape), spec_of(mesh, whole, (3,))]
    return [spec_of(mesh, whole, ())] * 2 if value == STEPS else value


def call(
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...] = (16, 8),
) -> OpSchema:
    where = (mesh, placements, shape)
    return schema_of(op, [made(a, *where) for a in args], {name: made(a, *where) for name, a in kwargs.items()})


def exact(output: Any) -> Any:
    """An output with all that specs do not compare: classes of placements, and the kind of sequence."""
    if isinstance(output, list | tuple):
        return type(output), [exact(item) for item in output]
    if output is None:
        return None
    return output, [type(p) for p in output.placements], output.use_strided_shard_as_shard_order


def assert_answers_alike(schema: OpSchema) -> None:
    answer, expected = shortcut(schema), search(schema)
    assert answer is not None, schema
    assert exact(answer.output_spec) == exact(expected.output_spec), schema
    assert (answer.needs_redistribute, answer.redistribute_schema) == (False, None)
    assert (expected.needs_redistribute, expected.redistribute_schema) == (False, None), schema


def test_answers_are_those_of_torchs_search(meshes: dict[int, DeviceMesh]) -> None:
    for args in CALLS:
        assert_answers_alike(call(*args, meshes[1], (GTPShard(0),)))


def test_answers_for_each_layout(meshes: dict[int, DeviceMesh]) -> None:
    for num_axes, placements in LAYOUTS:
        mesh = meshes[num_axes]
        for args in CALLS:
            if args[0] in ONE_OF_A_KIND:
                assert_answers_alike(call(*args, mesh, placements))
        if not any(isinstance(p, _StridedShard) for p in placements):  # these need rows that divide
            for op, shape in ((aten.sqrt.default, (5, 3)), (aten.clone.default, (0, 3)), (aten.sqrt.default, (1, 8))):
                assert_answers_alike(call(op, (T,), {}, mesh, placements, shape))


def test_answers_on_more_axes_and_for_strides(meshes: dict[int, DeviceMesh]) -> None:
    for op in (aten.sqrt.default, aten.zeros_like.default, aten.relu_.default):
        assert_answers_alike(call(op, (T,), {}, meshes[3], (R, Shard(1), GTPShard(0))))
    transposed = spec_of(meshes[2], (Shard(1), GTPShard(0)), (16, 8))
    assert transposed.tensor_meta is not None
    transposed.tensor_meta = transposed.tensor_meta._replace(stride=(1, 16))
    usual = spec_of(meshes[2], (Shard(1), GTPShard(0)), (16, 8))
    pairs = ((transposed, usual), (usual, transposed), (transposed, transposed))
    for op, specs in itertools.product((aten.add.Tensor, aten.add_.Tensor, aten.copy_.default), pairs):
        assert_answers_alike(schema_of(op, specs, {}))
    assert_answers_alike(schema_of(aten.clone.default, [transposed], {}))


class OtherShard(Shard):
    """A placement of another library."""


def test_what_takes_more_thought_is_left_to_torch(
    meshes: dict[int, DeviceMesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, rows = meshes[2], (R, GTPShard(0))
    spec, scalar = spec_of(mesh, rows, (16, 8)), spec_of(mesh, (R, R), ())
    columns, row = spec_of(mesh, (R, GTPShard(1)), (16, 8)), spec_of(mesh, (R, R), (8,))
    elsewhere = spec_of(meshes[1], (R,), ())
    partial = spec_of(mesh, (Partial(), GTPShard(0)), (16, 8))
    others = spec_of(mesh, (R, OtherShard(0)), (16, 8))
    reordered = spec_of(mesh, (Shard(0), GTPShard(0)), (16, 8))
    reordered.shard_order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    cases: list[tuple[Any, list[Any]]] = [
        (aten.add.Tensor, [spec, columns]),
        (aten.add.Tensor, [spec, row]),
        (aten.add.Tensor, [spec, elsewhere]),
        (aten.mul_.Tensor, [partial, 2.0]),
        (aten.mul_.Tensor, [others, 2.0]),
        (aten.mul_.Tensor, [reordered, 2.0]),
        (aten.copy_.default, [scalar, spec]),
        (aten._foreach_add.List, [[spec, spec], [spec, columns]]),
        (aten._foreach_add.List, [[spec, spec], [spec]]),
        (aten._foreach_mul.Tensor, [[spec], elsewhere]),
        (aten._foreach_mul.Tensor, [[spec], spec]),
        (aten._foreach_norm.Scalar, [[spec], 2]),
        (aten.equal.default, [spec, spec]),
        (aten.sum.default, [spec]),
        (aten.mm.default, [spec, spec]),
        (aten.view.default, [spec, [8, 16]]),
    ]
    for op, args in cases:
        assert shortcut(schema_of(op, args, {})) is None, (op, args)
    schema = schema_of(aten.mul_.Tensor, [spec, 2.0], {})
    assert shortcut(schema) is not None
    rules = propagator().op_strategy_funcs, propagator().op_single_dim_strategy_funcs
    for rule in rules:
        monkeypatch.delitem(rule, aten.mul_.Tensor, raising=False)  # type: ignore[call-overload]
    assert shortcut(schema) is None
    monkeypatch.setitem(rules[0], aten.mul_.Tensor, lambda schema: schema)  # type: ignore[arg-type, return-value]
    assert shortcut(schema) is None


def test_list_ops_that_combine_elements_are_not_elementwise() -> None:
    for name in ("_foreach_norm", "_foreach_max", "_foreach_powsum", "_foreach_mm"):
        packet = getattr(aten, name, None)  # the last two are not in every release
        for overload in packet.overloads() if packet is not None else ():
            assert not is_elementwise(getattr(packet, overload)), name
    assert is_elementwise(aten._foreach_mul_.Scalar)
    assert is_elementwise(aten._fused_sgd_.default)


# --- in use -----------------------------------------------------------------------------------------------------------

STOCK: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adagrad": {"lr_decay": 0.1},
    "Adam": {"amsgrad": True, "maximize": True, "weight_decay": 0.1},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.1, "centered": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
WAYS: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


@pytest.fixture
def searched() -> Iterator[list[str]]:
    """The ops for which torch has searched."""
    ops: list[str] = []
    with noted(ShardingPropagator, "_wrap_with_op_strategy", lambda self, schema: ops.append(str(schema.op))):
        yield ops


def dtensor(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> DTensor:
    part = compat.own_part(torch.randn(shape), mesh, placements).clone(memory_format=torch.contiguous_format)
    return compat.wrap_local(part, spec_of(mesh, placements, shape))


@pytest.mark.parametrize("name", STOCK)
def test_optimizers_do_not_search(meshes: dict[int, DeviceMesh], searched: list[str], name: str) -> None:
    """On three axes torch's search takes up to 0.1 s for each op and shape, on four up to a second."""
    mesh, placements = meshes[3], (R, Shard(1), GTPShard(0))
    for way in WAYS if name in ("Adam", "AdamW", "SGD") else WAYS[:2]:
        shapes = [(16, 8 + len(name)), (7, 8 + len(name))]
        params = [nn.Parameter(dtensor(mesh, placements, shape)) for shape in shapes]
        optimizer = getattr(torch.optim, name)(params, **STOCK[name], **way)
        for _ in range(2):
            for param in params:
                param.grad = dtensor(mesh, placements, tuple(param.shape))
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert not searched, way
        assert all((param.to_local() != 0).any() for param in params)


def test_clipping_searches_for_reductions_alone(meshes: dict[int, DeviceMesh], searched: list[str]) -> None:
    param = nn.Parameter(dtensor(meshes[2], (R, GTPShard(0)), (16, 5)))
    param.grad = dtensor(meshes[2], (R, GTPShard(0)), (16, 5))
    torch.nn.utils.clip_grad_norm_([param], 0.1)
    assert sorted(set(searched)) == [
        "aten._foreach_norm.Scalar",
        "aten.linalg_vector_norm.default",
        "aten.stack.default",
    ]


def test_other_peoples_dtensors_are_left_to_torch(searched: list[str], meshes: dict[int, DeviceMesh]) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("other_people",))
    dtensor(mesh, (Shard(0),), (16, 9)).mul_(2)
    assert searched == ["aten.mul_.Tensor"]
    dtensor(mesh, (GTPShard(0),), (16, 10)).mul_(2)
    dtensor(mesh, (Shard(0),), (16, 11)).mul_(2)  # may have been computed from ours
    assert searched == ["aten.mul_.Tensor"]
