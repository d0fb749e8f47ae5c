import pytest
import torch
from helpers import oracles
from helpers.cases import STRUCTURES, Bias, LinearCase, any_loss, linear_cases, measure
from helpers.oracles import assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import DEFAULT_ADAPTERS, KFACOptimizer, LossTerms, Structure, WeightSharing
from kfac_optim.factors.layer_call import LayerCall

pytestmark = pytest.mark.usefixtures("float64")


@given(case=linear_cases(), sharing=st.sampled_from(WeightSharing), structure=st.sampled_from(STRUCTURES))
def test_factors_equal_their_definition(
    case: LinearCase, sharing: WeightSharing, structure: tuple[Structure, Structure]
) -> None:
    model = nn.Sequential(case.module())
    measured = measure(model, case.input(), weight_sharing=sharing, structure=structure)
    a, g = case.rows(model[0], measured.calls["0"])
    expected = oracles.factors(a, g, terms=case.examples, bias=case.trains_bias, sharing=sharing, structure=structure)
    assert_same(measured.factors["0"], expected)


@given(case=linear_cases())
def test_rows_reproduce_output_and_gradient(case: LinearCase) -> None:
    module = case.module()
    call = measure(nn.Sequential(module), case.input()).calls["0"]
    adapter = DEFAULT_ADAPTERS[nn.Linear]
    trained = {name for name, param in module.named_parameters() if param.requires_grad}
    (spec,) = adapter.specs(module, "", trained)
    a, g = adapter.statistics(module, spec, LayerCall(call.input, call.gradient), torch.float64).rows()
    matrix = oracles.gradient_matrix(
        module, {name: param for name, param in module.named_parameters() if name in trained}
    )
    output = a @ matrix.mT.unsqueeze(1)
    if case.bias is Bias.FROZEN:
        output = output + module.bias
    assert_same(output, oracles.linear_rows(call.output))
    assert_same(torch.einsum("xnro,xnri->xoi", g, a), oracles.gradient_matrix(module))


@given(case=linear_cases(), sharing=st.sampled_from(WeightSharing))
def test_the_model_may_be_the_layer_itself(case: LinearCase, sharing: WeightSharing) -> None:
    module = case.module()
    measured = measure(module, case.input(), weight_sharing=sharing)
    a, g = case.rows(module, measured.calls[""])
    expected = oracles.factors(a, g, terms=case.examples, bias=case.trains_bias, sharing=sharing)
    assert_same(measured.factors[""], expected)


@pytest.mark.parametrize("loss_terms", LossTerms)
@pytest.mark.parametrize("shape", [(1, 4), (4,)], ids=["batch of one", "unbatched"])
@given(bias=st.booleans(), hidden=st.integers(1, 4))
def test_with_one_example_the_kronecker_product_is_its_gradient_times_itself(
    loss_terms: LossTerms, shape: tuple[int, ...], bias: bool, hidden: int
) -> None:
    model = nn.Sequential(nn.Linear(4, hidden, bias=bias), nn.Tanh(), nn.Linear(hidden, 3, bias=bias))
    if loss_terms is LossTerms.ELEMENTS:  # a mean over one element
        model.append(nn.Linear(3, 1))
    measured = measure(model, torch.randn(shape), loss_terms=loss_terms)
    for name, (a, g) in measured.factors.items():
        gradient = oracles.gradient_matrix(model.get_submodule(name)).flatten(1)
        assert_same(oracles.kronecker(a, g), gradient.unsqueeze(2) * gradient.unsqueeze(1))


class _Gate(nn.Linear):
    """A subclass with a habit of its own that leaves the function alone."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.clone())


def test_a_subclass_is_measured_like_its_base() -> None:
    module, features = _Gate(3, 2), torch.randn(5, 4, 3)
    measured = measure(nn.Sequential(module), features)
    call = measured.calls["0"]
    a, g = oracles.linear_rows(call.input), oracles.linear_rows(call.gradient)
    assert_same(measured.factors["0"], oracles.factors(a, g, terms=5, bias=True))


def test_the_bias_column_of_reduce_is_one() -> None:
    a, _ = measure(nn.Linear(3, 2), torch.randn(4, 6, 3), weight_sharing=WeightSharing.REDUCE).factors[""]
    assert_same(a[0, -1, -1], torch.tensor(1.0))


def test_reduce_and_expand_agree_without_shared_positions() -> None:
    model, features = nn.Linear(3, 2), torch.randn(4, 1, 3)
    results = []
    for sharing in WeightSharing:
        torch.manual_seed(1)
        results.append(measure(model, features, weight_sharing=sharing).factors[""])
    assert_same(results[0], results[1])


@pytest.mark.parametrize("sharing", WeightSharing)
@pytest.mark.parametrize("shape", [(0, 3), (0, 4, 3)])
def test_an_empty_batch_counts_nothing(shape: tuple[int, ...], sharing: WeightSharing) -> None:
    model = nn.Linear(3, 2)
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=sharing, factor_update_period=1)
    any_loss(model(torch.randn(5, 4, 3))).backward()
    optimizer.step()
    before = optimizer.factors()[""]
    any_loss(model(torch.randn(shape))).backward()
    optimizer.step()
    assert_same(optimizer.factors()[""], before, rtol=0)


# A deep linear network has the same Jacobian at every input. A loss that is linear in one output coordinate
# backpropagates one column of it, so a batch with every example repeated per coordinate gives the exact
# Gauss-Newton matrix of a squared error through the empirical estimate (Eschenhagen et al. 2023, §3).


def _measure_columns(model: nn.Module, features: Tensor, outputs: int, terms: int, sharing: WeightSharing) -> dict:
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=sharing)
    output = model(features.repeat_interleave(outputs, 0))
    chosen = torch.eye(outputs).repeat(len(features), 1)
    chosen = chosen.reshape(len(chosen), *(1,) * (output.dim() - 2), outputs)
    optimizer.set_loss_terms(terms)
    ((output * chosen).sum() / terms).backward()
    optimizer.step()
    return optimizer.factors()


class _MeanOverPositions(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features.mean(1)


@pytest.mark.parametrize("bias", [True, False])
def test_expand_is_the_gauss_newton_matrix_of_a_deep_linear_net_with_a_loss_term_per_position(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Linear(4, 2, bias=bias), nn.Linear(2, 3, bias=bias))
    features = torch.randn(5, 4, 3)
    measured = _measure_columns(model, features, outputs=3, terms=5 * 4, sharing=WeightSharing.EXPAND)
    assert len(measured) == 3
    for name, (a, g) in measured.items():
        exact = oracles.ggn(model, name, features, lambda output: output.flatten(0, 1))
        assert_same(oracles.kronecker(a, g)[0], exact)


@pytest.mark.parametrize("bias", [True, False])
def test_reduce_is_the_gauss_newton_matrix_of_a_deep_linear_net_with_a_mean_over_positions(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Linear(4, 3, bias=bias), _MeanOverPositions())
    features = torch.randn(5, 4, 3)
    measured = _measure_columns(model, features, outputs=3, terms=5, sharing=WeightSharing.REDUCE)
    assert len(measured) == 2
    for name, (a, g) in measured.items():
        assert_same(oracles.kronecker(a, g)[0], oracles.ggn(model, name, features, lambda output: output))
