from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import cases, oracles
from helpers.cases import LayerCase, any_loss, conv_cases, displacement, linear_cases, look_alikes, snapshot
from helpers.oracles import assert_same
from helpers.plain import assert_identical, batch, block, clones, edited, mlp, square_loss
from helpers.states import CPU, OwnStatistics, assert_resumes_bitwise, every_structure
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp import GradScaler

from kfac_optim import (
    DEFAULT_ADAPTERS,
    EKFAC,
    BlockDiagonal,
    Eigen,
    KFACOptimizer,
    LayerSpec,
    LayerStatistics,
    LossTerms,
    RowStatistics,
    Structure,
    Subsample,
    WeightSharing,
)
from kfac_optim.factors import second_moments as row_functions
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.second_moments import sum_of_squares
from kfac_optim.inverses.eigenbasis.ekfac import EKFACState
from kfac_optim.layers.embedding import EmbeddingStatistics

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

DENSE, DIAGONAL, IDENTITY = Structure
MEASURED = [(DENSE, DENSE), (DENSE, DIAGONAL), (DIAGONAL, DENSE), (DIAGONAL, DIAGONAL)]
WITH_IDENTITY = [(DENSE, IDENTITY), (IDENTITY, DENSE), (DIAGONAL, IDENTITY), (IDENTITY, DIAGONAL)]
measured_structures = pytest.mark.parametrize(
    "structure", MEASURED, ids=lambda pair: f"{pair[0].value}-{pair[1].value}"
)
identity_structures = pytest.mark.parametrize(
    "structure", WITH_IDENTITY, ids=lambda pair: f"{pair[0].value}-{pair[1].value}"
)
free_optimizer = partial(cases.free_optimizer, inverse=EKFAC())

# -- oracles -----------------------------------------------------------------------------------------------------


class Loss:
    """A mean over examples whose part of each element of the output differs."""

    def __init__(self, shape: tuple[int, ...], terms: int, mask: Tensor | None = None) -> None:
        self.weights, self.terms = torch.randn(shape), terms
        self.mask = torch.ones(shape) if mask is None else mask

    def elements(self, output: Tensor) -> Tensor:
        return self.mask * (output * self.weights + output.square() / 2) / self.terms

    def __call__(self, output: Tensor) -> Tensor:
        return self.elements(output).sum()

    def of_each(self, output: Tensor) -> Iterator[Tensor]:
        """The part of each example; without a batch axis there is one."""
        yield from self.elements(output).flatten(1).sum(1) if self.terms > 1 else [self(output)]


def dense_fisher(gradients: list[Tensor]) -> Tensor:
    """`M Σ_n vec(∇W_n) vec(∇W_n)ᵀ` of the gradients `[groups, out, in]` of M terms of a mean."""
    rows = torch.stack([gradient.flatten(1) for gradient in gradients], dim=1)
    return len(gradients) * rows.mT @ rows


def gradients_of(module: nn.Module, losses: Iterator[Tensor]) -> list[Tensor]:
    """The gradient matrix of each loss by a backward of its own."""
    named = {name: param for name, param in module.named_parameters() if param.requires_grad}
    found = []
    for loss in losses:
        grads = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        found.append(oracles.gradient_matrix(module, dict(zip(named, grads, strict=True))))
    return found


def bases(state: EKFACState) -> tuple[Tensor, Tensor]:
    """`U_A` and `U_G`, `[groups, d, d]`."""
    groups, out_dim, in_dim = state.shape
    found = []
    for spectrum, dim in ((state.a, in_dim), (state.g, out_dim)):
        basis = None if spectrum is None else spectrum.basis
        found.append(torch.eye(dim).expand(groups, dim, dim) if basis is None else basis.expand(groups, dim, dim))
    return found[0].clone(), found[1].clone()


def in_basis(fisher: Tensor, state: EKFACState) -> Tensor:
    """The diagonal of `fisher` in the state's basis, `[groups, out, in]`."""
    basis = oracles.kronecker(*bases(state))
    return (basis.mT @ fisher @ basis).diagonal(dim1=1, dim2=2).reshape(state.shape)


def curvature(state: EKFACState) -> Tensor:
    """`U diag(S) Uᵀ`, `[groups, out·in, out·in]`."""
    basis = oracles.kronecker(*bases(state))
    return basis @ torch.diag_embed(state.second_moments.flatten(1)) @ basis.mT


def solution(state: EKFACState, grad: Tensor, damping: float) -> Tensor:
    system = curvature(state)
    return oracles.solve(system + damping * torch.eye(system.shape[-1]), grad)


