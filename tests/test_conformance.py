"""Torch's own metadata of its optimizers, `optim_db`, asked of `KFACOptimizer` wherever it is asked of `optim.SGD`.

The claims are those of torch's test/test_optim.py (`TestOptimRenewed`), the inputs the SGD entry of the metadata. Each
runs in up to three ways (see `WAYS`): *bare* parameters that no module's call shows, a model whose layers are all
*skipped*, both bit for bit as SGD; and a *preconditioned* model, for what does not depend on the direction taken.

Carried over, by torch's names:
    errors · forloop_goes_right_direction · param_group_with_lrscheduler_goes_right_direction · tensor_lr ·
    rosenbrock_sparse (bare: a covered parameter refuses sparse gradients, see test_optimizer.py) ·
    complex, complex_2d (bare: complex layers are not preconditioned) · foreach_matches_forloop ·
    fused_matches_forloop · mixed_device_dtype (dtypes only) · set_default_dtype_works_with_foreach ·
    fused_error_on_params_on_meta · param_groups_weight_decay · param_groups_lr ·
    step_is_noop_when_params_have_no_grad · step_is_noop_for_zero_grads ·
    fused_does_not_step_if_foundinf (with a scale: without one ours asks for the scaler, as after `unscale_`) ·
    optimizer_can_be_printed · state_dict_deterministic · can_load_older_state_dict ·
    can_load_from_to_named_state_dict · save_load_equality_with_weights_only ·
    state_dict_pre_hook, _post_hook, _pre_post_hook ·
    load_state_dict_pre_hook_and_prepend, _post_hook, _pre_post_hook · step_pre_hook, _post_hook, _all_hooks ·
    deepcopy_copies_all_public_attrs · non_empty_state

Not carried over:
    optim_infos_do_not_specify_global_cliquey_kwargs: a test of the metadata.
    load_nontensor_step: SGD counts no steps, and where we do (`SelectedUpdates`) it ever was in a tensor, so that a
        number is refused by name (see test_conformance_entry.py).
    second_order_optims_return_consistent_types: of optimizers whose step needs a closure; ours does not.
    cpu_load_state_dict, state_dict_with_cuda_params, fused_cpu_matches_cuda, peak_memory_foreach,
        forloop_goes_right_direction_multigpu: need an accelerator, these tests run without.
    defaults_changed_to_foreach: so does torch's own; that its default is asked is shown in test_conformance_entry.py.
    foreach_large_tensor, fused_large_tensor: 64 GB.
    TestDifferentiableOptimizer: `differentiable` is no argument of ours (see below).
    capturable: no flag of SGD's; a step of ours decides on refreshes, and so is not captured as a whole.
    TestLRScheduler, TestSWAUtils, which that file takes in: of schedulers and averaged models, not of optimizers; that
        each drives ours as SGD is shown in test_sgd_parity.py and tests/helpers/hazards/models.py.

`test_conformance_entry.py` asks the same of what only `KFACOptimizer` has: inverses, step sizes, estimates, refreshes.
"""

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.plain import FREQUENT, assert_identical, clones, snapshot
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import ErrorOptimizerInput, OptimizerErrorEnum, optim_db

from kfac_optim import AdaptiveTrustRegion, KFACOptimizer, LossTerms, MonteCarlo, SelectedUpdates
from kfac_optim.step.step_size import StepSize

SGD_INFO = next(info for info in optim_db if info.optim_cls is SGD)

USED = {
    "optim_cls",
    "optim_inputs_func",
    "optim_error_inputs_func",
    "scheduler_inputs",
    "supported_impls",
    "supports_fused_on",
    "not_og_supported_flags",
    "supports_sparse",
    "metadata_for_sparse",
    "supports_complex",
    "supports_param_groups",
    "has_capturable_arg",
    "only_supports_sparse_grads",
    "step_requires_closure",
}
LEFT_OUT = {
    "supports_multiple_devices",  # one process on the CPU has one device
    "decorators",  # skips of torch's own runs under TorchDynamo
}

# What bare parameters are told at their first step: that nothing is preconditioned, by this message alone.
left_to_sgd = pytest.mark.filterwarnings("ignore:kfac_optim. nothing is preconditioned:UserWarning")


# -- inputs, and the three ways to take them ---------------------------------------------------------------------


IMPLEMENTATIONS = [flag for flag in SGD_INFO.supported_impls if flag != "differentiable"]


def inputs() -> dict[str, dict[str, Any]]:
    """Keyword arguments of SGD's inputs by description, new ones at each call: schedulers write into a tensor lr."""
    return {entry.desc: dict(entry.kwargs) for entry in SGD_INFO.optim_inputs_func("cpu")}


def options_of(desc: str) -> dict[str, Any]:
    """Of an input, `desc`, or of an input with an implementation, `desc & implementation`."""
    name, _, flag = desc.partition(" & ")
    return {**inputs()[name], **dict.fromkeys(IMPLEMENTATIONS, False), flag: True} if flag else inputs()[name]


each_input = pytest.mark.parametrize("desc", inputs())
each_implementation = pytest.mark.parametrize(
    "desc", [*inputs(), *(f"{desc} & {flag}" for desc in inputs() for flag in IMPLEMENTATIONS)]
)
WITHOUT_FUSED = [*inputs(), *(f"{desc} & foreach" for desc in inputs())]


def forloop(desc: str) -> dict[str, Any]:
    return {**inputs()[desc], "foreach": False}


class Way:
    """How `KFACOptimizer` is built, and how the model is run: by its own call, or past it."""

    @staticmethod
    def build(model: nn.Module, params: Any = None, **options: Any) -> KFACOptimizer:
        raise NotImplementedError

    @staticmethod
    def output(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)


