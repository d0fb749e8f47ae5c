"""Inverses and roots of factors: against dense powers in float64, relative to each factor, and of nothing."""

from functools import partial

import pytest
import torch
from helpers import cases, oracles, states
from helpers.cases import LayerCase, any_loss, conv_cases, displacement, linear_cases, snapshot
from helpers.oracles import MaybeFactor, assert_same
from helpers.plain import assert_identical, batch, mlp, square_loss
from helpers.states import CPU, every_structure, spec
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import InverseAndRoot, KFACOptimizer, Structure

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

DENSE, DIAGONAL, IDENTITY = Structure
measured_state = partial(states.measured_state, InverseAndRoot())


def power(factor: MaybeFactor, groups: int, dim: int, damping: float, exponent: float = -1) -> Tensor:
    """`(F + ε n I)^exponent`, `[groups, dim, dim]`; of nothing the identity."""
    whole = oracles.dense(factor, groups, dim)
    if factor is None:
        return whole
    mean = whole.diagonal(dim1=-2, dim2=-1).mean(-1)
    shift = torch.where(mean > 0, damping * mean, 1.0)
    values, basis = torch.linalg.eigh(whole + shift[:, None, None] * torch.eye(dim))
    return basis @ torch.diag_embed(values**exponent) @ basis.mT


def expected(factors: tuple[MaybeFactor, MaybeFactor], grad: Tensor, damping: float) -> Tensor:
    groups, rows, columns = grad.shape
    a, g = factors
    return power(g, groups, rows, damping) @ grad @ power(a, groups, columns, damping)


@every_structure
@given(case=st.one_of(linear_cases(), conv_cases()), damping=st.sampled_from([1e-2, 0.1, 3.0]))
def test_the_step_goes_through_the_inverses_of_both_factors(
    structure: tuple[Structure, Structure], case: LayerCase, damping: float
) -> None:
    module = case.module()
    optimizer = cases.free_optimizer(module, inverse=InverseAndRoot(damping), structure=structure)
    before = snapshot(module)
    any_loss(module(case.input())).backward()
    optimizer.step()
    grad = oracles.gradient_matrix(module)
    assert_same(displacement(module, before), expected(optimizer.factors()[""], grad, damping), rtol=1e-6)


@every_structure
@pytest.mark.parametrize("rank", [0, 1])
def test_factors_of_zeros_and_of_rank_one_have_both_powers(structure: tuple[Structure, Structure], rank: int) -> None:
    state = measured_state(structure=structure, rank=rank)
    InverseAndRoot().refresh([state], [0.1])
    grad = torch.randn(2, 3, 4)
    assert_same(InverseAndRoot().apply(state, grad, 0.1), expected(state.factors(), grad, 0.1), rtol=1e-8)
    root = power(state.factors()[0], 2, 4, 0.1, -0.5)
    assert_same(InverseAndRoot().apply_root(state, grad), grad @ root, rtol=1e-8)


def test_before_anything_was_measured_the_gradient_comes_back() -> None:
    state = InverseAndRoot().init(spec(4, 3, 2, (DENSE, DENSE)), dtype=torch.float64, device=CPU)
    grad = torch.randn(2, 3, 4)
    assert torch.equal(InverseAndRoot().apply(state, grad, 0.1), grad)


def test_the_size_of_the_loss_and_lambda_turn_nothing() -> None:
    """A loss a million times as large has a natural gradient of a millionth."""
    found = []
    for factor, damping in ((1.0, 1e-3), (1e6, 10.0)):
        model = mlp()
        optimizer = KFACOptimizer(model, lr=1.0, inverse=InverseAndRoot(), kl_clip=None, damping=damping)
        before = snapshot(model)
        (factor * square_loss(model(batch()))).backward()
        optimizer.step()
        found.append(torch.cat([(before[name] - value).flatten() for name, value in snapshot(model).items()]))
    assert_same(1e6 * found[1], found[0], rtol=1e-9)


def test_condition_numbers_are_those_of_the_damped_factors() -> None:
    module = nn.Linear(4, 3)
    optimizer = KFACOptimizer(module, lr=0.0, inverse=InverseAndRoot(0.5))
    any_loss(module(torch.randn(6, 4))).backward()
    optimizer.step()
    for factor, name in zip(optimizer.factors()[""], ("condition_A", "condition_G"), strict=True):
        assert factor is not None
        values = torch.linalg.eigvalsh(factor[0])
        values = values.clamp(min=0) + 0.5 * values.mean()
        torch.testing.assert_close(optimizer.metrics()[name], float(values.max() / values.min()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [8, 300], ids=["whole", "sketched"])
def test_gradients_whose_squares_are_nearly_nothing_have_finite_powers(width: int) -> None:
    """Those of a network that fits its data: the inverse of their mean square is beyond the largest float32."""
    module = nn.Linear(4, width, dtype=torch.float32)
    optimizer = KFACOptimizer(module, lr=0.0, inverse=InverseAndRoot())
    (1e-20 * any_loss(module(torch.randn(6, 4, dtype=torch.float32)))).backward()
    optimizer.step()
    assert all(tensor.isfinite().all() for tensor in inverses(optimizer).values())
    assert optimizer.metrics()["failed_refreshes"] == 0


def test_where_the_trace_overflows_the_last_powers_stand() -> None:
    module = nn.Linear(300, 3, dtype=torch.float32)
    optimizer = KFACOptimizer(module, lr=0.0, inverse=InverseAndRoot(sketch=None), factor_update_period=1)
    x = torch.randn(6, 300, dtype=torch.float32)
    found = []
    for size in (1.0, 3e18):
        optimizer.zero_grad()
        any_loss(module(x * size) / size).backward()
        optimizer.step()
        found.append({name: tensor.clone() for name, tensor in inverses(optimizer).items() if name.startswith("A")})
    assert_identical(found[1], found[0])
    assert optimizer.metrics()["failed_refreshes"] == 1


def inverses(optimizer: KFACOptimizer) -> dict[str, Tensor]:
    """By side and part, of the only layer."""
    held = optimizer.state_dict()["state"][0]["kfac"]["inverse"]
    return {name: tensor for name, tensor in held.items() if name[:2] in ("A_", "G_")}
