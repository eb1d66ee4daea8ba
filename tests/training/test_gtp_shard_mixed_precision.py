"""``MixedPrecisionPolicy`` means under ``gtp_shard`` what it means under ``fully_shard``, which is run beside it.

``fully_shard`` is called on each layer, ``gtp_shard`` once on the root: no result may depend on that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, GlooTest, full
from runtime_common import Calls, counted
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard

# In torch 2.15 whole gradients under fully_shard have the dtype of its reduction, else the parameter's.
FOLLOWS_REDUCE_DTYPE = hasattr(FSDPParam, "unsharded_grad_dtype")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Layer(nn.Module):
    """A fused weight, a raw one, whole parameters and buffers; remembers the dtypes that its forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.raw = nn.Parameter(torch.randn(10, 6) / 3)
        self.register_buffer("scale", torch.rand(6) + 0.5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None, index: Any = None) -> torch.Tensor:
        self.seen = {"x": x.dtype, "weight": self.linear.weight.dtype, "raw": self.raw.dtype, "scale": self.scale.dtype}
        self.seen |= {"norm": self.norm.weight.dtype, "bias": self.linear.bias.dtype}
        self.seen |= {} if shift is None else {"shift": shift.dtype, "index": index[0].dtype}
        x = x.to(self.raw.dtype)
        x = torch.tanh(self.norm(self.linear(x))) @ self.raw * self.scale.to(x.dtype)
        return x if shift is None else x + shift.to(x.dtype)


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    others: list[dict[str, torch.Tensor]]


def of_batches(own: Any, batch: Batch) -> Batch:
    return Batch(own.linear(batch.x) + batch.others[0]["shift"], batch.others)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.second = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x, shift=torch.ones(6), index=[torch.arange(3)])


