"""The error of a gradient that is averaged over the ranks of an axis, by kind of reduce-scatter, against float64.

No processes and no network: the addends of all ranks are in one process. For ``all_to_all`` the package's own code adds
them up. The ring is simulated in its order: a chunk goes from rank to rank, each adds its part and rounds to the dtype
of the wire. (A backend may take another route for small messages, a tree, which rounds fewer times.)

    python examples/benchmarks/reduction_error.py
"""

import argparse

import torch
from torch.distributed import ReduceOp

from dtensor_gtp._comm.collectives import ReduceScale
from dtensor_gtp._comm.reductions import Scattering
from report import markdown_table

_AVERAGE = ReduceScale(ReduceOp.AVG, None, None)


def ring(addends: torch.Tensor) -> torch.Tensor:
    """The average of ``addends`` (shape ``(num_ranks, numel)``), summed one rank after the other in their dtype."""
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total / len(addends)


def all_to_all(addends: torch.Tensor) -> torch.Tensor:
    """The average of ``addends`` as the ``all_to_all`` kind computes it on the rank that receives them."""
    num_ranks = len(addends)
    scattering = Scattering("all_to_all", [addends.reshape(-1)], num_ranks, addends.dtype)
    full, slot, received = scattering.keep()
    received.copy_(full.view(num_ranks, -1)[-len(received) :])  # without the own addend if a kernel adds
    scattering.finish(_AVERAGE)
    return slot


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def addends(num_ranks: int, numel: int, share_in_common: float) -> torch.Tensor:
    """Gradients of all ranks in float64: a part in common, and noise of its own on each rank.

    Args:
        share_in_common: Standard deviation of the common part; that of the noise is 1.
    """
    generator = torch.Generator().manual_seed(num_ranks)
    noise = torch.randn(num_ranks, numel, dtype=torch.float64, generator=generator)
    return noise + share_in_common * torch.randn(numel, dtype=torch.float64, generator=generator)


def measure(num_ranks: int, numel: int, share_in_common: float) -> dict[str, float]:
    """Relative error, in the 2-norm, of each kind and wire."""
    exact = addends(num_ranks, numel, share_in_common)
    mean = exact.mean(0)
    return {
        "ring, fp32": relative_error(ring(exact.float()), mean),
        "ring, bf16": relative_error(ring(exact.bfloat16()), mean),
        "all_to_all, bf16": relative_error(all_to_all(exact.bfloat16()), mean),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="error of averaged gradients by kind of reduce-scatter")
    parser.add_argument("--numel", type=int, default=1 << 20)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 4, 5, 6, 7, 8, 16, 32, 64])
    args = parser.parse_args()
    for share in (1.0, 0.1):
        rows = [(size, measure(size, args.numel, share)) for size in args.sizes]
        lines = [[str(size), *(f"{error:.1e}" for error in errors.values())] for size, errors in rows]
        print(f"\nnoise 1, in common {share}\n\n{markdown_table(['axis', *rows[0][1]], lines)}")


if __name__ == "__main__":
    main()
