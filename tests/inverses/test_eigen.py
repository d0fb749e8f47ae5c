from functools import partial

import pytest
import torch
from helpers import cases, oracles, states
from helpers.cases import STRUCTURES, LayerCase, any_loss, conv_cases, displacement, linear_cases, look_alikes, snapshot
from helpers.oracles import MaybeFactor, assert_same
from helpers.plain import assert_identical, edited, mlp
from helpers.states import CPU, assert_resumes_bitwise, every_structure, spec
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import EKFAC, Cholesky, Eigen, KFACOptimizer, LayerSpec, Structure, WeightSharing
from kfac_optim.inverses.eigenbasis.base import EigenState, divisor

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

EIGEN = Eigen()
DENSE, DIAGONAL, IDENTITY = Structure
dampings = st.floats(1e-3, 10)
free_optimizer = partial(cases.free_optimizer, inverse=EIGEN)
measured_state = partial(states.measured_state, EIGEN)


def solution(factors: tuple[MaybeFactor, MaybeFactor], grad: Tensor, damping: float) -> Tensor:
    """`(G ⊗ A + λI)⁻¹ ∇` by a dense solve, `[groups, out, in]`."""
    groups, rows, columns = grad.shape
    a, g = (oracles.dense(factor, groups, dim) for factor, dim in zip(factors, (columns, rows), strict=True))
    return oracles.solve(oracles.kronecker(a, g) + damping * torch.eye(rows * columns), grad)


# -- the step, through the optimizer -----------------------------------------------------------------------------


@given(
    case=st.one_of(linear_cases(), conv_cases()),
    structure=st.sampled_from(STRUCTURES),
    sharing=st.sampled_from(WeightSharing),
    damping=st.sampled_from([1e-3, 0.1, 10.0]),
)
def test_the_step_solves_the_jointly_damped_kronecker_system(
    case: LayerCase, structure: tuple[Structure, Structure], sharing: WeightSharing, damping: float
) -> None:
    module = case.module()
    optimizer = free_optimizer(module, structure=structure, weight_sharing=sharing, damping=damping)
    before = snapshot(module)
    any_loss(module(case.input())).backward()
    optimizer.step()
    grad = oracles.gradient_matrix(module)
    # Displacements are differences of parameters, exact to rounding of the parameters only.
    difference = displacement(module, before) - solution(optimizer.factors()[""], grad, damping)
    assert float(difference.abs().max()) < 1e-9 * float(grad.abs().max()) / damping + 1e-12


@every_structure
def test_every_layer_of_a_model_solves_its_own_system(structure: tuple[Structure, Structure]) -> None:
    # Equal shapes are decomposed in one batch, across layers and groups: none may take another's.
    model = look_alikes()
    optimizer = free_optimizer(model, structure=structure, damping=0.1)
    before = snapshot(model)
    any_loss(model(torch.randn(6, 4, 3))).backward()
    optimizer.step()
    for name, pair in optimizer.factors().items():
        layer = model.get_submodule(name)
        local = {key.removeprefix(f"{name}."): value for key, value in before.items() if key.startswith(f"{name}.")}
        expected = solution(pair, oracles.gradient_matrix(layer), 0.1)
        assert_same(displacement(layer, local), expected, rtol=1e-8)


def test_the_damping_of_each_step_counts_between_refreshes() -> None:
    module = nn.Linear(3, 2)
    optimizer = free_optimizer(module, factor_update_period=100, inverse_update_period=100)
    for damping in (0.1, 3.0, 1e-3):
        optimizer.param_groups[0]["damping"] = damping
        optimizer.zero_grad()
        before = snapshot(module)
        any_loss(module(torch.randn(5, 3))).backward()
        optimizer.step()
        expected = solution(optimizer.factors()[""], oracles.gradient_matrix(module), damping)
        assert_same(displacement(module, before), expected, rtol=1e-8)
    assert optimizer.metrics()["inverse_age"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise(dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Module, KFACOptimizer]:
        model = mlp(dtype=dtype)
        structure = {"0": (DENSE, DIAGONAL), "2": (DENSE, DENSE)}
        return model, KFACOptimizer(
            model, lr=0.1, inverse=Eigen(), structure=structure, inverse_update_period=4, factor_update_period=1
        )

    assert_resumes_bitwise(make, steps=9, saved=6)  # between refreshes


def test_a_checkpoint_of_another_representation_is_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"A_inverse of '0' is \[1, 5, 5\], here unused"):
        KFACOptimizer(model, inverse=Eigen()).load_state_dict(KFACOptimizer(model, inverse=Cholesky()).state_dict())


