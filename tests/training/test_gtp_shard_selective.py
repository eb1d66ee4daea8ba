"""Selective activation checkpointing, wrapped modules and activations on the host.

A policy sees the GEMM of a linear layer as the aten op that it would be without sharding. Whatever it saves is not
computed again, and a weight that nobody computes with is not gathered.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest
from runtime_common import WIDTH, Raw, check_step, counted, make_rows, num_gathers, shard_copy, square_loss, square_step
from schedules import changed
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from dtensor_gtp import gtp_shard

aten = torch.ops.aten
GEMMS = (aten.mm.default, aten.addmm.default)


class Block(nn.Module):
    """Linears with and without bias, and raw weights that are read as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.raw = Raw()
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The product needs what down returns for its own backward, so down is recomputed unless it is saved.
        result: torch.Tensor = self.down(self.raw(torch.tanh(self.up(self.norm(x))))) * x.sin()
        return result


class Stacked(nn.Module):
    """What recomputation would take for itself of ops that it does not run again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.stack([x, torch.where(x > 0, x, 0.1 * x)])
        return torch.cat([both.exp(), both.sin()]).sum(0).exp().clamp(max=2)


class Blocks(nn.Sequential):
    """Three blocks; ``run`` calls each of them."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(*(Block() for _ in range(3)))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self:
            x = self.run(block, x)
        return x


