"""Statistics of some rows: those that were drawn, weighed so that they stand for all."""

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.cases import LayerCase, any_loss, conv_cases, linear_cases, measure
from helpers.oracles import assert_same
from helpers.plain import assert_identical, batch, block, mlp, square_loss, train
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kfac_optim import (
    DEFAULT_ADAPTERS,
    EKFAC,
    BlockDiagonal,
    CurvaturePropagation,
    DoublyFactored,
    ExactGGN,
    KFACOptimizer,
    LayerSpec,
    LossTerms,
    MonteCarlo,
    RowStatistics,
    Structure,
    Subsample,
    WeightBiasAdapter,
    WeightSharing,
)
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.subsampling import Draw
from kfac_optim.layers.linear import LinearStatistics

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

CPU = torch.device("cpu")
DENSE, DIAGONAL, _ = Structure
EXPAND, REDUCE = WeightSharing

# -- the draw --------------------------------------------------------------------------------------------------------


@given(
    rows=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    most=st.tuples(st.one_of(st.none(), st.integers(1, 9)), st.one_of(st.none(), st.integers(1, 9))),
    bound=st.one_of(st.none(), st.integers(1, 90)),
    seed=st.integers(0, 2**40),
    step=st.integers(0, 1000),
)
def test_rows_are_drawn_without_replacement_and_stand_for_all(
    rows: tuple[int, int], most: tuple[int | None, int | None], bound: int | None, seed: int, step: int
) -> None:
    before = torch.get_rng_state()
    sample = Draw(Subsample(*most, seed, rows=bound), step).rows(*rows, CPU)
    assert torch.equal(before, torch.get_rng_state())
    taken = [min(size, limit or size) for size, limit in zip(rows, most, strict=True)]
    if bound is not None:
        while taken[0] > 1 and (taken[0] - 1) * taken[1] >= bound:
            taken[0] -= 1
    if taken == list(rows):
        assert sample is None
        return
    assert sample.weight * taken[0] * taken[1] == pytest.approx(rows[0] * rows[1])
    assert sample.examples.tolist() == sorted(set(sample.examples.tolist()))
    assert len(sample.examples) == taken[0]
    assert 0 <= sample.examples.min() <= sample.examples.max() < rows[0]
    numbered = torch.arange(rows[0] * rows[1]).view(1, *rows, 1)
    drawn = sample.of(numbered)
    assert drawn.shape == (1, *taken, 1)
    assert drawn.unique().numel() == taken[0] * taken[1]
    assert torch.equal(drawn[0, :, 0, 0] // rows[1], sample.examples)


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_examples_are_taken_whatever_the_order_of_the_memory(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.randn(shape).permute(order).contiguous().permute([order.index(axis) for axis in range(len(shape))])
    sample = Draw(Subsample(2), 0).rows(len(tensor), 1, CPU)
    if sample is not None:
        assert torch.equal(sample.of_batch(tensor), tensor[sample.examples])
        assert torch.equal(sample.part(1, 2).of_batch(tensor), tensor[sample.examples[1:]])


def test_the_draw_depends_on_seed_and_step_alone() -> None:
    def drawn(seed: int, step: int) -> list[int]:
        sample = Draw(Subsample(examples=5, positions=3, seed=seed), step).rows(100, 100, CPU)
        return torch.cat([sample.examples, sample.positions.flatten()]).tolist()

    keys = [(0, 0), (1, 0), (0, 1), (0, 11), (11, 0), (1, 1)]
    torch.manual_seed(1)
    first = [drawn(*key) for key in keys]
    torch.manual_seed(2)
    assert [drawn(*key) for key in keys] == first
    assert len({tuple(rows) for rows in first}) == len(keys)
    # As numbers, that a change of the recipe, which would break resumed runs, does not pass unseen.
    assert first[0][:5] == [10, 13, 14, 39, 69]


def test_every_row_is_as_likely_as_any_other() -> None:
    """2,000 draws of 2 of 5 examples and 3 of 7 positions: all counts within 5 standard deviations (35 of them)."""
    counts = torch.zeros(5, 7)
    for step in range(2000):
        sample = Draw(Subsample(2, 3), step).rows(5, 7, CPU)
        counts[sample.examples.unsqueeze(1), sample.positions] += 1
    p = 2 / 5 * 3 / 7
    assert (counts - 2000 * p).abs().max() < 5 * (2000 * p * (1 - p)) ** 0.5


# -- the statistics of what was drawn --------------------------------------------------------------------------------


@given(
    case=st.one_of(linear_cases(), conv_cases()),
    choice=st.builds(Subsample, st.one_of(st.none(), st.integers(1, 3)), st.one_of(st.none(), st.integers(1, 5))),
    sharing=st.sampled_from(WeightSharing),
)
def test_the_factors_are_those_of_the_rows_that_were_drawn(
    case: LayerCase, choice: Subsample, sharing: WeightSharing
) -> None:
    assume(sharing is EXPAND or choice.positions is None)
    module = case.module()
    measured = measure(module, case.input(), subsample=choice, weight_sharing=sharing)
    a, g = case.rows(module, measured.calls[""])
    sample = Draw(choice, 0).rows(*a.shape[1:3], CPU)
    weight = 1.0 if sample is None else sample.weight
    if sample is not None:
        a, g = sample.of(a), sample.of(g)
    expected = oracles.factors(a, g, terms=case.examples * weight, bias=case.trains_bias, sharing=sharing)
    assert_same(measured.factors[""], expected)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([5, 3, 2, 1])[: len(x)]
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.lstm(packed)[0].data


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x[:, 1:], x[:, :-1])[0][:, 1:]  # of the first query nothing is used


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(5), nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(5, 5)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([norm(x) for norm in self.norms])


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(4, 3), lambda: torch.randn(4, 5, 4)),
    "conv": (lambda: nn.Conv2d(4, 6, 2, groups=2, padding=1), lambda: torch.randn(4, 4, 3, 4)),
    "transposed conv": (
        lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=(2, 1), groups=2),
        lambda: torch.randn(4, 4, 3, 4),
    ),
    "embedding": (lambda: nn.Embedding(6, 3, padding_idx=2), lambda: torch.randint(6, (4, 5))),
    "lstm": (Recurrent, lambda: torch.randn(4, 5, 4)),
    "attention": (Attentive, lambda: torch.randn(4, 5, 4)),
    "norms": (Norms, lambda: torch.randn(4, 5, 4)),
}


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, found: list[tuple[KFACBlock, LayerStatistics, LayerStatistics]]) -> Any:
    """Notes of every call the statistics that a block is handed, with all rows and as it has taken them."""
    plain = KFACBlock.accumulate

    def accumulate(held: KFACBlock, stats: LayerStatistics) -> None:
        whole = copy.copy(stats)
        plain(held, stats)
        found.append((held, whole, stats))

    with monkeypatch.context() as patch:
        patch.setattr(KFACBlock, "accumulate", accumulate)
        yield


