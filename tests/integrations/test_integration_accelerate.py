"""``GTPAccelerator`` on two processes beside one process without any library."""

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, full, rows_of_rank, shared_directory
from integration_common import needs, process
from runtime_common import Net, counted, make_tokens, token_loss
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dtensor_gtp import checkpoint, gtp_shard
from dtensor_gtp.optim import gathered

NUM_MICROBATCHES = 2
MAX_NORM = 0.1  # below the norm of each step


class Loop:
    """A training loop in one process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Net()
        self.norm = torch.tensor(0.0)
        self.optimize()

    def optimize(self) -> None:
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler: Any = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))

    def backward(self, step: int) -> None:
        for microbatch in range(NUM_MICROBATCHES):
            (token_loss(self.model, make_tokens(10 * step + microbatch)) / NUM_MICROBATCHES).backward()
        self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


class AcceleratedLoop(Loop):
    """The same in a job of so many processes."""

    mp_policy = MixedPrecisionPolicy()

    def __init__(self, num_processes: int, **options: Any) -> None:
        from accelerate import DataLoaderConfiguration

        from dtensor_gtp.integrations.accelerate import GTPAccelerator

        ranks = list(range(num_processes)) if num_processes > 1 else [dist.get_rank()]
        self.mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("gtp",))
        config = DataLoaderConfiguration(split_batches=True)
        self.accelerator = GTPAccelerator(
            cpu=True, gradient_accumulation_steps=NUM_MICROBATCHES, dataloader_config=config, **options
        )
        self.reductions: list[int] = []  # that each microbatch took
        super().__init__()

    def optimize(self) -> None:
        gtp_shard(self.model, self.mesh, schedule=ALL, mp_policy=self.mp_policy)
        super().optimize()
        prepared = self.accelerator.prepare(self.model, self.optimizer, self.scheduler)
        self.model, self.optimizer, self.scheduler = prepared

    def backward(self, step: int) -> None:
        for microbatch in range(NUM_MICROBATCHES):
            tokens = rows_of_rank(make_tokens(10 * step + microbatch), self.mesh)
            with self.accelerator.accumulate(self.model), counted() as count:
                self.accelerator.backward(token_loss(self.model, tokens))
                self.reductions.append(sum(count()[1:]))
        assert self.accelerator.sync_gradients
        self.norm = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)


class ScaledLoop(AcceleratedLoop):
    """Scales its loss, as accelerate does on GPUs for fp16. The policy's dtype is one that changes no bit."""

    mp_policy = MixedPrecisionPolicy(param_dtype=torch.float32)

    def optimize(self) -> None:
        self.accelerator.scaler, self.accelerator.native_amp = torch.amp.GradScaler("cpu"), True
        super().optimize()


