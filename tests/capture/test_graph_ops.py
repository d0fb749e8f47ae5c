"""Operators of compiled graphs that outlive the optimizer which wrote them."""

import pytest
import torch

import kfac_optim.capture.graph_ops  # noqa: F401 (it makes the operators)

NOBODY = -1
"""A number that no listener has ever had."""


def test_a_gradient_passes_where_the_listener_is_gone() -> None:
    gradient = torch.randn(3, 2)
    passed = torch.ops.kfac_optim.commit(NOBODY, torch.tensor(0), torch.randn(3, 4), gradient)
    assert torch.equal(passed, gradient)


@pytest.mark.parametrize(("name", "numbers"), [("begin", (0, False)), ("end", (3,))], ids=["begin", "end"])
def test_a_forward_is_only_counted_where_the_listener_is_gone(name: str, numbers: tuple[int, ...]) -> None:
    token = torch.zeros((), dtype=torch.int64)
    getattr(torch.ops.kfac_optim, name)(token, NOBODY, *numbers)
    assert int(token) == 1
