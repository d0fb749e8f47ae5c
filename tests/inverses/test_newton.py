from functools import partial

import pytest
import torch
from helpers import cases, oracles, states
from helpers.cases import STRUCTURES, LayerCase, any_loss, conv_cases, displacement, linear_cases, look_alikes, snapshot
from helpers.oracles import assert_same
from helpers.plain import assert_identical, batch, clones, edited, mlp, square_loss, train
from helpers.states import CPU, assert_resumes_bitwise, every_structure, spec
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import Cholesky, KFACOptimizer, NewtonSchulz, Structure, WeightSharing
from kfac_optim.inverses.damped.newton import NewtonSchulzState

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

DENSE, DIAGONAL, IDENTITY = Structure
THOROUGH = NewtonSchulz(steps=24, tolerance=1e-5)
free_optimizer = partial(cases.free_optimizer, inverse=THOROUGH)
measured_state = partial(states.measured_state, THOROUGH)

# -- the step, through the optimizer -----------------------------------------------------------------------------


@given(
    case=st.one_of(linear_cases(), conv_cases()),
    structure=st.sampled_from(STRUCTURES),
    sharing=st.sampled_from(WeightSharing),
    damping=st.sampled_from([1e-3, 0.1, 10.0]),
)
def test_the_step_solves_the_damped_kronecker_system_without_a_factorisation(
    case: LayerCase, structure: tuple[Structure, Structure], sharing: WeightSharing, damping: float
) -> None:
    module = case.module()
    optimizer = free_optimizer(module, structure=structure, weight_sharing=sharing, damping=damping)
    before = snapshot(module)
    any_loss(module(case.input())).backward()
    optimizer.step()
    grad = oracles.gradient_matrix(module)
    curvature = oracles.damped_kronecker(*optimizer.factors()[""], grad, damping)
    # Displacements are differences of parameters, exact to rounding of the parameters only.
    difference = displacement(module, before) - oracles.solve(curvature, grad)
    assert float(difference.abs().max()) < 1e-9 * float(grad.abs().max()) / damping + 1e-12
    assert optimizer.metrics()["fallback_inverses"] == 0


@every_structure
def test_every_layer_of_a_model_solves_its_own_system(structure: tuple[Structure, Structure]) -> None:
    # Equal shapes are inverted in one batch, across layers and groups: none may take another's.
    model = look_alikes()
    optimizer = free_optimizer(model, structure=structure, damping=0.1)
    before = snapshot(model)
    any_loss(model(torch.randn(6, 4, 3))).backward()
    optimizer.step()
    for name, pair in optimizer.factors().items():
        layer = model.get_submodule(name)
        grad = oracles.gradient_matrix(layer)
        expected = oracles.solve(oracles.damped_kronecker(*pair, grad, 0.1), grad)
        local = {key.removeprefix(f"{name}."): value for key, value in before.items() if key.startswith(f"{name}.")}
        assert_same(displacement(layer, local), expected, rtol=1e-8)


def test_a_run_is_that_with_cholesky_and_seldom_falls_back() -> None:
    ours, theirs = mlp(), mlp()
    optimizer = KFACOptimizer(
        ours,
        lr=0.1,
        momentum=0.9,
        inverse=NewtonSchulz(tolerance=1e-6),
        factor_update_period=1,
        inverse_update_period=10,
    )
    train(ours, optimizer, 15)
    train(
        theirs,
        KFACOptimizer(
            theirs, lr=0.1, momentum=0.9, inverse=Cholesky(), factor_update_period=1, inverse_update_period=10
        ),
        15,
    )
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_same(left, right, rtol=1e-5)
    assert optimizer.metrics()["fallback_inverses"] <= 4  # of 4 factors at 6 refreshes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise(dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Module, KFACOptimizer]:
        model = mlp(dtype=dtype)
        structure = {"0": (DENSE, DIAGONAL), "2": (DENSE, DENSE)}
        return model, KFACOptimizer(
            model,
            lr=0.1,
            inverse=NewtonSchulz(4, 1e-4),
            structure=structure,
            factor_update_period=1,
            inverse_update_period=10,
        )

    # saved between refreshes, and before one that is warm
    metrics = assert_resumes_bitwise(make, steps=12, saved=7)
    assert metrics["fallback_inverses"] > 0


