"""Experts in one parameter, weights of `torch.einsum`, and parameters that are added: against layers of their own."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.operators import Operators
from helpers.oracles import assert_same
from helpers.plain import block, clones
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import EKFAC, Cholesky, Eigen, Inverse, KFACOptimizer, LowRank, NewtonSchulz, SumOfTerms, WeightSharing
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.subsampling import Draw, Subsample
from kfac_optim.layers.tensors import TensorStatistics, added_structure
from kfac_optim.specs import LayerSpec, Sketched, Structure

pytestmark = pytest.mark.usefixtures("float64")

EXPERTS, IN, OUT = 4, 8, 4  # grouped products want rows of 16 bytes
ROWS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
UNEVEN = torch.tensor([0, 0, 0, 1, 3, 3])  # nothing for the third

Way = Callable[[nn.Parameter, Tensor, Tensor], Tensor]


def one_by_one(product: Callable[[Tensor, Tensor], Tensor]) -> Way:
    def compute(weight: nn.Parameter, x: Tensor, ids: Tensor) -> Tensor:
        return torch.cat([product(x[ids == expert], weight[expert]) for expert in ids.unique()])

    return compute


def offsets(ids: Tensor) -> Tensor:
    return torch.bincount(ids, minlength=EXPERTS).cumsum(0).to(torch.int32)


def blocks(x: Tensor) -> Tensor:
    return x.view(EXPERTS, -1, IN)


BY_OUTPUT: dict[str, Way] = {
    "F.linear of a slice": one_by_one(F.linear),
    "matmul with a transposed slice": one_by_one(lambda x, weight: x @ weight.T),
    "a slice on the left": one_by_one(lambda x, weight: (weight @ x.T).T),
    "bmm of gathered ones on the left": lambda w, x, ids: torch.bmm(w[ids], x.unsqueeze(-1)).squeeze(-1),
    "grouped product": lambda w, x, ids: torch._grouped_mm(x, w.mT, offs=offsets(ids)),
}
BY_INPUT: dict[str, Way] = {
    "matmul with a slice": one_by_one(lambda x, weight: x @ weight),
    "bmm of gathered ones": lambda w, x, ids: torch.bmm(x.unsqueeze(1), w[ids]).squeeze(1),
    "einsum of gathered ones behind another dimension": lambda w, x, ids: torch.einsum("mni,nio->mno", x[None], w[ids])[
        0
    ],
    "einsum of gathered ones": lambda w, x, ids: torch.einsum("ni,nio->no", x, w.index_select(0, ids)),
    "grouped product": lambda w, x, ids: torch._grouped_mm(x, w, offs=offsets(ids)),
}
OF_ALL: dict[str, Way] = {
    "bmm": lambda w, x, _: torch.bmm(blocks(x), w).flatten(0, 1),
    "baddbmm": lambda w, x, _: torch.baddbmm(torch.zeros(EXPERTS, 2, OUT), blocks(x), w).flatten(0, 1),
    "matmul": lambda w, x, _: (blocks(x) @ w).flatten(0, 1),
    "einsum": lambda w, x, _: torch.einsum("eni,eio->neo", blocks(x), w).transpose(0, 1).flatten(0, 1),
    "einsum with the batch first": lambda w, x, _: torch.einsum("nei,eio->eno", blocks(x).transpose(0, 1), w).flatten(
        0, 1
    ),
    "two halves": lambda w, x, _: torch.cat([blocks(x)[:2].bmm(w[:2]), blocks(x)[2:].bmm(w[2:])]).flatten(0, 1),
}
WAYS = {
    **{f"[experts, out, in], {name}": (way, UNEVEN, True) for name, way in BY_OUTPUT.items()},
    **{f"[experts, in, out], {name}": (way, UNEVEN, False) for name, way in BY_INPUT.items()},
    **{f"[experts, in, out], {name}": (way, ROWS, False) for name, way in OF_ALL.items()},
}


class Experts(nn.Module):
    def __init__(self, way: Way, by_output: bool) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.randn(EXPERTS, OUT, IN) if by_output else torch.randn(EXPERTS, IN, OUT))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.way(self.weight, x, ids)


class Routed(nn.Module):
    """A layer for each expert."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(IN, OUT, bias=False) for _ in weights])
        for expert, weight in zip(self.experts, weights, strict=True):
            expert.weight.data.copy_(weight)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.cat([self.experts[expert](x[ids == expert]) for expert in ids.unique()])