# -- the representation alone ------------------------------------------------------------------------------------


def assert_solves(state: EigenState, damping: float = 0.1, *, rtol: float = 1e-8) -> None:
    grad = torch.randn(len(state.solved), state.pair.g.dim, state.pair.a.dim)
    assert_same(EIGEN.apply(state, grad, damping), solution(state.factors(), grad, damping), rtol=rtol)


@every_structure
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
        min_size=1,
        max_size=4,
    ),
    rank=st.integers(0, 3),
    steps=st.lists(dampings, min_size=1, max_size=3),
)
def test_blocks_refreshed_together_solve_their_systems_at_every_damping(
    structure: tuple[Structure, Structure], shapes: list[tuple[int, int, int]], rank: int, steps: list[float]
) -> None:
    states = [measured_state(*dims, structure, rank=rank) for dims in shapes]
    EIGEN.refresh(states, [0.1] * len(states))
    for state, (inputs, outputs, groups) in zip(states, shapes, strict=True):
        grad = torch.randn(groups, outputs, inputs)
        for damping in steps:
            expected = solution(state.factors(), grad, damping)
            assert_same(EIGEN.apply(state, grad, damping), expected, rtol=1e-8)


@every_structure
def test_the_damping_of_a_refresh_is_not_that_of_the_step(structure: tuple[Structure, Structure]) -> None:
    torch.manual_seed(1)
    one = measured_state(structure=structure)
    torch.manual_seed(1)
    other = measured_state(structure=structure)
    EIGEN.refresh([one], [1e-3])
    EIGEN.refresh([other], [10.0])
    grad = torch.randn(2, 3, 4)
    assert_same(EIGEN.apply(one, grad, 0.1), EIGEN.apply(other, grad, 0.1), rtol=0)


def as_cholesky(state: EigenState, layer: LayerSpec, grad: Tensor, damping: float) -> Tensor:
    """What `Cholesky` makes of `grad` from the same averages."""
    cholesky = Cholesky()
    theirs = cholesky.init(layer, dtype=torch.float64, device=CPU)
    theirs.pair.load(state.pair.tensors())
    cholesky.refresh([theirs], [damping])
    return cholesky.apply(theirs, grad, damping)


@pytest.mark.parametrize(
    ("inputs", "outputs", "structure"),
    [
        (4, 3, (DENSE, IDENTITY)),
        (4, 3, (IDENTITY, DENSE)),
        (4, 3, (DIAGONAL, IDENTITY)),
        (1, 3, (DENSE, DENSE)),
        (4, 1, (DENSE, DENSE)),
        (1, 1, (DENSE, DENSE)),
    ],
)
@given(damping=dampings)
def test_beside_an_identity_or_a_scalar_it_equals_cholesky(
    inputs: int, outputs: int, structure: tuple[Structure, Structure], damping: float
) -> None:
    # There is but one factor to damp, and so factored damping is exact.
    layer = spec(inputs, outputs, 2, structure)
    state = measured_state(inputs, outputs, 2, structure)
    EIGEN.refresh([state], [1.0])
    grad = torch.randn(2, outputs, inputs)
    assert_same(EIGEN.apply(state, grad, damping), as_cholesky(state, layer, grad, damping), rtol=1e-8)


def test_towards_no_damping_it_equals_cholesky_and_far_from_it_not() -> None:
    layer, state, grad = spec(4, 3, 2, (DENSE, DENSE)), measured_state(), torch.randn(2, 3, 4)
    EIGEN.refresh([state], [1.0])
    # Factored damping errs by √λ.
    assert_same(EIGEN.apply(state, grad, 1e-16), as_cholesky(state, layer, grad, 1e-16), rtol=1e-6)
    ours, theirs = EIGEN.apply(state, grad, 1.0), as_cholesky(state, layer, grad, 1.0)
    assert float((ours - theirs).norm() / ours.norm()) > 0.05


