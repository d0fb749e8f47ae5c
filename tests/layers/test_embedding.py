from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import oracles
from helpers.cases import STRUCTURES, any_loss, sizes, snapshot
from helpers.oracles import assert_same
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import DEFAULT_ADAPTERS, EKFAC, KFACOptimizer, LossTerms, Structure, WeightSharing
from kfac_optim.factors.layer_call import LayerCall

pytestmark = pytest.mark.usefixtures("float64")

ADAPTER = DEFAULT_ADAPTERS[nn.Embedding]
TOKENS = 5


@dataclass(frozen=True)
class EmbeddingCase:
    shape: tuple[int, ...]
    padding_idx: int | None
    max_norm: float | None
    dtype: torch.dtype
    width: int

    @property
    def examples(self) -> int:
        return self.shape[0] if self.shape else 1

    def module(self) -> nn.Embedding:
        return nn.Embedding(TOKENS, self.width, padding_idx=self.padding_idx, max_norm=self.max_norm)

    def input(self) -> Tensor:
        return torch.randint(TOKENS, self.shape, dtype=self.dtype)


@st.composite
def embedding_cases(draw: st.DrawFn) -> EmbeddingCase:
    return EmbeddingCase(
        shape=tuple(draw(st.lists(sizes(4), max_size=3))),
        padding_idx=draw(st.sampled_from([None, 0, 3, -1])),
        max_norm=draw(st.sampled_from([None, 0.5])),
        dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        width=draw(sizes(3)),
    )


# -- oracles -----------------------------------------------------------------------------------------------------


