"""What users of ``fully_shard`` bring along: meshes of single parameters, chunked losses, all-reduce hooks; and what is
refused."""

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, assert_same_params, check_training, fake_mesh, rows_of_rank
from runtime_common import square_loss
from schedules import explicit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.common_utils import TestCase
from torch.utils._pytree import register_pytree_node

from dtensor_gtp import GTPModule, GTPShard, gtp_shard
from dtensor_gtp._modules import gtp_module
from dtensor_gtp._modules.frames import to_device

WIDTH = 10


class Attention(nn.Module):
    """Several parameters in one module, and one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.first, self.last = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.last(F.gelu(self.first(x)))


class TestMeshes(GlooTest):
    def test_meshes_of_single_parameters(self) -> None:
        """On a mesh with replicas beside one without, in one call; within one module, too."""
        gtp, hsdp = self.gtp_mesh(), self.hsdp_mesh()
        result = SimpleNamespace(placement=Shard(1), mesh_info=SimpleNamespace(mesh=hsdp, shard_mesh_dim=1))
        answers: dict[tuple[int, ...], Any] = {
            (3 * WIDTH, WIDTH): (None, hsdp),  # attention.in_proj_weight
            (7, WIDTH): (GTPShard(1), hsdp),
            (WIDTH, 7): result,  # as torch has it
            (7,): (Replicate(), hsdp),
        }
        for schedule in (ALL, explicit(0, min_shard_numel=0), explicit(prefetch_depth=9, min_shard_numel=0)):
            torch.manual_seed(0)
            model = check_training(
                Attention(),
                lambda m, s=schedule: gtp_shard(m, gtp, schedule=s, shard_placement_fn=lambda p: answers.get(p.shape)),
                gtp,
                lambda generator: torch.randn(8, 3, WIDTH, generator=generator),
                square_loss,
                make_optimizer=partial(torch.optim.SGD, lr=0.3),  # keys' bias has a gradient of about 0
            )
        on_hsdp = (Replicate(), GTPShard(0)), (Replicate(), GTPShard(1)), (Replicate(), GTPShard(1))
        named = dict(model.named_parameters())
        for name, placements in zip(("attention.in_proj_weight", "first.weight", "last.weight"), on_hsdp, strict=True):
            self.assertEqual((named[name].device_mesh, named[name].placements), (hsdp, placements))
        self.assertEqual(named["first.bias"].device_mesh, hsdp)
        self.assertEqual(named["attention.out_proj.weight"].device_mesh, gtp)


class Chunked(nn.Module):
    """A language model that leaves its head to the loss, which calls it on parts of a sequence."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(35, WIDTH), nn.LayerNorm(WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 35, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(self.embedding(tokens)))

    def backward(self, tokens: torch.Tensor) -> None:
        """A backward for each chunk of the head, while that of the body is still to come."""
        hidden, grads = self(tokens), []
        for part in hidden.detach().chunk(4, dim=1):
            part = part.contiguous().requires_grad_()
            self.head(part).square().mean().backward()
            grads.append(part.grad)
        hidden.backward(torch.cat(grads, dim=1))


class TestChunkedLoss(GlooTest):
    def test_head_runs_by_itself(self) -> None:
        """One call on the root, or calls on parts too; the head kept gathered for all chunks; microbatches."""
        mesh = self.gtp_mesh()
        for is_tied, parts, is_kept in ((False, (), False), (True, (), False), (False, ("body", "head"), True)):
            reference, model = Chunked(is_tied), Chunked(is_tied)
            for part in (*(getattr(model, name) for name in parts), model):
                gtp_shard(part, mesh, schedule=ALL)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (reference, model)]
            for step in range(2):
                for microbatch in range(2):
                    model.set_requires_gradient_sync(microbatch == 1)
                    if is_kept:
                        model.head.set_reshard_after_forward(False)
                        model.head.set_reshard_after_backward(False)
                    generator = torch.Generator().manual_seed(2 * step + microbatch)
                    tokens = torch.randint(35, (8, 12), generator=generator)
                    reference.backward(tokens)
                    model.backward(rows_of_rank(tokens, mesh))
                    if is_kept:
                        model.head.reshard()
                assert_same_params(model, reference, "grad")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                assert_same_params(model, reference)