class Bare(Way):
    @staticmethod
    def build(model: nn.Module, params: Any = None, **options: Any) -> KFACOptimizer:
        return KFACOptimizer(model.parameters() if params is None else params, **options)

    @staticmethod
    def output(model: nn.Module, x: Tensor) -> Tensor:
        """Of a layer, or a sequence of layers and activations, without calling any module that has parameters."""
        for layer in model if isinstance(model, nn.Sequential) else [model]:
            x = x @ layer.weight.T + layer.bias if isinstance(layer, nn.Linear) else layer(x)
        return x


class Skipped(Way):
    @staticmethod
    def build(model: nn.Module, params: Any = None, **options: Any) -> KFACOptimizer:
        if params is None:
            return KFACOptimizer(model, skip_layers=["*"], **options)
        return KFACOptimizer(params, model=model, skip_layers=["*"], **options)


class Preconditioned(Way):
    @staticmethod
    def build(model: nn.Module, params: Any = None, **options: Any) -> KFACOptimizer:
        options = {**FREQUENT, "loss_terms": LossTerms.SUM, **options}
        if params is None:
            return KFACOptimizer(model, **options)
        return KFACOptimizer(params, model=model, **options)


class Reference(Way):
    @staticmethod
    def build(model: nn.Module, params: Any = None, **options: Any) -> Any:
        return SGD(model.parameters() if params is None else params, **options)


class BareReference(Reference):
    output = Bare.output


def sgd_run_as(way: type[Way]) -> type[Way]:
    """SGD on a model that is run in the same way, so that its gradients are the same to the bit."""
    return BareReference if way is Bare else Reference


WAYS: list[type[Way]] = [Bare, Skipped, Preconditioned]
AS_SGD: list[type[Way]] = [Bare, Skipped]
each_way = pytest.mark.parametrize("way", WAYS)
on_a_model = pytest.mark.parametrize("way", [Skipped, Preconditioned])
as_sgd = pytest.mark.parametrize("way", AS_SGD)


def line(*, contiguous: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """5 → 10, the same at each call."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 10, dtype=dtype)
    if not contiguous:
        layer.weight = nn.Parameter(0.3 * torch.randn(10, 5, 2, dtype=dtype)[..., 0])
        layer.bias = nn.Parameter(0.3 * torch.randn(10, 2, dtype=dtype)[..., 0])
    return layer


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """2 → 3 → 1, the same at each call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3, dtype=dtype), nn.Sigmoid(), nn.Linear(3, 1, dtype=dtype), nn.Sigmoid())


def image_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.BatchNorm2d(2))


