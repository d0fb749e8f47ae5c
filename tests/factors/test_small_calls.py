"""Rows that wait until the step give the factors that moments taken at once give."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.plain import block
from torch import Tensor, nn

from kfac_optim import (
    BlockDiagonal,
    KFACOptimizer,
    LossTerms,
    LowRank,
    RowStatistics,
    Structure,
    Subsample,
    WeightSharing,
)
from kfac_optim.blocks import folding
from kfac_optim.factors import small_calls
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.layer_statistics import FewRows, UnitRows
from kfac_optim.factors.second_moments import on_host
from kfac_optim.factors.small_calls import SmallCall
from kfac_optim.layers.linear import LinearStatistics
from kfac_optim.layers.norm_statistics import NormStatistics
from kfac_optim.layers.product import ProductStatistics

Training = Callable[[nn.Module, Callable[[], None]], None]


def chain(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(5, 5, bias=bias), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(5, 3, bias=bias)).double()


class Shared(nn.Module):
    """Uses one layer twice, once through a function, and another on sequences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        once = torch.tanh(self.first(x))
        again = F.linear(once, self.first.weight)
        return self.last(self.second(torch.stack([once, again], 1)))


def inputs(seed: int) -> Tensor:
    return torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def once(model: nn.Module, step: Callable[[], None]) -> None:
    model(inputs(0)).square().mean().backward()
    step()


def accumulated(model: nn.Module, step: Callable[[], None]) -> None:
    for seed in range(2):
        (model(inputs(seed)).square().mean() / 2).backward()
    step()


def retained(model: nn.Module, step: Callable[[], None]) -> None:
    output = model(inputs(0))
    output[..., 0].square().mean().backward(retain_graph=True)
    output[..., 1].square().mean().backward()
    step()


def in_a_buffer(model: nn.Module, step: Callable[[], None]) -> None:
    buffer = inputs(0)
    model(buffer).square().mean().backward()
    buffer.fill_(torch.nan)
    step()


def masked(model: nn.Module, step: Callable[[], None]) -> None:
    x = inputs(0)
    x[2] = torch.nan
    (model(x)[[0, 1, 3, 4, 5, 6]]).square().mean().backward()
    step()


def thrown_away(model: nn.Module, step: Callable[[], None]) -> None:
    model(inputs(1)).square().mean().backward()
    for param in model.parameters():
        param.grad = None
    once(model, step)


def factors_of(model: nn.Module, training: Training, sharing: WeightSharing) -> tuple[list[Tensor | None], int]:
    summed = 0

    def count(calls: list[SmallCall]) -> None:
        nonlocal summed
        summed += len(calls)
        add(calls)

    add = folding.add_moments
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "add_moments", count)
        optimizer = KFACOptimizer(
            model, lr=0.1, factor_update_period=1, loss_terms=LossTerms.SUM, weight_sharing=sharing
        )
        for _ in range(2):
            training(model, optimizer.step)
            optimizer.zero_grad()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [factor for name in names for factor in block(optimizer, name).state.factors()], summed


