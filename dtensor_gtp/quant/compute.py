"""How a linear layer with a recipe multiplies: chosen for each weight and shown in the report."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from .float8_gemms import ALIGNMENT, Float8GEMMs
from .recipes import Recipe


class ComputePath(NamedTuple):
    """How a linear layer multiplies with one weight."""

    gemms: Float8GEMMs | None  # None to dequantize the weight for an ordinary GEMM
    reason: str  # why not by the float8 GEMMs of the hardware; empty if it is those

    def describe(self) -> str:
        """For the report."""
        reason = f" ({self.reason})" if self.reason else ""
        if self.gemms is None:
            return f"dequantized for the GEMM{reason}"
        how = "" if self.gemms.on_hardware else f" by reference arithmetic{reason}"
        return f"float8 GEMMs{how}{', wgrad not quantized' if self.gemms.high_precision_wgrad else ''}"


def choose_path(recipe: Recipe, device: torch.device, shape: torch.Size, dtype: torch.dtype, fqn: str) -> ComputePath:
    """How to multiply with a weight (or a rank's slice of it) of ``shape``, with activations and outputs of ``dtype``.
    ValueError if float8 GEMMs are forced, but the hardware does not have them for this recipe, shape or dtype."""
    if recipe.compute == "dequantize":
        return ComputePath(None, "asked for")
    if not recipe.has_gemms:
        return ComputePath(None, f"no GEMMs of {recipe.name}")
    is_grouped = len(shape) != 2
    gemms = recipe.grouped_gemms if is_grouped else recipe.gemms
    is_known = not is_grouped or (len(shape) == 3 and gemms(on_hardware=False) is not None)
    missing = _missing(recipe, device, shape, dtype) if is_known else f"no grouped GEMMs of {recipe.name}"
    if not missing:
        return ComputePath(gemms(on_hardware=True), "")
    if recipe.compute == "auto":
        return ComputePath(None, missing)
    if device.type == "cpu" and is_known:
        if not is_grouped:
            warn_once(
                f"The recipe {recipe} asks for float8 GEMMs, which torch lacks on CPUs: operands are quantized and "
                "multiplied in float32. This is slower than compute='dequantize'."
            )
        return ComputePath(gemms(on_hardware=False), missing)
    if is_grouped:
        if not torch.compiler.is_compiling():  # compilers cannot trace it at this place
            warn_dequantized(recipe, fqn, missing)
        return ComputePath(None, missing)
    raise ValueError(
        f"The recipe {recipe} of '{fqn}' of shape {tuple(shape)} on {device} asks for float8 GEMMs, but: {missing}. "
        "Choose compute='auto' or 'dequantize', or leave the weight out of quantize_."
    )


def _missing(recipe: Recipe, device: torch.device, shape: torch.Size, dtype: torch.dtype) -> str:
    """Why torch has no such GEMMs there; empty if it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"no float8 GEMMs on {'rocm' if device.type == 'cuda' else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if not recipe.is_capable(capability):
        return f"no {recipe.name} GEMMs on compute capability {'.'.join(map(str, capability))}"
    if len(shape) == 3 and capability[0] != 9:
        return f"grouped GEMMs of {recipe.name} need Hopper"
    matrix = tuple(shape[-2:])
    if any(size % ALIGNMENT for size in matrix):
        fits = tuple(-(-size // ALIGNMENT) * ALIGNMENT for size in matrix)
        return f"a shape of {matrix} is not in multiples of {ALIGNMENT}; {fits} would fit"
    if dtype != torch.bfloat16:
        return f"the compute dtype is {str(dtype).removeprefix('torch.')}, not bfloat16"
    return ""


def warn_dequantized(recipe: Recipe, fqn: str, reason: str) -> None:
    """Warn once for each weight for which forced float8 GEMMs do not run."""
    if recipe.compute == "float8":
        warn_once(f"The recipe {recipe} asks for float8 GEMMs, but '{fqn}' is dequantized: {reason}.")


def warn_once(message: str) -> None:
    """Warn, once for each text."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)  # Python shows one text from one place once
