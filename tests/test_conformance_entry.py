"""An `OptimizerInfo` of our own: torch's generic checks over the choices that only `KFACOptimizer` has.

`test_conformance.py` asks what depends on SGD's arguments; here the same of inputs that name an inverse, a step size, a
refresh and so on. The claims are those of torch's test/test_optim.py, by its names in the docstrings. What it has on
hooks, sparse and complex gradients, devices and arguments that are refused does not depend on these choices.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain import assert_identical, clones
from torch import Tensor, nn
from torch.optim import sgd
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput, optim_db

from kfac_optim import (
    EKFAC,
    AdaptiveTrustRegion,
    AutoInverse,
    Background,
    BlockDiagonal,
    Cholesky,
    CurvaturePropagation,
    DoublyFactored,
    Eigen,
    ExactGGN,
    InverseAndRoot,
    IterateAverage,
    KFACOptimizer,
    LevenbergMarquardt,
    LineSearch,
    LowRank,
    MonteCarlo,
    NewtonSchulz,
    QuadraticModel,
    SampleSpace,
    SelectedUpdates,
    Staggered,
    Structure,
    Subsample,
    SumOfTerms,
    TrustRegion,
    WeightSharing,
)
from kfac_optim.step import inner_step

CRITERION = nn.MSELoss()
SHARED: dict[str, Any] = {"lr": 0.01, "factor_update_period": 1, "inverse_update_period": 3, "damping": 0.01}
CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "some left": {"skip_layers": ["4"], "momentum": 0.9, "nesterov": True},
    "auto": {"inverse": AutoInverse()},
    "cholesky": {"inverse": Cholesky(), "momentum": 0.9, "nesterov": True},
    "eigen": {"inverse": Eigen(), "momentum": 0.9, "dampening": 0.1},
    "ekfac": {"inverse": EKFAC(), "weight_decay": 0.1},
    "low rank": {"inverse": LowRank(rank=1, sketch=2)},
    "newton": {"inverse": NewtonSchulz(), "momentum": 0.9},
    "doubly factored": {"inverse": {"2": DoublyFactored(channels=2)}},
    "sum of terms": {"inverse": SumOfTerms(), "estimate": ExactGGN(CRITERION)},
    "sample space": {"inverse": SampleSpace(momentum=0.5), "estimate": ExactGGN(CRITERION)},
    "monte carlo": {"estimate": MonteCarlo(CRITERION), "momentum": 0.9},
    "propagation": {"estimate": CurvaturePropagation(CRITERION)},
    "trust region": {"step_size": TrustRegion(), "l2_in_curvature": True, "weight_decay": 0.1},
    "no region": {"step_size": AdaptiveTrustRegion(), "kl_clip": None, "damping": 1.0},
    "quadratic": {"step_size": QuadraticModel(), "estimate": MonteCarlo(CRITERION)},
    "line search": {"step_size": LineSearch(), "estimate": ExactGGN(CRITERION), "lr": 1.0},
    "levenberg": {"adapt_damping": LevenbergMarquardt(interval=2), "estimate": MonteCarlo(CRITERION)},
    "rejecting": {"adapt_damping": LevenbergMarquardt(interval=2, reject=True), "estimate": MonteCarlo(CRITERION)},
    "selected": {"step_size": SelectedUpdates(), "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "selected, some left": {
        "step_size": SelectedUpdates(),
        "momentum": 0.9,
        "inverse": InverseAndRoot(),
        "skip_layers": ["4"],
    },
    "averaged": {"average": IterateAverage(eta=2), "momentum": 0.9},
    "staggered": {"refresh": Staggered()},
    "background": {"refresh": Background(max_staleness=2, deterministic=True), "momentum": 0.9},
    "structures": {"structure": (BlockDiagonal(2), Structure.DIAGONAL)},
    "inputs alone": {"structure": (Structure.DENSE, Structure.IDENTITY)},
    "subsample": {"subsample": Subsample(examples=3), "weight_sharing": WeightSharing.REDUCE},
    "half factors": {"factor_dtype": torch.float64, "max_factor_dim": 3},
}


def optim_inputs_func_kfac(**_: Any) -> list[OptimizerInput]:
    return [OptimizerInput(params=None, kwargs={**SHARED, **kwargs}, desc=desc) for desc, kwargs in CHOICES.items()]


KFAC_INFO = OptimizerInfo(
    KFACOptimizer,
    optim_inputs_func=optim_inputs_func_kfac,
    scheduler_inputs=next(info for info in optim_db if info.optim_cls is torch.optim.SGD).scheduler_inputs,
    supported_impls=("foreach", "fused"),
    not_og_supported_flags=("foreach", "fused", "maximize"),
    supports_fused_on=("cpu", "cuda"),
    supports_sparse=True,
    supports_complex=True,
)
INPUTS = {entry.desc: entry.kwargs for entry in KFAC_INFO.optim_inputs_func(device="cpu")}
each_input = pytest.mark.parametrize("desc", INPUTS)


def net() -> nn.Sequential:
    """4 → 6 → 5 → 2, the same at each call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def build(desc: str, **options: Any) -> tuple[nn.Sequential, KFACOptimizer]:
    model = net()
    return model, KFACOptimizer(model, **{**INPUTS[desc], **options})


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def closure_of(model: nn.Module, optimizer: KFACOptimizer, criterion: nn.Module = CRITERION) -> Callable[[], Tensor]:
    x, target = batch()

    def closure() -> Tensor:
        loss = criterion(model(x), target)
        if torch.is_grad_enabled():
            optimizer.zero_grad()
            loss.backward()
        return loss

    return closure