@pytest.mark.parametrize(
    ("sharing", "choice"),
    [(EXPAND, Subsample(2)), (EXPAND, Subsample(None, 3)), (EXPAND, Subsample(3, 2, seed=4)), (REDUCE, Subsample(2))],
    ids=repr,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_of_every_family_the_moments_are_those_of_the_rows_that_were_drawn(
    monkeypatch: pytest.MonkeyPatch, family: str, sharing: WeightSharing, choice: Subsample
) -> None:
    build, make_input = FAMILIES[family]
    model, found = build(), []
    optimizer = KFACOptimizer(model, lr=0.0, subsample=choice, weight_sharing=sharing)
    with watched(monkeypatch, found):
        any_loss(model(make_input())).backward()
    assert found
    sampled = 0
    for _, whole, stats in found:
        expanded = copy.copy(whole)
        expanded.spec = replace(whole.spec, weight_sharing=EXPAND)
        shape = expanded.rows()[1].shape[1:3]
        sample = Draw(choice, 0).rows(*shape, CPU)
        if sample is None:
            continue
        sampled += 1
        # Every row of what was not drawn made zero, its moments are those of what was.
        if sharing is EXPAND:
            a, g = (sample.of(rows).flatten(1, 2) for rows in expanded.rows())
            rows = int((g != 0).any(-1).any(0).sum())
        else:
            a, g = (part[:, sample.examples].squeeze(2) for part in whole.rows())
            rows = len(sample.examples)
        if g.abs().max() < 1e-12:
            continue  # of keys, whose gradients cancel over the positions of an example
        assert_same(stats.output_moment(DENSE), sample.weight * g.mT @ g)
        assert_same(stats.output_moment(DIAGONAL), sample.weight * g.square().sum(1))
        moment = sample.weight * a.mT @ a
        if isinstance(stats, RowStatistics):
            assert float(torch.as_tensor(stats.count).max()) == pytest.approx(sample.weight * rows)
            taken = stats.input_moment(DENSE)
            used = taken.flatten(1).any(1)
            assert used.any()
            assert_same(taken[used], moment.expand(len(taken), *moment.shape[1:])[used])
            assert_same(stats.input_moment(DIAGONAL), taken.diagonal(dim1=1, dim2=2))
        found_a, found_g = stats.rows()
        assert_same((found_a.flatten(1, 2), found_g.flatten(1, 2)), (a, sample.weight**0.5 * g))
        squares = stats.squared_gradients(None, None, dtype=torch.float64, per_example=False)
        assert_same(squares, (sample.weight * g.square().mT @ a.square()).expand_as(squares))
    assert sampled
    optimizer.step()


# -- unbiased --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sharing", "choice"),
    [
        (EXPAND, Subsample(examples=3)),
        (EXPAND, Subsample(positions=2)),
        (EXPAND, Subsample(examples=4, positions=3)),
        (REDUCE, Subsample(examples=3)),
    ],
    ids=repr,
)
def test_over_many_seeds_the_mean_is_that_of_all_rows(sharing: WeightSharing, choice: Subsample) -> None:
    """2,000 draws; no element of A, G or EKFAC's S is off by more than 5 standard errors (below 1e-4 by chance)."""
    torch.manual_seed(0)
    spec = LayerSpec("layer", ("weight", "bias"), 4, 3, weight_sharing=sharing)
    call = LayerCall(torch.randn(7, 5, 3) + 1, torch.randn(7, 5, 3) * torch.rand(7, 1, 1))
    bases = (torch.linalg.qr(torch.randn(1, 4, 4)).Q, torch.linalg.qr(torch.randn(1, 3, 3)).Q)
    per_example = choice.positions is None

    def parts(stats: LinearStatistics) -> Tensor:
        a = stats.input_moment(DENSE) / stats.count
        s = stats.squared_gradients(*bases, dtype=torch.float64, per_example=per_example)
        return torch.cat([a.flatten(), stats.output_moment(DENSE).flatten(), s.flatten()])

    draws = []
    for seed in range(2000):
        stats = LinearStatistics(spec, call, torch.float64)
        stats.subsample(Draw(replace(choice, seed=seed), 0))
        draws.append(parts(stats))
    found = torch.stack(draws)
    expected = parts(LinearStatistics(spec, call, torch.float64))
    varies = found.std(0) > 1e-9  # the bias column meets itself in each
    standard_error = found.std(0) / len(found) ** 0.5
    assert varies.float().mean() > 0.9
    assert ((found.mean(0) - expected).abs() <= 5 * standard_error + 1e-9).all()


