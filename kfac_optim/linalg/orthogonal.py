"""The orthogonal factor of a matrix, by products alone."""

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kfac_optim.linalg.products import WHOLE, frobenius_norm, symmetric_product

# Of the polynomial a·x + b·x³ + c·x⁵ that singular values go through at each step. The slope at 0 is what lifts small
# ones; the price is that none comes to rest at 1 (Jordan et al. 2024).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5

# Elements of a matrix from which on a launch takes no longer than its products, on a CPU.
_SMALL = 2**18

# Elements of the matrices that go in one batch at most: 256 MiB of float32.
_TOGETHER = 2**26

# Products of at most so many multiplications take longer in bfloat16 than in float32, because each call costs more, and
# those of matrices that are no wider take as long (one CPU core with AVX-512, torch 2.13).
_FEW, _NARROW = 2**20, 64


def orthogonalised(matrix: Tensor) -> Tensor:
    """Bring the singular values of matrices near 1 by Newton-Schulz iteration (Jordan et al. 2024, "Muon").

    Each matrix is divided by its Frobenius norm first, so that its length has no effect. After five steps singular
    values of 0.0015 of that norm and more are between 0.68 and 1.21; smaller ones are multiplied by up to 485. The
    singular vectors stay. Large products of float32 matrices are taken in bfloat16, as in Muon: they take half the
    time, and rounding is less than what the polynomial leaves. On CPUs without AVX512-BF16 they stay in float32.

    Args:
        matrix: `[n, rows, columns]`.

    Returns:
        Matrices of the same shape and dtype; zeros of a matrix of zeros.
    """
    turned = matrix.shape[-2] > matrix.shape[-1]
    found = matrix.mT if turned else matrix
    found = found / frobenius_norm(found)
    width = found.shape[-2]
    pays = width > _NARROW and found[0].numel() * width > _FEW
    # Without these instructions products in bfloat16 take 6 to 14 times as long as in float32 (AVX2, torch 2.13).
    if matrix.dtype is torch.float32 and pays and (not matrix.is_cpu or _cpu_has("avx512_bf16")):
        found = found.bfloat16()
    rows, columns = found.shape[-2:]
    if _wants_eights(found):
        found = F.pad(found, (0, -columns % 8, 0, -rows % 8))  # zeros, which stay zeros
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        found = torch.baddbmm(found, _polynomial(found, b, c), found, beta=a)
    found = found[..., :rows, :columns].to(matrix.dtype)
    return found.mT if turned else found


def _wants_eights(matrix: Tensor) -> bool:
    """Return whether products of a matrix are several times as quick where its sizes are multiples of eight.

    They are in 16 bits on an accelerator, and the bias makes most layers wider by one.
    """
    return not matrix.is_cpu and matrix.itemsize == 2


def _polynomial(rows: Tensor, b: float, c: float) -> Tensor:
    """Return `b S + c S²` of `S = rows rowsᵀ`, `[n, d, d]`.

    On a CPU products of wide matrices are taken by halves, but not in bfloat16 where the CPU has AMX: there whole ones
    are quicker (400 × 785: five steps in 4.2 ms, by halves in 6.5; one core, torch 2.13).
    """
    if rows.shape[-2] <= WHOLE or not rows.is_cpu or (rows.dtype is torch.bfloat16 and _cpu_has("amx_bf16")):
        # Of one matrix in bfloat16 `bmm` takes up to three times as long as `mm` (a CPU with AMX, torch 2.13).
        gram = (rows[0] @ rows[0].mT).unsqueeze(0) if len(rows) == 1 else rows @ rows.mT
        return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    gram, square = (rows.new_empty(*rows.shape[:-1], rows.shape[-2]) for _ in range(2))
    symmetric_product(rows.mT, out=gram)
    symmetric_product(gram, out=square)
    return square.mul_(c).add_(gram, alpha=b)


def _cpu_has(instructions: str) -> bool:
    """Return whether the CPU has these instructions, as torch names them."""
    return bool(torch.cpu.get_capabilities().get(instructions, False))


def orthogonal_factors(matrices: Sequence[Tensor], alone: Collection[int] = ()) -> list[Tensor]:
    """Return `orthogonalised` of each of several `[groups, rows, columns]`.

    Those of one shape go in one batch, whichever side is the longer one: on a CPU the small ones, elsewhere all; but
    not those whose numbers are in `alone`.
    """
    found = list(matrices)
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    lying = [matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix for matrix in matrices]
    for number, matrix in enumerate(lying):
        apart = number if number in alone or (matrix.is_cpu and matrix.numel() > _SMALL) else None
        alike[matrix.shape[-2:], matrix.dtype, matrix.device, apart].append(number)
    for equal in alike.values():
        most = max(1, _TOGETHER // max(1, lying[equal[0]].numel()))
        for start in range(0, len(equal), most):
            numbers = equal[start : start + most]
            together = orthogonalised(torch.cat([lying[number] for number in numbers]))
            parts = torch.split(together, [len(matrices[number]) for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                found[number] = part if lying[number] is matrices[number] else part.mT
    return found
