import warnings
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.cases import STRUCTURES, Bias, ConvCase, any_loss, conv_cases, correlating, measure, snapshot
from helpers.oracles import assert_same
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import DEFAULT_ADAPTERS, KFACOptimizer, LossTerms, Structure, WeightSharing
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.patches import Patches

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


# -- moments without unfolding ---------------------------------------------------------------------------------------


def moment(
    module: nn.Module, features: Tensor, gradient: Tensor, structure: Structure, sharing: WeightSharing, bias: bool
) -> tuple[Tensor, float]:
    """`Σ a aᵀ` of one call, or its diagonal, and how many rows are in it."""
    adapter = DEFAULT_ADAPTERS[type(module)]
    (spec,) = adapter.specs(module, "", {"weight", "bias"} if bias else {"weight"})
    spec = replace(spec, weight_sharing=sharing)
    stats = adapter.statistics(module, spec, LayerCall(features, gradient), features.dtype)
    return stats.input_moment(structure), float(stats.count)


def expected_moment(rows: Tensor, active: Tensor, structure: Structure, sharing: WeightSharing, bias: bool) -> Tensor:
    """From `[groups, batch, positions, columns]` and the rows `[batch, positions]` that count."""
    examples = []
    for example, kept in zip(rows.unbind(1), active, strict=True):
        a = oracles.with_ones(example[:, kept], bias)
        examples.append(a.mean(1, keepdim=True) if sharing is WeightSharing.REDUCE and kept.any() else a)
    a = torch.cat(examples, dim=1)
    return a.square().sum(1) if structure is Structure.DIAGONAL else a.mT @ a


def with_inactive(case: ConvCase, module: nn.Module, features: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """An output gradient that is zero at about `share` of the positions, and `[batch, positions]` where it is not."""
    gradient = torch.randn_like(module(features).detach())
    batched = gradient if case.batched else gradient[None]
    active = torch.rand_like(batched[:, 0]) >= share
    batched *= active.unsqueeze(1)
    return gradient, active.flatten(1)


@settings(max_examples=200)
@given(
    case=conv_cases(),
    sharing=st.sampled_from(WeightSharing),
    structure=st.sampled_from([Structure.DENSE, Structure.DIAGONAL]),
    share=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_moments_without_unfolding_are_those_of_the_active_patches(
    case: ConvCase, sharing: WeightSharing, structure: Structure, share: float
) -> None:
    module, features = case.module(), case.input()
    gradient, active = with_inactive(case, module, features, share)
    assume(bool(active.any()))
    with correlating() as seen:
        ours, _ = moment(module, features, gradient, structure, sharing, case.trains_bias)
    expected = expected_moment(oracles.conv_rows(module, features), active, structure, sharing, case.trains_bias)
    assert_same(ours, expected, rtol=1e-12)
    event(f"correlated {len(seen)} times with {share} inactive")


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e100])
@pytest.mark.parametrize("structure", [Structure.DENSE, Structure.DIAGONAL])
@pytest.mark.parametrize("sharing", WeightSharing)
@pytest.mark.parametrize("bias", [True, False])
def test_what_inactive_patches_hold_does_not_matter(
    garbage: float, structure: Structure, sharing: WeightSharing, bias: bool
) -> None:
    module = nn.Conv2d(2, 3, 3, padding=1, bias=bias)
    features, gradient = torch.randn(4, 2, 6, 6), torch.randn(4, 3, 6, 6)
    features[1, :, :2, :2] = garbage
    gradient[1, :, :3, :3] = 0
    with correlating() as seen:
        ours, _ = moment(module, features, gradient, structure, sharing, bias)
    assert len(seen) == (structure is Structure.DENSE and sharing is WeightSharing.EXPAND)
    clean = torch.where(features.abs() < 10, features, 0.0)
    active = (gradient != 0).any(1).flatten(1)
    assert_same(ours, expected_moment(oracles.conv_rows(module, clean), active, structure, sharing, bias), rtol=1e-12)


