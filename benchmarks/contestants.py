"""The optimizers that are compared, and what of each is searched: log-uniform ranges, the same for all problems.

A loss that sums several terms for an example, as over the pixels of an image, is so many times the loss of other
problems: learning rates of optimizers that follow the gradient's scale are divided by the root of the number of those
terms. (Gradients of n terms add up to √n of them where they have nothing to do with each other, to n where they agree.
On the deep autoencoders √n puts the highest rates that train, 0.003 to 0.01, at the middle of the range.)
``one_minus_momentum`` is 1 minus the momentum, or minus Adam's β₁. Weight decay is searched where a problem says so and
is each optimizer's own: added to the gradient, or decoupled from it. Where the learning rate decays, so is the length
of the run, ``horizon``, as part of the problem's steps. All optimizers try the same lengths, and the same places of
their ranges of the rate and the decay. All else is at each optimizer's defaults, unless stated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytorch_optimizer
import torch_optimizer
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from benchmarks.problem import Decay, Problem
from benchmarks.search import Box, Range, Setting
from kfac_optim import KFACOptimizer, SelectedUpdates

_REFRESH = 20  # steps between two refreshes of Shampoo's roots
_EVALUATIONS = 25  # of a step of L-BFGS: torch would allow 1.25 for each iteration, no line search in a step of one

_RATE = Range(3e-4, 3e-2)  # of optimizers whose steps do not follow the gradient's scale
_MOMENTUM = Range(0.02, 0.3)
_ADDED = Range(1e-5, 1e-2)  # weight decay that is part of the gradient
_DECOUPLED = Range(1e-3, 1.0)
_HORIZON = Range(0.25, 1.0)


@dataclass(frozen=True, slots=True)
class Contestant:
    """Describes an optimizer.

    Attributes:
        make: ``(model, problem, setting, **choices) → optimizer``; the setting has a ``weight_decay`` on every problem.
        space: what is searched on every problem.
        term_powers: the power of the number of summed loss terms that a range of ``space`` goes with, by its name.
        choices: ``(problem) → arguments of the optimizer`` that are no numbers.
        weight_decay: its range, where the problem has it searched; None leaves it at the problem's.
        baseline: whether targets are set by it.
        full_batch: whether every step needs all training examples.
    """

    make: Callable[..., Optimizer]
    space: Box
    term_powers: Mapping[str, float] = field(default_factory=dict)
    choices: Callable[[Problem], Mapping[str, Any]] = lambda _: {}
    weight_decay: Range | None = None
    baseline: bool = True
    full_batch: bool = False

    def box(self, problem: Problem) -> dict[str, Range]:
        """Return all that is searched on ``problem``."""
        box = {name: span.scaled(problem.terms ** self.term_powers.get(name, 0)) for name, span in self.space.items()}
        if problem.tunes_weight_decay and self.weight_decay is not None:
            box["weight_decay"] = self.weight_decay
        if problem.decay is not Decay.NONE:
            box["horizon"] = _HORIZON
        return box

    def axes(self, problem: Problem) -> list[str]:
        """Return the axes of its search: trial by trial all optimizers try the same places of what they share.

        Where the rate decays, trials of longer runs get further, so that an optimizer would owe much to the lengths
        that it happens to try.
        """
        own = [name for name in self.space if name != "lr"] or ["momentum"]  # which K-FAC has fixed: left unused
        shared = {"weight_decay": problem.tunes_weight_decay, "horizon": problem.decay is not Decay.NONE}
        return ["lr", *own, *(name for name, searched in shared.items() if searched)]

    def optimizer(self, model: nn.Module, problem: Problem, setting: Setting) -> Optimizer:
        return self.make(model, problem, {"weight_decay": problem.weight_decay, **setting}, **self.choices(problem))

    def takes_part(self, problem: Problem) -> bool:
        return not self.full_batch or problem.full_batch_steps is not None


class MuonWithAdamW(Optimizer):
    """Trains hidden weights by ``torch.optim.Muon``, all other parameters by ``AdamW``, as its documentation advises.

    Muon has the weights with two dimensions or more but for embeddings and the output layer (the last of them); kernels
    are flattened to ``[out, in · k · k]`` (Jordan et al. 2024). Its rate is matched to AdamW's (Liu et al. 2025,
    arXiv 2502.16982), so that both have one learning rate and one weight decay.
    """

    def __init__(self, model: nn.Module, lr: float, momentum: float, weight_decay: float) -> None:
        weights = list(_matrices(model))[:-1]
        # Same memory, other shape: a step on the flat tensor is one on the weight.
        self._flat = [(weight, weight.detach().flatten(1)) for weight in weights]
        flat = [matrix for _, matrix in self._flat]
        taken = set(weights)
        rest = [param for param in model.parameters() if param not in taken]
        self._muon = optim.Muon(flat, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")
        self._adamw = optim.AdamW(rest, lr, (momentum, 0.999), weight_decay=weight_decay)
        # The very groups of the two: a schedule that sets a learning rate here sets it there.
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        loss = closure()
        for weight, matrix in self._flat:
            matrix.grad = None if weight.grad is None else weight.grad.flatten(1)
        self._muon.step()  # type: ignore[no-untyped-call]
        self._adamw.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for weight, _ in self._flat:
            weight.grad = None


def _matrices(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield weights with two dimensions or more, in the model's order, but those of embeddings, also of positions."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, param in module.named_parameters(recurse=False):
            if param.dim() >= 2 and "weight" in name:
                yield param


def _momentum(setting: Setting) -> float:
    return 1 - setting["one_minus_momentum"]


def _sgd(model: nn.Module, _: Problem, setting: Setting) -> Optimizer:
    return optim.SGD(
        model.parameters(),
        setting["lr"],
        momentum=_momentum(setting),
        nesterov=True,
        weight_decay=setting["weight_decay"],
    )


def _adam_like(make: Callable[..., Optimizer], beta2: float = 0.999, **choices: Any) -> Callable[..., Optimizer]:
    """Return a maker of optimizers that take Adam's arguments."""

    def optimizer(model: nn.Module, _: Problem, setting: Setting) -> Optimizer:
        betas = (_momentum(setting), beta2)
        return make(model.parameters(), lr=setting["lr"], betas=betas, weight_decay=setting["weight_decay"], **choices)

    return optimizer