def pair(name: str) -> tuple[Experts, Routed, Tensor, Tensor, bool, float]:
    """A model and its twin, what they are given, how the weight lies, and how equal they are to be."""
    way, ids, by_output = WAYS[name]
    torch.manual_seed(0)
    model = Experts(way, by_output)
    twin, x = Routed(model.weight if by_output else model.weight.mT), torch.randn(len(ids), IN)
    if "grouped" not in name:
        return model, twin, x, ids, by_output, 1e-9
    return model.float(), twin.float(), x.float(), ids, by_output, 1e-3  # the CPU has no such product in float64


def test_a_product_of_experts_that_is_multiplied_by_a_number_is_left_to_sgd() -> None:
    model = Experts(lambda w, x, _: torch.baddbmm(torch.zeros(EXPERTS, 2, OUT), blocks(x), w, alpha=2), False)
    optimizer = KFACOptimizer(model, lr=0.5)
    before = model.weight.detach().clone()
    with pytest.warns(UserWarning, match="nothing is preconditioned"):
        step(model, optimizer, torch.randn(8, IN), ROWS)
    assert optimizer.factors() == {}
    assert model.weight.grad is not None
    assert_same(model.weight, before - 0.5 * model.weight.grad)


def loss_of(output: Tensor) -> Tensor:
    return (output.square() / 2 + output * torch.arange(1.0, output.numel() + 1).view(output.shape)).sum()


def step(model: nn.Module, optimizer: KFACOptimizer, x: Tensor, ids: Tensor) -> None:
    optimizer.zero_grad()
    optimizer.set_loss_terms(5)
    loss_of(model(x, ids)).backward()
    optimizer.step()


@pytest.mark.parametrize("name", WAYS)
def test_factors_of_each_expert_are_those_of_a_layer_of_its_own(name: str) -> None:
    model, twin, x, ids, _, rtol = pair(name)
    ours, theirs = (KFACOptimizer(each, lr=0.0) for each in (model, twin))
    step(model, ours, x, ids)
    step(twin, theirs, x, ids)
    assert ours.metrics()["measured_parameters"] == 1.0
    a, g = ours.factors()[""]
    for expert in ids.unique().tolist():
        of_layer = tuple(each[0] for each in theirs.factors()[f"experts.{expert}"])
        assert_same((a[expert], g[expert]), of_layer, rtol=rtol)


@pytest.mark.parametrize("inverse", [None, EKFAC()], ids=["default", "EKFAC"])
@pytest.mark.parametrize("name", ["[experts, out, in], F.linear of a slice", "[experts, in, out], grouped product"])
def test_experts_train_as_layers_of_their_own(name: str, inverse: EKFAC | None) -> None:
    model, twin, x, ids, by_output, rtol = pair(name)
    options: dict[str, Any] = {}
    if inverse is not None:
        # Rounding decides on the eigenvectors of a factor without full rank, and EKFAC measures along each of them.
        options = {"inverse": inverse, "factor_dtype": torch.float64}
        x, ids = torch.randn(32 * EXPERTS, IN, dtype=x.dtype), torch.arange(EXPERTS).repeat_interleave(32)
    ours, theirs = (KFACOptimizer(each, lr=0.1, factor_update_period=1, **options) for each in (model, twin))
    for _ in range(3):
        step(model, ours, x, ids)
        step(twin, theirs, x, ids)
    for expert in ids.unique().tolist():
        weight = model.weight[expert] if by_output else model.weight[expert].T
        assert_same(weight, twin.experts[expert].weight, rtol=rtol)


def test_with_one_row_the_kronecker_product_is_the_gradient_of_the_expert_times_itself() -> None:
    model = Experts(BY_INPUT["matmul with a slice"], False)
    optimizer = KFACOptimizer(model, lr=0.0)
    optimizer.set_loss_terms(1)
    loss_of(model(torch.randn(EXPERTS, IN), torch.arange(EXPERTS))).backward()
    optimizer.step()
    gradient = model.weight.grad.mT.flatten(1)
    assert_same(oracles.kronecker(*optimizer.factors()[""]), gradient.unsqueeze(2) * gradient.unsqueeze(1))


