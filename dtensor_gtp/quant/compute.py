"""Which way a linear layer with a recipe multiplies: chosen for each weight, said in the report, never silently."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from .base import Recipe
from .float8_gemms import Float8GEMMs
from .gemm import ALIGNMENT


class ComputePath(NamedTuple):
    """How a linear layer multiplies with one weight.

    Args:
        gemms: Float8 GEMMs; None to dequantize the weight for an ordinary GEMM.
        reason: Why not the float8 GEMMs of the hardware; empty if it is those.
    """

    gemms: Float8GEMMs | None
    reason: str

    def describe(self) -> str:
        """For the report."""
        reason = f" ({self.reason})" if self.reason else ""
        if self.gemms is None:
            return f"dequantized for the GEMM{reason}"
        wgrad = ", wgrad not quantized" if self.gemms.high_precision_wgrad else ""
        if self.gemms.on_hardware:
            return f"float8 GEMMs{wgrad}"
        return f"float8 GEMMs by reference arithmetic{reason}{wgrad}"


def choose_path(recipe: Recipe, device: torch.device, shape: torch.Size, dtype: torch.dtype, fqn: str) -> ComputePath:
    """The way to multiply with a weight.

    Args:
        recipe: Its ``compute`` says what is asked for.
        device: Of the weight.
        shape: Of what a rank multiplies with: the whole weight, or its slice of it.
        dtype: Of activations and outputs.
        fqn: Name of the weight, for messages.

    Raises:
        ValueError: Float8 GEMMs are forced, but the hardware does not have them for this recipe, shape or dtype.
    """
    if recipe.compute == "dequantize":
        return ComputePath(None, "asked for")
    if not recipe.has_gemms:
        return ComputePath(None, f"no GEMMs of {recipe.name}")
    if len(shape) != 2:
        path = _grouped_path(recipe, device, shape, dtype)
        if path.gemms is None and not torch.compiler.is_compiling():  # compilers cannot trace it at this place
            warn_dequantized(recipe, fqn, path.reason)
        return path
    missing = _missing_device(recipe, device)
    if missing and recipe.compute == "auto":
        return ComputePath(None, missing)
    if device.type == "cpu":
        reason = f"no float8 GEMMs on {device.type}"
        _warn_once(
            f"The recipe {recipe} asks for float8 GEMMs, which torch does not have on {device.type} devices with the "
            "arithmetic that is defined here: operands are quantized as asked for and multiplied in float32. It is "
            "slower than compute='dequantize'."
        )
        return ComputePath(recipe.gemms(on_hardware=False), reason)
    missing = missing or _missing_shape(shape) or _missing_dtype(dtype)
    if not missing:
        return ComputePath(recipe.gemms(on_hardware=True), "")
    if recipe.compute == "auto":
        return ComputePath(None, missing)
    raise ValueError(
        f"Float8 GEMMs are asked for by the recipe {recipe} of '{fqn}' of shape {tuple(shape)} on {device}, but: "
        f"{missing}. Choose compute='auto' or 'dequantize', or leave the weight out of quantize_."
    )


def _grouped_path(recipe: Recipe, device: torch.device, shape: torch.Size, dtype: torch.dtype) -> ComputePath:
    """Several matrices: float8 where torch has the grouped GEMM, else dequantized, also where float8 is forced."""
    if len(shape) != 3 or recipe.grouped_gemms(on_hardware=False) is None:
        return ComputePath(None, f"no grouped GEMMs of {recipe.name}")
    missing = _missing_device(recipe, device)
    if missing:
        if recipe.compute == "auto" or device.type != "cpu":
            return ComputePath(None, missing)
        return ComputePath(recipe.grouped_gemms(on_hardware=False), missing)
    if torch.cuda.get_device_capability(device)[0] != 9:
        missing = f"no grouped GEMMs of {recipe.name} but on Hopper"
    missing = missing or _missing_shape(shape[1:]) or _missing_dtype(dtype)
    return ComputePath(None, missing) if missing else ComputePath(recipe.grouped_gemms(on_hardware=True), "")


def check_forced(recipe: Recipe, device: torch.device, shape: torch.Size, dtype: torch.dtype, fqn: str) -> None:
    """Before anything is sharded: raise what :func:`choose_path` would raise, say what it would say."""
    if recipe.compute == "float8":
        choose_path(recipe, device, shape, dtype, fqn)


def warn_dequantized(recipe: Recipe, fqn: str, reason: str) -> None:
    """Say once for each weight that forced float8 GEMMs do not happen."""
    if recipe.compute == "float8":
        _warn_once(f"The recipe {recipe} asks for float8 GEMMs, but '{fqn}' is dequantized: {reason}.")


def _missing_device(recipe: Recipe, device: torch.device) -> str:
    """Why a device has no such GEMMs; empty if it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"no float8 GEMMs on {'rocm' if device.type == 'cuda' else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if recipe.is_capable(capability):
        return ""
    return f"no {recipe.name} GEMMs on compute capability {'.'.join(map(str, capability))}"


def _missing_shape(shape: tuple[int, ...]) -> str:
    if all(size % ALIGNMENT == 0 for size in shape):
        return ""
    fits = tuple(-(-size // ALIGNMENT) * ALIGNMENT for size in shape)
    return f"a shape of {tuple(shape)} is not in multiples of {ALIGNMENT}; {fits} would fit"


def _missing_dtype(dtype: torch.dtype) -> str:
    return "" if dtype == torch.bfloat16 else f"the compute dtype is {str(dtype).removeprefix('torch.')}, not bfloat16"


def _warn_once(message: str) -> None:
    # Python shows one warning with one text from one place once.
    warnings.warn(message, RuntimeWarning, stacklevel=2)