@pytest.mark.parametrize(("zero", "correlations"), [(0, 1), (48, 1), (49, 0), (100, 0)])
def test_of_many_inactive_patches_none_is_made(zero: int, correlations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Conv2d(2, 3, 3, padding=1)
    features, gradient = torch.randn(4, 2, 6, 6), torch.randn(4, 3, 36)
    active = torch.ones(4 * 36, dtype=torch.bool)
    active[torch.randperm(4 * 36)[:zero]] = False
    gradient = (gradient * active.view(4, 1, 36)).view(4, 3, 6, 6)
    made: list[int] = []

    def marked_rows(patches: Patches, marked: Tensor) -> Tensor:
        rows = marked_rows_of(patches, marked)
        made.append(rows.shape[2])
        return rows

    marked_rows_of = Patches.marked_rows
    monkeypatch.setattr(Patches, "marked_rows", marked_rows)
    with correlating() as seen:
        moment(module, features, gradient, Structure.DENSE, WeightSharing.EXPAND, True)
    assert len(seen) == correlations
    assert made == ([] if zero == 0 else [zero] if correlations else [144 - zero])


@pytest.mark.parametrize("structure", [Structure.DENSE, Structure.DIAGONAL])
def test_a_layer_where_it_pays_is_measured_without_its_patches(
    structure: Structure, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Conv2d(16, 4, 3, padding=1)
    features, gradient = torch.randn(8, 16, 16, 16), torch.randn(8, 4, 16, 16)
    expected, _ = moment(module, features, gradient, structure, WeightSharing.EXPAND, True)
    rows = oracles.with_ones(oracles.conv_rows(module, features), True).flatten(1, 2)
    assert_same(expected, rows.mT @ rows if structure is Structure.DENSE else rows.square().sum(1), rtol=1e-12)
    wide: list[int] = []
    rows_of = Patches.rows

    def counted(patches: Patches, positions: Tensor | None = None) -> Tensor:
        rows = rows_of(patches, positions)
        wide.append(rows.numel())
        return rows

    monkeypatch.setattr(Patches, "rows", counted)
    moment(module, features, gradient, structure, WeightSharing.EXPAND, True)
    assert sum(wide) < features.numel()


@pytest.mark.parametrize("sharing", WeightSharing)
def test_several_backwards_are_as_one_of_their_sum_without_unfolding(sharing: WeightSharing) -> None:
    module = nn.Conv2d(2, 3, 3, padding=1)
    features, first, then = torch.randn(4, 2, 6, 6), torch.randn(4, 3, 6, 6), torch.randn(4, 3, 6, 6)
    first[0, :, 0] = then[0, :, 5] = 0
    adapter = DEFAULT_ADAPTERS[type(module)]
    (spec,) = adapter.specs(module, "", {"weight", "bias"})
    spec = replace(spec, weight_sharing=sharing)
    calls = [LayerCall(features, first), LayerCall(features, first + then, first)]
    with correlating():
        parts = [adapter.statistics(module, spec, call, torch.float64).input_moment(Structure.DENSE) for call in calls]
    rows = oracles.conv_rows(module, features)
    every = torch.ones(4, 36, dtype=torch.bool)
    assert_same(sum(parts), expected_moment(rows, every, Structure.DENSE, sharing, True), rtol=1e-12)


class _Cloning(nn.Conv2d):
    """A subclass with a habit of its own that leaves the function alone."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.clone())


def test_a_subclass_is_measured_like_its_base() -> None:
    module = _Cloning(2, 3, 2)
    measured = measure(nn.Sequential(module), torch.randn(3, 2, 4, 3))
    call = measured.calls["0"]
    a, g = oracles.conv_rows(module, call.input), oracles.conv_gradient_rows(module, call.gradient)
    assert_same(measured.factors["0"], oracles.factors(a, g, terms=3, bias=True))


class _Causal(nn.Conv1d):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(F.pad(features, (2, 0)))


class _CausalWithin(nn.Conv1d):
    def _conv_forward(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(F.pad(features, (2, 0)), weight, bias)


def _causal_alone(inputs: int, outputs: int, kernel: int) -> nn.Conv1d:
    module = nn.Conv1d(inputs, outputs, kernel)
    module.forward = MethodType(_Causal.forward, _as(module, _Causal))
    return module


def _as(module: nn.Conv1d, cls: type[nn.Conv1d]) -> nn.Conv1d:
    """A module that shares all that `module` has, and is of that class."""
    other = cls.__new__(cls)
    other.__dict__ = {**module.__dict__}
    return other


@pytest.mark.parametrize("causal", [_Causal, _CausalWithin, _causal_alone])
@pytest.mark.parametrize("sharing", WeightSharing)
def test_a_convolution_that_pads_its_input_itself_is_measured_where_its_output_has_positions(
    causal: Callable[..., nn.Conv1d], sharing: WeightSharing
) -> None:
    plain = nn.Sequential(nn.ZeroPad1d((2, 0)), nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(21, 2))
    model = nn.Sequential(nn.Identity(), causal(2, 3, 3), *plain[2:])
    model[1].load_state_dict(plain[1].state_dict())
    images, target = torch.randn(4, 2, 7), torch.randn(4, 2)
    ours, expected = (
        measure(each, images, lambda output: (output - target).square().sum(), weight_sharing=sharing).factors
        for each in (model, plain)
    )
    assert_same(ours["1"], expected["1"])


class _Called(nn.Conv2d):
    """Calls torch's function as it is told to."""

    arguments: dict[str, Any]

    def forward(self, features: Tensor) -> Tensor:
        return F.conv2d(input=features, weight=self.weight, bias=self.bias, **self.arguments)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"stride": 2, "padding": (1, 2)},
        {"stride": (2,), "padding": [1], "dilation": (1, 2)},
        {"padding": "same", "dilation": 2},
        {"padding": "valid", "stride": (1, 3)},
    ],
    ids=str,
)
def test_in_a_forward_of_its_own_the_arguments_of_the_function_count_and_not_those_of_the_module(
    arguments: dict[str, Any], batch: tuple[int, ...]
) -> None:
    of_module = {name: value[0] if value in ((2,), [1]) else value for name, value in arguments.items()}
    plain, own = nn.Conv2d(4, 6, (2, 3), groups=2, **of_module), _Called(4, 6, (2, 3), groups=2, padding=3)
    own.load_state_dict(plain.state_dict())
    own.arguments = {**arguments, "groups": 2}
    images = torch.randn(*batch, 4, 7, 8)
    ours, expected = (measure(each, images, lambda output: output.sin().sum()).factors[""] for each in (own, plain))
    assert_same(ours, expected)


