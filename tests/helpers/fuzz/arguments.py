"""Arguments that are bad, odd or of another kind: refused by name with nothing changed, or good for some steps."""

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import kfac_optim
from helpers.fuzz import CHANGED, HALFWAY, Finding, check_finite, check_same, held, judge, unchanged
from helpers.fuzz.models import BASE, CRITERION, OPTIONS, batch, plain
from helpers.plain import clones
from kfac_optim import HyperparameterScheduler, KFACOptimizer

NAMES = [name for name in inspect.signature(KFACOptimizer).parameters if name not in ("params", "distributed")]
CALLABLES: list[type] = [
    value
    for name in kfac_optim.__all__
    if inspect.isclass(value := getattr(kfac_optim, name))
    and value is not KFACOptimizer
    and not inspect.isabstract(value)
    and name not in ("Structure", "LossTerms", "WeightSharing", "LayerSpec", "LayerStatistics", "Summary", "LayerCall")
    and name not in ("RowStatistics", "InverseState")  # filled by the package itself
]


class Odd:
    """Has no meaning as an argument of anything."""

    def __repr__(self) -> str:
        return "Odd()"


VALUES: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice([None, True, False]),
    lambda rng: rng.choice([0, -1, 1, 2, 3, 10**30, -(10**30), 2**63, 7]),
    lambda rng: rng.choice([0.0, -0.0, 1e-300, 1e300, 1e30, -1e-3, 0.5, 1.0, 1.5, float("nan"), float("inf")]),
    lambda rng: rng.uniform(-2, 2),
    lambda rng: 10 ** rng.uniform(-12, 12),
    lambda rng: rng.choice(["word", "", "*", "0", "[", b"0", 1j, ..., Odd(), Odd, object(), len, lambda *_: None]),
    lambda rng: rng.choice([[], {}, (), set(), [1], {"*": 1}, {"0": None}, {3: 4}, ({},), [None], [[]], ["0", 3]]),
    lambda rng: torch.tensor(rng.choice([0.0, -1.0, 0.5, float("nan"), float("inf")])),
    lambda rng: rng.choice([torch.ones(2), torch.ones(0), torch.ones((), dtype=torch.int64), torch.tensor(True)]),
    lambda rng: rng.choice([torch.ones(1, 1), torch.ones((), dtype=torch.complex64), torch.ones((), device="meta")]),
    lambda rng: rng.choice([np.float64(0.5), np.int64(2), np.float32("nan"), np.array([0.1]), np.bool_(True)]),
    lambda rng: rng.choice([torch.float32, torch.float16, torch.int64, torch.complex64, torch.bfloat16, float]),
    lambda rng: rng.choice([nn.Linear, nn.MSELoss(), nn.Linear(2, 2), nn.MSELoss, nn.Module(), plain()]),
    lambda rng: rng.choice(list(rng.choice(OPTIONS[1:]).values())),  # a choice, where another may be meant
    lambda rng: {
        rng.choice(["*", "0", "3", nn.Linear, "absent", 3]): rng.choice(list(rng.choice(OPTIONS[1:]).values()))
    },
]


def value(rng: random.Random) -> Any:
    return rng.choice(VALUES)(rng)


def shown(arguments: Any) -> str:
    return repr(arguments)[:300]


def constructor(rng: random.Random) -> str:
    """One to three arguments of the optimizer; where it takes them, some steps follow."""
    model, criterion = plain(), CRITERION
    names = rng.sample(NAMES, rng.choice([1, 1, 2, 3]))
    arguments = {**BASE, **rng.choice(OPTIONS), **{name: value(rng) for name in names}}
    what = shown({name: arguments[name] for name in names})
    hooks = _hooks(model)
    try:
        with unchanged(what, lambda: held(model)):
            try:
                optimizer = KFACOptimizer(model, **arguments)
            except Exception as error:
                outcome = judge(error, what)
                if _hooks(model) != hooks:
                    raise Finding(CHANGED, f"{what}: hooks are left on the model") from error
                return f"constructor, {outcome}"
        return f"constructor, {_train(what, model, optimizer, criterion)}"
    finally:
        criterion._forward_hooks.clear()
        criterion._forward_pre_hooks.clear()