@needs("accelerate", extra="accelerate")
class TestAccelerator(GlooTest):
    world_size = 2

    def check(self, loop: AcceleratedLoop, reference: Loop, steps: range) -> None:
        for step in steps:
            loop.backward(step)
            reference.backward(step)
            torch.testing.assert_close(full(loop.norm), reference.norm)
            assert_same_params(loop.model, reference.model, "grad")
            loop.update()
            reference.update()
            assert_same_params(loop.model, reference.model)
            self.assertEqual(loop.scheduler.get_last_lr(), reference.scheduler.get_last_lr())

    def test_trains_and_resumes_on_one_process(self) -> None:
        """With clipping, microbatches that communicate once, the optimizer's and the scheduler's state."""
        reference = Loop()
        with shared_directory() as folder:
            with process(2):
                loop = AcceleratedLoop(2)
                self.check(loop, reference, range(2))
                self.assertEqual([bool(count) for count in loop.reductions], [False, True] * 2)
                torch.manual_seed(7 + dist.get_rank())
                random.seed(7 + dist.get_rank())
                loop.accelerator.save_state(str(folder))
                self.assertEqual(checkpoint.latest(folder), Path(folder, "sharded_state"))  # whole or absent
                drawn = torch.rand(1).item(), random.random()
                self.assertEqual(len(loop.accelerator._models), 1)
                dist.barrier()
            with process(1):
                resumed = AcceleratedLoop(1)
                resumed.accelerator.load_state(str(folder))
                if dist.get_rank() == 0:
                    self.assertEqual((torch.rand(1).item(), random.random()), drawn)
                assert_same_params(resumed.model, reference.model)
                self.check(resumed, reference, range(2, 4))

    def test_clips_what_is_not_scaled(self) -> None:
        """Without autocast, which the policy replaces."""
        with process(2):
            loop = ScaledLoop(2, mixed_precision="fp16")
            self.check(loop, Loop(), range(3))
            self.assertFalse(loop.accelerator.native_amp)

    def test_ranks_that_did_not_save_take_random_numbers_counted_round(self) -> None:
        with shared_directory() as folder:
            with process(1):  # both ranks, which write the same
                alone = AcceleratedLoop(1)
                torch.manual_seed(11)
                alone.accelerator.step = 5
                alone.accelerator.save_state(str(folder))
                drawn = torch.rand(1)
                dist.barrier()
            with process(2):
                both = AcceleratedLoop(2)
                both.accelerator.load_state(str(folder))
                self.assertEqual(torch.rand(1), drawn)
                self.assertEqual(both.accelerator.step, 5)

    def test_saves_a_whole_model_and_leaves_others_alone(self) -> None:
        from safetensors.torch import load_file

        reference = Loop()
        with shared_directory() as folder, process(2):
            loop = AcceleratedLoop(2)
            plain = torch.nn.Linear(3, 3)
            wrapped = loop.accelerator.prepare(plain)
            self.assertIsInstance(wrapped, torch.nn.parallel.DistributedDataParallel)
            self.assertIs(loop.accelerator.unwrap_model(loop.model), loop.model)
            loop.accelerator.save_model(loop.model, str(folder))
            self.assertEqual(set(loop.accelerator.get_state_dict(wrapped)), {"weight", "bias"})
            dist.barrier()
            whole = load_file(folder / "model.safetensors")
            self.assertEqual(len(whole), len(list(reference.model.parameters())))  # the tied weight once
            for name, tensor in reference.model.state_dict().items():
                if name in whole:
                    self.assertEqual(whole[name], tensor, atol=0, rtol=0)

    def two_models_and_a_head(self, seed: int) -> tuple[Any, list[nn.Module], Any]:
        """Two sharded models and a plain one, trained by one optimizer."""
        from dtensor_gtp.integrations.accelerate import GTPAccelerator

        accelerator = GTPAccelerator(cpu=True)
        torch.manual_seed(seed)
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("gtp",))
        sharded = [gtp_shard(nn.Linear(6, 6), mesh, schedule=ALL) for _ in range(2)]
        models = [*sharded, nn.Linear(6, 2)]
        optimizer = torch.optim.AdamW([param for model in models for param in model.parameters()], lr=1e-2)
        *models, optimizer = accelerator.prepare(*models, optimizer)
        return accelerator, models, optimizer

    def step(self, accelerator: Any, models: list[nn.Module], optimizer: Any) -> list[torch.Tensor]:
        accelerator.backward(models[2](models[0](torch.ones(3, 6)) * models[1](torch.ones(3, 6))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return [full(param.detach()).clone() for model in models for param in model.parameters()]

    def test_gathered_states_load_where_a_parameter_had_no_gradient_yet(self) -> None:
        from dtensor_gtp.integrations._checkpoint import (
            load_optimizer_state,
            load_shards,
            names_of_params,
            optimizer_state,
            state_to_load,
        )

        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("gtp",))

        def job(num_layers: int) -> Any:
            torch.manual_seed(0)
            model = gtp_shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), mesh, schedule=ALL)
            optimizer = gathered(torch.optim.AdamW)(model.parameters(), lr=1e-2)
            model[:num_layers](torch.ones(3, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return optimizer, names_of_params(optimizer, [model])

        with shared_directory() as folder:
            saved = optimizer_state(*job(2))
            checkpoint.save({"optimizer": saved}, folder / "all")
            dist.barrier()
            optimizer, names = job(1)
            state = state_to_load(optimizer, names, folder / "all", "optimizer")
            load_shards({"optimizer": state}, folder / "all")
            load_optimizer_state(optimizer, names, state)
            self.assertEqual(optimizer_state(optimizer, names)["state"], saved["state"])

    def test_an_optimizer_of_several_models_resumes(self) -> None:
        with shared_directory() as folder, process(2):
            job = self.two_models_and_a_head(0)
            self.step(*job)
            job[0].save_state(str(folder))
            dist.barrier()
            resumed = self.two_models_and_a_head(1)
            resumed[0].load_state(str(folder))
            for _ in range(2):
                self.assertEqual(self.step(*resumed), self.step(*job))

    def test_an_optimizer_of_what_is_not_prepared_is_refused(self) -> None:
        with shared_directory() as folder, process(2):
            accelerator, _, optimizer = self.two_models_and_a_head(0)
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
            told = r"parameter 0 of param group 1, of shape \(5,\), which is in none. Pass its module to prepare"
            with self.assertRaisesRegex(ValueError, told):
                accelerator.save_state(str(folder))
            dist.barrier()

    def test_an_optimizer_of_other_parameters_than_those_saved_is_refused(self) -> None:
        with shared_directory() as folder, process(2):
            job = self.two_models_and_a_head(0)
            self.step(*job)
            job[0].save_state(str(folder / "all"))
            other = self.two_models_and_a_head(0)
            members = other[2].param_groups[0]["params"]
            last = members.pop()
            self.step(*other)
            other[0].save_state(str(folder / "less"))
            dist.barrier()
            with self.assertRaisesRegex(ValueError, "one without '2.bias' and 0 more. Make it of the same parameters"):
                other[0].load_state(str(folder / "all"))
            with self.assertRaisesRegex(ValueError, "group 0 with the 5 .* got 6; '2.bias' is in one of them only"):
                job[0].load_state(str(folder / "less"))
            other[2].param_groups.append({**other[2].param_groups[0], "params": [last]})
            with self.assertRaisesRegex(ValueError, "with the 1 param groups that .*/all/.* has, but got 2. Make"):
                other[0].load_state(str(folder / "all"))
            dist.barrier()

    def test_hooks_get_all_models_and_take_some_out(self) -> None:
        seen: list[Any] = []

        def before_save(models: list[Any], weights: list[Any], folder: str) -> None:
            seen.append([*models])
            self.assertEqual([set(state) for state in weights], [{"weight", "bias"}] * 3)
            self.assertEqual(full(weights[0]["weight"]), full(models[0].weight.detach()))
            if dist.get_rank() == 0:  # as scripts do on the main process
                weights.pop(1)

        def before_load(models: list[Any], folder: str) -> None:
            seen.append([*models])
            if dist.get_rank() == 1:
                models.pop(1)

        with shared_directory() as folder, process(2):
            accelerator, models, _ = self.two_models_and_a_head(0)
            accelerator.register_save_state_pre_hook(before_save)
            accelerator.register_load_state_pre_hook(before_load)
            saved = [[full(param.detach()).clone() for param in model.parameters()] for model in models]
            accelerator.save_state(str(folder))
            for model in models:
                nn.Module.apply(model, _blank)
            dist.barrier()
            accelerator.load_state(str(folder))
            plain = [accelerator.unwrap_model(model) for model in models]
            self.assertEqual([list(map(id, each)) for each in seen], [list(map(id, plain))] * 2)
            loaded = [[full(param.detach()).clone() for param in model.parameters()] for model in models]
            self.assertEqual([loaded[0], loaded[2]], [saved[0], saved[2]])
            self.assertEqual(loaded[1], [torch.full_like(param, 0.5) for param in saved[1]])
            self.assertEqual(len(accelerator._save_model_state_pre_hook), 1)

    def test_options_that_the_checkpoint_lacks_stay(self) -> None:
        """As a scheduler made after the save adds them."""
        from dtensor_gtp.integrations.accelerate import GTPAccelerator

        def job() -> tuple[Any, Any]:
            accelerator = GTPAccelerator(cpu=True)
            model = gtp_shard(nn.Linear(6, 6), DeviceMesh("cpu", [0, 1], mesh_dim_names=("gtp",)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            return accelerator, accelerator.prepare(model, optimizer)[1].optimizer

        with shared_directory() as folder, process(2):
            accelerator, optimizer = job()
            optimizer.param_groups[0]["lr"] = 0.5
            accelerator.save_state(str(folder))
            dist.barrier()
            accelerator, optimizer = job()
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
            accelerator.load_state(str(folder))
            group = optimizer.param_groups[0]
            self.assertEqual((group["lr"], group["initial_lr"]), (0.5, 1e-2))

    def test_states_have_the_names_that_torch_gives_them(self) -> None:
        """So checkpoints with states of torch's own functions, as earlier ones, load."""
        from dtensor_gtp.integrations._checkpoint import names_of_params, optimizer_state

        model = Net()
        groups = [{"params": [*model.parameters()][:2], "weight_decay": 0.0}, {"params": [*model.parameters()][2:]}]
        optimizer = torch.optim.AdamW(groups)
        token_loss(model, make_tokens(0)).backward()
        optimizer.step()
        own = optimizer_state(optimizer, names_of_params(optimizer, [model]))
        stock = get_optimizer_state_dict(model, optimizer)
        self.assertEqual(own["state"].keys(), stock["state"].keys())
        self.assertEqual(own["param_groups"], stock["param_groups"])

    def test_what_is_refused(self) -> None:
        """A mesh of some processes, and the stock accelerator."""
        from accelerate import Accelerator

        from dtensor_gtp.integrations.accelerate import GTPAccelerator

        for cls, ranks, error, words in (
            (GTPAccelerator, [dist.get_rank()], NotImplementedError, "sharded over all 2 processes.* of 1 ranks"),
            (Accelerator, [0, 1], RuntimeError, "import GTPAccelerator as Accelerator"),
        ):
            with process(2):
                model = gtp_shard(Net(), DeviceMesh("cpu", ranks, mesh_dim_names=("gtp",)))
                with self.assertRaisesRegex(error, words):
                    cls(cpu=True).prepare(model)


@torch.no_grad()
def _blank(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        param.fill_(0.5)
