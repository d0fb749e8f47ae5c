from collections.abc import Callable
from unittest import mock

import pytest
import torch
from helpers.oracles import assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfac_optim.linalg.cholesky import damped_cholesky_inverse, shift_diagonal
from kfac_optim.linalg.eigen import eigendecomposition, leading_singular_triple
from kfac_optim.linalg.newton import NewtonStart, inverse_residuals, newton_schulz, newton_start
from kfac_optim.linalg.products import norm1, sandwich, symmetric_product
from kfac_optim.linalg.triangles import pack_triangle, packed_diagonal, triangle_size, unpack_triangle

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


# -- Newton iterations -------------------------------------------------------------------------------------------


def with_eigenvalues(eigenvalues: Tensor) -> Tensor:
    """`[1, d, d]`."""
    basis = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues))).Q
    matrix = basis * eigenvalues @ basis.mT
    return ((matrix + matrix.mT) / 2)[None]


def between(least: float, largest: float, dim: int) -> Tensor:
    """Eigenvalues spread over the orders of magnitude between the two, both of which are taken."""
    return torch.cat([torch.tensor([least, largest]), largest * (least / largest) ** torch.rand(dim - 2)])


def errors(matrix: Tensor, inverse: Tensor) -> Tensor:
    """Largest `|1 - μ|` of each."""
    return (1 - torch.linalg.eigvals(matrix @ inverse)).abs().amax(-1)


NOT_YET = torch.tensor([False])
EARLIER = torch.tensor([True])


def cold(matrix: Tensor, least: float) -> NewtonStart:
    return newton_start(matrix, torch.tensor([least]), torch.eye(matrix.shape[-1]).to(matrix)[None], NOT_YET)


@given(dim=st.integers(2, 8), exponent=st.floats(0, 8), size=st.floats(1e-6, 1e6), slack=st.floats(0.1, 1))
def test_from_the_identity_the_eigenvalues_lie_where_the_gap_says(
    dim: int, exponent: float, size: float, slack: float
) -> None:
    matrix = with_eigenvalues(between(size * 10**-exponent, size, dim))
    start = cold(matrix, slack * size * 10**-exponent)
    assert_same(start.inverse / start.inverse[0, 0, 0], torch.eye(dim)[None])
    products = torch.linalg.eigvalsh(matrix) * start.inverse[0, 0, 0]
    gap = float(start.gap)
    assert gap * (1 - 1e-6) <= float(products.min())
    assert float(products.max()) <= 2 - gap * (1 - 1e-6)


@pytest.mark.parametrize(("exponent", "steps", "plain"), [(2, 7, 7), (4, 10, 14), (6, 14, 20), (8, 17, 26)])
def test_from_the_identity_fewer_steps_than_those_of_the_plain_iteration_do(
    exponent: int, steps: int, plain: int
) -> None:
    matrix = with_eigenvalues(between(10.0**-exponent, 1, 32))
    start = cold(matrix, 10.0**-exponent)
    unaware = NewtonStart(start.inverse, torch.ones(1))
    assert float(inverse_residuals(matrix, newton_schulz(matrix, start, steps))) < 1e-3
    assert float(inverse_residuals(matrix, newton_schulz(matrix, unaware, plain))) > 1e-2
    assert float(inverse_residuals(matrix, newton_schulz(matrix, unaware, plain + 5))) < 1e-2
    assert_same(newton_schulz(matrix, start, steps + 3), torch.linalg.inv(matrix), rtol=1e-14 * 10**exponent)


@given(dim=st.integers(2, 8), low=st.floats(0.01, 1), high=st.floats(1, 1e3), size=st.floats(1e-6, 1e6))
def test_from_the_previous_inverse_no_eigenvalue_reaches_2(dim: int, low: float, high: float, size: float) -> None:
    previous = with_eigenvalues(between(1e-4, 1, dim))
    root = torch.linalg.cholesky(torch.linalg.inv(previous))
    matrix = size * root @ with_eigenvalues(between(low, high, dim)) @ root.mT
    start = newton_start(matrix, torch.full((1,), 1e-30 * size), previous, EARLIER)
    assert float(start.gap) == 1
    assert float(errors(matrix, start.inverse)) < 1
    ratio = start.inverse / previous
    assert_same(ratio, ratio[:, :1, :1].expand_as(ratio), rtol=1e-9)
    assert float(inverse_residuals(matrix, newton_schulz(matrix, start, 26))) < 1e-6


