"""The average of the iterates: what a run has learned, without the noise of its last steps.

The model holds the trained parameters, and the optimizer's state their averages. For evaluation the averages are put
into the model, and what was there is kept beside them; no step is taken until that is put back.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kfac_optim.blocks.state_keys import AVERAGE, AVERAGED_STEPS, ITERATE
from kfac_optim.utils.sharded_params import local
from kfac_optim.utils.validation import check_number

State = MutableMapping[Any, Any]
"""The optimizer's state, by parameter."""


@dataclass(frozen=True)
class IterateAverage:
    """Averages the parameters over the steps, for evaluation: `optimizer.eval()` shows the average, `train()` hides it.

    After the k-th step `x̄ ← β x̄ + (1 - β) x` with `β = min(1 - (1 + η)/(k + η), decay)`. It is the polynomial-decay
    averaging of Shamir & Zhang (2013, §4), which weighs about the last `k / (1 + η)` iterates, whatever the length of
    the run. Once `β` has reached `decay`, it is the exponential average of the last `1 / (1 - decay)` or so. With
    `eta=0` and `decay=0.99` it is the average of Martens & Grosse (2015, §13). Training goes on from the parameters
    `x`, as without it. The averages take the memory of the parameters once more, in float32 at least.

    Use it where the rate does not decay, or was not tuned: a step's noise then stays in the last parameters, and the
    average is mostly free of it. A run whose rate was tuned and falls to zero gains nothing.

    Args:
        eta: η, at least 0; 0 is the mean of all iterates.
        decay: the largest β, from 0 to 1.

    Raises:
        TypeError: an argument is no number.
        ValueError: it is out of range.
    """

    eta: float = 8.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        check_number("eta of IterateAverage", self.eta, at_least=0)
        check_number("decay of IterateAverage", self.decay, at_least=0, at_most=1)

    def weight(self, steps: int) -> float:
        """Return `1 - β`, the weight of the newest of so many iterates."""
        return max((1 + self.eta) / (steps + self.eta), 1 - self.decay)


@torch.no_grad()
def follow(choice: IterateAverage, params: Iterable[nn.Parameter], state: State, finite: Tensor | None) -> None:
    """Take the parameters into their averages, after a step.

    Args:
        choice: the user's choice.
        params: all parameters of the param groups; an average begins with the first step in which its parameter is
            trained.
        state: the optimizer's state.
        finite: `[]` bool, whether the step was taken, where only the device knows; None: it was taken.
    """
    by_weight: defaultdict[float, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for param in params:
        if is_lazy(param) or not (param.requires_grad or AVERAGE in state.get(param, ())):
            continue
        held = state[param]
        held[AVERAGED_STEPS] = held.get(AVERAGED_STEPS, 0) + 1
        if AVERAGE not in held:
            held[AVERAGE] = param.detach().to(_wide(param), copy=True)
            continue
        held[AVERAGE] = held[AVERAGE].to(param.device, _wide(param))  # where the model was moved since
        averages, iterates = by_weight[choice.weight(held[AVERAGED_STEPS])]
        averages.append(local(held[AVERAGE]))
        iterates.append(local(param.detach()).to(_wide(param)))
    for weight, (averages, iterates) in by_weight.items():
        if finite is None:
            torch._foreach_lerp_(averages, iterates, weight)
        else:  # pragma: cuda
            for average, iterate in zip(averages, iterates, strict=True):
                average.lerp_(iterate, torch.where(finite, weight, 0.0).to(average))


def shows_averages(state: Mapping[Any, Any]) -> bool:
    """Return whether the model holds the averages now."""
    return any(ITERATE in held for held in state.values() if isinstance(held, dict))


@torch.no_grad()
def show_averages(state: State, params: Iterable[nn.Parameter]) -> None:
    """Put the averages into the parameters, and keep what was there.

    Args:
        state: the optimizer's, which also has what it knew of parameters that it has no longer.
        params: all parameters of the param groups.
    """
    for param in params:
        held = state.get(param)
        if isinstance(held, dict) and AVERAGE in held and ITERATE not in held:
            held[ITERATE] = param.detach().clone()
            held[AVERAGED_STEPS] *= -1
            param.copy_(held[AVERAGE])


@torch.no_grad()
def show_iterates(state: State) -> None:
    """Put the trained parameters back."""
    for param, held in state.items():
        if isinstance(held, dict) and ITERATE in held:
            param.copy_(held.pop(ITERATE))
            held[AVERAGED_STEPS] = abs(held[AVERAGED_STEPS])


@torch.no_grad()
def restore(state: State, averages: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
    """Put what a checkpoint holds of averages into the state: torch would have cast it to the parameters' dtype."""
    for param, held in averages.items():
        for name, value in held.items():
            dtype = _wide(param) if name == AVERAGE else param.dtype
            state[param][name] = (
                value.detach().to(param.device, dtype, copy=True) if isinstance(value, Tensor) else value
            )


def _wide(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)