def watched(
    module: nn.Module, first: Tensor, inverse: EKFAC | None = None, **options: object
) -> tuple[KFACOptimizer, EKFACState]:
    """An optimizer that has the basis of one batch, and the state of its only block."""
    optimizer = KFACOptimizer(module, lr=0.0, inverse=inverse or EKFAC(), **{"factor_update_period": 1, **options})
    any_loss(module(first)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, optimizer._binding.coverage.blocks[0].state


def fold(optimizer: KFACOptimizer, terms: float | Tensor, decay: float = 1.0, loss_scale: float = 1.0) -> None:
    """Take what was accumulated into the averages without a refresh, which would change the basis."""
    for each in optimizer._binding.coverage.blocks:
        each.state.fold(terms, decay, loss_scale)


# -- the second moments are the diagonal of the Fisher -----------------------------------------------------------


@given(case=st.one_of(linear_cases(), conv_cases()), structure=st.sampled_from(MEASURED))
def test_the_second_moments_are_the_diagonal_of_the_fisher_in_the_eigenbasis(
    case: LayerCase, structure: tuple[Structure, Structure]
) -> None:
    module = case.module()
    optimizer, state = watched(module, case.input(), structure=structure)
    output = module(case.input())
    loss = Loss(output.shape, case.examples)
    gradients = gradients_of(module, loss.of_each(output))
    loss(output).backward()
    fold(optimizer, case.examples)
    assert_same(state.second_moments, in_basis(dense_fisher(gradients), state), rtol=1e-8)


@given(case=st.one_of(linear_cases(), conv_cases()), structure=st.sampled_from(MEASURED))
def test_without_per_example_every_position_is_an_example(
    case: LayerCase, structure: tuple[Structure, Structure]
) -> None:
    module = case.module()
    optimizer, state = watched(module, case.input(), EKFAC(per_example=False), structure=structure)
    output = module(case.input())
    loss = Loss(output.shape, 1)
    (gradient,) = torch.autograd.grad(loss(output), output, retain_graph=True)
    channels = -1 if isinstance(module, nn.Linear) else -1 - len(module.kernel_size)
    parts = (output * gradient).sum(channels).flatten()
    fisher = dense_fisher(gradients_of(module, iter(parts))) / len(parts)  # M is 1
    loss(output).backward()
    fold(optimizer, 1)
    assert_same(state.second_moments, in_basis(fisher, state), rtol=1e-8)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    tokens=st.integers(1, 5),
    structure=st.sampled_from(MEASURED),
)
def test_of_an_embedding_they_are_that_diagonal_too(
    shape: list[int], tokens: int, structure: tuple[Structure, Structure]
) -> None:
    module = nn.Embedding(tokens, 3)
    optimizer, state = watched(module, torch.randint(tokens, shape), structure=structure)
    output = module(torch.randint(tokens, shape))
    loss = Loss(output.shape, shape[0])
    gradients = [
        torch.autograd.grad(part, module.weight, retain_graph=True)[0].mT[None]
        for part in loss.elements(output).flatten(1).sum(1)
    ]
    loss(output).backward()
    fold(optimizer, shape[0])
    assert state.a.basis is None
    assert_same(state.second_moments, in_basis(dense_fisher(gradients), state), rtol=1e-8)


def test_rows_without_a_gradient_add_nothing() -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(4, 5, 3))
    x, mask = torch.randn(4, 5, 3), torch.ones(4, 5, 2)
    mask[1, 3:], mask[2] = 0, 0
    loss = Loss(mask.shape, 4, mask)
    output = module(x)
    gradients = gradients_of(module, loss.of_each(output))
    loss(output).backward()
    fold(optimizer, 4)
    assert_same(state.second_moments, in_basis(dense_fisher(gradients), state), rtol=1e-8)


def test_with_reduce_they_are_of_the_summed_gradient_and_the_mean_input() -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(4, 5, 3), weight_sharing=WeightSharing.REDUCE)
    x = torch.randn(4, 5, 3)
    output = module(x)
    output.retain_grad()
    Loss(output.shape, 4)(output).backward()
    fold(optimizer, 4)
    a, g = oracles.with_ones(x, True).mean(1), output.grad.sum(1)
    gradients = [torch.outer(right, left)[None] for left, right in zip(a, g, strict=True)]
    assert_same(state.second_moments, in_basis(dense_fisher(gradients), state), rtol=1e-8)


def test_groups_that_share_one_input_have_their_own() -> None:
    module = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(5, 3, 4)

    def run(tensor: Tensor) -> Tensor:
        return module(tensor, tensor, tensor, need_weights=False)[0]

    optimizer = KFACOptimizer(module, lr=0.0, inverse=EKFAC(), factor_update_period=1)
    any_loss(run(torch.randn(5, 3, 4))).backward()
    optimizer.step()
    optimizer.zero_grad()
    output = run(x)
    loss = Loss(output.shape, 5)
    parts = [
        torch.autograd.grad(part, [module.in_proj_weight, module.in_proj_bias], retain_graph=True)
        for part in loss.of_each(output)
    ]
    gradients = [torch.cat([w.view(3, 4, 4), b.view(3, 4, 1)], dim=-1) for w, b in parts]
    loss(output).backward()
    fold(optimizer, 5)
    state = block(optimizer, "in_proj").state
    assert state.pair.a.groups == 1
    assert_same(state.second_moments, in_basis(dense_fisher(gradients), state), rtol=1e-8)


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too; or, untied, a copy of it."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight if tied else nn.Parameter(self.embedding.weight.detach().clone())

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).tanh())


def test_opposed_uses_of_one_weight_add_up_as_independent() -> None:
    tied = Tied(True)
    optimizer, state = watched(tied, torch.randint(5, (4, 3)))
    untied, ids = Tied(False), torch.randint(5, (6, 3))
    untied.load_state_dict(tied.state_dict())
    output = untied(ids)
    loss = Loss(output.shape, 6)
    weights = [untied.embedding.weight, untied.head.weight]
    parts = [torch.autograd.grad(part, weights, retain_graph=True) for part in loss.of_each(output)]
    uses = [[part[use].mT[None] for part in parts] for use in (0, 1)]
    loss(tied(ids)).backward()
    fold(optimizer, 6)
    assert state.pair.opposed is not None
    assert_same(state.second_moments, in_basis(sum(map(dense_fisher, uses)), state), rtol=1e-8)


