from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.cases import patches_cases
from helpers.oracles import assert_same
from hypothesis import assume, given, settings
from torch import Tensor

from kfac_optim.factors import patch_correlation
from kfac_optim.factors.patch_correlation import can_correlate, correlated_gram, correlation_pays
from kfac_optim.factors.patches import Patches


def unfolded_gram(patches: Patches) -> Tensor:
    rows = patches.rows().flatten(1, 2)
    return rows.mT @ rows


def conv(
    batch: int,
    channels: int,
    size: int,
    kernel: int,
    *,
    ndim: int = 2,
    stride: int = 1,
    padding: int | None = None,
    dilation: int = 1,
    groups: int = 1,
    device: str | None = None,
) -> Patches:
    """Whose padding keeps the size, unless it is given."""
    zeros = dilation * (kernel - 1) // 2 if padding is None else padding
    features = torch.randn(batch, channels, *(size,) * ndim, device=device)
    return Patches(features, ((zeros, zeros),) * ndim, (kernel,) * ndim, (stride,) * ndim, (dilation,) * ndim, groups)


@pytest.mark.usefixtures("float64")
@settings(max_examples=300)
@given(patches=patches_cases())
def test_correlations_are_the_second_moment_of_the_patches(patches: Patches) -> None:
    assume(can_correlate(patches))
    assert_same(correlated_gram(patches), unfolded_gram(patches), rtol=1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "patches",
    [
        lambda: conv(3, 4, 9, 7, stride=2, padding=3),  # the stem of a ResNet
        lambda: conv(3, 4, 9, 5, padding=2, groups=2),
        lambda: conv(2, 4, 8, 3, stride=4, dilation=4),
        lambda: conv(2, 2, 5, 3, ndim=3, stride=2),
        lambda: conv(2, 4, 1, 3),  # one position, and all around it zeros
    ],
)
def test_and_of_these(patches: Callable[[], Patches]) -> None:
    made = patches()
    assert can_correlate(made)
    assert_same(correlated_gram(made), unfolded_gram(made), rtol=1e-12)


@pytest.mark.usefixtures("float64")
def test_a_batch_is_correlated_a_few_examples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = conv(7, 2, 5, 3)
    monkeypatch.setattr(patch_correlation, "_AT_ONCE", 60)
    assert_same(correlated_gram(patches), unfolded_gram(patches), rtol=1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_what_no_patch_sees_may_be_anything(stride: int) -> None:
    patches = conv(2, 2, 8, 3, stride=stride, padding=0)
    unseen = torch.ones(8, 8, dtype=torch.bool)
    seen = stride * (patches.positions[0] - 1) + 3
    unseen[:seen, :seen] = False
    assert bool(unseen.any()) == (stride > 1 and seen < 8)
    with_garbage = replace(patches, features=torch.where(unseen, torch.nan, patches.features))
    assert_same(correlated_gram(with_garbage), unfolded_gram(patches), rtol=1e-12)


@pytest.mark.parametrize(("size", "dilation", "stride"), [(4, 3, 1), (6, 3, 2), (4, 2, 1)])
def test_where_the_kernel_jumps_over_features_or_phases_there_is_no_such_form(
    size: int, dilation: int, stride: int
) -> None:
    patches = conv(2, 2, size, 2, padding=0, dilation=dilation, stride=stride)
    seen = torch.zeros(size, dtype=torch.bool)
    for position in range(patches.positions[0]):
        seen[[stride * position, stride * position + dilation]] = True
    assert can_correlate(patches) == (dilation == 2)
    assert bool(seen.all()) == (dilation == 2)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 5e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_many_positions_are_summed_precisely(dtype: torch.dtype, error: float, offset: float) -> None:
    torch.manual_seed(0)
    patches = conv(64, 4, 32, 3)
    patches = replace(patches, features=(patches.features.relu() + offset).to(dtype))
    exact = unfolded_gram(replace(patches, features=patches.features.double()))
    ours = correlated_gram(patches)
    assert ours.dtype is dtype
    assert_same(ours.double(), exact, rtol=error)


PAYS = {
    "ResNet-20, first stage": ((128, 16, 32, 3), {}, True),
    "ResNet-20, second stage": ((128, 32, 16, 3), {}, True),
    "ResNet-20, third stage": ((128, 64, 8, 3), {}, True),
    "ResNet-50, second stage": ((16, 128, 28, 3), {}, True),
    "ResNet-50, third stage": ((16, 256, 14, 3), {}, True),
    "ResNet-50, stem": ((8, 3, 224, 7), {"stride": 2}, True),
    "in groups": ((16, 64, 16, 3), {"groups": 4}, True),
    "dilated": ((16, 32, 32, 3), {"dilation": 2}, True),
    "of volumes": ((8, 16, 16, 3), {"ndim": 3}, True),
    "of sequences": ((16, 64, 256, 9), {"ndim": 1}, True),
    "strided": ((128, 32, 16, 3), {"stride": 2}, False),
    "a pixel each": ((16, 64, 32, 1), {}, False),
    "one small image": ((1, 64, 8, 3), {}, False),
    "few positions": ((128, 64, 2, 3), {}, False),
    "few channels": ((4, 3, 8, 3), {}, False),
    "dilated over phases": ((128, 64, 16, 3), {"dilation": 3, "stride": 2}, False),
    "no example": ((0, 64, 16, 3), {}, False),
}


@pytest.mark.parametrize("name", PAYS)
def test_where_it_pays_is_told_by_shapes(name: str) -> None:
    sizes, options, pays = PAYS[name]
    assert correlation_pays(conv(*sizes, **options, device="meta")) is pays