def rows(size: int = 4, dim: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, dim, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def closure_of(way: type[Way], model: nn.Module, optimizer: Optimizer, x: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = way.output(model, x).square().sum()
        loss.backward()
        return loss

    return closure


def run(optimizer: Optimizer, closure: Callable[[], Tensor], steps: int, schedulers: Sequence[Any] = ()) -> Tensor:
    """`steps` steps, each followed by the schedulers'; the losses before the first and after each, `[steps + 1]`."""
    losses = []
    for _ in range(steps):
        losses.append(optimizer.step(closure))
        for scheduler in schedulers:
            scheduler.step(*([losses[-1].detach()] if isinstance(scheduler, ReduceLROnPlateau) else []))
    return torch.stack([*losses, closure()]).detach()


def assert_right_direction(losses: Tensor, *, maximize: bool) -> None:
    assert losses.isfinite().all()
    assert (losses[-1] > losses[0]) if maximize else (losses[-1] < losses[0])


def buffers(optimizer: Optimizer) -> list[Tensor | None]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [optimizer.state[p].get("momentum_buffer") if p in optimizer.state else None for p in params]


def assert_same_values(ours: Optimizer, theirs: Optimizer) -> None:
    """Parameters and momentum buffers, bit for bit."""
    for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert_identical(clones(mine["params"]), clones(other["params"]))
    assert_identical(buffers(ours), buffers(theirs))


# -- the metadata itself -----------------------------------------------------------------------------------------


def test_every_attribute_of_the_metadata_is_used_or_left_out_on_purpose() -> None:
    assert set(vars(SGD_INFO)) == USED | LEFT_OUT


def test_what_sgd_supports_is_what_these_tests_ask_for() -> None:
    """Each of these decides whether a test below is a claim about SGD at all."""
    assert set(SGD_INFO.supported_impls) == {"foreach", "fused", "differentiable"}
    assert "cpu" in SGD_INFO.supports_fused_on
    assert SGD_INFO.supports_sparse
    assert SGD_INFO.supports_complex
    assert SGD_INFO.supports_param_groups
    assert not SGD_INFO.has_capturable_arg
    assert not SGD_INFO.only_supports_sparse_grads
    assert not SGD_INFO.step_requires_closure


def test_differentiable_is_the_only_argument_of_sgd_that_is_none_of_ours() -> None:
    """The statistics behind a direction are no differentiable function of the gradient, so it is refused by name."""
    model = line()
    ours, theirs = KFACOptimizer(model), SGD(line().parameters())
    assert theirs.defaults.keys() - ours.defaults.keys() == {"differentiable"}
    for key in theirs.defaults.keys() & ours.defaults.keys():
        assert ours.defaults[key] == theirs.defaults[key], key
        assert ours.param_groups[0][key] == theirs.param_groups[0][key], key
    with pytest.raises(TypeError, match="differentiable"):
        KFACOptimizer(model, differentiable=True)


# -- errors ------------------------------------------------------------------------------------------------------

ERRORS = {error.optimizer_error_input.desc: error for error in SGD_INFO.optim_error_inputs_func("cpu", torch.float32)}


@contextmanager
def raises_or_warns(error: ErrorOptimizerInput, match: str | None) -> Iterator[None]:
    context = pytest.warns if issubclass(error.error_type, Warning) else pytest.raises
    with context(error.error_type, match=match):
        yield


@pytest.mark.parametrize("desc", ERRORS)
def test_what_sgd_refuses_or_warns_of_is_refused_or_warned_of_in_the_same_kind(desc: str) -> None:
    """By torch's own words where torch's base class speaks; the numbers have our words, which name the argument."""
    error = ERRORS[desc]
    assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    made = error.optimizer_error_input
    # Torch means "any parameters" by None; SGD looks at its numbers first.
    params = [nn.Parameter(torch.ones(1, 1))] if made.params is None else made.params
    with raises_or_warns(error, error.error_regex):
        SGD(params, **made.kwargs)
    words = error.error_regex if made.params is not None else list(made.kwargs)[-1]
    with raises_or_warns(error, words):
        KFACOptimizer(params, **made.kwargs)


def not_a_leaf() -> list[Tensor]:
    return [torch.ones(2, requires_grad=True) * 2]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(list, id="empty list"),
        pytest.param(lambda: iter(()), id="empty iterator"),
        pytest.param(not_a_leaf, id="not a leaf"),
        pytest.param(lambda: [1.0], id="no tensor"),
        pytest.param(lambda: [{"params": {nn.Parameter(torch.ones(1))}}], id="unordered"),
        pytest.param(lambda: [{"params": [nn.Parameter(torch.ones(1))]}, 3], id="no group"),
    ],
)
def test_parameters_that_torch_refuses_are_refused_in_its_words(params: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as theirs:
        SGD(params())
    with pytest.raises(theirs.type) as ours:
        KFACOptimizer(params())
    assert str(ours.value) == str(theirs.value)


# -- the right direction -----------------------------------------------------------------------------------------

SCHEDULES = range(len(SGD_INFO.scheduler_inputs))
# Schedulers see the learning rate alone: its two kinds, and two inputs in which what is scheduled differs most.
COURSES = [
    *itertools.product(inputs(), [None], [True, False]),
    *itertools.product(["default", "tensor lr", "maximize", "nesterov"], SCHEDULES, [True]),
]


def schedulers_of(schedule: int | None, optimizer: Optimizer) -> list[Any]:
    return [] if schedule is None else [make(optimizer) for make in SGD_INFO.scheduler_inputs[schedule]]


@left_to_sgd
@pytest.mark.parametrize(("desc", "schedule", "contiguous"), COURSES)
@each_way
def test_the_loss_goes_the_right_way_with_and_without_schedulers(
    way: type[Way], desc: str, schedule: int | None, contiguous: bool
) -> None:
    """And with the losses, parameters and momentum of SGD where nothing is preconditioned."""
    results = []
    for each in (way, sgd_run_as(way)):
        model = line(contiguous=contiguous)
        optimizer = each.build(model, **forloop(desc))
        schedulers = schedulers_of(schedule, optimizer)
        losses = run(optimizer, closure_of(each, model, optimizer, rows()), 12, schedulers)
        assert_right_direction(losses, maximize=optimizer.defaults["maximize"])
        results.append((optimizer, losses))
    (ours, our_losses), (theirs, their_losses) = results
    rates = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in (ours, theirs)]
    assert rates[0] == rates[1]
    assert torch.equal(our_losses, their_losses) == (way is not Preconditioned)
    if way is not Preconditioned:
        assert_same_values(ours, theirs)


@left_to_sgd
@pytest.mark.parametrize("schedule", list(SCHEDULES))
@each_way
def test_groups_under_schedulers_go_the_right_way(way: type[Way], schedule: int) -> None:
    runs = []
    for each in (way, Reference):
        model = line()
        optimizer = each.build(model, [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.01}])
        schedulers = schedulers_of(schedule, optimizer)
        losses = run(optimizer, closure_of(each, model, optimizer, rows()), 12, schedulers)
        assert_right_direction(losses, maximize=False)
        runs.append([[float(group["lr"]) for group in optimizer.param_groups], losses])
    assert runs[0][0] == runs[1][0]


@left_to_sgd
@each_implementation
@on_a_model
def test_a_tensor_learning_rate_of_any_number_of_dimensions_takes_the_steps_of_a_number(
    way: type[Way], desc: str
) -> None:
    runs = []
    for lr in (1e-3, *(torch.tensor(1e-3, dtype=torch.float64).reshape([1] * dims) for dims in range(3))):
        model = line(dtype=torch.float64)
        optimizer = way.build(model, **{**options_of(desc), "lr": lr})
        run(optimizer, closure_of(way, model, optimizer, rows(dtype=torch.float64)), 3)
        runs.append(clones(model.parameters()))
        assert optimizer.param_groups[0]["lr"] is lr
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], rtol=1e-12, atol=1e-14)


# -- kinds of gradients and parameters ---------------------------------------------------------------------------


def rosenbrock(point: Tensor) -> Tensor:
    x, y = point
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def one_coordinate(point: Tensor, i: int, *, sparse: bool) -> Tensor:
    """The gradient of `rosenbrock` in coordinate `i` alone; the sparse one in two halves, not coalesced."""
    x, y = point.tolist()
    value = [-400 * x * (y - x**2) - 2 * (1 - x), 200 * (y - x**2)][i]
    if sparse:
        halves = torch.tensor([value / 4, value - value / 4], dtype=point.dtype)
        return torch.sparse_coo_tensor(torch.tensor([[i, i]]), halves, (2,), check_invariants=False)
    return torch.tensor([value if j == i else 0.0 for j in range(2)], dtype=point.dtype)


def test_inputs_for_sparse_gradients_come_with_one_set_of_numbers() -> None:
    numbers, schedulers = SGD_INFO.metadata_for_sparse
    assert numbers["lr"] > 0
    assert len(schedulers) == 1