@pytest.mark.parametrize("inverse", [Eigen(), EKFAC()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_damping_below_rounding_does_not_enlarge_the_noise_of_a_null_space(
    inverse: Eigen | EKFAC, dtype: torch.dtype
) -> None:
    state = inverse.init(spec(4, 3, 2, (DENSE, DENSE)), dtype=dtype, device=CPU)
    for factor in (state.pair.a, state.pair.g):
        factor.packed.copy_(5 * torch.ones_like(factor.packed))  # of rank 1
        factor.mass.fill_(1)
    inverse.refresh([state], [1.0])
    grad, largest = torch.randn(2, 3, 4, dtype=dtype), float(state.eigenvalues().max())
    smallest = torch.finfo(dtype).eps * largest
    assert_same(inverse.apply(state, grad, 1e-30), inverse.apply(state, grad, smallest), rtol=1e-4)
    assert float(inverse.apply(state, grad, 1e-30).norm()) < 1.01 * float(grad.norm()) / smallest


# -- before the first refresh ------------------------------------------------------------------------------------


@every_structure
@given(damping=st.floats(1e-30, 1e30))
def test_before_any_refresh_the_gradient_comes_back(structure: tuple[Structure, Structure], damping: float) -> None:
    grad = torch.randn(2, 3, 4)
    assert_same(EIGEN.apply(measured_state(structure=structure), grad, damping), grad, rtol=0)


@every_structure
def test_without_accepted_statistics_a_refresh_changes_nothing(structure: tuple[Structure, Structure]) -> None:
    state = EIGEN.init(spec(4, 3, 2, structure), dtype=torch.float64, device=CPU)
    before = {key: tensor.clone() for key, tensor in state.counters().items()}
    EIGEN.refresh([state], [0.1])
    grad = torch.randn(2, 3, 4)
    assert_same(EIGEN.apply(state, grad, 0.1), grad, rtol=0)
    assert_identical(state.counters(), before)


def test_applying_waits_for_no_number_from_the_device() -> None:
    # A tensor on the meta device has no numbers to wait for: reading one raises.
    state = EIGEN.init(spec(4, 3, 2, (DENSE, DENSE)), dtype=torch.float32, device=torch.device("meta"))
    with pytest.raises(RuntimeError, match="meta"):
        state.has_statistics()
    grad = torch.empty(2, 3, 4, device="meta")
    assert EIGEN.apply(state, grad, 0.1).shape == (2, 3, 4)


# -- failures ----------------------------------------------------------------------------------------------------


class BrokenEigh:
    """While it stands in for `torch.linalg.eigh`, raises for every matrix with the diagonal of `refused`.

    Attributes:
        refused: a matrix.
        rtol: of the comparison; at 0 a shifted matrix is let through.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: Tensor | None = None
        self.rtol = 0.0
        self._eigh = torch.linalg.eigh
        monkeypatch.setattr(torch.linalg, "eigh", self)

    def __call__(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        for matrix in batch:
            if self.refused is not None and matrix.shape == self.refused.shape:
                diagonals = matrix.diagonal(), self.refused.diagonal().to(matrix)
                if torch.allclose(*diagonals, rtol=self.rtol, atol=0.0):
                    raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")
        return self._eigh(batch)


@pytest.fixture
def broken_eigh(monkeypatch: pytest.MonkeyPatch) -> BrokenEigh:
    return BrokenEigh(monkeypatch)


def counts(*states: EigenState) -> list[tuple[int, int]]:
    """Refreshes retried and failed."""
    return [(int(state.retried), int(state.failed)) for state in states]


def test_a_failed_decomposition_is_repeated_and_spoils_no_other(broken_eigh: BrokenEigh) -> None:
    tried, sound = measured_state(), measured_state()
    broken_eigh.refused = tried.pair.a.average[1]
    EIGEN.refresh([tried, sound], [0.1, 0.1])
    assert counts(tried, sound) == [(1, 0), (0, 0)]
    assert_solves(tried)
    assert_solves(sound)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, None], ids=["nan", "inf", "no convergence"])
def test_a_hopeless_factor_keeps_the_last_good_basis_of_its_group_only(
    broken_eigh: BrokenEigh, value: float | None
) -> None:
    broken, sound = measured_state(), measured_state()
    EIGEN.refresh([broken, sound], [0.1, 0.1])
    old = [broken.pair.a.average, broken.pair.g.average]
    for state in (broken, sound):
        state.pair.a.packed.mul_(2)
        state.pair.g.packed.mul_(3)
    if value is None:
        broken_eigh.refused, broken_eigh.rtol = broken.pair.a.average[1], 1e-3
    else:
        with edited(broken.pair.a) as average:
            average[1, 0, 0] = value
    EIGEN.refresh([broken, sound], [0.1, 0.1])
    assert counts(broken, sound) == [(0, 1), (0, 0)]
    grad = torch.randn(2, 3, 4)
    in_use = torch.stack([2 * old[0][0], old[0][1]]), 3 * old[1]
    assert_same(EIGEN.apply(broken, grad, 0.1), solution(in_use, grad, 0.1), rtol=1e-8)
    assert broken.condition.isfinite().all()
    assert_solves(sound)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_diagonal_that_is_not_finite_keeps_the_last_good_one_of_its_group_only(value: float) -> None:
    state = measured_state(structure=(DIAGONAL, DENSE))
    EIGEN.refresh([state], [0.1])
    old = state.pair.a.average.clone()
    state.pair.a.packed.mul_(2)
    with edited(state.pair.a) as average:
        average[1, 2] = value
    EIGEN.refresh([state], [0.1])
    assert int(state.failed) == 1
    grad = torch.randn(2, 3, 4)
    in_use = torch.stack([2 * old[0], old[1]]), state.pair.g.average
    assert_same(EIGEN.apply(state, grad, 0.1), solution(in_use, grad, 0.1), rtol=1e-8)


def test_a_group_none_of_whose_factors_was_ever_decomposed_gives_the_gradient_back() -> None:
    state = measured_state()
    for factor in (state.pair.a, state.pair.g):
        with edited(factor) as average:
            average[0] = torch.nan
    EIGEN.refresh([state], [0.1])
    assert int(state.failed) == 2
    grad = torch.randn(2, 3, 4)
    direction = EIGEN.apply(state, grad, 0.1)
    assert_same(direction[0], grad[0], rtol=0)
    sound = [factor[1:] for factor in state.factors()]
    assert_same(direction[1:], solution((sound[0], sound[1]), grad[1:], 0.1), rtol=1e-8)


@pytest.mark.parametrize("side", [0, 1])
def test_a_factor_that_was_never_decomposed_stands_as_the_identity(side: int) -> None:
    state = measured_state(groups=1)
    (state.pair.a, state.pair.g)[side].packed.fill_(torch.nan)
    EIGEN.refresh([state], [0.1])
    grad = torch.randn(1, 3, 4)
    a, g = (None if i == side else factor for i, factor in enumerate(state.factors()))
    assert_same(EIGEN.apply(state, grad, 0.1), solution((a, g), grad, 0.1), rtol=1e-8)


def test_negative_eigenvalues_count_as_zero() -> None:
    state = measured_state(groups=1)
    basis = torch.linalg.qr(torch.randn(3, 3)).Q
    with edited(state.pair.g) as average:
        average[0] = basis @ torch.diag(torch.tensor([-0.5, 1.0, 2.0])) @ basis.mT
    EIGEN.refresh([state], [0.1])
    grad = torch.randn(1, 3, 4)
    clipped = (basis @ torch.diag(torch.tensor([0.0, 1.0, 2.0])) @ basis.mT)[None]
    assert_same(EIGEN.apply(state, grad, 0.1), solution((state.pair.a.average, clipped), grad, 0.1), rtol=1e-8)


# -- what is reported, and in which dtype ------------------------------------------------------------------------


@pytest.mark.parametrize("structure", [DENSE, DIAGONAL])
def test_the_condition_number_is_the_worst_of_the_factors_under_factored_damping(structure: Structure) -> None:
    state = measured_state(structure=(structure, structure))
    EIGEN.refresh([state], [0.5])
    a, g = (oracles.dense(factor, 2, dim) for factor, dim in zip(state.factors(), (4, 3), strict=True))
    pi = [((left.trace() / 4) / (right.trace() / 3)).sqrt() for left, right in zip(a, g, strict=True)]
    of_a = max(torch.linalg.cond(a[i] + 0.5**0.5 * pi[i] * torch.eye(4)) for i in (0, 1))
    of_g = max(torch.linalg.cond(g[i] + 0.5**0.5 / pi[i] * torch.eye(3)) for i in (0, 1))
    counters = state.counters()
    assert_same([counters["condition_A"], counters["condition_G"]], [of_a, of_g], rtol=1e-8)


@every_structure
def test_metrics_has_the_numbers_that_it_has_with_cholesky(structure: tuple[Structure, Structure]) -> None:
    theirs = Cholesky().init(spec(4, 3, 2, structure), dtype=torch.float64, device=CPU)
    assert measured_state(structure=structure).counters().keys() == theirs.counters().keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_factors_are_decomposed_and_applied_in_float32(dtype: torch.dtype) -> None:
    state = EIGEN.init(spec(4, 3, 1, (DENSE, DENSE)), dtype=dtype, device=CPU)
    for factor in (state.pair.a, state.pair.g):
        rows = torch.randn(8, factor.dim)
        factor.add((rows.mT @ rows).to(dtype)[None])
    state.pair.rows = 1
    state.fold(1, 1.0)
    EIGEN.refresh([state], [0.1])
    grad = torch.randn(1, 3, 4, dtype=dtype)
    direction = EIGEN.apply(state, grad, 0.1)
    assert direction.dtype == torch.float32
    a, g = (factor.double() for factor in state.factors())
    assert_same(direction.double(), solution((a, g), grad.double(), 0.1), rtol=1e-5)


def test_the_damping_is_not_rounded_to_the_default_dtype() -> None:
    state = measured_state(rank=0)
    EIGEN.refresh([state], [0.1])
    grad = torch.randn(2, 3, 4)
    torch.set_default_dtype(torch.float32)
    try:
        direction = EIGEN.apply(state, grad, 0.1)
    finally:
        torch.set_default_dtype(torch.float64)
    assert_same(direction, grad / 0.1, rtol=1e-14)


def test_tensors_load_into_another_state_bitwise_and_share_no_memory() -> None:
    saved, loaded = measured_state(structure=(DENSE, DIAGONAL)), measured_state(structure=(DENSE, DIAGONAL))
    EIGEN.refresh([saved], [0.1])
    loaded.load(saved.tensors())
    assert_identical(loaded.tensors(), saved.tensors())
    grad = torch.randn(2, 3, 4)
    direction = EIGEN.apply(saved, grad, 0.1)
    for tensor in (saved.solved, saved.condition, saved.a.values, saved.a.basis, saved.g.values):
        tensor.zero_()
    assert torch.equal(EIGEN.apply(loaded, grad, 0.1), direction)
    assert (loaded.condition > 1).all()


def test_only_dense_factors_cost_a_decomposition_and_rotations() -> None:
    dense, mixed = (EIGEN.flops(spec(4, 3, 2, (DENSE, kind))) for kind in (DENSE, DIAGONAL))
    assert dense == (2 * 25 * (4**3 + 3**3), 2 * 4 * (3 * 4 * 4 + 3 * 3 * 4))
    assert mixed == (2 * 25 * 4**3, 2 * 4 * 3 * 4 * 4)
    state = measured_state(structure=(DENSE, DIAGONAL))
    assert state.g.basis is None


def test_it_is_named_in_the_summary() -> None:
    assert repr(Eigen()) == "Eigen()"
    assert KFACOptimizer(mlp(), inverse=Eigen()).summary().blocks[0].inverse == "Eigen()"


def test_a_value_that_has_overflowed_leaves_the_others_of_its_group_as_they_are() -> None:
    values = torch.tensor([[[2.0, float("inf")]], [[3.0, 4.0]]])
    assert torch.equal(divisor(values, torch.tensor([True, True]), 0.1), values + 0.1)