def test_a_previous_inverse_that_still_holds_is_taken_as_it_is() -> None:
    matrix = with_eigenvalues(between(1e-4, 1, 6))
    start = newton_start(matrix, torch.tensor([1e-4]), torch.linalg.inv(matrix), EARLIER)
    assert_same(start.inverse, torch.linalg.inv(matrix), rtol=1e-8)
    assert float(inverse_residuals(matrix, newton_schulz(matrix, start, 1))) < 1e-9


def test_the_identity_is_preferred_to_a_previous_inverse_that_is_further_away_and_to_one_of_no_use() -> None:
    matrix, other = with_eigenvalues(between(1e-4, 1, 6)), with_eigenvalues(between(1e-6, 1, 6))
    unusable = torch.full((1, 6, 6), torch.nan)
    for previous, usable in (
        (torch.linalg.inv(other), True),
        (torch.linalg.inv(matrix), False),
        (unusable, True),
        (-torch.linalg.inv(matrix), True),
    ):
        start = newton_start(matrix, torch.tensor([1e-4]), previous, torch.tensor([usable]))
        assert_same(start, cold(matrix, 1e-4), rtol=0)


def test_each_of_a_batch_starts_and_ends_as_it_does_alone() -> None:
    matrix = torch.cat([with_eigenvalues(between(10.0**-i, 2, 5)) for i in range(4)])
    least = torch.tensor([1.0, 0.1, 0.01, 0.001])
    previous = torch.linalg.inv(matrix * torch.tensor([1.0, 3.0, 0.5, 1.0])[:, None, None])
    usable = torch.tensor([True, True, False, False])
    together = newton_schulz(matrix, newton_start(matrix, least, previous, usable), 6)
    for i in range(4):
        part = slice(i, i + 1)
        start = newton_start(matrix[part], least[part], previous[part], usable[part])
        assert_same(newton_schulz(matrix[part], start, 6), together[part], rtol=1e-12)


def test_the_iteration_waits_for_no_number_from_the_device() -> None:
    # A tensor on the meta device has no numbers to wait for: reading one raises.
    matrix, numbers = torch.empty(3, 4, 4, device="meta"), torch.empty(3, device="meta")
    start = newton_start(matrix, numbers, matrix, torch.empty(3, dtype=torch.bool, device="meta"))
    assert inverse_residuals(matrix, newton_schulz(matrix, start, 3, torch.bfloat16)).shape == (3,)


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.float32, torch.bfloat16])
def test_two_steps_of_full_precision_follow_those_of_low(dtype: torch.dtype | None) -> None:
    matrix = with_eigenvalues(between(0.1, 1, 8))
    start = cold(matrix, 0.1)
    before = matrix.clone()
    inverse = newton_schulz(matrix, start, 9, dtype)
    assert inverse.dtype == torch.float64
    residual = float(inverse_residuals(matrix, inverse))
    # What bfloat16 leaves of 1e-2 comes to 1e-8, what float32 leaves of 1e-6 to 1e-24.
    assert residual < (1e-6 if dtype is torch.bfloat16 else 1e-14)
    assert dtype is not torch.bfloat16 or residual > 1e-14
    assert_same(matrix, before, rtol=0)


def test_a_dtype_wider_than_the_matrix_changes_nothing() -> None:
    matrix = with_eigenvalues(between(0.1, 1, 8)).float()
    start = cold(matrix, 0.1)
    assert start.gap.dtype == start.inverse.dtype == torch.float32
    assert_same(newton_schulz(matrix, start, 4, torch.float64), newton_schulz(matrix, start, 4), rtol=0)


@given(count=st.integers(1, 3), dim=st.integers(1, 5))
def test_the_residual_is_the_root_mean_square_of_the_errors(count: int, dim: int) -> None:
    matrix, inverse = torch.randn(count, dim, dim), torch.randn(count, dim, dim)
    expected = [(torch.eye(dim) - f @ x).norm() / dim**0.5 for f, x in zip(matrix, inverse, strict=True)]
    assert_same(inverse_residuals(matrix, inverse), torch.stack(expected))
    matrix[0, 0, 0] = torch.nan
    assert inverse_residuals(matrix, inverse)[0].isnan()