def two_steps(first: Tensor, second: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Factors after each of two steps with these rows for the experts."""
    torch.manual_seed(0)
    model = Experts(BY_INPUT["matmul with a slice"], False)
    optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1)
    results = []
    for ids in (first, second):
        step(model, optimizer, torch.randn(len(ids), IN), ids)
        results.append(tuple(each.clone() for each in optimizer.factors()[""]))
    return results[0], results[1]


def test_an_expert_without_rows_keeps_its_averages() -> None:
    before, after = two_steps(ROWS, UNEVEN)
    for then, now in zip(before, after, strict=True):
        assert torch.equal(then[2], now[2])
        assert not torch.equal(then[0], now[0])


def test_an_expert_that_rests_is_averaged_as_a_layer_that_rests() -> None:
    model, twin, *_ = pair("[experts, out, in], F.linear of a slice")
    ours, theirs = (KFACOptimizer(each, lr=0.0, factor_update_period=1) for each in (model, twin))
    for ids in ([0, 0, 1], [0, 2, 2, 2], [1], [0, 0, 1, 2]):
        x = torch.randn(len(ids), IN)
        step(model, ours, x, torch.tensor(ids))
        step(twin, theirs, x, torch.tensor(ids))
    a, g = ours.factors()[""]
    for expert in (0, 1, 2):
        of_layer = tuple(each[0] for each in theirs.factors()[f"experts.{expert}"])
        assert_same((a[expert], g[expert]), of_layer)


def test_an_expert_takes_its_first_rows_whole_however_late_they_come() -> None:
    (_, _), (a, g) = two_steps(UNEVEN, torch.tensor([2]))
    torch.manual_seed(0)
    model = Experts(BY_INPUT["matmul with a slice"], False)
    optimizer = KFACOptimizer(model, lr=0.0)
    torch.randn(len(UNEVEN), IN)
    step(model, optimizer, torch.randn(1, IN), torch.tensor([2]))
    assert_same((a[2], g[2]), tuple(each[2] for each in optimizer.factors()[""]))


@pytest.mark.parametrize(
    "inverse", [Cholesky(), LowRank(rank=2, sketch=2), Eigen(), EKFAC(), NewtonSchulz(), SumOfTerms()], ids=repr
)
def test_an_expert_that_never_had_a_row_takes_the_step_of_sgd_when_it_gets_one(inverse: Inverse[Any]) -> None:
    model, twin, *_ = pair("[experts, out, in], F.linear of a slice")
    options: dict[str, Any] = {"lr": 1e-3, "kl_clip": None, "inverse": inverse, "factor_dtype": torch.float64}
    ours, theirs = (
        KFACOptimizer(each, **options, factor_update_period=2, inverse_update_period=2) for each in (model, twin)
    )
    for number in range(6):  # statistics are taken in each other step, and the last is none of these
        ids = torch.tensor([0, 1] if number < 5 else [0, 1, 2]).repeat_interleave(32)
        x = torch.randn(len(ids), IN) / (1 + number)
        before = clones([model.weight])[0]
        step(model, ours, x, ids)
        step(twin, theirs, x, ids)
    assert model.weight.grad is not None
    assert_same(model.weight[:2], torch.stack([twin.experts[expert].weight for expert in (0, 1)]))
    assert_same(model.weight[2], before[2] - 1e-3 * model.weight.grad[2])
    largest = torch.stack([block(theirs, f"experts.{expert}").state.condition for expert in (0, 1)]).amax(0)
    assert_same(block(ours, "").state.condition, largest)


def test_two_backwards_through_one_forward_count_as_one_of_their_sum() -> None:
    results = []
    for split in (True, False):
        torch.manual_seed(0)
        model = Experts(BY_INPUT["bmm of gathered ones"], False)
        optimizer = KFACOptimizer(model, lr=0.0)
        optimizer.set_loss_terms(1)
        output = model(torch.randn(len(UNEVEN), IN), UNEVEN)
        parts = [loss_of(output[:4]), loss_of(output[4:])]
        for part in parts if split else [parts[0] + parts[1]]:
            part.backward(retain_graph=True)
        optimizer.step()
        results.append(optimizer.factors()[""])
    assert_same(results[0], results[1])


def test_a_run_with_experts_goes_on_from_a_checkpoint_bit_for_bit() -> None:
    model, _, x, ids, _, _ = pair("[experts, out, in], F.linear of a slice")
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, factor_update_period=1)
    step(model, optimizer, x, ids)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    step(model, optimizer, x, ids)
    other, _, _, _, _, _ = pair("[experts, out, in], F.linear of a slice")
    other.load_state_dict(weights)
    resumed = KFACOptimizer(other, lr=0.1, momentum=0.9, factor_update_period=1)
    resumed.load_state_dict(saved)
    step(other, resumed, x, ids)
    assert torch.equal(model.weight, other.weight)


def test_biases_of_slices_are_those_of_layers_of_their_own() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(2, 3, 4)), nn.Parameter(torch.randn(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.outputs = [F.linear(each, w, b) for each, w, b in zip(x, self.weight, self.bias, strict=True)]
            return torch.cat(self.outputs)

    model, x = Biased(), torch.randn(2, 5, 4)
    optimizer = KFACOptimizer(model, lr=0.0)
    optimizer.set_loss_terms(1)
    output = model(x)
    for each in model.outputs:
        each.retain_grad()
    loss_of(output).backward()
    optimizer.step()
    assert optimizer.metrics()["measured_parameters"] == 1.0
    for name in ("", "bias"):
        moments = torch.stack([each.grad.T @ each.grad for each in model.outputs])
        assert_same(optimizer.factors()[name][1], moments)


# -- how functions are called --------------------------------------------------------------------------------------


class Called(nn.Module):
    """Calls a function with a parameter, after a layer."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.weight, self.use = nn.Linear(IN, IN), nn.Parameter(torch.randn(shape)), use
        self.matrix = nn.Parameter(torch.ones(2, 2))  # in a module that has one, vectors are looked at as well

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer(x), self.weight) * self.matrix.mean()