@left_to_sgd
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_sparse_gradients_descend_the_rosenbrock_valley_as_under_sgd(
    foreach: bool, maximize: bool, scheduled: bool
) -> None:
    """Coordinate by coordinate. Sparse equals dense up to rounding, and ours equals SGD bit for bit."""
    numbers, makers = SGD_INFO.metadata_for_sparse
    options = {**numbers, "foreach": foreach, "maximize": maximize, "lr": numbers["lr"] / (1e3 if maximize else 10)}
    start = torch.tensor([1.5, 1.5], dtype=torch.float64)
    found: dict[str, list[Tensor]] = {}
    for name, build, sparse in (
        ("sgd", SGD, True),
        ("ours", KFACOptimizer, True),
        ("ours, dense", KFACOptimizer, False),
    ):
        points = [nn.Parameter(start.clone()), nn.Parameter(start.float())]
        optimizer = build(points, **options)
        schedulers = [make(optimizer) for make in makers] if scheduled else []
        for step in range(100):
            for point in points:
                point.grad = one_coordinate(point, step % 2, sparse=sparse)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
        found[name] = clones(points)
    assert_identical(found["ours"], found["sgd"])
    torch.testing.assert_close(found["ours"], found["ours, dense"], rtol=5e-6, atol=5e-6)
    before, after = rosenbrock(start), rosenbrock(found["ours"][0])
    assert (after > before) if maximize else (after < before)


@left_to_sgd
@pytest.mark.parametrize("desc", WITHOUT_FUSED)
def test_complex_parameters_step_as_their_real_views_and_as_under_sgd(desc: str) -> None:
    """Fused kernels take no complex numbers, in torch as here."""
    runs = []
    for build, real in ((SGD, False), (KFACOptimizer, False), (KFACOptimizer, True)):
        torch.manual_seed(0)
        params = [torch.randn(10, 5, dtype=torch.complex64), torch.randn(10, dtype=torch.complex64), torch.randn(10, 5)]
        params = [torch.view_as_real(p).clone() if real and p.is_complex() else p for p in params]
        for param in params:
            param.requires_grad_()
        optimizer = build(params, **options_of(desc))
        path = []
        for _ in range(3):
            for param in params:
                shape = param.shape if real or not param.is_complex() else (*param.shape, 2)
                grad = torch.randn(shape)
                param.grad = grad if grad.shape == param.shape else torch.view_as_complex(grad)
            optimizer.step()
            path += [torch.view_as_real(p.detach()).clone() if p.is_complex() else p.detach().clone() for p in params]
        runs.append(path)
    assert_identical(runs[1], runs[0])
    torch.testing.assert_close(runs[1], runs[2])


@left_to_sgd
@pytest.mark.parametrize("desc", WITHOUT_FUSED)
def test_a_complex_parameter_steps_as_its_real_and_imaginary_parts(desc: str) -> None:
    torch.manual_seed(2024)
    whole = torch.randn(2, dtype=torch.complex128, requires_grad=True)
    parts = [part.detach().clone().requires_grad_() for part in (whole.real, whole.imag)]
    one, other = KFACOptimizer([whole], **options_of(desc)), KFACOptimizer(parts, **options_of(desc))
    start = whole.detach().clone()
    for _ in range(3):
        for optimizer, point in ((one, whole), (other, torch.complex(*parts))):
            optimizer.zero_grad()
            rosenbrock(point).abs().backward()
            optimizer.step()
        torch.testing.assert_close(whole.detach(), torch.complex(*parts).detach(), rtol=1e-10, atol=0)
    assert not torch.equal(whole, start)


# -- implementations ---------------------------------------------------------------------------------------------

TOLERANCES = {
    torch.float64: (1e-9, 1e-12),
    torch.float32: (1e-3, 1e-5),
    torch.bfloat16: (4e-2, 1e-2),
    torch.float16: (4e-2, 1e-2),
}


def seven_steps(way: type[Way], dtype: torch.dtype, **options: Any) -> list[list[Any]]:
    """Values after each step: without gradients in one, with a layer frozen in two, and a parameter of no elements."""
    model = net(dtype)
    aside = torch.full((), 0.5, dtype=dtype, requires_grad=True)
    aside.grad = torch.tensor(0.25, dtype=dtype)
    nothing = torch.empty(0, dtype=dtype, requires_grad=True)
    nothing.grad = torch.empty(0, dtype=dtype)
    params = [*model.parameters(), nothing, aside]
    optimizer = way.build(model, params, **options)
    x = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], dtype=dtype)
    path = []
    for step in range(7):
        model[2].requires_grad_(step not in (3, 4))
        for param in model.parameters():
            param.grad = None
        if step != 2:
            way.output(model, x).sum().backward()
        optimizer.step()
        path.append([clones(params), [b if b is None else b.clone() for b in buffers(optimizer)]])
    return path


@left_to_sgd
@pytest.mark.parametrize(("flag", "dtype"), [("foreach", torch.float64), *(("fused", dtype) for dtype in TOLERANCES)])
@each_input
@on_a_model
def test_foreach_and_fused_match_the_for_loop(way: type[Way], desc: str, flag: str, dtype: torch.dtype) -> None:
    """And each is SGD's own, bit for bit, where nothing is preconditioned."""
    options = {**inputs()[desc], "foreach": False, "fused": False}
    single, multiple = seven_steps(way, dtype, **options), seven_steps(way, dtype, **{**options, flag: True})
    if way is Preconditioned and dtype.itemsize == 2:
        # An inverse enlarges the rounding of parameters; what is left after several steps says little.
        torch.testing.assert_close(multiple[:2], single[:2], rtol=TOLERANCES[dtype][0], atol=TOLERANCES[dtype][1])
    else:
        torch.testing.assert_close(multiple, single, rtol=TOLERANCES[dtype][0], atol=TOLERANCES[dtype][1])
    theirs = seven_steps(sgd_run_as(way), dtype, **{**options, flag: True})
    if way is Preconditioned:
        with pytest.raises(AssertionError):
            assert_identical(multiple[0], theirs[0])
    else:
        assert_identical(multiple, theirs)
    gradless = single[2][0], single[1][0]
    assert_identical(gradless[0][:4], gradless[1][:4])  # no gradient, no step
    assert_identical(single[3][0][2:4], single[2][0][2:4])  # nor where it is frozen
    assert not torch.equal(single[5][0][2], single[4][0][2])


