"""Factors in blocks: the numbers of dense algebra with what lies outside of the blocks set to zero."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.cases import LayerCase, any_loss, conv_cases, displacement, free_optimizer, linear_cases, snapshot
from helpers.oracles import assert_same
from helpers.plain import assert_identical, batch, block, mlp, square_loss, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_optim import (
    DEFAULT_ADAPTERS,
    EKFAC,
    BlockDiagonal,
    Cholesky,
    DoublyFactored,
    Eigen,
    Inverse,
    KFACOptimizer,
    LayerSpec,
    NewtonSchulz,
    RowStatistics,
    Structure,
    WeightBiasAdapter,
    WeightSharing,
)
from kfac_optim.blocks.preconditioning import gradients, to_matrix
from kfac_optim.factors.block_diagonal import cut, joined, level_padding
from kfac_optim.specs import narrower

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

DENSE, DIAGONAL, IDENTITY = Structure
Pair = tuple[Structure | BlockDiagonal, Structure | BlockDiagonal]
FACTORED = [Cholesky(), NewtonSchulz(steps=40)]
JOINT = [Eigen(), EKFAC()]


@st.composite
def one_side(draw: st.DrawFn) -> Pair:
    """One factor in blocks of up to 4, the other in any form."""
    other = draw(st.sampled_from(Structure))
    blocks = BlockDiagonal(draw(st.integers(2, 4)))
    return draw(st.sampled_from([(blocks, other), (other, blocks)]))


def layer_cases() -> st.SearchStrategy[LayerCase]:
    return st.one_of(linear_cases(9), conv_cases().map(lambda case: replace(case, groups=1)))


# -- oracles ---------------------------------------------------------------------------------------------------------


def edges(dim: int, size: int) -> list[tuple[int, int]]:
    """First and end of each block: as few of at most `size` as there can be, of one width but the last."""
    count = math.ceil(dim / size)
    width = math.ceil(dim / count)
    return [(first, min(first + width, dim)) for first in range(0, dim, width)]


def kept_part(factor: Tensor | None, kept: Structure | BlockDiagonal) -> Tensor | None:
    """The block-diagonal part of a dense factor `[1, d, d]`; any other is left as it is."""
    if factor is None or not isinstance(kept, BlockDiagonal):
        return factor
    part = torch.zeros_like(factor)
    for first, end in edges(factor.shape[-1], kept.size):
        part[:, first:end, first:end] = factor[:, first:end, first:end]
    return part


def whole(factor: Tensor | None, dim: int, kept: Structure | BlockDiagonal) -> Tensor | None:
    """What `factors()` hands out, as `[1, d, d]` where it is blocks of a wider factor."""
    if factor is None or not isinstance(kept, BlockDiagonal) or dim <= kept.size:
        return factor
    assert factor.shape == (len(edges(dim, kept.size)), *(edges(dim, kept.size)[0][1],) * 2)
    return torch.block_diag(*factor)[:dim, :dim][None]


def as_dense(structure: Pair) -> tuple[Structure, Structure]:
    a, g = (DENSE if isinstance(kept, BlockDiagonal) else kept for kept in structure)
    return a, g


def without_blocks(module: nn.Module, structure: Pair, forward: Callable[[nn.Module], Tensor]) -> Any:
    """The factors of a layer after one step of an optimizer that keeps them dense, block-diagonal part only."""
    optimizer = KFACOptimizer(module, lr=0.0, structure=as_dense(structure))
    forward(module).backward()
    optimizer.step()
    optimizer.remove_hooks()
    a, g = optimizer.factors()[""]
    return kept_part(a, structure[0]), kept_part(g, structure[1])


def matrix_and_factors(
    case: LayerCase, structure: Pair, inverse: Inverse[Any], damping: float
) -> tuple[Tensor, Tensor, Any, Tensor]:
    """Step, gradient `[1, out, in]`, expected factors by definition, and the first step's displacement."""
    module = case.module()
    layer_input = case.input()
    twin = copy.deepcopy(module)
    seed = torch.get_rng_state()

    def forward(each: nn.Module) -> Tensor:
        torch.set_rng_state(seed)
        return any_loss(each(layer_input))

    a, g = without_blocks(twin, structure, forward)
    optimizer = free_optimizer(module, structure=structure, inverse=inverse, damping=damping)
    before = snapshot(module)
    forward(module).backward()
    grad = oracles.gradient_matrix(module)
    optimizer.step()
    return displacement(module, before), grad, (a, g), optimizer