def examples(module: nn.Embedding, ids: Tensor, gradient: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
    """For each example the one-hot rows and gradient rows of the positions that train the weight."""
    ids = ids.reshape(ids.shape[0] if ids.dim() else 1, -1)
    gradient = gradient.reshape(*ids.shape, -1)
    found = []
    for row, grads in zip(ids.tolist(), gradient, strict=True):
        kept = [(i, g) for i, g in zip(row, grads, strict=True) if i != module.padding_idx]
        found.append([(torch.eye(TOKENS)[i], g) for i, g in kept])
    return found


def factors(
    pairs: list[list[tuple[Tensor, Tensor]]], width: int, terms: float, sharing: WeightSharing
) -> tuple[Tensor, Tensor]:
    """The diagonal of `A`, `[1, in]`, and `G` `[1, out, out]`, by their definitions."""
    vectors = [pair for example in pairs for pair in example]
    if sharing is WeightSharing.REDUCE:
        vectors = [
            (sum(a for a, _ in example) / len(example), sum(g for _, g in example)) for example in pairs if example
        ]
    big_a = sum((torch.outer(a, a) for a, _ in vectors), torch.zeros(TOKENS, TOKENS)) / max(len(vectors), 1)
    big_g = sum((torch.outer(g, g) for _, g in vectors), torch.zeros(width, width)) * terms
    return big_a.diagonal()[None], big_g[None]


def backward(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Gradient with respect to the output."""
    output = module(ids)
    output.retain_grad()
    any_loss(output).backward()
    assert output.grad is not None
    return output.grad


# -- tests -------------------------------------------------------------------------------------------------------


@settings(max_examples=120)
@given(case=embedding_cases(), sharing=st.sampled_from(WeightSharing), structure=st.sampled_from(STRUCTURES))
def test_factors_equal_their_definition_by_one_hot_rows(
    case: EmbeddingCase, sharing: WeightSharing, structure: tuple[Structure, Structure]
) -> None:
    module, ids = case.module(), case.input()
    optimizer = KFACOptimizer(module, lr=0.0, weight_sharing=sharing, structure=structure)
    optimizer.set_loss_terms(case.examples)  # a scalar has no first dimension to read it off
    pairs = examples(module, ids, backward(module, ids))
    assume(any(pairs))  # nothing but padding: see below
    optimizer.step()
    a, g = factors(pairs, case.width, case.examples, sharing)
    expected_a = None if structure[0] is Structure.IDENTITY else a
    expected_g = {Structure.DENSE: g, Structure.DIAGONAL: g.diagonal(dim1=1, dim2=2), Structure.IDENTITY: None}
    assert_same(optimizer.factors()[""], (expected_a, expected_g[structure[1]]))


@given(case=embedding_cases())
def test_rows_reproduce_output_and_gradient(case: EmbeddingCase) -> None:
    module, ids = case.module(), case.input()
    gradient = backward(module, ids)
    (spec,) = ADAPTER.specs(module, "", {"weight"})
    a, g = ADAPTER.statistics(module, spec, LayerCall(ids, gradient), torch.float64).rows()
    matrix = ADAPTER.pack(spec, [module.weight.detach()])
    assert matrix.shape == (1, spec.out_dim, spec.in_dim) == (1, case.width, TOKENS)
    output = (a @ matrix.mT.unsqueeze(1)).reshape(*ids.shape, case.width)
    trains = torch.ones_like(ids, dtype=torch.bool) if case.padding_idx is None else ids != module.padding_idx
    assert_same(output, module.weight[ids.long()] * trains.unsqueeze(-1))
    assert_same(torch.einsum("xnro,xnri->xoi", g, a), ADAPTER.pack(spec, [module.weight.grad]))
    assert torch.equal(*ADAPTER.unpack(spec, matrix), module.weight)


@given(case=embedding_cases(), sharing=st.sampled_from(WeightSharing))
def test_every_structure_of_the_input_moment_is_that_of_the_rows(case: EmbeddingCase, sharing: WeightSharing) -> None:
    module, ids = case.module(), case.input()
    (spec,) = ADAPTER.specs(module, "", {"weight"})
    spec = replace(spec, weight_sharing=sharing)
    stats = ADAPTER.statistics(module, spec, LayerCall(ids, torch.ones(*ids.shape, case.width)), torch.float64)
    a = stats.rows()[0].flatten(1, 2)
    assert_same(stats.input_moment(Structure.DENSE), a.mT @ a)
    assert_same(stats.input_moment(Structure.DIAGONAL), a.square().sum(1))
    assert float(stats.count) == float((a.sum(-1) > 0).sum())


@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_the_step_solves_the_damped_kronecker_system(padding_idx: int | None, max_norm: float | None) -> None:
    module = nn.Embedding(TOKENS, 3, padding_idx=padding_idx, max_norm=max_norm)
    optimizer = KFACOptimizer(module, lr=1.0, damping=0.1, kl_clip=None)
    ids = torch.tensor([[0, 2, 2, 1], [4, 0, 0, 2], [1, 1, 1, 2]])  # token 3 is never seen
    backward(module, ids)
    before = module.weight.detach().clone()  # renormalised by the forward
    optimizer.step()
    grad = module.weight.grad.T[None]
    expected = oracles.solve(oracles.damped_kronecker(*optimizer.factors()[""], grad, 0.1), grad)
    moved = before - module.weight.detach()
    assert_same(moved, expected[0].T, rtol=1e-9)
    assert not moved[3].any()
    assert moved[2].any() == (padding_idx is None)
    if max_norm is not None:
        assert float(before[[0, 1, 4]].norm(dim=1).max()) <= max_norm * (1 + 1e-6)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("sharing", WeightSharing)
def test_several_backwards_through_one_forward_count_as_one_of_their_sum(
    sharing: WeightSharing, padding_idx: int | None
) -> None:
    ids, others = torch.tensor([[0, 2, 2], [1, 2, 0]]), torch.tensor([[3, 3, 1]])
    weights = torch.randn(3, 2, 3, 4)
    measured = []
    for parts in (list(weights), [weights.sum(0)]):
        torch.manual_seed(0)
        module = nn.Embedding(TOKENS, 4, padding_idx=padding_idx)
        optimizer = KFACOptimizer(module, lr=0.0, weight_sharing=sharing)
        output = module(ids)
        for part in parts:
            (output * part).sum().backward(retain_graph=True)
        any_loss(module(others)).backward()  # tokens counted twice would outweigh these
        optimizer.step()
        measured.append(optimizer.factors()[""])
    assert_same(measured[0], measured[1])


@pytest.mark.parametrize("sharing", WeightSharing)
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("shape", [(0, 3), (0,)])
def test_an_empty_batch_counts_nothing(shape: tuple[int, ...], padding_idx: int | None, sharing: WeightSharing) -> None:
    module = nn.Embedding(TOKENS, 3, padding_idx=padding_idx)
    optimizer = KFACOptimizer(module, lr=0.0, weight_sharing=sharing, factor_update_period=1)
    for ids in (torch.tensor([[0, 1, 2]]), torch.zeros(shape, dtype=torch.int64)):
        before = optimizer.factors().get("")
        any_loss(module(ids)).backward()
        optimizer.step()
    assert_same(optimizer.factors()[""], before, rtol=0)


@pytest.mark.parametrize("sharing", WeightSharing)
def test_a_batch_of_padding_leaves_the_counts_as_they_are(sharing: WeightSharing) -> None:
    module = nn.Embedding(TOKENS, 3, padding_idx=2)
    optimizer = KFACOptimizer(module, lr=0.0, weight_sharing=sharing, factor_update_period=1)
    for ids in (torch.tensor([[0, 1, 2]]), torch.full((2, 3), 2)):
        before = optimizer.factors().get("", (None,))[0]
        any_loss(module(ids)).backward()
        optimizer.step()
    assert_same(optimizer.factors()[""][0], before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_counts_do_not_saturate_in_narrow_factors(dtype: torch.dtype) -> None:
    module = nn.Embedding(3, 2, dtype=torch.float32)
    optimizer = KFACOptimizer(module, lr=0.0, factor_dtype=dtype)
    any_loss(module(torch.tensor([0] * 6000 + [1] * 2000))).backward()
    optimizer.step()
    a, _ = optimizer.factors()[""]
    assert a.dtype == dtype
    torch.testing.assert_close(a, torch.tensor([[0.75, 0.25, 0.0]], dtype=dtype), rtol=1e-2, atol=0)


def test_one_token_without_a_dimension_is_an_example() -> None:
    table = nn.Embedding(TOKENS, 3)
    optimizer = KFACOptimizer(table, factor_update_period=1)
    optimizer.set_loss_terms(1)
    table(torch.tensor(2)).square().sum().backward()
    optimizer.step()
    assert_same(optimizer.factors()[""][0], torch.eye(TOKENS)[2:3])


def test_a_model_of_tokens_trains_in_each_shape_of_batch() -> None:
    model = nn.Sequential(nn.Embedding(TOKENS, 4, padding_idx=0, max_norm=1.0), nn.Tanh(), nn.Linear(4, TOKENS))
    optimizer = KFACOptimizer(
        model,
        lr=0.5,
        damping=0.1,
        kl_clip=0.1,
        loss_terms=LossTerms.POSITIONS,
        factor_update_period=1,
        inverse_update_period=10,
    )
    losses = []
    for step in range(30):
        ids = torch.tensor([[1, 2, 3, 4], [3, 4, 0, 0]])[:, : 2 + step % 3]
        optimizer.zero_grad()
        output = model(ids)
        loss = nn.functional.cross_entropy(output.flatten(0, 1), (ids.flatten() + 1) % TOKENS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert not model[0].weight[0].any()  # torch's own initial row of padding, never trained


def test_a_part_of_a_tensor_of_tokens_is_as_good_as_a_copy() -> None:
    """Torch warns of searches for numbers that do not lie side by side, which is an error here."""
    part = torch.tensor([[1, 2, 1, 4], [3, 3, 2, 0]])[:, :3]
    weights = []
    for ids in (part, part.contiguous()):
        torch.manual_seed(0)
        model = nn.Embedding(TOKENS, 4)
        optimizer = KFACOptimizer(model, lr=0.1, inverse=EKFAC(), factor_update_period=1)
        for _ in range(2):
            optimizer.zero_grad()
            (model(ids).square().sum() / 2).backward()
            optimizer.step()
        weights.append(model.weight.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("otherwise", [{"padding_idx": 1}, {"scale_grad_by_freq": True}])
def test_a_forward_of_ones_own_that_looks_up_otherwise_is_left_to_sgd(otherwise: dict[str, int]) -> None:
    class Table(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.embedding(ids, self.weight, **otherwise)

    table = Table(TOKENS, 4)
    optimizer = KFACOptimizer(table, factor_update_period=1)
    table(torch.tensor([[1, 2], [3, 1]])).square().sum().backward()
    with pytest.warns(UserWarning, match="'weight' is used by embedding in a way that is not measured"):
        optimizer.step()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.Embedding(TOKENS, 4, sparse=True), "the gradient is sparse: Embedding(sparse=True)"),
        (
            lambda: nn.Embedding(TOKENS, 4, scale_grad_by_freq=True),
            "scale_grad_by_freq divides the gradient by token counts: it is no longer the loss's",
        ),
        (lambda: nn.EmbeddingBag(TOKENS, 4, mode="max"), "EmbeddingBag(mode='max') is not linear in its weight"),
    ],
    ids=["sparse", "by frequency", "bag"],
)
def test_what_is_left_to_sgd_says_why(build: Callable[[], nn.Module], reason: str) -> None:
    model = nn.Sequential(build(), nn.Linear(4, 3))
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None)
    records = {record.name: record for record in optimizer.summary().parameters}
    assert (records["0.weight"].block, records["0.weight"].reason) == (None, reason)
    before = snapshot(model)["0.weight"]
    any_loss(model(torch.tensor([[0, 1], [1, 3]]))).backward()
    optimizer.step()
    grad = model[0].weight.grad.to_dense()
    assert_same(before - model[0].weight, 0.1 * grad)
