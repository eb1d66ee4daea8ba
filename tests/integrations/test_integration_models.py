"""Training loops of a user's own: experts of transformers, models of timm, of diffusers with averages and adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, assert_same_params, full, rows_of_rank
from integration_common import needs
from torch.testing._internal.common_utils import run_tests

from dtensor_gtp import gtp_shard

SHAPE = {"vocab_size": 35, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "grouped_mm"},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "DeepseekV3": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1},
        **{"topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, **LATENT},
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4},
}
Loss = Callable[..., torch.Tensor]


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def class_loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(images), labels)


class ModelTest(GlooTest):
    world_size = 2

    def check(self, make: Callable[[], nn.Module], loss_of: Loss, *batch: torch.Tensor, ema: Any = None) -> None:
        torch.manual_seed(0)
        reference = make().train()
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        averages = []
        for trained, inputs in ((reference, batch), (model, rows_of_rank(batch, self.gtp_mesh()))):
            optimizer = torch.optim.SGD([param for param in trained.parameters() if param.requires_grad], lr=0.05)
            average = None if ema is None else ema(trained.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(trained, *inputs).backward()
                optimizer.step()
                if average is not None:
                    average.step(trained.parameters())
            averages.append([] if average is None else [full(value) for value in average.shadow_params])
        assert_same_params(model, reference, "grad", atol=1e-5, rtol=1e-3)
        assert_same_params(model, reference, atol=1e-5, rtol=1e-3)
        self.assertEqual(averages[1], averages[0], atol=1e-5, rtol=1e-3)


@needs("transformers", extra="transformers")
class TestExperts(ModelTest):
    def test_experts(self) -> None:
        import transformers

        tokens = torch.randint(1, 35, (4, 8), generator=torch.Generator().manual_seed(1))
        for name, options in EXPERTS.items():
            with self.subTest(name=name):
                config = getattr(transformers, f"{name}Config")(**{**SHAPE, **HEADS, **options})
                self.check(lambda c=config, n=name: getattr(transformers, f"{n}ForCausalLM")(c), token_loss, tokens)


@needs("timm", extra="test")
class TestTimm(ModelTest):
    def test_image_models(self) -> None:
        """BatchNorm with the statistics that it has: those of a batch would be of this rank's rows."""
        import timm

        labels = torch.tensor([0, 3, 1, 4])
        for name, size, is_channels_last, options in (
            ("convnext_atto", 32, True, {"drop_path_rate": 0.0}),
            ("resnet18", 32, True, {}),
            ("vit_tiny_patch16_224", 32, False, {"img_size": 32, "depth": 2}),
        ):

            def make(name: str = name, last: bool = is_channels_last, options: Any = options) -> nn.Module:
                model = timm.create_model(name, num_classes=5, **options)
                model = model.to(memory_format=torch.channels_last) if last else model
                for module in model.modules():
                    if isinstance(module, nn.BatchNorm2d):
                        module.eval()
                        module.train = lambda mode=True, module=module: module
                return model

            with self.subTest(name=name):
                self.check(make, class_loss, random(4, 3, size, size), labels)


@needs("diffusers", "peft", extra="peft")
class TestDiffusers(ModelTest):
    def test_denoising(self) -> None:
        import diffusers
        import peft
        from diffusers.training_utils import EMAModel

        def unet() -> nn.Module:
            blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "block_out_channels": (16, 32)}
            blocks |= {"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "layers_per_block": 1, "norm_num_groups": 8}
            return diffusers.UNet2DModel(sample_size=16, in_channels=3, out_channels=3, **blocks)

        def adapted() -> nn.Module:
            blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
            sizes = {"block_out_channels": (16,), "layers_per_block": 1, "norm_num_groups": 8}
            sizes |= {"cross_attention_dim": 8, "attention_head_dim": 8, "in_channels": 3, "out_channels": 3}
            model = diffusers.UNet2DConditionModel(sample_size=16, **blocks, **sizes).requires_grad_(False)
            model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights="gaussian"))
            return model

        def dit() -> nn.Module:
            sizes = {"sample_size": 16, "patch_size": 4, "num_layers": 2, "norm_num_groups": 1}
            heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_embeds_ada_norm": 20}
            model = diffusers.DiTTransformer2DModel(in_channels=3, out_channels=3, **sizes, **heads)
            for module in model.modules():
                if hasattr(module, "dropout_prob"):
                    module.dropout_prob = 0.0  # each rank would drop other labels
            return model

        def unet_loss(model: nn.Module, x: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(model(x, times, return_dict=False)[0], noise)

        def dit_loss(model: nn.Module, x: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
            labels = torch.zeros_like(times)
            return F.mse_loss(model(x, timestep=times, class_labels=labels, return_dict=False)[0], noise)

        def conditional_loss(
            model: nn.Module, x: torch.Tensor, noise: torch.Tensor, times: torch.Tensor
        ) -> torch.Tensor:
            text = x.flatten(1)[:, :24].view(-1, 3, 8)
            return F.mse_loss(model(x, times, encoder_hidden_states=text, return_dict=False)[0], noise)

        batch = (random(4, 3, 16, 16), random(4, 3, 16, 16, seed=2), torch.tensor([1, 5, 9, 13]))
        for foreach in (False, True):
            self.check(unet, unet_loss, *batch, ema=lambda p, foreach=foreach: EMAModel(p, decay=0.9, foreach=foreach))
        self.check(adapted, conditional_loss, *batch)
        torch.manual_seed(0)
        self.check(dit, dit_loss, *batch)


if __name__ == "__main__":
    run_tests()
