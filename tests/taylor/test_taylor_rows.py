"""Statistics of layers that value and derivatives go through together, against per-example Jacobians in float64."""

import warnings

import pytest
import torch
from helpers.cases import STRUCTURES
from helpers.oracles import assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from kfac_optim import KFACOptimizer, LayerSpec, LayerStatistics, LossTerms, Structure, Subsample, WeightSharing
from kfac_optim.factors.layer_call import LayerCall, adds_bias_to_first
from kfac_optim.inverses.pair_inverse import PairState
from kfac_optim.layers.product import ProductStatistics
from kfac_optim.taylor import laplacian

pytestmark = pytest.mark.usefixtures("float64")


class Wave(nn.Module):
    """A layer of features, a residual connection, an output without bias, and one weight that `@` multiplies by."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(2 * d, 4), nn.Linear(4, 4), nn.Linear(3, 1, bias=False)
        self.mix = nn.Parameter(torch.randn(4, 3) / 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(torch.cat([x.sin(), x.cos()], dim=-1)).tanh()
        hidden = hidden + torch.tanh(self.inner(hidden))
        result: Tensor = self.leave((hidden @ self.mix).tanh())
        return result


class Places(nn.Module):
    """A layer that each example goes through at two positions."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(d, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.leave(self.enter(torch.stack([x.sin(), x.cos()], 1)).tanh().sum(1))
        return result


def plain(d: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 3), nn.SiLU(), nn.Linear(3, 1))


@pytest.mark.parametrize("make", [plain, Wave, Places])
@given(examples=st.integers(1, 4), d=st.integers(1, 3))
def test_rows_of_a_residual_add_up_to_its_jacobian_for_each_example(
    make: type[nn.Module], examples: int, d: int
) -> None:
    model, x = make(d), torch.randn(examples, d)
    parameters = {name: param.detach() for name, param in model.named_parameters()}

    def residual(values: dict[str, Tensor], one: Tensor) -> Tensor:
        def of_inputs(point: Tensor) -> Tensor:
            return functional_call(model, values, (point[None],))[0, 0]

        return jacrev(jacrev(of_inputs))(one).trace() + 0.5 * of_inputs(one) ** 2 + of_inputs(one)

    expected = vmap(jacrev(residual), in_dims=(None, 0))(parameters, x)
    seen: dict[str, LayerStatistics] = {}
    optimizer = KFACOptimizer(model, lr=0.0, loss_terms=LossTerms.SUM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProductStatistics, "rows_may_wait", False)
        patch.setattr(PairState, "accumulate", lambda _state, stats: seen.__setitem__(stats.spec.name, stats))
        found = laplacian(model, x)
        (found.laplacian + 0.5 * found.value.square() + found.value).sum().backward()
    assert len(seen) == len({name.rpartition(".")[0] or name for name in parameters})
    for stats in seen.values():
        a, g = stats.rows()
        jacobian = torch.einsum("gnso,gnsi->noi", g, a)
        name = stats.spec.name
        weight, *bias = [name] if name in parameters else [f"{name}.{param}" for param in stats.spec.params]
        flipped = weight == "mix"
        wanted = [expected[weight].mT if flipped else expected[weight], *(expected[b].unsqueeze(-1) for b in bias)]
        assert_same(jacobian, torch.cat(wanted, dim=-1), rtol=1e-12)
    optimizer.remove_hooks()


def test_all_layers_are_preconditioned_and_none_is_left_to_sgd() -> None:
    model = Wave(2)
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=1)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            optimizer.zero_grad()
            points = torch.rand(40, 2)
            inside = laplacian(model, points).laplacian.squeeze(-1) + points.sum(-1).sin()
            loss = inside.square().mean() / 2 + 5 * model(torch.rand(10, 2).round()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert "100%" in str(optimizer.summary())
    assert "SGD" not in str(optimizer.summary())
    assert losses[-1] < losses[0]


def test_layers_called_by_themselves_have_the_factors_of_the_model() -> None:
    model, x, factors = plain(2), torch.rand(20, 2), []
    for called in (model, lambda x: model[4](model[3](model[2](model[1](model[0](x)))))):
        optimizer = KFACOptimizer(model, lr=0.0)
        optimizer.set_loss_terms(1)
        found = laplacian(called, x)
        (found.laplacian.sin() + found.value).sum().backward()
        optimizer.step()
        factors.append(optimizer.factors())
        optimizer.remove_hooks()
    assert factors[0].keys() == factors[1].keys() == {"0", "2", "4"}
    for name, pair in factors[0].items():
        assert_same(pair, factors[1][name])


def test_layers_of_other_kinds_take_the_sgd_step_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Tanh(), nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4))
    optimizer, x = KFACOptimizer(model, lr=0.01, factor_update_period=1), torch.rand(20, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            # The value alone goes through them as well, which must not be taken for all.
            (laplacian(model, x).laplacian.square().mean() + model(x).square().mean()).backward()
            optimizer.step()
    said = " ".join(str(each.message) for each in caught)
    assert "a part was captured and takes the plain SGD step ('1')" in said
    assert "'4.weight' is used by conv1d in a way that is not measured" in said
    assert optimizer.factors().keys() == {"0"}


@given(
    shape=st.tuples(*[st.integers(1, 3)] * 4),
    first=st.integers(1, 5),
    structure=st.sampled_from(STRUCTURES[:4]),
    sharing=st.sampled_from(WeightSharing),
)
def test_the_bias_column_is_one_at_the_first_positions_and_zero_elsewhere(
    shape: tuple[int, ...], first: int, structure: tuple[Structure, Structure], sharing: WeightSharing
) -> None:
    batch, positions, inputs, outputs = shape
    first = min(first, positions)
    a, g = torch.randn(batch, positions, inputs), torch.randn(batch, positions, outputs)
    g[0, -1] = 0  # a position that does not count
    column = torch.zeros(batch, positions, 1)
    column[:, :first] = 1
    with_bias = LayerSpec("layer", ("weight", "bias"), inputs + 1, outputs, weight_sharing=sharing)
    without = LayerSpec("layer", ("weight",), inputs + 1, outputs, weight_sharing=sharing)
    stats = ProductStatistics(with_bias, LayerCall(a, g, context=adds_bias_to_first(first)), torch.float64)
    spelled = ProductStatistics(without, LayerCall(torch.cat([a, column], dim=-1), g), torch.float64)
    directions = torch.randn(inputs + 1, 2)
    for kind in structure:
        if kind is not Structure.IDENTITY:
            assert_same(stats.input_moment(kind), spelled.input_moment(kind))
            assert_same(stats.output_moment(kind), spelled.output_moment(kind))
    assert_same(stats.rows(), spelled.rows())
    assert_same(stats.gradient_along(directions), spelled.gradient_along(directions))
    assert stats.count == spelled.count


def test_some_of_the_rows_keep_their_bias_column() -> None:
    model, x = plain(2), torch.rand(64, 2)
    factors = []
    for subsample in (Subsample(), Subsample(examples=16)):
        optimizer = KFACOptimizer(model, lr=0.0, subsample=subsample)
        laplacian(model, x).laplacian.sum().backward()
        optimizer.step()
        factors.append(optimizer.factors()["0"][0])
        optimizer.remove_hooks()
    assert_same(factors[0][0, -1, -1], torch.tensor(0.25))  # one of four positions has the bias
    assert_same(factors[1][0, -1, -1], torch.tensor(0.25))
