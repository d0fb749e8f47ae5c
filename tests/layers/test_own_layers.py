"""The guide's example of a layer of one's own runs, and its factors are those of the definition."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import oracles
from helpers.oracles import assert_same
from torch import nn

import kfac_optim
from kfac_optim import KFACOptimizer

pytestmark = pytest.mark.usefixtures("float64")
README = Path(__file__).parents[2] / "kfac_optim" / "README.md"


@pytest.fixture
def example() -> dict[str, Any]:
    """The names that the guide's code defines, given what its reader would import."""
    marked = r"<!-- the example of an own layer -->\n```python\n(.*?)```"
    found = re.search(marked, README.read_text(), flags=re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {name: getattr(kfac_optim, name) for name in kfac_optim.__all__}
    names |= {"torch": torch, "nn": nn}
    exec(found.group(1), names)
    return names


def test_the_readmes_example_measures_the_rows_it_declares(example: dict[str, Any]) -> None:
    model, optimizer = example["model"], example["optimizer"]
    inputs = torch.randn(6, 4)
    output = model[0](inputs)
    output.retain_grad()
    optimizer.set_loss_terms(6)
    (model[1:](output).square().sum() / 6).backward()
    optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0
    rows, gradients = example["fourier"](inputs)[None, :, None], output.grad[None, :, None]
    expected = oracles.factors(rows, gradients, terms=6, bias=False)
    assert_same(optimizer.factors()["0"], expected)


def test_the_readmes_example_takes_the_preconditioned_step(example: dict[str, Any]) -> None:
    model = example["model"]
    adapters = {**kfac_optim.DEFAULT_ADAPTERS, example["FourierLinear"]: example["FourierAdapter"]()}
    optimizer = KFACOptimizer(model, lr=1.0, damping=0.1, kl_clip=None, adapters=adapters)
    before = model[0].weight.detach().clone()
    (model(torch.randn(6, 4)).square().sum() / 6).backward()
    optimizer.step()
    curvature = oracles.damped_kronecker(*optimizer.factors()["0"], model[0].weight.grad[None], 0.1)
    assert_same((before - model[0].weight)[None], oracles.solve(curvature, model[0].weight.grad[None]), rtol=1e-8)
