"""What ``gtp_shard`` makes of a module: which parameters are cut, where their rows lie, what stays as it was.

Placements, values of shards, the report and reprs are looked at in one process, as each rank of a fake process group in
turn. Training, moving and initializing a sharded module needs four real ranks.
"""

import copy
import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, check_training, fake_mesh, rows_of_rank
from expecttest import TestCase
from runtime_common import local
from schedules import explicit
from test_gtp_shard_training import Tied, next_token_loss, token_batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor, zeros

from dtensor_gtp import GTPModule, GTPShard, MixedPrecisionPolicy, gtp_shard, sharding_report

NUM_RANKS = 4


class Table(nn.Module):
    """Parameters and buffers of every kind, none of them in a stock module."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(10, 6))
        self.cube = nn.Parameter(torch.randn(3, 4, 5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(5, 4, dtype=torch.bfloat16))
        self.vector = nn.Parameter(torch.randn(7))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.hollow = nn.Parameter(torch.randn(0, 6))
        self.phases = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.counts = nn.Parameter(torch.arange(16).view(4, 4), requires_grad=False)
        self.register_buffer("buffer", torch.randn(8, 8))
        self.register_buffer("nothing", None)
        self.register_parameter("no_bias", None)


def rows_of(value: torch.Tensor, placement: Any, num_ranks: int, rank: int) -> torch.Tensor:
    dim, block_size = placement.dim % value.ndim, getattr(placement, "block_size", 1)
    num_rows = -(-value.shape[dim] // (block_size * num_ranks)) * block_size
    parts = list(value.split(num_rows, dim)) if num_rows else [value]
    return parts[rank] if rank < len(parts) else value.narrow(dim, 0, 0)


class TestPlacements(TestCase):
    """As rank 1 of a fake process group."""

    def setUp(self) -> None:
        self.mesh = self.enterContext(fake_mesh(NUM_RANKS, rank=1))

    def test_report(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "gtp"))
        torch.manual_seed(0)
        table = Table()
        table.head, table.tokens = nn.Linear(6, 9), nn.Embedding(9, 6)
        table.head.weight = table.tokens.weight
        ignored = {table.vector}
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        gtp_shard(table, mesh, schedule=explicit(min_shard_numel=30), mp_policy=policy, ignored_params=ignored)
        self.assertExpectedInline(
            str(sharding_report(table, verbose=True)),
            """\
gtp_shard on replicate=2, gtp=2
parameter                    shape   dtype      placements  per rank  gathered  use
matrix                       10x6    float32    (R, G(0))   120 B     120 B     attribute
cube                         3x4x5   float64    (R, G(0))   160 B     120 B     attribute
narrow                       5x4     bfloat16   (R, R)      40 B      -         whole (below min_shard_numel=30)
scalar                       scalar  float32    (R, R)      4 B       -         whole (0-D)
hollow                       0x6     float32    (R, R)      0 B       -         whole (no elements)
phases                       4x4     complex64  (R, R)      128 B     -         whole (not floating point)
counts                       4x4     int64      (R, R)      128 B     -         whole (not floating point)
head.weight = tokens.weight  9x6     float32    (R, G(0))   96 B      108 B     fused op
head.bias                    9       float32    (R, R)      36 B      -         whole (1-D)
vector                       7       float32    -           28 B      -         ignored
740 B of parameters per rank; largest gathered weight 120 B
memory of this rank
  parameters: 740 B, in shards and whole
  largest gathered weight: 120 B
schedule: not observed yet
next
  Run a forward and a backward: a report after them has the choices and the schedule.
  Out of memory: pass schedule=SchedulePolicy(memory='least') to gtp_shard. Memory left over: memory='most_speed'.
  Predicted communication beside measured time: sharding_report(model, machine='h100').
  Timelines as a page: sharding_report(model).to_html('report.html').""",
        )

    def test_repr(self) -> None:
        blocks = nn.ModuleList([nn.LSTM(8, 2), nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU(), nn.PReLU(4))])
        containers = (nn.ParameterList([torch.randn(4, 4), torch.randn(3)]), nn.Linear(4, 4, bias=False))
        model = nn.Sequential(nn.Embedding(9, 8), *blocks, *containers, nn.Dropout())
        gtp_shard(
            model,
            self.mesh,
            schedule=ALL,
            shard_placement_fn=lambda p: GTPShard(1, block_size=2) if p.ndim == 3 else None,
        )
        self.assertExpectedInline(
            repr(model),
            """\
