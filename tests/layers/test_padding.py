"""Positions that the loss does not use leave the input factor as it would be without them.

The main oracle is the same layer without padding: every sequence runs by itself, and the calls' rows are pooled.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.cases import any_loss
from helpers.oracles import assert_same
from helpers.plain import block
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_optim import DEFAULT_ADAPTERS, KFACOptimizer, LayerStatistics, Structure, WeightSharing
from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.second_moments import on_host
from kfac_optim.layers.recurrent import SequenceStatistics
from kfac_optim.specs import LayerSpec

pytestmark = pytest.mark.usefixtures("float64")

HUGE = 1e100
DENSE = (Structure.DENSE, Structure.DENSE)


# -- sequences and models of them ----------------------------------------------------------------------------------


class Sequences(nn.Module):
    """A batch `[batch, positions, 4]`, real where `real` `[batch, positions]`, to `[batch, positions, width]`."""

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        raise NotImplementedError


class Perceptron(Sequences):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.net(x)


class Pointwise(Sequences):
    def __init__(self, kind: type[nn.Conv1d] | type[nn.ConvTranspose1d], groups: int) -> None:
        super().__init__()
        self.first, self.second = kind(4, 6, 1, groups=groups), kind(6, 3, 1)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.second(self.first(x.mT).tanh()).mT


class Recurrent(Sequences):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.lstm(x)[0]


class SelfAttention(Sequences):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=~real)[0]


class CrossAttention(Sequences):
    """Of two queries, which are all real, to a padded memory."""

    def __init__(self, separate: bool, distinct: bool) -> None:
        super().__init__()
        wide = {"kdim": 4, "vdim": 4} if separate else {}
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **wide)
        self.distinct = distinct

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        queries, memory = x[:, :2].cos(), x
        output, _ = self.attention(queries, memory, memory + 1 if self.distinct else memory, key_padding_mask=~real)
        return F.pad(output, (0, 0, 0, x.shape[1] - 2))


class Encoder(Sequences):
    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=~real)


MODELS: dict[str, Callable[[], Sequences]] = {
    "Linear": Perceptron,
    "Conv1d": lambda: Pointwise(nn.Conv1d, 1),
    "Conv1d in groups": lambda: Pointwise(nn.Conv1d, 2),
    "ConvTranspose1d": lambda: Pointwise(nn.ConvTranspose1d, 2),
    "LSTM": Recurrent,
    "self-attention": SelfAttention,
    "cross-attention": lambda: CrossAttention(separate=False, distinct=False),
    "cross-attention, keys are not values": lambda: CrossAttention(separate=False, distinct=True),
    "cross-attention, weights apart": lambda: CrossAttention(separate=True, distinct=False),
    "encoder": lambda: Encoder(norm_first=False),
    "encoder, norm first": lambda: Encoder(norm_first=True),
}
every_model = pytest.mark.parametrize("name", MODELS)


def build(name: str) -> Sequences:
    torch.manual_seed(1)
    return MODELS[name]()


def real_positions(lengths: list[int], positions: int) -> Tensor:
    return torch.arange(positions) < torch.tensor(lengths).unsqueeze(1)


def loss_of(output: Tensor, real: Tensor, terms: int) -> Tensor:
    """Of the real positions, differing in every element."""
    kept = output[real]
    return (kept.sin() + kept.square()).sum() / terms


def factors_of(optimizer: KFACOptimizer) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    optimizer.step()
    return optimizer.factors()


def padded(name: str, x: Tensor, lengths: list[int], **options: Any) -> dict[str, Any]:
    """Factors of one step on the padded batch."""
    model, real = build(name), real_positions(lengths, x.shape[1])
    optimizer = KFACOptimizer(model, lr=0.0, **options)
    optimizer.set_loss_terms(len(x))
    loss_of(model(x, real), real, len(x)).backward()
    return factors_of(optimizer)


def unpadded(name: str, x: Tensor, lengths: list[int], **options: Any) -> dict[str, Any]:
    """Of one step in which every sequence has a forward of its own."""
    model = build(name)
    optimizer = KFACOptimizer(model, lr=0.0, **options)
    optimizer.set_loss_terms(len(x))
    losses = []
    for sequence, length in zip(x, lengths, strict=True):
        real = torch.ones(1, length, dtype=torch.bool)
        losses.append(loss_of(model(sequence[None, :length], real), real, len(x)))
    torch.stack(losses).sum().backward()
    return factors_of(optimizer)


def assert_same_factors(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, pair in ours.items():
        assert_same(pair, theirs[name])


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tensors hold is not looked at, as where an accelerator would have to be waited for."""
    monkeypatch.setattr(on_host, "__code__", (lambda _: False).__code__)


