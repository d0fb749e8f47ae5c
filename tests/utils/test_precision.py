"""How far products may be from exact ones, by their dtype and by what torch allows."""

import pytest
import torch

from kfac_optim.utils.precision import rounding_of_products


@pytest.mark.parametrize("allowed", ["ieee", "tf32", "bf16"])
def test_products_of_float32_are_rounded_as_the_backend_allows_and_others_by_their_dtype(allowed: str) -> None:
    backend = torch.backends.mkldnn.matmul
    before, backend.fp32_precision = backend.fp32_precision, allowed
    try:
        found = {dtype: rounding_of_products(dtype, "cpu") for dtype in (torch.float64, torch.float32, torch.bfloat16)}
    finally:
        backend.fp32_precision = before
    by_name = {"ieee": torch.float32, "tf32": torch.float16, "bf16": torch.bfloat16}
    assert found == {each: torch.finfo(by_name[allowed] if each is torch.float32 else each).eps for each in found}
