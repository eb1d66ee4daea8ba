"""Activation checkpointing, plain and selective, wrapped modules and activations on the host.

Each weight is gathered once more for the recomputation, and all else stays as it is. A policy sees the GEMM of a linear
layer as the aten op that it would be without sharding. Whatever it saves is not computed again, and a weight that
nobody computes with is not gathered.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from common import ALL, NOTHING_STAYS, GlooTest, environment
from runtime_common import (
    WIDTH,
    Calls,
    Raw,
    Step,
    assert_idle,
    check_step,
    check_steps,
    counted,
    gathers,
    make_rows,
    shard_copy,
    square_loss,
    square_step,
)
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
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from dtensor_gtp import GTPModule, MixedPrecisionPolicy, SelectiveOffload, gtp_shard

aten = torch.ops.aten
GEMMS = (aten.mm.default, aten.addmm.default)
Run = Callable[[nn.Module, torch.Tensor], Any]
recompute: Run = partial(checkpoint, use_reentrant=False)
reentrant: Run = partial(checkpoint, use_reentrant=True)


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
        return self.down(self.raw(torch.tanh(self.up(self.norm(x))))) * x.sin()


class Blocks(nn.Sequential):
    """Three blocks; ``run`` calls each of them."""

    def __init__(self, run: Run = lambda block, x: block(x)) -> None:
        super().__init__(*(Block() for _ in range(3)))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self:
            x = self.run(block, x)
        return x


class RawFunctions(nn.Module):
    """Recomputes functions that are no modules and read raw parameters of their module, one of them twice."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.run = run

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.first) * self.scale @ self.second

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.second.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for function in (self.mix, self.turn, self.mix):
            x = self.run(function, x)
        return x


class Stacked(nn.Module):
    """What recomputation would take for itself of ops that it does not run again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.stack([x, torch.where(x > 0, x, 0.1 * x)])
        return torch.cat([both.exp(), both.sin()]).sum(0).exp().clamp(max=2)


def save(*ops: Any, others: bool = False) -> Callable[..., CheckpointPolicy]:
    """A policy that saves what these ops return, or what all ``others`` do."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = (op in ops) != others
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

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


def selective(make_policy: Callable[[], Any]) -> Run:
    return partial(recompute, context_fn=lambda: create_selective_checkpoint_contexts(make_policy()))


def by(run: Run) -> Step:
    """A step that runs the whole model with ``run``."""

    def step(model: nn.Module, x: torch.Tensor) -> None:
        run(model, x.clone().requires_grad_()).square().mean().backward()

    return step