@pytest.fixture(params=["host", "accelerator"])
def place(request: pytest.FixtureRequest) -> str:
    if request.param == "accelerator":
        request.getfixturevalue("accelerator")
    return request.param


# -- the same data without the padding -----------------------------------------------------------------------------


@every_model
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("sharing", WeightSharing)
@pytest.mark.parametrize("garbage", [1.0, HUGE])
def test_factors_are_those_of_every_sequence_by_itself(name: str, sharing: WeightSharing, garbage: float) -> None:
    lengths = [2, 5, 3]
    x = torch.randn(3, 6, 4)  # no sequence is as long as the batch
    spoiled = torch.where(real_positions(lengths, 6).unsqueeze(-1), x, garbage * torch.randn_like(x))
    expected = unpadded(name, x, lengths, weight_sharing=sharing)
    assert_same_factors(padded(name, spoiled, lengths, weight_sharing=sharing), expected)


@every_model
@settings(max_examples=6)
@given(lengths=st.lists(st.integers(2, 5), min_size=1, max_size=4), sharing=st.sampled_from(WeightSharing))
def test_any_amount_of_padding_is_as_good_as_none(name: str, lengths: list[int], sharing: WeightSharing) -> None:
    x = torch.randn(len(lengths), 5, 4)
    expected = unpadded(name, x, lengths, weight_sharing=sharing)
    assert_same_factors(padded(name, x, lengths, weight_sharing=sharing), expected)


@every_model
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("sharing", WeightSharing)
def test_micro_batches_with_different_padding_are_as_the_whole(name: str, sharing: WeightSharing) -> None:
    lengths = [2, 3, 5, 2, 4]
    x = torch.randn(5, 6, 4)
    whole = padded(name, x, lengths, weight_sharing=sharing)
    model = build(name)
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=sharing)
    for part, positions in ((slice(0, 2), 3), (slice(2, 5), 6)):
        real = real_positions(lengths[part], positions)
        loss_of(model(x[part, :positions], real), real, 5).backward()
    assert_same_factors(factors_of(optimizer), whole)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("sharing", WeightSharing)
def test_unequal_memories_are_averaged_over_their_own_positions(sharing: WeightSharing) -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    optimizer = KFACOptimizer(attention, lr=0.0, weight_sharing=sharing)
    queries, keys, values = torch.randn(3, 2, 4), torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    lengths = [5, 2, 3]
    real, used = real_positions(lengths, 5), torch.tensor([[True, False], [True, True], [True, True]])
    output, _ = attention(queries, keys, values, key_padding_mask=~real)
    any_loss(output[used]).backward()
    a, _ = factors_of(optimizer)["in_proj"]
    for group, (rows, kept) in enumerate(((queries, used), (keys, real), (values, real))):
        assert_same(a[group], by_definition(rows, kept, True, sharing))


# -- any mask ------------------------------------------------------------------------------------------------------


def by_definition(rows: Tensor, kept: Tensor, bias: bool, sharing: WeightSharing) -> Tensor:
    """`A` of the rows `[batch, positions, in]` that `kept` `[batch, positions]` marks; zero without any."""
    examples = [oracles.with_ones(example[mask], bias) for example, mask in zip(rows, kept, strict=True)]
    if sharing is WeightSharing.REDUCE:
        examples = [example.mean(0, keepdim=True) for example in examples if len(example)]
    pooled = torch.cat([*examples, rows.new_zeros(0, rows.shape[-1] + bias)])
    return pooled.T @ pooled / max(len(pooled), 1)


@st.composite
def masks(draw: st.DrawFn, positions: int, several: int = 1) -> list[Tensor]:
    """`[batch, positions]`, with at least one position of each."""
    batch = draw(st.integers(1, 4))
    found = []
    for _ in range(several):
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=batch * positions, max_size=batch * positions)))
        mask[draw(st.integers(0, len(mask) - 1))] = True
        found.append(mask.view(batch, positions))
    return found