def edited(rng: random.Random) -> str:
    """A number of a param group, written between two steps."""
    model = plain()
    optimizer = KFACOptimizer(model, **BASE)
    _train("as built", model, optimizer, CRITERION, steps=1)
    key = rng.choice([key for key in optimizer.param_groups[0] if key != "params"])
    optimizer.param_groups[0][key] = new = value(rng)
    return f"edited, {_train(f'param_groups[0][{key!r}] = {shown(new)}', model, optimizer, CRITERION)}"


def choice(rng: random.Random) -> str:
    """Build one of the public choices from odd arguments."""
    kind = rng.choice(CALLABLES)
    names = [
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    required = [n for n in names if inspect.signature(kind).parameters[n].default is inspect.Parameter.empty]
    chosen = {*required, *rng.sample(names, rng.randint(0, min(2, len(names))))}
    arguments = {name: value(rng) for name in sorted(chosen)}
    what = f"{kind.__name__}({shown(arguments)})"
    try:
        made = kind(**arguments)
    except Exception as error:
        return f"choice, {judge(error, what)}"
    repr(made)
    return "choice, taken"


def method(rng: random.Random) -> str:
    """A public method with an odd argument, between two steps."""
    model = plain()
    optimizer = KFACOptimizer(model, **{**BASE, **rng.choice(OPTIONS)})
    if (began := _train("as built", model, optimizer, CRITERION, steps=1)) != "taken":
        return f"method, {began}"
    name = rng.choice(list(METHODS))
    given = value(rng)
    what = f"{name}({shown(given)})"
    outcome = "taken"
    before = held(model, optimizer)
    try:
        METHODS[name](optimizer, given)
    except Exception as error:
        outcome = judge(error, what)
        check_same(what, before, held(model, optimizer))
    return f"method, {outcome}, {_train(f'after {what}', model, optimizer, CRITERION)}"


METHODS: dict[str, Callable[[KFACOptimizer, Any], Any]] = {
    "step": lambda optimizer, given: optimizer.step(None if callable(given) else given),
    "step with a closure": lambda optimizer, given: optimizer.step(lambda: given),
    "set_loss_terms": lambda optimizer, given: optimizer.set_loss_terms(given),
    "observe": lambda optimizer, given: optimizer.observe(given),
    "observe with a weight": lambda optimizer, given: optimizer.observe(torch.ones(4, requires_grad=True) * 2, given),
    "add_param_group": lambda optimizer, given: optimizer.add_param_group(given),
    "add_param_group with params": lambda optimizer, given: optimizer.add_param_group({"params": given}),
    "add_param_group with lr": lambda optimizer, given: optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(2))], "lr": given}
    ),
    "clip_grad_norm_": lambda optimizer, given: optimizer.clip_grad_norm_(given),
    "clip_grad_norm_ with a type": lambda optimizer, given: optimizer.clip_grad_norm_(1.0, given),
    "load_state_dict": lambda optimizer, given: optimizer.load_state_dict(given),
    "HyperparameterScheduler": lambda optimizer, given: HyperparameterScheduler(optimizer, given, lambda _: 1.0),
    "HyperparameterScheduler with a factor": lambda optimizer, given: HyperparameterScheduler(
        optimizer, "lr", [_called_here(each) for each in given] if isinstance(given, list) else _called_here(given)
    ),
}


def _called_here(given: Any) -> Any:
    """Return it; of what can be called a function of this file, so that what it raises is seen to be the user's."""
    return (lambda at: given(at)) if callable(given) else given


def _train(what: str, model: nn.Module, optimizer: KFACOptimizer, criterion: nn.Module, steps: int = 2) -> str:
    x, target = batch()

    def closure() -> Any:
        loss = criterion(model(x), target)
        if torch.is_grad_enabled():
            optimizer.zero_grad()
            loss.backward()
        return loss

    for _ in range(steps):
        try:
            closure()
        except Exception as error:
            return judge(error, f"{what}, forward and backward")
        params = clones(model.parameters())
        try:
            optimizer.step(closure)
        except Exception as error:
            outcome = judge(error, f"{what}, step")
            if outcome != HALFWAY:
                check_same(f"{what}, a step that raised", params, clones(model.parameters()))
            return f"step {outcome}"
        check_finite(what, model, optimizer)
    try:
        optimizer.metrics()
        optimizer.summary()
        optimizer.state_dict()
    except Exception as error:
        return judge(error, f"{what}, looked at")
    return "taken"


def _hooks(model: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def case(rng: random.Random) -> str:
    return rng.choice([constructor, constructor, edited, choice, method])(rng)
