import oracles
import pytest
import torch
from cases import STRUCTURES, Bias, ConvCase, any_loss, conv_cases, measure, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_same
from torch import Tensor, nn

from kfac_optim import DEFAULT_ADAPTERS, KFACOptimizer, LossTerms, Structure, WeightSharing
from kfac_optim.calls import LayerCall

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]


@settings(max_examples=120)
@given(case=conv_cases(), sharing=st.sampled_from(WeightSharing), structure=st.sampled_from(STRUCTURES))
def test_factors_equal_their_definition_by_patches(
    case: ConvCase, sharing: WeightSharing, structure: tuple[Structure, Structure]
) -> None:
    model = nn.Sequential(case.module())
    measured = measure(model, case.input(), weight_sharing=sharing, structure=structure)
    a, g = case.rows(model[0], measured.calls["0"])
    expected = oracles.factors(a, g, terms=case.examples, bias=case.trains_bias, sharing=sharing, structure=structure)
    assert_same(measured.factors["0"], expected)


@settings(max_examples=60)
@given(case=conv_cases())
def test_rows_reproduce_output_and_gradient(case: ConvCase) -> None:
    module = case.module()
    call = measure(nn.Sequential(module), case.input()).calls["0"]
    adapter = DEFAULT_ADAPTERS[type(module)]
    trained = {name for name, param in module.named_parameters() if param.requires_grad}
    (spec,) = adapter.specs(module, "", trained)
    a, g = adapter.statistics(module, spec, LayerCall(call.input, call.gradient), torch.float64).rows()
    matrix = oracles.gradient_matrix(
        module, {name: param for name, param in module.named_parameters() if name in trained}
    )
    output = a @ matrix.mT.unsqueeze(1)
    if case.bias is Bias.FROZEN:
        output = output + oracles.gradient_matrix(module, dict(module.named_parameters()))[:, None, None, :, -1]
    assert_same(output, oracles.conv_gradient_rows(module, call.output))
    assert_same(torch.einsum("xnro,xnri->xoi", g, a), oracles.gradient_matrix(module))


@settings(max_examples=60)
@given(case=conv_cases(one_position=True), sharing=st.sampled_from(WeightSharing))
def test_with_one_example_and_position_the_kronecker_product_of_each_group_is_its_gradient_times_itself(
    case: ConvCase, sharing: WeightSharing
) -> None:
    module = case.module()
    measured = measure(nn.Sequential(module), case.input(), weight_sharing=sharing)
    positions = measured.calls["0"].output.shape[case.channel_axis + 1 :]
    assert positions.numel() == 1
    gradient = oracles.gradient_matrix(module).flatten(1)
    a, g = measured.factors["0"]
    assert len(a) == case.groups
    assert_same(oracles.kronecker(a, g), gradient.unsqueeze(2) * gradient.unsqueeze(1))


@pytest.mark.parametrize("loss_terms", LossTerms)
def test_the_model_may_be_the_layer_itself(loss_terms: LossTerms) -> None:
    module = nn.Conv2d(2, 4, (2, 3), padding=1, groups=2)
    measured = measure(module, torch.randn(3, 2, 4, 4), loss_terms=loss_terms)
    call = measured.calls[""]
    a, g = oracles.conv_rows(module, call.input), oracles.conv_gradient_rows(module, call.gradient)
    output = call.output
    terms = {
        LossTerms.EXAMPLES: 3,
        LossTerms.POSITIONS: output.numel() // output.shape[-1],
        LossTerms.ELEMENTS: output.numel(),
        LossTerms.SUM: 1,
    }[loss_terms]
    assert_same(measured.factors[""], oracles.factors(a, g, terms=terms, bias=True))


class _Standardised(nn.Conv2d):
    """A subclass with a habit of its own that leaves the function alone."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.clone())


def test_a_subclass_is_measured_like_its_base() -> None:
    module = _Standardised(2, 3, 2)
    measured = measure(nn.Sequential(module), torch.randn(3, 2, 4, 3))
    call = measured.calls["0"]
    a, g = oracles.conv_rows(module, call.input), oracles.conv_gradient_rows(module, call.gradient)
    assert_same(measured.factors["0"], oracles.factors(a, g, terms=3, bias=True))


@pytest.mark.parametrize("sharing", WeightSharing)
def test_an_empty_batch_counts_nothing(sharing: WeightSharing) -> None:
    model = nn.Conv1d(2, 3, 2)
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=sharing)
    for features in (torch.randn(4, 2, 5), torch.randn(0, 2, 5)):
        before = optimizer.factors()[""]
        any_loss(model(features)).backward()
        optimizer.step()
    assert_same(optimizer.factors()[""], before, rtol=0)


@pytest.mark.parametrize("groups", [1, 2])
def test_expand_is_the_gauss_newton_matrix_of_a_convolution_with_a_loss_term_per_position(groups: int) -> None:
    # One layer, one output coordinate per backward: see the deep linear networks in test_linear.py.
    model = nn.Conv2d(2, 2 * groups, 2, padding=1, groups=groups)
    images = torch.randn(3, 2, 3, 2)
    positions, outputs = 4 * 3, 2 * groups
    optimizer = KFACOptimizer(model, lr=0.0)
    output = model(images.repeat_interleave(outputs, 0))
    optimizer.set_loss_terms(3 * positions)
    chosen = torch.eye(outputs).repeat(3, 1)[..., None, None]
    ((output * chosen).sum() / (3 * positions)).backward()
    optimizer.step()
    a, g = optimizer.factors()[""]
    exact = oracles.ggn(model, "", images, lambda output: output.movedim(1, -1).flatten(0, -2))
    assert_same(torch.block_diag(*oracles.kronecker(a, g)), exact)


def test_reduce_is_the_gauss_newton_matrix_of_a_convolution_under_a_mean_over_positions() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    images = torch.randn(5, 2, 4, 6)
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=WeightSharing.REDUCE)
    output = model(images.repeat_interleave(2, 0))
    optimizer.set_loss_terms(5)
    ((output * torch.eye(2).repeat(5, 1)).sum() / 5).backward()
    optimizer.step()
    for name, (a, g) in optimizer.factors().items():
        assert_same(oracles.kronecker(a, g)[0], oracles.ggn(model, name, images, lambda output: output))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("ndim", [2, 3])
def test_channels_last_weights_take_the_same_steps_as_contiguous_ones(ndim: int, options: dict[str, bool]) -> None:
    conv, layout = {2: (nn.Conv2d, torch.channels_last), 3: (nn.Conv3d, torch.channels_last_3d)}[ndim]
    plain, permuted = conv(3, 4, 2), conv(3, 4, 2)
    permuted.load_state_dict(plain.state_dict())
    permuted.to(memory_format=layout)
    assert not permuted.weight.is_contiguous()
    optimizers = [
        KFACOptimizer(model, lr=0.5, momentum=0.9, weight_decay=0.1, inverse_update_period=1, **options)
        for model in (plain, permuted)
    ]
    for seed in range(3):
        images = torch.randn(5, 3, *(3,) * ndim)
        for model, optimizer in zip((plain, permuted), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(seed)
            any_loss(model(images)).backward()
            optimizer.step()
    assert_same(list(snapshot(permuted).values()), list(snapshot(plain).values()))
    buffer = optimizers[1].state[permuted.weight]["momentum_buffer"]
    assert buffer.stride() == permuted.weight.stride()
