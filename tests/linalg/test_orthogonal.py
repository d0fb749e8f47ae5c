"""Orthogonalised matrices: what the polynomial makes of each singular value, at every scale and shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfac_optim.linalg import orthogonal, products
from kfac_optim.linalg.orthogonal import orthogonal_factors, orthogonalised


def written_out(matrix: Tensor) -> Tensor:
    """The polynomial, five times, of the singular values over the Frobenius norm."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), scale=st.sampled_from([1e-30, 1.0, 1e30]))
def test_singular_values_go_through_the_polynomial_and_vectors_stay(rows: int, columns: int, scale: float) -> None:
    torch.manual_seed(10 * rows + columns)
    matrices = torch.randn(3, rows, columns, dtype=torch.float64)
    expected = torch.stack([written_out(matrix) for matrix in matrices])
    torch.testing.assert_close(orthogonalised(matrices * scale), expected, rtol=1e-9, atol=1e-10)
    in_float32 = orthogonalised((matrices * scale).float())
    torch.testing.assert_close(in_float32.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("count", "width", "tolerance"),
    [(1, 80, 1e-3), (16, 64, 1e-3), (16, 80, 1e-3), (1, 120, 0.1)],
    ids=["one", "narrow", "many", "large: bfloat16"],
)
def test_products_of_small_and_of_narrow_matrices_keep_float32(
    monkeypatch: pytest.MonkeyPatch, count: int, width: int, tolerance: float
) -> None:
    monkeypatch.setattr(orthogonal, "_cpu_has", lambda _: True)
    torch.manual_seed(0)
    matrices = torch.randn(count, width, width + 1, dtype=torch.float64)
    expected = torch.stack([written_out(matrix) for matrix in matrices])
    found = orthogonalised(matrices.float()).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert tolerance < 0.1 or (found - expected).abs().max() > 1e-3, "these were taken in bfloat16"


def test_products_keep_float32_on_a_cpu_without_instructions_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orthogonal, "_cpu_has", lambda _: False)
    torch.manual_seed(0)
    matrices = torch.randn(1, 120, 121, dtype=torch.float64)
    expected = torch.stack([written_out(matrix) for matrix in matrices])
    torch.testing.assert_close(orthogonalised(matrices.float()).double(), expected, rtol=0, atol=1e-3)


def test_singular_values_come_near_one() -> None:
    values = torch.logspace(-2.8, 0, 50, dtype=torch.float64)
    matrix = torch.diag(values / values.norm())[None]
    found = torch.linalg.svdvals(orthogonalised(matrix[:, :, values > 0.0015 * values.norm()]))
    assert 0.68 < found.min() < found.max() < 1.21


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_of_zeros_stays_beside_one_that_is_not(dtype: torch.dtype) -> None:
    matrices = torch.stack([torch.zeros(3, 2), torch.ones(3, 2)]).to(dtype)
    found = orthogonalised(matrices)
    assert found.dtype == dtype
    assert torch.equal(found[0], matrices[0])
    assert found[1].isfinite().all()
    assert found[1].norm() > 0.6


@pytest.mark.parametrize(("rows", "columns"), [(7, 9), (16, 17), (9, 8), (8, 16)])
def test_zeros_that_make_a_matrix_quicker_to_multiply_change_nothing(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int
) -> None:
    matrix = torch.randn(3, rows, columns, dtype=torch.float64)
    expected = orthogonalised(matrix)
    monkeypatch.setattr(orthogonal, "_wants_eights", lambda _: True)
    torch.testing.assert_close(orthogonalised(matrix), expected, rtol=1e-12, atol=1e-14)


def test_wide_matrices_whose_products_are_taken_by_halves_come_out_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(2, 70, 50, dtype=torch.float64)
    whole = orthogonalised(matrices)
    for module in (orthogonal, products):
        monkeypatch.setattr(module, "WHOLE", 16)
    torch.testing.assert_close(orthogonalised(matrices), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("count", "amx"), [(1, True), (2, True), (2, False)])
def test_products_in_bfloat16_are_right_on_every_cpu(monkeypatch: pytest.MonkeyPatch, count: int, amx: bool) -> None:
    monkeypatch.setattr(orthogonal, "_cpu_has", lambda name: amx or name != "amx_bf16")
    for module in (orthogonal, products):
        monkeypatch.setattr(module, "WHOLE", 16)
    torch.manual_seed(0)
    matrices = torch.randn(count, 120, 110, dtype=torch.float64)
    expected = torch.stack([written_out(matrix) for matrix in matrices])
    assert torch.dist(orthogonalised(matrices.float()).double(), expected) < 0.03 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrices_too_small_for_their_squares_come_out_no_larger_than_others(dtype: torch.dtype) -> None:
    for scale in (1e-20, 1e-40, 1e-160, 1e-163, 1e-300, 0.0):
        found = orthogonalised((torch.randn(1, 4, 6, dtype=torch.float64) * scale).to(dtype))
        assert found.isfinite().all()
        assert found.abs().max() < 1.5


def test_a_matrix_comes_out_the_same_beside_others() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(2, 1, 100, 100)
    assert torch.equal(orthogonal_factors([first])[0], orthogonal_factors([first, second])[0])