GTPSequential(
  (0): Embedding(9, 8, gtp=[weight: G(0)])
  (1): LSTM(8, 2, gtp=[weight_ih_l0: G(0), weight_hh_l0: G(0), bias_ih_l0: R, bias_hh_l0: R])
  (2): Sequential(
    (0): Conv1d(4, 4, kernel_size=(3,), stride=(1,), gtp=[weight: G(1, b=2), bias: R])
    (1): ReLU()
    (2): PReLU(num_parameters=4, gtp=[weight: R])
  )
  (3): ParameterList(
      (0): Parameter containing: [torch.float32 of size 4x4]
      (1): Parameter containing: [torch.float32 of size 3]
      gtp=[0: G(0), 1: R]
  )
  (4): Linear(in_features=4, out_features=4, bias=False, gtp=[weight: G(0)])
  (5): Dropout(p=0.5, inplace=False)
)""",
        )

    def test_the_class_answers_as_the_original(self) -> None:
        """What transformers, accelerate and others ask of a class, to choose a loss or to write a config."""
        model = gtp_shard(nn.Sequential(Table(), nn.Linear(4, 4)), self.mesh, schedule=ALL)
        for module, original in ((model, nn.Sequential), (model[0], Table), (model[1], nn.Linear)):
            self.assertEqual(module._get_name(), original.__name__)
            for name in ("__name__", "__qualname__", "__module__", "__doc__"):
                self.assertEqual(getattr(module.__class__, name), getattr(original, name))
            self.assertIsInstance(module, original)
            self.assertTrue(module._is_fsdp_managed_module)  # transformers keeps ranks together
            self.assertEqual(inspect.getsource(type(module)), inspect.getsource(original))
            accepted = inspect.signature(original.forward).parameters
            self.assertEqual(["self", *inspect.signature(module.forward).parameters], list(accepted))
        self.assertIs(type(type(model)(nn.ReLU())), nn.Sequential)
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 6)))
        gtp_shard(model, self.mesh, schedule=ALL)
        for module in model.modules():  # only the module that was passed is a GTPModule
            self.assertEqual(isinstance(module, GTPModule), module is model)
        self.assertIs(type(model[0]), type(model[2][0]))  # one class for all modules of a kind
        self.assertIs(type(model[1]), nn.ReLU)

    def test_default_placements(self) -> None:
        table = gtp_shard(Table(), self.mesh, schedule=ALL)
        placements = {name: param.placements for name, param in table.named_parameters()}
        sharded, whole = (GTPShard(0),), (Replicate(),)
        expected = dict.fromkeys(("matrix", "cube", "narrow"), sharded)
        expected |= dict.fromkeys(("vector", "scalar", "hollow", "phases", "counts"), whole)
        self.assertEqual(placements, expected)
        table = gtp_shard(Table(), self.mesh)  # all of them are tiny
        self.assertEqual({param.placements for param in table.parameters()}, {(Replicate(),)})
        for numel, placement in ((48, GTPShard(0)), (49, Replicate())):
            linear = gtp_shard(nn.Linear(6, 8), self.mesh, schedule=explicit(min_shard_numel=numel))
            self.assertEqual(linear.weight.placements, (placement,))

    def test_shard_placement_fn(self) -> None:
        """It is asked once for each parameter, tied ones included, and may answer for any of them."""
        model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9), nn.LayerNorm(9))
        model[1].weight = model[0].weight
        originals = {id(param): name for name, param in model.named_parameters()}
        answers = {"0.weight": GTPShard(1, block_size=4), "1.bias": Shard(0), "2.weight": GTPShard(-1), "2.bias": None}
        asked = []

        def place(param: nn.Parameter) -> Placement | None:
            asked.append(originals[id(param)])
            return answers[asked[-1]]

        gtp_shard(model, self.mesh, shard_placement_fn=place)
        self.assertEqual(asked, ["0.weight", "1.bias", "2.weight", "2.bias"])
        placements = [param.placements[0] for param in model.parameters()]
        self.assertEqual(placements, [GTPShard(1, block_size=4), GTPShard(0), GTPShard(0), Replicate()])
        self.assertEqual(tuple(local(model[0].weight).shape), (9, 4))
        self.assertIs(model[1].weight, model[0].weight)

    def test_what_stays_as_it_was(self) -> None:
        """Names, order, attributes and flags of parameters; buffers, ignored parameters, hooks and train mode."""
        table = Table().eval()
        table.matrix.weight_decay = 0.5  # type: ignore[attr-defined]
        table.vector.tag = ["no", "decay"]  # type: ignore[attr-defined]
        table.cube.requires_grad_(False)
        table.register_forward_hook(lambda *args: None)
        names, flags = zip(*((name, param.requires_grad) for name, param in table.named_parameters()), strict=True)
        buffer, ignored, hooks = table.buffer, table.narrow, dict(table._forward_hooks)
        returned = gtp_shard(table, self.mesh, schedule=ALL, ignored_params={ignored})
        self.assertIs(returned, table)
        self.assertEqual(tuple(name for name, _ in table.named_parameters()), names)
        self.assertEqual(tuple(param.requires_grad for param in table.parameters()), flags)
        self.assertTrue(all(param.is_leaf and isinstance(param, nn.Parameter) for param in table.parameters()))
        self.assertEqual((table.matrix.weight_decay, table.vector.tag), (0.5, ["no", "decay"]))
        self.assertIs(table.buffer, buffer)
        self.assertIs(table.narrow, ignored)
        self.assertEqual(table._forward_hooks, hooks)
        self.assertFalse(table.training)
        self.assertIsNone(table.no_bias)
        self.assertEqual(list(table.state_dict()), [*names, "buffer"])

    def test_containers_give_plain_slices(self) -> None:
        layers = [nn.Linear(6, 6) for _ in range(4)]
        model = gtp_shard(nn.Sequential(nn.Sequential(*layers), nn.ModuleList()), self.mesh, schedule=ALL)
        for part in (model[:1], model[0][1:3]):
            self.assertIs(type(part), nn.Sequential)
        self.assertEqual(list(model[0][1:3]), layers[1:3])
        self.assertEqual(model[0][1:3](torch.randn(2, 6)).shape, (2, 6))
        model[0].append(nn.Linear(6, 6, bias=False))
        self.assertEqual(len(model[0]), 5)

    def test_module_without_parameters(self) -> None:
        relu = gtp_shard(nn.ReLU(), self.mesh)
        self.assertEqual(relu(torch.tensor([-1.0, 1.0])).tolist(), [0.0, 1.0])
        self.assertIsInstance(relu, GTPModule)


class TestShards(TestCase):
    def test_shards_hold_their_rows(self) -> None:
        """Every shape and memory layout: each rank has its rows, contiguous, and nobody else's memory; replicas have
        the same ones."""
        cases: dict[str, tuple[torch.Tensor, Placement]] = {
            "even": (torch.randn(8, 3), GTPShard(0)),
            "uneven": (torch.randn(10, 3), GTPShard(0)),
            "fewer rows than ranks": (torch.randn(3, 5), GTPShard(0)),
            "one row": (torch.randn(1, 5), Shard(0)),
            "dim 1": (torch.randn(3, 10), GTPShard(1)),
            "last dim": (torch.randn(2, 3, 9), GTPShard(-1)),
            "blocks": (torch.randn(10, 3), GTPShard(0, block_size=4)),
            "vector": (torch.randn(9), GTPShard(0)),
            "transposed": (torch.randn(3, 10).t(), GTPShard(0)),
            "every other column": (torch.randn(6, 8)[:, ::2], GTPShard(1)),
            "expanded": (torch.randn(1, 6).expand(5, 6), GTPShard(0)),
            "channels last": (torch.randn(5, 3, 2, 2).to(memory_format=torch.channels_last), GTPShard(0)),
            "no rows": (torch.randn(0, 4), GTPShard(0)),
            "no columns": (torch.randn(4, 0), GTPShard(0)),
        }
        for shape, rank in product(((NUM_RANKS,), (2, 2)), range(NUM_RANKS)):
            names = ("replicate", "gtp")[-len(shape) :]
            with fake_mesh(*shape, names=names, rank=rank) as mesh:
                for name, (value, placement) in cases.items():
                    module = nn.ParameterList([nn.Parameter(value)])
                    gtp_shard(nn.Sequential(module), mesh, shard_placement_fn=lambda param, it=placement: it)
                    param, part = module[0], local(module[0]).detach()
                    self.assertEqual((param.shape, param.stride()), (value.shape, torch.empty(value.shape).stride()))
                    self.assertEqual(param.placements[:-1], (Replicate(),) * (len(shape) - 1))
                    self.assertTrue(part.is_contiguous())
                    self.assertNotEqual(part.untyped_storage().data_ptr(), value.untyped_storage().data_ptr() or -1)
                    rows = rows_of(value, placement, shape[-1], rank % shape[-1])
                    self.assertTrue(torch.equal(part, rows), f"{name}: {part} vs {rows}")


class TestOnRanks(GlooTest):
    def test_ties_survive_moves_and_loads(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        reference = Tied()
        model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL)
        state = model.state_dict()
        moves: list[Callable[[nn.Module], Any]] = [
            lambda m: m.to("cpu"),
            lambda m: m.double().float(),
            lambda m: m.load_state_dict(state),
            lambda m: m.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True),
            lambda m: m.to_empty(device="cpu").load_state_dict({n: v.clone() for n, v in kept.items()}),
        ]
        for move in moves:
            kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
            move(model)
            model.assert_tied()
            assert_same_params(model, reference)
            next_token_loss(model, rows_of_rank(token_batch(torch.Generator()), mesh)).backward()
            next_token_loss(reference, token_batch(torch.Generator())).backward()
            assert_same_params(model, reference, "grad")
            model.zero_grad()
            reference.zero_grad()

    def test_dtype_changes_after_sharding(self) -> None:
        """``double`` before the first forward and between steps: gathers, gradients and reductions follow."""
        mesh = self.gtp_mesh()
        for num_steps_before in (0, 1):
            torch.manual_seed(0)
            reference = Tied()
            model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL)
            tokens = token_batch(torch.Generator())
            for _ in range(num_steps_before):
                next_token_loss(model, rows_of_rank(tokens, mesh)).backward()
                model.zero_grad()
            check_training(
                reference.double(), lambda m, made=model: made.double(), mesh, token_batch, next_token_loss, steps=1
            )
            self.assertEqual({param.dtype for param in model.parameters()}, {torch.float64})

    def test_call_under_inference_mode(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)

        def shard(model: nn.Module) -> nn.Module:
            with torch.inference_mode():
                return gtp_shard(model, mesh, schedule=ALL)

        check_training(Tied(), shard, mesh, token_batch, next_token_loss, steps=1)


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
    """On the shards: each rank holds the rows that the unsharded module would have drawn."""

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
                param.copy_(distribute_tensor(want, param.device_mesh, param.placements))
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
        other = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("other",))
        tensor = zeros(8, device_mesh=other, placements=[Shard(0)])
        torch.manual_seed(self.rank)
        expected = torch.empty(2).normal_()
        torch.manual_seed(self.rank)
        tensor.normal_()
        self.assertTrue(torch.equal(tensor.to_local(), expected))
