import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.cases import STRUCTURES, Bias, any_loss, correlating, sizes, snapshot
from helpers.oracles import assert_same
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import DEFAULT_ADAPTERS, KFACOptimizer, Structure, WeightSharing
from kfac_optim.factors.layer_call import LayerCall

pytestmark = pytest.mark.usefixtures("float64")

KINDS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class TransposedCase:
    """One layer, and the shape of one input for it."""

    shape: tuple[int, ...]
    out_channels: int
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    by_output_size: bool
    bias: Bias
    channels_last: bool

    @property
    def ndim(self) -> int:
        return len(self.kernel)

    @property
    def batched(self) -> bool:
        return len(self.shape) == self.ndim + 2

    @property
    def examples(self) -> int:
        return self.shape[0] if self.batched else 1

    @property
    def positions(self) -> tuple[int, ...]:
        space = self.shape[-self.ndim :]
        axes = zip(space, self.kernel, self.stride, self.padding, self.dilation, self.output_padding, strict=True)
        return tuple((n - 1) * s - 2 * p + d * (k - 1) + extra + 1 for n, k, s, p, d, extra in axes)

    def input(self) -> Tensor:
        tensor = torch.randn(self.shape)
        axis = len(self.shape) - self.ndim - 1
        return tensor.movedim(axis, -1).contiguous().movedim(-1, axis) if self.channels_last else tensor

    def module(self) -> nn.Module:
        module = KINDS[self.ndim - 1](
            self.shape[-self.ndim - 1],
            self.out_channels,
            self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            output_padding=0 if self.by_output_size else self.output_padding,
            groups=self.groups,
            bias=self.bias is not Bias.ABSENT,
        )
        if self.bias is Bias.FROZEN:
            module.bias.requires_grad_(False)
        return module

    def forward(self, module: nn.Module, features: Tensor) -> Tensor:
        output = module(features, output_size=self.positions) if self.by_output_size else module(features)
        assert output.shape[-self.ndim :] == self.positions
        output.retain_grad()
        return output


