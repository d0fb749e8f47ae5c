"""A refresh of a copy, taken over later: all that it computed and counted, and nothing that was folded since."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.cases import look_alikes
from helpers.oracles import assert_same, kronecker
from helpers.plain import assert_identical, mlp, square_loss
from torch import Tensor, nn

from kfac_optim import (
    EKFAC,
    Cholesky,
    DoublyFactored,
    Eigen,
    Inverse,
    InverseAndRoot,
    KFACOptimizer,
    LowRank,
    NewtonSchulz,
    Structure,
    SumOfTerms,
)
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.folding import sum_rows
from kfac_optim.blocks.shadow import adopt, make_shadow
from kfac_optim.step.roles import Statistics

pytestmark = pytest.mark.usefixtures("float64")

DENSE, DIAGONAL, IDENTITY = Structure
Kept = tuple[Structure, Structure]


class Tied(nn.Module):
    """One weight, used as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding((x.flatten(1).abs() * 100).long() % 5).tanh())


def over_maps() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *mlp(sizes=(12, 6, 3)))


SEVERAL = [
    Cholesky(),
    SumOfTerms(),
    LowRank(1),
    Eigen(),
    InverseAndRoot(),
    EKFAC(),
    NewtonSchulz(),
    NewtonSchulz(2, 1e-6),
]
CASES = [
    *[(look_alikes, inverse, (DENSE, DENSE)) for inverse in SEVERAL],
    *[(look_alikes, inverse, (DIAGONAL, DENSE)) for inverse in (Cholesky(), EKFAC(), NewtonSchulz())],
    *[(look_alikes, inverse, (DENSE, IDENTITY)) for inverse in (Cholesky(), EKFAC())],
    *[(Tied, inverse, (DENSE, DENSE)) for inverse in (Cholesky(), EKFAC())],
    (over_maps, DoublyFactored(2), (DENSE, DENSE)),
]


def over(cases: list[Any]) -> pytest.MarkDecorator:
    names = [f"{make.__name__}, {inverse}, {a.value}-{g.value}" for make, inverse, (a, g) in cases]
    return pytest.mark.parametrize(("make", "inverse", "structure"), cases, ids=names)


class Run:
    """The blocks of one model, folded and refreshed by hand."""

    def __init__(
        self, make: Callable[[], nn.Module], inverse: Inverse[Any], structure: Kept, folds: tuple[int, ...] = (0, 1)
    ) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = KFACOptimizer(
            self.model, lr=0.0, inverse=inverse, structure=structure, factor_decay=0.5, factor_update_period=1
        )
        self.blocks: list[KFACBlock] = self.optimizer._binding.coverage.blocks
        for number in folds:
            self.fold(number)
            self.refresh()

    def fold(self, number: int) -> None:
        torch.manual_seed(number)
        square_loss(self.model(torch.randn(6, 4, 3))).backward()
        count = self.optimizer._window.close()
        sum_rows(self.blocks)
        for block in self.blocks:
            block.fold(count, 1.0)
            block.clock.step += 1

    @torch.no_grad()
    def refresh(self) -> None:
        Statistics().solve(self.blocks)
        for block in self.blocks:
            block.clock.note_refresh(block.damping)

    @torch.no_grad()
    def refresh_shadows(self) -> list[KFACBlock]:
        shadows = [make_shadow(block) for block in self.blocks]
        Statistics().solve(shadows)
        return shadows

    @torch.no_grad()
    def adopt(self, shadows: list[KFACBlock]) -> None:
        for block, shadow in zip(self.blocks, shadows, strict=True):
            adopt(block, shadow)

    def tensors(self) -> list[dict[str, Any]]:
        return [block.state.tensors() for block in self.blocks]

    def poison(self) -> Callable[[], None]:
        """Make the first factor of the first block one that no refresh survives; what puts it right again."""
        factors = self.blocks[0].state.tensors()["factors"]
        factors = factors.get("term0", factors)
        average = next(factor["average"] for factor in factors.values() if isinstance(factor, dict))
        before = average.clone()
        average.fill_(torch.nan)
        return lambda: average.copy_(before)


def assert_folds_are(run: Run, other: Run) -> None:
    for ours, theirs in zip(run.tensors(), other.tensors(), strict=True):
        assert_identical(ours["factors"], theirs["factors"])


@over(CASES)
def test_adopted_at_once_a_refresh_of_a_copy_is_the_blocks_own_bit_for_bit(
    make: Callable[[], nn.Module], inverse: Inverse[Any], structure: Kept
) -> None:
    ours, theirs = Run(make, inverse, structure), Run(make, inverse, structure)
    for number in (2, 3):  # the second one starts from what was adopted
        for run in (ours, theirs):
            run.fold(number)
        ours.adopt(ours.refresh_shadows())
        theirs.refresh()
        assert_identical(ours.tensors(), theirs.tensors())
    for block, other in zip(ours.blocks, theirs.blocks, strict=True):
        assert block.clock == other.clock


