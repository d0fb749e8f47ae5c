"""Selected updates: against both updates and the choice written out in float64, and where they are refused."""

import copy
from typing import Any

import pytest
import torch
from helpers.plain import batch, mlp, square_loss, train
from helpers.states import assert_resumes_bitwise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import (
    BlockDiagonal,
    Cholesky,
    InverseAndRoot,
    KFACOptimizer,
    OrthogonalUpdates,
    SelectedUpdates,
    Structure,
)
from kfac_optim.blocks.state_keys import PREFERENCE
from kfac_optim.linalg.orthogonal import orthogonalised
from kfac_optim.step import selected_updates

pytestmark = pytest.mark.usefixtures("float64")

OPTIONS: dict[str, Any] = {"lr": 0.02, "momentum": 0.8, "factor_update_period": 1, "step_size": SelectedUpdates()}


def power(factor: Tensor, exponent: float) -> Tensor:
    values, basis = torch.linalg.eigh(factor + 0.1 * factor.diagonal().mean() * torch.eye(len(factor)))
    return basis @ torch.diag(values**exponent) @ basis.T


def updates(mean: Tensor, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    orthogonal = orthogonalised((mean @ power(a, -0.5))[None])[0] * 0.2 * max(mean.shape) ** 0.5
    natural = power(g, -1) @ mean @ power(a, -1)
    return orthogonal, 0.2 * natural / natural.square().mean().sqrt()


def gradient(layer: nn.Module) -> Tensor:
    return torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)


@settings(deadline=None, max_examples=8)
@given(nesterov=st.booleans(), maximize=st.booleans(), decay=st.sampled_from([0.0, 0.3]))
def test_each_layer_goes_by_the_update_that_the_next_gradients_found_steeper(
    nesterov: bool, maximize: bool, decay: float
) -> None:
    ours, theirs = mlp(), mlp()
    numbers = {"nesterov": nesterov, "weight_decay": decay, "maximize": maximize, "inverse_update_period": 1}
    optimizer = KFACOptimizer(ours, **OPTIONS, **numbers)
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
            new = gradient(layer)
            if name in means and (step < 5 or step % 5 == 0):
                slopes = [float((new * update).sum()) for update in updates(means[name], a[0], g[0])]
                preference[name] += 0.2 * ((slopes[1] - slopes[0]) / sum(map(abs, slopes)) - preference[name])
            means[name] = 0.8 * means.get(name, torch.zeros_like(new)) + 0.2 * new
            ahead = 0.8 * means[name] + 0.2 * new if nesterov else means[name]
            natural = preference[name] > 0
            chosen.add(natural)
            update = updates(ahead, a[0], g[0])[natural] * (-1 if maximize else 1)
            held = optimizer.state[ours.get_submodule(name).weight].get(PREFERENCE, torch.zeros(()))
            torch.testing.assert_close(held.double(), torch.tensor(preference[name]), rtol=0, atol=1e-6)
            with torch.no_grad():
                for param, part in ((layer.weight, update[:, :-1]), (layer.bias, update[:, -1])):
                    param.mul_(1 - 0.02 * decay).sub_(0.02 * part)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_a_layer_that_prefers_neither_takes_the_orthogonal_update() -> None:
    models = mlp(), mlp()
    choices = SelectedUpdates(), OrthogonalUpdates()
    for model, step_size in zip(models, choices, strict=True):
        optimizer = KFACOptimizer(model, **{**OPTIONS, "step_size": step_size})
        square_loss(model(batch())).backward()
        optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


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
    after = (model.state_dict(), [dict(optimizer.state[param]) for param in model.parameters()])
    assert str(before[1][0][PREFERENCE]) == str(after[1][0][PREFERENCE])
    for old, new in zip(before[0].values(), after[0].values(), strict=True):
        assert torch.equal(old, new)


def test_metrics_tell_how_many_layers_prefer_the_natural_gradient() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **OPTIONS)
    assert "natural_updates" not in optimizer.metrics()
    train(model, optimizer, 9)
    preferences = [optimizer.state[layer.weight][PREFERENCE] > 0 for layer in (model[0], model[2])]
    assert optimizer.metrics()["natural_updates"] == sum(preferences) / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 0.0}, r"has to be above 0, got momentum=0\.0 in param group 0. Pass momentum=0\.9"),
        ({"dampening": 0.1}, "needs momentum below 1 and dampening 0"),
    ],
)
def test_numbers_that_leave_nothing_to_compare_are_refused(options: dict[str, float], message: str) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, **{**OPTIONS, **options})
    square_loss(model(batch())).backward()
    with pytest.raises(ValueError, match=message):
        optimizer.step()


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
    for step_size, inverse in (
        (SelectedUpdates(), "InverseAndRoot(damping=0.1, rank=32, sketch=64)"),
        (OrthogonalUpdates(), "InverseRoot(damping=0.1, rank=32, sketch=64)"),
    ):
        assert KFACOptimizer(mlp(), step_size=step_size).summary().blocks[0].inverse == inverse
