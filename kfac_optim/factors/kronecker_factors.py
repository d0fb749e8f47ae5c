"""The two Kronecker factors of a block, as its layer's calls make them."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.second_moments import on_host
from kfac_optim.specs import LayerSpec, Structure
from kfac_optim.utils import value_checks

T = TypeVar("T")


class FactorPair:
    """Keeps `A` and `G` of one block, and the rows behind the pending sum of `A`.

    Attributes:
        a: input factor, of one group where all share their input, or None for the identity.
        g: output factor, or None for the identity.
        rows: rows accumulated since the last fold: of all groups, or of each `[groups]`; a tensor, `[]` at least, where
            only the device knows how many count.
        trace: `LayerStatistics.trace` of the pending sum of `A`; None of a plain sum.
        everywhere: what `counts` of all ranks add up to, where they tell each other in this step; otherwise None.
        refused: non-finite samples refused so far, `[]` int64.
        refused_in_a_row: non-finite samples refused since the last that was accepted, `[]` int64.
    """

    __slots__ = ("_layer", "_masses", "_traces", "a", "everywhere", "g", "refused", "refused_in_a_row", "rows", "trace")

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self.a, self.g = (
            None
            if shape.structure is Structure.IDENTITY
            else Factor(shape.groups, shape.dim, shape.structure, shape.masses, dtype=dtype, device=device)
            for shape in spec.factors()
        )
        self._layer, self._masses = spec.name, spec.masses
        self._traces = 1 if self.a is None else self.a.groups
        self.rows: float | Tensor = 0
        self.trace: Tensor | None = None
        self.everywhere: Tensor | None = None
        self.refused = torch.zeros((), dtype=torch.int64, device=device)
        self.refused_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def accumulate(self, stats: LayerStatistics) -> None:
        """Add one call's moments.

        Raises:
            ValueError: groups have rows of their own, which the layer's spec does not say.
        """
        rows = stats.count
        if isinstance(rows, Tensor) and rows.dim() > 0 and self._masses == 1:
            raise ValueError(
                f"kfac_optim: the groups of layer {self._layer!r} have rows of their own, {list(rows.shape)}, and its "
                "LayerSpec does not say so. Have the adapter give it own_rows=True, or count the rows of all groups."
            )
        if self.a is not None and stats.has_input:
            self.a.add(stats.input_moment(self.a.structure), stats.groups)
        if self.g is not None:
            self.g.add(stats.output_moment(self.g.structure), stats.groups)
        self.rows, self.trace = self.rows + rows, stats.trace

    def add(self, rows: float | Tensor, a: Tensor | None, g: Tensor) -> None:
        """Add moments `Σ a aᵀ`, unless `A` is the identity, and `Σ g gᵀ` of so many rows."""
        assert self.g is not None
        if self.a is not None and a is not None:
            self.a.add(a)
        self.g.add(g)
        self.rows = self.rows + rows

    def has_pending(self) -> bool:
        """Return whether anything was accumulated since the last fold."""
        return _counts(self.rows)

    def fold(self, loss_terms: float | Tensor, decay: float, loss_scale: float | Tensor) -> None:
        """Fold `A = Σ a aᵀ / rows` of mass `rows`, and `G = M Σ g gᵀ` of mass `M`; the loss scale is taken off.

        Where groups have rows of their own, those without any (experts that got no token) keep both averages. What is
        known of other ranks' rows makes of this rank's sample its share of that of all.
        """
        used = self.used()
        possible: bool | Tensor = True
        if isinstance(loss_terms, Tensor):  # stated by the user, and not looked at then
            possible = loss_terms.isfinite() & (loss_terms > 0)
            loss_terms = torch.where(possible, loss_terms, 1)
        if self.everywhere is not None:
            possible = self.everywhere.isfinite().all() & possible
        samples = []
        if self.a is not None:
            samples.append((self.a, self._of_row(self.a, loss_terms, loss_scale), self._by_mass(self.rows)))
        if self.g is not None:
            # Where there was no row the loss did not use the layer, and the zeros are no sample.
            samples.append((self.g, loss_terms / loss_scale**2, loss_terms * used))
        accept = torch.stack([factor.pending_is_finite(scale).all() for factor, scale, _ in samples]).all() & possible
        for factor, scale, mass in samples:
            factor.fold(scale=scale, mass=mass, decay=decay, accept=accept)
        self.refused += ~accept
        self.refused_in_a_row.copy_(torch.where(accept, 0, self.refused_in_a_row + 1))
        self._clear()

    def _of_row(self, a: Factor, loss_terms: float | Tensor, loss_scale: float | Tensor) -> float | Tensor:
        """Return what the sum of `A` is multiplied by, so that it is the mean over rows."""
        rows = self._by_mass(self.rows)
        if not isinstance(rows, Tensor):
            scale: float | Tensor = 1 / rows
        else:  # rows that only the device could count may turn out to be none
            scale = 1 / rows.clamp(min=1).to(a.mass.dtype)
        if self.everywhere is None or self.trace is None:
            return scale
        own = self.counts(loss_terms, loss_scale)
        ratio = torch.where(self.everywhere > 0, own / self.everywhere, 0.0)
        of_rows, of_traces = ratio[: self._masses], ratio[self._masses :]
        change = torch.where(of_rows > 0, of_traces / of_rows, 0.0)  # of two means, here and of all ranks
        return scale * (change.view(-1, 1) if len(change) > 1 else change.squeeze(0))

    def age(self, decay: float, loss_terms: float | Tensor = 0) -> None:
        """Fold without a row: what is held weighs less, and `loss_terms` of the loss add nothing to `G`."""
        terms = self.zeros(loss_terms)
        if self.a is not None:
            self.a.age(decay)
        if self.g is not None:
            self.g.age(decay, terms)
        self._clear()

    def used(self) -> float | Tensor:
        """Return 1 where the step had rows, on any rank as far as is known, and 0 elsewhere.

        A tensor `[]` where the host does not know, and `[groups, 1]` where groups have rows of their own.
        """
        if self.everywhere is not None:
            here = self._by_mass(self.everywhere[: self._masses]) > 0
            return (here & self.everywhere.isfinite().all()).to(self.everywhere.dtype)
        rows, kept = self._by_mass(self.rows), self.a if self.g is None else self.g
        assert kept is not None, "one factor is measured"
        return (rows > 0).to(kept.mass.dtype) if isinstance(rows, Tensor) else int(rows > 0)

    def zeros(self, loss_terms: float | Tensor) -> float | Tensor:
        """Return what zeros weigh in `G`, at a step in which other ranks had rows and this one had none."""
        return loss_terms * self.used() if self.is_told() else loss_terms

    def is_told(self) -> bool:
        """Return whether it is known what all ranks have counted in this step."""
        return self.everywhere is not None

    @property
    def counted(self) -> int:
        """Return how many numbers `counts` gives."""
        return self._masses + self._traces

    def counts(self, loss_terms: float | Tensor, loss_scale: float | Tensor) -> Tensor:
        """Return what ranks add up to know the sample of all: rows, one number or `[groups]`, and then the traces.

        In float64; the traces, as many as `A` has groups, are those of the loss as one process would have it, as the
        terms of `G` are.
        """
        rows = torch.as_tensor(self.rows, dtype=torch.float64, device=self.refused.device).expand(self._masses)
        if self.trace is None:
            return torch.cat([rows, rows.new_zeros(self._traces)])
        terms = torch.as_tensor(loss_terms, dtype=torch.float64, device=rows.device)
        traces = self.trace.to(rows.dtype) * (terms / loss_scale).square()
        return torch.cat([rows, traces.expand(self._traces)])

    def tell(self, everywhere: Tensor) -> None:
        """Take what `counts` of all ranks add up to in this step."""
        self.everywhere = everywhere

    def _by_mass(self, rows: float | Tensor) -> float | Tensor:
        """Return rows in the shape of masses; `[]` of all groups as they are."""
        if not isinstance(rows, Tensor) or rows.dim() == 0:
            return rows
        return rows.view(-1, 1) if self._masses > 1 else rows.squeeze(0)

    def _clear(self) -> None:
        self.rows, self.trace, self.everywhere = 0, None, None

    def averages(self, part: str) -> tuple[Factor, ...]:
        """Return the running averages behind one part of the block's inverse, as `Part.sums` lists them."""
        return of_part(part, self.a, self.g)

    def combine(self) -> None:
        """Compute again what is made of the running averages."""

    def discard(self) -> None:
        for factor in (self.a, self.g):
            if factor is not None:
                factor.pending = None
        self._clear()

    def held(self) -> Tensor:
        """Return whether any sample was ever accepted, `[]` bool."""
        present = [factor for factor in (self.a, self.g) if factor is not None]
        return torch.stack([factor.held() for factor in present]).all()

    def held_groups(self) -> Tensor:
        """Return which groups `held` is true of, `[groups]` bool; `[]` where all have one mass."""
        present = [factor for factor in (self.a, self.g) if factor is not None]
        return torch.stack([factor.held_groups() for factor in present]).all(0)

    def tensors(self) -> dict[str, Any]:
        nested: dict[str, Any] = {"refused": self.refused, "refused_in_a_row": self.refused_in_a_row}
        for name, factor in (("A", self.a), ("G", self.g)):
            if factor is not None:
                nested[name] = factor.tensors()
        return nested

    def ranges(self) -> dict[str, Any]:
        """Tell what these tensors can be, nested alike."""
        nested: dict[str, Any] = {"refused": value_checks.not_negative, "refused_in_a_row": value_checks.not_negative}
        for name, factor in (("A", self.a), ("G", self.g)):
            if factor is not None:
                nested[name] = factor.ranges()
        return nested

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.refused.copy_(tensors["refused"])
        self.refused_in_a_row.copy_(tensors["refused_in_a_row"])
        for name, factor in (("A", self.a), ("G", self.g)):
            if factor is not None:
                factor.load(tensors[name])


def of_part(part: str, a: T | None, g: T | None) -> tuple[T, ...]:
    """Give what belongs to one part of a block (`Part.name`), from the values for `A` and for `G`."""
    assert part in ("A", "G", ""), part
    return tuple(each for name, each in (("A", a), ("G", g)) if each is not None and part in (name, ""))


def _counts(rows: float | Tensor) -> bool:
    """Return whether there may be rows; a number on an accelerator is not waited for."""
    if isinstance(rows, Tensor):
        return not on_host(rows) or bool((rows > 0).any())
    return rows > 0
