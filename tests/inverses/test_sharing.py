"""Ranks that each measure a share, merge before a refresh and share its result, against one process that sees all."""

from typing import Any

import pytest
import torch
from helpers.cases import STRUCTURES
from helpers.oracles import assert_same
from helpers.plain import assert_identical
from helpers.shares import Ranks, Sample, sample
from helpers.states import CPU, measured_state
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfac_optim import (
    EKFAC,
    BlockDiagonal,
    Cholesky,
    DoublyFactored,
    Eigen,
    Inverse,
    InverseAndRoot,
    InverseState,
    LayerSpec,
    LowRank,
    NewtonSchulz,
    Structure,
    SumOfTerms,
)
from kfac_optim.factors.factor import Factor
from kfac_optim.inverses.pair_inverse import PairInverse, PairState, SymmetricInverse
from kfac_optim.utils.tensor_storage import drop, hold

pytestmark = pytest.mark.usefixtures("float64")

DENSE, DIAGONAL, IDENTITY = Structure
PAIRS = [
    *(Cholesky(), LowRank(1), NewtonSchulz(), Eigen(), InverseAndRoot(), SumOfTerms()),
    *(EKFAC(), EKFAC(per_example=False)),
]
every_pair = pytest.mark.parametrize("inverse", PAIRS, ids=str)
# Each with dense factors, and with two others in turn.
some_structures = pytest.mark.parametrize(
    ("inverse", "structure"),
    [
        (inverse, structure)
        for row, inverse in enumerate(PAIRS)
        for column, structure in enumerate(STRUCTURES)
        if structure == (DENSE, DENSE) or (row + column) % 4 == 0
    ],
    ids=lambda value: "-".join(each.value for each in value) if isinstance(value, tuple) else str(value),
)
DAMPING = 0.3


