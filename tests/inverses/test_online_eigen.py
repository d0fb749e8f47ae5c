import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import cases, oracles, states
from helpers.cases import STRUCTURES, LayerCase, any_loss, conv_cases, displacement, linear_cases, look_alikes, snapshot
from helpers.oracles import assert_same
from helpers.plain import assert_identical, batch, block, clones, edited, mlp, train
from helpers.states import CPU, add_moments, assert_resumes_bitwise, every_structure, spec
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import Eigen, KFACOptimizer, OnlineEigen, Structure
from kfac_optim.inverses.eigenbasis.online import OnlineState, orthogonal_iteration

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

DENSE, DIAGONAL, IDENTITY = Structure
measured_state = partial(states.measured_state, OnlineEigen())

# -- matrices of a given spectrum --------------------------------------------------------------------------------


def orthogonal(dim: int, *, near: float | None = None) -> Tensor:
    """Any, or with `near` one that turns by about that angle."""
    if near is None:
        return torch.linalg.qr(torch.randn(dim, dim)).Q
    skew = torch.randn(dim, dim) / dim**0.5
    return torch.matrix_exp(near * (skew - skew.mT))


def of_spectrum(values: Tensor, basis: Tensor) -> Tensor:
    return basis @ torch.diag(values) @ basis.mT


def geometric(dim: int, condition: float) -> Tensor:
    return torch.logspace(0, -math.log10(condition), dim)


def damped_error(matrix: Tensor, values: Tensor, basis: Tensor, damping: float) -> float:
    """Relative error of `(F + λI)⁻¹`, λ in units of the mean eigenvalue, in the Frobenius norm."""
    damping *= float(matrix.trace()) / len(matrix)
    exact = torch.linalg.inv(matrix + damping * torch.eye(len(matrix)))
    return float((of_spectrum(1 / (values.clamp(min=0) + damping), basis) - exact).norm() / exact.norm())


