"""Wide factors that are kept as sketches: what statistics sum, what steps make of it, and what is left as it was."""

import copy
from typing import Any

import pytest
import torch
from helpers import oracles
from helpers.cases import LayerCase, any_loss, conv_cases, displacement, free_optimizer, linear_cases, snapshot
from helpers.oracles import assert_same
from helpers.plain import mlp, square_loss
from helpers.states import CPU, assert_resumes_bitwise, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import AutoInverse, InverseAndRoot, KFACOptimizer, LowRank, Structure, Subsample, WeightSharing
from kfac_optim.factors.factor import Factor
from kfac_optim.layers.linear import LinearAdapter
from kfac_optim.linalg.sketches import sketch_directions
from kfac_optim.specs import Sketched

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

WHOLE, SKETCH = LowRank(1, iterations=1), LowRank(1, sketch=1)


def factors_of(optimizer: KFACOptimizer) -> list[Factor]:
    pairs = [block.state.pair for block in optimizer._binding.coverage.blocks]
    return [factor for pair in pairs for factor in (pair.a, pair.g) if factor is not None]


def assert_sketches(found: KFACOptimizer, whole: KFACOptimizer) -> int:
    """Every sketch is that of the whole factor; returns how many there are."""
    sketches = 0
    for sketch, factor in zip(factors_of(found), factors_of(whole), strict=True):
        if isinstance(sketch.structure, Sketched):
            sketches += 1
            directions = sketch_directions(sketch.dim, sketch.structure.columns, like=sketch.packed)
            assert_same(sketch.sketch(), factor.average @ directions, rtol=1e-11)
            assert_same(sketch.trace(), factor.trace(), rtol=1e-11)
        else:
            assert_same(sketch.average, factor.average, rtol=1e-11)
    return sketches


@given(
    case=st.one_of(linear_cases(8), conv_cases()),
    sharing=st.sampled_from(WeightSharing),
    examples=st.sampled_from([None, 1, 2]),
    backwards=st.integers(1, 2),
    masked=st.booleans(),
)
def test_statistics_are_those_of_the_whole_factor_times_the_directions(
    case: LayerCase, sharing: WeightSharing, examples: int | None, backwards: int, masked: bool
) -> None:
    torch.manual_seed(0)
    original, layer_input = case.module(), case.input()
    subsample = None if examples is None else Subsample(examples=examples)
    made = []
    for inverse in (SKETCH, WHOLE):
        torch.manual_seed(1)
        module = copy.deepcopy(original)
        optimizer = free_optimizer(module, inverse=inverse, weight_sharing=sharing, subsample=subsample)
        output = module(layer_input)
        weights = torch.ones_like(output)
        if masked:
            weights.view(-1)[: weights.numel() // 2] = 0
        for number in range(backwards):
            any_loss(output * weights * (number + 1)).backward(retain_graph=True)
        optimizer.step()
        made.append(optimizer)
    assert_sketches(*made)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1), (3, 4, 7, 8)),
        (lambda: nn.Conv1d(8, 8, 3, dilation=2, groups=2, bias=False), (3, 8, 9)),
        (lambda: nn.ConvTranspose2d(4, 8, 3, stride=2), (3, 4, 3, 4)),
    ],
)
def test_convolutions_are_sketched_with_their_strides(make: Any, size: tuple[int, ...]) -> None:
    made = []
    for inverse in (LowRank(1, sketch=2), LowRank(1)):
        torch.manual_seed(0)
        module = make()
        optimizer = free_optimizer(module, inverse=inverse)
        square_loss(module(torch.randn(size))).backward()
        optimizer.step()
        made.append(optimizer)
    assert assert_sketches(*made) >= 1


