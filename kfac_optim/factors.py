"""One Kronecker factor: a debiased running average in which every sample weighs its mass."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kfac_optim.specs import Structure


class Factor:
    """Mass-weighted exponential average `S` of second moments.

    With `w` the mass held and `n` the mass behind a new sample,

        w ← ε·w + n,    S ← S + (n / w)·(sample − S).

    The first sample is taken whole, so the average is unbiased from the start; `ε = 1` is a plain mean. As the
    mass travels with the average, two averages merge exactly: `(w₁S₁ + w₂S₂) / (w₁ + w₂)`.

    Within a step, moments are summed as they are (`add`) and normalised once (`fold`): only then is it known
    how many rows and loss terms the step had.

    Attributes:
        average: `[groups, d, d]` (dense) or `[groups, d]` (diagonal).
        mass: `[]`, on the factor's device so that refusing a sample needs no host synchronisation.
        pending: raw sum since the last fold, shaped like `average`, or None.
    """

    __slots__ = ("average", "mass", "pending", "structure")

    def __init__(
        self, groups: int, dim: int, structure: Structure, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (groups, dim, dim) if structure is Structure.DENSE else (groups, dim)
        self.structure = structure
        self.average = torch.zeros(shape, dtype=dtype, device=device)
        self.mass = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.pending: Tensor | None = None

    def add(self, moment: Tensor) -> None:
        """Add raw second moments to the sum of this step, shaped like `average` or one for all groups."""
        if self.pending is None:
            self.pending = moment
        elif self.pending.shape == moment.shape:
            self.pending += moment
        else:
            self.pending = self.pending + moment

    def pending_is_finite(self) -> Tensor:
        """`[]` bool. By Cauchy-Schwarz a Gram matrix is finite when its diagonal is."""
        assert self.pending is not None
        return self._diagonal(self.pending).isfinite().all()

    def fold(self, scale: float | Tensor, mass: float | Tensor, decay: float, accept: Tensor) -> None:
        """Take the sum of this step, times `scale`, into the average, and start a new sum.

        Args:
            scale: turns the raw sum into a mean (`1/rows` for A) or a Fisher (`M` for G).
            mass: what the sample weighs.
            decay: `ε`, already raised to the number of optimizer steps since the last fold.
            accept: `[]` bool; where False the sample is refused and only the mass decays.
        """
        assert self.pending is not None
        sample = torch.where(accept, self.pending * scale, 0.0)
        weight = mass * accept.to(self.mass.dtype)
        self.mass.mul_(decay).add_(weight)
        # Nothing held and nothing gained is 0/0: such a step leaves the average as it is.
        gain = torch.where(self.mass > 0, weight / self.mass, 0.0)
        self.average.lerp_(sample, gain.to(sample.dtype))
        self.pending = None

    def trace(self) -> Tensor:
        """`[groups]`."""
        return self._diagonal(self.average).sum(-1)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds; the sum of an unfinished step is, like `.grad`, not part of it."""
        return {"average": self.average, "mass": self.mass}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.average.copy_(tensors["average"])
        self.mass.copy_(tensors["mass"])

    def _diagonal(self, tensor: Tensor) -> Tensor:
        return tensor.diagonal(dim1=-2, dim2=-1) if self.structure is Structure.DENSE else tensor