def test_several_calls_of_a_module_add_up_as_independent() -> None:
    module = nn.Linear(3, 3)
    optimizer, state = watched(module, torch.randn(4, 3))
    inner = module(torch.randn(6, 3))
    outer = module(inner.detach())
    losses = Loss((6, 3), 6), Loss((6, 3), 6)
    fishers = [
        dense_fisher(gradients_of(module, loss.of_each(output)))
        for loss, output in zip(losses, (inner, outer), strict=True)
    ]
    (losses[0](inner) + losses[1](outer)).backward()
    fold(optimizer, 6)
    assert_same(state.second_moments, in_basis(sum(fishers), state), rtol=1e-8)


@given(
    groups=st.integers(1, 3),
    examples=st.integers(0, 5),
    positions=st.integers(1, 6),
    dims=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    shared=st.booleans(),
    turn=st.tuples(st.booleans(), st.booleans()),
    chunk=st.sampled_from([1, 40, 2**20]),
)
def test_every_way_to_contract_gives_the_same_squares(
    groups: int,
    examples: int,
    positions: int,
    dims: tuple[int, int],
    shared: bool,
    turn: tuple[bool, bool],
    chunk: int,
) -> None:
    inputs, outputs = dims
    a = torch.randn(1 if shared else groups, examples, positions, inputs)
    g = torch.randn(groups, examples, positions, outputs)
    a_basis, g_basis = (
        torch.linalg.qr(torch.randn(count, dim, dim)).Q if turned else None
        for count, dim, turned in zip((len(a), groups), dims, turn, strict=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_functions, "_CHUNK", chunk)
        found = sum_of_squares(a, g, a_basis, g_basis)
    whole = torch.einsum("knro,knri->knoi", g, a.expand(groups, *a.shape[1:]))
    if g_basis is not None:
        whole = torch.einsum("kop,knoi->knpi", g_basis, whole)
    if a_basis is not None:
        whole = torch.einsum("kij,knoi->knoj", a_basis.expand(groups, inputs, inputs), whole)
    assert_same(found, whole.square().sum(1))


# -- embeddings, without their one-hot rows ------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    padding=st.sampled_from([None, 0, 2]),
    sharing=st.sampled_from(WeightSharing),
    per_example=st.booleans(),
    turned=st.booleans(),
    blocks=st.sampled_from([DENSE, BlockDiagonal(2)]),
    again=st.booleans(),
    integer=st.sampled_from([torch.int64, torch.int32]),
)
def test_of_an_embedding_they_are_those_of_its_one_hot_rows(
    shape: list[int],
    padding: int | None,
    sharing: WeightSharing,
    per_example: bool,
    turned: bool,
    blocks: Structure | BlockDiagonal,
    again: bool,
    integer: torch.dtype,
) -> None:
    module = nn.Embedding(4, 5, padding_idx=padding)
    ids = torch.randint(4, shape, dtype=integer)
    gradient = torch.randn(*shape, 5) * (torch.rand(*shape, 1) < 0.7)
    spec = LayerSpec("layer", ("weight",), 4, 5, structure=(DIAGONAL, blocks), weight_sharing=sharing)
    call = LayerCall(ids, gradient, torch.randn_like(gradient) if again else None)
    stats = DEFAULT_ADAPTERS[nn.Embedding].statistics(module, spec, call, torch.float64)
    groups, width = (3, 2) if isinstance(blocks, BlockDiagonal) else (1, 5)
    basis = torch.linalg.qr(torch.randn(groups, width, width)).Q if turned else None
    a, g = stats.rows()
    assert a.shape[-1] == 4
    if not per_example:
        a, g = (rows.flatten(1, 2).unsqueeze(2) for rows in (a, g))
    expected = sum_of_squares(a, g, None, basis)
    assert_same(stats.squared_gradients(None, basis, dtype=torch.float64, per_example=per_example), expected)
    # A basis of its inputs, which no embedding of ours has, needs the rows.
    turning = torch.linalg.qr(torch.randn(1, 4, 4)).Q
    expected = sum_of_squares(a, g, turning, basis)
    assert_same(stats.squared_gradients(turning, basis, dtype=torch.float64, per_example=per_example), expected)


@pytest.mark.parametrize("sharing", WeightSharing, ids=lambda sharing: sharing.value)
@pytest.mark.parametrize("per_example", [True, False])
def test_an_embedding_of_fifty_thousand_tokens_trains(
    monkeypatch: pytest.MonkeyPatch, sharing: WeightSharing, per_example: bool
) -> None:
    """No row is built, and what is has the size of the weight; one-hot rows would have 600 MB."""
    monkeypatch.setattr(RowStatistics, "rows", lambda _: pytest.fail("the rows were built"))
    module = nn.Embedding(50_000, 4, dtype=torch.float32)
    optimizer = KFACOptimizer(
        module, lr=0.1, inverse=EKFAC(per_example), weight_sharing=sharing, factor_update_period=1
    )
    before = module.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        ids = torch.randint(50_000, (6, 500))
        module(ids).square().sum().backward()
        optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0
    assert not torch.equal(module.weight, before)


@pytest.mark.parametrize("first", ["embedding", "head"])
def test_an_output_layer_tied_to_an_embedding_keeps_the_second_moments_of_both(first: str) -> None:
    """As by the one-hot rows of the embedding; the matrix is that of the module that comes first."""
    found = []
    for one_hot in (False, True):
        torch.manual_seed(1)
        parts = {"embedding": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)}
        parts["head"].weight = parts["embedding"].weight
        model = nn.ModuleDict({first: parts.pop(first), **parts})
        optimizer = KFACOptimizer(model, lr=0.0, inverse=EKFAC(), loss_terms=LossTerms.SUM, factor_update_period=1)
        with pytest.MonkeyPatch.context() as patch:
            if one_hot:
                patch.setattr(EmbeddingStatistics, "squared_gradients", LayerStatistics.squared_gradients)
            for _ in range(2):
                optimizer.zero_grad()
                any_loss(model["head"](torch.tanh(model["embedding"](torch.randint(6, (3, 5)))))).backward()
                optimizer.step()
        (held,) = optimizer._binding.coverage.blocks
        found.append(held.state.second_moments.clone())
    assert found[0].count_nonzero() == found[0].numel()
    assert_same(*found)