class TestSelective(GlooTest):
    world_size = 2

    def gathers_of(self, reference: nn.Module, model: nn.Module, step: Step = square_step) -> dict[str, int]:
        """Train beside one process; gathers of each weight in the last step."""
        for seed in range(2):
            with gathers(model) as used, counted() as counts:
                check_step(reference, model, self.gtp_mesh(), make_rows(seed), step)
            assert counts().all_gathers == sum(used.values())
            assert counts().reduce_scatters == len(used), "one reduction for each use, none for the recomputation"
        return used

    def gathers_in_block(self, reference: nn.Module, **options: Any) -> dict[str, int]:
        """The same of the weights of the middle block."""
        used = self.gathers_of(reference, shard_copy(reference, self.gtp_mesh(), **options))
        return {name.removeprefix("1."): count for name, count in used.items() if name.startswith("1.")}

    def test_r24_checkpointed_weights_are_gathered_twice(self) -> None:
        """They stay from the recomputation to their gradients, unless the window is too small."""
        for run, schedule, expected in (
            (reentrant, changed(ALL, prefetch_depth=2), 2),
            (recompute, changed(ALL, prefetch_depth=0), 2),
            (reentrant, NOTHING_STAYS, 3),
            (recompute, changed(NOTHING_STAYS, prefetch_depth=0), 3),
        ):
            reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), Blocks(run), nn.Linear(WIDTH, WIDTH))
            model = shard_copy(reference, self.gtp_mesh(), schedule=schedule)
            used = self.gathers_of(reference, model)
            # The outer layers: the first needs no gather in backward; the last is kept at the turn.
            assert used == dict.fromkeys(used, expected) | {"0.weight": 1, "2.weight": 1}, f"{schedule}: {used}"
            for _ in range(2):
                with torch.no_grad(), gathers(model) as used:
                    torch.testing.assert_close(model(make_rows(0)), reference(make_rows(0)))
                assert used == dict.fromkeys(used, 1), f"an evaluation recomputes nothing: {used}"
                assert_idle(model)

    def test_kept_weights_and_microbatches(self) -> None:
        def step(module: Any, x: torch.Tensor) -> None:
            for index in range(2):
                if isinstance(module, GTPModule):
                    module.set_requires_gradient_sync(index == 1)
                square_step(module, x + index)

        for run in (reentrant, recompute):
            check_steps(Blocks(run), self.gtp_mesh(), step, reshard_after_forward=False)

    def test_exception_in_recomputation_leaves_nothing_behind(self) -> None:
        def fail(*args: Any) -> None:
            raise RuntimeError("on purpose")

        for run in (reentrant, recompute):
            reference = Blocks(run)
            model = check_steps(reference, self.gtp_mesh(), seeds=[0])
            for module in (model[1].raw, model[0].up):
                loss = square_loss(model, make_rows(1))
                with module.register_forward_pre_hook(fail), self.assertRaisesRegex(RuntimeError, "on purpose"):
                    loss.backward()
            for seed in range(2):
                check_step(reference, model, self.gtp_mesh(), make_rows(seed), square_step)

    def test_policies_that_save_what_linears_return(self) -> None:
        """The runtime's own ops are nothing that a policy may count or save: a saved gather would leave the
        recomputation a buffer that nobody has filled."""
        everything = dict.fromkeys(("up.weight", "raw.first", "raw.second", "down.weight"), 3)
        without_gemms = everything | {"up.weight": 2, "down.weight": 2}  # raw weights are gathered when they are read
        cases: dict[str, tuple[Run, dict[str, int]]] = {
            "nothing": (selective(save), everything),
            "everything": (selective(partial(save, others=True)), without_gemms),
            "all GEMMs": (selective(lambda: save(*GEMMS)), without_gemms),
            "with bias": (selective(lambda: save(aten.addmm.default)), everything | {"up.weight": 2}),
            "without bias": (selective(lambda: save(aten.mm.default)), everything | {"down.weight": 2}),
            "as a list of ops": (selective(lambda: list(GEMMS)), without_gemms),
            "every second": (selective(save_every_second_gemm), everything | {"up.weight": 2}),
            "on the host": (partial(recompute, context_fn=SelectiveOffload(GEMMS)), without_gemms),
        }
        for name, (run, expected) in cases.items():
            for depth in (2, 0) if name == "every second" else (2,):
                with environment(DTENSOR_GTP_DEBUG="poison"):
                    used = self.gathers_in_block(Blocks(run), schedule=changed(NOTHING_STAYS, prefetch_depth=depth))
                assert used == expected, f"{name}, depth {depth}: {used}"

    def test_a_write_to_what_a_policy_has_saved_is_refused(self) -> None:
        """Of a view, too: the output of a layer with a bias for sequences."""

        def run(block: Any, x: torch.Tensor) -> Any:
            return selective(lambda: save(*GEMMS))(lambda x: block.up(x).add_(1).sin(), x)

        model = shard_copy(Blocks(run), self.gtp_mesh())
        for rows in (make_rows(0), make_rows(0).unsqueeze(1)):
            with self.assertRaisesRegex(RuntimeError, "mutated|modified inplace"):
                square_loss(model, rows).backward()

    def test_policy_around_the_root(self) -> None:
        """Also in the first forward, where ranks tell each other that they can begin."""
        reference = nn.Sequential(Block(), Stacked(), Block())
        check_steps(reference, self.gtp_mesh(), by(selective(lambda: save(*GEMMS, others=True))))

    def test_policy_that_saves_lookups(self) -> None:
        def lookup(own: Any, x: torch.Tensor) -> torch.Tensor:
            return own.table((x.detach().abs() * 4).long() % 9).sum(1) * x.sin()

        for op, expected in ((aten.embedding.default, 1), (aten.mm.default, 2)):
            reference = nn.Sequential(Calls(lookup, table=nn.Embedding(9, WIDTH)), nn.Linear(WIDTH, WIDTH))
            model = shard_copy(reference, self.gtp_mesh())
            used = self.gathers_of(reference, model, by(selective(partial(save, op))))
            assert used["0.table.weight"] == expected, used

    def test_early_stop(self) -> None:
        """The recomputation ends with the last tensor that backward needs, so a last layer may be spared."""
        for is_enabled, expected in ((True, 2), (False, 3)):
            frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
            recomputed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), frozen)
            reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), recomputed, nn.Linear(WIDTH, WIDTH))

            def step(module: Any, x: torch.Tensor, is_enabled: bool = is_enabled) -> None:
                with set_checkpoint_early_stop(is_enabled):
                    x = recompute(module[1], module[0](x))
                square_step(module[2], x)

            model = check_steps(reference, self.gtp_mesh(), step, schedule=NOTHING_STAYS)
            with gathers(model) as used:
                check_step(reference, model, self.gtp_mesh(), make_rows(2), step)
            assert (used["1.0.weight"], used["1.2.weight"]) == (3, expected), used

    def test_wrapped_modules(self) -> None:
        """They are sharded before, or after, or by themselves and then with the root around the wrappers."""
        reentrant_wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
        for wrapper, order, expected in (
            (checkpoint_wrapper, "before", 3),
            (checkpoint_wrapper, "after", 3),
            (checkpoint_wrapper, "both", 3),
            (reentrant_wrapper, "before", 3),
            (reentrant_wrapper, "after", 3),
            (offload_wrapper, "after", 2),
        ):
            reference = Blocks()
            model = copy.deepcopy(reference)
            names = list(model.state_dict())
            for part in {"before": [model], "both": list(model)}.get(order, []):
                gtp_shard(part, self.gtp_mesh(), schedule=NOTHING_STAYS)
            for module in (reference, model):
                apply_activation_checkpointing(module, wrapper, check_fn=lambda module: isinstance(module, Block))
            if order != "before":
                gtp_shard(model, self.gtp_mesh(), schedule=NOTHING_STAYS)
            assert list(model.state_dict()) == names, "the wrapper hides its own name"
            used = self.gathers_of(reference, model)
            assert {used[name] for name in used if name.startswith("1.")} == {expected}, f"{wrapper} {order}: {used}"

    def test_checkpoints_and_save_on_cpu_in_each_other(self) -> None:
        def plain(block: nn.Module, x: torch.Tensor) -> Any:
            with save_on_cpu():
                return block(x)

        # What the inner hooks take is not recomputed: a non-reentrant checkpoint never sees it. An inner checkpoint is
        # recomputed within the outer one's recomputation, and once more for its backward.
        runs: dict[str, tuple[Run, int]] = {
            "plain": (plain, 2),
            "outside": (lambda block, x: plain(partial(recompute, block), x), 3),
            "inside": (lambda block, x: recompute(partial(plain, block), x), 2),
            "inside, reentrant": (lambda block, x: reentrant(partial(plain, block), x), 3),
            "two checkpoints": (lambda block, x: recompute(lambda x: recompute(block, x).tanh(), x), 4),
        }
        for name, (run, expected) in runs.items():
            used = self.gathers_in_block(Blocks(run), schedule=NOTHING_STAYS)
            assert used == dict.fromkeys(used, expected), f"{name}: {used}"