@left_to_sgd
@pytest.mark.parametrize("flag", IMPLEMENTATIONS)
@each_input
def test_parameters_of_several_dtypes_in_one_group_step_as_under_sgd(desc: str, flag: str) -> None:
    runs = []
    for build in (SGD, KFACOptimizer):
        torch.manual_seed(0)
        params = [torch.rand(2, 3, dtype=dtype, requires_grad=True) for dtype in TOLERANCES]
        optimizer = build(params, **{**inputs()[desc], flag: True})
        for _ in range(3):
            for param in params:
                param.grad = torch.rand_like(param)
            optimizer.step()
        runs.append([clones(params), buffers(optimizer)])
    assert_identical(*runs)


@left_to_sgd
@pytest.mark.parametrize("default", [torch.float64, torch.float16])
@each_input
@on_a_model
def test_the_default_dtype_does_not_enter_the_steps(way: type[Way], desc: str, default: torch.dtype) -> None:
    """Neither their dtype nor, but for the rounding of scalars, their values."""
    options = {**inputs()[desc], "foreach": True}
    plain = seven_steps(way, torch.float32, **options)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        other = seven_steps(way, torch.float32, **options)
    finally:
        torch.set_default_dtype(before)
    if way is Preconditioned:
        torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-6)
    else:
        assert_identical(other, plain)


@left_to_sgd
@each_way
def test_the_fused_implementation_refuses_parameters_without_storage(way: type[Way]) -> None:
    with torch.device("meta"):
        model = net()
    optimizer = way.build(model, fused=True)
    for param in model.parameters():
        param.grad = torch.rand_like(param)
    with pytest.raises(RuntimeError, match="`fused=True` requires all the params to be floating point Tensors"):
        optimizer.step()


# -- groups ------------------------------------------------------------------------------------------------------


@left_to_sgd
@each_input
@each_way
def test_groups_have_their_own_weight_decay(way: type[Way], desc: str) -> None:
    runs = []
    for each in (way, Reference):
        model, options = line(), options_of(desc)
        groups = [
            {"params": [model.weight], **options},
            {"params": [model.bias], **copy.deepcopy(options), "weight_decay": 0.0},
        ]
        optimizer = each.build(model, groups)
        assert optimizer.param_groups[1]["weight_decay"] == 0.0
        assert optimizer.param_groups[0]["weight_decay"] == options.get("weight_decay", 0)
        losses = run(optimizer, closure_of(way, model, optimizer, rows()), 20)
        assert_right_direction(losses, maximize=options.get("maximize", False))
        runs.append(optimizer)
    if way is not Preconditioned:
        assert_same_values(*runs)


@left_to_sgd
@each_input
@each_way
def test_groups_have_their_own_learning_rate(way: type[Way], desc: str) -> None:
    runs = []
    for each in (way, Reference):
        model, options = line(), {"lr": 1e-3, **options_of(desc)}
        idle = nn.Parameter(torch.randn(2))
        before = idle.detach().clone()
        groups = [{"params": [model.weight, model.bias], **options}, {"params": [idle]}]
        optimizer = each.build(model, groups, lr=1e-28)
        closure = closure_of(way, model, optimizer, rows())

        def with_idle(closure: Callable[[], Tensor] = closure, idle: Tensor = idle) -> Tensor:
            loss = closure()
            idle.grad = torch.ones_like(idle)
            return loss

        losses = run(optimizer, with_idle, 20)
        assert_right_direction(losses, maximize=options.get("maximize", False))
        assert torch.equal(idle, before)
        runs.append(optimizer)
    if way is not Preconditioned:
        assert_same_values(*runs)


@left_to_sgd
@each_input
@as_sgd
def test_a_group_added_in_the_middle_steps_as_under_sgd(way: type[Way], desc: str) -> None:
    runs = []
    for each in (way, Reference):
        model = net()
        optimizer = each.build(model, list(model[0].parameters()), **inputs()[desc])
        closure = closure_of(way, model, optimizer, rows(dim=2))
        run(optimizer, closure, 2)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.02})
        assert optimizer.param_groups[1]["momentum"] == optimizer.defaults["momentum"]
        run(optimizer, closure, 3)
        runs.append(optimizer)
    assert_same_values(*runs)


@each_way
def test_groups_are_the_dicts_that_were_given(way: type[Way]) -> None:
    """A user who keeps one may edit it there."""
    for each in (way, Reference):
        model = net()
        first: dict[str, Any] = {"params": list(model[0].parameters())}
        second: dict[str, Any] = {"params": list(model[2].parameters()), "lr": 0.5}
        optimizer = each.build(model, [first])
        optimizer.add_param_group(second)
        assert optimizer.param_groups[0] is first
        assert optimizer.param_groups[1] is second


