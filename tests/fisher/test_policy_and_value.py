"""Two heads on one trunk, observed as distributions; covers fisher/criteria.py and extra_backward.py together."""

import pytest
import torch
from helpers.oracles import assert_same
from torch import Tensor, distributions, nn
from torch.func import functional_call, jacrev

from kfac_optim import Cholesky, ExactGGN, KFACOptimizer

WEIGHT = 0.7  # of the value in the loss


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh())
        self.policy, self.value = nn.Linear(6, 3), nn.Linear(6, 1)
        self.double()

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(observations)
        return self.policy(features), self.value(features).squeeze(-1)


def dense_fisher(model: nn.Module, observations: Tensor, layer: str) -> Tensor:
    """Return `E[s sᵀ]` of scores `s = ∇ log p(action, value | observation)` over the layer's weight, then its bias.

    The expectation over actions is the sum over all of them; of a unit normal around the value it is the product of the
    value's gradients. Observations are averaged over.
    """
    params = {name: param.detach() for name, param in model.named_parameters()}
    names = (f"{layer}.weight", f"{layer}.bias")

    def outputs(some: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits, values = functional_call(model, {**params, **some}, (observations,))
        return logits.log_softmax(1), values

    scores, slopes = (
        torch.cat([jacobian[name].flatten(values.dim()) for name in names], dim=-1)
        for jacobian, values in zip(jacrev(outputs)({name: params[name] for name in names}), outputs({}), strict=True)
    )
    probabilities = outputs({})[0].exp()
    policy = torch.einsum("na,nai,naj->ij", probabilities, scores, scores)
    return (policy + WEIGHT * slopes.T @ slopes) / len(observations)


def measured(observations: Tensor) -> tuple[nn.Module, dict[str, tuple[Tensor, Tensor]]]:
    """Return the factors that one step of an actor-critic takes."""
    model = ActorCritic()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(nn.MSELoss()))
    logits, values = model(observations)
    policy = distributions.Categorical(logits=logits)
    optimizer.observe(policy)
    optimizer.observe(distributions.Normal(values, 1.0), weight=WEIGHT)
    advantages = torch.linspace(-3, 5, len(observations), dtype=torch.float64)
    errors = values - torch.linspace(0, 2, len(observations), dtype=torch.float64)
    loss = -(advantages * policy.log_prob(policy.sample())).mean() + WEIGHT / 2 * errors.square().mean()
    (loss - 0.01 * policy.entropy().mean()).backward()
    optimizer.step()
    return model, {name: (a[0], g[0]) for name, (a, g) in optimizer.factors().items() if a is not None is not g}


LAYERS = ("trunk.0", "trunk.2", "policy", "value")


@pytest.mark.parametrize("layer", LAYERS)
def test_of_one_observation_the_factors_make_the_block_of_the_joint_fisher_matrix(layer: str) -> None:
    observation = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, factors = measured(observation)
    a, g = factors[layer]
    rows, columns = len(g), len(a) - 1
    places = torch.arange(rows * columns).reshape(rows, columns)
    biases = rows * columns + torch.arange(rows).unsqueeze(1)  # behind each row of the weight, as the block has it
    order = torch.cat([places, biases], dim=1).flatten()
    assert_same(torch.kron(g, a), dense_fisher(model, observation, layer)[order][:, order])


@pytest.mark.parametrize("layer", LAYERS)
def test_of_a_batch_g_is_the_block_of_the_bias_in_the_joint_fisher_matrix(layer: str) -> None:
    observations = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, factors = measured(observations)
    g = factors[layer][1]
    assert_same(g, dense_fisher(model, observations, layer)[-len(g) :, -len(g) :])
