"""One product with a weight for value and derivatives together, in a form that other tools can see."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def stacked_product(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `rows weightᵀ`, of which the caller adds the bias to the first position; it can be overridden as torch's.

    A mode that looks for products learns of the bias here: to add it to some rows of the whole would take one more pass
    over all of them.

    Args:
        rows: `[batch, positions, *shared, in]`.
        weight: `[out, in]`.
        bias: `[out]`.

    Returns:
        `[batch, positions, *shared, out]`.
    """
    if has_torch_function((rows, weight, bias)):
        overridden: Any = handle_torch_function(stacked_product, (rows, weight, bias), rows, weight, bias)
        return overridden  # type: ignore[no-any-return]
    return F.linear(rows, weight)