@over(CASES)
def test_what_was_folded_since_stays_and_the_inverse_is_that_of_the_copy(
    make: Callable[[], nn.Module], inverse: Inverse[Any], structure: Kept
) -> None:
    late, soon, never = (Run(make, inverse, structure) for _ in range(3))
    for run in (late, soon, never):
        run.fold(2)
    soon.refresh()
    at_refresh = [{key: _copy(value) for key, value in tensors.items()} for tensors in soon.tensors()]
    shadows = late.refresh_shadows()
    for number in (3, 4):
        for run in (late, never):
            run.fold(number)
    late.adopt(shadows)
    assert_folds_are(late, never)
    sampled = {
        "factors",
        "S_applied",
        *(getattr(late.blocks[0].state, "sampled", dict)()),
        "refused",
        "refused_in_a_row",
    }
    for ours, theirs in zip(late.tensors(), at_refresh, strict=True):
        assert_identical(*({key: t[key] for key in t.keys() - sampled} for t in (ours, theirs)))
    for block in late.blocks:
        assert (block.clock.refreshed_at, block.clock.folds_at_refresh) == (3, 3)
        assert (block.clock.step, block.clock.folds) == (5, 5)


@over([case for case in CASES if case[0] is not Tied])  # whose factors are made from others
def test_a_refresh_that_failed_in_the_copy_counts_once(
    make: Callable[[], nn.Module], inverse: Inverse[Any], structure: Kept
) -> None:
    ours, theirs = Run(make, inverse, structure), Run(make, inverse, structure)
    for _ in range(2):
        restore = [run.poison() for run in (ours, theirs)]
        shadows = ours.refresh_shadows()
        theirs.refresh()
        for put_right in restore:
            put_right()
        ours.adopt(shadows)
        counted = ours.blocks[0].state.counters()
        assert int(ours.blocks[0].state.setbacks()[1]) > 0
        assert_identical(counted, theirs.blocks[0].state.counters())
        assert_identical(ours.tensors(), theirs.tensors())
    assert int(counted["failed_refreshes"]) > 1
    for run in (ours, theirs):
        run.fold(2)
    ours.adopt(ours.refresh_shadows())
    assert int(ours.blocks[0].state.setbacks()[1]) == 0


def test_samples_refused_while_the_copy_was_refreshed_stay_counted() -> None:
    for make, inverse in ((look_alikes, Cholesky()), (look_alikes, EKFAC()), (over_maps, DoublyFactored(2))):
        run = Run(make, inverse, (DENSE, DENSE))
        shadows = run.refresh_shadows()
        square_loss(run.model(torch.full((6, 4, 3), torch.nan))).backward()
        count = run.optimizer._window.close()
        sum_rows(run.blocks)
        for block in run.blocks:
            block.fold(count, 1.0)
        run.adopt(shadows)
        assert int(run.blocks[0].state.setbacks()[0]) == 1
        assert int(run.blocks[0].state.counters()["refused_statistics"]) == 1


@pytest.mark.parametrize("structure", [(DENSE, DENSE), (DIAGONAL, DENSE), (DENSE, DIAGONAL)])
def test_second_moments_sampled_since_are_carried_over_to_the_late_basis(structure: Kept) -> None:
    """The diagonal of the curvature as it stands now, not as it stood when the refresh was begun."""
    run = Run(look_alikes, EKFAC(), structure)
    run.fold(2)
    shadows = run.refresh_shadows()
    for number in (3, 4):
        run.fold(number)
    before = [curvature(block) for block in run.blocks]
    mass = [block.state.scales.mass.clone() for block in run.blocks]
    run.adopt(shadows)
    for block, dense, held in zip(run.blocks, before, mass, strict=True):
        basis = kronecker(*bases(block))
        diagonal = (basis.mT @ dense @ basis).diagonal(dim1=1, dim2=2)
        assert_same(block.state.second_moments.flatten(1), diagonal, rtol=1e-9)
        assert torch.equal(block.state.scales.mass, held)
        assert float(held) > 0


def bases(block: KFACBlock) -> list[Tensor]:
    """`U_A` and `U_G`, `[groups, d, d]`."""
    groups, *dims = block.state.second_moments.shape
    return [
        torch.eye(dim).expand(groups, dim, dim) if side.basis is None else side.basis.clone()
        for side, dim in zip((block.state.a, block.state.g), reversed(dims), strict=True)
    ]


def curvature(block: KFACBlock) -> Tensor:
    """`U diag(S) Uᵀ`, `[groups, out·in, out·in]`."""
    basis = kronecker(*bases(block))
    return basis @ torch.diag_embed(block.state.second_moments.flatten(1)) @ basis.mT


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else {key: _copy(each) for key, each in value.items()}