@pytest.mark.parametrize(("positions", "by_matrix"), [(2, 0), (40, 1)])
def test_many_positions_are_contracted_before_anything_is_turned(
    monkeypatch: pytest.MonkeyPatch, positions: int, by_matrix: int
) -> None:
    turned: list[int] = []
    plain = row_functions.turned
    monkeypatch.setattr(
        row_functions, "turned", lambda rows, basis: turned.append(rows.shape[-2]) or plain(rows, basis)
    )
    eye = torch.eye(3)[None], torch.eye(2)[None]
    sum_of_squares(torch.randn(1, 4, positions, 3), torch.randn(1, 4, positions, 2), *eye)
    assert turned == ([3, 2] if by_matrix else [positions, positions])


# -- closer to the Fisher than the product of the factors --------------------------------------------------------


@given(case=st.one_of(linear_cases(), conv_cases()), structure=st.sampled_from(MEASURED))
def test_it_is_at_least_as_near_to_the_fisher_as_the_factors(
    case: LayerCase, structure: tuple[Structure, Structure]
) -> None:
    module = case.module()
    x = case.input()
    loss = Loss(module(x).shape, case.examples)
    optimizer = KFACOptimizer(module, lr=0.0, inverse=EKFAC(), structure=structure, factor_update_period=1)
    loss(module(x)).backward()
    optimizer.step()
    optimizer.zero_grad()
    output = module(x)
    fisher = dense_fisher(gradients_of(module, loss.of_each(output)))
    loss(output).backward()
    fold(optimizer, case.examples)  # of the same batch: factors and basis are the same
    state = block(optimizer, "").state
    groups, outputs, inputs = state.shape
    a, g = (
        oracles.dense(factor, groups, dim)
        for factor, dim in zip(optimizer.factors()[""], (inputs, outputs), strict=True)
    )
    ours, theirs = (
        (fisher - approximation).flatten(1).norm(dim=1) for approximation in (curvature(state), oracles.kronecker(a, g))
    )
    assert (ours <= theirs * (1 + 1e-9) + 1e-12 * fisher.flatten(1).norm(dim=1)).all()


def test_where_inputs_and_gradients_depend_on_each_other_it_is_far_nearer() -> None:
    module = nn.Linear(3, 2, bias=False)
    optimizer = KFACOptimizer(module, lr=0.0, inverse=EKFAC(), factor_update_period=1)
    # Either kind of example has an input and an output of its own: the Fisher has rank 2, the product rank 4.
    x = torch.tensor([[1.0, 0, 0], [0, 1, 0]]).repeat(4, 1)
    weights = torch.tensor([[2.0, 0], [0, 1]]).repeat(4, 1)
    for _ in range(2):
        optimizer.zero_grad()
        output = module(x)
        fisher = dense_fisher(gradients_of(module, iter((output * weights).sum(1) / 8)))
        ((output * weights).sum() / 8).backward()
        optimizer.step()
    state = block(optimizer, "").state
    theirs = oracles.kronecker(*optimizer.factors()[""])
    assert float((fisher - curvature(state)).norm()) < 1e-12 < 0.1 * float((fisher - theirs).norm())


# -- the step ----------------------------------------------------------------------------------------------------


@given(
    case=st.one_of(linear_cases(), conv_cases()),
    structure=st.sampled_from(cases.STRUCTURES),
    damping=st.sampled_from([1e-3, 0.1, 10.0]),
)
def test_the_step_solves_the_damped_system(
    case: LayerCase, structure: tuple[Structure, Structure], damping: float
) -> None:
    module = case.module()
    optimizer = free_optimizer(module, structure=structure, damping=damping)
    for _ in range(2):
        optimizer.zero_grad()
        before = snapshot(module)
        any_loss(module(case.input())).backward()
        optimizer.step()
        grad = oracles.gradient_matrix(module)
        difference = displacement(module, before) - solution(block(optimizer, "").state, grad, damping)
        # Displacements are differences of parameters, exact to rounding of the parameters only.
        largest = max(float(tensor.abs().max()) for tensor in before.values())
        assert float(difference.abs().max()) < 1e-9 * float(grad.abs().max()) / damping + 1e-12 * (1 + largest)


def test_the_damping_of_each_step_counts_between_refreshes() -> None:
    module = nn.Linear(3, 2)
    optimizer = free_optimizer(module, factor_update_period=100, inverse_update_period=100)
    for damping in (0.1, 3.0, 1e-3):
        optimizer.param_groups[0]["damping"] = damping
        optimizer.zero_grad()
        before = snapshot(module)
        any_loss(module(torch.randn(5, 3))).backward()
        optimizer.step()
        expected = solution(block(optimizer, "").state, oracles.gradient_matrix(module), damping)
        assert_same(displacement(module, before), expected, rtol=1e-8)
    assert optimizer.metrics()["inverse_age"] == 2


