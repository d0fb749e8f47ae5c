"""Small blocks of equal shapes are preconditioned in one batch: as one by one, whatever else the model has."""

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.plain import FREQUENT, mlp, train
from torch import Tensor, nn

from kfac_optim import EKFAC, Cholesky, Eigen, Inverse, KFACOptimizer, LowRank, NewtonSchulz, SelectedUpdates, Structure
from kfac_optim.blocks import preconditioning
from kfac_optim.blocks.preconditioning import Stacks, precondition, to_params
from kfac_optim.specs import LayerSpec

pytestmark = pytest.mark.usefixtures("float64")


class Net(nn.Module):
    """Equal layers, and all that is not equal to them."""

    def __init__(self) -> None:
        super().__init__()
        self.equal = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())])
        self.bare = nn.Sequential(*[layer for _ in range(2) for layer in (nn.Linear(4, 4, bias=False), nn.Tanh())])
        self.frozen_bias, self.other = nn.Linear(4, 4), nn.Linear(4, 5)
        self.frozen_bias.bias.requires_grad_(False)
        self.maps = nn.Sequential(*[layer for _ in range(2) for layer in (nn.Conv1d(1, 1, 3, padding=1), nn.Tanh())])
        self.norms = nn.Sequential(nn.LayerNorm(5), nn.LayerNorm(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.other(self.frozen_bias(self.bare(self.equal(x))))
        out: Tensor = self.norms(self.maps(hidden.unsqueeze(1)).squeeze(1))
        return out


def trained(**options: Any) -> KFACOptimizer:
    torch.manual_seed(0)
    model = Net()
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, **FREQUENT, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    optimizer._model = model  # type: ignore[attr-defined]
    return optimizer


DIAGONAL = (Structure.DIAGONAL, Structure.DENSE)
WITHOUT_G = (Structure.DENSE, Structure.IDENTITY)


@pytest.mark.parametrize(
    ("inverse", "structure"),
    [
        (Cholesky(), None),
        (Cholesky(torch.float32), None),
        (Cholesky(), DIAGONAL),
        (Cholesky(), WITHOUT_G),
        (LowRank(1), None),
        (NewtonSchulz(), None),
        (Eigen(), None),
        (Eigen(), DIAGONAL),
        (EKFAC(), None),
    ],
    ids=str,
)
def test_a_batch_gives_what_each_block_gives(inverse: Inverse[Any], structure: Any) -> None:
    optimizer = trained(inverse=inverse, structure=structure)
    blocks = optimizer._binding.coverage.blocks
    grads = [[torch.randn_like(param) for param in block.params] for block in blocks]
    alone = [
        to_params(block, precondition(block, of_block), of_block) for block, of_block in zip(blocks, grads, strict=True)
    ]
    for together, one, of_block in zip(Stacks().precondition(blocks, grads), alone, grads, strict=True):
        for ours, theirs, grad in zip(together, one, of_block, strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.stride() == grad.stride()
            assert torch.allclose(ours, theirs, rtol=1e-6 if inverse == Cholesky(torch.float32) else 1e-12, atol=1e-14)


def batches(monkeypatch: pytest.MonkeyPatch, optimizer: KFACOptimizer) -> list[int]:
    """The sizes of the batches of more than one block in the next step."""
    found = []
    whole = preconditioning._precondition_stack

    def noted(block: Any, state: Any, grads: Any) -> Any:
        found.append(len(grads[0]))
        return whole(block, state, grads)

    monkeypatch.setattr(preconditioning, "_precondition_stack", noted)
    optimizer._model(torch.randn(8, 4)).square().mean().backward()  # type: ignore[attr-defined]
    optimizer.step()
    return sorted(size for size in found if size > 1)


def test_equal_layers_go_together_and_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batches(monkeypatch, trained()) == [2, 2, 3, 3]  # the frozen bias goes with those that have none


def test_a_damping_of_its_own_takes_a_layer_out_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = trained()
    model: Net = optimizer._model  # type: ignore[attr-defined]
    first = {*model.equal[0].parameters()}
    groups = [
        {"params": [param for param in model.parameters() if param in first], "damping": 0.1},
        {"params": [param for param in model.parameters() if param not in first]},
    ]
    again = KFACOptimizer(groups, model=model, lr=0.1, **FREQUENT)
    again._model = model  # type: ignore[attr-defined]
    optimizer.remove_hooks()
    assert batches(monkeypatch, again) == [2, 2, 2, 3]


def test_large_layers_go_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioning, "_SMALL", 15)
    assert batches(monkeypatch, trained()) == [2, 2]  # convolutions and norms alone are as small


def test_on_an_accelerator_layers_go_together_whose_products_take_longer_on_a_cpu() -> None:
    optimizer = trained(inverse=LowRank(1))
    block = optimizer._binding.coverage.blocks[0]
    spec = LayerSpec("wide", ("weight", "bias"), 3073, 768)
    for device, small in (("cpu", False), ("cuda", True)):
        wide = SimpleNamespace(spec=spec, home=(torch.float32, torch.device(device)), state=block.state)
        assert preconditioning._is_small(wide) == small


def test_not_more_go_together_than_fit_into_one_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioning, "_TOGETHER", 45)  # two of 5 x 4
    optimizer = trained()
    assert batches(monkeypatch, optimizer) == [2, 2, 2, 2]
    assert agree(Stacks(), optimizer)


def agree(kept: Stacks, optimizer: KFACOptimizer) -> bool:
    """Whether stacks that are kept give what new ones do."""
    blocks = optimizer._binding.coverage.blocks
    grads = [[torch.ones_like(param) for param in block.params] for block in blocks]
    pairs = zip(kept.precondition(blocks, grads), Stacks().precondition(blocks, grads), strict=True)
    return all(torch.equal(ours, theirs) for two in pairs for ours, theirs in zip(*two, strict=True))


@pytest.mark.parametrize("inverse", [Cholesky(), LowRank(1), NewtonSchulz(), Eigen(), EKFAC()], ids=str)
def test_stacks_that_are_kept_follow_refreshes_and_loads(inverse: Inverse[Any]) -> None:
    optimizer = trained(inverse=inverse)
    model, kept = optimizer._model, Stacks()  # type: ignore[attr-defined]
    assert agree(kept, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    clock = optimizer._binding.coverage.blocks[0].clock
    before = clock.refreshed_at
    while clock.refreshed_at == before:
        optimizer.zero_grad()
        model(3 * torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        assert clock.step < 20
    assert agree(kept, optimizer), "after a refresh"
    optimizer.load_state_dict(saved)
    assert agree(kept, optimizer), "after a checkpoint was loaded"
    optimizer._binding.coverage.blocks[1].restart()
    assert agree(kept, optimizer), "after a block has begun again"
    optimizer.param_groups[0]["damping"] = 1.0
    assert agree(kept, optimizer), "with another damping"
    model.float()
    for block in optimizer._binding.coverage.blocks:
        block.follow()
    assert agree(kept, optimizer), "after the model was moved"


def test_stacks_are_made_once_for_steps_without_a_refresh() -> None:
    optimizer = trained()
    kept = Stacks()
    agree(kept, optimizer)
    before = [stack.state for stack in kept._stacks.values()]
    agree(kept, optimizer)
    assert len(before) == 4
    assert all(one is other.state for one, other in zip(before, kept._stacks.values(), strict=True))


def test_copies_and_pickles_of_the_optimizer_hold_no_stacks() -> None:
    optimizer = trained()
    assert optimizer._executor.gradients.stacks._stacks
    copied = copy.deepcopy(optimizer)
    assert not copied._executor.gradients.stacks._stacks
    assert b"Stack" not in pickle.dumps(optimizer)


def test_stacks_see_tensors_that_take_the_place_of_others() -> None:
    optimizer = trained()
    kept, block = Stacks(), optimizer._binding.coverage.blocks[0]
    for factor in (2.0, 3.0):  # the second is as new as the first
        block.state.a = type(block.state.a)(block.state.a.inverse * factor)
        assert agree(kept, optimizer)


def test_stacks_let_go_of_blocks_that_were_replaced() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.01, momentum=0.9, step_size=SelectedUpdates(), factor_update_period=1)
    train(model, optimizer, 2)
    gone = [weakref.ref(block) for block in optimizer._binding.coverage.blocks]
    model[0].bias.requires_grad_(False)
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
    train(model, optimizer, 2)
    gc.collect()
    assert gone[0]() is None


@pytest.mark.parametrize("options", [{}, {"step_size": SelectedUpdates()}], ids=["default", "selected"])
def test_what_all_ranks_update_goes_alone(options: dict[str, Any]) -> None:
    """Beside others, which differ from rank to rank, its bits would differ from rank to rank too."""
    optimizer = trained(**options)
    blocks = [block for block in optimizer._binding.coverage.blocks if block.name in ("equal.0", "equal.2", "equal.4")]
    stacks = optimizer._executor.gradients.stacks
    assert len({stacks._number(block) for block in blocks}) == 1
    stacks.goes_alone = frozenset(blocks[0].params[:1]).__contains__
    assert stacks._number(blocks[0]) is None
    assert stacks._number(blocks[1]) == stacks._number(blocks[2]) is not None
