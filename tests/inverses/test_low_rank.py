import copy
from functools import partial

import pytest
import torch
from helpers import oracles, states
from helpers.cases import any_loss, displacement, free_optimizer, snapshot
from helpers.oracles import assert_same
from helpers.plain import edited, mlp
from helpers.states import CPU, assert_resumes_bitwise, every_structure, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import Cholesky, KFACOptimizer, LowRank, Structure
from kfac_optim.blocks.preconditioning import Stacks, to_params
from kfac_optim.inverses.damped.deflation import DeflatedState, Deflation
from kfac_optim.inverses.damping import factored_tikhonov
from kfac_optim.inverses.pair_inverse import SymmetricInverse
from kfac_optim.linalg.eigen import leading_eigenpairs, random_basis

pytestmark = pytest.mark.usefixtures("float64")

DENSE, DIAGONAL = Structure.DENSE, Structure.DIAGONAL


def factor_of(values: Tensor) -> Tensor:
    """A symmetric matrix with these eigenvalues, in a random basis."""
    basis = torch.linalg.qr(torch.randn(len(values), len(values))).Q
    return basis @ torch.diag(values) @ basis.mT


def state_with(inverse: LowRank, a: Tensor, g: Tensor) -> DeflatedState:
    state = inverse.init(spec(len(a), len(g), 1, (DENSE, DENSE)), dtype=torch.float64, device=CPU)
    for factor, matrix in ((state.pair.a, a), (state.pair.g, g)):
        factor.add(matrix[None].clone())
    state.pair.rows = 1
    state.fold(1, 1.0)
    return state


def model_of(factor: Tensor, rank: int) -> Tensor:
    """The factor with all eigenvalues but the largest `rank` replaced by their mean."""
    values, vectors = torch.linalg.eigh(factor)
    values[:-rank] = values[:-rank].mean()
    return vectors @ torch.diag(values) @ vectors.mT


def shifts(a: Tensor, g: Tensor, damping: float) -> list[Tensor]:
    traces = [factor.trace()[None] for factor in (a, g)]
    return [each.shift for each in factored_tikhonov(traces, [len(a), len(g)], damping)]


# -- what is applied ---------------------------------------------------------------------------------------------


@given(
    dims=st.tuples(st.integers(3, 12), st.integers(3, 12)),
    rank=st.integers(1, 3),
    damping=st.sampled_from([1e-4, 1e-2]),  # the larger the slower it converges
    seed=st.integers(0, 99),
)
def test_a_converged_inverse_is_that_of_the_leading_eigenpairs_and_the_mean_of_the_rest(
    dims: tuple[int, int], rank: int, damping: float, seed: int
) -> None:
    torch.manual_seed(seed)
    a, g = (factor_of(3.0 ** -torch.arange(dim)) for dim in dims)
    inverse = LowRank(rank, iterations=300)
    state = state_with(inverse, a, g)
    inverse.refresh([state], [damping])
    damped = []
    for factor, shift in zip((a, g), shifts(a, g, damping), strict=True):
        model = model_of(factor, rank) if len(factor) >= 4 * rank else factor
        damped.append(model + shift * torch.eye(len(factor)))
    grad = torch.randn(1, len(g), len(a))
    expected = torch.linalg.solve(damped[1], grad[0]) @ torch.linalg.inv(damped[0])
    assert_same(inverse.apply(state, grad, damping)[0], expected, rtol=1e-7)


@given(
    dims=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    groups=st.integers(1, 3),
    rank=st.integers(1, 4),
    rows=st.integers(1, 5),
    structure=st.sampled_from([(DENSE, DENSE), (DIAGONAL, DENSE), (DENSE, Structure.IDENTITY)]),
)
def test_factors_of_no_higher_rank_are_inverted_as_by_cholesky(
    dims: tuple[int, int], groups: int, rank: int, rows: int, structure: tuple[Structure, Structure]
) -> None:
    made = []
    for inverse in (LowRank(rank, iterations=300), Cholesky()):
        torch.manual_seed(0)
        state = states.measured_state(inverse, *dims, groups, structure, rank=min(rows, rank))
        inverse.refresh([state], [0.1])
        made.append(state)
    grad = torch.randn(groups, dims[1], dims[0])
    found, expected = LowRank(rank).apply(made[0], grad, 0.1), Cholesky().apply(made[1], grad, 0.1)
    assert_same(found, expected, rtol=1e-7)