@left_to_sgd
@pytest.mark.parametrize("foreach", [False, True])
@each_way
def test_parameters_without_storage_take_a_dry_step(way: type[Way], foreach: bool) -> None:
    for each in (way, Reference):
        with torch.device("meta"):
            model = net()
        optimizer = each.build(model, momentum=0.9, foreach=foreach)
        for param in model.parameters():
            param.grad = torch.empty_like(param)
        if way is Preconditioned and each is way:
            optimizer._warnings.given.add(
                "unseen"
            )  # of layers with gradients but no statistics, which is how it is here
        optimizer.step()
        assert all(buffer.device.type == "meta" for buffer in buffers(optimizer))


# -- steps that change nothing -----------------------------------------------------------------------------------


@left_to_sgd
@each_input
@each_way
def test_a_step_without_gradients_changes_nothing(way: type[Way], desc: str) -> None:
    model = net().requires_grad_(way is Preconditioned)  # no layer is preconditioned that cannot have gradients
    optimizer = way.build(model, **options_of(desc))
    before = snapshot(optimizer)
    assert optimizer.step(lambda: torch.tensor([1.0])) == torch.tensor([1.0])
    assert_identical(snapshot(optimizer)[0], before[0])
    assert not any(buffer is not None and buffer.any() for buffer in buffers(optimizer))


@left_to_sgd
@pytest.mark.parametrize("seen", [False, True])
@each_input
@each_way
def test_a_step_with_gradients_of_zero_changes_nothing(way: type[Way], desc: str, seen: bool) -> None:
    """Whether a backward made them or the user did."""
    options = options_of(desc)
    options["weight_decay"] = 0  # decays with any gradient
    model = net()
    optimizer = way.build(model, **options)
    before = clones(model.parameters())
    for _ in range(3):
        if seen:
            (way.output(model, rows(dim=2)) * 0).sum().backward()
        else:
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            if way is Preconditioned:
                optimizer._warnings.given.add(
                    "unseen"
                )  # of layers with gradients but no statistics, which is how it is here
        optimizer.step()
    assert_identical(clones(model.parameters()), before)


@left_to_sgd
@pytest.mark.parametrize("shape", [(), (1,)])
@each_input
@each_way
def test_a_fused_step_that_is_told_of_an_overflow_changes_nothing(
    way: type[Way], desc: str, shape: tuple[int, ...]
) -> None:
    """As `GradScaler` tells it; a scale of no or one dimension."""
    for each in (way, Reference):
        model = net()
        optimizer = each.build(model, **inputs()[desc], fused=True)
        closure = closure_of(way, model, optimizer, rows(dim=2))
        before = clones(model.parameters())
        closure()
        optimizer.grad_scale, optimizer.found_inf = torch.ones(shape), torch.ones(())
        optimizer.step()
        assert_identical(clones(model.parameters()), before)
        closure()
        optimizer.grad_scale, optimizer.found_inf = torch.ones(shape), torch.zeros(())
        optimizer.step()
        assert not torch.equal(model[0].weight, before[0])


# -- checkpoints -------------------------------------------------------------------------------------------------


def named(model: nn.Module, is_named: bool) -> list[Any]:
    return list(model.named_parameters()) if is_named else list(model.parameters())


def without_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


@left_to_sgd
@each_input
@each_way
def test_equal_runs_have_equal_checkpoints(way: type[Way], desc: str) -> None:
    model = net()
    optimizer = way.build(model, **inputs()[desc])
    run(optimizer, closure_of(way, model, optimizer, rows(dim=2)), 4)
    twin = copy.deepcopy(model)
    other = way.build(twin, **inputs()[desc])
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    other.load_state_dict(saved)
    assert_identical(saved, kept)
    for _ in range(4):
        run(optimizer, closure_of(way, model, optimizer, rows(dim=2)), 1)
        run(other, closure_of(way, twin, other, rows(dim=2)), 1)
        assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_identical(optimizer.state_dict(), other.state_dict())
    # a group that stands there twice has one and the same representation
    other.param_groups.extend(other.param_groups)
    assert_identical(*[each.state_dict()["param_groups"][-1] for each in (optimizer, other)])


@left_to_sgd
@pytest.mark.parametrize(("is_named", "is_named_there"), list(itertools.product([False, True], repeat=2)))
@each_way
def test_a_checkpoint_loads_with_and_without_names(way: type[Way], is_named: bool, is_named_there: bool) -> None:
    """Names of either side are kept, the checkpoint's before one's own; they do not enter the steps."""
    model = net()
    optimizer = way.build(model, named(model, is_named), momentum=0.9)
    run(optimizer, closure_of(way, model, optimizer, rows(dim=2)), 3)
    twin = copy.deepcopy(model)
    other = way.build(twin, named(twin, is_named_there), momentum=0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    names = other.state_dict()["param_groups"][0].get("param_names")
    assert names == ([name for name, _ in model.named_parameters()] if is_named or is_named_there else None)
    run(optimizer, closure_of(way, model, optimizer, rows(dim=2)), 2)
    run(other, closure_of(way, twin, other, rows(dim=2)), 2)
    assert_same_values(other, optimizer)
    assert_identical(*[without_names(each.state_dict()) for each in (optimizer, other)])


def images() -> Tensor:
    return torch.rand(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))


@left_to_sgd
@each_input
@on_a_model
def test_a_checkpoint_from_before_a_flag_existed_loads(way: type[Way], desc: str) -> None:
    """With the flag's value in the optimizer that loads it."""
    model = image_net()
    optimizer = way.build(model, **options_of(desc))
    closure = closure_of(way, model, optimizer, images())
    run(optimizer, closure, 3)
    flags = {flag for flag in SGD_INFO.not_og_supported_flags if flag in optimizer.defaults}
    assert flags == {"foreach", "fused", "maximize"}
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in SGD_INFO.not_og_supported_flags:
            group.pop(flag, None)
    optimizer.load_state_dict(old)
    for flag in flags:
        assert optimizer.param_groups[0][flag] == optimizer.defaults[flag]
    before = clones(model.parameters())
    run(optimizer, closure, 1)
    assert not torch.equal(before[0], model[0].weight)


