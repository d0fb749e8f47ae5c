"""Checkpoints through `torch.distributed.checkpoint` on one process, in each of its forms."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.plain import assert_identical, batch, clones, mlp, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from kfac_optim import EKFAC, Background, Cholesky, Inverse, KFACOptimizer, NewtonSchulz, SelectedUpdates, TrustRegion

Run = tuple[nn.Module, KFACOptimizer]


def new(momentum: float, inverse: Inverse[Any], **options: Any) -> Run:
    model = mlp()
    return model, KFACOptimizer(
        model, lr=0.1, momentum=momentum, factor_update_period=1, inverse_update_period=3, inverse=inverse, **options
    )


def through_files(state: Any, template: Any, folder: Path) -> None:
    """Save `state`, and load it into `template`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({"optimizer": state}, checkpoint_id=folder)
        dcp.load({"optimizer": template}, checkpoint_id=folder)


def assert_goes_on_alike(run: Run, other: Run) -> None:
    other[0].load_state_dict(run[0].state_dict())
    for model, optimizer in (run, other):
        train(model, optimizer, 4, start=5)
    assert_identical(clones(other[0].parameters()), clones(run[0].parameters()))
    assert_identical(other[1].factors(), run[1].factors())


FORMS = {
    "plain": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "on the CPU": StateDictOptions(cpu_offload=True),
    "full and on the CPU": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("through", ["memory", "files"])
def test_every_form_resumes_bitwise(form: str, through: str, momentum: float, tmp_path: Path) -> None:
    """From memory into an optimizer that has not been asked for its state yet."""
    options = FORMS[form]
    run, other = new(momentum, NewtonSchulz()), new(momentum, NewtonSchulz())
    train(*run, 5)
    state = copy.deepcopy(get_optimizer_state_dict(*run, options=options))
    if through == "files":
        template = get_optimizer_state_dict(*other, options=options)
        through_files(state, template, tmp_path)
        state = template
    set_optimizer_state_dict(*other, state, options=options)
    assert_goes_on_alike(run, other)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_new_optimizer_that_has_loaded_its_own_state_has_places_for_all(momentum: float, tmp_path: Path) -> None:
    """As `Accelerator.prepare` has it load what it holds."""
    run, other = new(momentum, EKFAC()), new(momentum, EKFAC())
    other[1].load_state_dict(other[1].state_dict())
    train(*run, 5)
    template = get_optimizer_state_dict(*other)
    through_files(get_optimizer_state_dict(*run), template, tmp_path)
    set_optimizer_state_dict(*other, template)
    assert_goes_on_alike(run, other)


def as_a_dict(run: Run, other: Run, folder: Path) -> None:
    template = other[1].state_dict()
    through_files(run[1].state_dict(), template, folder)
    other[1].load_state_dict(template)


def as_itself(run: Run, other: Run, folder: Path) -> None:
    """An optimizer has what torch calls stateful objects have."""
    through_files(run[1], other[1], folder)


DIRECT: dict[str, Callable[[Run, Run, Path], None]] = {"as a dict": as_a_dict, "as itself": as_itself}


@pytest.mark.parametrize("way", DIRECT)
def test_the_optimizers_own_state_dict_resumes_bitwise_where_there_is_no_momentum(way: str, tmp_path: Path) -> None:
    run, other = (new(0.0, EKFAC(), step_size=TrustRegion()) for _ in range(2))
    train(*run, 5)
    DIRECT[way](run, other, tmp_path)
    assert_goes_on_alike(run, other)


@pytest.mark.parametrize("way", DIRECT)
def test_momentum_that_a_new_optimizer_cannot_take_so_is_missed_and_the_remedy_works(way: str, tmp_path: Path) -> None:
    """Of `optim.SGD` the momentum of a new optimizer stays behind without a word."""
    run, other = new(0.9, EKFAC()), new(0.9, EKFAC())
    train(*run, 5)
    with pytest.raises(ValueError, match=r"saved with 2 momentum buffers of '0', and has 0.*get_optimizer_state_dict"):
        DIRECT[way](run, other, tmp_path / "first")
    get_optimizer_state_dict(*other)
    DIRECT[way](run, other, tmp_path / "second")
    assert_goes_on_alike(run, other)


def test_a_momentum_buffer_that_is_gone_is_missed() -> None:
    run, other = new(0.9, EKFAC()), new(0.9, EKFAC())
    train(*run, 5)
    state = run[1].state_dict()
    del state["state"][3]["momentum_buffer"]
    with pytest.raises(ValueError, match=r"saved with 2 momentum buffers of '2', and has 1"):
        other[1].load_state_dict(state)


def test_a_refresh_that_was_under_way_is_made_anew_where_a_new_optimizer_has_no_place_for_it(tmp_path: Path) -> None:
    refresh = Background(max_staleness=3, deterministic=True)
    run, other = (new(0.9, Cholesky(), refresh=refresh) for _ in range(2))
    train(*run, 5)
    assert any(block.under_way is not None for block in run[1]._binding.coverage.blocks)
    template = get_optimizer_state_dict(*other)
    through_files(get_optimizer_state_dict(*run), template, tmp_path)
    set_optimizer_state_dict(*other, template)
    train(*other, 1, start=5)
    assert {block.clock.refreshed_at for block in other[1]._binding.coverage.blocks} == {5}


class Conv1D(nn.Module):
    """As Hugging Face's: a function alone shows its matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 5) / 2), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def of_a_function() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Conv1D(), nn.Tanh(), nn.Linear(5, 3)).double()


def resumed_without_a_model(
    folder: Path, net: Callable[[], nn.Module] = mlp, *, given: bool = False, forward: bool = False, **options: Any
) -> None:
    """Resume in an optimizer that has to find its model, or does not."""
    options = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 1, **options}
    model, other = net(), net()
    optimizer = KFACOptimizer(model, **options)
    train(model, optimizer, 5)
    resumed = KFACOptimizer(other.parameters(), model=other if given else None, **options)
    if forward:
        with torch.set_grad_enabled(net is of_a_function):
            other(batch())
    template = get_optimizer_state_dict(other, resumed)
    through_files(get_optimizer_state_dict(model, optimizer), template, folder)
    set_optimizer_state_dict(other, resumed, template)
    assert_goes_on_alike((model, optimizer), (other, resumed))


def test_statistics_that_were_not_read_before_the_model_was_known_are_missed(tmp_path: Path) -> None:
    told = r"has no statistics of '0', '2'.*KFACOptimizer\(model, \.\.\.\), or run one forward"
    with pytest.warns(UserWarning, match=told) as caught, pytest.raises(AssertionError):
        resumed_without_a_model(tmp_path)
    assert len(caught) == 1, "four steps follow"


@pytest.mark.parametrize("how", [{"given": True}, {"forward": True}, {"skip_layers": ("*",)}], ids=str)
def test_where_none_were_to_be_read_and_by_both_remedies_nothing_is_missed(how: dict[str, Any], tmp_path: Path) -> None:
    resumed_without_a_model(tmp_path, **how)


def test_statistics_of_a_matrix_that_no_forward_had_shown_are_missed(tmp_path: Path) -> None:
    told = r"has no statistics of '0', which.*run one forward with gradients before"
    with pytest.warns(UserWarning, match=told), pytest.raises(AssertionError):
        resumed_without_a_model(tmp_path, of_a_function, given=True)


@pytest.mark.parametrize("how", [{}, {"step_size": SelectedUpdates()}], ids=str)
def test_after_a_forward_with_gradients_nothing_is_missed(how: dict[str, Any], tmp_path: Path) -> None:
    resumed_without_a_model(tmp_path, of_a_function, given=True, forward=True, **how)
