"""``GTPTrainer`` on two processes beside the stock ``transformers.Trainer`` in one."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, shared_directory
from integration_common import make_llama, needs, process, samples
from runtime_common import counted
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dtensor_gtp import gtp_shard
from dtensor_gtp.checkpoint import latest

BATCH = 8  # samples of a microbatch, over all processes
STEPS = 4


def arguments(folder: Path | str, num_processes: int, **options: Any) -> Any:
    from transformers import TrainingArguments

    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // num_processes,
        "per_device_eval_batch_size": BATCH // num_processes,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_grad_norm": 0.3,  # below the norm of each step
        "save_strategy": "no",
        "logging_steps": 1,
    }
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    return TrainingArguments(output_dir=str(folder), **{**quiet, **defaults, **options})


def trainer_of(model: nn.Module, args: Any, num_processes: int, **shard: Any) -> Any:
    """A trainer of a model that is sharded over all processes."""
    from dtensor_gtp.integrations.transformers import GTPTrainer

    ranks = range(dist.get_world_size()) if num_processes > 1 else [dist.get_rank()]
    gtp_shard(model, DeviceMesh("cpu", list(ranks), mesh_dim_names=("gtp",)), schedule=ALL, **shard)
    return GTPTrainer(model=model, args=args, train_dataset=samples(), eval_dataset=samples()[:16])


def stock_trainer(args: Any, model: nn.Module | None = None) -> Any:
    from transformers import Trainer

    return Trainer(model=model or make_llama(), args=args, train_dataset=samples(), eval_dataset=samples()[:16])


def trained_alone(folder: Path, model: nn.Module | None = None, **options: Any) -> Any:
    """The stock trainer after training in one process, which each rank is for itself."""
    with process(1):
        trainer = stock_trainer(arguments(folder / f"alone_{dist.get_rank()}", 1, **options), model)
        trainer.train()
        trainer.evaluate()
    return trainer


def trained(folder: Path, model: nn.Module, resume: Path | None = None, **options: Any) -> Any:
    """A trainer after training on two processes, from a checkpoint or from the beginning."""
    with process(2):
        trainer = trainer_of(model, arguments(folder, 2, **options), 2)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        trainer.evaluate()
    return trainer


def logged(trainer: Any, key: str) -> list[float]:
    return [float(entry[key]) for entry in trainer.state.log_history if key in entry]


@needs("transformers", "accelerate", extra="transformers")
class TestTrainer(GlooTest):
    world_size = 2

    def check_equal(self, trainer: Any, reference: Any) -> None:
        """Losses, norms of gradients and all parameters."""
        for key in ("loss", "grad_norm", "eval_loss"):
            self.assertEqual(logged(trainer, key), logged(reference, key), atol=2e-4, rtol=2e-4)
        assert_same_params(trainer.model, reference.model, atol=2e-5, rtol=2e-4)

    def test_trains_evaluates_saves_and_resumes_on_one_process(self) -> None:
        from transformers import AutoModelForCausalLM

        with shared_directory() as folder:
            reference = trained_alone(folder)
            with process(2):
                options = {"save_strategy": "steps", "save_steps": STEPS // 2}
                trainer = trainer_of(make_llama(), arguments(folder, 2, **options), 2)
                trainer.train()
                trainer.evaluate()
                trainer.save_model(str(folder / "whole"))
                dist.barrier()
                self.check_equal(trainer, reference)
            checkpoint = folder / f"checkpoint-{STEPS // 2}"
            self.assertEqual(latest(checkpoint), checkpoint / "sharded_state")  # whole or absent
            self.assertFalse((checkpoint / "optimizer.pt").exists())
            for name in ("whole", f"checkpoint-{STEPS}"):
                whole = AutoModelForCausalLM.from_pretrained(folder / name)
                assert_same_params(trainer.model, whole, atol=0, rtol=0)
            with process(1):
                fresh = nn.Module.apply(make_llama(), _blank)
                resumed = trainer_of(fresh, arguments(folder / f"resumed_{dist.get_rank()}", 1), 1)
                resumed.train(resume_from_checkpoint=str(checkpoint))
                resumed.evaluate()
                assert_same_params(resumed.model, reference.model, atol=2e-5, rtol=2e-4)
                self.assertEqual(logged(resumed, "eval_loss"), logged(reference, "eval_loss"), atol=2e-4, rtol=2e-4)
                self.assertEqual(resumed.lr_scheduler.last_epoch, reference.lr_scheduler.last_epoch)
                other = arguments(folder / "other", 1, per_device_train_batch_size=BATCH // 2)
                with self.assertRaisesRegex(ValueError, f"expects steps of {BATCH} samples"):
                    trainer_of(make_llama(), other, 1).train(resume_from_checkpoint=str(checkpoint))

    def test_a_callback_evaluates_and_generates(self) -> None:
        """After each step, on each rank as many tokens as it likes."""
        from transformers import TrainerCallback

        class Evaluates(TrainerCallback):
            def __init__(self, num_tokens: int) -> None:
                self.num_tokens, self.trainer, self.sequences = num_tokens, None, []

            def on_step_end(self, *args: Any, model: Any, **options: Any) -> None:
                self.trainer.evaluate()
                self.sequences.append(model.generate(torch.arange(1, 5)[None], max_new_tokens=self.num_tokens))
                model.train()

        with shared_directory() as folder:
            found = []
            for num_processes in (1, 2):
                with process(num_processes):
                    args = arguments(folder / f"{num_processes}_{self.rank}", num_processes)
                    is_alone = num_processes == 1
                    trainer = stock_trainer(args) if is_alone else trainer_of(make_llama(), args, 2)
                    callback = Evaluates(3 + 2 * self.rank)
                    callback.trainer = trainer
                    trainer.add_callback(callback)
                    trainer.train()
                    found.append((trainer, callback.sequences))
            (reference, expected), (trainer, actual) = found
            self.check_equal(trainer, reference)
            self.assertEqual(actual, expected)

    def test_an_optimizer_that_needs_whole_parameters_by_its_name(self) -> None:
        options = {"optim": "adafactor", "learning_rate": 1e-3}
        with shared_directory() as folder:
            reference = trained_alone(folder, **options)
            trainer = trained(folder, make_llama(), save_strategy="steps", save_steps=STEPS // 2, **options)
            self.check_equal(trainer, reference)
            checkpoint = folder / f"checkpoint-{STEPS // 2}"
            resumed = trained(folder / "resumed", make_llama(), checkpoint, **options)
            assert_same_params(resumed.model, reference.model, atol=2e-5, rtol=2e-4)

    def test_all_ranks_gather_what_rank_0_writes(self) -> None:
        """``Trainer.save_model`` calls ``_save`` on all ranks, older versions on rank 0 alone."""
        from transformers import Trainer

        from dtensor_gtp.integrations import transformers as integration

        def older_save_model(trainer: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
            if trainer.args.should_save:
                trainer._save(output_dir)

        with shared_directory() as folder, process(2):
            trainer = trainer_of(make_llama(), arguments(folder, 2), 2)
            with (
                mock.patch.object(Trainer, "save_model", older_save_model),
                mock.patch.object(Trainer, "_save") as written,
                mock.patch.object(integration, "whole_state_dict") as gathered,
            ):
                trainer.save_model("whole")
            gathered.assert_called_once_with(trainer.model, adapters_only=False)
            expected = [mock.call("whole", state_dict=gathered.return_value)] if self.rank == 0 else []
            self.assertEqual(written.mock_calls, expected)

    def test_a_checkpoint_of_another_trainer_is_refused(self) -> None:
        with shared_directory() as folder:
            trained_alone(folder, save_strategy="steps", save_steps=STEPS)
            dist.barrier()  # rank 0 alone has saved
            with process(1):
                trainer = trainer_of(make_llama(), arguments(folder / f"resumed_{self.rank}", 1), 1)
                told = "to resume from a checkpoint of a GTPTrainer, but .*has an optimizer.pt of another trainer"
                with self.assertRaisesRegex(ValueError, told):
                    trainer.train(resume_from_checkpoint=str(folder / "alone_0" / f"checkpoint-{STEPS}"))

    def test_microbatches_communicate_no_gradients(self) -> None:
        with shared_directory() as folder:
            accumulate = {"gradient_accumulation_steps": 3, "max_steps": 2}
            reference = trained_alone(folder, **accumulate)
            with process(2):
                counts = []
                trainer = trainer_of(make_llama(), arguments(folder, 2, **accumulate), 2)
                step = trainer.training_step

                def counted_step(*args: Any) -> Any:
                    with counted() as count:
                        result = step(*args)
                        counts.append(sum(count()[1:]))
                    return result

                trainer.training_step = counted_step
                trainer.train()
                trainer.evaluate()
                self.check_equal(trainer, reference)
            self.assertEqual([bool(count) for count in counts], [False, False, True] * 2)

    def test_mixed_precision_by_the_policy_or_by_autocast(self) -> None:
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        seen: list[tuple[torch.dtype, bool]] = []

        def note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen.append((args[0].dtype, torch.is_autocast_enabled("cpu")))

        with shared_directory() as folder:
            for policy in (bf16, MixedPrecisionPolicy()):
                with process(2):
                    model = make_llama()
                    model.lm_head.register_forward_pre_hook(note)
                    trainer = trainer_of(model, arguments(folder, 2, bf16=True), 2, mp_policy=policy)
                    trainer.train()
                    self.assertEqual({param.dtype for param in trainer.model.parameters()}, {torch.float32})
                self.assertEqual(set(seen), {(torch.bfloat16, False)} if policy is bf16 else {(torch.float32, True)})
                seen.clear()
            assert_same_params(trainer.model, trained_alone(folder).model, atol=2e-2, rtol=0)


@torch.no_grad()
def _blank(module: nn.Module) -> None:
    """Lose the weights, so that only what is loaded can be right."""
    for param in module.parameters(recurse=False):
        param.fill_(0.5)
