"""Bad input is refused on all ranks, before anything is changed, in words that name what is wrong and the remedy.

A fake process group lets this process be rank 1 of 4. What must reach other ranks runs on four real ones.
"""

from __future__ import annotations

import re
import unittest
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, GlooTest, environment, fake_mesh
from schedules import explicit
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, gtp_shard, init_weight_mesh

NUM_RANKS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.head = nn.Linear(8, 6)
        self.register_buffer("offset", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)) + self.offset


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Everything that ``gtp_shard`` changes: classes, attributes, and the very parameter and buffer objects."""
    state: dict[str, Any] = {}
    for name, submodule in module.named_modules():
        tensors = {**submodule._parameters, **submodule._buffers}
        state[name] = (
            type(submodule),
            sorted(submodule.__dict__),
            {key: id(value) for key, value in tensors.items()},
            {key: (type(value), value.requires_grad) for key, value in tensors.items() if value is not None},
        )
    return state


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    before = [snapshot(module) for module in modules]
    yield
    assert [snapshot(module) for module in modules] == before


class TestRefusals(unittest.TestCase):
    """``gtp_shard`` itself, on rank 1 of 4."""

    def setUp(self) -> None:
        self.mesh = self.enterContext(fake_mesh(NUM_RANKS, rank=1))
        torch.manual_seed(0)
        self.net = Net()

    def refuses(
        self,
        error: type[Exception],
        message: str,
        module: Any = None,
        mesh: Any = None,
        can_train: bool = True,
        **options: Any,
    ) -> None:
        """The call raises, and the module is as it was. It trains, unless it never could."""
        module = self.net if module is None else module
        modules = [module] if isinstance(module, nn.Module) else []
        with unchanged(*modules), self.assertRaisesRegex(error, message):
            gtp_shard(module, self.mesh if mesh is None else mesh, **options)
        if module is self.net and can_train:
            module(torch.randn(2, 6)).sum().backward()
            for param in module.parameters():
                self.assertIsNotNone(param.grad)
            module.zero_grad()

    def test_meshes(self) -> None:
        three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "gtp", "tp"))
        message = r"1-D \(gtp\) or 2-D .* 3-D mesh with axes \('replicate', 'gtp', 'tp'\).*\(rank 1\).*sub-mesh"
        self.refuses(ValueError, message, mesh=three)
        for message, mesh in (
            ("but got str: 'gtp'", "gtp"),
            ("but got ProcessGroup.*init_device_mesh", dist.group.WORLD),
            ("but got a WeightMesh. Pass mesh.weights", init_weight_mesh("cpu", gtp=NUM_RANKS)),
        ):
            self.refuses(TypeError, f"expects a DeviceMesh as mesh, {message}", mesh=mesh)
        missing = next(d for d in ("cuda", "xpu") if not torch.get_device_module(d).is_available())
        for device in (missing, "abacus"):
            mesh = DeviceMesh(device, torch.arange(NUM_RANKS), mesh_dim_names=("gtp",), _init_backend=False)
            message = f"a device that this process has, but got a '{device}' mesh .*'gtp'.*rank 1.*init_device_mesh"
            self.refuses(ValueError, message, mesh=mesh)
        with mock.patch("torch.distributed.get_backend_config", return_value="cuda:nccl"):
            message = "'cpu' mesh with axes .*the backends 'cuda:nccl'. Pass backend='cpu:...' to init_process"
            self.refuses(ValueError, message)
        others = DeviceMesh("cpu", [0, 2], mesh_dim_names=("gtp",))
        self.refuses(ValueError, r"contains this rank, but rank 1 is not among the ranks \[0, 2\]", mesh=others)

    def test_parameters_of_other_devices_and_layouts(self) -> None:
        lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
        self.refuses(ValueError, "'0.weight' of a lazy module has none yet. Run one forward before", lazy)
        self.net.table = nn.Parameter(torch.eye(4).to_sparse())
        message = r"'table' of shape \(4, 4\) and layout torch.sparse_coo. Convert it with to_dense\(\)"
        self.refuses(NotImplementedError, message, can_train=False)
        with FakeTensorMode():
            self.net.head.weight = nn.Parameter(torch.empty(6, 8, device="cuda"))
        message = r"on 'cpu' \(the mesh's device\).*'head.weight' of shape \(6, 8\) is on cuda:0, .*'gtp'.* \(rank 1\)."
        self.refuses(ValueError, f"{message} Move", can_train=False)

    def test_module_of_wrong_kind(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted = torch.jit.script(Net())
        self.refuses(TypeError, "expects an nn.Module as module, but got function", module=lambda x: x)
        self.refuses(TypeError, "eager nn.Module, but got a ScriptModule. Shard it before", scripted)
        for container in (nn.ModuleList([Net()]), nn.ModuleDict({"a": Net()}), nn.ParameterList([torch.ones(2, 2)])):
            message = f"a module with a forward, but got a {type(container).__name__}. Call it on each element"
            self.refuses(ValueError, message, container)

    def test_module_wrapped_or_sharded_already(self) -> None:
        wrapped = nn.parallel.DistributedDataParallel(Net())
        message = "the module itself is a DistributedDataParallel.*a \\(replicate, gtp\\) mesh"
        self.refuses(ValueError, message, wrapped)
        sharded = gtp_shard(Net(), self.mesh)
        for module in (sharded, sharded.inner, sharded.head):
            message = rf"called on a {type(module).__name__} that .* \('gtp',\) \(rank 1\). Call it on submodules first"
            with unchanged(sharded):
                self.refuses(ValueError, message, module)
        fully_shard(self.net.inner, mesh=self.mesh)
        self.refuses(ValueError, "'inner' is a FSDPSequential. Call gtp_shard first", can_train=False)

    def test_optimizer_built_before(self) -> None:
        """Unless it is of another model, of ignored parameters, of a submodule sharded before, or only waits for the
        garbage collector."""
        optimizer = torch.optim.AdamW(self.net.head.parameters())
        message = r"\(AdamW\) already holds parameter 'head.weight' of shape \(6, 8\).*'gtp'.*\(rank 1\). Create"
        self.refuses(ValueError, message)
        del optimizer
        other = torch.optim.SGD(Net().parameters())
        ignored = torch.optim.SGD([self.net.head.bias])
        gtp_shard(self.net.inner, self.mesh, schedule=ALL)
        inner = torch.optim.SGD(self.net.inner.parameters())
        dead = torch.optim.SGD(self.net.head.parameters())
        dead.cycle = dead  # type: ignore[attr-defined]
        del dead
        gtp_shard(self.net, self.mesh, ignored_params={self.net.head.bias})
        for optimizer in (other, ignored, inner):
            self.assertTrue(optimizer.param_groups[0]["params"])

    def test_embedding_options(self) -> None:
        for make in (nn.Embedding, nn.EmbeddingBag):
            for option, value in (("max_norm", 1.0), ("sparse", True), ("scale_grad_by_freq", True)):
                module = nn.Sequential(make(9, 4, **{option: value}), nn.Linear(4, 4))
                given = rf"{make.__name__}\({option}={value}\)"
                told = rf"{given} for parameter '0.weight' of shape \(9, 4\).*ignored_params"
                for schedule in (ALL, explicit()):  # sharded, or whole because it is small
                    self.refuses(NotImplementedError, told, module, schedule=schedule)
                gtp_shard(module, self.mesh, ignored_params={module[0].weight})

    def test_arguments_of_wrong_kind(self) -> None:
        weight = self.net.head.weight
        for message, options in (
            ("a bool as reshard_after_forward, but got int: 2", {"reshard_after_forward": 2}),
            ("a MixedPrecisionPolicy as mp_policy, but got dtype", {"mp_policy": torch.bfloat16}),
            ("a SchedulePolicy as schedule, but got int: 3", {"schedule": 3}),
            ("a callable as shard_placement_fn, but got GTPShard", {"shard_placement_fn": GTPShard(0)}),
            ("a set of parameters as ignored_params, but got list", {"ignored_params": [weight]}),
            ("parameters in ignored_params, but got str", {"ignored_params": {"head.weight"}}),
        ):
            self.refuses(TypeError, message, **options)
        with environment(DTENSOR_GTP_DEBUG="poisson"):
            message = "DTENSOR_GTP_DEBUG expects 'poison', .*'order', 'finite' or 'splits', but got 'poisson'"
            self.refuses(ValueError, message)

    def test_placement_fn_returns_nonsense(self) -> None:
        where = r"parameter 'inner.0.weight' of shape \(8, 6\) on mesh axis 'gtp' \(rank 1\)"
        kinds = f"a GTPShard, a Shard, a Replicate or None, or a pair .*, but got .* for {where}. Return None"
        cases: list[tuple[type[Exception], str, Any]] = [
            *((TypeError, kinds, nonsense) for nonsense in (0, "Shard(0)", Partial(), [Shard(0)])),
            (ValueError, f"split factor from .*{where}.*Leave", GTPShard(0, split_factor=2)),
        ]
        for asked in (Shard(2), GTPShard(2), Shard(-3), GTPShard(-3)):
            message = rf"a dim in \[-2, 2\) for {where}, but .* returned {re.escape(repr(asked))}. Name a dim"
            cases.append((ValueError, message, asked))
        for error, message, asked in cases:
            self.refuses(error, message, shard_placement_fn=lambda param, asked=asked: asked)

        def place(param: nn.Parameter) -> GTPShard | None:
            return GTPShard(0, block_size=0) if param.shape == (6, 8) else None

        # GTPShard itself refuses it; a note of the error says for which parameter.
        self.refuses(ValueError, "GTPShard expects block_size >= 1, but got 0", shard_placement_fn=place)
        with self.assertRaises(ValueError) as raised:
            gtp_shard(self.net, self.mesh, shard_placement_fn=place)
        note = r"asked about parameter 'head.weight' of shape \(6, 8\) on mesh axis 'gtp' \(rank 1\)"
        self.assertRegex(raised.exception.__notes__[0], note)

    def test_parameters_of_other_meshes(self) -> None:
        placed = r"'head.weight' of shape \(6, 8\) is a DTensor with .* on mesh axes \('tp',\)"
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
        unnamed = init_device_mesh("cpu", (NUM_RANKS,))
        bare = r"named axes, but parameter 'head.weight' .* \('tp',\) and its own mesh has axes None.*mesh_dim_names"
        parallelize_module(self.net, root["tp"], {"head": ColwiseParallel()})
        for message, mesh in (
            (bare, unnamed),
            (rf"{placed}, which overlap with \('tp',\) \(rank 1\)", root["tp"]),
            (rf"{placed}, which overlap with \('all',\) \(rank 1\)", root["gtp", "tp"]._flatten("all")),
        ):
            self.refuses(ValueError, message, mesh=mesh, can_train=False)
        self.net = Net()
        tp = DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",))
        parallelize_module(self.net, tp, {"head": ColwiseParallel()})
        self.refuses(ValueError, f"{placed} of another root than axis 'gtp' .rank 1.. Build one mesh", can_train=False)

    def test_equal_roots_are_one(self) -> None:
        """A mesh that was built twice, as DTensor's caches may mix them up anyway."""
        roots = [init_device_mesh("cpu", (2, 2), mesh_dim_names=(name, "tp")) for name in ("outer", "gtp")]
        parallelize_module(self.net, roots[0]["tp"], {"head": ColwiseParallel()})
        gtp_shard(self.net, roots[1]["gtp"], schedule=ALL)
        self.assertEqual(self.net.head.weight.placements, (Shard(0), GTPShard(0)))