class _Pyramid(nn.Conv2d):
    """One kernel at several dilations."""

    def forward(self, features: Tensor) -> Tensor:
        return sum(F.conv2d(features, self.weight, self.bias, padding=d, dilation=d) for d in (1, 2))


def test_every_call_with_the_weight_counts_in_a_forward_of_its_own() -> None:
    module, images = _Pyramid(2, 3, 3), torch.randn(4, 2, 6, 6)
    calls = []
    for dilation in (1, 2):
        plain = nn.Conv2d(2, 3, 3, padding=dilation, dilation=dilation)
        plain.load_state_dict(module.state_dict())
        calls.append(oracles.conv_rows(plain, images))
    gradient = (module(images).detach()).cos()
    a, g = torch.cat(calls, dim=1), oracles.conv_gradient_rows(module, gradient).repeat(1, 2, 1, 1)
    ours = measure(module, images, lambda output: output.sin().sum(), loss_terms=LossTerms.SUM).factors[""]
    assert_same(ours, oracles.factors(a, g, terms=1, bias=True))


class _InItsInputsDtype(nn.Conv1d):
    def _conv_forward(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(features, weight.to(features.dtype), bias.to(features.dtype))


def test_a_cast_of_the_weight_counts_as_the_weight() -> None:
    module, plain = _InItsInputsDtype(2, 3, 3), nn.Conv1d(2, 3, 3)
    module.load_state_dict(plain.state_dict())
    module.float()
    images = torch.randn(4, 2, 7)
    ours, expected = (
        measure(each, images, lambda output: output.sin().sum(), factor_dtype=torch.float64).factors[""]
        for each in (module, plain)
    )
    assert_same(ours, expected, rtol=1e-5)


def test_a_use_elsewhere_is_not_made_up_for_by_a_cast() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = _InItsInputsDtype(2, 2, 1).float(), nn.Linear(14, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.conv(F.conv1d(x.float(), self.conv.weight).double()).flatten(1))
            return out

    model = Twice()
    optimizer = KFACOptimizer(model, lr=0.1)
    model(torch.randn(4, 2, 7)).square().sum().backward()
    with pytest.warns(UserWarning, match="'conv.weight' is used by conv1d in a way that is not measured"):
        optimizer.step()


class _BiasApart(nn.Conv2d):
    def forward(self, features: Tensor) -> Tensor:
        return F.conv2d(features, self.weight) + 2 * self.bias[:, None, None]


def test_a_call_without_the_bias_is_none_with_it() -> None:
    model = nn.Sequential(_BiasApart(2, 3, 2), nn.Flatten(), nn.Linear(27, 2))
    optimizer = KFACOptimizer(model, lr=0.1)
    model(torch.randn(4, 2, 4, 4)).square().sum().backward()
    with pytest.warns(UserWarning, match="1 layer has gradients but no statistics"):
        optimizer.step()
    assert optimizer.factors().keys() == {"2"} or optimizer.metrics()["unpreconditioned_blocks"] == 1


def test_a_lazy_convolution_with_a_forward_of_its_own_counts_from_its_first_forward() -> None:
    lazy = nn.LazyConv1d(3, 3)
    lazy.forward = MethodType(lambda self, features: nn.Conv1d.forward(self, F.pad(features, (2, 0))), lazy)
    model = nn.Sequential(nn.Conv1d(2, 2, 1), lazy, nn.Flatten(), nn.LazyLinear(2))
    optimizer = KFACOptimizer(model, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, 2, 7)).square().sum().backward()
        optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0
    assert {"0", "1", "3"} == optimizer.factors().keys()


