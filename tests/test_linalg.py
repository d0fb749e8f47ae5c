from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_same
from torch import Tensor

from kfac_optim.linalg import damped_cholesky_inverse, eigendecomposition, shift_diagonal

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


# -- eigendecomposition ------------------------------------------------------------------------------------------


def assert_decomposes(matrix: Tensor, values: Tensor, vectors: Tensor, *, rtol: float = 1e-10) -> None:
    """Of one matrix: the product gives it back, the basis is orthonormal, the eigenvalues ascend."""
    assert_same(vectors @ torch.diag(values) @ vectors.mT, matrix, rtol=rtol)
    assert_same(vectors.mT @ vectors, torch.eye(len(values), dtype=matrix.dtype), rtol=rtol)
    assert (values.diff() >= 0).all()


@given(count=st.integers(1, 4), dim=st.integers(1, 6), rank=st.integers(0, 6))
def test_eigenvalues_and_vectors_give_the_matrix_back(count: int, dim: int, rank: int) -> None:
    matrix = psd(count, dim, rank)
    values, vectors, attempts = eigendecomposition(matrix)
    for i in range(count):
        assert_decomposes(matrix[i], values[i], vectors[i])
    assert attempts.tolist() == [1] * count
    assert attempts.dtype == torch.int64


def always(_: Tensor) -> bool:
    return True


def marked(dim: int) -> Tensor:
    """A matrix that the tests below let `eigh` fail on, known by its last diagonal element."""
    matrix = psd(1, dim, dim)[0]
    matrix[-1, -1] = 1234.0
    return matrix


def fail_on_marked(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[Tensor], bool], *, silently: bool = False
) -> list[tuple[int, torch.dtype]]:
    """Let `torch.linalg.eigh` raise where a marked matrix is given and `fails(it)`, or fill its part with NaN.

    Returns:
        Size and dtype of every batch it was given, filled as it is called.
    """
    calls: list[tuple[int, torch.dtype]] = []
    real = torch.linalg.eigh

    def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
        calls.append((len(matrix), matrix.dtype))
        hit = [i for i in range(len(matrix)) if abs(float(matrix[i, -1, -1]) - 1234) < 1 and fails(matrix)]
        if hit and not silently:
            raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")
        values, vectors = real(matrix)
        values[hit], vectors[hit] = torch.nan, torch.nan
        return values, vectors

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    return calls


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize(
    ("fails", "attempts"),
    [
        (lambda batch: len(batch) > 1, 1),
        (lambda batch: batch.dtype == torch.float32, 2),
        (lambda batch: float(batch[0, -1, -1]) == 1234.0 or len(batch) > 1, 3),
        (always, 0),
    ],
    ids=["in a batch", "in float32", "without a shift", "always"],
)
def test_a_matrix_that_fails_is_tried_alone_then_in_float64_then_shifted(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[Tensor], bool], attempts: int, silently: bool
) -> None:
    good = psd(2, 4, 4)
    matrix = torch.stack([good[0], marked(4), good[1]]).float()
    before = matrix.clone()
    fail_on_marked(monkeypatch, fails, silently=silently)
    values, vectors, taken = eigendecomposition(matrix)
    assert taken.tolist() == [1, attempts, 1]
    assert values.dtype == vectors.dtype == torch.float32
    for i in (0, 1, 2):
        if taken[i]:
            assert_decomposes(matrix[i], values[i], vectors[i], rtol=1e-5)
    assert_same(matrix, before, rtol=0)


def test_the_shift_is_taken_off_the_eigenvalues_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Zero but for the mark: a shift of one rounding unit of the float32 matrix is large beside float64's.
    matrix = torch.zeros(1, 4, 4, dtype=torch.float32)
    matrix[0, -1, -1] = 1234.0
    fail_on_marked(monkeypatch, lambda batch: float(batch[0, -1, -1]) == 1234.0)
    values, _, attempts = eigendecomposition(matrix)
    assert attempts.tolist() == [3]
    assert_same(values, torch.tensor([[0.0, 0.0, 0.0, 1234.0]], dtype=torch.float32), rtol=1e-12)


def test_nothing_is_repeated_where_nothing_fails_and_nothing_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound batch is decomposed once; of a matrix that is float64 already there is no wider copy to try."""
    calls = fail_on_marked(monkeypatch, always)
    eigendecomposition(psd(3, 4, 4))
    assert calls == [(3, torch.float64)]
    calls.clear()
    eigendecomposition(torch.stack([marked(4), torch.eye(4)]))
    assert calls == [(2, torch.float64)] + [(1, torch.float64)] * 3  # the marked one twice, the other once


@pytest.mark.parametrize(
    "hopeless",
    [torch.full((3, 3), torch.nan), torch.full((3, 3), torch.inf), torch.diag(torch.tensor([1.0, torch.nan, 1.0]))],
    ids=["nan", "inf", "one nan"],
)
def test_a_matrix_that_is_not_finite_is_given_up_without_another_try(
    monkeypatch: pytest.MonkeyPatch, hopeless: Tensor
) -> None:
    calls = fail_on_marked(monkeypatch, lambda batch: len(batch) > 1)
    for other, expected in ((psd(1, 3, 5)[0], [3]), (marked(3), [3, 1, 1])):  # without and with a failure beside it
        calls.clear()
        good = psd(1, 3, 5)[0]
        values, vectors, attempts = eigendecomposition(torch.stack([good, hopeless.to(good), other]))
        assert attempts.tolist() == [1, 0, 1]
        assert_decomposes(good, values[0], vectors[0])
        assert_decomposes(other, values[2], vectors[2])
        assert [size for size, _ in calls] == expected


def test_what_is_no_failure_to_decompose_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def eigh(_: Tensor) -> tuple[Tensor, Tensor]:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    with pytest.raises(torch.OutOfMemoryError):
        eigendecomposition(psd(1, 3, 3))
