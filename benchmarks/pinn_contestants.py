"""The optimizers that train physics-informed networks, and the settings that are tried of each: equally many.

Whatever takes ``optimizer.step(closure)`` can take part. Where a setting has ``cosine`` 1, its learning rate decays to
zero over the processor seconds of the run; where it has 0, the rate is constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytorch_optimizer
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from benchmarks.search import Setting
from kfac_optim import ExactGGN, KFACOptimizer, LineSearch, SampleSpace

# Without it, on the heat equation with the weights of seed 1, L-BFGS stood still from 8 s on, at an error of 5.5e-4;
# with it, it got to 5.5e-5 in 30 s.
_LBFGS_SCALE = 1e6


@dataclass(frozen=True, slots=True)
class Contestant:
    """Describes an optimizer.

    Attributes:
        what: its choices that are the same in all trials, in words.
        make: ``(model, criterion, setting) → optimizer``.
        settings: what is tried.
        baseline: whether it is one of those that K-FAC is held against.
    """

    what: str
    make: Callable[[nn.Module, nn.Module, Setting], Optimizer]
    settings: tuple[Setting, ...]
    baseline: bool = True


class ScaledLBFGS(optim.LBFGS):
    """Runs `torch.optim.LBFGS` on a multiple of the loss: the same method but for the numbers that torch fixes.

    It learns nothing from a step along which the gradient changes by less than 1e-10 (their inner product), which are
    all steps where the loss is small. And it is told to go on however small a step's gain is.
    """

    def __init__(self, model: nn.Module, lr: float, history_size: int, scale: float) -> None:
        super().__init__(
            model.parameters(),
            lr,
            history_size=history_size,
            line_search_fn="strong_wolfe",
            tolerance_grad=0,
            tolerance_change=0,
        )
        self._scale = scale

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        def scaled() -> Tensor:
            loss = closure()
            for param in self.param_groups[0]["params"]:
                param.grad.mul_(self._scale)
            return loss * self._scale

        loss: Tensor = super().step(scaled)  # type: ignore[no-untyped-call]
        return loss / self._scale


def _adam(model: nn.Module, _: nn.Module, setting: Setting) -> Optimizer:
    return optim.Adam(model.parameters(), setting["lr"])


def _lbfgs(model: nn.Module, _: nn.Module, setting: Setting) -> Optimizer:
    return ScaledLBFGS(model, setting["lr"], round(setting["history_size"]), _LBFGS_SCALE)


def _soap(model: nn.Module, _: nn.Module, setting: Setting) -> Optimizer:
    made: Optimizer = pytorch_optimizer.SOAP(model.parameters(), setting["lr"], (0.95, 0.95), weight_decay=0.0)
    return made


def _kfac(model: nn.Module, criterion: nn.Module, setting: Setting) -> Optimizer:
    """Search the step length, so that there is no rate to try."""
    return KFACOptimizer(
        model,
        lr=1.0,
        momentum=0,
        damping=setting["damping"],
        inverse=SampleSpace(momentum=setting["momentum"], scope="joint"),
        step_size=LineSearch(),
        estimate=ExactGGN(criterion),
    )


def _rates(constant: tuple[float, ...], decaying: tuple[float, ...]) -> tuple[Setting, ...]:
    return tuple({"lr": lr, "cosine": cosine} for cosine, rates in enumerate((constant, decaying)) for lr in rates)


CONTESTANTS = {
    "Adam": Contestant("torch.optim.Adam, β = 0.9, 0.999", _adam, _rates((0.01,), (0.003, 0.01, 0.03, 0.1, 0.3))),
    "SOAP": Contestant(
        "pytorch_optimizer.SOAP, β = 0.95, 0.95, no weight decay",
        _soap,
        _rates((0.003, 0.01, 0.03), (0.003, 0.01, 0.03)),
    ),
    "L-BFGS": Contestant(
        f"torch.optim.LBFGS, strong Wolfe, 20 iterations a step, tolerances 0, on {_LBFGS_SCALE:g} times the loss",
        _lbfgs,
        tuple({"lr": lr, "history_size": size} for lr in (1.0, 0.5) for size in (50, 100, 200)),
    ),
    "KFAC": Contestant(
        "SampleSpace of all layers jointly, LineSearch with geodesic acceleration, ExactGGN",
        _kfac,
        tuple({"damping": damping, "momentum": each} for each in (0.0, 0.8) for damping in (1e-12, 1e-10, 1e-8)),
        baseline=False,
    ),
}
