from functools import partial

import pytest
import torch
from helpers import oracles, states
from helpers.cases import (
    STRUCTURES,
    LayerCase,
    any_loss,
    conv_cases,
    displacement,
    free_optimizer,
    linear_cases,
    look_alikes,
    snapshot,
)
from helpers.oracles import assert_same
from helpers.plain import edited
from helpers.states import CPU, every_structure, spec
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kfac_optim import Cholesky, Structure, WeightSharing

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

# -- the step, through the optimizer -----------------------------------------------------------------------------


@given(
    case=st.one_of(linear_cases(), conv_cases()),
    structure=st.sampled_from(STRUCTURES),
    sharing=st.sampled_from(WeightSharing),
    damping=st.sampled_from([1e-3, 0.1, 10.0]),
)
def test_the_step_solves_the_damped_kronecker_system(
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


@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"), [(1, 4, False), (4, 1, False), (4, 1, True), (1, 1, False), (1, 1, True)]
)
def test_beside_a_scalar_factor_damping_is_exact(inputs: int, outputs: int, bias: bool) -> None:
    module = nn.Linear(inputs, outputs, bias=bias)
    optimizer = free_optimizer(module, damping=0.3)
    before = snapshot(module)
    any_loss(module(torch.randn(6, inputs))).backward()
    optimizer.step()
    grad = oracles.gradient_matrix(module)
    curvature = oracles.kronecker(*optimizer.factors()[""])
    exact = oracles.solve(curvature + 0.3 * torch.eye(curvature.shape[-1]), grad)
    assert_same(displacement(module, before), exact, rtol=1e-8)


@every_structure
def test_a_group_that_saw_only_zeros_is_damped_all_the_same(structure: tuple[Structure, Structure]) -> None:
    module = nn.Conv1d(4, 6, 1, groups=2, bias=False)
    optimizer = free_optimizer(module, structure=structure, damping=0.01, factor_update_period=100)
    dead = torch.randn(5, 4, 3)
    dead[:, :2] = 0
    any_loss(module(dead)).backward()
    optimizer.step()
    # A later step, on the same factors, in which the dead group has a gradient.
    optimizer.zero_grad()
    before = snapshot(module)
    any_loss(module(torch.randn(5, 4, 3))).backward()
    optimizer.step()
    a, g = optimizer.factors()[""]
    assert a is None or not a[0].any()
    grad = oracles.gradient_matrix(module)
    assert grad[0].any()
    expected = oracles.solve(oracles.damped_kronecker(a, g, grad, 0.01), grad)
    assert_same(displacement(module, before), expected, rtol=1e-8)


def test_a_layer_without_gradient_signal_is_damped_all_the_same() -> None:
    module = nn.Linear(3, 2)
    optimizer = free_optimizer(module, damping=0.01, factor_update_period=100)
    (module(torch.randn(5, 3)) * 1e-200).sum().backward()  # its square is zero
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(module)
    any_loss(module(torch.randn(5, 3))).backward()
    optimizer.step()
    a, g = optimizer.factors()[""]
    assert not g.any()
    grad = oracles.gradient_matrix(module)
    assert_same(
        displacement(module, before), oracles.solve(oracles.damped_kronecker(a, g, grad, 0.01), grad), rtol=1e-8
    )


@pytest.mark.parametrize(("period", "refreshed"), [(100, {0, 1, 2, 4, 7}), (3, {0, 1, 2, 3, 5, 6})])
def test_between_refreshes_the_inverse_is_that_of_the_last_refresh(period: int, refreshed: set[int]) -> None:
    # By period, and while the averages are young whenever they hold half as many samples more.
    module = nn.Linear(3, 2)
    optimizer = free_optimizer(module, damping=0.1, inverse_update_period=period)
    for step in range(9):
        optimizer.zero_grad()
        before = snapshot(module)
        any_loss(module(torch.randn(5, 3))).backward()
        optimizer.step()
        if step in refreshed:
            kept = optimizer.factors()[""]
        grad = oracles.gradient_matrix(module)
        expected = oracles.solve(oracles.damped_kronecker(*kept, grad, 0.1), grad)
        assert_same(displacement(module, before), expected, rtol=1e-8)


# -- the representation alone ------------------------------------------------------------------------------------

CHOLESKY = Cholesky()
measured_state = partial(states.measured_state, CHOLESKY)


@every_structure
def test_before_any_refresh_the_gradient_comes_back(structure: tuple[Structure, Structure]) -> None:
    grad = torch.randn(2, 3, 4)
    assert_same(CHOLESKY.apply(measured_state(structure=structure), grad, 0.1), grad, rtol=0)


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
    CHOLESKY.refresh(states, dampings)
    for state, (inputs, outputs, groups, damping) in zip(states, shapes, strict=True):
        grad = torch.randn(groups, outputs, inputs)
        curvature = oracles.damped_kronecker(*state.factors(), grad, damping)
        assert_same(CHOLESKY.apply(state, grad, 0.1), oracles.solve(curvature, grad), rtol=1e-8)


