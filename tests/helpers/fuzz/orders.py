"""Calls in any order: what is refused changes nothing, what is taken leaves finite numbers."""

import copy
import functools
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from helpers.fuzz import HALFWAY, check_finite, check_same, held, judge
from helpers.fuzz.models import CRITERION, OPTIONS, Drawn, batch, build, build_with
from helpers.plain import copy_of
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

    def loss(self, size: int = 4) -> Tensor:
        x, target = (each.to(self.model_dtype) for each in batch(size))
        return CRITERION(self.model(x), target)  # type: ignore[no-any-return]

    @property
    def model_dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def forward(self) -> None:
        self.losses.append(self.loss(self.rng.choice([1, 2, 4, 0])))

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
        x, target = (each.to(self.model_dtype) for each in batch())

        def closure() -> Tensor:
            loss: Tensor = CRITERION(self.model(x), target)
            if torch.is_grad_enabled():
                self.optimizer.zero_grad()
                loss.backward()
            return loss

        self.optimizer.step(closure)

    def interrupted_step(self) -> None:
        def closure() -> Tensor:
            loss = self.loss()
            if self.rng.random() < 0.7:
                loss.backward()
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
            self.loss()

    def part_called(self) -> None:
        part = self.rng.choice([m for m in self.model.modules() if isinstance(m, nn.Linear)])
        part(torch.randn(2, part.in_features, dtype=self.model_dtype)).sum().backward()

    def penalty(self) -> None:
        loss = self.loss()
        grads = torch.autograd.grad(loss, list(self.model.parameters()), create_graph=True, allow_unused=True)
        (loss + sum(grad.square().sum() for grad in grads if grad is not None)).backward()

    def functional(self) -> None:
        x, target = (each.to(self.model_dtype) for each in batch())
        params = {name: param.detach().clone().requires_grad_() for name, param in self.model.named_parameters()}
        CRITERION(torch.func.functional_call(self.model, params, x), target).backward()

    def scaled(self) -> None:
        self.losses.clear()
        scaler = torch.amp.GradScaler("cpu", init_scale=self.rng.choice([2.0, 1024.0, 1e38]))
        self.optimizer.zero_grad()
        scaler.scale(self.loss()).backward()
        if self.rng.random() < 0.5:
            scaler.unscale_(self.optimizer)
        if self.rng.random() < 0.8:
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.zero_grad()  # which a step without the scaler would take as large as they are

    def in_low_precision(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            self.forward()

    def rival(self) -> None:
        self.losses.clear()
        other = build_with(self.model, self.rng.choice(OPTIONS[:-1]))
        Run(other, self.rng).training_step()

    def step_hook_that_raises(self) -> None:
        def interrupt(*_: Any) -> None:
            raise Interruption

        before, after = self.optimizer.register_step_pre_hook, self.optimizer.register_step_post_hook
        handle = self.rng.choice([before, after])(interrupt)
        try:
            self.step()
        finally:
            handle.remove()

    def save(self) -> None:
        self.saved.append(copy_of((self.model.state_dict(), self.optimizer.state_dict())))

    def load(self) -> None:
        if self.saved:
            self.losses.clear()
            self.optimizer.load_state_dict(copy_of(self.rng.choice(self.saved)[1]))

    def load_nonsense(self) -> None:
        if self.saved:
            saved = copy_of(self.rng.choice(self.saved)[1])
            saved.pop(self.rng.choice(list(saved)))
            self.optimizer.load_state_dict(saved)

    def load_model(self) -> None:
        if self.saved:
            self.losses.clear()
            state = self.rng.choice(self.saved)[0]
            if state.keys() == self.model.state_dict().keys():  # else torch loads a part of it
                self.model.load_state_dict(state)

    def load_another(self) -> None:
        """Load the checkpoint of another optimizer of such a model: of other options, another dtype, or torch's own."""
        self.losses.clear()
        model = copy.deepcopy(self.model).to(self.rng.choice([torch.float64, torch.float32, torch.bfloat16]))
        if self.rng.random() < 0.3:
            kind = self.rng.choice([torch.optim.SGD, torch.optim.AdamW])
            other: torch.optim.Optimizer = kind(model.parameters(), lr=0.1)
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            other.step()
        else:
            drawn = build_with(model, self.rng.choice(OPTIONS[:-1]))
            other, run = drawn.optimizer, Run(drawn, self.rng)
            for _ in range(self.rng.randint(0, 2)):
                run.training_step()
        self.optimizer.load_state_dict(copy_of(other.state_dict()))

    def averages_shown(self) -> None:
        self.losses.clear()
        self.optimizer.eval()

    def averages_hidden(self) -> None:
        self.losses.clear()
        self.optimizer.train()

    def copied(self) -> None:
        self.losses.clear()
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer), {id(CRITERION): CRITERION})

    def pickled(self) -> None:
        pickle.loads(pickle.dumps((self.model, self.optimizer)))

    def new_group(self) -> None:
        chosen = self.rng.choice([nn.Parameter(torch.randn(2)), next(self.model.parameters()), torch.ones(2), "word"])
        self.optimizer.add_param_group({"params": [chosen], "lr": self.rng.choice([0.1, -1, None, 0.01])})

    def new_layer(self) -> None:
        """Give the model one layer more, and the optimizer its parameters."""
        self.losses.clear()
        layer = nn.Linear(2, 2).to(self.model_dtype)
        self.model.register_module(f"added_{len(self.optimizer.param_groups)}", layer)
        if self.rng.random() < 0.8:
            known = getattr(self.model.forward, "args", (self.model,))
            self.model.forward = functools.partial(_with_layers, *known, layer)  # type: ignore[method-assign]
        self.optimizer.add_param_group({"params": layer.parameters(), "lr": self.rng.choice([0.1, 0.01])})

    def swapped(self) -> None:
        """Put a new layer where another was, and tell the optimizer nothing."""
        self.losses.clear()
        name, layer = self.rng.choice([pair for pair in self.model.named_children() if isinstance(pair[1], nn.Linear)])
        new = nn.Linear(layer.in_features, layer.out_features).to(self.model_dtype)
        self.model.register_module(name, new)

    def retyped(self) -> None:
        self.losses.clear()
        self.model.to(self.rng.choice([torch.float64, torch.float32, torch.bfloat16]))
        self.optimizer.zero_grad()

    def state_cleared(self) -> None:
        self.rng.choice(
            [self.optimizer.state.clear, lambda: self.optimizer.state.pop(next(iter(self.model.parameters())), None)]
        )()

    def modes(self) -> None:
        self.rng.choice([self.model.train, self.model.eval])()

    def look(self) -> None:
        self.rng.choice(
            [self.optimizer.metrics, self.optimizer.summary, self.optimizer.factors, self.optimizer.__repr__]
        )()

    def terms(self) -> None:
        numbers = [1, 4, 0, -1, 10**9, 2.5, float("nan"), None, "word", True]
        tensors = [4.0, float("nan"), -1.0, 0.0, [1.0, 2.0], [], 2, True, 1j]
        chosen = self.rng.choice([*numbers, *map(torch.tensor, tensors), torch.ones((), device="meta")])
        self.optimizer.set_loss_terms(chosen)

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

    def scheduled_by_torch(self) -> None:
        schedulers = torch.optim.lr_scheduler
        make = self.rng.choice(
            [
                lambda: schedulers.StepLR(self.optimizer, 1),
                lambda: schedulers.OneCycleLR(self.optimizer, 0.1, total_steps=4),
                lambda: schedulers.CosineAnnealingLR(self.optimizer, 3),
                lambda: schedulers.LambdaLR(self.optimizer, lambda _: self.rng.choice([0.5, 0, float("nan")])),
            ]
        )
        make().step()

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


