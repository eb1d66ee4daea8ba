"""``GTPStrategy`` on two processes beside Lightning in one."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, shared_directory
from integration_common import needs, torchelastic
from runtime_common import Net, counted, make_tokens, token_loss

from dtensor_gtp import gtp_shard

BATCH = 8
EPOCHS = 2


def make_module(is_sharded: bool, has_scheduler: bool = True) -> Any:
    """A LightningModule of a small model."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None
            self.reductions: list[int] = []

        def configure_model(self) -> None:
            if self.net is None:
                torch.manual_seed(0)
                self.net = Net()
                if is_sharded:
                    gtp_shard(self.net, self.device_mesh["data_parallel"], schedule=ALL)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return token_loss(self.net, batch[0])

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("validation", token_loss(self.net, batch[0]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            if not has_scheduler:
                return optimizer
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

        def backward(self, loss: torch.Tensor) -> None:
            with counted() as count:
                loss.backward()
                self.reductions.append(sum(count()[1:]))

    return Module()


def fit(
    num_processes: int,
    folder: Path,
    *,
    strategy: Any = None,
    epochs: int = EPOCHS,
    resume: Path | None = None,
    has_scheduler: bool = True,
    finds_rate: bool = False,
    callbacks: Any = (),
) -> tuple[Any, Any]:
    """A trainer and a module after so many epochs."""
    import lightning

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=num_processes,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,  # below the norm of each step
        use_distributed_sampler=False,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        **({} if strategy is None else {"strategy": strategy}),
    )
    rank = dist.get_rank() if num_processes > 1 else 0
    rows = torch.cat([make_tokens(seed, BATCH).chunk(num_processes)[rank] for seed in range(4)])
    data = torch.utils.data.TensorDataset(rows)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH // num_processes)
    module = make_module(is_sharded=strategy is not None, has_scheduler=has_scheduler)
    if finds_rate:
        from lightning.pytorch.tuner import Tuner

        Tuner(trainer).lr_find(module, loader, num_training=4, update_attr=False)
    trainer.fit(module, loader, loader, ckpt_path=resume, weights_only=False)
    return trainer, module


@needs("lightning", extra="lightning")
class TestLightning(GlooTest):
    world_size = 2

    def check(self, module: nn.Module, trainer: Any, reference: tuple[Any, nn.Module]) -> None:
        assert_same_params(module, reference[1])
        metrics = reference[0].callback_metrics["validation"]
        self.assertEqual(trainer.callback_metrics["validation"], metrics, atol=1e-5, rtol=1e-5)

    def test_fits_validates_and_resumes(self) -> None:
        from dtensor_gtp.integrations.lightning import GTPStrategy

        with shared_directory() as folder:
            with torchelastic(1):
                reference = fit(1, folder / "reference")
                longer = fit(1, folder / "longer", epochs=EPOCHS + 1)
            for name, is_sharded in (("shards", True), ("whole", False)):
                path = folder / f"{name}.ckpt"
                with torchelastic(2):
                    strategy = GTPStrategy(save_distributed_checkpoint=is_sharded)
                    trainer, module = fit(2, folder, strategy=strategy)
                    self.check(module, trainer, reference)
                    self.assertEqual([bool(count) for count in module.reductions], [False, True] * 2 * EPOCHS)
                    trainer.save_checkpoint(path)
                    self.assertEqual(path.is_dir(), is_sharded)
                    own = GTPStrategy()
                    trainer, module = fit(2, folder, strategy=own, epochs=EPOCHS + 1, resume=path)
                    self.check(module, trainer, longer)
            whole = torch.load(folder / "whole.ckpt", weights_only=False)["state_dict"]
            self.assertEqual(whole, reference[1].state_dict(), atol=1e-5, rtol=1e-5)

    def test_the_strategy_of_lightning_communicates_more(self) -> None:
        from lightning.pytorch.strategies import ModelParallelStrategy

        with shared_directory() as folder:
            with torchelastic(1):
                reference = fit(1, folder)
            with torchelastic(2):
                stock = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
                trainer, module = fit(2, folder, strategy=stock)
                self.check(module, trainer, reference)
                self.assertTrue(all(module.reductions))

    def test_the_learning_rate_finder_leaves_no_trace(self) -> None:
        from dtensor_gtp.integrations.lightning import GTPStrategy

        with shared_directory() as folder:
            with torchelastic(1):
                reference = fit(1, folder, has_scheduler=False)
            with torchelastic(2):
                trainer, module = fit(2, folder, strategy=GTPStrategy(), has_scheduler=False, finds_rate=True)
                self.check(module, trainer, reference)

    def test_resumes_with_a_scheduler_that_the_checkpoint_lacks(self) -> None:
        from dtensor_gtp.integrations.lightning import GTPStrategy

        with shared_directory() as folder:
            path = {num_processes: folder / f"{num_processes}.ckpt" for num_processes in (1, 2)}
            with torchelastic(1):
                fit(1, folder, has_scheduler=False)[0].save_checkpoint(path[1])
                reference = fit(1, folder, epochs=EPOCHS + 2, resume=path[1])
            with torchelastic(2):
                fit(2, folder, strategy=GTPStrategy(), has_scheduler=False)[0].save_checkpoint(path[2])
                trainer, module = fit(2, folder, strategy=GTPStrategy(), epochs=EPOCHS + 2, resume=path[2])
                self.check(module, trainer, reference)

    def test_the_callback_of_weight_averages_names_ours(self) -> None:
        from lightning.pytorch.callbacks import StochasticWeightAveraging

        from dtensor_gtp.integrations.lightning import GTPStrategy

        with shared_directory() as folder, torchelastic(2):
            with self.assertRaisesRegex(NotImplementedError, "got StochasticWeightAveraging.*ShardedEMA.*help ema"):
                fit(2, folder, strategy=GTPStrategy(), callbacks=[StochasticWeightAveraging(0.1)])

    def test_sizes_that_do_not_divide(self) -> None:
        from dtensor_gtp.integrations.lightning import GTPStrategy

        with shared_directory() as folder, torchelastic(2):
            with self.assertRaisesRegex(ValueError, "divides the 2 processes, but got 3"):
                fit(2, folder, strategy=GTPStrategy(tensor_parallel_size=3))
