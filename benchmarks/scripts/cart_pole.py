"""Balance the pole of CartPole-v1: an advantage actor-critic whose policy and value share a trunk, trained by K-FAC."""
# mypy: disable-error-code="no-untyped-call"

import argparse
from collections import deque
from collections.abc import Iterator

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.optim import Optimizer

from kfac_optim import ExactGGN, KFACOptimizer, TrustRegion

DISCOUNT, SMOOTHING, ENTROPY_WEIGHT = 0.99, 0.95, 0.01


class ActorCritic(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(observations)
        return self.policy(features), self.value(features).squeeze(-1)


def batches(
    model: nn.Module, environments: int, horizon: int, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, list[int]]]:
    """Yield observations, actions, advantages and returns, `[steps, …]`, and the lengths of episodes that ended."""
    worlds = gymnasium.make_vec("CartPole-v1", num_envs=environments)
    seen = torch.from_numpy(worlds.reset(seed=seed)[0])
    over, lengths = np.zeros(environments, bool), np.zeros(environments, int)
    while True:
        steps, ended = [], []
        for _ in range(horizon):
            with torch.no_grad():
                action = model(seen)[0].softmax(1).multinomial(1).squeeze(1)
            after, reward, terminated, truncated, _ = worlds.step(action.numpy())
            last = terminated | truncated
            # The step after the end of an episode only resets its environment, whatever the action: it is left out.
            steps.append((seen, action, *map(torch.from_numpy, (reward, terminated, last, ~over))))
            lengths = np.where(over, 0, lengths + 1)
            ended += lengths[last].tolist()
            seen, over = torch.from_numpy(after), last
        observations, actions, rewards, failed, final, real = map(torch.stack, zip(*steps, strict=True))
        with torch.no_grad():
            values = model(torch.cat([observations, seen[None]]))[1]
        # Multiplying rewards by 1 - DISCOUNT keeps values between 0 and 1.
        errors = (1 - DISCOUNT) * rewards + DISCOUNT * ~failed * values[1:] - values[:-1]
        advantages, advantage = torch.zeros_like(errors), torch.zeros(environments)
        for time in reversed(range(horizon)):  # generalised advantage estimation (Schulman et al. 2016)
            advantage = errors[time] + DISCOUNT * SMOOTHING * ~final[time] * advantage
            advantages[time] = advantage
        yield observations[real], actions[real], advantages[real], (advantages + values[:-1])[real], ended


def train(
    model: nn.Module, optimizer: Optimizer, value_weight: float, environments: int, horizon: int, seed: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield, after each update, the number of steps it was made of, and the lengths of episodes that ended in them."""
    for observations, actions, advantages, returns, ended in batches(model, environments, horizon, seed):
        logits, values = model(observations)
        policy = Categorical(logits=logits)
        normal = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        loss = -(normal * policy.log_prob(actions)).mean() - ENTROPY_WEIGHT * policy.entropy().mean()
        loss = loss + value_weight * (values - returns).square().mean() / 2
        optimizer.zero_grad()
        if isinstance(optimizer, KFACOptimizer):  # one Fisher matrix of both heads, as in ACKTR (Wu et al. 2017)
            optimizer.observe(policy)
            optimizer.observe(Normal(values, 1.0), weight=value_weight)
        loss.backward()
        optimizer.step()
        yield len(observations), ended


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300_000, help="of the environment at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = ActorCritic()
    optimizer = KFACOptimizer(
        model,
        lr=0.3,
        damping=0.01,
        kl_clip=0.01,
        step_size=TrustRegion(),
        factor_update_period=1,
        inverse_update_period=1,
        estimate=ExactGGN(nn.MSELoss()),
    )
    steps, shown, recent = 0, 0, deque[int](maxlen=100)
    for count, ended in train(model, optimizer, value_weight=10.0, environments=8, horizon=32, seed=args.seed):
        steps += count
        recent.extend(ended)
        mean = sum(recent) / max(1, len(recent))
        done = steps >= args.steps or (len(recent) == 100 and mean >= 475)
        if done or steps >= shown + 5000:
            shown = steps
            print(f"{steps} steps: mean return of the last {len(recent)} episodes {mean:.0f}", flush=True)
        if done:
            break
