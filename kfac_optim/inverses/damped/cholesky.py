"""The default: each damped factor is inverted by Cholesky factorisation, two matrix products apply it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.inverses.damped.base import damped_jobs, identity_like, invert
from kfac_optim.inverses.pair_inverse import PairInverse, PairState, SymmetricInverse, dense_flops
from kfac_optim.linalg.products import sandwich
from kfac_optim.specs import Cost, FactorShape, LayerSpec
from kfac_optim.utils.validation import check_dtype

CholeskyState = PairState[SymmetricInverse]
"""Condition numbers are in the 1-norm."""


@dataclass(frozen=True)
class Cholesky(PairInverse[CholeskyState]):
    """Inverts each factor with π-balanced factored damping (Martens & Grosse 2015, §6.3).

    `A + π√λ I` and `G + (√λ/π) I`, `π = √((tr A / in) / (tr G / out))`. Refreshing costs about `in³ + out³`
    operations, applying two matrix products. Factors narrower than float32 are inverted in float32.

    Use it first. Of the inverses of whole factors it is on CPUs the cheapest to apply at every size, and to refresh
    (`Eigen` takes 3% less at a width of 2; figures at `AutoInverse`), and its damping at a given λ is the strongest:
    `(A + π√λ I) ⊗ (G + √λ/π I)` is more than `A ⊗ G + λI`. For layers wider than some hundreds `LowRank` does nearly
    the same in a fraction of the time.

    Args:
        dtype: the dtype in which inverses are kept and applied; None is that of the factors, but at least float32.
            With `torch.bfloat16` they take half the memory, and their products 0.45 of the time on a CPU that
            multiplies it (AVX-512 in halves; 1000 × 785, two threads); each of the two products then rounds to 8 bits,
            which turns the preconditioned gradient by less than a hundredth of its length. Inverses are computed in
            full precision all the same.

    Raises:
        TypeError: `dtype` is no dtype.
        ValueError: it is no floating one with the range of float32.
    """

    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_dtype("dtype of Cholesky", self.dtype)

    def __repr__(self) -> str:
        return "Cholesky()" if self.dtype is None else f"Cholesky(dtype={self.dtype})"

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> CholeskyState:
        def start(factor: Factor, compute: torch.dtype) -> SymmetricInverse:
            return SymmetricInverse(identity_like(factor, self.dtype or compute))

        return PairState(spec, start, dtype=dtype, device=device)

    def refresh(self, states: Sequence[CholeskyState], dampings: Sequence[float]) -> None:
        invert(damped_jobs(states, dampings))

    def apply(self, state: CholeskyState, grad: Tensor, damping: float) -> Tensor:
        applied = self.applied_dtype(state)
        a, g = (None if side is None else side.inverse for side in (state.a, state.g))
        direction = sandwich(g, grad.to(applied), a)
        return direction if grad.dtype == applied else direction.to(state.condition.dtype)

    def applied_dtype(self, state: CholeskyState) -> torch.dtype:
        return self.dtype or state.condition.dtype

    def result(self, factor: FactorShape) -> tuple[int, int]:
        return factor.packed, factor.numel

    def flops(self, spec: LayerSpec) -> Cost:
        return dense_flops(spec, per_cube=1.0, products=1)