def _with_layers(model: nn.Module, *layers_and_input: Any) -> Tensor:
    """Run the model and the layers that were added; unlike a closure it goes along into copies."""
    *layers, x = layers_and_input
    output: Tensor = type(model).forward(model, x)
    for layer in layers:
        output = layer(output)
    return output


CALLS: dict[str, Callable[[Run], None]] = {
    name: value for name, value in vars(Run).items() if callable(value) and not name.startswith("_")
}
del CALLS["loss"]
RARE = ("replaced", "gone", "pickled", "number", "frozen", "rival", "load_another", "swapped", "retyped")
RARE += ("state_cleared",)
WEIGHTS = [0.3 if name in RARE else 3.0 if name == "training_step" else 1.0 for name in CALLS]
RUN = ("backward", "backward_twice", "training_step", "step_by_closure", "interrupted_step", "penalty", "part_called")
RUN += ("scaled", "rival", "functional", "in_low_precision")
"""Calls with a forward or backward in them."""
AROUND_AVERAGES = ("averages_shown", "averages_hidden", "save", "load", "load_model", "copied", "training_step")


def case(rng: random.Random) -> str:
    drawn = build(rng)
    run, story, refused = Run(drawn, rng), [], 0
    before = held(run.model, run.optimizer)
    names = rng.choices(list(CALLS), WEIGHTS, k=rng.randint(3, 9))
    if "average" in drawn.what:
        names[rng.randrange(len(names)) :] = rng.choices(AROUND_AVERAGES, k=6)
    for name in names:
        story.append(name)
        what = f"{drawn.what}: {', '.join(story)}"
        try:
            CALLS[name](run)
        except Interruption:
            pass
        except Exception as error:
            outcome = judge(error, what)
            refused += 1
            if outcome != HALFWAY:
                after = held(run.model, run.optimizer)
                whole = name not in RUN and "has been taken back" not in str(error)  # statistics stay
                check_same(f"{what}, which raised {error}", _kept(before, whole), _kept(after, whole))
        check_finite(what, run.model, run.optimizer)
        before = held(run.model, run.optimizer)
    return "some refused" if refused else "all taken"


def _kept(held: list[Any], gradients: bool) -> Any:
    """All that is held; of a call with a forward or backward in it no gradients, buffers and statistics."""
    return held if gradients else held[0]