@pytest.mark.parametrize(
    ("make", "training"),
    [
        (chain, once),
        (lambda: chain(bias=False), accumulated),
        (chain, retained),
        (chain, in_a_buffer),
        (chain, masked),
        (chain, thrown_away),
        (Shared, once),
        (Shared, retained),
    ],
)
@pytest.mark.parametrize("sharing", list(WeightSharing))
def test_rows_that_wait_give_the_factors_of_moments_taken_at_once(
    make: Callable[[], nn.Module], training: Training, sharing: WeightSharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, calls = factors_of(make(), training, sharing)
    assert (calls > 0) is (training is not retained)
    for statistics in (LinearStatistics, ProductStatistics):
        monkeypatch.setattr(statistics, "rows_may_wait", False)
    at_once, calls = factors_of(make(), training, sharing)
    assert calls == 0
    torch.testing.assert_close(waited, at_once, rtol=1e-12, atol=1e-14)


def test_calls_with_too_many_elements_do_not_wait() -> None:
    model = nn.Linear(64, 4)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    for rows, waits in ((2**8, True), (2**8 + 1, False)):
        optimizer.zero_grad()
        model(torch.randn(rows, 64)).square().mean().backward()
        assert bool(block(optimizer, "").waiting) is waits
        assert block(optimizer, "").has_pending()
        optimizer.step()


# -- on an accelerator -----------------------------------------------------------------------------------------------


class Padded(nn.Module):
    """Has wide and narrow layers on sequences, of which some positions are padding, and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maps = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Conv1d(3, 3, 3, padding=1, bias=False))
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)), nn.Linear(3, 2, bias=False))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        real = torch.arange(6) < torch.tensor([6, 3, 1, 5]).unsqueeze(1)
        return self.layers(self.maps(x).mT) * real.unsqueeze(-1)


class Norms(nn.Module):
    """Has several norms of each kind, of which some are equal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds: list[Callable[[], nn.Module]] = [
            lambda: nn.BatchNorm1d(4),
            lambda: nn.GroupNorm(2, 4),
            lambda: nn.InstanceNorm1d(4, affine=True),
            lambda: nn.LayerNorm(6),
            lambda: nn.LayerNorm(6, bias=False),
            lambda: nn.RMSNorm(6),
        ]
        self.first = nn.Conv1d(2, 4, 1)
        self.norms = nn.Sequential(*(kind() for kind in kinds for _ in range(3)), nn.LayerNorm(6, eps=0.1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norms(self.first(x)))


def padded(model: nn.Module, step: Callable[[], None]) -> None:
    for seed in range(2):
        x = torch.randn(4, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        model(x).square().sum().backward()
        x.fill_(torch.nan)
    step()


def factors_there(
    make: Callable[[], nn.Module], training: Training, options: dict[str, Any], *, wait: bool
) -> tuple[Any, list[int]]:
    """The factors after two steps, by the code for accelerators, and how many calls were taken together."""
    together: list[int] = []

    def counted(add: Callable[..., None]) -> Callable[..., None]:
        def add_counted(pairs: Sequence[FactorPair], rows: Sequence[FewRows | UnitRows]) -> None:
            together.append(len(pairs))
            add(pairs, rows)

        return add_counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_host, "__code__", (lambda _: False).__code__)
        for name in ("_add_there", "_add_units"):
            patch.setattr(small_calls, name, counted(getattr(small_calls, name)))
        if not wait:
            patch.setattr(RowStatistics, "_few_rows_there", lambda *_: None)
            patch.setattr(NormStatistics, "few_rows", lambda _: None)
        optimizer = KFACOptimizer(make(), lr=0.1, factor_update_period=1, loss_terms=LossTerms.SUM, **options)
        for _ in range(2):
            training(optimizer._binding.model, optimizer.step)
            optimizer.zero_grad()
        held = [block.state.tensors() for block in optimizer._binding.coverage.blocks]
    return held, together


@pytest.mark.parametrize(
    ("make", "training", "options"),
    [
        (chain, accumulated, {}),
        (chain, retained, {}),
        (chain, masked, {"inverse": LowRank(1, sketch=2)}),
        (chain, thrown_away, {}),
        (Shared, in_a_buffer, {"weight_sharing": WeightSharing.REDUCE}),
        (Padded, padded, {}),
        (Padded, padded, {"inverse": LowRank(1, sketch=2)}),
        (Padded, padded, {"inverse": LowRank(1, sketch=2), "subsample": Subsample(3)}),
        (Padded, padded, {"subsample": Subsample(3, 4), "structure": (BlockDiagonal(2), Structure.DENSE)}),
        (Padded, padded, {"subsample": Subsample(3, 4)}),
        (Norms, padded, {}),
        (Norms, padded, {"subsample": Subsample(3)}),
        (Norms, padded, {"weight_sharing": WeightSharing.REDUCE}),
    ],
)
@pytest.mark.parametrize("room", [None, 1, 200])
def test_rows_that_wait_on_an_accelerator_give_the_factors_of_moments_taken_at_once(
    make: Callable[[], nn.Module],
    training: Training,
    options: dict[str, Any],
    room: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once, together = factors_there(make, training, options, wait=False)
    assert not together
    if room is not None:
        monkeypatch.setattr(folding, "_HELD", 20 * room)
        monkeypatch.setattr(small_calls, "_TOGETHER", room)
    waited, together = factors_there(make, training, options, wait=True)
    torch.testing.assert_close(waited, at_once, rtol=1e-12, atol=1e-14)
    alone = training is retained or "structure" in options or (make is Norms and "weight_sharing" in options)
    assert bool(together) is not alone
    if room is None and make is Norms and together:
        assert max(together) >= 3
    if room == 1:
        assert set(together) <= {1}


def test_rows_wait_on_an_accelerator_until_they_would_take_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_host, "__code__", (lambda _: False).__code__)
    optimizer = KFACOptimizer(model := chain(), lr=0.1, factor_update_period=1)
    rows = 8 * 7 * (5 + 5)  # bytes of those of one of the layers of equal shape
    monkeypatch.setattr(folding, "_HELD", 8 * 7 * (5 + 3) + 2 * rows)
    model(inputs(0)).square().mean().backward()
    assert [len(each.waiting) for each in optimizer._binding.coverage.blocks] == [1, 0, 0, 0, 0]
    assert all(each.has_pending() for each in optimizer._binding.coverage.blocks)


@pytest.mark.parametrize("make", [Padded, Norms])
@pytest.mark.parametrize("options", [{}, {"inverse": LowRank(1, sketch=2)}, {"subsample": Subsample(3)}])
def test_factors_by_the_code_for_accelerators_are_those_by_the_code_for_hosts(
    make: Callable[[], nn.Module], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = []
    for _ in range(2):
        optimizer = KFACOptimizer(model := make(), lr=0.1, factor_update_period=1, **options)
        for _ in range(2):
            padded(model, optimizer.step)
            optimizer.zero_grad()
        factors.append(optimizer.factors())
        monkeypatch.setattr(on_host, "__code__", (lambda _: False).__code__)
    torch.testing.assert_close(*factors, rtol=1e-10, atol=1e-13)


def test_running_statistics_that_move_before_the_step_do_not_move_rows_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factors = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        nn.utils.vector_to_parameters(torch.linspace(-1, 1, 38), model.parameters())
        optimizer = KFACOptimizer(model, lr=0.0)
        x = torch.linspace(-2, 2, 32).sin().view(8, 4)
        model.eval()(x).square().mean().backward()
        with torch.no_grad():
            model.train()(3 + 2 * x)  # as of unlabelled examples
        optimizer.step()
        factors.append(optimizer.factors())
        monkeypatch.setattr(on_host, "__code__", (lambda _: False).__code__)
    torch.testing.assert_close(*factors)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.LSTM(2, 3, batch_first=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.cells(x.mT)[0]
        return output


@pytest.mark.parametrize("sharing", list(WeightSharing))
def test_rows_of_a_recurrence_are_shared_as_on_a_host(sharing: WeightSharing, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = []
    for _ in range(2):
        optimizer = KFACOptimizer(model := Recurrent(), lr=0.1, factor_update_period=1, weight_sharing=sharing)
        padded(model, optimizer.step)
        factors.append(optimizer.factors())
        monkeypatch.setattr(on_host, "__code__", (lambda _: False).__code__)
    torch.testing.assert_close(*factors, rtol=1e-10, atol=1e-13)


def test_a_step_in_which_no_group_has_a_row_is_none_of_theirs_on_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(on_host, "__code__", (lambda _: False).__code__)
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    for size in (3, 0, 3):
        optimizer.zero_grad()
        query, key = torch.randn(size, 2, 4), torch.randn(size, 5, 4)
        model(query, key, key, need_weights=False)[0].square().sum().backward()
        optimizer.step()
    assert all(bool(param.isfinite().all()) for param in model.parameters())
