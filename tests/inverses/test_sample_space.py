"""`SampleSpace` against dense Gauss-Newton solves; covers inverses/sample_space.py and sample_rows.py."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.oracles import assert_same
from helpers.plain import clones
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacfwd, jacrev, vmap
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from kfac_optim import Cholesky, ExactGGN, KFACOptimizer, LineSearch, LossTerms, MonteCarlo, SampleSpace, Structure
from kfac_optim.factors.example_rows import ExampleRows
from kfac_optim.inverses.sample_rows import SampleRows
from kfac_optim.specs import BlockDiagonal

Residual = Callable[[nn.Module, Tensor], Tensor]

# torch's own, of torch.jit, at the first forward-mode derivative of a process
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def network(seed: int = 0, sizes: tuple[int, ...] = (2, 6, 4, 1)) -> nn.Sequential:
    torch.manual_seed(seed)
    pairs = [(nn.Linear(*each), nn.Tanh()) for each in itertools.pairwise(sizes)]
    return nn.Sequential(*[part for pair in pairs for part in pair][:-1]).double()


def points(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def nested(model: nn.Module, x: Tensor) -> Tensor:
    """The Laplacian, by `torch.autograd.grad`."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    parts = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
    return torch.stack(parts).sum(0)


def by_transform(outer: Any, inner: Any) -> Residual:
    def laplacian(model: nn.Module, x: Tensor) -> Tensor:
        params = dict(model.named_parameters())
        return vmap(lambda one: outer(inner(lambda z: functional_call(model, params, (z,)).squeeze()))(one).trace())(x)

    return laplacian


STYLES = {
    "nested": nested,
    "hessian": lambda model, x: by_transform(jacfwd, jacrev)(model, x),
    "reverse": by_transform(jacrev, jacrev),
    "forward": by_transform(jacfwd, jacfwd),
}