def called(name: str, shape: tuple[int, ...], use: Callable[[Tensor, nn.Parameter], Tensor]) -> tuple[Called, Tensor]:
    """A model, and what it is given."""
    dtype = torch.float32 if "grouped product" in name else torch.float64  # the CPU has no such product in float64
    return Called(shape, use).to(dtype), torch.randn(len(SOME), IN, dtype=dtype)


SOME = torch.tensor([1, 0, 3, 3, 1, 0])
ENDS = torch.tensor([1, 3, 3, 6], dtype=torch.int32)

Use = Callable[[Tensor, nn.Parameter], Tensor]
SHAPE = (EXPERTS, IN, OUT)
# Name → shape of the weight, the function called by keyword, and by position
BY_KEYWORD: dict[str, tuple[tuple[int, ...], Use, Use]] = {
    "matmul": (SHAPE, lambda x, w: torch.matmul(input=x, other=w[0]), lambda x, w: torch.matmul(x, w[0])),
    "mm": (SHAPE, lambda x, w: torch.mm(input=x, mat2=w[0]), lambda x, w: torch.mm(x, w[0])),
    "bmm": (
        SHAPE,
        lambda x, w: torch.bmm(input=x[:, None], mat2=w[SOME]),
        lambda x, w: torch.bmm(x[:, None], w[SOME]),
    ),
    "add": ((IN,), lambda x, w: torch.add(input=x, other=w), torch.add),
    "addmm": (
        SHAPE,
        lambda x, w: torch.addmm(input=x[0, :OUT], mat1=x, mat2=w[1]),
        lambda x, w: torch.addmm(x[0, :OUT], x, w[1]),
    ),
    "baddbmm": (
        SHAPE,
        lambda x, w: torch.baddbmm(input=x[0, :OUT], batch1=x[:, None], batch2=w[SOME]),
        lambda x, w: torch.baddbmm(x[0, :OUT], x[:, None], w[SOME]),
    ),
    "einsum of a list": (
        (OUT, IN),
        lambda x, w: torch.einsum("bi,oi->bo", [x, w]),
        lambda x, w: torch.einsum("bi,oi->bo", x, w),
    ),
    "einsum of numbered dimensions": (
        (OUT, IN),
        lambda x, w: torch.einsum(x, [0, 1], w, [2, 1], [0, 2]),
        lambda x, w: torch.einsum("bi,oi->bo", x, w),
    ),
    "grouped product": (
        SHAPE,
        lambda x, w: torch._grouped_mm(input=x, mat2=w, offs=ENDS),
        lambda x, w: torch._grouped_mm(x, w, ENDS),
    ),
}