def step(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    values, turned, usable = orthogonal_iteration(matrix[None], basis[None])
    assert int(usable) == 1
    return values[0], turned[0]


# -- one step of the iteration -----------------------------------------------------------------------------------


@given(dim=st.integers(1, 6), count=st.integers(1, 3), rank=st.integers(0, 8))
def test_a_step_orthogonalises_the_product_column_by_column(dim: int, count: int, rank: int) -> None:
    rows = torch.randn(count, rank, dim)
    matrices = rows.mT @ rows
    starts = torch.stack([orthogonal(dim) for _ in range(count)])
    values, turned, usable = orthogonal_iteration(matrices, starts)
    for matrix, start, found, basis in zip(matrices, starts, values, turned, strict=True):
        assert_same(basis.mT @ basis, torch.eye(dim))
        assert_same(found, (basis.mT @ matrix @ basis).diagonal(), rtol=1e-8)
        shown = [float(column @ matrix @ column) for column in start.mT]
        columns: list[Tensor] = []
        for i in sorted(range(dim), key=lambda i: -shown[i])[: min(rank, dim)]:  # Gram-Schmidt
            column = matrix @ start[:, i]
            for _ in range(2):
                for one in columns:
                    column = column - (one @ column) * one
            columns.append(column / column.norm())
        for k, column in enumerate(columns):
            assert float((basis[:, k] @ column).abs()) > 1 - 1e-6
    assert usable.all()


@given(condition=st.floats(0.2, 8).map(lambda exponent: 10**exponent), seed=st.integers(0, 3))
def test_on_a_fixed_factor_it_converges_at_the_rate_of_the_gaps(condition: float, seed: int) -> None:
    torch.manual_seed(seed)
    spectrum = geometric(6, condition)
    ratio = float(spectrum[1])  # of neighbouring eigenvalues
    truth = orthogonal(6)
    matrix = of_spectrum(spectrum, truth)
    basis = truth @ orthogonal(6, near=0.3)
    steps = math.ceil(math.log(1e-10) / math.log(ratio))
    for count in range(1, steps + 1):
        values, basis = step(matrix, basis)
        assert damped_error(matrix, values, basis, 0.01) < 50 * ratio**count + 1e-9
    assert_same(values.sort().values, torch.linalg.eigvalsh(matrix), rtol=1e-8)


@given(condition=st.sampled_from([1e2, 1e4, 1e6, 1e8]), power=st.sampled_from([0.0, 1.0, 2.0]))
def test_its_error_is_bounded_by_what_the_basis_leaves_off_the_diagonal(condition: float, power: float) -> None:
    # ‖(F + λ)⁻¹ - (F' + λ)⁻¹‖ ≤ ‖F - F'‖ / λ², and F - F' is what is left off the diagonal.
    spectrum = geometric(8, condition) if power == 0 else torch.arange(1.0, 9) ** -power
    truth = orthogonal(8)
    matrix = of_spectrum(spectrum, truth)
    start = truth @ orthogonal(8, near=0.3)
    values, basis = step(matrix, start)
    before, rest = (turned.mT @ matrix @ turned for turned in (start, basis))
    for each in (before, rest):
        each.fill_diagonal_(0)
    damping = 0.01 * float(matrix.trace()) / 8
    exact = torch.linalg.inv(matrix + damping * torch.eye(8))
    assert float((of_spectrum(1 / (values + damping), basis) - exact).norm()) < float(rest.norm()) / damping**2
    assert float(rest.norm()) < float(before.norm())


@pytest.mark.parametrize(("power", "bounds"), [(1, (0.13, 0.18)), (2, (0.03, 0.08))])
def test_under_drift_one_step_for_ten_updates_keeps_the_error_low(power: int, bounds: tuple[float, float]) -> None:
    dim = 64
    root = orthogonal(dim) * torch.arange(1.0, dim + 1) ** (-power / 2)
    matrix, mass, first = torch.zeros(dim, dim), 0.0, None
    ours: dict[float, list[float]] = {0.1: [], 0.01: []}
    stale: dict[float, list[float]] = {0.1: [], 0.01: []}
    for _ in range(10):
        for _ in range(10):
            rows = torch.randn(dim, dim) @ root.mT
            mass = 0.95 * mass + 1
            matrix.lerp_(rows.mT @ rows / dim, 1 / mass)
        if first is None:
            first = basis = torch.linalg.eigh(matrix).eigenvectors
            continue
        values, basis = step(matrix, basis)
        for damping, errors in ours.items():
            errors.append(damped_error(matrix, values, basis, damping))
            kept = (first.mT @ matrix @ first).diagonal()
            stale[damping].append(damped_error(matrix, kept, first, damping))
    for (damping, errors), bound in zip(ours.items(), bounds, strict=True):
        mean = sum(errors) / 9
        assert mean < bound
        assert mean < 0.6 * sum(stale[damping]) / 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_basis_stays_orthogonal_over_many_steps(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 12, dtype=dtype)
    matrix = (rows.mT @ rows)[None]  # of rank 3
    basis = torch.eye(12, dtype=dtype)[None]
    for _ in range(200):
        _, basis, _ = orthogonal_iteration(matrix, basis)
    error = (basis.mT @ basis - torch.eye(12, dtype=dtype)).abs().max()
    assert float(error) < 50 * torch.finfo(dtype).eps


def test_a_matrix_that_is_not_finite_spoils_no_other() -> None:
    matrices = torch.stack([of_spectrum(geometric(4, 100), orthogonal(4)) for _ in range(3)])
    bases = torch.stack([orthogonal(4) for _ in range(3)])
    alone = orthogonal_iteration(matrices[[0, 2]], bases[[0, 2]])
    matrices[1, 2, 0] = torch.nan
    values, turned, usable = orthogonal_iteration(matrices, bases)
    assert usable.tolist() == [1, 0, 1]
    assert_same((values[[0, 2]], turned[[0, 2]]), alone[:2])


# -- which refresh is a full one ---------------------------------------------------------------------------------


def drift(state: OnlineState, decay: float = 0.5) -> None:
    """New second moments, in part those there were."""
    add_moments(state.pair)
    state.pair.fold(1, decay, 1.0)


def in_use(state: OnlineState) -> list[Tensor | None]:
    """`A` and `G` as the basis and eigenvalues have them."""
    found: list[Tensor | None] = []
    for spectrum in (state.a, state.g):
        if spectrum is None or spectrum.basis is None:
            found.append(None if spectrum is None else spectrum.values)
        else:
            found.append(spectrum.basis @ torch.diag_embed(spectrum.values) @ spectrum.basis.mT)
    return found


def solution(factors: list[Tensor | None], grad: Tensor, damping: float) -> Tensor:
    groups, rows, columns = grad.shape
    a, g = (oracles.dense(factor, groups, dim) for factor, dim in zip(factors, (columns, rows), strict=True))
    return oracles.solve(oracles.kronecker(a, g) + damping * torch.eye(rows * columns), grad)


class Calls:
    """Counts decompositions; while `broken` full ones fail.

    Attributes:
        made: "eigh" and "qr" with the batch and size of each call.
        broken: whether `torch.linalg.eigh` raises.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, int, int]] = []
        self.broken = False
        for name in ("eigh", "qr"):
            monkeypatch.setattr(torch.linalg, name, partial(self._call, name, getattr(torch.linalg, name)))

    def _call(self, name: str, function: Callable[[Tensor], tuple[Tensor, Tensor]], batch: Tensor) -> object:
        self.made.append((name, len(batch), batch.shape[-1]))
        if name == "eigh" and self.broken:
            raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")
        return function(batch)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.parametrize("period", [1, 2, 3])
def test_one_of_as_many_refreshes_as_asked_for_is_full(calls: Calls, period: int) -> None:
    inverse, state = OnlineEigen(period), measured_state(4, 4)
    kinds = []
    for _ in range(7):
        inverse.refresh([state], [0.1])
        kinds.append(calls.made)
        calls.made = []
    # Both factors have one size, and are taken in one call.
    assert kinds == [[("qr" if i % period else "eigh", 4, 4)] for i in range(7)]


def test_a_full_refresh_is_that_of_eigen_and_the_next_one_is_near() -> None:
    state, inverse, eigen = measured_state(), OnlineEigen(), Eigen()
    theirs = eigen.init(spec(4, 3, 2, (DENSE, DENSE)), dtype=torch.float64, device=CPU)
    grad = torch.randn(2, 3, 4)
    errors = []
    for _ in range(3):
        theirs.pair.load(state.pair.tensors())
        inverse.refresh([state], [0.1])
        eigen.refresh([theirs], [0.1])
        ours, exact = inverse.apply(state, grad, 0.1), eigen.apply(theirs, grad, 0.1)
        errors.append(float((ours - exact).norm() / exact.norm()))
        drift(state, decay=9.0)  # a tenth is new
    assert errors[0] == 0
    assert 0 < errors[1] < 0.1
    assert 0 < errors[2] < 0.1


def test_always_full_is_eigen_to_the_bit() -> None:
    def run(inverse: Eigen | OnlineEigen) -> list[Tensor]:
        model = mlp()
        train(model, KFACOptimizer(model, lr=0.1, inverse=inverse, inverse_update_period=2, factor_update_period=1), 6)
        return clones(model.parameters())

    assert_identical(run(OnlineEigen(1)), run(Eigen()))


@every_structure
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=4
    )
)
def test_blocks_refreshed_together_come_out_as_alone(
    structure: tuple[Structure, Structure], shapes: list[tuple[int, int, int, int]]
) -> None:
    # Some had refreshes before, so that some are due a full one and others a step.
    inverse = OnlineEigen(3)
    together = [measured_state(*dims, structure) for *dims, _ in shapes]
    alone = [inverse.init(spec(*dims, structure), dtype=torch.float64, device=CPU) for *dims, _ in shapes]
    for state, (*_, before) in zip(together, shapes, strict=True):
        for _ in range(before):
            inverse.refresh([state], [0.1])
            drift(state)
    for state, copy in zip(together, alone, strict=True):
        copy.load(state.tensors())
        inverse.refresh([copy], [0.1])
    inverse.refresh(together, [0.1] * len(together))
    for state, copy, (inputs, outputs, groups, _) in zip(together, alone, shapes, strict=True):
        grad = torch.randn(groups, outputs, inputs)
        assert_same(inverse.apply(state, grad, 0.1), inverse.apply(copy, grad, 0.1), rtol=1e-8)
        assert torch.equal(state.since_full, copy.since_full)


# -- the step, through the optimizer -----------------------------------------------------------------------------


@given(
    case=st.one_of(linear_cases(), conv_cases()),
    structure=st.sampled_from(STRUCTURES),
    damping=st.sampled_from([1e-3, 0.1, 10.0]),
)
def test_the_step_solves_the_system_in_the_basis_that_it_has(
    case: LayerCase, structure: tuple[Structure, Structure], damping: float
) -> None:
    module = case.module()
    optimizer = cases.free_optimizer(module, inverse=OnlineEigen(), structure=structure, damping=damping)
    for _ in range(3):
        optimizer.zero_grad()
        before = snapshot(module)
        any_loss(module(case.input())).backward()
        optimizer.step()
        grad = oracles.gradient_matrix(module)
        difference = displacement(module, before) - solution(in_use(block(optimizer, "").state), grad, damping)
        # Displacements are differences of parameters, exact to rounding of the parameters only.
        largest = max(float(tensor.abs().max()) for tensor in before.values())
        assert float(difference.abs().max()) < 1e-9 * float(grad.abs().max()) / damping + 1e-12 * (1 + largest)


def test_every_layer_of_a_model_follows_its_own_factors() -> None:
    model = look_alikes()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=OnlineEigen(100), factor_update_period=1, inverse_update_period=10)
    for _ in range(60):
        optimizer.zero_grad()
        torch.manual_seed(3)  # the same batch and loss: factors stay as they are
        any_loss(model(torch.randn(6, 4, 3))).backward()
        optimizer.step()
        for each in optimizer._binding.coverage.blocks:
            each.inverse.refresh([each.state], [0.1])
    for name, pair in optimizer.factors().items():
        for factor, found in zip(pair, in_use(block(optimizer, name).state), strict=True):
            assert_same(found, factor, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise(dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Module, KFACOptimizer]:
        model = mlp(dtype=dtype)
        structure = {"0": (DENSE, DIAGONAL), "2": (DENSE, DENSE)}
        return model, KFACOptimizer(
            model, lr=0.1, inverse=OnlineEigen(3), structure=structure, inverse_update_period=2, factor_update_period=1
        )

    model, optimizer = make()
    train(model, optimizer, 7)
    assert block(optimizer, "2").state.since_full.any()
    assert_resumes_bitwise(make, steps=14, saved=7)


# -- failures ----------------------------------------------------------------------------------------------------


def test_a_full_decomposition_that_failed_is_tried_again_at_the_next_refresh(calls: Calls) -> None:
    inverse, state = OnlineEigen(), measured_state(4, 4)
    calls.broken = True
    inverse.refresh([state], [0.1])
    grad = torch.randn(2, 4, 4)
    assert_same(inverse.apply(state, grad, 0.1), grad, rtol=0)
    assert int(state.counters()["failed_refreshes"]) == 4
    assert [int(number) for number in state.setbacks()] == [0, 1]
    calls.broken, calls.made = False, []
    inverse.refresh([state], [0.1])
    inverse.refresh([state], [0.1])
    assert [name for name, *_ in calls.made] == ["eigh", "qr"]
    assert_same(inverse.apply(state, grad, 0.1), solution(in_use(state), grad, 0.1), rtol=1e-8)
    assert [int(number) for number in state.setbacks()] == [0, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("refreshes", [1, 3])
def test_a_hopeless_factor_keeps_the_last_good_basis_of_its_group_only(refreshes: int, value: float) -> None:
    # With a full decomposition every third time, one refresh before is followed by a step, three by a full one.
    inverse, state = OnlineEigen(3), measured_state()
    for _ in range(refreshes):
        inverse.refresh([state], [0.1])
        drift(state)
    old = in_use(state)
    with edited(state.pair.a) as average:
        average[1, 0, 0] = value
    inverse.refresh([state], [0.1])
    assert int(state.counters()["failed_refreshes"]) == 1
    a, g = in_use(state)
    assert torch.equal(a[1], old[0][1])
    assert not torch.allclose(a[0], old[0][0])
    assert not torch.allclose(g[1], old[1][1])
    assert state.since_full.tolist() == ([2, 2] if refreshes == 1 else [0, 1])
    grad = torch.randn(2, 3, 4)
    assert_same(inverse.apply(state, grad, 0.1), solution([a, g], grad, 0.1), rtol=1e-8)


@every_structure
def test_without_accepted_statistics_a_refresh_changes_nothing(structure: tuple[Structure, Structure]) -> None:
    inverse = OnlineEigen()
    state = inverse.init(spec(4, 3, 2, structure), dtype=torch.float64, device=CPU)
    for _ in range(2):
        inverse.refresh([state], [0.1])
    grad = torch.randn(2, 3, 4)
    assert_same(inverse.apply(state, grad, 0.1), grad, rtol=0)
    drift(state)
    inverse.refresh([state], [0.1])
    assert_same(inverse.apply(state, grad, 0.1), solution(list(state.factors()), grad, 0.1), rtol=1e-8)


# -- what is reported --------------------------------------------------------------------------------------------


def test_a_refresh_costs_the_average_of_full_ones_and_steps() -> None:
    layer = spec(4, 3, 2, (DENSE, DIAGONAL))
    assert OnlineEigen(1).flops(layer) == Eigen().flops(layer)
    assert OnlineEigen(10).flops(layer) == (2 * 4**3 * (25 + 9 * 7) / 10, 2 * 4 * 3 * 4 * 4)


@pytest.mark.parametrize(("period", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_the_period_is_a_positive_integer(period: object, error: type[Exception]) -> None:
    wrong: Callable[..., OnlineEigen] = OnlineEigen
    with pytest.raises(error, match="full_period of OnlineEigen must be"):
        wrong(full_period=period)


def test_it_is_named_in_the_summary() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, inverse=OnlineEigen(5))
    assert optimizer.summary().blocks[0].inverse == "OnlineEigen(full_period=5)"
    model(batch()).sum().backward()
    optimizer.step()
    assert "condition_A" in optimizer.metrics()
