"""A part of the model that is called in its place counts as the model does."""

import warnings
from collections.abc import Sequence

import pytest
import torch
from helpers.plain import assert_same_factors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from kfac_optim import KFACOptimizer, LossTerms
from kfac_optim.specs import LossTerms as Rule

F64 = torch.float64
BY_INPUT = (Rule.EXAMPLES, Rule.SUM)


class Trained(nn.Module):
    """Holds what is trained, and is never called itself, as a module of Lightning."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Flatten(0, 1), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Unflatten(0, (-1, 5))
    return nn.Sequential(*layers).to(F64)  # layers are handed positions, the network examples


def train(net: nn.Module, optimizer: KFACOptimizer) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):  # accumulated
            x, y = (torch.randn(4, 5, width, generator=generator, dtype=F64) for width in (6, 3))
            (net(x) - y).square().sum((1, 2)).mean().div(2).backward()
        optimizer.step()
    return [param.detach() for param in net.parameters()]


def both_ways(rule: LossTerms, *, validates: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    options = {"lr": 0.1, "factor_update_period": 1, "inverse_update_period": 1, "loss_terms": rule}
    direct, part = network(), network()
    by_part = KFACOptimizer(Trained(part), **options)
    if validates:
        with torch.no_grad():
            part(torch.ones(7, 5, 6, dtype=F64))
    return train(direct, KFACOptimizer(direct, **options)), train(part, by_part)


@pytest.mark.parametrize("rule", LossTerms)
def test_it_trains_as_if_it_were_the_model(rule: LossTerms) -> None:
    direct, by_part = both_ways(rule, validates=True)
    assert all(map(torch.equal, direct, by_part))


@pytest.mark.parametrize("rule", LossTerms)
def test_its_first_forward_counts_already(rule: LossTerms) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        direct, by_part = both_ways(rule, validates=False)
    assert all(map(torch.equal, direct, by_part))
    # What the first of them returns is not seen, but taken to be what its last layer does.
    counts = {Rule.POSITIONS: "taken to be 40", Rule.ELEMENTS: "taken to be 120"}
    assert len(caught) == (rule not in BY_INPUT)
    assert all(counts[rule] in str(each.message) for each in caught)


def test_a_part_that_lacks_something_trained_is_not_taken_for_the_model() -> None:
    net, head = network(), nn.Linear(3, 3).to(F64)
    model = nn.Module()
    model.net, model.head = net, head
    optimizer = KFACOptimizer(model)
    head(net(torch.ones(4, 5, 6, dtype=F64)).sum(1)).mean().backward()
    with pytest.warns(UserWarning, match="taken to be 20, the largest batch that a layer was handed"):
        optimizer.step()


@pytest.mark.parametrize("segments", [2, 4])
def test_reentrant_checkpoints_of_parts_are_counted_once(segments: int) -> None:
    """Each of them has a backward of its own, within that of the loss; the model's own forward is never called."""
    factors = []
    for parts in (1, segments):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).to(F64)
        optimizer = KFACOptimizer(net)
        x = torch.ones(8, 4, dtype=F64, requires_grad=True)
        checkpoint_sequential(net, parts, x, use_reentrant=True).square().sum(1).mean().backward()
        with pytest.warns(UserWarning, match="taken to be 8,"):
            optimizer.step()
        factors.append(optimizer.factors())
    assert_same_factors(*factors)


def test_parts_with_backwards_of_their_own_see_the_terms_of_one_loss() -> None:
    """What adds up is what came to one layer: here two micro-batches, whether the losses are summed or not."""
    factors = []
    for together in (True, False):
        torch.manual_seed(0)
        actor, critic = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(F64) for _ in range(2))
        optimizer = KFACOptimizer(nn.ModuleList([actor, critic]))
        for x in torch.randn(2, 8, 4, dtype=F64):
            losses = [part(x).square().mean() / 2 for part in (actor, critic)]
            for loss in [torch.stack(losses).sum()] if together else losses:
                loss.backward()
        with pytest.warns(UserWarning, match="taken to be 16,"):
            optimizer.step()
        factors.append(optimizer.factors())
    assert_same_factors(*factors)


@pytest.mark.parametrize("first", [0, 1])
def test_layers_keep_their_terms_where_a_later_backward_goes_on_from_an_earlier_one(first: int) -> None:
    torch.manual_seed(0)
    encoder, value, policy = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
    model = nn.ModuleList([encoder, value, policy]).to(F64)
    optimizer = KFACOptimizer(model)
    x, again = torch.randn(2, 8, 4, dtype=F64)
    features = encoder(x).tanh()
    losses = [head(features).square().mean() for head in (value, policy)]
    losses[first].backward(retain_graph=True)
    losses[1 - first].backward()
    policy(encoder(again).detach()).square().mean().backward()
    with pytest.warns(UserWarning, match="taken to be 16,"):
        optimizer.step()
