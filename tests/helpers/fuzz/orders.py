"""Calls in any order: what is refused changes nothing, what is taken leaves finite numbers."""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from helpers.fuzz import check_finite, check_same, held, judge
from helpers.fuzz.models import CRITERION, Drawn, batch, build
from kfac_optim import ExponentialDecay, HyperparameterScheduler


class Interruption(Exception):  # noqa: N818 (a user's)
    """Raised by a user's own code in the middle."""


class Run:
    """A drawn run, the graphs that await a backward, and checkpoints to come back to."""

    def __init__(self, drawn: Drawn, rng: random.Random) -> None:
        self.drawn, self.rng = drawn, rng
        self.model, self.optimizer = drawn.model, drawn.optimizer
        self.losses: list[Tensor] = []
        self.saved: list[Any] = []
        self.handles: list[Any] = []

    def forward(self) -> None:
        x, target = batch(self.rng.choice([1, 2, 4]) if not isinstance(self.model, nn.Sequential) else 3)
        self.losses.append(CRITERION(self.model(x), target))

    def backward(self) -> None:
        if self.losses:
            loss = self.losses.pop(self.rng.randrange(len(self.losses)))
            loss.backward(retain_graph=self.rng.random() < 0.3)

    def backward_twice(self) -> None:
        if self.losses:
            self.losses[-1].backward(retain_graph=True)

    def gradients_alone(self) -> None:
        if self.losses:
            torch.autograd.grad(self.losses.pop(), list(self.model.parameters()), allow_unused=True)

    def step(self) -> None:
        self.losses.clear()  # whose parameters are about to change in place
        self.optimizer.step()

    def step_by_closure(self) -> None:
        self.losses.clear()
        x, target = batch()

        def closure() -> Tensor:
            loss = CRITERION(self.model(x), target)
            if torch.is_grad_enabled():
                self.optimizer.zero_grad()
                loss.backward()
            return loss

        self.optimizer.step(closure)

    def interrupted_step(self) -> None:
        x, target = batch()

        def closure() -> Tensor:
            CRITERION(self.model(x), target).backward()
            raise Interruption

        self.optimizer.step(closure)

    def odd_closure(self) -> None:
        self.losses.clear()
        self.optimizer.step(self.rng.choice([lambda: None, lambda: 1.0, lambda: "word", lambda: torch.ones(2)]))

    def interrupted_forward(self) -> None:
        def interrupt(*_: Any) -> None:
            raise Interruption

        handle = self.rng.choice(list(self.model.modules())).register_forward_hook(interrupt)
        try:
            self.forward()
        finally:
            handle.remove()

    def training_step(self) -> None:
        if self.drawn.by_closure:
            return self.step_by_closure()
        self.losses.clear()
        self.optimizer.zero_grad()
        self.forward()
        self.losses.pop().backward()
        self.optimizer.step()
        return None

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.rng.random() < 0.5)

    def no_grad_forward(self) -> None:
        with self.rng.choice([torch.no_grad, torch.inference_mode])():
            self.model(batch()[0])

    def part_called(self) -> None:
        part = self.rng.choice([m for m in self.model.modules() if isinstance(m, nn.Linear)])
        part(torch.randn(2, part.in_features)).sum().backward()

    def save(self) -> None:
        self.saved.append(copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict())))

    def load(self) -> None:
        if self.saved:
            self.losses.clear()
            self.optimizer.load_state_dict(copy.deepcopy(self.rng.choice(self.saved)[1]))

    def load_nonsense(self) -> None:
        if self.saved:
            saved = copy.deepcopy(self.rng.choice(self.saved)[1])
            saved.pop(self.rng.choice(list(saved)))
            self.optimizer.load_state_dict(saved)

    def load_model(self) -> None:
        if self.saved:
            self.losses.clear()
            self.model.load_state_dict(self.rng.choice(self.saved)[0])

    def copied(self) -> None:
        self.losses.clear()
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer), {id(CRITERION): CRITERION})

    def pickled(self) -> None:
        pickle.loads(pickle.dumps((self.model, self.optimizer)))

    def new_group(self) -> None:
        chosen = self.rng.choice([nn.Parameter(torch.randn(2)), next(self.model.parameters()), torch.ones(2), "word"])
        self.optimizer.add_param_group({"params": [chosen], "lr": self.rng.choice([0.1, -1, None, 0.01])})

    def modes(self) -> None:
        self.rng.choice([self.model.train, self.model.eval, self.optimizer.train, self.optimizer.eval])()

    def look(self) -> None:
        self.rng.choice(
            [self.optimizer.metrics, self.optimizer.summary, self.optimizer.factors, self.optimizer.__repr__]
        )()

    def terms(self) -> None:
        self.optimizer.set_loss_terms(self.rng.choice([1, 4, 0, -1, 10**9, 2.5, float("nan"), None, "word", True]))

    def observed(self) -> None:
        loss = self.losses[-1] if self.losses else torch.ones(3)
        self.optimizer.observe(self.rng.choice([loss, torch.ones(2, 2), None, 3, torch.ones(2, requires_grad=True)]))

    def frozen(self) -> None:
        param = self.rng.choice(list(self.model.parameters()))
        self.losses.clear()
        param.requires_grad_(not param.requires_grad)

    def number(self) -> None:
        key = self.rng.choice(["lr", "damping", "momentum", "kl_clip", "factor_update_period", "inverse_update_period"])
        group = self.rng.choice(self.optimizer.param_groups)
        group[key] = self.rng.choice([0.1, 1, 2, 0, 1e-6, -1, None, float("nan"), group[key]])

    def scheduled(self) -> None:
        key = self.rng.choice(["damping", "kl_clip", "factor_decay", "word", "lr"])
        HyperparameterScheduler(self.optimizer, key, ExponentialDecay(self.rng.choice([0.9, 0.5]))).step()

    def written(self) -> None:
        self.losses.clear()
        with torch.no_grad():
            self.rng.choice(list(self.model.parameters())).mul_(0.5)

    def replaced(self) -> None:
        self.losses.clear()
        param = self.rng.choice(list(self.model.parameters()))
        param.data = torch.randn_like(param)

    def gone(self) -> None:
        self.optimizer.remove_hooks()


CALLS: dict[str, Callable[[Run], None]] = {
    name: value for name, value in vars(Run).items() if callable(value) and not name.startswith("_")
}
RARE = ("replaced", "gone", "pickled", "number", "frozen")
WEIGHTS = [0.15 if name in RARE else 3.0 if name == "training_step" else 1.0 for name in CALLS]


def case(rng: random.Random) -> str:
    drawn = build(rng)
    run, story, refused = Run(drawn, rng), [], 0
    for name in rng.choices(list(CALLS), WEIGHTS, k=rng.randint(3, 9)):
        story.append(name)
        what = f"{drawn.what}: {', '.join(story)}"
        before = held(run.model, run.optimizer)
        changes = name not in ("backward", "backward_twice", "training_step", "step_by_closure", "interrupted_step")
        try:
            CALLS[name](run)
        except Interruption:
            pass
        except Exception as error:
            judge(error, what)
            refused += 1
            after = held(run.model, run.optimizer)
            check_same(f"{what}, which raised {error}", _kept(before, changes), _kept(after, changes))
        check_finite(what, run.model, run.optimizer)
    return "some refused" if refused else "all taken"


def _kept(held: list[Any], gradients: bool) -> Any:
    """All that is held; of a call with a forward or backward in it no gradients, buffers and statistics."""
    return held if gradients else held[0]