@pytest.mark.parametrize("inverse", [LowRank(4, iterations=300), LowRank(4, sketch=4)], ids=repr)
@settings(max_examples=10)
@given(dims=st.tuples(*[st.integers(16, 24)] * 2), rows=st.integers(1, 4), damping=st.sampled_from([1e-2, 1.0]))
def test_the_step_of_a_layer_whose_factors_are_of_low_rank_solves_its_system(
    inverse: LowRank, dims: tuple[int, int], rows: int, damping: float
) -> None:
    module = nn.Linear(*dims)
    optimizer = free_optimizer(module, inverse=inverse, damping=damping)
    before = snapshot(module)
    any_loss(module(torch.randn(rows, dims[0]))).backward()
    optimizer.step()
    grad = oracles.gradient_matrix(module)
    curvature = oracles.damped_kronecker(*optimizer.factors()[""], grad, damping)
    assert_same(displacement(module, before), oracles.solve(curvature, grad), rtol=1e-6)


@given(exponent=st.floats(0.3, 3), rank=st.integers(1, 5), damping=st.sampled_from([1e-4, 1e-2, 1.0]))
def test_no_direction_is_off_by_more_than_the_cutoff_says(exponent: float, rank: int, damping: float) -> None:
    """Between `γ/(μ+γ)` and `(d_r+γ)/(μ+γ)` times what the whole factor gives, once the iteration has converged."""
    torch.manual_seed(0)
    a, g = factor_of(torch.arange(1.0, 21.0) ** -exponent), torch.eye(1)
    inverse = LowRank(rank, iterations=400)
    state = state_with(inverse, a, g)
    inverse.refresh([state], [damping])
    shift = float(shifts(a, g, damping)[0])
    kept = torch.cat([inverse.apply(state, row[None, None], damping)[0] for row in torch.eye(20)])
    exact = torch.linalg.inv(a + shift * torch.eye(20))
    ratio = torch.linalg.eigvals(kept @ torch.linalg.inv(exact)).real
    rest = float(torch.linalg.eigvalsh(a)[:-rank].mean()) + shift
    assert float(ratio.max()) <= (float(state.cutoff[0]) + 1) * shift / rest * (1 + 1e-6)
    assert float(ratio.min()) >= shift / rest * (1 - 1e-6)


@every_structure
def test_before_any_refresh_the_gradient_comes_back(structure: tuple[Structure, Structure]) -> None:
    grad = torch.randn(2, 9, 8)
    state = states.measured_state(LowRank(2), 8, 9, 2, structure)
    assert_same(LowRank(2).apply(state, grad, 0.1), grad, rtol=0)


