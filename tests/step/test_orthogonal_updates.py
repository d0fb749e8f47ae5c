"""Orthogonal updates: against the step written out in float64 and against AdamW, and where a step is not taken."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.plain import batch, mlp, square_loss, train
from helpers.states import assert_resumes_bitwise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import InverseRoot, KFACOptimizer, LevenbergMarquardt, MonteCarlo, OrthogonalUpdates, Structure
from kfac_optim.linalg.orthogonal import orthogonalised

pytestmark = pytest.mark.usefixtures("float64")

DENSE, IDENTITY = Structure.DENSE, Structure.IDENTITY
OPTIONS: dict[str, Any] = {
    "lr": 0.03,
    "momentum": 0.9,
    "factor_update_period": 1,
    "inverse_update_period": 3,
    "inverse": InverseRoot(),
    "structure": (DENSE, IDENTITY),
    "step_size": OrthogonalUpdates(),
}


class Scaled(nn.Module):
    """Two layers, and a parameter that belongs to none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) * self.scale


def root(factor: Tensor) -> Tensor:
    values, basis = torch.linalg.eigh(factor + 0.1 * factor.diagonal().mean() * torch.eye(len(factor)))
    return basis @ torch.diag(values.rsqrt()) @ basis.T


@settings(deadline=None, max_examples=12)
@given(
    momentum=st.sampled_from([0.0, 0.7]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    decay=st.sampled_from([0.0, 0.3]),
)
def test_layers_go_by_the_step_written_out_and_the_rest_by_adamw(
    momentum: float, nesterov: bool, maximize: bool, decay: float
) -> None:
    ours, theirs = Scaled(), Scaled()
    nesterov = nesterov and momentum > 0
    numbers = {"momentum": momentum, "nesterov": nesterov, "weight_decay": decay, "maximize": maximize}
    optimizer = KFACOptimizer(ours, **{**OPTIONS, **numbers, "inverse_update_period": 1})
    adamw = torch.optim.AdamW([theirs.scale], 0.03, (momentum, 0.999), weight_decay=decay, maximize=maximize)
    means: dict[nn.Module, Tensor] = {}
    for i in range(4):
        for model in (ours, theirs):
            model.zero_grad()
            square_loss(model(batch(i))).backward()
        optimizer.step()
        adamw.step()
        for name in ("first", "second"):
            layer, (factor, _) = theirs.get_submodule(name), optimizer.factors()[name]
            assert factor is not None
            new = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1) @ root(factor[0])
            means[layer] = momentum * means.get(layer, torch.zeros_like(new)) + (1 - momentum) * new
            update = momentum * means[layer] + (1 - momentum) * new if nesterov else means[layer]
            update = orthogonalised(update[None])[0]
            update *= (-1 if maximize else 1) * 0.2 * max(update.shape) ** 0.5
            with torch.no_grad():
                for param, part in ((layer.weight, update[:, :-1]), (layer.bias, update[:, -1])):
                    param.mul_(1 - 0.03 * decay).sub_(0.03 * part)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_layers_of_one_shape_keep_their_own_updates() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = KFACOptimizer(model, **{**OPTIONS, "momentum": 0.0})
    before = [layer.weight.detach().clone() for layer in model]
    square_loss(model(batch())).backward()
    optimizer.step()
    for layer, old in zip(model, before, strict=True):
        moved = (old - layer.weight.detach()) / 0.03
        torch.testing.assert_close((moved * layer.weight.grad).sum().sign(), torch.tensor(1.0))
    moved = torch.cat([(old - new.weight.detach()).flatten() for old, new in zip(before, model, strict=True)])
    assert 0.15 < float(moved.square().mean().sqrt()) / 0.03 < 0.25


def test_a_layer_without_statistics_goes_by_its_own_gradient() -> None:
    model = mlp()
    loss = square_loss(model(batch()))  # before there are hooks
    optimizer = KFACOptimizer(model, **OPTIONS)
    loss.backward()
    before = model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="2 layers have gradients but no statistics and take the plain Muon step"):
        optimizer.step()
    assert "no statistics so far: Muon" in str(optimizer.summary())
    matrix = torch.cat([model[0].weight.grad, model[0].bias.grad[:, None]], 1)[None]
    update = orthogonalised(matrix)[0]
    update *= 0.2 * max(update.shape) ** 0.5
    torch.testing.assert_close(before - model[0].weight, 0.03 * update[:, :-1])


