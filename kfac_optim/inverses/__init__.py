"""Representations of a block's inverse curvature, one file each.

Refresh: operations for a dense factor of size d, by `Inverse.flops`, where a Cholesky inverse is d³. Apply: matrix
products with each dense factor, at every step.

| | what it divides the gradient by | refresh | apply | use it |
|---|---|---|---|---|
| `Cholesky` | damped `A`, damped `G` | d³ | 1 | first |
| `LowRank` | nearly the same: r eigenvectors of each, the rest by its mean | 6 r d² | 2r/d | for wide layers |
| `NewtonSchulz` | the same | 48 d³, products alone | 1 | where products are far faster than factorisations |
| `Eigen` | `A ⊗ G + λI` | 25 d³ | 2 | where λ changes from step to step |
| `EKFAC` | `U diag(S) Uᵀ + λI` | 27 d³, and samples | 2 | where refreshes are rare |
| `InverseAndRoot` | damped `A` and `G`, or the root of `A` | 25 d³ | 1 | with `SelectedUpdates` |
| `DoublyFactored` | three damped factors | C³ + T³ + 2 out³ | 1 | after flattened convolutions, too wide for `A` |
| `SampleSpace` | `ρᵀρ + λI`, exactly, of one step's residuals | – | residuals² | for losses of residuals (PINNs) |
| `SumOfTerms` | damped `A₁ ⊗ G₁ + A₂ ⊗ G₂` | 50 d³ | 2 | for a loss of two terms, inside and on a boundary |

`AutoInverse` (`auto.py`) chooses for each layer. Those in an eigenbasis need a larger λ than the others, for
`(A + π√λ I) ⊗ (G + √λ/π I)` is more than `A ⊗ G + λI`.
"""

from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.inverses.damped import Cholesky, InverseAndRoot, LowRank, NewtonSchulz
from kfac_optim.inverses.doubly_factored import DoublyFactored
from kfac_optim.inverses.eigenbasis import EKFAC, Eigen
from kfac_optim.inverses.sample_space import SampleSpace
from kfac_optim.inverses.state import InverseState
from kfac_optim.inverses.sum_of_terms import SumOfTerms

__all__ = [
    "EKFAC",
    "Cholesky",
    "DoublyFactored",
    "Eigen",
    "Inverse",
    "InverseAndRoot",
    "InverseRule",
    "InverseState",
    "LowRank",
    "NewtonSchulz",
    "SampleSpace",
    "SumOfTerms",
]