def test_between_refreshes_the_second_moments_change_and_the_basis_does_not() -> None:
    module = nn.Linear(3, 2)
    optimizer = free_optimizer(module, inverse_update_period=1000)
    kept: list[tuple[Tensor, ...]] = []
    for _ in range(9):
        optimizer.zero_grad()
        any_loss(module(torch.randn(5, 3))).backward()
        optimizer.step()
        state = block(optimizer, "").state
        kept.append((*bases(state), state.second_moments.clone()))
    # Steps 5 and 6 have no refresh, see test_cholesky.
    assert torch.equal(kept[5][0], kept[6][0])
    assert torch.equal(kept[5][1], kept[6][1])
    assert not torch.allclose(kept[5][2], kept[6][2])


@identity_structures
def test_beside_an_identity_it_is_eigen_with_eigenvalues_of_every_statistics_step(
    structure: tuple[Structure, Structure],
) -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(5, 3), structure=structure)
    grad = torch.randn(1, 2, 4)
    eigen = Eigen()
    theirs = eigen.init(block(optimizer, "").spec, dtype=torch.float64, device=CPU)
    for terms in (5, 7):
        theirs.pair.load(state.pair.tensors())
        if terms == 5:
            eigen.refresh([theirs], [0.1])
            assert_same(EKFAC().apply(state, grad, 0.1), eigen.apply(theirs, grad, 0.1), rtol=1e-8)
        before = bases(state)
        any_loss(module(torch.randn(terms, 3))).backward()
        fold(optimizer, terms)
    assert_same(bases(state), before, rtol=0)
    a, g = (oracles.dense(factor, 1, dim) for factor, dim in zip(state.factors(), (4, 2), strict=True))
    assert_same(state.second_moments, in_basis(oracles.kronecker(a, g), state), rtol=1e-8)


@every_structure
@given(damping=st.floats(1e-30, 1e30))
def test_before_any_refresh_the_gradient_comes_back(structure: tuple[Structure, Structure], damping: float) -> None:
    module = nn.Conv1d(4, 6, 1, groups=2)
    optimizer = KFACOptimizer(module, inverse=EKFAC(), structure=structure)
    any_loss(module(torch.randn(3, 4, 2))).backward()
    fold(optimizer, 3)
    grad = torch.randn(2, 3, 3)
    assert_same(EKFAC().apply(block(optimizer, "").state, grad, damping), grad, rtol=0)


def test_without_accepted_statistics_a_refresh_changes_nothing() -> None:
    inverse = EKFAC()
    state = inverse.init(LayerSpec("layer", ("weight",), 4, 3, groups=2), dtype=torch.float64, device=CPU)
    inverse.refresh([state], [0.1])
    grad = torch.randn(2, 3, 4)
    assert_same(inverse.apply(state, grad, 0.1), grad, rtol=0)


def test_applying_waits_for_no_number_from_the_device() -> None:
    # A tensor on the meta device has no numbers to wait for: reading one raises.
    inverse = EKFAC()
    spec = LayerSpec("layer", ("weight",), 4, 3, groups=2)
    state = inverse.init(spec, dtype=torch.float32, device=torch.device("meta"))
    assert inverse.apply(state, torch.empty(2, 3, 4, device="meta"), 0.1).shape == (2, 3, 4)


# -- the running average, and the basis that changes under it ----------------------------------------------------


def eigenvalue_product(state: EKFACState) -> Tensor:
    return state.g.values.unsqueeze(-1) * state.a.values.unsqueeze(-2)


@measured_structures
def test_until_there_is_a_sample_it_is_the_product_of_the_eigenvalues(structure: tuple[Structure, Structure]) -> None:
    module = nn.Conv1d(4, 6, 2, groups=2)
    _, state = watched(module, torch.randn(3, 4, 5), structure=structure)
    assert_same(state.second_moments, eigenvalue_product(state))
    assert float(state.scales.mass) == 0


def test_it_is_an_average_that_weighs_loss_terms_and_forgets() -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(5, 3))
    samples = []
    for terms, decay in ((4, 1.0), (6, 0.5), (2, 0.25)):
        output = module(torch.randn(terms, 3))
        loss = Loss(output.shape, terms)
        samples.append(in_basis(dense_fisher(gradients_of(module, loss.of_each(output))), state))
        loss(output).backward()
        fold(optimizer, terms, decay)
    weights = torch.tensor([4 * 0.125, 6 * 0.25, 2.0])
    expected = sum(weight * sample for weight, sample in zip(weights, samples, strict=True)) / weights.sum()
    assert_same(state.second_moments, expected, rtol=1e-8)
    assert_same(state.scales.mass, weights.sum())


def test_equal_micro_batches_give_what_the_whole_batch_gives() -> None:
    module = nn.Linear(3, 2)
    x, weights, first = torch.randn(8, 3), torch.randn(8, 2), torch.randn(5, 3)
    found = []
    for parts in (1, 4):
        torch.manual_seed(5)
        optimizer, state = watched(module, first)
        for rows, right in zip(x.chunk(parts), weights.chunk(parts), strict=True):
            output = module(rows)
            ((output * right + output.square()).sum() / len(rows) / parts).backward()
        fold(optimizer, 8)
        found.append(state.second_moments.clone())
    assert_same(found[1], found[0])


def test_a_step_in_which_the_device_found_no_row_is_no_sample() -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(5, 3))
    any_loss(module(torch.randn(6, 3))).backward()
    fold(optimizer, 6)
    before = state.second_moments.clone()
    for rows, mass in ((torch.tensor(0), 3.0), (torch.tensor([0, 2]), 7.5)):
        any_loss(module(torch.randn(6, 3))).backward()
        state.pair.rows = rows if rows.dim() == 0 else rows.sum()
        fold(optimizer, 6, decay=0.5)
        assert float(state.scales.mass) == mass
        assert torch.equal(state.second_moments, before) == (mass == 3.0)


