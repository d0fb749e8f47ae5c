"""The state of EKFAC: the factors of a block, their eigenbases, and the second moments of the gradient in these."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.kronecker_factors import of_part
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.inverses.eigenbasis.base import EigenState, Spectrum, outer
from kfac_optim.inverses.state import Result
from kfac_optim.specs import LayerSpec, Structure
from kfac_optim.utils import value_checks
from kfac_optim.utils.tensor_storage import copy_held


class Bases(NamedTuple):
    """Bases of `A` and `G`, `[groups, d, d]`; None for a side that has none.

    `ready`: whether there was one for every group, `[]` bool; for each, `[groups, 1]`, where they have masses of their
    own.
    """

    a: Tensor | None
    g: Tensor | None
    ready: Tensor


class EKFACState(EigenState):
    """Holds the factors of one block, their eigenbases, and the second moments of the gradient in these.

    Attributes:
        scales: running average of `S`, kept as `[groups, out · in]`; its mass is what was sampled since the block first
            had a basis, and 0 where an identity leaves nothing to sample.
        applied: `S` of the samples of all ranks as of the last refresh, which is what divides the gradient, `[groups,
            out · in]`; `scales` then holds what this rank has sampled since. None where they are one, as on one process
            (but from when it loads a checkpoint of several until the next refresh).
        measured: whether `S` is sampled: no factor is an identity.
        expressed: whether the samples since the last fold can all be had from rows.
        substituted: folds in which they could not, `[]` int64.
        refused: samples of `S` refused alone, where those of the factors were finite, `[]` int64.
        refused_in_a_row: such samples since the last that was accepted, `[]` int64.
    """

    def __init__(self, spec: LayerSpec, *, per_example: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype=dtype, device=device)
        self._per_example = per_example
        self.shape = (spec.groups, spec.out_dim, spec.in_dim)
        compute = self.condition.dtype
        numbers = spec.out_dim * spec.in_dim
        self.scales = Factor(spec.groups, numbers, Structure.DIAGONAL, spec.masses, dtype=compute, device=device)
        self.applied: Tensor | None = None
        self.measured = Structure.IDENTITY not in spec.structure
        self.expressed = True
        self.substituted = torch.zeros((), dtype=torch.int64, device=device)
        self.refused = torch.zeros((), dtype=torch.int64, device=device)
        self.refused_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def second_moments(self) -> Tensor:
        """Return `S`, `[groups, out, in]`; a view."""
        return self.scales.packed.view(self.shape)

    @property
    def to_apply(self) -> Tensor:
        """Return what divides the gradient, `[groups, out, in]`; a view."""
        return (self.scales.packed if self.applied is None else self.applied).view(self.shape)

    def results(self, part: str) -> tuple[Result, ...]:
        """Return bases, `solved` and `S`; eigenvalues are for the rank that refreshes.

        Samples of `S` stay on each rank, so that what is applied is another tensor there. Where it is not sampled it is
        one of the results, which may be dropped.
        """
        bases = [spectrum.basis for spectrum in of_part(part, self.a, self.g) if spectrum.basis is not None]
        scales = self.scales.packed if self.applied is None else self.applied
        if scales is self.scales.packed and self.measured:
            scales = self.second_moments  # a view: to drop it leaves the samples
        return *(Result(each, measuring=self.measured) for each in (*bases, self.solved)), Result(scales)

    def sampled(self) -> dict[str, Tensor]:
        """Return what folds made of the samples, by its name in checkpoints; no copies."""
        return {
            "S": self.scales.packed,
            "S_mass": self.scales.mass,
            "S_substituted": self.substituted,
            "S_refused": self.refused,
            "S_refused_in_a_row": self.refused_in_a_row,
        }

    def ranges(self) -> dict[str, Any]:
        return {
            **super().ranges(),
            **dict.fromkeys(self.sampled(), value_checks.not_negative),
            **dict.fromkeys(("S", "S_applied"), value_checks.second_moments),
        }

    def stacked(self, others: Sequence[Self]) -> None:
        """Return None: the second moments of each block are one matrix for all its groups."""

    def standing(self) -> Bases:
        """Return the bases that `S` stands in, to be kept while others take their place."""
        a, g = (None if basis is None else basis.clone() for basis in (_basis(self.a), _basis(self.g)))
        ready = self.solved.all() if self.scales.mass.dim() == 0 else self.solved.unsqueeze(1).clone()
        return Bases(a, g, ready)

    def carry_over(self, old: Bases) -> None:
        """Bring `S` from the bases before to the present ones: of `U diag(S) Uᵀ` take the diagonal in the new basis.

        Entry i is `Σ_j S_j (u_j · u'_i)²`: none is negative, their sum stays, and eigenvectors that change sign or
        place keep theirs; in bases that are the same all stay, to the bit. What was sampled before there was a basis is
        nothing to carry over.
        """
        moments = self.second_moments
        a, g = _basis(self.a), _basis(self.g)
        if old.a is not None and a is not None:
            moments.copy_(moments @ _squared_overlaps(old.a, a))
        if old.g is not None and g is not None:
            moments.copy_(_squared_overlaps(old.g, g).mT @ moments)
        self.scales.mass.mul_(old.ready)
        moments.copy_(torch.where(self.scales.mass.view(-1, 1, 1) > 0, moments, self.eigenvalues()))

    def expected(self) -> Tensor:
        """Return `S` as the factors' present averages would have it, `[groups, out, in]` or of size 1 along an axis.

        That is `diag(U_GᵀGU_G) diag(U_AᵀAU_A)ᵀ` in the present bases.
        """
        sides = ((self.pair.g, self.g), (self.pair.a, self.a))
        return outer(*(_diagonal_in(factor, spectrum) for factor, spectrum in sides), like=self.condition)

    def accumulate(self, stats: LayerStatistics) -> None:
        super().accumulate(stats)
        if not (self.measured and self.expressed):
            return
        stats = stats.of_call
        call = getattr(stats, "call", None)
        if not isinstance(call, LayerCall) or call.earlier is None:
            if stats.has_input:
                self._add(stats)
        elif call.input is None:
            self.forget_pending()
            self.expressed = False
        else:
            # Backwards through one call count as one of their sum: what the earlier ones gave is taken back.
            self._add(stats)
            self._add(_without_latest(stats, call), sign=-1)

    def discard(self) -> None:
        super().discard()
        self.forget_pending()

    def fold(self, loss_terms: float | Tensor, decay: float, loss_scale: float | Tensor = 1.0) -> None:
        used, refused = self.pair.used(), self.pair.refused.clone()
        super().fold(loss_terms, decay, loss_scale)
        accepted = self.pair.refused == refused
        if self.measured:
            self._fold_sample(loss_terms, used, decay, loss_scale, accepted)
        elif self.applied is None and not self.scales.packed.is_meta:
            # Among several ranks the refresh says what it is, of the samples of all.
            self.second_moments.copy_(self.expected())
        self.forget_pending()

    def averages(self, part: str) -> tuple[Factor, ...]:
        return super().averages(part) + ((self.scales,) if self.measured else ())

    def age(self, decay: float, loss_terms: float | Tensor = 0) -> None:
        terms = self.pair.zeros(loss_terms)
        super().age(decay, loss_terms)
        if self.measured:
            self.scales.age(decay, terms)

    def take(self, part: str, received: Mapping[int, Tensor]) -> None:
        last = len(self.results(part)) - 1  # S
        if not self.measured:
            super().take(part, received)
            if last in received:
                self.applied = self.scales.packed
            return
        # On the rank that refreshed the bases may be those it has: then nothing is carried over twice.
        old = self.standing()
        super().take(part, {index: tensor for index, tensor in received.items() if index != last})
        self.carry_over(old)
        if last in received:
            self.applied = received[last].to(self.condition.dtype, copy=True).view_as(self.scales.packed)

    def setbacks(self) -> tuple[Tensor, Tensor]:
        refused, failed = super().setbacks()
        return torch.maximum(refused, self.refused_in_a_row), failed

    def counters(self) -> dict[str, Tensor]:
        counted = super().counters()
        counted["refused_statistics"] = counted["refused_statistics"] + self.refused
        return {**counted, "substituted_statistics": self.substituted}

    def tensors(self) -> dict[str, Any]:
        held = self.held()
        if self.measured:
            if self.applied is None:  # no alias of S: checkpoints are also read in place
                held["S_applied"] = self.scales.packed.clone()
            held["S_applied_apart"] = torch.tensor(self.applied is not None)
        return held

    def held(self) -> dict[str, Any]:
        applied = {"S_applied": self.applied} if self.measured and self.applied is not None else {}
        return {**super().tensors(), **self.sampled(), **applied}

    def load(self, tensors: Mapping[str, Any]) -> None:
        super().load(tensors)
        for name, tensor in self.sampled().items():
            copy_held(tensor, tensors[name])
        self.applied = None
        if self.measured and bool(tensors["S_applied_apart"]):
            applied = tensors["S_applied"]
            self.applied = torch.empty_like(self.scales.packed, device="meta" if applied.is_meta else None)
            copy_held(self.applied, applied)

    def adopt(self, shadow: Self) -> None:
        old = self.standing()
        super().adopt(shadow)
        self.renew(old)

    def renew(self, old: Bases) -> None:
        """Bring `S` into the new bases after a refresh, to be applied as it is now."""
        self.carry_over(old)
        if self.measured:
            self.applied = None  # until `take` says otherwise

    def _add(self, stats: LayerStatistics, sign: int = 1) -> None:
        """Add the squares of one call to the sum of this step, or take them back."""
        a_basis, g_basis = _basis(self.a), _basis(self.g)
        if stats.opposed:
            a_basis, g_basis = g_basis, a_basis
        squares = stats.squared_gradients(a_basis, g_basis, dtype=self.condition.dtype, per_example=self._per_example)
        if stats.opposed:
            squares = squares.mT
        self.scales.add(sign * squares.flatten(1))

    def _fold_sample(
        self,
        loss_terms: float | Tensor,
        used: float | Tensor,
        decay: float,
        loss_scale: float | Tensor,
        accepted: Tensor,
    ) -> None:
        scales = self.scales
        if isinstance(loss_terms, Tensor):  # what was refused may be the number of terms itself
            loss_terms = torch.where(accepted.to(loss_terms.device), loss_terms, 1)
        scale = loss_terms / loss_scale**2
        if not self.expressed:
            scales.pending, scale = self.expected().expand(self.shape).flatten(1).clone(), 1.0
            self.substituted += 1
        if scales.pending is None:
            scales.pending = torch.zeros_like(scales.packed)
            used = 0
        scales.pending.clamp_(min=0)  # what was taken back leaves rounding errors
        finite = scales.pending_is_finite(scale).all()
        scales.fold(scale=scale, mass=loss_terms * used, decay=decay, accept=accepted & finite)
        alone = accepted & ~finite
        self.refused += alone
        in_a_row = self.refused_in_a_row
        in_a_row.copy_(torch.where(accepted, (in_a_row + 1) * alone, in_a_row))

    def forget_pending(self) -> None:
        self.scales.pending = None
        self.expressed = True


def _basis(spectrum: Spectrum | None) -> Tensor | None:
    return None if spectrum is None else spectrum.basis


def _squared_overlaps(old: Tensor, new: Tensor) -> Tensor:
    """Return `(u_j · u'_i)²`, `[groups, d, d]`; of a basis that is the same exactly the identity."""
    same = (old == new).flatten(1).all(1)[:, None, None]
    identity = torch.eye(old.shape[-1], dtype=old.dtype, device=old.device)
    return torch.where(same, identity, (old.mT @ new).square())


def _diagonal_in(factor: Factor | None, spectrum: Spectrum | None) -> Tensor | None:
    """Return `diag(Uᵀ F U)`, `[groups, d]`."""
    if factor is None or spectrum is None:
        return None
    average = factor.average.to(spectrum.values.dtype)
    if spectrum.basis is None:
        return average
    return (spectrum.basis * (average @ spectrum.basis)).sum(-2).clamp(min=0)


def _without_latest(stats: LayerStatistics, call: LayerCall) -> LayerStatistics:
    """Return `stats` as they were before the backward they come from, which was not the first through its call."""
    assert call.earlier is not None
    before = copy.copy(stats)
    for name in list(vars(before)):
        if isinstance(getattr(type(before), name, None), cached_property):
            delattr(before, name)
    vars(before)["call"] = replace(call, gradient=call.earlier, earlier=None)
    return before
