"""Selected updates: against both updates and the choice written out in float64, and where they are refused."""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.plain import assert_identical, batch, mlp, square_loss, train
from helpers.states import assert_resumes_bitwise
from torch import Tensor, nn

from kfac_optim import (
    BlockDiagonal,
    Cholesky,
    InverseAndRoot,
    KFACOptimizer,
    LevenbergMarquardt,
    MonteCarlo,
    SelectedUpdates,
    Structure,
)
from kfac_optim.blocks.state_keys import PREFERENCE
from kfac_optim.linalg.orthogonal import orthogonalised
from kfac_optim.step import selected_updates

pytestmark = pytest.mark.usefixtures("float64")

OPTIONS: dict[str, Any] = {"lr": 0.02, "momentum": 0.8, "factor_update_period": 1, "step_size": SelectedUpdates()}


class Scaled(nn.Module):
    """Two layers, and a parameter that belongs to none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) * self.scale


def power(factor: Tensor, exponent: float) -> Tensor:
    values, basis = torch.linalg.eigh(factor + 0.1 * factor.diagonal().mean() * torch.eye(len(factor)))
    return basis @ torch.diag(values**exponent) @ basis.T


def updates(mean: Tensor, a: Tensor, g: Tensor, rms: float = 0.2) -> tuple[Tensor, Tensor]:
    orthogonal = orthogonalised((mean @ power(a, -0.5))[None])[0] * rms * max(mean.shape) ** 0.5
    natural = power(g, -1) @ mean @ power(a, -1)
    return orthogonal, rms * natural / natural.square().mean().sqrt()


def gradient(layer: nn.Module, decay: float = 0.0) -> Tensor:
    parts = [param.grad + decay * param.detach() for param in (layer.weight, layer.bias)]
    return torch.cat([parts[0], parts[1][:, None]], 1)


@pytest.mark.parametrize(
    ("nesterov", "maximize", "decay", "steeper", "rms", "in_curvature"),
    [
        (True, False, 0.3, 0.5, 0.2, False),
        (False, False, 0.3, 2.0, 0.2, True),
        (True, True, 0.0, 0.2, 0.2, False),
        (False, True, 0.3, 0.5, 0.4, False),
        (True, False, 0.3, 0.5, 0.2, True),
    ],
)
def test_a_layer_goes_by_the_natural_gradient_where_the_next_gradients_found_it_steep_enough(
    nesterov: bool,
    maximize: bool,
    decay: float,
    steeper: float,
    rms: float,
    in_curvature: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here no direction is twice as steep as the orthogonal update, so that less is asked of it as well."""
    monkeypatch.setattr(selected_updates, "_STEEPER", steeper)
    ours, theirs = mlp(), mlp()
    numbers = {"nesterov": nesterov, "weight_decay": decay, "maximize": maximize, "l2_in_curvature": in_curvature}
    options = {**OPTIONS, "step_size": SelectedUpdates(rms=rms), "inverse_update_period": 1}
    optimizer = KFACOptimizer(ours, **options, **numbers)
    coupled, decoupled = (decay, 0.0) if in_curvature else (0.0, decay)
    means: dict[str, Tensor] = {}
    preference = {"0": 0.0, "2": 0.0}
    chosen = set()
    for step in range(12):
        for model in (ours, theirs):
            model.zero_grad()
            square_loss(model(batch(step))).backward()
        optimizer.step()
        for name in preference:
            layer, (a, g) = theirs.get_submodule(name), optimizer.factors()[name]
            assert a is not None
            assert g is not None
            new = gradient(layer, coupled)
            if name in means and (step < 5 or step % 5 == 0):
                orthogonal, steep = (float((new * update).sum()) for update in updates(means[name], a[0], g[0], rms))
                found = (steep - steeper * orthogonal) / (abs(steep) + steeper * abs(orthogonal))
                preference[name] += 0.2 * (found - preference[name])
            means[name] = 0.8 * means.get(name, torch.zeros_like(new)) + 0.2 * new
            ahead = 0.8 * means[name] + 0.2 * new if nesterov else means[name]
            natural = preference[name] > 0
            chosen.add(natural)
            update = updates(ahead, a[0], g[0], rms)[natural] * (-1 if maximize else 1)
            held = optimizer.state[ours.get_submodule(name).weight].get(PREFERENCE, torch.zeros(()))
            torch.testing.assert_close(held.double(), torch.tensor(preference[name]), rtol=0, atol=1e-6)
            with torch.no_grad():
                for param, part in ((layer.weight, update[:, :-1]), (layer.bias, update[:, -1])):
                    param.mul_(1 - 0.02 * decoupled).sub_(0.02 * part)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    assert chosen == ({False} if steeper == 2 else {True, False})


