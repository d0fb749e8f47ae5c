"""The eigenbasis follows its factor by QR iteration; a full decomposition comes now and then."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_optim.inverses.eigenbasis.base import EigenbasisInverse, EigenJob, EigenState, decompose_fully, hand_back
from kfac_optim.inverses.pair_inverse import EIGH_FLOPS, dense_flops, side_of
from kfac_optim.specs import Cost, LayerSpec
from kfac_optim.utils import value_checks
from kfac_optim.utils.validation import check_integer

# As EIGH_FLOPS: two products (2 d³ each), a QR factorisation (4/3 d³) and forming its Q (4/3 d³).
_STEP_FLOPS = 7.0


class OnlineState(EigenState):
    """Holds the factors of one block and bases that nearly diagonalise them.

    Attributes:
        since_full: refreshes since the last full decomposition of each factor, that one included, `[2]` int64 for A and
            G; 0 where a full one is next. On the host, as it decides what is to be done.
    """

    __slots__ = ("since_full",)

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype=dtype, device=device)
        self.since_full = torch.zeros(2, dtype=torch.int64, device="cpu")

    def computed(self) -> dict[str, Tensor]:
        return {**super().computed(), "since_full": self.since_full}

    def ranges(self) -> dict[str, Any]:
        return super().ranges() | {"since_full": value_checks.not_negative}

    def measures(self, part: str) -> tuple[Tensor, ...]:
        # Of two ranks that solve for one factor each, each counts the refreshes of its own.
        return *super().measures(part), self.since_full[side_of(part)]


@dataclass(frozen=True)
class OnlineEigen(EigenbasisInverse[OnlineState]):
    """Does as `Eigen`, with a basis that takes one step of orthogonal (QR) iteration at most refreshes, as in SOAP.

    Of `full_period` refreshes one is a full eigendecomposition, and again the next where it failed. At the others the
    basis becomes the `Q` of `F·basis = QR`, columns in descending order of `diag(basisᵀ F basis)`, and the eigenvalues
    are `diag(QᵀFQ)` (Vyas et al. 2024, arXiv 2409.11321).

    The basis is then not exact. The relative Frobenius error of the damped inverse `(F + λI)⁻¹` of one factor, at
    d = 256, with ten updates of decay 0.95 between refreshes, each the mean of 256 rows of a fixed covariance with
    eigenvalues i⁻¹ or i⁻²; mean of nine steps, in brackets for the basis of the last full decomposition:

    | λ / mean eigenvalue | 0.1 | 0.01 | 0.001 |
    |---|---|---|---|
    | i⁻¹ | 9% (19%) | 12% (24%) | 12% (25%) |
    | i⁻² | 1% (4%) | 4% (11%) | 8% (20%) |

    When the eigenvectors of the covariance are all replaced at once it is 30-36% (56-64%) for i⁻¹ and 16-46% (78-98%)
    for i⁻² at the first refresh after, 10-14% and 3-12% at the ninth. So this suits fast spectra and damping that is
    not small; under a slow spectrum with small damping `Eigen` is the exact inverse.

    Use it in place of `Eigen` on devices on which eigendecompositions are slow. On one CPU core a step takes as long as
    a full decomposition (3.3-8 times a Cholesky inverse against 3.5-8, float32, d from 64 to 1024), and saves nothing.

    Args:
        full_period: refreshes of a factor per full decomposition; 1 makes all of them full, as `Eigen` does.

    Raises:
        TypeError: `full_period` is not an integer.
        ValueError: it is below 1.
    """

    full_period: int = 10

    def __post_init__(self) -> None:
        check_integer("full_period of OnlineEigen", self.full_period)

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> OnlineState:
        return OnlineState(spec, dtype=dtype, device=device)

    def decompose(self, jobs: list[EigenJob]) -> None:
        full: list[EigenJob] = []
        steps: list[EigenJob] = []
        for job in jobs:
            (full if _since_full(job)[job.side] == 0 else steps).append(job)
        if full:
            usable = decompose_fully(full)
            # A factor that failed is tried again at the next refresh. `decompose_fully` has waited for the device.
            for job, good in zip(full, torch.stack([each.all() for each in usable]).tolist(), strict=True):
                _since_full(job)[job.side] = int(good) % self.full_period
        if steps:
            bases = [job.spectrum.basis for job in steps]
            stack = torch.cat([basis for basis in bases if basis is not None])
            hand_back(steps, orthogonal_iteration(torch.cat([job.average() for job in steps]), stack))
            for job in steps:
                since = _since_full(job)
                since[job.side] = (since[job.side] + 1) % self.full_period

    def flops(self, spec: LayerSpec) -> Cost:
        """Return the cost averaged over `full_period` refreshes."""
        per_cube = (EIGH_FLOPS + (self.full_period - 1) * _STEP_FLOPS) / self.full_period
        return dense_flops(spec, per_cube=per_cube, products=2)


def orthogonal_iteration(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take one step of orthogonal iteration: `Q` of `F·basis = QR`, and the eigenvalues that it shows, `diag(QᵀFQ)`.

    Columns are put into descending order first: QR takes from each what the ones before it hold already.

    Args:
        matrix: symmetric positive semi-definite, `[n, d, d]`.
        basis: orthogonal, `[n, d, d]`.

    Returns:
        The eigenvalues `[n, d]`, the basis `[n, d, d]`, and `[n]` (int64) 1 where both are finite, 0 elsewhere.
    """
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    finite = matrix.isfinite().flatten(1).all(1)
    # What a solver makes of NaN differs from device to device.
    matrix = torch.where(finite[:, None, None], matrix, identity)
    product = matrix @ basis
    order = (basis * product).sum(-2).argsort(dim=-1, descending=True, stable=True)
    turned = torch.linalg.qr(product.gather(-1, order.unsqueeze(-2).expand_as(product))).Q
    values = (turned * (matrix @ turned)).sum(-2)
    usable = finite & values.isfinite().all(-1) & turned.isfinite().flatten(1).all(1)
    return values, turned, usable.long()


def _since_full(job: EigenJob) -> Tensor:
    assert isinstance(job.state, OnlineState)
    return job.state.since_full
