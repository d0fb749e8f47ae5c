"""The curvature of the loss along directions, against the dense Gauss-Newton matrix; and no trace in training."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfac_optim import KFACOptimizer, MonteCarlo, QuadraticModel
from kfac_optim.fisher.estimates import NamedLoss
from kfac_optim.fisher.named_losses import likelihood_of
from kfac_optim.fisher.objective import Objective

pytestmark = pytest.mark.usefixtures("float64")


def mlp(outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.variance = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.mean(hidden), F.softplus(self.variance(hidden)) + 0.1


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.attention, self.head, self.fused = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3), fused

    def forward(self, x: Tensor) -> Tensor:
        mixed = (
            F.scaled_dot_product_attention(x, x, x) if self.fused else self.attention(x, x, x, need_weights=False)[0]
        )
        return self.head(mixed).mean(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def labels(n: int, classes: int) -> Tensor:
    return torch.arange(n) % classes


Case = tuple[Callable[[], nn.Module], nn.Module, dict[str, Any], Callable[[nn.Module, nn.Module], Tensor], float]


def cross_entropy(model: nn.Module, criterion: nn.Module) -> Tensor:
    output = model(inputs(6, 3))
    return criterion(output, labels(6, output.shape[-1]))


# model, loss, options of the estimate, training loss, and what the sum of the terms is divided by
CASES: dict[str, Case] = {
    "cross entropy": (mlp, nn.CrossEntropyLoss(), {}, cross_entropy, 6),
    "cross entropy, sum": (mlp, nn.CrossEntropyLoss(reduction="sum"), {}, cross_entropy, 1),
    "label smoothing": (mlp, nn.CrossEntropyLoss(label_smoothing=0.2), {}, cross_entropy, 6),
    "squares": (mlp, nn.MSELoss(), {}, lambda m, c: c(m(inputs(6, 3)), inputs(6, 4)), 24),
    "bits": (mlp, nn.BCEWithLogitsLoss(), {}, lambda m, c: c(m(inputs(6, 3)), (inputs(6, 4) > 0).double()), 24),
    "variance": (
        TwoOutputs,
        nn.GaussianNLLLoss(),
        {},
        lambda m, c: (lambda o: c(o[0], inputs(6, 2), o[1]))(m(inputs(6, 3))),
        12,
    ),
    "positions": (
        mlp,
        nn.CrossEntropyLoss(),
        {"class_dim": -1},
        lambda m, c: c(m(inputs(2, 3, 3)).flatten(0, 1), labels(6, 4)),
        6,
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)),
        nn.CrossEntropyLoss(),
        {},
        cross_entropy,
        6,
    ),
    "attention": (
        lambda: Attention(fused=False),
        nn.CrossEntropyLoss(),
        {},
        lambda m, c: c(m(inputs(6, 2, 4)), labels(6, 3)),
        6,
    ),
    "fused attention": (
        lambda: Attention(fused=True),
        nn.CrossEntropyLoss(),
        {},
        lambda m, c: c(m(inputs(6, 2, 4)), labels(6, 3)),
        6,
    ),
    "tied": (Tied, nn.CrossEntropyLoss(), {}, cross_entropy, 6),
    "two forwards": (
        mlp,
        nn.CrossEntropyLoss(),
        {},
        lambda m, c: (c(m(inputs(4, 3)), labels(4, 4)) * 4 + c(m(inputs(2, 3) + 1), labels(2, 4)) * 2) / 6,
        6,
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def dense(model: nn.Module, criterion: nn.Module, options: dict[str, Any], run: Callable[..., Any]) -> Tensor:
    """`Σ Jᵀ H J` over all forwards that `run` makes, by reverse-mode Jacobians and the columns of `B`."""
    likelihood = likelihood_of(criterion, options.get("class_dim"))
    calls: list[Tensor] = []
    handle = model.register_forward_pre_hook(lambda _, args: calls.append(args[0]))
    run(model, criterion)
    handle.remove()
    params = {name: param.detach() for name, param in model.named_parameters()}
    buffers = dict(model.named_buffers())
    total = None
    for x in calls:

        def outputs(p: dict[str, Tensor], x: Tensor = x) -> tuple[Tensor, ...]:
            state = {**p, **{name: buffer.clone() for name, buffer in buffers.items()}}
            result = torch.func.functional_call(copy.deepcopy(model), state, x)
            return result if isinstance(result, tuple) else (result,)

        at = tuple(o.detach() for o in outputs(params))
        with sdpa_kernel(SDPBackend.MATH):
            jacobians = torch.func.jacrev(outputs)(params)
        for columns in likelihood.columns(at):
            for place, column in enumerate(columns):
                if column is None:
                    continue
                rows = torch.cat([j.flatten(column.dim()) for j in jacobians[place].values()], dim=-1)
                for example in range(len(column)):  # a column of B is one of every example at once
                    vector = (column[example].unsqueeze(-1) * rows[example]).flatten(0, -2).sum(0)
                    total = torch.outer(vector, vector) + (0 if total is None else total)
    assert total is not None
    return total


def observed(model: nn.Module, criterion: nn.Module, **options: Any) -> tuple[KFACOptimizer, Objective]:
    optimizer = KFACOptimizer(model, lr=0.0, estimate=MonteCarlo(criterion, **options), step_size=QuadraticModel())
    assert optimizer._objective is not None
    return optimizer, optimizer._objective


def directions(model: nn.Module, k: int) -> list[dict[nn.Parameter, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{p: torch.randn(p.shape, generator=generator) for p in model.parameters()} for _ in range(k)]


@cases
def test_forms_are_those_of_the_dense_gauss_newton_matrix(case: Case) -> None:
    build, criterion, options, run, terms = case
    model = build()
    matrix = dense(model, criterion, options, run) / terms
    optimizer, objective = observed(model, criterion, **options)
    run(model, criterion).backward()
    params = [param for param in model.parameters() if param.grad is not None]
    flat = [torch.cat([d[param].flatten() for param in model.parameters()]) for d in directions(model, 2)]
    used = torch.cat([torch.full_like(p, float(p.grad is not None)).flatten() for p in model.parameters()])
    stacked = torch.stack(flat) * used
    ways = [{param: d[param] for param in params} for d in directions(model, 2)]
    forms = objective.curvature({param: param.detach() for param in params}, ways, optimizer._window.close())
    torch.testing.assert_close(forms, stacked @ matrix @ stacked.T, rtol=1e-9, atol=1e-12)


def test_sums_over_a_narrow_dtype_are_wide() -> None:
    """Of 257 examples with the curvature 2 each bfloat16 would make 512."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer, objective = observed(model, nn.MSELoss(reduction="sum"))
    model(torch.ones(257, 1, dtype=torch.bfloat16)).square().sum().backward()
    way = {model.weight: torch.ones_like(model.weight)}
    form = objective.curvature({model.weight: model.weight.detach()}, [way], optimizer._window.close())
    assert form.tolist() == [[514.0]]