@pytest.mark.parametrize("name", BY_KEYWORD)
def test_a_call_by_keyword_is_one_by_position(name: str) -> None:
    shape, *uses = BY_KEYWORD[name]
    (model, x), factors = called(name, shape, uses[0]), []
    for use in uses:
        model.use = use
        optimizer = KFACOptimizer(model, lr=0.0)
        loss_of(model(x)).backward()
        optimizer.step()
        factors.append(optimizer.factors())
    assert factors[0].keys() == factors[1].keys() >= {"layer"}
    for known, pair in factors[0].items():
        assert_same(pair, factors[1][known], rtol=0.0)


def silent(x: Tensor, weight: nn.Parameter) -> Tensor:
    with torch.no_grad():
        return x @ weight[0]


# Name → shape of the weight, how it is used: each multiplies in a way that makes it no matrix of a layer
NO_MATRIX: dict[str, tuple[tuple[int, ...], Use]] = {
    "two parameters": ((2, IN, OUT), lambda x, w: x @ (w[0] @ w[1].T)),
    "a product without gradients": (SHAPE, lambda x, w: x[:, :OUT] + silent(x, w) + w.sum()),
    "a product within torch.func": (
        SHAPE,
        lambda x, w: torch.func.vmap(lambda part: part @ w[0])(x.unflatten(0, (2, 3))).flatten(0, 1),
    ),
    "some of each output": ((IN, 3, OUT), lambda x, w: x @ w[:, 0]),
    "some columns of those gathered": (SHAPE, lambda x, w: torch.bmm(x[:, None], w[SOME][..., :2])),
    "slices, one below the other": ((EXPERTS, 4, OUT), lambda x, w: x @ w[1:3].flatten(0, 1)),
    "a part of a vector": ((2 * IN,), lambda x, w: x + w[:IN]),
    "a number": ((), lambda x, w: x + w),
    "one number for all features": ((1,), lambda x, w: x + w),
    "groups of groups, some of them read alike": ((2, 3, IN, OUT), lambda x, w: x.unflatten(0, (3, 2)) @ w),
    "a scaled addmm": (SHAPE, lambda x, w: torch.addmm(x[0, :OUT], x, w[0], alpha=2)),
    "a scaled summand": ((OUT,), lambda x, w: torch.addmm(w, x, torch.ones(IN, OUT), beta=2)),
    "a scaled sum": ((IN,), lambda x, w: torch.add(x, w, alpha=2)),
    "a deprecated scaled sum": ((IN,), lambda x, w: torch.add(x, 2, w)),
    "a deprecated scaled addmm": (SHAPE, lambda x, w: torch.addmm(2, x[0, :OUT], 3, x, w[0])),
    "a deprecated scaled baddbmm": (SHAPE, lambda x, w: torch.baddbmm(2, x[0, :OUT], 3, x[:, None], w[SOME])),
    "a sum of two parameters": ((IN,), lambda x, w: x * (w + w)),
    "einsum of two parameters": ((IN, OUT), lambda x, w: x @ torch.einsum("io,jo->ij", w, w)),
    "einsum of three": ((OUT, IN), lambda x, w: torch.einsum("bi,oi,oj->bj", x, w, w)),
    "einsum of a diagonal": ((IN, IN), lambda x, w: torch.einsum("bi,ii->bi", x, w)),
    "einsum that sums the weight": ((OUT, IN), lambda x, w: torch.einsum("bi,oi->b", x, w)),
    "einsum that sums the rows": ((OUT, 4), lambda x, w: torch.einsum("bji,oi->bo", x.unflatten(1, (2, 4)), w)),
    "einsum of each row with each gathered matrix": (SHAPE, lambda x, w: torch.einsum("bi,nio->nbo", x, w[SOME])),
    "einsum of gathered groups": (
        (EXPERTS, 2, 4, OUT),
        lambda x, w: torch.einsum("nhi,nhio->nho", x.unflatten(1, (2, 4)), w[SOME]),
    ),
    "einsum of a slice of groups": (
        (EXPERTS, 2, 4, OUT),
        lambda x, w: torch.einsum("nhi,ehio->nheo", x.unflatten(1, (2, 4)), w[:3]),
    ),
    "grouped product of some": (SHAPE, lambda x, w: torch._grouped_mm(x[:3], w[:2], offs=ENDS[:2])),
    "grouped product without offsets": (SHAPE, lambda x, w: torch._grouped_mm(x.expand(EXPERTS, -1, -1), w)),
    "grouped product along the rows": ((len(SOME), OUT), lambda x, w: torch._grouped_mm(x.T, w, offs=ENDS)),
}


