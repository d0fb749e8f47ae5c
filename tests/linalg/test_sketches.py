"""Eigenpairs read off sketches: exact up to the rank of the sketch, never above the matrix, and near the best."""

import hashlib

import pytest
import torch
from helpers.oracles import assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfac_optim.linalg.eigen import Eigenpairs
from kfac_optim.linalg.sketches import nystrom, sketch_directions

pytestmark = pytest.mark.usefixtures("float64")


def whole(pairs: Eigenpairs) -> Tensor:
    return pairs.vectors @ torch.diag_embed(pairs.values) @ pairs.vectors.mT


def sketched(matrix: Tensor, columns: int) -> Eigenpairs:
    directions = sketch_directions(matrix.shape[-1], columns, like=matrix)
    return nystrom(matrix @ directions, directions)


@given(
    dim=st.integers(16, 80),
    columns=st.integers(1, 20),
    rank=st.integers(0, 20),
    batch=st.integers(1, 3),
    size=st.sampled_from([1e-12, 1.0, 1e12]),
)
def test_matrices_of_no_higher_rank_come_back(dim: int, columns: int, rank: int, batch: int, size: float) -> None:
    torch.manual_seed(0)
    columns = min(columns, dim // 4)  # as where sketches are kept
    rows = torch.randn(batch, min(rank, columns), dim)
    matrix = size * rows.mT @ rows
    pairs = sketched(matrix, columns)
    assert_same(whole(pairs), matrix, rtol=1e-6)
    assert_same(pairs.vectors.mT @ pairs.vectors, torch.eye(columns).expand(batch, -1, -1), rtol=1e-10)
    assert bool((pairs.values[:, 1:] >= pairs.values[:, :-1]).all())
    assert pairs.attempts.tolist() == [1] * batch


@given(dim=st.integers(16, 80), columns=st.integers(4, 20), exponent=st.floats(0.3, 4))
def test_no_eigenvalue_is_overrated_and_the_error_is_of_the_size_of_the_tail(
    dim: int, columns: int, exponent: float
) -> None:
    torch.manual_seed(0)
    columns = min(columns, dim // 4)
    values = torch.arange(1.0, dim + 1) ** -exponent
    basis = torch.linalg.qr(torch.randn(dim, dim)).Q
    matrix = basis @ torch.diag(values) @ basis.mT
    error = matrix - whole(sketched(matrix[None], columns))[0]
    left = torch.linalg.eigvalsh(error)
    assert float(left.min()) >= -1e-9
    tails = [(1 + r / (columns - r - 1)) * float(values[r:].sum()) for r in range(columns - 1)]
    assert float(left.max()) <= 2 * min(tails)  # the theorem is of the mean over Gaussian directions


def test_in_float32_small_eigenvalues_are_not_made_of_rounding_errors() -> None:
    torch.manual_seed(0)
    rows = torch.randn(1, 5, 300, dtype=torch.float32)
    pairs = sketched(rows.mT @ rows, 64)
    assert float(pairs.values[0, :-5].max()) <= 1e-3 * float(pairs.values[0, -5])
    assert_same(whole(pairs).double(), (rows.mT @ rows).double(), rtol=1e-4)


def test_what_is_not_finite_fails_alone() -> None:
    torch.manual_seed(0)
    rows = torch.randn(3, 4, 20)
    matrix = rows.mT @ rows
    directions = sketch_directions(20, 6, like=matrix)
    sketch = matrix @ directions
    sketch[1, 0, 0] = torch.nan
    pairs = nystrom(sketch, directions)
    assert pairs.attempts.tolist() == [1, 0, 1]
    assert_same(whole(pairs)[::2], matrix[::2], rtol=1e-8)


def test_directions_are_the_same_bits_wherever_they_are_made() -> None:
    """Checkpoints hold sketches, which mean nothing without their directions: these must never change."""
    directions = sketch_directions(785, 64, like=torch.zeros((), dtype=torch.float32))
    signs = (directions > 0).to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(signs).hexdigest()[:16] == "3958a2e07e97ecc5"
    assert_same(directions.double().norm(dim=0), torch.ones(64), rtol=1e-6)


def test_eigenvalues_that_a_coarse_sketch_cannot_tell_from_rounding_are_left_out() -> None:
    torch.manual_seed(0)
    rows = torch.randn(1, 3, 784)
    matrix = rows.mT @ rows
    directions = sketch_directions(784, 64, like=matrix)
    coarse = (matrix @ directions).bfloat16().double()
    pairs = nystrom(coarse, directions)
    assert_same(whole(pairs), matrix, rtol=0.05)
    assert float(pairs.values.sum()) <= 1.02 * float(matrix.diagonal(dim1=1, dim2=2).sum())
    assert float(pairs.values[0, :-3].max()) <= 1e-2 * float(pairs.values[0, -3])