class _WeightStandardised(nn.Conv2d):
    def forward(self, features: Tensor) -> Tensor:
        mean, std = self.weight.mean((1, 2, 3), keepdim=True), self.weight.std((1, 2, 3), keepdim=True)
        return self._conv_forward(features, (self.weight - mean) / std, self.bias)


class _ScaledBias(nn.Conv2d):
    def forward(self, features: Tensor) -> Tensor:
        return self._conv_forward(features, self.weight, 2 * self.bias)


class _InGroups(nn.Conv2d):
    """Not the groups that its adapter was told of."""

    def forward(self, features: Tensor) -> Tensor:
        return F.conv2d(features[:, :2], self.weight, self.bias, groups=1)


@pytest.mark.parametrize("kind", [_WeightStandardised, _ScaledBias, _InGroups])
def test_a_convolution_by_something_else_than_its_parameters_takes_the_step_of_sgd(kind: type[nn.Conv2d]) -> None:
    model = nn.Sequential(kind(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(96, 2))
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None)
    before = snapshot(model)
    any_loss(model(torch.randn(3, 4, 6, 6))).backward()
    with pytest.warns(UserWarning, match=r"1 layer has gradients but no statistics .*'0'"):
        optimizer.step()
    for name in ("weight", "bias"):
        param = model[0].get_parameter(name)
        assert param.grad is not None
        assert torch.equal(param, before[f"0.{name}"].add(param.grad, alpha=-0.1))
    assert not torch.equal(model[2].weight, before["2.weight"].add(model[2].weight.grad, alpha=-0.1))


def test_a_forward_that_is_replaced_after_construction_and_changes_the_positions_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 3))
    optimizer = KFACOptimizer(model, lr=0.1)
    model[0].forward = MethodType(_Causal.forward, _as(model[0], _Causal))
    output = model(torch.randn(4, 2, 7))
    with pytest.raises(RuntimeError, match=r"layer '0' has 7 positions, not the 5 of its patches: .*skip_layers"):
        output.sum().backward()
    optimizer.remove_hooks()


@pytest.mark.parametrize("mode", ["zeros", "numbers", "reflect", "circular"])
def test_stride_padding_and_dilation_may_be_set_after_construction(mode: str) -> None:
    ours, plain = nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Conv2d(2, 3, 3, padding=2, dilation=2)
    ours.load_state_dict(plain.state_dict())
    ours.stride, ours.dilation, ours.padding = (1, 2, 2) if mode == "numbers" else ((1, 1), (2, 2), (2, 2))
    if mode in ("reflect", "circular"):  # such a forward pads by what was fixed at construction
        ours, plain = (nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode) for _ in range(2))
        ours.load_state_dict(plain.state_dict())
        ours.padding = (2, 2)
    images = torch.randn(4, 2, 6, 6)
    assert torch.equal(ours(images), plain(images))
    found, expected = (measure(each, images, lambda output: output.sin().sum()).factors[""] for each in (ours, plain))
    assert_same(found, expected)


@pytest.mark.parametrize("sharing", WeightSharing)
def test_an_empty_batch_counts_nothing(sharing: WeightSharing) -> None:
    model = nn.Conv1d(2, 3, 2)
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=sharing, factor_update_period=1)
    for features in (torch.randn(4, 2, 5), torch.randn(0, 2, 5)):
        before = optimizer.factors().get("")
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
        KFACOptimizer(
            model, lr=0.5, momentum=0.9, weight_decay=0.1, factor_update_period=1, inverse_update_period=1, **options
        )
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


class _ByFunction(nn.Module):
    """As in Mamba: the weight of a layer is given to its function, which the layer itself does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 2, groups=3)
        self.calls_layer = False

    def forward(self, x: Tensor) -> Tensor:
        if self.calls_layer:
            return self.conv(nn.functional.pad(x, (1, 1)))[..., : x.shape[-1]]
        weight = self.conv.weight.squeeze(1).unsqueeze(1)
        return nn.functional.conv1d(x, weight, self.conv.bias, padding=1, groups=3)[..., : x.shape[-1]]


@pytest.mark.parametrize("calls_layer_later", [False, True])
def test_a_grouped_convolution_called_by_function_is_measured_once(
    calls_layer_later: bool,
) -> None:
    results = []
    for by_layer in (True, False):
        torch.manual_seed(0)
        model = _ByFunction()
        optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1, factor_decay=1e-12)
        for step in range(3):
            model.calls_layer = by_layer or (calls_layer_later and step == 2)
            optimizer.zero_grad()
            any_loss(model(torch.randn(4, 3, 5))).backward()
            optimizer.step()
        results.append(optimizer.factors()["conv"])
        assert optimizer.metrics()["measured_parameters"] == 1.0
    assert_same(results[0], results[1])
