"""What is not preconditioned takes torch's own SGD step, bit for bit."""

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers.plain import clones, layer_direction
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, lr_scheduler

from kfac_optim import KFACOptimizer

STEPS = 50

# (momentum, dampening, nesterov): every combination that SGD accepts
MOMENTA = [(0.0, 0.0, False), (0.0, 0.3, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)]
IMPLEMENTATIONS = [
    pytest.param({}, id="default"),
    pytest.param({"foreach": True}, id="foreach"),
    pytest.param({"foreach": False}, id="for-loop"),
    pytest.param({"fused": True}, id="fused"),
]


class Mixed(nn.Module):
    """Layers with and without an adapter, a bare parameter, and a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.second = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embedding(tokens).mean(1))
        return self.second(self.norm(x).tanh()) * self.scale


def param_groups(model: Mixed) -> list[dict[str, Any]]:
    """Three groups: with the defaults, and with numbers of their own."""
    return [
        {"params": [*model.first.parameters(), *model.embedding.parameters()]},
        {"params": [*model.norm.parameters(), model.scale, model.idle], "lr": 0.01, "weight_decay": 0.0},
        {"params": list(model.second.parameters()), "lr": 0.02, "momentum": 0.5, "dampening": 0.0},
    ]


def backward(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(7, (8, 4), generator=generator)
    target = torch.randint(3, (8,), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens), target)
    loss.backward()
    return loss.detach()


def assert_same_run(
    ours: Optimizer,
    theirs: Optimizer,
    our_model: nn.Module,
    their_model: nn.Module,
    after_step: Callable[[Optimizer, int, Tensor], None] = lambda *_: None,
    steps: int = STEPS,
) -> None:
    """Train both and compare bitwise: parameters, momentum buffers, and our `.grad` before and after each step."""
    for step in range(steps):
        for optimizer, model in ((ours, our_model), (theirs, their_model)):
            optimizer.zero_grad()
            loss = backward(model, step)
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.step()
            if optimizer is ours:
                for param, grad in zip(model.parameters(), before, strict=True):
                    assert (param.grad is None) == (grad is None)
                    assert grad is None or torch.equal(param.grad, grad), ".grad was changed by step()"
            after_step(optimizer, step, loss)
        if step % 7 and step < steps - 1:
            continue
        for (name, mine), reference in zip(our_model.named_parameters(), their_model.parameters(), strict=True):
            assert torch.equal(mine, reference), (step, name)
            assert mine.isfinite().all()
            buffers = [o.state[p].get("momentum_buffer") for o, p in ((ours, mine), (theirs, reference))]
            assert (buffers[0] is None) == (buffers[1] is None), (step, name)
            assert buffers[0] is None or torch.equal(*buffers), (step, name)
    for mine, reference in zip(ours.param_groups, theirs.param_groups, strict=True):
        for key in reference.keys() - {"params", "differentiable"}:
            assert mine[key] == reference[key], key


def twins(make_groups: Callable[[Any], Iterable[Any]] = param_groups, **options: Any) -> tuple[Any, ...]:
    """(KFACOptimizer with every layer skipped, SGD, its model, the other model)."""
    model = Mixed()
    twin = copy.deepcopy(model)
    ours = KFACOptimizer(make_groups(model), model=model, skip_layers=("*",), **options)
    # A scheduler moves a tensor learning rate in place, so each run needs its own.
    return ours, SGD(make_groups(twin), **copy.deepcopy(options)), model, twin


def test_a_run_with_every_layer_skipped_differs_from_a_preconditioned_one() -> None:
    """The comparison can fail: the same run without `skip_layers` is another."""
    model = Mixed()
    twin = copy.deepcopy(model)
    ours = KFACOptimizer(param_groups(model), lr=0.1, model=model)
    with pytest.raises(AssertionError, match=r"embedding\.weight"):
        assert_same_run(ours, SGD(param_groups(twin), lr=0.1), model, twin, steps=2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize(("momentum", "dampening", "nesterov"), MOMENTA)
def test_with_every_layer_skipped_fifty_steps_equal_sgd(
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
    implementation: dict[str, bool],
) -> None:
    assert_same_run(
        *twins(
            lr=0.05,
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
            weight_decay=weight_decay,
            maximize=maximize,
            **implementation,
        )
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_learning_rate_equals_sgd(implementation: dict[str, bool], shape: tuple[int, ...]) -> None:
    ours, theirs, model, twin = twins(lr=torch.full(shape, 0.05), momentum=0.9, **implementation)

    def halve(optimizer: Optimizer, step: int, _: Tensor) -> None:
        if step == 10:
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] / 2

    assert_same_run(ours, theirs, model, twin, halve)


def test_a_tensor_weight_decay_equals_sgd() -> None:
    assert_same_run(*twins(lr=0.05, weight_decay=torch.tensor(0.05), momentum=0.9))


def test_the_first_six_positional_arguments_are_those_of_sgd() -> None:
    ours = list(inspect.signature(KFACOptimizer).parameters.values())[:6]
    theirs = list(inspect.signature(SGD).parameters.values())[:6]
    assert [p.name for p in ours] == [p.name for p in theirs]
    assert [p.default for p in ours] == [p.default for p in theirs]
    assert {p.kind for p in list(inspect.signature(KFACOptimizer).parameters.values())[6:]} == {
        inspect.Parameter.KEYWORD_ONLY
    }
    model = Mixed()
    twin = copy.deepcopy(model)
    optimizer = KFACOptimizer(model, 0.05, 0.9, 0.0, 0.01, True, skip_layers=("*",), factor_update_period=1)
    assert_same_run(optimizer, SGD(twin.parameters(), 0.05, 0.9, 0.0, 0.01, True), model, twin, steps=5)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("nesterov", [False, True])
def test_gradients_that_come_and_go_equal_sgd(foreach: bool | None, nesterov: bool) -> None:
    """Some parameters have no gradient in some steps, so momentum buffers start at different times."""
    ours, theirs, model, twin = twins(lr=0.05, momentum=0.9, nesterov=nesterov, foreach=foreach)

    def drop(optimizer: Optimizer, *_: Any, step: list[int]) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for i, param in enumerate(params):
            if (step[0] + i) % 3 == 0:
                param.grad = None
        step[0] += 1

    for optimizer in (ours, theirs):
        count = [0]
        optimizer.register_step_pre_hook(lambda o, *_, count=count: drop(o, step=count))
    for step in range(STEPS):
        for optimizer, owner in ((ours, model), (theirs, twin)):
            optimizer.zero_grad()
            backward(owner, step)
            optimizer.step()
    for mine, reference in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, reference)


# -- learning-rate schedulers ----------------------------------------------------------------------------------


def lambda_factor(step: int) -> float:
    return 0.9**step


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda_factor, lambda step: 1 / (1 + step), lambda_factor]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.97),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=7, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[5, 20, 30], gamma=0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.25, total_iters=9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=11),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.95),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=40, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=6, T_mult=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.001, max_lr=0.1, step_size_up=6),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.05, 0.02], total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5, threshold=0.1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[5]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.95)], optimizer=o
    ),
}


def test_every_scheduler_class_of_torch_has_a_case() -> None:
    classes = {
        name
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler)
    }
    assert classes - {"LRScheduler", "_LRScheduler"} == set(SCHEDULERS)


@pytest.mark.parametrize("lr", [pytest.param(0.05, id="float"), pytest.param(torch.tensor(0.05), id="tensor")])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_lr_scheduler_drives_the_same_run_as_sgd(name: str, lr: float | Tensor) -> None:
    ours, theirs, model, twin = twins(lr=lr, momentum=0.9, nesterov=True)
    schedulers = {id(optimizer): SCHEDULERS[name](optimizer) for optimizer in (ours, theirs)}
    rates: list[tuple[float, ...]] = []

    def move(optimizer: Optimizer, _: int, loss: Tensor) -> None:
        scheduler = schedulers[id(optimizer)]
        scheduler.step(*([loss] if name == "ReduceLROnPlateau" else []))
        rates.append(tuple(float(group["lr"]) for group in optimizer.param_groups))

    assert_same_run(ours, theirs, model, twin, move)
    assert rates[::2] == rates[1::2]
    assert len(set(rates)) > 1, "the scheduler moved nothing"


def test_a_scheduler_sees_that_step_was_called_and_does_not_warn() -> None:
    """Torch warns when a scheduler steps before the optimizer; warnings are errors here."""
    model = Mixed()
    optimizer = KFACOptimizer(model, lr=0.1)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    backward(model, 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


# -- parameters that no block covers ---------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("momentum", "dampening", "nesterov"), MOMENTA)
def test_uncovered_parameters_of_a_mixed_model_take_the_same_step_as_sgd(
    momentum: float, dampening: float, nesterov: bool, maximize: bool, implementation: dict[str, bool]
) -> None:
    """Whatever preconditioning and the trust region do to the layers beside them."""
    model = Mixed()
    options = {
        "lr": 0.05,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "maximize": maximize,
        "weight_decay": 0.01,
        **implementation,
    }
    optimizer = KFACOptimizer(
        model, kl_clip=1e-5, factor_update_period=1, skip_layers=("embedding", "norm", "second"), **options
    )
    uncovered = [
        *model.embedding.parameters(),
        *model.norm.parameters(),
        *model.second.parameters(),
        model.scale,
    ]
    copies = [nn.Parameter(tensor) for tensor in clones(uncovered)]
    reference = SGD(copies, **options)
    for step in range(10):
        optimizer.zero_grad()
        backward(model, step)
        before = clones(p.grad for p in model.parameters() if p.grad is not None)
        for twin, param in zip(copies, uncovered, strict=True):
            twin.grad = param.grad.clone()
        optimizer.step()
        reference.step()
        after = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), ".grad was changed by step()"
        for twin, param in zip(copies, uncovered, strict=True):
            assert torch.equal(twin, param)
            if momentum:
                buffers = reference.state[twin]["momentum_buffer"], optimizer.state[param]["momentum_buffer"]
                assert torch.equal(*buffers)
    assert optimizer.metrics()["trust_region_scale"] < 1, "the trust region was to bind"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("momentum", "dampening", "nesterov"), MOMENTA)
def test_covered_parameters_take_the_same_step_as_sgd_on_the_preconditioned_gradient(
    momentum: float, dampening: float, nesterov: bool, maximize: bool, implementation: dict[str, bool]
) -> None:
    options = {
        "lr": 0.05,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "maximize": maximize,
        "weight_decay": 0.01,
        **implementation,
    }
    model = Mixed().double()
    fixed = {"factor_update_period": 1000, "inverse_update_period": 1000}
    optimizer = KFACOptimizer(model, kl_clip=None, **fixed, **options)
    backward(model, 0)
    optimizer.step()  # the inverses are those of this step from here on
    layer = model.first
    params = [layer.weight, layer.bias]
    copies = [nn.Parameter(tensor) for tensor in clones(params)]
    reference = SGD(copies, **options)
    for twin, param in zip(copies, params, strict=True):
        if momentum:
            reference.state[twin]["momentum_buffer"] = optimizer.state[param]["momentum_buffer"].clone()
    factors = optimizer.factors()["first"]
    for step in range(1, 4):
        optimizer.zero_grad()
        backward(model, step)
        matrix = layer_direction(layer, factors, 1e-3)
        copies[0].grad, copies[1].grad = matrix[:, :-1].contiguous(), matrix[:, -1].contiguous()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(copies, params, rtol=1e-9, atol=1e-12)