def test_masked_rows_are_drawn_but_not_counted() -> None:
    """`A` is the mean of the active rows among those drawn; `G` is unbiased over 2,000 steps with padding too."""
    torch.manual_seed(0)
    spec = LayerSpec("layer", ("weight",), 3, 3)
    mask = torch.rand(6, 5, 1) < 0.5
    call = LayerCall(torch.where(mask, torch.randn(6, 5, 3), torch.nan), torch.where(mask, torch.randn(6, 5, 3), 0))
    full = LinearStatistics(spec, call, torch.float64).output_moment(DENSE)
    found = []
    for step in range(2000):
        stats = LinearStatistics(spec, call, torch.float64)
        draw = Draw(Subsample(4, 3), step)
        stats.subsample(draw)
        sample = draw.rows(6, 5, CPU)
        taken = sample.of(mask[None])[0, :, :, 0]
        rows = sample.of(call.input[None])[0][taken]
        assert stats.count == pytest.approx(sample.weight * len(rows))
        if len(rows):
            assert_same(stats.input_moment(DENSE)[0] / stats.count, rows.mT @ rows / len(rows))
        found.append(stats.output_moment(DENSE))
    found = torch.stack(found)
    assert ((found.mean(0) - full).abs() <= 5 * found.std(0) / len(found) ** 0.5).all()