def test_ignored_targets_have_no_curvature() -> None:
    model = mlp()
    targets = torch.tensor([0, 1, -100, 3, -100, 1])
    optimizer, objective = observed(model, nn.CrossEntropyLoss())
    F.cross_entropy(model(inputs(6, 3)), targets).backward()
    optimizer.set_loss_terms(4)
    [way] = directions(model, 1)
    form = objective.curvature({p: p.detach() for p in way}, [way], optimizer._window.close())

    def kept(m: nn.Module, c: nn.Module) -> Tensor:
        return c(m(inputs(6, 3)[targets >= 0]), targets[targets >= 0])

    matrix = dense(model, nn.CrossEntropyLoss(), {}, kept) / 4
    flat = torch.cat([part.flatten() for part in way.values()])
    torch.testing.assert_close(form.squeeze(), flat @ matrix @ flat, rtol=1e-9, atol=0)


def test_dropout_draws_the_mask_that_training_drew() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 4))
    optimizer, objective = observed(model, nn.MSELoss())
    torch.manual_seed(7)
    hidden: list[Tensor] = []
    handle = model[1].register_forward_hook(lambda *call: hidden.append(call[2].detach()))
    F.mse_loss(model(inputs(6, 3)), inputs(6, 4)).backward()
    handle.remove()
    before = torch.get_rng_state()
    way = {model[2].weight: torch.ones_like(model[2].weight)}
    form = objective.curvature({p: p.detach() for p in model.parameters()}, [way], optimizer._window.close())
    pushed = hidden[0] @ torch.ones(5, 4)
    assert float(form) == pytest.approx(float(2 * pushed.square().sum() / 24), rel=1e-12)
    assert torch.equal(torch.get_rng_state(), before)


