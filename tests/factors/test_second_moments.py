import pytest
import torch
from helpers.oracles import assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfac_optim import Structure
from kfac_optim.factors.second_moments import (
    _feature_major,
    active_rows,
    channel_moments,
    examples_at_once,
    gram,
    sketch_of,
)
from kfac_optim.linalg.sketches import sketch_directions
from kfac_optim.specs import Sketched

pytestmark = pytest.mark.usefixtures("float64")

STRUCTURES = (Structure.DENSE, Structure.DIAGONAL, Sketched(3))


@st.composite
def canonical_rows(draw: st.DrawFn) -> Tensor:
    """`[groups, batch, shared, d]`, as they lie for linear layers, or as convolutions leave them."""
    groups, batch, shared, width = (draw(st.integers(1, most)) for most in (3, 4, 9, 5))
    if draw(st.booleans()):
        return torch.randn(groups, batch, shared, width)
    return torch.randn(batch, groups, width, shared).permute(1, 0, 3, 2)


def with_column(rows: Tensor, constant: int | None) -> Tensor:
    if constant is None:
        return rows
    return torch.cat([rows, torch.full_like(rows[..., :1], constant)], dim=-1)


@given(
    rows=canonical_rows(), structure=st.sampled_from(STRUCTURES), constant=st.sampled_from((None, 0, 1)), data=st.data()
)
def test_moments_are_sums_of_outer_products(
    rows: Tensor, structure: Structure | Sketched, constant: int | None, data: st.DataObject
) -> None:
    active = None
    whole = with_column(rows, constant)
    if data.draw(st.booleans(), label="masked"):
        active = torch.rand(rows.shape[1:3]) < 0.5
        whole = torch.where(active.unsqueeze(-1), whole, 0)
        rows = torch.where(active.unsqueeze(-1), rows, torch.nan)
    expected = torch.einsum("gbsi,gbsj->gij", whole, whole)
    found = gram(rows, structure, active, constant=constant)
    if isinstance(structure, Sketched):
        products = expected @ sketch_directions(len(expected[0]), structure.columns, like=expected)
        expected = sketch_of(products, expected.diagonal(dim1=-2, dim2=-1).sum(-1))
    elif structure is Structure.DIAGONAL:
        expected = expected.diagonal(dim1=-2, dim2=-1)
    assert_same(found, expected)


@pytest.mark.parametrize("constant", [None, 0, 1])
def test_rows_of_feature_maps_are_multiplied_as_they_lie(constant: int | None) -> None:
    rows = torch.randn(3, 2, 4, 5).permute(1, 0, 3, 2)
    assert _feature_major(rows)
    assert not _feature_major(rows.contiguous())
    assert_same(
        gram(rows, Structure.DENSE, constant=constant), gram(rows.contiguous(), Structure.DENSE, constant=constant)
    )


@pytest.mark.parametrize("constant", [None, 0, 1])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_device_is_not_asked_how_many_rows_count(
    structure: Structure | Sketched, constant: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, active = torch.randn(2, 5, 3, 4), torch.rand(5, 3) < 0.5
    expected = gram(rows, structure, active, constant=constant)
    monkeypatch.setattr("kfac_optim.factors.second_moments.on_host", lambda _: False)
    hidden = torch.where(active.unsqueeze(-1), rows, torch.inf)
    assert_same(gram(hidden, structure, active, constant=constant), expected)


@given(rows=canonical_rows(), data=st.data())
def test_rows_are_active_where_any_feature_of_any_group_is(rows: Tensor, data: st.DataObject) -> None:
    zeros = torch.rand_like(rows) < data.draw(st.sampled_from((0.0, 0.5, 1.0)), label="zeros")
    rows = torch.where(zeros, 0.0, rows)
    rows = torch.where(torch.rand_like(rows) < 0.1, torch.nan, rows)
    with pytest.MonkeyPatch.context() as patch:
        for on_host in (True, False):
            patch.setattr("kfac_optim.factors.second_moments.on_host", lambda _, answer=on_host: answer)
            assert torch.equal(active_rows(rows), (rows != 0).any(-1).any(0))
            assert torch.equal(active_rows(rows, by_group=True), (rows != 0).any(-1))


@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    dtype=st.sampled_from((torch.bfloat16, torch.float32, torch.float64)),
    channels_last=st.booleans(),
    on_host=st.booleans(),
    in_cache=st.sampled_from((1, 20, 2**17)),
)
def test_moments_of_channels(
    shape: list[int], dtype: torch.dtype, channels_last: bool, on_host: bool, in_cache: int
) -> None:
    features = (1 + torch.randn(shape)).to(dtype)
    if channels_last:
        features = features.movedim(1, -1).contiguous().movedim(-1, 1)
    by_channel = features.double().transpose(0, 1).flatten(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kfac_optim.factors.second_moments._IN_CACHE", in_cache)
        if not on_host:
            patch.setattr("kfac_optim.factors.second_moments.on_host", lambda _: False)
        mean, variance = channel_moments(features, torch.float32)
    assert mean.dtype == variance.dtype == torch.promote_types(dtype, torch.float32)
    rtol = 1e-12 if dtype is torch.float64 else 1e-5
    assert_same(mean.double(), by_channel.mean(1), rtol=rtol)
    assert_same(variance.double(), by_channel.var(1, correction=0), rtol=rtol)


def test_moments_of_channels_far_from_zero_lose_no_digits() -> None:
    features = 1000 + torch.randn(64, 3, 8, 8).float()
    _, variance = channel_moments(features, torch.float32)
    assert_same(variance.double(), features.double().var((0, 2, 3), correction=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "examples"), [((5, 2**15), 4), ((5, 2**18), 1), ((0, 3), 1), ((7, 0), 7), ((9, 2), 2**16)]
)
def test_examples_are_as_many_as_a_cache_holds(shape: tuple[int, int], examples: int) -> None:
    assert examples_at_once(torch.empty(shape)) == examples


def test_on_a_device_all_examples_are_worked_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfac_optim.factors.second_moments.on_host", lambda _: False)
    assert examples_at_once(torch.empty(5, 2**18)) == 5