# -- leading singular triple -------------------------------------------------------------------------------------


@given(count=st.integers(1, 4), rows=st.integers(1, 6), columns=st.integers(1, 6), size=st.floats(1e-100, 1e100))
def test_the_leading_triple_is_that_of_the_singular_value_decomposition(
    count: int, rows: int, columns: int, size: float
) -> None:
    matrix = size * torch.randn(count, rows, columns)
    before = matrix.clone()
    u, sigma, v = leading_singular_triple(matrix)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    assert_same(sigma, values[:, 0], rtol=1e-6)
    ones = torch.ones(count)
    assert_same([u.norm(dim=1), v.norm(dim=1)], [ones, ones])
    # Values closer than 1% are not told apart: the pair may then be of both.
    clear = values[:, 1] < 0.99 * values[:, 0] if min(rows, columns) > 1 else ones > 0
    outer = u.unsqueeze(2) * v.unsqueeze(1)
    assert_same(outer[clear], (left[:, :, :1] @ right[:, :1])[clear], rtol=1e-6)
    assert (v.take_along_dim(v.abs().argmax(1, keepdim=True), 1) > 0).all()
    assert_same(matrix, before, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_matrix_of_rank_one_is_given_back(dtype: torch.dtype, size: float) -> None:
    matrix = (size * torch.randn(3, 4, 1) * torch.randn(3, 1, 5)).to(dtype)
    u, sigma, v = leading_singular_triple(matrix)
    assert_same(sigma[:, None, None] * u.unsqueeze(2) * v.unsqueeze(1), matrix, rtol=1e-5 if size != 1 else 1e-6)


def test_a_leading_vector_that_no_guess_would_meet_is_found() -> None:
    # Orthogonal to the largest row, the largest column and the sum of all.
    matrix = torch.zeros(1, 5, 5)
    matrix[0, 0, 0] = 10.0
    matrix[0, 1:3, 1:3] = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) * 6
    u, sigma, v = leading_singular_triple(matrix)
    assert_same(sigma, torch.tensor([12.0]))
    assert_same(v.abs(), torch.tensor([[0.0, 1, 1, 0, 0]]) / 2**0.5)
    assert_same(sigma[:, None, None] * u.unsqueeze(2) * v.unsqueeze(1), matrix.index_fill(1, torch.tensor(0), 0.0))


def test_equal_singular_values_give_one_of_the_best_matrices_of_rank_one() -> None:
    matrix = torch.linalg.qr(torch.randn(2, 4, 4)).Q * 3
    u, sigma, v = leading_singular_triple(matrix)
    assert_same(sigma, torch.full((2,), 3.0))
    assert_same((matrix @ v.unsqueeze(2)).squeeze(2), 3 * u)


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 5, 3)])
def test_a_zero_matrix_gives_zeros_and_one_that_is_not_finite_nan_and_others_are_let_alone(
    shape: tuple[int, int, int],
) -> None:
    good = torch.randn(shape)
    for value, expected in ((torch.nan, torch.nan), (torch.inf, torch.nan), (-torch.inf, torch.nan), (0.0, 0.0)):
        bad = torch.zeros(shape) if value == 0 else torch.randn(shape)
        bad[0, 1, 2] = value
        alone, beside = leading_singular_triple(good), leading_singular_triple(torch.cat([good[:1], bad[:1], good[1:]]))
        for left, right in zip(alone, beside, strict=True):
            assert_same(right[[0, 2]], left)
            assert torch.equal(right[1].isnan(), torch.full_like(right[1], expected).isnan())
            assert value != 0 or not right[1].any()


def test_of_no_matrices_there_are_no_triples() -> None:
    assert [part.shape for part in leading_singular_triple(torch.empty(0, 3, 2))] == [(0, 3), (0,), (0, 2)]


