"""The inverse square root of each factor, as Shampoo takes it of its own, damped relative to the factor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_optim.inverses.damping import Damped
from kfac_optim.inverses.eigenbasis.base import EigenbasisInverse, EigenState, Spectrum, outer
from kfac_optim.inverses.pair_inverse import EIGH_FLOPS, dense_flops
from kfac_optim.specs import Cost, LayerSpec
from kfac_optim.utils.validation import check_number


@dataclass(frozen=True)
class InverseRoot(EigenbasisInverse[EigenState]):
    """Multiplies the gradient by the inverse square roots of its factors: `(G + ε n_G I)^-½ ∇ (A + ε n_A I)^-½`.

    `n_F = tr F / d` is the mean eigenvalue of a factor, so that the damping has no unit: the result turns no way with
    the size of the loss or of the inputs. The λ of the param groups is not used. Where a gradient is mostly noise, of
    covariance near `A ⊗ G`, all directions get noise of the same size; the full inverse would give the most to those
    of the least curvature. Shampoo has these powers on factors of its own (Gupta et al. 2018); K-FAC's input factor at
    this power is the right-hand side of Newton-Muon (2604.01472).

    Use it with `step_size=OrthogonalUpdates()`, and with `structure=(Structure.DENSE, Structure.IDENTITY)`, which
    leaves out `G` and its cost: orthogonal updates undo most of what `G` does.

    Refreshing and applying cost what they do with `Eigen`. A factor of zeros stands for the identity. Condition numbers
    in `metrics()` are those of the damped factors, whose roots are taken.

    Args:
        damping: ε, above 0.

    Raises:
        TypeError: `damping` is no number.
        ValueError: it is out of range.
    """

    damping: float = 0.1

    def __post_init__(self) -> None:
        check_number("damping of InverseRoot", self.damping, above=0)

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> EigenState:
        return EigenState(spec, dtype=dtype, device=device)

    def damped(self, state: EigenState, damping: float) -> Tensor:
        roots = outer(self._root(state.g), self._root(state.a), like=state.condition)
        return torch.where(state.solved[:, None, None], roots, 1.0)

    def shares(self, traces: Sequence[Tensor], dims: Sequence[int], damping: float) -> list[Damped]:
        means = [trace / dim for trace, dim in zip(traces, dims, strict=True)]
        return [Damped(torch.ones_like(mean), torch.where(mean > 0, self.damping * mean, 1.0)) for mean in means]

    def _root(self, spectrum: Spectrum | None) -> Tensor | None:
        """Return the roots of the damped eigenvalues, `[groups, d]`."""
        if spectrum is None:
            return None
        values = spectrum.values
        (share,) = self.shares([values.sum(-1)], [values.shape[-1]], 0.0)
        return (values + share.shift[:, None]).sqrt()

    def flops(self, spec: LayerSpec) -> Cost:
        return dense_flops(spec, per_cube=EIGH_FLOPS, products=2)