@contextmanager
def at_once() -> Iterator[None]:
    """What is raised does not follow from a collective whose time limit has passed."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if re.search("timed out|timeout", str(cause), re.IGNORECASE):
                raise AssertionError("it has waited for a time limit") from error
            cause = cause.__cause__ or cause.__context__
        raise


class TestOneRankFails(GlooTest):
    """What one rank alone finds wrong raises on all, at once: nobody waits for it in a collective."""

    def all_refuse(self, mine: str, others: str, module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
        """Rank 1 raises a TypeError or ValueError that matches ``mine``, the others a RuntimeError with ``others``."""
        is_culprit = dist.get_rank() == 1
        kind: Any = (TypeError, ValueError) if is_culprit else RuntimeError
        with unchanged(module), self.assertRaisesRegex(kind, mine if is_culprit else others), at_once():
            gtp_shard(module, mesh, **options)

    def test_r26_placement_fn_raises_on_one_rank(self) -> None:
        def place(param: nn.Parameter) -> None:
            if dist.get_rank() == 1 and param.shape == (6, 8):
                raise ValueError("not today")

        told = "failed on another rank of the mesh, so it fails on all: rank 1: ValueError: not today\n.*'head.weight'"
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            self.all_refuse("^not today$", told, Net(), mesh, shard_placement_fn=place)

    def test_r26_arguments_environment_and_optimizer_wrong_on_one_rank(self) -> None:
        mesh, is_culprit = self.gtp_mesh(), self.rank == 1
        others = "rank 1: TypeError: gtp_shard expects a SchedulePolicy as schedule, but got int: 1"
        self.all_refuse("a SchedulePolicy", others, Net(), mesh, schedule=1 if is_culprit else ALL)
        with environment(DTENSOR_GTP_DEBUG="x" if is_culprit else ""):
            self.all_refuse("but got 'x'", "rank 1: ValueError: DTENSOR_GTP_DEBUG expects", Net(), mesh)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters()) if is_culprit else None
        self.all_refuse(r"\(SGD\) already", r"rank 1: ValueError: .* \(SGD\) already", net, mesh)
        del optimizer

    def test_all_ranks_fail_each_with_its_own_error(self) -> None:
        def place(param: nn.Parameter) -> None:
            raise ValueError(f"from rank {dist.get_rank()}")

        with self.assertRaisesRegex(ValueError, f"^from rank {self.rank}$"), at_once():
            gtp_shard(Net(), self.gtp_mesh(), shard_placement_fn=place)

    def test_models_that_differ(self) -> None:
        changes: dict[str, Callable[[nn.Module], Any]] = {
            r"rank 0 has parameter 'head.weight' of shape \(6, 8\).* where rank 2 has .*\(7, 8\)": lambda net: setattr(
                net, "head", nn.Linear(8, 7)
            ),
            "float32 .* where rank 2 has parameter 'head.weight' .* torch.float64": lambda net: net.head.double(),
            "requires_grad=True.* where rank 2 has .*requires_grad=False": lambda net: net.head.requires_grad_(False),
            "rank 0 has nothing more where rank 2 has parameter 'extra.weight'": lambda net: net.add_module(
                "extra", nn.Linear(2, 2)
            ),
            "where rank 2 has nothing more": lambda net: setattr(net, "head", nn.Identity()),
        }
        for message, change in changes.items():
            for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
                net = Net()
                if self.rank == 2:
                    change(net)
                told = f"{message}.*Build the same module"
                with unchanged(net), self.assertRaisesRegex(RuntimeError, told), at_once():
                    gtp_shard(net, mesh)

    def test_policies_that_differ(self) -> None:
        told = "the same module and policies on all ranks .*rank 0 has"
        options: list[dict[str, Any]] = [
            {"schedule": explicit(prefetch_depth=self.rank)},
            {"reshard_after_forward": self.rank != 3},
            {"shard_placement_fn": lambda param: Replicate() if self.rank == 3 else None, "schedule": ALL},
        ]
        for option in options:
            with self.assertRaisesRegex(RuntimeError, told), at_once():
                gtp_shard(Net(), self.gtp_mesh(), **option)

    def test_other_meshes_are_not_asked(self) -> None:
        """Ranks of other rows of the mesh may do something else altogether."""
        mesh = self.hsdp_mesh()["gtp"]
        net = Net() if mesh.get_group() and self.rank < 2 else nn.Linear(3, 3)
        gtp_shard(net, mesh, schedule=ALL)

    def test_r26_first_forward_where_some_ranks_are_still_on_meta(self) -> None:
        """As where rank 0 alone has loaded a checkpoint. Nobody waits in the gathers that others never launch."""
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            with torch.device("meta"):
                net = gtp_shard(Net(), mesh, schedule=ALL)
            if self.rank == 0:
                net.to_empty(device="cpu")
            message = r"failed on rank 3, .*\(.*'gtp',?\) \(rank 0\)" if self.rank == 0 else "'head.weight' of shape"
            for use in (lambda net=net: net(torch.randn(2, 6)), net.unshard):
                with self.assertRaisesRegex(RuntimeError, message), at_once():
                    use()
            if self.rank != 0:
                net.to_empty(device="cpu")
            for param in net.parameters():
                nn.init.ones_(param)
            net(torch.randn(2, 6)).sum().backward()

    def test_r26_first_forward_of_two_meshes(self) -> None:
        """Rank 2 shares no group of the first mesh with rank 1, which fails; it hears of it over the second."""
        net = Net()
        gtp_shard(net.inner, self.hsdp_mesh()["gtp"], schedule=ALL)
        gtp_shard(net, self.hsdp_mesh()["replicate"], schedule=ALL)
        if self.rank == 1:
            net.inner.to(device="meta")
        message = "'inner.0.weight' of shape" if self.rank == 1 else "failed on rank 1"
        with self.assertRaisesRegex(RuntimeError, message), at_once():
            net(torch.randn(2, 6))

    def test_values_of_experts_that_differ_before_the_first_forward(self) -> None:
        """Ranks that do not have these experts hear of it over the mesh that connects them, whichever comes first."""
        experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "egtp"))["egtp"]
        for has_weights in (True, False):
            for name in ("0.bias", "1.bias"):
                net = nn.Sequential(nn.Linear(6, 6) if has_weights else nn.LayerNorm(6), nn.Linear(6, 6))
                with torch.no_grad():
                    net.get_parameter(name).add_(float(self.rank == 1))
                gtp_shard(net[0], experts, schedule=ALL)
                gtp_shard(net, self.gtp_mesh(), schedule=ALL)
                message = f"'{name}' of shape .* has different values|failed on rank"
                with self.assertRaisesRegex(RuntimeError, message), at_once():
                    net(torch.randn(2, 6))

    def test_first_forward_where_ranks_have_different_meshes(self) -> None:
        """Some have an encoder that the others do not have; it is on the last mesh of some, and on none of others."""
        pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("place", "pair"))["pair"]
        for has_weights in (True, False):
            parts = {"first": nn.Linear(6, 6), "encoder": nn.Linear(6, 6), "head": nn.Linear(6, 6)}
            if not has_weights:
                parts["encoder"] = nn.LayerNorm(6)
            if self.rank >= 2:
                del parts["encoder"]
            net = nn.Sequential(OrderedDict(parts))
            gtp_shard(net.first, self.gtp_mesh(), schedule=ALL)
            if self.rank < 2:
                gtp_shard(net.encoder, pairs, schedule=ALL)
            gtp_shard(net, self.gtp_mesh(), schedule=ALL)
            for _ in range(2):
                net(torch.randn(2, 6, requires_grad=True)).sum().backward()
