"""Sums over many tensors, joined where they are small."""

import math

import pytest
import torch
from torch import Tensor

from kfac_optim.utils import joined_tensors
from kfac_optim.utils.joined_tensors import Joins, joined
from kfac_optim.utils.precision import all_finite

SMALL, LARGE = torch.randn(3, 4).mT, torch.randn(2**15)
KINDS = {
    "float32": SMALL.float(),
    "bfloat16": torch.ones(5, dtype=torch.bfloat16),
    "float16": torch.ones(2, 2, dtype=torch.float16),
    "float64": torch.ones(3, dtype=torch.float64),
    "complex": torch.ones(3, dtype=torch.complex64),
    "large": LARGE.float(),
    "empty": torch.ones(0, 3),
    "scalar": torch.tensor(2.0),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.ones(3, device="meta"),
}


def test_small_tensors_become_one_and_large_ones_stay() -> None:
    tensors = [SMALL, LARGE, torch.ones(2), torch.ones(())]
    large, whole = joined(tensors)
    assert large is LARGE
    assert torch.equal(whole, torch.cat([SMALL.reshape(-1), torch.ones(3)]))


def test_weights_of_narrow_layers_are_small() -> None:
    """To sum one of them takes about as long to begin as to do."""
    weights = [torch.randn(128, 128) for _ in range(3)]
    assert len(joined(weights)) == 1


def test_the_same_tensors_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(joined_tensors, "joined", lambda tensors: calls.append(1) or joined(tensors))
    joins, some = Joins(), [torch.ones(3), torch.zeros(2)]
    assert joins.of(some) is joins.of(list(some))
    assert joins.of(some[:1]) is not joins.of([some[0].clone()])
    assert len(calls) == 3


@pytest.mark.parametrize("spoilt", [None, *(kind for kind in KINDS if kind not in ("empty", "meta"))])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gradients_of_all_kinds_are_looked_at(spoilt: str | None, value: float) -> None:
    gradients: dict[str, Tensor] = {name: tensor.clone() for name, tensor in KINDS.items()}
    if spoilt == "sparse":
        gradients["sparse"] = (torch.eye(3) * value).nan_to_num(nan=value, posinf=value, neginf=value).to_sparse()
    elif spoilt is not None:
        gradients[spoilt][(-1,) * gradients[spoilt].dim()] = value
    assert all_finite(gradients.values()) == (spoilt is None)
    assert all_finite([torch.full((2,), 3e38), *gradients.values()]) == (spoilt is None), "a sum that overflows"


def test_of_finite_gradients_nothing_is_asked_but_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at every element takes several times as long."""
    looks = []
    monkeypatch.setattr(Tensor, "isfinite", lambda each: looks.append(1) or torch.isfinite(each))
    assert all_finite([SMALL, LARGE])
    assert not looks
    assert all_finite([torch.full((2,), 3e38)]), "whose sum overflows"
    assert looks
