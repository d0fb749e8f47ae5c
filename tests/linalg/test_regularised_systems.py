"""Least squares with a ridge, where the usual way to solve them does not go."""

import math

import torch

from kfac_optim.linalg.regularised_systems import gram_solver, tall_solver


def test_a_gram_matrix_that_rounding_made_indefinite_is_solved_on_the_eigenvectors_that_are_left() -> None:
    """An eigenvalue below zero, of the size of rounding errors, counts as zero, and so gets no part of the solution."""
    values = torch.tensor([2.0, 1.0, -4 * torch.finfo(torch.float64).eps], dtype=torch.float64)
    vectors = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    gram = vectors @ torch.diag(values) @ vectors.mT
    right = vectors @ torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64)
    found = vectors.mT @ gram_solver(gram, ridge=0.0)(right)
    torch.testing.assert_close(found, torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_both_ways_find_what_makes_the_errors_and_the_ridge_small() -> None:
    """Of `min ‖ρ x - s‖² + λ ‖x‖²` one finds `x`, the other `(ρρᵀ + λI)⁻¹ s`, of which `x` is `ρᵀ` times it."""
    rows, right, ridge = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64), 0.1
    expected = torch.linalg.solve(rows.mT @ rows + ridge * torch.eye(3, dtype=torch.float64), rows.mT @ right)
    torch.testing.assert_close(tall_solver(rows, ridge)(right), expected)
    torch.testing.assert_close(rows.mT @ gram_solver(rows @ rows.mT, ridge)(right), expected)


def test_without_a_ridge_a_rank_that_shows_in_singular_values_alone_is_found() -> None:
    """In Kahan's matrix no column is small, and yet the smallest singular value is lost in rounding."""
    cosine, sine, dim = math.cos(1.2), math.sin(1.2), 200
    upper = torch.eye(dim, dtype=torch.float64) - cosine * torch.ones(dim, dim, dtype=torch.float64).triu(1)
    rows = torch.cat([torch.diag(sine ** torch.arange(dim, dtype=torch.float64)) @ upper, torch.zeros(1, dim)])
    right = torch.ones(dim + 1, dtype=torch.float64)
    expected = torch.linalg.pinv(rows, rtol=1e-13) @ right
    assert float((tall_solver(rows, 0.0)(right) - expected).norm()) < 1e-5 * float(expected.norm())


def test_without_a_ridge_the_shortest_of_many_solutions_is_found() -> None:
    rows = torch.randn(6, 2, dtype=torch.float64) @ torch.randn(2, 4, dtype=torch.float64)
    right = torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(tall_solver(rows, 0.0)(right), torch.linalg.pinv(rows) @ right)