def test_on_an_accelerator_both_are_made_and_the_device_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made to believe that the preference is far away, a step ends where it ends on the host."""
    models = mlp(), mlp()
    for number, model in enumerate(models):
        optimizer = KFACOptimizer(model, **OPTIONS)
        if number:
            monkeypatch.setattr(selected_updates, "on_host", lambda _: False)
        train(model, optimizer, 9)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise() -> None:
    def make() -> tuple[nn.Module, KFACOptimizer]:
        model = mlp()
        return model, KFACOptimizer(model, **OPTIONS, inverse_update_period=3)

    assert_resumes_bitwise(make, steps=13, saved=7)


def test_steps_that_are_not_taken_change_nothing() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **OPTIONS)
    train(model, optimizer, 4)
    before = copy.deepcopy((model.state_dict(), [dict(optimizer.state[param]) for param in model.parameters()]))
    square_loss(model(batch())).backward()
    model[0].weight.grad[0, 0] = torch.nan
    optimizer.step()
    assert_identical(before, (model.state_dict(), [dict(optimizer.state[param]) for param in model.parameters()]))


def test_metrics_tell_how_many_layers_prefer_the_natural_gradient() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **OPTIONS)
    assert "natural_updates" not in optimizer.metrics()
    train(model, optimizer, 1)
    for layer, preference in ((model[0], 1.0), (model[2], -1.0)):
        optimizer.state[layer.weight][PREFERENCE].fill_(preference)
    assert optimizer.metrics()["natural_updates"] == 0.5


def test_factors_in_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"orthogonal as a whole.*Leave structure out"):
        KFACOptimizer(mlp(), step_size=SelectedUpdates(), structure=(BlockDiagonal(2), Structure.DENSE))


def test_some_layers_may_have_an_inverse_of_their_own_choice() -> None:
    inverse = {"0": InverseAndRoot(0.3)}
    blocks = KFACOptimizer(mlp(), step_size=SelectedUpdates(), inverse=inverse).summary().blocks
    assert [block.inverse.split(",")[0] for block in blocks] == [
        "InverseAndRoot(damping=0.3",
        "InverseAndRoot(damping=0.1",
    ]


def test_gradients_stay_as_they_are() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **OPTIONS)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    square_loss(model(batch())).backward()
    before = [param.grad.clone() for param in model.parameters()]
    optimizer.step()
    for old, param in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, param.grad)


def test_sketched_layers_train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 2))
    inputs = torch.randn(16, 3, 8)
    optimizer = KFACOptimizer(model, **OPTIONS, inverse=InverseAndRoot(rank=2, sketch=4))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, 0, :2]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_other_inverses_are_refused() -> None:
    with pytest.raises(ValueError, match=r"SelectedUpdates chooses between two powers.*Leave inverse out"):
        KFACOptimizer(mlp(), step_size=SelectedUpdates(), inverse=Cholesky())


def test_the_inverse_goes_with_the_step_size_where_none_is_named() -> None:
    (inverse, _) = (block.inverse for block in KFACOptimizer(mlp(), step_size=SelectedUpdates()).summary().blocks)
    assert inverse == "InverseAndRoot(damping=0.1, rank=32, sketch=64)"


@pytest.mark.parametrize("on_host", [True, False])
def test_layers_of_one_shape_may_prefer_other_updates(on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = KFACOptimizer(model, **OPTIONS)
    train(model, optimizer, 6)  # the next step compares nothing
    preferences = (1.0, -1.0, 1.0)
    for layer, preference in zip(model, preferences, strict=True):
        optimizer.state[layer.weight][PREFERENCE].fill_(preference)
    before = copy.deepcopy(model)
    states = [block.state for block in optimizer._binding.coverage.blocks]
    monkeypatch.setattr(selected_updates, "on_host", lambda _: on_host)
    train(model, optimizer, 1, start=6)
    inverse = InverseAndRoot()
    for layer, old, state, preference in zip(model, before, states, preferences, strict=True):
        mean = torch.cat([optimizer.state[p]["momentum_buffer"].view(4, -1) for p in layer.parameters()], 1)[None]
        if preference > 0:
            update = inverse.apply(state, mean, 0.0)
            update = 0.2 * update / update.square().mean().sqrt()
        else:
            update = orthogonalised(inverse.apply_root(state, mean)) * 0.2 * 5**0.5
        torch.testing.assert_close((old.weight - layer.weight).detach(), 0.02 * update[0, :, :-1], rtol=1e-6, atol=1e-9)


def test_layers_of_one_shape_keep_their_own_updates() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = KFACOptimizer(model, **OPTIONS)
    before = [layer.weight.detach().clone() for layer in model]
    square_loss(model(batch())).backward()
    optimizer.step()
    for layer, old in zip(model, before, strict=True):
        moved = (old - layer.weight.detach()) / 0.02
        torch.testing.assert_close((moved * layer.weight.grad).sum().sign(), torch.tensor(1.0))
    moved = torch.cat([(old - new.weight.detach()).flatten() for old, new in zip(before, model, strict=True)])
    assert 0.15 < float(moved.square().mean().sqrt()) / 0.02 < 0.25


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
    torch.testing.assert_close(before - model[0].weight, 0.02 * update[:, :-1])


@pytest.mark.parametrize(
    ("chosen", "decay", "in_curvature"),
    [(SelectedUpdates(), 0.1, False), (SelectedUpdates(beta2=0.9, eps=0.1), 0.1, True)],
    ids=["decoupled", "in the gradient"],
)
def test_a_model_without_layers_trains_as_with_adam(chosen: SelectedUpdates, decay: float, in_curvature: bool) -> None:
    ours, theirs = (nn.ParameterList([torch.linspace(-1, 1, 5)]) for _ in range(2))
    options = {**OPTIONS, "step_size": chosen, "weight_decay": decay, "l2_in_curvature": in_curvature}
    optimizer = KFACOptimizer(ours.parameters(), **options)
    adam = (torch.optim.Adam if in_curvature else torch.optim.AdamW)(
        theirs.parameters(), 0.02, (0.8, chosen.beta2), chosen.eps, weight_decay=decay
    )
    for i in range(5):
        for params, each in ((ours, optimizer), (theirs, adam)):
            each.zero_grad()
            params[0].square().sum().backward()
            told = i == 0 and each is optimizer
            with pytest.warns(UserWarning, match="takes the plain AdamW step") if told else nullcontext():
                each.step()
    assert "AdamW: no call of a module" in str(optimizer.summary())
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=0)


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
        ("exp_avg_sq", torch.full((5,), torch.nan), r"'exp_avg_sq' of 'scale' is not a number"),
        ("exp_avg_sq", torch.zeros(4), r"'exp_avg_sq' of 'scale' is \[4\], here \[5\]"),
        ("step", 3, r"'step' of 'scale' is .*must be a tensor \[\] of a number from 0 on"),
        ("step", torch.tensor(-1.0), r"'step' of 'scale' is .*must be a tensor \[\] of a number from 0 on"),
    ],
)
def test_a_damaged_checkpoint_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KFACOptimizer(Scaled(), **OPTIONS).load_state_dict(damaged(name, value))


def test_a_square_that_has_overflowed_is_read_again() -> None:
    params = [nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(2)]
    optimizer, again = (KFACOptimizer([param], **OPTIONS) for param in params)
    params[0].grad = torch.tensor([3e4, 1.0], dtype=torch.float16)
    with pytest.warns(UserWarning, match="takes the plain AdamW step"):
        optimizer.step()
    assert optimizer.state[params[0]]["exp_avg_sq"].isinf().tolist() == [True, False]
    assert params[0].isfinite().all()
    again.load_state_dict(optimizer.state_dict())
    assert_identical(again.state[params[1]], optimizer.state[params[0]])


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
        assert {held[name].dtype for name in ("momentum_buffer", "exp_avg_sq", "preference") if name in held} == {dtype}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            {"dampening": 0.1},
            r"needs momentum above 0 and below 1 and dampening 0, got momentum=0\.8 and dampening=0\.1 in param",
        ),
        ({"momentum": 0.0}, r"needs momentum above 0 .*got momentum=0\.0 .*Pass momentum=0\.9"),
        ({"momentum": 1.0}, r"needs momentum above 0 and below 1 and dampening 0, got momentum=1\.0"),
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
    optimizer = KFACOptimizer(model, **OPTIONS, skip_layers=["0"])
    square_loss(model(torch.arange(4))).backward()
    with pytest.raises(RuntimeError, match=r"torch\.sparse_coo gradient; SelectedUpdates needs dense ones"):
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("rms", 0, ValueError), ("rms", "0.2", TypeError), ("beta2", 1, ValueError), ("eps", 0.0, ValueError)],
)
def test_numbers_out_of_range_are_refused(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name} of SelectedUpdates must be"):
        SelectedUpdates(**{name: value})
    with pytest.raises(ValueError, match="damping of InverseAndRoot must be"):
        InverseAndRoot(0)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("other", ["SGD", "K-FAC"])
def test_momentum_of_another_rule_is_not_taken_for_a_mean(other: str, maximize: bool) -> None:
    numbers = {"lr": 0.01, "momentum": 0.9, "maximize": maximize}
    model = Scaled()
    alike = {"inverse": InverseAndRoot()}
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


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_mean_is_taken_for_momentum_of_the_same_sign_when_the_step_ascends(momentum: float) -> None:
    ends = []
    for maximize in (False, True):
        sign = -1 if maximize else 1
        model = Scaled()
        options = {"lr": 0.01, "momentum": 0.9, "maximize": maximize, "factor_update_period": 1}
        before = KFACOptimizer(model, step_size=SelectedUpdates(), **options)
        after = KFACOptimizer(model, inverse=InverseAndRoot(), **options)
        for step in range(8):
            optimizer = before if step < 4 else after
            if step == 4:
                after.load_state_dict(before.state_dict())
                after.param_groups[0]["momentum"] = momentum
            optimizer.zero_grad()
            (sign * square_loss(model(batch(step)))).backward()
            optimizer.step()
        ends.append([param.detach() for param in model.parameters()])
        assert not any("exp_avg_sq" in held for held in after.state.values())
    assert_identical(*ends)


def test_a_model_that_is_cast_in_mid_training_goes_on() -> None:
    model = Scaled()
    optimizer = KFACOptimizer(model, **OPTIONS)
    train(model, optimizer, 3)
    model.to(torch.float32)
    train(model, optimizer, 3)
    assert all(param.isfinite().all() for param in model.parameters())


def test_gradients_may_have_a_dtype_of_their_own() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float32) for _ in range(3)))
    model[0].weight.grad_dtype = torch.bfloat16
    before = [param.detach().clone() for param in model.parameters()]
    train(model, KFACOptimizer(model, **OPTIONS), 5)
    assert all(not torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("size", [1e-18, 1e18])
def test_the_natural_gradient_is_finite_whatever_the_size_of_the_loss(size: float) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = KFACOptimizer(model, **OPTIONS)
    for step in range(4):
        optimizer.zero_grad()
        (size * square_loss(model(batch(step, dtype=torch.float32)))).backward()
        for weight in (model[0].weight, model[2].weight):
            if optimizer.state[weight]:
                optimizer.state[weight][PREFERENCE].fill_(1)
        optimizer.step()
    assert all(param.isfinite().all() for param in model.parameters())


def test_a_layer_with_a_bias_alone_and_norm_layers_go_by_adamw() -> None:
    ours, theirs = (nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model[0].weight.requires_grad_(False)
        model[2].requires_grad_(False)
    with pytest.warns(UserWarning, match="nothing is preconditioned; every parameter takes the plain AdamW step"):
        optimizer = KFACOptimizer(ours, **OPTIONS)
    assert "AdamW: it is no matrix" in str(optimizer.summary())
    trained = [param for param in theirs.parameters() if param.requires_grad]
    adamw = torch.optim.AdamW(trained, 0.02, (0.8, 0.999), weight_decay=0)
    for i in range(4):
        for model, each in ((ours, optimizer), (theirs, adamw)):
            each.zero_grad()
            square_loss(model(batch(i)) - 1).backward()
            each.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


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
    optimizer = KFACOptimizer([param], **OPTIONS)
    param.abs().sum().backward()
    with (
        pytest.warns(UserWarning, match="nothing is preconditioned"),
        pytest.raises(RuntimeError, match=r"is complex, and SelectedUpdates takes real ones"),
    ):
        optimizer.step()


def test_adapt_damping_is_refused() -> None:
    with pytest.raises(ValueError, match=r"have one length at every damping\. Drop adapt_damping"):
        KFACOptimizer(mlp(), **OPTIONS, estimate=MonteCarlo(nn.MSELoss()), adapt_damping=LevenbergMarquardt())


@pytest.mark.parametrize("skipped", [(), ("3",)])
def test_a_model_in_float16_trains_as_in_float32(skipped: tuple[str, ...]) -> None:
    """Squares of its gradients vanish there, as those of AdamW would: the update is not divided by nothing."""

    def losses(dtype: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10)).to(dtype)
        x, y = torch.randn(64, 16).to(dtype), torch.randint(10, (64,))
        optimizer = KFACOptimizer(model, **OPTIONS | {"lr": 0.003}, skip_layers=skipped)
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found)

    torch.testing.assert_close(losses(torch.float16), losses(torch.float32), rtol=0.1, atol=0.1)


class InTurn(nn.Module):
    """A trunk, and five heads of which each step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(5))

    def forward(self, x: Tensor, number: int) -> Tensor:
        chosen: Tensor = self.heads[number](self.trunk(x).tanh())
        return chosen


