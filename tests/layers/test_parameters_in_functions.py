"""Parameters that functions use in ways at the edge of what is a layer: they have factors, or take the SGD step."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.plain import clones
from torch import Tensor, nn

from kfac_optim import KFACOptimizer, Subsample, WeightSharing

pytestmark = pytest.mark.usefixtures("float64")


class Using(nn.Module):
    """A parameter, and what is done with it."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


def step(model: nn.Module, x: Tensor, steps: int = 1, **options: object) -> KFACOptimizer:
    """Take steps on a mean over examples whose parts differ."""
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=1, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(x)
        weights = torch.linspace(1, 2, output.numel()).view_as(output)
        (output * weights + output.square()).flatten(1).sum(1).mean().backward()
        optimizer.step()
    return optimizer


def test_a_product_that_sums_over_nothing_keeps_the_moments_of_its_rows() -> None:
    """Numbers of each example times a vector for each: `A` of a vector is the mean square of its number."""
    model = Using((3, 4), lambda x, w: torch.einsum("bf,fd->bfd", x, w))
    x = 10 * torch.randn(6, 3)
    ((a, _),) = step(model, x).factors().values()
    torch.testing.assert_close(a.flatten(), x.square().mean(0))


def test_a_table_that_is_gathered_by_position_is_as_a_slice_of_it() -> None:
    found = []
    for use in (lambda x, w: x + w[torch.arange(4)], lambda x, w: x + w[:4]):
        model = Using((7, 3), use)
        optimizer = step(
            model, torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1)), weight_sharing=WeightSharing.REDUCE
        )
        found.append((clones(model.parameters()), optimizer.factors()))
    (gathered, factors), (sliced, expected) = found
    torch.testing.assert_close(gathered, sliced)
    for (_, g), (_, other) in zip(factors.values(), expected.values(), strict=True):
        torch.testing.assert_close(g, other)


class Both(nn.Module):
    """A matrix that is itself a product of two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.left @ self.right)


def test_a_product_of_two_parameters_is_no_layer() -> None:
    with pytest.warns(UserWarning, match="nothing is preconditioned|no layer"):
        optimizer = step(Both(), torch.randn(5, 4))
    assert optimizer.factors() == {}


def test_a_parameter_that_is_expanded_to_the_batch_is_data() -> None:
    """As learned queries are."""
    model = nn.Sequential(Using((4, 6), lambda x, w: w.expand(len(x), 4, 6) + x.mean()), nn.Linear(6, 3))
    assert "1" in step(model, torch.randn(5, 2)).factors()


@pytest.mark.parametrize("build", [lambda: nn.Linear(6, 3), lambda: Using((6, 3), torch.mm)], ids=["linear", "mm"])
def test_sparse_inputs_have_the_factors_of_dense_ones(build: Callable[[], nn.Module]) -> None:
    layer, x = build(), torch.randn(8, 6).relu()
    factors = [step(copy.deepcopy(layer), each).factors() for each in (x.to_sparse(), x)]
    for (a, g), (other_a, other_g) in zip(*(each.values() for each in factors), strict=True):
        torch.testing.assert_close((a, g), (other_a, other_g))


def test_a_scale_by_one_number_takes_the_step_of_sgd() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Using((1,), lambda x, w: x * w))
    optimizer = step(model, torch.randn(2, 3, 6, 6))
    assert set(optimizer.factors()) == {"0"}


class Flattened(nn.Module):
    """A convolution over pictures whose weight is applied to sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.proj.weight.squeeze(-1), self.proj.bias)


def test_a_weight_in_a_convolution_of_other_dimensions_takes_the_step_of_sgd() -> None:
    model = Flattened()
    with pytest.warns(UserWarning, match="proj"):
        optimizer = step(model, torch.randn(5, 4, 7))
    assert optimizer.factors() == {}


def test_rows_of_a_bilinear_layer_without_a_gradient_may_hold_anything() -> None:
    found = []
    for unused in (0.0, torch.nan):
        torch.manual_seed(0)
        layer = nn.Bilinear(3, 4, 2)
        optimizer = KFACOptimizer(layer, lr=0.0, max_factor_dim=4)
        x = torch.randn(8, 7)
        x[5:] = unused
        layer(x[:, :3], x[:, 3:])[:5].square().sum().backward()
        layer.zero_grad()  # in which the NaN are
        optimizer.step()
        found.append(optimizer.factors()[""][0])
    assert found[1].isfinite().all()
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("subsample", [Subsample(), Subsample(examples=3)], ids=["all", "some"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_diagonal_of_a_bilinear_layer_is_that_of_the_dense_factor(bias: bool, subsample: Subsample) -> None:
    """It is made of both inputs, without a row of all products."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.bilinear = nn.Bilinear(3, 4, 2, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.bilinear(x[:, :3], x[:, 3:])

    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(0))
    found = [step(Pairs(), x, subsample=subsample, max_factor_dim=width).factors() for width in (4, 100)]
    (diagonal, _), (dense, _) = (each["bilinear"] for each in found)
    torch.testing.assert_close(diagonal, dense.diagonal(dim1=-2, dim2=-1))