# -- the factors and the step ----------------------------------------------------------------------------------------


@given(case=layer_cases(), structure=one_side(), sharing=st.sampled_from(WeightSharing))
def test_the_factors_are_the_blocks_of_the_dense_ones(case: LayerCase, structure: Pair, sharing: WeightSharing) -> None:
    module = case.module()
    watched: list[tuple[Tensor, Tensor]] = []
    module.register_forward_hook(lambda _, args, output: (output.retain_grad(), watched.append((args[0], output)))[0])
    optimizer = KFACOptimizer(module, lr=0.0, structure=structure, weight_sharing=sharing)
    any_loss(module(case.input())).backward()
    optimizer.step()
    ((layer_input, output),) = watched
    call = type("Call", (), {"input": layer_input, "gradient": output.grad})
    rows = case.rows(module, call)
    expected = oracles.factors(
        *rows, terms=case.examples, bias=case.trains_bias, sharing=sharing, structure=as_dense(structure)
    )
    (record,) = optimizer.summary().blocks
    for factor, dense, kept, dim in zip(
        optimizer.factors()[""], expected, structure, (record.in_dim, record.out_dim), strict=True
    ):
        assert_same(whole(factor, dim, kept), kept_part(dense, kept))


@pytest.mark.parametrize("inverse", FACTORED, ids=repr)
@settings(max_examples=100)  # so that padding on each side is among them
@given(case=layer_cases(), structure=one_side(), damping=st.sampled_from([1e-3, 0.1, 10.0]))
def test_a_factored_step_solves_the_dense_system_of_the_blocks(
    inverse: Inverse[Any], case: LayerCase, structure: Pair, damping: float
) -> None:
    step, grad, (a, g), _ = matrix_and_factors(case, structure, inverse, damping)
    assert_same(step, oracles.solve(oracles.damped_kronecker(a, g, grad, damping), grad), rtol=1e-6)


@pytest.mark.parametrize("inverse", JOINT, ids=repr)
@given(case=layer_cases(), structure=one_side(), damping=st.sampled_from([1e-3, 0.1, 10.0]))
def test_a_joint_step_solves_the_dense_system_of_the_blocks(
    inverse: Inverse[Any], case: LayerCase, structure: Pair, damping: float
) -> None:
    step, grad, (a, g), _ = matrix_and_factors(case, structure, inverse, damping)
    _, rows, columns = grad.shape
    curvature = oracles.kronecker(oracles.dense(a, 1, columns), oracles.dense(g, 1, rows))
    assert_same(step, oracles.solve(curvature + damping * torch.eye(rows * columns), grad), rtol=1e-6)


@given(case=layer_cases(), structure=one_side().filter(lambda pair: IDENTITY not in pair))
def test_the_second_moments_of_ekfac_are_those_of_the_blocks_of_the_gradient(case: LayerCase, structure: Pair) -> None:
    module = case.module()
    optimizer = KFACOptimizer(module, lr=0.0, structure=structure, inverse=EKFAC(), factor_update_period=1)
    any_loss(module(case.input())).backward()
    optimizer.step()
    optimizer.zero_grad()
    held = block(optimizer, "")
    output = module(case.input())
    weights = torch.randn(output.shape)
    of_each = (output * weights).flatten(1).sum(1) if case.examples > 1 else (output * weights).sum()[None]
    params = [param for param in module.parameters() if param.requires_grad]
    names = [name for name, param in module.named_parameters() if param.requires_grad]
    gradients = []
    for loss in of_each:
        grads = torch.autograd.grad(loss / len(of_each), params, retain_graph=True)
        gradients.append(oracles.gradient_matrix(module, dict(zip(names, grads, strict=True)))[0])
    of_each.mean().backward()
    held.state.fold(len(of_each), 1.0)
    found, state = held.state.second_moments, held.state
    a_basis, g_basis = (None if each is None else each.basis for each in (state.a, state.g))
    (_, rows, columns) = held.spec.by_blocks().groups, *gradients[0].shape
    cuts_g = isinstance(structure[1], BlockDiagonal)
    for number, (first, end) in enumerate(edges(rows if cuts_g else columns, structure[1 if cuts_g else 0].size)):
        parts = [grad[first:end] if cuts_g else grad[:, first:end] for grad in gradients]
        high, wide = parts[0].shape
        left = torch.eye(high) if g_basis is None else g_basis[min(number, len(g_basis) - 1)][:high, :high]
        right = torch.eye(wide) if a_basis is None else a_basis[min(number, len(a_basis) - 1)][:wide, :wide]
        expected = len(parts) * sum((left.mT @ part @ right).square() for part in parts)
        assert_same(found[number][:high, :wide], expected, rtol=1e-8)


