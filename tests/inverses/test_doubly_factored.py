import copy
from collections.abc import Callable

import pytest
import torch
from helpers import oracles
from helpers.cases import any_loss, displacement, free_optimizer, snapshot
from helpers.oracles import assert_same
from helpers.plain import assert_identical, batch, block, clones, edited, mlp, square_loss, train
from helpers.states import CPU, assert_resumes_bitwise
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from kfac_optim import Cholesky, DoublyFactored, ExactGGN, KFACOptimizer, LayerSpec, Structure, WeightSharing
from kfac_optim.inverses import doubly_factored_state
from kfac_optim.inverses.doubly_factored_state import DoublyFactoredState

pytestmark = pytest.mark.usefixtures("float64")

DENSE, DIAGONAL, IDENTITY = Structure
dampings = st.sampled_from([1e-3, 0.1, 10.0])
dims = st.integers(1, 4)


# -- definitions, written without the library --------------------------------------------------------------------


def parts_of(maps: Tensor) -> tuple[Tensor, Tensor]:
    """`E[ΨΨᵀ]` `[C, C]` and `E[KKᵀ]` `[T, T]` of the examples `[n, C·T as (C, T)]`, by torch's decomposition."""
    psi_sum, k_sum = torch.zeros(maps.shape[1], maps.shape[1]), torch.zeros(maps.shape[2], maps.shape[2])
    for example in maps:
        u, sigma, vh = torch.linalg.svd(example.T, full_matrices=False)  # T × C
        k, psi = sigma[0].sqrt() * u[:, 0], sigma[0].sqrt() * vh[0]
        psi_sum += torch.outer(psi, psi) / len(maps)
        k_sum += torch.outer(k, k) / len(maps)
    return psi_sum, k_sum


def three_way(psi: Tensor, k: Tensor, g: Tensor, damping: float) -> Tensor:
    """`G ⊗ Ψ ⊗ K` of the weight `[out·C·T, out·C·T]`, each damped by its share.

    Matrices share λ in proportion to their mean eigenvalues; a scalar only multiplies.
    """
    factors = [psi, k, g]
    scalars = [factor for factor in factors if len(factor) == 1]
    scale = torch.stack([factor[0, 0] for factor in scalars]).prod() if scalars else torch.ones(())
    matrices = [i for i, factor in enumerate(factors) if len(factor) > 1]
    if not matrices:
        return (scale + damping).view(1, 1)
    means = {i: factors[i].trace() / len(factors[i]) for i in matrices}
    # The scalars belong to the product as a whole: dealt out evenly they change no proportion that matters.
    even = scale ** (1 / len(matrices))
    geometric = torch.stack([means[i] * even for i in matrices]).prod() ** (1 / len(matrices))
    damped = [torch.ones(1, 1)] * 3
    for i in matrices:
        share = damping ** (1 / len(matrices)) * means[i] * even / geometric
        damped[i] = factors[i] * even + share * torch.eye(len(factors[i]))
    return torch.kron(torch.kron(damped[2], damped[0]), damped[1])


def expected_step(layer: nn.Linear, psi: Tensor, k: Tensor, g: Tensor, damping: float) -> Tensor:
    """`[1, out, in]`, by dense solves."""
    columns = len(psi) * len(k)
    grad = oracles.gradient_matrix(layer)
    weight = torch.linalg.solve(three_way(psi, k, g, damping), grad[..., :columns].flatten())
    bias = torch.linalg.solve(g + damping * torch.eye(len(g)), grad[0, :, columns:])
    return torch.cat([weight.view(1, len(g), columns), bias[None]], dim=-1)


# -- the step, through the optimizer -----------------------------------------------------------------------------


