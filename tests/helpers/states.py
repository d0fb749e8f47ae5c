"""States of a representation made without an optimizer, and its round trip through a checkpoint."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.cases import STRUCTURES
from helpers.plain import assert_identical, batch, clones, square_loss, train
from kfac_optim import Inverse, KFACOptimizer, LayerSpec, LayerStatistics, Structure
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.second_moments import gram

CPU = torch.device("cpu")
every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")

_DENSE = (Structure.DENSE, Structure.DENSE)


def spec(inputs: int, outputs: int, groups: int, structure: tuple[Structure, Structure]) -> LayerSpec:
    return LayerSpec("layer", ("weight",), inputs, outputs, groups=groups, structure=structure)


class OwnStatistics(LayerStatistics):
    """Of a layer of one's own: canonical rows alone, or none to speak of."""

    def __init__(self, a: Tensor, g: Tensor, active: bool = True, opposed: bool = False) -> None:
        self.a, self.g, self.active, self.opposed = a, g, active, opposed

    @property
    def count(self) -> int:
        return self.a.shape[1] * self.a.shape[2] if self.active else 0

    @property
    def has_input(self) -> bool:
        return self.active

    def input_moment(self, structure: Structure) -> Tensor:
        return gram(self.a, structure)

    def output_moment(self, structure: Structure) -> Tensor:
        return gram(self.g, structure)

    def rows(self) -> tuple[Tensor, Tensor]:
        assert self.active, "there are none"
        return self.a, self.g


def add_moments(pair: FactorPair, rank: int = 20) -> None:
    """A step's sums for both factors: second moments of `rank` vectors each."""
    for factor in (pair.a, pair.g):
        if factor is not None:
            rows = torch.randn(factor.groups, rank, factor.dim, dtype=factor.dtype)
            moments = rows.mT @ rows
            factor.add(moments if factor.structure is Structure.DENSE else moments.diagonal(dim1=1, dim2=2).clone())
    pair.rows = 20


def measured_state(
    inverse: Inverse[Any],
    inputs: int = 4,
    outputs: int = 3,
    groups: int = 2,
    structure: tuple[Structure, Structure] = _DENSE,
    *,
    dtype: torch.dtype = torch.float64,
    rank: int = 20,
) -> Any:
    """A state whose averages are second moments of `rank` vectors, of full rank by default."""
    state = inverse.init(spec(inputs, outputs, groups, structure), dtype=dtype, device=CPU)
    add_moments(state.pair, rank)
    state.fold(1, 1.0)
    return state


def assert_resumes_bitwise(make: Callable[[], tuple[nn.Module, KFACOptimizer]], *, steps: int, saved: int) -> Any:
    """A run of `steps` is that which is saved after `saved`, loaded into one that did other things, and continued.

    Returns:
        The metrics at the end.
    """
    (whole, uninterrupted), (first, saving), (second, resumed) = make(), make(), make()
    train(whole, uninterrupted, steps)
    train(first, saving, saved)
    file = io.BytesIO()
    torch.save([first.state_dict(), saving.state_dict()], file)
    file.seek(0)
    parameters, state = torch.load(file, weights_only=True)
    train(second, resumed, 1)
    square_loss(second(batch(99, dtype=next(second.parameters()).dtype))).backward()  # unfinished, to be forgotten
    second.load_state_dict(parameters)
    resumed.load_state_dict(state)
    train(second, resumed, steps - saved, start=saved)
    assert_identical(clones(second.parameters()), clones(whole.parameters()))
    assert_identical(resumed.state_dict(), uninterrupted.state_dict())
    assert_identical(resumed.metrics(), uninterrupted.metrics())
    return resumed.metrics()
