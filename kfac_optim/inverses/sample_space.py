"""Gauss-Newton steps by the residuals of one step's examples, without an approximation of the curvature."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kfac_optim.factors.example_rows import RowsByTerm
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.inverses.base import Inverse
from kfac_optim.inverses.kronecker_guess import kronecker_guess
from kfac_optim.inverses.sample_rows import Key, SampleRows
from kfac_optim.inverses.state import InverseState
from kfac_optim.linalg.conjugate_gradients import conjugate_gradients
from kfac_optim.linalg.regularised_systems import solve_gram, solve_tall
from kfac_optim.specs import Cost, LayerSpec, Part
from kfac_optim.utils.validation import check_flag, check_integer, check_number
from kfac_optim.utils.warning import warn

# Rounding errors that are allowed for where a gradient is compared with the residuals that account for it.
_ROUNDINGS = 100
# Conjugate gradients end at such a residual, as a share of the gradient.
_TOLERANCE = 1e-8
_MOST_ITERATIONS = 1000


class SampleState(InverseState):
    """Holds the rows of one step's examples, and the direction of the last step.

    Attributes:
        rows: of the step that is being taken; none once the direction is known.
        scale: what the rows are multiplied by, for `F = ρᵀρ`.
        direction: of the last step, `[groups, out, in]`.
    """

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self.name = spec.name
        self.rows = RowsByTerm(spec.name)
        self.scale: Tensor | float = 1.0
        self.direction = torch.zeros(spec.groups, spec.out_dim, spec.in_dim, dtype=dtype, device=device)
        self._pending = RowsByTerm(spec.name)
        self._was_sampled = False

    def accumulate(self, stats: LayerStatistics) -> None:
        self._pending.add(stats)

    def has_pending(self) -> bool:
        return bool(self._pending)

    def discard(self) -> None:
        self._pending.clear()

    def has_statistics(self) -> bool:
        return self._was_sampled

    def fold(self, loss_terms: float | Tensor, decay: float, loss_scale: float | Tensor = 1.0) -> None:
        self.rows, self._pending = self._pending, RowsByTerm(self.name)
        self.scale = loss_terms**0.5 / loss_scale
        self._was_sampled = True

    def factors(self) -> tuple[None, None]:
        return None, None

    def adopt(self, shadow: Any) -> None:
        pass  # nothing is refreshed

    def setbacks(self) -> tuple[Tensor, Tensor]:
        none = torch.zeros((), dtype=torch.int64, device=self.direction.device)
        return none, none

    def counters(self) -> dict[str, Tensor]:
        return {}

    def tensors(self) -> dict[str, Any]:
        return {"direction": self.direction}

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.direction.copy_(tensors["direction"])


@dataclass(frozen=True)
class SampleSpace(Inverse[SampleState]):
    """Takes exact Gauss-Newton steps by solving for one number per residual (Dangel et al. 2024; SPRING, 2401.10190).

    With the rows `ρ` of all residuals, `F = ρᵀρ` and the gradient `ρᵀs`, the direction is

        Δ = ρᵀ (ρρᵀ + λI)⁻¹ s = (F + λI)⁻¹ ∇L

    which is stable down to the smallest `λ`. With momentum `μ` (SPRING) it is `μΔ₋₁ + ρᵀ(ρρᵀ + λI)⁻¹(s - μρΔ₋₁)`.
    It is for losses of residuals, such as those of physics-informed networks, on batches of at most some thousand
    residuals, where it gains orders of magnitude over first-order methods. `damping` is `λ`; 1e-6 to 1e-12 of the
    largest eigenvalue is usual in float64. Periods, decay and `kl_clip` have no effect: the curvature is that of the
    step's own examples. The estimate must be `ExactGGN(criterion)`, and the loop must call that very criterion, or
    `optimizer.observe`. Go with `step_size=LineSearch()`, or choose a rate.

    Where a block, or the model, has fewer parameters than there are residuals, the least-squares problem is solved by
    QR. Above `dense_limit` both of residuals and of parameters it is solved by conjugate gradients, preconditioned by
    Kronecker factors of the same examples.

    Attributes:
        momentum: `μ`, in [0, 0.999].
        scope: `"joint"`, all layers at once, or `"layer"`, each by itself.
        centred: whether the mean over the examples of each term is taken off the rows, as the natural gradient of
            `log|ψ|` has it (MinSR).
        dense_limit: residuals up to which their matrix is formed.

    Raises:
        TypeError: an attribute is of the wrong kind.
        ValueError: an attribute is out of range.
    """

    momentum: float = 0.0
    scope: Literal["joint", "layer"] = "joint"
    centred: bool = False
    dense_limit: int = 4096

    takes_rows = True
    follows_damping = True

    def __post_init__(self) -> None:
        check_number("momentum of SampleSpace", self.momentum, at_least=0, at_most=0.999)
        if self.scope not in ("joint", "layer"):
            raise ValueError(f'kfac_optim: scope of SampleSpace must be "joint" or "layer", got {self.scope!r}.')
        check_flag("centred of SampleSpace", self.centred, optional=False)
        check_integer("dense_limit of SampleSpace", self.dense_limit)

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> SampleState:
        return SampleState(spec, dtype=dtype, device=device)

    def refresh(self, states: Sequence[SampleState], dampings: Sequence[float]) -> None:
        pass  # the curvature is that of each step

    def apply(self, state: SampleState, grad: Tensor, damping: float) -> Tensor:
        return self.apply_jointly([state], [grad], [damping])[0]

    def apply_jointly(
        self, states: Sequence[SampleState], grads: Sequence[Tensor], dampings: Sequence[float]
    ) -> list[Tensor]:
        if self.scope == "layer":
            return [
                self._solve([state], [grad], [damping])[0]
                for state, grad, damping in zip(states, grads, dampings, strict=True)
            ]
        return self._solve(states, grads, dampings)

    def flops(self, spec: LayerSpec) -> Cost:
        return Cost(refresh=0.0, apply=2.0 * spec.groups * spec.in_dim * spec.out_dim)  # per residual, if it had one

    def parts(self, spec: LayerSpec) -> tuple[Part, ...]:
        return (Part("", 0.0, (), 0, spec.groups * spec.in_dim * spec.out_dim),)

    def _solve(self, states: Sequence[SampleState], grads: Sequence[Tensor], dampings: Sequence[float]) -> list[Tensor]:
        dtype = torch.float64 if grads[0].device.type != "mps" else torch.float32
        keys, residuals = _residuals(states)
        s = torch.cat([residuals[key].to(dtype) for key in keys]) * states[0].scale
        if self.centred:
            s = torch.cat([part - part.mean() for part in torch.split(s, list(keys.values()))])
        # λ that differs from block to block is a change of units: ρ/√λ with a ridge of 1.
        least = min(dampings)
        units = [1.0 if least <= 0 else (least / damping) ** 0.5 for damping in dampings]
        rows = [
            SampleRows(keys, state.rows.terms, state.scale * unit, self.centred, grad, dtype)
            for state, grad, unit in zip(states, grads, units, strict=True)
        ]
        gradient = [grad.to(dtype) * unit for grad, unit in zip(grads, units, strict=True)]
        factor, rest = _split(rows, gradient, s, _ROUNDINGS * torch.finfo(grads[0].dtype).eps)
        s = s * factor
        before = [state.direction.to(dtype) / unit for state, unit in zip(states, units, strict=True)]
        target = s
        if self.momentum > 0:
            target = s - self.momentum * _sum([each.along(part) for each, part in zip(rows, before, strict=True)])
        found = self._range(rows, target, least, gradient)
        if self.momentum > 0:
            found = [part + self.momentum * old for part, old in zip(found, before, strict=True)]
        if rest is not None:
            found = self._with_rest(rows, found, rest, least)
        directions = [part * unit for part, unit in zip(found, units, strict=True)]
        for state, direction in zip(states, directions, strict=True):
            state.direction.copy_(direction)
            state.rows.clear()
        return [direction.to(grad.dtype) for direction, grad in zip(directions, grads, strict=True)]

    def _range(self, rows: Sequence[SampleRows], target: Tensor, ridge: float, like: Sequence[Tensor]) -> list[Tensor]:
        """Return `ρᵀ(ρρᵀ + λI)⁻¹ target`, by block."""
        count, width = len(target), sum(part.numel() for part in like)
        if width < count and width <= self.dense_limit:
            solution = solve_tall(torch.cat([each.dense() for each in rows], 1), target, ridge)
            sizes = [part.numel() for part in like]
            return [part.view(each.shape) for part, each in zip(torch.split(solution, sizes), like, strict=True)]
        if count <= self.dense_limit:
            weights = solve_gram(_sum([each.gram() for each in rows]), target, ridge)
            return [each.combined(weights) for each in rows]

        def product(vector: Sequence[Tensor]) -> list[Tensor]:
            along = _sum([each.along(part) for each, part in zip(rows, vector, strict=True)])
            return [each.combined(along) + ridge * part for each, part in zip(rows, vector, strict=True)]

        right = [each.combined(target) for each in rows]
        guess = [kronecker_guess(each, ridge) for each in rows]
        parts, iterations = conjugate_gradients(
            product,
            right,
            lambda vector: [apply(part) for apply, part in zip(guess, vector, strict=True)],
            tolerance=_TOLERANCE,
            most=_MOST_ITERATIONS,
        )
        if iterations == _MOST_ITERATIONS:
            warn(
                f"kfac_optim: the conjugate gradients of SampleSpace did not reach a residual of {_TOLERANCE:g} in "
                f"{iterations} iterations, and the step is not exact. Raise damping, or raise dense_limit, which is "
                f"{self.dense_limit}, to the number of residuals."
            )
        return parts

    def _with_rest(
        self, rows: Sequence[SampleRows], found: Sequence[Tensor], rest: Sequence[Tensor], ridge: float
    ) -> list[Tensor]:
        """Add `(F + λI)⁻¹` times a part of the gradient that no residual accounts for, such as that of a penalty."""
        if ridge <= 0:
            raise ValueError(
                "kfac_optim: a part of the gradient comes from no residual of the criterion, and without damping "
                "SampleSpace has no curvature for it. Set damping above 0, or observe that part of the loss as well."
            )
        along = _sum([each.along(part) for each, part in zip(rows, rest, strict=True)])
        inside = self._range(rows, along, ridge, rest)
        return [part + (other - within) / ridge for part, other, within in zip(found, rest, inside, strict=True)]


def _residuals(states: Sequence[SampleState]) -> tuple[dict[Key, int], dict[Key, Tensor]]:
    """Return the examples and the residuals of all terms of a step."""
    keys: dict[Key, int] = {}
    residuals: dict[Key, Tensor] = {}
    for state in states:
        for key, rows in state.rows.terms.items():
            if rows.residual is None or rows.examples is None:
                raise RuntimeError(
                    f"kfac_optim: SampleSpace has rows of layer {state.name!r}, but not the residuals they belong to: "
                    "either the loss did not call the criterion that estimate=ExactGGN(criterion) names (call that "
                    "very object, residual first, not compiled; or optimizer.observe(residual)), or what it reads does "
                    "not hold the examples in the order in which the layer does, or examples interact in the model, "
                    "as by BatchNorm."
                )
            keys[key], residuals[key] = rows.examples, rows.residual
    if not keys:
        raise RuntimeError(
            f"kfac_optim: layer {states[0].name!r} has a gradient, but SampleSpace has seen no residual of this step. "
            "Call the criterion that estimate=ExactGGN(criterion) names in each step, or optimizer.observe(residual)."
        )
    keys = dict(sorted(keys.items()))
    return keys, residuals


def _split(
    rows: Sequence[SampleRows], gradient: Sequence[Tensor], s: Tensor, rounding: float
) -> tuple[Tensor, list[Tensor] | None]:
    """Return what the gradient was multiplied by after backward, as by clipping, and the part that `ρᵀs` lacks.

    That part is None where it is no more than rounding, of sums of as large terms as `ρ` and `s` have.
    """
    known = [each.combined(s) for each in rows]
    square = _sum([(part * part).sum() for part in known])
    inner = _sum([(part * other).sum() for part, other in zip(known, gradient, strict=True)])
    factor = torch.where(square > 0, inner / square, 1.0)
    rest = [other - factor * part for part, other in zip(known, gradient, strict=True)]
    left = _sum([(part * part).sum() for part in rest])
    largest = _sum([each.square() for each in rows]) * s.square().sum() * factor.square()
    return factor, rest if bool(left > rounding**2 * largest) else None


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
