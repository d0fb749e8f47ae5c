"""Pure functions on stacks of matrices, symmetric `[..., d, d]` unless said otherwise."""

from typing import NamedTuple

import torch
from torch import Tensor

# A failed factorisation is tried again with ten times the shift, three times: a shift that is 1000 times
# the one asked for (or 1000 rounding units of the matrix) says that the factor is beyond repair.
_RETRIES = 3
_RETRY_GROWTH = 10.0

# Steps of a low-precision Newton iteration that are taken in full precision at its end: each squares the error, so
# that two bring the 20% that bfloat16 leaves at a condition number of 1e3 below 1%.
_POLISHING_STEPS = 2

# A matrix is squared this often to find its leading eigenvector: in the 1024th power of the Gram matrix a singular
# value that is 1% below the largest is left with 1e-9 of its weight.
_SQUARINGS = 10

# Width up to which a product with itself is taken whole.
_LEAF = 256


def shift_diagonal(matrix: Tensor, shift: Tensor) -> Tensor:
    """`matrix + shift·I`, out of place.

    Args:
        matrix: `[..., d, d]`.
        shift: `[...]`.
    """
    shifted = matrix.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    return shifted


def damped_cholesky_inverse(matrix: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `matrix + shift·I` by Cholesky factorisation, retried with a larger shift where it fails.

    The test for failure is one host synchronisation per call.

    Args:
        matrix: symmetric positive semi-definite, `[n, d, d]`.
        shift: damping per matrix, `[n]`, non-negative.

    Returns:
        The inverses `[n, d, d]`, and the attempts each one took `[n]` (int64): 1 is a clean success, more
        means that the shift was raised by ten for each further attempt, 0 that every attempt failed and the
        inverse is not to be used.
    """
    d = matrix.shape[-1]
    inverse, usable = _try_inverse(shift_diagonal(matrix, shift))
    attempts = torch.where(usable, 1, 0)
    # A shift of zero cannot grow; one rounding unit of the mean eigenvalue can.
    unit = torch.finfo(matrix.dtype).eps * d * matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    retry_shift = torch.maximum(shift, unit)
    for attempt in range(2, 2 + _RETRIES):
        failed = (attempts == 0).nonzero().squeeze(-1)
        if len(failed) == 0:
            break
        retry_shift = retry_shift * _RETRY_GROWTH
        inverse[failed], usable = _try_inverse(shift_diagonal(matrix[failed], retry_shift[failed]))
        attempts[failed] = torch.where(usable, attempt, 0)
    return inverse, attempts


def _try_inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Inverses `[n, d, d]` and whether each is usable `[n]`."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    # cholesky_inverse raises on a zero pivot.
    factor.diagonal(dim1=-2, dim2=-1).masked_fill_((info != 0).unsqueeze(-1), 1)
    inverse = torch.cholesky_inverse(factor)
    # A positive definite matrix is bounded by its diagonal, so a finite diagonal is a finite matrix.
    finite = inverse.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
    return inverse, (info == 0) & finite


def eigendecomposition(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and eigenvectors; a matrix that fails is tried again by itself.

    `torch.linalg.eigh` raises for the whole batch when one matrix does not converge, or is not finite. Then each is
    decomposed alone; what fails alone, in float64; and then with all eigenvalues shifted by a rounding error of
    the matrix, which leads the iteration another way. The test for failure is one host synchronisation per call.

    Args:
        matrix: symmetric, `[n, d, d]`.

    Returns:
        The eigenvalues in ascending order `[n, d]`, the eigenvectors as columns `[n, d, d]`, and the attempts each
        matrix took `[n]` (int64): 1 is a clean success, more one with the means above, 0 that every attempt failed,
        or the matrix is not finite, and the decomposition is not to be used.
    """
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    finite = _all_finite(matrix)
    values, vectors, usable = _try_eigh(torch.where(finite[:, None, None], matrix, identity))
    attempts = torch.where(finite & usable, 1, 0)
    for i in (finite & ~usable).nonzero().squeeze(-1).tolist():
        values[i], vectors[i], attempts[i] = _eigh_alone(matrix[i : i + 1])
    return values, vectors, attempts


def _eigh_alone(matrix: Tensor) -> tuple[Tensor, Tensor, int]:
    """`eigendecomposition` of one matrix `[1, d, d]` that failed in a batch."""
    rounding = torch.finfo(matrix.dtype).eps * matrix.shape[-1] * matrix.abs().amax((-2, -1))
    ways = [(matrix.dtype, 0.0), (torch.float64, 0.0), (torch.float64, 1.0)]
    for attempt, (dtype, units) in enumerate(dict.fromkeys(ways), start=1):
        shift = units * rounding.to(dtype)
        values, vectors, usable = _try_eigh(shift_diagonal(matrix.to(dtype), shift))
        if usable:
            return (values[0] - shift).to(matrix.dtype), vectors[0].to(matrix.dtype), attempt
    return values[0].to(matrix.dtype), vectors[0].to(matrix.dtype), 0


def _try_eigh(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues `[n, d]`, eigenvectors `[n, d, d]`, and whether each decomposition is usable `[n]`."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but missing from torch's __all__
        ones = torch.ones_like(matrix[..., 0])
        return ones, torch.diag_embed(ones), torch.zeros_like(ones[:, 0], dtype=torch.bool)
    return values, vectors, values.isfinite().all(-1) & _all_finite(vectors)


def _all_finite(matrices: Tensor) -> Tensor:
    """Whether every element of each matrix is finite, `[n]`."""
    return matrices.isfinite().flatten(1).all(1)


class Eigenpairs(NamedTuple):
    """Some eigenvalues of each matrix, in ascending order, and their eigenvectors."""

    values: Tensor
    """`[n, r]`, none negative."""
    vectors: Tensor
    """As columns, `[n, d, r]`, orthonormal."""
    attempts: Tensor
    """As of `eigendecomposition`, `[n]`."""


def leading_eigenpairs(matrix: Tensor, shift: Tensor, start: Tensor, iterations: int) -> Eigenpairs:
    """The largest eigenvalues by subspace iteration on `matrix + shift·I` and Rayleigh-Ritz (Halko et al. 2011).

    An iteration turns the subspace away from each eigenvector left out, of eigenvalue e, and towards one kept, of
    eigenvalue d, by the factor `(d + shift) / (e + shift)`. The shift keeps what lies outside the range of a matrix of
    lower rank, so that it may be found when the matrix has grown.

    Args:
        matrix: symmetric positive semi-definite, `[n, d, d]`.
        shift: `[n]`, not negative.
        start: orthonormal columns, `[n, d, r]`.
        iterations: products with the matrix but for one more, of Rayleigh-Ritz.
    """
    basis = start
    for _ in range(iterations):
        basis = torch.linalg.qr(torch.baddbmm(shift[:, None, None] * basis, matrix, basis)).Q
    inner = basis.mT @ (matrix @ basis)
    values, rotation, attempts = eigendecomposition((inner + inner.mT) / 2)
    return Eigenpairs(values.clamp(min=0), basis @ rotation, attempts)


def random_basis(dim: int, rank: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random orthonormal columns `[dim, rank]`: always the same of one size, and no generator of torch moves."""
    generator = torch.Generator().manual_seed(dim)
    basis: Tensor = torch.linalg.qr(torch.randn(dim, rank, dtype=torch.float64, generator=generator)).Q
    return basis.to(device, dtype)


class NewtonStart(NamedTuple):
    """Where a Newton iteration for `F⁻¹` starts."""

    inverse: Tensor
    """`X₀`, `[n, d, d]`, all eigenvalues of `F X₀` below 2."""
    gap: Tensor
    """`δ`, `[n]`: these lie in `[δ, 2 - δ]`; 1 where nothing is known of the smallest."""


def newton_start(matrix: Tensor, least: Tensor, previous: Tensor, usable: Tensor) -> NewtonStart:
    """The previous inverse where it promises fewer steps, else a multiple of the identity; no host synchronisation.

    The identity is scaled by `2 / (u + l)`, with `u` a norm of `F` and `l` the bound below. The previous inverse `P` is
    scaled so that the eigenvalues `μ` of `F P` get the mean 1, and once more, by `1 / (1 + b)`, unless `b < 1` for `b =
    (tr (I - F P)⁸)^⅛`, which no `|1 - μ|` exceeds. A running average that forgets the share `1 - w` has `F ⪰ w F_old`,
    so that from there about `log₂((1 + b)·mean/w)` plain steps lead to where errors are squared, and from the identity
    half of `log₂(u/l)` accelerated ones.

    Args:
        matrix: `F`, positive definite, `[n, d, d]`.
        least: a positive lower bound on its eigenvalues, `[n]`, as the damping is.
        previous: positive definite but for rounding, `[n, d, d]`.
        usable: whether `previous` is an inverse of anything, `[n]` bool.
    """
    least = least.to(matrix.dtype)
    largest = torch.minimum(matrix.abs().sum(-1).amax(-1), matrix.square().sum((-2, -1)).sqrt())
    scale = 2 / (largest + least)
    product = matrix @ previous
    mean = product.diagonal(dim1=-2, dim2=-1).mean(-1)
    usable = usable & (mean > 0)
    mean = torch.where(usable, mean, 1)
    fourth = _from_identity(product / mean[:, None, None])
    for _ in range(2):
        fourth = fourth @ fourth
    # F P is similar to a symmetric matrix: its eigenvalues are real.
    bound = (fourth * fourth.mT).sum((-2, -1)).clamp(min=0).pow(1 / 8)
    steps = 2 * mean.clamp(min=1) * (1 + bound)  # two to the power of what is said above, with w = ½
    warm = usable & (steps.square() * least < largest)  # not where the bound is NaN
    rescaled = previous * (torch.where(bound < 1, 1, 1 / (1 + bound)) / mean)[:, None, None]
    identity = torch.diag_embed(scale.unsqueeze(-1).expand(matrix.shape[:2]))
    return NewtonStart(
        inverse=torch.where(warm[:, None, None], rescaled, identity),
        gap=torch.where(warm, 1, scale * least),
    )


def newton_schulz(matrix: Tensor, start: NewtonStart, steps: int, dtype: torch.dtype | None = None) -> Tensor:
    """`steps` times `X ← ζ X (2I - F X)`: matrix products only, and no host synchronisation.

    Each step squares the errors `1 - μ` of the eigenvalues of `F X`, so that small ones only double at first. Where
    they are known to lie in `[δ, 2 - δ]` the best `ζ = 2 / (1 + 2δ - δ²)` makes that fourfold, and tends to 1 as the
    errors vanish (Pan & Schreiber 1991); with `δ = 1` it is 1.

    Rounding makes a condition number κ an error of κ units in `F X`, and of κ² in `X F`. So `X` inverts from the right,
    its transpose from the left, and taking its symmetric part would spoil it. What comes out must be checked
    (`inverse_residuals`): it may have diverged.

    Args:
        matrix: `F`, positive definite, `[n, d, d]`.
        start: `X₀` and `δ`.
        steps: of two products `[d, d] × [d, d]` each.
        dtype: of the products of all but the last two steps, where it is narrower than that of `matrix`. `X` is
            kept in the dtype of `matrix`, and so are the sums.
    """
    inverse, gap = start
    full = matrix.dtype
    early = full if dtype is None or torch.promote_types(dtype, full) != full else dtype
    for step in range(steps):
        precision = early if step < steps - _POLISHING_STEPS else full
        factor = inverse.to(precision)
        error = _from_identity((matrix.to(precision) @ factor).to(full))
        spread = 1 + 2 * gap - gap.square()
        inverse = (inverse + (factor @ error.to(precision)).to(full)) * (2 / spread)[:, None, None]
        gap = 2 * gap * (2 - gap) / spread
    return inverse


def inverse_residuals(matrix: Tensor, inverse: Tensor) -> Tensor:
    """`‖I - F X‖ / √d` in the Frobenius norm, the root mean square of the errors of the eigenvalues of `F X`, `[n]`."""
    return _from_identity(matrix @ inverse).square().mean((-2, -1)).mul(matrix.shape[-1]).sqrt()


def _from_identity(product: Tensor) -> Tensor:
    """`I - product`, `[n, d, d]`."""
    return shift_diagonal(-product, torch.ones_like(product[:, 0, 0]))


def leading_singular_triple(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`u`, `σ`, `v` of the largest singular value of each matrix, by powers of its smaller Gram matrix.

    The Gram matrix is squared ten times; the column of the largest diagonal element is then the leading eigenvector.
    That needs no starting vector, which might be orthogonal to it, and no host synchronisation. Singular values closer
    than 1% to the largest are not told from it: `u σ vᵀ` is then one of the near-best matrices of rank one. For 256
    matrices of 49 × 64 it takes an eighth of the time of `torch.linalg.svd` on one CPU core, and a third of that of
    `torch.linalg.eigh` of the Gram matrices.

    Args:
        matrix: not symmetric, `[n, rows, columns]`.

    Returns:
        `u` `[n, rows]`, `σ` `[n]` and `v` `[n, columns]`: vectors of norm 1, the element of `v` of largest magnitude
        positive. Of a zero matrix all are zero, of one that is not finite all are NaN.
    """
    wide = matrix.shape[-2] <= matrix.shape[-1]
    matrix = matrix if wide else matrix.mT
    # In units of the largest element: squares of float32 numbers overflow, or vanish, at 1e±19.
    unit = matrix.abs().amax((-2, -1), keepdim=True)
    unit = torch.where(unit > 0, unit, 1)
    scaled = matrix / unit
    power = scaled @ scaled.mT
    for _ in range(_SQUARINGS):
        power = _over(power, power.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None])
        power = power @ power
    best = power.diagonal(dim1=-2, dim2=-1).argmax(-1)
    left = power.take_along_dim(best[:, None, None], dim=-1)
    left = _over(left, torch.linalg.vector_norm(left, dim=-2, keepdim=True))
    right = scaled.mT @ left
    length = torch.linalg.vector_norm(right, dim=-2, keepdim=True)
    right = _over(right, length)
    u, v = (left, right) if wide else (right, left)
    sign = torch.where(v.take_along_dim(v.abs().argmax(-2, keepdim=True), dim=-2) < 0, -1, 1)
    return (u * sign).squeeze(-1), (length * unit).flatten(), (v * sign).squeeze(-1)


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Their quotient, 0 where both are."""
    return numerator / torch.where(denominator == 0, 1, denominator)


def sandwich(left: Tensor | None, middle: Tensor, right: Tensor | None) -> Tensor:
    """`left @ middle @ right`.

    Args:
        left: `[n, rows, rows]`, `[n, rows]` for a diagonal matrix, None for the identity; n may be 1.
        middle: `[n, rows, columns]`.
        right: likewise over `columns`.
    """
    if left is not None:
        middle = left @ middle if left.dim() == 3 else left.unsqueeze(-1) * middle
    if right is not None:
        middle = middle @ right if right.dim() == 3 else middle * right.unsqueeze(-2)
    return middle


def symmetric_product(rows: Tensor, out: Tensor) -> None:
    """`rowsᵀ rows` of `[n, rows, d]` into `out`, `[n, d, d]`; a CPU copies the blocks above the diagonal from below.

    That leaves out most of half the operations: of 2048 rows 1024 wide it takes 0.73 of the time of the whole product
    on a CPU with AVX-512 (float32, two threads), of 512 rows 1000 wide 0.77, 500 wide 0.92. Up to a width of 256 it is
    taken whole.
    """
    if rows.shape[-1] <= _LEAF or rows.device.type != "cpu":
        torch.matmul(rows.mT, rows, out=out)
        return
    for matrix, into in zip(rows, out, strict=True):
        _fill_symmetric(matrix, into)


def _fill_symmetric(rows: Tensor, out: Tensor) -> None:
    """`out = rowsᵀ rows`, `[d, d]`."""
    d = rows.shape[-1]
    if d <= _LEAF:
        torch.mm(rows.mT, rows, out=out)
        return
    half = (d // 2 + 15) // 16 * 16  # rows that start at whole vectors
    first, second = rows[:, :half], rows[:, half:]
    _fill_symmetric(first, out[:half, :half])
    _fill_symmetric(second, out[half:, half:])
    torch.mm(second.mT, first, out=out[half:, :half])
    out[:half, half:] = out[half:, :half].mT


def norm1(matrix: Tensor) -> Tensor:
    """Largest column sum of magnitudes of `[..., d, d]`, `[...]`."""
    return matrix.abs().sum(-2).amax(-1)


def triangle_size(dim: int) -> int:
    """Elements of a packed symmetric `[d, d]` matrix: `d(d + 1) / 2`."""
    return dim * (dim + 1) // 2


def pack_triangle(matrix: Tensor) -> Tensor:
    """One triangle of each symmetric matrix, `[..., d, d]`, as a row of `triangle_size(d)` elements, `[..., t]`.

    In the rectangular full packed format (Gustavson et al. 2010): the left half of the columns keeps its lower
    triangle, and the upper triangle of the last quarter of the matrix fills the place above it. That takes slices
    alone, no index tensors (which would be four times as large as a float32 matrix), and no host synchronisation.
    Bits are copied, never computed with, so that `unpack_triangle` gives a symmetric matrix back exactly.
    """
    d = matrix.shape[-1]
    low, rows, column = _triangle_blocks(d)
    columns = d - low
    packed = matrix.new_empty(*matrix.shape[:-2], rows, columns)
    packed[..., rows - d :, :] = matrix[..., :, :columns]
    if low > 0:
        free = packed[..., :low, column:]
        upper = torch.ones(low, low, dtype=torch.bool, device=matrix.device).triu()
        torch.where(upper, matrix[..., columns:, columns:], free, out=free)
    return packed.flatten(-2)


def unpack_triangle(packed: Tensor, dim: int) -> Tensor:
    """The symmetric matrices, `[..., d, d]`, that `pack_triangle` made into `[..., triangle_size(d)]`."""
    low, rows, column = _triangle_blocks(dim)
    columns = dim - low
    packed = packed.reshape(*packed.shape[:-1], rows, columns)
    matrix = packed.new_empty(*packed.shape[:-2], dim, dim)
    left = packed[..., rows - dim :, :]
    _mirror_lower(left[..., :columns, :], out=matrix[..., :columns, :columns])
    if low > 0:
        matrix[..., columns:, :columns] = left[..., columns:, :]
        matrix[..., :columns, columns:] = left[..., columns:, :].mT
        _mirror_lower(packed[..., :low, column:].mT, out=matrix[..., columns:, columns:])
    return matrix


def packed_diagonal(packed: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The diagonal of the symmetric matrices that `pack_triangle` made into `[..., triangle_size(d)]`, in two parts.

    Both are views: the first `[..., d - d // 2]`, the rest `[..., d // 2]`.
    """
    low, rows, column = _triangle_blocks(dim)
    rectangle = packed.view(*packed.shape[:-1], rows, dim - low)
    left, last = rectangle[..., rows - dim :, :], rectangle[..., :low, column:]
    return left.diagonal(dim1=-2, dim2=-1), last.diagonal(dim1=-2, dim2=-1)


def _triangle_blocks(dim: int) -> tuple[int, int, int]:
    """The rectangle that `d(d + 1) / 2` elements fill.

    Size of the last diagonal block, which is put above the others; rows; and the column at which that block starts.
    Even `d = 2k`: `k`, `2k + 1` rows of `k`, in which the columns stand one row lower. Odd `d = 2k + 1`: `k`, `2k + 1`
    rows of `k + 1`, in which the block starts one column further right.
    """
    low = dim // 2
    return low, dim + 1 - dim % 2, dim % 2


def _mirror_lower(matrix: Tensor, *, out: Tensor) -> None:
    """Make `out` `matrix` `[..., d, d]`, the part above the diagonal replaced by the mirror image of that below."""
    lower = torch.ones(matrix.shape[-2:], dtype=torch.bool, device=matrix.device).tril()
    torch.where(lower, matrix, matrix.mT, out=out)