def test_buffers_gradients_and_statistics_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    optimizer, objective = observed(model, nn.CrossEntropyLoss())
    cross_entropy(model, nn.CrossEntropyLoss()).backward()
    count = optimizer._window.close()
    buffers = [buffer.clone() for buffer in model.buffers()]
    grads = [param.grad.clone() for param in model.parameters()]
    pending = [block.state.has_pending() for block in optimizer._binding.coverage.blocks]
    objective.curvature({p: p.detach() for p in model.parameters()}, directions(model, 2), count)
    assert all(torch.equal(old, new) for old, new in zip(buffers, model.buffers(), strict=True))
    assert all(torch.equal(old, param.grad) for old, param in zip(grads, model.parameters(), strict=True))
    assert pending == [block.state.has_pending() for block in optimizer._binding.coverage.blocks]
    assert all(param.requires_grad and param.is_leaf for param in model.parameters())


def test_a_forward_whose_gradients_were_thrown_away_is_forgotten_and_one_without_a_backward_never_kept() -> None:
    model = mlp()
    optimizer, objective = observed(model, nn.CrossEntropyLoss())
    model(inputs(3, 3))
    with torch.no_grad():
        model(inputs(5, 3))
    x = inputs(5, 3).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)  # goes into no parameter's gradient
    other = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    torch.func.functional_call(model, other, (inputs(5, 3),)).sum().backward()
    assert objective._recorder.kept == []
    cross_entropy(model, nn.CrossEntropyLoss()).backward()
    assert len(objective._recorder.kept) == 1
    optimizer.zero_grad()
    assert objective._recorder.kept == []
    output = model(inputs(6, 3))
    optimizer.zero_grad()  # between forward and backward
    F.cross_entropy(output, labels(6, 4)).backward(retain_graph=True)
    F.cross_entropy(output, labels(6, 4)).backward()
    assert len(objective._recorder.kept) == 1
    optimizer.step()
    assert objective._recorder.kept == []


def test_a_layer_without_a_forward_mode_derivative_is_told_of() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    class Opaque(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Doubled.apply(super().forward(x))

    model = Opaque(3, 4)
    optimizer, _ = observed(model, nn.CrossEntropyLoss())
    F.cross_entropy(model(inputs(6, 3)), labels(6, 4)).backward()
    with pytest.raises(RuntimeError, match=r"(?s)asked of Opaque by torch.func.jvp.*do without QuadraticModel"):
        optimizer.step()


def test_a_layer_that_has_such_a_derivative_in_contiguous_memory_alone_is_told_of() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 4))
    model.to(memory_format=torch.channels_last)
    optimizer, _ = observed(model, nn.CrossEntropyLoss())
    F.cross_entropy(model(inputs(6, 2, 4, 4)), labels(6, 4)).backward()
    with pytest.raises(RuntimeError, match=r"(?s)asked of Sequential.*model.to\(memory_format=torch.contiguous_format"):
        optimizer.step()
    model.to(memory_format=torch.contiguous_format)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs(6, 2, 4, 4)), labels(6, 4)).backward()
    optimizer.step()


def test_half_precision_inputs_of_a_forward_under_autocast_are_those_of_the_forward_that_is_run_again() -> None:
    model, x = mlp().float(), inputs(6, 3).bfloat16()
    matrix = dense(model, nn.CrossEntropyLoss(), {}, lambda m, c: c(m(x.float()), labels(6, 4))) / 6
    optimizer, objective = observed(model, nn.CrossEntropyLoss())
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), labels(6, 4))
    loss.backward()
    [way] = [{param: part.float() for param, part in each.items()} for each in directions(model, 1)]
    form = objective.curvature({p: p.detach() for p in way}, [way], optimizer._window.close())
    flat = torch.cat([part.flatten() for part in way.values()])
    torch.testing.assert_close(form.squeeze(), flat @ matrix @ flat, rtol=1e-5, atol=0)


