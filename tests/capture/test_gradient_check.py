"""What backward adds to `.grad` against what was captured: layers of which a part is out of sight take the SGD step."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.plain import batch, block, clones, mlp, square_loss, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import (
    CurvaturePropagation,
    KFACOptimizer,
    LayerStatistics,
    LossTerms,
    MonteCarlo,
    Structure,
    Subsample,
    WeightSharing,
)
from kfac_optim.layers.linear import LinearAdapter, LinearStatistics

PARTLY = "only a part was captured and takes? the plain SGD step"


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def optimizer_of(model: nn.Module, **options: object) -> KFACOptimizer:
    return KFACOptimizer(model, lr=0.05, factor_update_period=1, loss_terms=LossTerms.SUM, **options)  # type: ignore[arg-type]


def steps(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


# -- what is in order ------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """One layer of each family, some used twice, one tied from both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.twice = nn.Linear(6, 6)
        self.lstm = nn.LSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.conv = nn.Conv1d(8, 6, 3, padding="same", dilation=2, groups=2)
        self.back = nn.ConvTranspose1d(6, 6, 3, stride=2, padding=1, output_padding=1)
        self.channels = nn.BatchNorm1d(6)
        self.raw = nn.Parameter(torch.randn(6, 6))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y, _ = self.attention(x, x.flip(1), x)
        y = self.norm(x + self.twice(torch.tanh(self.twice(y))))
        y, _ = self.lstm(y)
        y = self.channels(self.back(self.conv(y.mT))).mT
        return F.linear(y @ self.raw, self.embedding.weight)


def everything() -> tuple[Everything, Tensor]:
    torch.manual_seed(0)
    return Everything().double(), torch.randint(0, 11, (5, 7))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_sharing": WeightSharing.REDUCE, "structure": (Structure.DIAGONAL, Structure.DIAGONAL)},
        {"subsample": Subsample(examples=2)},
        {"estimate": MonteCarlo(nn.CrossEntropyLoss(reduction="sum"), class_dim=-1)},
    ],
    ids=["default", "reduce", "subsample", "named"],
)
def test_every_family_of_layers_accounts_for_its_whole_gradient(options: dict[str, object]) -> None:
    model, ids = everything()
    optimizer = optimizer_of(model, **options)
    with no_warning():
        steps(
            optimizer, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.repeat(1, 2).flatten(), reduction="sum"), 1
        )
    blocks = optimizer._binding.coverage.blocks
    assert all(each.check.is_done for each in blocks)
    assert {name for each in blocks for name in each.param_names} == {name for name, _ in model.named_parameters()}