@settings(max_examples=40)
@given(mask=masks(3), bias=st.booleans(), sharing=st.sampled_from(WeightSharing))
def test_linear_rows_count_where_there_is_a_gradient(mask: list[Tensor], bias: bool, sharing: WeightSharing) -> None:
    (kept,) = mask
    module, x = nn.Linear(3, 2, bias), torch.randn(*kept.shape, 3)
    optimizer = KFACOptimizer(module, lr=0.0, weight_sharing=sharing)
    any_loss(module(x)[kept]).backward()
    assert_same(factors_of(optimizer)[""][0], by_definition(x, kept, bias, sharing)[None])


@settings(max_examples=40)
@given(
    mask=masks(4),
    transposed=st.booleans(),
    sharing=st.sampled_from(WeightSharing),
    structure=st.sampled_from([Structure.DENSE, Structure.DIAGONAL]),
)
def test_patches_count_where_there_is_a_gradient_in_any_group(
    mask: list[Tensor], transposed: bool, sharing: WeightSharing, structure: Structure
) -> None:
    (kept,) = mask
    kind = nn.ConvTranspose1d if transposed else nn.Conv1d
    module, x = kind(4, 2, 3, groups=2, padding=1), torch.randn(len(kept), 4, 4)
    optimizer = KFACOptimizer(module, lr=0.0, weight_sharing=sharing, structure=(structure, Structure.DENSE))
    output = module(x).mT
    used = torch.stack([kept, torch.zeros_like(kept)], dim=-1)  # of the second group nothing
    any_loss(output[used]).backward()
    if transposed:  # at stride 1 a convolution with the kernel flipped
        ordinary = nn.Conv1d(4, 2, 3, groups=2, padding=1)
        patches = oracles.conv_rows(ordinary, x)
    else:
        patches = oracles.conv_rows(module, x)
    expected = torch.stack([by_definition(rows, kept, True, sharing) for rows in patches])
    expected = expected if structure is Structure.DENSE else expected.diagonal(dim1=1, dim2=2)
    assert_same(factors_of(optimizer)[""][0], expected)


@settings(max_examples=40)
@given(
    mask=masks(4),
    padding_idx=st.sampled_from([None, 2]),
    sharing=st.sampled_from(WeightSharing),
    structure=st.sampled_from([Structure.DENSE, Structure.DIAGONAL]),
)
def test_tokens_count_where_there_is_a_gradient_and_no_padding(
    mask: list[Tensor], padding_idx: int | None, sharing: WeightSharing, structure: Structure
) -> None:
    (kept,) = mask
    module, ids = nn.Embedding(5, 3, padding_idx=padding_idx), torch.randint(5, kept.shape)
    ids.view(-1)[0] = 1
    kept[0, 0] = True
    optimizer = KFACOptimizer(module, lr=0.0, weight_sharing=sharing, structure=(structure, Structure.DENSE))
    any_loss(module(ids)[kept]).backward()
    expected = by_definition(F.one_hot(ids, 5).double(), kept & (ids != padding_idx), False, sharing)
    # An embedding's A never keeps more than its diagonal.
    assert_same(factors_of(optimizer)[""][0], expected.diagonal()[None])


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("sharing", WeightSharing)
def test_ignored_targets_count_for_nothing(sharing: WeightSharing) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, target = torch.randn(3, 4, 4), torch.randint(3, (3, 4))
    target[0, 1:] = target[1] = -100
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=sharing)
    F.cross_entropy(model(x).flatten(0, 1), target.flatten()).backward()
    factors = factors_of(optimizer)
    hidden = model[1](model[0](x)).detach()
    for name, rows in (("0", x), ("2", hidden)):
        assert_same(factors[name][0], by_definition(rows, target >= 0, True, sharing)[None])


def test_a_shared_input_counts_where_query_key_or_value_does() -> None:
    # A loss on the first position needs the first query, and every key and value.
    x = torch.randn(5, 4)
    attention = nn.MultiheadAttention(4, 2)
    optimizer = KFACOptimizer(attention, lr=0.0)
    optimizer.set_loss_terms(1)
    any_loss(attention(x, x, x)[0][0]).backward()
    a, _ = factors_of(optimizer)["in_proj"]
    assert_same(a, by_definition(x[None], torch.ones(1, 5, dtype=torch.bool), True, WeightSharing.EXPAND)[None])