class TestAllReduceHook(GlooTest):
    def test_replicas_of_ones_own(self) -> None:
        """A mesh of one replica, and a hook that averages over the others: as if the mesh had both axes. With 16 bits
        on the wire, microbatches, shards on dim 1, a tied weight, and shards on the host."""
        mesh = self.hsdp_mesh()
        group, num_calls = mesh["replicate"].get_group(), [0]

        def average(grad: torch.Tensor) -> None:
            num_calls[0] += 1
            dist.all_reduce(grad, group=group)
            grad /= group.size()

        def shard(module: nn.Module, **options: Any) -> nn.Module:
            gtp_shard(module, mesh["gtp"], schedule=ALL, **options).set_all_reduce_hook(average)
            return module

        dims = {(7, WIDTH): Shard(1)}
        for options in (
            {},
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        ):
            torch.manual_seed(0)
            tied = nn.Linear(WIDTH, WIDTH)
            num_calls[0] = 0
            check_training(
                nn.Sequential(tied, Attention(), tied),
                lambda m, o=options: shard(m, shard_placement_fn=lambda p: dims.get(tuple(p.shape)), **o),
                mesh,
                lambda generator: torch.randn(16, 3, WIDTH, generator=generator),
                square_loss,
                make_optimizer=partial(torch.optim.SGD, lr=0.3),
                num_microbatches=2,
                tolerance={"rtol": 1e-1, "atol": 5e-3} if "mp_policy" in options else None,
            )
            self.assertEqual(num_calls[0], 2 * 2 * 10)  # steps, microbatches and parameters


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    number: int = 3


class Pair(NamedTuple):
    x: torch.Tensor
    number: int | None


class ModelOutput:
    """A class of a library that tells pytree what is in it, as the outputs of transformers do."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


register_pytree_node(ModelOutput, lambda output: ([output.logits], None), lambda logits, _: ModelOutput(*logits))


class TestInputs(TestCase):
    def test_every_container_of_pytree_and_dataclasses(self) -> None:
        """Tensors are moved, here to the meta device, in the test of CUDA to the GPU. The containers and their other
        contents stay as they are; the caller's own are not changed."""
        x, device = torch.ones(2), torch.device("meta")
        for container, read in (
            (Pair(x, 1), lambda c: c.x),
            (OrderedDict(b=x, a=1), lambda c: c["b"]),
            (defaultdict(list, x=[x]), lambda c: c["x"][0]),
            (deque([1, x], maxlen=2), lambda c: c[1]),
            (ModelOutput(x), lambda c: c.logits),
            (Batch(x), lambda c: c.x),
            (((x, [Batch(x)]), {"y": x, "n": 1}), lambda c: c[0][1][0].x),
            ({"a": (x, [Pair(x, None)])}, lambda c: c["a"][1][0].x),
        ):
            moved = to_device(container, device)
            self.assertIs(type(moved), type(container))
            self.assertEqual((read(moved).device, read(container).device.type), (device, "cpu"))
            self.assertIs(read(to_device(moved, device)), read(moved))
        self.assertEqual((to_device(Pair(x, 1), device).number, to_device(Batch(x), device).number), (1, 3))
        self.assertEqual(list(to_device(OrderedDict(b=x, a=1), device)), ["b", "a"])
        self.assertIs(to_device(defaultdict(list, x=[x]), device).default_factory, list)
        self.assertEqual(to_device(deque([1, x], maxlen=2), device).maxlen, 2)