def test_a_checkpoint_of_cholesky_is_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"A_solved of '0' is missing, here \[1\]"):
        KFACOptimizer(model, inverse=THOROUGH).load_state_dict(KFACOptimizer(model, inverse=Cholesky()).state_dict())


def test_a_grad_scaler_drives_the_run_without_it() -> None:
    model, twin = mlp(), mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer, reference = (
        KFACOptimizer(m, lr=0.1, momentum=0.9, inverse=NewtonSchulz(), factor_update_period=1) for m in (model, twin)
    )
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale(square_loss(model(batch(100 + i)))).backward()
        scaler.step(optimizer)
        scaler.update()
    train(twin, reference, 4)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_statistics_that_are_not_finite_are_refused() -> None:
    model = mlp(sizes=(4, 3))
    optimizer = KFACOptimizer(model, lr=0.1, inverse=NewtonSchulz(), inverse_update_period=1, factor_update_period=1)
    train(model, optimizer, 2)
    before = optimizer.factors()["0"]
    huge = batch()
    huge[0, 0] = 1e200  # its square is not finite
    optimizer.zero_grad()
    square_loss(model(huge)).backward()
    model.zero_grad()
    optimizer.step()
    assert_same(optimizer.factors()["0"], before, rtol=0)
    assert optimizer.metrics()["refused_statistics"] == 1
    assert optimizer.metrics()["failed_refreshes"] == 0


# -- the representation alone ------------------------------------------------------------------------------------


def of_condition(kappa: float, dim: int) -> Tensor:
    """Symmetric, eigenvalues in [1/κ, 1] with both ends taken, `[1, dim, dim]`."""
    eigenvalues = kappa ** -torch.rand(dim)
    eigenvalues[0], eigenvalues[-1] = 1.0, 1 / kappa
    basis = torch.linalg.qr(torch.randn(dim, dim)).Q
    matrix = basis * eigenvalues @ basis.mT
    return ((matrix + matrix.mT) / 2)[None]


def ill_state(kappa: float, dim: int = 6, dtype: torch.dtype = torch.float64) -> NewtonSchulzState:
    """A state of one group whose damped factors, at the damping `kappa⁻²`, have about the condition number κ."""
    state = measured_state(dim, dim, 1, dtype=dtype)
    for factor in (state.pair.a, state.pair.g):
        matrix = of_condition(kappa, dim)
        with edited(factor) as average:
            average.copy_(matrix / matrix[0].trace() * dim)  # π = 1
    return state


def solution(state: NewtonSchulzState, grad: Tensor, damping: float) -> Tensor:
    curvature = oracles.damped_kronecker(*(f.double() for f in state.factors()), grad.double(), damping)
    return oracles.solve(curvature, grad.double())


def apply_random(state: NewtonSchulzState, damping: float) -> tuple[Tensor, Tensor]:
    """What comes of a random gradient, and what should."""
    groups = len(state.g.solved)
    grad = torch.randn(groups, state.g.inverse.shape[-1], state.a.inverse.shape[-1], dtype=state.condition.dtype)
    return THOROUGH.apply(state, grad, damping).double(), solution(state, grad, damping)


def fallbacks(*states: NewtonSchulzState) -> list[int]:
    return [int(state.counters()["fallback_inverses"]) for state in states]


@every_structure
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.floats(1e-3, 10)), min_size=1, max_size=4
    )
)
def test_blocks_refreshed_together_come_out_as_alone(
    structure: tuple[Structure, Structure], shapes: list[tuple[int, int, int, float]]
) -> None:
    states = [measured_state(*dims, structure) for *dims, _ in shapes]
    dampings = [damping for *_, damping in shapes]
    for _ in range(2):  # cold and warm
        THOROUGH.refresh(states, dampings)
        for state, (inputs, outputs, groups, damping) in zip(states, shapes, strict=True):
            grad = torch.randn(groups, outputs, inputs)
            curvature = oracles.damped_kronecker(*state.factors(), grad, damping)
            assert_same(THOROUGH.apply(state, grad, 0.1), oracles.solve(curvature, grad), rtol=1e-8)
        for state in states:
            for factor in (state.pair.a, state.pair.g):
                if factor is not None:
                    factor.packed.mul_(1.5)
    assert fallbacks(*states) == [0] * len(states)


