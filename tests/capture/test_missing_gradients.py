"""Layers behind a function whose backward gives None: no gradient comes to them, and none is made up."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from kfac_optim import KFACOptimizer


class Cut(torch.autograd.Function):
    """Passes its input on, and says that its output does not depend on it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(*_: object) -> None:
        pass

    @staticmethod
    def backward(*_: object) -> None:
        return None


class Net(nn.Module):
    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.table, self.cut, self.last = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.ends = ends

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        behind: Tensor = Cut.apply(self.cut(rows) if self.ends else rows)
        return self.last(rows + behind if self.ends else self.cut(behind).tanh())


def plain(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids)


def by_transforms(model: nn.Module, ids: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    return vmap(lambda one: functional_call(model, params, (one,)))(ids)


def compiled(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.compile(model, backend="aot_eager")(ids)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # what torch.compile does with it
@pytest.mark.parametrize("ends", [True, False], ids=["linear", "embedding"])
@pytest.mark.parametrize("style", [plain, by_transforms, compiled])
def test_a_layer_without_a_gradient_has_none_beside_the_optimizer_and_is_not_measured(
    style: Callable[[nn.Module, Tensor], Tensor], ends: bool
) -> None:
    model = Net(ends)
    alone = copy.deepcopy(model)
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, weight_decay=0.1, factor_update_period=1)
    silent = "cut" if ends else "table"
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for _ in range(2):
        ids = torch.randint(5, (6,))
        alone.load_state_dict(model.state_dict())
        for each in (model, alone):
            each.zero_grad()
            style(each, ids).square().sum().backward()
        for (name, param), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (param.grad is None) == (other.grad is None) == name.startswith(silent)
        optimizer.step()
    assert optimizer.factors().keys() == {"table", "cut", "last"} - {silent}
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) == name.startswith(silent)
