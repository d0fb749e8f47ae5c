"""Pairs of equal shapes that are folded together come out as those that are folded one by one, bit for bit."""

import copy
import math
from itertools import chain

import pytest
import torch
from helpers.plain import Factors, assert_identical, assert_same_factors, mlp, train
from torch import Tensor

from kfac_optim import KFACOptimizer, LossTerms
from kfac_optim.factors import batched_fold
from kfac_optim.factors.batched_fold import alike_of, fold_together
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.several_pairs import make_pair
from kfac_optim.specs import Kept, LayerSpec, Sketched, Structure

STRUCTURES: list[tuple[Kept, Kept]] = [
    (Structure.DENSE, Structure.DENSE),
    (Structure.DIAGONAL, Structure.DENSE),
    (Structure.DENSE, Structure.IDENTITY),
]


def moment(groups: int, dim: int, structure: Kept) -> Tensor:
    rows = torch.randn(groups, 6, dim)
    if isinstance(structure, Sketched):
        products = rows.mT @ (rows @ torch.randn(dim, structure.columns))
        return torch.cat([products.flatten(1), rows.square().sum((1, 2)).unsqueeze(1)], 1)
    return rows.mT @ rows if structure is Structure.DENSE else rows.square().sum(1)


def sampled(pair: FactorPair, spec: LayerSpec) -> FactorPair:
    for factor, structure, dim in zip((pair.a, pair.g), spec.structure, (spec.in_dim, spec.out_dim), strict=True):
        if factor is not None:
            factor.add(moment(spec.groups, dim, structure).to(factor.dtype))
    pair.rows = 6
    return pair


@pytest.mark.parametrize(
    ("structure", "dtype", "groups"),
    [
        *[(structure, dtype, 1) for structure in STRUCTURES for dtype in (torch.float32, torch.float64)],
        (STRUCTURES[0], torch.bfloat16, 1),
        (STRUCTURES[1], torch.float32, 3),
        ((Sketched(2), Structure.DENSE), torch.float32, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("counted_by", ["the host", "the device"])
def test_a_batch_folds_as_each_pair_does(
    structure: tuple[Kept, Kept], dtype: torch.dtype, groups: int, counted_by: str
) -> None:
    torch.manual_seed(0)
    spec = LayerSpec("layer", ("weight",), 5, 3, groups=groups, structure=structure)
    together = [make_pair(spec, dtype=dtype, device=torch.device("cpu")) for _ in range(4)]
    alone = copy.deepcopy(together)
    for step in range(4):
        for pair, twin in zip(together, alone, strict=True):
            torch.manual_seed(step + 10 * together.index(pair))
            sampled(pair, spec)
            torch.manual_seed(step + 10 * together.index(pair))
            sampled(twin, spec)
            if counted_by == "the device":  # which may find that there was no row
                pair.rows = twin.rows = torch.tensor(step - together.index(pair)).clamp(min=0)
        for spoilt in (together[step], alone[step]):  # each is refused once, for one of its factors
            sides = [side for side in (spoilt.a, spoilt.g) if side is not None]
            factor = sides[step % len(sides)]
            assert factor.pending is not None
            factor.pending = factor.pending.clone()
            factor.pending[..., -1] = math.inf
        if not isinstance(structure[0], Sketched):  # which are small on accelerators alone
            assert len({alike_of(pair) for pair in together}) == 1
        fold_together([together], 12, 0.9, 2.0)
        for twin in alone:
            twin.fold(12, 0.9, 2.0)
        for pair, twin in zip(together, alone, strict=True):
            assert not pair.has_pending()
            for ours, theirs in zip(flat(pair.tensors()), flat(twin.tensors()), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("room", [2**26, 40, 1])
def test_a_family_folds_as_each_of_its_pairs_does(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(batched_fold, "_TOGETHER", room)
    numbers = [(5, 3, 4), (2, 2, 1), (6, 4, 2)]
    specs = [LayerSpec("layer", ("weight",), inputs, outputs) for inputs, outputs, _ in numbers]
    together = [
        [make_pair(spec, dtype=torch.float32, device=torch.device("cpu")) for _ in range(many)]
        for spec, (_, _, many) in zip(specs, numbers, strict=True)
    ]
    for step in range(3):
        for spec, pairs in zip(specs, together, strict=True):
            for number, pair in enumerate(pairs):
                sampled(pair, spec).rows = torch.tensor(number + step)
        assert len({alike_of(pair).family for pairs in together for pair in pairs}) == 1
        together[step][0].g.pending = together[step][0].g.pending * math.nan
        alone = copy.deepcopy(together)
        fold_together(together, 12, 0.9, 2.0)
        for pair, twin in zip(chain(*together), chain(*alone), strict=True):
            twin.fold(12, 0.9, 2.0)
            assert not pair.has_pending()
            assert_identical(pair.tensors(), twin.tensors())


def test_equal_layers_have_the_decay_of_their_own_group() -> None:
    def factors(*decays: float) -> Factors:
        model = mlp(sizes=(4, 4, 4))
        groups = [
            {"params": list(layer.parameters()), "factor_decay": decay}
            for layer, decay in zip((model[0], model[2]), decays, strict=True)
        ]
        optimizer = KFACOptimizer(groups, lr=0.0, model=model, factor_update_period=1)
        train(model, optimizer, 3)
        return optimizer.factors()

    slow, fast, mixed = factors(0.95, 0.95), factors(0.5, 0.5), factors(0.5, 0.95)
    assert_same_factors({"0": mixed["0"], "2": mixed["2"]}, {"0": fast["0"], "2": slow["2"]})


def flat(nested: dict) -> list[Tensor]:
    return [t for value in nested.values() for t in (flat(value) if isinstance(value, dict) else [value])]


def test_pairs_that_differ_are_not_folded_together() -> None:
    def shared(spec: LayerSpec, dtype: torch.dtype = torch.float32, rows: float | Tensor = 6) -> object:
        pair = sampled(make_pair(spec, dtype=dtype, device=torch.device("cpu")), spec)
        pair.rows = rows
        return alike_of(pair)

    plain = LayerSpec("layer", ("weight",), 5, 3)
    others = [
        shared(LayerSpec("layer", ("weight",), 4, 3)),
        shared(LayerSpec("layer", ("weight",), 5, 3, structure=STRUCTURES[1])),
        shared(plain, torch.float64),
        shared(plain, rows=7),
    ]
    assert shared(plain) == shared(plain)
    assert shared(plain) not in others
    assert shared(plain) != shared(plain, rows=torch.tensor(6)), "only the device knows how many"
    assert shared(plain, rows=torch.tensor([6])) is None, "groups have rows of their own"
    assert shared(LayerSpec("layer", ("weight",), 500, 3)) is None, "too large"
    told = sampled(make_pair(plain, dtype=torch.float32, device=torch.device("cpu")), plain)
    told.tell(2 * told.counts(1, 1))
    assert alike_of(told) is None, "its sample is a share of that of all ranks"
    assert alike_of(make_pair(plain, dtype=torch.float32, device=torch.device("cpu"))) is None, "nothing to fold"


def test_sums_of_many_calls_are_not_made_in_bfloat16() -> None:
    model = mlp(sizes=(4, 4, 4)).float()
    optimizer = KFACOptimizer(model, lr=0.0, factor_dtype=torch.bfloat16, loss_terms=LossTerms.EXAMPLES)
    for _ in range(600):
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for a, _ in optimizer.factors().values():
        assert a is not None
        assert a[0, -1, -1] == 1, "of the bias"