@left_to_sgd
@pytest.mark.parametrize("is_named", [False, True])
@each_input
@each_way
def test_a_saved_checkpoint_loads_equal_from_a_weights_only_file(way: type[Way], desc: str, is_named: bool) -> None:
    model = net()
    optimizer = way.build(model, named(model, is_named), **options_of(desc))
    run(optimizer, closure_of(way, model, optimizer, rows(dim=2)), 3)
    saved = optimizer.state_dict()
    for weights_only in (True, False):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        assert_identical(torch.load(file, weights_only=weights_only), saved)


@left_to_sgd
@each_input
@each_way
def test_sgd_continues_from_our_checkpoint(way: type[Way], desc: str) -> None:
    """Back to SGD in the middle of a run: the momentum goes along, what else is ours is not used."""
    model = net()
    optimizer = way.build(model, **options_of(desc))
    run(optimizer, closure_of(way, model, optimizer, rows(dim=2)), 3)
    twin = copy.deepcopy(model)
    theirs = SGD(twin.parameters())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch does not copy what it loads
    assert_same_values(optimizer, theirs)
    run(theirs, closure_of(Reference, twin, theirs, rows(dim=2)), 2)
    if way is Skipped:
        run(optimizer, closure_of(way, model, optimizer, rows(dim=2)), 2)
        assert_same_values(optimizer, theirs)


@each_input
def test_no_state_is_empty(desc: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 5)
    optimizer = Preconditioned.build(model, **inputs()[desc])
    run(optimizer, closure_of(Preconditioned, model, optimizer, rows(2)), 1)
    assert optimizer.state_dict()["state"]  # where torch.distributed.checkpoint asks for empty ones
    assert all(len(state) > 0 for state in optimizer.state.values())


# -- hooks -------------------------------------------------------------------------------------------------------


def mark_state(optimizer: Optimizer) -> None:
    optimizer.state["test"] = 1