class TestRefused(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.mesh = self.enterContext(fake_mesh(2, 2, names=("replicate", "gtp"), rank=1))

    def sharded(self) -> Any:
        return gtp_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), self.mesh["gtp"], schedule=ALL)

    def test_meshes_that_do_not_fit(self) -> None:
        other_axis = SimpleNamespace(placement=None, mesh_info=SimpleNamespace(mesh=self.mesh, shard_mesh_dim=0))
        for answer, message in (
            ((Shard(0), "gtp"), "a DeviceMesh as mesh, but got str"),
            ((Shard(0), init_device_mesh("meta", (4,))), "a device that this process has"),
            (other_axis, r"last axis of a mesh, but .*axis 0 of 2 for parameter 'weight' .* Return a pair"),
            (([], self.mesh), r"or a pair of one of these and a DeviceMesh, but got \[\]"),
        ):
            model = nn.Linear(8, 8)
            with self.assertRaisesRegex((TypeError, ValueError), message):
                gtp_shard(model, self.mesh["gtp"], shard_placement_fn=lambda param, a=answer: a)
            self.assertNotIsInstance(model, GTPModule)

    def test_arguments(self) -> None:
        model, mesh = nn.Sequential(nn.Linear(8, 8)), self.mesh["gtp"]
        both = (model, mesh)
        for args, options, message in (
            (both, {"dp_mesh_dims": None}, r"no argument dp_mesh_dims of fully_shard. .*mesh\['replicate', 'gtp'"),
            (([model], mesh), {}, "but got a list. Call it once on the module that contains them all"),
            (both, {"reshard_after_forward": 2}, "reshard_after_forward, but got int: 2. .*keep_nbytes"),
            (both, {"reshard_after_forward": None}, "but got NoneType: None. Leave out None"),
            ((model,), {}, r"expects a mesh, but got none; .* Pass init_device_mesh\('cuda'"),
        ):
            with self.assertRaisesRegex(TypeError, message):
                gtp_shard(*args, **options)
        self.assertNotIsInstance(model, GTPModule)

    def test_methods(self) -> None:
        """Each raises, whatever it is given; the old name of one works."""
        model = self.sharded()
        for name, advice in gtp_module.METHODS.items():
            with self.assertRaisesRegex(NotImplementedError, f"{name} of fully_shard has no counterpart"):
                getattr(model, name)(True, recurse=False)
            self.assertRegex(advice, r"^([A-Z]|gtp_shard ).*[a-z)]$")
        model.set_reduce_scatter_divide_factor(3)
        model(torch.ones(1, 8)).sum().backward()
        self.assertEqual(model[1].bias.grad.to_local(), torch.full((8,), 1 / 3))

    def test_all_reduce_hook(self) -> None:
        """It is called once for each gradient that is synced, and changes it."""
        model = self.sharded()
        shapes: list[tuple[int, ...]] = []
        model.set_all_reduce_hook(lambda grad: shapes.append(tuple(grad.shape)) or grad.fill_(3))
        model[1].weight.requires_grad_(False)
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            model(torch.ones(1, 8)).sum().backward()
            self.assertEqual(shapes, [(4, 8), (8,), (8,)][: 3 * is_last])
        self.assertEqual(model[0].weight.grad.to_local(), torch.full((4, 8), 3.0))
        with self.assertRaisesRegex(NotImplementedError, "expects no stream, .* switch to your own stream"):
            model.set_all_reduce_hook(lambda grad: None, stream=object())

    def test_reset_iter_state(self) -> None:
        """A forward or backward that raised leaves nothing: not its gradients, nor those of earlier microbatches."""
        model, x = self.sharded(), torch.ones(1, 8, requires_grad=True)
        model.set_requires_gradient_sync(False)
        model(x).sum().backward()
        model.reset_iter_state()
        x.register_hook(lambda grad: 1 / 0)
        with self.assertRaises(ZeroDivisionError):
            model(x).sum().backward()
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 8)).sum().backward()
        self.assertEqual(model[1].bias.grad.to_local(), torch.ones(8))  # an average over nobody