def _muon(model: nn.Module, _: Problem, setting: Setting) -> Optimizer:
    return MuonWithAdamW(model, setting["lr"], _momentum(setting), setting["weight_decay"])


def _lbfgs(model: nn.Module, _: Problem, setting: Setting) -> Optimizer:
    """Take one iteration a step, with as long a line search as that takes. L-BFGS has no weight decay."""
    return optim.LBFGS(
        model.parameters(),
        setting["lr"],
        max_iter=1,
        max_eval=_EVALUATIONS,
        history_size=round(setting["history_size"]),
        line_search_fn="strong_wolfe",
    )


def _shampoo(model: nn.Module, _: Problem, setting: Setting) -> Optimizer:
    """Leave momentum out: its buffer has preconditioned gradients, which Shampoo preconditions again, and diverges."""
    made: Optimizer = torch_optimizer.Shampoo(
        model.parameters(),
        setting["lr"],
        weight_decay=setting["weight_decay"],
        epsilon=setting["epsilon"],
        update_freq=_REFRESH,
    )
    return made


def _madgrad(model: nn.Module, _: Problem, setting: Setting) -> Optimizer:
    made: Optimizer = torch_optimizer.MADGRAD(
        model.parameters(), setting["lr"], _momentum(setting), setting["weight_decay"]
    )
    return made


def _kfac(model: nn.Module, _: Problem, setting: Setting, **choices: Any) -> Optimizer:
    return KFACOptimizer(
        model,
        setting["lr"],
        momentum=0.9,
        nesterov=True,  # as SGD has it
        weight_decay=setting["weight_decay"],
        **_damping(setting),
        **choices,
    )


def _kfac_selected(model: nn.Module, problem: Problem, setting: Setting, **choices: Any) -> Optimizer:
    """Leave the output layer, which is the last matrix, to AdamW, as Muon does here."""
    last = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)][-1]
    return _kfac(model, problem, setting, step_size=SelectedUpdates(), skip_layers=[last], **choices)


def _damping(setting: Setting) -> dict[str, Any]:
    """Return the damping if a range test has recommended one; all others train with the default."""
    return {"damping": setting["damping"]} if "damping" in setting else {}


def _known_terms(problem: Problem) -> dict[str, Any]:
    """Return what the loss's mean runs over, which is no setting but a fact about the problem."""
    return {"loss_terms": problem.loss_terms}


def _named_loss(problem: Problem) -> dict[str, Any]:
    """Pass the named loss, which says itself what its mean runs over."""
    return {"estimate": problem.named_loss}


_ADAM_SPACE = {"lr": _RATE, "one_minus_momentum": _MOMENTUM}

CONTESTANTS = {
    "SGD": Contestant(_sgd, {"lr": Range(0.01, 1), "one_minus_momentum": _MOMENTUM}, {"lr": -0.5}, weight_decay=_ADDED),
    "AdamW": Contestant(_adam_like(optim.AdamW), _ADAM_SPACE, weight_decay=_DECOUPLED),
    "Muon": Contestant(_muon, _ADAM_SPACE, weight_decay=_DECOUPLED),
    "L-BFGS": Contestant(_lbfgs, {"lr": Range(0.1, 1), "history_size": Range(5, 100)}, full_batch=True),
    "Shampoo": Contestant(
        _shampoo,
        {"lr": Range(0.01, 1), "epsilon": Range(1e-3, 10)},
        # Its powers are those of the inverse covariance: a gradient twice as large makes a step half as long.
        {"lr": 1, "epsilon": 2},
        weight_decay=_ADDED,
    ),
    "LAMB": Contestant(
        _adam_like(torch_optimizer.Lamb),
        {"lr": Range(1e-3, 1e-1), "one_minus_momentum": _MOMENTUM},
        weight_decay=_DECOUPLED,
    ),
    "MADGRAD": Contestant(_madgrad, {"lr": Range(3e-4, 1e-1), "one_minus_momentum": _MOMENTUM}, weight_decay=_ADDED),
    "AdaBelief": Contestant(
        _adam_like(torch_optimizer.AdaBelief, weight_decouple=True, eps=1e-16), _ADAM_SPACE, weight_decay=_DECOUPLED
    ),
    "SOAP": Contestant(_adam_like(pytorch_optimizer.SOAP, beta2=0.95), _ADAM_SPACE, weight_decay=_DECOUPLED),
    "DistributedShampoo": Contestant(
        _adam_like(pytorch_optimizer.ScalableShampoo, preconditioning_compute_steps=_REFRESH),
        {"lr": Range(0.01, 1), "one_minus_momentum": _MOMENTUM},
        {"lr": -0.5},  # its layers' steps are as long as SGD's
        weight_decay=_ADDED,
    ),
    "KFAC-default": Contestant(_kfac, {"lr": Range(0.001, 1)}, choices=_known_terms, baseline=False),
    "KFAC-named": Contestant(_kfac, {"lr": Range(0.001, 1)}, choices=_named_loss, baseline=False),
    "KFAC-selected": Contestant(
        _kfac_selected, {"lr": _RATE}, choices=_known_terms, weight_decay=_DECOUPLED, baseline=False
    ),
}
