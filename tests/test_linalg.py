import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_same
from torch import Tensor

from kfac_optim.linalg import damped_cholesky_inverse, shift_diagonal

pytestmark = pytest.mark.usefixtures("float64")


def psd(count: int, dim: int, rank: int) -> Tensor:
    rows = torch.randn(count, rank, dim)
    return rows.mT @ rows


def with_least_eigenvalue(least: float, dim: int = 4) -> Tensor:
    """Symmetric, all eigenvalues but one in [1, 2]."""
    basis = torch.linalg.qr(torch.randn(dim, dim)).Q
    eigenvalues = torch.linspace(1, 2, dim)
    eigenvalues[0] = least
    return basis @ torch.diag(eigenvalues) @ basis.mT


@given(count=st.integers(1, 4), dim=st.integers(1, 6), rank=st.integers(0, 6), shift=st.floats(1e-4, 10))
def test_the_inverse_is_that_of_the_shifted_matrix(count: int, dim: int, rank: int, shift: float) -> None:
    matrix = psd(count, dim, rank)
    shifts = shift * torch.arange(1.0, count + 1)
    inverse, attempts = damped_cholesky_inverse(matrix, shifts)
    shifted = matrix + shifts[:, None, None] * torch.eye(dim)
    assert_same(inverse @ shifted, torch.eye(dim).expand_as(matrix), rtol=1e-8)
    assert_same(inverse, inverse.mT)
    assert attempts.tolist() == [1] * count
    assert attempts.dtype == torch.int64


@given(count=st.integers(2, 5), dim=st.integers(1, 6))
def test_a_batch_gives_what_each_matrix_gives_alone(count: int, dim: int) -> None:
    matrix, shift = psd(count, dim, dim), torch.rand(count) + 0.1
    matrix[1] -= 2 * shift[1] * torch.eye(dim)  # may need another attempt
    together = damped_cholesky_inverse(matrix, shift)
    alone = [damped_cholesky_inverse(matrix[i : i + 1], shift[i : i + 1]) for i in range(count)]
    assert_same(together[0], torch.cat([inverse for inverse, _ in alone]))
    assert together[1].tolist() == [int(attempts) for _, attempts in alone]


@pytest.mark.parametrize(
    ("least", "attempts"), [(0.0, 1), (-0.5e-3, 1), (-0.5e-2, 2), (-0.5e-1, 3), (-0.5, 4), (-5.0, 0)]
)
def test_an_indefinite_matrix_is_tried_again_with_ten_times_the_shift(least: float, attempts: int) -> None:
    shift = 1e-3
    matrix = torch.stack([with_least_eigenvalue(1.0), with_least_eigenvalue(least), with_least_eigenvalue(2.0)])
    inverse, taken = damped_cholesky_inverse(matrix, torch.full((3,), shift))
    assert taken.tolist() == [1, attempts, 1]
    for i in (0, 1, 2):
        if taken[i]:
            shifted = matrix[i] + shift * 10 ** (int(taken[i]) - 1) * torch.eye(4)
            assert_same(inverse[i], torch.linalg.inv(shifted), rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [0.0, 1e-20])
def test_a_singular_matrix_is_tried_again_when_the_shift_is_lost_in_rounding(shift: float, dtype: torch.dtype) -> None:
    # The second pivot is 1 + shift - 1, exactly zero.
    matrix = torch.ones(1, 2, 2, dtype=dtype)
    inverse, attempts = damped_cholesky_inverse(matrix, torch.tensor([shift], dtype=dtype))
    assert int(attempts) > 1
    assert inverse.isfinite().all()
    assert (inverse.diagonal(dim1=1, dim2=2) > 0).all()


@pytest.mark.parametrize(
    "hopeless",
    [
        torch.full((3, 3), torch.nan),
        torch.full((3, 3), torch.inf),
        torch.diag(torch.tensor([1.0, torch.nan, 1.0])),
        -torch.eye(3),
        torch.zeros(3, 3),
    ],
    ids=["nan", "inf", "one nan", "negative", "zero without shift"],
)
def test_a_hopeless_matrix_is_given_up_and_harms_no_other(hopeless: Tensor) -> None:
    good = psd(2, 3, 5)
    matrix = torch.stack([good[0], hopeless.to(good), good[1]])
    shift = torch.tensor([0.1, 0.0, 0.2])
    inverse, attempts = damped_cholesky_inverse(matrix, shift)
    assert attempts.tolist() == [1, 0, 1]
    expected = [torch.linalg.inv(good[0] + 0.1 * torch.eye(3)), torch.linalg.inv(good[1] + 0.2 * torch.eye(3))]
    assert_same([inverse[0], inverse[2]], expected, rtol=1e-8)


def test_arguments_are_left_as_they_were() -> None:
    matrix, shift = torch.stack([with_least_eigenvalue(-0.1), with_least_eigenvalue(1.0)]), torch.tensor([0.02, 0.02])
    before = matrix.clone(), shift.clone()
    damped_cholesky_inverse(matrix, shift)
    assert_same(shift_diagonal(matrix, shift), before[0] + 0.02 * torch.eye(4))
    assert_same((matrix, shift), before, rtol=0)