def test_a_model_without_layers_trains_as_with_adamw() -> None:
    ours, theirs = (nn.ParameterList([torch.linspace(-1, 1, 5)]) for _ in range(2))
    optimizer = KFACOptimizer(ours.parameters(), **{**OPTIONS, "structure": None})
    adamw = torch.optim.AdamW(theirs.parameters(), 0.03, weight_decay=0)
    for i in range(5):
        for params, each in ((ours, optimizer), (theirs, adamw)):
            each.zero_grad()
            params[0].square().sum().backward()
            told = i == 0 and each is optimizer
            with pytest.warns(UserWarning, match="takes the plain AdamW step") if told else nullcontext():
                each.step()
    assert "AdamW: no call of a module" in str(optimizer.summary())
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=0)


def test_steps_that_are_not_taken_change_nothing() -> None:
    model = Scaled()
    optimizer = KFACOptimizer(model, **OPTIONS)
    train(model, optimizer, 2)
    before = copy.deepcopy((model.state_dict(), {param: dict(held) for param, held in optimizer.state.items()}))
    square_loss(model(batch())).backward()
    model.first.weight.grad[0, 0] = torch.nan
    optimizer.step()
    after = (model.state_dict(), {param: dict(held) for param, held in optimizer.state.items()})
    for one, other in zip(before, after, strict=True):
        for old, new in zip(one.values(), other.values(), strict=True):
            if isinstance(old, Tensor):
                assert torch.equal(old, new)
            else:
                assert all(torch.equal(value, new[key]) for key, value in old.items() if isinstance(value, Tensor))


def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise() -> None:
    def make() -> tuple[nn.Module, KFACOptimizer]:
        model = Scaled()
        return model, KFACOptimizer(model, **OPTIONS)

    assert_resumes_bitwise(make, steps=7, saved=4)


def damaged(name: str, value: Any) -> dict[str, Any]:
    model = Scaled()
    optimizer = KFACOptimizer(model, **OPTIONS)
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    held = next(held for held in state["state"].values() if "exp_avg_sq" in held)
    held[name] = value
    return state


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("exp_avg_sq", torch.full((5,), -1.0), r"'exp_avg_sq' of 'scale' is negative"),
        ("exp_avg_sq", torch.zeros(4), r"'exp_avg_sq' of 'scale' is \[4\], here \[5\]"),
        ("step", 3, r"'step' of 'scale' is .*must be a tensor \[\] of a number from 0 on"),
        ("step", torch.tensor(-1.0), r"'step' of 'scale' is .*must be a tensor \[\] of a number from 0 on"),
    ],
)
def test_a_damaged_checkpoint_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KFACOptimizer(Scaled(), **OPTIONS).load_state_dict(damaged(name, value))


def test_a_compiled_model_trains_alike() -> None:
    models = Scaled(), Scaled()
    optimizers = [KFACOptimizer(model, **OPTIONS) for model in models]
    compiled = torch.compile(models[1], backend="aot_eager")
    for i in range(4):
        for call, optimizer in zip((models[0], compiled), optimizers, strict=True):
            optimizer.zero_grad()
            square_loss(call(batch(i))).backward()
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_parameters_keep_their_dtype(dtype: torch.dtype) -> None:
    model = Scaled().to(dtype)
    optimizer = KFACOptimizer(model, **OPTIONS)
    train(model, optimizer, 3)
    for param, held in optimizer.state.items():
        assert param.isfinite().all()
        assert {held[name].dtype for name in ("momentum_buffer", "exp_avg_sq") if name in held} == {dtype}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"dampening": 0.1}, r"needs momentum below 1 and dampening 0, got momentum=0\.9 and dampening=0\.1 in param"),
        ({"momentum": 1.0}, r"needs momentum below 1 and dampening 0, got momentum=1\.0"),
    ],
)
def test_numbers_that_do_not_go_with_a_mean_are_refused(numbers: dict[str, float], message: str) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **{**OPTIONS, **numbers})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        train(model, optimizer, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    optimizer = KFACOptimizer(model, **{**OPTIONS, "structure": None}, skip_layers=["0"])
    square_loss(model(torch.arange(4))).backward()
    with pytest.raises(RuntimeError, match=r"torch\.sparse_coo gradient; OrthogonalUpdates needs dense ones"):
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("rms", 0, ValueError), ("rms", "0.2", TypeError), ("beta2", 1, ValueError), ("eps", 0.0, ValueError)],
)
def test_numbers_out_of_range_are_refused(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name} of OrthogonalUpdates must be"):
        OrthogonalUpdates(**{name: value})
    with pytest.raises(ValueError, match="damping of InverseRoot must be"):
        InverseRoot(0)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("other", ["SGD", "K-FAC"])