def of_half_precision(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def of_two_backwards(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out.sum().backward(retain_graph=True)
    model(x[:3]).sum().backward()
    return out.square().sum()


class Rolled(nn.Module):
    """Its weight is cast once and used a hundred times, so that its gradient is summed in the narrow dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(100):
            x = torch.tanh(self.cell(x))
        return self.head(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_sums_in_a_narrow_dtype_and_gradients_that_it_cannot_hold_are_no_difference(
    dtype: torch.dtype, scale: float
) -> None:
    torch.manual_seed(0)
    model = Rolled()
    optimizer = optimizer_of(model)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype), no_warning():
            out = model(torch.randn(64, 8))
        (scale * out.float().square().mean()).backward()
        with no_warning():
            optimizer.step()
    assert optimizer.metrics()["left_out_parameters"] == 0


@pytest.mark.parametrize("forward_too", [False, True])
def test_what_runs_in_float32_accounts_for_its_gradient_where_the_backward_runs_within_autocast(
    forward_too: bool,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.LayerNorm(32))
    optimizer, ids = optimizer_of(model), torch.randint(50, (8, 6))
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16, enabled=forward_too):
                loss = F.cross_entropy(model(ids).mean(1), ids[:, 0] % 10)
            loss.backward()
        with no_warning():
            optimizer.step()
    assert optimizer.metrics()["left_out_parameters"] == 0


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loss", [of_half_precision, of_two_backwards])
def test_rounding_several_backwards_and_graphs_are_no_difference(
    loss: Callable[[nn.Module, Tensor], Tensor], compiled: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )
    optimizer = optimizer_of(model)
    run, x = torch.compile(model, backend="aot_eager") if compiled else model, torch.randn(64, 2, 6, 6)
    with no_warning():
        steps(optimizer, lambda: loss(run, x), 2)
    assert all(each.check.is_done for each in optimizer._binding.coverage.blocks)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
def test_convolutions_of_any_shape_account_for_their_gradient(
    groups: int, width: int, kernel: int, padding: int, step: int, bias: bool, transposed: bool
) -> None:
    torch.manual_seed(0)
    family = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = family(
        groups * width, 2 * groups, kernel, step, min(padding, kernel - 1), groups=groups, bias=bias
    ).double()
    optimizer = optimizer_of(layer)
    x = torch.randn(3, groups * width, 5, 6, dtype=torch.float64)
    with no_warning():
        steps(optimizer, lambda: layer(x).square().sum(), 1)
    assert block(optimizer, "").check.is_done


# -- what is not -----------------------------------------------------------------------------------------------


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return square_loss(out) + slope.square().sum()


def critic_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """As in WGAN-GP: the penalty comes of a forward of its own, on other inputs."""
    mixed = (0.3 * x + 0.7 * x.flip(0)).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).tanh().sum(), mixed, create_graph=True)
    return square_loss(model(x)) + (slope.norm(dim=1) - 1).square().mean()


def partly_by_torch_func(model: nn.Module, x: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    per_example = torch.func.vmap(lambda one: torch.func.functional_call(model, params, (one,)))
    return square_loss(model(x)) + per_example(x).square().sum()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return 2 * gradient


def weight_seen_twice(model: nn.Module, x: Tensor) -> Tensor:
    """A product with the weight that hides behind a function of its own."""
    return square_loss(model(x)) + (x @ (model[0].weight * 1).mT).square().sum()


def test_a_layer_of_which_a_part_is_out_of_sight_steps_as_under_sgd_and_is_named_once() -> None:
    model = mlp()
    ours = optimizer_of(model, kl_clip=None)

    def take(count: int) -> None:
        for _ in range(count):
            before = clones(model[0].parameters())
            steps(ours, lambda: weight_seen_twice(model, batch()), 1)
            for param, old in zip(model[0].parameters(), before, strict=True):
                torch.testing.assert_close(param, old - 0.05 * param.grad, rtol=1e-12, atol=0)

    take(1)
    assert ours.metrics()["unpreconditioned_blocks"] == 1, "nor is it preconditioned before it is named"
    with pytest.warns(UserWarning, match=PARTLY) as told:
        take(3)
    assert len(told) == 1
    assert str(told[0].filename) == __file__
    assert "'0'" in str(told[0].message)
    reasons = {each.name: each.reason for each in ours.summary().parameters}
    assert {name.split(".")[0] for name, reason in reasons.items() if reason is not None} == {"0"}
    assert ours.factors().keys() == {"2"}
    assert ours.metrics()["left_out_parameters"] > 0


@pytest.mark.parametrize("loss", [gradient_penalty, critic_penalty, partly_by_torch_func])
def test_derivatives_of_the_model_account_for_the_gradient(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    with no_warning():
        steps(optimizer, lambda: loss(model, batch()), 4)
    assert optimizer.factors().keys() == {"0", "2"}
    assert optimizer.metrics()["measured_parameters"] == 1
    assert all(each.check.is_done for each in optimizer._binding.coverage.blocks)


def test_a_layer_behind_a_hook_that_changes_what_flows_on_is_measured_within_it() -> None:
    model = mlp()
    model[0].register_forward_hook(lambda _m, _a, out: out.register_hook(lambda g: 0.5 * g) and None)
    optimizer = optimizer_of(model)
    model[0].register_forward_hook(lambda _m, _a, out: out.register_hook(lambda g: 0.5 * g) and None)
    steps(optimizer, lambda: square_loss(model(batch())), 3)
    assert optimizer.factors().keys() == {"0", "2"}
    assert block(optimizer, "0").strikes == 1


def test_a_resumed_run_leaves_out_what_the_saved_one_did() -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    with pytest.warns(UserWarning, match=PARTLY):
        steps(optimizer, lambda: weight_seen_twice(model, batch()), 2)
    twin = copy.deepcopy(model)
    resumed = optimizer_of(twin)
    resumed.load_state_dict(optimizer.state_dict())
    with no_warning():
        for each, net in ((optimizer, model), (resumed, twin)):
            steps(each, lambda net=net: weight_seen_twice(net, batch()), 2)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# -- penalties on the weights ----------------------------------------------------------------------------------


def squares(model: nn.Module) -> Tensor:
    return sum(0.1 * param.square().sum() for param in model.parameters())


def absolute_values_and_squares(model: nn.Module) -> Tensor:
    return squares(model) + sum(param.abs().sum() for name, param in model.named_parameters() if "weight" in name)


def not_orthogonal(model: nn.Module) -> Tensor:
    first = model[0].weight
    return (first.mT @ first - torch.eye(first.shape[1], dtype=first.dtype)).square().sum()


@pytest.mark.parametrize("penalty", [squares, absolute_values_and_squares, not_orthogonal])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_penalties_on_the_weights_are_preconditioned_with_the_rest(
    penalty: Callable[[nn.Module], Tensor], dtype: torch.dtype
) -> None:
    model, twin = mlp(dtype=dtype, sizes=(4, 6, 3)), mlp(dtype=dtype, sizes=(4, 6, 3))
    ours, by_hand = optimizer_of(model), optimizer_of(twin)
    for i in range(3):
        x = batch(i, dtype=dtype)
        with no_warning():
            steps(ours, lambda x=x: square_loss(model(x)) + penalty(model), 1)
        by_hand.zero_grad()
        square_loss(twin(x)).backward()
        added = torch.autograd.grad(penalty(twin), list(twin.parameters()), allow_unused=True)
        for param, gradient in zip(twin.parameters(), added, strict=True):
            if gradient is not None:
                param.grad += gradient
        by_hand.step()
    assert ours.metrics()["unpreconditioned_blocks"] == 0
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-10}[dtype]
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


# -- what comes later ------------------------------------------------------------------------------------------


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def add_noise(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad += torch.randn_like(param)


def project(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = param.grad.sign()


@pytest.mark.parametrize("edit", [clip, add_noise, project])
def test_edits_of_the_gradient_after_backward_leave_layers_covered(edit: Callable[[nn.Module], None]) -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    for i in range(2):
        optimizer.zero_grad()
        square_loss(model(batch(i))).backward()
        edit(model)
        with no_warning():
            optimizer.step()
    assert optimizer.metrics()["measured_parameters"] == 1


@pytest.mark.parametrize("first", [False, True])
def test_hooks_on_parameters_leave_layers_covered(first: bool) -> None:
    model = mlp()
    hooks = [lambda: [param.register_hook(lambda g: 3 * g.sign()) for param in model.parameters()]]
    if first:
        hooks.pop()()
    optimizer = optimizer_of(model)
    for hook in hooks:
        hook()
    with no_warning():
        train(model, optimizer, 3)
    assert optimizer.metrics()["measured_parameters"] == 1
    for param in model.parameters():
        assert len(param._backward_hooks) == 1, "ours are gone"
    assert torch.equal(model[0].weight.grad.abs(), torch.full_like(model[0].weight, 3))


def test_a_backward_of_an_earlier_forward_costs_one_step_and_not_the_layer() -> None:
    model = mlp()
    late = square_loss(model(batch(5)))
    optimizer = optimizer_of(model)
    square_loss(model(batch())).backward()
    late.backward()
    with no_warning():
        optimizer.step()
        assert optimizer.metrics()["unpreconditioned_blocks"] == 2
        train(model, optimizer, 2)
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0
    assert optimizer.factors().keys() == {"0", "2"}


def test_a_layer_that_runs_otherwise_later_is_looked_at_again() -> None:
    """Its inverse of before goes on until the difference is seen, and no longer."""
    model = mlp()
    optimizer = optimizer_of(model)
    train(model, optimizer, 3)
    layer = model[0]
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias) * 1.0 + _Doubled.apply(x) @ (layer.weight * 1).mT
    with pytest.warns(UserWarning, match=f"{PARTLY}.*'0'"):
        train(model, optimizer, 3)
    assert optimizer.factors().keys() == {"2"}


def test_a_frozen_bias_is_no_difference() -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    model[0].bias.requires_grad_(False)
    with no_warning():
        train(model, optimizer, 2)
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


@pytest.mark.parametrize("backend", [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul])
def test_the_precision_of_one_backend_alone_may_be_set(backend: Any) -> None:
    """Torch then refuses to tell that of all."""
    before, backend.fp32_precision = backend.fp32_precision, "tf32"
    try:
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = KFACOptimizer(model, lr=0.01)
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    finally:
        backend.fp32_precision = before
    assert torch.get_float32_matmul_precision() == "highest"
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


@pytest.mark.parametrize("sharing", list(WeightSharing))
def test_gradients_of_rounding_errors_alone_are_no_difference(sharing: WeightSharing) -> None:
    """What a norm adds and multiplies by is taken off again by one that follows it."""
    torch.manual_seed(0)
    norms = (nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True))
    model = nn.Sequential(*norms, *copy.deepcopy(norms), nn.InstanceNorm1d(4)).double()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1, weight_sharing=sharing)
    for _ in range(2):
        optimizer.zero_grad()
        torch.tanh(model(torch.randn(5, 4, 6, dtype=torch.float64))).square().mean().backward()
        optimizer.step()
    assert len(optimizer.factors()) == 6


def test_gradients_of_zero_say_nothing_and_the_check_waits() -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    steps(optimizer, lambda: 0 * square_loss(model(batch())), 1)
    assert not block(optimizer, "0").check.is_done
    train(model, optimizer, 1)
    assert block(optimizer, "0").check.is_done


@pytest.mark.parametrize("hidden", [False, True])
def test_gradients_whose_squares_are_zero_are_judged_as_others_are(hidden: bool) -> None:
    model = mlp(dtype=torch.float32, sizes=(4, 3))
    optimizer = optimizer_of(model)
    x = batch(dtype=torch.float32)

    def loss() -> Tensor:
        unseen = torch.add(x[:, :3], model[0].weight.sum()).square().sum() if hidden else 0
        return 1e-30 * (square_loss(model(x)) + unseen)

    with pytest.warns(UserWarning, match=PARTLY) if hidden else no_warning():
        steps(optimizer, loss, 3)
    assert hidden or block(optimizer, "0").check.is_done


def test_the_check_leaves_nothing_on_the_model_and_nothing_alive() -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    square_loss(model(batch())).backward()
    assert model[0].weight._backward_hooks
    check = weakref.ref(block(optimizer, "0").check)
    optimizer.step()
    assert not any(param._backward_hooks for param in model.parameters())
    del optimizer
    gc.collect()
    assert check() is None


class _Silent(LinearStatistics):
    """Of somebody's own layer, which does not tell what its calls add."""

    def gradient_along(self, directions: Tensor) -> None:
        return LayerStatistics.gradient_along(self, directions)


class _SilentAdapter(LinearAdapter):
    def statistics(self, module, spec, call, dtype):  # type: ignore[no-untyped-def]
        return _Silent(spec, call, dtype)


def test_statistics_that_do_not_tell_what_they_add_are_trusted() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(4, 3)).double()
    optimizer = optimizer_of(model, adapters={Own: _SilentAdapter()})
    with no_warning():
        train(model, optimizer, 2)
    assert optimizer.factors().keys() == {"0"}
    assert block(optimizer, "0").check.is_done


@pytest.mark.parametrize("estimate", [MonteCarlo, CurvaturePropagation])
def test_a_named_loss_looks_at_the_gradient_of_the_training_loss(estimate: type[MonteCarlo]) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.05, factor_update_period=1, estimate=estimate(nn.MSELoss()))

    def loss() -> Tensor:
        return F.mse_loss(model(batch()), torch.ones(8, 3, dtype=torch.float64)) + (model[0].weight ** 4).sum()

    with pytest.warns(UserWarning, match=f"{PARTLY}.*'0'"):
        steps(optimizer, loss, 3)
    assert optimizer.factors().keys() == {"2"}


