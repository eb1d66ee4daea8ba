"""The methods of ``GTPModule``, several models, nested calls, permuted meshes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GROUPS, GlooTest, assert_same_params, environment, full, rows_of_rank
from runtime_common import (
    WIDTH,
    Net,
    Raw,
    assert_bit_equal,
    assert_idle,
    check_step,
    counted,
    gathers,
    make_rows,
    make_tokens,
    members_of,
    runtime_of,
    shard_copy,
    small_model,
    square_loss,
    square_step,
    token_step,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dtensor_gtp import GTPModule, MixedPrecisionPolicy, gtp_shard


class TestSwitches(GlooTest):
    def test_the_last_of_several_microbatches_reduces(self) -> None:
        """Or reduces over replicas, or waits for what is in flight: nobody sees a gradient before."""
        fp64 = MixedPrecisionPolicy(reduce_dtype=torch.float64)
        for switch, mesh, policy in (
            ("set_requires_gradient_sync", self.gtp_mesh(), fp64),
            ("set_requires_gradient_sync", self.hsdp_mesh(), fp64),
            ("set_requires_all_reduce", self.hsdp_mesh(), None),
            ("set_is_last_backward", self.gtp_mesh(), None),
            ("set_is_last_backward", self.hsdp_mesh(), None),
        ):
            reference = Net(num_pairs=1)
            model = shard_copy(reference, mesh, **({"mp_policy": policy} if policy else {}))
            # The tied weight has two uses: each is reduce-scattered, their sum is all-reduced with the first one that
            # is complete. Whole parameters: one call over each axis.
            num_uses = len(members_of(model).weights) + 1
            expected = {
                "set_requires_gradient_sync": [(0, 0), (num_uses, 1 if mesh.ndim == 1 else num_uses + 2)],
                "set_requires_all_reduce": [(num_uses, 0), (num_uses, num_uses + 2)],
            }

            def step(module: Any, tokens: torch.Tensor) -> None:
                for index in range(3):
                    is_last = index == 2
                    if isinstance(module, GTPModule):
                        getattr(module, switch)(is_last)  # noqa: B023
                    with counted() as counts:
                        token_step(module, tokens.roll(index, 1))
                    if isinstance(module, GTPModule):
                        if switch in expected:  # noqa: B023
                            self.assertEqual(counts()[1:], expected[switch][is_last])  # noqa: B023
                        has_grads = [param.grad is not None for param in module.parameters()]
                        assert is_last or not any(has_grads) or switch == "set_requires_all_reduce"  # noqa: B023

            for seed in range(2):
                check_step(reference, model, mesh, make_tokens(seed), step)

    def test_a_gradient_in_flight_of_a_weight_that_the_last_microbatch_does_not_use(self) -> None:
        """It waits for its all-reduce, which the last backward launches."""
        reference = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
        model: Any = shard_copy(reference, self.hsdp_mesh())
        for turn in range(2):
            for index in range(2):
                x = make_rows(2 * turn + index)
                square_loss(reference[index], x).backward()
                model.set_requires_all_reduce(index == 1)
                model.set_is_last_backward(index == 1)
                square_loss(model[index], rows_of_rank(x, self.hsdp_mesh())).backward()
            assert_same_params(model, reference, "grad")
            assert_idle(model)
            for module in (model, reference):
                module.zero_grad()

    def test_zero_grad_keeps_sums_that_were_not_synced(self) -> None:
        """As under ``fully_shard``; single weights, groups, whole parameters."""
        for schedule in (ALL, GROUPS):
            for name in ("set_requires_gradient_sync", "set_requires_all_reduce"):
                reference = nn.Sequential(*(small_model() for _ in range(4)), nn.Linear(WIDTH, WIDTH))
                model = shard_copy(reference, self.hsdp_mesh(), schedule=schedule)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for seed, is_last in ((0, False), (1, True)):
                    getattr(model, name)(is_last)
                    square_step(model, rows_of_rank(make_rows(seed), self.hsdp_mesh()))
                    square_step(reference, make_rows(seed))
                    if not is_last:
                        optimizer.zero_grad()
                        model.zero_grad()
                self.assertEqual(bool(members_of(model).groups), schedule is not ALL)
                assert_same_params(model, reference, "grad", rtol=1e-4, atol=1e-5)

    def test_weights_kept_after_backward_serve_the_next_microbatch(self) -> None:
        mesh = self.gtp_mesh()
        reference = small_model()
        model = shard_copy(reference, mesh, reshard_after_forward=False)
        model.set_reshard_after_backward(False)

        def step(module: nn.Module, x: torch.Tensor) -> None:
            for _ in range(2):
                square_step(module, x)

        for seed in range(2):
            # What is kept is dropped when the optimizer has written to it, so each step gathers each weight once.
            with gathers(model) as used:
                check_step(reference, model, mesh, make_rows(seed), step, is_idle=False)
            assert used == dict.fromkeys(used, 1), used
        model.set_reshard_after_backward(True)
        check_step(reference, model, mesh, make_rows(9), square_step)

    def test_unshard_and_reshard(self) -> None:
        mesh = self.gtp_mesh()
        reference = small_model()
        model = shard_copy(reference, mesh)
        weights = list(members_of(model).weights)
        for is_async in (False, True):
            assert isinstance(model[0].weight, DTensor)
            with counted() as counts:
                handle = model.unshard(async_op=is_async)
                assert (handle is not None) == is_async
                if handle is not None:
                    handle.wait()
                    handle.wait()
                assert counts() == (len(weights), 0, 0)
                assert all(weight.for_forward.live or weight.for_forward.kept for weight in weights)
                torch.testing.assert_close(model[0].weight, reference[0].weight)
                torch.testing.assert_close(model[1].first, reference[1].first)
                model.unshard()
                model(make_rows(0))
                assert counts() == (len(weights), 0, 0), "a forward after unshard() must not gather"
            assert isinstance(dict(model.named_parameters())["0.weight"], DTensor)
            check_step(reference, model, mesh, make_rows(0), square_step, is_idle=False)
            torch.testing.assert_close(model[0].weight, reference[0].weight)
            model.reshard()
            model.reshard()
            assert_idle(model)
            assert isinstance(model[0].weight, DTensor)
            # Thrown away while it is still in flight.
            model.unshard(async_op=True)
            model.reshard()
            assert_idle(model)
            check_step(reference, model, mesh, make_rows(1), square_step)

    def test_optimizer_step_in_backward(self) -> None:
        """One optimizer for each parameter, which steps in its post-accumulate-grad hook and frees the gradient."""
        reference = small_model()
        model = shard_copy(reference, self.gtp_mesh())

        def step_at_once(root: nn.Module) -> None:
            for param in root.parameters():
                optimizer = torch.optim.AdamW([param], lr=0.01)

                def hook(param: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                    optimizer.step()
                    optimizer.zero_grad()

                param.register_post_accumulate_grad_hook(hook)

        step_at_once(reference)
        step_at_once(model)
        for seed in range(2):
            square_step(reference, make_rows(seed))
            square_step(model, rows_of_rank(make_rows(seed), self.gtp_mesh()))
            assert all(param.grad is None for param in model.parameters())
            assert_same_params(model, reference)
            assert_idle(model)

    def test_two_models_in_one_process(self) -> None:
        meshes = (self.gtp_mesh(), self.hsdp_mesh())
        references = (small_model(), small_model())
        models = [shard_copy(reference, mesh) for reference, mesh in zip(references, meshes, strict=True)]

        def step(pair: Any, batch: torch.Tensor) -> None:
            first, second = pair
            square_loss(second, first(batch)).backward()  # one graph through both
            (square_loss(first, batch) + square_loss(second, batch + 1)).backward()

        for seed in range(2):
            step(references, make_rows(seed))
            step(models, rows_of_rank(make_rows(seed), meshes[0]))
            for model, reference in zip(models, references, strict=True):
                assert_same_params(model, reference, "grad")
                for module in (model, reference):
                    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                assert_same_params(model, reference)
                assert_idle(model)

    def test_nested_calls_with_meshes_of_their_own(self) -> None:
        """Submodules first, each with its mesh and policy; the root then runs all of them."""
        meshes = (self.gtp_mesh(), self.hsdp_mesh())
        for outer, inner in (meshes, meshes[::-1]):
            reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), small_model(), Raw())
            model = copy.deepcopy(reference)
            gtp_shard(model[1], inner, schedule=ALL, reshard_after_forward=False)
            check_step(reference[1], model[1], inner, make_rows(0), square_step)
            gtp_shard(model, outer, schedule=ALL)
            assert runtime_of(model[1]) is runtime_of(model)
            params = dict(model.named_parameters())
            assert params["0.weight"].device_mesh == outer
            assert params["1.0.weight"].device_mesh == inner
            for seed in range(2):
                check_step(reference, model, outer, make_rows(seed), square_step)
                # A managed submodule may be called on its own.
                check_step(reference[1], model[1], inner, make_rows(seed), square_step)

    def permuted_record(self, ranks: Any) -> list[torch.Tensor]:
        """Logical gradients and parameters of a step; each rank has data of its own, whatever its coordinate."""
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "gtp")[2 - torch.tensor(ranks).ndim :])
        torch.manual_seed(8)
        model = gtp_shard(Net(num_pairs=1), mesh, schedule=ALL)
        token_step(model, make_tokens(0).chunk(self.world_size)[self.rank])
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        record = [full(value) for param in model.parameters() for value in (param.grad, param.detach())]
        for param in model.parameters():
            # Where a checkpoint files the shard must be where its rows are.
            shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
            part = full(param.detach())[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
            assert torch.equal(param.to_local().detach(), part), f"ranks {ranks}, shape {tuple(param.shape)}"
        return record

    def test_r11_permuted_ranks_give_the_bits_of_the_default_mesh(self) -> None:
        for default, permuted in (
            ([0, 1, 2, 3], [[2, 0, 3, 1], [3, 2, 1, 0]]),
            ([[0, 1], [2, 3]], [[[2, 3], [0, 1]], [[3, 2], [1, 0]], [[1, 0], [3, 2]]]),
            ([[0, 2], [1, 3]], [[[1, 3], [0, 2]], [[2, 0], [3, 1]]]),
        ):
            expected = self.permuted_record(default)
            for ranks in permuted:
                assert_bit_equal(self.permuted_record(ranks), expected, f"ranks {ranks}")

    def test_r11_ranks_that_no_order_of_groups_fits_are_refused(self) -> None:
        mesh = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("replicate", "gtp"))
        model = small_model()
        with self.assertRaisesRegex(ValueError, "ranks can be put in ascending order .* Build the mesh with"):
            gtp_shard(model, mesh, schedule=ALL)
        assert type(model) is nn.Sequential
        assert not any(isinstance(param, DTensor) for param in model.parameters())

    def test_r26_debug_order_finds_weights_that_only_some_ranks_use(self) -> None:
        """Layers of one shape: without the check, collectives of different weights would mix silently."""
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            with environment(DTENSOR_GTP_DEBUG="order"):
                model = gtp_shard(Branches(), mesh, schedule=ALL)
            x = make_rows(self.rank, 3, 4)
            for _ in range(2):  # alike on all ranks: nothing to find
                model(x, "first").sum().backward()
            told = "rank 1: all_gather of second.weight; rank 2: reduce_scatter of first.weight"
            with self.assertRaisesRegex(RuntimeError, f"different collectives .*{told}.*Run the module on an empty"):
                # The others have gathered the weight ahead; the gradient is their next collective.
                model(x, "second" if self.rank == 1 else "first").sum().backward()
            # Only gradients differ: rank 2 leaves one branch out of its loss.
            output = model(x, "both")
            with self.assertRaisesRegex(RuntimeError, "different collectives .*rank 2: "):
                (output["first"] if self.rank == 2 else output["first"] + output["second"]).sum().backward()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, branch: str) -> Any:
        if branch == "both":
            return {"first": self.first(x), "second": self.second(x)}
        return getattr(self, branch)(x)
