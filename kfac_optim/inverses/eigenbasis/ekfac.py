"""EKFAC: in the eigenbasis of the Kronecker factors, the second moments of the gradient itself.

After George, Laurent, Bouthillier, Ballas & Vincent 2018, arXiv 1806.03884.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac_optim.inverses.eigenbasis.base import EigenbasisInverse, divisor
from kfac_optim.inverses.eigenbasis.ekfac_state import EKFACState
from kfac_optim.inverses.pair_inverse import EIGH_FLOPS, dense_flops, dense_sides
from kfac_optim.specs import Cost, FactorShape, LayerSpec, Part, Structure
from kfac_optim.utils.validation import check_flag


@dataclass(frozen=True)
class EKFAC(EigenbasisInverse[EKFACState]):
    """Inverts `U diag(S) Uᵀ + λI` in the eigenbasis `U = U_G ⊗ U_A` of the factors (George et al. 2018).

    A gradient becomes `U_G [(U_Gᵀ ∇ U_A) / (S + λ)] U_Aᵀ` with `S = M Σ_n (U_Gᵀ ∇W_n U_A)²`, where `∇W_n` is what
    example n adds to the gradient. `S` is the diagonal of the Fisher in the eigenbasis, for which `Eigen` takes the
    product `s_G s_Aᵀ` of the factors' eigenvalues: of all diagonals in this basis it is the nearest to the Fisher in
    the Frobenius norm. It is sampled at every statistics step and so stays up to date while the basis, the costly part,
    ages: `inverse_update_period` can be large. λ may change at every step without a refresh; below one rounding unit of
    the largest entry of `S` it counts as that unit, as with `Eigen`.

    `S` is a running average weighted by loss terms, as `G` is, in the units of the loss as the user wrote it. Until it
    is sampled in a basis it is `s_G s_Aᵀ`. When a refresh changes the basis, the diagonal of `U diag(S) Uᵀ` in the new
    one takes its place and keeps its mass. (In a small network, trained on batches of 64 with a decay of 0.95, this
    solved `(F + λI)Δ = ∇` with an error of 0.34 at a refresh every 10 steps and 0.47 every 40, `S` begun again from
    `s_G s_Aᵀ` with 0.39 and 0.50, and `Eigen` with 0.37 and 0.53.)

    The examples are those of the batch axis. With weight sharing `expand` `∇W_n = Σ_r g_nr a_nrᵀ`, over the positions
    r of an example, is its exact gradient; with `reduce` it is the sum of `g` times the mean of `a`, as in the factors.
    Tokens that are routed to experts one by one are examples of their own, with either choice of `per_example`.
    Calls of one step, of tied weights or of a module called twice, count as independent, as they do in the factors. A
    side of `Structure.DIAGONAL` stays in the standard basis. A side of `Structure.IDENTITY` is not measured: `S` is
    then the diagonal of the other factor in its basis, of every statistics step.

    Where statistics do not have the rows of a sample, as at the second backward through one forward, when the layer's
    input is gone, `diag(U_GᵀGU_G) diag(U_AᵀAU_A)ᵀ` stands in for the sample of that step, and
    `metrics()["substituted_statistics"]` counts it. `S` has the size of the gradient: of an embedding that of its
    weight, whose one-hot rows are never built.

    Use it where refreshes must be rare, or where inputs and gradients of a layer depend on each other, which the
    product of two factors cannot express. It needs a larger λ than `Cholesky`, as `Eigen` does.

    On several processes each samples `S` of its own examples, and what divides the gradient is the `S` of all as of
    the last refresh, where one process updates it at every step with statistics: the two are equal where the periods
    are. So there pass an `inverse_update_period` below the default.

    Args:
        per_example: whether the positions of an example are taken together, as above. False makes each an example of
            its own, as `A` and `G` do with `expand`: one matrix product for the batch where the exact gradients take
            one for each example.

    Raises:
        TypeError: `per_example` is not a bool.
    """

    per_example: bool = True

    def __post_init__(self) -> None:
        check_flag("per_example of EKFAC", self.per_example, optional=False)

    @property
    def squares_examples(self) -> bool:
        return self.per_example

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> EKFACState:
        return EKFACState(spec, per_example=self.per_example, dtype=dtype, device=device)

    def refresh(self, states: Sequence[EKFACState], dampings: Sequence[float]) -> None:
        before = [state.standing() for state in states]
        super().refresh(states, dampings)
        for state, old in zip(states, before, strict=True):
            state.renew(old)

    def damped(self, state: EKFACState, damping: float) -> Tensor:
        return divisor(state.to_apply, state.solved, damping)

    def flops(self, spec: LayerSpec) -> Cost:
        # To carry S over: the overlap of the bases, and a product with it.
        cost = dense_flops(spec, per_cube=EIGH_FLOPS + 2, products=2)
        carried = sum(2.0 * spec.groups * spec.in_dim * spec.out_dim * dim for dim, _ in dense_sides(spec))
        return Cost(refresh=cost.refresh + carried, apply=cost.apply)

    def parts(self, spec: LayerSpec) -> tuple[Part, ...]:
        """Return one part: `S` belongs to both bases, in which every rank samples it."""
        parts = super().parts(spec)
        scales = FactorShape(Structure.DIAGONAL, spec.groups, spec.out_dim * spec.in_dim, spec.masses)
        measured = Structure.IDENTITY not in spec.structure
        # Eigenvalues serve the rank that refreshes alone; `solved` goes once.
        bases = spec.groups + sum(groups * dim**2 for dim, groups in dense_sides(spec))
        return (
            Part(
                "",
                self.flops(spec).refresh,
                tuple(factor for part in parts for factor in part.sums) + ((scales,) if measured else ()),
                sent=bases + scales.numel,
                held=sum(part.held for part in parts) + (0 if measured else scales.numel),
                measuring=bases if measured else 0,
            ),
        )