@st.composite
def transposed_cases(draw: st.DrawFn) -> TransposedCase:
    ndim = draw(st.integers(1, 3))

    def per_axis(strategy: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(strategy) for _ in range(ndim))

    groups = draw(sizes(3))
    batch = () if draw(st.integers(0, 3)) == 0 else (draw(sizes(3)),)
    stride, dilation = per_axis(sizes(3)), per_axis(sizes(2))
    by_output_size = draw(st.booleans())
    largest = [s - 1 if by_output_size else max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
    case = TransposedCase(
        shape=(*batch, groups * draw(sizes(2)), *per_axis(sizes(4 if ndim == 1 else 2))),
        out_channels=groups * draw(sizes(2)),
        groups=groups,
        kernel=per_axis(sizes(3 if ndim < 3 else 2)),
        stride=stride,
        padding=per_axis(st.integers(0, 3)),  # more than the kernel reaches: the input itself is cropped
        dilation=dilation,
        output_padding=tuple(draw(st.integers(0, most)) for most in largest),
        by_output_size=by_output_size,
        bias=draw(st.sampled_from(Bias)),
        channels_last=draw(st.booleans()),
    )
    assume(all(position > 0 for position in case.positions))
    return case


# -- oracles: what each output position reads, and the equivalent convolution ------------------------------------


def patches(case: TransposedCase, features: Tensor) -> Tensor:
    """`[groups, batch, positions, channels · taps]`: tap k of position o reads i where `o = s·i - p + d·k`."""
    features = features if case.batched else features[None]
    rows = []
    for position in itertools.product(*map(range, case.positions)):
        columns = []
        for flipped in itertools.product(*map(range, case.kernel)):
            read = []
            for axis, (at, tap) in enumerate(zip(position, flipped, strict=True)):
                k = case.kernel[axis] - 1 - tap
                index, rest = divmod(at + case.padding[axis] - case.dilation[axis] * k, case.stride[axis])
                inside = rest == 0 and 0 <= index < features.shape[2 + axis]
                read.append(index if inside else None)
            hit = None not in read
            columns.append(features[(..., *read)] if hit else torch.zeros_like(features.flatten(2)[..., 0]))
        rows.append(torch.stack(columns, dim=-1))  # [batch, channels, taps]
    stacked = torch.stack(rows, dim=1)  # [batch, positions, channels, taps]
    by_group = torch.stack(stacked.chunk(case.groups, dim=2))
    return by_group.flatten(3)


def gradient_rows(case: TransposedCase, tensor: Tensor) -> Tensor:
    tensor = tensor if case.batched else tensor[None]
    return torch.stack(tensor.chunk(case.groups, dim=1)).flatten(3).transpose(2, 3)


def equivalent_conv(case: TransposedCase, module: nn.Module) -> nn.Module:
    conv = CONVS[case.ndim - 1](
        module.in_channels,
        module.out_channels,
        case.kernel,
        dilation=case.dilation,
        groups=case.groups,
        bias=module.bias is not None,
    )
    with torch.no_grad():
        for group, weight in enumerate(module.weight.chunk(case.groups)):
            out = case.out_channels // case.groups
            flipped = weight.transpose(0, 1).flip(list(range(2, 2 + case.ndim)))
            conv.weight[group * out : (group + 1) * out] = flipped
        if module.bias is not None:
            conv.bias.copy_(module.bias)
            conv.bias.requires_grad_(module.bias.requires_grad)
    return conv


def interleaved(case: TransposedCase, features: Tensor) -> Tensor:
    """The input that `equivalent_conv` reads: cell j of each axis holds element i where `j = s·i + d(k-1) - p`."""
    reach = [d * (k - 1) for d, k in zip(case.dilation, case.kernel, strict=True)]
    space = [n + r for n, r in zip(case.positions, reach, strict=True)]
    wide = torch.zeros(*features.shape[: -case.ndim], *space)
    for source in itertools.product(*map(range, features.shape[-case.ndim :])):
        target = [s * i + r - p for s, i, r, p in zip(case.stride, source, reach, case.padding, strict=True)]
        if all(0 <= j < n for j, n in zip(target, space, strict=True)):
            wide[(..., *target)] = features[(..., *source)]
    return wide


def packed(case: TransposedCase, tensors: dict[str, Tensor]) -> Tensor:
    """Tensors shaped like weight and bias as `[groups, out, in]`, element by element."""
    weight = tensors["weight"]
    inputs, outputs = weight.shape[0] // case.groups, weight.shape[1]
    taps = list(itertools.product(*map(range, case.kernel)))
    matrix = torch.zeros(case.groups, outputs, inputs * len(taps))
    for group, out, channel in itertools.product(range(case.groups), range(outputs), range(inputs)):
        for column, flipped in enumerate(taps):
            tap = [k - 1 - f for k, f in zip(case.kernel, flipped, strict=True)]
            matrix[group, out, channel * len(taps) + column] = weight[(group * inputs + channel, out, *tap)]
    if "bias" in tensors:
        matrix = torch.cat([matrix, tensors["bias"].reshape(case.groups, outputs, 1)], dim=-1)
    return matrix


def trained(module: nn.Module, attribute: str = "data") -> dict[str, Tensor]:
    return {name: getattr(param, attribute) for name, param in module.named_parameters() if param.requires_grad}


# -- tests -------------------------------------------------------------------------------------------------------


@settings(max_examples=120)
@given(
    case=transposed_cases(),
    sharing=st.sampled_from(WeightSharing),
    structure=st.sampled_from(STRUCTURES),
    without_unfolding=st.booleans(),
)
def test_factors_equal_their_definition_by_patches(
    case: TransposedCase, sharing: WeightSharing, structure: tuple[Structure, Structure], without_unfolding: bool
) -> None:
    module, features = case.module(), case.input()
    optimizer = KFACOptimizer(module, lr=0.0, weight_sharing=sharing, structure=structure)
    output = case.forward(module, features)
    with correlating() if without_unfolding else nullcontext():
        any_loss(output).backward()
    optimizer.step()
    expected = oracles.factors(
        patches(case, features),
        gradient_rows(case, output.grad),
        terms=case.examples,
        bias=case.bias is Bias.TRAINED,
        sharing=sharing,
        structure=structure,
    )
    assert_same(optimizer.factors()[""], expected)


@settings(max_examples=60)
@given(case=transposed_cases())
def test_rows_reproduce_output_and_gradient(case: TransposedCase) -> None:
    module, features = case.module(), case.input()
    output = case.forward(module, features)
    any_loss(output).backward()
    adapter = DEFAULT_ADAPTERS[type(module)]
    (spec,) = adapter.specs(module, "", trained(module))
    a, g = adapter.statistics(module, spec, LayerCall(features, output.grad), torch.float64).rows()
    rebuilt = a @ packed(case, trained(module)).mT.unsqueeze(1)
    if case.bias is Bias.FROZEN:
        rebuilt = rebuilt + module.bias.reshape(case.groups, 1, 1, -1)
    assert_same(rebuilt, gradient_rows(case, output))
    assert_same(torch.einsum("xnro,xnri->xoi", g, a), packed(case, trained(module, "grad")))


@settings(max_examples=60)
@given(case=transposed_cases())
def test_packing_orders_columns_by_channel_and_flipped_kernel_and_is_undone(case: TransposedCase) -> None:
    module = case.module()
    adapter = DEFAULT_ADAPTERS[type(module)]
    (spec,) = adapter.specs(module, "", trained(module))
    tensors = trained(module)
    matrix = adapter.pack(spec, list(tensors.values()))
    assert matrix.shape == (spec.groups, spec.out_dim, spec.in_dim)
    assert_same(matrix, packed(case, tensors))
    parts = adapter.unpack(replace(spec, name="another", weight_sharing=WeightSharing.REDUCE), matrix)
    for part, tensor in zip(parts, tensors.values(), strict=True):
        assert torch.equal(part.reshape(tensor.shape), tensor)


@settings(max_examples=60)
@given(case=transposed_cases(), sharing=st.sampled_from(WeightSharing))
def test_factors_and_steps_are_those_of_the_equivalent_convolution(
    case: TransposedCase, sharing: WeightSharing
) -> None:
    module, features = case.module(), case.input()
    conv, wide = equivalent_conv(case, module), interleaved(case, features)
    factors, moves = [], []
    for layer, forward in ((module, lambda: case.forward(module, features)), (conv, lambda: conv(wide))):
        optimizer = KFACOptimizer(layer, lr=1.0, damping=0.1, kl_clip=None, weight_sharing=sharing)
        before = snapshot(layer)
        torch.manual_seed(3)
        output = forward()
        any_loss(output).backward()
        optimizer.step()
        factors.append(optimizer.factors()[""])
        moves.append({name: before[name] - param.detach() for name, param in layer.named_parameters()})
    assert_same(factors[0], factors[1])
    assert_same(packed(case, moves[0]), oracles.gradient_matrix(conv, moves[1]), rtol=1e-7)


@pytest.mark.parametrize("input_size", [1, 2])
def test_a_crop_longer_than_the_input_leaves_only_the_padding_of_the_other_end(input_size: int) -> None:
    case = TransposedCase(
        shape=(2, 1, input_size),
        out_channels=1,
        groups=1,
        kernel=(1,),
        stride=(1,),
        padding=(input_size + 2,),
        dilation=(12,),
        output_padding=(11,),
        by_output_size=False,
        bias=Bias.TRAINED,
        channels_last=False,
    )
    module = case.module()
    adapter = DEFAULT_ADAPTERS[type(module)]
    (spec,) = adapter.specs(module, "", {"weight"})
    features, output = case.input(), torch.ones(2, 1, *case.positions)
    a, _ = adapter.statistics(module, spec, LayerCall(features, output), torch.float64).rows()
    assert_same(a, patches(case, features))


def test_input_that_the_output_leaves_out_may_hold_anything() -> None:
    module = nn.ConvTranspose1d(2, 3, 2, padding=3)  # reads no further than one element before the first position
    features, gradient = torch.randn(4, 2, 9), torch.randn(4, 3, 4)
    adapter = DEFAULT_ADAPTERS[type(module)]
    (spec,) = adapter.specs(module, "", {"weight", "bias"})
    moments = []
    for outside in (0.0, torch.nan):
        features[..., :2] = features[..., 7:] = outside
        with correlating() as seen:
            stats = adapter.statistics(module, spec, LayerCall(features.clone(), gradient), torch.float64)
            moments.append(stats.input_moment(Structure.DENSE))
        assert len(seen) == 1
    assert_same(moments[1], moments[0])


def test_channels_last_weights_take_the_same_steps_as_contiguous_ones() -> None:
    plain, permuted = nn.ConvTranspose2d(4, 3, 2, stride=2), nn.ConvTranspose2d(4, 3, 2, stride=2)
    permuted.load_state_dict(plain.state_dict())
    permuted.to(memory_format=torch.channels_last)
    assert not permuted.weight.is_contiguous()
    for layer in (plain, permuted):
        optimizer = KFACOptimizer(layer, lr=0.5, momentum=0.9, inverse_update_period=1, factor_update_period=1)
        for seed in range(3):
            optimizer.zero_grad()
            torch.manual_seed(seed)
            any_loss(layer(torch.randn(5, 4, 3, 3))).backward()
            optimizer.step()
    assert_same(list(snapshot(permuted).values()), list(snapshot(plain).values()))


def test_a_transposed_convolution_is_not_tied_to_a_convolution_of_the_same_weight() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 3), nn.ConvTranspose1d(2, 2, 3), nn.Conv1d(2, 2, 1))
    model[1].weight = model[0].weight
    records = {record.name: record for record in KFACOptimizer(model).summary().parameters}
    assert records["0.weight"].block is None
    assert records["0.weight"].reason == "tied to a layer of another shape"


