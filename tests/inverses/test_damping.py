"""Properties that fix the split: shares multiply to λ and stand to each other as mean eigenvalues do."""

import math

import pytest
import torch
from helpers.oracles import assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfac_optim.inverses.damping import Damped, factored_tikhonov

pytestmark = pytest.mark.usefixtures("float64")

dampings = st.floats(1e-8, 1e3)


def traces_of(dims: list[int], groups: int) -> list[Tensor]:
    return [torch.rand(groups) * 10 ** torch.empty(groups).uniform_(-3, 3) + 1e-6 for _ in dims]


def applied(traces: list[Tensor], dims: list[int], damping: float) -> tuple[Tensor, Tensor]:
    """Mean eigenvalue and shift of each factor after scaling, both `[factors, groups]`."""
    damped = factored_tikhonov(traces, dims, damping)
    means = torch.stack([trace / dim * d.scale for trace, dim, d in zip(traces, dims, damped, strict=True)])
    return means, torch.stack([d.shift for d in damped])


@given(dims=st.lists(st.integers(2, 9), min_size=1, max_size=3), groups=st.integers(1, 3), damping=dampings)
def test_shares_multiply_to_the_damping_in_proportion_to_mean_eigenvalues(
    dims: list[int], groups: int, damping: float
) -> None:
    traces = traces_of(dims, groups)
    means, shifts = applied(traces, dims, damping)
    assert_same(means, torch.stack([trace / dim for trace, dim in zip(traces, dims, strict=True)]))
    assert_same(shifts.prod(0), torch.full((groups,), damping))
    ratios = shifts / means
    assert_same(ratios / ratios[0], torch.ones_like(ratios))


@given(damping=dampings, dims=st.tuples(st.integers(2, 9), st.integers(2, 9)))
def test_two_factors_are_balanced_by_pi(damping: float, dims: tuple[int, int]) -> None:
    trace_a, trace_g = traces_of(list(dims), 1)
    a, g = factored_tikhonov([trace_a, trace_g], dims, damping)
    pi = math.sqrt((float(trace_a) / dims[0]) / (float(trace_g) / dims[1]))
    assert_same((a.shift, g.shift), [torch.tensor([pi * damping**0.5]), torch.tensor([damping**0.5 / pi])])


@given(dims=st.lists(st.integers(1, 4), min_size=1, max_size=3), groups=st.integers(1, 3), damping=dampings)
def test_scalar_factors_multiply_and_take_no_share(dims: list[int], groups: int, damping: float) -> None:
    traces = traces_of(dims, groups)
    scalars = math.prod([trace for trace, dim in zip(traces, dims, strict=True) if dim == 1], start=torch.ones(groups))
    matrices = [i for i, dim in enumerate(dims) if dim > 1]
    means, shifts = applied(traces, dims, damping)
    if matrices:
        # With the scalars multiplied in, what remains is damped like any product of matrices.
        assert_same(shifts[matrices].prod(0), torch.full((groups,), damping))
        assert_same(means[matrices].prod(0), scalars * math.prod(traces[i] / dims[i] for i in matrices))
        ratios = shifts[matrices] / means[matrices]
        assert_same(ratios / ratios[0], torch.ones_like(ratios))
        carried = [i for i in range(len(dims)) if dims[i] == 1]
        assert_same(means[carried] + shifts[carried], torch.ones(len(carried), groups))
    else:
        assert_same((means + shifts).prod(0), scalars + damping)


@pytest.mark.parametrize("dims", [[3], [3, 4], [3, 4, 5], [2, 2, 2]], ids=str)
@pytest.mark.parametrize("zero", [0, -1])
def test_a_zero_trace_gives_every_factor_the_same_share_in_its_group_only(dims: list[int], zero: int) -> None:
    traces = traces_of(dims, 2)
    traces[zero][0] = 0
    _, shifts = applied(traces, dims, 0.01)
    assert_same(shifts[:, 0], torch.full((len(dims),), 0.01 ** (1 / len(dims))))
    _, alone = applied([trace[1:] for trace in traces], dims, 0.01)
    assert_same(shifts[:, 1], alone[:, 0])


@pytest.mark.parametrize("dims", [[1], [1, 4], [4, 1], [1, 1], [1, 4, 1], [1, 4, 5], [4, 1, 5]], ids=str)
def test_a_zero_scalar_leaves_the_damping(dims: list[int]) -> None:
    traces = [torch.zeros(1) if dim == 1 else torch.ones(1) for dim in dims]
    means, shifts = applied(traces, dims, 0.01)
    assert_same((means + shifts).prod(0), torch.tensor([0.01]))


def test_narrow_ranges_do_not_overflow() -> None:
    traces = [torch.tensor([1e30], dtype=torch.float32), torch.tensor([1e-30], dtype=torch.float32)]
    for shares in (factored_tikhonov(traces, [2, 2], 1e-3), factored_tikhonov(traces[::-1], [2, 2], 1e-3)):
        assert all(share.shift.isfinite().all() and (share.shift > 0).all() for share in shares)
        assert_same(shares[0].shift.double() * shares[1].shift.double(), torch.tensor([1e-3]), rtol=1e-5)


@given(damping=dampings, dims=st.tuples(*[st.integers(2, 9)] * 3))
def test_three_factors_are_balanced_by_cube_roots(damping: float, dims: tuple[int, int, int]) -> None:
    traces = traces_of(list(dims), 2)
    means = [trace / dim for trace, dim in zip(traces, dims, strict=True)]
    cube_root = (means[0] * means[1] * means[2]) ** (1 / 3)
    shares = factored_tikhonov(traces, dims, damping)
    assert_same([share.shift for share in shares], [damping ** (1 / 3) * mean / cube_root for mean in means])
    assert_same(shares[0].shift * shares[1].shift * shares[2].shift, torch.full((2,), damping))


def test_a_damped_factor_is_scaled_and_shifted_on_its_diagonal_group_by_group() -> None:
    damped = Damped(scale=torch.tensor([2.0, 3.0]), shift=torch.tensor([0.5, 0.25]))
    dense = torch.randn(2, 3, 3)
    before = dense.clone()
    expected = torch.stack([2 * dense[0] + 0.5 * torch.eye(3), 3 * dense[1] + 0.25 * torch.eye(3)])
    assert_same(damped.of(dense), expected)
    diagonals = [part.diagonal(dim1=1, dim2=2) for part in (dense, expected)]
    assert_same(damped.of(diagonals[0]), diagonals[1])
    assert_same(dense, before, rtol=0)