@pytest.mark.parametrize("inverse", [*FACTORED, *JOINT], ids=repr)
@pytest.mark.parametrize("structure", [(DENSE, BlockDiagonal(4)), (BlockDiagonal(4), DENSE)], ids=["G", "A"])
def test_what_the_last_block_lacks_stays_empty(inverse: Inverse[Any], structure: Pair) -> None:
    """9 in blocks of at most 4 are three of 3; 10 are three of 4 with two missing; 11 inputs and a bias are 12."""
    torch.manual_seed(0)
    model = nn.Linear(10, 10, bias=False)
    optimizer = free_optimizer(model, structure=structure, inverse=inverse)
    held = block(optimizer, "")
    side = 1 if structure[0] is DENSE else 0
    for seed in range(3):
        optimizer.zero_grad()
        square_loss(model(batch(seed, dim=10))).backward()
        grad = to_matrix(held, gradients(held))
        assert grad.shape == ((3, 4, 10) if side else (3, 10, 4))
        optimizer.step()
        lacking = (lambda matrix: matrix[-1, 2:, :]) if side else (lambda matrix: matrix[-1, :, 2:])
        assert lacking(grad).count_nonzero() == 0
        direction = held.inverse.apply(held.state, grad, 1e-3)
        assert direction.isfinite().all()
        assert lacking(direction).abs().max() <= 1e-12 * direction.abs().max()
        factor = optimizer.factors()[""][side]
        assert factor[-1, 2:].count_nonzero() == factor[-1, :, 2:].count_nonzero() == 0
        assert held.state.factors()[side][-1].diagonal()[2:].min() > 0, "copies are cleared, not the state"


@pytest.mark.parametrize("inverse", [*FACTORED, *JOINT], ids=repr)
@pytest.mark.parametrize("structure", [(DENSE, BlockDiagonal(4)), (BlockDiagonal(4), DENSE)], ids=["G", "A"])
def test_padding_does_not_touch_condition_numbers(inverse: Inverse[Any], structure: Pair) -> None:
    torch.manual_seed(0)
    model = nn.Linear(10, 10, bias=False)
    optimizer = KFACOptimizer(model, lr=0.0, structure=structure, inverse=inverse, damping=1e-4)
    square_loss(model(batch(dim=10, size=50))).backward()
    optimizer.step()
    side = 1 if structure[0] is DENSE else 0
    factors = [whole(f, 10, kept)[0] for f, kept in zip(optimizer.factors()[""], structure, strict=True)]
    mean = [factor.trace() / 10 for factor in factors]
    shift = 1e-2 * (mean[side] / mean[1 - side]).sqrt()
    damped = factors[side] + shift * torch.eye(10)
    conditions = [
        torch.linalg.cond(damped[first:end, first:end], 1 if inverse in FACTORED else 2) for first, end in edges(10, 4)
    ]
    assert optimizer.metrics()["condition_AG"[:10] + "AG"[side]] == pytest.approx(float(max(conditions)), rel=1e-6)


# -- every family ----------------------------------------------------------------------------------------------------