def test_the_memory_is_learned_where_it_has_a_single_position() -> None:
    # Its weight is 1 whatever the scores are: queries and keys have no gradient then.
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    optimizer = KFACOptimizer(attention, lr=1.0)
    queries, key, value = torch.randn(3, 2, 4), torch.randn(3, 1, 4), torch.randn(3, 1, 4)
    any_loss(attention(queries, key, value, need_weights=True)[0]).backward()
    a, g = factors_of(optimizer)["in_proj"]
    assert not g[:2].any()
    assert not a[:2].any()
    assert_same(a[2], by_definition(value, torch.ones(3, 1, dtype=torch.bool), True, WeightSharing.EXPAND))
    assert all(param.isfinite().all() for param in attention.parameters())


# -- several backwards ---------------------------------------------------------------------------------------------


class Convolution(Sequences):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 2, 3, padding=1, groups=2)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.conv(x.mT).mT


class Tokens(Sequences):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, padding_idx=2)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.embedding(x[..., 0].mul(7).long() % 5)


MORE = {**MODELS, "Conv1d of three taps": Convolution, "Embedding": Tokens}


@pytest.mark.parametrize("name", MORE)
@settings(max_examples=10)
@given(used=masks(4, several=3), sharing=st.sampled_from(WeightSharing), nothing_first=st.booleans())
def test_several_backwards_of_different_rows_are_as_one_of_their_sum(
    name: str, used: list[Tensor], sharing: WeightSharing, nothing_first: bool
) -> None:
    x = torch.randn(len(used[0]), 4, 4)
    if nothing_first:
        used = [torch.zeros_like(used[0]), *used]
    measured = []
    for at_once in (False, True):
        torch.manual_seed(1)
        model = MORE[name]()
        optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=sharing)
        output = model(x, torch.ones(used[0].shape, dtype=torch.bool))
        torch.manual_seed(2)
        losses = [(output * torch.randn(output.shape) * mask.unsqueeze(-1)).sum() for mask in used]
        for loss in [torch.stack(losses).sum()] if at_once else losses:
            loss.backward(retain_graph=True)
        measured.append(factors_of(optimizer))
    assert_same_factors(measured[0], measured[1])


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("sharing", WeightSharing)
def test_on_an_accelerator_the_rows_of_the_first_backward_count(sharing: WeightSharing) -> None:
    module, x = nn.Linear(3, 2), torch.randn(3, 4, 3)
    optimizer = KFACOptimizer(module, lr=0.0, weight_sharing=sharing)
    first, second = real_positions([1, 3, 0], 4), real_positions([4, 4, 4], 4)
    output = module(x)
    for mask in (first, second):
        any_loss(output[mask]).backward(retain_graph=True)
    assert_same(factors_of(optimizer)[""][0], by_definition(x, first, True, sharing)[None])


# -- nothing but padding -------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("sharing", WeightSharing)
def test_a_batch_of_padding_leaves_the_factors_as_they_are(name: str, sharing: WeightSharing, place: str) -> None:
    model, x = build(name), torch.randn(3, 4, 4)
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=sharing, inverse_update_period=1, factor_update_period=1)
    real = torch.ones(3, 4, dtype=torch.bool)
    held = []
    for scale in (1.0, 0.0):
        optimizer.zero_grad()
        (loss_of(model(x, real), real, 3) * scale).backward()
        optimizer.step()
        weighed = [name for name, (a, _) in optimizer.factors().items() if a is not None]  # the others are norms
        held.append({name: (optimizer.factors()[name], mass_of(optimizer, name)) for name in weighed})
        x = torch.randn_like(x)
    decay = 1.0 if place == "host" else 0.95  # which only the host can put off until there is a sample
    for layer, (factors, mass) in held[0].items():
        assert_same(held[1][layer][0], factors, rtol=0)
        assert_same(held[1][layer][1], mass * decay, rtol=1e-15)
    assert all(param.isfinite().all() for param in model.parameters())


def mass_of(optimizer: KFACOptimizer, name: str) -> Tensor:
    mass: Tensor = block(optimizer, name).state.pair.a.mass.clone()
    return mass


