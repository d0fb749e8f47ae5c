"""One Kronecker factor: a debiased running average in which every sample weighs its mass."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.linalg.sketches import nystrom, sketch_directions
from kfac_optim.linalg.triangles import pack_triangle, packed_diagonal, unpack_triangle
from kfac_optim.specs import FactorShape, Sketched, Structure
from kfac_optim.utils import value_checks
from kfac_optim.utils.precision import at_least_float32


class Elsewhere(NamedTuple):
    """Holds what another rank, which keeps an average, has said of it."""

    trace: Tensor
    """`[groups]`."""
    mass: Tensor
    """`[]`, the largest where groups have masses of their own."""


class Factor:
    """Keeps a mass-weighted exponential average `S` of second moments.

    With `w` the mass held and `n` the mass behind a new sample,

        w ← ε·w + n,    S ← S + (n / w)·(sample − S).

    The first sample is taken whole, so the average is unbiased from the start; `ε = 1` is a plain mean. As the
    mass travels with the average, two averages merge exactly: `(w₁S₁ + w₂S₂) / (w₁ + w₂)`. Where groups have rows of
    their own, as experts, each has a mass of its own, and one without rows in a step keeps its average.

    Within a step, moments are summed as they are (`add`) and normalised once (`fold`): only then is it known
    how many rows and loss terms the step had.

    Where several ranks see samples each keeps an average of its own share. From time to time the shares go to one
    rank, which merges them (`packed`, `merge`), and the others begin again from nothing (`forget`).

    A dense average is symmetric, and kept as a triangle: whole matrices (`average`) are for refreshes and for users,
    and what every step does is done without them. Of a sketched one the products `S Ω` and the trace are kept, which
    are linear in `S`, so that all of this holds for them.

    Attributes:
        structure: dense, diagonal or sketched.
        dim: `d`.
        packed: the average as it is kept and sent: triangles `[groups, d(d + 1)/2]` (dense, see `linalg.triangles`),
            diagonals `[groups, d]`, or sketches with the trace behind them, `[groups, d·columns + 1]`.
        mass: `[]`, or `[groups, 1]` of their own; on the factor's device so that refusing a sample needs no host
            synchronisation.
        pending: raw sum since the last fold, or None: of a dense factor `[groups, d, d]`, of which a triangle counts,
            otherwise shaped like `packed`.
        elsewhere: the trace and mass of the whole average, where another rank merges it; the one here is then this
            rank's share, and not solved for here. It is no part of checkpoints, as every merge sends it again.
    """

    __slots__ = ("dim", "elsewhere", "mass", "packed", "pending", "structure")

    def __init__(
        self,
        groups: int,
        dim: int,
        structure: Structure | Sketched,
        masses: int = 1,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        numbers = FactorShape(structure, 1, dim).packed
        self.structure = structure
        self.dim = dim
        self.packed = torch.zeros(groups, numbers, dtype=dtype, device=device)
        shape = () if masses == 1 else (masses, 1)
        self.mass = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.pending: Tensor | None = None
        self.elsewhere: Elsewhere | None = None

    @property
    def groups(self) -> int:
        return len(self.packed)

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def average(self) -> Tensor:
        """Return `[groups, d, d]`, a new tensor; of a diagonal factor `packed` itself, `[groups, d]`.

        Of a sketched factor it is what the sketch tells: the matrix of its eigenpairs (`linalg.nystrom`), with one
        eigenvalue for all other directions, by which it has the trace of the factor.
        """
        if isinstance(self.structure, Sketched):
            sketch = self.sketch().to(self.mass.dtype)
            pairs = nystrom(sketch, sketch_directions(self.dim, self.structure.columns, like=sketch))
            left = self.trace().to(sketch.dtype).unsqueeze(-1) - pairs.values.sum(-1, keepdim=True)
            rest = left.clamp(min=0) / (self.dim - self.structure.columns)
            matrix = pairs.vectors * (pairs.values - rest).unsqueeze(-2) @ pairs.vectors.mT
            matrix.diagonal(dim1=-2, dim2=-1).add_(rest)
            return matrix.to(self.dtype)
        return unpack_triangle(self.packed, self.dim) if self._is_dense else self.packed

    def sketch(self) -> Tensor:
        """Return the products `S Ω` of a sketched average, `[groups, d, columns]`, a view."""
        return self.packed[:, :-1].view(self.groups, self.dim, -1)

    def diagonal(self) -> Tensor:
        """Give the diagonal of an average that is no sketch, `[groups, d]`; a copy where the average is dense."""
        assert not isinstance(self.structure, Sketched)
        return torch.cat(packed_diagonal(self.packed, self.dim), -1) if self._is_dense else self.packed

    def add(self, moment: Tensor, groups: slice | None = None) -> None:
        """Add raw second moments to the sum of this step, shaped like `pending` or one for all groups.

        Sums are at least in float32: one in bfloat16 stops growing at 256 equal moments.

        Args:
            moment: the moments.
            groups: which groups they are of, where not of all.
        """
        if groups is None and self.pending is None:
            self.pending = moment
            return
        dtype = at_least_float32(moment.dtype)
        if self.pending is None:
            self.pending = moment.new_zeros(self.groups, *moment.shape[1:], dtype=dtype)
        elif self.pending.dtype != dtype:
            self.pending = self.pending.to(dtype)
        if groups is not None:
            self.pending[groups] += moment
        elif self.pending.shape == moment.shape:
            self.pending += moment
        else:
            self.pending = self.pending + moment

    def pending_is_finite(self, scale: float | Tensor = 1.0) -> Tensor:
        """Return whether the pending sum times `scale` of `fold` is finite, `[groups]` bool.

        By Cauchy-Schwarz it is where its diagonal is, or its trace.
        """
        assert self.pending is not None
        if isinstance(self.structure, Sketched):
            sizes = self.pending[:, -1:]
        else:
            sizes = self.pending.diagonal(dim1=-2, dim2=-1) if self._is_dense else self.pending
        return (sizes * scale).to(self.dtype).isfinite().all(-1)

    def fold(self, scale: float | Tensor, mass: float | Tensor, decay: float, accept: Tensor) -> None:
        """Take the sum of this step, times `scale`, into the average, and start a new sum.

        Args:
            scale: turns the raw sum into a mean (`1/rows` for A) or a Fisher (`M` for G); `[groups, 1]` where each has
                its own.
            mass: what the sample weighs; where groups have masses of their own `[groups, 1]`, or one for all.
            decay: `ε`, already raised to the number of optimizer steps since the last fold.
            accept: `[]` bool; where False the sample is refused and only the mass decays.
        """
        self.take(scale, accept, gain_of(self.mass, mass, decay, accept))

    def take(self, scale: float | Tensor, accept: Tensor, gain: Tensor) -> None:
        """Take the sum of this step into the average by a gain that is known, and otherwise do as `fold` does."""
        assert self.pending is not None
        sample = pack_triangle(self.pending).mul_(scale) if self._is_dense else self.pending * scale
        sample = sample.to(self.dtype).masked_fill_(~accept, 0)
        self.packed.lerp_(sample, gain.to(self.dtype))
        self.pending = None

    def age(self, decay: float, mass: float | Tensor = 0) -> None:
        """Fold zeros that weigh `mass`; if they weigh nothing the average stays as it is and its mass decays."""
        if isinstance(mass, Tensor):  # stated by the user, and not looked at
            mass = torch.where(mass.isfinite() & (mass > 0), mass, 0)
        self.mass.mul_(decay).add_(mass)
        gain = torch.where(self.mass > 0, mass / self.mass, 0.0)
        self.packed.mul_((1 - gain).to(self.dtype))

    def merge(self, total: Tensor, mass: Tensor) -> None:
        """Take in the averages of other ranks; where they have no mass this one stays as it is, to the bit.

        Args:
            total: `Σ w·S` of theirs, with as many numbers as `packed`, in the dtype of `mass` or a narrower one; it may
                be overwritten.
            mass: `Σ w`, as many numbers as `mass` here.
        """
        total, mass = total.to(self.mass.dtype).view(self.packed.shape), mass.view(self.mass.shape)
        any_held = mass > 0
        self.mass.add_(mass)
        gain = torch.where(any_held, mass / self.mass, 0.0)
        # In place, as both may be large; and in the dtype of masses: a narrow average is rounded once.
        kept = self.packed.to(total.dtype)
        torch.lerp(kept, total.div_(mass), gain.to(total.dtype), out=total)
        self.packed.copy_(torch.where(any_held, total, kept, out=total))

    def forget(self) -> None:
        """Begin the average again from nothing, in place; the sum of this step stays."""
        self.packed.zero_()
        self.mass.zero_()

    def held(self) -> Tensor:
        """Return whether any sample was ever accepted, here or, as far as is known, elsewhere; `[]` bool."""
        held = (self.mass > 0).any()
        return held if self.elsewhere is None else held | (self.elsewhere.mass > 0)

    def held_groups(self) -> Tensor:
        """Return which groups `held` is true of, `[groups]` bool; `[]` where all have one mass."""
        held = self.mass > 0
        held = held if self.elsewhere is None else held | (self.elsewhere.mass > 0)
        return held.squeeze(-1) if held.dim() > 0 else held

    def trace(self) -> Tensor:
        """Return the trace of the whole average, `[groups]`, also if another rank keeps it."""
        if self.elsewhere is not None:
            return self.elsewhere.trace
        return self.packed[:, -1] if isinstance(self.structure, Sketched) else self.diagonal().sum(-1)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds; the sum of an unfinished step is, like `.grad`, not part of it."""
        return {"average": self.packed, "mass": self.mass}

    def ranges(self) -> dict[str, value_checks.Rule]:
        """Tell what these tensors can be."""
        rule: value_checks.Rule = value_checks.second_moments
        if self._is_dense:
            rule = value_checks.positive(lambda packed: torch.cat(packed_diagonal(packed, self.dim), -1))
        elif isinstance(self.structure, Sketched):
            rule = value_checks.positive(lambda packed: packed[:, -1:])
        return {
            "average": rule,
            "mass": value_checks.not_negative,
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.packed.copy_(tensors["average"])
        self.mass.copy_(tensors["mass"])

    @property
    def _is_dense(self) -> bool:
        return self.structure is Structure.DENSE


def gain_of(held: Tensor, mass: float | Tensor, decay: float, accept: Tensor) -> Tensor:
    """Return by how much a new sample counts in an average, in the shape of its mass.

    Args:
        held: the mass of the average, which is brought up to date in place; masses of several averages may be stacked.
        mass: the mass of the sample.
        decay: the decay, as for `Factor.fold`.
        accept: whether the sample is accepted, as for `Factor.fold`.
    """
    weight = mass * accept.to(held.dtype)
    held.mul_(decay).add_(weight)
    # Nothing held and nothing gained is 0/0: such a step leaves the average as it is.
    return torch.where(held > 0, weight / held, 0.0)


def averages_of(factors: Sequence[Factor]) -> Tensor:
    """Return the averages of factors of one structure and size, none of them sketched, in a new tensor.

    Triangles are unpacked in one go: of small factors that takes longer to launch than to do.

    Returns:
        `[groups of all, d, d]`, or `[groups of all, d]` of diagonal factors.
    """
    first, packed = factors[0], torch.cat([factor.packed for factor in factors])
    return unpack_triangle(packed, first.dim) if first.structure is Structure.DENSE else packed


def traces_of(factors: Sequence[Factor]) -> Tensor:
    """Return the traces of factors of one structure and size, `[groups of all]`; see `Factor.trace`."""
    if factors[0].structure is not Structure.DENSE or any(factor.elsewhere is not None for factor in factors):
        return torch.cat([factor.trace() for factor in factors])
    halves = zip(*(packed_diagonal(factor.packed, factor.dim) for factor in factors), strict=True)
    return torch.cat([torch.cat(half) for half in halves], -1).sum(-1)