def make_net(dtype: torch.dtype = FP32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def by_fsdp(model: Net, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> Net:
    # Per layer, with the casts of the root alone, as gtp_shard does it.
    inner = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def by_gtp(model: Net, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> Net:
    gtp_shard(model, mesh, mp_policy=policy, schedule=ALL)
    return model


def rows(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def state(model: nn.Module, what: Callable[[torch.Tensor], Any]) -> dict[str, torch.Tensor]:
    return {name: full(what(param)) for name, param in model.named_parameters()}


class TestMixedPrecision(GlooTest):
    world_size = 2  # a sum over two ranks has one order, so that results can be compared bit by bit

    def check_like_fsdp(self, policy: MixedPrecisionPolicy, dtype: torch.dtype = FP32, microbatches: int = 1) -> None:
        """Outputs, what forwards see, gradients and after-step parameters, bit by bit."""
        mesh = self.gtp_mesh()
        theirs = policy
        if policy.reduce_dtype is None and FOLLOWS_REDUCE_DTYPE:
            # fully_shard of torch 2.15 then reduces in the parameter's dtype, gtp_shard in that of compute, as before.
            theirs = dataclasses.replace(policy, reduce_dtype=policy.param_dtype)
        models = [by_fsdp(make_net(dtype), mesh, theirs), by_gtp(make_net(dtype), mesh, policy)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        for step in range(2):
            outputs = []
            for model in models:
                for index in range(microbatches):
                    model.set_requires_gradient_sync(index == microbatches - 1)  # type: ignore[operator]
                    x = rows(mesh.get_local_rank(), 10 * step + index).to(dtype).requires_grad_()
                    output = model(x)
                    output.float().square().mean().backward()
                    outputs += [output, x.grad]
            half = len(outputs) // 2
            self.assertEqual(outputs[:half], outputs[half:], rtol=0, atol=0, exact_dtype=True)
            for layer in ("first", "second"):
                self.assertEqual(*(getattr(model, layer).seen for model in models))
            for what in (lambda p: p.grad, lambda p: p.detach()):
                expected, actual = (state(model, what) for model in models)
                self.assertEqual(actual, expected, rtol=0, atol=0, exact_dtype=True, msg=f"{policy} {dtype}")
                for optimizer in optimizers:
                    optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    def test_same_bits_as_fully_shard(self) -> None:
        for policy in (
            MixedPrecisionPolicy(),
            MixedPrecisionPolicy(None, BF16),
            MixedPrecisionPolicy(FP16, FP16),
            MixedPrecisionPolicy(BF16, FP32, FP32, False),
            MixedPrecisionPolicy(None, None, BF16),
        ):
            self.check_like_fsdp(policy)
        for policy in (MixedPrecisionPolicy(FP32, BF16), MixedPrecisionPolicy(None, FP32)):
            self.check_like_fsdp(policy, BF16)
        unsynced = [MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy(BF16)]
        if not FOLLOWS_REDUCE_DTYPE:  # else fully_shard rounds the sum of microbatches to bf16 after each of them
            unsynced.append(MixedPrecisionPolicy(None, BF16))
        for policy in unsynced:
            self.check_like_fsdp(policy, microbatches=3)

    @pytest.mark.long
    def test_same_bits_as_fully_shard_in_every_policy(self) -> None:
        for param_dtype, reduce_dtype in product((None, BF16), (None, FP32, BF16)):
            self.check_like_fsdp(MixedPrecisionPolicy(param_dtype, reduce_dtype))
        for output_dtype, cast in product((None, FP32, BF16), (True, False)):
            self.check_like_fsdp(MixedPrecisionPolicy(BF16, FP32, output_dtype, cast))
        for param_dtype, reduce_dtype in product((None, FP32), (None, FP32, BF16)):
            self.check_like_fsdp(MixedPrecisionPolicy(param_dtype, reduce_dtype), BF16)
        self.check_like_fsdp(MixedPrecisionPolicy(None, FP16))

    def test_nested_policies_as_in_fully_shard(self) -> None:
        mesh = self.gtp_mesh()
        root = MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32)
        for nested in (
            MixedPrecisionPolicy(),
            MixedPrecisionPolicy(FP32, FP32),
            MixedPrecisionPolicy(FP16, FP32, BF16, cast_forward_inputs=False),
            MixedPrecisionPolicy(FP32, None, FP16),
        ):
            results = []
            for make in (fully_shard, gtp_shard):
                model = make_net()
                kwargs: dict[str, Any] = {"schedule": ALL} if make is gtp_shard else {}
                make(model.second, mesh=mesh, mp_policy=nested, **kwargs)
                make(model, mesh=mesh, mp_policy=root, **kwargs)
                output = model(rows(mesh.get_local_rank()))
                output.float().square().mean().backward()
                results.append((output, model.first.seen, model.second.seen, state(model, lambda p: p.grad)))
            self.assertEqual(results[1], results[0], rtol=0, atol=0, exact_dtype=True, msg=f"{nested}")

    def test_gathers_and_gradients_have_the_dtype_of_compute_and_of_the_parameter(self) -> None:
        for dtype, param_dtype in ((FP32, None), (FP32, BF16), (FP32, FP16), (BF16, None), (BF16, FP16)):
            model = by_gtp(make_net(dtype), self.gtp_mesh(), MixedPrecisionPolicy(param_dtype, BF16))
            with counted() as collectives:
                model(rows(self.rank).to(dtype)).sum().backward()
            self.assertEqual(collectives.dtypes["_allgather_base_"], {param_dtype or dtype})
            self.assertEqual({value.dtype for param in model.parameters() for value in (param, param.grad)}, {dtype})
            # Cast later: gathered in the new dtype.
            model.to(FP32)
            model(rows(self.rank))
            self.assertEqual(set(model.first.seen.values()) - {FP32}, {param_dtype} - {None, FP32})

    def test_tensors_in_dataclasses_are_cast_as_in_fully_shard(self) -> None:
        policy = MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32)
        torch.manual_seed(0)
        batch = Batch(torch.randn(3, 6), [{"index": torch.arange(3), "shift": torch.randn(1, 4)}])
        records = []
        # That of torch 2.11 does not look into dataclasses that a forward returns: no cast, and no reduced gradients.
        has_peer = TorchVersion(torch.__version__) >= "2.12"
        for shard in (partial(gtp_shard, schedule=ALL), *([fully_shard] if has_peer else [])):
            torch.manual_seed(0)
            model = shard(Calls(of_batches, linear=nn.Linear(6, 4, bias=False)), mesh=self.gtp_mesh(), mp_policy=policy)
            output = model(batch)
            output.x.sum().backward()
            inner = output.others[0]
            self.assertEqual((output.x.dtype, inner["index"].dtype, inner["shift"].dtype), (FP32, torch.int64, FP32))
            grad = full(model.linear.weight.grad)
            records.append([output.x, inner["shift"], grad])
            self.assertEqual(grad, batch.x.to(BF16).float().sum(0).expand(4, -1), rtol=2**-7, atol=0)
        self.assertEqual(records[0], records[-1])
        self.assertEqual(batch.x.dtype, FP32)  # the caller's own is as it was


class TestSums(GlooTest):
    def test_close_to_fully_shard_on_four_ranks_and_with_replicas(self) -> None:
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            policy = MixedPrecisionPolicy(BF16, FP32)
            grads = []
            for make in (by_fsdp, by_gtp):
                model = make(make_net(), mesh, policy)
                model(rows(self.rank)).float().square().mean().backward()
                grads.append(state(model, lambda p: p.grad))
            # Sums of fp32: only their order differs.
            self.assertEqual(grads[1], grads[0], rtol=1e-5, atol=1e-7, exact_dtype=True)

    def gradients(self, model: nn.Linear, values: list[float]) -> None:
        """One backward with ``values[rank]`` as every gradient of the weight and the bias."""
        value = values[dist.get_rank()]
        model(torch.full((1, 3), 1.0, dtype=model.in_dtype)).backward(  # type: ignore[arg-type]
            torch.full((1, 5), value, dtype=model.out_dtype)  # type: ignore[arg-type]
        )

    def make_linear(self, dtype: torch.dtype, policy: MixedPrecisionPolicy) -> Any:
        model: Any = nn.Linear(3, 5, dtype=dtype)
        gtp_shard(model, self.gtp_mesh(), mp_policy=policy, schedule=ALL)
        model.in_dtype, model.out_dtype = dtype, policy.param_dtype or dtype
        return model

    def assert_grad(self, model: nn.Module, value: float) -> None:
        for name, param in model.named_parameters():
            assert isinstance(param.grad, DTensor)
            local = param.grad.to_local()
            self.assertEqual(local, torch.full_like(local, value), rtol=0, atol=0, msg=f"{name}: {local} {value}")

    def test_r5_an_fp32_reduction_keeps_what_bf16_would_round_off(self) -> None:
        tiny = 2.0**-9  # 1 + tiny is 1 in bf16
        for param_dtype in (None, BF16):
            model = self.make_linear(FP32, MixedPrecisionPolicy(param_dtype, FP32))
            self.gradients(model, [1.0, tiny, tiny, tiny])
            self.assert_grad(model, (1.0 + 3 * tiny) / 4)
        model = self.make_linear(FP32, MixedPrecisionPolicy(None, FP32))
        self.gradients(model, [1.0 + 2.0**-20] * 4)
        self.assert_grad(model, 1.0 + 2.0**-20)
        model = self.make_linear(BF16, MixedPrecisionPolicy(FP32, FP32))  # bf16 storage, fp32 everything else
        half = 2.0**-8  # half of the last bit of bf16 at 1
        self.gradients(model, [1 + half, 1 + half, 1 + half, 1 + 3 * half])
        self.assert_grad(model, 1 + 2 * half)  # the mean 1 + 1.5 * half, rounded once; of rounded gradients it is 1

    def test_what_the_user_does_to_grad_between_microbatches_counts(self) -> None:
        tiny = 2.0**-9
        model = self.make_linear(BF16, MixedPrecisionPolicy(None, FP32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for foreach in (True, False):
            for set_to_none in (True, False):
                self.gradients(model, [1.0] * 4)
                self.gradients(model, [tiny] * 4)
                optimizer.zero_grad(set_to_none=set_to_none)
                self.gradients(model, [1.0] * 4)
                self.assert_grad(model, 1.0)
                nn.utils.clip_grad_value_(model.parameters(), 0.5, foreach=foreach)
                self.gradients(model, [tiny] * 4)
                self.gradients(model, [tiny] * 4)
                self.assert_grad(model, 0.5 + 2 * tiny)
                optimizer.zero_grad()
        with torch.no_grad():
            for param in model.parameters():
                param.grad = torch.full_like(param, 2.0)
        self.gradients(model, [1.0] * 4)
        self.assert_grad(model, 3.0)

    def test_fp16_reduction_divides_before_and_after_the_sum(self) -> None:
        for value in (30000.0, 2.0**-23):  # the plain sum, 120000, is beyond fp16; an eighth of the other is 0 in fp16
            model = self.make_linear(FP32, MixedPrecisionPolicy(FP16, FP16))
            self.gradients(model, [value] * 4)
            self.assert_grad(model, value)