def test_a_loss_scale_is_divided_out() -> None:
    module = nn.Linear(3, 2)
    x, first = torch.randn(6, 3), torch.randn(5, 3)
    found = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(5)
        optimizer, state = watched(module, first)
        torch.manual_seed(6)
        (any_loss(module(x)) * scale).backward()
        fold(optimizer, 6, loss_scale=scale)
        found.append(state.second_moments.clone())
    assert_same(found[1], found[0])


@measured_structures
def test_a_new_basis_takes_over_the_diagonal_that_the_old_curvature_has_in_it(
    structure: tuple[Structure, Structure],
) -> None:
    module = nn.Conv1d(4, 6, 2, groups=2)
    optimizer, state = watched(module, torch.randn(3, 4, 5), structure=structure)
    any_loss(module(torch.randn(6, 4, 5))).backward()
    fold(optimizer, 6, decay=0.5)
    before, mass, old = curvature(state), state.scales.mass.clone(), bases(state)
    EKFAC().refresh([state], [0.1])
    if DENSE in structure:
        assert max(float((new - was).abs().max()) for new, was in zip(bases(state), old, strict=True)) > 0.1
    assert_same(state.second_moments, in_basis(before, state), rtol=1e-8)
    assert_same(state.second_moments.sum((1, 2)), before.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-8)
    assert (state.second_moments >= 0).all()
    assert_same(state.scales.mass, mass, rtol=0)


def test_eigenvectors_that_change_place_and_sign_keep_their_second_moments() -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(5, 3))
    any_loss(module(torch.randn(6, 3))).backward()
    fold(optimizer, 6)
    before = state.second_moments.clone()
    place, sign = torch.tensor([2, 0, 3, 1]), torch.tensor([1.0, -1, -1, 1])
    old = state.standing()
    state.a.basis.copy_(state.a.basis[..., place] * sign)
    state.carry_over(old)
    assert_same(state.second_moments, before[..., place])


# -- several backwards through one forward -----------------------------------------------------------------------


def test_two_backwards_through_a_call_whose_input_was_kept_count_as_their_sum() -> None:
    module = nn.Embedding(5, 3)
    optimizer, state = watched(module, torch.randint(5, (4, 2)))
    output = module(torch.randint(5, (6, 2)))
    one, two = Loss(output.shape, 6), Loss(output.shape, 6)
    gradients = [
        torch.autograd.grad(left + right, module.weight, retain_graph=True)[0].mT[None]
        for left, right in zip(one.of_each(output), two.of_each(output), strict=True)
    ]
    one(output).backward(retain_graph=True)
    two(output).backward()
    fold(optimizer, 6)
    assert_same(state.second_moments, in_basis(dense_fisher(gradients), state), rtol=1e-8)
    assert int(state.substituted) == 0


def test_rows_that_only_a_later_backward_reaches_are_counted() -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(4, 5, 3))
    output = module(torch.randn(4, 5, 3))
    mask = torch.ones_like(output)
    mask[:, 3:] = 0
    one, two = Loss(output.shape, 4, mask), Loss(output.shape, 4)
    gradients = gradients_of(
        module, (left + right for left, right in zip(one.of_each(output), two.of_each(output), strict=True))
    )
    one(output).backward(retain_graph=True)
    two(output).backward()
    fold(optimizer, 4)
    assert_same(state.second_moments, in_basis(dense_fisher(gradients), state), rtol=1e-8)