def save(*ops: Any) -> Callable[..., CheckpointPolicy]:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def save_every_second_gemm() -> Callable[..., CheckpointPolicy]:
    """Counts separately in forward and in recomputation, as torchtitan's policy does."""
    seen: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = False
        if op in GEMMS:
            weight = args[1 if op is aten.mm.default else 2]
            assert weight.shape == (WIDTH, WIDTH)
            assert args[0 if op is aten.mm.default else 1].ndim == 2
            seen[context.is_recompute] += 1
            is_saved = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def selective(make_policy: Callable[[], Any], block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(make_policy())

    result: torch.Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return result


class TestSelective(GlooTest):
    world_size = 2

    def gathers(self, reference: nn.Module, **options: Any) -> dict[str, int]:
        """Train beside one process; gathers of the middle block's weights in the last step."""
        mesh = self.gtp_mesh()
        model = shard_copy(reference, mesh, **options)
        return self.gathers_of(reference, model)

    def gathers_of(self, reference: nn.Module, model: nn.Module) -> dict[str, int]:
        for seed in range(2):
            before = num_gathers(model)
            with counted() as counts:
                check_step(reference, model, self.gtp_mesh(), make_rows(seed), square_step)
            used = {name: count - before[name] for name, count in num_gathers(model).items()}
            if self.world_size > 1:
                assert counts().all_gathers == sum(used.values())
                assert counts().reduce_scatters == len(used), "one reduction for each use, none for the recomputation"
        middle = {tuple(name.split(".")): count for name, count in used.items() if name.startswith("1.")}
        return {parts[-1] if "raw" in parts else parts[-2]: count for parts, count in middle.items()}

    def fresh(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> nn.Module:
        torch.manual_seed(0)
        return Blocks(run)

    def test_policies_that_save_what_linears_return(self) -> None:
        everything = dict.fromkeys(("up", "down", "first", "second"), 3)
        cases: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
            "nothing": (lambda: save(), everything),
            # Raw weights are gathered when they are read, whether the product is saved or not.
            "all GEMMs": (lambda: save(*GEMMS), everything | {"up": 2, "down": 2}),
            "with bias": (lambda: save(aten.addmm.default), everything | {"up": 2}),
            "without bias": (lambda: save(aten.mm.default), everything | {"down": 2}),
            "as a list of ops": (lambda: list(GEMMS), everything | {"up": 2, "down": 2}),
            "every second": (save_every_second_gemm, everything | {"up": 2}),
        }
        for name, (make_policy, expected) in cases.items():
            for depth in (None, 0) if name == "every second" else (None,):
                schedule = ALL if depth is None else changed(ALL, prefetch_depth=depth)
                used = self.gathers(self.fresh(partial(selective, make_policy)), schedule=schedule)
                assert used == expected, f"{name}, depth {depth}: {used}"

    def test_a_write_to_what_a_policy_has_saved_is_refused(self) -> None:
        """Of a view, too: the output of a layer with a bias for sequences."""

        def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            def write(x: torch.Tensor) -> torch.Tensor:
                return block.up(x).add_(1).sin()

            contexts = partial(create_selective_checkpoint_contexts, save(*GEMMS))
            return checkpoint(write, x, use_reentrant=False, context_fn=contexts)

        model = shard_copy(Blocks(run), self.gtp_mesh())
        for rows in (make_rows(0), make_rows(0).unsqueeze(1)):
            with self.assertRaisesRegex(RuntimeError, "mutated|modified inplace"):
                square_loss(model, rows).backward()

    def test_policy_around_the_root(self) -> None:
        """Also in the first forward, where ranks tell each other that they can begin. It saves all but GEMMs."""

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.PREFER_RECOMPUTE if op in GEMMS else CheckpointPolicy.MUST_SAVE

        def step(model: nn.Module, x: torch.Tensor) -> None:
            selective(lambda: policy, model, x).square().mean().backward()

        torch.manual_seed(0)
        reference = nn.Sequential(Block(), Stacked(), Block())
        model = shard_copy(reference, self.gtp_mesh())
        for seed in range(2):
            check_step(reference, model, self.gtp_mesh(), make_rows(seed), step)

    def test_policy_that_saves_lookups(self) -> None:
        class Lookup(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(9, WIDTH)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.table((x.detach().abs() * 4).long() % 9).sum(1) * x.sin()

        for op, expected in ((aten.embedding.default, 1), (aten.mm.default, 2)):
            torch.manual_seed(0)
            reference = nn.Sequential(Lookup(), nn.Linear(WIDTH, WIDTH))
            model = shard_copy(reference, self.gtp_mesh())

            def step(module: nn.Module, x: torch.Tensor, op: Any = op) -> None:
                x = x.clone().requires_grad_()
                selective(lambda: save(op), module, x).square().mean().backward()

            for seed in range(2):
                before = num_gathers(model)
                check_step(reference, model, self.gtp_mesh(), make_rows(seed), step)
            used = {name: count - before[name] for name, count in num_gathers(model).items()}
            assert used["0.table.weight"] == expected, used

    def test_policy_with_mixed_precision_and_replicas(self) -> None:
        from dtensor_gtp import MixedPrecisionPolicy

        torch.manual_seed(0)
        reference = Blocks(partial(selective, lambda: save(*GEMMS)))
        mesh = self.hsdp_mesh()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = shard_copy(reference, mesh, mp_policy=policy, reshard_after_forward=False)
        for seed in range(2):
            check_step(reference, model, mesh, make_rows(seed), square_step, rtol=5e-2, atol=5e-2)

    def test_nested_checkpoints(self) -> None:
        """The inner checkpoint is recomputed within the outer one's recomputation, and once more for its backward."""

        def twice(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            def inner(x: torch.Tensor) -> torch.Tensor:
                return checkpoint(block, x, use_reentrant=False).tanh()

            result: torch.Tensor = checkpoint(inner, x, use_reentrant=False)
            return result

        used = self.gathers(self.fresh(twice))
        assert used == dict.fromkeys(used, 4), used

    def test_early_stop(self) -> None:
        """The recomputation ends with the last tensor that backward needs, so a last layer may be spared."""

        class LastLinear(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up = nn.Linear(WIDTH, WIDTH)
                self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = self.frozen(torch.tanh(self.up(x)))
                return result

        for is_enabled, expected in ((True, 2), (False, 3)):
            torch.manual_seed(0)
            reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), LastLinear(), nn.Linear(WIDTH, WIDTH))
            model = shard_copy(reference, self.gtp_mesh())

            def step(module: nn.Module, x: torch.Tensor, is_enabled: bool = is_enabled) -> None:
                x = module[0](x)
                with set_checkpoint_early_stop(is_enabled):
                    x = checkpoint(module[1], x, use_reentrant=False)
                module[2](x).square().mean().backward()

            for seed in range(3):
                before = num_gathers(model)
                check_step(reference, model, self.gtp_mesh(), make_rows(seed), step)
            used = {name: count - before[name] for name, count in num_gathers(model).items()}
            assert (used["1.up.weight"], used["1.frozen.weight"]) == (3, expected), used

    # --- wrapped modules ----------------------------------------------------------------------------------------------

    def test_sharding_after_checkpoint_wrapper(self) -> None:
        for impl in CheckpointImpl:
            reference = self.fresh(lambda block, x: block(x))
            names = list(reference.state_dict())
            for index, block in enumerate(reference):
                reference[index] = checkpoint_wrapper(block, checkpoint_impl=impl)
            model = shard_copy(reference, self.gtp_mesh())
            assert list(model.state_dict()) == names, "the wrapper hides its own name"
            used = self.gathers_of(reference, model)
            assert used == dict.fromkeys(used, 3), used

    def test_sharding_before_checkpoint_wrapper(self) -> None:
        for impl in CheckpointImpl:
            reference = self.fresh(lambda block, x: block(x))
            model = shard_copy(reference, self.gtp_mesh())
            wrapper = partial(checkpoint_wrapper, checkpoint_impl=impl)
            for module in (reference, model):
                apply_activation_checkpointing(module, wrapper, check_fn=lambda module: isinstance(module, Block))
            used = self.gathers_of(reference, model)
            assert used == dict.fromkeys(used, 3), used

    def test_submodules_sharded_inside_of_the_wrapper(self) -> None:
        """First the wrapped modules, each with a call of its own, then the root around the wrappers."""
        reference = self.fresh(lambda block, x: block(x))
        model = copy.deepcopy(reference)
        for index, block in enumerate(model):
            reference[index] = checkpoint_wrapper(reference[index])
            model[index] = checkpoint_wrapper(gtp_shard(block, self.gtp_mesh(), schedule=ALL))
        gtp_shard(model, self.gtp_mesh(), schedule=ALL)
        used = self.gathers_of(reference, model)
        assert used == dict.fromkeys(used, 3), used

    # --- activations on the host --------------------------------------------------------------------------------------

    def test_save_on_cpu_around_the_model(self) -> None:
        reference = self.fresh(lambda block, x: block(x))
        model = shard_copy(reference, self.gtp_mesh())

        def step(module: nn.Module, x: torch.Tensor) -> None:
            with save_on_cpu():
                loss = square_loss(module, x)
            loss.backward()

        for seed in range(3):
            before = num_gathers(model)
            check_step(reference, model, self.gtp_mesh(), make_rows(seed), step)
            used = {name: count - before[name] for name, count in num_gathers(model).items()}
            assert {count for name, count in used.items() if name.startswith("1.")} == {2}
        packed: list[torch.Size] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(make_rows(0, rows=3))
        assert packed
        assert (WIDTH, WIDTH) not in packed, "a full weight went to the host"

    def test_save_on_cpu_inside_of_the_model_and_of_checkpoints(self) -> None:
        def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with save_on_cpu():
                result: torch.Tensor = block(x)
            return result

        def outside(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with save_on_cpu():
                result: torch.Tensor = checkpoint(block, x, use_reentrant=False)
            return result

        def inside(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(lambda x: plain(block, x), x, use_reentrant=False)
            return result

        def inside_reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(lambda x: plain(block, x), x, use_reentrant=True)
            return result

        # What the inner hooks take is not recomputed: a non-reentrant checkpoint never sees it.
        for run, expected in ((plain, 2), (outside, 3), (inside, 2), (inside_reentrant, 3)):
            used = self.gathers(self.fresh(run))
            assert used == dict.fromkeys(used, expected), f"{run.__name__}: {used}"

    def test_offload_wrapper(self) -> None:
        reference = self.fresh(lambda block, x: block(x))
        for index, block in enumerate(reference):
            reference[index] = offload_wrapper(block)
        used = self.gathers(reference)
        assert used == dict.fromkeys(used, 2), used
