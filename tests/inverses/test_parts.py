"""What a plan is told of a representation, against the states that it makes, on the meta device."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.states import CPU, add_moments, every_structure, spec
from hypothesis import given
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
    LowRank,
    NewtonSchulz,
    SumOfTerms,
)
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.several_pairs import SeveralPairs
from kfac_optim.inverses.state import Result
from kfac_optim.linalg.triangles import triangle_size, unpack_triangle
from kfac_optim.specs import FactorShape, LayerSpec, Structure

DENSE, DIAGONAL, IDENTITY = Structure.DENSE, Structure.DIAGONAL, Structure.IDENTITY
PAIRS = [Cholesky(), SumOfTerms(), LowRank(1), NewtonSchulz(), Eigen(), InverseAndRoot(), EKFAC()]
every_pair = pytest.mark.parametrize("inverse", PAIRS, ids=lambda inverse: type(inverse).__name__)

# Counts, flags and measures, and one mass for each average.
_COUNTED = {"refused", "refused_in_a_row", "retried", "failed", "failed_in_a_row", "condition", "conditions", "mass"}
_COUNTED |= {"cutoff", "fallbacks", "since_full", "S_mass", "S_substituted", "S_refused", "S_refused_in_a_row"}


def numbers(nested: dict[str, Any]) -> Iterator[Tensor]:
    for name, value in nested.items():
        if isinstance(value, dict):
            yield from numbers(value)
        elif name not in _COUNTED and value.dtype != torch.bool:
            yield value


def held_in_state(inverse: Inverse[Any], layer: LayerSpec) -> int:
    state = inverse.init(layer.by_blocks(), dtype=torch.float32, device=torch.device("meta"))
    # What opposed uses mix their averages to is held, and made anew from these when a checkpoint is loaded.
    mixed = [
        factor.packed
        for pair in mixed_pairs(getattr(state, "pair", None))
        for factor in (pair.a, pair.g)
        if factor is not None
    ]
    # So is the S that is applied among several processes, which checkpoints hold on one as well.
    kept = {name: tensor for name, tensor in state.tensors().items() if not name.startswith("S_applied")}
    return sum(tensor.numel() for tensor in [*numbers(kept), *mixed])


def mixed_pairs(pair: FactorPair | None) -> Iterator[FactorPair]:
    if isinstance(pair, SeveralPairs):
        yield pair
        for member in pair.members().values():
            yield from mixed_pairs(member)


def held_by_parts(inverse: Inverse[Any], layer: LayerSpec) -> int:
    return sum(
        part.held + sum(factor.packed for factor in part.sums if factor.structure is not IDENTITY)
        for part in inverse.parts(layer.by_blocks())
    )


def words(results: Iterable[Result]) -> int:
    """As they are sent."""
    return sum(
        len(tensor) * triangle_size(tensor.shape[-1]) if symmetric else tensor.numel()
        for tensor, symmetric, _ in results
    )


def assert_parts_are_what_is_shared(inverse: Inverse[Any], layer: LayerSpec) -> None:
    layer = layer.by_blocks()
    state = inverse.init(layer, dtype=torch.float32, device=torch.device("meta"))
    for part in inverse.parts(layer):
        averages, results = state.averages(part.name), state.results(part.name)
        assert [factor.packed.numel() for factor in averages] == [shape.packed for shape in part.sums]
        assert [factor.average.numel() for factor in averages] == [shape.numel for shape in part.sums]
        assert words(results) == part.sent
        assert words(result for result in results if result.measuring) == part.measuring


@every_pair
@every_structure
@given(
    inputs=st.integers(1, 6),
    outputs=st.integers(1, 6),
    groups=st.integers(1, 3),
    opposed=st.booleans(),
    shared=st.booleans(),
)
def test_parts_hold_what_the_state_holds(
    inverse: Inverse[Any],
    structure: tuple[Structure, Structure],
    inputs: int,
    outputs: int,
    groups: int,
    opposed: bool,
    shared: bool,
) -> None:
    layer = LayerSpec(
        "layer",
        ("weight",),
        inputs,
        outputs,
        groups=groups,
        structure=structure,
        shared_input=shared,
        opposed=opposed and IDENTITY not in structure,
    )
    assert held_by_parts(inverse, layer) == held_in_state(inverse, layer)
    assert_parts_are_what_is_shared(inverse, layer)
    parts = inverse.parts(layer)
    assert sum(part.refresh for part in parts) == pytest.approx(inverse.flops(layer).refresh)


@every_pair
def test_parts_of_a_factor_in_blocks(inverse: Inverse[Any]) -> None:
    for structure in ((DENSE, BlockDiagonal(2)), (BlockDiagonal(3), DIAGONAL)):
        layer = LayerSpec("layer", ("weight",), 7, 5, structure=structure)
        assert held_by_parts(inverse, layer) == held_in_state(inverse, layer)
        assert_parts_are_what_is_shared(inverse, layer)


def test_parts_of_three_factors() -> None:
    for params in (("weight",), ("weight", "bias")):
        layer = LayerSpec("layer", params, 12 + len(params) - 1, 5)
        inverse = DoublyFactored(channels=3)
        (part,) = inverse.parts(layer)
        assert_parts_are_what_is_shared(inverse, layer)
        assert held_by_parts(inverse, layer) == held_in_state(inverse, layer)
        assert part.sent == 3 * 4 // 2 + 4 * 5 // 2 + len(params) * 5 * 6 // 2
        assert part.refresh == inverse.flops(layer).refresh


def test_factors_that_are_damped_apart_need_the_trace_of_the_other() -> None:
    layer = spec(4, 3, 2, (DENSE, DIAGONAL))
    for inverse in (Cholesky(), LowRank(1), NewtonSchulz()):
        assert [(part.name, part.traces) for part in inverse.parts(layer)] == [("A", 2), ("G", 2)]
    assert [(part.name, part.traces) for part in Eigen().parts(layer)] == [("A", 0), ("G", 0)]
    assert [part.name for part in Cholesky().parts(spec(4, 3, 2, (DENSE, IDENTITY)))] == [""]
    assert [part.name for part in EKFAC().parts(layer)] == [""]


def test_what_is_sent() -> None:
    """Symmetric matrices as triangles, bases whole with what is in them, and a flag for each group."""
    layer = spec(4, 3, 2, (DENSE, DENSE))
    assert [part.sent for part in Cholesky().parts(layer)] == [2 * 10, 2 * 6]
    assert [part.sent for part in NewtonSchulz().parts(layer)] == [2 * 17, 2 * 10]
    assert [part.sent for part in Eigen().parts(layer)] == [2 * 21, 2 * 13]
    (part,) = EKFAC().parts(layer)
    assert (part.measuring, part.sent) == (2 * 26, 2 * 26 + 2 * 12)
    assert part.sums == ((DENSE, 2, 4, 1), (DENSE, 2, 3, 1), (DIAGONAL, 2, 12, 1))


def test_packed_and_whole_sizes_of_a_factor() -> None:
    assert (FactorShape(DENSE, 2, 3).packed, FactorShape(DENSE, 2, 3).numel) == (12, 18)
    assert (FactorShape(DIAGONAL, 2, 3).packed, FactorShape(DIAGONAL, 2, 3).numel) == (6, 6)


@pytest.mark.parametrize("opposed", [False, True])
@every_pair
def test_averages_are_unpacked_once_in_a_refresh_and_nowhere_else(
    inverse: Inverse[Any], opposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack = mock.Mock(side_effect=unpack_triangle)
    monkeypatch.setattr("kfac_optim.factors.factor.unpack_triangle", unpack)
    layer = replace(spec(4, 3, 2, (DENSE, DENSE)), opposed=opposed)
    state = inverse.init(layer, dtype=torch.float32, device=CPU)
    for _ in range(3):
        terms = state.pair.of_terms if isinstance(inverse, SumOfTerms) else [state.pair]
        for term in terms:
            for pair in (term.own, term.opposed) if opposed else (term,):
                add_moments(pair)
        state.fold(1, 0.9)
        state.age(0.9, 1)
        for part in inverse.parts(layer):
            others = [(factor.packed.flatten() * 2, torch.tensor(2.0)) for factor in state.averages(part.name)]
            state.merge(part.name, others)
        inverse.apply(state, torch.randn(2, 3, 4), 0.1)
        state.load(copy.deepcopy(state.tensors()))
        unpack.assert_not_called()
        inverse.refresh([state], [0.1])
        assert unpack.call_count == 2 * len(terms)
        unpack.reset_mock()


def test_of_three_factors_each_is_unpacked_once_in_a_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = mock.Mock(side_effect=unpack_triangle)
    monkeypatch.setattr("kfac_optim.factors.factor.unpack_triangle", unpack)
    inverse = DoublyFactored(channels=3)
    state = inverse.init(LayerSpec("layer", ("weight", "bias"), 13, 5), dtype=torch.float32, device=CPU)
    for factor in state.by_name.values():
        factor.add(torch.eye(factor.dim)[None])
    state.rows = 1
    state.fold(1, 0.9)
    unpack.assert_not_called()
    inverse.refresh([state], [0.1])
    assert unpack.call_count == 3
