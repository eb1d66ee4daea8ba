"""How a linear layer with a recipe multiplies: chosen for each weight and shown in the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .float8_gemms import ALIGNMENT, Float8GEMMs
from .grouped_gemms import GroupedGEMMs
from .recipe import Recipe


class ComputePath(NamedTuple):
    """How a linear layer multiplies with one weight."""

    gemms: Float8GEMMs | None  # None to dequantize the weight for an ordinary GEMM
    reason: str  # why not by the float8 GEMMs of the hardware; empty if it is those

    def describe(self) -> str:
        """For the report."""
        reason = ""
        if self.reason:
            reason = f" ({self.reason})"
        if self.gemms is None:
            return f"dequantized for the GEMM{reason}"
        described = "float8 GEMMs"
        if not self.gemms.on_hardware:
            described += f" by reference arithmetic{reason}"
        if self.gemms.high_precision_wgrad:
            described += ", wgrad not quantized"
        return described


def choose_path(
    recipe: Recipe, device: torch.device, shape: torch.Size, dtype: torch.dtype, fqn: str, *, is_native: bool = False
) -> ComputePath:
    """How to multiply with a weight (or a rank's slice of it) of ``shape``, with activations and
    outputs of ``dtype``. ValueError if float8 GEMMs are forced, but the hardware does not have them
    for this recipe, shape or dtype.
    ``is_native``: the weight has native storage, so there are data for forward alone."""
    if recipe.compute == "dequantize":
        return ComputePath(None, "asked for")
    is_grouped = len(shape) != 2  # one weight for all groups of a GroupedLinear
    gemms: Callable[..., Any] = recipe.gemms
    if is_grouped:
        gemms = recipe.grouped_gemms
    # ``unknown``: not even a reference arithmetic. ``missing``: that, or no kernel on this device.
    unknown = _unknown(recipe, shape, is_native=is_native)
    missing = unknown or _missing(recipe, device, shape, dtype)
    if not missing:
        return ComputePath(gemms(on_hardware=True), "")
    if recipe.compute == "auto":
        return ComputePath(None, missing)
    # From here on the recipe asks for float8.
    if device.type == "cpu" and not unknown:
        if not is_grouped:
            warn_once(
                f"The recipe {recipe} asks for float8 GEMMs, which torch lacks on CPUs: operands "
                "are quantized and multiplied in float32. This is slower than compute='dequantize'."
            )
        return ComputePath(gemms(on_hardware=False), missing)
    if is_grouped:
        if not torch.compiler.is_compiling():  # compilers cannot trace it at this place
            warn_dequantized(recipe, fqn, missing)
        return ComputePath(None, missing)
    raise ValueError(
        f"The recipe {recipe} of '{fqn}' of shape {tuple(shape)} on {device} asks for float8 "
        f"GEMMs, but: {missing}. Choose compute='auto' or 'dequantize', or leave the weight out of "
        "quantize_."
    )


def _unknown(recipe: Recipe, shape: torch.Size, *, is_native: bool) -> str:
    """Why there is not even a reference arithmetic; empty if there is."""
    grouped = recipe.grouped_gemms(on_hardware=False)
    if len(shape) == 2:
        if recipe.has_gemms:
            return ""
        if grouped is None:
            return f"no GEMMs of {recipe.name}"
        return f"{recipe.name} has GEMMs for GroupedLinear alone"
    if grouped is None or len(shape) != 3:
        if recipe.has_gemms:
            return f"no grouped GEMMs of {recipe.name}"
        return f"no GEMMs of {recipe.name}"
    if grouped.needs_columnwise and is_native:
        return f"native storage has no data for the backward of {recipe.name}"
    return ""


def _missing(recipe: Recipe, device: torch.device, shape: torch.Size, dtype: torch.dtype) -> str:
    """Why torch has no such GEMMs there; empty if it has."""
    if device.type != "cuda":
        return f"no float8 GEMMs on {device.type}"
    if torch.version.hip is not None:
        return "no float8 GEMMs on rocm"
    capability = torch.cuda.get_device_capability(device)
    # Grouped GEMMs have a condition of their own, see ``_missing_kernel``.
    grouped = None
    if len(shape) == 3:
        grouped = recipe.grouped_gemms(on_hardware=True)
    if grouped is None and not recipe.is_capable(capability):
        return f"no {recipe.name} GEMMs on compute capability {'.'.join(map(str, capability))}"
    alignment = ALIGNMENT
    if grouped is not None:
        alignment = grouped.alignment
        why = _missing_kernel(recipe, grouped, capability)
        if why:
            return why
    matrix = tuple(shape[-2:])
    if any(size % alignment for size in matrix):
        fits = tuple(-(-size // alignment) * alignment for size in matrix)
        return f"a shape of {matrix} is not in multiples of {alignment}; {fits} would fit"
    if dtype != torch.bfloat16:
        return f"the compute dtype is {str(dtype).removeprefix('torch.')}, not bfloat16"
    return ""


def _missing_kernel(recipe: Recipe, grouped: GroupedGEMMs, capability: tuple[int, int]) -> str:
    major, name = grouped.capability
    if capability[0] != major:
        return f"grouped GEMMs of {recipe.name} need {name}"
    # Only who asks for it gets what no test has run.
    if recipe.compute == "auto" and not grouped.has_run:
        return f"grouped GEMMs of {recipe.name} never ran on a GPU; compute='float8' takes them"
    return ""


def warn_dequantized(recipe: Recipe, fqn: str, reason: str) -> None:
    """Warn once for each weight for which forced float8 GEMMs do not run."""
    if recipe.compute == "float8":
        warn_once(f"The recipe {recipe} asks for float8 GEMMs, but '{fqn}' is dequantized: {reason}.")


def warn_once(message: str) -> None:
    """Warn, once for each text."""
    # Python shows one text from one place once.
    warnings.warn(message, RuntimeWarning, stacklevel=2)