@given(exponent=st.floats(0, 8), dim=st.integers(2, 12))
def test_it_inverts_up_to_a_condition_number_of_1e8_without_a_factorisation(exponent: float, dim: int) -> None:
    state = ill_state(10**exponent, dim)
    damping = 10 ** (-2 * exponent)
    THOROUGH.refresh([state], [damping])
    ours, exact = apply_random(state, damping)
    assert_same(ours, exact, rtol=1e-13 * 100**exponent + 1e-9)
    cholesky = Cholesky()
    theirs = cholesky.init(spec(dim, dim, 1, (DENSE, DENSE)), dtype=torch.float64, device=CPU)
    theirs.pair.load(state.pair.tensors())
    cholesky.refresh([theirs], [damping])
    for mine, other in ((state.a, theirs.a.inverse), (state.g, theirs.g.inverse)):
        assert_same(mine.inverse, other, rtol=1e-14 * 10**exponent + 1e-9)
    assert fallbacks(state) == [0]
    assert_same(state.counters()["condition_A"], theirs.counters()["condition_A"], rtol=1e-5)


@every_structure
@given(damping=st.floats(1e-30, 1e30))
def test_before_any_refresh_the_gradient_comes_back(structure: tuple[Structure, Structure], damping: float) -> None:
    grad = torch.randn(2, 3, 4)
    assert_same(THOROUGH.apply(measured_state(structure=structure), grad, damping), grad, rtol=0)


@every_structure
def test_without_accepted_statistics_a_refresh_changes_nothing(structure: tuple[Structure, Structure]) -> None:
    state = THOROUGH.init(spec(4, 3, 2, structure), dtype=torch.float64, device=CPU)
    before = {key: tensor.clone() for key, tensor in state.tensors().items() if key != "factors"}
    THOROUGH.refresh([state], [0.1])
    after = {key: tensor for key, tensor in state.tensors().items() if key != "factors"}
    assert_identical(after, before)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 3), (3, 1), (1, 1)])
@pytest.mark.parametrize("damping", [1e-12, 1.0])
def test_a_scalar_takes_no_steps(inputs: int, outputs: int, damping: float) -> None:
    # Cold, λ would bound the single eigenvalue from below by far too little.
    inverse, state = NewtonSchulz(steps=1, tolerance=1e-12), measured_state(inputs, outputs, 1)
    for factor in (state.pair.a, state.pair.g):
        with edited(factor) as average:
            average.copy_(torch.eye(factor.dim))
    inverse.refresh([state], [damping])
    scalars = [side for side, dim in ((state.a, inputs), (state.g, outputs)) if dim == 1]
    assert all(bool(side.solved.all()) for side in scalars)
    assert int(state.fallbacks) <= 2 - len(scalars)
    ours, exact = apply_random(state, damping)
    assert_same(ours, exact)


# -- warm starts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", [1e2, 1e4, 1e6])
def test_after_a_small_drift_a_few_steps_from_the_last_inverse_do(kappa: float) -> None:
    short, damping = NewtonSchulz(steps=4, tolerance=1e-3), kappa**-2
    warm, cold = ill_state(kappa, 24), ill_state(kappa, 24)
    THOROUGH.refresh([warm], [damping])
    for state in (warm, cold):
        for factor in (state.pair.a, state.pair.g):
            # What ten updates of decay 0.95 leave is 60%.
            with edited(factor) as average:
                rows = torch.randn(1, 256, 24) @ torch.linalg.cholesky(average).mT
                average.mul_(0.6).add_(0.4 * rows.mT @ rows / 256)
    short.refresh([warm, cold], [damping, damping])
    assert fallbacks(warm, cold) == [0, 2]
    ours, exact = apply_random(warm, damping)
    assert_same(ours, exact, rtol=1e-2)


