"""The scaling of a step: parts of a stack are scaled as one tensor, and nothing else of what they are parts of."""

import pytest
import torch
from torch import Tensor

from kfac_optim.step.scaling import scale_all


@pytest.mark.parametrize("taken", [slice(None), slice(1, 3), slice(0, 0)], ids=["all", "some", "none"])
def test_parts_of_a_tensor_are_scaled_and_no_others(taken: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all parts of a stack one multiplication is enough; a tensor that is no part of another is one by itself."""
    scaled: list[int] = []
    multiply = torch._foreach_mul_

    def noted(tensors: list[Tensor], factor: float) -> None:
        scaled.append(len(tensors))
        multiply(tensors, factor)

    monkeypatch.setattr(torch, "_foreach_mul_", noted)
    stack, alone = torch.arange(24.0).view(4, 3, 2), torch.ones(5)
    expected = stack.clone()
    expected[taken] *= 0.5
    scale_all([*stack.unbind()[taken], alone], 0.5)
    assert torch.equal(stack, expected)
    assert torch.equal(alone, torch.full((5,), 0.5))
    assert scaled == [2 if taken == slice(None) else len(range(*taken.indices(4))) + 1]
