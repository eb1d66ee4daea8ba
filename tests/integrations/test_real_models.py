"""Models as users have them train as in one process: gradients, and parameters after each step."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, check_training, full, rows_of_rank
from integration_common import needs
from model_cases import CASES, Batch, Case
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

from dtensor_gtp import SchedulePolicy, gtp_shard

# Weights one by one, and groups of them.
SINGLE, GROUPS = ALL, SchedulePolicy(min_shard_numel=0)
FAMILIES = ("llama", "bert", "t5", "qwen3_moe", "vit", "timm_convnext", "dit")


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=0.05, momentum=0.9)


def made(case: Case, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shaken(case.make(**options).to(case.dtype).train())


def shaken(model: nn.Module) -> nn.Module:
    """With parameters away from zeros and ones, with which some gradients are zero."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    return model


def checkpointed(model: Any, use_reentrant: bool) -> None:
    """As users of each library turn it on."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    else:
        model.enable_gradient_checkpointing()


def first_half_frozen(case: Case) -> nn.Module:
    model = made(case)
    params = list(model.parameters())
    for param in params[: len(params) // 2]:
        param.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):  # torch 2.13 crashes where one trains and its input needs no gradient
            module.requires_grad_(False)
    return model


def matrices_frozen(case: Case) -> nn.Module:
    model = made(case)
    for param in model.parameters():
        param.requires_grad_(param.ndim < 2)
    return model


def with_adapters(case: Case) -> nn.Module:
    import peft

    return shaken(peft.get_peft_model(made(case), peft.LoraConfig(r=4, target_modules=case.lora)))


def adapters_checkpointed(model: Any, use_reentrant: bool) -> None:
    checkpointed(model, use_reentrant)
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()  # a reentrant checkpoint starts at an input with a gradient


Variant = tuple[Callable[[Case], nn.Module], Callable[[nn.Module], object], SchedulePolicy]

# What is made, what is done to the sharded model alone, and how its weights travel.
VARIANTS: dict[str, Variant] = {
    "groups": (made, lambda model: None, GROUPS),
    "single": (made, lambda model: None, SINGLE),
    "checkpointed": (made, lambda model: checkpointed(model, False), GROUPS),
    "reentrant": (made, lambda model: checkpointed(model, True), SINGLE),
    "tied": (lambda case: made(case, tie_word_embeddings=not case.is_tied), lambda model: None, GROUPS),
    "frozen_half": (first_half_frozen, lambda model: None, GROUPS),
    "frozen_matrices": (matrices_frozen, lambda model: None, SINGLE),
    "lora": (with_adapters, lambda model: None, SINGLE),
    "lora_checkpointed": (with_adapters, lambda model: adapters_checkpointed(model, False), GROUPS),
    "lora_reentrant": (with_adapters, lambda model: adapters_checkpointed(model, True), SINGLE),
}
# Variants of which one model of a family says what the others would.
OF_FAMILIES = {"single", "frozen_matrices", "lora_reentrant"}


def _has(name: str, variant: str) -> bool:
    """Whether this variant of this model is trained beyond the default tier."""
    if variant == "tied":
        return CASES[name].is_tied is not None
    if "reentrant" in variant and CASES[name].library != "transformers":  # theirs are torch's own only there
        return False
    if name in FAMILIES:
        return variant != "groups" and (name, variant) != ("llama", "lora")  # of the default tier
    return variant not in OF_FAMILIES


# What CI trains: one model of a family in each variant; the others plain, tied, and with adapters and checkpoints.
OF_ALL = {"groups", "tied", "lora_checkpointed"}
MORE = [(name, variant) for name in CASES for variant in VARIANTS if _has(name, variant)]
OFTEN = [(name, variant) for name, variant in MORE if name in FAMILIES or variant in OF_ALL]
REST = [case for case in MORE if case not in OFTEN]


class RealModelTest(GlooTest):
    world_size = 2

    def check(self, name: str, variant: str) -> None:
        case = CASES[name]
        make, prepare, policy = VARIANTS[variant]

        def shard(model: nn.Module) -> nn.Module:
            prepare(model)
            return gtp_shard(model, self.gtp_mesh(), schedule=policy)

        def batch(generator: torch.Generator) -> Batch:
            values = case.batch(generator)
            return {name: v.to(case.dtype) if v.is_floating_point() else v for name, v in values.items()}

        exact = case.dtype == torch.float64
        tolerance = {"atol": 1e-7, "rtol": 1e-6} if exact else {"atol": 1e-5, "rtol": 1e-3}
        check_training(make(case), shard, self.gtp_mesh(), batch, case.loss, make_optimizer=sgd, tolerance=tolerance)


@needs("transformers", "timm", "diffusers", "peft", extra="models", tier="default")
class TestFamilies(RealModelTest):
    @parametrize("name", FAMILIES)
    def test_trains(self, name: str) -> None:
        self.check(name, "groups")

    def test_lora(self) -> None:
        self.check("llama", "lora")


@needs("transformers", "timm", "diffusers", "peft", extra="models")
class TestRealModels(RealModelTest):
    @parametrize("name,variant", OFTEN)
    def test_trains(self, name: str, variant: str) -> None:
        self.check(name, variant)

    def test_averages_of_diffusers(self) -> None:
        from diffusers.training_utils import EMAModel

        case = CASES["unet2d"]
        reference = made(case)
        values = case.batch(torch.Generator().manual_seed(0))
        for foreach in (False, True):
            averages = []
            for is_sharded in (False, True):
                model, batch = copy.deepcopy(reference), values
                if is_sharded:
                    gtp_shard(model, self.gtp_mesh(), schedule=SINGLE)
                    batch = rows_of_rank(values, self.gtp_mesh())
                optimizer = sgd(list(model.parameters()))
                average = EMAModel(model.parameters(), decay=0.9, foreach=foreach)
                for _ in range(2):
                    optimizer.zero_grad()
                    case.loss(model, batch).backward()
                    optimizer.step()
                    average.step(model.parameters())
                averages.append([full(value) for value in average.shadow_params])
            self.assertEqual(averages[1], averages[0])


@needs("transformers", "timm", "diffusers", "peft", extra="models", tier="soak")
class TestEveryVariant(RealModelTest):
    @parametrize("name,variant", REST)
    def test_trains(self, name: str, variant: str) -> None:
        self.check(name, variant)


instantiate_parametrized_tests(TestFamilies)
instantiate_parametrized_tests(TestRealModels)
instantiate_parametrized_tests(TestEveryVariant)