def test_the_gradient_is_left_as_it_is() -> None:
    state = states.measured_state(LowRank(2), 8, 9, 1)
    LowRank(2).refresh([state], [0.1])
    grad = torch.randn(1, 9, 8)
    before = grad.clone()
    LowRank(2).apply(state, grad, 0.1)
    assert torch.equal(grad, before)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(40, 6), (40,)),  # A is deflated alone
        (nn.Linear(40, 30), (40,)),  # both are
        (nn.Conv2d(4, 5, 3).to(memory_format=torch.channels_last), (4, 6, 6)),
    ],
    ids=["A", "both", "convolution"],
)
def test_a_weight_and_its_bias_go_through_apart_as_they_do_in_one_matrix(
    layer: nn.Linear | nn.Conv2d, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(copy.deepcopy(layer).double())
    optimizer = KFACOptimizer(model, lr=0.1, inverse=LowRank(4))
    model(torch.randn(9, *shape, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    (block,) = optimizer._binding.coverage.blocks
    grads = [torch.randn_like(param) for param in block.params]
    columns = [grad.reshape(1, block.spec.out_dim, -1) for grad in grads]
    before = [column.clone() for column in columns]
    apart = block.inverse.apply_to_columns(block.state, columns, 0.0)
    assert apart is not None
    assert all(map(torch.equal, columns, before))
    together = block.inverse.apply(block.state, torch.cat(columns, -1), 0.0)
    torch.testing.assert_close(torch.cat(apart, -1), together, rtol=1e-12, atol=1e-12)
    (in_shape,) = Stacks().precondition([block], [grads])
    for part, whole, param in zip(in_shape, to_params(block, together, grads), block.params, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)
        assert part.stride() == param.stride()


def test_in_float32_a_leading_direction_of_a_million_dampings_keeps_its_small_rest() -> None:
    values = torch.cat([torch.full((4,), 1e6), torch.zeros(60)])
    a = factor_of(values)
    inverse = LowRank(4)
    state = inverse.init(spec(64, 1, 1, (DENSE, DENSE)), dtype=torch.float32, device=CPU)
    state.pair.a.add(a[None].float())
    state.pair.g.add(torch.ones(1, 1, 1, dtype=torch.float32))
    state.pair.rows = 1
    state.fold(1, 1.0)
    inverse.refresh([state], [1.0])
    leading = torch.linalg.eigh(a).eigenvectors[:, -4:].mT.sum(0)
    found = inverse.apply(state, leading.float()[None, None], 1.0)
    assert float(found.norm()) < 2e-5 * float(leading.norm())


# -- the eigenpairs ----------------------------------------------------------------------------------------------

measured_state = partial(states.measured_state, LowRank(2), 8, 9)


def test_each_refresh_goes_on_where_the_last_one_ended() -> None:
    a = factor_of(1.3 ** -torch.arange(20.0))
    inverse, target = LowRank(3, iterations=1), model_of(a, 3)
    state = state_with(inverse, a, torch.eye(1))
    errors = []
    for _ in range(40):
        inverse.refresh([state], [1e-6])
        basis = state.a.basis[0]
        errors.append(float((basis.mT @ target @ basis - basis.mT @ a @ basis).norm()))
    assert errors[-1] < 1e-3 * errors[0]


def test_a_direction_that_a_factor_of_lower_rank_did_not_have_is_found_later() -> None:
    values = torch.zeros(16)
    values[0] = 1.0
    inverse = LowRank(4)
    state = state_with(inverse, torch.diag(values), torch.eye(1))
    inverse.refresh([state], [1e-3])
    with edited(state.pair.a) as average:
        average[0, 15, 15] = 5.0
    inverse.refresh([state], [1e-3])
    grad = torch.zeros(1, 1, 16)
    grad[..., 15] = 1.0
    assert float(inverse.apply(state, grad, 1e-3).norm()) < 0.3  # 1/5, and √λ/π


@given(groups=st.integers(1, 3), dim=st.integers(1, 10), data=st.data())
def test_leading_eigenpairs_are_those_of_the_whole_decomposition(groups: int, dim: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, dim))
    matrix = torch.stack([factor_of(4.0 ** -torch.arange(dim)) for _ in range(groups)])
    start = random_basis(dim, rank, dtype=torch.float64, device=CPU).expand(groups, -1, -1)
    values, vectors, attempts = leading_eigenpairs(matrix, torch.full((groups,), 1e-9), start, 60)
    assert attempts.tolist() == [1] * groups
    assert_same(values, torch.linalg.eigvalsh(matrix)[:, -rank:], rtol=1e-6)
    assert_same(vectors.mT @ vectors, torch.eye(rank).expand(groups, -1, -1), rtol=1e-10)
    assert_same(matrix @ vectors, vectors * values[:, None, :], rtol=1e-6)


def test_the_random_start_moves_no_generator_and_is_the_same_on_every_rank() -> None:
    before = torch.get_rng_state()
    first, second = (random_basis(9, 3, dtype=torch.float32, device=CPU) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)


# -- failures, measures, choices ---------------------------------------------------------------------------------


def test_a_factor_that_cannot_be_decomposed_keeps_the_last_good_inverse_of_its_group_only() -> None:
    state, inverse = measured_state(groups=2), LowRank(2)
    inverse.refresh([state], [0.1])
    basis, weights, scale = (tensor.clone() for tensor in state.a)
    with edited(state.pair.a) as average:
        average *= 2
        average[1, 0, 0] = torch.nan
    inverse.refresh([state], [0.1])
    for now, before in zip(state.a, (basis, weights, scale), strict=True):
        assert torch.equal(now[1], before[1])
        assert not torch.equal(now[0], before[0])
    assert int(state.failed) == 1
    assert all(tensor.isfinite().all() for tensor in state.computed().values())


def test_condition_and_cutoff_are_those_of_the_worst_group() -> None:
    a = factor_of(2.0 ** -torch.arange(12.0))
    inverse = LowRank(3, iterations=200)
    state = state_with(inverse, a, torch.eye(2))
    inverse.refresh([state], [0.01])
    shift, rest = float(shifts(a, torch.eye(2), 0.01)[0]), float((2.0 ** -torch.arange(3.0, 12.0)).mean())
    assert_same(state.cutoff, torch.tensor([0.25 / shift, 0.0]), rtol=1e-7)
    assert float(state.condition[0]) == pytest.approx((1 + shift) / (rest + shift), rel=1e-7)
    counters = state.counters()
    assert (float(counters["cutoff_A"]), float(counters["cutoff_G"])) == tuple(state.cutoff.tolist())


def test_each_part_brings_its_own_measures_together() -> None:
    state = measured_state(groups=1)
    LowRank(2).refresh([state], [0.1])
    assert float(state.cutoff.min()) > 0
    for part, side in (("A", 0), ("G", 1)):
        measures = state.measures(part)
        assert [float(each) for each in measures] == [float(state.condition[side]), 0.0, float(state.cutoff[side])]
    assert state.measures("")[-1].tolist() == state.cutoff.tolist()


def test_metrics_tell_the_worst_cutoff_of_all_blocks() -> None:
    torch.manual_seed(0)
    model = mlp(sizes=(12, 9, 3))
    optimizer = KFACOptimizer(model, lr=0.1, inverse=LowRank(1))
    any_loss(model(torch.randn(30, 12))).backward()
    optimizer.step()
    cutoffs = [block.state.cutoff for block in optimizer._binding.coverage.blocks]
    assert optimizer.metrics()["cutoff_A"] == max(float(each[0]) for each in cutoffs)


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    def make() -> tuple[nn.Module, KFACOptimizer]:
        torch.manual_seed(0)
        model = mlp()
        return model, KFACOptimizer(model, lr=0.1, inverse=LowRank(1), inverse_update_period=3, factor_update_period=1)

    assert_resumes_bitwise(make, steps=8, saved=5)


def test_thin_products_are_for_factors_where_they_halve_the_cost() -> None:
    state = LowRank(3).init(spec(12, 11, 1, (DENSE, DENSE)), dtype=torch.float64, device=CPU)
    assert isinstance(state.a, Deflation)
    assert isinstance(state.g, SymmetricInverse)


def test_state_of_a_wide_layer_is_a_few_vectors() -> None:
    layer = spec(1000, 500, 1, (DENSE, DENSE))
    parts = LowRank(32).parts(layer)
    assert [part.held for part in parts] == [1000 * 32 + 33, 500 * 32 + 33]
    assert LowRank(32).flops(layer).apply == 4 * 32 * 2 * 1000 * 500
    assert LowRank(500).flops(layer) == Cholesky().flops(layer)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank of LowRank must be at least 1, got 0"),
        ({"rank": 2.5}, TypeError, r"rank of LowRank must be an integer, got 2\.5"),
        ({"iterations": 0}, ValueError, "iterations of LowRank must be at least 1, got 0"),
    ],
)
def test_bad_choices_are_refused(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LowRank(**arguments)


def test_its_name_says_what_was_chosen() -> None:
    assert repr(LowRank()) == "LowRank()"
    assert repr(LowRank(16, sketch=40)) == "LowRank(rank=16, sketch=40)"