@given(c=dims, t=dims, outputs=dims, examples=dims, bias=st.booleans(), damping=dampings)
def test_the_step_solves_the_damped_three_factor_system(
    c: int, t: int, outputs: int, examples: int, bias: bool, damping: float
) -> None:
    layer, rows = nn.Linear(c * t, outputs, bias=bias), torch.randn(examples, c * t)
    optimizer = free_optimizer(layer, inverse=DoublyFactored(c), damping=damping)
    before = snapshot(layer)
    output = layer(rows)
    output.retain_grad()
    any_loss(output).backward()
    optimizer.step()
    g = examples * output.grad.T @ output.grad
    psi, k = parts_of(rows.view(examples, c, t))
    difference = displacement(layer, before) - expected_step(layer, psi, k, g, damping)
    grad = oracles.gradient_matrix(layer)
    assert float(difference.abs().max()) < 1e-7 * float(grad.abs().max()) / damping + 1e-12
    diagonal = torch.kron(psi.diagonal(), k.diagonal())
    assert_same(optimizer.factors()[""][0], torch.cat([diagonal, torch.ones(int(bias))])[None], rtol=1e-8)
    assert_same(optimizer.factors()[""][1], g[None])


def test_the_inputs_are_laid_out_as_flattening_a_feature_map_does() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 2 * 4, 2))
    optimizer = KFACOptimizer(model, lr=0.0, inverse=DoublyFactored(3))
    channels, picture = torch.randn(3), torch.randn(2, 4)
    maps = channels.view(3, 1, 1) * picture
    any_loss(model(maps.expand(5, 3, 2, 4))).backward()
    optimizer.step()
    factors = block(optimizer, "1").state.by_name
    norms = channels.norm(), picture.norm()
    assert_same(factors["channels"].average[0], torch.outer(channels, channels) * norms[1] / norms[0])
    assert_same(factors["positions"].average[0], torch.outer(picture.ravel(), picture.ravel()) * norms[0] / norms[1])


@given(c=dims, t=dims, examples=dims, shared_positions=st.booleans())
def test_it_is_exact_for_maps_of_rank_one_of_equal_norms_that_share_a_side(
    c: int, t: int, examples: int, shared_positions: bool
) -> None:
    psi, k = torch.randn(examples, c), torch.randn(examples, t)
    if shared_positions:
        k = k[:1].expand(examples, t)
    else:
        psi = psi[:1].expand(examples, c)
    maps = nn.functional.normalize(psi).unsqueeze(2) * nn.functional.normalize(k).unsqueeze(1) * 3
    state = state_of(c, t, 2, maps.flatten(1))
    exact = maps.flatten(1).T @ maps.flatten(1) / examples
    factors = state.by_name
    assert_same(torch.kron(factors["channels"].average[0], factors["positions"].average[0]), exact)


def test_the_factors_are_averages_weighed_by_examples() -> None:
    layer = nn.Linear(6, 2)
    optimizer = KFACOptimizer(layer, lr=0.0, inverse=DoublyFactored(2), factor_decay=0.5, factor_update_period=1)
    batches = [torch.randn(3, 6), torch.randn(8, 6)]
    for rows in batches:
        layer.zero_grad()
        any_loss(layer(rows)).backward()
        optimizer.step()
    older, newer = (parts_of(rows.view(-1, 2, 3)) for rows in batches)
    for name, old, new in zip(("channels", "positions"), older, newer, strict=True):
        assert_same(block(optimizer, "").state.by_name[name].average[0], (1.5 * old + 8 * new) / 9.5)


