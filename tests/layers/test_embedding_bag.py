"""`nn.EmbeddingBag`, as a linear layer over numbers of tokens, and embeddings with a forward of their own."""

from typing import Any

import pytest
import torch
from helpers.oracles import assert_same
from torch import Tensor, nn

from kfac_optim import EKFAC, KFACOptimizer, Structure

pytestmark = pytest.mark.usefixtures("float64")

IDS, OFFSETS = torch.tensor([0, 2, 2, 1, 4, 4, 4, 0, 3]), torch.tensor([0, 3, 3, 7])  # the second bag is empty


class Bags(nn.Module):
    def __init__(self, mode: str, padding_idx: int | None, weights: Tensor | None) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding_idx)
        self.weights = weights

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids, OFFSETS if ids.dim() == 1 else None, self.weights)


def numbers(model: Bags, ids: Tensor) -> Tensor:
    """The matrix `[bags, tokens]` that the output is, times the weight: its Jacobian, column by column."""
    columns = []
    for token in range(6):
        weight = torch.zeros(6, 3)
        weight[token, 0] = 1
        columns.append(torch.func.functional_call(model, {"bag.weight": weight}, (ids,))[:, 0])
    return torch.stack(columns, dim=1).detach()


CASES: dict[str, tuple[Any, ...]] = {
    "sum": ("sum", None, None, IDS),
    "mean": ("mean", None, None, IDS),
    "padding": ("mean", 4, None, IDS),
    "weights": ("sum", None, torch.arange(1.0, 10.0), IDS),
    "matrix": ("sum", None, None, IDS.view(3, 3)),
}


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_of_a_nested_tensor_are_those_of_offsets(weighted: bool) -> None:
    found = []
    for nested in (False, True):
        torch.manual_seed(0)
        bag = nn.EmbeddingBag(6, 3, mode="sum")
        optimizer = KFACOptimizer(bag, lr=0.0)
        optimizer.set_loss_terms(3)
        offsets, weights = torch.tensor([0, 3, 7, 9]), torch.arange(1.0, 10.0, dtype=torch.float64)
        if nested:
            jagged = [torch.nested.nested_tensor_from_jagged(each, offsets) for each in (IDS, weights)]
            output = bag(jagged[0], per_sample_weights=jagged[1] if weighted else None)
        else:
            output = bag(IDS, offsets[:-1], per_sample_weights=weights if weighted else None)
        output.square().sum().backward()
        optimizer.step()
        found.append(optimizer.factors()[""])
    assert_same(*found)


def test_a_table_that_was_replaced_by_a_longer_one_is_measured_as_it_is() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.EmbeddingBag(4, 3, mode="sum", padding_idx=-1))
    for module in model:
        module.weight = nn.Parameter(torch.randn(9, 3))
    optimizer = KFACOptimizer(model, lr=0.1)
    optimizer.set_loss_terms(2)
    (model[0](torch.tensor([8, 1])).square().sum() + model[1](torch.tensor([[8, 1]])).square().sum()).backward()
    optimizer.step()
    assert optimizer.metrics()["measured_parameters"] == 1.0
    assert optimizer.factors()["0"][0].shape == (1, 9)


@pytest.mark.parametrize("name", CASES)
def test_factors_are_those_of_a_linear_layer_over_numbers_of_tokens(name: str) -> None:
    mode, padding_idx, weights, ids = CASES[name]
    model = Bags(mode, padding_idx, None if weights is None else weights.to(torch.get_default_dtype()))
    optimizer = KFACOptimizer(model, lr=0.0)
    optimizer.set_loss_terms(7)
    output = model(ids)
    output.retain_grad()
    (output.square() + output + 1).sum().backward()
    optimizer.step()
    a, g = numbers(model, ids), output.grad
    assert_same(optimizer.factors()["bag"], ((a.square().sum(0) / len(a))[None], 7 * (g.T @ g)[None]))
    assert optimizer.metrics()["measured_parameters"] == 1.0


def test_ekfac_takes_squares_of_per_bag_gradients() -> None:
    """It trains as the linear layer over the numbers of tokens does."""
    torch.manual_seed(0)
    model = Bags("sum", None, None)
    twin = nn.Linear(6, 3, bias=False)
    twin.weight.data.copy_(model.bag.weight.T)
    a = numbers(model, IDS)
    structure = {"*": (Structure.DIAGONAL, Structure.DENSE)}
    options: dict[str, Any] = {"structure": structure, "inverse": EKFAC(), "lr": 0.1, "factor_update_period": 1}
    ours, theirs = KFACOptimizer(model, **options), KFACOptimizer(twin, **options)
    for _ in range(3):
        for optimizer, output in ((ours, model(IDS)), (theirs, twin(a))):
            optimizer.zero_grad()
            optimizer.set_loss_terms(4)
            (output - 1).square().sum().backward()
            optimizer.step()
    assert_same(model.bag.weight.T, twin.weight)


@pytest.mark.parametrize(("options", "reason"), [({"mode": "max"}, "not linear"), ({"sparse": True}, "sparse")])
def test_bags_that_are_not_linear_or_sparse_say_why(options: dict[str, Any], reason: str) -> None:
    optimizer = KFACOptimizer(nn.Sequential(nn.EmbeddingBag(6, 3, **options), nn.Linear(3, 2)))
    assert reason in str(optimizer.summary())


# -- embeddings that scale ------------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    """As in BART and Gemma 3."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3


class Model(nn.Module):
    def __init__(self, embedding: nn.Embedding, scale: float) -> None:
        super().__init__()
        self.embedding, self.scale = embedding, scale
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head((self.embedding(ids) * self.scale).tanh())


def test_an_embedding_that_scales_its_output_and_a_head_tied_to_it_are_as_if_the_model_scaled() -> None:
    torch.manual_seed(0)
    ours, theirs = Model(Scaled(6, 4), 1), Model(nn.Embedding(6, 4), 3)
    theirs.load_state_dict(ours.state_dict())
    results = []
    for model in (ours, theirs):
        optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
        for _ in range(2):
            optimizer.zero_grad()
            model(IDS).square().sum().backward()
            optimizer.step()
        assert optimizer.metrics()["measured_parameters"] == 1.0
        results.append((optimizer.factors()["embedding"], model.embedding.weight.detach().clone()))
    assert_same(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1])


@pytest.mark.parametrize("given", [(torch.zeros(0, 3, dtype=torch.int64),), (torch.zeros(0, dtype=torch.int64),) * 2])
def test_a_batch_without_a_bag_is_no_sample(given: tuple[Tensor, ...]) -> None:
    model = nn.EmbeddingBag(5, 4)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    model(IDS, OFFSETS).square().sum().backward()
    optimizer.step()
    before = model.weight.detach().clone(), *optimizer.factors()[""]
    optimizer.zero_grad()
    model(*given).square().sum().backward()
    optimizer.step()
    assert_same((model.weight.detach(), *optimizer.factors()[""]), before)