def test_momentum_of_another_rule_is_not_taken_for_a_mean(other: str, maximize: bool) -> None:
    numbers = {"lr": 0.01, "momentum": 0.9, "maximize": maximize}
    model = Scaled()
    alike = {name: OPTIONS[name] for name in ("inverse", "structure")}
    sgd = other == "SGD"
    before = torch.optim.SGD(model.parameters(), **numbers) if sgd else KFACOptimizer(model, **numbers, **alike)
    train(model, before, 10)
    optimizer = KFACOptimizer(model, **{**OPTIONS, "maximize": maximize})
    with pytest.warns(UserWarning, match=r"of torch\.optim\.SGD") if sgd else nullcontext():
        optimizer.load_state_dict(before.state_dict())
    optimizer.param_groups[0]["lr"] = 1.0
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    train(model, optimizer, 1, start=20)
    for name, param in model.named_parameters():
        moved = (values[name] - param.detach()) * (-1 if maximize else 1)
        assert (moved * param.grad).sum() > 0, name
        assert moved.abs().max() < 1.5, name


def test_a_model_that_is_cast_in_mid_training_goes_on() -> None:
    model = Scaled()
    optimizer = KFACOptimizer(model, **OPTIONS)
    train(model, optimizer, 3)
    model.to(torch.float32)
    train(model, optimizer, 3)
    assert all(param.isfinite().all() for param in model.parameters())


def test_a_layer_with_a_bias_alone_and_norm_layers_go_by_adamw() -> None:
    ours, theirs = (nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model[0].weight.requires_grad_(False)
        model[2].requires_grad_(False)
    optimizer = KFACOptimizer(ours, **{**OPTIONS, "structure": (DENSE, DENSE)})
    trained = [param for param in theirs.parameters() if param.requires_grad]
    adamw = torch.optim.AdamW(trained, 0.03, weight_decay=0)
    for i in range(4):
        for model, each in ((ours, optimizer), (theirs, adamw)):
            each.zero_grad()
            square_loss(model(batch(i)) - 1).backward()
            each.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_momentum_may_be_scheduled_through_zero() -> None:
    model = Scaled()
    optimizer = KFACOptimizer(model, **OPTIONS)
    for i, momentum in enumerate((0.9, 0.9, 0.0, 0.0, 0.9)):
        optimizer.param_groups[0]["momentum"] = momentum
        before = model.scale.detach().clone()
        train(model, optimizer, 1, start=i)
    assert (before - model.scale.detach()).abs().max() > 0.5 * 0.03


def test_notes_of_the_user_are_left_alone() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9)
    optimizer.state[model[0].bias]["step"] = 3
    train(model, optimizer, 2)
    copied = KFACOptimizer(model, lr=0.1, momentum=0.9)
    copied.load_state_dict(optimizer.state_dict())
    assert copied.state[model[0].bias]["step"] == 3


def test_complex_parameters_are_refused() -> None:
    param = nn.Parameter(torch.ones(2, dtype=torch.complex128))
    optimizer = KFACOptimizer([param], **{**OPTIONS, "structure": None})
    param.abs().sum().backward()
    with (
        pytest.warns(UserWarning, match="nothing is preconditioned"),
        pytest.raises(RuntimeError, match=r"is complex, and OrthogonalUpdates takes real ones"),
    ):
        optimizer.step()


def test_adapt_damping_is_refused() -> None:
    with pytest.raises(ValueError, match=r"have one length at every damping\. Drop adapt_damping"):
        KFACOptimizer(mlp(), **OPTIONS, estimate=MonteCarlo(nn.MSELoss()), adapt_damping=LevenbergMarquardt())