def test_hooks_that_change_the_inputs_of_the_model_run_once() -> None:
    model = mlp()
    matrix = dense(model, nn.CrossEntropyLoss(), {}, lambda m, c: c(m(inputs(6, 3) * 3), labels(6, 4))) / 6
    model.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
    optimizer, objective = observed(model, nn.CrossEntropyLoss())
    cross_entropy(model, nn.CrossEntropyLoss()).backward()
    [way] = directions(model, 1)
    form = objective.curvature({p: p.detach() for p in way}, [way], optimizer._window.close())
    flat = torch.cat([part.flatten() for part in way.values()])
    torch.testing.assert_close(form.squeeze(), flat @ matrix @ flat, rtol=1e-9, atol=0)


@pytest.mark.parametrize("by_criterion", [True, False])
def test_a_model_that_changes_its_input_in_place_is_refused_and_not_run_again(by_criterion: bool) -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(1.0))

    model, criterion, x = Centred(3, 4), nn.CrossEntropyLoss(), inputs(6, 3)
    optimizer, _ = observed(model, criterion)
    (criterion if by_criterion else nn.CrossEntropyLoss())(model(x), labels(6, 4)).backward()
    before = [each.detach().clone() for each in (x, *model.parameters())]
    with pytest.raises(RuntimeError, match=r"asked of Centred.*shape \[6, 3\] was changed in place.*x = x - mean"):
        optimizer.step()
    assert all(map(torch.equal, before, (x, *model.parameters())))


def test_a_model_on_its_own_output_is_refused_where_no_criterion_tells_what_is_read() -> None:
    model = mlp(3)
    optimizer, _ = observed(model, nn.MSELoss())
    F.mse_loss(model(model(inputs(6, 3))), inputs(6, 3)).backward()
    with pytest.raises(RuntimeError, match=r"Sequential was called with something.*call that very object"):
        optimizer.step()


def test_without_a_forward_of_the_model_the_curvature_is_refused_before_anything_changes() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=1.0, estimate=MonteCarlo(nn.CrossEntropyLoss()), step_size=QuadraticModel())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="no forward of the model with a backward was seen"):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before.values(), model.state_dict().values(), strict=True))


def test_what_is_refused_keeps_its_gradients_as_the_scaler_left_them() -> None:
    model = nn.Sequential(mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = KFACOptimizer(model, lr=1.0, estimate=MonteCarlo(nn.CrossEntropyLoss()), step_size=QuadraticModel())
    optimizer.set_loss_terms(8)
    scaler.scale(cross_entropy(model[0], nn.CrossEntropyLoss())).backward()
    before = [param.grad.clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="no forward of the model with a backward was seen"):
        scaler.step(optimizer)
    assert all(torch.equal(old / 8, param.grad) for old, param in zip(before, model.parameters(), strict=True))


def test_parameters_outside_the_model_are_refused() -> None:
    model, other = mlp(), nn.Parameter(torch.ones(()))
    optimizer = KFACOptimizer(
        [{"params": list(model.parameters())}, {"params": [other]}],
        model=model,
        estimate=MonteCarlo(nn.CrossEntropyLoss()),
        step_size=QuadraticModel(),
    )
    (cross_entropy(model, nn.CrossEntropyLoss()) * other).backward()
    with pytest.raises(RuntimeError, match="belong to more than one model, or not to Sequential"):
        optimizer.step()


def test_the_estimate_that_keeps_forwards_is_one_that_names_the_loss() -> None:
    assert isinstance(MonteCarlo(nn.MSELoss()), NamedLoss)
    with pytest.raises(TypeError, match=r"QuadraticModel\(\) needs the curvature of the loss"):
        KFACOptimizer(mlp(), step_size=QuadraticModel())