# -- products and norms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["dense", "diagonal", "none"])
@pytest.mark.parametrize("right", ["dense", "diagonal", "none"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_matrix_is_multiplied_from_both_sides(left: str, right: str, groups: int) -> None:
    middle = torch.randn(2, 3, 4)

    def side(kind: str, dim: int) -> tuple[Tensor | None, Tensor]:
        dense = torch.randn(groups, dim, dim)
        diagonal = dense.diagonal(dim1=1, dim2=2)
        return {
            "dense": (dense, dense),
            "diagonal": (diagonal, torch.diag_embed(diagonal)),
            "none": (None, torch.eye(dim)[None]),
        }[kind]

    (a, dense_a), (b, dense_b) = side(left, 3), side(right, 4)
    assert_same(sandwich(a, middle, b), dense_a @ middle @ dense_b)


@given(count=st.integers(1, 3), dim=st.integers(1, 5))
def test_the_1_norm_is_the_largest_column_sum(count: int, dim: int) -> None:
    matrix = torch.randn(count, dim, dim)
    assert_same(norm1(matrix), torch.linalg.matrix_norm(matrix, 1))


# -- triangles ---------------------------------------------------------------------------------------------------


@given(
    dim=st.integers(1, 9),
    groups=st.integers(0, 3),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_a_packed_triangle_holds_each_element_once_and_gives_the_matrix_back_bitwise(
    dim: int, groups: int, dtype: torch.dtype
) -> None:
    position = torch.arange(dim)
    # Each pair of rows and columns has a number of its own.
    number = torch.maximum(position[:, None], position) * dim + torch.minimum(position[:, None], position)
    matrix = (number + dim * dim * torch.arange(groups)[:, None, None]).to(dtype)
    matrix[..., 0, 0] = -0.0
    packed = pack_triangle(matrix)
    assert packed.shape == (groups, triangle_size(dim))
    assert packed.is_contiguous()
    expected = [row[torch.ones(dim, dim, dtype=torch.bool).triu()].sort().values for row in matrix]
    assert all(torch.equal(row.sort().values, values) for row, values in zip(packed, expected, strict=True))
    unpacked = unpack_triangle(packed, dim)
    assert torch.equal(unpacked, matrix)
    assert torch.equal(unpacked.signbit(), matrix.signbit())


def test_what_is_not_finite_in_a_packed_triangle_stays_where_it_is() -> None:
    for row, column in ((0, 0), (0, 3), (4, 4), (1, 2), (3, 4)):
        matrix = torch.zeros(1, 5, 5)
        matrix[0, row, column] = matrix[0, column, row] = torch.nan
        assert torch.equal(unpack_triangle(pack_triangle(matrix), 5).isnan(), matrix.isnan())


def test_packing_reads_a_matrix_that_is_not_contiguous() -> None:
    matrix = psd(2, 6, 6)
    assert torch.equal(pack_triangle(matrix.mT), pack_triangle(matrix.mT.contiguous()))
    spread = torch.zeros(2, 12, 6)
    spread[:, ::2] = matrix
    assert torch.equal(pack_triangle(spread[:, ::2]), pack_triangle(matrix))


@given(
    groups=st.integers(1, 3),
    rows=st.integers(0, 9),
    dim=st.integers(1, 150),
    transposed=st.booleans(),
    part=st.booleans(),
)
def test_symmetric_product_is_the_product(groups: int, rows: int, dim: int, transposed: bool, part: bool) -> None:
    matrix = torch.randn(groups, dim, rows).mT if transposed else torch.randn(groups, rows, dim)
    whole = torch.full((groups, dim + 1, dim + 1), torch.nan, dtype=torch.float64)
    product = whole[:, :-1, :-1] if part else whole[:, :-1, :-1].contiguous()
    with mock.patch("kfac_optim.linalg.products.WHOLE", 32):
        symmetric_product(matrix, out=product)
    torch.testing.assert_close(product, torch.einsum("gri,grj->gij", matrix, matrix), rtol=1e-12, atol=1e-12)


@given(dim=st.integers(1, 9), shape=st.lists(st.integers(0, 3), max_size=2))
def test_the_diagonal_of_a_packed_triangle_is_two_views_of_it(dim: int, shape: list[int]) -> None:
    rows = torch.randn(*shape, dim, dim)
    matrix = rows + rows.mT
    packed = pack_triangle(matrix)
    parts = packed_diagonal(packed, dim)
    assert torch.equal(torch.cat(parts, -1), matrix.diagonal(dim1=-2, dim2=-1))
    for part in parts:
        part.fill_(7.0)
    matrix.diagonal(dim1=-2, dim2=-1).fill_(7.0)
    assert torch.equal(unpack_triangle(packed, dim), matrix)