def test_a_failed_inversion_keeps_the_last_good_inverse_of_its_group_only() -> None:
    broken, sound = measured_state(), measured_state()
    CHOLESKY.refresh([broken, sound], [0.1, 0.1])
    old = broken.a.inverse.clone(), broken.g.inverse.clone()
    for state in (broken, sound):
        state.pair.a.packed.mul_(2)
    # Indefinite beyond repair, with the trace of a sound factor: damping stays what it was.
    with edited(broken.pair.a) as average:
        average[1] = torch.diag(torch.tensor([-500.0, 200.0, 200.0, 200.0]))
    CHOLESKY.refresh([broken, sound], [0.1, 0.1])
    assert_same(broken.a.inverse[1], old[0][1], rtol=0)
    assert not torch.allclose(broken.a.inverse[0], old[0][0])
    assert (int(broken.failed), int(sound.failed)) == (1, 0)
    grad = torch.randn(2, 3, 4)
    expected = oracles.solve(oracles.damped_kronecker(*sound.factors(), grad, 0.1), grad)
    assert_same(CHOLESKY.apply(sound, grad, 0.1), expected, rtol=1e-8)


def test_a_diagonal_that_is_not_finite_keeps_the_last_inverse_and_is_counted() -> None:
    structure = (Structure.DIAGONAL, Structure.DENSE)
    state = measured_state(structure=structure)
    CHOLESKY.refresh([state], [0.1])
    before = state.a.inverse.clone()
    with edited(state.pair.a) as average:
        average[0, 0] = torch.inf
    CHOLESKY.refresh([state], [0.1])
    assert_same(state.a.inverse, before, rtol=0)
    assert state.condition.isfinite().all()
    assert int(state.failed) > 0


def test_a_slightly_indefinite_factor_is_inverted_with_a_larger_shift_and_counted() -> None:
    state = measured_state(groups=1)
    with edited(state.pair.g) as average:
        average[0] = torch.diag(torch.tensor([1.0, 2.0, -1e-2]))
    with edited(state.pair.a) as average:
        average[0] = torch.eye(4) * state.pair.g.trace() / 3  # π = 1
    CHOLESKY.refresh([state], [1e-5])
    shift = 10 * 1e-5**0.5
    assert_same(state.g.inverse[0], torch.linalg.inv(state.pair.g.average[0] + shift * torch.eye(3)), rtol=1e-8)
    assert (int(state.retried), int(state.failed)) == (1, 0)


@pytest.mark.parametrize("structure", [Structure.DENSE, Structure.DIAGONAL])
def test_the_condition_number_is_the_worst_of_the_damped_groups(structure: Structure) -> None:
    state = measured_state(structure=(structure, structure))
    CHOLESKY.refresh([state], [0.5])
    for side, (factor, inverse) in enumerate(zip(state.factors(), (state.a.inverse, state.g.inverse), strict=True)):
        dim = factor.shape[-1]
        damped = torch.linalg.inv(oracles.dense(inverse, 2, dim))
        assert_same(state.condition[side], torch.linalg.cond(damped, p=1).max(), rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_factors_are_inverted_and_applied_in_float32(dtype: torch.dtype) -> None:
    state = CHOLESKY.init(spec(4, 3, 1, (Structure.DENSE, Structure.DENSE)), dtype=dtype, device=CPU)
    for factor in (state.pair.a, state.pair.g):
        factor.add(torch.diag(torch.arange(1.0, factor.dim + 1)).to(dtype)[None])
    state.pair.rows = 1
    state.fold(1, 1.0)
    CHOLESKY.refresh([state], [0.1])
    grad = torch.randn(1, 3, 4, dtype=dtype)
    direction = CHOLESKY.apply(state, grad, 0.1)
    assert direction.dtype == torch.float32
    a, g = state.factors()
    curvature = oracles.damped_kronecker(a.double(), g.double(), grad.double(), 0.1)
    assert_same(direction.double(), oracles.solve(curvature, grad.double()), rtol=1e-5)


# -- inverses in a narrower dtype --------------------------------------------------------------------------------


@given(structure=st.sampled_from(STRUCTURES), groups=st.integers(1, 3), dims=st.tuples(*[st.integers(1, 40)] * 2))
def test_inverses_kept_in_bfloat16_turn_the_direction_by_less_than_a_hundredth(
    structure: tuple[Structure, Structure], groups: int, dims: tuple[int, int]
) -> None:
    narrow, wide = Cholesky(dtype=torch.bfloat16), Cholesky()
    made = []
    for inverse in (narrow, wide):
        torch.manual_seed(0)
        made.append(states.measured_state(inverse, *dims, groups, structure, dtype=torch.float32))
    kept, exact = made
    narrow.refresh([kept], [1e-2])
    wide.refresh([exact], [1e-2])
    grad = torch.randn(groups, *reversed(dims), dtype=torch.float32)
    found, expected = narrow.apply(kept, grad, 1e-2), wide.apply(exact, grad, 1e-2)
    assert found.dtype == torch.float32
    assert all(tensor.dtype == torch.bfloat16 for tensor in kept.computed().values())
    assert float((found - expected).norm()) <= 0.01 * float(expected.norm())
    again = narrow.init(spec(*dims, groups, structure), dtype=torch.float32, device=CPU)
    again.load(kept.tensors())
    assert torch.equal(narrow.apply(again, grad, 1e-2), found)


def test_the_dtype_of_inverses_has_the_range_of_float32() -> None:
    with pytest.raises(ValueError, match="dtype of Cholesky"):
        Cholesky(dtype=torch.float16)
    assert (repr(Cholesky()), repr(Cholesky(dtype=torch.bfloat16))) == ("Cholesky()", "Cholesky(dtype=torch.bfloat16)")