@pytest.mark.parametrize("growth", [1e-6, 1e-2, 1.9, 2.5, 1e2, 1e6, 1e30])
def test_from_a_last_inverse_that_is_out_of_date_it_converges_all_the_same(growth: float) -> None:
    # Beyond 2 the plain iteration diverges: the last inverse must be scaled down, or be left for the identity.
    state = measured_state(6, 5)
    THOROUGH.refresh([state], [0.1])
    state.pair.a.packed.mul_(growth)
    state.pair.g.packed.mul_(1 / growth)
    THOROUGH.refresh([state], [0.1])
    assert fallbacks(state) == [0]
    ours, exact = apply_random(state, 0.1)
    assert_same(ours, exact, rtol=1e-8)


def test_a_group_that_was_never_inverted_starts_from_the_identity_scaled_and_not_from_the_one_it_stands_for() -> None:
    # From the plain identity the least eigenvalue would take log₂ κ steps, from the scaled one half of them.
    state = ill_state(1e8)
    damping = 1e-16
    NewtonSchulz(steps=19, tolerance=1e-5).refresh([state], [damping])
    assert fallbacks(state) == [0]


# -- failures ----------------------------------------------------------------------------------------------------


def test_what_has_not_converged_is_inverted_by_cholesky_and_counted() -> None:
    short = NewtonSchulz(steps=6, tolerance=1e-3)
    ill, well = ill_state(1e6), ill_state(1.5)
    dampings = [1e-12, 1.0]
    short.refresh([ill, well], dampings)
    assert fallbacks(ill, well) == [2, 0]
    for state, damping in zip((ill, well), dampings, strict=True):
        ours, exact = apply_random(state, damping)
        assert_same(ours, exact, rtol=1e-4 if state is ill else 1e-2)
        assert int(state.failed) == int(state.retried) == 0
    ill.pair.a.packed.mul_(1 + 1e-6)
    short.refresh([ill], [1e-12])  # warm now
    assert fallbacks(ill) == [2]


def test_a_result_within_tolerance_is_taken_as_it_is() -> None:
    state = ill_state(30.0)
    loose = NewtonSchulz(steps=4, tolerance=0.5)
    loose.refresh([state], [30.0**-2])
    assert fallbacks(state) == [0]
    ours, exact = apply_random(state, 30.0**-2)
    error = float((ours - exact).abs().max() / exact.abs().max())
    assert 1e-4 < error < 0.5


def test_the_residual_is_that_of_the_damped_factor_in_the_root_mean_square() -> None:
    state = measured_state(4, 3, 1, (DENSE, IDENTITY))
    NewtonSchulz(steps=2, tolerance=1e9).refresh([state], [0.01])
    damped = state.pair.a.average[0] + 0.01 * torch.eye(4)
    residual = float((torch.eye(4) - damped @ state.a.inverse[0]).norm() / 2)
    for tolerance, expected in ((residual * 1.01, 0), (residual * 0.99, 1)):
        again = measured_state(4, 3, 1, (DENSE, IDENTITY))
        again.pair.a.packed.copy_(state.pair.a.packed)
        NewtonSchulz(steps=2, tolerance=tolerance).refresh([again], [0.01])
        assert fallbacks(again) == [expected]


def test_where_cholesky_fails_too_the_last_good_inverse_of_that_group_is_kept() -> None:
    broken, sound = measured_state(), measured_state()
    THOROUGH.refresh([broken, sound], [0.1, 0.1])
    old = broken.a.inverse.clone()
    for state in (broken, sound):
        state.pair.a.packed.mul_(2)
    # Indefinite beyond repair, with the trace of a sound factor: damping stays what it was.
    with edited(broken.pair.a) as average:
        average[1] = torch.diag(torch.tensor([-500.0, 200.0, 200.0, 200.0]))
    THOROUGH.refresh([broken, sound], [0.1, 0.1])
    assert_same(broken.a.inverse[1], old[1], rtol=0)
    assert not torch.allclose(broken.a.inverse[0], old[0])
    assert [(int(state.failed), *fallbacks(state)) for state in (broken, sound)] == [(1, 1), (0, 0)]
    assert broken.setbacks()[1] == 1
    assert broken.condition.isfinite().all()
    ours, exact = apply_random(sound, 0.1)
    assert_same(ours, exact, rtol=1e-8)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("structure", [DENSE, DIAGONAL])
