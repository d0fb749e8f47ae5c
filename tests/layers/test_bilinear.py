"""`nn.Bilinear`, by per-example gradients."""

import pytest
import torch
from helpers import oracles
from helpers.oracles import assert_same
from torch import nn

from kfac_optim import KFACOptimizer, LayerSpec, Structure, Subsample
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.subsampling import Draw
from kfac_optim.layers.bilinear import BilinearStatistics

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("shape", [(), (4,)], ids=["rows", "positions"])
@pytest.mark.parametrize("bias", [True, False])
def test_factors_are_those_of_a_linear_layer_over_products(bias: bool, shape: tuple[int, ...]) -> None:
    model, x, y = nn.Bilinear(3, 2, 4, bias=bias), torch.randn(5, *shape, 3), torch.randn(5, *shape, 2)
    optimizer = KFACOptimizer(model, lr=0.0)
    optimizer.set_loss_terms(5)
    output = model(x, y)
    output.retain_grad()
    output.square().sum().backward()
    optimizer.step()
    a = oracles.linear_rows(torch.einsum("...i,...j->...ij", x, y).flatten(-2))
    expected = oracles.factors(a, oracles.linear_rows(output.grad), terms=5, bias=bias)
    assert_same(optimizer.factors()[""], expected)
    assert optimizer.metrics()["measured_parameters"] == 1.0


def test_with_one_example_the_kronecker_product_is_its_gradient_times_itself() -> None:
    model = nn.Bilinear(3, 2, 4)
    optimizer = KFACOptimizer(model, lr=0.0)
    model(torch.randn(1, 3), torch.randn(1, 2)).square().sum().backward()
    optimizer.step()
    gradient = torch.cat([model.weight.grad.flatten(1), model.bias.grad[:, None]], dim=1).flatten()[None]
    assert_same(oracles.kronecker(*optimizer.factors()[""]), gradient.unsqueeze(2) * gradient.unsqueeze(1))


@pytest.mark.parametrize("batch", [(5,), ()], ids=["five", "one"])
def test_the_examples_of_its_batch_are_the_terms_of_a_mean(batch: tuple[int, ...]) -> None:
    model, x, y = nn.Bilinear(3, 2, 4), torch.randn(*batch, 3), torch.randn(*batch, 2)
    optimizer = KFACOptimizer(model, lr=0.0)
    output = model(x, y)
    output.retain_grad()
    terms = len(x) if batch else 1
    (output.square().sum() / terms).backward()
    optimizer.step()
    a = oracles.linear_rows(torch.einsum("...i,...j->...ij", x, y).flatten(-2))
    expected = oracles.factors(a, oracles.linear_rows(output.grad), terms=terms, bias=True)
    assert_same(optimizer.factors()[""], expected)


def test_a_first_batch_without_examples_is_no_error() -> None:
    model = nn.Bilinear(3, 2, 4)
    optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1)
    for size in (0, 5):
        optimizer.zero_grad()
        model(torch.randn(size, 3), torch.randn(size, 2)).square().sum().backward()
        optimizer.step()
    assert optimizer.metrics()["measured_parameters"] == 1.0


def test_products_of_narrow_numbers_are_taken_in_the_dtype_of_the_factors() -> None:
    first, second = (300 + torch.randn(4, size).half() for size in (2, 3))
    spec = LayerSpec("layer", ("weight",), 6, 2)
    call = LayerCall(torch.cat([first, second], -1), torch.ones(4, 2, dtype=torch.float16))
    rows = (first.float().unsqueeze(-1) * second.float().unsqueeze(-2)).flatten(1)
    stats = BilinearStatistics(2, spec, call, torch.float32)
    stats.subsample(Draw(Subsample(examples=3), 0))
    taken = rows[stats._sample.examples]
    torch.testing.assert_close(stats.input_moment(Structure.DENSE)[0], taken.T @ taken * 4 / 3)
