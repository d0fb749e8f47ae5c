"""The inverse of a sum of two Kronecker products, against the dense inverse of the damped sum in float64."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import oracles
from helpers.oracles import assert_same
from helpers.plain import assert_identical, edited, mlp
from helpers.shares import Ranks, Sample, sample, tell
from helpers.states import CPU, OwnStatistics, assert_resumes_bitwise, every_structure, spec
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import Cholesky, ExactGGN, KFACOptimizer, LayerSpec, Structure, SumOfTerms
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.layers.product import ProductStatistics

pytestmark = pytest.mark.usefixtures("float64")

INVERSE = SumOfTerms()
DENSE = (Structure.DENSE, Structure.DENSE)
dampings = st.sampled_from([1e-3, 0.1, 10.0])


class OfTerm(OwnStatistics):
    """Rows whose gradient comes from one call of the criterion."""

    term = 0

    def __init__(self, term: int, a: Tensor, g: Tensor) -> None:
        super().__init__(a, g)
        self.term = term


def state_of(
    *terms: int, layer: LayerSpec | None = None, dtype: torch.dtype = torch.float64, examples: int = 20
) -> Any:
    """A state that was handed rows of these terms."""
    layer = layer or spec(4, 3, 2, DENSE)
    state = INVERSE.init(layer, dtype=dtype, device=CPU)
    for term in terms:
        a, g = (
            torch.randn(layer.groups, examples, 1, dim, dtype=dtype) * (1 + term)
            for dim in (layer.in_dim, layer.out_dim)
        )
        state.accumulate(OfTerm(term, a, g))
    if terms:
        state.fold(1, 1.0)
    return state


def damped_sum(state: Any, grad: Tensor, damping: float, terms: tuple[int, ...] = (0, 1)) -> Tensor:
    pairs = [state.pair.of_terms[term] for term in terms]
    averages = [[None if side is None else side.average for side in (pair.a, pair.g)] for pair in pairs]
    return sum(oracles.damped_kronecker(a, g, grad, damping, balanced=False) for a, g in averages)


@every_structure
@given(
    shapes=st.lists(st.tuples(*[st.integers(1, 4)] * 3, dampings), min_size=1, max_size=4),
    terms=st.sampled_from([(0, 1), (1, 0), (0,), (1,)]),
)
def test_it_solves_the_damped_sum_of_the_terms_that_were_seen(
    structure: tuple[Structure, Structure], shapes: list[tuple[Any, ...]], terms: tuple[int, ...]
) -> None:
    layers = [spec(inputs, outputs, groups, structure) for inputs, outputs, groups, _ in shapes]
    states = [state_of(*terms, layer=layer) for layer in layers]
    INVERSE.refresh(states, [damping for *_, damping in shapes])
    for state, layer, (*_, damping) in zip(states, layers, shapes, strict=True):
        grad = torch.randn(layer.groups, layer.out_dim, layer.in_dim)
        expected = oracles.solve(damped_sum(state, grad, damping, tuple(sorted(terms))), grad)
        assert_same(INVERSE.apply(state, grad, 0.0), expected, rtol=1e-10)


@every_structure
@pytest.mark.parametrize("term", [0, 1])
def test_of_one_term_with_factors_of_one_size_it_is_what_cholesky_is(
    structure: tuple[Structure, Structure], term: int
) -> None:
    layer = spec(4, 3, 2, structure)
    torch.manual_seed(1)
    ours = state_of(term, layer=layer)
    for factor in (ours.pair.of_terms[term].a, ours.pair.of_terms[term].g):
        if factor is not None:
            factor.packed.div_(factor.trace().unsqueeze(-1) / factor.dim)
    theirs = Cholesky().init(layer, dtype=torch.float64, device=CPU)
    theirs.pair.load(ours.pair.of_terms[term].tensors())
    INVERSE.refresh([ours], [0.1])
    Cholesky().refresh([theirs], [0.1])
    grad = torch.randn(2, 3, 4)
    assert_same(INVERSE.apply(ours, grad, 0.1), Cholesky().apply(theirs, grad, 0.1), rtol=1e-11)
    assert_same(ours.condition, theirs.condition)


@every_structure
def test_before_any_statistics_the_gradient_comes_back(structure: tuple[Structure, Structure]) -> None:
    state = state_of(layer=spec(4, 3, 2, structure))
    INVERSE.refresh([state], [0.1])
    grad = torch.randn(2, 3, 4)
    assert_same(INVERSE.apply(state, grad, 0.1), grad, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("examples", [1, 2])
@given(damping=st.sampled_from([1e-4, 1.0]), dead=st.sampled_from([None, 0, 1]))
def test_factors_of_low_rank_or_zero_are_inverted_as_damped(
    dtype: torch.dtype, examples: int, damping: float, dead: int | None
) -> None:
    layer = LayerSpec("layer", ("weight",), 9, 7)
    state = state_of(0, 1, layer=layer, dtype=dtype, examples=examples)
    if dead is not None:
        for factor in (state.pair.of_terms[dead].a, state.pair.of_terms[dead].g):
            factor.packed.zero_()
    INVERSE.refresh([state], [damping])
    grad = torch.randn(1, 7, 9, dtype=dtype)
    double = copy.deepcopy(state)
    for pair in double.pair.of_terms:
        for factor in (pair.a, pair.g):
            factor.packed = factor.packed.double()
    expected = oracles.solve(damped_sum(double, grad.double(), damping), grad.double())
    assert_same(INVERSE.apply(state, grad, 0.0).double(), expected, rtol=1e-10 if dtype == torch.float64 else 2e-3)
    assert int(state.failed) == 0


@every_structure
def test_of_a_group_that_one_term_has_not_reached_it_is_the_inverse_of_the_other(
    structure: tuple[Structure, Structure],
) -> None:
    state = state_of(0, 1, layer=replace(spec(4, 3, 3, structure), own_rows=True))
    for groups, terms in (([1], [0]), ([2], [0, 1])):
        for term in terms:
            for factor in filter(None, (state.pair.of_terms[term].a, state.pair.of_terms[term].g)):
                factor.mass[groups] = 0
                factor.packed[groups] = 0
    INVERSE.refresh([state], [0.1])
    grad = torch.randn(3, 3, 4)
    both, second = (oracles.solve(damped_sum(state, grad, 0.1, terms), grad) for terms in ((0, 1), (1,)))
    assert_same(INVERSE.apply(state, grad, 0.0), torch.stack([both[0], second[1], grad[2]]), rtol=1e-10)


def test_where_inputs_tell_nothing_a_group_whose_gradients_are_zeros_was_not_reached() -> None:
    """Ranks add zeros for what others have seen."""
    state = state_of(0, 1, layer=replace(spec(4, 3, 3, (Structure.IDENTITY, Structure.DENSE)), own_rows=True))
    state.pair.of_terms[0].g.packed[1] = 0
    INVERSE.refresh([state], [0.1])
    grad = torch.randn(3, 3, 4)
    both, second = (oracles.solve(damped_sum(state, grad, 0.1, terms), grad) for terms in ((0, 1), (1,)))
    assert_same(INVERSE.apply(state, grad, 0.0), torch.stack([both[0], second[1], both[2]]), rtol=1e-10)


@pytest.mark.parametrize("side", ["a", "g"])
@pytest.mark.parametrize("term", [0, 1])
def test_where_one_side_fails_its_group_keeps_the_last_good_inverse_of_both(side: str, term: int) -> None:
    broken, sound = state_of(0, 1), state_of(0, 1)
    INVERSE.refresh([broken, sound], [0.1, 0.1])
    old, grad = copy.deepcopy(broken), torch.randn(2, 3, 4)
    for state in (broken, sound):
        for pair in state.pair.of_terms:
            pair.a.packed.mul_(2)
    with edited(getattr(broken.pair.of_terms[term], side)) as average:
        average[1, 0, 0] = torch.nan
    INVERSE.refresh([broken, sound], [0.1, 0.1])
    kept, before = INVERSE.apply(broken, grad, 0.0), INVERSE.apply(old, grad, 0.0)
    assert torch.equal(kept[1], before[1])
    assert not torch.allclose(kept[0], before[0])
    assert int(sound.failed) == 0
    assert int(broken.failed) > 0
    assert int(broken.failed_in_a_row.max()) == 1
    assert_same(INVERSE.apply(sound, grad, 0.0), oracles.solve(damped_sum(sound, grad, 0.1), grad), rtol=1e-10)


def test_terms_have_averages_of_their_own() -> None:
    state, steps = INVERSE.init(spec(4, 3, 1, DENSE), dtype=torch.float64, device=CPU), []
    for terms in ((0, 1), (0,), (0, 1)):
        rows = {term: (torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 3)) for term in terms}
        for term, (a, g) in rows.items():
            state.accumulate(OfTerm(term, a, g))
        state.fold(5, 0.5)
        steps.append(rows)
    for term in (0, 1):
        seen = [(2 - step, rows[term]) for step, rows in enumerate(steps) if term in rows]
        weights = [0.5**age for age, _ in seen]
        for side, (scale, name) in enumerate([(1 / 10, "a"), (5, "g")]):
            moments = [torch.einsum("gnsi,gnsj->gij", rows[side], rows[side]) * scale for _, rows in seen]
            expected = sum(w * moment for w, moment in zip(weights, moments, strict=True)) / sum(weights)
            assert_same(getattr(state.pair.of_terms[term], name).average, expected)


def test_the_pair_that_stands_for_both_has_the_trace_of_the_sum() -> None:
    state = state_of(0, 1, layer=spec(4, 3, 1, DENSE))
    a, g = state.factors()
    traces = [pair.a.trace() * pair.g.trace() for pair in state.pair.of_terms]
    assert_same(a.diagonal(dim1=1, dim2=2).sum(-1) * g.diagonal(dim1=1, dim2=2).sum(-1), sum(traces))


def test_calls_say_which_term_they_belong_to() -> None:
    layer = LayerSpec("layer", ("weight",), 4, 3)
    for term in (0, 1):
        stats: RowStatistics = ProductStatistics(
            layer, LayerCall(torch.randn(5, 4), torch.randn(5, 3), term=term), torch.float64
        )
        state = INVERSE.init(layer, dtype=torch.float64, device=CPU)
        state.accumulate(stats)
        assert [pair.has_pending() for pair in state.pair.of_terms] == [term == 0, term == 1]


def test_a_third_term_is_refused_by_name_with_the_remedies() -> None:
    with pytest.raises(ValueError, match=r"'layer' comes from call 3 .*of 2 terms.*Join terms.*inverse=Cholesky\(\)"):
        state_of(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise(dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Module, KFACOptimizer]:
        torch.manual_seed(0)
        model = mlp().to(dtype)
        return model, KFACOptimizer(
            model, lr=0.1, inverse=INVERSE, inverse_update_period=4, factor_update_period=1, damping=0.1
        )

    assert_resumes_bitwise(make, steps=9, saved=6)


@every_structure
def test_a_loaded_state_is_the_saved_one_to_the_bit(structure: tuple[Structure, Structure]) -> None:
    layer = spec(4, 3, 2, structure)
    saved, loaded = state_of(0, 1, layer=layer), state_of(0, layer=layer)
    INVERSE.refresh([saved], [0.1])
    loaded.load(saved.tensors())
    assert_identical(loaded.tensors(), saved.tensors())
    assert_identical(loaded.factors(), saved.factors())
    grad = torch.randn(2, 3, 4)
    assert torch.equal(INVERSE.apply(loaded, grad, 0.1), INVERSE.apply(saved, grad, 0.1))


@pytest.mark.parametrize("opposed", [False, True])
def test_ranks_that_have_some_of_the_terms_do_what_one_process_does(opposed: bool) -> None:
    layer = LayerSpec("layer", ("weight",), 4, 3, opposed=opposed)
    ranks = Ranks(INVERSE, layer, 3, {"": 1}, {0, 1})

    def some(**examples: int) -> list[tuple[int, Sample]]:
        kinds = (False, True) if opposed else (False,)
        names = ("first", "second")
        return [
            (names.index(name), sample(layer, count, opposed=kind))
            for name, count in examples.items()
            for kind in kinds
        ]

    with pytest.MonkeyPatch.context() as patch:
        for shares in (
            [some(first=9, second=4), some(first=5), some(first=3, second=3)],
            [some(first=9), some(first=5), some(second=6)],
            [some(first=9), some(first=5), some(first=2)],
        ):
            everything, states = [each for share in shares for each in share], [*ranks.states, ranks.joint]
            counts = [sum(each.examples for _, each in own) for own in (*shares, everything)]
            for state, own, terms in zip(states, [*shares, everything], counts, strict=True):
                for term, (a, gradients, kind, _) in own:
                    patch.setattr(OwnStatistics, "term", term)
                    state.accumulate(OwnStatistics(a, gradients / terms, opposed=kind))
            tell(ranks.states, counts[:-1])
            for state, terms in zip(states, counts, strict=True):
                state.fold(terms, 0.7)
            ranks.refresh(0.3)
    grad = torch.randn(1, 3, 4)
    expected = INVERSE.apply(ranks.joint, grad, 0.3)
    directions = ranks.directions(grad, 0.3)
    assert len(directions) == 2
    for direction in directions:
        assert_same(direction, expected, rtol=1e-8)


def test_stacked_states_are_applied_as_each_alone() -> None:
    states = [state_of(0, 1), state_of(0), state_of(0, 1)]
    INVERSE.refresh(states, [0.1] * 3)
    grads = [torch.randn(2, 3, 4) for _ in states]
    whole = INVERSE.apply(states[0].stacked(states[1:]), torch.cat(grads), 0.1)
    alone = torch.cat([INVERSE.apply(state, grad, 0.1) for state, grad in zip(states, grads, strict=True)])
    assert_same(whole, alone, rtol=1e-13)
    assert len(states[0].to_stack()) == 4


def test_calls_of_other_kinds_of_layers_say_their_terms_too() -> None:
    """A weight that is made of others, and matrices of experts."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
            self.experts = nn.Parameter(torch.randn(2, 5, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,eio->beo", self.normed(x).tanh(), self.experts).sum(1)

    torch.manual_seed(0)
    model, criterion = Model(), nn.MSELoss()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=INVERSE, estimate=ExactGGN(criterion))
    loss = sum(criterion(model(torch.randn(6, 4)), torch.zeros(6, 3)) for _ in range(2))
    loss.backward()
    optimizer.step()
    blocks = optimizer._binding.coverage.blocks
    assert len(blocks) == 2
    for block in blocks:
        assert all(float(pair.a.trace().sum()) > 0 for pair in block.state.pair.of_terms)