def test_a_factor_that_is_not_finite_keeps_the_last_good_inverse_of_its_group_only(
    structure: Structure, value: float
) -> None:
    state = measured_state(structure=(structure, DENSE))
    THOROUGH.refresh([state], [0.1])
    old = state.pair.a.average.clone()
    state.pair.a.packed.mul_(2)
    with edited(state.pair.a) as average:
        average[1] = value
    THOROUGH.refresh([state], [0.1])
    assert int(state.failed) > 0
    assert state.condition.isfinite().all()
    grad = torch.randn(2, 3, 4)
    # The trace is not finite either, and so is the share that the other factor's group gets.
    in_use = [2 * old[0], state.pair.g.average[0]]
    expected = oracles.solve(oracles.damped_kronecker(in_use[0][None], in_use[1][None], grad[:1], 0.1), grad[:1])
    assert_same(THOROUGH.apply(state, grad, 0.1)[:1], expected, rtol=1e-8)


def test_a_slightly_indefinite_factor_is_inverted_with_a_larger_shift_and_counted() -> None:
    state = measured_state(groups=1)
    with edited(state.pair.g) as average:
        average[0] = torch.diag(torch.tensor([1.0, 2.0, -1e-2]))
    with edited(state.pair.a) as average:
        average[0] = torch.eye(4) * state.pair.g.trace() / 3  # π = 1
    THOROUGH.refresh([state], [1e-5])
    shift = 10 * 1e-5**0.5
    assert_same(state.g.inverse[0], torch.linalg.inv(state.pair.g.average[0] + shift * torch.eye(3)), rtol=1e-8)
    assert (int(state.retried), int(state.failed), *fallbacks(state)) == (1, 0, 1)


# -- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kappa", "expected"), [(30.0, 0), (1e5, 2)])
def test_bfloat16_is_polished_where_it_does_and_replaced_where_it_does_not(kappa: float, expected: int) -> None:
    # At 1e5 bfloat16 diverges, and float32 alone would not.
    low, high = (NewtonSchulz(steps=12, dtype=dtype) for dtype in (torch.bfloat16, None))
    states = [ill_state(kappa, 16, torch.float32) for _ in range(2)]
    for inverse, state, count in ((low, states[0], expected), (high, states[1], 0)):
        inverse.refresh([state], [kappa**-2])
        assert fallbacks(state) == [count]
        ours, exact = apply_random(state, kappa**-2)
        assert_same(ours, exact, rtol=1e-4 if kappa < 100 else 0.1)
        assert state.a.inverse.dtype == torch.float32