class AddsBiasElsewhere(nn.Module):
    """A product with a parameter of its own, one call with the bias and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.shift, x, self.matrix) + x.square() @ self.matrix


class TiedToItself(nn.Module):
    """Its weight is used from both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.layer(x)), self.layer.weight.T)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Attentive(nn.Module):
    """Separate projections, of one group each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, kdim=5, vdim=5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x[..., :5], x[..., 1:])[0]


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 5), lambda: torch.randn(4, 3, 6)),
    "conv": (lambda: nn.Conv2d(2, 5, 2), lambda: torch.randn(3, 2, 3, 3)),
    "transposed conv": (lambda: nn.ConvTranspose2d(2, 5, 2), lambda: torch.randn(3, 2, 3, 3)),
    "embedding": (lambda: nn.Embedding(6, 5), lambda: torch.randint(6, (4, 3))),
    "lstm": (Recurrent, lambda: torch.randn(4, 2, 5)),
    "attention": (Attentive, lambda: torch.randn(4, 3, 6)),
    "function": (AddsBiasElsewhere, lambda: torch.randn(4, 7)),
    "tied to itself": (TiedToItself, lambda: torch.randn(4, 5)),
    "twice": (lambda: nn.Sequential(*(nn.Linear(5, 5),) * 2), lambda: torch.randn(4, 5)),
}


@pytest.mark.parametrize("side", [0, 1], ids=["A", "G"])
@pytest.mark.parametrize("sharing", WeightSharing, ids=lambda sharing: sharing.value)
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_those_of_the_dense_factor_in_every_family(family: str, sharing: WeightSharing, side: int) -> None:
    cutting = (BlockDiagonal(4), DENSE) if side == 0 else (DENSE, BlockDiagonal(4))
    build, make_input = FAMILIES[family]
    model, layer_input = build(), make_input()
    found = []
    for structure in ((DENSE, DENSE), cutting):
        torch.manual_seed(1)
        twin = copy.deepcopy(model)
        optimizer = KFACOptimizer(twin, lr=0.0, structure=structure, weight_sharing=sharing, factor_update_period=1)
        for _ in range(2):
            optimizer.zero_grad()
            any_loss(twin(layer_input)).backward()
            optimizer.step()
        found.append((optimizer.factors(), {record.name: record for record in optimizer.summary().blocks}))
    (dense, records), (blocks, _) = found
    assert blocks.keys() == dense.keys()
    cut_at_all = 0
    for name, pair in blocks.items():
        dims = records[name].in_dim, records[name].out_dim
        for at in (0, 1):
            kept = cutting[at] if dense[name][at].dim() == 3 else DENSE
            assert_same(whole(pair[at], dims[at], kept), kept_part(dense[name][at], kept))
            cut_at_all += isinstance(kept, BlockDiagonal) and dims[at] > 4
    assert cut_at_all > 0 or (family, side) == ("embedding", 0)  # whose A is diagonal


def test_weight_and_bias_may_be_in_different_groups() -> None:
    """The step then measures and moves them by numbers of their own."""
    found = []
    for structure in ((DENSE, DENSE), (BlockDiagonal(4), DENSE)):
        torch.manual_seed(0)
        model = nn.Linear(7, 3)
        groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.3}]
        optimizer = KFACOptimizer(groups, model=model, structure=structure, damping=1e9, kl_clip=1e-12)
        before = snapshot(model)
        square_loss(model(batch(dim=7))).backward()
        optimizer.step()
        found.append([before[name] - param.detach() for name, param in model.named_parameters()])
    # Under damping this large the direction is the gradient, however the factor is kept.
    assert_same(*found, rtol=1e-3)


# -- what is wide stays narrow ---------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made within."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return output


@pytest.mark.parametrize("inverse", [*FACTORED, *JOINT], ids=repr)
@pytest.mark.parametrize("side", [0, 1], ids=["A", "G"])
def test_nothing_as_large_as_the_dense_factor_is_ever_made(side: int, inverse: Inverse[Any]) -> None:
    wide, narrow, size = 1500, 4, 30
    layer = nn.Linear(narrow, wide) if side else nn.Linear(wide, narrow, bias=False)
    kept = (DENSE, BlockDiagonal(size)) if side else (BlockDiagonal(size), DENSE)
    with Largest() as largest:
        optimizer = KFACOptimizer(layer, lr=0.1, structure=kept, inverse=inverse, factor_update_period=1)
        for seed in range(2):
            optimizer.zero_grad()
            square_loss(layer(batch(seed, dim=layer.in_features))).backward()
            optimizer.step()
    assert largest.elements <= wide * size < wide**2 / 40
    assert optimizer.summary().blocks[0].state_bytes < 4 * 8 * wide * size


def test_the_wider_of_two_limits_decides() -> None:
    """`max_factor_dim` bounds the blocks, not the factor; a factor no wider than a block is dense."""
    kept = {}
    for dim in (4, 5, 8, 100):
        for size in (4, 8, 50):
            optimizer = KFACOptimizer(nn.Linear(2, dim), max_factor_dim=8, structure=(DENSE, BlockDiagonal(size)))
            (record,) = optimizer.summary().blocks
            kept[dim, size] = record.structure[1]
    assert kept == {
        (4, 4): DENSE,
        (5, 4): BlockDiagonal(4),
        (8, 4): BlockDiagonal(4),
        (100, 4): BlockDiagonal(4),
        (4, 8): DENSE,
        (5, 8): DENSE,
        (8, 8): DENSE,
        (100, 8): BlockDiagonal(8),
        (4, 50): DENSE,
        (5, 50): DENSE,
        (8, 50): DENSE,
        (100, 50): DIAGONAL,
    }


def test_the_summary_shows_blocks() -> None:
    summary = KFACOptimizer(nn.Linear(7, 10), structure=(DENSE, BlockDiagonal(4))).summary()
    (record,) = summary.blocks
    assert (record.in_dim, record.out_dim, record.groups) == (8, 10, 1)
    assert record.structure == (DENSE, BlockDiagonal(4))
    cells = [cell for cell in str(summary).splitlines()[2].split("  ") if cell]
    assert [cell.strip() for cell in cells[3:5]] == ["8×8", "3·4×4"]


def test_the_cost_is_that_of_the_blocks() -> None:
    spec = LayerSpec("layer", ("weight",), 6, 10, structure=(DENSE, BlockDiagonal(4)))
    assert Cholesky().flops(spec.by_blocks()).refresh == 6**3 + 3 * 4**3
    assert Cholesky().flops(spec.transposed().by_blocks()) == Cholesky().flops(spec.by_blocks())


# -- choices that do not go together ---------------------------------------------------------------------------------


class OwnAdapter(WeightBiasAdapter[nn.Linear]):
    """Does not say that it makes rows."""

    def unbatched_ndim(self, module: nn.Linear) -> int:
        return 1

    def statistics(self, module: nn.Linear, spec: LayerSpec, call: Any, dtype: torch.dtype) -> RowStatistics:
        return DEFAULT_ADAPTERS[nn.Linear].statistics(module, spec, call, dtype)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            lambda: nn.Linear(6, 7),
            {"structure": (BlockDiagonal(3), BlockDiagonal(4))},
            r"structure of layer 'at' \(7 inputs, 7 outputs\) cuts both factors into blocks, .*Make the other Stru",
        ),
        (
            lambda: nn.Conv1d(6, 8, 3, groups=2),
            {"structure": (BlockDiagonal(3), DENSE)},
            r"structure of layer 'at' \(10 inputs, 4 outputs\) is BlockDiagonal\(size=3\) for A, but the layer has 2 "
            r"groups.*Make it Structure\.DENSE",
        ),
        (
            lambda: nn.MultiheadAttention(6, 2),
            {"structure": (DENSE, BlockDiagonal(5))},
            r"layer 'at\.in_proj' .*for G, but the layer has 3 groups",
        ),
        (
            lambda: nn.Linear(6, 7),
            {"structure": (DENSE, BlockDiagonal(3)), "adapters": {nn.Linear: OwnAdapter()}},
            r"for G, but OwnAdapter does not say that its statistics can be cut.*in_rows = True",
        ),
        (
            lambda: nn.Linear(6, 7),
            {"structure": (BlockDiagonal(3), DENSE), "inverse": DoublyFactored(2)},
            r"does not fit layer 'at' .*it has 3 groups, or a factor in as many blocks",
        ),
    ],
    ids=["both", "groups", "attention", "adapter", "inverse"],
)
def test_choices_that_do_not_go_together_are_refused_with_the_remedy(
    model: Callable[[], nn.Module], options: dict[str, Any], message: str
) -> None:
    net = nn.ModuleDict({"at": model()})
    with pytest.raises(ValueError, match=message):
        KFACOptimizer(net, **options)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_an_own_adapter_that_says_so_takes_blocks() -> None:
    class Saying(OwnAdapter):
        in_rows = True

    model = mlp()
    twin = copy.deepcopy(model)
    structure = (DENSE, BlockDiagonal(3))
    train(
        model,
        KFACOptimizer(model, lr=0.1, structure=structure, adapters={nn.Linear: Saying()}, factor_update_period=1),
        2,
    )
    train(twin, KFACOptimizer(twin, lr=0.1, structure=structure, factor_update_period=1), 2)
    assert_identical(list(model.parameters()), list(twin.parameters()))


def test_both_may_be_asked_for_where_one_is_narrow() -> None:
    model = nn.Linear(2, 9)
    (record,) = KFACOptimizer(model, structure=(BlockDiagonal(4), BlockDiagonal(4))).summary().blocks
    assert record.structure == (DENSE, BlockDiagonal(4))


def test_structures_are_ordered_by_what_they_keep() -> None:
    order = [IDENTITY, DIAGONAL, BlockDiagonal(2), BlockDiagonal(3), DENSE]
    for i, less in enumerate(order):
        for j, more in enumerate(order):
            assert narrower(less, more) == order[min(i, j)]


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (1, ValueError, r"size of BlockDiagonal must be at least 2, got 1; blocks of 1 are Structure\.DIAGONAL"),
        (0, ValueError, "at least 2, got 0"),
        (2.0, TypeError, r"must be an integer, got 2\.0"),
        (True, TypeError, "must be an integer, got True"),
        ("2", TypeError, "must be an integer, got '2'"),
    ],
)
def test_a_bad_size_is_refused(size: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BlockDiagonal(size)


# -- cutting and joining ---------------------------------------------------------------------------------------------


@given(dim=st.integers(2, 60), size=st.integers(2, 61), axis=st.sampled_from([-1, -2]))
def test_blocks_are_balanced_and_none_is_empty(dim: int, size: int, axis: int) -> None:
    kept = BlockDiagonal(size)
    tensor = torch.randn(1, 3, dim) if axis == -1 else torch.randn(1, dim, 3)
    parts = cut(tensor, axis, kept.blocks(dim))
    width = kept.width(dim)
    assert parts.shape == ((kept.blocks(dim), 3, width) if axis == -1 else (kept.blocks(dim), width, 3))
    assert width <= size
    assert kept.blocks(dim) == math.ceil(dim / size)
    assert kept.width(dim) > 1
    for part, (first, end) in zip(parts, edges(dim, size), strict=True):
        assert first < end
        assert_same(part.narrow(axis, 0, end - first), tensor[0].narrow(axis, first, end - first), rtol=0)
        assert part.narrow(axis, end - first, width - end + first).count_nonzero() == 0
    assert torch.equal(joined(parts, axis, dim), tensor)


@given(dim=st.integers(3, 30), size=st.integers(2, 20))
def test_levelled_padding_keeps_the_mean_and_the_range_of_eigenvalues(dim: int, size: int) -> None:
    kept = BlockDiagonal(size)
    rows = cut(torch.randn(1, 40, dim), -1, kept.blocks(dim))
    moment = rows.mT @ rows
    true = torch.cat(
        [
            torch.linalg.eigvalsh(part[: end - first, : end - first])
            for part, (first, end) in zip(moment, edges(dim, size), strict=True)
        ]
    )
    diagonal = level_padding(moment.diagonal(dim1=1, dim2=2).clone(), dim)
    found = torch.linalg.eigvalsh(level_padding(moment, dim))
    assert_same(found.mean(), true.mean())
    assert found.min() >= true.min() * (1 - 1e-9)
    assert found.max() <= true.max() * (1 + 1e-9)
    assert_same(diagonal, moment.diagonal(dim1=1, dim2=2), rtol=1e-12)


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inverse", [*FACTORED, *JOINT], ids=repr)
def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise(inverse: Inverse[Any]) -> None:
    options: dict[str, Any] = {
        "lr": 0.1,
        "factor_update_period": 1,
        "inverse": inverse,
        "structure": {"0": (DENSE, BlockDiagonal(3))},
    }
    model = mlp(sizes=(4, 8, 3))
    optimizer = KFACOptimizer(model, **options)
    train(model, optimizer, 3)
    twin = copy.deepcopy(model)
    resumed = KFACOptimizer(twin, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 3, start=3)
    train(twin, resumed, 3, start=3)
    assert_identical(list(model.parameters()), list(twin.parameters()))
    other = KFACOptimizer(copy.deepcopy(model), lr=0.1, inverse=inverse)
    with pytest.raises(ValueError, match=r"factors\.G\.average of '0' is \[3, 6\], here \[1, 36\]"):
        other.load_state_dict(optimizer.state_dict())


def test_a_model_found_by_a_function_from_the_other_side_is_restored_before_it_is_seen() -> None:
    """Two pairs of factors, both in blocks, are made from the checkpoint alone."""
    model = TiedToItself()
    options: dict[str, Any] = {"lr": 0.05, "factor_update_period": 1, "structure": (DENSE, BlockDiagonal(4))}
    optimizer = KFACOptimizer(model, **options)
    train(model, optimizer, 2, dim=5)
    assert block(optimizer, "layer").spec.opposed
    twin = copy.deepcopy(model)
    resumed = KFACOptimizer(twin, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2, start=2, dim=5)
    train(twin, resumed, 2, start=2, dim=5)
    assert_identical(list(model.parameters()), list(twin.parameters()))
