import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_same
from torch import Tensor

from kfac_optim import Structure
from kfac_optim.rows import _feature_major, active_rows, gram

pytestmark = pytest.mark.usefixtures("float64")

STRUCTURES = (Structure.DENSE, Structure.DIAGONAL)


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
    rows: Tensor, structure: Structure, constant: int | None, data: st.DataObject
) -> None:
    active = None
    whole = with_column(rows, constant)
    if data.draw(st.booleans(), label="masked"):
        active = torch.rand(rows.shape[1:3]) < 0.5
        whole = torch.where(active.unsqueeze(-1), whole, 0)
        rows = torch.where(active.unsqueeze(-1), rows, torch.nan)
    expected = torch.einsum("gbsi,gbsj->gij", whole, whole)
    found = gram(rows, structure, active, constant=constant)
    assert_same(found, expected if structure is Structure.DENSE else expected.diagonal(dim1=-2, dim2=-1))


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
    structure: Structure, constant: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, active = torch.randn(2, 5, 3, 4), torch.rand(5, 3) < 0.5
    expected = gram(rows, structure, active, constant=constant)
    monkeypatch.setattr("kfac_optim.rows.on_host", lambda _: False)
    hidden = torch.where(active.unsqueeze(-1), rows, torch.inf)
    assert_same(gram(hidden, structure, active, constant=constant), expected)


@given(rows=canonical_rows(), data=st.data())
def test_rows_are_active_where_any_feature_of_any_group_is(rows: Tensor, data: st.DataObject) -> None:
    zeros = torch.rand_like(rows) < data.draw(st.sampled_from((0.0, 0.5, 1.0)), label="zeros")
    rows = torch.where(zeros, 0.0, rows)
    rows = torch.where(torch.rand_like(rows) < 0.1, torch.nan, rows)
    assert torch.equal(active_rows(rows), (rows != 0).any(-1).any(0))