def rows(model: nn.Module, x: Tensor, xb: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """`ρ` and `s` of `mean((Δu + 1)²) + weight mean((u - 1/2)²)`, parameter by parameter in the model's order."""
    params = {name: param.detach() for name, param in model.named_parameters()}

    def inside(params: dict[str, Tensor], one: Tensor) -> Tensor:
        return hessian(lambda z: functional_call(model, params, (z,)).squeeze())(one).trace() + 1

    def boundary(params: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, params, (one,)).squeeze() - 0.5

    parts = []
    for residual, at, scale in ((inside, x, 1.0), (boundary, xb, weight)):
        root = (2 * scale / len(at)) ** 0.5
        jacobian = vmap(jacrev(residual), in_dims=(None, 0))(params, at)
        flat = torch.cat([jacobian[name].reshape(len(at), -1) for name in params], 1)
        parts.append((root * flat, root * vmap(residual, in_dims=(None, 0))(params, at)))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def optimizer_of(model: nn.Module, criterion: nn.Module, **options: Any) -> KFACOptimizer:
    inverse = options.pop("inverse", SampleSpace())
    return KFACOptimizer(model, lr=1.0, inverse=inverse, estimate=ExactGGN(criterion), **options)


def step(model: nn.Module, optimizer: Any, criterion: nn.Module, residual: Residual = nested) -> Tensor:
    """Take a step of the problem of `rows`, and return the direction of all parameters."""
    before = clones(model.parameters())
    optimizer.zero_grad()
    inside = residual(model, points(7)) + 1
    loss = criterion(inside, torch.zeros_like(inside))
    (loss + 3 * criterion(model(points(5, 2)), torch.full((5, 1), 0.5, dtype=torch.float64))).backward()
    optimizer.step()
    return torch.cat([(old - new).flatten() for old, new in zip(before, model.parameters(), strict=True)]).detach()


def dense(rho: Tensor, s: Tensor, damping: float) -> Tensor:
    """`(ρᵀρ + λI)⁻¹ρᵀs`, in extended precision."""
    wide, right = rho.numpy().astype(np.longdouble), s.numpy().astype(np.longdouble)
    gram = wide @ wide.T + np.longdouble(damping) * np.eye(len(wide), dtype=np.longdouble)
    # Cholesky by hand: numpy's own knows no extended precision.
    lower = np.zeros_like(gram)
    for j in range(len(gram)):
        lower[j, j] = np.sqrt(gram[j, j] - lower[j, :j] @ lower[j, :j])
        lower[j + 1 :, j] = (gram[j + 1 :, j] - lower[j + 1 :, :j] @ lower[j, :j]) / lower[j, j]
    for j in range(len(gram)):
        right[j] = (right[j] - lower[j, :j] @ right[:j]) / lower[j, j]
    for j in reversed(range(len(gram))):
        right[j] = (right[j] - lower[j + 1 :, j] @ right[j + 1 :]) / lower[j, j]
    return torch.from_numpy((wide.T @ right).astype(np.float64))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("relative", [1e-3, 1e-6, 1e-10])
def test_a_step_is_the_dense_gauss_newton_step(style: str, relative: float) -> None:
    model, criterion = network(), nn.MSELoss()
    rho, s = rows(model, points(7), points(5, 2), 3)
    largest = float(torch.linalg.matrix_norm(rho, 2)) ** 2
    expected = dense(rho, s, relative * largest)
    found = step(model, optimizer_of(model, criterion, damping=relative * largest), criterion, STYLES[style])
    tolerance = 1e-10 if relative >= 1e-6 else 100 * torch.finfo(torch.float64).eps / relative
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("options", [{"dense_limit": 1}, {"sizes": (2, 2, 1)}])
def test_conjugate_gradients_and_least_squares_take_the_same_step(options: dict[str, Any]) -> None:
    sizes = options.pop("sizes", (2, 6, 4, 1))
    model, criterion = network(sizes=sizes), nn.MSELoss()
    rho, s = rows(model, points(7), points(5, 2), 3)
    damping = 1e-4 * float(torch.linalg.matrix_norm(rho, 2)) ** 2
    inverse = SampleSpace(**options)
    found = step(model, optimizer_of(model, criterion, damping=damping, inverse=inverse), criterion)
    assert_same(found, dense(rho, s, damping), rtol=1e-6 if options else 1e-10)


def test_few_parameters_of_very_different_scales_are_all_fitted_in_one_step() -> None:
    """By QR of the rows; their products with each other would lose the small feature in rounding."""
    torch.manual_seed(0)
    model, wanted, criterion = (nn.Linear(2, 1).double(), nn.Linear(2, 1).double(), nn.MSELoss())
    x = points(8) * torch.tensor([1.0, 1e-7], dtype=torch.float64)
    optimizer = optimizer_of(model, criterion, damping=1e-30)
    criterion(model(x), wanted(x).detach()).backward()
    optimizer.step()
    assert_same(model.weight, wanted.weight, rtol=1e-6)


def test_by_layer_each_solves_for_all_residuals_by_itself() -> None:
    model, criterion = network(), nn.MSELoss()
    rho, s = rows(model, points(7), points(5, 2), 3)
    sizes = [sum(param.numel() for param in layer.parameters()) for layer in model if isinstance(layer, nn.Linear)]
    expected = torch.cat([dense(part, s, 1e-3) for part in torch.split(rho, sizes, 1)])
    inverse = SampleSpace(scope="layer")
    assert_same(step(model, optimizer_of(model, criterion, damping=1e-3, inverse=inverse), criterion), expected)


def test_momentum_is_that_of_spring_and_goes_through_checkpoints() -> None:
    model, criterion = network(), nn.MSELoss()
    optimizer = optimizer_of(model, criterion, damping=1e-3, inverse=SampleSpace(momentum=0.7))
    before = torch.zeros(sum(param.numel() for param in model.parameters()), dtype=torch.float64)
    for _ in range(3):
        rho, s = rows(model, points(7), points(5, 2), 3)
        expected = 0.7 * before + dense(rho, s - 0.7 * rho @ before, 1e-3)
        twin = network()
        twin.load_state_dict(model.state_dict())
        other = optimizer_of(twin, criterion, damping=1e-3, inverse=SampleSpace(momentum=0.7))
        other.load_state_dict(optimizer.state_dict())
        before = step(model, optimizer, criterion)
        assert_same(before, expected)
        assert torch.equal(step(twin, other, criterion), before)


def test_centred_rows_are_those_less_their_mean_by_term() -> None:
    model, criterion = network(), nn.MSELoss()
    rho, s = rows(model, points(7), points(5, 2), 3)
    mean = [
        (part - part.mean(0), right - right.mean())
        for part, right in zip(rho.split([7, 5]), s.split([7, 5]), strict=True)
    ]
    rho, s = torch.cat([each[0] for each in mean]), torch.cat([each[1] for each in mean])
    optimizer = optimizer_of(model, criterion, damping=1e-3, inverse=SampleSpace(centred=True))
    before = clones(model.parameters())
    optimizer.zero_grad()
    inside = nested(model, points(7)) + 1
    boundary = model(points(5, 2)) - 0.5
    # The loss has the gradient `ρᵀs` of centred rows where its own residuals are centred.
    loss = criterion(inside - inside.mean().detach(), torch.zeros_like(inside))
    (loss + 3 * criterion(boundary - boundary.mean().detach(), torch.zeros_like(boundary))).backward()
    optimizer.step()
    found = torch.cat([(old - new).flatten() for old, new in zip(before, model.parameters(), strict=True)])
    assert_same(found, dense(rho, s, 1e-3), rtol=1e-8)


def test_centred_rows_of_layers_that_are_too_wide_to_form_them() -> None:
    """Products of pairs of examples are then made of inputs and output gradients."""
    model, criterion, x = network(sizes=(2, 40, 40, 1)), nn.MSELoss(), points(4)
    params = {name: param.detach() for name, param in model.named_parameters()}
    by_param = jacrev(lambda p: functional_call(model, p, (x,)))(params).values()
    jacobian = torch.cat([each.flatten(2)[:, 0] for each in by_param], 1)
    output = model(x).detach().flatten()
    rho, s = (0.5**0.5 * (each - each.mean(0)) for each in (jacobian, output))
    optimizer = optimizer_of(model, criterion, damping=1e-3, inverse=SampleSpace(centred=True))
    zeros = torch.zeros(4, 1, dtype=torch.float64)
    found = flat_step(model, optimizer, lambda: criterion(model(x) - output.mean(), zeros))
    assert_same(found, dense(rho, s, 1e-3), rtol=1e-8)


def test_weight_decay_of_the_curvature_and_clipping_are_followed() -> None:
    model, criterion = network(), nn.MSELoss()
    theta = torch.cat([param.detach().flatten() for param in model.parameters()])
    rho, s = rows(model, points(7), points(5, 2), 3)
    curvature = rho.mT @ rho + 0.3 * torch.eye(len(theta), dtype=torch.float64)
    expected = torch.linalg.solve(curvature, rho.mT @ s + 0.2 * theta)
    optimizer = optimizer_of(model, criterion, damping=0.1, weight_decay=0.2, l2_in_curvature=True)
    assert_same(step(model, optimizer, criterion), expected, rtol=1e-9)

    model = network()
    optimizer = optimizer_of(model, criterion, damping=0.1)
    norm = float((rho.mT @ s).norm())
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), norm / 2) and None)
    assert_same(step(model, optimizer, criterion), dense(rho, s, 0.1) * norm / 2 / (norm + 1e-6), rtol=1e-8)


