"""A wide linear layer over a flattened feature map: the factor of its input is a Kronecker product once more."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.layer_statistics import LayerStatistics, RowStatistics
from kfac_optim.factors.second_moments import active_rows, on_host, total
from kfac_optim.inverses.base import Inverse
from kfac_optim.inverses.damping import Damped, factored_tikhonov
from kfac_optim.inverses.state import InverseState, Result
from kfac_optim.linalg.cholesky import damped_cholesky_inverse
from kfac_optim.linalg.eigen import leading_singular_triple
from kfac_optim.linalg.products import norm1
from kfac_optim.specs import Cost, FactorShape, LayerSpec, Part, Structure
from kfac_optim.utils import value_checks
from kfac_optim.utils.tensor_storage import copy_held
from kfac_optim.utils.validation import check_integer


class DoublyFactoredState(InverseState):
    """Three factors of one layer, and the inverses of their damped forms.

    Attributes:
        layer: name of the layer, for messages.
        by_name: the factors `channels` `E[ΨΨᵀ]` `[1, C, C]`, `positions` `E[KKᵀ]` `[1, T, T]` and `G` `[1, out, out]`.
        inverses: of each, damped for the weight, and `bias` of `G` as it is damped for the bias, where there is one.
        rows: examples accumulated since the last fold; a tensor `[]` where only the device knows how many count.
        refused: non-finite samples refused so far, `[]` int64.
        refused_in_a_row: since the last that was accepted, `[]` int64.
        retried: matrices that were inverted only in a later attempt, `[]` int64.
        failed: matrices given up, whose old inverse was kept, `[]` int64.
        failed_in_a_row: refreshes in a row that gave up each of `inverses`, `[3 or 4]` int64.
        conditions: condition numbers of the damped factors in the 1-norm, `[3 or 4]`; in the dtype of all
            computations, at least float32.
    """

    __slots__ = (
        "by_name",
        "conditions",
        "failed",
        "failed_in_a_row",
        "inverses",
        "layer",
        "refused",
        "refused_in_a_row",
        "retried",
        "rows",
    )

    def __init__(self, spec: LayerSpec, channels: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layer = spec.name
        dims = {"channels": channels, "positions": _weight_columns(spec) // channels, "G": spec.out_dim}
        compute = torch.promote_types(dtype, torch.float32)
        self.by_name = {name: Factor(1, dim, Structure.DENSE, dtype=dtype, device=device) for name, dim in dims.items()}
        if spec.has_bias:
            dims["bias"] = spec.out_dim
        self.inverses = {name: torch.eye(dim, dtype=compute, device=device)[None] for name, dim in dims.items()}
        self.rows: float | Tensor = 0
        self.refused, self.refused_in_a_row, self.retried, self.failed = (
            torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)
        )
        self.failed_in_a_row = torch.zeros(len(dims), dtype=torch.int64, device=device)
        self.conditions = torch.ones(len(dims), dtype=compute, device=device)

    def was_sampled(self) -> Tensor:
        """Return whether any sample was ever accepted, `[]` bool."""
        return torch.stack([factor.held() for factor in self.by_name.values()]).all()

    def counted(self) -> dict[str, Tensor]:
        """What was counted and measured, by its name in checkpoints; no copies."""
        return {
            "refused": self.refused,
            "refused_in_a_row": self.refused_in_a_row,
            "retried": self.retried,
            "failed": self.failed,
            "failed_in_a_row": self.failed_in_a_row,
            "conditions": self.conditions,
        }

    def accumulate(self, stats: LayerStatistics) -> None:
        if stats.has_input:
            maps, count = self._maps(stats)
            psi, sigma, k = leading_singular_triple(maps)
            for name, vectors in (("channels", psi), ("positions", k)):
                factor = self.by_name[name]
                scaled = (vectors * sigma.sqrt().unsqueeze(-1)).to(factor.dtype)
                factor.add((scaled.mT @ scaled)[None] * stats.weight)
            self.rows = self.rows + count * stats.weight
        self.by_name["G"].add(stats.output_moment(Structure.DENSE))

    def has_pending(self) -> bool:
        if isinstance(self.rows, Tensor):
            return not on_host(self.rows) or bool(self.rows > 0)
        return self.rows > 0

    def discard(self) -> None:
        for factor in self.by_name.values():
            factor.pending = None
        self.rows = 0

    def has_statistics(self) -> bool:
        return bool(self.was_sampled())

    def fold(self, loss_terms: float | Tensor, decay: float, loss_scale: float | Tensor = 1.0) -> None:
        accept = torch.stack([factor.pending_is_finite() for factor in self.by_name.values()]).all()
        rows, g = self.rows, self.by_name["G"]
        if isinstance(loss_terms, Tensor):  # stated by the user, and not looked at then
            possible = loss_terms.isfinite() & (loss_terms > 0)
            loss_terms = torch.where(possible, loss_terms, 1)
            accept = accept & possible
        # Rows that only the device could count may turn out to be none: then the zeros are no sample.
        per_row = 1 / rows.clamp(min=1).to(g.mass.dtype) if isinstance(rows, Tensor) else 1 / rows
        used = (rows > 0).to(g.mass.dtype) if isinstance(rows, Tensor) else 1
        for name in ("channels", "positions"):
            self.by_name[name].fold(scale=per_row, mass=rows, decay=decay, accept=accept)
        g.fold(scale=loss_terms / loss_scale**2, mass=loss_terms * used, decay=decay, accept=accept)
        self.refused += ~accept
        self.refused_in_a_row.copy_(torch.where(accept, 0, self.refused_in_a_row + 1))
        self.rows = 0

    def averages(self, part: str) -> tuple[Factor, ...]:
        return tuple(self.by_name.values())

    def age(self, decay: float, loss_terms: float | Tensor = 0) -> None:
        for name, factor in self.by_name.items():
            factor.age(decay, loss_terms if name == "G" else 0)

    def results(self, part: str) -> tuple[Result, ...]:
        return tuple(Result(inverse, symmetric=True) for inverse in self.inverses.values())

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """The diagonal of `A` `[1, in]`, which is 1 for the bias, and `G` `[1, out, out]`."""
        channels, positions = (self.by_name[name].diagonal() for name in ("channels", "positions"))
        diagonal = (channels.unsqueeze(-1) * positions.unsqueeze(-2)).flatten(1)
        if "bias" in self.inverses:
            diagonal = torch.cat([diagonal, diagonal.new_ones(1, 1)], dim=-1)
        return diagonal, self.by_name["G"].average

    def setbacks(self) -> tuple[Tensor, Tensor]:
        return self.refused_in_a_row, self.failed_in_a_row.max()

    def counters(self) -> dict[str, Tensor]:
        """Give the counters of `Cholesky`; the condition of `A` is that of the product, of `G` the worse of its two."""
        return {
            "refused_statistics": self.refused,
            "retried_refreshes": self.retried,
            "failed_refreshes": self.failed,
            "condition_A": self.conditions[0] * self.conditions[1],
            "condition_G": self.conditions[2:].max(),
        }

    def adopt(self, shadow: Self) -> None:
        for name, inverse in self.inverses.items():
            copy_held(inverse, shadow.inverses[name])
        for name in ("retried", "failed", "failed_in_a_row", "conditions"):
            getattr(self, name).copy_(getattr(shadow, name))

    def tensors(self) -> dict[str, Any]:
        return {
            "factors": {name: factor.tensors() for name, factor in self.by_name.items()},
            "inverses": dict(self.inverses),
            **self.counted(),
        }

    def ranges(self) -> dict[str, Any]:
        return {
            "factors": {name: factor.ranges() for name, factor in self.by_name.items()},
            "inverses": dict.fromkeys(self.inverses, value_checks.positive_matrix),
            **dict.fromkeys(self.counted(), value_checks.not_negative),
            "conditions": value_checks.measured,
        }

    def load(self, tensors: Mapping[str, Any]) -> None:
        for name, factor in self.by_name.items():
            factor.load(tensors["factors"][name])
        for name, inverse in self.inverses.items():
            copy_held(inverse, tensors["inverses"][name])
        for name, tensor in self.counted().items():
            tensor.copy_(tensors[name])

    def _maps(self, stats: LayerStatistics) -> tuple[Tensor, int | Tensor]:
        """Inputs of the examples that this call adds, `[n, C, T]`, and how many; others are left out or zero."""
        a, g = stats.rows()
        channels, positions = (self.by_name[name].dim for name in ("channels", "positions"))
        columns = channels * positions
        if a.shape[2] > 1:
            raise ValueError(
                f"kfac_optim: DoublyFactored(channels={channels}) is for one position per example, but layer "
                f"{self.layer!r} ({columns} inputs) was called with {a.shape[2]}. Choose another inverse for it by a "
                f"mapping from layer names, or "
                f"weight_sharing=WeightSharing.REDUCE, which averages them."
            )
        added = active_rows(g)[:, 0]
        if isinstance(stats, RowStatistics) and stats.active_before is not None:
            # What earlier backwards through the call reached was added then.
            added = added & ~stats.active_before.any(1)
        rows = a[0, :, 0, :columns].to(self.conditions.dtype)
        rows = rows[added] if on_host(added) else torch.where(added.unsqueeze(-1), rows, 0)
        return rows.reshape(-1, channels, positions), total(added)


@dataclass(frozen=True)
class DoublyFactored(Inverse[DoublyFactoredState]):
    """Three factors for a wide linear layer over a flattened feature map (Ba, Grosse & Martens 2017, §4).

    The input of an example is a map of C channels and T positions, flattened as `nn.Flatten` does after a convolution:
    all positions of the first channel, then those of the second. As a `T × C` matrix it is taken for the leading part
    of its singular value decomposition, `K Ψᵀ` with `K = √σ u` and `Ψ = √σ v`, and the Fisher of the weight for `E[ΨΨᵀ]
    ⊗ E[KKᵀ] ⊗ M Σ g gᵀ`: matrices of the sizes C, T and out in place of C·T and out. Each gets the share of λ that
    `factored_tikhonov` gives three factors. The bias is a block of its own, `M Σ g gᵀ + λI`. Examples without a
    gradient are not counted.

    Refreshing costs about `C³ + T³ + 2 out³` operations, applying `2 C T out (C + T + out)`, and a step with
    statistics, besides the sums, `20 m³` for each example with `m = min(C, T)`.

    Use it for the first `nn.Linear` after convolutions, where a dense `A` is too large to hold or to invert. It takes
    one position per example, and refuses other layers with a ValueError. `max_factor_dim` bounds C, T and out, not the
    number of inputs. `factors()` gives for `A` its diagonal `[1, in]`, as the whole is what is too large to hold.

    Args:
        channels: C; the inputs without the bias must be a multiple of it.
    """

    channels: int

    def __post_init__(self) -> None:
        check_integer("channels of DoublyFactored", self.channels)

    def factor_dims(self, spec: LayerSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.channels, -(-_weight_columns(spec) // self.channels)), (spec.out_dim,)

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> DoublyFactoredState:
        self._check(spec)
        return DoublyFactoredState(spec, self.channels, dtype=dtype, device=device)

    def refresh(self, states: Sequence[DoublyFactoredState], dampings: Sequence[float]) -> None:
        alike: defaultdict[tuple[Any, ...], list[_Job]] = defaultdict(list)
        for state, damping in zip(states, dampings, strict=True):
            for job in _jobs(state, damping):
                alike[job.kept.shape, job.kept.dtype, job.kept.device].append(job)
        for equal in alike.values():
            _invert(equal)

    def apply(self, state: DoublyFactoredState, grad: Tensor, damping: float) -> Tensor:
        inverses = state.inverses
        grad = grad.to(state.conditions.dtype)
        channels, positions = (inverses[name].shape[-1] for name in ("channels", "positions"))
        columns = channels * positions
        maps = grad[..., :columns].reshape(1, -1, channels, positions)  # [1, out, C, T]
        maps = inverses["channels"] @ maps @ inverses["positions"]
        weight = inverses["G"] @ maps.flatten(2)
        return torch.cat([weight, inverses["bias"] @ grad[..., columns:]], dim=-1) if "bias" in inverses else weight

    def flops(self, spec: LayerSpec) -> Cost:
        c, t, out = self.channels, _weight_columns(spec) // self.channels, spec.out_dim
        biases = 1 if spec.has_bias else 0
        return Cost(
            refresh=float(c**3 + t**3 + (1 + biases) * out**3),
            apply=2.0 * c * t * out * (c + t + out) + 2.0 * biases * out**2,
        )

    def parts(self, spec: LayerSpec) -> tuple[Part, ...]:
        """One: λ is shared among all three factors, and the bias has its part of the third."""
        channels, positions, out = (
            FactorShape(Structure.DENSE, 1, dim)
            for dim in (self.channels, _weight_columns(spec) // self.channels, spec.out_dim)
        )
        inverses = (channels, positions, out, *((out,) if spec.has_bias else ()))
        return (
            Part(
                "",
                self.flops(spec).refresh,
                (channels, positions, out),
                sent=sum(factor.packed for factor in inverses),
                held=sum(factor.numel for factor in inverses),
            ),
        )

    def refusal(self, spec: LayerSpec) -> str | None:
        """Why a layer cannot be factored like this; None where it can."""
        columns = _weight_columns(spec)
        if spec.groups > 1:
            return f"it has {spec.groups} groups, or a factor in as many blocks"
        if spec.opposed:
            return "other layers multiply by the transpose of its weight"
        kept = [factor.structure for factor in spec.factors()]
        if kept != [Structure.DENSE, Structure.DENSE]:
            kinds = " and ".join(kind.value for kind in kept)
            return f"its A and G are {kinds}, not dense (raise max_factor_dim if that made them so)"
        if columns == 0 or columns % self.channels:
            return f"the inputs are no multiple of {self.channels} channels"
        return None

    def _check(self, spec: LayerSpec) -> None:
        """Raise ValueError for a layer that cannot be factored like this."""
        if (reason := self.refusal(spec)) is None:
            return
        size = f"{_weight_columns(spec)} inputs{' and a bias' if spec.has_bias else ''}, {spec.out_dim} outputs"
        raise ValueError(
            f"kfac_optim: {self!r} does not fit layer {spec.name!r} ({size}): {reason}. Name the "
            f"layers that it fits, as in inverse={{'classifier': {self!r}}}, and leave others to another inverse."
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """One factor to invert.

    Attributes:
        state: takes the result.
        index: where the state counts it.
        average: `[1, d, d]`, in the dtype of the computation.
        damped: how it is damped, `[1]` each.
        kept: the inverse to replace, `[1, d, d]`.
    """

    state: DoublyFactoredState
    index: int
    average: Tensor
    damped: Damped
    kept: Tensor


def _jobs(state: DoublyFactoredState, damping: float) -> list[_Job]:
    averages = [factor.average.to(state.conditions.dtype) for factor in state.by_name.values()]
    traces = [average.diagonal(dim1=-2, dim2=-1).sum(-1) for average in averages]
    dims = [average.shape[-1] for average in averages]
    damped = factored_tikhonov(traces, dims, damping)
    if "bias" in state.inverses:
        averages.append(averages[-1])
        damped += factored_tikhonov(traces[-1:], dims[-1:], damping)
    return [
        _Job(state, index, average, share, kept)
        for index, (average, share, kept) in enumerate(zip(averages, damped, state.inverses.values(), strict=True))
    ]


def _invert(jobs: Sequence[_Job]) -> None:
    """All in one batch; what fails keeps its last good inverse."""
    stack = torch.cat([job.average * job.damped.scale[:, None, None] for job in jobs])
    shift = torch.cat([job.damped.shift for job in jobs])
    inverses, attempts = damped_cholesky_inverse(stack, shift)
    conditions = (norm1(stack) + shift) * norm1(inverses)
    for job, inverse, tries, condition in zip(jobs, inverses, attempts, conditions, strict=True):
        state, failed = job.state, tries == 0
        state.failed += failed
        state.failed_in_a_row[job.index] = torch.where(failed, state.failed_in_a_row[job.index] + 1, 0)
        state.retried += tries > 1
        usable = ~failed & state.was_sampled()
        job.kept.copy_(torch.where(usable, inverse, job.kept))
        state.conditions[job.index] = torch.where(usable, condition, state.conditions[job.index])


def _weight_columns(spec: LayerSpec) -> int:
    """Inputs without the bias."""
    return spec.in_dim - 1 if spec.has_bias else spec.in_dim