@pytest.mark.filterwarnings("ignore:.*gradients but no statistics")
def test_a_named_loss_judges_no_layer_by_an_input_that_was_changed_in_place() -> None:
    """Under autocast autograd keeps a cast copy of the input and lets the original be overwritten."""
    model = mlp(dtype=torch.float32, sizes=(4, 8))
    optimizer = KFACOptimizer(model, lr=0.05, factor_update_period=1, estimate=MonteCarlo(nn.MSELoss()))
    for _ in range(3):
        optimizer.zero_grad()
        x = batch(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        x.mul_(100)
        F.mse_loss(output.float(), torch.ones(8, 8)).backward()
        optimizer.step()
    assert optimizer.metrics()["left_out_parameters"] == 0


def test_what_is_never_captured_is_shown_as_not_measured() -> None:
    """The share of parameters that is really preconditioned, and all names."""

    class FakeQuantised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(
                x, torch.fake_quantize_per_tensor_affine(self.weight.float(), 0.1, 0, -8, 7).double(), self.bias
            )

    torch.manual_seed(0)
    model = nn.Sequential(FakeQuantised(4, 5), nn.Tanh(), nn.Linear(5, 3), FakeQuantised(3, 3)).double()
    optimizer = optimizer_of(model)
    with pytest.warns(UserWarning, match=r"2 layers have gradients but no statistics.*\('0', '3'\)"):
        train(model, optimizer, 1)
    assert optimizer.factors().keys() == {"2"}
    total = sum(param.numel() for param in model.parameters())
    assert optimizer.metrics()["covered_parameters"] == 1
    assert optimizer.metrics()["measured_parameters"] == pytest.approx(18 / total)
    shown = str(optimizer.summary())
    assert shown.count("no statistics so far: SGD") == 2
    assert f"Statistics were taken of 18 ({100 * 18 / total:.1f}%) so far." in shown
