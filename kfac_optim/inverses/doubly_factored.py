"""A wide linear layer over a flattened feature map: the factor of its input is a Kronecker product once more."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kfac_optim.inverses.base import Inverse
from kfac_optim.inverses.damping import Damped, factored_tikhonov
from kfac_optim.inverses.doubly_factored_state import DoublyFactoredState, weight_columns
from kfac_optim.linalg.cholesky import damped_cholesky_inverse
from kfac_optim.linalg.products import norm1
from kfac_optim.specs import Cost, FactorShape, LayerSpec, Part, Structure
from kfac_optim.utils.validation import check_integer


@dataclass(frozen=True)
class DoublyFactored(Inverse[DoublyFactoredState]):
    """Keeps three factors for a wide linear layer over a flattened feature map (Ba, Grosse & Martens 2017, §4).

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
        return (self.channels, -(-weight_columns(spec) // self.channels)), (spec.out_dim,)

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
        c, t, out = self.channels, weight_columns(spec) // self.channels, spec.out_dim
        biases = 1 if spec.has_bias else 0
        return Cost(
            refresh=float(c**3 + t**3 + (1 + biases) * out**3),
            apply=2.0 * c * t * out * (c + t + out) + 2.0 * biases * out**2,
        )

    def parts(self, spec: LayerSpec) -> tuple[Part, ...]:
        """Return one part: λ is shared among all three factors, and the bias has its part of the third."""
        channels, positions, out = (
            FactorShape(Structure.DENSE, 1, dim)
            for dim in (self.channels, weight_columns(spec) // self.channels, spec.out_dim)
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
        """Return why a layer cannot be factored like this; None if it can."""
        columns = weight_columns(spec)
        if spec.groups > 1:
            return f"it has {spec.groups} groups, or a factor in as many blocks"
        if spec.opposed:
            return "other layers multiply by the transpose of its weight"
        kept = [factor.structure for factor in spec.factors()]
        if kept != [Structure.DENSE, Structure.DENSE]:
            kinds = " and ".join(kind.value if isinstance(kind, Structure) else "sketched" for kind in kept)
            return f"its A and G are {kinds}, not dense (raise max_factor_dim if that made them so)"
        if columns == 0 or columns % self.channels:
            return f"the inputs are no multiple of {self.channels} channels"
        return None

    def _check(self, spec: LayerSpec) -> None:
        """Raise ValueError for a layer that cannot be factored like this."""
        if (reason := self.refusal(spec)) is None:
            return
        size = f"{weight_columns(spec)} inputs{' and a bias' if spec.has_bias else ''}, {spec.out_dim} outputs"
        raise ValueError(
            f"kfac_optim: {self!r} does not fit layer {spec.name!r} ({size}): {reason}. Name the "
            f"layers that it fits, as in inverse={{'classifier': {self!r}}}, and leave others to another inverse."
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """Names one factor to invert.

    Attributes:
        state: the state that takes the result.
        index: the place at which the state counts it.
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
    """Invert all jobs in one batch; a matrix that fails keeps its last good inverse."""
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