def test_the_early_steps_are_in_the_low_precision_and_the_last_two_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = Tensor.__matmul__

    def matmul(left: Tensor, right: Tensor) -> Tensor:
        seen.append(left.dtype)
        return real(left, right)

    state = measured_state(4, 3, 1, (DENSE, IDENTITY), dtype=torch.float32)
    monkeypatch.setattr(Tensor, "__matmul__", matmul)
    NewtonSchulz(steps=5, dtype=torch.bfloat16).refresh([state], [0.1])
    iteration = seen[3:13]  # after the three of the start, before the residual's
    assert iteration == [torch.bfloat16] * 6 + [torch.float32] * 4
    assert seen[:3] == [torch.float32] * 3
    assert seen[13:] == [torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_factors_are_inverted_and_applied_in_float32(dtype: torch.dtype) -> None:
    state = THOROUGH.init(spec(4, 3, 1, (DENSE, DENSE)), dtype=dtype, device=CPU)
    for factor in (state.pair.a, state.pair.g):
        factor.add(torch.diag(torch.arange(1.0, factor.dim + 1)).to(dtype)[None])
    state.pair.rows = 1
    state.fold(1, 1.0)
    THOROUGH.refresh([state], [0.1])
    grad = torch.randn(1, 3, 4, dtype=dtype)
    direction = THOROUGH.apply(state, grad, 0.1)
    assert direction.dtype == torch.float32
    assert_same(direction.double(), solution(state, grad, 0.1), rtol=1e-5)


def test_from_either_side_the_good_side_of_the_inverse_is_used() -> None:
    # X inverts from the right only: with it in the place of its transpose the errors below are tens of percent.
    state = ill_state(1e5, 64, torch.float32)
    NewtonSchulz(steps=16).refresh([state], [1e-10])
    assert fallbacks(state) == [0]
    compute = [factor.double()[0] + 1e-5 * torch.eye(64) for factor in state.factors()]
    grad = torch.randn(1, 64, 64)
    direction = THOROUGH.apply(state, (compute[1] @ grad @ compute[0]).float(), 0.1).double()
    only_a = THOROUGH.apply(state, torch.linalg.solve(state.g.inverse.double(), grad).float(), 0.1).double()
    assert direction.isfinite().all()
    assert_same(only_a @ compute[0], grad, rtol=0.05)


# -- what is reported --------------------------------------------------------------------------------------------


@every_structure
def test_metrics_has_cholesky_s_numbers_and_the_fallbacks(structure: tuple[Structure, Structure]) -> None:
    theirs = Cholesky().init(spec(4, 3, 2, structure), dtype=torch.float64, device=CPU)
    names = measured_state(structure=structure).counters().keys()
    assert names == theirs.counters().keys() | {"fallback_inverses"}


def test_applying_waits_for_no_number_from_the_device() -> None:
    state = THOROUGH.init(spec(4, 3, 2, (DENSE, DENSE)), dtype=torch.float32, device=torch.device("meta"))
    assert THOROUGH.apply(state, torch.empty(2, 3, 4, device="meta"), 0.1).shape == (2, 3, 4)


def test_tensors_load_into_another_state_bitwise_and_share_no_memory() -> None:
    saved, loaded = measured_state(structure=(DENSE, DIAGONAL)), measured_state(structure=(DENSE, DIAGONAL))
    NewtonSchulz(steps=1).refresh([saved], [1e-4])
    loaded.load(saved.tensors())
    assert_identical(loaded.tensors(), saved.tensors())
    assert fallbacks(loaded) == [2]
    assert loaded.a.solved.all()
    for tensor in (*saved.computed().values(), *saved.counted().values()):
        tensor.zero_()
    assert loaded.a.solved.all()
    assert loaded.a.inverse.any()
    assert fallbacks(loaded) == [2]


def test_the_steps_cost_matrix_products_of_dense_factors() -> None:
    dense, mixed = (NewtonSchulz(steps=5).flops(spec(4, 3, 2, (DENSE, kind))) for kind in (DENSE, DIAGONAL))
    assert dense == (2 * 28 * (4**3 + 3**3), 2 * 2 * (3 * 4 * 4 + 3 * 3 * 4))
    assert mixed == (2 * 28 * 4**3, 2 * 2 * 3 * 4 * 4)


def test_it_is_named_with_its_choices_in_the_summary() -> None:
    summary = KFACOptimizer(mlp(), inverse=NewtonSchulz(8, 1e-3, torch.bfloat16)).summary()
    assert summary.blocks[0].inverse == "NewtonSchulz(steps=8, tolerance=0.001, dtype=torch.bfloat16)"
    assert repr(NewtonSchulz()) == "NewtonSchulz(steps=10, tolerance=0.01, dtype=None)"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps of NewtonSchulz must be at least 1, got 0"),
        ({"steps": 2.5}, TypeError, r"steps of NewtonSchulz must be an integer, got 2\.5"),
        ({"tolerance": 0.0}, ValueError, r"tolerance of NewtonSchulz must be finite, above 0, got 0\.0"),
        ({"dtype": torch.float16}, ValueError, "dtype of NewtonSchulz must be one of"),
        ({"dtype": "bfloat16"}, TypeError, "dtype of NewtonSchulz must be a torch.dtype or None, got 'bfloat16'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NewtonSchulz(**arguments)