class TestSelectiveWithReplicas(GlooTest):
    def test_the_whole_model_and_its_segments(self) -> None:
        for use_reentrant, mesh in ((True, self.hsdp_mesh()), (False, self.gtp_mesh())):
            reference = nn.Sequential(*(module for _ in range(3) for module in (Raw(), nn.Linear(WIDTH, WIDTH))))
            whole = by(partial(checkpoint, use_reentrant=use_reentrant))
            segments = by(lambda module, x, r=use_reentrant: checkpoint_sequential(module, 3, x, use_reentrant=r))
            model = shard_copy(reference, mesh, schedule=NOTHING_STAYS)
            for seed in range(2):
                with gathers(model) as used:
                    check_step(reference, model, mesh, make_rows(seed), whole)
                assert used == dict.fromkeys(used, 3), f"reentrant {use_reentrant}: {used}"
            for seed in range(2):
                check_step(reference, model, mesh, make_rows(seed), segments)

    def test_functions_that_read_raw_parameters(self) -> None:
        for run, mesh in ((reentrant, self.gtp_mesh()), (recompute, self.hsdp_mesh())):
            reference = RawFunctions(run)
            with environment(DTENSOR_GTP_DEBUG="poison,delay=1"):
                model = shard_copy(reference, mesh)
            for seed in range(2):
                with gathers(model) as used:
                    check_step(reference, model, mesh, make_rows(seed), square_step, lr=0.0)
                # Read once in the forward's frame, once in backward, where no frame says how long: kept to its end.
                # What backward reads first is kept at the turn.
                assert used == {"first": 2 if seed == 0 else 1, "second": 2}, used

    def test_policy_with_mixed_precision(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        check_steps(
            Blocks(selective(lambda: save(*GEMMS))),
            self.hsdp_mesh(),
            tolerance={"rtol": 5e-2, "atol": 5e-2},
            mp_policy=policy,
            reshard_after_forward=False,
        )