def run(model: nn.Module, optimizer: KFACOptimizer, steps: int, criterion: nn.Module = CRITERION) -> list[float]:
    closure = closure_of(model, optimizer, criterion)
    return [float(optimizer.step(closure).detach()) for _ in range(steps)]


def held(model: nn.Module, optimizer: KFACOptimizer) -> list[Any]:
    return [clones(model.parameters()), optimizer.state_dict()]


# -- the step ----------------------------------------------------------------------------------------------------


@each_input
def test_the_loss_falls(desc: str) -> None:
    """forloop_goes_right_direction."""
    losses = run(*build(desc, foreach=False), 20)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("schedule", range(len(KFAC_INFO.scheduler_inputs)))
@pytest.mark.parametrize("desc", ["default", "no region", "quadratic", "line search", "selected"])
def test_the_loss_falls_under_schedulers(desc: str, schedule: int) -> None:
    """The same with schedulers, of a number and of a tensor as the rate."""
    for lr in (INPUTS[desc]["lr"], torch.tensor(INPUTS[desc]["lr"])):
        model, optimizer = build(desc, lr=lr)
        schedulers = [make(optimizer) for make in KFAC_INFO.scheduler_inputs[schedule]]
        losses = []
        for _ in range(15):
            losses += run(model, optimizer, 1)
            for scheduler in schedulers:
                scheduler.step(*([losses[-1]] if isinstance(scheduler, ReduceLROnPlateau) else []))
        assert losses[-1] < losses[0]


@each_input
def test_a_rate_in_a_tensor_takes_the_steps_of_a_number(desc: str) -> None:
    """tensor_lr."""
    (model, optimizer), (twin, other) = build(desc), build(desc, lr=torch.tensor(INPUTS[desc]["lr"]))
    run(model, optimizer, 5)
    run(twin, other, 5)
    torch.testing.assert_close(clones(twin.parameters()), clones(model.parameters()))


@pytest.mark.parametrize("flag", KFAC_INFO.supported_impls)
@each_input
def test_implementations_take_the_steps_of_the_loop(desc: str, flag: str) -> None:
    """foreach_matches_forloop, fused_matches_forloop."""
    (model, optimizer), (twin, other) = build(desc, foreach=False), build(desc, **{flag: True})
    run(model, optimizer, 5)
    run(twin, other, 5)
    torch.testing.assert_close(clones(twin.parameters()), clones(model.parameters()), rtol=1e-4, atol=1e-6)


def test_the_default_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """defaults_changed_to_foreach: which of them torch takes on a device is asked at each step, as by SGD."""
    asked: list[bool] = []

    def default(*_: Any, **__: Any) -> tuple[bool, bool]:
        asked.append(True)
        return False, True

    called: list[int] = []
    original = sgd._multi_tensor_sgd
    monkeypatch.setattr(inner_step, "_suits_fused_cpu", lambda *_: False)  # as on an accelerator
    monkeypatch.setattr(sgd, "_default_to_fused_or_foreach", default)
    monkeypatch.setattr(sgd, "_multi_tensor_sgd", lambda *a, **k: (called.append(len(a[0])), original(*a, **k)))
    run(*build("default"), 1)
    assert asked
    assert sum(called) == 8


@each_input
def test_groups_have_rates_of_their_own(desc: str) -> None:
    """param_groups_lr: one at zero stays where it is, the other trains."""
    model = net()
    groups = [{"params": list(model[:3].parameters())}, {"params": list(model[3:].parameters()), "lr": 0.0}]
    optimizer = KFACOptimizer(groups, model=model, **{**INPUTS[desc], "weight_decay": 0})
    before = clones(model.parameters())
    run(model, optimizer, 5)
    moved = [not torch.equal(new, old) for new, old in zip(clones(model.parameters()), before, strict=True)]
    assert moved == [True] * 4 + [False] * 4


@pytest.mark.parametrize("desc", [desc for desc in INPUTS if desc != "line search"])
def test_groups_have_a_decay_of_their_own(desc: str) -> None:
    """param_groups_weight_decay: the first decays, and gets smaller than without; `LineSearch` refuses any."""
    norms = []
    for decay in (0.0, 3.0):
        model = net()
        groups = [{"params": list(model[:3].parameters()), "weight_decay": decay}, {"params": model[3:].parameters()}]
        own = {"weight_decay": 0, "l2_in_curvature": desc in ("quadratic", "trust region")}
        optimizer = KFACOptimizer(groups, model=model, **{**INPUTS[desc], **own})
        run(model, optimizer, 10)
        norms.append(float(sum(param.square().sum() for param in model[:3].parameters()).detach()))
    assert norms[1] < norms[0]


