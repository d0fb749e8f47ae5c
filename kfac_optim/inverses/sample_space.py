"""Gauss-Newton steps by the residuals of one step's examples, without an approximation of the curvature."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kfac_optim.factors.example_rows import RowsByTerm
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.inverses.base import Inverse
from kfac_optim.inverses.sample_rows import Key, SampleRows
from kfac_optim.inverses.sample_system import SampleSystem, total
from kfac_optim.inverses.state import InverseState
from kfac_optim.specs import Cost, LayerSpec, Part
from kfac_optim.utils.validation import check_flag, check_integer, check_number

# Rounding errors that are allowed for where a gradient is compared with the residuals that account for it.
_ROUNDINGS = 100

# The same for the rows, in units of the coarsest dtype in backward. They are few, as a smaller penalty is not seen.
_ROUNDINGS_OF_ROWS = 8


class SampleState(InverseState):
    """Holds the rows of one step's examples, and the direction of the last step.

    Attributes:
        rows: the rows of the step that is being taken; none once the direction is known.
        scale: what the rows are multiplied by, for `F = ρᵀρ`.
        direction: the direction of the last step, `[groups, out, in]`.
        solved: the system that this step's direction was found by, for as long as the step lasts.
        unit: what the block's part of that system is multiplied by.
    """

    def __init__(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self.name = spec.name
        self.rows = RowsByTerm(spec.name)
        self.scale: Tensor | float = 1.0
        self.solved: SampleSystem | None = None
        self.unit = 1.0
        self.direction = torch.zeros(spec.groups, spec.out_dim, spec.in_dim, dtype=dtype, device=device)
        self._pending = RowsByTerm(spec.name)
        self._was_sampled = False

    def accumulate(self, stats: LayerStatistics) -> None:
        self._pending.add(stats)

    def has_pending(self) -> bool:
        return bool(self._pending)

    def discard(self) -> None:
        self._pending.clear()

    def end_step(self) -> None:
        self.rows.clear()
        self.solved = None

    def forget_step(self) -> None:
        self.direction.zero_()

    def has_statistics(self) -> bool:
        return self._was_sampled

    def fold(self, loss_terms: float | Tensor, decay: float, loss_scale: float | Tensor = 1.0) -> None:
        self.rows, self._pending = self._pending, RowsByTerm(self.name)
        # The loss of an empty batch has no terms, and there are no rows that would be scaled.
        is_empty = not isinstance(loss_scale, Tensor) and loss_scale == 0
        self.scale = 1.0 if is_empty else loss_terms**0.5 / loss_scale
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
    largest eigenvalue is usual in float64. Periods, decay and `kl_clip` have no effect on its layers: the curvature is
    that of the step's own examples. The trust region bounds the steps of layers that have another inverse as if they
    were alone. The estimate must be `ExactGGN(criterion)`, and the loop must call that very criterion, or
    `optimizer.observe`. Go with `step_size=LineSearch()`, or choose a rate.

    Where a block, or the model, has fewer parameters than there are residuals, the least-squares problem is solved by
    QR. Above `dense_limit` both of residuals and of parameters it is solved by conjugate gradients, preconditioned by
    Kronecker factors of the same examples.

    A part of the gradient that comes from no residual, such as that of a penalty in the loss, is divided by `λ`. A part
    that is no larger than rounding errors is left out: under autocast, or in TensorFloat-32, that may be a penalty
    whose gradient is smaller than the loss's. Weight decay by `l2_in_curvature=True` is never left out.

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
        self,
        states: Sequence[SampleState],
        grads: Sequence[Tensor],
        dampings: Sequence[float],
        decays: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        if self.scope == "layer":
            alone = [None] * len(states) if decays is None else [[decay] for decay in decays]
            return [
                self._solve([state], [grad], [damping], decay, states)[0]
                for state, grad, damping, decay in zip(states, grads, dampings, alone, strict=True)
            ]
        return self._solve(states, grads, dampings, decays, states)

    def flops(self, spec: LayerSpec) -> Cost:
        return Cost(refresh=0.0, apply=2.0 * spec.groups * spec.in_dim * spec.out_dim)  # per residual, if it had one

    def parts(self, spec: LayerSpec) -> tuple[Part, ...]:
        return (Part("", 0.0, (), 0, spec.groups * spec.in_dim * spec.out_dim),)

    def _solve(
        self,
        states: Sequence[SampleState],
        grads: Sequence[Tensor],
        dampings: Sequence[float],
        decays: Sequence[Tensor] | None,
        of_step: Sequence[SampleState],
    ) -> list[Tensor]:
        """Return the directions of some blocks; `of_step` has the states of all with this inverse, for any scope."""
        dtype = torch.float64
        keys, residuals = _residuals(states)
        if not keys:
            return self._without_examples(states, grads, dampings, of_step)
        s = torch.cat([residuals[key].to(dtype) for key in keys]) * states[0].scale
        if not bool(s.isfinite().all()):
            raise RuntimeError(
                f"kfac_optim: the residuals that SampleSpace has of this step, times the root of the number of terms, "
                f"are not finite at layer {states[0].name!r}. Look for a number that is not above 0 in what was passed "
                "to set_loss_terms, or for a residual that is not finite though its gradient is."
            )
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
        decay = None
        if decays is not None:  # known apart from the gradient of the loss, however that is rounded
            decay = [part.to(dtype) * unit for part, unit in zip(decays, units, strict=True)]
            gradient = [part - of_decay for part, of_decay in zip(gradient, decay, strict=True)]
        of_rows = _ROUNDINGS_OF_ROWS * max(state.rows.rounding for state in states)
        factor, rest = _split(rows, gradient, s, max(_ROUNDINGS * torch.finfo(grads[0].dtype).eps, of_rows))
        if decay is not None:
            rest = decay if rest is None else [part + of_decay for part, of_decay in zip(rest, decay, strict=True)]
        s = s * factor
        system = SampleSystem(rows, least, [grad.shape for grad in grads], self.dense_limit)
        before = [state.direction.to(dtype) / unit for state, unit in zip(states, units, strict=True)]
        target = s
        if self.momentum > 0:
            target = s - self.momentum * system.along(before)
        found = system.solve(target)
        if self.momentum > 0:
            found = [part + self.momentum * old for part, old in zip(found, before, strict=True)]
        if rest is not None:
            found = _with_rest(system, found, rest)
        directions = [part * unit for part, unit in zip(found, units, strict=True)]
        for state, direction, unit in zip(states, directions, units, strict=True):
            state.direction.copy_(direction)
            state.solved, state.unit = system, unit
        return [direction.to(grad.dtype) for direction, grad in zip(directions, grads, strict=True)]

    def _without_examples(
        self,
        states: Sequence[SampleState],
        grads: Sequence[Tensor],
        dampings: Sequence[float],
        of_step: Sequence[SampleState],
    ) -> list[Tensor]:
        """Return the step of blocks that no residual reaches, `μΔ₋₁ + ∇/λ`; the gradient then comes from elsewhere."""
        moved = [each for each in zip(states, grads, dampings, strict=True) if bool(each[1].any())]
        if moved and not _residuals(of_step)[0]:
            raise RuntimeError(
                f"kfac_optim: layer {moved[0][0].name!r} has a gradient, if only of weight decay (l2_in_curvature), "
                "but SampleSpace has seen no residual of this step that reaches a layer of this SampleSpace, or those "
                "of an empty batch. Call the criterion that estimate=ExactGGN(criterion) names in each step, or "
                "optimizer.observe(residual), for an output of such a layer, and take no step where the batch is "
                "empty; or leave that layer out of the penalty in such a step."
            )
        for _, _, damping in moved:
            _check_ridge(damping)
        for state in states:
            state.direction.mul_(self.momentum)
        for state, grad, damping in moved:
            state.direction.add_(grad / damping)
        return [state.direction.to(grad.dtype, copy=True) for state, grad in zip(states, grads, strict=True)]

    def acceleration(
        self, states: Sequence[SampleState], velocities: Sequence[Tensor], change: Mapping[Key, Tensor], length: float
    ) -> list[Tensor] | None:
        """Return the geodesic acceleration `a` of a step `v` (Transtrum & Sethna 2012, arXiv 1207.4999).

        Residuals are no linear function of the parameters: `r(θ + tv) = r + tρv + ½t² r″`. What `a = -(F + λI)⁻¹ρᵀr″`
        adds to the path, `θ + tv + ½t²a`, keeps the residuals on the line that the step is meant for.

        Args:
            states: all that the step was found for, whose `end_step` was not called yet.
            velocities: `v`, `[groups, out, in]` of each block.
            change: `r(θ + hv) - r(θ)`, `[examples]` for each term and column, in the units of the residuals that the
                rows came with.
            length: `h`.
        """
        system = states[0].solved
        if system is None or self.scope == "layer" or any(state.solved is not system for state in states):
            return None  # a step that is put together of several does not take the residuals along a line
        moved = [v.to(state.direction.dtype) / state.unit for state, v in zip(states, velocities, strict=True)]
        if not change.keys() >= set(system.rows[0].keys):
            raise RuntimeError(
                "kfac_optim: the rows of this step are not those of the closure alone: an earlier backward has left "
                "rows, though its gradients were zeroed. Call optimizer.zero_grad() in the closure, which drops the "
                "gradients and the rows."
            )
        parts = [change[key].to(moved[0].dtype) * states[0].scale for key in system.rows[0].keys]
        known = torch.cat([part - part.mean() for part in parts] if self.centred else parts)
        second = 2 / length * (known / length - system.along(moved))
        found = system.solve(-second)
        return [part * state.unit for state, part in zip(states, found, strict=True)]


def _with_rest(system: SampleSystem, found: Sequence[Tensor], rest: Sequence[Tensor]) -> list[Tensor]:
    """Add `(F + λI)⁻¹` times a part of the gradient that no residual accounts for, such as that of a penalty."""
    _check_ridge(system.ridge)
    inside = system.solve(system.along(rest))
    return [part + (other - within) / system.ridge for part, other, within in zip(found, rest, inside, strict=True)]


def _check_ridge(ridge: float) -> None:
    """Refuse a part of the gradient that comes from no residual, where no damping gives it any curvature."""
    if ridge <= 0:
        raise ValueError(
            "kfac_optim: a part of the gradient comes from no residual of the criterion, and without damping "
            "SampleSpace has no curvature for it. Set damping above 0, or observe that part of the loss as well."
        )


def _residuals(states: Sequence[SampleState]) -> tuple[dict[Key, int], dict[Key, Tensor]]:
    """Return the examples and the residuals of all terms of a step that have any."""
    keys: dict[Key, int] = {}
    residuals: dict[Key, Tensor] = {}
    for state in states:
        for key, rows in state.rows.terms.items():
            if rows.examples == 0 or not any(z.shape[1] for z, _ in rows.uses):
                continue
            if rows.residual is None or rows.examples is None:
                raise RuntimeError(
                    f"kfac_optim: SampleSpace has rows of layer {state.name!r}, but not the residuals they belong to: "
                    "either the loss did not call the criterion that estimate=ExactGGN(criterion) names (call that "
                    "very object, residual first, not compiled; or optimizer.observe(residual)), or what it reads does "
                    "not hold the examples in the order in which the layer does, or examples interact in the model, "
                    "as by BatchNorm; or it is computed in chunks of the batch (leave out chunk_size, or call the "
                    "criterion for each chunk); or a part behind the layer that is not captured, as one in "
                    "skip_layers, computes in 16 bits (take it out of autocast); or a layer, which may be another one, "
                    "is of a kind whose rows are not told apart by examples (nn.GRU and its kind, "
                    "nn.MultiheadAttention, experts in one parameter): list that one in skip_layers, or choose another "
                    "inverse."
                )
            keys[key], residuals[key] = rows.examples, rows.residual
    return dict(sorted(keys.items())), residuals


def _split(
    rows: Sequence[SampleRows], gradient: Sequence[Tensor], s: Tensor, rounding: float
) -> tuple[Tensor, list[Tensor] | None]:
    """Return what the gradient was multiplied by after backward, as by clipping, and the part that `ρᵀs` lacks.

    That part is None where it is no more than rounding, of sums of as large terms as `ρ` and `s` have.
    """
    known = [each.combined(s) for each in rows]
    square = total([(part * part).sum() for part in known])
    inner = total([(part * other).sum() for part, other in zip(known, gradient, strict=True)])
    factor = torch.where(square > 0, inner / square, 1.0)
    rest = [other - factor * part for part, other in zip(known, gradient, strict=True)]
    left = total([(part * part).sum() for part in rest])
    largest = total([each.square() for each in rows]) * s.square().sum() * factor.square()
    return factor, rest if bool(left > rounding**2 * largest) else None