@pytest.mark.parametrize("on_device", [False, True])
def test_examples_without_a_gradient_are_not_counted_whatever_they_hold(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        as_on_an_accelerator(monkeypatch)
    layer, rows = nn.Linear(6, 2), torch.randn(5, 6)
    hostile = rows.clone()
    hostile[1:3] = torch.nan
    weights = torch.tensor([1.0, 0, 0, 2, 3])
    optimizer = KFACOptimizer(layer, lr=0.0, inverse=DoublyFactored(2))
    output = layer(hostile)
    output.retain_grad()
    torch.where(weights[:, None] > 0, weights[:, None] * output, 0).sum().backward()
    for param in layer.parameters():  # 0 · NaN
        param.grad = torch.zeros_like(param)
    optimizer.step()
    factors = block(optimizer, "").state.by_name
    psi, k = parts_of(rows[weights > 0].view(3, 2, 3))
    assert_same([factors["channels"].average[0], factors["positions"].average[0]], [psi, k])
    assert_same(factors["G"].average[0], 5 * output.grad.T @ output.grad)
    assert float(factors["channels"].mass) == 3


@pytest.mark.parametrize("wrapped", [lambda layer: layer, weight_norm])
def test_an_example_counts_once_for_each_column_of_the_loss_however_many_of_its_outputs_are_observed(
    wrapped: Callable[[nn.Module], nn.Module],
) -> None:
    layer, criterion = wrapped(nn.Linear(6, 2)), nn.MSELoss(reduction="sum")
    optimizer = KFACOptimizer(layer, lr=0.0, inverse=DoublyFactored(2), estimate=ExactGGN(criterion))
    rows, observed = torch.randn(5, 6), torch.ones(5, 2)
    observed[:3, 1] = 0
    criterion(layer(rows) * observed, torch.ones(5, 2)).backward()
    optimizer.step()
    factors = block(optimizer, "").state.by_name
    for name, expected in zip(("channels", "positions"), parts_of(rows.view(5, 2, 3)), strict=True):
        assert_same(factors[name].average[0], expected)


def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let numbers on the CPU be such that would have to be waited for."""
    monkeypatch.setattr("kfac_optim.factors.row_statistics.on_host", lambda _: False)
    monkeypatch.setattr("kfac_optim.factors.second_moments.on_host", lambda _: False)
    monkeypatch.setattr(doubly_factored_state, "on_host", lambda _: False)


def test_a_step_in_which_the_device_finds_no_example_leaves_the_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_an_accelerator(monkeypatch)
    layer = nn.Linear(6, 2)
    optimizer = KFACOptimizer(layer, lr=0.0, inverse=DoublyFactored(2), factor_update_period=1)
    averages = []
    for factor in (1.0, 0.0):
        layer.zero_grad()
        (factor * any_loss(layer(torch.randn(5, 6)))).backward()
        optimizer.step()
        averages.append([f.average for f in block(optimizer, "").state.by_name.values()])
    assert_identical(averages[1], averages[0])
    assert averages[0][0].any()


def test_several_backwards_through_one_forward_count_as_one_of_their_sum() -> None:
    layer, rows = nn.Linear(6, 2), torch.randn(5, 6)
    # The second reaches one example more, and none that the first reached is counted twice.
    weights = torch.tensor([[1.0, 2, 0, 0, 0], [0, 1, 3, 4, 0]]).unsqueeze(-1)
    results = []
    for passes in (weights, weights.sum(0, keepdim=True)):
        optimizer = KFACOptimizer(layer, lr=0.0, inverse=DoublyFactored(2))
        layer.zero_grad()
        output = layer(rows)
        for weight in passes:
            (weight * output).sum().backward(retain_graph=True)
        optimizer.step()
        results.append(block(optimizer, "").state.by_name)
        optimizer.remove_hooks()
    for name, factor in results[0].items():
        assert_same(factor.average, results[1][name].average)
        assert_same(factor.mass, results[1][name].mass)
    assert_same(results[0]["channels"].average[0], parts_of(rows[:4].view(4, 2, 3))[0])


def test_a_layer_called_twice_averages_the_examples_of_both_calls() -> None:
    layer, rows = nn.Linear(6, 6), torch.randn(5, 6)
    optimizer = KFACOptimizer(layer, lr=0.0, inverse=DoublyFactored(2))
    first = layer(rows)
    any_loss(layer(first)).backward()
    optimizer.step()
    both = torch.cat([rows, first.detach()])
    assert_same(block(optimizer, "").state.by_name["positions"].average[0], parts_of(both.view(10, 2, 3))[1])


def test_reduced_positions_count_as_their_mean() -> None:
    layer, rows = nn.Linear(6, 2), torch.randn(5, 4, 6)
    optimizer = KFACOptimizer(layer, lr=0.0, inverse=DoublyFactored(2), weight_sharing=WeightSharing.REDUCE)
    any_loss(layer(rows)).backward()
    optimizer.step()
    psi, _ = parts_of(rows.mean(1).view(5, 2, 3))
    assert_same(block(optimizer, "").state.by_name["channels"].average[0], psi)


def conv_net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).to(
        dtype
    )


BY_LAYER = {"4": DoublyFactored(3), "1": Cholesky()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise(dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Module, KFACOptimizer]:
        model = conv_net(dtype)
        return model, KFACOptimizer(model, lr=0.1, inverse=BY_LAYER, inverse_update_period=4, factor_update_period=1)

    assert_resumes_bitwise(make, steps=9, saved=6)  # between refreshes


def test_a_checkpoint_of_other_channels_or_another_representation_is_refused() -> None:
    model = nn.Linear(6, 2)
    optimizer = KFACOptimizer(model, inverse=DoublyFactored(2))
    for inverse, message in (
        (DoublyFactored(3), r"factors\.channels\.average of '' is \[1, 6\], here \[1, 3\]"),
        (Cholesky(), r"factors\.channels\.average of '' is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(KFACOptimizer(model, inverse=inverse).state_dict())


def test_a_grad_scaler_drives_the_run_without_it() -> None:
    model, twin = conv_net(), conv_net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer, reference = (
        KFACOptimizer(m, lr=0.1, momentum=0.9, inverse=BY_LAYER, factor_update_period=1) for m in (model, twin)
    )
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale(square_loss(model(batch(100 + i)))).backward()
        scaler.step(optimizer)
        scaler.update()
    train(twin, reference, 4)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e200])
def test_statistics_that_are_not_finite_are_refused(value: float) -> None:
    layer = nn.Linear(4, 3)
    optimizer = KFACOptimizer(layer, lr=0.1, inverse=DoublyFactored(2), inverse_update_period=1, factor_update_period=1)
    train(layer, optimizer, 2)
    before = optimizer.factors()[""]
    rows = batch()
    rows[0, 0] = value
    output = layer(rows)
    # What is finite in the input is not so in the square of the gradient.
    (output * (value if value == 1e200 else 1.0)).sum().backward()
    layer.zero_grad()
    optimizer.step()
    assert_same(optimizer.factors()[""], before, rtol=0)
    assert optimizer.metrics()["refused_statistics"] == 1
    assert optimizer.metrics()["failed_refreshes"] == 0
    train(layer, optimizer, 1)
    assert optimizer.metrics()["refused_statistics"] == 1
    assert int(block(optimizer, "").state.refused_in_a_row) == 0


@pytest.mark.parametrize("terms", [0.0, -1.0, torch.nan, torch.inf])
def test_an_impossible_number_of_loss_terms_is_refused_like_sums_that_are_not_finite(terms: float) -> None:
    state = measured_state()
    before = clones(averages(state))
    for factor in state.by_name.values():
        factor.add(torch.ones_like(factor.average))
    state.rows = 5
    state.fold(torch.tensor(terms), 1.0)
    assert_same(averages(state), before, rtol=0)
    assert int(state.refused) == 1


def test_a_model_moved_to_another_dtype_takes_its_statistics_along() -> None:
    layer = nn.Linear(4, 3)
    optimizer = KFACOptimizer(
        layer, lr=0.1, inverse=DoublyFactored(2), inverse_update_period=100, factor_update_period=1
    )
    train(layer, optimizer, 2)
    before = optimizer.factors()[""]
    layer.float()
    layer.zero_grad()
    optimizer.step()
    assert_same(optimizer.factors()[""], [factor.float() for factor in before], rtol=1e-6)
    train(layer, optimizer, 1)


# -- layers that it does not fit ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "options", "reason"),
    [
        (nn.Linear(7, 3), {}, r"\(7 inputs and a bias, 3 outputs\): the inputs are no multiple of 2 channels"),
        (nn.Linear(5, 3, bias=False), {}, r"\(5 inputs, 3 outputs\): the inputs are no multiple"),
        (
            nn.Linear(6, 3),
            {"max_factor_dim": 2},
            r"A and G are diagonal and diagonal, not dense \(raise max",
        ),
        (nn.Linear(6, 3), {"structure": (DENSE, IDENTITY)}, "A and G are dense and identity, not dense"),
        (nn.Embedding(6, 3), {}, "A and G are diagonal and dense, not dense"),
        (nn.Conv1d(8, 4, 1, groups=2), {}, "it has 2 groups"),
    ],
)
def test_a_layer_of_another_form_is_refused_with_the_remedy(
    layer: nn.Module, options: dict[str, object], reason: str
) -> None:
    model = nn.Sequential(layer)
    remedy = r"\. Name the layers that it fits, as in inverse={'classifier': DoublyFactored\(channels=2\)}"
    with pytest.raises(ValueError, match=rf"channels=2\) does not fit layer '0' .*{reason}.*{remedy}"):
        KFACOptimizer(model, inverse=DoublyFactored(2), **options)


def test_an_embedding_tied_to_it_is_refused() -> None:
    model = nn.ModuleDict({"head": nn.Linear(6, 8, bias=False), "tokens": nn.Embedding(8, 6)})
    model["tokens"].weight = model["head"].weight
    with pytest.raises(ValueError, match=r"'head' .*other layers multiply by the transpose of its weight"):
        KFACOptimizer(model, inverse=DoublyFactored(2), structure={"tokens": (DENSE, DENSE)})


@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 3), lambda: nn.Conv1d(4, 3, 1)], ids=["linear", "conv"])
def test_several_positions_are_refused_when_they_are_seen(build: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(build())
    optimizer = KFACOptimizer(model, inverse=DoublyFactored(2))
    with pytest.raises(ValueError, match=r"layer '0' \(4 inputs\) was called with 4\. .*WeightSharing\.REDUCE"):
        model(torch.randn(5, 4, 4)).sum().backward()
    del optimizer  # its hooks are held weakly


@pytest.mark.parametrize(
    ("channels", "error", "message"),
    [
        (0, ValueError, "channels of DoublyFactored must be at least 1, got 0"),
        (2.0, TypeError, r"channels of DoublyFactored must be an integer, got 2\.0"),
    ],
)
def test_bad_channels_are_refused(channels: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DoublyFactored(channels)


# -- the representation alone ------------------------------------------------------------------------------------


def spec(c: int, t: int, outputs: int, bias: bool = True) -> LayerSpec:
    return LayerSpec("layer", ("weight", "bias") if bias else ("weight",), c * t + int(bias), outputs)


def state_of(c: int, t: int, outputs: int, rows: Tensor) -> DoublyFactoredState:
    """What one step with the inputs `rows` leaves."""
    layer = nn.Linear(c * t, outputs)
    optimizer = KFACOptimizer(layer, lr=0.0, inverse=DoublyFactored(c))
    any_loss(layer(rows)).backward()
    optimizer.step()
    return block(optimizer, "").state


def measured_state(c: int = 2, t: int = 4, outputs: int = 3) -> DoublyFactoredState:
    """One whose averages have full rank, never refreshed."""
    inverse = DoublyFactored(c)
    state = inverse.init(spec(c, t, outputs), dtype=torch.float64, device=CPU)
    for factor in state.by_name.values():
        rows = torch.randn(20, factor.dim)
        factor.add((rows.T @ rows)[None])
    state.rows = 20
    state.fold(1, 1.0)
    return state


def averages(state: DoublyFactoredState) -> list[Tensor]:
    return [factor.average[0] for factor in state.by_name.values()]


def solved(state: DoublyFactoredState, grad: Tensor, damping: float) -> Tensor:
    """By dense solves, `[1, out, in]`."""
    psi, k, g = averages(state)
    columns = len(psi) * len(k)
    weight = torch.linalg.solve(three_way(psi, k, g, damping), grad[..., :columns].flatten())
    bias = torch.linalg.solve(g + damping * torch.eye(len(g)), grad[0, :, columns:])
    return torch.cat([weight.view(1, len(g), columns), bias[None]], dim=-1)


@given(shapes=st.lists(st.tuples(dims, dims, dims, st.floats(1e-3, 10)), min_size=1, max_size=4))
def test_blocks_refreshed_together_come_out_as_alone(shapes: list[tuple[int, int, int, float]]) -> None:
    states = [measured_state(*sizes) for *sizes, _ in shapes]
    DoublyFactored(1).refresh(states, [damping for *_, damping in shapes])
    for state, (c, t, outputs, damping) in zip(states, shapes, strict=True):
        grad = torch.randn(1, outputs, c * t + 1)
        assert_same(DoublyFactored(c).apply(state, grad, 7.0), solved(state, grad, damping), rtol=1e-8)


def test_before_any_refresh_and_without_statistics_the_gradient_comes_back() -> None:
    grad, inverse = torch.randn(1, 3, 9), DoublyFactored(2)
    assert_same(inverse.apply(measured_state(), grad, 0.1), grad, rtol=0)
    empty = inverse.init(spec(2, 4, 3), dtype=torch.float64, device=CPU)
    assert not empty.has_statistics()
    inverse.refresh([empty], [0.1])
    assert_same(inverse.apply(empty, grad, 0.1), grad, rtol=0)
    assert measured_state().has_statistics()


def test_a_failed_inversion_keeps_the_last_good_inverse_of_that_factor_only() -> None:
    inverse, broken, sound = DoublyFactored(2), measured_state(), measured_state()
    inverse.refresh([broken, sound], [0.1, 0.1])
    old = {name: kept.clone() for name, kept in broken.inverses.items()}
    for state in (broken, sound):
        state.by_name["channels"].packed.mul_(2)
    # Indefinite beyond repair, with the trace of a sound factor: damping stays what it was.
    with edited(broken.by_name["positions"]) as average:
        average[0] = torch.diag(torch.tensor([-5e4, 2e4, 2e4, 2e4]))
    for times in (1, 2):
        inverse.refresh([broken, sound], [0.1, 0.1])
        assert [int(state.failed) for state in (broken, sound)] == [times, 0]
        assert broken.setbacks()[1] == times
    assert_same(broken.inverses["positions"], old["positions"], rtol=0)
    assert not torch.allclose(broken.inverses["channels"], old["channels"])
    assert broken.conditions.isfinite().all()
    grad = torch.randn(1, 3, 9)
    assert_same(inverse.apply(sound, grad, 0.1), solved(sound, grad, 0.1), rtol=1e-8)
    with edited(broken.by_name["positions"]) as average:
        average[0] = torch.eye(4)
    inverse.refresh([broken], [0.1])
    assert broken.setbacks()[1] == 0


def test_a_slightly_indefinite_factor_is_inverted_with_a_larger_shift_and_counted() -> None:
    inverse, state = DoublyFactored(2), measured_state()
    with edited(state.by_name["G"]) as average:
        average[0] = torch.diag(torch.tensor([1.0, 2.0, -1e-2]))
    inverse.refresh([state], [1e-4])
    assert int(state.retried) == 1  # as the bias damps it, not as the weight does
    damped = state.by_name["G"].average + 1e-4 * 10**3 * torch.eye(3)
    assert_same(state.inverses["bias"], torch.linalg.inv(damped), rtol=1e-8)


def test_the_condition_numbers_are_of_the_damped_product_and_of_the_worse_g() -> None:
    inverse, state = DoublyFactored(2), measured_state()
    inverse.refresh([state], [0.5])
    damped = {name: torch.linalg.inv(kept[0]) for name, kept in state.inverses.items()}
    product = torch.kron(damped["channels"], damped["positions"])
    worse = max(torch.linalg.cond(damped[name], p=1) for name in ("G", "bias"))
    counters = state.counters()
    expected = [torch.linalg.cond(product, p=1), worse]
    assert_same([counters["condition_A"], counters["condition_G"]], expected, rtol=1e-8)
    theirs = Cholesky().init(spec(2, 4, 3), dtype=torch.float64, device=CPU)
    assert counters.keys() == theirs.counters().keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_factors_are_inverted_and_applied_in_float32(dtype: torch.dtype) -> None:
    layer = nn.Linear(6, 2, dtype=torch.float32)
    optimizer = KFACOptimizer(layer, lr=0.0, inverse=DoublyFactored(2), factor_dtype=dtype)
    any_loss(layer(torch.randn(7, 6, dtype=torch.float32))).backward()
    optimizer.step()
    held = block(optimizer, "").state
    assert {factor.dtype for factor in held.by_name.values()} == {dtype}
    grad = torch.randn(1, 2, 7, dtype=torch.float32)
    direction = DoublyFactored(2).apply(held, grad, 0.1)
    assert direction.dtype == torch.float32
    for factor in held.by_name.values():
        factor.packed = factor.packed.double()
    assert_same(direction.double(), solved(held, grad.double(), 1e-3), rtol=1e-3)


def test_applying_waits_for_no_number_from_the_device() -> None:
    inverse = DoublyFactored(2)
    state = inverse.init(spec(2, 4, 3), dtype=torch.float32, device=torch.device("meta"))
    assert inverse.apply(state, torch.empty(1, 3, 9, device="meta"), 0.1).shape == (1, 3, 9)


def test_tensors_load_into_another_state_bitwise_and_share_no_memory() -> None:
    inverse, saved, loaded = DoublyFactored(2), measured_state(), measured_state()
    inverse.refresh([saved], [0.1])
    loaded.load(saved.tensors())
    assert_identical(loaded.tensors(), saved.tensors())
    grad = torch.randn(1, 3, 9)
    direction = inverse.apply(saved, grad, 0.1)
    for tensor in (*saved.inverses.values(), *saved.counted().values(), *averages(saved)):
        tensor.zero_()
    assert torch.equal(inverse.apply(loaded, grad, 0.1), direction)
    assert (loaded.conditions > 1).all()


def test_discarded_sums_leave_no_trace() -> None:
    layer = nn.Linear(6, 2)
    optimizer = KFACOptimizer(layer, inverse=DoublyFactored(2))
    any_loss(layer(torch.randn(5, 6))).backward()
    held = block(optimizer, "")
    assert held.state.has_pending()
    held.discard()
    assert not held.state.has_pending()
    assert all(factor.pending is None for factor in held.state.by_name.values())


@pytest.mark.parametrize(("bias", "refresh", "apply"), [(True, 2**3 + 4**3 + 2 * 3**3, 450), (False, 99, 432)])
def test_it_costs_what_its_small_factors_do(bias: bool, refresh: float, apply: float) -> None:
    assert DoublyFactored(2).flops(spec(2, 4, 3, bias)) == (refresh, apply)


def test_its_state_is_small_where_that_of_the_whole_factor_is_not() -> None:
    layer = nn.Linear(2048, 4)
    summary = KFACOptimizer(layer, inverse=DoublyFactored(32)).summary()
    assert summary.blocks[0].inverse == "DoublyFactored(channels=32)"
    assert summary.blocks[0].state_bytes < 2 * 8 * (32**2 + 64**2 + 2 * 4**2) + 1000


def test_max_factor_dim_bounds_what_it_builds_and_not_the_inputs() -> None:
    """The rest of the layers is bound by what they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 4), nn.Linear(4, 24))
    options = {"inverse": {"0": DoublyFactored(4), "*": Cholesky()}}
    found = []
    for limit in (6, 1000):
        twin = copy.deepcopy(model)
        optimizer = KFACOptimizer(twin, lr=0.1, max_factor_dim=limit, **options)
        assert optimizer.summary().blocks[0].structure == (DENSE, DENSE)
        assert (optimizer.summary().blocks[1].structure == (DENSE, DENSE)) == (limit == 1000)
        square_loss(twin(batch(dim=24))).backward()
        optimizer.step()
        found.append(optimizer.factors()["0"])
    assert_identical(*found)
    with pytest.raises(ValueError, match=r"A and G are diagonal and dense, not dense \(raise max_factor_dim"):
        KFACOptimizer(model, max_factor_dim=5, **options)


def test_a_layer_wider_than_the_default_limit_takes_a_step() -> None:
    layer = nn.Linear(10_000, 2, dtype=torch.float32)
    optimizer = KFACOptimizer(layer, lr=0.1, inverse=DoublyFactored(100))
    layer(torch.randn(3, 10_000, dtype=torch.float32)).square().sum().backward()
    optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


def test_the_summary_shows_the_factors_that_there_are() -> None:
    summary = KFACOptimizer(nn.Linear(12, 5), inverse=DoublyFactored(3)).summary()
    assert summary.blocks[0].factor_dims == ((3, 4), (5,))
    cells = [cell.strip() for cell in str(summary).splitlines()[2].split("  ") if cell]
    assert cells[3:5] == ["3×3 ⊗ 4×4", "5×5"]


def test_a_model_trains_with_it_beside_others() -> None:
    model = mlp(sizes=(4, 6, 3))
    optimizer = KFACOptimizer(
        model,
        lr=0.5,
        inverse={"2": DoublyFactored(3), "*": Cholesky()},
        factor_update_period=1,
        inverse_update_period=10,
    )
    before = float(square_loss(model(batch())).detach())
    train(model, optimizer, 20)
    assert float(square_loss(model(batch())).detach()) < 0.5 * before