# -- in training -----------------------------------------------------------------------------------------------------


def factors_of(model: nn.Module, run: Callable[[nn.Module], None], **options: Any) -> tuple[Tensor, Tensor]:
    optimizer = KFACOptimizer(model, lr=0.0, **options)
    run(model)
    optimizer.step()
    optimizer.remove_hooks()
    (pair,) = optimizer.factors().values()
    return pair


def test_a_bound_on_rows_takes_fewer_examples_where_they_have_many_positions() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AvgPool2d(3), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2))
    images, weights = torch.randn(12, 2, 8, 8), torch.randn(12, 2)  # the first layer has 36 positions, the others 1

    def factors(choice: Subsample | dict[str, Subsample]) -> dict[str, tuple[Tensor, Tensor]]:
        optimizer = KFACOptimizer(model, lr=0.0, subsample=choice)
        (model(images) * weights).sum().backward()
        optimizer.step()
        optimizer.remove_hooks()
        return optimizer.factors()

    for bound, examples in (
        (Subsample(rows=100), {"0": Subsample(3)}),
        (Subsample(rows=36), {"0": Subsample(1)}),
        (Subsample(rows=12 * 36), {}),
        (Subsample(rows=10), {"0": Subsample(1), "*": Subsample(10)}),
        (Subsample(positions=5, rows=11), {"0": Subsample(3, 5), "*": Subsample(11)}),
    ):
        assert_identical(factors(bound), factors(examples))


def test_several_backwards_through_one_forward_take_the_same_rows() -> None:
    layer, choice = nn.Linear(4, 3), Subsample(3, 2)
    inputs, weights = torch.randn(6, 4, 4), torch.randn(2, 6, 4, 3)
    weights[0, :3], weights[1, 2:] = 0, 0  # the second reaches rows that the first did not

    def at_once(model: nn.Module) -> None:
        (model(inputs) * weights.sum(0)).sum().backward()

    def one_by_one(model: nn.Module) -> None:
        output = model(inputs)
        (output * weights[0]).sum().backward(retain_graph=True)
        (output * weights[1]).sum().backward()

    for inverse in ({}, {"inverse": EKFAC(per_example=False)}):
        both = (factors_of(layer, run, subsample=choice, **inverse) for run in (at_once, one_by_one))
        assert_same(*both)


def test_checkpointed_layers_take_the_rows_of_plain_ones() -> None:
    layer, inputs = nn.Linear(4, 3), torch.randn(6, 5, 4)
    torch.manual_seed(3)
    plain = factors_of(
        layer,
        lambda model: square_loss(model(inputs)).backward(),
        subsample=Subsample(3, 2),
        loss_terms=LossTerms.SUM,
    )
    for reentrant in (False, True):
        given_input = inputs.clone().requires_grad_()
        again = factors_of(
            nn.Sequential(layer),
            lambda model, x=given_input, r=reentrant: square_loss(checkpoint(model[0], x, use_reentrant=r)).backward(),
            subsample={"0": Subsample(3, 2)},
            loss_terms=LossTerms.SUM,
        )
        assert_same(again, plain)


def test_calls_of_one_step_are_weighed_by_the_rows_they_stand_for() -> None:
    layer, choice = nn.Linear(3, 2, bias=False), Subsample(examples=2)
    batches = [torch.randn(20, 3), torch.randn(2, 3), torch.randn(5, 3)]

    def run(model: nn.Module) -> None:
        for rows in batches:
            square_loss(model(rows)).backward()

    a, _ = factors_of(layer, run, subsample=choice)
    drawn = [Draw(choice, 0).rows(len(rows), 1, CPU) for rows in batches]
    taken = [rows if sample is None else rows[sample.examples] for rows, sample in zip(batches, drawn, strict=True)]
    weights = [10.0, 1.0, 2.5]
    expected = sum(weight * rows.mT @ rows for weight, rows in zip(weights, taken, strict=True)) / (20 + 2 + 5)
    assert_same(a, expected[None])


