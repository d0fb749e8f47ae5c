"""Leading eigenpairs of matrices of which only the products with a few random directions are known."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from kfac_optim.linalg.eigen import Eigenpairs, eigendecomposition

# Eigenvalues of the small matrix `Ωᵀ F Ω` that count as zero, in units of its largest one and of the rounding error.
_ROUNDINGS = 32


def sketch_directions(dim: int, columns: int, *, like: Tensor) -> Tensor:
    """Return the directions `Ω` `[dim, columns]` of all sketches of one size, not to be written to.

    Their elements are `±1/√dim`, the signs random bits of torch's generator of integers for the CPU. So they are the
    same on every machine, as checkpoints and several processes need: a sketch means nothing without its directions.

    Args:
        dim: width of the matrices.
        columns: how many directions.
        like: a tensor of the dtype and on the device that the directions are to have.
    """
    return _directions(dim, columns, like.dtype, like.device)


@lru_cache(maxsize=256)
def _directions(dim: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(dim)
    bits = torch.randint(2, (dim, columns), generator=generator, device="cpu")
    signs = (2 * bits - 1).to(torch.float64)
    return (signs / math.sqrt(dim)).to(dtype).to(device)


def nystrom(sketch: Tensor, directions: Tensor) -> Eigenpairs:
    """Return the eigenpairs of `F̂ = Y (Ωᵀ Y)⁺ Yᵀ`, where `Y = F Ω` is all that is known of `F` (Nyström).

    `F̂` is the best approximation of a positive semi-definite `F` within the range of `Y`: `0 ⪯ F̂ ⪯ F`, and `F̂ = F`
    where the rank of `F` is at most that of `Ω`. Its error is expected to be a small multiple of the sum of the
    eigenvalues that no approximation of some smaller rank could hold: `E ‖F - F̂‖ ≤ (1 + r/(k - r - 1)) Σ_{i>r} λ_i`
    for every rank `r < k - 1`, k the number of directions (Tropp, Yurtsever, Udell & Cevher 2017, theorem 4.1, proven
    for Gaussian directions). `Y` is factored by QR, so that the vectors are orthonormal whatever `Y` is.

    Args:
        sketch: `Y`, `[n, d, k]`.
        directions: `Ω`, `[d, k]`.

    Returns:
        k eigenpairs of each matrix; those beyond the rank of `Y` have the value 0.
    """
    orthogonal, triangular = torch.linalg.qr(sketch)
    # Small matrices are made and factored in float64: their smallest eigenvalues are differences, and are divided by.
    core = directions.double().mT @ sketch.double()
    values, vectors, first = eigendecomposition((core + core.mT) / 2)
    # Without rounding the core would be symmetric: what it lacks says how large rounding errors are, whatever dtype the
    # sketch was kept, or sent, in. Eigenvalues of that size are noise.
    noise = torch.linalg.matrix_norm(core - core.mT)
    rounding = _ROUNDINGS * torch.finfo(sketch.dtype).eps * values.amax(-1).clamp(min=0)
    least = torch.maximum(rounding, noise).unsqueeze(-1)
    scale = torch.where(values > least, values, torch.inf).rsqrt()
    root = triangular.double() @ vectors * scale.unsqueeze(-2)
    values, rotation, second = eigendecomposition(root @ root.mT)
    attempts = torch.where(first > 0, second, 0)
    return Eigenpairs(values.clamp(min=0).to(sketch.dtype), orthogonal @ rotation.to(sketch.dtype), attempts)