# -- the parts -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("sharing", WeightSharing)
@pytest.mark.parametrize("structure", [Structure.DENSE, Structure.DIAGONAL])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 3), lambda: nn.Conv1d(4, 3, 1)], ids=["linear", "conv"])
def test_rows_without_gradient_may_hold_anything(
    build: Callable[[], nn.Module], bad: float, structure: Structure, sharing: WeightSharing
) -> None:
    module, kept = build(), real_positions([1, 0, 4], 4)
    x = torch.where(kept.unsqueeze(-1), torch.randn(3, 4, 4), bad)
    gradient = kept.unsqueeze(-1) * torch.randn(3, 4, 3)
    layer_input, output_gradient = (x, gradient) if isinstance(module, nn.Linear) else (x.mT, gradient.mT)
    stats = statistics(module, layer_input, output_gradient, sharing)
    expected = by_definition(x, kept, True, sharing) * float(stats.count)
    expected = expected if structure is Structure.DENSE else expected.diagonal()
    assert int(stats.count) == (5 if sharing is WeightSharing.EXPAND else 2)
    assert_same(stats.input_moment(structure), expected[None])


@pytest.mark.parametrize("sharing", WeightSharing)
def test_a_gradient_that_is_not_a_number_is_no_padding(sharing: WeightSharing) -> None:
    gradient = torch.zeros(3, 4, 2)
    gradient[1, 2] = torch.nan
    stats = statistics(nn.Linear(3, 2), torch.randn(3, 4, 3), gradient, sharing)
    assert stats.count == 1
    assert not stats.output_moment(Structure.DENSE).isfinite().any()


def statistics(module: nn.Module, x: Tensor, gradient: Tensor, sharing: WeightSharing) -> LayerStatistics:
    adapter = DEFAULT_ADAPTERS[type(module)]
    (spec,) = adapter.specs(module, "", {"weight", "bias"})
    changed = LayerSpec(spec.name, spec.params, spec.in_dim, spec.out_dim, weight_sharing=sharing)
    return adapter.statistics(module, changed, LayerCall(x, gradient), torch.float64)


@pytest.mark.parametrize("sharing", WeightSharing)
def test_rows_that_do_not_count_are_zero(sharing: WeightSharing) -> None:
    kept = real_positions([1, 0, 4], 4)
    x = torch.randn(3, 4, 3)
    stats = statistics(nn.Linear(3, 2), x, kept.unsqueeze(-1) * torch.randn(3, 4, 2), sharing)
    a = stats.rows()[0].flatten(1, 2)
    assert_same(a.mT @ a, stats.input_moment(Structure.DENSE))
    assert int((a[..., -1] == 1).sum()) == stats.count
    assert int((a == 0).all(-1).sum()) == a.shape[1] - stats.count


def test_the_input_is_kept_only_where_rows_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gradient = torch.randn(3, 4, 3), torch.randn(3, 4, 2)
    some = gradient * real_positions([1, 0, 4], 4).unsqueeze(-1)
    rows = pack_padded_sequence(x, torch.tensor([4, 3, 1]), batch_first=True)
    packed = SequenceStatistics(
        LayerSpec("", ("weight",), 3, 2),
        LayerCall(rows.data, torch.randn(8, 2), context=tuple(rows.batch_sizes.tolist())),
        torch.float64,
    )
    module, expand = nn.Linear(3, 2), WeightSharing.EXPAND
    assert not statistics(module, x, gradient, expand).keeps_input
    assert not packed.keeps_input
    assert statistics(module, x, some, expand).keeps_input
    monkeypatch.setattr("kfac_optim.factors.row_statistics.on_host", lambda _: False)
    assert not statistics(module, x, some, expand).keeps_input