@each_input
def test_a_step_without_gradients_changes_nothing(desc: str) -> None:
    """step_is_noop_when_params_have_no_grad."""
    model, optimizer = build(desc)
    before = clones(model.parameters())
    x, target = batch()
    optimizer.step(lambda: CRITERION(model(x), target))
    assert_identical(clones(model.parameters()), before)


@each_input
def test_a_step_with_gradients_of_zero_changes_nothing(desc: str) -> None:
    """step_is_noop_for_zero_grads."""
    model, optimizer = build(desc, weight_decay=0)
    before = clones(model.parameters())
    x, _ = batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        output = model(x)
        loss = CRITERION(output, output.detach().clone())
        if torch.is_grad_enabled():
            loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert_identical(clones(model.parameters()), before)


# -- checkpoints and copies --------------------------------------------------------------------------------------


@each_input
def test_it_can_be_printed(desc: str) -> None:
    """optimizer_can_be_printed, with the numbers of its groups."""
    _, optimizer = build(desc)
    lines = repr(optimizer).splitlines()
    assert all(f"    {key}: {optimizer.defaults[key]}" in lines for key in INPUTS[desc] if key in optimizer.defaults)


@each_input
def test_a_checkpoint_continues_the_run(desc: str) -> None:
    """state_dict_deterministic, to the bit."""
    model, optimizer = build(desc)
    run(model, optimizer, 4)
    twin, other = build(desc)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    other.load_state_dict(saved)
    assert_identical(saved, kept)
    assert run(model, optimizer, 5) == run(twin, other, 5)
    assert_identical(held(model, optimizer), held(twin, other))


@each_input
def test_a_checkpoint_from_before_a_flag_existed_loads(desc: str) -> None:
    """can_load_older_state_dict."""
    model, optimizer = build(desc)
    run(model, optimizer, 3)
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in KFAC_INFO.not_og_supported_flags:
            del group[flag]
    optimizer.load_state_dict(old)
    for flag in KFAC_INFO.not_og_supported_flags:
        assert optimizer.param_groups[0][flag] == optimizer.defaults[flag]
    run(model, optimizer, 1)


@each_input
def test_a_checkpoint_loads_with_and_without_names(desc: str) -> None:
    """can_load_from_to_named_state_dict."""
    runs = []
    for names, names_there in ((False, False), (False, True), (True, False), (True, True)):
        model = net()
        optimizer = KFACOptimizer(
            model.named_parameters() if names else model.parameters(), model=model, **INPUTS[desc]
        )
        run(model, optimizer, 3)
        twin = copy.deepcopy(model)
        params = twin.named_parameters() if names_there else twin.parameters()
        other = KFACOptimizer(params, model=twin, **INPUTS[desc])
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert ("param_names" in other.param_groups[0]) == (names or names_there)
        runs.append(run(twin, other, 3))
    assert runs == [runs[0]] * 4


@each_input
def test_a_checkpoint_is_equal_in_a_weights_only_file(desc: str) -> None:
    """save_load_equality_with_weights_only."""
    model, optimizer = build(desc)
    run(model, optimizer, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert_identical(torch.load(file, weights_only=True), optimizer.state_dict())


def test_a_count_of_steps_that_is_no_tensor_is_refused() -> None:
    """load_nontensor_step, which torch has for files from before its counts were tensors; ours always were."""
    model, optimizer = build("selected")
    run(model, optimizer, 3)
    old = copy.deepcopy(optimizer.state_dict())
    for state in old["state"].values():
        state["step"] = state["step"].item()
    with pytest.raises(ValueError, match=r"'step' of '3\.weight' is 3.0, and must be a tensor"):
        optimizer.load_state_dict(old)


@each_input
def test_a_copy_has_all_public_attributes(desc: str) -> None:
    """deepcopy_copies_all_public_attrs; and copies of model, optimizer and named criterion go on as they do."""
    model, optimizer = build(desc)
    run(model, optimizer, 3)
    twin, other, criterion = copy.deepcopy((model, optimizer, CRITERION))
    assert {key for key in vars(other) if key[0] != "_"} == {key for key in vars(optimizer) if key[0] != "_"}
    assert run(model, optimizer, 4) == run(twin, other, 4, criterion)


@each_input
def test_no_state_is_empty(desc: str) -> None:
    """non_empty_state; in a checkpoint `torch.distributed.checkpoint` asks for empty ones."""
    model, optimizer = build(desc)
    run(model, optimizer, 1)
    optimizer.state_dict()
    assert optimizer.state
    assert all(optimizer.state.values())


@each_input
def test_no_gradient_is_written_to(desc: str) -> None:
    """What torch asks of its foreach and fused implementations: `.grad` belongs to the user."""
    for flag in KFAC_INFO.supported_impls:
        model, optimizer = build(desc, **{flag: True})
        x, target = batch()
        for _ in range(3):
            expected = torch.autograd.grad(CRITERION(model(x), target), list(model.parameters()))
            optimizer.step(closure_of(model, optimizer))
            assert_identical(clones(param.grad for param in model.parameters()), clones(expected))