def test_other_rows_are_taken_in_every_step_and_drawn_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = KFACOptimizer(model, lr=0.0, subsample=Subsample(examples=3), factor_update_period=1)
    found: list[tuple[KFACBlock, LayerStatistics, LayerStatistics]] = []
    with watched(monkeypatch, found):
        for _ in range(3):
            optimizer.zero_grad()
            square_loss(model(batch(size=40))).backward()
            optimizer.step()
    samples = [stats._sample for _, _, stats in found]
    assert len({id(sample) for sample in samples}) == len({tuple(sample.examples.tolist()) for sample in samples}) == 3


def test_the_random_numbers_of_training_stay_as_they_were() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, subsample=Subsample(examples=2), factor_update_period=1)
    before = torch.get_rng_state()
    train(model, optimizer, 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_takes_the_rows_of_the_uninterrupted_one(stop: int) -> None:
    options: dict[str, Any] = {
        "lr": 0.1,
        "factor_update_period": 1,
        "subsample": {"0": Subsample(examples=3), "*": Subsample(seed=5, examples=2)},
    }
    model = mlp()
    optimizer = KFACOptimizer(model, **options)
    train(model, optimizer, stop)
    twin = copy.deepcopy(model)
    resumed = KFACOptimizer(twin, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied = copy.deepcopy(optimizer)
    assert [block(copied, name).subsample for name in "02"] == [Subsample(3), Subsample(2, seed=5)]
    train(model, optimizer, 3, start=stop)
    train(twin, resumed, 3, start=stop)
    assert_identical(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize(
    "estimate",
    [MonteCarlo(nn.MSELoss()), CurvaturePropagation(nn.MSELoss()), ExactGGN(nn.MSELoss())],
    ids=lambda estimate: type(estimate).__name__,
)
def test_estimates_take_the_same_rows_in_all_their_passes(estimate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a linear layer and squares the exact GGN is the same for every example: `G` is that of all of them."""
    torch.manual_seed(0)
    layer, inputs = nn.Linear(4, 3), torch.randn(9, 4)
    found: list[tuple[KFACBlock, LayerStatistics, LayerStatistics]] = []
    run = lambda model: F.mse_loss(model(inputs), torch.randn(9, 3)).backward()  # noqa: E731
    with watched(monkeypatch, found):
        a, g = factors_of(layer, run, estimate=estimate, subsample=Subsample(examples=4))
    taken = {tuple(stats._sample.examples.tolist()) for _, _, stats in found}
    assert len(taken) == 1
    rows = F.pad(inputs[list(*taken)], (0, 1), value=1.0)
    assert_same(a, (rows.mT @ rows / 4)[None])
    if isinstance(estimate, ExactGGN):
        _, whole = factors_of(layer, run, estimate=estimate)
        assert_same(g, whole)


def test_a_doubly_factored_layer_takes_the_examples_that_were_drawn() -> None:
    layer, maps, choice = nn.Linear(6, 3), torch.randn(8, 6), Subsample(examples=4)
    optimizer = KFACOptimizer(layer, lr=0.0, inverse=DoublyFactored(2), subsample=choice)
    square_loss(layer(maps)).backward()
    optimizer.step()
    optimizer.remove_hooks()
    few = maps[Draw(choice, 0).rows(8, 1, CPU).examples]
    other = KFACOptimizer(layer, lr=0.0, inverse=DoublyFactored(2))
    other.zero_grad()
    other.set_loss_terms(8)
    (layer(few).square().sum() / 16).backward()
    other.step()
    found, expected = (block(each, "").state.by_name for each in (optimizer, other))
    for name in ("channels", "positions"):
        assert_same(found[name].average, expected[name].average)
    assert_same(found["G"].average, 2 * expected["G"].average)


def test_blocks_and_some_rows_go_together() -> None:
    layer, inputs, choice = nn.Linear(5, 7), torch.randn(6, 4, 5), Subsample(3, 2)
    run = lambda model: square_loss(model(inputs)).backward()  # noqa: E731
    dense = factors_of(layer, run, subsample=choice)
    a, g = factors_of(layer, run, subsample=choice, structure=(DENSE, BlockDiagonal(4)))
    assert_same(a, dense[0])
    assert_same(torch.block_diag(*g)[:7, :7], torch.block_diag(dense[1][0, :4, :4], dense[1][0, 4:, 4:]))


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and func is not torch.ops.aten.unfold.default:
            copied = output.untyped_storage().nbytes() // output.element_size()
            self.elements = max(self.elements, copied)
        return output


@pytest.mark.parametrize(
    ("build", "positions"), [(lambda: nn.Conv2d(3, 4, 5), 16**2), (lambda: nn.ConvTranspose2d(3, 4, 5), 24**2)]
)
@pytest.mark.parametrize("choice", [Subsample(2), Subsample(positions=20), Subsample(2, 20)], ids=repr)
def test_of_a_convolution_only_the_patches_that_were_drawn_are_copied(
    build: Callable[[], nn.Module], positions: int, choice: Subsample
) -> None:
    layer = build()
    optimizer = KFACOptimizer(layer, lr=0.0, subsample=choice)
    output = layer(torch.randn(6, 3, 20, 20))
    with Largest() as largest:
        square_loss(output).backward()
    patch = 3 * 25
    drawn = min(6, choice.examples or 6) * min(positions, choice.positions or positions)
    # The gradients of output and input, and what padding copies, are as large as ever.
    ordinary = max(output.numel(), 6 * 3 * 28**2)
    assert largest.elements <= max(ordinary, drawn * (patch + 1))
    assert largest.elements < 6 * positions * patch / 2
    optimizer.step()


# -- choices that do not go together ---------------------------------------------------------------------------------


class OwnAdapter(WeightBiasAdapter[nn.Linear]):
    """Does not say that it makes rows."""

    def unbatched_ndim(self, module: nn.Linear) -> int:
        return 1

    def statistics(self, module: nn.Linear, spec: LayerSpec, call: Any, dtype: torch.dtype) -> LayerStatistics:
        return DEFAULT_ADAPTERS[nn.Linear].statistics(module, spec, call, dtype)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"subsample": Subsample(positions=3), "weight_sharing": REDUCE},
            r"subsample=Subsample\(examples=None, positions=3, seed=0, rows=None\) does not fit layer '0': "
            r"weight_sharing is REDUCE.*Use Subsample\(examples=\.\.\.\), or weight_sharing=WeightSharing\.EXPAND",
        ),
        (
            {"subsample": Subsample(positions=3), "inverse": EKFAC()},
            r"does not fit layer '0': its inverse is EKFAC\(per_example=True\).*or EKFAC\(per_example=False\)",
        ),
        (
            {"subsample": {"0": Subsample(examples=3)}, "adapters": {nn.Linear: OwnAdapter()}},
            r"does not fit layer '0': OwnAdapter does not say that.*Set in_rows = True.*takes a mapping",
        ),
    ],
    ids=["reduce", "ekfac", "adapter"],
)
def test_choices_that_do_not_go_together_are_refused_with_the_remedy(options: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=message):
        KFACOptimizer(model, **options)
    assert not any(module._forward_hooks for module in model.modules())


def test_only_the_layers_that_are_named_are_subsampled() -> None:
    model = mlp()
    optimizer = KFACOptimizer(
        model,
        subsample={"0": Subsample(examples=3), "*": Subsample()},
        adapters={nn.Linear: DEFAULT_ADAPTERS[nn.Linear]},
    )
    assert [block(optimizer, name).subsample for name in "02"] == [Subsample(examples=3), Subsample()]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})  # blocks that are kept keep it
    assert [block(optimizer, name).subsample for name in "02"] == [Subsample(examples=3), Subsample()]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"examples": 0}, ValueError, r"examples of Subsample \(None is all\) must be at least 1, got 0"),
        ({"positions": -1}, ValueError, r"positions of Subsample \(None is all\) must be at least 1, got -1"),
        ({"rows": 0}, ValueError, r"rows of Subsample \(None is all\) must be at least 1, got 0"),
        ({"examples": 2.5}, TypeError, r"must be an integer, got 2\.5"),
        ({"positions": True}, TypeError, "must be an integer, got True"),
        ({"seed": -1}, ValueError, "seed of Subsample must be at least 0, got -1"),
        ({"seed": None}, TypeError, "seed of Subsample must be an integer, got None"),
    ],
)
def test_bad_numbers_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Subsample(**arguments)


@pytest.mark.parametrize("shape", [(0, 5), (6, 0)])
def test_of_no_rows_none_are_drawn(shape: tuple[int, int]) -> None:
    assert Draw(Subsample(examples=3, positions=2), 0).rows(*shape, CPU) is None