class GroupsOfTheirOwn(LayerStatistics):
    """`rows[i]` rows of group i, each `(i + 1, 1)`."""

    def __init__(self, rows: list[int]) -> None:
        self._rows = torch.tensor(rows)

    @property
    def count(self) -> Tensor:
        return self._rows

    def input_moment(self, structure: Structure) -> Tensor:
        a = torch.stack([torch.tensor([i + 1.0, 1.0]) for i in range(len(self._rows))])
        return self._rows.view(-1, 1, 1) * a.unsqueeze(2) * a.unsqueeze(1)

    def output_moment(self, structure: Structure) -> Tensor:
        return torch.ones(len(self._rows), 1, 1)

    def rows(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


@pytest.mark.usefixtures("place")
def test_every_group_is_averaged_over_its_own_rows_and_one_without_stays_as_it_is() -> None:
    spec = LayerSpec("", ("weight",), 2, 1, groups=3, own_rows=True)
    pair = FactorPair(spec, dtype=torch.float64, device=torch.device("cpu"))
    whole = GroupsOfTheirOwn([1, 1, 1]).input_moment(Structure.DENSE)
    masses = []
    for counts in ([2, 5, 3], [1, 0, 4], [0, 6, 3], [0, 0, 0]):
        pair.accumulate(GroupsOfTheirOwn(counts))
        if pair.has_pending():
            pair.fold(1.0, 1.0, 1.0)
        masses.append(pair.a.mass.flatten().tolist())
        assert_same(pair.a.average, whole)
        assert_same(pair.g.average, torch.ones(3, 1, 1))
        pair.discard()
    assert masses == [[2, 5, 3], [3, 5, 7], [3, 11, 10], [3, 11, 10]]


def test_groups_that_count_their_rows_are_refused_where_the_layer_has_one_mass() -> None:
    pair = FactorPair(LayerSpec("mine", ("weight",), 2, 1, groups=3), dtype=torch.float64, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"groups of layer 'mine' have rows of their own, \[3\].*own_rows=True"):
        pair.accumulate(GroupsOfTheirOwn([1, 2, 0]))


class NoWaiting(TorchDispatchMode):
    """Fails where the host would have to know what a tensor holds."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        indices = args[1] if name.startswith("aten.index.") else ()
        by_mask = any(isinstance(index, Tensor) and index.dtype is torch.bool for index in indices)
        waits = by_mask or any(word in name for word in ("_local_scalar_dense", "nonzero", "aten.equal", "masked_sel"))
        assert not waits, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


def calls() -> Iterator[tuple[nn.Module, Tensor]]:
    yield nn.Linear(3, 2), torch.randn(2, 4, 3)
    yield nn.Conv2d(2, 2, 2), torch.randn(2, 2, 3, 3)
    yield nn.ConvTranspose1d(2, 2, 2), torch.randn(2, 2, 3)
    yield nn.Embedding(5, 3, padding_idx=1), torch.randint(5, (2, 4))


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("sharing", WeightSharing)
@pytest.mark.parametrize("structure", [Structure.DENSE, Structure.DIAGONAL])
def test_no_accelerator_is_waited_for(structure: Structure, sharing: WeightSharing) -> None:
    for module, x in calls():
        adapter = DEFAULT_ADAPTERS[type(module)]
        (spec,) = adapter.specs(module, "", dict(module.named_parameters()))
        spec = LayerSpec(spec.name, spec.params, spec.in_dim, spec.out_dim, 1, (structure, DENSE[1]), sharing)
        pair = FactorPair(spec, dtype=torch.float64, device=torch.device("cpu"))
        gradient = torch.randn(module(x).shape)
        with NoWaiting():
            for earlier in (None, gradient):
                kept = x if earlier is None or isinstance(module, nn.Embedding) else None
                stats = adapter.statistics(module, spec, LayerCall(kept, gradient * 2, earlier), torch.float64)
                pair.accumulate(stats)
                assert isinstance(pair.rows, Tensor)
                assert stats.keeps_input == isinstance(module, nn.Embedding)
            pair.fold(1.0, 0.9, 1.0)
        assert pair.a.average.any()


def test_ends_of_packed_sequences_and_masked_time_steps_are_no_rows() -> None:
    torch.manual_seed(3)
    measured, lengths = [], torch.tensor([4, 2, 3])
    x = torch.randn(3, 4, 4)
    used = [1, 2, 3]
    for shortened in (False, True):
        torch.manual_seed(1)
        lstm = nn.LSTM(4, 3, batch_first=True)
        optimizer = KFACOptimizer(lstm, lr=0.0, weight_sharing=WeightSharing.REDUCE)
        optimizer.set_loss_terms(3)
        ends = torch.tensor(used) if shortened else lengths
        packed = pack_padded_sequence(x, ends, batch_first=True, enforce_sorted=False)
        output = lstm(packed)[0]
        assert isinstance(output, PackedSequence)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
        real = real_positions(used, outputs.shape[1])
        loss_of(outputs, real, 3).backward()
        measured.append(factors_of(optimizer))
    assert_same_factors(*measured)
