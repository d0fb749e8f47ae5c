"""The state of `DoublyFactored`: three factors of one layer, and the inverses of their damped forms."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from kfac_optim.factors.factor import Factor
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.factors.second_moments import active_rows, on_host, total
from kfac_optim.inverses.state import InverseState, Result
from kfac_optim.linalg.eigen import leading_singular_triple
from kfac_optim.specs import LayerSpec, Structure
from kfac_optim.utils import value_checks
from kfac_optim.utils.tensor_storage import copy_held


class DoublyFactoredState(InverseState):
    """Holds three factors of one layer, and the inverses of their damped forms.

    Attributes:
        layer: name of the layer, for messages.
        by_name: the factors `channels` `E[ΨΨᵀ]` `[1, C, C]`, `positions` `E[KKᵀ]` `[1, T, T]` and `G` `[1, out, out]`.
        inverses: the inverse of each, damped for the weight, and as `bias` that of `G` damped for the bias, where
            there is one.
        rows: examples accumulated since the last fold; a tensor `[]` where only the device knows how many count.
        refused: non-finite samples refused so far, `[]` int64.
        refused_in_a_row: non-finite samples refused since the last that was accepted, `[]` int64.
        retried: matrices that were inverted only in a later attempt, `[]` int64.
        failed: matrices given up, whose old inverse was kept, `[]` int64.
        failed_in_a_row: refreshes in a row that gave up each of `inverses`, `[3 or 4]` int64.
        conditions: condition numbers of the damped factors in the 1-norm, `[3 or 4]`; in the dtype of all
            computations, at least float32.
    """

    def __init__(self, spec: LayerSpec, channels: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layer = spec.name
        dims = {"channels": channels, "positions": weight_columns(spec) // channels, "G": spec.out_dim}
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
        """Return what was counted and measured, by its name in checkpoints; no copies."""
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
        rows, g = self.rows, self.by_name["G"]
        possible: bool | Tensor = True
        if isinstance(loss_terms, Tensor):  # stated by the user, and not looked at then
            possible = loss_terms.isfinite() & (loss_terms > 0)
            loss_terms = torch.where(possible, loss_terms, 1)
        # Rows that only the device could count may turn out to be none: then the zeros are no sample.
        per_row = 1 / rows.clamp(min=1).to(g.mass.dtype) if isinstance(rows, Tensor) else 1 / rows
        used = (rows > 0).to(g.mass.dtype) if isinstance(rows, Tensor) else 1
        samples = [(self.by_name[name], per_row, rows) for name in ("channels", "positions")]
        samples.append((g, loss_terms / loss_scale**2, loss_terms * used))
        accept = torch.cat([factor.pending_is_finite(scale) for factor, scale, _ in samples]).all() & possible
        for factor, scale, mass in samples:
            factor.fold(scale=scale, mass=mass, decay=decay, accept=accept)
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
        """Return the diagonal of `A` `[1, in]`, which is 1 for the bias, and `G` `[1, out, out]`."""
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
        """Return inputs of the examples that this call adds, `[n, C, T]`, and how many; others are left out or zero."""
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
        stats = stats.of_call
        if isinstance(stats, RowStatistics):
            added = stats.active.any(1)  # by all columns of the loss, of which this may be one
            if stats.active_before is not None:
                # What earlier backwards through the call reached was added then.
                added = added & ~stats.active_before.any(1)
        else:
            added = active_rows(g)[:, 0]
        rows = a[0, :, 0, :columns].to(self.conditions.dtype)
        rows = rows[added] if on_host(added) else torch.where(added.unsqueeze(-1), rows, 0)
        return rows.reshape(-1, channels, positions), total(added)


def weight_columns(spec: LayerSpec) -> int:
    """Return the number of inputs without the bias."""
    return spec.in_dim - 1 if spec.has_bias else spec.in_dim
