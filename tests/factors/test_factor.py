"""Running averages, alone and through the optimizer, and the scale that the loss's mean gives to `G`."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.cases import measure, snapshot
from helpers.oracles import assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_optim import KFACOptimizer, LossTerms, Structure
from kfac_optim.factors.factor import Elsewhere, Factor
from kfac_optim.specs import FactorShape

pytestmark = pytest.mark.usefixtures("float64")

YES, NO = torch.tensor(True), torch.tensor(False)


def new_factor(structure: Structure = Structure.DENSE, dtype: torch.dtype = torch.float64, groups: int = 2) -> Factor:
    return Factor(groups, 3, structure, dtype=dtype, device=torch.device("cpu"))


def random_moment(factor: Factor) -> Tensor:
    moment = torch.randn_like(factor.average)
    return moment + moment.mT if factor.structure is Structure.DENSE else moment


def weighted_mean(samples: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return sum(weight * sample for weight, sample in zip(weights, samples, strict=True)) / sum(weights)


# -- one factor --------------------------------------------------------------------------------------------------

folds = st.lists(
    st.tuples(st.integers(0, 50), st.floats(0.3, 1), st.booleans()),  # mass, decay, accepted
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("structure", [Structure.DENSE, Structure.DIAGONAL])
@given(history=folds)
def test_average_is_the_mean_weighted_by_mass_and_decay(
    structure: Structure, history: list[tuple[int, float, bool]]
) -> None:
    factor = new_factor(structure)
    samples, weights = [], []
    for mass, decay, accepted in history:
        moment = random_moment(factor)
        factor.add(moment.clone())
        factor.fold(scale=0.5, mass=mass, decay=decay, accept=YES if accepted else NO)
        samples.append(moment * 0.5)
        weights = [weight * decay for weight in weights] + [mass * accepted]
    assert_same(factor.mass, torch.tensor(float(sum(weights))))
    assert_same(factor.average, weighted_mean(samples, weights) if sum(weights) else torch.zeros_like(factor.average))


@pytest.mark.parametrize("decay", [0.1, 0.95, 1.0])
def test_the_first_sample_is_taken_whole(decay: float) -> None:
    factor = new_factor()
    moment = random_moment(factor)
    factor.add(moment.clone())
    factor.fold(scale=1, mass=7, decay=decay, accept=YES)
    assert_same(factor.average, moment, rtol=0)


def test_moments_of_one_step_add_up_and_are_normalised_once() -> None:
    factor = new_factor()
    parts = [random_moment(factor) for _ in range(3)]
    for part in parts:
        factor.add(part.clone())
    factor.fold(scale=1 / 12, mass=12, decay=0.9, accept=YES)
    assert_same(factor.average, sum(parts) / 12)
    assert factor.pending is None


@given(history=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_averages_of_two_workers_merge_exactly(history: list[tuple[int, int]]) -> None:
    left, right, both = new_factor(), new_factor(), new_factor()
    for n_left, n_right in history:
        moments = [random_moment(left) for _ in range(2)]
        for factor, moment, n in zip((left, right), moments, (n_left, n_right), strict=True):
            factor.add(moment.clone())
            factor.fold(scale=1, mass=n, decay=0.8, accept=YES)
        total = n_left + n_right
        both.add(n_left * moments[0] + n_right * moments[1])
        both.fold(scale=1 / max(total, 1), mass=total, decay=0.8, accept=YES)
    assert_same(left.mass + right.mass, both.mass)
    if both.mass > 0:
        assert_same((left.mass * left.average + right.mass * right.average) / both.mass, both.average)


@pytest.mark.parametrize("structure", [Structure.DENSE, Structure.DIAGONAL])
@given(
    masses=st.lists(st.integers(0, 9), min_size=2, max_size=4),
    groups=st.integers(1, 3),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_what_others_send_is_merged_by_mass(
    structure: Structure, masses: list[int], groups: int, dtype: torch.dtype
) -> None:
    """Before and after folds: each average is that of the samples of both, and the others start anew."""
    own, *others = (new_factor(structure, dtype, groups) for _ in masses)
    whole = new_factor(structure, dtype=torch.float64, groups=groups)
    for _ in range(2):
        samples = []
        for factor, mass in zip((own, *others), masses, strict=True):
            moment = random_moment(factor)
            factor.add(moment.clone())
            factor.fold(scale=1, mass=mass, decay=0.5, accept=YES)
            samples.append(moment.double())
        count = sum(masses)
        whole.add(sum(mass * moment for mass, moment in zip(masses, samples, strict=True)) / max(count, 1))
        whole.fold(scale=1, mass=count, decay=0.5, accept=YES)
        assert all(factor.packed.numel() == FactorShape(structure, groups, 3).packed for factor in others)
        own.merge(
            sum(factor.packed.flatten().to(own.mass.dtype) * factor.mass for factor in others),
            sum(factor.mass for factor in others),
        )
        for factor in others:
            factor.forget()
            assert not factor.packed.any()
            assert not factor.held()
        assert own.dtype == own.average.dtype == dtype
        rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
        assert_same(own.average.double(), whole.average, rtol=rtol)
        assert_same(own.mass.double(), whole.mass, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("held", [0, 5])
def test_where_others_have_nothing_an_average_stays_to_the_bit(dtype: torch.dtype, held: int) -> None:
    factor = new_factor(dtype=dtype)
    factor.packed.copy_(torch.randn_like(factor.packed))
    factor.packed[0, 0] = -0.0
    factor.mass.fill_(held)
    before = factor.packed.clone()
    factor.merge(torch.zeros(12, dtype=factor.mass.dtype), torch.zeros_like(factor.mass))
    assert torch.equal(factor.packed, before)
    assert torch.equal(factor.packed.signbit(), before.signbit())
    assert float(factor.mass) == held


def test_forgetting_leaves_the_sum_of_the_step() -> None:
    factor = new_factor()
    moment = random_moment(factor)
    for _ in range(2):
        factor.add(moment.clone())
        factor.fold(scale=1, mass=3, decay=1, accept=YES)
    packed = factor.packed
    factor.add(moment.clone())
    factor.forget()
    assert factor.packed is packed
    factor.fold(scale=2, mass=3, decay=1, accept=YES)
    assert_same(factor.average, 2 * moment, rtol=0)


@given(mass=st.integers(0, 9), held=st.integers(0, 9), stated=st.booleans())
def test_ageing_is_a_fold_of_zeros(mass: int, held: int, stated: bool) -> None:
    aged, folded = new_factor(), new_factor()
    moment = random_moment(aged)
    for factor in (aged, folded):
        factor.add(moment.clone())
        factor.fold(scale=1, mass=held, decay=1, accept=YES)
    aged.age(0.7, torch.tensor(float(mass)) if stated else mass)
    folded.add(torch.zeros_like(moment))
    folded.fold(scale=1, mass=mass, decay=0.7, accept=YES)
    assert_same(aged.average, folded.average, rtol=1e-15)
    assert torch.equal(aged.mass, folded.mass)


@pytest.mark.parametrize("terms", [torch.nan, torch.inf, -3.0])
def test_an_impossible_number_of_terms_weighs_nothing(terms: float) -> None:
    factor = new_factor()
    factor.add(random_moment(factor))
    factor.fold(scale=1, mass=4, decay=1, accept=YES)
    before = factor.packed.clone()
    factor.age(0.5, torch.tensor(terms))
    assert torch.equal(factor.packed, before)
    assert float(factor.mass) == 2


def test_what_is_kept_elsewhere_has_the_trace_and_the_mass_that_were_told() -> None:
    factor = new_factor()
    assert not factor.held()
    told = torch.tensor([3.0, 4.0])
    factor.elsewhere = Elsewhere(told, torch.tensor(0.0))
    assert not factor.held()
    factor.elsewhere = Elsewhere(told, torch.tensor(2.0))
    assert factor.held()
    assert factor.trace() is told
    factor.elsewhere = Elsewhere(told, torch.tensor(0.0))
    factor.add(random_moment(factor))
    factor.fold(scale=1, mass=4, decay=1, accept=YES)
    assert factor.held()


@pytest.mark.parametrize("structure", [Structure.DENSE, Structure.DIAGONAL])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_refused_sample_leaves_the_average_bitwise_and_only_decays_the_mass(structure: Structure, bad: float) -> None:
    factor = new_factor(structure)
    factor.add(random_moment(factor))
    factor.fold(scale=1, mass=5, decay=0.9, accept=YES)
    before = factor.packed.clone()
    spoiled = random_moment(factor)
    spoiled[1, ..., 0] = bad
    factor.add(spoiled)
    finite = factor.pending_is_finite()
    assert finite.tolist() == [group != 1 for group in range(factor.groups)]
    finite = finite.all()
    factor.fold(scale=1, mass=3, decay=0.9, accept=finite)
    assert torch.equal(factor.packed.view(torch.int64), before.view(torch.int64))
    assert_same(factor.mass, torch.tensor(5 * 0.9))
    factor.add(random_moment(factor))
    assert factor.pending_is_finite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_mass_is_exact_whatever_the_dtype_of_the_factor(dtype: torch.dtype) -> None:
    factor = new_factor(dtype=dtype)
    for _ in range(300):
        factor.add(torch.ones_like(factor.average))
        factor.fold(scale=1, mass=1001, decay=1, accept=YES)
    assert float(factor.mass) == 300 * 1001
    assert_same(factor.average, torch.ones_like(factor.average), rtol=0)


@pytest.mark.parametrize("structure", [Structure.DENSE, Structure.DIAGONAL])
def test_trace_sums_the_diagonal_of_each_group(structure: Structure) -> None:
    factor = new_factor(structure)
    factor.add(random_moment(factor))
    factor.fold(scale=1, mass=1, decay=1, accept=YES)
    matrices = oracles.dense(factor.average, 2, 3)
    assert_same(factor.diagonal(), matrices.diagonal(dim1=-2, dim2=-1), rtol=0)
    assert_same(factor.trace(), torch.stack([matrix.trace() for matrix in matrices]))


@given(dim=st.integers(1, 6), groups=st.integers(1, 3), dtype=st.sampled_from([torch.float64, torch.bfloat16]))
def test_of_a_dense_average_one_triangle_is_kept_which_makes_it_exactly_symmetric(
    dim: int, groups: int, dtype: torch.dtype
) -> None:
    factor = Factor(groups, dim, Structure.DENSE, dtype=dtype, device=torch.device("cpu"))
    assert (factor.groups, factor.dim, factor.dtype, factor.device.type) == (groups, dim, dtype, "cpu")
    assert factor.packed.shape == (groups, dim * (dim + 1) // 2)
    rows = torch.randn(groups, 5, dim, dtype=dtype)
    moment = rows.mT @ rows
    skewed = moment + torch.randn_like(moment).triu(1) * 0.01  # as a product in low precision may leave it
    factor.add(skewed.clone())
    factor.fold(scale=1, mass=1, decay=1, accept=YES)
    average = factor.average
    assert torch.equal(average, average.mT)
    assert ((average == skewed) | (average == skewed.mT)).all()
    average.zero_()
    assert factor.packed.any()


@pytest.mark.parametrize("structure", [Structure.DENSE, Structure.DIAGONAL])
@given(seen=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=4))
def test_a_group_without_a_sample_stays_as_it_is(structure: Structure, seen: list[tuple[bool, bool, bool]]) -> None:
    """Each group has a scale and a mass of its own; against a factor of that group alone, which ages in between."""
    factor = Factor(3, 3, structure, 3, dtype=torch.float64, device=torch.device("cpu"))
    alone = [new_factor(structure, groups=1) for _ in range(3)]
    for of in ((True, True, True), *seen):
        moment, scales, masses = random_moment(factor), torch.tensor([1.0, 0.5, 0.1]), torch.tensor([1.0, 2.0, 3.0])
        factor.add(moment.clone())
        factor.fold(scale=scales.unsqueeze(1), mass=(masses * torch.tensor(of)).unsqueeze(1), decay=0.5, accept=YES)
        for one, part, scale, mass, sampled in zip(alone, moment, scales, masses, of, strict=True):
            if sampled:
                one.add(part[None].clone())
                one.fold(scale=scale, mass=mass, decay=0.5, accept=YES)
            else:
                one.age(0.5)
    assert_same(factor.average, torch.cat([one.average for one in alone]), rtol=0)


def test_a_moment_that_all_groups_share_counts_for_each() -> None:
    factor, alone = new_factor(groups=3), new_factor(groups=1)
    moment = random_moment(alone)
    for each in (factor, alone):
        each.add(moment.clone())
        each.fold(scale=0.5, mass=1, decay=1, accept=YES)
    assert torch.equal(factor.average, alone.average.expand(3, 3, 3))


@pytest.mark.parametrize("structure", [Structure.DENSE, Structure.DIAGONAL])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda factor: pickle.loads(pickle.dumps(factor))])
def test_a_copy_shares_nothing(structure: Structure, copied: Callable[[Factor], Factor]) -> None:
    factor = new_factor(structure)
    factor.add(random_moment(factor))
    factor.fold(scale=1, mass=3, decay=1, accept=YES)
    factor.add(random_moment(factor))
    twin = copied(factor)
    assert torch.equal(twin.average, factor.average)
    before = factor.packed.clone()
    twin.fold(scale=1, mass=3, decay=1, accept=YES)
    assert torch.equal(factor.packed, before)
    factor.fold(scale=1, mass=3, decay=1, accept=YES)
    assert torch.equal(twin.average, factor.average)


@pytest.mark.parametrize("structure", [Structure.DENSE, Structure.DIAGONAL])
def test_what_is_saved_is_loaded_into_another_dtype(structure: Structure) -> None:
    factor, other = new_factor(structure), new_factor(structure, torch.float32)
    factor.add(random_moment(factor))
    factor.fold(scale=1, mass=3, decay=1, accept=YES)
    saved = factor.tensors()
    assert sum(tensor.nbytes for tensor in saved.values()) == 8 * (FactorShape(structure, 2, 3).packed + 1)
    other.load(saved)
    assert torch.equal(other.average, factor.average.float())
    assert float(other.mass) == 3


class Sizes(TorchDispatchMode):
    """Notes how many numbers the largest tensor holds that is made while it is on; views, flags and masks aside."""

    def __init__(self, *there: Tensor) -> None:
        super().__init__()
        self.largest = 0
        self._there = {tensor.untyped_storage().data_ptr() for tensor in there}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.is_floating_point():
            storage = found.untyped_storage()
            if storage.data_ptr() not in self._there:
                self.largest = max(self.largest, storage.nbytes() // found.element_size())
        return found


def test_what_every_step_does_makes_no_matrix() -> None:
    factor = Factor(1, 20, Structure.DENSE, dtype=torch.float64, device=torch.device("cpu"))
    rows = torch.randn(1, 5, 20)
    moment = rows.mT @ rows
    with Sizes(moment) as sizes:
        factor.add(moment)
        factor.pending_is_finite()
        factor.fold(scale=0.5, mass=5, decay=0.9, accept=YES)
        factor.age(0.9, 2)
        factor.trace()
        factor.merge(factor.packed.flatten() * 2, torch.tensor(2.0))
        factor.forget()
    assert sizes.largest == 20 * 21 // 2


# -- through the optimizer ---------------------------------------------------------------------------------------


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def mean_square(output: Tensor) -> Tensor:
    return output.square().sum() / len(output)


def alone(features: Tensor, loss_of: Callable[[Tensor], Tensor] = mean_square, **options: Any) -> dict:
    return measure(build(), features, loss_of, **options).factors


def still(model: nn.Module, **options: Any) -> KFACOptimizer:
    """An optimizer whose steps move nothing."""
    return KFACOptimizer(model, **{"lr": 0.0, "kl_clip": None, "factor_update_period": 1, **options})


def feed(optimizer: KFACOptimizer, model: nn.Module, features: Tensor) -> None:
    optimizer.zero_grad()
    mean_square(model(features)).backward()
    optimizer.step()


def merged(histories: Sequence[dict], weights: Sequence[Sequence[float]]) -> dict:
    """Average the factors of several batches; `weights` are those of `A` and of `G`."""
    return {
        name: tuple(weighted_mean([h[name][side] for h in histories], weights[side]) for side in range(2))
        for name in histories[0]
    }


def assert_same_factors(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_same(actual[name], expected[name])


@given(batches=st.lists(st.integers(1, 9), min_size=1, max_size=4), decay=st.sampled_from([0.5, 0.95, 1.0]))
def test_uneven_batches_weigh_their_rows_and_their_loss_terms(batches: list[int], decay: float) -> None:
    model = build()
    optimizer = still(model, factor_decay=decay)
    inputs = [torch.randn(n, 3) for n in batches]
    for features in inputs:
        feed(optimizer, model, features)
    weights = [n * decay ** (len(batches) - 1 - i) for i, n in enumerate(batches)]
    assert_same_factors(optimizer.factors(), merged([alone(x) for x in inputs], [weights, weights]))


def test_with_decay_one_factors_are_those_of_all_batches_at_once() -> None:
    model = build()
    optimizer = still(model, factor_decay=1.0)
    inputs = [torch.randn(n, 3) for n in (2, 5, 3)]
    for features in inputs:
        feed(optimizer, model, features)
    assert_same_factors(optimizer.factors(), alone(torch.cat(inputs)))


def test_a_summed_loss_weighs_every_step_alike_in_g() -> None:
    def total(output: Tensor) -> Tensor:
        return output.square().sum()

    model = build()
    optimizer = still(model, factor_decay=0.5, loss_terms=LossTerms.SUM)
    inputs = [torch.randn(n, 3) for n in (2, 6)]
    for features in inputs:
        optimizer.zero_grad()
        total(model(features)).backward()
        optimizer.step()
    histories = [alone(x, total, loss_terms=LossTerms.SUM) for x in inputs]
    assert_same_factors(optimizer.factors(), merged(histories, [[1.0, 6.0], [0.5, 1.0]]))


@pytest.mark.parametrize("period", [1, 2, 3])
def test_decay_counts_optimizer_steps_not_updates(period: int) -> None:
    model, decay = build(), 0.7
    optimizer = still(model, factor_decay=decay, factor_update_period=period)
    inputs = [torch.randn(n, 3) for n in range(2, 9)]
    for features in inputs:
        feed(optimizer, model, features)
    taken = range(0, len(inputs), period)
    weights = [len(inputs[i]) * decay ** (taken[-1] - i) for i in taken]
    assert_same_factors(optimizer.factors(), merged([alone(inputs[i]) for i in taken], [weights, weights]))


def test_steps_without_statistics_still_count_for_the_decay() -> None:
    model, decay = build(), 0.7
    optimizer = still(model, factor_decay=decay)
    first, second = torch.randn(4, 3), torch.randn(6, 3)
    feed(optimizer, model, first)
    optimizer.step()
    optimizer.step()
    feed(optimizer, model, second)
    weights = [4 * decay**3, 6]
    assert_same_factors(optimizer.factors(), merged([alone(first), alone(second)], [weights, weights]))


@pytest.mark.parametrize(
    # Infinity saturates the Tanh: the row has no gradient and does not count.
    ("bad", "refusing"),
    [(torch.nan, ("0", "2")), (torch.inf, ())],
    ids=["nan", "inf"],
)
def test_a_layer_refuses_both_moments_of_a_step_bitwise_and_the_next_ones_weigh_more(
    bad: float, refusing: tuple[str, ...]
) -> None:
    model, decay = build(), 0.7
    optimizer = still(model, factor_decay=decay)
    inputs = [torch.randn(4, 3), torch.randn(4, 3)]
    feed(optimizer, model, inputs[0])
    before = optimizer.factors()
    spoiled = torch.randn(5, 3)
    spoiled[2, 1] = bad
    mean_square(model(spoiled)).backward()
    model.zero_grad()  # no step may come of it; the optimizer's own would forget the statistics too
    optimizer.step()
    after = optimizer.factors()
    for name in refusing:
        for side in range(2):
            assert torch.equal(after[name][side].view(torch.int64), before[name][side].view(torch.int64))
    assert optimizer.metrics()["refused_statistics"] == len(refusing)
    feed(optimizer, model, inputs[1])
    weights = [4 * decay**2, 4]
    expected = merged([alone(x) for x in inputs], [weights, weights])
    for name in refusing:
        assert_same(optimizer.factors()[name], expected[name])


@pytest.mark.parametrize("period", [1, 100])
def test_the_first_accepted_sample_is_refreshed_at_once_even_after_a_refused_one(period: int) -> None:
    steps = []
    for refused_first in (False, True):
        model = build()
        optimizer = KFACOptimizer(model, lr=1.0, kl_clip=None, factor_update_period=period, inverse_update_period=100)
        if refused_first:
            mean_square(model(torch.full((4, 3), torch.nan))).backward()
            model.zero_grad()
            optimizer.step()
        torch.manual_seed(2)
        feed(optimizer, model, torch.randn(6, 3))
        steps.append(list(snapshot(model).values()))
    assert_same(steps[1], steps[0])


# -- loss terms --------------------------------------------------------------------------------------------------

MEAN_LOSSES = {
    # rule: inputs, M spelled out, the mean loss and the sum of the same terms
    "examples, cross-entropy": (
        LossTerms.EXAMPLES,
        (5, 3),
        5,
        lambda output, reduction: F.cross_entropy(output, torch.arange(5) % 2, reduction=reduction),
    ),
    "examples, mean over a batch of sequences": (
        LossTerms.EXAMPLES,
        (5, 4, 3),
        5,
        lambda output, reduction: output.square().sum() / (5 if reduction == "mean" else 1),
    ),
    "examples, unbatched": (
        LossTerms.EXAMPLES,
        (3,),
        1,
        lambda output, reduction: F.cross_entropy(output, torch.tensor(1), reduction=reduction),
    ),
    "positions, cross-entropy": (
        LossTerms.POSITIONS,
        (5, 4, 3),
        20,
        lambda output, reduction: F.cross_entropy(output.flatten(0, 1), torch.arange(20) % 2, reduction=reduction),
    ),
    "elements, MSELoss": (
        LossTerms.ELEMENTS,
        (5, 3),
        10,
        lambda output, reduction: F.mse_loss(output, torch.ones(5, 2), reduction=reduction),
    ),
    "elements, MSELoss over sequences": (
        LossTerms.ELEMENTS,
        (5, 4, 3),
        40,
        lambda output, reduction: F.mse_loss(output, torch.ones(5, 4, 2), reduction=reduction),
    ),
    "elements, BCEWithLogitsLoss": (
        LossTerms.ELEMENTS,
        (5, 3),
        10,
        lambda output, reduction: F.binary_cross_entropy_with_logits(output, torch.ones(5, 2), reduction=reduction),
    ),
}


@pytest.mark.parametrize(
    ("rule", "shape", "terms", "loss"), MEAN_LOSSES.values(), ids=[name.replace(" ", "-") for name in MEAN_LOSSES]
)
def test_a_mean_loss_has_the_fisher_of_its_terms_over_their_number(
    rule: LossTerms, shape: tuple[int, ...], terms: int, loss: Callable[[Tensor, str], Tensor]
) -> None:
    features = torch.randn(shape)
    mean = measure(build(), features, lambda output: loss(output, "mean"), loss_terms=rule)
    total = measure(build(), features, lambda output: loss(output, "sum"), loss_terms=LossTerms.SUM)
    for name in mean.factors:
        # Gradients of the sum are those of each term, so their second moment is the Fisher of the sum.
        per_row = total.calls[name].gradient.reshape(-1, mean.factors[name][1].shape[-1])
        fisher = per_row.mT @ per_row
        assert_same(total.factors[name][1][0], fisher)
        assert_same(mean.factors[name][1][0], fisher / terms)
        assert_same(mean.factors[name][0], total.factors[name][0])


@pytest.mark.parametrize(
    ("rule", "shape", "terms", "loss"), MEAN_LOSSES.values(), ids=[name.replace(" ", "-") for name in MEAN_LOSSES]
)
def test_damping_means_the_same_for_a_mean_as_m_times_it_for_the_sum(
    rule: LossTerms, shape: tuple[int, ...], terms: int, loss: Callable[[Tensor, str], Tensor]
) -> None:
    features, damping = torch.randn(shape), 0.03
    ends = []
    for reduction, loss_terms, factor in (("mean", rule, 1), ("sum", LossTerms.SUM, terms)):
        model = build()
        optimizer = KFACOptimizer(model, lr=0.5, damping=damping * factor, kl_clip=None, loss_terms=loss_terms)
        loss(model(features), reduction).backward()
        optimizer.step()
        ends.append(list(snapshot(model).values()))
    assert_same(ends[0], ends[1])


def test_stated_loss_terms_stand_for_targets_that_count() -> None:
    features, target = torch.randn(6, 3), torch.tensor([0, 1, -100, 1, -100, 0])
    model = build()
    optimizer = still(model)
    optimizer.set_loss_terms(4)
    F.cross_entropy(model(features), target).backward()
    optimizer.step()
    counted = alone(features[target >= 0], lambda output: F.cross_entropy(output, target[target >= 0]))
    for name, (_, g) in optimizer.factors().items():
        assert_same(g, counted[name][1])


@given(batch=st.integers(1, 9), length=st.floats(0.1, 10))
def test_the_trace_of_the_product_is_the_mean_squared_gradient_of_single_examples(batch: int, length: float) -> None:
    # Exact where all inputs are equally long: E|a|²|g|² = E|a|² E|g|².
    model = nn.Linear(3, 2, bias=False)
    features, mixed = F.normalize(torch.randn(batch, 3)) * length, torch.randn(batch, 2)

    def losses(output: Tensor) -> Tensor:
        return (output.sin() * mixed).sum(-1)

    ((a, g),) = measure(model, features, lambda output: losses(output).mean()).factors.values()
    singles = [torch.autograd.grad(loss, model.weight, retain_graph=True)[0] for loss in losses(model(features))]
    assert_same(a[0].trace() * g[0].trace(), torch.stack([single.square().sum() for single in singles]).mean())