@st.composite
def specs(draw: st.DrawFn, structure: tuple[Structure, Structure]) -> LayerSpec:
    """As inverses see them: groups may share an input or, being blocks, an output."""
    groups = draw(st.integers(1, 3))
    inputs, outputs = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    if draw(st.booleans()) and groups > 1 and IDENTITY not in structure:
        kept = [
            BlockDiagonal(-(-dim // groups)) if dim >= 2 * groups and kind is DENSE else kind
            for dim, kind in zip((inputs, outputs), structure, strict=True)
        ]
        side = draw(st.sampled_from([0, 1]))
        cut = (kept[0], structure[1]) if side == 0 else (structure[0], kept[1])
        return LayerSpec("layer", ("weight",), inputs, outputs, structure=cut).by_blocks()
    return LayerSpec(
        "layer",
        ("weight",),
        inputs,
        outputs,
        groups=groups,
        structure=structure,
        shared_input=draw(st.booleans()),
        opposed=IDENTITY not in structure and draw(st.booleans()),
    )


def new_ranks(draw: st.DrawFn, inverse: Inverse[Any], spec: LayerSpec, **options: Any) -> Ranks:
    """Of any size, with any owners and any workers."""
    size = draw(st.integers(2, 4))
    rank = st.integers(0, size - 1)
    owners = {part.name: draw(rank) for part in inverse.parts(spec)}
    return Ranks(inverse, spec, size, owners, draw(st.sets(rank)), **options)


def fold(draw: st.DrawFn, ranks: Ranks, *, positions: int = 2) -> None:
    """One rank has enough for factors of full rank, the others have some, few or none."""
    full = draw(st.integers(0, ranks.size - 1))
    samples: list[list[Sample]] = []
    for rank in range(ranks.size):
        examples = 16 if rank == full else draw(st.sampled_from([0, 1, 5]))
        kinds = (False, True) if ranks.spec.opposed else (False,)
        samples.append([sample(ranks.spec, examples, positions, opposed=kind) for kind in kinds] if examples else [])
    ranks.fold(samples, [draw(st.sampled_from([0, 3])) for _ in samples])


def assert_one_process(ranks: Ranks, *, rtol: float = 1e-7) -> None:
    """Every rank that has the inverse applies that of the process that saw all."""
    grad = torch.randn(ranks.spec.groups, ranks.spec.out_dim, ranks.spec.in_dim, dtype=ranks.dtype)
    expected = ranks.inverse.apply(ranks.joint, grad, DAMPING)
    for direction in ranks.directions(grad, DAMPING):
        assert_same(direction, expected, rtol=rtol)


def assert_alike(ranks: Ranks) -> None:
    """The ranks that apply the inverse have the same one, to the bit."""
    grad = torch.randn(ranks.spec.groups, ranks.spec.out_dim, ranks.spec.in_dim, dtype=ranks.dtype)
    first, *others = ranks.directions(grad, DAMPING)
    for direction in others:
        assert torch.equal(direction, first)


@some_structures
@settings(max_examples=15)
@given(data=st.data())
def test_a_refresh_is_that_of_one_process(
    inverse: Inverse[Any], structure: tuple[Structure, Structure], data: st.DataObject
) -> None:
    ranks = new_ranks(data.draw, inverse, data.draw(specs(structure)))
    for _ in range(3):
        for _ in range(data.draw(st.integers(1, 2))):
            fold(data.draw, ranks)
        ranks.refresh(DAMPING)
        assert_one_process(ranks)
        assert_alike(ranks)


@every_pair
@settings(max_examples=8)
@given(data=st.data())
def test_a_refresh_of_groups_that_have_rows_on_some_ranks_is_that_of_one_process(
    inverse: Inverse[Any], data: st.DataObject
) -> None:
    spec = LayerSpec("layer", ("weight",), 3, 2, groups=3, own_rows=True)
    ranks = new_ranks(data.draw, inverse, spec, tells=True)
    for _ in range(4):
        routes = [data.draw(st.lists(st.booleans(), min_size=3, max_size=3)) for _ in ranks.states]
        sizes = [data.draw(st.sampled_from([4, 9])) for _ in ranks.states]
        shares = [[sample(spec, size, groups=of)] if any(of) else [] for size, of in zip(sizes, routes, strict=True)]
        if any(shares):
            ranks.fold(shares, [0 if share else 3 for share in shares])
            ranks.refresh(DAMPING)
            assert_one_process(ranks)


@pytest.mark.parametrize("bias", [False, True])
@given(data=st.data())
def test_a_refresh_of_three_factors_is_that_of_one_process(bias: bool, data: st.DataObject) -> None:
    channels, positions = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    params = ("weight", "bias") if bias else ("weight",)
    spec = LayerSpec("layer", params, channels * positions + bias, data.draw(st.integers(1, 3)))
    ranks = new_ranks(data.draw, DoublyFactored(channels), spec)
    for _ in range(3):
        fold(data.draw, ranks, positions=1)
        ranks.refresh(DAMPING)
        assert_one_process(ranks)
        assert_alike(ranks)


@some_structures
@settings(max_examples=8)
@given(data=st.data())
def test_a_refresh_beside_the_training_is_that_of_one_process(
    inverse: Inverse[Any], structure: tuple[Structure, Structure], data: st.DataObject
) -> None:
    """What ranks measure while it is under way counts at the next one, in the bases of which it then is."""
    ranks = new_ranks(data.draw, inverse, data.draw(specs(structure)))
    fold(data.draw, ranks)
    ranks.refresh(DAMPING)
    for _ in range(2):
        fold(data.draw, ranks)
        ranks.refresh(DAMPING, meanwhile=lambda: fold(data.draw, ranks))
        assert_alike(ranks)
    if not isinstance(inverse, EKFAC):
        assert_one_process(ranks)
    fold(data.draw, ranks)
    ranks.refresh(DAMPING)
    assert_one_process(ranks)


@every_pair
@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("payload", [torch.float32, torch.bfloat16])
def test_all_ranks_apply_the_same_bits_whatever_was_sent(
    inverse: Inverse[Any], payload: torch.dtype, data: st.DataObject
) -> None:
    ranks = new_ranks(data.draw, inverse, data.draw(specs((DENSE, DENSE))), dtype=torch.float32, payload=payload)
    for _ in range(2):
        fold(data.draw, ranks)
        ranks.refresh(DAMPING)
        assert_alike(ranks)
    if payload is torch.float32 and not isinstance(inverse, EKFAC):
        assert_one_process(ranks, rtol=2e-2)


@some_structures
@settings(max_examples=8)
@given(data=st.data())
def test_saved_and_reloaded_each_rank_goes_on_to_the_bit(
    inverse: Inverse[Any], structure: tuple[Structure, Structure], data: st.DataObject
) -> None:
    ranks = new_ranks(data.draw, inverse, data.draw(specs(structure)))
    seeds = [data.draw(st.integers(0, 99)) for _ in range(3)]
    found = []
    for reloaded in (False, True):
        again = Ranks(inverse, ranks.spec, ranks.size, ranks.owners, ranks.workers)
        for seed in seeds:
            torch.manual_seed(seed)
            share = [[sample(ranks.spec, 6)] if rank != 1 else [] for rank in range(ranks.size)]
            again.fold(share)
            if seed is not seeds[-1]:
                again.refresh(DAMPING)
                again.fold(share)  # a share of its own on each rank
            if reloaded:
                again.reload()
        again.refresh(DAMPING)
        found.append([again.states[rank].tensors() for rank in sorted(again.appliers())])
    assert_identical(*found)


@given(data=st.data())
def test_taking_bases_that_one_has_leaves_the_second_moments_to_the_bit(data: st.DataObject) -> None:
    inverse = EKFAC()
    ranks = new_ranks(data.draw, inverse, data.draw(specs((DENSE, DENSE))))
    for _ in range(2):
        fold(data.draw, ranks)
        ranks.refresh(DAMPING)
    fold(data.draw, ranks)
    state = ranks.states[ranks.owners[""]]
    before = state.second_moments.clone()
    state.take("", {i: result.tensor.clone() for i, result in enumerate(state.results(""))})
    assert torch.equal(state.second_moments, before)


@pytest.mark.parametrize("structure", [(DENSE, DENSE), (DENSE, IDENTITY), (IDENTITY, DIAGONAL)])
def test_what_is_measured_in_a_basis_changes_what_ranks_apply_at_the_next_refresh_alone(
    structure: tuple[Structure, Structure],
) -> None:
    inverse, spec = EKFAC(), LayerSpec("layer", ("weight",), 4, 3, structure=structure)
    ranks = Ranks(inverse, spec, 2, {"": 0}, {0, 1})
    ranks.fold([[sample(spec, 9)], [sample(spec, 4)]])
    ranks.refresh(DAMPING)
    grad = torch.randn(1, 3, 4)
    before = ranks.directions(grad, DAMPING)
    ranks.fold([[sample(spec, 9)], [sample(spec, 4)]])
    assert_identical(ranks.directions(grad, DAMPING), before)
    joint = inverse.apply(ranks.joint, grad, DAMPING)
    assert not torch.allclose(joint, before[0], rtol=1e-3)


def test_solved_is_never_unsaid() -> None:
    inverse = Eigen()
    state = measured_state(inverse)
    inverse.refresh([state], [DAMPING])
    results = state.results("A")
    state.take("A", {len(results) - 1: torch.tensor([0.0, 1.0])})
    assert state.solved.tolist() == [True, True]


@pytest.mark.parametrize("inverse", [Cholesky(), LowRank(1), NewtonSchulz(), Eigen()], ids=str)
@pytest.mark.parametrize("part", ["A", "G"])
def test_what_is_kept_elsewhere_is_not_solved_for(inverse: PairInverse[Any], part: str) -> None:
    spec = LayerSpec("layer", ("weight",), 4, 3, groups=2)
    owners = {"A": 0, "G": 1}
    ranks = Ranks(inverse, spec, 2, owners, set())
    ranks.fold([[sample(spec, 9)], [sample(spec, 9)]])
    ranks.merge()
    state: PairState[Any] = ranks.states[owners[part]]
    inverse.refresh([state], [DAMPING])
    inverse.refresh([ranks.joint], [DAMPING])
    (here, there), other = ((0, 1), "G") if part == "A" else ((1, 0), "A")
    untouched = inverse.init(spec, dtype=torch.float64, device=CPU)
    for index, result in enumerate(state.results(other)):
        if result.tensor is not getattr(state, "solved", None):
            assert torch.equal(result.tensor, untouched.results(other)[index].tensor)
    assert_same(state.condition[here], ranks.joint.condition[here], rtol=1e-7)
    assert float(state.condition[there]) == 1


@every_pair
def test_opposed_uses_that_were_aged_are_combined_anew(inverse: Inverse[Any]) -> None:
    spec = LayerSpec("layer", ("weight",), 4, 3, opposed=True)
    ranks = Ranks(inverse, spec, 2, {"": 0}, {0})
    ranks.fold([[sample(spec, 5), sample(spec, 5, opposed=True)], []])
    state = ranks.states[0]
    state.age(0.5, 5)
    again = inverse.init(spec, dtype=torch.float64, device=CPU)
    again.load(state.tensors())
    assert_identical(state.factors(), again.factors())


def test_one_row_of_one_rank_is_a_sample() -> None:
    spec = LayerSpec("layer", ("weight",), 4, 3)
    ranks = Ranks(Cholesky(), spec, 2, {"A": 0, "G": 1}, {0, 1}, tells=True)
    ranks.fold([[sample(spec, 5)], [sample(spec, 4)]])
    ranks.fold([[sample(spec, 1, positions=1)], []])
    ranks.refresh(DAMPING)
    assert_one_process(ranks)


def test_nothing_is_kept_of_a_refresh_where_neither_rank_has_a_sample() -> None:
    spec = LayerSpec("layer", ("weight",), 4, 3)
    for inverse in PAIRS[:4]:
        ranks = Ranks(inverse, spec, 2, {"A": 0, "G": 1}, set())
        ranks.refresh(DAMPING)
        grad = torch.randn(1, 3, 4)
        for direction in ranks.directions(grad, DAMPING):
            assert torch.equal(direction, grad)


@some_structures
def test_dropped_results_come_back_when_they_are_taken(
    inverse: Inverse[Any], structure: tuple[Structure, Structure]
) -> None:
    layer = LayerSpec("layer", ("weight",), 4, 3, groups=2, structure=structure)
    owner = measured_state(inverse, structure=structure)
    inverse.refresh([owner], [DAMPING])
    other = inverse.init(layer, dtype=torch.float64, device=CPU)
    parts = [part.name for part in inverse.parts(layer)]
    every = [result.tensor for part in parts for result in other.results(part) if not result.measuring]
    for tensor in every:
        drop(tensor)
    assert all(tensor.is_meta for tensor in every)
    kept = sum(t.numel() for t in other.tensors().values() if isinstance(t, Tensor) and not t.is_meta)
    scales = 2 * 4 * 3 if isinstance(inverse, EKFAC) else 0
    if not any(part.measuring for part in inverse.parts(layer)):
        assert kept < 20 + scales  # counts, measures, and what the rank that refreshes alone needs
    other.load(owner.tensors())
    assert sum(t.is_meta for t in every) == len(every)
    for tensor in every:
        hold(tensor, CPU)
        assert tensor.device == CPU
    assert not any(tensor.any() for tensor in every)
    for part in parts:
        other.take(part, {i: r.tensor.clone() for i, r in enumerate(owner.results(part))})
    grad = torch.randn(2, 3, 4)
    assert torch.equal(inverse.apply(other, grad, DAMPING), inverse.apply(owner, grad, DAMPING))


def _no_inverse(_factor: Factor, _dtype: torch.dtype) -> SymmetricInverse:
    return SymmetricInverse(torch.zeros(0))


class UnsharedState(PairState[SymmetricInverse]):
    """Says nothing of several processes."""

    averages = InverseState.averages
    age = InverseState.age
    results = InverseState.results


def test_a_representation_that_says_nothing_of_several_processes_is_refused_with_the_remedy() -> None:
    state = UnsharedState(LayerSpec("", ("weight",), 2, 3), _no_inverse, dtype=torch.float64, device=CPU)
    calls = [
        lambda: state.averages("A"),
        lambda: state.merge("A", []),
        lambda: state.age(0.9),
        lambda: state.results("A"),
        lambda: state.take("A", {}),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=r"UnsharedState .*averages\(\), age\(\) and results\(\)"):
            call()