def test_groups_may_have_dampings_of_their_own() -> None:
    model, criterion = network(), nn.MSELoss()
    groups = [
        {"params": model[0].parameters(), "damping": 0.2},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    optimizer = KFACOptimizer(
        groups, model=model, lr=1.0, damping=0.01, inverse=SampleSpace(), estimate=ExactGGN(criterion)
    )
    rho, s = rows(model, points(7), points(5, 2), 3)
    own = torch.full((rho.shape[1],), 0.01, dtype=torch.float64)
    own[: sum(param.numel() for param in model[0].parameters())] = 0.2
    assert_same(step(model, optimizer, criterion), torch.linalg.solve(rho.mT @ rho + own.diag(), rho.mT @ s))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(2, 4), st.sampled_from(["squares", "classes", "bits"]), st.booleans())
def test_ordinary_losses_have_residuals_too(examples: int, outputs: int, kind: str, pairs: bool) -> None:
    """The rows of cross-entropies are those of a root of the Hessian, whatever way `ρρᵀ` is made."""
    model = network(sizes=(2, 12 if pairs else 3, outputs))
    generator = torch.Generator().manual_seed(examples)
    x = points(examples)
    criterion: nn.Module
    if kind == "classes":
        criterion, target = nn.CrossEntropyLoss(), torch.randint(outputs, (examples,), generator=generator)
    else:
        criterion = nn.MSELoss() if kind == "squares" else nn.BCEWithLogitsLoss()
        target = torch.rand(examples, outputs, dtype=torch.float64, generator=generator)
    params = {name: param.detach() for name, param in model.named_parameters()}
    jacobian = torch.cat(
        [each.flatten(2) for each in jacrev(lambda p: functional_call(model, p, (x,)))(params).values()], 2
    )
    jacobian = jacobian.flatten(0, 1)
    output = model(x).detach()
    curvature = hessian(lambda out: criterion(out, target))(output).reshape(examples * outputs, examples * outputs)
    gradient = jacobian.mT @ jacrev(lambda out: criterion(out, target))(output).flatten()
    expected = torch.linalg.solve(
        jacobian.mT @ curvature @ jacobian + 0.05 * torch.eye(len(gradient), dtype=torch.float64), gradient
    )
    optimizer = optimizer_of(model, criterion, damping=0.05)
    before = clones(model.parameters())
    criterion(model(x), target).backward()
    optimizer.step()
    found = torch.cat([(old - new).flatten() for old, new in zip(before, model.parameters(), strict=True)])
    assert_same(found, expected, rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_the_step_is_that_of_float32_up_to_rounding(dtype: torch.dtype) -> None:
    found = []
    for enabled in (False, True):
        model, criterion = network(sizes=(2, 16, 1)).float(), nn.MSELoss()
        optimizer = optimizer_of(model, criterion, damping=1e-8)
        before, x = clones(model.parameters()), points(4).float()
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            loss = criterion(model(x), torch.ones(4, 1))
        loss.backward()
        optimizer.step()
        found.append([old - new for old, new in zip(before, model.parameters(), strict=True)])
    assert_same(found[1], found[0], rtol=64 * torch.finfo(dtype).eps)


def test_under_autocast_weight_decay_in_the_curvature_is_no_rounding() -> None:
    """It is a tenth of the gradient, which many examples make small beside the rows that it is the sum of."""
    found = []
    for enabled in (False, True):
        model, criterion = network(sizes=(2, 16, 1)).float(), nn.MSELoss()
        optimizer = optimizer_of(model, criterion, damping=1.0, weight_decay=0.05, l2_in_curvature=True)
        before, x = clones(model.parameters()), points(256).float()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = criterion(model(x), x[:, :1].sin())
        loss.backward()
        optimizer.step()
        found.append(torch.cat([(old - new).flatten() for old, new in zip(before, model.parameters(), strict=True)]))
    assert (found[1] - found[0]).norm() < 0.02 * found[0].norm()


class PartlyNarrow(nn.Module):
    """A layer in float32, and two behind it that may be under autocast."""

    def __init__(self, *, narrow: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(2, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.narrow = narrow

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.narrow):
            return self.last(self.second(hidden).tanh()).float()


@pytest.mark.parametrize(
    "inverse",
    [
        SampleSpace(scope="layer"),
        {"first": SampleSpace(), "*": Cholesky()},
        {"first": SampleSpace(), "*": SampleSpace(momentum=0.1)},
    ],
    ids=["by layer", "beside others", "of other settings"],
)
def test_rounding_of_narrow_layers_behind_one_is_no_penalty(inverse: Any) -> None:
    x, criterion = points(32).float(), nn.MSELoss()

    def moved(*, narrow: bool) -> Tensor:
        torch.manual_seed(0)
        model = PartlyNarrow(narrow=narrow)
        optimizer = optimizer_of(model, criterion, damping=1e-6, inverse=inverse)
        return flat_step(model, optimizer, lambda: criterion(model(x), x[:, :1].sin())).detach()[:32]

    exact = moved(narrow=False)
    assert float((moved(narrow=True) - exact).norm()) < 0.3 * float(exact.norm())


def test_rounding_behind_a_layer_that_is_not_captured_is_named_where_residuals_are_missing() -> None:
    torch.manual_seed(0)
    model, criterion, x = PartlyNarrow(narrow=True), nn.MSELoss(), points(32).float()
    optimizer = optimizer_of(model, criterion, skip_layers=["second", "last"])
    criterion(model(x), x[:, :1].sin()).backward()
    with pytest.raises(RuntimeError, match=r"16 bits.*in skip_layers"):
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("scope", ["joint", "layer"])
def test_a_layer_that_no_residual_of_a_step_reaches_goes_along_its_penalty(scope: Any, momentum: float) -> None:
    torch.manual_seed(0)
    model, criterion = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)]).double(), nn.MSELoss()
    inverse = SampleSpace(momentum=momentum, scope=scope)
    optimizer = KFACOptimizer(model, lr=0.1, damping=0.01, inverse=inverse, estimate=ExactGGN(criterion))
    x, steps = points(6), []
    for used in (1, 0):
        optimizer.zero_grad()
        loss = criterion(model[used](x), torch.ones(6, 1).double())
        before, penalty = model[1].weight.detach().clone(), model[1].weight.square().sum()
        (loss if used else loss + 1e-3 * penalty).backward()
        optimizer.step()
        steps.append((before - model[1].weight.detach()) / 0.1)
    assert_same(steps[1], momentum * steps[0] + 2e-3 * before / 0.01)