class Positions(nn.Module):
    """A matrix for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nti,tio->nto", x, self.weight)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (lambda: nn.Linear(3, 2), {"weight_sharing": WeightSharing.EXPAND}),
        (lambda: nn.Linear(3, 2), {"weight_sharing": WeightSharing.REDUCE}),
        (Positions, {"subsample": Subsample(examples=3)}),
    ],
    ids=["expand", "reduce", "drawn rows of groups"],
)
def test_two_backwards_whose_rows_differ_give_what_one_of_the_sum_gives(
    build: Callable[[], nn.Module], options: dict[str, object]
) -> None:
    module, first, x = build(), torch.randn(4, 5, 3), torch.randn(4, 5, 3)
    mask = torch.ones(4, 5, 2)
    mask[:, 3:], mask[2] = 0, 0
    one, two = Loss(mask.shape, 4, mask), Loss(mask.shape, 4)
    found = []
    for apart in (False, True):
        torch.manual_seed(5)
        optimizer, state = watched(module, first, **options)
        output = module(x)
        if apart:
            one(output).backward(retain_graph=True)
            two(output).backward()
        else:
            (one(output) + two(output)).backward()
        fold(optimizer, 4)
        assert int(state.substituted) == 0
        found.append(state.second_moments.clone())
    assert_same(found[1], found[0])


def test_what_rounding_leaves_below_zero_is_zero() -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(4, 3))
    any_loss(module(torch.randn(6, 3))).backward()
    state.scales.pending[0, 3] = -1e-20
    fold(optimizer, 6)
    assert float(state.second_moments[0, 0, 3]) == 0


def test_statistics_of_ones_own_need_only_rows() -> None:
    inverse = EKFAC()
    state = inverse.init(LayerSpec("layer", ("weight",), 4, 3), dtype=torch.float64, device=CPU)
    a, g = torch.randn(1, 6, 2, 4), torch.randn(1, 6, 2, 3)
    state.accumulate(OwnStatistics(a, g))
    state.fold(6, 1.0)
    inverse.refresh([state], [0.1])
    state.accumulate(OwnStatistics(a, g))
    state.accumulate(OwnStatistics(a, torch.zeros_like(g), active=False))
    state.fold(6, 1.0)
    gradients = [right.mT @ left for left, right in zip(a[0], g[0], strict=True)]
    expected = in_basis(dense_fisher([gradient[None] for gradient in gradients]), state)
    assert_same(state.second_moments, expected, rtol=1e-8)


def test_tensors_load_into_another_state_which_keeps_what_it_accumulated() -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(4, 3))
    inverse = EKFAC()
    output = module(torch.randn(6, 3))
    any_loss(output).backward(retain_graph=True)
    any_loss(output).backward()
    fold(optimizer, 6)
    for number, counted in enumerate(state.counted().values()):
        counted.fill_(number + 1)
    _, other = watched(nn.Linear(3, 2), torch.randn(4, 3))
    other.scales.pending = torch.ones(1, 8)
    other.load(state.tensors())
    assert_identical(other.tensors(), state.tensors())
    assert_identical(other.counters(), state.counters())
    assert_identical(other.setbacks(), state.setbacks())
    assert torch.equal(other.scales.pending, torch.ones(1, 8))
    grad = torch.randn(1, 2, 4)
    direction = inverse.apply(state, grad, 0.1)
    state.second_moments.zero_()
    assert torch.equal(inverse.apply(other, grad, 0.1), direction)


def test_where_the_input_is_gone_the_factors_stand_in_for_the_step_and_it_is_counted() -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(4, 3))
    output = module(torch.randn(6, 3))
    any_loss(output).backward(retain_graph=True)
    any_loss(output).backward()
    any_loss(module(torch.randn(2, 3))).backward()
    fold(optimizer, 8, decay=0.5)
    expected = in_basis(oracles.kronecker(*state.factors()), state)
    assert_same(state.second_moments, expected, rtol=1e-8)
    assert (int(state.substituted), float(state.scales.mass)) == (1, 8)
    any_loss(module(torch.randn(2, 3))).backward()
    fold(optimizer, 2)
    assert (int(state.substituted), float(state.scales.mass)) == (1, 10)
    optimizer.step()
    assert optimizer.metrics()["substituted_statistics"] == 1


def test_what_was_dropped_is_not_counted() -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(4, 3))
    output = module(torch.randn(6, 3))
    any_loss(output).backward(retain_graph=True)
    any_loss(output).backward()
    state.discard()
    x = torch.randn(5, 3)
    output = module(x)
    loss = Loss(output.shape, 5)
    gradients = gradients_of(module, loss.of_each(output))
    loss(output).backward()
    fold(optimizer, 5)
    assert_same(state.second_moments, in_basis(dense_fisher(gradients), state), rtol=1e-8)
    assert int(state.substituted) == 0


# -- failures ----------------------------------------------------------------------------------------------------


def test_a_sample_that_is_not_finite_is_refused_and_counted_once() -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(4, 3))
    any_loss(module(torch.randn(5, 3))).backward()
    fold(optimizer, 5)
    before = state.second_moments.clone()
    x = torch.randn(5, 3)
    x[2, 1] = torch.inf
    (module(x) * torch.randn(5, 2)).sum().backward()
    fold(optimizer, 5, decay=0.5)
    assert_same(state.second_moments, before, rtol=0)
    counters = state.counters()
    assert (int(counters["refused_statistics"]), float(state.scales.mass)) == (1, 2.5)
    assert [int(number) for number in state.setbacks()] == [1, 0]


@pytest.mark.parametrize("terms", [torch.nan, 0.0, -3.0])
def test_an_impossible_number_of_loss_terms_is_refused(terms: float) -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(4, 3))
    before = state.second_moments.clone()
    any_loss(module(torch.randn(5, 3))).backward()
    fold(optimizer, torch.tensor(terms))
    assert_same(state.second_moments, before, rtol=0)
    assert (int(state.counters()["refused_statistics"]), float(state.scales.mass)) == (1, 0)
    any_loss(module(torch.randn(5, 3))).backward()
    fold(optimizer, torch.tensor(5.0))
    assert float(state.scales.mass) == 5


def test_squares_that_overflow_alone_are_refused_and_counted() -> None:
    module = nn.Linear(3, 2)
    optimizer, state = watched(module, torch.randn(4, 3))
    before = state.second_moments.clone()
    grad = torch.randn(5, 2)
    for times in (1, 2):
        (module(torch.randn(5, 3) * 1e100) * grad * 1e100).sum().backward()
        fold(optimizer, 5)
        assert state.pair.a.packed.isfinite().all()
        assert_same(state.second_moments, before, rtol=0)
        assert int(state.counters()["refused_statistics"]) == times
        assert [int(number) for number in state.setbacks()] == [times, 0]
    any_loss(module(torch.randn(5, 3))).backward()
    fold(optimizer, 5)
    assert [int(number) for number in state.setbacks()] == [0, 0]
    assert not torch.allclose(state.second_moments, before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_hopeless_factor_keeps_basis_and_second_moments_of_its_group_only(value: float) -> None:
    module = nn.Conv1d(4, 6, 2, groups=2)
    optimizer, state = watched(module, torch.randn(3, 4, 5))
    any_loss(module(torch.randn(6, 4, 5))).backward()
    fold(optimizer, 6)
    old, before = bases(state), curvature(state)
    for factor in (state.pair.a, state.pair.g):
        with edited(factor) as average:
            average[1, 0, 0] = value
    EKFAC().refresh([state], [0.1])
    assert_same([basis[1] for basis in bases(state)], [basis[1] for basis in old], rtol=0)
    assert not torch.allclose(bases(state)[0][0], old[0][0])
    assert_same(state.second_moments, in_basis(before, state), rtol=1e-8)
    assert int(state.counters()["failed_refreshes"]) == 2
    grad = torch.randn(2, 3, 5)
    assert_same(EKFAC().apply(state, grad, 0.1), solution(state, grad, 0.1), rtol=1e-8)


def test_a_group_that_was_never_decomposed_gives_the_gradient_back() -> None:
    module = nn.Conv1d(4, 6, 2, groups=2)
    optimizer = KFACOptimizer(module, inverse=EKFAC())
    any_loss(module(torch.randn(3, 4, 5))).backward()
    fold(optimizer, 3)
    state = block(optimizer, "").state
    for factor in (state.pair.a, state.pair.g):
        with edited(factor) as average:
            average[0] = torch.nan
    EKFAC().refresh([state], [0.1])
    grad = torch.randn(2, 3, 5)
    assert_same(EKFAC().apply(state, grad, 0.1)[0], grad[0], rtol=0)
    expected = solution(state, grad, 0.1)[1]
    assert_same(EKFAC().apply(state, grad, 0.1)[1], expected, rtol=1e-8)


# -- with the optimizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise(dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Module, KFACOptimizer]:
        model = mlp(dtype=dtype, sizes=(4, 5, 5, 3))
        structure = {"0": (DENSE, DIAGONAL), "2": (DENSE, DENSE), "4": (IDENTITY, DENSE)}
        return model, KFACOptimizer(
            model, lr=0.1, inverse=EKFAC(), structure=structure, inverse_update_period=4, factor_update_period=1
        )

    assert_resumes_bitwise(make, steps=9, saved=6)  # between refreshes


def test_a_checkpoint_of_another_representation_is_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"S of '0' is missing, here \[1, 25\]"):
        KFACOptimizer(model, inverse=EKFAC()).load_state_dict(KFACOptimizer(model, inverse=Eigen()).state_dict())


def test_under_a_grad_scaler_the_trajectory_is_the_same() -> None:
    def run(scaler: GradScaler) -> list[Tensor]:
        model = mlp()
        optimizer = KFACOptimizer(model, lr=0.1, inverse=EKFAC(), inverse_update_period=4, factor_update_period=1)
        for i in range(8):
            optimizer.zero_grad()
            scaler.scale(square_loss(model(batch(100 + i)))).backward()
            scaler.step(optimizer)
            scaler.update()
        return clones(model.parameters())

    # A power of two divides out without rounding.
    assert_same(run(GradScaler("cpu", init_scale=2.0**10)), run(GradScaler("cpu", enabled=False)), rtol=1e-12)


def test_representations_are_chosen_layer_by_layer() -> None:
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(1, 4, 3))
    model.add_module("flat", nn.Flatten())
    model.add_module("head", nn.Linear(16, 3))
    optimizer = KFACOptimizer(
        model,
        lr=0.1,
        inverse={"head": EKFAC(), nn.Conv2d: Eigen()},
        factor_update_period=1,
        inverse_update_period=10,
    )
    x, y = torch.randn(8, 1, 4, 4), torch.randint(3, (8,))
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    names = {each.name: each.inverse for each in optimizer.summary().blocks}
    assert names == {"conv": "Eigen()", "head": "EKFAC(per_example=True)"}


def test_every_layer_of_a_model_solves_its_own_system() -> None:
    # Equal shapes are decomposed in one batch, across layers and groups: none may take another's.
    model = look_alikes()
    optimizer = free_optimizer(model, damping=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        before = snapshot(model)
        any_loss(model(torch.randn(6, 4, 3))).backward()
        optimizer.step()
    for name in optimizer.factors():
        layer = model.get_submodule(name)
        local = {key.removeprefix(f"{name}."): value for key, value in before.items() if key.startswith(f"{name}.")}
        expected = solution(block(optimizer, name).state, oracles.gradient_matrix(layer), 0.1)
        assert_same(displacement(layer, local), expected, rtol=1e-7)


def test_narrow_factors_have_second_moments_in_float32() -> None:
    module = nn.Linear(3, 2, dtype=torch.float32)
    optimizer = KFACOptimizer(module, lr=0.0, inverse=EKFAC(), factor_dtype=torch.bfloat16, factor_update_period=1)
    for _ in range(3):
        optimizer.zero_grad()
        any_loss(module(torch.randn(5, 3, dtype=torch.float32))).backward()
        optimizer.step()
    state = block(optimizer, "").state
    assert state.second_moments.dtype == torch.float32
    assert state.pair.a.dtype == torch.bfloat16


def test_a_refresh_costs_decompositions_overlaps_and_what_carries_over() -> None:
    def cost(structure: tuple[Structure, Structure]) -> tuple[float, float]:
        return EKFAC().flops(LayerSpec("layer", ("weight",), 4, 3, groups=2, structure=structure))

    rotations = 2 * 4 * (3 * 4 * 4 + 3 * 3 * 4)
    assert cost((DENSE, DENSE)) == (2 * 27 * (4**3 + 3**3) + rotations / 2, rotations)
    assert cost((DENSE, DIAGONAL)) == (2 * 27 * 4**3 + 2 * 2 * 3 * 4 * 4, 2 * 4 * 3 * 4 * 4)


def test_per_example_is_a_flag() -> None:
    wrong: Callable[..., EKFAC] = EKFAC
    with pytest.raises(TypeError, match="per_example of EKFAC must be True or False, got 1"):
        wrong(per_example=1)
