"""Rows of every use that some examples make of a matrix, which add up to the derivative of each example.

With rows `z` that the matrix is multiplied by and rows `g` of output gradients, example `n` has the Jacobian
`J_n = Σ_k g_nk z_nkᵀ` `[groups, out, in]`, summed over its positions and over all uses. What is made of the Jacobians
does not depend on how they are split into uses, as products of moments of single rows would.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kfac_optim.factors.block_diagonal import cut, level_padding, matrix_by_blocks
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.second_moments import gram, on_host
from kfac_optim.specs import LayerSpec, Sketched, Structure
from kfac_optim.utils.precision import rounding_of_products

# Elements of Jacobians that are held at a time: 64 MiB of float32.
_CHUNK = 2**24


def rows_of_examples(gradient: Tensor, examples: int) -> Tensor | None:
    """Return which rows of a layer belong to each example, `[examples, rows]`; None where that cannot be told.

    Where the loss reads some of the batch, these are the rows that have a gradient, in their order; otherwise the rows
    of an example lie together.

    Args:
        gradient: the gradient at the layer, `[batch, …]`.
        examples: how many examples the loss has.
    """
    batch = gradient.shape[0] if gradient.dim() > 1 else 1
    if batch == examples:
        return torch.arange(batch, device=gradient.device).unsqueeze(1)
    used = gradient.reshape(batch, -1).ne(0).any(1).nonzero().flatten()
    if len(used) == examples:
        return used.unsqueeze(1)
    return torch.arange(batch, device=gradient.device).view(examples, -1) if batch % examples == 0 else None


@dataclass(eq=False)
class ExampleRows:
    """Holds the rows of the examples of one term of the loss.

    Attributes:
        examples: how many there are; None is the fewest rows of any use, as some uses have several for an example.
        residual: `s` `[examples]`, as in `LayerCall`.
        uses: `z` `[groups, batch, shared, in]` and `g` `[groups, batch, shared, out]` of each use; the batch is a
            multiple of the examples, whose rows lie together.
        told_apart: whether it is known which rows of all uses belong to one example.
        layer: its name, for messages.
        used: whether a gradient that is not exactly zero has come to any row; a tensor `[]` where only the device can
            tell.
    """

    examples: int | None = None
    residual: Tensor | None = None
    uses: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    told_apart: bool = True
    layer: str = ""
    used: bool | Tensor = False

    @property
    def count(self) -> int:
        """Return the number of examples, at least 1."""
        return self.examples or min(max(1, z.shape[1]) for z, _ in self.uses)

    def aligned(self) -> list[tuple[Tensor, Tensor]]:
        """Return `z` `[groups, examples, rows, in]` and `g` `[groups, examples, rows, out]` of each use.

        Raises:
            ValueError: a use has rows that cannot be told apart by examples.
        """
        count = self.count
        if not self.told_apart or any(z.shape[1] % count for z, _ in self.uses):
            batches = sorted({z.shape[1] for z, _ in self.uses})
            raise ValueError(
                f"kfac_optim: the loss has {count} examples, and calls of layer {self.layer!r} have "
                f"{', '.join(map(str, batches))} rows, which cannot be told apart by examples. Have the loss read one "
                "row for each example of the batch; or, where it is computed in chunks, leave out chunk_size, or call "
                "the criterion for each chunk; or, where the model's forward calls a network on several sets of "
                "points, build the optimizer for that network (KFACOptimizer(model.net)), whose calls are terms of "
                "their own; or list the layer in skip_layers."
            )
        return [
            (z.reshape(len(z), count, -1, z.shape[-1]), g.reshape(len(g), count, -1, g.shape[-1])) for z, g in self.uses
        ]

    def jacobians(self) -> Tensor:
        """Return `J`, `[groups, examples, out, in]`."""
        total: Tensor | None = None
        for z, g in self.aligned():
            part = g.mT @ z
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def chunks(self, elements: int) -> Iterator[Tensor]:
        """Yield `jacobians` of some examples at a time: of one, or of as many as have at most so many `elements`."""
        uses = self.aligned()
        z, g = uses[0]
        step = max(1, elements // max(1, len(g) * g.shape[-1] * z.shape[-1]))
        for start in range(0, self.count, step):
            part = [(z[:, start : start + step], g[:, start : start + step]) for z, g in uses]
            yield ExampleRows(uses=part).jacobians()


class RowsByTerm:
    """Collects the rows of one layer in a step, those of each term and of each gradient of it apart.

    Attributes:
        terms: the rows, by term and column.
        rounding: the largest relative rounding of the gradients that they came with, and of those behind them.
    """

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self.terms: dict[tuple[int, int], ExampleRows] = {}
        self.rounding = 0.0

    def __bool__(self) -> bool:
        return bool(self.terms)

    @property
    def are_used(self) -> bool:
        """Return whether the loss may have used any of the rows; a device is not asked."""
        return any(rows.used is not False for rows in self.terms.values())

    def add(self, stats: LayerStatistics) -> None:
        """Take in the rows of one call; of a further backward through it, what that adds to its gradient."""
        call: LayerCall | None = getattr(stats, "call", None)
        if call is None:
            raise NotImplementedError(
                f"kfac_optim: layer {self._layer!r} has no rows for each call, which its inverse needs: "
                f"{type(stats).__name__} does not give them. List the layer in skip_layers, or choose another inverse."
            )
        if call.earlier is not None:
            stats = copy.copy(stats)
            stats.call = call = replace(call, gradient=call.gradient - call.earlier, earlier=None)  # type: ignore[attr-defined]
        rows = self.terms.setdefault(
            (call.term, call.column), ExampleRows(call.examples, call.residual, layer=self._layer)
        )
        z, g = stats.rows()
        if call.examples is not None and call.examples != z.shape[1] == call.gradient.shape[0]:
            index = rows_of_examples(call.gradient, call.examples)
            if index is not None and index.numel() < z.shape[1]:  # the loss reads a part of the batch
                z, g = z[:, index.flatten()], g[:, index.flatten()]
        rows.uses.append((g, z) if stats.opposed else (z, g))
        rows.told_apart &= call.told_apart
        if not on_host(call.gradient):
            rows.used = rows.used | call.gradient.any()
        elif not rows.used:
            rows.used = bool(call.gradient.any())
        own = rounding_of_products(call.gradient.dtype, call.gradient.device.type)
        self.rounding = max(self.rounding, own, call.rounding)

    def clear(self) -> None:
        self.terms.clear()
        self.rounding = 0.0


class JointStatistics(LayerStatistics):
    """Computes the factors of a matrix that the loss uses several times, as where it holds derivatives of the model.

    With `L = Σ J_n J_nᵀ` and `R = Σ J_nᵀ J_n` over the examples of all terms, `Σ vec(J_n) vec(J_n)ᵀ` is taken to be
    `R ⊗ L / tr L`, which has its trace, and is exact for one example of rank one. `A` has the trace 1 in each group, by
    the moments of all ranks in the step where several see examples, so that each step weighs in the average of `A` by
    the number of its examples, however large the derivatives are.

    Args:
        spec: the block.
        terms: rows of each term.
        dtype: the dtype of the moments.
        term: the number of the term, as in `LayerStatistics`, where each term has factors of its own.
    """

    def __init__(self, spec: LayerSpec, terms: Iterable[ExampleRows], dtype: torch.dtype, term: int) -> None:
        self._spec = spec
        self._dtype = dtype
        self._terms: Sequence[ExampleRows] = list(terms)
        self._term = term
        self._trace: Tensor | None = None

    @property
    def term(self) -> int:
        return self._term

    @property
    def count(self) -> int | Tensor:
        told = [each.used for each in self._terms if isinstance(each.used, Tensor)]
        return torch.stack(told).any() * self._examples if told else self._examples

    @property
    def _examples(self) -> int:
        # An empty batch has no examples, though its rows count as those of one.
        return sum(each.count for each in self._terms if each.examples or any(z.shape[1] for z, _ in each.uses))

    @property
    def trace(self) -> Tensor | None:
        return self._trace

    def input_moment(self, structure: Structure | Sketched) -> Tensor:
        moment, traces = self._moment(structure, 0)
        self._trace = traces if self._spec.groups > 1 and not self._spec.shared_input else traces.sum()
        # The division first: of zeros a factor of count / trace would make NaN.
        trace = self._trace.clamp(min=torch.finfo(traces.dtype).tiny)
        return moment / trace.view(-1, *(1 for _ in moment.shape[1:])) * self._examples

    def output_moment(self, structure: Structure | Sketched) -> Tensor:
        return self._moment(structure, 1)[0]

    def rows(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(
            f"kfac_optim: layer {self._spec.name!r} is used several times by the loss, as where that holds derivatives "
            "of the model, and this representation of the inverse needs one row for each position. Choose another by "
            "inverse={layer name: …}, such as Cholesky()."
        )

    def squared_gradients(
        self, a_basis: Tensor | None, g_basis: Tensor | None, *, dtype: torch.dtype, per_example: bool
    ) -> Tensor:
        total: Tensor | int = 0
        for jacobians in self._chunks():
            some = matrix_by_blocks(jacobians, self._spec).to(dtype)
            turned = some if g_basis is None else g_basis.mT.unsqueeze(1) @ some
            turned = turned if a_basis is None else turned @ a_basis.unsqueeze(1)
            total = total + turned.square().sum(1)
        assert isinstance(total, Tensor)
        return total

    def _moment(self, structure: Structure | Sketched, side: int) -> tuple[Tensor, Tensor]:
        """Return `R` (side 0) or `L` (side 1) in the structure that is asked for, and the traces of its groups."""
        moment: Tensor | None = None
        traces = torch.zeros(())
        blocks = self._spec.blocks(side)
        for some in self._chunks():
            rows = some if side == 0 else some.mT
            part = gram(cut(rows, -1, blocks), structure)
            moment = part if moment is None else moment + part
            traces = traces.to(some) + some.square().sum((1, 2, 3))
        assert moment is not None
        width = (self._spec.in_dim, self._spec.out_dim)[side]
        return (level_padding(moment, width) if blocks > 1 else moment), traces

    def _chunks(self) -> Iterable[Tensor]:
        """Yield the Jacobians of some examples at a time, `[groups, examples, out, in]`."""
        for term in self._terms:
            uses = [(z.to(self._dtype), g.to(self._dtype)) for z, g in term.aligned()]
            yield from ExampleRows(uses=uses).chunks(_CHUNK)
