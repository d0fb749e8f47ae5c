"""One product with a weight for value and derivatives together, in a form that other tools can see."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def stacked_linear(rows: Tensor, weight: Tensor, bias: Tensor, with_bias: int = 1) -> Tensor:
    """Return `rows weightᵀ`, with the bias added to the first positions alone; it can be overridden as torch's own.

    Args:
        rows: `[batch, positions, *shared, in]`.
        weight: `[out, in]`.
        bias: `[out]`.
        with_bias: how many positions have the bias.

    Returns:
        `[batch, positions, *shared, out]`.
    """
    if has_torch_function((rows, weight, bias)):
        overridden: Any = handle_torch_function(
            stacked_linear, (rows, weight, bias), rows, weight, bias, with_bias=with_bias
        )
        return overridden  # type: ignore[no-any-return]
    marks = torch.zeros(rows.shape[1], dtype=bias.dtype, device=bias.device)
    marks[:with_bias] = 1
    added = torch.outer(marks, bias).view(-1, *(1,) * (rows.dim() - 3), len(bias))
    return F.linear(rows, weight) + added