def unmark(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict["marked"] = state_dict["state"].pop("test", None) == 1
    return state_dict


@each_input
@each_way
def test_state_dict_hooks_see_and_change_the_checkpoint(way: type[Way], desc: str) -> None:
    """State may hold a user's own entries under keys that are no parameters, as torch's own tests have it."""
    post = way.build(net(), **options_of(desc))
    post.register_state_dict_post_hook(unmark)
    assert post.state_dict()["marked"] is False
    optimizer = way.build(net(), **options_of(desc))
    optimizer.register_state_dict_pre_hook(mark_state)
    assert optimizer.state_dict()["state"]["test"] == 1
    assert optimizer.state_dict()["state"]["test"] == 1
    optimizer.register_state_dict_post_hook(unmark)
    state_dict = optimizer.state_dict()
    assert state_dict["marked"] is True
    assert "test" not in state_dict["state"]


@each_way
def test_state_of_the_users_own_is_saved_and_loaded_as_by_sgd(way: type[Way]) -> None:
    loaded = []
    for each in (way, Reference):
        optimizer = each.build(net())
        optimizer.state["note"] = 7
        other = each.build(net())
        other.load_state_dict(optimizer.state_dict())
        loaded.append(other.state["note"])
        other.step()
        assert other.state_dict()["state"]["note"] == 7
    assert loaded == [7, 7]


def set_lr_in_place(_: Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["lr"] = 0.002


def set_lr_in_a_copy(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    mine = copy.deepcopy(state_dict)
    mine["param_groups"][0]["lr"] = 0.003
    return mine


@each_input
@each_way
def test_load_state_dict_hooks_run_in_order(way: type[Way], desc: str) -> None:
    optimizer = way.build(net(), **options_of(desc))
    state_dict = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(set_lr_in_place)
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.002
    handle = optimizer.register_load_state_dict_pre_hook(set_lr_in_a_copy, prepend=True)
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.002
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(set_lr_in_a_copy)
    seen = []
    optimizer.register_load_state_dict_post_hook(lambda each: seen.append(each.param_groups[0]["lr"]))
    optimizer.load_state_dict(state_dict)
    assert seen == [0.003]


@each_way
def test_a_load_post_hook_may_leave_state_of_its_own(way: type[Way]) -> None:
    optimizer = way.build(net())
    optimizer.register_load_state_dict_post_hook(lambda each: each.state.__setitem__("loaded", True))
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state["loaded"] is True


@left_to_sgd
@each_input
@each_way
def test_step_hooks_run_until_they_are_removed(way: type[Way], desc: str) -> None:
    model = net()
    optimizer = way.build(model, **options_of(desc))
    closure = closure_of(way, model, optimizer, rows(dim=2))
    seen: list[tuple[str, Any]] = []
    before = optimizer.register_step_pre_hook(lambda each, args, kwargs: seen.append(("pre", (each, args, kwargs))))
    after = optimizer.register_step_post_hook(lambda each, args, kwargs: seen.append(("post", (each, args, kwargs))))
    optimizer.step()
    assert [when for when, _ in seen] == ["pre", "post"]
    optimizer.step(closure)
    assert [when for when, _ in seen] == ["pre", "post"] * 2
    assert seen[2][1][0] is optimizer
    assert seen[2][1][1][-1] is closure
    before.remove()
    optimizer.step(closure=closure)
    assert [when for when, _ in seen] == ["pre", "post", "pre", "post", "post"]
    assert seen[-1][1][2] == {"closure": closure}
    after.remove()
    optimizer.step()
    assert len(seen) == 5


@each_way
def test_a_step_pre_hook_may_change_the_arguments(way: type[Way]) -> None:
    optimizer = way.build(net())
    optimizer.register_step_pre_hook(lambda _, args, kwargs: ((args[0], lambda: 2.5), kwargs))
    assert optimizer.step(lambda: 1.0) == 2.5


@each_input
@each_way
def test_global_and_local_step_hooks_nest(way: type[Way], desc: str) -> None:
    optimizers = [way.build(net(), **options_of(desc)), SGD(net().parameters())]
    seen: list[int] = []

    def note(number: int) -> Callable[..., None]:
        return lambda *_: seen.append(number)

    handles = [register_optimizer_step_pre_hook(note(0)), register_optimizer_step_post_hook(note(5))]
    try:
        for optimizer in optimizers:
            handles += [optimizer.register_step_pre_hook(note(1)), optimizer.register_step_post_hook(note(2))]
        for optimizer in (*optimizers, optimizers[0]):
            optimizer.step()
        assert seen == [0, 1, 2, 5] * 3
    finally:
        for handle in handles:
            handle.remove()
    for optimizer in optimizers:
        optimizer.step()
    assert seen == [0, 1, 2, 5] * 3


# -- printing and copying ----------------------------------------------------------------------------------------


@each_input
@each_way
def test_the_optimizer_prints_every_number_that_sgd_prints(way: type[Way], desc: str) -> None:
    options = options_of(desc)
    ours, theirs = repr(way.build(net(), **options)), repr(SGD(net().parameters(), **options))
    assert ours.startswith("KFACOptimizer (\nParameter Group 0\n")
    lines = set(theirs.splitlines()[1:]) - {"    differentiable: False"}
    assert lines <= set(ours.splitlines())


def public(optimizer: Optimizer) -> set[str]:
    return {key for key in vars(optimizer) if not key.startswith("_")}


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


each_copy = pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])


@left_to_sgd
@each_copy
@each_input
@each_way
def test_a_copy_has_all_public_attributes_and_values_of_its_own(
    way: type[Way], desc: str, copied: Callable[[Any], Any]
) -> None:
    model = net()
    optimizer = way.build(model, **options_of(desc))
    run(optimizer, closure_of(way, model, optimizer, rows(dim=2)), 3)
    twin = copied(optimizer)
    assert type(twin) is KFACOptimizer
    assert public(twin) == public(optimizer)
    assert_identical(snapshot(twin), snapshot(optimizer))
    theirs = {id(param) for group in optimizer.param_groups for param in group["params"]}
    mine = [param for group in twin.param_groups for param in group["params"]]
    assert not theirs & {id(param) for param in mine}
    assert twin.state.keys() <= set(mine)
    before = snapshot(optimizer)
    for param in mine:
        param.grad = torch.ones_like(param)
    twin.step()
    assert_identical(snapshot(optimizer), before)
    assert not torch.equal(mine[0], before[0][0])


@left_to_sgd
@each_copy
@each_input
@each_way
def test_a_model_and_its_optimizer_copied_together_continue_the_run(
    way: type[Way], desc: str, copied: Callable[[Any], Any]
) -> None:
    model = net()
    optimizer = way.build(model, **inputs()[desc])
    x = rows(dim=2)
    run(optimizer, closure_of(way, model, optimizer, x), 3)
    other_model, other = copied((model, optimizer))
    params = [param for group in other.param_groups for param in group["params"]]
    assert all(mine is theirs for mine, theirs in zip(params, other_model.parameters(), strict=True))
    before = snapshot(optimizer)
    losses = run(other, closure_of(way, other_model, other, x), 4)
    assert_identical(snapshot(optimizer), before)
    assert_identical(run(optimizer, closure_of(way, model, optimizer, x), 4), losses)
    assert_identical(snapshot(other), snapshot(optimizer))


@left_to_sgd
@each_way
def test_an_optimizer_saved_whole_loads_whole(way: type[Way]) -> None:
    optimizer = way.build(net(), momentum=0.9)
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    assert_identical(snapshot(torch.load(file, weights_only=False)), snapshot(optimizer))


@left_to_sgd
@each_way
def test_a_scheduler_copied_with_its_optimizer_drives_the_copy(way: type[Way]) -> None:
    for each in (way, Reference):
        model = net()
        optimizer = each.build(model, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        run(optimizer, closure_of(way, model, optimizer, rows(dim=2)), 2, [scheduler])
        other_model, other, other_scheduler = copy.deepcopy((model, optimizer, scheduler))
        assert other_scheduler.optimizer is other
        run(other, closure_of(way, other_model, other, rows(dim=2)), 1, [other_scheduler])
        assert (optimizer.param_groups[0]["lr"], other.param_groups[0]["lr"]) == (0.025, 0.0125)


@each_way
def test_copying_runs_no_hook_and_copies_none(way: type[Way]) -> None:
    for each in (way, Reference):
        optimizer = each.build(net())
        seen: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda _, seen=seen: seen.append("state_dict"))
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("step"))
        copy.deepcopy(optimizer).step()
        assert seen == []


@pytest.mark.parametrize("step_size", [AdaptiveTrustRegion(), SelectedUpdates()], ids=["default", "selected"])
def test_tensors_are_made_on_the_models_device_whatever_the_default_device_is(step_size: StepSize) -> None:
    ends = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 4), nn.Tanh(), nn.Linear(4, 3))
        x, y = torch.randn(16, 300), torch.randn(16, 3)
        with torch.device(device):
            named = MonteCarlo(nn.MSELoss())
            optimizer = KFACOptimizer(model, lr=0.01, momentum=0.9, step_size=step_size, estimate=named)
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        ends.append([param.detach().clone() for param in model.parameters()])
    for ours, theirs in zip(*ends, strict=True):
        assert torch.equal(ours, theirs)
