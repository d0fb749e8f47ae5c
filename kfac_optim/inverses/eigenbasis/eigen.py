"""Each factor is eigendecomposed: the product of both is damped exactly, by the λ of the present step."""

from dataclasses import dataclass

import torch

from kfac_optim.inverses.eigenbasis.base import EigenbasisInverse, EigenState
from kfac_optim.inverses.pair_inverse import EIGH_FLOPS, dense_flops
from kfac_optim.specs import Cost, LayerSpec


@dataclass(frozen=True)
class Eigen(EigenbasisInverse[EigenState]):
    """Inverts `A ⊗ G + λI` in the eigenbasis of the factors (Pauloski et al. 2020, arXiv 2007.00784).

    With `A = Q_A diag(s_A) Q_Aᵀ` and `G = Q_G diag(s_G) Q_Gᵀ` a gradient becomes
    `Q_G [(Q_Gᵀ ∇ Q_A) / (s_G s_Aᵀ + λ)] Q_Aᵀ`, negative eigenvalues taken as 0. λ is not split over the factors, which
    makes the damping exact, and it may change at every step without a refresh. Refreshing costs several times what
    it does with `Cholesky`, applying four matrix products instead of two. Factors narrower than float32 are
    decomposed in float32. A λ below one rounding unit of the largest entry of `s_G s_Aᵀ` (in float32 1.2e-7 times it)
    counts as that unit, as the gradient's rounding noise would otherwise grow without bound.

    Use it where λ changes from step to step, by a schedule or by adaptation, or where the damping must be exact, as in
    a comparison with other solvers. It needs a larger λ than `Cholesky`: at the same one it damps less.

    Condition numbers in `metrics()` are those of the factors as `Cholesky` would damp them at the last refresh, in
    the 2-norm: `A + π√λ I` and `G + (√λ/π) I`.
    """

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> EigenState:
        return EigenState(spec, dtype=dtype, device=device)

    def flops(self, spec: LayerSpec) -> Cost:
        return dense_flops(spec, per_cube=EIGH_FLOPS, products=2)