class _Cropping(nn.ConvTranspose1d):
    """As decoders of audio do: what the kernel reaches beyond the last input is cut off."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features)[..., : features.shape[-1] * self.stride[0]]


class _Called(nn.ConvTranspose1d):
    def forward(self, features: Tensor) -> Tensor:
        return F.conv_transpose1d(features, self.weight, self.bias, 2, [1], output_padding=1, groups=2, dilation=(2,))


@pytest.mark.parametrize("sharing", WeightSharing)
@pytest.mark.parametrize(
    ("own", "arguments", "crop"),
    [
        (_Cropping, {"stride": 2}, 2),
        (_Called, {"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2}, 0),
    ],
)
def test_in_a_forward_of_its_own_what_torchs_function_does_counts(
    own: type[nn.ConvTranspose1d], arguments: dict[str, int], crop: int, sharing: WeightSharing
) -> None:
    plain = nn.ConvTranspose1d(4, 6, 4, groups=2, **arguments)
    layer = own(4, 6, 4, groups=2, stride=2)
    layer.load_state_dict(plain.state_dict())
    features, factors = torch.randn(3, 4, 5), []
    for each, cropped in ((layer, 0), (plain, crop)):
        optimizer = KFACOptimizer(each, lr=0.0, weight_sharing=sharing)
        output = each(features)
        output[..., : output.shape[-1] - cropped].sin().sum().backward()
        optimizer.step()
        factors.append(optimizer.factors()[""])
    assert_same(*factors)


class _InOneGroup(nn.ConvTranspose1d):
    """Not the groups that its adapter was told of."""

    def forward(self, features: Tensor) -> Tensor:
        return F.conv_transpose1d(features, self.weight, groups=1)


def test_in_other_groups_than_its_own_it_takes_the_step_of_sgd() -> None:
    model = nn.Sequential(_InOneGroup(4, 6, 3, groups=2, bias=False), nn.Flatten(), nn.Linear(21, 2))
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None)
    before = snapshot(model)
    any_loss(model(torch.randn(3, 4, 5))).backward()
    with pytest.warns(UserWarning, match=r"1 layer has gradients but no statistics .*'0'"):
        optimizer.step()
    assert torch.equal(model[0].weight, before["0.weight"].add(model[0].weight.grad, alpha=-0.1))
    assert not torch.equal(model[2].weight, before["2.weight"].add(model[2].weight.grad, alpha=-0.1))


def test_stride_padding_and_dilation_may_be_set_after_construction() -> None:
    plain, ours = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, dilation=2), nn.ConvTranspose2d(2, 3, 3)
    ours.load_state_dict(plain.state_dict())
    ours.stride, ours.padding, ours.dilation = 2, (1, 1), 2
    features, factors = torch.randn(4, 2, 5, 5), []
    for each in (ours, plain):
        optimizer = KFACOptimizer(each, lr=0.0)
        each(features).sin().sum().backward()
        optimizer.step()
        factors.append(optimizer.factors()[""])
    assert_same(*factors)


def test_a_forward_that_is_replaced_after_construction_and_changes_the_positions_is_refused_by_name() -> None:
    model = nn.Sequential(nn.ConvTranspose1d(2, 3, 4, stride=2))
    optimizer = KFACOptimizer(model, lr=0.1)
    plain = model[0].forward
    model[0].forward = lambda features: plain(features)[..., :-2]
    output = model(torch.randn(3, 2, 5))
    with pytest.raises(RuntimeError, match=r"layer '0' has 10 positions, not the 9 of its interleaved input: .*skip_l"):
        output.sum().backward()
    optimizer.remove_hooks()


@pytest.mark.parametrize("sharing", WeightSharing)
def test_an_empty_batch_counts_nothing(sharing: WeightSharing) -> None:
    model = nn.ConvTranspose1d(2, 3, 2, stride=2)
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=sharing, factor_update_period=1)
    for features in (torch.randn(4, 2, 5), torch.randn(0, 2, 5)):
        before = optimizer.factors().get("")
        any_loss(model(features)).backward()
        optimizer.step()
    assert_same(optimizer.factors()[""], before, rtol=0)