def test_attention_tied_and_recurrent_layers_have_sketches_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
            self.head.weight = self.embed.weight
            self.attention, self.lstm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LSTM(8, 8, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            return self.head(self.lstm(self.attention(x, x, x)[0])[0])

    made = []
    for inverse in (LowRank(1, sketch=2), LowRank(1)):
        torch.manual_seed(0)
        net = Net()
        optimizer = KFACOptimizer(net, lr=0.0, inverse=inverse, factor_update_period=1)
        for step in range(2):
            optimizer.zero_grad()
            square_loss(net(torch.arange(12).view(2, 6).roll(step) % 9)).backward()
            optimizer.step()
        made.append(optimizer)
    assert assert_sketches(*made) >= 7


@settings(max_examples=10)
@given(dims=st.tuples(*[st.integers(16, 24)] * 2), rows=st.integers(1, 4), damping=st.sampled_from([1e-2, 1.0]))
def test_roots_of_factors_of_low_rank_are_those_of_the_whole(dims: tuple[int, int], rows: int, damping: float) -> None:
    layer_input = torch.randn(rows, dims[0])
    moved, whitened = [], []
    for sketch in (4, None):
        torch.manual_seed(0)
        module = nn.Linear(*dims)
        optimizer = free_optimizer(module, inverse=InverseAndRoot(damping, rank=4, sketch=sketch))
        before = snapshot(module)
        square_loss(module(layer_input)).backward()
        optimizer.step()
        moved.append(displacement(module, before))
        (block,) = optimizer._binding.coverage.blocks
        whitened.append(block.inverse.apply_root(block.state, oracles.gradient_matrix(module)))
    assert_same(*moved, rtol=1e-7)
    assert_same(*whitened, rtol=1e-7)


def test_before_any_refresh_and_with_factors_of_zeros_the_gradient_comes_back_scaled() -> None:
    grad = torch.randn(2, 9, 8)
    inverse = LowRank(1, sketch=2)
    kept = (inverse.kept(Structure.DENSE, 8), inverse.kept(Structure.DENSE, 9))
    state = inverse.init(spec(8, 9, 2, kept), dtype=torch.float64, device=CPU)
    assert_same(inverse.apply(state, grad, 0.1), grad, rtol=0)
    for factor in (state.pair.a, state.pair.g):
        factor.add(torch.zeros_like(factor.packed))
    state.pair.rows = 1
    state.fold(1, 1.0)
    inverse.refresh([state], [0.1])
    assert_same(inverse.apply(state, grad, 0.1), grad / 0.1, rtol=1e-12)


def test_sums_that_are_not_finite_are_refused() -> None:
    inverse = LowRank(1, sketch=2)
    state = inverse.init(spec(8, 3, 1, (Sketched(2), Structure.IDENTITY)), dtype=torch.float64, device=CPU)
    moment = torch.zeros_like(state.pair.a.packed)
    moment[0, -1] = torch.inf
    state.pair.a.add(moment)
    state.pair.rows = 1
    state.fold(1, 1.0)
    assert int(state.pair.refused) == 1
    assert not state.has_statistics()


@pytest.mark.parametrize("inverse", [LowRank(2, sketch=2), InverseAndRoot(rank=1, sketch=2)], ids=repr)
def test_a_run_resumes_to_the_bit(inverse: Any) -> None:
    def make() -> tuple[nn.Module, KFACOptimizer]:
        model = mlp(sizes=(4, 16, 3))
        return model, KFACOptimizer(
            model, lr=0.1, momentum=0.9, inverse=inverse, factor_update_period=2, inverse_update_period=4
        )

    assert_resumes_bitwise(make, steps=9, saved=5)


def test_layers_whose_statistics_cannot_be_sketched_keep_whole_factors() -> None:
    class OwnAdapter(LinearAdapter):
        in_rows = False

    optimizer = KFACOptimizer(nn.Linear(300, 4), adapters={nn.Linear: OwnAdapter()}, inverse=LowRank(sketch=64))
    assert optimizer.summary().blocks[0].structure == (Structure.DENSE, Structure.DENSE)


def test_factors_that_are_kept_in_few_bits_are_not_sketched() -> None:
    optimizer = KFACOptimizer(nn.Linear(300, 4), factor_dtype=torch.bfloat16)
    assert optimizer.summary().blocks[0].structure == (Structure.DENSE, Structure.DENSE)


def test_by_default_factors_from_a_width_of_256_are_sketched() -> None:
    model = nn.Sequential(nn.Linear(300, 255), nn.Linear(255, 256), nn.Linear(256, 4))
    blocks = KFACOptimizer(model).summary().blocks
    sketch, dense = Sketched(64), Structure.DENSE
    assert [block.structure for block in blocks] == [(sketch, dense), (sketch, sketch), (sketch, dense)]
    assert [block.inverse for block in blocks] == ["LowRank(sketch=64)"] * 3
    assert "301×301 from 64 directions" in str(KFACOptimizer(model).summary())
    whole = KFACOptimizer(model, inverse={"0": AutoInverse(), "*": LowRank()}).summary().blocks
    assert [block.structure for block in whole] == [(sketch, dense), (dense, dense), (dense, dense)]


def test_factors_shows_the_trace_and_one_eigenvalue_for_all_that_a_sketch_does_not_tell() -> None:
    torch.manual_seed(0)
    x = torch.randn(90, 40)  # white noise, of which a sketch tells least
    found = []
    for inverse in (LowRank(2, sketch=6), LowRank(2)):
        torch.manual_seed(1)
        model = nn.Linear(40, 3, bias=False)
        optimizer = free_optimizer(model, inverse=inverse)
        model(x).square().mean().backward()
        optimizer.step()
        found.append(optimizer.factors()[""][0])
    sketched, whole = found
    assert sketched is not None
    assert whole is not None
    assert_same(sketched[0].trace(), whole[0].trace(), rtol=1e-9)
    values = torch.linalg.eigvalsh(sketched[0])
    assert_same(values[:34], values[0].expand(34), rtol=1e-9)
    assert values[0] > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LowRank(32, sketch=16), "sketch of LowRank must be at least its rank, 32, got 16"),
        (lambda: LowRank(sketch=2.5), r"sketch of LowRank .* must be an integer, got 2\.5"),
        (lambda: InverseAndRoot(rank=0), "rank of InverseAndRoot must be at least 1, got 0"),
    ],
)
def test_bad_choices_are_refused(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_the_scalar_of_one_output_goes_into_the_sketched_factor() -> None:
    """`(g A + λ)⁻¹` exactly, as the 1×1 `G` shares no damping: of an `A` of the sketch's rank nothing is lost."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False)
    optimizer = free_optimizer(model, inverse=LowRank(2, sketch=2), damping=0.3)
    x = torch.randn(5, 2) @ torch.randn(2, 8)
    weights = torch.randn(5, 1)
    (model(x) * weights).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    before = model.weight.detach().clone()
    gradient = gradient.clone()
    optimizer.step()
    (pair,) = (block.state.pair for block in optimizer._binding.coverage.blocks)
    assert isinstance(pair.a.structure, Sketched)
    assert pair.g is not None
    a, g = x.mT @ x / 5, pair.g.average.squeeze()
    assert float(g) != pytest.approx(1.0)
    expected = gradient @ torch.linalg.inv(g * a + 0.3 * torch.eye(8))
    assert_same(before - model.weight.detach(), expected, rtol=1e-9)