def test_residuals_that_reach_layers_of_another_inverse_alone_are_named_in_the_refusal() -> None:
    model, criterion = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)]).double(), nn.MSELoss()
    optimizer = optimizer_of(model, criterion, inverse={"0": Cholesky(), "1": SampleSpace()})
    for used in (1, 0):
        optimizer.zero_grad()
        loss = criterion(model[used](points(6)), torch.ones(6, 1).double())
        (loss if used else loss + model[1].weight.square().sum()).backward()
        if used:
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"'1' has a gradient.*no residual .* reaches a layer of this SampleSpace"):
        optimizer.step()


def test_a_number_of_terms_that_is_none_is_refused_by_the_step_and_changes_nothing() -> None:
    """In a tensor, whose value is not waited for when it is stated."""
    model, criterion = network(), nn.MSELoss()
    optimizer = optimizer_of(model, criterion)
    before = clones(model.parameters())
    optimizer.set_loss_terms(torch.tensor(-4.0))
    with pytest.raises(RuntimeError, match="number that is not above 0 in what was passed to set_loss_terms"):
        step(model, optimizer, criterion)
    assert_same(clones(model.parameters()), before)


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        ({"momentum": 1.0}, ValueError, "momentum of SampleSpace"),
        ({"momentum": -0.1}, ValueError, "momentum of SampleSpace"),
        ({"centred": 1}, TypeError, "centred of SampleSpace"),
        ({"dense_limit": 0}, ValueError, "dense_limit of SampleSpace"),
        ({"dense_limit": 2.5}, TypeError, "dense_limit of SampleSpace"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(argument: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SampleSpace(**argument)


def test_what_it_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"SampleSpace.*ExactGGN\(criterion\)"):
        KFACOptimizer(network(), inverse=SampleSpace(), estimate=MonteCarlo(nn.MSELoss()))
    with pytest.raises(ValueError, match="scope of SampleSpace"):
        SampleSpace(scope="model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"keeps no factors.*Drop it"):
        optimizer_of(network(), nn.MSELoss(), structure=(BlockDiagonal(2), Structure.DENSE))
    criterion, model = nn.MSELoss(), nn.Sequential(weight_norm(nn.Linear(2, 1))).double()
    optimizer = optimizer_of(model, criterion)
    with pytest.raises(NotImplementedError, match=r"UsedWeightStatistics does not give them\. List the layer"):
        criterion(model(points(3)), torch.zeros(3, 1, dtype=torch.float64)).backward()
    model = network()
    optimizer = optimizer_of(model, nn.MSELoss(), loss_terms=LossTerms.ELEMENTS)
    nn.MSELoss()(model(points(3)), torch.zeros(3, 1, dtype=torch.float64)).backward()
    with pytest.raises(RuntimeError, match=r"not the residuals.*call that very object"):
        optimizer.step()


def flat_step(model: nn.Module, optimizer: Any, loss: Callable[[], Tensor | None]) -> Tensor:
    before = clones(model.parameters())
    optimizer.zero_grad()
    if (value := loss()) is not None:
        value.backward()
    optimizer.step()
    return torch.cat([(old - new).flatten() for old, new in zip(before, model.parameters(), strict=True)])


def of_squares(model: nn.Module, residuals: Callable[[Callable[[Tensor], Tensor]], Tensor], damping: float) -> Tensor:
    """The dense step of half the squares of some residuals, which are made of a function of inputs."""
    params = {name: param.detach() for name, param in model.named_parameters()}

    def of(params: dict[str, Tensor]) -> Tensor:
        return residuals(lambda x: functional_call(model, params, (x,)))

    jacobian = torch.cat([part.flatten(1) for part in jacrev(of)(params).values()], 1)
    return dense(jacobian, of(params), damping)


X, Y = points(12), torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
SOME = torch.tensor([1, 3, 4, 8, 10])


def in_slices(model: nn.Module, criterion: nn.Module) -> Tensor:
    output = model(X)
    return criterion(output[:6], Y[:6]) + 5 * criterion(output[6:], Y[6:])


def in_parts(model: nn.Module, criterion: nn.Module) -> None:
    for part in (X[:2], X[2:7], X[7:]):
        (criterion(model(part), Y[: len(part)]) * len(part) / 12).backward()


PARTS: dict[str, tuple[Callable[..., Tensor | None], Callable[..., Tensor]]] = {
    "slices of one forward": (
        in_slices,
        lambda f: torch.cat([(f(X)[:6] - Y[:6]).flatten(), 5**0.5 * (f(X)[6:] - Y[6:]).flatten()]) * (1 / 6) ** 0.5,
    ),
    "masked": (lambda m, c: c(m(X)[SOME], Y[SOME]), lambda f: 0.2**0.5 * (f(X)[SOME] - Y[SOME]).flatten()),
    "accumulated": (
        in_parts,
        lambda f: torch.cat([(f(p) - Y[: len(p)]).flatten() for p in (X[:2], X[2:7], X[7:])]) / 12**0.5,
    ),
    "logged as well": (
        lambda m, c: (lambda out: (c(out, Y), c(out, Y + 1))[0])(m(X)),
        lambda f: (f(X) - Y).flatten() / 12**0.5,
    ),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("dropped", [False, True])
def test_what_the_criterion_reads_of_a_batch_is_what_counts(name: str, dropped: bool) -> None:
    loss, residuals = PARTS[name]
    model, criterion = network(sizes=(2, 6, 2)), nn.MSELoss()
    optimizer = optimizer_of(model, criterion, damping=1e-3)
    if dropped:
        criterion(model(3 * X), Y).backward()
    expected = of_squares(model, residuals, 1e-3)
    assert_same(flat_step(model, optimizer, lambda: loss(model, criterion)), expected)


class Tied(nn.Module):
    """Looks rows of a matrix up, and multiplies by its transpose, perhaps once more within backward."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        return checkpoint(self.body, ids, use_reentrant=False) if self.checkpointed else self.body(ids)

    def body(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).tanh())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_of_a_matrix_that_is_used_from_both_sides_the_rows_of_both_count(checkpointed: bool) -> None:
    model, criterion, ids = Tied(checkpointed).double(), nn.MSELoss(), torch.arange(12) % 5
    expected = of_squares(Tied(False).double(), lambda f: f(ids).flatten() / 30**0.5, 1e-3)
    optimizer = optimizer_of(model, criterion, damping=1e-3)
    assert_same(flat_step(model, optimizer, lambda: criterion(model(ids), torch.zeros(12, 5).double())), expected)


def in_another_order(model: nn.Module, criterion: nn.Module) -> Tensor:
    return criterion(model(X.view(6, 2, 2)).transpose(0, 1), Y.view(6, 2, 2).transpose(0, 1))


def of_pairs(model: nn.Module, criterion: nn.Module) -> Tensor:
    output = model(X)
    return criterion(output - output.roll(1, 0), torch.zeros_like(output))


@pytest.mark.parametrize("loss", [in_another_order, of_pairs])
def test_examples_that_cannot_be_told_apart_are_refused(loss: Callable[..., Tensor]) -> None:
    model, criterion = network(sizes=(2, 6, 2)), nn.MSELoss()
    optimizer, before = optimizer_of(model, criterion), clones(model.parameters())
    loss(model, criterion).backward()
    with pytest.raises(RuntimeError, match="in the order in which the layer does, or examples interact"):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


class Mixing(nn.Module):
    """A layer that mixes the positions of an example, and a head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        inputs = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        return self.head(self.layer(*inputs)[0].mean(1))


@pytest.mark.parametrize("kind", [nn.GRU, nn.MultiheadAttention])
def test_layers_whose_rows_are_not_told_apart_by_examples_are_refused_with_what_to_do(kind: type[nn.Module]) -> None:
    x, target, criterion = torch.ones(12, 3, 4).double().cumsum(0).sin(), torch.zeros(12, 2).double(), nn.MSELoss()
    for skipped in ((), (kind,)):
        torch.manual_seed(0)
        layer = nn.GRU(4, 4, batch_first=True) if kind is nn.GRU else nn.MultiheadAttention(4, 2, batch_first=True)
        model = Mixing(layer).double()
        optimizer = optimizer_of(model, criterion, skip_layers=skipped)
        criterion(model(x), target).backward()
        if skipped:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match=f"nn.{kind.__name__}.*: list that one in skip_layers, or choose"):
                optimizer.step()


def test_conjugate_gradients_that_end_too_early_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfac_optim.inverses.sample_system._MOST_ITERATIONS", 2)
    model, criterion = network(), nn.MSELoss()
    optimizer = optimizer_of(model, criterion, damping=1e-6, inverse=SampleSpace(dense_limit=1))
    with pytest.warns(UserWarning, match=r"residual of 1e-08 in 2 iterations.*dense_limit, which is 1, to the number"):
        step(model, optimizer, criterion)


def test_one_conjugate_gradient_step_is_exact_where_the_curvature_is_one_kronecker_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kfac_optim.inverses.sample_system._MOST_ITERATIONS", 2)  # a warning, if it takes these
    model, criterion = network(sizes=(2, 1)), nn.MSELoss()
    optimizer = optimizer_of(model, criterion, damping=0.1, inverse=SampleSpace(dense_limit=1))
    expected = of_squares(model, lambda f: (f(X) - Y[:, :1]).flatten() * (2 / len(X)) ** 0.5, 0.1)
    assert_same(flat_step(model, optimizer, lambda: criterion(model(X), Y[:, :1])), expected, rtol=1e-8)


def test_of_a_wide_layer_few_jacobians_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    z, g = (torch.randn(256, 3, 1, 128, dtype=torch.float32) for _ in range(2))  # of 2²² elements each example
    held: list[int] = []
    whole = ExampleRows.jacobians

    def jacobians(rows: ExampleRows) -> Tensor:
        found = whole(rows)
        held.append(found.numel())
        return found

    monkeypatch.setattr(ExampleRows, "jacobians", jacobians)
    key = (0, 0)
    rows = SampleRows({key: 3}, {key: ExampleRows(3, None, [(z, g)])}, 1.0, False, torch.empty(256, 128, 128), z.dtype)
    left, right = rows.moments()
    assert max(held) <= 2**23
    assert sum(held) == 3 * 2**22
    torch.testing.assert_close(left.sum(0), torch.einsum("gnpi,gnpj,gnpk->jk", z.square(), g, g), rtol=1e-3, atol=1)
    torch.testing.assert_close(right.sum(0), torch.einsum("gnpi,gnpj,gnpk->jk", g.square(), z, z), rtol=1e-3, atol=1)


def test_terms_without_curvature_leave_the_parameters_finite() -> None:
    model, criterion = network(sizes=(2, 6, 2)), nn.CrossEntropyLoss()
    optimizer, before = optimizer_of(model, criterion, damping=0.1), clones(model.parameters())
    criterion(model(X), torch.full((12,), -100)).backward()  # all ignored: 0/0, and gradients of zero
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))

    bits = nn.BCEWithLogitsLoss()
    optimizer = optimizer_of(model, bits, damping=0.1)
    flat_step(model, optimizer, lambda: bits(1e3 * model(X), Y.sigmoid()))
    assert all(bool(param.isfinite().all()) for param in model.parameters())


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_an_empty_batch_leaves_the_momentum_alone(named: bool, momentum: float) -> None:
    """Whether its loss calls the criterion, or is a zero that is made of the outputs."""
    model, criterion = network(sizes=(2, 6, 2)), nn.CrossEntropyLoss()
    optimizer = optimizer_of(model, criterion, damping=0.1, inverse=SampleSpace(momentum=momentum))
    classes = Y[:, 0].gt(0).long()

    def loss(examples: int) -> Tensor:
        outputs = model(X[:examples])
        return criterion(outputs, classes[:examples]) if named or examples else 0 * outputs.sum()

    first = flat_step(model, optimizer, lambda: loss(12))
    assert_same(flat_step(model, optimizer, lambda: loss(0)), momentum * first)
    with pytest.raises(RuntimeError, match=r"layer '0' has a gradient.*those of an empty batch"):
        flat_step(model, optimizer, lambda: loss(0).nan_to_num() + model[0].weight.square().sum())
    flat_step(model, optimizer, lambda: loss(12))


@pytest.mark.parametrize(
    "options",
    [
        {"inverse": SampleSpace()},
        {"inverse": SampleSpace(scope="layer")},
        {"inverse": SampleSpace(), "step_size": LineSearch()},
    ],
)
def test_an_empty_term_beside_others_counts_for_nothing(options: dict[str, Any]) -> None:
    def moved(*parts: int) -> list[Tensor]:
        model, criterion = network(sizes=(2, 6, 2)), nn.MSELoss(reduction="sum")
        optimizer = optimizer_of(model, criterion, damping=0.1, **options)
        before = clones(model.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([criterion(model(X[:some]), Y[:some]) for some in parts]).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return [new - old for old, new in zip(before, clones(model.parameters()), strict=True)]

    assert_same(moved(5), moved(5, 0))
