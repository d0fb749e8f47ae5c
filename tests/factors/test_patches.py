import itertools

import pytest
import torch
from helpers.cases import patches_cases
from helpers.oracles import assert_same
from hypothesis import given, settings
from torch import Tensor

from kfac_optim.factors.patches import Patches, pad

pytestmark = pytest.mark.usefixtures("float64")


def by_definition(patches: Patches) -> Tensor:
    """`[groups, batch, positions, (channel, *tap)]`, read element by element: 0 outside of the features."""
    features, rows = patches.features, []
    for position in itertools.product(*map(range, patches.positions)):
        columns = []
        for tap in itertools.product(*map(range, patches.kernel)):
            axes = zip(position, tap, patches.stride, patches.dilation, patches.zeros, strict=True)
            place = [step * at + dilation * each - zeros[0] for at, each, step, dilation, zeros in axes]
            inside = all(0 <= at < size for at, size in zip(place, features.shape[2:], strict=True))
            columns.append(features[(..., *place)] if inside else torch.zeros(features.shape[:2]))
        rows.append(torch.stack(columns, dim=-1))
    return torch.stack(torch.stack(rows, dim=1).chunk(patches.groups, dim=2)).flatten(3)


def some(patches: Patches) -> Tensor:
    """`[batch, positions]` bool."""
    return torch.rand(len(patches.features), patches.rows().shape[2]) < 0.6


@settings(max_examples=100)
@given(patches=patches_cases())
def test_rows_are_what_the_kernel_sees(patches: Patches) -> None:
    rows = by_definition(patches)
    assert rows.shape[-1] == patches.width
    assert torch.equal(patches.rows(), rows)
    wanted = torch.randint(rows.shape[2], (len(patches.features), 3))
    taken = torch.stack([example[:, places] for example, places in zip(rows.unbind(1), wanted, strict=True)], dim=1)
    assert torch.equal(patches.rows(wanted), taken)
    marked = some(patches)
    assert torch.equal(patches.marked_rows(marked).squeeze(1), rows[:, marked])


@settings(max_examples=100)
@given(patches=patches_cases())
def test_sums_are_those_of_the_rows(patches: Patches) -> None:
    rows, marked = patches.rows(), some(patches)
    for active in (None, marked, torch.ones_like(marked), torch.zeros_like(marked)):
        counted = rows if active is None else rows * active.unsqueeze(-1)
        assert_same(patches.sums(active), counted.sum(2), rtol=1e-12)
        assert_same(patches.total(active), counted.sum((1, 2)), rtol=1e-12)


def test_sums_do_not_ask_what_other_positions_see() -> None:
    features = torch.randn(2, 3, 6)
    features[0, :, 0], features[1, :, 5] = torch.nan, torch.inf
    patches = Patches(features, ((0, 0),), (2,), (1,), (1,), 1)
    active = torch.ones(2, 5, dtype=torch.bool)
    active[0, 0] = active[1, 4] = False
    expected = torch.stack([patches.rows()[0, 0, 1:].sum(0), patches.rows()[0, 1, :4].sum(0)])
    assert_same(patches.sums(active), expected[None], rtol=1e-12)


def test_sums_of_low_precision_go_on_counting() -> None:
    ones = torch.ones(3, 1, 1000, dtype=torch.bfloat16)
    patches = Patches(ones, ((0, 0),), (1,), (1,), (1,), 1)
    active = torch.ones(3, 1000, dtype=torch.bool)
    active[0, 0] = False
    assert patches.total().item() == 3000
    assert patches.sums(active).flatten().tolist() == [999, 1000, 1000]


@pytest.mark.parametrize("amounts", [(-3, 9), (9, -3), (2, -1), (-2, 0), (0, 0)])
def test_padding_comes_before_cropping(amounts: tuple[int, int]) -> None:
    features = torch.randn(2, 1, 2)
    wide = torch.zeros(2, 1, 22)
    wide[..., 10:12] = features
    assert torch.equal(pad(features, [amounts]), wide[..., 10 - amounts[0] : 12 + amounts[1]])
