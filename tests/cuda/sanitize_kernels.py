"""Runs every kernel of ours once over a few awkward tensors, for compute-sanitizer to watch: casts, sums over ranks.

    PYTHONPATH=.:tests/support PYTORCH_NO_CUDA_MEMORY_CACHING=1 \\
        compute-sanitizer --tool memcheck --error-exitcode 77 python tests/cuda/sanitize_kernels.py

Without torch's cache each tensor is an allocation of the driver's, which ends with its last element. So what a kernel
reads or writes beyond an end is an error, and not another tensor's memory. Results are copied to the host, where they
must have the bits of the reference: a kernel that leaves out an element shows to initcheck there.

``--plant`` makes a mistake on purpose, which says whether the tool sees any. ``test_cuda_sanitizer`` runs all of it.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from test_cuda_addends import SIZES, addends_of, in_order
from test_cuda_casts import DEVICE, HAS_GPU, REFERENCE, bits, casts_of, dequantizations_of, hard_matrix, triton_casts
from torch.utils._pytree import tree_leaves, tree_map_only

from dtensor_gtp.quant import RECIPES, Direction


class Case(NamedTuple):
    """A matrix, and by how many elements all tensors begin behind the begin of their memory."""

    matrix: torch.Tensor
    offset: int


def cases() -> Iterator[Case]:
    """Blocks and tiles that end early, at addresses that are no multiple of anything; a single element; several
    matrices; rows that are read in parts; whole blocks."""
    hard = hard_matrix()
    yield Case(hard, 0)
    yield Case(hard[:1, :1], 1)
    yield Case(torch.stack([hard[:40, :70], hard[-40:, -70:]]).half(), 1)
    if HAS_GPU:  # Triton's interpreter rounds to bfloat16 towards zero
        yield Case(hard[:33, :57].bfloat16(), 1)
        yield Case(hard.repeat(2, 2)[:256, :384].bfloat16(), 0)
        yield Case(hard.reshape(-1)[: 3 * 2000].repeat(10).reshape(3, 20000).bfloat16(), 0)


def placed(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy on the device with the same strides, at the end of memory of its own."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(offset + span, dtype=tensor.dtype, device=DEVICE)
    memory[offset:].copy_(tensor.as_strided((span,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


class OnDevice:
    """The casts of Triton for tensors of the host: arguments and results are copied."""

    def __init__(self, casts: Any, offset: int) -> None:
        self._casts = casts
        self._offset = offset

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            there = tree_map_only(torch.Tensor, lambda t: placed(t, self._offset), (args, kwargs))
            return tree_map_only(torch.Tensor, torch.Tensor.cpu, getattr(self._casts, name)(*there[0], **there[1]))

        return call


def check(actual: Any, expected: Any, what: object) -> None:
    for index, (a, b) in enumerate(zip(tree_leaves(actual), tree_leaves(expected), strict=True)):
        if (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.equal(bits(a), bits(b)):
            raise AssertionError(f"result {index} of {what} differs from the reference")


def run_casts(hardware: bool) -> int:
    """Every cast and its way back; how many."""
    num = 0
    casts = triton_casts(hardware)
    for matrix, offset in cases():
        if HAS_GPU and not hardware and matrix.dtype != torch.float32:
            continue  # to compile as many kernels again takes long
        for name, (call, _) in (casts_of(matrix) | dequantizations_of(matrix, matrix.dtype)).items():
            if matrix.ndim == 3 and "factors" in name:
                continue
            check(call(OnDevice(casts, offset)), call(REFERENCE), (name, matrix.dtype, matrix.shape, hardware))
            num += 1
    return num


def run_recipes() -> int:
    """What gathers and layers use, also of a shard without rows or columns; how many."""
    num = 0
    hard = hard_matrix()
    for recipe in (cls() for cls in RECIPES.values()):
        for direction in Direction:
            for matrix in (hard, hard[:0], hard[:, :0]):
                expected = recipe.quantize(matrix, direction)
                actual = recipe.quantize(placed(matrix, 1) if matrix.numel() else matrix.to(DEVICE), direction)
                back = recipe.dequantize(actual, matrix.shape, direction, torch.float16)
                want = recipe.dequantize(expected, matrix.shape, direction, torch.float16)
                check([plane.cpu() for plane in (*actual.planes, back)], [*expected.planes, want], (recipe, direction))
                num += 1
    return num


def run_sums() -> int:
    """Of an odd and an even number of ranks; how many."""
    from dtensor_gtp._comm.triton_addends import add  # needs Triton

    num = 0
    dtypes = (torch.bfloat16, torch.float32) if HAS_GPU else (torch.float16,)
    for num_ranks, sizes, dtype, offset in itertools.product((2, 5), SIZES, dtypes, (0, 1)):
        rows = addends_of(num_ranks, sum(sizes), dtype, offset)
        expected = in_order(rows, 1 / num_ranks)
        out, own = torch.empty(sum(sizes), device=DEVICE), [part.clone() for part in rows[-1].split(sizes)]
        add(out, rows[:-1].clone(), own, num_ranks - 1, num_ranks, 1 / num_ranks)
        check(out.cpu(), expected.cpu(), (num_ranks, sizes, dtype, offset))
        num += 1
    return num


_RACE = """
extern "C" __global__ void neighbours(int* out) {
    __shared__ int values[64];
    values[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = values[(threadIdx.x + 32) % 64];  // written by the other warp, without a barrier
}
"""


def plant(mistake: str) -> None:
    """Scales of six magnitudes of which there are five, or which nobody has written; or warps that do not wait."""
    if mistake == "race":
        out = torch.empty(64, dtype=torch.int32, device=DEVICE)
        torch.cuda._compile_kernel(_RACE, "neighbours")((1, 1, 1), (64, 1, 1), (out,))
        torch.cuda.synchronize()
        return
    from dtensor_gtp.quant import triton_kernels as kernels

    num = 5 if mistake == "overrun" else 6
    amax = torch.empty(num, dtype=torch.int32, device=DEVICE)
    if mistake == "overrun":
        amax.copy_(torch.arange(5, dtype=torch.int32))
    scale = torch.empty(6, device=DEVICE)
    kernels.scales_of[(1,)](amax, scale, 6, BLOCK=128)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plant", choices=("overrun", "uninitialized", "race"))
    mistake = parser.parse_args().plant
    if mistake is not None:
        plant(mistake)
        return
    has_float8 = HAS_GPU and torch.cuda.get_device_capability() >= (8, 9)
    num = sum(run_casts(hardware) for hardware in ((False, True) if has_float8 else (False,)))
    print(f"{num} casts, {run_recipes()} recipes and {run_sums()} sums have the bits of the reference")


if __name__ == "__main__":
    main()