@pytest.mark.filterwarnings("ignore:.*overload of .*is deprecated", "ignore:.*is computed without a graph")
@pytest.mark.parametrize("name", NO_MATRIX)
def test_what_is_no_matrix_of_a_layer_is_left_to_sgd(name: str) -> None:
    model, x = called(name, *NO_MATRIX[name])
    optimizer = KFACOptimizer(model, lr=0.5, factor_update_period=1)
    for _ in range(2):  # a layer whose calls do not make up its gradient is warned of at the second
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        weight, gradient = model.weight.detach().clone(), model.weight.grad.clone()
        optimizer.step()
        assert optimizer.factors().keys() == {"layer"}
        assert torch.equal(model.weight.detach(), weight.add(gradient, alpha=-0.5))


# -- torch.einsum --------------------------------------------------------------------------------------------------


class Einsum(nn.Module):
    def __init__(self, equation: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.equation, self.weight = equation, nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, self.weight)


class Detached(nn.Module):
    """Goes on using a parameter that its first forward has taken out of it."""

    def __init__(self, shape: Sequence[int], multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))
        self.multiply, self.held = multiply, [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        self._parameters.clear()
        return self.multiply(x, self.held[0])


@pytest.mark.parametrize(
    ("shape", "multiply"),
    [((4, 3), torch.matmul), ((2, 4, 3), lambda x, weight: torch.einsum("bi,nio->bno", x, weight))],
    ids=["a matrix", "matrices"],
)
def test_a_parameter_that_was_taken_out_of_the_model_is_left_to_sgd(
    shape: Sequence[int], multiply: Callable[[Tensor, Tensor], Tensor]
) -> None:
    model = Detached(shape, multiply)
    (weight,), before = model.held, model.held[0].detach().clone()
    optimizer = KFACOptimizer(model, lr=0.1)
    loss_of(model(torch.randn(5, 4))).backward()
    with pytest.warns(UserWarning, match="nothing is preconditioned"):
        optimizer.step()
    assert weight.grad is not None
    assert_same(weight, before - 0.1 * weight.grad)


# equation → shape of the weight; its letters, those of outputs and those of inputs; shape of the input
EQUATIONS: dict[str, tuple[tuple[int, ...], tuple[str, str, str], tuple[int, ...]]] = {
    "bi,oi->bo": ((2, 3), ("oi", "o", "i"), (5, 3)),
    "xi,oi->xo": ((1, 3), ("oi", "o", "i"), (5, 3)),
    "bi,io->bo": ((3, 2), ("io", "o", "i"), (5, 3)),
    "ibh,hnd->ibnd": ((3, 2, 2), ("hnd", "nd", "h"), (4, 5, 3)),
    "ibnd,hnd->ibh": ((3, 2, 2), ("hnd", "h", "nd"), (4, 5, 2, 2)),
    "...i,oi": ((2, 3), ("oi", "o", "i"), (5, 4, 3)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_factors_of_einsum_are_those_of_a_linear_layer(equation: str) -> None:
    shape, sides, of_input = EQUATIONS[equation]
    model, x = Einsum(equation, shape), torch.randn(of_input)
    optimizer = KFACOptimizer(model, lr=0.0)
    optimizer.set_loss_terms(5)
    output = model(x)
    output.retain_grad()
    loss_of(output).backward()
    optimizer.step()
    letters, outputs, inputs = sides
    order = [letters.index(letter) for letter in outputs + inputs]
    width = math.prod(shape[letters.index(letter)] for letter in outputs)
    a, g = x.reshape(-1, model.weight.numel() // width), output.grad.reshape(-1, width)
    rows = [each.view(1, -1, 1, each.shape[-1]) for each in (a, g)]
    assert_same(optimizer.factors()[""], oracles.factors(*rows, terms=5, bias=False))
    assert_same(g.T @ a, model.weight.grad.permute(order).reshape(width, -1))


# -- what is added -------------------------------------------------------------------------------------------------


class Shifted(nn.Module):
    def __init__(self, add: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
        super().__init__()
        self.add = add
        self.shift = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x.clone(), self.shift)


@pytest.mark.parametrize(
    "add", [lambda x, shift: x + shift, lambda x, shift: shift + x, lambda x, shift: x.add_(shift)],
    ids=["+", "on the left", "in place"],
)  # fmt: skip
def test_what_is_added_has_for_g_the_moments_of_its_gradients(add: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
    model, x = Shifted(add), torch.randn(5, 2, 3, requires_grad=True)
    optimizer = KFACOptimizer(model, lr=0.0)
    optimizer.set_loss_terms(5)
    loss_of(model(x)).backward()
    optimizer.step()
    a, g = optimizer.factors()["shift"]
    assert a is None
    assert_same(g, 5 * torch.einsum("bni,bnj->nij", x.grad, x.grad))


def test_of_a_table_of_positions_that_is_longer_than_the_text_only_those_in_use_are_measured() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table[: x.shape[1]]

    model, x = Positions(), torch.randn(4, 2, 3, requires_grad=True)
    optimizer = KFACOptimizer(model, lr=0.0)
    optimizer.set_loss_terms(4)
    loss_of(model(x)).backward()
    optimizer.step()
    _, g = optimizer.factors()["table"]
    assert g is not None
    assert_same(g[:2], 4 * torch.einsum("bni,bnj->nij", x.grad, x.grad))
    assert_same(g[2:], torch.zeros(3, 3, 3))


def test_biases_of_experts_that_are_gathered_and_added_in_place_are_groups() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 3, 2)), nn.Parameter(torch.randn(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            output = torch.bmm(x.unsqueeze(1), self.weight[UNEVEN]).squeeze(1)
            output.add_(self.bias[UNEVEN])
            self.output = output.mul(1)
            self.output.retain_grad()
            return self.output

    model = Biased()
    optimizer = KFACOptimizer(model, lr=0.0)
    optimizer.set_loss_terms(1)
    loss_of(model(torch.randn(len(UNEVEN), 3))).backward()
    optimizer.step()
    assert optimizer.metrics()["measured_parameters"] == 1.0
    gradient = model.output.grad
    for name in ("", "bias"):
        for expert in range(4):
            mine = gradient[expert == UNEVEN]
            assert_same(optimizer.factors()[name][1][expert], mine.T @ mine)


# -- groups that are taken together --------------------------------------------------------------------------------


def operators_of_table(positions: int, *, gathered: bool) -> int:
    """How many operators the statistics of a table of positions take, which is added to all rows of a batch."""
    spec = LayerSpec("table", ("table",), 1, 3, positions, own_rows=True)
    if gathered:  # as `x.transpose(0, 1) + table[ids].unsqueeze(1)` would have it
        input_shape, gradient = (1, positions, 4, 1), torch.randn(positions, 4, 3)
        context = (0, positions, positions, 4, 1, 3, 0, 1, 2, *range(positions))
    else:
        input_shape, gradient = (1, 4, 1, 1), torch.randn(4, positions, 3)
        context = (0, positions, 4, 1, 0, 3, 1, 0, 2)
    call = LayerCall(torch.ones(()).expand(input_shape), gradient, context=context)
    with Operators() as operators:
        statistics = TensorStatistics(spec, call, torch.float64)
        statistics.subsample(Draw(Subsample(rows=2), 0))
        assert isinstance(statistics.count, Tensor)
        statistics.output_moment(added_structure(spec)[1])
        statistics.rows()
        statistics.gradient_along(torch.ones(1, 1))
        statistics.squared_gradients(None, None, dtype=torch.float64, per_example=True)
        assert not statistics.keeps_input
    return operators.count


@pytest.mark.parametrize("gathered", [False, True])
def test_a_longer_table_takes_no_more_operators(gathered: bool) -> None:
    assert operators_of_table(64, gathered=gathered) == operators_of_table(4, gathered=gathered)


def with_zeros(data: st.DataObject, *shape: int) -> Tensor:
    """Draw rows of which some are zero."""
    zeros = torch.rand(shape[:-1]) < data.draw(st.sampled_from((0.0, 0.5, 1.0)), label="zeros")
    return torch.randn(shape).masked_fill(zeros.unsqueeze(-1), 0)


def statistics_of(
    spec: LayerSpec, layer_input: Tensor, gradient: Tensor, earlier: Tensor | None, ids: list[int], draw: Draw
) -> TensorStatistics:
    """Statistics of a call in the canonical layout, of some of its rows."""
    context = (0, *gradient.shape[:3], 0, gradient.dim(), *range(gradient.dim()), *ids)
    statistics = TensorStatistics(spec, LayerCall(layer_input, gradient, earlier, context=context), torch.float64)
    statistics.subsample(draw)
    return statistics


@given(data=st.data())
def test_statistics_of_groups_are_those_of_each_alone(data: st.DataObject) -> None:
    groups, batch, shared, width, out = (data.draw(st.integers(1, 4), label=name) for name in ("k", "n", "s", "i", "o"))
    one_input, by_ids, twice, on_host = (data.draw(st.booleans(), label=name) for name in ("a", "ids", "twice", "host"))
    structure = data.draw(st.sampled_from((Structure.DENSE, Structure.DIAGONAL, Sketched(1))), label="structure")
    sharing = data.draw(st.sampled_from(WeightSharing), label="sharing")
    draw = Draw(Subsample(rows=data.draw(st.integers(1, 16), label="rows")), 0)
    # All rows are for all groups, or each example is for one of them.
    ids = data.draw(st.lists(st.integers(0, groups - 1), min_size=batch, max_size=batch), label="ids") if by_ids else []
    used = 1 if ids else groups
    layer_input = torch.randn(1 if one_input else used, batch, shared, width)
    gradient = with_zeros(data, used, batch, shared, out)
    earlier = with_zeros(data, used, batch, shared, out) if twice else None
    spec = LayerSpec("", ("weight",), width, out, groups, weight_sharing=sharing, own_rows=True)

    def of_group(group: int, tensor: Tensor) -> Tensor:
        if ids:
            return tensor[:, [place for place, of in enumerate(ids) if of == group]]
        return tensor if len(tensor) == 1 else tensor[group : group + 1]

    def moments(statistics: TensorStatistics) -> tuple[Tensor, ...]:
        count, g = torch.as_tensor(statistics.count).double(), statistics.output_moment(structure)
        a = statistics.input_moment(structure) if statistics.has_input else torch.zeros(1, 1)
        squares = statistics.squared_gradients(None, None, dtype=torch.float64, per_example=True)
        along, size = statistics.gradient_along(torch.ones(width, 1))
        return count.view(-1), a, g, squares, along, size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kfac_optim.layers.tensors._TOGETHER", data.draw(st.sampled_from((1, 50, 2**24)), label="most"))
        patch.setattr("kfac_optim.factors.second_moments._IN_CACHE", data.draw(st.sampled_from((1, 2**17))))
        if not on_host:
            for module in ("second_moments", "row_statistics"):
                patch.setattr(f"kfac_optim.factors.{module}.on_host", lambda _: False)
        *together, size = moments(statistics_of(spec, layer_input, gradient, earlier, ids, draw))
        squared_size = torch.zeros(())
        for group in range(groups):
            tensors = [None if each is None else of_group(group, each) for each in (layer_input, gradient, earlier)]
            *alone, own_size = moments(statistics_of(replace(spec, groups=1), *tensors, [], draw))
            for whole, own in zip(together, alone, strict=True):
                of_whole = whole[min(group, len(whole) - 1)]
                assert_same(of_whole, own[0].expand_as(of_whole))
            squared_size += own_size.square()
        assert_same(size, squared_size.sqrt())