def test_layers_that_are_used_in_turn_are_compared_at_their_own_steps() -> None:
    torch.manual_seed(0)
    model = InTurn()
    optimizer = KFACOptimizer(model, lr=0.01, momentum=0.9, step_size=SelectedUpdates(), factor_update_period=1)
    for step in range(30):
        optimizer.zero_grad()
        model(torch.randn(16, 6), step % 5).square().mean().backward()
        optimizer.step()
    assert all(optimizer.state[head.weight][PREFERENCE] != 0 for head in model.heads)


def test_a_norm_layer_over_several_dimensions_takes_the_step_of_adamw() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Unflatten(1, (4, 4)), nn.LayerNorm((4, 4)))
    optimizer = KFACOptimizer(model, lr=0.01, momentum=0.9, step_size=SelectedUpdates())
    model(torch.randn(8, 4)).square().sum((1, 2)).mean().backward()
    optimizer.step()
    assert {"exp_avg_sq", "step"} <= optimizer.state[model[2].weight].keys()


def test_momentum_that_sgd_has_gone_on_with_is_no_mean() -> None:
    model = mlp()
    other = partial(KFACOptimizer, model, lr=0.0, momentum=0.9, inverse=InverseAndRoot())
    steps = [other(step_size=SelectedUpdates()), other(), other(step_size=SelectedUpdates())]
    for optimizer, after in pairwise(steps):
        train(model, optimizer, 1)
        after.load_state_dict(optimizer.state_dict())
        optimizer.remove_hooks()
    train(model, steps[-1], 1)  # the rate is zero, and so all gradients are equal
    for param in model.parameters():
        torch.testing.assert_close(steps[-1].state[param]["momentum_buffer"], 0.1 * param.grad)
